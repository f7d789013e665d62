"""Uninitialized memory: tensors that `to_empty` allocated must be written before the unit's first forward."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from fullshard.core.uninitialized import UninitializedTensors
from fullshard.core.unit_modules import own_modules
from fullshard.errors import StateError, warn_once

if TYPE_CHECKING:
    from fullshard.core.unit import Unit


def tensors_on_meta(unit: Unit) -> UninitializedTensors:
    """Return the parameters and buffers of the unit that are on meta."""
    return UninitializedTensors(
        [parameter for parameter in unit.parameters if parameter.local.device.type == "meta"],
        [
            (weakref.ref(module), name)
            for root in unit.modules
            for module in own_modules(root)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.device.type == "meta"
        ],
    )


def mark_unwritten(unit: Unit, fresh: UninitializedTensors, by: str = "to_empty() allocated") -> None:
    """Mark tensors that have memory but no values. The next forward raises if they are still unwritten.

    Args:
        unit: the unit of the tensors.
        fresh: the tensors.
        by: the cause, for error texts.
    """
    with torch.no_grad():
        fresh.mark(by)
    unit.checks.uninitialized, unit.checks.values = fresh, unit.options.sync != "off"


def check_written(unit: Unit) -> None:
    """Raise StateError, naming the tensors, if some that `to_empty` allocated were never written."""
    fresh = unit.checks.uninitialized
    if fresh is None:
        return
    left = fresh.remaining()
    if left:
        raise StateError(
            f"Unit '{unit.name}' has uninitialized memory: {fresh.cause} {', '.join(left)}, and nothing has written "
            f"{'it' if len(left) == 1 else 'them'}. Call reset_parameters(), load_state_dict() or fullshard.materialize() "
            "before the first forward."
        )
    buffers = fresh.remaining(persistent=False)
    if buffers:  # only a warning, since the forward itself may fill them
        warnings.warn(
            f"Unit '{unit.name}' has uninitialized buffers: {fresh.cause} {', '.join(buffers)}, and nothing has written "
            f"{'it' if len(buffers) == 1 else 'them'} before the first forward. State dicts do not contain such buffers. "
            "Compute them again, in reset_parameters() or by hand, or call materialize() instead of to_empty(). If the forward "
            "itself fills them, ignore this warning.",
            stacklevel=2,
        )


def warn_if_unwritten(unit: Unit) -> None:
    """Warn that a state dict contains tensors without values, if `load_weights` left some.

    This is no error, since a load may be about to fill the dict.
    """
    fresh = unit.checks.uninitialized
    left = fresh.remaining() if fresh is not None and fresh.cause.startswith("load_weights()") else []
    if fresh is not None and left:
        names = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
        warn_once(
            f"state_dict() of unit '{unit.name}' contains uninitialized memory: {fresh.cause} {names}, and nothing has written "
            "it since. Load values into the dict before you save it."
        )


__all__ = ["check_written", "mark_unwritten", "tensors_on_meta", "warn_if_unwritten"]
