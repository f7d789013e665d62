"""A save that goes on behind the training: its ranks settle through the store of the process group, and send no messages."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from fullshard import _torch
from fullshard.weights.texts import printable

T = TypeVar("T")

PATIENCE = 60.0  # seconds without a sign of life after which a rank is given up
_BEAT = 1.0  # seconds between two of them


class StoreMeeting:
    """The ranks of one save, in threads of their own: `run` as that of `Meeting`.

    Every rank counts up a key once a second. The first rank looks whether the others still do, and they look at the first one:
    a rank that ended is told to all, and no rank waits for it.
    """

    def __init__(self, name: str, index: int, ranks: int) -> None:
        """name: of this save, alike on all ranks and on no other save."""
        self._index, self._ranks = index, ranks
        self._host = _torch.default_store() if ranks > 1 else None  # which serves the others as long as it is held
        self._store: Any = None if self._host is None else _torch.own_store(self._host, f"fullshard/save/{name}")
        self._pause = max(0.5, ranks / 500)  # between two questions of one rank, so that the store keeps up
        self._calls = 0
        self._ended = threading.Event()
        if self._store is not None:
            threading.Thread(target=self._beat, name="fullshard-save-beat", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(max(_BEAT, 2 * self._pause)):
            try:
                self._store.add(f"beat/{self._index}", 1)
            except Exception:  # the store is gone: `run` meets that, too, and says so
                return

    def run(self, work: Callable[[], T]) -> T:
        """Do this; if it fails on a rank, its error is raised on all.

        Raises:
            RuntimeError: with the text of a rank that failed, or if a rank is gone.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            failure = caught
        if self._store is None:
            if failure is not None:
                raise RuntimeError(str(failure) or type(failure).__name__) from failure
            return result
        try:
            text = self._settle(failure)
        except Exception as lost:
            raise RuntimeError(f"the store of the process group does not answer, and its rank may have ended: {lost}") from (
                failure or lost
            )
        if text is not None:
            raise RuntimeError(text) from failure
        return result

    def _settle(self, failure: Exception | None) -> str | None:
        """Wait until all ranks came so far. Returns the text of an error, None if there is none."""
        call, self._calls = self._calls, self._calls + 1
        if failure is not None:
            self._store.set(f"{call}/failed", printable(str(failure)) or type(failure).__name__)
        self._store.set(f"{call}/here/{self._index}", "")
        count = self._store.add(f"{call}/here", 1)
        pause, beats, looked = 0.005, dict[int, int](), time.monotonic()
        while count < self._ranks:
            time.sleep(pause)
            pause = min(self._pause, 2 * pause)
            count = self._store.add(f"{call}/here", 0)
            if self._store.check(["gone"]):
                return str(self._store.get("gone").decode())
            if count < self._ranks and time.monotonic() - looked > PATIENCE:
                beats, before, looked = self._beats(call), beats, time.monotonic()
                gone = [rank for rank, beat in beats.items() if before.get(rank) == beat]
                if gone:
                    text = f"rank {gone[0]} of the save gave no sign of life for {PATIENCE:.0f} seconds: it ended, or is held"
                    self._store.set("gone", text)
                    return text
        failed = f"{call}/failed"  # of this call: a rank may have failed in the next one already
        return str(self._store.get(failed).decode()) if self._store.check([failed]) else None

    def _beats(self, call: int) -> dict[int, int]:
        """The beats of the ranks that are not here yet: the first rank looks at all others, which look at it."""
        looked_at = [0] if self._index else range(1, self._ranks)
        absent = [rank for rank in looked_at if not self._store.check([f"{call}/here/{rank}"])]
        return {rank: self._store.add(f"beat/{rank}", 0) for rank in absent}

    def close(self) -> None:
        """Have the first rank, which may serve the store, leave last."""
        try:
            if self._store is not None:
                left = self._store.add("left", 1)
                until = time.monotonic() + PATIENCE
                while self._index == 0 and left < self._ranks and time.monotonic() < until:
                    time.sleep(0.05)
                    left = self._store.add("left", 0)
                if self._index == 0 and left == self._ranks:
                    self._forget()
        except Exception as failure:
            warnings.warn(f"the store of the process group does not answer at the end of a save: {failure}", stacklevel=2)
        finally:
            self._ended.set()
            self._host = None

    def abandon(self) -> None:
        """Stop the beats and let the store go, where the save failed before its threads began."""
        self._ended.set()
        self._host = None

    def _forget(self) -> None:
        calls = range(self._calls)
        ranks = range(self._ranks)
        keys = [f"{call}/here/{rank}" for call in calls for rank in ranks]
        keys += [f"{call}/{what}" for call in calls for what in ("here", "failed")]
        for key in [*keys, *(f"beat/{rank}" for rank in ranks), "gone", "left"]:
            self._store.delete_key(key)


class Saving(Generic[T]):
    """A save that is under way behind the training.

    The next `save_weights` or `load_weights` waits for it, and the end of the process does.

    Args:
        directory: where it will be.
        work: what is left to do, in a thread.

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
        _UNDER_WAY.append(self)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except Exception as failure:
            self._failure = failure
            warnings.warn(f"a save in the background to {self._directory} failed: {failure}", stacklevel=2)

    @property
    def done(self) -> bool:
        """Whether it came to its end, good or bad, on this rank."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Wait for the end.

        Returns:
            The report of this rank.

        Raises:
            RuntimeError: if a rank could not write, or is gone; the directory is as it was. The same on every rank.
        """
        self._thread.join()
        if self in _UNDER_WAY:
            _UNDER_WAY.remove(self)
        if self._failure is not None:
            raise RuntimeError(f"the save in the background to {self._directory} failed: {self._failure}") from self._failure
        assert self._result is not None
        return self._result


_UNDER_WAY: list[Saving[Any]] = []


def join_saves() -> None:
    """Wait for what is under way.

    Raises:
        RuntimeError: if a save failed of which no caller was told.
    """
    while _UNDER_WAY:
        _UNDER_WAY[0].wait()


__all__ = ["Saving", "StoreMeeting", "join_saves"]
