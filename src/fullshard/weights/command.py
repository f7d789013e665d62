"""`python -m fullshard weights`: what is in a checkpoint, another one made of it, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fullshard.weights.converting import convert_weights, files_beside
from fullshard.weights.headers import BadFile, read_checkpoint
from fullshard.weights.inspecting import left_over, problems, shown
from fullshard.wrap.tables import bytes_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_weights(commands: Any) -> None:
    """The command line of `weights`."""
    to = commands.add_parser("weights", help="show, convert and check checkpoints of safetensors")
    verbs = to.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show", help="say what is in a checkpoint, how large it is, and what is left over beside it")
    show.add_argument("source", help="a directory, an index or a file")
    show.add_argument("--all", action="store_true", help="a row for each tensor (default: one for those of all layers)")
    convert = verbs.add_parser("convert", help="make another checkpoint of one, with other names, parts or dtypes")
    convert.add_argument("source", help="a directory, an index or a file")
    convert.add_argument("directory", help="of the new one; may be the source")
    convert.add_argument("--map", help="module:name or file.py:name of a key map, or a .json of names and new ones")
    convert.add_argument("--dtype", choices=tuple(DTYPES), help="of floating-point tensors (default: theirs)")
    convert.add_argument("--max-shard-bytes", type=int, default=5_000_000_000, help="of tensors in a file (default: 5 GB)")
    convert.add_argument("--only-weights", action="store_true", help="leave out the other files, as a config")
    convert.add_argument("--buffer-bytes", type=int, default=256 << 20, help="of memory (default: 256 MiB)")
    check = verbs.add_parser(
        "check", help="read all of a checkpoint: headers, index and values; the exit status is 1 if one is bad"
    )
    check.add_argument("source", help="a directory, an index or a file")
    check.add_argument("--headers", action="store_true", help="do not read the values")


def run_weights(options: argparse.Namespace, load: Callable[[str], Any]) -> int:
    """Do it and print. Returns 0, or 1 if a checkpoint that was checked is not whole.

    Raises:
        ValueError: for what cannot be read or made.
        RuntimeError: if writing fails.
    """
    if options.verb == "show":
        print(shown(options.source, read_checkpoint(options.source), every=options.all))
        return 0
    if options.verb == "convert":
        done = convert_weights(
            options.source,
            options.directory,
            key_map=None if options.map is None else _key_map(options.map, load),
            dtype=DTYPES.get(options.dtype),
            max_shard_bytes=options.max_shard_bytes,
            extra=None if options.only_weights else files_beside(options.source),
            buffer_bytes=options.buffer_bytes,
        )
        read, written = bytes_text(done.bytes_read), bytes_text(done.bytes_written)
        print(f"{options.directory}: {', '.join(done.files)}; {read} read, {written} written, {done.seconds:.1f} s")
        return 0
    wrong, headers = problems(options.source, values=not options.headers)
    for line in [*wrong, *(left_over(options.source) if headers else ())]:
        print(line)
    tensors = sum(len(header.tensors) for header in headers)
    total = bytes_text(sum(header.file_nbytes for header in headers))
    print(f"{options.source}: {len(headers)} files, {tensors:,} tensors, {total}: {'BAD' if wrong else 'whole'}")
    return 1 if wrong else 0


def _key_map(name: str, load: Callable[[str], Any]) -> Any:
    if not name.endswith(".json"):
        return load(name)
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise BadFile(f"--map {name}: {failure}") from failure
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadFile(f"--map {name}: expected an object of names and new names")
    return found


__all__ = ["add_weights", "run_weights"]
