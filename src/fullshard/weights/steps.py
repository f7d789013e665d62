"""A directory for each step of a training, and a link to the one that was saved last.

    run/
        step-900/
        step-1000/
        latest -> step-1000

A program that opens several files below `latest` while a save ends may get files of two steps: resolve the link once, and open
files below the directory of the step. It stays for as many saves as `keep` says.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from fullshard.weights.commit import resolved
from fullshard.weights.headers import LATEST

_STEP = re.compile(r"step-\d+")


class Steps:
    """The directory of a step, in one of all steps.

    Raises:
        ValueError: for a step or a number of steps to keep that is none.
    """

    def __init__(self, directory: str | os.PathLike[str], step: object, keep: object) -> None:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step must be an int of at least 0, got {step!r}")
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ValueError(f"keep must be an int of at least 1, or None for all steps, got {keep!r}")
        self._all, self._keep = resolved(directory), keep
        self.directory = self._all / f"step-{step}"

    def check(self) -> None:
        """Raises ValueError if something that is no link has the name of the link."""
        link = self._all / LATEST
        if os.path.lexists(link) and not link.is_symlink():
            raise ValueError(f"{link} is no link, and step= makes it one to the step that was saved last: move it away")

    def publish(self) -> None:
        """Have the link lead to this step, in one step, and remove the steps that are not kept."""
        fresh = self._all / f".{LATEST}.new"
        while True:
            with suppress(FileNotFoundError):  # of a save that was killed, or of one that comes first now
                os.unlink(fresh)
            with suppress(FileExistsError, FileNotFoundError):
                os.symlink(self.directory.name, fresh)
                os.rename(fresh, self._all / LATEST)
                break
        descriptor = os.open(self._all, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._prune()

    def _prune(self) -> None:
        found: list[tuple[int, Path]] = []
        for entry in self._all.iterdir():
            if entry.name.startswith(".step-") and entry.name.endswith(".removing"):  # by a save that was killed
                shutil.rmtree(entry, ignore_errors=True)
            elif _STEP.fullmatch(entry.name) and entry != self.directory:
                with suppress(FileNotFoundError):  # removed by another save
                    found.append((entry.stat().st_mtime_ns, entry))
        if self._keep is None:
            return
        # By time, not by number: a training that went back saves lower numbers, and its steps are the ones that are read.
        for _, entry in sorted(found, reverse=True)[self._keep - 1 :]:
            gone = self._all / f".{entry.name}.removing"
            with suppress(FileNotFoundError):
                os.rename(entry, gone)  # at once, so that no reader sees half of it
                shutil.rmtree(gone, ignore_errors=True)


__all__ = ["Steps"]
