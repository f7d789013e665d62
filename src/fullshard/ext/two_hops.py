"""HFSDP: parameters that are sharded over all ranks of a hybrid mesh, and all-gathered and reduced in two hops.

all-gather   flat shard --over replicas--> inner shard, kept until the shards are written --over shards--> unsharded
reduction    gradients --reduce-scatter over shards--> sum over shards --reduce-scatter over replicas--> flat gradient
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.core import (
    CHECK_LEVEL,
    CHOOSE_AXIS,
    Bucket,
    Collectives,
    Communicator,
    Extent,
    FlatBuffer,
    GroupCollectives,
    GroupLayout,
    MeshDims,
    ParamGroup,
    ParamOffsets,
    ReductionPlan,
    ShardAxis,
    Started,
    StartedWork,
    UnshardedBuffer,
    Work,
    check_order,
    group_class,
    group_of_mesh,
    is_plain,
    pack,
    register_group,
)
from fullshard.policies import Dtypes, StateSharding

LEAST_PADDING = 1 << 20  # `has_few_rows` allows padding of fewer bytes


def has_few_rows(shape: Sequence[int], dim: int, *, itemsize: int, ranks: int) -> bool:
    """Return True if padding would be at least half the bytes of a parameter's chunks, and at least LEAST_PADDING bytes."""
    rows, nbytes = shape[dim], prod(shape) * itemsize
    padded = (rows + -rows % ranks) * (nbytes // rows) if rows else 0
    return padded >= 2 * nbytes and padded - nbytes >= LEAST_PADDING


class AllRanksAxis(ShardAxis):
    """Axis over all ranks of a hybrid mesh, whose own axis is `hybrid`."""

    def joined_with(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return one mesh with this axis, followed by the axes of `mesh`."""
        assert self.hybrid is not None
        ranks = self.hybrid.joined_with(mesh).mesh.transpose(0, 1).flatten(0, 1)  # it was (replicate, shard, ...)
        names = (*(self.mesh.mesh_dim_names or ()), *(mesh.mesh_dim_names or ()))
        return _torch.mesh_of_groups(mesh.device_type, ranks, [self.group, *_torch.groups_of(mesh)], names)

    def __reduce__(self) -> tuple[Any, ...]:
        return over_all_ranks, (self.hybrid,)


# by process group: the mesh that `over_all_ranks` made
_MESHES: weakref.WeakKeyDictionary[ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()


def over_all_ranks(hybrid: ShardAxis) -> ShardAxis:
    """Return an axis that shards over all ranks of a hybrid mesh; other axes unchanged. Collective: it may create a group.

    Its ranks are ordered by the shard dim first, so that the shards of one replicate group are neighbours: together they are
    what the hybrid mesh alone would give to each rank of that group.

        mesh (replicate, shard) of ranks   0 1 2     order   0 3 | 1 4 | 2 5
                                           3 4 5
    """
    replicas = hybrid.replicas
    if replicas is None or replicas.ranks == 1 or hybrid.group is None:
        return hybrid
    ranks = hybrid.mesh.mesh.t().contiguous().flatten()
    group = group_of_mesh(hybrid.group, "all shards", ranks.tolist())
    mesh = _MESHES.get(group)
    if mesh is None:
        name = "_".join(reversed(hybrid.mesh.mesh_dim_names or ("replicate", "shard")))
        mesh = _MESHES[group] = _torch.mesh_of_groups(hybrid.mesh.device_type, ranks, [group], (name,))
    rank = hybrid.rank * replicas.ranks + replicas.rank
    return AllRanksAxis(mesh, group, ranks.numel(), rank, hybrid.device, hybrid=hybrid)


def _check_replicas(states: StateSharding, axis: ShardAxis, dims: MeshDims | None) -> None:
    """Raise ValueError unless the mesh has the replicas over which the level shards the optimizer's states."""
    if not states.shards_over_replicas:
        return
    if dims is not None:
        raise ValueError(
            "states= with optimizer=('replicate', 'shard') cannot be combined with dp_mesh_dims=. Pass the two data-parallel "
            "dims as mesh=, as in mesh['replicate', 'shard'], with parameters that are DTensors on the other dims."
        )
    if axis.replicas is None:
        raise ValueError(
            "states= with optimizer=('replicate', 'shard') needs a hybrid mesh of two dims (replicate, shard), got one of one "
            f"dim of size {axis.ranks}, over which ZERO3 shards everything already. Pass a mesh of two dims, or states=ZERO3."
        )
    check_order(axis.mesh, 0)


def _axis_for(axis: ShardAxis, states: StateSharding, values: Tensor, dim: int) -> ShardAxis:
    """Return the axis over all ranks for a level that shards over replicas, for parameters of enough rows in flat groups."""
    if not states.shards_over_replicas or not group_class(values, axis, {}).flat:
        return axis
    ranks = axis.ranks * axis.replica_count
    return axis if has_few_rows(values.shape, dim, itemsize=values.itemsize, ranks=ranks) else over_all_ranks(axis)


CHECK_LEVEL.append(_check_replicas)
CHOOSE_AXIS.append(_axis_for)


def in_two_hops(layout: GroupLayout, inner: int, outer: int, *, rank: int) -> tuple[GroupLayout, GroupLayout]:
    """Return the layouts of the two hops of an all-gather over `inner * outer` ranks, ordered by the inner rank first.

    The first hop gathers the flat shards of `outer` ranks: its unsharded buffer is the flat shard of the second hop, which
    gathers over `inner` ranks. `rank`: this rank among the inner ones.
    """

    def gathered(place: ParamOffsets) -> tuple[int, ...]:
        """Return the shape of a parameter in the output of the first hop."""
        rows = place.chunk * outer
        if place.permuted:  # a block has its real rows in front and padding behind them: the shape has no padding
            rows = Extent.of_chunk(place.shape[place.dim], chunk=rows, rank=rank).rows
        return (*place.shape[: place.dim], rows, *place.shape[place.dim + 1 :])

    def scaled(bucket: Bucket) -> Bucket:
        """Return a bucket of the second hop, whose chunks are those of `outer` ranks."""
        segments = tuple(replace(one, size=one.size * outer) for one in bucket.segments)
        return Bucket(bucket.direct, bucket.offset * outer, bucket.size * outer, segments)

    first = replace(
        layout,
        ranks=outer,
        offsets=tuple(replace(place, shape=gathered(place)) for place in layout.offsets),
        unsharded_numel=outer * layout.shard_numel,
    )
    second = replace(
        layout,
        ranks=inner,
        offsets=tuple(replace(place, offset=place.offset * outer, size=place.size * outer) for place in layout.offsets),
        buckets=tuple(map(scaled, layout.buckets)),
        shard_numel=outer * layout.shard_numel,
    )
    return first, second


class TwoHopGroup(ParamGroup):
    """Group of parameters whose flat shard is divided over the replicas as well.

    The first hop fills the inner shard, which is the shard that the shard axis alone would give this rank. It runs on the
    stream of the replicas, so that it overlaps with all-gathers over shards, and only if shards were written since.
    """

    replication = "reduce_scatter over replicas"
    _inner: FlatBuffer | None = None  # in the compute dtype, on the device

    @classmethod
    def takes(cls, shard: Tensor, axis: ShardAxis, marks: Mapping[str, Any]) -> bool:
        """Return True for a plain parameter over all ranks of a hybrid mesh."""
        return axis.hybrid is not None and is_plain(shard)

    def plan_layouts(self, outer: int = 1) -> tuple[GroupLayout, GroupLayout]:
        """Return the layouts of the second hop and of the first, and plan the second hop of reductions."""
        replicas, gather = self.collectives.replicate, self.collectives.gather
        assert replicas is not None
        whole, _ = super().plan_layouts(replicas.ranks)
        over_replicas, over_shards = in_two_hops(whole, gather.ranks, replicas.ranks, rank=gather.rank)
        self._over_replicas = GroupCollectives(replicas, replicas, None, replicas, None, self.collectives.traffic)
        self._scatter = ReductionPlan.of(
            over_replicas,
            [parameter.sharding.shard_shape for parameter in self.parameters],
            dtypes=Dtypes(*[self.dtypes.reduce] * 5),  # the sums over shards, of which nothing is cast
            in_order=replicas.in_order,
            device=self.storage.device,
        )
        return over_shards, over_replicas

    @property
    def buffers(self) -> list[UnshardedBuffer]:
        """The inner shard, and the unsharded buffer, if they exist."""
        return [buffer for buffer in (self._inner, *super().buffers) if buffer is not None]

    # --- all-gather ---

    def start_all_gather(self, communicator: Communicator, action: str, first: Callable[[], Work | None] | None = None) -> Work:
        """Start the first hop, unless no shard was written since the last one, and the second hop behind it."""
        self.check_device()
        version, inner = self.version(), self._inner
        if inner is None:
            with torch.inference_mode(False), torch.no_grad():
                inner = self._inner = self._make_inner()
            inner.keep = self.keeps_memory
        if inner.version != version:
            inner.free()
            hop = inner.allocate(version)
            # The first hop starts once the memory of both is allocated: the second one waits for it alone, not for compute.
            first = partial(self.send, communicator, communicator.all_reduce_stream, hop, f"{action} over replicas")
        return super().start_all_gather(communicator, action, first)

    def finish_all_gather(self) -> None:
        """Release the staging memory of both hops."""
        if self._inner is not None:
            self._inner.release_staging()
        super().finish_all_gather()

    def make_buffer(self) -> FlatBuffer:
        """Create an unsharded buffer, gathered from the inner shard."""
        assert self._inner is not None
        return self._make_outer(self._inner)

    def _make_outer(self, inner: FlatBuffer) -> FlatBuffer:
        dtypes, storage = replace(self.dtypes, storage=self.dtypes.compute), replace(self.storage, host=False)
        return FlatBuffer(self.layout, dtypes, self.collectives, storage, inner.flat)

    def _make_inner(self) -> FlatBuffer:
        return FlatBuffer(self.shard_layout, self.dtypes, self._over_replicas, self.storage, self.shard)

    def gather_copy(self, communicator: Communicator, action: str) -> FlatBuffer:
        """All-gather over both hops into memory of its own. Collective."""
        inner = self.gather_now(communicator, self._make_inner(), f"{action} over replicas")
        return self.gather_now(communicator, self._make_outer(inner), action)

    def drop_kept_shards(self) -> None:
        """Discard the inner shard."""
        super().drop_kept_shards()
        if self._inner is not None:
            self._inner.version = -1
            self._inner.free()

    def drop_unsharded(self) -> None:
        """Discard both buffers after an all-gather failed."""
        self._inner = None
        super().drop_unsharded()

    # --- reduction ---

    def new_sum(self, reduced: Tensor) -> Tensor:
        """Allocate this rank's part of the sum over all ranks, which is smaller than the sum over shards."""
        return reduced.new_empty(self.shard_layout.shard_numel)

    def replicate(self, replicas: Collectives, reduced: Tensor, total: Tensor) -> Started:
        """Start the reduce-scatter of the sum over shards, which has the layout of the inner shard, over the replicas."""
        ranks, places = self.shard_layout.ranks, self.shard_layout.offsets
        parts = [reduced[ranks * place.offset :][: prod(place.shape)].view(place.shape) for place in places]
        inputs, outputs = zip(*pack(self._scatter, parts, total, None, factor=1.0, in_place=False))
        started = replicas.reduce_scatter(outputs, inputs, 1.0)
        # The inputs are kept until the reduce-scatter completed.
        return StartedWork(() if started is None else (started,), [inputs].clear)


register_group(TwoHopGroup)
