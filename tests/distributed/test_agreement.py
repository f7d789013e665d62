"""Ranks that agree outside of a step: they compare, gather and fail together, on one axis and on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import World, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from fullshard.checks.collective_log import UnitName
from fullshard.core import Agreement
from fullshard.core.units import require_unit


def agreements(world: World) -> Iterator[Agreement]:
    """Yield agreements of all ranks: over shards, over shards and replicas, over no axis at all."""
    if world.size == 1:
        yield Agreement(None, [], UnitName(""), "test()")
    meshes = [world.mesh]
    if world.size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        yield require_unit(fully_shard(nn.Linear(3, 3), mesh=mesh, sync="off")).agreement("test()")


@ranks(1, 2, 3, 4)
def test_equal_contents_are_told_from_different_ones(world: World) -> None:
    for agreement in agreements(world):
        assert agreement.all_equal(b"") and agreement.all_equal(b"same" * 1000)
        for other in range(world.size):
            assert agreement.all_equal(b"one" if world.rank == other else b"two") is (world.size == 1)


@ranks(2, 4)
def test_rows_are_compared_between_the_ranks_that_have_them(world: World) -> None:
    """Row 0 is equal, row 1 is on the last rank only, row 2 on no rank, row 3 is equal where it is, and row 4 differs."""
    last = world.rank == world.size - 1
    rows = torch.tensor([[0, 255], [7, 7], [world.rank, 9], [3, 0 if world.rank else 5], [0, 1 + last]], dtype=torch.uint8)
    present = torch.tensor([1, last, 0, world.rank > 0, 1], dtype=torch.uint8)
    for agreement in agreements(world):
        assert agreement.first_unequal(rows, present) == 4
        assert agreement.first_unequal(rows[:4], present[:4]) is None
        assert agreement.first_unequal(rows) == 2


@ranks(1, 2, 3, 4)
def test_contents_of_all_ranks_are_gathered_in_the_order_of_ranks(world: World) -> None:
    def content(rank: int) -> bytes:
        return bytes(range(rank * 3)) * 7  # empty on the first rank

    for agreement in agreements(world):
        assert list(agreement.gather_bytes(content(world.rank)).items()) == [(r, content(r)) for r in range(world.size)]
        cut = agreement.gather_bytes(content(world.rank), at_most=5)
        assert cut == {rank: content(rank)[:5] for rank in range(world.size)}


@ranks(1, 2, 3, 4)
def test_the_first_rank_tells_its_bytes_and_integers(world: World) -> None:
    for agreement in agreements(world):
        assert agreement.first_rank_bytes(b"" if world.rank else b"first \x00\xff") == b"first \x00\xff"
        assert agreement.first_rank_bytes(b"more" * world.rank) == b""
        assert agreement.from_first_rank(torch.tensor([5 + world.rank, 1 << 62])).tolist() == [5, 1 << 62]


@ranks(1, 2, 3, 4)
def test_work_that_fails_on_some_ranks_raises_the_first_failure_on_all(world: World) -> None:
    for agreement in agreements(world):
        assert agreement.run(lambda: world.rank) == world.rank
        for first in range(world.size):
            for kind, raised in (
                (ValueError, ValueError),
                (KeyError, RuntimeError),
                (fullshard.StateError, fullshard.StateError),
            ):

                def work(first: int = first, kind: type[Exception] = kind) -> None:
                    if world.rank >= first:
                        raise kind(f"of rank {world.rank} \x1b") if kind is not KeyError or world.rank > first else KeyError

                with pytest.raises(raised) as caught:
                    agreement.run(work)
                assert type(caught.value) is raised
                assert str(caught.value) == ("KeyError" if kind is KeyError else f"of rank {first} \\x1b")
                assert isinstance(caught.value.__cause__, kind) is (world.rank >= first)


@ranks(4)
def test_agreement_costs_one_message_per_group(world: World) -> None:
    for agreement in agreements(world):
        beside = fully_shard(nn.Linear(3, 3), mesh=world.mesh, sync="off")
        with fullshard.counting(beside) as messages:
            agreement.all_equal(b"x")
            agreement.run(lambda: None)
            agreement.gather_bytes(b"x", at_most=1)
        assert [message.kind for message in messages] == ["talk"] * 3 * len(agreement.groups)
