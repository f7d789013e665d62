"""When a rank may ask the store, so that a job of many ranks does not drown it."""

from __future__ import annotations

from fullshard.consistency.board import NOW, TURN, NoticeBoard
from fullshard.consistency.collective_log import CollectiveLog

TICK = 0.1  # seconds between two looks
FEW = 8  # ranks up to which each reads what the others say; of more, a few do
READERS = 4
BYTES = 0.9e6  # per second, that all readers of positions may read together
_RECORD = 58  # bytes that one position takes to be read


class Turns:
    """The requests that this rank may send, as times. Few ranks send theirs whenever they look."""

    def __init__(self, board: NoticeBoard) -> None:
        self._board = board
        self._turn = float("-inf")  # when the next request may be sent
        self._reading: dict[str, float] = {}  # of each log, when its positions are read next

    @property
    def urgency(self) -> int:
        """How others are rung: many at once would ask the store for too much."""
        return TURN if self._board.many else NOW

    def take(self, now: float) -> bool:
        """Whether the turn of this rank to send a request has come, which is over then; always, if the ranks are few."""
        board, period = self._board, max(TICK, self._board.period)
        if not board.many:
            return True
        if now > self._turn + 2 * TICK:  # it missed one, since it had nothing to send: its place in the period is by its rank
            begin = now - now % period + board.rank / board.size * period
            self._turn = begin if begin >= now else begin + period
        if now < self._turn:
            return False
        self._turn += period
        return True

    def reads(self, log: CollectiveLog) -> bool:
        """Whether this rank reads the others' positions. Of many ranks a few do, far from each other."""
        return len(log.ranks) <= FEW or self._board.rank in self.readers(log)

    def takes_reading(self, log: CollectiveLog, now: float) -> bool:
        """Whether this rank reads positions of the log now."""
        if not self.reads(log) or now < self._reading.setdefault(log.key, now + self._offset(log)):
            return False
        self._reading[log.key] = now + self._interval(log)
        return True

    def put_off_reading(self, log: CollectiveLog, until: float) -> None:
        """Read positions of the log then, not before."""
        self._reading[log.key] = until

    def forget_readings(self) -> None:
        """Nobody waits."""
        self._reading.clear()

    @staticmethod
    def readers(log: CollectiveLog) -> list[int]:
        """Of many ranks, those that read positions."""
        return [log.ranks[index * len(log.ranks) // READERS] for index in range(READERS)]

    def _interval(self, log: CollectiveLog) -> float:
        """Seconds between two readings of all positions by one reader."""
        ranks = len(log.ranks)
        return TICK if ranks <= FEW else READERS * max(TICK, ranks * _RECORD / BYTES)

    def _offset(self, log: CollectiveLog) -> float:
        """Seconds by which this reader reads behind the first one."""
        few = len(log.ranks) <= FEW
        return 0.0 if few else self.readers(log).index(self._board.rank) * self._interval(log) / READERS


__all__ = ["BYTES", "FEW", "READERS", "TICK", "Turns"]
