"""The records of ranks on the board: what this one publishes of itself, and what the others did."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from fullshard.consistency.board import NoticeBoard
from fullshard.consistency.collective_log import CollectiveLog, headline
from fullshard.consistency.local_state import LocalState
from fullshard.consistency.status import Position, RankStatus
from fullshard.consistency.turns import FEW

Window = list[tuple[int, int, str]]
"""The last calls of a rank: number, hash of all up to it, text."""


class Records:
    """Of each log and rank, under keys of their own: the position, its words (`said`), the last calls, and the needs.

    Attributes:
        shows: whether others want the last calls of this rank.
    """

    def __init__(self, board: NoticeBoard, local: LocalState) -> None:
        self._board, self._local = board, local
        self._hello = board.hello()  # what is to be published first
        self._told: dict[str, bytes] = {}  # as it was published last
        self._warned = False
        self.shows = False

    # --- of this rank ---

    def greet(self, log: CollectiveLog) -> None:
        """Have the others find this rank in the log, with the first request that is sent."""
        self._hello[f"{log.key}/{self._local.rank}"] = self._position(log).pack()

    def publish_hello(self) -> None:
        """One request."""
        hello, self._hello = self._hello, {}
        self._board.publish(hello)

    @property
    def has_hello(self) -> bool:
        """Whether something is to be published although nobody waits."""
        return bool(self._hello)

    @property
    def told_others(self) -> bool:
        """Whether this rank has said where it is, in words."""
        return any(key.endswith("/said") for key in self._told)

    def changed(self, *, ended: bool = False) -> dict[str, bytes]:
        """What is to be published, since it is another than was published last."""
        local, many = self._local, self._board.many
        records = dict(self._hello)
        for log in local.all_logs():
            at = f"{log.key}/{local.rank}"
            records[at] = self._position(log, ended=ended).pack()
            if not (many and local.waiting_in(log) is not None):
                said = local.status(log)
                records[f"{at}/said"] = json.dumps([log.epoch, said.last, said.waits, said.left, said.meets]).encode()
            if self.shows or len(log.ranks) <= FEW:
                records[f"{at}/calls"] = json.dumps([log.epoch, log.remembered()]).encode()
        return {key: record for key, record in records.items() if self._told.get(key) != record}

    def publish(self, records: dict[str, bytes]) -> None:
        """One request, if there is anything."""
        self._hello, self.shows = {}, False
        if records:
            self._board.publish(records)
            self._told.update(records)

    def publish_needs(self, log: CollectiveLog, needs: object) -> None:
        """Which messages this rank still waits for."""
        self._board.publish({f"{log.key}/{self._local.rank}/needs": json.dumps([log.epoch, needs]).encode()})

    def has_told_hearing(self) -> bool:
        """Whether what was published last says how many notices were read. With many ranks, the next turn will do."""
        logs = self._local.all_logs()
        return self._board.many or all(
            self._told.get(f"{log.key}/{self._local.rank}") == self._position(log).pack() for log in logs
        )

    def _position(self, log: CollectiveLog, *, ended: bool = False) -> Position:
        return self._local.position(log, heard=self._board.heard, ended=ended)

    # --- of the others ---

    def positions(self, log: CollectiveLog) -> dict[int, Position]:
        """Those of the other ranks, as far as they are of this epoch."""
        keys = {f"{log.key}/{rank}": rank for rank in log.ranks if rank != self._local.rank}
        found: dict[int, Position] = {}
        for key, record in self._board.read(list(keys)).items():
            try:
                position = Position.unpack(record)
            except ValueError as wrong:
                self.warn_unreadable("a position", wrong)
                continue
            if position.epoch == log.epoch & 0xFF:
                found[keys[key]] = position
        return found

    def statuses(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Where these ranks are, in words."""
        found: dict[int, RankStatus] = {}
        for rank, record in self._read(log, ranks, "said").items():
            try:
                found[rank] = RankStatus(*record)
            except TypeError as wrong:
                self.warn_unreadable(f"'said' of rank {rank}", wrong)
        return found

    def windows(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, Window]:
        """The last calls of these ranks, this one among them, as far as they showed them."""
        found = {self._local.rank: log.remembered()} if self._local.rank in ranks else {}
        for rank, record in self._read(log, [rank for rank in ranks if rank != self._local.rank], "calls").items():
            try:
                found[rank] = [(int(number), int(digest), str(text)) for number, digest, text in record[0]]
            except (ValueError, TypeError, IndexError) as wrong:
                self.warn_unreadable(f"'calls' of rank {rank}", wrong)
        return found

    def needs(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, list[Any]]:
        """Which messages these ranks still wait for."""
        return self._read(log, ranks, "needs")

    def _read(self, log: CollectiveLog, ranks: Sequence[int], what: str) -> dict[int, list[Any]]:
        """What these ranks published of the log in this epoch, under the name `what`."""
        keys = {f"{log.key}/{rank}/{what}": rank for rank in ranks}
        found: dict[int, list[Any]] = {}
        for key, record in self._board.read(list(keys)).items():
            try:
                epoch, *rest = json.loads(record)
                if epoch == log.epoch:
                    found[keys[key]] = rest
            except (ValueError, TypeError) as wrong:
                self.warn_unreadable(f"'{what}' of rank {keys[key]}", wrong)
        return found

    def warn_unreadable(self, what: str, wrong: Exception) -> None:
        """Once."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"fullshard's watch skips {what} in the store of the process group that it cannot read ({headline(wrong)}): "
                "another program, or another version of fullshard, writes under the same keys",
                stacklevel=2,
            )


__all__ = ["Records", "Window"]
