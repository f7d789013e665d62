"""Move rows between files and the shards of this rank, as planned. Ranks exchange rows that several of them store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fullshard.core import Agreement, UnitName
from fullshard.weights.boxes import Box
from fullshard.weights.exchange import Exchange, Message, StagingBuffer, batches, padded
from fullshard.weights.headers import FileTensor
from fullshard.weights.key_map import ComputedTensor
from fullshard.weights.plan import Link, Part, Plan, Round, partners, plan_inputs
from fullshard.weights.transfer import Reader, Transfer, Writer


class _Mover:
    """What loads and saves share.

    Rows that only this rank stores use two halves of a buffer of four times `limit`: one is read or written while the other is
    copied to or from the shards. A round uses four quarters: rows that are being read or written, rows before or after the
    exchange, rows to send, and rows to receive.

    Args:
        local: this rank's shards of the tensors of the model, by name.
    """

    saving: bool

    def __init__(self, group: Agreement, local: Mapping[str, Tensor], limit: int) -> None:
        self._group, self._local, self._limit = group, local, limit
        self._pinned = any(tensor.device.type != "cpu" for tensor in local.values())
        self.exchange = Exchange(group)

    def _staging_buffers(self) -> list[StagingBuffer]:
        return [StagingBuffer(torch.device("cpu"), pinned=self._pinned) for _ in range(2)]

    def _in_shard(self, link: Link, box: Box) -> Tensor:
        """Return a box of a tensor of the model, as a view of this rank's shard."""
        own_box = link.target.shard_map.boxes[self._group.index]
        assert own_box is not None
        view = self._local[link.target.name].view(own_box.shape)[box.relative_to(own_box).slices()]
        # A tensor subclass may refuse copies to other tensors, but computes plain values for operators that it does not know.
        return view.permute(*range(view.dim())) if self.saving and type(view) is not Tensor else view

    def _in_rows(self, part: Part, rows: Tensor, link: Link, box: Box) -> Tensor:
        """Return a box of a tensor of the model, as a view of the rows of a part."""
        return link.piece.view_as_mapped(rows[link.piece.source_box(box).relative_to(part.rows).slices()])

    def _straight_and_staged(self, parts: Sequence[Part]) -> tuple[list[Transfer], list[Round]]:
        """Divide rows of this rank: transfers between file and shard, and rounds that pass through the staging buffers."""
        straight: list[Transfer] = []
        staged: list[Part] = []
        for part in parts:
            memory = self._shard_memory(part)
            if memory is None:
                staged += [replace(part, rows=rows) for rows in part.rows.split_rows(part.nbytes, self._limit)]
            else:
                straight.append(_transfer(part, memory))
        found = batches(staged, 2 * self._limit, lambda part: padded(part.nbytes))
        return straight, [Round(tuple(batch), exchanged=False) for batch in found]

    def _shard_memory(self, part: Part) -> Tensor | None:
        """Return the shard memory of the rows, or None if they must be cast, moved or rearranged."""
        boxes = list(part.boxes(self._group.index))
        if len(boxes) != 1:
            return None
        ((link, box, _),) = boxes
        view = self._in_shard(link, box)
        # Conjugated and negated views have other values than their memory, and so have tensor subclasses.
        as_in_memory = type(view) is Tensor and not (view.is_conj() or view.is_neg())
        in_order = view.device.type == "cpu" and view.is_contiguous() and link.piece.keeps_order
        as_in_file = as_in_memory and in_order and view.dtype == part.source.dtype
        return view if as_in_file and view.numel() == part.rows.numel else None

    def _run_round(self, one: Round, rows: Mapping[int, Tensor]) -> None:
        """Copy and exchange the rows of a round. `rows`: those that this rank has read or will write, by the id of the part."""
        me = self._group.index
        sends: list[Message] = []
        receives: list[Message] = []
        for part in one.parts:
            is_worker = part.worker == me
            for link, box, ranks in part.boxes(None if is_worker and one.exchanged else me):
                for other in partners(ranks, part.worker, saving=self.saving) if one.exchanged else [me]:
                    if is_worker and other == me:
                        into, values = self._in_shard(link, box), self._in_rows(part, rows[id(part)], link, box)
                        if self.saving:
                            into, values = values, into
                        into.copy_(values, non_blocking=self._pinned)
                    elif is_worker or other == me:
                        view = self._in_rows(part, rows[id(part)], link, box) if is_worker else self._in_shard(link, box)
                        dtype = (part.source if self.saving else link.target).dtype
                        message = Message(other if is_worker else part.worker, view, dtype)
                        (receives if is_worker is self.saving else sends).append(message)
        if one.exchanged:
            self.exchange.run(sends, receives)


class RowReader(_Mover):
    """Reads, computes and exchanges rows, and copies them to the shards."""

    saving = False

    def __init__(self, group: Agreement, local: Mapping[str, Tensor], reader: Reader, limit: int) -> None:
        super().__init__(group, local, limit)
        self._reader = reader
        self._computed: tuple[ComputedTensor, Tensor] | None = None  # the last one
        self.bytes_used = 0  # bytes that were read and that some rank needed

    def run(self, plan: Plan) -> None:
        """Execute a plan. Collective."""
        with torch.no_grad():
            self._group.run(lambda: self._read_own(plan.own))
            self._read_rounds(plan.rounds, self._group)

    def _read_own(self, parts: Sequence[Part]) -> None:
        straight, rounds = self._straight_and_staged(parts)
        self.bytes_used += sum(read.tensor.nbytes for read in straight)
        self._reader.run(straight)
        self._read_rounds(rounds, alone())

    def _read_rounds(self, rounds: Sequence[Round], ranks: Agreement) -> None:
        """Copy and exchange the rows of each round while the threads read the rows of the next one."""
        staging_buffers = self._staging_buffers()
        reading: dict[int, Tensor] = {}
        for number in range(len(rounds) + 1 if rounds else 0):
            read = reading
            following = rounds[number].parts if number < len(rounds) else ()
            reading = ranks.run(partial(self._begin, following, staging_buffers[number % 2]))
            if number:
                self._run_round(rounds[number - 1], read)
                staging_buffers[1 - number % 2].record_copies()

    def _begin(self, parts: Sequence[Part], staging: StagingBuffer) -> dict[int, Tensor]:
        """Wait for the rows of the previous round and start to read this one. Return the rows by the id of their part."""
        self._reader.finish()
        mine = [part for part in parts if part.worker == self._group.index]
        read = [part for part in mine if isinstance(part.source, FileTensor)]
        rows = staging.take([(part.rows.shape, part.source.dtype) for part in read])
        self._reader.begin(list(map(_transfer, read, rows)))
        found = {id(part): into for part, into in zip(read, rows)}
        for part in mine:
            if isinstance(part.source, ComputedTensor):
                found[id(part)] = self._value(part.source)[part.rows.slices()]
            else:
                used = (link.piece.mapped_box(part.rows) for link in part.links)
                self.bytes_used += sum(box.numel for box in used if box is not None) * part.source.dtype.itemsize
        return found

    def _value(self, source: ComputedTensor) -> Tensor:
        """Return the result of a function. It is cached until another tensor is computed."""
        if self._computed is None or self._computed[0] is not source:
            self._computed = None  # free the last result before the next inputs are read
            inputs = [torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in source.inputs]
            reading = RowReader(alone(), {str(number): one for number, one in enumerate(inputs)}, self._reader, self._limit)
            reading.run(plan_inputs(source))
            self.bytes_used += reading.bytes_used
            try:
                value = source.function(*inputs)
            except Exception as failure:
                raise ValueError(f"Convert: the function for '{source.name}' fails: {failure}") from failure
            if tuple(value.shape) != source.shape or value.dtype != source.dtype:
                raise ValueError(
                    f"Convert: expected the function for '{source.name}' to return {source.shape} of {source.dtype}, as on "
                    f"meta, got {tuple(value.shape)} of {value.dtype}."
                )
            self._computed = source, value
        return self._computed[1]


class RowWriter(_Mover):
    """Collects and exchanges rows of the shards, and writes them to files.

    In the background, the rows of this rank are copied, and the writes start at the end of `run`.
    """

    saving = True

    def __init__(
        self, group: Agreement, local: Mapping[str, Tensor], writer: Writer, limit: int, *, in_background: bool
    ) -> None:
        super().__init__(group, local, limit)
        self._writer, self._in_background = writer, in_background
        self._background_writes: list[Transfer] = []

    def run(self, plan: Plan) -> None:
        """Write the rows of a plan; in the background, copy the rows and start the writes. Collective."""
        with torch.no_grad():
            self._group.run(lambda: self._write_own(plan.own))
            self._write_rounds(plan.rounds, self._group)
            self._group.run(self._end)

    def _write_own(self, parts: Sequence[Part]) -> None:
        straight, rounds = self._straight_and_staged(parts)
        self._begin(straight)
        self._write_rounds(rounds, alone())
        if not self._in_background:
            self._writer.finish()

    def _write_rounds(self, rounds: Sequence[Round], ranks: Agreement) -> None:
        staging_buffers = self._staging_buffers()
        for number, one in enumerate(rounds):
            mine = [part for part in one.parts if part.worker == self._group.index]
            # A background save writes these rows after `run`, so they need memory that no later round reuses.
            if self._in_background:
                staging_buffers = self._staging_buffers()
            rows = staging_buffers[number % 2].take([(part.rows.shape, part.source.dtype) for part in mine])
            self._run_round(one, {id(part): into for part, into in zip(mine, rows)})
            ranks.run(partial(self._begin, list(map(_transfer, mine, rows))))

    def _end(self) -> None:
        if self._pinned:
            torch.accelerator.synchronize()  # the writer threads must not read host memory before the copies complete
        self._writer.begin(self._background_writes)
        if not self._in_background:
            self._writer.finish()
        self._background_writes, self._local = [], {}  # do not keep the shards alive during a background save

    def _begin(self, writes: Sequence[Transfer]) -> None:
        """Wait for the previous writes, and start `writes`. They run while the caller fills the next rows."""
        if self._in_background:
            self._background_writes += writes
        else:
            self._writer.finish()
            if self._pinned:
                torch.accelerator.synchronize()  # copies from the device to these rows must complete before they are written
            self._writer.begin(writes)

    def _shard_memory(self, part: Part) -> Tensor | None:
        # Training changes the shards during a background save, so it copies all rows.
        return None if self._in_background else super()._shard_memory(part)


def alone() -> Agreement:
    """Return the agreement of a single rank."""
    return Agreement(None, [], UnitName(""), "")


def _transfer(part: Part, rows: Tensor) -> Transfer:
    assert isinstance(part.source, FileTensor)
    return Transfer(part.source.file, part.source.offset_of(part.rows.start), rows)
