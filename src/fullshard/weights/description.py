"""What a model publishes: name, dtype, global shape, mesh and placements of each tensor, and which transport takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard.weights.boxes import Box, ModelTensor
from fullshard.weights.key_map import MappedTensor, SourcePiece
from fullshard.weights.targets import ModelEntry

_MOST_DIMS = 3
_MOST_SHARDS = 16


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor as it is published.

    Attributes:
        name: name in the checkpoint.
        dtype: dtype in which it is published.
        shape: global shape.
        mesh: mesh of the shards; None if they are no DTensor, and for tensors that each rank has in full.
        placements: placement along each dim of the mesh.
        not_sharded: why its shards are no DTensor; "" if they are one, or if each rank has the tensor in full.
        not_m2n: why NCCL M2N does not take the shards as they lie; "" if it does.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    not_sharded: str
    not_m2n: str

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PublishedShard:
    """What this rank has of a published tensor.

    Attributes:
        tensor: its description.
        local: the local tensor of the DTensor; None if `tensor.not_sharded` says why there is none.
        parts: (index of the first element, part of the tensor) of each box that this rank has. Replicas have equal parts.
    """

    tensor: PublishedTensor
    local: Tensor | None
    parts: tuple[tuple[tuple[int, ...], Tensor], ...]


def describe(name: str, mapped: MappedTensor, entries: Mapping[str, ModelEntry]) -> PublishedTensor:
    """Describe a tensor that rules make of the tensors of a model."""
    dtype, entry = mapped.dtype, _same_as(mapped, entries)
    if entry is None:
        text = f"rules make it of {mapped.sources or 'nothing'}"
        return PublishedTensor(name, dtype, mapped.shape, None, (), text, text)
    if entry.parameter is None:
        return PublishedTensor(name, dtype, mapped.shape, None, (), "", "")
    sharding = entry.parameter.sharding
    mesh, placements = sharding.mesh, sharding.placements
    return PublishedTensor(name, dtype, mapped.shape, mesh, placements, "", _not_m2n(mapped.shape, mesh, placements))


def _same_as(mapped: MappedTensor, entries: Mapping[str, ModelEntry]) -> ModelEntry | None:
    """Return the tensor of the model that was at most renamed; None for a part of one, or one made of several."""
    if len(mapped.pieces) != 1:
        return None
    piece = mapped.pieces[0]
    if not isinstance(piece.source, ModelTensor) or piece.source.shape != mapped.shape:
        return None
    return entries[piece.source.name] if piece.dims == tuple(range(len(mapped.shape))) else None


def _not_m2n(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> str:
    """Return why `nccl.m2n.reshard` of nccl-extensions 0.1.0 does not take a sharded tensor as it lies; "" if it does."""
    if not 1 <= len(shape) <= _MOST_DIMS:
        return f"it has {len(shape)} dims, and M2N takes 1 to {_MOST_DIMS}"
    if mesh.ndim > 2:
        return f"its mesh has {mesh.ndim} dims, and M2N takes 2"
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        return f"the ranks of its mesh are {ranks}, and M2N takes 0, 1, 2, ... in order"
    if sum(type(placement) is Shard for placement in placements) > 1:
        return f"{len(placements)} dims of its mesh shard it, and M2N takes one"
    for size, placement in zip(mesh.mesh.shape, placements):
        if type(placement) is Shard:
            if shape[placement.dim] % size:
                return f"its {shape[placement.dim]} rows along dim {placement.dim} are uneven on {size} ranks"
            if size > _MOST_SHARDS:
                return f"it has {size} shards, and M2N takes {_MOST_SHARDS} for a shard of the destination"
        elif type(placement) is not Replicate:
            return f"its placement {placement} is neither Shard nor Replicate"
    return ""


def shard_of(published: PublishedTensor, mapped: MappedTensor, values: Mapping[str, ModelEntry], rank: int) -> PublishedShard:
    """Return what the rank with this index among those of the model, this one, has of a published tensor."""
    parts = tuple((at.start, part) for _, at, part in parts_of(mapped, values, rank))
    entry = None if published.not_sharded else _same_as(mapped, values)
    return PublishedShard(published, None if entry is None else entry.local.view_as(entry.local), parts)


def parts_of(mapped: MappedTensor, values: Mapping[str, ModelEntry], rank: int) -> Iterator[tuple[SourcePiece, Box, Tensor]]:
    """Yield (piece, box of the mapped tensor, part of this rank's shard that fills it, with the dims of the mapped tensor)."""
    for piece in mapped.pieces:
        if isinstance(piece.source, ModelTensor):
            own = piece.source.shard_map.boxes[rank]
            at = None if own is None else piece.mapped_box(own)
            if own is not None and at is not None:
                entry = values[piece.source.name]
                inner = piece.source_box(at).relative_to(own)
                yield piece, at, piece.view_as_mapped(entry.local.view(own.shape)[inner.slices()])
