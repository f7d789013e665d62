"""Plain parameters that spmd_types annotates: stored, computed with, reduced and saved as the same model of DTensors."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from launch import launch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fullshard
from fullshard import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard

spmd = pytest.importorskip("spmd_types")
pytest.importorskip("spmd_types.checker")

DIM, HIDDEN = 6, 8
KINDS: dict[str, Any] = {"norm": spmd.R, "up": spmd.S(0), "down": spmd.S(1), "bias": spmd.I, "scale": spmd.R}
"""By parameter, its type over tp."""
MESHES = {
    "dp, tp": ((2, 2), ("dp", "tp"), DataParallelMeshDims("dp")),
    "tp, dp": ((2, 2), ("tp", "dp"), DataParallelMeshDims("dp")),
    "rep, dp, tp": ((2, 1, 2), ("rep", "dp", "tp"), DataParallelMeshDims("dp", "rep")),
    "dp, cp, tp": ((1, 2, 2), ("dp", "cp", "tp"), DataParallelMeshDims(("dp", "cp"))),
    "dp alone, tp": ((4, 1), ("dp", "tp"), DataParallelMeshDims("dp")),
    "tp alone": ((1, 4), ("dp", "tp"), DataParallelMeshDims("dp")),
}


class Sum(torch.autograd.Function):
    """The sum over tp ranks, of what they computed from equal gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Copy(torch.autograd.Function):
    """The same value on tp ranks, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def whole(name: str, block: int) -> Tensor:
    shape = {"norm": (DIM,), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN), "bias": (DIM,), "scale": ()}[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) * 10 + block)) / 3 + (not shape)


class Block(nn.Module):
    """A column-parallel and a row-parallel matrix. `local` returns what to compute with of a parameter."""

    def __init__(self, mesh: DeviceMesh, block: int, kind: str) -> None:
        super().__init__()
        self.mesh, self.group, self.kind = mesh, mesh.get_group("tp"), kind
        for name in KINDS:
            self.register_parameter(name, make(mesh, name, block, kind))

    def local(self, name: str) -> Tensor:
        value = getattr(self, name)
        if not isinstance(value, DTensor):
            return value
        grads = [Partial() if one != "tp" else backward_placement(name) for one in self.mesh.mesh_dim_names or ()]
        return value.to_local(grad_placements=grads)

    def forward(self, x: Tensor) -> Tensor:
        h = Copy.apply(x, self.group) * self.local("norm") * self.local("scale")
        h = torch.tanh(h @ self.local("up").T) @ self.local("down").T
        return x + Sum.apply(h, self.group) + self.local("bias")


def backward_placement(name: str) -> Any:
    return {"up": Shard(0), "down": Shard(1), "bias": Replicate()}.get(name, Partial())


def make(mesh: DeviceMesh, name: str, block: int, kind: str) -> nn.Parameter:
    """The parameter on this rank. kind: "annotated", or "dtensor"."""
    dim = {"up": 0, "down": 1}.get(name)
    value = whole(name, block)
    tp = mesh["tp"]
    local = value if dim is None else value.chunk(tp.size(), dim)[tp.get_local_rank()].contiguous()
    if kind == "dtensor":
        tp_placement = Replicate() if dim is None else Shard(dim)
        placements = [tp_placement if one == "tp" else Replicate() for one in mesh.mesh_dim_names or ()]
        return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    parameter = nn.Parameter(local)
    names = mesh.mesh_dim_names or ()
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(parameter, {one: KINDS[name] if one == "tp" else spmd.R for one in names})
    return parameter


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mesh, index, kind) for index in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mesh_of(name: str) -> tuple[DeviceMesh, DataParallelMeshDims]:
    shape, names, dims = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names), dims


def sharded(mesh: DeviceMesh, dims: Any, kind: str, **options: Any) -> Any:
    model = Model(mesh, kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims, **options)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)


def batch(mesh: DeviceMesh, step: int) -> Tensor:
    """Equal over tp."""
    names = [one for one in mesh.mesh_dim_names or () if one != "tp"]
    where = 0
    for one in names:
        where = where * mesh[one].size() + mesh[one].get_local_rank()
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * step + where))


def train(model: Any, mesh: DeviceMesh, steps: int = 3, *, micros: int = 1) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            loss = model(batch(mesh, step * micros + micro)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        fullshard.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MESHES)
@ranks(4)
def test_annotated_parameters_train_as_dtensors_do(world: World, name: str, policy: str, micros: int) -> None:
    mesh, dims = mesh_of(name)
    found = [sharded(mesh, dims, kind, **POLICIES[policy]) for kind in ("annotated", "dtensor")]
    for parameter, theirs in zip(*(model.parameters() for model in found)):
        assert parameter.shape == theirs.shape
        if mesh["tp"].size() > 1:  # the package drops axes of one rank
            assert parameter.placements == theirs.placements
        assert torch.equal(parameter.to_local(), theirs.to_local())
        assert not spmd.get_local_type(parameter)
    losses = [train(model, mesh, micros=micros) for model in found]
    # Of annotated parameters, parts of a gradient are summed over tp in the reduce dtype.
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if policy == "mixed precision" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(*losses, **tolerance)
    if policy != "mixed precision":  # AdamW takes steps of equal size, whatever the size of a gradient
        for (key, value), theirs in zip(found[0].state_dict().items(), found[1].state_dict().values()):
            assert torch.equal(value.full_tensor(), theirs.full_tensor()), key
    found[0].unshard()
    inner = found[0].blocks[0]
    inner.unshard()
    assert all(type(parameter) is nn.Parameter for parameter in inner.parameters())
    assert {one: spmd.get_local_type(getattr(inner, one)) != {} for one in KINDS} == dict.fromkeys(KINDS, True)


class Plain(nn.Module):
    """Runs under the checker: everything is the same value over tp."""

    def __init__(self, mesh: DeviceMesh, policy: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole("up", 0)[:DIM])
        self.bias = nn.Parameter(whole("bias", 0))
        with spmd.set_current_mesh(mesh):
            for parameter in self.parameters():
                spmd.assert_type(parameter, {"dp": spmd.R, "tp": spmd.I})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T) * self.bias


@ranks(4)
def test_steps_under_the_checker_are_steps_without_it(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    weights = []
    for checks in (False, True):
        model: Any = nn.Sequential(*[Plain(mesh) for _ in range(2)])
        for module in (*model, model):
            fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = batch(mesh, step)
            with spmd.set_current_mesh(mesh), spmd.checker.typecheck() if checks else spmd.no_typecheck():
                spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.I})
                loss = spmd.reinterpret(model(x).square().mean(), mesh.get_group("dp"), src=spmd.V, dst=spmd.P)
                loss.backward()
                model[0].unshard()
                model[0].reshard()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([parameter.full_tensor() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


# --- what is refused, before anything has changed ---


def annotated(mesh: DeviceMesh, types: dict[str, Any], shape: tuple[int, ...] = (4, 4), **options: Any) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(shape))
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(module.weight, types, **options)
    return module


class Scale(nn.Module):
    def __init__(self, mesh: DeviceMesh, over_tp: Any) -> None:
        super().__init__()
        self.weight = annotated(mesh, {"dp": spmd.R, "tp": over_tp}, (4,)).weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


REFUSED: dict[str, tuple[Callable[[DeviceMesh], nn.Module], str]] = {
    "a part of a sum": (lambda mesh: annotated(mesh, {"dp": spmd.R, "tp": spmd.P}), "'weight' is annotated P over"),
    "sharded over data": (lambda mesh: annotated(mesh, {"dp": spmd.S(0), "tp": spmd.R}), "data-parallel axis .* got S"),
    "varying": (lambda mesh: annotated(mesh, {"dp": spmd.R, "tp": spmd.V}), r"annotated V over .* S\(dim\)"),
    "partly": (lambda mesh: annotated(mesh, {"dp": spmd.R}), "do not span the mesh"),
    "not at all": (lambda mesh: nn.Linear(4, 4), "every parameter must be a DTensor on the full mesh"),
}


@pytest.mark.parametrize("what", REFUSED)
@ranks(4)
def test_annotations_that_do_not_fit_the_mesh_are_refused_by_name(world: World, what: str) -> None:
    mesh, dims = mesh_of("dp, tp")
    build, text = REFUSED[what]
    module = build(mesh)
    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match=text):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())


@ranks(8)
def test_axes_that_are_foreign_missing_or_in_another_order_are_refused_by_name(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "both"))
    axis = {one: spmd.MeshAxis.of(mesh.get_group(one)) for one in ("ep", "tp")}
    order = {"partition_spec": spmd.PartitionSpec((axis["tp"], axis["ep"]), None)}
    kinds = {"dp": spmd.R, "ep": spmd.V, "tp": spmd.V}
    for build, text in [
        (lambda: annotated(other, {"dp": spmd.R, "both": spmd.R}), "'weight' is annotated over .*none of the axes"),
        (lambda: annotated(mesh, {"dp": spmd.R, "tp": spmd.R}), r"says nothing about the axes \['ep'\]"),
        (lambda: annotated(mesh, kinds, **order), "Dim 0 of parameter 'weight' .*another order"),
    ]:
        module = build()
        with spmd.set_current_mesh(mesh if "both" not in text else other):
            with pytest.raises(ValueError, match=text):
                fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))


@ranks(4)
def test_an_annotated_parameter_needs_the_full_mesh_with_its_data_parallel_axes(world: World) -> None:
    mesh, _ = mesh_of("dp, tp")
    with pytest.raises(ValueError, match="dp_mesh_dims=DataParallelMeshDims"):
        fully_shard(annotated(mesh, {"dp": spmd.R, "tp": spmd.R}), mesh=mesh["dp"])


@ranks(4)
def test_annotations_that_leave_axes_out_take_them_from_the_current_mesh(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    module = annotated(mesh, {"tp": spmd.S(1)})
    with spmd.set_current_mesh(mesh):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    assert module.weight.placements == (Shard(0), Shard(1)) and module.weight.shape == (4, 8)
    module.unshard()
    axis = {one: spmd.MeshAxis.of(mesh.get_group(one)) for one in ("dp", "tp")}
    assert spmd.get_local_type(module.weight) == {axis["dp"]: spmd.R, axis["tp"]: spmd.V}


@ranks(8)
def test_placements_are_those_of_the_mesh_in_its_order_not_in_that_of_the_annotation(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    module = annotated(mesh, {"tp": spmd.S(0), "ep": spmd.S(1), "dp": spmd.R})
    where = torch.tensor([mesh["tp"].get_local_rank(), mesh["ep"].get_local_rank()])
    with torch.no_grad():
        module.weight.copy_(where[0] * 10.0 + where[1])
    fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))
    assert [str(one) for one in module.weight.placements[1:]] == ["S(1)", "S(0)"]
    rows, columns = torch.arange(8) // 4, torch.arange(8) // 4
    assert torch.equal(module.weight.full_tensor(), rows[:, None] * 10.0 + columns[None])


@pytest.mark.parametrize("others", ["R", "I", "S"])
@ranks(4)
def test_a_rank_that_annotates_alone_is_named_on_all_ranks(world: World, others: str) -> None:
    mesh, dims = mesh_of("dp, tp")
    kinds = {"R": spmd.R, "I": spmd.I, "S": spmd.S(0)}
    for alone in (kind for kind in kinds if kind != others):
        # by one rank, and by the ranks of one place in tp, which agree among themselves
        for where in (world.rank == 0, mesh["tp"].get_local_rank() == 0):
            module: Any = fully_shard(Scale(mesh, kinds[alone if where else others]), mesh=mesh, dp_mesh_dims=dims)
            with pytest.raises(fullshard.StateError, match=r"rank 0 has 'weight' .*annotated for .*rank 1 has 'weight'"):
                module(torch.ones(4))


# --- meshes, values and what becomes of the parameters ---


@ranks(4)
def test_a_second_equal_mesh_in_the_process_is_as_good_as_the_first(world: World) -> None:
    for _ in range(2):
        mesh, dims = mesh_of("dp, tp")
        module = annotated(mesh, {"dp": spmd.R, "tp": spmd.S(0)})
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
        assert torch.equal(module.weight.full_tensor(), torch.ones(8, 4))


@ranks(4)
def test_experts_on_a_mesh_of_their_own_are_sharded_over_its_data_parallel_axes(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    info = types.SimpleNamespace(mesh=experts["efsdp"], spmd_mesh=experts, dp_mesh_dims=DataParallelMeshDims("efsdp"))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = annotated(mesh, {"dp": spmd.R, "tp": spmd.I}, (4,)).weight
            self.expert = nn.Parameter(torch.full((2, 4), 1.0 + experts["ep"].get_local_rank()))
            with spmd.set_current_mesh(experts):
                spmd.assert_type(self.expert, {"efsdp": spmd.R, "ep": spmd.S(0)})

        def forward(self, x: Tensor) -> Tensor:
            return (self.router * x * self.expert).sum()

    module: Any = Experts()
    expert = module.expert
    place = lambda one: fullshard.ShardPlacementResult(Shard(0), info) if one is expert else None
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=place)
    assert module.expert.device_mesh == experts and module.expert.shape == (4, 4)
    module(torch.ones(4)).backward()
    assert torch.equal(module.expert.full_tensor(), torch.arange(1.0, 3.0).repeat_interleave(2)[:, None].expand(4, 4))
    assert torch.equal(module.expert.grad.full_tensor(), torch.ones(4, 4))


@ranks(4)
def test_a_model_on_meta_is_annotated_sharded_and_filled(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    with torch.device("meta"):
        model: Any = Model(mesh, "annotated")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model.to_empty(device="cpu")
    known = sharded(mesh, dims, "annotated")
    model.load_state_dict(known.state_dict())
    assert all(map(torch.equal, train(model, mesh), train(known, mesh)))


@ranks(4)
def test_undo_and_copies_give_annotated_parameters_back(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    module: Any = Scale(mesh, spmd.S(0))
    before = spmd.get_local_type(module.weight)
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    copied = copy.deepcopy(module)
    assert torch.equal(copied(torch.ones(4)), module(torch.ones(4)))
    for one in (copied, module):
        fullshard.undo(one)
        assert spmd.get_local_type(one.weight) == before and type(one.weight) is nn.Parameter
        assert torch.equal(one(torch.ones(4)), torch.ones(4))


@ranks(4)
def test_gradients_over_tp_are_summed_in_the_reduce_dtype(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module: Any = fully_shard(Scale(mesh, spmd.R), mesh=mesh, dp_mesh_dims=dims, mp_policy=mp)
    x = torch.full((4,), 256.0 if mesh["tp"].get_local_rank() else 1.0, dtype=torch.bfloat16)
    module(x).sum().backward()
    assert torch.equal(module.weight.grad.full_tensor(), torch.full((4,), 257.0))  # which bfloat16 does not have


def test_the_package_is_not_imported_by_fullshard() -> None:
    torch_imports = "import torch.distributed.fsdp, sys; print('spmd_types' in sys.modules)"
    ours = "import fullshard, sys; print('spmd_types' in sys.modules)"
    first, second = (subprocess.check_output([sys.executable, "-c", program]) for program in (torch_imports, ours))
    assert first == second  # torch 2.15 imports it where it is installed


# --- reading, writing and saving: what the same model of DTensors gives ---


def pair(mesh: DeviceMesh, dims: Any) -> tuple[Any, Any]:
    """The same model of annotated parameters and of DTensors, sharded and trained for two steps."""
    both = tuple(sharded(mesh, dims, kind) for kind in ("annotated", "dtensor"))
    for model in both:
        train(model, mesh, steps=2)
    return both


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


class Whole(nn.Module):
    """The model with whole parameters on each rank, as they are before any sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterDict({name: whole(name, index) for name in KINDS}) for index in range(2))


@pytest.mark.parametrize("name", ["dp, tp", "tp, dp", "rep, dp, tp"])
@ranks(4)
def test_checkpoints_load_into_models_that_are_sharded_otherwise_or_not_at_all(world: World, name: str) -> None:
    mesh, dims = mesh_of(name)
    model, _ = pair(mesh, dims)
    expected = whole_of(model)
    place = world.folder("checkpoint")
    dcp.save(model.state_dict(), checkpoint_id=place)
    flat = Whole()
    fully_shard(flat, mesh=init_device_mesh("cpu", (4,)), ignored_params={one.scale for one in flat.blocks})
    for other in (Whole(), flat, sharded(mesh, dims, "annotated")):
        state = other.state_dict()
        dcp.load(state, checkpoint_id=place)
        other.load_state_dict(state)
        for key, value in other.state_dict().items():
            assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[key]), key


@ranks(4)
def test_weights_are_saved_and_loaded_under_their_names(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    model, _ = pair(mesh, dims)
    place = world.folder("weights")
    fullshard.save_weights(model, place)
    other = sharded(mesh, dims, "annotated")
    fullshard.load_weights(other, place)
    expected = whole_of(model)
    assert all(torch.equal(value, expected[key]) for key, value in whole_of(other).items())
    streamed = dict(fullshard.iter_full(model))
    assert all(torch.equal(streamed[key], value) for key, value in expected.items())


@ranks(4)
def test_full_and_gathered_parameters_are_those_of_dtensors(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    models = pair(mesh, dims)
    found = []
    for model in models:
        with fullshard.full_params(model) as inside, torch.no_grad():
            for value in inside.parameters():
                value.mul_(2.0)
        with fullshard.gathered(model.blocks[0]) as weights:
            one = weights["up"].to_local() if isinstance(weights["up"], DTensor) else weights["up"]
            found.append(one.detach().clone())
            one.square().sum().backward()
    assert torch.equal(*found)
    ours, theirs = (whole_of(model) for model in models)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(*(model.blocks[0].up.grad.full_tensor() for model in models))


@ranks(4)
def test_full_state_dicts_of_model_and_optimizer_are_read_and_loaded_from_rank_0(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    models = [sharded(mesh, dims, "annotated") for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    train_with(models[0], optimizers[0], mesh, range(2))
    everything, from_rank_0 = (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    weights, states = get_state_dict(models[0], optimizers[0], options=everything)
    assert all(torch.equal(value, weights[name]) for name, value in whole_of(models[0]).items())
    given = copy.deepcopy((weights, states)) if world.rank == 0 else ({}, {})  # torch loads `step` without a copy
    set_model_state_dict(models[1], given[0], options=from_rank_0)
    set_optimizer_state_dict(models[1], optimizers[1], given[1], options=from_rank_0)
    for model, optimizer in zip(models, optimizers):
        train_with(model, optimizer, mesh, range(2, 4))
    assert all(map(torch.equal, *(whole_of(model).values() for model in models)))


def train_with(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> None:
    for step in steps:
        model(batch(mesh, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- what may stand beside an annotated parameter, and be set on it ---


@ranks(4)
def test_dtensors_buffers_and_ignored_parameters_may_stand_beside_annotated_ones(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    module: Any = Block(mesh, 0, "annotated")
    module.up = make(mesh, "up", 0, "dtensor")
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(module.up.to_local(), {"dp": spmd.R, "tp": spmd.S(0)})  # a DTensor is one with types, too
    module.register_buffer("offset", torch.zeros(DIM))
    module.extra = nn.Parameter(torch.zeros(DIM))
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims, ignored_params={module.extra})
    known = fully_shard(Block(mesh, 0, "dtensor"), mesh=mesh, dp_mesh_dims=dims)
    for model in (module, known):
        model(batch(mesh, 0)).square().mean().backward()
    assert type(module.extra) is nn.Parameter and not isinstance(module.extra, DTensor)
    for name in KINDS:
        assert torch.equal(*(getattr(model, name).grad.full_tensor() for model in (module, known))), name


@ranks(4)
def test_an_annotated_dtensor_is_a_dtensor(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    module = nn.Module()
    module.weight = make(mesh, "up", 0, "dtensor")
    module.weight._local_type = dict(annotated(mesh, {"dp": spmd.R, "tp": spmd.I}).weight._local_type)
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    module.unshard()
    assert isinstance(module.weight, DTensor)


@ranks(4)
def test_parameters_keep_their_flags_ties_and_identity(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = annotated(mesh, {"dp": spmd.R, "tp": spmd.I})
            self.second = nn.Module()
            self.second.weight = self.first.weight
            self.frozen = annotated(mesh, {"dp": spmd.R, "tp": spmd.S(0)}).weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.first.weight, self.frozen))
            assert self.first.weight is self.second.weight
            return ((x @ self.first.weight).tanh() @ self.second.weight) * self.frozen.sum()

    seen: list[Any] = []
    given: list[Any] = []
    model: Any = Tied()
    originals = list(model.parameters())
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda one: given.append(one))
    assert len(given) == 2 and all(any(one is original for original in originals) for one in given)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert all(one is other for one, other in zip(*seen)) and type(seen[0][0]) is nn.Parameter
    assert model.first.weight is model.second.weight and model.first.weight.grad is not None and model.frozen.grad is None


@ranks(8)
def test_an_int_reshards_annotated_parameters_to_fewer_ranks(world: World) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    losses = [
        train(sharded(mesh, DataParallelMeshDims("dp"), "annotated", reshard_after_forward=how), mesh) for how in (True, 2)
    ]
    assert all(map(torch.equal, *losses))


@ranks(4)
def test_a_current_mesh_of_other_ranks_is_refused_by_name(world: World) -> None:
    mesh, dims = mesh_of("dp, tp")
    module = annotated(mesh, {"tp": spmd.R})
    with spmd.set_current_mesh(mesh["tp"]), pytest.raises(ValueError, match="current mesh of spmd_types has the axes"):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)


def _alone_in_a_sum(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    policy = fullshard.CheckPolicy(timeout=2.0)
    module: Any = Scale(mesh, spmd.R)
    fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"), check_policy=policy)
    module(torch.ones(4)).sum().backward()
    out = module(torch.ones(4))
    if rank == 1:
        time.sleep(8.0)  # it has no backward
    else:
        told = r"waited 2 seconds .* in collective \d+, sum of the gradients of \['weight'\]"
        with pytest.raises(fullshard.StateError, match=told):
            out.sum().backward()
    dist.barrier = lambda *_: None  # the group, in which `launch` would meet, was aborted


def test_a_rank_that_waits_alone_for_a_sum_over_tp_is_named() -> None:
    """DTensor runs the sum: it is in the log, and the watchdog ends the wait."""
    launch(_alone_in_a_sum)
