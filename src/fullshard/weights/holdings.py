"""Tensors of a model, and which part of each of them each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from fullshard.weights.boxes import Box


@dataclass(frozen=True)
class Holdings:
    """Which part of a tensor each rank has. boxes: by rank, None for a rank that has no element."""

    shape: tuple[int, ...]
    boxes: tuple[Box | None, ...]

    @cached_property
    def distinct(self) -> dict[Box, tuple[int, ...]]:
        """The ranks that have the same part, by it."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            if box is not None:
                found.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in found.items()}

    @cached_property
    def is_by_rows(self) -> bool:
        """Whether each rank has rows of its own, and all of them."""
        whole = all(box.shape[1:] == self.shape[1:] for box in self.distinct)
        return bool(self.shape) and whole and all(len(ranks) == 1 for ranks in self.distinct.values())


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model. name: its first one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holdings: Holdings

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


__all__ = ["Holdings", "ModelTensor"]
