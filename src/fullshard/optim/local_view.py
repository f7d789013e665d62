"""`local_view`: steps of other libraries' element-wise optimizers on local shards. torch's optimizers need no call."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Muon, Optimizer

from fullshard import _torch
from fullshard.core import ShardedParameter, logical_parameters, user_attributes
from fullshard.errors import StateError, warn_once
from fullshard.optim.copies import agreement_of_all, find_difference
from fullshard.optim.empty_shards import nonempty
from fullshard.optim.local_steps import is_element_wise
from fullshard.optim.pieces import is_same, placement_error
from fullshard.optim.step_wrapper import BeforeStep, view_of, wrap_step

_TRIED = 1 << 24  # elements of the parameters that are tried in their whole shapes
_ROUNDING = 1e-2  # relative difference of two steps of the same values by kernels that round otherwise

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_NOT_ELEMENT_WISE: dict[type[Optimizer], str] = {
    Muon: "It needs no view",
    Adafactor: "Call fullshard.whole_view()",
    LBFGS: "Without a view it steps DTensors",
}


def local_view(optimizer: OptimizerT) -> OptimizerT:
    """Make an element-wise optimizer of another library step on plain local shards instead of DTensors.

    An optimizer is element-wise if it computes each new value from the old value, its gradient, its state and the options
    only. Do not use this for other optimizers (with a norm per tensor, a matrix operation, or blocks of values that share a
    scale), nor for one that chooses by the shape or size of a parameter: each rank would compute with its own rows, whose
    number is that of the shard. The first step tries a parameter of each shape in its whole shape, and warns if that gives
    something else. Optimizers of torch.optim need no call.

    Inside `step()`, `param_groups` and `state` hold plain Parameters over this rank's rows, with the attributes of the sharded
    parameters. Outside of it, in closures and in hooks, they hold the sharded parameters and DTensors as before. So clipping,
    GradScaler, schedulers, `state_dict()` and checkpoints work unchanged. References to parameters in other attributes of the
    optimizer are not replaced. A parameter without rows on this rank is represented by a few zeros, since fused kernels may
    skip or reject empty tensors. States of one rank, as scales of its rows, cannot be saved: `state_dict()` raises StateError
    if a plain state differs between ranks.

    Args:
        optimizer: a `torch.optim.Optimizer` whose class defines `step`. Call this before other code wraps `step`, for example
            before a scheduler is created.

    Returns:
        The same `optimizer`.

    Raises:
        ValueError: if it is not an optimizer, is one of torch that is not element-wise (Muon, Adafactor, LBFGS), or its `step`
            was replaced.

    Example:
        >>> optimizer = fullshard.local_view(Lion(model.parameters(), lr=1e-4))               # doctest: +SKIP
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"local_view takes a torch.optim.Optimizer, got {type(optimizer).__name__}. Build the optimizer with "
            "model.parameters() and pass it."
        )
    if view_of(optimizer) == "local_view" or is_element_wise(optimizer):
        return optimizer
    for cls, remedy in _NOT_ELEMENT_WISE.items():
        if isinstance(optimizer, cls) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(cls.step):
            raise ValueError(
                f"{type(optimizer).__name__} is not element-wise: each rank would compute with its own rows only. {remedy}."
            )
    wrap_step(optimizer, _LocalView().step, caller="local_view")
    optimizer.register_state_dict_pre_hook(_check_states)
    return optimizer


def _check_states(optimizer: Optimizer) -> None:
    """Raise StateError if a plain state with dims differs between ranks. Collective if the optimizer has such states.

    Such a state, as a scale of each row, is of the shard, but nothing marks it: a checkpoint would take it for a replica.
    """
    every = logical_parameters(parameter for group in optimizer.param_groups for parameter in group["params"])
    states = [
        (f"State '{key}' of parameter '{one.name}'", value)
        for one in every
        for key, value in sorted(optimizer.state.get(one.sharded, {}).items(), key=lambda item: str(item[0]))
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim
    ]
    if not states:
        return
    doing = f"{type(optimizer).__name__}.state_dict()"
    text = find_difference(states, agreement_of_all(every, f"{doing} with {len(states)} plain states"))
    if text is not None:
        raise StateError(
            f"{doing}: {text}. It belongs to the shard of each rank, and a checkpoint would give all ranks that of one. Use an "
            "optimizer whose states have the shape of the parameter, or fullshard.whole_view()."
        )


class _LocalView:
    """Plain Parameters over the shards of an optimizer's parameters.

    The Parameters persist between steps. Their gradients and states are set in each step.
    """

    def __init__(self) -> None:
        self._groups: list[list[Any]] = []  # the `params` of the optimizer's groups
        self._plain_groups: list[list[Any]] = []  # the same with plain Parameters for the sharded ones
        self._plain_params: list[tuple[ShardedParameter, Tensor, nn.Parameter]] = []  # parameter, its shard, plain Parameter
        self._outside_state: Any = None  # during a step: the `optimizer.state` from before it, with DTensors; else None
        self._entry_states: list[dict[str, Any] | None] = []  # by plain Parameter: its local state when `enter` returned
        self._is_tried = False  # True once parameters of whole shapes were tried

    def step(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `step`, that of the optimizer's class, on local shards."""

        def call_outside(closure: Callable[[], Any]) -> Any:
            """Run the caller's closure with the sharded parameters, which its forward and backward need."""
            self.leave(optimizer)
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                self.enter(optimizer)

        def wrapped(value: Any) -> Any:
            return (lambda: call_outside(value)) if callable(value) else value

        args = tuple(map(wrapped, args))
        if "closure" in kwargs:
            kwargs["closure"] = wrapped(kwargs["closure"])
        self.enter(optimizer)
        try:
            if not self._is_tried and any(plain.grad is not None for _, _, plain in self._plain_params):
                self._is_tried = True
                self._try_whole_shapes(optimizer, step)
            return step(*args, **kwargs)
        finally:
            self.leave(optimizer)

    def _try_whole_shapes(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        """Warn if a step of this rank's rows in a tensor of the whole shape gives something else than a step of the rows.

        One parameter of each shape is tried, without its state, from small ones to `_TRIED` elements. All of it is undone.
        """
        shapes: dict[tuple[int, ...], tuple[ShardedParameter, nn.Parameter]] = {}
        for parameter, local, plain in self._plain_params:
            shape, grad = tuple(parameter.sharding.local_shape), plain.grad
            if grad is not None and grad.dtype == local.dtype and type(local) is Tensor and 0 < local.numel() < prod(shape):
                shapes.setdefault(shape, (parameter, plain))
        elements = 0
        for shape, (parameter, plain) in sorted(shapes.items(), key=lambda item: prod(item[0])):
            elements += prod(shape)
            if elements > _TRIED:
                return
            rows = _step_alone(optimizer, step, plain, plain.detach().clone(), plain.grad)
            weight, grad = plain.detach().new_zeros(shape), plain.detach().new_zeros(shape)
            parameter.sharding.slice(weight).copy_(plain.detach())
            parameter.sharding.slice(grad).copy_(plain.grad)  # type: ignore[arg-type]
            whole = _step_alone(optimizer, step, plain, weight, grad)
            if rows is None or whole is None:  # it cannot step one parameter alone
                return
            if (parameter.sharding.slice(whole) - rows).norm() > _ROUNDING * (rows - plain.detach()).norm():
                return warn_once(
                    f"{type(optimizer).__name__} under local_view() steps parameter '{parameter.name}' of shape {shape} "
                    f"otherwise than its rows on this rank, of shape {tuple(rows.shape)}: it chooses by shape or size, "
                    "combines elements, or draws random numbers. Inside of the step, shape and size are those of the rows. "
                    "Set what it chooses by parameter group, or use fullshard.whole_view()."
                )

    def enter(self, optimizer: Optimizer) -> None:
        """Replace the sharded parameters and states of the optimizer by plain ones.

        Raises StateError for a gradient or state whose placements differ from those of its parameter. The error names the
        parameter, and is raised before anything has changed.
        """
        members = [group["params"] for group in optimizer.param_groups]
        if not self._is_current(members):
            self._make_plain_params(members)
        grads = [_local_of(parameter.sharded.grad, parameter, "gradient") for parameter, _, _ in self._plain_params]
        outside_states = [optimizer.state.get(parameter.sharded) for parameter, _, _ in self._plain_params]
        self._entry_states = [
            None if state is None else {key: _local_of(value, parameter, f"state '{key}'") for key, value in state.items()}
            for (parameter, _, _), state in zip(self._plain_params, outside_states)
        ]
        inside: Any = defaultdict(dict)
        for (parameter, _, plain), grad, state in zip(self._plain_params, grads, self._entry_states):
            if plain.requires_grad is not parameter.sharded.requires_grad:
                plain.requires_grad_(parameter.sharded.requires_grad)
            plain.grad = grad
            plain.__dict__.update(user_attributes(parameter.sharded))
            if state is not None:
                inside[plain] = dict(state)
        if len(optimizer.state) > len(inside):  # states of parameters that are not sharded, and other entries
            sharded = {parameter.sharded for parameter, _, _ in self._plain_params}
            inside.update((key, state) for key, state in optimizer.state.items() if key not in sharded)
        self._outside_state, optimizer.state = optimizer.state, inside
        for listed, plain_ones in zip(members, self._plain_groups):
            listed[:] = plain_ones

    def leave(self, optimizer: Optimizer) -> None:
        """Restore the sharded parameters, and turn states with the shape of the shard, or of its replacement, into DTensors."""
        inside, outside = optimizer.state, self._outside_state
        if outside is None:  # `enter` raised
            return
        for listed, before in zip([group["params"] for group in optimizer.param_groups], self._groups):
            listed[:] = before
        for (parameter, _, plain), entry_state in zip(self._plain_params, self._entry_states):
            if plain.grad is None:  # the step cleared the gradient
                parameter.sharded.grad = None
            plain.grad = None
            state = inside.pop(plain, None)
            if state is None:
                outside.pop(parameter.sharded, None)
            else:
                # Values that the step did not replace or add keep their DTensors, whose memory the step wrote in place.
                outside_state, at_entry = outside.setdefault(parameter.sharded, {}), entry_state or {}
                new_state = {
                    key: outside_state[key] if key in at_entry and value is at_entry[key] else _to_dtensor(value, parameter)
                    for key, value in state.items()
                }
                outside_state.clear()
                outside_state.update(new_state)
        outside.update(inside)
        optimizer.state = outside
        self._outside_state, self._entry_states = None, []

    def _is_current(self, members: Sequence[Sequence[Any]]) -> bool:
        """Return True if the plain Parameters still match the groups and the shards."""
        same = len(self._groups) == len(members) and all(map(is_same, self._groups, members))
        return same and all(parameter.local is local for parameter, local, _ in self._plain_params)

    def _make_plain_params(self, members: Sequence[Sequence[Any]]) -> None:
        """Create plain Parameters for the sharded ones of these groups."""
        self._plain_params = []
        for listed in members:
            for parameter in logical_parameters(listed):
                plain = nn.Parameter(nonempty(parameter.local.detach()), requires_grad=parameter.requires_grad)
                if parameter.grad_dtype.explicit:
                    _torch.set_grad_dtype(plain, parameter.grad_dtype.dtype)
                self._plain_params.append((parameter, parameter.local, plain))
        plain_of = {id(parameter.sharded): plain for parameter, _, plain in self._plain_params}
        self._groups = [list(listed) for listed in members]
        self._plain_groups = [[plain_of.get(id(tensor), tensor) for tensor in listed] for listed in members]


@torch.no_grad()
def _step_alone(
    optimizer: Optimizer, step: Callable[..., Any], plain: nn.Parameter, weight: Tensor, grad: Tensor | None
) -> Tensor | None:
    """Return `weight` after a step in the place of `plain`, without states and other parameters; None if the step raises."""
    before = BeforeStep(optimizer, {}, [])
    stand_in = nn.Parameter(weight, requires_grad=plain.requires_grad)
    stand_in.grad = None if grad is None else grad.clone()
    stand_in.__dict__.update(plain.__dict__)
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        group["params"] = [stand_in for one in group["params"] if one is plain]
    try:
        with torch.random.fork_rng([weight.device] if weight.device.type == "cuda" else []):
            step()
    except Exception:
        return None
    finally:
        before.restore()
    return stand_in.detach()


def _local_of(tensor: Any, parameter: ShardedParameter, what: str) -> Any:
    """Return the local tensor of a DTensor, or zeros for an empty one (`nonempty`). Return any other value unchanged.

    Raises StateError if the placements of the DTensor differ from those of the parameter.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if unlike := placement_error(_torch.spec_of(tensor), parameter):
        raise StateError(
            f"The {what} of parameter '{parameter.name}' is {unlike}. redistribute() it, or use this optimizer without "
            "fullshard.local_view()."
        )
    return nonempty(_torch.local_tensor(tensor))


def _to_dtensor(value: Any, parameter: ShardedParameter) -> Any:
    """Return a state as a DTensor if it has the shape of the shard, or of what replaced it. Return other states unchanged."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim:
        local = parameter.local
        if local.numel():
            return parameter.dtensor_like_shard(value) if value.shape == local.shape else value
        if value.shape == nonempty(local).shape:
            return parameter.dtensor_like_shard(torch.empty(local.shape, dtype=value.dtype, device=value.device))
    return value
