"""The planner without tensors: every sequence of events keeps the table of moves and frees what it gathered."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.core.scheduler import (
    _REMEMBERED_FORWARDS,
    Action,
    ForwardCall,
    Move,
    Residency,
    Scheduler,
)
from fullshard.core.unit_options import KeepAfterForward, UnitOptions
from fullshard.errors import InternalError
from fullshard.policies import ZERO2, ZERO3, CheckPolicy, CommPolicy, MixedPrecisionPolicy

TRANSITIONS = {
    (Residency.SHARDED, Residency.GATHERING): "all-gather started",
    (Residency.GATHERING, Residency.FULL): "all-gather waited on",
    (Residency.GATHERING, Residency.SHARDED): "prefetched, never used",
    (Residency.FULL, Residency.SHARDED): "compute is done",
}


def options_of(keep: KeepAfterForward, **comm: int | None) -> UnitOptions:
    """The options of a unit that keeps parameters after forward as `keep` says."""
    states = ZERO2 if keep is KeepAfterForward.KEPT else ZERO3
    policies = {"mp": MixedPrecisionPolicy(), "comm": CommPolicy(**comm), "checks": CheckPolicy()}  # type: ignore[arg-type]
    return UnitOptions(keep_after_forward=keep, states=states, **policies)  # type: ignore[arg-type]


class SimulatedRun:
    """Executes actions on nothing, and checks that each is legal where it comes."""

    def __init__(self, keeps: list[KeepAfterForward]) -> None:
        self.scheduler = Scheduler()
        self.data = dict.fromkeys(range(len(keeps)), Residency.SHARDED)
        self.log: list[tuple[str, int]] = []
        self.most_full = 0
        self.written: set[int] = set()  # units whose shards the optimizer has written since the last forward
        for unit, keep in enumerate(keeps):
            self.scheduler.register(unit, options_of(keep))

    def run(self, actions: list[Action]) -> None:
        for move, unit in actions:
            now = self.data[unit]
            moves = {Move.UNSHARD: Residency.GATHERING, Move.WAIT: Residency.FULL, Move.RESHARD: Residency.SHARDED}
            target = moves.get(move, now)
            if move is Move.SAVE_SUBGROUP_SHARD:
                assert now is Residency.FULL
            elif move in moves:
                assert (now, target) in TRANSITIONS, f"{move} of {unit} while {now}"
            self.data[unit] = target
            self.log.append((move.value, unit))
            self.most_full = max(self.most_full, sum(r is not Residency.SHARDED for r in self.data.values()))

    def forward(self, tree: list, calls: list[ForwardCall], grad: bool = True) -> None:
        """`tree` is [unit, [child tree], ...]."""
        unit, *children = tree
        if not self.scheduler.running:
            self.run(self.scheduler.drop_stale(sorted(self.written)))
            self.written.clear()
        self.run(self.scheduler.before_forward(unit))
        assert self.data[unit] is Residency.FULL
        for child in children:
            self.forward(child, calls, grad)
        assert self.data[unit] is Residency.FULL, "nothing frees a unit while it runs"
        ended = self.scheduler.after_forward(unit, grad=grad)
        if grad:
            self.scheduler.expect_backward(ended.call)
            calls.append(ended.call)
        self.run(ended.actions)

    def backward(self, calls: list[ForwardCall], *, recomputed: bool = False, inputs_only: bool = False) -> None:
        """`recomputed`: each call is recomputed after its backward began, and the recomputation returns (no early stop)."""
        for call in sorted(calls, key=lambda c: -c.end):
            self.run(self.scheduler.before_backward(call, collects=not inputs_only))
            self.scheduler.graph_released(call)
            assert self.data[call.unit] is Residency.FULL
            if recomputed:
                self.run(self.scheduler.before_recompute(call.unit))
                again = self.scheduler.after_recompute(call.unit, grad=True)
                self.scheduler.expect_backward(again)
                self.scheduler.graph_released(again)
        self.run(self.scheduler.after_backward())

    def delete(self, unit: int) -> None:
        """Delete a unit that is sharded or kept, and its memory."""
        self.scheduler.unregister(unit)
        del self.data[unit]
        self.written.discard(unit)


def trees(units: int) -> st.SearchStrategy[list]:
    """A root 0 whose descendants are the other units, each at least once, some repeated."""

    def build(parents: list[int], repeats: list[int]) -> list:
        nodes: list[list] = [[0]]
        for unit in [*range(1, units), *repeats]:
            parent = nodes[parents[unit % len(parents)] % len(nodes)]
            node = [unit]
            if unit not in _inside(nodes[0], parent):
                parent.append(node)
                nodes.append(node)
        return nodes[0]

    return st.builds(
        build, st.lists(st.integers(0, 20), min_size=1, max_size=6), st.lists(st.integers(1, units - 1), max_size=3)
    )


def _inside(root: list, target: list, path: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Units on the way from the root to `target`."""
    path = (*path, root[0])
    if root is target:
        return path
    for child in root[1:]:
        found = _inside(child, target, path)
        if found:
            return found
    return ()


programs = st.lists(
    st.sampled_from(["train", "recompute", "penalty", "eval", "two", "forget", "raise"]), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), program=programs, keeps=st.lists(st.sampled_from(list(KeepAfterForward)), min_size=5, max_size=5))
def test_every_program_keeps_the_moves_and_ends_sharded(
    data: st.DataObject, program: list[str], keeps: list[KeepAfterForward]
) -> None:
    run = SimulatedRun(keeps)
    tree = data.draw(trees(5))
    for step in program:
        calls: list[ForwardCall] = []
        if step == "eval":
            run.forward(tree, calls, grad=False)
        elif step in ("train", "recompute"):
            run.forward(tree, calls)
            run.backward(calls, recomputed=step == "recompute")
            run.written.update(range(5))
        elif step == "penalty":  # a backward that reaches inputs only, then one through the same graph
            run.forward(tree, calls)
            for inputs_only in (True, False):
                run.log.clear()
                run.backward(calls, inputs_only=inputs_only)
                kinds = {kind for kind, _ in run.log} & {"reduce", "pass_by"}
                assert kinds == ({"pass_by"} if inputs_only else {"reduce"})
        elif step == "two":
            run.forward(tree, calls)
            run.forward(tree, calls)
            run.backward(calls)
        elif step == "forget":  # the graph is dropped without a backward
            run.forward(tree, calls)
            for call in calls:
                run.scheduler.graph_released(call)
        else:
            run.run(run.scheduler.before_forward(0))
            broken = run.scheduler.broken_units(())
            run.scheduler.reset(broken)
            run.data |= dict.fromkeys(broken, Residency.SHARDED)  # the runtime frees them
    calls = []
    run.forward(tree, calls)
    run.backward(calls)
    used = {unit for unit, *_ in _walk(tree)}
    kept = {unit for unit, keep in enumerate(keeps) if keep is KeepAfterForward.KEPT}
    assert {unit for unit, residency in run.data.items() if residency is Residency.FULL} == used & kept
    assert all(run.data[unit] is Residency.SHARDED for unit in set(run.data) - kept)
    reduced = [unit for name, unit in run.log if name == "reduce"]
    assert set(reduced[-len(used) :]) == used, "each unit is reduced in every backward"


@settings(max_examples=100, deadline=None)
@given(tree=trees(5), keeps=st.lists(st.sampled_from(list(KeepAfterForward)), min_size=5, max_size=5), steps=st.integers(1, 3))
def test_recomputations_that_return_change_no_action_and_leave_nothing_pending(
    tree: list, keeps: list[KeepAfterForward], steps: int
) -> None:
    runs = SimulatedRun(keeps), SimulatedRun(keeps)
    for _ in range(steps):
        for run, recomputed in zip(runs, (False, True)):
            calls: list[ForwardCall] = []
            run.forward(tree, calls)
            run.backward(calls, recomputed=recomputed)
            run.written.update(range(5))
            assert not run.scheduler._pending
            assert not any(run.scheduler.awaits_backward(unit) for unit in run.data)
    assert runs[0].log == runs[1].log
    assert runs[0].most_full == runs[1].most_full


@settings(max_examples=100, deadline=None)
@given(data=st.data(), models=st.integers(2, 4))
def test_models_can_be_deleted_at_any_time_and_the_others_run_on(data: st.DataObject, models: int) -> None:
    """Each model is a root and two units. What is left of a deleted one costs the others at most gathers that are unused."""
    run = SimulatedRun([KeepAfterForward.OUTERMOST] * 3 * models)
    alive = list(range(models))
    for step in data.draw(st.lists(st.sampled_from(["train", "eval", "delete"]), min_size=2, max_size=10)):
        model = data.draw(st.sampled_from(alive))
        tree: list = [3 * model, [3 * model + 1], [3 * model + 2]]
        calls: list[ForwardCall] = []
        if step == "delete":
            if len(alive) > 1:
                alive.remove(model)
                for unit in range(3 * model, 3 * model + 3):
                    run.delete(unit)
            continue
        run.forward(tree, calls, grad=step == "train")
        if step == "train":
            run.backward(calls)
    assert all(residency is Residency.SHARDED for residency in run.data.values())
    assert sorted(run.data) == sorted(3 * model + unit for model in alive for unit in range(3))


def test_what_is_remembered_of_deleted_models_is_bounded() -> None:
    scheduler = Scheduler()
    for model in range(1000):
        units = range(20 * model, 20 * model + 20)
        for unit in units:
            scheduler.register(unit, options_of(KeepAfterForward.NEVER))
        calls = []
        for unit in units:
            scheduler.before_forward(unit)
        for unit in reversed(units):
            calls.append(scheduler.after_forward(unit, grad=True).call)
            scheduler.expect_backward(calls[-1])
        for call in reversed(calls):
            scheduler.before_backward(call)
        scheduler.after_backward()
        for unit in units:
            scheduler.unregister(unit)
    for order in scheduler.forward_order, scheduler.backward_order:
        assert len(order.runs) <= 256
    assert 20 * 999 in scheduler.forward_order.runs, "the last ones are remembered"


def _walk(tree: list) -> list[list]:
    return [tree, *(node for child in tree[1:] for node in _walk(child))]


def test_at_most_two_units_are_full_in_a_chain() -> None:
    run = SimulatedRun([KeepAfterForward.NEVER] * 6)
    for _ in range(3):
        calls: list[ForwardCall] = []
        for unit in range(6):
            run.forward([unit], calls)
        run.backward(calls)
    assert run.most_full == 2


def test_a_unit_is_reduced_before_the_next_but_one_is_gathered() -> None:
    run = SimulatedRun([KeepAfterForward.OUTERMOST] * 4)
    for _ in range(2):
        run.log.clear()
        calls: list[ForwardCall] = []
        run.forward([0, [1], [2], [3]], calls)
        forward, run.log = run.log, []
        run.backward(calls)
    assert forward == [
        *[("unshard", 0), ("wait", 0), ("unshard", 1), ("wait", 1), ("unshard", 2), ("reshard", 1), ("wait", 2)],
        *[("unshard", 3), ("reshard", 2), ("wait", 3), ("reshard", 3)],
    ]
    assert run.log == [
        *[("unshard", 3), ("wait", 3), ("unshard", 2), ("reshard", 3), ("reduce", 3), ("wait", 2), ("unshard", 1)],
        *[("reshard", 2), ("reduce", 2), ("wait", 1), ("reshard", 0), ("reduce", 0), ("reshard", 1), ("reduce", 1)],
    ]


def test_kept_units_are_gathered_once_after_they_were_written_and_prefetched_as_others_are() -> None:
    run = SimulatedRun([KeepAfterForward.KEPT] * 3)
    for _ in range(2):
        run.log.clear()
        for microbatch in range(2):
            calls: list[ForwardCall] = []
            run.forward([0, [1], [2]], calls)
            run.forward([0, [1], [2]], [], grad=False)
            run.backward(calls)
            if microbatch == 0:
                gathers = list(run.log)
        run.written.update((0, 2))  # 1 is frozen
    assert gathers == [
        *[("reshard", 0), ("reshard", 2), ("unshard", 0), ("wait", 0)],
        *[("unshard", 2), ("wait", 2), ("reduce", 2), ("reduce", 0), ("reduce", 1)],
    ]
    assert run.log[len(gathers) :] == [("reduce", 2), ("reduce", 0), ("reduce", 1)]
    assert run.scheduler.stats.missed == 0


def test_ending_a_forward_that_never_began_is_an_internal_error() -> None:
    scheduler = Scheduler()
    scheduler.register(0, options_of(KeepAfterForward.NEVER))
    with pytest.raises(InternalError, match="ended a forward that it never began"):
        scheduler.after_forward(0, grad=True)


@pytest.mark.proves("43a")
def test_a_wrong_guess_costs_one_unused_gather_and_is_counted() -> None:
    run = SimulatedRun([KeepAfterForward.NEVER] * 3)
    run.forward([0, [1]], [], grad=False)
    run.forward([0, [1]], [], grad=False)
    run.forward([0, [2]], [], grad=False)  # 1 was expected
    run.forward([0, [2]], [], grad=False)
    assert run.scheduler.stats.unused == 1
    assert run.data[1] is Residency.SHARDED
    assert run.scheduler.stats.missed == 1


@pytest.mark.parametrize("by_user", [False, True])
def test_a_gather_that_may_not_start_ahead_is_not_missed(by_user: bool) -> None:
    """Units that run in order miss nothing, if the budget or the lists of the user leave no unit to prefetch."""
    scheduler = Scheduler()
    for unit in range(3):
        record = scheduler.register(unit, options_of(KeepAfterForward.NEVER, prefetch_bytes=None if by_user else 0))
        record.nbytes = 8
        record.next_forward = record.next_backward = () if by_user else None
    for _ in range(3):
        calls = []
        for unit in range(3):
            scheduler.before_forward(unit)
        for unit in reversed(range(3)):
            calls.append(scheduler.after_forward(unit, grad=True).call)
            scheduler.expect_backward(calls[-1])
        for call in reversed(calls):
            scheduler.before_backward(call)
        scheduler.after_backward()
    assert (scheduler.stats.gathers, scheduler.stats.prefetched, scheduler.stats.missed) == (18, 0, 0)


def test_what_forward_prefetched_may_be_stale_in_backward() -> None:
    """The user may write its shards between the two, so the unit compares their versions."""
    scheduler = Scheduler()
    for unit in range(3):
        scheduler.register(unit, options_of(KeepAfterForward.NEVER))
    for inner in (1, 2), (1,):  # the second forward skips unit 2, which was prefetched for it
        scheduler.before_forward(0)
        for unit in inner:
            scheduler.before_forward(unit)
            scheduler.after_forward(unit, grad=True)
        call = scheduler.after_forward(0, grad=True).call
    assert scheduler.prefetched[2] == scheduler.phase
    scheduler.before_backward(call)
    assert scheduler.prefetched[2] != scheduler.phase


def test_a_backward_that_does_not_come_is_expected_for_so_many_outermost_forwards() -> None:
    """`_REMEMBERED_FORWARDS`: a forward with grad whose output was dropped."""
    run, calls = SimulatedRun([KeepAfterForward.NEVER] * 2), list[ForwardCall]()
    run.forward([0], calls)
    for _ in range(_REMEMBERED_FORWARDS):
        assert run.scheduler.expects_backward(0)
        run.forward([1], calls, grad=False)
    run.forward([1], calls, grad=False)
    assert not run.scheduler.expects_backward(0)
