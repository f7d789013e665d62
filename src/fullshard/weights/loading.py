"""`load_weights()`: each rank reads its own bytes of a checkpoint, straight into its shards."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fullshard import _torch
from fullshard.core import Agreement, clean_name
from fullshard.errors import check_bool, check_int, warn_once
from fullshard.weights.allocating import AllocatedTensors, built_buffers, fill_buffers, unwritten_ids
from fullshard.weights.background import join_saves
from fullshard.weights.commit import warn_of_leftover
from fullshard.weights.headers import (
    ATTEMPTS,
    PAUSE,
    BadFile,
    FileIdentity,
    FileTensor,
    Header,
    OpenFiles,
    read_checkpoint,
    samples,
)
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, State, map_keys, nearest
from fullshard.weights.moving import RowReader
from fullshard.weights.plan import plan_load
from fullshard.weights.targets import ModelEntry, ModelTensors, tensors_of
from fullshard.weights.transfer import Progress, Reader, check_progress


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
    replicas: Literal["auto", "read"] = "auto",
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
    tensors = tensors_of(model, prepare=lambda unit: unit.reshard(doing="load_weights()"))
    group = tensors.agreement("load_weights()")
    group.run(partial(_check, strict, missing, threads, buffer_bytes, replicas, progress))
    group.run(join_saves)
    built = group.run(partial(built_buffers, model, buffers))
    limit = max(1, buffer_bytes // 4)
    with OpenFiles() as files:
        for attempt in range(ATTEMPTS):
            files.close()  # every attempt opens the files again, because a save may have replaced them
            state, known = _state_of(group, source, files)
            match = group.run(partial(_Match, tensors, key_map, state, strict=strict, may_miss=missing))
            pieces = [(e.target.name, one.dtype, [(p.source.name, p.geometry) for p in one.pieces]) for e, one in match.found]
            # Each rank plans the reads by itself.
            if not group.all_equal(repr((pieces, buffer_bytes, replicas)).encode("utf-8", "backslashreplace")):
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
            mine = sorted({tensor.file for tensor, _ in plan.transfers()})
            if _ranks_have_same_files(group, files, mine, known, last=attempt == ATTEMPTS - 1):
                break
        if match.twins:
            group.run(lambda: _check_twins(match, files, strict=strict) if group.index == 0 else None)
        unwritten = _without_values(model, match, unwritten_ids(model, tensors.units))
        intact = set(match.missing) - set(unwritten)
        fresh = AllocatedTensors(model, tensors.units)
        try:
            group.run(partial(fresh.allocate, model))
            tensors = tensors_of(model)  # list again: `allocate` has replaced the tensors on meta
            entries = {entry.target.name: entry for entry in tensors.entries}
            with closing(Reader(files, threads=threads, progress=progress, total=plan.nbytes)) as reader:
                rows = RowReader(group, {name: entry.local for name, entry in entries.items()}, reader, limit)
                rows.run(plan)
                group.run(files.check_unchanged)
        except BaseException:
            # Some shards may have new values, or memory without values: no forward may use the mixture.
            fresh.mark_all(_ids([one for one in tensors.entries if one.names[0] in intact]))
            raise
    for entry in (entries[entry.target.name] for entry, _ in match.found):  # reads into memory increase no version counter
        if entry.parameter is not None:
            entry.parameter.note_write()
        elif entry.plain is not None and not entry.plain.is_inference():
            torch.autograd.graph.increment_version(entry.plain)
    written = _ids([one for one in tensors.entries if one.names[0] not in match.missing])
    filled = fill_buffers(model, built, unwritten)
    fresh.mark_remaining(written | set(map(id, filled.values())))
    return Loaded(
        bytes_read=reader.done,
        bytes_useful=rows.bytes_used,
        bytes_exchanged=rows.exchange.sent,
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
    named = ((clean_name(name), one) for name, one in (*model.named_parameters(), *model.named_buffers()))
    return [
        name
        for name, one in named
        if (one.device.type == "meta" or not unwritten.isdisjoint((id(one), id(_torch.local_part(one))))) and name not in read
    ]


def _check(strict: object, missing: object, threads: object, buffer_bytes: object, replicas: object, progress: object) -> None:
    check_bool("strict", strict)
    check_progress(progress)
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
        return pickle.dumps(read_checkpoint(source, files))

    headers: list[Header] = pickle.loads(group.first_rank_bytes(group.run(read)))
    state = {tensor.name: MappedTensor.of(tensor) for header in headers for tensor in header.tensors}
    return state, {header.file: header.identity for header in headers}


def _ranks_have_same_files(
    group: Agreement, files: OpenFiles, mine: Sequence[str], known: dict[str, FileIdentity], *, last: bool
) -> bool:
    """Open the files that this rank reads. Return True if all ranks have opened the files of the first rank or copies of them.

    The result is False if a save replaced the checkpoint between the opens of two ranks. The caller then tries again; if this
    was the last attempt, raise BadFile.
    """
    others, missing = list[str](), None
    try:
        others = [file for file in mine if not known[file].is_same(files.file(file))]
    except BadFile as failure:
        missing = failure
    if not group.maximum(torch.tensor([missing is not None or len(others) > 0], device="cpu", dtype=torch.int32)).item():
        return True

    def sampled() -> bytes:
        return json.dumps({file: samples(files.file(file)) for file in known}).encode() if group.index == 0 else b""

    digests = json.loads(group.first_rank_bytes(group.run(sampled)))

    def compare() -> None:
        if missing is not None:
            raise missing
        for file in others:
            how = known[file].difference(files.file(file), digests[file])
            if how is not None:
                raise BadFile(f"{file} has {how}. Load the same files on all ranks.")

    try:
        group.run(compare)
    except ValueError:
        if last:
            raise
        time.sleep(PAUSE)
        return False
    return True


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
            name, shape, dtype = there[0], entry.target.shape, entry.target.dtype  # of a tie, only the first one is read
            ties += [other for other in entry.names if other != name]
            self.found.append((entry, state[name]))
            self.twins += [(state[name], state[other]) for other in there[1:]]
            misfits = [one for one in there if state[one].shape != shape]
            wrong += [f"{one} is {state[one].shape} in the file and {shape} in the model" for one in misfits]
            if any(isinstance(piece.source, ComputedTensor) for piece in state[name].pieces):
                self.conversions[name] = "computed"
            if state[name].dtype != dtype and name not in misfits:
                was, becomes = (str(one).removeprefix("torch.") for one in (state[name].dtype, dtype))
                self.conversions[name] = f"{was} -> {becomes}"
                if strict and not _represents_all(dtype, state[name].dtype):
                    rounds = f"{name} is {was} in the file and {becomes} in the model, which rounds it"
                    wrong.append(f"{rounds} (pass strict=False to allow it)")
        self.ties, self.missing = tuple(ties), tuple(missing)
        self.unexpected = tuple(name for name in state if name not in used)  # names of the checkpoint that are not in the model
        if strict:
            gone = [name for name in self.missing if not any(re.search(pattern, name) for pattern in may_miss)]
            wrong += _named("the model has {}, but the checkpoint does not", gone, self.unexpected)
            wrong += _named("the checkpoint has {}, but the model does not", self.unexpected, self.missing)
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(f"The checkpoint does not match the model: {'; '.join(wrong[:8])}{more}.")


def _check_twins(match: _Match, files: OpenFiles, *, strict: bool) -> None:
    """Compare tied tensors that the checkpoint has under several names; only the first is loaded."""
    for one, other in match.twins:
        sources = [mapped.pieces[0].source for mapped in (one, other)]
        whole = all(mapped.pieces == MappedTensor.of(source).pieces for mapped, source in zip((one, other), sources))
        first, second = sources
        # Only bytes are compared, so both must be tensors of the files as they are, in one dtype.
        if not (whole and isinstance(first, FileTensor) and isinstance(second, FileTensor) and first.dtype == second.dtype):
            continue
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
    if dtype == other or other is torch.bool:
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
