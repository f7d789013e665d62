"""A directory that is replaced in one step: written beside it, and exchanged with it when all of it is on the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from fullshard.weights.layout import CheckpointLayout, is_weights

Extra = Mapping[str, str | bytes | os.PathLike[str]] | Callable[[Path], object]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Replacement:
    """The new content of a directory, until it is in its place. path: where it is written."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.path = beside(self.directory)

    def prepare(self, layout: CheckpointLayout) -> None:
        """Make the files, with headers and room for all of their data.

        Raises:
            ValueError: if there is no room, saying how much is needed and how much is free.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{self.directory} is a file, expected a directory or nothing")
        if self.path.exists():
            warnings.warn(f"{self.path} is left over of a save that was not finished; it is removed", stacklevel=2)
            shutil.rmtree(self.path)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        for file in layout.files:
            descriptor = os.open(self.path / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self._reserve(descriptor, file.nbytes, layout.nbytes)
                os.pwrite(descriptor, file.header, 0)
            finally:
                os.close(descriptor)
        if layout.index is not None:
            (self.path / "model.safetensors.index.json").write_text(layout.index, encoding="utf-8")

    def _reserve(self, descriptor: int, nbytes: int, total: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self.path).free
            raise ValueError(
                f"not enough room for {self.directory}: {total:,} bytes are needed, {free:,} are free ({failure.strerror})"
            ) from failure

    def add(self, extra: Extra | None) -> None:
        """Put further files beside the weights."""
        if callable(extra):
            extra(self.path)
        for name, content in ({} if extra is None or callable(extra) else extra).items():
            if Path(name).name != name or is_weights(name):
                raise ValueError(f"extra has {name!r}, which is no name of a further file")
            if isinstance(content, str | bytes):
                (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
            else:
                shutil.copyfile(content, self.path / name)

    def _keep(self) -> None:
        """Take along the files of the directory that are no weights and were not given anew."""
        for entry in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            place = self.path / entry.name
            if is_weights(entry.name) or place.exists():
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, place, symlinks=True, copy_function=_link)
            else:
                _link(entry, place)

    def commit(self) -> None:
        """Have all of it on the disk, and in its place, in one step. Other files of the directory are taken along."""
        self._keep()
        for entry in self.path.rglob("*"):
            _sync(entry)
        _sync(self.path)
        if not self.directory.exists():
            os.rename(self.path, self.directory)
            return _sync(self.directory.parent)
        exchange(self.path, self.directory)
        _sync(self.directory.parent)
        shutil.rmtree(self.path, ignore_errors=True)  # the old one

    def discard(self) -> None:
        """Nothing comes of it."""
        shutil.rmtree(self.path, ignore_errors=True)


def beside(directory: Path) -> Path:
    """Where the next content of a directory is written."""
    return directory.parent / f".{directory.name}.saving"


def warn_of_leftover(source: object) -> None:
    """Say that a save to this directory was not finished."""
    if isinstance(source, (str, os.PathLike)):
        left = beside(Path(os.path.abspath(source)))
        if left.exists():
            warnings.warn(f"{left} is left over of a save that was not finished; {source} is whole without it", stacklevel=2)


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories in one step.

    Raises:
        OSError: if the file system cannot do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is None or rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        code = ctypes.get_errno() or errno.ENOSYS
        raise OSError(
            code,
            f"{os.strerror(code)}: this file system cannot exchange two directories in one step, so {other} cannot be "
            "replaced safely: save to a new directory",
        )


def _link(source: str | Path, place: str | Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, place, follow_symlinks=False)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["Extra", "Replacement", "beside", "exchange", "warn_of_leftover"]
