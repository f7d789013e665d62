"""Log of the collectives of a rank: their numbers, a hash that must be equal on all ranks, and the most recent calls."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from fullshard import _torch
from fullshard.errors import StateError

DIGEST = 8  # bytes of a hash

_RECENT = 64  # number of calls of a log that are published; at least as many are kept
# A block with at least this many calls is full: `roll_block` then begins the next. Calls of a block are hashed together.
_BLOCK_SIZE = 16

# Action texts that error messages show under c10d's names, all_gather and reduce_scatter.
_GATHER = re.compile(r"(forward|backward) gather")
_REDUCTION = re.compile(r"reduction(?:, (.+))?")


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
        """Hash `subject`, a text that is equal on all ranks and unlike that of any call that may come in its place."""
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

    log: CollectiveLog
    fingerprint: Fingerprint
    number: int  # position in the log, starting at 1
    beyond = False  # whether it may also wait, in the user's all-reduce hook, for ranks that have no part in the log

    def __str__(self) -> str:
        return f"collective {self.number}, {self.fingerprint}"


class _Block(NamedTuple):
    """Consecutive calls of a log."""

    before: int  # number of calls before this block
    hasher: Any  # hashlib hasher of the calls before this block; it is copied, never updated
    fingerprints: list[Fingerprint]  # of the calls of this block

    def hashed(self, fingerprints: Sequence[Fingerprint]) -> Any:
        """Return a hasher of all calls up to the last of `fingerprints`, which are the first calls of this block."""
        hasher = self.hasher.copy()
        hasher.update(b"".join(fingerprints))
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


class CollectiveLog:
    """Calls that this rank makes with one set of ranks, in program order. A log has many blocks, a block many calls.

    A call is a collective, or another event of all ranks, such as an optimizer step. Ranks that run the same program have
    equal logs. The first call that differs shows where they diverged.

        rank 0   1 all_gather of 'a'   2 all_gather of 'b'   3 reduce_scatter of 'b'
        rank 1   1 all_gather of 'a'   2 all_gather of 'c'                            <- diverged at call 2
    """

    # Logging a call must be cheap: code that runs once per collective is not in the caches of the processor, and each Python
    # instruction takes ten times as long as in a loop. So a call is one element of a list (`append`), and calls are hashed
    # when the hash is read or a step begins.
    # Other threads read without a lock: all blocks but the last are immutable, and the last one only grows.

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        """Create the empty log of global rank `rank`, one of `ranks`. `name`: unique, and equal on all of them."""
        self.name, self.ranks, self.rank = name, tuple(ranks), rank
        self.key = f"{crc32(name.encode()):08x}"  # short form of the name, for keys of the store
        self._exception: ExceptionNote | None = None
        self.desync_error: str | None = None  # why the log is closed; None while it is open
        self._blocks: tuple[_Block, ...] = ()
        self.before: int  # number of calls before the last block
        self.fingerprints: list[Fingerprint]  # of the last block
        self.append: Callable[[Fingerprint], None]  # log the next call; raises StateError if the log is closed
        self.tagged = False  # whether messages carry a tag that identifies their call
        self.abort: Callable[[], None] | None = None  # aborts its process groups, so that no thread waits in them any more
        self.followers: tuple[CollectiveLog, ...] = ()  # logs that are closed together with this one
        self._verdicts: list[str] = []  # of all threads that closed the log
        self._backwards = 0
        self.unit_ids = itertools.count()  # ids of units, equal on all ranks, because they create their units together
        self._add_block(_Block(0, _hasher(name), []), ())

    @property
    def count(self) -> int:
        """Number of the last call."""
        block = self._blocks[-1]
        return block.before + len(block.fingerprints)

    @property
    def hash(self) -> int:
        """64-bit hash of all calls, equal on ranks with equal calls. Only the thread that appends may read it."""
        self.roll_block()
        return self.snapshot()[1]

    def snapshot(self) -> tuple[int, int]:
        """Return the number of the last call and the hash of all calls. Any thread may call this."""
        block = self._blocks[-1]
        fingerprints = list(block.fingerprints)
        return block.before + len(fingerprints), _number(block.hashed(fingerprints))

    def note_exception(self, place: str, failure: str | None = None) -> None:
        """Note that an exception ended the current step of this rank. The note is published until the next call is logged.

        `failure`: text of the exception, as from `described`. None if the caller cannot see it: `exception_note` looks it up.
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
            self._add_block(_Block(self.count, self._blocks[-1].hashed(self.fingerprints), []), self._blocks)

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
            hasher = block.hashed(fingerprints[:skipped])
            for number, fingerprint in enumerate(fingerprints[skipped:], block.before + skipped + 1):
                hasher.update(fingerprint)
                found.append((number, _number(hasher), str(fingerprint)))
        return found

    def heartbeat_due(self, every: int) -> bool:
        """Return True if the backward that now ends a step must send a heartbeat: one in `every` does.

        A backward that ends a step without one is logged: if the ranks' counts of backwards differ, they are found to diverge.
        """
        self._backwards += 1
        if self._backwards % every:
            self.append(_END)
            return False
        return True

    def close(self, verdict: str) -> None:
        """Close the log: from now on every call raises StateError with the first verdict."""
        self._verdicts.append(verdict)  # list.append is atomic: if several threads close the log, the first verdict counts
        self.desync_error = self._verdicts[0]
        self.append = partial(_raise_verdict, self.desync_error)
        for follower in self.followers:
            follower.close(self.desync_error)

    def check_open(self) -> None:
        """Raise StateError if the log is closed."""
        if self.desync_error is not None:
            raise StateError(self.desync_error)


class GroupFingerprints(dict[str, Fingerprint]):
    """Fingerprints of one parameter group in a log, by action; created on first use."""

    __slots__ = ("_seed", "_unit_name", "log")

    def __init__(self, log: CollectiveLog, unit_name: UnitName, subject: str) -> None:
        """Create the table. `subject`: equal on all ranks and, for a group, unlike that of any other group."""
        super().__init__()
        self.log, self._unit_name, self._seed = log, unit_name, subject

    def __missing__(self, action: str) -> Fingerprint:
        fingerprint = self[action] = Fingerprint(self._unit_name, action, f"{self._seed} {action}")
        return fingerprint

    def call(self, action: str, call: LoggedCall | None = None) -> LoggedCall:
        """Log a call that runs outside of `Streams.send`, and return it. Raises StateError if the log is closed."""
        call = LoggedCall() if call is None else call
        call.log, call.fingerprint = self.log, self[action]
        self.log.append(call.fingerprint)
        call.number = self.log.count
        return call


def find_desync(windows: Mapping[int, Sequence[tuple[int, int, str]]]) -> tuple[int, dict[str, list[int]]] | None:
    """Return the number of the first call in `windows` whose hash differs, and the ranks of each text; None if none differs.

    A rank without that call is ignored. `windows`: (number, hash of all calls up to it, text) of each rank's recent calls.

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
    parts: list[str] = []
    for _, numbered in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in numbered]  # of successive ranks
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
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
