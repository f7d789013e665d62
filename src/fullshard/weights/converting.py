"""`convert_weights()`: a checkpoint made of another one by one process, a buffer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.weights.boxes import Box
from fullshard.weights.commit import Extra, Replacement, new_token
from fullshard.weights.computing import Calculator
from fullshard.weights.headers import FileTensor, OpenFiles, read_checkpoint
from fullshard.weights.key_map import Computed, KeyMap, Mapped, Piece, map_keys
from fullshard.weights.layout import CheckpointLayout, lay_out
from fullshard.weights.reading import Read, Reader, place_in_file
from fullshard.weights.staging import batches
from fullshard.weights.writing import Write, Writer


@dataclass(frozen=True, slots=True)
class Converted:
    """The report of `convert_weights`.

    Args:
        bytes_read: of tensors; more than the files have where rows of a tensor become columns.
        bytes_written: of tensors.
        seconds: in all.
        files: names of the files with weights.

    Example:
        >>> convert_weights("Llama-3.1-8B", "half", dtype=torch.bfloat16).files               # doctest: +SKIP
        ('model.safetensors',)
    """

    bytes_read: int
    bytes_written: int
    seconds: float
    files: tuple[str, ...]


def convert_weights(
    source: Any,
    directory: str | os.PathLike[str],
    *,
    key_map: KeyMap = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    extra: Extra | None = None,
    threads: int = 8,
    buffer_bytes: int = 256 << 20,
) -> Converted:
    """Make a checkpoint of another one, without a model, in one process that holds no more than a buffer.

    It is written beside the directory and put in its place in one step, as `save_weights` does; `directory` may be the source.

    Args:
        source: as of `load_weights`: a directory, an index, a file, or a list of files.
        directory: of the new one.
        key_map: from names in the source to those in the new one; rules as of `load_weights`, with `Convert`.
        dtype: of floating-point tensors in the new one; None keeps theirs.
        max_shard_bytes: of the tensors in one file.
        extra: further files, as of `save_weights`.
        threads: that read and write at a time.
        buffer_bytes: of memory, and the inputs and the output of one `Convert` beside it.

    Returns:
        The report.

    Raises:
        ValueError: for files that are broken, rules that do not fit, or a disk without room; nothing was written then.
        RuntimeError: if writing fails; the directory is as it was.

    Example:
        >>> convert_weights("mine", "theirs", key_map=[Rename("^model[.]", "")])              # doctest: +SKIP
    """
    began = time.perf_counter()
    for name, value in (("max_shard_bytes", max_shard_bytes), ("threads", threads), ("buffer_bytes", buffer_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    replacement = Replacement(directory, new_token(directory))
    files = OpenFiles()
    reader = Reader(files, threads=threads)
    writer = Writer(replacement.path, threads=threads)
    try:
        headers = read_checkpoint(source, files)
        state = {tensor.name: Mapped.of(tensor) for header in headers for tensor in header.tensors}
        layout, outputs = _outputs(map_keys(key_map, state), dtype, max_shard_bytes)
        replacement.prepare(layout)
        with torch.no_grad():
            _Conversion(reader, writer, max(1, buffer_bytes // 4)).run(outputs)
        replacement.add(extra)
        writer.sync()
        replacement.commit()
    except BaseException as failure:
        replacement.discard()
        if isinstance(failure, OSError):
            raise RuntimeError(str(failure)) from failure
        raise
    finally:
        reader.close()
        files.close()
        writer.close()
    names = tuple(replacement.name_in_place(file.name) for file in layout.files)
    return Converted(reader.read, writer.written, time.perf_counter() - began, names)


def _outputs(
    mapped: dict[str, Mapped], dtype: torch.dtype | None, max_shard_bytes: int
) -> tuple[CheckpointLayout, list[tuple[FileTensor, Mapped]]]:
    """The files, and what each tensor in them is made of."""
    named = [
        (name, one.dtype if dtype is None or not one.dtype.is_floating_point else dtype, one.shape)
        for name, one in mapped.items()
    ]
    together = {name: one.together for name, one in mapped.items() if one.together is not None}
    layout = lay_out(
        named, max_shard_bytes=max_shard_bytes, parameters=sum(prod(shape) for _, _, shape in named), together=together
    )
    return layout, [(tensor, mapped[tensor.name]) for file in layout.files for tensor in file.tensors]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of an output: a box of it, whole rows."""

    output: FileTensor
    mapped: Mapped
    rows: Box

    @property
    def nbytes(self) -> int:
        return self.rows.numel * self.output.dtype.itemsize

    def pieces(self) -> Iterator[tuple[Piece, Box]]:
        """Their pieces, and the place of each in the output."""
        for piece in self.mapped.pieces:
            at = piece.at.meet(self.rows)
            if at is not None:
                yield piece, at


class _Conversion:
    """Reads, casts and writes, of each at most `limit` bytes at a time (but for a single row that has more)."""

    def __init__(self, reader: Reader, writer: Writer, limit: int) -> None:
        self._reader, self._writer, self._limit = reader, writer, limit
        self._calculator = Calculator(reader)

    def run(self, outputs: Sequence[tuple[FileTensor, Mapped]]) -> None:
        """Write all outputs."""
        parts = (part for output, mapped in outputs for part in self._parts(output, mapped))
        for batch in batches(parts, self._limit, lambda part: part.nbytes):
            self._writer.run(self._made(batch))

    def _parts(self, output: FileTensor, mapped: Mapped) -> Iterator[_Rows]:
        whole = Box.whole(output.shape)
        if not output.shape or output.nbytes <= self._limit:
            yield _Rows(output, mapped, whole)
            return
        step = max(1, output.shape[0] * self._limit // output.nbytes)
        for first in range(0, output.shape[0], step):
            yield _Rows(output, mapped, whole.rows(first, min(output.shape[0], first + step)))

    def _made(self, batch: Sequence[_Rows]) -> list[Write]:
        values = [torch.empty(part.rows.shape, dtype=part.output.dtype, device="cpu") for part in batch]
        straight: list[Read] = []
        others: list[tuple[Piece, Box, Tensor]] = []
        for part, value in zip(batch, values):
            for piece, at in part.pieces():
                into = value[at.relative_to(part.rows).slices()]
                read = _straight(piece, at, into)
                if read is None:
                    others.append((piece, at, into))
                else:
                    straight.append(read)
        self._reader.run(straight)
        for piece, at, into in others:
            self._fill(piece, at, into)
        return [
            Write(part.output.file, place_in_file(part.output, part.rows.start[0] if part.output.shape else 0), value)
            for part, value in zip(batch, values)
        ]

    def _fill(self, piece: Piece, at: Box, into: Tensor) -> None:
        """A part of an output, out of rows of its source."""
        box = piece.in_source(at)
        if isinstance(piece.source, Computed):
            into.copy_(piece.arranged(self._calculator.value(piece.source)[box.slices()]))
            return
        assert isinstance(piece.source, FileTensor)
        source = piece.source
        if not source.shape:
            into.copy_(piece.arranged(self._read(source, Box.whole(()))))
            return
        row = source.nbytes // source.shape[0]
        step = max(1, self._limit // row)
        for first in range(box.start[0], box.stop[0], step):
            band = box.rows(first, min(box.stop[0], first + step))
            rows = self._read(source, Box.whole(source.shape).rows(first, band.stop[0]))
            place = piece.from_source(band)
            found = None if place is None else place.meet(at)
            if found is not None:
                value = rows[piece.in_source(found).moved([-first] + [0] * (len(source.shape) - 1)).slices()]
                into[found.relative_to(at).slices()] = piece.arranged(value).to(into.dtype)

    def _read(self, source: FileTensor, rows: Box) -> Tensor:
        found = torch.empty(rows.shape, dtype=source.dtype, device="cpu")
        self._reader.run([Read(source.file, place_in_file(source, rows.start[0] if source.shape else 0), found)])
        return found


def _straight(piece: Piece, at: Box, into: Tensor) -> Read | None:
    """Rows that are in the file as they are in the output."""
    source = piece.source
    if not isinstance(source, FileTensor) or source.dtype != into.dtype or not piece.keeps_order or not into.is_contiguous():
        return None
    box = piece.in_source(at)
    if not source.shape:
        return Read(source.file, source.offset, into)
    if box.shape[1:] != source.shape[1:]:
        return None
    return Read(source.file, place_in_file(source, box.start[0]), into)


def files_beside(source: str | os.PathLike[str]) -> dict[str, Path]:
    """The files beside the weights of a directory, as a config and a tokenizer: none with weights in another format."""
    folder = Path(source)
    if not folder.is_dir():
        return {}
    others = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
    files = (entry for entry in sorted(folder.iterdir()) if entry.is_file() and entry.suffix not in others)
    return {entry.name: entry for entry in files if not entry.name.endswith(".index.json") and not entry.name.startswith(".")}


__all__ = ["Converted", "convert_weights", "files_beside"]
