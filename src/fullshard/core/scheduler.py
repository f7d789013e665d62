"""The scheduler: decides what to unshard, reshard and reduce, and when. No tensors; it decides the same on every rank."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fullshard.core.unit_options import KeepAfterForward, UnitOptions
from fullshard.errors import InternalError

_MAX_PREFETCHED = 64  # units that a prefetch within `prefetch_bytes` looks ahead at most; lists set by users have no limit
_REMEMBERED_FORWARDS = 64  # outermost forwards after which a backward that has not come is no longer expected
_REMEMBERED_RUNS = 256  # runs that an `ExecutionOrder` remembers at most


# --- values ---


class Residency(enum.Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


class Move(enum.Enum):
    """What the runtime does with a unit."""

    UNSHARD = "unshard"  # start the all-gather of the unit's parameters
    WAIT = "wait"  # order the compute stream behind the all-gather
    SAVE_SUBGROUP_SHARD = "save_subgroup_shard"  # copy the part that this rank keeps if `reshard_after_forward` is an int
    RESHARD = "reshard"  # free the unsharded parameters
    REDUCE = "reduce"  # hand the unit's gradients to the reducer, which reduces or keeps them
    PASS_BY = "pass_by"  # log a backward that gives no parameter of the unit a gradient, as autograd.grad(loss, x)


# The members in order, as globals: before Python 3.12, `Move.WAIT` takes as long as a call.
UNSHARD, WAIT, SAVE_SUBGROUP_SHARD, RESHARD, REDUCE, PASS_BY = Move
SHARDED, GATHERING, FULL = Residency
NEVER, ALWAYS, OUTERMOST, PARTLY, KEPT = KeepAfterForward
Action: TypeAlias = tuple[Move, int]  # the move, and the number of the unit that it acts on


class ForwardCall(NamedTuple):
    """One forward of a unit, or one use of its parameters outside of forward, as an interval on the scheduler's clock."""

    unit: int
    start: int
    end: int
    copied: bool = False  # it used a copy of the parameters: its backward unshards nothing


class ForwardResult(NamedTuple):
    """The result of `Scheduler.after_forward`."""

    call: ForwardCall
    closed: list[ForwardCall]  # calls inside it that raised, or whose unit has modules that did not run: they end with it
    actions: list[Action]


@dataclass(slots=True, eq=False)
class UnitRecord:
    """The scheduler's view of one unit. Only the scheduler changes `residency`."""

    number: int
    options: UnitOptions
    is_attached: Callable[[], bool]  # whether it is in its place in the model (equal on all ranks); else it is not prefetched
    nbytes: int = 0  # of the unsharded parameters

    # Units to prefetch that the user chose; `prefetch_bytes` does not limit these. None: follow the order of earlier runs.
    next_forward: tuple[int, ...] | None = None
    next_backward: tuple[int, ...] | None = None

    resident_blocks: int = 0  # resident() blocks around the unit; while there are any, `_reshard` leaves it unsharded
    unsharded_by_user: bool = False
    residency: Residency = SHARDED

    # Calls whose backward may still come, judged by the order of events. Equal on every rank, so it may decide about
    # collectives.
    pending_backwards: int = 0

    # Calls on this rank whose backward has not begun and whose graph is not freed. It differs between ranks, so it decides
    # what is legal, never what is sent.
    live_graphs: int = 0
    since: int = -1  # when a reset last set `live_graphs` to 0: graphs of calls that had ended by then do not count

    # How many forwards of the unit are in progress. If it has several modules: (module, start) of each module's forward that
    # is in progress, and the modules that have yet to begin or end theirs.
    running: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    # The last forward outside of a backward, which a recomputation repeats, and whether it (or its recomputation) had grad.
    last: ForwardCall | None = None
    had_grad: bool = False
    passed: bool = False  # no parameter gets a gradient in the running backward, which has entered the unit

    # `Scheduler.phase` of a create_graph=True backward, whose graph needs the parameters until the next backward ends; else -1.
    create_graph_phase: int = -1

    @property
    def is_pinned(self) -> bool:
        """True if the user unsharded the unit, with unshard() or resident(), and its all-gather was waited for."""
        return self.residency is FULL and (self.unsharded_by_user or self.resident_blocks > 0)


@dataclass(slots=True)
class ExecutionOrder:
    """Orders in which units were needed in earlier runs (see `Scheduler`), by the first unit, to predict the next units.

    Of more than _REMEMBERED_RUNS runs the one that was stored longest ago is dropped, so that deleted models are forgotten.
    Which one that is depends on the order of runs alone, never on which models a rank has deleted.
    """

    runs: dict[int, list[int]] = field(default_factory=dict)
    now: list[int] = field(default_factory=list)
    at: int = 0
    has_left: bool = False  # True if the known run had another unit, or none, in the place of the current one

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

    Args:
        gathers: all-gathers of units.
        prefetched: all-gathers that were started ahead.
        unused: prefetched all-gathers that nothing used; those that were stale or reset do not count.
        missed: all-gathers that were not started ahead because the units ran in another order than before.
    """

    gathers: int = 0
    prefetched: int = 0
    unused: int = 0
    missed: int = 0


# --- the scheduler ---


class Scheduler:
    """Turns events of forward and backward into actions. It knows units by their number.

    One scheduler serves all units of a runtime, of any model. A "run" is one backward, or a series of outermost forwards, which
    ends after a forward that ran inner units, before its own first unit runs again, if it gets too long, or with a backward.

    Backward mirrors forward: autograd runs ready nodes latest first. So when the backward of a call that ended at time t
    begins, every call that *started* after t has finished its backward, and its unit can be reduced and resharded. The forward
    alone therefore decides when to reduce, the same way on every rank, whichever parameters a rank used, and all ranks issue
    reduce-scatters and all-gathers in one order.

        forward   A(1  2) B(3  4) C(5  6)
        backward  C ...... B: C started at 5 > 4, so reduce C ...... A: reduce B ...... end: reduce A
    """

    def __init__(self) -> None:
        self.clock = 0  # ticks when a forward, or a use of parameters outside of forward, starts or ends
        self.running: list[ForwardCall] = []  # forwards in progress, outermost first; until they end, `end` is `start`
        self.stats = Stats()
        self.forward_order, self.backward_order = ExecutionOrder(), ExecutionOrder()
        self._records: dict[int, UnitRecord] = {}
        self.phase = 0  # outermost forwards begun, backwards begun and backwards ended so far
        self.prefetched: dict[int, int] = {}  # units unsharded ahead and not used yet, oldest first: the phase of each

        # Calls with grad whose backward has not begun, by their end. Oldest first, except for those of a recomputation. Only
        # events and the deletion of units change it, so it is equal on ranks that have the same units. A call leaves when its
        # backward begins, when a backward ends that reached a later call, or after `_REMEMBERED_FORWARDS` outermost forwards.
        self._pending: dict[int, ForwardCall] = {}
        self.outermost_starts: deque[int] = deque(maxlen=_REMEMBERED_FORWARDS)  # of the last outermost forwards, on the clock

        # The running backward: unit -> start of its earliest call whose backward has begun, until it is reduced; the ends of
        # all calls whose backward has begun; and the latest start reached so far.
        self._entered: dict[int, int] = {}
        self._begun: set[int] = set()
        self._latest = -1
        self._has_begun_backward = False
        self._recomputing: list[int] = []  # units whose forward runs inside the running backward, for activation checkpointing

    # --- units ---

    def register(self, unit: int, options: UnitOptions, is_attached: Callable[[], bool] = lambda: True) -> UnitRecord:
        """Add a unit and return its record."""
        record = self._records[unit] = UnitRecord(unit, options, is_attached)
        return record

    def unregister(self, unit: int) -> None:
        """Remove a unit that was deleted or taken off its modules.

        Orders keep its number while they keep the run, since other ranks may delete the module later: predictions must stay
        equal on all ranks.
        """
        self._records.pop(unit).running = 0
        self._entered.pop(unit, None)
        self.prefetched.pop(unit, None)
        self.running[:] = [call for call in self.running if call.unit != unit]
        self._pending = {end: call for end, call in self._pending.items() if call.unit != unit}

    def is_outermost(self, unit: int) -> bool:
        """Return True if the outermost forward in progress is one of the unit."""
        return len(self.running) > 0 and self.running[0].unit == unit

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

    def before_forward(self, unit: int, *, stale: bool = False, parts: Sequence[int] = ()) -> list[Action]:
        """Unshard the unit, and prefetch the next ones. A recomputation calls `before_recompute` instead.

        `stale`, here and below: the shards changed since the unit was unsharded, so it is unsharded again. `parts`: if the
        unit has several modules, the id of the one that begins, then those of all.
        """
        record = self._records[unit]
        actions: list[Action] = []
        if not self.running:  # an outermost forward
            now = self.forward_order.now
            if now[:1] == [unit] or len(now) > 8 * len(self._records):  # bounded, if the first unit never runs again
                self.forward_order.close()
            if unit not in self.prefetched:
                actions = self._drop_unused()
            if len(self.outermost_starts) == _REMEMBERED_FORWARDS:
                self._expire(before=self.outermost_starts[0])
            self.outermost_starts.append(self.clock)
            self.phase += 1
        self.clock += 1
        self.running.append(ForwardCall(unit, self.clock, self.clock))
        record.running += 1
        if parts:
            record.parts, record.left = [(parts[0], self.clock)], set(parts)
        return actions + self._unshard_and_prefetch(record, None, stale=stale)

    def continue_forward(self, unit: int, part: int) -> None:
        """Note that another module of a running unit of several modules begins its forward."""
        self._records[unit].parts.append((part, self.clock))

    def drop_stale(self, units: Iterable[int]) -> list[Action]:
        """Reshard units that were kept over a step and are stale. Call this outside of forward and backward."""
        records = [self._records[unit] for unit in units]
        kept = [record for record in records if record.options.retention is KEPT and not record.is_pinned]
        return [action for record in kept for action in (*self.finish_unshard(record.number), *self._reshard(record))]

    def after_forward(self, unit: int, *, grad: bool, part: int | None = None) -> ForwardResult:
        """Reshard the unit according to its policy.

        The forward of a unit of several modules lasts until each has run and none runs. If the unit is outermost, a forward
        that skips a module would never end: so there, each module's forward is a call of its own.

        Args:
            unit: the unit whose innermost call ends. If other modules of the unit follow, the result has the call so far.
            grad: True if it ran in grad mode and did not raise, whether or not outputs require grad.
            part: the module that ends its forward, if the unit has several.
        """
        self.clock += 1
        record = self._records[unit]
        closed: list[ForwardCall] = []
        actions: list[Action] = []
        if part is None and self.running and self.running[-1].unit == unit:
            call = ForwardCall(unit, self.running.pop().start, self.clock)
            record.running -= 1
        else:
            since = -1 if part is None else self._end_part(record, part)
            if part is not None and (record.left or record.parts) and not self.is_outermost(unit):
                start = next(call.start for call in self.running if call.unit == unit)
                return ForwardResult(ForwardCall(unit, start, self.clock), closed, actions)
            *closed, call = self._end_call(unit, since)
        for inner in closed:
            other = self._records[inner.unit]
            other.last, other.had_grad = inner, grad
            retention = other.options.retention
            if retention is not KEPT and not (grad and retention is ALWAYS):
                actions += self._reshard(other)
        record.last, record.had_grad = call, grad
        if record.running:  # the unit called itself
            return ForwardResult(call, closed, actions)
        retention, outermost = record.options.retention, not self.running
        if outermost and call.end - call.start > 1:  # units ran inside
            # End the run: it must not lead to prefetching the next outermost forward, whose model some ranks may have deleted.
            self.forward_order.close()
        if retention is KEPT or record.resident_blocks:
            record.unsharded_by_user = False
        stays = retention is ALWAYS or (retention is OUTERMOST and outermost)
        if retention is not KEPT and not (grad and stays):
            whole = record.residency is FULL and not record.resident_blocks
            if grad and retention is PARTLY and whole:
                actions.append((SAVE_SUBGROUP_SHARD, unit))
            actions += self._reshard(record)
        return ForwardResult(call, closed, actions)

    def _end_part(self, record: UnitRecord, part: int) -> int:
        """End the forward of one of a unit's modules, and those inside it that never ended. Return its start, or -1."""
        record.left.discard(part)
        at = next((at for at in reversed(range(len(record.parts))) if record.parts[at][0] == part), None)
        if at is None:
            return -1
        since = record.parts[at][1]
        del record.parts[at:]
        return since

    def _end_call(self, unit: int, since: int) -> list[ForwardCall]:
        """End the innermost call of the unit, but first the calls inside it that began after `since` and never ended.

        `since`: start of the module's forward that ends now, -1 for all. Calls that began before it stay open.
        """
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

    def call_outside(self, unit: int, *, copied: bool = False) -> ForwardCall:
        """Return a call for a use of the unit's parameters outside of its forward; `copied`: of a copy of them."""
        self.clock += 2
        return ForwardCall(unit, self.clock - 1, self.clock, copied)

    # --- backward ---

    def expect_backward(self, call: ForwardCall) -> None:
        """Record that an output of `call` requires grad.

        A recomputed call that is pending already, or whose backward has begun, is counted in `live_graphs` only.
        """
        record = self._records[call.unit]
        record.live_graphs += 1
        if call.end not in self._pending and call.end not in self._begun:
            self._pending[call.end] = call
            record.pending_backwards += 1

    def graph_released(self, call: ForwardCall) -> None:
        """Record that the graph of `call` was freed, or that its backward has begun."""
        record = self._records.get(call.unit)
        if record is not None and call.end > record.since:
            record.live_graphs -= 1

    def begin_backward(self) -> None:
        """Begin a phase at the first event of a backward, so that `prefetched` shows which units this backward prefetched."""
        if not self._has_begun_backward:
            self._has_begun_backward = True
            self.phase += 1

    def before_backward(
        self, call: ForwardCall, *, stale: bool = False, again: bool = False, collects: bool = True
    ) -> list[Action]:
        """Reduce the units whose backward is done, unshard this one, and prefetch the next.

        `again`: the backward has create_graph=True. `collects`: False if no parameter of this unit, nor of a unit entered so
        far, gets a gradient, as in torch.autograd.grad(loss, activations).
        """
        unit, start, end, copied = call
        record = self._records[unit]
        if not self._has_begun_backward:
            self.begin_backward()
        if again and not copied:
            record.create_graph_phase = self.phase
        actions = self._reduce_done(beyond=end)
        if collects or unit not in self._entered:
            record.passed = not collects
        self._entered[unit] = min(start, self._entered.get(unit, start))
        self._latest = max(self._latest, start)
        self._begun.add(end)
        if self._pending.pop(end, None) is not None:
            record.pending_backwards -= 1
        if copied:
            return actions
        return actions + self._unshard_and_prefetch(record, call, stale=stale, itself=record.options.gathers_in_backward)

    def before_recompute(self, unit: int, *, stale: bool = False) -> list[Action]:
        """Unshard for a forward inside backward (activation checkpointing). The unit stays unsharded until it is reduced.

        If the first forward had grad, a hook on its output calls `before_backward` before or after this recomputation. If it
        had none (reentrant checkpointing), this is the first event of its backward: units that are done are reduced here.
        """
        record = self._records[unit]
        self.begin_backward()
        actions: list[Action] = []
        if record.last is None:
            record.last, record.had_grad = self.call_outside(unit), False
        elif not record.had_grad:
            actions = self._reduce_done(beyond=record.last.end)
        self._recomputing.append(unit)
        ahead = not (unit in self._entered and record.had_grad)  # else `before_backward` has prefetched the next unit already
        return actions + self._unshard_and_prefetch(record, record.last, stale=stale, ahead=ahead)

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
        """Reduce and reshard the remaining units, reshard others unless kept, expire calls before the latest one reached."""
        self._recomputing.clear()
        self._has_begun_backward = False
        for record in self._records.values():
            if record.create_graph_phase != self.phase:
                record.create_graph_phase = -1
        self.phase += 1
        actions = self._reduce_done(beyond=-1, even_if_pending=True)
        self._expire(before=self._latest)
        self._begun.clear()
        self._latest = -1
        actions += self._drop_unused()
        for record in self._records.values():
            wanted = record.unsharded_by_user or record.options.stays_after_backward or record.running
            over = record.pending_backwards == 0 or record.options.retention is NEVER
            if record.residency is FULL and over and not wanted:
                actions += self._reshard(record)
        self.forward_order.close()
        self.backward_order.close()
        return actions

    def _reduce_done(self, *, beyond: int, even_if_pending: bool = False) -> list[Action]:
        """Reduce and reshard the entered units all of whose calls started after `beyond`.

        Leaves out units that are being recomputed and, unless `even_if_pending`, units with a pending backward.
        """
        actions: list[Action] = []
        for unit, start in list(self._entered.items()):
            record = self._records[unit]
            if start > beyond and (even_if_pending or record.pending_backwards == 0) and unit not in self._recomputing:
                del self._entered[unit]
                if not record.options.stays_after_backward:
                    actions += self._reshard(record)  # first, so that the reduction can use this memory
                actions.append((PASS_BY if record.passed else REDUCE, unit))
        return actions

    # --- pending backwards ---

    def _expire(self, *, before: int) -> None:
        """Stop expecting the backwards of calls that began before this time."""
        for end, call in list(self._pending.items()):
            if call.start < before:
                del self._pending[end]
                self._records[call.unit].pending_backwards -= 1

    def has_pending_since(self, begin: int) -> bool:
        """Return True if a pending call began at `begin` or later."""
        return any(call.start >= begin for call in self._pending.values())

    def start_of_outermost(self, call: ForwardCall) -> int:
        """Return the clock just before the outermost forward that `call` is in, or came after; -1 if that is too long ago."""
        return next((start for start in reversed(self.outermost_starts) if start < call.start), -1)

    # --- prefetching ---

    def _unshard_and_prefetch(
        self, record: UnitRecord, call: ForwardCall | None, *, stale: bool, itself: bool = True, ahead: bool = True
    ) -> list[Action]:
        """Unshard the unit that computes next (`itself`), and start unsharding the units after it (`ahead`).

        `call`: the call whose backward or recomputation begins; None in forward.
        """
        is_backward = call is not None
        order = self.backward_order if is_backward else self.forward_order
        budget = record.options.comm.prefetch_bytes  # None: one unit
        by_user = record.next_backward if is_backward else record.next_forward
        following: Sequence[int] = ()
        if ahead:
            expected = order.expect(record.number, 1 if budget is None else _MAX_PREFETCHED)
            if call is not None and not expected:
                # The order is unknown, was left, or ends here: take the latest pending call before this one, but only of this
                # outermost forward, since the calls of others may be of models that some ranks deleted.
                begin, pending = self.start_of_outermost(call), reversed(self._pending.values())
                expected = next(([other.unit] for other in pending if begin < other.start < call.start), [])
            following = expected if by_user is None else by_user
        actions = self._drop(record) if stale else []
        if itself and record.residency is SHARDED:
            self.stats.missed += order.has_left
            self.stats.gathers += 1
            actions.append((UNSHARD, record.number))
            record.residency = GATHERING
        if record.residency is GATHERING:
            self.prefetched.pop(record.number, None)
            record.residency = FULL
            actions.append((WAIT, record.number))
        for unit in following:
            other = self._records.get(unit)
            if other is None or not other.is_attached():
                continue
            if budget is None:
                is_over = len(self.prefetched) > 0
            else:
                is_over = other.nbytes + sum(self._records[one].nbytes for one in self.prefetched) > budget
            if by_user is None and is_over:
                break
            if other.residency is SHARDED and (other.options.gathers_in_backward or not is_backward):
                self.prefetched[unit] = self.phase
                self.stats.prefetched += 1
                self.stats.gathers += 1
                actions.append((UNSHARD, unit))
                other.residency = GATHERING
        return actions

    def _drop_unused(self) -> list[Action]:
        """Reshard the prefetched units that nothing used."""
        actions: list[Action] = []
        for unit in self.prefetched:
            record = self._records[unit]
            if record.residency is GATHERING:
                self.stats.unused += 1
                record.residency = SHARDED
                actions += [(WAIT, unit), (RESHARD, unit)]
        self.prefetched.clear()
        return actions

    # --- transitions of one unit ---

    def unshard(self, unit: int, *, stale: bool = False) -> list[Action]:
        """Start to unshard a unit for the user, who waits for it later."""
        record = self._records[unit]
        actions = (self._drop(record) if stale else []) + self.start_unshard(record)
        self.prefetched.pop(unit, None)
        record.unsharded_by_user = True
        return actions

    def reshard(self, unit: int) -> list[Action]:
        """Reshard a unit for the user, even inside of resident()."""
        record = self._records[unit]
        record.unsharded_by_user = False
        return self._drop(record)

    def finish_unshard(self, unit: int) -> list[Action]:
        """Wait for the all-gather of a unit, if one is in flight."""
        record = self._records[unit]
        if record.residency is not GATHERING:
            return []
        self.prefetched.pop(unit, None)
        record.residency = FULL
        return [(WAIT, unit)]

    def start_unshard(self, record: UnitRecord) -> list[Action]:
        """Start the all-gather of a unit, if it is sharded."""
        if record.residency is not SHARDED:
            return []
        record.residency = GATHERING
        self.stats.gathers += 1
        return [(UNSHARD, record.number)]

    def _reshard(self, record: UnitRecord) -> list[Action]:
        """Reshard an unsharded unit, unless it is resident or the graph of a backward needs it."""
        record.unsharded_by_user = False
        needed = record.resident_blocks > 0 or record.create_graph_phase != -1
        if needed or record.residency is not FULL:
            return []
        record.residency = SHARDED
        return [(RESHARD, record.number)]

    def _drop(self, record: UnitRecord) -> list[Action]:
        """Reshard a unit, whatever needs it, after the wait for its all-gather if one is in flight."""
        actions = self.finish_unshard(record.number)
        if record.residency is FULL:
            record.residency = SHARDED
            actions.append((RESHARD, record.number))
        return actions

    # --- recovery ---

    def discard(self, unit: int) -> None:
        """Mark a unit sharded, as its unsharded parameters are dropped, for example after an action on it that raised."""
        record = self._records[unit]
        record.residency, record.unsharded_by_user, record.create_graph_phase = SHARDED, False, -1
        self.prefetched.pop(unit, None)

    def broken_units(self, reached: Iterable[int]) -> set[int]:
        """Return the units of the step that failed: those in progress, and those pending from its outermost forwards.

        Units of other models on the thread are not among them, as these have outermost forwards of their own. `reached`: units
        that the backward entered.
        """
        broken = {*reached, *self._entered, *self._recomputing, *self.prefetched}
        last = (self._records[unit].last for unit in broken if unit in self._records)
        forwards = {self.start_of_outermost(call) for call in (*self.running, *last) if call is not None}
        pending = (call for call in self._pending.values() if self.start_of_outermost(call) in forwards)
        return broken.union(call.unit for call in (*self.running, *pending))

    def reset(self, units: Iterable[int] | None = None) -> None:
        """End the forward and backward that run. Then `units` are sharded, and no backward of theirs is expected.

        `units`: those of the models that failed. None for all: then also forget everything that predicts the next unit, since
        the step may have ended at different places on different ranks.
        """
        broken = set(self._records if units is None else units)
        self._has_begun_backward, self._latest = False, -1
        self._entered.clear()
        self._begun.clear()
        self.running.clear()
        self._recomputing.clear()
        self.prefetched.clear()
        self.forward_order.restart()
        self.backward_order.restart()
        self._pending = {end: call for end, call in self._pending.items() if call.unit not in broken}
        for unit, record in self._records.items():
            record.running = 0
            if unit in broken:
                self.discard(unit)
                record.pending_backwards = record.live_graphs = 0
                record.since = self.clock
            if units is None:
                record.last, record.had_grad = None, False
        if units is None:
            self.forward_order, self.backward_order = ExecutionOrder(), ExecutionOrder()
            self.outermost_starts.clear()
