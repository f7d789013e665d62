"""Speed of matrix products and attention by their sizes, as fractions of the speed of large ones.

A kernel with little work per block of its output is slower. The fraction is size / (size + half), where `half` is the size at
which the kernel reaches half of its best speed.
"""

from __future__ import annotations

from dataclasses import dataclass

MATMUL_HALF_SIZE = 450
"""Smallest size of a matrix product that reaches half the speed of an infinitely large one, on accelerators.

Fitted to two published runs (benchmarks/predictions.py: MPT 760m and 7b on H100, 2,048 tokens).
"""

MATMUL_REFERENCE_SIZE = 4096
"""Smallest size of the matrix product that `Gpu.matmul` describes."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Speed of one attention kernel."""

    best: float  # flop/s with infinitely long sequences, as a fraction of the fastest kernel
    half: float  # sequence length at which the kernel reaches half of `best`

    def fraction(self, length: int) -> float:
        return self.best * length / (length + self.half)


_ATTENTION: dict[tuple[bool, bool, int], _Kernel] = {  # (backward, causal, largest head size)
    (False, False, 64): _Kernel(0.88, 76),
    (False, False, 128): _Kernel(1.0, 101),
    (False, False, 256): _Kernel(0.88, 95),
    (False, True, 64): _Kernel(0.82, 355),
    (False, True, 128): _Kernel(0.93, 413),
    (False, True, 256): _Kernel(0.82, 390),
    (True, False, 64): _Kernel(0.79, 248),
    (True, False, 128): _Kernel(0.88, 268),
    (True, False, 256): _Kernel(0.79, 268),
    (True, True, 64): _Kernel(0.74, 990),
    (True, True, 128): _Kernel(0.82, 1070),
    (True, True, 256): _Kernel(0.74, 1070),
}
"""FlashAttention-2 on an H100, relative to its forward with head size 128 and no mask, which reaches 370 Tflop/s.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, the columns of FlashAttention-2. The figures have no causal
backward and no head size 256. The causal backward is scaled by the ratio of the forward, head size 256 by that of head size 64.
"""


def attention_fraction(*, backward: bool, causal: bool, head: int, length: int) -> float:
    """Return the speed of attention as a fraction of `Gpu.attention`.

    Args:
        backward: whether to return the speed of the backward.
        causal: whether the mask is causal; flops then count half of the matrix.
        head: head size of the queries.
        length: number of keys per row.
    """
    size = next((known for known in (64, 128) if head <= known), 256)
    return _ATTENTION[backward, causal, size].fraction(length)


def matmul_fraction(rows: int, inner: int, columns: int) -> float:
    """Return the speed of a product of (rows, inner) by (inner, columns) as a fraction of `Gpu.matmul`."""
    least = max(1, min(rows, inner, columns))
    return (1 + MATMUL_HALF_SIZE / MATMUL_REFERENCE_SIZE) / (1 + MATMUL_HALF_SIZE / least)


__all__ = ["MATMUL_HALF_SIZE", "attention_fraction", "matmul_fraction"]
