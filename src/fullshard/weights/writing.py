"""Write tensors to their final offsets in files, with one thread per file."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fullshard.weights.reading import MAX_IO_BYTES, memoryview_of

_REPORT_INTERVAL = 0.1  # seconds between two progress reports


@dataclass(frozen=True, slots=True)
class Write:
    """A contiguous CPU tensor to write to a file."""

    file: str
    offset: int  # bytes from the beginning of the file
    tensor: Tensor


class Writer:
    """Writes of one rank into existing files.

    Several files are written at the same time, each by one thread: file systems lock a file for each write, and further threads
    would only wait for the lock.

    Attributes:
        written: bytes of all writes that `finish` has waited for.
    """

    def __init__(self, folder: Path, *, threads: int, on_progress: Callable[[int], object] | None = None) -> None:
        self._on_progress, self._reported = on_progress, 0
        self._so_far, self._lock = 0, threading.Lock()  # bytes that the threads have written
        self._folder = folder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fullshard-write")
        self._open: dict[str, int] = {}
        self._tasks: list[Future[int]] = []
        self._waiting: list[deque[Write]] = []  # by task, the writes that have not started
        self.written = 0

    def run(self, writes: Sequence[Write]) -> None:
        """Write and wait."""
        self.begin(writes)
        self.finish()

    def begin(self, writes: Sequence[Write]) -> None:
        """Start these writes in the threads. Each tensor is referenced until it is written."""
        files: dict[str, deque[Write]] = {}
        for write in writes:
            files.setdefault(write.file, deque()).append(write)
        for file, waiting in files.items():
            self._waiting.append(waiting)
            self._tasks.append(self._pool.submit(_write_all, self._descriptor(file), waiting, self._count))

    def finish(self) -> None:
        """Wait for the started writes."""
        tasks, self._tasks = self._tasks, []
        raised = self._report_until_done(tasks) if self._on_progress is not None else None
        failures = [failure for task in tasks if (failure := task.exception()) is not None]
        self._waiting.clear()
        self.written += sum(task.result() for task in tasks if task.exception() is None)
        if failures:
            raise failures[0]
        if raised is not None:
            raise raised

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._so_far += nbytes

    def _report_until_done(self, tasks: Sequence[Future[int]]) -> Exception | None:
        """Report the written bytes periodically until all writes are done. Return an exception of the callback, if any."""
        assert self._on_progress is not None
        pending, raised = set(tasks), None
        while pending:
            _, pending = wait(pending, timeout=_REPORT_INTERVAL)
            if raised is None and self._so_far > self._reported:
                self._reported = self._so_far
                try:
                    self._on_progress(self._reported)
                except Exception as failure:
                    raised = failure
        return raised

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
        return self._open[file]

    def sync(self) -> None:
        """Sync all written files to disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Wait for the writes that have started, give up all others, and close the files."""
        for waiting in self._waiting:
            waiting.clear()
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _write_all(descriptor: int, waiting: deque[Write], count: Callable[[int], None]) -> int:
    """Write everything in `waiting` and return the number of bytes. `count` is called with the bytes of each system call."""
    total = 0
    while True:
        try:
            write = waiting.popleft()  # the queue must not keep the memory of finished writes alive
        except IndexError:  # all are written, or `close` gave up the rest
            return total
        view, done = memoryview_of(write.tensor), 0
        while done < len(view):
            offset = write.offset + done
            try:
                written = os.pwrite(descriptor, view[done : done + MAX_IO_BYTES], offset)
            except OSError as failure:
                # OSError shows the file name after this text.
                text = f"cannot be written at byte {offset:,}: {failure.strerror}"
                raise OSError(failure.errno, text, write.file) from failure
            done += written
            count(written)
        total += done
