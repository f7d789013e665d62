"""What rides on graphs: it tells the runtime that a backward reached a unit, and that a backward is over."""

from __future__ import annotations

from collections.abc import Callable

from fullshard import _torch
from fullshard.schedule import Call
from fullshard.unit import Unit


class BackwardHook:
    """Rides on the graph of one call: tells the runtime when its backward begins, and that it never will when it is deleted."""

    __slots__ = ("__weakref__", "_call", "_glimpse", "_reached", "_task", "_unit")

    def __init__(self, unit: Unit, call: Call, *, glimpse: bool = False) -> None:
        self._unit, self._call, self._task, self._reached, self._glimpse = unit, call, -1, False, glimpse
        unit.keeper.planner.expect_backward(call)
        unit.count_graph(1)

    def __call__(self, *_: object) -> None:
        task = _torch.current_graph_task()
        if task != self._task:
            self._task = task
            self._unit.keeper.enter_backward(self._unit, self._call, glimpse=self._glimpse)
            self._forget()

    def __del__(self) -> None:
        self._unit.count_graph(-1)
        self._forget()

    def _forget(self) -> None:
        if not self._reached:
            self._reached = True
            self._unit.keeper.planner.forget(self._call)


class BackwardEnd:
    """The engine's only reference to this object dies with the backward it was queued on, whether that ended or raised."""

    __slots__ = ("__weakref__", "_leave")

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __call__(self) -> None:
        self._leave()


__all__ = ["BackwardEnd", "BackwardHook"]
