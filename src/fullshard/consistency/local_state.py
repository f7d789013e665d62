"""Where this rank is: its logs, and what its threads wait for."""

from __future__ import annotations

import weakref
from typing import Any

from fullshard.consistency.collective_log import CollectiveLog, LoggedCall
from fullshard.consistency.status import ENDED, LEFT, MEETS, WAITS, Position, RankStatus

MEETING = "any_failed "  # how the names of the logs of any_failed() begin


class WaitState:
    """What one thread waits for.

    Attributes:
        call: the call that it waits for, if it waits.
        patience: seconds until it asks the others.
        timeout: seconds until it gives up; None: never.
    """

    __slots__ = ("__weakref__", "_seen", "_since", "call", "patience", "timeout")

    def __init__(self) -> None:
        self.patience = 1.0
        self.timeout: float | None = None
        self.call: LoggedCall | None = None
        self._seen: tuple[CollectiveLog, int, int] | None = None  # the call by its number: itself it would keep what is sent
        self._since = 0.0

    def configure(self, patience: float, timeout: float | None) -> None:
        """Seconds from now on."""
        self.patience, self.timeout = patience, timeout

    def enter(self, call: LoggedCall) -> LoggedCall | None:
        """The thread waits for this; what it waited for before."""
        before, self.call = self.call, call
        return before

    def leave(self, before: LoggedCall | None = None) -> None:
        """The thread waits for this call again, or for none."""
        self.call = before

    def seconds_waiting(self, now: float) -> float:
        """For how many seconds it has waited for one call, as far as is known."""
        call = self.call
        seen = None if call is None else (call.log, call.log.epoch, call.number)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return 0.0 if seen is None else now - self._since

    def waits_in(self, log: CollectiveLog) -> LoggedCall | None:
        """The call of this log that it waits for."""
        call = self.call
        return call if call is not None and call.log is log else None


class LocalState:
    """The logs and the waits of this process, all held weakly.

    Attributes:
        rank: the global number of this rank.
        logs: by key.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.logs: weakref.WeakValueDictionary[str, CollectiveLog] = weakref.WeakValueDictionary()
        self._waits: weakref.WeakSet[WaitState] = weakref.WeakSet()

    def new_wait_state(self) -> WaitState:
        """For one thread."""
        state = WaitState()
        self._waits.add(state)
        return state

    def all_logs(self) -> list[CollectiveLog]:
        """Those that are alive."""
        return list(self.logs.values())

    def waits(self) -> list[WaitState]:
        """Those that are alive."""
        return list(self._waits)

    def waiting_in(self, log: CollectiveLog) -> LoggedCall | None:
        """A call of this log that some thread waits for."""
        return next((call for state in self._waits if (call := state.waits_in(log)) is not None), None)

    def meeting(self) -> LoggedCall | None:
        """The any_failed() in which this rank waits for others."""
        calls = [state.call for state in self._waits]
        return next((call for call in calls if call is not None and call.log.name.startswith(MEETING)), None)

    def position(self, log: CollectiveLog, *, heard: int, ended: bool = False) -> Position:
        """As others are told. `heard`: how many notices were read."""
        count, digest = log.mark()
        flags = WAITS if self.waiting_in(log) is not None else 0
        flags |= LEFT if log.exception_note is not None else 0
        flags |= ENDED if ended else 0
        flags |= MEETS if self.meeting() is not None else 0
        return Position(count, digest, log.epoch, heard, flags)

    def status(self, log: CollectiveLog) -> RankStatus:
        """The same in words."""
        calls = log.remembered()
        texts = {number: text for number, _, text in calls}
        waiting, meeting = self.waiting_in(log), self.meeting()
        last = (calls[-1][0], calls[-1][2]) if calls else None
        waits = None if waiting is None else (waiting.number, texts.get(waiting.number, last[1] if last else ""))
        meets: Any = None if meeting is None else (meeting.log.key, meeting.number, meeting.log.ranks)
        return RankStatus(last, waits, log.exception_note, meets)


__all__ = ["MEETING", "LocalState", "WaitState"]
