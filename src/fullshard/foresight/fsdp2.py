"""The same as torch's FSDP2 does it: copies in and out of every message, and buffers kept until the next unit's turn.

Read for meaning in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py (torch 2.11): a gather
casts the shards and copies them into its message, and copies each parameter out of it. In forward the message is kept until
the next unit's gather is waited for. Gradients are copied into a message in the reduce dtype, which is kept until the next
unit reduces.
"""

from __future__ import annotations

from math import prod

from fullshard.collectives.base import StartedWork
from fullshard.collectives.traffic import Message
from fullshard.foresight.group import Merged, SimulatedGroup, SimulatedReduction


def _chunk(group: SimulatedGroup) -> int:
    """Elements of one rank's part of a message."""
    ranks = group.plan.layout.ranks
    return sum(-(-place.shape[0] // ranks) * prod(place.shape[1:]) for place in group.plan.layout.places)


class Fsdp2Group(SimulatedGroup):
    """The memory and messages of an FSDPParamGroup that is gathered."""

    keeps_part = False

    def gather(self) -> StartedWork:
        """Cast, copy in, send."""
        plan = self.plan
        size = plan.dtypes.compute.itemsize
        numel, ranks = _chunk(self), plan.layout.ranks
        if self._part >= 0:
            assert plan.subgroup is not None
            nbytes = ranks * numel * size
            self._staging.append(self.take(nbytes, "staging", "gather"))
            self.copy(2 * nbytes // plan.subgroup)
            self.send(Message("all_gather", plan.dtypes.compute, nbytes, 1, plan.subgroup))
            return StartedWork()
        if plan.host:
            self._staging.append(self.take(plan.shard_nbytes, "staging", "gather"))
            self.send(Message("to_device", plan.dtypes.storage, plan.shard_nbytes, 1))
        cast = self.take(numel * size, "staging", "gather") if plan.dtypes.storage != plan.dtypes.compute else -1
        if plan.dtypes.storage != plan.dtypes.compute:
            self.copy(plan.shard_nbytes + numel * size)
        self._staging.append(self.take(ranks * numel * size, "staging", "gather"))
        self.copy(2 * numel * size)
        self.ledger.give(cast)
        self.send(Message("all_gather", plan.dtypes.compute, ranks * numel * size, 1, ranks))
        return StartedWork()

    def finish_gather(self) -> None:
        """Copy out, and let go of the message of the unit before, or of this one in backward."""
        program = self.program
        self._give_part()
        nbytes = self.plan.layout.ranks * _chunk(self) * self.plan.dtypes.compute.itemsize
        for block in program.retained_gather:
            self.ledger.give(block)
        if self._flat < 0:
            self._flat = self.take(nbytes, "gathered")
        self.copy(2 * nbytes)
        program.retained_gather = []
        if program.places[-1].phase == "forward":
            program.retained_gather, self._staging = self._staging, []
        for block in self._staging:
            self.ledger.give(block)
        self._staging = []


class Fsdp2Reduction(SimulatedReduction):
    """The memory and messages of foreach_reduce."""

    def __init__(self, group: SimulatedGroup, merged: Merged) -> None:
        self.group, plan = group, group.plan
        self.plan = plan
        self.used = any(block is not None for block in merged.blocks)
        self.replicated = plan.replicated
        size = plan.dtypes.reduce.itemsize
        self._numel = _chunk(group)
        self._held = [group.take(plan.layout.ranks * self._numel * size, "staging")]
        group.copy(plan.layout.ranks * self._numel * (size + merged.dtype.itemsize))
        self._sliced = []
        self.packed_grads = [block for block in merged.blocks if block is not None]
        self._sum = group.take(self._numel * size, "gradients", "reduce")
        self._flat = self._sum
        if plan.dtypes.reduced != plan.dtypes.reduce:
            self._flat = group.take(self._numel * plan.dtypes.reduced.itemsize, "gradients", "reduce")
        self._host = group.take(plan.shard_nbytes, "pinned host") if plan.host else -1

    def start(self) -> StartedWork:
        """Send the message."""
        plan = self.plan
        nbytes = plan.layout.ranks * self._numel * plan.dtypes.reduce.itemsize
        return self.group.exchange(Message("reduce_scatter", plan.dtypes.reduce, nbytes, 1, plan.layout.ranks))


__all__ = ["Fsdp2Group", "Fsdp2Reduction"]
