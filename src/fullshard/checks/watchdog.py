"""Watchdog of the waits of this rank: requests the states of the other ranks, and ends waits that cannot complete."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, LoggedCall, headline
from fullshard.checks.state import RankState, WaitState
from fullshard.checks.store import TICK, StateStore
from fullshard.checks.verdict import Inquiry

REQUEST_INTERVAL = 5.0  # seconds after which a rank that still waits requests the states anew
EXIT_SECONDS = 2.0  # maximum seconds to wait for the thread of a watchdog that ends

_FOLLOW_SECONDS = 10.0  # seconds for which a rank polls often after a request or an exception
_GRACE = 1.5  # seconds to wait for the states of all ranks after some were found to diverge
# Seconds of waiting in a closed log before its process groups are aborted, if its messages carry no tags: a call that all ranks
# have queued on their devices may still complete.
_ABORT_SECONDS = 1.0
_ABORTED = "The process groups of these ranks are aborted: end the program."


@dataclass(frozen=True, slots=True)
class _Request:
    """Request for the states of all ranks in one log. Who posted the latest one, or waits past its timeout, reads them."""

    number: int  # of the notice
    rank: int
    time: float  # at which this rank read or posted it


class Watchdog:
    """Watchdog of a process: a thread that checks ten times a second whether this rank waits too long for a collective.

    A rank polls one key of the store, the number of notices: ten times a second while it waits long and for ten seconds after a
    request or an exception, else once a second; but N ranks never more often than every N / 2,000 seconds.

    1. A rank that has waited longer than its patience posts a request. All ranks publish their states, and this rank reads
       them.
    2. If two logs differ, the ranks have diverged. A rank posts a verdict if it finds this, or finds that another rank raised,
       ended or disconnected, or if its own wait exceeds `CheckPolicy.timeout`.
    3. All ranks read notices in one order, and the first verdict on a log closes it. So all ranks raise the same text.
    4. Each rank (without tags: each that waits) aborts the process groups of a closed log, so all waits return.

    With gloo on the CPU, messages carry a tag of their call, so that no rank takes data of another call. On an accelerator the
    watchdog polls the oldest collective in flight, since the host does not wait.

        local state ──> records ──> state store <── notices: requests, verdicts ──> closed logs, aborted process groups
                          states of all ranks ──> verdict
    """

    def __init__(self, store: StateStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._logs: weakref.WeakValueDictionary[str, CollectiveLog] = weakref.WeakValueDictionary()  # by key
        self._waits: weakref.WeakSet[WaitState] = weakref.WeakSet()  # of the threads
        self._lock = threading.RLock()
        self._last_poll = clock() - store.period(waits=False) * (1 - store.rank / store.size)  # so that ranks take turns
        self._following_until = float("-inf")  # until then, this rank polls as often as if it waited
        self._requests: dict[str, _Request] = {}  # the last one, by key of the log
        self._verdicts: dict[str, str] = {}  # by key of the log
        self._closed_at: dict[str, float] = {}  # time at which a wait in a closed log was seen first, by key of the log
        self._diverged_at: dict[str, float] = {}  # time at which ranks were found to diverge, by key of the log
        # The last result of `describe_peers`: log -> (number of calls, text).
        self._described: weakref.WeakKeyDictionary[CollectiveLog, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._process, self._ended = os.getpid(), threading.Event()
        self._thread: threading.Thread | None = None

    # --- logs and waits ---

    def add(self, log: CollectiveLog, *, start: bool = True) -> None:
        """Watch the waits in `log`. `start` also starts the thread, if it does not run yet."""
        with self._lock:
            self._logs[log.key] = log
            if log.key in self._verdicts:
                log.close(self._verdicts[log.key])
        if start and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
            PROCESS.threads = [*filter(threading.Thread.is_alive, PROCESS.threads), self._thread]
            self._thread.start()

    def new_wait_state(self) -> WaitState:
        """Create the wait state of one thread."""
        state = WaitState()
        with self._lock:
            self._waits.add(state)
        return state

    def positions(self) -> list[str]:
        """Return the state of this rank in each log that has calls."""
        return [str(self._state(log)) for log in list(self._logs.values()) if log.count]

    def _state(self, log: CollectiveLog, *, ended: bool = False) -> RankState:
        count, digest = log.snapshot()
        texts = {number: text for number, _, text in log.recent_calls()}
        waiting = self._waiting_in(log)
        waits = None if waiting is None else f"{waiting.number}, {texts.get(waiting.number, waiting.fingerprint)}"
        last, beyond = texts.get(count, ""), waiting is not None and waiting.beyond
        return RankState(count, digest, self._store.notices_read, last, waits, log.exception_note, ended, beyond)

    def _waiting_in(self, log: CollectiveLog) -> LoggedCall | None:
        return next((call for state in list(self._waits) if (call := state.waits_in(log)) is not None), None)

    def follow_peers(self) -> None:
        """Poll often for a while, since ranks may soon wait: this rank raised an exception, or read a request for its state."""
        self._following_until = self._clock() + _FOLLOW_SECONDS

    def end(self) -> None:
        """Stop the watchdog, because the program ends or its process group was destroyed."""
        if self._ended.is_set() or os.getpid() != self._process:  # it belongs to the parent of this forked process
            return
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(EXIT_SECONDS)
        if not self._store.is_cut_off:
            with contextlib.suppress(Exception):
                for log in list(self._logs.values()):
                    self._store.publish(log, self._state(log, ended=True))
                self._store.leave()

    def _run(self) -> None:
        _torch.relax_capture_mode()  # the checks poll events of collectives in flight
        failures = 0
        while not self._ended.wait(TICK):
            try:
                if _torch.default_store() is not PROCESS.store:
                    return PROCESS.end_destroyed(self)
                self.check()
                failures = 0
            except dist.DistNetworkError:  # the store cannot be reached: its rank ended
                return
            except Exception as failure:
                failures += 1
                if failures > 20:
                    warnings.warn(
                        f"fullshard's watchdog stopped after {failures} consecutive errors, the last one: {headline(failure)}",
                        stacklevel=2,
                    )
                    return

    # --- check ---

    def check(self) -> None:
        """Check the waits of this rank. If a poll of the store is due, read notices, publish states and diagnose long waits."""
        now = self._clock()
        with self._lock:
            waits = list(self._waits)
            for state in waits:
                state.poll_device()
            stuck = [state for state in waits if state.seconds_waiting(now) > state.patience]
            self._abort_closed(now)
            follows = bool(stuck) or now < self._following_until
            if now < self._last_poll + self._store.period(waits=follows):
                return
            self._last_poll = now
            self._read_notices()
            for log in list(self._logs.values()):
                if follows or not self._store.has_published(log):
                    self._store.publish(log, self._state(log))
                waits = [state for state in stuck if state.waits_in(log) is not None]
                if waits and log.desync_error is None:
                    self._diagnose(log, waits, now)

    def _read_notices(self) -> None:
        """Read the new notices, and reply to requests."""
        asked = False
        for number, (kind, *rest) in self._store.news():
            if kind == "request":
                key, rank = rest
                self._requests[key] = _Request(number, rank, self._clock())
                asked = True
            elif kind == "verdict":
                key, text = rest
                log = self._logs.get(key)
                if self._verdicts.setdefault(key, text) == text and log is not None:
                    log.close(text)
            elif kind == "leave":
                self._store.cut_off(list(self._logs.values()))
        if asked:
            self.follow_peers()
            for log in list(self._logs.values()):
                self._store.publish(log, self._state(log))

    def _request(self, log: CollectiveLog) -> _Request:
        """Request the states of all ranks in a log."""
        number = self._store.post("request", log.key, self._store.rank)
        request = self._requests[log.key] = _Request(number, self._store.rank, self._clock())
        return request

    def _diagnose(self, log: CollectiveLog, waits: Sequence[WaitState], now: float) -> None:
        """Request the states, unless the last request is recent. Post a verdict if there is a reason for one."""
        request = self._requests.get(log.key)
        interval = max(REQUEST_INTERVAL, 3 * self._store.period(waits=True))
        waiting = min((state.seconds_waiting(now) for state in waits), default=interval)
        if request is None or request.time < now - min(waiting, interval):
            request = self._request(log)
        overdue = [state for state in waits if state.timeout is not None and state.seconds_waiting(now) > state.timeout]
        late = [(state, call) for state in overdue if (call := state.waits_in(log)) is not None and not call.beyond]
        if request.rank != self._store.rank and not late:
            return  # the rank that posted the request reads the states
        inquiry = Inquiry(self._store, log, request.number)
        text = self._why(log, inquiry, waits, now)
        if any(state.beyond and state.replies_to(request.number) for state in inquiry.states.values()):
            late.clear()  # a rank may wait in its all-reduce hook, for ranks that have no part in this log: nobody here is late
        if text is None and late:
            state, call = late[0]
            if inquiry.is_complete or state.seconds_waiting(now) > (state.timeout or 0.0) + interval:
                text = f"rank {self._store.rank} waited {state.timeout:g} seconds (CheckPolicy.timeout) in {call}. {inquiry}"
        if text is not None:
            self._post_verdict(log, text)

    def _why(self, log: CollectiveLog, inquiry: Inquiry, waits: Sequence[WaitState], now: float) -> str | None:
        """Return the verdict on a log; None if its collectives may complete, or if more states are awaited."""
        diverged = inquiry.why_diverged()
        if diverged is not None:
            text, names_all = diverged
            first = self._diverged_at.setdefault(log.key, now)
            # More states may arrive soon, and the verdict should name all ranks.
            return text if names_all or inquiry.is_complete or now > first + _GRACE else None
        for state in waits:
            call = state.waits_in(log)  # None if the thread has continued
            reason = None if call is None else inquiry.why_waiting(state, call, state.seconds_waiting(now))
            if reason is not None:
                return reason
        return None

    # --- verdicts ---

    def _post_verdict(self, log: CollectiveLog, text: str) -> None:
        """Post a verdict. The first verdict posted on a log closes it on all ranks, this one included."""
        text = f"{text.rstrip('.')}. {_ABORTED}"
        try:
            self._store.post("verdict", log.key, text)
            for _ in range(0 if self._store.is_cut_off else 30):
                self._read_notices()
                if log.desync_error is not None:
                    return
                time.sleep(TICK)
        except Exception:  # without the store, close the log on this rank only
            pass
        self._verdicts.setdefault(log.key, text)
        log.close(text)

    def _abort_closed(self, now: float) -> None:
        """Abort the process groups of closed logs: at once if tagged, else after a wait of `_ABORT_SECONDS`."""
        for log in list(self._logs.values()):
            if log.desync_error is None or log.abort is None:
                continue
            if not log.tagged and self._waiting_in(log) is None:
                continue
            if log.tagged or now >= self._closed_at.setdefault(log.key, now) + _ABORT_SECONDS:
                abort, log.abort = log.abort, None
                abort()

    # --- calls by the runtime ---

    def describe_peers(self, log: CollectiveLog) -> str:
        """Return the states of the other ranks, after giving them some time to reply."""
        # many collectives of one rank may fail together: request the states once for all calls up to now
        known = self._described.get(log)
        if known is None or known[0] != log.count:
            try:
                text = self._ask(log)
            except Exception as failure:
                text = f"(The store of the process group does not answer: {headline(failure)})"
            known = self._described[log] = log.count, text
        return known[1]

    def _ask(self, log: CollectiveLog) -> str:
        """Request the states of the other ranks, and return them once all replied, the log is closed, or time has passed."""
        end = self._clock() + REQUEST_INTERVAL + 1.0
        with self._lock:
            request = self._request(log)
        while True:
            with self._lock:  # released between reads, so that this rank replies to others meanwhile
                self._read_notices()
                inquiry = Inquiry(self._store, log, request.number)
            closed = log.desync_error is not None
            if inquiry.is_complete or closed or self._clock() > end or self._ended.wait(TICK):
                return str(inquiry)

    def peer_lost(self, call: LoggedCall, rank: int) -> None:
        """Close the log of `call`: a message to or from `rank` failed. The verdict says why, if `rank` published that."""
        log, how = call.log, "is gone: its connection closed or timed out"
        with self._lock:
            try:
                self._read_notices()
                state = self._store.states(log, [rank]).get(rank)
                if state is not None and state.exception is not None:
                    how = f"raised {state.exception}, and its connection closed or timed out"
                elif state is not None and state.ended:
                    how = "ended the program or its process group"
            except Exception:  # the store cannot be reached: its rank ended
                if self._store.is_served_by_first_rank and self._store.rank != 0:
                    rank, how = 0, "is gone, and with it the store of the process group"
            if log.desync_error is None:
                self._post_verdict(log, f"rank {rank} {how}, while rank {self._store.rank} was in {call}")

    def diagnose_desync(self, log: CollectiveLog, seconds: float = 5.0) -> str:
        """Return where ranks diverged, after a heartbeat showed that they did; "" if their recent calls do not show where."""
        period = self._store.period(waits=True)
        deadline = time.monotonic() + max(seconds, 3 * period)
        while time.monotonic() < deadline:
            with self._lock:
                self._read_notices()
                if log.desync_error is None:
                    self._diagnose(log, (), self._clock())
                if log.desync_error is not None:
                    return log.desync_error
            time.sleep(period)
        return ""


class _Process:
    """The watchdog of this process: created for a process group on first use, ended with the group or the program."""

    def __init__(self) -> None:
        self.watchdog: Watchdog | None = None  # of the current process group
        self.store: object = None  # of the current process group
        self.threads: list[threading.Thread] = []  # of this watchdog and of earlier ones
        self._lock = threading.Lock()
        self._generation = 0  # number of process groups that had a watchdog; part of the key prefix in the store

    def watchdog_of(self, backend: str) -> Watchdog | None:
        """Return the watchdog of this process, a new one if the store is new; None if there is nothing to watch.

        There is nothing to watch if the ranks do not communicate (`backend` is torch's "fake" one), or have no store.
        """
        store = None if backend == "fake" else _torch.default_store()
        if store is None:
            return None
        before: Watchdog | None = None
        with self._lock:
            if self.watchdog is None or self.store is not store:
                if not self._generation:  # here, since an import must change nothing in the process
                    os.register_at_fork(after_in_child=self.forget)
                    atexit.register(self.end)
                before = self.watchdog
                own = _torch.own_store(store, f"fullshard/{self._generation}")
                self._generation += 1
                self.watchdog = Watchdog(StateStore(own, dist.get_rank(), dist.get_world_size()))
                self.store = store
            found = self.watchdog
        if before is not None:  # the watchdog of a process group that was destroyed a moment ago
            before.end()
        return found

    def end_destroyed(self, watchdog: Watchdog) -> None:
        """End the watchdog of a destroyed process group."""
        watchdog.end()
        with self._lock:
            if self.watchdog is watchdog:
                self.watchdog = self.store = None

    def end(self) -> None:
        """End the watchdog at the exit of Python."""
        watchdog = self.watchdog  # read once: its thread may set it to None at any time
        if watchdog is not None:
            watchdog.end()
        # A thread may be ending because its process group was destroyed. Python would abort if it exited before the thread.
        for thread in self.threads:
            thread.join(EXIT_SECONDS)

    def forget(self) -> None:
        """Reset the state in a forked process: thread, connection and lock belong to the parent."""
        self.watchdog, self.store, self.threads, self._lock = None, None, [], threading.Lock()


PROCESS = _Process()
watchdog_of = PROCESS.watchdog_of
