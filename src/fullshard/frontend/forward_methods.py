"""Methods beside forward that gather as forward does: `generate`, `encode`; also the units below that they touch."""

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
from fullshard.errors import StateError
from fullshard.frontend.hooks import ForwardHooks, hook_outputs
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit, own_modules, unit_of
from fullshard.schedule.records import ForwardCall


class LazyGather:
    """The units below a method's own whose parameters it read, without calling them: they run until the method ends."""

    def __init__(self) -> None:
        self._units: list[tuple[Unit, nn.Module]] = []

    def touch(self, unit: Unit, root: nn.Module) -> None:
        """Have the parameters of `unit` full."""
        if not unit.shows_full and not unit.runtime.planner.running.has(unit.number):
            runtime_of(unit).steps.enter_forward(unit, root)
            self._units.append((unit, root))
            for parameter in unit.parameters:
                parameter.note_version()

    def leave(self, *, failed: bool) -> list[tuple[Unit, ForwardCall]]:
        """The method ends: the calls of those that may have a backward, latest first."""
        calls: list[tuple[Unit, ForwardCall]] = []
        while self._units:
            unit, root = self._units.pop()
            for parameter in unit.parameters:
                parameter.adopt_writes()
            call = runtime_of(unit).steps.leave_forward(unit, root, failed=failed)
            if call is not None:
                calls.append((unit, call))
        return sorted(calls, key=lambda pair: -pair[1].end)


class GatheringParameters(MutableMapping[str, Any]):
    """The parameters of a module while a method around it runs: reading one gathers its unit."""

    def __init__(self, held: dict[str, Any], touched: LazyGather, unit: Unit, root: nn.Module) -> None:
        self.held = held
        self._units_in_backward, self._unit, self._root = touched, unit, root

    def __getitem__(self, name: str) -> Any:
        value = self.held[name]
        if value is not None:
            self._units_in_backward.touch(self._unit, self._root)
        return self.held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.held[name] = value

    def __delitem__(self, name: str) -> None:
        del self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.held, memo)

    def __reduce__(self) -> Any:
        return dict, (self.held,)

    def copy(self) -> dict[str, Any]:
        """A plain dict of the parameters as they are: none is gathered."""
        return dict(self.held)

    def __or__(self, other: Any) -> dict[str, Any]:
        return self.held | dict(other)

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other) | self.held

    # Walking over parameters, as `parameters()` does, reads none of them.

    def items(self) -> ItemsView[str, Any]:
        return self.held.items()

    def keys(self) -> KeysView[str]:
        return self.held.keys()

    def values(self) -> ValuesView[Any]:
        return self.held.values()


@contextmanager
def touching(module: nn.Module) -> Iterator[LazyGather]:
    """For the length of a block, reading a parameter of a unit below `module` gathers that unit."""
    touched = LazyGather()
    replaced: list[tuple[nn.Module, Any]] = []
    own = unit_of(module)
    for below in module.modules():
        unit = unit_of(below)
        if unit is None or unit is own:
            continue
        for inner in own_modules(below):
            held = _torch.parameters_of(inner)
            if held and isinstance(held, dict):
                replaced.append((inner, held))
                _torch.replace_parameters(inner, GatheringParameters(held, touched, unit, below))
    try:
        yield touched
    finally:
        for inner, held in replaced:
            _torch.replace_parameters(inner, held)


class Method:
    """A method of a unit's module, with what the unit does around its forward. Copies and pickles with its module."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        own = getattr(method, "__self__", None) is module
        self._module = weakref.ref(module)  # which holds this
        self._method: Callable[..., Any] = method.__func__ if own else method  # type: ignore[attr-defined]
        self._own = own
        update_wrapper(self, method, updated=())
        del self.__wrapped__  # type: ignore[attr-defined]  # it holds the module

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
            raise StateError(f"the registered method '{name}' is no method of its module's class, so it cannot be pickled")
        return _method_again, (module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method between the forward hooks of its unit."""
        module = self._module()
        assert module is not None
        unit = unit_of(module)
        if unit is None:  # plain again
            return self._call(module, *args, **kwargs)
        hooks = ForwardHooks(unit)
        with unit.progress.in_method():
            changed = hooks.before(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
            with touching(module) as touched:
                try:
                    output = self._call(module, *args, **kwargs)
                except BaseException:
                    touched.leave(failed=True)
                    hooks.after(module, args, None)
                    raise
                calls = touched.leave(failed=False)
                output = hooks.after(module, args, output)
            for below, call in calls:
                hook_outputs(below, call, output)
            return output


def _method_again(module: nn.Module, name: str) -> Method:
    return Method(module, getattr(module, name))


def wrap_method(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of `module` with what its unit does around its forward."""
    return method if isinstance(method, Method) else Method(module, method)


__all__ = ["Method", "wrap_method"]
