"""Gradients that arrive without a hook on a graph: second backwards, and parameters that a forward returns."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fullshard.core.unit import Unit

_LATE = "_fullshard_late"  # attribute of an unsharded parameter: the handle of its LateGradHook


class LateGradHook:
    """Hook on an unsharded parameter in the graph of a backward. It runs when a gradient arrives that passed no other hook."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, _: Tensor) -> None:
        """Enter the unit's backward, after the gradient was accumulated."""
        unit = self._unit()
        if unit is None:
            return
        try:
            unit.late_backward()
        except BaseException as failure:
            unit.runtime.recovery.note_interrupt(failure)
            raise


def hook_late_grads(unit: Unit) -> None:
    """Hook the unsharded parameters, for gradients that pass no hook on a graph.

    These come from a second backward through the graph of the first one, or from a loss of a returned parameter itself.
    """
    for parameter in unit.parameters:
        full = parameter.unsharded
        if full is not None and full.requires_grad and _LATE not in full.__dict__:
            full.__dict__[_LATE] = full.register_post_accumulate_grad_hook(LateGradHook(unit))


__all__ = ["LateGradHook", "hook_late_grads"]
