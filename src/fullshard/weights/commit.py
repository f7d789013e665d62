"""Atomic replacement of a directory: write a new one next to it, sync it to disk, and exchange the two.

A save writes into a staging folder next to the directory:

    checkpoint                the directory that readers open
    .checkpoint.saving/
        owner                 JSON: host, process id and state of the save; locked (flock) while that process saves
        <token>/              the new content, with a name unique to this save; after the exchange the old content
        <token>.old/          the old content, if the file system cannot exchange directories
        <token>.aside/        backups of replaced files (see inside.py)

If the directory cannot be exchanged (a mount point, the current directory), the staging folder is `.saving` inside it, and
files are moved one by one (see inside.py).

If a save has written and synced its content but cannot move it into place, the content stays as <token>/. The owner file
records its name, and the next successful save to this directory removes it. With `step=`, that is a save of the same step.
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
import uuid
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fullshard.weights.headers import SINGLE
from fullshard.weights.inside import link, move_in, name_in_place, remove_old, sync, why_not_replaceable
from fullshard.weights.layout import CheckpointLayout, index_of, is_weights, may_be_weights

Extra = Mapping[str, str | bytes | os.PathLike[str]] | Callable[[Path], object]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_OWNER, _OLD = "owner", ".old"
_INSIDE = "inside-"  # prefix of the token of a save that moves files into the directory instead of exchanging it
_MERGE_ATTEMPTS = 20  # passes over the old content, because other programs may still create files in it
# `left_over` in another process locks the owner file for a moment, so a failed attempt is repeated.
_LOCK_ATTEMPTS = 10
_LOCK_PAUSE = 0.01  # seconds between two attempts


class Replacement:
    """The new content of a directory, from its creation to the commit.

    All ranks construct one with the same token. Only the first rank calls `prepare`, `add` and `commit`. Symbolic links are
    followed: the target of `directory` is replaced and the link stays a link.
    """

    def __init__(self, directory: str | os.PathLike[str], token: str, single: str = SINGLE) -> None:
        self.directory, self._single = resolved(directory), single
        self.others: tuple[str, ...] = ()  # after `commit`, files in the directory that may be weights and are not of this save
        self._keeps_directory = token.startswith(_INSIDE)
        self._staging = staging_path(self.directory, inside=self._keeps_directory)
        self.path = self._staging / token  # where the new content is written
        self._owner: int | None = None  # file descriptor of the locked owner file
        self._inode: int | None = None  # of the new content; after the exchange the old content is at `path`
        self._finished: list[str] = []  # names of complete contents of earlier saves that could not be moved into place

    def name_in_place(self, name: str) -> str:
        """Return the final name of a weights file in the directory."""
        return name_in_place(name, self.path.name, self._single) if self._keeps_directory else name

    # --- before anything is written ---

    def prepare(self, layout: CheckpointLayout) -> None:
        """Lock the staging folder and create the weights files, with their headers and with disk space for all data."""
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{self.directory} is a file. Pass the path of a directory, existing or new.")
        if self.directory == self.directory.parent:
            raise ValueError(
                f"{self.directory} is the root of the file system. Save to a directory in it, such as "
                f"{self.directory / 'checkpoint'}."
            )
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._owner = _lock_staging(self._staging, self.directory)
        before = _owner_of(self._staging)
        # Keep the facts of the unfinished save until its leftovers are handled: the next save needs them if this one is killed.
        self._write_owner(before)
        self._finished = _finished_saves(self._staging)
        self._clear_leftovers(before)
        self._write_owner({"token": self.path.name, "finished": self._finished})
        os.mkdir(self.path)
        self._inode = os.stat(self.path).st_ino
        free = shutil.disk_usage(self.path).free  # before the first file takes some of it
        for file in layout.files:
            descriptor = os.open(self.path / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self._reserve(descriptor, file.nbytes, layout.nbytes, free)
                os.pwrite(descriptor, file.header, 0)
            finally:
                os.close(descriptor)
        if layout.index is not None:
            (self.path / index_of(self._single)).write_text(layout.index, encoding="utf-8")

    def _clear_leftovers(self, owner: Mapping[str, object]) -> None:
        """Remove the leftovers of an unfinished save.

        Files that other programs created in the old content during its exchange are moved to `directory`.
        """
        entries = sorted(entry for entry in self._staging.iterdir() if not entry.name.startswith(_OWNER))
        found = [entry for entry in entries if entry.name not in self._finished]
        if not found:
            return
        warnings.warn(f"{self._staging} is left over from an unfinished save. It is removed.", stacklevel=2)
        for entry in found:
            # The save was killed between the two renames of `_replace`: no directory exists, so restore the old one.
            if entry.name.endswith(_OLD) and not os.path.lexists(self.directory):
                os.rename(entry, self.directory)
        # The folder <token> has the new content before the exchange and the old content after it; the inode tells which. The
        # new content has links to other files of the directory: moving them would bring back files that were removed since.
        ours = owner.get("ours")
        for entry in found:
            is_old = entry.name.endswith(_OLD) or (entry.name == owner.get("token") and _inode(entry) != owner.get("inode"))
            if is_old and isinstance(ours, list) and self.directory.is_dir() and entry.is_dir() and not entry.is_symlink():
                _move_over(entry, self.directory, ours, self._single)
            _remove(entry)

    def _write_owner(self, facts: Mapping[str, object]) -> None:
        """Write this process and `facts` to the owner file, on disk. The next save reads `facts` if this one is killed."""
        assert self._owner is not None
        text = json.dumps({**facts, "host": socket.gethostname(), "pid": os.getpid()}).encode()
        # Written in place: a rename would replace the file that carries the lock.
        os.pwrite(self._owner, text, 0)
        os.ftruncate(self._owner, len(text))
        os.fsync(self._owner)

    def _reserve(self, descriptor: int, nbytes: int, total: int, free: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            earlier = f" Remove {self._staging / self._finished[0]}, an earlier checkpoint." if self._finished else ""
            raise ValueError(
                f"Not enough disk space for {self.directory}: {total:,} bytes are needed, {free:,} are free "
                f"({failure.strerror}).{earlier}"
            ) from failure

    def add(self, extra: Extra | None, argument: str = "extra") -> None:
        """Write further files next to the weights, and sync them to disk. `argument`: name of `extra`, for error texts."""
        if extra is None:
            return
        before = self._weights()
        if callable(extra):
            extra(self.path)
        elif isinstance(extra, Mapping):
            for name, content in extra.items():
                self._add_file(name, content, argument)
        else:
            kind = type(extra).__name__
            raise ValueError(f"{argument} must be a dict of names and contents, or a function of a path, got a {kind}.")
        wrong = [name for name, inode in self._weights().items() if before.get(name) != inode]
        if wrong:
            raise ValueError(
                f"{argument} wrote {wrong[0]!r}, a name that is reserved for the model's weights. Choose another name."
            )
        for entry in self.path.rglob("*"):
            if entry.is_file() and not is_weights(entry.name, self._single):
                sync(entry)

    def _add_file(self, name: object, content: object, argument: str) -> None:
        if not isinstance(name, str) or Path(name).name != name or is_weights(name, self._single):
            raise ValueError(
                f"{argument} cannot contain {name!r}: expected the plain name of a file that is not a weights file."
            )
        if isinstance(content, str | bytes):
            (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        elif isinstance(content, os.PathLike):
            shutil.copyfile(content, self.path / name)
        else:
            kind = type(content).__name__
            raise ValueError(f"{argument}[{name!r}] must be text, bytes or the pathlib.Path of a file, got a {kind}.")

    def _weights(self) -> dict[str, int]:
        """Return the inode of each weights file, by name."""
        # `_inode` is None for a file that another rank is replacing at this moment.
        found = {entry.name: _inode(entry) for entry in self.path.iterdir() if is_weights(entry.name, self._single)}
        return {name: inode for name, inode in found.items() if inode is not None}

    # --- commit ---

    def commit(self) -> None:
        """Sync the new content to disk and move it into place atomically. Other files of the directory are kept.

        Files that other programs create in the old directory during the commit are kept, too: they move after the exchange.
        """
        if _owner_of(self._staging).get("token") != self.path.name:
            raise RuntimeError(
                f"{self._staging} was removed or belongs to another save, so {self.directory} is unchanged. "
                "Save from one job at a time."
            )
        ours = sorted(entry.name for entry in self.path.iterdir())
        try:
            # On disk before the exchange: after a crash, the next save tells this save's files from others by these names.
            self._write_owner({"token": self.path.name, "inode": self._inode, "ours": ours, "finished": self._finished})
            self._link_other_files()
            # Files of the old directory are left to the programs that wrote them: here they are links to the same data.
            self._sync_all(entry for entry in self.path.rglob("*") if self._is_new(entry, ours))
            old = None
            if self._keeps_directory:
                self._move_in()
            else:
                old = self._replace()
        except OSError as failure:
            self._keep_finished(failure, ours)
            raise
        try:
            sync(self.directory if self._keeps_directory else self.directory.parent)
        finally:  # the new content is in place, even if this sync fails
            self._remove_old(old, ours)

    def _is_new(self, entry: Path, ours: Sequence[str]) -> bool:
        """Return True for files of this save, for copies, and for all folders, since they have new entries."""
        if entry.relative_to(self.path).parts[0] in ours:
            return True
        status = entry.lstat()
        return stat.S_ISDIR(status.st_mode) or status.st_nlink == 1

    def _sync_all(self, entries: Iterable[Path]) -> None:
        """Sync these files and folders of the new content to disk."""
        for entry in entries:
            if entry.is_dir() or entry.is_file():  # skips dangling links and sockets
                sync(entry)
        sync(self.path)

    def _keep_finished(self, failure: OSError, ours: Sequence[str]) -> None:
        """Keep the new content in the staging folder if it can be synced to disk, and remove content kept by earlier saves."""
        try:
            self._sync_all(entry for name in ours for entry in (self.path / name, *(self.path / name).rglob("*")))
            self._write_owner({"finished": [self.path.name]})
        except OSError:  # the content may be incomplete on disk, so `discard` removes it
            return
        self._inode = None  # so that `discard` keeps the content
        self._remove_earlier()
        old = self._staging / f"{self.path.name}{_OLD}"
        before = f"the previous checkpoint is in {old}" if old.exists() else f"{self.directory} is unchanged"
        raise RuntimeError(
            f"{failure}. The new checkpoint is complete in {self.path}, and {before}. Load it from there or move it. It is "
            "kept until a later save to it succeeds."
        ) from failure

    def _remove_earlier(self) -> None:
        for name in self._finished:
            _remove(self._staging / name)
        self._finished = []

    def _remove_old(self, old: Path | None, ours: Sequence[str]) -> None:
        """Remove the old content and the content kept by earlier saves, and release the staging folder."""
        self._remove_earlier()
        if self._keeps_directory:
            remove_old(self.directory, {self.name_in_place(name) for name in ours}, self._single)
        if old is not None:
            try:
                _move_over(old, self.directory, ours, self._single)
            except OSError as failure:
                warnings.warn(
                    f"{self.directory} is saved, but its old content cannot be removed from {old} and may include files of "
                    f"other programs: {failure}. The next save tries again.",
                    stacklevel=2,
                )
        self._release()

    def _link_other_files(self) -> None:
        """Link the other files of the directory into the new content, and copy the directory's mode and owner.

        If the directory is not exchanged, only record the files that may be weights.
        """
        if not self.directory.is_dir():
            return
        for entry in sorted(self.directory.iterdir()):
            target = self.path / entry.name
            if is_weights(entry.name, self._single) or os.path.lexists(target):
                continue
            is_folder = entry.is_dir() and not entry.is_symlink()
            if may_be_weights(entry.name) and not is_folder:
                self.others += (entry.name,)
            if is_folder and not self._keeps_directory:
                shutil.copytree(entry, target, symlinks=True, copy_function=link)
            elif not self._keeps_directory:
                link(entry, target)
        if self._keeps_directory:
            return
        status = os.stat(self.directory)
        with suppress(PermissionError):  # only root may give files to another owner
            os.chown(self.path, status.st_uid, status.st_gid)
        os.chmod(self.path, stat.S_IMODE(status.st_mode))

    def _move_in(self) -> None:
        """Move the files of the new content into the directory one by one."""
        warnings.warn(
            f"{self.directory} {why_not_replaceable(self.directory) or 'is not exchanged'}, so files are moved into it one by "
            "one. Readers that use the index find either the old or the new weights, but other files of a save may appear "
            "before its weights.",
            stacklevel=2,
        )
        backup = self._staging / f"{self.path.name}.aside"
        try:
            move_in(self.path, self.directory, backup, self.path.name, self._single)
        finally:
            _remove(backup)
        self._inode = None
        _remove(self.path)

    def _replace(self) -> Path | None:
        """Move the new content into place. Return the new path of the old content, or None if there was none."""
        try:
            os.rename(self.path, self.directory)  # succeeds if the directory does not exist or is empty
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
            f"The file system of {self.directory} cannot exchange two directories atomically. The old directory is moved to "
            f"{self._staging} first, and a program that opens {self.directory} at this moment finds nothing.",
            stacklevel=2,
        )
        old = self._staging / f"{self.path.name}{_OLD}"
        os.rename(self.directory, old)
        try:
            os.rename(self.path, self.directory)
        except OSError:
            os.rename(old, self.directory)
            raise
        return old

    def discard(self) -> None:
        """Remove the new content unless it is in place already, and release the staging folder, on the rank that made them."""
        if self._owner is not None:
            # After the exchange `path` is the old content, whose inode differs. The next save handles it.
            if _inode(self.path) == self._inode:
                shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        """Unlock the staging folder, and remove it unless it has content for the next save."""
        assert self._owner is not None
        with suppress(OSError):  # another save may be locking the folder at this moment
            is_ours = os.path.samestat(os.stat(self._staging / _OWNER), os.fstat(self._owner))
            if is_ours and os.listdir(self._staging) == [_OWNER]:
                os.unlink(self._staging / _OWNER)
                os.rmdir(self._staging)
        with suppress(OSError):
            # Closing the file is not enough: child processes that were forked during the save share the lock.
            fcntl.flock(self._owner, fcntl.LOCK_UN)
        os.close(self._owner)
        self._owner = None


# --- paths and locks ---


def resolved(directory: str | os.PathLike[str]) -> Path:
    """Return the real path of a directory, with links resolved. Raise ValueError if it is empty or not a path."""
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory must be the path of a directory, got a {type(directory).__name__}.")
    if not os.fspath(directory):
        raise ValueError("directory must be the path of a directory, got ''.")
    return Path(os.path.realpath(directory))


def new_token(directory: str | os.PathLike[str]) -> str:
    """Return a unique name for a save. A prefix marks that files are moved into the directory instead of exchanging it.

    All ranks must use the result of the first rank: it is random, and ranks may see the directory differently.
    """
    return f"{_INSIDE if why_not_replaceable(resolved(directory)) else ''}{uuid.uuid4().hex}"


def staging_path(directory: Path, *, inside: bool = False) -> Path:
    """Return the staging folder next to a directory, or inside of one that cannot be exchanged."""
    return directory / ".saving" if inside else directory.parent / f".{directory.name}.saving"


def _lock_staging(staging: Path, directory: Path) -> int:
    """Create the staging folder or reuse a leftover one, and lock its owner file. Return the file descriptor with the lock."""
    while True:
        with suppress(FileExistsError):
            os.mkdir(staging)
        try:
            owner = os.open(staging / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another save has just removed the folder
            continue
        try:
            # The path may name a newer file by now. A lock on a removed file protects nothing.
            if _lock(owner, staging, directory) and os.path.samestat(os.stat(staging / _OWNER), os.fstat(owner)):
                return owner
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(owner)
            raise
        os.close(owner)


def _lock(owner: int, staging: Path, directory: Path) -> bool:
    """Lock the owner file. Return False if it was replaced by an unlocked file, so that the caller must open it again."""
    found: dict[str, object] = {}
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as failure:
            if failure.errno not in _NO_LOCKS:
                raise
            if not os.fstat(owner).st_size:
                return True  # the file system has no locks, and the empty file shows that no other save is running
        found = _owner_of(staging)
        if found and not _has_ended(found):
            break
        time.sleep(_LOCK_PAUSE)
    # The process has ended, but child processes that it forked still share its lock. A copy of the file is not locked.
    if _has_ended(found):
        fresh = staging / f"{_OWNER}.{os.getpid()}"
        fresh.write_text(json.dumps(found), encoding="utf-8")
        os.replace(fresh, staging / _OWNER)
        return False
    raise ValueError(
        f"Another save to {directory} is running, by process {found.get('pid', '?')} on {found.get('host', '?')}. Wait for "
        f"it or save to another directory. If no such process exists, remove {staging}."
    )


def _has_ended(owner: Mapping[str, object]) -> bool:
    """Return True if the process in the owner file ran on this host and has ended."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(str(owner.get("pid"))), 0)
    except (ProcessLookupError, ValueError):
        return True
    except PermissionError:  # the process exists and belongs to another user
        pass
    return False


def _owner_of(staging: Path) -> dict[str, object]:
    """Return the content of the owner file, {} if there is none."""
    try:
        content = json.loads((staging / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _finished_saves(staging: Path) -> list[str]:
    """Return the names of complete contents in a staging folder that could not be moved into place."""
    recorded = _owner_of(staging).get("finished")
    names = recorded if isinstance(recorded, list) else []
    return [name for name in names if isinstance(name, str) and Path(name).name == name and (staging / name).is_dir()]


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def left_over(directory: str | os.PathLike[str]) -> str | None:
    """Say what an unfinished save to this directory left, without a final period. None if nothing, or the save is running."""
    path = Path(os.path.realpath(directory))
    for staging in (staging_path(path), staging_path(path, inside=True)):
        with suppress(OSError):  # no folder or no owner, or a file system without locks
            owner = os.open(staging / _OWNER, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            finally:
                os.close(owner)
        with suppress(OSError):
            # An empty folder: a save is starting or ending at this moment.
            if any(not entry.name.startswith(_OWNER) for entry in staging.iterdir()):
                finished = _finished_saves(staging)
                if finished:
                    return f"{staging / finished[0]} is a complete checkpoint that a save could not move into place"
                return f"{staging} is left over from an unfinished save"
    return None


def warn_of_leftover(source: object) -> None:
    """Warn if the directory has leftovers of an unfinished save."""
    left = left_over(source) if isinstance(source, (str, os.PathLike)) else None
    if left is not None:
        warnings.warn(f"{left}. {source} is complete without it.", stacklevel=2)


# --- files of other programs ---


def _move_over(old: Path, new: Path, ours: Container[str], single: str) -> None:
    """Remove the old content, and move files that other programs created in it to the new content."""
    for _ in range(_MERGE_ATTEMPTS):
        for entry in sorted(old.iterdir()):
            if is_weights(entry.name, single) or entry.name in ours:
                _remove(entry)
            else:
                _merge(entry, new / entry.name)
        try:
            return os.rmdir(old)
        except OSError as failure:
            if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            time.sleep(0.05)  # a program with the old directory open created another file in it
    warnings.warn(
        f"Files are still being created in {old}, which was {new} before the save. It is kept, and the next save moves them.",
        stacklevel=2,
    )


def _merge(entry: Path, place: Path) -> None:
    """Move a file, or all files of a directory, to `place` unless the new content has a newer file there."""
    with suppress(FileNotFoundError, NotADirectoryError):  # another program removed it or replaced a directory by a file
        if entry.is_dir() and not entry.is_symlink():
            if not os.path.lexists(place):
                os.rename(entry, place)
                return
            for inner in sorted(entry.iterdir()):
                _merge(inner, place / inner.name)
            with suppress(OSError):  # another program created a file in it: the next attempt moves it
                os.rmdir(entry)
            return
        mine = os.lstat(entry)
        if not os.path.lexists(place):
            os.rename(entry, place)
        elif not os.path.samestat(mine, os.lstat(place)) and mine.st_mtime_ns > os.lstat(place).st_mtime_ns:
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
    """Exchange two directories atomically."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is None or rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        code = ctypes.get_errno() or errno.ENOSYS
        raise OSError(code, f"{os.strerror(code)}: {one} and {other} cannot be exchanged")
