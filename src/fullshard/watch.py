"""Watches over what this rank waits for: asks the others where they are, finds where they parted, and ends waits in vain."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard import _torch
from fullshard.gloo import Posted, wires
from fullshard.ledger import Entry, Ledger, headline, listed, parted

_TICK = 0.1  # seconds between two looks
_LISTEN = 5.0  # seconds between two looks whether another rank is concerned, and between two times of saying so
_PER_RANK = 0.005  # seconds between two readings of all positions, for each rank of the largest ledger
_GRACE = 0.5  # seconds for which ranks that parted wait for what the others say of it
_ATTENTIVE = 10.0  # seconds for which others are followed closely once somebody is concerned
_WINDOW = 64  # messages that are told to others

T = TypeVar("T")


class Waiter:
    """What one thread waits for. patience, timeout: seconds until it asks the others, until it gives up (None: never)."""

    __slots__ = ("__weakref__", "_seen", "_since", "entry", "patience", "timeout")

    def __init__(self) -> None:
        self.patience = 1.0
        self.timeout: float | None = None
        self.entry: Entry | None = None
        self._seen: tuple[Ledger, int, int] | None = None  # which it is: itself it would keep what is sent
        self._since = 0.0

    def configure(self, patience: float, timeout: float | None) -> None:
        self.patience, self.timeout = patience, timeout

    def enter(self, entry: Entry) -> Entry | None:
        before, self.entry = self.entry, entry
        return before

    def leave(self, before: Entry | None = None) -> None:
        self.entry = before

    def stuck(self, now: float) -> float:
        """For how many seconds it has waited for one call, as far as is known."""
        entry = self.entry
        seen = None if entry is None else (entry.ledger, entry.ledger.epoch, entry.number)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return 0.0 if seen is None else now - self._since

    def waits_in(self, ledger: Ledger) -> Entry | None:
        entry = self.entry
        return entry if entry is not None and entry.ledger is ledger else None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in one ledger: the last calls (number, hash, text), the one it waits for, and why it gave up."""

    calls: list[tuple[int, int, str]]
    waiting: int | None
    verdict: str | None
    epoch: int
    ranks: tuple[int, ...]  # of a meeting, who comes to it

    def __str__(self) -> str:
        if not self.calls:
            return "before the first call"
        texts = {number: text for number, _, text in self.calls}
        number, _, text = self.calls[-1]
        if self.waiting is None:
            return f"computing, or elsewhere, after call {number}, {text}"
        return f"waiting in call {self.waiting}, {texts.get(self.waiting, text)}"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a rank tells the others. heard: the last time that somebody asked, as far as it knew then."""

    positions: dict[str, Position]
    posted: dict[str, list[Posted]]
    ended: bool = False
    heard: int = 0

    def dumps(self) -> str:
        places = {name: (p.calls, p.waiting, p.verdict, p.epoch, p.ranks) for name, p in self.positions.items()}
        posted = {g: [(p.book, p.tag, p.sizes) for p in ps] for g, ps in self.posted.items()}
        return json.dumps([places, posted, self.ended, self.heard])

    @classmethod
    def loads(cls, text: str | bytes) -> Whereabouts:
        places, posted, ended, heard = json.loads(text)
        return cls(
            {
                name: Position([(n, h, t) for n, h, t in calls], w, v, e, tuple(ranks))
                for name, (calls, w, v, e, ranks) in places.items()
            },
            {g: [Posted(book, tag, tuple(sizes)) for book, tag, sizes in ps] for g, ps in posted.items()},
            ended,
            heard,
        )


def _copied(ring: deque[T]) -> list[T]:
    """The end of a deque that another thread may be writing to."""
    while True:
        try:
            return list(ring)[-_WINDOW:]
        except RuntimeError:  # it changed meanwhile
            continue


class Watch:
    """One per process: a thread that looks ten times a second whether somebody waits for long.

    A rank that has waited longer than its patience says so in the store of the process group. Then every rank tells its
    position there. If two ranks' ledgers differ, they have parted: both stop, naming both calls, and each exchanges
    meaningless messages for what the other still waits for, so that all of them return. Messages carry the tag of their
    call, so until then nobody has received what was meant for somebody else.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._ledgers: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._told = ""
        self._found: dict[tuple[str, int], float] = {}  # when it was first seen that ranks of a ledger parted
        self._surveyed: weakref.WeakKeyDictionary[Ledger, tuple[tuple[int, int], str]] = weakref.WeakKeyDictionary()
        self._alarms = 0
        self._alarmed = 0.0  # when this rank last said that it is concerned
        self._expected = 0  # who has not heard of this alarm had time enough to
        self._listened = 0.0
        self._attentive = 0.0
        self._asking = 0.0  # when the others' positions are read next
        self._process = os.getpid()
        self._ended = threading.Event()
        self._asked = False
        self._thread: threading.Thread | None = None

    # --- who is watched ---

    def add(self, ledger: Ledger) -> None:
        with self._lock:
            self._ledgers[ledger.name] = ledger
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
            self._thread.start()

    def waiter(self) -> Waiter:
        """For one thread."""
        waiter = Waiter()
        with self._lock:
            self._waiters.add(waiter)
        return waiter

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The watch is not in the midst of a look."""
        with self._lock:
            yield

    def ask(self) -> None:
        """Have all ranks say where they are, and print it here."""
        self._asked = True

    def end(self) -> None:
        """The program ends."""
        if not self._ended.is_set() and os.getpid() == self._process:
            self._ended.set()
            if self._thread is not None:
                self._thread.join(2.0)
            with contextlib.suppress(Exception):
                if self._told or self._alarms:  # somebody is, or was, concerned
                    self._tell(ended=True)

    # --- the thread ---

    def _run(self) -> None:
        failures = 0
        while not self._ended.wait(_TICK):
            try:
                if _torch.default_store() is not _OF.store:
                    return  # the process group was destroyed
                self.look()
                failures = 0
            except dist.DistNetworkError:  # the store is gone: its rank ended
                return
            except Exception:
                failures += 1
                if failures > 20:
                    return

    def look(self) -> None:
        """One look at this rank and, if anybody is concerned, at the others."""
        now = time.monotonic()
        with self._lock:
            concerned = [w for w in self._waiters if w.stuck(now) > w.patience]
            if self._asked or _signalled():
                self._asked = False
                self._report()
            if concerned:
                if now > self._alarmed + _LISTEN:  # again, before those who heard of it attend to something else
                    self._alarm(now)
                self._attentive = now + _ATTENTIVE
            if now <= self._attentive or now > self._listened + self._listen():
                self._listened = now
                self._hear(now)
            if now > self._attentive:
                return
            self._tell()
            if now < self._asking:
                return
            ledgers = list(self._ledgers.values())
            self._asking = now + _PER_RANK * max((len(ledger.ranks) for ledger in ledgers), default=1)
            for ledger in ledgers:  # of all: who waits elsewhere may be waited for here
                self._inquire(ledger, [w for w in concerned if w.waits_in(ledger)], now)

    def _alarm(self, now: float) -> int:
        """Ask all others where they are; the number by which they say that they heard it."""
        again = now < self._alarmed + 2 * _LISTEN
        before, self._alarms, self._alarmed = self._alarms, self._store.add("alarm", 1), now
        self._expected = before if again else self._alarms
        return self._alarms

    def _hear(self, now: float) -> None:
        """Look whether another rank is concerned."""
        if self._store.check(["alarm"]) and (alarms := self._store.add("alarm", 0)) != self._alarms:
            self._alarms, self._attentive = alarms, now + _ATTENTIVE

    def _listen(self) -> float:
        """Seconds between two looks whether another rank is concerned: where ranks soon give up, they must be told sooner."""
        return min(_LISTEN, min((w.timeout for w in self._waiters if w.timeout is not None), default=_LISTEN * 4) / 4)

    def _inquire(self, ledger: Ledger, concerned: Sequence[Waiter], now: float) -> None:
        others = self._others(ledger)
        if ledger.verdict is None:
            verdict = self._judge(ledger, others, concerned, now)
            if verdict is not None:
                ledger.close(verdict)
                self._tell()
        if ledger.verdict is not None:
            self.answer(ledger, others)

    def _judge(self, ledger: Ledger, others: dict[int, Whereabouts], concerned: Sequence[Waiter], now: float) -> str | None:
        """Why there is no use in waiting, None if there may be."""
        name = ledger.name
        places = {rank: there.positions[name] for rank, there in others.items() if name in there.positions}
        for place in places.values():
            if place.verdict is not None:
                return place.verdict
        mine = self._position(ledger)
        found = parted({self._rank: mine.calls, **{rank: place.calls for rank, place in places.items()}})
        if found is not None:
            number, calls = found
            since = self._found.setdefault((name, ledger.epoch), now)
            if sum(map(len, calls.values())) < len(ledger.ranks) and now < since + _GRACE:
                return None  # others may say so soon, and all should say the same
            texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in calls.items())
            if len(calls) == 1:
                texts += ", but of other parameters, shapes or dtypes, or after other calls"
            return (
                f"the ranks parted at call {number}. {texts}. All ranks must run the same units in the same order: have a rank "
                "that has nothing to compute for a unit call its join(), and all ranks any_failed() when some may have raised"
            )
        for waiter in concerned:
            entry = waiter.waits_in(ledger)
            if entry is None:  # it went on meanwhile
                continue
            here = f"(rank {self._rank}) waits in {entry}"
            meeting = [rank for rank, there in others.items() if _meets(there, self._ledgers, self._rank)]
            if meeting and not name.startswith(MEETING):
                return (
                    f"{listed(meeting)} {'is' if len(meeting) == 1 else 'are'} in fullshard.any_failed(), and this rank "
                    f"{here}: the step failed, or ended early, there. Call any_failed() here too"
                )
            gone = [rank for rank in ledger.ranks if rank in others and others[rank].ended]
            if gone:
                last = "; ".join(f"{listed([rank])}: {places[rank]}" for rank in gone if rank in places)
                return f"{listed(gone)} ended the program, while this rank {here}. {last}"
            late = 0.0 if waiter.timeout is None else waiter.stuck(now) - waiter.timeout
            if late > 0.0 and (self._answered(ledger, others, self._expected) or late > _LISTEN):
                there = self._said(ledger, others, self._expected)
                return f"rank {self._rank} waited {waiter.timeout:g} seconds (CheckPolicy.timeout) in {entry}. {there}"
        return None

    def answer(self, ledger: Ledger, others: dict[int, Whereabouts] | None = None) -> None:
        """Exchange messages for what other ranks still wait for in a ledger that is closed, and this rank has no part in."""
        others = self._others(ledger) if others is None else others
        for wire in wires():
            for peer, rank in enumerate(wire.members):
                there = others.get(rank) if rank != self._rank else None
                place = None if there is None else there.positions.get(ledger.name)
                if there is None or place is None or place.verdict is None:
                    continue  # it would take the answer for data
                posted = there.posted.get(wire.name, [])
                wire.answer(peer, [message for message in posted if message.book == ledger.name])

    # --- telling and asking ---

    def _position(self, ledger: Ledger) -> Position:
        waiting = next((entry.number for waiter in self._waiters if (entry := waiter.waits_in(ledger))), None)
        ranks = ledger.ranks if ledger.name.startswith(MEETING) else ()
        return Position(ledger.remembered(), waiting, ledger.verdict, ledger.epoch, ranks)

    def _tell(self, *, ended: bool = False) -> None:
        positions = {name: self._position(ledger) for name, ledger in list(self._ledgers.items())}
        posted = {wire.name: _copied(wire.posted) for wire in wires()}
        text = Whereabouts(positions, posted, ended, self._alarms).dumps()
        if text != self._told:
            self._store.set(f"at/{self._rank}", text)
            self._told = text

    def tell(self) -> None:
        """Have the others know where this rank is."""
        with self._lock:
            self._tell()

    def _others(self, ledger: Ledger) -> dict[int, Whereabouts]:
        found: dict[int, Whereabouts] = {}
        for rank in ledger.ranks:
            key = f"at/{rank}"
            if rank != self._rank and self._store.check([key]):
                there = Whereabouts.loads(self._store.get(key))
                place = there.positions.get(ledger.name)
                if place is not None and place.epoch != ledger.epoch:  # of a step that all gave up since, or begin to
                    del there.positions[ledger.name]
                    there.posted.clear()
                found[rank] = there
        return found

    def _answered(self, ledger: Ledger, others: dict[int, Whereabouts], alarm: int) -> bool:
        """Whether all others have said where they are since that alarm."""
        there = [others.get(rank) for rank in ledger.ranks if rank != self._rank]
        return all(one is not None and ledger.name in one.positions and one.heard >= alarm for one in there)

    def _ask(self, ledgers: Sequence[Ledger]) -> int:
        """Ask all others, and give them some time to answer."""
        end = time.monotonic() + _LISTEN + 1.0
        with self._lock:
            alarm = self._alarm(time.monotonic())
            self._tell()
        while time.monotonic() < end and not all(self._answered(one, self._others(one), alarm) for one in ledgers):
            if self._ended.wait(_TICK):
                break
            with self._lock:  # who asks answers others meanwhile
                self._hear(time.monotonic())
                self._tell()
        return alarm

    def _said(self, ledger: Ledger, others: dict[int, Whereabouts], alarm: int) -> str:
        """Where the other ranks are since that alarm, in one sentence."""
        by_text: dict[str, list[int]] = {}
        for rank in ledger.ranks:
            if rank != self._rank:
                place = others[rank].positions.get(ledger.name) if rank in others else None
                text = "does not answer" if place is None else str(place)
                if place is not None and others[rank].heard < alarm:
                    text = f"does not answer, was {place}"
                by_text.setdefault(text, []).append(rank)
        return "; ".join(f"{listed(ranks)}: {text}" for text, ranks in by_text.items())

    def survey(self, ledger: Ledger) -> str:
        """Where the other ranks are, once they had some time to say so.

        They are asked once for all that fails of what this rank has begun, which may be many messages.
        """
        begun, known = (ledger.epoch, ledger.count), self._surveyed.get(ledger)
        if known is None or known[0] != begun:
            try:
                alarm = self._ask([ledger])
                text = self._said(ledger, self._others(ledger), alarm)
            except Exception as failure:
                text = f"(the store does not answer: {headline(failure)})"
            known = self._surveyed[ledger] = begun, text
        return known[1]

    def confront(self, ledger: Ledger, seconds: float = 5.0) -> str:
        """Where the ranks parted, which each of them knows they did; empty if what they remember does not say."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                self._tell()
                others = self._others(ledger)
                verdict = ledger.verdict or self._judge(ledger, others, (), time.monotonic())
            if verdict is not None:
                return verdict
            time.sleep(_TICK)
        return ""

    def _report(self) -> None:
        ledgers = [ledger for ledger in list(self._ledgers.values()) if ledger.count]
        alarm = self._ask(ledgers)
        self._attentive = time.monotonic() + _ATTENTIVE
        lines = []
        for ledger in ledgers:
            there = self._said(ledger, self._others(ledger), alarm)
            lines.append(f"fullshard: rank {self._rank}: {self._position(ledger)}; {there}")
        print("\n".join(lines) or f"fullshard: rank {self._rank}: before the first call", file=sys.stderr, flush=True)


def _meets(there: Whereabouts, mine: Any, rank: int) -> bool:
    """Whether another rank waits in a meeting that `rank`, this one, has not come to."""
    for name, place in there.positions.items():
        if name.startswith(MEETING) and place.waiting is not None and rank in place.ranks:
            ledger = mine.get(name)
            if ledger is None or ledger.count < place.waiting:
                return True
    return False


MEETING = "any_failed "  # how the names of such ledgers begin


@dataclass(slots=True)
class _Of:
    watch: Watch | None = None
    store: Any = None
    pipe: int | None = None
    writer: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_OF = _Of()


def watch_of(backend: str) -> Watch | None:
    """The watch of this process, None if its ranks do not talk (`backend` is torch's "fake" one), are threads of one process
    (where a rank that raises ends the others), or have no store.
    """
    if backend in ("fake", _torch.THREADED):
        return None
    store = _torch.default_store()
    if store is None:
        return None
    with _OF.lock:
        if _OF.watch is None or _OF.store is not store:
            if _OF.watch is not None:
                _OF.watch.end()
            _OF.watch, _OF.store = Watch(_torch.own_store(store, "fullshard"), _torch.global_rank()), store
            _listen_to_signal()
        return _OF.watch


def _in_child() -> None:
    """A forked process has no watch: its thread, its connection and its pipe are the parent's."""
    if _OF.writer is not None and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
    _OF.watch, _OF.store, _OF.pipe, _OF.writer = None, None, None, None


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _end() -> None:
    if _OF.watch is not None:
        _OF.watch.end()


def _on_signal(number: int, frame: Any) -> None:
    """In the main thread, once it runs Python again: if the pipe is still ours, the watch knows already."""
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current)
    if _OF.watch is not None and (_OF.writer is None or current != _OF.writer):
        _OF.watch.ask()


def _listen_to_signal() -> None:
    """On SIGUSR1 print where all ranks are, unless somebody else listens to it already.

    A thread that waits for a message runs no handlers; the number of the signal arrives through a pipe meanwhile.
    """
    if threading.current_thread() is not threading.main_thread() or _torch.is_handled(signal.SIGUSR1):
        return
    signal.signal(signal.SIGUSR1, _on_signal)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before == -1:
        _OF.pipe, _OF.writer = reader, writer
    else:
        signal.set_wakeup_fd(before)


def _signalled() -> bool:
    if _OF.pipe is None:
        return False
    try:
        return signal.SIGUSR1 in os.read(_OF.pipe, 4096)
    except BlockingIOError:
        return False


__all__ = ["MEETING", "Position", "Waiter", "Watch", "Whereabouts", "watch_of"]
