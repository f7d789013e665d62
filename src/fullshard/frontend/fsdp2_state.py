"""FSDP2's state objects, which some programs look at behind its modules, as views on units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fullshard.errors import StateError
from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter
from fullshard.policies import MixedPrecisionPolicy
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit, unit_of


class _View:
    """The state of one unit or of a part of it, under FSDP2's names. A view is made anew whenever it is asked for."""

    _shows: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fullshard keeps no '{name}' for a unit: of FSDP2's private state, {type(self).__name__} shows "
            f"{', '.join(self._shows)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise StateError(
            f"'{name}' was set on {type(self).__name__}, a view of FSDP2's private state in which it would be lost: use the "
            "methods of FSDPModule, or set_custom_all_gather() and set_custom_reduce_scatter()"
        )


class ParameterView(_View):
    """One parameter, under FSDP2's names."""

    _shows = ("sharded_param", "unsharded_param", "unsharded_accumulated_grad", "keep_unsharded_storage")

    def __init__(self, unit: Unit, parameter: ShardedParameter) -> None:
        self.__dict__.update(_unit=unit, _parameter=parameter)

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

    @property
    def unsharded_accumulated_grad(self) -> Tensor | None:
        """The full gradient that backwards without communication kept on this rank."""
        kept = self._parameter.local_grad
        return None if kept is None else self._parameter.sharding.to_module(kept)

    @property
    def keep_unsharded_storage(self) -> bool:
        """True if the memory of the full parameter stays where it is when it is freed."""
        return self._unit.options.keep_memory


class GroupView(_View):
    """One group, under FSDP2's names."""

    _shows = ("fsdp_params", "mp_policy", "post_backward()")

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.__dict__.update(_unit=unit, _group=group)

    @property
    def fsdp_params(self) -> list[ParameterView]:
        """The parameters of the group."""
        return [ParameterView(self._unit, parameter) for parameter in self._group.parameters]

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The policy of the unit."""
        return self._unit.options.mp

    def post_backward(self) -> None:
        """Reduce what this group's parameters were given so far. Pipeline schedules call it after the last microbatch."""
        runtime_of(self._unit).requests.reduce_now(self._unit, self._group)


class ContextView(_View):
    """The context that the units of one tree share, under FSDP2's names."""

    _shows = ("all_states",)

    def __init__(self, unit: Unit) -> None:
        self.__dict__.update(_unit=unit)

    @property
    def all_states(self) -> list[UnitView]:
        """The units at and below this one."""
        return [UnitView(unit) for unit in units_below(self._unit)]


class UnitView(_View):
    """One unit, under FSDP2's names: the result of `fully_shard.state(module)` and `module._get_fsdp_state()`."""

    _shows = (
        *("_fsdp_param_groups", "_fsdp_param_group", "_mp_policy", "_modules", "_comm_ctx", "_state_ctx.all_states"),
        "_root_post_backward_final_callback()",
    )

    def __init__(self, unit: Unit) -> None:
        self.__dict__.update(_unit=unit)

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

    @property
    def _comm_ctx(self) -> object:
        """An object that the units of one model share, and others do not: programs compare its `id`."""
        root = self._unit.place.tree
        found = None if root is None else unit_of(root)
        return (found or self._unit).unit_name


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
    """The result of `fully_shard.state(module)`: None for a module that is no unit."""
    unit = unit_of(module)
    return None if unit is None else UnitView(unit)
