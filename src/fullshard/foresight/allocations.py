"""Allocations and frees of the CPU's allocator during a call, from torch's profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of_new(events: list[tuple[int, int]]) -> int:
    """Return the peak of the bytes allocated during `events`. Frees of earlier allocations are ignored.

    >>> peak_of_new([(1, -5), (2, 10), (3, 20), (2, -10), (4, 15)])
    35
    """
    allocated_here: set[int] = set()
    level = peak = 0
    for address, nbytes in events:
        if nbytes > 0:
            allocated_here.add(address)
        elif address not in allocated_here:
            continue
        level += nbytes
        peak = max(peak, level)
    return peak


class AllocationWatch:
    """Recorder of the CPU's allocations and frees, from its construction until `stop`."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def stop(self) -> list[tuple[int, int]]:
        """Stop recording. Return the allocations and frees in order: (address, bytes), negative for a free."""
        self._profiler.stop()
        # The profiler's list of events has no addresses; its event tree has them.
        results: Any = self._profiler.profiler
        timed: list[tuple[int, int, int]] = []  # (time, address, bytes)
        pending = list(results.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            if event.name == "[memory]":
                timed.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        return [(address, nbytes) for _, address, nbytes in sorted(timed, key=lambda one: one[0])]


__all__ = ["AllocationWatch", "peak_of_new"]
