"""Reusable memory for rows on their way between files, shards and other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ALIGNMENT = 64  # bytes; at least the alignment of every dtype


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of tensors in a shared buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class StagingBuffer:
    """One block of memory that is reused for each batch of rows. It grows to the largest batch."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._copies_done: torch.Event | None = None

    def take(self, tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Return tensors of these shapes and dtypes in the buffer. They overwrite the tensors of the previous call."""
        if self._copies_done is not None:
            self._copies_done.synchronize()
            self._copies_done = None
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in tensors]
        total = sum(map(padded, sizes))
        if total > self._memory.numel():
            self._memory = self._memory[:0].clone()  # frees the old memory before the new allocation, for a lower peak
            self._memory = torch.empty(total, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        found: list[Tensor] = []
        at = 0
        for (shape, dtype), size in zip(tensors, sizes):
            found.append(self._memory[at : at + size].view(dtype).view(tuple(shape)))
            at += padded(size)
        return found

    def record_copies(self) -> None:
        """Record that the accelerator may still copy from or to the tensors, so that the next `take` waits for the copies."""
        if self._pinned:
            self._copies_done = torch.Event(device=torch.accelerator.current_accelerator())
            self._copies_done.record()


def batches(parts: Iterable[T], limit: int, nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Batch parts, in order, up to `limit` bytes. A single larger part gets its own batch."""
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
