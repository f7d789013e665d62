"""Lanes that put work off at random, always legally, so that computing before waiting shows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fullshard import _torch
from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import HostLane, Interrupted, Lane, LaneWork, StreamLane, _HostWork, nothing


class Delays:
    """Lanes whose work is put off at random, always legally: what computes before it has waited then shows. For tests.

    On the CPU the lanes of one `Delays` share a queue: work starts when it is waited for, or whenever the dice say so, and
    always after all that was queued before it, so ranks that queue the same things never wait for each other in a circle. On
    an accelerator the stream is kept busy for a random time first.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._queue: deque[_DelayedWork] = deque()

    def lane(self, device: torch.device) -> Lane:
        return _DelayedLane(self, device)

    def stall(self, device: torch.device) -> None:
        _torch.keep_busy(device, self._dice.randrange(2_000_000))

    def add(self, work: _DelayedWork) -> None:
        self._queue.append(work)
        if self._dice.random() < 0.3:
            self.start(work)

    def start(self, work: _DelayedWork) -> None:
        """Start `work` and all that was queued before it."""
        while work.ticket is None:
            self._queue.popleft().start()

    def start_all(self) -> None:
        while self._queue:
            self._queue.popleft().start()


class _DelayedWork:
    """Work that may not have started; a ticket for it."""

    __slots__ = ("_after", "_delays", "_failure", "_finish", "_start", "ticket")

    def __init__(
        self, delays: Delays, start: Callable[[], StartedWork], finish: Callable[[], None], after: _DelayedWork | None
    ) -> None:
        self._delays, self._start, self._finish, self._after = delays, start, finish, after
        self.ticket: LaneWork | None = None
        self._failure: BaseException | None = None

    def start(self) -> None:
        try:
            after = None if self._after is None else self._after.ticket
            self.ticket = HostLane().run(self._start, self._finish, after)
        except BaseException as failure:  # whoever waits for it learns of it
            self._failure = failure if isinstance(failure, Exception) else Interrupted("it was interrupted: run the step again")
            self.ticket = _HostWork(StartedWork(), nothing)
            if not isinstance(failure, Exception):
                raise

    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done()

    def wait(self) -> None:
        self._delays.start(self)
        assert self.ticket is not None
        if self._failure is not None:
            raise self._failure
        self.ticket.wait()

    def block(self) -> None:
        self.wait()


class _DelayedLane:
    def __init__(self, delays: Delays, device: torch.device) -> None:
        self._delays, self._device = delays, device
        self._inner = None if device.type == "cpu" else StreamLane(device)

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> LaneWork:
        if self._inner is None:
            work = _DelayedWork(self._delays, start, finish, after)
            self._delays.add(work)
            return work

        def stalled() -> StartedWork:
            self._delays.stall(self._device)
            return start()

        return self._inner.run(stalled, finish, after)
