"""`load_weights()`: each rank reads its own bytes of a checkpoint, straight into its shards."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import Agreement, clean_name
from fullshard.errors import check_bool, check_int, warn_once
from fullshard.weights.allocating import AllocatedTensors, built_buffers, fill_buffers, unwritten_ids
from fullshard.weights.background import join_saves
from fullshard.weights.boxes import Box
from fullshard.weights.commit import warn_of_leftover
from fullshard.weights.converting import Calculator
from fullshard.weights.exchange import Exchange, Receive, Send, StagingBuffer
from fullshard.weights.headers import (
    ATTEMPTS,
    DTYPES,
    NAMES,
    PAUSE,
    BadFile,
    FileIdentity,
    FileTensor,
    OpenFiles,
    read_checkpoint,
    samples,
)
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, State, map_keys, nearest
from fullshard.weights.plan import Destination, LoadPlan, ReadRange, plan_load
from fullshard.weights.rounds import Round, batches
from fullshard.weights.targets import ModelEntry, ModelTensors, reshard_for, tensors_of
from fullshard.weights.transfer import Progress, Reader, Transfer, check_progress, with_total

Replicas = Literal["auto", "read"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The report of `load_weights` on this rank.

    Args:
        bytes_read: bytes of tensors that this rank read. Headers are not counted.
        bytes_useful: the part of `bytes_read` that some rank needed.
        bytes_exchanged: bytes sent to other ranks.
        seconds: total time.
        conversions: "float32 -> bfloat16" or "computed", by tensor name.
        ties: names of tied tensors whose memory was loaded under another name.
        missing: names of the model that are not in the checkpoint; only with `strict=False` or `missing`.
        unexpected: names of the checkpoint that are not in the model; only with `strict=False`.
        rules: how many tensors each rule of the key map matches.
        unwritten: names of tensors that have memory but no values, since they were on meta, or a load of them failed, and this
            checkpoint does not have them. Until they are written, the forward of their units raises; for buffers that are not
            persistent it only warns.

    Example:
        >>> load_weights(model, "checkpoint").unwritten                                       # doctest: +SKIP
        ()
    """

    bytes_read: int
    bytes_useful: int
    bytes_exchanged: int
    seconds: float
    conversions: dict[str, str] = field(default_factory=dict)
    ties: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    rules: dict[str, int] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()


def load_weights(
    model: nn.Module,
    source: Any,
    *,
    key_map: KeyMap = None,
    strict: bool = True,
    missing: Sequence[str] = (),
    threads: int = 8,
    buffer_bytes: int = 256 << 20,
    replicas: Replicas = "auto",
    buffers: Callable[[], nn.Module] | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a safetensors checkpoint into a model, sharded or not, on meta or not. Collective.

    A dim-0 shard is one range of bytes in the file. Each rank reads its own range, with several threads, directly into the
    memory of its shard, without communication. Rows that several ranks need (replicas, tensor parallelism, shards along other
    dims) are read once, in equal parts, and exchanged. A rank uses at most `buffer_bytes` of memory in addition to its shards,
    and more only for a single row of over a quarter of that, and for the tensors of a `Convert`. The call waits for a running
    background save.

    Args:
        model: parameters and buffers on meta get memory on the device of their mesh; shards with `CPUOffloadPolicy` on the
            host.
        source: a directory, an index (model.safetensors.index.json), a file, or a list of files. The first rank of the model
            reads the headers, and the others open the files that they need by the same names.
        key_map: maps names in the files to names in the model: a dict, a function (None leaves a tensor out), or rules such as
            `Rename`, `Merge`, `Split`, `Stack`, `Transpose`, `Drop` and `Convert`, applied one after the other.
        strict: whether to raise an error for names that only the model or only the checkpoint has, for conversions that round,
            and for rules that match nothing (unless they are `optional`).
        missing: regular expressions, searched in names of the model. A match may be absent from the checkpoint, as with
            `["lora_"]` for adapters.
        threads: number of threads that read at the same time.
        buffer_bytes: host memory for data that cannot be read directly into the shards: other dtypes and devices, rows for
            other ranks.
        replicas: "auto" reads rows that several ranks need once and exchanges them. With "read" each of these ranks reads
            them, and only results of `Convert` are sent.
        buffers: gives values to buffers on meta that no checkpoint has, such as the frequencies of rotary embeddings: a
            function that builds the model again, as `lambda: Llama(config)`. It is called on meta, and buffers that it makes
            from shapes and constants alone are then computed on the CPU. None leaves such buffers without values.
        progress: called periodically on each rank with the bytes read so far and the total bytes to read. An exception in it
            ends the load on all ranks.

    Returns:
        The report of this rank.

    Raises:
        ValueError: the same on every rank, before the model changes: for broken, truncated or missing files, names and shapes
            that do not match, tied tensors whose values differ, and invalid rules or options. Also later, if a file is changed
            while it is read or a function of `Convert` raises: then the tensors that were to be loaded have no values any
            more, and a forward raises until they are loaded.
        StateError: inside a forward or backward.

    Example:
        >>> with torch.device("meta"):                                                        # doctest: +SKIP
        ...     model = Llama(config)
        >>> shard_model(model, mesh=mesh)                                                     # doctest: +SKIP
        >>> load_weights(model, "Llama-3.1-8B").bytes_read                                    # doctest: +SKIP
        2007567360
    """
    began = time.perf_counter()
    tensors = tensors_of(model, prepare=reshard_for("load_weights()"))
    group = tensors.agreement("load_weights()")
    group.run(partial(_check, strict=strict, missing=missing, threads=threads, buffer_bytes=buffer_bytes, replicas=replicas))
    group.run(partial(check_progress, progress))
    group.run(join_saves)
    built = group.run(partial(built_buffers, model, buffers))
    limit = max(1, buffer_bytes // 4)
    with OpenFiles() as files:
        for attempt in range(ATTEMPTS):
            files.close()  # every attempt opens the files again, because a save may have replaced them
            state, known = _state_of(group, source, files)
            match = group.run(partial(_Match, tensors, key_map, state, strict=strict, may_miss=missing))
            if not group.all_equal(match.description() + repr((buffer_bytes, replicas)).encode()):
                raise ValueError(
                    "buffer_bytes, replicas or the tensors that key_map makes differ between ranks. Pass the same on all ranks."
                )
            plan = plan_load(
                [(entry.target, mapped) for entry, mapped in match.found],
                rank=tensors.index,
                ranks=len(tensors.ranks),
                limit=limit,
                exchanges=replicas == "auto",
            )
            if _ranks_have_same_files(group, files, plan.files(group.index), known, last=attempt == ATTEMPTS - 1):
                break
        if match.twins:
            group.run(partial(_check_twins, match, files if group.index == 0 else None, strict=strict))
        unwritten = _without_values(model, match, unwritten_ids(model, tensors.units))
        intact = set(match.missing) - set(unwritten)
        fresh = AllocatedTensors(model, tensors.units)
        try:
            group.run(partial(fresh.allocate, model))
            tensors = tensors_of(model)  # list again: `allocate` has replaced the tensors on meta
            local = {entry.target.name: entry.local for entry in tensors.entries}
            loaded = {entry.target.name: (entry.parameter, entry.plain) for entry in tensors.entries}
            on_progress = with_total(progress, plan.nbytes(group.index))
            into = [local[entry.target.name] for entry, _ in match.found]
            load = _Load(group, into, files, threads=threads, limit=limit, on_progress=on_progress)
            try:
                with torch.no_grad():
                    load.run(plan)
                group.run(files.check_unchanged)
            finally:
                load.reader.close()
        except BaseException:
            # Some shards may have new values, or memory without values: no forward may use the mixture.
            fresh.mark_all(model, _ids([one for one in tensors.entries if one.names[0] in intact]))
            raise
    for entry, _ in match.found:  # reads into memory increase no version counter
        parameter, plain = loaded[entry.target.name]
        if parameter is not None:
            parameter.note_write()
        elif plain is not None and not plain.is_inference():
            torch.autograd.graph.increment_version(plain)
    written = _ids([one for one in tensors.entries if one.names[0] not in match.missing])
    filled = fill_buffers(model, built, unwritten)
    written |= {id(buffer) for name, buffer in model.named_buffers() if clean_name(name) in filled}
    fresh.mark_remaining(written)
    return Loaded(
        bytes_read=load.reader.done,
        bytes_useful=load.bytes_used,
        bytes_exchanged=load.exchanged,
        seconds=time.perf_counter() - began,
        conversions=match.conversions,
        ties=match.ties,
        missing=match.missing,
        unexpected=match.unexpected,
        rules=match.rules,
        unwritten=tuple(name for name in unwritten if name not in filled),
    )


def _ids(entries: Sequence[ModelEntry]) -> set[int]:
    """Return the ids of sharded parameters and plain tensors."""
    return {id(entry.plain if entry.parameter is None else entry.parameter) for entry in entries}


def _without_values(model: nn.Module, match: _Match, unwritten: set[int]) -> list[str]:
    """Return the names of tensors that have no values and are not in the checkpoint."""
    read = {name for entry, _ in match.found for name in entry.names}
    tensors = (*model.named_parameters(), *model.named_buffers())
    named = ((clean_name(name), tensor) for name, tensor in tensors)
    return [
        name
        for name, one in named
        if (one.device.type == "meta" or not unwritten.isdisjoint((id(one), id(_torch.local_part(one))))) and name not in read
    ]


def _check(*, strict: object, missing: object, threads: object, buffer_bytes: object, replicas: object) -> None:
    check_bool("strict", strict)
    if isinstance(missing, str) or not isinstance(missing, Sequence) or not all(isinstance(one, str) for one in missing):
        raise ValueError(f"missing must be a list of regular expressions, got {missing!r}.")
    for pattern in missing:
        try:
            re.compile(pattern)
        except re.error as failure:
            raise ValueError(f"missing must be a list of regular expressions, got {pattern!r}: {failure}.") from failure
    for name, value in (("threads", threads), ("buffer_bytes", buffer_bytes)):
        check_int(name, value)
    if replicas not in ("auto", "read"):
        raise ValueError(f"replicas must be 'auto' or 'read', got {replicas!r}.")


def _state_of(group: Agreement, source: Any, files: OpenFiles) -> tuple[State, dict[str, FileIdentity]]:
    """Return the tensors of a checkpoint by name, and the identities of its files by path. Collective.

    The first rank reads the headers, keeps the files open and broadcasts the result.
    """

    def read() -> bytes:
        if group.index:
            return b""
        warn_of_leftover(source)
        headers = read_checkpoint(source, files)
        identities = [[header.file, *astuple(header.identity)] for header in headers if header.identity is not None]
        numbers = {header.file: number for number, header in enumerate(headers)}
        rows = [
            [t.name, numbers[t.file], NAMES[t.dtype], list(t.shape), t.offset] for header in headers for t in header.tensors
        ]
        return json.dumps([identities, rows]).encode()

    known, rows = json.loads(group.first_rank_bytes(group.run(read)))
    state = {
        name: MappedTensor.of(FileTensor(name, known[number][0], DTYPES[dtype], tuple(shape), offset))
        for name, number, dtype, shape, offset in rows
    }
    return state, {file: FileIdentity(*facts) for file, *facts in known}


def _ranks_have_same_files(
    group: Agreement, files: OpenFiles, mine: Sequence[str], known: dict[str, FileIdentity], *, last: bool
) -> bool:
    """Open the files that this rank reads. Return True if all ranks have opened the files of the first rank or copies of them.

    The result is False if a save replaced the checkpoint between the opens of two ranks. The caller then tries again.
    """

    def opened() -> list[str]:
        return [file for file in mine if not known[file].is_same(files.file(file))]

    others, missing = [], None
    try:
        others = opened()
    except BadFile as failure:
        missing = failure
    found = group.maximum(torch.tensor([missing is not None, len(others) > 0], device="cpu", dtype=torch.int32)).tolist()
    if not any(found):
        return True

    def sampled() -> bytes:
        return json.dumps({file: samples(files.file(file)) for file in known}).encode() if group.index == 0 else b""

    digests = json.loads(group.first_rank_bytes(group.run(sampled)))

    def compare() -> str | None:
        if missing is not None:
            return str(missing)
        differences = ((file, known[file].difference(files.file(file), digests[file])) for file in others)
        texts = (f"{file} has {how}. Load the same files on all ranks." for file, how in differences if how is not None)
        return next(texts, None)

    wrong = group.run(compare)
    if not group.maximum(torch.tensor([wrong is not None], device="cpu", dtype=torch.int32)).item():
        return True
    if last:
        group.run(partial(_raise, wrong))
    time.sleep(PAUSE)
    return False


def _raise(text: str | None) -> None:
    if text is not None:
        raise BadFile(text)


class _Match:
    """Assignment of the tensors of a checkpoint to the tensors of a model."""

    def __init__(
        self, tensors: ModelTensors, key_map: KeyMap, state: State, *, strict: bool, may_miss: Sequence[str] = ()
    ) -> None:
        self.rules: dict[str, int] = {}  # how many tensors each rule of the key map matches
        state = map_keys(key_map, state, strict=strict, counts=self.rules)
        # pairs of a tensor of the model and its values in the checkpoint
        self.found: list[tuple[ModelEntry, MappedTensor]] = []
        self.conversions: dict[str, str] = {}  # "float32 -> bfloat16" or "computed", by tensor name
        # the values of a tied tensor under its name that is loaded, and under another one that the checkpoint has as well
        self.twins: list[tuple[MappedTensor, MappedTensor]] = []
        ties: list[str] = []  # names of tied tensors that are loaded under another name
        missing: list[str] = []  # names of the model that are not in the checkpoint
        used: set[str] = set()
        wrong: list[str] = []
        for entry in tensors.entries:
            there = [name for name in entry.names if name in state]
            used |= set(there)
            if not there:
                missing.append(entry.names[0])
                continue
            ties += [name for name in entry.names if name != there[0]]
            self.found.append((entry, state[there[0]]))
            wrong += self._compare(there[0], entry, state[there[0]], strict=strict)
            self.twins += [(state[there[0]], state[name]) for name in there[1:]]
            others = [name for name in there[1:] if state[name].shape != entry.target.shape]  # of a tie, only the first is read
            wrong += [f"{name} is {state[name].shape} in the file and {entry.target.shape} in the model" for name in others]
        self.ties, self.missing = tuple(ties), tuple(missing)
        self.unexpected = tuple(name for name in state if name not in used)  # names of the checkpoint that are not in the model
        if strict:
            gone = [name for name in self.missing if not any(re.search(pattern, name) for pattern in may_miss)]
            wrong += _named("the model has {}, but the checkpoint does not", gone, self.unexpected)
            wrong += _named("the checkpoint has {}, but the model does not", self.unexpected, self.missing)
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(f"The checkpoint does not match the model: {'; '.join(wrong[:8])}{more}.")

    def description(self) -> bytes:
        """Return a description of the assignment that must be equal on all ranks, because each plans the reads by itself."""
        pieces = (
            (entry.target.name, one.dtype, [(p.source.name, p.geometry) for p in one.pieces]) for entry, one in self.found
        )
        return repr(list(pieces)).encode("utf-8", "backslashreplace")

    def _compare(self, name: str, entry: ModelEntry, mapped: MappedTensor, *, strict: bool) -> list[str]:
        target = entry.target
        if mapped.shape != target.shape:
            return [f"{name} is {mapped.shape} in the file and {target.shape} in the model"]
        if any(isinstance(piece.source, ComputedTensor) for piece in mapped.pieces):
            self.conversions[name] = "computed"
        if mapped.dtype != target.dtype:
            was, becomes = (str(dtype).removeprefix("torch.") for dtype in (mapped.dtype, target.dtype))
            self.conversions[name] = f"{was} -> {becomes}"
            if strict and not _represents_all(target.dtype, mapped.dtype):
                return [
                    f"{name} is {was} in the file and {becomes} in the model, which rounds it (pass strict=False to allow it)"
                ]
        return []


def _check_twins(match: _Match, files: OpenFiles | None, *, strict: bool) -> None:
    """Compare tied tensors that the checkpoint has under several names; only the first is loaded. `files` None: skip this."""
    for one, other in match.twins if files is not None else ():
        sources = [mapped.pieces[0].source for mapped in (one, other)]
        whole = all(mapped.pieces == MappedTensor.of(source).pieces for mapped, source in zip((one, other), sources))
        first, second = sources
        # Only bytes are compared, so both must be tensors of the files as they are, in one dtype.
        if not (whole and isinstance(first, FileTensor) and isinstance(second, FileTensor) and first.dtype == second.dtype):
            continue
        assert files is not None
        if not files.same_bytes(first, second):
            text = (
                f"'{one.name}' and '{other.name}' are one parameter of the model, but their values in the checkpoint differ. "
                "Build the model without this tie, or leave one of them out by key_map=[Drop(...)]"
            )
            if strict:
                raise ValueError(f"{text}.")
            warn_once(f"{text}; '{one.name}' is loaded.")


def _named(text: str, names: Sequence[str], others: Sequence[str]) -> list[str]:
    texts = [text.format(f"'{name}'") + nearest(name, others) for name in names[:4]]
    return [*texts, text.format(f"{len(names) - 4} more")] if len(names) > 4 else texts


def _represents_all(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return True if `dtype` represents every value of `other` exactly."""
    if dtype == other:
        return True
    if other is torch.bool:
        return True
    if dtype is torch.bool or (other.is_complex and not dtype.is_complex):
        return False
    if dtype.is_complex:
        return _represents_all(dtype.to_real(), other.to_real() if other.is_complex else other)
    if not other.is_floating_point:
        its = torch.iinfo(other)
        if dtype.is_floating_point:
            return max(its.max, -its.min) <= 2 / torch.finfo(dtype).eps  # integers up to this one have no gaps
        mine = torch.iinfo(dtype)
        return mine.min <= its.min and its.max <= mine.max
    if not dtype.is_floating_point:
        return False
    one, two = torch.finfo(dtype), torch.finfo(other)
    return one.eps <= two.eps and one.max >= two.max and one.smallest_normal <= two.smallest_normal


# --- bytes ---


class _Load:
    """Reads, exchanges and writes the rows of one load.

    Rows that only this rank needs use two halves of the buffer: one is read while the other is written to the shards. A round
    uses four quarters: rows that are being read, rows that were read, rows to send, and rows to receive.
    """

    def __init__(
        self,
        group: Agreement,
        local: Sequence[Tensor],
        files: OpenFiles,
        *,
        threads: int,
        limit: int,
        on_progress: Callable[[int], object] | None,
    ) -> None:
        self._group, self._local, self._limit = group, local, limit
        self.reader = Reader(files, threads=threads, on_progress=on_progress)
        self._calculator = Calculator(self.reader)
        self._exchange = Exchange(group)
        self._bytes_used = 0

    @property
    def bytes_used(self) -> int:
        """Bytes that were read and that some rank needed."""
        return self._bytes_used + self._calculator.bytes_used

    @property
    def exchanged(self) -> int:
        """Bytes sent to other ranks."""
        return self._exchange.sent

    def run(self, plan: LoadPlan) -> None:
        """Execute a plan. Collective."""
        self._group.run(lambda: self._read_own(plan.own))
        if plan.rounds:
            self._run_rounds(plan.rounds)

    def _staging_buffers(self) -> list[StagingBuffer]:
        pinned = any(tensor.device.type != "cpu" for tensor in self._local)
        return [StagingBuffer(torch.device("cpu"), pinned=pinned) for _ in range(2)]

    def _begin(self, staging: StagingBuffer, parts: Sequence[ReadRange]) -> list[Tensor]:
        """Start to read the rows of these parts. Return the tensors that receive them."""
        rows = staging.take([(part.rows.shape, part.source.dtype) for part in parts])
        self.reader.begin([self._read(part, into) for part, into in zip(parts, rows)])
        return rows

    def _read(self, part: ReadRange, into: Tensor) -> Transfer:
        assert isinstance(part.source, FileTensor)
        return Transfer(part.source.file, part.source.offset_of(part.rows.start), into)

    # --- rows that only this rank needs ---

    def _read_own(self, parts: Sequence[ReadRange]) -> None:
        straight: list[Transfer] = []
        staged: list[ReadRange] = []
        for part in parts:
            into = self._memory(part)
            if into is None:
                staged += [replace(part, rows=rows) for rows in part.rows.split_rows(part.nbytes, self._limit)]
            else:
                self._bytes_used += into.numel() * into.itemsize
                straight.append(self._read(part, into))
        self.reader.run(straight)
        staging_buffers = self._staging_buffers()
        before: Callable[[], None] = _nothing
        for number, batch in enumerate(batches(staged, 2 * self._limit, attrgetter("nbytes"))):
            staging = staging_buffers[number % 2]
            rows = self._begin(staging, batch)
            before()  # write the previous batch while the threads read this one
            self.reader.finish()
            before = partial(self._write_all, batch, rows, staging)
        before()

    def _memory(self, part: ReadRange) -> Tensor | None:
        """Return the shard memory for the rows of a part, or None if the rows must be cast, moved or rearranged first."""
        (destination,) = part.destinations
        view = self._view(part, destination)
        if view is None or view.numel() != part.rows.numel or view.dtype != part.source.dtype:
            return None
        if type(view) is not Tensor or view.is_conj() or view.is_neg():  # has other values than its memory
            return None
        return view if view.device.type == "cpu" and view.is_contiguous() and destination.piece.keeps_order else None

    def _write_all(self, parts: Sequence[ReadRange], rows: Sequence[Tensor], staging: StagingBuffer) -> None:
        for part, read in zip(parts, rows):
            for destination in part.destinations:
                self._write(part, read, destination)
        staging.record_copies()

    # --- rows that several ranks need ---

    def _run_rounds(self, rounds: Sequence[Round[ReadRange]]) -> None:
        """Exchange the rows of each round while the threads read the rows of the next one."""
        staging_buffers = self._staging_buffers()
        reading: dict[int, Tensor] = {}
        for number in range(len(rounds) + 1):
            read = reading
            following = rounds[number].parts if number < len(rounds) else ()
            reading = self._group.run(partial(self._begin_round, following, staging_buffers[number % 2]))
            if number:
                self._run_round(rounds[number - 1], read)
                staging_buffers[1 - number % 2].record_copies()

    def _begin_round(self, parts: Sequence[ReadRange], staging: StagingBuffer) -> dict[int, Tensor]:
        """Wait for the rows of the previous round and start to read this one. Return the rows by the id of their part."""
        self.reader.finish()
        mine = [part for part in parts if part.reader == self._group.index]
        read = [part for part in mine if isinstance(part.source, FileTensor)]
        rows = {id(part): into for part, into in zip(read, self._begin(staging, read))}
        for part in mine:
            if isinstance(part.source, ComputedTensor):
                rows[id(part)] = self._calculator.value(part.source)[part.rows.slices()]
        return rows

    def _run_round(self, exchange_round: Round[ReadRange], rows: dict[int, Tensor]) -> None:
        me = self._group.index
        sends: list[Send] = []
        receives: list[Receive] = []
        for part in exchange_round.parts:
            for destination in part.destinations:
                if part.reader == me:
                    for box, ranks in destination.needs(part.rows):
                        value = self._values_for(part, rows[id(part)], destination, box)
                        sends += [Send(rank, value, destination.target.dtype) for rank in ranks if rank != me]
                elif (view := self._view(part, destination)) is not None:
                    receives.append(Receive(part.reader, view))
        if exchange_round.exchanged:
            self._exchange.run(sends, receives)
        for part in exchange_round.parts:
            if part.reader == me:
                for destination in part.destinations:
                    self._write(part, rows[id(part)], destination)

    # --- from rows to shards ---

    def _values_for(self, part: ReadRange, rows: Tensor, destination: Destination, box: Box) -> Tensor:
        """Return a view of `rows` with the values for a box of the target, with the dims of the target."""
        return destination.piece.view_as_mapped(rows[destination.piece.source_box(box).relative_to(part.rows).slices()])

    def _view(self, part: ReadRange, destination: Destination) -> Tensor | None:
        """Return the elements of this rank's shard that a part writes, or None if there are none."""
        me = self._group.index
        box, own_box = destination.in_target(part.rows, me), destination.target.shard_map.boxes[me]
        if box is None or own_box is None:
            return None
        return self._local[destination.number].view(own_box.shape)[box.relative_to(own_box).slices()]

    def _write(self, part: ReadRange, rows: Tensor, destination: Destination) -> None:
        if isinstance(part.source, FileTensor):
            found = destination.piece.mapped_box(part.rows)
            self._bytes_used += 0 if found is None else found.numel * rows.itemsize
        box, view = destination.in_target(part.rows, self._group.index), self._view(part, destination)
        if box is not None and view is not None:
            view.copy_(self._values_for(part, rows, destination, box), non_blocking=True)


def _nothing() -> None:
    """Do nothing: there is no batch to write before the first one."""
