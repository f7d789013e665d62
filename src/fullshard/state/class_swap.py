"""Install units on modules; snapshots of a sharded model, for copies and pickles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard import _torch
from fullshard.core import (
    UNIT_CREATED,
    Originals,
    ParamRef,
    ParamSharding,
    ShardAxis,
    ShardedParameter,
    Slot,
    Unit,
    UnitOptions,
    attach_unit,
    clone_shard,
    detach_unit,
    install_hooks,
    make_unit,
    remove_hooks_from_copies,
    unit_of,
)
from fullshard.errors import StateError
from fullshard.policies import GradDtype

ClassMap = Callable[[type[nn.Module]], "type[nn.Module]"]  # maps the class of a module to its sharded class, or back


def keep_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return `cls`: the class map for modules whose class does not change."""
    return cls


def install_unit(
    unit: Unit,
    wrap_class: ClassMap,
    managed: Iterable[nn.Module] = (),
    originals: Originals | None = None,
) -> None:
    """Install a new unit on its modules: references to it, hooks, torch's marks of managed modules, and the sharded class.

    `originals`: the parameters that it sharded, with what they were before; None for a copy of a unit.
    """
    attach_unit(unit)
    install_hooks(unit)
    for module in managed:
        _torch.mark_managed(module)
    for root in unit.modules:
        root.__class__ = wrap_class(type(root))
    for notify in UNIT_CREATED:
        notify(unit, originals)


# --- copies and pickles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSnapshot:
    """Snapshot of one sharded parameter."""

    name: str  # qualified within its unit
    slots: list[tuple[nn.Module, str]]  # modules and attribute names it is registered under
    sharding: ParamSharding  # how it is sharded
    shard: nn.Parameter  # a copy of the sharded parameter
    attributes: dict[str, Any]  # attributes that the user set on the parameter
    keeps_dtype: bool  # True if it is all-gathered in its own dtype, whatever the policy
    grad_dtype: GradDtype  # dtype of its `.grad`


@dataclass(frozen=True)
class UnitSnapshot:
    """Snapshot of one unit."""

    modules: list[nn.Module]
    has_sharded_class: bool  # True if its modules have a class made by the class map
    name: str  # for logs and errors
    axis: ShardAxis
    options: UnitOptions
    global_id: int  # equal on all ranks
    parameters: list[ParameterSnapshot]


@dataclass(frozen=True)
class ShardedSnapshot:
    """Snapshot of a sharded model: plain modules with plain local shards, and the data to rebuild the units."""

    root: nn.Module  # a copy of the model, without units
    units: list[UnitSnapshot]


def to_snapshot(root: nn.Module, unwrap_class: ClassMap, memo: dict[int, Any] | None = None) -> ShardedSnapshot:
    """Return a snapshot of `root`, with copies of its modules.

    Args:
        root: a sharded module.
        unwrap_class: maps the sharded class of a module back to its own.
        memo: that of copy.deepcopy; afterwards it maps the ids of modules and sharded parameters to their copies. None to
            pickle the snapshot: it then has the sharded parameters themselves, as an optimizer in the same pickle has.

    Raises:
        StateError: inside a forward or backward of a unit, or if a unit also has modules outside of `root`.
    """
    pickles, memo = memo is None, {} if memo is None else memo
    modules = list(root.modules())
    inside = {id(module) for module in modules}
    units = list(dict.fromkeys(unit for module in modules if (unit := unit_of(module)) is not None))
    units = [unit for unit in units if not any(id(module) in memo for module in unit.modules)]  # else already copied
    for unit in units:
        unit.ensure_sharded(doing="copying or pickling")
        unit.refresh()
        for module in (*unit.modules, *(i.module for p in unit.parameters for i in p.slots)):
            if module is None or id(module) not in inside:
                raise StateError(
                    f"Unit '{unit.name}' also manages modules outside of the {type(root).__name__} that is copied or pickled. "
                    "Copy or pickle a module that contains all of them."
                )
        memo[id(unit)] = None  # keeps deepcopy from copying the unit with its process groups and buffers
        for parameter in unit.parameters:
            if pickles:
                memo[id(parameter.sharded)] = parameter.sharded
            elif id(parameter.sharded) not in memo:  # else an optimizer was copied before the model
                memo[id(parameter.sharded)] = clone_shard(parameter)
    has_sharded_class = [any(unwrap_class(type(module)) is not type(module) for module in unit.modules) for unit in units]
    with with_original_classes(units, unwrap_class):
        plain = copy.deepcopy(root, memo)
    parts: list[UnitSnapshot] = []
    for unit, has_class in zip(units, has_sharded_class):
        copies = [memo[id(module)] for module in unit.modules]
        remove_hooks_from_copies(unit, memo)
        for module in copies:
            detach_unit(module)
            _torch.detach_state(module)
        parameters = [
            ParameterSnapshot(
                parameter.name,
                [(memo[id(i.module)], i.name) for i in parameter.slots],
                parameter.sharding,
                memo[id(parameter.sharded)],
                {key: copy.deepcopy(value, memo) for key, value in parameter.user_attributes.items()},
                parameter.keeps_dtype,
                parameter.grad_dtype,
            )
            for parameter in unit.parameters
        ]
        parts.append(UnitSnapshot(copies, has_class, unit.name, unit.axis, unit.options, unit.global_id, parameters))
    return ShardedSnapshot(plain, parts)


def from_snapshot(parts: ShardedSnapshot, wrap_class: ClassMap) -> nn.Module:
    """Rebuild the units of a snapshot in place, and return its root (the inverse of `to_snapshot`)."""
    for unit_snapshot in parts.units:
        rebuilt: list[ShardedParameter] = []
        with torch.no_grad():
            for snapshot in unit_snapshot.parameters:
                ref = ParamRef(snapshot.name, snapshot.shard, [Slot(module, name) for module, name in snapshot.slots])
                parameter = ShardedParameter(
                    ref,
                    snapshot.sharding,
                    snapshot.shard,
                    keeps_dtype=snapshot.keeps_dtype,
                    grad_dtype=snapshot.grad_dtype,
                )
                parameter.sharded.__dict__.update(snapshot.attributes)
                rebuilt.append(parameter)
            unit = make_unit(
                unit_snapshot.modules, rebuilt, unit_snapshot.axis, unit_snapshot.options, global_id=unit_snapshot.global_id
            )
            unit.unit_name.name = unit_snapshot.name
            for parameter in rebuilt:
                parameter.put(parameter.sharded)
        install_unit(unit, wrap_class if unit_snapshot.has_sharded_class else keep_class)
    return parts.root


@contextmanager
def with_original_classes(units: Iterable[Unit], unwrap_class: ClassMap) -> Iterator[None]:
    """Give the modules of `units` their original classes inside the block."""
    classes = [(module, type(module)) for unit in units for module in unit.modules]
    for module, cls in classes:
        module.__class__ = unwrap_class(cls)
    try:
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls
