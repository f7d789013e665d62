"""Exchange of states between ranks through the store of the process group: records of one rank, notices to all."""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog
from fullshard.checks.state import RankState

TICK = 0.1  # seconds between two checks of the watchdog
RATE = 2000.0  # polls of the store per second, by all ranks together
_IDLE_SECONDS = 1.0  # between two polls of a rank that does not wait, or not for long yet
_END_SECONDS = 3.0  # maximum seconds for which the rank that serves the store waits for the others at the end
_NEVER = 1 << 60  # number of a notice that no rank reads
_GAP = 20  # polls after which a notice whose number was taken, but that was not written, is skipped

Window = list[tuple[int, int, str]]  # recent calls of a rank: (number, hash of all calls up to it, text)


class StateStore:
    """Records and notices in the store of the process group.

    Each rank has two records per log, each under its own key: the rank's state, and its recent calls. A notice goes to all
    ranks, and all read notices in the same order. A rank polls one key, the number of notices.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # global rank of this process, number of ranks
        self.notices_read = 0  # number of notices that this rank has read
        self.is_cut_off = False  # whether this rank sends nothing more, because the rank that serves the store ends (`cut_off`)
        self._last: dict[str, bytes] = {}  # states of rank 0, read when the store was cut off
        self._store = store
        self._extended = store.has_extended_api()  # several keys in one request; else one request for each
        self._present: set[str] = set()  # keys known to exist; keys are never deleted
        self._published: dict[str, bytes] = {}  # records as last published
        self._gap = 0  # polls that found the next notice missing

    def period(self, *, waits: bool) -> float:
        """Return the seconds between two polls. `waits`: a rank waits long, or may wait soon (`Watchdog.follow_peers`)."""
        return max(TICK if waits else _IDLE_SECONDS, self.size / RATE)

    @property
    def is_served_by_first_rank(self) -> bool:
        """True if rank 0 serves the store, not a launcher or a file."""
        return _torch.store_host(self._store) is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    # --- records ---

    def publish(self, log: CollectiveLog, state: RankState) -> None:
        """Publish this rank's state in a log, and its recent calls, if they have changed."""
        calls = zlib.compress(json.dumps(log.recent_calls()).encode())
        for key, record in ((f"{log.key}/{self.rank}", state.pack()), (f"{log.key}/{self.rank}/calls", calls)):
            if self._published.get(key) != record and not self.is_cut_off:
                self._store.set(key, record)
                self._published[key] = record

    def has_published(self, log: CollectiveLog) -> bool:
        """Return True if this rank has published a state in the log."""
        return f"{log.key}/{self.rank}" in self._published

    def states(self, log: CollectiveLog, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        """Return the published states of `ranks`, or of all ranks of the log; never that of this rank."""
        keys = {f"{log.key}/{rank}": rank for rank in (log.ranks if ranks is None else ranks) if rank != self.rank}
        found: dict[int, RankState] = {}
        for key, record in self._read(list(keys)).items():
            with contextlib.suppress(ValueError, TypeError):  # another version of fullshard writes under the same keys
                found[keys[key]] = RankState.unpack(record)
        return found

    def windows(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, Window]:
        """Return the recent calls that other ranks have published."""
        keys = {f"{log.key}/{rank}/calls": rank for rank in ranks if rank != self.rank}
        found: dict[int, Window] = {}
        for key, record in self._read(list(keys)).items():
            with contextlib.suppress(ValueError, TypeError, zlib.error):
                window = json.loads(zlib.decompress(record))
                found[keys[key]] = [(int(number), int(digest), str(text)) for number, digest, text in window]
        return found

    def _read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the records that exist.

        One request (without the extended API one per key), one more if a key is new, 3 * log2(keys) more for a missing key.
        """
        if self.is_cut_off:
            return {key: self._last[key] for key in keys if key in self._last}
        if not keys:
            return {}
        if self._present.issuperset(keys) or self._store.check(list(keys)):
            self._present.update(keys)
            values = self._store.multi_get(list(keys)) if self._extended else [self._store.get(key) for key in keys]
            return dict(zip(keys, map(bytes, values)))
        if len(keys) == 1:
            return {}
        half = len(keys) // 2
        return {**self._read(keys[:half]), **self._read(keys[half:])}

    # --- notices ---

    def post(self, *notice: object) -> int:
        """Post a notice and return its number, starting at 1. Two requests."""
        if self.is_cut_off:
            return _NEVER
        # the number is taken before the notice is written, so readers may see a gap for a moment
        number: int = self._store.add("notices", 1)
        self._store.set(f"notice/{number}", json.dumps(notice).encode())
        return number

    def news(self) -> Iterator[tuple[int, list[Any]]]:
        """Read the unread notices: (number, notice), in order. One request if there are none."""
        posted = self.notices_read if self.is_cut_off else self._store.add("notices", 0)
        for number in range(self.notices_read + 1, posted + 1):
            found = self._read([f"notice/{number}"])
            if not found:
                self._gap += 1
                if self._gap < _GAP:
                    return  # the notice is being written; the next ones must not overtake it
            self._gap = 0
            self.notices_read = number
            for record in found.values():
                with contextlib.suppress(ValueError, TypeError):
                    yield number, list(json.loads(record))

    # --- the end of the program ---

    # If the rank that serves the store ends first, the next request of any other rank prints a stack trace, even in a correct
    # program. So a rank 0 that serves the store announces its end, and waits for a moment until the others send nothing more.

    def leave(self) -> None:
        """Tell the others that this rank ends. If it serves the store, wait for a moment until they send nothing more."""
        if not (self.is_served_by_first_rank and self.rank == 0):
            self._store.add("left", 1)
            return
        self.post("leave")
        end = time.monotonic() + min(_END_SECONDS, self.period(waits=False) + 3 * TICK)
        while time.monotonic() < end and self._store.add("left", 0) < self.size - 1:
            time.sleep(TICK / 2)

    def cut_off(self, logs: Sequence[CollectiveLog]) -> None:
        """Send nothing more, because rank 0 ends, and remember its states in `logs`."""
        self._last = self._read([f"{log.key}/0" for log in logs if 0 in log.ranks])
        self._store.add("left", 1)
        self.is_cut_off = True
