"""Files of safetensors: their headers, read with suspicion, and the files of a checkpoint.

A file is 8 bytes with the length of its header (little-endian), the header (JSON: of each tensor dtype, shape, and where in the
data it begins and ends), and the data of all tensors in row-major order, without gaps.

Source: https://github.com/huggingface/safetensors (format, and the checks of its reader).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from fullshard.weights.texts import printable

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
"""By the names of the format."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ATTEMPTS, PAUSE = 8, 0.1  # at a checkpoint that is replaced meanwhile, and seconds between two
MOST = 100_000_000  # bytes of a header, the limit of the format
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LATEST = "latest"  # a link to the directory of the step that was saved last


class BadFile(ValueError):
    """A file that is no checkpoint, or a broken one."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file. file: path.      offset: of its first byte in the file."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


class OpenFiles:
    """Files that are read, each opened once, in directories that are opened once.

    So all are of one checkpoint, also if another one takes its place meanwhile.
    """

    def __init__(self) -> None:
        self._directories: dict[str, int] = {}
        self._changed: dict[str, int] = {}  # when files were last made or removed in each, as it was opened
        self._files: dict[str, int] = {}
        self._times: dict[str, int] = {}  # of the last write to each, as it was opened

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close them."""
        for descriptor in (*self._files.values(), *self._directories.values()):
            os.close(descriptor)
        self._files.clear()
        self._times.clear()
        self._directories.clear()
        self._changed.clear()

    def directory(self, path: str | Path) -> int:
        """The descriptor of a directory.

        Raises:
            OSError: if it cannot be opened.
        """
        folder = str(path) or "."
        if folder not in self._directories:
            self._directories[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._changed[folder] = os.fstat(self._directories[folder]).st_mtime_ns
        return self._directories[folder]

    def file(self, path: str | Path) -> int:
        """The descriptor of a file.

        Raises:
            BadFile: if it cannot be opened, or is none (a directory, a pipe).
        """
        name = str(path)
        if name not in self._files:
            folder, last = os.path.split(name)
            try:
                found = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.directory(folder))
            except OSError as failure:
                raise BadFile(f"{name}: {failure.strerror}") from failure
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode):
                os.close(found)
                raise BadFile(f"{name} is no regular file")
            self._files[name], self._times[name] = found, status.st_mtime_ns
        return self._files[name]

    def were_replaced(self) -> bool:
        """Return whether another directory or file is at the path of one that is open: files may be removed."""
        for path, descriptor in (*self._directories.items(), *self._files.items()):
            try:
                now = os.stat(path)
            except OSError:
                return True
            then = os.fstat(descriptor)
            if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
                return True
        return False

    def may_have_changed(self) -> bool:
        """Return whether files were made or removed since a directory was opened, or another one is at its path."""
        changed = any(os.fstat(found).st_mtime_ns != self._changed[path] for path, found in self._directories.items())
        return changed or self.were_replaced()

    def check_unchanged(self) -> None:
        """Check that no file was written to since it was opened. Raises BadFile naming it."""
        for name, descriptor in self._files.items():
            if os.fstat(descriptor).st_mtime_ns != self._times[name]:
                raise BadFile(f"{name} was written to while it was read, so its values may be of two checkpoints: load again")


SAMPLES, SAMPLE = 64, 4096  # of a file, and bytes of each


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """By what a rank knows that it opened the file of which the first rank read the header, or a copy of it.

    nbytes: of the file.      digest: of the header, in hexadecimal.
    """

    nbytes: int
    modified_ns: int
    inode: int
    header_nbytes: int
    digest: str

    def is_same(self, descriptor: int) -> bool:
        """Whether it is this file, at this time."""
        status = os.fstat(descriptor)
        return (status.st_size, status.st_mtime_ns, status.st_ino) == (self.nbytes, self.modified_ns, self.inode)

    def difference(self, descriptor: int, sampled: str) -> str | None:
        """How the file behind a descriptor differs; None if it is a copy. Its header is read for that, and samples of its data.

        sampled: the digest of samples of the first rank's file.
        """
        size = os.fstat(descriptor).st_size
        if size != self.nbytes:
            return f"{size:,} bytes on one rank, {self.nbytes:,} on the first"
        if _digest(os.pread(descriptor, self.header_nbytes, 0)) != self.digest:
            return "other tensors, or the same in another order, on one rank than on the first"
        return (
            None if samples(descriptor) == sampled else "other values on one rank than on the first, as a copy of another step"
        )


def samples(descriptor: int) -> str:
    """A digest of parts of a file, in hexadecimal: blocks at equal distances, and its end."""
    size, found = os.fstat(descriptor).st_size, hashlib.sha256()
    last = max(0, size - SAMPLE)
    for number in range(SAMPLES):
        found.update(os.pread(descriptor, SAMPLE, last * number // (SAMPLES - 1)))
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Header:
    """The description that a file gives of itself.

    nbytes: of the header with its length.      tensors: in the order of their data.
    """

    file: str
    nbytes: int
    file_nbytes: int
    tensors: tuple[FileTensor, ...]
    metadata: Mapping[str, str]
    identity: FileIdentity | None = None


def read_header(file: str | Path, files: OpenFiles | None = None) -> Header:
    """Read and check the header of a file; its data is not read. files: where it stays open.

    Raises:
        BadFile: naming the file, and the tensor, for anything that the format does not allow.
    """
    if files is None:
        with OpenFiles() as files:
            return read_header(file, files)
    path = str(file)
    descriptor = files.file(path)
    try:
        status = os.fstat(descriptor)
        size = status.st_size
        begin = _read(descriptor, 8, 0, path, size)
        length = int.from_bytes(begin, "little")
        if length > MOST:
            raise BadFile(
                f"{path}: its header would have {length:,} bytes, and may have {MOST:,}: this is no file of safetensors"
            )
        text = _read(descriptor, length, 8, path, size)
    except OSError as failure:
        raise BadFile(f"{path}: {failure.strerror}") from failure
    identity = FileIdentity(size, status.st_mtime_ns, status.st_ino, 8 + length, _digest(begin + text))
    return replace(parse_header(path, text, size), identity=identity)


def _digest(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()


def _read(descriptor: int, nbytes: int, offset: int, path: str, size: int) -> bytes:
    if offset + nbytes > size:
        raise BadFile(
            f"{path}: truncated: it has {size:,} bytes, and its header alone ends at {offset + nbytes:,}, "
            f"{offset + nbytes - size:,} bytes further"
        )
    found = bytearray()
    while len(found) < nbytes:
        part = os.pread(descriptor, nbytes - len(found), offset + len(found))
        if not part:
            raise BadFile(f"{path}: truncated while it was read, at byte {offset + len(found):,}")
        found += part
    return bytes(found)


def parse_header(path: str, text: bytes, size: int) -> Header:
    """The header of a file of `size` bytes.

    Raises:
        BadFile: as `read_header`.
    """
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _once(path, pairs))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as failure:
        raise BadFile(f"{path}: its header is no JSON ({failure})") from failure
    if not isinstance(entries, dict):
        raise BadFile(f"{path}: its header is no JSON object, but a {type(entries).__name__}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadFile(f"{path}: __metadata__ in its header is no mapping of texts")
    begin = 8 + len(text)
    tensors = sorted((_tensor(path, name, told, begin) for name, told in entries.items()), key=lambda t: (t.offset, t.nbytes))
    at = begin
    for tensor in tensors:
        if tensor.offset != at:
            what = "overlaps the one before it" if tensor.offset < at else "leaves a gap before it"
            raise BadFile(f"{path}: tensor '{tensor.name}' {what}: it begins at byte {tensor.offset:,}, expected {at:,}")
        at += tensor.nbytes
    if at > size:
        last = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > size)
        raise BadFile(
            f"{path}: truncated by {at - size:,} bytes: it has {size:,}, and its tensors end at {at:,} "
            f"('{last.name}' is the first that is not whole)"
        )
    if at < size:
        raise BadFile(f"{path}: {size - at:,} bytes behind its last tensor belong to none")
    return Header(path, begin, size, tuple(tensors), metadata)


def _once(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadFile(f"{path}: its header has '{twice}' twice")
    return found


def _tensor(path: str, name: str, told: Any, begin: int) -> FileTensor:
    where = f"{path}: tensor '{name}'"
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{where} is not described by dtype, shape and data_offsets")
    if not isinstance(told["dtype"], str) or told["dtype"] not in DTYPES:
        raise BadFile(f"{where} has the dtype {told['dtype']!r}, which is not known: {', '.join(DTYPES)}")
    dtype = DTYPES[told["dtype"]]
    shape, offsets = told["shape"], told["data_offsets"]
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise BadFile(f"{where} has the shape {str(shape)[:80]}, which is none")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise BadFile(f"{where} has the data_offsets {str(offsets)[:80]}, which are no beginning and end")
    if offsets[1] - offsets[0] != prod(shape) * dtype.itemsize:
        raise BadFile(
            f"{where} of shape {tuple(shape)} and dtype {told['dtype']} needs {prod(shape) * dtype.itemsize:,} bytes, "
            f"its data_offsets give {offsets[1] - offsets[0]:,}"
        )
    return FileTensor(name, path, dtype, tuple(shape), begin + offsets[0])


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with these tensors (name, dtype, shape), in this order, with its length, padded to 8 bytes."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- the files of a checkpoint ---


def read_checkpoint(source: Any, files: OpenFiles | None = None) -> list[Header]:
    """The headers of all files of a checkpoint.

    Args:
        source: a directory, an index, a file, or several files.
        files: where they stay open.

    Raises:
        BadFile: for what is none, or if two files have the same tensor, or the index names what is not there.
    """
    if source == "":
        raise BadFile("source is '', expected the path of a directory or file")
    if files is None:
        with OpenFiles() as files:
            return read_checkpoint(source, files)
    for attempt in range(ATTEMPTS):
        try:
            paths, index = files_of(source, files)
            headers = [read_header(path, files) for path in paths]
            break
        except BadFile:
            if attempt == ATTEMPTS - 1 or not files.may_have_changed():
                raise
            files.close()  # a save put another checkpoint into its place, and removes this one
            time.sleep(PAUSE)
    where: dict[str, str] = {}
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name in where:
            raise BadFile(f"tensor '{tensor.name}' is in {where[tensor.name]} and in {tensor.file}")
        where[tensor.name] = tensor.file
    for name, file in (index or {}).items():
        if where.get(name) != file:
            raise BadFile(f"the index says that '{name}' is in {file}, which does not have it")
    return headers


def files_of(source: Any, files: OpenFiles | None = None) -> tuple[list[str], dict[str, str] | None]:
    """The files of a checkpoint, and which tensors are where by an index, None if there is none.

    Raises:
        BadFile: for what is none.
    """
    if files is None:
        with OpenFiles() as files:
            return files_of(source, files)
    if isinstance(source, (list, tuple)):
        if not source:
            raise BadFile("the list of files to load is empty")
        return [str(file) for file in source], None
    if not isinstance(source, (str, os.PathLike)):
        raise BadFile(f"source must be a directory, an index, a file or a list of files, got a {type(source).__name__}")
    path = Path(source)
    if not path.is_dir():
        return _of_index(path, files) if path.name.endswith(".json") else ([str(path)], None)
    try:
        there = sorted(os.listdir(files.directory(path)))
    except OSError as failure:
        raise BadFile(f"{path}: {failure.strerror}") from failure
    if INDEX in there:
        return _of_index(path / INDEX, files)
    if SINGLE in there:
        return [str(path / SINGLE)], None
    found = [str(path / name) for name in there if name.endswith(".safetensors")]
    if not found:
        steps = f"; {path / LATEST} leads to the latest step" if LATEST in there else ""
        raise BadFile(f"{path} has no *.safetensors: it has {', '.join(there[:8]) or 'nothing'}{steps}")
    return found, None


def read_index(path: Path, files: OpenFiles) -> Any:
    """The content of an index.

    Raises:
        BadFile: if it cannot be read.
        ValueError: if it is no JSON.
    """
    descriptor = files.file(path)
    return json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8"))


def _of_index(path: Path, files: OpenFiles) -> tuple[list[str], dict[str, str]]:
    try:
        told = read_index(path, files)
        names = dict(told["weight_map"])
    except BadFile:
        raise
    except OSError as failure:
        raise BadFile(f"{path}: {failure.strerror}") from failure
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise BadFile(f"{path} is no index: it needs a weight_map of tensors to files ({failure})") from failure
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise BadFile(f"{path}: '{name}' is said to be in {file!r}, which is no file beside the index")
    where = {name: str(path.parent / file) for name, file in names.items()}
    return sorted(set(where.values())), where


__all__ = [
    "ATTEMPTS",
    "DTYPES",
    "INDEX",
    "LATEST",
    "NAMES",
    "PAUSE",
    "SINGLE",
    "BadFile",
    "FileIdentity",
    "FileTensor",
    "Header",
    "OpenFiles",
    "files_of",
    "header_bytes",
    "parse_header",
    "read_checkpoint",
    "read_header",
    "read_index",
    "samples",
]
