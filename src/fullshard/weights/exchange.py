"""Memory through which rows pass, and the exchange of values between ranks in one all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.core import Agreement, group_of

P = TypeVar("P")

_ALIGNMENT = 64  # bytes; at least the alignment of every dtype


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of tensors in a shared buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def batches(parts: Iterable[P], limit: int, nbytes: Callable[[P], int]) -> Iterator[list[P]]:
    """Batch parts, in order, up to `limit` bytes. A single larger part gets its own batch."""
    batch: list[P] = []
    total = 0
    for part in parts:
        size = nbytes(part)
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(part)
        total += size
    if batch:
        yield batch


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
        total = sum(padded(prod(shape) * dtype.itemsize) for shape, dtype in tensors)
        if total > self._memory.numel():
            self._memory = self._memory[:0].clone()  # frees the old memory before the new allocation, for a lower peak
            self._memory = torch.empty(total, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        return _places(self._memory, tensors)

    def record_copies(self) -> None:
        """Record that the accelerator may still copy from or to the tensors, so that the next `take` waits for the copies."""
        if self._pinned:
            self._copies_done = torch.Event(device=torch.accelerator.current_accelerator())
            self._copies_done.record()


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor to send to another rank, or one that receives the values of such a tensor."""

    rank: int  # the other rank, as index in the group
    tensor: Tensor
    dtype: torch.dtype  # in the buffer: the sender casts to it

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer, without padding."""
        return self.tensor.numel() * self.dtype.itemsize


class Exchange:
    """Exchanges within one group of ranks.

    For each pair of ranks, the sender lists its messages in the order in which the receiver lists them.
    """

    def __init__(self, group: Agreement) -> None:
        self._group = group
        self._buffers: dict[tuple[str, torch.device], StagingBuffer] = {}
        self.sent = 0  # bytes of values sent so far

    def run(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive values. Collective."""
        self.start(sends, receives)()

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start to send and receive values. Return a function that waits for them; until it was called, start nothing else."""
        if not self._group.groups:  # a single rank
            return lambda: None
        device = self._group.device
        sends, receives = (sorted(messages, key=attrgetter("rank")) for messages in (sends, receives))
        # Pack on the device of the values, so that one copy moves all of them to the device of the process group.
        outgoing, out_sizes = self._buffer("out", sends[0].tensor.device if sends else device, sends)
        for send, place in zip(sends, _places(outgoing, [(one.tensor.shape, one.dtype) for one in sends])):
            place.copy_(send.tensor)
            self.sent += send.nbytes
        incoming, in_sizes = self._buffer("in", device, receives)
        sent = [outgoing.to(device)]  # kept until the call is over
        first, axis = next(iter(self._group.groups.items()))
        group = group_of(self._group.ranks, first)
        start = partial(dist.all_to_all_single, incoming, sent[0], in_sizes, out_sizes, group=group, async_op=True)
        call = self._group.send(axis, group, [incoming], start, wait=False)

        def finish() -> None:
            call.wait()
            sent.clear()
            arrived = incoming.to(receives[0].tensor.device if receives else device)
            places = _places(arrived, [(one.tensor.shape, one.dtype) for one in receives])
            if receives:
                torch._foreach_copy_([one.tensor for one in receives], places)

        return finish

    def _buffer(self, which: str, device: torch.device, messages: Sequence[Message]) -> tuple[Tensor, list[int]]:
        """Return (memory for messages in rank order, bytes of each rank)."""
        sizes = [0] * len(self._group.ranks)
        for one in messages:
            sizes[one.rank] += padded(one.nbytes)
        staging = self._buffers.setdefault((which, device), StagingBuffer(device))
        return staging.take([((sum(sizes),), torch.uint8)])[0], sizes


def _places(memory: Tensor, tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Return tensors of these shapes and dtypes in `memory`, (bytes,), one after another."""
    found: list[Tensor] = []
    at = 0
    for shape, dtype in tensors:
        nbytes = prod(shape) * dtype.itemsize
        found.append(memory[at : at + nbytes].view(dtype).view(tuple(shape)))
        at += padded(nbytes)
    return found
