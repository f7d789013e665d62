"""Integers only: which rows a rank owns, where each parameter starts, what is padding, and what travels together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGN_BYTES = 16
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DirectRule:
    """Which parameters travel in messages of their own, straight between shards and regions.

    A copy costs as the whole message is large, and a message as there are many of them, or as a rank's chunk is small.

    min_chunk: bytes per rank from which on any does; `inf`: none.
    min_message: bytes over all ranks from which on the `most` largest of a group do, if a rank's chunk has `least_chunk`.
    """

    min_chunk: float
    min_message: float = float("inf")
    least_chunk: int = 4 << 10
    most: int = 16

    @classmethod
    def by_default(cls, min_chunk: float) -> DirectRule:
        """Where the caller said nothing, for a backend to which chunks of `min_chunk` bytes are worth a message."""
        return cls(min_chunk, 8 * MIB if min_chunk < float("inf") else float("inf"))

    def direct(self, chunks: Sequence[int], ranks: int) -> set[int]:
        """The indices of those that do, of parameters with these chunks, in bytes; 0 for one that must not."""
        alone = {i for i, chunk in enumerate(chunks) if chunk and chunk >= self.min_chunk and chunk % ALIGN_BYTES == 0}
        large = [
            i
            for i, chunk in enumerate(chunks)
            if chunk >= self.least_chunk and chunk * ranks >= self.min_message and chunk % ALIGN_BYTES == 0
        ]
        return alone.union(sorted(large, key=lambda i: (-chunks[i], i))[: self.most])


@dataclass(frozen=True, slots=True)
class Extent:
    """The rows one rank owns of a tensor cut along one dim (dim 0, if nothing else is said), by torch.chunk's rule.

        row     0   1 | 2   3 | 4   .       length=5, ranks=3, chunk=2
        rank      0   |   1   |   2         rank 2 owns [4, 5) and pads one row

    >>> Extent.cut(5, ranks=3, rank=2)
    Extent(start=4, stop=5, chunk=2)
    """

    start: int
    stop: int
    chunk: int  # rows every rank stores, padding included

    @classmethod
    def cut(cls, length: int, *, ranks: int, rank: int) -> Extent:
        """The rows of rank `rank`, of `length` rows over `ranks` ranks."""
        chunk = -(-length // ranks)
        return cls(min(length, rank * chunk), min(length, (rank + 1) * chunk), chunk)

    @property
    def rows(self) -> int:
        """How many rows this rank owns."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """How many rows of the chunk are padding."""
        return self.chunk - self.rows


@dataclass(frozen=True, slots=True)
class ParamOffsets:
    """Where one parameter lies, in elements.

    shard of this rank   ...[offset, offset + size)...          size = chunk rows, padding included
    full storage         ...[region, region + ranks * size)...  the parameter is its first `numel` elements

    Cut along `dim` 0, the shards in rank order are the parameter. Along another they are not: it is `folded`, travels
    packed, and is permuted where it is copied out of the message or into it.
    """

    shape: tuple[int, ...]
    dim: int
    offset: int
    size: int
    full_offset: int
    direct: bool

    @property
    def folded(self) -> bool:
        """Whether the shards in rank order are not the parameter, but must be permuted."""
        return self.dim != 0

    def shard_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of a shard of `rows` rows."""
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a packed message: a parameter's chunk, or (`parameter` = -1) the gap that aligns the next one."""

    parameter: int
    size: int
    full_offset: int  # where its copy-out lands in the full storage


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message of a collective: `size` elements of each rank's shard, from `offset` on.

    bucket 1 - n pieces. A direct bucket has one piece and is gathered straight into that parameter's region.
    """

    direct: bool
    offset: int
    size: int
    pieces: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Everything static about a group's memory. group 1 - n buckets, bucket 1 - n parameters.

    shard  | packed: small, folded | large, uneven | large, even |
    gather | one packed bucket     | direct        | direct      |
    reduce | one packed message                    | direct      |   (all of it packed where gradients must be cast)
    """

    ranks: int
    places: tuple[ParamOffsets, ...]  # in the order of the parameters
    buckets: tuple[Bucket, ...]
    shard_numel: int
    full_numel: int
    direct_grad_offset: int  # from this shard offset on, gradients may be reduced directly

    @property
    def packed(self) -> Bucket | None:
        """The bucket of the parameters that share a message; None if all travel directly."""
        return next((bucket for bucket in self.buckets if not bucket.direct), None)

    def reduction(self, *, direct: bool) -> tuple[Bucket | None, tuple[int, ...]]:
        """(the packed message, or None if empty; the parameters reduced directly) with direct reductions on or off."""
        stop = self.direct_grad_offset if direct else self.shard_numel
        pieces = tuple(segment for bucket in self.buckets if bucket.offset < stop for segment in bucket.pieces)
        alone = tuple(i for i, place in enumerate(self.places) if place.direct and place.offset >= stop)
        return (Bucket(False, 0, stop, pieces) if stop else None), alone


def plan_layout(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int] | None = None,
    *,
    ranks: int,
    itemsize: int,
    direct: DirectRule,
) -> GroupLayout:
    """Lay out parameters of `shapes` (each with at least one dim) for `ranks` ranks.

    dims: along which dim each is cut, 0 if not given.
    itemsize: bytes of the smaller of storage and compute dtype; offsets are aligned to 16 of them.
    direct: which of them travel in messages of their own.

    >>> layout = plan_layout([(4, 8), (3,)], ranks=2, itemsize=4, direct=DirectRule(64))
    >>> [(p.offset, p.size, p.direct) for p in layout.places], layout.shard_numel
    ([(4, 16, True), (0, 2, False)], 20)
    """
    align = max(1, ALIGN_BYTES // itemsize)
    dims = [0] * len(shapes) if dims is None else dims
    chunks = [-(-shape[dim] // ranks) * prod(shape[:dim]) * prod(shape[dim + 1 :]) for shape, dim in zip(shapes, dims)]

    alone = direct.direct([chunk * itemsize if dim == 0 else 0 for chunk, dim in zip(chunks, dims)], ranks)

    def is_even(index: int) -> bool:
        return chunks[index] * ranks == prod(shapes[index])

    order = sorted(range(len(shapes)), key=lambda i: (i in alone, dims[i] != 0, i in alone and is_even(i)))
    places: list[ParamOffsets | None] = [None] * len(shapes)
    packed: list[Segment] = []
    messages: list[Bucket] = []  # of one parameter each
    offset = region = 0
    direct_grad_offset: int | None = None
    for index in order:
        size = chunks[index]
        places[index] = ParamOffsets(tuple(shapes[index]), dims[index], offset, size, region, index in alone)
        segment, gap = Segment(index, size, region), -size % align
        if index in alone:
            if direct_grad_offset is None and is_even(index):
                direct_grad_offset = offset
            messages.append(Bucket(True, offset, size, (segment,)))
        else:
            packed.append(segment)
        offset, region = offset + size, region + ranks * size
        if gap:  # never behind a direct parameter: its chunk is a multiple of 16 bytes in the smaller dtype
            packed.append(Segment(-1, gap, region))
            offset, region = offset + gap, region + ranks * gap
    head = [Bucket(False, 0, sum(segment.size for segment in packed), tuple(packed))] if packed else []
    assert all(place is not None for place in places)
    return GroupLayout(
        ranks=ranks,
        places=tuple(place for place in places if place is not None),
        buckets=(*head, *messages),
        shard_numel=offset,
        full_numel=region,
        direct_grad_offset=offset if direct_grad_offset is None else direct_grad_offset,
    )
