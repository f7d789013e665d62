"""Writes memory to files at their final offsets, by a thread per file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fullshard.weights.reading import LARGEST, bytes_of


@dataclass(frozen=True, slots=True)
class Write:
    """A contiguous tensor on the CPU that goes to a file, from this byte on."""

    file: str
    offset: int
    tensor: Tensor


class Writer:
    """Writes for one rank into files that are there: several files at a time, and of each one range after the other.

    A file system lets one thread write to a file at a time, and the others spin.

    written: bytes so far.
    """

    def __init__(self, folder: Path, *, threads: int) -> None:
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
            self._tasks.append(self._pool.submit(_write_all, self._descriptor(file), waiting))

    def finish(self) -> None:
        """Wait for the writes that were begun.

        Raises:
            OSError: naming the file.
        """
        tasks, self._tasks = self._tasks, []
        failures = [failure for task in tasks if (failure := task.exception()) is not None]
        self.written += sum(task.result() for task in tasks if task.exception() is None)
        if failures:
            raise failures[0]

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


def _write_all(descriptor: int, waiting: deque[Write]) -> int:
    """Returns how many bytes. The memory of each is let go when it is written."""
    total = 0
    while waiting:
        write = waiting.popleft()
        view, done = bytes_of(write.tensor), 0
        while done < len(view):
            offset = write.offset + done
            try:
                done += os.pwrite(descriptor, view[done : done + LARGEST], offset)
            except OSError as failure:
                text = f"cannot be written at byte {offset:,}: {failure.strerror}"
                raise OSError(failure.errno, text, write.file) from failure
        total += done
    return total


__all__ = ["Write", "Writer"]
