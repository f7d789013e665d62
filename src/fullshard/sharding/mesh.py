"""The axes parameters are sharded and replicated over: their meshes, process groups, and this rank's place on them."""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import _torch
from fullshard.collectives.process_groups import HeldGroup, held, on_release


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of one full mesh are data parallel; each a name, several names, or None. At least one of both.

    Args:
        shard: parameters are sharded over them; several are flattened into one axis, in mesh order.
        replicate: gradients are averaged over them too (hybrid sharding, or plain data parallelism without `shard`).

    Raises:
        ValueError: if neither names an axis.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("rep", "dp", "tp"))    # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp", "rep"))     # doctest: +SKIP

    Source: `torch.distributed.fsdp.DataParallelMeshDims` (torch 2.13).
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.shard_names or self.replicate_names):
            given = "None for both" if self.shard is self.replicate is None else f"{self.shard!r} and {self.replicate!r}"
            raise ValueError(f"DataParallelMeshDims needs at least one of shard and replicate, got {given}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to shard over, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes to replicate over, as a tuple."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, eq=False)
class ReplicateAxis:
    """The axis over which equal shards are held more than once."""

    held: HeldGroup
    ranks: int
    rank: int

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold equal shards."""
        return self.held.group


@dataclass(frozen=True, eq=False)
class ShardAxis:
    """Where shards lie. mesh 1 - 1 shard axis, shard axis 1 - 0..1 replicate axis.

    mesh: what the DTensors of plain parameters live on, (shard), (replicate, shard) or (replicate).
    held: the process group; None if nothing is sharded, only replicated, and then `ranks` is 1.
    device: where this rank computes.
    dims: of a full mesh, which of its axes are data parallel; parameters then are DTensors on `full_mesh` already.
    """

    mesh: DeviceMesh
    held: HeldGroup | None
    ranks: int
    rank: int
    device: torch.device
    replicas: ReplicateAxis | None = None
    full_mesh: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = field(default=None, compare=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that parameters are sharded over; None if nothing is sharded."""
        return None if self.held is None else self.held.group

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks that run the same program on it."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def replicated(self) -> int:
        """How many ranks hold each shard."""
        return 1 if self.replicas is None else self.replicas.ranks

    @property
    def key(self) -> tuple[int, int]:
        """Equal for axes that communicate over the same process groups."""
        return id(self.held), id(self.replicas.held if self.replicas else None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve_again, (self.mesh if self.full_mesh is None else self.full_mesh, self.dims, self.is_replicated)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole: there is nothing to gather."""
        return self.held is None and (self.dims is None or bool(self.dims.shard_names))


def _resolve_again(mesh: DeviceMesh, dims: DataParallelMeshDims | None, cuts_nothing: bool) -> ShardAxis:
    axis = resolve_mesh(mesh, dims)
    return everywhere(axis) if cuts_nothing else axis


_BESIDE: _torch.PerRank[tuple[int, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = _torch.PerRank()


@on_release
def _forget_beside() -> None:
    for key, groups in list(_BESIDE.items()):
        if not all(map(_torch.is_alive, groups)):
            del _BESIDE[key]


def beside(owner: dist.ProcessGroup, role: str, ranks: list[int], *, name: str | None = None) -> dist.ProcessGroup:
    """A process group of `ranks` beside `owner`, made once by all of them together.

    Kept for good: whether it must be made may not depend on what one of them still holds.

    name: what all `ranks` know alike and no other group of theirs has; None if they share `owner`, whose name it is.
    """
    _forget_beside()
    key = (id(owner), role)
    if key not in _BESIDE:
        known = _torch.group_name(owner) if name is None else name
        _BESIDE[key] = owner, _torch.new_group(f"fullshard {known} {role} {ranks}", ranks)
    return _BESIDE[key][1]


def group_of(ranks: tuple[int, ...], owner: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group of exactly these global ranks, in order: one that there is, or one made by all of them together."""
    for group in (dist.group.WORLD, owner):
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    _forget_beside()
    for _, made in _BESIDE.values():
        if tuple(dist.get_process_group_ranks(made)) == ranks:
            return made
    return beside(owner, "all", list(ranks), name="all")


def everywhere(axis: ShardAxis) -> ShardAxis:
    """The same ranks, holding everything alike: for what cannot be cut. May make a process group, so it is collective."""
    if axis.group is None:
        return axis
    over = axis.group, axis.ranks, axis.rank
    if axis.replicas is not None:
        ranks = axis.mesh.mesh.flatten().tolist()
        _forget_beside()
        before = sum(
            role == "everywhere" and dist.get_process_group_ranks(made) == ranks for (_, role), (_, made) in _BESIDE.items()
        )
        group = beside(axis.group, "everywhere", ranks, name=f"mesh {before}")
        over = group, group.size(), group.rank()
    replicas = ReplicateAxis(held(over[0]), *over[1:])
    return ShardAxis(axis.mesh, None, 1, 0, axis.device, replicas, axis.full_mesh, axis.dims)


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> ShardAxis:
    """The axes of `mesh`; None makes a 1-D mesh over the default process group (started if need be).

    One axis: shard. Two: replicate, then shard. With `dims`, the named axes of a mesh of any size.

    Raises ValueError if `mesh` is no such DeviceMesh, lies on meta, or this rank is not on it, or if the names of two axes
    say that they are the other way round.
    """
    if mesh is None:
        if dims is not None:
            raise ValueError("dp_mesh_dims names axes of mesh, but no mesh was given: pass the full mesh as well")
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh or None, got {type(mesh).__name__}: build one with init_device_mesh()")
    if mesh.device_type == "meta":
        raise ValueError(
            "mesh must lie on a real device, got 'meta': parameters may be on meta, the mesh says where they will live"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this rank ({dist.get_rank()}) is not on the mesh of ranks {mesh.mesh.tolist()}: "
            "call fully_shard only on the ranks that are"
        )
    if dims is not None:
        return _axes_of_names(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must have one axis (shard) or two (replicate, shard), got {mesh.ndim} axes of sizes "
            f"{tuple(mesh.mesh.shape)}: take axes of it with mesh['name'], or name them with dp_mesh_dims="
        )
    check_names(mesh)
    return _axes(mesh, shard=mesh.ndim - 1, replicate=0 if mesh.ndim == 2 else None)


_SHARDS = re.compile(r".*(shard|fsdp).*|(cp|sp|context|seq|sequence|ulysses)(parallel)?")
_REPLICATES = re.compile(r".*replic.*|ddp")
_NEITHER = re.compile(r".*(no|non|un)shard.*")


def check_names(mesh: DeviceMesh, *, whole: str = "") -> None:
    """Raises ValueError if the axes of a (replicate, shard) mesh are named the other way round, or both as ones to shard over.

    An axis to shard over has "shard" or "fsdp" in its name, or is one of context or sequence parallelism, whose ranks share the
    parameters with those of data parallelism in most programs. Names that say neither ("dp", "outer", "data") pass, "cp" behind
    one of those too: sharding over context-parallel ranks and replicating over the others is right, and may be meant.

    whole: what sharding over both axes takes besides a flat mesh, for the text.
    """
    if mesh.ndim != 2 or mesh.mesh_dim_names is None or mesh.size() == 1:
        return
    first, second = mesh.mesh_dim_names
    kinds = [_said_by(first), _said_by(second)]
    got = f"mesh must have the axes (replicate, shard), got {(first, second)} of sizes {tuple(mesh.mesh.shape)}"
    both = f"pass mesh._flatten('{first}_{second}'){whole}"
    if kinds[1] == "replicate":
        raise ValueError(
            f"{got}, of which the second, that parameters would be sharded over, is named as one to replicate over. Put it "
            f"first, init_device_mesh(..., mesh_dim_names={(second, first)}); or to shard over both, {both}"
        )
    if kinds[0] == "shard" and mesh.size(0) > 1:  # replicating over one rank is sharding over both
        raise ValueError(
            f"{got}, of which the first is named as one to shard over: each shard would be held on all its ranks, and "
            f"parameters sharded over '{second}' alone. To shard over both, {both}; to replicate over '{first}', give it a "
            f"name that says so, init_device_mesh(..., mesh_dim_names={('replicate', second)})"
        )


def _said_by(name: str) -> str | None:
    """What the name of an axis says of it: "shard", "replicate", or None."""
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    if _REPLICATES.fullmatch(bare):
        return "replicate"
    return "shard" if _SHARDS.fullmatch(bare) and not _NEITHER.fullmatch(bare) else None


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"there is no process group, and the environment does not say how to make one ({', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set): start the program with `torchrun --nproc-per-node N "
                "program.py`, or call torch.distributed.init_process_group() before"
            )
        dist.init_process_group()
    accelerator = _torch.accelerator()
    return init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))


_USED: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


@on_release
def _drop_groups() -> None:
    for mesh in list(_USED.values()):
        _torch.drop_groups(mesh)


def _axes(mesh: DeviceMesh, *, shard: int | None, replicate: int | None, **full: Any) -> ShardAxis:
    _USED[id(mesh)] = mesh
    device = _torch.device_of(mesh.device_type)
    replicas = None
    if replicate is not None:
        replicas = ReplicateAxis(held(mesh.get_group(replicate)), mesh.size(replicate), mesh.get_local_rank(replicate))
    if shard is None:
        return ShardAxis(mesh, None, 1, 0, device, replicas, **full)
    group = held(mesh.get_group(shard))
    return ShardAxis(mesh, group, mesh.size(shard), mesh.get_local_rank(shard), device, replicas, **full)


def _axes_of_names(mesh: DeviceMesh, dims: DataParallelMeshDims) -> ShardAxis:
    known = mesh.mesh_dim_names
    if known is None:
        raise ValueError("dp_mesh_dims names axes, but the mesh has no names: give init_device_mesh() mesh_dim_names=")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in known:
            raise ValueError(f"dp_mesh_dims names the axis '{name}', but the mesh has the axes {known}")
    both = set(dims.shard_names) & set(dims.replicate_names)
    if both:
        raise ValueError(f"dp_mesh_dims names {sorted(both)} both as shard and as replicate: an axis is one or the other")
    at = sorted(known.index(name) for name in dims.shard_names)
    if at and at != list(range(at[0], at[0] + len(at))):
        raise ValueError(
            f"dp_mesh_dims shards over {dims.shard_names}, which do not lie side by side in the mesh axes {known}: "
            "they are flattened into one axis, so build the mesh with them adjacent"
        )
    full = {"full_mesh": mesh, "dims": dims}
    shard = _torch.flat_axis(mesh, tuple(known[i] for i in at)) if at else None
    replicate = _torch.flat_axis(mesh, dims.replicate_names) if dims.replicate_names else None
    if shard is None:
        assert replicate is not None
        return _axes(replicate, shard=None, replicate=0, **full)
    if replicate is None:
        return _axes(shard, shard=0, replicate=None, **full)
    return _axes(_torch.join_meshes([replicate, shard]), shard=1, replicate=0, **full)
