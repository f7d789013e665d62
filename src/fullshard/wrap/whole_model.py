"""From a policy to a plan, and from a plan to a sharded model."""

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
from fullshard.errors import warn_once
from fullshard.frontend.api import PreparedShard, fully_shard
from fullshard.policies import MixedPrecisionPolicy, resolve_mp
from fullshard.runtime.unit import unit_of
from fullshard.sharding.mesh import resolve_mesh
from fullshard.sharding.module_tree import children_first, clean_name
from fullshard.wrap.auto_policy import AutoPolicy
from fullshard.wrap.plan import Mixture, ModelSummary, Plan, PlannedUnit
from fullshard.wrap.policies import Classes, Policy, _classes


def plan_model(
    model: nn.Module,
    policy: Any = "auto",
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
) -> Plan:
    """What `shard_model` would do, as a `Plan` to print and edit. Nothing is touched, and no process group is needed.

    Args:
        model: a model that has no units yet.
        policy: "auto" or an `AutoPolicy`; a `Policy`, or one of FSDP1's policy objects; a `Plan` of a model like this one; a
            function (module, recurse, nonwrapped_numel) -> bool, called as FSDP1 does, root first with recurse=True, and
            with recurse=False, from the leaves up, with the elements that no unit below holds.
        ignored_modules: left alone, with all below them.
        ignored_params: left alone.

    Returns:
        The plan; its last unit is the model itself.

    Raises:
        ValueError: for a policy of another kind, one that chooses a list of modules (which has no forward) whose parameters
            no other unit takes, or modules of the model that are units already, by name.

    Example:
        >>> blocks = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
        >>> print(plan_model(nn.Sequential(*blocks, nn.Linear(8, 2))))
        unit     class                        parameters  elements        bytes  options  why
        0 ... 1  2 x TransformerEncoderLayer      2 x 12   2 x 600  2 x 2.3 KiB           one of 2 blocks
        (model)  Sequential                            2        18         72 B           what is left
        3 units hold 26 parameters: 1,218 elements, 4.8 KiB; the largest holds 2.3 KiB
    """
    check_policy(policy)
    skipped = _inside(ignored_modules)
    _check_untouched(model, skipped)
    ignored = [*ignored_params, *(parameter for module in skipped for parameter in module.parameters(recurse=False))]
    outline = ModelSummary.of(model, ignored=ignored)
    if isinstance(policy, Plan):
        plan = Plan(outline, policy.units)
        _check_ignored(plan, model, skipped)
        return plan
    if policy == "auto" or isinstance(policy, AutoPolicy):
        chosen = AutoPolicy() if isinstance(policy, str) else policy
        units = chosen.units(model, ignored_modules=skipped, ignored=ignored)
        return Plan(outline, units or [PlannedUnit(("",), "no repeated blocks were found: choose units yourself")])
    found = _chosen(model, policy, skipped, ignored)
    never = {id(i) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for i in m.modules() if i is not m}
    units = []
    for name, module in children_first(model):
        if module not in found or id(module) in never:  # attention reads the parameters of its parts, and calls none
            continue
        if name in outline.uncallable:
            _check_list(name, module, found, ignored)
        elif name == "":
            units.append(PlannedUnit((name,), "what is left", found[module]))
        elif any(outline.own[inner] for inner in outline.below([name])) or found[module]:
            units.append(PlannedUnit((name,), "chosen by the policy", found[module]))
    return Plan(outline, units)


def _inside(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """`modules` and all below them."""
    listed = list(modules)
    for module in listed:
        if not isinstance(module, nn.Module):
            raise ValueError(f"ignored_modules takes modules, got {module!r}: take model.get_submodule(name)")
    return [inner for module in listed for inner in module.modules()]


def _chosen(
    model: nn.Module, policy: Any, skipped: Sequence[nn.Module], ignored: Sequence[nn.Parameter]
) -> dict[nn.Module, dict[str, Any]]:
    if isinstance(policy, Policy):
        return policy.choose(model, skipped)
    if _torch.is_wrap_policy(policy):
        return _torch.run_wrap_policy(policy, model, set(skipped))
    _check_function(policy, model)
    asked = _asked(model, policy, set(skipped), {id(parameter) for parameter in ignored})
    return {module: {} for module in asked}


def check_policy(policy: Any, name: str = "policy") -> None:
    """Raise ValueError for what is no policy. `name`: of the argument that it was given as."""
    known = isinstance(policy, (Policy, AutoPolicy, Plan)) or (isinstance(policy, str) and policy == "auto")
    if not known and (not callable(policy) or isinstance(policy, type)) and not _torch.is_wrap_policy(policy):
        classes = policy if isinstance(policy, (set, list, tuple, frozenset)) else [policy]
        given = [cls.__name__ for cls in classes if isinstance(cls, type)]
        hint = f": for modules of these classes give ModuleWrapPolicy({{{', '.join(given)}}})" if given else ""
        raise ValueError(
            f"{name} must be 'auto', a Plan, a Policy, or a function (module, recurse, nonwrapped_numel) -> bool, got "
            f"{policy!r}{hint}"
        )


def _asked(model: nn.Module, policy: Callable[..., bool], skipped: set[nn.Module], ignored: set[int]) -> list[nn.Module]:
    """The modules below `model` that a function chooses, children first, each asked for once."""
    chosen: list[nn.Module] = []
    seen = {model}

    def ask(module: nn.Module) -> int:
        """The elements below `module` that units hold."""
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        held = 0
        for child in module.children():
            if child not in skipped and child not in seen:
                seen.add(child)
                held += ask(child)
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - held):
            chosen.append(module)
            return numel
        return held

    ask(model)
    return chosen


def _check_function(policy: Callable[..., bool], model: nn.Module) -> None:
    try:
        inspect.signature(policy).bind(module=model, recurse=True, nonwrapped_numel=0)
    except TypeError as wrong:
        raise ValueError(
            f"a policy function is called with module=, recurse= and nonwrapped_numel= ({wrong}); for a function of the module "
            "alone take CustomPolicy(function)"
        ) from None
    except ValueError:  # it has no signature to look at
        return


def _check_untouched(model: nn.Module, skipped: Sequence[nn.Module]) -> None:
    left_out = set(map(id, skipped))
    units = [name for name, module in children_first(model) if unit_of(module) is not None and id(module) not in left_out]
    found = [clean_name(name) or "(model)" for name in units]
    if found:
        raise ValueError(
            f"modules {found[:5]}{' and more' if len(found) > 5 else ''} are units already: a plan is made for a model that "
            "has none; call fully_shard for the rest by hand, or undo(model) first"
        )


def _check_list(name: str, module: nn.Module, found: Collection[nn.Module], ignored: Iterable[nn.Parameter]) -> None:
    """A list of modules that a policy chose needs no unit if everything in it has one."""
    left_out = {id(parameter) for parameter in ignored}

    def left(inner: nn.Module) -> bool:
        own = any(id(parameter) not in left_out for parameter in inner.parameters(recurse=False))
        return own or any(left(child) for child in inner.children() if child not in found)

    if left(module):
        raise ValueError(
            f"the policy chose '{name}' ({type(module).__name__}), which has no forward, so nobody would know when to gather "
            "it: choose what is in it, or the module around it"
        )


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    policy: Any = "auto",
    *,
    strict: bool = False,
    full_precision: Classes | type[nn.Module] = (_torch.BATCH_NORM,),
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    **options: Any,
) -> Plan:
    """Call `fully_shard` on the modules of `model` that `policy` chooses, children first, and on the model. Collective.

    Args:
        model: sharded in place.
        mesh: as of `fully_shard`.
        policy: as of `plan_model`.
        strict: refuse units that would mix trainable and frozen parameters, which travel in groups of their own, instead
            of warning.
        full_precision: under `mp_policy.param_dtype`, modules of these classes (batch norms) are units that compute in the
            dtype of their own parameters, with inputs cast to it and outputs cast back.
        ignored_modules: left alone, with all below them.
        ignored_params: left alone.
        options: keyword options of `fully_shard`, for all units; what a policy or plan says of one unit goes first.

    Returns:
        The plan that was carried out; print it to see what each unit holds.

    Raises:
        ValueError: before anything has changed, for what `plan_model` and `fully_shard` refuse, and with `strict` for mixed
            units, listing their parameters.
        TypeError: before anything has changed, for options that `fully_shard` does not have.

    Example:
        >>> plan = shard_model(model, mesh)                                                   # doctest: +SKIP
        >>> print(plan)                                                                       # doctest: +SKIP
        >>> plan = plan_model(model); plan.drop("lm_head"); shard_model(model, mesh, plan)    # doctest: +SKIP
    """
    ignored_modules = list(ignored_modules)
    skipped = _inside(ignored_modules)
    ignored = [*ignored_params, *(parameter for module in skipped for parameter in module.parameters(recurse=False))]
    plan = plan_model(model, policy, ignored_modules=ignored_modules, ignored_params=ignored)
    _check_options([options, *(unit.options for unit in plan.units)])
    warn_about_mixtures(plan.mixtures(), strict=strict)
    _keep_precision(plan, model, options, _classes(full_precision, "full_precision takes"), skipped)
    if mesh is None and options.get("dp_mesh_dims") is None:
        mesh = resolve_mesh(None).mesh
    made = {name: model.get_submodule(name) for unit in plan.units for name in unit.modules}
    orders = [
        PreparedShard(
            [made[name] for name in unit.modules],
            units=made.values(),
            ignored_params=ignored,
            mesh=mesh,
            **{**options, **unit.options},
        )
        for unit in plan.units
    ]
    for order in orders:
        order.apply_prepared()
    return plan


def _check_ignored(plan: Plan, model: nn.Module, skipped: Sequence[nn.Module]) -> None:
    left_out = set(map(id, skipped))
    for unit in plan.units:
        for name in unit.modules:
            if id(model.get_submodule(name)) in left_out:
                raise ValueError(f"the plan makes a unit of '{name}', which ignored_modules leaves alone: plan.drop('{name}')")


def _check_options(every: Iterable[Any]) -> None:
    known = set(inspect.signature(fully_shard).parameters) - {"module", "mesh", "ignored_params"}
    for options in every:
        for name in options:
            if name not in known:
                raise TypeError(f"fully_shard has no option '{name}': there are {sorted(known)}")


def warn_about_mixtures(mixtures: Sequence[Mixture], *, strict: bool = False) -> None:
    """Warn of units that mix trainable and frozen parameters, or with `strict` raise ValueError.

    Units that are alike but for their place are told of once, with the names of the others.
    """
    alike: dict[tuple[Any, ...], list[Mixture]] = {}
    for mixture in mixtures:
        entries = (*mixture.trainable, *mixture.frozen)
        inside = tuple((entry.name.removeprefix(f"{mixture.unit}."), entry.numel) for entry in entries)
        alike.setdefault((inside, len(mixture.trainable)), []).append(mixture)
    said = []
    for first, *others in alike.values():
        more = f" (and alike: {', '.join(other.unit for other in others)})" if others else ""
        said.append(f"{first}{more}")
    if strict and said:
        raise ValueError("strict=True: " + "; ".join(said))
    for text in said:
        warnings.warn(text, stacklevel=3)


def _keep_precision(
    plan: Plan, model: nn.Module, options: dict[str, Any], classes: tuple[type[nn.Module], ...], skipped: Sequence[nn.Module]
) -> None:
    """Modules of `classes` become units that compute in the dtype of their own parameters: one in each unit that has any."""
    left_out = set(map(id, skipped))
    said: dict[str, None] = {}
    for unit in plan.units:
        mp = resolve_mp(unit.options.get("mp_policy", options.get("mp_policy", MixedPrecisionPolicy())))
        if mp.param_dtype is None or not classes:
            continue
        stops = frozenset(name for other in plan.units for name in other.modules) - set(unit.modules)
        kept: dict[torch.dtype, list[str]] = {}
        for name in plan.outline.below(unit.modules, stop=stops):
            module = model.get_submodule(name)
            if isinstance(module, classes) and id(module) not in left_out:
                tensors = [*module.parameters(), *module.buffers()]
                dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
                if dtype != mp.param_dtype:
                    kept.setdefault(dtype, []).append(name)
                    said[type(module).__name__] = None
        for dtype, names in kept.items():
            own = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=mp.param_dtype)
            if set(names) == set(unit.modules):
                plan.set(names[0], mp_policy=replace(own, output_dtype=mp.output_dtype or mp.param_dtype))
            else:
                plan.add(*names, why="full precision", **{**unit.options, "mp_policy": own})
    if said:
        warn_once(
            f"{', '.join(said)} compute in the dtype of their own parameters, not in mp_policy.param_dtype, as units of their "
            "own; full_precision=() turns that off"
        )
