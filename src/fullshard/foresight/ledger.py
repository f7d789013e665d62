"""Bytes that come and go, each with a category and the unit it is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

Category = Literal[
    "shards", "gathered", "staging", "gradients", "optimizer", "activations", "temporaries", "buffers", "pinned host"
]


class Change(NamedTuple):
    """A block is allocated, or freed if `nbytes` is less than 0.

    unit: the qualified name, "" if it is of none.      block: its number, the index of the change that allocated it.
    pool: the stream of the accelerator that it is allocated on, whose pool of memory it comes from and goes back to.
    """

    nbytes: int
    category: Category
    unit: str
    block: int
    pool: str = "compute"


class Ledger:
    """Every change, in order, and the sum of all blocks that are there.

    >>> ledger = Ledger()
    >>> block = ledger.take(100, "gathered", "blocks.0")
    >>> ledger.give(ledger.take(20, "staging", "blocks.0"))
    >>> ledger.level, ledger.peak, ledger.at_peak()
    (100, 120, {('gathered', 'blocks.0'): 100, ('staging', 'blocks.0'): 20})
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.level = self.peak = 0
        self.peak_after = 0  # how many changes lead to the peak
        self._reserved = -1, 0  # the block for messages, and its bytes
        self._shared: Counter[int] = Counter()  # how many more times a block is to be freed before it is

    def take(self, nbytes: int, category: Category, unit: str, pool: str = "compute") -> int:
        """Allocate a block. Returns what it is freed by; blocks without bytes are noted nowhere."""
        if not nbytes:
            return -1
        block = len(self.changes)
        self.changes.append(Change(nbytes, category, unit, block, pool))
        if category != "pinned host":
            self.level += nbytes
            if self.level > self.peak:
                self.peak, self.peak_after = self.level, block + 1
        return block

    def reserve(self, nbytes: int, unit: str) -> None:
        """Reserve at least `nbytes` for messages, in one block that stays and is used again."""
        if nbytes > self._reserved[1]:
            self.give(self._reserved[0])
            self._reserved = self.take(nbytes, "staging", unit), nbytes

    def share(self, block: int) -> int:
        """Have one more call of `give` before this block is free. Returns it."""
        if block >= 0:
            self._shared[block] += 1
        return block

    def give(self, block: int) -> None:
        """Free a block."""
        if block in self._shared:
            self._shared[block] -= 1
            if not self._shared[block]:
                del self._shared[block]
        elif block >= 0:
            nbytes, category, unit, _, pool = self.changes[block]
            self.changes.append(Change(-nbytes, category, unit, block, pool))
            if category != "pinned host":
                self.level -= nbytes

    def give_all(self, blocks: Sequence[int]) -> None:
        """Free the blocks of a list, last first, as Python does."""
        for block in reversed(blocks):
            self.give(block)

    def level_at(self, changes: int) -> int:
        """Bytes on the device after so many changes."""
        return sum(nbytes for (category, _), nbytes in self.at(changes).items() if category != "pinned host")

    def at_peak(self) -> dict[tuple[Category, str], int]:
        """Bytes by category and unit where the sum is largest."""
        return self.at(self.peak_after)

    def at(self, changes: int) -> dict[tuple[Category, str], int]:
        """Bytes by category and unit after so many changes."""
        found: Counter[tuple[Category, str]] = Counter()
        for change in self.changes[:changes]:
            found[change.category, change.unit] += change.nbytes
        return {key: nbytes for key, nbytes in found.items() if nbytes}


__all__ = ["Category", "Change", "Ledger"]
