"""Unblock ranks after a log is closed: complete their pending messages with dummy data, or abort their process groups."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from fullshard.checks.board import StateStore
from fullshard.checks.collective_log import CollectiveLog
from fullshard.checks.local_state import LocalState
from fullshard.checks.records import Records
from fullshard.checks.turns import BYTES, TICK, RateLimiter
from fullshard.comm.gloo import P2PChannel, PostedMessages, channels

MAX_WOKEN = 1024  # maximum number of ranks to wake at once
_ABORT_SECONDS = 1.0  # seconds for which a call of a closed log may still complete, because all ranks have queued it


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

    def __init__(self, store: StateStore, local: LocalState, records: Records, limiter: RateLimiter) -> None:
        self._store, self._local, self._records, self._limiter = store, local, records, limiter
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
        if not log.tagged:
            return  # without tags, other ranks cannot complete single messages
        self._closing[log.key] = _Closing(log, log.epoch, channels())
        needs = {channel.name: [(posted.tag, posted.sizes) for posted in channel.under_way(log.name)] for channel in channels()}
        with contextlib.suppress(Exception):
            self._records.publish_needs(log, {name: posted for name, posted in needs.items() if posted})
            others = [rank for rank in log.ranks if rank != self._local.rank]
            self._store.wake(others[:MAX_WOKEN], self._limiter.urgency)

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
                closing.next = now + max(TICK, ranks * ranks * 200 / BYTES)
                self._drain(closing)

    def abort_stalled(self, now: float) -> None:
        """Abort the process groups of closed logs of which the device cannot complete a call."""
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
        if closing is not None:
            closing.drained.clear()
            closing.channels = channels()
            self._drain(closing)

    def _drain(self, closing: _Closing) -> None:
        """Exchange dummy data for messages that other ranks wait for and that this rank will not take part in."""
        log = closing.log
        pending = [rank for rank in log.ranks if rank != self._local.rank and rank not in closing.drained]
        for rank, record in self._records.needs(log, pending).items():
            try:
                needs = {
                    name: [PostedMessages(log.name, int(tag), tuple(map(int, sizes))) for tag, sizes in messages]
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


__all__ = ["MAX_WOKEN", "ClosedLogs"]
