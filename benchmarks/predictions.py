"""Compare the predictions of `fullshard.explain` with published runs: memory and tokens per second of one GPU.

    python benchmarks/predictions.py            # half a minute, on any machine

The models are written like those of the published programs (torchtitan: RMSNorm by hand in fp32, complex rotary embedding,
logits in fp32), with `engine="fsdp2"`, fused AdamW and the allocator's defaults. Constants of the predictions were fitted to
the rows marked `fitted`: rows 1 and 9 for the share of peak FLOPS that matrix products reach on H100 and A100, MPT 760m and 7b
for the decrease of this share with smaller products, MPT 65,536 for the Triton kernel.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fullshard
from fullshard.foresight.facts import COMPILED
from fullshard.foresight.hardware import GPUS

GIB = 2**30


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, dim // heads
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, shared * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = rotate(q.view(rows, length, self.heads, self.size), turns)
        k = rotate(k.view(rows, length, self.shared, self.size), turns)
        v = v.view(rows, length, self.shared, self.size)
        if self.shared != self.heads:
            shape = (rows, length, self.shared, self.heads // self.shared, self.size)
            k, v = (t[:, :, :, None, :].expand(shape).reshape(rows, length, self.heads, self.size) for t in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o(out.transpose(1, 2).contiguous().view(rows, length, dim))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(shape.dim, shape.heads, shape.shared), Mlp(shape.dim, shape.hidden)
        self.norm1, self.norm2 = Norm(shape.dim), Norm(shape.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


def every_second_product() -> Any:
    """Return the contexts of torchtitan's selective recomputation ("op"), which saves attention and every second product."""
    counts = {True: 0, False: 0}

    def choose(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if counts[ctx.is_recompute] % 2 == 0 else CheckpointPolicy.MUST_SAVE
        saved = func == torch.ops.aten._scaled_dot_product_flash_attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class Llama(nn.Module):
    def __init__(self, shape: Shape, recompute: str, length: int) -> None:
        super().__init__()
        self.tok, self.norm = nn.Embedding(shape.vocabulary, shape.dim), Norm(shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.register_buffer("turns", torch.empty(1, length, 1, shape.dim // shape.heads // 2, dtype=torch.complex64))
        again = {"block": {}, "op": {"context_fn": every_second_product}}.get(recompute)
        if again is not None:
            for layer in self.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **again)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x)).float()


@dataclass(frozen=True)
class Shape:
    dim: int
    layers: int
    heads: int
    shared: int
    hidden: int
    vocabulary: int


class MptBlock(nn.Module):
    """A block of llm-foundry: norms in the compute dtype, no bias, matrices of 3 and 4 times the width."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).reshape(rows, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mpt(nn.Module):
    def __init__(self, shape: Shape, recompute: str, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50368, shape.dim), nn.Embedding(length, shape.dim)
        self.blocks = nn.ModuleList(MptBlock(shape.dim, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim, bias=False)
        if recompute == "block":
            for block in self.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)  # the loss of llm-foundry is one kernel on bf16 logits


LLAMA2_7B = Shape(4096, 32, 32, 32, 11008, 32000)
LLAMA3_8B = Shape(4096, 32, 32, 8, 14336, 128256)


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        held: True if the program kept its logits during backward, as torchtitan did at first.
        attention: speed of its attention kernel, relative to torch's.
    """

    name: str
    shape: Shape
    gpu: str
    net: str | None
    ranks: int
    batch: int
    length: int
    recompute: str
    tokens: float
    reserved: float | None = None
    active: float | None = None
    held: bool = False
    fitted: bool = False
    engine: str = "fsdp2"
    microbatches: int = 1
    attention: float = 1.0
    compiled: bool = False


ROWS = (
    Row("1 Llama 3.1 8B, SAC", LLAMA3_8B, "h100-96", "ib-400", 8, 2, 8192, "op", 5762, 82.4, fitted=True),
    Row("2 the same, compiled", LLAMA3_8B, "h100-96", "ib-400", 8, 2, 8192, "op", 6667, 77.0, compiled=True),
    Row("3 as 1, 128 GPUs", LLAMA3_8B, "h100-96", "ib-400", 128, 2, 8192, "op", 5605, 67.0),
    Row("4 as 2, 128 GPUs", LLAMA3_8B, "h100-96", "ib-400", 128, 2, 8192, "op", 6514, 62.0, compiled=True),
    Row("5 Llama 2 7B, AC", LLAMA2_7B, "h100-96", "ib-400", 8, 8, 2048, "block", 6200, 31.0, 22.7, held=True),
    Row("6 the same, SAC", LLAMA2_7B, "h100-96", "ib-400", 8, 8, 2048, "op", 6700, 59.4, 49.5, held=True),
    Row("7 the same, FSDP1", LLAMA2_7B, "h100-96", "ib-400", 8, 8, 2048, "op", 6600, 63.9, 50.4, held=True),
    Row("8 Llama 3 8B, SAC", LLAMA3_8B, "a100-80", "ib-200", 64, 1, 8192, "op", 2973),
    Row("9 Llama 2 7B, FSDP1", LLAMA2_7B, "a100-80", "ib-400", 128, 2, 4096, "none", 3700, fitted=True),
    Row("10 the same, H100", LLAMA2_7B, "h100-sxm", "ib-800", 96, 2, 4096, "none", 7500),
)

TRITON = 0.62
"""Speed of llm-foundry's Triton kernel of FlashAttention-1, relative to FlashAttention-2. Fitted to the rows of 65,536."""

MPT = {
    "760m": Shape(1536, 24, 12, 12, 0, 0),
    "1b": Shape(2048, 24, 16, 16, 0, 0),
    "3b": Shape(2560, 32, 20, 20, 0, 0),
    "7b": Shape(4096, 32, 32, 32, 0, 0),
    "13b": Shape(5120, 40, 40, 40, 0, 0),
    "30b": Shape(7168, 48, 56, 56, 0, 0),
    "70b": Shape(8192, 80, 64, 64, 0, 0),
}


def mpt(
    name: str, gpu: str, ranks: int, length: int, batch: int, many: int, again: bool, tokens: float, fitted: bool = False
) -> Row:
    net = "ib-200" if gpu.startswith("a100") else "ib-400"
    recompute, title = "block" if again else "none", f"MPT {name} {gpu[:4]} x {ranks}, {length}"
    told: dict[str, Any] = {"fitted": fitted, "held": True, "microbatches": many, "attention": TRITON}
    return Row(title, MPT[name], gpu, net, ranks, batch, length, recompute, tokens, **told)


FOUNDRY = (
    mpt("760m", "h100-sxm", 8, 2048, 24, 2, False, 63147, fitted=True),
    mpt("1b", "h100-sxm", 8, 2048, 14, 1, False, 45455),
    mpt("1b", "h100-sxm", 64, 2048, 20, 1, False, 44402),
    mpt("1b", "h100-sxm", 8, 8192, 3, 4, False, 29157),
    mpt("1b", "h100-sxm", 8, 32768, 1, 4, False, 12025),
    mpt("3b", "h100-sxm", 8, 1024, 20, 6, False, 27046),
    mpt("3b", "h100-sxm", 8, 16384, 1, 6, False, 11152),
    mpt("7b", "h100-sxm", 8, 2048, 6, 1, False, 10643, fitted=True),
    mpt("7b", "h100-sxm", 8, 8192, 8, 2, True, 6935),
    mpt("7b", "h100-sxm", 8, 32768, 2, 2, True, 3318),
    mpt("7b", "h100-sxm", 8, 65536, 1, 2, True, 1956, fitted=True),
    mpt("13b", "h100-sxm", 8, 1024, 40, 3, True, 5502),
    mpt("13b", "h100-sxm", 8, 16384, 3, 3, True, 2985),
    mpt("30b", "h100-sxm", 8, 2048, 3, 21, True, 2002),
    mpt("30b", "h100-sxm", 32, 2048, 14, 3, True, 2308),
    mpt("70b", "h100-sxm", 64, 2048, 8, 4, True, 1039),
    mpt("760m", "a100-80", 8, 2048, 24, 2, False, 32434),
    mpt("1b", "a100-80", 8, 2048, 14, 4, False, 20513),
    mpt("1b", "a100-80", 8, 16384, 2, 4, False, 9956),
    mpt("3b", "a100-80", 8, 1024, 20, 6, False, 11580),
    mpt("3b", "a100-80", 8, 16384, 1, 6, False, 5529),
    mpt("7b", "a100-80", 8, 2048, 6, 2, False, 4641),
    mpt("7b", "a100-80", 8, 16384, 4, 2, True, 2453),
    mpt("7b", "a100-80", 8, 65536, 1, 2, True, 1013, fitted=True),
    mpt("13b", "a100-80", 8, 4096, 10, 3, True, 2060),
    mpt("30b", "a100-80", 8, 2048, 3, 21, True, 916),
    mpt("70b", "a100-80", 64, 2048, 8, 4, True, 410),
)
"""Runs on H100 and A100 of llm-foundry, scripts/train/benchmarking/README.md: FSDP1, gradients reduced in fp32."""


def loss(output: Tensor) -> Tensor:
    targets = torch.empty(output.shape[0] * output.shape[1], dtype=torch.long, device="meta")
    return F.cross_entropy(output.flatten(0, 1), targets)


def predicted(row: Row, **options: Any) -> Any:
    gpu = GPUS[row.gpu]
    if row.attention != 1:
        gpu = replace(gpu, attention=row.attention * gpu.attention)

    def build() -> nn.Module:
        model = (Llama if row.shape.hidden else Mpt)(row.shape, row.recompute, row.length)
        for layer in model.layers if row.compiled else ():
            layer.compile()
        return model

    return fullshard.explain(
        build,
        torch.empty(row.batch, row.length, dtype=torch.long, device="meta"),
        world=row.ranks,
        gpu=gpu,
        net=row.net,
        loss=loss,
        keep_output=row.held,
        optimizer="adamw-fused",
        engine=row.engine,
        microbatches=row.microbatches,
        accumulate=False,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(
        f"{'row':28} {'tokens/s':>9} {'predicted':>9} {'ratio':>6} {'GiB':>6} {'pred.':>6} {'ratio':>6} {'active':>6} {'pred.':>6} {'ratio':>6}"
    )
    for row in (*ROWS, *FOUNDRY):
        r = predicted(row)
        cells = f"{row.name:28} {row.tokens:9,.0f} {r.tokens_per_second:9,.0f} {r.tokens_per_second / row.tokens:6.2f}"
        reserved = r.reserved * sum(COMPILED[1]) / 2 if row.compiled else r.reserved
        for published, found in ((row.reserved, reserved), (row.active, r.peak)):
            told = " " * 6 if published is None else f"{published:6.1f}"
            ratio = " " * 6 if published is None else f"{found / GIB / published:6.2f}"
            cells += f" {told} {found / GIB:6.1f} {ratio}"
        print(cells, "fitted" if row.fitted else "", flush=True)


if __name__ == "__main__":
    main()
