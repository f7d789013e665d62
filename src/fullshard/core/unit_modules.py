"""The modules of one unit: their place in the model, their hooks, their running forwards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from fullshard import _torch

UNIT = "_fullshard_unit"  # the attribute of a module that holds its unit


class UnitModules:
    """The modules that `fully_shard` was called on, and the path from the outermost module to them.

    References to modules are weak, since modules refer to their unit.

    Attributes:
        is_list: True if `fully_shard` was called on several modules.
        hooks: modules and the handles of their hooks.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.is_list = len(modules) > 1
        self._modules = [weakref.ref(module) for module in modules]
        self.hooks: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._path: list[tuple[weakref.ref[nn.Module], str]] = []  # from the outermost module down: parent, name of its child

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the modules that are alive."""
        for ref in self._modules:
            module = ref()
            if module is not None:
                yield module

    @property
    def outermost(self) -> nn.Module | None:
        """The outermost module that the unit ran below, or its own first module; None once it is deleted."""
        if self._path:
            return self._path[0][0]()
        return self._modules[0]()

    def record_path(self, root: nn.Module, path: str) -> None:
        """Store the path of the unit below `root`."""
        self._path = []
        for part in path.split("."):
            self._path.append((weakref.ref(root), part))
            child = _torch.children_of(root)[part]
            assert child is not None
            root = child

    def are_attached(self) -> bool:
        """Return True if the modules are still at their path in the model.

        Whether a module is alive may differ between ranks, since one rank may keep a reference to it; its place in the model
        does not. So the scheduler may depend on this.
        """
        child: nn.Module | None = None
        for ref, part in self._path:
            parent = ref()
            if parent is None or (child is not None and child is not parent):
                return False
            child = _torch.children_of(parent).get(part)
            if child is None:
                return False
        if child is None:
            return True  # the outermost one
        unit = child.__dict__.get(UNIT)
        return unit is not None and unit.place is self

    def add_hook(self, module: nn.Module, handle: Any) -> None:
        """Store the handle of a hook on `module`."""
        self.hooks.append((weakref.ref(module), handle))


class ForwardStart(NamedTuple):
    """The start of the forward of one module."""

    module: int  # id of the module
    clock: int  # the scheduler's clock at the start
    traced: int  # index in `Runtime.trace`, the units that the outermost forward entered and left so far
    handled: BaseException | None  # the exception that the caller was handling


_NOT_STARTED = ForwardStart(0, -1, 0, None)


class ForwardProgress:
    """The running forwards of one unit's modules.

    Attributes:
        stack: running forwards of its modules, outermost first.
        methods: number of running calls of methods that run the unit's forward hooks, as `generate` may.
        moves_inputs: True if the last forward moved its inputs to the device, since it was the outermost one.
        output_has_graph: True if the last forward had an output with a graph; None before the first forward.
        last_order: units that the last forward entered (True) and left, this one included; empty before the first forward.
    """

    __slots__ = ("_remaining", "last_order", "methods", "moves_inputs", "output_has_graph", "stack")

    def __init__(self) -> None:
        self.stack: list[ForwardStart] = []
        self._remaining: set[int] = set()  # ids of the modules of a list that have not run yet
        self.methods = 0
        self.moves_inputs = False
        self.output_has_graph: bool | None = None
        self.last_order: Sequence[tuple[int, bool]] = ()

    def begin(self, module: object, clock: int, traced: int) -> None:
        """Record that a module of the unit begins its forward."""
        self.stack.append(ForwardStart(id(module), clock, traced, sys.exc_info()[1]))

    def has_raised(self, module: object) -> bool:
        """Return True in an exception handler if the exception left the running forward of a module of the unit."""
        failure, key = sys.exc_info()[1], id(module)
        handled = next((began.handled for began in reversed(self.stack) if began.module == key), None)
        return failure is not None and failure is not handled  # or the forward was called in a handler of its caller

    def end(self, module: object) -> ForwardStart:
        """Record that a module of the unit ends its forward, and return its start.

        Forwards that began inside of it and never ended are removed as well: they raised or were interrupted.
        """
        stack, key = self.stack, id(module)
        for at in range(len(stack) - 1, -1, -1):
            if stack[at].module == key:
                began = stack[at]
                del stack[at:]
                return began
        return _NOT_STARTED

    def runs_around(self, module: object) -> bool:
        """Return True if the forward of another module of the unit is running around this one."""
        return any(began.module != id(module) for began in self.stack)

    def begin_list(self, modules: Iterable[object]) -> None:
        """Record that the first module of a list begins its forward.

        The unit's forward ends when every module has run, or with the outermost forward.
        """
        self._remaining = {id(module) for module in modules}

    def is_list_done(self, module: object) -> bool:
        """Record that a module of a list ended its forward, and return True if every module has run."""
        self._remaining.discard(id(module))
        return not self._remaining

    def clear(self) -> None:
        """Remove all running forwards, after an interrupt or an exception."""
        self.stack.clear()
