"""Writes memory to files at their final offsets, by several threads."""

from __future__ import annotations

import os
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
    """Writes for one rank into files that are there. written: bytes so far."""

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
        for write in writes:
            view = bytes_of(write.tensor)
            descriptor = self._descriptor(write.file)
            for at in range(0, len(view), LARGEST):
                part = view[at : at + LARGEST]
                self._tasks.append(self._pool.submit(_write, descriptor, part, write.offset + at, write.file))

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


def _write(descriptor: int, view: memoryview, offset: int, file: str) -> int:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(descriptor, view[done:], offset + done)
        except OSError as failure:
            raise OSError(failure.errno, f"cannot be written at byte {offset + done:,}: {failure.strerror}", file) from failure
    return done


__all__ = ["Write", "Writer"]
