"""Checks of a sharded model: parameters that no unit reduces raise; wasted memory and the like get one remark, once."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard import _torch
from fullshard.core.module_tree import clean_name
from fullshard.core.parameter_alias import replacement_of
from fullshard.core.sharded_param import WeakBackReference, logical_parameters
from fullshard.core.unit import Unit, name_units_in
from fullshard.core.unit_modules import own_modules, unit_of
from fullshard.errors import StateError, warn_once
from fullshard.policies import LINTS, LintWarning

_OWNER = "_fullshard_owner"  # attribute of a module: a weak reference to its unit
_IGNORED = "_fullshard_ignored"  # attribute of a parameter: it is in `ignored_params`
_LARGE = 1_000_000  # elements; smaller amounts are not worth a remark
_PREFETCH = "prefetch"


def mark_modules(unit: Unit) -> None:
    """Mark the modules of a unit, so that parameters and modules added to them are noticed."""
    for root in unit.modules:
        for module in own_modules(root):
            module.__dict__[_OWNER] = WeakBackReference(unit)


def mark_ignored(parameter: nn.Parameter) -> None:
    """Mark a parameter that the user excluded from sharding, so that it is not reported as added later."""
    parameter.__dict__[_IGNORED] = True


def ignored_slots(unit: Unit) -> Iterator[tuple[dict[str, nn.Parameter | None], str]]:
    """Yield each parameter of the unit's modules that the user excluded: the `_parameters` of its module, and its name."""
    for root in unit.modules:
        for module in own_modules(root):
            found = _torch.parameters_of(module)
            yield from ((found, name) for name, parameter in found.items() if parameter is not None and is_ignored(parameter))


def _on_registration(module: nn.Module, name: str, value: object) -> None:
    """Check the unit of `module` again before its next forward. torch calls this for each registration in any module."""
    back = module.__dict__.get(_OWNER)
    if back is not None and value is not None:
        unit = back()
        # A parameter under an existing name is not new: units register their own parameters that way in each forward.
        if unit is not None and (isinstance(value, nn.Module) or name not in _torch.parameters_of(module)):
            unit.checks.lint = True


def install() -> _torch.Undo:
    """Watch registrations in all modules, so that parameters added to a unit are found before its next forward."""
    return _torch.on_registration(_on_registration)


def check_before_forward(unit: Unit, root: nn.Module) -> None:
    """Check a unit before a forward, if it is new or something was added to its modules, and issue remarks on the model.

    Raises StateError, naming the parameters, if some were added that no unit would reduce, or have optimizers that never step.
    """
    _refuse_max_norm(unit)
    unit.checks.lint = unit.checks.strays = False
    mark_modules(unit)
    # Private: `_in_backward_optimizers`, an attribute that torch's function sets on its parameters.
    stepped = [parameter.name for parameter in unit.parameters if "_in_backward_optimizers" in parameter.sharded.__dict__]
    if stepped:
        unit.checks.lint = True
        raise StateError(
            f"Parameters ({_listed(stepped)}) of unit '{unit.name}' have an optimizer of _apply_optimizer_in_backward(), which "
            "would never step: autograd accumulates into unsharded parameters, not into these. Step the optimizer in "
            "parameter.register_post_accumulate_grad_hook()."
        )
    reduces = unit.axis.ranks * unit.axis.replica_count > 1 and "added" not in unit.options.checks.silence
    if reduces and not torch.is_grad_enabled():  # a rank may evaluate with parameters of its own, but not train them
        unit.checks.strays = True
    elif reduces:
        slots = {(id(i.parameters), i.name) for parameter in unit.parameters for i in parameter.slots}
        ranks = set(unit.axis.mesh.mesh.flatten().tolist())
        stray = [
            name
            for module in unit.modules
            for name, p in _unmanaged_parameters(module, slots)
            if _IGNORED not in p.__dict__ and not _is_over(p, ranks)
        ]
        if stray:
            unit.checks.lint = True  # check again before the next forward, after the user has changed something
            raise StateError(
                f"Parameters ({_listed(stray)}) were added to unit '{unit.name}' after fully_shard(), so each rank would train "
                "them alone. Add them before fully_shard(), call fully_shard() on the module that holds them, freeze them, or, "
                "if you reduce their gradients yourself, pass CheckPolicy(silence=('added',))."
            )
    is_outermost = not unit.runtime.scheduler.running and _torch.current_graph_task() == -1
    if is_outermost and unit.checks.remarks and unit.axis.is_first_rank:
        unit.checks.remarks = False
        if unit.checks.names:
            unit.checks.names = False
            name_units_in(root, place=True)
        for name, line in remarks(root):
            if name not in unit.options.checks.silence:
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


def _unmanaged_parameters(root: nn.Module, slots: set[tuple[int, str]]) -> list[tuple[str, nn.Parameter]]:
    """Return names and trainable parameters of a unit's own modules that belong to no unit.

    Args:
        root: the root module of the unit.
        slots: places of the unit's own parameters: id of the `_parameters` of a module, and name. They are skipped.
    """
    names = {id(module): name for name, module in root.named_modules()}
    found: list[tuple[str, nn.Parameter]] = []
    replicated = [
        module for module in root.modules() if isinstance(module, DistributedDataParallel) or _torch.is_non_composable(module)
    ]
    reduced = {id(inner) for module in replicated for inner in module.modules()}
    for module in own_modules(root):
        if id(module) in reduced:
            continue
        parameters = _torch.parameters_of(module)
        for name, parameter in parameters.items():
            if (id(parameters), name) in slots:
                continue  # the unit itself adopts or refuses a parameter that the user assigns to its slot
            if parameter is None or not parameter.requires_grad or logical_parameters([parameter]):
                continue
            if replacement_of(parameter) is None:  # else it is the alias of a parameter that was sharded
                found.append((clean_name(f"{names[id(module)]}.{name}".lstrip(".")), parameter))
    return found


def _is_over(parameter: nn.Parameter, ranks: set[int]) -> bool:
    """Return True for a DTensor over these ranks, and maybe more, since DTensor reduces its gradient over them."""
    return isinstance(parameter, DTensor) and ranks <= set(parameter.device_mesh.mesh.flatten().tolist())


def remarks(root: nn.Module) -> list[tuple[str, str]]:
    """Return remarks on units at and below `root` that waste memory or train wrongly.

    Returns:
        The name of each remark, as in `CheckPolicy(silence=...)`, and its text of one line with the remedy.
    """
    units = list(dict.fromkeys(unit for module in root.modules() if (unit := unit_of(module)) is not None))
    found = [*_large_units(root, units), *_padded_units(units), *_ignored_parameters(root)]
    assert all(name in LINTS for name, _ in found)
    return found


def _large_units(root: nn.Module, units: list[Unit]) -> Iterator[tuple[str, str]]:
    """Yield remarks on units that are so large that they determine the peak memory."""
    sizes = [sum(p.sharding.local_shape.numel() for p in unit.parameters) for unit in units]
    if len(units) > 1 and units[0].modules[0] is root and sizes[0] > sum(sizes) / 2 and sizes[0] >= _LARGE:
        yield (
            "root",
            f"Unit '{units[0].name}' stays unsharded from its forward to the end of its backward, and has "
            f"{sizes[0] / sum(sizes):.0%} of the parameters. Call fully_shard() on its large parts first, or shard_model(), "
            "which chooses them.",
        )
    middle = median(sizes) if len(units) > 3 else float("inf")
    for unit, size in list(zip(units, sizes))[1:]:
        if size > 8 * middle and size >= _LARGE:
            yield (
                "large",
                f"Unit '{unit.name}' has {size:,} elements, {size / max(middle, 1):.0f} times the median of the units, so it "
                "determines the peak memory. Call fully_shard() on parts of it.",
            )


def _padded_units(units: list[Unit]) -> Iterator[tuple[str, str]]:
    """Yield remarks on units whose padding is more than a tenth of their parameters."""
    for unit in units:
        groups = [group for group in unit.groups if not group.extension]
        real = sum(p.sharding.local_shape.numel() for group in groups for p in group.parameters)
        padded = sum(group.layout.shard_numel * group.layout.ranks for group in groups)
        if real and padded - real > max(real // 10, _LARGE):
            yield (
                "padding",
                f"Unit '{unit.name}' is padded by {padded / real - 1:.0%}, since its parameters have few rows for "
                f"{unit.axis.ranks} ranks. Shard them along another dim with shard_placement_fn.",
            )


def _ignored_parameters(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a remark on ignored parameters that are trainable: each rank trains its own copy."""
    ignored = [name for name, p in root.named_parameters() if _IGNORED in p.__dict__ and p.requires_grad]
    if ignored:
        yield (
            "ignored",
            f"Ignored parameters {_listed([clean_name(name) for name in ignored])} are trainable, but no unit reduces their "
            "gradients, so each rank trains its own copy. Average their gradients after backward.",
        )


def remark_on_prefetch(unit: Unit) -> None:
    """Issue a remark if many all-gathers were not prefetched, since the order of the units keeps changing."""
    stats = unit.runtime.scheduler.stats
    often = stats.gathers >= 50 and stats.missed > stats.gathers / 5
    if often and "prefetch" not in unit.options.checks.silence and unit.axis.is_first_rank:
        warn_once(
            f"{stats.missed} of {stats.gathers} all-gathers were not prefetched, since units ran in another order than before, "
            "and compute waited for them. Name the next modules with set_modules_to_forward_prefetch().",
            LintWarning,
            subject=_PREFETCH,
        )


def remark_on_optimizer(unit: Unit, plain: list[str]) -> None:
    """Issue a remark if an optimizer steps the unit's parameters together with `plain` parameters that have gradients."""
    if (
        "optimizer" not in unit.options.checks.silence
        and unit.axis.ranks * unit.axis.replica_count > 1
        and unit.axis.is_first_rank
    ):
        warn_once(
            f"An optimizer steps sharded parameters and {len(plain)} plain ones ({_listed(plain)}), whose gradients no unit "
            "reduces, so each rank trains its own copy. Call fully_shard() on the module that holds them, for example the "
            "outermost one.",
            LintWarning,
        )


def remark_on_gradients(unit: Unit, names: list[str]) -> None:
    """Issue a remark if the first step of an optimizer finds no gradient."""
    if "gradients" not in unit.options.checks.silence and unit.axis.is_first_rank:
        warn_once(
            f"An optimizer steps {len(names)} sharded parameters ({_listed(names)}), none of which has a gradient. Call "
            "backward() before, without inputs=, or take gradients as values with fullshard.grad().",
            LintWarning,
        )


def remark_on_unmarked(unit: Unit) -> None:
    """Issue a remark if a second backward of a step reduces under `ZERO1` or `HFSDP`, meant to reduce once."""
    if "marks" not in unit.options.checks.silence and unit.axis.is_first_rank:
        warn_once(
            f"Unit '{unit.name}' reduces gradients in several backwards of a step, although its level is "
            f"{unit.options.states}. To reduce once per step, call set_is_last_backward(False) before all backwards but the "
            "last one, or run them inside of model.accumulate().",
            LintWarning,
        )


def is_ignored(tensor: Tensor) -> bool:
    """Return True if the user excluded the tensor from sharding (`ignored_params`)."""
    return _IGNORED in tensor.__dict__


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = [
    "check_before_forward",
    "ignored_slots",
    "is_ignored",
    "mark_ignored",
    "mark_modules",
    "remark_on_gradients",
    "remark_on_optimizer",
    "remark_on_prefetch",
    "remark_on_unmarked",
    "remarks",
]
