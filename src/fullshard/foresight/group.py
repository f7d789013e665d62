"""What a parameter group allocates and sends when it is gathered and reduced: `params` in bytes, over its own layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from fullshard.collectives.base import StartedWork, together
from fullshard.collectives.traffic import Message
from fullshard.foresight.ledger import Category, Ledger
from fullshard.foresight.program import Program
from fullshard.policies import Dtypes
from fullshard.sharding.layout import Bucket, GroupLayout, ReductionLayout, Slice


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of a unit, as it will be on one rank.

    parameters: qualified names.      axis: "shards", or "everywhere" for what cannot be cut; the log that its calls are in.
    replicas: ranks that hold the same shards, 1 if there are no others.      subgroup: ranks of a smaller group, or None.
    host: whether shards are kept in the host's memory.      accelerator: whether kernels are those of one, or of the CPU.
    gloo: whether messages travel by gloo, which sums in memory of its own.
    in_flight: how many groups' gradients may be on their way.
    keep: whether the memory of full parameters and messages stays where it is.
    """

    unit: str
    parameters: tuple[str, ...]
    layout: GroupLayout
    reduction: ReductionLayout
    dtypes: Dtypes
    trainable: bool
    axis: str
    replicas: int
    replicated: bool
    subgroup: int | None
    host: bool
    accelerator: bool
    gloo: bool
    in_flight: int
    keep: bool = False

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full parameters."""
        return self.layout.full_numel * self.dtypes.compute.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the flat shard."""
        return self.layout.shard_numel * self.dtypes.storage.itemsize

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the packed message that is gathered."""
        return 0 if self.layout.packed is None else self.layout.ranks * self.layout.packed.size * self.dtypes.compute.itemsize


@dataclass(frozen=True, slots=True)
class Merged:
    """Gradients that are reduced together. spent: blocks of those that were added to others. kept: whether any were kept."""

    blocks: list[int | None]
    dtype: torch.dtype
    spent: list[int]
    kept: bool


class SimulatedGroup:
    """The memory of a group. It allocates in the order in which `FlatBuffer` does.

    kept: of each parameter the block of a gradient that backwards without communication left, in the reduce dtype.
    used: whether a gradient was reduced since the optimizer last stepped.
    """

    keeps_part = True  # of a smaller group, with `GroupPlan.keep`

    def __init__(self, plan: GroupPlan, ledger: Ledger, program: Program) -> None:
        self.plan, self.ledger, self.program = plan, ledger, program
        self.send, self.copy = program.send, program.copy
        self.kept: list[int | None] = [None] * len(plan.parameters)
        self.used = False
        self._flat = -1
        self._staging: list[int] = []
        self._part = -1  # that a smaller group's copy is gathered from
        self._kept_part = -1  # its memory, if that stays
        self.kept_sum = -1  # memory of the sum of each reduction, likewise
        self.shard = self.take(plan.shard_nbytes, "pinned host" if plan.host else "shards")

    def take(self, nbytes: int, category: Category, pool: str = "compute") -> int:
        """Allocate a block of this group."""
        return self.ledger.take(nbytes, category, self.plan.unit, pool)

    def exchange(self, message: Message) -> StartedWork:
        """Send a message whose chunks are summed. gloo receives those of other ranks beside them, as `GlooCollectives`."""
        self.send(message)
        if not self.plan.gloo or message.ranks == 1:
            return StartedWork()
        pair = message.ranks == 2
        received = message.nbytes // 2 if pair and message.kind == "reduce_scatter" else message.nbytes
        sent = 0 if message.kind == "reduce_scatter" else message.nbytes
        blocks = [self.take(received, "staging"), self.take(sent, "staging")]
        return StartedWork(then=lambda: self.ledger.give_all(blocks), unpollable=True)

    # --- gathering ---

    def gather(self) -> StartedWork:
        """Allocate what a gather needs, and send it."""
        plan, layout = self.plan, self.plan.layout
        compute = plan.dtypes.compute
        resident = plan.keep and self._flat >= 0
        if not resident:
            self._flat = self.take(plan.full_nbytes, "gathered")
        if self._part >= 0:
            assert plan.subgroup is not None
            self.send(Message("all_gather", compute, plan.full_nbytes, 1, plan.subgroup))
            return StartedWork()
        if plan.host:
            if not resident:
                self._staging.append(self.take(plan.shard_nbytes, "staging"))
            if plan.shard_nbytes:
                self.send(Message("to_device", plan.dtypes.storage, plan.shard_nbytes, 1))
        if not resident:
            self._staging.append(self.take(plan.staging_nbytes, "staging"))
        if plan.dtypes.storage != compute:
            self.copy(plan.shard_nbytes + layout.shard_numel * compute.itemsize)
        self.copy(2 * plan.staging_nbytes)
        if layout.buckets and layout.full_numel:
            numel = layout.ranks * sum(bucket.size for bucket in layout.buckets)
            self.send(Message("all_gather", compute, numel * compute.itemsize, len(layout.buckets), layout.ranks))
        if layout.summed:
            nbytes = layout.summed_region[1] * compute.itemsize
            return self.exchange(Message("all_reduce", torch.int32, nbytes, 1, layout.ranks))
        return StartedWork()

    def finish_gather(self) -> None:
        """Free what only the gather needed."""
        self._give_part()
        if self.plan.keep:
            return
        for block in self._staging:
            self.ledger.give(block)
        self._staging.clear()

    def save_subgroup_shard(self) -> None:
        """Keep this rank's part of the smaller group's copy."""
        if self.plan.subgroup is not None:
            if self._kept_part < 0:
                self._kept_part = self.take(self.plan.full_nbytes // self.plan.subgroup, "gathered")
            self._part = self._kept_part

    def write(self) -> None:
        """The shards are written: what was kept of them is out of date."""
        self._give_part()

    def free(self) -> None:
        """Free the full parameters."""
        if not self.plan.keep:
            self.ledger.give(self._flat)
            self._flat = -1

    def _give_part(self) -> None:
        self._part = -1
        if not (self.plan.keep and self.keeps_part):
            self.ledger.give(self._kept_part)
            self._kept_part = -1

    # --- gradients between backwards ---

    def accumulate(self, grads: Sequence[int | None]) -> list[int]:
        """Keep gradients of a backward that does not communicate, in the reduce dtype. Returns what is left over of them."""
        dtypes = self.plan.dtypes
        spent: list[int] = []
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            if self.kept[index] is None and dtypes.compute == dtypes.reduce:
                self.kept[index] = grad
                continue
            if self.kept[index] is not None:
                if dtypes.compute != dtypes.reduce and not self.plan.accelerator:  # add_ casts by way of a copy there
                    self.ledger.give(self.take(self.numel(index) * dtypes.reduce.itemsize, "gradients"))
            else:
                self.kept[index] = self.take(self.numel(index) * dtypes.reduce.itemsize, "gradients")
            spent.append(grad)
        return spent

    def merge(self, grads: list[int | None]) -> Merged:
        """These gradients and what earlier backwards kept."""
        if not any(block is not None for block in self.kept):
            return Merged(grads, self.plan.dtypes.compute, [], False)
        spent = self.accumulate(grads)
        merged, self.kept = self.kept, [None] * len(grads)
        return Merged(merged, self.plan.dtypes.reduce, spent, True)

    def numel(self, index: int) -> int:
        """Elements of a full parameter."""
        return prod(self.plan.layout.places[index].shape)


class SimulatedReduction:
    """The memory and messages of `Reduction`, in its order. grads: blocks of gradients; they are freed with the reduction."""

    def __init__(self, group: SimulatedGroup, merged: Merged) -> None:
        grads, dtype = merged.blocks, merged.dtype
        self.group = group
        self.used = any(block is not None for block in grads)  # whether any parameter has a gradient
        plan = self.plan = group.plan
        self.replicated = plan.replicated
        itemsize, shard = plan.dtypes.reduce.itemsize, plan.layout.shard_numel
        if plan.keep and group.kept_sum < 0:
            group.kept_sum = group.take(shard * itemsize, "staging")
        self._sum = group.kept_sum if plan.keep else group.take(shard * itemsize, "gradients")
        packed = plan.reduction.packed
        self._held: list[int] = []  # until the messages are sent
        if plan.keep:
            self._use_arena(dtype)
        elif packed is not None and plan.layout.ranks > 1:  # a rank alone packs into the sum
            self._held.append(group.take(plan.layout.ranks * packed.size * itemsize, "staging"))
        zeros = [] if packed is None else self._zeros(grads, dtype)
        if packed is not None and not plan.accelerator:
            self._chunk_cat_on_cpu(packed, dtype)
        if packed is not None:
            group.copy(plan.layout.ranks * packed.size * (dtype.itemsize + itemsize))
        self._sizes = [] if packed is None else [plan.layout.ranks * packed.size]
        for index in plan.reduction.direct:
            grad = grads[index]
            self._sizes.append(group.numel(index))
            if not plan.keep:
                self._held.append(group.take(group.numel(index) * dtype.itemsize, "staging") if grad is None else grad)
        group.ledger.give_all(zeros)
        sliced = {part.parameter for message in (*plan.reduction.slices, *plan.reduction.sums) for part in message}
        self._sliced = [block for index, block in enumerate(grads) if index in sliced and block is not None]
        sent = sliced if plan.keep else {*plan.reduction.direct, *sliced}  # what is direct is copied there
        self.packed_grads = [block for index, block in enumerate(grads) if block is not None and index not in sent]
        self._flat = self._sum
        if plan.dtypes.reduced != plan.dtypes.reduce or plan.keep:
            self._flat = group.take(shard * plan.dtypes.reduced.itemsize, "gradients")
        self._host = group.take(shard * plan.dtypes.reduced.itemsize, "pinned host") if plan.host else -1

    def _use_arena(self, dtype: torch.dtype) -> None:
        """Reserve memory for all messages of the reduction. The largest reduction of the model sizes it."""
        plan, itemsize, ranks = self.plan, self.plan.dtypes.reduce.itemsize, self.plan.layout.ranks
        packed, most = plan.reduction.packed, [0, 0]
        most[0] = max((ranks * sum(part.size for part in parts) for parts in plan.reduction.slices), default=0)
        most[1] = max((sum(part.size for part in parts) for parts in plan.reduction.sums), default=0)
        sizes = [0 if packed is None or ranks == 1 else ranks * packed.size * itemsize, *(numel * itemsize for numel in most)]
        sizes += [self.group.numel(index) * dtype.itemsize for index in plan.reduction.direct]
        self.group.ledger.reserve(sum(-(-size // 512) * 512 for size in sizes), plan.unit)

    def _zeros(self, grads: Sequence[int | None], dtype: torch.dtype) -> list[int]:
        """Zeros that stand in the packed message for gaps and missing gradients, and copies of what is permuted."""
        plan, packed = self.plan, self.plan.reduction.packed
        found: list[int] = []
        for segment in () if packed is None else packed.pieces:
            if segment.parameter < 0:
                if dtype != plan.dtypes.compute and segment.size:
                    found.append(self.group.take(plan.layout.ranks * segment.size * dtype.itemsize, "staging"))
            elif segment.size and (grads[segment.parameter] is None or plan.layout.places[segment.parameter].dim != 0):
                place = plan.layout.places[segment.parameter]
                numel = prod(place.shape) if place.dim == 0 else plan.layout.ranks * place.size
                found.append(self.group.take(numel * dtype.itemsize, "staging"))
        return found

    def _chunk_cat_on_cpu(self, packed: Bucket, dtype: torch.dtype) -> None:
        """There torch._chunk_cat pads by copies of all uneven tensors, and casts by way of a copy of one after the other."""
        group, layout = self.group, self.plan.layout
        sizes = [(segment.parameter, layout.ranks * segment.size * dtype.itemsize) for segment in packed.pieces]
        uneven = [(index, nbytes) for index, nbytes in sizes if index >= 0 and not layout.is_even(index)]
        padded = [
            group.take(nbytes, "staging") for index, nbytes in uneven if layout.places[index].dim == 0
        ]  # else it is above
        for _, nbytes in sizes if dtype != self.plan.dtypes.reduce else ():
            group.ledger.give(group.take(nbytes, "staging"))
        for block in padded:
            group.ledger.give(block)

    def start(self) -> StartedWork:
        """As `Reduction.start`."""
        plan, group = self.plan, self.group
        slices, sums, itemsize = plan.reduction.slices, plan.reduction.sums, plan.dtypes.reduce.itemsize
        sizes, ranks = self._sizes, plan.layout.ranks
        if not slices and not sums:
            return self._scatter(sizes)
        most = max((ranks * sum(part.size for part in parts) for parts in slices), default=0)
        buffer = -1 if plan.keep else group.take(most * itemsize, "staging", "reduce")
        group.copy(ranks * sum(part.size for parts in slices for part in parts) * (plan.dtypes.compute.itemsize + itemsize))
        started = StartedWork()
        for parts in slices or ((),):
            sizes = [*sizes, *(ranks * part.size for part in parts)]
            started = self._scatter(sizes)
            sizes = []
        if sums:
            started = together(started, self._start_sums(sums))
        group.ledger.give(buffer)
        return started

    def _start_sums(self, sums: Sequence[Sequence[Slice]]) -> StartedWork:
        plan, group, itemsize = self.plan, self.group, self.plan.dtypes.reduce.itemsize
        most = max(sum(part.size for part in parts) for parts in sums)
        buffer = -1 if plan.keep else group.take(most * itemsize, "staging", "reduce")
        started = StartedWork()
        for parts in sums:
            nbytes = sum(part.size for part in parts) * itemsize
            started = group.exchange(Message("all_reduce", plan.dtypes.reduce, nbytes, 1, plan.layout.ranks))
        return together(started, StartedWork(then=lambda: group.ledger.give(buffer)))

    def _scatter(self, sizes: Sequence[int]) -> StartedWork:
        dtype, ranks = self.plan.dtypes.reduce, self.plan.layout.ranks
        if not sizes:
            return StartedWork()
        return self.group.exchange(Message("reduce_scatter", dtype, sum(sizes) * dtype.itemsize, len(sizes), ranks))

    def finish(self) -> None:
        """The sum over shards is there."""
        if not self.replicated:
            self._end()

    def replicate(self) -> StartedWork:
        """As `Reduction.replicate`."""
        plan = self.plan
        if not plan.layout.shard_numel:
            return StartedWork()
        nbytes = plan.layout.shard_numel * plan.dtypes.reduce.itemsize
        return self.group.exchange(Message("all_reduce", plan.dtypes.reduce, nbytes, 1, plan.replicas))

    def _end(self) -> None:
        dtypes, numel = self.plan.dtypes, self.plan.layout.shard_numel
        if self._flat != self._sum:
            self.group.copy(numel * (dtypes.reduced.itemsize + dtypes.reduce.itemsize))
        if self.plan.host and numel:
            self.group.send(Message("to_host", dtypes.reduced, numel * dtypes.reduced.itemsize, 1))

    def finish_replicated(self) -> None:
        """The sum over replicas is there."""
        self._end()

    def release_messages(self) -> None:
        """The messages are sent."""
        self.group.ledger.give_all(self._held)
        for block in self._sliced:
            self.group.ledger.give(block)
        self._held, self._sliced = [], []
        if not self.replicated:
            self.release_sum()

    def release_sum(self) -> None:
        """Only the gradients stay."""
        if self._sum != self._flat:
            if not self.plan.keep:
                self.group.ledger.give(self._sum)
            self._sum = self._flat

    def deliver(self) -> tuple[int, int]:
        """(the block of the gradients, where the shards are; the one on the device that is needed no longer, -1 for none)."""
        return (self._host, self._flat) if self._host >= 0 else (self._flat, -1)


__all__ = ["GroupPlan", "Merged", "SimulatedGroup", "SimulatedReduction"]
