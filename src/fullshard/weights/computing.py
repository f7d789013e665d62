"""Tensors that functions make of whole ones, out of files."""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard.weights.headers import FileTensor
from fullshard.weights.key_map import Computed, Mapped
from fullshard.weights.reading import Read, Reader


class Calculator:
    """Computes for one rank. useful: bytes of files that went into it so far."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._last: tuple[Computed, Tensor] | None = None
        self.useful = 0

    def value(self, source: Computed) -> Tensor:
        """The result of its function; kept until another one is asked for.

        Raises:
            ValueError: if the function fails, or returns another shape or dtype than on meta.
        """
        if self._last is None or self._last[0] is not source:
            self._last = None
            inputs = [self._whole(mapped) for mapped in source.inputs]
            try:
                value = source.function(*inputs)
            except Exception as failure:
                raise ValueError(f"Convert: the function for '{source.name}' fails: {failure}") from failure
            if tuple(value.shape) != source.shape or value.dtype != source.dtype:
                raise ValueError(
                    f"Convert: the function for '{source.name}' returns {tuple(value.shape)} of {value.dtype}, and on meta "
                    f"{source.shape} of {source.dtype}"
                )
            self._last = source, value
        return self._last[1]

    def _whole(self, mapped: Mapped) -> Tensor:
        """All of a tensor, for a function of it."""
        found = torch.empty(mapped.shape, dtype=mapped.dtype, device="cpu")
        for piece in mapped.pieces:
            box = piece.in_source(piece.at)
            if isinstance(piece.source, Computed):
                value = self.value(piece.source)
            else:
                assert isinstance(piece.source, FileTensor)
                value = torch.empty(piece.source.shape, dtype=piece.source.dtype, device="cpu")
                self._reader.run([Read(piece.source.file, piece.source.offset, value)])
                self.useful += box.numel * value.itemsize
            found[piece.at.slices()] = piece.arranged(value[box.slices()])
        return found


__all__ = ["Calculator"]
