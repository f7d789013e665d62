"""`python -m fullshard weights`: show, convert and check checkpoints."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.weights.commit import left_over
from fullshard.weights.converting import convert_weights, other_files
from fullshard.weights.headers import (
    NAMES,
    BadFile,
    FileTensor,
    Header,
    OpenFiles,
    conflicts,
    files_of,
    read_checkpoint,
    read_header,
)
from fullshard.weights.key_map import natural_key
from fullshard.weights.transfer import Reader, Transfer
from fullshard.wrap.tables import aligned, bytes_text

_READ_NBYTES = 64 << 20  # of a tensor at a time


def checkpoint_tables(source: str, headers: Sequence[Header], *, all_tensors: bool = False) -> str:
    """Return tables of the tensors and files of a checkpoint."""
    tensors = [tensor for header in headers for tensor in header.tensors]
    rows: dict[tuple[str, str, tuple[int, ...]], list[FileTensor]] = {}
    for tensor in tensors:
        # A part of a name between dots that is a number becomes a star: layers.3.weight -> layers.*.weight.
        name = tensor.name if all_tensors else re.sub(r"(?<![^.])\d+(?![^.])", "*", tensor.name)
        rows.setdefault((name, NAMES[tensor.dtype], tensor.shape), []).append(tensor)
    table = [("tensor", "dtype", "shape", "times", "bytes")]
    for (name, dtype, shape), members in sorted(rows.items(), key=lambda row: natural_key(row[1][0].name)):
        total = sum(one.nbytes for one in members)
        table.append((name, dtype, str(list(shape)), str(len(members)), bytes_text(total)))
    files = [("file", "tensors", "bytes", "metadata")]
    for header in headers:
        metadata = ", ".join(f"{key}: {value}" for key, value in header.metadata.items())
        files.append((Path(header.file).name, str(len(header.tensors)), bytes_text(header.identity.nbytes), metadata[:60]))
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[NAMES[tensor.dtype]] += tensor.numel
    total = sum(tensor.nbytes for tensor in tensors)
    parts = ", ".join(f"{count:,} elements of {dtype}" for dtype, count in dtypes.most_common())
    lines = [*aligned(table, right={3, 4}), "", *aligned(files, right={1, 2}), ""]
    lines.append(f"{len(tensors):,} tensors, {bytes_text(total)}: {parts or 'nothing'}")
    return "\n".join([*lines, *leftovers(source)])


def leftovers(source: str) -> list[str]:
    """Return a line for each leftover: weights files that the index does not list, and an unfinished save."""
    path = Path(source)
    found = []
    if path.is_dir():
        with OpenFiles() as files:
            used = {Path(file).name for file in files_of(source, files)[0]}
        found += [
            f"left over: {one.name}, which no index lists" for one in sorted(path.glob("*.safetensors")) if one.name not in used
        ]
    left = left_over(path)
    return found if left is None else [*found, f"left over: {left}"]


def problems(source: str | Path, *, values: bool = True) -> tuple[list[str], list[Header]]:
    """Return the faults of a checkpoint, one text each, and the headers that can be read.

    `values`: also read all tensors and look for NaN and infinity.
    """
    found: list[str] = []
    headers: list[Header] = []
    with OpenFiles() as files:
        try:
            paths, index = files_of(source, files)
        except BadFile as wrong:
            return [str(wrong)], []
        for path in paths:
            try:
                headers.append(read_header(path, files))
            except BadFile as wrong:
                found.append(str(wrong))
        tensors = [tensor for header in headers for tensor in header.tensors]
        is_complete = len(headers) == len(paths)
        found += conflicts(headers, index if is_complete else None)
        if index is not None and is_complete:
            unlisted = (tensor for tensor in tensors if tensor.name not in index.file_of)
            found += [f"{tensor.file} has '{tensor.name}', which the index does not list." for tensor in unlisted]
            total = sum(tensor.nbytes for tensor in tensors)
            if index.total_size not in (None, total):
                found.append(f"The index lists a total of {index.total_size:,} bytes for all tensors, which have {total:,}.")
        if values:
            found += [text for header in headers for text in _value_problems(header, files)]
    return found, headers


def _value_problems(header: Header, files: OpenFiles) -> Iterator[str]:
    """Yield the tensors of a file that have NaN or infinite values or cannot be read."""
    reader = Reader(files, threads=8)
    try:
        for tensor in header.tensors:
            counts = Counter[str]()
            numel = tensor.numel
            step = _READ_NBYTES // tensor.dtype.itemsize
            for first in range(0, numel, step):
                part = torch.empty(min(step, numel - first), dtype=tensor.dtype, device="cpu")
                reader.run([Transfer(header.file, tensor.offset + first * tensor.dtype.itemsize, part)])
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    # isinf() is not implemented for most float8 dtypes.
                    part = part.float() if tensor.dtype.itemsize == 1 else part
                    counts["NaN"] += int(part.isnan().sum())
                    counts["infinite"] += int(part.isinf().sum())
            bad = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
            if bad:
                yield f"{header.file}: tensor '{tensor.name}' has {bad} of {numel:,} values."
    except BadFile as wrong:
        yield str(wrong)
    finally:
        reader.close()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_weights(commands: Any) -> None:
    """Add the `weights` command and its arguments to the command line."""
    weights_parser = commands.add_parser("weights", help="show, convert and check checkpoints of safetensors")
    verbs = weights_parser.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show", help="list the tensors and files of a checkpoint, their sizes, and leftovers")
    show.add_argument("source", help="a directory, an index or a file")
    show.add_argument("--all", action="store_true", help="print a row for each tensor (default: one row for all layers)")
    convert = verbs.add_parser("convert", help="make a checkpoint from another one, with other names, splits or dtypes")
    convert.add_argument("source", help="a directory, an index or a file")
    convert.add_argument("directory", help="directory of the new checkpoint; may be the source")
    convert.add_argument("--map", help="key map: module:name, file.py:name, or a .json file of names and new names")
    convert.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of floating-point tensors (default: unchanged)")
    convert.add_argument(
        "--max-shard-bytes", type=int, default=5_000_000_000, help="bytes of tensors in a file (default: 5 GB)"
    )
    convert.add_argument("--only-weights", action="store_true", help="do not copy other files, such as a config")
    convert.add_argument("--buffer-bytes", type=int, default=256 << 20, help="bytes of memory to use (default: 256 MiB)")
    check = verbs.add_parser(
        "check", help="check the headers, the index and the values of a checkpoint; the exit status is 1 if one is bad"
    )
    check.add_argument("source", help="a directory, an index or a file")
    check.add_argument("--headers", action="store_true", help="do not read the values")


def run_weights(options: argparse.Namespace, load: Callable[[str], Any]) -> int:
    """Run the command, print its result and return the exit status: 1 if `check` finds a fault, else 0."""
    if options.verb == "show":
        print(checkpoint_tables(options.source, read_checkpoint(options.source), all_tensors=options.all))
        return 0
    if options.verb == "convert":
        done = convert_weights(
            options.source,
            options.directory,
            key_map=None if options.map is None else _key_map(options.map, load),
            dtype=DTYPES.get(options.dtype),
            max_shard_bytes=options.max_shard_bytes,
            extra=None if options.only_weights else other_files(options.source),
            buffer_bytes=options.buffer_bytes,
        )
        read, written = bytes_text(done.bytes_read), bytes_text(done.bytes_written)
        print(f"{options.directory}: {', '.join(done.files)}; {read} read, {written} written, {done.seconds:.1f} s")
        return 0
    wrong, headers = problems(options.source, values=not options.headers)
    for line in [*wrong, *(leftovers(options.source) if headers else ())]:
        print(line)
    tensors = sum(len(header.tensors) for header in headers)
    total = bytes_text(sum(header.identity.nbytes for header in headers))
    files = f"{len(headers)} file{'s' * (len(headers) != 1)}"
    print(f"{options.source}: {files}, {tensors:,} tensors, {total}: {'BAD' if wrong else 'whole'}")
    return 1 if wrong else 0


def _key_map(name: str, load: Callable[[str], Any]) -> Any:
    """Read a key map from a .json file, or load it by `load`."""
    if not name.endswith(".json"):
        return load(name)
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise BadFile(f"--map {name}: {failure}") from failure
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadFile(f"--map {name}: expected a JSON object of names and new names.")
    return found
