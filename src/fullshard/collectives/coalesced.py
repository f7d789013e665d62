"""torch's own collectives, many tensors in one call (nccl, and whatever else takes lists)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.base import StartedWork
from fullshard.collectives.process_groups import held
from fullshard.policies import DIRECT_MIN_BYTES

_CARRIED = {  # dtypes that every backend has; of gathers the others travel as bytes
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class _Queued:
    """The work of a collective that was put on the current stream: whatever follows on that is behind it."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_QUEUED = _Queued()


class CoalescedCollectives:
    """The collectives of nccl and everything like it: all buckets of a group go out as one coalesced call."""

    direct_min_bytes: float = DIRECT_MIN_BYTES

    def __init__(self, group: dist.ProcessGroup, *, averages: bool = False, stages: bool = False) -> None:
        """`averages`: whether the backend divides by the ranks itself, which saves a pass over the sums.

        stages: whether it carries device memory by way of the host's, as gloo does. Waits then hold the host. Each tensor goes
            in a call of its own: gloo's coalesced gather reads device memory from the host, which ends the process (seen with
            torch 2.11), and its coalesced reduce-scatter is not there in every torch.
        """
        self._held, self._averages, self._stages = held(group), averages, stages
        self.ranks, self.rank, self.in_order = group.size(), group.rank(), not stages

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """As `Collectives.gatherer`: one call of the backend per gather, if it can."""
        held = self._held
        if outs[0].dtype not in _CARRIED:
            outs, shards = [out.view(torch.uint8) for out in outs], [shard.view(torch.uint8) for shard in shards]
        if len(outs) == 1:
            out, shard = outs[0], shards[0]
            return lambda: StartedWork((_torch.all_gather_base(held.group, out, shard) or _QUEUED,))
        if self._stages:
            return lambda: StartedWork([_torch.all_gather_base(held.group, *pair) or _QUEUED for pair in zip(outs, shards)])
        return lambda: StartedWork((_torch.all_gather_coalesced(held.group, outs, shards) or _QUEUED,))

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """As `Collectives.reduce_scatter`: sums, scaled behind them unless the backend can make the mean."""
        average = self._averages and scale == 1.0 / self.ranks
        group = self._held.group
        if len(outs) == 1 or self._stages:
            works = [_torch.reduce_scatter_base(group, *pair, average=average) or _QUEUED for pair in zip(outs, fulls)]
        else:
            works = [_torch.reduce_scatter_coalesced(group, outs, fulls, average=average) or _QUEUED]
        then = None if average or scale == 1.0 else partial(_torch.scale, outs, scale)
        return StartedWork(works, then)

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """As `Collectives.all_reduce`."""
        return StartedWork((_torch.all_reduce_sum(self._held.group, tensor) or _QUEUED,))

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """As `Collectives.all_reduce_max`."""
        return StartedWork((_torch.all_reduce_max(self._held.group, tensor) or _QUEUED,))
