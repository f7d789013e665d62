"""The order in which units ran, and which of them are gathered before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fullshard.schedule.calls import PendingBackwards
from fullshard.schedule.records import ForwardCall, UnitRecord
from fullshard.schedule.residency import Action, Reshard, Residency, Wait

_AHEAD = 64  # how many units may be gathered ahead, whatever the budget


@dataclass(slots=True)
class ExecutionOrder:
    """The order in which units were last needed, by the unit it began with, and what it makes us expect next.

    >>> order = ExecutionOrder()
    >>> [order.expect(unit) for unit in (7, 3, 5)]
    [[], [], []]
    >>> order.close()
    >>> [order.expect(unit, 2) for unit in (7, 3, 5)]
    [[3, 5], [5], []]
    """

    runs: dict[int, list[int]] = field(default_factory=dict)
    now: list[int] = field(default_factory=list)
    at: int = 0

    def expect(self, unit: int, count: int = 1) -> list[int]:
        """Note that `unit` is needed now; up to `count` units expected after it, soonest first."""
        self.now.append(unit)
        run = self.runs.get(self.now[0])
        if run is None:
            return []
        if self.at >= len(run) or run[self.at] != unit:
            try:
                self.at = run.index(unit, self.at)
            except ValueError:
                return []
        self.at += 1
        return run[self.at : self.at + count]

    @property
    def at_known_place(self) -> bool:
        """Whether the unit needed now is not the first, and runs like this one were seen before."""
        return len(self.now) > 1 and self.now[0] in self.runs

    def close(self) -> None:
        """This run is over; the next one may be like it."""
        if self.now:
            self.runs[self.now[0]] = self.now
        self.restart()

    def restart(self) -> None:
        """This run came to nothing."""
        self.now, self.at = [], 0


@dataclass(slots=True)
class Stats:
    """Counts since the planner was made.

    Attributes:
        gathers: all-gathers of units.
        prefetched: how many of them were issued ahead.
        unused: how many of those nobody used.
        missed: how many could have been issued ahead, had the units run in the same order as before.
    """

    gathers: int = 0
    prefetched: int = 0
    unused: int = 0
    missed: int = 0


class Prefetch:
    """Expects what the last run that began with the same unit needed next, and chooses what of that is gathered ahead."""

    def __init__(self, records: dict[int, UnitRecord], pending: PendingBackwards, can_prefetch: Callable[[int], bool]) -> None:
        """`can_prefetch`: whether a unit is where it ran before, the same on every rank; no other is gathered ahead."""
        self._records, self._pending, self._can_prefetch = records, pending, can_prefetch
        self.run = 0  # outermost forwards begun and backwards ended so far
        self._ahead: dict[int, int] = {}  # gathered in expectation, not yet used, oldest first: unit -> in which run
        self.forward_order = ExecutionOrder()
        self.backward_order = ExecutionOrder()
        self.stats = Stats()

    def is_ahead(self, unit: int) -> bool:
        """Whether the unit was gathered ahead, in whichever run, and nobody used it yet."""
        return unit in self._ahead

    def is_current(self, unit: int) -> bool:
        """Whether the unit was gathered ahead in the run under way: what is gathered there cannot be out of date."""
        return self._ahead.get(unit) == self.run

    def note_used(self, unit: int) -> None:
        """The unit is needed now, or gone: it is no longer ahead."""
        self._ahead.pop(unit, None)

    def expect_in_forward(self, record: UnitRecord) -> list[int]:
        """Units that a forward needs after this one, soonest first."""
        return self.forward_order.expect(record.number, 1 if record.options.comm.prefetch_bytes is None else _AHEAD)

    def expect_in_backward(self, call: ForwardCall) -> list[int]:
        """Units that a backward needs after `call`, soonest first.

        The first backward has nothing to go by but forward: it expects the latest call before this one that waits for it.
        """
        budget = self._records[call.unit].options.comm.prefetch_bytes
        expected = self.backward_order.expect(call.unit, 1 if budget is None else _AHEAD)
        if expected:
            return expected
        before = self._pending.latest_before(call)
        return [] if before is None else [before.unit]

    def choose(
        self, record: UnitRecord, expected: Sequence[int], explicit: Sequence[int] | None, *, in_backward: bool
    ) -> list[int]:
        """Which units to gather while the unit of `record` computes: out of `expected`, or of `explicit` by the caller."""
        chosen: list[int] = []
        budget = record.options.comm.prefetch_bytes  # None: one unit
        for unit in expected if explicit is None else explicit:
            other = self._records.get(unit)
            if other is None or not self._can_prefetch(unit):
                continue
            if explicit is None and (self._ahead if budget is None else self._bytes_ahead() + other.nbytes > budget):
                break
            if other.residency is Residency.SHARDED and unit not in chosen and (other.options.in_backward or not in_backward):
                chosen.append(unit)
                self._ahead[unit] = self.run
        self.stats.prefetched += len(chosen)
        return chosen

    def count_missed(self, *, in_backward: bool) -> None:
        """A unit was not there when it was needed."""
        order = self.backward_order if in_backward else self.forward_order
        self.stats.missed += order.at_known_place

    def drop_unused(self) -> list[Action]:
        """What to do with units that were gathered ahead and that nobody used."""
        actions: list[Action] = []
        for unit in self._ahead:
            record = self._records[unit]
            if record.residency is Residency.GATHERING:
                self.stats.unused += 1
                record.move(Residency.SHARDED)
                actions += [Wait(unit), Reshard(unit)]
        self._ahead.clear()
        return actions

    def close_orders(self) -> None:
        """What ran so far is a run of its own; the next one may be like it."""
        self.forward_order.close()
        self.backward_order.close()

    def restart(self) -> None:
        """What ran since the last run ended came to nothing."""
        self._ahead.clear()
        self.forward_order.restart()
        self.backward_order.restart()

    def forget_orders(self) -> None:
        """As if nothing had run yet."""
        self.forward_order, self.backward_order = ExecutionOrder(), ExecutionOrder()

    def _bytes_ahead(self) -> int:
        return sum(self._records[unit].nbytes for unit in self._ahead)


__all__ = ["ExecutionOrder", "Prefetch", "Stats"]
