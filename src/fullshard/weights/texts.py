"""Texts of errors, in which names of files and tensors are what somebody else chose."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_MOST = 2000  # names that are compared letter by letter


def printable(text: str) -> str:
    """The text with escapes for what would steer a terminal, and for what is no Unicode, which no rank could tell another."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def nearest(name: str, names: Iterable[str]) -> str:
    """` (nearest: 'a', 'b')`, of names that are like it; "" if none is. Of very many, those with the same last part."""
    from difflib import get_close_matches

    every = list(names)
    if len(every) > _MOST:
        last = name.rpartition(".")[2]
        every = list(islice((one for one in every if one.rpartition(".")[2] == last), _MOST))
    found = get_close_matches(name, every, 2, 0.6)
    return f" (nearest: {', '.join(repr(one) for one in found)})" if found else ""


__all__ = ["nearest", "printable"]
