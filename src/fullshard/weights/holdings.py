"""Tensors of a model, and which part of each of them each rank has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

from fullshard.weights.boxes import Box


@dataclass(frozen=True)
class Holdings:
    """Which part of a tensor each rank has. boxes: by rank, None for a rank that has no element."""

    shape: tuple[int, ...]
    boxes: tuple[Box | None, ...]

    @cached_property
    def distinct(self) -> dict[Box, tuple[int, ...]]:
        """The ranks that have the same part, by it."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            if box is not None:
                found.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in found.items()}

    @cached_property
    def _by_row(self) -> tuple[list[int], list[tuple[Box, tuple[int, ...]]], int]:
        """(first rows, parts in that order, rows of the largest): parts that meet a box are found without a look at all."""
        parts = sorted(self.distinct.items(), key=lambda found: found[0].start)
        largest = max((box.shape[0] for box, _ in parts), default=0)
        return [box.start[0] for box, _ in parts], parts, largest

    def meeting(self, wanted: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """(the elements of `wanted` that some ranks have, those ranks), for each part that has some, in the order of rows."""
        if not self.shape:
            yield from self.distinct.items()
            return
        rows, parts, largest = self._by_row
        for held, ranks in parts[bisect_right(rows, wanted.start[0] - largest) : bisect_left(rows, wanted.stop[0])]:
            box = held.meet(wanted)
            if box is not None:
                yield box, ranks

    @cached_property
    def is_by_rows(self) -> bool:
        """Whether each rank has rows of its own, and all of them."""
        whole = all(box.shape[1:] == self.shape[1:] for box in self.distinct)
        return bool(self.shape) and whole and all(len(ranks) == 1 for ranks in self.distinct.values())


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model. name: its first one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holdings: Holdings

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


def same_ranks(having: Sequence[tuple[int, int, tuple[int, ...]]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(first row, last row, all ranks that have some of them), from such stretches that may overlap: none of these does.

    >>> list(same_ranks([(0, 4, (0,)), (0, 2, (1,)), (6, 7, (0, 2))]))
    [(0, 2, (0, 1)), (2, 4, (0,)), (6, 7, (0, 2))]
    """
    begin: dict[int, list[tuple[int, ...]]] = {}
    end: dict[int, list[tuple[int, ...]]] = {}
    for first, last, ranks in having:
        begin.setdefault(first, []).append(ranks)
        end.setdefault(last, []).append(ranks)
    there: Counter[int] = Counter()
    for first, last in pairwise(sorted({*begin, *end})):
        for ranks in end.get(first, ()):
            there.subtract(ranks)
        for ranks in begin.get(first, ()):
            there.update(ranks)
        there = +there
        if there:
            yield first, last, tuple(sorted(there))


__all__ = ["Holdings", "ModelTensor", "same_ranks"]
