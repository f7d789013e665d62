"""StateError and InternalError, and warnings that are said once."""

from __future__ import annotations

import warnings


class StateError(RuntimeError):
    """A right call at the wrong moment: the text says which call, where, and what to do instead."""


class InternalError(AssertionError):
    """A promise of fullshard itself was broken; please report it with the message."""


_SAID: set[str] = set()


def warn_once(text: str, category: type[Warning] = UserWarning, *, subject: str | None = None) -> None:
    """Warn of `text` once per process. `subject`: stands for the text, where that differs from time to time."""
    if (subject or text) not in _SAID:
        _SAID.add(subject or text)
        warnings.warn(text, category, stacklevel=2)


__all__ = ["InternalError", "StateError", "warn_once"]
