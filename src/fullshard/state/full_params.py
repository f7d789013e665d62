"""`full_params`: unsharded parameters inside a `with` block, to read and write."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard import _torch
from fullshard.core import (
    ShardAxis,
    ShardedParameter,
    Unit,
    all_gather_full,
    units_of,
    write_unsharded,
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
            `write`, before anything is written, if a parameter has another shape, or the shards were written meanwhile, as by
            an optimizer step (with `grads`, also their gradients, as by clipping). If the block raises, this is a warning.

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
    # No rank changes anything before all ranks are here, so that a diverged rank leaves all of them intact.
    for unit in units[:1]:
        _check_equal_options(unit, units, (write, rank0_only, grads, dtype))
    installed: list[_Installed] = []
    before = [_shard_state(unit, grads=grads) for unit in units]
    has_begun, raised = False, False
    for unit in units:
        unit.shows_plain = True
    try:
        with torch.no_grad():
            for unit in units:
                _install_full(unit, installed, rank0_only=rank0_only, grads=grads, dtype=dtype, device=device)
        has_begun = True
        yield module
    except BaseException:
        raised = True
        raise
    finally:
        for unit in units:
            unit.shows_plain = False
        with torch.no_grad():
            # `restore` returns False if the caller assigned another Parameter inside the block.
            assigned = [one.parameter.name for one in installed if not one.parameter.restore(one.plain)]
            if has_begun and (write or assigned):
                after = [_shard_state(unit, grads=grads) for unit in units]
                wrong = _why_not_written(assigned, installed, units, [one != other for one, other in zip(before, after)])
                if wrong is None:
                    for one in installed:
                        write_unsharded(one.parameter, one.plain, grad=grads)
                    for unit in units:
                        unit.refresh(assigned=True)  # shards that were on meta
                elif raised:
                    warnings.warn(wrong, stacklevel=3)
                else:
                    raise StateError(wrong)


def _check_equal_options(unit: Unit, units: Sequence[Unit], options: tuple[object, ...]) -> None:
    """Raise ValueError on all ranks if they have other options, or gradients of other parameters. Collective.

    Each rank would send something else: one its gradient, another one the next parameter.
    """
    grads = options[2]
    by_axis: dict[object, tuple[ShardAxis, list[bool]]] = {(own := unit.axis.transport).key: (own, [])}
    for parameter in (parameter for other in units for parameter in other.parameters):
        axis = parameter.sharding.axis.transport
        has_grad = bool(grads) and parameter.sharded.grad is not None
        by_axis.setdefault(axis.key, (axis, []))[1].append(has_grad)
    contents = [(axis, repr((options, found)).encode()) for axis, found in by_axis.values()]
    if not unit.agreement("full_params()").equal_on_axes(contents):
        raise ValueError(
            "full_params(): write, rank0_only, grads or dtype differs between ranks or, with grads=True, the ranks have "
            "gradients of different parameters. Pass the same on all ranks, and set the same gradients to None."
        )


@dataclass(frozen=True, slots=True)
class _Installed:
    """A plain Parameter in the place of a sharded one, and its shape at first."""

    parameter: ShardedParameter
    plain: nn.Parameter
    shape: torch.Size


def _shard_state(unit: Unit, *, grads: bool) -> list[object]:
    """Return a value that changes with each write to the shards of a unit; with `grads`, to their gradients as well."""
    found: list[object] = [group.version() for group in unit.groups]
    if grads:
        local = [None if p.sharded.grad is None else _torch.local_part(p.sharded.grad) for p in unit.parameters]
        found += [None if one is None else (one.data_ptr(), one._version) for one in local]
    return found


def _why_not_written(
    assigned: list[str], installed: Sequence[_Installed], units: Sequence[Unit], changed: Sequence[bool]
) -> str | None:
    """Return why the values of a block cannot be written back; None if they can."""
    if assigned:
        return (
            f"Another Parameter was assigned to {assigned} inside full_params(). Write to the existing ones (`p.copy_(...)`), "
            "or assign before fully_shard(). Nothing was written."
        )
    for one in installed:
        if one.plain.shape != one.shape:
            return (
                f"Expected parameter '{one.parameter.name}' to have its shape {tuple(one.shape)} at the end of full_params(), "
                f"got {tuple(one.plain.shape)}. Nothing was written."
            )
    names = [unit.name for unit, is_changed in zip(units, changed) if is_changed]
    if names:
        return (
            f"Shards or gradients of units {names[:4]} were written inside full_params(), as by an optimizer step or by "
            "clipping, and the end of the block would overwrite them. Do that outside of the block, or pass write=False. What "
            "the block wrote to the full parameters is dropped."
        )
    return None


def _install_full(
    unit: Unit,
    installed: list[_Installed],
    *,
    rank0_only: bool,
    grads: bool,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> None:
    """All-gather the parameters of a unit one by one, and register plain, unsharded ones.

    Each one is appended to `installed` before the next all-gather, so that after an error the caller can restore the sharded
    parameters.
    """
    agreement = unit.agreement("full_params()")
    for parameter in unit.parameters:
        sharded: Any = parameter.sharded
        whole = all_gather_full(agreement, parameter.sharding, sharded)
        grad = all_gather_full(agreement, parameter.sharding, sharded.grad) if grads and sharded.grad is not None else None
        # Only after the all-gathers: every rank must take part in them.
        if rank0_only and any(coordinate != 0 for coordinate in parameter.sharding.mesh.get_coordinate() or ()):
            continue
        plain = nn.Parameter(whole.to(dtype=dtype, device=device), requires_grad=parameter.requires_grad)
        if grad is not None:
            plain.grad = grad.to(dtype=plain.dtype, device=plain.device)
        installed.append(_Installed(parameter, plain, plain.shape))
        parameter.install_plain(plain)
