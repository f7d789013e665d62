"""The units of a model: the unit of a module, and the units at and below it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from torch import nn

from fullshard.core.module_tree import clean_name
from fullshard.core.unit import UNIT, Unit
from fullshard.errors import StateError


def attach_unit(unit: Unit) -> None:
    """Store the unit on its modules, which hold the strong reference to it."""
    for module in unit.modules:
        module.__dict__[UNIT] = unit


def detach_unit(module: nn.Module) -> None:
    """Remove the unit from a module."""
    module.__dict__.pop(UNIT, None)


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that has `module` among `Unit.modules`, or None."""
    return module.__dict__.get(UNIT)


# Public calls obtain units by `recovered`, `require_unit` or `units_of`. Each of these resets what an interrupt left.


def recovered(unit: Unit) -> Unit:
    """Return `unit`. If an interrupt (Ctrl-C) broke off a hook, a backward's end or a wait, reset the runtime first."""
    if unit.runtime.communicator.interrupted:
        unit.runtime.recover()
    return unit


def check_module(module: object) -> None:
    """Raise ValueError unless `module`, an argument of a public call, is a module."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"Expected an nn.Module, got {type(module).__name__}. Pass the model or a module of it.")


def require_unit(module: nn.Module) -> Unit:
    """Return the unit of `module`, for a public call. Raise StateError if there is none."""
    check_module(module)
    unit = unit_of(module)
    if unit is None:
        raise StateError(f"{type(module).__name__} is not sharded. Call fully_shard() on it first.")
    return recovered(unit)


def units_of(module: nn.Module, recurse: bool) -> list[Unit]:
    """Return the units at and below `module`, each once, for a public call; without `recurse` only the unit of `module`."""
    if not recurse:
        return [require_unit(module)]
    check_module(module)
    return [recovered(unit) for unit in units_below([module])]


def units_below(roots: Iterable[nn.Module]) -> list[Unit]:
    """Return the units at and below these modules, each once."""
    # By identity: `Unit.number` is unique in one runtime only.
    return list(dict.fromkeys(unit for root in roots for inner in root.modules() if (unit := unit_of(inner)) is not None))


def own_modules(*roots: nn.Module) -> Iterator[nn.Module]:
    """Yield `roots` and their submodules. Omit submodules that have a unit, with everything below them."""
    for root in roots:
        yield root
        yield from own_modules(*(child for child in root.children() if unit_of(child) is None))


def name_units_in(module: nn.Module, *, runs: bool = False) -> None:
    """Name the units below `module` by their path in it. A later call for a module around or inside it renames them.

    runs: True if an outermost forward of `module` begins; then set `Unit.path` (parents and names), too.
    """
    for name, inner in module.named_modules():
        unit = unit_of(inner)
        if unit is not None and name:
            unit.unit_name.name = clean_name(name) or unit.name
            if runs:
                names = name.split(".")
                parents = [module.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
                unit.path[:] = zip(map(weakref.ref, parents), names)
