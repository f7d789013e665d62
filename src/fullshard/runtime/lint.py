"""What looks wrong about a sharded model: parameters that nobody reduces raise; waste and skew get one line, once."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard import _torch
from fullshard.errors import StateError, warn_once
from fullshard.params.sharded_param import WeakBackReference, logical_parameters
from fullshard.params.stale_params import successor
from fullshard.policies import LINTS, LintWarning
from fullshard.runtime.unit import Unit, name_units_in, own_modules, unit_of
from fullshard.sharding.module_tree import clean_name

_OWNER = "_fullshard_owner"  # on a module: the way back to its unit
_IGNORED = "_fullshard_ignored"  # on a parameter: the caller said that it is to be left alone
_LARGE = 1_000_000  # elements: below, nothing is worth a line
_PREFETCH = "prefetch"


def mark(unit: Unit) -> None:
    """Have the modules of a unit know it, so that what is added to them is noticed."""
    for root in unit.modules:
        for module in own_modules(root):
            module.__dict__[_OWNER] = WeakBackReference(unit)


def mark_ignored(parameter: nn.Parameter) -> None:
    """The caller left the parameter out: no unit reduces its gradient."""
    parameter.__dict__[_IGNORED] = True


def ignored_slots(unit: Unit) -> Iterator[tuple[dict[str, nn.Parameter | None], str]]:
    """(parameters of a module of the unit, name) of each parameter that the caller left out."""
    for root in unit.modules:
        for module in own_modules(root):
            held = _torch.parameters_of(module)
            yield from ((held, name) for name, parameter in held.items() if parameter is not None and is_ignored(parameter))


def _added(module: nn.Module, name: str, value: object) -> None:
    """Of every module: something is registered in it. Of those of units, look again before the next forward."""
    back = module.__dict__.get(_OWNER)
    if back is not None and value is not None:
        unit = back()
        # Units themselves put parameters into slots that are there.
        if unit is not None and (isinstance(value, nn.Module) or name not in _torch.parameters_of(module)):
            unit.checks.lint = True


_torch.on_registration(_added)


def examine(unit: Unit, root: nn.Module) -> None:
    """Before a forward if the unit is new or something was added. Raises StateError for parameters that nobody would reduce."""
    unit.checks.lint = False
    mark(unit)
    if unit.axis.ranks * unit.axis.replicated > 1 and torch.is_grad_enabled() and "added" not in unit.options.checks.silence:
        slots = {(id(i.parameters), i.name) for parameter in unit.parameters for i in parameter.slots}
        stray = [name for module in unit.modules for name, p in _unowned(module, slots) if _IGNORED not in p.__dict__]
        if stray:
            unit.checks.lint = True
            raise StateError(
                f"unit '{unit.name}': parameters added after fully_shard ({_listed(stray)}) would be trained by each rank "
                "alone: add them before, call fully_shard on the module that holds them, freeze them, or, if you reduce their "
                "gradients yourself, pass CheckPolicy(silence=('added',))"
            )
    if not unit.runtime.planner.running and unit.checks.remarks and _is_first_rank(unit):
        unit.checks.remarks = False
        if unit.checks.names:
            unit.checks.names = False
            name_units_in(root, place=True)
        for name, line in remarks(root):
            if name not in unit.options.checks.silence:
                warn_once(line, LintWarning)


def _unowned(root: nn.Module, slots: set[tuple[int, str]]) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters of a unit's own modules that are no unit's, with their names; not those in its own `slots`."""
    names = {id(module): name for name, module in root.named_modules()}
    found: list[tuple[str, nn.Parameter]] = []
    theirs = [module for module in root.modules() if isinstance(module, DistributedDataParallel)]
    reduced = {id(inner) for module in theirs for inner in module.modules()}
    for module in own_modules(root):
        if _torch.is_non_composable(module) or id(module) in reduced:
            continue
        held = _torch.parameters_of(module)
        for name, parameter in held.items():
            if (id(held), name) in slots:
                continue  # what was assigned there, it takes over or refuses itself
            if (
                parameter is None
                or isinstance(parameter, DTensor)
                or not parameter.requires_grad
                or logical_parameters([parameter])
            ):
                continue
            if successor(parameter) is None:  # it does not stand for a sharded one
                found.append((clean_name(f"{names[id(module)]}.{name}".lstrip(".")), parameter))
    return found


def _is_first_rank(unit: Unit) -> bool:
    return unit.axis.rank == 0 and (unit.axis.replicas is None or unit.axis.replicas.rank == 0)


def remarks(root: nn.Module) -> list[tuple[str, str]]:
    """(name, one line with what to do) for each thing about the units at and below `root` that wastes memory or trains wrongly.

    The names are those of `CheckPolicy(silence=...)`.
    """
    units = list(dict.fromkeys(unit for module in root.modules() if (unit := unit_of(module)) is not None))
    found = [*_large_units(root, units), *_padded_units(units), *_ignored_parameters(root)]
    assert all(name in LINTS for name, _ in found)
    return found


def _large_units(root: nn.Module, units: list[Unit]) -> Iterator[tuple[str, str]]:
    """Units that decide the peak of memory."""
    sizes = [sum(p.sharding.local_shape.numel() for p in unit.parameters) for unit in units]
    if len(units) > 1 and units[0].modules[0] is root and sizes[0] > sum(sizes) / 2 and sizes[0] >= _LARGE:
        yield (
            "root",
            f"unit '{units[0].name}' is full from its forward to its backward's end and holds {sizes[0] / sum(sizes):.0%} of "
            "the parameters: call fully_shard on its large parts first, or shard_model(), which chooses them",
        )
    middle = median(sizes) if len(units) > 3 else float("inf")
    for unit, size in list(zip(units, sizes))[1:]:
        if size > 8 * middle and size >= _LARGE:
            yield (
                "large",
                f"unit '{unit.name}' has {size:,} elements, {size / max(middle, 1):.0f} times the median of the units, and "
                "decides the peak of memory: call fully_shard on parts of it",
            )


def _padded_units(units: list[Unit]) -> Iterator[tuple[str, str]]:
    """Units whose shards hold more padding than a tenth."""
    for unit in units:
        groups = [group for group in unit.groups if not group.extension]
        real = sum(p.sharding.local_shape.numel() for group in groups for p in group.parameters)
        held = sum(group.layout.shard_numel * group.layout.ranks for group in groups)
        if real and held - real > max(real // 10, _LARGE):
            yield (
                "padding",
                f"unit '{unit.name}' is padded by {held / real - 1:.0%}, since its parameters have few rows for "
                f"{unit.axis.ranks} ranks: cut them along another dim with shard_placement_fn",
            )


def _ignored_parameters(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters that each rank trains alone."""
    ignored = [name for name, p in root.named_parameters() if _IGNORED in p.__dict__ and p.requires_grad]
    if ignored:
        yield (
            "ignored",
            f"ignored parameters {_listed([clean_name(name) for name in ignored])} are trainable, and nobody reduces their "
            "gradients: each rank trains its own, unless you average them after backward",
        )


def remark_on_prefetch(unit: Unit) -> None:
    """After many steps: gathers that nothing announced, since the order of units keeps changing."""
    stats = unit.runtime.planner.prefetch.stats
    often = stats.gathers >= 50 and stats.missed > stats.gathers / 5
    if often and "prefetch" not in unit.options.checks.silence and _is_first_rank(unit):
        warn_once(
            f"{stats.missed} of {stats.gathers} gathers were not issued ahead, since units ran in another order than before, "
            "and computing waited for them: name what comes next with set_modules_to_forward_prefetch()",
            LintWarning,
            subject=_PREFETCH,
        )


def remark_on_optimizer(unit: Unit, plain: list[str]) -> None:
    """An optimizer steps parameters of the unit, and beside them `plain` ones with gradients."""
    if "optimizer" not in unit.options.checks.silence and unit.axis.ranks * unit.axis.replicated > 1 and _is_first_rank(unit):
        warn_once(
            f"an optimizer steps sharded parameters and {len(plain)} plain ones ({_listed(plain)}), whose gradients no unit "
            "reduces: each rank trains its own. Call fully_shard on the module that holds them, the outermost one for example",
            LintWarning,
        )


def remark_on_gradients(unit: Unit, names: list[str]) -> None:
    """An optimizer's first step finds none."""
    if "gradients" not in unit.options.checks.silence and _is_first_rank(unit):
        warn_once(
            f"an optimizer steps {len(names)} sharded parameters ({_listed(names)}), none of which has a gradient: call "
            "backward() before, without inputs=, or take gradients as values with fullshard.grad()",
            LintWarning,
        )


def is_ignored(tensor: Tensor) -> bool:
    """Whether the caller said that it is to be left alone."""
    return _IGNORED in tensor.__dict__


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = [
    "examine",
    "ignored_slots",
    "is_ignored",
    "mark",
    "mark_ignored",
    "remark_on_gradients",
    "remark_on_optimizer",
    "remark_on_prefetch",
    "remarks",
]
