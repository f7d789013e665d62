"""Compute the tensors of `Convert` rules from files."""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard.weights.headers import FileTensor
from fullshard.weights.key_map import ComputedTensor, MappedTensor
from fullshard.weights.reading import Read, Reader


class Calculator:
    """Runs the functions of `Convert` rules on one rank.

    Attributes:
        bytes_used: bytes of file data that the functions have used so far.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._last: tuple[ComputedTensor, Tensor] | None = None
        self.bytes_used = 0

    def value(self, source: ComputedTensor) -> Tensor:
        """Return the result of a function. It is cached until another tensor is computed."""
        if self._last is None or self._last[0] is not source:
            self._last = None  # free the last result before the next inputs are read
            inputs = [self._read_whole(mapped) for mapped in source.inputs]
            try:
                value = source.function(*inputs)
            except Exception as failure:
                raise ValueError(f"Convert: the function for '{source.name}' fails: {failure}") from failure
            if tuple(value.shape) != source.shape or value.dtype != source.dtype:
                raise ValueError(
                    f"Convert: expected the function for '{source.name}' to return {source.shape} of {source.dtype}, as on "
                    f"meta, got {tuple(value.shape)} of {value.dtype}."
                )
            self._last = source, value
        return self._last[1]

    def _read_whole(self, mapped: MappedTensor) -> Tensor:
        """Read a whole tensor from the files."""
        found = torch.empty(mapped.shape, dtype=mapped.dtype, device="cpu")
        for piece in mapped.pieces:
            box = piece.source_box(piece.at)
            if isinstance(piece.source, ComputedTensor):
                value = self.value(piece.source)
            else:
                assert isinstance(piece.source, FileTensor)
                value = torch.empty(piece.source.shape, dtype=piece.source.dtype, device="cpu")
                self._reader.run([Read(piece.source.file, piece.source.offset, value)])
                self.bytes_used += box.numel * value.itemsize
            found[piece.at.slices()] = piece.view_as_mapped(value[box.slices()])
        return found
