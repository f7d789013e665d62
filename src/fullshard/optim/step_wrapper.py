"""`wrap_step`: code around the step of an optimizer's class, for optimizers of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from fullshard.errors import StateError


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


def refuse_copies(optimizer: Optimizer, what: str) -> None:
    """Refuse copies and pickles of `optimizer` with StateError, since torch's copies lack `what`."""

    def refuse(protocol: Any) -> Any:
        raise StateError(
            f"This {type(optimizer).__name__} cannot be copied or pickled: it has {what}, which its copy would lack. Save its "
            "state_dict(), build another one in the same way, and load it there."
        )

    # Both `copy.deepcopy` and `pickle` look for the method in the instance.
    optimizer.__reduce_ex__ = refuse  # type: ignore[assignment, method-assign]


__all__ = ["refuse_copies", "wrap_step"]
