"""Run a step on all ranks or on none: raise an error of one rank on all ranks, and name differences between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from fullshard.core import Agreement, listed

T = TypeVar("T")
ComparedValues = Mapping[str, Mapping[str, str]]  # parameter name -> property -> text that must be equal on all ranks


def agree(
    ranks: Agreement,
    call: Callable[[], T],
    compared: Callable[[T], ComparedValues] | None = None,
    *,
    subject: str = "",
    advice: str = "",
) -> T:
    """Return the result of `call`, if no rank raised and the `compared` values are equal on all ranks (collective).

    The ranks exchange a digest. They exchange the values themselves only if the digests differ.

    Args:
        ranks: the participating ranks.
        call: the step, which may raise on some ranks only.
        compared: returns the values of the result that must be equal on all ranks.
        subject: the plural noun that begins the error text about differing values: "The optimizers".
        advice: the last sentence of that text, which says what to do.
    """
    error: Exception | None = None
    values: ComparedValues = {}
    try:
        result = call()
        values = compared(result) if compared is not None else {}
    except Exception as raised:
        error = raised
    text = "" if error is None else f"{type(error).__name__}: {error}"
    mine = text, {name: dict(own) for name, own in values.items()}
    equal = ranks.all_equal(json.dumps(mine, sort_keys=True).encode())
    gathered = {} if equal else ranks.gather_bytes(json.dumps(mine).encode())
    if error is not None:
        raise error
    if not equal:
        raise ValueError(_difference({rank: json.loads(content) for rank, content in gathered.items()}, subject, advice))
    return result


def _difference(found: Mapping[int, tuple[str, ComparedValues]], subject: str, advice: str) -> str:
    """Describe the error of the first rank that raised, or else the first name whose values differ, with these values."""
    for rank, (text, _) in found.items():
        if text:
            return f"All ranks stop because rank {rank} raised {text}"
    compared = {rank: values for rank, (_, values) in found.items()}
    first = next(iter(compared.values()))
    for name in dict.fromkeys(name for values in compared.values() for name in values):
        if all(values.get(name) == first.get(name) for values in compared.values()):
            continue
        keys = dict.fromkeys(key for values in compared.values() for key in values.get(name, ()))
        differing = [key for key in keys if len({values.get(name, {}).get(key) for values in compared.values()}) > 1]
        ranks_of: dict[str, list[int]] = {}
        for rank, values in compared.items():
            own = values.get(name)
            words = (
                [f"{key} {own[key]}" if key in own else f"no {key}" for key in differing] if own is not None else ["nothing"]
            )
            ranks_of.setdefault(", ".join(words), []).append(rank)
        ranks_text = "; ".join(f"{listed(ranks)}: {words}" for words, ranks in ranks_of.items())
        return f"{subject} of the ranks differ in '{name}'. {ranks_text}. {advice}"
    return f"{subject} of the ranks differ. {advice}"
