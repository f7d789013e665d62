"""`wrap_step`: code around the step of an optimizer's class, for optimizers of other libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fullshard.errors import StateError

_VIEW = "_fullshard_view"  # attribute of an optimizer: the name of the function that wrapped its step


def view_of(optimizer: Optimizer) -> str | None:
    """Return the name of the function that wrapped the step of an optimizer; None for one without a view."""
    return optimizer.__dict__.get(_VIEW)


def wrap_step(optimizer: Optimizer, around: Callable[..., Any], *, caller: str) -> None:
    """Let `optimizer.step(...)` call `around(optimizer, step, ...)`, where `step(...)` is that of the optimizer's class.

    torch's step hooks run around both, so hooks see the parameters that the caller sees.

    Raises ValueError, naming the public function `caller`, if the step of this optimizer was replaced already.
    """
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"{caller} cannot wrap the step of this {type(optimizer).__name__}, which was replaced, for example by a "
            f"scheduler. Call {caller} directly after the optimizer is built."
        )

    def wrapped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        step: Any = type(optimizer).step
        # Without torch's wrapper, which would run the hooks once more.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        return around(optimizer, partial(step, optimizer), *args, **kwargs)

    # torch's wrapper, which runs the hooks; and a bound method, which schedulers expect.
    optimizer.step = MethodType(Optimizer.profile_hook_step(wrapped), optimizer)  # type: ignore[method-assign]
    optimizer.__dict__[_VIEW] = caller


def refuse_copies(optimizer: Optimizer, what: str) -> None:
    """Refuse copies and pickles of `optimizer` with StateError, since torch's copies lack `what`."""

    def refuse(protocol: Any) -> Any:
        raise StateError(
            f"This {type(optimizer).__name__} cannot be copied or pickled: it has {what}, which its copy would lack. Save its "
            "state_dict(), build another one in the same way, and load it there."
        )

    # Both `copy.deepcopy` and `pickle` look for the method in the instance.
    optimizer.__reduce_ex__ = refuse  # type: ignore[assignment, method-assign]


_PLAIN = bool, int, float, str, type(None)


class BeforeStep:
    """What an optimizer had before a step: states, groups, plain values and their containers, tensors, unsharded weights."""

    def __init__(self, optimizer: Optimizer, states: dict[Any, Any], plain: list[Tensor]) -> None:
        self._optimizer, self._keys, self._states = optimizer, list(states), copy.deepcopy(list(states.values()))
        self._groups = [
            {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        self._attributes = set(vars(optimizer))
        self._values = {**plain_attributes(optimizer), "state": optimizer.state}
        others = [value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")]
        containers = (value for value in others if isinstance(value, (dict, list, set)) and _is_plain(value))
        self._containers: list[tuple[Any, Any]] = [(value, copy.deepcopy(value)) for value in containers]
        tensors = [value for value in others if isinstance(value, Tensor)]
        self._tensors = [(one, one.detach().clone()) for one in (*plain, *tensors)]

    def restore(self) -> dict[Any, Any]:
        """Restore everything except the values of states, and return these."""
        for group, before in zip(self._optimizer.param_groups, self._groups):
            for key in [key for key in group if key not in before]:
                del group[key]
            for key, value in before.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # the caller may hold this tensor
                else:
                    group[key] = value
        attributes = vars(self._optimizer)
        for key in attributes.keys() - self._attributes:  # such as one that says that the first step was made
            del attributes[key]
        attributes.update(self._values)
        for container, copied in self._containers:  # in place, since others may refer to it
            container.clear()
            container.extend(copied) if isinstance(container, list) else container.update(copied)
        for tensor, values in self._tensors:
            tensor.detach().copy_(values)
        return dict(zip(self._keys, self._states))


def plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain values among the optimizer's attributes, such as counters."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, _PLAIN)}


def _is_plain(value: Any) -> bool:
    """Return True for numbers and texts, and for containers of them."""
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(held) for key, held in value.items())
    if isinstance(value, (list, set, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
