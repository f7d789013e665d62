"""The options of one unit, resolved: defaults are filled in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fullshard.comm.base import Adapter
from fullshard.core.scheduler import KeepAfterForward
from fullshard.policies import ZERO3, CheckPolicy, CommPolicy, MixedPrecisionPolicy, OffloadPolicy, StateSharding

ReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """The caller's options for reductions."""

    divide: float | None = None  # factor to divide the gradients by; None for the number of ranks, shards times replicas
    # True if `divide` is for a custom reduce-scatter that averages. Scalars, which it never sees, are divided as usual.
    custom_averages: bool = False
    force_sum: bool = False  # scale after the reduction, so that no backend averages
    all_reduce: bool = True  # False: defer the reduction over replicas to a later backward
    # All-reduce hook, called with this rank's reduced shard after the last collective, before the division that is left for
    # then and the cast to the grad dtype. It also runs without replicas.
    hook: ReduceHook | None = None
    hook_stream: Any = None  # stream that the hook runs on


_NO_OFFLOAD, _REDUCE = OffloadPolicy(), ReduceOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions:
    """The resolved options of one unit."""

    # Read at each event, that is in hooks on modules and on the autograd graph, and in the callback at the end of a backward.
    # `Unit.configure` changes them. A change counts from the next event on, and the scheduler's record of the unit follows.
    keep_after_forward: KeepAfterForward
    states: StateSharding = ZERO3
    reduce: ReduceOptions = _REDUCE
    in_backward: bool = True  # backward needs the unsharded parameters
    sync_gradients: bool = True
    last_backward: bool = True
    ended_by: str = ""  # the call by which the user ends the step; "" if the end of the last backward does
    keep_after_backward: bool = False

    # The parameter groups are built with these; `Unit.reconfigure` changes them and builds the groups again. Everything else
    # reads them here at each use, so there is nothing more to update.
    mp: MixedPrecisionPolicy  # `hooks.py` reads the dtypes of inputs and outputs at each forward: `configure` changes those
    comm: CommPolicy  # the groups copy `direct_min_bytes` and `collectives`; `lanes` is fixed; `configure` changes the others
    checks: CheckPolicy  # `configure` changes it
    offload: OffloadPolicy = _NO_OFFLOAD
    subgroup_size: int | None = None  # number of ranks that together keep one copy between forward and backward
    separate_reduce: bool = False  # reduce-scatter on a process group of its own
    gather_adapter: Adapter | None = None  # replaces the collectives of all-gathers
    reduce_adapter: Adapter | None = None  # replaces those of reduce-scatters

    # Keep the memory of unsharded parameters at its address. `Unit.keep_memory` changes it.
    keep_memory: bool = False

    # Fixed: read when the module is sharded, and in the first forward.
    sync: str = "check"

    # From the options above.
    ends_step: bool = field(init=False)  # the end of the backward ends the step: `.grad` is set
    reduces: bool = field(init=False)  # the end of the unit's backward reduces its gradients; else they are kept on this rank
    defers: bool = field(init=False)  # it reduces them over shards only, and leaves the rest to a later backward

    def __post_init__(self) -> None:
        goes_on = bool(self.ended_by) or not self.last_backward  # the step does not end with this backward
        object.__setattr__(self, "ends_step", not goes_on)
        object.__setattr__(self, "reduces", self.sync_gradients and not (self.states.keeps_gradients and goes_on))
        object.__setattr__(self, "defers", not self.reduce.all_reduce or (self.states.sums_over_shards and goes_on))

    @property
    def remedy(self) -> str:
        """What to do while gradients are not in `.grad` yet, for error texts."""
        end = f"Call {self.ended_by}" if self.ended_by else "Run the last backward of the step"
        return f"{end} first, or call zero_grad()."


__all__ = ["UnitOptions"]
