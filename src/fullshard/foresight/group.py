"""Allocations and collectives of a parameter group: the counterpart of `core/param_group.py` in bytes, on the same layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from fullshard.core import Bucket, GroupLayout, Message, ReductionLayout, StartedWork, UnitOptions, casts_whole
from fullshard.foresight.ledger import Category, Ledger
from fullshard.foresight.program import Program
from fullshard.policies import CPUOffloadPolicy, Dtypes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Layout and options of one parameter group, on one rank."""

    unit: str
    parameters: tuple[str, ...]  # qualified names
    layout: GroupLayout
    reduction: ReductionLayout
    dtypes: Dtypes
    trainable: bool
    log: str  # collective log of the group: "shards", or "everywhere" for scalars, which are replicated on all ranks
    replicas: int  # size of the replicate dim, over which shards are equal or, in two hops, divided
    replicated: bool  # True if a reduction over replicas follows the reduce-scatter
    subgroup: int | None  # ranks of the smaller group that keeps a copy after forward, None without one
    accelerator: bool  # True for the kernels of an accelerator, False for those of the CPU
    gloo: bool  # True if collectives run on gloo, which reduces in memory of its own
    options: UnitOptions
    over_replicas: GroupLayout | None = None  # of the all-gather's first hop, over replicas; None with one hop
    scatter: ReductionLayout | None = None  # the reduction's second hop, over replicas; None with one hop

    @property
    def host(self) -> bool:
        """True if the shards are offloaded to host memory."""
        return isinstance(self.options.offload, CPUOffloadPolicy)

    @property
    def shard_layout(self) -> GroupLayout:
        """Layout of the flat shard."""
        return self.layout if self.over_replicas is None else self.over_replicas

    @property
    def inner_shard_nbytes(self) -> int:
        """Bytes of the result of the all-gather over replicas, kept until the shards are written; 0 with one hop."""
        return 0 if self.over_replicas is None else self.over_replicas.unsharded_numel * self.dtypes.compute.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self.layout.unsharded_numel * self.dtypes.compute.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the flat shard."""
        return self.shard_layout.shard_numel * self.dtypes.storage.itemsize

    @property
    def scales_inputs(self) -> bool:
        """True if gradients are scaled before they are reduced, as `ReductionFactors` does with float16."""
        return self.dtypes.reduce is torch.float16 and self.layout.ranks * (self.replicas if self.replicated else 1) > 1

    def staging_nbytes(self, layout: GroupLayout) -> int:
        """Return the bytes of the packed output of one hop."""
        return 0 if layout.packed is None else layout.ranks * layout.packed.size * self.dtypes.compute.itemsize


@dataclass(frozen=True, slots=True)
class Merged:
    """Gradients of one reduction, after merging accumulated ones."""

    blocks: list[int | None]  # by parameter; None without a gradient
    dtype: torch.dtype
    spent: list[int]  # blocks of gradients that were added to accumulated ones, to be freed
    kept: bool  # True if earlier backwards had accumulated gradients


class _Messages:
    """Messages of gloo, which cannot be polled."""

    def wait(self) -> None:
        """Do nothing."""


class SimulatedGroup:
    """Memory and collectives of a parameter group. It allocates and frees in the order of core/'s classes of one group."""

    keeps_subgroup_shard = True  # whether `keep_memory` also keeps the input of the smaller group's all-gather

    def __init__(self, plan: GroupPlan, ledger: Ledger, program: Program) -> None:
        self.plan, self.ledger, self.program = plan, ledger, program
        self.send, self.copy = program.send, program.copy
        # By parameter, the block of the gradient accumulated by backwards without reduction, in the dtype `Dtypes.kept`.
        self.kept: list[int | None] = [None] * len(plan.parameters)
        self.used = False  # True if a gradient was reduced since the last optimizer step
        self.deferred: SimulatedReduction | None = None  # whose reduction over replicas is left to a later one
        self._flat = -1  # unsharded parameters
        self._inner_shard = -1  # result of the all-gather over replicas
        self._is_current = False  # True if `_inner_shard` has the values of the current shards
        self._staging: list[int] = []
        self._subgroup_shard = -1  # input of the smaller group's all-gather; -1 while its values are not current
        self._kept_subgroup_shard = -1  # its block with `keep_memory`; -1 until it is allocated
        self.allocate(plan.shard_nbytes, "pinned host" if plan.host else "shards")

    def allocate(self, nbytes: int, category: Category, pool: str = "compute") -> int:
        """Allocate a block of this group."""
        return self.ledger.allocate(nbytes, category, self.plan.unit, pool)

    def reduce_collective(self, message: Message) -> StartedWork:
        """Start a collective that reduces. On gloo, allocate its receive buffers, as `GlooCollectives` does."""
        started = self.send(message)
        if not self.plan.gloo or message.ranks == 1:
            return started
        pair = message.ranks == 2
        received = message.nbytes // 2 if pair and message.kind == "reduce_scatter" else message.nbytes
        sent = 0 if message.kind == "reduce_scatter" else message.nbytes
        blocks = [self.allocate(received, "staging"), self.allocate(sent, "staging")]
        return StartedWork((_Messages(),), lambda: self.ledger.free_all(blocks))

    # --- all-gather ---

    def allocate_inner_shard(self) -> GroupLayout | None:
        """Allocate the buffers of the first of two hops, and return its layout. Return None if its result is current."""
        plan, layout = self.plan, self.plan.over_replicas
        if layout is None or self._is_current:
            return None
        self._is_current = True
        if not plan.options.keep_memory or self._inner_shard < 0:
            self.ledger.free(self._inner_shard)
            self._inner_shard = self.allocate(plan.inner_shard_nbytes, "shards")
            self._allocate_staging(layout, host=plan.host)
        return layout

    def allocate_gather(self) -> None:
        """Allocate the buffers of the all-gather over shards."""
        plan = self.plan
        if plan.options.keep_memory and self._flat >= 0:
            return
        self._flat = self.allocate(plan.unsharded_nbytes, "gathered")
        if self._subgroup_shard < 0:
            self._allocate_staging(plan.layout, host=plan.host and plan.over_replicas is None)

    def _allocate_staging(self, layout: GroupLayout, *, host: bool) -> None:
        if host:
            self._staging.append(self.allocate(self.plan.shard_nbytes, "staging"))
        self._staging.append(self.allocate(self.plan.staging_nbytes(layout), "staging"))

    def start_gather(self) -> StartedWork:
        """Start the all-gather over shards, or the smaller group's."""
        plan = self.plan
        if self._subgroup_shard >= 0:
            assert plan.subgroup is not None
            return self.send(Message("all_gather", plan.dtypes.compute, plan.unsharded_nbytes, 1, plan.subgroup))
        return self.start_hop(plan.layout, first=plan.over_replicas is None)

    def start_hop(self, layout: GroupLayout, *, first: bool) -> StartedWork:
        """Start one hop. `first`: its source is the flat shard, in the storage dtype and maybe in host memory."""
        plan, compute = self.plan, self.plan.dtypes.compute
        if first and plan.host and plan.shard_nbytes:
            self.send(Message("to_device", plan.dtypes.storage, plan.shard_nbytes, 1))
        if first and plan.dtypes.storage != compute:
            self.copy(plan.shard_nbytes + layout.shard_numel * compute.itemsize)
        self.copy(2 * plan.staging_nbytes(layout))
        if layout.buckets and layout.unsharded_numel:
            numel = layout.ranks * sum(bucket.size for bucket in layout.buckets)
            self.send(Message("all_gather", compute, numel * compute.itemsize, len(layout.buckets), layout.ranks))
        return StartedWork()

    def finish_all_gather(self) -> None:
        """Free the buffers that only the all-gather needed."""
        self._drop_subgroup_shard()
        if self.plan.options.keep_memory:
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

    def invalidate_kept_shards(self) -> None:
        """Drop the smaller group's copy, and gather over replicas anew, once the optimizer has written the shards."""
        self._drop_subgroup_shard()
        self._is_current = False

    def free(self) -> None:
        """Free the unsharded parameters."""
        if not self.plan.options.keep_memory:
            self.ledger.free(self._flat)
            self._flat = -1

    def _drop_subgroup_shard(self) -> None:
        self._subgroup_shard = -1
        if not (self.plan.options.keep_memory and self.keeps_subgroup_shard):
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
            is_new, nbytes = self.kept[index] is None, self.numel(index) * dtypes.kept.itemsize
            if is_new and dtypes.compute == dtypes.kept:
                self.kept[index] = grad  # the gradient itself becomes the accumulator
                continue
            if is_new:
                self.kept[index] = self.allocate(nbytes, "gradients")
            elif dtypes.compute != dtypes.kept and not self.plan.accelerator:  # on the CPU, add_ casts into a temporary
                self.ledger.free(self.allocate(nbytes, "gradients"))
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
    """

    def __init__(self, group: SimulatedGroup, merged: Merged, *, defer: bool = False) -> None:
        grads, dtype = merged.blocks, merged.dtype
        self.group = group
        plan = self.plan = group.plan
        self.deferred = plan.replicated and defer  # the reduction over replicas is left to a later one
        self.has_second_step = plan.replicated and not defer  # it follows
        self._earlier, group.deferred = group.deferred, self if self.deferred else None
        self.used: bool = any(block is not None for block in grads) or (self._earlier is not None and self._earlier.used)
        itemsize, shard = plan.dtypes.reduce.itemsize, plan.shard_layout.shard_numel
        self.reduced_shard = group.allocate(plan.layout.shard_numel * itemsize, "gradients")
        packed = plan.reduction.packed
        self._held: list[int] = []  # inputs of the reduce-scatter, freed when it completes
        self._sizes: list[int] = []  # their numbers of elements
        if packed is not None:
            numel, alone = plan.layout.ranks * packed.size, plan.layout.ranks == 1
            self._sizes.append(numel)
            casts, at_once = dtype != plan.dtypes.reduce, self._is_concatenated(packed, grads, dtype)
            whole = not casts or casts_whole(numel, plan.dtypes, on_cpu=not plan.accelerator)
            if at_once and whole and not alone:  # torch allocates the message
                padded = self._pad(packed, dtype)
                block = group.allocate(numel * dtype.itemsize, "staging")
                group.ledger.free_all(padded[::-1])  # the first one first
                self._held.append(group.allocate(numel * itemsize, "staging") if casts else block)
                group.ledger.free(block if casts else -1)
            else:
                if not alone:  # one rank packs straight into the output
                    self._held.append(group.allocate(numel * itemsize, "staging"))
                if at_once:
                    padded = self._pad(packed, dtype)
                    for segment in packed.segments if casts and not plan.accelerator else ():  # one after the other
                        group.ledger.free(group.allocate(plan.layout.ranks * segment.size * dtype.itemsize, "staging"))
                    group.ledger.free_all(padded[::-1])  # the first one first
            group.copy(numel * (dtype.itemsize + itemsize))
        for index in plan.reduction.direct:
            grad = grads[index]
            self._sizes.append(group.numel(index))
            if grad is None or plan.scales_inputs:
                grad = group.allocate(group.numel(index) * dtype.itemsize, "staging")
            self._held.append(grad)
        sliced = {part.parameter for message in plan.reduction.slices for part in message}
        self._sliced = [block for index, block in enumerate(grads) if index in sliced and block is not None]
        sent = sliced if plan.scales_inputs else {*plan.reduction.direct, *sliced}
        # Free once they are copied into the packed input.
        self.packed_grads = [block for index, block in enumerate(grads) if block is not None and index not in sent]
        self._sum = self.reduced_shard  # over all ranks
        if plan.scatter is not None and not self.deferred:
            self._sum = group.allocate(shard * itemsize, "gradients")
        self._flat = self._sum  # gradients of the shards
        self._host = -1
        if self.deferred:
            return
        if plan.dtypes.reduced != plan.dtypes.reduce:
            self._flat = group.allocate(shard * plan.dtypes.reduced.itemsize, "gradients")
        self._host = group.allocate(shard * plan.dtypes.reduced.itemsize, "pinned host") if plan.host else -1

    def _is_concatenated(self, packed: Bucket, grads: Sequence[int | None], dtype: torch.dtype) -> bool:
        """Return True if one call packs all gradients. They are copied one by one if one is missing or permuted."""
        indices = [segment.parameter for segment in packed.segments if segment.size]
        if min(indices, default=0) < 0 and dtype != self.plan.dtypes.compute:  # gaps have the compute dtype
            return False
        return all(grads[index] is not None and self.plan.layout.is_chunked(index) for index in indices if index >= 0)

    def _pad(self, packed: Bucket, dtype: torch.dtype) -> list[int]:
        """Allocate the copies of uneven gradients that torch._chunk_cat pads on the CPU."""
        layout = self.plan.layout
        return [
            self.group.allocate(layout.ranks * segment.size * dtype.itemsize, "staging")
            for segment in packed.segments
            if segment.parameter >= 0 and not layout.is_even(segment.parameter) and not self.plan.accelerator
        ]

    def start(self) -> StartedWork:
        """Start the reduce-scatters: the first of packed and direct gradients and a slice, one more of each further slice."""
        plan, group = self.plan, self.group
        ranks, dtype = plan.layout.ranks, plan.dtypes.reduce
        slices = [[ranks * part.size for part in parts] for parts in plan.reduction.slices]
        buffer = group.allocate(max(map(sum, slices), default=0) * dtype.itemsize, "staging", "reduce")
        group.copy(sum(map(sum, slices)) * (plan.dtypes.compute.itemsize + dtype.itemsize))
        started, first = StartedWork(), self._sizes
        for numels in slices or [[]]:
            sizes, first = [*first, *numels], []
            if sizes:
                message = Message("reduce_scatter", dtype, sum(sizes) * dtype.itemsize, len(sizes), ranks)
                started = group.reduce_collective(message)
        group.ledger.free(buffer)
        return started

    def finish(self) -> None:
        """Finish the reduce-scatter."""
        if self._earlier is not None:
            self.group.copy(3 * self.plan.layout.shard_numel * self.plan.dtypes.reduce.itemsize)
        if not (self.has_second_step or self.deferred):
            self.finish_replicated()

    def replicate(self) -> StartedWork:
        """Start the reduction over replicas: an all-reduce or, in two hops, a reduce-scatter."""
        plan = self.plan
        if not plan.layout.shard_numel:
            return StartedWork()
        if plan.scatter is not None:
            return self._scatter(plan.scatter)
        nbytes = plan.layout.shard_numel * plan.dtypes.reduce.itemsize
        return self.group.reduce_collective(Message("all_reduce", plan.dtypes.reduce, nbytes, 1, plan.replicas))

    def _scatter(self, scatter: ReductionLayout) -> StartedWork:
        plan, group, layout = self.plan, self.group, self.plan.shard_layout
        dtype = plan.dtypes.reduce
        nbytes = 0 if scatter.packed is None else plan.replicas * scatter.packed.size * dtype.itemsize
        packed = group.allocate(nbytes, "staging", "replicate")
        group.copy(2 * nbytes)
        sizes = [] if scatter.packed is None or not scatter.packed.segments else [nbytes]
        sizes += [prod(layout.offsets[index].shape) * dtype.itemsize for index in scatter.direct]
        started = group.reduce_collective(Message("reduce_scatter", dtype, sum(sizes), len(sizes), plan.replicas))
        return StartedWork((started,), partial(group.ledger.free, packed))

    def finish_replicated(self) -> None:
        """Finish the last collective."""
        dtypes, numel = self.plan.dtypes, self.plan.shard_layout.shard_numel
        if self._flat != self._sum:
            self.group.copy(numel * (dtypes.reduced.itemsize + dtypes.reduce.itemsize))
        if self.plan.host and numel:
            self.group.send(Message("to_host", dtypes.reduced, numel * dtypes.reduced.itemsize, 1))

    def release_inputs(self) -> None:
        """Free the inputs of the reduce-scatter, which the compute stream has waited for."""
        self.group.ledger.free_all([*reversed(self._sliced), *self._held])
        self._held, self._sliced = [], []
        if self._earlier is not None:
            self.group.ledger.free(self._earlier.reduced_shard)
        self._earlier = None
        if not self.has_second_step:
            self.release_reduced_shard()

    def release_reduced_shard(self) -> None:
        """Free the outputs of the collectives that are not the gradient itself."""
        if self.deferred:
            return
        for block in dict.fromkeys((self.reduced_shard, self._sum)):
            if block != self._flat:
                self.group.ledger.free(block)
        self.reduced_shard = self._sum = self._flat

    def deliver(self) -> tuple[int, int]:
        """Return the block that becomes `.grad`, and the device block to free after a copy to the host (-1 without one)."""
        return (self._host, self._flat) if self._host >= 0 else (self._flat, -1)
