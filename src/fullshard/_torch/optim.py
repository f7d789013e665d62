"""Optimizers and gradient clipping."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import _muon
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fullshard._torch.nn import Undo, extended


def register_first_step_post_hook(hook: Callable[..., None]) -> RemovableHandle:
    """Call `hook` (optimizer, args, kwargs) after any optimizer's step and its own hooks, before all other global hooks."""
    handle = register_optimizer_step_post_hook(hook)
    # Private: `hooks_dict_ref`, the weak reference of the handle to the table of hooks, whose order is that of the calls.
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)  # type: ignore[union-attr]
    return handle


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Orthogonalize a matrix as torch's Muon does. The result is bfloat16; a bfloat16 argument may be overwritten."""
    # Private, here and in the next three functions: what torch's Muon calls for each parameter. Calling the same functions
    # keeps steps equal to torch's, bit for bit, in every version.
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)


def step_muon(lists: tuple[list[Tensor], ...], options: dict[str, Any], *, has_complex: bool) -> None:
    """Compute a step of torch's Muon over (parameters, gradients, momentum buffers), with the options of a group."""
    names = "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"
    _muon.muon(*lists, **{name: options[name] for name in names}, has_complex=has_complex)


def adjusted_lr(lr: float, how: str | None, shape: torch.Size) -> float:
    """Return the learning rate of torch's Muon for a matrix of this unsharded shape. `how`: its option `adjust_lr_fn`."""
    return _muon._adjust_lr(lr, how, shape)


def scalar_of(value: Any) -> Any:
    """Return an option of an optimizer as torch reads it: a tensor of one element as a tensor of no dims."""
    return _muon._to_scalar(value)  # type: ignore[attr-defined]


_FIRST = -1  # key of our hook; torch's keys start at 0


def list_tensors(optimizer: Optimizer, group: dict[str, Any], *lists: list[Any]) -> Any:
    """List the tensors of a step (parameters, gradients, states) as the class of the optimizer does."""
    # Private: `_init_group`, the method in which each optimizer of torch collects the tensors of a step.
    return type(optimizer)._init_group(optimizer, group, *lists)  # type: ignore[attr-defined]


def steps_as(optimizer: Optimizer, cls: type[Optimizer]) -> bool:
    """Return True if the optimizer inherits `step` of a class of torch, and the function that lists the tensors of a step."""
    own: Any = type(optimizer)
    if not issubclass(own, cls) or own._init_group is not cls._init_group:  # type: ignore[attr-defined]
        return False
    return inspect.unwrap(own.step) is inspect.unwrap(cls.step)  # torch wraps `step` when the first instance is made


def have_listed_by(optimizer: Optimizer, how: Callable[..., Any], after: Callable[..., None]) -> None:
    """Let `how` list the tensors of this optimizer's steps, and call `after` at their end, before the caller's hooks."""
    # Private: an attribute of the instance hides the method `_init_group` of its class. If `step` stops calling `_init_group`,
    # steps compute with DTensors again: the same values, more slowly.
    # Private: `_optimizer_step_post_hooks`. The public registration appends, but the caller's hooks must find the states as
    # DTensors, so `after` has to be first.
    optimizer.__dict__["_init_group"] = how
    optimizer._optimizer_step_post_hooks[_FIRST] = after
    optimizer._optimizer_step_post_hooks.move_to_end(_FIRST, last=False)  # type: ignore[attr-defined]


def have_listed_by_itself(optimizer: Optimizer) -> None:
    """Undo `have_listed_by`."""
    optimizer.__dict__.pop("_init_group", None)
    optimizer._optimizer_step_post_hooks.pop(_FIRST, None)


def step_may_be_compiled() -> bool:
    """Return True in a hook of an optimizer's step that is called from a compiled function, or is one itself."""
    # Private: the function around `step` that runs the hooks, and dynamo's file on the stack below it. If one of them moves,
    # this returns False, and dynamo raises in compiled steps.
    inside = True
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        inside = inside and frame.f_code is not _AROUND_STEP
        if not inside and frame.f_code.co_filename == _DYNAMO:
            return True
    return False


_AROUND_STEP: CodeType = Optimizer.profile_hook_step(lambda *_: None).__code__
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")


def full_state_dict_is_requested() -> bool:
    """Return True in a hook of an optimizer's state dict that `get_optimizer_state_dict` takes to gather all of its tensors."""
    # Private: the function that takes the state dict, and its variable `info`. If it is renamed, this raises AttributeError, if
    # the variable is, KeyError.
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = None if module is None else inspect.unwrap(module._get_optim_state_dict).__code__
    frame = next((frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if frame.f_code is code), None)
    return frame is not None and bool(frame.f_locals["info"].full_state_dict)


def run_optimizer_uncompiled() -> NoReturn:
    """Run the step of an optimizer uncompiled. Call this in `_init_group`, while dynamo traces the step."""
    # Private: this exception. Without it dynamo calls `_init_group` once, and compiles the lists of that call into the step. If
    # it gets another name, this raises ImportError.
    from torch._dynamo.variables.optimizer import ArgMappingException

    raise ArgMappingException


def extend_unscaling(instead: Callable[..., Any]) -> Undo:
    """Let `instead` find infinities in the gradients of an optimizer for torch.amp.GradScaler.

    It gets torch's own method and its arguments, the scaler among them.
    """
    # Private: `_unscale_grads_`, which `unscale_` and `step` of the scaler call. If they stop doing so, `instead` never runs,
    # and ranks decide by the mesh of the first gradient.
    return extended(torch.amp.GradScaler, "_unscale_grads_", instead)
