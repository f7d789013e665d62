"""torch.distributed's collectives, several tensors per call: nccl and every backend that coalesces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Started, StartedWork
from fullshard.policies import DIRECT_MIN_BYTES

_CARRIED = {  # dtypes that nccl and gloo support; tensors of other dtypes are all-gathered as bytes
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class CoalescedCollectives:
    """The collectives of nccl and similar backends: one coalesced call for all tensors, unless it `stages`."""

    direct_min_bytes: float = DIRECT_MIN_BYTES

    def __init__(self, group: dist.ProcessGroup, *, averages: bool = False, stages: bool = False) -> None:
        """Create the collectives of a process group of at least two ranks.

        `averages`: the backend has ReduceOp.AVG, which saves a pass over the sums. `stages`: it copies device memory through
        host memory, as gloo does. Waits then block the host, and each tensor takes a call of its own: gloo's coalesced
        all-gather reads device memory from the host, which kills the process (seen with torch 2.11), and some versions of torch
        lack its coalesced reduce-scatter.
        """
        self._group, self._averages, self._stages = group, averages, stages
        self.ranks, self.rank, self.in_order = group.size(), group.rank(), not stages

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Started]:
        """Prepare an all-gather in one call, or in one call per tensor if the backend stages (see `__init__`)."""
        group = self._group
        if outs[0].dtype not in _CARRIED:
            outs, shards = [out.view(torch.uint8) for out in outs], [shard.view(torch.uint8) for shard in shards]
        if len(outs) == 1:
            return _torch.all_gather_base(group, outs[0], shards[0])
        if not self._stages:
            return _torch.all_gather_coalesced(group, outs, shards)
        each = [_torch.all_gather_base(group, *pair) for pair in zip(outs, shards)]
        return lambda: _all_of([start() for start in each])

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Started:
        """Start a reduce-scatter; scale the sums afterwards, unless `scale` is 1 or the backend's mean has this factor."""
        prepared = self.reducer(scale)
        if prepared is not None:
            return prepared(outs, fulls)
        calls = [([out], [full]) for out, full in zip(outs, fulls)] if self._stages else [(outs, fulls)]
        started = _all_of([_torch.reduce_scatter(self._group, False, *call) for call in calls])
        started.then = partial(_torch.scale, outs, scale) if scale != 1.0 else None
        return started

    def reducer(self, scale: float) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Started] | None:
        """Return a function of (outs, fulls) that is one call of the backend, scaling included; None if there is none."""
        if self._stages or not (self._has_mean(scale) or scale == 1.0):
            return None
        return partial(_torch.reduce_scatter, self._group, self._has_mean(scale))

    def _has_mean(self, scale: float) -> bool:
        return self._averages and scale == 1.0 / self.ranks  # ReduceOp.AVG has exactly this factor

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]) -> Started:
        """Start an all-to-all: send each rank its part, and receive a part from each. Parts are 1-D, in rank order."""
        # async_op only if the backend stages. Else, as on nccl, the kernel runs on the current stream.
        return dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), self._group, self._stages)

    def all_reduce(self, tensor: Tensor) -> Started:
        """Start an all-reduce (sum), in place."""
        return _torch.all_reduce_sum(self._group, tensor)

    def all_reduce_max(self, tensor: Tensor) -> Started:
        """Start an all-reduce (maximum), in place."""
        return _torch.all_reduce_max(self._group, tensor)


def _all_of(works: Sequence[Started]) -> StartedWork:
    return StartedWork([work for work in works if work is not None])
