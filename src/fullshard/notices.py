"""Warnings that are said once, however often their cause returns."""

from __future__ import annotations

import warnings

_SAID: set[str] = set()


def say_once(text: str, category: type[Warning] = UserWarning, *, subject: str | None = None) -> None:
    """`subject`: what is said once, if its text differs from time to time."""
    if (subject or text) not in _SAID:
        _SAID.add(subject or text)
        warnings.warn(text, category, stacklevel=2)


__all__ = ["say_once"]
