"""Watches over what this rank waits for: asks the others where they are, and ends waits in vain."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

from fullshard import _torch
from fullshard.consistency.board import NOW, NoticeBoard
from fullshard.consistency.closing import ClosedLogs
from fullshard.consistency.collective_log import CollectiveLog, LoggedCall, headline
from fullshard.consistency.diagnosis import Diagnosis
from fullshard.consistency.local_state import LocalState, WaitState
from fullshard.consistency.notices import AGAIN, Notices
from fullshard.consistency.records import Records
from fullshard.consistency.signals import SignalListener
from fullshard.consistency.status import ENDED, LEFT, Position
from fullshard.consistency.turns import TICK, Turns

LAST = 2.0  # seconds for which a rank whose program ends waits for answers


class Watchdog:
    """One per process: a thread that looks ten times a second whether somebody waits for long.

    As long as nobody does, it sends nothing. A rank that has waited longer than its patience publishes its position in each of
    its logs, and rings those that do not: they publish theirs. A few ranks read them. If two logs differ the ranks have
    parted; whichever rank finds that, or that another rank left, ended or is gone, posts the verdict. All ranks read the
    notices in one order, and the first verdict on a log closes it everywhere, so all of them say the same. Each rank then
    publishes which messages it still waits for, and the others exchange meaningless ones for those, so that all of them return.
    Messages carry the tag of their call, so until then nobody has received what was meant for somebody else.

        local state ──> records ──> board <── notices ──> closed logs
                           └──> diagnosis ──> verdicts        turns: when the store may be asked
    """

    def __init__(self, board: NoticeBoard, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._local = LocalState(board.rank)
        self._records = Records(board, self._local)
        self._turns = Turns(board)
        self._closed = ClosedLogs(board, self._local, self._records, self._turns)
        self._notices = Notices(board, self._local, self._records, self._turns, self._closed, self._now)
        self._diagnosis = Diagnosis(board, self._local, self._records, self._turns, self._notices)
        self._lock = threading.RLock()
        self._surveyed: weakref.WeakKeyDictionary[CollectiveLog, tuple[tuple[int, int], str]] = weakref.WeakKeyDictionary()
        self._report_wanted = False
        self._thread = WatchThread(self)

    def _now(self) -> float:
        return self._clock()

    # --- what is watched ---

    def add(self, log: CollectiveLog, *, start: bool = True) -> None:
        """Watch over waits in this log. `start`: also have the thread look, if it does not yet."""
        with self._lock:
            self._local.logs[log.key] = log
            self._records.greet(log)
            self._notices.add(log)
        if start:
            self._thread.start()

    def new_wait_state(self) -> WaitState:
        """For one thread."""
        with self._lock:
            return self._local.new_wait_state()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The watchdog is not in the midst of a look."""
        with self._lock:
            yield

    def ask(self) -> None:
        """Have all ranks say where they are, and print it here."""
        self._report_wanted = True

    def stay_attentive(self) -> None:
        """Follow the others for a while: this rank left something by an exception, and they may soon wait for it."""
        self._notices.stay_attentive()

    def end(self) -> None:
        """The program ends, or its process group was destroyed."""
        if self._thread.end():
            with contextlib.suppress(Exception):
                if self._is_awaited():
                    self._records.publish(self._records.changed(ended=True))
            self._board.close()

    def _is_awaited(self) -> bool:
        """Whether others may ask why this rank ended: they were told where it is, or it left something by an exception."""
        told = self._records.told_others and _torch.default_store() is PROCESS.store
        return told or any(log.exception_note is not None or log.desync_error is not None for log in self._local.all_logs())

    # --- a look ---

    def look(self, urgency: int = 0) -> None:
        """One look at this rank and, if anybody is concerned, at the others. `urgency`: of the ring that woke it."""
        now = self._clock()
        with self._lock:
            if self._report_wanted or PROCESS.signals.take():
                self._report_wanted = False
                self._report()
            if urgency:
                self._notices.stay_attentive()
                self._closed.read_soon(now)
            stuck = [(state, state.seconds_waiting(now)) for state in self._local.waits()]
            concerned = [state for state, seconds in stuck if seconds > state.patience]
            waits = any(seconds > state.patience / 2 for state, seconds in stuck)  # to tell where it is takes a turn
            self._notices.look_for_closed()
            if waits or self._notices.is_attentive(now):
                self._follow(now, concerned, at_once=urgency == NOW or not self._board.many)
            else:
                self._turns.forget_readings()
                if self._records.has_hello and self._turns.take(now):
                    self._records.publish_hello()

    def _follow(self, now: float, concerned: Sequence[WaitState], *, at_once: bool) -> None:
        """Somebody waits: tell where this rank is, and see where the others are."""
        if at_once:
            self._speak(now, concerned)
        else:
            self._speak_in_turn(now, concerned)
        for log in self._local.all_logs():
            if self._turns.takes_reading(log, now):
                self._inquire(log, [state for state in concerned if state.waits_in(log)], now)
        self._closed.answer_due(now)

    def _speak(self, now: float, concerned: Sequence[WaitState]) -> None:
        """Publish what changed here, read what others posted, and ask where they are if it is time to."""
        self._records.publish(self._records.changed())
        self._notices.hear()
        if self._notices.is_to_ask(now, concerned):
            self._notices.ask_or_ring_readers(now)

    def _speak_in_turn(self, now: float, concerned: Sequence[WaitState]) -> None:
        """As `_speak`, as far as the turns of this rank allow."""
        if not self._turns.take(now):
            return
        if records := self._records.changed():
            self._records.publish(records)
        elif self._board.has_news:
            self._notices.hear()
        elif self._notices.is_to_ask(now, concerned):
            self._notices.ask_or_ring_readers(now)
        else:
            self._board.count_news()

    def _inquire(self, log: CollectiveLog, concerned: Sequence[WaitState], now: float) -> None:
        """Post a verdict on the log if there is no use in waiting."""
        if log.desync_error is None:
            text = self._diagnosis.of(log, concerned, now)
            if text is not None:
                self._notices.convict(log, text)

    # --- what callers ask for ---

    def publish_state(self) -> None:
        """Have the others know where this rank is, and which messages of closed logs it waits for."""
        with self._lock:
            self._records.publish(self._records.changed())
            self._closed.begin_again()

    def answer_peers(self, log: CollectiveLog) -> None:
        """Have nobody wait for a message of a closed log. All other ranks have told which ones they wait for."""
        with self._lock:
            self._closed.answer_everybody(log)

    def survey(self, log: CollectiveLog) -> str:
        """Where the other ranks are, once they had some time to say so.

        They are asked once for all that fails of what this rank has begun, which may be many messages.
        """
        begun, known = (log.epoch, log.count), self._surveyed.get(log)
        if known is None or known[0] != begun:
            try:
                text = self._ask_and_wait([log])[0]
            except Exception as failure:
                text = f"(the store does not answer: {headline(failure)})"
            known = self._surveyed[log] = begun, text
        return known[1]

    def _ask_and_wait(self, logs: Sequence[CollectiveLog]) -> list[str]:
        """Ask all others, and give them some time to answer; where they are in each of the logs."""
        *_, everywhere = self._answers(logs, AGAIN + 1.0)
        with self._lock:
            return [self._diagnosis.whereabouts(log, positions) for log, positions in zip(logs, everywhere)]

    def _answers(self, logs: Sequence[CollectiveLog], seconds: float) -> Iterator[list[dict[int, Position]]]:
        return self._notices.answers(logs, seconds, self._lock, self._thread.pause)

    def peer_lost(self, call: LoggedCall, rank: int) -> None:
        """The connection to another rank is closed: if no verdict says why, that rank is gone. Closes the log."""
        log = call.log
        how = "is gone: it closed its connections"
        with self._lock:
            try:
                self._notices.hear()
                place = self._records.positions(log).get(rank)
                if place is not None and place.flags & ENDED:
                    how = "ended the program"
                if place is not None and place.flags & LEFT:
                    said = self._records.statuses(log, [rank]).get(rank)
                    how = how if said is None or said.left is None else f"left {said.left}, and closed its connections"
            except Exception:  # the store is gone, and its host with it
                if self._board.is_served_by_first_rank and self._local.rank != 0:
                    rank, how = 0, "is gone, and with it the store of the process group"
            if log.desync_error is None:
                self._notices.convict(log, f"rank {rank} {how}, while rank {self._local.rank} was in {call}")

    def confront(self, log: CollectiveLog, seconds: float = 5.0) -> str:
        """Where the ranks parted, which each of them knows they did; empty if what they remember does not say."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                self._records.shows = True
                self._records.publish(self._records.changed())
                self._notices.hear()
                if log.desync_error is None and self._turns.reads(log):
                    self._inquire(log, (), self._clock())
                if log.desync_error is not None:
                    return log.desync_error
            time.sleep(TICK)
        return ""

    # --- reports ---

    def report_at_end(self) -> None:
        """The program ends by an error of torch's own collectives, which know no names: tell the others where, and print it.

        A rank that the error reaches later, since this one ended, then knows the first cause.
        """
        rank, board = self._local.rank, self._board
        texts: dict[str, None] = {}
        for log in [log for log in self._local.all_logs() if log.count and self._turns.reads(log)]:
            there = ""
            try:
                for (positions,) in self._answers([log], LAST) if log.desync_error is None else ():
                    with self._lock:
                        there = self._diagnosis.whereabouts(log, positions)
            except Exception:  # the store is gone, maybe since its rank ended by the same error meanwhile
                if not there and board.is_served_by_first_rank and rank != 0:
                    there = "rank 0 is gone, and with it the store of the process group"
            text = f"rank {rank} ended by an error of torch's own collectives, {self._local.status(log)}. {there}"
            with self._lock:
                if log.desync_error is None:
                    self._notices.convict(log, text)
            texts[log.desync_error or text] = None
        if texts:
            print(f"fullshard: rank {rank}: {'; '.join(texts)}", file=sys.stderr, flush=True)
            if board.is_served_by_first_rank and rank == 0:
                time.sleep(3 * TICK)  # the store ends with this rank: all others have looked by then

    def _report(self) -> None:
        """Print where all ranks are."""
        rank = self._local.rank
        logs = [log for log in self._local.all_logs() if log.count]
        lines = [
            f"fullshard: rank {rank}: {self._local.status(log)}; {there}" for log, there in zip(logs, self._ask_and_wait(logs))
        ]
        print("\n".join(lines) or f"fullshard: rank {rank}: before the first call", file=sys.stderr, flush=True)

    # --- for its thread ---

    def wait_for_ring(self, ended: threading.Event) -> int:
        """Rest until the next look, or a ring; the urgency of the ring, 0 for none."""
        if self._board.bell is not None:
            return self._board.bell.wait(TICK, PROCESS.signals.files)
        ended.wait(TICK)
        return 0


class WatchThread:
    """The thread in which a watchdog looks."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._process = os.getpid()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """If it does not run yet."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
            PROCESS.threads = [*filter(threading.Thread.is_alive, PROCESS.threads), self._thread]
            self._thread.start()

    def pause(self) -> bool:
        """Rest for a moment; True if it ended."""
        return self._ended.wait(TICK)

    def end(self) -> bool:
        """Have it end; False if that was done before, or by the process that this one was forked from."""
        if self._ended.is_set() or os.getpid() != self._process:
            return False
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        return True

    def _run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            try:
                urgency = self._watchdog.wait_for_ring(self._ended)
                if _torch.default_store() is not PROCESS.store:
                    return PROCESS.on_destroyed(self._watchdog)
                if not self._ended.is_set():
                    self._watchdog.look(urgency)
                failures = 0
            except _torch.NetworkError:  # the store is gone: its rank ended
                return
            except Exception as failure:
                failures += 1
                if failures > 20:
                    warnings.warn(f"fullshard's watch ends, since looking failed 20 times: {headline(failure)}", stacklevel=2)
                    return


class ProcessState:
    """What a process has one of.

    Attributes:
        watchdog: of the process group that there is now.
        store: of that process group.
        threads: of this watchdog, and of those before it.
        signals: by which somebody asks where all ranks are.
        on_destroyed: called by the thread of a watchdog whose process group was destroyed.
    """

    def __init__(self) -> None:
        self.watchdog: Watchdog | None = None
        self.store: object = None
        self.threads: list[threading.Thread] = []
        self.signals = SignalListener()
        self.on_destroyed: Callable[[Watchdog], None] = Watchdog.end

    def forget(self) -> None:
        """In a forked process, which has no watchdog: its thread, its connection and its pipe are the parent's."""
        self.signals.forget()
        self.watchdog, self.store, self.threads = None, None, []


PROCESS = ProcessState()

__all__ = ["LAST", "PROCESS", "ProcessState", "WatchThread", "Watchdog"]
