"""Remarks before the first forward: parameters that no unit reduces, or that a forward writes, raise; a large root warns."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard import _torch
from fullshard.core import (
    UNIT_CREATED,
    Originals,
    Unit,
    clean_name,
    current_parameter,
    is_ignored,
    logical_parameters,
    own_modules,
    units_of,
)
from fullshard.errors import StateError, some_of, warn_once
from fullshard.policies import LintWarning
from fullshard.wrap.sizes import remarks_on_root, sizes_of


def _expect_checks(unit: Unit, _: Originals | None) -> None:
    unit.before_first_use(_refuse_max_norm)
    unit.before_first_use(_check_training)


def _check_training(unit: Unit, root: nn.Module) -> bool:
    """Raise StateError for added parameters, warn of those with hooks, and of an outermost unit with most of the parameters.

    Return True in a forward without grad, since a rank may evaluate with parameters of its own, but not train them.
    """
    if not torch.is_grad_enabled():
        return True
    if unit.axis.ranks * unit.axis.replica_count > 1 and "added" not in unit.options.checks.silence:
        added = added_parameters(unit)
        alone = [name for name, parameter in added.items() if not _torch.have_reduction_hooks([parameter])]
        if alone:
            raise StateError(
                f"Parameters ({some_of(alone)}) were added to unit '{unit.name}' after fully_shard(), so each rank would train "
                "them alone. Add them before fully_shard(), call fully_shard() on the module that holds them, freeze them, or, "
                "if you reduce their gradients yourself, pass CheckPolicy(silence=('added',))."
            )
        # A hook may reduce the gradient, as those of transformers' Trainer do, or step an optimizer: an error needs proof.
        if added and unit.axis.is_first_rank:
            warn_once(
                f"Parameters ({some_of(list(added))}) were added to unit '{unit.name}' after fully_shard(). They have hooks on "
                "their gradients, which must average them over all ranks, since no unit does. If they do, silence this warning "
                "by CheckPolicy(silence=('added',)).",
                LintWarning,
                subject="added parameters with hooks",  # adapters are in every unit: one warning tells of all
            )
    if unit.axis.is_first_rank and "root" not in unit.options.checks.silence and not unit.runtime.scheduler.running:
        for line in remarks_on_root(sizes_of(units_of(root, True))):
            warn_once(line, LintWarning)
    return False


def _refuse_max_norm(unit: Unit, _: nn.Module) -> None:
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


def added_parameters(unit: Unit) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a unit's own modules whose gradients no unit reduces, by name."""
    ranks = set(unit.axis.mesh.mesh.flatten().tolist())
    # A parameter that the user assigns to one of these is adopted or refused by the unit itself.
    slots = {(id(slot.parameters), slot.name) for parameter in unit.parameters for slot in parameter.slots}
    found: dict[str, nn.Parameter] = {}
    for root in unit.modules:
        paths = {id(module): f"{path}." if path else "" for path, module in root.named_modules()}
        replicated = (
            one for one in root.modules() if isinstance(one, DistributedDataParallel) or _torch.is_non_composable(one)
        )
        reduced = {id(inner) for module in replicated for inner in module.modules()}
        for module in own_modules(root):
            parameters = {} if id(module) in reduced else _torch.parameters_of(module)
            for name, parameter in parameters.items():
                if parameter is None or not parameter.requires_grad or (id(parameters), name) in slots:
                    continue
                if not is_ignored(parameter) and not _is_reduced(parameter, ranks):
                    found[clean_name(paths[id(module)] + name)] = parameter
    return found


def _is_reduced(parameter: nn.Parameter, ranks: set[int]) -> bool:
    """Return True if a unit reduces the gradient of a parameter, or DTensor does, over these ranks and maybe more."""
    if isinstance(parameter, DTensor) and ranks <= set(parameter.device_mesh.mesh.flatten().tolist()):
        return True
    now = current_parameter(parameter)  # of another unit, as a tied one: the sharded parameter, or what its slots hold now
    return any(now is parameter or slot.content is parameter for one in logical_parameters([now]) for slot in one.slots)


UNIT_CREATED.append(_expect_checks)
