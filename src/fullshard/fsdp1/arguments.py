"""Check and resolve the arguments of FSDP1's constructor: strategy, mesh, device, ignored parameters, initialisation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fullshard import _torch
from fullshard.core import (
    Agreement,
    ManagedTensors,
    ParamRef,
    Runtime,
    UnitName,
    clean_name,
    collect,
    logical_parameters,
    replacement_of,
    resolve_mesh,
    subgroup_of,
    unit_of,
)
from fullshard.ext.materialize import common_seed, seeded
from fullshard.fsdp1.state_dicts import ComparedValues, agree
from fullshard.policies import CommPolicy

HYBRID = (ShardingStrategy.HYBRID_SHARD, _torch.HYBRID_ZERO2)
Groups = Any  # a ProcessGroup, or a pair of them: (to shard over, to replicate over)


@dataclass(frozen=True, eq=False)
class FSDP1Arguments:
    """The arguments of the constructor, checked before anything has changed. The fields after `device_mesh` follow from them.

    Raises ValueError for values of the wrong type and for combinations that fullshard does not support.
    """

    module: nn.Module
    process_group: Groups = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | str | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    ignored_states: Iterable[Any] | None = None
    device_mesh: DeviceMesh | None = None
    strategy: ShardingStrategy = field(init=False)
    device: torch.device | None = field(init=False)  # to move to
    ignored: tuple[nn.Parameter, ...] = field(init=False)  # including the parameters of ignored modules
    left_out: tuple[nn.Module, ...] = field(init=False)  # ignored modules with their submodules

    def __post_init__(self) -> None:
        _check_types(self)
        strategy, mesh = self.sharding_strategy or ShardingStrategy.FULL_SHARD, self.device_mesh
        _check_combinations(self.module, self.mixed_precision, self.process_group, mesh, strategy)
        ignored, left_out = _ignored(self.ignored_modules, self.ignored_states)
        found = {"strategy": strategy, "device": _device(self.device_id, mesh), "ignored": ignored, "left_out": left_out}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def offload(self) -> bool:
        """True if shards, gradients and optimizer states are in host memory."""
        return self.cpu_offload is not None and self.cpu_offload.offload_params

    def overridden(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for a wrapper inside this one, overridden by the options that a policy returned for it."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.init and one.name != "module"}
        ignored = {"ignored_modules": None, "ignored_states": (*self.ignored, *self.left_out)}
        return {**own, **ignored, "limit_all_gathers": True, "use_orig_params": True, **options}


_EXPECTED: dict[str, tuple[Any, str]] = {  # argument -> (its type, description for the error text)
    "process_group": ((dist.ProcessGroup, tuple), "a ProcessGroup, a tuple of two, or None"),
    "sharding_strategy": (ShardingStrategy, "a ShardingStrategy such as ShardingStrategy.FULL_SHARD, or None"),
    "cpu_offload": (CPUOffload, "a CPUOffload such as CPUOffload(offload_params=True), or None"),
    "backward_prefetch": (BackwardPrefetch, "BackwardPrefetch.BACKWARD_PRE, BACKWARD_POST, or None"),
    "mixed_precision": (MixedPrecision, "a MixedPrecision such as MixedPrecision(param_dtype=torch.bfloat16), or None"),
    "param_init_fn": (Callable, "a function of one module, or None"),
    "device_mesh": (DeviceMesh, "a DeviceMesh, or None"),
}


def _check_types(given: FSDP1Arguments) -> None:
    """Raise ValueError if an argument of the constructor has the wrong type."""
    for name, (kind, description) in _EXPECTED.items():
        value = getattr(given, name)
        if value is not None and not isinstance(value, kind):
            got = f"a {type(value).__name__}" if name == "process_group" else repr(value)
            raise ValueError(f"Expected {name} to be {description}, got {got}.")
    for name in ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"):
        if not isinstance(getattr(given, name), bool):
            raise ValueError(f"Expected {name} to be True or False, got {getattr(given, name)!r}.")
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(given.mixed_precision, name, None)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"Expected mixed_precision.{name} to be a torch.dtype, or None, got {dtype!r}.")


def _check_combinations(
    module: nn.Module, mixed: MixedPrecision | None, groups: Groups, mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> None:
    """Raise ValueError for combinations of arguments that are not supported."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"Expected an nn.Module to wrap with FullyShardedDataParallel, got {type(module).__name__}.")
    if mixed is not None and mixed.keep_low_precision_grads:
        raise ValueError(
            "MixedPrecision(keep_low_precision_grads=True) is not supported: a Parameter's .grad has the dtype of the "
            "Parameter, as in all of torch. To keep gradients in low precision, cast the model before wrapping it: "
            "model.to(torch.bfloat16)"
        )
    if groups is not None and mesh is not None:
        raise ValueError("FullyShardedDataParallel expected process_group or device_mesh, got both. Pass one of them.")
    pair = isinstance(groups, tuple)
    if pair and (len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups)):
        kinds = ", ".join(type(group).__name__ for group in groups)
        raise ValueError(
            f"Expected process_group to be a pair of ProcessGroups (to shard over, to replicate over), got ({kinds})."
        )
    if pair and strategy not in HYBRID:
        raise ValueError(
            f"Expected one ProcessGroup for {strategy.name}, got a pair, which is for hybrid sharding. Pass one process_group, "
            "or sharding_strategy=HYBRID_SHARD."
        )
    if groups is not None and not pair and strategy in HYBRID:
        raise ValueError(
            f"{strategy.name} expected a pair of process groups (to shard over, to replicate over), a 2-D device_mesh, or "
            "neither, got one process group."
        )
    if mesh is not None and mesh.ndim != (2 if strategy in HYBRID else 1):
        raise ValueError(
            f"{strategy.name} expected a {'2' if strategy in HYBRID else '1'}-D device_mesh"
            f"{' (replicate, shard)' if strategy in HYBRID else ''}, got a {mesh.ndim}-D one."
        )


def _ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[tuple[nn.Parameter, ...], tuple[nn.Module, ...]]:
    """Return the ignored parameters and the ignored modules, both with the contents of submodules."""
    if modules is not None and states is not None:
        raise ValueError(
            "FullyShardedDataParallel expected ignored_modules or ignored_states, got both. Pass only ignored_states."
        )
    name, kind = ("ignored_states", "parameters or modules") if modules is None else ("ignored_modules", "modules")
    several = states if modules is None else modules
    if several is not None and (isinstance(several, (nn.Module, Tensor, str)) or not isinstance(several, Iterable)):
        raise ValueError(f"Expected {name} to contain several {kind}, got a {type(several).__name__}. Pass a list.")
    given = list(several or ())
    for item in given:
        if not isinstance(item, nn.Module) and (modules is not None or not isinstance(item, nn.Parameter)):
            raise ValueError(f"Expected {name} to contain {kind}, got a {type(item).__name__}.")
        if isinstance(item, nn.Module) and any(unit_of(inner) is not None for inner in item.modules()):
            raise ValueError(
                f"Expected {name} to contain unsharded modules, got a {type(item).__name__} that is already sharded."
            )
    whole = [inner for item in given if isinstance(item, nn.Module) for inner in item.modules()]
    single = [item for item in given if isinstance(item, nn.Parameter)]
    return (*single, *(p for module in whole for p in module.parameters(recurse=False))), tuple(whole)


def device_type_of(module: nn.Module, given: FSDP1Arguments) -> str:
    """Return the device type to compute on: of the mesh, `device_id`, the parameters or the accelerator, in this order."""
    if given.device_mesh is not None:
        return given.device_mesh.device_type
    if given.device is not None:
        return given.device.type
    first = next((p.device.type for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    if first is not None:
        return first
    accelerator = _torch.accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _device(device_id: int | str | torch.device | None, mesh: DeviceMesh | None) -> torch.device | None:
    """Return the device to move to.

    Raises ValueError if it is not the current device of this rank, or if the mesh has another device type.
    """
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise ValueError(f"Expected device_id to be an int, a string, a torch.device or None, got {device_id!r}.")
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise ValueError(
                f"device_id={device_id} cannot be used: torch finds no accelerator. Omit it, or pass torch.device('cpu')."
            )
        device_id = torch.device(accelerator.type, device_id)
    elif isinstance(device_id, str):
        try:
            device_id = torch.device(device_id)
        except RuntimeError as wrong:
            raise ValueError(f"device_id={device_id!r} is not a device. Pass a device such as 'cpu' or 'cuda:0'.") from wrong
    if device_id.type != "cpu":
        current = _torch.device_of(device_id.type).index
        if device_id.index not in (None, current):
            raise ValueError(
                f"Expected device_id to be the current device, {current}, got {device_id}. Call "
                f"torch.{device_id.type}.set_device({device_id.index}) before wrapping."
            )
    if mesh is not None and device_id.type != mesh.device_type:
        raise ValueError(
            f"Expected device_id of the device_mesh's type, {mesh.device_type}, got {device_id}. Pass one of them."
        )
    return device_id


# Meshes by (owner ids, kind of mesh, device type). The value keeps the owner alive, so that its id is not used again.
_MESHES: dict[Any, tuple[Any, DeviceMesh]] = {}


def mesh_of(given: FSDP1Arguments, device_type: str) -> DeviceMesh:
    """Return the mesh of a wrapper: (shard), (replicate, shard), or for NO_SHARD (replicate, 1).

    Wrappers with equal arguments share one mesh, because every new mesh creates process groups.
    """
    strategy, groups, mesh = given.strategy, given.process_group, given.device_mesh
    how = "hybrid" if strategy in HYBRID else "none" if strategy is ShardingStrategy.NO_SHARD else "shard"
    owner = mesh if mesh is not None else groups if groups is not None else dist.group.WORLD
    nodes = _node_shape(device_type) if how == "hybrid" and mesh is None and groups is None else None
    key = (tuple(map(id, owner)) if isinstance(owner, tuple) else id(owner), how, device_type, nodes)
    if key not in _MESHES:
        for other, (_, made) in list(_MESHES.items()):
            if not all(map(_torch.is_alive, _torch.groups_of(made))):
                del _MESHES[other]
        _MESHES[key] = owner, _new_mesh(how, groups, mesh, device_type)
    return _MESHES[key][1]


def _new_mesh(how: str, groups: Groups, mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    names = ("replicate", "shard")
    if how == "hybrid":
        if mesh is not None:
            return mesh
        if groups is None:
            return init_device_mesh(device_type, _node_shape(device_type), mesh_dim_names=names)
        shard, replicate = groups
        rows: list[Any] = [None] * replicate.size()
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        return DeviceMesh.from_group(
            [replicate, shard], device_type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=names
        )
    if how == "shard":
        if mesh is not None:
            return mesh
        if groups is None:
            return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        return DeviceMesh.from_group(groups, device_type, mesh_dim_names=("shard",))
    replicate_group: Any = mesh.get_group() if mesh is not None else groups if groups is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(replicate_group)
    own_group = subgroup_of(replicate_group, "alone", [dist.get_rank()])
    return DeviceMesh.from_group(
        [replicate_group, own_group], device_type, mesh=torch.tensor(ranks, device="cpu").view(-1, 1), mesh_dim_names=names
    )


def _node_shape(device_type: str) -> tuple[int, int]:
    """Return (nodes, ranks per node) of the default process group."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    ranks_per_node = (
        int(local_world_size) if local_world_size else 0 if device_type == "cpu" else torch.accelerator.device_count()
    )
    world = dist.get_world_size()
    if not ranks_per_node or world % ranks_per_node:
        raise ValueError(
            f"Hybrid sharding without a mesh shards within a node, but the {world} ranks cannot be divided into nodes of "
            f"{ranks_per_node or 'a known number of'} ranks. Pass a 2-D device_mesh (replicate, shard), or run under "
            "torchrun."
        )
    return world // ranks_per_node, ranks_per_node


# --- initialisation ---


def materialize(managed: ManagedTensors, given: FSDP1Arguments, mesh: DeviceMesh) -> None:
    """Initialise tensors on the meta device, and broadcast the first rank's values if `sync_module_states`. Collective.

    Raises ValueError on every rank if only some ranks have the module on the meta device, without `sync_module_states`.
    """
    # A parameter may be tied to one that an earlier wrapper has materialized. Use that one, so that they stay tied.
    known = [ref.parameter.__dict__.get(_MATERIALIZED) for ref in managed.refs]
    for ref, parameter in zip(managed.refs, known):
        _install(ref, parameter)
    if any(parameter is not None for parameter in known):
        _collect_again(managed, given)
    shared = _shared_buffers(managed)
    skipped = set(map(id, given.left_out))
    waiting = [module for module in managed.modules if id(module) not in skipped and _on_meta(module, given)]
    device = _torch.device_of(mesh.device_type)
    ranks = _agreement(managed, mesh, device)
    on_meta = torch.tensor([[bool(waiting)]], dtype=torch.uint8, device="cpu")
    if not given.sync_module_states and ranks.first_unequal(on_meta) is not None:
        raise ValueError(
            "Some ranks have this module on the meta device and others have values for it. Pass sync_module_states=True to "
            "broadcast the values of the first rank."
        )
    # Without a broadcast, all ranks must draw equal random numbers: seed them with a common seed.
    drawing: Any = seeded(device, common_seed(ranks)) if waiting and not given.sync_module_states else nullcontext()

    def give_values() -> ManagedTensors:
        with torch.no_grad(), drawing:
            _initialize(waiting, given, managed, shared, device)
        return managed

    if waiting or given.sync_module_states:
        agree(
            ranks,
            give_values,
            _layout if given.sync_module_states else None,
            subject="sync_module_states: the modules",
            advice="Build the same module on all ranks.",
        )
    if given.sync_module_states:
        tensors = [ref.parameter for ref in _own_refs(managed)] + [buffer for _, _, buffer in managed.buffers]
        ranks.broadcast(tensor.detach() for tensor in tensors)


def _own_refs(managed: ManagedTensors) -> list[ParamRef]:
    """Return the parameters that no earlier wrapper has sharded; it has broadcast the others."""
    return [ref for ref in managed.refs if replacement_of(ref.parameter) is None and not logical_parameters([ref.parameter])]


def _collect_again(managed: ManagedTensors, given: FSDP1Arguments) -> None:
    """Update `managed` to the tensors that replaced those of before."""
    fresh = collect([managed.modules[-1]], ignored=given.ignored, is_unit=lambda inner: unit_of(inner) is not None)
    managed.refs[:], managed.buffers[:] = fresh.refs, fresh.buffers


def _initialize(
    waiting: list[nn.Module],
    given: FSDP1Arguments,
    managed: ManagedTensors,
    shared: list[list[tuple[nn.Module, str]]],
    device: torch.device,
) -> None:
    """Initialise the modules in `waiting`, and update `managed` to the tensors that replaced those on the meta device."""
    if not waiting:
        return
    _warn_of_partly_meta(waiting, given)
    init = given.param_init_fn or (lambda module: _reset(module, device))
    for module in waiting:
        init(module)
    left = [type(module).__name__ for module in waiting if _on_meta(module, given)]
    if left:
        raise ValueError(
            f"param_init_fn left parameters or buffers of {left[:3]} on the meta device. It must allocate the tensors of each "
            "module that it is called with, by module.to_empty(device=..., recurse=False), and initialise them."
        )
    # to_empty() gave each slot a Parameter of its own. Install the first one in all slots of a tied parameter again.
    for ref in managed.refs:
        materialized = _torch.parameters_of(ref.slots[0].module)[ref.slots[0].name]
        if materialized is not ref.parameter:
            ref.parameter.__dict__[_MATERIALIZED] = materialized
            _install(ref, materialized)
    for (module, name), *others in shared:
        for other, alias in others:
            _torch.buffers_of(other)[alias] = _torch.buffers_of(module)[name]
    _collect_again(managed, given)


def _layout(managed: ManagedTensors) -> ComparedValues:
    """Return the shape and dtype of each tensor to broadcast, by name; these must be equal on all ranks."""
    named = [(ref.name, ref.parameter) for ref in _own_refs(managed)] + [(name, buffer) for name, _, buffer in managed.buffers]
    return {name: {"is": f"(shape {tuple(tensor.shape)}, {tensor.dtype})"} for name, tensor in named}


_MATERIALIZED = "_fullshard_materialized"  # attribute of a meta parameter: the parameter that replaced it
_ORIGINAL_DTYPE = "_fullshard_original_dtype"  # attribute of a buffer that a wrapper has cast: its dtype before


def _install(ref: ParamRef, parameter: nn.Parameter | None) -> None:
    """Set every slot of `ref` to `parameter`, unless that is None."""
    for slot in ref.slots if parameter is not None else ():
        setattr(slot.module, slot.name, parameter)


def _shared_buffers(managed: ManagedTensors) -> list[list[tuple[nn.Module, str]]]:
    """Return the slots of each buffer that is registered in more than one."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in managed.modules:
        for name, buffer in _torch.buffers_of(module).items():
            if buffer is not None:
                slots.setdefault(id(buffer), []).append((module, name))
    return [several for several in slots.values() if len(several) > 1]


def _warn_of_partly_meta(waiting: Iterable[nn.Module], given: FSDP1Arguments) -> None:
    ignored_ids = set(map(id, given.ignored))
    for module in waiting:
        loaded = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.device.type != "meta" and id(parameter) not in ignored_ids
        ]
        if loaded and not given.sync_module_states:
            warnings.warn(
                f"{type(module).__name__} has values for {loaded}, but its other tensors are on the meta device. The whole "
                "module is initialised, so these values are likely to be lost.",
                stacklevel=4,
            )


def _on_meta(module: nn.Module, given: FSDP1Arguments) -> bool:
    ignored_ids = set(map(id, given.ignored))
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.device.type == "meta" and id(tensor) not in ignored_ids for tensor in own)


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{type(module).__name__} cannot be initialised: it has parameters or buffers on the meta device and no "
            "reset_parameters(). Pass param_init_fn=."
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _agreement(managed: ManagedTensors, mesh: DeviceMesh, device: torch.device) -> Agreement:
    """Return the agreement of the ranks that construct the wrapper."""
    name, communicator = type(managed.modules[-1]).__name__, Runtime.of(device, CommPolicy()).communicator
    return Agreement(communicator, [resolve_mesh(mesh)], UnitName(name), "FullyShardedDataParallel()", name)


def cast_buffers(module: nn.Module, managed: ManagedTensors, given: FSDP1Arguments) -> dict[str, torch.dtype]:
    """Cast the wrapper's own floating-point buffers to `buffer_dtype`, and return their previous dtypes by name.

    A buffer with several names is returned under each of them.
    """
    dtype = given.mixed_precision.buffer_dtype if given.mixed_precision is not None else None
    if dtype is None:
        return {}
    ignored_ids = set(map(id, given.left_out))
    before: dict[int, torch.dtype] = {}
    for _, slot, buffer in managed.buffers:
        if buffer.is_floating_point() and id(slot.module) not in ignored_ids:
            # Kept with the buffer, since several wrappers may share it, and the first one casts it.
            before[id(buffer)] = buffer.__dict__.setdefault(_ORIGINAL_DTYPE, buffer.dtype)
            buffer.data = buffer.data.to(dtype)
    return {
        clean_name(name): before[id(buffer)]
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if id(buffer) in before
    }
