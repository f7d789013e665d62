"""Setters of FSDP2 that few programs call. Some have no effect, since fullshard always does what they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core import Unit, require_unit, unit_of, units_of
from fullshard.errors import check_bool, check_int
from fullshard.frontend.module import FSDPModule, any_unit, configure_reductions, meet, sharded_method, units_by_runtime


@sharded_method
def set_all_reduce_hook(self: FSDPModule, hook: Callable[[Tensor], None] | None, *, stream: Any = None) -> None:
    """Set a hook that is called with each reduced flat gradient of this unit, once per parameter group.

    The hook may modify the gradient in place, for example by an all-reduce over further replicas. It runs after the
    reduce-scatter and the all-reduce over replicas, on the reduction stream or on `stream`. The order of the calls is
    equal on all ranks.

    Args:
        hook: called with a 1-D tensor in the reduce dtype, the gradient of this rank's flat shard; None removes the hook.
        stream: the stream to call `hook` on, on the device of the mesh; None is the reduction stream.

    Raises:
        ValueError: if `hook` is not callable, or if a stream is given for a CPU mesh.
    """
    if hook is not None and not callable(hook):
        raise ValueError(f"set_all_reduce_hook takes a callable or None, got {type(hook).__name__}.")
    if stream is not None and require_unit(self).runtime.communicator.async_device is None:
        raise ValueError("set_all_reduce_hook got a stream, but the mesh of this unit is on the CPU. Omit `stream`.")
    configure_reductions(self, False, hook=hook, hook_stream=stream)


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
    require_unit(self).configure(gathers_in_backward=check_bool("unshard_in_backward", unshard_in_backward))


@sharded_method
def set_modules_to_forward_prefetch(self: FSDPModule, modules: list[nn.Module]) -> None:
    """Set the units whose all-gathers are prefetched in forward, while this unit computes.

    Without a list, the schedule chooses one (docs/schedule.md).

    Args:
        modules: modules that `fully_shard` was called on, in prefetch order; an empty list disables prefetching.

    Raises:
        ValueError: for anything else, or for a unit with separate streams or on another device.

    Example:
        >>> for block, following in zip(model.blocks, model.blocks[1:]):                      # doctest: +SKIP
        ...     block.set_modules_to_forward_prefetch([following])
    """
    require_unit(self).record.next_forward = _numbers_of(modules, require_unit(self))


@sharded_method
def set_modules_to_backward_prefetch(self: FSDPModule, modules: list[nn.Module]) -> None:
    """Set the units whose all-gathers are prefetched in backward, while the backward of this unit computes.

    Without a list, the schedule chooses one (docs/schedule.md).

    Args:
        modules: modules that `fully_shard` was called on, in prefetch order; an empty list disables prefetching.

    Raises:
        ValueError: for anything else, or for a unit with separate streams or on another device.
    """
    require_unit(self).record.next_backward = _numbers_of(modules, require_unit(self))


@sharded_method
def set_post_optim_event(self: FSDPModule, event: torch.Event) -> None:
    """Set an event, recorded after the optimizer step, for the next forward or `unshard()` to wait for. It is used once.

    Set it if the optimizer steps on a separate stream. The all-gathers wait for the current stream too, since they write
    to its memory. The optimizer may read gradients until the event: call `zero_grad()` after that forward, since the
    allocator reuses freed memory on the current stream at once.

    Args:
        event: a torch.Event (or a device event such as torch.cuda.Event) that was recorded after `optimizer.step()`.

    Raises:
        ValueError: if it has no `wait()`, or the mesh is on the CPU, which has no streams.
        StateError: if there is no unit at or below this module.
    """
    communicators = [runtime.communicator for runtime in units_by_runtime(self)]
    if all(communicator.async_device is None for communicator in communicators):
        raise ValueError("set_post_optim_event got an event, but the mesh is on the CPU, which has no streams.")
    if not callable(getattr(event, "wait", None)):
        raise ValueError(f"set_post_optim_event takes a torch.Event, got {type(event).__name__}.")
    for communicator in communicators:
        if communicator.async_device is not None:
            communicator.next_event = event


@sharded_method
def set_reduce_scatter_unused_params(self: FSDPModule, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
    """Reduce zeros for the unused parameters of a rank. fullshard always does, so all ranks run the same collectives.

    Args:
        reduce_scatter_unused_params: True or False. It has no effect.
        recurse: True or False. It has no effect.

    Raises:
        StateError: if there is no unit at or below this module.
    """
    any_unit(self)
    check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
    check_bool("recurse", recurse)


@sharded_method
def set_reduce_scatter_divide_factor(self: FSDPModule, factor: float) -> None:
    """Set the factor to divide reduced gradients by: FSDP2's deprecated name of `set_gradient_divide_factor`.

    Args:
        factor: a finite number above 0.

    Raises:
        ValueError: for any other factor.
    """
    self.set_gradient_divide_factor(factor)


@sharded_method
def _set_unshard_async_op(self: FSDPModule, async_op: bool) -> None:
    """Set whether all-gather memory comes from the compute stream, with async collectives. fullshard always does this."""
    any_unit(self)
    check_bool("async_op", async_op)


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Share streams and execution order among root modules. All units of a device and thread do, so it only checks `modules`.

    Args:
        modules: a list of modules that `fully_shard` was called on.

    Raises:
        ValueError: for anything else.

    Source: `torch.distributed.fsdp.share_comm_ctx`.
    """
    _numbers_of(modules)


def _numbers_of(modules: Any, beside: Unit | None = None) -> tuple[int, ...]:
    """Return the numbers of the units of modules that a caller listed; `beside`: the unit that may prefetch them."""
    if not isinstance(modules, (list, tuple)):
        raise ValueError(f"Expected a list of modules that fully_shard was called on, got {type(modules).__name__}.")
    numbers: list[int] = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"Expected modules that fully_shard was called on, got {type(module).__name__}.")
        if beside is not None and unit.runtime is not beside.runtime:
            raise ValueError(
                f"Unit '{beside.name}' cannot prefetch unit '{unit.name}', which has separate streams or is on another device."
            )
        numbers.append(unit.number)
    return tuple(numbers)
