"""Gradients that arrive without a hook on an output: second backwards, and outputs that hide their graph."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core.scheduler import KeepAfterForward
from fullshard.errors import warn_once
from fullshard.policies import LintWarning

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
    """Hook the unsharded parameters, for gradients that pass no hook of an output.

    These come from a second backward through the graph of the first one, or through an output that hides its graph.
    """
    for parameter in unit.parameters:
        full = parameter.unsharded
        if full is not None and full.requires_grad and _LATE not in full.__dict__:
            full.__dict__[_LATE] = full.register_post_accumulate_grad_hook(LateGradHook(unit))


def check_hidden(unit: Unit, output: Any) -> None:
    """Warn if `output` shows no tensor with a graph, but a graph leads to the parameters.

    Whether a graph is found depends on what this rank keeps alive, so no collective may depend on it.
    """
    if not torch.is_grad_enabled() or unit.progress.live_graphs or _torch.current_graph_task() != -1:
        return  # the graph may be that of an earlier forward, whose outputs have hooks
    for parameter in unit.parameters:
        full = parameter.unsharded
        if full is not None and full.requires_grad and _torch.is_in_graph(full):
            hook_late_grads(unit)
            if "hidden" not in unit.options.checks.silence:
                why, otherwise = "starts no all-gather of the parameters", ""
                if unit.record.policy is KeepAfterForward.ALWAYS:
                    why = "fails if another backward ends first, which frees the parameters"
                elif unit.record.policy is KeepAfterForward.KEPT:
                    why = "fails if an optimizer step and another forward come first"
                else:
                    otherwise = ", or keep the parameters with reshard_after_forward=False"
                warn_once(
                    f"the forward of unit '{unit.name}' returned a {type(output).__name__} in which no tensor with a graph "
                    f"is found, but a graph leads to its parameter '{parameter.name}' all the same: a backward through it "
                    f"{why}. Return the tensor itself, or in a list, dict, dataclass or attribute{otherwise}",
                    LintWarning,
                )
            return


__all__ = ["LateGradHook", "check_hidden", "hook_late_grads"]
