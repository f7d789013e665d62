"""`full_params`: unsharded parameters inside a `with` block, to read and write."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.core import (
    ShardedParameter,
    Unit,
    all_gather_full,
    replace_rows,
    set_gradient,
    set_replacement,
    units_of,
    user_attributes,
)
from fullshard.errors import StateError, check_bool


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
    """Register plain, unsharded Parameters on the modules until the end of the block. Collective.

    The block must not be inside a forward or backward.

    Args:
        module: a sharded module, or a module that contains sharded modules.
        write: True copies the values of the parameters (with `grads` also of their gradients) back into the shards at the end
            of the block, also if the block raises. All ranks must write equal values: each rank keeps its rows of its own
            values.
        recurse: True unshards all units at and below `module`. False unshards only the unit of `module`, which must be sharded.
        rank0_only: True gives unsharded parameters to rank 0 of each mesh only; the other ranks keep their shards. It requires
            `write=False`.
        grads: True sets `.grad` of the parameters to their unsharded, averaged gradients.
        dtype: dtype of the unsharded parameters; None is the storage dtype of the shards. A narrower one rounds the shards when
            the values are copied back, also those that nobody wrote: pass `write=False` to read.
        device: device of the unsharded parameters; None is the device of the shards.

    Yields:
        `module`.

    Raises:
        ValueError: for `rank0_only` with `write`.
        StateError: inside a forward or backward; at the end of a block, if another Parameter was assigned to a module; and with
            `write`, before anything is written, if a parameter has another shape. If the block raises, this is a warning.

    Example:
        >>> with full_params(model, write=False, rank0_only=True, device="cpu"):              # doctest: +SKIP
        ...     weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    Source: FSDP1's `summon_full_params`.
    """
    for name, value in (("write", write), ("rank0_only", rank0_only), ("grads", grads)):
        check_bool(name, value)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype or None, got {dtype!r}.")
    if rank0_only and write:
        raise ValueError(
            "full_params(rank0_only=True) cannot write parameters that only rank 0 has. Pass write=False as well "
            "(summon_full_params: writeback=False)."
        )
    units = units_of(module, recurse)
    for unit in units:
        unit.check_idle(doing="full_params()")
    for unit in units:
        unit.reshard(doing="full_params()")
        unit.refresh()
    installed: list[tuple[ShardedParameter, nn.Parameter, torch.Size]] = []  # with the shape at first
    has_begun, raised = False, False
    for unit in units:
        unit.shown_by = "full_params()"
    # The names of the calls have the options, so ranks with other options raise, and name them.
    doing = f"full_params(write={write}, rank0_only={rank0_only}, grads={grads}, dtype={dtype})"

    def install(unit: Unit) -> None:
        """All-gather the parameters of a unit one by one, and register plain, unsharded ones."""
        agreement = unit.agreement(doing)
        for parameter in unit.parameters:
            sharded: Any = parameter.sharded
            whole, grad = all_gather_full(agreement, parameter.sharding, sharded), None
            if grads and sharded.grad is not None:
                named = unit.agreement(f"full_params(grads=True), gradient of '{parameter.name}',")
                grad = all_gather_full(named, parameter.sharding, sharded.grad)
            # Only after the all-gathers: every rank must take part in them.
            if rank0_only and any(coordinate != 0 for coordinate in parameter.sharding.mesh.get_coordinate() or ()):
                continue
            plain = nn.Parameter(whole.to(dtype=dtype, device=device), requires_grad=parameter.requires_grad)
            if grad is not None:
                plain.grad = grad.to(dtype=plain.dtype, device=plain.device)
            installed.append((parameter, plain, plain.shape))  # before the next all-gather, which may raise
            _show(parameter, plain)

    try:
        with torch.no_grad():
            for unit in units:
                install(unit)
        has_begun = True
        yield module
    except BaseException:
        raised = True
        raise
    finally:
        for unit in units:
            unit.shown_by = ""
        with torch.no_grad():
            # `_hide` returns False if the caller assigned another Parameter inside the block.
            assigned = [parameter.name for parameter, plain, _ in installed if not _hide(parameter, plain)]
            wrong = ""
            if assigned:
                wrong = (
                    f"Another Parameter was assigned to {assigned} inside full_params(). Write to the existing ones "
                    "(`p.copy_(...)`), or assign before fully_shard(). Nothing was written."
                )
            for parameter, plain, shape in installed if write else ():
                if not wrong and plain.shape != shape:
                    wrong = (
                        f"Expected parameter '{parameter.name}' to have its shape {tuple(shape)} at the end of full_params(), "
                        f"got {tuple(plain.shape)}. Nothing was written."
                    )
            if has_begun and wrong and raised:
                warnings.warn(wrong, stacklevel=3)
            elif has_begun and wrong:
                raise StateError(wrong)
            elif has_begun and write:
                for parameter, plain, _ in installed:
                    _write(parameter, plain, grad=grads)
                for unit in units:
                    unit.refresh(assigned=True)  # shards that were on meta


def _show(parameter: ShardedParameter, plain: nn.Parameter) -> None:
    """Register `plain`, an ordinary Parameter, in all slots until `_hide`. It gets the attributes of the sharded one."""
    plain.__dict__.update(user_attributes(parameter.sharded))
    set_replacement(plain, parameter.sharded)
    parameter.put(plain)


def _hide(parameter: ShardedParameter, plain: nn.Parameter) -> bool:
    """Undo `_show`, but keep the attributes of the plain parameter. Return False if a slot had yet another one."""
    sharded = parameter.sharded
    sharded.requires_grad_(plain.requires_grad)
    for key in user_attributes(sharded):
        del sharded.__dict__[key]
    sharded.__dict__.update(user_attributes(plain))
    found = all(slot.content is plain for slot in parameter.slots)
    parameter.put(sharded)
    return found


def _write(parameter: ShardedParameter, full: nn.Parameter, *, grad: bool) -> None:
    """Copy this rank's rows of a plain parameter into the shard, and with `grad` those of its gradient into `.grad`."""
    replace_rows(parameter, parameter.slice(full.detach()))
    if grad and full.grad is None:
        parameter.sharded.grad = None
    elif grad:
        rows = parameter.slice(full.grad)  # type: ignore[arg-type]
        set_gradient(parameter, rows.to(parameter.local.device, parameter.local.dtype))
