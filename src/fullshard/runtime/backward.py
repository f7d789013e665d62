"""What rides on graphs: it tells the runtime that a backward reached a unit, and that a backward is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fullshard import _torch
from fullshard.runtime.unit import Unit
from fullshard.schedule.order import ForwardCall

_CHAIN = "fullshard"  # in the metadata of a node


class BackwardHook:
    """Rides on the graph of one call: tells the runtime when its backward begins, and that it never will when it is deleted."""

    __slots__ = ("__weakref__", "_call", "_copied_use", "_reached", "_task", "_unit")

    def __init__(self, unit: Unit, call: ForwardCall, *, copied_use: bool = False) -> None:
        self._unit, self._call, self._task, self._reached, self._copied_use = unit, call, -1, False, copied_use
        unit.runtime.planner.expect_backward(call)
        unit.count_graph(1)

    def __call__(self, *_: object) -> None:
        task = _torch.current_graph_task()
        if task != self._task:
            runtime = self._unit.runtime
            try:
                self._task = task
                runtime.enter_backward(self._unit, self._call, copied_use=self._copied_use)
                self._forget()
            except Exception:
                raise
            except BaseException:
                runtime.interrupted = True
                raise

    def __del__(self) -> None:
        self._unit.count_graph(-1)
        self._forget()

    def _forget(self) -> None:
        if not self._reached:
            self._reached = True
            self._unit.runtime.planner.graph_released(self._call)


class NodeHooks:
    """What rides on one node of a graph, outermost call first: as if each unit returned a tensor of its own."""

    __slots__ = ("__weakref__", "_hooks")

    def __init__(self) -> None:
        self._hooks: list[BackwardHook] = []

    @staticmethod
    def on(node: Any) -> NodeHooks:
        """The chain of a node, which is made if there is none."""
        found: NodeHooks | None = node.metadata.get(_CHAIN)
        if found is None:
            found = node.metadata[_CHAIN] = NodeHooks()
            node.register_prehook(found)
        return found

    def add(self, hook: BackwardHook) -> None:
        """`hook` is of a call that ended later than those that are on it."""
        if hook not in self._hooks:
            self._hooks.append(hook)

    def __call__(self, *grads: object) -> None:
        for hook in reversed(self._hooks):
            hook(*grads)


class FinalCallback:
    """The engine's only reference to this object dies with the backward it was queued on, whether that ended or raised."""

    __slots__ = ("__weakref__", "_leave")

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __call__(self) -> None:
        self._leave()


__all__ = ["BackwardHook", "FinalCallback", "NodeHooks"]
