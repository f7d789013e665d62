"""Predictions of `fullshard.explain` beside published runs: memory and tokens per second of one GPU.

    python benchmarks/predictions.py            # a minute, on any machine

The models are written as the programs that were run have them (torchtitan: RMSNorm by hand in fp32, complex rotary embedding, logits
in fp32), with `engine="fsdp2"`, fused AdamW and the allocator at its defaults. `fitted` are the rows that constants of a GPU are from.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fullshard

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
    """Selective recomputation of torchtitan ("op"): attention and every second matrix product are saved."""
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


LLAMA2_7B = Shape(4096, 32, 32, 32, 11008, 32000)
LLAMA3_8B = Shape(4096, 32, 32, 8, 14336, 128256)


@dataclass(frozen=True)
class Row:
    """A published run. held: whether the program kept its logits while it ran backward, as torchtitan did at first."""

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


ROWS = (
    Row("1 Llama 3.1 8B, SAC", LLAMA3_8B, "h100-96", "ib-400", 8, 2, 8192, "op", 5762, 82.4, fitted=True),
    Row("3 the same, 128 GPUs", LLAMA3_8B, "h100-96", "ib-400", 128, 2, 8192, "op", 5605, 67.0),
    Row("5 Llama 2 7B, AC", LLAMA2_7B, "h100-96", "ib-400", 8, 8, 2048, "block", 6200, 31.0, 22.7, held=True),
    Row("6 the same, SAC", LLAMA2_7B, "h100-96", "ib-400", 8, 8, 2048, "op", 6700, 59.4, 49.5, held=True),
    Row("8 Llama 3 8B, SAC", LLAMA3_8B, "a100-80", "ib-200", 64, 1, 8192, "op", 2973),
    Row("9 Llama 2 7B, FSDP1", LLAMA2_7B, "a100-80", "ib-400", 128, 2, 4096, "none", 3700, fitted=True),
    Row("10 the same, H100", LLAMA2_7B, "h100-sxm", "ib-800", 96, 2, 4096, "none", 7500),
)


def loss(held: bool, output: Tensor) -> Tensor:
    targets = torch.empty(output.shape[0] * output.shape[1], dtype=torch.long, device="meta")
    value = F.cross_entropy(output.flatten(0, 1), targets)
    if held:
        value.register_hook(lambda grad, output=output: None)
    return value


def predicted(row: Row, **options: Any) -> Any:
    return fullshard.explain(
        lambda: Llama(row.shape, row.recompute, row.length),
        torch.empty(row.batch, row.length, dtype=torch.long, device="meta"),
        world=row.ranks,
        gpu=row.gpu,
        net=row.net,
        loss=partial(loss, row.held),
        optimizer="adamw-fused",
        engine=row.engine,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(
        f"{'row':28} {'tokens/s':>9} {'predicted':>9} {'ratio':>6} {'GiB':>6} {'pred.':>6} {'ratio':>6} {'active':>6} {'pred.':>6} {'ratio':>6}"
    )
    for row in ROWS:
        r = predicted(row)
        cells = f"{row.name:28} {row.tokens:9,.0f} {r.tokens_per_second:9,.0f} {r.tokens_per_second / row.tokens:6.2f}"
        for published, found in ((row.reserved, r.reserved), (row.active, r.peak)):
            told = " " * 6 if published is None else f"{published:6.1f}"
            ratio = " " * 6 if published is None else f"{found / GIB / published:6.2f}"
            cells += f" {told} {found / GIB:6.1f} {ratio}"
        print(cells, "fitted" if row.fitted else "", flush=True)


if __name__ == "__main__":
    main()
