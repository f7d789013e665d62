"""Ranks that begin with different weights: found in the first forward, or repaired by a broadcast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from models import Stack, batch, shard_stack, square
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import StateError, fully_shard
from fullshard.optim.copies import digest


def text_of(error: type[Exception], fn: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.proves("16a")
@ranks(2, 4)
def test_ranks_built_with_different_seeds_are_found_in_the_first_forward(world: World) -> None:
    """Elsewhere the sharded weight is a patchwork of several initialisations, or replicas train different models."""
    for mesh in [world.mesh] if world.size == 2 else [world.mesh, hybrid()]:
        torch.manual_seed(world.rank // 2 if mesh.ndim == 2 else world.rank)  # replicas differ, or all do
        model = Stack()
        for turn in range(world.size):  # one rank after the other: fully_shard() needs no other rank
            if turn == world.rank:
                shard_stack(model, mesh)
            dist.barrier()
        for _ in range(2):  # and again in the next one
            text = text_of(StateError, lambda model=model: model(batch(0)))
            assert "differs between " in text and "sync='broadcast'" in text, text
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "no forward is left open"


@ranks(4)
def test_one_collective_per_process_group_compares_a_whole_model(world: World) -> None:
    for mesh, messages in (world.mesh, 1), (hybrid(), 6):  # over replicas and over shards; then what was found, to all
        model = shard_stack(Stack(), mesh)
        for expected in (messages, 0):
            with fullshard.counting(model) as traffic, torch.no_grad():
                model(batch(0))
            assert len([message for message in traffic if message.kind == "talk"]) == expected


def from_rank_0(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    full = Stack().state_dict() if world.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)


def from_a_full_checkpoint(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    torch.manual_seed(0)
    model.load_state_dict(Stack().state_dict())


def from_assigned_tensors(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    torch.manual_seed(0)
    model.load_state_dict(Stack().state_dict(), assign=True)


def from_a_distributed_checkpoint(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    torch.manual_seed(0)
    saved = shard_stack(Stack(), mesh)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=path)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])


def from_shards(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(0.5)


def from_the_first_replica(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach().to_local(), group_src=0, group=mesh.get_group(0))


def with_full_params(model: nn.Module, mesh: DeviceMesh, world: World, path: str) -> None:
    torch.manual_seed(0)
    with fullshard.full_params(model):
        for parameter in model.parameters():
            nn.init.normal_(parameter)


PROGRAMS = [
    from_rank_0,
    from_a_full_checkpoint,
    from_assigned_tensors,
    from_a_distributed_checkpoint,
    from_shards,
    from_the_first_replica,
    with_full_params,
]


@pytest.mark.rotates(4)
@pytest.mark.parametrize("program", PROGRAMS)
@ranks(2, 4)
def test_programs_that_shard_different_values_and_then_write_them_run(world: World, program: Callable[..., None]) -> None:
    """They run with FSDP2. A check inside of fully_shard() raised before they came to it."""
    for mesh in [world.mesh] if world.size == 2 else [world.mesh, hybrid()]:
        if mesh.ndim == 1 and program is from_the_first_replica:
            continue
        for zeros in (False, True):
            torch.manual_seed(world.rank)
            model = Stack()
            if zeros and world.rank:
                for parameter in model.parameters():
                    nn.init.zeros_(parameter)
            shard_stack(model, mesh)
            torch.manual_seed(0)
            program(model, mesh, world, world.folder(f"{program.__name__}-{mesh.ndim}-{zeros}"))
            outputs = model(batch(0))
            square(outputs).backward()
            every = [torch.empty_like(outputs) for _ in range(world.size)]
            dist.all_gather(every, outputs.detach())
            assert all(torch.equal(one, every[0]) for one in every)


@ranks(2)
def test_only_what_was_not_written_is_compared(world: World) -> None:
    """A step over other parameters, or groups that are built again, write nothing; nor does a read."""
    torch.manual_seed(world.rank)
    model = shard_stack(Stack(), world.mesh)
    with torch.no_grad():
        model.inp.weight.mul_(2)
    model.set_keep_unsharded_storage(True)
    model.set_separate_reduce_scatter_group(True)
    model.state_dict()
    for parameter in model.parameters():
        parameter.full_tensor()
    text = text_of(StateError, lambda: model(batch(0)))
    assert "Parameter 'inp.bias' of unit 'Stack' differs between rank 0 and rank 1" in text, text
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    model(batch(0))


@ranks(4)
def test_what_tensor_parallelism_replicates_is_compared(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placed in (False, True):
        torch.manual_seed(mesh["tp"].get_local_rank())
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(4, 3))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        if placed:  # what each rank has, as a replica
            head = model[2]
            for name, parameter in list(head.named_parameters()):
                replica = DTensor.from_local(parameter.detach(), mesh["tp"], [Replicate()], run_check=False)
                head.register_parameter(name, nn.Parameter(replica))
        fully_shard(model, mesh=mesh["dp"])
        if placed:
            text = text_of(StateError, lambda model=model: model(torch.ones(2, 4)))
            assert "Parameter '2.weight' of unit 'Sequential' differs between rank" in text, text
        else:  # a plain weight may be one of each rank on purpose
            with pytest.warns(UserWarning, match="Parameter '2.weight' of unit 'Sequential' differs between rank"):
                model(torch.ones(2, 4))


@pytest.mark.proves("16a")
@ranks(2, 4)
def test_a_broadcast_repairs_it_and_off_lets_it_be(world: World) -> None:
    meshes = [world.mesh]
    if world.size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        torch.manual_seed(0)
        first = Stack()
        torch.manual_seed(world.rank)
        model = Stack()
        model.register_buffer("noise", torch.randn(3))
        shard_stack(model, mesh, sync="broadcast")
        for name, parameter in first.named_parameters():
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
        torch.manual_seed(0)
        Stack()
        assert torch.equal(model.noise, torch.randn(3))
    torch.manual_seed(world.rank)
    fully_shard(nn.Linear(4, 4), mesh=world.mesh, sync="off")


@pytest.mark.proves("16c")
@ranks(4)
def test_replicas_that_were_initialised_after_sharding_are_compared_at_the_first_forward(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for how in ("check", "broadcast"):
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh, sync=how)
        model.to_empty(device=mesh.device_type)
        torch.manual_seed(world.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_()
        if how == "broadcast":
            model(torch.ones(1, 4))
            continue
        text = text_of(StateError, lambda model=model: model(torch.ones(1, 4)))
        assert "Parameter 'weight' of unit 'Linear' differs between rank" in text and "which hold the same rows" in text, text


@ranks(2)
def test_replicas_that_differ_are_found_at_each_forward(world: World) -> None:
    """The first error left the mark of unchecked memory off, so a second forward trained with two models."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        model.weight.to_local().fill_(world.rank + 1.0)
    for _ in range(2):
        with pytest.raises(StateError, match="differs between rank 0 and rank 1, which hold the same rows"):
            model(torch.ones(1, 2))


@pytest.mark.parametrize("how", ["prefetched", "unsharded"])
@ranks(2)
def test_a_broadcast_reaches_parameters_that_are_gathered_already(world: World, how: str) -> None:
    """A collective moves no version counter, so units that were gathered from the shards of before looked current."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, sync="broadcast")
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(world.rank + 1.0)
    if how == "prefetched":
        model[0].set_modules_to_forward_prefetch([model[1]])
    else:
        model[1].unshard()
    assert model(torch.ones(1, 2)).tolist() == [[4.0, 4.0]]


@ranks(1)
def test_any_changed_byte_changes_the_digest(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
        for numel in (1, 3, 8, 1001, 20_000):
            tensor = torch.zeros(numel, dtype=dtype)
            for index in {0, numel // 2, numel - 1}:
                other = tensor.clone()
                other[index] = 1
                assert int(digest(other)) != int(digest(tensor)), (dtype, numel, index)
    swapped = torch.arange(10.0)
    assert int(digest(swapped)) != int(digest(swapped.flip(0))), "the order counts, too"


@pytest.mark.proves("39a")
@ranks(2)
def test_each_rank_keeps_the_running_statistics_of_its_batches(world: World) -> None:
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    model = fully_shard(copy.deepcopy(plain), mesh=world.mesh)
    model(world.mine(batch(0)))
    plain(world.mine(batch(0)))
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)


@pytest.mark.proves("16b")
@ranks(2, 3)
def test_ranks_that_build_different_models_are_told_what_each_has(world: World) -> None:
    """Elsewhere messages of different lengths meet, and one process is aborted."""
    frozen = nn.Linear(4, 4)
    frozen.bias.requires_grad_(world.rank == 0)
    odd = {
        "'weight' (4, 4) torch.float32 of unit": nn.Linear(4, 4 + world.rank),
        "'weight' (4, 4) torch.float64": nn.Linear(4, 4, dtype=torch.float64 if world.rank else None),
        "'bias' (4,) torch.float32 frozen": frozen,
    }
    for text, module in odd.items():
        fully_shard(module, mesh=world.mesh)
        found = text_of(StateError, lambda module=module: module(torch.ones(1, 4)))
        assert "The ranks sharded different models: rank 0 has '" in found and text in found, found


@pytest.mark.proves("16b")
@pytest.mark.parametrize("how", ["check", "off"])
@ranks(2, 3)
def test_ranks_with_different_numbers_of_parameters_diverge(world: World, how: str) -> None:
    module = fully_shard(nn.Linear(4, 4, bias=world.rank == 0), mesh=world.mesh, sync=how)
    found = text_of(StateError, lambda: module(torch.ones(1, 4)))
    assert "Ranks diverged" in found, found
    if how == "check":
        assert "rank 0 ran comparison of 2 parameters of 'Linear'" in found and "ran comparison of 1 parameters" in found, found


@ranks(2)
def test_a_scalar_that_every_rank_holds_is_compared_too(world: World) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with torch.device("meta"):
        model = Scaled()
    fully_shard(model, mesh=world.mesh)
    model.to_empty(device=world.mesh.device_type)
    with torch.no_grad():
        model.scale.to_local().fill_(world.rank + 1.0)
    text = text_of(StateError, lambda: model(torch.ones(1)))
    assert "Parameter 'scale' of unit 'Scaled' differs between rank 0 and rank 1" in text
