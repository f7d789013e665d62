"""`finalize_backward`: backwards that the user ends, and reductions that the user waits for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fullshard import _torch
from fullshard.core.reduction import Reduction
from fullshard.core.runtime import Runtime
from fullshard.core.unit import Unit
from fullshard.errors import StateError

if TYPE_CHECKING:
    from fullshard.core.heartbeat import Sent


class PendingReduction:
    """The reductions of one `finalize_backward`, until `wait()`.

    Attributes:
        units: their units, none of which may run before `wait()`.
        lost: the reason why the reductions were dropped, "" if they were not.
    """

    __slots__ = ("lost", "reductions", "sent", "units")

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units, self.lost = list(units), ""
        self.reductions: list[Reduction] = []
        self.sent: list[Sent] = []

    def drop(self, why: str) -> None:
        """Drop the reductions. `wait()` then raises, with `why` as the reason."""
        self.lost = why
        for unit in self.units:
            unit.pending = None


class Finalization:
    """Ends backwards when the user calls `finalize_backward`, instead of at the end of autograd's backward.

        backwards     units reduce their gradients, or keep them without gradient sync; no `.grad` is set
        start         reshard, reduce the remaining gradients, start the heartbeat
        finish        wait for all of it, check the heartbeat, set `.grad` of all parameters or none

    Ranks may finish several models in different orders, so `finish` starts no collective.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._reducer, self._recovery = runtime.reducer, runtime.recovery

    def set_manual(self, units: Sequence[Unit], enabled: bool) -> None:
        """Choose whether the user ends the backwards of these units (True), or autograd does (False)."""
        self._recovery.recover()
        for unit in units:
            if unit.options.manual == enabled:
                continue
            doing = f"set_manual_backward_finalization({enabled})"
            if _torch.current_graph_task() != -1:
                raise StateError(f"{doing} was called inside a backward of unit '{unit.name}'. Call it before or after.")
            if self._is_open(unit):
                raise StateError(
                    f"{doing} was called while unit '{unit.name}' has gradients that are not in .grad yet. Call "
                    "finalize_backward() first (and wait() of its handle), or reset_iter_state()."
                )
        for unit in units:
            unit.configure(manual=enabled)

    def _is_open(self, unit: Unit) -> bool:
        return self._reducer.is_undelivered(unit) or any(group.grads.has_local for group in unit.groups)

    def start(self, units: Sequence[Unit]) -> PendingReduction:
        """Reduce the remaining gradients, and start the heartbeat that ends the step; `finish` waits for both.

        Raises StateError where that is not legal.
        """
        reducer = self._reducer
        self._check(units)
        for unit in units:  # before any collective, since it raises if the user wrote to an unsharded parameter
            if not (unit.record.stays_after_backward or unit.record.resident_blocks):
                unit.reshard()
        pending = PendingReduction(units)
        try:
            with torch.no_grad():
                # Latest first, as in backward; and all units, since another rank may have used one that this rank did not.
                for unit in sorted(units, key=lambda unit: unit.number, reverse=True):
                    for group in unit.groups:
                        grads = group.take_gradients() if group.trainable else None
                        unreduced = group.trainable and unit.options.sync_gradients and reducer.is_unreduced(group)
                        if grads is not None or unreduced:
                            reducer.reduce(unit, group, grads or [None] * len(group.parameters), last=True)
                pending.reductions, pending.sent = reducer.start_heartbeats(units)
        except BaseException:
            for unit in units:
                reducer.discard(unit)
            raise
        for unit in units:
            unit.pending = pending
        return pending

    def _check(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.check_idle(doing="finalize_backward()")
            if _torch.current_graph_task() != -1:
                raise StateError("finalize_backward() was called inside a backward. Call it after the backward.")
            if not unit.options.manual:
                raise StateError(
                    f"finalize_backward() was called, but autograd ends the backwards of unit '{unit.name}'. Call "
                    "set_manual_backward_finalization(True) before the forward."
                )
            if unit.pending is not None:
                raise StateError(
                    f"finalize_backward() was called while the reductions of unit '{unit.name}' from the last call are in "
                    "flight. Call wait() of its handle first."
                )
            if not unit.options.reduce.all_reduce and unit.axis.replicas is not None:
                raise StateError(
                    f"finalize_backward() was called while unit '{unit.name}' leaves the all-reduce over replicas to a later "
                    "backward. Call set_requires_all_reduce(True) first."
                )

    def finish(self, pending: PendingReduction) -> None:
        """Wait for the reductions and set `.grad`. Raises StateError if they were dropped, or if ranks diverged."""
        if pending.lost:
            raise StateError(
                f"wait() of a GradientReductionHandle cannot finish: its reductions were dropped by {pending.lost}."
            )
        for unit in pending.units:
            unit.pending = None
        with torch.no_grad():
            self._reducer.end(pending.reductions, pending.sent)


__all__ = ["Finalization", "PendingReduction"]
