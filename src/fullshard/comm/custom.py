"""Custom all-gathers, reduce-scatters and message memory that the caller provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Allocate, Collectives, StartedWork


class Comm(ABC):
    """A custom collective and the memory it works on. Same interface as the class of this name in FSDP2.

    Source: `torch.distributed.fsdp.Comm`.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for messages.

        Args:
            size: number of elements, as a shape of one dim.
            dtype: dtype of the messages.
            device: device of the mesh.

        Returns:
            A contiguous, uninitialized tensor (elements,).
        """


class AllGather(Comm):
    """A custom all-gather, for `FSDPModule.set_custom_all_gather`.

    Source: `torch.distributed.fsdp.AllGather`.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks, in rank order, into `output_tensor`.

        Args:
            output_tensor: (ranks * size,), memory from `allocate`.
            input_tensor: (size,), this rank's chunk of `output_tensor`.
            group: the participating ranks.
            async_op: return before the collective completes. True on the CPU; False on an accelerator, where the current stream
                is one of fullshard's communication streams.

        Returns:
            The work to wait for, or None.
        """


class ReduceScatter(Comm):
    """A custom reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`.

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
            output_tensor: (size,), memory from `allocate`.
            input_tensor: (ranks * size,), memory from `allocate`.
            group: the participating ranks.
            op: the torch.distributed.ReduceOp; fullshard passes SUM and scales the result afterwards.
            async_op: return before the collective completes. True on the CPU; False on an accelerator, where the current stream
                is one of fullshard's communication streams.

        Returns:
            The work to wait for, or None.
        """


class CustomCollectives:
    """A custom all-gather or reduce-scatter, in memory from the caller; other collectives are those of `inner`.

    All parameters are packed, so that each all-gather and each reduce-scatter is one message in that memory.
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
        self._inner, self._group, self._gather, self._reduce = inner, group, all_gather, reduce_scatter
        self._asynchronous = asynchronous
        self.ranks, self.rank = inner.ranks, inner.rank
        self.all_reduce, self.all_reduce_max = inner.all_reduce, inner.all_reduce_max
        # No direct all-gathers: custom collectives work only on memory from their `allocate`.
        self.direct_min_bytes, self.in_order = float("inf"), False
        self.gather_memory: Allocate | None = memory if all_gather is None else all_gather.allocate
        self.reduce_memory: Allocate | None = memory if reduce_scatter is None else reduce_scatter.allocate

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """Prepare the custom all-gather; without one, the all-gather of `inner`."""
        call = self._gather
        if call is None:
            return self._inner.gatherer(outs, shards)

        def gather() -> StartedWork:
            works = []
            for out, shard in zip(outs, shards):
                chunk = out.view(self.ranks, -1)[self.rank]
                if chunk.data_ptr() != shard.data_ptr():
                    chunk.copy_(shard)
                works.append(call(out, chunk, self._group, async_op=self._asynchronous))
            return StartedWork([work for work in works if work is not None])

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Start the custom reduce-scatter; without one, the reduce-scatter of `inner`."""
        if self._reduce is None:
            return self._inner.reduce_scatter(outs, fulls, scale)
        group, add = self._group, dist.ReduceOp.SUM
        works = [self._reduce(out, full, group, add, async_op=self._asynchronous) for out, full in zip(outs, fulls)]
        then = partial(_torch.scale, outs, scale) if scale != 1.0 else None
        return StartedWork([work for work in works if work is not None], then)
