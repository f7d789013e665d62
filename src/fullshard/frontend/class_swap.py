"""Putting units on modules and taking them off; carrying a sharded model elsewhere: copies, pickles, plain modules again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.frontend import hooks
from fullshard.frontend.fsdp2_state import UnitView
from fullshard.params.shard_values import clone_shard, unshard_permanently
from fullshard.params.sharded_param import ShardedParameter, is_ours
from fullshard.policies import GradDtype
from fullshard.runtime import lint
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.runtime import make_unit, runtime_of
from fullshard.runtime.unit import Unit, attach, detach, unit_of
from fullshard.sharding.mesh import ShardAxis
from fullshard.sharding.module_tree import ParamRef, Slot
from fullshard.sharding.param_sharding import ParamSharding

Dress = Callable[[type[nn.Module]], "type[nn.Module]"]  # the class of a unit's module, from the class it had


def as_it_is(cls: type[nn.Module]) -> type[nn.Module]:
    """The dress of modules whose class does not change."""
    return cls


def assemble(unit: Unit, dress: Dress, managed: Iterable[nn.Module]) -> None:
    """Put a new unit on its modules: strong references to it, hooks, marks, and their class."""
    attach(unit)
    hooks.install(unit)
    lint.mark(unit)
    view = UnitView(unit)
    for module in managed:
        _torch.mark_managed(module)
    for root in unit.modules:
        _torch.attach_state(root, view)
        root.__class__ = dress(type(root))


def disassemble(unit: Unit, undress: Dress) -> None:
    """The opposite of `assemble`. The parameters stay as they are."""
    for module in unit.modules:
        module.__class__ = undress(type(module))
        _torch.detach_state(module)
        detach(module)
    hooks.remove(unit)
    runtime_of(unit).executor.unregister(unit)


# --- copies and pickles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSnapshot:
    """One sharded parameter, as a value: where it is installed, how it is cut, and this rank's shard of it."""

    name: str
    slots: list[tuple[nn.Module, str]]
    cut: ParamSharding
    shard: nn.Parameter
    attributes: dict[str, Any]
    keeps_dtype: bool
    grad_dtype: GradDtype


@dataclass(frozen=True)
class UnitSnapshot:
    """One unit, as a value."""

    modules: list[nn.Module]
    dressed: bool  # whether the class of its modules says that they are sharded
    name: str
    axis: ShardAxis
    options: UnitOptions
    global_id: int
    parameters: list[ParameterSnapshot]


@dataclass(frozen=True)
class ShardedSnapshot:
    """A sharded model taken apart: plain modules that hold plain local shards, and what makes units of them again."""

    root: nn.Module
    units: list[UnitSnapshot]


def take_apart(root: nn.Module, undress: Dress, memo: dict[int, Any] | None = None) -> ShardedSnapshot:
    """A copy of `root` in parts. Raises StateError while a unit's forward or backward runs, or if one reaches outside.

    memo: as of copy.deepcopy; afterwards it knows which copy stands for which module.
    """
    memo = {} if memo is None else memo
    modules = list(root.modules())
    inside = {id(module) for module in modules}
    units = list(dict.fromkeys(unit for module in modules if (unit := unit_of(module)) is not None))
    units = [unit for unit in units if not any(id(module) in memo for module in unit.modules)]  # copied already
    for unit in units:
        runtime_of(unit).requests.ensure_sharded(unit, doing="copying or pickling")
        runtime_of(unit).requests.refresh(unit)
        for module in (*unit.modules, *(i.module for p in unit.parameters for i in p.slots)):
            if module is None or id(module) not in inside:
                raise StateError(
                    f"unit '{unit.name}' also manages modules outside of the {type(root).__name__} that is copied or pickled: "
                    "copy or pickle a unit that contains all of them"
                )
        memo[id(unit)] = None
        for parameter in unit.parameters:
            memo[id(parameter.sharded)] = clone_shard(parameter)
    dressed = [any(undress(type(module)) is not type(module) for module in unit.modules) for unit in units]
    with undressed(units, undress):
        plain = copy.deepcopy(root, memo)
    parts: list[UnitSnapshot] = []
    for unit, has_class in zip(units, dressed):
        copies = [memo[id(module)] for module in unit.modules]
        hooks.purge(unit, memo)
        for module in copies:
            detach(module)
            _torch.detach_state(module)
        parameters = [
            ParameterSnapshot(
                parameter.name,
                [(memo[id(i.module)], i.name) for i in parameter.slots],
                parameter.sharding,
                memo[id(parameter.sharded)],
                {key: copy.deepcopy(v, memo) for key, v in vars(parameter.sharded).items() if not is_ours(key)},
                parameter.keeps_dtype,
                parameter.grad_dtype,
            )
            for parameter in unit.parameters
        ]
        parts.append(UnitSnapshot(copies, has_class, unit.name, unit.axis, unit.options, unit.global_id, parameters))
    return ShardedSnapshot(plain, parts)


def put_together(parts: ShardedSnapshot, dress: Dress) -> nn.Module:
    """Make units of the parts, in place; the opposite of `take_apart`."""
    for part in parts.units:
        rebuilt: list[ShardedParameter] = []
        with torch.no_grad():
            for snapshot in part.parameters:
                ref = ParamRef(snapshot.name, snapshot.shard, [Slot(module, name) for module, name in snapshot.slots])
                parameter = ShardedParameter(
                    ref,
                    snapshot.cut,
                    snapshot.shard,
                    keeps_dtype=snapshot.keeps_dtype,
                    grad_dtype=snapshot.grad_dtype,
                )
                parameter.sharded.__dict__.update(snapshot.attributes)
                rebuilt.append(parameter)
            unit = make_unit(part.modules, rebuilt, part.axis, part.options, global_id=part.global_id)
            unit.unit_name.name = part.name
            for parameter in rebuilt:
                parameter.restore_sharded(forget=True)
        assemble(unit, dress if part.dressed else as_it_is, ())
    return parts.root


@contextmanager
def undressed(units: Iterable[Unit], undress: Dress) -> Iterator[None]:
    """Sharded modules have the class they had before, for the length of a block."""
    dressed = [(module, type(module)) for unit in units for module in unit.modules]
    for module, cls in dressed:
        module.__class__ = undress(cls)
    try:
        yield
    finally:
        for module, cls in dressed:
            module.__class__ = cls


# --- plain modules again -------------------------------------------------------------------------------------------------


def undo(root: nn.Module, undress: Dress) -> None:
    """Make ordinary modules with full parameters of all units at and below `root`, in place.

    Raises StateError, before anything has changed, while a forward or backward runs.
    """
    units = list(dict.fromkeys(unit for module in root.modules() if (unit := unit_of(module)) is not None))
    for unit in units:
        runtime_of(unit).requests.check_idle(unit, doing="undo()")
        runtime_of(unit).requests.check_delivered(unit, doing="undo()")
        if any(parameter.local_grad is not None for parameter in unit.parameters):
            raise StateError(
                f"undo() was called while gradients of unit '{unit.name}' are only kept on each rank: run the last backward of "
                "the step first, or call zero_grad()"
            )
    for unit in units[:1]:
        runtime_of(unit).requests.meet(unit, doing="undo()")
    for unit in units:
        setup = unit.setup_collectives("undo()")
        runtime_of(unit).requests.reshard(unit, doing="undo()")
        runtime_of(unit).requests.refresh(unit)
        for parameter in unit.parameters:
            unshard_permanently(parameter, setup.unsharded)
    for unit in units:
        disassemble(unit, undress)
