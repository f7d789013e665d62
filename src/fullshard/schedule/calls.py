"""Forwards under way, one inside the other, and forwards whose backward may still come."""

from __future__ import annotations

from collections import deque

from fullshard.errors import InternalError
from fullshard.schedule.records import ForwardCall, UnitRecord

_RUNS = 64  # how many outermost forwards may lie before the backward that reaches the first of them


class RunningForwards(list[ForwardCall]):
    """A stack of calls, outermost first, each with the time at which it began (its `end` is not known yet)."""

    def outermost(self) -> int | None:
        """The unit whose forward is under way around all others."""
        return self[0].unit if self else None

    def has(self, unit: int) -> bool:
        """Whether a forward of the unit is under way."""
        for call in self:
            if call.unit == unit:
                return True
        return False

    def units(self) -> list[int]:
        """Units whose forward has begun and not ended, outermost first."""
        return [call.unit for call in self]

    def start_of(self, unit: int) -> int:
        """When the outermost forward of the unit began."""
        return next(call.start for call in self if call.unit == unit)

    def end(self, unit: int, *, since: int, now: int) -> list[ForwardCall]:
        """End the innermost call of the unit. The last of these is that; before it, the calls that end with it.

        Those are calls inside it that began after `since` and never ended. Raises InternalError if the unit has no call.
        """
        ended: list[ForwardCall] = []
        for index in range(len(self) - 1, -1, -1):
            call = self[index]
            if call.unit == unit:
                del self[index]
                ended.append(ForwardCall(unit, call.start, now))
                return ended
            if call.start > since and index == len(self) - 1:
                del self[index]
                ended.append(ForwardCall(call.unit, call.start, now))
        raise InternalError(f"unit {unit} ended a forward that it never began")

    def forget_unit(self, unit: int) -> None:
        """The unit's module was deleted."""
        self[:] = [call for call in self if call.unit != unit]


class PendingBackwards:
    """Calls with grad whose backward has not begun, by the order of events alone, so that every rank has the same ones.

    A call waits until its backward begins, until a backward ends that reached a later call, or for 64 outermost forwards.
    """

    def __init__(self, records: dict[int, UnitRecord]) -> None:
        """`records`: the planner's, by unit."""
        self._records = records
        self._calls: dict[int, ForwardCall] = {}  # by end, oldest first
        self._runs: deque[int] = deque(maxlen=_RUNS)  # when the last outermost forwards began

    def begin_run(self, now: int) -> None:
        """An outermost forward begins."""
        if len(self._runs) == _RUNS:
            self.expire(before=self._runs[0])
        self._runs.append(now)

    def add(self, call: ForwardCall) -> None:
        """An output of the call requires grad. A recomputation may repeat a call that still waits."""
        if call.end not in self._calls:
            self._calls[call.end] = call
            self._records[call.unit].pending_backwards += 1

    def remove(self, call: ForwardCall) -> None:
        """Nobody waits for the backward of the call any longer."""
        if self._calls.pop(call.end, None) is not None:
            self._records[call.unit].pending_backwards -= 1

    def expire(self, *, before: int) -> None:
        """The backwards of calls that began before this time will not come."""
        for call in [call for call in self._calls.values() if call.start < before]:
            self.remove(call)

    def forget_unit(self, unit: int) -> None:
        """The unit's module was deleted."""
        self._calls = {end: call for end, call in self._calls.items() if call.unit != unit}

    def clear(self) -> None:
        """No backward will come."""
        self._calls.clear()
        for record in self._records.values():
            record.pending_backwards = 0

    def forget_runs(self) -> None:
        """As if no outermost forward had been."""
        self._runs.clear()

    def units(self) -> list[int]:
        """Units with a call that waits, oldest first."""
        return list(dict.fromkeys(call.unit for call in self._calls.values()))

    def has_call_since(self, begin: int) -> bool:
        """Whether a call that waits began at this time or later."""
        return any(call.start >= begin for call in self._calls.values())

    def latest_before(self, call: ForwardCall) -> ForwardCall | None:
        """The latest call that waits and began before `call`, in the same outermost forward.

        Others may be of models that some ranks have deleted already.
        """
        begin = self.run_of(call)
        for other in reversed(self._calls.values()):
            if begin < other.start < call.start:
                return other
        return None

    def run_of(self, call: ForwardCall) -> int:
        """The outermost forward that `call` was part of, -1 if that is too long ago."""
        for run in reversed(self._runs):
            if run < call.start:
                return run
        return -1

    def next_run(self, run: int) -> int | None:
        """The outermost forward after `run`; None if there is none."""
        return min((other for other in self._runs if other > run), default=None)

    def previous_run(self, run: int) -> int | None:
        """The outermost forward before `run`; None if there is none."""
        return max((other for other in self._runs if other < run), default=None)


__all__ = ["PendingBackwards", "RunningForwards"]
