"""What a rank said to the others, in order: numbers and a hash that must be alike on all of them, and the last entries."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, TypeVar
from zlib import crc32

from fullshard import _torch
from fullshard.errors import StateError

DIGEST = 8  # bytes of a hash

_REMEMBERED = 64  # calls of each log: as many as are told to others
_FULL = 16  # calls of a block, at least: they are hashed together

_SMALL = 1 << 20  # bytes: messages that belong to no group of parameters are shorter

_BEGINNING = 1.0  # seconds in which messages are begun, if the backend does not wait for the other ranks meanwhile

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class UnitName:
    """The name of a unit, which it may only learn when the model first runs."""

    name: str


def _hasher(text: str) -> Any:
    return blake2b(text.encode(), digest_size=DIGEST, usedforsecurity=False)


class Fingerprint(bytes):
    """What an entry is about: an action of one group of a unit. What is hashed is itself, 8 bytes.

    >>> str(Fingerprint(UnitName("layers.0"), "forward gather", "3 forward gather"))
    "'layers.0' forward gather"
    """

    unit_name: UnitName
    action: str

    def __new__(cls, unit_name: UnitName, action: str, subject: str) -> Fingerprint:
        """`subject`: a text that is alike on all ranks, and that no other fingerprint has."""
        self = super().__new__(cls, _hasher(subject).digest())
        self.unit_name, self.action = unit_name, action
        return self

    def __str__(self) -> str:
        return f"'{self.unit_name.name}' {self.action}" if self.unit_name.name else self.action


class LoggedCall:
    """One call of this rank's."""

    __slots__ = ("fingerprint", "log", "number")

    log: CollectiveLog
    fingerprint: Fingerprint
    number: int  # from 1

    def __str__(self) -> str:
        return f"call {self.number}, {self.fingerprint}"


class _Block(NamedTuple):
    """Calls that follow each other: how many came before, the hasher of those, and the fingerprint of each."""

    before: int
    hasher: Any  # of hashlib; never updated
    fingerprints: list[Fingerprint]

    def hashed(self) -> Any:
        """The hasher of all calls up to the last one of the block."""
        hasher = self.hasher.copy()
        hasher.update(b"".join(self.fingerprints))
        return hasher


def _number(hasher: Any) -> int:
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _refuse(verdict: str, fingerprint: Fingerprint) -> NoReturn:
    raise StateError(verdict)


_END = Fingerprint(UnitName(""), "end of a backward without heartbeat", "end")


@dataclass(slots=True)
class Departure:
    """How a rank left a forward or backward: after how many calls, where, on which thread, and by which exception."""

    count: int
    place: str
    thread: int
    failure: str | None

    def __str__(self) -> str:
        if self.failure is None:
            failure = _torch.exception_on(self.thread)
            self.failure = None if failure is None else described(failure)
        return f"{self.place} by {self.failure or 'an exception'}"


class CollectiveLog:
    """The calls of one set of ranks, in the order of the program. log 1 - n blocks, block 1 - n calls.

    Ranks that run the same program have equal logs; the first call that differs says where they parted.

        rank 0   1 'a' forward gather   2 'b' forward gather   3 'b' backward gather
        rank 1   1 'a' forward gather   2 'c' forward gather                          <- they parted at call 2

    In a step nothing that is done once per message is in the processor's caches, and each instruction of Python takes ten
    times as long as in a loop. So a call is one word in a list (`say`), and calls are hashed when somebody asks for it or
    a block is full. Another thread may read at any time: but for the last block, which grows, nothing that it sees changes.
    """

    __slots__ = (
        "__weakref__",
        "_backwards",
        "_beginning",
        "_blocks",
        "_left",
        "_silent",
        "_unit_ids",
        "_verdicts",
        "before",
        "desync_error",
        "epoch",
        "fingerprints",
        "key",
        "largest_message",
        "name",
        "rank",
        "ranks",
        "say",
        "tagged",
    )

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        """`name`: alike on all `ranks` (global numbers), of which `rank` is this one."""
        self.name, self.ranks, self.rank = name, tuple(ranks), rank
        self.key = f"{crc32(name.encode()):08x}"  # its name, in short
        self.largest_message = _SMALL  # bytes: no message of it is longer
        self._left: Departure | None = None
        self.desync_error: str | None = None  # why nothing can be said any more
        self.epoch = 0  # how often all ranks began anew together
        self._blocks: tuple[_Block, ...] = ()
        self.before: int  # calls before the last block
        self.fingerprints: list[Fingerprint]  # of those on the last block
        self.say: Callable[[Fingerprint], None]  # the next call is this; raises StateError if nothing can be said any more
        self.tagged = False  # whether its messages bear the numbers of their entries, so that a rank may answer others
        self._beginning = False  # whether messages are begun at this moment
        self._verdicts: list[str] = []  # of all who closed it
        self._silent = False  # whether of what was put off nothing is begun any more
        self._backwards = 0
        self._unit_ids = itertools.count()
        self.start_epoch(0)

    def next_unit_id(self) -> int:
        """A number for one more unit, alike on all ranks, since all of them make units together."""
        return next(self._unit_ids)

    @property
    def count(self) -> int:
        """The number of the last call."""
        block = self._blocks[-1]
        return block.before + len(block.fingerprints)

    @property
    def hash(self) -> int:
        """Of all calls, of 64 bits: the same on ranks that said the same."""
        self.roll_block()
        block = self._blocks[-1]
        return _number(block.hashed() if block.fingerprints else block.hasher)

    def allow_message_size(self, nbytes: int) -> None:
        """Messages of it may be as long as this from now on."""
        self.largest_message = max(self.largest_message, nbytes)

    def mark(self) -> tuple[int, int]:
        """The number of the last call and the hash of all; any thread may ask."""
        block = self._blocks[-1]
        fingerprints = list(block.fingerprints)
        hasher = block.hasher.copy()
        hasher.update(b"".join(fingerprints))
        return block.before + len(fingerprints), _number(hasher)

    def note_exception(self, place: str, failure: str | None = None) -> None:
        """An exception ends what this rank was in the midst of: until it says the next call, others are told how it left.

        failure: as `described`; None if it is on its way still: it is found in an `except` or `finally` block of this thread.
        """
        if self.exception_note is None:
            self._left = Departure(self.count, place, threading.get_ident(), failure)

    @property
    def exception_note(self) -> str | None:
        """How this rank left what it was in the midst of, None if it did not, or went on since."""
        left = self._left
        return str(left) if left is not None and left.count == self.count else None

    def roll_block(self) -> None:
        """Begin a new block if this one is full, so that none grows for ever. Only on the thread that may also `say`."""
        if len(self.fingerprints) >= _FULL:
            self._begin(_Block(self.count, self._blocks[-1].hashed(), []), self._blocks)

    def _begin(self, block: _Block, earlier: tuple[_Block, ...]) -> None:
        while len(earlier) > 1 and block.before - earlier[1].before >= _REMEMBERED:
            earlier = earlier[1:]
        self._blocks = (*earlier, block)  # nothing is called between these, so an interrupt comes before all of them or after
        self.before, self.fingerprints = block.before, block.fingerprints
        self.say = block.fingerprints.append
        if self.desync_error is not None:  # also if another thread closes it just now: that sets its verdict first, then `say`
            self.say = partial(_refuse, self.desync_error)

    def remembered(self) -> list[tuple[int, int, str]]:
        """The last calls: of each its number, the hash of all up to it, and its text."""
        blocks = [(block, list(block.fingerprints)) for block in self._blocks]
        first = blocks[-1][0].before + len(blocks[-1][1]) - _REMEMBERED
        found: list[tuple[int, int, str]] = []
        for block, fingerprints in blocks:
            skipped = max(0, first - block.before)
            hasher = block.hasher.copy()
            hasher.update(b"".join(fingerprints[:skipped]))
            for number, fingerprint in enumerate(fingerprints[skipped:], block.before + skipped + 1):
                hasher.update(fingerprint)
                found.append((number, _number(hasher), str(fingerprint)))
        return found

    def beats(self, every: int) -> bool:
        """Whether the backward that ends now has a heartbeat, as each `every`-th has since all ranks last began anew.

        One without is entered, too, so that ranks that count differently are told.
        """
        self._backwards += 1
        if self._backwards % every:
            self.say(_END)
            return False
        return True

    def close(self, verdict: str) -> None:
        """From now on every call raises, with `verdict`, and what was put off never begins."""
        self._verdicts.append(verdict)  # of several threads the first one counts
        self.desync_error = self._verdicts[0]
        self.say = partial(_refuse, self.desync_error)
        self._settle()

    def silence(self, unpollable: bool) -> None:
        """Whether of what was put off nothing is begun any more, though the ranks did not part."""
        self._silent = unpollable
        self._settle()

    def begin(self, start: Callable[[], T]) -> T:
        """Have `start` begin messages. Raises StateError if nothing is begun any more.

        There is no lock, which would take longer than all else here: the thread that begins says so and then looks whether it
        may; a thread that closes the log says so and then waits until nobody is beginning.
        """
        try:
            self._beginning = True
            if self.desync_error is not None:
                raise StateError(self.desync_error)
            if self._silent:
                raise StateError("the step was given up before this began: run it again")
            return start()
        finally:
            self._beginning = False

    def _settle(self) -> None:
        """What begins now has begun, or will not. Waits a second at most: a backend may be waiting for other ranks."""
        late = time.monotonic() + _BEGINNING
        while self._beginning and time.monotonic() < late:
            time.sleep(0.001)

    def start_epoch(self, epoch: int | None = None) -> None:
        """All ranks agreed to go on from here: what each said before no longer matters."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._verdicts = []
        self.desync_error = self._left = None
        self._backwards = 0
        self._begin(_Block(0, _hasher(f"{self.name} {self.epoch}"), []), ())


class GroupFingerprints(dict[str, Fingerprint]):
    """The fingerprints of one group's calls in a log, by action."""

    __slots__ = ("_seed", "_unit_name", "log")

    def __init__(self, log: CollectiveLog, unit_name: UnitName, subject: str) -> None:
        """`subject`: a text about the group that is alike on all ranks, and that no other group has."""
        super().__init__()
        self.log, self._unit_name, self._seed = log, unit_name, subject

    def __missing__(self, action: str) -> Fingerprint:
        fingerprint = self[action] = Fingerprint(self._unit_name, action, f"{self._seed} {action}")
        return fingerprint

    def log_call(self, action: str) -> LoggedCall:
        """The next call is this. Raises StateError if the ranks have parted."""
        entry = LoggedCall()
        entry.log, entry.fingerprint = self.log, self[action]
        entry.log.say(entry.fingerprint)
        entry.number = entry.log.count
        return entry


def find_desync(windows: Mapping[int, Sequence[tuple[int, int, str]]]) -> tuple[int, dict[str, list[int]]] | None:
    """The first call in which ranks differ, and who called what there. `windows`: by rank, (number, hash, text) in order.

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
    """Ranks as a text.

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
    r"""The first line of its text, or what it is if it has none.

    >>> headline(ValueError("no such rank\nat all")), headline(MemoryError())
    ('no such rank', 'MemoryError')
    """
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]


def described(failure: BaseException) -> str:
    r"""Its class, and the first line of its text if it has one.

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
