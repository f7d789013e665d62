"""The order in which units ran, and which units are expected next."""

from __future__ import annotations

from dataclasses import dataclass, field

from fullshard.schedule.residency import Action


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One forward of a unit: [start, end] on the planner's clock, which ticks whenever a unit's forward starts or ends."""

    unit: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the end of a forward brings: the call, the units inside that end with it, and what to do."""

    call: ForwardCall
    closed: list[int]
    actions: list[Action]


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
class CallsPerRun:
    """How often the modules of a unit of several run within one outermost forward, and did in the one before.

    >>> calls = CallsPerRun()
    >>> [calls.is_last(1), calls.is_last(1), calls.is_last(1)]
    [True, True, True]
    >>> [calls.is_last(2), calls.is_last(2), calls.is_last(2)]
    [False, False, True]
    """

    run: int = -1
    now: int = 0
    before: int = 0

    def is_last(self, run: int) -> bool:
        """Note a call within `run`; whether the run before had no more."""
        if run != self.run:
            self.run, self.now, self.before = run, 0, self.now
        self.now += 1
        return self.now >= self.before
