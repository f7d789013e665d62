"""The tensors of a model that a checkpoint has: names, memory of this rank, and which part each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.frontend.module import units_of
from fullshard.params.sharded_param import ShardedParameter, logical_parameters
from fullshard.runtime.unit import Unit
from fullshard.sharding.param_sharding import ParamSharding
from fullshard.weights.boxes import Box
from fullshard.weights.holdings import Holdings, ModelTensor

WRAPPED = "_checkpoint_wrapped_module."  # of torch's activation checkpointing, in names but not in state dicts


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor of a model. names: all of them, the first one first.      parameter: None for what no unit holds.

    value: this rank's part of what stands for it, as an average; None for its own.
    """

    names: tuple[str, ...]
    target: ModelTensor
    parameter: ShardedParameter | None
    plain: Tensor | None
    value: Tensor | None = None

    @property
    def is_parameter(self) -> bool:
        """Whether it is one, and no buffer."""
        return self.parameter is not None or isinstance(self.plain, nn.Parameter)

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        if self.value is not None:
            return self.value
        if self.parameter is not None:
            return self.parameter.local
        assert self.plain is not None
        return self.plain.detach()


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensors:
    """All of a model. ranks: global ones that hold it, in the order of `Holdings`; (0,) without units. index: of this one."""

    held: tuple[Held, ...]
    units: tuple[Unit, ...]
    ranks: tuple[int, ...]
    index: int


def standing_for(tensors: ModelTensors, values: Mapping[str, Tensor]) -> ModelTensors:
    """The tensors of a model with these values, by their first names, instead of their own."""
    held = tuple(one if one.names[0] not in values else _with_value(one, values[one.names[0]].detach()) for one in tensors.held)
    return replace(tensors, held=held)


def _with_value(held: Held, value: Tensor) -> Held:
    return replace(held, target=replace(held.target, dtype=value.dtype), value=value)


def tensors_of(model: nn.Module) -> ModelTensors:
    """The tensors that state dicts of a model have: parameters and persistent buffers, each once with all its names.

    Raises:
        ValueError: for what is no module.
        StateError: for a DTensor that no unit holds, or units on meshes of which none has all ranks of the others.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got a {type(model).__name__}")
    units = tuple(units_of(model, True))
    mesh = _mesh_of_all(units)
    ranks = (0,) if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _named(model):
        names.setdefault(id(tensor), []).append(name.replace(WRAPPED, ""))
        tensors[id(tensor)] = tensor
    known: dict[object, Holdings] = {}
    shown = {id(p.full): p for unit in units for p in unit.parameters if p.full is not None}
    held = tuple(_held(tuple(names[key]), tensor, shown.get(key), mesh, ranks, known) for key, tensor in tensors.items())
    return ModelTensors(held, units, ranks, 0 if mesh is None else ranks.index(_torch.global_rank()))


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `state_dict()` has them, ties included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in _torch.parameters_of(module).items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in _torch.buffers_of(module).items():
            if buffer is not None and _torch.persists(module, name):
                yield dot + name, buffer


def _mesh_of_all(units: Sequence[Unit]) -> DeviceMesh | None:
    """The mesh with all ranks of the model; None if no unit holds anything."""
    meshes = dict.fromkeys(p.sharding.mesh for unit in units for p in unit.parameters)
    most = max(meshes, key=lambda mesh: mesh.size(), default=None)
    for mesh in meshes:
        if most is not None and not set(mesh.mesh.flatten().tolist()) <= set(most.mesh.flatten().tolist()):
            raise StateError(
                f"parameters of this model are on {most} and on {mesh}, of which neither has all ranks of the other: load or "
                "save the parts that are on the same ranks"
            )
    return most


def _held(
    names: tuple[str, ...],
    tensor: Tensor,
    shown: ShardedParameter | None,
    mesh: DeviceMesh | None,
    ranks: tuple[int, ...],
    known: dict[object, Holdings],
) -> Held:
    """shown: the parameter whose full one `tensor` is, if it is one."""
    found = logical_parameters([tensor]) if shown is None else [shown]
    if found:
        assert mesh is not None
        sharding = found[0].sharding
        key: object = (tuple(sharding.shape), sharding.dim, sharding.own_axis, sharding.mesh, sharding.placements)
        if key not in known:
            known[key] = holdings_of(sharding, mesh, ranks)
        target = ModelTensor(names[0], found[0].local.dtype, tuple(sharding.shape), known[key])
        return Held(names, target, found[0], None)
    if isinstance(tensor, DTensor):
        raise StateError(f"'{names[0]}' is a DTensor that no unit holds: call fully_shard on the module that has it")
    shape = tuple(tensor.shape)
    if shape not in known:
        known[shape] = Holdings(shape, (Box.whole(shape),) * len(ranks) if prod(shape) else (None,) * len(ranks))
    return Held(names, ModelTensor(names[0], tensor.dtype, shape, known[shape]), None, tensor)


def holdings_of(sharding: ParamSharding, everything: DeviceMesh, ranks: Sequence[int]) -> Holdings:
    """Which part of a parameter each of these ranks has.

    everything: a mesh of all of them. A parameter on some of its axes is held alike along the others.
    """
    axes = _axes_in(sharding.mesh, everything)
    shape, places = tuple(sharding.shape), everything.mesh
    found: dict[int, Box | None] = {}
    for place in product(*map(range, places.shape)):
        ranges = sharding.ranges_at([place[axis] for axis in axes])
        box = Box(tuple(one.start for one in ranges), tuple(map(len, ranges)))
        found[int(places[place])] = box if box.numel else None
    return Holdings(shape, tuple(found[rank] for rank in ranks))


def _axes_in(mesh: DeviceMesh, everything: DeviceMesh) -> list[int]:
    """The axes of a smaller mesh, by their numbers in the mesh of all ranks."""
    if tuple(mesh.mesh.shape) == tuple(everything.mesh.shape):
        return list(range(mesh.ndim))
    names, known = mesh.mesh_dim_names or (), everything.mesh_dim_names or ()
    if len(names) != mesh.ndim or not set(names) <= set(known):
        raise StateError(
            f"parameters of this model are on {mesh}, whose axes are none of {everything}: take both from one mesh with names"
        )
    return [known.index(name) for name in names]


__all__ = ["Held", "ModelTensors", "holdings_of", "standing_for", "tensors_of"]
