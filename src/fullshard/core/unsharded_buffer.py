"""The unsharded buffer of a group (all-gather output) and the all-gathers that fill it: copy-in, collective, copy-out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard.comm.base import Started, StartedWork
from fullshard.comm.streams import nothing
from fullshard.comm.traffic import ObservedCollectives, TrafficCounter
from fullshard.core.layout import DirectRule, Extent, GroupLayout, ParamOffsets
from fullshard.policies import Dtypes, MixedPrecisionPolicy


@dataclass(frozen=True, eq=False)
class GroupCollectives:
    """Collectives of the process groups that a parameter group communicates over."""

    gather: ObservedCollectives  # all-gather, over the shard axis
    reduce: ObservedCollectives  # reduce-scatter, over the shard axis
    replicate: ObservedCollectives | None  # over the replicas; None without them
    whole: ObservedCollectives  # all-gather over all ranks that hold shards, in one hop; `gather`, except under HFSDP
    subgroup: ObservedCollectives | None  # all-gather among the k ranks of `reshard_after_forward=k`; None without it
    traffic: TrafficCounter  # records copies between host and device, too


@dataclass(frozen=True, slots=True)
class Storage:
    """Devices of a group's shards and unsharded parameters, and options of its buffers."""

    device: torch.device  # device of the unsharded parameters
    host: bool  # CPU offload: shards are in host memory and are copied to `device` for each all-gather
    pinned: bool  # shards in host memory are pinned, so that copies to the device do not block the host
    direct: DirectRule  # chooses the parameters with a message of their own
    mp: MixedPrecisionPolicy  # passed to fsdp_pre_all_gather of tensor subclasses

    @property
    def home(self) -> torch.device:
        """Device of the shards."""
        # On meta, as in predictions of a step, shards in host memory are on meta as well.
        return torch.device("cpu") if self.host and self.device.type != "meta" else self.device


def dim_permutation(full: Tensor, blocks: Tensor, place: ParamOffsets) -> tuple[list[Tensor], list[Tensor]]:
    """Return matching views, to copy out a parameter that is sharded along another dim than 0, or to copy its gradient in.

    Each rank with rows has one view of `full`, the unsharded parameter or its gradient, and one of `blocks`, the columns of
    the parameter in a packed buffer, (ranks, size).
    """
    ranks, length, chunk = blocks.shape[0], place.shape[place.dim], place.chunk
    full_parts: list[Tensor] = []
    block_parts: list[Tensor] = []
    for rank in range(ranks):
        extent = Extent.of_chunk(length, chunk=chunk, rank=rank)
        if extent.rows:
            part = full.narrow(place.dim, extent.start, extent.rows)
            full_parts.append(part)
            block_parts.append(blocks[rank, : part.numel()].view(part.shape))
    return full_parts, block_parts


def tensor_on_storage(flat: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor that uses the storage of `flat` but is not a view, so that it has its own version counter."""
    # Views share the version counter of `flat`. Each all-gather's copies increment it, which would invalidate saved parameters.
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), offset, tuple(shape))  # type: ignore[call-overload]


Step = Callable[[], Any]


def copy_out_of(layout: GroupLayout, flat: Tensor, staging: Tensor) -> Step:
    """Return the copy-out, which copies the packed all-gather output to the parameters' regions of the buffer.

    Dim-0 parameters need one call, parameters sharded along other dims a second one. The CPU leaves out gaps, and copies each
    region by itself, or a run of equal segments at once. `flat`: (unsharded_numel,), `staging`: (ranks * size,).
    """
    places: list[tuple[int, int]] = []  # (column, size); a column is also an offset in the shard: the packed part is first
    permuted: list[Tensor] = []
    blocks: list[Tensor] = []
    if layout.packed is None or not staging.numel():
        return nothing
    ranks, packed, column, on_cpu = layout.ranks, staging.view(layout.ranks, -1), 0, flat.device.type == "cpu"
    for segment in layout.packed.segments:
        place = layout.offsets[segment.parameter] if segment.parameter >= 0 else None
        if segment.size and place is not None and place.permuted:
            full = flat[ranks * place.offset :][: prod(place.shape)].view(place.shape)
            full_parts, block_parts = dim_permutation(full, packed[:, column : column + segment.size], place)
            permuted += full_parts
            blocks += block_parts
        elif segment.size and not permuted and not (on_cpu and place is None):  # permuted parameters come last
            places.append((column, segment.size))
        column += segment.size
    steps: list[Step] = []
    if places and on_cpu:
        steps.append(partial(torch._foreach_copy_, *_runs(packed, flat, places)))
    elif places:
        sizes = [size for _, size in places]
        regions = [flat[ranks * column :][: ranks * size].view(ranks, -1) for column, size in places]
        steps.append(partial(torch.split_with_sizes_copy, packed[:, : sum(sizes)], sizes, 1, out=regions))
    if permuted:
        steps.append(partial(torch._foreach_copy_, permuted, blocks))

    def take_all() -> None:
        for step in steps:
            step()

    return steps[0] if len(steps) == 1 else take_all


def _runs(packed: Tensor, flat: Tensor, places: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return matching views of `flat` and `packed`, (count, ranks, size) each: one pair for each run of equal segments.

    `packed` is the all-gather output, (ranks, numel). The segment at (column, size) has `size` elements of each row, which are
    copied to the `ranks * size` elements of `flat` at `ranks * column`. The segments of one run lie at equal distances.
    """
    ranks, at = len(packed), 0
    regions: list[Tensor] = []
    columns: list[Tensor] = []
    while at < len(places):
        (column, size), count = places[at], 1
        distance = places[at + 1][0] - column if at + 1 < len(places) else size
        while places[at + count : at + count + 1] == [(column + count * distance, size)]:
            count += 1
        regions.append(flat[ranks * column :].as_strided((count, ranks, size), (ranks * distance, size, 1)))
        columns.append(packed[:, column:].as_strided((count, ranks, size), (distance, packed.stride(0), 1)))
        at += count
    return regions, columns


@dataclass(eq=False, slots=True)
class AllGather:
    """An all-gather: copy-in steps, the collective, and the copy-out.

    `copy_in` runs on the copy-in stream, if there is one, where it overlaps with the previous all-gather. The rest runs on
    the stream of the all-gather.
    """

    begin: Callable[[], Started]  # starts the collective
    before: Sequence[Step] = ()  # copy-in
    finish: Step = nothing  # copy-out, after the collective has completed
    observed: Callable[[], Started] | None = None  # `begin`, reported to counters and profiler; None if `begin` reports itself

    def copy_in(self) -> StartedWork:
        """Copy the shard from host memory and cast it into the all-gather input, as far as needed."""
        return self.copy_in_and(StartedWork)  # type: ignore[return-value]

    def copy_in_and(self, start: Callable[[], Started]) -> Started:
        """Copy in and start the collective, by `begin` or `observed`."""
        for step in self.before:
            step()
        return start()


class UnshardedBuffer(ABC):
    """The memory that a group's parameters are all-gathered into. `FlatBuffer` is the one of a flat shard."""

    def __init__(self) -> None:
        self.version = -1  # of the shards that were all-gathered last; -1 before the first all-gather
        self.keep = False  # whether `free` and `release_staging` leave the memory allocated, so that its address never changes
        self._storages: list[tuple[torch.UntypedStorage, int]] = []  # with their full sizes, to allocate and free by resize_

    @staticmethod
    def _sized(tensor: Tensor) -> tuple[torch.UntypedStorage, int]:
        """Return the storage of `tensor`, and its size in bytes."""
        return tensor.untyped_storage(), tensor.untyped_storage().size()

    @property
    @abstractmethod
    def memory(self) -> int:
        """Bytes of the unsharded parameters that are allocated."""

    @property
    def allocated(self) -> int:
        """Bytes that are allocated, staging memory included, but not that of a custom all-gather."""
        return sum(storage.size() for storage, _ in self._storages)

    @abstractmethod
    def allocate(self, version: int) -> AllGather:
        """Allocate the memory on the compute stream, and return the all-gather of the shards, which have this version."""

    @abstractmethod
    def release_staging(self) -> None:
        """End the all-gather after the compute stream waited for it: release staging, or call fsdp_post_all_gather."""

    def free(self) -> None:
        """Free the memory, unless it is kept. The tensors and their storages stay."""
        if not self.keep:
            for storage, _ in self._storages:
                storage.resize_(0)


class FlatBuffer(UnshardedBuffer):
    """The unsharded buffer of a group with a flat shard: the all-gather output.

        direct   shard view  --(cast into own chunk)------------all-gather--> region of a large parameter, no copy-out
        packed   shard range --(cast into own chunk of staging)-all-gather--> staging (ranks, packed) --split--> regions

    Without a cast or custom memory, the all-gather reads the shard itself or, with CPU offload, its copy on the device.

    The storage has memory between `allocate` and `free`, which resize it. `views` and the unsharded Parameters on it outlive
    `free`, since autograd saves them in forward and reads them in backward. A failed all-gather or new groups replace them.
    """

    def __init__(
        self, layout: GroupLayout, dtypes: Dtypes, collectives: GroupCollectives, storage: Storage, shard: Tensor
    ) -> None:
        super().__init__()
        self.flat = torch.empty(layout.unsharded_numel, dtype=dtypes.compute, device=storage.device)
        # Buffers that only the all-gather needs: the packed output and, with CPU offload, the copy of the shard.
        self._staging: list[Tensor] = []
        # The unsharded parameters, with separate version counters.
        self.views = [tensor_on_storage(self.flat, layout.ranks * place.offset, place.shape) for place in layout.offsets]
        self._custom_output: list[Tensor] = []  # of a custom all-gather, allocated at its start; `keep` keeps it
        self._layout, self._dtypes, self._collectives, self._devices = layout, dtypes, collectives, storage
        self._gather = self._plan(shard)  # the all-gather over all ranks
        # The all-gather among the k ranks of `reshard_after_forward=k`: run once, dropped if shards were written since forward.
        self._subgroup_gather: AllGather | None = None
        # This rank's part of the buffer, (unsharded_numel / k,): the input of that all-gather.
        self._subgroup_shard: Tensor | None = None
        self._storages = [self._sized(self.flat), *map(self._sized, self._staging)]  # that of `flat` first
        self.free()

    def gather_from(self, shard: Tensor) -> None:
        """Use `shard`, the flat shard in new memory, for all later all-gathers."""
        (storage, nbytes), was_freed = self._storages[0], not self.memory
        if was_freed:
            storage.resize_(nbytes)  # the plan takes slices of `flat`, which needs memory for that
        self._staging, self._custom_output = [], []
        self._gather = self._plan(shard)
        self._storages[1:] = map(self._sized, self._staging)
        self.release_staging()
        if was_freed:
            storage.resize_(0)

    def _plan(self, shard: Tensor) -> AllGather:
        """Plan the all-gather over all ranks, and allocate its staging buffers."""
        layout, gather, flat = self._layout, self._collectives.gather, self.flat
        before: list[Step] = []
        if self._devices.host:
            # The copy from host memory is a copy-in step: it runs on a stream, and `synchronize_host` guards its source.
            home, shard = shard, torch.empty_like(shard, device=self._devices.device, pin_memory=False)
            self._staging.append(shard)
            if home.numel():
                before.append(partial(self._collectives.traffic.record, "to_device", [home]))
                before.append(partial(shard.copy_, home, non_blocking=True))
        if not layout.unsharded_numel:
            return AllGather(StartedWork, before)
        if gather.gather_memory is not None and layout.packed is not None:
            return self._plan_custom(shard, before)
        staging = flat.new_empty(layout.ranks * layout.packed.size if layout.packed else 0)
        if staging.numel():
            self._staging.append(staging)
        outs = [
            flat[layout.ranks * bucket.offset :][: layout.ranks * bucket.size] if bucket.direct else staging
            for bucket in layout.buckets
        ]
        shards = [shard[bucket.offset : bucket.offset + bucket.size] for bucket in layout.buckets]
        if self._dtypes.storage != self._dtypes.compute:
            # Cast into this rank's chunk of the output, so that the all-gather input needs no memory of its own.
            own = [out[gather.rank * bucket.size :][: bucket.size] for out, bucket in zip(outs, layout.buckets)]
            # For one tensor the plain copy takes half as long.
            before.append(partial(own[0].copy_, shards[0]) if len(own) == 1 else partial(torch._foreach_copy_, own, shards))
            shards = own
        begin = gather.inner.gatherer(outs, shards)
        observed = partial(gather.observed, "all_gather", begin, outs)
        return AllGather(begin, before, copy_out_of(layout, flat, staging), observed=observed)

    def _plan_custom(self, shard: Tensor, before: Sequence[Step]) -> AllGather:
        """Plan an all-gather of all parameters as one packed message, in memory that a custom all-gather allocates."""
        layout, gather, flat, output = self._layout, self._collectives.gather, self.flat, self._custom_output
        allocate, size = gather.gather_memory, shard.numel()
        assert allocate is not None

        def begin() -> Started:
            if not output:
                output.append(allocate((layout.ranks * size,), dtype=flat.dtype, device=flat.device))
            chunk = output[0][gather.rank * size :][:size]
            chunk.copy_(shard)
            return gather.gatherer([output[0]], [chunk])()

        def copy_out() -> None:
            copy_out_of(layout, flat, output[0])()

        return AllGather(begin, before, copy_out)

    def allocate(self, version: int) -> AllGather:
        """Allocate memory on the compute stream, and return the all-gather for shards of this version."""
        if version != self.version:
            # The shards were written after forward, so the subgroup's copy has the old weights.
            self.version, self._subgroup_gather = version, None
        # The subgroup's all-gather writes straight into the buffer, so it needs no staging memory.
        for storage, nbytes in self._storages if self._subgroup_gather is None else self._storages[:1]:
            if not self.keep or storage.nbytes() != nbytes:  # on the CPU, resize_ moves the memory even if the size is equal
                storage.resize_(nbytes)
        return self._subgroup_gather or self._gather

    def release_staging(self) -> None:
        """Free the memory that only the all-gather needed, after the compute stream waited for the all-gather."""
        # The compute stream may reuse the freed memory at once. It must therefore be ordered behind the copy-out, which reads
        # the memory on the all-gather stream.
        self._subgroup_gather = None
        if self.keep:
            return
        self._subgroup_shard = None
        self._custom_output.clear()
        for storage, _ in self._storages[1:]:
            storage.resize_(0)

    @property
    def memory(self) -> int:
        """Bytes of the buffer if it is allocated, else 0."""
        return self.flat.untyped_storage().size()

    @property
    def allocated(self) -> int:
        """Bytes of the buffer, the staging buffers and this rank's subgroup shard that are allocated."""
        part = self._subgroup_shard
        return super().allocated + (0 if part is None else part.nbytes)

    def save_subgroup_shard(self) -> None:
        """Copy this rank's part of the buffer before the buffer is freed, and plan the all-gather of the parts."""
        subgroup = self._collectives.subgroup
        if subgroup is not None and self.memory:
            # The buffer is divided by elements and not by parameters, so this works for every layout, dtype and shard dim.
            part = self.flat.view(subgroup.ranks, -1)[subgroup.rank]
            if self._subgroup_shard is None or not self.keep:
                self._subgroup_shard = torch.empty_like(part)
            self._subgroup_shard.copy_(part)
            self._subgroup_gather = AllGather(subgroup.gatherer([self.flat], [self._subgroup_shard]))

    def drop_subgroup_shard(self) -> None:
        """Discard the subgroup's part and its all-gather, so that the next one runs over all ranks."""
        self._subgroup_gather = None
        if not self.keep:
            self._subgroup_shard = None
