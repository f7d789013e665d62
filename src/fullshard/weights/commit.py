"""A directory that is replaced in one step: written beside it, and exchanged with it when all of it is on the disk.

What is written lies in a staging folder beside the directory:

    checkpoint                what readers see
    .checkpoint.saving/
        owner                 JSON: who saves; locked as long as that process saves, and no longer
        <token>/              the new content, under a name that no other save has; after the exchange the old content
        <token>.old/          the old content, where the file system cannot exchange directories
        <token>.aside/        what `inside` needs meanwhile

Where the directory cannot be exchanged (a mount point, the current directory), the folder is `.saving` in it, and files are
moved one by one, as `inside` says.

What a save wrote and synced but could not put into its place stays as <token>/, named by the owner file, until a later save is
in its place.
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
from fullshard.weights.inside import move_in, name_in_place, remove_old, stays, sync
from fullshard.weights.layout import CheckpointLayout, index_of, is_weights, may_be_weights

Extra = Mapping[str, str | bytes | os.PathLike[str]] | Callable[[Path], object]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_OWNER, _OLD = "owner", ".old"
_INSIDE = "inside-"  # begins the token of a save whose directory stays
_LOOKS = 20  # at the old content, for files that others create there meanwhile
_TRIES, _PAUSE = 10, 0.01  # to lock the owner, and seconds between two: a load that looks for leftovers holds it for a moment


class Replacement:
    """The new content of a directory, until it is in its place. path: where it is written.

    directory: links are followed, so that a link stays one, and its target is replaced.
    token: of `new_token`, alike on all ranks, of which the first calls `prepare`, `add` and `commit`.
    single: of the file of weights if there is one.

    Raises:
        ValueError: if the path is empty.
    """

    def __init__(self, directory: str | os.PathLike[str], token: str, single: str = SINGLE) -> None:
        self.directory, self._single = resolved(directory), single
        self.others: tuple[str, ...] = ()  # files beside those of this save that may be weights, after `commit`
        self._stays = token.startswith(_INSIDE)
        self._staging = inside(self.directory) if self._stays else beside(self.directory)
        self.path = self._staging / token
        self._owner: int | None = None  # descriptor of the locked file
        self._inode: int | None = None  # of the new content: what lies at `path` after the exchange has another one
        self._finished: list[str] = []  # earlier contents that are whole, and could not be put into their place

    def name_in_place(self, name: str) -> str:
        """Return the name that a file of weights gets in the directory."""
        return name_in_place(name, self.path.name, self._single) if self._stays else name

    # --- before anything is written ---

    def prepare(self, layout: CheckpointLayout) -> None:
        """Take the staging folder, and make the files, with headers and room for all of their data.

        Raises:
            ValueError: if the directory cannot be replaced (a file, a root, a mount point, the current directory); if another
                save has the folder, naming it; or if there is no room, saying how much is needed and free.
        """
        _check_replaceable(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._owner = _take(self._staging, self.directory)
        before = _owner_of(self._staging)
        self._note_owner(before)  # this process has it now, and what is left over is still known if it is killed
        self._finished = _finished(self._staging)
        self._clear_leftovers(before)
        self._note_owner({"token": self.path.name, "finished": self._finished})
        os.mkdir(self.path)
        self._inode = os.stat(self.path).st_ino
        for file in layout.files:
            descriptor = os.open(self.path / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self._reserve(descriptor, file.nbytes, layout.nbytes)
                os.pwrite(descriptor, file.header, 0)
            finally:
                os.close(descriptor)
        if layout.index is not None:
            (self.path / index_of(layout.name)).write_text(layout.index, encoding="utf-8")

    def _clear_leftovers(self, owner: Mapping[str, object]) -> None:
        """Remove what an unfinished save left; what others put into the directory during its exchange is moved over.

        owner: what that save said of itself.
        """
        entries = sorted(entry for entry in self._staging.iterdir() if not entry.name.startswith(_OWNER))
        found = [entry for entry in entries if entry.name not in self._finished]
        if not found:
            return
        warnings.warn(f"{self._staging} is left over of a save that was not finished; it is removed", stacklevel=2)
        for entry in found:
            if entry.name.endswith(_OLD) and not os.path.lexists(self.directory):  # killed between two renames of `_replace`
                os.rename(entry, self.directory)
        ours = owner.get("ours")
        for entry in (entry for entry in found if entry.is_dir() and not entry.is_symlink()):
            is_old = entry.name.endswith(_OLD) or (entry.name == owner.get("token") and _inode(entry) != owner.get("inode"))
            if is_old and isinstance(ours, list) and self.directory.is_dir():
                _move_over(entry, self.directory, ours, self._single)
        for entry in found:
            _remove(entry)

    def _note_owner(self, facts: Mapping[str, object]) -> None:
        """Write to the owner file which process saves, and facts that the next save needs if this one is killed."""
        assert self._owner is not None
        text = json.dumps({**facts, "host": socket.gethostname(), "pid": os.getpid()}).encode()
        os.pwrite(self._owner, text, 0)
        os.ftruncate(self._owner, len(text))

    def _reserve(self, descriptor: int, nbytes: int, total: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self.path).free
            earlier = f"; remove {self._staging / self._finished[0]}, an earlier checkpoint" if self._finished else ""
            raise ValueError(
                f"not enough room for {self.directory}: {total:,} bytes are needed, {free:,} are free "
                f"({failure.strerror}){earlier}"
            ) from failure

    def add(self, extra: Extra | None) -> None:
        """Put further files beside the weights.

        Raises:
            ValueError: for the name of a weights file, for a path, and for content that is no text, bytes or path.
        """
        before = self.weights()
        if callable(extra):
            extra(self.path)
        if not (extra is None or callable(extra) or isinstance(extra, Mapping)):
            kind = type(extra).__name__
            raise ValueError(f"extra must be a dict of names and contents, or a function of a path, got a {kind}")
        for name, content in ({} if extra is None or callable(extra) else extra).items():
            if not isinstance(name, str) or Path(name).name != name or is_weights(name, self._single):
                raise ValueError(f"extra has {name!r}, which is no name of a further file")
            if isinstance(content, str | bytes):
                (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
            elif isinstance(content, os.PathLike):
                shutil.copyfile(content, self.path / name)
            else:
                kind = type(content).__name__
                raise ValueError(f"extra has a {kind} for {name!r}, expected its text or bytes, or the pathlib.Path of a file")
        self.check_weights(before, "extra")

    def weights(self) -> dict[str, int]:
        """The inode of each file of weights, but of one that another rank replaces in this moment."""
        found = {entry.name: _inode(entry) for entry in self.path.iterdir() if is_weights(entry.name, self._single)}
        return {name: inode for name, inode in found.items() if inode is not None}

    def check_weights(self, before: Mapping[str, int], who: str) -> None:
        """Refuse files of weights that somebody else wrote. Raises ValueError naming one."""
        wrong = [name for name, inode in self.weights().items() if before.get(name) != inode]
        if wrong:
            raise ValueError(
                f"{who} wrote {wrong[0]!r}, which is a name of weights, over those of the model: give it another name"
            )

    def sync_others(self) -> None:
        """Have what is beside the weights on the disk, as far as this process sees it."""
        for entry in self.path.rglob("*"):
            if entry.is_file() and not is_weights(entry.name, self._single):
                sync(entry)

    # --- into its place ---

    def commit(self) -> None:
        """Sync the new content to the disk, and put it into its place in one step. Other files of the directory are kept.

        Files that others create there meanwhile are kept, too: those that the exchange missed are moved over after it.

        Raises:
            RuntimeError: if the staging folder is not this save's any more.
        """
        assert self._owner is not None
        if _owner_of(self._staging).get("token") != self.path.name:
            raise RuntimeError(
                f"{self._staging} is gone or another save's, so {self.directory} is left as it was: save from one job at a time"
            )
        ours = sorted(entry.name for entry in self.path.iterdir())
        facts = {"token": self.path.name, "inode": self._inode, "ours": ours, "finished": self._finished}
        try:
            self._note_owner(facts)
            os.fsync(self._owner)
            self._keep()
            self._sync_all(self.path.rglob("*"))
            old = self._move_in() if self._stays else self._replace()
        except OSError as failure:
            self._leave_finished(failure, ours)
            raise
        try:
            sync(self.directory if self._stays else self.directory.parent)
        finally:  # whether or not that is on the disk, the new content is in its place
            self._settle(old, ours)

    def _sync_all(self, entries: Iterable[Path]) -> None:
        """Have the new content on the disk."""
        for entry in entries:
            if entry.is_dir() or entry.is_file():  # neither a dangling link nor a socket
                sync(entry)
        sync(self.path)

    def _leave_finished(self, failure: OSError, ours: Sequence[str]) -> None:
        """Leave the new content in the staging folder if it is on the disk, in place of an earlier one.

        Raises:
            RuntimeError: from the failure, saying where it is.
        """
        assert self._owner is not None
        try:
            self._sync_all(entry for name in ours for entry in (self.path / name, *(self.path / name).rglob("*")))
            self._note_owner({"finished": [self.path.name]})
            os.fsync(self._owner)
        except OSError:  # it may not be on the disk: `discard` removes it
            return
        self._inode = None  # `discard` leaves it
        self._remove_earlier()
        aside = self._staging / f"{self.path.name}{_OLD}"
        before = f"the checkpoint of before is in {aside}" if aside.exists() else f"{self.directory} is as it was"
        raise RuntimeError(
            f"{failure}. The new checkpoint is whole in {self.path}, and {before}: load it from there, or move it. It stays "
            "until a later save is in its place"
        ) from failure

    def _remove_earlier(self) -> None:
        for name in self._finished:
            _remove(self._staging / name)
        self._finished = []

    def _settle(self, old: Path | None, ours: Sequence[str]) -> None:
        """Take the old content apart, and earlier ones that had not come into their place, and give the staging folder up."""
        self._remove_earlier()
        if self._stays:
            remove_old(self.directory, {self.name_in_place(name) for name in ours}, self._single)
        if old is not None:
            try:
                _move_over(old, self.directory, ours, self._single)
            except OSError as failure:
                warnings.warn(
                    f"{self.directory} is saved, but its old content could not be removed from {old}, and may have files of "
                    f"others: {failure}. The next save tries again",
                    stacklevel=2,
                )
        self._leave()

    def _keep(self) -> None:
        """Link the other files of the directory into the new content, and copy its mode and owner, unless it stays."""
        if not self.directory.is_dir():
            return
        for entry in sorted(self.directory.iterdir()):
            place = self.path / entry.name
            if is_weights(entry.name, self._single) or os.path.lexists(place):
                continue
            if self._stays:
                self.others += (entry.name,) if may_be_weights(entry.name) else ()
            elif entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, place, symlinks=True, copy_function=_link)
            else:
                _link(entry, place)
                self.others += (entry.name,) if may_be_weights(entry.name) else ()
        if self._stays:
            return
        status = os.stat(self.directory)
        with suppress(PermissionError):
            os.chown(self.path, status.st_uid, status.st_gid)
        os.chmod(self.path, stat.S_IMODE(status.st_mode))

    def _move_in(self) -> Path | None:
        """Move the files of the new content into the directory, which stays."""
        warnings.warn(
            f"{self.directory} {stays(self.directory) or 'stays'}, so files are moved into it one by one: whoever reads "
            "weights by their index finds the old or the new ones, but further files of a save may be there before its weights",
            stacklevel=2,
        )
        aside = self._staging / f"{self.path.name}.aside"
        try:
            move_in(self.path, self.directory, aside, self.path.name, self._single)
        finally:
            _remove(aside)
        self._inode = None
        _remove(self.path)
        return None

    def _replace(self) -> Path | None:
        """Put the new content into its place. Returns where the old content is now, None if there was none."""
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
            f"the file system of {self.directory} cannot exchange two directories in one step: the old one is moved to "
            f"{self._staging} first, and a program that opens {self.directory} in this moment finds nothing",
            stacklevel=2,
        )
        aside = self._staging / f"{self.path.name}{_OLD}"
        os.rename(self.directory, aside)
        try:
            os.rename(self.path, self.directory)
        except OSError:
            os.rename(aside, self.directory)
            raise
        return aside

    def discard(self) -> None:
        """Remove the new content, unless it is in its place already, and give the staging folder up."""
        if self._owner is not None:
            if _inode(self.path) == self._inode:
                shutil.rmtree(self.path, ignore_errors=True)
            self._leave()

    def _leave(self) -> None:
        """Remove the staging folder, unless something is left in it for the next save, and unlock it."""
        if self._owner is None:
            return
        with suppress(OSError):  # another save may take it in this moment
            is_ours = _same(os.stat(self._staging / _OWNER), os.fstat(self._owner))
            if is_ours and os.listdir(self._staging) == [_OWNER]:
                os.unlink(self._staging / _OWNER)
                os.rmdir(self._staging)
        with suppress(OSError):
            fcntl.flock(self._owner, fcntl.LOCK_UN)  # closing is not enough: processes forked meanwhile share the lock
        os.close(self._owner)
        self._owner = None


# --- which directory, and whose it is ---


def resolved(directory: str | os.PathLike[str]) -> Path:
    """Return the directory itself, behind links. Raises ValueError if the path is empty, or is none."""
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory must be the path of a directory, got a {type(directory).__name__}")
    if not os.fspath(directory):
        raise ValueError("directory is '', expected the path of a directory")
    return Path(os.path.realpath(directory))


def _check_replaceable(directory: Path) -> None:
    """Check that a path can be the directory of a checkpoint. Raises ValueError if it is a file or the root."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, expected a directory or nothing")
    if directory == directory.parent:
        raise ValueError(
            f"{directory} is the root of the file system: save to a directory in it, such as {directory / 'checkpoint'}"
        )


def new_token(directory: str | os.PathLike[str]) -> str:
    """Return what names a save: unique, and saying whether its directory stays, which the first rank finds out for all."""
    return f"{_INSIDE if stays(resolved(directory)) else ''}{uuid.uuid4().hex}"


def beside(directory: Path) -> Path:
    """Where the next content of a directory is written."""
    return directory.parent / f".{directory.name}.saving"


def inside(directory: Path) -> Path:
    """Where the next content of a directory that stays is written."""
    return directory / ".saving"


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
    """Lock the owner file. Returns False if the file was replaced by one that is not locked: try again.

    Raises:
        ValueError: if a process that lives has it, or one on another host.
    """
    found: dict[str, object] = {}
    for _ in range(_TRIES):
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as failure:
            if failure.errno not in _NO_LOCKS:
                raise
            if not os.fstat(owner).st_size:
                return True  # a file system without locks, and no save was here
        found = _owner_of(staging)
        if found and not _has_ended(found):
            break
        time.sleep(_PAUSE)
    if _has_ended(found):  # processes that it forked still share its lock: a copy of the file is not locked
        fresh = staging / f"{_OWNER}.{os.getpid()}"
        fresh.write_text(json.dumps(found), encoding="utf-8")
        os.replace(fresh, staging / _OWNER)
        return False
    raise ValueError(
        f"another save to {directory} is under way, by process {found.get('pid', '?')} on {found.get('host', '?')}: wait for "
        f"it, or save to another directory (if there is none, remove {staging})"
    )


def _has_ended(owner: Mapping[str, object]) -> bool:
    """Return whether the process that an owner file names ran on this host, and has ended."""
    return owner.get("host") == socket.gethostname() and not _lives(owner.get("pid"))


def _lives(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _owner_of(staging: Path) -> dict[str, object]:
    """Read the owner file; {} if there is none."""
    try:
        told = json.loads((staging / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _finished(staging: Path) -> list[str]:
    """Return the names of contents in a staging folder that are whole, and could not be put into their place."""
    told = _owner_of(staging).get("finished")
    names = told if isinstance(told, list) else []
    return [name for name in names if isinstance(name, str) and Path(name).name == name and (staging / name).is_dir()]


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def left_over(directory: str | os.PathLike[str]) -> Path | None:
    """Return the staging folder of an unfinished save to this directory; None without one, or if the save is under way."""
    path = Path(os.path.realpath(directory))
    return _left_in(beside(path)) or _left_in(inside(path))


def _left_in(staging: Path) -> Path | None:
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
        if any(not entry.name.startswith(_OWNER) for entry in staging.iterdir()):
            return staging
    return None  # nothing is in it: a save begins or ends in this moment


def warn_of_leftover(source: object) -> None:
    """Say that a save to this directory was not finished."""
    left = left_over(source) if isinstance(source, (str, os.PathLike)) else None
    if left is not None:
        warnings.warn(f"{left_over_text(left)}; {source} is whole without it", stacklevel=2)


def left_over_text(staging: Path) -> str:
    """Say what is in the staging folder of an unfinished save."""
    finished = _finished(staging)
    if finished:
        return f"{staging / finished[0]} is a whole checkpoint that a save could not put into its place"
    return f"{staging} is left over of a save that was not finished"


# --- files that others have there ---


def _move_over(old: Path, new: Path, ours: Container[str], single: str) -> None:
    """Remove the old content, and move to the new one what others created meanwhile.

    ours: names that the save wrote.      single: of a file of weights if there is one.
    """
    for _ in range(_LOOKS):
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
            time.sleep(0.05)
    warnings.warn(
        f"files are still created in {old}, which was {new} before the save: it is kept, and the next save moves them",
        stacklevel=2,
    )


def _merge(entry: Path, place: Path) -> None:
    """Move a file, or the files of a directory, to where the new content has none, or an older one."""
    with suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a file now where a directory was
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
    """Link a file to a second place, or copy it where there are no links."""
    with suppress(FileNotFoundError):  # its owner removed it meanwhile
        try:
            os.link(source, place, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            mode = os.lstat(source).st_mode
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # a socket or a pipe of a running program stays where it is
                shutil.copy2(source, place, follow_symlinks=False)


__all__ = [
    "Extra",
    "Replacement",
    "beside",
    "exchange",
    "left_over",
    "left_over_text",
    "new_token",
    "resolved",
    "warn_of_leftover",
]
