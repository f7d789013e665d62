"""Calls of which a rank takes part without computing, until the backward that they belong to is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fullshard.schedule.planner import Planner
from fullshard.schedule.records import ForwardCall


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A call in which other ranks compute and this one only takes part. alone: it was no part of another unit's forward.

    The unit goes by its number, so that what waits for a backward keeps no model alive.
    """

    unit: int
    call: ForwardCall
    alone: bool


class JoinedCalls:
    """Joined calls whose backward is to come.

    Attributes:
        waiting: those, oldest first. There are none in most programs, and then nothing here needs to be told anything.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.waiting: list[Joined] = []
        self._reached: set[int] = set()  # the outermost forwards that the running backward came to

    def add(self, joined: Joined) -> None:
        """The backward of this call is to come."""
        self._planner.expect_backward(joined.call)
        self.waiting.append(joined)

    def backward_reached(self, call: ForwardCall) -> None:
        """The running backward came to this call, or to one that was joined."""
        self._reached.add(self._planner.pending.run_of(call))

    def due(self, *, beyond: int, lives: Callable[[int], bool]) -> Iterator[Joined]:
        """Those that ended after `beyond` and belong to the running backward, latest first, as ranks that computed have them.

        lives: whether the unit of this number exists; where it does not, the backward never came.
        """
        later: list[Joined] = []
        while self.waiting and self.waiting[-1].call.end > beyond:
            joined = self.waiting.pop()
            if not lives(joined.unit) or not self._planner.knows(joined.unit) or self._planner.pending.run_of(joined.call) < 0:
                self._planner.graph_released(joined.call)
            elif not self._is_reached(joined):
                later.append(joined)
            else:
                self._planner.graph_released(joined.call)
                yield joined
        self.waiting += reversed(later)

    def end_backward(self) -> None:
        """The running backward is over."""
        self._reached.clear()

    def clear(self) -> None:
        """Forget them all."""
        self._reached.clear()
        for joined in self.waiting:
            self._planner.graph_released(joined.call)
        self.waiting.clear()

    def _is_reached(self, joined: Joined) -> bool:
        """Whether a joined call belongs to the running backward: that came to its outermost forward; or nothing but joined
        calls was in it, and the backward came to the one behind it, or, if there is none, to the one before.
        """
        pending, reached = self._planner.pending, self._reached
        run = pending.run_of(joined.call)
        if not joined.alone:
            return run in reached
        alone = {pending.run_of(other.call) for other in self.waiting if other.alone} | {run}
        found: int | None = run
        while found is not None and found in alone and found not in reached:
            found = pending.next_run(found)
        if found is None:
            found = run
            while found is not None and found in alone and found not in reached:
                found = pending.previous_run(found)
        return found in reached


__all__ = ["Joined", "JoinedCalls"]
