"""What a rank says of itself in one log: a position of 16 bytes, and the same in words."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WAITS, LEFT, ENDED, MEETS = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in one log, in 16 bytes.

    Attributes:
        count: how many calls it made.
        hash: of these calls, 64 bits.
        epoch: how often all ranks began anew together (modulo 2**8 when packed).
        heard: how many notices it had read by then (modulo 2**16 when packed).
        flags: whether it waits, left by an exception, ended the program, or waits in any_failed().
    """

    count: int
    hash: int
    epoch: int = 0
    heard: int = 0
    flags: int = 0

    _FORM = struct.Struct("<IHBBq")

    def pack(self) -> bytes:
        """As it is published."""
        return self._FORM.pack(self.count, self.heard & 0xFFFF, self.flags, self.epoch & 0xFF, self.hash)

    @classmethod
    def unpack(cls, record: bytes) -> Position:
        """Raises ValueError for a record that is no position."""
        try:
            count, heard, flags, epoch, digest = cls._FORM.unpack(record)
        except struct.error as wrong:
            raise ValueError(f"no position: {wrong}") from wrong
        return cls(count, digest, epoch, heard, flags)

    def has_heard(self, number: int) -> bool:
        """Whether it was published after that notice was read."""
        return (self.heard - number) & 0xFFFF < 0x8000

    def answers(self, number: int) -> bool:
        """Whether it is the last word of its rank on that notice: published after it was read, or at the end of the program."""
        return bool(self.flags & ENDED) or self.has_heard(number)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank says of one log in words.

    Attributes:
        last: its last call (number, text).
        waits: the call that it waits for (number, text).
        left: how it left what it was in the midst of, by an exception.
        meets: the any_failed() that it waits in (log, number, ranks).
    """

    last: Sequence[Any] | None
    waits: Sequence[Any] | None
    left: str | None
    meets: Sequence[Any] | None

    def __str__(self) -> str:
        if self.last is None:
            return "before the first call"
        if self.left is not None:
            return f"left {self.left}, after call {self.last[0]}, {self.last[1]}"
        if self.waits is None:
            return f"computing, or elsewhere, after call {self.last[0]}, {self.last[1]}"
        return f"waiting in call {self.waits[0]}, {self.waits[1]}"


__all__ = ["ENDED", "LEFT", "MEETS", "WAITS", "Position", "RankStatus"]
