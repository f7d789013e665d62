"""Views of units with the attributes of FSDP2's private state objects, which some programs read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import UNIT_CREATED, Originals, ParamGroup, ShardedParameter, Unit, recovered, require_unit, unit_of
from fullshard.errors import StateError
from fullshard.frontend.api import fully_shard
from fullshard.frontend.module import FSDPModule, sharded_method
from fullshard.policies import MixedPrecisionPolicy


class _View:
    """Read-only view with FSDP2's names, created at each access."""

    def __init__(self, unit: Unit, part: Any = None) -> None:
        self.__dict__.update(_unit=unit, _part=part)

    def __getattr__(self, name: str) -> Any:
        names = [one for one in vars(type(self)) if not one.startswith("__")]
        raise AttributeError(
            f"fullshard has no '{name}' for a unit. Of FSDP2's private state, {type(self).__name__} has {', '.join(names)}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise StateError(
            f"'{name}' cannot be set on {type(self).__name__}: it is a view of FSDP2's private state, and the value would be "
            "lost. Use the methods of FSDPModule, such as set_custom_all_gather() and set_custom_reduce_scatter()."
        )


class ParameterView(_View):
    """View of one parameter, with the names of FSDP2's FSDPParam."""

    _part: ShardedParameter

    @property
    def sharded_param(self) -> nn.Parameter:
        """The sharded parameter, a DTensor."""
        return self._part.sharded

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The parameter for forward and backward; None before the first all-gather."""
        return self._part.unsharded

    _unsharded_param = unsharded_param

    @property
    def unsharded_accumulated_grad(self) -> Tensor | None:
        """The unsharded gradient that backwards without communication accumulated on this rank."""
        kept = self._part.local_grad
        return None if kept is None else self._part.sharding.to_module(kept)

    @property
    def keep_unsharded_storage(self) -> bool:
        """True if reshard keeps the storage of the unsharded parameter."""
        return self._unit.options.keep_memory


class GroupView(_View):
    """View of one parameter group, with the names of FSDP2's FSDPParamGroup."""

    _part: ParamGroup

    @property
    def fsdp_params(self) -> list[ParameterView]:
        """The parameters of the group."""
        return [ParameterView(self._unit, parameter) for parameter in self._part.parameters]

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy of the unit."""
        return self._unit.options.mp

    def post_backward(self) -> None:
        """Reduce the gradients of this group so far. Pipeline schedules call it after the last microbatch."""
        self._unit.reduce_now(self._part)


class ContextView(_View):
    """View of the context that the units of one model share, with the names of FSDP2's state context."""

    @property
    def all_states(self) -> list[UnitView]:
        """The units at and below this one."""
        below = [unit_of(module) for root in self._unit.modules for module in root.modules()]
        return [UnitView(unit) for unit in dict.fromkeys(below) if unit is not None]


class UnitView(_View):
    """View of one unit, with the names of FSDP2's FSDPState: the result of `fully_shard.state(module)`."""

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


def _attach(unit: Unit, _: Originals | None) -> None:
    for root in unit.modules:
        _torch.attach_state(root, UnitView(unit))


def _state(module: nn.Module) -> UnitView | None:
    """Return the view of a sharded module, or None for a module that is not sharded. It is `fully_shard.state`."""
    unit = unit_of(module)
    return None if unit is None else UnitView(unit)


@sharded_method
def _get_fsdp_state(self: FSDPModule) -> UnitView:
    """Return a view with FSDP2's private attributes: `_fsdp_param_groups`, `_mp_policy`, `_state_ctx.all_states`."""
    return UnitView(require_unit(self))


UNIT_CREATED.append(_attach)
fully_shard.state = _state  # type: ignore[attr-defined]
