"""Reads bytes of files into memory: in order of their offsets, large ones in parts, by several threads, never by mmap."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullshard.weights.headers import BadFile, FileTensor, OpenFiles

LARGEST = 32 << 20  # bytes of one read: as much as keeps several threads busy, and more than a disk needs to be fast
MOST_VIEWS = 512  # of one read; the limit of Linux is 1024


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a file that go to a tensor: contiguous ones, on the CPU."""

    file: str
    offset: int
    into: Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; it lives as long as this."""
    if not tensor.numel():
        return memoryview(b"")
    memory: Any = (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
    memory.tensor = tensor  # which a view of it holds
    return memoryview(memory).cast("B")


class Reader:
    """Reads for one rank, from files that the caller opened, and closes.

    read: bytes so far.      told: called with them by `finish`, now and then; what it raises is raised there.
    """

    def __init__(self, files: OpenFiles, *, threads: int, told: Callable[[int], object] | None = None) -> None:
        self._told = told
        self._files, self._pool = files, ThreadPoolExecutor(threads, thread_name_prefix="fullshard-read")
        self._begun: list[Future[int]] = []
        self.read = 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, reads: Sequence[Read]) -> None:
        """Do these reads.

        Raises:
            BadFile: naming the file, if it cannot be read.
        """
        self.begin(reads)
        self.finish()

    def begin(self, reads: Sequence[Read]) -> None:
        """Have these reads done by the threads, which hold their memory until then.

        Raises:
            BadFile: if a file cannot be opened.
        """
        tasks = self._tasks(reads)
        opened = {file: self._files.file(file) for file, _, _ in tasks}
        self._begun += [self._pool.submit(_fill, opened[file], file, offset, views) for file, offset, views in tasks]

    def finish(self) -> None:
        """Wait for the reads that were begun.

        Raises:
            BadFile: naming the file.
        """
        tasks, self._begun = self._begun, []
        failures: list[BaseException] = []
        for task in tasks:  # all are waited for, also behind a failure: they write to memory of the caller's
            failure = task.exception()
            if failure is not None:
                failures.append(failure)
                continue
            self.read += task.result()
            if self._told is not None and not failures:
                try:
                    self._told(self.read)
                except Exception as raised:
                    failures.append(raised)
        if failures:
            raise failures[0]

    def _tasks(self, reads: Sequence[Read]) -> list[tuple[str, int, list[memoryview]]]:
        """(file, offset, memory): reads that follow each other in a file as one, large ones in parts."""
        tasks: list[tuple[str, int, list[memoryview]]] = []
        end, nbytes = ("", -1), 0
        for read in sorted(reads, key=lambda one: (one.file, one.offset)):
            view = bytes_of(read.into)
            at = 0
            while at < len(view):
                room = LARGEST - nbytes if end == (read.file, read.offset + at) else 0
                if room <= 0 or len(tasks[-1][2]) >= MOST_VIEWS:
                    tasks.append((read.file, read.offset + at, []))
                    room, nbytes = LARGEST, 0
                part = view[at : at + room]
                tasks[-1][2].append(part)
                at, nbytes = at + len(part), nbytes + len(part)
                end = read.file, read.offset + at
        return tasks


def _fill(descriptor: int, file: str, begin: int, views: list[memoryview]) -> int:
    """Fill memory from a byte of a file on. Returns how many bytes were read."""
    offset = begin
    while views:
        try:
            count = os.preadv(descriptor, views, offset)
        except OSError as failure:
            raise BadFile(f"{file}: cannot be read at byte {offset:,}: {failure.strerror}") from failure
        if not count:
            raise BadFile(f"{file}: truncated while it was read: it ends at byte {offset:,}")
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return offset - begin


def place_in_file(source: FileTensor, first: int) -> int:
    """The byte of a file at which a row of a tensor begins."""
    rows = source.shape[0] if source.shape else 1
    return source.offset + (source.nbytes // rows * first if rows else 0)


__all__ = ["Read", "Reader", "bytes_of", "place_in_file"]
