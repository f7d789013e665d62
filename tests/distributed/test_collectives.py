"""Collectives by themselves: every implementation gives what the definition says, for every dtype that travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, ranks

from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives, SingleRank, Started
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.gloo import GlooCollectives


def finish(pending: Started) -> None:
    if pending is not None:
        pending.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@ranks(1, 2, 3, 4)
def test_a_gather_puts_every_rank_in_order_again_and_again(world: World, dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    kinds: list[Collectives] = [SingleRank()] if world.size == 1 else [GlooCollectives(group)]
    if world.size > 1 and dtype is not torch.bool:
        kinds.append(CoalescedCollectives(group, stages=True))
    for collectives in kinds:
        sizes = (3, 0, 64, 1)
        outs = [torch.zeros(world.size * size, dtype=dtype) for size in sizes]
        apart = [torch.full((size,), world.rank + 1).to(dtype) for size in sizes]
        own = [out[world.rank * size :][:size] for out, size in zip(outs, sizes)]
        for shards in (apart, own):
            gather = collectives.gatherer(outs, shards)
            for _ in range(3):
                for out in outs:
                    out.zero_()
                for slot in own:
                    slot.fill_(world.rank + 1)
                finish(gather())
                for out, size in zip(outs, sizes):
                    expected = torch.arange(1, world.size + 1).repeat_interleave(size).to(dtype)
                    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@ranks(1, 2, 3, 4)
def test_a_reduction_sums_and_scales(world: World, dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    alone = world.size == 1
    coalesced = [CoalescedCollectives(group), CoalescedCollectives(group, stages=True)]
    kinds: list[Collectives] = [SingleRank()] if alone else [GlooCollectives(group), *coalesced]
    for collectives in kinds:
        for scale in (1.0, 1.0 / world.size, 0.25):
            sizes = (8,) if collectives is coalesced[0] else (4, 8)  # gloo coalesces no reduce-scatters
            fulls = [torch.arange(world.size * size).to(dtype) + world.rank for size in sizes]
            kept = [full.clone() for full in fulls]
            outs = [torch.empty(size, dtype=dtype) for size in sizes]
            finish(collectives.reduce_scatter(outs, fulls, scale))
            for out, _full, size in zip(outs, kept, sizes):
                base = torch.arange(world.size * size)[world.rank * size :][:size].float()
                expected = (base * world.size + sum(range(world.size))) * scale
                assert torch.allclose(out.float(), expected, rtol=world.size * torch.finfo(dtype).eps)
            assert all(torch.equal(a, b) for a, b in zip(kept, fulls)), "gradients are left as they were"


@ranks(1)
def test_a_backend_that_averages_is_asked_for_the_mean_and_for_nothing_else(world: World) -> None:
    class Group:
        asked: list[Any] = []

        def size(self) -> int:
            return 4

        def rank(self) -> int:
            return 0

        def __getattr__(self, name: str) -> Any:
            return lambda outs, fulls, how: self.asked.append((name, how.reduceOp))

    group: Any = Group()
    full, out = torch.ones(8), torch.ones(2)
    for averages in (True, False):
        collectives = CoalescedCollectives(group, averages=averages)
        for scale, count in ((0.25, 1), (0.125, 1), (0.25, 2), (1.0, 1)):
            group.asked.clear()
            finish(collectives.reduce_scatter([out] * count, [full] * count, scale))
            ((_, asked),) = group.asked
            mean = averages and scale == 0.25
            assert asked == (dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
            assert out[0] == (1.0 if mean else scale**count)
            out.fill_(1.0)


@ranks(1, 2, 3)
def test_the_maximum_over_ranks(world: World) -> None:
    collectives = collectives_for(dist.group.WORLD, torch.device("cpu"))
    message = torch.tensor([world.rank == 0, world.rank == world.size - 1, False], dtype=torch.uint8)
    finish(collectives.all_reduce_max(message))
    assert message.tolist() == [1, 1, 0]


@ranks(2)
def test_gathers_and_reductions_may_be_under_way_together_in_any_order(world: World) -> None:
    collectives = GlooCollectives(dist.group.WORLD)
    out, shard = torch.zeros(20), torch.full((10,), float(world.rank))
    full, part = torch.full((20,), float(world.rank)), torch.zeros(10)
    gather = collectives.gatherer([out], [shard])
    for _ in range(20):
        if world.rank == 0:
            a, b = gather(), collectives.reduce_scatter([part], [full], 0.5)
        else:
            b, a = collectives.reduce_scatter([part], [full], 0.5), gather()
        finish(b)
        finish(a)
        assert part.tolist() == [0.5] * 10 and out.tolist() == [0.0] * 10 + [1.0] * 10


@ranks(2)
def test_groups_made_for_several_kinds_of_device_are_gloo_on_the_cpu(world: World) -> None:
    """A default group names no backend, and one for two kinds of device names both: both were taken for something else."""
    for backend in (None, "cpu:gloo", "gloo"):
        group = dist.new_group([0, 1], backend=backend)
        assert isinstance(collectives_for(group, torch.device("cpu")), GlooCollectives), backend


@ranks(9)
def test_a_maximum_over_many_ranks_takes_each_of_them_as_many_messages_as_the_logarithm(world: World) -> None:
    collectives = GlooCollectives(dist.group.WORLD)
    exchange, sent = collectives._exchange, []

    def counted(tag: int, receives: Any, sends: Any) -> Any:
        sent.extend((tag, peer) for _, peer in sends)
        return exchange(tag, receives, sends)

    collectives._exchange = counted
    try:
        for call in range(3):
            collectives.tag.hash = 5 + call
            message = torch.tensor([world.rank, -world.rank, (world.rank + call) % 9, 7 if world.rank == call else 0])
            finish(collectives.all_reduce_max(message))
            assert message.tolist() == [8, 0, 8, 7]
    finally:
        del collectives._exchange
    assert len(sent) == len(set(sent)) == 3 * 4
    assert {(peer - world.rank) % 9 for _, peer in sent} == {1, 2, 4, 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@ranks(2)
def test_sums_of_infinities_and_overflows_are_those_of_plain_addition(world: World, dtype: torch.dtype) -> None:
    """An infinity on one rank must not become NaN, which clipping treats in another way."""
    most = torch.finfo(dtype).max
    found = torch.tensor([[float("inf"), 1.0, -float("inf"), most, most], [1.0, -float("inf"), 2.0, most, -most]], dtype=dtype)
    for collectives in (GlooCollectives(dist.group.WORLD), CoalescedCollectives(dist.group.WORLD, stages=True)):
        out = torch.empty(5, dtype=dtype)
        finish(collectives.reduce_scatter([out], [found[world.rank].repeat(2)], 0.5))
        largest = float("inf") if out.itemsize == 2 else float(out[3])  # wider ones are halved before they are added
        assert torch.equal(out, torch.tensor([float("inf"), -float("inf"), -float("inf"), largest, 0.0], dtype=dtype))
