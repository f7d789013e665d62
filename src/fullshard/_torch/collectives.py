"""Collectives and point-to-point messages.

They are called as methods of the process group, which takes half the host time of torch.distributed's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch.autograd import profiling

Started = dist.Work | None
"""Work of a started collective. Some backends return None if the kernel runs on the current stream."""


def _method(name: str, before: str) -> str:
    """Return the first of two method names that ProcessGroup has. Subclasses in Python override the newest name only."""
    # Private: the older names. torch renamed the methods; supported versions have one or both of each pair.
    return name if hasattr(dist.ProcessGroup, name) else before


_ALL_GATHER = _method("all_gather_single", "_allgather_base")
_ALL_GATHER_COALESCED = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_REDUCE_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")
_REDUCE_SCATTER_COALESCED = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

# asyncOp=False: nccl runs its kernel on the current stream, which is one of fullshard's communication streams and has its
# priority. With asyncOp=True, nccl uses a stream of the process group: two more events per collective, and with
# TORCH_NCCL_BLOCKING_WAIT=1 the host waits for each.
# Private: the options objects. The public functions build them at each call.
_GATHER = torch._C._distributed_c10d.AllgatherOptions()
_SUM, _AVERAGE = dist.ReduceScatterOptions(), dist.ReduceScatterOptions()
_SUM_ALL = dist.AllreduceOptions()
_MAX = dist.AllreduceOptions()
_GATHER.asyncOp = _SUM.asyncOp = _AVERAGE.asyncOp = _SUM_ALL.asyncOp = _MAX.asyncOp = False
_SUM.reduceOp = _SUM_ALL.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
_AVERAGE.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
_MAX.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]


def _real(tensor: Tensor) -> Tensor:
    """Return the 1-D real view of a complex tensor, since backends reduce no complex numbers; other tensors unchanged."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def all_gather_base(group: dist.ProcessGroup, out: Tensor, shard: Tensor) -> Callable[[], Started]:
    """Return a function of C that starts the all-gather each time it is called."""
    return partial(getattr(group, _ALL_GATHER), out, shard, _GATHER)


def all_gather_coalesced(group: dist.ProcessGroup, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Started]:
    """Return a function of C that starts the all-gather each time it is called."""
    return partial(getattr(group, _ALL_GATHER_COALESCED), outs, shards, _GATHER)


def reduce_scatter(group: dist.ProcessGroup, average: bool, outs: Sequence[Tensor], fulls: Sequence[Tensor]) -> Started:
    if outs[0].is_complex():
        outs, fulls = [*map(_real, outs)], [*map(_real, fulls)]
    how = _AVERAGE if average else _SUM
    if len(outs) == 1:
        return getattr(group, _REDUCE_SCATTER)(outs[0], fulls[0], how)
    return getattr(group, _REDUCE_SCATTER_COALESCED)(outs, fulls, how)


def all_reduce_sum(group: dist.ProcessGroup, tensor: Tensor) -> Started:
    return group.allreduce([_real(tensor)], _SUM_ALL)


def all_reduce_max(group: dist.ProcessGroup, tensor: Tensor) -> Started:
    return group.allreduce([tensor], _MAX)


def exchange(
    works: list[dist.Work],
    group: dist.ProcessGroup,
    receives: Sequence[tuple[Tensor, int]],  # and rank of the sender in the group
    sends: Sequence[tuple[Tensor, int]],  # and rank of the receiver in the group
    tag: int,
) -> None:
    """Start point-to-point messages and append one work for each to `works`, receives first."""
    # `extend` of two `map`s is one call into C, where Python raises no KeyboardInterrupt. After Ctrl-C, either all messages are
    # started and in `works`, or none is. A loop could lose the work of a message whose buffer gloo still writes to.
    receiving = map(group.recv, [[tensor] for tensor, _ in receives], [peer for _, peer in receives], repeat(tag))
    sending = map(group.send, [[tensor] for tensor, _ in sends], [peer for _, peer in sends], repeat(tag))
    if not profiling():
        works.extend(chain(receiving, sending))
        return
    # If torch's profiler with `profile_memory=True` stops while a message of gloo is in flight, the heap of the process is
    # corrupted (seen on torch 2.13). So the profiler sees only the label of the collective, and not its messages.
    # Private: `_enable_record_function`, which only this thread's operators obey.
    torch._C._autograd._enable_record_function(False)
    try:
        works.extend(chain(receiving, sending))
    finally:
        torch._C._autograd._enable_record_function(True)


def is_done(work: Any) -> bool:
    """Return True if a collective has completed; False also if it cannot be polled."""
    # Not every backend updates `is_completed`. The future of the work, if the backend has futures, is up to date.
    try:
        return work.is_completed() or work.get_future().done()
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
