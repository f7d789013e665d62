"""Run a step on all ranks or on none: raise an error of one rank on all ranks, and name differences between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.core import listed

T = TypeVar("T")
ComparedValues = Mapping[str, Mapping[str, str]]  # parameter name -> property -> text that must be equal on all ranks


@dataclass(frozen=True)
class Ranks:
    """The participating ranks, as process groups."""

    groups: tuple[dist.ProcessGroup, ...]  # one per mesh dim; together they connect all ranks
    device: torch.device  # a device whose tensors the process groups can communicate

    def agree(
        self,
        call: Callable[[], T],
        compared: Callable[[T], ComparedValues] | None = None,
        *,
        subject: str = "",
        advice: str = "",
    ) -> T:
        """Return the result of `call`, if no rank raised and the `compared` values are equal on all ranks (collective).

        The ranks exchange a digest of 32 bytes. They exchange the values themselves only if the digests differ.

        Args:
            call: the step, which may raise on some ranks only.
            compared: returns the values of the result that must be equal on all ranks.
            subject: the plural noun that begins the error text about differing values: "The optimizers".
            advice: the last sentence of that text, which says what to do.

        Raises:
            Exception: the error of `call`, on the rank where it was raised.
            ValueError: on the other ranks; on all ranks if compared values differ.
        """
        error: Exception | None = None
        values: dict[str, dict[str, str]] = {}
        try:
            result = call()
            values = {name: dict(own) for name, own in compared(result).items()} if compared is not None else {}
        except Exception as raised:
            error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        equal = self._all_equal(f"{text} {sorted((name, sorted(own.items())) for name, own in values.items())}")
        found = {} if equal else self._gather_all((text, values))
        if error is not None:
            raise error
        if not equal:
            raise ValueError(_difference(found, subject, advice))
        return result

    def _all_equal(self, text: str) -> bool:
        """Return True if the text is equal on all ranks (collective)."""
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=self.device)
        # One MAX all-reduce gives the largest and, through the complement, the smallest digest: equal if all are equal.
        message = torch.cat([digest, 255 - digest])
        for group in self.groups:
            dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
        largest, smallest = message.cpu().int().chunk(2)
        return bool((largest + smallest == 255).all())

    def _gather_all(self, mine: tuple[str, ComparedValues]) -> dict[int, tuple[str, ComparedValues]]:
        """Return the error text and compared values of each rank, by rank (collective)."""
        found = {dist.get_rank(): mine}
        # Each all-gather also forwards the values from the all-gathers over the previous mesh dims.
        for group in self.groups:
            parts: list[dict[int, tuple[str, ComparedValues]]] = [{} for _ in range(group.size())]
            dist.all_gather_object(parts, found, group=group)
            found = {rank: values for part in parts for rank, values in part.items()}
        return dict(sorted(found.items()))


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


__all__ = ["ComparedValues", "Ranks"]
