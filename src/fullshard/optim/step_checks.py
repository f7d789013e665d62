"""Checks of a unit before an optimizer steps its parameters: no forward runs, and all of its gradients have arrived."""

from __future__ import annotations

from fullshard import _torch
from fullshard.core import ParamGroup, Unit
from fullshard.errors import StateError


def prepare_step(unit: Unit, group: ParamGroup) -> None:
    """Wait for copies that read shards in host memory, before an optimizer step. Raise StateError if a step is illegal."""
    unit.runtime.recover()
    unit.runtime.reducer.heartbeats.read()
    if unit.record.running and any(_torch.is_in_forward(module) for module in unit.modules):
        raise StateError(f"optimizer.step() was called inside the forward of unit '{unit.name}'. Call it after backward.")
    group.synchronize_host()
    _check_arrived(unit, group)


def _check_arrived(unit: Unit, group: ParamGroup) -> None:
    """Raise StateError if gradients of a group are not in `.grad` yet, where an optimizer reads them."""
    for parameter in group.parameters:
        if parameter.unsharded is not None and parameter.unsharded.grad is not None:
            raise StateError(
                f"optimizer.step() was called while unit '{unit.name}' has a gradient of '{parameter.name}' that no "
                "backward reduced: no tensor was found in the output of its forward, or the parameter was used outside of "
                "forward. Return tensors in lists, tuples, dicts or dataclasses, or register the class of the output with "
                "torch.utils._pytree.register_pytree_node."
            )
        if parameter.local_grad is not None:
            remedy = (
                "Run the last backward of the step outside of accumulate(), or after set_requires_gradient_sync(True)"
                f"{' and set_is_last_backward(True)' * unit.options.states.keeps_gradients}"
                f"{f', and call {unit.options.ended_by}' if unit.options.ended_by else ''}."
            )
            if not group.trainable:
                remedy = (
                    "Its parameters were frozen since, so no backward reduces it. Freeze them between two steps, or call "
                    "model.zero_grad() to discard the gradient."
                )
            raise StateError(
                f"optimizer.step() was called while the gradient of '{parameter.name}' in unit '{unit.name}' is only kept "
                f"on each rank. {remedy}"
            )
    if group.grads.deferred is not None:
        raise StateError(
            f"optimizer.step() was called while gradients of unit '{unit.name}' are reduced over shards, but not over "
            "replicas. Call set_requires_all_reduce(True) before the last backward of the step"
            f"{', and set_is_last_backward(True)' * unit.options.states.sums_over_shards}."
        )
    if any(reduction.group is group and not reduction.committed for _, reduction in unit.runtime.reducer.undelivered):
        remedy = (
            f"Call {unit.options.ended_by}, and wait() of its handle."
            if unit.options.ended_by
            else "Call set_is_last_backward(True) before the last backward of the step."
        )
        raise StateError(f"optimizer.step() was called before the gradients of unit '{unit.name}' arrived. {remedy}")
