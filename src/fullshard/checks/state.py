"""The published state of a rank in a log, and the waits of its threads."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import astuple, dataclass
from typing import Any

from fullshard.checks.collective_log import CollectiveLog, LoggedCall


@dataclass(frozen=True, slots=True)
class RankState:
    """The published state of a rank in one log."""

    count: int  # number of calls
    hash: int  # 64-bit hash of these calls
    notices_read: int = 0  # number of notices (see `StateStore`) that the rank had read
    last: str = ""  # text of the last call; "" before the first one
    waits: str | None = None  # number and text of the call that the rank waits for, as in "3, all_gather of 'a'"
    exception: str | None = None  # class, text and place of the exception that ended the step
    ended: bool = False  # whether the rank ended the program or destroyed its process group
    beyond: bool = False  # whether the call in `waits` may also wait for ranks that have no part in the log

    def pack(self) -> bytes:
        """Return the record to publish."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def unpack(cls, record: bytes) -> RankState:
        """Return the state in a published record. Raises ValueError or TypeError if the record is invalid."""
        count, digest, notices_read, *words = json.loads(record)
        return cls(int(count), int(digest), int(notices_read), *words)

    def replies_to(self, number: int) -> bool:
        """Return True if the state was published after the rank had read notice `number`, or when the rank ended."""
        return self.ended or self.notices_read >= number

    def __str__(self) -> str:
        where = f"after collective {self.count}, {self.last}" if self.count else "before the first collective"
        if self.exception is not None:
            return f"raised {self.exception}, {where}"
        if self.waits is not None:
            return f"waiting in collective {self.waits}{', or in its all-reduce hook for another replica' * self.beyond}"
        return f"computing or elsewhere, {where}" if self.count else where


class WaitState:
    """The call that one thread waits for.

    The thread is in the `wait` of this call. With an asynchronous device the host seldom waits: then the call may be
    the oldest one that the device has not completed (docs/error-detection.md).
    """

    __slots__ = ("__weakref__", "_newest", "_seen", "_since", "_stalled", "call", "in_flight", "patience", "timeout")

    def __init__(self) -> None:
        self.patience = 1.0  # seconds until the watchdog requests the states of the other ranks
        self.timeout: float | None = None  # seconds until the watchdog ends the wait; None: only the process group does
        self.call: LoggedCall | None = None  # the thread is in the `wait` of this call
        # Calls queued on an asynchronous device, oldest first. The thread appends calls, `poll_device` removes completed ones.
        # Between polls the limit drops the oldest. They have completed: a device's launch queue holds fewer calls than this.
        self.in_flight: deque[Any] = deque(maxlen=1024)
        self._newest: Any = None  # last call in flight at the last poll
        self._stalled: LoggedCall | None = None  # oldest call in flight, if the host queued nothing since the last poll
        self._seen: tuple[CollectiveLog, int] | None = None  # log and number of a call; not the call: it keeps tensors alive
        self._since = 0.0

    def poll_device(self) -> None:
        """Find the oldest call that the device has not completed. Only the watchdog's thread calls this."""
        before, self._newest = self._newest, self.in_flight[-1] if self.in_flight else None
        self._stalled = None
        # Polling takes time from the program's thread (the GIL). So nothing is polled while the host queues calls: if the
        # device hangs, the host stops soon after it.
        if self._newest is before:
            while self.in_flight and _is_done(self.in_flight[0]):
                self.in_flight.popleft()
            self._stalled = self.in_flight[0] if self.in_flight else None

    def current(self) -> LoggedCall | None:
        """Return the call that the thread or its device waits for; None if neither waits."""
        return self.call or self._stalled

    def seconds_waiting(self, now: float) -> float:
        """Return the seconds since this method first saw the current call; 0 if neither the thread nor its device waits."""
        call = self.current()
        seen = None if call is None else (call.log, call.number)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return 0.0 if seen is None else now - self._since

    def waits_in(self, log: CollectiveLog) -> LoggedCall | None:
        """Return the call of `log` that the thread or its device waits for; None if there is none."""
        call = self.current()
        return call if call is not None and call.log is log else None


def _is_done(call: Any) -> bool:
    try:
        return call.done()
    except RuntimeError:  # the device failed; the program's thread raises the error
        return True
