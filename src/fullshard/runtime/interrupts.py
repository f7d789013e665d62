"""The guard against interrupts (Ctrl-C between any two lines): a mark, which the next event finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


def marks_interrupts(method: M) -> M:
    """Decorate a method to set `self.recovery.interrupted` if an interrupt cuts it short."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self.recovery.interrupted = True
            raise

    return guarded  # type: ignore[return-value]


def recovers_first(method: M) -> M:
    """Decorate an event to recover first if the previous event was cut short, and to set the mark if this one is."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        recovery = self.recovery
        if recovery.interrupted:
            recovery.start_over()
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            recovery.interrupted = True
            raise

    return guarded  # type: ignore[return-value]


__all__ = ["marks_interrupts", "recovers_first"]
