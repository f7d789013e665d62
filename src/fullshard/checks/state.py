"""State of this rank: its logs and the waits of its threads; and the form in which it is published."""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fullshard.checks.collective_log import CollectiveLog, LoggedCall

WAITING, RAISED, ENDED, IN_ANY_FAILED = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Position:
    """State of a rank in one log, packed in 16 bytes.

    Attributes:
        count: number of calls.
        hash: 64-bit hash of these calls.
        epoch: number of restarts by all ranks together (modulo 2**8 when packed).
        notices_read: number of notices that the rank had read (modulo 2**16 when packed).
        flags: WAITING, RAISED (an exception ended the step), ENDED (the program), IN_ANY_FAILED.
    """

    count: int
    hash: int
    epoch: int = 0
    notices_read: int = 0
    flags: int = 0

    _FORM = struct.Struct("<IHBBq")

    def pack(self) -> bytes:
        """Return the record to publish."""
        return self._FORM.pack(self.count, self.notices_read & 0xFFFF, self.flags, self.epoch & 0xFF, self.hash)

    @classmethod
    def unpack(cls, record: bytes) -> Position:
        """Return the position in a published record.

        Raises:
            ValueError: if the record is not a position.
        """
        try:
            count, notices_read, flags, epoch, digest = cls._FORM.unpack(record)
        except struct.error as wrong:
            raise ValueError(f"Expected a position, got another record: {wrong}.") from wrong
        return cls(count, digest, epoch, notices_read, flags)

    def has_read(self, number: int) -> bool:
        """Return True if the position was published after the rank had read notice `number`."""
        # both numbers are modulo 2**16, so compare their difference with half of that
        return (self.notices_read - number) & 0xFFFF < 0x8000

    def is_reply_to(self, number: int) -> bool:
        """Return True if the position replies to notice `number`: published after the rank had read it, or at its end."""
        return bool(self.flags & ENDED) or self.has_read(number)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """State of a rank in one log, in words.

    Attributes:
        last: last call (number, text).
        waits: call that the rank waits for (number, text).
        exception: exception that ended the step, and its place.
        any_failed: call of any_failed() that the rank waits in (key of its log, number, ranks).
    """

    last: Sequence[Any] | None
    waits: Sequence[Any] | None
    exception: str | None
    any_failed: Sequence[Any] | None

    def __str__(self) -> str:
        if self.last is None:
            return "before the first collective"
        if self.exception is not None:
            return f"raised {self.exception}, after collective {self.last[0]}, {self.last[1]}"
        if self.waits is None:
            return f"computing or elsewhere, after collective {self.last[0]}, {self.last[1]}"
        return f"waiting in collective {self.waits[0]}, {self.waits[1]}"


ANY_FAILED_PREFIX = "any_failed "  # prefix of the names of logs of any_failed()


class _CallInFlight(Protocol):
    """A `LoggedCall` whose completion can be polled."""

    def done(self) -> bool: ...


class WaitState:
    """The call that one thread waits for.

    On the CPU, that is the call whose wait the thread is in. On an asynchronous device it may also be the oldest call in
    flight, which the device has not completed.

    A host with an asynchronous device runs ahead: it queues collectives and waits for none of them. A collective that hangs
    stops the device first, and the host only later, in any code that synchronizes.

    Attributes:
        call: call that the thread waits for; None if it does not wait.
        in_flight: calls that are queued on an asynchronous device, oldest first; empty on the CPU. The thread appends to it.
        patience: seconds until the watchdog requests the positions of the other ranks.
        timeout: seconds until the wait fails; None for never.
    """

    __slots__ = ("__weakref__", "_newest", "_seen", "_since", "_stalled", "call", "in_flight", "patience", "timeout")

    def __init__(self) -> None:
        self.patience = 1.0
        self.timeout: float | None = None
        self.call: LoggedCall | None = None
        # `poll_device` removes completed calls. Where no watchdog calls it, the limit keeps the list short: it is about as many
        # calls as the launch queue of a device holds.
        self.in_flight: deque[Any] = deque(maxlen=1024)
        self._newest: _CallInFlight | None = None  # last call in flight at the last poll
        self._stalled: LoggedCall | None = None  # oldest call in flight, if the host queued nothing since the last poll
        self._seen: tuple[CollectiveLog, int, int] | None = None  # not the call, which would keep its tensors alive
        self._since = 0.0

    def configure(self, patience: float, timeout: float | None) -> None:
        """Set patience and timeout, in seconds."""
        self.patience, self.timeout = patience, timeout

    def enter(self, call: LoggedCall) -> LoggedCall | None:
        """Begin to wait for `call`, and return the call that the thread waited for before."""
        before, self.call = self.call, call
        return before

    def leave(self, before: LoggedCall | None = None) -> None:
        """End the wait, and restore the previous one if there was one."""
        self.call = before

    def poll_device(self) -> None:
        """Find the oldest call that the device has not completed. Only the watchdog's thread calls this."""
        newest = self.in_flight[-1] if self.in_flight else None
        if newest is not self._newest:
            # Polling takes time from the program's thread (the GIL). So nothing is polled while the host queues calls: if the
            # device hangs, the host stops soon after it.
            self._newest, self._stalled = newest, None
            return
        while self.in_flight and _is_done(self.in_flight[0]):
            self.in_flight.popleft()
        self._stalled = self.in_flight[0] if self.in_flight else None
        self._newest = self.in_flight[-1] if self.in_flight else None

    def current(self) -> LoggedCall | None:
        """Return the call that the thread or its device waits for; None if neither waits."""
        return self.call or self._stalled

    def seconds_waiting(self, now: float) -> float:
        """Return the seconds since this method first saw the current call; 0 if the thread does not wait."""
        call = self.current()
        seen = None if call is None else (call.log, call.log.epoch, call.number)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return 0.0 if seen is None else now - self._since

    def waits_in(self, log: CollectiveLog) -> LoggedCall | None:
        """Return the call of `log` that the thread or its device waits for; None if there is none."""
        call = self.current()
        return call if call is not None and call.log is log else None


def _is_done(call: _CallInFlight) -> bool:
    try:
        return call.done()
    except RuntimeError:  # the device failed, which the thread of the program raises
        return True


class LocalState:
    """Logs and waits of this process, referenced weakly.

    Attributes:
        rank: global rank of this process.
        logs: logs by key.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.logs: weakref.WeakValueDictionary[str, CollectiveLog] = weakref.WeakValueDictionary()
        self._waits: weakref.WeakSet[WaitState] = weakref.WeakSet()

    def new_wait_state(self) -> WaitState:
        """Create the wait state of one thread."""
        state = WaitState()
        self._waits.add(state)
        return state

    def all_logs(self) -> list[CollectiveLog]:
        """Return the logs that are alive."""
        return list(self.logs.values())

    def waits(self) -> list[WaitState]:
        """Return the wait states that are alive."""
        return list(self._waits)

    def waiting_in(self, log: CollectiveLog) -> LoggedCall | None:
        """Return a call of `log` that a thread waits for; None if no thread waits in it."""
        return next((call for state in self._waits if (call := state.waits_in(log)) is not None), None)

    def any_failed_call(self) -> LoggedCall | None:
        """Return the call of any_failed() that this rank waits in; None if it waits in none."""
        calls = [state.call for state in self._waits]
        return next((call for call in calls if call is not None and call.log.name.startswith(ANY_FAILED_PREFIX)), None)

    def position(self, log: CollectiveLog, *, notices_read: int, ended: bool = False) -> Position:
        """Return the position to publish. `notices_read` is the number of notices that this rank has read."""
        count, digest = log.snapshot()
        flags = WAITING if self.waiting_in(log) is not None else 0
        flags |= RAISED if log.exception_note is not None else 0
        flags |= ENDED if ended else 0
        flags |= IN_ANY_FAILED if self.any_failed_call() is not None else 0
        return Position(count, digest, log.epoch, notices_read, flags)

    def status(self, log: CollectiveLog) -> RankStatus:
        """Return the status to publish."""
        calls = log.recent_calls()
        texts = {number: text for number, _, text in calls}
        waiting, voting = self.waiting_in(log), self.any_failed_call()
        last = (calls[-1][0], calls[-1][2]) if calls else None
        waits = None if waiting is None else (waiting.number, texts.get(waiting.number, last[1] if last else ""))
        any_failed: Any = None if voting is None else (voting.log.key, voting.number, voting.log.ranks)
        return RankStatus(last, waits, log.exception_note, any_failed)


__all__ = [
    "ANY_FAILED_PREFIX",
    "ENDED",
    "IN_ANY_FAILED",
    "RAISED",
    "WAITING",
    "LocalState",
    "Position",
    "RankStatus",
    "WaitState",
]
