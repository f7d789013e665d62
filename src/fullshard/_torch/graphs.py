"""Graphs of a device, which hold a captured program and run it again."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fullshard._torch.nn import Undo, extended

_METHODS = ("capture_begin", "capture_end", "replay")


@functools.cache
def followed_graph(device_type: str, follower: Any) -> Any:
    """Return a subclass of torch's class of graphs that a follower wraps.

    Args:
        device_type: the accelerator's.
        follower: has the methods `capture_begin`, `capture_end` and `replay`, which get torch's method, then the graph and the
            other arguments.
    """
    module = torch.get_device_module(device_type)
    kind = type("Graph", (module.CUDAGraph if device_type == "cuda" else module.Graph,), {})
    for name in _METHODS:
        extended(kind, name, getattr(follower, name))
    return kind


def follow_graphs(follower: Any) -> Undo:
    """Wrap torch's own classes of graphs by a follower (`followed_graph`). Return what restores them."""
    found = torch.accelerator.current_accelerator(check_available=True)
    module = None if found is None or found.type == "cuda" else torch.get_device_module(found)
    classes = [torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None), getattr(module, "Graph", None)]
    undo = [extended(kind, name, getattr(follower, name)) for kind in classes if kind is not None for name in _METHODS]

    def restore() -> None:
        for one in reversed(undo):
            one()

    return restore
