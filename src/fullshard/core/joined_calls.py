"""Forward calls that a rank joins without computing, kept until the backward that they belong to begins."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from fullshard.core.scheduler import ForwardCall, Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A call in which other ranks compute and this one only takes part in the collectives."""

    unit: int  # its number: a pending call must not keep the model alive
    call: ForwardCall
    alone: bool  # True if it was not part of another unit's forward


class JoinedCalls:
    """Joined calls with a pending backward.

    Attributes:
        waiting: the calls, oldest first. Empty in most programs, which then skip everything here.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.waiting: list[Joined] = []
        self._reached: set[int] = set()  # outermost forwards that the running backward has reached

    def add(self, joined: Joined) -> None:
        """Add a call whose backward is pending."""
        self._scheduler.expect_backward(joined.call)
        self.waiting.append(joined)

    def backward_reached(self, call: ForwardCall) -> None:
        """Record that the running backward reached this call, computed or joined."""
        self._reached.add(self._scheduler.start_of_outermost(call))

    def due(self, *, beyond: int, lives: Callable[[int], bool]) -> Iterator[Joined]:
        """Yield the joined calls of the running backward that ended after `beyond`, latest first, as computing ranks do.

        Args:
            beyond: a time on the scheduler's clock.
            lives: returns True if the unit of this number still exists. Calls of deleted units are dropped.
        """
        later: list[Joined] = []
        while self.waiting and self.waiting[-1].call.end > beyond:
            joined = self.waiting.pop()
            if (
                not lives(joined.unit)
                or not self._scheduler.knows(joined.unit)
                or self._scheduler.start_of_outermost(joined.call) < 0
            ):
                self._scheduler.graph_released(joined.call)
            elif not self._is_reached(joined):
                later.append(joined)
            else:
                self._scheduler.graph_released(joined.call)
                yield joined
        self.waiting += reversed(later)

    def end_backward(self) -> None:
        """End the running backward."""
        self._reached.clear()

    def drop(self, units: Container[int]) -> None:
        """Drop the calls of these units, of a forward or backward that raised."""
        self._reached.clear()
        for joined in [joined for joined in self.waiting if joined.unit in units]:
            self._scheduler.graph_released(joined.call)
            self.waiting.remove(joined)

    def clear(self) -> None:
        """Drop all calls."""
        self.drop({joined.unit for joined in self.waiting})

    def _is_reached(self, joined: Joined) -> bool:
        """Return True if a joined call belongs to the running backward.

        It does if the backward reached the call's outermost forward. A call that is an outermost forward by itself (`alone`)
        belongs to the backward that reached the next outermost forward in which this rank computes, or, if there is none, the
        previous one.
        """
        scheduler, reached = self._scheduler, self._reached
        run = scheduler.start_of_outermost(joined.call)
        if not joined.alone:
            return run in reached
        alone = {scheduler.start_of_outermost(other.call) for other in self.waiting if other.alone} | {run}
        found: int | None = run
        while found is not None and found in alone and found not in reached:
            found = scheduler.next_outermost(found)
        if found is None:
            found = run
            while found is not None and found in alone and found not in reached:
                found = scheduler.previous_outermost(found)
        return found in reached


__all__ = ["Joined", "JoinedCalls"]
