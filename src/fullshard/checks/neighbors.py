"""The processes of other ranks on this machine, to prove that one is gone. Some backends do not notice that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NEAR = 16  # launchers number the ranks of a machine in a row, so ranks that are further away are not looked for


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank.

    Attributes:
        machine: boot of the machine and namespace of process ids, in which `pid` counts.
        pid: process id.
        start: time of its start, in ticks since the boot; a later process with the same id has another one.
    """

    machine: str
    pid: int
    start: str

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None where Linux's /proc is missing."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
            return cls(machine, os.getpid(), _state_and_start(os.getpid())[1])
        except (OSError, IndexError):
            return None

    def pack(self) -> bytes:
        """Return the record to publish."""
        return f"{self.machine} {self.pid} {self.start}".encode()

    @classmethod
    def unpack(cls, record: bytes) -> RankProcess:
        """Return the process in a published record. Raises ValueError if the record is none."""
        machine, pid, start = record.decode().split(" ")
        return cls(machine, int(pid), start)

    def is_gone(self) -> bool:
        """Return True if the process, which must be of this machine, has ended. If that cannot be known, return False."""
        try:
            os.kill(self.pid, 0)  # sends nothing
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        try:
            state, start = _state_and_start(self.pid)
        except (OSError, IndexError):
            return False
        return state in "ZX" or start != self.start  # a zombie has ended, but its parent has not asked for its exit code


def _state_and_start(pid: int) -> tuple[str, str]:
    # The second field is the name of the program in parentheses, which may contain spaces; the fields after it do not.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def near(rank: int, ranks: Sequence[int]) -> list[int]:
    """Return the other ranks that may be on the machine of `rank`.

    >>> near(20, [0, 3, 5, 19, 20, 21, 36, 37])
    [5, 19, 21, 36]
    """
    return [other for other in ranks if other != rank and abs(other - rank) <= _NEAR]


__all__ = ["RankProcess", "near"]
