"""Memory without values: what `to_empty` gave a unit must be written before the unit's first forward."""

from __future__ import annotations

import warnings
import weakref

import torch

from fullshard.errors import StateError, warn_once
from fullshard.params.uninitialized import UninitializedTensors
from fullshard.runtime.unit import Unit, own_modules


def on_meta(unit: Unit) -> UninitializedTensors:
    """What of the unit has no memory yet."""
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
    """Mark tensors that have memory and no values: the next forward raises if that is still so. by: what left them so."""
    with torch.no_grad():
        fresh.mark(by)
    unit.checks.uninitialized = fresh


def check_written(unit: Unit) -> None:
    """Raises StateError if what `to_empty` allocated was never written, naming it."""
    fresh = unit.checks.uninitialized
    if fresh is None:
        return
    left = fresh.remaining()
    if left:
        raise StateError(
            f"unit '{unit.name}': {fresh.by} {', '.join(left)}, and nothing has written "
            f"{'it' if len(left) == 1 else 'them'}: call reset_parameters(), load_state_dict() or fullshard.materialize() "
            "before the first forward"
        )
    soft = fresh.remaining(persistent=False)
    if soft:
        warnings.warn(
            f"unit '{unit.name}': {fresh.by} {', '.join(soft)}, and nothing has written "
            f"{'it' if len(soft) == 1 else 'them'} before the first forward. No state dict holds such buffers: compute them "
            "anew, in reset_parameters() or by hand, or call materialize() instead of to_empty(). If the forward itself fills "
            "them, this is no mistake",
            stacklevel=2,
        )
    unit.checks.uninitialized = None


def warn_of_unwritten(unit: Unit) -> None:
    """Say, in a state dict, what `load_weights` left without values. It is no error: a load may be about to fill the dict."""
    fresh = unit.checks.uninitialized
    left = fresh.remaining() if fresh is not None and fresh.by.startswith("load_weights()") else []
    if fresh is not None and left:
        names = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
        warn_once(
            f"state_dict() of unit '{unit.name}': {fresh.by} {names}, and nothing has written it since. What the dict holds "
            "there are no values: fill it by a load before it is saved"
        )


__all__ = ["check_written", "mark_unwritten", "on_meta", "warn_of_unwritten"]
