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


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a file to read into a tensor."""

    file: str
    offset: int
    into: Tensor  # contiguous, on the CPU


def memoryview_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor. The memory view keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    memory: Any = (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
    memory.tensor = tensor  # a memoryview refers to `memory`, and so to the tensor
    return memoryview(memory).cast("B")


class Reader:
    """Reads files with several threads. The caller opens and closes the files."""

    def __init__(self, files: OpenFiles, *, threads: int, on_progress: Callable[[int], object] | None = None) -> None:
        self._on_progress = on_progress
        self._files, self._pool = files, ThreadPoolExecutor(threads, thread_name_prefix="fullshard-read")
        self._futures: list[Future[int]] = []
        self.read = 0  # bytes read so far. `finish` passes them to `on_progress` after each part, and raises what it raises.

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, reads: Sequence[Read]) -> None:
        """Run the reads and wait for them."""
        self.begin(reads)
        self.finish()

    def begin(self, reads: Sequence[Read]) -> None:
        """Start the reads in the threads, which keep the memory alive until they are done."""
        tasks = self._split(reads)
        # Open all files first, so that a file that cannot be opened leaves no read running.
        opened = {file: self._files.file(file) for file, _, _ in tasks}
        self._futures += [self._pool.submit(_read_into, opened[file], file, offset, views) for file, offset, views in tasks]

    def finish(self) -> None:
        """Wait for the reads that were started."""
        tasks, self._futures = self._futures, []
        failures: list[BaseException] = []
        for task in tasks:  # wait for all reads, also after a failure: they write into the caller's memory
            failure = task.exception()
            if failure is not None:
                failures.append(failure)
                continue
            self.read += task.result()
            if self._on_progress is not None and not failures:
                try:
                    self._on_progress(self.read)
                except Exception as raised:
                    failures.append(raised)
        if failures:
            raise failures[0]

    def _split(self, reads: Sequence[Read]) -> list[tuple[str, int, list[memoryview]]]:
        """Return (file, offset, memory ranges) of each task: adjacent reads are merged, large ones are split."""
        tasks: list[tuple[str, int, list[memoryview]]] = []
        end, nbytes = ("", -1), 0
        for read in sorted(reads, key=lambda one: (one.file, one.offset)):
            view = memoryview_of(read.into)
            at = 0
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


def _read_into(descriptor: int, file: str, begin: int, views: list[memoryview]) -> int:
    """Fill `views` from a file, from offset `begin` on, and return the number of bytes read."""
    offset = begin
    while views:
        try:
            count = os.preadv(descriptor, views, offset)
        except OSError as failure:
            raise BadFile(f"{file}: cannot be read at byte {offset:,}: {failure.strerror}") from failure
        if not count:
            raise BadFile(f"{file} was truncated while it was read: it ends at byte {offset:,}.")
        # A read may be short: continue after the last byte that arrived.
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return offset - begin


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
    """

    def __init__(self, folder: Path, *, threads: int, on_progress: Callable[[int], object] | None = None) -> None:
        self._on_progress, self._reported = on_progress, 0
        self._so_far, self._lock = 0, threading.Lock()  # bytes that the threads have written
        self._folder = folder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fullshard-write")
        self._open: dict[str, int] = {}
        self._tasks: list[Future[int]] = []
        self._waiting: list[deque[Write]] = []  # by task, the writes that have not started
        self.written = 0  # bytes of all writes that `finish` has waited for

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


Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has read or written so far, and the total bytes that it will read or write."""


def check_progress(progress: object) -> None:
    """Raise ValueError unless `progress` is None or callable."""
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be a function (bytes so far, bytes in all), got {progress!r}")


def with_total(progress: Progress | None, total: int) -> Callable[[int], object] | None:
    """Return a callback that takes only the bytes so far; None if there is no `progress`."""
    return None if progress is None else lambda done: progress(done, total)
