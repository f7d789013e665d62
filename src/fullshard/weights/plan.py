"""Plan a load: which rank reads which bytes of which file, and into which shards they go.

The planner is pure and computes equal rounds on all ranks. If one rank needs rows of a source, it reads them itself. If several
ranks need them (replicas, tensor parallelism, shards along a dim other than 0), each of these ranks reads an equal part, and
they exchange the parts in rounds, so that no byte is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from fullshard.weights.boxes import Box, ModelTensor, merge_row_ranges
from fullshard.weights.headers import FileTensor
from fullshard.weights.key_map import ComputedTensor, MappedTensor, Source, SourcePiece
from fullshard.weights.rounds import Round, RowRange, in_rounds, padded, shares


@dataclass(frozen=True, slots=True)
class Destination:
    """A target tensor that a piece of a source is loaded into."""

    number: int  # index of the target in the plan
    target: ModelTensor
    piece: SourcePiece

    def needs(self, rows: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield (box of the target that `rows` of the source fill, ranks that have the box in their shard)."""
        at = self.piece.mapped_box(rows)
        return iter(()) if at is None else self.target.shard_map.owners(at)

    def in_target(self, rows: Box, rank: int) -> Box | None:
        """Return the box of the target in the shard of `rank` that `rows` of the source fill; None if there is none."""
        owned = self.target.shard_map.boxes[rank]
        found = None if owned is None else self.piece.mapped_box(rows)
        return None if owned is None or found is None else found.intersect(owned)


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Rows of a source that one rank reads or computes."""

    source: Source
    rows: Box  # part of the source, whole rows
    reader: int  # the rank
    destinations: tuple[Destination, ...]  # all destinations of the source, or one if only that one needs the rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel * self.source.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads of one rank."""

    own: tuple[ReadRange, ...]  # read for this rank alone
    rounds: tuple[Round[ReadRange], ...] = ()  # read and exchanged with other ranks; every rank has the same number of rounds

    def files(self, rank: int) -> list[str]:
        """Return the files that this rank reads, sorted."""
        shared = (part.source for exchange_round in self.rounds for part in exchange_round.parts if part.reader == rank)
        return sorted({file for source in (*(part.source for part in self.own), *shared) for file in _files_of(source)})

    def nbytes(self, rank: int) -> int:
        """Return the number of bytes that this rank reads from files."""
        shared = (part for exchange_round in self.rounds for part in exchange_round.parts if part.reader == rank)
        total, last = 0, None
        for part in (*self.own, *shared):
            if isinstance(part.source, FileTensor):
                total += part.nbytes
            elif part.source is not last:  # a computed tensor is cached until the next one, so its inputs are read once
                total, last = total + _bytes_read_for(part.source), part.source
        return total


def _bytes_read_for(source: Source) -> int:
    """Return the bytes to read for a whole source, including the inputs of computed tensors."""
    if isinstance(source, FileTensor):
        return source.nbytes
    inputs = source.inputs if isinstance(source, ComputedTensor) else ()
    return sum(_bytes_read_for(piece.source) for mapped in inputs for piece in mapped.pieces)


def _files_of(source: Source) -> Iterator[str]:
    if isinstance(source, FileTensor):
        yield source.file
    elif isinstance(source, ComputedTensor):
        for piece in (piece for mapped in source.inputs for piece in mapped.pieces):
            yield from _files_of(piece.source)


def plan_load(
    targets: Sequence[tuple[ModelTensor, MappedTensor]], *, rank: int, ranks: int, limit: int, exchanges: bool = True
) -> LoadPlan:
    """Plan the reads of one rank. A round needs at most `limit` bytes on a rank, more for a single row.

    With `exchanges`, rows that several ranks need are read once. Otherwise every rank reads them, and only computed tensors are
    sent.
    """
    destinations: dict[Source, list[Destination]] = {}
    for number, (target, mapped) in enumerate(targets):
        for piece in mapped.pieces:
            destinations.setdefault(piece.source, []).append(Destination(number, target, piece))
    own: list[ReadRange] = []
    shared: list[tuple[RowRange, Callable[[RowRange], ReadRange]]] = []
    row_ranges: dict[object, list[RowRange]] = {}
    computing = [0] * ranks  # bytes of computed tensors assigned to each rank so far
    for source, found in sorted(destinations.items(), key=lambda item: _file_order(item[0])):
        source_destinations = tuple(found)
        make = partial(_read_range, source, source_destinations)
        if isinstance(source, ComputedTensor):
            # Balance the work; the lowest rank wins a tie, so that all ranks choose the same one.
            reader = min(range(ranks), key=lambda one: (computing[one], one))
            computing[reader] += source.nbytes
            shared += [(row_range, make) for row_range in _computed_rows(source, source_destinations, reader, limit)]
            continue
        assert isinstance(source, FileTensor)
        if all(_is_unshared(destination) for destination in source_destinations):
            own += _own_reads(source, source_destinations, rank)
        elif exchanges:
            # Tensors with equal geometry, such as the weights of all layers, are planned once.
            key = source.shape, source.dtype, *map(_geometry_key, source_destinations)
            if key not in row_ranges:
                row_ranges[key] = list(_shared_rows(source, source_destinations, limit))
            shared += [(row_range, make) for row_range in row_ranges[key]]
        else:
            own += _whole_row_reads(source, source_destinations, rank)
    return LoadPlan(tuple(own), tuple(in_rounds(shared, rank=rank, limit=limit)))


def _read_range(source: Source, destinations: tuple[Destination, ...], row_range: RowRange) -> ReadRange:
    return ReadRange(source, row_range.rows, row_range.worker, destinations)


def _geometry_key(destination: Destination) -> object:
    """Return everything that decides which rank needs which rows: all except names."""
    return id(destination.target.shard_map), destination.target.dtype, destination.piece.geometry


def _file_order(source: Source) -> tuple[str, int, str]:
    """Return a sort key: tensors in the order of files and offsets, then computed tensors."""
    return (source.file, source.offset, source.name) if isinstance(source, FileTensor) else ("\uffff", 0, source.name)


def _rows_of(box: Box, shape: Sequence[int]) -> Box:
    """Extend a box of a tensor to whole rows."""
    return Box((box.start[0], *(0 for _ in shape[1:])), (box.shape[0], *shape[1:])) if shape else box


def _is_unshared(destination: Destination) -> bool:
    """Return True if each rank needs whole rows of the source, and no two ranks need the same row."""
    piece, shape = destination.piece, destination.piece.source.shape
    kept = [dim for dim in piece.dims if dim is not None]
    sizes = {dim: piece.at.shape[at] for at, dim in enumerate(piece.dims) if dim is not None}
    # If dim 0 of the source is dim 0 of the target, ranks split its rows. Otherwise one row of the target has the whole source.
    first = 1 if piece.dims and piece.dims[0] == 0 else 0
    return (
        destination.target.shard_map.is_sharded_by_rows
        and kept == list(range(len(shape)))
        and all(sizes[dim] == shape[dim] for dim in range(first, len(shape)))
    )


def _own_reads(source: FileTensor, destinations: tuple[Destination, ...], rank: int) -> Iterator[ReadRange]:
    """Yield the rows that fill the shards of `rank`, one range per destination."""
    for destination in destinations:
        owned = destination.target.shard_map.boxes[rank]
        box = None if owned is None else destination.piece.at.intersect(owned)
        if box is not None:
            yield ReadRange(source, destination.piece.source_box(box), rank, (destination,))


def _whole_row_reads(source: FileTensor, destinations: tuple[Destination, ...], rank: int) -> Iterator[ReadRange]:
    """Yield whole rows that contain the shards of `rank`; other ranks read the same rows."""
    for destination in destinations:
        owned = destination.target.shard_map.boxes[rank]
        box = None if owned is None else destination.piece.at.intersect(owned)
        if box is not None:
            yield ReadRange(source, _rows_of(destination.piece.source_box(box), source.shape), rank, (destination,))


def _shared_rows(source: FileTensor, destinations: tuple[Destination, ...], limit: int) -> Iterator[RowRange]:
    """Yield the rows that several ranks need. Each run of rows with equal owners is split into equal parts, one per owner."""
    needs: list[tuple[int, int, tuple[int, ...]]] = []  # (first row, last row, ranks)
    largest = 0  # elements of the largest box that one rank needs
    for destination in destinations:
        for box, ranks in destination.target.shard_map.owners(destination.piece.at):
            inner = destination.piece.source_box(box)
            needs.append((inner.start[0], inner.stop[0], ranks) if source.shape else (0, 1, ranks))
            largest = max(largest, box.numel)
    numel = prod(source.shape)
    row = source.nbytes // max(1, source.shape[0] if source.shape else 1)
    max_rows = max(1, limit * numel // max(1, largest * row)) if row else 1  # so many rows fit into `limit` on every rank
    for first, last, owners in merge_row_ranges(needs):
        for reader, begin, end in shares(first, last, owners, max(1, max_rows // len(owners))):
            yield _row_range(source, destinations, Box.of_rows(source.shape, begin, end), reader)


def _computed_rows(
    source: ComputedTensor, destinations: tuple[Destination, ...], reader: int, limit: int
) -> Iterator[RowRange]:
    length = source.shape[0] if source.shape else 1
    ranks_of_boxes = (one for destination in destinations for one in destination.target.shard_map.ranks_by_box.values())
    copies = max(map(len, ranks_of_boxes), default=1)  # copies of the tensor that the reader sends, at most
    max_rows = max(1, limit * length // max(1, source.nbytes * copies))
    for begin in range(0, length, max_rows):
        yield _row_range(source, destinations, Box.of_rows(source.shape, begin, min(length, begin + max_rows)), reader)


def _row_range(source: Source, destinations: tuple[Destination, ...], rows: Box, reader: int) -> RowRange:
    """Return rows with their loads: bytes that the reader reads, bytes that it sends, and bytes that each rank needs."""
    loads = {("read", reader): padded(rows.numel * source.dtype.itemsize)}
    sent = 0
    for destination in destinations:
        for box, ranks in destination.needs(rows):
            nbytes = padded(box.numel * destination.target.dtype.itemsize)
            sent += nbytes * (len(ranks) - (reader in ranks))
            for rank in ranks:
                loads["need", rank] = loads.get(("need", rank), 0) + nbytes
    if sent:
        loads["send", reader] = sent
    return RowRange.of(rows, reader, loads)
