"""Parameters of before sharding, which stand for the parameters that took their places."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.params.sharded_tensor import LOGICAL

_SUCCESSOR = "_fullshard_sharded"  # on a parameter: the one that took its place


class Successions:
    """How often a parameter of this process was given a successor: as long as that stays, so do those of all parameters."""

    count = 0


class StaleParameter(nn.Parameter):
    """A parameter whose place another one took: whatever is done with it is done with that one.

    So a list of parameters that was made before sharding is clipped and zeroed, its `.grad` is the reduced one, and computing
    with it is computing with the parameter as its module has it now: the full one while the unit's forward runs, else the
    sharded one. Its own memory is gone.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return getattr(_now(args[0], True), func.__self__.__name__)
        if name == "__set__":
            return setattr(_now(args[0], True), func.__self__.__name__, _now(args[1], True))
        if name == "__delete__":
            return delattr(_now(args[0], True), func.__self__.__name__)
        # Hooks and writes, as attributes, are the sharded parameter's, whatever its module computes with at the moment.
        lasting = "hook" in name or (name.endswith("_") and not name.endswith("__"))
        return func(*_now(args, lasting), **_now(kwargs or {}, lasting))

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = made = copy.deepcopy(successor(self), memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return successor(self).__reduce_ex__(protocol)  # type: ignore[union-attr]


def _now(value: Any, lasting: bool) -> Any:
    if isinstance(value, StaleParameter):
        found: Any = successor(value)
        back = found.__dict__.get(LOGICAL)
        logical = None if lasting or back is None else back()
        return found if logical is None else logical.current
    if type(value) in (list, tuple):
        return type(value)(_now(item, lasting) for item in value)
    if type(value) is dict:
        return {key: _now(item, lasting) for key, item in value.items()}
    return value


def replace(original: Tensor, by: nn.Parameter) -> None:
    """Have `original` stand for `by` from now on, and give its memory back, if it is a plain Parameter.

    A frozen one stays what it is: no gradient is missed, and another module may compute with it.
    """
    redirect_to(original, by)
    if type(original) is nn.Parameter and original.requires_grad:
        if type(original.data) is Tensor and original.device.type != "meta":
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        original.grad = None
        original.__class__ = StaleParameter


def redirect_to(tensor: Tensor, by: nn.Parameter) -> None:
    """Optimizers that are given `tensor`, which keeps its own memory, train `by`."""
    if tensor.__dict__.get(_SUCCESSOR) is not by:
        Successions.count += 1
    tensor.__dict__[_SUCCESSOR] = by


def successor(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that stands for `tensor` now, None if `tensor` stands for itself."""
    found = tensor.__dict__.get(_SUCCESSOR)
    while found is not None and _SUCCESSOR in found.__dict__:
        found = found.__dict__[_SUCCESSOR]
    return found


__all__ = ["StaleParameter", "Successions", "redirect_to", "replace", "successor"]
