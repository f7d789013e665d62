"""Move a checkpoint file by file into a directory that cannot be exchanged for another one, such as a mount point.

Readers find either the old or the new weights. The files of a sharded checkpoint get names that are unique to each save, so
old and new files lie side by side until the index is replaced, atomically. Then the old files are removed. A single weights
file has no index; it is replaced atomically.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Container
from contextlib import ExitStack, suppress
from pathlib import Path

from fullshard.weights.layout import index_of, is_weights


def why_not_replaceable(directory: Path) -> str | None:
    """Return the reason why a directory cannot be exchanged, as the predicate of a sentence, or None if it can."""
    if not directory.is_dir():
        return None
    if os.path.ismount(directory):
        return "is a mount point"
    with suppress(FileNotFoundError):  # the current directory was removed
        here = Path(os.path.realpath(os.getcwd()))
        if directory == here or directory in here.parents:
            return "is the current directory or a parent of it"
    if not os.access(directory.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return "is in a directory without write permission"
    return None


def name_in_place(name: str, token: str, single: str) -> str:
    """Return the final name of a weights file. One of several files gets a name that is unique to this save."""
    if name in (single, index_of(single)):
        return name
    return name.replace(".", f"-{token[-8:]}.", 1)


def move_in(path: Path, directory: Path, backup: Path, token: str, single: str) -> None:
    """Move the files of a checkpoint, which must be synced to disk, into a directory. If it fails, undo all moves."""
    # Order: further files, weights files with new names (no index refers to them yet), and at last the index or the single
    # weights file. Its replacement is the commit.
    with ExitStack() as undo:
        for entry in sorted(path.rglob("*")):
            is_file = entry.is_symlink() or entry.is_file()
            if not is_file or (entry.parent == path and is_weights(entry.name, single)):
                continue
            _replace_file(entry, directory / entry.relative_to(path), backup / entry.relative_to(path), undo)
        names = {
            entry.name: name_in_place(entry.name, token, single) for entry in path.iterdir() if is_weights(entry.name, single)
        }
        last = path / single
        if index_of(single) in names:
            last = _write_index(path / index_of(single), backup, names)
        for name in sorted(names.keys() - {last.name}):
            os.rename(path / name, directory / names[name])
            undo.callback(_move_back, directory / names[name], path / name)
        sync(directory)  # the new names must be on disk before the index that refers to them
        _replace_file(last, directory / last.name, backup / "before" / last.name, undo)
        # An index beside a new single file is of an older save, and so is a single file beside a new index. Some readers prefer
        # the one, some the other, so the old one is removed.
        other = directory / (single if last.name != single else index_of(single))
        if os.path.lexists(other):
            os.unlink(other)
        undo.pop_all()


def _replace_file(entry: Path, target: Path, backup: Path, undo: ExitStack) -> None:
    """Move a file to `target`, and back up an existing file there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    existed = os.path.lexists(target)
    if existed:
        backup.parent.mkdir(parents=True, exist_ok=True)
        link(target, backup)
    os.replace(entry, target)
    if existed:
        undo.callback(_move_back, backup, target)
    undo.callback(_move_back, target, entry)


def _move_back(source: Path, target: Path) -> None:
    with suppress(OSError):
        os.replace(source, target)


def _write_index(index: Path, backup: Path, names: dict[str, str]) -> Path:
    """Write a copy of an index with the final names of the files, sync it to disk and return its path."""
    content = json.loads(index.read_text(encoding="utf-8"))
    content["weight_map"] = {tensor: names[file] for tensor, file in content["weight_map"].items()}
    backup.mkdir(exist_ok=True)
    written = backup / index.name
    written.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(written)
    return written


def remove_old(directory: Path, names: Container[str], single: str) -> None:
    """Remove the weights files of older saves."""
    with suppress(OSError):  # the next save tries again
        for name in os.listdir(directory):
            if is_weights(name, single) and name not in names:
                os.unlink(directory / name)


def link(source: str | Path, place: str | Path) -> None:
    """Create a hard link to a file, or copy it if the file system has no hard links."""
    with suppress(FileNotFoundError):  # another program removed the file
        try:
            os.link(source, place, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            mode = os.lstat(source).st_mode
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # a socket or pipe of a running program cannot be copied
                shutil.copy2(source, place, follow_symlinks=False)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
