"""Watchdog of a process: created with its process group, ended with the group or the program."""

from __future__ import annotations

import atexit
import os
import threading

from fullshard import _torch
from fullshard.checks.board import StateStore, open_wakeup_socket
from fullshard.checks.watchdog import EXIT_SECONDS, PROCESS, Watchdog
from fullshard.comm.process_groups import release

_LOCK = threading.Lock()
_GENERATIONS = [0]  # number of process groups that had a watchdog; part of the key prefix in the store


def watchdog_of(backend: str) -> Watchdog | None:
    """Return the watchdog of this process; None if there is nothing to watch.

    There is nothing to watch if the ranks do not communicate (`backend` is torch's "fake" one), are threads of one process
    (where an exception on one rank ends the others), or have no store.
    """
    if backend in ("fake", _torch.THREADED):
        return None
    store = _torch.default_store()
    if store is None:
        return None
    before: Watchdog | None = None
    with _LOCK:
        if PROCESS.watchdog is None or PROCESS.store is not store:
            if not _GENERATIONS[0]:  # here and not at import, which changes nothing in the process
                os.register_at_fork(after_in_child=PROCESS.forget)
                atexit.register(_end)
            before = PROCESS.watchdog
            own = _torch.own_store(store, f"fullshard/{_GENERATIONS[0]}")
            _GENERATIONS[0] += 1
            PROCESS.watchdog = Watchdog(StateStore(own, _torch.global_rank(), _torch.world_size(), open_wakeup_socket(store)))
            PROCESS.store = store
            PROCESS.signals.listen(_request_report)
        found = PROCESS.watchdog
    if before is not None:  # the watchdog of a process group that was destroyed a moment ago
        before.end()
        release()
    return found


def _request_report() -> None:
    watchdog = PROCESS.watchdog
    if watchdog is not None:
        watchdog.request_report()


def _on_destroyed(watchdog: Watchdog) -> None:
    """End the watchdog of a destroyed process group, and close its connections, which the other ranks notice."""
    watchdog.end()
    with _LOCK:
        if PROCESS.watchdog is watchdog:
            PROCESS.watchdog = PROCESS.store = None
    release()


PROCESS.on_destroyed = _on_destroyed


def _end() -> None:
    """End the watchdog at the exit of Python."""
    PROCESS.signals.end()
    watchdog = PROCESS.watchdog  # read once: its thread may set it to None at any time
    if watchdog is not None:
        if _torch.ends_by_collective():
            watchdog.report_at_end()
        watchdog.end()
    # A thread may be ending because its process group was destroyed. Python would abort if it exited before the thread.
    for thread in PROCESS.threads:
        thread.join(EXIT_SECONDS)


__all__ = ["watchdog_of"]
