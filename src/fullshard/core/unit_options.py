"""The options of one unit, resolved: defaults are filled in."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.comm.base import Allocate
from fullshard.comm.custom import AllGather, ReduceScatter
from fullshard.core.reduction import ReduceOptions
from fullshard.core.scheduler import ReshardPolicy
from fullshard.policies import CheckPolicy, CommPolicy, MixedPrecisionPolicy, OffloadPolicy

_NO_OFFLOAD, _REDUCE = OffloadPolicy(), ReduceOptions()


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """The resolved options of one unit."""

    reshard_policy: ReshardPolicy
    mp: MixedPrecisionPolicy
    comm: CommPolicy
    checks: CheckPolicy
    offload: OffloadPolicy = _NO_OFFLOAD
    subgroup_size: int | None = None  # number of ranks that together keep one copy between forward and backward
    reduce: ReduceOptions = _REDUCE
    sync: str = "check"
    buffers: str = "local"
    separate_reduce: bool = False  # reduce-scatter on a process group of its own
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    memory: Allocate | None = None  # allocates the memory of messages
    in_backward: bool = True
    sync_gradients: bool = True
    last_backward: bool = True
    manual: bool = False  # the user ends backwards (`finalize_backward`)
    keep_after_backward: bool = False
    keep_memory: bool = False  # keep the memory of unsharded parameters and messages at its address


__all__ = ["UnitOptions"]
