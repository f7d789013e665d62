"""Published state of a rank in one log: a position of 16 bytes, and a status in words."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WAITING, RAISED, ENDED, IN_ANY_FAILED = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Position:
    """State of a rank in one log, packed in 16 bytes.

    Attributes:
        count: number of calls.
        hash: 64-bit hash of these calls.
        epoch: number of restarts by all ranks together (modulo 2**8 when packed).
        notices_read: number of notices that the rank had read (modulo 2**16 when packed).
        flags: WAITING, RAISED (an exception ended the step), ENDED (the program), IN_ANY_FAILED.
    """

    count: int
    hash: int
    epoch: int = 0
    notices_read: int = 0
    flags: int = 0

    _FORM = struct.Struct("<IHBBq")

    def pack(self) -> bytes:
        """Return the record to publish."""
        return self._FORM.pack(self.count, self.notices_read & 0xFFFF, self.flags, self.epoch & 0xFF, self.hash)

    @classmethod
    def unpack(cls, record: bytes) -> Position:
        """Return the position in a published record.

        Raises:
            ValueError: if the record is not a position.
        """
        try:
            count, notices_read, flags, epoch, digest = cls._FORM.unpack(record)
        except struct.error as wrong:
            raise ValueError(f"Expected a position, got another record: {wrong}.") from wrong
        return cls(count, digest, epoch, notices_read, flags)

    def has_read(self, number: int) -> bool:
        """Return True if the position was published after the rank had read notice `number`."""
        # both numbers are modulo 2**16, so compare their difference with half of that
        return (self.notices_read - number) & 0xFFFF < 0x8000

    def is_reply_to(self, number: int) -> bool:
        """Return True if the position replies to notice `number`: published after the rank had read it, or at its end."""
        return bool(self.flags & ENDED) or self.has_read(number)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """State of a rank in one log, in words.

    Attributes:
        last: last call (number, text).
        waits: call that the rank waits for (number, text).
        exception: exception that ended the step, and its place.
        any_failed: call of any_failed() that the rank waits in (key of its log, number, ranks).
    """

    last: Sequence[Any] | None
    waits: Sequence[Any] | None
    exception: str | None
    any_failed: Sequence[Any] | None

    def __str__(self) -> str:
        if self.last is None:
            return "before the first collective"
        if self.exception is not None:
            return f"raised {self.exception}, after collective {self.last[0]}, {self.last[1]}"
        if self.waits is None:
            return f"computing or elsewhere, after collective {self.last[0]}, {self.last[1]}"
        return f"waiting in collective {self.waits[0]}, {self.waits[1]}"


__all__ = ["ENDED", "IN_ANY_FAILED", "RAISED", "WAITING", "Position", "RankStatus"]
