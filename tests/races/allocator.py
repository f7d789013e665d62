"""A model of torch's caching allocator for a device: how much it reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp. Sizes are multiples of 512 bytes. Up to 1 MiB comes from segments of 2 MiB, up to 10 MiB
from segments of 20 MiB, more from segments of its own size in steps of 2 MiB. A free block is taken by best fit among those of the
same stream and kind, split if more than 512 bytes (small) or 1 MiB (large) are left, and merged with its neighbours when it is freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(eq=False)
class Block:
    pool: tuple[str, bool]
    nbytes: int
    start: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    _free: dict[tuple[str, bool], list[Block]] = field(default_factory=dict)
    _held: dict[int, Block] = field(default_factory=dict)

    def allocate(self, key: int, nbytes: int, stream: str) -> None:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        pool = stream, small
        free = self._free.setdefault(pool, [])
        fitting = [block for block in free if block.nbytes >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block.nbytes, block.start))
            free.remove(block)
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block = Block(pool, segment, self.reserved)
            self.reserved += segment
        left = block.nbytes - size
        if left >= 512 if small else left > MIB:
            rest = Block(pool, left, block.start + size, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.nbytes = rest, size
            free.append(rest)
        block.free = False
        self._held[key] = block
        self.allocated += block.nbytes
        self.peak = max(self.peak, self.allocated)

    def release(self, key: int) -> None:
        block = self._held.pop(key)
        self.allocated -= block.nbytes
        free = self._free[block.pool]
        block.free = True
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            free.remove(other)
            if other is block.before:
                block.start, block.before = other.start, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
            block.nbytes += other.nbytes
        free.append(block)
