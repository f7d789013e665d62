"""Streams, events and the host as timelines with vector clocks, behind the interface of `torch.Stream`.

Nothing runs here: tensors are the CPU's and are computed at once, in the order of the host. What is kept is the order that a device
would have to keep: an operation comes behind what its stream was given before, behind what the host knew when it was queued, and
behind the events that its stream was told to wait for. The host comes behind a stream only by `synchronize`, or by a `query` that
answers yes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

import fullshard

SOURCE = str(Path(fullshard.__file__).parent)
TESTS = str(Path(__file__).parents[1])
HERE = str(Path(__file__).parent)

Clock = dict[int, int]
"""Of each timeline, up to which of its operations something is known to be over."""

Frame = tuple[str, int, str]
"""File, line and function."""


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows."""
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


def knows(clock: Clock, other: Clock) -> bool:
    return all(clock.get(number, 0) >= tick for number, tick in other.items())


def stack(most: int = 8) -> tuple[Frame, ...]:
    """The frames of fullshard and of the program, innermost first, without those of the detector."""
    found: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < most:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE) or (name.startswith(TESTS) and (not name.startswith(HERE) or name.endswith("programs.py"))):
            found.append((name, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


PLUMBING = ("comm/streams.py", "core/communicator.py")  # that every message passes


def site() -> str:
    """The function of fullshard's own that is running and wants an order, as `file function`; empty outside of it."""
    frame = sys._getframe(1)
    passed = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            where = f"{name[len(SOURCE) + 1 :]} {frame.f_code.co_name}"
            if not where.startswith(PLUMBING):
                return f"{where}{passed}"
            passed = passed or f" ({where.partition(' ')[2]})"
        frame = frame.f_back
    return ""


class Timeline:
    """The host, or a stream: operations in order."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: Clock = {number: 0}

    def advance(self) -> Clock:
        """One more operation; what it comes behind, itself included."""
        self.clock[self.number] += 1
        return dict(self.clock)


class Machine:
    """The timelines of one device and its host.

    eager: how often a query is answered with yes.
    drops: asked for the site and the kind of each ordering; where it says yes the ordering is left out, as a planted fault.
    """

    def __init__(self, dice: Random, eager: float, drops: Callable[[str, str], bool]) -> None:
        self.dice, self.eager, self.drops = dice, eager, drops
        self.timelines: list[Timeline] = []
        self.host = self.timeline("host")
        self.module = DeviceModule(self)
        self.current = self.main = Stream(self, name="compute")
        self.orderings: dict[tuple[str, str], int] = {}  # how often each site ordered something

    def timeline(self, name: str) -> Timeline:
        made = Timeline(len(self.timelines), name)
        self.timelines.append(made)
        return made

    def enqueue(self, timeline: Timeline) -> Clock:
        """The host queues an operation."""
        join(timeline.clock, self.host.clock)
        return timeline.advance()

    def order(self, later: Timeline, clock: Clock, kind: str) -> None:
        """Everything on `later` from now on comes behind `clock`."""
        where = site()
        if where:
            key = where, kind
            self.orderings[key] = self.orderings.get(key, 0) + 1
            if self.drops(where, kind):
                return
        if later is not self.host:
            join(later.clock, self.host.clock)
        join(later.clock, clock)


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._machine.current
        join(stream.timeline.clock, self._machine.host.clock)
        self.clock = dict(stream.timeline.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._machine.current).wait_event(self)

    def synchronize(self) -> None:
        self._machine.order(self._machine.host, self.clock, "synchronize")

    def query(self) -> bool:
        """Either answer, but yes if the host knows."""
        machine = self._machine
        if knows(machine.host.clock, self.clock):
            return True
        if machine.dice.random() >= machine.eager:
            return False
        machine.order(machine.host, self.clock, "query")
        return True


class Stream:
    def __init__(self, machine: Machine, name: str = "") -> None:
        self._machine = machine
        self.timeline = machine.timeline(name or f"stream {len(machine.timelines)}")
        self.device = torch.device("cpu")
        self._before: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self._machine.order(self.timeline, other.timeline.clock, "wait_stream")

    def wait_event(self, event: Event) -> None:
        self._machine.order(self.timeline, event.clock, "wait_event")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._machine.order(self._machine.host, self.timeline.clock, "synchronize")

    def __enter__(self) -> Stream:
        self._before.append(self._machine.current)
        self._machine.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.current = self._before.pop()


class DeviceModule:
    """What makes streams, and tells of the current one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def Stream(self, device: object = None, priority: int = 0) -> Stream:
        return Stream(self._machine)

    def current_stream(self, device: object = None) -> Stream:
        return self._machine.current

    def synchronize(self, device: object = None) -> None:
        for timeline in self._machine.timelines[1:]:
            self._machine.order(self._machine.host, timeline.clock, "synchronize")
