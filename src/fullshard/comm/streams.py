"""Streams on which collectives run (device streams, or the backend's threads on the CPU), and the collectives in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch

from fullshard import _torch
from fullshard.checks.collective_log import GroupFingerprints, LoggedCall, headline
from fullshard.checks.state import WaitState
from fullshard.checks.watchdog import Watchdog
from fullshard.comm.base import Started, StartedWork
from fullshard.comm.gloo import MessageTag, PeerLost
from fullshard.errors import StateError


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
            finish: called once, on this stream, after the collective completes; copies its result, for example.
            after: work of another stream, not waited for yet; `start` is queued behind it instead of behind the compute stream.

        Returns:
            The queued work, to be waited for on the compute stream.
        """
        ...


class Interrupted(RuntimeError):
    """Why waits fail on the CPU after an interrupt (Ctrl-C) cut one short. Logged calls raise it as a StateError."""


class CollectiveCall(LoggedCall):
    """A collective on a stream, and its entry in the log. Calls that a stream's `run` creates have no entry.

    While a thread waits for a logged call, the watchdog sees the call.
    """

    # Class attributes are defaults; the creator of a call sets the rest. A constructor would cost a Python call per collective.
    streams: Streams | None = None  # whose `send` created this call; None without an entry in the log
    hash: int  # of the log up to this call, for the tag of its messages; set only if `begin` may start the call
    start: Callable[[], Started] | None = None  # for `begin`; None once it has started

    work: Work | None = None  # on a custom lane
    event: torch.Event | None = None  # on a device stream: recorded after `finish`
    device: torch.device  # of that stream

    # On the CPU, the thread that waits for a collective runs its copies and starts the collective that follows it.
    pending: Started = None
    finish: Callable[[], None] | None = None  # None once the collective has been waited for
    failure: Exception | None = None  # raised again by later waits
    after: CollectiveCall | None = None  # the call whose wait starts this one; None once this one has started
    followers: tuple[CollectiveCall, ...] = ()

    def begin(self) -> StartedWork:
        """Start the collective, for a custom lane or once `after` was waited for. Raises StateError if the log is closed."""
        start, self.start = self.start, None  # break the reference cycle: the owner of `start` may hold this call
        assert start is not None
        if self.streams is not None:
            self.streams.message_tag.hash = self.hash
            self.log.check_open()
        started = start()
        if isinstance(started, StartedWork):
            return started
        return StartedWork(() if started is None else (started,))

    def done(self) -> bool:
        """Return True if the collective has completed; False also for a completed one that cannot be polled."""
        if self.work is not None:
            return self.work.done()
        if self.event is not None:
            # While a graph of the device is captured nothing runs, and a query would spoil the capture.
            return not (self.streams is not None and self.streams.capturing) and self.event.query()
        if self.finish is None or self.after is not None:
            return self.finish is None
        return self.pending is None or _torch.is_done(self.pending)

    def wait(self, *, block: bool = False) -> None:
        """Order the compute stream behind the collective; with `block`, wait on the host as well.

        Raises StateError if the collective failed (without a watchdog the backend's error), or if its log is closed.
        """
        streams, before = self.streams, None
        state = None if streams is None else streams.wait_state
        if state is not None:
            before, state.call = state.call, self
        try:
            if self.event is not None:
                _torch.current_stream(self.device).wait_event(self.event)
                if block:
                    self.event.synchronize()
            elif self.work is not None:
                if block:
                    self.work.block()
                else:
                    self.work.wait()
            elif self.failure is not None:  # gloo hangs if the same message is waited for twice
                raise self.failure
            elif self.finish is not None:
                if self.after is not None:
                    self.after.wait()
                if self.pending is not None:
                    self.pending.wait()
                self.finish()
                for later in self.followers:
                    later.pending, later.after = later.begin(), None
                self.finish = self.pending = None
                self.followers = ()
        except Exception as failure:
            self.failure = failure
            if streams is None or isinstance(failure, StateError):
                raise
            if isinstance(failure, Interrupted):  # the cause is on this rank, so the states of the others are not requested
                raise StateError(f"rank {self.log.rank}, {self}: {failure}") from failure
            if state is None:
                raise
            raise streams.error_for(failure, self) from failure
        except BaseException as interrupt:  # most interrupts come during waits, where the host spends its time
            self.failure = Interrupted(  # the collective and its copies may be complete or not
                f"It is unknown whether the collective completed: {type(interrupt).__name__} interrupted an earlier wait. "
                "Run the step again."
            )
            if streams is not None:
                streams.interrupted = True
            raise
        finally:
            if state is not None:
                state.call = before
        if streams is not None and self.log.desync_error is not None:
            self.log.check_open()

    def block(self) -> None:
        """Wait on the host as well. Raises StateError as `wait` does."""
        self.wait(block=True)


class HostStream:
    """The stream of the CPU: the backend's threads run a collective at once, and the thread that waits for it runs `finish`."""

    def run(
        self, start: Callable[[], Started], finish: Callable[[], None], after: Any = None, call: CollectiveCall | None = None
    ) -> CollectiveCall:
        """Start the collective now or, with `after`, when `after` is waited for. `call`: the call to return."""
        call = CollectiveCall() if call is None else call
        call.finish = finish
        if after is None or after.finish is None:
            call.pending = start()
        else:
            call.start, call.after = start, after
            after.followers += (call,)
        return call


class DeviceStream:
    """A stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        # High priority, so that copies in and out of messages are not delayed behind queued compute kernels.
        self._device, self._stream = device, torch.Stream(device=device, priority=-1)

    def run(
        self, start: Callable[[], Started], finish: Callable[[], None], after: Any = None, call: CollectiveCall | None = None
    ) -> CollectiveCall:
        """Queue the collective and `finish` at once, ordered by events. `call`: the call to return.

        If this raises, some kernels may be queued already, and the caller frees their memory. The compute stream then waits for
        this stream, so that no later kernel writes to that memory before the queued ones have run.
        """
        call = CollectiveCall() if call is None else call
        compute, stream = _torch.current_stream(self._device), self._stream
        if after is None:
            stream.wait_stream(compute)
        else:
            stream.wait_event(after.event)
        pending: Any = None
        try:
            with stream:
                pending = start()
                if pending is not None:
                    pending.wait()
                finish()
                call.event, call.device = stream.record_event(), self._device
                return call
        except BaseException:
            with stream:  # this stream waits for the works that have started, and the compute stream for this stream
                for work in pending.works if isinstance(pending, StartedWork) else (pending,):
                    with suppress(Exception):
                        work.wait()
            compute.wait_stream(stream)
            raise


def stream_for(device: torch.device) -> Lane:
    """Return a new stream of the kind that `device` has."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


def nothing() -> None:
    """Do nothing: the `finish` of work that has none."""


class Streams:
    """The streams of one runtime, on which its collectives are sent and logged.

    Collectives of an `Agreement` run on the reduce-scatter stream. Of the others, those over replicas run on the all-reduce
    stream; all-gathers, all-to-alls and all that `gathered()` sends on the all-gather stream; others on the reduce-scatter one.
    """

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        self.device, self.message_tag = device, MessageTag()  # the tag of the next messages, where these carry tags
        self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream = lanes(device), lanes(device), lanes(device)
        if not callable(getattr(self.all_gather_stream, "run", None)):
            raise ValueError(
                f"Expected CommPolicy.lanes to return a Lane, with the method run(), got {self.all_gather_stream!r}."
            )
        kinds = {type(self.all_gather_stream), type(self.reduce_scatter_stream), type(self.all_reduce_stream)}
        # The device if work on it is asynchronous: an accelerator, or a CPU whose lanes are DeviceStreams. Else None.
        self.async_device = device if device.type != "cpu" or DeviceStream in kinds else None
        # For copy-ins (casts, copies from host memory), so that a unit's copy-in need not wait for the all-gather before it.
        # None on the CPU, where the copy-in is part of the all-gather.
        self.copy_in_stream = None if self.async_device is None else lanes(device)
        self._are_pollable = kinds == {DeviceStream}  # calls can be polled from any thread, so also from the watchdog's
        self.watchdog: Watchdog | None = None  # of this process; None until there is a log with other ranks
        self.wait_state: WaitState | None = None  # of this thread, which the watchdog reads; None while `watchdog` is None
        self.next_event: object = None  # a torch.Event of the user: for the next outermost forward, unshard() or set_states()
        self.capturing = False  # a step is captured in a graph
        # True if an interrupt broke off a hook, the end of a backward or a wait. The next hook or call then resets the runtime.
        self.interrupted = False

    def wait_for_next_event(self) -> None:
        """Order the compute stream behind `next_event`, if there is one, and clear it."""
        event, self.next_event = self.next_event, None
        if event is not None:
            _torch.wait_for_event(self.device, event)

    def send(
        self,
        stream: Lane,
        fingerprints: GroupFingerprints,
        action: str,
        start: Callable[[], Started],
        finish: Callable[[], None] = nothing,
        after: Work | None = None,
        *,
        part: bool = False,
    ) -> CollectiveCall:
        """Run a collective on a stream, log it, and return the call, to be waited for.

        `fingerprints` (of a group or another caller) names the log. `action` is the text of the call in the log, equal
        on all ranks. `finish` is called on the stream after the collective completes. With `after`, work of another stream, the
        collective starts behind it instead of behind the compute stream. A `part` continues the call that was logged last, and
        is not logged again.

        Raises StateError if the log is closed (`CollectiveLog.close`), or if the backend fails to start the collective.
        """
        call = CollectiveCall()
        call.streams = self
        call.log = log = fingerprints.log
        call.fingerprint = fingerprint = fingerprints[action]
        if part:
            log.check_open()
        else:
            log.append(fingerprint)
        call.number = log.before + len(log.fingerprints)
        try:
            if type(stream) is HostStream and after is None:  # as `run` does, without the cost of calling it
                if log.tagged:
                    self.message_tag.hash = log.hash
                call.finish, call.pending = finish, start()
            elif type(stream) is DeviceStream:
                stream.run(start, finish, after, call)
            else:
                call.hash = log.hash if log.tagged else 0
                if type(stream) is HostStream:
                    stream.run(start, finish, after, call)
                else:
                    call.start = start
                    call.work = stream.run(call.begin, finish, getattr(after, "work", None) or after)
        except (StateError, torch.OutOfMemoryError):
            raise
        except RuntimeError as failure:
            raise self.error_for(failure, call) from failure
        # For the watchdog to poll; not on the CPU, where the host waits, nor in a capture, which a poll on any thread spoils.
        if self._are_pollable and self.wait_state is not None and not self.capturing:
            self.wait_state.in_flight.append(call)
        return call

    @contextmanager
    def waiting(self, call: LoggedCall) -> Iterator[None]:
        """Show this wait to the watchdog. A RuntimeError of the block becomes the StateError of `error_for`."""
        state = self.wait_state
        before = None if state is None else state.call
        if state is not None:
            state.call = call
        try:
            yield
        except RuntimeError as failure:
            raise self.error_for(failure, call) from failure
        finally:
            if state is not None:
                state.call = before

    @contextmanager
    def waiting_for(self, tables: Sequence[GroupFingerprints], action: str) -> Iterator[None]:
        """Log the call of the block, which bypasses `send`, in the logs of all `tables`; show its wait in the last of them."""
        with ExitStack() as waits:
            for table in tables:
                waits.enter_context(self.waiting(table.call(action)))
            yield

    def error_for(self, failure: BaseException, call: LoggedCall) -> StateError:
        """Return an error: the verdict if the log is closed, else the failed collective and the states of the other ranks."""
        log = call.log
        if log.desync_error is None and isinstance(failure, PeerLost) and self.watchdog is not None:
            self.watchdog.peer_lost(call, failure.rank)
        if log.desync_error is not None:
            return StateError(log.desync_error)
        where = "" if self.watchdog is None else self.watchdog.describe_peers(log)
        text = f"rank {log.rank}, {call}: {headline(failure)}. {where}"
        # While the other ranks were replying, the watchdog may have found the cause.
        return StateError(text if log.desync_error is None else log.desync_error)

    def wait_for_all_streams(self) -> None:
        """Clear the wait that the watchdog sees. Let the compute stream and the host wait for all other streams."""
        if self.wait_state is not None:
            self.wait_state.call = None
        for stream in (self.copy_in_stream, self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream):
            if stream is not None:
                stream.run(StartedWork, nothing).wait()
        # An interrupt may have come before a stream was ordered behind the backend's own stream, so events are not enough.
        if self.async_device is not None:
            torch.accelerator.synchronize(self.device.index)


class InFlight:
    """Queue of collectives whose memory a stream or a message may still use. Entries are released in order.

    Before an entry's memory is freed, the compute stream is ordered behind its work, so that the allocator cannot hand that
    memory to a kernel that runs earlier.
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
        """Keep alive what `on_done` refers to until `work` has been waited for, then call `on_done` to free it.

        With `polled`, `poll` may release the entry once its work completes. That moment differs between ranks, so `polled` must
        be False if the wait or `on_done` starts a collective.
        """
        self.entries.append((work, on_done, polled))

    def poll(self) -> None:
        """Release the oldest entries whose work has completed."""
        entries = self.entries
        while entries and entries[0][2] and entries[0][0].done():
            self._leave()

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
