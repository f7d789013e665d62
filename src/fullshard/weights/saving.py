"""`save_weights()`: each rank writes its own rows of an ordinary checkpoint, which is in its place in one step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from fullshard.runtime.runtime import runtime_of
from fullshard.weights.allocating import check_values
from fullshard.weights.background import Saving, StoreMeeting, join_saves
from fullshard.weights.commit import Extra, Replacement, new_token
from fullshard.weights.ema import EMA
from fullshard.weights.exchange import Exchange, Receive, Send
from fullshard.weights.headers import SINGLE, FileTensor
from fullshard.weights.key_map import Computed, KeyMap, Mapped, map_keys
from fullshard.weights.layout import CheckpointLayout, lay_out
from fullshard.weights.meeting import Meeting
from fullshard.weights.progress import Progress, check_progress, of_total
from fullshard.weights.reading import place_in_file
from fullshard.weights.rounds import Round
from fullshard.weights.save_plan import SavePlan, Supply, Written, plan_save
from fullshard.weights.staging import Stage, batches
from fullshard.weights.steps import Steps
from fullshard.weights.targets import ModelTensors, standing_for, tensors_of
from fullshard.weights.writing import Write, Writer


@dataclass(frozen=True, slots=True)
class Saved:
    """The report of `save_weights` on this rank.

    Args:
        bytes_written: by this rank, of tensors.
        bytes_exchanged: sent to other ranks.
        seconds: in all.
        files: names of the files with weights.
        directory: where they are.
        others: further files there that may be weights, and that this save did not write, as those of an older model; on the
            first rank.

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
    """Save a model as an ordinary checkpoint of safetensors, in the files and bytes of `save_pretrained`. Collective.

    Every rank writes the rows that it has to where they are in the end; rows that several have are shared among them, and
    columns are exchanged before. No rank holds more than `buffer_bytes` beside its shards. All is written beside the directory
    and exchanged with it in one step at the end: in every case it holds the old checkpoint whole, or the new one.

    Args:
        model: sharded or not.
        directory: on a file system that all ranks share. Other files in it are kept, also those that somebody makes there
            meanwhile. Two saves at a time are refused. Whoever opens files of it by their paths while a save ends may get files
            of both checkpoints; `load_weights` does not, and with `step` nobody does. A directory that cannot be exchanged (a
            mount point, the current one, one in a directory without write permission) gets the files one by one, with a
            warning: weights of several files have names of this save alone, and their index comes last.
        max_shard_bytes: of the tensors in one file; a tensor that is larger has a file of its own.
        dtype: of floating-point tensors in the files; None keeps that of the shards.
        key_map: from names of the model to those in the files, as of `load_weights`; without `Convert`.
        extra: further files of the same commit: names and their contents (text, bytes, or the path of a file), or a function
            that writes to the folder it is given; the first rank does.
        weights: averages that stand for the model's own parameters, in their dtype unless `dtype` says another.
        step: of the training: the checkpoint is the directory `step-{step}` in `directory`, beside those of other steps, and
            the link `latest` leads to it in the end.
        keep: how many steps stay, those that were saved last; None keeps all.
        filename: of the file of weights if there is one, as "adapter_model.safetensors" for adapters alone (with `Keep`);
            several are numbered before its ending. Weights of other names in the directory are kept, and named in the report.
        each_rank: called on every rank with the path of the new content, to write files of its own into the same commit, as
            the optimizer's part of a rank; their names must differ from rank to rank.
        threads: that write at a time.
        buffer_bytes: of host memory for what cannot be written from the shards: other dtypes and devices, rows of other ranks.
        progress: called now and then on each rank with the bytes that it has written and the bytes that it writes in all, with
            `background` in its thread; what it raises ends the save on all ranks.
        background: whether to copy what this rank writes to the memory of the host, return, and write behind the training,
            which may change the weights meanwhile. It costs each rank the memory of its rows. No messages are sent behind:
            the ranks settle through the store of the process group.

    Returns:
        The report of this rank; with `background` a `Saving`, whose `wait()` returns that. The next `save_weights` or
        `load_weights` waits for it, too, and so does the end of the process.

    Raises:
        ValueError: on every rank, before anything is written: if there is no room on the disk, rules do not fit, parameters
            have no values, the directory is a file or the root, or another save to it is under way.
        RuntimeError: on every rank: if a rank could not write, now or in the background before; the directory is as it was.
            If all is written and only the exchange fails, the text says where the new checkpoint lies whole; it stays there
            until a later save succeeds.
        StateError: inside a forward or backward.

    Example:
        >>> save_weights(model, "checkpoint", extra={"config.json": config.to_json_string()})  # doctest: +SKIP
    """
    began = time.perf_counter()
    check_progress(progress)
    _check(max_shard_bytes=max_shard_bytes, threads=threads, buffer_bytes=buffer_bytes, dtype=dtype, background=background)
    if keep is not None and step is None:
        raise ValueError(f"keep={keep!r} is of steps: pass step=, too")
    if not isinstance(filename, str) or os.path.basename(filename) != filename or not filename.endswith(".safetensors"):
        raise ValueError(f"filename must be a name that ends in .safetensors, as 'adapter_model.safetensors', got {filename!r}")
    steps = None if step is None else Steps(directory, step, keep)
    tensors = tensors_of(model)
    for unit in tensors.units:
        runtime_of(unit).requests.reshard(unit, doing="save_weights()")
        runtime_of(unit).requests.refresh(unit)
    if weights is not None:
        tensors = standing_for(tensors_of(model), weights.values())
    meeting = Meeting(tensors, "save_weights()")
    meeting.run(join_saves)
    meeting.run(lambda: check_values(model, tensors.units, "save_weights()"))
    layout, outputs = meeting.run(lambda: _outputs(tensors, key_map, dtype, max_shard_bytes, filename))
    meeting.check_alike("key_map, dtype or max_shard_bytes", _told(layout, outputs))
    limit = max(1, buffer_bytes // 4)
    plan = plan_save(outputs, rank=tensors.index, ranks=len(tensors.ranks), limit=limit)
    where = directory if steps is None else steps.directory
    token = meeting.first(meeting.run(lambda: new_token(where)).encode()).decode()
    replacement = Replacement(where, token, filename)
    writer = Writer(replacement.path, threads=threads, told=of_total(progress, plan.nbytes(tensors.index)))
    save = _Save(meeting, tensors, layout, replacement, steps, began, writer, limit=limit, keeps=background)
    # All ranks connect before one of them goes on: a connection to one that has ended waits for minutes.
    connect = partial(StoreMeeting, token, meeting.index, len(meeting.ranks))
    behind = meeting.run(connect) if background else None
    try:
        meeting.run(save.prepare)
        save.run(plan)
        meeting.run(lambda: save.add(extra))
        if each_rank is not None:
            meeting.run(lambda: save.add_of_rank(each_rank))
        if behind is None:
            return save.finish(meeting)
    except BaseException:
        save.discard()
        if behind is not None:
            behind.abandon()
        raise
    return Saving(save.replacement.directory, partial(save.finish_behind, behind))


def _check(*, max_shard_bytes: object, threads: object, buffer_bytes: object, dtype: object, background: object) -> None:
    for name, value in (("max_shard_bytes", max_shard_bytes), ("threads", threads), ("buffer_bytes", buffer_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if not isinstance(background, bool):
        raise ValueError(f"background must be True or False, got {background!r}")


def _outputs(
    tensors: ModelTensors, key_map: KeyMap, dtype: torch.dtype | None, max_shard_bytes: int, filename: str
) -> tuple[CheckpointLayout, list[tuple[FileTensor, Mapped]]]:
    """The files, and what each tensor in them is made of."""
    on_meta = [held.names[0] for held in tensors.held if held.local.device.type == "meta"]
    if on_meta:
        raise ValueError(f"'{on_meta[0]}' is on meta and has no values: load_weights() or materialize() the model before")
    mapped = map_keys(key_map, {held.names[0]: Mapped.of(held.target) for held in tensors.held})
    for name, one in mapped.items():
        if any(isinstance(piece.source, Computed) for piece in one.pieces):
            raise ValueError(f"save_weights() takes no Convert, as for '{name}': save, and convert the files afterwards")
    named = [(name, _dtype_of(one.dtype, dtype), one.shape) for name, one in mapped.items()]
    parameters = sum(held.target.nbytes // held.target.dtype.itemsize for held in tensors.held if held.is_parameter)
    together = {name: one.together for name, one in mapped.items() if one.together is not None}
    layout = lay_out(named, max_shard_bytes=max_shard_bytes, parameters=parameters, together=together, name=filename)
    places = {tensor.name: tensor for file in layout.files for tensor in file.tensors}
    return layout, [(places[name], one) for name, one in mapped.items()]


def _told(layout: CheckpointLayout, outputs: list[tuple[FileTensor, Mapped]]) -> bytes:
    """What all ranks must have alike: the files, and what is where in them."""
    pieces = [[(p.source.name, p.at, p.origin, p.dims) for p in mapped.pieces] for _, mapped in outputs]
    return repr((layout, pieces)).encode("utf-8", "backslashreplace")


def _dtype_of(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return stored if wanted is None or not stored.is_floating_point else wanted


class _Save:
    """Collects rows, exchanges and writes them.

    limit: bytes of a quarter of the buffer. Of rows of which this rank has all, half of the buffer is written while the other
    half is filled; in a round, a quarter each is filled, is being written, is sent, and comes.
    """

    def __init__(
        self,
        meeting: Meeting,
        tensors: ModelTensors,
        layout: CheckpointLayout,
        replacement: Replacement,
        steps: Steps | None,
        began: float,
        writer: Writer,
        *,
        limit: int,
        keeps: bool,
    ) -> None:
        """keeps: whether rows are copied, and written when `finish` comes to it."""
        self._meeting, self._layout, self._limit, self._began, self._keeps = meeting, layout, limit, began, keeps
        self._local = {held.target.name: held.local for held in tensors.held}
        self._is_first = meeting.index == 0
        self._pinned = any(local.device.type != "cpu" for local in self._local.values())
        self._exchange = Exchange(meeting)
        self._kept: list[Write] = []
        self.replacement, self._steps = replacement, steps
        self.writer = writer

    def prepare(self) -> None:
        """Make the files."""
        if self._is_first:
            if self._steps is not None:
                self._steps.check()
            self.replacement.prepare(self._layout)

    @torch.no_grad()
    def run(self, plan: SavePlan) -> None:
        """Carry out a plan. Collective."""
        self._meeting.run(lambda: self._write_own(plan.own))
        stages = self._two_stages()
        for number, turn in enumerate(plan.rounds):
            self._run_round(turn, stages[number % 2])
        self._meeting.run(self._end_run)

    def _end_run(self) -> None:
        if self._pinned:
            torch.accelerator.synchronize()  # copies to kept memory are under way
        if self._keeps:
            self.writer.begin(self._kept)
        else:
            self.writer.finish()
        self._kept, self._local = [], {}

    def add(self, extra: Extra | None) -> None:
        """Add further files."""
        if self._is_first:
            self.replacement.add(extra)

    def add_of_rank(self, write: Callable[[Path], object]) -> None:
        """Add files that this rank writes, and have them on the disk."""
        before = self.replacement.weights()
        write(self.replacement.path)
        self.replacement.check_weights(before, "each_rank")
        self.replacement.sync_others()

    def finish(self, meeting: Meeting | StoreMeeting) -> Saved:
        """Have all of it on the disk, and in its place. Collective."""
        try:
            meeting.run(self.writer.finish)
            meeting.run(self.writer.sync)
            meeting.run(self._commit)
        except BaseException:
            self.discard()
            raise
        self.writer.close()
        files = tuple(self.replacement.name_in_place(file.name) for file in self._layout.files)
        seconds = time.perf_counter() - self._began
        where, others = str(self.replacement.directory), self.replacement.others
        return Saved(self.writer.written, self._exchange.sent, seconds, files, where, others)

    def _commit(self) -> None:
        if self._is_first:
            self.replacement.commit()
            if self._steps is not None:
                self._steps.publish()

    def finish_behind(self, meeting: StoreMeeting) -> Saved:
        """`finish`, in a thread."""
        try:
            return self.finish(meeting)
        finally:
            meeting.close()

    def discard(self) -> None:
        """Nothing comes of it."""
        self.writer.close()
        if self._is_first:
            self.replacement.discard()

    def _two_stages(self) -> list[Stage]:
        return [Stage(torch.device("cpu"), pinned=self._pinned) for _ in range(2)]

    def _rows(self, stage: Stage, parts: Sequence[Written]) -> list[Tensor]:
        """Memory for the rows of these parts: of their own if they are kept."""
        if self._keeps:
            options: dict[str, Any] = {"device": "cpu", "pin_memory": self._pinned}
            return [torch.empty(part.rows.shape, dtype=part.output.dtype, **options) for part in parts]
        return stage.take([(part.rows.shape, part.output.dtype) for part in parts])

    def _begin(self, writes: Sequence[Write]) -> None:
        """Have rows written, while the next ones are filled; the rows of the time before are written when it returns."""
        if self._keeps:
            self._kept += writes
        else:
            self.writer.finish()
            if self._pinned:
                torch.accelerator.synchronize()
            self.writer.begin(writes)

    def _write_own(self, parts: Sequence[Written]) -> None:
        straight: list[Write] = []
        staged: list[Written] = []
        for part in parts:
            memory = None if self._keeps else self._memory(part)
            if memory is None:
                staged += _pieces(part, self._limit)
            else:
                straight.append(_write(part, memory))
        self._begin(straight)
        stages = self._two_stages()
        for number, batch in enumerate(batches(staged, 2 * self._limit, _nbytes)):
            rows = self._rows(stages[number % 2], batch)
            for part, into in zip(batch, rows):
                self._fill(part, into, part.supplies())
            self._begin([_write(part, into) for part, into in zip(batch, rows)])
        if not self._keeps:
            self.writer.finish()

    def _memory(self, part: Written) -> Tensor | None:
        """The rows where they are; None if they must be cast, moved or put together."""
        supplies = list(part.supplies())
        if len(supplies) != 1 or not supplies[0].piece.keeps_order:
            return None
        value = self._value(supplies[0])
        straight = value.is_contiguous() and value.device.type == "cpu" and value.dtype == part.output.dtype
        return value if straight and value.numel() == part.rows.numel else None

    def _value(self, supply: Supply) -> Tensor:
        """The values that this rank has, with the dims of the output; a view."""
        source = supply.piece.source
        held = source.holdings.boxes[self._meeting.index]  # type: ignore[union-attr]
        assert held is not None
        local = self._local[source.name].view(held.shape)
        return supply.piece.arranged(local[supply.box.relative_to(held).slices()])

    def _fill(self, part: Written, rows: Tensor, supplies: Iterable[Supply]) -> None:
        """Copy and cast what this rank has to the rows of a part."""
        for supply in supplies:
            into = rows[supply.at.relative_to(part.rows).slices()]
            into.copy_(self._value(supply), non_blocking=self._pinned)

    def _run_round(self, turn: Round[Written], stage: Stage) -> None:
        me = self._meeting.index
        mine = [part for part in turn.parts if part.writer == me]
        rows = {id(part): into for part, into in zip(mine, self._rows(stage, mine))}
        sends: list[Send] = []
        receives: list[Receive] = []
        for part in turn.parts:
            for supply in part.supplies():
                if supply.rank == part.writer == me:
                    self._fill(part, rows[id(part)], [supply])
                elif part.writer == me:
                    into = rows[id(part)][supply.at.relative_to(part.rows).slices()]
                    receives.append(Receive(supply.rank, into))
                elif supply.rank == me:
                    sends.append(Send(part.writer, self._value(supply), part.output.dtype))
        if turn.exchanged:
            self._exchange.run(sends, receives)
        self._meeting.run(lambda: self._begin([_write(part, rows[id(part)]) for part in mine]))


def _write(part: Written, rows: Tensor) -> Write:
    first = part.rows.start[0] if part.output.shape else 0
    return Write(part.output.file, place_in_file(part.output, first), rows)


def _pieces(part: Written, limit: int) -> list[Written]:
    """The same rows, so many at a time as fit in the buffer."""
    if not part.output.shape or part.nbytes <= limit:
        return [part]
    first, last = part.rows.start[0], part.rows.stop[0]
    step = max(1, (last - first) * limit // part.nbytes)
    return [replace(part, rows=part.rows.rows(at, min(last, at + step))) for at in range(first, last, step)]


def _nbytes(part: Written) -> int:
    return part.nbytes


__all__ = ["Saved", "save_weights"]
