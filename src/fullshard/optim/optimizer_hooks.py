"""Optimizers of sharded parameters: `rebind` for optimizers built before sharding, and hooks before and after each step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard import _torch
from fullshard.core import (
    ShardedParameter,
    Unit,
    back_references,
    full_tensor,
    is_ignored,
    like_shard,
    logical_parameters,
    replacement_generation,
    replacement_of,
    restore_subclass,
    shard_of,
    use_plain_dtensor,
)
from fullshard.errors import StateError, some_of, warn_once
from fullshard.optim.empty_shards import StepOrder, is_foreign
from fullshard.optim.local_steps import LocalStep, is_element_wise
from fullshard.optim.muon import MuonStep, splits_of
from fullshard.optim.pieces import is_same
from fullshard.optim.step_checks import prepare_step
from fullshard.optim.step_wrapper import view_of
from fullshard.policies import LintWarning

_CACHE = "_fullshard_optimizer_cache"  # attribute of an optimizer: its _OptimizerCache


MakeListener = Callable[[torch.optim.Optimizer, Sequence[Sequence[ShardedParameter]]], Callable[[list[dict[str, Any]]], None]]
"""Returns what is called after each step of an optimizer, with its `param_groups`. Of the sharded parameters of each group."""

STEP_LISTENERS: list[MakeListener] = []
"""Each is called for an optimizer with sharded parameters, and again when these change."""


def rebind(optimizer: torch.optim.Optimizer) -> int:
    """Replace stale parameters in `optimizer`, and return how many were replaced.

    Plain parameters are replaced by the sharded ones, or sharded ones by the plain ones after `undo`. Existing optimizer
    states with the shape of the parameter are sharded. A step calls it if parameters were replaced since the one before.
    """
    replaced = {
        parameter: now
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (now := replacement_of(parameter)) is not None
    }
    if not replaced:
        return 0
    seen: dict[int, int] = {}  # id of a parameter -> number of its group
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            now = replaced.get(parameter, parameter)
            if seen.setdefault(id(now), number) != number:
                raise ValueError(
                    f"A parameter of shape {tuple(now.shape)} is in two parameter groups of {type(optimizer).__name__}, in one "
                    "of them as it was before fully_shard() or undo(). Take it out of one of them."
                )
    states: dict[Tensor, Any] = {}
    for parameter, now in replaced.items():
        held = optimizer.state.get(parameter)
        if held and view_of(optimizer) == "whole_view":  # whole, on the owner
            states[now] = held
        elif held:
            states[now] = {key: _state_like(value, parameter, now) for key, value in held.items()}
    for group in optimizer.param_groups:  # in place, as some optimizers keep the list; two tied parameters may have become one
        group["params"][:] = dict.fromkeys(replaced.get(parameter, parameter) for parameter in group["params"])
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
    optimizer.state.update(states)
    return len(replaced)


def _state_like(value: Any, original: Tensor, replacement: nn.Parameter) -> Any:
    """Return an optimizer state of `original`, distributed like its replacement. Collective after undo()."""
    if not isinstance(value, Tensor) or value.shape != original.shape:
        return value
    logical = next(iter(logical_parameters([replacement])), None)
    if logical is None:  # after undo(), which is collective as well
        if not isinstance(value, DTensor):
            return value
        whole = full_tensor(value)
        if not isinstance(replacement, DTensor):
            return whole
        return distribute_tensor(whole, replacement.device_mesh, replacement.placements)
    if isinstance(value, DTensor):
        rows = logical.sharding.rows_in(value)
        if rows is not None:
            return logical.dtensor_like_shard(rows.clone())
        return shard_of(logical, full_tensor(value), dtype=value.dtype)  # it was sharded in another way, before undo()
    # A number, such as a count of steps, may have the shape of a parameter without dims.
    return shard_of(logical, value, dtype=value.dtype) if value.ndim else value


def shard_loaded_states(optimizer: torch.optim.Optimizer) -> None:
    """Shard loaded states as their parameters are sharded. Those of an unsharded optimizer are plain tensors."""
    for group in optimizer.param_groups if view_of(optimizer) is None else ():  # states under a view are plain tensors
        for parameter in logical_parameters(group["params"]):
            state = optimizer.state.get(parameter.sharded, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:  # a count of steps may have the shape of a parameter without dims
                    state[key] = like_shard(parameter, value)


def _warn_of_plain_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Warn of plain parameters with gradients beside sharded ones."""
    plain: list[str] = []
    units: list[Unit] = []
    for group in optimizer.param_groups:
        names = group.get("param_names", [f"one of shape {tuple(p.shape)}" for p in group["params"]])
        for name, parameter in zip(names, group["params"]):
            if type(parameter) is nn.Parameter and parameter.grad is not None and not is_ignored(parameter):
                plain.append(name)
        units += [unit for p in logical_parameters(group["params"])[:1] if (unit := p.unit()) is not None]
    if not plain or not units:
        return
    unit = units[0]
    silent = "optimizer" in unit.options.checks.silence
    if not silent and unit.axis.ranks * unit.axis.replica_count > 1 and unit.axis.is_first_rank:
        warn_once(
            f"An optimizer steps sharded parameters and {len(plain)} plain ones ({some_of(plain)}), whose gradients no unit "
            "reduces, so each rank trains its own copy. Call fully_shard() on the module that holds them, for example the "
            "outermost one.",
            LintWarning,
        )


class _OptimizerCache:
    """Cache of one optimizer, rebuilt when its parameters change."""

    def __init__(self, optimizer: torch.optim.Optimizer, before: _OptimizerCache | None = None) -> None:
        """`before`: the cache that this one takes the place of."""
        self._generation = replacement_generation()
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._back_references = [back_references(members) for members in self._parameters]
        sharded = [logical_parameters(members) for members in self._parameters]
        every = [*chain.from_iterable(sharded)]
        self._sharded = [*map(weakref.ref, every)]
        self.listeners = [make(optimizer, sharded) for make in STEP_LISTENERS]  # told of its steps
        self.states: Any = None  # `optimizer.state`, which `load_state_dict()` replaces
        # lists the tensors of a step instead of the optimizer: local shards, or those of Muon; None for other optimizers
        self.lister: LocalStep | MuonStep | None = None
        if self._sharded and is_element_wise(optimizer):
            self.lister = LocalStep(optimizer)
        elif self._sharded and _torch.steps_as(optimizer, torch.optim.Muon):
            # One rank alone may build this cache anew. A new MuonStep would compare its plan with the other ranks, which may
            # have kept theirs, so this rank keeps it, too.
            kept = None if before is None else before.lister
            self.lister = kept if isinstance(kept, MuonStep) else MuonStep(optimizer)
            self.lister.keep_only(every)
        self.had_grad: set[int] = set()  # ids of those of `sharded` that had a gradient when the running step began
        # order of the parameters in steps of optimizers of other libraries; None for optimizers of torch
        self.order = StepOrder(every) if self.lister is None and is_foreign(optimizer) else None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the optimizer builds a new cache

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _OptimizerCache:
        """Return the cache of `optimizer`, rebuilt if its parameters changed or belong to other units than in the last step."""
        cache: _OptimizerCache | None = optimizer.__dict__.get(_CACHE)
        is_new = cache is None
        _leave_order(optimizer)  # if the step before raised
        if is_new:
            optimizer.register_state_dict_pre_hook(_before_state_dict)
            optimizer.register_load_state_dict_pre_hook(_before_load)
        if cache is None or not cache.is_current(optimizer.param_groups):
            if replaced := rebind(optimizer):
                warn_once(
                    f"{type(optimizer).__name__} held {replaced} parameters that fully_shard() or undo() replaced. It steps "
                    "the new ones from now on, but other lists of the old ones are stale: take them from model.parameters() "
                    "again."
                )
            cache = optimizer.__dict__[_CACHE] = cls(optimizer, cache)
        if is_new:
            _warn_of_plain_parameters(optimizer)
        if cache.states is not optimizer.state:
            shard_loaded_states(optimizer)
            cache.states = optimizer.state
        return cache

    def is_current(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return True if the optimizer still has the same parameters, and these still belong to the same units."""
        if len(groups) != len(self._parameters) or self._generation != replacement_generation():
            return False
        for group, known, backs in zip(groups, self._parameters, self._back_references):
            if not is_same(group["params"], known) or not is_same(back_references(group["params"]), backs):
                return False
        return True

    @property
    def sharded(self) -> list[ShardedParameter]:
        """The sharded parameters of the optimizer whose units still exist."""
        return [parameter for reference in self._sharded if (parameter := reference()) is not None]


def _leave_order(optimizer: torch.optim.Optimizer) -> None:
    cache: _OptimizerCache | None = optimizer.__dict__.get(_CACHE)
    if cache is not None and cache.order is not None:
        cache.order.leave()


def _before_load(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    # A load with names, as by torch.distributed.checkpoint, has taken them in the present order.
    if not any(isinstance(key, str) for group in state_dict["param_groups"] for key in group["params"]):
        _leave_order(optimizer)


def _before_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Follow fully_shard(), and finish a step that raised: momentum buffers of SGD are under local tensors."""
    _leave_order(optimizer)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        now = replacement_of(parameter)
        if now is None or view_of(optimizer) == "whole_view":  # whose states are whole
            continue
        logical = next(iter(logical_parameters([now])), None)
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, DTensor) and (logical is None or logical.sharding.rows_in(value) is None):
                raise StateError(
                    f"{type(optimizer).__name__} has states of a parameter of shape {tuple(value.shape)} as it was sharded "
                    "before undo(), which the next step distributes like the parameter that replaced it. Take the state dict "
                    "before undo(), or after that step."
                )
    rebind(optimizer)
    cache: _OptimizerCache | None = optimizer.__dict__.get(_CACHE)
    if cache is not None and cache.lister is not None and isinstance(optimizer, torch.optim.SGD):
        cache.lister.begin_step(optimizer)


def _closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure that a step was called with; None if there is none."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _holds_sharded(optimizer):
        return
    cache = _OptimizerCache.of(optimizer)
    has_closure = _closure_of(args, kwargs) is not None
    sharded = cache.sharded
    for gradient in [parameter.sharded.grad for parameter in sharded] if _torch.step_may_be_compiled() else ():
        # dynamo cannot trace a DTensor whose storage offset differs from that of its local tensor, so each gradient gets a
        # storage of its own over its part of the flat gradient.
        if isinstance(gradient, DTensor) and _torch.local_tensor(gradient).storage_offset() != gradient.storage_offset():
            _torch.point_at(gradient, _torch.as_own_storage(_torch.local_tensor(gradient)))
    cache.had_grad = set()
    for parameter in sharded:
        if parameter.sharded.grad is not None:
            cache.had_grad.add(id(parameter))
            parameter.note_write()  # here as well, since `_after_step` does not run if the step or a hook raises
    for one in {id(parameter.group): parameter for parameter in sharded}.values():  # one parameter of each group
        unit, group = one.unit(), one.group()
        if unit is not None and group is not None:
            prepare_step(unit, group)
    if not isinstance(cache.lister, LocalStep):  # which runs no operator of DTensor
        _check_whole_matrices(optimizer, sharded)
        use_plain_dtensor([parameter.sharded for parameter in sharded])
        if cache.order is not None and view_of(optimizer) is None:
            cache.order.enter(optimizer, has_closure=has_closure)
    splits = splits_of(optimizer)
    if splits is not None:
        splits.check_sharded(f"{type(optimizer).__name__}.step()")
    if cache.lister is not None:
        cache.lister.begin_step(optimizer)
        _torch.have_listed_by(optimizer, cache.lister, cache.lister.end_step)


def _check_whole_matrices(optimizer: torch.optim.Optimizer, sharded: Sequence[ShardedParameter]) -> None:
    """Raise for a step of torch's Adafactor on shards: DTensor cannot compute its norms of rows and columns in place."""
    is_adafactor = isinstance(optimizer, torch.optim.Adafactor) and view_of(optimizer) is None
    matrix = next((one for one in sharded if one.sharded.ndim > 1), None) if is_adafactor else None
    if matrix is not None and inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adafactor.step):
        raise StateError(
            f"{type(optimizer).__name__}.step(): parameter '{matrix.name}' is sharded, and Adafactor computes with whole "
            "matrices. Call fullshard.whole_view(optimizer) once, before the first step: each rank then steps the parameters "
            "that it owns, whole."
        )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    cache: _OptimizerCache | None = optimizer.__dict__.get(_CACHE)
    if cache is None:
        return
    restore_subclass()
    _torch.have_listed_by_itself(optimizer)
    _leave_order(optimizer)
    # Record the writes, since fused operations, and foreach operations on DTensors, increase no version counter. A closure may
    # clear the gradients that it made, and a hook of the optimizer may clear them all.
    has_closure = _closure_of(args, kwargs) is not None
    had_grad = cache.had_grad
    for parameter in cache.sharded:
        if id(parameter) in had_grad or parameter.sharded.grad is not None or (has_closure and parameter.sharded.requires_grad):
            parameter.note_write()
    for listener in cache.listeners:
        listener(optimizer.param_groups)


# Optimizers without sharded parameters: generation of replacements and number of parameters, for which this was found.
_UNCONCERNED: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def _holds_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer steps sharded parameters, or parameters that sharded ones replaced."""
    if _CACHE in optimizer.__dict__:
        return True
    groups = [group["params"] for group in optimizer.param_groups]
    kinds = set(chain.from_iterable(map(type, members) for members in groups))
    if any(issubclass(kind, DTensor) for kind in kinds) and any(map(logical_parameters, groups)):
        return True
    state = replacement_generation(), sum(map(len, groups))
    if _UNCONCERNED.get(optimizer) == state:
        return False
    if any(replacement_of(parameter) is not None for parameter in chain.from_iterable(groups)):
        return True
    _UNCONCERNED[optimizer] = state
    return False


@cache
def register() -> None:
    """Register hooks around the steps of all optimizers, once: checks, steps on local shards and by owners, log entries."""
    # dynamo would trace into them if the caller compiles `optimizer.step`
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))
