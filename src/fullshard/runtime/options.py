"""What one unit was told, resolved: values without None."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.collectives.base import Allocate
from fullshard.collectives.custom import AllGather, ReduceScatter
from fullshard.params.reduction import ReduceOptions
from fullshard.policies import CheckPolicy, CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.schedule.residency import ReshardPolicy

_NO_OFFLOAD, _REDUCE = OffloadPolicy(), ReduceOptions()


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """What a unit was told, without None."""

    reshard_policy: ReshardPolicy
    mp: MixedPrecisionPolicy
    comm: CommPolicy
    checks: CheckPolicy
    offload: OffloadPolicy = _NO_OFFLOAD
    subgroup_size: int | None = None  # ranks that keep one copy together between forward and backward
    reduce: ReduceOptions = _REDUCE
    sync: str = "check"
    buffers: str = "local"
    separate_reduce: bool = False  # reductions have a process group of their own
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    memory: Allocate | None = None  # that messages lie in
    in_backward: bool = True
    sync_gradients: bool = True
    last_backward: bool = True
    manual: bool = False  # the caller ends backwards (`finalize_backward`)
    keep_after_backward: bool = False
    keep_memory: bool = False  # that of full parameters and messages stays where it is


__all__ = ["UnitOptions"]
