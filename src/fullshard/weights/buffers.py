"""Values of buffers that no checkpoint has, as frequencies of rotary embeddings: those that a model is built with."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from fullshard.frontend.known_values import ConstantsMode, Values, ValuesMode, values_of_buffers


def built_buffers(model: nn.Module, build: Callable[[], nn.Module] | None) -> dict[str, Tensor]:
    """The values of a model's buffers as it is built, on meta.

    Args:
        model: that is to get them.
        build: makes it as it was made, without its shards; None gives none.

    Returns:
        By name, on the CPU, of those whose values follow from shapes and constants, and are not random.

    Raises:
        ValueError: if `build` fails on meta or returns no module, or a buffer has another shape there.
    """
    if build is None:
        return {}
    values = Values()
    try:
        with torch.device("meta"), ValuesMode(values), ConstantsMode(values):
            made = build()
    except Exception as failure:
        raise ValueError(f"buffers() fails under torch.device('meta'): {type(failure).__name__}: {failure}") from failure
    if not isinstance(made, nn.Module):
        raise ValueError(f"buffers() must return the model as it is built, got a {type(made).__name__}")
    known = {name: known.value() for name, known in values_of_buffers(made, values).items()}
    held = dict(model.named_buffers())
    found = {name: value for name, value in known.items() if value is not None and name in held}
    for name, value in found.items():
        if value.shape != held[name].shape:
            raise ValueError(
                f"'{name}' is {tuple(value.shape)} in the model of buffers(), {tuple(held[name].shape)} in this one"
            )
    return found


def fill_buffers(model: nn.Module, found: Mapping[str, Tensor], names: Container[str]) -> set[str]:
    """Give those of these names their values. Returns the names of those that got some."""
    filled: set[str] = set()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in names and name in found:
                buffer.copy_(found[name])
                filled.add(name)
    return filled


__all__ = ["built_buffers", "fill_buffers"]
