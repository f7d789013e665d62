"""Messages between all ranks that hold a model, in one call: failures, headers, and rows that one read for another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fullshard.runtime.setup_collectives import SetupCollectives
from fullshard.sharding.mesh import group_of, resolve_mesh
from fullshard.weights.reading import bytes_of
from fullshard.weights.targets import ModelTensors
from fullshard.weights.texts import printable

T = TypeVar("T")


class Meeting:
    """A call of the caller's in which all ranks of a model take part.

    Every rank makes the same calls in the same order, also where some of them fail.
    """

    def __init__(self, tensors: ModelTensors, doing: str) -> None:
        self._tensors, self.ranks, self.index = tensors, tensors.ranks, tensors.index
        self._setups: list[SetupCollectives] = []
        self.device = torch.device("cpu")
        if len(tensors.ranks) > 1:
            unit, sharding = max(
                ((unit, p.sharding) for unit in tensors.units for p in unit.parameters),
                key=lambda found: found[1].mesh.size(),
            )
            self.device = unit.axis.device
            self._setups = [unit.setup_collectives(doing)]
            for axis in sharding.tensor_parallel_axes:
                over = resolve_mesh(sharding.mesh[(sharding.mesh.mesh_dim_names or ())[axis]])
                self._setups.append(SetupCollectives(unit.runtime.communicator, over, unit.unit_name, doing, doing))

    def maximum(self, tensor: Tensor) -> Tensor:
        """Element-wise over all ranks."""
        moved = tensor.to(self.device)
        for setup in self._setups:
            setup.maximum(moved)
        return moved.to(tensor.device)

    def first(self, text: bytes) -> bytes:
        """The bytes that the first rank has."""
        return self._from(0, text)

    def _from(self, index: int, text: bytes) -> bytes:
        mine = text if self.index == index else b""
        length = int(self.maximum(torch.tensor([len(mine)], device="cpu")).item())
        message = torch.zeros(length, dtype=torch.uint8, device="cpu")
        if mine:
            bytes_of(message)[:] = mine
        found = self.maximum(message)
        return bytes(bytes_of(found))

    def check_alike(self, what: str, told: bytes) -> None:
        """Compare bytes over all ranks. Raises ValueError on every rank if they differ."""
        mine = torch.frombuffer(bytearray(hashlib.sha256(told).digest()), dtype=torch.uint8)
        most, least = self.maximum(torch.cat([mine, 255 - mine])).chunk(2)
        if not torch.equal(most, 255 - least):
            raise ValueError(f"{what} differ from rank to rank: pass the same on all ranks")

    def run(self, work: Callable[[], T]) -> T:
        """Do this on every rank; if it fails on one, the error of the first that failed is raised on all.

        Raises:
            Whatever this rank's work raised, if it failed here; else a ValueError or RuntimeError with that rank's text.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            failure = caught
        last = len(self.ranks)
        found = int(self.maximum(torch.tensor([0 if failure is None else last - self.index], device="cpu")).item())
        if not found:
            return result
        kind, text = ("V" if isinstance(failure, ValueError) else "R"), "" if failure is None else str(failure)
        told = self._from(last - found, printable(f"{kind}{text or type(failure).__name__}").encode()).decode()
        raise (ValueError if told[0] == "V" else RuntimeError)(told[1:]) from failure

    def exchange(self, message: Tensor, sizes: Sequence[int], received: Tensor, lengths: Sequence[int]) -> None:
        """Bytes for every rank, and from every rank: 1-D, uint8, on the device of the meeting, one rank after the other.

        sizes, lengths: of the parts of both.
        """
        first = next(setup for setup in self._setups if setup.groups)
        group = group_of(self.ranks, first.groups[0])
        first.exchange(received, message, list(lengths), list(sizes), group)


__all__ = ["Meeting"]
