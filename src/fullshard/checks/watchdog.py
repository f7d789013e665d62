"""Watchdog of the waits of this rank: requests the states of the other ranks, and ends waits that cannot complete."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, LoggedCall, headline
from fullshard.checks.diagnosis import Diagnosis
from fullshard.checks.notices import REQUEST_INTERVAL, ClosedLogs, Notices
from fullshard.checks.state import ENDED, RAISED, LocalState, Position, WaitState
from fullshard.checks.store import TICK, RateLimiter, Records, StateStore, open_wakeup_socket
from fullshard.comm.process_groups import release

_GONE_SECONDS = 2.0  # seconds to wait before it is checked whether the processes of other ranks exist
EXIT_SECONDS = 2.0  # maximum seconds to wait for replies, and for a thread, when the program ends


class Watchdog:
    """Watchdog of a process: a thread that checks ten times a second whether this rank waits too long for a collective.

    While no rank waits, it sends no requests to the store.

    1. A rank that has waited longer than its patience publishes its position in each of its logs. It wakes the other ranks,
       which publish theirs. A few ranks read them.
    2. If two logs differ, the ranks have diverged. The rank that finds this, or finds that another rank raised, ended or
       disconnected, posts a verdict.
    3. All ranks read notices in one order, and the first verdict on a log closes it. So all ranks raise the same text.
    4. Each rank publishes the messages that it still waits for. The others complete them with dummy data, so all waits return.

    On gloo, messages carry the tag of their call, so no rank receives the data of another call. On nccl, the watchdog polls the
    oldest collective in flight, since the host does not wait, and in step 4 each rank aborts its process groups.

        local state ──> records ──> state store <── notices ──> closed logs
                           └──> diagnosis ──> verdicts        rate limiter: when to send requests to the store
    """

    def __init__(self, store: StateStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._local = LocalState(store.rank)
        self._records = Records(store, self._local)
        self._limiter = RateLimiter(store)
        self._closed = ClosedLogs(store, self._local, self._records)
        self._notices = Notices(store, self._local, self._records, self._limiter, self._closed, self._now)
        self._diagnosis = Diagnosis(store, self._local, self._records, self._limiter, self._notices)
        self._lock = threading.RLock()
        # The last result of `describe_peers`: log -> ((epoch, number of calls), text).
        self._described: weakref.WeakKeyDictionary[CollectiveLog, tuple[tuple[int, int], str]] = weakref.WeakKeyDictionary()
        self._report_wanted = False
        self._thread = WatchThread(self)

    def _now(self) -> float:
        return self._clock()

    # --- logs and waits ---

    def add(self, log: CollectiveLog, *, start: bool = True) -> None:
        """Watch the waits in `log`. `start` also starts the thread, if it does not run yet."""
        with self._lock:
            self._local.logs[log.key] = log
            self._records.announce(log)
            self._notices.add(log)
        if start:
            self._thread.start()

    def new_wait_state(self) -> WaitState:
        """Create the wait state of one thread."""
        with self._lock:
            return self._local.new_wait_state()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the watchdog from checking inside the block."""
        with self._lock:
            yield

    def request_report(self) -> None:
        """Print the states of all ranks at the next check."""
        self._report_wanted = True

    def follow_peers(self) -> None:
        """Read notices for a while: this rank raised an exception, and other ranks may soon wait for it."""
        self._notices.follow_peers()

    def end(self) -> None:
        """Stop the watchdog, because the program ends or its process group was destroyed."""
        if self._thread.end():
            with contextlib.suppress(Exception):
                if self._is_awaited():
                    self._records.publish(self._records.changed(ended=True))
            self._store.close()

    def _is_awaited(self) -> bool:
        """Return True if other ranks may wait for this one: it published its status, raised or has a closed log.

        On backends without tags every rank counts: gloo's peers notice that its connections close, nccl's do not.
        """
        logs = self._local.all_logs()
        published = self._records.has_published_status or any(log.abort is not None for log in logs)
        return (published and _torch.default_store() is PROCESS.store) or any(
            log.exception_note is not None or log.desync_error is not None for log in logs
        )

    # --- check ---

    def check(self, woken: bool = False) -> None:
        """Check this rank and, if a wait is long or another rank woke this one, the other ranks."""
        now = self._clock()
        with self._lock:
            if self._report_wanted or PROCESS.signals.take():
                self._report_wanted = False
                self._report()
            if woken:
                self._notices.follow_peers()
                self._closed.schedule_read(now)
            for state in self._local.waits():
                state.poll_device()
            stuck = [(state, state.seconds_waiting(now)) for state in self._local.waits()]
            concerned = [state for state, seconds in stuck if seconds > state.patience]
            waits = any(seconds > state.patience / 2 for state, seconds in stuck)  # publishing may have to wait for a time slot
            self._notices.update_closed()
            self._closed.abort_stalled(now)
            if waits or self._notices.is_following(now):
                self._follow(now, concerned)
            else:
                self._limiter.reset_reads()
                if self._records.has_announcement and self._limiter.try_send(now):
                    self._records.publish_announcement()

    def _follow(self, now: float, concerned: Sequence[WaitState]) -> None:
        """Exchange states with the other ranks, because some rank waits."""
        if self._store.many:
            self._publish_and_read_when_due(now, concerned)
        else:
            self._publish_and_read(now, concerned)
        for log in self._local.all_logs():
            if self._limiter.try_read(log, now):
                self._diagnose(log, [state for state in concerned if state.waits_in(log)], now)
        self._find_gone_neighbor(now, concerned)
        self._closed.drain_due(now)

    def _find_gone_neighbor(self, now: float, concerned: Sequence[WaitState]) -> None:
        """Close a log if the process of one of its ranks on this machine is gone; the kernel may have killed it for memory.

        On gloo this is not needed: there, connections close when a process ends. It is done only after some seconds, so that a
        reason that the rank published before it ended is found first.
        """
        for state in concerned:
            call = state.current()
            if call is None or call.log.abort is None or state.seconds_waiting(now) < max(_GONE_SECONDS, state.patience):
                continue
            if self._records.lacks_neighbors(now) and self._limiter.try_send(now):
                self._records.read_neighbors(now)
            rank = self._records.gone_neighbor(call.log) if call.log.desync_error is None else None
            # A process that is gone may have taken part in the call, and another rank may be late. So all others must wait.
            if rank is not None and self._limiter.try_send(now) and self._records.all_wait(call.log):
                self.peer_lost(call, rank, "its process ended")

    def _publish_and_read(self, now: float, concerned: Sequence[WaitState]) -> None:
        """Publish the changed state of this rank, read notices, and request positions if that is due."""
        self._records.publish(self._records.changed())
        self._notices.read_notices()
        if self._notices.should_request(now, concerned):
            self._notices.request_or_wake_readers(now)

    def _publish_and_read_when_due(self, now: float, concerned: Sequence[WaitState]) -> None:
        """Do one of the requests of `_publish_and_read` if this rank may send one now."""
        if not self._limiter.try_send(now):
            return
        if records := self._records.changed():
            self._records.publish(records)
        elif self._store.has_news:
            self._notices.read_notices()
        elif self._notices.should_request(now, concerned):
            self._notices.request_or_wake_readers(now)
        else:
            self._store.count_news()

    def _diagnose(self, log: CollectiveLog, concerned: Sequence[WaitState], now: float) -> None:
        """Post a verdict on the log if its collectives cannot complete."""
        if log.desync_error is None:
            text = self._diagnosis.of(log, concerned, now)
            if text is not None:
                self._notices.post_verdict(log, text)

    # --- calls by the runtime ---

    def publish_state(self) -> None:
        """Publish the state of this rank, and the messages of closed logs that it waits for."""
        with self._lock:
            self._records.publish(self._records.changed())
            self._closed.republish_needs()

    def drain_peers(self, log: CollectiveLog) -> None:
        """Complete all pending messages of a closed log. All other ranks must have published their needs."""
        with self._lock:
            self._closed.drain_all(log)

    def describe_peers(self, log: CollectiveLog) -> str:
        """Return the states of the other ranks, after giving them some time to reply."""
        # many collectives of one rank may fail together: request the states once for all calls up to now
        logged, known = (log.epoch, log.count), self._described.get(log)
        if known is None or known[0] != logged:
            try:
                text = self._request_and_describe([log])[0]
            except Exception as failure:
                text = f"(The store of the process group does not answer: {headline(failure)})"
            known = self._described[log] = logged, text
        return known[1]

    def _request_and_describe(self, logs: Sequence[CollectiveLog]) -> list[str]:
        """Request the states of the other ranks, wait for their replies, and return the text for each log."""
        *_, positions_by_log = self._iter_positions(logs, REQUEST_INTERVAL + 1.0)
        with self._lock:
            return [self._diagnosis.peer_statuses(log, positions) for log, positions in zip(logs, positions_by_log)]

    def _iter_positions(self, logs: Sequence[CollectiveLog], seconds: float) -> Iterator[list[dict[int, Position]]]:
        return self._notices.iter_positions(logs, seconds, self._lock, self._thread.pause)

    def peer_lost(self, call: LoggedCall, rank: int, sign: str = "it closed its connections") -> None:
        """Close the log of `call` because `rank` is gone.

        The text gives the reason that the rank published, or else `sign`: how this rank noticed it.
        """
        log = call.log
        how = f"is gone: {sign}"
        with self._lock:
            try:
                self._notices.read_notices()
                position = self._records.positions(log).get(rank)
                if position is not None and position.flags & ENDED:
                    how = "ended the program"
                if position is not None and position.flags & RAISED:
                    status = self._records.statuses(log, [rank]).get(rank)
                    if status is not None and status.exception is not None:
                        how = f"raised {status.exception}, and {sign}"
            except Exception:  # the store cannot be reached: its rank ended
                if self._store.is_served_by_first_rank and self._local.rank != 0:
                    rank, how = 0, "is gone, and with it the store of the process group"
            if log.desync_error is None:
                self._notices.post_verdict(log, f"rank {rank} {how}, while rank {self._local.rank} was in {call}")

    def diagnose_desync(self, log: CollectiveLog, seconds: float = 5.0) -> str:
        """Return where ranks diverged, after a heartbeat showed that they did; "" if their recent calls do not show it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._records.publish(self._records.changed())
                self._notices.read_notices()
                if log.desync_error is None and self._limiter.is_reader(log):
                    self._diagnose(log, (), self._clock())
                if log.desync_error is not None:
                    return log.desync_error
            time.sleep(TICK)
        return ""

    # --- reports ---

    def report_at_end(self) -> None:
        """Post and print the state of this rank, because an error of torch's own collectives ends the program.

        Errors of torch name neither units nor ranks. The other ranks fail later, because this rank ended, and their error texts
        then contain the state of this rank, the first cause.
        """
        rank, store = self._local.rank, self._store
        texts: dict[str, None] = {}
        for log in [log for log in self._local.all_logs() if log.count and self._limiter.is_reader(log)]:
            there = ""
            try:
                for (positions,) in self._iter_positions([log], EXIT_SECONDS) if log.desync_error is None else ():
                    with self._lock:
                        there = self._diagnosis.peer_statuses(log, positions)
            except Exception:  # the store cannot be reached: its rank may have ended with the same error
                if not there and store.is_served_by_first_rank and rank != 0:
                    there = "rank 0 is gone, and with it the store of the process group"
            text = f"rank {rank} ended with an error of torch's own collectives, {self._local.status(log)}. {there}"
            with self._lock:
                if log.desync_error is None:
                    self._notices.post_verdict(log, text)
            texts[log.desync_error or text] = None
        if texts:
            print(f"fullshard: rank {rank}: {'; '.join(texts)}", file=sys.stderr, flush=True)
            if store.is_served_by_first_rank and rank == 0:
                time.sleep(3 * TICK)  # the store ends with this rank, so give the other ranks time to read the verdict

    def _report(self) -> None:
        """Print the states of all ranks."""
        rank = self._local.rank
        logs = [log for log in self._local.all_logs() if log.count]
        lines = [
            f"fullshard: rank {rank}: {self._local.status(log)}; {there}"
            for log, there in zip(logs, self._request_and_describe(logs))
        ]
        print("\n".join(lines) or f"fullshard: rank {rank}: before the first collective", file=sys.stderr, flush=True)

    # --- for its thread ---

    def wait_for_wakeup(self, ended: threading.Event) -> bool:
        """Sleep until the next check or a wake-up. Return True if another rank woke this one."""
        if self._store.wakeup_socket is not None:
            return self._store.wakeup_socket.wait(TICK, PROCESS.signals.files)
        ended.wait(TICK)
        return False


class WatchThread:
    """Thread that runs the checks of a watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._process = os.getpid()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="fullshard-watch", daemon=True)
            PROCESS.threads = [*filter(threading.Thread.is_alive, PROCESS.threads), self._thread]
            self._thread.start()

    def pause(self) -> bool:
        """Sleep for one tick. Return True if the thread is to end."""
        return self._ended.wait(TICK)

    def end(self) -> bool:
        """End the thread. Return False if it was ended before, or belongs to the parent of this forked process."""
        if self._ended.is_set() or os.getpid() != self._process:
            return False
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        return True

    def _run(self) -> None:
        _torch.relax_capture_mode()  # the checks poll events of collectives in flight
        failures = 0
        while not self._ended.is_set():
            try:
                woken = self._watchdog.wait_for_wakeup(self._ended)
                if _torch.default_store() is not PROCESS.store:
                    return PROCESS.end_destroyed(self._watchdog)
                if not self._ended.is_set():
                    self._watchdog.check(woken)
                failures = 0
            except _torch.NetworkError:  # the store cannot be reached: its rank ended
                return
            except Exception as failure:
                failures += 1
                if failures > 20:
                    warnings.warn(
                        f"fullshard's watchdog stopped after {failures} consecutive errors, the last one: {headline(failure)}",
                        stacklevel=2,
                    )
                    return


class SignalListener:
    """Listener for SIGUSR1, unless the program has a handler for it already.

    Python runs signal handlers in the main thread only, and not while that thread waits in C++ for a collective. But Python's
    C handler writes the number of the signal to the wake-up pipe at once, so the watchdog thread reads the pipe.
    """

    def __init__(self) -> None:
        self._reader: int | None = None
        self._writer: int | None = None
        self._report: Callable[[], None] = _nothing

    def listen(self, report: Callable[[], None]) -> None:
        """Install the handler and the pipe. The handler calls `report` if the pipe is missing or replaced by other code."""
        self._report = report
        if threading.current_thread() is not threading.main_thread() or _torch.is_handled(signal.SIGUSR1):
            return
        signal.signal(signal.SIGUSR1, self._on_signal)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before == -1:
            self._reader, self._writer = reader, writer
        else:
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Call `report`, unless the signal went through the pipe, where the watchdog has read it already."""
        # runs in the main thread, once that thread executes Python again
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current)
        if self._writer is None or current != self._writer:
            self._report()

    @property
    def files(self) -> Sequence[int]:
        """File descriptors that are readable after a signal."""
        return () if self._reader is None else (self._reader,)

    def take(self) -> bool:
        """Return True if the signal arrived since the last call."""
        if self._reader is None:
            return False
        try:
            return signal.SIGUSR1 in os.read(self._reader, 4096)
        except BlockingIOError:
            return False

    def end(self) -> None:
        """Ignore the signal: at exit, Python restores the default handler, which would end the process."""
        if signal.getsignal(signal.SIGUSR1) == self._on_signal:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def forget(self) -> None:
        """Drop the pipe in a forked process, because it belongs to the parent."""
        if self._writer is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._reader = self._writer = None


def _nothing() -> None:
    pass


class _Process:
    """The watchdog of this process: created with its process group, ended with the group or the program.

    Attributes:
        watchdog: watchdog of the current process group.
        store: store of the current process group.
        threads: threads of this watchdog and of earlier ones.
        signals: listener for SIGUSR1, which requests a report.
    """

    def __init__(self) -> None:
        self.watchdog: Watchdog | None = None
        self.store: object = None
        self.threads: list[threading.Thread] = []
        self.signals = SignalListener()
        self._lock = threading.Lock()
        self._generation = 0  # number of process groups that had a watchdog; part of the key prefix in the store

    def watchdog_of(self, store: Any) -> Watchdog:
        """Return the watchdog of a store, which is a new one for a new store."""
        before: Watchdog | None = None
        with self._lock:
            if self.watchdog is None or self.store is not store:
                if not self._generation:  # here and not at import, which changes nothing in the process
                    os.register_at_fork(after_in_child=self.forget)
                    atexit.register(self.end)
                before = self.watchdog
                own = _torch.own_store(store, f"fullshard/{self._generation}")
                self._generation += 1
                self.watchdog = Watchdog(StateStore(own, _torch.global_rank(), _torch.world_size(), open_wakeup_socket(store)))
                self.store = store
                self.signals.listen(self._request_report)
            found = self.watchdog
        if before is not None:  # the watchdog of a process group that was destroyed a moment ago
            before.end()
            release()
        return found

    def _request_report(self) -> None:
        watchdog = self.watchdog
        if watchdog is not None:
            watchdog.request_report()

    def end_destroyed(self, watchdog: Watchdog) -> None:
        """End the watchdog of a destroyed process group, and close its connections, which the other ranks notice."""
        watchdog.end()
        with self._lock:
            if self.watchdog is watchdog:
                self.watchdog = self.store = None
        release()

    def end(self) -> None:
        """End the watchdog at the exit of Python."""
        self.signals.end()
        watchdog = self.watchdog  # read once: its thread may set it to None at any time
        if watchdog is not None:
            if _torch.ends_by_collective():
                watchdog.report_at_end()
            watchdog.end()
        # A thread may be ending because its process group was destroyed. Python would abort if it exited before the thread.
        for thread in self.threads:
            thread.join(EXIT_SECONDS)

    def forget(self) -> None:
        """Reset the state in a forked process: thread, connection, pipe and lock belong to the parent."""
        self.signals.forget()
        self.watchdog, self.store, self.threads, self._lock = None, None, [], threading.Lock()


PROCESS = _Process()


def watchdog_of(backend: str) -> Watchdog | None:
    """Return the watchdog of this process; None if there is nothing to watch.

    There is nothing to watch if the ranks do not communicate (`backend` is torch's "fake" one), or have no store.
    """
    store = None if backend == "fake" else _torch.default_store()
    return None if store is None else PROCESS.watchdog_of(store)


__all__ = ["EXIT_SECONDS", "Watchdog", "watchdog_of"]
