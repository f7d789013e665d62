"""`load_weights()`: each rank reads its own bytes of a checkpoint, straight into its shards."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullshard.runtime.runtime import runtime_of
from fullshard.weights.allocating import allocate, mark_all
from fullshard.weights.background import join_saves
from fullshard.weights.boxes import Box
from fullshard.weights.buffers import built_buffers, fill_buffers
from fullshard.weights.commit import warn_of_leftover
from fullshard.weights.computing import Calculator
from fullshard.weights.exchange import Exchange, Receive, Send
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
from fullshard.weights.key_map import Computed, KeyMap, Mapped, State, map_keys
from fullshard.weights.meeting import Meeting
from fullshard.weights.plan import LoadPlan, Part, Use, plan_load
from fullshard.weights.progress import Progress, check_progress, of_total
from fullshard.weights.reading import Read, Reader, place_in_file
from fullshard.weights.rounds import Round
from fullshard.weights.staging import Stage, batches
from fullshard.weights.targets import Held, ModelTensors, tensors_of
from fullshard.weights.texts import nearest

Replicas = Literal["auto", "read"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The report of `load_weights` on this rank.

    Args:
        bytes_read: of tensors; headers, which the first rank reads, are not counted.
        bytes_useful: of these that some rank needed.
        bytes_exchanged: sent to other ranks.
        seconds: in all.
        conversions: by name, "float32 -> bfloat16", or "computed".
        ties: names that share their memory with another one of the model, which was loaded.
        missing: names of the model that the checkpoint does not have; only without `strict`.
        unexpected: names of the checkpoint that the model does not have; only without `strict`.
        rules: of each rule of the key map, how many tensors it fits.
        unwritten: names of tensors that have memory now, and no values: buffers that no checkpoint holds, and what was on
            meta and is missing, without `strict`. Forwards of their units raise, or warn of such buffers, until written.

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
    """Load a checkpoint of safetensors into a model, sharded or not, on meta or not. Collective.

    A shard that is cut along dim 0 is one range of bytes of the file: each rank reads its own, by several threads, into the
    memory of its shard, and nothing is sent. Rows that several ranks need (replicas, tensor parallelism, cuts along other dims)
    are read once, in equal parts, and exchanged. No rank holds more than its shards and `buffer_bytes`. A save under way
    in the background is waited for.

    Args:
        model: parameters and buffers on meta get memory, on the device of their mesh, or the host's with `CPUOffloadPolicy`.
        source: a directory, an index (model.safetensors.index.json), a file, or a list of files; the first rank of the model
            reads their headers, and the others open the files they need, by the same names.
        key_map: of names in the files those in the model: a dict, a function (None leaves a tensor out), or rules as `Rename`,
            `Merge`, `Split`, `Stack`, `Transpose`, `Drop` and `Convert`, applied one after the other.
        strict: whether names that only one of both has, conversions that round, and rules that fit nothing (unless they are
            `optional`) are errors.
        missing: regular expressions, found anywhere in names that the checkpoint need not have, as `["lora_"]` of adapters.
        threads: that read at a time.
        buffer_bytes: of host memory for what cannot be read into the shards: other dtypes and devices, rows for other ranks.
        replicas: "auto" reads once what several ranks need; with "read" each of them reads it, and nothing is sent.
        buffers: builds the model anew, as in `lambda: Llama(config)`; called on the meta device, for the values of buffers on
            meta that no checkpoint has, as frequencies of rotary embeddings. None leaves them without values.
        progress: called now and then on each rank with the bytes that it has read and the bytes that it reads in all; what it
            raises ends the load on all ranks.

    Returns:
        The report of this rank.

    Raises:
        ValueError: the same on every rank, before the model changed: for files that are broken, truncated or not there, names
            and shapes that do not fit, and rules that cannot be.
        StateError: inside a forward or backward.

    Example:
        >>> with torch.device("meta"):                                                        # doctest: +SKIP
        ...     model = Llama(config)
        >>> shard_model(model, mesh=mesh)                                                     # doctest: +SKIP
        >>> load_weights(model, "Llama-3.1-8B").bytes_read                                    # doctest: +SKIP
        2007567360
    """
    began = time.perf_counter()
    _check(strict=strict, missing=missing, threads=threads, buffer_bytes=buffer_bytes, replicas=replicas)
    check_progress(progress)
    tensors = tensors_of(model)
    for unit in tensors.units:
        runtime_of(unit).requests.reshard(unit, doing="load_weights()")
        runtime_of(unit).requests.refresh(unit)
    meeting = Meeting(tensors, "load_weights()")
    meeting.run(join_saves)
    built = meeting.run(partial(built_buffers, model, buffers))
    limit = max(1, buffer_bytes // 4)
    with OpenFiles() as files:
        for attempt in range(ATTEMPTS):
            files.close()
            state, known = _state_of(meeting, source, files)
            match = meeting.run(partial(_match, tensors, key_map, state, strict=strict, missing=missing))
            meeting.check_alike("the tensors that key_map makes", match.digest())
            plan = plan_load(
                [(held.target, mapped) for held, mapped in match.found],
                rank=tensors.index,
                ranks=len(tensors.ranks),
                limit=limit,
                exchanges=replicas == "auto",
            )
            if _are_one_checkpoint(meeting, files, plan.files(meeting.index), known, last=attempt == ATTEMPTS - 1):
                break
        lacking = _lacking(model, match)
        fresh = allocate(model, tensors)
        tensors = tensors_of(model)  # what was on meta is another tensor now
        local = {held.target.name: held.local for held in tensors.held}
        told = of_total(progress, plan.nbytes(meeting.index))
        into = [local[held.target.name] for held, _ in match.found]
        load = _Load(meeting, into, files, threads=threads, limit=limit, told=told)
        try:
            with torch.no_grad():
                load.run(plan)
            meeting.run(files.check_unchanged)
        except BaseException:
            mark_all(model, tensors.units)
            raise
        finally:
            load.reader.close()
    for unit in tensors.units:
        runtime_of(unit).requests.refresh(unit)
        unit.log_write("load_weights()")
    written = {id(held.parameter or held.plain) for held in tensors.held if held.target.name not in match.missing}
    filled = fill_buffers(model, built, lacking)
    written |= {id(buffer) for name, buffer in model.named_buffers() if name in filled}
    fresh.mark_left(written)
    return Loaded(
        bytes_read=load.reader.read,
        bytes_useful=load.useful,
        bytes_exchanged=load.exchanged,
        seconds=time.perf_counter() - began,
        conversions=match.conversions,
        ties=match.ties,
        missing=match.missing,
        unexpected=match.unexpected,
        rules=match.rules,
        unwritten=tuple(name for name in lacking if name not in filled),
    )


def _lacking(model: nn.Module, match: _Match) -> list[str]:
    """The names of what is on meta and the checkpoint does not have."""
    read = {name for held, _ in match.found for name in held.names}
    held = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in held if tensor.device.type == "meta" and name not in read]


def _check(*, strict: object, missing: object, threads: object, buffer_bytes: object, replicas: object) -> None:
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    if isinstance(missing, str) or not isinstance(missing, Sequence) or not all(isinstance(one, str) for one in missing):
        raise ValueError(f"missing must be a list of regular expressions, got {missing!r}")
    for pattern in missing:
        try:
            re.compile(pattern)
        except re.error as failure:
            raise ValueError(f"missing has {pattern!r}, which is no regular expression: {failure}") from failure
    for name, value in (("threads", threads), ("buffer_bytes", buffer_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if replicas not in ("auto", "read"):
        raise ValueError(f"replicas must be 'auto' or 'read', got {replicas!r}")


def _state_of(meeting: Meeting, source: Any, files: OpenFiles) -> tuple[State, dict[str, FileIdentity]]:
    """The tensors of a checkpoint by name, and its files, as the first rank reads them, which has them open then."""

    def read() -> bytes:
        if meeting.index:
            return b""
        warn_of_leftover(source)
        headers = read_checkpoint(source, files)
        identities = [[header.file, *astuple(header.identity)] for header in headers if header.identity is not None]
        numbers = {header.file: number for number, header in enumerate(headers)}
        told = [
            [t.name, numbers[t.file], NAMES[t.dtype], list(t.shape), t.offset] for header in headers for t in header.tensors
        ]
        return json.dumps([identities, told]).encode()

    known, told = json.loads(meeting.first(meeting.run(read)))
    state = {
        name: Mapped.of(FileTensor(name, known[number][0], DTYPES[dtype], tuple(shape), offset))
        for name, number, dtype, shape, offset in told
    }
    return state, {file: FileIdentity(*facts) for file, *facts in known}


def _are_one_checkpoint(
    meeting: Meeting, files: OpenFiles, mine: Sequence[str], known: dict[str, FileIdentity], *, last: bool
) -> bool:
    """Open the files that this rank reads, and see whether all ranks have those of the first one, or copies of them.

    They have not if a save puts another checkpoint into its place in this moment: then it is tried again.

    Raises:
        BadFile: on every rank, on the `last` attempt.
    """

    def opened() -> list[str]:
        return [file for file in mine if not known[file].is_same(files.file(file))]

    others, missing = [], None
    try:
        others = opened()
    except BadFile as failure:
        missing = failure
    found = meeting.maximum(torch.tensor([missing is not None, len(others) > 0], device="cpu", dtype=torch.int32)).tolist()
    if not any(found):
        return True

    def sampled() -> bytes:
        return json.dumps({file: samples(files.file(file)) for file in known}).encode() if meeting.index == 0 else b""

    digests = json.loads(meeting.first(meeting.run(sampled)))

    def compare() -> str | None:
        if missing is not None:
            return str(missing)
        differences = ((file, known[file].difference(files.file(file), digests[file])) for file in others)
        return next((f"{file} has {how}: the files differ" for file, how in differences if how is not None), None)

    wrong = meeting.run(compare)
    if not meeting.maximum(torch.tensor([wrong is not None], device="cpu", dtype=torch.int32)).item():
        return True
    if last:
        meeting.run(partial(_raise, wrong))
    time.sleep(PAUSE)
    return False


def _raise(text: str | None) -> None:
    if text is not None:
        raise BadFile(text)


class _Match:
    """Which tensor of a checkpoint goes to which of a model. found: pairs of both."""

    def __init__(
        self, tensors: ModelTensors, state: State, counts: dict[str, int], *, strict: bool, may_miss: Sequence[str] = ()
    ) -> None:
        self.rules = counts
        self.found: list[tuple[Held, Mapped]] = []
        self.conversions: dict[str, str] = {}
        ties: list[str] = []
        missing: list[str] = []
        used: set[str] = set()
        wrong: list[str] = []
        for held in tensors.held:
            there = [name for name in held.names if name in state]
            used |= set(there)
            if not there:
                missing.append(held.names[0])
                continue
            ties += [name for name in held.names if name != there[0]]
            self.found.append((held, state[there[0]]))
            wrong += self._compare(there[0], held, state[there[0]], strict=strict)
        self.ties, self.missing = tuple(ties), tuple(missing)
        self.unexpected = tuple(name for name in state if name not in used)
        if strict:
            gone = [name for name in self.missing if not any(re.search(pattern, name) for pattern in may_miss)]
            wrong += _named("the model has {}, which the checkpoint does not", gone, self.unexpected)
            wrong += _named("the checkpoint has {}, which the model does not", self.unexpected, self.missing)
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(wrong[:8])}{more}")

    def digest(self) -> bytes:
        """What all ranks must have alike, or they would read one thing and expect another."""
        pieces = (
            (held.target.name, one.dtype, [(p.source.name, p.at, p.origin, p.dims) for p in one.pieces])
            for held, one in self.found
        )
        return repr(list(pieces)).encode("utf-8", "backslashreplace")

    def _compare(self, name: str, held: Held, mapped: Mapped, *, strict: bool) -> list[str]:
        target = held.target
        if mapped.shape != target.shape:
            return [f"{name} is {mapped.shape} in the file, {target.shape} in the model"]
        if any(isinstance(piece.source, Computed) for piece in mapped.pieces):
            self.conversions[name] = "computed"
        if mapped.dtype != target.dtype:
            was, becomes = (str(dtype).removeprefix("torch.") for dtype in (mapped.dtype, target.dtype))
            self.conversions[name] = f"{was} -> {becomes}"
            if strict and not _holds(target.dtype, mapped.dtype):
                return [f"{name} is {was} in the file, {becomes} in the model, which rounds it: pass strict=False to have that"]
        return []


def _match(tensors: ModelTensors, key_map: KeyMap, state: State, *, strict: bool, missing: Sequence[str]) -> _Match:
    counts: dict[str, int] = {}
    return _Match(tensors, map_keys(key_map, state, strict=strict, counts=counts), counts, strict=strict, may_miss=missing)


def _named(text: str, names: Sequence[str], others: Sequence[str]) -> list[str]:
    told = [text.format(f"'{name}'") + nearest(name, others) for name in names[:4]]
    return [*told, text.format(f"{len(names) - 4} more")] if len(names) > 4 else told


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype has every value that another one has."""
    if not (dtype.is_floating_point and other.is_floating_point):
        return torch.promote_types(dtype, other) == dtype and not (dtype.is_floating_point or dtype.is_complex)
    one, two = torch.finfo(dtype), torch.finfo(other)
    return one.eps <= two.eps and one.max >= two.max and one.smallest_normal <= two.smallest_normal


# --- bytes ---


class _Load:
    """Reads, exchanges and writes. local: of each target, in the order of the plan, this rank's memory.

    limit: bytes of a quarter of the buffer. Of rows that this rank alone needs, half of the buffer is read while the other half
    is written; in a round, a quarter each is read, was read, is sent, and comes.
    """

    def __init__(
        self,
        meeting: Meeting,
        local: Sequence[Tensor],
        files: OpenFiles,
        *,
        threads: int,
        limit: int,
        told: Callable[[int], object] | None,
    ) -> None:
        self._meeting, self._local, self._limit = meeting, local, limit
        self.reader = Reader(files, threads=threads, told=told)
        self._calculator = Calculator(self.reader)
        self._exchange = Exchange(meeting)
        self._useful = 0

    @property
    def useful(self) -> int:
        """Bytes that were read and needed."""
        return self._useful + self._calculator.useful

    @property
    def exchanged(self) -> int:
        """Bytes that were sent to other ranks."""
        return self._exchange.sent

    def run(self, plan: LoadPlan) -> None:
        """Carry out a plan. Collective."""
        self._meeting.run(lambda: self._read_own(plan.own))
        if plan.rounds:
            self._run_rounds(plan.rounds)

    def _two_stages(self) -> list[Stage]:
        pinned = any(tensor.device.type != "cpu" for tensor in self._local)
        return [Stage(torch.device("cpu"), pinned=pinned) for _ in range(2)]

    def _begin(self, stage: Stage, parts: Sequence[Part]) -> list[Tensor]:
        """Have the rows of these parts read. Returns where they will be."""
        rows = stage.take([(part.rows.shape, part.source.dtype) for part in parts])
        self.reader.begin([self._read(part, into) for part, into in zip(parts, rows)])
        return rows

    def _read(self, part: Part, into: Tensor) -> Read:
        assert isinstance(part.source, FileTensor)
        first = part.rows.start[0] if part.source.shape else 0
        return Read(part.source.file, place_in_file(part.source, first), into)

    # --- rows that this rank alone needs ---

    def _read_own(self, parts: Sequence[Part]) -> None:
        straight: list[Read] = []
        staged: list[Part] = []
        for part in parts:
            into = self._memory(part)
            if into is None:
                staged += self._pieces(part)
            else:
                self._useful += into.numel() * into.itemsize
                straight.append(self._read(part, into))
        self.reader.run(straight)
        stages = self._two_stages()
        before: Callable[[], None] = _nothing
        for number, batch in enumerate(batches(staged, 2 * self._limit, _nbytes)):
            stage = stages[number % 2]
            rows = self._begin(stage, batch)
            before()
            self.reader.finish()
            before = partial(self._write_all, batch, rows, stage)
        before()

    def _memory(self, part: Part) -> Tensor | None:
        """Where the rows of a part can be read to as they are; None if they must be cast, moved or taken apart."""
        (use,) = part.uses
        view = self._view(part, use)
        if view is None or view.numel() != part.rows.numel or view.dtype != part.source.dtype:
            return None
        return view if view.device.type == "cpu" and view.is_contiguous() and use.piece.keeps_order else None

    def _pieces(self, part: Part) -> list[Part]:
        """The same rows, so many at a time as fit in the buffer."""
        if not part.source.shape:
            return [part]
        first, last = part.rows.start[0], part.rows.stop[0]
        step = max(1, (last - first) * self._limit // max(1, part.nbytes))
        return [replace(part, rows=part.rows.rows(at, min(last, at + step))) for at in range(first, last, step)]

    def _write_all(self, parts: Sequence[Part], rows: Sequence[Tensor], stage: Stage) -> None:
        for part, read in zip(parts, rows):
            for use in part.uses:
                self._write(part, read, use)
        stage.note_copies()

    # --- rows that several need ---

    def _run_rounds(self, rounds: Sequence[Round[Part]]) -> None:
        """The rows of a round are exchanged while those of the next one are read."""
        stages = self._two_stages()
        reading: dict[int, Tensor] = {}
        for number in range(len(rounds) + 1):
            read = reading
            following = rounds[number].parts if number < len(rounds) else ()
            reading = self._meeting.run(partial(self._begin_round, following, stages[number % 2]))
            if number:
                self._run_round(rounds[number - 1], read)
                stages[1 - number % 2].note_copies()

    def _begin_round(self, parts: Sequence[Part], stage: Stage) -> dict[int, Tensor]:
        """Wait for the rows of the round before, and have those of this one read. Returns where they will be, by id."""
        self.reader.finish()
        mine = [part for part in parts if part.reader == self._meeting.index]
        read = [part for part in mine if isinstance(part.source, FileTensor)]
        rows = {id(part): into for part, into in zip(read, self._begin(stage, read))}
        for part in mine:
            if isinstance(part.source, Computed):
                rows[id(part)] = self._calculator.value(part.source)[part.rows.slices()]
        return rows

    def _run_round(self, turn: Round[Part], rows: dict[int, Tensor]) -> None:
        me = self._meeting.index
        sends: list[Send] = []
        receives: list[Receive] = []
        for part in turn.parts:
            for use in part.uses:
                if part.reader == me:
                    for box, ranks in use.needs(part.rows):
                        value = self._cut(part, rows[id(part)], use, box)
                        sends += [Send(rank, value, use.target.dtype) for rank in ranks if rank != me]
                elif (view := self._view(part, use)) is not None:
                    receives.append(Receive(part.reader, view))
        if turn.exchanged:
            self._exchange.run(sends, receives)
        for part in turn.parts:
            if part.reader == me:
                for use in part.uses:
                    self._write(part, rows[id(part)], use)

    # --- from rows to shards ---

    def _cut(self, part: Part, rows: Tensor, use: Use, box: Box) -> Tensor:
        """The values for a box of the target, of the rows that were read, with the dims of the target; a view."""
        return use.piece.arranged(rows[use.piece.in_source(box).relative_to(part.rows).slices()])

    def _view(self, part: Part, use: Use) -> Tensor | None:
        """The part of this rank's memory that gets something of a part."""
        me = self._meeting.index
        box, held = use.in_target(part.rows, me), use.target.holdings.boxes[me]
        if box is None or held is None:
            return None
        return self._local[use.number].view(held.shape)[box.relative_to(held).slices()]

    def _write(self, part: Part, rows: Tensor, use: Use) -> None:
        if isinstance(part.source, FileTensor):
            found = use.piece.from_source(part.rows)
            self._useful += 0 if found is None else found.numel * rows.itemsize
        box, view = use.in_target(part.rows, self._meeting.index), self._view(part, use)
        if box is not None and view is not None:
            view.copy_(self._cut(part, rows, use, box), non_blocking=True)


def _nothing() -> None:
    """Before the first batch."""


def _nbytes(part: Part) -> int:
    return part.nbytes


__all__ = ["Loaded", "load_weights"]
