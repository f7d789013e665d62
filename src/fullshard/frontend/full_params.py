"""Full parameters for the length of a `with` block: to read and write, to differentiate through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import StateError
from fullshard.frontend.module import units_of
from fullshard.params.group import ParamGroup
from fullshard.params.shard_values import write_full
from fullshard.params.sharded_param import ShardedParameter
from fullshard.runtime.backward import BackwardHook
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit


@contextmanager
def full_params(
    module: nn.Module,
    *,
    write: bool = True,
    recurse: bool = True,
    rank0_only: bool = False,
    grads: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[nn.Module]:
    """Have the modules hold ordinary, full Parameters in the storage dtype, outside of forward and backward. Collective.

    Args:
        module: a module that is a unit, or holds some.
        write: what was written to a parameter (or, with `grads`, to its gradient) is kept in the shards at the end. All
            ranks must write the same; each keeps its own rows of what it has.
        recurse: whether the units below are full as well; otherwise `module` must be a unit, and is full alone.
        rank0_only: only rank 0 of each mesh has full parameters, the others their shards. Needs `write=False`.
        grads: parameters have their full, averaged gradients.
        dtype: of the full parameters; None takes that of the shards.
        device: of the full parameters; None takes that of the shards.

    Yields:
        `module`.

    Raises:
        ValueError: for `rank0_only` with `write`.
        StateError: inside a forward or backward, or if a slot holds another Parameter at the end of a block that writes.

    Example:
        >>> with full_params(model, write=False, rank0_only=True, device="cpu"):              # doctest: +SKIP
        ...     weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    Source: FSDP1's `summon_full_params`.
    """
    if rank0_only and write:
        raise ValueError("full_params(rank0_only=True) cannot write what only rank 0 has: pass write=False as well")
    units = list(units_of(module, recurse))
    for unit in units:
        runtime_of(unit).requests.check_idle(unit, doing="full_params()")
    for unit in units:
        runtime_of(unit).requests.reshard(unit, doing="full_params()")
        runtime_of(unit).requests.refresh(unit)
    for unit in units[:1]:
        runtime_of(unit).requests.meet(unit, doing="full_params()")
    shown: list[tuple[ShardedParameter, nn.Parameter]] = []
    assigned: list[str] = []
    for unit in units:
        unit.exposure.plain = True
    try:
        with torch.no_grad():
            for unit in units:
                _install_full(unit, shown, rank0_only=rank0_only, grads=grads, dtype=dtype, device=device)
        yield module
    finally:
        for unit in units:
            unit.exposure.plain = False
        with torch.no_grad():
            assigned = [parameter.name for parameter, plain in shown if not parameter.restore(plain)]
    if write and assigned:
        raise StateError(
            f"inside full_params() another Parameter was assigned to {assigned}: write to the ones that are there "
            "(`p.copy_(...)`), or assign outside of the block. Nothing was written"
        )
    if write:
        with torch.no_grad():
            for parameter, plain in shown:
                write_full(parameter, plain, grad=grads)


def _install_full(
    unit: Unit,
    shown: list[tuple[ShardedParameter, nn.Parameter]],
    *,
    rank0_only: bool,
    grads: bool,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> None:
    """Gather the parameters of a unit one by one, install plain ones, and append both to `shown` as they are installed."""
    setup = unit.setup_collectives("full_params()")
    for parameter in unit.parameters:
        sharded: Any = parameter.sharded
        full = setup.full(parameter.sharding, sharded)
        grad = setup.full(parameter.sharding, sharded.grad) if grads and sharded.grad is not None else None
        if rank0_only and any(coordinate != 0 for coordinate in parameter.sharding.mesh.get_coordinate() or ()):
            continue
        plain = nn.Parameter(full.to(dtype=dtype, device=device), requires_grad=parameter.requires_grad)
        if grad is not None:
            plain.grad = grad.to(dtype=plain.dtype, device=plain.device)
        shown.append((parameter, plain))
        parameter.install_plain(plain)


# --- differentiable ------------------------------------------------------------------------------------------------------


@contextmanager
def gathered(module: nn.Module, *, grad: bool = True, recurse: bool = False) -> Iterator[dict[str, Tensor]]:
    """Full parameters of the unit `module` as tensors that can be computed and differentiated with. Collective.

    For what happens outside of forward: weight decay terms, tied projections, penalties on weights. Each group is gathered
    once, in its compute dtype, into memory that lives as long as the graph; gradients are reduced once, together with those
    of the unit's own forward.

    Args:
        module: a module that is a unit; with `recurse`, one that holds some.
        grad: whether gradients flow back to the shards. Every rank must then use the parameters in its loss, or none.
        recurse: also those of the units below.

    Yields:
        qualified name -> full tensor.

    Raises:
        StateError: inside a forward or backward.

    Example:
        >>> with gathered(model.embed) as params:                                             # doctest: +SKIP
        ...     loss = loss + 0.1 * params["weight"].square().mean()
    """
    units = list(units_of(module, recurse))
    prefixes = {id(inner): f"{name}." if name else "" for name, inner in module.named_modules()}
    found: dict[str, Tensor] = {}
    for unit in units:
        runtime_of(unit).requests.check_idle(unit, doing="gathered()")
        runtime_of(unit).requests.refresh_for_read(unit)
        for group in unit.groups:
            tensors = runtime_of(unit).requests.gather_copy(group)
            if grad and torch.is_grad_enabled() and group.trainable:
                source = _Source(group, runtime_of(unit).requests.register_copied_use(unit))
                handle = torch.zeros((), device=tensors[0].device, requires_grad=True)
                outputs: Any = _Gathered.apply(handle, source, *tensors)
                tensors = list(outputs)
            for parameter, tensor in zip(group.parameters, tensors):
                places = [(i.module, i.name) for i in parameter.slots]
                inner = [prefixes[id(m)] + n for m, n in places if id(m) in prefixes]
                name = inner[0] if inner else f"{unit.name}/{parameter.name}"  # of a list, in a module beside this one
                found[name] = tensor if parameter.requires_grad else tensor.detach()
    yield found


@dataclass(frozen=True, eq=False)
class _Source:
    """Where gathered tensors come from, and who is told of their backward."""

    group: ParamGroup
    hook: BackwardHook


class _Gathered(torch.autograd.Function):
    """The identity on gathered tensors; backward keeps their gradients for the reduction at the end of that backward."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, source: _Source, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.source = source
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        source: _Source = ctx.source
        source.hook()
        parameters: Sequence[ShardedParameter] = source.group.parameters
        owned: list[Tensor | None] = [None] * len(grads)  # autograd may give one tensor to several, or expand it
        for index, (parameter, grad) in enumerate(zip(parameters, grads)):
            if grad is not None and parameter.requires_grad:
                owned[index] = parameter.sharding.grad_to_local(grad, name=parameter.name).clone(
                    memory_format=torch.contiguous_format
                )
        source.group.grads.accumulate(owned)
        return (None, None, *(None for _ in grads))


__all__ = ["full_params", "gathered"]
