"""Ledger of simulated memory: allocations and frees in order, each with a category and a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

Category = Literal[
    "shards", "gathered", "staging", "gradients", "optimizer", "activations", "temporaries", "buffers", "pinned host"
]


class Change(NamedTuple):
    """Allocation of a block, or its free."""

    nbytes: int  # negative for a free
    category: Category
    unit: str  # qualified name, "" outside of units
    block: int  # number of the block: index of its allocation in the ledger
    pool: str = "compute"  # stream whose memory pool the block belongs to


class Ledger:
    """Record of all allocations and frees. Bytes in pinned host memory are recorded, but count in no sum.

    >>> ledger = Ledger()
    >>> block = ledger.allocate(100, "gathered", "blocks.0")
    >>> ledger.free(ledger.allocate(20, "staging", "blocks.0"))
    >>> ledger.level, ledger.peak, ledger.at_peak()
    (100, 120, {('gathered', 'blocks.0'): 100, ('staging', 'blocks.0'): 20})
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.level = self.peak = 0  # bytes on the device, now and at most
        self.peak_after = 0  # number of changes up to the peak
        self._shared: Counter[int] = Counter()  # by block: extra owners

    def allocate(self, nbytes: int, category: Category, unit: str, pool: str = "compute") -> int:
        """Allocate a block and return its number. An empty block is not recorded; its number is -1."""
        if not nbytes:
            return -1
        block = len(self.changes)
        self.changes.append(Change(nbytes, category, unit, block, pool))
        if category != "pinned host":
            self.level += nbytes
            if self.level > self.peak:
                self.peak, self.peak_after = self.level, block + 1
        return block

    def share(self, block: int) -> int:
        """Add an owner to a block: `free` must be called once more. Return the block."""
        if block >= 0:
            self._shared[block] += 1
        return block

    def free(self, block: int) -> None:
        """Drop one owner of a block, and free it after the last one. Ignores -1."""
        if block in self._shared:
            self._shared[block] -= 1
            if not self._shared[block]:
                del self._shared[block]
        elif block >= 0:
            nbytes, category, unit, _, pool = self.changes[block]
            self.changes.append(Change(-nbytes, category, unit, block, pool))
            if category != "pinned host":
                self.level -= nbytes

    def free_all(self, blocks: Sequence[int]) -> None:
        """Free blocks, last first, as Python frees the items of a list."""
        for block in reversed(blocks):
            self.free(block)

    def at_peak(self) -> dict[tuple[Category, str], int]:
        """Return the bytes by category and unit at the peak."""
        return self.at(self.peak_after)

    def at(self, changes: int) -> dict[tuple[Category, str], int]:
        """Return the bytes by category and unit after the first `changes` changes."""
        found: Counter[tuple[Category, str]] = Counter()
        for change in self.changes[:changes]:
            found[change.category, change.unit] += change.nbytes
        return {key: nbytes for key, nbytes in found.items() if nbytes}
