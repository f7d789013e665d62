"""Weights and buffers in step: found at wrap, repaired by a broadcast, averaged after forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from harness import World, ranks
from models import Stack, batch, shard_stack, square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import CommPolicy, StateError, fully_shard
from fullshard.comm.gloo import GlooCollectives
from fullshard.core.value_sync import digest


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


def text_of(error: type[Exception], fn: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


@pytest.mark.proves("16a")
@ranks(2, 4)
def test_ranks_built_with_different_seeds_are_found_at_wrap(world: World) -> None:
    """Elsewhere the sharded weight is a patchwork of several initialisations, or replicas train different models."""
    meshes = [world.mesh]
    if world.size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        torch.manual_seed(world.rank // 2 if mesh.ndim == 2 else world.rank)  # replicas differ, or all do
        block = Stack().blocks[0]
        before = copy.deepcopy(block.state_dict())
        text = text_of(ValueError, lambda block=block, mesh=mesh: fully_shard(block, mesh=mesh))
        assert "parameter 'up.weight' differs between " in text, text
        if world.size == 2:
            Texts().assertExpectedInline(
                text,
                """parameter 'up.weight' differs between rank 0 and rank 1: each rank would keep a shard of a different model. Seed all ranks equally before the model is built, or pass sync='broadcast' to take the values of the first rank, or sync='off' if the values are loaded later (FULLSHARD_SYNC=off in the environment does the same for a program that you cannot change).""",
            )
        assert type(block).__name__ == "Block"
        assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


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
        Texts().assertExpectedInline(
            text.replace("rank 1 and rank 3", "rank 0 and rank 2"),
            """Parameter 'weight' of unit 'Linear' differs between rank 0 and rank 2, which hold the same rows. Initialize it from one seed on all replicas, as fullshard.materialize() does, load it, or pass sync='broadcast' to fully_shard().""",
        )


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


class Buffers(nn.Module):
    """Of many dtypes; one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("other", self.one)
        self.register_buffer("large", torch.full((2,), 40000.0, dtype=torch.float16))
        self.register_buffer("eight", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("word", torch.ones(3, dtype=torch.uint16))
        self.register_buffer("negative", -torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one += 1
        return self.linear(x)


@pytest.mark.parametrize("how", ["mean", "broadcast"])
@ranks(2)
def test_buffers_of_any_dtype_and_with_two_names_are_shared(world: World, how: str) -> None:
    torch.manual_seed(0)
    made: list[Any] = []

    def collectives(group: Any) -> Any:
        made.append(group)
        return GlooCollectives(group)

    model = Buffers()
    fully_shard(model, mesh=world.mesh, sync="broadcast", buffers=how, comm_policy=CommPolicy(collectives=collectives))
    for number in range(1, 4):
        before = len(made)
        model(torch.ones(1, 2))
        assert model.one is model.other and model.one.tolist() == [number, number]
    assert len(made) == before, "collectives are made once, not in each forward"
    assert model.large.tolist() == [40000.0, 40000.0], "a mean, whose sum is larger than float16 can be"
    assert model.eight.float().tolist() == [1.0] * 3 and model.word.tolist() == [1] * 3
    if how == "broadcast":
        assert torch.signbit(model.negative), "bits arrive unchanged"


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
@pytest.mark.parametrize("how", ["local", "mean", "broadcast"])
@ranks(2, 3)
def test_running_statistics_of_batch_norms(world: World, how: str) -> None:
    """Each rank keeps its own, as elsewhere, or all have the mean, or those of the first rank, from the first step on."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=world.mesh, buffers=how)
    expected = [copy.deepcopy(plain) for _ in range(world.size)]
    for step in range(2):
        square(model(world.mine(batch(step)))).backward()
        for one, part in zip(expected, batch(step).chunk(world.size)):
            one(part)
        means = [one[1].running_mean for one in expected]
        want = {"local": means[world.rank], "mean": torch.stack(means).mean(0), "broadcast": means[0]}[how]
        torch.testing.assert_close(model[1].running_mean, want)
        if how != "local":
            for one in expected:
                one[1].running_mean.copy_(want)
        assert int(model[1].num_batches_tracked) == step + 1
    model.eval()
    before = model[1].running_mean.clone()
    with torch.no_grad():
        model(world.mine(batch(5)))
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.proves("16b")
@ranks(2, 3)
def test_ranks_that_build_different_models_are_told_what_each_has(world: World) -> None:
    """Elsewhere messages of different lengths meet, and one process is aborted."""
    other = nn.Linear(4, 4, bias=world.rank == 0)
    for how in ("check", "off", "broadcast"):
        text = text_of(ValueError, lambda how=how: fully_shard(other, mesh=world.mesh, sync=how))
        if world.size == 2:
            Texts().assertExpectedInline(
                text,
                """The ranks call fully_shard for different parameters: rank 0 has 2: 'weight' (4, 4) torch.float32; 'bias' (4,) torch.float32. rank 1 has 1: 'weight' (4, 4) torch.float32. Build the same model on all ranks.""",
            )
        assert "rank 0 has 2: 'weight' (4, 4) torch.float32; 'bias' (4,)" in text
    for odd in (nn.Linear(4, 4 + world.rank), nn.Linear(4, 4, dtype=torch.float64 if world.rank else None)):
        assert "call fully_shard for different parameters" in text_of(
            ValueError, lambda odd=odd: fully_shard(odd, mesh=world.mesh)
        )
    frozen = nn.Linear(4, 4)
    frozen.bias.requires_grad_(world.rank == 0)
    assert "'bias' (4,) torch.float32 frozen" in text_of(ValueError, lambda: fully_shard(frozen, mesh=world.mesh))


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
