"""Hints of similar names, for error texts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_MOST = 2000  # names that are compared character by character


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as ` (nearest: 'a', 'b')` with up to two similar names, or "" if none is similar.

    Of more than 2,000 names, only names with the same last component are compared.
    """
    from difflib import get_close_matches

    every = list(names)
    if len(every) > _MOST:
        last = name.rpartition(".")[2]
        every = list(islice((one for one in every if one.rpartition(".")[2] == last), _MOST))
    found = get_close_matches(name, every, 2, 0.6)
    return f" (nearest: {', '.join(repr(one) for one in found)})" if found else ""
