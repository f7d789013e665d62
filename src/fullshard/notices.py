"""Warnings that are said once, however often their cause returns."""

from __future__ import annotations

import warnings

_SAID: set[str] = set()


def say_once(text: str, category: type[Warning] = UserWarning) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, category, stacklevel=2)


def forget_said() -> None:
    """Say everything once more."""
    _SAID.clear()


__all__ = ["forget_said", "say_once"]
