"""Streams on which collectives run (device streams, or the backend's threads on the CPU), and the collectives in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from fullshard import _torch
from fullshard.comm.base import StartedWork


class Work(Protocol):
    """A collective, or device work, queued on a stream."""

    def done(self) -> bool:
        """Return True if the work has completed.

        Returns:
            True only for completed work; False also for completed work that cannot be polled.
        """
        ...

    def wait(self) -> None:
        """Order the compute stream behind the work. Waiting twice is allowed."""
        ...

    def block(self) -> None:
        """Wait on the host as well, before the host reads the memory."""
        ...


class Lane(Protocol):
    """An in-order queue of device work beside the compute stream, which is the caller's current stream."""

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Work:
        """Queue `start` behind everything on the compute stream, and `finish` behind the collective that it starts.

        Args:
            start: starts a collective and returns its work; called once, now or later.
            finish: called once, on this stream, after the collective completes: copies out of its memory.
            after: work of another stream, not waited for yet; `start` is queued behind it instead of behind the compute stream.

        Returns:
            The queued work, to be waited for on the compute stream.
        """
        ...


class Interrupted(RuntimeError):
    """Raised by a repeated wait if an interrupt (Ctrl-C) cut the first wait short."""


class _HostWork:
    """A collective on the CPU. The thread that waits for it runs its copies and starts the work that follows it."""

    __slots__ = ("_failure", "_finish", "_followers", "_pending")

    def __init__(self, pending: StartedWork, finish: Callable[[], None]) -> None:
        self._pending: StartedWork | None = pending  # None once the work has been waited for
        self._finish = finish
        self._followers: list[_DeferredWork] = []
        self._failure: BaseException | None = None  # raised again by later waits

    def follow(self, later: _DeferredWork) -> None:
        """Start `later` when this work has been waited for."""
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
        if self._failure is not None:  # gloo hangs if the same message is waited for twice
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
        except BaseException as interrupt:  # Ctrl-C: the collective and its copies may be complete or not
            self._failure = Interrupted(
                f"The collective cannot complete: {type(interrupt).__name__} interrupted an earlier wait for it. "
                "Run the step again."
            )
            raise

    block = wait


class _DeferredWork:
    """Work that starts when other work has been waited for, since the CPU has no streams to order them on."""

    __slots__ = ("_before", "_begun", "_finish", "_start")

    def __init__(self, before: Work, start: Callable[[], StartedWork], finish: Callable[[], None]) -> None:
        self._before, self._finish = before, finish
        self._start: Callable[[], StartedWork] = start
        self._begun: _HostWork | None = None

    def begin(self) -> None:
        start, finish = self._start, self._finish
        self._start, self._finish = StartedWork, nothing  # break the reference cycle with their owner
        self._begun = _HostWork(start(), finish)

    def done(self) -> bool:
        return self._begun is not None and self._begun.done()

    def wait(self) -> None:
        self._before.wait()
        if self._begun is None:
            raise Interrupted("The collective cannot start: the work before it was interrupted. Run the step again.")
        self._begun.wait()

    block = wait


class HostStream:
    """The stream of the CPU: the backend's threads run a collective at once, and the thread that waits for it runs `finish`."""

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Work:
        """Start the collective now or, with `after`, when `after` is waited for."""
        if after is None:
            return _HostWork(start(), finish)
        later = _DeferredWork(after, start, finish)
        after.follow(later)
        return later


class _DeviceWork:
    """Work on a device stream: `event` is recorded on the stream after it."""

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


class DeviceStream:
    """A stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        # High priority, so that copies in and out of messages are not delayed behind queued compute kernels.
        self._device, self._stream = device, torch.Stream(device=device, priority=-1)

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Work:
        """Queue the collective and `finish` at once, ordered by events.

        If this raises, some kernels may be queued already, and the caller frees their memory. The compute stream then waits for
        this stream, so that no later kernel writes to that memory before the queued ones have run.
        """
        compute, stream = _torch.current_stream(self._device), self._stream
        if after is None:
            stream.wait_stream(compute)
        else:
            stream.wait_event(after.event)
        works: Sequence[Any] = ()
        try:
            with stream:
                pending = start()
                works = pending.works
                for work in works:
                    work.wait()
                if pending.then is not None:
                    pending.then()
                finish()
                return _DeviceWork(stream.record_event(), self._device)
        except BaseException:
            with stream:  # this stream waits for the works that have started, and the compute stream for this stream
                for work in works:
                    with suppress(Exception):
                        work.wait()
            compute.wait_stream(stream)
            raise


def stream_for(device: torch.device) -> Lane:
    """Return a new stream of the kind that `device` has."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


def nothing() -> None:
    """Do nothing: the `finish` of work that has none."""


class InFlight:
    """Queue of collectives whose memory a stream may still read.

    Entries are released in order. Before an entry's memory is freed, the compute stream is ordered behind its work, so that the
    allocator cannot hand that memory to a kernel that runs earlier.
    """

    def __init__(self) -> None:
        self.entries: deque[tuple[Work, Callable[[], None], bool]] = deque()  # (work, on_done, polled), oldest first

    def __len__(self) -> int:
        return len(self.entries)

    def make_room(self, limit: int) -> None:
        """Wait for the oldest entries, and release them, until fewer than `limit` are left."""
        while len(self.entries) >= limit:
            self._leave()

    def push(self, work: Work, on_done: Callable[[], None], *, polled: bool = True) -> None:
        """Keep the objects that `on_done` refers to alive until `work` has been waited for, then call it.

        Args:
            work: the work in flight.
            on_done: frees the memory.
            polled: allow `poll` to release the entry once its work completes. That moment differs between ranks, so it must be
                False if `on_done` starts a collective.
        """
        self.entries.append((work, on_done, polled))

    def poll(self) -> None:
        """Release the oldest entries whose work has completed."""
        entries = self.entries
        while entries and entries[0][2] and entries[0][0].done():
            work, on_done, _ = entries.popleft()
            work.wait()
            on_done()

    def drain(self) -> None:
        """Wait for all entries."""
        self.make_room(1)

    def drain_quietly(self) -> None:
        """Wait for all entries and ignore their errors, since the step is being aborted."""
        while self.entries:
            with suppress(Exception):
                self._leave()

    def _leave(self) -> None:
        work, on_done, _ = self.entries.popleft()  # first: if the wait raises, `drain_quietly` must not repeat it
        work.wait()
        on_done()
