"""The tensors of a model that belong in a checkpoint: their names, this rank's memory, and the shards of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import (
    Agreement,
    ParamSharding,
    ShardedParameter,
    Unit,
    UnitName,
    clean_name,
    logical_parameters,
    resolve_mesh,
    units_of,
)
from fullshard.errors import StateError, some_of
from fullshard.optim.copies import agreement_of_all, find_difference
from fullshard.optim.empty_shards import ranges_at
from fullshard.weights.boxes import Box, ModelTensor, ShardMap
from fullshard.weights.key_map import MappedTensor

_ROUNDING = 1e-2  # relative difference of two copies of a tensor that were trained by kernels that round otherwise


@dataclass(frozen=True, slots=True, eq=False)
class ModelEntry:
    """A parameter or buffer of a model, and its memory on this rank."""

    names: tuple[str, ...]  # all names; tied tensors have several
    target: ModelTensor
    parameter: ShardedParameter | None  # None for a tensor that no unit manages
    plain: Tensor | None  # the tensor that no unit manages, None for a sharded parameter
    value: Tensor | None = None  # this rank's shard of a value to use instead, such as an average

    @property
    def is_parameter(self) -> bool:
        """True for a parameter, False for a buffer."""
        return self.parameter is not None or isinstance(self.plain, nn.Parameter)

    @property
    def local(self) -> Tensor:
        """This rank's shard of the values; the complete tensor if no unit manages it."""
        if self.value is not None:
            return self.value
        if self.parameter is not None:
            return self.parameter.local
        assert self.plain is not None
        return self.plain.detach()


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensors:
    """All parameters and persistent buffers of a model."""

    entries: tuple[ModelEntry, ...]
    units: tuple[Unit, ...]
    ranks: tuple[int, ...]  # global ranks of the model, in the order of `ShardMap.boxes`; (0,) without units
    index: int  # position of this rank in `ranks`

    @property
    def state(self) -> dict[str, MappedTensor]:
        """The tensors by name, as rules of key maps take them."""
        return {one.target.name: MappedTensor.of(one.target) for one in self.entries}

    def agreement(self, doing: str) -> Agreement:
        """Return the agreement of all ranks of the model in one call, whose name is `doing`."""
        if len(self.ranks) == 1:
            return Agreement(None, [], UnitName(""), doing)
        return agreement_of_all((p for unit in self.units for p in unit.parameters), doing)

    def check_not_on_meta(self) -> None:
        """Raise ValueError if a tensor is on meta."""
        on_meta = [entry.names[0] for entry in self.entries if entry.local.device.type == "meta"]
        if on_meta:
            raise ValueError(f"'{on_meta[0]}' is on meta and has no values. Call load_weights() or materialize() first.")

    def check_copies(self, ranks: Agreement) -> None:
        """Raise ValueError if ranks have other values of a parameter that is written once. Collective.

        Rows of a parameter on a smaller mesh are divided among the ranks outside of it, so their files would be a patchwork of
        several models. Buffers may differ: those of the first rank are written.
        """
        mesh = _mesh_of_all(self.units)
        if mesh is None:
            return
        beside: dict[str | None, list[tuple[str, Tensor]]] = {}  # by mesh dim; None for all ranks
        for entry in self.entries:
            own = None if entry.parameter is None else entry.parameter.sharding.mesh
            outside: list[str | None] = []
            if own is None and entry.is_parameter:
                outside = [None]
            elif own is not None and own.size() < mesh.size():
                axes = set(_axes_in(own, mesh))
                outside = [name for axis, name in enumerate(mesh.mesh_dim_names or ()) if axis not in axes]
            for name in outside:
                beside.setdefault(name, []).append((f"'{entry.names[0]}'", entry.local))
        for dim, named in beside.items():
            some = ranks if dim is None else ranks.on_axis(resolve_mesh(mesh[dim]))
            if (text := find_difference(named, some, _ROUNDING)) is not None:
                raise ValueError(
                    f"{text}, and the checkpoint has one tensor of this name. Give these ranks equal values, or save the "
                    "module of each rank under a name of its own."
                )


@runtime_checkable
class OtherValues(Protocol):
    """Values to read instead of those of a model: moving averages, or a sealed version."""

    def over(self, tensors: ModelTensors) -> ModelTensors:
        """Return the tensors with these values."""


def with_values(tensors: ModelTensors, values: Mapping[str, Tensor]) -> ModelTensors:
    """Return the tensors of a model with other values."""
    shapes = {one.names[0]: one.local.shape for one in tensors.entries}
    wrong = [name for name, value in values.items() if shapes.get(name) != value.shape]
    if wrong:
        raise ValueError(
            f"weights= has values of {some_of(wrong)}, and the model has no parameters of these names and shapes. Pass the "
            "model that they were made of."
        )

    def changed(entry: ModelEntry) -> ModelEntry:
        value = values.get(entry.names[0])
        return entry if value is None else replace(entry, target=replace(entry.target, dtype=value.dtype), value=value.detach())

    return replace(tensors, entries=tuple(map(changed, tensors.entries)))


def from_first_rank(tensors: ModelTensors) -> ModelTensors:
    """Return the tensors of a model, where only the first rank has those that no unit manages.

    Ranks may have different values of these, as running statistics of batch norms. So one rank saves them: a file with parts
    from several ranks would be the state of no rank.
    """

    @cache  # one map for all tensors of a shape
    def shard_map(shape: tuple[int, ...]) -> ShardMap:
        return ShardMap(shape, (Box.whole(shape), *[None] * (len(tensors.ranks) - 1)))

    def moved(entry: ModelEntry) -> ModelEntry:
        if entry.plain is None or not entry.target.numel:
            return entry
        return replace(entry, target=replace(entry.target, shard_map=shard_map(entry.target.shape)))

    return replace(tensors, entries=tuple(map(moved, tensors.entries)))


def tensors_of(model: nn.Module, *, prepare: Callable[[Unit], None] | None = None) -> ModelTensors:
    """List the tensors of a model's state dict: parameters and persistent buffers, each once with all its names.

    `prepare` is called with each unit first, and tensors that the user replaced are taken over.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got a {type(model).__name__}.")
    units = tuple(units_of(model, True))
    if prepare is not None:
        for unit in units:
            prepare(unit)
            unit.refresh()
    mesh = _mesh_of_all(units)
    ranks = (0,) if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
    names_of: dict[Tensor, list[str]] = {}
    for name, tensor in _named(model):
        names_of.setdefault(tensor, []).append(clean_name(name))
    unsharded = {id(p.unsharded): p for unit in units for p in unit.parameters if p.unsharded is not None}
    shard_maps: dict[object, ShardMap] = {}  # one for all tensors with equal shards
    entries: list[ModelEntry] = []
    for tensor, names in names_of.items():
        found = [unsharded[id(tensor)]] if id(tensor) in unsharded else logical_parameters([tensor])
        parameter = found[0] if found else None
        if parameter is not None:
            assert mesh is not None
            sharding = parameter.sharding
            geometry: object = tuple(sharding.shape), sharding.dim, sharding.data_axes, sharding.mesh, sharding.placements
            if geometry not in shard_maps:
                shard_maps[geometry] = _shard_map_of(sharding, mesh, ranks)
        elif isinstance(tensor, DTensor):
            raise StateError(f"'{names[0]}' is a DTensor that no unit manages. Call fully_shard() on its module.")
        else:
            geometry = shape = tuple(tensor.shape)
            if geometry not in shard_maps:
                shard_maps[geometry] = ShardMap(shape, (Box.whole(shape) if prod(shape) else None,) * len(ranks))
        dtype, shard_map = tensor.dtype if parameter is None else parameter.local.dtype, shard_maps[geometry]
        target = ModelTensor(names[0], dtype, shard_map.shape, shard_map)
        entries.append(ModelEntry(tuple(names), target, parameter, tensor if parameter is None else None))
    return ModelTensors(tuple(entries), units, ranks, 0 if mesh is None else ranks.index(dist.get_rank()))


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors in the order of `state_dict()`, tied tensors under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in _torch.parameters_of(module).items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in _torch.buffers_of(module).items():
            if buffer is not None and _torch.persists(module, name):
                yield dot + name, buffer


def _mesh_of_all(units: Sequence[Unit]) -> DeviceMesh | None:
    """Return the mesh with all ranks of the model, or None if no unit has parameters."""
    every = [p.sharding for unit in units for p in unit.parameters]
    meshes = dict.fromkeys(one.mesh for one in every)
    most = max(meshes, key=lambda mesh: mesh.size(), default=None)
    for mesh in meshes:
        if most is not None and mesh is not most and not set(mesh.mesh.flatten().tolist()) <= set(most.mesh.flatten().tolist()):
            raise StateError(
                f"Parameters of this model are on {most} and on {mesh}, and neither mesh has all ranks of the other. Load or "
                "save the modules of each mesh separately."
            )
    return most


def _shard_map_of(sharding: ParamSharding, full_mesh: DeviceMesh, ranks: Sequence[int]) -> ShardMap:
    """Return the shards of a parameter on all ranks."""
    if sharding.mesh.size() == full_mesh.size():  # the same ranks under other dims, as (replicate, shard) and one flat dim
        full_mesh = sharding.mesh
    axes = _axes_in(sharding.mesh, full_mesh)
    shape, places = tuple(sharding.shape), full_mesh.mesh
    found: dict[int, Box | None] = {}
    for place in product(*map(range, places.shape)):
        ranges = ranges_at(sharding, [place[axis] for axis in axes])
        box = Box(tuple(one.start for one in ranges), tuple(map(len, ranges)))
        found[int(places[place])] = box if box.numel else None
    return ShardMap(shape, tuple(found[rank] for rank in ranks))


def _axes_in(mesh: DeviceMesh, full_mesh: DeviceMesh) -> list[int]:
    """Return the dims of a smaller mesh as dims of the mesh with all ranks."""
    if mesh is full_mesh or tuple(mesh.mesh.shape) == tuple(full_mesh.mesh.shape):
        return list(range(mesh.ndim))
    names, known = mesh.mesh_dim_names or (), full_mesh.mesh_dim_names or ()
    if len(names) != mesh.ndim or not set(names) <= set(known):
        raise StateError(
            f"Parameters of this model are on {mesh}, whose mesh dims are not dims of {full_mesh}. "
            "Take both from one mesh with mesh dim names."
        )
    return [known.index(name) for name in names]
