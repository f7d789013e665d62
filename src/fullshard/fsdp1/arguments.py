"""Check and resolve the arguments of FSDP1's constructor: strategy, mesh, device, ignored parameters, initialisation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
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
    Runtime,
    UnitName,
    clean_name,
    logical_parameters,
    replacement_of,
    resolve_mesh,
    subgroup_of,
    unit_of,
)
from fullshard.ext.materialize import common_seed, seeded
from fullshard.fsdp1.state_dicts import ComparedValues, agree
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.wrap.whole_model import with_submodules

HYBRID = (ShardingStrategy.HYBRID_SHARD, _torch.HYBRID_ZERO2)
_NO_RESHARD_AFTER_FORWARD = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, _torch.HYBRID_ZERO2)
Groups = Any  # a ProcessGroup, or a pair of them: (to shard over, to replicate over)


@dataclass(eq=False)
class FSDP1Arguments:
    """The arguments of the constructor, checked before anything has changed, and what follows from them.

    Raises ValueError for values of the wrong type and for combinations that fullshard does not support.
    """

    module: nn.Module
    process_group: Groups
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    ignored_modules: Iterable[nn.Module] | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | str | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    ignored_states: Iterable[Any] | None
    device_mesh: DeviceMesh | None

    def __post_init__(self) -> None:
        _check_types(self)
        self.strategy = self.sharding_strategy or ShardingStrategy.FULL_SHARD
        _check_combinations(self)
        # Ignored modules with their submodules, and ignored parameters with those of these modules.
        self.left_out, self.ignored = _ignored(self.ignored_modules, self.ignored_states)
        self.device = _device(self.device_id, self.device_mesh)  # to move to

    def overridden(self, options: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the arguments for wrapper `name` inside this one, overridden by the options that a policy returned for it."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "module"}
        for option in options:
            if option not in own:
                raise ValueError(
                    f"The policy returns the option '{option}' for '{name}', which FullyShardedDataParallel does not have. "
                    f"Expected one of {sorted(own)}."
                )
        ignored = {"ignored_modules": None, "ignored_states": (*self.ignored, *self.left_out)}
        return {**own, **ignored, "limit_all_gathers": True, "use_orig_params": True, **options}

    @property
    def options(self) -> dict[str, Any]:
        """The options of `fully_shard` that correspond to the arguments."""
        offload = self.cpu_offload is not None and self.cpu_offload.offload_params
        return {
            "mesh": self.mesh,
            "ignored_params": set(self.ignored),
            "reshard_after_forward": False if self.strategy in _NO_RESHARD_AFTER_FORWARD else None,
            "mp_policy": precision_of(self.mixed_precision or MixedPrecision()),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh to shard over: (shard), (replicate, shard), or for NO_SHARD (replicate, 1). Collective.

        Wrappers with equal arguments share one mesh, because every new mesh creates process groups.
        """
        strategy, groups, mesh, device_type = self.strategy, self.process_group, self.device_mesh, self._device_type
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

    @property
    def _device_type(self) -> str:
        """The device type to compute on: of the mesh, `device_id`, the parameters or the accelerator, in this order."""
        if self.device_mesh is not None:
            return self.device_mesh.device_type
        if self.device is not None:
            return self.device.type
        found = [p.device.type for p in self.module.parameters() if p.device.type not in ("cpu", "meta")]
        accelerator = _torch.accelerator()
        return found[0] if found else "cpu" if accelerator is None else accelerator.type


def precision_of(mixed: MixedPrecision) -> MixedPrecisionPolicy:
    """Return the policy of a unit for FSDP1's mixed precision, whose inputs the wrapper casts."""
    # Without reduce_dtype, FSDP1 reduces in param_dtype. FSDP2 (torch 2.15) reduces in the dtype of the gradients instead.
    return MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype or mixed.param_dtype, cast_forward_inputs=False)


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


def _check_combinations(given: FSDP1Arguments) -> None:
    """Raise ValueError for combinations of arguments that are not supported."""
    module, mixed, groups = given.module, given.mixed_precision, given.process_group
    mesh, strategy = given.device_mesh, given.strategy
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
) -> tuple[dict[nn.Module, None], list[nn.Parameter]]:
    """Return the ignored modules and the ignored parameters, both with the contents of submodules."""
    if modules is not None and states is not None:
        raise ValueError(
            "FullyShardedDataParallel expected ignored_modules or ignored_states, got both. Pass only ignored_states."
        )
    name, kind, several = "ignored_states", "parameters or modules", states
    if modules is not None:
        name, kind, several = "ignored_modules", "modules", modules
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
    whole = [item for item in given if isinstance(item, nn.Module)]
    return with_submodules(whole, [item for item in given if isinstance(item, nn.Parameter)])


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


def _new_mesh(how: str, groups: Groups, mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """Return a mesh that shards as `how` says: "shard", "hybrid" or "none". `groups`, `mesh`: what the caller passed."""
    if mesh is not None and how != "none":
        return mesh
    if groups is None and how == "shard":
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if how == "shard":
        return DeviceMesh.from_group(groups, device_type, mesh_dim_names=("shard",))
    names = ("replicate", "shard")
    if groups is None and how == "hybrid":
        return init_device_mesh(device_type, _node_shape(device_type), mesh_dim_names=names)
    replicate: Any
    if how == "hybrid":
        shard, replicate = groups
        rows: list[Any] = [None] * replicate.size()
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    else:
        replicate = mesh.get_group() if mesh is not None else groups if groups is not None else dist.group.WORLD
        shard = subgroup_of(replicate, "alone", [dist.get_rank()])
        rows = [[rank] for rank in dist.get_process_group_ranks(replicate)]
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=names)


def _node_shape(device_type: str) -> tuple[int, int]:
    """Return (nodes, ranks per node) of the default process group."""
    devices = 0 if device_type == "cpu" else torch.accelerator.device_count()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or devices)
    world = dist.get_world_size()
    if not ranks_per_node or world % ranks_per_node:
        raise ValueError(
            f"Hybrid sharding without a mesh shards within a node, but the {world} ranks cannot be divided into nodes of "
            f"{ranks_per_node or 'a known number of'} ranks. Pass a 2-D device_mesh (replicate, shard), or run under "
            "torchrun."
        )
    return world // ranks_per_node, ranks_per_node


# --- initialisation ---


def materialize(managed: ManagedTensors, given: FSDP1Arguments) -> None:
    """Initialise tensors on the meta device, and broadcast the first rank's values if `sync_module_states`. Collective.

    Raises ValueError on every rank if only some ranks have the module on the meta device, without `sync_module_states`.
    """
    sync, device = given.sync_module_states, _torch.device_of(given.mesh.device_type)
    left_out = {id(one) for one in (*given.ignored, *given.left_out)}

    def is_on_meta(module: nn.Module) -> bool:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        return any(tensor.device.type == "meta" and id(tensor) not in left_out for tensor in own)

    waiting = [module for module in managed.modules if id(module) not in left_out and is_on_meta(module)]
    name, communicator = type(managed.modules[-1]).__name__, Runtime.of(device, CommPolicy()).communicator
    ranks = Agreement(communicator, [resolve_mesh(given.mesh)], UnitName(name), "FullyShardedDataParallel()", name)
    if not sync and not ranks.all_equal(bytes([bool(waiting)])):
        raise ValueError(
            "Some ranks have this module on the meta device and others have values for it. Pass sync_module_states=True to "
            "broadcast the values of the first rank."
        )
    # Without a broadcast, all ranks must draw equal random numbers: seed them with a common seed.
    drawing: Any = seeded(device, common_seed(ranks)) if waiting and not sync else nullcontext()
    init = given.param_init_fn or partial(_reset, device=device)

    def give_values() -> tuple[None, ComparedValues]:
        """Initialise the modules, and return the layout of the tensors to broadcast, which must be equal on all ranks."""
        if not sync:
            _warn_of_partly_meta(waiting, left_out)
        initialised: set[int] = set()
        with torch.no_grad(), drawing:
            for module in waiting:
                _initialise(module, init, initialised)
        left = [type(module).__name__ for module in waiting if is_on_meta(module)]
        if left:
            raise ValueError(
                f"param_init_fn left parameters or buffers of {left[:3]} on the meta device. It must allocate the tensors of "
                "each module that it is called with, by module.to_empty(device=..., recurse=False), and initialise them."
            )
        named = to_broadcast if sync else {}
        return None, {name: {"is": f"(shape {tuple(tensor.shape)}, {tensor.dtype})"} for name, tensor in named.items()}

    # An earlier wrapper has broadcast the parameters that it has sharded.
    refs = [r for r in managed.refs if replacement_of(r.parameter) is None and not logical_parameters([r.parameter])]
    to_broadcast = {**{r.name: r.parameter for r in refs}, **{name: buffer for name, _, buffer in managed.buffers}}
    if waiting or sync:
        subject = "sync_module_states: the modules"
        agree(ranks, give_values, subject=subject, advice="Build the same module on all ranks.")
    if sync:
        ranks.broadcast(to_broadcast.values())


def _initialise(module: nn.Module, init: Callable[[nn.Module], object], initialised: set[int]) -> None:
    """Call `init` with a module. Its tensors get new values but keep their identity, and with it ties and shared buffers.

    `initialised`: ids of the tensors that have values. A tied parameter keeps those of the first module.
    """
    registries: tuple[dict[str, Any], ...] = _torch.parameters_of(module), _torch.buffers_of(module)
    slots = [(registry, name, one) for registry in registries for name, one in registry.items() if one is not None]
    for registry, name, tensor in slots:
        if id(tensor) in initialised and isinstance(tensor, nn.Parameter):  # `init` writes to a stand-in
            registry[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    init(module)
    for registry, name, tensor in slots:
        if registry[name] is not tensor and id(tensor) not in initialised:
            torch.utils.swap_tensors(tensor, registry[name])
        setattr(module, name, tensor)  # not in the registry, since RNNs have a second list of their parameters
        initialised.add(id(tensor))


def _warn_of_partly_meta(waiting: Iterable[nn.Module], left_out: set[int]) -> None:
    for module in waiting:
        own = [(name, one) for name, one in module.named_parameters(recurse=False) if id(one) not in left_out]
        loaded = [name for name, parameter in own if parameter.device.type != "meta"]
        if loaded:
            warnings.warn(
                f"{type(module).__name__} has values for {loaded}, but its other tensors are on the meta device. The whole "
                "module is initialised, so these values are likely to be lost.",
                stacklevel=4,
            )


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{type(module).__name__} cannot be initialised: it has parameters or buffers on the meta device and no "
            "reset_parameters(). Pass param_init_fn=."
        )
    module.to_empty(device=device, recurse=False)
    reset()


_ORIGINAL_DTYPE = "_fullshard_original_dtype"  # attribute of a buffer that a wrapper has cast: its dtype before


def cast_buffers(managed: ManagedTensors, given: FSDP1Arguments) -> dict[str, torch.dtype]:
    """Cast the wrapper's own floating-point buffers to `buffer_dtype`, and return their previous dtypes by name.

    A buffer with several names is returned under each of them.
    """
    dtype = given.mixed_precision.buffer_dtype if given.mixed_precision is not None else None
    before: dict[int, torch.dtype] = {}
    for _, slot, buffer in managed.buffers if dtype is not None else ():
        if buffer.is_floating_point() and slot.module not in given.left_out:
            # Kept with the buffer, since several wrappers may share it, and the first one casts it.
            before[id(buffer)] = buffer.__dict__.setdefault(_ORIGINAL_DTYPE, buffer.dtype)
            buffer.data = buffer.data.to(dtype)
    return {
        clean_name(name): before[id(buffer)]
        for name, buffer in given.module.named_buffers(remove_duplicate=False)
        if id(buffer) in before
    }
