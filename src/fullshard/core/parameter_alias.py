"""Aliases: parameters from before sharding forward to the sharded ones, sharded ones from before undo() their gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.sharded_tensor import LOGICAL, ShardedDTensor

_REPLACEMENT = "_fullshard_sharded"  # on a parameter: the one that took its place


class _Replacements:
    count = 0  # in this process


class ParameterAlias(nn.Parameter):
    """Alias left in place of a parameter that was sharded; forwards every operation to the sharded parameter.

    So a list of parameters from before sharding has the reduced gradients in `.grad`, and can be clipped and zeroed. Computing
    with an alias uses the parameter that is registered on the module: the unsharded one during the unit's forward, else the
    sharded one. The memory of the original parameter is freed.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return getattr(_resolve(args[0], True), func.__self__.__name__)
        if name == "__set__":
            return setattr(_resolve(args[0], True), func.__self__.__name__, _resolve(args[1], True))
        if name == "__delete__":
            return delattr(_resolve(args[0], True), func.__self__.__name__)
        # Hooks, in-place writes and attributes must last beyond the forward, so they go to the sharded parameter even while the
        # unsharded one is registered.
        to_sharded = "hook" in name or (name.endswith("_") and not name.endswith("__"))
        return func(*_resolve(args, to_sharded), **_resolve(kwargs or {}, to_sharded))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(replacement_of(self))

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = made = copy.deepcopy(replacement_of(self), memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return replacement_of(self).__reduce_ex__(protocol)  # type: ignore[union-attr]


class UndoneParameter(ShardedDTensor):
    """A sharded parameter from before `undo()`: its `.grad` is that of the parameter that replaced it.

    So an optimizer that still lists it zeroes, unscales and clips the gradient that its next step uses.
    """

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient of the parameter that replaced it."""
        return replacement_of(self).grad  # type: ignore[union-attr]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        replacement_of(self).grad = value  # type: ignore[union-attr]


def _resolve(value: Any, to_sharded: bool) -> Any:
    if isinstance(value, ParameterAlias):
        found: Any = replacement_of(value)
        back = found.__dict__.get(LOGICAL)
        logical = None if to_sharded or back is None else back()
        return found if logical is None else logical.current
    if type(value) in (list, tuple):
        return type(value)(_resolve(item, to_sharded) for item in value)
    if type(value) is dict:
        return {key: _resolve(item, to_sharded) for key, item in value.items()}
    return value


def replace(original: Tensor, by: nn.Parameter) -> None:
    """Turn `original` into an alias of `by` and free its memory, if it is a plain, trainable Parameter.

    A frozen parameter keeps its class and memory: it has no gradient to forward, and a module outside may compute with it.
    """
    set_replacement(original, by)
    if type(original) is nn.Parameter and original.requires_grad:
        if type(original.data) is Tensor and original.device.type != "meta":
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        original.grad = None
        original.__class__ = ParameterAlias


def replace_undone(sharded: Any, by: nn.Parameter) -> None:
    """Record that `by` replaces a sharded parameter, which forwards its gradient from now on."""
    set_replacement(sharded, by)
    sharded.grad = None
    sharded.__class__ = UndoneParameter


def set_replacement(tensor: Tensor, by: nn.Parameter) -> None:
    """Record that `by` replaces `tensor`, so that optimizers over `tensor` train `by`. `tensor` keeps its memory."""
    if tensor.__dict__.get(_REPLACEMENT) is not by:
        _Replacements.count += 1
    tensor.__dict__[_REPLACEMENT] = by


def replacement_of(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter that replaces `tensor` now, or None if nothing replaced it."""
    found = tensor.__dict__.get(_REPLACEMENT)
    while found is not None and _REPLACEMENT in found.__dict__:  # sharded, unsharded and sharded again
        found = found.__dict__[_REPLACEMENT]
    return found


def replacement_count() -> int:
    """Return the number of replacements in this process. Results of `replacement_of` are current while it does not change."""
    return _Replacements.count


__all__ = [
    "ParameterAlias",
    "UndoneParameter",
    "replace",
    "replace_undone",
    "replacement_count",
    "replacement_of",
    "set_replacement",
]
