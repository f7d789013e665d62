"""Memory with fixed addresses for the buffers of gradient reductions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_ALIGNED = 512  # bytes; the alignment of the CUDA caching allocator


class ReductionArena:
    """One tensor from which the buffers of every reduction are allocated in order, so that their addresses do not change.

        | input 0 | input 1 | slices |          one reduction; the next one starts at the front again

    Buffers that do not fit get separate memory, and the next reduction starts with an arena that is large enough. So from the
    second step on, every buffer has the address that it had in the step before. Only one reduction uses the arena at a time.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None  # (bytes,)
        self._used = 0  # bytes allocated by this reduction
        self._most = 0  # maximum of `_used` over all reductions

    def begin(self, device: torch.device) -> ReductionArena:
        """Start a reduction. The compute stream must have waited for the last one, whose memory this one overwrites."""
        if self._memory is None or self._memory.numel() < self._most or self._memory.device != device:
            self._memory = torch.empty(self._most, dtype=torch.uint8, device=device)
        self._used = 0
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return 0 if self._memory is None else self._memory.nbytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor (prod(size),) after the earlier ones of this reduction."""
        numel = prod(size)
        start, nbytes = self._used, numel * dtype.itemsize
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        self._most = max(self._most, self._used)
        memory = self._memory
        if memory is None or start + nbytes > memory.numel():
            return torch.empty(numel, dtype=dtype, device=device)  # does not fit; the next `begin` enlarges the arena
        return memory[start : start + nbytes].view(dtype)


__all__ = ["ReductionArena"]
