"""`save_weights()`: each rank writes its own rows of a safetensors checkpoint, which then replaces the old one atomically."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from fullshard.core import Agreement, Ranks
from fullshard.errors import check_bool, check_float_dtype, check_int
from fullshard.weights.allocating import check_values
from fullshard.weights.background import Saving, StoreRankGroup, join_saves
from fullshard.weights.commit import Extra, Replacement, new_token
from fullshard.weights.ema import EMA
from fullshard.weights.exchange import Exchange, Receive, Send, StagingBuffer
from fullshard.weights.headers import SINGLE, FileTensor
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, map_keys
from fullshard.weights.layout import CheckpointLayout, lay_out_mapped
from fullshard.weights.rounds import Round, batches
from fullshard.weights.save_plan import RowSource, SavePlan, WriteRange, plan_save
from fullshard.weights.steps import Steps
from fullshard.weights.targets import ModelTensors, from_first_rank, reshard_for, tensors_of, with_values
from fullshard.weights.transfer import Progress, Transfer, Writer, check_progress, with_total


@dataclass(frozen=True, slots=True)
class Saved:
    """The report of `save_weights` on this rank.

    Args:
        bytes_written: bytes of tensors that this rank wrote.
        bytes_exchanged: bytes sent to other ranks.
        seconds: total time.
        files: names of the weights files.
        directory: the directory of the files.
        others: names of other files in the directory that may be weights, such as the files of an older model; on the first
            rank only.

    Example:
        >>> save_weights(model, "checkpoint").files                                           # doctest: +SKIP
        ('model.safetensors',)
    """

    bytes_written: int
    bytes_exchanged: int
    seconds: float
    files: tuple[str, ...]
    directory: str
    others: tuple[str, ...] = ()


@overload
def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = ...,
    dtype: torch.dtype | None = ...,
    key_map: KeyMap = ...,
    extra: Extra | None = ...,
    weights: EMA | None = ...,
    step: int | None = ...,
    keep: int | None = ...,
    filename: str = ...,
    each_rank: Callable[[Path], object] | None = ...,
    threads: int = ...,
    buffer_bytes: int = ...,
    progress: Progress | None = ...,
    background: Literal[False] = ...,
) -> Saved: ...


@overload
def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = ...,
    dtype: torch.dtype | None = ...,
    key_map: KeyMap = ...,
    extra: Extra | None = ...,
    weights: EMA | None = ...,
    step: int | None = ...,
    keep: int | None = ...,
    filename: str = ...,
    each_rank: Callable[[Path], object] | None = ...,
    threads: int = ...,
    buffer_bytes: int = ...,
    progress: Progress | None = ...,
    background: Literal[True],
) -> Saving[Saved]: ...


def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    key_map: KeyMap = None,
    extra: Extra | None = None,
    weights: EMA | None = None,
    step: int | None = None,
    keep: int | None = None,
    filename: str = SINGLE,
    each_rank: Callable[[Path], object] | None = None,
    threads: int = 8,
    buffer_bytes: int = 256 << 20,
    progress: Progress | None = None,
    background: bool = False,
) -> Saved | Saving[Saved]:
    """Save a model as an ordinary safetensors checkpoint, byte for byte as `save_pretrained` writes it. Collective.

    Every rank writes its own rows to their final place in the files. Replicated rows are divided among their ranks; the first
    rank writes tensors that are not sharded, since other ranks may have other values of buffers. Ranks that have only columns
    of a tensor first send them to each other, so that each writes complete rows. A rank uses at most `buffer_bytes` of memory
    in addition to its shards; more for a single row of over a quarter of that, and with `background` also a copy of its rows.
    The new checkpoint is written to a temporary directory next to `directory`, and the two are swapped atomically at the end:
    `directory` always contains either the complete old checkpoint or the complete new one.

    Args:
        model: sharded or not.
        directory: on a file system that all ranks share. Other files in it are kept, including files that are created during
            the save. A second save to it at the same time raises an error. A program that opens several files by path at the
            end of a save may get files of both checkpoints. `load_weights` does not; and with `step`, no program does that
            resolves `latest` once and opens the files of that step. If the directory cannot be swapped (it is a mount point or
            the current directory, or its parent is not writable), a warning is issued, and files are moved into it one by one.
            If there are several weights files, they get names that are unique to this save, and their index is moved last.
        max_shard_bytes: maximum bytes of the tensors in one file. A larger tensor gets a file of its own.
        dtype: dtype of the floating-point tensors in the files. None keeps the dtype of the shards.
        key_map: maps names of the model to names in the files, as in `load_weights`, but without `Convert`.
        extra: further files of the checkpoint, written by the first rank: a dict of names and contents (text, bytes, or the
            path of a file), or a function that gets a folder and writes files into it.
        weights: moving averages to save instead of the parameters, in the dtype of the averages unless `dtype` is given.
        step: training step. The checkpoint becomes the directory `step-{step}` in `directory`, next to the directories of other
            steps, and at the end the link `latest` points to it.
        keep: number of most recently saved steps to keep. None keeps all.
        filename: name of the weights file if there is a single one, such as "adapter_model.safetensors" to save only adapters
            (with `key_map=[Keep("lora_")]`). Several files are numbered before the suffix. Weights with other names in the
            directory are kept, and the report lists them.
        each_rank: called on every rank with the path of the temporary directory, to add files of this rank to the checkpoint,
            such as its optimizer state. The file names must differ between ranks.
        threads: number of threads that write at the same time.
        buffer_bytes: host memory for data that cannot be written directly from the shards: other dtypes and devices, rows of
            other ranks.
        progress: called periodically on each rank with the bytes written so far and the total bytes to write. With
            `background`, it is called in the thread of the save. An exception in it ends the save on all ranks.
        background: True copies the rows of this rank to host memory, returns, and writes the copies in a thread while training
            goes on and changes the weights. Each rank needs memory for its rows. The thread runs no collectives: the ranks
            coordinate through the store of the process group.

    Returns:
        The report of this rank; with `background` a `Saving`, whose `wait()` returns the report. The next `save_weights` or
        `load_weights` and the end of the process wait for it, too.

    Raises:
        ValueError: on every rank, before anything is written: if the disk is too full, rules do not match, parameters have
            no values, ranks have other values of a parameter that is written once, the directory is a file or the root, or
            another save to it is running.
        RuntimeError: on every rank: if a rank could not write, now or in an earlier background save. The directory is
            unchanged. If everything is written and only the swap fails, the text has the path of the new, complete
            checkpoint, which is kept until a later save to this directory succeeds.
        StateError: inside a forward or backward.

    Example:
        >>> save_weights(model, "checkpoint", extra={"config.json": config.to_json_string()})  # doctest: +SKIP
    """
    began = time.perf_counter()

    def checked_steps() -> Steps | None:
        check_progress(progress)
        for name, value in (("max_shard_bytes", max_shard_bytes), ("threads", threads), ("buffer_bytes", buffer_bytes)):
            check_int(name, value)
        check_float_dtype("dtype", dtype, optional=True)
        check_bool("background", background)
        if weights is not None and not isinstance(weights, EMA):
            raise ValueError(f"weights must be an EMA or None, got {type(weights).__name__}.")
        if keep is not None and step is None:
            raise ValueError(f"keep={keep!r} needs step=. Pass step= as well.")
        if not isinstance(filename, str) or os.path.basename(filename) != filename or not filename.endswith(".safetensors"):
            raise ValueError(
                f"filename must be a name that ends in .safetensors, such as 'adapter_model.safetensors', got {filename!r}."
            )
        return None if step is None else Steps(directory, step, keep)

    tensors = tensors_of(model, prepare=reshard_for("save_weights()"))
    steps = tensors.agreement("save_weights()").run(checked_steps)
    if weights is not None:
        tensors = with_values(tensors, weights.values())
    tensors = from_first_rank(tensors)
    group = tensors.agreement("save_weights()")
    group.run(join_saves)
    group.run(lambda: check_values(model, tensors.units, "save_weights()"))
    layout, outputs = group.run(lambda: _outputs(tensors, key_map, dtype, max_shard_bytes, filename))
    group.run(lambda: tensors.check_copies(group))
    options = repr((buffer_bytes, weights is not None, each_rank is not None, background, step, keep)).encode()
    if not group.all_equal(_fingerprint(layout, outputs) + options):
        raise ValueError(
            "One of key_map, dtype, max_shard_bytes, filename, buffer_bytes, weights, each_rank, background, step and keep "
            "differs between ranks. Pass the same on all ranks."
        )
    limit = max(1, buffer_bytes // 4)
    plan = plan_save(outputs, rank=tensors.index, ranks=len(tensors.ranks), limit=limit)
    where = directory if steps is None else steps.directory
    token = group.first_rank_bytes(group.run(lambda: new_token(where)).encode()).decode()
    replacement = Replacement(where, token, filename)
    writer = Writer(replacement.path, threads=threads, on_progress=with_total(progress, plan.nbytes(tensors.index)))
    save = _Save(group, tensors, layout, replacement, steps, began, writer, limit=limit, in_background=background)
    # All ranks connect before any of them continues, because connecting to a store whose process has ended blocks for minutes.
    connect = partial(StoreRankGroup, token, group.index, len(group.ranks))
    store_group = group.run(connect) if background else None
    try:
        group.run(save.prepare)
        group.run(save.check_shared)
        save.run(plan)
        group.run(lambda: save.add_extra(extra))
        if each_rank is not None:
            group.run(lambda: save.add_rank_files(each_rank))
        if store_group is None:
            return save.finish(group)
    except BaseException:
        save.discard()
        if store_group is not None:
            store_group.abandon()
        raise
    return Saving(save.replacement.directory, partial(save.finish_in_background, store_group))


def _outputs(
    tensors: ModelTensors, key_map: KeyMap, dtype: torch.dtype | None, max_shard_bytes: int, filename: str
) -> tuple[CheckpointLayout, list[tuple[FileTensor, MappedTensor]]]:
    """Return the layout of the files, and (place in a file, values from tensors of the model) for each tensor in them."""
    tensors.check_not_on_meta()
    mapped = map_keys(key_map, {entry.names[0]: MappedTensor.of(entry.target) for entry in tensors.entries})
    for name, one in mapped.items():
        if any(isinstance(piece.source, ComputedTensor) for piece in one.pieces):
            raise ValueError(
                f"save_weights() does not support Convert, got one for '{name}'. Save first, then convert the files."
            )
    if tensors.entries and not mapped:
        raise ValueError("key_map leaves no tensor to save: its rules drop all names, or its function returned None for all.")
    parameters = sum(entry.target.nbytes // entry.target.dtype.itemsize for entry in tensors.entries if entry.is_parameter)
    return lay_out_mapped(mapped, dtype, max_shard_bytes=max_shard_bytes, parameters=parameters, name=filename)


def _fingerprint(layout: CheckpointLayout, outputs: list[tuple[FileTensor, MappedTensor]]) -> bytes:
    """Return a description of the files and their tensors, which must be equal on all ranks."""
    pieces = [[(p.source.name, p.geometry) for p in mapped.pieces] for _, mapped in outputs]
    return repr((layout, pieces)).encode("utf-8", "backslashreplace")


class _Save:
    """Collects, exchanges and writes the rows of one save.

    For complete rows of this rank, the buffer (`buffer_bytes`) has two halves: one is written to the files while the other is
    filled. Rows that are divided between ranks are exchanged in rounds. For these it has four quarters: rows that are being
    filled, rows that are being written, rows to send, and rows to receive.
    """

    def __init__(
        self,
        group: Agreement,
        tensors: ModelTensors,
        layout: CheckpointLayout,
        replacement: Replacement,
        steps: Steps | None,
        began: float,
        writer: Writer,
        *,
        limit: int,
        in_background: bool,
    ) -> None:
        """Prepare to save, without writing anything."""
        self._group, self._layout, self._limit, self._began, self._in_background = group, layout, limit, began, in_background
        self._local = {entry.target.name: entry.local for entry in tensors.entries}
        self._is_first = group.index == 0
        self._pinned = any(local.device.type != "cpu" for local in self._local.values())
        self._exchange = Exchange(group)
        self._background_writes: list[Transfer] = []  # started by `_end_run`
        self.replacement, self._steps = replacement, steps
        self.writer = writer

    def prepare(self) -> None:
        """Create the files, on the first rank."""
        if self._is_first:
            if self._steps is not None:
                self._steps.check()
            self.replacement.prepare(self._layout)

    def check_shared(self) -> None:
        """Raise ValueError if this rank does not see the directory that the first rank has made."""
        if not self.replacement.path.is_dir():
            raise ValueError(
                f"save_weights(): this rank does not see what the first rank writes, {self.replacement.path}. Pass the same "
                "directory on all ranks, on a file system that they share."
            )

    @torch.no_grad()
    def run(self, plan: SavePlan) -> None:
        """Write the rows of a plan; in the background, copy the rows and start the writes. Collective."""
        self._group.run(lambda: self._write_own(plan.own))
        staging_buffers = self._staging_buffers()
        for number, exchange_round in enumerate(plan.rounds):
            self._run_round(exchange_round, staging_buffers[number % 2])
        self._group.run(self._end_run)

    def _end_run(self) -> None:
        if self._pinned:
            torch.accelerator.synchronize()  # the writer threads must not read host memory before the copies complete
        if self._in_background:
            self.writer.begin(self._background_writes)
        else:
            self.writer.finish()
        self._background_writes, self._local = [], {}  # do not keep the shards alive during a background save

    def add_extra(self, extra: Extra | None) -> None:
        """Add the files of the argument `extra`, on the first rank."""
        if self._is_first:
            self.replacement.add(extra)

    def add_rank_files(self, write: Callable[[Path], object]) -> None:
        """Call `write` with the path of the temporary directory, and sync all files except the weights to disk."""
        before = self.replacement.weights()
        write(self.replacement.path)
        self.replacement.check_weights(before, "each_rank")
        self.replacement.sync_others()

    def finish(self, group: Ranks) -> Saved:
        """Finish the writes, sync them to disk and move the checkpoint into place. Collective."""
        try:
            group.run(self.writer.finish)
            group.run(self.writer.sync)
            group.run(self._commit)
        except BaseException:
            self.discard()
            raise
        self.writer.close()
        files = tuple(self.replacement.name_in_place(file.name) for file in self._layout.files)
        seconds = time.perf_counter() - self._began
        where, others = str(self.replacement.directory), self.replacement.others
        return Saved(self.writer.done, self._exchange.sent, seconds, files, where, others)

    def _commit(self) -> None:
        if self._is_first:
            self.replacement.commit()
            if self._steps is not None:
                self._steps.publish()

    def finish_in_background(self, group: StoreRankGroup) -> Saved:
        """Call `finish` in the thread of a background save."""
        try:
            return self.finish(group)
        finally:
            group.close()

    def discard(self) -> None:
        """Stop writing and remove the temporary directory."""
        self.writer.close()
        if self._is_first:
            self.replacement.discard()

    def _staging_buffers(self) -> list[StagingBuffer]:
        return [StagingBuffer(torch.device("cpu"), pinned=self._pinned) for _ in range(2)]

    def _rows(self, staging: StagingBuffer, parts: Sequence[WriteRange]) -> list[Tensor]:
        """Return host memory for the rows of these parts."""
        # A background save writes these rows after `run`, so they need memory that no later batch reuses.
        if self._in_background:
            options: dict[str, Any] = {"device": "cpu", "pin_memory": self._pinned}
            return [torch.empty(part.rows.shape, dtype=part.output.dtype, **options) for part in parts]
        return staging.take([(part.rows.shape, part.output.dtype) for part in parts])

    def _begin(self, writes: Sequence[Transfer]) -> None:
        """Wait for the previous writes, and start `writes`. They run while the caller fills the next rows.

        A background save starts all writes at the end of `run`.
        """
        if self._in_background:
            self._background_writes += writes
        else:
            self.writer.finish()
            if self._pinned:
                torch.accelerator.synchronize()  # copies from the device to these rows must complete before they are written
            self.writer.begin(writes)

    def _write_own(self, parts: Sequence[WriteRange]) -> None:
        """Write rows that this rank has completely: straight from the shards where possible, the others through the buffer."""
        straight: list[Transfer] = []
        staged: list[WriteRange] = []
        for part in parts:
            # Training changes the shards during a background save, so it copies all rows.
            memory = None if self._in_background else self._shard_memory(part)
            if memory is None:
                staged += [replace(part, rows=rows) for rows in part.rows.split_rows(part.nbytes, self._limit)]
            else:
                straight.append(_write(part, memory))
        self._begin(straight)
        staging_buffers = self._staging_buffers()
        for number, batch in enumerate(batches(staged, 2 * self._limit, attrgetter("nbytes"))):
            rows = self._rows(staging_buffers[number % 2], batch)
            for part, into in zip(batch, rows):
                self._fill(part, into, part.sources())
            self._begin([_write(part, into) for part, into in zip(batch, rows)])
        if not self._in_background:
            self.writer.finish()

    def _shard_memory(self, part: WriteRange) -> Tensor | None:
        """Return the shard memory of the rows, or None if they must be cast, moved or assembled first."""
        sources = list(part.sources())
        if len(sources) != 1 or not sources[0].piece.keeps_order:
            return None
        value = self._value(sources[0])
        # Conjugated and negated views have other values than their memory, and so have tensor subclasses.
        as_in_memory = type(value) is Tensor and not (value.is_conj() or value.is_neg())
        as_in_file = as_in_memory and value.is_contiguous() and value.device.type == "cpu" and value.dtype == part.output.dtype
        return value if as_in_file and value.numel() == part.rows.numel else None

    def _value(self, row_source: RowSource) -> Tensor:
        """Return the values of a source as a view of this rank's shard, with the dims that the output has."""
        source = row_source.piece.source
        own_box = source.shard_map.boxes[self._group.index]  # type: ignore[union-attr]
        assert own_box is not None
        local = self._local[source.name].view(own_box.shape)
        return row_source.piece.view_as_mapped(local[row_source.box.relative_to(own_box).slices()])

    def _fill(self, part: WriteRange, rows: Tensor, sources: Iterable[RowSource]) -> None:
        """Copy sources from the shards of this rank into `rows`, the memory of a part's rows, and cast them."""
        # `at` of a source is the box in the output; `box` has the same elements in the tensor of the model.
        for row_source in sources:
            into = rows[row_source.at.relative_to(part.rows).slices()]
            into.copy_(self._value(row_source), non_blocking=self._pinned)

    def _run_round(self, exchange_round: Round[WriteRange], staging: StagingBuffer) -> None:
        """Send and receive parts of rows so that each writer has complete rows, and start to write the rows of this rank."""
        me = self._group.index
        mine = [part for part in exchange_round.parts if part.writer == me]
        rows = {id(part): into for part, into in zip(mine, self._rows(staging, mine))}
        sends: list[Send] = []
        receives: list[Receive] = []
        for part in exchange_round.parts:
            for row_source in part.sources():
                if row_source.rank == part.writer == me:
                    self._fill(part, rows[id(part)], [row_source])
                elif part.writer == me:
                    into = rows[id(part)][row_source.at.relative_to(part.rows).slices()]
                    receives.append(Receive(row_source.rank, into))
                elif row_source.rank == me:
                    sends.append(Send(part.writer, self._value(row_source), part.output.dtype))
        if exchange_round.exchanged:  # equal on all ranks; False if every writer has its rows already
            self._exchange.run(sends, receives)
        self._group.run(lambda: self._begin([_write(part, rows[id(part)]) for part in mine]))


def _write(part: WriteRange, rows: Tensor) -> Transfer:
    return Transfer(part.output.file, part.output.offset_of(part.rows.start), rows)
