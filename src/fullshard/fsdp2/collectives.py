"""Custom all-gathers and reduce-scatters, and memory of messages that the process group or the caller provides.

They are adapters of the backend's collectives (`UnitOptions.gather_adapter` and `reduce_adapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Allocate, Collectives, Started, StartedWork
from fullshard.core import Unit, require_unit
from fullshard.errors import check_bool
from fullshard.frontend.module import FSDPModule, sharded_method

AllGather = _torch.AllGather
Comm = _torch.Comm
ReduceScatter = _torch.ReduceScatter
"""FSDP2's own abstract classes of a custom collective and the memory it works on. docs/api/collectives.md describes them."""


class CustomCollectives:
    """A custom all-gather or reduce-scatter, in memory from the caller; other collectives are those of `inner`.

    All parameters are packed, so that each all-gather and each reduce-scatter is one message in that memory. On the CPU, calls
    are asynchronous, since synchronous ones would block the host; on an accelerator they block the stream.
    """

    def __init__(
        self,
        inner: Collectives,
        group: dist.ProcessGroup,
        *,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        memory: Allocate | None = None,
    ) -> None:
        self._inner, self._group, self._gather, self._reduce = inner, group, all_gather, reduce_scatter
        self.ranks, self.rank = inner.ranks, inner.rank
        self.all_reduce, self.all_reduce_max = inner.all_reduce, inner.all_reduce_max
        # No direct all-gathers: custom collectives work only on memory from their `allocate`.
        self.direct_min_bytes, self.in_order = float("inf"), False
        self.gather_memory: Allocate | None = memory if all_gather is None else all_gather.allocate
        self.reduce_memory: Allocate | None = memory if reduce_scatter is None else reduce_scatter.allocate

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Started]:
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
                works.append(call(out, chunk, self._group, async_op=out.device.type == "cpu"))
            return StartedWork([work for work in works if work is not None])

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Started:
        """Start the custom reduce-scatter; without one, the reduce-scatter of `inner`."""
        if self._reduce is None:
            return self._inner.reduce_scatter(outs, fulls, scale)
        group, add = self._group, dist.ReduceOp.SUM
        works = [self._reduce(out, full, group, add, async_op=out.device.type == "cpu") for out, full in zip(outs, fulls)]
        then = partial(_torch.scale, outs, scale) if scale != 1.0 else None
        return StartedWork([work for work in works if work is not None], then)


# --- methods of sharded modules -------------------------------------------------------------------------------------------


@sharded_method
def set_custom_all_gather(self: FSDPModule, comm: AllGather) -> None:
    """Set a custom all-gather for this unit, with one all-gather per parameter group in memory allocated by `comm`.

    Args:
        comm: an `AllGather`, or any callable with an `allocate` method of that interface.

    Raises:
        ValueError: for anything else.
        StateError: inside a forward or backward.
    """
    _check_comm(comm, "set_custom_all_gather", "AllGather")
    require_unit(self).reconfigure(doing="set_custom_all_gather()", gather_adapter=partial(CustomCollectives, all_gather=comm))


@sharded_method
def set_custom_reduce_scatter(self: FSDPModule, comm: ReduceScatter) -> None:
    """Set a custom reduce-scatter for this unit, with one reduce-scatter per group in memory allocated by `comm`.

    Args:
        comm: a `ReduceScatter`, or any callable with an `allocate` method of that interface.

    Raises:
        ValueError: for anything else.
        StateError: inside a forward or backward.
    """
    _check_comm(comm, "set_custom_reduce_scatter", "ReduceScatter")
    require_unit(self).reconfigure(
        doing="set_custom_reduce_scatter()", reduce_adapter=partial(CustomCollectives, reduce_scatter=comm)
    )


@sharded_method
def set_allocate_memory_from_process_group_for_comm(self: FSDPModule, enable: bool) -> None:
    """Set whether communication buffers are allocated by the process group's backend, as for NCCL user buffers.

    Args:
        enable: False allocates them from the default allocator again.

    Raises:
        ValueError: if the backend cannot allocate memory, or this unit has custom collectives.
        StateError: inside a forward or backward.
    """
    allocator = _torch.process_group_memory if check_bool("enable", enable) else None
    _set_memory(require_unit(self), allocator, doing="set_allocate_memory_...()")


@sharded_method
def set_symm_mem_for_comm(self: FSDPModule, backend: str = "NCCL") -> None:
    """Allocate this unit's communication buffers in symmetric memory. Collective.

    Args:
        backend: the name of torch's symmetric-memory backend, such as "NCCL" or "NVSHMEM".

    Raises:
        ValueError: on the CPU, which has no symmetric memory, if this unit has custom collectives, or if `backend` is not
            a string.
        StateError: inside a forward or backward.
    """
    if not isinstance(backend, str):
        raise ValueError(f"set_symm_mem_for_comm takes the name of a backend, got {backend!r}.")
    _set_memory(require_unit(self), partial(_torch.symmetric_memory, backend=backend), doing="set_symm_mem_for_comm()")


def _set_memory(unit: Unit, allocator: Callable[..., Allocate] | None, *, doing: str) -> None:
    """Let `allocator` of the process group allocate messages. Raise ValueError for a unit with custom collectives."""
    adapters = [one for one in (unit.options.gather_adapter, unit.options.reduce_adapter) if isinstance(one, partial)]
    custom = [comm for one in adapters for name, comm in one.keywords.items() if name != "memory"]
    if custom:
        raise ValueError(
            f"Unit '{unit.name}' has custom collectives ({type(custom[0]).__name__}), which allocate their own memory."
        )
    group = unit.axis.group
    adapter = None
    if allocator is not None and group is not None:
        adapter = partial(CustomCollectives, memory=allocator(group, unit.axis.device))
    unit.reconfigure(doing=doing, gather_adapter=adapter, reduce_adapter=adapter)


def _check_comm(comm: Any, setter: str, kind: str) -> None:
    if not callable(comm) or not hasattr(comm, "allocate"):
        raise ValueError(f"{setter} takes an {kind} (callable, with allocate()), got {type(comm).__name__}.")
