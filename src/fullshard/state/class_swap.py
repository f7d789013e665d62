"""Sharded classes of modules; installation of units on modules; snapshots of a sharded model, for copies and pickles."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard import _torch
from fullshard.core import (
    UNIT_CREATED,
    Originals,
    ParamRef,
    ParamSharding,
    Runtime,
    ShardAxis,
    ShardedParameter,
    Slot,
    Unit,
    UnitOptions,
    attach_unit,
    clone_shard,
    detach_unit,
    install_hooks,
    remove_hooks_from_copies,
    units_below,
    user_attributes,
)
from fullshard.errors import StateError
from fullshard.policies import GradDtype

_PARTS = "_fullshard_parts"  # attribute of a sharded class: the mixin and the original class
_SHARDED_CLASSES: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


def sharded_class(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    """Return the only subclass of `mixin` and `cls`, the class that sharded modules of class `cls` get."""
    if (mixin, cls) not in _SHARDED_CLASSES:
        attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__, _PARTS: (mixin, cls)}
        made = type(f"FSDP{cls.__name__}", (mixin, cls), attributes)
        _SHARDED_CLASSES.setdefault((mixin, cls), made)  # another thread may have created one meanwhile
    return _SHARDED_CLASSES[mixin, cls]


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the original class of a sharded class (the inverse of `sharded_class`), and any other class unchanged."""
    return getattr(cls, _PARTS, (None, cls))[1]


def install_unit(unit: Unit, mixin: type | None, managed: Iterable[nn.Module] = (), originals: Originals | None = None) -> None:
    """Install a new unit on its modules: references to it, hooks, torch's marks of managed modules, and the sharded class.

    `mixin`: base of the sharded class; None to keep the class. `originals`: the parameters that were sharded; None for a copy.
    """
    attach_unit(unit)
    install_hooks(unit)
    for module in managed:
        _torch.mark_managed(module)
    for root in unit.modules:
        if mixin is not None:
            root.__class__ = sharded_class(mixin, type(root))
    for notify in UNIT_CREATED:
        notify(unit, originals)


# --- copies and pickles --------------------------------------------------------------------------------------------------


class ParameterSnapshot(NamedTuple):
    """Snapshot of one sharded parameter."""

    ref: ParamRef  # name, sharded parameter (a copy, unless pickled), slots
    sharding: ParamSharding
    attributes: dict[str, Any]  # attributes that the user set on the parameter
    keeps_dtype: bool  # True if it is all-gathered in its own dtype, whatever the policy
    grad_dtype: GradDtype  # dtype of its `.grad`


@dataclass(frozen=True)
class UnitSnapshot:
    """Snapshot of one unit."""

    modules: list[nn.Module]
    mixin: type | None  # base of the class of its modules; None if they kept theirs
    name: str  # for logs and errors
    axis: ShardAxis
    options: UnitOptions
    global_id: int  # equal on all ranks
    parameters: list[ParameterSnapshot]


@dataclass(frozen=True)
class ShardedSnapshot:
    """Snapshot of a sharded model: modules of their original classes, sharded parameters, and the data to rebuild units."""

    root: nn.Module  # a copy of the model, without units
    units: list[UnitSnapshot]


def to_snapshot(root: nn.Module, memo: dict[int, Any] | None = None) -> ShardedSnapshot:
    """Return a snapshot of `root`, with copies of its modules.

    `memo`: the memo of copy.deepcopy. Afterwards it maps ids of modules and sharded parameters to their copies. None for a
    pickle: the snapshot then has the sharded parameters themselves, as an optimizer in the same pickle has. Raises StateError
    inside a forward or backward of a unit, or if a unit also has modules outside of `root`.
    """
    pickles, memo = memo is None, {} if memo is None else memo
    inside = {id(module) for module in root.modules()}
    # Without units whose modules are copied already.
    units = [unit for unit in units_below([root]) if not any(id(module) in memo for module in unit.modules)]
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
    with with_original_classes(units):
        plain = copy.deepcopy(root, memo)
    parts: list[UnitSnapshot] = []
    for unit in units:
        mixin = getattr(type(unit.modules[0]), _PARTS, (None, None))[0]
        copies = [memo[id(module)] for module in unit.modules]
        remove_hooks_from_copies(unit, memo)
        for module in copies:
            detach_unit(module)
            _torch.detach_state(module)
        parameters: list[ParameterSnapshot] = []
        for parameter in unit.parameters:
            slots = [Slot(memo[id(slot.module)], slot.name) for slot in parameter.slots]
            ref = ParamRef(parameter.name, memo[id(parameter.sharded)], slots)
            own = {key: copy.deepcopy(value, memo) for key, value in user_attributes(parameter.sharded).items()}
            parameters.append(ParameterSnapshot(ref, parameter.sharding, own, parameter.keeps_dtype, parameter.grad_dtype))
        parts.append(UnitSnapshot(copies, mixin, unit.name, unit.axis, unit.options, unit.global_id, parameters))
    return ShardedSnapshot(plain, parts)


def from_snapshot(parts: ShardedSnapshot) -> nn.Module:
    """Rebuild the units of a snapshot in place, and return its root (the inverse of `to_snapshot`)."""
    for one in parts.units:
        rebuilt: list[ShardedParameter] = []
        with torch.no_grad():
            for ref, sharding, attributes, keeps_dtype, grad_dtype in one.parameters:
                parameter = ShardedParameter(ref, sharding, ref.parameter, keeps_dtype=keeps_dtype, grad_dtype=grad_dtype)
                parameter.sharded.__dict__.update(attributes)
                rebuilt.append(parameter)
            runtime = Runtime.of(one.axis.device, one.options.comm)
            unit = Unit(one.modules, rebuilt, one.axis, one.options, runtime, global_id=one.global_id)
            unit.unit_name.name = one.name
            for parameter in rebuilt:
                parameter.put(parameter.sharded)
        install_unit(unit, one.mixin)
    return parts.root


@contextmanager
def with_original_classes(units: Iterable[Unit]) -> Iterator[None]:
    """Give the modules of `units` their original classes inside the block."""
    classes = [(module, type(module)) for unit in units for module in unit.modules]
    for module, cls in classes:
        module.__class__ = plain_class(cls)
    try:
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls
