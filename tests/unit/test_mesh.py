"""Axes of meshes and their process groups, on torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import DataParallelMeshDims
from fullshard.core.mesh import group_of, replicated_axis, resolve_mesh
from fullshard.ext.two_hops import over_all_ranks


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_hybrid_meshes_that_share_their_shard_dim_have_groups_of_their_own(eight_ranks: None) -> None:
    """The first mesh's group was found by the shard group alone, so scalars of the second were averaged over other ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "shard", "b"))
    axes = [
        resolve_mesh(mesh[names], DataParallelMeshDims(shard="shard", replicate=replicate))
        for names, replicate in ((("a", "shard"), "a"), (("shard", "b"), "b"))
    ]
    assert axes[0].group is axes[1].group
    everywhere = [replicated_axis(axis).replicas for axis in axes]
    assert [sorted(dist.get_process_group_ranks(one.group)) for one in everywhere if one] == [[0, 2, 4, 6], [0, 1, 2, 3]]
    shards = [over_all_ranks(axis).group for axis in axes]
    assert [sorted(dist.get_process_group_ranks(one)) for one in shards] == [[0, 2, 4, 6], [0, 1, 2, 3]]


def test_a_group_of_other_ranks_beside_the_same_owner_is_another_one(eight_ranks: None) -> None:
    owner = dist.new_group([0, 1])
    found = [group_of(ranks, owner) for ranks in ((0, 2), (0, 3), (0, 2))]
    assert [dist.get_process_group_ranks(one) for one in found] == [[0, 2], [0, 3], [0, 2]]
    assert found[0] is found[2]
