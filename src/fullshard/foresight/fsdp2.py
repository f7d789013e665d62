"""Allocations and collectives of torch's FSDP2, for comparison: it copies into and out of every collective.

An all-gather casts the shards, copies them into its input, and copies each parameter out of its output. In forward, the output
is kept until the next unit's all-gather is waited for. Gradients are copied into a reduce-scatter input in the reduce dtype.
This input is kept until the next unit reduces.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py (torch 2.11).
"""

from __future__ import annotations

from math import prod

from fullshard.core import Message, StartedWork
from fullshard.foresight.group import Merged, SimulatedGroup, SimulatedReduction


def _chunk_numel(group: SimulatedGroup) -> int:
    """Return the number of elements that one rank contributes to an all-gather, padding included."""
    ranks = group.plan.layout.ranks
    return sum(-(-place.shape[0] // ranks) * prod(place.shape[1:]) for place in group.plan.layout.offsets)


class Fsdp2Group(SimulatedGroup):
    """Memory and collectives of FSDP2's `FSDPParamGroup`."""

    keeps_subgroup_shard = False

    def allocate_gather(self) -> None:
        """Do nothing: the output is allocated when the all-gather starts."""

    def start_gather(self) -> StartedWork:
        """Cast the shards, copy them into the input, and start the all-gather."""
        plan, ranks, cast = self.plan, self.plan.layout.ranks, -1
        own = _chunk_numel(self) * plan.dtypes.compute.itemsize
        nbytes = ranks * own
        if self._subgroup_shard >= 0:
            ranks = plan.subgroup or ranks
        elif plan.host:
            self._staging.append(self.allocate(plan.shard_nbytes, "staging", "gather"))
            self.send(Message("to_device", plan.dtypes.storage, plan.shard_nbytes, 1))
        if self._subgroup_shard < 0 and plan.dtypes.storage != plan.dtypes.compute:
            cast = self.allocate(own, "staging", "gather")
            self.copy(plan.shard_nbytes + own)
        self._staging.append(self.allocate(nbytes, "staging", "gather"))
        self.copy(2 * nbytes // ranks)
        self.ledger.free(cast)
        return self.send(Message("all_gather", plan.dtypes.compute, nbytes, 1, ranks))

    def finish_all_gather(self) -> None:
        """Copy the parameters out, and free the previous unit's all-gather output, or in backward this unit's own."""
        program = self.program
        self._drop_subgroup_shard()
        nbytes = self.plan.layout.ranks * _chunk_numel(self) * self.plan.dtypes.compute.itemsize
        for block in program.retained_blocks:
            self.ledger.free(block)
        if self._flat < 0:
            self._flat = self.allocate(nbytes, "gathered")
        self.copy(2 * nbytes)
        program.retained_blocks = []
        if program.places[-1].phase == "forward":
            program.retained_blocks, self._staging = self._staging, []
        for block in self._staging:
            self.ledger.free(block)
        self._staging = []


class Fsdp2Reduction(SimulatedReduction):
    """Memory and collectives of FSDP2's `foreach_reduce`."""

    def __init__(self, group: SimulatedGroup, merged: Merged) -> None:
        self.group = group
        plan = self.plan = group.plan
        self.used = any(block is not None for block in merged.blocks)
        self.has_second_step = plan.replicated
        size, numel = plan.dtypes.reduce.itemsize, _chunk_numel(group)
        self._sizes = [plan.layout.ranks * numel]
        self._held = [group.allocate(self._sizes[0] * size, "staging")]
        group.copy(self._sizes[0] * (size + merged.dtype.itemsize))
        self._sliced = []
        self.packed_grads = [block for block in merged.blocks if block is not None]
        self.deferred, self._earlier = False, None
        self.reduced_shard = self._sum = self._flat = group.allocate(numel * size, "gradients", "reduce")
        if plan.dtypes.reduced != plan.dtypes.reduce:
            self._flat = group.allocate(numel * plan.dtypes.reduced.itemsize, "gradients", "reduce")
        self._host = group.allocate(plan.shard_nbytes, "pinned host") if plan.host else -1
