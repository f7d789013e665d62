"""Which rank writes which rows of which file, and from whom it gets them: pure, and the same on every rank.

Rows of which one rank has all are written by it. The others are written in equal parts by all ranks that have some of them
(copies in replicas, columns), which exchange before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from fullshard.weights.boxes import Box
from fullshard.weights.headers import FileTensor
from fullshard.weights.holdings import ModelTensor, same_ranks
from fullshard.weights.key_map import Mapped, Piece
from fullshard.weights.rounds import Round, Span, in_rounds
from fullshard.weights.staging import padded


@dataclass(frozen=True, slots=True)
class Supply:
    """A box of an output that one rank has. at: in the output.      box: the same in the tensor of the model."""

    piece: Piece
    at: Box
    box: Box
    rank: int


@dataclass(frozen=True, slots=True)
class Written:
    """Rows of an output that one rank writes. rows: a box of it, whole rows."""

    output: FileTensor
    mapped: Mapped
    rows: Box
    writer: int

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return self.rows.numel * self.output.dtype.itemsize

    def supplies(self) -> Iterator[Supply]:
        """Where the elements are: with the writer if it has them, else with one of the ranks that do."""
        for piece in self.mapped.pieces:
            wanted = piece.at.meet(self.rows)
            if wanted is None:
                continue
            assert isinstance(piece.source, ModelTensor)
            for box, ranks in piece.source.holdings.meeting(piece.in_source(wanted)):
                at = piece.from_source(box)
                if at is not None:
                    yield Supply(piece, at, box, self.writer if self.writer in ranks else ranks[self.writer % len(ranks)])


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The writes of one rank. own: by this rank, of what it has.      rounds: after an exchange, as many on every rank."""

    own: tuple[Written, ...]
    rounds: tuple[Round[Written], ...]

    def nbytes(self, rank: int) -> int:
        """Bytes that this rank writes."""
        shared = (part for turn in self.rounds for part in turn.parts if part.writer == rank)
        return sum(part.nbytes for part in (*self.own, *shared))


def plan_save(outputs: Sequence[tuple[FileTensor, Mapped]], *, rank: int, ranks: int, limit: int) -> SavePlan:
    """Say which rows a rank writes.

    Args:
        outputs: where each tensor is in the files, and what it is made of: tensors of the model alone.
        rank: this one.
        ranks: how many there are.
        limit: bytes that one rank writes or sends in a round, at most (but for a single row that has more).

    Returns:
        The plan of this rank. Outputs that are cut alike, as those of all layers, are looked at once.
    """
    own: list[Written] = []
    shared: list[tuple[Span, Callable[[Span], Written]]] = []
    kinds: dict[object, tuple[list[Span], list[Span]]] = {}
    for output, mapped in outputs:
        key = output.shape, output.dtype, *map(_geometry, mapped.pieces)
        if key not in kinds:
            kinds[key] = _alone(output, mapped), list(_together(output, mapped, limit))
        make = partial(_written, output, mapped)
        own += [make(span) for span in kinds[key][0] if span.by == rank]
        shared += [(span, make) for span in kinds[key][1]]
    return SavePlan(tuple(own), tuple(in_rounds(shared, rank=rank, limit=limit)))


def _written(output: FileTensor, mapped: Mapped, span: Span) -> Written:
    return Written(output, mapped, span.rows, span.by)


def _geometry(piece: Piece) -> object:
    """All that decides which rank has which rows; names do not."""
    assert isinstance(piece.source, ModelTensor)
    return id(piece.source.holdings), piece.at, piece.origin, piece.dims


def _alone(output: FileTensor, mapped: Mapped) -> list[Span]:
    """Rows of which one rank has all."""
    return [
        Span.of(_between(output, first, last), having[0], {})
        for first, last, having in _stretches(output, mapped)
        if len(having) == 1
    ]


def _together(output: FileTensor, mapped: Mapped, limit: int) -> Iterator[Span]:
    """Rows of which several ranks have some: bytes that the writer gets or keeps, and that others send."""
    for first, last, having in _stretches(output, mapped):
        for part in _parts(output, mapped, first, last, having, limit) if len(having) > 1 else ():
            sent: dict[int, int] = {}
            for supply in part.supplies():
                if supply.rank != part.writer:
                    nbytes = padded(supply.box.numel * part.output.dtype.itemsize)
                    sent[supply.rank] = sent.get(supply.rank, 0) + nbytes
            loads = {("write", part.writer): max(padded(part.nbytes), sum(sent.values()))}
            yield Span.of(part.rows, part.writer, loads | {("send", rank): nbytes for rank, nbytes in sent.items()})


def _stretches(output: FileTensor, mapped: Mapped) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(first row, last row, ranks that have some of them)."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for piece in mapped.pieces:
        assert isinstance(piece.source, ModelTensor)
        for box, ranks in piece.source.holdings.meeting(piece.in_source(piece.at)):
            at = piece.from_source(box)
            if at is not None:
                found.append((at.start[0], at.stop[0], ranks) if output.shape else (0, 1, ranks))
    return same_ranks(found)


def _parts(output: FileTensor, mapped: Mapped, first: int, last: int, having: tuple[int, ...], limit: int) -> Iterator[Written]:
    many = len(having)
    row = output.nbytes // max(1, output.shape[0] if output.shape else 1)
    step = max(1, limit // max(1, row * many))
    bounds = [first + (last - first) * index // many for index in range(many + 1)]
    for at in range(0, -(-(last - first) // many), step):
        for writer, (begin, end) in zip(having, pairwise(bounds)):
            if begin + at < end:
                yield Written(output, mapped, _between(output, begin + at, min(end, begin + at + step)), writer)


def _between(output: FileTensor, first: int, last: int) -> Box:
    whole = Box.whole(output.shape)
    return whole.rows(first, last) if output.shape else whole


__all__ = ["SavePlan", "Supply", "Written", "plan_save"]
