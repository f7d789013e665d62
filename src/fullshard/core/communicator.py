"""The communicator: runs the collectives of units on streams, logs each one, and lets the watchdog see each wait."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, GroupFingerprints, LoggedCall, described, headline
from fullshard.checks.state import WaitState
from fullshard.checks.watchdog import Watchdog, watchdog_of
from fullshard.comm.backends import carries_tags
from fullshard.comm.base import StartedWork
from fullshard.comm.gloo import MessageTag, PeerLost
from fullshard.comm.streams import DeviceStream, HostStream, Interrupted, Lane, Work, nothing
from fullshard.comm.traffic import TrafficCounter
from fullshard.core.collectives_pool import CollectivesPool
from fullshard.core.mesh import ShardAxis, with_subgroups
from fullshard.errors import StateError, warn_once
from fullshard.policies import CheckPolicy

_IMMEDIATE_STREAMS = {HostStream, DeviceStream}  # their `run` calls `start` before it returns
_LOG_COUNTERS: dict[str, Iterator[int]] = {}  # by name of an axis: counts its logs


class CollectiveCall(LoggedCall):
    """A collective on a stream, and its entry in the log. While a thread waits for it, the watchdog sees the call.

    Attributes:
        communicator: the communicator that runs the collective.
        work: the work on the stream.
        done: that of the work: returns True if it has completed, False also for completed work that cannot be polled.
        start: starts the collective; None once it has started, and for a collective that starts at once.
        hash: hash of all calls up to this one, from which its messages get their tag; unset if it starts at once.
    """

    # `Communicator.send` sets the attributes, since a constructor would cost one more Python call per collective.

    __slots__ = ("communicator", "done", "hash", "start", "work")

    communicator: Communicator
    work: Work
    done: Callable[[], bool]
    start: Callable[[], StartedWork] | None
    hash: int

    def begin(self) -> StartedWork:
        """Start the collective. Raises StateError if the log is closed."""
        self.communicator.message_tag.hash = self.hash
        self.log.check_open()
        start, self.start = self.start, None  # break the reference cycle: the owner of `start` may hold this call
        assert start is not None
        return start()

    def wait(self, *, block: bool = False) -> None:
        """Order the compute stream behind the work; with `block`, wait on the host as well.

        Raises StateError if the collective failed, or ended because the ranks diverged.
        """
        work, state, before = self.work, self.communicator.wait_state, None
        if state is not None:
            before, state.call = state.call, self
        try:
            if block:
                work.block()
            else:
                work.wait()
        except Interrupted as failure:  # the cause is on this rank, so the states of the other ranks are not requested
            raise StateError(f"rank {self.log.rank}, {self}: {failure}") from failure
        except Exception as failure:
            if state is None:
                raise
            raise self.communicator.error_for(failure, self) from failure
        except BaseException:  # most interrupts (Ctrl-C) come here, where the host spends its time waiting
            self.communicator.interrupted = True
            raise
        finally:
            if state is not None:
                state.call = before
        if self.log.desync_error is not None:
            self.log.check_open()

    def block(self) -> None:
        """Wait on the host as well. Raises StateError as `wait` does."""
        self.wait(block=True)


@dataclass(frozen=True, slots=True)
class _AxisLog:
    """The log of one axis, and its process groups, which are kept since the key of the log contains their ids."""

    log: CollectiveLog
    groups: list[dist.ProcessGroup]


def _log_name(axis: ShardAxis) -> str:
    """Return the name of a new log of an axis. It is equal on all ranks, since they create their logs in the same order."""
    name = f"{crc32(repr(axis.members).encode()):08x} {tuple(axis.mesh.mesh.shape)}"
    if axis.group is not None and axis.replicas is None:
        # Threads may create their logs in any order, so logs are counted by process group.
        name = f"{name} {axis.group.group_name}"
    return f"{name} {next(_LOG_COUNTERS.setdefault(name, itertools.count()))}"


def abort_groups(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Abort process groups whose collectives cannot complete, so that no thread waits for them any more."""
    for group in with_subgroups(groups):
        try:
            _torch.abort_group(group, device)
        except Exception as failure:
            warn_once(
                f"fullshard cannot abort a process group whose collectives do not complete ({headline(failure)}), so this "
                "rank may hang. End its process."
            )


class Communicator:
    """Runs and logs the collectives of one runtime, with one log per axis.

    Attributes:
        device: the device of the runtime.
        traffic: counts messages and bytes.
        message_tag: the tag of the next messages, on backends whose messages carry tags.
        collectives: creates the collectives of process groups.
        watchdog: the watchdog of this process; None until there is a log with other ranks.
        wait_state: the current wait of this thread, which the watchdog reads; None while `watchdog` is None.
        all_gather_stream: stream of the all-gathers.
        reduce_scatter_stream: stream of the reduce-scatters, heartbeats and other collectives over shards.
        all_reduce_stream: stream of the all-reduces over replicas.
        copy_in_stream: stream for the casts and copies from host memory before an all-gather, so that those of the next unit do
            not wait for the all-gather of this one; None on the CPU, where they are part of the all-gather.
        async_device: the device if it runs asynchronously, as an accelerator does; None for the CPU.
        next_event: event of the user, which the next outermost forward or `unshard()` is ordered behind; None if there is none.
        interrupted: True if an interrupt (Ctrl-C) broke off an event or a wait. The next event or public call starts over
            (`Recovery` in runtime.py).
    """

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        self.device = device
        self.traffic, self.message_tag = TrafficCounter(), MessageTag()
        self.collectives = CollectivesPool(device, self.traffic, self.message_tag)
        self.watchdog: Watchdog | None = None
        self.wait_state: WaitState | None = None
        self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream = lanes(device), lanes(device), lanes(device)
        if not callable(getattr(self.all_gather_stream, "run", None)):
            raise ValueError(
                f"Expected CommPolicy.lanes to return a Lane, with the method run(), got {self.all_gather_stream!r}."
            )
        self.copy_in_stream: Lane | None = None
        kinds = {type(self.all_gather_stream), type(self.reduce_scatter_stream), type(self.all_reduce_stream)}
        self.async_device = device if device.type != "cpu" or DeviceStream in kinds else None
        if self.async_device is not None:
            self.copy_in_stream = lanes(device)
        self._starts_at_once = kinds <= _IMMEDIATE_STREAMS
        self._in_flight: deque[CollectiveCall] | None = None  # for the watchdog; None on the CPU, where the host waits itself
        self.next_event: object = None
        self.interrupted = False
        self._logs: dict[tuple[int, int], _AxisLog] = {}  # by `ShardAxis.key`
        self._limits: tuple[float, float | None] = (1.0, None)  # patience and timeout in seconds

    # --- logs ---

    def log_of(self, axis: ShardAxis) -> CollectiveLog:
        """Return the log of an axis, which is the same one as long as its process groups exist."""
        if axis.hybrid is not None:  # the shards of its parameters are not communicated in forward and backward, except by hops
            log = self.log_of(axis.hybrid)
            groups = self._logs[axis.hybrid.key].groups
            if axis.group is not None and axis.group not in groups:
                groups.append(axis.group)
            return log
        known = self._logs.get(axis.key)
        if known is not None:
            return known.log
        for key, other in list(self._logs.items()):
            if not all(map(_torch.is_alive, other.groups)):
                other.log.abort = None  # which refers to the groups
                del self._logs[key]
        groups = [group for group in (axis.group, axis.replicas.group if axis.replicas else None) if group is not None]
        log = CollectiveLog(_log_name(axis), axis.members, dist.get_rank())
        self._logs[axis.key] = _AxisLog(log, groups)
        if len(axis.members) > 1 and groups:
            backend = _torch.backend_name(groups[0], axis.device)
            log.tagged = self.async_device is None and carries_tags(backend, axis.device)
            watchdog = watchdog_of(backend)
            if watchdog is not None:
                if watchdog is not self.watchdog:  # the first one, or that of a process group created after a destroyed one
                    self.watchdog, self.wait_state = watchdog, watchdog.new_wait_state()
                    self.wait_state.configure(*self._limits)
                    if self.async_device is not None and self._starts_at_once:
                        self._in_flight = self.wait_state.in_flight
                log.abort = partial(abort_groups, groups, self.device)
                watchdog.add(log)
        return log

    def logs(self) -> list[CollectiveLog]:
        """Return the logs of all axes."""
        return [one.log for one in self._logs.values()]

    def report_exception(self, place: str, failure: str | None = None) -> None:
        """Note in all logs that an exception left `place`, so that the watchdog publishes it to ranks that wait for this one.

        The note is void once this rank logs another call. `failure`: text of the exception; None while it still propagates.
        """
        for log in self.logs():
            log.note_exception(place, failure)
        if self.watchdog is not None:
            self.watchdog.follow_peers()

    @contextmanager
    def reporting_exceptions(self, place: str) -> Iterator[None]:
        """Report an exception that leaves the block to the other ranks, with `place`, and raise it again."""
        try:
            yield
        except Exception as failure:
            self.report_exception(place, described(failure))
            raise

    def roll_blocks(self) -> None:
        """Drop old calls from the logs. Call this at the begin of a step."""
        # A program without heartbeats would keep all calls otherwise.
        for one in self._logs.values():
            one.log.roll_block()

    def update_timeouts(self, checks: Sequence[CheckPolicy]) -> None:
        """Set patience and timeout to the shortest of these check policies, which are those of all units."""
        timeouts = [check.timeout for check in checks if check.timeout is not None]
        self._limits = min((check.patience for check in checks), default=1.0), min(timeouts, default=None)
        if self.wait_state is not None:
            self.wait_state.configure(*self._limits)

    def error_for(self, failure: BaseException, call: LoggedCall) -> StateError:
        """Return an error that names the collective that failed, and the states of the other ranks."""
        log = call.log
        if log.desync_error is None and isinstance(failure, PeerLost) and self.watchdog is not None:
            self.watchdog.peer_lost(call, failure.rank)
        if log.desync_error is not None:
            return StateError(log.desync_error)
        where = "" if self.watchdog is None else self.watchdog.describe_peers(log)
        text = f"rank {log.rank}, {call}: {headline(failure)}. {where}"
        # While the other ranks were replying, the watchdog may have found the cause.
        return StateError(text if log.desync_error is None else log.desync_error)

    # --- collectives ---

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
        start: Callable[[], StartedWork],
        finish: Callable[[], None] = nothing,
        after: Work | None = None,
        *,
        part: bool = False,
    ) -> CollectiveCall:
        """Run a collective on a stream and log it.

        Args:
            stream: the stream.
            fingerprints: the fingerprints of a parameter group or of another caller, which also name the log.
            action: text of the call in the log, equal on all ranks.
            start: starts the collective.
            finish: called on the stream after the collective completes.
            after: work of another stream; the collective starts behind it instead of behind the compute stream.
            part: True if the collective continues the call that was logged last, so that it is not logged again.

        Returns:
            The call, to be waited for.

        Raises:
            StateError: if the ranks diverged, or if another rank has ended.
        """
        sent = CollectiveCall()
        sent.communicator = self
        sent.log = log = fingerprints.log
        sent.fingerprint = fingerprint = fingerprints[action]
        if not part:
            log.append(fingerprint)
        sent.number = log.before + len(log.fingerprints)
        # A collective that starts at once needs no check by `CollectiveCall.begin`: `log.append` has just raised if the log is
        # closed. A collective that starts later, or whose messages carry a tag, needs it.
        if after is not None or not self._starts_at_once:
            sent.start, start = start, sent.begin
            sent.hash = log.hash if log.tagged else sent.number  # without tags the hash is not read, so it is not computed
        elif log.tagged:
            self.message_tag.hash = log.hash
        try:
            sent.work = stream.run(start, finish) if after is None else stream.run(start, finish, after=after)
            sent.done = sent.work.done
        except (StateError, torch.OutOfMemoryError):
            raise
        except RuntimeError as failure:
            raise self.error_for(failure, sent) from failure
        if self._in_flight is not None:
            self._in_flight.append(sent)
        return sent

    def all_reduce(
        self, axis: ShardAxis, fingerprints: GroupFingerprints, action: str, tensor: Tensor, *, maximum: bool = False
    ) -> None:
        """All-reduce a tensor over the shards (sum, or maximum), in place, and wait for it."""
        assert axis.group is not None
        collectives = self.collectives.of_process_group(axis.group)
        reduce = collectives.all_reduce_max if maximum else collectives.all_reduce
        self.send(self.reduce_scatter_stream, fingerprints, action, partial(reduce, tensor)).wait()

    @contextmanager
    def with_streams(self, wrap: Callable[[str, Lane], Lane]) -> Iterator[None]:
        """Within the block, run the collectives on `wrap(name, stream)` instead of each stream."""
        plain = self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream
        self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream = map(
            wrap, ("gather", "reduce", "replicate"), plain
        )
        try:
            yield
        finally:
            self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream = plain

    def wait_for_all_streams(self) -> None:
        """Leave the current wait, and order the compute stream and the host behind all other streams."""
        if self.wait_state is not None:
            self.wait_state.leave()
        for stream in (self.copy_in_stream, self.all_gather_stream, self.reduce_scatter_stream, self.all_reduce_stream):
            if stream is not None:
                stream.run(StartedWork, nothing).wait()
        # The interrupt may have come before a stream was ordered behind the backend's own stream, so events are not enough.
        if self.async_device is not None:
            torch.accelerator.synchronize(self.device.index)


__all__ = ["CollectiveCall", "Communicator"]
