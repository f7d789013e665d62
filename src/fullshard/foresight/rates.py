"""How fast products and attention are, by their sizes, in parts of what large ones reach.

A kernel that has little to do for each block of its output is slower: the part is size / (size + what half of it would need).
"""

from __future__ import annotations

from dataclasses import dataclass

PRODUCT_HALF = 450
"""The smallest size of a product at which it would reach half of what an endless one does, on accelerators.

Fitted to two published runs (benchmarks/predictions.py: MPT 760m and 7b on H100, 2,048 tokens).
"""

PRODUCT_AS_MEASURED = 4096
"""The size that `Gpu.matmul` is of."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Of attention: flop/s of endless sequences, in parts of the best, and the length at which it reaches half of that."""

    best: float
    half: float

    def part(self, length: int) -> float:
        return self.best * length / (length + self.half)


_ATTENTION: dict[tuple[bool, bool, int], _Kernel] = {  # (backward, looks back only, largest head size)
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
"""FlashAttention-2 on an H100, of which its forward with heads of 128 reaches 370 Tflop/s without a mask.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, the columns of FlashAttention-2. They have no backward that looks
back only, and none with heads of 256: these are in the ratio of the forward, and of heads of 64.
"""


def attention_part(*, backward: bool, causal: bool, head: int, length: int) -> float:
    """How fast attention is.

    Args:
        backward: whether it is the backward.
        causal: whether positions look back only; flops are then of half the matrix.
        head: elements of one head of the queries.
        length: keys of one row.

    Returns:
        The part of `Gpu.attention` that it reaches: of the forward of endless sequences without a mask, with heads of 128.
    """
    size = next((known for known in (64, 128) if head <= known), 256)
    return _ATTENTION[backward, causal, size].part(length)


def product_part(rows: int, inner: int, columns: int) -> float:
    """How fast a matrix product is.

    Args:
        rows: of the first factor.
        inner: its columns, which are summed over.
        columns: of the second factor.

    Returns:
        The part of `Gpu.matmul` that it reaches; more than 1 for large ones.
    """
    least = max(1, min(rows, inner, columns))
    return (1 + PRODUCT_HALF / PRODUCT_AS_MEASURED) / (1 + PRODUCT_HALF / least)


__all__ = ["PRODUCT_HALF", "attention_part", "product_part"]
