"""What the planner knows of each unit: its options, where its data is, its calls, and what may still need the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fullshard.errors import InternalError
from fullshard.policies import CommPolicy
from fullshard.schedule.residency import MOVES, ReshardPolicy, Residency


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One forward of a unit: [start, end] on the planner's clock, which ticks whenever a unit's forward starts or ends."""

    unit: int
    start: int
    end: int


class ScheduleOptions(Protocol):
    """The options of a unit that decide when it moves. `UnitOptions` has them, and others besides."""

    @property
    def reshard_policy(self) -> ReshardPolicy:
        """What happens to full parameters after a forward."""

    @property
    def keep_after_backward(self) -> bool:
        """Whether full parameters stay when a backward ends."""

    @property
    def in_backward(self) -> bool:
        """Whether the unit's backward needs the full parameters."""

    @property
    def comm(self) -> CommPolicy:
        """`prefetch_bytes`: how much may be gathered ahead while the unit computes; None is one unit."""


@dataclass(slots=True, eq=False)
class UnitRecord:
    """One unit, as the planner sees it. The unit holds its record too, and reads it; the planner alone moves it."""

    number: int
    options: ScheduleOptions
    nbytes: int = 0  # of its full parameters
    next_forward: tuple[int, ...] | None = None  # what to gather ahead instead of what the last run needed next
    next_backward: tuple[int, ...] | None = None
    resident_blocks: int = 0  # resident() blocks around it: it stays full whatever ends
    residency: Residency = Residency.SHARDED
    pending_backwards: int = 0  # calls whose backward may still come, by the order of events alone: every rank agrees
    live_graphs: int = 0  # calls whose graph exists on this rank and waits: says what is legal, never what is sent
    last: ForwardCall | None = None  # the last forward outside backward; a recomputation takes its place in time from it
    had_grad: bool = False  # whether that forward, or a recomputation of it, had grad, so that its backward announces itself
    unsharded_by_user: bool = False
    create_graph_run: int = -1  # the run of a backward that made a graph, which needs the parameters until the next one ends

    @property
    def is_pinned(self) -> bool:
        """Whether the caller wants the unit full: unsharded by hand, or resident."""
        return self.residency is Residency.FULL and (self.unsharded_by_user or self.resident_blocks > 0)

    def configure(self, options: ScheduleOptions, *, nbytes: int) -> None:
        """Options from now on, and the bytes of the unit's full parameters."""
        self.options, self.nbytes = options, nbytes

    def count_resident_block(self, more: int) -> bool:
        """A resident() block around the unit begins (1) or ends (-1); whether it is the outermost one."""
        self.resident_blocks += more
        return self.resident_blocks == max(more, 0)

    def move(self, to: Residency) -> None:
        """Raises InternalError for a move that the table does not have."""
        if (self.residency, to) not in MOVES:
            raise InternalError(f"unit {self.number} cannot go from {self.residency.value} to {to.value}")
        self.residency = to

    def clear(self) -> None:
        """The data is gone, whatever was planned."""
        self.residency, self.unsharded_by_user, self.create_graph_run = Residency.SHARDED, False, -1


__all__ = ["ForwardCall", "ScheduleOptions", "UnitRecord"]
