"""Element-wise optimizers of other libraries compute with local shards, as those of torch do by themselves."""

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
from fullshard.errors import StateError
from fullshard.frontend.empty_shards import stand_in
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
    and checkpoints see no difference. Parameters that the optimizer remembers elsewhere are not replaced. For parameters of
    which this rank has no rows it steps over some zeros, since fused kernels may skip or refuse empty tensors.

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
    """Plain Parameters over the shards of an optimizer's parameters, kept from step to step; gradients and states are not."""

    def __init__(self) -> None:
        self._groups: list[list[Any]] = []  # as the optimizer holds them
        self._plain_groups: list[list[Any]] = []
        self._stand_in: list[tuple[ShardedParameter, Tensor, nn.Parameter]] = []  # parameter, shard, plain one
        self._outside: Any = None  # the states, as they are outside of the step
        self._local_states: list[dict[str, Any] | None] = []

    def enter(self, optimizer: Optimizer) -> None:
        """Have the optimizer hold plain Parameters and plain states.

        Raises StateError, naming the parameter, before anything changed, for a gradient or state that is cut in another way.
        """
        members = [group["params"] for group in optimizer.param_groups]
        if not self._holds(members):
            self._learn(members)
        grads = [_local_of(parameter.sharded.grad, parameter, "gradient") for parameter, _, _ in self._stand_in]
        held = [optimizer.state.get(parameter.sharded) for parameter, _, _ in self._stand_in]
        self._local_states = [
            None if state is None else {key: _local_of(value, parameter, f"state '{key}'") for key, value in state.items()}
            for (parameter, _, _), state in zip(self._stand_in, held)
        ]
        inside: Any = defaultdict(dict)
        for (parameter, _, plain), grad, state in zip(self._stand_in, grads, self._local_states):
            if plain.requires_grad is not parameter.sharded.requires_grad:
                plain.requires_grad_(parameter.sharded.requires_grad)
            plain.grad = grad
            if state is not None:
                inside[plain] = dict(state)
        if len(optimizer.state) > len(inside):  # of plain parameters, or none at all
            ours = {parameter.sharded for parameter, _, _ in self._stand_in}
            inside.update((key, state) for key, state in optimizer.state.items() if key not in ours)
        self._outside, optimizer.state = optimizer.state, inside
        for listed, plain_ones in zip(members, self._plain_groups):
            listed[:] = plain_ones

    def leave(self, optimizer: Optimizer) -> None:
        """The opposite: states become DTensors, where they have an element for each of the shard or of its stand-in."""
        inside, outside = optimizer.state, self._outside
        if outside is None:  # it could not be entered
            return
        for listed, before in zip([group["params"] for group in optimizer.param_groups], self._groups):
            listed[:] = before
        for (parameter, _, plain), known in zip(self._stand_in, self._local_states):
            if plain.grad is None:
                parameter.sharded.grad = None
            plain.grad = None
            state = inside.pop(plain, None)
            if state is None:
                outside.pop(parameter.sharded, None)
            elif known is None or known.keys() != state.keys() or not all(map(is_, known.values(), state.values())):
                held, kept = outside.setdefault(parameter.sharded, {}), known or {}
                found = {
                    key: held[key] if key in kept and value is kept[key] else _as_before(value, parameter)
                    for key, value in state.items()
                }
                held.clear()
                held.update(found)
        outside.update(inside)
        optimizer.state = outside
        self._outside, self._local_states = None, []

    def _holds(self, members: Sequence[Sequence[Any]]) -> bool:
        """Whether all is as it was learned."""
        known = self._groups
        if len(known) != len(members) or any(len(one) != len(other) for one, other in zip(known, members)):
            return False
        same = all(all(map(is_, one, other)) for one, other in zip(known, members))
        return same and all(parameter.local is local for parameter, local, _ in self._stand_in)

    def _learn(self, members: Sequence[Sequence[Any]]) -> None:
        """Make plain Parameters for the sharded ones of these groups."""
        sharded = [found for listed in members for found in logical_parameters(listed)]
        self._stand_in = [
            (one, one.local, nn.Parameter(_filled(one.local.detach()), requires_grad=one.requires_grad)) for one in sharded
        ]
        plain_of = {id(parameter.sharded): plain for parameter, _, plain in self._stand_in}
        self._groups = [list(listed) for listed in members]
        self._plain_groups = [[plain_of.get(id(tensor), tensor) for tensor in listed] for listed in members]


def is_viewed(optimizer: Optimizer) -> bool:
    """Return True if `local_view` was called on the optimizer."""
    return _VIEW in optimizer.__dict__


def _local_of(tensor: Any, parameter: ShardedParameter, what: str) -> Any:
    """The local tensor of a DTensor that is cut like the parameter, filled up if it is empty; anything else is as it was."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec, theirs = parameter.spec, _torch.spec_of(tensor)
    if theirs is not spec and (theirs.mesh != spec.mesh or theirs.placements != spec.placements):
        raise StateError(
            f"a {what} of parameter '{parameter.name}' is a DTensor on {tensor.device_mesh} with {tensor.placements}; expected "
            f"{spec.mesh} with {spec.placements}: redistribute() it, or let this optimizer do without fullshard.local_view()"
        )
    return _filled(_torch.local_tensor(tensor))


def _filled(local: Tensor) -> Tensor:
    """Return the tensor, or the stand-in of an empty one, for the optimizer to compute with."""
    return local if local.numel() else stand_in(local)


def _as_before(value: Any, parameter: ShardedParameter) -> Any:
    """A state as it is outside of steps: a DTensor if it has an element for each of the shard, or of its stand-in."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim:
        local = parameter.local
        if local.numel():
            return parameter.dtensor_like_shard(value) if value.shape == local.shape else value
        if value.shape == _filled(local).shape:
            return parameter.dtensor_like_shard(torch.empty(local.shape, dtype=value.dtype, device=value.device))
    return value


def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """The step of the optimizer's class, over local shards."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # torch's hooks run around this, and see DTensors
    view: _LocalView = optimizer.__dict__[_VIEW]

    def outside(closure: Callable[[], Any]) -> Any:
        """The closure is the caller's program, which has sharded parameters."""
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
