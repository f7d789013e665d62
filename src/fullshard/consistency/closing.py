"""Logs that are closed: a rank tells which messages it still waits for, and the others exchange meaningless ones for these."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from fullshard.collectives.gloo import P2PChannel, PostedMessages, channels
from fullshard.consistency.board import NoticeBoard
from fullshard.consistency.collective_log import CollectiveLog
from fullshard.consistency.local_state import LocalState
from fullshard.consistency.records import Records
from fullshard.consistency.turns import BYTES, TICK, Turns

RUNG = 1024  # ranks that are woken together


@dataclass(slots=True, eq=False)
class _Closing:
    """A log that is closed, until every rank has its verdict and nobody waits for a message of it any more."""

    log: CollectiveLog
    epoch: int
    channels: list[P2PChannel]  # kept, whatever becomes of the model
    answered: set[int] = field(default_factory=set)
    next: float = 0.0  # when the other ranks' needs are read

    @property
    def is_over(self) -> bool:
        return len(self.answered) >= len(self.log.ranks) - 1


class ClosedLogs:
    """Ends the waits of other ranks for messages of closed logs.

    A rank answers only in a log that is closed, or others would take meaningless messages for data.
    """

    def __init__(self, board: NoticeBoard, local: LocalState, records: Records, turns: Turns) -> None:
        self._board, self._local, self._records, self._turns = board, local, records, turns
        self._closing: dict[str, _Closing] = {}

    def look_for_closed(self) -> bool:
        """Begin with logs that were closed, by whichever thread, and end with those that were opened; whether any is new."""
        new = False
        for key, log in list(self._local.logs.items()):
            closing = self._closing.get(key)
            if log.desync_error is None:
                self._closing.pop(key, None)
            elif closing is None or closing.epoch != log.epoch:
                self._begin(log)
                new = True
        return new

    def _begin(self, log: CollectiveLog) -> None:
        """Publish which messages this rank still waits for."""
        if not log.tagged:
            return  # nobody could answer
        self._closing[log.key] = _Closing(log, log.epoch, channels())
        needs = {channel.name: [(posted.tag, posted.sizes) for posted in channel.under_way(log.name)] for channel in channels()}
        with contextlib.suppress(Exception):
            self._records.publish_needs(log, {name: posted for name, posted in needs.items() if posted})
            others = [rank for rank in log.ranks if rank != self._local.rank]
            self._board.ring(others[:RUNG], self._turns.urgency)

    def begin_again(self) -> None:
        """Publish once more which messages this rank waits for, of all closed logs."""
        for log in self._local.all_logs():
            if log.desync_error is not None:
                self._begin(log)

    def read_soon(self, now: float) -> None:
        """Somebody rang: there may be needs."""
        for closing in self._closing.values():
            closing.next = now

    def answer_due(self, now: float) -> None:
        """Answer the others, where it is time to look for their needs."""
        for closing in self._closing.values():
            if now >= closing.next and not closing.is_over:
                ranks = len(closing.log.ranks)
                closing.next = now + max(TICK, ranks * ranks * 200 / BYTES)
                self._answer(closing)

    def answer_everybody(self, log: CollectiveLog) -> None:
        """Have nobody wait for a message of a closed log. All other ranks have told which ones they wait for."""
        closing = self._closing.get(log.key)
        if closing is not None:
            closing.answered.clear()
            closing.channels = channels()
            self._answer(closing)

    def _answer(self, closing: _Closing) -> None:
        """Exchange messages for those that other ranks still wait for, and this rank has no part in, and will have none."""
        log = closing.log
        left = [rank for rank in log.ranks if rank != self._local.rank and rank not in closing.answered]
        for rank, record in self._records.needs(log, left).items():
            try:
                needs = {
                    name: [PostedMessages(log.name, int(tag), tuple(map(int, sizes))) for tag, sizes in messages]
                    for name, messages in record[0].items()
                }
            except (ValueError, TypeError, IndexError, AttributeError) as wrong:
                self._records.warn_unreadable(f"'needs' of rank {rank}", wrong)
                continue
            closing.answered.add(rank)
            for channel in closing.channels:
                if rank in channel.members and channel.name in needs:
                    too_long = 0
                    with contextlib.suppress(RuntimeError):  # it is gone meanwhile, so it waits for nothing
                        too_long = channel.drain_peer(channel.members.index(rank), needs[channel.name], log.largest_message)
                    if too_long:
                        what = f"a message of {too_long} bytes of rank {rank}"
                        self._records.warn_unreadable(what, ValueError("longer than any"))
        if closing.is_over:
            closing.channels.clear()


__all__ = ["RUNG", "ClosedLogs"]
