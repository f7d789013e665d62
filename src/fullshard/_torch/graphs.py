"""Graphs of a device, which hold a captured program and run it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


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


def new_graph(device: torch.device) -> Any:
    """Return an empty graph."""
    module = torch.get_device_module(device)
    return (module.CUDAGraph if device.type == "cuda" else module.Graph)()


def capturing_into(graph: Any, device: torch.device, **options: Any) -> Any:
    """Return a context manager that captures its block, as torch.cuda.graph does with these options."""
    return torch.get_device_module(device).graph(graph, **options)


def follow_graphs(events: GraphEvents) -> Callable[[], None]:
    """Report all captures and replays to `events`, by methods of torch's classes of graphs. Return what restores these."""
    found = torch.accelerator.current_accelerator(check_available=True)
    module = None if found is None or found.type == "cuda" else torch.get_device_module(found)
    classes = [torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None), getattr(module, "Graph", None)]
    undo = [_follow(cls, events) for cls in classes if cls is not None]

    def restore() -> None:
        for one in reversed(undo):
            one()

    return restore


def _follow(cls: Any, events: GraphEvents) -> Callable[[], None]:
    begin, end, replay = cls.capture_begin, cls.capture_end, cls.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        events.begin(self)
        begin(self, *args, **kwargs)

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            try:
                events.finish(self)
            finally:
                end(self)
        except BaseException as failure:
            events.end(self, failure)
            raise
        events.end(self, None)

    @functools.wraps(replay)
    def run(self: Any) -> None:
        events.replay(self, functools.partial(replay, self))

    methods = {"capture_begin": capture_begin, "capture_end": capture_end, "replay": run}
    before = {name: cls.__dict__.get(name) for name in methods}  # None for an inherited one
    for name, method in methods.items():
        setattr(cls, name, method)

    def restore() -> None:
        for name, method in before.items():
            if method is None:
                delattr(cls, name)
            else:
                setattr(cls, name, method)

    return restore
