"""Boxes: rectangular parts of tensors, and where they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: `shape` elements along each dim, from `start` on.

    >>> Box((0, 2), (4, 3)).meet(Box((2, 0), (4, 4)))
    Box(start=(2, 2), shape=(2, 2))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """Behind the last element along each dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The elements that both have; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(stop - begin for begin, stop in zip(start, map(min, self.stop, other.stop)))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def moved(self, by: Sequence[int]) -> Box:
        """The same, so many elements further along each dim."""
        return Box(tuple(start + step for start, step in zip(self.start, by)), self.shape)

    def relative_to(self, other: Box) -> Box:
        """The same, counted from where `other` starts."""
        return self.moved([-start for start in other.start])

    def slices(self) -> tuple[slice, ...]:
        """The index of it in a tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop))

    def rows(self, first: int, last: int) -> Box:
        """Its rows from `first` up to `last`, in the numbers of the tensor; it has at least one dim."""
        return Box((first, *self.start[1:]), (last - first, *self.shape[1:]))


__all__ = ["Box"]
