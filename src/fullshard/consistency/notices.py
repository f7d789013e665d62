"""What ranks post to all: questions where the others are, requests for their last calls, verdicts on logs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

from fullshard.consistency.board import TURN, NoticeBoard
from fullshard.consistency.closing import RUNG, ClosedLogs
from fullshard.consistency.collective_log import CollectiveLog
from fullshard.consistency.local_state import LocalState, WaitState
from fullshard.consistency.records import Records
from fullshard.consistency.status import Position
from fullshard.consistency.turns import TICK, Turns

AGAIN = 5.0  # seconds between two times of asking, and for which an answer is waited for
_ATTENTIVE = 10.0  # seconds for which a rank that was asked follows what the others say


class Notices:
    """Posts and reads notices. All ranks read them in one order, so the first verdict on a log closes it everywhere.

    Attributes:
        asked: the last notice by which anybody asked, and when it was read or posted here.
    """

    def __init__(
        self,
        board: NoticeBoard,
        local: LocalState,
        records: Records,
        turns: Turns,
        closed: ClosedLogs,
        clock: Callable[[], float],
    ) -> None:
        self._board, self._local, self._records, self._turns, self._closed = board, local, records, turns, closed
        self.clock = clock
        self.asked = 0, float("-inf")
        self._verdicts: dict[str, tuple[int, str]] = {}  # on logs that this rank has not made yet
        self._attentive = 0.0  # until when others are followed

    # --- attention ---

    def stay_attentive(self) -> None:
        """Follow the others for a while."""
        self._attentive = max(self._attentive, self.clock() + _ATTENTIVE)

    def is_attentive(self, now: float) -> bool:
        """Whether the others are followed although this rank may not wait."""
        return now <= self._attentive

    # --- verdicts ---

    def add(self, log: CollectiveLog) -> None:
        """A new log of this rank, on which there may be a verdict already."""
        epoch, verdict = self._verdicts.pop(log.key, (-1, ""))
        if epoch == log.epoch:
            self.close(log, verdict)

    def close(self, log: CollectiveLog, text: str) -> None:
        """Close a log by a verdict."""
        log.close(text)
        self.look_for_closed()

    def look_for_closed(self) -> None:
        """Begin with logs that were closed, by whichever thread."""
        if self._closed.look_for_closed():
            self.stay_attentive()

    def convict(self, log: CollectiveLog, text: str) -> None:
        """Post a verdict. The first one that is posted closes the log on all ranks, this one among them."""
        try:
            self._board.post(json.dumps(["verdict", log.key, log.epoch, text]).encode())
            for _ in range(30):
                self.hear()
                if log.desync_error is not None:
                    break
                time.sleep(TICK)
        except Exception:  # there is no store to say it by
            self.close(log, text)
            return
        if log.desync_error is None:
            self.close(log, text)
        with contextlib.suppress(Exception):
            self._board.ring(log.ranks[:RUNG], self._turns.urgency)

    # --- reading ---

    def hear(self) -> None:
        """Read what was posted, and do what it says."""
        if not (self._board.many and self._board.has_news):
            self._board.count_news()
        for number, notice in self._board.news(self.clock):
            try:
                self._obey(number, *json.loads(notice))
            except (ValueError, TypeError, IndexError) as wrong:
                self._records.warn_unreadable("a notice", wrong)
        if self._records.shows or not self._records.has_told_hearing():
            self._records.publish(self._records.changed())

    def _obey(self, number: int, kind: str, *rest: object) -> None:
        if kind == "ask":
            self.asked = number, self.clock()
            self.stay_attentive()
        elif kind == "show":
            self._records.shows = self._records.shows or self._local.rank in rest[0]  # type: ignore[operator]
        elif kind == "verdict":
            key, epoch, text = str(rest[0]), int(rest[1]), str(rest[2])  # type: ignore[call-overload]
            log = self._local.logs.get(key)
            if log is None:
                self._verdicts[key] = epoch, text
            elif log.epoch == epoch:
                self.close(log, text)

    # --- questions ---

    def is_to_ask(self, now: float, concerned: Sequence[WaitState]) -> bool:
        """Whether somebody waits here, and nobody asked since that began, or for a while."""
        return any(self.asked[1] < max(now - state.seconds_waiting(now), now - AGAIN) for state in concerned)

    def ask(self, now: float) -> int:
        """Ask all others where they are; the number of the notice."""
        number = self._board.post(json.dumps(["ask", self._local.rank]).encode())
        self.asked = number, now
        others = sorted({rank for log in self._local.all_logs() for rank in log.ranks if rank != self._local.rank})
        self._board.ring(others[:RUNG], self._turns.urgency)
        return number

    def ask_or_ring_readers(self, now: float) -> None:
        """Ask, or have those follow that read positions, if they do not wait themselves."""
        logs = self._local.all_logs()
        if any(self._turns.reads(log) for log in logs):
            self.ask(now)
            return
        self.asked = self.asked[0], now
        self._board.ring(sorted({rank for log in logs for rank in self._turns.readers(log)}), TURN)

    def ask_to_show(self, ranks: Sequence[int]) -> None:
        """Have these ranks publish their last calls."""
        self._board.post(json.dumps(["show", ranks]).encode())
        self._board.ring(ranks)

    def answers(
        self,
        logs: Sequence[CollectiveLog],
        seconds: float,
        lock: contextlib.AbstractContextManager[object],
        pause: Callable[[], bool],
    ) -> Iterator[list[dict[int, Position]]]:
        """Ask all others; their positions in each of the logs, read again and again until all answered or time is up.

        lock: held while something is read or sent. pause: waits for a moment; True ends it.
        """
        end = self.clock() + seconds
        with lock:
            number = self.ask(self.clock())
            self._records.publish(self._records.changed())
        while True:
            with lock:  # a rank that asks answers others meanwhile
                self.hear()
                everywhere = [self._records.positions(log) for log in logs]
            yield everywhere
            answered = all(
                len(log.ranks) - 1 == sum(place.answers(number) for place in positions.values())
                for log, positions in zip(logs, everywhere)
            )
            if answered or self.clock() > end or pause():
                return


__all__ = ["AGAIN", "Notices"]
