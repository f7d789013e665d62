"""The pure planner: events of forward and backward in, actions out, without a tensor in sight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fullshard.errors import InternalError
from fullshard.schedule.calls import PendingBackwards, RunningForwards
from fullshard.schedule.moves import Moves
from fullshard.schedule.prefetch import Prefetch
from fullshard.schedule.records import ForwardCall, ScheduleOptions, UnitRecord
from fullshard.schedule.residency import Action, Reduce, ReshardPolicy, Residency, SaveSubgroupShard, Wait


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the end of a forward brings: the call, the calls inside that end with it, and what to do."""

    call: ForwardCall
    closed: list[ForwardCall]
    actions: list[Action]


def _anywhere(unit: int) -> bool:
    return True


class Planner:
    """Events in, actions out. planner 1 - n units, known by number.

    Backward mirrors forward: autograd runs ready nodes latest first, so when the backward of a call that ended at t
    begins, every call that *started* after t is done, and its unit can be reduced and freed. That decides when to
    reduce from the forward alone, the same way on every rank, whichever parameters a rank happened to use; reductions
    and gathers therefore meet in one order everywhere.

        forward   A(1  2) B(3  4) C(5  6)
        backward  C ...... B: C started at 5 > 4, so reduce C ...... A: reduce B ...... end: reduce A
    """

    def __init__(self, can_prefetch: Callable[[int], bool] = _anywhere) -> None:
        """`can_prefetch`: whether a unit is where it ran before, the same on every rank; no other is gathered ahead."""
        self.clock = 0  # ticks whenever a forward starts or ends
        self._records: dict[int, UnitRecord] = {}
        self.running = RunningForwards()
        self.pending = PendingBackwards(self._records)
        self.prefetch = Prefetch(self._records, self.pending, can_prefetch)
        self.moves = Moves(self._records, self.prefetch)
        self._entered: dict[int, int] = {}  # unit -> start of its earliest call whose backward has begun
        self._latest = -1  # start of the latest call that the running backward reached
        self._since = -1  # graphs of calls that ended until then were forgotten
        self._recomputing: list[int] = []  # units whose forward runs inside backward

    # --- units ---

    def register(self, unit: int, options: ScheduleOptions) -> UnitRecord:
        """A new unit, and its record."""
        record = self._records[unit] = UnitRecord(unit, options)
        return record

    def unregister(self, unit: int) -> None:
        """The unit's module was deleted. Orders keep its number: some ranks may still have it, and none expects it any more."""
        self._records.pop(unit, None)
        self._entered.pop(unit, None)
        self.running.forget_unit(unit)
        self.pending.forget_unit(unit)
        self.prefetch.note_used(unit)

    def knows(self, unit: int) -> bool:
        """Whether the unit is registered."""
        return unit in self._records

    def in_backward(self, unit: int) -> bool:
        """Whether the running backward has entered the unit, and not reduced it yet."""
        return unit in self._entered

    def awaits_backward(self, unit: int) -> bool:
        """Whether a graph on this rank may still need the unit's full parameters."""
        return self._records[unit].live_graphs > 0 or unit in self._entered

    def expects_backward(self, unit: int) -> bool:
        """Whether a backward of the unit may come, or is under way, by the order of events alone."""
        return self._records[unit].pending_backwards > 0 or unit in self._entered

    # --- events of a forward ---

    def before_forward(self, unit: int, *, stale: bool = False) -> list[Action]:
        """`stale`: the shards changed since the unit was gathered."""
        actions = [] if self.running else self._begin_run(unit)
        self.clock += 1
        self.running.append(ForwardCall(unit, self.clock, self.clock))
        record = self._records[unit]
        expected = self.prefetch.expect_in_forward(record)
        return actions + self.moves.ensure_unsharded(
            record, expected, record.next_forward, stale=stale, in_backward=len(self._entered) > 0
        )

    def _begin_run(self, unit: int) -> list[Action]:
        """An outermost forward begins."""
        now = self.prefetch.forward_order.now
        if now[:1] == [unit] or len(now) > 8 * len(self._records):
            self.prefetch.forward_order.close()
        actions = [] if self.prefetch.is_ahead(unit) else self.prefetch.drop_unused()
        self.pending.begin_run(self.clock)
        self.prefetch.run += 1
        return actions

    def after_forward(self, unit: int, *, grad: bool, since: int = -1) -> ForwardResult:
        """The call that just ended, and what follows. A forward inside it that never ended (it raised, or
        belongs to a list of modules of which some did not run) ends with it.

        since: when the module that ends it began: what began before that goes on (of a list, another module began the call).
        """
        self.clock += 1
        *closed, call = self.running.end(unit, since=since, now=self.clock)
        actions: list[Action] = []
        for inner in closed:
            record = self._records[inner.unit]
            record.last, record.had_grad = inner, grad
            if not grad or record.options.reshard_policy is not ReshardPolicy.ALWAYS:
                actions += self.moves.free(record)
        record = self._records[unit]
        record.last, record.had_grad = call, grad
        if not self.running.has(unit):  # it may call itself
            actions += self._after_last_forward(record, call, grad)
        return ForwardResult(call, closed, actions)

    def _after_last_forward(self, record: UnitRecord, call: ForwardCall, grad: bool) -> list[Action]:
        """No forward of the unit is under way any more."""
        record.unsharded_by_user = record.unsharded_by_user and not record.resident_blocks
        outermost = not self.running
        if outermost and call.end - call.start > 1:  # others began inside. What follows is another model:
            self.prefetch.forward_order.close()  # some ranks may have deleted it
        policy = record.options.reshard_policy
        if not grad:
            return self.moves.free(record)
        if policy is ReshardPolicy.ALWAYS or (policy is ReshardPolicy.OUTERMOST and outermost):
            return []
        if policy is ReshardPolicy.PARTLY and record.residency is Residency.FULL and not record.resident_blocks:
            return [SaveSubgroupShard(record.number), *self.moves.free(record)]
        return self.moves.free(record)

    def partial_end(self, unit: int) -> ForwardCall:
        """A module of a unit of several ended its forward, and others are still to come."""
        self.clock += 1
        return ForwardCall(unit, self.running.start_of(unit), self.clock)

    def register_copied_use(self, unit: int) -> ForwardCall:
        """The unit's parameters were used outside of a forward, in a copy of their own: a call that gathers nothing."""
        self.clock += 2
        return ForwardCall(unit, self.clock - 1, self.clock)

    # --- events of a backward ---

    def expect_backward(self, call: ForwardCall) -> None:
        """An output of `call` requires grad."""
        self._records[call.unit].live_graphs += 1
        self.pending.add(call)

    def graph_released(self, call: ForwardCall) -> None:
        """The graph of `call` is gone, or its backward has begun.

        When that happens differs from rank to rank, so nothing that is sent depends on it.
        """
        if call.unit in self._records and call.end > self._since:
            self._records[call.unit].live_graphs -= 1

    def before_recompute(self, unit: int, *, stale: bool = False) -> list[Action]:
        """A forward inside backward (activation checkpointing): the unit stays full until its own gradients are done.

        If the forward had grad, its backward has announced itself, and it recomputes in the midst of whatever runs now.
        If it had none (reentrant checkpointing), this is where its backward begins.
        """
        record = self._records[unit]
        actions: list[Action] = []
        if record.last is None:
            record.last, record.had_grad = self.register_copied_use(unit), False
        elif not record.had_grad:
            actions = self._reduce_done(beyond=record.last.end)
        self._recomputing.append(unit)
        if unit in self._entered and record.had_grad:  # what comes next was expected when its backward was announced
            return actions + self.moves.ensure_unsharded(record, (), (), stale=stale, in_backward=True)
        expected = self.prefetch.expect_in_backward(record.last)
        return actions + self.moves.ensure_unsharded(
            record, expected, record.next_backward, stale=stale, in_backward=len(self._entered) > 0
        )

    def after_recompute(self, unit: int, *, grad: bool) -> ForwardCall:
        """The call that a recomputation repeats, if the graph of the recomputation gets a backward of its own."""
        record = self._records[unit]
        if unit in self._recomputing:
            self._recomputing.remove(unit)
        if record.last is None:
            raise InternalError(f"unit {unit} was recomputed before it was computed")
        record.had_grad = record.had_grad or grad
        return record.last

    def before_backward(
        self, call: ForwardCall, *, stale: bool = False, copied_use: bool = False, again: bool = False
    ) -> list[Action]:
        """copied_use: of a call that `register_copied_use` made, whose backward needs no parameters.
        again: this backward makes a graph (`create_graph=True`), so the unit stays full until the next backward ends.
        """
        record = self._records[call.unit]
        if again and not copied_use:
            record.create_graph_run = self.prefetch.run
        actions = self._reduce_done(beyond=call.end)
        self._entered[call.unit] = min(call.start, self._entered.get(call.unit, call.start))
        self._latest = max(self._latest, call.start)
        self.pending.remove(call)
        if copied_use:
            return actions
        expected = self.prefetch.expect_in_backward(call)
        return actions + self.moves.ensure_unsharded(
            record, expected, record.next_backward, stale=stale, in_backward=True, itself=record.options.in_backward
        )

    def after_backward(self) -> list[Action]:
        """Backward is over: reduce what is left, free what nobody will use. Calls older than what it reached will not come."""
        self._recomputing.clear()
        for record in self._records.values():
            if record.create_graph_run != self.prefetch.run:
                record.create_graph_run = -1
        self.prefetch.run += 1
        actions = self._reduce_done(beyond=-1, even_if_waiting=True)
        self.pending.expire(before=self._latest)
        self._latest = -1
        actions += self.prefetch.drop_unused()
        for record in list(self._records.values()):
            wanted = record.unsharded_by_user or record.options.keep_after_backward or self.running.has(record.number)
            over = record.pending_backwards == 0 or record.options.reshard_policy is ReshardPolicy.NEVER
            if record.residency is Residency.FULL and over and not wanted:
                actions += self.moves.free(record)
        self.prefetch.close_orders()
        return actions

    # --- recovery ---

    def clear(self, unit: int) -> None:
        """An action on the unit raised: its data is gone, whatever was planned."""
        self._records[unit].clear()
        self.prefetch.note_used(unit)

    def abort(self) -> list[Action]:
        """Backward or forward died half way: forget it, free everything."""
        actions: list[Action] = []
        self._forget_step()
        self.pending.expire(before=self.clock + 1)
        for record in list(self._records.values()):
            record.create_graph_run = -1
            if record.residency is Residency.GATHERING:
                actions += [Wait(record.number)]
                record.move(Residency.FULL)
            if record.residency is Residency.FULL and not record.unsharded_by_user:
                actions += self.moves.free(record)
        return actions

    def start_over(self) -> None:
        """An interrupt came between any two lines: whatever they left, no unit holds anything, and no backward will come."""
        self._since = self.clock
        self._forget_step()
        self.pending.clear()
        for record in self._records.values():
            record.clear()
            record.live_graphs = 0

    def reset_orders(self) -> None:
        """As if nothing had run yet: after a step that ended at different places on different ranks."""
        self.prefetch.forget_orders()
        self.pending.forget_runs()
        for record in self._records.values():
            record.last, record.had_grad, record.create_graph_run = None, False, -1

    def _forget_step(self) -> None:
        self._entered.clear()
        self.running.clear()
        self._recomputing.clear()
        self._latest = -1
        self.prefetch.restart()

    def _reduce_done(self, *, beyond: int, even_if_waiting: bool = False) -> list[Action]:
        """Reduce and free the units whose every call started after `beyond`."""
        actions: list[Action] = []
        for unit, start in list(self._entered.items()):
            record = self._records[unit]
            if start > beyond and (even_if_waiting or record.pending_backwards == 0) and unit not in self._recomputing:
                del self._entered[unit]
                if not record.options.keep_after_backward:
                    actions += self.moves.free(record)
                actions.append(Reduce(unit))
        return actions


__all__ = ["ForwardResult", "Planner"]
