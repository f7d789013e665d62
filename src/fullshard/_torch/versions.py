"""Version of the installed torch, and differences between versions."""

from __future__ import annotations

import torch
from torch import Tensor

VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]
"""Major and minor version of the installed torch."""

NEWEST_TRIED: tuple[int, int] = (2, 15)
"""Newest torch version on which the tests have passed."""

HONOURS_SUBCLASSES: bool = VERSION >= (2, 12)
"""True if torch calls the `__torch_dispatch__` of a DTensor subclass; torch 2.11 runs DTensor's own instead."""

REDUCES_IN_GRAD_DTYPE: bool = VERSION >= (2, 15)
"""True if torch reduces in the dtype of `.grad` by default (`reduce_dtype=None`), False if in the compute dtype."""

TRACKS_GRAD_DTYPE: bool = hasattr(Tensor, "_has_grad_dtype_override")
"""True if torch records that `grad_dtype` was set. Before 2.15, setting it to the parameter's own dtype leaves no trace."""


def grad_dtype_of(parameter: Tensor) -> tuple[bool, torch.dtype | None]:
    """Return a pair: True if `parameter.grad_dtype` was set, and the dtype that it was set to (None allows any dtype)."""
    # Private: `_has_grad_dtype_override`, the only record of an explicit setting. Without it, the comparison is used, and an
    # explicit setting to the parameter's own dtype counts as no setting.
    found: torch.dtype | None = parameter.grad_dtype
    explicit = parameter._has_grad_dtype_override if TRACKS_GRAD_DTYPE else found != parameter.dtype  # type: ignore[attr-defined]
    return explicit, found if explicit else None


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype that `.grad` must have; None allows any dtype."""
    # If torch records explicit settings, setting the current dtype is a change, too.
    if parameter.grad_dtype != dtype or TRACKS_GRAD_DTYPE:
        parameter.grad_dtype = dtype
