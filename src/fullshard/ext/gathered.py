"""`gathered`: unsharded parameters inside a `with` block, to differentiate through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core import BackwardHook, ParamGroup, units_of


@contextmanager
def gathered(module: nn.Module, *, grad: bool = True, recurse: bool = False) -> Iterator[dict[str, Tensor]]:
    """All-gather the parameters of the unit `module` as differentiable tensors. Collective.

    Use it for computation outside of forward: weight decay terms, tied projections, penalties on weights. Each group is
    all-gathered once, in its compute dtype, into memory that lives as long as the graph. The gradients are reduced once,
    together with those of the unit's own forward.

    Args:
        module: a sharded module; with `recurse`, a module that contains sharded modules.
        grad: True lets gradients flow back to the shards. Then either all ranks or no rank must use the parameters in the loss.
        recurse: True includes the parameters of all units below.

    Yields:
        A dict from qualified names to unsharded tensors.

    Raises:
        StateError: inside a forward or backward.

    Example:
        >>> with gathered(model.embed) as params:                                             # doctest: +SKIP
        ...     loss = loss + 0.1 * params["weight"].square().mean()
    """
    units = units_of(module, recurse)
    prefixes = {id(submodule): f"{name}." if name else "" for name, submodule in module.named_modules()}
    gathered_tensors: dict[str, Tensor] = {}
    for unit in units:
        unit.check_idle(doing="gathered()")
        unit.refresh()
        for group in unit.groups:
            tensors = group.all_gather_copy(unit.runtime.communicator, "gather by hand")
            if grad and torch.is_grad_enabled() and group.trainable:
                call = unit.runtime.scheduler.call_outside(unit.number, copied=True)
                # Autograd calls the backward of a Function only if an input requires grad, and gathered tensors do not.
                handle = torch.zeros((), device=tensors[0].device, requires_grad=True)
                source = _Source(group, BackwardHook(unit, call), handle)
                group.copies.add(source)
                outputs: Any = _Gathered.apply(handle, source, *tensors)
                tensors = list(outputs)
            for parameter, tensor in zip(group.parameters, tensors):
                inside = [slot for slot in parameter.slots if id(slot.module) in prefixes]
                # A unit of several modules also has parameters outside of `module`, which have no qualified name in it.
                name = prefixes[id(inside[0].module)] + inside[0].name if inside else f"{unit.name}/{parameter.name}"
                gathered_tensors[name] = tensor if parameter.current.requires_grad else tensor.detach()
    yield gathered_tensors


@dataclass(frozen=True, eq=False)
class _Source:
    """Arguments for the backward of gathered tensors."""

    group: ParamGroup  # the group that was all-gathered
    hook: BackwardHook  # notifies the runtime that the backward of the gathered tensors began
    handle: Tensor  # the leaf of their graph


class _Gathered(torch.autograd.Function):
    """Identity on gathered tensors. Its backward accumulates their gradients, to be reduced at the end of backward."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, source: _Source, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.source = source
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        source: _Source = ctx.source
        source.hook()
        pairs = [(one, grad if one.requires_grad else None) for one, grad in zip(source.group.parameters, grads)]
        reduce = source.group.dtypes.reduce
        own = [None if g is None else one.sharding.grad_to_local(g, name=one.name, reduce=reduce) for one, g in pairs]
        # Clones, since autograd may share or expand the grads.
        kept = [None if grad is None else grad.clone(memory_format=torch.contiguous_format) for grad in own]
        source.group.grads.accumulate(kept)
        return (None, None, *(None for _ in grads))
