"""StateError and InternalError, common checks, printable texts, and warnings that are issued once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch


class StateError(RuntimeError):
    """A valid call at the wrong moment. The text names the call, the place and the remedy."""


class InternalError(AssertionError):
    """A bug in fullshard: an internal invariant does not hold. Please report it with the message."""


def check_int(name: str, value: object, *, least: int = 1, otherwise: str = "") -> int:
    """Return `value`, or raise ValueError unless it is an int of at least `least`. `otherwise`: other legal values, as text."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}{otherwise}, got {value!r}.")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return the truth of a bool, a number, or an array or tensor of one element; raise ValueError for None, "no" and the like.

    name: name of the parameter.
    """
    item = getattr(value, "item", None)  # of numpy's scalars, arrays and tensors
    try:
        number = value if item is None else item()
    except (RuntimeError, ValueError):  # of several elements
        number = None
    if not isinstance(number, (bool, int, float)):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return bool(number)


def check_float_dtype(name: str, value: object, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is a floating-point dtype, or None if that is legal. `name`: name of the parameter."""
    if not (isinstance(value, torch.dtype) and value.is_floating_point) and not (optional and value is None):
        raise ValueError(f"{name} must be a floating-point torch.dtype{' or None' if optional else ''}, got {value!r}.")


def printable(text: str) -> str:
    """Return the text with unprintable characters and lone surrogates escaped.

    Unprintable characters could control a terminal, and lone surrogates cannot be encoded to send the text to other ranks.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def some_of(names: Sequence[str]) -> str:
    """Return the first three of `names` in quotes, and the number of the others."""
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_SAID: set[str] = set()


def warn_once(text: str, category: type[Warning] = UserWarning, *, subject: str | None = None) -> None:
    """Issue a warning once per process. `subject` identifies it if its text varies from call to call."""
    if (subject or text) not in _SAID:
        _SAID.add(subject or text)
        warnings.warn(text, category, stacklevel=2)
