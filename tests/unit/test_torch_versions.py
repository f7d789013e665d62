"""What differs between the versions of torch that fullshard runs on, where it does not need one of them to be seen."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard._torch import c10d
from fullshard.comm import backends
from fullshard.comm.coalesced import CoalescedCollectives


def test_flops_of_attention_are_those_of_its_products() -> None:
    """torch 2.11 counts none with fewer heads of keys than of queries; those of the CPU nobody counts before 2.15."""
    query, key, value = (torch.empty(2, heads, length, dim) for heads, length, dim in ((8, 16, 4), (2, 32, 4), (2, 32, 6)))
    scores = 2 * 8 * 16 * 32
    aten: Any = torch.ops.aten
    for name in ("flash_attention", "efficient_attention", "flash_attention_for_cpu"):
        forward, backward = (getattr(aten, f"_scaled_dot_product_{name}{end}").default for end in ("", "_backward"))
        assert _torch.count_flops(forward, (query, key, value), {}, ()) == 2 * scores * (4 + 6)
        grad = torch.empty(2, 8, 16, 6)
        assert _torch.count_flops(backward, (grad, query, key, value), {}, ()) == 2 * scores * (4 + 6 + 6 + 4 + 4)


def test_groups_of_our_own_have_our_names_and_are_not_split_from_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of torch count the groups of the rank, which differ; a split needs all ranks of the default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cuda:0")  # as init_process_group(device_id=) does
        monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda *args: pytest.fail("asked for a split"))
        made = _torch.new_group("shards of one model", [3, 1])
        assert world.bound_device_id == torch.device("cuda:0")
        assert dist.get_process_group_ranks(made) == [3, 1] and made.rank() == 1 and _torch.is_alive(made)
        name = made.group_name
        dist.destroy_process_group(made)
        world.bound_device_id = None
        dist.new_group([0, 1])
        assert _torch.new_group("shards of one model", [3, 1]).group_name == name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "averages"),
    [("nccl", True), ("nccl2", True), ("nccl-legacy", True), ("nccl-lazy", True), ("xccl", True), ("mpi", False)],
)
def test_backends_average_or_are_asked_for_sums(monkeypatch: pytest.MonkeyPatch, name: str, averages: bool) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        monkeypatch.setattr(_torch, "backend_name", lambda group, device: name)
        made = backends.collectives_for(dist.group.WORLD, torch.device("cpu"))
        assert isinstance(made, CoalescedCollectives) and made._averages is averages
    finally:
        dist.destroy_process_group()


BOUND = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import fullshard
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cpu:0"))
torch.manual_seed(0)
layer = fullshard.fully_shard(nn.Linear(5, 3), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
layer.set_separate_reduce_scatter_group()
layer(torch.ones(2, 5)).sum().backward()
assert layer.weight.grad.full_tensor().sum() == 30
"""


@pytest.mark.skipif(_torch.VERSION < (2, 15), reason="before torch 2.15 gloo takes no device_id")
def test_a_default_group_that_is_bound_to_a_device_trains(tmp_path: Any) -> None:
    commands = [[sys.executable, "-c", BOUND, str(rank), str(tmp_path / "store")] for rank in range(2)]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for job in jobs:
        _, err = job.communicate(timeout=120)
        assert job.returncode == 0, err


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy", "nccl2"])
def test_every_implementation_of_nccl_is_asked_for_memory_of_messages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where its device has none for lack of multicast, ordinary memory is taken, and that is said."""

    class Backend:
        def supports_tensor_alloc(self, device: torch.device) -> bool:
            return False

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    monkeypatch.setattr(c10d, "backend_name", lambda group, device: name)
    with pytest.warns(UserWarning, match="allocates no memory for messages on cpu"):
        assert _torch.process_group_memory(Group(), torch.device("cpu")) is torch.empty  # type: ignore[arg-type]
    monkeypatch.setattr(c10d, "backend_name", lambda group, device: "gloo")
    with pytest.raises(ValueError, match="the gloo backend allocates no memory for messages"):
        _torch.process_group_memory(Group(), torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "said"), [((2, 15), False), ((2, 16), True), ((3, 0), True)])
def test_a_torch_that_nobody_tried_is_said_once(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], said: bool) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fullshard import fully_shard

    monkeypatch.setattr(_torch, "VERSION", version)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(torch.nn.Linear(4, 4), sync="off")
        assert (
            any("is newer than the torch that this version of fullshard was tested with" in str(w.message) for w in caught)
            is said
        )
    finally:
        dist.destroy_process_group()
