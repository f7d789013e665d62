"""How bytes travel: the collectives that a group of parameters needs, and those of a rank that is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class StartedWork:
    """A collective that was started: works to wait for, and what finishes it on the lane it was started on.

    Args:
        works: objects with `wait()`, as torch.distributed.Work has it.
        then: called once all works were waited for: a copy or a multiplication, say.
        unpollable: whether these works never say that they are over (asking gloo's messages costs 25 us, in vain).
    """

    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None
    unpollable: bool = False


def together(first: StartedWork, second: StartedWork) -> StartedWork:
    """Two collectives that were started, as one."""
    thens = [started.then for started in (first, second) if started.then is not None]

    def both() -> None:
        for then in thens:
            then()

    return StartedWork([*first.works, *second.works], both if thens else None, first.unpollable or second.unpollable)


class Collectives(Protocol):
    """The collectives of one process group. Tensors are 1-D and contiguous; nothing is waited for inside.

    An implementation of your own goes in through `CommPolicy(collectives=...)`.

    Attributes:
        ranks: how many ranks the group has.
        rank: this rank in the group.
        direct_min_bytes: chunks of at least this many bytes are worth a message of their own.
        in_order: whether collectives run one behind the other on the current stream, so that to wait for one does not hold the
            host: large gradients that must be cast then go slice by slice through one buffer. False if it is left out.
        in_place: whether a packed message of `reduce_scatter` may lie where its sum goes, so that gradients are cast straight
            into the sum. False if it is left out.
    """

    ranks: int
    rank: int
    direct_min_bytes: float
    in_order: bool

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """Prepare an all-gather, which may be started many times.

        Args:
            outs: (ranks * size,) each; what is gathered into, in rank order.
            shards: (size,) each, of the same dtype; `shards[i]` may be this rank's own slot of `outs[i]`.

        Returns:
            A function that starts the gather whenever it is called.
        """
        ...

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Start a reduce-scatter: the sum of chunk `rank` of every `fulls[i]` over all ranks, times `scale`.

        Args:
            outs: (size,) each; what is written.
            fulls: (ranks * size,) each, of the same dtype.
            scale: factor of the sums.

        Returns:
            The work that was started.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """Start an element-wise sum over all ranks, in place.

        Args:
            tensor: (size,), read and written; gradients, or int32.

        Returns:
            The work that was started.
        """
        ...

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """Start an element-wise maximum over all ranks, in place. Heartbeats and set-up use it, for small integers.

        Args:
            tensor: (size,), read and written.

        Returns:
            The work that was started.
        """
        ...


Allocate = Callable[..., Tensor]  # (numel, *, dtype, device) -> 1-D tensor


class SingleRank:
    """The collectives of a group of one: the same code, and a copy where others send."""

    ranks, rank = 1, 0
    direct_min_bytes: float = 0
    in_order = False  # one call packs and casts the gradients of all parameters, and nothing is sent
    in_place = True

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """Copy each shard to its out, where it does not lie there already."""
        pairs = [(out, shard) for out, shard in zip(outs, shards) if out.data_ptr() != shard.data_ptr() or not out.numel()]

        def gather() -> StartedWork:
            for out, shard in pairs:
                out.copy_(shard)
            return StartedWork()

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Copy each full to its out, times `scale`, where it does not lie there already."""
        for out, full in zip(outs, fulls):
            if scale != 1.0:
                torch.mul(full, scale, out=out)
            elif out.data_ptr() != full.data_ptr():
                out.copy_(full)
        return StartedWork()

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """Nothing: the sum of one."""
        return StartedWork()

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """Nothing: the maximum of one."""
        return StartedWork()
