"""The arguments of FSDP1's constructor, resolved: strategy, mesh, device, what is left alone, and first values."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fullshard import _torch
from fullshard.collectives.process_groups import on_release
from fullshard.consistency.collective_log import UnitName
from fullshard.frontend.init import common_seed, seeded
from fullshard.fsdp1.agreement import Facts, Ranks
from fullshard.policies import CommPolicy
from fullshard.runtime.runtime import Runtime
from fullshard.runtime.setup_collectives import SetupCollectives
from fullshard.runtime.unit import unit_of
from fullshard.sharding.mesh import beside, check_names, resolve_mesh
from fullshard.sharding.module_tree import ManagedTensors, ParamRef, clean_name, collect

HYBRID = (ShardingStrategy.HYBRID_SHARD, _torch.HYBRID_ZERO2)
Groups = Any  # a ProcessGroup, or a pair of them: (to shard over, to replicate over)


@dataclass(frozen=True)
class FSDP1Arguments:
    """The arguments of the constructor, checked: what a wrapper and those that it makes below itself have in common."""

    process_group: Groups
    device_mesh: DeviceMesh | None
    strategy: ShardingStrategy
    offload: bool
    prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    mixed_precision: MixedPrecision | None
    init: Callable[[nn.Module], None] | None
    device_id: torch.device | None
    sync: bool
    ignored: tuple[nn.Parameter, ...]
    ignored_modules: tuple[nn.Module, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        process_group: Groups = None,
        device_mesh: DeviceMesh | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[Any] | None = None,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
    ) -> FSDP1Arguments:
        """Raises ValueError for values of the wrong type and for what fullshard does not do, before anything has changed."""
        _check_types(
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            process_group=process_group,
            device_mesh=device_mesh,
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
        )
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        _check(module, mixed_precision, process_group, device_mesh, strategy)
        ignored, skipped = _ignored(ignored_modules, ignored_states)
        device = _device(device_id, device_mesh)
        return cls(
            process_group,
            device_mesh,
            strategy,
            cpu_offload is not None and cpu_offload.offload_params,
            backward_prefetch,
            forward_prefetch,
            mixed_precision,
            param_init_fn,
            device,
            sync_module_states,
            ignored,
            skipped,
        )

    def overridden(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a wrapper below, with what a policy said of it."""
        return {
            "process_group": self.process_group,
            "device_mesh": self.device_mesh,
            "sharding_strategy": self.strategy,
            "cpu_offload": CPUOffload(self.offload),
            "backward_prefetch": self.prefetch,
            "forward_prefetch": self.forward_prefetch,
            "mixed_precision": self.mixed_precision,
            "param_init_fn": self.init,
            "device_id": self.device_id,
            "sync_module_states": self.sync,
            "ignored_states": (*self.ignored, *self.ignored_modules),
            "use_orig_params": True,
            **options,
        }


_EXPECTED: dict[str, tuple[type, str]] = {  # of each argument: its type, and what to give instead of another
    "sharding_strategy": (ShardingStrategy, "a ShardingStrategy such as ShardingStrategy.FULL_SHARD, or None"),
    "cpu_offload": (CPUOffload, "a CPUOffload such as CPUOffload(offload_params=True), or None"),
    "backward_prefetch": (BackwardPrefetch, "BackwardPrefetch.BACKWARD_PRE, BACKWARD_POST, or None"),
    "mixed_precision": (MixedPrecision, "a MixedPrecision such as MixedPrecision(param_dtype=torch.bfloat16), or None"),
    "device_mesh": (DeviceMesh, "a DeviceMesh, or None"),
}


_FLAGS = ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params")


def _check_types(**given: Any) -> None:
    """Raise ValueError for an argument of the constructor that is of another type than it takes."""
    for name, value in given.items():
        if name in _FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: expected True or False")
        elif value is None:
            continue
        elif name == "process_group":
            if not isinstance(value, (dist.ProcessGroup, tuple)):
                kind = type(value).__name__
                raise ValueError(f"process_group is a {kind}: expected a ProcessGroup, a pair of them in a tuple, or None")
        elif name == "param_init_fn":
            if not callable(value):
                raise ValueError(f"param_init_fn={value!r}: expected a function of one module, or None")
        elif not isinstance(value, _EXPECTED[name][0]):
            raise ValueError(f"{name}={value!r}: expected {_EXPECTED[name][1]}")
        elif name == "mixed_precision":
            for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
                dtype = getattr(value, field)
                if dtype is not None and not isinstance(dtype, torch.dtype):
                    raise ValueError(f"mixed_precision.{field}={dtype!r}: expected a torch.dtype, or None")


def _check(
    module: nn.Module, mixed: MixedPrecision | None, groups: Groups, mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> None:
    """Raises ValueError for what fullshard does not do, before anything has changed."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}")
    if mixed is not None and mixed.keep_low_precision_grads:
        raise ValueError(
            "MixedPrecision(keep_low_precision_grads=True): a Parameter's .grad has the Parameter's dtype here, as in all of "
            "torch. To keep gradients in low precision, cast the model before wrapping it: model.to(torch.bfloat16)"
        )
    if groups is not None and mesh is not None:
        raise ValueError("FullyShardedDataParallel takes process_group or device_mesh, got both: give one of them")
    pair = isinstance(groups, tuple)
    if pair and (len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups)):
        kinds = ", ".join(type(group).__name__ for group in groups)
        raise ValueError(f"process_group=({kinds}): expected a pair of ProcessGroups (to shard over, to replicate over)")
    if pair and strategy not in HYBRID:
        raise ValueError(f"process_group is a pair, for hybrid sharding, but sharding_strategy is {strategy.name}")
    if groups is not None and not pair and strategy in HYBRID:
        raise ValueError(
            f"{strategy.name} takes a pair of process groups (to shard over, to replicate over), a 2-D device_mesh, or neither"
        )
    if mesh is not None and mesh.ndim != (2 if strategy in HYBRID else 1):
        raise ValueError(
            f"{strategy.name} takes a {'2' if strategy in HYBRID else '1'}-D device_mesh"
            f"{' (replicate, shard)' if strategy in HYBRID else ''}, got one of {mesh.ndim} axes"
        )
    if mesh is not None:
        check_names(mesh, whole=" and a strategy that is not hybrid")


def _ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[tuple[nn.Parameter, ...], tuple[nn.Module, ...]]:
    """Parameters and modules to leave alone."""
    if modules is not None and states is not None:
        raise ValueError("FullyShardedDataParallel got ignored_modules and ignored_states: give ignored_states alone")
    name, kind = ("ignored_states", "parameters or modules") if modules is None else ("ignored_modules", "modules")
    several = states if modules is None else modules
    if several is not None and (isinstance(several, (nn.Module, Tensor, str)) or not isinstance(several, Iterable)):
        raise ValueError(f"{name} takes several {kind}, got a {type(several).__name__}: give a list")
    given = list(several or ())
    for item in given:
        if not isinstance(item, nn.Module) and (modules is not None or not isinstance(item, nn.Parameter)):
            raise ValueError(f"{name} has a {type(item).__name__}: expected {kind}")
        if isinstance(item, nn.Module) and any(unit_of(inner) is not None for inner in item.modules()):
            raise ValueError(f"{name} has a {type(item).__name__} that is sharded already: give modules that are not")
    whole = [inner for item in given if isinstance(item, nn.Module) for inner in item.modules()]
    single = [item for item in given if isinstance(item, nn.Parameter)]
    return (*single, *(p for module in whole for p in module.parameters(recurse=False))), tuple(whole)


def device_type_of(module: nn.Module, given: FSDP1Arguments) -> str:
    """The type of the device to compute on: of the mesh, of `device_id`, of the module's parameters, or the accelerator's."""
    if given.device_mesh is not None:
        return given.device_mesh.device_type
    if given.device_id is not None:
        return given.device_id.type
    first = next((p.device.type for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    if first is not None:
        return first
    accelerator = _torch.accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _device(device_id: int | str | torch.device | None, mesh: DeviceMesh | None) -> torch.device | None:
    """The device to move to. Raises ValueError for one that is not this rank's current one, or not of the mesh."""
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise ValueError(f"device_id={device_id!r}: expected a number, a string or a torch.device, or None")
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise ValueError(f"device_id={device_id}, but torch sees no accelerator: leave it out, or give torch.device('cpu')")
        device_id = torch.device(accelerator.type, device_id)
    elif isinstance(device_id, str):
        try:
            device_id = torch.device(device_id)
        except RuntimeError as wrong:
            raise ValueError(f"device_id={device_id!r} is no device of torch: give 'cpu', or 'cuda:0'") from wrong
    if device_id.type != "cpu":
        current = _torch.device_of(device_id.type).index
        if device_id.index not in (None, current):
            raise ValueError(
                f"device_id is {device_id}, but the current device is {current}: call "
                f"torch.{device_id.type}.set_device({device_id.index}) before"
            )
    if mesh is not None and device_id.type != mesh.device_type:
        raise ValueError(f"device_id is {device_id}, but device_mesh is of {mesh.device_type}: give one of them")
    return device_id


_MESHES: _torch.PerRank[Any, tuple[Any, DeviceMesh]] = _torch.PerRank()


@on_release
def _forget_meshes() -> None:
    for key, (_, mesh) in list(_MESHES.items()):
        if not all(_torch.is_alive(group) for group in _torch.groups_of(mesh)):
            del _MESHES[key]


def mesh_of(given: FSDP1Arguments, kind: str) -> DeviceMesh:
    """The mesh of a wrapper: (shard), (replicate, shard), or for NO_SHARD (replicate, 1). One for all wrappers alike."""
    strategy, groups, mesh = given.strategy, given.process_group, given.device_mesh
    how = "hybrid" if strategy in HYBRID else "none" if strategy is ShardingStrategy.NO_SHARD else "shard"
    owner = mesh if mesh is not None else groups if groups is not None else dist.group.WORLD
    key = (tuple(map(id, owner)) if isinstance(owner, tuple) else id(owner), how, kind)
    if key not in _MESHES:
        _MESHES[key] = owner, _new_mesh(how, groups, mesh, kind)
    return _MESHES[key][1]


def _new_mesh(how: str, groups: Groups, mesh: DeviceMesh | None, kind: str) -> DeviceMesh:
    names = ("replicate", "shard")
    if how == "hybrid":
        if mesh is not None:
            return mesh
        if groups is None:
            return init_device_mesh(kind, _nodes(kind), mesh_dim_names=names)
        shard, replicate = groups
        rows: list[Any] = [None] * replicate.size()
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        return DeviceMesh.from_group([replicate, shard], kind, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=names)
    if how == "shard":
        if mesh is not None:
            return mesh
        if groups is None:
            return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
        return DeviceMesh.from_group(groups, kind, mesh_dim_names=("shard",))
    everybody: Any = mesh.get_group() if mesh is not None else groups if groups is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(everybody)
    alone = beside(everybody, "alone", [dist.get_rank()])
    return DeviceMesh.from_group(
        [everybody, alone], kind, mesh=torch.tensor(ranks, device="cpu").view(-1, 1), mesh_dim_names=names
    )


def _nodes(kind: str) -> tuple[int, int]:
    """(nodes, ranks per node) of the default process group."""
    known = os.environ.get("LOCAL_WORLD_SIZE")
    here = int(known) if known else 0 if kind == "cpu" else torch.accelerator.device_count()
    world = dist.get_world_size()
    if not here or world % here:
        raise ValueError(
            f"hybrid sharding without a mesh shards within a node, but the {world} ranks do not lie on nodes of "
            f"{here or 'a known number of'} ranks each: give a 2-D device_mesh (replicate, shard), or run under torchrun"
        )
    return world // here, here


# --- first values ---


def materialize(managed: ManagedTensors, given: FSDP1Arguments, mesh: DeviceMesh) -> None:
    """Memory and values for what is on meta, and the first rank's values for all, if that was asked for. Collective.

    Raises ValueError, on every rank, if some ranks have values and others do not, without `sync_module_states`.
    """
    for ref in managed.refs:  # tied to what a wrapper before this one gave memory to
        _install(ref, ref.parameter.__dict__.get(_MATERIALIZED))
    shared = _shared_buffers(managed)
    waiting = [module for module in managed.modules if _on_meta(module, given)]
    device = _torch.device_of(mesh.device_type)
    setup = _setup(managed, mesh, device)
    if not given.sync and len(_said(setup, bool(waiting))) > 1:
        raise ValueError(
            "some ranks have this module on meta and others have values for it: pass sync_module_states=True, so that all get "
            "those of the first rank"
        )
    ranks = Ranks(tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1), device)
    # Values of the first rank go to all in the end, or all draw the same.
    drawing: Any = seeded(device, common_seed(setup)) if waiting and not given.sync else nullcontext()

    def give_values() -> ManagedTensors:
        with torch.no_grad(), drawing:
            _give_values(waiting, given, managed, shared, device)
        return managed

    if waiting or given.sync:
        ranks.agree(
            give_values,
            _layout if given.sync else None,
            subject="sync_module_states: the modules",
            advice="Build the same module on all ranks",
        )
    if given.sync:
        tensors = [ref.parameter for ref in managed.refs] + [buffer for _, _, buffer in managed.buffers]
        setup.broadcast(tensor.detach() for tensor in tensors)


def _give_values(
    waiting: list[nn.Module],
    given: FSDP1Arguments,
    managed: ManagedTensors,
    shared: list[list[tuple[nn.Module, str]]],
    device: torch.device,
) -> None:
    """Memory and values for the modules in `waiting`; `managed` then has the tensors that took the place of those on meta."""
    if not waiting:
        return
    _warn_of_partly_meta(waiting, given)
    init = given.init or (lambda module: _reset(module, device))
    for module in waiting:
        init(module)
    left = [type(module).__name__ for module in waiting if _on_meta(module, given)]
    if left:
        raise ValueError(
            f"param_init_fn left parameters or buffers of {left[:3]} on meta: it must give each module it is called with "
            "memory, module.to_empty(device=..., recurse=False), and values"
        )
    for ref in managed.refs:  # they have Parameters of their own now: tied ones have one again
        made = _torch.parameters_of(ref.slots[0].module)[ref.slots[0].name]
        if made is not ref.parameter:
            ref.parameter.__dict__[_MATERIALIZED] = made
            _install(ref, made)
    for (module, name), *others in shared:
        for other, alias in others:
            _torch.buffers_of(other)[alias] = _torch.buffers_of(module)[name]
    fresh = collect([managed.modules[-1]], ignored=given.ignored, is_unit=lambda inner: unit_of(inner) is not None)
    managed.refs[:], managed.buffers[:] = fresh.refs, fresh.buffers


def _layout(managed: ManagedTensors) -> Facts:
    """The names, shapes and dtypes of all that is broadcast, tensor by tensor."""
    named = [(ref.name, ref.parameter) for ref in managed.refs] + [(name, buffer) for name, _, buffer in managed.buffers]
    return {name: {"is": f"(shape {tuple(tensor.shape)}, {tensor.dtype})"} for name, tensor in named}


_MATERIALIZED = "_fullshard_materialized"  # on a parameter that was on meta: the one with memory that took its place


def _install(ref: ParamRef, parameter: nn.Parameter | None) -> None:
    """Have every slot of `ref` hold `parameter`, unless that is None."""
    for slot in ref.slots if parameter is not None else ():
        setattr(slot.module, slot.name, parameter)


def _shared_buffers(managed: ManagedTensors) -> list[list[tuple[nn.Module, str]]]:
    """The slots of each buffer that has several."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in managed.modules:
        for name, buffer in _torch.buffers_of(module).items():
            if buffer is not None:
                slots.setdefault(id(buffer), []).append((module, name))
    return [several for several in slots.values() if len(several) > 1]


def _warn_of_partly_meta(waiting: Iterable[nn.Module], given: FSDP1Arguments) -> None:
    left_out = set(map(id, given.ignored))
    for module in waiting:
        loaded = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.device.type != "meta" and id(parameter) not in left_out
        ]
        if loaded and not given.sync:
            warnings.warn(
                f"a {type(module).__name__} has values for {loaded}, but is on meta otherwise: it is initialised as a whole, "
                "so these values are likely to be lost",
                stacklevel=4,
            )


def _on_meta(module: nn.Module, given: FSDP1Arguments) -> bool:
    left_out = set(map(id, given.ignored))
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.device.type == "meta" and id(tensor) not in left_out for tensor in own)


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{type(module).__name__} holds parameters or buffers on meta and has no reset_parameters(): pass param_init_fn="
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _setup(managed: ManagedTensors, mesh: DeviceMesh, device: torch.device) -> SetupCollectives:
    """The setup collectives of a wrapper that is made."""
    name = type(managed.modules[-1]).__name__
    return SetupCollectives(
        Runtime.of(device, CommPolicy()).communicator, resolve_mesh(mesh), UnitName(name), "FullyShardedDataParallel()", name
    )


def _said(setup: SetupCollectives, flag: bool) -> set[bool]:
    """The set of all ranks' answers."""
    votes = setup.maximum(torch.tensor([flag, not flag], dtype=torch.uint8, device=setup.axis.device))
    return {value for value, said in zip((True, False), votes.tolist()) if said}


def cast_buffers(module: nn.Module, managed: ManagedTensors, given: FSDP1Arguments) -> dict[str, torch.dtype]:
    """Cast the wrapper's own floating-point buffers, if that was asked for; what they were, by every name they have."""
    dtype = given.mixed_precision.buffer_dtype if given.mixed_precision is not None else None
    if dtype is None:
        return {}
    left_out = set(map(id, given.ignored_modules))
    before: dict[int, torch.dtype] = {}
    for _, slot, buffer in managed.buffers:
        if buffer.is_floating_point() and id(slot.module) not in left_out:
            before[id(buffer)] = buffer.dtype
            buffer.data = buffer.data.to(dtype)
    return {
        clean_name(name): before[id(buffer)]
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if id(buffer) in before
    }


__all__ = ["HYBRID", "FSDP1Arguments", "cast_buffers", "device_type_of", "materialize", "mesh_of"]
