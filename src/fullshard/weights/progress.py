"""Progress callbacks of loads and saves."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has read or written so far, and the total bytes that it will read or write."""


def check_progress(progress: object) -> None:
    """Raise ValueError unless `progress` is None or callable."""
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be a function (bytes so far, bytes in all), got {progress!r}")


def with_total(progress: Progress | None, total: int) -> Callable[[int], object] | None:
    """Return a callback that takes only the bytes so far; None if there is no `progress`."""
    return None if progress is None else lambda done: progress(done, total)
