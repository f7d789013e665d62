"""`local_view`: steps of other libraries' element-wise optimizers on local shards. torch's optimizers need no call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import is_
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard import _torch
from fullshard.core import ShardedParameter, logical_parameters
from fullshard.errors import StateError
from fullshard.optim.empty_shards import placeholder
from fullshard.optim.local_steps import is_element_wise

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_VIEW = "_fullshard_local_view"  # on an optimizer


def local_view(optimizer: OptimizerT) -> OptimizerT:
    """Make an element-wise optimizer of another library step on plain local shards instead of DTensors.

    An optimizer is element-wise if it computes each new value from the old value, its gradient, its state and the options
    only. Do not use this for other optimizers (with a norm per tensor, a matrix operation, or blocks of values that share a
    scale): each rank would compute these from its own rows. Optimizers of torch.optim need no call.

    Inside `step()`, `param_groups` and `state` hold plain Parameters over this rank's rows. Outside of it, in closures and in
    hooks, they hold the sharded parameters and DTensors as before. So clipping, GradScaler, schedulers, `state_dict()` and
    checkpoints work unchanged. References to parameters in other attributes of the optimizer are not replaced. A parameter
    without rows on this rank is represented by a few zeros, since fused kernels may skip or reject empty tensors.

    Args:
        optimizer: a `torch.optim.Optimizer` whose class defines `step`. Call this before other code wraps `step`, for example
            before a scheduler is created.

    Returns:
        The same `optimizer`.

    Raises:
        ValueError: if it is not an optimizer, or its `step` was replaced.

    Example:
        >>> optimizer = fullshard.local_view(Lion(model.parameters(), lr=1e-4))               # doctest: +SKIP
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"local_view takes a torch.optim.Optimizer, got {type(optimizer).__name__}. Build the optimizer with "
            "model.parameters() and pass it."
        )
    if _VIEW in optimizer.__dict__ or is_element_wise(optimizer):
        return optimizer
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"local_view cannot wrap the step of this {type(optimizer).__name__}, which was replaced, for example by a "
            "scheduler. Call local_view directly after the optimizer is built."
        )
    optimizer.__dict__[_VIEW] = _LocalView()
    optimizer.step = MethodType(_HOOKED_STEP, optimizer)  # type: ignore[method-assign]
    return optimizer


class _LocalView:
    """Plain Parameters over the shards of an optimizer's parameters.

    The Parameters persist between steps. Their gradients and states are set in each step.
    """

    def __init__(self) -> None:
        self._groups: list[list[Any]] = []  # the `params` of the optimizer's groups
        self._plain_groups: list[list[Any]] = []  # the same with plain Parameters for the sharded ones
        self._plain_params: list[tuple[ShardedParameter, Tensor, nn.Parameter]] = []  # parameter, its shard, plain Parameter
        self._outside: Any = None  # `optimizer.state` outside of the step; None outside
        self._local_states: list[dict[str, Any] | None] = []  # states at the begin of the step, one per plain Parameter

    def enter(self, optimizer: Optimizer) -> None:
        """Replace the sharded parameters and states of the optimizer by plain ones.

        Raises StateError for a gradient or state whose placements differ from those of its parameter. The error names the
        parameter, and is raised before anything has changed.
        """
        members = [group["params"] for group in optimizer.param_groups]
        if not self._is_current(members):
            self._make_plain_params(members)
        grads = [_local_of(parameter.sharded.grad, parameter, "gradient") for parameter, _, _ in self._plain_params]
        held = [optimizer.state.get(parameter.sharded) for parameter, _, _ in self._plain_params]
        self._local_states = [
            None if state is None else {key: _local_of(value, parameter, f"state '{key}'") for key, value in state.items()}
            for (parameter, _, _), state in zip(self._plain_params, held)
        ]
        inside: Any = defaultdict(dict)
        for (parameter, _, plain), grad, state in zip(self._plain_params, grads, self._local_states):
            if plain.requires_grad is not parameter.sharded.requires_grad:
                plain.requires_grad_(parameter.sharded.requires_grad)
            plain.grad = grad
            if state is not None:
                inside[plain] = dict(state)
        if len(optimizer.state) > len(inside):  # states of plain parameters, and other entries
            ours = {parameter.sharded for parameter, _, _ in self._plain_params}
            inside.update((key, state) for key, state in optimizer.state.items() if key not in ours)
        self._outside, optimizer.state = optimizer.state, inside
        for listed, plain_ones in zip(members, self._plain_groups):
            listed[:] = plain_ones

    def leave(self, optimizer: Optimizer) -> None:
        """Restore the sharded parameters, and convert states with the shape of the shard (or its placeholder) to DTensors."""
        inside, outside = optimizer.state, self._outside
        if outside is None:  # `enter` raised
            return
        for listed, before in zip([group["params"] for group in optimizer.param_groups], self._groups):
            listed[:] = before
        for (parameter, _, plain), known in zip(self._plain_params, self._local_states):
            if plain.grad is None:
                parameter.sharded.grad = None
            plain.grad = None
            state = inside.pop(plain, None)
            if state is None:
                outside.pop(parameter.sharded, None)
            elif known is None or known.keys() != state.keys() or not all(map(is_, known.values(), state.values())):
                held, kept = outside.setdefault(parameter.sharded, {}), known or {}
                found = {
                    key: held[key] if key in kept and value is kept[key] else _to_dtensor(value, parameter)
                    for key, value in state.items()
                }
                held.clear()
                held.update(found)
        outside.update(inside)
        optimizer.state = outside
        self._outside, self._local_states = None, []

    def _is_current(self, members: Sequence[Sequence[Any]]) -> bool:
        """Return True if the plain Parameters still match the groups and the shards."""
        known = self._groups
        if len(known) != len(members) or any(len(one) != len(other) for one, other in zip(known, members)):
            return False
        same = all(all(map(is_, one, other)) for one, other in zip(known, members))
        return same and all(parameter.local is local for parameter, local, _ in self._plain_params)

    def _make_plain_params(self, members: Sequence[Sequence[Any]]) -> None:
        """Create plain Parameters for the sharded ones of these groups."""
        sharded = [found for listed in members for found in logical_parameters(listed)]
        self._plain_params = [
            (one, one.local, nn.Parameter(_nonempty(one.local.detach()), requires_grad=one.requires_grad)) for one in sharded
        ]
        plain_of = {id(parameter.sharded): plain for parameter, _, plain in self._plain_params}
        self._groups = [list(listed) for listed in members]
        self._plain_groups = [[plain_of.get(id(tensor), tensor) for tensor in listed] for listed in members]


def is_viewed(optimizer: Optimizer) -> bool:
    """Return True if `local_view` was called on the optimizer."""
    return _VIEW in optimizer.__dict__


def _local_of(tensor: Any, parameter: ShardedParameter, what: str) -> Any:
    """Return the local tensor of a DTensor, or a placeholder if that is empty. Return any other value unchanged.

    Raises StateError if the placements of the DTensor differ from those of the parameter.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    spec, theirs = parameter.spec, _torch.spec_of(tensor)
    if theirs is not spec and (theirs.mesh != spec.mesh or theirs.placements != spec.placements):
        raise StateError(
            f"The {what} of parameter '{parameter.name}' is a DTensor on {tensor.device_mesh} with {tensor.placements}, "
            f"expected {spec.mesh} with {spec.placements}. redistribute() it, or use this optimizer without "
            "fullshard.local_view()."
        )
    return _nonempty(_torch.local_tensor(tensor))


def _nonempty(local: Tensor) -> Tensor:
    """Return the tensor, or the placeholder of an empty one, for the optimizer to compute with."""
    return local if local.numel() else placeholder(local)


def _to_dtensor(value: Any, parameter: ShardedParameter) -> Any:
    """Return a state as a DTensor if it has the shape of the shard, or of its placeholder, and else unchanged."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim:
        local = parameter.local
        if local.numel():
            return parameter.dtensor_like_shard(value) if value.shape == local.shape else value
        if value.shape == _nonempty(local).shape:
            return parameter.dtensor_like_shard(torch.empty(local.shape, dtype=value.dtype, device=value.device))
    return value


def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the step of the optimizer's class on local shards."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # torch's step hooks run around this
    view: _LocalView = optimizer.__dict__[_VIEW]

    def outside(closure: Callable[[], Any]) -> Any:
        """Run the caller's closure with the sharded parameters, which its forward and backward need."""
        view.leave(optimizer)
        try:
            with torch.enable_grad():
                return closure()
        finally:
            view.enter(optimizer)

    def wrapped(value: Any) -> Any:
        return (lambda: outside(value)) if callable(value) else value

    args = tuple(map(wrapped, args))
    if "closure" in kwargs:
        kwargs["closure"] = wrapped(kwargs["closure"])
    view.enter(optimizer)
    try:
        return step(optimizer, *args, **kwargs)
    finally:
        view.leave(optimizer)


_HOOKED_STEP = Optimizer.profile_hook_step(_step)
_HOOKED_STEP.hooked = True  # type: ignore[attr-defined]

__all__ = ["local_view"]
