"""How many messages travel, of which kind and of how many bytes: exact."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, full, shard_stack, square
from torch import nn

import fullshard
from fullshard import CommPolicy, MixedPrecisionPolicy, _torch


def kinds(messages: list[fullshard.Message]) -> Counter[str]:
    """The messages of a step; not those with which the first forward compares the ranks."""
    return Counter(message.kind for message in messages if message.kind != "talk")


@pytest.mark.parametrize("reshard", [True, False, None])
@ranks(1, 2, 3)
def test_each_unit_gathers_once_or_twice_and_reduces_once(world: World, reshard: bool | None) -> None:
    model = shard_stack(Stack(depth=3), world.mesh, reshard_after_forward=reshard)
    gathers = {True: 2 * 4, False: 4, None: 2 * 3 + 1}[reshard]
    before = fullshard.stats(model)
    for step in range(4):  # from the first step on, and the same in every step
        with fullshard.counting(model) as messages:
            square(model(world.mine(batch(step)))).backward()
        assert kinds(messages) == {"all_gather": gathers, "reduce_scatter": 4, "heartbeat": 1}
    stats = fullshard.stats(model)
    assert stats.unused == before.unused and stats.gathers - before.gathers == 4 * gathers


@ranks(2)
def test_all_but_the_first_gather_are_issued_ahead_once_the_order_is_known(world: World) -> None:
    model = shard_stack(Stack(depth=4), world.mesh)
    for step in range(2):  # the first one continues the run of a model before that had forwards only
        square(model(world.mine(batch(step)))).backward()
    before = fullshard.stats(model)
    square(model(world.mine(batch(2)))).backward()
    after = fullshard.stats(model)
    assert (after.gathers - before.gathers, after.prefetched - before.prefetched) == (9, 8), (
        "the root's own gather has nothing to hide behind"
    )


@ranks(1, 2, 3)
def test_bytes_equal_the_layout(world: World) -> None:
    for mp, gather, reduce in (
        (MixedPrecisionPolicy(), torch.float32, torch.float32),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), torch.bfloat16, torch.float32),
        (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            torch.bfloat16,
            torch.float32 if _torch.REDUCES_IN_GRAD_DTYPE else torch.bfloat16,
        ),
    ):
        for comm in (CommPolicy(direct_min_bytes=0), CommPolicy(direct_min_bytes=float("inf"))):
            model = shard_stack(Stack(2, 8, 24), world.mesh, mp_policy=mp, comm_policy=comm)
            with fullshard.counting(model) as messages:
                square(model(world.mine(batch(0)))).backward()
            units = [model._fullshard_unit, *(block._fullshard_unit for block in model.blocks)]
            layouts = {id(u): [g.layout for g in u.groups] for u in units}
            root, *blocks = [sum(layout.unsharded_numel for layout in layouts[id(u)]) for u in units]
            gathered = [m for m in messages if m.kind == "all_gather"]
            reduced = [m for m in messages if m.kind == "reduce_scatter"]
            assert {m.dtype for m in gathered} == {gather} and {m.dtype for m in reduced} == {reduce}
            assert sum(m.nbytes for m in gathered) == (root + 2 * sum(blocks)) * gather.itemsize
            assert sum(m.nbytes for m in reduced) == (root + sum(blocks)) * reduce.itemsize
            (beat,) = [m for m in messages if m.kind == "heartbeat"]
            assert beat.nbytes == 1024, "a hash, its complement, a byte per parameter, in whole KiB"


@ranks(2)
def test_forward_only_loops_leave_training_traffic_as_it_was(world: World) -> None:
    model = shard_stack(Stack(depth=3), world.mesh)
    with torch.no_grad():
        for _ in range(30):
            model(batch(0))
    with fullshard.counting(model) as messages:
        square(model(world.mine(batch(0)))).backward()
    assert kinds(messages) == {"all_gather": 7, "reduce_scatter": 4, "heartbeat": 1}
    scheduler = model._fullshard_unit.runtime.scheduler
    assert len(scheduler.forward_order.now) <= 4, "what is recorded does not grow"


@ranks(2)
def test_a_no_grad_forward_gathers_once_and_frees(world: World) -> None:
    for reshard in (True, False, None):
        model = shard_stack(Stack(depth=2), world.mesh, reshard_after_forward=reshard)
        with fullshard.counting(model) as messages, torch.no_grad():
            model(batch(0))
        assert kinds(messages) == {"all_gather": 3}
        assert [b._fullshard_unit.residency.value for b in model.blocks] == ["sharded"] * 2
        assert model._fullshard_unit.residency.value == "sharded"


@ranks(2)
def test_every_third_heartbeat_tells_what_is_unused_everywhere_and_compares_what_ranks_ran(world: World) -> None:
    model = Stack(0)
    model.unused = nn.Linear(5, 3)
    fullshard.fully_shard(model, mesh=world.mesh, check_policy=fullshard.CheckPolicy(every=3))
    beating: list[int] = []  # backwards of other models on the mesh count, too, so the first may be any of three
    for step in range(6):
        with fullshard.counting(model) as messages:
            square(model(world.mine(batch(step)))).backward()
        beats = "heartbeat" in kinds(messages)
        beating += [step] if beats else []
        assert (model.unused.weight.grad is None) is beats, "without a heartbeat nobody knows that it is unused everywhere"
        if not beats:
            assert not full(model.unused.weight.grad).any()
        model.zero_grad()
    assert beating == [beating[0], beating[0] + 3]


@ranks(2)
def test_ranks_that_began_anew_count_backwards_to_the_next_heartbeat_alike(world: World) -> None:
    model = Stack(1)
    sharded = shard_stack(copy.deepcopy(model), world.mesh, check_policy=fullshard.CheckPolicy(every=2, patience=0.1))
    for step in range(6):
        loss = square(sharded(world.mine(batch(step))))
        if fullshard.any_failed(world.mesh, step == 2 and world.rank == 0):
            assert step == 2
        else:
            loss.backward()
            square(model(batch(step))).backward()
            assert_same_grads(sharded, model)
        model.zero_grad(), sharded.zero_grad()


@ranks(2)
def test_the_heartbeat_can_be_turned_off(world: World) -> None:
    model = shard_stack(Stack(depth=1), world.mesh, check_policy=fullshard.CheckPolicy(heartbeat=False))
    with fullshard.counting(model) as messages:
        square(model(world.mine(batch(0)))).backward()
    assert kinds(messages) == {"all_gather": 3, "reduce_scatter": 2}
    assert all(p.grad is not None for p in model.parameters())
