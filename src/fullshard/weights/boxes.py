"""Boxes: rectangular regions of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


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
