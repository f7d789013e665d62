"""How one parameter is cut over the ranks, and what its DTensors say: tensor parallelism and hybrid meshes included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.sharding.layout import Extent
from fullshard.sharding.mesh import ShardAxis, everywhere, resolve_mesh


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of `shard_placement_fn`: along which dim a parameter is cut, and over which mesh.

    Args:
        placement: `Shard(dim)`, None for `Shard(0)`.
        mesh_info: a DeviceMesh as `fully_shard` takes it, an object with such a `.mesh` (torch's FSDPMeshInfo), or None for
            the mesh of the unit.

    Example:
        The experts of a mixture, on the ranks that hold the same experts:

        >>> ShardPlacementResult(Shard(0), expert_data_mesh)                                  # doctest: +SKIP

    Source: `ShardPlacementResult` of torch 2.13's FSDP2.
    """

    placement: Shard | None
    mesh_info: Any = None


PlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorParallelSpec:
    """The form that modules compute with under tensor parallelism: DTensors on `mesh`, of which each rank holds its part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    data_parallel: tuple[int, ...]  # axes of `mesh` over which gradients are reduced by us, not by DTensor


@dataclass(frozen=True, eq=False)
class ParamSharding:
    """How one parameter is cut. parameter 1 - 1 sharding, sharding n - 1 shard axis.

        global shape  --tensor parallelism-->  local: what this rank computes with  --dim, axis-->  shard: what it keeps

    shape: global.  local_shape: (rows of all ranks along `dim`); (1,) of a scalar.  extent: this rank's rows of it along `dim`.
    mesh, placements: of the sharded DTensor.  dense: of the DTensor computed with, None for a plain tensor.
    """

    axis: ShardAxis
    dim: int
    shape: torch.Size
    local_shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dense: TensorParallelSpec | None = None
    extent: Extent = field(init=False)
    is_plain: bool = field(init=False)  # modules compute with a tensor of `local_shape` as it is: no DTensor, no scalar

    def __post_init__(self) -> None:
        extent = Extent.cut(self.local_shape[self.dim], ranks=self.axis.ranks, rank=self.axis.rank)
        object.__setattr__(self, "extent", extent)
        object.__setattr__(self, "is_plain", self.dense is None and len(self.shape) > 0)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard, without padding."""
        if not self.shape:
            return ()
        return (*self.local_shape[: self.dim], self.extent.rows, *self.local_shape[self.dim + 1 :])

    @property
    def own_axis(self) -> int | None:
        """Which axis of `mesh` this cut is along; None if nothing is cut."""
        if self.axis.group is None or not self.shape:
            return None
        full, dims = self.axis.full_mesh, self.axis.dims
        if full is None or dims is None:
            return self.axis.mesh.ndim - 1
        return min((full.mesh_dim_names or ()).index(name) for name in dims.shard_names)

    @property
    def tensor_parallel_axes(self) -> tuple[int, ...]:
        """The axes of `mesh` that are neither sharded nor replicated over by us."""
        full, dims = self.axis.full_mesh, self.axis.dims
        if self.dense is None:
            return ()
        if full is None or dims is None:
            return tuple(range(self.axis.mesh.ndim, self.mesh.ndim))
        data = {*dims.shard_names, *dims.replicate_names}
        names = self.mesh.mesh_dim_names or ()
        return tuple(axis for axis, name in enumerate(names) if name in set(full.mesh_dim_names or ()) - data)

    def ranges_at(self, place: Sequence[int]) -> list[range]:
        """Along each dim, what the rank at these coordinates of `mesh` holds. Tensor parallelism cuts before we do."""
        found = [range(length) for length in self.shape]
        axes = [axis for axis in range(self.mesh.ndim) if axis != self.own_axis]
        for axis in (*axes, *(() if self.own_axis is None else (self.own_axis,))):
            placement: Any = self.placements[axis]
            if _torch.is_cut(placement):
                part = Extent.cut(len(found[placement.dim]), ranks=self.mesh.size(axis), rank=place[axis])
                found[placement.dim] = found[placement.dim][part.start : part.stop]
        return found

    def slice(self, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`; a view."""
        if not self.shape:
            return whole
        if type(whole) in (Tensor, nn.Parameter):
            return whole.narrow(self.dim, self.extent.start, self.extent.rows)
        parts = whole.chunk(self.axis.ranks, self.dim)  # what subclasses that shard implement is this
        return parts[self.axis.rank] if self.axis.rank < len(parts) else parts[0].new_zeros(self.shard_shape)

    def rows_of(self, value: Tensor, *, name: str, doing: str) -> Tensor:
        """This rank's rows of `value`: a full tensor, a DTensor sharded like this parameter, or one as modules compute with.

        Raises StateError for another shape or placement. name, doing: which parameter got `value`, and how, for its text.
        """
        if value.shape != self.shape:
            raise StateError(f"parameter '{name}' of shape {tuple(self.shape)} {doing} a tensor of shape {tuple(value.shape)}")
        if not isinstance(value, DTensor):
            return self.slice(self.local_of(value))
        if value.device_mesh == self.mesh and value.placements == self.placements:
            return _torch.local_tensor(value)
        if self.dense is not None and (value.device_mesh, value.placements) == (self.dense.mesh, self.dense.placements):
            return self.slice(_torch.local_tensor(value))
        raise StateError(
            f"parameter '{name}' {doing} a DTensor on {value.device_mesh} with {value.placements}; expected "
            f"{self.mesh} with {self.placements}: redistribute() it first, or give the full tensor"
        )

    def spec(self, dtype: torch.dtype) -> _torch.DTensorSpec:
        """The spec of the sharded DTensor."""
        return _torch.spec(self.mesh, self.placements, self.shape, dtype)

    def to_module(self, whole: Tensor) -> Tensor:
        """The tensor that modules compute with: `whole` itself, or the DTensor it is this rank's part of."""
        if not self.shape:
            whole = whole.view(())
        if self.dense is None:
            return whole
        return _torch.dtensor(whole, _torch.spec(self.dense.mesh, self.dense.placements, self.shape, whole.dtype))

    def grad_to_local(self, tensor: Tensor, *, name: str) -> Tensor:
        """The inverse of `to_module`, for a gradient: redistributed as the parameter is, then this rank's part.

        Over data-parallel axes nothing is redistributed: that sum is ours.
        """
        if self.dense is None:
            return tensor if self.shape else tensor.reshape(1)
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device_mesh != self.dense.mesh:
            raise ValueError(
                f"the gradient of parameter '{name}' is a DTensor on {tensor.device_mesh}, expected {self.dense.mesh}"
            )
        target = tuple(
            mine if axis in self.dense.data_parallel else wanted
            for axis, (mine, wanted) in enumerate(zip(tensor.placements, self.dense.placements))
        )
        if tensor.placements != target:
            tensor = tensor.redistribute(self.dense.mesh, target)
        local = _torch.waited(_torch.local_tensor(tensor))
        return local if self.shape else local.reshape(1)

    def local_of(self, full: Tensor) -> Tensor:
        """This rank's part of a plain tensor of the global shape, as it computes with; no communication."""
        if self.dense is None:
            return full
        part = distribute_tensor(full, self.dense.mesh, self.dense.placements, src_data_rank=None)
        return _torch.local_tensor(part)


def cut(parameter: nn.Parameter, axis: ShardAxis, placement_fn: PlacementFn | None, *, name: str) -> ParamSharding:
    """How `parameter` is to be cut. Raises ValueError, naming it, if it cannot be so."""
    dim, axis = _choice(parameter, axis, placement_fn, name=name)
    if parameter.ndim == 0:
        return _uncut(parameter, everywhere(axis), name=name)
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            f"shard_placement_fn wants parameter '{name}' of shape {tuple(parameter.shape)} cut along dim {dim}: "
            f"it has the dims 0 to {parameter.ndim - 1}"
        )
    dim %= parameter.ndim
    if axis.full_mesh is not None:
        return _cut_on_full_mesh(parameter, axis, dim, name=name)
    own: tuple[Placement, ...] = (Replicate(),) if axis.replicas is not None else ()
    if not isinstance(parameter, DTensor):
        placements = (*own, Shard(dim)) if axis.group is not None else own
        return ParamSharding(axis, dim, parameter.shape, parameter.shape, axis.mesh, placements)
    mesh = parameter.device_mesh
    if mesh.device_type != axis.mesh.device_type:
        raise ValueError(f"parameter '{name}' is a DTensor on {mesh}, expected a mesh of {axis.mesh.device_type} devices")
    joined = _joined(axis, parameter, name=name)
    _check_dense(parameter, name=name)
    placements = (*own, _sharded_before(dim, parameter.placements, mesh), *parameter.placements)
    dense = TensorParallelSpec(mesh, tuple(parameter.placements), ())
    return ParamSharding(axis, dim, parameter.shape, _torch.local_tensor(parameter).shape, joined, placements, dense)


def _joined(axis: ShardAxis, parameter: DTensor, *, name: str) -> DeviceMesh:
    """One mesh with our axes and, behind them, those a parameter is on already."""
    mesh = parameter.device_mesh
    try:
        return _torch.join_meshes([axis.mesh, mesh])
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise ValueError(
            f"parameter '{name}' is a DTensor on {mesh}, which cannot be combined with {axis.mesh} ({error}): take both from "
            "one mesh with names, init_device_mesh(type, sizes, mesh_dim_names=...), as mesh['dp'] and mesh['tp']"
        ) from None


def _uncut(parameter: nn.Parameter, axis: ShardAxis, *, name: str) -> ParamSharding:
    """A scalar has nothing to cut: every rank holds it, and gradients are averaged all the same."""
    dense = None
    mesh, placements = axis.mesh, [Replicate()] * axis.mesh.ndim
    if isinstance(parameter, DTensor):
        _check_dense(parameter, name=name)
        mesh = parameter.device_mesh if axis.full_mesh is not None else _joined(axis, parameter, name=name)
        placements = [Replicate()] * mesh.ndim
        dense = TensorParallelSpec(parameter.device_mesh, tuple(parameter.placements), _data_axes(axis))
    return ParamSharding(axis, 0, parameter.shape, torch.Size((1,)), mesh, tuple(placements), dense)


def _data_axes(axis: ShardAxis) -> tuple[int, ...]:
    """Which axes of the full mesh, if there is one, are data parallel."""
    if axis.full_mesh is None or axis.dims is None:
        return ()
    names = axis.full_mesh.mesh_dim_names or ()
    return tuple(names.index(n) for n in (*axis.dims.shard_names, *axis.dims.replicate_names))


def _choice(parameter: nn.Parameter, axis: ShardAxis, placement_fn: PlacementFn | None, *, name: str) -> tuple[int, ShardAxis]:
    chosen = placement_fn(parameter) if placement_fn is not None else None
    if isinstance(chosen, (Shard, type(None))):
        return (0 if chosen is None else chosen.dim), axis
    if not hasattr(chosen, "placement") or not hasattr(chosen, "mesh_info"):
        raise ValueError(
            f"shard_placement_fn must return None, Shard(dim) or a ShardPlacementResult, got {chosen!r} for parameter '{name}'"
        )
    if not isinstance(chosen.placement, (Shard, type(None))):
        raise ValueError(f"ShardPlacementResult.placement must be Shard(dim), got {chosen.placement!r} for parameter '{name}'")
    info = chosen.mesh_info
    if info is not None:
        mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"ShardPlacementResult.mesh_info of parameter '{name}' must be or have a DeviceMesh, got {info!r}")
        axis = axis if mesh is axis.mesh else resolve_mesh(mesh)
    return (0 if chosen.placement is None else chosen.placement.dim), axis


def _check_dense(parameter: DTensor, *, name: str) -> None:
    partial = [placement for placement in parameter.placements if placement.is_partial()]
    if partial:
        raise ValueError(
            f"parameter '{name}' is a DTensor with placements {parameter.placements}, of which {partial} cannot be sharded: "
            "redistribute() it to Shard or Replicate first"
        )


def _sharded_before(dim: int, others: tuple[Placement, ...], mesh: DeviceMesh, first: int = 0) -> Placement:
    """Our cut along `dim`, made after `others` were, but on an axis to their left: strided if they cut that dim too."""
    factor = 1
    for axis in range(first, len(others)):
        if _torch.is_cut(others[axis], dim):
            factor *= mesh.size(axis)
    return Shard(dim) if factor == 1 else _torch.strided_shard(dim, factor)


def _cut_on_full_mesh(parameter: nn.Parameter, axis: ShardAxis, dim: int, *, name: str) -> ParamSharding:
    mesh, dims = axis.full_mesh, axis.dims
    assert mesh is not None and dims is not None and mesh.mesh_dim_names is not None
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        where = parameter.device_mesh if isinstance(parameter, DTensor) else "no mesh (a plain tensor)"
        raise ValueError(
            f"with dp_mesh_dims every parameter must be a DTensor on the full mesh {mesh}, got '{name}' on {where}: "
            "distribute_tensor() it there, with Replicate() on the data-parallel axes"
        )
    _check_dense(parameter, name=name)
    names, data = mesh.mesh_dim_names, _data_axes(axis)
    for at in data:
        if not parameter.placements[at].is_replicate():
            raise ValueError(
                f"parameter '{name}' has {parameter.placements[at]} on the data-parallel axis '{names[at]}': "
                "it must be Replicate() there before fully_shard"
            )
    shards = sorted(names.index(n) for n in dims.shard_names)
    ours = _sharded_before(dim, parameter.placements, mesh, first=shards[-1] + 1) if shards else None
    placements: list[Placement] = list(parameter.placements)
    sharded_on = mesh
    if len(shards) == 1:
        placements[shards[0]] = ours  # type: ignore[assignment]
    elif shards:  # several axes are one in the sharded DTensor
        flat = _torch.flat_axis(mesh, tuple(names[i] for i in shards))
        parts = [mesh[names[i]] for i in range(shards[0])] + [flat] + [mesh[n] for n in names[shards[-1] + 1 :]]
        sharded_on = _torch.join_meshes(parts)
        placements[shards[0] : shards[-1] + 1] = [ours]  # type: ignore[list-item]
    dense = TensorParallelSpec(mesh, tuple(parameter.placements), data)
    whole = _torch.local_tensor(parameter).shape
    return ParamSharding(axis, dim, parameter.shape, whole, sharded_on, tuple(placements), dense)
