"""Values that ranks send each other in one message: copied into it with their cast, and out of it to where they belong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fullshard.weights.meeting import Meeting
from fullshard.weights.staging import Stage, padded


@dataclass(frozen=True, slots=True)
class Send:
    """A value for another rank, by its index in the meeting. dtype: in which it is sent."""

    rank: int
    value: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the message."""
        return self.value.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Receive:
    """Where a value of another rank belongs; it is sent in this dtype."""

    rank: int
    into: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes in the message."""
        return self.into.numel() * self.into.itemsize


class Exchange:
    """Messages of one meeting. sent: bytes of values so far.

    Two ranks name the values that they send each other in the same order.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._stages: dict[tuple[str, torch.device], Stage] = {}
        self.sent = 0

    def run(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Send and receive. Collective."""
        ranks, device = len(self._meeting.ranks), self._meeting.device
        near = sends[0].value.device if sends else device  # one copy to the device of messages, not one for each value
        given, sizes = _places(sends, ranks)
        taken, lengths = _places(receives, ranks)
        outgoing = self._take("out", near, sum(sizes))
        for send, at in zip(sends, given):
            place = outgoing[at : at + send.nbytes].view(send.dtype)
            place.view(send.value.shape).copy_(send.value)
            self.sent += send.nbytes
        incoming = self._take("in", device, sum(lengths))
        self._meeting.exchange(outgoing.to(device), sizes, incoming, lengths)
        far = receives[0].into.device if receives else device
        incoming = incoming.to(far)
        for receive, at in zip(receives, taken):
            place = incoming[at : at + receive.nbytes].view(receive.into.dtype)
            receive.into.copy_(place.view(receive.into.shape))

    def _take(self, which: str, device: torch.device, nbytes: int) -> Tensor:
        if (which, device) not in self._stages:
            self._stages[which, device] = Stage(device)
        return self._stages[which, device].take([((nbytes,), torch.uint8)])[0]


def _places(values: Iterable[Send | Receive], ranks: int) -> tuple[list[int], list[int]]:
    """(where each value begins in the message, bytes for each rank): rank after rank, in order."""
    values = list(values)
    sizes = [0] * ranks
    within: list[int] = []
    for value in values:
        within.append(sizes[value.rank])
        sizes[value.rank] += padded(value.nbytes)
    first = [0, *accumulate(sizes)]
    return [first[value.rank] + at for value, at in zip(values, within)], sizes


__all__ = ["Exchange", "Receive", "Send"]
