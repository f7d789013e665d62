"""`convert_weights()`: make a checkpoint from another one, in one process and without a model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.errors import check_float_dtype, check_int
from fullshard.weights.boxes import Box, ModelTensor, ShardMap
from fullshard.weights.commit import Extra, Replacement, new_token
from fullshard.weights.exchange import batches
from fullshard.weights.headers import FileTensor, OpenFiles, read_checkpoint
from fullshard.weights.key_map import KeyMap, MappedTensor, map_keys
from fullshard.weights.layout import lay_out
from fullshard.weights.moving import RowReader, alone
from fullshard.weights.plan import plan_load
from fullshard.weights.transfer import Reader, Transfer, Writer


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
        layout, outputs = lay_out(map_keys(key_map, state), dtype, max_shard_bytes=max_shard_bytes)
        replacement.prepare(layout)
        _convert(outputs, reader, writer, buffer_bytes)
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


def _convert(outputs: Sequence[tuple[FileTensor, MappedTensor]], reader: Reader, writer: Writer, nbytes: int) -> None:
    """Write all outputs, with `nbytes` of memory: half for rows of the outputs, half to read them. A row may exceed it."""
    half, limit = nbytes // 2, max(1, nbytes // 8)
    parts = (
        (output, mapped, rows) for output, mapped in outputs for rows in Box.whole(output.shape).split_rows(output.nbytes, half)
    )
    values: dict[str, Tensor] = {}  # rows of a batch, which is loaded like the shards of a model on one rank
    reading = RowReader(alone(), values, reader, limit)
    for batch in batches(parts, half, lambda part: part[2].numel * part[0].dtype.itemsize):
        values.clear()
        targets: list[tuple[ModelTensor, MappedTensor]] = []
        writes: list[Transfer] = []
        for output, mapped, rows in batch:
            name = f"{output.name} from {rows.start}"
            values[name] = torch.empty(rows.shape, dtype=output.dtype, device="cpu")
            targets.append((ModelTensor(name, output.dtype, output.shape, ShardMap(output.shape, (rows,))), mapped))
            writes.append(Transfer(output.file, output.offset_of(rows.start), values[name]))
        reading.run(plan_load(targets, rank=0, ranks=1, limit=limit))
        writer.run(writes)


def other_files(source: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the other files of a checkpoint directory, such as config and tokenizer, without weights in other formats."""
    folder = Path(source)
    if not folder.is_dir():
        return {}
    others = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
    files = (entry for entry in sorted(folder.iterdir()) if entry.is_file() and entry.suffix not in others)
    return {entry.name: entry for entry in files if not entry.name.endswith(".index.json") and not entry.name.startswith(".")}
