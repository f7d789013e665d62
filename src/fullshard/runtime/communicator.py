"""Says to other ranks what units have to say: lanes and process groups, a ledger of every call, and waits that are watched."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.backends import collectives_for
from fullshard.collectives.base import Collectives, StartedWork
from fullshard.collectives.custom import CustomCollectives
from fullshard.collectives.gloo import MessageTag, PeerLost
from fullshard.collectives.process_groups import HeldGroup, held
from fullshard.collectives.streams import HostLane, Interrupted, Lane, LaneWork, StreamLane, nothing
from fullshard.collectives.traffic import CountedCollectives, TrafficCounter
from fullshard.consistency.collective_log import CollectiveLog, GroupFingerprints, LoggedCall, described, headline
from fullshard.consistency.local_state import WaitState
from fullshard.consistency.process import watchdog_of
from fullshard.consistency.watchdog import Watchdog
from fullshard.errors import StateError
from fullshard.params.unsharded import GroupCollectives
from fullshard.policies import CheckPolicy, CommPolicy
from fullshard.runtime.options import UnitOptions
from fullshard.sharding.mesh import ShardAxis, beside

_PROMPT = {HostLane, StreamLane}  # lanes that begin what they are given before they return
_BOOKS: _torch.PerRank[str, Iterator[int]] = _torch.PerRank()  # ledgers of equal names, which all ranks make in one order


class TrackedWork(LoggedCall):
    """A ticket of work in which other ranks take part: while it is waited for, the watch knows for what.

    `Communicator.send` fills it in, which saves each message a call of Python's.
    """

    __slots__ = ("communicator", "hash", "start", "work")

    communicator: Communicator
    work: LaneWork
    start: Callable[[], StartedWork] | None  # there is none, nor a hash, if the lane was given it
    hash: int  # of all calls up to this, if its messages bear it

    def begin(self) -> StartedWork:
        """Send its messages. Raises StateError if nothing is begun any more."""
        tag, ledger = self.communicator.message_tag, self.log
        tag.hash, tag.gate = self.hash, ledger
        start, self.start = self.start, None  # what it belongs to may hold us
        assert start is not None
        return ledger.begin(start)

    def done(self) -> bool:
        """Whether the work has ended; False for work that cannot be asked."""
        return self.work.done()

    def wait(self, *, block: bool = False) -> None:
        """Raises StateError if the work failed, or ended because the ranks parted."""
        ticket, waiter = self.work, self.communicator.wait_state
        if waiter is None:
            return ticket.block() if block else ticket.wait()
        before, waiter.call = waiter.call, self
        try:
            if block:
                ticket.block()
            else:
                ticket.wait()
        except Interrupted as failure:  # there is nothing to ask the others
            raise StateError(f"rank {self.log.rank}, {self}: {failure}") from failure
        except Exception as failure:
            raise self.communicator.explained(failure, self) from failure
        finally:
            waiter.call = before
        if self.log.desync_error is not None:
            raise StateError(self.log.desync_error)

    def block(self) -> None:
        """As `wait`, and hold the host until then."""
        self.wait(block=True)


class Communicator:
    """communicator 1 - n ledgers, one per axis; three lanes: for gathers, for reductions over shards, and for those over
    replicas; collectives, one object per process group and role.
    """

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        self.device = device
        self.away = None if device.type == "cpu" else device  # to ask a device for its type takes longer than a heartbeat
        self.traffic = TrafficCounter()
        self.message_tag = MessageTag()
        self.watchdog: Watchdog | None = None
        self.wait_state: WaitState | None = None  # None as long as nobody else takes part in anything
        self.gather_lane, self.reduce_lane, self.replicate_lane = lanes(device), lanes(device), lanes(device)
        self._prompt = {type(self.gather_lane), type(self.reduce_lane), type(self.replicate_lane)} <= _PROMPT
        self._ledgers: dict[
            tuple[int, int], tuple[CollectiveLog, tuple[HeldGroup | None, HeldGroup | None]]
        ] = {}  # and their groups
        self._patience = 1.0  # seconds
        self._timeout: float | None = None  # seconds
        self._collectives: weakref.WeakValueDictionary[tuple[int, str], CountedCollectives] = weakref.WeakValueDictionary()
        self._bare: weakref.WeakKeyDictionary[HeldGroup, Collectives] = weakref.WeakKeyDictionary()

    # --- what is said ---

    def log_of(self, axis: ShardAxis) -> CollectiveLog:
        """What is said on an axis, one as long as the runtime lives."""
        groups = axis.held, None if axis.replicas is None else axis.replicas.held  # kept, so that no other has their ids
        known = self._ledgers.get(axis.key)
        if known is not None:
            return known[0]
        ranks = axis.members
        name = f"{crc32(repr(ranks).encode()):08x} {tuple(axis.mesh.mesh.shape)}"
        if axis.group is not None and axis.replicas is None:
            name = f"{name} {_torch.group_name(axis.group)}"  # threads may make theirs in any order
        found = CollectiveLog(f"{name} {next(_BOOKS.setdefault(name, itertools.count()))}", ranks, dist.get_rank())
        for key, (_, others) in list(self._ledgers.items()):
            if any(one is not None and one.is_released for one in others):
                del self._ledgers[key]
        self._ledgers[axis.key] = found, groups
        over = groups[0] if groups[0] is not None else groups[1]
        if len(ranks) > 1 and over is not None:
            backend = _torch.backend_name(over.group, axis.device)
            found.tagged = self.away is None and backend == "gloo"
            watch = watchdog_of(backend)
            if watch is not None:
                if watch is not self.watchdog:  # also of a process group that was made anew
                    self.watchdog, self.wait_state = watch, watch.new_wait_state()
                    self.wait_state.configure(self._patience, self._timeout)
                watch.add(found)
        return found

    @property
    def ledgers(self) -> list[CollectiveLog]:
        """The logs of all axes."""
        return [ledger for ledger, _ in self._ledgers.values()]

    def report_exception(self, place: str, failure: str | None = None) -> None:
        """An exception leaves this place: ranks that wait for this one are told so, unless it goes on soon."""
        for ledger in self.ledgers:
            ledger.note_exception(place, failure)
        if self.watchdog is not None:
            self.watchdog.stay_attentive()

    @contextmanager
    def leaving(self, place: str) -> Iterator[None]:
        """What is done within the block: others are told if an exception ends it here."""
        try:
            yield
        except Exception as failure:
            self.report_exception(place, described(failure))
            raise

    def roll_pages(self) -> None:
        """For who begins a forward: a program without heartbeats shall not remember all that it ever said."""
        for ledger, _ in self._ledgers.values():
            ledger.roll_page()

    def update_timeouts(self, checks: Sequence[CheckPolicy]) -> None:
        """Of what the units were told, the shortest patience counts."""
        self._patience = min((check.patience for check in checks), default=1.0)
        self._timeout = min((check.timeout for check in checks if check.timeout is not None), default=None)
        if self.wait_state is not None:
            self.wait_state.configure(self._patience, self._timeout)

    def explained(self, failure: BaseException, entry: LoggedCall) -> StateError:
        """What a failed collective was about, and where the other ranks are."""
        ledger = entry.log
        if ledger.desync_error is None and isinstance(failure, PeerLost) and self.watchdog is not None:
            self.watchdog.peer_lost(entry, failure.rank)
        if ledger.desync_error is not None:
            return StateError(ledger.desync_error)
        where = "" if self.watchdog is None else self.watchdog.survey(ledger)
        text = f"rank {ledger.rank}, {entry}: {headline(failure)}. {where}"
        return StateError(text if ledger.desync_error is None else ledger.desync_error)

    def send(
        self,
        lane: Lane,
        line: GroupFingerprints,
        action: str,
        start: Callable[[], StartedWork],
        finish: Callable[[], None] = nothing,
        after: TrackedWork | None = None,
        *,
        part: bool = False,
    ) -> TrackedWork:
        """Run a collective on a lane and enter it in the ledger, if it is not part of the last one, which it comes `after`.

        Raises StateError if the ranks parted, or another rank is gone already.
        """
        sent = TrackedWork()
        sent.communicator = self
        sent.log = ledger = line.log
        sent.fingerprint = kind = line[action]
        if not part:
            ledger.say(kind)
        sent.number = ledger.before + len(ledger.fingerprints)
        begin = start  # at once: the ledger was open a moment ago
        if ledger.tagged or after is not None or not self._prompt:
            sent.start, begin = start, sent.begin
            sent.hash = ledger.hash if ledger.tagged else sent.number  # which is for nobody then, and hashing takes its time
        try:
            sent.work = lane.run(begin, finish) if after is None else lane.run(begin, finish, after=after.work)
        except (StateError, torch.OutOfMemoryError):
            raise
        except RuntimeError as failure:
            raise self.explained(failure, sent) from failure
        return sent

    def all_reduce(
        self, axis: ShardAxis, line: GroupFingerprints, action: str, tensor: Tensor, *, maximum: bool = False
    ) -> None:
        """Sum a tensor over the shards (or take the maximum), in place, by torch's own collectives, and wait for it."""
        collectives = collectives_for(axis.group, self.device, self.message_tag)
        reduce = collectives.all_reduce_max if maximum else collectives.all_reduce
        self.send(self.reduce_lane, line, action, partial(reduce, tensor)).wait()

    def order_behind_lanes(self) -> None:
        """Nothing is waited for any longer, and the compute lane is ordered behind whatever the others were given."""
        if self.wait_state is not None:
            self.wait_state.leave()
        for lane in (self.gather_lane, self.reduce_lane, self.replicate_lane):
            lane.run(StartedWork, nothing).wait()
        if self.away is not None:  # a lane may have been cut short before it was ordered behind the backend's own stream
            torch.accelerator.synchronize(self.device)

    # --- who carries it ---

    def bare(self, group: dist.ProcessGroup) -> Collectives:
        """torch's collectives on a group of a ledger's."""
        found = self._bare.get(held(group))
        if found is None:
            found = self._bare[held(group)] = collectives_for(group, self.device, self.message_tag)
        return found

    def carriers(self, axis: ShardAxis, options: UnitOptions) -> GroupCollectives:
        """Who carries the messages of groups on `axis`. May make process groups, so it is collective over the axis.

        Raises ValueError for collectives of the caller's that do not fit.
        """
        gather = reduce = self._main_collectives(axis, options.comm)
        if options.separate_reduce and axis.group is not None and axis.ranks > 1:
            reduce = self._known(axis, "reduce", dist.get_process_group_ranks(axis.group), options.comm)
        if axis.group is not None:
            if options.all_gather is not None or options.memory is not None:
                custom = CustomCollectives(gather.inner, axis.group, options.memory, all_gather=options.all_gather)
                gather = CountedCollectives(custom, self.traffic, keeps=gather)
            if options.reduce_scatter is not None or options.memory is not None:
                custom = CustomCollectives(reduce.inner, axis.group, options.memory, reduce_scatter=options.reduce_scatter)
                reduce = CountedCollectives(custom, self.traffic, keeps=reduce)
        replicate = retain = None
        if axis.replicas is not None:
            replicate = self._known(axis, "replicate", axis.replicas.group, options.comm)
        if options.subgroup_size is not None and axis.group is not None and axis.ranks % options.subgroup_size == 0:
            first = axis.rank - axis.rank % options.subgroup_size
            ranks = dist.get_process_group_ranks(axis.group)[first : first + options.subgroup_size]
            if len(ranks) < axis.ranks:
                retain = self._known(axis, f"retain {options.subgroup_size}", ranks, options.comm)
        return GroupCollectives(gather, reduce, replicate, retain, self.traffic)

    def _main_collectives(self, axis: ShardAxis, comm: CommPolicy) -> CountedCollectives:
        found = self._known(axis, "shard" if axis.group is not None else "alone", axis.group, comm)
        if (found.ranks, found.rank) != (axis.ranks, axis.rank):
            raise ValueError(
                f"CommPolicy.collectives must give collectives of rank {axis.rank} of {axis.ranks}, as the mesh has it, "
                f"got rank {found.rank} of {found.ranks}"
            )
        return found

    def _known(
        self, axis: ShardAxis, role: str, group: dist.ProcessGroup | list[int] | None, comm: CommPolicy
    ) -> CountedCollectives:
        """Collectives of one process group of `axis` (or of a new one of these ranks), one object as long as it is used."""
        owner = axis.held if axis.held is not None or axis.replicas is None else axis.replicas.held
        made: dist.ProcessGroup | None
        if isinstance(group, list):
            assert axis.group is not None
            made = beside(axis.group, role, group)
        else:
            made = group
        if comm.collectives is not None and made is not None:
            given = comm.collectives(made)
            if isinstance(getattr(given, "tag", None), MessageTag):
                given.tag = self.message_tag
            return CountedCollectives(given, self.traffic)
        key = (id(owner), role if role != "replicate" or axis.replicas is None else f"replicate {id(axis.replicas.held)}")
        found = self._collectives.get(key)
        if found is None:
            found = CountedCollectives(collectives_for(made, axis.device, self.message_tag), self.traffic, keeps=owner)
            self._collectives[key] = found
        return found


__all__ = ["Communicator", "TrackedWork"]
