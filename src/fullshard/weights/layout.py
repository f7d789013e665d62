"""Lay out a checkpoint: the file and offset of each tensor, with the split, order and index of `save_pretrained`.

Source: huggingface_hub's `split_torch_state_dict_into_shards` (files are filled in the order of the state dict, until the next
tensor does not fit; parts of one tensor share a file), safetensors' serializer (in a file, tensors are sorted by dtype, larger
alignment first, then by name), and transformers' `save_pretrained` (the index).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.weights.headers import DTYPES, SINGLE, FileTensor, header_bytes
from fullshard.weights.key_map import MappedTensor, cast_dtype


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write."""

    name: str
    header: bytes  # the first bytes of the file
    nbytes: int  # of the whole file
    tensors: tuple[FileTensor, ...]  # in the order of their data


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The files of a checkpoint."""

    files: tuple[OutputFile, ...]
    index: str | None  # text of the index; None for a checkpoint in a single file

    @property
    def nbytes(self) -> int:
        """Bytes of all files, with the index."""
        return sum(file.nbytes for file in self.files) + len((self.index or "").encode())


def lay_out(
    mapped: Mapping[str, MappedTensor],
    dtype: torch.dtype | None = None,
    *,
    max_shard_bytes: int,
    parameters: int | None = None,
    name: str = SINGLE,
) -> tuple[CheckpointLayout, list[tuple[FileTensor, MappedTensor]]]:
    """Lay out the tensors that a key map makes, floating-point ones in `dtype`. Return also (place in a file, values) of each.

    `parameters`: elements of all parameters, for the index; None counts those of all tensors. `name`: that of a single file;
    several files get a number before the extension.
    """
    blocks: dict[tuple[bool, str], list[FileTensor]] = {}  # tensors that must share a file; the place of the first counts
    for key, one in mapped.items():
        # The bool keeps groups apart from tensors without a group that have the same name.
        block = (False, key) if one.file_group is None else (True, one.file_group)
        blocks.setdefault(block, []).append(FileTensor(key, cast_dtype(one.dtype, dtype), one.shape, "", 0))
    members: list[list[FileTensor]] = []  # of each file
    current: list[FileTensor] = []
    size = 0  # of `current`
    for tensors in blocks.values():
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if nbytes > max_shard_bytes:
            members.append(tensors)
            continue
        if size + nbytes > max_shard_bytes:
            members.append(current)
            current, size = [], 0
        current += tensors
        size += nbytes
    if current or not members:
        members.append(current)
    names = [name]
    if len(members) > 1:
        names = [name.replace(".", f"-{number:05d}-of-{len(members):05d}.", 1) for number in range(1, len(members) + 1)]
    files = tuple(map(_output_file, names, members))
    placed = [tensor for file in files for tensor in file.tensors]
    text = None
    if len(files) > 1:
        numel = sum(tensor.numel for tensor in placed) if parameters is None else parameters
        index = {
            "metadata": {"total_parameters": numel, "total_size": sum(tensor.nbytes for tensor in placed)},
            "weight_map": {tensor.name: tensor.file for tensor in placed},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return CheckpointLayout(files, text), [(tensor, mapped[tensor.name]) for tensor in placed]


def _output_file(name: str, members: Sequence[FileTensor]) -> OutputFile:
    """Lay out one file: sort the tensors and compute the header and the offsets."""
    known = {dtype: place for place, dtype in enumerate(DTYPES.values())}
    members = sorted(members, key=lambda one: (-known.get(one.dtype, 0), one.name))
    header = header_bytes(members, {"format": "pt"})  # which refuses other dtypes
    at, placed = len(header), list[FileTensor]()
    for one in members:
        placed.append(replace(one, file=name, offset=at))
        at += one.nbytes
    return OutputFile(name, header, at, tuple(placed))


def index_of(single: str) -> str:
    """Return the name of the index file of a checkpoint whose single file would be named `single`."""
    return f"{single}.index.json"


def is_weights(name: str, single: str = SINGLE) -> bool:
    """Return True if a file of this name belongs to a checkpoint, so that the next save replaces it."""
    head, _, tail = map(re.escape, single.partition("."))
    # One of several files, as 'model-00001-of-00003.safetensors'; after it the token of a save into the directory itself.
    numbered = rf"{head}-[0-9]+-of-[0-9]+(-[0-9a-f]{{8}})?\.{tail}"
    return name in (single, index_of(single)) or re.fullmatch(numbered, name) is not None


def may_be_weights(name: str) -> bool:
    """Return True if a file of this name may have weights of another save or program."""
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")) and "optim" not in name
