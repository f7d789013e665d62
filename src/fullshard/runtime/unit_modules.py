"""The modules of one unit: where they are in the model, their hooks, and which of them run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fullshard import _torch

UNIT = "_fullshard_unit"  # the attribute of a module that holds its unit


class UnitModules:
    """The modules that `fully_shard` was called on (weakly, since they hold the unit), and the path that leads to them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.is_list = len(modules) > 1
        self._modules = [weakref.ref(module) for module in modules]
        self._hooks: list[tuple[weakref.ref[nn.Module], Any]] = []  # handles of the hooks, and the modules that have them
        self._path: list[tuple[weakref.ref[nn.Module], str]] = []  # from the outermost module down: parent, name of the child

    def __iter__(self) -> Iterator[nn.Module]:
        """The modules that are alive."""
        for ref in self._modules:
            module = ref()
            if module is not None:
                yield module

    @property
    def tree(self) -> nn.Module | None:
        """The outermost module that the unit ran below so far, or its own; None once that is deleted."""
        if self._path:
            return self._path[0][0]()
        return self._modules[0]()

    def record_path(self, root: nn.Module, path: str) -> None:
        """Remember that the unit is at this path below `root`."""
        self._path = []
        for part in path.split("."):
            self._path.append((weakref.ref(root), part))
            child = _torch.children_of(root)[part]
            assert child is not None
            root = child

    def are_attached(self, unit: object) -> bool:
        """Whether the modules of `unit`, which are these, are where they were in the model, as far as is known.

        Unlike the life of a module, that is alike on all ranks.
        """
        path = self._path
        last = len(path) - 1
        for index, (ref, part) in enumerate(path):
            parent = ref()
            child = None if parent is None else _torch.children_of(parent).get(part)
            if child is None or (child.__dict__.get(UNIT) is not unit if index == last else child is not path[index + 1][0]()):
                return False
        return True

    def add_hook(self, module: nn.Module, handle: Any) -> None:
        """Remember a hook that was put on `module`."""
        self._hooks.append((weakref.ref(module), handle))

    @property
    def hooks(self) -> list[tuple[weakref.ref[nn.Module], Any]]:
        """Modules and the handles of their hooks."""
        return self._hooks

    def take_hooks(self) -> list[tuple[weakref.ref[nn.Module], Any]]:
        """The same, which are forgotten here."""
        handles, self._hooks = self._hooks, []
        return handles


@dataclass(slots=True)
class CallsPerRun:
    """How often the modules of a unit of several run within one outermost forward, and did in the one before.

    >>> calls = CallsPerRun()
    >>> [calls.is_last(1), calls.is_last(1), calls.is_last(1)]
    [True, True, True]
    >>> [calls.is_last(2), calls.is_last(2), calls.is_last(2)]
    [False, False, True]
    """

    run: int = -1
    now: int = 0
    before: int = 0

    def is_last(self, run: int) -> bool:
        """Note a call within `run`; whether the run before had no more."""
        if run != self.run:
            self.run, self.now, self.before = run, 0, self.now
        self.now += 1
        return self.now >= self.before


class Began(NamedTuple):
    """The beginning of a forward of one module: its id, the planner's time, and the place in the runtime's trace."""

    module: int
    clock: int
    traced: int


_NEVER = Began(0, -1, 0)


class ForwardProgress:
    """The forwards of one unit's modules.

    Attributes:
        methods: calls of registered methods (`generate`) that are under way.
        live_graphs: graphs with an output of the unit that exist on this rank, whether or not their backward has been.
        output_has_graph: whether the last forward had an output with a graph; None before it.
        last_order: units that the last forward entered (True) and left, itself included; empty before it.
    """

    __slots__ = ("_calls", "_remaining", "_stack", "last_order", "live_graphs", "methods", "output_has_graph")

    def __init__(self) -> None:
        self._stack: list[Began] = []  # modules whose forward is under way, outermost first
        self._remaining: set[int] = set()  # modules (by id) of a list that have yet to run
        self._calls = CallsPerRun()
        self.methods = 0
        self.live_graphs = 0
        self.output_has_graph: bool | None = None
        self.last_order: Sequence[tuple[int, bool]] = ()

    def begin(self, module: object, clock: int, traced: int) -> None:
        """A module of the unit begins its forward."""
        self._stack.append(Began(id(module), clock, traced))

    def end(self, module: object) -> Began:
        """A module of the unit ends its forward; when that began. What began inside and never ended goes with it."""
        stack, key = self._stack, id(module)
        for at in range(len(stack) - 1, -1, -1):
            if stack[at].module == key:
                began = stack[at]
                del stack[at:]
                return began
        return _NEVER

    def runs_around(self, module: object) -> bool:
        """Whether another module of the unit runs around this one."""
        return any(began.module != id(module) for began in self._stack)

    def begin_list(self, modules: Iterable[object]) -> None:
        """The first module of a list begins its forward; the unit's forward ends when every module has run."""
        self._remaining = {id(module) for module in modules}

    def is_list_done(self, module: object, run: int) -> bool:
        """A module of a list ended its forward; whether that ends the unit's.

        Of a module that is called once per chunk, the unit's forward lasts as many calls as in the last run (an outermost
        forward).
        """
        self._remaining.discard(id(module))
        return self._calls.is_last(run) and not self._remaining

    @contextmanager
    def in_method(self) -> Iterator[None]:
        """A method that was registered beside forward is on the stack."""
        self.methods += 1
        try:
            yield
        finally:
            self.methods -= 1

    def clear(self) -> None:
        """All forwards were interrupted."""
        self._stack.clear()

    def forget_calls(self) -> None:
        """As if no module had run yet."""
        self._calls = CallsPerRun()


__all__ = ["UNIT", "Began", "CallsPerRun", "ForwardProgress", "UnitModules"]
