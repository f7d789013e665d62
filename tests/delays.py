"""Lanes of the CPU that put work off at random, always legally, so that computing before waiting shows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.base import StartedWork
from fullshard.comm.streams import HostStream, Interrupted, Work


class Delays:
    """A queue that several lanes share: work starts when it is waited for, or whenever the dice say so, and always after all
    that was queued before it, so ranks that queue the same things never wait for each other in a circle.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._queue: deque[_DelayedWork] = deque()

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Work:
        work = _DelayedWork(self, start, finish, after)
        self._queue.append(work)
        if self._dice.random() < 0.3:
            self.start(work)
        return work

    def start(self, work: _DelayedWork) -> None:
        """Start `work` and all that was queued before it."""
        while work.begun is None:
            self._queue.popleft().start()


class _DelayedWork:
    """Work that may not have started."""

    def __init__(
        self, delays: Delays, start: Callable[[], StartedWork], finish: Callable[[], None], after: _DelayedWork | None
    ) -> None:
        self._delays, self._start, self._finish, self._after = delays, start, finish, after
        self.begun: Work | None = None
        self._failure: BaseException | None = None

    def start(self) -> None:
        try:
            after = None if self._after is None else self._after.begun
            self.begun = HostStream().run(self._start, self._finish, after)
        except BaseException as failure:  # raised where the work is waited for
            self._failure = failure if isinstance(failure, Exception) else Interrupted("it was interrupted: run the step again")
            self.begun = HostStream().run(StartedWork, lambda: None)
            if not isinstance(failure, Exception):
                raise

    def done(self) -> bool:
        return self.begun is not None and self.begun.done()

    def wait(self) -> None:
        self._delays.start(self)
        assert self.begun is not None
        if self._failure is not None:
            raise self._failure
        self.begun.wait()

    def block(self) -> None:
        self.wait()


def late_lanes() -> Callable[[torch.device], Delays]:
    """For `CommPolicy(lanes=)`: lanes that share one queue, with dice of this rank's own."""
    shared = Delays(dist.get_rank())
    return lambda device: shared
