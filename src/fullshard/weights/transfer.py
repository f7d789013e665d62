"""Read bytes of files into tensors and write tensors to files, with several threads and without mmap, and report progress."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fullshard.weights.headers import BadFile, OpenFiles

MAX_IO_BYTES = 32 << 20  # per system call: small enough to keep several threads busy, large enough for the full speed of a disk
MAX_IOVECS = 512  # memory ranges per system call; the limit of Linux is 1024
_REPORT_INTERVAL = 0.1  # seconds between two progress reports

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has read or written so far, and the total bytes that it will read or write."""


def check_progress(progress: object) -> None:
    """Raise ValueError unless `progress` is None or callable."""
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be a function (bytes so far, bytes in all), got {progress!r}")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A contiguous CPU tensor to read from a file or to write to it."""

    file: str
    offset: int  # bytes from the beginning of the file
    tensor: Tensor

    @property
    def memory(self) -> memoryview:
        """The memory of the tensor, which it keeps alive."""
        if not self.tensor.numel():
            return memoryview(b"")
        memory: Any = (ctypes.c_char * (self.tensor.numel() * self.tensor.itemsize)).from_address(self.tensor.data_ptr())
        memory.tensor = self.tensor  # a memoryview refers to `memory`, and so to the tensor
        return memoryview(memory).cast("B")


class _Threads:
    """Threads that read or write `total` bytes. `finish` calls `progress` periodically, and raises what it raises."""

    def __init__(self, name: str, threads: int, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._reported = progress, total, 0
        self.done, self._lock = 0, threading.Lock()  # bytes that the threads have read or written
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"fullshard-{name}")
        self._tasks: list[Future[None]] = []

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers in the threads, which keep their memory alive until they are done."""
        raise NotImplementedError

    def run(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers, and wait for all that were started."""
        self.begin(transfers)
        self.finish()

    def finish(self) -> None:
        """Wait for the transfers that were started."""
        tasks, self._tasks = self._tasks, []
        pending, raised = set(tasks), None
        while pending:  # also after a failure: reads write into the caller's memory
            _, pending = wait(pending, timeout=None if self._progress is None else _REPORT_INTERVAL)
            if self._progress is not None and raised is None and self.done > self._reported:
                self._reported = self.done
                try:
                    self._progress(self._reported, self._total)
                except Exception as failure:
                    raised = failure
        for failed in [*(task.exception() for task in tasks), raised]:
            if failed is not None:
                raise failed

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes


class Reader(_Threads):
    """Reads files with several threads. The caller opens and closes the files."""

    def __init__(self, files: OpenFiles, *, threads: int, progress: Progress | None = None, total: int = 0) -> None:
        super().__init__("read", threads, progress, total)
        self._files = files

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Start reads in the threads, which keep the memory alive until they are done."""
        tasks = _split(transfers)
        # Open all files first, so that a file that cannot be opened leaves no read running.
        opened = {file: self._files.file(file) for file, _, _ in tasks}
        for file, offset, views in tasks:
            self._tasks.append(self._pool.submit(_read_into, opened[file], file, offset, views, self._count))


def _split(reads: Sequence[Transfer]) -> list[tuple[str, int, list[memoryview]]]:
    """Return (file, offset, memory ranges) of each task: adjacent reads are merged, large ones are split."""
    tasks: list[tuple[str, int, list[memoryview]]] = []
    end, nbytes = ("", -1), 0
    for read in sorted(reads, key=lambda one: (one.file, one.offset)):
        view, at = read.memory, 0
        while at < len(view):
            room = MAX_IO_BYTES - nbytes if end == (read.file, read.offset + at) else 0
            if room <= 0 or len(tasks[-1][2]) >= MAX_IOVECS:
                tasks.append((read.file, read.offset + at, []))
                room, nbytes = MAX_IO_BYTES, 0
            part = view[at : at + room]
            tasks[-1][2].append(part)
            at, nbytes = at + len(part), nbytes + len(part)
            end = read.file, read.offset + at
    return tasks


def _read_into(descriptor: int, file: str, offset: int, views: list[memoryview], count: Callable[[int], None]) -> None:
    """Fill `views` from a file, from `offset` on. `count` is called with the bytes of each system call."""
    while views:
        try:
            nbytes = os.preadv(descriptor, views, offset)
        except OSError as failure:
            raise BadFile(f"{file}: cannot be read at byte {offset:,}: {failure.strerror}") from failure
        if not nbytes:
            raise BadFile(f"{file} was truncated while it was read: it ends at byte {offset:,}.")
        count(nbytes)
        # A read may be short: continue after the last byte that arrived.
        offset += nbytes
        while views and nbytes >= len(views[0]):
            nbytes -= len(views.pop(0))
        if nbytes:
            views[0] = views[0][nbytes:]


class Writer(_Threads):
    """Writes of one rank into existing files of a folder.

    Several files are written at the same time, each by one thread: file systems lock a file for each write, and further threads
    would only wait for the lock.
    """

    def __init__(self, folder: Path, *, threads: int, progress: Progress | None = None, total: int = 0) -> None:
        super().__init__("write", threads, progress, total)
        self._folder = folder
        self._open: dict[str, int] = {}  # descriptors
        self._waiting: list[deque[Transfer]] = []  # by task, the writes that have not started

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Start writes in the threads. Each tensor is referenced until it is written."""
        files: dict[str, deque[Transfer]] = {}
        for write in transfers:
            files.setdefault(write.file, deque()).append(write)
        for file, waiting in files.items():
            if file not in self._open:
                self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
            self._waiting.append(waiting)
            self._tasks.append(self._pool.submit(_write_all, self._open[file], waiting, self._count))

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


def _write_all(descriptor: int, waiting: deque[Transfer], count: Callable[[int], None]) -> None:
    """Write everything in `waiting`. `count` is called with the bytes of each system call."""
    while True:
        try:
            write = waiting.popleft()  # the queue must not keep the memory of finished writes alive
        except IndexError:  # all are written, or `close` gave up the rest
            return
        view, done = write.memory, 0
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
