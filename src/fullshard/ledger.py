"""What a rank said to the others, in order: numbers and a hash that must be alike on all of them, and the last entries."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fullshard.schedule import StateError

REMEMBERED = 64  # entries of each ledger: as many as are told to others

_BEGINNING = 1.0  # seconds in which messages are begun, if whoever carries them does not wait for the other ranks

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Label:
    """The name of a unit, which it may only learn when the model first runs."""

    name: str


@dataclass(frozen=True, slots=True)
class Kind:
    """What an entry is about: an action of one group of a unit."""

    label: Label
    action: str
    code: int

    def __str__(self) -> str:
        return f"'{self.label.name}' {self.action}" if self.label.name else self.action


Entry = tuple[int, Kind, int]
"""One call: its number, its kind, and the hash of all entries up to it. One is made for each message: nothing is cheaper."""


def said(entry: Entry) -> str:
    """
    >>> said((7, Kind(Label("layers.0"), "forward gather", 1), 123))
    "call 7, 'layers.0' forward gather"
    """
    number, kind, _ = entry
    return f"call {number}, {kind}"


_END = Kind(Label(""), "end of a backward without heartbeat", 1)


class Ledger:
    """The calls of one set of ranks, in the order of the program. ledger 1 - n lines, line 1 - n entries.

    Ranks that run the same program have equal ledgers; the first entry that differs says where they parted.

        rank 0   1 'a' forward gather   2 'b' forward gather   3 'b' backward gather
        rank 1   1 'a' forward gather   2 'c' forward gather                          <- they parted at call 2
    """

    __slots__ = (  # in a step nothing that is asked for once per message is in the processor's caches, so it lies together
        "__weakref__",
        "_backwards",
        "_beginning",
        "_closing",
        "_ordinals",
        "_silent",
        "count",
        "epoch",
        "hash",
        "name",
        "rank",
        "ranks",
        "ring",
        "tagged",
        "verdict",
    )

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        """`name`: alike on all `ranks` (global numbers), of which `rank` is this one."""
        self.name, self.ranks, self.rank = name, tuple(ranks), rank
        self.count = 0
        self.hash = zlib.crc32(name.encode())
        self.ring: deque[Entry] = deque(maxlen=REMEMBERED)
        self.verdict: str | None = None  # why nothing can be said any more
        self.epoch = 0  # how often all ranks began anew together
        self.tagged = False  # whether its messages bear the numbers of their entries, so that a rank may answer others
        self._beginning = False  # whether messages are begun at this moment
        self._closing = threading.Lock()
        self._silent = False  # whether of what was put off nothing is begun any more
        self._backwards = 0
        self._ordinals = itertools.count()

    def enroll(self) -> int:
        """A number for one more unit, alike on all ranks, since units are made by all of them together."""
        return next(self._ordinals)

    def note(self, kind: Kind) -> Entry:
        """The next call is of this kind. Raises StateError if the ranks have parted."""
        if self.verdict is not None:
            raise StateError(self.verdict)
        self.count += 1
        self.hash = hash((self.hash, kind.code))  # of integers it is the same in every process
        entry = self.count, kind, self.hash
        self.ring.append(entry)
        return entry

    def beats(self, every: int) -> bool:
        """Whether the backward that ends now has a heartbeat, as each `every`-th has since all ranks last began anew.

        One without is entered, too, so that ranks that count differently are told.
        """
        self._backwards += 1
        if self._backwards % every:
            self.note(_END)
            return False
        return True

    def close(self, verdict: str) -> None:
        """From now on every call raises, with `verdict`, and what was put off never begins."""
        with self._closing:
            if self.verdict is None:
                self.verdict = verdict
        self._settle()

    def silence(self, silent: bool) -> None:
        """Whether of what was put off nothing is begun any more, though the ranks did not part."""
        self._silent = silent
        self._settle()

    def begin(self, start: Callable[[], T]) -> T:
        """Have `start` begin messages. Raises StateError if nothing is begun any more.

        There is no lock, which would take longer than all else here: who begins says so and then looks whether it may, who
        closes says so and then waits until nobody is beginning.
        """
        try:
            self._beginning = True
            if self.verdict is not None:
                raise StateError(self.verdict)
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

    def reopen(self) -> None:
        """All ranks agreed to go on from here: what each said before no longer matters."""
        self.epoch += 1
        self.ring.clear()
        self.count, self.hash = 0, zlib.crc32(f"{self.name} {self.epoch}".encode())
        self.verdict = None
        self._backwards = 0


class Line(dict[str, Kind]):
    """What one group may say in a ledger: by action, the kind of its entries."""

    __slots__ = ("_label", "_seed", "ledger")

    def __init__(self, ledger: Ledger, label: Label, subject: str) -> None:
        """`subject`: what all ranks know alike of the group and no other has."""
        super().__init__()
        self.ledger, self._label, self._seed = ledger, label, subject

    def __missing__(self, action: str) -> Kind:
        code = zlib.crc32(f"{self._seed} {action}".encode()) + 1
        kind = self[action] = Kind(self._label, action, code)
        return kind

    def note(self, action: str) -> Entry:
        return self.ledger.note(self[action])


def parted(windows: dict[int, Sequence[tuple[int, int, str]]]) -> tuple[int, dict[str, list[int]]] | None:
    """The first call in which ranks differ, and who called what there. `windows`: by rank, (number, hash, text) in order.

    >>> parted({0: [(1, 77, "a"), (2, 88, "b")], 1: [(1, 77, "a"), (2, 99, "c")], 2: [(1, 77, "a")]})
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


__all__ = ["Entry", "Kind", "Label", "Ledger", "Line", "headline", "listed", "parted", "said"]
