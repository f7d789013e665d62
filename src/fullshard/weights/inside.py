"""A checkpoint moved file by file into a directory that cannot be exchanged, so that readers see the old or the new weights.

Files that several make up have names of their own in each save, and the index, which names them, is replaced in one step: until
then it names the old ones, and they are removed after it. One file is replaced in one step by itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path

from fullshard.weights.layout import index_of, is_weights

_NAMED = 8  # characters of the token in names of files


def stays(directory: Path) -> str | None:
    """Return why a directory cannot be replaced by another one, as a part of a sentence; None if it can."""
    if not directory.is_dir():
        return None
    if os.path.ismount(directory):
        return "is a mount point"
    with suppress(FileNotFoundError):  # the current directory was removed
        here = Path(os.path.realpath(os.getcwd()))
        if directory == here or directory in here.parents:
            return "is the current directory, or one above it"
    if not os.access(directory.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return "lies in a directory that cannot be written to"
    return None


def name_in_place(name: str, token: str, single: str) -> str:
    """Return the name that a file of weights gets: that of one of several is of this save alone."""
    if name in (single, index_of(single)):
        return name
    return name.replace(".", f"-{token[-_NAMED:]}.", 1)


def move_in(path: Path, directory: Path, aside: Path, token: str, single: str) -> None:
    """Move the files of a checkpoint, which are on the disk, into a directory. If that fails all files are where they were.

    Args:
        path: where they are.
        directory: where they go.
        aside: a directory of the same file system for what is needed until then, which the caller removes.
        token: of the save.
        single: name of the file of weights if there is one.

    Raises:
        OSError: of the call that failed.
    """
    back: list[Callable[[], object]] = []
    try:
        for entry in _further(path, single):
            back += _place(entry, directory / entry.relative_to(path), aside / entry.relative_to(path))
        names = {
            entry.name: name_in_place(entry.name, token, single) for entry in path.iterdir() if is_weights(entry.name, single)
        }
        first = path / single
        if index_of(single) in names:
            first = _index(path / index_of(single), aside, names)
        for name in sorted(names.keys() - {first.name}):
            os.rename(path / name, directory / names[name])
            back.append(_renaming(directory / names[name], path / name))
        sync(directory)
        back += _place(first, directory / first.name, aside / "before" / first.name)
        other = directory / (single if first.name != single else index_of(single))
        if os.path.lexists(other):  # of an older save; readers differ in which of both they begin with
            os.unlink(other)
    except BaseException:
        for undo in reversed(back):
            with suppress(OSError):
                undo()
        raise


def _further(path: Path, single: str) -> Iterator[Path]:
    """Files that are no weights, and links."""
    for entry in sorted(path.rglob("*")):
        is_file = entry.is_symlink() or entry.is_file()
        if is_file and not (entry.parent == path and is_weights(entry.name, single)):
            yield entry


def _place(entry: Path, target: Path, aside: Path) -> list[Callable[[], object]]:
    """Replace a file by another one. Returns what takes that back, in the order in which it was done."""
    target.parent.mkdir(parents=True, exist_ok=True)
    before = os.path.lexists(target)
    if before:
        aside.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(target, aside, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(target, aside, follow_symlinks=False)
    os.replace(entry, target)
    returned = _renaming(target, entry)
    return [_renaming(aside, target), returned] if before else [returned]


def _renaming(source: Path, target: Path) -> Callable[[], object]:
    return lambda: os.replace(source, target)


def _index(index: Path, aside: Path, names: dict[str, str]) -> Path:
    """Write an index that names the files as they are called in their place. Returns where it is."""
    told = json.loads(index.read_text(encoding="utf-8"))
    told["weight_map"] = {tensor: names[file] for tensor, file in told["weight_map"].items()}
    aside.mkdir(exist_ok=True)
    found = aside / index.name
    found.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(found)
    return found


def remove_old(directory: Path, names: Container[str], single: str) -> None:
    """Remove the weights that nothing names any more. names: of the new ones."""
    with suppress(OSError):  # the next save tries again
        for name in os.listdir(directory):
            if is_weights(name, single) and name not in names:
                os.unlink(directory / name)


def sync(path: Path) -> None:
    """Have a file or the entries of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["move_in", "name_in_place", "remove_old", "stays", "sync"]
