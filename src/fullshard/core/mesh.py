"""Axes that parameters are sharded and replicated over: their meshes, process groups, and the position of this rank."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import _torch
from fullshard.errors import warn_once


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
            listed = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
            if not all(isinstance(name, str) for name in listed):
                raise ValueError(f"{key}= of DataParallelMeshDims must be a name, a tuple of names or None, got {value!r}.")
        if not (self.shard_names or self.replicate_names):
            given = "None for both" if self.shard is self.replicate is None else f"{self.shard!r} and {self.replicate!r}"
            raise ValueError(f"Expected at least one axis in shard= or replicate= of DataParallelMeshDims, got {given}.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the axes to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes to replicate over."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, eq=False)
class ReplicateAxis:
    """Axis over which shards are replicated."""

    group: dist.ProcessGroup  # the ranks with equal shards
    ranks: int  # size of the axis
    rank: int  # this rank's rank in the process group, which is its coordinate if the ranks of the mesh ascend


@dataclass(frozen=True, eq=False)
class ShardAxis:
    """Axis that parameters are sharded over. A mesh has one, with at most one replicate axis (`replicas`).

    Attributes:
        mesh: mesh of the DTensors of plain parameters: (shard), (replicate, shard) or (replicate).
        group: process group of the ranks that parameters are sharded over; None if they are only replicated. `ranks` is 1 then.
        ranks: number of shards.
        rank: coordinate of this rank on the axis.
        device: device of this rank.
        replicas: axis that shards are replicated over; None if there is none.
        full_mesh: mesh of all parallelisms, given with `dims`; parameters are already DTensors on it.
        dims: the data-parallel axes of `full_mesh`.
        hybrid: for an axis of all ranks of a hybrid mesh, the axis of that mesh; else None. Training communicates over it in
            two hops, one per axis of that mesh, and logs there.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    device: torch.device
    replicas: ReplicateAxis | None = None
    full_mesh: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    hybrid: ShardAxis | None = None
    # The meshes of tensor-parallel parameters on an axis with `hybrid`, by the tensor-parallel mesh.
    joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict)

    @property
    def transport(self) -> ShardAxis:
        """The axis that training communicates over: `hybrid`, or this axis if it has none."""
        return self if self.hybrid is None else self.hybrid

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of several ranks, replicas first."""
        both = (self.replicas.group, self.replicas.ranks) if self.replicas else (None, 1), (self.group, self.ranks)
        return [group for group, ranks in both if group is not None and ranks > 1]

    @property
    def replica_count(self) -> int:
        """Number of ranks with a copy of each shard."""
        return 1 if self.replicas is None else self.replicas.ranks

    @property
    def is_first_rank(self) -> bool:
        """True on the first of all ranks over which parameters are sharded and replicated."""
        return self.rank == 0 and (self.replicas is None or self.replicas.rank == 0)

    @property
    def key(self) -> tuple[int, int]:
        """Key of the process groups; equal for axes with the same groups of their own."""
        return id(self.group), id(self.replicas.group if self.replicas else None)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.hybrid is not None:
            return axis_of_all_ranks, (self.hybrid,)
        return _unpickle_axis, (self.mesh if self.full_mesh is None else self.full_mesh, self.dims, self.is_replicated)

    @property
    def is_replicated(self) -> bool:
        """True if `replicated_axis` made this axis: it only replicates, although its mesh has an axis to shard over."""
        return self.group is None and (self.dims is None or bool(self.dims.shard_names))


def _unpickle_axis(mesh: DeviceMesh, dims: DataParallelMeshDims | None, is_replicated: bool) -> ShardAxis:
    axis = resolve_mesh(mesh, dims)  # process groups cannot be pickled
    return replicated_axis(axis) if is_replicated else axis


# (id of the owner, role, ranks) -> (owner, subgroup). Keeping the owner keeps its id from being reused.
_SUBGROUPS: dict[tuple[int, str, tuple[int, ...]], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _forget_dead_subgroups() -> None:
    for key, groups in list(_SUBGROUPS.items()):
        if not all(map(_torch.is_alive, groups)):
            del _SUBGROUPS[key]
    for group in list(_MESHES_OF_ALL):
        if not _torch.is_alive(group):
            del _MESHES_OF_ALL[group]


def subgroup_of(owner: dist.ProcessGroup, role: str, ranks: list[int], *, name: str | None = None) -> dist.ProcessGroup:
    """Return an additional process group of `ranks` beside `owner`, for a role. The first call creates it, on all of `ranks`.

    name: equal on all `ranks` and unique among their groups; None for the name of `owner`, if all of them share it.
    """
    # The group is kept until torch destroys it or `owner`. Creating it is a collective, so the decision to create it must not
    # depend on objects that are alive on one rank only.
    _forget_dead_subgroups()
    key = id(owner), role, tuple(ranks)
    if key not in _SUBGROUPS:
        unique = owner.group_name if name is None else name
        _SUBGROUPS[key] = owner, _torch.new_group(f"fullshard {unique} {role} {ranks}", ranks)
    return _SUBGROUPS[key][1]


def with_subgroups(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return these process groups, and those that `subgroup_of` created beside them."""
    return [*groups, *(subgroup for owner, subgroup in _SUBGROUPS.values() if owner in groups)]


def group_of(ranks: tuple[int, ...], owner: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a process group of exactly these global ranks, in order. Creating one, if none exists, is a collective of them."""
    for group in (dist.group.WORLD, owner):
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    _forget_dead_subgroups()
    for _, subgroup in _SUBGROUPS.values():
        if tuple(dist.get_process_group_ranks(subgroup)) == ranks:
            return subgroup
    return subgroup_of(owner, "all", list(ranks), name="all")


def replicated_axis(axis: ShardAxis) -> ShardAxis:
    """Return an axis of the same ranks that only replicates, for scalars. Collective: it may create a process group."""
    if axis.group is None:
        return axis
    over = axis.group, axis.ranks, axis.rank
    if axis.replicas is not None:
        group = _group_of_mesh(axis.group, "everywhere", axis.mesh.mesh.flatten().tolist())
        over = group, group.size(), group.rank()
    replicas = ReplicateAxis(*over)
    return ShardAxis(axis.mesh, None, 1, 0, axis.device, replicas, axis.full_mesh, axis.dims)


def _group_of_mesh(owner: dist.ProcessGroup, role: str, ranks: list[int]) -> dist.ProcessGroup:
    """Return the process group of all ranks of a hybrid mesh for a role. The first call creates it, as a collective."""
    _forget_dead_subgroups()
    # several meshes may have the same ranks: number their groups, so that names are unique and equal on all ranks
    before = sum((other, members) == (role, tuple(ranks)) for _, other, members in _SUBGROUPS)
    return subgroup_of(owner, role, ranks, name=f"mesh {before}")


def axis_of_all_ranks(hybrid: ShardAxis) -> ShardAxis:
    """Return an axis that shards over all ranks of a hybrid mesh. Collective: it may create a process group.

    Its ranks are ordered by the shard dim first, so that the shards of one replicate group are neighbours: together they are
    what the hybrid mesh alone would give to each rank of that group.

        mesh (replicate, shard) of ranks   0 1 2     order   0 3 | 1 4 | 2 5
                                           3 4 5
    """
    replicas = hybrid.replicas
    if replicas is None or replicas.ranks == 1 or hybrid.group is None:
        return hybrid
    ranks = hybrid.mesh.mesh.t().contiguous().flatten()
    group = _group_of_mesh(hybrid.group, "all shards", ranks.tolist())
    mesh = _MESHES_OF_ALL.get(group)
    if mesh is None:
        names = hybrid.mesh.mesh_dim_names
        name = "shard_replicate" if names is None else f"{names[1]}_{names[0]}"
        mesh = _MESHES_OF_ALL[group] = _torch.mesh_of_groups(hybrid.mesh.device_type, ranks, [group], (name,))
    rank = hybrid.rank * replicas.ranks + replicas.rank
    return ShardAxis(mesh, group, ranks.numel(), rank, hybrid.device, hybrid=hybrid)


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> ShardAxis:
    """Return the shard axis of `mesh`, with the replicate axis if it has one.

    Without a mesh, build a 1-D mesh over the default process group, which is initialized if necessary. A mesh of one axis is
    (shard), of two axes (replicate, shard). With `dims`, use the named axes of a mesh of any number of axes.

    Raises:
        ValueError: if `mesh` is not such a DeviceMesh, is on the meta device, or does not contain this rank, if the ranks along
            the axis to shard over do not ascend, or if `dims` does not fit the mesh.
    """
    if mesh is None:
        if dims is not None:
            raise ValueError("dp_mesh_dims names axes of a mesh, but mesh is None. Pass the full mesh as mesh=.")
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"Expected a DeviceMesh or None as mesh, got {type(mesh).__name__}. Build a mesh with init_device_mesh()."
        )
    if mesh.device_type == "meta":
        raise ValueError(
            "Expected a mesh of real devices, got 'meta'. Parameters may be on meta, but the mesh gives the device that they "
            "will be on."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Rank {dist.get_rank()} is not on the mesh of ranks {mesh.mesh.tolist()}. "
            "Call fully_shard only on the ranks of the mesh."
        )
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"Expected a mesh of one axis (shard) or two axes (replicate, shard), got {mesh.ndim} axes of sizes "
            f"{tuple(mesh.mesh.shape)}. Select axes with mesh['name'], or name them with dp_mesh_dims=."
        )
    _warn_of_names(mesh)
    return _axes(mesh, shard=mesh.ndim - 1, replicate=0 if mesh.ndim == 2 else None)


def _warn_of_names(mesh: DeviceMesh) -> None:
    """Warn, on the first rank, if the axis names of a (replicate, shard) mesh contradict that order."""
    if mesh.ndim != 2 or mesh.mesh_dim_names is None or mesh.size(0) == 1 or mesh.mesh.flatten()[0] != dist.get_rank():
        return
    first, second = mesh.mesh_dim_names
    shards = re.search("shard|fsdp", first.lower()) and not re.search("replic|(un|no).?shard", first.lower())
    if shards or re.search("replic|ddp", second.lower()):
        warn_once(
            f"The mesh {(first, second)} of sizes {tuple(mesh.mesh.shape)} is taken as (replicate, shard): parameters are "
            f"replicated over '{first}' and sharded over '{second}'. To shard over both, pass "
            f"mesh._flatten('{first}_{second}')."
        )


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"The default process group is not initialized, and the environment does not configure one "
                f"({', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set). Start the program with "
                "`torchrun --nproc-per-node N program.py`, or call torch.distributed.init_process_group() first."
            )
        dist.init_process_group()
    accelerator = _torch.accelerator()
    return init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))


# by process group: the mesh that `axis_of_all_ranks` made
_MESHES_OF_ALL: dict[dist.ProcessGroup, DeviceMesh] = {}


def check_order(mesh: DeviceMesh, dim: int) -> None:
    """Raise ValueError, on all ranks of the mesh, unless the ranks along an axis to shard over ascend.

    torch sorts the ranks of the process groups of a mesh, and DTensor computes with the order in the group. But
    torch.distributed.checkpoint reads the order in the mesh, and would save rows in the place of others.
    """
    ranks = mesh.mesh
    if (ranks.diff(dim=dim) < 0).any():
        name = f"axis {dim}" if mesh.mesh_dim_names is None else f"axis '{mesh.mesh_dim_names[dim]}'"
        raise ValueError(
            f"Expected ascending ranks along the {name} of the mesh, over which parameters are sharded, got "
            f"{ranks.tolist()}. torch sorts the ranks of process groups, so checkpoints would have rows in wrong order. Build "
            "the mesh with the ranks of each axis in ascending order."
        )


def _axes(mesh: DeviceMesh, *, shard: int | None, replicate: int | None, **full: Any) -> ShardAxis:
    if shard is not None:
        check_order(mesh, shard)
    device = _torch.device_of(mesh.device_type)
    replicas = None
    if replicate is not None:
        replicas = ReplicateAxis(mesh.get_group(replicate), mesh.size(replicate), mesh.get_local_rank(replicate))
    if shard is None:
        return ShardAxis(mesh, None, 1, 0, device, replicas, **full)
    return ShardAxis(mesh, mesh.get_group(shard), mesh.size(shard), mesh.get_local_rank(shard), device, replicas, **full)


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> ShardAxis:
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
    full = {"full_mesh": mesh, "dims": dims}
    shard = _torch.flat_axis(mesh, tuple(names[i] for i in indices)) if indices else None
    replicate = _torch.flat_axis(mesh, dims.replicate_names) if dims.replicate_names else None
    if shard is None:
        assert replicate is not None
        return _axes(replicate, shard=None, replicate=0, **full)
    if replicate is None:
        return _axes(shard, shard=0, replicate=None, **full)
    return _axes(_torch.join_meshes([replicate, shard]), shard=1, replicate=0, **full)
