"""Memory through which rows pass, and the exchange of values between ranks in one all-to-all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from fullshard.core import Agreement
from fullshard.weights.rounds import padded


class StagingBuffer:
    """One block of memory that is reused for each batch of rows. It grows to the largest batch."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._copies_done: torch.Event | None = None

    def take(self, tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Return tensors of these shapes and dtypes in the buffer. They overwrite the tensors of the previous call."""
        if self._copies_done is not None:
            self._copies_done.synchronize()
            self._copies_done = None
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in tensors]
        total = sum(map(padded, sizes))
        if total > self._memory.numel():
            self._memory = self._memory[:0].clone()  # frees the old memory before the new allocation, for a lower peak
            self._memory = torch.empty(total, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        found: list[Tensor] = []
        at = 0
        for (shape, dtype), size in zip(tensors, sizes):
            found.append(self._memory[at : at + size].view(dtype).view(tuple(shape)))
            at += padded(size)
        return found

    def record_copies(self) -> None:
        """Record that the accelerator may still copy from or to the tensors, so that the next `take` waits for the copies."""
        if self._pinned:
            self._copies_done = torch.Event(device=torch.accelerator.current_accelerator())
            self._copies_done.record()


@dataclass(frozen=True, slots=True)
class Send:
    """A value to send to another rank."""

    rank: int  # index in the group
    value: Tensor
    dtype: torch.dtype  # in the buffer; the value is cast to it

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer, without padding."""
        return self.value.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Receive:
    """A tensor that receives a value of another rank. The value is sent in the dtype of the tensor."""

    rank: int  # index in the group
    into: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer, without padding."""
        return self.into.numel() * self.into.itemsize


class Exchange:
    """Exchanges within one group of ranks.

    For each pair of ranks, the sender lists its `Send`s in the order in which the receiver lists its `Receive`s.
    """

    def __init__(self, group: Agreement) -> None:
        self._group = group
        self._buffers: dict[tuple[str, torch.device], StagingBuffer] = {}
        self.sent = 0  # bytes of values sent so far

    def run(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Send and receive values. Collective."""
        ranks, device = len(self._group.ranks), self._group.device
        # Pack on the device of the values, so that one copy moves all of them to the device of the process group.
        send_device = sends[0].value.device if sends else device
        send_offsets, send_sizes = _offsets(sends, ranks)
        receive_offsets, receive_sizes = _offsets(receives, ranks)
        outgoing = self._buffer("out", send_device, sum(send_sizes))
        for send, at in zip(sends, send_offsets):
            packed = outgoing[at : at + send.nbytes].view(send.dtype)
            packed.view(send.value.shape).copy_(send.value)
            self.sent += send.nbytes
        incoming = self._buffer("in", device, sum(receive_sizes))
        self._group.all_to_all(incoming, outgoing.to(device), receive_sizes, send_sizes)
        receive_device = receives[0].into.device if receives else device
        incoming = incoming.to(receive_device)
        for receive, at in zip(receives, receive_offsets):
            packed = incoming[at : at + receive.nbytes].view(receive.into.dtype)
            receive.into.copy_(packed.view(receive.into.shape))

    def _buffer(self, which: str, device: torch.device, nbytes: int) -> Tensor:
        if (which, device) not in self._buffers:
            self._buffers[which, device] = StagingBuffer(device)
        return self._buffers[which, device].take([((nbytes,), torch.uint8)])[0]


def _offsets(values: Iterable[Send | Receive], ranks: int) -> tuple[list[int], list[int]]:
    """Return (offset of each value in the buffer, padded bytes for each rank). The buffer is in rank order."""
    values = list(values)
    sizes = [0] * ranks
    offsets_in_rank: list[int] = []
    for value in values:
        offsets_in_rank.append(sizes[value.rank])
        sizes[value.rank] += padded(value.nbytes)
    first = [0, *accumulate(sizes)]
    return [first[value.rank] + at for value, at in zip(values, offsets_in_rank)], sizes
