"""Trace of an optimizer step over one rank's shards, on meta: its states, its temporaries and its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fullshard.foresight.owners import OwnerStep
from fullshard.foresight.trace import Allocated, Event, Freed, Op, events_of

Factory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def muon_with_adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Stand for Muon on the matrices of a model (`matrices_of`) and AdamW on the rest: two optimizers, so it makes none."""
    raise ValueError("optimizer='muon' needs a model: its matrices are chosen by name and role.")


OPTIMIZERS: dict[str, Factory] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "muon": muon_with_adamw,
}
"""Optimizers by the names for `explain(optimizer=...)`, with the arguments that affect memory."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Memory and operators of an optimizer step on one rank."""

    states: tuple[int, ...]  # bytes of each state tensor, in the order of allocation
    events: Sequence[Event]  # operators and temporaries of the second step; the first one also allocates the states
    owners: OwnerStep | None = None  # exchange of whole matrices with their owners, which comes first; None without one
    on_host: bool = False  # True if the shards and the states are in host memory, so that the CPU runs the step


@lru_cache(64)
def optimizer_step(
    factory: Factory, shards: tuple[tuple[tuple[int, ...], torch.dtype], ...], *, accelerator: bool
) -> OptimizerStep:
    """Trace two optimizer steps over shards, of (shape, dtype) each, on meta, and return the second one.

    `accelerator`: whether the optimizer uses torch's foreach implementation by default, as it does on an accelerator.
    """
    parameters = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in shards]
    made: list[Any] = []
    at_first = events_of(lambda: made.append(factory(parameters)), parameters)
    (optimizer,) = made
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must make a torch.optim.Optimizer of parameters, got a {type(optimizer).__name__}.")
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        # The implementation of the device: on meta, torch has no fused one, and chooses differently.
        if fused:
            group["fused"] = group["foreach"] = False
        elif "foreach" in group and group["foreach"] is None:
            group["foreach"] = accelerator
    try:
        states = (*_surviving_bytes(at_first), *_surviving_bytes(_step(optimizer, parameters)))
        events = _step(optimizer, parameters)
    except Exception as failure:
        raise ValueError(
            f"The step of {type(optimizer).__name__} does not run on meta ({failure}). Pass explain() another optimizer= with "
            "the same states, as a name or a function of parameters."
        ) from failure
    if fused:
        # One kernel, without temporaries, reads states, parameters and gradients, and writes states and parameters.
        touched = sum(states) + sum(3 * p.numel() * p.itemsize for p in parameters)
        events = [Op("fused step", 0, touched + sum(states), torch.float32)]
    return OptimizerStep(states, events)


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Event]:
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None), *states]
    events = events_of(optimizer.step, held)
    for parameter in parameters:
        parameter.grad = None
    return events


def _surviving_bytes(events: Sequence[Event]) -> list[int]:
    """Return the bytes of the storages that are not freed again."""
    died = {event.storage for event in events if isinstance(event, Freed)}
    return [event.nbytes for event in events if isinstance(event, Allocated) and event.storage not in died]


def optimizer_factory(optimizer: str | Factory) -> Factory:
    """Return the optimizer factory of this name, or the factory itself."""
    if callable(optimizer):
        return optimizer
    with suppress(KeyError, TypeError):
        return OPTIMIZERS[optimizer]
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a function of parameters that returns one, got {optimizer!r}."
    )
