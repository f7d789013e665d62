"""The unsharded buffer of a group: memory that comes and goes, and the ways to gather into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.base import StartedWork, together
from fullshard.collectives.traffic import CountedCollectives, TrafficCounter
from fullshard.policies import Dtypes, MixedPrecisionPolicy
from fullshard.sharding.layout import DirectRule, Extent, GroupLayout, ParamOffsets


@dataclass(frozen=True, eq=False)
class GroupCollectives:
    """The collectives that carry the messages of a group. group n - 1 GroupCollectives.

    replicate: over the ranks that hold the same shards, None if there are none.
    subgroup: over the smaller group that keeps the parameters between forward and backward, None if none does.
    """

    gather: CountedCollectives
    reduce: CountedCollectives
    replicate: CountedCollectives | None
    subgroup: CountedCollectives | None
    traffic: TrafficCounter


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a group's shards are kept and computed with, and how its messages are cut."""

    device: torch.device  # where parameters are gathered
    host: bool  # shards are kept in the host's memory, and travel to `device` for each gather
    pinned: bool
    direct: DirectRule
    poison: bool
    mp: MixedPrecisionPolicy

    @property
    def home(self) -> torch.device:
        """Where the shards are."""
        return torch.device("cpu") if self.host else self.device


def dim_permutation(full: Tensor, blocks: Tensor, place: ParamOffsets) -> tuple[list[Tensor], list[Tensor]]:
    """(parts of `full`, the same parts of `blocks` (ranks, size)) of a parameter that is cut along another dim than 0."""
    ranks, length = blocks.shape[0], place.shape[place.dim]
    of_full: list[Tensor] = []
    of_blocks: list[Tensor] = []
    for rank in range(ranks):
        extent = Extent.cut(length, ranks=ranks, rank=rank)
        if extent.rows:
            part = full.narrow(place.dim, extent.start, extent.rows)
            of_full.append(part)
            of_blocks.append(blocks[rank, : part.numel()].view(part.shape))
    return of_full, of_blocks


def over(flat: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A tensor over the storage of `flat` that is no view of another, so that its version counter is its own."""
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), offset, tuple(shape))  # type: ignore[call-overload]


Step = Callable[[], object]


def copies_out(layout: GroupLayout, flat: Tensor, staging: Tensor) -> list[Step]:
    """Steps that copy the packed message in `staging` (ranks * size,) to the places of its parameters in `flat`.

    Stretches up to the first parameter that is cut along another dim than 0 go in one call, the others behind it in a second.
    """
    sizes: list[int] = []
    stretches: list[Tensor] = []
    permuted: list[Tensor] = []
    blocks: list[Tensor] = []
    if layout.packed is None or not staging.numel():
        return []
    packed, column = staging.view(layout.ranks, -1), 0
    for segment in layout.packed.pieces:
        place = layout.places[segment.parameter] if segment.parameter >= 0 else None
        if segment.size and place is not None and place.folded:
            full = flat[segment.full_offset :][: prod(place.shape)].view(place.shape)
            of_full, of_blocks = dim_permutation(full, packed[:, column : column + segment.size], place)
            permuted += of_full
            blocks += of_blocks
        elif segment.size and not permuted:
            sizes.append(segment.size)
            stretches.append(flat[segment.full_offset :][: layout.ranks * segment.size].view(layout.ranks, -1))
        column += segment.size
    steps: list[Step] = []
    if sizes:
        steps.append(partial(_torch.split_copy, packed[:, : sum(sizes)], sizes, stretches))
    if permuted:
        steps.append(partial(torch._foreach_copy_, permuted, blocks))
    return steps


def _with_sum(
    layout: GroupLayout,
    gather: CountedCollectives,
    flat: Tensor,
    shard: Tensor,
    before: list[Step],
    begin: Callable[[], StartedWork] | None,
) -> Callable[[], StartedWork]:
    """`begin` together with the sum that gathers the summed parameters. `before` gets the steps that it needs.

    Integers are summed, of which at most one is not zero: bits arrive as they were sent.
    """
    offset, numel = layout.summed_region
    region = flat[offset : offset + numel]
    before.append(region.zero_)
    own: list[Tensor] = []
    rows: list[Tensor] = []
    for index in layout.summed:
        mine, place = layout.rows_of(index, gather.rank), layout.places[index]
        if mine.start < mine.stop:
            own.append(flat[place.full_offset :][mine])
            rows.append(shard[place.offset :][: mine.stop - mine.start])
    if own:
        before.append(partial(torch._foreach_copy_, own, rows))
    bits = region.view(torch.int32)
    if begin is None:
        return partial(gather.all_reduce, bits)
    return lambda: together(begin(), gather.all_reduce(bits))


class Gather:
    """One way to gather: steps before a collective, the collective, and steps behind it, all planned.

    `start` and `finish` run on a lane, in this order; or `copy_in` on a lane of its own, and then `begin` and `finish`.
    """

    __slots__ = ("_after", "_before", "_begin")

    def __init__(self, begin: Callable[[], StartedWork], before: Sequence[Step] = (), after: Sequence[Step] = ()) -> None:
        self._begin, self._before, self._after = begin, before, after

    @property
    def copies_in(self) -> bool:
        """Whether there are steps before the collective."""
        return bool(self._before)

    def copy_in(self) -> StartedWork:
        """Cast the shard, or copy it from the host's memory, to where the collective reads it."""
        for step in self._before:
            step()
        return StartedWork()

    def begin(self) -> StartedWork:
        """Begin the collective."""
        return self._begin()

    def start(self) -> StartedWork:
        """Copy in, and begin the collective."""
        for step in self._before:
            step()
        return self._begin()

    def finish(self) -> None:
        """The collective is done: put what it brought where the full parameters are."""
        for step in self._after:
            step()


class CallerMemoryGather(Gather):
    """One gather of one packed message, in memory that the caller's all-gather allocates."""

    __slots__ = ("_collectives", "_flat", "_layout", "_shard", "_staging")

    def __init__(
        self, layout: GroupLayout, collectives: CountedCollectives, flat: Tensor, shard: Tensor, before: Sequence[Step]
    ) -> None:
        super().__init__(StartedWork, before)
        self._layout, self._collectives, self._flat, self._shard = layout, collectives, flat, shard
        self._staging: Tensor | None = None  # from the first gather on, of one that is used again

    def start(self) -> StartedWork:
        """As `Gather.start`."""
        self.copy_in()
        return self.begin()

    def begin(self) -> StartedWork:
        """As `Gather.begin`."""
        allocate, size = self._collectives.gather_memory, self._shard.numel()
        assert allocate is not None
        staging = self._staging
        if staging is None:
            staging = allocate((self._layout.ranks * size,), dtype=self._flat.dtype, device=self._flat.device)
            self._staging = staging
        chunk = staging[self._collectives.rank * size :][:size]
        chunk.copy_(self._shard)
        self._after = copies_out(self._layout, self._flat, staging)
        return self._collectives.gatherer([staging], [chunk])()


class FlatBuffer:
    """The unsharded buffer of a group whose shards lie in a flat one.

        shard views --(cast into own chunk, or nothing)--> region of a large parameter     no copy
        shard range --> chunk of staging (ranks, packed) --all-gather--> split_copy --> regions of the small ones

    Memory exists between `allocate` and `free`; the Parameters made over it (`views`) keep their identity, and their version
    counters move only when the weights behind them did.

    versions: of the shards that it shows; empty until it was gathered into.
    keep: whether memory stays where it is when it is freed.
    """

    def __init__(
        self, layout: GroupLayout, dtypes: Dtypes, collectives: GroupCollectives, storage: Storage, shard: Tensor
    ) -> None:
        self._flat = torch.empty(layout.full_numel, dtype=dtypes.compute, device=storage.device)
        self.keep = False
        self._staging: list[Tensor] = []  # memory that only a gather needs
        self._poison = storage.poison
        self.views = [over(self._flat, place.full_offset, place.shape) for place in layout.places]
        self.versions: list[int] = []
        self._anew: Callable[[], Gather] | None = None  # if each gather is planned by itself
        self._again: Gather | None = None  # the last of those, which holds memory of the caller's all-gather
        self._gather = self._plan(layout, dtypes, collectives, storage, shard)
        self._subgroup = collectives.subgroup
        self._once: Gather | None = None  # a gather for one time, which holds memory of its own: of the smaller group, or anew
        self._part: Tensor | None = None  # this rank's part of the smaller group's copy
        self._memory = [(tensor.untyped_storage(), tensor.untyped_storage().size()) for tensor in (self._flat, *self._staging)]
        self.free()

    def _plan(
        self, layout: GroupLayout, dtypes: Dtypes, collectives: GroupCollectives, storage: Storage, shard: Tensor
    ) -> Gather:
        """The gather over all ranks."""
        gather, flat = collectives.gather, self._flat
        before: list[Step] = []
        if storage.host:
            home, shard = shard, torch.empty_like(shard, device=storage.device, pin_memory=False)
            self._staging.append(shard)
            if home.numel():
                before.append(partial(collectives.traffic.record, "to_device", [home]))
                before.append(partial(shard.copy_, home, non_blocking=True))
        if not layout.full_numel:
            return Gather(StartedWork, before)
        if gather.gather_memory is not None and layout.packed is not None:
            self._anew = partial(CallerMemoryGather, layout, gather, flat, shard, before)
            return Gather(StartedWork)
        staging = flat.new_empty(layout.ranks * layout.packed.size if layout.packed else 0)
        if staging.numel():
            self._staging.append(staging)
        outs = [
            flat[bucket.pieces[0].full_offset :][: layout.ranks * bucket.size] if bucket.direct else staging
            for bucket in layout.buckets
        ]
        shards = [shard[bucket.offset : bucket.offset + bucket.size] for bucket in layout.buckets]
        if dtypes.storage != dtypes.compute:
            own = [out[gather.rank * bucket.size :][: bucket.size] for out, bucket in zip(outs, layout.buckets)]
            if own:
                before.append(partial(torch._foreach_copy_, own, shards))
            shards = own
        begin = gather.gatherer(outs, shards) if layout.buckets else None
        if layout.summed:
            begin = _with_sum(layout, gather, flat, shard, before, begin)
        assert begin is not None
        return Gather(begin, before, copies_out(layout, flat, staging))

    def allocate(self, versions: list[int]) -> Gather:
        """Memory for shards of these versions, on the compute lane, and what gathers them."""
        if versions != self.versions:
            self.versions, self._once = versions, None
        for storage, nbytes in self._memory if self._once is None else self._memory[:1]:
            if not self.keep or storage.nbytes() != nbytes:  # on the CPU, memory moves whenever it is resized
                storage.resize_(nbytes)
        if self._poison:
            self._fill_with_nan()
        if self._once is not None or self._anew is None:
            return self._once or self._gather
        if self._again is None:
            self._again = self._anew()
        return self._again

    def release_staging(self) -> None:
        """The compute lane is ordered behind the gather: memory that only the gather needed can go."""
        self._once = None
        if self.keep:
            return
        self._again = self._part = None
        for storage, _ in self._memory[1:]:
            storage.resize_(0)

    def free(self) -> None:
        """Give the memory back, unless it is kept."""
        if self._poison:
            self._fill_with_nan()
        if not self.keep:
            for storage, _ in self._memory:
                storage.resize_(0)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in this memory."""
        return self._flat.numel() > 0 and _torch.is_over(tensor, self._flat.untyped_storage())

    def save_subgroup_shard(self) -> None:
        """Keep this rank's part of the smaller group's copy: one stretch of the buffer, whatever is in it."""
        subgroup = self._subgroup
        if subgroup is not None and self._flat.untyped_storage().size():
            mine = self._flat.view(subgroup.ranks, -1)[subgroup.rank]
            if self._part is None or not self.keep:
                self._part = torch.empty_like(mine)
            self._part.copy_(mine)
            self._once = Gather(subgroup.gatherer([self._flat], [self._part]))

    def drop_subgroup_shard(self) -> None:
        """Keep that part no longer."""
        self._once = None

    def _fill_with_nan(self) -> None:
        """`CheckPolicy(poison=True)`: have all memory that is there hold NaN."""
        for tensor in (self._flat, *self._staging):
            if tensor.untyped_storage().size() and tensor.numel():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
