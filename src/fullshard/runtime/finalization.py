"""Backwards that the caller ends (`finalize_backward`), and reductions that are waited for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.params.reduction import Reduction
from fullshard.runtime.executor import Executor
from fullshard.runtime.interrupts import recovers_first
from fullshard.runtime.recovery import Recovery
from fullshard.runtime.requests import Requests
from fullshard.runtime.unit import Unit

if TYPE_CHECKING:
    from fullshard.runtime.heartbeat import Sent


class PendingReduction:
    """The reductions of one `finalize_backward`, from their start to `wait()`.

    Attributes:
        units: the units that they are of, none of which may run before `wait()`.
        lost: why there is nothing to wait for any more; "" as long as there is.
    """

    __slots__ = ("lost", "reductions", "sent", "units")

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units, self.lost = list(units), ""
        self.reductions: list[Reduction] = []
        self.sent: list[Sent] = []

    def drop(self, why: str) -> None:
        """Forget the reductions; `wait()` raises and says why."""
        self.lost = why
        for unit in self.units:
            unit.pending = None


class Finalization:
    """The end of a backward, when the caller asks for it instead of at the end of autograd's.

        backwards     units reduce their gradients, or keep them without gradient sync; no `.grad` is set
        start         free the full parameters, reduce what no backward reduced, send the heartbeat
        finish        wait for all of it, look at the heartbeat, set `.grad` of all parameters or none

    Ranks may finish several models in any order, so `finish` sends nothing.
    """

    def __init__(self, executor: Executor, recovery: Recovery, requests: Requests) -> None:
        self._executor, self.recovery, self._requests = executor, recovery, requests

    @recovers_first
    def set_manual(self, units: Sequence[Unit], enabled: bool) -> None:
        """Have the backwards of these units ended by the caller, or by autograd again."""
        self.recovery.recover()
        for unit in units:
            if unit.options.manual == enabled:
                continue
            doing = f"set_manual_backward_finalization({enabled})"
            if _torch.current_graph_task() != -1:
                raise StateError(f"{doing} was called inside a backward, of unit '{unit.name}': call it before or after")
            if self._is_open(unit):
                raise StateError(
                    f"{doing} was called while unit '{unit.name}' has gradients of a backward that no parameter has yet: call "
                    "finalize_backward() first (and wait() of its handle), or reset_iter_state()"
                )
        for unit in units:
            unit.configure(manual=enabled)

    def _is_open(self, unit: Unit) -> bool:
        return self._executor.reducer.is_undelivered(unit) or any(group.grads.has_local for group in unit.groups)

    @recovers_first
    def start(self, units: Sequence[Unit]) -> PendingReduction:
        """Reduce what no backward reduced, and begin to end the step. Raises StateError where that is not legal."""
        reducer = self._executor.reducer
        self._check(units)
        for unit in units:  # before anything is sent, since it raises where the caller wrote to a full parameter
            if not (unit.options.keep_after_backward or unit.record.resident_blocks):
                self._requests.reshard(unit)
        pending = PendingReduction(units)
        try:
            with torch.no_grad():
                # Latest first, as a backward does. All of them, since another rank may have used what this one did not.
                for unit in sorted(units, key=lambda unit: unit.number, reverse=True):
                    for group in unit.groups:
                        grads = group.take_gradients() if group.trainable else None
                        unreduced = group.trainable and unit.options.sync_gradients and reducer.is_unreduced(group)
                        if grads is not None or unreduced:
                            reducer.reduce(unit, group, grads or [None] * len(group.parameters))
                pending.reductions, pending.sent = reducer.begin_to_end(units)
        except BaseException:
            for unit in units:
                reducer.discard(unit)
            raise
        for unit in units:
            unit.pending = pending
        return pending

    def _check(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._requests.check_idle(unit, doing="finalize_backward()")
            if _torch.current_graph_task() != -1:
                raise StateError("finalize_backward() was called inside a backward: call it after")
            if not unit.options.manual:
                raise StateError(
                    f"finalize_backward() was called, but the backwards of unit '{unit.name}' end by themselves: call "
                    "set_manual_backward_finalization(True) before the forward"
                )
            if unit.pending is not None:
                raise StateError(
                    f"finalize_backward() was called while the reductions of unit '{unit.name}' from the last call are under "
                    "way: call wait() of its handle first"
                )
            if not unit.options.reduce.all_reduce and unit.axis.replicas is not None:
                raise StateError(
                    f"finalize_backward() was called while unit '{unit.name}' leaves the sum over replicas to a later "
                    "backward: call set_requires_all_reduce(True) first"
                )

    @recovers_first
    def finish(self, pending: PendingReduction) -> None:
        """Wait for the reductions and set `.grad`. Raises StateError if they were dropped meanwhile, or the ranks diverged."""
        if pending.lost:
            raise StateError(f"wait() of a GradientReductionHandle: its reductions were dropped by {pending.lost}")
        for unit in pending.units:
            unit.pending = None
        with torch.no_grad():
            self._executor.reducer.end(pending.reductions, pending.sent)


__all__ = ["Finalization", "PendingReduction"]
