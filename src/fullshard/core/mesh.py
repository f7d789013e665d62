"""Axes that parameters are sharded and replicated over: their meshes, process groups, and the position of this rank."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard import _torch
from fullshard.errors import warn_once


class MeshDims(Protocol):
    """Names of the data-parallel dims of a mesh with further dims."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Axes to shard over."""

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Axes to replicate over."""


@dataclass(frozen=True, eq=False)
class ReplicateAxis:
    """Axis over which shards are replicated."""

    group: dist.ProcessGroup  # the ranks with equal shards
    ranks: int  # size of the axis
    rank: int  # this rank's rank in the process group, which is its coordinate if the ranks of the mesh ascend


@dataclass(frozen=True, eq=False)
class ShardAxis:
    """Axis that parameters are sharded over. A mesh has one, with at most one replicate axis (`replicas`)."""

    mesh: DeviceMesh  # on which plain parameters become DTensors: (shard), (replicate, shard) or (replicate)
    group: dist.ProcessGroup | None  # of the ranks that parameters are sharded over; None if they are only replicated
    ranks: int  # number of shards; 1 without a group
    rank: int  # coordinate of this rank on the axis
    device: torch.device  # of this rank
    replicas: ReplicateAxis | None = None  # axis that shards are replicated over
    is_replicated: bool = False  # made by `replicated_axis`: it only replicates, although its mesh has an axis to shard over
    # Set on an axis over all ranks of a hybrid mesh (HFSDP): the (replicate, shard) axis of that mesh. All-gathers and
    # reductions run over its two process groups, one after the other, and are in its log.
    hybrid: ShardAxis | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that have more than one rank: that of the replicas, then that of the shards."""
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
        """Key of the process groups; equal for axes that share both groups."""
        return id(self.group), id(self.replicas.group if self.replicas else None)

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """Data-parallel axes of the mesh that DTensor parameters came with: the unit sums gradients over them. None here."""
        return ()

    def place(self, parameter: nn.Parameter, dim: int, *, name: str) -> tuple[DeviceMesh, list[Placement], tuple[int, ...]]:
        """Return mesh and placements of the sharded parameter, and the data-parallel axes of that mesh, the shard axis last."""
        mesh = self.mesh
        placements: list[Placement] = [Replicate()] * mesh.ndim
        others: Sequence[Placement] = ()
        if isinstance(parameter, DTensor):  # of tensor parallelism, whose axes come last
            mesh, others = self._joined_with(parameter.device_mesh, name=name), parameter.placements
        if self.group is not None:
            placements[-1] = shard_placement(dim, zip(others, mesh.mesh.shape[self.mesh.ndim :]))
        return mesh, [*placements, *others], tuple(range(self.mesh.ndim))

    def _joined_with(self, mesh: DeviceMesh, *, name: str) -> DeviceMesh:
        """Return one mesh: the dims of `self.mesh`, then those of `mesh`, the mesh of parameter `name`."""
        if mesh.device_type != self.mesh.device_type:
            kind = self.mesh.device_type
            raise ValueError(f"Expected parameter '{name}' on a mesh of {kind} devices, got a DTensor on {mesh}.")
        try:
            return self.joined_with(mesh)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            raise ValueError(
                f"parameter '{name}' is a DTensor on {mesh}, which cannot be combined with {self.mesh} ({error}). Take both "
                "from one mesh with names, init_device_mesh(type, sizes, mesh_dim_names=...), as mesh['dp'] and mesh['tp']."
            ) from None

    def joined_with(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return one mesh: the dims of `self.mesh`, then those of `mesh`."""
        return _torch.join_meshes([self.mesh, mesh])

    def __reduce__(self) -> tuple[Any, ...]:  # process groups cannot be pickled
        return unpickled_axis, (self.mesh, None, self.is_replicated)


def unpickled_axis(mesh: DeviceMesh, dims: MeshDims | None, is_replicated: bool) -> ShardAxis:
    """Return the axis that `ShardAxis.__reduce__` describes."""
    axis = resolve_mesh(mesh, dims)
    return replicated_axis(axis) if is_replicated else axis


def shard_placement(dim: int, inner: Iterable[tuple[Placement, int]]) -> Placement:
    """Return the placement of the FSDP shard: `_StridedShard` if tensor parallelism already shards `dim`, else `Shard`.

    `inner`: placement on each axis right of the shard axis, and the size of that axis.
    """
    # DTensor applies placements from left to right, but FSDP shards last, on an axis left of these: hence the split factor
    factor = prod(size for placement, size in inner if _torch.is_shard(placement, dim))
    return Shard(dim) if factor == 1 else _torch.strided_shard(dim, factor)


# (id of the owner, role, ranks) -> (owner, subgroup). Keeping the owner keeps its id from being reused.
_SUBGROUPS: dict[tuple[int, str, tuple[int, ...]], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _forget_dead_subgroups() -> None:
    for key, groups in list(_SUBGROUPS.items()):
        if not all(map(_torch.is_alive, groups)):
            del _SUBGROUPS[key]


def subgroup_of(owner: dist.ProcessGroup, role: str, ranks: list[int], *, name: str | None = None) -> dist.ProcessGroup:
    """Return the process group of `ranks` for one use (`role`), beside the group `owner`. Collective if it is a new one.

    `name`: equal on all `ranks` and unique among their groups. None takes that of `owner`, which must have all of `ranks`.
    """
    # Kept until torch destroys it or `owner`: if the garbage collector of one rank freed it, that rank would create it again,
    # alone.
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
    """Return a process group of `ranks` in just this order: the default one, `owner`, or one made here. Collective if new."""
    _forget_dead_subgroups()
    for group in (dist.group.WORLD, owner, *(subgroup for _, subgroup in _SUBGROUPS.values())):
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return subgroup_of(owner, "all", list(ranks), name="all")


def replicated_axis(axis: ShardAxis) -> ShardAxis:
    """Return an axis of the same ranks that only replicates, for scalars. Collective: it may create a process group."""
    if axis.group is None:
        return axis
    group = axis.group
    if axis.replicas is not None:
        group = group_of_mesh(group, "everywhere", axis.mesh.mesh.flatten().tolist())
    replicas = ReplicateAxis(group, group.size(), group.rank())
    return replace(axis, group=None, ranks=1, rank=0, replicas=replicas, is_replicated=True)


def group_of_mesh(owner: dist.ProcessGroup, role: str, ranks: list[int]) -> dist.ProcessGroup:
    """Return the process group of all ranks of a hybrid mesh for one use (`role`). The first call creates it: collective."""
    _forget_dead_subgroups()
    # several meshes may have the same ranks: number their groups, so that names are unique and equal on all ranks
    before = sum((other, members) == (role, tuple(ranks)) for _, other, members in _SUBGROUPS)
    return subgroup_of(owner, role, ranks, name=f"mesh {before}")


NAMED_AXES: list[Callable[[DeviceMesh, MeshDims], ShardAxis]] = []
"""Empty, or one function: it returns the axis of a mesh with further dims, by the names of its data-parallel dims."""


def resolve_mesh(mesh: DeviceMesh | None, dims: MeshDims | None = None) -> ShardAxis:
    """Return the shard axis of `mesh`, with the replicate axis if it has one.

    Without a mesh, build a 1-D mesh over the default process group, which is initialized if necessary. A mesh of one axis is
    (shard), of two axes (replicate, shard). With `dims`, use the named axes of a mesh of any number of axes. Raise
    ValueError if the mesh or `dims` does not fit.
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
    if dims is not None and not NAMED_AXES:
        raise ValueError(f"dp_mesh_dims={dims} needs a file of fullshard that is missing. Install fullshard anew.")
    if dims is not None:
        return NAMED_AXES[0](mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"Expected a mesh of one axis (shard) or two axes (replicate, shard), got {mesh.ndim} axes of sizes "
            f"{tuple(mesh.mesh.shape)}. Select axes with mesh['name'], or name them with dp_mesh_dims=."
        )
    _warn_of_names(mesh)
    return axis_of(mesh)


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


def check_order(mesh: DeviceMesh, dim: int) -> None:
    """Raise ValueError, on all ranks of the mesh, unless the ranks along an axis to shard over ascend.

    DTensor computes with the order in the process group, torch.distributed.checkpoint with that in the mesh.
    """
    ranks = mesh.mesh
    if (ranks.diff(dim=dim) < 0).any():
        name = f"axis {dim}" if mesh.mesh_dim_names is None else f"axis '{mesh.mesh_dim_names[dim]}'"
        raise ValueError(
            f"Expected ascending ranks along the {name} of the mesh, over which parameters are sharded, got "
            f"{ranks.tolist()}. torch sorts the ranks of process groups, so checkpoints would have rows in wrong order. Build "
            "the mesh with the ranks of each axis in ascending order."
        )


def axis_of(mesh: DeviceMesh, kind: type[ShardAxis] = ShardAxis, *, shards: bool = True, **more: Any) -> ShardAxis:
    """Return the axis of a mesh (shard), (replicate, shard) or, without `shards`, (replicate)."""
    device, replicas, last = _torch.device_of(mesh.device_type), None, mesh.ndim - 1
    if last or not shards:
        replicas = ReplicateAxis(mesh.get_group(0), mesh.size(0), mesh.get_local_rank(0))
    if not shards:
        return kind(mesh, None, 1, 0, device, replicas, **more)
    check_order(mesh, last)
    return kind(mesh, mesh.get_group(last), mesh.size(last), mesh.get_local_rank(last), device, replicas, **more)
