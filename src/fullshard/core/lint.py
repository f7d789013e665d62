"""Remarks on a sharded model: parameters that no unit reduces raise before the first forward; wasted memory warns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard import _torch
from fullshard.core.module_tree import clean_name
from fullshard.core.replaced_parameters import replacement_of
from fullshard.core.sharded_param import logical_parameters
from fullshard.core.unit import Unit
from fullshard.core.unit_modules import own_modules, unit_of
from fullshard.errors import StateError, warn_once
from fullshard.policies import LintWarning

_IGNORED = "_fullshard_ignored"  # attribute of a parameter: it is in `ignored_params`
_LARGE = 1_000_000  # elements; smaller amounts are not worth a remark


def mark_ignored(parameter: nn.Parameter) -> None:
    """Mark a parameter that the user excluded from sharding, so that it is not reported as added later."""
    parameter.__dict__[_IGNORED] = True


def is_ignored(tensor: Tensor) -> bool:
    """Return True if the user excluded the tensor from sharding (`ignored_params`)."""
    return _IGNORED in tensor.__dict__


def ignored_slots(unit: Unit) -> Iterator[tuple[dict[str, nn.Parameter | None], str]]:
    """Yield each parameter of the unit's modules that the user excluded: the `_parameters` of its module, and its name."""
    for root in unit.modules:
        for module in own_modules(root):
            found = _torch.parameters_of(module)
            yield from ((found, name) for name, parameter in found.items() if parameter is not None and is_ignored(parameter))


def check_before_forward(unit: Unit, root: nn.Module) -> None:
    """Check a unit before its first forward, and once more before its first forward with grad.

    Raises:
        ValueError: if a module writes to its parameter in each forward.
        StateError: in a forward with grad, if parameters were added that no unit would reduce; it names them.
    """
    if unit.checks.forward:
        _refuse_max_norm(unit)
        unit.checks.forward = False
    if unit.checks.training and torch.is_grad_enabled():  # a rank may evaluate with parameters of its own, but not train them
        _check_training(unit, root)
        unit.checks.training = False


def _check_training(unit: Unit, root: nn.Module) -> None:
    """Raise StateError for added parameters, and warn of an outermost unit that has most of the parameters."""
    if unit.axis.ranks * unit.axis.replica_count > 1 and "added" not in unit.options.checks.silence:
        added = added_parameters(unit)
        if added:
            raise StateError(
                f"Parameters ({some_of(added)}) were added to unit '{unit.name}' after fully_shard(), so each rank would train "
                "them alone. Add them before fully_shard(), call fully_shard() on the module that holds them, freeze them, or, "
                "if you reduce their gradients yourself, pass CheckPolicy(silence=('added',))."
            )
    if unit.axis.is_first_rank and "root" not in unit.options.checks.silence and not unit.runtime.scheduler.running:
        for line in remarks_on_root([(one.name, numel_of(one)) for one in units_below(root)]):
            warn_once(line, LintWarning)


def _refuse_max_norm(unit: Unit) -> None:
    """Raise ValueError if a module of the unit writes to its parameter in each forward."""
    for parameter in unit.parameters:
        for slot in parameter.slots:
            module = slot.module
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                raise ValueError(
                    f"Expected parameter '{parameter.name}' of unit '{unit.name}' in an {type(module).__name__} without "
                    f"max_norm, got max_norm={module.max_norm}: its forward writes to a copy that is freed afterwards. "
                    "Set max_norm to None, and renormalize after each step in `with fullshard.full_params(module):`."
                )


def added_parameters(unit: Unit) -> list[str]:
    """Return the names of trainable parameters of a unit's own modules whose gradients no unit reduces."""
    ranks = set(unit.axis.mesh.mesh.flatten().tolist())
    slots = {(id(slot.parameters), slot.name) for parameter in unit.parameters for slot in parameter.slots}
    return [
        name
        for root in unit.modules
        for name, parameter in _unmanaged_parameters(root, slots)
        if not is_ignored(parameter) and not _is_over(parameter, ranks)
    ]


def _unmanaged_parameters(root: nn.Module, slots: set[tuple[int, str]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and trainable parameters of a unit's own modules that belong to no unit.

    Args:
        root: the root module of the unit.
        slots: places of the unit's own parameters: id of the `_parameters` of a module, and name. They are skipped, since the
            unit itself adopts or refuses a parameter that the user assigns there.
    """
    names = {id(module): name for name, module in root.named_modules()}
    replicated = [
        module for module in root.modules() if isinstance(module, DistributedDataParallel) or _torch.is_non_composable(module)
    ]
    reduced = {id(inner) for module in replicated for inner in module.modules()}
    for module in own_modules(root):
        if id(module) in reduced:
            continue
        parameters = _torch.parameters_of(module)
        for name, parameter in parameters.items():
            if parameter is None or not parameter.requires_grad or (id(parameters), name) in slots:
                continue
            if not _is_of_other_unit(parameter):
                yield clean_name(f"{names[id(module)]}.{name}".lstrip(".")), parameter


def _is_of_other_unit(parameter: nn.Parameter) -> bool:
    """Return True for a parameter of a unit, as a tied one: the sharded parameter, or what stands in its slots now."""
    now = replacement_of(parameter)
    found = logical_parameters([parameter if now is None else now])
    return any(now is None or slot.content is parameter for one in found for slot in one.slots)


def _is_over(parameter: nn.Parameter, ranks: set[int]) -> bool:
    """Return True for a DTensor over these ranks, and maybe more, since DTensor reduces its gradient over them."""
    return isinstance(parameter, DTensor) and ranks <= set(parameter.device_mesh.mesh.flatten().tolist())


def units_below(root: nn.Module) -> list[Unit]:
    """Return the units at and below `root`, outermost first."""
    return list(dict.fromkeys(unit for module in root.modules() if (unit := unit_of(module)) is not None))


def numel_of(unit: Unit) -> int:
    """Return the number of elements that are unsharded with a unit."""
    return sum(parameter.sharding.local_shape.numel() for parameter in unit.parameters)


def remarks_on_root(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Return a remark if the outermost unit has most of the parameters, as one line with the remedy.

    Args:
        sizes: name and number of elements of each unit, the outermost one first.
    """
    (root, numel), total = sizes[0], sum(numel for _, numel in sizes)
    if len(sizes) == 1 or numel <= total / 2 or numel < _LARGE:
        return []
    return [
        f"Unit '{root}' stays unsharded from its forward to the end of its backward, and has {numel / total:.0%} of the "
        "parameters. Call fully_shard() on its large parts first, or shard_model(), which chooses them."
    ]


def remarks_on_sizes(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Return remarks on units that are so large that they determine the peak memory; arguments as in `remarks_on_root`."""
    found = remarks_on_root(sizes)
    middle = median(numel for _, numel in sizes) if len(sizes) > 3 else float("inf")
    for name, numel in sizes[1:]:
        if numel > 8 * middle and numel >= _LARGE:
            found.append(
                f"Unit '{name}' has {numel:,} elements, {numel / max(middle, 1):.0f} times the median of the units, so it "
                "determines the peak memory. Call fully_shard() on parts of it."
            )
    return found


def remark_on_optimizer(unit: Unit, plain: list[str]) -> None:
    """Warn if an optimizer steps the unit's parameters together with `plain` parameters that have gradients."""
    if (
        "optimizer" not in unit.options.checks.silence
        and unit.axis.ranks * unit.axis.replica_count > 1
        and unit.axis.is_first_rank
    ):
        warn_once(
            f"An optimizer steps sharded parameters and {len(plain)} plain ones ({some_of(plain)}), whose gradients no unit "
            "reduces, so each rank trains its own copy. Call fully_shard() on the module that holds them, for example the "
            "outermost one.",
            LintWarning,
        )


def some_of(names: Sequence[str]) -> str:
    """Return the first three of `names` in quotes, and the number of the others."""
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = [
    "added_parameters",
    "check_before_forward",
    "ignored_slots",
    "is_ignored",
    "mark_ignored",
    "numel_of",
    "remark_on_optimizer",
    "remarks_on_root",
    "remarks_on_sizes",
    "some_of",
    "units_below",
]
