"""Views of units with the attributes of FSDP2's private state objects, which some programs use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fullshard.core.param_group import ParamGroup
from fullshard.core.sharded_param import ShardedParameter
from fullshard.core.unit import Unit
from fullshard.core.unit_modules import recovered, unit_of
from fullshard.errors import StateError
from fullshard.policies import MixedPrecisionPolicy


class _View:
    """Read-only view with FSDP2's names, created at each access."""

    _names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fullshard has no '{name}' for a unit. Of FSDP2's private state, {type(self).__name__} has "
            f"{', '.join(self._names)}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise StateError(
            f"'{name}' cannot be set on {type(self).__name__}: it is a view of FSDP2's private state, and the value would be "
            "lost. Use the methods of FSDPModule, such as set_custom_all_gather() and set_custom_reduce_scatter()."
        )


class ParameterView(_View):
    """View of one parameter, with the names of FSDP2's FSDPParam."""

    _names = ("sharded_param", "unsharded_param", "unsharded_accumulated_grad", "keep_unsharded_storage")

    def __init__(self, unit: Unit, parameter: ShardedParameter) -> None:
        self.__dict__.update(_unit=unit, _parameter=parameter)

    @property
    def sharded_param(self) -> nn.Parameter:
        """The sharded parameter, a DTensor."""
        return self._parameter.sharded

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The parameter for forward and backward; None before the first all-gather."""
        return self._parameter.unsharded

    @property
    def _unsharded_param(self) -> nn.Parameter | None:
        return self._parameter.unsharded

    @property
    def unsharded_accumulated_grad(self) -> Tensor | None:
        """The unsharded gradient that backwards without communication accumulated on this rank."""
        kept = self._parameter.local_grad
        return None if kept is None else self._parameter.sharding.to_module(kept)

    @property
    def keep_unsharded_storage(self) -> bool:
        """True if reshard keeps the storage of the unsharded parameter."""
        return self._unit.options.keep_memory


class GroupView(_View):
    """View of one parameter group, with the names of FSDP2's FSDPParamGroup."""

    _names = ("fsdp_params", "mp_policy", "post_backward()")

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.__dict__.update(_unit=unit, _group=group)

    @property
    def fsdp_params(self) -> list[ParameterView]:
        """The parameters of the group."""
        return [ParameterView(self._unit, parameter) for parameter in self._group.parameters]

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy of the unit."""
        return self._unit.options.mp

    def post_backward(self) -> None:
        """Reduce the gradients of this group so far. Pipeline schedules call it after the last microbatch."""
        self._unit.reduce_now(self._group)


class ContextView(_View):
    """View of the context that the units of one model share, with the names of FSDP2's state context."""

    _names = ("all_states",)

    def __init__(self, unit: Unit) -> None:
        self.__dict__.update(_unit=unit)

    @property
    def all_states(self) -> list[UnitView]:
        """The units at and below this one."""
        return [UnitView(unit) for unit in units_below(self._unit)]


class UnitView(_View):
    """View of one unit, with the names of FSDP2's FSDPState: the result of `fully_shard.state(module)`."""

    _names = (
        *("_fsdp_param_groups", "_fsdp_param_group", "_mp_policy", "_modules", "_comm_ctx", "_state_ctx.all_states"),
        "_root_post_backward_final_callback()",
    )

    def __init__(self, unit: Unit) -> None:
        self.__dict__.update(_unit=unit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitView) and other._unit is self._unit

    def __hash__(self) -> int:
        return hash(self._unit)

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
        """Wait for the reductions in flight and set `.grad`. Pipeline schedules call it at the end of a step."""
        recovered(self._unit).finish_reductions()

    @property
    def _comm_ctx(self) -> object:
        """An object shared by exactly the units of one model. Programs compare its `id`."""
        root = self._unit.place.outermost
        found = None if root is None else unit_of(root)
        return (found or self._unit).unit_name


def units_below(unit: Unit) -> Iterator[Unit]:
    """Yield the units at and below the modules of `unit`, each once."""
    seen: set[Unit] = set()
    for root in unit.modules:
        for module in root.modules():
            inner = unit_of(module)
            if inner is not None and inner not in seen:
                seen.add(inner)
                yield inner


def view_of(module: nn.Module) -> UnitView | None:
    """Return the view of a sharded module, or None for a module that is not sharded. It is `fully_shard.state`."""
    unit = unit_of(module)
    return None if unit is None else UnitView(unit)
