"""Graphs of a device, which hold a captured program and run it again."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fullshard._torch.nn import Undo, extended


class GraphEvents(Protocol):
    """What happens to graphs of a device, called on the thread that captures or replays them."""

    def begin(self, graph: Any) -> None:
        """A capture is about to begin. What this runs is not captured."""

    def finish(self, graph: Any) -> None:
        """A capture is about to end. What this runs is captured."""

    def end(self, graph: Any, failure: BaseException | None) -> None:
        """A capture has ended: by `failure`, or with a graph that can run."""

    def replay(self, graph: Any, run: Callable[[], None]) -> None:
        """A graph is to run, which `run()` does."""


@functools.cache
def followed_graph(device_type: str, events: GraphEvents) -> Any:
    """Return a subclass of torch's class of graphs, whose captures and replays are reported to `events`."""
    module = torch.get_device_module(device_type)
    kind = type("Graph", (module.CUDAGraph if device_type == "cuda" else module.Graph,), {})
    _follow(kind, events)
    return kind


def follow_graphs(events: GraphEvents) -> Undo:
    """Report all captures and replays to `events`: replace methods of torch's classes of graphs. Return what restores them."""
    found = torch.accelerator.current_accelerator(check_available=True)
    module = None if found is None or found.type == "cuda" else torch.get_device_module(found)
    classes = [torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None), getattr(module, "Graph", None)]
    undo = [one for kind in classes if kind is not None for one in _follow(kind, events)]

    def restore() -> None:
        for one in reversed(undo):
            one()

    return restore


def _follow(kind: Any, events: GraphEvents) -> list[Undo]:
    """Replace the methods of a class of graphs that capture and replay."""
    # By graph: the exception that its program handled when the capture began.
    handled: weakref.WeakKeyDictionary[Any, BaseException | None] = weakref.WeakKeyDictionary()

    def begin(inner: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
        handled[graph] = sys.exc_info()[1]
        try:
            events.begin(graph)
            inner(graph, *args, **kwargs)
        except BaseException as failure:
            handled.pop(graph, None)
            events.end(graph, failure)
            raise

    def end(inner: Callable[..., None], graph: Any) -> None:
        raised = sys.exc_info()[1]  # torch.cuda.graph ends the capture of a block that raised in the same way
        if handled.pop(graph, None) is raised:
            raised = None
        try:
            try:
                events.finish(graph)
            finally:
                inner(graph)
        except BaseException as failure:
            events.end(graph, failure)
            raise
        events.end(graph, raised)

    def replay(inner: Callable[..., None], graph: Any) -> None:
        events.replay(graph, functools.partial(inner, graph))

    return [
        extended(kind, name, method) for name, method in (("capture_begin", begin), ("capture_end", end), ("replay", replay))
    ]
