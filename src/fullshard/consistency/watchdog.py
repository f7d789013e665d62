"""Watches over what this rank waits for: asks the others where they are, finds where they parted, and ends waits in vain."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard import _torch
from fullshard.collectives.gloo import P2PChannel, PostedMessages, channels
from fullshard.collectives.process_groups import release
from fullshard.consistency.board import NOW, TURN, NoticeBoard, bell_for
from fullshard.consistency.collective_log import CollectiveLog, LoggedCall, find_desync, headline, listed

_TICK = 0.1  # seconds between two looks
_AGAIN = 5.0  # seconds between two times of asking, and for which an answer is waited for
_ATTENTIVE = 10.0  # seconds for which a rank that was asked follows what the others say
_GRACE = 0.5  # seconds for which ranks that parted wait for what the others say of it
_LAST = 2.0  # seconds for which a rank whose program ends waits for answers
_LEFT = 2.0  # seconds for which a rank waits at least for one that left by an exception, and may go on
_FEW = 8  # ranks up to which each reads what the others say; of more, a few do
_READERS = 4
_BYTES = 0.9e6  # per second, that all readers of positions may read together
_RECORD = 58  # bytes that one position takes to be read
_RUNG = 1024  # ranks that are woken together
_TOLD = 64  # ranks whose whereabouts are told in one sentence


class WaitState:
    """What one thread waits for. patience, timeout: seconds until it asks the others, until it gives up (None: never)."""

    __slots__ = ("__weakref__", "_seen", "_since", "call", "patience", "timeout")

    def __init__(self) -> None:
        self.patience = 1.0
        self.timeout: float | None = None
        self.call: LoggedCall | None = None
        self._seen: tuple[CollectiveLog, int, int] | None = None  # which it is: itself it would keep what is sent
        self._since = 0.0

    def configure(self, patience: float, timeout: float | None) -> None:
        self.patience, self.timeout = patience, timeout

    def enter(self, entry: LoggedCall) -> LoggedCall | None:
        before, self.call = self.call, entry
        return before

    def leave(self, before: LoggedCall | None = None) -> None:
        self.call = before

    def seconds_waiting(self, now: float) -> float:
        """For how many seconds it has waited for one call, as far as is known."""
        entry = self.call
        seen = None if entry is None else (entry.log, entry.log.epoch, entry.number)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return 0.0 if seen is None else now - self._since

    def waits_in(self, ledger: CollectiveLog) -> LoggedCall | None:
        entry = self.call
        return entry if entry is not None and entry.log is ledger else None


WAITS, LEFT, ENDED, MEETS = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in one ledger, 16 bytes: how many calls it said and their hash, how many notices it had read by then
    (modulo 2**16), and whether it waits, left by an exception, ended the program, or waits in any_failed().
    """

    count: int
    hash: int
    epoch: int = 0
    heard: int = 0
    flags: int = 0

    _FORM = struct.Struct("<IHBBq")

    def pack(self) -> bytes:
        return self._FORM.pack(self.count, self.heard & 0xFFFF, self.flags, self.epoch & 0xFF, self.hash)

    @classmethod
    def unpack(cls, record: bytes) -> Position:
        """Raises ValueError for what is none."""
        try:
            count, heard, flags, epoch, digest = cls._FORM.unpack(record)
        except struct.error as wrong:
            raise ValueError(f"no position: {wrong}") from wrong
        return cls(count, digest, epoch, heard, flags)

    def has_heard(self, number: int) -> bool:
        """Whether it was told after that notice was read."""
        return (self.heard - number) & 0xFFFF < 0x8000

    def answers(self, number: int) -> bool:
        """Whether it is the last word of its rank on that notice: told after it was read, or at the end of the program."""
        return bool(self.flags & ENDED) or self.has_heard(number)


@dataclass(slots=True, eq=False)
class _Closing:
    """A ledger that is closed, until every rank has its verdict and nobody waits for a message of it any more."""

    ledger: CollectiveLog
    epoch: int
    wires: list[P2PChannel]  # kept, whatever becomes of the model
    settled: set[int] = field(default_factory=set)
    next: float = 0.0  # when the other ranks' needs are read

    @property
    def is_over(self) -> bool:
        return len(self.settled) >= len(self.ledger.ranks) - 1


class Watchdog:
    """One per process: a thread that looks ten times a second whether somebody waits for long.

    As long as nobody does, it sends nothing. A rank that has waited longer than its patience publishes its position in each of
    its ledgers, and rings those that do not: they publish theirs. A few ranks read them. If two ledgers differ the ranks have
    parted; whichever rank finds that, or that another rank left, ended or is gone, posts the verdict. All ranks read the
    notices in one order, and the first verdict on a ledger closes it everywhere, so all of them say the same. Each rank then
    publishes which messages it still waits for, and the others exchange meaningless ones for those, so that all of them return.
    Messages carry the tag of their call, so until then nobody has received what was meant for somebody else.
    """

    def __init__(self, board: NoticeBoard, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock, self._rank = board, clock, board.rank
        self._ledgers: weakref.WeakValueDictionary[str, CollectiveLog] = weakref.WeakValueDictionary()
        self._waiters: weakref.WeakSet[WaitState] = weakref.WeakSet()
        self._closing: dict[str, _Closing] = {}
        self._verdicts: dict[str, tuple[int, str]] = {}  # on ledgers that this rank has not made yet
        self._lock = threading.RLock()
        self._hello = board.hello()  # what is to be published first
        self._told: dict[str, bytes] = {}
        self._attentive = 0.0  # until when others are followed
        self._turn = float("-inf")  # when the next request may be sent
        self._reading: dict[str, float] = {}  # of each ledger, when its positions are read next
        self._just_read: tuple[str, float, dict[int, Position]] = (
            "",
            0.0,
            {},
        )  # of a ledger: positions, and until when they count
        self._found: dict[tuple[str, int], float] = {}  # when it was first seen that ranks of a ledger parted
        self._asked = 0, float("-inf")  # the last notice by which anybody asked, and when that was read or posted here
        self._shows = False  # whether others want the last calls of this rank
        self._surveyed: weakref.WeakKeyDictionary[CollectiveLog, tuple[tuple[int, int], str]] = weakref.WeakKeyDictionary()
        self._warned = False
        self._process = os.getpid()
        self._ended = threading.Event()
        self._report_wanted = False
        self._thread: threading.Thread | None = None

    # --- who is watched ---

    def add(self, ledger: CollectiveLog, *, start: bool = True) -> None:
        with self._lock:
            self._ledgers[ledger.key] = ledger
            self._hello[f"{ledger.key}/{self._rank}"] = self._position(ledger).pack()
            epoch, verdict = self._verdicts.pop(ledger.key, (-1, ""))
            if epoch == ledger.epoch:
                self._close(ledger, verdict)
        if start and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
            _OF.threads = [*filter(threading.Thread.is_alive, _OF.threads), self._thread]
            self._thread.start()

    def new_wait_state(self) -> WaitState:
        """For one thread."""
        waiter = WaitState()
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
        self._report_wanted = True

    def stay_attentive(self) -> None:
        """Follow the others for a while: this rank left something by an exception, and they may soon wait for it."""
        self._attentive = max(self._attentive, self._clock() + _ATTENTIVE)

    def end(self) -> None:
        """The program ends, or its process group was destroyed."""
        if not self._ended.is_set() and os.getpid() == self._process:
            self._ended.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(2.0)
            with contextlib.suppress(Exception):
                if self._is_awaited():
                    self._publish(self._changed(ended=True))
            self._board.close()

    def _is_awaited(self) -> bool:
        """Whether others may ask why this rank ended: they were told where it is, or it left something by an exception."""
        told = any(key.endswith("/said") for key in self._told) and _torch.default_store() is _OF.store
        return told or any(
            ledger.exception_note is not None or ledger.desync_error is not None for ledger in list(self._ledgers.values())
        )

    # --- the thread ---

    def _run(self) -> None:
        bell = self._board.bell
        failures = 0
        while not self._ended.is_set():
            try:
                signals = [] if _OF.pipe is None else [_OF.pipe]
                if bell is not None:
                    urgency = bell.wait(_TICK, signals)
                else:
                    self._ended.wait(_TICK)
                    urgency = 0
                if _torch.default_store() is not _OF.store:
                    return _destroyed(self)
                if not self._ended.is_set():
                    self.look(urgency)
                failures = 0
            except _torch.NetworkError:  # the store is gone: its rank ended
                return
            except Exception as failure:
                failures += 1
                if failures > 20:
                    warnings.warn(f"fullshard's watch ends, since looking failed 20 times: {headline(failure)}", stacklevel=2)
                    return

    def look(self, urgency: int = 0) -> None:
        """One look at this rank and, if anybody is concerned, at the others."""
        now = self._clock()
        with self._lock:
            if self._report_wanted or _signalled():
                self._report_wanted = False
                self._report()
            if urgency:
                self._attentive = max(self._attentive, now + _ATTENTIVE)
                for closing in self._closing.values():
                    closing.next = now
            stuck = [(waiter, waiter.seconds_waiting(now)) for waiter in self._waiters]
            concerned = [waiter for waiter, seconds in stuck if seconds > waiter.patience]
            waits = any(seconds > waiter.patience / 2 for waiter, seconds in stuck)  # to tell where it is takes a turn
            self._close_further(now)
            if waits or now <= self._attentive:
                if urgency == NOW or not self._board.many:
                    self._speak(now, concerned)
                else:
                    self._speak_in_turn(now, concerned)
                for ledger in list(self._ledgers.values()):
                    if self._reads(ledger) and now >= self._reading.setdefault(ledger.key, now + self._offset(ledger)):
                        self._reading[ledger.key] = now + self._interval(ledger)
                        self._inquire(ledger, [w for w in concerned if w.waits_in(ledger)], now)
                self._answer_all(now)
            else:
                self._reading.clear()
                if self._hello and self._take_turn(now):
                    hello, self._hello = self._hello, {}
                    self._board.publish(hello)

    def _speak(self, now: float, concerned: Sequence[WaitState]) -> None:
        """Publish what changed here, read what others posted, and ask where they are if it is time to."""
        self._publish(self._changed())
        self._hear()
        if self._is_to_ask(now, concerned):
            if any(self._reads(ledger) for ledger in list(self._ledgers.values())):
                self._ask(now)
            else:
                self._ring_readers(now)

    def _speak_in_turn(self, now: float, concerned: Sequence[WaitState]) -> None:
        """As `_speak`, as far as the turns of this rank allow."""
        board = self._board
        if not self._take_turn(now):
            return
        if records := self._changed():
            self._publish(records)
        elif board.has_news:
            self._hear()
        elif not self._is_to_ask(now, concerned):
            board.count_news()
        elif any(self._reads(ledger) for ledger in list(self._ledgers.values())):
            self._ask(now)
        else:
            self._ring_readers(now)

    def _take_turn(self, now: float) -> bool:
        """Whether the turn of this rank to send a request has come; always, if the ranks are few."""
        board, period = self._board, max(_TICK, self._board.period)
        if not board.many:
            return True
        if now > self._turn + 2 * _TICK:  # it missed one, since it had nothing to send: its place in the period is by its rank
            begin = now - now % period + board.rank / board.size * period
            self._turn = begin if begin >= now else begin + period
        if now < self._turn:
            return False
        self._turn += period
        return True

    @property
    def _urgency(self) -> int:
        """How others are rung: many at once would ask the store for too much."""
        return TURN if self._board.many else NOW

    def _is_to_ask(self, now: float, concerned: Sequence[WaitState]) -> bool:
        """Whether somebody waits here, and nobody asked since that began, or for a while."""
        return any(self._asked[1] < max(now - waiter.seconds_waiting(now), now - _AGAIN) for waiter in concerned)

    def _ring_readers(self, now: float) -> None:
        """Have those follow that read positions, if they do not wait themselves."""
        self._asked = self._asked[0], now
        self._board.ring(sorted({rank for ledger in list(self._ledgers.values()) for rank in self._readers(ledger)}), TURN)

    def _interval(self, ledger: CollectiveLog) -> float:
        """Seconds between two readings of all positions by one reader."""
        ranks = len(ledger.ranks)
        return _TICK if ranks <= _FEW else _READERS * max(_TICK, ranks * _RECORD / _BYTES)

    def _offset(self, ledger: CollectiveLog) -> float:
        """Seconds by which this reader reads behind the first one."""
        few = len(ledger.ranks) <= _FEW
        return 0.0 if few else self._readers(ledger).index(self._rank) * self._interval(ledger) / _READERS

    def _reads(self, ledger: CollectiveLog) -> bool:
        """Whether this rank reads the others' positions. Of many ranks a few do, far from each other."""
        return len(ledger.ranks) <= _FEW or self._rank in self._readers(ledger)

    @staticmethod
    def _readers(ledger: CollectiveLog) -> list[int]:
        return [ledger.ranks[index * len(ledger.ranks) // _READERS] for index in range(_READERS)]

    # --- what this rank says ---

    def _position(self, ledger: CollectiveLog, *, ended: bool = False) -> Position:
        count, digest = ledger.mark()
        flags = WAITS if any(waiter.waits_in(ledger) for waiter in self._waiters) else 0
        flags |= LEFT if ledger.exception_note is not None else 0
        flags |= ENDED if ended else 0
        flags |= MEETS if self._meeting() is not None else 0
        return Position(count, digest, ledger.epoch, self._board.heard, flags)

    def _meeting(self) -> LoggedCall | None:
        """The any_failed() in which this rank waits for others."""
        entries = [waiter.call for waiter in self._waiters]
        return next((entry for entry in entries if entry is not None and entry.log.name.startswith(MEETING)), None)

    def _said(self, ledger: CollectiveLog) -> bytes:
        """What is told of a ledger in words: the last call, the one it waits for, and how it left or whom it meets."""
        calls = ledger.remembered()
        texts = {number: text for number, _, text in calls}
        waiting = next((entry.number for waiter in self._waiters if (entry := waiter.waits_in(ledger))), None)
        last = (calls[-1][0], calls[-1][2]) if calls else None
        meeting = self._meeting()
        meets = None if meeting is None else (meeting.log.key, meeting.number, meeting.log.ranks)
        waits = None if waiting is None else (waiting, texts.get(waiting, last[1] if last else ""))
        return json.dumps([ledger.epoch, last, waits, ledger.exception_note, meets]).encode()

    def _changed(self, *, ended: bool = False) -> dict[str, bytes]:
        """What is to be published, since it is another than was published last."""
        records = dict(self._hello)
        for key, ledger in list(self._ledgers.items()):
            at = f"{key}/{self._rank}"
            records[at] = self._position(ledger, ended=ended).pack()
            if not (self._board.many and any(waiter.waits_in(ledger) for waiter in self._waiters)):
                records[f"{at}/said"] = self._said(ledger)
            if self._shows or len(ledger.ranks) <= _FEW:
                records[f"{at}/calls"] = json.dumps([ledger.epoch, ledger.remembered()]).encode()
        return {key: record for key, record in records.items() if self._told.get(key) != record}

    def _publish(self, records: dict[str, bytes]) -> None:
        """One request, if there is anything."""
        self._hello, self._shows = {}, False
        if records:
            self._board.publish(records)
            self._told.update(records)

    # --- notices ---

    def _hear(self) -> None:
        """Read what was posted, and do what it says."""
        if not (self._board.many and self._board.has_news):
            self._board.count_news()
        for number, notice in self._board.news(self._clock):
            try:
                kind, *rest = json.loads(notice)
                if kind == "ask":
                    self._asked = number, self._clock()
                    self._attentive = max(self._attentive, self._clock() + _ATTENTIVE)
                elif kind == "show":
                    self._shows = self._shows or self._rank in rest[0]
                elif kind == "verdict":
                    key, epoch, text = str(rest[0]), int(rest[1]), str(rest[2])
                    ledger = self._ledgers.get(key)
                    if ledger is None:
                        self._verdicts[key] = epoch, text
                    elif ledger.epoch == epoch:
                        self._close(ledger, text)
            except (ValueError, TypeError, IndexError) as wrong:
                self._warn_unreadable("a notice", wrong)
        if self._shows or not self._has_told_hearing():
            self._publish(self._changed())

    def _has_told_hearing(self) -> bool:
        """Whether what this rank published last says how many notices it read. With many ranks, its next turn will do."""
        places = {f"{key}/{self._rank}": self._position(ledger) for key, ledger in list(self._ledgers.items())}
        return self._board.many or all(self._told.get(key) == place.pack() for key, place in places.items())

    def _ask(self, now: float) -> int:
        """Ask all others where they are; the number of the notice."""
        number = self._board.post(json.dumps(["ask", self._rank]).encode())
        self._asked = number, now
        others = sorted({rank for ledger in list(self._ledgers.values()) for rank in ledger.ranks if rank != self._rank})
        self._board.ring(others[:_RUNG], self._urgency)
        return number

    def _convict(self, ledger: CollectiveLog, text: str) -> None:
        """Post a verdict. The first one that is posted closes the ledger on all ranks, this one among them."""
        try:
            self._board.post(json.dumps(["verdict", ledger.key, ledger.epoch, text]).encode())
            for _ in range(30):
                self._hear()
                if ledger.desync_error is not None:
                    break
                time.sleep(_TICK)
        except Exception:  # there is no store to say it by
            self._close(ledger, text)
            return
        if ledger.desync_error is None:
            self._close(ledger, text)
        with contextlib.suppress(Exception):
            self._board.ring(ledger.ranks[:_RUNG], self._urgency)

    def _warn_unreadable(self, what: str, wrong: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"fullshard's watch skips {what} in the store of the process group that it cannot read ({headline(wrong)}): "
                "another program, or another version of fullshard, writes under the same keys",
                stacklevel=2,
            )

    # --- what others say ---

    def _positions(self, ledger: CollectiveLog) -> dict[int, Position]:
        """Those of the other ranks, as far as they are of this epoch."""
        keys = {f"{ledger.key}/{rank}": rank for rank in ledger.ranks if rank != self._rank}
        found: dict[int, Position] = {}
        for key, record in self._board.read(list(keys)).items():
            try:
                position = Position.unpack(record)
            except ValueError as wrong:
                self._warn_unreadable("a position", wrong)
                continue
            if position.epoch == ledger.epoch & 0xFF:
                found[keys[key]] = position
        return found

    def _records(self, ledger: CollectiveLog, ranks: Sequence[int], what: str) -> dict[int, list[Any]]:
        """What these ranks published of the ledger in this epoch, under the name `what`."""
        keys = {f"{ledger.key}/{rank}/{what}": rank for rank in ranks}
        found: dict[int, list[Any]] = {}
        for key, record in self._board.read(list(keys)).items():
            try:
                epoch, *rest = json.loads(record)
                if epoch == ledger.epoch:
                    found[keys[key]] = rest
            except (ValueError, TypeError) as wrong:
                self._warn_unreadable(f"'{what}' of rank {keys[key]}", wrong)
        return found

    def _words(self, ledger: CollectiveLog, ranks: Sequence[int]) -> dict[int, RankStatus]:
        found: dict[int, RankStatus] = {}
        for rank, record in self._records(ledger, ranks, "said").items():
            try:
                found[rank] = RankStatus(*record)
            except TypeError as wrong:
                self._warn_unreadable(f"'said' of rank {rank}", wrong)
        return found

    def _windows(self, ledger: CollectiveLog, ranks: Sequence[int]) -> dict[int, list[tuple[int, int, str]]]:
        """The last calls of these ranks, this one among them, as far as they showed them."""
        found = {self._rank: ledger.remembered()} if self._rank in ranks else {}
        for rank, record in self._records(ledger, [rank for rank in ranks if rank != self._rank], "calls").items():
            try:
                found[rank] = [(int(number), int(digest), str(text)) for number, digest, text in record[0]]
            except (ValueError, TypeError, IndexError) as wrong:
                self._warn_unreadable(f"'calls' of rank {rank}", wrong)
        return found

    def _inquire(self, ledger: CollectiveLog, concerned: Sequence[WaitState], now: float) -> None:
        if ledger.desync_error is not None:
            return
        text = self._diagnose(ledger, concerned, now)
        if text is not None:
            self._convict(ledger, text)

    def _diagnose(self, ledger: CollectiveLog, concerned: Sequence[WaitState], now: float) -> str | None:
        """Why there is no use in waiting, None if there may be."""
        key, until, positions = self._just_read
        if key != ledger.key or now > until:
            positions = self._positions(ledger)
        text = self._parted(ledger, positions, now)
        if text is not None:
            return text
        for waiter in concerned:
            entry = waiter.waits_in(ledger)
            if entry is None:  # it went on meanwhile
                continue
            here = f"rank {self._rank} waits in {entry}"
            stuck = waiter.seconds_waiting(now)
            asked, when = self._asked
            fresh = {rank: place for rank, place in positions.items() if when >= now - stuck and place.has_heard(asked)}
            gone = [rank for rank, place in positions.items() if place.flags & ENDED]
            if gone:
                words = self._words(ledger, gone[:_TOLD])
                last = "; ".join(f"{listed([rank])}: {said}" for rank, said in words.items())
                return f"{listed(gone)} ended the program, while {here}. {last}"
            meeting = self._meeting_without(ledger, [rank for rank, place in positions.items() if place.flags & MEETS])
            if meeting and not ledger.name.startswith(MEETING):
                return (
                    f"{listed(meeting)} {'is' if len(meeting) == 1 else 'are'} in fullshard.any_failed(), and {here}: "
                    "the step failed, or ended early, there. Call any_failed() on all ranks"
                )
            if stuck > max(_LEFT, waiter.patience):
                left = [rank for rank, place in fresh.items() if place.flags & LEFT and place.count < entry.number]
                words = self._words(ledger, left[:_TOLD])
                reasons = [f"{listed([rank])} left {said.left}" for rank, said in words.items() if said.left]
                if reasons:
                    return (
                        f"{'; '.join(reasons)}, and {here}: the step failed there. End the program, or call any_failed() on "
                        "all ranks to skip the step together"
                    )
            if waiter.timeout is not None and stuck > waiter.timeout:
                late = stuck - waiter.timeout
                if len(fresh) == len(ledger.ranks) - 1 or late > _AGAIN:
                    there = self._whereabouts(ledger, positions)
                    return f"rank {self._rank} waited {waiter.timeout:g} seconds (CheckPolicy.timeout) in {entry}. {there}"
        return None

    def _meeting_without(self, ledger: CollectiveLog, ranks: Sequence[int]) -> list[int]:
        """Of `ranks`, those that wait in an any_failed() to which this rank has not come."""
        found = []
        for rank, said in self._words(ledger, ranks[:_TOLD]).items():
            if said.meets is not None:
                key, number, members = said.meets
                mine = self._ledgers.get(key)
                if self._rank in members and (mine is None or mine.count < number):
                    found.append(rank)
        return found

    def _parted(self, ledger: CollectiveLog, positions: dict[int, Position], now: float) -> str | None:
        """Where the ranks parted, None if they did not, as far as is known.

        Ranks of one count and one hash said the same, so the last calls of one of them are read for all; of ranks whose
        position is in no history that is known here, one of each kind is asked to show its last calls.
        """
        windows = {self._rank: ledger.remembered()}
        known = {number: digest for number, digest, _ in windows[self._rank]}
        here = max(known, default=0)
        top = max(positions, key=lambda rank: positions[rank].count, default=self._rank)
        chosen: list[int] = []
        if top in positions and positions[top].count > here:  # what came behind this rank's last call, it may know
            chosen = [top]
            windows |= self._windows(ledger, chosen)
            known |= {number: digest for number, digest, _ in windows.get(top, ()) if number > here}
        kinds: dict[tuple[int, int], int] = {}
        for rank, place in sorted(positions.items()):
            if known.get(place.count, place.hash) != place.hash:
                kinds.setdefault((place.count, place.hash), rank)
        if kinds:
            chosen += list(kinds.values())[:_READERS]
            windows |= self._windows(ledger, list(kinds.values())[:_READERS])
        lacking = [rank for rank in chosen if positions[rank].hash not in {digest for _, digest, _ in windows.get(rank, ())}]
        if lacking and len(ledger.ranks) > _FEW:
            self._board.post(json.dumps(["show", lacking]).encode())
            self._board.ring(lacking)
            self._reading[ledger.key] = now + 2 * _TICK  # for what they show; to read all positions again would take long
            self._just_read = ledger.key, now + 4 * _TICK, positions
        found = find_desync(windows)
        if found is None:
            return None
        number, calls = found
        everybody = {
            text: sorted({other for rank in ranks for other in self._alike(windows[rank], number, positions, rank)})
            for text, ranks in calls.items()
        }
        since = self._found.setdefault((ledger.key, ledger.epoch), now)
        if sum(map(len, everybody.values())) < len(ledger.ranks) and now < since + max(_GRACE, self._board.period):
            return None  # others may say so soon, and all are named
        texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in everybody.items())
        if len(calls) == 1:
            texts += ", but of other parameters, shapes or dtypes, or after other calls"
        return f"the ranks parted at call {number}. {texts}. {_ADVICE_ON_WRITES if _writes(calls) else _ADVICE_ON_UNITS}"

    @staticmethod
    def _alike(window: list[tuple[int, int, str]], number: int, positions: dict[int, Position], rank: int) -> list[int]:
        """The ranks that came to call `number` by the history of `rank`, as far as their positions say so."""
        digests = {count: digest for count, digest, _ in window if count >= number}
        return [rank, *(other for other, place in positions.items() if digests.get(place.count) == place.hash)]

    def _whereabouts(self, ledger: CollectiveLog, positions: dict[int, Position]) -> str:
        """Where the other ranks are since this one asked, in one sentence."""
        others = [rank for rank in ledger.ranks if rank != self._rank]
        waiting = [rank for rank in others if rank in positions and positions[rank].flags & WAITS]
        asked = [rank for rank in others if rank not in waiting]  # those that others wait for come first
        shown = sorted([*asked, *waiting][:_TOLD])
        words = self._words(ledger, shown)
        by_text: dict[str, list[int]] = {}
        for rank in shown:
            place, said = positions.get(rank), words.get(rank)
            if place is not None and place.flags & ENDED:
                text = "ended the program" if said is None else f"ended the program, was {said}"
            elif place is None or not place.has_heard(self._asked[0]):
                text = "does not answer" if said is None else f"does not answer, was {said}"
            else:
                text = f"waiting, at call {place.count}" if said is None else str(said)
            by_text.setdefault(text, []).append(rank)
        texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in by_text.items())
        return texts if len(shown) == len(others) else f"{texts}; and {len(others) - len(shown)} more"

    # --- ledgers that are closed ---

    def _close(self, ledger: CollectiveLog, text: str) -> None:
        ledger.close(text)
        self._close_further(self._clock())

    def _close_further(self, now: float) -> None:
        """Begin to let go of ledgers that were closed, by whichever thread."""
        for key, ledger in list(self._ledgers.items()):
            closing = self._closing.get(key)
            if ledger.desync_error is None:
                self._closing.pop(key, None)
            elif closing is None or closing.epoch != ledger.epoch:
                self._begin_closing(ledger)
                self._attentive = max(self._attentive, now + _ATTENTIVE)

    def _begin_closing(self, ledger: CollectiveLog) -> None:
        """Publish which messages this rank still waits for."""
        if not ledger.tagged:
            return  # nobody could answer
        self._closing[ledger.key] = _Closing(ledger, ledger.epoch, channels())
        needs = {wire.name: [(posted.tag, posted.sizes) for posted in wire.under_way(ledger.name)] for wire in channels()}
        needs = {name: posted for name, posted in needs.items() if posted}
        with contextlib.suppress(Exception):
            self._board.publish({f"{ledger.key}/{self._rank}/needs": json.dumps([ledger.epoch, needs]).encode()})
            self._board.ring([rank for rank in ledger.ranks if rank != self._rank][:_RUNG], self._urgency)

    def _answer_all(self, now: float) -> None:
        for closing in self._closing.values():
            if now >= closing.next and not closing.is_over:
                ranks = len(closing.ledger.ranks)
                closing.next = now + max(_TICK, ranks * ranks * 200 / _BYTES)
                self._answer(closing)

    def _answer(self, closing: _Closing) -> None:
        """Exchange messages for those that other ranks still wait for, and this rank has no part in, and will have none."""
        ledger = closing.ledger
        left = [rank for rank in ledger.ranks if rank != self._rank and rank not in closing.settled]
        for rank, record in self._records(ledger, left, "needs").items():
            try:
                needs = {
                    name: [PostedMessages(ledger.name, int(tag), tuple(map(int, sizes))) for tag, sizes in listed_]
                    for name, listed_ in record[0].items()
                }
            except (ValueError, TypeError, IndexError, AttributeError) as wrong:
                self._warn_unreadable(f"'needs' of rank {rank}", wrong)
                continue
            closing.settled.add(rank)
            for wire in closing.wires:
                if rank in wire.members and wire.name in needs:
                    too_long = 0
                    with contextlib.suppress(RuntimeError):  # it is gone meanwhile, so it waits for nothing
                        too_long = wire.drain_peer(wire.members.index(rank), needs[wire.name], ledger.largest_message)
                    if too_long:
                        self._warn_unreadable(f"a message of {too_long} bytes of rank {rank}", ValueError("longer than any"))
        if closing.is_over:
            closing.wires.clear()

    def publish_state(self) -> None:
        """Have the others know where this rank is, and which messages of closed ledgers it waits for."""
        with self._lock:
            self._publish(self._changed())
            for ledger in list(self._ledgers.values()):
                if ledger.desync_error is not None:
                    self._begin_closing(ledger)

    def answer_peers(self, ledger: CollectiveLog) -> None:
        """Have nobody wait for a message of a closed ledger. All other ranks have told which ones they wait for."""
        with self._lock:
            closing = self._closing.get(ledger.key)
            if closing is not None:
                closing.settled.clear()
                closing.wires = channels()
                self._answer(closing)

    # --- what callers ask for ---

    def survey(self, ledger: CollectiveLog) -> str:
        """Where the other ranks are, once they had some time to say so.

        They are asked once for all that fails of what this rank has begun, which may be many messages.
        """
        begun, known = (ledger.epoch, ledger.count), self._surveyed.get(ledger)
        if known is None or known[0] != begun:
            try:
                text = self._collect([ledger])[0]
            except Exception as failure:
                text = f"(the store does not answer: {headline(failure)})"
            known = self._surveyed[ledger] = begun, text
        return known[1]

    def _collect(self, ledgers: Sequence[CollectiveLog]) -> list[str]:
        """Ask all others, and give them some time to answer; where they are in each of the ledgers."""
        *_, everywhere = self._asking(ledgers, _AGAIN + 1.0)
        with self._lock:
            return [self._whereabouts(one, positions) for one, positions in zip(ledgers, everywhere)]

    def _asking(self, ledgers: Sequence[CollectiveLog], seconds: float) -> Iterator[list[dict[int, Position]]]:
        """Ask all others; their positions in each of the ledgers, read again and again until all answered or time is up."""
        end = self._clock() + seconds
        with self._lock:
            number = self._ask(self._clock())
            self._publish(self._changed())
        while True:
            with self._lock:  # who asks answers others meanwhile
                self._hear()
                everywhere = [self._positions(ledger) for ledger in ledgers]
            yield everywhere
            answered = all(
                len(ledger.ranks) - 1 == sum(place.answers(number) for place in positions.values())
                for ledger, positions in zip(ledgers, everywhere)
            )
            if answered or self._clock() > end or self._ended.wait(_TICK):
                return

    def peer_lost(self, entry: LoggedCall, rank: int) -> None:
        """The connection to another rank is closed: if no verdict says why, that rank is gone. Closes the ledger."""
        ledger = entry.log
        how = "is gone: it closed its connections"
        with self._lock:
            try:
                self._hear()
                place = self._positions(ledger).get(rank)
                if place is not None and place.flags & ENDED:
                    how = "ended the program"
                if place is not None and place.flags & LEFT:
                    said = self._words(ledger, [rank]).get(rank)
                    how = how if said is None or said.left is None else f"left {said.left}, and closed its connections"
            except Exception:  # the store is gone, and its host with it
                if self._board.is_served_by_first_rank and self._rank != 0:
                    rank, how = 0, "is gone, and with it the store of the process group"
            if ledger.desync_error is None:
                self._convict(ledger, f"rank {rank} {how}, while rank {self._rank} was in {entry}")

    def confront(self, ledger: CollectiveLog, seconds: float = 5.0) -> str:
        """Where the ranks parted, which each of them knows they did; empty if what they remember does not say."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                self._shows = True
                self._publish(self._changed())
                self._hear()
                if ledger.desync_error is None and self._reads(ledger):
                    self._inquire(ledger, (), self._clock())
                if ledger.desync_error is not None:
                    return ledger.desync_error
            time.sleep(_TICK)
        return ""

    def report_at_end(self) -> None:
        """The program ends by an error of torch's own collectives, which know no names: tell the others, and print, where the
        other ranks are. A rank that the error reaches later, since this one ended, then knows the first cause.
        """
        ledgers = [ledger for ledger in list(self._ledgers.values()) if ledger.count and self._reads(ledger)]
        texts: dict[str, None] = {}
        for ledger in ledgers:
            there = ""
            try:
                for (positions,) in self._asking([ledger], _LAST) if ledger.desync_error is None else ():
                    with self._lock:
                        there = self._whereabouts(ledger, positions)
            except Exception:  # the store is gone, maybe since its rank ended by the same error meanwhile
                if not there and self._board.is_served_by_first_rank and self._rank != 0:
                    there = "rank 0 is gone, and with it the store of the process group"
            text = f"rank {self._rank} ended by an error of torch's own collectives, {self._words_of(ledger)}. {there}"
            with self._lock:
                if ledger.desync_error is None:
                    self._convict(ledger, text)
            texts[ledger.desync_error or text] = None
        if texts:
            print(f"fullshard: rank {self._rank}: {'; '.join(texts)}", file=sys.stderr, flush=True)
            if self._board.is_served_by_first_rank and self._rank == 0:
                time.sleep(3 * _TICK)  # the store ends with this rank: all others have looked by then

    def _words_of(self, ledger: CollectiveLog) -> RankStatus:
        """Where this rank is."""
        return RankStatus(*json.loads(self._said(ledger))[1:])

    def _report(self) -> None:
        ledgers = [ledger for ledger in list(self._ledgers.values()) if ledger.count]
        lines = []
        for ledger, there in zip(ledgers, self._collect(ledgers)):
            lines.append(f"fullshard: rank {self._rank}: {self._words_of(ledger)}; {there}")
        print("\n".join(lines) or f"fullshard: rank {self._rank}: before the first call", file=sys.stderr, flush=True)


_ADVICE_ON_UNITS = (
    "All ranks must run the same units in the same order: have a rank that has nothing to compute for a unit call its join(), "
    "and all ranks any_failed() when some may have raised"
)
_ADVICE_ON_WRITES = (
    "All ranks must step, load and write to their shards alike: do on all of them what one does, or change full parameters in "
    "fullshard.full_params()"
)
_WRITES = re.compile(r"\.step\(\) of |load_state_dict\(\)|\w+\(\) of '|assignment to|added to the gradients")


def _writes(calls: Iterable[str]) -> bool:
    """Whether one of the calls in which ranks differ writes to shards or gradients, instead of sending anything."""
    return any(_WRITES.search(text) for text in calls)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank says of one ledger: its last call and the one it waits for (number, text), how it left by an exception, and
    the any_failed() that it waits in (ledger, number, ranks).
    """

    last: Sequence[Any] | None
    waits: Sequence[Any] | None
    left: str | None
    meets: Sequence[Any] | None

    def __str__(self) -> str:
        if self.last is None:
            return "before the first call"
        if self.left is not None:
            return f"left {self.left}, after call {self.last[0]}, {self.last[1]}"
        if self.waits is None:
            return f"computing, or elsewhere, after call {self.last[0]}, {self.last[1]}"
        return f"waiting in call {self.waits[0]}, {self.waits[1]}"


MEETING = "any_failed "  # how the names of such ledgers begin


@dataclass(slots=True)
class _ProcessState:
    watch: Watchdog | None = None
    store: Any = None
    generation: int = 0  # process groups of which there was a watch
    pipe: int | None = None
    writer: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)  # of this watch, and of those before it


_OF = _ProcessState()


def watch_of(backend: str) -> Watchdog | None:
    """The watch of this process, None if its ranks do not talk (`backend` is torch's "fake" one), are threads of one process
    (where a rank that raises ends the others), or have no store.
    """
    if backend in ("fake", _torch.THREADED):
        return None
    store = _torch.default_store()
    if store is None:
        return None
    before: Watchdog | None = None
    with _OF.lock:
        if _OF.watch is None or _OF.store is not store:
            before = _OF.watch
            own = _torch.own_store(store, f"fullshard/{_OF.generation}")
            _OF.generation += 1
            _OF.watch = Watchdog(NoticeBoard(own, _torch.global_rank(), _torch.world_size(), bell_for(store)))
            _OF.store = store
            _listen_to_signal()
        found = _OF.watch
    if before is not None:  # of process groups that were destroyed a moment ago
        before.end()
        release()
    return found


def _destroyed(watch: Watchdog) -> None:
    """The process group is gone: nothing of ours may keep its connections open, by which the others learn of it."""
    watch.end()
    with _OF.lock:
        if _OF.watch is watch:
            _OF.watch = _OF.store = None
    release()


def _in_child() -> None:
    """A forked process has no watch: its thread, its connection and its pipe are the parent's."""
    if _OF.writer is not None and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
    _OF.watch, _OF.store, _OF.pipe, _OF.writer, _OF.threads = None, None, None, None, []


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _end() -> None:
    if signal.getsignal(signal.SIGUSR1) is _on_signal:  # Python gives it back to the system, which would end the process
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watch = _OF.watch  # its own thread may be letting go of it
    if watch is not None:
        if _torch.ends_by_collective():
            watch.report_at_end()
        watch.end()
    for thread in _OF.threads:  # one may end just now, as the process group was destroyed; Python would abort in its midst
        thread.join(_LAST)


def _on_signal(number: int, frame: Any) -> None:
    """In the main thread, once it runs Python again: if the pipe is still ours, the watch knows already."""
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current)
    watch = _OF.watch
    if watch is not None and (_OF.writer is None or current != _OF.writer):
        watch.ask()


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
        os.close(reader)
        os.close(writer)


def _signalled() -> bool:
    if _OF.pipe is None:
        return False
    try:
        return signal.SIGUSR1 in os.read(_OF.pipe, 4096)
    except BlockingIOError:
        return False


__all__ = ["MEETING", "Position", "WaitState", "Watchdog", "watch_of"]
