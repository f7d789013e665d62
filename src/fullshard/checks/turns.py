"""Rate limits for requests to the store, so that a job of many ranks does not overload it."""

from __future__ import annotations

from fullshard.checks.board import NOW, RATE_LIMITED, StateStore
from fullshard.checks.collective_log import CollectiveLog

TICK = 0.1  # seconds between two checks of the watchdog
FEW = 8  # up to this number of ranks, each reads the positions of the others; of more ranks, only READERS do
READERS = 4
BYTES = 0.9e6  # bytes per second that all readers of positions may read together
_RECORD = 58  # bytes to read one position, with its key


class RateLimiter:
    """Times at which this rank may send requests to the store. Few ranks may send at any time."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._next_send = float("-inf")  # time of the next request of this rank
        self._reading: dict[str, float] = {}  # key of a log -> time of the next read of its positions

    @property
    def urgency(self) -> int:
        """Urgency of wake-ups: many ranks that check at once would overload the store."""
        return RATE_LIMITED if self._store.many else NOW

    def try_send(self, now: float) -> bool:
        """Return True if this rank may send a request now, and use up its slot. Few ranks may always send."""
        store, period = self._store, max(TICK, self._store.period)
        if not store.many:
            return True
        if now > self._next_send + 2 * TICK:  # unused slots expire; the next one is at the rank's offset in the period
            begin = now - now % period + store.rank / store.size * period
            self._next_send = begin if begin >= now else begin + period
        if now < self._next_send:
            return False
        self._next_send += period
        return True

    def is_reader(self, log: CollectiveLog) -> bool:
        """Return True if this rank reads the positions of the others. Of many ranks, READERS ranks at equal distances do."""
        return len(log.ranks) <= FEW or self._store.rank in self.readers(log)

    def try_read(self, log: CollectiveLog, now: float) -> bool:
        """Return True if this rank may read the positions of `log` now, and use up its slot."""
        if not self.is_reader(log) or now < self._reading.setdefault(log.key, now + self._offset(log)):
            return False
        self._reading[log.key] = now + self._interval(log)
        return True

    def postpone_read(self, log: CollectiveLog, until: float) -> None:
        """Read the positions of `log` next at time `until`."""
        self._reading[log.key] = until

    def reset_reads(self) -> None:
        """Forget the times of reads, because no rank waits."""
        self._reading.clear()

    @staticmethod
    def readers(log: CollectiveLog) -> list[int]:
        """Return the ranks that read positions if there are many ranks."""
        return [log.ranks[index * len(log.ranks) // READERS] for index in range(READERS)]

    def _interval(self, log: CollectiveLog) -> float:
        """Return the seconds between two reads of all positions by one reader."""
        ranks = len(log.ranks)
        return TICK if ranks <= FEW else READERS * max(TICK, ranks * _RECORD / BYTES)

    def _offset(self, log: CollectiveLog) -> float:
        """Return the delay in seconds of this reader after the first one, so that readers take turns."""
        few = len(log.ranks) <= FEW
        return 0.0 if few else self.readers(log).index(self._store.rank) * self._interval(log) / READERS


__all__ = ["BYTES", "FEW", "READERS", "TICK", "RateLimiter"]
