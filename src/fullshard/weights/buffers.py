"""Restore buffers that no checkpoint has, such as frequencies of rotary embeddings, to the values of a newly built model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from fullshard.core import clean_name
from fullshard.wrap.known_values import ConstantsMode, KnownValues, ValuesMode, values_of_buffers


def built_buffers(model: nn.Module, build: Callable[[], nn.Module] | None) -> dict[str, Tensor]:
    """Build a model on meta and return the values of its buffers.

    Returns:
        Values by buffer name, on the CPU, of the buffers that depend only on shapes and constants. Random buffers are left out.
    """
    if build is None:
        return {}
    values = KnownValues()
    try:
        with torch.device("meta"), ValuesMode(values), ConstantsMode(values):
            made = build()
    except Exception as failure:
        raise ValueError(f"buffers() fails under torch.device('meta'): {type(failure).__name__}: {failure}") from failure
    if not isinstance(made, nn.Module):
        raise ValueError(f"buffers() must return the newly built model, got a {type(made).__name__}.")
    known = {clean_name(name): known.value() for name, known in values_of_buffers(made, values).items()}
    expected = {clean_name(name): buffer for name, buffer in model.named_buffers()}
    found = {name: value for name, value in known.items() if value is not None and name in expected}
    for name, value in found.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"'{name}' has shape {tuple(value.shape)} in the model of buffers(), here {tuple(expected[name].shape)}."
            )
    return found


def fill_buffers(model: nn.Module, found: Mapping[str, Tensor], names: Container[str]) -> set[str]:
    """Copy values into the buffers in `names` for which `found` has a value, and return the names of these buffers."""
    filled: set[str] = set()
    with torch.no_grad():
        for name, buffer in ((clean_name(name), buffer) for name, buffer in model.named_buffers()):
            if name in names and name in found:
                buffer.copy_(found[name])
                filled.add(name)
    return filled
