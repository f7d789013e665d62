"""Unwritten memory: `to_empty()` and `load_weights()` mark what they leave without values, and the first forward finds it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import ALLOCATION, BEFORE_STATE_DICT, ShardedParameter, Unit, own_modules
from fullshard.errors import StateError, warn_once

_MARK = -(2**7)  # fits in every signed integer dtype


def mark_tensor(tensor: Tensor) -> Tensor:
    """Fill `tensor` with a value that no initialization produces: NaN, or -128 for signed integers. Other dtypes get zeros."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(_MARK) if tensor.dtype.is_signed else tensor.zero_()


def is_marked(tensor: Tensor | None) -> bool:
    """Return True if every element still has the mark. False for unsigned and boolean tensors, which have no mark."""
    if tensor is None or not tensor.numel() or tensor.device.type == "meta":
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _MARK).all()) if tensor.dtype.is_signed else False


class _Named(NamedTuple):
    """A tensor, its name for error texts, and whether state dicts contain it. Modules of one class have equal names."""

    key: tuple[int, str]  # id of the parameter or module, and name in the module
    name: str
    tensor: Tensor
    persistent: bool


class UnwrittenTensors:
    """Tensors without values: sharded parameters, buffers, and parameters that are not sharded."""

    def __init__(self, parameters: list[ShardedParameter], buffers: list[tuple[weakref.ref[nn.Module], str]]) -> None:
        self._parameters, self.buffers = parameters, buffers
        # Version counters after the marks were written, by key.
        self._versions: dict[tuple[int, str], int] = {}
        self.cause = ""  # what allocated the memory, for error texts, as in "to_empty() allocated"

    def without(self, written: Container[int]) -> UnwrittenTensors:
        """Return a copy without the tensors in `written`: ids of ShardedParameters, and of buffers and plain parameters."""
        buffers = [(ref, name) for ref, name in self.buffers if id(getattr(ref(), name, None)) not in written]
        return UnwrittenTensors([p for p in self._parameters if id(p) not in written], buffers)

    def names(self) -> list[str]:
        """Return the names of all tensors, for error texts."""
        return [one.name for one in self._tensors()]

    def mark(self, cause: str) -> None:
        """Fill the tensors with the mark, except on meta. `cause` names what allocated them, as in "to_empty() allocated"."""
        self.cause = cause
        for one in self._tensors():
            if one.tensor.device.type != "meta":
                mark_tensor(one.tensor)
                self._versions[one.key] = one.tensor._version

    def remaining(self, *, persistent: bool = True) -> list[str]:
        """Return the names of the tensors that were not written after `mark`."""
        return [one.name for one in self._tensors() if one.persistent is persistent and self._is_unwritten(one)]

    def remaining_ids(self) -> set[int]:
        """Return the ids of all tensors that were not written after `mark`."""
        return {id(one.tensor) for one in self._tensors() if self._is_unwritten(one)}

    def _is_unwritten(self, one: _Named) -> bool:
        version, tensor = self._versions.get(one.key), one.tensor
        # An integer tensor may contain the mark as a real value, so its version counter must be unchanged as well.
        return version is not None and is_marked(tensor) and (tensor.is_floating_point() or tensor._version == version)

    def _tensors(self) -> Iterator[_Named]:
        """Yield all tensors that still exist."""
        for parameter in self._parameters:
            yield _Named((id(parameter), ""), f"parameter '{parameter.name}'", parameter.local, True)
        for ref, name in self.buffers:
            module = ref()
            buffer = getattr(module, name, None)
            if module is not None and isinstance(buffer, Tensor):
                kind = "parameter" if isinstance(buffer, nn.Parameter) else "buffer"
                text = f"{kind} '{name}' of {type(module).__name__}"
                yield _Named((id(module), name), text, buffer, _torch.persists(module, name))


_UNWRITTEN: weakref.WeakKeyDictionary[Unit, list[UnwrittenTensors]] = weakref.WeakKeyDictionary()
"""The marked tensors of each unit, until its next forward, the latest first."""


def unwritten_of(unit: Unit) -> list[UnwrittenTensors]:
    """Return the tensors of the unit that are marked, and that no forward has checked since, the latest first."""
    return _UNWRITTEN.get(unit, [])


def tensors_on_meta(unit: Unit) -> UnwrittenTensors:
    """Return the parameters and buffers of the unit that are on meta."""
    return UnwrittenTensors(
        [parameter for parameter in unit.parameters if parameter.local.device.type == "meta"],
        [
            (weakref.ref(module), name)
            for module in own_modules(*unit.modules)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.device.type == "meta"
        ],
    )


@torch.no_grad()
def mark_unwritten(unit: Unit, fresh: UnwrittenTensors, by: str = "to_empty() allocated") -> None:
    """Mark tensors that have memory but no values. The next forward raises if they are still unwritten."""
    fresh.mark(by)
    _UNWRITTEN[unit] = [fresh, *unwritten_of(unit)]  # `to_empty()` allocates for one module of a list after the other
    unit.before_first_use(_check_written, first=True)  # before the collectives of other checks


def _check_written(unit: Unit, _: nn.Module) -> None:
    """Raise StateError, naming the tensors, if some that are marked were never written."""
    unit.refresh()
    for fresh in unwritten_of(unit):
        if left := fresh.remaining():
            raise StateError(
                f"Unit '{unit.name}' has uninitialized memory: {fresh.cause} {', '.join(left)}, and nothing has written "
                f"{'it' if len(left) == 1 else 'them'}. Call reset_parameters(), load_state_dict() or fullshard.materialize() "
                "before the first forward."
            )
        if buffers := fresh.remaining(persistent=False):  # only a warning, since the forward itself may fill them
            warnings.warn(
                f"Unit '{unit.name}' has uninitialized buffers: {fresh.cause} {', '.join(buffers)}, and nothing has written "
                f"{'it' if len(buffers) == 1 else 'them'} before the first forward. State dicts do not contain such buffers. "
                "Compute them again, in reset_parameters() or by hand, or call materialize() instead of to_empty(). If the "
                "forward itself fills them, ignore this warning.",
                stacklevel=2,
            )
    del _UNWRITTEN[unit]


def _warn_of_unwritten(unit: Unit) -> None:
    """Warn that a state dict contains tensors that `load_weights` left without values. A load may be about to fill it."""
    for fresh in unwritten_of(unit):
        left = fresh.remaining() if fresh.cause.startswith("load_weights()") else []
        if left:
            names = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
            warn_once(
                f"state_dict() of unit '{unit.name}' contains uninitialized memory: {fresh.cause} {names}, and nothing has "
                "written it since. Load values into the dict before you save it."
            )


ALLOCATION.append(lambda unit: partial(mark_unwritten, unit, tensors_on_meta(unit)))
BEFORE_STATE_DICT.append(_warn_of_unwritten)
