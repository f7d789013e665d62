"""What programs written for FSDP2 look at behind its modules: its state objects, as views on units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter
from fullshard.policies import MixedPrecisionPolicy
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit, unit_of


class ParameterView:
    """One parameter, under FSDP2's names."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self._parameter = parameter

    @property
    def sharded_param(self) -> nn.Parameter:
        """The DTensor that a caller sees."""
        return self._parameter.sharded

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The parameter that modules compute with, None before the first gather."""
        return self._parameter.full

    @property
    def _unsharded_param(self) -> nn.Parameter | None:
        return self._parameter.full


class GroupView:
    """One group, under FSDP2's names."""

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self._unit, self._group = unit, group

    @property
    def fsdp_params(self) -> list[ParameterView]:
        """The parameters of the group."""
        return [ParameterView(parameter) for parameter in self._group.parameters]

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The policy of the unit."""
        return self._unit.options.mp

    def post_backward(self) -> None:
        """Reduce what this group's parameters were given so far. Pipeline schedules call it after the last microbatch."""
        runtime_of(self._unit).requests.reduce_now(self._unit, self._group)


class ContextView:
    """What the units of one tree share, under FSDP2's names."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def all_states(self) -> list[UnitView]:
        """The units at and below this one."""
        return [UnitView(unit) for unit in units_below(self._unit)]


class UnitView:
    """One unit, under FSDP2's names: what `fully_shard.state(module)` and `module._get_fsdp_state()` return."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.options.mp

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._unit.modules)

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        return [GroupView(self._unit, group) for group in self._unit.groups]

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        groups = self._fsdp_param_groups
        return groups[0] if groups else None

    @property
    def _state_ctx(self) -> ContextView:
        return ContextView(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Wait for the reductions under way and hand out the gradients. Pipeline schedules call it at the end of a step."""
        runtime_of(self._unit).requests.finish_reductions(self._unit)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fullshard keeps no '{name}' for a unit: of FSDP2's private state it shows _fsdp_param_groups, _mp_policy, "
            "_modules, _state_ctx.all_states and _root_post_backward_final_callback()"
        )


def units_below(unit: Unit) -> Iterator[Unit]:
    """The units at and below the modules of `unit`, each once."""
    seen: set[int] = set()
    for root in unit.modules:
        for module in root.modules():
            inner = unit_of(module)
            if inner is not None and inner.number not in seen:
                seen.add(inner.number)
                yield inner


def view_of(module: nn.Module) -> UnitView | None:
    """What `fully_shard.state(module)` returns: None for a module that is no unit."""
    unit = unit_of(module)
    return None if unit is None else UnitView(unit)
