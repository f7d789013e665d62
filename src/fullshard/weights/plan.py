"""Which rank reads which bytes of which file, and where they go: pure, and the same on every rank.

Rows of a source that one rank alone needs are read by it. Rows that several need (replicas, tensor parallelism, cuts along
other dims than 0) are read in equal parts by all of them, and exchanged in rounds, so that no byte is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from fullshard.weights.boxes import Box
from fullshard.weights.headers import FileTensor
from fullshard.weights.holdings import ModelTensor, same_ranks
from fullshard.weights.key_map import Computed, Mapped, Piece, Source
from fullshard.weights.rounds import Round, Span, in_rounds
from fullshard.weights.staging import padded


@dataclass(frozen=True, slots=True)
class Use:
    """A piece of a source that is a part of a target. number: of the target."""

    number: int
    target: ModelTensor
    piece: Piece

    def needs(self, rows: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """(box of the target that some ranks need of these rows of the source, those ranks)."""
        at = self.piece.from_source(rows)
        return iter(()) if at is None else self.target.holdings.meeting(at)

    def in_target(self, rows: Box, rank: int) -> Box | None:
        """The box of the target that a rank needs of these rows of the source; None if there is none."""
        held = self.target.holdings.boxes[rank]
        found = None if held is None else self.piece.from_source(rows)
        return None if held is None or found is None else found.meet(held)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a source that one rank reads, or computes. rows: a box of it, whole rows.      uses: all of the source's."""

    source: Source
    rows: Box
    reader: int
    uses: tuple[Use, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel * self.source.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads of one rank. own: rows that it alone needs.      rounds: of parts that are exchanged, as many on every rank."""

    own: tuple[Part, ...]
    rounds: tuple[Round[Part], ...] = ()

    def files(self, rank: int) -> list[str]:
        """The files that this rank reads, in order."""
        shared = (part.source for turn in self.rounds for part in turn.parts if part.reader == rank)
        return sorted({file for source in (*(part.source for part in self.own), *shared) for file in _files(source)})

    def nbytes(self, rank: int) -> int:
        """Bytes of files that this rank reads."""
        shared = (part for turn in self.rounds for part in turn.parts if part.reader == rank)
        total, last = 0, None
        for part in (*self.own, *shared):
            if isinstance(part.source, FileTensor):
                total += part.nbytes
            elif part.source is not last:  # what is computed is kept until the next one
                total, last = total + _read_for(part.source), part.source
        return total


def _read_for(source: Source) -> int:
    if isinstance(source, FileTensor):
        return source.nbytes
    inputs = source.inputs if isinstance(source, Computed) else ()
    return sum(_read_for(piece.source) for mapped in inputs for piece in mapped.pieces)


def _files(source: Source) -> Iterator[str]:
    if isinstance(source, FileTensor):
        yield source.file
    elif isinstance(source, Computed):
        for piece in (piece for mapped in source.inputs for piece in mapped.pieces):
            yield from _files(piece.source)


def plan_load(
    targets: Sequence[tuple[ModelTensor, Mapped]], *, rank: int, ranks: int, limit: int, exchanges: bool = True
) -> LoadPlan:
    """Say which bytes a rank reads.

    Args:
        targets: of the model, each with what is loaded into it; of equal shapes.
        rank: this one.
        ranks: how many there are.
        limit: bytes that one rank needs in a round, at most (but for a single row that has more).
        exchanges: whether rows that several ranks need are read once; otherwise each reads them, and only what is computed is
            sent.

    Returns:
        The plan of this rank. Tensors that are cut alike, as those of all layers, are looked at once.
    """
    uses: dict[Source, list[Use]] = {}
    for number, (target, mapped) in enumerate(targets):
        for piece in mapped.pieces:
            uses.setdefault(piece.source, []).append(Use(number, target, piece))
    own: list[Part] = []
    shared: list[tuple[Span, Callable[[Span], Part]]] = []
    kinds: dict[object, list[Span]] = {}
    computing = [0] * ranks  # bytes that each computes so far
    for source, found in sorted(uses.items(), key=lambda item: _place(item[0])):
        together = tuple(found)
        make = partial(_part_of, source, together)
        if isinstance(source, Computed):
            reader = min(range(ranks), key=lambda one: (computing[one], one))
            computing[reader] += source.nbytes
            shared += [(span, make) for span in _computed(source, together, reader, limit)]
            continue
        assert isinstance(source, FileTensor)
        if all(_is_own(use) for use in together):
            own += _own(source, together, rank)
        elif exchanges:
            key = source.shape, source.dtype, *map(_geometry, together)
            if key not in kinds:
                kinds[key] = list(_shared(source, together, limit))
            shared += [(span, make) for span in kinds[key]]
        else:
            own += _alone(source, together, rank)
    return LoadPlan(tuple(own), tuple(in_rounds(shared, rank=rank, limit=limit)))


def _part_of(source: Source, uses: tuple[Use, ...], span: Span) -> Part:
    return Part(source, span.rows, span.by, uses)


def _geometry(use: Use) -> object:
    """All that decides which rank needs which rows; names do not."""
    return id(use.target.holdings), use.target.dtype, use.piece.at, use.piece.origin, use.piece.dims


def _place(source: Source) -> tuple[str, int, str]:
    """In the order of the files; what is computed comes last."""
    return (source.file, source.offset, source.name) if isinstance(source, FileTensor) else ("\uffff", 0, source.name)


def _rows_of(box: Box, shape: Sequence[int]) -> Box:
    """The whole rows that a box of a tensor is in."""
    return Box((box.start[0], *(0 for _ in shape[1:])), (box.shape[0], *shape[1:])) if shape else box


def _is_own(use: Use) -> bool:
    """Whether each rank needs rows of the source that no other one needs, and whole ones."""
    piece, shape = use.piece, use.piece.source.shape
    kept = [dim for dim in piece.dims if dim is not None]
    sizes = {dim: piece.at.shape[at] for at, dim in enumerate(piece.dims) if dim is not None}
    first = (
        1 if piece.dims and piece.dims[0] == 0 else 0
    )  # rows of the source are rows of the target, or all are in one of these
    return (
        use.target.holdings.is_by_rows
        and kept == list(range(len(shape)))
        and all(sizes[dim] == shape[dim] for dim in range(first, len(shape)))
    )


def _own(source: FileTensor, uses: tuple[Use, ...], rank: int) -> Iterator[Part]:
    for use in uses:
        held = use.target.holdings.boxes[rank]
        box = None if held is None else use.piece.at.meet(held)
        if box is not None:
            yield Part(source, use.piece.in_source(box), rank, (use,))


def _alone(source: FileTensor, uses: tuple[Use, ...], rank: int) -> Iterator[Part]:
    for use in uses:
        held = use.target.holdings.boxes[rank]
        box = None if held is None else use.piece.at.meet(held)
        if box is not None:
            yield Part(source, _rows_of(use.piece.in_source(box), source.shape), rank, (use,))


def _shared(source: FileTensor, uses: tuple[Use, ...], limit: int) -> Iterator[Span]:
    """Parts of each stretch of rows that the same ranks need, in equal numbers of rows."""
    needs: list[tuple[int, int, tuple[int, ...]]] = []  # first row, last row, ranks
    largest = 0
    for use in uses:
        for box, ranks in use.target.holdings.meeting(use.piece.at):
            inner = use.piece.in_source(box)
            needs.append((inner.start[0], inner.stop[0], ranks) if source.shape else (0, 1, ranks))
            largest = max(largest, box.numel)
    numel = prod(source.shape)
    row = source.nbytes // max(1, source.shape[0] if source.shape else 1)
    slab = max(1, limit * numel // max(1, largest * row)) if row else 1  # rows of which no rank needs more than `limit`
    for first, last, having in same_ranks(needs):
        many = len(having)
        bounds = [first + (last - first) * index // many for index in range(many + 1)]
        step = max(1, slab // many)
        for at in range(0, -(-(last - first) // many), step):
            for reader, begin, end in zip(having, bounds, bounds[1:]):
                if begin + at < end:
                    yield _span(source, uses, _between(source.shape, begin + at, min(end, begin + at + step)), reader)


def _computed(source: Computed, uses: tuple[Use, ...], reader: int, limit: int) -> Iterator[Span]:
    length = source.shape[0] if source.shape else 1
    copies = max(len(ranks) for use in uses for ranks in use.target.holdings.distinct.values())  # that the reader sends
    slab = max(1, limit * length // max(1, source.nbytes * copies))
    for begin in range(0, length, slab):
        yield _span(source, uses, _between(source.shape, begin, min(length, begin + slab)), reader)


def _between(shape: tuple[int, ...], first: int, last: int) -> Box:
    return Box.whole(shape).rows(first, last) if shape else Box.whole(shape)


def _span(source: Source, uses: tuple[Use, ...], rows: Box, reader: int) -> Span:
    """The cost of rows: bytes to read, to send, and to get or keep."""
    loads = {("read", reader): padded(rows.numel * source.dtype.itemsize)}
    sent = 0
    for use in uses:
        for box, ranks in use.needs(rows):
            nbytes = padded(box.numel * use.target.dtype.itemsize)
            sent += nbytes * (len(ranks) - (reader in ranks))
            for rank in ranks:
                loads["need", rank] = loads.get(("need", rank), 0) + nbytes
    if sent:
        loads["send", reader] = sent
    return Span.of(rows, reader, loads)


__all__ = ["LoadPlan", "Part", "Use", "plan_load"]
