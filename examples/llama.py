"""Models with Llama's shapes for `python -m fullshard explain`, which predicts memory, time and communication of a step.

    python -m fullshard explain examples/llama.py:llama --world 64
    python -m fullshard explain examples/llama.py:llama --with size=70b --with length=4096 --world 128 --gpu h200 --find fits
    python -m fullshard explain examples/llama.py:llama --with rows=2 --world 8 --recompute block --html step.html

The model is built on the meta device, so nothing is computed or downloaded. The shapes are from arXiv 2407.21783, table 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fullshard
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy


@dataclass(frozen=True)
class Shape:
    dim: int
    layers: int
    heads: int
    shared: int  # number of key-value heads
    hidden: int
    vocabulary: int = 128256


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192),
    "8b": Shape(4096, 32, 32, 8, 14336),
    "70b": Shape(8192, 80, 64, 8, 28672),
    "405b": Shape(16384, 126, 128, 8, 53248),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.shared, self.size = shape.heads, shape.shared, shape.dim // shape.heads
        self.q, self.o = nn.Linear(shape.dim, shape.dim, bias=False), nn.Linear(shape.dim, shape.dim, bias=False)
        self.k, self.v = (nn.Linear(shape.dim, shape.shared * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q = self.q(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        k, v = (part(x).view(rows, length, self.shared, self.size).transpose(1, 2) for part in (self.k, self.v))
        q, k = (rotate(t, cos, sin) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.shared)
        return self.o(out.transpose(1, 2).reshape(rows, length, dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (rows, heads, length, dim)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.RMSNorm(shape.dim), Attention(shape), nn.RMSNorm(shape.dim)
        self.gate, self.up = nn.Linear(shape.dim, shape.hidden, bias=False), nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def attention_only() -> Any:
    """Return the contexts of a selective checkpoint that keeps the outputs of attention and recomputes everything else."""
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
    }

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class Llama(nn.Module):
    def __init__(self, shape: Shape, length: int, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.dim), nn.Linear(shape.dim, shape.vocabulary, bias=False)
        size = shape.dim // shape.heads
        self.register_buffer("cos", torch.ones(length, size, dtype=torch.bfloat16))
        self.register_buffer("sin", torch.zeros(length, size, dtype=torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.keep == "attention":
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False, context_fn=attention_only)
            else:
                x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor) -> Tensor:
    targets = logits.new_zeros(logits.shape[:-1], dtype=torch.long)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


blocks = ModuleWrapPolicy({Block})
whole = CustomPolicy(lambda module: False)
"""Policies for `--plan`: one unit per block, or one unit for the whole model."""


def llama(size: str = "8b", length: int = 8192, rows: int = 1, keep: str = "everything") -> dict[str, Any]:
    """Return the arguments of explain(); `--with size=70b` and others set the parameters of this function.

    keep: the activations to keep for backward, "everything" or "attention".
    """
    return {
        "build": lambda: Llama(SHAPES[size], length, keep),
        "batch": torch.empty(rows, length, dtype=torch.long, device="meta"),
        "loss": next_token_loss,
    }


if __name__ == "__main__":
    print(fullshard.explain(**llama(), world=64))
