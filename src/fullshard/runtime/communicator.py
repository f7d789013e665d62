"""The messages of units to other ranks: lanes, a log of every call, and waits that are watched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.backends import collectives_for
from fullshard.collectives.base import StartedWork
from fullshard.collectives.gloo import MessageTag, PeerLost
from fullshard.collectives.process_groups import HeldGroup
from fullshard.collectives.streams import HostLane, Interrupted, Lane, LaneWork, StreamLane, nothing
from fullshard.collectives.traffic import TrafficCounter
from fullshard.consistency.collective_log import CollectiveLog, GroupFingerprints, LoggedCall, described, headline
from fullshard.consistency.local_state import WaitState
from fullshard.consistency.process import watchdog_of
from fullshard.consistency.watchdog import Watchdog
from fullshard.errors import StateError
from fullshard.policies import CheckPolicy
from fullshard.runtime.collectives_pool import CollectivesPool
from fullshard.sharding.mesh import ShardAxis

_PROMPT = {HostLane, StreamLane}  # lanes that begin what they are given before they return
_COUNTS: _torch.PerRank[str, Iterator[int]] = _torch.PerRank()  # of logs of equal names


class TrackedWork(LoggedCall):
    """Work of a lane in which other ranks take part: while a thread waits for it, the watchdog knows for which call.

    `Communicator.send` fills it in, which saves each message a call of Python's.
    """

    __slots__ = ("communicator", "hash", "start", "work")

    communicator: Communicator
    work: LaneWork
    start: Callable[[], StartedWork] | None  # there is none, nor a hash, if the lane was given it
    hash: int  # of all calls up to this, if its messages bear it

    def begin(self) -> StartedWork:
        """Send its messages. Raises StateError if nothing is begun any more."""
        tag, log = self.communicator.collectives.message_tag, self.log
        tag.hash, tag.gate = self.hash, log
        start, self.start = self.start, None  # what it belongs to may hold us
        assert start is not None
        return log.begin(start)

    def done(self) -> bool:
        """Whether the work has ended; False for work that cannot be asked."""
        return self.work.done()

    def wait(self, *, block: bool = False) -> None:
        """Raises StateError if the work failed, or ended because the ranks parted."""
        work, state = self.work, self.communicator.wait_state
        if state is None:
            return work.block() if block else work.wait()
        before, state.call = state.call, self
        try:
            if block:
                work.block()
            else:
                work.wait()
        except Interrupted as failure:  # there is nothing to ask the others
            raise StateError(f"rank {self.log.rank}, {self}: {failure}") from failure
        except Exception as failure:
            raise self.communicator.explained(failure, self) from failure
        finally:
            state.call = before
        if self.log.desync_error is not None:
            raise StateError(self.log.desync_error)

    def block(self) -> None:
        """As `wait`, and hold the host until then."""
        self.wait(block=True)


@dataclass(frozen=True, slots=True)
class _AxisLog:
    """The log of one axis, and its process groups, which are kept so that no others have their ids."""

    log: CollectiveLog
    groups: tuple[HeldGroup, ...]

    @property
    def is_released(self) -> bool:
        return any(group.is_released for group in self.groups)


def _name_of(axis: ShardAxis) -> str:
    """A name for one more log of an axis, alike on all its ranks, which make their logs in one order."""
    name = f"{crc32(repr(axis.members).encode()):08x} {tuple(axis.mesh.mesh.shape)}"
    if axis.group is not None and axis.replicas is None:
        name = f"{name} {_torch.group_name(axis.group)}"  # threads may make theirs in any order
    return f"{name} {next(_COUNTS.setdefault(name, itertools.count()))}"


class Communicator:
    """communicator 1 - n logs, one per axis; lanes for gathers, for reductions over shards, and for those over replicas.

    Attributes:
        copy_lane: for casts and copies from the host that a gather begins with, so that those of the next unit do not wait for
            the gather of the last; None on the CPU, where a gather does them itself.
        away: the device, if it works behind the host's back, as an accelerator does; None for the CPU.
        collectives: of process groups.
        next_event: an event of the caller's that the next outermost forward, or gather by hand, is ordered behind.
        watchdog, wait_state: None as long as nobody else takes part in anything.
    """

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        self.device = device
        self.collectives = CollectivesPool(device, TrafficCounter(), MessageTag())
        self.watchdog: Watchdog | None = None
        self.wait_state: WaitState | None = None
        self.gather_lane, self.reduce_lane, self.replicate_lane = lanes(device), lanes(device), lanes(device)
        self.copy_lane: Lane | None = None
        kinds = {type(self.gather_lane), type(self.reduce_lane), type(self.replicate_lane)}
        self.away = device if device.type != "cpu" or StreamLane in kinds else None
        if self.away is not None:
            self.copy_lane = lanes(device)
        self._prompt = kinds <= _PROMPT
        self.next_event: object = None
        self._logs: dict[tuple[int, int], _AxisLog] = {}  # by axis
        self._limits: tuple[float, float | None] = (1.0, None)  # patience and timeout in seconds

    # --- logs ---

    @property
    def traffic(self) -> TrafficCounter:
        """Counts the messages."""
        return self.collectives.traffic

    def log_of(self, axis: ShardAxis) -> CollectiveLog:
        """The log of calls on an axis, one as long as the runtime lives."""
        known = self._logs.get(axis.key)
        if known is not None:
            return known.log
        for key, other in list(self._logs.items()):
            if other.is_released:
                del self._logs[key]
        groups = axis.held, None if axis.replicas is None else axis.replicas.held
        log = CollectiveLog(_name_of(axis), axis.members, dist.get_rank())
        self._logs[axis.key] = _AxisLog(log, tuple(group for group in groups if group is not None))
        over = next((group for group in groups if group is not None), None)
        if len(axis.members) > 1 and over is not None:
            backend = _torch.backend_name(over.group, axis.device)
            log.tagged = self.away is None and backend == "gloo"
            watchdog = watchdog_of(backend)
            if watchdog is not None:
                if watchdog is not self.watchdog:  # also of a process group that was made anew
                    self.watchdog, self.wait_state = watchdog, watchdog.new_wait_state()
                    self.wait_state.configure(*self._limits)
                watchdog.add(log)
        return log

    def logs(self) -> list[CollectiveLog]:
        """The logs of all axes."""
        return [one.log for one in self._logs.values()]

    def report_exception(self, place: str, failure: str | None = None) -> None:
        """An exception leaves this place: ranks that wait for this one are told so, unless it goes on soon."""
        for log in self.logs():
            log.note_exception(place, failure)
        if self.watchdog is not None:
            self.watchdog.stay_attentive()

    @contextmanager
    def leaving(self, place: str) -> Iterator[None]:
        """A block: others are told if an exception ends it here."""
        try:
            yield
        except Exception as failure:
            self.report_exception(place, described(failure))
            raise

    def roll_blocks(self) -> None:
        """At the beginning of a forward: a program without heartbeats must not remember all that it ever sent."""
        for one in self._logs.values():
            one.log.roll_block()

    def update_timeouts(self, checks: Sequence[CheckPolicy]) -> None:
        """Of what the units were told, the shortest patience and the shortest timeout count."""
        timeouts = [check.timeout for check in checks if check.timeout is not None]
        self._limits = min((check.patience for check in checks), default=1.0), min(timeouts, default=None)
        if self.wait_state is not None:
            self.wait_state.configure(*self._limits)

    def explained(self, failure: BaseException, call: LoggedCall) -> StateError:
        """An error that says which collective failed, and where the other ranks are."""
        log = call.log
        if log.desync_error is None and isinstance(failure, PeerLost) and self.watchdog is not None:
            self.watchdog.peer_lost(call, failure.rank)
        if log.desync_error is not None:
            return StateError(log.desync_error)
        where = "" if self.watchdog is None else self.watchdog.survey(log)
        text = f"rank {log.rank}, {call}: {headline(failure)}. {where}"
        return StateError(text if log.desync_error is None else log.desync_error)

    # --- messages ---

    def wait_for_next_event(self) -> None:
        """Order the compute lane behind the event that the caller left, if there is one."""
        event, self.next_event = self.next_event, None
        if event is not None:
            _torch.wait_for_event(self.device, event)

    def send(
        self,
        lane: Lane,
        fingerprints: GroupFingerprints,
        action: str,
        start: Callable[[], StartedWork],
        finish: Callable[[], None] = nothing,
        after: LaneWork | None = None,
        *,
        part: bool = False,
    ) -> TrackedWork:
        """Run a collective on a lane and enter it in the log, if it is not `part` of the last one.

        after: work of another lane that it begins behind, instead of behind the compute lane.

        Raises StateError if the ranks parted, or another rank is gone already.
        """
        sent = TrackedWork()
        sent.communicator = self
        sent.log = log = fingerprints.log
        sent.fingerprint = fingerprint = fingerprints[action]
        if not part:
            log.say(fingerprint)
        sent.number = log.before + len(log.fingerprints)
        begin = start  # at once: the log was open a moment ago
        if log.tagged or after is not None or not self._prompt:
            sent.start, begin = start, sent.begin
            sent.hash = log.hash if log.tagged else sent.number  # nobody reads it then, and hashing takes its time
        try:
            sent.work = lane.run(begin, finish) if after is None else lane.run(begin, finish, after=after)
        except (StateError, torch.OutOfMemoryError):
            raise
        except RuntimeError as failure:
            raise self.explained(failure, sent) from failure
        return sent

    def all_reduce(
        self, axis: ShardAxis, fingerprints: GroupFingerprints, action: str, tensor: Tensor, *, maximum: bool = False
    ) -> None:
        """Sum a tensor over the shards (or take the maximum), in place, and wait for it."""
        collectives = collectives_for(axis.group, self.device, self.collectives.message_tag)
        reduce = collectives.all_reduce_max if maximum else collectives.all_reduce
        self.send(self.reduce_lane, fingerprints, action, partial(reduce, tensor)).wait()

    @contextmanager
    def on_lanes(self, wrap: Callable[[str, Lane], Lane]) -> Iterator[None]:
        """For the length of a block, messages travel on what `wrap` makes of each lane and its name."""
        plain = self.gather_lane, self.reduce_lane, self.replicate_lane
        self.gather_lane, self.reduce_lane, self.replicate_lane = map(wrap, ("gather", "reduce", "replicate"), plain)
        try:
            yield
        finally:
            self.gather_lane, self.reduce_lane, self.replicate_lane = plain

    def order_behind_lanes(self) -> None:
        """Nothing is waited for any longer, and the compute lane is ordered behind whatever the others were given."""
        if self.wait_state is not None:
            self.wait_state.leave()
        for lane in (self.copy_lane, self.gather_lane, self.reduce_lane, self.replicate_lane):
            if lane is not None:
                lane.run(StartedWork, nothing).wait()
        if self.away is not None:  # a lane may have been cut short before it was ordered behind the backend's own stream
            torch.accelerator.synchronize(self.device.index)


__all__ = ["Communicator", "TrackedWork"]
