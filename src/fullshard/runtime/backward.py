"""Hooks on graphs, which tell the runtime that a backward reached a unit, and the backward that is under way."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.runtime.interrupts import marks_interrupts
from fullshard.runtime.unit import InterruptMark, Unit
from fullshard.schedule.records import ForwardCall

_CHAIN = "fullshard"  # in the metadata of a node
PATIENCE = 10.0  # seconds that a thread of the engine may take to drop a backward that raised


class BackwardHook:
    """Rides on the graph of one call: tells the runtime when its backward begins, and that it never will when it is deleted."""

    __slots__ = ("__weakref__", "_call", "_copied_use", "_reached", "_task", "_unit")

    def __init__(self, unit: Unit, call: ForwardCall, *, copied_use: bool = False) -> None:
        self._unit, self._call, self._task, self._reached, self._copied_use = unit, call, -1, False, copied_use
        unit.runtime.planner.expect_backward(call)
        unit.progress.live_graphs += 1

    @property
    def recovery(self) -> InterruptMark:
        """Where an interrupt is noted."""
        return self._unit.runtime.recovery

    @marks_interrupts
    def __call__(self, *_: object) -> None:
        """Run before the first node of the call's backward, once in each backward."""
        task = _torch.current_graph_task()
        if task != self._task:
            self._task = task
            self._unit.runtime.enter_backward(self._unit, self._call, copied_use=self._copied_use)
            self._forget()

    def __del__(self) -> None:
        self._unit.progress.live_graphs -= 1
        self._forget()

    def _forget(self) -> None:
        """The graph needs the unit no longer."""
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
        """The hooks of a node, which are made if there are none."""
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
        """Run before the node."""
        for hook in reversed(self._hooks):
            hook(*grads)


class RunningBackward:
    """The outermost backward that touched a unit.

    The engine holds the only reference to its `FinalCallback`. If that dies without having run, the backward raised.

    On an accelerator the engine runs nodes on threads of its own, and one of them may hold that reference for a moment after
    the caller has the exception: `has_raised` waits for it.

    Attributes:
        underway: whether a backward has begun that did not end, though it may have raised.
        raised: whether it is known that it will never end.
        units: the units that it entered.
    """

    def __init__(self, on_raised: Callable[[], None]) -> None:
        """`on_raised`: called as soon as the backward raised; nothing may be sent there."""
        self._on_raised = on_raised
        self._end: weakref.ref[FinalCallback] | None = None
        self.underway = self.raised = False
        self.units: dict[int, Unit] = {}

    def begin(self, leave: Callable[[], None]) -> None:
        """A backward begins; the engine calls `leave` when it ends."""
        end = FinalCallback(leave)
        self._end = weakref.ref(end, self.mark_raised)
        self.underway, self.raised = True, False
        _torch.on_backward_end(end)

    def has_raised(self) -> bool:
        """Return whether it raised, once the engine has dropped it.

        Raises StateError if it still runs after `PATIENCE` seconds, on another thread.
        """
        if self.underway and not self.raised and _torch.current_graph_task() == -1:
            limit = time.monotonic() + PATIENCE
            while not self.raised:
                if time.monotonic() > limit:
                    names = ", ".join(f"'{unit.name}'" for unit in self.units.values())
                    raise StateError(
                        f"a unit was used while a backward of another thread runs, which has reached {names}: use the units of "
                        "a device from one thread at a time, and begin a forward when backward() has returned"
                    )
                time.sleep(1e-4)  # which lets the thread that holds the callback run
        return self.raised

    def mark_raised(self, _: object = None) -> None:
        """The backward, or its end, raised."""
        self._end = None  # an exception keeps the caller's frame alive, and with it the callback
        try:
            self._on_raised()
        finally:
            self.raised = True  # last: another thread may wait for it

    def stop(self) -> None:
        """It is over; the units that it entered are still known."""
        self._end = None  # without the reference its callback is not called
        self.underway = self.raised = False


class FinalCallback:
    """The engine's only reference to this object dies with the backward it was queued on, whether that ended or raised."""

    __slots__ = ("__weakref__", "_leave")

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __call__(self) -> None:
        self._leave()


__all__ = ["BackwardHook", "NodeHooks", "RunningBackward"]
