"""Allocation and free of the memory of parameter groups: a door through which predictions record both."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fullshard.checks.collective_log import UnitName

Purpose = Literal["shards", "gathered", "gradients", "host"]
"""What memory is for: shards, unsharded parameters, gradients, or shards and gradients in host memory.

Tensors that live only as long as a collective, or a copy into it, are allocated by torch's functions directly.
"""


class Memory:
    """Allocates and frees as torch does. A subclass may record what it does, as predictions on the meta device do."""

    def of_unit(self, name: UnitName) -> Memory:
        """Return the memory of a unit."""
        return self

    def empty(self, numel: int, purpose: Purpose, *, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
        """Return an uninitialized 1-D tensor."""
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)

    def zeros(self, numel: int, purpose: Purpose, *, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
        """Return a 1-D tensor of zeros."""
        return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned)

    def cast(self, tensor: Tensor, purpose: Purpose, dtype: torch.dtype) -> Tensor:
        """Return `tensor` in another dtype; `tensor` itself if it has that dtype."""
        return tensor.to(dtype)

    # Frees a storage (0 bytes), and allocates it again: the same object keeps its tensors. No frame of Python of its own.
    resize = staticmethod(torch.UntypedStorage.resize_)


MEMORY = Memory()
