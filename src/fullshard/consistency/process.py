"""The watchdog of a process: made with its process group, ended with that, or with the program."""

from __future__ import annotations

import atexit
import os
import threading

from fullshard import _torch
from fullshard.collectives.process_groups import release
from fullshard.consistency.board import NoticeBoard, bell_for
from fullshard.consistency.watchdog import LAST, PROCESS, Watchdog

_LOCK = threading.Lock()
_GENERATIONS = [0]  # process groups of which there was a watchdog


def watchdog_of(backend: str) -> Watchdog | None:
    """The watchdog of this process, None if there is nothing to watch.

    That is so if its ranks send nothing (`backend` is torch's "fake" one), are threads of one process (where a rank that raises
    ends the others), or have no store.
    """
    if backend in ("fake", _torch.THREADED):
        return None
    store = _torch.default_store()
    if store is None:
        return None
    before: Watchdog | None = None
    with _LOCK:
        if PROCESS.watchdog is None or PROCESS.store is not store:
            before = PROCESS.watchdog
            own = _torch.own_store(store, f"fullshard/{_GENERATIONS[0]}")
            _GENERATIONS[0] += 1
            PROCESS.watchdog = Watchdog(NoticeBoard(own, _torch.global_rank(), _torch.world_size(), bell_for(store)))
            PROCESS.store = store
            PROCESS.signals.listen(_ask)
        found = PROCESS.watchdog
    if before is not None:  # of process groups that were destroyed a moment ago
        before.end()
        release()
    return found


def _ask() -> None:
    watchdog = PROCESS.watchdog
    if watchdog is not None:
        watchdog.ask()


def _destroyed(watchdog: Watchdog) -> None:
    """The process group is gone: nothing of ours may keep its connections open, by which the others learn of it."""
    watchdog.end()
    with _LOCK:
        if PROCESS.watchdog is watchdog:
            PROCESS.watchdog = PROCESS.store = None
    release()


PROCESS.on_destroyed = _destroyed

os.register_at_fork(after_in_child=PROCESS.forget)


@atexit.register
def _end() -> None:
    PROCESS.signals.end()
    watchdog = PROCESS.watchdog  # its own thread may be letting go of it
    if watchdog is not None:
        if _torch.ends_by_collective():
            watchdog.report_at_end()
        watchdog.end()
    for thread in PROCESS.threads:  # one may end just now, as the process group was destroyed; Python would abort in its midst
        thread.join(LAST)


__all__ = ["watchdog_of"]
