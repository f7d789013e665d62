"""Element-wise optimizers of other libraries compute with local shards, as those of torch do by themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.frontend.local_steps import is_element_wise
from fullshard.params.sharded_param import ShardedParameter, logical_parameters

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_VIEW = "_fullshard_local_view"  # on an optimizer


def local_view(optimizer: OptimizerT) -> OptimizerT:
    """Have an element-wise optimizer of another library step over plain local shards.

    Element-wise: a new value depends on nothing but the old one, its gradient, its state and the options. Where more is
    computed (a norm per tensor, a matrix operation, blocks of values that share a scale), each rank would compute it of
    whatever rows it has: such optimizers keep DTensors. Those of torch.optim need no call.

    Within `step()`, `param_groups` and `state` hold plain Parameters over this rank's rows; outside of it, in closures and
    in hooks they hold the sharded parameters and DTensors, as before. So clipping, GradScaler, schedulers, `state_dict()`
    and checkpoints see no difference. Parameters that the optimizer remembers elsewhere are not replaced.

    Args:
        optimizer: a `torch.optim.Optimizer` whose class says itself how it steps; call this before others wrap its `step`, so
            before a scheduler is made.

    Returns:
        `optimizer` itself.

    Raises:
        ValueError: for anything but an optimizer, or one whose `step` was replaced.

    Example:
        >>> optimizer = fullshard.local_view(Lion(model.parameters(), lr=1e-4))               # doctest: +SKIP
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"local_view takes a torch.optim.Optimizer, got {type(optimizer).__name__}: build it with model.parameters() and "
            "pass the optimizer"
        )
    if _VIEW in optimizer.__dict__ or is_element_wise(optimizer):
        return optimizer
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"the step of this {type(optimizer).__name__} was replaced, by a scheduler say: call local_view as soon as it is "
            "built"
        )
    optimizer.__dict__[_VIEW] = _LocalView()
    optimizer.step = MethodType(_HOOKED_STEP, optimizer)  # type: ignore[method-assign]
    return optimizer


class _LocalView:
    """Plain Parameters over the shards of an optimizer's parameters, kept from step to step; their gradients are not."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by the id of the shard, which is kept

    @contextmanager
    def within(self, optimizer: Optimizer) -> Any:
        """A block in which the optimizer holds plain Parameters, and plain states.

        Raises StateError, naming the parameter, before anything changed, for a gradient or state that is cut in another way.
        """
        sharded = [found for group in optimizer.param_groups for found in logical_parameters(group["params"])]
        stands_for = [(parameter, self._plain(parameter)) for parameter in sharded]
        wrapped: dict[int, DTensor] = {}  # states, by their local tensors
        entering = [(parameter, plain, _local_state(optimizer, parameter, wrapped)) for parameter, plain in stands_for]
        grads = [_local_of(p.sharded.grad, p, "gradient") for p in sharded]
        plain_of = {id(parameter.sharded): plain for parameter, plain in stands_for}
        members = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
        try:
            for (parameter, plain, state), grad in zip(entering, grads):
                plain.requires_grad_(parameter.sharded.requires_grad)
                plain.grad = grad
                if state is not None:
                    del optimizer.state[parameter.sharded]
                    optimizer.state[plain] = state
            for listed, before in members:
                listed[:] = [plain_of.get(id(tensor), tensor) for tensor in before]
            yield
        finally:
            for listed, before in members:
                listed[:] = before
            for (parameter, plain), grad in zip(stands_for, grads):
                if plain.grad is None and grad is not None:
                    parameter.sharded.grad = None
                plain.grad = None
                state = optimizer.state.pop(plain, None)
                if state is not None:
                    for key, value in state.items():
                        state[key] = _as_before(value, parameter, wrapped)
                    optimizer.state[parameter.sharded] = state

    def _plain(self, parameter: ShardedParameter) -> nn.Parameter:
        local = parameter.local
        known = self._known.get(id(local))
        if known is None:
            known = self._known[id(local)] = local, nn.Parameter(local.detach(), requires_grad=local.dtype.is_floating_point)
        return known[1]


def _local_of(tensor: Any, parameter: ShardedParameter, what: str) -> Any:
    """The local tensor of a DTensor that is cut like the parameter; anything else is as it was."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec, theirs = parameter.spec, _torch.spec_of(tensor)
    if theirs is not spec and (theirs.mesh != spec.mesh or theirs.placements != spec.placements):
        raise StateError(
            f"a {what} of parameter '{parameter.name}' is a DTensor on {tensor.device_mesh} with {tensor.placements}; expected "
            f"{spec.mesh} with {spec.placements}: redistribute() it, or let this optimizer do without fullshard.local_view()"
        )
    return _torch.local_tensor(tensor)


def _local_state(optimizer: Optimizer, parameter: ShardedParameter, wrapped: dict[int, DTensor]) -> dict[str, Any] | None:
    """A copy of its state, of local tensors; None if it has none. `wrapped` gets the DTensors."""
    held = optimizer.state.get(parameter.sharded)
    if held is None:
        return None
    found = {key: _local_of(value, parameter, f"state '{key}'") for key, value in held.items()}
    wrapped.update((id(found[key]), value) for key, value in held.items() if isinstance(value, DTensor))
    return found


def _as_before(value: Any, parameter: ShardedParameter, wrapped: dict[int, DTensor]) -> Any:
    """A state as it is outside of steps: a DTensor if it has an element for each of the shard."""
    if id(value) in wrapped:
        return wrapped[id(value)]
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim and value.shape == parameter.local.shape:
        return parameter.dtensor_like_shard(value)
    return value


def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """The step of the optimizer's class, over local shards."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # torch's hooks run around this, and see DTensors
    view = optimizer.__dict__[_VIEW]
    inside = view.within(optimizer)

    def outside(closure: Callable[[], Any]) -> Any:
        """The closure is the caller's program, which has sharded parameters."""
        nonlocal inside
        inside.__exit__(None, None, None)
        try:
            with torch.enable_grad():
                return closure()
        finally:
            inside = view.within(optimizer)
            inside.__enter__()

    def wrapped(value: Any) -> Any:
        return (lambda: outside(value)) if callable(value) else value

    args = tuple(map(wrapped, args))
    if "closure" in kwargs:
        kwargs["closure"] = wrapped(kwargs["closure"])
    inside.__enter__()
    try:
        return step(optimizer, *args, **kwargs)
    finally:
        inside.__exit__(None, None, None)


_HOOKED_STEP = Optimizer.profile_hook_step(_step)
_HOOKED_STEP.hooked = True  # type: ignore[attr-defined]

__all__ = ["local_view"]
