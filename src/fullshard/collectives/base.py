"""How bytes travel: the collectives that a group of parameters needs, and those of a rank that is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

KIB = 1024


@dataclass(slots=True)
class StartedWork:
    """A collective that was started: `works` to wait for, then `then()` to finish it on the lane it was started on.

    unpollable: these works never say that they are over (asking gloo's messages costs 25 us, in vain); only waiting tells.
    """

    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None
    unpollable: bool = False


class Collectives(Protocol):
    """The collectives of one shard axis. Tensors are 1-D and contiguous; nothing is waited for inside.

    An implementation of your own goes in through `CommPolicy(collectives=...)`.
    """

    ranks: int
    rank: int
    direct_min_bytes: float  # chunks at least this large are worth a message of their own

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """A function that gathers `shards[i]` (size,) of all ranks, in rank order, into `outs[i]` (ranks * size,) at each call.

        A shard may be this rank's own chunk of its out.
        """
        ...

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Sum chunk `rank` of `fulls[i]` (ranks * size,) over all ranks, times `scale`, into `outs[i]` (size,)."""
        ...

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """Element-wise sum over all ranks, in place."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """Element-wise maximum over all ranks, in place."""
        ...


Allocate = Callable[..., Tensor]  # (numel, *, dtype, device) -> 1-D tensor


class SingleRank:
    """A group of one: the same code, and a copy where others send."""

    ranks, rank = 1, 0
    direct_min_bytes: float = 0

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """As `Collectives.gatherer`."""
        pairs = [(out, shard) for out, shard in zip(outs, shards) if out.data_ptr() != shard.data_ptr() or not out.numel()]

        def gather() -> StartedWork:
            for out, shard in pairs:
                out.copy_(shard)
            return StartedWork()

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """As `Collectives.reduce_scatter`."""
        for out, full in zip(outs, fulls):
            torch.mul(full, scale, out=out) if scale != 1.0 else out.copy_(full)
        return StartedWork()

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """As `Collectives.all_reduce`."""
        return StartedWork()

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """As `Collectives.all_reduce_max`."""
        return StartedWork()
