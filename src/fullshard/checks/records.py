"""Records of ranks in the store: written for this rank, read for the other ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from fullshard.checks.board import StateStore
from fullshard.checks.collective_log import CollectiveLog, headline
from fullshard.checks.local_state import LocalState
from fullshard.checks.status import Position, RankStatus
from fullshard.checks.turns import FEW

Window = list[tuple[int, int, str]]
"""Recent calls of a rank: (number, hash of all calls up to it, text)."""


class Records:
    """Records of each log and rank, each under its own key: position, status (key `said`), recent calls (`calls`), `needs`.

    The needs are the messages of a closed log that a rank still waits for.

    Attributes:
        calls_requested: whether other ranks requested the recent calls of this rank.
    """

    def __init__(self, store: StateStore, local: LocalState) -> None:
        self._store, self._local = store, local
        self._announcement = store.address_record()  # to publish with the next request, even if no rank waits
        self._published: dict[str, bytes] = {}  # key -> record as last published
        self._warned = False
        self.calls_requested = False

    # --- of this rank ---

    def announce(self, log: CollectiveLog) -> None:
        """Publish this rank's position in a new log with the next request."""
        self._announcement[f"{log.key}/{self._local.rank}"] = self._position(log).pack()

    def publish_announcement(self) -> None:
        """Publish the announcement. One request."""
        hello, self._announcement = self._announcement, {}
        self._store.publish(hello)

    @property
    def has_announcement(self) -> bool:
        """True if there are records to publish although no rank waits."""
        return bool(self._announcement)

    @property
    def has_published_status(self) -> bool:
        """True if this rank has published its status."""
        return any(key.endswith("/said") for key in self._published)

    def changed(self, *, ended: bool = False) -> dict[str, bytes]:
        """Return the records that differ from those last published."""
        local, many = self._local, self._store.many
        records = dict(self._announcement)
        for log in local.all_logs():
            at = f"{log.key}/{local.rank}"
            records[at] = self._position(log, ended=ended).pack()
            if not (many and local.waiting_in(log) is not None):  # with many ranks, the position of a waiting rank is enough
                status = local.status(log)
                values = [log.epoch, status.last, status.waits, status.exception, status.any_failed]
                records[f"{at}/said"] = json.dumps(values).encode()
            if self.calls_requested or len(log.ranks) <= FEW:
                records[f"{at}/calls"] = json.dumps([log.epoch, log.recent_calls()]).encode()
        return {key: record for key, record in records.items() if self._published.get(key) != record}

    def publish(self, records: dict[str, bytes]) -> None:
        """Publish records. One request, if there are any."""
        self._announcement, self.calls_requested = {}, False
        if records:
            self._store.publish(records)
            self._published.update(records)

    def publish_needs(self, log: CollectiveLog, needs: object) -> None:
        """Publish the messages of a closed log that this rank still waits for."""
        self._store.publish({f"{log.key}/{self._local.rank}/needs": json.dumps([log.epoch, needs]).encode()})

    def has_published_notices_read(self) -> bool:
        """Return True if the published positions have the current number of read notices, or if there are many ranks."""
        logs = self._local.all_logs()  # many ranks publish in their next time slot instead
        return self._store.many or all(
            self._published.get(f"{log.key}/{self._local.rank}") == self._position(log).pack() for log in logs
        )

    def _position(self, log: CollectiveLog, *, ended: bool = False) -> Position:
        return self._local.position(log, notices_read=self._store.notices_read, ended=ended)

    # --- of the others ---

    def positions(self, log: CollectiveLog) -> dict[int, Position]:
        """Return the positions that other ranks published in this epoch."""
        keys = {f"{log.key}/{rank}": rank for rank in log.ranks if rank != self._local.rank}
        found: dict[int, Position] = {}
        for key, record in self._store.read(list(keys)).items():
            try:
                position = Position.unpack(record)
            except ValueError as wrong:
                self.warn_unreadable("a position", wrong)
                continue
            if position.epoch == log.epoch & 0xFF:
                found[keys[key]] = position
        return found

    def statuses(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the published statuses of `ranks`."""
        found: dict[int, RankStatus] = {}
        for rank, record in self._read(log, ranks, "said").items():
            try:
                found[rank] = RankStatus(*record)
            except TypeError as wrong:
                self.warn_unreadable(f"'said' of rank {rank}", wrong)
        return found

    def windows(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, Window]:
        """Return the recent calls of `ranks`, as far as they are published or of this rank."""
        found = {self._local.rank: log.recent_calls()} if self._local.rank in ranks else {}
        for rank, record in self._read(log, [rank for rank in ranks if rank != self._local.rank], "calls").items():
            try:
                found[rank] = [(int(number), int(digest), str(text)) for number, digest, text in record[0]]
            except (ValueError, TypeError, IndexError) as wrong:
                self.warn_unreadable(f"'calls' of rank {rank}", wrong)
        return found

    def needs(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, list[Any]]:
        """Return the messages that `ranks` still wait for."""
        return self._read(log, ranks, "needs")

    def _read(self, log: CollectiveLog, ranks: Sequence[int], what: str) -> dict[int, list[Any]]:
        """Return the records named `what` that `ranks` published for the log in this epoch."""
        keys = {f"{log.key}/{rank}/{what}": rank for rank in ranks}
        found: dict[int, list[Any]] = {}
        for key, record in self._store.read(list(keys)).items():
            try:
                epoch, *rest = json.loads(record)
                if epoch == log.epoch:
                    found[keys[key]] = rest
            except (ValueError, TypeError) as wrong:
                self.warn_unreadable(f"'{what}' of rank {keys[key]}", wrong)
        return found

    def warn_unreadable(self, what: str, wrong: Exception) -> None:
        """Warn, the first time only, that a record cannot be read."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"fullshard's watchdog cannot read {what} in the store of the process group and skips it ({headline(wrong)}). "
                "Another program, or another version of fullshard, writes under the same keys.",
                stacklevel=2,
            )


__all__ = ["Records", "Window"]
