"""Which rank writes which rows of which file, and from whom it gets them: pure, and the same on every rank.

Rows of which one rank has all are written by it. The others are written in equal parts by all ranks that have some of them
(copies in replicas, columns), which exchange before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fullshard.weights.boxes import Box
from fullshard.weights.headers import FileTensor
from fullshard.weights.holdings import ModelTensor, same_ranks
from fullshard.weights.key_map import Mapped, Piece
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

    @property
    def is_sent(self) -> bool:
        """Whether another rank than the writer supplies some of it."""
        return any(supply.rank != self.writer for supply in self.supplies())

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
    """What is written. own: by this rank, of what it has.      rounds: after an exchange, the same on every rank."""

    own: tuple[Written, ...]
    rounds: tuple[tuple[Written, ...], ...]


def plan_save(outputs: Sequence[tuple[FileTensor, Mapped]], *, rank: int, ranks: int, limit: int) -> SavePlan:
    """Say which rows a rank writes.

    Args:
        outputs: where each tensor is in the files, and what it is made of: tensors of the model alone.
        rank: this one.
        ranks: how many there are.
        limit: bytes that one rank writes or sends in a round, at most (but for a single row that has more).

    Returns:
        The plan; its rounds are the same on every rank.
    """
    own: list[Written] = []
    shared: list[Written] = []
    for output, mapped in outputs:
        for first, last, having in _stretches(output, mapped):
            if len(having) == 1:
                if having[0] == rank:
                    own.append(Written(output, mapped, _between(output, first, last), rank))
            else:
                shared += _parts(output, mapped, first, last, having, limit)
    return SavePlan(tuple(own), tuple(_rounds(shared, ranks, limit)))


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


def _rounds(parts: Sequence[Written], ranks: int, limit: int) -> Iterator[tuple[Written, ...]]:
    """Parts in order, as many together as leave no rank with more than `limit` bytes to write, to send, or to get."""
    found: list[Written] = []
    writing, sending = [0] * ranks, [0] * ranks
    for part in parts:
        sent: dict[int, int] = {}
        for supply in part.supplies():
            if supply.rank != part.writer:
                nbytes = padded(supply.box.numel * part.output.dtype.itemsize)
                sent[supply.rank] = sent.get(supply.rank, 0) + nbytes
        writes = max(padded(part.nbytes), sum(sent.values()))
        most = max((writing[part.writer] + writes, *(sending[rank] + nbytes for rank, nbytes in sent.items())))
        if found and most > limit:
            yield tuple(found)
            found, writing, sending = [], [0] * ranks, [0] * ranks
        found.append(part)
        writing[part.writer] += writes
        for rank, nbytes in sent.items():
            sending[rank] += nbytes
    if found:
        yield tuple(found)


__all__ = ["SavePlan", "Supply", "Written", "plan_save"]
