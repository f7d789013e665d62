"""What the CPU's allocator does while something runs, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def memory_events(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(address, bytes; less than 0 where it is freed) of all that the CPU's allocator does in `run`, in order."""
    watch = AllocationWatch()
    try:
        run()
    finally:
        events = watch.stop()
    return events


def peak_of_new(events: list[tuple[int, int]]) -> int:
    """The largest sum of bytes of those that were allocated meanwhile; what was there before is in no sum.

    >>> peak_of_new([(1, -5), (2, 10), (3, 20), (2, -10), (4, 15)])
    35
    """
    known: set[int] = set()
    level = peak = 0
    for address, nbytes in events:
        if nbytes > 0:
            known.add(address)
        elif address not in known:
            continue
        level += nbytes
        peak = max(peak, level)
    return peak


class AllocationWatch:
    """Notes what the CPU's allocator does, from when it is made until it is stopped."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def stop(self) -> list[tuple[int, int]]:
        """As `memory_events`."""
        self._profiler.stop()
        results: Any = self._profiler.profiler
        found: list[tuple[int, int, int]] = []
        waiting = list(results.kineto_results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting.extend(event.children)
            if event.name == "[memory]":
                found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda one: one[0])]


__all__ = ["AllocationWatch", "memory_events", "peak_of_new"]
