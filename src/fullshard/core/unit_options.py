"""The options of one unit, resolved: defaults are filled in."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fullshard.comm.base import Adapter
from fullshard.policies import ZERO3, CheckPolicy, CommPolicy, MixedPrecisionPolicy, OffloadPolicy, StateSharding

ReduceHook = Callable[[Tensor], None]


class KeepAfterForward(enum.Enum):
    """Which unsharded parameters stay after a forward with grad.

    Those of resident() units, and those that a create_graph=True backward needs, always stay. Without grad, those of KEPT stay.
    """

    NEVER = "never"  # reshard_after_forward=True: no unsharded parameters stay
    ALWAYS = "always"  # reshard_after_forward=False: all unsharded parameters stay
    OUTERMOST = "outermost"  # reshard_after_forward=None: those of the outermost unit stay
    PARTLY = "partly"  # reshard_after_forward=int: each smaller group of ranks keeps one copy
    KEPT = "kept"  # ZERO1 and ZERO2: unsharded parameters stay until the shards are written, also after backward


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """The caller's options for reductions."""

    divide: float | None = None  # factor to divide the gradients by; None for the number of ranks, shards times replicas
    # True if `divide` is for a custom reduce-scatter that averages. Scalars are all-reduced, and divided by the rank count.
    custom_averages: bool = False
    force_sum: bool = False  # scale after the reduction, so that no backend averages
    all_reduce: bool = True  # False: defer the reduction over replicas to a later backward
    # All-reduce hook, called with this rank's reduced shard after the last collective, before any remaining division and
    # the cast to the grad dtype. The hook also runs without replicas.
    hook: ReduceHook | None = None
    hook_stream: Any = None  # stream that the hook runs on


_NO_OFFLOAD, _REDUCE = OffloadPolicy(), ReduceOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions:
    """The resolved options of one unit."""

    # Each hook (of modules and of autograd graphs) and each end of a backward reads them anew, so the next one sees what
    # `Unit.configure` changed.
    keep_after_forward: KeepAfterForward
    states: StateSharding = ZERO3
    reduce: ReduceOptions = _REDUCE
    gathers_in_backward: bool = True  # backward unshards the parameters
    sync_gradients: bool = True
    last_backward: bool = True
    ended_by: str = ""  # the call by which the user ends the step; "" if the last backward ends it
    keep_after_backward: bool = False

    # The parameter groups are built with these: `Unit.reconfigure` changes them and builds the groups again. `configure` is
    # enough only for what is read at each use:
    mp: MixedPrecisionPolicy  # hooks read `cast_forward_inputs` and `output_dtype` each time, so `configure` can change these
    comm: CommPolicy  # the groups copy `direct_min_bytes` and `collectives`; `lanes` is fixed; `configure` changes the others
    checks: CheckPolicy  # `configure` can change it; after a change of `patience` or `timeout` call `Runtime.update_timeouts`
    offload: OffloadPolicy = _NO_OFFLOAD
    subgroup_size: int | None = None  # number of ranks that together keep one copy between forward and backward
    separate_reduce: bool = False  # reduce-scatter on a process group of its own
    gather_adapter: Adapter | None = None  # replaces the collectives of all-gathers
    reduce_adapter: Adapter | None = None  # replaces the collectives of reduce-scatters

    keep_memory: bool = False  # unsharded parameters keep one address; change it by `configure` and `ParamGroup.keep_memory`
    sync: str = "check"  # fixed: read when the module is sharded or gets new memory, and in its next forward

    # From the options above.
    retention: KeepAfterForward = field(init=False)  # `keep_after_forward`, or KEPT where the level keeps parameters
    stays_after_backward: bool = field(init=False)  # no backward reshards the unit
    ends_step: bool = field(init=False)  # the end of the backward ends the step: `.grad` is set
    reduces: bool = field(init=False)  # the end of the unit's backward reduces its gradients; else they are kept on this rank
    defers: bool = field(init=False)  # it reduces over shards only; a later backward reduces over replicas

    def __post_init__(self) -> None:
        kept = self.states.keeps_parameters
        object.__setattr__(self, "retention", KeepAfterForward.KEPT if kept else self.keep_after_forward)
        object.__setattr__(self, "stays_after_backward", kept or self.keep_after_backward)
        goes_on = bool(self.ended_by) or not self.last_backward  # the step does not end with this backward
        object.__setattr__(self, "ends_step", not goes_on)
        object.__setattr__(self, "reduces", self.sync_gradients and not (self.states.keeps_gradients and goes_on))
        object.__setattr__(self, "defers", not self.reduce.all_reduce or (self.states.sums_over_shards and goes_on))

    @property
    def remedy(self) -> str:
        """What to do while gradients are not in `.grad` yet, for error texts."""
        end = f"Call {self.ended_by}" if self.ended_by else "Run the last backward of the step"
        return f"{end} first, or call zero_grad()."
