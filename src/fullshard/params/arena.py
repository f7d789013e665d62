"""Memory for messages that stays where it is, whatever is sent in it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_ALIGNED = 512  # bytes, as the allocator of CUDA aligns


class MessageArena:
    """One piece of memory, from which the messages of one reduction after the other are allocated, always alike.

        | message 0 | message 1 | slices |          one reduction; the next one begins at the front again

    It grows while it is too small: what does not fit gets memory of its own, and the next reduction finds room for all of it.
    From the second step on every message is where it was in the step before. One reduction uses it at a time.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None  # (bytes,)
        self._used = self._most = 0

    def begin(self, device: torch.device) -> MessageArena:
        """Begin a reduction. The last one must be over on the compute lane."""
        if self._memory is None or self._memory.numel() < self._most or self._memory.device != device:
            self._memory = torch.empty(self._most, dtype=torch.uint8, device=device)
        self._used = 0
        return self

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor (prod(size),) behind the earlier ones of this reduction."""
        numel = prod(size)
        start, nbytes = self._used, numel * dtype.itemsize
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        self._most = max(self._most, self._used)
        memory = self._memory
        if memory is None or start + nbytes > memory.numel():
            return torch.empty(numel, dtype=dtype, device=device)
        return memory[start : start + nbytes].view(dtype)


__all__ = ["MessageArena"]
