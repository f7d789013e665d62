"""Memory that nobody has written yet: marking it when it is allocated, and finding what still has the mark."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor, nn

from fullshard.parameter import ShardedParameter

_MARK = -(2**7)  # fits in every signed integer dtype


def mark(tensor: Tensor) -> Tensor:
    """Fill `tensor` with what no initialisation leaves: NaN, or one odd integer. Unsigned and boolean ones become zero."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(_MARK) if tensor.dtype.is_signed else tensor.zero_()


def is_marked(tensor: Tensor | None) -> bool:
    """Whether nobody wrote any element since. Of unsigned and boolean tensors that cannot be told."""
    if tensor is None or not tensor.numel() or tensor.device.type == "meta":
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _MARK).all()) if tensor.dtype.is_signed else False


@dataclass(frozen=True, eq=False)
class Unwritten:
    """Parameters and buffers (module, name) of a unit that have no values yet."""

    parameters: list[ShardedParameter]
    buffers: list[tuple[weakref.ref[nn.Module], str]]

    def tensors(self) -> dict[str, Tensor]:
        """What is there now, by what to call it."""
        found = {f"parameter '{parameter.name}'": parameter.local for parameter in self.parameters}
        for ref, name in self.buffers:
            module = ref()
            buffer = None if module is None else getattr(module, name, None)
            if isinstance(buffer, Tensor):
                found[f"buffer '{name}' of {type(module).__name__}"] = buffer
        return found
