"""Lanes that messages are queued on (streams of an accelerator, threads of a backend), and what is in flight on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from fullshard import _torch
from fullshard.collectives.base import StartedWork


class LaneWork(Protocol):
    """Work that was put on a lane."""

    def done(self) -> bool:
        """Whether `wait` would return at once.

        Returns:
            May be False for finished work, never True for unfinished.
        """
        ...

    def wait(self) -> None:
        """Order what the caller does next behind the work. Waiting twice is allowed."""
        ...

    def block(self) -> None:
        """As `wait`, and have the host wait too, for memory that it reads."""
        ...


class Lane(Protocol):
    """An ordered queue of device work beside the caller's own, the compute lane."""

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> LaneWork:
        """Queue `start` behind all that is on the compute lane now, and `finish` behind the collective it starts.

        Args:
            start: starts a collective and returns its work; called once, now or later.
            finish: called once, on the lane, when the collective is over: copies out of its memory.
            after: work of another lane, not waited for yet, that `start` is queued behind instead.

        Returns:
            The work, to be waited for on the compute lane.
        """
        ...


class Interrupted(RuntimeError):
    """Raised by a second wait for work during whose first wait an interrupt came."""


class _HostWork:
    __slots__ = ("_failure", "_finish", "_followers", "_pending")

    def __init__(self, pending: StartedWork, finish: Callable[[], None]) -> None:
        self._pending: StartedWork | None = pending
        self._finish = finish
        self._followers: list[_ChainedWork] = []
        self._failure: BaseException | None = None

    def follow(self, later: _ChainedWork) -> None:
        """Begin `later` as soon as this is waited for."""
        if self._pending is None:
            later.begin()
        else:
            self._followers.append(later)

    def done(self) -> bool:
        pending = self._pending
        if pending is None or pending.unpollable:
            return pending is None
        for work in pending.works:
            if not _torch.is_done(work):
                return False
        return True

    def wait(self) -> None:
        pending = self._pending
        if pending is None:
            return
        if self._failure is not None:  # gloo waits for ever if asked for the same message twice
            raise self._failure
        try:
            for work in pending.works:
                work.wait()
            if pending.then is not None:
                pending.then()
            self._finish()
            for later in self._followers:
                later.begin()
            self._followers.clear()
            self._finish, self._pending = nothing, None
        except Exception as failure:
            self._failure = failure
            raise
        except BaseException as interrupt:  # raised here and now; how far the work came until then is not known
            self._failure = Interrupted(f"{type(interrupt).__name__} came before it was finished: run the step again")
            raise

    block = wait


class _ChainedWork:
    """Work that begins when other work was waited for."""

    __slots__ = ("_before", "_begun", "_finish", "_start")

    def __init__(self, before: LaneWork, start: Callable[[], StartedWork], finish: Callable[[], None]) -> None:
        self._before, self._finish = before, finish
        self._start: Callable[[], StartedWork] = start
        self._begun: _HostWork | None = None

    def begin(self) -> None:
        start, finish = self._start, self._finish
        self._start, self._finish = StartedWork, nothing  # their owner may hold this work: a circle
        self._begun = _HostWork(start(), finish)

    def done(self) -> bool:
        return self._begun is not None and self._begun.done()

    def wait(self) -> None:
        self._before.wait()
        if self._begun is None:
            raise Interrupted("what it begins behind was interrupted: run the step again")
        self._begun.wait()

    block = wait


class HostLane:
    """The CPU: collectives run in the backend's threads from the start, and are finished by the thread that waits."""

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> LaneWork:
        """As `Lane.run`; with `after`, `start` is called when that is waited for."""
        if after is None:
            return _HostWork(start(), finish)
        later = _ChainedWork(after, start, finish)
        after.follow(later)
        return later


class _StreamWork:
    __slots__ = ("_device", "event")

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        _torch.current_stream(self._device).wait_event(self.event)

    def block(self) -> None:
        self.wait()
        self.event.synchronize()


class StreamLane:
    """A stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device, priority=-1)

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> LaneWork:
        """As `Lane.run`: all of it is queued at once, and ordered by events.

        Of work that raises, a part may be queued, in memory that the caller gives back then: the compute lane is behind it.
        """
        compute, lane = _torch.current_stream(self._device), self._stream
        if after is None:
            lane.wait_stream(compute)
        else:
            lane.wait_event(after.event)
        works: Sequence[Any] = ()
        try:
            with lane:
                pending = start()
                works = pending.works
                for work in works:
                    work.wait()
                if pending.then is not None:
                    pending.then()
                finish()
                return _StreamWork(lane.record_event(), self._device)
        except BaseException:
            with lane:
                for work in works:
                    with suppress(Exception):
                        work.wait()
            compute.wait_stream(lane)
            raise


def lane_for(device: torch.device) -> Lane:
    """A fresh lane of the kind that the device has."""
    return HostLane() if device.type == "cpu" else StreamLane(device)


def nothing() -> None:
    """Finish work that needs no finish."""


class InFlight:
    """Memory that a lane may still read: entries leave oldest first, once the compute lane was ordered behind their work.

    With `limit` entries inside, pushing another first waits for the oldest.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[LaneWork, Callable[[], None], bool]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, limit: int) -> None:
        """Wait until fewer than `limit` entries are inside."""
        while len(self._entries) >= limit:
            self._leave()

    def push(self, work: LaneWork, on_done: Callable[[], None], *, polled: bool = True) -> None:
        """Keep what `on_done` refers to alive until `work` was waited for, then call it.

        polled: whether it may leave as soon as it is done. That moment differs from rank to rank, so not if its end
            starts a collective.
        """
        self._entries.append((work, on_done, polled))

    def poll(self) -> None:
        """Let go of entries whose work is finished already."""
        while self._entries and self._entries[0][2] and self._entries[0][0].done():
            self._leave()

    def drain(self) -> None:
        """Wait for all entries."""
        self.make_room(1)

    def drain_quietly(self) -> None:
        """Wait for all entries, and drop the errors of their work: a step that is given up needs none of it."""
        while self._entries:
            with suppress(Exception):
                self._leave()

    def _leave(self) -> None:
        work, on_done, _ = self._entries.popleft()
        work.wait()
        on_done()
