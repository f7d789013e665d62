"""`finalize_backward()`: backwards that the user ends, and reductions that the user waits for later."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from fullshard import _torch
from fullshard.core import GradientReducer, Listener, ParamGroup, Reduction, Runtime, SentHeartbeat, Unit, recovered
from fullshard.errors import StateError, check_bool
from fullshard.frontend.module import FSDPModule, sharded_method, units_by_runtime

# backwards     units reduce their gradients, or keep them without gradient sync; no `.grad` is set
# start         reshard, reduce the remaining gradients, start the heartbeat
# finish        wait for all of it, check the heartbeat, set `.grad` of all parameters or none
#
# Ranks may finish several models in different orders, so `finish` starts no collective.

_CALL = "finalize_backward()"


@sharded_method
def set_manual_backward_finalization(self: FSDPModule, enabled: bool) -> None:
    """Set whether `finalize_backward()` finalizes backward, instead of the end of each autograd backward.

    It applies to all units at and below this module. In manual mode a backward reduces gradients, or accumulates them
    without gradient sync, and does not set `.grad`. Manual mode takes precedence over `set_is_last_backward`. Use it in
    schedules with an explicit reduction step, such as pipelines.

    Args:
        enabled: True enables manual mode; False finalizes at the end of each backward again.

    Raises:
        StateError: if the mode changes inside a backward, or before all gradients of earlier backwards are in `.grad`.

    Example:
        >>> model.set_manual_backward_finalization(True)                                      # doctest: +SKIP
        >>> model.set_requires_gradient_sync(False)                                           # doctest: +SKIP
        >>> for batch in batches:                                                             # doctest: +SKIP
        ...     model(batch).mean().backward()
        >>> model.set_requires_gradient_sync(True)                                            # doctest: +SKIP
        >>> model.finalize_backward()                                                         # doctest: +SKIP
    """
    manual = check_bool("enabled", enabled)
    for runtime, units in units_by_runtime(self).items():
        runtime.recover()
        for unit in units:
            if bool(unit.options.ended_by) == manual:
                continue
            doing = f"set_manual_backward_finalization({manual})"
            if _torch.current_graph_task() != -1:
                raise StateError(f"{doing} was called inside a backward of unit '{unit.name}'. Call it before or after.")
            unit.check_step_over(doing=doing)
        for unit in units:
            unit.configure(ended_by=_CALL if manual else "")


@sharded_method
def finalize_backward(self: FSDPModule, *, async_op: bool = False) -> GradientReductionHandle | None:
    """Finalize all backwards since the last call: reduce the remaining gradients, and set `.grad`. Collective.

    Each trainable parameter of a unit with gradient sync is reduced once; a rank without a gradient contributes zeros.
    Unsharded parameters are freed unless `set_reshard_after_backward(False)` is in effect. Before the first forward this
    does nothing.

    Args:
        async_op: True starts the reductions and returns a handle; False waits for them.

    Returns:
        With `async_op=True` a handle whose `wait()` sets `.grad`, else None. The units cannot run a forward before
        `wait()`.

    Raises:
        StateError: without `set_manual_backward_finalization(True)`, inside a forward or backward, before the `wait()` of
            the last call, with `set_requires_all_reduce(False)` in effect, or if the ranks diverged.
    """
    start_only = check_bool("async_op", async_op)
    pending = [
        _start(runtime, units)
        for runtime, units in units_by_runtime(self).items()
        if any(unit.record.last is not None for unit in units)
    ]
    handle = GradientReductionHandle(pending)
    if start_only:
        return handle
    handle.wait()
    return None


class GradientReductionHandle(_torch.GradientReductionHandle):  # type: ignore[misc]
    """Handle of asynchronous gradient reductions, returned by `FSDPModule.finalize_backward(async_op=True)`.

    Args:
        pending: the reductions in flight, of each runtime of the model. A handle without reductions waits for nothing.

    Source: `torch.distributed.fsdp.GradientReductionHandle` (torch 2.15). Where torch has that class, this is a subclass.
    """

    def __init__(self, pending: Sequence[_Pending] = ()) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Make the current stream wait for the reductions, and set `.grad`. Starts no collective. Later calls do nothing.

        Raises:
            StateError: if `zero_grad()` or `reset_iter_state()` discarded the reductions, or the ranks diverged.
        """
        pending, self._pending = self._pending, ()
        for one in pending:
            recovered(one.units[0])
            one.finish()


class _Pending(Listener):
    """The reductions of one `finalize_backward` on one runtime, until `wait()`."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit], reductions: list[Reduction], sent: list[SentHeartbeat]) -> None:
        self.units = list(units)  # their units, none of which may run before `wait()`
        self._runtime, self._reductions, self._sent = runtime, reductions, sent
        self._lost = ""  # the reason why the reductions were dropped
        for unit in units:
            unit.refused = (
                "its gradients are being reduced. Call wait() of the handle of finalize_backward(async_op=True) first."
            )
        runtime.listeners.append(self)

    def on_reset(self, units: Container[int]) -> None:
        """Drop the reductions, if one of the units failed: gradients are set for all or none."""
        self._drop(units, "a backward that raised, before they were waited for")

    def on_discard(self, unit: Unit) -> None:
        """Drop the reductions, if the gradients of one of the units were discarded."""
        self._drop([unit.number], "zero_grad(), reset_iter_state() or an error, before they were waited for")

    def _drop(self, units: Container[int], why: str) -> None:
        if any(unit.number in units for unit in self.units):
            self._lost = why
            self._end()
            for unit in self.units:
                self._runtime.reducer.discard(unit)

    def _end(self) -> None:
        self._runtime.listeners.remove(self)
        for unit in self.units:
            unit.refused = ""

    def finish(self) -> None:
        """Wait for the reductions and their heartbeats, and set `.grad`. Starts no collective.

        Raises StateError if the reductions were dropped, or if ranks diverged.
        """
        if self._lost:
            raise StateError(f"wait() of a GradientReductionHandle cannot finish: its reductions were dropped by {self._lost}.")
        self._end()
        reducer = self._runtime.reducer
        with torch.no_grad():
            reducer.take(self._reductions)
            reducer.decide(self._reductions, self._sent)
            reducer.assign_grads()
            reducer.poll()


def _start(runtime: Runtime, units: Sequence[Unit]) -> _Pending:
    """Reduce the remaining gradients, and start the heartbeat that ends the step. Raises StateError if that is not legal."""
    reducer = runtime.reducer
    for unit in units:
        _check(unit)
    for unit in units:  # before any collective, since it raises if the user wrote to an unsharded parameter
        if not (unit.options.stays_after_backward or unit.record.resident_blocks):
            unit.reshard()
    try:
        with torch.no_grad():
            # Latest first, as in backward; and all units, since another rank may have used one that this rank did not.
            for unit in sorted(units, key=lambda unit: unit.number, reverse=True):
                for group in [group for group in unit.groups if group.trainable]:
                    grads = group.take_gradients()
                    if grads is not None or (unit.options.sync_gradients and _is_unreduced(reducer, group)):
                        reducer.reduce(unit, group, grads or [None] * len(group.parameters), last=True)
            return _Pending(runtime, units, *_start_heartbeats(runtime, units))
    except BaseException:
        for unit in units:
            reducer.discard(unit)
        raise


def _is_unreduced(reducer: GradientReducer, group: ParamGroup) -> bool:
    """Return True if the group has gradients that are not reduced yet, or started no reduction since `.grad` was set."""
    return group.grads.are_left or not any(reduction.group is group for _, reduction in reducer.undelivered)


def _start_heartbeats(runtime: Runtime, units: Sequence[Unit]) -> tuple[list[Reduction], list[SentHeartbeat]]:
    """Send the heartbeats of these units' reductions. Return the reductions and the heartbeats, for `_Pending.finish`."""
    reducer, mine = runtime.reducer, set(map(id, units))
    due = [(unit, reduction) for unit, reduction in reducer.undelivered if id(unit) in mine]
    sent = reducer.send_heartbeats(due)
    # `finish` must start no collective, since ranks may finish several models in different orders. On the CPU, waits start the
    # all-reduces over replicas, and the later stages of all-reduces over more than two ranks (heartbeats).
    staged = any(reduction.factors.has_second_step or reduction.group.layout.ranks > 2 for _, reduction in due)
    if staged and runtime.communicator.async_device is None:
        reducer.drain()
        for _, work in sent:
            work.block()
    return [reduction for _, reduction in due], sent


def _check(unit: Unit) -> None:
    unit.check_idle(doing=_CALL)
    if _torch.current_graph_task() != -1:
        raise StateError("finalize_backward() was called inside a backward. Call it after the backward.")
    if not unit.options.ended_by:
        raise StateError(
            f"finalize_backward() was called, but autograd ends the backwards of unit '{unit.name}'. Call "
            "set_manual_backward_finalization(True) before the forward."
        )
    if unit.refused:
        raise StateError(f"finalize_backward() of unit '{unit.name}' was called while {unit.refused}")
    if not unit.options.reduce.all_reduce and unit.axis.replicas is not None:
        raise StateError(
            f"finalize_backward() was called while unit '{unit.name}' leaves the all-reduce over replicas to a later "
            "backward. Call set_requires_all_reduce(True) first."
        )
