"""Reads bytes of files into memory: in order of their offsets, large ones in parts, by several threads, never by mmap."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullshard.weights.headers import BadFile, FileIdentity, FileTensor

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
    """Reads for one rank. read: bytes so far.

    files: each file, as the first rank saw it.
    """

    def __init__(self, files: Mapping[str, FileIdentity], *, threads: int) -> None:
        self._files, self._pool = files, ThreadPoolExecutor(threads, thread_name_prefix="fullshard-read")
        self._open: dict[str, int] = {}
        self._begun: list[Future[int]] = []
        self.read = 0

    def close(self) -> None:
        """Close the files."""
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def run(self, reads: Sequence[Read]) -> None:
        """Do these reads.

        Raises:
            BadFile: naming the file, if it cannot be read, or is another one than the first rank's.
        """
        self.begin(reads)
        self.finish()

    def begin(self, reads: Sequence[Read]) -> None:
        """Have these reads done by the threads, which hold their memory until then.

        Raises:
            BadFile: if a file cannot be opened, or is another one than the first rank's.
        """
        self._begun += [self._pool.submit(self._fill, file, offset, views) for file, offset, views in self._tasks(reads)]

    def finish(self) -> None:
        """Wait for the reads that were begun.

        Raises:
            BadFile: naming the file.
        """
        tasks, self._begun = self._begun, []
        failures = [failure for task in tasks if (failure := task.exception()) is not None]
        self.read += sum(task.result() for task in tasks if task.exception() is None)
        if failures:
            raise failures[0]

    def _descriptor(self, file: str) -> int:
        found = self._open.get(file)
        if found is None:
            try:
                found = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as failure:
                raise BadFile(f"{file}: {failure.strerror}") from failure
            self._open[file] = found
            difference = self._files[file].difference(found)
            if difference is not None:
                raise BadFile(f"{file} has {difference}: the files differ")
        return found

    def _tasks(self, reads: Sequence[Read]) -> list[tuple[str, int, list[memoryview]]]:
        """(file, offset, memory): reads that follow each other in a file as one, large ones in parts."""
        tasks: list[tuple[str, int, list[memoryview]]] = []
        end, nbytes = ("", -1), 0
        for read in sorted(reads, key=lambda one: (one.file, one.offset)):
            self._descriptor(read.file)
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

    def _fill(self, file: str, offset: int, views: list[memoryview]) -> int:
        """Fill memory from here on. Returns how many bytes were read."""
        descriptor, begin = self._open[file], offset
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
