"""Registered forward methods such as `generate` and `encode`, which unshard their unit as its forward does."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

from torch import nn

from fullshard.core import ForwardHooks, unit_of
from fullshard.errors import StateError


class Method:
    """Registered forward method, which runs the unit's forward hooks around each call. Copied and pickled with its module."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        own = getattr(method, "__self__", None) is module
        self._module = weakref.ref(module)  # weak, since the module holds this object
        self._method: Callable[..., Any] = method.__func__ if own else method  # type: ignore[attr-defined]
        self._own = own
        update_wrapper(self, method, updated=())
        del self.__wrapped__  # type: ignore[attr-defined]  # a strong reference to the module

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        module = memo[id(self._module())]
        return Method(module, MethodType(self._method, module) if self._own else copy.deepcopy(self._method, memo))

    def __reduce__(self) -> Any:
        module = self._module()
        name = getattr(self._method, "__name__", "")
        if not self._own or getattr(type(module), name, None) is not self._method:
            raise StateError(f"The registered method '{name}' cannot be pickled: it is not a method of its module's class.")
        return Method, (module, MethodType(self._method, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method between the forward hooks of its unit."""
        module = self._module()
        assert module is not None
        unit, method = unit_of(module), MethodType(self._method, module) if self._own else self._method
        if unit is None:  # undo() was called since the registration
            return method(*args, **kwargs)
        hooks = ForwardHooks(unit)
        unit.methods += 1
        try:
            changed = hooks.before(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
            output = method(*args, **kwargs)
        except BaseException:
            hooks.after(module, args, None)
            raise
        else:
            return hooks.after(module, args, output)
        finally:
            unit.methods -= 1


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Register `module.method_name` as a forward method: it unshards the unit before and reshards it after each call.

    Examples are `generate` and `encode`. Units below are unsharded when their modules are called: to read their parameters
    directly, as in a chunked loss, use `gathered()`. Does nothing for a module that is not sharded.

    Args:
        module: a module that `fully_shard` was called on.
        method_name: the name of a callable attribute of `module`.

    Raises:
        ValueError: if there is no such method, or if it is a generator or coroutine, whose body runs after the call returned.

    Example:
        >>> register_fsdp_forward_method(model, "generate")                                   # doctest: +SKIP

    Source: `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method '{method_name}' to register.")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(
            f"{type(module).__name__}.{method_name} cannot be registered: it is a generator or coroutine, whose body runs "
            "after the call has returned. Call it inside `with model.resident():` instead."
        )
    if not isinstance(method, Method):
        setattr(module, method_name, Method(module, method))
