"""`convert_weights()`: make a checkpoint from another one in one process; and the functions of `Convert` rules."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.errors import check_float_dtype, check_int
from fullshard.weights.boxes import Box
from fullshard.weights.commit import Extra, Replacement, new_token
from fullshard.weights.headers import FileTensor, OpenFiles, read_checkpoint
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, SourcePiece, map_keys
from fullshard.weights.layout import lay_out_mapped
from fullshard.weights.rounds import batches
from fullshard.weights.transfer import Reader, Transfer, Writer


class Calculator:
    """Runs the functions of `Convert` rules on one rank."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._last: tuple[ComputedTensor, Tensor] | None = None
        self.bytes_used = 0  # bytes of file data that the functions have used so far

    def value(self, source: ComputedTensor) -> Tensor:
        """Return the result of a function. It is cached until another tensor is computed."""
        if self._last is None or self._last[0] is not source:
            self._last = None  # free the last result before the next inputs are read
            inputs = [self._read_whole(mapped) for mapped in source.inputs]
            try:
                value = source.function(*inputs)
            except Exception as failure:
                raise ValueError(f"Convert: the function for '{source.name}' fails: {failure}") from failure
            if tuple(value.shape) != source.shape or value.dtype != source.dtype:
                raise ValueError(
                    f"Convert: expected the function for '{source.name}' to return {source.shape} of {source.dtype}, as on "
                    f"meta, got {tuple(value.shape)} of {value.dtype}."
                )
            self._last = source, value
        return self._last[1]

    def _read_whole(self, mapped: MappedTensor) -> Tensor:
        """Read a whole tensor from the files."""
        found = torch.empty(mapped.shape, dtype=mapped.dtype, device="cpu")
        for piece in mapped.pieces:
            box = piece.source_box(piece.at)
            if isinstance(piece.source, ComputedTensor):
                value = self.value(piece.source)
            else:
                assert isinstance(piece.source, FileTensor)
                value = torch.empty(piece.source.shape, dtype=piece.source.dtype, device="cpu")
                self._reader.run([Transfer(piece.source.file, piece.source.offset, value)])
                self.bytes_used += box.numel * value.itemsize
            found[piece.at.slices()] = piece.view_as_mapped(value[box.slices()])
        return found


@dataclass(frozen=True, slots=True)
class Converted:
    """The report of `convert_weights`.

    Args:
        bytes_read: bytes of tensor data read; more than the data in the files where a dim other than the first is mapped to
            rows of the output, so that rows are read more than once.
        bytes_written: bytes of tensor data written.
        seconds: total time.
        files: names of the weights files.

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
    """Make a checkpoint from another one, without a model, in one process that needs little more memory than a buffer.

    The new checkpoint is written to a staging directory and replaces `directory` atomically, as in `save_weights`.
    `directory` may be the source.

    Args:
        source: as in `load_weights`: a directory, an index, a file, or a list of files.
        directory: the directory of the new checkpoint.
        key_map: from names in the source to names in the new checkpoint, as in `load_weights`. `Convert` is supported.
        dtype: dtype of floating-point tensors in the new checkpoint; None keeps the dtype of the source.
        max_shard_bytes: maximum bytes of tensors in one file.
        extra: further files, as in `save_weights`.
        threads: number of threads that read, and number of threads that write.
        buffer_bytes: bytes of memory to use, in addition to the inputs and the output of one `Convert`.

    Returns:
        The report.

    Raises:
        ValueError: if a file is broken, rules do not fit, or the disk has too little space; nothing was written then.
        RuntimeError: if writing fails; the directory is unchanged.

    Example:
        >>> convert_weights("mine", "theirs", key_map=[Rename("^model[.]", "")])              # doctest: +SKIP
    """
    began = time.perf_counter()
    for name, value in (("max_shard_bytes", max_shard_bytes), ("threads", threads), ("buffer_bytes", buffer_bytes)):
        check_int(name, value)
    check_float_dtype("dtype", dtype, optional=True)
    replacement = Replacement(directory, new_token(directory))
    files = OpenFiles()
    reader = Reader(files, threads=threads)
    writer = Writer(replacement.path, threads=threads)
    try:
        headers = read_checkpoint(source, files)
        state = {tensor.name: MappedTensor.of(tensor) for header in headers for tensor in header.tensors}
        layout, outputs = lay_out_mapped(map_keys(key_map, state), dtype, max_shard_bytes=max_shard_bytes)
        replacement.prepare(layout)
        with torch.no_grad():
            _Converter(reader, writer, max(1, buffer_bytes // 4)).run(outputs)
        replacement.add(extra)
        writer.sync()  # before the exchange: after a crash, the directory must not have files without data
        replacement.commit()
    except BaseException as failure:  # also after Ctrl-C, so that no staging directory is left over
        replacement.discard()
        if isinstance(failure, OSError):
            raise RuntimeError(str(failure)) from failure
        raise
    finally:
        reader.close()
        files.close()
        writer.close()
    names = tuple(replacement.name_in_place(file.name) for file in layout.files)
    return Converted(reader.done, writer.done, time.perf_counter() - began, names)


@dataclass(frozen=True, slots=True)
class _OutputRows:
    """A range of rows of an output tensor."""

    output: FileTensor
    mapped: MappedTensor
    rows: Box  # whole rows

    @property
    def nbytes(self) -> int:
        return self.rows.numel * self.output.dtype.itemsize

    def pieces(self) -> Iterator[tuple[SourcePiece, Box]]:
        """Yield (piece, box of the output that the piece fills) for the pieces that overlap these rows."""
        for piece in self.mapped.pieces:
            at = piece.at.intersect(self.rows)
            if at is not None:
                yield piece, at


class _Converter:
    """Reads, casts and writes tensors, at most `limit` bytes at a time; a single larger row is processed on its own."""

    def __init__(self, reader: Reader, writer: Writer, limit: int) -> None:
        self._reader, self._writer, self._limit = reader, writer, limit
        self._calculator = Calculator(reader)

    def run(self, outputs: Sequence[tuple[FileTensor, MappedTensor]]) -> None:
        """Write all outputs."""
        parts = (
            _OutputRows(output, mapped, rows)
            for output, mapped in outputs
            for rows in Box.whole(output.shape).split_rows(output.nbytes, self._limit)
        )
        for batch in batches(parts, self._limit, lambda part: part.nbytes):
            self._writer.run(self._assembled(batch))

    def _assembled(self, batch: Sequence[_OutputRows]) -> list[Transfer]:
        """Read and cast the data of a batch, and return the writes."""
        values = [torch.empty(part.rows.shape, dtype=part.output.dtype, device="cpu") for part in batch]
        direct: list[Transfer] = []
        others: list[tuple[SourcePiece, Box, Tensor]] = []
        for part, value in zip(batch, values):
            for piece, at in part.pieces():
                into = value[at.relative_to(part.rows).slices()]
                read = _direct_read(piece, at, into)
                if read is None:
                    others.append((piece, at, into))
                else:
                    direct.append(read)
        self._reader.run(direct)
        for piece, at, into in others:
            self._fill(piece, at, into)
        return [Transfer(part.output.file, part.output.offset_of(part.rows.start), value) for part, value in zip(batch, values)]

    def _fill(self, piece: SourcePiece, at: Box, into: Tensor) -> None:
        """Fill `into`, the box `at` of an output, from its source, reading a bounded number of source rows at a time."""
        box = piece.source_box(at)
        if isinstance(piece.source, ComputedTensor):
            into.copy_(piece.view_as_mapped(self._calculator.value(piece.source)[box.slices()]))
            return
        assert isinstance(piece.source, FileTensor)
        source = piece.source
        if not source.shape:
            into.copy_(piece.view_as_mapped(self._read(source, Box.whole(()))))
            return
        row = source.nbytes // source.shape[0]
        step = max(1, self._limit // row)
        for first in range(box.start[0], box.stop[0], step):
            band = box.rows(first, min(box.stop[0], first + step))
            rows = self._read(source, Box.whole(source.shape).rows(first, band.stop[0]))
            # The part of `at` that these rows fill; None if the rule drops or moves all of them elsewhere.
            place = piece.mapped_box(band)
            target = None if place is None else place.intersect(at)
            if target is not None:
                value = rows[piece.source_box(target).moved([-first] + [0] * (len(source.shape) - 1)).slices()]
                into[target.relative_to(at).slices()] = piece.view_as_mapped(value).to(into.dtype)

    def _read(self, source: FileTensor, rows: Box) -> Tensor:
        values = torch.empty(rows.shape, dtype=source.dtype, device="cpu")
        self._reader.run([Transfer(source.file, source.offset_of(rows.start), values)])
        return values


def _direct_read(piece: SourcePiece, at: Box, into: Tensor) -> Transfer | None:
    """Return a read straight into the output if its bytes are contiguous in the file and need no cast; otherwise None."""
    source = piece.source
    if not isinstance(source, FileTensor) or source.dtype != into.dtype or not piece.keeps_order or not into.is_contiguous():
        return None
    box = piece.source_box(at)
    return Transfer(source.file, source.offset_of(box.start), into) if box.shape[1:] == source.shape[1:] else None


def other_files(source: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the other files of a checkpoint directory, such as config and tokenizer, without weights in other formats."""
    folder = Path(source)
    if not folder.is_dir():
        return {}
    others = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
    files = (entry for entry in sorted(folder.iterdir()) if entry.is_file() and entry.suffix not in others)
    return {entry.name: entry for entry in files if not entry.name.endswith(".index.json") and not entry.name.startswith(".")}
