"""`plan_model` and `shard_model`: make a plan from a policy, and shard a model by a plan."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.core import children_first, clean_name, resolve_mesh, unit_of
from fullshard.errors import warn_once
from fullshard.frontend.api import PreparedShard, fully_shard
from fullshard.policies import MixedPrecisionPolicy, resolve_mp
from fullshard.wrap.auto_policy import AutoPolicy
from fullshard.wrap.plan import Mixture, ModelSummary, Plan, PlannedUnit
from fullshard.wrap.policies import Classes, Policy, checked_classes

FULL_PRECISION = (_torch.BATCH_NORM,)
"""Classes of modules that `mp_policy.param_dtype` does not apply to, by default."""

WHY_FULL_PRECISION = "full precision"
"""`PlannedUnit.why` of the units that are made for such modules."""


def plan_model(
    model: nn.Module,
    policy: Any = "auto",
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
) -> Plan:
    """Choose the units that `shard_model` would make, as a `Plan` to print and edit.

    The model is not changed, and no process group is needed.

    Args:
        model: a model that has no units yet.
        policy: "auto" or an `AutoPolicy`; a `Policy`, or one of FSDP1's policy objects; a `Plan` of a model with the same
            structure; a function (module, recurse, nonwrapped_numel) -> bool. A function is called like in FSDP1: from the
            root down with recurse=True, and from the leaves up with recurse=False and the number of elements that are in no
            unit below.
        ignored_modules: modules that are not sharded, with all their submodules.
        ignored_params: parameters that are not sharded.

    Returns:
        The plan; its last unit is the model itself.

    Raises:
        ValueError: for a policy of another type; for a policy that chooses a list of modules (which has no forward) with
            parameters that are in no other unit; for a model with modules that are units already. Errors name the modules.

    Example:
        >>> blocks = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
        >>> print(plan_model(nn.Sequential(*blocks, nn.Linear(8, 2))))
        unit     class                        parameters  elements        bytes  options  why
        0 ... 1  2 x TransformerEncoderLayer      2 x 12   2 x 600  2 x 2.3 KiB           one of 2 blocks
        (model)  Sequential                            2        18         72 B           what is left
        3 units hold 26 parameters: 1,218 elements, 4.8 KiB; the largest holds 2.3 KiB
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a model as nn.Module, got {type(model).__name__}.")
    check_policy(policy)
    skipped, ignored = with_submodules(ignored_modules, ignored_params)
    inside = [name for name, module in children_first(model) if unit_of(module) is not None and module not in skipped]
    if inside:
        names = [clean_name(name) or "(model)" for name in inside]
        raise ValueError(
            f"Modules {names[:5]}{' and more' if len(names) > 5 else ''} are units already. A plan needs a model without "
            "units. Call fully_shard() yourself on the other modules, or undo(model) first."
        )
    outline = ModelSummary.of(model, ignored=ignored)
    if isinstance(policy, Plan):
        plan = Plan(outline, policy.units)
        for name in (name for unit in plan.units for name in unit.modules):
            if model.get_submodule(name) in skipped:
                raise ValueError(f"The plan makes a unit of '{name}', which is in ignored_modules. Call plan.drop('{name}').")
        return plan
    if policy == "auto" or isinstance(policy, AutoPolicy):
        chosen = AutoPolicy() if isinstance(policy, str) else policy
        planned = chosen.units(model, ignored_modules=skipped, ignored=ignored)
        return Plan(outline, planned or [PlannedUnit(("",), "no repeated blocks were found: choose units yourself")])
    found = _chosen(model, policy, skipped, ignored)
    # Attention reads its children's parameters without calling them.
    never = {i for m in model.modules() if isinstance(m, nn.MultiheadAttention) for i in m.modules() if i is not m}
    modules = {name: module for name, module in children_first(model) if module in found}
    planned = []
    for name, module in modules.items():
        if module in never:
            continue
        if name in outline.uncallable:
            if any(outline.own[inner] for inner in outline.below([name], stop=frozenset(modules))):
                raise ValueError(
                    f"The policy chose '{name}' ({type(module).__name__}), which has no forward and would never be "
                    "all-gathered. Choose the modules in it, or the module around it."
                )
        elif name == "" or found[module] or any(outline.own[inner] for inner in outline.below([name])):
            planned.append(PlannedUnit((name,), "chosen by the policy" if name else "what is left", found[module]))
    return Plan(outline, planned)


def with_submodules(
    modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]
) -> tuple[dict[nn.Module, None], list[nn.Parameter]]:
    """Return `modules` and all their submodules, and `parameters` and those of these modules."""
    listed = list(modules)
    for module in listed:
        if not isinstance(module, nn.Module):
            raise ValueError(f"ignored_modules expected modules, got {module!r}. Pass model.get_submodule(name).")
    skipped = dict.fromkeys(inner for module in listed for inner in module.modules())
    return skipped, [*parameters, *(parameter for module in skipped for parameter in module.parameters(recurse=False))]


def _chosen(
    model: nn.Module, policy: Any, skipped: Collection[nn.Module], ignored: Sequence[nn.Parameter]
) -> dict[nn.Module, dict[str, Any]]:
    if isinstance(policy, Policy):
        return policy.choose(model, skipped)
    if _torch.is_wrap_policy(policy):
        return _torch.run_wrap_policy(policy, model, set(skipped))
    try:
        inspect.signature(policy).bind(module=model, recurse=True, nonwrapped_numel=0)
    except TypeError as wrong:
        raise ValueError(
            f"Expected a policy function of module=, recurse= and nonwrapped_numel=, got a function that cannot be called with "
            f"them ({wrong}). For a function of the module only, pass CustomPolicy(function)."
        ) from None
    except ValueError:  # inspect finds no signature, as for some builtins
        pass
    asked = _chosen_by_function(model, policy, skipped, {id(parameter) for parameter in ignored})
    return {module: {} for module in asked}


def check_policy(policy: Any, name: str = "policy") -> None:
    """Raise ValueError if `policy` is not a policy. `name`: name of the argument, for the error text."""
    known = isinstance(policy, (Policy, AutoPolicy, Plan)) or (isinstance(policy, str) and policy == "auto")
    if not known and (not callable(policy) or isinstance(policy, type)) and not _torch.is_wrap_policy(policy):
        classes = policy if isinstance(policy, (set, list, tuple, frozenset)) else [policy]
        given = [cls.__name__ for cls in classes if isinstance(cls, type)]
        hint = f" For modules of these classes pass ModuleWrapPolicy({{{', '.join(given)}}})." if given else ""
        raise ValueError(
            f"{name} expected 'auto', a Plan, a Policy, or a function (module, recurse, nonwrapped_numel) -> bool, got "
            f"{policy!r}.{hint}"
        )


def _chosen_by_function(
    model: nn.Module, policy: Callable[..., bool], skipped: Collection[nn.Module], ignored: set[int]
) -> list[nn.Module]:
    """Return the modules below `model` that a policy function chooses, children first. A shared module is visited once."""
    chosen: list[nn.Module] = []
    seen = {model}

    def visit(module: nn.Module) -> int:
        """Return the number of elements at or below `module` that are in chosen units."""
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        in_units = 0
        for child in module.children():
            if child not in skipped and child not in seen:
                seen.add(child)
                in_units += visit(child)
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - in_units):
            chosen.append(module)
            return numel
        return in_units

    visit(model)
    return chosen


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    policy: Any = "auto",
    *,
    strict: bool = False,
    full_precision: Classes | type[nn.Module] = FULL_PRECISION,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    **options: Any,
) -> Plan:
    """Call `fully_shard` on the modules of `model` that `policy` chooses, children first, and on the model. Collective.

    Args:
        model: sharded in place.
        mesh: see `fully_shard`.
        policy: see `plan_model`.
        strict: raise an error, instead of a warning, for units that mix trainable and frozen parameters, which are
            all-gathered in separate groups.
        full_precision: module classes (batch norms) that `mp_policy.param_dtype` does not apply to. Such modules become
            separate units, and compute in the dtype of their own parameters: inputs are cast to it, outputs are cast back.
        ignored_modules: modules that are not sharded, with all their submodules.
        ignored_params: parameters that are not sharded.
        options: keyword options of `fully_shard` for all units; options in a policy or plan override them.

    Returns:
        The plan that was executed; print it to see the parameters of each unit.

    Raises:
        ValueError: before anything has changed, if `plan_model` or `fully_shard` raises it, and with `strict` for mixed
            units, with the names of their parameters.
        TypeError: before anything has changed, for options that `fully_shard` does not have.

    Example:
        >>> plan = shard_model(model, mesh)                                                   # doctest: +SKIP
        >>> print(plan)                                                                       # doctest: +SKIP
        >>> plan = plan_model(model); plan.drop("lm_head"); shard_model(model, mesh, plan)    # doctest: +SKIP
    """
    skipped, ignored = with_submodules(ignored_modules, ignored_params)
    plan = plan_model(model, policy, ignored_modules=skipped, ignored_params=ignored)
    check_options([options, *(unit.options for unit in plan.units)])
    warn_about_mixtures(plan.mixtures(), strict=strict)
    mp_policy = options.get("mp_policy", MixedPrecisionPolicy())
    found = add_full_precision_units(plan, model, resolve_mp(mp_policy), full_precision, skipped)
    if found:
        warn_once(
            f"{', '.join(found)} compute in the dtype of their own parameters, not in mp_policy.param_dtype, as separate "
            "units. Pass full_precision=() to turn this off."
        )
    if mesh is None and options.get("dp_mesh_dims") is None:
        mesh = resolve_mesh(None).mesh
    modules = {name: model.get_submodule(name) for unit in plan.units for name in unit.modules}
    prepared: list[PreparedShard] = []
    for unit in plan.units:
        one = PreparedShard(
            [modules[name] for name in unit.modules],
            units=modules.values(),
            ignored_params=ignored,
            mesh=mesh,
            **{**options, **unit.options},
        )
        one.check()
        prepared.append(one)
    # All units have been checked: from here on modules change.
    for one in prepared:
        one.apply()
    return plan


def check_options(every: Iterable[Any]) -> None:
    """Raise TypeError if one of these dicts of options has a name that `fully_shard` does not have."""
    known = set(inspect.signature(fully_shard).parameters) - {"module", "mesh", "ignored_params"}
    for options in every:
        for name in options:
            if name not in known:
                raise TypeError(f"fully_shard() has no option '{name}'. Expected one of {sorted(known)}.")


def warn_about_mixtures(mixtures: Sequence[Mixture], *, strict: bool = False) -> None:
    """Warn about units that mix trainable and frozen parameters, or with `strict` raise ValueError.

    Units with equal parameters, such as repeated blocks, get one text, with the names of all these units.
    """
    equal_mixtures: dict[tuple[Any, ...], list[Mixture]] = {}
    for mixture in mixtures:
        entries = (*mixture.trainable, *mixture.frozen)
        inside = tuple((entry.name.removeprefix(f"{mixture.unit}."), entry.numel) for entry in entries)
        equal_mixtures.setdefault((inside, len(mixture.trainable)), []).append(mixture)
    texts = []
    for first, *others in equal_mixtures.values():
        more = f" The same applies to {', '.join(other.unit for other in others)}." if others else ""
        texts.append(f"{first}{more}")
    if strict and texts:
        raise ValueError("strict=True: " + " ".join(texts))
    for text in texts:
        warnings.warn(text, stacklevel=3)


def add_full_precision_units(
    plan: Plan,
    model: nn.Module,
    mp_policy: MixedPrecisionPolicy,
    full_precision: Classes | type[nn.Module],
    skipped: Collection[nn.Module] = (),
) -> list[str]:
    """Add units for modules that compute in the dtype of their own parameters to the plan: one per unit and dtype.

    Return the names of the classes of these modules. `mp_policy`: of units that have none of their own. `skipped`: modules that
    are not sharded.
    """
    classes = checked_classes(full_precision, "full_precision")
    class_names: dict[str, None] = {}
    for unit in plan.units:
        mp = resolve_mp(unit.options.get("mp_policy", mp_policy))
        if mp.param_dtype is None or not classes:
            continue
        stops = frozenset(name for other in plan.units for name in other.modules) - set(unit.modules)
        kept: dict[torch.dtype, list[str]] = {}
        for name in plan.outline.below(unit.modules, stop=stops):
            module = model.get_submodule(name)
            if isinstance(module, classes) and module not in skipped:
                dtype = own_dtype(module)
                if dtype != mp.param_dtype:
                    kept.setdefault(dtype, []).append(name)
                    class_names[type(module).__name__] = None
        for dtype, names in kept.items():
            own = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=mp.param_dtype)
            if set(names) == set(unit.modules):
                plan.set(names[0], mp_policy=replace(own, output_dtype=mp.output_dtype or mp.param_dtype))
            else:
                plan.add(*names, why=WHY_FULL_PRECISION, **{**unit.options, "mp_policy": own})
    return list(class_names)


def own_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter or buffer of a module; float32 if it has none."""
    tensors = [*module.parameters(), *module.buffers()]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
