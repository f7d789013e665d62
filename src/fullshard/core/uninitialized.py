"""Find uninitialized tensors: new memory is filled with a mark, and tensors that still contain only the mark are reported."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import NamedTuple

from torch import Tensor, nn

from fullshard import _torch
from fullshard.core.sharded_param import ShardedParameter

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


class UninitializedTensors:
    """Tensors without values: sharded parameters, buffers, and parameters that are not sharded.

    Attributes:
        cause: what allocated the memory, for error texts, as in "to_empty() allocated".
    """

    def __init__(self, parameters: list[ShardedParameter], buffers: list[tuple[weakref.ref[nn.Module], str]]) -> None:
        self._parameters, self._buffers = parameters, buffers
        # Version counters after the marks were written, by key.
        self._versions: dict[tuple[int, str], int] = {}
        self.cause = ""

    def without(self, written: Container[int]) -> UninitializedTensors:
        """Return a copy without the tensors in `written`: ids of ShardedParameters, and of buffers and plain parameters."""
        buffers = [
            (ref, name)
            for ref, name in self._buffers
            if (module := ref()) is not None and id(getattr(module, name, None)) not in written
        ]
        return UninitializedTensors([p for p in self._parameters if id(p) not in written], buffers)

    @property
    def buffers(self) -> list[tuple[weakref.ref[nn.Module], str]]:
        """Module and name of each buffer and plain parameter."""
        return self._buffers

    @property
    def parameter_ids(self) -> frozenset[int]:
        """Ids of the sharded parameters."""
        return frozenset(map(id, self._parameters))

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
        """Return the names of the tensors that were not written after `mark`.

        Args:
            persistent: True for parameters and persistent buffers, False for the other buffers.
        """
        return [one.name for one in self._tensors() if one.persistent is persistent and self._is_unwritten(one)]

    def remaining_ids(self) -> set[int]:
        """Return the ids of all tensors that were not written after `mark`."""
        return {id(one.tensor) for one in self._tensors() if self._is_unwritten(one)}

    def _is_unwritten(self, one: _Named) -> bool:
        # An integer tensor may contain the mark as a real value, so its version counter must be unchanged as well.
        tensor = one.tensor
        return is_marked(tensor) and (tensor.is_floating_point() or tensor._version == self._versions.get(one.key))

    def _tensors(self) -> list[_Named]:
        """Return all tensors that still exist."""
        found = [
            _Named((id(parameter), ""), f"parameter '{parameter.name}'", parameter.local, True)
            for parameter in self._parameters
        ]
        for ref, name in self._buffers:
            module = ref()
            buffer = None if module is None else getattr(module, name, None)
            if module is not None and isinstance(buffer, Tensor):
                kind = "parameter" if isinstance(buffer, nn.Parameter) else "buffer"
                text = f"{kind} '{name}' of {type(module).__name__}"
                found.append(_Named((id(module), name), text, buffer, _torch.persists(module, name)))
        return found
