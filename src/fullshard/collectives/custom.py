"""Collectives of the caller's own: all-gathers, reduce-scatters, and memory for either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.base import Allocate, Collectives, StartedWork
from fullshard.collectives.process_groups import held


class Comm(ABC):
    """A collective of the caller's, and the memory it works on. Same interface as the class of this name in FSDP2.

    Source: `torch.distributed.fsdp.Comm`.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for messages.

        Args:
            size: elements, as a shape of one dim.
            dtype: of the messages.
            device: of the mesh.

        Returns:
            A contiguous tensor (elements,), whose values do not matter.
        """


class AllGather(Comm):
    """An all-gather of the caller's, for `FSDPModule.set_custom_all_gather`.

    Source: `torch.distributed.fsdp.AllGather`.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks, in rank order, into `output_tensor`.

        Args:
            output_tensor: (ranks * size,), memory that `allocate` gave.
            input_tensor: (size,), this rank's chunk of `output_tensor`.
            group: the ranks that take part.
            async_op: whether to return before it is done: True on the CPU. On an accelerator False, since the current stream
                is a lane of fullshard's.

        Returns:
            The work to wait for, or None if there is nothing to wait for.
        """


class ReduceScatter(Comm):
    """A reduce-scatter of the caller's, for `FSDPModule.set_custom_reduce_scatter`.

    Source: `torch.distributed.fsdp.ReduceScatter`.
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce chunk `rank` of `input_tensor` over all ranks into `output_tensor`.

        Args:
            output_tensor: (size,), memory that `allocate` gave.
            input_tensor: (ranks * size,), memory that `allocate` gave.
            group: the ranks that take part.
            op: the torch.distributed.ReduceOp; fullshard passes SUM, and scales behind it.
            async_op: whether to return before it is done: True on the CPU. On an accelerator False, since the current stream
                is a lane of fullshard's.

        Returns:
            The work to wait for, or None if there is nothing to wait for.
        """


class CustomCollectives:
    """The caller's all-gather or reduce-scatter, in memory that it allocates, or in `memory`; the rest as `inner` does it.

    Everything is packed, so that each gather and each reduction is one message in such memory.
    """

    def __init__(
        self,
        inner: Collectives,
        group: dist.ProcessGroup,
        memory: Allocate | None = None,
        *,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        asynchronous: bool = True,
    ) -> None:
        self._inner, self._held, self._gather, self._reduce = inner, held(group), all_gather, reduce_scatter
        self._asynchronous = asynchronous
        self.ranks, self.rank = inner.ranks, inner.rank
        self.all_reduce, self.all_reduce_max = inner.all_reduce, inner.all_reduce_max
        self.direct_min_bytes, self.in_order = float("inf"), False
        self.gather_memory: Allocate | None = memory if all_gather is None else all_gather.allocate
        self.reduce_memory: Allocate | None = memory if reduce_scatter is None else reduce_scatter.allocate

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """As `Collectives.gatherer`."""
        call = self._gather
        if call is None:
            return self._inner.gatherer(outs, shards)

        def gather() -> StartedWork:
            works = []
            for out, shard in zip(outs, shards):
                chunk = out.view(self.ranks, -1)[self.rank]
                if chunk.data_ptr() != shard.data_ptr():
                    chunk.copy_(shard)
                works.append(call(out, chunk, self._held.group, async_op=self._asynchronous))
            return StartedWork([work for work in works if work is not None])

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """As `Collectives.reduce_scatter`."""
        if self._reduce is None:
            return self._inner.reduce_scatter(outs, fulls, scale)
        group, add = self._held.group, dist.ReduceOp.SUM
        works = [self._reduce(out, full, group, add, async_op=self._asynchronous) for out, full in zip(outs, fulls)]
        then = partial(_torch.scale, outs, scale) if scale != 1.0 else None
        return StartedWork([work for work in works if work is not None], then)
