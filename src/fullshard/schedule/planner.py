"""The pure planner: events of forward and backward in, actions out, without a tensor in sight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fullshard.errors import InternalError
from fullshard.schedule.order import ExecutionOrder, ForwardCall, ForwardResult
from fullshard.schedule.residency import (
    MOVES,
    Action,
    Reduce,
    Reshard,
    ReshardPolicy,
    Residency,
    SaveSubgroupShard,
    Unshard,
    Wait,
)


@dataclass(slots=True)
class UnitRecord:
    """What the planner knows of one unit."""

    reshard_policy: ReshardPolicy
    keep_after_backward: bool = False
    in_backward: bool = True  # whether its backward needs the parameters
    nbytes: int = 0  # of its full parameters
    budget: int | None = None  # bytes that may be gathered ahead while it computes; None: one unit
    next_forward: tuple[int, ...] | None = None  # what to gather ahead instead of what the last run needed next
    next_backward: tuple[int, ...] | None = None
    resident: bool = False  # stays full whatever ends
    residency: Residency = Residency.SHARDED
    pending_backwards: int = 0  # calls whose backward may still come, by the order of events alone: every rank agrees
    live_graphs: int = 0  # calls whose graph exists on this rank and waits: says what is legal, never what is sent
    last: ForwardCall | None = None  # the last forward outside backward; a recomputation takes its place in time from it
    had_grad: bool = False  # whether that forward, or a recomputation of it, had grad, so that its backward announces itself
    unsharded_by_user: bool = False  # unsharded by the caller
    create_graph_run: int = (
        -1
    )  # the run in which a backward made a graph of its own, which needs the parameters until the next one ends

    def move(self, unit: int, to: Residency) -> None:
        if (self.residency, to) not in MOVES:
            raise InternalError(f"unit {unit} cannot go from {self.residency.value} to {to.value}")
        self.residency = to

    def set(
        self, *, keep: ReshardPolicy, keep_after_backward: bool, in_backward: bool, nbytes: int, budget: int | None
    ) -> None:
        self.reshard_policy, self.keep_after_backward, self.in_backward = keep, keep_after_backward, in_backward
        self.nbytes, self.budget = nbytes, budget

    def clear(self) -> None:
        """The data is gone, whatever was planned."""
        self.residency, self.unsharded_by_user, self.create_graph_run = Residency.SHARDED, False, -1


@dataclass(slots=True)
class Stats:
    """Counts since the planner was made: gathers, how many were issued ahead, how many of those nobody used, and how many
    could have been issued ahead, had the units run in the same order as before.
    """

    gathers: int = 0
    prefetched: int = 0
    unused: int = 0
    missed: int = 0


_AHEAD = 64  # how many units may be gathered ahead, whatever the budget
_RUNS = 64  # how many outermost forwards may lie before the backward that reaches the first of them


class Planner:
    """Events in, actions out. planner 1 - n units, known by number.

    Backward mirrors forward: autograd runs ready nodes latest first, so when the backward of a call that ended at t
    begins, every call that *started* after t is done, and its unit can be reduced and freed. That decides when to
    reduce from the forward alone, the same way on every rank, whichever parameters a rank happened to use; reductions
    and gathers therefore meet in one order everywhere.

        forward   A(1  2) B(3  4) C(5  6)
        backward  C ...... B: C started at 5 > 4, so reduce C ...... A: reduce B ...... end: reduce A
    """

    def __init__(self, may_expect: Callable[[int], bool] = lambda unit: True) -> None:
        """`may_expect`: whether a unit is still where it ran before, the same on every rank; else it is not gathered ahead."""
        self._can_prefetch = may_expect
        self.clock = 0
        self._run = 0  # outermost forwards and backwards begun so far
        self.stats = Stats()
        self._records: dict[int, UnitRecord] = {}
        self._running: list[ForwardCall] = []  # forwards under way, outermost first (their `end` is not known yet)
        self._calls: dict[int, ForwardCall] = {}  # by end: forwards with grad whose backward has not begun
        self._runs: deque[int] = deque(maxlen=_RUNS)  # when the last outermost forwards began
        self._entered: dict[int, int] = {}  # unit -> start of its earliest call whose backward has begun
        self._latest = -1  # start of the latest call that the running backward reached
        self._since = -1  # what ended until then was forgotten, with its graphs
        self._ahead: dict[int, int] = {}  # gathered in expectation, not yet used, oldest first: unit -> in which run
        self._recomputing: list[int] = []  # units whose forward runs inside backward
        self._forward_order = ExecutionOrder()
        self._backward_order = ExecutionOrder()

    # --- units ---

    def register(self, unit: int, *, keep: ReshardPolicy) -> None:
        self._records[unit] = UnitRecord(keep)

    def unregister(self, unit: int) -> None:
        """The unit's module was deleted."""
        self._records.pop(unit, None)
        self._entered.pop(unit, None)
        self._running = [call for call in self._running if call.unit != unit]
        self._calls = {end: call for end, call in self._calls.items() if call.unit != unit}
        self._ahead.pop(unit, None)  # orders keep its number: some ranks may still have it, and none expects it any more

    def knows(self, unit: int) -> bool:
        return unit in self._records

    def configure(
        self, unit: int, *, keep: ReshardPolicy, keep_after_backward: bool, in_backward: bool, nbytes: int, budget: int | None
    ) -> None:
        self._records[unit].set(
            keep=keep, keep_after_backward=keep_after_backward, in_backward=in_backward, nbytes=nbytes, budget=budget
        )

    def set_prefetch(self, unit: int, *, forward: tuple[int, ...] | None, backward: tuple[int, ...] | None) -> None:
        """Units to gather ahead while `unit` computes, instead of what the last run needed next (None)."""
        record = self._records[unit]
        record.next_forward, record.next_backward = forward, backward

    def residency(self, unit: int) -> Residency:
        return self._records[unit].residency

    def running(self, unit: int) -> bool:
        """Whether the unit's forward is under way."""
        for call in self._running:
            if call.unit == unit:
                return True
        return False

    def outermost(self) -> int | None:
        return self._running[0].unit if self._running else None

    def awaits_backward(self, unit: int) -> bool:
        """Whether a graph on this rank may still need the unit's full parameters."""
        record = self._records[unit]
        return record.live_graphs > 0 or unit in self._entered

    def underway(self) -> list[int]:
        """Units whose forward has begun and not ended."""
        return [call.unit for call in self._running]

    def awaiting(self) -> list[int]:
        """Units with a forward whose backward has not begun."""
        return list(dict.fromkeys(call.unit for call in self._calls.values()))

    def run_of(self, call: ForwardCall) -> int:
        """The outermost forward that `call` was part of, -1 if that is too long ago."""
        for run in reversed(self._runs):
            if run < call.start:
                return run
        return -1

    def next_run(self, run: int, *, backwards: bool = False) -> int | None:
        """The outermost forward after `run`, or before it; None if there is none."""
        if backwards:
            return max((other for other in self._runs if other < run), default=None)
        return min((other for other in self._runs if other > run), default=None)

    def is_recent(self, call: ForwardCall) -> bool:
        """Whether the backward of `call` may still begin: not too many outermost forwards were since."""
        return self.run_of(call) >= 0

    def has_graph_output(self) -> bool:
        """Whether a call of the outermost forward under way has an output with a graph."""
        begin = self._running[0].start if self._running else self.clock + 1
        return any(call.start >= begin for call in self._calls.values())

    def expects_backward(self, unit: int) -> bool:
        """Whether a backward of the unit may come, or is under way, by the order of events alone."""
        return self._records[unit].pending_backwards > 0 or unit in self._entered

    def is_prefetched(self, unit: int) -> bool:
        """Whether the unit was gathered in expectation, by the planner itself and in the forward or backward under way."""
        return self._ahead.get(unit) == self._run

    def is_unsharded_by_user(self, unit: int) -> bool:
        """Whether the caller unsharded the unit, and nothing freed it since."""
        record = self._records[unit]
        return record.unsharded_by_user and record.residency is Residency.FULL

    def is_pinned(self, unit: int) -> bool:
        """Whether the caller wants the unit full: unsharded by hand, or resident."""
        record = self._records[unit]
        return (record.unsharded_by_user or record.resident) and record.residency is Residency.FULL

    def in_backward(self, unit: int) -> bool:
        return unit in self._entered

    # --- events ---

    def before_forward(self, unit: int, *, stale: bool = False) -> list[Action]:
        """`stale`: the shards changed since the unit was gathered."""
        actions: list[Action] = []
        if not self._running:
            if self._forward_order.now[:1] == [unit] or len(self._forward_order.now) > 8 * len(self._records):
                self._forward_order.close()
            if unit not in self._ahead:
                actions += self._drop_unused_prefetch()
            if len(self._runs) == _RUNS:
                self._expire(before=self._runs[0])
            self._runs.append(self.clock)
            self._run += 1
        self.clock += 1
        self._running.append(ForwardCall(unit, self.clock, self.clock))
        record = self._records[unit]
        expected = self._forward_order.expect(unit, 1 if record.budget is None else _AHEAD)
        return actions + self._ensure_unsharded(unit, expected, record.next_forward, stale)

    def after_forward(self, unit: int, *, grad: bool, since: int = -1) -> ForwardResult:
        """The call that just ended, and what follows. A forward inside it that never ended (it raised, or
        belongs to a list of modules of which some did not run) ends with it.

        since: when the module that ends it began: what began before that goes on (of a list, another module began the call).
        """
        if not self.running(unit):
            raise InternalError(f"unit {unit} ended a forward that it never began")
        self.clock += 1
        actions: list[Action] = []
        closed: list[int] = []
        while self._running[-1].unit != unit and self._running[-1].start > since:
            inner = self._running.pop()
            closed.append(inner.unit)
            record = self._records[inner.unit]
            record.last, record.had_grad = ForwardCall(inner.unit, inner.start, self.clock), grad
            if not grad or record.reshard_policy is not ReshardPolicy.ALWAYS:
                actions += self._free(inner.unit)
        index = len(self._running) - 1
        while self._running[index].unit != unit:
            index -= 1
        call = ForwardCall(unit, self._running.pop(index).start, self.clock)
        record = self._records[unit]
        record.last, record.had_grad = call, grad
        if self.running(unit):  # a module that calls itself
            return ForwardResult(call, closed, actions)
        record.unsharded_by_user = record.unsharded_by_user and not record.resident
        if not self._running and self._was_nested(call):
            self._forward_order.close()  # what follows is another model: some ranks may have deleted it
        keep = grad and (
            record.reshard_policy is ReshardPolicy.ALWAYS
            or (record.reshard_policy is ReshardPolicy.OUTERMOST and not self._running)
        )
        if keep:
            return ForwardResult(call, closed, actions)
        if (
            grad
            and record.reshard_policy is ReshardPolicy.PARTLY
            and record.residency is Residency.FULL
            and not record.resident
        ):
            actions.append(SaveSubgroupShard(unit))
        return ForwardResult(call, closed, actions + self._free(unit))

    def _was_nested(self, call: ForwardCall) -> bool:
        """Whether others began inside an outermost call."""
        return call.end - call.start > 1

    def register_copied_use(self, unit: int) -> ForwardCall:
        """The unit's parameters were used outside of a forward, in a copy of their own: a call that gathers nothing."""
        self.clock += 2
        return ForwardCall(unit, self.clock - 1, self.clock)

    def partial_end(self, unit: int) -> ForwardCall:
        """A module of a unit of several ended its forward, and others are still to come."""
        self.clock += 1
        start = next(call.start for call in self._running if call.unit == unit)
        return ForwardCall(unit, start, self.clock)

    def expect_backward(self, call: ForwardCall) -> None:
        """An output of `call` requires grad."""
        record = self._records[call.unit]
        record.live_graphs += 1
        if call.end not in self._calls:  # a recomputation may repeat a call that still waits
            self._calls[call.end] = call
            record.pending_backwards += 1

    def graph_released(self, call: ForwardCall) -> None:
        """The graph of `call` is gone, or its backward has begun.

        When that happens differs from rank to rank, so nothing that is sent depends on it.
        """
        if call.unit in self._records and call.end > self._since:
            self._records[call.unit].live_graphs -= 1

    def _reached(self, call: ForwardCall) -> None:
        """Nobody waits for the backward of `call` any longer."""
        if self._calls.pop(call.end, None) is not None:
            self._records[call.unit].pending_backwards -= 1

    def _expire(self, *, before: int) -> None:
        for call in [call for call in self._calls.values() if call.start < before]:
            self._reached(call)

    def before_recompute(self, unit: int, *, stale: bool = False) -> list[Action]:
        """A forward inside backward (activation checkpointing): the unit stays full until its own gradients are done.

        If the forward had grad, its backward has announced itself, and it recomputes in the midst of whatever runs now.
        If it had none (reentrant checkpointing), this is where its backward begins.
        """
        record = self._records[unit]
        actions: list[Action] = []
        if record.last is None:
            self.clock += 2
            record.last, record.had_grad = ForwardCall(unit, self.clock - 1, self.clock), False
        elif not record.had_grad:
            actions = self._finish(beyond=record.last.end)
        call = record.last
        assert call is not None
        self._recomputing.append(unit)
        if unit in self._entered and record.had_grad:  # what comes next was expected when its backward was announced
            return actions + self._ensure_unsharded(unit, [], (), stale)
        return actions + self._ensure_unsharded(unit, self._expect_in_backward(call), record.next_backward, stale)

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
        if again and not copied_use:
            self._records[call.unit].create_graph_run = self._run
        actions = self._finish(beyond=call.end)
        self._entered[call.unit] = min(call.start, self._entered.get(call.unit, call.start))
        self._latest = max(self._latest, call.start)
        self._reached(call)
        if copied_use:
            return actions
        record = self._records[call.unit]
        expected = self._expect_in_backward(call)
        return actions + self._ensure_unsharded(call.unit, expected, record.next_backward, stale, itself=record.in_backward)

    def after_backward(self) -> list[Action]:
        """Backward is over: reduce what is left, free what nobody will use. Calls older than what it reached will not come."""
        self._recomputing.clear()
        for record in self._records.values():
            if record.create_graph_run != self._run:
                record.create_graph_run = -1
        self._run += 1
        actions = self._finish(beyond=-1, even_if_waiting=True)
        self._expire(before=self._latest)
        self._latest = -1
        actions += self._drop_unused_prefetch()
        for unit, record in list(self._records.items()):
            if (
                record.residency is not Residency.FULL
                or record.unsharded_by_user
                or record.keep_after_backward
                or self.running(unit)
            ):
                continue
            if record.pending_backwards == 0 or record.reshard_policy is ReshardPolicy.NEVER:
                actions += self._free(unit)
        self._forward_order.close()
        self._backward_order.close()
        return actions

    def abort(self) -> list[Action]:
        """Backward or forward died half way: forget it, free everything."""
        actions: list[Action] = []
        self._entered.clear()
        self._running.clear()
        self._recomputing.clear()
        self._ahead.clear()
        self._latest = -1
        for record in self._records.values():
            record.create_graph_run = -1
        self._expire(before=self.clock + 1)
        self._forward_order.restart()
        self._backward_order.restart()
        for unit, record in list(self._records.items()):
            if record.residency is Residency.GATHERING:
                actions += [Wait(unit)]
                record.move(unit, Residency.FULL)
            if record.residency is Residency.FULL and not record.unsharded_by_user:
                actions += self._free(unit)
        return actions

    def start_over(self) -> None:
        """An interrupt came between any two lines: whatever they left, no unit holds anything, and no backward will come."""
        self._since = self.clock
        self._entered.clear()
        self._running.clear()
        self._recomputing.clear()
        self._ahead.clear()
        self._calls.clear()
        self._latest = -1
        self._forward_order.restart()
        self._backward_order.restart()
        for record in self._records.values():
            record.clear()
            record.pending_backwards = record.live_graphs = 0

    def reset_orders(self) -> None:
        """As if nothing had run yet: after a step that ended at different places on different ranks."""
        self._forward_order, self._backward_order = ExecutionOrder(), ExecutionOrder()
        self._runs.clear()
        for record in self._records.values():
            record.last, record.had_grad, record.create_graph_run = None, False, -1

    def unshard(self, unit: int, *, stale: bool = False) -> list[Action]:
        """The caller asked for the full parameters; started, not waited for."""
        record = self._records[unit]
        actions: list[Action] = []
        if stale:
            actions += self.finish_unshard(unit) + self._free(unit, even_resident=True)
        if record.residency is Residency.SHARDED:
            actions += self._gather(unit)
        self._ahead.pop(unit, None)
        record.unsharded_by_user = True
        return actions

    def finish_unshard(self, unit: int) -> list[Action]:
        """Finish the gather of a unit that is being gathered."""
        record = self._records[unit]
        if record.residency is not Residency.GATHERING:
            return []
        self._ahead.pop(unit, None)
        record.move(unit, Residency.FULL)
        return [Wait(unit)]

    def clear(self, unit: int) -> None:
        """An action on the unit raised: its data is gone, whatever was planned."""
        self._records[unit].clear()
        self._ahead.pop(unit, None)

    def set_resident(self, unit: int, resident: bool) -> None:
        """Whether the unit stays full, whatever ends."""
        self._records[unit].resident = resident

    def reshard(self, unit: int) -> list[Action]:
        """The caller gives the full parameters back."""
        record = self._records[unit]
        record.unsharded_by_user = False
        actions = self.finish_unshard(unit)
        return actions + (self._free(unit, even_resident=True) if record.residency is Residency.FULL else [])

    # --- parts of events ---

    def _gather(self, unit: int) -> list[Action]:
        self._records[unit].move(unit, Residency.GATHERING)
        self.stats.gathers += 1
        return [Unshard(unit)]

    def _free(self, unit: int, *, even_resident: bool = False) -> list[Action]:
        record = self._records[unit]
        record.unsharded_by_user = False
        if record.residency is not Residency.FULL or ((record.resident or record.create_graph_run != -1) and not even_resident):
            return []
        record.move(unit, Residency.SHARDED)
        return [Reshard(unit)]

    def _drop_unused_prefetch(self) -> list[Action]:
        actions: list[Action] = []
        for unit in self._ahead:
            record = self._records[unit]
            if record.residency is Residency.GATHERING:
                self.stats.unused += 1
                record.move(unit, Residency.SHARDED)
                actions += [Wait(unit), Reshard(unit)]
        self._ahead.clear()
        return actions

    def _ensure_unsharded(
        self, unit: int, expected: list[int], listed: tuple[int, ...] | None, stale: bool, *, itself: bool = True
    ) -> list[Action]:
        """`unit` is computed next; start what is `expected` behind it, or `listed` by the caller: it arrives meanwhile."""
        record = self._records[unit]
        actions: list[Action] = []
        if stale and record.residency is Residency.GATHERING:
            actions += self.finish_unshard(unit)
        if stale and record.residency is Residency.FULL:
            held = record.unsharded_by_user
            actions += self._free(unit, even_resident=True)
            record.unsharded_by_user = held
        if record.residency is Residency.SHARDED and itself:
            order = self._backward_order if self._entered else self._forward_order
            self.stats.missed += order.at_known_place
            actions += self._gather(unit)
        actions += self.finish_unshard(unit)
        for other in expected if listed is None else listed:
            if other not in self._records or not self._can_prefetch(other):
                continue
            ahead = self._records[other]
            if listed is None and not self._within_budget(record.budget, ahead.nbytes):
                break
            wanted = ahead.residency is Residency.SHARDED and (ahead.in_backward or not self._entered)
            if wanted:
                actions += self._gather(other)
                self._ahead[other] = self._run
                self.stats.prefetched += 1
        return actions

    def _within_budget(self, budget: int | None, nbytes: int) -> bool:
        """Whether one more unit, of `nbytes`, may be gathered ahead."""
        if budget is None:
            return not self._ahead
        return nbytes + sum(self._records[other].nbytes for other in self._ahead) <= budget

    def _expect_in_backward(self, call: ForwardCall) -> list[int]:
        """What the last backward needed next; in the first one, the latest forward before `call` that awaits its backward.

        Only of the same outermost forward: others may be of models that some ranks have deleted already.
        """
        budget = self._records[call.unit].budget
        expected = self._backward_order.expect(call.unit, 1 if budget is None else _AHEAD)
        if expected:
            return expected
        begin = self.run_of(call)
        for other in reversed(self._calls.values()):
            if begin < other.start < call.start:
                return [other.unit]
        return []

    def _finish(self, *, beyond: int, even_if_waiting: bool = False) -> list[Action]:
        """Reduce and free the units whose every call started after `beyond`."""
        actions: list[Action] = []
        for unit, start in list(self._entered.items()):
            record = self._records[unit]
            if start > beyond and (even_if_waiting or record.pending_backwards == 0) and unit not in self._recomputing:
                del self._entered[unit]
                if not record.keep_after_backward:
                    actions += self._free(unit)
                actions.append(Reduce(unit))
        return actions
