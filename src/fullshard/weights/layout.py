"""Lay out a checkpoint: the file and offset of each tensor, with the split, order and index of `save_pretrained`.

Source: huggingface_hub's `split_torch_state_dict_into_shards` (files are filled in the order of the state dict, until the next
tensor does not fit; parts of one tensor share a file), safetensors' serializer (in a file, tensors are sorted by dtype, larger
alignment first, then by name), and transformers' `save_pretrained` (the index).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fullshard.weights.headers import DTYPES, SINGLE, FileTensor, header_bytes
from fullshard.weights.key_map import MappedTensor, cast_dtype

Named = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape)."""


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
    name: str = SINGLE  # name of the file of a checkpoint in a single file

    @property
    def nbytes(self) -> int:
        """Bytes of all files, with the index."""
        return sum(file.nbytes for file in self.files) + len((self.index or "").encode())


def lay_out(
    tensors: Sequence[Named],
    *,
    max_shard_bytes: int,
    parameters: int,  # elements of all parameters, for the index
    file_groups: Mapping[str, str] | None = None,  # by tensor; tensors of one group are in one file, as if they were one
    name: str = SINGLE,  # of a single file; several files get a number before the extension
) -> CheckpointLayout:
    """Lay out the tensors of a checkpoint in files.

    Returns:
        The layout.
    """
    files: list[list[Named]] = []
    current: list[Named] = []
    size = 0
    for block in _grouped(tensors, file_groups or {}):
        nbytes = sum(map(_nbytes, block))
        if nbytes > max_shard_bytes:
            files.append(block)
            continue
        if size + nbytes > max_shard_bytes:
            files.append(current)
            current, size = [], 0
        current += block
        size += nbytes
    if current or not files:
        files.append(current)
    names = [name if len(files) == 1 else _numbered_name(name, number, len(files)) for number in range(len(files))]
    found = tuple(_output_file(one, members) for one, members in zip(names, files))
    if len(files) == 1:
        return CheckpointLayout(found, None, name)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": sum(map(_nbytes, tensors))},
        "weight_map": {tensor: file for file, members in zip(names, files) for tensor, _, _ in members},
    }
    return CheckpointLayout(found, json.dumps(index, indent=2, sort_keys=True) + "\n", name)


def lay_out_mapped(
    mapped: Mapping[str, MappedTensor],
    dtype: torch.dtype | None,
    *,
    max_shard_bytes: int,
    parameters: int | None = None,
    name: str = SINGLE,
) -> tuple[CheckpointLayout, list[tuple[FileTensor, MappedTensor]]]:
    """Lay out the tensors that a key map makes, floating-point ones in `dtype`. Return also (place in a file, values) of each.

    `parameters` is as for `lay_out`; None counts the elements of all tensors.
    """
    named = [(key, cast_dtype(one.dtype, dtype), one.shape) for key, one in mapped.items()]
    layout = lay_out(
        named,
        max_shard_bytes=max_shard_bytes,
        parameters=sum(prod(shape) for _, _, shape in named) if parameters is None else parameters,
        file_groups={key: one.file_group for key, one in mapped.items() if one.file_group is not None},
        name=name,
    )
    return layout, [(tensor, mapped[tensor.name]) for file in layout.files for tensor in file.tensors]


def _grouped(tensors: Sequence[Named], file_groups: Mapping[str, str]) -> list[list[Named]]:
    """Return lists of tensors that must share a file, each at the position of its first tensor."""
    # The bool keeps groups apart from tensors without a group that have the same name.
    found: dict[tuple[bool, str], list[Named]] = {}
    for tensor in tensors:
        key = (True, file_groups[tensor[0]]) if tensor[0] in file_groups else (False, tensor[0])
        found.setdefault(key, []).append(tensor)
    return list(found.values())


def _numbered_name(name: str, number: int, many: int) -> str:
    return name.replace(".", f"-{number + 1:05d}-of-{many:05d}.", 1)


def _nbytes(tensor: Named) -> int:
    return prod(tensor[2]) * tensor[1].itemsize


def _output_file(name: str, members: Sequence[Named]) -> OutputFile:
    """Lay out one file: sort the tensors and compute the header and the offsets."""
    known = {dtype: place for place, dtype in enumerate(DTYPES.values())}
    members = sorted(members, key=lambda one: (-known.get(one[1], 0), one[0]))
    header = header_bytes(members, {"format": "pt"})  # which refuses other dtypes
    at, found = len(header), []
    for tensor, dtype, shape in members:
        found.append(FileTensor(tensor, name, dtype, shape, at))
        at += found[-1].nbytes
    return OutputFile(name, header, at, tuple(found))


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
