"""A run that was recorded: what its steps took, to be held against what was predicted."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.foresight.clock import Span


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step of a run."""

    spans: tuple[Span, ...]


__all__ = ["Recorded"]
