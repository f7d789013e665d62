"""Optimizers and sharded parameters: rebinding one that was built before sharding, and what precedes and follows each step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.frontend.empty_shards import StepOrder, is_foreign
from fullshard.frontend.local_steps import LocalStep, is_element_wise
from fullshard.frontend.local_view import is_viewed
from fullshard.frontend.step_entries import StepEntries
from fullshard.params.shard_values import shard_of
from fullshard.params.sharded_param import ShardedParameter, logical_parameters
from fullshard.params.sharded_tensor import LOGICAL, sleep, wake
from fullshard.params.stale_params import Successions, successor
from fullshard.runtime.lint import is_ignored, remark_on_gradients, remark_on_optimizer
from fullshard.runtime.unit import Unit, owner_of


def rebind(optimizer: torch.optim.Optimizer) -> int:
    """Let `optimizer` train what stands for the parameters it was built with; how many there were.

    That is sharded ones for plain ones, or the other way round after `undo`. State it holds already (momenta of the full
    shape) is sliced. Runs by itself before every `step()`.
    """
    count = 0
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            sharded = successor(parameter)
            if sharded is None:
                continue
            parameters[index] = sharded
            count += 1
            held = optimizer.state.pop(parameter, None)
            if held:
                optimizer.state[sharded] = {key: _shard_state(value, parameter, sharded) for key, value in held.items()}
        if count:  # two tied originals may have become one
            group["params"] = list(dict.fromkeys(parameters))
    return count


def _shard_state(value: Any, original: Tensor, sharded: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != original.shape or value.ndim == 0:
        return value
    logical = next(iter(logical_parameters([sharded])), None)
    if logical is None:  # plain again: its state becomes whole (collective, as undo() was)
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return logical.dtensor_like_shard(
            logical.sharding.rows_of(value, name=logical.name, doing="has in its optimizer").clone()
        )
    return shard_of(logical, value, dtype=value.dtype)


_STEPPER = "_fullshard_stepper"  # on an optimizer
_SEEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _remark(optimizer: torch.optim.Optimizer) -> None:
    """Once per optimizer: plain parameters beside sharded ones; and sharded ones of which none has a gradient."""
    _SEEN.add(optimizer)
    plain: list[str] = []
    units: list[Unit] = []
    sharded = [p for p in logical_parameters(p for group in optimizer.param_groups for p in group["params"]) if p.requires_grad]
    unit = owner_of(sharded[0]) if sharded else None
    if unit is not None and all(parameter.sharded.grad is None for parameter in sharded):
        remark_on_gradients(unit, [parameter.name for parameter in sharded])
    for group in optimizer.param_groups:
        names = group.get("param_names", [f"one of shape {tuple(p.shape)}" for p in group["params"]])
        for name, parameter in zip(names, group["params"]):
            if type(parameter) is nn.Parameter and parameter.grad is not None and not is_ignored(parameter):
                plain.append(name)
        units += [unit for p in logical_parameters(group["params"])[:1] if (unit := owner_of(p)) is not None]
    if plain and units:
        remark_on_optimizer(units[0], plain)


class _Stepper:
    """An optimizer of sharded parameters: what its steps know of it, for as long as it has the same parameters.

    entries: of its steps, in the logs.     local: how it computes with local shards; None if it must not.
    order: of its parameters in steps that it makes itself; None if torch makes them.
    """

    __slots__ = ("_backs", "_parameters", "_sharded", "_successions", "entries", "local", "order")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._successions = Successions.count
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._backs = [[parameter.__dict__.get(LOGICAL) for parameter in members] for members in self._parameters]
        sharded = [logical_parameters(members) for members in self._parameters]
        self._sharded = [weakref.ref(parameter) for members in sharded for parameter in members]
        self.entries = StepEntries(optimizer, sharded)
        self.local = LocalStep(optimizer) if self._sharded and is_element_wise(optimizer) else None
        foreign = self.local is None and is_foreign(optimizer)
        self.order = StepOrder(parameter for members in sharded for parameter in members) if foreign else None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the optimizer makes its own

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Stepper:
        """That of `optimizer`, made anew if its parameters are others than in the step before, or belong to other units."""
        stepper: _Stepper | None = optimizer.__dict__.get(_STEPPER)
        if stepper is not None and stepper.order is not None:
            stepper.order.leave()  # that of a step that raised
        if stepper is None or not stepper.holds(optimizer.param_groups):
            rebind(optimizer)
            stepper = optimizer.__dict__[_STEPPER] = cls(optimizer)
        return stepper

    def holds(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether nothing of that changed."""
        if len(groups) != len(self._parameters) or self._successions != Successions.count:
            return False
        for group, known, backs in zip(groups, self._parameters, self._backs):
            members = group["params"]
            if len(members) != len(known) or not all(map(is_, members, known)):
                return False
            if not all(map(is_, [parameter.__dict__.get(LOGICAL) for parameter in members], backs)):
                return False
        return True

    @property
    def sharded(self) -> list[ShardedParameter]:
        """Its sharded parameters, without those of units that are gone."""
        return [parameter for reference in self._sharded if (parameter := reference()) is not None]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepper = _Stepper.of(optimizer)
    if optimizer not in _SEEN:
        _remark(optimizer)
    sharded = stepper.sharded
    for check in dict.fromkeys([parameter.before_step for parameter in sharded]):
        if check is not None:
            check()
    if stepper.local is None:
        sleep([parameter.sharded for parameter in sharded])
        if stepper.order is not None and not is_viewed(optimizer):
            stepper.order.enter(optimizer)
    else:
        stepper.local.keeps_dtensors = False
        _torch.have_listed_by(optimizer, stepper.local, stepper.local.settle)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    wake()
    _torch.have_listed_by_itself(optimizer)
    stepper = optimizer.__dict__.get(_STEPPER) or _Stepper.of(optimizer)
    if stepper.order is not None:
        stepper.order.leave()
    if stepper.local is None or stepper.local.keeps_dtensors:
        for parameter in stepper.sharded:  # DTensor's foreach and fused operations move no version counter
            if parameter.sharded.grad is not None:
                parameter.note_write()
    stepper.entries.say(optimizer.param_groups)


_torch.register_optimizer_step_pre_hook(_before_step)
_torch.register_optimizer_step_post_hook(_after_step)
