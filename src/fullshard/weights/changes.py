"""What changed between two sealed versions: positions and values of elements, found on the shards and sent to one rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from struct import Struct
from typing import cast
from uuid import uuid4

import torch
from torch import Tensor

from fullshard.errors import StateError
from fullshard.weights.boxes import Box, ModelTensor, TensorInfo
from fullshard.weights.description import parts_of
from fullshard.weights.exchange import Exchange, Message
from fullshard.weights.headers import FileTensor, OpenFiles, header_bytes, read_header
from fullshard.weights.inside import sync
from fullshard.weights.key_map import ComputedTensor, MappedTensor
from fullshard.weights.targets import ModelEntry, ModelTensors
from fullshard.weights.transfer import Reader, Transfer

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Changes:
    """Elements that differ between two versions. Empty on ranks that do not receive them.

    Attributes:
        base: digest of the older version.
        digest: digest of the newer version.
        elements: by name, (positions, values) of changed elements: int32, or int64 in tensors of 2**31 elements or more, in
            the flattened tensor, ascending on each rank's part; and values in the dtype of the tensor.
        full: by name, the whole tensor, where that has fewer bytes.
        shapes: by name, the shape of each tensor of `elements`.
    """

    base: str = ""
    digest: str = ""
    elements: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    full: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of positions, values and whole tensors."""
        pairs = [one for pair in self.elements.values() for one in pair]
        return sum(one.nbytes for one in (*pairs, *self.full.values()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the changes to a safetensors file: whole or not at all.

        Args:
            path: of the file, which is replaced if it exists.
        """
        place = Path(path)
        tensors = {f"positions/{name}": positions for name, (positions, _) in self.elements.items()}
        tensors |= {f"values/{name}": values for name, (_, values) in self.elements.items()}
        tensors |= {f"full/{name}": value for name, value in self.full.items()}
        tensors = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        infos = [TensorInfo(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()]
        fresh = place.with_name(f".{place.name}.{uuid4().hex[:8]}.new")
        try:
            with fresh.open("wb") as file:
                file.write(header_bytes(infos, {"base": self.base, "digest": self.digest, "shapes": json.dumps(self.shapes)}))
                for one in tensors.values():
                    file.write(Transfer("", 0, one).memory)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, place)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        sync(place.parent)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Changes:
        """Read a file that `save` wrote.

        Args:
            path: of the file.

        Returns:
            The changes, on the CPU.

        Raises:
            ValueError: if the file is not whole, or of another kind.
        """
        with OpenFiles() as files:
            header = read_header(os.fspath(path), files)
            if {"base", "digest", "shapes"} - set(header.metadata):
                raise ValueError(f"{path} has no changes between versions: its header names no base. Read what changes wrote.")
            found = read_tensors(header.tensors, files)
        shapes = {name: tuple(shape) for name, shape in json.loads(header.metadata["shapes"]).items()}
        elements = {name: (found[f"positions/{name}"], found[f"values/{name}"]) for name in shapes}
        full = {name.removeprefix("full/"): tensor for name, tensor in found.items() if name.startswith("full/")}
        return cls(header.metadata["base"], header.metadata["digest"], elements, full, shapes)

    @torch.no_grad()
    def apply(self, state: Mapping[str, Tensor], base: str) -> str:
        """Write the changes into full tensors.

        Args:
            state: contiguous tensors by name, of the version `base`.
            base: digest of that version.

        Returns:
            The digest of the version that `state` has now.

        Raises:
            StateError: if the changes were made for another version; nothing is written.
            ValueError: if `state` lacks a tensor, or has one of another shape or dtype, or not contiguous; nothing is written.
        """
        if base != self.base:
            raise StateError(
                f"These changes are from version {self.base} to {self.digest}, and the state is of {base}. Load all."
            )
        new = {name: values for name, (_, values) in self.elements.items()} | self.full
        for name, values in new.items():
            own = state.get(name)
            if own is None:
                raise ValueError(f"The state has no '{name}', which has changed.")
            shape = self.shapes.get(name, tuple(values.shape))
            if own.dtype != values.dtype or not own.is_contiguous() or tuple(own.shape) != shape:
                raise ValueError(
                    f"Expected '{name}' of the state to be contiguous, {shape} of {values.dtype}, got {tuple(own.shape)} of "
                    f"{own.dtype} with strides {own.stride()}. Load the version {self.base} under the published names first."
                )
        for name, (positions, values) in self.elements.items():
            own = state[name].view(-1)
            own[positions.to(own.device).long()] = values.to(own.device)
        for name, values in self.full.items():
            state[name].copy_(values)
        return self.digest


def read_tensors(tensors: Sequence[FileTensor], files: OpenFiles) -> dict[str, Tensor]:
    """Read whole tensors of files, by name."""
    found = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in tensors}
    with closing(Reader(files, threads=4)) as reader:
        reader.run([Transfer(one.file, one.offset, found[one.name]) for one in tensors if one.nbytes])
    return found


@torch.no_grad()
def find_changes(
    old: ModelTensors, new: ModelTensors, mapped: Mapping[str, MappedTensor], to: int, doing: str
) -> tuple[Changes, list[str]]:
    """Send positions and values of changed elements to rank `to`. Return them, and the names of tensors to send whole."""
    group, rank, receiver = new.agreement(doing), new.index, new.ranks.index(to) if new.units else new.index
    before, after = ({one.target.name: one for one in tensors.entries} for tensors in (old, new))
    if moved := [name for name, one in after.items() if before[name].target.shard_map != one.target.shard_map]:
        raise StateError(
            f"'{moved[0]}' was sharded otherwise in the older version, so its changes are unknown. Send all of it."
        )
    mine = group.run(lambda: {name: _changed_here(one, before, after, rank, receiver) for name, one in mapped.items()})
    layout = Struct(f"<{len(mine)}q")
    gathered = group.gather_bytes(layout.pack(*(len(positions) for positions, _ in mine.values())), at_most=layout.size)
    counts = [layout.unpack(one) for one in gathered.values()]  # by rank, of each tensor
    changes, full = Changes(), []
    sends: list[Message] = []
    receives: list[Message] = []
    for at, (name, one) in enumerate(mapped.items()):
        positions, values = mine[name]
        sizes = [each[at] for each in counts]
        total = sum(sizes)
        if (
            any(isinstance(piece.source, ComputedTensor) for piece in one.pieces)
            or total * (positions.itemsize + values.itemsize) >= prod(one.shape) * values.itemsize
        ):
            full.append(name)
        elif total and rank == receiver:
            every = positions.new_empty(total), values.new_empty(total)
            changes.elements[name], changes.shapes[name] = every, mapped[name].shape
            for source, parts in enumerate(zip(*(whole.split(sizes) for whole in every))):
                for part, own in zip(parts, (positions, values)):
                    if source == rank:
                        part.copy_(own)
                    elif part.numel():
                        receives.append(Message(source, part, part.dtype))
        elif total and len(positions):
            sends += [Message(receiver, tensor, tensor.dtype) for tensor in (positions, values)]
    Exchange(group).run(sends, receives)
    return changes, [name for name in full if prod(mapped[name].shape)]


def _changed_here(
    mapped: MappedTensor, before: Mapping[str, ModelEntry], after: Mapping[str, ModelEntry], rank: int, receiver: int
) -> tuple[Tensor, Tensor]:
    """Return positions and values of the changed elements that this rank sends. One rank sends for all replicas."""
    index_dtype = torch.int32 if prod(mapped.shape) < 2**31 else torch.int64
    strides = [prod(mapped.shape[dim + 1 :]) for dim in range(len(mapped.shape))]
    positions: list[Tensor] = []
    values: list[Tensor] = []
    for (piece, at, new), (_, _, old) in zip(parts_of(mapped, after, rank), parts_of(mapped, before, rank)):
        assert isinstance(piece.source, ModelTensor)
        shards = piece.source.shard_map
        replicas = shards.ranks_by_box[cast(Box, shards.boxes[rank])]
        if rank != (receiver if receiver in replicas else replicas[0]):
            continue
        new, old = torch.atleast_1d(new, old)
        where = _differ(new, old).nonzero(as_tuple=True)
        begins = zip(where, at.start, strides)
        flat = sum(
            ((index + start) * stride for index, start, stride in begins), new.new_zeros(len(where[0]), dtype=torch.int64)
        )
        positions.append(flat.to(index_dtype))
        values.append(new[where])
    if not positions:
        like = next(iter(after.values())).local
        return like.new_empty(0, dtype=index_dtype), like.new_empty(0, dtype=mapped.dtype)
    return torch.cat(positions), torch.cat(values)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return where the bits of two tensors differ."""
    if one.dtype == torch.complex128:  # no integer has as many bits
        return _differ(torch.view_as_real(one), torch.view_as_real(other)).any(-1)
    bits = _BITS[one.itemsize]
    return one.view(bits) != other.view(bits)
