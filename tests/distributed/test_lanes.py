"""A lane that puts everything off finds missing waits and early frees on the CPU, without a GPU."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from delays import late_lanes
from harness import World, ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Stack, assert_same_grads, assert_same_parameters, batch, rounding, shard_stack, share_grads, square
from poison import poisoned
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.comm.base import StartedWork
from fullshard.comm.streams import CollectiveCall, HostStream, InFlight
from fullshard.core.reduction import Reduction
from fullshard.errors import InternalError


class Procrastinator:
    """Runs what it was given only when somebody waits for it, or whenever `eager` says so; always in order.

    Freed storages have no bytes (`resize_(0)`), so work that is done too late raises; memory that is not gathered yet is
    poisoned with NaN (`poison.py`), so compute that does not wait shows.
    """

    def __init__(self, eager: Callable[[], bool] = lambda: False) -> None:
        self._queue: list[_Later] = []
        self._eager = eager

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: _Later | None = None) -> _Later:
        ticket = _Later(self, start, finish, after)
        self._queue.append(ticket)
        self.maybe()
        return ticket

    def maybe(self) -> None:
        while self._queue and self._eager():
            self.until(self._queue[0])

    def until(self, ticket: _Later) -> None:
        while not ticket.ran:
            first = self._queue.pop(0)
            if first.after is not None:
                first.after.lane.until(first.after)
            first.ran = True
            HostStream().run(first.start, first.finish).wait()


class _Later:
    def __init__(
        self, lane: Procrastinator, start: Callable[[], StartedWork], finish: Callable[[], None], after: _Later | None
    ) -> None:
        self.lane, self.start, self.finish, self.after, self.ran = lane, start, finish, after, False

    def done(self) -> bool:
        self.lane.maybe()
        return self.ran

    def wait(self) -> None:
        self.lane.until(self)

    def block(self) -> None:
        self.wait()


@poisoned()
def train(
    world: World,
    comm: CommPolicy,
    *,
    steps: int = 3,
    mp: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    kind: str = "plain",
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> None:
    model = Stack(3, 8, 24)
    sharded = shard_stack(
        copy.deepcopy(model),
        mesh or world.mesh,
        comm_policy=comm,
        mp_policy=mp,
        **options,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    tolerance = rounding(mp.param_dtype or torch.float32)
    for step in range(steps):
        for m, x in ((sharded, world.mine(batch(step))), (model, batch(step))):
            if kind == "accumulate" and m is sharded:
                with sharded.accumulate():
                    square(m(x)).backward()
            elif kind == "accumulate":
                square(m(x)).backward()
            if kind == "eval":
                with torch.no_grad():
                    m(x)
            square(checkpoint(m, x.requires_grad_(), use_reentrant=False) if kind == "checkpoint" else m(x)).backward()
        assert_same_grads(sharded, model, tolerance)
        share_grads(sharded, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("kind", ["plain", "accumulate", "eval", "checkpoint"])
@pytest.mark.parametrize("packed", [True, False])
@ranks(1, 2)
def test_work_done_at_the_last_moment_changes_nothing(world: World, packed: bool, kind: str) -> None:
    comm = CommPolicy(direct_min_bytes=float("inf") if packed else 0, lanes=lambda device: Procrastinator())
    for mp in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        train(world, comm, kind=kind, mp=mp)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("kind", ["plain", "accumulate", "checkpoint"])
@ranks(4)
def test_so_it_is_with_replicas_offload_any_dim_and_smaller_groups(world: World, kind: str) -> None:
    lazy = CommPolicy(direct_min_bytes=0, lanes=lambda device: Procrastinator())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    offload = CPUOffloadPolicy(pin_memory=False)
    low = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # cast and back, and exact
    for options in (
        {"mesh": mesh},
        {"mesh": mesh, "offload_policy": offload, "mp": low},
        {"offload_policy": offload, "reshard_after_forward": 2},
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1), "reshard_after_forward": 2, "mp": low},
        {"mesh": mesh, "comm": replace(lazy, prefetch_bytes=10**6)},
    ):
        train(world, options.pop("comm", lazy), kind=kind, **options)


@ranks(1, 2)
def test_work_done_at_any_legal_moment_changes_nothing(world: World) -> None:
    # Derandomized: every rank draws the same examples, since collectives are matched by order.
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(
        moments=st.lists(st.booleans(), min_size=1, max_size=40),
        direct=st.sampled_from([0, 200, float("inf")]),
        limit=st.integers(1, 3),
        kind=st.sampled_from(["plain", "accumulate", "eval", "checkpoint"]),
    )
    def check(moments: list[bool], direct: float, limit: int, kind: str) -> None:
        def lane(device: torch.device) -> Procrastinator:
            drawn = itertools.cycle([*moments, False])
            return Procrastinator(lambda: next(drawn))

        train(world, CommPolicy(direct_min_bytes=direct, reductions_in_flight=limit, lanes=lane), steps=2, kind=kind)

    check()


@pytest.mark.parametrize("missing", ["gather", "reduction"])
@ranks(1, 2)
def test_the_procrastinator_finds_a_missing_wait(world: World, missing: str) -> None:
    """The test double itself: lanes whose tickets nobody really waits for must not go unnoticed under it."""

    class Forgetful(Procrastinator):
        def until(self, ticket: _Later) -> None:
            if (missing == "reduction") == (getattr(ticket.finish, "__func__", None) is not Reduction.finish):
                super().until(ticket)
            elif ticket in self._queue:
                self._queue.remove(ticket)

    model = Stack()
    sharded = shard_stack(
        copy.deepcopy(model),
        world.mesh,
        comm_policy=CommPolicy(lanes=lambda device: Forgetful()),
    )
    with poisoned():
        output = sharded(world.mine(batch(0)))
    if missing == "gather":
        assert output.isnan().all()
        return
    with pytest.raises(InternalError, match="Gradients of unit .* are set before they are reduced"):
        square(output).backward()


def test_in_flight_lets_go_oldest_first_and_only_after_waiting() -> None:
    events: list[str] = []

    class Work:
        def __init__(self, name: str, ready: bool) -> None:
            self.name, self.ready = name, ready

        def done(self) -> bool:
            return self.ready

        def wait(self) -> None:
            events.append(f"wait {self.name}")

    flight = InFlight()
    for name, ready in (("a", False), ("b", True), ("c", False)):
        flight.push(Work(name, ready), lambda name=name: events.append(f"land {name}"))
    flight.poll()
    assert events == [], "b is done, but a was first"
    flight.make_room(3)
    assert events == ["wait a", "land a"]
    flight.poll()
    assert events[2:] == ["wait b", "land b"]
    flight.drain()
    assert events[4:] == ["wait c", "land c"] and len(flight) == 0


@pytest.mark.rotates(3)
@pytest.mark.proves("9a")
@pytest.mark.parametrize("kind", ["plain", "accumulate", "eval", "checkpoint"])
@ranks(1, 2, 3)
def test_collectives_that_begin_late_at_random_change_nothing(world: World, kind: str) -> None:
    """Memory is NaN wherever nobody has waited, and each rank begins messages when its own dice say so."""
    for reshard in (True, None):
        train(world, CommPolicy(lanes=late_lanes()), kind=kind, reshard_after_forward=reshard)
    if world.size == 2:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        train(world, CommPolicy(reductions_in_flight=2, lanes=late_lanes()), kind=kind, mesh=mesh)


@pytest.mark.proves("9a")
@ranks(1)  # of several ranks, messages would arrive in memory that is gone with the model
def test_poison_shows_who_computes_before_the_gather_was_waited_for(world: World) -> None:
    seen: list[Tensor] = []

    @poisoned()
    def compute() -> None:
        # One unit: a gather that was put off begins when its next one is posted, which has grown its memory again.
        late = CommPolicy(lanes=late_lanes())
        model = fullshard.fully_shard(Stack(), mesh=world.mesh, comm_policy=late)
        square(model(world.mine(batch(0)))).backward()
        no_wait = mock.patch.object(CollectiveCall, "wait", lambda call: None)
        with no_wait, torch.no_grad():
            seen.extend(model(world.mine(batch(0))) for _ in range(20))

    # Gathers stay put off in this runtime, which goes with its thread: no other test shares it.
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert any(out.isnan().any() for out in seen)
