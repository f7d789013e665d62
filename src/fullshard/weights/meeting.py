"""Communication between all ranks of a model in one call: failures, headers, and rows that one rank reads for another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fullshard.core import SetupCollectives, group_of, resolve_mesh
from fullshard.weights.reading import memoryview_of
from fullshard.weights.targets import ModelTensors
from fullshard.weights.texts import printable

T = TypeVar("T")


class RankGroup:
    """All ranks of a model, for the collectives of one call.

    Every rank calls the same methods in the same order, even if the work of some ranks fails.

    Args:
        tensors: tensors of the model.
        doing: name of the call, for the collective log and for errors.

    Attributes:
        ranks: global ranks.
        index: position of this rank in `ranks`.
        device: device of the tensors that `exchange` sends and receives.
    """

    def __init__(self, tensors: ModelTensors, doing: str) -> None:
        self._tensors, self.ranks, self.index = tensors, tensors.ranks, tensors.index
        self._setups: list[SetupCollectives] = []
        self.device = torch.device("cpu")
        if len(tensors.ranks) > 1:
            # The largest mesh has all ranks. Its FSDP axis and its tensor parallel axes together connect all of them.
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
        """Return the element-wise maximum over all ranks. Collective."""
        moved = tensor.to(self.device)
        for setup in self._setups:
            setup.maximum(moved)
        return moved.to(tensor.device)

    def broadcast(self, text: bytes) -> bytes:
        """Return the bytes of the first rank. Collective; other ranks may pass anything."""
        return self._broadcast_from(0, text)

    def _broadcast_from(self, index: int, text: bytes) -> bytes:
        # The maximum with the zeros of all other ranks, first for the length and then for the bytes, which spans all axes.
        mine = text if self.index == index else b""
        length = int(self.maximum(torch.tensor([len(mine)], device="cpu")).item())
        message = torch.zeros(length, dtype=torch.uint8, device="cpu")
        if mine:
            memoryview_of(message)[:] = mine
        found = self.maximum(message)
        return bytes(memoryview_of(found))

    def check_equal(self, what: str, content: bytes) -> None:
        """Raise ValueError on every rank if `content` is not equal on all ranks. Collective.

        Args:
            what: subject of the error, in the plural.
            content: the bytes to compare.
        """
        mine = torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)
        # The maximum of 255 - x is 255 minus the minimum of x: one collective gives both.
        largest, smallest = self.maximum(torch.cat([mine, 255 - mine])).chunk(2)
        if not torch.equal(largest, 255 - smallest):
            raise ValueError(f"{what} differ between ranks. Pass the same on all ranks.")

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank and return its result. If it fails on any rank, raise on all ranks. Collective.

        Raises:
            ValueError: with the text of the first rank that failed, if it raised a ValueError.
            RuntimeError: with the text of the first rank that failed, if it raised another exception.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            failure = caught
        # The maximum of `last - index` is that of the first rank that failed; 0 if none did.
        last = len(self.ranks)
        found = int(self.maximum(torch.tensor([0 if failure is None else last - self.index], device="cpu")).item())
        if not found:
            return result
        kind, text = ("V" if isinstance(failure, ValueError) else "R"), "" if failure is None else str(failure)
        message = self._broadcast_from(last - found, printable(f"{kind}{text or type(failure).__name__}").encode()).decode()
        raise (ValueError if message[0] == "V" else RuntimeError)(message[1:]) from failure

    def exchange(self, message: Tensor, sizes: Sequence[int], received: Tensor, lengths: Sequence[int]) -> None:
        """Send bytes to every rank and receive bytes from every rank (all-to-all). Collective.

        Args:
            message: bytes to send, 1-D, uint8, on `device`, in rank order.
            sizes: bytes of `message` for each rank.
            received: receives the bytes of all ranks, 1-D, uint8, on `device`, in rank order.
            lengths: bytes of `received` from each rank.
        """
        first = next(setup for setup in self._setups if setup.groups)
        group = group_of(self.ranks, first.groups[0])
        first.all_to_all(received, message, list(lengths), list(sizes), group)


__all__ = ["RankGroup"]
