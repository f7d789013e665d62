"""Notices, and how the waits of a closed log end.

All ranks read the notices from the store in one order: requests for positions, and verdicts (the error texts that close a log).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fullshard.checks.collective_log import CollectiveLog
from fullshard.checks.state import LocalState, Position, WaitState
from fullshard.checks.store import BYTES, TICK, RateLimiter, Records, StateStore
from fullshard.comm.gloo import P2PChannel, PostedMessages, channels

# Seconds of waiting in a closed log before its process groups are aborted: a call that all ranks had queued may still complete.
_ABORT_SECONDS = 1.0
_NEEDS_BYTES = 200  # estimate of the bytes to read the needs of one rank, with their key


@dataclass(slots=True, eq=False)
class _Closing:
    """Closed log with ranks that may still wait for its messages."""

    log: CollectiveLog
    epoch: int
    channels: list[P2PChannel]  # kept alive here, because the model may be freed meanwhile
    drained: set[int] = field(default_factory=set)  # ranks whose pending messages are completed
    next: float = 0.0  # time at which to read the needs of the other ranks

    @property
    def is_over(self) -> bool:
        return len(self.drained) >= len(self.log.ranks) - 1


class ClosedLogs:
    """Ends the waits of closed logs.

    Messages with tags: each rank publishes the messages that it waits for, its needs. The other ranks exchange dummy data for
    them. They do so in closed logs only: in an open log, a rank would use dummy data as real data.

    Collectives without tags on an asynchronous device (nccl): each rank aborts its own process groups if a collective of the
    log does not complete.
    """

    def __init__(self, store: StateStore, local: LocalState, records: Records) -> None:
        self._store, self._local, self._records = store, local, records
        self._closing: dict[str, _Closing] = {}
        self._stalled: dict[tuple[str, int], float] = {}  # (key of a log, epoch) -> time of its first stalled call

    def update_closed(self) -> bool:
        """Add logs that any thread closed, and remove reopened ones. Return True if a log was added."""
        new = False
        for key, log in list(self._local.logs.items()):
            closing = self._closing.get(key)
            if log.desync_error is None:
                self._closing.pop(key, None)
            elif closing is None or closing.epoch != log.epoch:
                self._publish_needs(log)
                new = True
        return new

    def _publish_needs(self, log: CollectiveLog) -> None:
        """Publish the messages that this rank still waits for."""
        others = [rank for rank in log.ranks if rank != self._local.rank]
        if not log.tagged:  # other ranks cannot complete single messages, so there is nothing to drain
            self._closing[log.key] = _Closing(log, log.epoch, [], set(others))
            return
        self._closing[log.key] = _Closing(log, log.epoch, channels())
        needs = {
            channel.name: [(posted.tag, posted.sizes, posted.by_peer) for posted in channel.under_way(log.name)]
            for channel in channels()
        }
        with contextlib.suppress(Exception):
            self._records.publish_needs(log, {name: posted for name, posted in needs.items() if posted})
            self._store.wake(others)

    def republish_needs(self) -> None:
        """Publish the needs of all closed logs again."""
        for log in self._local.all_logs():
            if log.desync_error is not None:
                self._publish_needs(log)

    def schedule_read(self, now: float) -> None:
        """Read the needs of the other ranks at the next check, because a rank woke this one."""
        for closing in self._closing.values():
            closing.next = now

    def drain_due(self, now: float) -> None:
        """Complete messages of the closed logs whose needs are due to be read."""
        for closing in self._closing.values():
            if now >= closing.next and not closing.is_over:
                ranks = len(closing.log.ranks)
                # every rank reads the needs of every rank, so the interval grows with the square of their number
                closing.next = now + max(TICK, ranks * ranks * _NEEDS_BYTES / BYTES)
                self._drain(closing)

    def abort_stalled(self, now: float) -> None:
        """Abort the process groups of a closed log if the device does not complete its calls."""
        stalled: dict[tuple[str, int], float] = {}
        for log in self._local.all_logs():
            if log.desync_error is not None and log.abort is not None and self._local.waiting_in(log) is not None:
                since = stalled[log.key, log.epoch] = self._stalled.get((log.key, log.epoch), now)
                if now >= since + _ABORT_SECONDS:
                    abort, log.abort = log.abort, None
                    abort()
        self._stalled = stalled

    def drain_all(self, log: CollectiveLog) -> None:
        """Complete all pending messages of a closed log. All other ranks must have published their needs."""
        closing = self._closing.get(log.key)
        if closing is not None and log.tagged:
            closing.drained.clear()
            closing.channels = channels()
            self._drain(closing)

    def _drain(self, closing: _Closing) -> None:
        """Exchange dummy data for messages that other ranks wait for and that this rank will not take part in."""
        log = closing.log
        pending = [rank for rank in log.ranks if rank != self._local.rank and rank not in closing.drained]
        for rank, record in self._records.needs(log, pending).items():
            try:
                # record: [{name of a channel: [(tag, sizes, sizes by peer), ...]}]
                needs = {
                    name: [
                        PostedMessages(log.name, int(tag), tuple(map(int, sizes)), tuple((int(a), int(b)) for a, b in by_peer))
                        for tag, sizes, by_peer in messages
                    ]
                    for name, messages in record[0].items()
                }
            except (ValueError, TypeError, IndexError, AttributeError) as wrong:
                self._records.warn_unreadable(f"'needs' of rank {rank}", wrong)
                continue
            closing.drained.add(rank)
            for channel in closing.channels:
                if rank in channel.members and channel.name in needs:
                    too_long = 0
                    with contextlib.suppress(RuntimeError):  # the rank disconnected, so it waits for nothing
                        too_long = channel.drain_peer(channel.members.index(rank), needs[channel.name], log.largest_message)
                    if too_long:
                        what = f"a message of {too_long} bytes of rank {rank}"
                        self._records.warn_unreadable(what, ValueError("longer than any message of the log"))
        if closing.is_over:
            closing.channels.clear()


# Seconds between two requests for positions (each rank's number of calls and their hash), and the time to wait for replies.
REQUEST_INTERVAL = 5.0
_ABORTED = (
    "The backend cannot abort single collectives, so ranks whose collectives do not complete abort their process groups, which "
    "cannot be used afterwards. End the program and start it again."
)
_FOLLOW_SECONDS = 10.0  # seconds for which a rank reads notices after a request


class Notices:
    """Posts and reads notices. All ranks read them in one order, so the first verdict on a log closes it on all ranks.

    Attributes:
        clock: returns the time in seconds.
        last_request: number of the last request for positions by any rank, and the time at which this rank read or posted it,
            or last woke the readers of positions, which request them.
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
        # Time until which this rank reads notices even if none of its threads waits for a collective.
        self._following_until = 0.0

    # --- following ---

    def follow_peers(self) -> None:
        """Read notices for `_FOLLOW_SECONDS`, even if none of this rank's threads waits for a collective."""
        self._following_until = max(self._following_until, self.clock() + _FOLLOW_SECONDS)

    def is_following(self, now: float) -> bool:
        """Return True if this rank reads notices even if none of its threads waits for a collective."""
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
            text = f"{text.rstrip('.')}. {_ABORTED}"
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
            self._store.wake(log.ranks)

    # --- reading ---

    def read_notices(self) -> None:
        """Read and handle the unread notices."""
        if not (self._store.many and self._store.has_news):  # many ranks read what they counted before they count again
            self._store.count_news()
        for number, notice in self._store.news(self.clock):
            try:
                self._handle(number, *json.loads(notice))
            except (ValueError, TypeError, IndexError) as wrong:
                self._records.warn_unreadable("a notice", wrong)
        if not self._records.has_published_notices_read():  # the number read is this rank's reply to a request
            self._records.publish(self._records.changed())

    def _handle(self, number: int, kind: str, *rest: object) -> None:
        if kind == "request":
            self.last_request = number, self.clock()
            self.follow_peers()
        elif kind == "verdict":
            key, epoch, text = str(rest[0]), int(rest[1]), str(rest[2])  # type: ignore[call-overload]
            log = self._local.logs.get(key)
            if log is None:
                self._verdicts[key] = epoch, text
            elif log.epoch == epoch:
                self.close(log, text)

    # --- requests ---

    def should_request(self, now: float, concerned: Sequence[WaitState]) -> bool:
        """Return True if positions are to be requested because of the waits `concerned`.

        They are if, for one of these waits, no rank has requested positions since it began, or none has within the last
        REQUEST_INTERVAL seconds.
        """
        return any(self.last_request[1] < max(now - state.seconds_waiting(now), now - REQUEST_INTERVAL) for state in concerned)

    def request_positions(self, now: float) -> int:
        """Request the positions of all other ranks, and return the number of the notice."""
        number = self._store.post(json.dumps(["request", self._local.rank]).encode())
        self.last_request = number, now
        others = sorted({rank for log in self._local.all_logs() for rank in log.ranks if rank != self._local.rank})
        self._store.wake(others)
        return number

    def request_or_wake_readers(self, now: float) -> None:
        """Request positions if this rank reads them, else wake the ranks that do, and then request them."""
        logs = self._local.all_logs()
        if any(self._limiter.is_reader(log) for log in logs):
            self.request_positions(now)
            return
        self.last_request = self.last_request[0], now  # counts as a request: do not wake them again before REQUEST_INTERVAL
        self._store.wake(sorted({rank for log in logs for rank in self._limiter.readers(log)}))

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


__all__ = [
    "REQUEST_INTERVAL",
    "ClosedLogs",
    "Notices",
]
