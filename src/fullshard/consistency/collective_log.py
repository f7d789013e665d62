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

_REMEMBERED = 64  # calls of each ledger: as many as are told to others
_FULL = 16  # calls of a page, at least: they are hashed together

_SMALL = 1 << 20  # bytes: messages that belong to no group of parameters are shorter

_BEGINNING = 1.0  # seconds in which messages are begun, if whoever carries them does not wait for the other ranks

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

    label: UnitName
    action: str

    def __new__(cls, label: UnitName, action: str, subject: str) -> Fingerprint:
        """`subject`: what no other has, and is alike on all ranks."""
        self = super().__new__(cls, _hasher(subject).digest())
        self.label, self.action = label, action
        return self

    def __str__(self) -> str:
        return f"'{self.label.name}' {self.action}" if self.label.name else self.action


class LoggedCall:
    """One call, for who made it."""

    __slots__ = ("fingerprint", "log", "number")

    log: CollectiveLog
    fingerprint: Fingerprint
    number: int  # from 1

    def __str__(self) -> str:
        return f"call {self.number}, {self.fingerprint}"


class _Block(NamedTuple):
    """Calls that follow each other: how many came before, what hashed those, and the kind of each."""

    before: int
    hasher: Any  # of hashlib; never updated
    kinds: list[Fingerprint]

    def hashed(self) -> Any:
        hasher = self.hasher.copy()
        hasher.update(b"".join(self.kinds))
        return hasher


def _number(hasher: Any) -> int:
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _refuse(verdict: str, kind: Fingerprint) -> NoReturn:
    raise StateError(verdict)


_END = Fingerprint(UnitName(""), "end of a backward without heartbeat", "end")


@dataclass(slots=True)
class Departure:
    """How a rank left what it was in the midst of: after how many calls, where, on which thread, and by which exception."""

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
    """The calls of one set of ranks, in the order of the program. ledger 1 - n lines, line 1 - n entries.

    Ranks that run the same program have equal ledgers; the first entry that differs says where they parted.

        rank 0   1 'a' forward gather   2 'b' forward gather   3 'b' backward gather
        rank 1   1 'a' forward gather   2 'c' forward gather                          <- they parted at call 2

    In a step nothing that is done once per message is in the processor's caches, and each instruction of Python takes ten
    times as long as in a loop. So an entry is one word in a list (`say`), and calls are hashed when somebody asks for it or
    a page is turned. Another thread may read at any time: but for the last page, which grows, nothing that it sees changes.
    """

    __slots__ = (
        "__weakref__",
        "_backwards",
        "_beginning",
        "_left",
        "_ordinals",
        "_pages",
        "_silent",
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
        self._pages: tuple[_Block, ...] = ()
        self.before: int  # calls before the last page
        self.fingerprints: list[Fingerprint]  # of those on the last page
        self.say: Callable[
            [Fingerprint], None
        ]  # the next call is of this kind; raises StateError if nothing can be said any more
        self.tagged = False  # whether its messages bear the numbers of their entries, so that a rank may answer others
        self._beginning = False  # whether messages are begun at this moment
        self._verdicts: list[str] = []  # of all who closed it
        self._silent = False  # whether of what was put off nothing is begun any more
        self._backwards = 0
        self._ordinals = itertools.count()
        self.start_epoch(0)

    def next_unit_id(self) -> int:
        """A number for one more unit, alike on all ranks, since units are made by all of them together."""
        return next(self._ordinals)

    @property
    def count(self) -> int:
        page = self._pages[-1]
        return page.before + len(page.kinds)

    @property
    def hash(self) -> int:
        """Of all calls, of 64 bits: the same on ranks that said the same."""
        self.roll_page()
        page = self._pages[-1]
        return _number(page.hashed() if page.kinds else page.hasher)

    def allow_message_size(self, nbytes: int) -> None:
        """Messages of it may be as long as this from now on."""
        self.largest_message = max(self.largest_message, nbytes)

    def mark(self) -> tuple[int, int]:
        """The number of the last call and the hash of all; any thread may ask."""
        page = self._pages[-1]
        kinds = list(page.kinds)
        hasher = page.hasher.copy()
        hasher.update(b"".join(kinds))
        return page.before + len(kinds), _number(hasher)

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

    def roll_page(self) -> None:
        """Begin a new page if this one is full, so that none grows for ever. Only for who may also `say`."""
        if len(self.fingerprints) >= _FULL:
            self._begin(_Block(self.count, self._pages[-1].hashed(), []), self._pages)

    def _begin(self, page: _Block, earlier: tuple[_Block, ...]) -> None:
        while len(earlier) > 1 and page.before - earlier[1].before >= _REMEMBERED:
            earlier = earlier[1:]
        self._pages = (*earlier, page)  # nothing is called between these, so an interrupt comes before all of them or after
        self.before, self.fingerprints = page.before, page.kinds
        self.say = page.kinds.append
        if self.desync_error is not None:  # also if another thread closes it just now: that sets its verdict first, then `say`
            self.say = partial(_refuse, self.desync_error)

    def remembered(self) -> list[tuple[int, int, str]]:
        """The last calls: of each its number, the hash of all up to it, and its kind."""
        pages = [(page, list(page.kinds)) for page in self._pages]
        first = pages[-1][0].before + len(pages[-1][1]) - _REMEMBERED
        found: list[tuple[int, int, str]] = []
        for page, kinds in pages:
            skipped = max(0, first - page.before)
            hasher = page.hasher.copy()
            hasher.update(b"".join(kinds[:skipped]))
            for number, kind in enumerate(kinds[skipped:], page.before + skipped + 1):
                hasher.update(kind)
                found.append((number, _number(hasher), str(kind)))
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

        There is no lock, which would take longer than all else here: who begins says so and then looks whether it may, who
        closes says so and then waits until nobody is beginning.
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
    """What one group may say in a ledger: by action, the kind of its entries."""

    __slots__ = ("_label", "_seed", "log")

    def __init__(self, ledger: CollectiveLog, label: UnitName, subject: str) -> None:
        """`subject`: what all ranks know alike of the group and no other has."""
        super().__init__()
        self.log, self._label, self._seed = ledger, label, subject

    def __missing__(self, action: str) -> Fingerprint:
        kind = self[action] = Fingerprint(self._label, action, f"{self._seed} {action}")
        return kind

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
    """
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
    """The first line of its text, or what it is if it has none.

    >>> headline(ValueError("no such rank\\nat all")), headline(MemoryError())
    ('no such rank', 'MemoryError')
    """
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]


def described(failure: BaseException) -> str:
    """Its class, and the first line of its text if it has one.

    >>> described(ValueError("no such rank\\nat all")), described(MemoryError())
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
