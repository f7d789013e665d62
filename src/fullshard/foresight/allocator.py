"""Model of torch's caching allocator: bytes reserved on a device by a sequence of allocations and frees.

Block sizes are multiples of 512 bytes. Blocks up to 1 MiB ("small") come from segments of 2 MiB, blocks below 10 MiB from
segments of 20 MiB, and larger blocks from a segment of their own size, rounded up to 2 MiB. An allocation takes the free block
of its stream and kind (small or large) that fits best. The block is split if the remainder has at least 512 bytes (small) or
more than 1 MiB (large). A freed block is merged with free neighbours.

With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, each stream and kind has one segment, which grows at its end by pages of
2 MiB (small) or 20 MiB (large), and a block is split if the remainder has at least 512 bytes.

Source: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from fullshard.foresight.ledger import Change
from fullshard.frontend.api import gc_paused

MIB = 1 << 20
_MIN_BLOCK = 512  # bytes


def _rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(eq=False, slots=True)
class _Block:
    pool: _Pool
    nbytes: int
    start: int  # address
    free: bool = True
    before: _Block | None = None  # neighbour in the segment
    after: _Block | None = None  # neighbour in the segment


@dataclass(eq=False, slots=True)
class _Pool:
    """Blocks of one stream and kind."""

    small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)  # (bytes, start, free block), sorted
    last: _Block | None = None  # last block of an expandable segment

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.nbytes, block.start))]


class Allocator:
    """Allocator state after a sequence of calls.

    >>> allocator = Allocator()
    >>> allocator.allocate(1, 3 * MIB, "compute")
    >>> allocator.reserved // MIB, allocator.allocated // MIB
    (20, 3)
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.reserved = 0  # bytes of all segments
        self.allocated = self.peak = 0  # bytes of all allocated blocks, rounded up, now and at most
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._allocated_blocks: dict[int, _Block] = {}  # by key

    def allocate(self, key: int, nbytes: int, stream: str) -> None:
        """Allocate a block on a stream; `release` frees it by `key`."""
        size = max(_MIN_BLOCK, _rounded_up(nbytes, _MIN_BLOCK))
        small = size <= MIB
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        free = pool.free
        at = bisect_left(free, (size, -1))  # the smallest block of at least `size` bytes; among equal ones the lowest address
        if at < len(free):
            block = free.pop(at)[2]
        elif self._expandable:
            block = self._expand(pool, size)
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else _rounded_up(size, 2 * MIB)
            block = _Block(pool, segment, start=self.reserved)
            self.reserved += segment
        remainder = block.nbytes - size
        if remainder >= (_MIN_BLOCK if small or self._expandable else MIB + 1):
            rest = _Block(pool, remainder, block.start + size, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            else:
                pool.last = rest
            block.after, block.nbytes = rest, size
            insort(free, (remainder, rest.start, rest))
        block.free = False
        self._allocated_blocks[key] = block
        self.allocated += block.nbytes
        self.peak = max(self.peak, self.allocated)

    def _expand(self, pool: _Pool, size: int) -> _Block:
        """Grow the pool's segment. Return its last block, free and of at least `size` bytes, removed from the free list."""
        page = 2 * MIB if pool.small else 20 * MIB
        block = pool.last
        if block is not None and block.free:
            pool.remove(block)
        else:
            start = 0 if block is None else block.start + block.nbytes
            fresh = _Block(pool, 0, start, before=block)
            if block is not None:
                block.after = fresh
            block = pool.last = fresh
        growth = _rounded_up(size - block.nbytes, page)
        block.nbytes += growth
        self.reserved += growth
        return block

    def release(self, key: int) -> None:
        """Free a block and merge it with free neighbours."""
        block = self._allocated_blocks.pop(key)
        pool = block.pool
        self.allocated -= block.nbytes
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            block.start, block.before = before.start, before.before
            block.nbytes += before.nbytes
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            pool.remove(after)
            block.after = after.after
            block.nbytes += after.nbytes
            if block.after is not None:
                block.after.before = block
            if pool.last is after:
                pool.last = block
        insort(pool.free, (block.nbytes, block.start, block))


def reserved_for(changes: Iterable[Change], *, expandable: bool = False) -> int:
    """Return the bytes that the allocator reserves for the changes of a ledger, without pinned host memory."""
    allocator = Allocator(expandable=expandable)
    allocate, release = allocator.allocate, allocator.release
    with gc_paused():  # the loop creates many blocks, which refer to each other and are no garbage
        for nbytes, category, _, block, stream in changes:
            if category == "pinned host":
                continue
            if nbytes > 0:
                allocate(block, nbytes, stream)
            else:
                release(block)
    return allocator.reserved
