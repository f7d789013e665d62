"""The scheduler: decides what to unshard, reshard and reduce, and when. No tensors; it decides the same on every rank."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fullshard.errors import InternalError
from fullshard.policies import CommPolicy, StateSharding

_MAX_PREFETCHED = 64  # units that may be unsharded ahead, whatever the budget in bytes
_REMEMBERED_FORWARDS = 64  # outermost forwards after which a backward that has not come is no longer expected
_REMEMBERED_RUNS = 256  # runs in an execution order


# --- values ---


class Residency(enum.Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"

    __hash__ = object.__hash__  # Enum's own hash runs in Python, and each transition needs it


# The legal transitions. Each method that makes one checks where the unit is, except after errors; the tests check them all
# against this table.
TRANSITIONS = {
    (Residency.SHARDED, Residency.GATHERING): "all-gather started",
    (Residency.GATHERING, Residency.FULL): "all-gather waited on",
    (Residency.GATHERING, Residency.SHARDED): "prefetched, never used",
    (Residency.FULL, Residency.SHARDED): "compute is done",
}


class KeepAfterForward(enum.Enum):
    """Which unsharded parameters stay after a forward with grad.

    After one without grad only those of KEPT units stay, and those that the user keeps with resident().
    """

    NEVER = "never"  # reshard_after_forward=True: no unsharded parameters stay
    ALWAYS = "always"  # reshard_after_forward=False: all unsharded parameters stay
    OUTERMOST = "outermost"  # reshard_after_forward=None: those of the outermost unit stay
    PARTLY = "partly"  # reshard_after_forward=int: each smaller group of ranks keeps one copy
    KEPT = "kept"  # ZERO1 and ZERO2: unsharded parameters stay until the shards are written, also after backward


@dataclass(slots=True)  # frozen ones take twice as long to make
class Action:
    """One thing for the runtime to do with one unit."""

    unit: int


class Unshard(Action):
    """Start the all-gather of the unit's parameters."""


class Wait(Action):
    """Order the compute stream behind the all-gather."""


class SaveSubgroupShard(Action):
    """Copy the part of the unsharded parameters that this rank keeps for its smaller group, before they are freed."""


class Reshard(Action):
    """Free the unsharded parameters."""


class Reduce(Action):
    """Hand the gradients of the unsharded parameters to the reducer, which reduces or keeps them."""


class PassBy(Action):
    """Log a backward through the unit that reaches inputs only, so there is nothing to reduce."""


class ForwardCall(NamedTuple):
    """One forward of a unit, as an interval on the scheduler's clock, which ticks when any unit's forward starts or ends."""

    unit: int
    start: int
    end: int
    copied: bool = False  # it used a copy of the parameters, so that its backward needs none


class ForwardResult(NamedTuple):
    """The result of `Scheduler.after_forward`."""

    call: ForwardCall
    closed: list[ForwardCall]  # calls inside it that never ended by themselves
    actions: list[Action]


class ScheduleOptions(Protocol):
    """The options of a unit that the scheduler reads; `UnitOptions` has them."""

    @property
    def keep_after_forward(self) -> KeepAfterForward:
        """When to reshard after forward."""

    @property
    def states(self) -> StateSharding:
        """The level of ZeRO, which says whether the unsharded parameters are kept between steps."""

    @property
    def keep_after_backward(self) -> bool:
        """True to keep the unsharded parameters when a backward ends."""

    @property
    def in_backward(self) -> bool:
        """True if the unit's backward needs the unsharded parameters."""

    @property
    def comm(self) -> CommPolicy:
        """`prefetch_bytes` of it: the budget of prefetching while the unit computes. None means one unit."""


def _always() -> bool:
    return True


@dataclass(slots=True, eq=False)
class UnitRecord:
    """The scheduler's view of one unit. Only the scheduler changes `residency`."""

    number: int
    options: ScheduleOptions
    is_attached: Callable[[], bool] = _always

    # When to reshard after forward, and whether to reshard after backward: from `options`.
    policy: KeepAfterForward = field(init=False)
    stays_after_backward: bool = field(init=False)

    # Number of units to prefetch at most, from `options`; their bytes may allow fewer.
    ahead: int = field(init=False)

    # Its actions, made once.
    unshard: Unshard = field(init=False)
    wait: Wait = field(init=False)
    reshard: Reshard = field(init=False)
    reduce: Reduce = field(init=False)

    # Bytes of the unsharded parameters.
    nbytes: int = 0

    # Units to prefetch as the user set them, instead of those that the last run needed next.
    next_forward: tuple[int, ...] | None = None
    next_backward: tuple[int, ...] | None = None

    # resident() blocks around the unit. While there are any, it stays unsharded.
    resident_blocks: int = 0

    residency: Residency = Residency.SHARDED

    # Calls whose backward may still come, by the order of events alone. Equal on every rank, so it may decide about
    # collectives.
    pending_backwards: int = 0

    # Calls on this rank whose backward has not begun and whose graph is not freed. It differs between ranks, so it decides
    # what is legal, never what is sent.
    live_graphs: int = 0

    # Forwards of the unit in progress.
    running: int = 0

    # Graphs of calls that ended until this time are not counted, since a reset forgot them.
    since: int = -1

    # The last forward outside of a backward, which a recomputation repeats, and whether it (or its recomputation) had grad.
    last: ForwardCall | None = None
    had_grad: bool = False

    unsharded_by_user: bool = False

    # The phase of a backward with create_graph=True. Its graph needs the parameters until the next backward ends. -1: none.
    create_graph_phase: int = -1

    def __post_init__(self) -> None:
        self.configure(self.options, nbytes=0)
        number = self.number
        self.unshard, self.wait, self.reshard, self.reduce = Unshard(number), Wait(number), Reshard(number), Reduce(number)

    @property
    def is_pinned(self) -> bool:
        """True if the user unsharded the unit, with unshard() or resident()."""
        return self.residency is Residency.FULL and (self.unsharded_by_user or self.resident_blocks > 0)

    def configure(self, options: ScheduleOptions, *, nbytes: int) -> None:
        """Set the options, and the bytes of the unsharded parameters."""
        self.options, self.nbytes = options, nbytes
        kept = options.states.keeps_parameters
        self.policy = KeepAfterForward.KEPT if kept else options.keep_after_forward
        self.stays_after_backward = kept or options.keep_after_backward
        self.ahead = 1 if options.comm.prefetch_bytes is None else _MAX_PREFETCHED

    def enter_resident(self) -> bool:
        """Count a resident() block that begins. Return True if it is the outermost one."""
        self.resident_blocks += 1
        return self.resident_blocks == 1

    def leave_resident(self) -> bool:
        """Count a resident() block that ends. Return True if it was the outermost one."""
        self.resident_blocks -= 1
        return self.resident_blocks == 0

    def clear(self) -> None:
        """Mark the unit sharded after its unsharded parameters were dropped."""
        self.residency, self.unsharded_by_user, self.create_graph_phase = Residency.SHARDED, False, -1


@dataclass(slots=True)
class ExecutionOrder:
    """Orders in which units were needed in earlier runs, each stored under its first unit, to predict the next units.

    The run that is stored last pushes out the one that was stored longest ago, so that deleted models are forgotten. Which one
    that is depends on the order of runs alone, never on which models a rank has deleted.

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
    has_left: bool = False  # True if a known run had another unit in the place of the current one

    def expect(self, unit: int, count: int = 1) -> list[int]:
        """Record that `unit` is needed now. Return up to `count` units that are expected next, soonest first."""
        self.now.append(unit)
        run = self.runs.get(self.now[0])
        if run is None:
            return []
        self.has_left = self.at >= len(run) or run[self.at] != unit
        if self.has_left:
            try:
                self.at = run.index(unit, self.at)
            except ValueError:  # a unit that the known run lacks: what comes after it may be known again
                return []
        self.at += 1
        return run[self.at : self.at + count]

    def close(self) -> None:
        """Store the current run, and begin a new one."""
        if self.now:
            self.runs.pop(self.now[0], None)
            self.runs[self.now[0]] = self.now
            if len(self.runs) > _REMEMBERED_RUNS:
                del self.runs[next(iter(self.runs))]
        self.restart()

    def restart(self) -> None:
        """Drop the current run."""
        self.now, self.at, self.has_left = [], 0, False


@dataclass(slots=True)
class Stats:
    """Counts since the scheduler was created.

    Attributes:
        gathers: all-gathers of units.
        prefetched: all-gathers that were started ahead.
        unused: prefetched all-gathers that nothing used.
        missed: all-gathers that were not started ahead since the units ran in another order than before.
    """

    gathers: int = 0
    prefetched: int = 0
    unused: int = 0
    missed: int = 0


# --- the scheduler ---


class Scheduler:
    """Turns events of forward and backward into actions. It knows units by their number.

    One scheduler serves all units of a thread on a device, of whichever models. So "this run" is the outermost forward that
    runs, or the backward of several of them.

    Backward mirrors forward: autograd runs ready nodes latest first. So when the backward of a call that ended at time t
    begins, every call that *started* after t has finished its backward, and its unit can be reduced and resharded. The forward
    alone therefore decides when to reduce, the same way on every rank, whichever parameters a rank used, and all ranks issue
    reduce-scatters and all-gathers in one order.

        forward   A(1  2) B(3  4) C(5  6)
        backward  C ...... B: C started at 5 > 4, so reduce C ...... A: reduce B ...... end: reduce A

    Attributes:
        clock: ticks when a forward starts or ends.
        running: forwards in progress, outermost first; until they end, their `end` is their start.
        stats: counts of all-gathers.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.running: list[ForwardCall] = []
        self.stats = Stats()
        self.forward_order, self.backward_order = ExecutionOrder(), ExecutionOrder()
        self._records: dict[int, UnitRecord] = {}

        # Outermost forwards begun, backwards begun and backwards ended so far: the number of the current phase.
        self._phase = 0

        # Units unsharded ahead and not used yet, oldest first: unit -> the phase in which that happened.
        self._prefetched: dict[int, int] = {}

        # Calls with grad whose backward has not begun, by their end, oldest first. Only the order of events changes it, so it
        # is equal on all ranks. A call leaves when its backward begins, when a backward ends that reached a later call, or
        # after `_REMEMBERED_FORWARDS` outermost forwards.
        self._pending: dict[int, ForwardCall] = {}
        self._outermost_starts: deque[int] = deque(maxlen=_REMEMBERED_FORWARDS)  # of the last outermost forwards, on the clock

        # The running backward: unit -> start of its earliest call whose backward has begun, until it is reduced; the ends of
        # all calls whose backward has begun; and the latest start reached so far.
        self._entered: dict[int, int] = {}
        self._passed: set[int] = set()  # the entered units of which no parameter gets a gradient
        self._begun: set[int] = set()
        self._latest = -1
        self._has_begun_backward = False

        # Units whose forward runs inside backward, for activation checkpointing.
        self._recomputing: list[int] = []

    # --- units ---

    def register(self, unit: int, options: ScheduleOptions, is_attached: Callable[[], bool] = _always) -> UnitRecord:
        """Add a unit and return its record.

        Args:
            unit: its number.
            options: its options.
            is_attached: returns True while the unit is in its place in the model, with the same answer on all ranks. Only then
                is it prefetched.
        """
        record = self._records[unit] = UnitRecord(unit, options, is_attached)
        return record

    def unregister(self, unit: int) -> None:
        """Remove a unit whose module was deleted.

        Orders keep its number while they keep the run, since other ranks may delete the module later: predictions must stay
        equal on all ranks.
        """
        self._records.pop(unit, None)
        self._entered.pop(unit, None)
        self._passed.discard(unit)
        self._prefetched.pop(unit, None)
        self.running[:] = [call for call in self.running if call.unit != unit]
        self._pending = {end: call for end, call in self._pending.items() if call.unit != unit}

    def knows(self, unit: int) -> bool:
        """Return True if the unit is registered."""
        return unit in self._records

    def is_running(self, unit: int) -> bool:
        """Return True if a forward of the unit is in progress."""
        record = self._records.get(unit)
        return record is not None and record.running > 0

    def running_units(self) -> list[int]:
        """Return the units whose forward is in progress, outermost first."""
        return [call.unit for call in self.running]

    def outermost(self) -> int | None:
        """Return the unit of the outermost forward in progress."""
        return self.running[0].unit if self.running else None

    def in_backward(self, unit: int) -> bool:
        """Return True if the running backward has entered the unit and not reduced it yet."""
        return unit in self._entered

    def awaits_backward(self, unit: int) -> bool:
        """Return True if a graph on this rank may still need the unsharded parameters."""
        return self._records[unit].live_graphs > 0 or unit in self._entered

    def expects_backward(self, unit: int) -> bool:
        """Return True if a backward of the unit may come or is running, by the order of events alone."""
        return self._records[unit].pending_backwards > 0 or unit in self._entered

    # --- forward ---

    def before_forward(self, unit: int, *, stale: bool = False) -> list[Action]:
        """Unshard the unit, and prefetch the next ones. A forward that is recomputed calls `before_recompute` instead.

        Args:
            unit: the unit.
            stale: True if the shards changed since the unit was unsharded.
        """
        actions = [] if self.running else self._begin_run(unit)
        self.clock += 1
        self.running.append(ForwardCall(unit, self.clock, self.clock))
        record = self._records[unit]
        record.running += 1
        expected = self.forward_order.expect(unit, record.ahead)
        in_backward = len(self._entered) > 0
        return actions + self._unshard_and_prefetch(record, expected, record.next_forward, stale=stale, in_backward=in_backward)

    def _begin_run(self, unit: int) -> list[Action]:
        """Begin an outermost forward."""
        now = self.forward_order.now
        if now[:1] == [unit] or len(now) > 8 * len(self._records):
            self.forward_order.close()
        actions = [] if unit in self._prefetched else self._drop_unused()
        if len(self._outermost_starts) == _REMEMBERED_FORWARDS:
            self._expire(before=self._outermost_starts[0])
        self._outermost_starts.append(self.clock)
        self._phase += 1
        return actions

    def drop_stale(self, units: Iterable[int]) -> list[Action]:
        """Reshard units whose parameters were kept over a step, so that the next forward all-gathers and prefetches them.

        Call this outside of forward and backward. `units`: those whose shards were written since they were unsharded.
        """
        actions: list[Action] = []
        for unit in units:
            record = self._records[unit]
            if record.policy is KeepAfterForward.KEPT and not record.is_pinned:
                actions += self.finish_unshard(unit) + self._reshard(record)
        return actions

    def unshard_kept(self, units: Iterable[int]) -> list[Action]:
        """Start the all-gathers of the sharded units among these, if they are kept between steps."""
        actions: list[Action] = []
        for unit in units:
            record = self._records[unit]
            if record.policy is KeepAfterForward.KEPT and record.residency is Residency.SHARDED:
                actions.append(self._start_unshard(record))
        return actions

    def after_forward(self, unit: int, *, grad: bool, since: int = -1) -> ForwardResult:
        """Reshard the unit according to its policy.

        Args:
            unit: the unit whose innermost call ends.
            grad: True if the forward ran in grad mode and did not raise. Which outputs require grad may differ between ranks.
            since: start of the module that ends the call. In a list of modules another module may have begun the call; calls
                that began before `since` stay open.

        Returns:
            The call; the calls inside it that never ended (they raised, or some modules of a list did not run) and end with it;
            and the actions.
        """
        self.clock += 1
        closed: list[ForwardCall] = []
        if self.running and self.running[-1].unit == unit:
            call = ForwardCall(unit, self.running.pop().start, self.clock)
            self._records[unit].running -= 1
        else:
            *closed, call = self._end_call(unit, since)
        actions: list[Action] = []
        for inner in closed:
            record = self._records[inner.unit]
            record.last, record.had_grad = inner, grad
            policy = record.policy
            if policy is not KeepAfterForward.KEPT and not (grad and policy is KeepAfterForward.ALWAYS):
                actions += self._reshard(record)
        record = self._records[unit]
        record.last, record.had_grad = call, grad
        if not record.running:  # a unit may call itself
            actions += self._after_last_forward(record, call, grad)
        return ForwardResult(call, closed, actions)

    def _end_call(self, unit: int, since: int) -> list[ForwardCall]:
        """End the innermost call of the unit, and first the unended calls inside it that began after `since`."""
        ended: list[ForwardCall] = []
        for index in range(len(self.running) - 1, -1, -1):
            call = self.running[index]
            if call.unit == unit or (call.start > since and index == len(self.running) - 1):
                del self.running[index]
                self._records[call.unit].running -= 1
                ended.append(ForwardCall(call.unit, call.start, self.clock))
                if call.unit == unit:
                    return ended
        raise InternalError(f"Unit {unit} ended a forward that it never began.")

    def _after_last_forward(self, record: UnitRecord, call: ForwardCall, grad: bool) -> list[Action]:
        """Reshard after the outermost call of the unit."""
        record.unsharded_by_user = record.unsharded_by_user and not record.resident_blocks
        outermost = not self.running
        if outermost and call.end - call.start > 1:  # units ran inside
            # The next outermost forward may be of another model, which some ranks may have deleted: this run must not predict
            # it.
            self.forward_order.close()
        policy = record.policy
        if policy is KeepAfterForward.KEPT:
            record.unsharded_by_user = False
            return []
        if not grad:
            return self._reshard(record)
        if policy is KeepAfterForward.ALWAYS or (policy is KeepAfterForward.OUTERMOST and outermost):
            return []
        if policy is KeepAfterForward.PARTLY and record.residency is Residency.FULL and not record.resident_blocks:
            return [SaveSubgroupShard(record.number), *self._reshard(record)]
        return self._reshard(record)

    def partial_end(self, unit: int) -> ForwardCall:
        """Return the call so far: one module of a unit of several modules ended its forward, others follow."""
        self.clock += 1
        start = next(call.start for call in self.running if call.unit == unit)
        return ForwardCall(unit, start, self.clock)

    def call_outside(self, unit: int, *, copied: bool = False) -> ForwardCall:
        """Return a call for a use of the unit's parameters outside of its forward; `copied`: of a copy of them."""
        self.clock += 2
        return ForwardCall(unit, self.clock - 1, self.clock, copied)

    # --- backward ---

    def expect_backward(self, call: ForwardCall) -> None:
        """Record that an output of `call` requires grad.

        A recomputation repeats a call that is pending, or whose backward has begun and will not begin again.
        """
        record = self._records[call.unit]
        record.live_graphs += 1
        if call.end not in self._pending and call.end not in self._begun:
            self._pending[call.end] = call
            record.pending_backwards += 1

    def graph_released(self, call: ForwardCall) -> None:
        """Record that the graph of `call` was freed, or that its backward has begun.

        That moment differs between ranks, so no decision about collectives may depend on it.
        """
        record = self._records.get(call.unit)
        if record is not None and call.end > record.since:
            record.live_graphs -= 1

    def before_backward(
        self,
        call: ForwardCall,
        *,
        stale: bool = False,
        again: bool = False,
        collects: bool = True,
    ) -> list[Action]:
        """Reduce the units whose backward is done, unshard this one, and prefetch the next.

        Args:
            call: the forward whose backward begins.
            stale: the shards changed since the unit was unsharded.
            again: the backward has create_graph=True, so the unit stays unsharded until the next backward ends.
            collects: False if the backward reaches inputs only, so that no parameter of the unit gets a gradient.
        """
        record = self._records[call.unit]
        if not self._has_begun_backward:
            self._begin_backward()
        if again and not call.copied:
            record.create_graph_phase = self._phase
        actions = self._reduce_done(beyond=call.end)
        if collects:
            self._passed.discard(call.unit)
        elif call.unit not in self._entered:
            self._passed.add(call.unit)
        self._entered[call.unit] = min(call.start, self._entered.get(call.unit, call.start))
        self._latest = max(self._latest, call.start)
        self._begun.add(call.end)
        if self._pending.pop(call.end, None) is not None:
            record.pending_backwards -= 1
        if call.copied:
            return actions
        expected = self.backward_order.expect(call.unit, record.ahead) or self._expect_as_forward(call)
        needed = record.options.in_backward
        return actions + self._unshard_and_prefetch(
            record, expected, record.next_backward, stale=stale, in_backward=True, itself=needed
        )

    def before_recompute(self, unit: int, *, stale: bool = False) -> list[Action]:
        """Unshard for a forward inside backward (activation checkpointing). The unit stays unsharded until it is reduced.

        If the forward had grad, its output has a hook, which calls `before_backward` before or after this recomputation. If it
        had none (reentrant checkpointing), the unit's backward begins here.
        """
        record = self._records[unit]
        if not self._has_begun_backward:
            self._begin_backward()
        actions: list[Action] = []
        if record.last is None:
            record.last, record.had_grad = self.call_outside(unit), False
        elif not record.had_grad:
            actions = self._reduce_done(beyond=record.last.end)
        self._recomputing.append(unit)
        if unit in self._entered and record.had_grad:  # `before_backward` has prefetched the next unit already
            return actions + self._unshard_and_prefetch(record, (), (), stale=stale, in_backward=True)
        expected = self.backward_order.expect(unit, record.ahead) or self._expect_as_forward(record.last)
        in_backward = len(self._entered) > 0
        return actions + self._unshard_and_prefetch(
            record, expected, record.next_backward, stale=stale, in_backward=in_backward
        )

    def _begin_backward(self) -> None:
        """Begin a phase at the first event of a backward: shards may have been written since the forward."""
        self._has_begun_backward = True
        self._phase += 1

    def after_recompute(self, unit: int, *, grad: bool) -> ForwardCall:
        """Return the call that the recomputation repeats, for the backward of its graph."""
        record = self._records[unit]
        if unit in self._recomputing:
            self._recomputing.remove(unit)
        if record.last is None:
            raise InternalError(f"Unit {unit} was recomputed before it was computed.")
        record.had_grad = record.had_grad or grad
        return record.last

    def after_backward(self) -> list[Action]:
        """Reduce the remaining units, and reshard those that no later backward needs.

        Calls older than the latest one that this backward reached are no longer pending.
        """
        self._recomputing.clear()
        self._has_begun_backward = False
        for record in self._records.values():
            if record.create_graph_phase != self._phase:
                record.create_graph_phase = -1
        self._phase += 1
        actions = self._reduce_done(beyond=-1, even_if_pending=True)
        self._expire(before=self._latest)
        self._begun.clear()
        self._latest = -1
        actions += self._drop_unused()
        for record in list(self._records.values()):
            wanted = record.unsharded_by_user or record.stays_after_backward or record.running
            over = record.pending_backwards == 0 or record.policy is KeepAfterForward.NEVER
            if record.residency is Residency.FULL and over and not wanted:
                actions += self._reshard(record)
        self.forward_order.close()
        self.backward_order.close()
        return actions

    def _reduce_done(self, *, beyond: int, even_if_pending: bool = False) -> list[Action]:
        """Reduce and reshard the entered units all of whose calls started after `beyond`.

        Not those with a pending backward (unless `even_if_pending`), nor those that are recomputed now.
        """
        actions: list[Action] = []
        for unit, start in list(self._entered.items()):
            record = self._records[unit]
            if start > beyond and (even_if_pending or record.pending_backwards == 0) and unit not in self._recomputing:
                del self._entered[unit]
                if not record.stays_after_backward:
                    actions += self._reshard(record)  # first, so that the reduction can use this memory
                actions.append(PassBy(unit) if unit in self._passed else record.reduce)
                self._passed.discard(unit)
        return actions

    # --- pending backwards ---

    def _not_pending(self, call: ForwardCall) -> None:
        if self._pending.pop(call.end, None) is not None:
            self._records[call.unit].pending_backwards -= 1

    def _expire(self, *, before: int) -> None:
        """Stop expecting the backwards of calls that began before this time."""
        for call in [call for call in self._pending.values() if call.start < before]:
            self._not_pending(call)

    def has_pending_since(self, begin: int) -> bool:
        """Return True if a pending call began at `begin` or later."""
        return any(call.start >= begin for call in self._pending.values())

    def start_of_outermost(self, call: ForwardCall) -> int:
        """Return the start of the outermost forward that `call` was part of, -1 if that is too long ago."""
        for start in reversed(self._outermost_starts):
            if start < call.start:
                return start
        return -1

    def next_outermost(self, since: int) -> int | None:
        """Return the start of the next outermost forward after the one that began at `since`, None if there is none."""
        return min((start for start in self._outermost_starts if start > since), default=None)

    def previous_outermost(self, until: int) -> int | None:
        """Return the start of the last outermost forward before the one that began at `until`, None if there is none."""
        return max((start for start in self._outermost_starts if start < until), default=None)

    # --- prefetching ---

    def is_prefetched_in_this_phase(self, unit: int) -> bool:
        """Return True if the unit was prefetched in the running forward or backward."""
        return self._prefetched.get(unit) == self._phase

    def _expect_as_forward(self, call: ForwardCall) -> list[int]:
        """Return the unit that the backward needs after `call`, where no order is known or the backward has left it.

        That is the unit of the latest pending call before this one, in the same outermost forward, since calls of other
        outermost forwards may be of models that some ranks deleted.
        """
        begin = self.start_of_outermost(call)
        for other in reversed(self._pending.values()):
            if begin < other.start < call.start:
                return [other.unit]
        return []

    def _unshard_and_prefetch(
        self,
        record: UnitRecord,
        expected: Sequence[int],
        by_user: Sequence[int] | None,
        *,
        stale: bool,
        in_backward: bool,
        itself: bool = True,
    ) -> list[Action]:
        """Unshard the unit that computes next, and start unsharding the units after it.

        Args:
            record: the unit that computes next.
            expected: units that are expected after it.
            by_user: units that the user set instead, if any.
            stale: the shards changed since the unit was unsharded, so it is unsharded again.
            in_backward: skip units whose backward needs no unsharded parameters.
            itself: False if only the units after it are needed.
        """
        unit = record.number
        actions: list[Action] = []
        if stale:
            actions += self.finish_unshard(unit)
            if record.residency is Residency.FULL:
                unsharded_by_user = record.unsharded_by_user
                actions += self._reshard(record, force=True)
                record.unsharded_by_user = unsharded_by_user
        if itself and record.residency is Residency.SHARDED:
            order = self.backward_order if in_backward else self.forward_order
            self.stats.missed += order.has_left
            self.stats.gathers += 1
            record.residency = Residency.GATHERING
            actions.append(record.unshard)
        if record.residency is Residency.GATHERING:
            self._prefetched.pop(unit, None)
            record.residency = Residency.FULL
            actions.append(record.wait)
        if expected or by_user:
            actions += self._prefetch(record, expected, by_user, in_backward=in_backward)
        return actions

    def _prefetch(
        self, record: UnitRecord, expected: Sequence[int], by_user: Sequence[int] | None, *, in_backward: bool
    ) -> list[Action]:
        """Start unsharding the units to prefetch while the unit of `record` computes."""
        actions: list[Action] = []
        budget = record.options.comm.prefetch_bytes  # None: one unit
        for unit in expected if by_user is None else by_user:
            other = self._records.get(unit)
            if other is None or not other.is_attached():
                continue
            is_over = len(self._prefetched) > 0 if budget is None else self._prefetched_bytes() + other.nbytes > budget
            if by_user is None and is_over:
                break
            if other.residency is Residency.SHARDED and (other.options.in_backward or not in_backward):
                self._prefetched[unit] = self._phase
                other.residency = Residency.GATHERING
                actions.append(other.unshard)
        self.stats.prefetched += len(actions)
        self.stats.gathers += len(actions)
        return actions

    def _prefetched_bytes(self) -> int:
        return sum(self._records[unit].nbytes for unit in self._prefetched)

    def _drop_unused(self) -> list[Action]:
        """Reshard the prefetched units that nothing used."""
        actions: list[Action] = []
        for unit in self._prefetched:
            record = self._records[unit]
            if record.residency is Residency.GATHERING:
                self.stats.unused += 1
                record.residency = Residency.SHARDED
                actions += [record.wait, record.reshard]
        self._prefetched.clear()
        return actions

    # --- transitions of one unit ---

    def unshard(self, unit: int, *, stale: bool = False) -> list[Action]:
        """Start to unshard a unit for the user, who waits for it later. `stale`: unshard it again."""
        record = self._records[unit]
        actions = (self.finish_unshard(unit) + self._reshard(record, force=True)) if stale else []
        if record.residency is Residency.SHARDED:
            actions.append(self._start_unshard(record))
        self._prefetched.pop(unit, None)
        record.unsharded_by_user = True
        return actions

    def reshard(self, unit: int) -> list[Action]:
        """Reshard a unit for the user, even inside of resident()."""
        record = self._records[unit]
        record.unsharded_by_user = False
        return self.finish_unshard(unit) + self._reshard(record, force=True)

    def finish_unshard(self, unit: int) -> list[Action]:
        """Wait for the all-gather of a unit, if one is in flight."""
        record = self._records[unit]
        if record.residency is not Residency.GATHERING:
            return []
        self._prefetched.pop(unit, None)
        record.residency = Residency.FULL
        return [record.wait]

    def _start_unshard(self, record: UnitRecord) -> Action:
        """Start the all-gather of a sharded unit."""
        record.residency = Residency.GATHERING
        self.stats.gathers += 1
        return record.unshard

    def _reshard(self, record: UnitRecord, *, force: bool = False) -> list[Action]:
        """Reshard an unsharded unit, unless it is resident or the graph of a backward needs it."""
        record.unsharded_by_user = False
        needed = record.resident_blocks > 0 or record.create_graph_phase != -1
        if record.residency is not Residency.FULL or (needed and not force):
            return []
        record.residency = Residency.SHARDED
        return [record.reshard]

    # --- recovery ---

    def clear(self, unit: int) -> None:
        """Mark a unit sharded after an action on it raised and its unsharded parameters were dropped."""
        self._records[unit].clear()
        self._prefetched.pop(unit, None)

    def broken_units(self, reached: Iterable[int]) -> set[int]:
        """Return the units of the forward or backward that raised: those in progress, and those with calls beside theirs.

        Other models on the thread, whose outermost forwards are others, are no part of it.

        Args:
            reached: the units that the backward entered.
        """
        broken = {*reached, *self._entered, *self._recomputing, *self._prefetched}
        last = (self._records[unit].last for unit in broken if unit in self._records)
        forwards = {self.start_of_outermost(call) for call in (*self.running, *last) if call is not None}
        pending = (call.unit for call in self._pending.values() if self.start_of_outermost(call) in forwards)
        return broken.union(self.running_units(), pending)

    def reset(self, units: Iterable[int] | None = None) -> None:
        """End the forward and backward that run: these units are sharded, and no backward of theirs is expected.

        Args:
            units: the units of the models that failed. None for all units: then also forget everything that predicts the next
                unit, since the step may have ended at different places on different ranks.
        """
        broken = set(self._records if units is None else units)
        self._has_begun_backward, self._latest = False, -1
        self._entered.clear()
        self._passed.clear()
        self._begun.clear()
        self.running.clear()
        self._recomputing.clear()
        self._prefetched.clear()
        self.forward_order.restart()
        self.backward_order.restart()
        self._pending = {end: call for end, call in self._pending.items() if call.unit not in broken}
        for record in self._records.values():
            record.running = 0
            if record.number in broken:
                record.clear()
                record.pending_backwards = record.live_graphs = 0
                record.since = self.clock
            if units is None:
                record.last, record.had_grad = None, False
        if units is None:
            self.forward_order, self.backward_order = ExecutionOrder(), ExecutionOrder()
            self._outermost_starts.clear()


__all__ = [
    "TRANSITIONS",
    "Action",
    "ExecutionOrder",
    "ForwardCall",
    "ForwardResult",
    "KeepAfterForward",
    "PassBy",
    "Reduce",
    "Reshard",
    "Residency",
    "SaveSubgroupShard",
    "ScheduleOptions",
    "Scheduler",
    "Stats",
    "UnitRecord",
    "Unshard",
    "Wait",
]
