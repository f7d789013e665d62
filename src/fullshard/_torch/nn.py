"""Modules, their parameters and buffers, and calls of modules."""

from __future__ import annotations

import functools
import operator
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Undo = Callable[[], None]
"""Function that reverts a change to torch."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict that `module.name` reads. Writing to it replaces a parameter in 0.05 us, `__setattr__` in 2 us."""
    # Private: `_parameters`. Every unshard and reshard swaps the parameters of a unit through it.
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict that `module.name` reads for buffers."""
    # Private: `_buffers`, to read and replace buffers of one module without `__setattr__`.
    return module._buffers


def persists(module: nn.Module, name: str) -> bool:
    """Return True if state dicts contain this buffer of `module`."""
    # Private: `_non_persistent_buffers_set`, the only record of `persistent=False`.
    return name not in module._non_persistent_buffers_set


children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
"""Return the dict that `module.name` reads for submodules.

Private: `_modules`. `named_children()` skips None and duplicates, and cannot replace a submodule.
"""


def makes_parameter() -> bool:
    """Return True if the caller of this function's caller is the constructor of nn.Parameter."""
    # Private: `nn.Parameter.__new__` calls `detach` directly. If it stops doing so, nn.Parameter(sharded parameter) raises
    # RuntimeError, since `detach` then returns another class than the constructor requires.
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def can_assign_data(tensor: Tensor, value: Tensor) -> bool:
    """Return True if `tensor.data = value` is allowed, which depends on their devices."""
    # Private: the test that `Module._apply` itself uses to choose between `.data` and a new parameter.
    return torch._has_compatible_shallow_copy_type(tensor, value)


def allocates(fn: Callable[..., Any]) -> bool:
    """Return True if `fn`, an argument of `Module._apply`, comes from `Module.to_empty`: it allocates, and copies no values."""
    # Private: the name of the lambda in `to_empty`. If it changes, `to_empty` looks like `to`: parameters without values are
    # not recorded, so the check for parameters that nobody initialized does nothing.
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


def extend_trunc_normal(instead: Callable[..., Tensor]) -> Undo:
    """Replace the function inside torch.nn.init.trunc_normal_ by `instead`, which gets that function and its arguments.

    The public function stays the same object, so calls through a name imported earlier are covered, too.
    """
    # Private: `_no_grad_trunc_normal_`, which `trunc_normal_` looks up at each call. If `trunc_normal_` stops calling it, the
    # replacement never runs.
    return extended(torch.nn.init, "_no_grad_trunc_normal_", instead)


def extended(owner: Any, name: str, instead: Callable[..., Any]) -> Undo:
    """Replace a function of a module or class by `instead`, which gets that function and its arguments."""
    inner, is_inherited = getattr(owner, name), name not in vars(owner)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(inner, *args, **kwargs)

    setattr(owner, name, call)
    return lambda: delattr(owner, name) if is_inherited else setattr(owner, name, inner)


def is_in_forward(module: nn.Module, *, outer: bool = False) -> bool:
    """Return True if a call of `module` is on this thread's stack. With `outer`, its innermost call does not count."""
    # Private: every call of a module runs `nn.Module._call_impl` with the module as `self`. If it moves to C or is
    # inlined, this returns False during a forward: the unit looks interrupted and is reset.
    code, frames = nn.Module._call_impl.__code__, traceback.walk_stack(sys._getframe(1))
    found = sum(frame.f_code is code and frame.f_locals.get("self") is module for frame, _ in frames)
    return found > (1 if outer else 0)


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""Base class of all batch norms, which torch does not export."""
