"""Integers only: which rows a rank owns, where each parameter starts, what is padding, and what travels together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGN_BYTES = 16
KIB, MIB = 1 << 10, 1 << 20

LEAST_CHUNK = 4 * KIB  # bytes per rank below which no parameter travels alone by itself
LEAST_MESSAGE = 1 * MIB  # bytes over all ranks, the same
WORTH_MESSAGE = 8 * MIB  # bytes over all ranks from which on a copy costs more than a message
MOST_SLICES = 8  # messages of a reduction
MOST = 16  # parameters of a group that travel alone for that reason


def staging_limit(nbytes: int) -> int:
    """How many bytes of a group's parameters, which have `nbytes` in all, may be packed.

    >>> staging_limit(100 * MIB) // MIB, staging_limit(1000 * MIB) // MIB
    (32, 100)
    """
    return max(32 * MIB, nbytes // 10)


def slice_limit(nbytes: int, *, kinds: int) -> int:
    """How many bytes of a group's gradients, which have `nbytes` in all, a slice has: MOST_SLICES suffice.

    kinds: of messages that are sliced, 1 or 2.
    """
    return max(32 * MIB, -(-nbytes // (MOST_SLICES + 1 - kinds)))


@dataclass(frozen=True, slots=True)
class DirectRule:
    """Which parameters travel in messages of their own, straight between shards and regions.

    A copy costs as the whole message is large, and a message as there are many of them, or as a rank's chunk is small.

    min_chunk: bytes per rank from which on any does; `inf`: none.
    capped: whether others do, too, largest first, if a rank's chunk has LEAST_CHUNK: up to MOST of WORTH_MESSAGE and more over
        all ranks, and any of LEAST_MESSAGE as long as what is packed would need more than `staging_limit`; and whether those
        that would be padding for the most part are summed instead.
    """

    min_chunk: float
    capped: bool = False

    @classmethod
    def by_default(cls, min_chunk: float) -> DirectRule:
        """Where the caller said nothing, for a backend to which chunks of `min_chunk` bytes are worth a message."""
        return cls(min_chunk, capped=min_chunk < float("inf"))

    def direct(self, chunks: Sequence[int], movable: Sequence[bool], ranks: int) -> set[int]:
        """The indices of those that do, of parameters with these chunks, in bytes. movable: which of them can."""
        able = [i for i, chunk in enumerate(chunks) if chunk and movable[i] and chunk % ALIGN_BYTES == 0]
        alone = {i for i in able if chunks[i] >= self.min_chunk}
        if not self.capped:
            return alone
        total = ranks * sum(chunks)
        packed = total - ranks * sum(chunks[i] for i in alone)
        large = 0
        for index in sorted(able, key=lambda i: (-chunks[i], i)):
            message = ranks * chunks[index]
            worth = message >= WORTH_MESSAGE and large < MOST
            large += 1
            if index in alone or chunks[index] < LEAST_CHUNK:
                continue
            if worth or (message >= LEAST_MESSAGE and packed > staging_limit(total)):
                alone.add(index)
                packed -= message
        return alone

    def is_summed(self, nbytes: int, padded: int) -> bool:
        """Whether to sum a parameter of `nbytes`, which is `padded` in chunks of equal size for all ranks."""
        return self.capped and padded >= 2 * nbytes and padded - nbytes >= LEAST_MESSAGE


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
                         ...[region, region + numel)...         if it is summed

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
class Slice:
    """A part of each rank's chunk of one parameter: `size` elements from `start` on."""

    parameter: int
    start: int
    size: int


def slices(sizes: Sequence[tuple[int, int]], *, ranks: int, limit: int) -> tuple[tuple[Slice, ...], ...]:
    """Cut the chunks of parameters, (parameter, elements) each, for messages of about equal size.

    limit: elements of a message over all ranks, up to a multiple of these.

    >>> slices([(0, 64), (3, 128)], ranks=2, limit=256)
    ((Slice(parameter=0, start=0, size=64), Slice(parameter=3, start=0, size=64)), (Slice(parameter=3, start=64, size=64),))
    """
    left = sum(size for _, size in sizes)
    most = max(1, -(-limit // ranks))
    width = -(-left // -(-left // most)) if left else 0
    room = width = min(most, width + -width % 64)
    messages: list[list[Slice]] = [[]]
    for parameter, size in sizes:
        start = 0
        while start < size:
            if not room:
                room = width
                messages.append([])
            part = min(room, size - start)
            messages[-1].append(Slice(parameter, start, part))
            start, room = start + part, room - part
    return tuple(tuple(message) for message in messages if message)


@dataclass(frozen=True, slots=True)
class ReductionLayout:
    """How the gradients of a group travel. Each parameter with elements is in exactly one of these.

    packed      one message, None if it is empty
    direct      parameters that are messages of their own, as autograd left them
    slices      of parameters that must be cast, or are cut unevenly: of each message the slices of their chunks
    sums        of parameters that are summed: of each message the slices of them
    """

    packed: Bucket | None
    direct: tuple[int, ...]
    slices: tuple[tuple[Slice, ...], ...]
    sums: tuple[tuple[Slice, ...], ...]

    @property
    def messages(self) -> int:
        """How many there are: the first of the slices takes along whatever is packed or direct."""
        return max(len(self.slices), int(self.packed is not None or bool(self.direct))) + len(self.sums)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Everything static about a group's memory. group 1 - n buckets, bucket 1 - n parameters.

    shard  | packed: small, folded | large, uneven | large, even |
    gather | one packed bucket     | direct        | direct      |
    reduce | one packed message                    | direct      |   as they are
    reduce | one packed message                                  |   cast
    reduce | one packed message    | slice by slice, if cast     |   in order

    Behind those are the shards of the summed: parameters of so few rows that chunks of equal size would be padding for the most
    part. They are gathered by a sum to which each rank adds its rows and zeros, and so are their gradients, whole.
    """

    ranks: int
    places: tuple[ParamOffsets, ...]  # in the order of the parameters
    buckets: tuple[Bucket, ...]
    shard_numel: int
    full_numel: int
    summed: tuple[int, ...]  # their parameters
    summed_offset: int  # from here on they are in the shard; shard_numel if there are none
    summed_region: tuple[int, int]  # where they are in the full storage, and how many elements

    def rows_of(self, index: int, rank: int) -> slice:
        """Which elements of a parameter, of those in its region, are of this rank; for one cut along dim 0."""
        place = self.places[index]
        numel = prod(place.shape)
        return slice(min(numel, rank * place.size), min(numel, (rank + 1) * place.size))

    @property
    def packed(self) -> Bucket | None:
        """The bucket of the parameters that share a message; None if all travel directly."""
        return next((bucket for bucket in self.buckets if not bucket.direct), None)

    def is_even(self, index: int) -> bool:
        """Whether all ranks have as many elements of this parameter."""
        return self.places[index].size * self.ranks == prod(self.places[index].shape)

    def reduction(self, *, as_is: bool, in_order: bool, itemsize: int) -> ReductionLayout:
        """How the gradients travel.

        as_is: whether they have the dtype in which they are reduced, of `itemsize` bytes.
        in_order: whether collectives run one behind the other on their stream, so that large ones may go in slices.
        """
        able = [index for index, place in enumerate(self.places) if place.direct]
        alone = able if in_order else [index for index in able if as_is and self.is_even(index)]
        stop = min((self.places[index].offset for index in alone), default=self.summed_offset)
        pieces = tuple(segment for bucket in self.buckets if bucket.offset < stop for segment in bucket.pieces)
        direct = tuple(index for index in alone if as_is and self.is_even(index))
        sliced = [(index, self.places[index].size) for index in alone if index not in direct]
        summed = [(index, prod(self.places[index].shape)) for index in self.summed]
        limit = slice_limit(self.full_numel * itemsize, kinds=bool(sliced) + bool(summed)) // itemsize
        return ReductionLayout(
            packed=Bucket(False, 0, stop, pieces) if stop else None,
            direct=direct,
            slices=slices(sliced, ranks=self.ranks, limit=limit),
            sums=slices(summed, ranks=1, limit=limit if in_order else max(1, self.summed_region[1])),
        )


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

    summed = tuple(
        index
        for index, (shape, dim) in enumerate(zip(shapes, dims))
        if dim == 0 and direct.is_summed(prod(shape) * itemsize, ranks * chunks[index] * itemsize)
    )
    movable = [dim == 0 and index not in summed for index, dim in enumerate(dims)]
    alone = direct.direct([0 if index in summed else chunk * itemsize for index, chunk in enumerate(chunks)], movable, ranks)
    rest = [index for index in range(len(shapes)) if index not in summed and index not in alone]
    if summed and not alone and 0 < ranks * itemsize * sum(chunks[index] for index in rest) < LEAST_MESSAGE:
        summed += tuple(index for index in rest if dims[index] == 0)  # they would be a message of their own

    def is_even(index: int) -> bool:
        return chunks[index] * ranks == prod(shapes[index])

    order = sorted(set(range(len(shapes))) - set(summed))
    order.sort(key=lambda i: (i in alone, dims[i] != 0, i in alone and is_even(i)))
    places: list[ParamOffsets | None] = [None] * len(shapes)
    packed: list[Segment] = []
    messages: list[Bucket] = []  # of one parameter each
    offset = region = 0
    for index in order:
        size = chunks[index]
        places[index] = ParamOffsets(tuple(shapes[index]), dims[index], offset, size, region, index in alone)
        segment, gap = Segment(index, size, region), -size % align
        if index in alone:
            messages.append(Bucket(True, offset, size, (segment,)))
        else:
            packed.append(segment)
        offset, region = offset + size, region + ranks * size
        if gap:  # never behind a direct parameter: its chunk is a multiple of 16 bytes in the smaller dtype
            packed.append(Segment(-1, gap, region))
            offset, region = offset + gap, region + ranks * gap
    summed_offset, summed_region = offset, region
    for index in summed:
        size, numel = chunks[index], prod(shapes[index])
        places[index] = ParamOffsets(tuple(shapes[index]), 0, offset, size, region, False)
        offset, region = offset + size + -size % align, region + numel + -numel % align
    region += (summed_region - region) % (ranks * align)  # a smaller group keeps equal parts of it
    head = [Bucket(False, 0, sum(segment.size for segment in packed), tuple(packed))] if packed else []
    assert all(place is not None for place in places)
    return GroupLayout(
        ranks=ranks,
        places=tuple(place for place in places if place is not None),
        buckets=(*head, *messages),
        shard_numel=offset,
        full_numel=region,
        summed=summed,
        summed_offset=summed_offset,
        summed_region=(summed_region, region - summed_region),
    )
