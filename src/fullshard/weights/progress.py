"""What a load or a save tells its caller on the way."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has read or written so far, and those that it will in all."""


def check_progress(progress: object) -> None:
    """Raises ValueError for what cannot be called."""
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be a function (bytes so far, bytes in all), got {progress!r}")


def of_total(progress: Progress | None, total: int) -> Callable[[int], object] | None:
    """Return a function of the bytes so far; None if nobody asks."""
    return None if progress is None else lambda done: progress(done, total)


__all__ = ["Progress", "check_progress", "of_total"]
