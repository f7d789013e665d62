"""Rare setters of `FSDPModule`: how gradients are reduced, and which units are unsharded in backward."""

from __future__ import annotations

from dataclasses import replace

from fullshard.core import require_unit, units_of
from fullshard.errors import check_bool, check_int
from fullshard.frontend.module import FSDPModule, configure_reductions, meet, sharded_method


@sharded_method
def set_force_sum_reduction_for_comms(self: FSDPModule, enable: bool) -> None:
    """Set whether gradients of this unit are reduced with the op SUM and scaled afterwards, also where a backend has AVG.

    Without it, a reduce-scatter on a backend that can average (nccl) does so, which saves a pass over the sums.

    Args:
        enable: True never averages in the backend.

    Raises:
        StateError: while gradients are reduced, but not in `.grad` yet.
    """
    unit = require_unit(self)
    # Sums in flight are scaled as before.
    unit.runtime.reducer.check_delivered(unit, doing="set_force_sum_reduction_for_comms()")
    configure_reductions(self, False, force_sum=check_bool("enable", enable))


@sharded_method
def set_reduce_scatter_max_input_buffers(self: FSDPModule, max_input_buffers: int, *, recurse: bool = True) -> None:
    """Set the maximum number of reduce-scatters in flight, each of one parameter group, from the next one on.

    Args:
        max_input_buffers: reduce-scatters in flight, at least 1. At the limit, backward waits for the oldest before it
            starts the next.
        recurse: True applies to all units at and below this module, False to this unit only.

    Raises:
        ValueError: if it is not an int, or less than 1.
    """
    most = check_int("max_input_buffers", max_input_buffers)
    for unit in units_of(self, check_bool("recurse", recurse)):
        unit.configure(comm=replace(unit.options.comm, reductions_in_flight=most))


@sharded_method
def set_separate_reduce_scatter_group(self: FSDPModule, enable: bool = True, *, recurse: bool = True) -> None:
    """Set whether reduce-scatters use a separate process group, to overlap with all-gathers. Collective.

    Args:
        enable: True uses a separate process group; False uses that of the all-gathers again.
        recurse: True applies to all units at and below this module, False to this unit only.

    Raises:
        StateError: inside a forward or backward, or while gradients are not in `.grad` yet.
    """
    separate, doing = check_bool("enable", enable), "set_separate_reduce_scatter_group()"
    units = units_of(self, check_bool("recurse", recurse))
    for unit in units:
        unit.check_rebuildable(doing=doing)
    meet(units if separate else [], doing)
    for unit in units:
        unit.reconfigure(doing=doing, separate_reduce=separate)


@sharded_method
def set_unshard_in_backward(self: FSDPModule, unshard_in_backward: bool) -> None:
    """Set whether this unit's parameters are unsharded in backward. Backward of an embedding, for example, needs none.

    If backward needs them nevertheless, autograd raises an error, since freed parameters are marked as modified.

    Args:
        unshard_in_backward: False skips the all-gather before backward.
    """
    require_unit(self).configure(in_backward=check_bool("unshard_in_backward", unshard_in_backward))
