"""Memory that was not written yet: it is marked when it is allocated, and tensors that still have the mark are found."""

from __future__ import annotations

import weakref
from collections.abc import Container

from torch import Tensor, nn

from fullshard import _torch
from fullshard.params.sharded_param import ShardedParameter

_MARK = -(2**7)  # fits in every signed integer dtype


def mark(tensor: Tensor) -> Tensor:
    """Fill `tensor` with what no initialisation leaves: NaN, or one odd integer. Unsigned and boolean ones become zero."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(_MARK) if tensor.dtype.is_signed else tensor.zero_()


def is_marked(tensor: Tensor | None) -> bool:
    """Whether no element was written since. Of unsigned and boolean tensors that cannot be told."""
    if tensor is None or not tensor.numel() or tensor.device.type == "meta":
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _MARK).all()) if tensor.dtype.is_signed else False


class UninitializedTensors:
    """Parameters, and buffers and plain parameters (module, name), that have no values yet."""

    def __init__(self, parameters: list[ShardedParameter], buffers: list[tuple[weakref.ref[nn.Module], str]]) -> None:
        self._parameters, self._buffers = parameters, buffers
        self._versions: dict[str, int] = {}
        self.by = ""  # what left them without values, for error texts

    def but(self, written: Container[int]) -> UninitializedTensors:
        """The same without what is written. written: ids of parameters, and of the tensors that buffers are now."""
        buffers = [
            (ref, name)
            for ref, name in self._buffers
            if (module := ref()) is not None and id(getattr(module, name, None)) not in written
        ]
        return UninitializedTensors([p for p in self._parameters if id(p) not in written], buffers)

    @property
    def places(self) -> list[tuple[weakref.ref[nn.Module], str]]:
        """Return module and name of each buffer and plain parameter."""
        return self._buffers

    @property
    def parameter_ids(self) -> frozenset[int]:
        """Of the parameters."""
        return frozenset(map(id, self._parameters))

    def names(self) -> list[str]:
        """What there is."""
        return list(self._tensors())

    def mark(self, by: str) -> None:
        """Mark the memory that the tensors have now. by: what left them without values, as "to_empty() allocated"."""
        self.by = by
        for key, (tensor, _) in self._tensors().items():
            if tensor.device.type != "meta":
                mark(tensor)
                self._versions[key] = tensor._version

    def remaining(self, *, persistent: bool = True) -> list[str]:
        """The names of tensors that were not written since: parameters and persistent buffers, or the other buffers."""
        return [
            key
            for key, (tensor, kept) in self._tensors().items()
            # Of whole numbers the mark may be a value: they are unwritten only if nothing was written at all.
            if kept is persistent
            and is_marked(tensor)
            and (tensor.is_floating_point() or tensor._version == self._versions.get(key))
        ]

    def _tensors(self) -> dict[str, tuple[Tensor, bool]]:
        """By name: the tensors that are there now, and whether state dicts have them."""
        found = {f"parameter '{parameter.name}'": (parameter.local, True) for parameter in self._parameters}
        for ref, name in self._buffers:
            module = ref()
            buffer = None if module is None else getattr(module, name, None)
            if module is not None and isinstance(buffer, Tensor):
                kept = _torch.persists(module, name)
                kind = "parameter" if isinstance(buffer, nn.Parameter) else "buffer"
                found[f"{kind} '{name}' of {type(module).__name__}"] = buffer, kept
        return found
