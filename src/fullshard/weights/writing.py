"""Writes memory to files at their final offsets, by a thread per file."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fullshard.weights.reading import LARGEST, bytes_of

_BETWEEN = 0.1  # seconds between two looks at how many bytes are written


@dataclass(frozen=True, slots=True)
class Write:
    """A contiguous tensor on the CPU that goes to a file, from this byte on."""

    file: str
    offset: int
    tensor: Tensor


class Writer:
    """Writes for one rank into files that are there: several files at a time, and of each one range after the other.

    A file system lets one thread write to a file at a time, and the others spin.

    written: bytes so far.      told: called with them by `finish`, now and then; what it raises is raised there.
    """

    def __init__(self, folder: Path, *, threads: int, told: Callable[[int], object] | None = None) -> None:
        self._told, self._said = told, 0
        self._under_way, self._lock = 0, threading.Lock()
        self._folder = folder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fullshard-write")
        self._open: dict[str, int] = {}
        self._tasks: list[Future[int]] = []
        self.written = 0

    def run(self, writes: Sequence[Write]) -> None:
        """Do these writes.

        Raises:
            OSError: naming the file.
        """
        self.begin(writes)
        self.finish()

    def begin(self, writes: Sequence[Write]) -> None:
        """Have these writes done by the threads, which hold their memory until then."""
        files: dict[str, deque[Write]] = {}
        for write in writes:
            files.setdefault(write.file, deque()).append(write)
        for file, waiting in files.items():
            self._tasks.append(self._pool.submit(_write_all, self._descriptor(file), waiting, self._count))

    def finish(self) -> None:
        """Wait for the writes that were begun.

        Raises:
            OSError: naming the file.
        """
        tasks, self._tasks = self._tasks, []
        raised = self._tell_until_done(tasks) if self._told is not None else None
        failures = [failure for task in tasks if (failure := task.exception()) is not None]
        self.written += sum(task.result() for task in tasks if task.exception() is None)
        if failures:
            raise failures[0]
        if raised is not None:
            raise raised

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._under_way += nbytes

    def _tell_until_done(self, tasks: Sequence[Future[int]]) -> Exception | None:
        """Tell how many bytes are written, until all are. Returns what that raised."""
        assert self._told is not None
        pending, raised = set(tasks), None
        while pending:
            _, pending = wait(pending, timeout=_BETWEEN)
            if raised is None and self._under_way > self._said:
                self._said = self._under_way
                try:
                    self._told(self._said)
                except Exception as failure:
                    raised = failure
        return raised

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
        return self._open[file]

    def sync(self) -> None:
        """Have all that was written on the disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the files."""
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _write_all(descriptor: int, waiting: deque[Write], count: Callable[[int], None]) -> int:
    """Returns how many bytes, and counts them on the way. The memory of each is let go when it is written."""
    total = 0
    while waiting:
        write = waiting.popleft()
        view, done = bytes_of(write.tensor), 0
        while done < len(view):
            offset = write.offset + done
            try:
                written = os.pwrite(descriptor, view[done : done + LARGEST], offset)
            except OSError as failure:
                text = f"cannot be written at byte {offset:,}: {failure.strerror}"
                raise OSError(failure.errno, text, write.file) from failure
            done += written
            count(written)
        total += done
    return total


__all__ = ["Write", "Writer"]
