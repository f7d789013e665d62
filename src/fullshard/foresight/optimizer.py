"""A step of the optimizer over this rank's shards, on meta: its states, its temporaries and its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullshard.foresight.trace import Born, Died, Event, Op, recorded

Factory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""By the names that `explain(optimizer=...)` takes, with the arguments that need memory."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What a step needs on one rank.

    states: bytes of each tensor that stays from step to step, in the order in which they are made.
    changes: temporaries of the second step in order: (number, bytes) when one is allocated, (number, 0) when it is freed.
    ops: operators of the second step.
    """

    states: tuple[int, ...]
    changes: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]


def optimizer_step(
    factory: Factory, shards: Sequence[tuple[tuple[int, ...], torch.dtype]], *, accelerator: bool
) -> OptimizerStep:
    """Step twice over shards on meta.

    Args:
        factory: makes the optimizer out of an iterable of parameters.
        shards: (shape, dtype) of each trainable parameter's local shard.
        accelerator: whether the optimizer takes torch's foreach implementation by default, as it does on an accelerator.

    Returns:
        The step. With `fused=True` it has no temporaries: one kernel reads and writes all.

    Raises:
        ValueError: if the factory returns no optimizer, or its step cannot run on meta.
    """
    parameters = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in shards]
    made: list[Any] = []
    at_first = recorded(lambda: made.append(factory(parameters)), parameters)
    (optimizer,) = made
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must make a torch.optim.Optimizer of parameters, got a {type(optimizer).__name__}")
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        _choose(group, accelerator=accelerator, fused=fused)
    try:
        states = (*_kept(at_first), *_kept(_step(optimizer, parameters)))
        events = _step(optimizer, parameters)
    except Exception as failure:
        raise ValueError(
            f"the step of {type(optimizer).__name__} does not run on meta ({failure}): give explain() another optimizer= of "
            "the same states, as a name or a function of parameters"
        ) from failure
    if fused:
        touched = sum(states) + sum(3 * p.numel() * p.itemsize for p in parameters)  # reads all, writes all but gradients
        return OptimizerStep(states, (), (Op("fused step", 0, touched + sum(states), torch.float32),))
    changes = [(event.storage, event.nbytes if isinstance(event, Born) else 0) for event in events if not isinstance(event, Op)]
    return OptimizerStep(states, tuple(changes), tuple(event for event in events if isinstance(event, Op)))


def _choose(group: dict[str, Any], *, accelerator: bool, fused: bool) -> None:
    """Run on meta as it runs on the device: meta knows neither fused steps nor torch's defaults for accelerators."""
    if fused:
        group["fused"] = group["foreach"] = False
    elif "foreach" in group and group["foreach"] is None:
        group["foreach"] = accelerator


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Born | Died | Op]:
    """The events of a step."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    held = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None), *_states(optimizer)]
    events = [event for event in recorded(optimizer.step, held) if isinstance(event, (Born, Died, Op))]
    for parameter in parameters:
        parameter.grad = None
    return events


def _kept(events: Sequence[Event]) -> list[int]:
    """Bytes of storages that stay."""
    died = {event.storage for event in events if isinstance(event, Died)}
    return [event.nbytes for event in events if isinstance(event, Born) and event.storage not in died]


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def named(optimizer: str | Factory) -> Factory:
    """The factory of a name, or the factory itself."""
    if callable(optimizer):
        return optimizer
    with suppress(KeyError, TypeError):
        return OPTIMIZERS[optimizer]
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a function of parameters that returns one, got {optimizer!r}"
    )


__all__ = ["OPTIMIZERS", "Factory", "OptimizerStep", "named", "optimizer_step"]
