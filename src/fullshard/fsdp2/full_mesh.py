"""A mesh of all parallelisms: parameters are DTensors on it already, and `dp_mesh_dims=` names its data-parallel axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard import _torch
from fullshard.core import NAMED_AXES, MeshDims, ShardAxis, axis_of, shard_placement, unpickled_axis


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel axes of a full mesh. Each option is one name, several names, or None.

    Args:
        shard: axes to shard parameters over; several are flattened into one axis, in mesh order.
        replicate: axes to also average gradients over (hybrid sharding, or plain data parallelism without `shard`).

    Raises:
        ValueError: if both options are None or empty, or one is no name.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("rep", "dp", "tp"))    # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp", "rep"))     # doctest: +SKIP

    Source: `torch.distributed.fsdp.DataParallelMeshDims` (torch 2.13).
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for key in ("shard", "replicate"):
            value = getattr(self, key)
            if not all(isinstance(name, str) for name in _listed(value)):
                raise ValueError(f"{key}= of DataParallelMeshDims must be a name, a tuple of names or None, got {value!r}.")
        if not (self.shard_names or self.replicate_names):
            given = "None for both" if self.shard is self.replicate is None else f"{self.shard!r} and {self.replicate!r}"
            raise ValueError(f"Expected at least one axis in shard= or replicate= of DataParallelMeshDims, got {given}.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the axes to shard over."""
        return _listed(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes to replicate over."""
        return _listed(self.replicate)


def _listed(value: Any) -> tuple[Any, ...]:
    return () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass(frozen=True, eq=False, kw_only=True)
class FullMeshAxis(ShardAxis):
    """Axis of the data-parallel axes of a full mesh."""

    full_mesh: DeviceMesh
    dims: MeshDims  # its data-parallel axes

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The data-parallel axes of the full mesh, over which DTensor must leave gradients partial."""
        names = self.full_mesh.mesh_dim_names or ()
        return tuple(map(names.index, (*self.dims.shard_names, *self.dims.replicate_names)))

    def place(self, parameter: nn.Parameter, dim: int, *, name: str) -> tuple[DeviceMesh, list[Placement], tuple[int, ...]]:
        """Return the full mesh, in which the shard axes are flattened into one, with the placements on it.

        Raises ValueError unless the parameter is a DTensor on the full mesh that is replicated over the data-parallel axes.
        """
        mesh, names = self.full_mesh, self.full_mesh.mesh_dim_names or ()
        if not isinstance(parameter, DTensor) and not parameter.ndim:
            return super().place(parameter, dim, name=name)
        if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
            where = parameter.device_mesh if isinstance(parameter, DTensor) else "no mesh (a plain tensor)"
            raise ValueError(
                f"With dp_mesh_dims, every parameter must be a DTensor on the full mesh {mesh}, got parameter '{name}' on "
                f"{where}. distribute_tensor() it there, with Replicate() on the data-parallel axes."
            )
        placements: list[Placement] = list(parameter.placements)
        for index in self.partial_axes:
            if not placements[index].is_replicate():
                raise ValueError(
                    f"Expected Replicate() for parameter '{name}' on the data-parallel axis '{names[index]}' before "
                    f"fully_shard, got {placements[index]}."
                )
        if self.group is None:
            return mesh, placements, self.partial_axes
        shards = sorted(map(names.index, self.dims.shard_names))  # adjacent
        first, end = shards[0], shards[-1] + 1
        placements[first:end] = [shard_placement(dim, zip(placements[end:], mesh.mesh.shape[end:]))]
        if len(shards) > 1:
            flat = _torch.flat_axis(mesh, names[first:end])
            mesh = _torch.join_meshes([*(mesh[one] for one in names[:first]), flat, *(mesh[one] for one in names[end:])])
        return mesh, placements, (*map((mesh.mesh_dim_names or ()).index, self.dims.replicate_names), first)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled_axis, (self.full_mesh, self.dims, self.is_replicated)


def _named_axes(mesh: DeviceMesh, dims: MeshDims) -> ShardAxis:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("dp_mesh_dims names axes, but the mesh has no axis names. Pass mesh_dim_names= to init_device_mesh().")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"dp_mesh_dims names the axis '{name}', but the mesh has the axes {names}.")
    both = set(dims.shard_names) & set(dims.replicate_names)
    if both:
        raise ValueError(f"dp_mesh_dims names {sorted(both)} both as shard and as replicate. Name each axis only once.")
    indices = sorted(names.index(name) for name in dims.shard_names)
    if indices and indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(
            f"dp_mesh_dims shards over {dims.shard_names}, which are not adjacent in the mesh axes {names}. "
            "Shard axes are flattened into one axis, so build the mesh with adjacent shard axes."
        )
    shard = [_torch.flat_axis(mesh, tuple(names[i] for i in indices))] if indices else []
    replicate = [_torch.flat_axis(mesh, dims.replicate_names)] if dims.replicate_names else []
    parts = [*replicate, *shard]
    joined = parts[0] if len(parts) == 1 else _torch.join_meshes(parts)
    return axis_of(joined, FullMeshAxis, shards=bool(shard), full_mesh=mesh, dims=dims)


NAMED_AXES.append(_named_axes)
