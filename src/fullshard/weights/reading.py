"""Read bytes of files into tensors: sorted by offset, large reads in parts, with several threads and without mmap."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullshard.weights.headers import BadFile, FileTensor, OpenFiles

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
    """Reads files with several threads. The caller opens and closes the files.

    Attributes:
        read: bytes read so far. `finish` passes them to `on_progress` after each part, and raises what it raises.
    """

    def __init__(self, files: OpenFiles, *, threads: int, on_progress: Callable[[int], object] | None = None) -> None:
        self._on_progress = on_progress
        self._files, self._pool = files, ThreadPoolExecutor(threads, thread_name_prefix="fullshard-read")
        self._futures: list[Future[int]] = []
        self.read = 0

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


def offset_of_row(source: FileTensor, first: int) -> int:
    """Return the offset in the file at which row `first` of a tensor begins."""
    rows = source.shape[0] if source.shape else 1
    return source.offset + (source.nbytes // rows * first if rows else 0)
