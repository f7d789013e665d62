"""The gathered side of a group: memory that comes and goes, and the collective that fills it, planned once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.base import Allocate, Collectives, StartedWork
from fullshard.collectives.traffic import TrafficCounter
from fullshard.policies import Dtypes, MixedPrecisionPolicy
from fullshard.sharding.layout import Extent, GroupLayout, ParamOffsets


@dataclass(frozen=True, eq=False)
class GroupCollectives:
    """Who carries the messages of a group. group n - 1 carriers.

    replicate: over the ranks that hold the same shards, None if there are none.
    retain: over the smaller group that keeps the parameters between forward and backward, None if none does.
    """

    gather: Collectives
    reduce: Collectives
    replicate: Collectives | None
    retain: Collectives | None
    traffic: TrafficCounter

    @property
    def gather_memory(self) -> Allocate | None:
        """The caller's memory for gathers, None for our own."""
        return getattr(self.gather, "gather_memory", None)

    @property
    def reduce_memory(self) -> Allocate | None:
        return getattr(self.reduce, "reduce_memory", None)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a group's shards are kept and computed with, and how its messages are cut."""

    device: torch.device  # where parameters are gathered
    host: bool  # shards are kept in the host's memory, and travel to `device` for each gather
    pinned: bool
    direct_min_bytes: float
    poison: bool
    mp: MixedPrecisionPolicy

    @property
    def home(self) -> torch.device:
        """Where the shards are."""
        return torch.device("cpu") if self.host else self.device


class UnshardedBuffer(Protocol):
    """What a group gathers into."""

    versions: list[int]

    def gathered(self, versions: list[int]) -> None: ...
    def owns(self, tensor: Tensor) -> bool: ...
    def allocate(self) -> None: ...
    def start(self) -> StartedWork: ...
    def finish(self) -> None: ...
    def release_staging(self) -> None: ...
    def save_subgroup_shard(self) -> None: ...
    def drop_subgroup_shard(self) -> None: ...
    def free(self) -> None: ...


def dim_permutation(whole: Tensor, blocks: Tensor, place: ParamOffsets) -> tuple[list[Tensor], list[Tensor]]:
    """(parts of `whole`, the same parts of `blocks` (ranks, size)) of a parameter that is cut along another dim than 0."""
    ranks, length = blocks.shape[0], place.shape[place.dim]
    wholes: list[Tensor] = []
    parts: list[Tensor] = []
    for rank in range(ranks):
        extent = Extent.cut(length, ranks=ranks, rank=rank)
        if extent.rows:
            part = whole.narrow(place.dim, extent.start, extent.rows)
            wholes.append(part)
            parts.append(blocks[rank, : part.numel()].view(part.shape))
    return wholes, parts


@dataclass(frozen=True, slots=True, eq=False)
class _ResizableStorage:
    """Memory that comes and goes behind tensors that stay."""

    tensor: Tensor
    storage: torch.UntypedStorage
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _ResizableStorage:
        return cls(tensor, tensor.untyped_storage(), tensor.untyped_storage().size())

    def poison(self) -> None:
        if self.tensor.numel():
            self.tensor.fill_(float("nan") if self.tensor.is_floating_point() else 1)


class FlatBuffer:
    """The gathered side of a group, planned once: storage, views, and the prepared collective.

        shard views --(cast into own slot, or nothing)--> region of a large parameter     no copy
        shard range --> slot in staging (ranks, packed) --all-gather--> split_copy --> regions of the small ones

    Memory exists between `allocate` and `free`; the Parameters made over it keep their identity, and their version
    counters move only when the weights behind them did.
    """

    def __init__(
        self, layout: GroupLayout, dtypes: Dtypes, carriers: GroupCollectives, storage: Storage, shard: Tensor
    ) -> None:
        dtype, device = dtypes.compute, storage.device
        self._journal, self._retainer = carriers.traffic, carriers.retain
        self._poison = storage.poison
        self._flat = torch.empty(layout.full_numel, dtype=dtype, device=device)
        temporary: list[Tensor] = []
        self._home = shard
        self._arrived = shard
        if storage.host:
            self._arrived = torch.empty_like(shard, device=device, pin_memory=False)
            temporary.append(self._arrived)

        self._memory = carriers.gather_memory if layout.packed else None
        self._packed = layout.packed
        self._staging_numel = layout.ranks * layout.packed.size if layout.packed else 0
        self._collectives = carriers.gather
        self._staging = torch.empty(0 if self._memory else self._staging_numel, dtype=dtype, device=device)
        if self._staging.numel():
            temporary.append(self._staging)
        outs = [
            self._flat[bucket.pieces[0].full_offset :][: layout.ranks * bucket.size] if bucket.direct else self._staging
            for bucket in layout.buckets
        ]
        self._shards = [self._arrived[bucket.offset : bucket.offset + bucket.size] for bucket in layout.buckets]
        self._gather: Callable[[], StartedWork] = StartedWork
        self._casts: tuple[list[Tensor], list[Tensor]] | None = None
        if self._memory is None and layout.full_numel:
            shards = self._shards
            if dtypes.storage != dtype:
                rank = carriers.gather.rank
                slots = [out[rank * bucket.size :][: bucket.size] for out, bucket in zip(outs, layout.buckets)]
                self._casts, shards = (slots, shards), slots
            self._gather = self._collectives.gatherer(outs, shards)

        self._sizes: list[int] = []
        self._regions: list[Tensor] = []
        self._folded: list[tuple[Tensor, ParamOffsets, int]] = []  # (region, place, first column in the message)
        column = 0
        for piece in layout.packed.pieces if layout.packed else ():
            place = layout.places[piece.parameter] if piece.parameter >= 0 else None
            if place is not None and place.folded:
                if piece.size:
                    self._folded.append((self._apart(piece.full_offset, place.shape), place, column))
            elif piece.size and not self._folded:
                self._sizes.append(piece.size)
                self._regions.append(self._apart(piece.full_offset, (layout.ranks, piece.size)))
            column += piece.size
        self._views(self._staging)
        self.views = [self._apart(place.full_offset, place.shape) for place in layout.places]
        self._storage = _ResizableStorage.of(self._flat)  # between `allocate` and `free`
        self._temporary = [_ResizableStorage.of(tensor) for tensor in temporary]  # between `allocate` and `release_staging`
        self.versions: list[int] = []  # of what was gathered last
        self._retained: Tensor | None = None
        self._from_retained = False
        self.free()

    def _views(self, staging: Tensor) -> None:
        """What is copied out of `staging` (ranks * packed,), and to where."""
        self._columns: Tensor | None = None
        self._unfold: tuple[list[Tensor], list[Tensor]] | None = None
        if not staging.numel():
            return
        packed = staging.view(self._collectives.ranks, -1)
        if self._sizes:
            self._columns = packed[:, : sum(self._sizes)]
        if self._folded:
            self._unfold = ([], [])
            for region, place, column in self._folded:
                wholes, parts = dim_permutation(region, packed[:, column : column + place.size], place)
                self._unfold[0].extend(wholes)
                self._unfold[1].extend(parts)

    def _apart(self, offset: int, shape: Sequence[int]) -> Tensor:
        """A tensor over the full storage that is no view of another, so that its version counter is its own."""
        empty = torch.empty(0, dtype=self._flat.dtype, device=self._flat.device)
        return empty.set_(self._flat.untyped_storage(), offset, tuple(shape))  # type: ignore[call-overload]

    def gathered(self, versions: list[int]) -> None:
        """These are the versions of the shards that this storage shows."""
        self.versions = versions
        self._retained = None

    def owns(self, tensor: Tensor) -> bool:
        return self._flat.numel() > 0 and _torch.is_over(tensor, self._flat.untyped_storage())

    def allocate(self) -> None:
        self._storage.storage.resize_(self._storage.nbytes)
        if self._retained is None:
            for temporary in self._temporary:
                temporary.storage.resize_(temporary.nbytes)
        if self._poison:
            for storage in (self._storage, *(self._temporary if self._retained is None else ())):
                storage.poison()

    def start(self) -> StartedWork:
        self._from_retained = self._retained is not None
        if self._retained is not None and self._retainer is not None:
            return self._retainer.gatherer([self._flat], [self._retained])()
        if self._arrived is not self._home and self._home.numel():
            self._journal.record("to_device", [self._home])
            self._arrived.copy_(self._home, non_blocking=True)
        if self._memory is not None:
            return self._start_in_their_memory(self._memory)
        if self._casts is not None:
            torch._foreach_copy_(*self._casts)
        return self._gather()

    def _start_in_their_memory(self, allocate: Callable[..., Tensor]) -> StartedWork:
        """The caller's all-gather works on memory that it allocates, for each gather anew."""
        self._staging = allocate((self._staging_numel,), dtype=self._flat.dtype, device=self._flat.device)
        slot = self._staging.view(self._collectives.ranks, -1)[self._collectives.rank]
        slot.copy_(self._shards[0])
        self._views(self._staging)
        return self._collectives.gatherer([self._staging], [slot])()

    def finish(self) -> None:
        if self._from_retained:
            return
        if self._columns is not None:
            _torch.split_copy(self._columns, self._sizes, self._regions)
        if self._unfold is not None:
            torch._foreach_copy_(*self._unfold)

    def release_staging(self) -> None:
        """The compute lane is ordered behind the gather: what only the gather needed can go."""
        self._retained = None
        for temporary in self._temporary:
            temporary.storage.resize_(0)
        if self._memory is not None:
            self._staging = self._staging[:0].clone()
            self._views(self._staging)

    def save_subgroup_shard(self) -> None:
        """Keep this rank's part of a smaller group's copy: one stretch of the full storage, whatever is in it."""
        if self._retainer is not None and self._flat.untyped_storage().size():
            parts = self._flat.view(self._retainer.ranks, -1)
            self._retained = parts[self._retainer.rank].clone()

    def drop_subgroup_shard(self) -> None:
        """Drop what was retained."""
        self._retained = None

    def free(self) -> None:
        for storage in (self._storage, *self._temporary):
            if self._poison and storage.storage.size():
                storage.poison()
            storage.storage.resize_(0)
