"""Versions in files: a consumer follows the directory that `Publication.save` writes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from torch import Tensor

from fullshard.weights.changes import Changes, read_tensors
from fullshard.weights.headers import ATTEMPTS, LATEST, PAUSE, BadFile, OpenFiles, read_checkpoint, read_header


def follow(directory: str | os.PathLike[str], state: dict[str, Tensor], base: str = "") -> str:
    """Bring full tensors to the newest version of a directory: by changes, or from the latest checkpoint if none lead on.

    A version is read whole before `state` changes, and versions are never mixed: the files of a checkpoint are those of one
    directory, and changes name the version that they were made for.

    Args:
        directory: that `Publication.save` writes, with or without `since=`.
        state: contiguous tensors by published name, which are written; names that are missing are added, on the CPU.
        base: digest of the version in `state`; "" for none.

    Returns:
        The digest of the version in `state` now; `base` if there is no newer one.

    Raises:
        FileNotFoundError: if the directory has no checkpoint, and no changes for `base`.
        ValueError: if `state` has a tensor of another shape or dtype.

    Example:
        >>> state, digest = {}, ""
        >>> while serving:                                                                    # doctest: +SKIP
        ...     digest = follow("weights", state, digest)
    """
    folder = Path(directory)
    for _ in range(ATTEMPTS - 1):
        try:
            return _follow(folder, state, base)
        except (FileNotFoundError, BadFile):  # a save that keeps few checkpoints may have removed what is read here
            time.sleep(PAUSE)
    return _follow(folder, state, base)


def _follow(folder: Path, state: dict[str, Tensor], base: str) -> str:
    changes = _changes_in(folder)
    place, latest = folder / LATEST, base
    if place.exists() or base not in changes:
        place = place.resolve(strict=True)
        latest = json.loads((place / "publication.json").read_text())["digest"]
    if _end(changes, base) != _end(changes, latest):
        with OpenFiles() as files:
            values = read_tensors([one for header in read_checkpoint(place, files) for one in header.tensors], files)
        written = {**values, **state}
        base = Changes(base, latest, full=values).apply(written, base)
        state.update(written)
    while base in changes:
        base = Changes.load(changes[base][1]).apply(state, base)
    return base


def _changes_in(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return, by the digest of a version, that of the next one and the file of the changes between them."""
    found: dict[str, tuple[str, Path]] = {}
    # Several may begin at one version, as at the last checkpoint: the newest of them counts.
    for path in sorted(folder.glob("changes-*.safetensors"), key=lambda path: path.stat().st_mtime_ns):
        with OpenFiles() as files:
            told = read_header(os.fspath(path), files).metadata
        if {"base", "digest"} <= set(told):  # else it is a file of somebody else
            found[told["base"]] = told["digest"], path
    return found


def _end(changes: dict[str, tuple[str, Path]], digest: str) -> str:
    """Return the digest of the version to which changes lead on from another one."""
    while digest in changes:
        digest = changes[digest][0]
    return digest
