"""Plan the memory and the collectives of a parameter group with integers only: rows per rank, offsets, padding, messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

ALIGN_BYTES = 16
KIB, MIB = 1 << 10, 1 << 20

# A direct parameter has a message of its own; packed parameters share one (see `DirectRule`).
MIN_CHUNK = 4 * KIB  # minimum bytes per rank of a parameter that `automatic` makes direct
MIN_MESSAGE = 1 * MIB  # minimum bytes over all ranks of a parameter that `automatic` makes direct
LARGE_MESSAGE = 8 * MIB  # bytes over all ranks from which a copy costs more than one more collective
MAX_SLICES = 8  # maximum number of reduce-scatter calls of one gradient reduction
MAX_LARGE_DIRECT = 16  # the LARGE_MESSAGE rule applies only to this many of the largest parameters that may be direct


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def staging_limit(nbytes: int) -> int:
    """Return the limit of packed bytes of a group of `nbytes` bytes. Above it, more parameters are made direct."""
    return max(32 * MIB, nbytes // 10)


def slice_limit(nbytes: int) -> int:
    """Return the maximum bytes of a sliced message, so that MAX_SLICES messages suffice for gradients of `nbytes` bytes."""
    return max(32 * MIB, _ceil_div(nbytes, MAX_SLICES))


@dataclass(frozen=True, slots=True)
class DirectRule:
    """Choose the direct parameters: each has a message of its own into the unsharded buffer, without a copy-out.

    A copy costs in proportion to its bytes. A collective costs per call, and is slow if the chunk of a rank is small. Only
    parameters that are sharded along dim 0, in chunks of a multiple of ALIGN_BYTES, may be direct.

    With `automatic`, parameters below `min_chunk` are direct as well, largest first, if they have at least MIN_CHUNK bytes per
    rank and one of these holds:

    - They have at least LARGE_MESSAGE bytes over all ranks, and are among the MAX_LARGE_DIRECT largest that may be direct.
    - They have at least MIN_MESSAGE bytes over all ranks, and the packed parameters would need more than `staging_limit`.
    """

    min_chunk: float  # bytes per rank from which every parameter that may be direct is direct; `inf` for none
    automatic: bool = False

    @classmethod
    def of(cls, limit: float | None, least: float) -> DirectRule:
        """Return the rule for the caller's `limit`, or for the backend's `least` if None. If `least` is inf, all are packed."""
        if limit is None or least == inf:
            return cls(least, automatic=least < inf)
        return cls(limit)

    def choose(self, chunks: Sequence[int], eligible: Sequence[bool], ranks: int) -> set[int]:
        """Return the indices of the direct parameters. `chunks`: bytes per rank; `eligible`: whether sharded along dim 0."""
        # a direct chunk must be a multiple of ALIGN_BYTES, so that no gap is needed after it
        candidates = [i for i, chunk in enumerate(chunks) if chunk and eligible[i] and chunk % ALIGN_BYTES == 0]
        direct = {i for i in candidates if chunks[i] >= self.min_chunk}
        if not self.automatic:
            return direct
        total = ranks * sum(chunks)
        packed = total - ranks * sum(chunks[i] for i in direct)
        largest_first = sorted(candidates, key=lambda i: (-chunks[i], i))
        for place, index in enumerate(largest_first):
            message = ranks * chunks[index]
            is_large = message >= LARGE_MESSAGE and place < MAX_LARGE_DIRECT
            if index in direct or chunks[index] < MIN_CHUNK:
                continue
            if is_large or (message >= MIN_MESSAGE and packed > staging_limit(total)):
                direct.add(index)
                packed -= message
        return direct


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows of one rank along a dim that is divided into equal chunks. `of_rank` sizes the chunks as torch.chunk does.

    row     0   1 | 2   3 | 4   .       length=5, ranks=3, chunk=2
    rank      0   |   1   |   2         rank 2 owns [4, 5) and pads one row
    """

    start: int
    stop: int
    chunk: int  # rows that every rank stores, padding included

    @classmethod
    def of_rank(cls, length: int, *, ranks: int, rank: int) -> Extent:
        """Return the rows of rank `rank` if `length` rows are sharded over `ranks` ranks."""
        return cls.of_chunk(length, chunk=_ceil_div(length, ranks), rank=rank)

    @classmethod
    def of_chunk(cls, length: int, *, chunk: int, rank: int) -> Extent:
        """Return the rows of rank `rank` if `length` rows are sharded in chunks of `chunk` rows."""
        return cls(min(length, rank * chunk), min(length, (rank + 1) * chunk), chunk)

    @property
    def rows(self) -> int:
        """Number of rows that this rank owns."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """Number of rows of the chunk that are padding."""
        return self.chunk - self.rows


@dataclass(frozen=True, slots=True)
class ParamOffsets:
    """Place of one parameter in the flat shard and in the unsharded buffer, in elements.

        flat shard        ...[offset, offset + size)...                   the chunk, padding included
        unsharded buffer  ...[ranks * offset, ranks * (offset + size))... the parameter, then padding

    If `dim` is 0, the shards concatenated in rank order are the parameter. Otherwise the parameter is `permuted` and always
    packed: each rank's block is copied to its place along `dim` after an all-gather, and from there before a reduction.
    """

    shape: tuple[int, ...]  # unsharded
    dim: int  # the dim along which the parameter is sharded
    offset: int  # start of the chunk in the flat shard
    size: int  # elements of the chunk, padding included
    direct: bool  # whether the parameter has a message of its own

    @property
    def permuted(self) -> bool:
        """True if the shards, one after the other in rank order, are not the parameter."""
        return self.dim != 0

    @property
    def chunk(self) -> int:
        """Rows of the chunk along `dim`, padding included."""
        return self.size * self.shape[self.dim] // max(1, prod(self.shape))  # elements of the chunk / elements of a row


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a bucket: the chunk of one parameter or, in a packed bucket, a gap that aligns the next chunk."""

    parameter: int  # index of the parameter; -1 for a gap
    size: int  # elements


@dataclass(frozen=True, slots=True)
class Bucket:
    """One tensor that is communicated: `size` elements of each rank's flat shard, starting at `offset`.

    On a backend with coalesced collectives one call takes all buckets of a group. A packed bucket has many segments. A direct
    bucket has one and is all-gathered straight into the unsharded buffer.
    """

    direct: bool
    offset: int
    size: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of each rank's chunk of one parameter: `size` elements, starting at `start`."""

    parameter: int
    start: int
    size: int


def slices(sizes: Sequence[tuple[int, int]], *, ranks: int, limit: int) -> tuple[tuple[Slice, ...], ...]:
    """Divide the chunks of parameters into the fewest messages, of at most ceil(limit / ranks) elements per rank each.

    `sizes`: (parameter, elements of its chunk) for each parameter.

    >>> slices([(0, 64), (3, 128)], ranks=2, limit=256)
    ((Slice(parameter=0, start=0, size=64), Slice(parameter=3, start=0, size=64)), (Slice(parameter=3, start=64, size=64),))
    """
    total = sum(size for _, size in sizes)
    maximum = max(1, _ceil_div(limit, ranks))
    width = _ceil_div(total, _ceil_div(total, maximum)) if total else 0  # the fewest messages, then all of the same width
    room = width = min(maximum, width + -width % 64)  # a multiple of 64 if possible, for aligned addresses
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
    """Collectives that reduce the gradients of a group. Each parameter with elements is in exactly one of the fields."""

    packed: Bucket | None  # the packed gradients, one input of the first reduce-scatter call; None if there are none
    direct: tuple[int, ...]  # parameters whose gradients, as autograd computed them, are inputs of that call, each by itself
    # the other direct parameters (uneven, or cast): their slices in each reduce-scatter; empty unless collectives run in order
    slices: tuple[tuple[Slice, ...], ...]

    @property
    def messages(self) -> int:
        """Number of reduce-scatter calls. The first one reduces the packed and the direct gradients as well."""
        return max(len(self.slices), int(self.packed is not None or bool(self.direct)))


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Static memory layout of a group. One group has many buckets, the packed bucket many parameters.

        flat shard       | packed: small, permuted | large, uneven | large, even |
        all-gather       | one packed bucket       | direct        | direct      |
        reduce-scatter   | one packed message                      | direct      |   gradients already in the reduce dtype
        reduce-scatter   | one packed message                                    |   gradients that are cast

    On a backend that runs collectives in order, direct parameters are never packed:

        reduce-scatter   | one packed message      | in slices     | direct      |   gradients already in the reduce dtype
        reduce-scatter   | one packed message      | in slices                   |   gradients that are cast
    """

    ranks: int
    offsets: tuple[ParamOffsets, ...]  # in the order of the parameters
    buckets: tuple[Bucket, ...]
    shard_numel: int  # elements of the flat shard
    unsharded_numel: int  # elements of the unsharded buffer

    @property
    def packed(self) -> Bucket | None:
        """The bucket of the parameters that share a message; None if all parameters are direct."""
        return next((bucket for bucket in self.buckets if not bucket.direct), None)

    def is_even(self, index: int) -> bool:
        """Return True if all ranks own the same number of elements of this parameter."""
        return self.offsets[index].size * self.ranks == prod(self.offsets[index].shape)

    def is_chunked(self, index: int) -> bool:
        """Return True if torch.chunk along dim 0 would divide this parameter into the same chunks, padding aside."""
        place = self.offsets[index]
        return place.dim == 0 and place.chunk == _ceil_div(place.shape[0], self.ranks)

    def reduction(self, *, as_is: bool, in_order: bool, itemsize: int) -> ReductionLayout:
        """Plan the collectives that reduce the gradients in a dtype of `itemsize` bytes. `as_is`: they have it already.

        `in_order`: collectives run one after the other on their stream, so that large ones may run in slices.
        """
        candidates = [index for index, place in enumerate(self.offsets) if place.direct]
        unpacked = candidates if in_order else [index for index in candidates if as_is and self.is_even(index)]
        # direct parameters follow the packed ones in the flat shard, the even ones last, so the packed part is a prefix
        stop = min((self.offsets[index].offset for index in unpacked), default=self.shard_numel)
        segments = tuple(segment for bucket in self.buckets if bucket.offset < stop for segment in bucket.segments)
        direct = tuple(index for index in unpacked if as_is and self.is_even(index))
        sliced = [(index, self.offsets[index].size) for index in unpacked if index not in direct]
        limit = _ceil_div(slice_limit(self.unsharded_numel * itemsize), itemsize)
        return ReductionLayout(
            packed=Bucket(False, 0, stop, segments) if stop else None,
            direct=direct,
            slices=slices(sliced, ranks=self.ranks, limit=limit),
        )


def plan_layout(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int] | None = None,
    *,
    ranks: int,
    itemsize: int,
    direct: DirectRule,
    outer: int = 1,
) -> GroupLayout:
    """Lay out parameters of unsharded `shapes`, each with at least one dim. `dims`: the sharded dim of each; None for 0.

    `itemsize`: bytes of an element in the smaller of storage and compute dtype, in which offsets are multiples of 16 bytes.
    `outer`: the factor of `ranks` that are replicas (HFSDP). `direct` is for the hop over the shards.

    >>> layout = plan_layout([(4, 8), (3,)], ranks=2, itemsize=4, direct=DirectRule(64))
    >>> [(p.offset, p.size, p.direct) for p in layout.offsets], layout.shard_numel
    ([(4, 16, True), (0, 2, False)], 20)
    """
    align = max(1, ALIGN_BYTES // itemsize)
    dims = [0] * len(shapes) if dims is None else dims
    chunks = [_ceil_div(shape[dim], ranks) * prod(shape[:dim]) * prod(shape[dim + 1 :]) for shape, dim in zip(shapes, dims)]

    per_rank = [outer * chunk * itemsize for chunk in chunks]  # bytes
    chosen = direct.choose(per_rank, [dim == 0 for dim in dims], ranks // outer)
    chosen = {index for index in chosen if chunks[index] * itemsize % ALIGN_BYTES == 0}  # aligned in the first hop as well
    even = {index for index in chosen if chunks[index] * ranks == prod(shapes[index])}
    # packed parameters first, then direct ones with even chunks last: `reduction` packs a prefix of the flat shard
    order = sorted(range(len(shapes)), key=lambda i: (i in chosen, dims[i] != 0, i in even))
    offsets: dict[int, ParamOffsets] = {}
    packed: list[Segment] = []
    direct_buckets: list[Bucket] = []
    offset = 0  # the next free element of the flat shard
    for index in order:
        size = chunks[index]
        offsets[index] = ParamOffsets(tuple(shapes[index]), dims[index], offset, size, index in chosen)
        segment, gap = Segment(index, size), -size % align
        if index in chosen:
            direct_buckets.append(Bucket(True, offset, size, (segment,)))
        else:
            packed.append(segment)
        offset += size
        if gap:  # never after a direct parameter: its chunk is a multiple of 16 bytes in the smaller dtype
            packed.append(Segment(-1, gap))
            offset += gap
    packed_buckets = [Bucket(False, 0, sum(segment.size for segment in packed), tuple(packed))] if packed else []
    return GroupLayout(
        ranks=ranks,
        offsets=tuple(offsets[index] for index in range(len(shapes))),
        buckets=(*packed_buckets, *direct_buckets),
        shard_numel=offset,
        unsharded_numel=ranks * offset,
    )
