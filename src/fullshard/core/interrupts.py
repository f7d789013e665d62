"""The guard against interrupts (Ctrl-C between any two lines): a mark, which the next event finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


def recovers_first(method: M) -> M:
    """Decorate an event to recover first if the previous event was cut short, and to set the mark if this one is."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        recovery = self.recovery
        if recovery.interrupted:
            recovery.start_over()
        try:
            return method(self, *args, **kwargs)
        except BaseException as failure:
            recovery.note_interrupt(failure)
            raise

    return guarded  # type: ignore[return-value]


__all__ = ["recovers_first"]
