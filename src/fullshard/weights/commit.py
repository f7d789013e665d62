"""A directory that is replaced in one step: written beside it, and exchanged with it when all of it is on the disk.

What is written lies in a staging folder beside the directory:

    checkpoint                what readers see
    .checkpoint.saving/
        owner                 who saves; locked as long as that process saves, and no longer
        <token>/              the new content, of a name that no other save has; behind the exchange the old content
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path

from fullshard.weights.layout import CheckpointLayout, is_weights

Extra = Mapping[str, str | bytes | os.PathLike[str]] | Callable[[Path], object]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_OWNER = "owner"
_LOOKS = 20  # at the old content, for files that others make there meanwhile


class Replacement:
    """The new content of a directory, until it is in its place. path: where it is written.

    directory: links are followed, so that a link stays one, and its target is replaced.
    token: that no other save has; alike on all ranks, of which the first calls `prepare`, `add` and `commit`.

    Raises:
        ValueError: for a directory that cannot be replaced: none, a root or a mount point, or one in which the process stands.
    """

    def __init__(self, directory: str | os.PathLike[str], token: str) -> None:
        self.directory = _target(directory)
        self._staging = beside(self.directory)
        self.path = self._staging / token
        self._owner: int | None = None
        self._ours: set[str] = set()  # names of what is written anew

    # --- before anything is written ---

    def prepare(self, layout: CheckpointLayout) -> None:
        """Take the staging folder, and make the files, with headers and room for all of their data.

        Raises:
            ValueError: if another save has the folder, naming it; or if there is no room, saying how much is needed and free.
        """
        _check_replaceable(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._owner = _take(self._staging, self.directory)
        self._clear_leftovers()
        self._note_owner()
        os.mkdir(self.path)
        for file in layout.files:
            descriptor = os.open(self.path / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self._reserve(descriptor, file.nbytes, layout.nbytes)
                os.pwrite(descriptor, file.header, 0)
            finally:
                os.close(descriptor)
        if layout.index is not None:
            (self.path / "model.safetensors.index.json").write_text(layout.index, encoding="utf-8")

    def _clear_leftovers(self) -> None:
        """Remove what an unfinished save left; what others put into the directory during its exchange is moved over."""
        found = sorted(entry for entry in self._staging.iterdir() if entry.name != _OWNER)
        if not found:
            return
        warnings.warn(f"{self._staging} is left over of a save that was not finished; it is removed", stacklevel=2)
        told = _owner_of(self._staging)
        token = str(told.get("token"))
        aside = self._staging / f"{token}.old"
        if aside in found and not self.directory.exists():  # between the two renames of `_replace`
            os.rename(aside, self.directory)
        ours = told.get("ours")
        if isinstance(ours, list):  # its exchange had begun
            for entry in found:
                if entry.name in (token, aside.name) and entry.is_dir() and self.directory.is_dir():
                    _move_over(entry, self.directory, ours)
        for entry in found:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif os.path.lexists(entry):
                os.unlink(entry)

    def _note_owner(self, **more: object) -> None:
        """Write who saves, for others, and what is written anew, for the save that comes after one that is killed."""
        assert self._owner is not None
        text = json.dumps({"token": self.path.name, "host": socket.gethostname(), "pid": os.getpid(), **more}).encode()
        os.pwrite(self._owner, text, 0)
        os.ftruncate(self._owner, len(text))

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
        """Put further files beside the weights.

        Raises:
            ValueError: for a name that is none of a further file, and for what has no content of one.
        """
        before = {entry.name: entry.stat().st_ino for entry in self.path.iterdir()}
        if callable(extra):
            extra(self.path)
        for name, content in ({} if extra is None or callable(extra) else extra).items():
            if not isinstance(name, str) or Path(name).name != name or is_weights(name):
                raise ValueError(f"extra has {name!r}, which is no name of a further file")
            if isinstance(content, str | bytes):
                (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
            elif isinstance(content, os.PathLike):
                shutil.copyfile(content, self.path / name)
            else:
                kind = type(content).__name__
                raise ValueError(f"extra has a {kind} for {name!r}, expected its text or bytes, or the pathlib.Path of a file")
        for entry in self.path.iterdir():
            if is_weights(entry.name) and before.get(entry.name) != entry.stat().st_ino:
                raise ValueError(
                    f"extra wrote {entry.name!r}, which is a name of weights: they would not be those of the model"
                )

    # --- into its place ---

    def commit(self) -> None:
        """Have all of it on the disk, and in its place, in one step. Other files of the directory are taken along.

        Also those that somebody makes there meanwhile: what was not seen before the exchange is moved over behind it.

        Raises:
            RuntimeError: if the staging folder is not this save's any more.
        """
        assert self._owner is not None
        if _owner_of(self._staging).get("token") != self.path.name:
            raise RuntimeError(f"{self._staging} is gone or another save's: {self.directory} is left as it was")
        self._ours = {entry.name for entry in self.path.iterdir()}
        self._note_owner(ours=sorted(self._ours))
        os.fsync(self._owner)
        self._keep()
        for entry in self.path.rglob("*"):
            if entry.is_dir() or entry.is_file():  # neither a dangling link nor a socket
                _sync(entry)
        _sync(self.path)
        old = self._replace()
        _sync(self.directory.parent)
        if old is not None:
            try:
                _move_over(old, self.directory, self._ours)
            except OSError as failure:
                warnings.warn(f"{self.directory} is saved; what it had before is left at {old}: {failure}", stacklevel=2)
        self._leave()

    def _keep(self) -> None:
        """Take along the files of the directory that are no weights and were not given anew, and its mode and owner."""
        if not self.directory.is_dir():
            return
        for entry in sorted(self.directory.iterdir()):
            place = self.path / entry.name
            if is_weights(entry.name) or os.path.lexists(place):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, place, symlinks=True, copy_function=_link)
            else:
                _link(entry, place)
        status = os.stat(self.directory)
        with suppress(PermissionError):
            os.chown(self.path, status.st_uid, status.st_gid)
        os.chmod(self.path, stat.S_IMODE(status.st_mode))

    def _replace(self) -> Path | None:
        """Put the new content into its place; returns where the old one is now, None if there was none."""
        try:
            os.rename(self.path, self.directory)  # where there is nothing, or an empty directory
            return None
        except OSError as failure:
            if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            exchange(self.path, self.directory)
            return self.path
        except OSError as failure:
            if failure.errno not in _NO_EXCHANGE:
                raise
        warnings.warn(
            f"the file system of {self.directory} cannot exchange two directories in one step: it is moved aside, then the new "
            f"one into its place; whoever looks between the two finds nothing there, and {self._staging} has both",
            stacklevel=2,
        )
        aside = self._staging / f"{self.path.name}.old"
        os.rename(self.directory, aside)
        os.rename(self.path, self.directory)
        return aside

    def discard(self) -> None:
        """Nothing comes of it."""
        if self._owner is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._leave()

    def _leave(self) -> None:
        """Give the staging folder up: another save may have it, or takes it in this moment."""
        if self._owner is None:
            return
        with suppress(OSError):
            if _same(os.stat(self._staging / _OWNER), os.fstat(self._owner)):
                os.unlink(self._staging / _OWNER)
                os.rmdir(self._staging)
        with suppress(OSError):
            fcntl.flock(self._owner, fcntl.LOCK_UN)  # also for processes that were forked meanwhile, which have it, too
        os.close(self._owner)
        self._owner = None


# --- which directory, and whose it is ---


def _target(directory: str | os.PathLike[str]) -> Path:
    if not os.fspath(directory):
        raise ValueError("directory is '', expected the path of a directory")
    return Path(os.path.realpath(directory))


def _check_replaceable(directory: Path) -> None:
    """Raises ValueError for what cannot be replaced by another directory."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, expected a directory or nothing")
    instead = f"it cannot be replaced in one step: save to a directory in it, such as {directory / 'checkpoint'}"
    if directory == directory.parent:
        raise ValueError(f"{directory} is the root of the file system, {instead}")
    if os.path.ismount(directory):
        raise ValueError(f"{directory} is a mount point, {instead}")
    try:
        here = Path(os.path.realpath(os.getcwd()))
    except FileNotFoundError:  # it was removed
        return
    if directory == here or directory in here.parents:
        raise ValueError(f"{directory} is the current directory, or one above it, {instead}")


def beside(directory: Path) -> Path:
    """Where the next content of a directory is written."""
    return directory.parent / f".{directory.name}.saving"


def _take(staging: Path, directory: Path) -> int:
    """Make the staging folder, or take one that was left over, and lock its owner. Returns the descriptor that has the lock.

    Raises:
        ValueError: if another save has it, or if that cannot be known.
    """
    while True:
        with suppress(FileExistsError):
            os.mkdir(staging)
        try:
            owner = os.open(staging / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another save just left it
            continue
        try:
            if _lock(owner, staging, directory) and _same(os.stat(staging / _OWNER), os.fstat(owner)):
                return owner
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(owner)
            raise
        os.close(owner)


def _lock(owner: int, staging: Path, directory: Path) -> bool:
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass
    except OSError as failure:
        if failure.errno not in _NO_LOCKS:
            raise
        if not os.fstat(owner).st_size:
            return True  # a file system without locks; nobody was here
    told = _owner_of(staging)
    if told.get("host") == socket.gethostname() and not _lives(told.get("pid")):  # what it forked has the lock still
        with suppress(FileNotFoundError):
            os.unlink(staging / _OWNER)
        return False
    raise ValueError(
        f"another save to {directory} is under way, by process {told.get('pid', '?')} on {told.get('host', '?')}: wait for it, "
        f"or save to another directory (if there is none, remove {staging})"
    ) from None


def _lives(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _owner_of(staging: Path) -> dict[str, object]:
    """What the owner says of itself; nothing if there is none."""
    try:
        told = json.loads((staging / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def left_over(directory: str | os.PathLike[str]) -> Path | None:
    """What a save to this directory left that was not finished; None if there is nothing, or a save is under way."""
    staging = beside(Path(os.path.realpath(directory)))
    try:
        owner = os.open(staging / _OWNER, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(owner)
    except BlockingIOError:
        return None
    except OSError:  # no owner, or a file system without locks
        pass
    with suppress(OSError):
        if any(entry.name != _OWNER for entry in staging.iterdir()):
            return staging
    return None  # or one that begins or ends in this moment


def warn_of_leftover(source: object) -> None:
    """Say that a save to this directory was not finished."""
    left = left_over(source) if isinstance(source, (str, os.PathLike)) else None
    if left is not None:
        warnings.warn(f"{left} is left over of a save that was not finished; {source} is whole without it", stacklevel=2)


# --- files that others have there ---


def _move_over(old: Path, new: Path, ours: Container[str]) -> None:
    """Take the old content apart. What the new one lacks was made meanwhile, and is moved; nothing is removed unseen.

    ours: names in `new` that were given anew.
    """
    for _ in range(_LOOKS):
        for entry in sorted(old.iterdir()):
            if is_weights(entry.name) or entry.name in ours:
                _remove(entry)
            else:
                _merge(entry, new / entry.name)
        try:
            return os.rmdir(old)
        except OSError as failure:
            if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            time.sleep(0.05)
    warnings.warn(f"somebody still makes files in {old}, which was {new}: it stays, and they are there", stacklevel=2)


def _merge(entry: Path, place: Path) -> None:
    """Move a file, or the files of a directory, to where the new content has none, or an older one."""
    with suppress(FileNotFoundError, NotADirectoryError):  # somebody took it away, or has a file where there was a directory
        if entry.is_dir() and not entry.is_symlink():
            if not os.path.lexists(place):
                os.rename(entry, place)
                return
            for inner in sorted(entry.iterdir()):
                _merge(inner, place / inner.name)
            with suppress(OSError):  # filled again: the next look finds it
                os.rmdir(entry)
            return
        mine = os.lstat(entry)
        if not os.path.lexists(place):
            os.rename(entry, place)
        elif not _same(mine, os.lstat(place)) and mine.st_mtime_ns > os.lstat(place).st_mtime_ns:
            os.replace(entry, place)
        else:
            os.unlink(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(entry)


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
        raise OSError(code, f"{os.strerror(code)}: {one} and {other} cannot be exchanged")


def _link(source: str | Path, place: str | Path) -> None:
    """Have the same file at a second place; a copy where there are no links. A file that is gone meanwhile is nobody's loss."""
    with suppress(FileNotFoundError):
        try:
            os.link(source, place, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            mode = os.lstat(source).st_mode
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # a socket or a pipe of a running program stays where it is
                shutil.copy2(source, place, follow_symlinks=False)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["Extra", "Replacement", "beside", "exchange", "left_over", "warn_of_leftover"]
