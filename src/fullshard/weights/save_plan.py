"""Plan which rank writes which rows of which file, and which ranks send them. Pure, and equal on every rank.

If one rank has complete rows that no other rank has, it writes them. Other rows are divided in equal parts among all ranks that
have some of their elements (replicas, columns), and these ranks exchange the elements first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fullshard.weights.boxes import Box, ModelTensor, merge_row_ranges
from fullshard.weights.headers import FileTensor
from fullshard.weights.key_map import MappedTensor, SourcePiece
from fullshard.weights.rounds import Round, RowRange, in_rounds, padded, shares


@dataclass(frozen=True, slots=True)
class RowSource:
    """A box of an output that one rank has."""

    piece: SourcePiece
    at: Box  # in the output
    box: Box  # the same elements in the tensor of the model
    rank: int  # that has them


@dataclass(frozen=True, slots=True)
class WriteRange:
    """Rows of an output that one rank writes."""

    output: FileTensor
    mapped: MappedTensor  # values of the output
    rows: Box  # complete rows of the output
    writer: int  # rank

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel * self.output.dtype.itemsize

    def sources(self) -> Iterator[RowSource]:
        """Yield the boxes of the rows with the rank that provides each: the writer if it has the box, else another."""
        for piece in self.mapped.pieces:
            wanted = piece.at.intersect(self.rows)
            if wanted is None:
                continue
            assert isinstance(piece.source, ModelTensor)
            for box, ranks in piece.source.shard_map.owners(piece.source_box(wanted)):
                at = piece.mapped_box(box)
                if at is not None:
                    yield RowSource(piece, at, box, self.writer if self.writer in ranks else ranks[self.writer % len(ranks)])


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The writes of one rank."""

    # Rows that this rank has completely.
    own: tuple[WriteRange, ...]
    # Rows that need an exchange. Every rank has the same number of rounds, because an exchange is collective.
    rounds: tuple[Round[WriteRange], ...]

    def nbytes(self, rank: int) -> int:
        """Return the bytes that this rank writes."""
        shared = (part for exchange_round in self.rounds for part in exchange_round.parts if part.writer == rank)
        return sum(part.nbytes for part in (*self.own, *shared))


def plan_save(outputs: Sequence[tuple[FileTensor, MappedTensor]], *, rank: int, ranks: int, limit: int) -> SavePlan:
    """Plan the rows that a rank writes."""
    own: list[WriteRange] = []
    shared: list[tuple[RowRange, Callable[[RowRange], WriteRange]]] = []
    # Equally sharded outputs, such as the same weight of all layers, have equal ranges, which are computed once.
    ranges_by_placement: dict[object, tuple[list[RowRange], list[RowRange]]] = {}
    for output, mapped in outputs:
        key = output.shape, output.dtype, *map(_placement_key, mapped.pieces)
        if key not in ranges_by_placement:
            ranges_by_placement[key] = _own_rows(output, mapped), list(_shared_rows(output, mapped, limit))
        make = partial(_write_range, output, mapped)
        own += [make(row_range) for row_range in ranges_by_placement[key][0] if row_range.worker == rank]
        shared += [(row_range, make) for row_range in ranges_by_placement[key][1]]
    return SavePlan(tuple(own), tuple(in_rounds(shared, rank=rank, limit=limit)))


def _write_range(output: FileTensor, mapped: MappedTensor, row_range: RowRange) -> WriteRange:
    return WriteRange(output, mapped, row_range.rows, row_range.worker)


def _placement_key(piece: SourcePiece) -> object:
    """Return a key that is equal for pieces whose rows are on the same ranks. It has no names."""
    assert isinstance(piece.source, ModelTensor)
    return id(piece.source.shard_map), piece.geometry


def _own_rows(output: FileTensor, mapped: MappedTensor) -> list[RowRange]:
    """Return the rows whose elements are all on one rank, and on no other."""
    return [
        RowRange.of(Box.of_rows(output.shape, first, last), owners[0], {})
        for first, last, owners in _rows_with_ranks(output, mapped)
        if len(owners) == 1
    ]


def _shared_rows(output: FileTensor, mapped: MappedTensor, limit: int) -> Iterator[RowRange]:
    """Yield the rows that several ranks have elements of, with the bytes that the writer stores and other ranks send."""
    for first, last, owners in _rows_with_ranks(output, mapped):
        for part in _shares(output, mapped, first, last, owners, limit) if len(owners) > 1 else ():
            sent: dict[int, int] = {}
            for row_source in part.sources():
                if row_source.rank != part.writer:
                    nbytes = padded(row_source.box.numel * part.output.dtype.itemsize)
                    sent[row_source.rank] = sent.get(row_source.rank, 0) + nbytes
            loads = {("write", part.writer): max(padded(part.nbytes), sum(sent.values()))}
            yield RowRange.of(part.rows, part.writer, loads | {("send", rank): nbytes for rank, nbytes in sent.items()})


def _rows_with_ranks(output: FileTensor, mapped: MappedTensor) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (first row, row after the last one, ranks that have elements of these rows)."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for piece in mapped.pieces:
        assert isinstance(piece.source, ModelTensor)
        for box, ranks in piece.source.shard_map.owners(piece.source_box(piece.at)):
            at = piece.mapped_box(box)
            if at is not None:
                found.append((at.start[0], at.stop[0], ranks) if output.shape else (0, 1, ranks))
    return merge_row_ranges(found)


def _shares(
    output: FileTensor, mapped: MappedTensor, first: int, last: int, owners: tuple[int, ...], limit: int
) -> Iterator[WriteRange]:
    row = output.nbytes // max(1, output.shape[0] if output.shape else 1)
    for writer, begin, end in shares(first, last, owners, max(1, limit // max(1, row * len(owners)))):
        yield WriteRange(output, mapped, Box.of_rows(output.shape, begin, end), writer)
