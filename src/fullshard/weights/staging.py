"""Memory of a fixed size through which rows pass on their way between files, shards and other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ALIGNMENT = 64  # bytes; more than any dtype has


def padded(nbytes: int) -> int:
    """Bytes that a tensor of so many takes in memory that it shares with others."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Stage:
    """One stretch of memory, given out again and again; it grows to the largest need.

    Args:
        device: of the memory.
        pinned: whether an accelerator copies from and to it.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._copies: torch.Event | None = None

    def take(self, tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Memory for tensors of these shapes and dtypes, which the tensors taken before lose."""
        if self._copies is not None:
            self._copies.synchronize()
            self._copies = None
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in tensors]
        total = sum(map(padded, sizes))
        if total > self._memory.numel():
            self._memory = self._memory[:0].clone()  # the old memory is let go first
            self._memory = torch.empty(total, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        found: list[Tensor] = []
        at = 0
        for (shape, dtype), size in zip(tensors, sizes):
            found.append(self._memory[at : at + size].view(dtype).view(tuple(shape)))
            at += padded(size)
        return found

    def note_copies(self) -> None:
        """The accelerator may still copy from or to what was taken: the next `take` waits for that."""
        if self._pinned:
            self._copies = torch.Event(device=torch.accelerator.current_accelerator())
            self._copies.record()


def batches(parts: Iterable[T], limit: int, nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Parts in order, as many together as have at most `limit` bytes; a larger one is alone."""
    batch: list[T] = []
    total = 0
    for part in parts:
        size = padded(nbytes(part))
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(part)
        total += size
    if batch:
        yield batch


__all__ = ["Stage", "batches", "padded"]
