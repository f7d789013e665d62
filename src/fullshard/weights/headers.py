"""Read safetensors headers, with every field checked, and find the files of a checkpoint.

A file has 8 bytes with the length of the header (little-endian), the header, and the data of all tensors in row-major order,
without gaps. The header is JSON: it maps the name of each tensor to its dtype, its shape, and the begin and end of its bytes
within the data.

Source: https://github.com/huggingface/safetensors (format, and the checks of its reader).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import printable
from fullshard.weights.boxes import TensorInfo

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Dtypes by their names in the format, in the order of safetensors' serializer: by alignment. Files have the reverse order."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of dtypes in the format."""

ATTEMPTS = 8  # to read a checkpoint that a save may replace at the same time
PAUSE = 0.1  # seconds between two attempts
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LATEST = "latest"  # name of the link to the directory of the most recently saved step


class BadFile(ValueError):
    """Error for a broken file, or for a path that is not a checkpoint."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@dataclass(frozen=True, slots=True)
class FileTensor(TensorInfo):
    """Location of a tensor in a file."""

    file: str  # path
    offset: int  # of the first byte of the data, from the begin of the file

    def offset_of(self, start: Sequence[int]) -> int:
        """Return the offset in the file at which the row of the element `start` begins."""
        return self.offset + (self.nbytes // self.shape[0] * start[0] if start and self.shape[0] else 0)


class OpenFiles(AbstractContextManager["OpenFiles"]):
    """Open files and directories of a checkpoint, by path.

    Each directory is opened once, and files are opened relative to its descriptor. So all files belong to one checkpoint, even
    if a save replaces the directory at the same time.
    """

    def __init__(self) -> None:
        # (descriptor, modification time when it was opened, in ns) by path
        self._directories: dict[str, tuple[int, int]] = {}
        self._files: dict[str, tuple[int, int]] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def same_bytes(self, first: FileTensor, second: FileTensor) -> bool:
        """Return True if two tensors of equal shape and dtype have the same bytes. Reads both, 8 MiB at a time."""
        for start in range(0, first.nbytes, _COMPARED):
            count = min(_COMPARED, first.nbytes - start)
            parts = [_read(self.file(one.file), count, one.offset + start, one.file) for one in (first, second)]
            if parts[0] != parts[1]:
                return False
        return True

    def close(self) -> None:
        """Close all files and directories."""
        for descriptor, _ in (*self._files.values(), *self._directories.values()):
            os.close(descriptor)
        self._files.clear()
        self._directories.clear()

    def directory(self, path: str | Path) -> int:
        """Return the descriptor of a directory, opening it at the first call."""
        folder = str(path) or "."
        if folder not in self._directories:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._directories[folder] = descriptor, os.fstat(descriptor).st_mtime_ns
        return self._directories[folder][0]

    def file(self, path: str | Path) -> int:
        """Return the descriptor of a file, opening it at the first call."""
        name = str(path)
        if name not in self._files:
            folder, last = os.path.split(name)
            try:
                # O_NONBLOCK, because opening a pipe would wait for a writer before the check below rejects it.
                descriptor = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.directory(folder))
            except OSError as failure:
                raise BadFile(f"{name}: {failure.strerror}") from failure
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(descriptor)
                raise BadFile(f"{name} is not a regular file.")
            self._files[name] = descriptor, status.st_mtime_ns
        return self._files[name][0]

    def may_have_changed(self) -> bool:
        """Return True if files were created or removed in an open directory, or if one of these was replaced or removed."""
        if any(os.fstat(descriptor).st_mtime_ns != then for descriptor, then in self._directories.values()):
            return True
        for path, (descriptor, _) in (*self._directories.items(), *self._files.items()):
            try:
                if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return True
            except OSError:
                return True
        return False

    def check_unchanged(self) -> None:
        """Raise BadFile if a file was modified since it was opened."""
        for name, (descriptor, then) in self._files.items():
            if os.fstat(descriptor).st_mtime_ns != then:
                raise BadFile(
                    f"{name} was modified while it was read, so its values may come from two checkpoints. Load again."
                )


_SAMPLE_BLOCKS = 64  # number of blocks of a file in its digest
_SAMPLE_BYTES = 4096  # of a block
_COMPARED = 8 << 20  # bytes of each tensor that `OpenFiles.same_bytes` has in memory


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identity of a checkpoint file, to verify that all ranks have opened the same file or copies of it."""

    nbytes: int  # of the file
    modified_ns: int  # modification time
    inode: int
    header_nbytes: int
    digest: str  # of the header, hexadecimal

    def is_same(self, descriptor: int) -> bool:
        """Return True if the open file is this one and was not modified since."""
        status = os.fstat(descriptor)
        return (status.st_size, status.st_mtime_ns, status.st_ino) == (self.nbytes, self.modified_ns, self.inode)

    def difference(self, descriptor: int, sampled: str) -> str | None:
        """Return how an open file differs from this one, or None if it is a copy. Only the header and samples are compared."""
        size = os.fstat(descriptor).st_size
        if size != self.nbytes:
            return f"{size:,} bytes on one rank, {self.nbytes:,} on the first rank"
        if hashlib.sha256(os.pread(descriptor, self.header_nbytes, 0)).hexdigest() != self.digest:
            return "different tensors or a different tensor order on one rank than on the first rank"
        if samples(descriptor) != sampled:
            return "different values on one rank than on the first rank, such as a copy of another step"
        return None


def samples(descriptor: int) -> str:
    """Return a hexadecimal digest of blocks of a file at equal distances, the last one at its end."""
    digest = hashlib.sha256()
    last = max(0, os.fstat(descriptor).st_size - _SAMPLE_BYTES)
    for number in range(_SAMPLE_BLOCKS):
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, last * number // (_SAMPLE_BLOCKS - 1)))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file."""

    file: str  # path
    tensors: tuple[FileTensor, ...]  # in the order of their data
    metadata: Mapping[str, str]
    identity: FileIdentity


def read_header(path: str, files: OpenFiles) -> Header:
    """Read and check the header of a file, without its data."""
    descriptor = files.file(path)
    status = os.fstat(descriptor)
    begin = _read(descriptor, 8, 0, path)
    length = int.from_bytes(begin, "little")
    if length > MAX_HEADER_BYTES:
        # Checked before the bytes are read: a file of another format would request a huge amount of memory.
        raise BadFile(
            f"{path}: expected a header of at most {MAX_HEADER_BYTES:,} bytes, got {length:,}. This is not a safetensors file."
        )
    text = _read(descriptor, length, 8, path)
    digest = hashlib.sha256(begin + text).hexdigest()
    identity = FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino, 8 + length, digest)
    return Header(path, *parse_header(path, text, status.st_size), identity)


def _read(descriptor: int, nbytes: int, offset: int, path: str | Path) -> bytes:
    size = os.fstat(descriptor).st_size
    if offset + nbytes > size:
        raise BadFile(
            f"{path}: truncated: it has {size:,} bytes, but its header ends at byte {offset + nbytes:,}, "
            f"{offset + nbytes - size:,} bytes later."
        )
    found = bytearray()
    while len(found) < nbytes:
        try:
            part = os.pread(descriptor, nbytes - len(found), offset + len(found))
        except OSError as failure:
            raise BadFile(f"{path}: {failure.strerror}") from failure
        if not part:
            raise BadFile(f"{path}: truncated while it was read, at byte {offset + len(found):,}.")
        found += part
    return bytes(found)


def parse_header(path: str, text: bytes, size: int) -> tuple[tuple[FileTensor, ...], dict[str, str]]:
    """Parse and check the header of a file of `size` bytes. Return the tensors in the order of their data, and the metadata."""
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique_keys(path, pairs))
    except BadFile:
        raise
    except (ValueError, RecursionError) as failure:  # ValueError: no UTF-8, no JSON, or a number with too many digits
        raise BadFile(f"{path}: its header is not valid JSON ({failure}).") from failure
    if not isinstance(entries, dict):
        raise BadFile(f"{path}: expected its header to be a JSON object, got a {type(entries).__name__}.")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadFile(f"{path}: expected __metadata__ in its header to map strings to strings.")
    begin = 8 + len(text)
    tensors = sorted((_tensor(path, name, entry, begin) for name, entry in entries.items()), key=lambda t: (t.offset, t.nbytes))
    at = begin
    for tensor in tensors:
        if tensor.offset != at:
            what = "overlaps the previous tensor" if tensor.offset < at else "leaves a gap after the previous tensor"
            raise BadFile(f"{path}: tensor '{tensor.name}' {what}: expected it to begin at byte {at:,}, got {tensor.offset:,}.")
        at += tensor.nbytes
    if at > size:
        last = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > size)
        raise BadFile(
            f"{path}: truncated by {at - size:,} bytes: it has {size:,} bytes, but its tensors end at byte {at:,} "
            f"('{last.name}' is the first incomplete tensor)."
        )
    if at < size:
        raise BadFile(f"{path}: {size - at:,} bytes after its last tensor belong to no tensor.")
    return tuple(tensors), metadata


def _unique_keys(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise BadFile(f"{path}: its header has '{twice}' twice.")
    return found


def _tensor(path: str, name: str, entry: Any, begin: int) -> FileTensor:
    where = f"{path}: tensor '{name}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{where} must have exactly the keys dtype, shape and data_offsets.")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise BadFile(f"{where} has the unknown dtype {entry['dtype']!r}. Known dtypes are {', '.join(DTYPES)}.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise BadFile(f"{where} has an invalid shape: {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise BadFile(f"{where} has invalid data_offsets: {str(offsets)[:80]}. Expected the begin and the end of its data.")
    found = FileTensor(name, DTYPES[entry["dtype"]], tuple(shape), path, begin + offsets[0])
    if offsets[1] - offsets[0] != found.nbytes:
        raise BadFile(
            f"{where} of shape {found.shape} and dtype {entry['dtype']} needs {found.nbytes:,} bytes, "
            f"but its data_offsets span {offsets[1] - offsets[0]:,}."
        )
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def header_bytes(tensors: Sequence[TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file, including its 8 length bytes, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for one in tensors:
        if one.name == "__metadata__":
            raise ValueError(
                "A tensor cannot have the name '__metadata__': the file format reserves it. Rename it by key_map=."
            )
        if one.dtype not in NAMES:
            raise ValueError(
                f"Tensor '{one.name}' of {one.dtype} cannot be saved: the file format does not have this dtype. Cast it, or "
                "leave it out by key_map=[Drop(...)]."
            )
        entries[one.name] = {"dtype": NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- the files of a checkpoint ---


def read_checkpoint(source: Any, files: OpenFiles | None = None) -> list[Header]:
    """Read the headers of all files of a checkpoint."""
    if source == "":
        raise BadFile("source must be the path of a directory or file, got ''.")
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
            files.close()  # a save has replaced the checkpoint and is removing the old files
            time.sleep(PAUSE)
    for fault in conflicts(headers, index):
        raise BadFile(fault)
    return headers


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a checkpoint in several files."""

    file_of: Mapping[str, str]  # path, by name of the tensor
    total_size: object  # bytes of all tensors, as some programs write it; None if it has none


def conflicts(headers: Sequence[Header], index: Index | None) -> Iterator[str]:
    """Yield what is wrong between the files of a checkpoint, and between them and the index."""
    file_of: dict[str, str] = {}  # by name of the tensor
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name in file_of:
            yield f"Tensor '{tensor.name}' is in {file_of[tensor.name]} and in {tensor.file}. Expected it in one file."
        file_of[tensor.name] = tensor.file
    for name, file in () if index is None else index.file_of.items():
        if file_of.get(name) != file:
            yield f"The index maps '{name}' to {file}, which does not contain it."


def files_of(source: Any, files: OpenFiles) -> tuple[list[str], Index | None]:
    """Return the files of a checkpoint, and its index if it has one."""
    if isinstance(source, (list, tuple)):
        if not source:
            raise BadFile("The list of files to load is empty.")
        return [str(file) for file in source], None
    if not isinstance(source, (str, os.PathLike)):
        raise BadFile(f"source must be a directory, an index, a file or a list of files, got a {type(source).__name__}.")
    path = Path(source)
    if not path.is_dir():
        return _files_of_index(path, files) if path.name.endswith(".json") else ([str(path)], None)
    try:
        names = sorted(os.listdir(files.directory(path)))
    except OSError as failure:
        raise BadFile(f"{path}: {failure.strerror}") from failure
    if INDEX in names:
        return _files_of_index(path / INDEX, files)
    if SINGLE in names:
        return [str(path / SINGLE)], None
    paths = [str(path / name) for name in names if name.endswith(".safetensors")]
    if not paths:
        steps = f" Load {path / LATEST}, the link to the latest step." if LATEST in names else ""
        raise BadFile(f"{path} has no *.safetensors files: it contains {', '.join(names[:8]) or 'nothing'}.{steps}")
    return paths, None


def _files_of_index(path: Path, files: OpenFiles) -> tuple[list[str], Index]:
    try:
        descriptor = files.file(path)
        entry = json.loads(_read(descriptor, os.fstat(descriptor).st_size, 0, path).decode("utf-8"))
        names = dict(entry["weight_map"])
    except BadFile:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise BadFile(f"{path} is not an index: expected a weight_map from tensors to files ({failure}).") from failure
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise BadFile(f"{path} maps '{name}' to {file!r}. Expected the name of a file next to the index.")
    file_of = {name: str(path.parent / file) for name, file in names.items()}
    metadata = entry.get("metadata")
    return sorted(set(file_of.values())), Index(file_of, metadata.get("total_size") if isinstance(metadata, dict) else None)
