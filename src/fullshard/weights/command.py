"""`python -m fullshard weights`: show, convert and check checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fullshard.weights.converting import convert_weights, other_files
from fullshard.weights.headers import BadFile, read_checkpoint
from fullshard.weights.inspecting import checkpoint_tables, leftovers, problems
from fullshard.wrap.tables import bytes_text

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
    total = bytes_text(sum(header.file_nbytes for header in headers))
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
