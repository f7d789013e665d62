"""Registered forward methods such as `generate` and `encode`: they unshard their unit, and units below on first read."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from contextlib import contextmanager
from functools import update_wrapper
from types import MethodType
from typing import Any

from torch import nn

from fullshard import _torch
from fullshard.core.hooks import ForwardHooks, hook_outputs
from fullshard.core.scheduler import ForwardCall
from fullshard.core.unit import Unit
from fullshard.core.unit_modules import own_modules, unit_of
from fullshard.errors import StateError


def adopt_writes(unit: Unit) -> None:
    """Copy a method's writes to unsharded parameters of `unit` into the shards."""
    for group in unit.groups:
        for parameter in group.written():
            parameter.adopt_write()
        group.see_unsharded()


class LazyUnshard:
    """Units below the unit of a running method that were unsharded because the method read their parameters directly.

    Each of them runs a forward from the first read of a parameter until the method ends.
    """

    def __init__(self) -> None:
        self._units: list[tuple[Unit, nn.Module]] = []

    def unshard(self, unit: Unit, root: nn.Module) -> None:
        """Unshard `unit`, unless it is unsharded or running already."""
        if not unit.shows_full and not unit.runtime.scheduler.is_running(unit.number):
            unit.pre_forward(root)
            self._units.append((unit, root))

    def leave(self, *, failed: bool) -> list[tuple[Unit, ForwardCall]]:
        """End the forwards of these units, and return their calls that may have a backward, latest first.

        If the method `failed`, its writes to parameters are dropped. If this raises, call it again with `failed`.
        """
        calls: list[tuple[Unit, ForwardCall]] = []
        while self._units:
            unit, root = self._units[-1]
            if not failed:
                adopt_writes(unit)
            self._units.pop()
            call = unit.post_forward(root, failed=failed)
            if call is not None:
                calls.append((unit, call))
        return sorted(calls, key=lambda pair: -pair[1].end)


class LazyUnshardParameters(MutableMapping[str, Any]):
    """Stand-in for `module._parameters` while a method runs: the first read of a parameter unshards its unit."""

    def __init__(self, parameters: dict[str, Any], lazy: LazyUnshard, unit: Unit, root: nn.Module) -> None:
        self.parameters = parameters
        self._lazy, self._unit, self._root = lazy, unit, root

    def __getitem__(self, name: str) -> Any:
        value = self.parameters[name]
        if value is not None:
            self._lazy.unshard(self._unit, self._root)
        return self.parameters[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.parameters[name] = value

    def __delitem__(self, name: str) -> None:
        del self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.parameters, memo)

    def __reduce__(self) -> Any:
        return dict, (self.parameters,)

    def copy(self) -> dict[str, Any]:
        """Return a plain dict of the parameters, without unsharding them."""
        return dict(self.parameters)

    def __or__(self, other: Any) -> dict[str, Any]:
        return self.parameters | dict(other)

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other) | self.parameters

    # Iteration, as in `module.parameters()`, must not unshard: a method may list the parameters of the whole model.

    def items(self) -> ItemsView[str, Any]:
        return self.parameters.items()

    def keys(self) -> KeysView[str]:
        return self.parameters.keys()

    def values(self) -> ValuesView[Any]:
        return self.parameters.values()


@contextmanager
def unshard_on_read(module: nn.Module) -> Iterator[LazyUnshard]:
    """Unshard units below `module` when one of their parameters is read inside the block."""
    lazy = LazyUnshard()
    replaced: list[tuple[nn.Module, Any]] = []
    own = unit_of(module)
    for below in module.modules():
        unit = unit_of(below)
        if unit is None or unit is own:
            continue
        for inner in own_modules(below):
            parameters = _torch.parameters_of(inner)
            if parameters and isinstance(parameters, dict):
                replaced.append((inner, parameters))
                _torch.replace_parameters(inner, LazyUnshardParameters(parameters, lazy, unit, below))
    try:
        yield lazy
    finally:
        for inner, parameters in replaced:
            _torch.replace_parameters(inner, parameters)


class Method:
    """Registered forward method of a unit's module, which runs the unit's forward hooks around each call.

    It is stored on the module, and is copied and pickled with it.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        own = getattr(method, "__self__", None) is module
        self._module = weakref.ref(module)  # weak, since the module holds this object
        self._method: Callable[..., Any] = method.__func__ if own else method  # type: ignore[attr-defined]
        self._own = own
        update_wrapper(self, method, updated=())
        del self.__wrapped__  # type: ignore[attr-defined]  # a strong reference to the module

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._method(module, *args, **kwargs) if self._own else self._method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        return Method(memo[id(self._module())], self._bound(memo))

    def _bound(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return MethodType(self._method, memo[id(self._module())]) if self._own else copy.deepcopy(self._method, memo)

    def __reduce__(self) -> Any:
        module = self._module()
        name = getattr(self._method, "__name__", "")
        if not self._own or getattr(type(module), name, None) is not self._method:
            raise StateError(f"The registered method '{name}' cannot be pickled: it is not a method of its module's class.")
        return _rebuild_method, (module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method between the forward hooks of its unit."""
        module = self._module()
        assert module is not None
        unit = unit_of(module)
        if unit is None:  # undo() was called since the registration
            return self._call(module, *args, **kwargs)
        hooks = ForwardHooks(unit)
        with unit.progress.in_method():
            try:
                changed = hooks.before(module, args, kwargs)
            except BaseException:
                hooks.after(module, args, None)
                raise
            args, kwargs = (args, kwargs) if changed is None else changed
            with unshard_on_read(module) as lazy:
                try:
                    output = self._call(module, *args, **kwargs)
                    calls = lazy.leave(failed=False)
                    if not unit.record.is_pinned:  # else reshard() looks for writes
                        adopt_writes(unit)
                except BaseException:
                    lazy.leave(failed=True)
                    hooks.after(module, args, None)
                    raise
                output = hooks.after(module, args, output)
            for below, call in calls:
                hook_outputs(below, call, output)
            return output


def _rebuild_method(module: nn.Module, name: str) -> Method:
    return Method(module, getattr(module, name))


def wrap_method(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of `module`, wrapped to run the forward hooks of its unit."""
    return method if isinstance(method, Method) else Method(module, method)


__all__ = ["Method", "wrap_method"]
