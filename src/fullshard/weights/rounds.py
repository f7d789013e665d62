"""Rows that one rank reads or writes for several, in rounds that are small enough for all of them: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from fullshard.weights.boxes import Box

P = TypeVar("P")

Load = tuple[str, int]
"""(what for, rank)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a tensor, a box of whole ones. by: the rank that reads or writes them.

    loads: bytes that a round has a limit for, by what they are for and the rank.      ranks: all that take part.
    """

    rows: Box
    by: int
    loads: tuple[tuple[Load, int], ...]
    ranks: frozenset[int]

    @classmethod
    def of(cls, rows: Box, by: int, loads: dict[Load, int]) -> Span:
        """The ranks that take part are the ranks with a load."""
        return cls(rows, by, tuple(loads.items()), frozenset(rank for _, rank in loads))


@dataclass(frozen=True, slots=True)
class Round(Generic[P]):
    """parts: with a load for this rank.      exchanged: whether ranks send each other anything."""

    parts: tuple[P, ...]
    exchanged: bool


def in_rounds(spans: Iterable[tuple[Span, Callable[[Span], P]]], *, rank: int, limit: int) -> Iterator[Round[P]]:
    """Spans in order, as many together as leave no load of any rank above a limit, but for one that is larger by itself.

    Args:
        spans: of all ranks, and a function that makes the part of one; called for spans that this rank takes part in.
        rank: this one.
        limit: bytes.
    """
    parts: list[P] = []
    totals: dict[Load, int] = {}
    exchanged = False
    for span, make in spans:
        if totals and any(totals.get(load, 0) + nbytes > limit for load, nbytes in span.loads):
            yield Round(tuple(parts), exchanged)
            parts, totals, exchanged = [], {}, False
        for load, nbytes in span.loads:
            totals[load] = totals.get(load, 0) + nbytes
        exchanged = exchanged or len(span.ranks) > 1
        if rank in span.ranks:
            parts.append(make(span))
    if totals:
        yield Round(tuple(parts), exchanged)


__all__ = ["Round", "Span", "in_rounds"]
