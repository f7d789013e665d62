"""What changed between two sealed versions: positions and values of elements, found on the shards and sent to one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch
from torch import Tensor

from fullshard.errors import StateError
from fullshard.weights.boxes import Box, ModelTensor
from fullshard.weights.description import parts_of
from fullshard.weights.exchange import Exchange, Message
from fullshard.weights.key_map import MappedTensor
from fullshard.weights.targets import ModelEntry, ModelTensors

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
    """

    base: str = ""
    digest: str = ""
    elements: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    full: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of positions, values and whole tensors."""
        pairs = [one for pair in self.elements.values() for one in pair]
        return sum(one.nbytes for one in (*pairs, *self.full.values()))

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
            ValueError: if `state` lacks a tensor; nothing is written.
        """
        if base != self.base:
            raise StateError(
                f"These changes are from version {self.base} to {self.digest}, and the state is of {base}. Load all."
            )
        if lacking := [name for name in (*self.elements, *self.full) if name not in state]:
            raise ValueError(f"The state has no '{lacking[0]}', which has changed.")
        for name, (positions, values) in self.elements.items():
            state[name].view(-1)[positions.long()] = values.to(state[name].device)
        for name, value in self.full.items():
            state[name].copy_(value)
        return self.digest


@torch.no_grad()
def find_changes(
    old: ModelTensors, new: ModelTensors, mapped: Mapping[str, MappedTensor], to: int
) -> tuple[Changes, list[str]]:
    """Send positions and values of changed elements to rank `to`. Return them, and the names of tensors to send whole."""
    group, rank, receiver = new.agreement(f"changed() of {len(mapped)} tensors to rank {to}"), new.index, new.ranks.index(to)
    before, after = ({one.target.name: one for one in tensors.entries} for tensors in (old, new))
    mine = {name: _changed_here(one, before, after, rank, receiver) for name, one in mapped.items()}
    counts = torch.tensor([len(positions) for positions, _ in mine.values()], dtype=torch.int64)
    gathered = group.gather_bytes(counts.numpy().tobytes(), at_most=counts.nbytes)
    by_rank = {at: torch.frombuffer(bytearray(gathered[one]), dtype=torch.int64) for at, one in enumerate(new.ranks)}
    totals = torch.stack([*by_rank.values()]).sum(0)
    changes, full = Changes(), []
    sends: list[Message] = []
    receives: list[Message] = []
    for at, (name, one) in enumerate(mapped.items()):
        positions, values = mine[name]
        total = int(totals[at])
        if total * (positions.itemsize + values.itemsize) >= prod(one.shape) * values.itemsize:
            full.append(name)
        elif total and rank == receiver:
            every = positions.new_empty(total), values.new_empty(total)
            changes.elements[name] = every
            begin = 0
            for source, size in ((source, int(each[at])) for source, each in by_rank.items()):
                for whole, own in zip(every, (positions, values)):
                    part = whole[begin : begin + size]
                    if source == rank:
                        part.copy_(own)
                    elif size:
                        receives.append(Message(source, part, part.dtype))
                begin += size
        elif total and len(positions):
            sends += [Message(receiver, tensor, tensor.dtype) for tensor in (positions, values)]
    if len(new.ranks) > 1:
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
        new, old = (one.view(1) if not one.ndim else one for one in map(piece.view_as_mapped, (new, old)))
        bits = _BITS[new.itemsize]
        where = (new.view(bits) != old.view(bits)).nonzero(as_tuple=True)
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
