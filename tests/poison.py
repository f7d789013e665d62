"""Poison: NaN in unsharded memory before an all-gather fills it and before it is freed. Compute too early or too late shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fullshard.core.unsharded_buffer import AllGather, FlatBuffer

_allocate, _free = FlatBuffer.allocate, FlatBuffer.free


def _fill(buffer: FlatBuffer) -> None:
    for tensor in (buffer.flat, *buffer._staging):
        if tensor.untyped_storage().size() and tensor.numel():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _allocate_poisoned(buffer: FlatBuffer, version: int) -> AllGather:
    gather = _allocate(buffer, version)
    _fill(buffer)
    return gather


def _free_poisoned(buffer: FlatBuffer) -> None:
    _fill(buffer)
    _free(buffer)


@contextmanager
def poisoned() -> Iterator[None]:
    """A block, or a decorated function, in which memory of all-gathers is poisoned."""
    with mock.patch.object(FlatBuffer, "allocate", _allocate_poisoned), mock.patch.object(FlatBuffer, "free", _free_poisoned):
        yield
