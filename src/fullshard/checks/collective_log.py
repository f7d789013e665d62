"""Log of the collectives of a rank: their numbers, a hash that must be equal on all ranks, and the most recent calls."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, TypeVar
from zlib import crc32

from fullshard import _torch
from fullshard.errors import StateError

DIGEST = 8  # bytes of a hash

_RECENT = 64  # number of calls of a log that are kept and published
# A block with at least this many calls is full: `roll_block` then begins the next. Calls of a block are hashed together.
_BLOCK_SIZE = 16

# Bytes: the initial `largest_message`. Messages without parameters or buffers (heartbeats, comparisons) are smaller than this.
_SMALL = 1 << 20

# How long `close` and `set_silent` wait for a message that is being started. Then they go on, since the backend may itself be
# waiting for other ranks.
_START_SECONDS = 1.0

# Action texts that error messages show under c10d's names, all_gather and reduce_scatter.
_GATHER = re.compile(r"(forward|backward) gather")
_REDUCTION = re.compile(r"reduction(?:, (.+))?")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class UnitName:
    """Mutable name of a unit: the qualified name may only be known when the model first runs."""

    name: str


def _hasher(text: str) -> Any:
    return blake2b(text.encode(), digest_size=DIGEST, usedforsecurity=False)


class Fingerprint(bytes):
    """8-byte hash of an action of one group of a unit, with the text for error messages.

    >>> str(Fingerprint(UnitName("layers.0"), "forward gather", "3 forward gather"))
    "all_gather of 'layers.0' (forward)"
    >>> str(Fingerprint(UnitName("layers.0"), "reduction, in torch.float32", "3 reduction"))
    "reduce_scatter of 'layers.0' (in torch.float32)"
    """

    unit_name: UnitName  # "" for an action without a unit
    action: str

    def __new__(cls, unit_name: UnitName, action: str, subject: str) -> Fingerprint:
        """Hash `subject`, a text that is equal on all ranks and different from that of every other fingerprint."""
        self = super().__new__(cls, _hasher(subject).digest())
        self.unit_name, self.action = unit_name, action
        return self

    def __str__(self) -> str:
        if not self.unit_name.name:
            return self.action
        action, detail = self.action, ""
        if gather := _GATHER.fullmatch(action):
            action, detail = "all_gather", f" ({gather[1]})"
        elif reduction := _REDUCTION.fullmatch(action):
            action, detail = "reduce_scatter", f" ({reduction[1]})" if reduction[1] else ""
        return f"{action} of '{self.unit_name.name}'{detail}"


class LoggedCall:
    """One call in the log of this rank."""

    __slots__ = ("fingerprint", "log", "number")

    log: CollectiveLog
    fingerprint: Fingerprint
    number: int  # position in the log, starting at 1

    def __str__(self) -> str:
        return f"collective {self.number}, {self.fingerprint}"


class _Block(NamedTuple):
    """Consecutive calls of a log."""

    before: int  # number of calls before this block
    hasher: Any  # hashlib hasher of the calls before this block; it is copied, never updated
    fingerprints: list[Fingerprint]  # of the calls of this block

    def hashed(self) -> Any:
        """Return the hasher of all calls up to the last one of the block."""
        hasher = self.hasher.copy()
        hasher.update(b"".join(self.fingerprints))
        return hasher


def _number(hasher: Any) -> int:
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _raise_verdict(verdict: str, fingerprint: Fingerprint) -> NoReturn:
    raise StateError(verdict)


_END = Fingerprint(UnitName(""), "end of a backward without heartbeat", "end")


@dataclass(slots=True)
class ExceptionNote:
    """Exception that ended a forward, backward or other call on this rank."""

    count: int  # number of calls before the exception
    place: str  # e.g. "'blocks.1' forward"
    thread: int  # id of the thread that raised
    failure: str | None  # class and first line of the exception; None while it is propagating

    def __str__(self) -> str:
        if self.failure is None:
            failure = _torch.exception_on(self.thread)
            self.failure = None if failure is None else described(failure)
        return f"{self.failure or 'an exception'} in {self.place}"


class _Writes(NamedTuple):
    """Writes to shards since a checkpoint was loaded, or since a unit was created."""

    made: int  # number of them
    digest: int  # equal on ranks that made the same ones
    last: Fingerprint | None

    def fingerprint(self) -> Fingerprint:
        """Return one fingerprint for all of them."""
        text = f"any_failed() after {self.made} step{'s' if self.made != 1 else ''} or writes, the last {self.last}"
        return Fingerprint(UnitName(""), text, f"writes {self.made} {self.digest}")


_NO_WRITES = _Writes(0, 0, None)
_FRESH = _Writes(0, 1, Fingerprint(UnitName(""), "a load or fully_shard()", "load"))


class CollectiveLog:
    """Calls of this rank on one set of ranks, in program order. One log has many blocks, one block many calls.

    A call is a collective, or a local action that all ranks must take: an optimizer step or a write to shards. Ranks that run
    the same program have equal logs. The first call that differs shows where they diverged.

        rank 0   1 all_gather of 'a'   2 all_gather of 'b'   3 reduce_scatter of 'b'
        rank 1   1 all_gather of 'a'   2 all_gather of 'c'                            <- diverged at call 2
    """

    # Logging a call must be cheap: code that runs once per collective is not in the caches of the processor, and each Python
    # instruction takes ten times as long as in a loop. So a call is one element of a list (`append`), and calls are hashed
    # when the hash is read or a block is full.
    # Other threads read without a lock: all blocks but the last are immutable, and the last one only grows.

    __slots__ = (
        "__weakref__",
        "_backwards",
        "_blocks",
        "_carries",
        "_exception",
        "_silent",
        "_starting",
        "_unit_ids",
        "_verdicts",
        "_writes",
        "_written",
        "abort",
        "append",
        "before",
        "desync_error",
        "epoch",
        "fingerprints",
        "key",
        "largest_message",
        "name",
        "rank",
        "ranks",
        "tagged",
    )

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        """Create an empty log.

        Args:
            name: unique name, equal on all ranks.
            ranks: global ranks that share the log.
            rank: global rank of this process.
        """
        self.name, self.ranks, self.rank = name, tuple(ranks), rank
        self.key = f"{crc32(name.encode()):08x}"  # short form of the name, for keys of the store
        self.largest_message = _SMALL  # bytes of the largest message
        self._exception: ExceptionNote | None = None
        self.desync_error: str | None = None  # why the log is closed; None while it is open
        self.epoch = 0  # number of restarts by all ranks together
        self._blocks: tuple[_Block, ...] = ()
        self.before: int  # number of calls before the last block
        self.fingerprints: list[Fingerprint]  # of the last block
        self.append: Callable[[Fingerprint], None]  # log the next call; raises StateError if the log is closed
        # Whether messages carry a tag that identifies their call, so that after the log is closed the peers can send dummy data
        # for those that this rank still waits for.
        self.tagged = False
        self.abort: Callable[[], None] | None = None  # ends all its collectives, where they cannot be ended one by one
        self._starting = False  # whether a message is being started right now
        self._verdicts: list[str] = []  # of all threads that closed the log
        self._silent = False  # whether queued collectives that have not started yet (CPU only) must not start
        self._backwards = 0
        self._writes = _NO_WRITES
        self._written: set[tuple[int, str]] = set()  # parameters with writes: id of the unit, name
        self._unit_ids = itertools.count()
        self.start_epoch(0)

    def next_unit_id(self) -> int:
        """Return the id of a new unit. It is equal on all ranks, because they create their units together."""
        return next(self._unit_ids)

    @property
    def count(self) -> int:
        """Number of the last call."""
        block = self._blocks[-1]
        return block.before + len(block.fingerprints)

    @property
    def hash(self) -> int:
        """64-bit hash of all calls, equal on ranks with equal calls."""
        self.roll_block()
        block = self._blocks[-1]
        return _number(block.hashed() if block.fingerprints else block.hasher)

    def allow_message_size(self, nbytes: int) -> None:
        """Allow messages of up to `nbytes` bytes from now on."""
        self.largest_message = max(self.largest_message, nbytes)

    def snapshot(self) -> tuple[int, int]:
        """Return the number of the last call and the hash of all calls. Any thread may call this."""
        block = self._blocks[-1]
        fingerprints = list(block.fingerprints)
        hasher = block.hasher.copy()
        hasher.update(b"".join(fingerprints))
        return block.before + len(fingerprints), _number(hasher)

    def note_exception(self, place: str, failure: str | None = None) -> None:
        """Note that an exception ended the current step of this rank. The note is published until the next call is logged.

        Args:
            place: where the exception was raised, e.g. "'blocks.1' forward".
            failure: text of the exception, as from `described`; None while the exception is still propagating. It is then
                read from the state of this thread.
        """
        if self.exception_note is None:
            self._exception = ExceptionNote(self.count, place, threading.get_ident(), failure)

    @property
    def exception_note(self) -> str | None:
        """The exception that ended the current step, and its place; None if there was none or a call was logged since."""
        note = self._exception
        return str(note) if note is not None and note.count == self.count else None

    def roll_block(self) -> None:
        """Begin a new block if the last one is full. Call this only on the thread that also appends."""
        if len(self.fingerprints) >= _BLOCK_SIZE:
            self._add_block(_Block(self.count, self._blocks[-1].hashed(), []), self._blocks)

    def _add_block(self, block: _Block, earlier: tuple[_Block, ...]) -> None:
        while len(earlier) > 1 and block.before - earlier[1].before >= _RECENT:
            earlier = earlier[1:]
        # Python runs signal handlers at function calls and backward jumps, and there are none between these assignments: an
        # interrupt comes before all of them or after all of them.
        self._blocks = (*earlier, block)
        self.before, self.fingerprints = block.before, block.fingerprints
        self.append = block.fingerprints.append
        # Another thread may close the log at this moment. It sets `desync_error` before it replaces `append`. So either it
        # replaces the `append` set above, or the check below sees `desync_error`: in both cases the `append` that raises is the
        # one that remains.
        if self.desync_error is not None:
            self.append = partial(_raise_verdict, self.desync_error)

    def recent_calls(self) -> list[tuple[int, int, str]]:
        """Return the most recent calls: the number, the hash of all calls up to it, and the text of each."""
        blocks = [(block, list(block.fingerprints)) for block in self._blocks]
        first = blocks[-1][0].before + len(blocks[-1][1]) - _RECENT
        found: list[tuple[int, int, str]] = []
        for block, fingerprints in blocks:
            skipped = max(0, first - block.before)
            hasher = block.hasher.copy()
            hasher.update(b"".join(fingerprints[:skipped]))
            for number, fingerprint in enumerate(fingerprints[skipped:], block.before + skipped + 1):
                hasher.update(fingerprint)
                found.append((number, _number(hasher), str(fingerprint)))
        return found

    def note_write(self, fingerprint: Fingerprint, written: Iterable[tuple[int, str]] = ()) -> None:
        """Count an optimizer step or another write to shards, for `carry_writes`.

        Args:
            fingerprint: of the write.
            written: the parameters, each as (id of its unit, its name); none for a load.
        """
        made, digest, _ = self._writes
        self._writes = _Writes(made + 1, crc32(fingerprint, digest), fingerprint)
        self._written.update(written)

    def forget_writes(self, loaded: Iterable[tuple[int, str]] | None = None) -> None:
        """Forget the writes so far, if no written parameter is left that the ranks have not loaded together since.

        Args:
            loaded: parameters that all ranks load; None for all, since all ranks are about to create a unit.
        """
        self._written.difference_update(self._written if loaded is None else loaded)
        if not self._written:
            self._writes = _FRESH

    def heartbeat_due(self, every: int) -> bool:
        """Return True if the backward that ends now sends a heartbeat, the small all-reduce that compares the logs.

        Every `every`-th backward since the last restart sends one. A backward without a heartbeat is logged, so that ranks with
        different counts of backwards are found to diverge.
        """
        self._backwards += 1
        if self._backwards % every:
            self.append(_END)
            return False
        return True

    def close(self, verdict: str) -> None:
        """Close the log: from now on every call raises StateError with `verdict`.

        Queued collectives that have not started yet (CPU only) never start.
        """
        self._verdicts.append(verdict)  # list.append is atomic: if several threads close the log, the first verdict counts
        self.desync_error = self._verdicts[0]
        self.append = partial(_raise_verdict, self.desync_error)
        self._wait_for_start()

    def set_silent(self, silent: bool) -> None:
        """Set whether queued collectives that have not started yet are kept from starting, although the log is open."""
        self._silent = silent
        self._wait_for_start()

    def begin(self, start: Callable[[], T]) -> T:
        """Call `start`, which starts messages.

        Raises:
            StateError: if the log is closed or silent.
        """
        # No lock: it would cost more than everything else here. The starting thread sets `_starting`, then reads the state.
        # A closing thread sets the state, then reads `_starting`. So the message does not start, or the closing thread waits.
        try:
            self._starting = True
            if self.desync_error is not None:
                raise StateError(self.desync_error)
            if self._silent:
                raise StateError("The step was abandoned before this collective started. Run the step again.")
            return start()
        finally:
            self._starting = False

    def _wait_for_start(self) -> None:
        """Wait until no message is being started, but at most `_START_SECONDS`."""
        deadline = time.monotonic() + _START_SECONDS
        while self._starting and time.monotonic() < deadline:
            time.sleep(0.001)

    def start_epoch(self, epoch: int | None = None) -> None:
        """Clear and open the log. All ranks must have agreed to restart from here."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._verdicts = []
        self.desync_error = self._exception = None
        self._backwards = 0
        self._add_block(_Block(0, _hasher(f"{self.name} {self.epoch}"), []), ())
        self._carries = self._writes.last is not None

    def carry_writes(self) -> None:
        """In the first forward of an epoch, log a call that stands for all writes of the epochs before.

        Some ranks may have written before the step failed, and others not. Unless a load comes first, they diverge here.
        """
        if self._carries and self.desync_error is None:
            self._carries = False
            self.append(self._writes.fingerprint())


class GroupFingerprints(dict[str, Fingerprint]):
    """Fingerprints of one parameter group in a log, by action; created on first use."""

    __slots__ = ("_seed", "_unit_name", "log")

    def __init__(self, log: CollectiveLog, unit_name: UnitName, subject: str) -> None:
        """Create the table. `subject` is a text that is equal on all ranks and different from that of every other group."""
        super().__init__()
        self.log, self._unit_name, self._seed = log, unit_name, subject

    def __missing__(self, action: str) -> Fingerprint:
        fingerprint = self[action] = Fingerprint(self._unit_name, action, f"{self._seed} {action}")
        return fingerprint

    def log_call(self, action: str) -> LoggedCall:
        """Log `action` as the next call.

        Raises:
            StateError: if the log is closed, e.g. because the ranks diverged.
        """
        entry = LoggedCall()
        entry.log, entry.fingerprint = self.log, self[action]
        entry.log.append(entry.fingerprint)
        entry.number = entry.log.count
        return entry


def find_desync(windows: Mapping[int, Sequence[tuple[int, int, str]]]) -> tuple[int, dict[str, list[int]]] | None:
    """Return the number of the first call that differs between ranks, and the ranks of each call text; None if none differs.

    A rank without that call is ignored. `windows` has the recent calls of each rank: (number, hash, text) in order.

    >>> find_desync({0: [(1, 77, "a"), (2, 88, "b")], 1: [(1, 77, "a"), (2, 99, "c")], 2: [(1, 77, "a")]})
    (2, {'b': [0], 'c': [1]})
    """
    calls: dict[int, dict[int, tuple[int, str]]] = {}
    for rank, window in windows.items():
        for number, digest, text in window:
            calls.setdefault(number, {})[rank] = digest, text
    for number in sorted(calls):
        if len({digest for digest, _ in calls[number].values()}) > 1:
            found: dict[str, list[int]] = {}
            for rank, (_, text) in sorted(calls[number].items()):
                found.setdefault(text, []).append(rank)
            return number, found
    return None


def listed(ranks: Sequence[int]) -> str:
    """Format a list of ranks.

    >>> listed([3]), listed([0, 1]), listed([0, 1, 2, 5, 7, 8, 9])
    ('rank 3', 'ranks 0 and 1', 'ranks 0-2, 5 and 7-9')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if len(ranks) == 1:
        return f"rank {parts[0]}"
    return "ranks " + (parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}")


def headline(failure: BaseException) -> str:
    r"""Return the first line of the text of an exception, or the name of its class if the text is empty.

    >>> headline(ValueError("no such rank\nat all")), headline(MemoryError())
    ('no such rank', 'MemoryError')
    """
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]


def described(failure: BaseException) -> str:
    r"""Return the class name of an exception, and the first line of its text if it has one.

    >>> described(ValueError("no such rank\nat all")), described(MemoryError())
    ('ValueError: no such rank', 'MemoryError')
    """
    name = type(failure).__name__
    return f"{name}: {headline(failure)}" if str(failure).strip() else name


__all__ = [
    "DIGEST",
    "CollectiveLog",
    "Fingerprint",
    "GroupFingerprints",
    "LoggedCall",
    "UnitName",
    "described",
    "find_desync",
    "headline",
    "listed",
]
