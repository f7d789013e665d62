"""Background saves: the threads of all ranks coordinate through the store of the process group, without collectives."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from fullshard import _torch
from fullshard.core import Ranks
from fullshard.errors import printable

T = TypeVar("T")

PATIENCE = 60.0  # seconds; a rank without a heartbeat for so long counts as lost
_BEAT = 1.0  # seconds between two heartbeats


class StoreRankGroup(Ranks):
    """The threads of all ranks in one background save, two ranks or more.

    Every rank increments a key in the store periodically (a heartbeat). The first rank checks the heartbeats of the others, and
    they check the heartbeat of the first rank. A lost rank is published in the store, so that no rank waits for it.
    """

    def __init__(self, name: str, index: int, ranks: int) -> None:
        """Connect to the store and start the heartbeat."""
        self._index, self._ranks = index, ranks
        # A reference that keeps the store of the process group alive: on one rank, this object is the server for all ranks.
        self._default_store: Any = _torch.default_store()
        self._store: Any = _torch.own_store(self._default_store, f"fullshard/save/{name}")
        self._pause = max(0.5, ranks / 500)  # seconds between two requests of a rank; grows with the load of the store
        self._calls = 0  # calls of `run`: all ranks make the same calls in the same order
        self._stopped = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="fullshard-save-beat", daemon=True).start()

    def _send_heartbeats(self) -> None:
        with suppress(Exception):  # the store is lost: `run` fails as well and raises the error
            while not self._stopped.wait(max(_BEAT, 2 * self._pause)):
                self._store.add(f"beat/{self._index}", 1)

    def first_failure(self, failure: Exception | None) -> Exception | None:
        """Return a RuntimeError with the text of a rank that failed, or about a lost rank; None if no rank failed."""
        try:
            text = self._wait_for_ranks(failure)
        except Exception as lost:
            raise RuntimeError(
                f"The store of the process group does not respond. The process that hosts it may have ended: {lost}"
            ) from (failure or lost)
        return None if text is None else RuntimeError(text)

    def _wait_for_ranks(self, failure: Exception | None) -> str | None:
        """Wait until all ranks have made this call. Return the text of an error, None if there is none."""
        call, self._calls = self._calls, self._calls + 1
        if failure is not None:
            self._store.set(f"{call}/failed", printable(str(failure)) or type(failure).__name__)
        self._store.set(f"{call}/here/{self._index}", "")
        count = self._store.add(f"{call}/here", 1)
        pause = 0.005
        beats: dict[int, int] = {}
        last_check = time.monotonic()
        while count < self._ranks:
            time.sleep(pause)
            pause = min(self._pause, 2 * pause)
            count = self._store.add(f"{call}/here", 0)
            if self._store.check(["gone"]):
                return str(self._store.get("gone").decode())
            if count < self._ranks and time.monotonic() - last_check > PATIENCE:
                # A rank is lost if its counter did not change since the last check. Heartbeats continue during slow work.
                # The first rank monitors all others, and they monitor the first rank: requests are linear in the ranks.
                monitored = [0] if self._index else range(1, self._ranks)
                absent = [rank for rank in monitored if not self._store.check([f"{call}/here/{rank}"])]
                beats_before, beats = beats, {rank: self._store.add(f"beat/{rank}", 0) for rank in absent}
                last_check = time.monotonic()
                lost = [rank for rank, beat in beats.items() if beats_before.get(rank) == beat]
                if lost:
                    text = (
                        f"Rank {lost[0]} of the save sent no heartbeat for {PATIENCE:.0f} seconds: it has ended or is blocked."
                    )
                    self._store.set("gone", text)
                    return text
        failed = f"{call}/failed"  # the key has the call number, because a faster rank may fail in the next call already
        return str(self._store.get(failed).decode()) if self._store.check([failed]) else None

    def close(self) -> None:
        """Stop the heartbeat and release the store. The first rank waits for the others."""
        # The first rank may host the store: if it left earlier, the last requests of the others would fail.
        try:
            closed = self._store.add("closed", 1)  # number of ranks that called `close`
            until = time.monotonic() + PATIENCE
            while self._index == 0 and closed < self._ranks and time.monotonic() < until:
                time.sleep(0.05)
                closed = self._store.add("closed", 0)
            if self._index == 0 and closed == self._ranks:
                calls, ranks = range(self._calls), range(self._ranks)
                keys = [f"{call}/{what}" for call in calls for what in ("here", "failed", *(f"here/{rank}" for rank in ranks))]
                for key in [*keys, *(f"beat/{rank}" for rank in ranks), "gone", "closed"]:
                    self._store.delete_key(key)
        except Exception as failure:
            warnings.warn(f"The store of the process group does not respond at the end of a save: {failure}", stacklevel=2)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stop the heartbeat and release the store, if the save failed before its threads started."""
        self._stopped.set()
        self._default_store = None


class Saving(Generic[T]):
    """A running background save.

    The next `save_weights` or `load_weights` and the end of the process wait for it.

    Args:
        directory: directory of the checkpoint.
        work: writes the copied rows and commits the checkpoint; called in a thread.

    Example:
        >>> saving = save_weights(model, "checkpoint", background=True)                       # doctest: +SKIP
        >>> train(...)                                                                        # doctest: +SKIP
        >>> saving.wait().bytes_written                                                       # doctest: +SKIP
        2007567360
    """

    def __init__(self, directory: Path, work: Callable[[], T]) -> None:
        self._directory = directory
        self._result: T | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="fullshard-save", daemon=False)
        _RUNNING.append(self)
        self._thread.start()  # not a daemon thread, so the interpreter waits for it at exit

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except Exception as failure:
            self._failure = failure
            warnings.warn(f"The background save to {self._directory} failed: {failure}", stacklevel=2)

    @property
    def done(self) -> bool:
        """True if the save has completed or failed on this rank."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Wait until the save completes.

        Returns:
            The report of this rank.

        Raises:
            RuntimeError: on every rank, if a rank could not write or is lost. The directory is unchanged.
        """
        self._thread.join()
        if self in _RUNNING:
            _RUNNING.remove(self)
        if self._failure is not None:
            raise RuntimeError(f"The background save to {self._directory} failed: {self._failure}") from self._failure
        assert self._result is not None
        return self._result


_RUNNING: list[Saving[Any]] = []


def join_saves() -> None:
    """Wait for all running background saves. Raise RuntimeError if one failed and its `wait()` was not called."""
    while _RUNNING:
        _RUNNING[0].wait()
