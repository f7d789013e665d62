"""`undo`: plain modules with unsharded parameters, out of sharded ones."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from fullshard import _torch
from fullshard.core import (
    LOGICAL,
    Agreement,
    ShardedParameter,
    all_gather_unsharded,
    detach_unit,
    set_replacement,
    units_of,
    user_attributes,
)
from fullshard.errors import StateError, warn_once
from fullshard.state.class_swap import plain_class

M = TypeVar("M", bound=nn.Module)


def undo(module: M) -> M:
    """Undo `fully_shard`: make a plain module with unsharded parameters, in place and on every rank. Collective.

    Parameters keep their gradients, attributes, hooks, ties and `requires_grad`. Optimizers follow them in their next step.
    Before it, their `zero_grad()` reaches the old parameters only, so clear gradients first. A unit of several modules is
    undone as a whole, also if some of them are outside of `module`.

    Args:
        module: a sharded module, or a module that contains sharded modules.

    Returns:
        `module`, with the class it had before `fully_shard`.

    Raises:
        StateError: inside a forward, backward or resident(), or while gradients are accumulated but not reduced. Nothing has
            changed then.

    Example:
        >>> torch.save(undo(model).state_dict(), "weights.pt")                                # doctest: +SKIP
    """
    units = units_of(module, True)
    for unit in units:
        unit.check_idle(doing="undo()")
        unit.check_step_over(doing="undo()")
        if unit.record.resident_blocks:
            raise StateError(f"undo() was called inside resident() of unit '{unit.name}'. Call it after the block.")
    # Barrier: no rank changes anything before all ranks are here, so that a diverged rank leaves all of them intact.
    for unit in units[:1]:
        unit.agreement("undo()").barrier()
    for unit in units:
        agreement = unit.agreement("undo()")
        unit.reshard(doing="undo()")
        unit.refresh()
        with torch.inference_mode(False):  # or the parameters could not be trained
            for parameter in unit.parameters:
                _unshard(parameter, agreement)
    for unit in units:  # the inverse of `class_swap.install_unit`
        for root in unit.modules:
            root.__class__ = plain_class(type(root))
            _torch.detach_state(root)
            detach_unit(root)
        unit.runtime.unregister(unit)
    return module


def _unshard(parameter: ShardedParameter, agreement: Agreement) -> None:
    """Register an ordinary, unsharded Parameter in all slots, with gradient, attributes and hooks. Collective."""
    sharded: Any = parameter.sharded
    sharding = parameter.sharding
    whole = all_gather_unsharded(agreement, sharding, sharded)
    if type(whole) is not type(parameter.local):
        warn_once(
            f"Parameter '{parameter.name}' of unit '{parameter.unit_name.name}' was sharded as a "
            f"{type(parameter.local).__name__} and is a {type(whole).__name__} from now on, since that is what an all-gather "
            "of its class returns. Convert the model again."
        )
    plain = sharding.to_parameter(whole, requires_grad=sharded.requires_grad)
    plain.__dict__.update(user_attributes(parameter.sharded))
    _torch.carry_hooks(sharded, plain)
    if parameter.grad_dtype.explicit:
        _torch.set_grad_dtype(plain, parameter.grad_dtype.dtype)
    if sharded.grad is not None:
        plain.grad = sharding.to_module(all_gather_unsharded(agreement, sharding, sharded.grad))
    set_replacement(sharded, plain)
    sharded.grad = None
    sharded.__dict__.pop(LOGICAL, None)
    parameter.put(plain)
