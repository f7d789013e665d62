"""Memory, the accesses to it, and the allocator: which two accesses nothing orders.

The allocator is the worst that a caching allocator may be: memory that was freed goes to the pool of the stream that was current when
it was allocated, at the moment of the host, whatever the device still does with it; and the next allocation from this pool may be any
of what was ever freed there. So an access to new memory must come behind all accesses to all memory that was freed into its pool
before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from timelines import Clock, Frame, Timeline
from torch import Tensor


class Home(enum.Enum):
    DEVICE = "device memory"
    PINNED = "pinned host memory"
    HOST = "pageable host memory"


@dataclass(frozen=True)
class Access:
    """One operation on bytes `low` to `high` of a storage."""

    timeline: Timeline
    tick: int
    clock: Clock
    writes: bool
    low: int
    high: int
    op: str
    stack: tuple[Frame, ...]
    label: str

    def __str__(self) -> str:
        verb = "write" if self.writes else "read"
        lines = "".join(
            f"\n        {file.rpartition('fullshard/')[2]}:{line} in {function}" for file, line, function in self.stack
        )
        return f"{verb} by {self.op} on {self.timeline.name} (operation {self.tick}), bytes {self.low} to {self.high}{lines}"


def precedes(access: Access, clock: Clock) -> bool:
    return clock.get(access.timeline.number, 0) >= access.tick


@dataclass
class Race:
    """Two accesses that nothing orders. `reused`: the first was to memory that was freed meanwhile."""

    label: str
    first: Access
    second: Access
    reused: bool

    @property
    def key(self) -> tuple[str, ...]:
        one, two = self.first, self.second
        return self.label, one.op, one.timeline.name, two.op, two.timeline.name, str(one.stack[:1]), str(two.stack[:1])

    def __str__(self) -> str:
        one, two = self.first, self.second
        before = (
            f"memory of {one.label} was freed and may be that of {self.label}" if self.reused else f"memory of {self.label}"
        )
        missing = f"{two.timeline.name} does not wait for an event recorded on {one.timeline.name} behind operation {one.tick}"
        return f"race on {before}: {missing}\n    {one}\n    {two}"


@dataclass
class Pool:
    """What was done last, on each timeline, to memory that was freed into it."""

    last: dict[int, Access] = field(default_factory=dict)

    def take(self, accesses: list[Access]) -> None:
        for access in accesses:
            known = self.last.get(access.timeline.number)
            if known is None or known.tick < access.tick:
                self.last[access.timeline.number] = access


@dataclass
class Memory:
    """The memory of one storage, between an allocation and its end."""

    label: str
    home: Home
    pool: Pool | None  # None: it was there before anything was looked at, or is never given back
    before: dict[int, Access] = field(default_factory=dict)  # to what this memory may have been
    accesses: list[Access] = field(default_factory=list)
    freed: bool = False
    group: str = ""  # the process group whose memory it is
    storage: int = 0  # that owns it
    address: int = 0
    nbytes: int = 0

    def allocate(self, pool: Pool | None) -> None:
        self.pool, self.freed = pool, False
        self.before = {} if pool is None else dict(pool.last)
        self.accesses = []

    def free(self) -> None:
        if self.pool is not None and not self.freed:
            self.pool.take(self.accesses)
        self.freed, self.accesses, self.nbytes = True, [], 0

    def touch(self, access: Access) -> list[Race]:
        """Note an access; the races that it makes."""
        races = [
            Race(self.label, other, access, reused=False)
            for other in self.accesses
            if (access.writes or other.writes)
            and other.low < access.high
            and access.low < other.high
            and not precedes(other, access.clock)
        ]
        races += [
            Race(self.label, other, access, reused=True) for other in self.before.values() if not precedes(other, access.clock)
        ]
        covered = (
            (lambda other: access.writes)
            if access.writes
            else (lambda other: not other.writes and other.timeline is access.timeline)
        )
        self.accesses = [
            other for other in self.accesses if not (access.low <= other.low and other.high <= access.high and covered(other))
        ]
        self.accesses.append(access)
        return races


def spans(tensor: Tensor, most: int = 512) -> list[tuple[int, int]]:
    """The stretches of bytes of a tensor in its storage; of one with many the whole of it."""
    if not tensor.numel():
        return []
    size = tensor.element_size()
    dims = sorted(
        ((stride, length) for stride, length in zip(tensor.stride(), tensor.shape) if length > 1 and stride), reverse=True
    )
    block = 1
    while dims and dims[-1][0] <= block:
        stride, length = dims.pop()
        block = max(block, stride * (length - 1) + block)
    starts = [tensor.storage_offset()]
    for stride, length in dims:
        starts = [start + index * stride for start in starts for index in range(length)]
        if len(starts) > most:
            extent = sum((length - 1) * stride for stride, length in zip(tensor.stride(), tensor.shape))
            return [(tensor.storage_offset() * size, (tensor.storage_offset() + extent + 1) * size)]
    return [(start * size, (start + block) * size) for start in starts]
