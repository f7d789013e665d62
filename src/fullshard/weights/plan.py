"""Plan a load or a save: which rank reads or writes which rows of which file, and which ranks exchange them.

Both have the same plan. Boxes of tensors in files are boxes of tensors of the model, which ranks store. Rows of the file that
one rank stores alone are read or written by this rank. Other rows (of replicas, tensor parallelism, shards along a dim other
than 0) are divided in equal parts among the ranks that store elements of them. These ranks exchange the elements in rounds,
after the read or before the write, so that no byte is read or written twice.

Planning is pure, and computes equal rounds on all ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fullshard.weights.boxes import Box, ModelTensor, ShardMap, merge_row_ranges
from fullshard.weights.exchange import padded
from fullshard.weights.headers import FileTensor
from fullshard.weights.key_map import ComputedTensor, MappedTensor, SourcePiece

InFiles = FileTensor | ComputedTensor
"""A tensor in a file, or one that is computed from tensors in files."""


@dataclass(frozen=True, slots=True)
class Link:
    """Equal boxes of a tensor in files and of a tensor of the model."""

    target: ModelTensor
    piece: SourcePiece  # from the tensor in files (`source`) to `target`


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor in files that one rank reads, computes or writes, also for other ranks."""

    source: InFiles
    links: tuple[Link, ...]  # all of the source
    rows: Box  # whole rows
    worker: int  # the rank that reads or writes the rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel * self.source.dtype.itemsize

    def boxes(self, rank: int | None = None) -> Iterator[tuple[Link, Box, tuple[int, ...]]]:
        """Yield (link, box of its target that is in these rows, ranks that store the box); with `rank`, only its own boxes."""
        for link in self.links:
            at = link.piece.mapped_box(self.rows)
            if at is not None:
                yield from ((link, box, ranks) for box, ranks in link.target.shard_map.owners(at, rank))


def partners(ranks: Sequence[int], worker: int, *, saving: bool) -> Sequence[int]:
    """Return the ranks among those that store a box with which the worker exchanges it: all in a load, one in a save."""
    return ranks if not saving else [worker if worker in ranks else ranks[worker % len(ranks)]]


@dataclass(frozen=True, slots=True)
class Round:
    """Parts that are read or written together."""

    parts: tuple[Part, ...]  # those in which this rank takes part
    exchanged: bool  # whether any ranks exchange data, which makes the round collective


@dataclass(frozen=True, slots=True)
class Plan:
    """The reads or writes of one rank."""

    rank: int
    own: tuple[Part, ...]  # read or written for this rank alone
    rounds: tuple[Round, ...]  # every rank has the same number of rounds, because an exchange is collective

    def transfers(self) -> Iterator[tuple[FileTensor, Box]]:
        """Yield the rows that this rank reads from files or writes to files. Computed tensors count as their inputs."""
        shared = (part for one in self.rounds for part in one.parts if part.worker == self.rank)
        last = None
        for part in (*self.own, *shared):
            if isinstance(part.source, FileTensor):
                yield part.source, part.rows
            elif part.source is not last:  # a computed tensor is cached until the next one, so its inputs are read once
                last = part.source
                yield from plan_inputs(last).transfers()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank reads from files or writes to files."""
        return sum(rows.numel * tensor.dtype.itemsize for tensor, rows in self.transfers())


def plan_load(
    targets: Sequence[tuple[ModelTensor, MappedTensor]], *, rank: int, ranks: int, limit: int, exchanges: bool = True
) -> Plan:
    """Plan the reads of one rank. A round needs at most `limit` bytes on a rank for each purpose, more for a single row.

    With `exchanges`, rows that several ranks need are read once. Otherwise every rank reads them, and only computed tensors are
    sent.
    """
    found: dict[InFiles, list[Link]] = {}
    for target, mapped in targets:
        for piece in mapped.pieces:
            assert not isinstance(piece.source, ModelTensor)
            found.setdefault(piece.source, []).append(Link(target, piece))

    def file_order(item: tuple[InFiles, Any]) -> tuple[str, int]:
        source = item[0]
        return (source.file, source.offset) if isinstance(source, FileTensor) else ("\uffff", 0)  # computed ones come last

    return _plan(sorted(found.items(), key=file_order), rank=rank, ranks=ranks, limit=limit, saving=False, exchanges=exchanges)


def plan_inputs(source: ComputedTensor) -> Plan:
    """Plan to read the whole inputs of a function on one rank. The names of the targets are the numbers of the inputs."""
    whole = [
        ModelTensor(str(number), one.dtype, one.shape, ShardMap(one.shape, (Box.whole(one.shape),)))
        for number, one in enumerate(source.inputs)
    ]
    return plan_load(list(zip(whole, source.inputs)), rank=0, ranks=1, limit=sys.maxsize)


def plan_save(outputs: Sequence[tuple[FileTensor, MappedTensor]], *, rank: int, ranks: int, limit: int) -> Plan:
    """Plan the writes of one rank. `limit` is as for `plan_load`."""
    tensors: list[tuple[InFiles, list[Link]]] = [
        (output, [Link(piece.source, piece.inverse(output)) for piece in mapped.pieces])  # type: ignore[arg-type]
        for output, mapped in outputs
    ]
    return _plan(tensors, rank=rank, ranks=ranks, limit=limit, saving=True, exchanges=True)


# --- rows of each rank ---

Loads = Counter[tuple[str, int]]
"""Bytes by purpose ("rows", "send" or "receive") and rank, each of which a round limits."""


def _plan(
    tensors: Iterable[tuple[InFiles, list[Link]]], *, rank: int, ranks: int, limit: int, saving: bool, exchanges: bool
) -> Plan:
    own: list[Part] = []
    shared: list[tuple[InFiles, tuple[Link, ...], Part, Loads]] = []
    # By geometry, which the weights of all layers share: rows of each rank alone, and rows of several.
    divided: dict[object, tuple[dict[int, list[Box]], list[tuple[Part, Loads]]]] = {}
    computing = [0] * ranks  # bytes of computed tensors assigned to each rank so far
    for source, found in tensors:
        links = tuple(found)
        if isinstance(source, ComputedTensor):
            # Balance the work; the lowest rank wins a tie, so that all ranks choose the same one.
            worker = computing.index(min(computing))
            computing[worker] += source.nbytes
            length, replicas = source.shape[0] if source.shape else 1, 1  # the worker sends so many copies at most
            for link in links:
                replicas = max([replicas, *map(len, link.target.shard_map.ranks_by_box.values())])
            step = max(1, limit * length // max(1, source.nbytes * replicas))
            shared += [(source, links, *one) for one in _parts(source, links, 0, length, [worker], step, saving=False)]
            continue
        # Everything that decides which rank stores which rows: all except names.
        stored = [(id(link.target.shard_map), link.target.dtype, link.piece.geometry) for link in links]
        key = source.shape, source.dtype, *stored
        if key not in divided:
            divided[key] = _divide(source, links, limit, saving=saving, exchanges=exchanges)
        alone, several = divided[key]
        own += [Part(source, links, rows, rank) for rows in alone.get(rank, ())]
        shared += [(source, links, *one) for one in several]
    return Plan(rank, tuple(own), tuple(_in_rounds(shared, rank=rank, limit=limit)))


def _divide(
    source: FileTensor, links: tuple[Link, ...], limit: int, *, saving: bool, exchanges: bool
) -> tuple[dict[int, list[Box]], list[tuple[Part, Loads]]]:
    """Return the rows that each rank reads or writes for itself, and those that ranks exchange."""
    ranges: list[tuple[int, int, tuple[int, ...]]] = []  # (first row, last row, ranks)
    largest = 1  # elements of the largest box that one rank stores
    for link in links:
        for box, ranks in link.target.shard_map.owners(link.piece.at):
            rows = link.piece.source_box(box)
            ranges.append((rows.start[0], rows.stop[0], ranks) if source.shape else (0, 1, ranks))
            largest = max(largest, box.numel)
    length = source.shape[0] if source.shape else 1
    most = limit * length // (largest * source.dtype.itemsize)  # so many rows need up to `limit` bytes on every rank
    alone: dict[int, list[Box]] = {}
    several: list[tuple[Part, Loads]] = []
    for first, last, owners in merge_row_ranges(ranges):
        if exchanges and len(owners) > 1:
            several += _parts(source, links, first, last, owners, max(1, most // len(owners)), saving=saving)
        else:
            for owner in owners:
                alone.setdefault(owner, []).append(Box.of_rows(source.shape, first, last))
    return alone, several


def _parts(
    source: InFiles, links: tuple[Link, ...], first: int, last: int, workers: Sequence[int], step: int, *, saving: bool
) -> Iterator[tuple[Part, Loads]]:
    """Yield an equal part of the rows for each worker, in steps in turn, so that every round has work for all of them."""
    count = len(workers)
    bounds = [first + (last - first) * index // count for index in range(count + 1)]
    for at in range(0, -(-(last - first) // count), step):
        for worker, (begin, end) in zip(workers, pairwise(bounds)):
            if begin + at < end:
                part = Part(source, links, Box.of_rows(source.shape, begin + at, min(end, begin + at + step)), worker)
                yield part, _loads(part, saving=saving)


def _loads(part: Part, *, saving: bool) -> Loads:
    """Return the bytes that a part needs on each rank."""
    loads = Loads({("rows", part.worker): padded(part.nbytes)})
    for link, box, ranks in part.boxes():
        nbytes = padded(box.numel * (part.source if saving else link.target).dtype.itemsize)
        for other in partners(ranks, part.worker, saving=saving):
            if other != part.worker:
                sender, receiver = (other, part.worker) if saving else (part.worker, other)
                loads["send", sender] += nbytes
                loads["receive", receiver] += nbytes
    return loads


def _in_rounds(shared: Iterable[tuple[InFiles, tuple[Link, ...], Part, Loads]], *, rank: int, limit: int) -> Iterator[Round]:
    """Batch rows so that no load of any rank exceeds `limit` bytes per round. Larger single rows get their own round."""
    # Every rank walks the rows of all ranks, so that all ranks make the same rounds.
    parts: list[Part] = []
    totals = Loads()
    exchanged = False
    for source, links, part, loads in shared:  # `part` may be that of another source of equal geometry
        if totals and any(totals.get(load, 0) + nbytes > limit for load, nbytes in loads.items()):
            yield Round(tuple(parts), exchanged)
            parts, totals, exchanged = [], Loads(), False
        totals.update(loads)
        exchanged = exchanged or len(loads) > 1
        if any((purpose, rank) in loads for purpose in ("rows", "send", "receive")):
            parts.append(Part(source, links, part.rows, part.worker))
    if totals:
        yield Round(tuple(parts), exchanged)
