"""The surface of FSDP2, name by name: setters, methods, the comm classes, tensor subclasses, and its place in torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exits import command_line
from harness import World, ranks
from models import (
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard import CommPolicy, MixedPrecisionPolicy, StateError, _torch, fully_shard
from fullshard._torch import HONOURS_SUBCLASSES
from fullshard.comm.gloo import GlooCollectives


def kinds(messages: list[fullshard.Message]) -> Counter[str]:
    return Counter(message.kind for message in messages)


def train_step(world: World, sharded: nn.Module, model: nn.Module, index: int = 0) -> None:
    square(sharded(world.mine(batch(index)))).backward()
    square(model(batch(index))).backward()


# --- the names -----------------------------------------------------------------------------------------------------------


TABLE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
IN_TABLE = set(re.findall(r"`([\w.]+)(?:\([^`]*\))?`", TABLE))


def methods(cls: type) -> list[str]:
    """The methods and properties that a class defines itself, without those of Python."""
    return [name for name in vars(cls) if not name.startswith("__") and name != "_orig_cls_mro_index"]


def unserved_methods(theirs: type, ours: type) -> list[str]:
    """Methods of theirs that ours does not define itself, or that take less, or that the table does not name."""
    found: list[str] = []
    for name in methods(theirs):
        if name not in vars(ours):
            found.append(f"{name}: torch's own, which knows nothing of our units")
        elif name not in IN_TABLE:
            found.append(f"{name}: not in docs/compatibility.md")
        elif inspect.isfunction(vars(theirs)[name]):
            found += [f"{name}: {what}" for what in lacking(vars(theirs)[name], vars(ours)[name])]
    return found


def lacking(theirs: Any, ours: Any) -> list[str]:
    """Parameters of theirs that ours lacks, or takes in another way, or with another default."""
    found = inspect.signature(ours).parameters
    missing: list[str] = []
    for name, parameter in inspect.signature(theirs).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        mine = found.get(name)
        if mine is None or mine.kind not in (parameter.kind, mine.POSITIONAL_OR_KEYWORD):
            missing.append(f"no parameter {name}, or of another kind")
        elif isinstance(parameter.default, (bool, int, str, type(None))) and mine.default != parameter.default:
            missing.append(f"{name} is {mine.default} by default, not {parameter.default}")
    return missing


def unserved_fields(theirs: type, ours: type) -> list[str]:
    """Fields of a policy of theirs that ours lacks, or has with another default."""
    mine = {one.name: one for one in dataclasses.fields(ours)}
    return [
        one.name
        for one in dataclasses.fields(theirs)
        if one.name not in mine or mine[one.name].default != one.default or mine[one.name].kw_only != one.kw_only
    ]


def test_every_exported_name_of_the_installed_torch_is_here() -> None:
    import torch.distributed.fsdp._fully_shard as home
    from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

    names = {*home.__all__, *getattr(_fully_shard, "__all__", ())}
    names |= {name for name, value in vars(_fsdp_api).items() if isinstance(value, type) and not name.startswith("_")}
    names -= {name for name, value in vars(_fsdp_api).items() if getattr(value, "__module__", "") in ("abc", "collections.abc")}
    refused = {"get_cls_to_fsdp_cls", "disable_fsdp_module_new_init"}  # the table says why
    for name in sorted(names):
        assert name in IN_TABLE, f"{name} is not in docs/compatibility.md"
        assert name in refused or hasattr(fullshard, name), f"{name} of torch is neither served nor refused"


def test_every_method_of_the_installed_torch_is_our_own_and_takes_what_torchs_takes() -> None:
    import torch.distributed.fsdp as theirs

    assert unserved_methods(theirs.FSDPModule, fullshard.FSDPModule) == []
    assert unserved_methods(theirs.UnshardHandle, fullshard.UnshardHandle) == []
    if hasattr(theirs, "GradientReductionHandle"):
        assert unserved_methods(theirs.GradientReductionHandle, fullshard.GradientReductionHandle) == []
    assert lacking(theirs.fully_shard.__wrapped__, fullshard.fully_shard) == []
    assert all(name in IN_TABLE for name in inspect.signature(fullshard.fully_shard).parameters)
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        assert lacking(getattr(theirs, name), getattr(fullshard, name)) == []
    assert issubclass(fullshard.FSDPModule, theirs.FSDPModule)


def test_every_field_of_the_installed_torchs_policies_is_here() -> None:
    import torch.distributed.fsdp as theirs

    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"):
        if hasattr(theirs, name):
            assert unserved_fields(getattr(theirs, name), getattr(fullshard, name)) == [], name


def test_every_hook_of_tensor_subclasses_that_the_installed_torch_asks_for_is_here() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    from fullshard.ext import subclasses

    asked = set(re.findall(r'"(fsdp_\w+)"', inspect.getsource(_fsdp_param)))
    assert asked and asked <= set(re.findall(r'"(fsdp_\w+)"', inspect.getsource(subclasses)))


def test_what_a_newer_torch_would_add_is_found() -> None:
    """The tests above fail for a method, an argument and a field that nobody serves."""

    class Newer:
        def set_something_new(self) -> None: ...

        def unshard(self, async_op: bool = False, *, priority: int = 0) -> None: ...

        def reshard(self, now: bool = True) -> None: ...

    found = unserved_methods(Newer, fullshard.FSDPModule)
    assert [text.split(":")[0] for text in found] == ["set_something_new", "unshard", "reshard"]

    @dataclasses.dataclass(frozen=True)
    class NewerPolicy(MixedPrecisionPolicy):
        stochastic_rounding: bool = dataclasses.field(default=False, kw_only=True)

    assert unserved_fields(NewerPolicy, MixedPrecisionPolicy) == ["stochastic_rounding"]


@pytest.mark.proves("8d")
def test_a_field_of_torchs_policies_that_nobody_here_knows_is_refused_unless_it_is_at_its_default() -> None:
    import torch.distributed.fsdp as theirs

    from fullshard.policies import resolve_mp, resolve_offload

    def newer(kind: type, **values: Any) -> Any:
        made = dataclasses.make_dataclass(
            kind.__name__, [("rounding", str, "nearest")], bases=(kind,), frozen=kind.__dataclass_params__.frozen
        )
        made.__module__ = kind.__module__
        return made(**values)

    assert resolve_mp(newer(theirs.MixedPrecisionPolicy, param_dtype=torch.bfloat16)).param_dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"MixedPrecisionPolicy has rounding='up', which fullshard does not know"):
        resolve_mp(newer(theirs.MixedPrecisionPolicy, rounding="up"))
    assert resolve_offload(newer(theirs.CPUOffloadPolicy, pin_memory=False)) == fullshard.CPUOffloadPolicy(pin_memory=False)
    with pytest.raises(ValueError, match=r"CPUOffloadPolicy has rounding='up', which fullshard does not know"):
        resolve_offload(newer(theirs.CPUOffloadPolicy, rounding="up"))


@pytest.mark.proves("8d")
@ranks(2)
def test_every_name_of_torchs_state_objects_is_shown_or_refused_and_none_can_be_set(world: World) -> None:
    import torch.distributed.fsdp as theirs

    model, peer = shard_stack(Stack(), world.mesh), Stack()
    for block in peer.blocks:
        theirs.fully_shard(block, mesh=world.mesh)
    theirs.fully_shard(peer, mesh=world.mesh)
    our_state, their_state = model._get_fsdp_state(), peer._get_fsdp_state()
    our_group, their_group = our_state._fsdp_param_group, their_state._fsdp_param_group
    pairs = [
        (our_state, their_state),
        (our_state._state_ctx, their_state._state_ctx),
        (our_group, their_group),
        (our_group.fsdp_params[0], their_group.fsdp_params[0]),
    ]
    for ours, other in pairs:
        names = [name for name in dir(other) if not name.startswith("__")]
        assert len(names) > 3
        for name in names:
            with contextlib.suppress(AttributeError) as _:
                getattr(ours, name)
                continue
            with pytest.raises(AttributeError, match=f"fullshard has no '{name}' for a unit. Of FSDP2's private state"):
                getattr(ours, name)
        for name in names:
            with pytest.raises(
                fullshard.StateError,
                match=f"'{name}' cannot be set on the View of FSDP.*: it is a view of FSDP2's private state",
            ):
                setattr(ours, name, None)


@ranks(2)
def test_torch_finds_its_state_and_other_libraries_their_class(world: World) -> None:
    import torch.distributed.fsdp as theirs
    from torch.distributed._composable import replicate

    model, other = shard_stack(Stack(), world.mesh), shard_stack(Stack(), world.mesh)
    assert isinstance(model, theirs.FSDPModule)
    view = theirs.fully_shard.state(model)
    assert view is not None and view._mp_policy == MixedPrecisionPolicy() and view._modules == (model,)
    assert fully_shard.state(model)._modules == (model,) and fully_shard.state(model.head) is None
    assert fully_shard.state(model) in {fully_shard.state(model)} and fully_shard.state(model) != fully_shard.state(
        model.blocks[0]
    )
    assert len(view._state_ctx.all_states) == 4
    assert model._get_fsdp_state()._fsdp_param_group.fsdp_params[0].sharded_param is model.inp.weight
    assert id(view._comm_ctx) == id(model._get_fsdp_state()._comm_ctx) != id(other._get_fsdp_state()._comm_ctx)
    model(world.mine(batch(0)))
    assert model.blocks[0]._get_fsdp_state()._comm_ctx is view._comm_ctx, "one for the units of a model"
    with pytest.raises(AttributeError, match="fullshard has no '_training_state' for a unit"):
        _ = view._training_state
    with pytest.raises(Exception):  # noqa: B017
        replicate(model)
    assert type(model).__name__.removeprefix("FSDP") == "Stack"


# --- what a unit gathers ahead ---------------------------------------------------------------------------------------------


def order(messages: list[fullshard.Message]) -> list[str]:
    return [m.kind for m in messages]


@ranks(1, 2)
def test_listed_modules_are_gathered_while_a_unit_computes(world: World) -> None:
    model = Stack(4)
    sharded = shard_stack(copy.deepcopy(model), world.mesh, reshard_after_forward=True)
    blocks = sharded.blocks
    seen: list[int] = []
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 3]))
        block.set_modules_to_backward_prefetch(list(blocks[max(0, index - 2) : index])[::-1])
        block.register_forward_pre_hook(
            lambda *_: seen.append(sum(b._fullshard_unit.residency.value != "sharded" for b in blocks))
        )
    for step in range(3):
        seen.clear()
        with fullshard.counting(sharded) as messages:
            train_step(world, sharded, model, step)
        assert kinds(messages)["all_gather"] == 10, "no gather twice"
        assert seen == [3, 3, 2, 1]
    assert_same_grads(sharded, model)
    with pytest.raises(ValueError, match="Expected modules that fully_shard was called on, got LayerNorm"):
        sharded.set_modules_to_forward_prefetch([blocks[0].norm])


@pytest.mark.proves("37a")
@pytest.mark.parametrize("budget", [0, 1, 10**6])
@ranks(2)
def test_a_byte_budget_says_how_many_units_are_gathered_ahead(world: World, budget: int) -> None:
    model = Stack(4)
    one = sum(p.numel() for p in model.blocks[0].parameters()) * 4
    comm = CommPolicy(prefetch_bytes=budget * 3 * one if budget == 1 else budget)
    sharded = shard_stack(copy.deepcopy(model), world.mesh, comm_policy=comm, reshard_after_forward=True)
    most: list[int] = []
    for block in sharded.blocks:
        block.register_forward_pre_hook(
            lambda *_: most.append(sum(b._fullshard_unit.residency.value != "sharded" for b in sharded.blocks))
        )
    for step in range(3):
        most.clear()
        with fullshard.counting(sharded) as messages:
            train_step(world, sharded, model, step)
        assert kinds(messages)["all_gather"] == 10
    assert_same_grads(sharded, model)
    assert max(most) == {0: 1, 1: 3, 10**6: 4}[budget]


@ranks(2)
def test_a_unit_whose_backward_needs_no_parameters_is_not_gathered_for_it(world: World) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids))

    model = Words()
    sharded = copy.deepcopy(model)
    fully_shard(sharded.table, mesh=world.mesh)
    fully_shard(sharded, mesh=world.mesh, reshard_after_forward=True)
    sharded.table.set_unshard_in_backward(False)
    ids = torch.arange(12) % 11
    for _ in range(2):
        with fullshard.counting(sharded) as messages:
            square(sharded(world.mine(ids))).backward()
        square(model(ids)).backward()
        assert kinds(messages)["all_gather"] == 3, "the table once, the root twice"
    assert_same_grads(sharded, model)
    sharded.out_unit = None
    other = fully_shard(nn.Linear(5, 3), mesh=world.mesh, reshard_after_forward=True)
    other.set_unshard_in_backward(False)
    loss = square(other(batch(0).requires_grad_()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- how gradients are reduced ---------------------------------------------------------------------------------------------


@pytest.mark.proves("14a")
@pytest.mark.parametrize("reduce", [None, torch.float16])
@ranks(1, 2, 4)
def test_any_divide_factor_with_any_dtype_and_mesh(world: World, reduce: torch.dtype | None) -> None:
    """Elsewhere gloo knows no factor but the world size, and a world of one divides twice."""
    meshes = [world.mesh]
    if world.size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        for factor in (1.0, 2.0, 3.0, 0.5):
            model = nn.Linear(5, 3)
            sharded = fully_shard(copy.deepcopy(model), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(factor)
            sharded(world.mine(batch(0))).sum().backward()
            model(batch(0)).sum().backward()
            assert_near(sharded.weight.grad, model.weight.grad / factor, "grad", rounding(reduce or torch.float32))
    with pytest.raises(ValueError, match="takes a number > 0 or None, got 0"):
        sharded.set_gradient_divide_factor(0)


@ranks(2)
def test_forced_sums_are_scaled_behind_the_collective_and_others_by_it(world: World) -> None:
    scales: list[float] = []
    reduce_scatter = GlooCollectives.reduce_scatter

    def seen(self: Any, outs: Any, fulls: Any, scale: float) -> Any:
        scales.append(scale)
        return reduce_scatter(self, outs, fulls, scale)

    model = nn.Linear(5, 3)
    sharded = fully_shard(copy.deepcopy(model), mesh=world.mesh)
    with mock.patch.object(GlooCollectives, "reduce_scatter", seen):
        for forced in (False, True, False):
            sharded.set_force_sum_reduction_for_comms(forced)
            square(sharded(world.mine(batch(0)))).backward()
            square(model(batch(0))).backward()
            assert_same_grads(sharded, model)
            sharded.zero_grad(), model.zero_grad()
    assert scales == [0.5, 1.0, 0.5], "1 / ranks is where nccl averages"


@ranks(2)
def test_setters_of_one_unit_and_of_all(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    sharded.set_gradient_divide_factor(1.0)
    train_step(world, sharded, model)
    assert_near(sharded.inp.weight.grad, 2 * model.inp.weight.grad, "the root's own")
    assert_near(sharded.blocks[0].up.weight.grad, model.blocks[0].up.weight.grad, "not recursive, as elsewhere")
    sharded.zero_grad()
    model.zero_grad()
    sharded.set_gradient_divide_factor(1.0, recurse=True)
    train_step(world, sharded, model)
    assert_near(sharded.blocks[0].up.weight.grad, 2 * model.blocks[0].up.weight.grad, "recursive when asked")


@ranks(2)
def test_reductions_in_flight_and_a_group_of_their_own_change_at_any_time(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step, change in enumerate(
        (
            lambda: sharded.set_reduce_scatter_max_input_buffers(3),
            lambda: sharded.set_separate_reduce_scatter_group(),
            lambda: sharded.set_reduce_scatter_unused_params(True),
            lambda: sharded.set_separate_reduce_scatter_group(False),
            lambda: sharded._set_unshard_async_op(True),
        )
    ):
        change()
        train_step(world, sharded, model, step)
    assert sharded.blocks[0]._fullshard_unit.options.comm.reductions_in_flight == 3
    assert_same_grads(sharded, model)
    with pytest.raises(ValueError, match="max_input_buffers must be an int of at least 1, got 0"):
        sharded.set_reduce_scatter_max_input_buffers(0)


@pytest.mark.proves("42a")
@ranks(4)
def test_a_hook_on_reduced_gradients_sums_over_further_replicas(world: World) -> None:
    """As torchft does it: the caller's own all-reduce, in an order that is the same on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), mesh["shard"])
    outer = mesh.get_group("outer")

    def average(flat: Tensor) -> None:
        dist.all_reduce(flat, group=outer)
        flat.div_(2)

    for unit in (sharded, *sharded.blocks):
        unit.set_all_reduce_hook(average)
    for step in range(2):
        train_step(world, sharded, model, step)
    assert_same_grads(sharded, model)
    with pytest.raises(ValueError, match="got a stream, but the mesh of this unit is on the CPU"):
        sharded.set_all_reduce_hook(average, stream=object())


# --- the caller's own collectives ------------------------------------------------------------------------------------------


class Pool:
    def __init__(self) -> None:
        self.allocated = 0
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)


class MyGather(Pool, fullshard.AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        slot = output_tensor.chunk(group.size())[group.rank()]
        assert slot.data_ptr() == input_tensor.data_ptr(), "in place"
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class MyReduce(Pool, fullshard.ReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        self.calls += 1
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


@pytest.mark.proves("42a")
@pytest.mark.parametrize(
    "mp", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]
)
@ranks(2, 3)
def test_custom_collectives_carry_everything_in_their_own_memory(world: World, mp: MixedPrecisionPolicy) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, mp_policy=mp, comm_policy=CommPolicy(direct_min_bytes=0))
    train_step(world, sharded, model)
    gather, reduce = MyGather(), MyReduce()
    for unit in (sharded, *sharded.blocks):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    with fullshard.counting(sharded) as messages:
        train_step(world, sharded, model, 1)
    assert kinds(messages) == {"all_gather": 7, "reduce_scatter": 4, "heartbeat": 1}
    assert (gather.calls, gather.allocated, reduce.calls, reduce.allocated) == (7, 7, 4, 8)
    assert_same_grads(sharded, model, rounding(mp.param_dtype or torch.float32))
    with pytest.raises(ValueError, match=r"set_custom_all_gather takes an AllGather \(callable, with allocate\(\)\), got int"):
        sharded.set_custom_all_gather(3)
    with pytest.raises(ValueError, match=r"has custom collectives \(MyGather\), which allocate"):
        sharded.set_allocate_memory_from_process_group_for_comm(True)


@ranks(2, 3)
def test_messages_lie_in_memory_of_the_process_group_and_are_carried_as_before(world: World) -> None:
    """gloo allocates none, so a pool stands in for what the backend would give."""
    model, pool = Stack(), Pool()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    real, _torch.process_group_memory = _torch.process_group_memory, lambda group, device: pool.allocate
    try:
        for unit in (sharded, *sharded.blocks):
            unit.set_allocate_memory_from_process_group_for_comm(True)
        train_step(world, sharded, model)
        assert pool.allocated == 7 + 2 * 4
        for unit in (sharded, *sharded.blocks):
            unit.set_allocate_memory_from_process_group_for_comm(False)
        train_step(world, sharded, model, 1)
    finally:
        _torch.process_group_memory = real
    assert pool.allocated == 7 + 2 * 4
    assert_same_grads(sharded, model)


@ranks(2)
def test_memory_that_a_backend_does_not_have_is_refused(world: World) -> None:
    sharded = fully_shard(nn.Linear(5, 3), mesh=world.mesh)
    with pytest.raises(ValueError, match="the gloo backend allocates no memory for messages"):
        sharded.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match="symmetric memory needs CUDA devices, the mesh computes on cpu"):
        sharded.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="which has no streams"):
        sharded.set_post_optim_event(object())
    square(sharded(batch(0))).backward()


# --- tensor subclasses -----------------------------------------------------------------------------------------------------


class TwoPart(torch.Tensor):
    """Values as whole numbers and a scale per row: two inner tensors of different dtypes travel."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, legacy: bool = False) -> TwoPart:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor, legacy: bool = False) -> None:
        self._data, self._scale, self.legacy = data, scale, legacy
        if legacy:
            self.fsdp_pre_all_gather = lambda mesh: ((self._data, self._scale), None)

    @classmethod
    def of(cls, dense: Tensor, legacy: bool = False) -> TwoPart:
        scale = dense.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        return cls((dense / scale).round().to(torch.int8), scale, legacy)

    def dense(self) -> Tensor:
        return self._data.to(self._scale.dtype) * self._scale

    def __repr__(self, **kwargs: Any) -> str:
        return f"TwoPart({self._data.shape})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        first = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(first._data), func(first._scale), first.legacy)
        if func is aten.split.Tensor:
            parts = zip(func(first._data, *args[1:]), func(first._scale, *args[1:]))
            return [cls(data, scale, first.legacy) for data, scale in parts]
        if func in (aten.slice.Tensor, aten.narrow.default):
            return cls(func(first._data, *args[1:]), func(first._scale, *args[1:]), first.legacy)
        if func is aten.new_zeros.default:
            size = args[1]
            return cls(first._data.new_zeros(size), first._scale.new_zeros((size[0], 1)), first.legacy)
        if func is aten.copy_.default:
            source = args[1] if isinstance(args[1], TwoPart) else cls.of(args[1])
            first._data.copy_(source._data)
            first._scale.copy_(source._scale)
            return first
        if func is aten.view.default and tuple(args[1]) == tuple(first.shape):
            return cls(first._data, first._scale, first.legacy)
        if func is aten._to_copy.default:
            return cls(first._data.clone(), first._scale.clone(), first.legacy)
        unwrapped = [a.dense() if isinstance(a, TwoPart) else a for a in args]
        return func(*unwrapped, **kwargs)

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1 and isinstance(module, nn.Linear) and isinstance(mp_policy, MixedPrecisionPolicy)
        assert tuple(outer_size) == (7, 5)
        return (self._data, self._scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        data, scale = outputs
        if out is not None:
            return None
        return TwoPart(data, scale), (data, scale)


@pytest.mark.proves("38a")
@pytest.mark.parametrize("legacy", [False, True])
@ranks(1, 2, 3, 4)
def test_a_subclass_of_two_inner_tensors_travels_in_parts(world: World, legacy: bool) -> None:
    """Both signatures, uneven shards (7 rows) and a world of one; the parts keep their dtypes."""
    model = nn.Linear(5, 7)
    quantized = TwoPart.of(model.weight.detach(), legacy)
    with torch.no_grad():
        model.weight.copy_(quantized.dense())
    sharded = copy.deepcopy(model)
    sharded.weight = nn.Parameter(quantized)
    fully_shard(sharded, mesh=world.mesh, reshard_after_forward=True)
    assert isinstance(sharded.weight.to_local(), TwoPart)
    for step in range(3):
        with fullshard.counting(sharded) as messages:
            out = sharded(world.mine(batch(step)))
        assert [m.dtype for m in messages if m.kind == "all_gather"] == [torch.uint8, torch.float32]
        assert_near(out, model(batch(step)).chunk(world.size)[world.rank], "output")
        square(out).backward()
        square(model(batch(step))).backward()
        assert_near(sharded.weight.grad, model.weight.grad, "weight.grad")
        assert_near(sharded.bias.grad, model.bias.grad, "bias.grad")
        with torch.no_grad():
            fresh = TwoPart.of(model.weight.detach() - 0.1)
            sharded.weight.to_local().copy_(
                fresh[sharded._fullshard_unit.parameters[0].sharding.extent.start :][: sharded.weight.to_local().shape[0]]
            )
            model.weight.copy_(fresh.dense())
        sharded.reshard()


@pytest.mark.proves("19d")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", ["data", "assign"] if HONOURS_SUBCLASSES else ["assign"])
@ranks(1, 2, 3)
def test_a_subclass_takes_assigned_values_and_leaves_old_ones_alone(world: World, how: str, kept: bool) -> None:
    """The memory of a subclass is that of its inner tensors, so its address says nothing about where values are."""
    weight = torch.randn(7, 5)
    sharded = nn.Linear(5, 7, bias=False)
    sharded.weight = nn.Parameter(TwoPart.of(weight))
    fully_shard(sharded, mesh=world.mesh)
    sharded.set_keep_unsharded_storage(kept)
    rows = sharded._fullshard_unit.parameters[0].sharding.extent

    def computes_with(factor: int) -> None:
        assert_near(sharded(batch(0)), batch(0) @ TwoPart.of(weight * factor).dense().T, "output")

    held: list[Any] = []
    for factor in (1, 2, 3):
        computes_with(factor)
        held.append(sharded.weight.data if how == "data" else sharded.state_dict()["weight"])
        local = TwoPart.of(weight * (factor + 1))[rows.start : rows.start + rows.rows]
        new = DTensor.from_local(local, world.mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
        if how == "data":
            sharded.weight.data = new
        else:
            sharded.load_state_dict({"weight": new}, assign=True)
    computes_with(4)
    for factor, old in enumerate(held, 1):
        mine = TwoPart.of(weight * factor)[rows.start : rows.start + rows.rows]
        assert torch.equal(old.to_local().dense(), mine.dense())


class Releasing(TwoPart):
    """Its full tensor is dense: what was gathered is not needed behind fsdp_post_all_gather."""

    answer: Any = True

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        data, scale = outputs
        dense = data.to(param_dtype) * scale
        if out is None:
            return dense, (dense,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(dense)
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [True, False])
@ranks(1, 2)
def test_gathered_outputs_that_a_subclass_lets_go_have_no_memory_while_it_computes(world: World, answer: bool) -> None:
    Releasing.answer = answer
    model = nn.Linear(5, 7)
    quantized = Releasing.of(model.weight.detach())
    with torch.no_grad():
        model.weight.copy_(quantized.dense())
    sharded = copy.deepcopy(model)
    sharded.weight = nn.Parameter(quantized)
    fully_shard(sharded, mesh=world.mesh)
    group = next(group for group in sharded._fullshard_unit.groups if not group.flat)
    held: list[int] = []
    sharded.register_forward_pre_hook(lambda *_: held.append(sum(out.untyped_storage().size() for out in group._buffer._outs)))
    for step in range(3):
        assert_near(sharded(world.mine(batch(step))), model(batch(step)).chunk(world.size)[world.rank], "output")
        sharded.reshard()
    assert all((nbytes == 0) is answer for nbytes in held), held


class Asking(TwoPart):
    """Notes the policy that it is asked with."""

    policies: ClassVar[list[MixedPrecisionPolicy]] = []

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        self.policies.append(mp_policy)
        return (self._data, self._scale), None


@ranks(2)
def test_a_subclass_is_asked_with_the_policy_of_its_parameter(world: World) -> None:
    for keeps, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        sharded = nn.Linear(5, 7)
        sharded.weight = nn.Parameter(Asking.of(sharded.weight.detach()))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p, keeps=keeps: p.dtype if keeps else None
        )
        fully_shard(sharded, mesh=world.mesh, mp_policy=policy)
        sharded.unshard()
        assert Asking.policies.pop() == MixedPrecisionPolicy(param_dtype=dtype), "resolved, without the function"


@ranks(2)
def test_an_answer_about_gathered_outputs_that_is_neither_true_nor_false_is_refused(world: World) -> None:
    Releasing.answer = "yes"
    sharded = nn.Linear(5, 7)
    sharded.weight = nn.Parameter(Releasing.of(sharded.weight.detach()))
    fully_shard(sharded, mesh=world.mesh)
    with pytest.raises(StateError, match=r"True or False from .*after_post_all_gather of parameter 'weight' .* got 'yes'"):
        sharded(world.mine(batch(0)))
    Releasing.answer = True


def halved(self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self.to(torch.bfloat16),), None


def widened(self: Tensor, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    (tensor,) = outputs
    assert tensor.dtype == torch.bfloat16
    if out is not None:
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(tensor)
        return None
    wide = tensor.to(param_dtype)
    return wide, (tensor, wide)


@pytest.mark.parametrize("how", ["meta", "values"])
@ranks(1, 2, 3)
def test_methods_that_a_shard_is_given_after_wrapping_gather_it(world: World, how: str) -> None:
    """As PyTorch's own test does it: plain shards get both methods as attributes, after `to_empty()`, before the first forward.
    They were ignored, so the weights travelled as they are, in float32.
    """
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    model = copy.deepcopy(plain).to("meta" if how == "meta" else world.mesh.device_type)
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh)
    if how == "meta":
        model.to_empty(device=world.mesh.device_type)
        model.load_state_dict(plain.state_dict())
    held = []
    for layer in model:
        shard = layer.weight._local_tensor
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = MethodType(halved, shard), MethodType(widened, shard)
        held.append(shard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.25, betas=(0.0, 0.0)) for m in (model, plain)]
    for step in range(3):
        with fullshard.counting(model) as messages:
            square(model(world.mine(batch(step)))).backward()
        rows = -(-7 // world.size) * world.size  # two bytes of each element
        assert {m.nbytes for m in messages if m.dtype is torch.uint8} >= {2 * rows * 5, 2 * rows * 7}
        rounded = copy.deepcopy(plain)
        with torch.no_grad():
            for layer in rounded:
                layer.weight.copy_(layer.weight.to(torch.bfloat16))
        square(rounded(batch(step))).backward()
        assert_same_grads(model, rounded)
        share_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, plain)
    assert all(layer.weight._local_tensor is shard for layer, shard in zip(model, held))
    model.to(torch.float64)  # the shards are others then, and plain
    assert model(batch(0).double()).dtype == torch.float64


@ranks(2)
def test_a_shard_that_has_half_of_the_protocol_is_named_at_the_first_forward(world: World) -> None:
    model = fully_shard(nn.Linear(5, 7), mesh=world.mesh)
    model.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
    with pytest.raises(StateError, match="'weight' of unit 'Linear' cannot be all-gathered: .* Define .*fsdp_post_all_gather"):
        model(batch(0))
    del model.weight._local_tensor.fsdp_pre_all_gather
    square(model(batch(0))).backward()
    across = fully_shard(nn.Linear(5, 7), mesh=world.mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    shard = across.weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = MethodType(halved, shard), MethodType(widened, shard)
    with pytest.raises(StateError, match="cannot be sharded along dim 1: .* has all-gather hooks"):
        across(batch(0))


@ranks(2)
def test_a_class_that_gets_the_protocol_after_wrapping_gathers_itself(world: World) -> None:
    class Late(TwoPart):
        fsdp_pre_all_gather = property()  # type: ignore[assignment]
        fsdp_post_all_gather = property()  # type: ignore[assignment]

    plain = nn.Linear(5, 7)
    quantized = Late.of(plain.weight.detach())
    with torch.no_grad():
        plain.weight.copy_(quantized.dense())
    model = copy.deepcopy(plain)
    model.weight = nn.Parameter(quantized)
    fully_shard(model, mesh=world.mesh)
    with pytest.raises(
        StateError, match="'weight' of unit 'Linear' cannot be all-gathered: it is a Late without all-gather hooks"
    ):
        model(batch(0))
    Late.fsdp_pre_all_gather, Late.fsdp_post_all_gather = TwoPart.fsdp_pre_all_gather, TwoPart.fsdp_post_all_gather
    square(model(world.mine(batch(0)))).backward()
    square(plain(batch(0))).backward()
    assert_same_grads(model, plain)


@pytest.mark.proves("38a")
@ranks(2)
def test_half_of_the_protocol_is_refused_by_name(world: World) -> None:
    class Half(TwoPart):
        fsdp_post_all_gather = property()  # type: ignore[assignment]

    linear = nn.Linear(5, 7)
    linear.weight = nn.Parameter(Half.of(linear.weight.detach()))
    with pytest.raises(
        ValueError, match="'weight' cannot be sharded: its class Half defines one half .* Define fsdp_post_all_gather"
    ):
        fully_shard(linear, mesh=world.mesh)
    whole = nn.Linear(5, 7)
    whole.weight = nn.Parameter(TwoPart.of(whole.weight.detach()))
    with pytest.raises(ValueError, match="cannot be sharded along dim 1"):
        fully_shard(whole, mesh=world.mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


# --- what torch's tools see ---------------------------------------------------------------------------------------------------


def counted(model: nn.Module, inputs: Tensor) -> list[dict[str, int]]:
    """What CommDebugMode counts in a forward and in its backward, by the name of the operation."""
    found = []
    with CommDebugMode() as mode:
        loss = square(model(inputs))
    found.append({str(op): number for op, number in mode.get_comm_counts().items()})
    with CommDebugMode() as mode:
        loss.backward()
    found.append({str(op): number for op, number in mode.get_comm_counts().items()})
    return found


OPERATIONS = {
    "all_gather": "c10d._allgather_base_",
    "reduce_scatter": "c10d._reduce_scatter_base_",
    "all_reduce": "c10d.allreduce_",
}


def our_counts(model: nn.Module, inputs: Tensor) -> list[dict[str, int]]:
    """What `counting()` counts in a forward and in its backward, without heartbeats, by the names of CommDebugMode."""
    with fullshard.counting(model) as forward:
        loss = square(model(inputs))
    with fullshard.counting(model) as backward:
        loss.backward()
    return [dict(Counter(OPERATIONS[m.kind] for m in each if m.kind in OPERATIONS)) for each in (forward, backward)]


@pytest.mark.parametrize("hybrid", [False, True])
@ranks(2, 4)
def test_counting_counts_what_comm_debug_mode_counts_of_fsdp2(world: World, hybrid: bool) -> None:
    """CommDebugMode itself sees nothing on gloo, where gathers and reductions are messages between pairs."""
    shape = (world.size // 2, 2) if hybrid else (world.size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    plain = Stack()
    theirs, ours = copy.deepcopy(plain), shard_stack(copy.deepcopy(plain), mesh)
    for module in (*theirs.blocks, theirs):
        dist.fsdp.fully_shard(module, mesh=mesh)
    for step in range(2):
        inputs = world.mine(batch(step))
        expected = counted(theirs, inputs)
        found = our_counts(ours, inputs)
        if hybrid and world.size == 2:  # one replica: nothing is sent to sum over it
            expected, found = (
                [{op: number for op, number in counts.items() if "allreduce" not in op} for counts in each]
                for each in (expected, found)
            )
        assert found == expected
        assert expected[0] == {"c10d._allgather_base_": 4} and expected[1]["c10d._reduce_scatter_base_"] == 4
        square(plain(batch(step))).backward()
        assert_same_grads(ours, plain)


@ranks(2)
def test_the_profiler_names_gathers_and_reductions(world: World) -> None:
    model = shard_stack(Stack(1), world.mesh)
    with torch.profiler.profile() as profile:
        square(model(world.mine(batch(0)))).backward()
    names = Counter(event.name for event in profile.events() if event.name.startswith("fullshard::"))
    assert names["fullshard::all_gather"] == 3 and names["fullshard::reduce_scatter"] == 2
    assert names["fullshard::unshard Stack"] == 1 and names["fullshard::reduce blocks.0"] == 1


# --- ties and lists --------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def words(step: int) -> Tensor:
    return torch.randint(0, 11, (12, 4), generator=torch.Generator().manual_seed(step))


@pytest.mark.proves("7a")
@pytest.mark.parametrize("how", ["embed", "head", "list", "neither", "top-down"])
@ranks(1, 2, 3)
@pytest.mark.filterwarnings("ignore:parameter")
def test_a_tie_has_one_owner_however_its_modules_are_sharded(world: World, how: str) -> None:
    def shard(m: nn.Module) -> None:
        mesh = {"mesh": world.mesh}
        if how == "top-down":
            fully_shard(m, **mesh)
        if how == "embed":
            fully_shard(m.embed, **mesh)
        fully_shard(m.body, **mesh)
        if how == "head":
            fully_shard(m.head, **mesh)
        if how == "list":
            fully_shard([m.embed, m.head], **mesh)
        if how != "top-down":
            fully_shard(m, **mesh)

    sharded, _ = train_both(world, Decoder(), shard, inputs=words, steps=3)
    assert sharded.head.weight is sharded.embed.weight
    with fullshard.counting(sharded) as messages:
        square(sharded(world.mine(words(0)))).backward()
    reduced = sum(m.nbytes for m in messages if m.kind == "reduce_scatter") // 4
    padded = -(-11 // world.size) * world.size * 6
    assert padded <= reduced < 2 * padded, "the tied weight travels once"


class Chunked(nn.Module):
    """A loss over chunks: the head runs once per chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, chunks: int = 4) -> Tensor:
        h = self.norm(self.body(x))
        return torch.cat([self.head(part) for part in h.chunk(chunks)])


@ranks(1, 2)
def test_a_list_whose_head_runs_once_per_chunk_gathers_again_for_the_later_chunks_and_reduces_once(world: World) -> None:
    model = Chunked()
    sharded = copy.deepcopy(model)
    fully_shard([sharded.norm, sharded.head], mesh=world.mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=world.mesh)
    for step in range(3):
        with fullshard.counting(sharded) as messages:
            square(sharded(world.mine(batch(step)), chunks=3)).backward()
        square(model(batch(step))).backward()
        counts = kinds(messages)
        assert counts["reduce_scatter"] == 2
        assert counts["all_gather"] == 4, "the list twice for forward and once for backward, the root once"
    assert_same_grads(sharded, model)


@ranks(2)
def test_modules_of_a_list_run_in_any_order_and_alone(world: World) -> None:
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)])
    sharded = copy.deepcopy(model)
    fully_shard(list(sharded), mesh=world.mesh)
    for run in ((0, 1, 2), (2, 0, 1), (1,), (2, 2, 0), (0, 1, 2)):
        for m, x in ((sharded, world.mine(batch(0))), (model, batch(0))):
            for index in run:
                x = m[index](x)
            square(x).backward()
        assert_same_grads(sharded, model)


# --- methods ---------------------------------------------------------------------------------------------------------------


class Generator(Stack):
    def encode(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = torch.tanh(self.forward(x) @ self.inp.weight[:3, :5])
        return x


@pytest.mark.proves("3b")
@ranks(1, 2)
def test_other_methods_gather_as_forward_does(world: World) -> None:
    model = Generator()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    fullshard.register_fsdp_forward_method(sharded, "encode")
    fullshard.register_fsdp_forward_method(sharded.head, "forward")  # no unit: nothing happens
    with pytest.raises(ValueError, match="FSDPGenerator has no method 'decode' to register"):
        fullshard.register_fsdp_forward_method(sharded, "decode")
    for _ in range(2):
        square(sharded.encode(world.mine(batch(0)), times=2)).backward()
        square(model.encode(batch(0), times=2)).backward()
        assert_same_grads(sharded, model)
    with torch.no_grad():
        assert_near(sharded.encode(batch(0)), model.encode(batch(0)), "encode")
    with pytest.raises(RuntimeError):
        sharded.encode(torch.ones(2, 99))
    train_step(world, sharded, model)
    assert_same_grads(sharded, model)
    twin = copy.deepcopy(sharded)
    assert_near(twin.encode(batch(1)), model.encode(batch(1)), "encode of a copy")


@ranks(2)
def test_share_comm_ctx_takes_units_alone(world: World) -> None:
    one, two = (shard_stack(Stack(), world.mesh) for _ in range(2))
    fullshard.share_comm_ctx([one, two])
    with pytest.raises(ValueError, match="Expected modules that fully_shard was called on, got Linear"):
        fullshard.share_comm_ctx([one, nn.Linear(2, 2)])


@ranks(2)
def test_reset_iter_state_forgets_an_interrupted_step_and_what_was_kept(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    with sharded.accumulate():
        square(sharded(world.mine(batch(5)))).backward()
    broken = sharded.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sharded(world.mine(batch(0)))
    broken.remove()
    sharded.reset_iter_state()
    sharded.blocks[0].reset_iter_state()
    train_step(world, sharded, model)
    assert_same_grads(sharded, model)


@ranks(2)
def test_pieces_of_backward_as_pipeline_schedules_run_them(world: World) -> None:
    """Microbatches without communication, then `post_backward` of each group and the final callback by hand."""
    import torch.distributed.fsdp as theirs

    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, reshard_after_forward=False)
    for _ in range(2):
        for handle in [m.unshard(async_op=True) for m in (sharded, *sharded.blocks)]:
            handle.wait()
        with fullshard.counting(sharded) as messages:
            outputs = [sharded(part) for part in world.mine(batch(0)).chunk(2)]
            for out in outputs:
                sharded.set_is_last_backward(False)
                sharded.set_reshard_after_backward(False)
                sharded.set_requires_gradient_sync(False)
                torch.autograd.backward(square(out) / 2)
            assert all(one.kind == "talk" for one in messages), "all microbatches without a message of training"
        assert all(not isinstance(p, DTensor) for p in sharded.parameters()), "unsharded by hand: the leaves of autograd"
        sharded.set_is_last_backward(True)
        sharded.set_reshard_after_backward(True)
        sharded.set_requires_gradient_sync(True)
        view = theirs.fully_shard.state(sharded)
        for one in view._state_ctx.all_states:
            for group in one._fsdp_param_groups:
                group.post_backward()
        view._root_post_backward_final_callback()
        for unit in (sharded, *sharded.blocks):
            unit.reshard()
        square(model(batch(0))).backward()
        assert_same_grads(sharded, model)


# --- in torch's place --------------------------------------------------------------------------------------------------------


def test_install_replaces_names_where_they_are_and_can_be_undone() -> None:
    import types

    import torch.distributed._composable.fsdp as old
    import torch.distributed.fsdp as new

    original = new.fully_shard
    early = types.ModuleType("early_client")
    early.shard, early.FSDPModule = new.fully_shard, new.FSDPModule
    sys.modules["early_client"] = early
    try:
        with fullshard.installed():
            fullshard.install()  # twice is once
            from torch.distributed.fsdp import MixedPrecisionPolicy as Late

            assert Late is fullshard.MixedPrecisionPolicy
            assert new.fully_shard is old.fully_shard is early.shard is fullshard.fully_shard
            assert early.FSDPModule is fullshard.FSDPModule
        assert new.fully_shard is old.fully_shard is early.shard is original is not fullshard.fully_shard
        assert new.FSDPModule is early.FSDPModule is not fullshard.FSDPModule
        with pytest.raises(StateError, match="cannot undo anything"):
            fullshard.uninstall()
    finally:
        del sys.modules["early_client"]


@ranks(2)
def test_policies_of_torch_made_before_are_understood(world: World) -> None:
    import torch.distributed.fsdp as theirs

    model = Stack()
    sharded = shard_stack(
        copy.deepcopy(model),
        world.mesh,
        mp_policy=theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=theirs.CPUOffloadPolicy(pin_memory=False),
    )
    assert sharded._fullshard_unit.options.mp == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert sharded._fullshard_unit.options.offload == fullshard.CPUOffloadPolicy(pin_memory=False)
    square(sharded(world.mine(batch(0))).float()).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model, rounding(torch.bfloat16))


@pytest.mark.processes
def test_a_script_for_torch_runs_unchanged_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import FSDPModule, fully_shard\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=0, world_size=1)\n"
        "model = fully_shard(torch.nn.Linear(4, 2))\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
        "print(type(model).__mro__[1].__module__, isinstance(model, FSDPModule), model.weight.grad.full_tensor().sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    done = command_line("run", str(script), str(tmp_path / "store"), cwd=tmp_path)
    assert done.stdout.split() == ["fullshard.frontend.module", "True", "24.0"], done.stderr
    assert full(torch.ones(1)) == 1 and assert_same_parameters is not None
