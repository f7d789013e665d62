"""Allocations and collectives of a parameter group: the counterpart of `core/param_group.py` in bytes, on the same layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from fullshard.core import Bucket, GroupLayout, Message, ReductionLayout, Slice, StartedWork, together
from fullshard.foresight.ledger import Category, Ledger
from fullshard.foresight.program import Program
from fullshard.policies import Dtypes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Layout and options of one parameter group, on one rank."""

    unit: str
    parameters: tuple[str, ...]  # qualified names
    layout: GroupLayout
    reduction: ReductionLayout
    dtypes: Dtypes
    trainable: bool
    axis: str  # collective log of the group: "shards", or "everywhere" for scalars, which are replicated on all ranks
    replicas: int  # ranks with equal shards, this one included
    replicated: bool  # True if an all-reduce over replicas follows the reduce-scatter
    subgroup: int | None  # ranks of the smaller group that keeps a copy after forward, None without one
    host: bool  # True if the shards are offloaded to host memory
    accelerator: bool  # True for the kernels of an accelerator, False for those of the CPU
    gloo: bool  # True if collectives run on gloo, which reduces in memory of its own
    in_flight: int  # maximum number of reductions in flight
    keep: bool = False  # True if unsharded parameters and collective buffers stay allocated

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self.layout.unsharded_numel * self.dtypes.compute.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the flat shard."""
        return self.layout.shard_numel * self.dtypes.storage.itemsize

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the packed all-gather output."""
        return 0 if self.layout.packed is None else self.layout.ranks * self.layout.packed.size * self.dtypes.compute.itemsize


@dataclass(frozen=True, slots=True)
class Merged:
    """Gradients of one reduction, after merging accumulated ones."""

    blocks: list[int | None]  # by parameter; None without a gradient
    dtype: torch.dtype
    spent: list[int]  # blocks of gradients that were added to accumulated ones, to be freed
    kept: bool  # True if earlier backwards had accumulated gradients


class SimulatedGroup:
    """Memory and collectives of a parameter group, in the order of `FlatBuffer`.

    Attributes:
        plan: layout and options.
        kept: by parameter, the block of the gradient accumulated by backwards without reduction, in the dtype `Dtypes.kept`.
        used: True if a gradient was reduced since the last optimizer step.
        kept_reduced_shard: block of the reduce-scatter output, if it stays allocated; else -1.
        shard: block of the flat shard.
    """

    keeps_subgroup_shard = True  # whether `GroupPlan.keep` also keeps the input of the smaller group's all-gather

    def __init__(self, plan: GroupPlan, ledger: Ledger, program: Program) -> None:
        self.plan, self.ledger, self.program = plan, ledger, program
        self.send, self.copy = program.send, program.copy
        self.kept: list[int | None] = [None] * len(plan.parameters)
        self.used = False
        self._flat = -1  # unsharded parameters
        self._staging: list[int] = []
        self._subgroup_shard = -1  # input of the smaller group's all-gather
        self._kept_subgroup_shard = -1  # its block, which stays allocated with `GroupPlan.keep`
        self.kept_reduced_shard = -1
        self.shard = self.allocate(plan.shard_nbytes, "pinned host" if plan.host else "shards")

    def allocate(self, nbytes: int, category: Category, pool: str = "compute") -> int:
        """Allocate a block of this group."""
        return self.ledger.allocate(nbytes, category, self.plan.unit, pool)

    def reduce_collective(self, message: Message) -> StartedWork:
        """Start a collective that reduces. On gloo, allocate its receive buffers, as `GlooCollectives` does."""
        self.send(message)
        if not self.plan.gloo or message.ranks == 1:
            return StartedWork()
        pair = message.ranks == 2
        received = message.nbytes // 2 if pair and message.kind == "reduce_scatter" else message.nbytes
        sent = 0 if message.kind == "reduce_scatter" else message.nbytes
        blocks = [self.allocate(received, "staging"), self.allocate(sent, "staging")]
        return StartedWork(then=lambda: self.ledger.free_all(blocks), unpollable=True)

    # --- all-gather ---

    def gather(self) -> StartedWork:
        """Allocate the all-gather's buffers, and start it from all ranks or from the smaller group."""
        plan, layout = self.plan, self.plan.layout
        compute = plan.dtypes.compute
        resident = plan.keep and self._flat >= 0
        if not resident:
            self._flat = self.allocate(plan.unsharded_nbytes, "gathered")
        if self._subgroup_shard >= 0:
            assert plan.subgroup is not None
            self.send(Message("all_gather", compute, plan.unsharded_nbytes, 1, plan.subgroup))
            return StartedWork()
        if plan.host:
            if not resident:
                self._staging.append(self.allocate(plan.shard_nbytes, "staging"))
            if plan.shard_nbytes:
                self.send(Message("to_device", plan.dtypes.storage, plan.shard_nbytes, 1))
        if not resident:
            self._staging.append(self.allocate(plan.staging_nbytes, "staging"))
        if plan.dtypes.storage != compute:
            self.copy(plan.shard_nbytes + layout.shard_numel * compute.itemsize)
        self.copy(2 * plan.staging_nbytes)
        if layout.buckets and layout.unsharded_numel:
            numel = layout.ranks * sum(bucket.size for bucket in layout.buckets)
            self.send(Message("all_gather", compute, numel * compute.itemsize, len(layout.buckets), layout.ranks))
        if layout.summed:
            nbytes = layout.summed_region[1] * compute.itemsize
            return self.reduce_collective(Message("all_reduce", torch.int32, nbytes, 1, layout.ranks))
        return StartedWork()

    def finish_all_gather(self) -> None:
        """Free the buffers that only the all-gather needed."""
        self._drop_subgroup_shard()
        if self.plan.keep:
            return
        for block in self._staging:
            self.ledger.free(block)
        self._staging.clear()

    def save_subgroup_shard(self) -> None:
        """Keep this rank's shard of the smaller group's copy, before the unsharded parameters are freed."""
        if self.plan.subgroup is not None:
            if self._kept_subgroup_shard < 0:
                self._kept_subgroup_shard = self.allocate(self.plan.unsharded_nbytes // self.plan.subgroup, "gathered")
            self._subgroup_shard = self._kept_subgroup_shard

    def invalidate_subgroup_shard(self) -> None:
        """Drop the smaller group's copy, which is stale once the optimizer has written the shards."""
        self._drop_subgroup_shard()

    def free(self) -> None:
        """Free the unsharded parameters."""
        if not self.plan.keep:
            self.ledger.free(self._flat)
            self._flat = -1

    def _drop_subgroup_shard(self) -> None:
        self._subgroup_shard = -1
        if not (self.plan.keep and self.keeps_subgroup_shard):
            self.ledger.free(self._kept_subgroup_shard)
            self._kept_subgroup_shard = -1

    # --- gradients between backwards ---

    def accumulate(self, grads: Sequence[int | None]) -> list[int]:
        """Accumulate the gradients of a backward without reduction, in their kept dtype. Return the blocks to free."""
        dtypes = self.plan.dtypes
        spent: list[int] = []
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            if self.kept[index] is None and dtypes.compute == dtypes.kept:
                self.kept[index] = grad  # the gradient itself becomes the accumulator
                continue
            if self.kept[index] is not None:
                if dtypes.compute != dtypes.kept and not self.plan.accelerator:  # on the CPU, add_ casts into a temporary
                    self.ledger.free(self.allocate(self.numel(index) * dtypes.kept.itemsize, "gradients"))
            else:
                self.kept[index] = self.allocate(self.numel(index) * dtypes.kept.itemsize, "gradients")
            spent.append(grad)
        return spent

    def merge(self, grads: list[int | None]) -> Merged:
        """Merge gradients with those accumulated by earlier backwards."""
        if not any(block is not None for block in self.kept):
            return Merged(grads, self.plan.dtypes.compute, [], False)
        spent = self.accumulate(grads)
        merged, self.kept = self.kept, [None] * len(grads)
        return Merged(merged, self.plan.dtypes.kept, spent, True)

    def numel(self, index: int) -> int:
        """Return the number of elements of an unsharded parameter."""
        return prod(self.plan.layout.offsets[index].shape)


class SimulatedReduction:
    """Memory and collectives of one reduction, in the order of `Reduction` in core/reduction.py.

    The reduction owns the blocks of its gradients, and frees them.

    Attributes:
        used: True if any parameter has a gradient.
        replicated: True if an all-reduce over replicas follows.
        packed_grads: blocks of gradients that are free once they are copied into the packed input.
    """

    def __init__(self, group: SimulatedGroup, merged: Merged) -> None:
        grads, dtype = merged.blocks, merged.dtype
        self.group = group
        self.used = any(block is not None for block in grads)
        plan = self.plan = group.plan
        self.replicated = plan.replicated
        itemsize, shard = plan.dtypes.reduce.itemsize, plan.layout.shard_numel
        if plan.keep and group.kept_reduced_shard < 0:
            group.kept_reduced_shard = group.allocate(shard * itemsize, "staging")
        self._reduced_shard = group.kept_reduced_shard if plan.keep else group.allocate(shard * itemsize, "gradients")
        packed = plan.reduction.packed
        self._held: list[int] = []  # inputs of the reduce-scatter, freed when it completes
        if plan.keep:
            self._reserve_arena(dtype)
        elif packed is not None and plan.layout.ranks > 1:  # one rank packs straight into the output
            self._held.append(group.allocate(plan.layout.ranks * packed.size * itemsize, "staging"))
        fillers = [] if packed is None else self._allocate_fillers(grads, dtype)
        if packed is not None and not plan.accelerator:
            self._chunk_cat_on_cpu(packed, dtype)
        if packed is not None:
            group.copy(plan.layout.ranks * packed.size * (dtype.itemsize + itemsize))
        self._sizes = [] if packed is None else [plan.layout.ranks * packed.size]
        for index in plan.reduction.direct:
            grad = grads[index]
            self._sizes.append(group.numel(index))
            if not plan.keep:
                self._held.append(group.allocate(group.numel(index) * dtype.itemsize, "staging") if grad is None else grad)
        group.ledger.free_all(fillers)
        sliced = {part.parameter for message in (*plan.reduction.slices, *plan.reduction.sums) for part in message}
        self._sliced = [block for index, block in enumerate(grads) if index in sliced and block is not None]
        sent = (
            sliced if plan.keep else {*plan.reduction.direct, *sliced}
        )  # with `keep`, direct gradients are copied into the arena
        self.packed_grads = [block for index, block in enumerate(grads) if block is not None and index not in sent]
        self._flat = self._reduced_shard  # gradients of the shards
        if plan.dtypes.reduced != plan.dtypes.reduce or plan.keep:
            self._flat = group.allocate(shard * plan.dtypes.reduced.itemsize, "gradients")
        self._host = group.allocate(shard * plan.dtypes.reduced.itemsize, "pinned host") if plan.host else -1

    def _reserve_arena(self, dtype: torch.dtype) -> None:
        """Reserve memory for all inputs of the reduction. The arena is as large as the model's largest reduction."""
        plan, itemsize, ranks = self.plan, self.plan.dtypes.reduce.itemsize, self.plan.layout.ranks
        packed, most = plan.reduction.packed, [0, 0]
        most[0] = max((ranks * sum(part.size for part in parts) for parts in plan.reduction.slices), default=0)
        most[1] = max((sum(part.size for part in parts) for parts in plan.reduction.sums), default=0)
        sizes = [0 if packed is None or ranks == 1 else ranks * packed.size * itemsize, *(numel * itemsize for numel in most)]
        sizes += [self.group.numel(index) * dtype.itemsize for index in plan.reduction.direct]
        self.group.ledger.reserve(sum(-(-size // 512) * 512 for size in sizes), plan.unit)

    def _allocate_fillers(self, grads: Sequence[int | None], dtype: torch.dtype) -> list[int]:
        """Allocate zeros for gaps and missing gradients in the packed input, and copies of permuted gradients."""
        plan, packed = self.plan, self.plan.reduction.packed
        found: list[int] = []
        for segment in () if packed is None else packed.segments:
            if segment.parameter < 0:
                if dtype != plan.dtypes.compute and segment.size:
                    found.append(self.group.allocate(plan.layout.ranks * segment.size * dtype.itemsize, "staging"))
            elif segment.size and (grads[segment.parameter] is None or plan.layout.offsets[segment.parameter].dim != 0):
                place = plan.layout.offsets[segment.parameter]
                numel = prod(place.shape) if place.dim == 0 else plan.layout.ranks * place.size
                found.append(self.group.allocate(numel * dtype.itemsize, "staging"))
        return found

    def _chunk_cat_on_cpu(self, packed: Bucket, dtype: torch.dtype) -> None:
        """Allocate and free the temporaries of torch._chunk_cat on the CPU.

        It pads all uneven tensors by copies, and casts the tensors one after the other through a copy.
        """
        group, layout = self.group, self.plan.layout
        sizes = [(segment.parameter, layout.ranks * segment.size * dtype.itemsize) for segment in packed.segments]
        uneven = [(index, nbytes) for index, nbytes in sizes if index >= 0 and not layout.is_even(index)]
        padded = [
            group.allocate(nbytes, "staging") for index, nbytes in uneven if layout.offsets[index].dim == 0
        ]  # `_allocate_fillers` has allocated the copies of other dims
        for _, nbytes in sizes if dtype != self.plan.dtypes.reduce else ():
            group.ledger.free(group.allocate(nbytes, "staging"))
        for block in padded:
            group.ledger.free(block)

    def start(self) -> StartedWork:
        """Start the reduce-scatters, and the all-reduces of parameters with few rows."""
        plan, group = self.plan, self.group
        slices, sums, itemsize = plan.reduction.slices, plan.reduction.sums, plan.dtypes.reduce.itemsize
        sizes, ranks = self._sizes, plan.layout.ranks
        if not slices and not sums:
            return self._reduce_scatter(sizes)
        most = max((ranks * sum(part.size for part in parts) for parts in slices), default=0)
        buffer = -1 if plan.keep else group.allocate(most * itemsize, "staging", "reduce")
        group.copy(ranks * sum(part.size for parts in slices for part in parts) * (plan.dtypes.compute.itemsize + itemsize))
        started = StartedWork()
        for parts in slices or ((),):
            sizes = [*sizes, *(ranks * part.size for part in parts)]
            started = self._reduce_scatter(sizes)
            sizes = []
        if sums:
            started = together(started, self._start_all_reduces(sums))
        group.ledger.free(buffer)
        return started

    def _start_all_reduces(self, sums: Sequence[Sequence[Slice]]) -> StartedWork:
        plan, group, itemsize = self.plan, self.group, self.plan.dtypes.reduce.itemsize
        most = max(sum(part.size for part in parts) for parts in sums)
        buffer = -1 if plan.keep else group.allocate(most * itemsize, "staging", "reduce")
        started = StartedWork()
        for parts in sums:
            nbytes = sum(part.size for part in parts) * itemsize
            started = group.reduce_collective(Message("all_reduce", plan.dtypes.reduce, nbytes, 1, plan.layout.ranks))
        return together(started, StartedWork(then=lambda: group.ledger.free(buffer)))

    def _reduce_scatter(self, sizes: Sequence[int]) -> StartedWork:
        dtype, ranks = self.plan.dtypes.reduce, self.plan.layout.ranks
        if not sizes:
            return StartedWork()
        return self.group.reduce_collective(Message("reduce_scatter", dtype, sum(sizes) * dtype.itemsize, len(sizes), ranks))

    def finish(self) -> None:
        """Finish the reduce-scatter."""
        if not self.replicated:
            self._end()

    def replicate(self) -> StartedWork:
        """Start the all-reduce over replicas."""
        plan = self.plan
        if not plan.layout.shard_numel:
            return StartedWork()
        nbytes = plan.layout.shard_numel * plan.dtypes.reduce.itemsize
        return self.group.reduce_collective(Message("all_reduce", plan.dtypes.reduce, nbytes, 1, plan.replicas))

    def _end(self) -> None:
        dtypes, numel = self.plan.dtypes, self.plan.layout.shard_numel
        if self._flat != self._reduced_shard:
            self.group.copy(numel * (dtypes.reduced.itemsize + dtypes.reduce.itemsize))
        if self.plan.host and numel:
            self.group.send(Message("to_host", dtypes.reduced, numel * dtypes.reduced.itemsize, 1))

    def finish_replicated(self) -> None:
        """Finish the all-reduce over replicas."""
        self._end()

    def release_inputs(self) -> None:
        """Free the inputs of the reduce-scatter, which the compute stream has waited for."""
        self.group.ledger.free_all(self._held)
        for block in self._sliced:
            self.group.ledger.free(block)
        self._held, self._sliced = [], []
        if not self.replicated:
            self.release_reduced_shard()

    def release_reduced_shard(self) -> None:
        """Free the reduce-scatter output, unless it is the gradient itself."""
        if self._reduced_shard != self._flat:
            if not self.plan.keep:
                self.group.ledger.free(self._reduced_shard)
            self._reduced_shard = self._flat

    def deliver(self) -> tuple[int, int]:
        """Return the block that becomes `.grad`, and the device block to free after a copy to the host (-1 without one)."""
        return (self._host, self._flat) if self._host >= 0 else (self._flat, -1)


__all__ = ["GroupPlan", "Merged", "SimulatedGroup", "SimulatedReduction"]
