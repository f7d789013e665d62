"""One checkpoint directory per training step, and a link to the most recently saved one.

    run/
        step-900/
        step-1000/
        latest -> step-1000

A program that opens several files of one step resolves the link once. The next `keep - 1` saves keep its directory.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

from fullshard.errors import check_int
from fullshard.weights.commit import resolved
from fullshard.weights.headers import LATEST
from fullshard.weights.inside import sync

_STEP = re.compile(r"step-\d+")


class Steps:
    """The directory of one step, among those of all steps."""

    def __init__(self, directory: str | os.PathLike[str], step: object, keep: object) -> None:
        number = check_int("step", step, least=0)
        self._all = resolved(directory)
        self._keep = None if keep is None else check_int("keep", keep, otherwise=", or None for all steps")
        self.directory = self._all / f"step-{number}"  # directory of the step
        link = self._all / LATEST
        if os.path.lexists(link) and not link.is_symlink():
            raise ValueError(f"{link} is not a link, but step= needs this name for a link to the latest step. Move it away.")

    def publish(self) -> None:
        """Point the link to this step atomically, sync it to disk, and remove the steps that are not kept.

        Warn if these cannot be removed: the step is saved by then.
        """
        # Rename a new link over the old one, because a link cannot be changed in place. Another save may do the same at this
        # moment: if it creates or renames the new link first, try again.
        fresh = self._all / f".{LATEST}.new"
        while True:
            with suppress(FileNotFoundError):  # removes the link of a save that was killed
                os.unlink(fresh)
            with suppress(FileExistsError, FileNotFoundError):
                os.symlink(self.directory.name, fresh)
                os.rename(fresh, self._all / LATEST)
                break
        sync(self._all)
        try:
            self._prune()
        except OSError as failure:
            warnings.warn(
                f"'{self.directory}' is saved, but steps that keep={self._keep} does not keep could not be removed: {failure}. "
                "Remove them by hand.",
                stacklevel=2,
            )

    def _prune(self) -> None:
        found: list[Path] = []
        for entry in self._all.iterdir():
            if entry.name.startswith(".step-") and entry.name.endswith(".removing"):  # left by a save that was killed
                shutil.rmtree(entry, ignore_errors=True)
            elif _STEP.fullmatch(entry.name) and entry != self.directory and entry.is_dir():
                found.append(entry)
        if self._keep is None:
            return
        # Sort by time and not by number: training that resumes from an earlier step saves lower numbers, and needs these steps.
        for entry in sorted(found, key=_saved_at, reverse=True)[self._keep - 1 :]:
            gone = self._all / f".{entry.name}.removing"
            with suppress(FileNotFoundError):  # another save removed it
                os.rename(entry, gone)  # atomic, so that no reader finds a partly removed step
                shutil.rmtree(gone, ignore_errors=True)


def _saved_at(directory: Path) -> int:
    """Return when the weights in a directory were written, ns. Other files may have been added to it later."""
    try:
        weights = [entry.lstat().st_mtime_ns for entry in directory.iterdir() if entry.name.endswith(".safetensors")]
        return max(weights, default=directory.stat().st_mtime_ns)
    except OSError:  # another save removed it, or it belongs to somebody else
        return 0
