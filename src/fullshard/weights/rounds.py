"""Divide rows into rounds of limited size, equal on all ranks. One rank reads or writes a row, possibly for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from fullshard.weights.boxes import Box

P = TypeVar("P")

_ALIGNMENT = 64  # bytes; at least the alignment of every dtype


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of tensors in a shared buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


LoadKey = tuple[str, int]
"""Purpose of bytes, and rank: a round limits the bytes of each. The purpose is "read", "write", "send" or "need"."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a tensor that one rank reads or writes, also for other ranks."""

    rows: Box  # complete rows
    worker: int  # rank that reads or writes the rows
    loads: tuple[tuple[LoadKey, int], ...]  # bytes of these rows, by purpose and rank
    ranks: frozenset[int]  # all ranks with a load

    @classmethod
    def of(cls, rows: Box, worker: int, loads: dict[LoadKey, int]) -> RowRange:
        """Return the range with `ranks` from its loads."""
        return cls(rows, worker, tuple(loads.items()), frozenset(rank for _, rank in loads))


@dataclass(frozen=True, slots=True)
class Round(Generic[P]):
    """Parts that are read or written together."""

    parts: tuple[P, ...]  # with a load for this rank
    exchanged: bool  # whether any ranks exchange data, which makes the round collective


def in_rounds(ranges: Iterable[tuple[RowRange, Callable[[RowRange], P]]], *, rank: int, limit: int) -> Iterator[Round[P]]:
    """Batch ranges so that no load of any rank exceeds `limit` bytes per round. A single larger range gets its own round.

    Each range comes with a function that makes the part of a round, called only for ranges with a load for this rank.
    """
    # Every rank walks all ranges, so that all ranks make the same rounds.
    parts: list[P] = []
    totals: dict[LoadKey, int] = {}
    exchanged = False
    for row_range, make in ranges:
        if totals and any(totals.get(load, 0) + nbytes > limit for load, nbytes in row_range.loads):
            yield Round(tuple(parts), exchanged)
            parts, totals, exchanged = [], {}, False
        for load, nbytes in row_range.loads:
            totals[load] = totals.get(load, 0) + nbytes
        exchanged = exchanged or len(row_range.ranks) > 1
        if rank in row_range.ranks:
            parts.append(make(row_range))
    if totals:
        yield Round(tuple(parts), exchanged)


def shares(first: int, last: int, ranks: Sequence[int], step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first row, row after the last one): an equal part of the rows for each rank, in steps in turn.

    So every round has work for all of these ranks.
    """
    count = len(ranks)
    bounds = [first + (last - first) * index // count for index in range(count + 1)]
    for at in range(0, -(-(last - first) // count), step):
        for rank, (begin, end) in zip(ranks, pairwise(bounds)):
            if begin + at < end:
                yield rank, begin + at, min(end, begin + at + step)


def batches(parts: Iterable[P], limit: int, nbytes: Callable[[P], int]) -> Iterator[list[P]]:
    """Batch parts, in order, up to `limit` bytes. A single larger part gets its own batch."""
    batch: list[P] = []
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
