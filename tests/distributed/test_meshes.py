"""More than one axis: hybrid sharding, a smaller group between forward and backward, tensor parallelism, experts, any dim."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import (
    ROWS,
    Stack,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    batch,
    full,
    rounding,
    shard_stack,
    share_grads,
    square,
    train_both,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fullshard
from fullshard import (
    ZERO1,
    ZERO2,
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    StateSharding,
    errors,
    fully_shard,
)


def kinds(messages: list[fullshard.Message]) -> Counter[Any]:
    return Counter((message.kind, message.ranks) for message in messages)


def hybrid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


# --- hybrid sharding ---------------------------------------------------------------------------------------------------


@pytest.mark.rotates(3)
@pytest.mark.parametrize("reshard", [True, False, None])
@ranks(4)
def test_hybrid_sharding_equals_the_unsharded_model(world: World, reshard: bool | None) -> None:
    for sizes in ((2, 2), (4, 1), (1, 4)):
        mesh = hybrid(*sizes)
        train_both(world, Stack(), lambda m: shard_stack(m, mesh, reshard_after_forward=reshard))


@ranks(4)
def test_a_hybrid_mesh_needs_no_names(world: World) -> None:
    mesh = DeviceMesh(world.mesh.device_type, torch.arange(4).view(2, 2))
    sharded, _ = train_both(world, Stack(), lambda m: shard_stack(m, mesh), steps=2)
    weight = sharded.inp.weight
    assert weight.placements == (Replicate(), Shard(0)) and weight.grad is None


def named(*names: str, sizes: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


@pytest.mark.proves("29c")
@ranks(4)
def test_names_of_axes_that_contradict_replicate_and_shard_are_warned_of_on_one_rank(world: World) -> None:
    """("dp_shard", "cp") holds each shard on all ranks of "dp_shard": sharded over the context-parallel ranks alone."""
    contradict = [("dp_shard", "cp"), ("DP-Shard", "tp"), ("fsdp", "inner"), ("cp", "ddp"), ("dp", "replicas")]
    firsts = "replicate", "ddp", "outer", "rep", "replicate_shards", "unsharded", "no_shard"
    for names in [*contradict, *((first, "dp_shard_cp") for first in firsts), ("dp", "cp"), ("outer", "inner")]:
        errors._SAID.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fully_shard(nn.Linear(5, 3), mesh=named(*names))
        assert model.weight.placements == (Replicate(), Shard(0))
        said = [str(one.message) for one in caught if "is taken as (replicate, shard)" in str(one.message)]
        assert len(said) == (names in contradict and world.rank == 0), names
        assert all(str(names) in line for line in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(nn.Linear(5, 3), mesh=named("dp_shard", "cp", sizes=(1, 4)))  # one replica: sharded over both, as was meant


@pytest.mark.proves("29d")
@ranks(4)
def test_ranks_along_an_axis_to_shard_over_ascend(world: World) -> None:
    """torch sorts the ranks of process groups, but checkpoints have the order of the mesh: theirs had permuted rows."""
    both = ("replicate", "shard")
    for grid, names in (([3, 2, 1, 0], ("shard",)), ([[0, 1], [3, 2]], both), ([[2, 1], [0, 3]], both)):
        model = nn.Linear(5, 3)
        with pytest.raises(ValueError, match="^Expected ascending ranks along the axis 'shard' of the mesh"):
            fully_shard(model, mesh=DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=names))
        assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
    mesh = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=both)
    train_both(world, Stack(), lambda m: shard_stack(m, mesh), steps=2)
    with pytest.raises(ValueError, match="^Expected ascending ranks along the axis 'replicate' of the mesh"):
        fully_shard(nn.Linear(5, 3), mesh=mesh, states=fullshard.HFSDP)


@pytest.mark.proves("29c")
@ranks(4)
def test_what_the_warning_of_misnamed_axes_advises_works(world: World) -> None:
    for mesh in (named("dp_shard", "cp"), named("dp_shard", "cp", "tp", sizes=(2, 2, 1))["dp_shard", "cp"]):
        flat = mesh._flatten("dp_shard_cp")
        sharded, _ = train_both(world, Stack(), lambda m: shard_stack(m, flat), steps=2)
        assert sharded.inp.weight.placements == (Shard(0),) and sharded.inp.weight.device_mesh.size() == 4
    sharded, _ = train_both(world, Stack(), lambda m: shard_stack(m, named("replicate", "cp")), steps=2)
    assert sharded.inp.weight.placements == (Replicate(), Shard(0))
    sharded, _ = train_both(world, Stack(), lambda m: shard_stack(m, named("dp_replicate", "dp_shard")), steps=2)
    assert sharded.inp.weight.placements == (Replicate(), Shard(0))
    # On a full mesh that parameters are DTensors on already, the words are those of the caller: names of axes are not looked at.
    mesh = named("dp_shard", "cp")
    for dims in (DataParallelMeshDims(shard=("dp_shard", "cp")), DataParallelMeshDims(shard="cp", replicate="dp_shard")):
        model = nn.Linear(8, 7)
        whole = copy.deepcopy(model)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()] * 2)))
        assert_same_parameters(fully_shard(model, mesh=mesh, dp_mesh_dims=dims), whole)


@pytest.mark.parametrize("mp", ["fp32", "bf16", "fp16"])
@ranks(4)
def test_replicas_hold_the_same_gradients_in_every_dtype(world: World, mp: str) -> None:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mp]
    model = Stack()
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    tolerance = rounding(dtype or torch.float32)
    mesh = hybrid(2, 2)
    sharded = shard_stack(copy.deepcopy(model), mesh, mp_policy=policy)
    square(sharded(world.mine(batch(0))).float()).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model, tolerance)
    for parameter in sharded.parameters():
        local = parameter.grad.to_local()
        first = local.clone()
        torch.distributed.broadcast(first, src=world.rank % 2, group=mesh.get_group("replicate"))
        assert torch.equal(local, first), "replicas agree bit for bit"


@ranks(4)
def test_traffic_of_hybrid_sharding_is_one_more_sum_per_unit(world: World) -> None:
    model = shard_stack(Stack(depth=3), hybrid(2, 2), reshard_after_forward=True)
    for step in range(3):
        with fullshard.counting(model) as messages:
            square(model(world.mine(batch(step)))).backward()
        messages = [m for m in messages if m.kind != "talk"]  # the first forward compares the ranks' values
        assert kinds(messages) == {
            ("all_gather", 2): 8,
            ("reduce_scatter", 2): 4,
            ("all_reduce", 2): 4,
            ("heartbeat", 2): 2,
        }
    scattered = sum(m.nbytes for m in messages if m.kind == "reduce_scatter")
    assert sum(m.nbytes for m in messages if m.kind == "all_reduce") * 2 == scattered, "replicas sum shards, not full gradients"


@ranks(4)
def test_the_sum_over_replicas_can_wait_for_the_last_microbatch(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), hybrid(2, 2))
    for step in range(3):
        last = step == 2
        sharded.set_requires_all_reduce(last)
        with fullshard.counting(sharded) as messages:
            square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert kinds(messages)[("reduce_scatter", 2)] == 4
        assert kinds(messages)[("all_reduce", 2)] == (4 if last else 0)
        if not last:
            assert all(p.grad is None for p in sharded.parameters())
            with pytest.raises(fullshard.StateError, match="reduced over shards, but not over replicas"):
                torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    assert_same_grads(sharded, model)


@ranks(4)
def test_only_other_replicas_used_a_parameter(world: World) -> None:
    """The heartbeat reaches all ranks of a hybrid mesh."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor, use_b: bool) -> Tensor:
            return self.a(x) + self.b(x) if use_b else self.a(x)

    model = Optional()
    sharded = fully_shard(copy.deepcopy(model), mesh=hybrid(2, 2))
    square(sharded(world.mine(batch(0)), world.rank == 3)).backward()
    for rank in range(4):
        (square(model(batch(0).chunk(4)[rank], rank == 3)) / 4).backward()
    assert_same_grads(sharded, model)


# --- a smaller group keeps the parameters between forward and backward ---------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_backward_gathers_among_two_of_four(world: World, dim: int) -> None:
    placement = (lambda p: Shard(p.ndim - 1)) if dim else None
    for direct in (0, float("inf")):
        options: dict[str, Any] = {
            "reshard_after_forward": 2,
            "shard_placement_fn": placement,
            "comm_policy": CommPolicy(direct_min_bytes=direct),
        }
        sharded, _ = train_both(world, Stack(), lambda m: shard_stack(m, world.mesh, **options), steps=3)
        with fullshard.counting(sharded) as messages:
            square(sharded(world.mine(batch(0)))).backward()
        assert kinds(messages) == {
            ("all_gather", 4): 4,
            ("all_gather", 2): 4,
            ("reduce_scatter", 4): 4,
            ("heartbeat", 4): 1,
        }


@ranks(4)
def test_parameters_are_right_while_a_smaller_group_keeps_them(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, reshard_after_forward=2)
    loss = square(sharded(world.mine(batch(0))))
    assert_same_parameters(sharded, model)
    with torch.no_grad():
        for p in (*sharded.parameters(), *model.parameters()):
            p.mul_(1.0)  # written: what the smaller group kept is not used
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@ranks(4)
def test_every_legal_factor(world: World) -> None:
    for mesh in (world.mesh, hybrid(2, 2)):
        ranks_ = mesh.size(mesh.ndim - 1)
        for factor in (1, 2, 4):
            if ranks_ % factor == 0:
                train_both(world, Stack(), lambda m: shard_stack(m, mesh, reshard_after_forward=factor), steps=2)
    sharded = shard_stack(Stack(), world.mesh)
    sharded.set_reshard_after_forward(2)
    with fullshard.counting(sharded) as messages:
        square(sharded(world.mine(batch(0)))).backward()
    assert kinds(messages)[("all_gather", 2)] == 4


# --- any dim -----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    "mp", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]
)
@ranks(1, 2, 3, 4)
def test_parameters_cut_along_their_last_dim_even_or_not(world: World, mp: MixedPrecisionPolicy) -> None:
    tolerance = rounding(mp.param_dtype or torch.float32)
    for place in (lambda p: Shard(-1), lambda p: Shard(1) if p.ndim > 1 else None):
        sharded, plain = train_both(
            world,
            Stack(),
            lambda m: shard_stack(m, world.mesh, shard_placement_fn=place, mp_policy=mp),
            steps=3,
            tolerance=tolerance,
            optimizer=torch.optim.SGD,
            loss=lambda y: square(y.float()),
        )
        weight = sharded.blocks[0].up.weight
        assert weight.placements == (Shard(1),)
        assert sum(c.shape[1] for c in plain.blocks[0].up.weight.chunk(world.size, 1)) == 7
        assert weight.to_local().is_contiguous()


@ranks(2, 3)
def test_a_kernel_cut_along_a_middle_dim(world: World) -> None:
    model = nn.Conv2d(5, 4, 3)
    place = lambda p: Shard(2) if p.ndim == 4 else None
    images = lambda step: batch(step, 5, 8, 8)
    train_both(world, model, lambda m: fully_shard(m, mesh=world.mesh, shard_placement_fn=place), inputs=images)


# --- tensor parallelism ------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, depth: int = 2, dim: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Mlp(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallel(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train_parallel(
    world: World,
    mesh: DeviceMesh,
    dp: str | tuple[str, ...],
    tolerance: float | None = None,
    steps: int = 4,
    place: Callable[[nn.Parameter], Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    data = mesh[dp]
    shards = data.size()
    coordinate = data.get_coordinate()
    index = coordinate[0] if data.ndim == 1 else coordinate[0] * data.size(1) + coordinate[1]
    model = Tower()
    sharded = parallel(copy.deepcopy(model), mesh["tp"])
    shard_stack(sharded, data, shard_placement_fn=place, **options)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (sharded, model))
    for step in range(steps):
        square(sharded(batch(step).chunk(shards)[index])).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model, tolerance)
        share_grads(sharded, model)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)
    return sharded, model


@pytest.mark.rotates(2)
@pytest.mark.parametrize("states", [ZERO1, ZERO2], ids=str)
@ranks(4)
def test_levels_of_zero_over_tensor_parallel_parameters(world: World, states: StateSharding) -> None:
    train_parallel(world, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "dp", states=states)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    train_parallel(world, mesh, ("replicate", "shard"), states=states)


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_sharded_over_tensor_parallel_parameters(world: World, dim: int) -> None:
    """`up.weight` is cut by tensor parallelism along dim 0, `down.weight` along dim 1: we cut along the same and the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = None if dim == 0 else (lambda p: Shard(1) if p.ndim == 2 else None)
    sharded, model = train_parallel(world, mesh, "dp", place=place)
    placements = {name: p.placements for name, p in sharded.blocks[0].named_parameters()}
    strided = placements["up.weight" if dim == 0 else "down.weight"][0]
    assert type(strided).__name__ == "_StridedShard" and strided.dim == dim and strided.split_factor == 2
    assert placements["down.weight" if dim == 0 else "up.weight"] == (Shard(dim), Shard(1 - dim))
    for name, value in sharded.state_dict().items():
        assert_near(value.full_tensor() if isinstance(value, DTensor) else value, model.state_dict()[name], name)
    with fullshard.counting(sharded) as messages:
        square(sharded(batch(0)[:6])).backward()
    assert kinds(messages)[("reduce_scatter", 2)] == 3 and kinds(messages)[("all_gather", 2)] == 5


@ranks(4)
def test_tensor_parallel_with_bf16_and_a_full_state_dict(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Tower()
    sharded = shard_stack(parallel(copy.deepcopy(model), mesh["tp"]), mesh["dp"])
    other = Tower()
    sharded.load_state_dict(other.state_dict())
    assert_same_parameters(sharded, other)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    low = shard_stack(parallel(copy.deepcopy(model), mesh["tp"]), mesh["dp"], mp_policy=policy)
    square(low(batch(0).chunk(2)[mesh.get_local_rank("dp")]).float()).backward()
    square(model(batch(0))).backward()
    assert_same_grads(low, model, rounding(torch.bfloat16))


class Sequence(nn.Module):
    """Blocks on sequences: the norm runs on a part of each sequence, and its gradient is a sum over tensor parallelism."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 16)
        self.down = nn.Linear(16, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@ranks(4)
def test_sequence_parallel_norms_have_the_whole_gradient(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Sequence(), Sequence())
    sharded = copy.deepcopy(model)
    for block in sharded:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    for step in range(3):
        x = batch(step, 4, 8)
        mine = x.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")]
        out = DTensor.from_local(sharded(mine), mesh["tp"], [Shard(1)]).full_tensor()
        square(out).backward()
        square(model(x)).backward()
        assert_same_grads(sharded, model)


@ranks(4)
def test_three_axes_hybrid_and_tensor_parallel(world: World) -> None:
    for sizes in ((2, 1, 2), (1, 2, 2), (2, 2, 1)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
        sharded, _ = train_parallel(world, mesh, ("replicate", "shard"), steps=2)
        assert sharded.blocks[0].up.weight.device_mesh.ndim == 3


@pytest.mark.proves("13a")
@ranks(4)
def test_clipping_counts_each_element_once_whatever_is_replicated(world: World) -> None:
    for names, sizes in ((("dp",), (2, 2)), (("replicate", "shard"), (2, 1, 2))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=(*names, "tp"))
        data = mesh[names if len(names) > 1 else names[0]]
        model = Tower()
        sharded = shard_stack(parallel(copy.deepcopy(model), mesh["tp"]), data)
        square(sharded(batch(0))).backward()
        square(model(batch(0))).backward()
        for norm in (2.0, 1.0, float("inf")):
            ours = fullshard.clip_grad_norm_(sharded.parameters(), 0.01, norm)
            theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm)
            assert_near(ours, theirs, f"norm {norm}")
            assert_same_grads(sharded, model)


@pytest.mark.proves("13c")
@ranks(4)
def test_gradients_that_differ_between_ranks_outside_of_their_mesh_are_not_clipped(world: World) -> None:
    """Each group of experts got a norm of its own, so the rows of one dense weight were scaled differently, silently."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    every, ep = mesh["edp", "ep"]._flatten("dp"), mesh["ep"].get_local_rank()
    cases: list[tuple[str, float, str]] = [
        ("expert", 2.0 * ep, "'weight' of unit 'Linear'"),
        ("adapter", float(world.rank == 3), "a plain parameter"),
        ("expert", 1e-6 * ep, ""),
        ("adapter", 1e-6 * ep, ""),
    ]
    for name, difference, told in cases:
        model = nn.ModuleDict({one: nn.Linear(2, 2, bias=False) for one in ("dense", "expert", "adapter")})
        fully_shard(model["expert"], mesh=mesh["edp"], sync="off")
        fully_shard(model["dense"], mesh=every, sync="off")
        dense, beside = model["dense"].weight, model[name].weight
        dense.grad, beside.grad = torch.full_like(dense.detach(), 8.0), torch.full_like(beside.detach(), 1.0 + difference)
        if told:
            with pytest.raises(fullshard.StateError, match=f"{told}.* differs between rank 0 and"):
                fullshard.clip_grad_norm_([dense, beside], 1.0)
            assert torch.equal(dense.grad.to_local(), torch.full_like(dense.grad.to_local(), 8.0))
        else:
            norm = fullshard.clip_grad_norm_([dense, beside], 1.0)
            assert_near(norm, torch.tensor((4 * 64.0 + 4) ** 0.5), "norm")


@ranks(4)
def test_named_axes_of_one_full_mesh(world: World) -> None:
    """Every parameter is a DTensor on the whole mesh; the data-parallel axes are named."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dims, where in ((DataParallelMeshDims(shard="dp"), "shard"), (DataParallelMeshDims(replicate="dp"), "replicate")):
        model = Mlp()
        sharded = copy.deepcopy(model)
        cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
        for name, parameter in list(sharded.named_parameters()):
            owner = sharded.get_submodule(name.rpartition(".")[0])
            placed = distribute_tensor(parameter.detach(), mesh, [Replicate(), cuts.get(name, Replicate())])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(placed))
        fully_shard(sharded, mesh=mesh, dp_mesh_dims=dims)
        x = batch(0, 8)
        data = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        out = sharded(data)
        sharded.set_gradient_divide_factor(1.0)  # the loss of a DTensor is a mean over the whole batch already
        out.square().mean().backward()
        square(model(x)).backward()
        assert_same_grads(sharded, model)
        placement = sharded.up.weight.placements[0]
        assert type(placement).__name__ == ("_StridedShard" if where == "shard" else "Replicate")
        assert_same_parameters(sharded, model)


@ranks(4)
def test_several_named_axes_are_flattened_into_one(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
    model = nn.Linear(8, 7)
    sharded = copy.deepcopy(model)
    for name, parameter in list(sharded.named_parameters()):
        setattr(sharded, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()] * 3)))
    fully_shard(sharded, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
    assert sharded.weight.device_mesh.ndim == 2 and sharded.weight.placements == (Shard(0), Replicate())
    assert_same_parameters(sharded, model)
    with pytest.raises(ValueError, match="are not adjacent in the mesh axes"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "tp")))
    with pytest.raises(ValueError, match=r"got parameter 'weight' on no mesh \(a plain tensor\)"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


# --- experts on a mesh of their own --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each rank of the expert axis holds other experts; tokens are not moved here, each rank runs its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 8)
        self.experts = nn.Parameter(torch.randn(count, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eij->bej", self.dense(x), self.experts).sum(1)


@pytest.mark.proves("14a")
@ranks(4)
def test_experts_lie_on_a_mesh_of_their_own_beside_dense_parameters(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    whole = mesh[("efsdp", "ep")]._flatten("dp")
    model = Experts(4)
    mine = copy.deepcopy(model)
    rank = mesh.get_local_rank("ep")
    mine.experts = nn.Parameter(model.experts.detach().chunk(2)[rank].clone())
    place = lambda p: ShardPlacementResult(Shard(1), mesh["efsdp"]) if p is mine.experts else Shard(0)
    fully_shard(mine, mesh=whole, shard_placement_fn=place)
    assert mine.experts.device_mesh == mesh["efsdp"] and mine.experts.placements == (Shard(1),)
    with fullshard.counting(mine) as messages:
        square(mine(batch(0).chunk(4)[world.rank])).backward()
    assert kinds([one for one in messages if one.kind != "talk"]) == {
        ("all_gather", 4): 1,
        ("all_gather", 2): 1,
        ("reduce_scatter", 4): 1,
        ("reduce_scatter", 2): 1,
        ("heartbeat", 4): 1,
        ("heartbeat", 2): 1,
    }
    plain = [copy.deepcopy(model) for _ in range(4)]
    for other in range(4):  # what each rank computes, without sharding
        plain[other].experts = nn.Parameter(model.experts.detach().chunk(2)[other % 2].clone())
        square(plain[other](batch(0).chunk(4)[other])).backward()
    same = [plain[other].experts.grad for other in range(4) if other % 2 == rank]
    assert_near(mine.experts.grad, torch.stack(same).mean(0), "experts.grad")
    assert_near(mine.dense.weight.grad, torch.stack([p.dense.weight.grad for p in plain]).mean(0), "dense.weight.grad")
    with pytest.raises(fullshard.StateError, match="The norm of the gradients of 'experts' .* differs between rank 0 and"):
        fullshard.clip_grad_norm_(mine.parameters(), 1.0)


# --- offload -----------------------------------------------------------------------------------------------------------


@pytest.mark.proves("11a")
@pytest.mark.parametrize(
    "mp", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]
)
@ranks(1, 2, 3)
def test_offloaded_shards_travel_once_per_gather_and_once_per_reduction(world: World, mp: MixedPrecisionPolicy) -> None:
    tolerance = rounding(mp.param_dtype or torch.float32)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": mp, "reshard_after_forward": True}
    sharded, _ = train_both(
        world,
        Stack(),
        lambda m: shard_stack(m, world.mesh, **options),
        steps=3,
        tolerance=tolerance,
        optimizer=torch.optim.SGD,
        loss=lambda y: square(y.float()),
    )
    with fullshard.counting(sharded) as messages:
        square(sharded(world.mine(batch(0))).float()).backward()
    counts = Counter(message.kind for message in messages)
    assert counts == {"to_device": 8, "all_gather": 8, "reduce_scatter": 4, "to_host": 4, "heartbeat": 1}
    down = sum(m.nbytes for m in messages if m.kind == "to_host")
    assert down == sum(g.shard.numel() * 4 for m in (sharded, *sharded.blocks) for g in m._fullshard_unit.groups)


@ranks(4)
def test_offload_on_a_hybrid_mesh_accumulates_over_backwards(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), hybrid(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for step in range(2):
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
    assert_same_grads(sharded, model)
    assert ROWS % 4 == 0 and full(sharded.inp.weight).shape == model.inp.weight.shape


@ranks(2)
def test_pinning_is_skipped_and_said_where_there_is_nothing_to_copy_to(world: World) -> None:
    with pytest.warns(UserWarning, match="host memory is not pinned"):
        sharded = fully_shard(nn.Linear(5, 3), mesh=world.mesh, offload_policy=CPUOffloadPolicy())
    square(sharded(batch(0))).backward()
