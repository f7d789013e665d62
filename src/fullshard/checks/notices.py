"""Notices to all ranks: requests for positions, requests for recent calls, verdicts on logs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

from fullshard.checks.board import RATE_LIMITED, StateStore
from fullshard.checks.closing import MAX_WOKEN, ClosedLogs
from fullshard.checks.collective_log import CollectiveLog
from fullshard.checks.local_state import LocalState, WaitState
from fullshard.checks.records import Records
from fullshard.checks.status import Position
from fullshard.checks.turns import TICK, RateLimiter

REQUEST_INTERVAL = 5.0  # seconds between two requests for positions, and to wait for the replies
_ABORTED = (
    "The backend cannot end single collectives, so ranks whose collectives do not complete abort their process groups: "
    "end the program."
)
_FOLLOW_SECONDS = 10.0  # seconds for which a rank reads notices after a request


class Notices:
    """Posts and reads notices. All ranks read them in one order, so the first verdict on a log closes it on all ranks.

    Attributes:
        clock: returns the time in seconds.
        last_request: number of the last request for positions by any rank, and the time at which this rank read or posted it.
    """

    def __init__(
        self,
        store: StateStore,
        local: LocalState,
        records: Records,
        limiter: RateLimiter,
        closed: ClosedLogs,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._local, self._records, self._limiter, self._closed = store, local, records, limiter, closed
        self.clock = clock
        self.last_request = 0, float("-inf")
        self._verdicts: dict[str, tuple[int, str]] = {}  # (epoch, verdict) on logs that this rank has not created yet
        self._following_until = 0.0  # time until which this rank reads notices without waiting itself

    # --- following ---

    def follow_peers(self) -> None:
        """Read notices for a while, even if this rank does not wait."""
        self._following_until = max(self._following_until, self.clock() + _FOLLOW_SECONDS)

    def is_following(self, now: float) -> bool:
        """Return True if this rank reads notices even if it does not wait."""
        return now <= self._following_until

    # --- verdicts ---

    def add(self, log: CollectiveLog) -> None:
        """Add a new log, and close it if another rank posted a verdict on it already."""
        epoch, verdict = self._verdicts.pop(log.key, (-1, ""))
        if epoch == log.epoch:
            self.close(log, verdict)

    def close(self, log: CollectiveLog, text: str) -> None:
        """Close a log with a verdict."""
        log.close(text)
        self.update_closed()

    def update_closed(self) -> None:
        """Publish the needs of logs that any thread has closed since the last call."""
        if self._closed.update_closed():
            self.follow_peers()

    def post_verdict(self, log: CollectiveLog, text: str) -> None:
        """Post a verdict. The first verdict posted on a log closes it on all ranks, this one included."""
        if log.abort is not None:
            text = f"{text} {_ABORTED}"
        try:
            self._store.post(json.dumps(["verdict", log.key, log.epoch, text]).encode())
            for _ in range(30):
                self.read_notices()
                if log.desync_error is not None:
                    break
                time.sleep(TICK)
        except Exception:  # without the store, close the log on this rank only
            self.close(log, text)
            return
        if log.desync_error is None:  # the notice was not read in time
            self.close(log, text)
        with contextlib.suppress(Exception):
            self._store.wake(log.ranks[:MAX_WOKEN], self._limiter.urgency)

    # --- reading ---

    def read_notices(self) -> None:
        """Read and handle the unread notices."""
        if not (self._store.many and self._store.has_news):
            self._store.count_news()
        for number, notice in self._store.news(self.clock):
            try:
                self._handle(number, *json.loads(notice))
            except (ValueError, TypeError, IndexError) as wrong:
                self._records.warn_unreadable("a notice", wrong)
        if self._records.calls_requested or not self._records.has_published_notices_read():
            self._records.publish(self._records.changed())

    def _handle(self, number: int, kind: str, *rest: object) -> None:
        if kind == "ask":
            self.last_request = number, self.clock()
            self.follow_peers()
        elif kind == "show":
            self._records.calls_requested = self._records.calls_requested or self._local.rank in rest[0]  # type: ignore[operator]
        elif kind == "verdict":
            key, epoch, text = str(rest[0]), int(rest[1]), str(rest[2])  # type: ignore[call-overload]
            log = self._local.logs.get(key)
            if log is None:
                self._verdicts[key] = epoch, text
            elif log.epoch == epoch:
                self.close(log, text)

    # --- requests ---

    def should_request(self, now: float, concerned: Sequence[WaitState]) -> bool:
        """Return True if a thread waits here and no rank requested positions since its wait began, or for REQUEST_INTERVAL."""
        return any(self.last_request[1] < max(now - state.seconds_waiting(now), now - REQUEST_INTERVAL) for state in concerned)

    def request_positions(self, now: float) -> int:
        """Request the positions of all other ranks, and return the number of the notice."""
        number = self._store.post(json.dumps(["ask", self._local.rank]).encode())
        self.last_request = number, now
        others = sorted({rank for log in self._local.all_logs() for rank in log.ranks if rank != self._local.rank})
        self._store.wake(others[:MAX_WOKEN], self._limiter.urgency)
        return number

    def request_or_wake_readers(self, now: float) -> None:
        """Request positions if this rank reads them, else wake the ranks that do."""
        logs = self._local.all_logs()
        if any(self._limiter.is_reader(log) for log in logs):
            self.request_positions(now)
            return
        self.last_request = self.last_request[0], now
        self._store.wake(sorted({rank for log in logs for rank in self._limiter.readers(log)}), RATE_LIMITED)

    def request_calls(self, ranks: Sequence[int]) -> None:
        """Request the recent calls of `ranks`."""
        self._store.post(json.dumps(["show", ranks]).encode())
        self._store.wake(ranks)

    def iter_positions(
        self,
        logs: Sequence[CollectiveLog],
        seconds: float,
        lock: contextlib.AbstractContextManager[object],
        pause: Callable[[], bool],
    ) -> Iterator[list[dict[int, Position]]]:
        """Request positions, then yield the positions of the other ranks in each log until all replied or `seconds` passed.

        Args:
            logs: logs to read positions of.
            seconds: maximum time to wait for replies.
            lock: held during each exchange with the store.
            pause: sleeps between two reads; True ends the iteration.
        """
        end = self.clock() + seconds
        with lock:
            number = self.request_positions(self.clock())
            self._records.publish(self._records.changed())
        while True:
            with lock:  # released between reads, so that this rank replies to others meanwhile
                self.read_notices()
                positions_by_log = [self._records.positions(log) for log in logs]
            yield positions_by_log
            have_replied = all(
                len(log.ranks) - 1 == sum(position.is_reply_to(number) for position in positions.values())
                for log, positions in zip(logs, positions_by_log)
            )
            if have_replied or self.clock() > end or pause():
                return


__all__ = ["REQUEST_INTERVAL", "Notices"]
