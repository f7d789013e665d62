"""Which tensor of a checkpoint is where in which file: the split, the order and the index of `save_pretrained`.

Source: huggingface_hub's `split_torch_state_dict_into_shards` (in the order of the state dict, a file is full when the next
tensor would not fit, and parts of one are together), safetensors' serializer (in a file, dtypes of larger alignment come first,
and then names), and transformers' `save_pretrained` (the index).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fullshard.weights.headers import SINGLE, FileTensor, header_bytes

_ALIGNMENT = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.complex64,
    torch.float64,
    torch.int64,
    torch.uint64,
]
"""The serializer's order of dtypes; in a file it is reversed."""

Named = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape)."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written. header: its first bytes.      nbytes: of all of it.      tensors: in the order of their data."""

    name: str
    header: bytes
    nbytes: int
    tensors: tuple[FileTensor, ...]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The files of a checkpoint.

    index: the text of the index, None if there is one file.      name: of the file if there is one.
    """

    files: tuple[OutputFile, ...]
    index: str | None
    name: str = SINGLE

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files) + len((self.index or "").encode())


def lay_out(
    tensors: Sequence[Named],
    *,
    max_shard_bytes: int,
    parameters: int,
    together: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    name: str = SINGLE,
) -> CheckpointLayout:
    """Say where each tensor is.

    Args:
        tensors: in the order of the state dict.
        max_shard_bytes: of the tensors in one file, unless one alone has more.
        parameters: elements of all parameters, for the index.
        together: by name, alike for tensors that are in one file, as if they were one.
        metadata: of each file; {"format": "pt"} if None.
        name: of the file if there is one; several are numbered before its ending.
    """
    files: list[list[Named]] = []
    current: list[Named] = []
    size = 0
    for block in _blocks(tensors, together or {}):
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
    names = [name if len(files) == 1 else _numbered(name, number, len(files)) for number in range(len(files))]
    found = tuple(_output(one, members, metadata or {"format": "pt"}) for one, members in zip(names, files))
    if len(files) == 1:
        return CheckpointLayout(found, None, name)
    told = {
        "metadata": {"total_parameters": parameters, "total_size": sum(map(_nbytes, tensors))},
        "weight_map": {tensor: file for file, members in zip(names, files) for tensor, _, _ in members},
    }
    return CheckpointLayout(found, json.dumps(told, indent=2, sort_keys=True) + "\n", name)


def _blocks(tensors: Sequence[Named], together: Mapping[str, str]) -> list[list[Named]]:
    """Tensors that are in one file, where the first of them is."""
    found: dict[tuple[bool, str], list[Named]] = {}
    for tensor in tensors:
        key = (True, together[tensor[0]]) if tensor[0] in together else (False, tensor[0])
        found.setdefault(key, []).append(tensor)
    return list(found.values())


def _numbered(name: str, number: int, many: int) -> str:
    return name.replace(".", f"-{number + 1:05d}-of-{many:05d}.", 1)


def _nbytes(tensor: Named) -> int:
    return prod(tensor[2]) * tensor[1].itemsize


def _output(name: str, members: Sequence[Named], metadata: Mapping[str, str]) -> OutputFile:
    members = sorted(members, key=lambda one: (-_ALIGNMENT.index(one[1]), one[0]))
    header = header_bytes(members, metadata)
    at, found = len(header), []
    for tensor, dtype, shape in members:
        found.append(FileTensor(tensor, name, dtype, shape, at))
        at += found[-1].nbytes
    return OutputFile(name, header, at, tuple(found))


def index_of(single: str) -> str:
    """The name of the index of files that are called so."""
    return f"{single}.index.json"


def is_weights(name: str, single: str = SINGLE) -> bool:
    """Whether a file of this name is one of a checkpoint, which the next one replaces. single: of the file if there is one."""
    head, _, tail = single.partition(".")
    return name in (single, index_of(single)) or (name.startswith(f"{head}-") and name.endswith(f".{tail}"))


def may_be_weights(name: str) -> bool:
    """Whether a file of this name may have weights of another save or program."""
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")) and "optim" not in name


__all__ = ["CheckpointLayout", "OutputFile", "index_of", "is_weights", "lay_out", "may_be_weights"]
