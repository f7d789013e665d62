"""Boxes: rectangular parts of tensors, and the box of each tensor of a model that each rank stores."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor.

    >>> Box((0, 2), (4, 3)).intersect(Box((2, 0), (4, 4)))
    Box(start=(2, 2), shape=(2, 2))
    """

    start: tuple[int, ...]  # index of the first element along each dim
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a complete tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """Index after the last element along each dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(stop - begin for begin, stop in zip(start, map(min, self.stop, other.stop)))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def moved(self, by: Sequence[int]) -> Box:
        """Return the box shifted by `by` elements along each dim."""
        return Box(tuple(start + offset for start, offset in zip(self.start, by)), self.shape)

    def relative_to(self, other: Box) -> Box:
        """Return the box with indices relative to the start of `other`."""
        return self.moved([-start for start in other.start])

    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index of a tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop))

    def rows(self, first: int, last: int) -> Box:
        """Return the rows from `first` up to but not including `last`, as numbered in the tensor. It has at least one dim."""
        return Box((first, *self.start[1:]), (last - first, *self.shape[1:]))

    @classmethod
    def of_rows(cls, shape: Sequence[int], first: int, last: int) -> Box:
        """Return rows of a tensor from `first` up to but not including `last`; a scalar is one row."""
        return cls.whole(shape).rows(first, last) if shape else cls.whole(shape)

    def split_rows(self, nbytes: int, limit: int) -> Iterator[Box]:
        """Yield parts of a box of `nbytes`, whole rows of up to `limit` bytes each. A single row may exceed it."""
        if not self.shape or nbytes <= limit:
            yield self
            return
        step = max(1, self.shape[0] * limit // nbytes)
        for at in range(self.start[0], self.stop[0], step):
            yield self.rows(at, min(self.stop[0], at + step))


@dataclass(frozen=True)
class ShardMap:
    """The box of a tensor that each rank stores."""

    shape: tuple[int, ...]  # of the unsharded tensor
    boxes: tuple[Box | None, ...]  # by rank; None for an empty shard

    @cached_property
    def ranks_by_box(self) -> dict[Box, tuple[int, ...]]:
        """Ranks by box. Several ranks that store the same box are replicas."""
        ranks_by_box: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            if box is not None:
                ranks_by_box.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in ranks_by_box.items()}

    @cached_property
    def _by_row(self) -> tuple[list[int], list[tuple[Box, tuple[int, ...]]], int]:
        """(first row of each box, boxes with their ranks, rows of the largest box), in row order for bisection."""
        shards = sorted(self.ranks_by_box.items(), key=lambda item: item[0].start)
        largest = max((box.shape[0] for box, _ in shards), default=0)
        return [box.start[0] for box, _ in shards], shards, largest

    def owners(self, wanted: Box, rank: int | None = None) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield (intersection of `wanted` with a shard, ranks that store it) for each shard that intersects, in row order.

        With `rank`, only the shard of that rank counts.
        """
        if rank is not None:
            own = self.boxes[rank]
            shards = [] if own is None else [(own, self.ranks_by_box[own])]
        elif not self.shape:  # 0-dim: no rows to bisect
            shards = list(self.ranks_by_box.items())
        else:
            rows, shards, largest = self._by_row
            # A box that starts `largest` rows or more before `wanted` ends before it, so only these boxes can intersect.
            shards = shards[bisect_right(rows, wanted.start[0] - largest) : bisect_left(rows, wanted.stop[0])]
        for shard, ranks in shards:
            box = shard.intersect(wanted)
            if box is not None:
                yield box, ranks


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """Description of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModelTensor(TensorInfo):
    """A tensor of the model: its first name if it is tied, and the shape of the unsharded tensor."""

    shard_map: ShardMap


def merge_row_ranges(ranges: Sequence[tuple[int, int, tuple[int, ...]]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Split overlapping row ranges into disjoint ones, each with all of its ranks, in row order.

    Args:
        ranges: (first row, row after the last one, ranks) of each range.

    >>> list(merge_row_ranges([(0, 4, (0,)), (0, 2, (1,)), (6, 7, (0, 2))]))
    [(0, 2, (0, 1)), (2, 4, (0,)), (6, 7, (0, 2))]
    """
    bounds = sorted({row for first, last, _ in ranges for row in (first, last)})
    ranks_from: dict[int, set[int]] = {row: set() for row in bounds}  # by first row of a disjoint range
    for first, last, ranks in ranges:
        for row in bounds[bisect_left(bounds, first) : bisect_left(bounds, last)]:
            ranks_from[row].update(ranks)
    for first, last in pairwise(bounds):
        if ranks_from[first]:
            yield first, last, tuple(sorted(ranks_from[first]))
