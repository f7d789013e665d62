"""A step that all ranks take or none: an error on one rank is raised on all, and a difference between ranks is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.consistency.collective_log import listed

T = TypeVar("T")
Facts = Mapping[str, Mapping[str, str]]  # of each parameter, by name: what must be equal on all ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks that take part: process groups that span them, one per mesh axis, and a device that these can carry."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    def agree(
        self, call: Callable[[], T], facts: Callable[[T], Facts] | None = None, *, subject: str = "", advice: str = ""
    ) -> T:
        """The result of `call`, if no rank raised in it and the `facts` of the results are equal on all ranks (collective).

        A digest of 32 bytes is exchanged; the texts only travel if digests differ.

        subject: the noun of the error text about facts that differ, in the plural: "the optimizers".
        advice: its last sentence, what to do.

        Raises the error of `call` where it came up, and ValueError on the other ranks, or for facts that differ.
        """
        error: Exception | None = None
        said: dict[str, dict[str, str]] = {}
        try:
            result = call()
            said = {name: dict(own) for name, own in facts(result).items()} if facts is not None else {}
        except Exception as raised:
            error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        alike = self._all_equal(f"{text} {sorted((name, sorted(own.items())) for name, own in said.items())}")
        found = {} if alike else self._gathered((text, said))
        if error is not None:
            raise error
        if not alike:
            raise ValueError(_difference(found, subject, advice))
        return result

    def _all_equal(self, text: str) -> bool:
        """Whether the text is equal on all ranks (collective)."""
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=self.device)
        message = torch.cat([digest, 255 - digest])
        for group in self.groups:
            dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
        largest, smallest = message.cpu().int().chunk(2)
        return bool((largest + smallest == 255).all())

    def _gathered(self, mine: tuple[str, Facts]) -> dict[int, tuple[str, Facts]]:
        """The text and facts of each rank, by rank (collective)."""
        found = {dist.get_rank(): mine}
        for group in self.groups:
            parts: list[dict[int, tuple[str, Facts]]] = [{} for _ in range(group.size())]
            dist.all_gather_object(parts, found, group=group)
            found = {rank: said for part in parts for rank, said in part.items()}
        return dict(sorted(found.items()))


def _difference(found: Mapping[int, tuple[str, Facts]], subject: str, advice: str) -> str:
    """The first rank that raised, or the first name whose facts differ, with those alone that do."""
    for rank, (text, _) in found.items():
        if text:
            return f"rank {rank} raised, so no rank goes on. {text}"
    facts = {rank: said for rank, (_, said) in found.items()}
    first = next(iter(facts.values()))
    for name in dict.fromkeys(name for said in facts.values() for name in said):
        if all(said.get(name) == first.get(name) for said in facts.values()):
            continue
        keys = dict.fromkeys(key for said in facts.values() for key in said.get(name, ()))
        differing = [key for key in keys if len({said.get(name, {}).get(key) for said in facts.values()}) > 1]
        ranks_of: dict[str, list[int]] = {}
        for rank, said in facts.items():
            own = said.get(name)
            words = (
                [f"{key} {own[key]}" if key in own else f"no {key}" for key in differing] if own is not None else ["nothing"]
            )
            ranks_of.setdefault(", ".join(words), []).append(rank)
        told = "; ".join(f"{listed(ranks)}: {words}" for words, ranks in ranks_of.items())
        return f"{subject} of the ranks differ in '{name}'. {told}. {advice}"
    return f"{subject} of the ranks differ. {advice}"


__all__ = ["Facts", "Ranks"]
