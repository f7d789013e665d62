"""The collectives that a parameter group needs: the protocol, and its implementation for a group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch


@dataclass(slots=True)
class StartedWork:
    """A collective that has been started: its works, and the function that completes it on its stream.

    Args:
        works: objects with `wait()`, such as torch.distributed.Work.
        then: called after all works have been waited for; a copy or a multiplication, for example.
    """

    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Order the current stream behind the works, and complete the collective."""
        for work in self.works:
            work.wait()
        if self.then is not None:
            self.then()

    def is_completed(self) -> bool:
        """Return True if all works have completed.

        Returns:
            False also if they cannot be polled.
        """
        return all(map(_torch.is_done, self.works))


Started: TypeAlias = StartedWork | dist.Work | None
"""What the start of a collective returns. torch.distributed returns None if the kernel is queued on the current stream."""


class Collectives(Protocol):
    """The collectives of one process group. Tensors are contiguous, and 1-D except in all-reduces. No method waits for the end.

    `CommPolicy(collectives=...)` takes a function that returns an implementation of your own for a process group.

    Attributes (those with a default may be missing):
        ranks: number of ranks in the group.
        rank: this rank's index in the group.
        direct_min_bytes: used if `CommPolicy.direct_min_bytes` is None; `inf` packs all parameters, whatever the policy says.
        in_order: True if collectives run in order on the current stream, so that waiting for one does not block the host. Large
            gradients that need a copy are then reduced slice by slice through one buffer. Default False.
        in_place: True if, in a group of one rank, the input of `reduce_scatter` may be its output, so that gradients are cast
            directly into it. Default False.
        gather_memory: allocates the all-gather output, one packed message; needs `direct_min_bytes` inf. Default None: torch.
        reduce_memory: allocates reduce-scatter inputs and outputs; needs `direct_min_bytes` inf. Default None: torch.
        reducer: `reducer(scale)` returns `reduce_scatter` prepared as a function of (outs, fulls), or None. Default None.
    """

    ranks: int
    rank: int
    direct_min_bytes: float

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Started]:
        """Prepare an all-gather that can be started many times.

        Args:
            outs: outputs, (ranks * size,) each: the chunks of all ranks, in rank order.
            shards: inputs, (size,) each, of the same dtype; `shards[i]` may be this rank's own chunk of `outs[i]`.

        Returns:
            A function that starts the all-gather each time it is called.
        """
        ...

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Started:
        """Start a reduce-scatter: write the sum over ranks of chunk `rank` of `fulls[i]`, times `scale`, to `outs[i]`.

        Args:
            outs: outputs, (size,) each.
            fulls: inputs, (ranks * size,) each, of the same dtype.
            scale: factor applied to the sums.

        Returns:
            The started work.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Started:
        """Start an all-reduce (sum), in place.

        Args:
            tensor: read and written; flat gradients, (size,), or a norm, ().

        Returns:
            The started work.
        """
        ...

    def all_reduce_max(self, tensor: Tensor) -> Started:
        """Start an all-reduce (maximum), in place: of small integers of heartbeats and agreements, or of a norm.

        Args:
            tensor: read and written; a heartbeat, (size,), a flag or norm, (), or rows to compare, (rows, bytes).

        Returns:
            The started work.
        """
        ...


Allocate = Callable[..., Tensor]  # (size, *, dtype, device) -> 1-D tensor; `size` is (numel,)

Adapter = Callable[[Collectives, dist.ProcessGroup], Collectives]
"""Makes other collectives out of a backend's or a policy's (an extension point: see `gather_adapter` in `UnitOptions`)."""


class SingleRank:
    """The collectives of a group of one rank, which copy instead of communicating."""

    ranks, rank = 1, 0
    direct_min_bytes: float = 0
    in_order = False  # slices pay only if they overlap with a network; here one call packs and casts all gradients
    in_place = True

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """Copy each shard to its output, unless they share memory."""
        pairs = [(out, shard) for out, shard in zip(outs, shards) if out.data_ptr() != shard.data_ptr()]

        def gather() -> StartedWork:
            for out, shard in pairs:
                out.copy_(shard)
            return StartedWork()

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Write each input, times `scale`, to its output; copy none onto itself."""
        for out, full in zip(outs, fulls):
            if scale != 1.0:
                torch.mul(full, scale, out=out)
            elif out.data_ptr() != full.data_ptr():
                out.copy_(full)
        return StartedWork()

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> StartedWork:
        """Copy the one part."""
        received.copy_(sent)
        return StartedWork()

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """Do nothing: the sum and the maximum over one rank are the tensor itself."""
        return StartedWork()

    all_reduce_max = all_reduce
