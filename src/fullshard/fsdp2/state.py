"""Views of units with the attributes of FSDP2's private state objects, which some programs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard import _torch
from fullshard.core import UNIT_CREATED, Originals, ParamGroup, Unit, recovered, require_unit, unit_of, units_below
from fullshard.errors import StateError
from fullshard.frontend.api import fully_shard
from fullshard.frontend.module import FSDPModule, sharded_method


class View:
    """Read-only view of a unit or of a part of it, with the names of one of FSDP2's private classes. Made at each access."""

    def __init__(self, kind: str, unit: Unit, part: Any = None) -> None:
        self.__dict__.update(kind=kind, unit=unit, part=part)

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("kind", "")
        names = _NAMES.get(kind, {})
        if name not in names:
            raise AttributeError(
                f"fullshard has no '{name}' for a unit. Of FSDP2's private state, the view of {kind} has {', '.join(names)}."
            )
        return names[name](self.unit, self.part)

    def __setattr__(self, name: str, value: Any) -> None:
        raise StateError(
            f"'{name}' cannot be set on the View of {self.kind}: it is a view of FSDP2's private state, and the value would be "
            "lost. Use the methods of FSDPModule, such as set_custom_all_gather() and set_custom_reduce_scatter()."
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.kind, self.unit, self.part))


def _id_of_model(unit: Unit, _: None) -> object:
    """Return an object shared by exactly the units of one model. Programs compare its `id`."""
    root = unit.outermost
    found = None if root is None else unit_of(root)
    return (found or unit).unit_name


def _reduce(unit: Unit, group: ParamGroup) -> None:
    unit.check_idle(doing="post_backward()")
    if group.trainable:
        with torch.no_grad():
            unit.runtime.reducer.reduce(unit, group, group.take_gradients() or [None] * len(group.parameters))
    if not unit.options.stays_after_backward:
        unit.reshard()


def _finish_reductions(unit: Unit) -> None:
    reducer = recovered(unit).runtime.reducer
    with torch.no_grad():
        reducer.collect([unit])
        reducer.assign_grads()


# What each name is, from the unit and the part of it that the view is of.
_NAMES: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "FSDPState": {
        "_mp_policy": lambda unit, _: unit.options.mp,
        "_modules": lambda unit, _: tuple(unit.modules),
        "_fsdp_param_groups": lambda unit, _: [View("FSDPParamGroup", unit, group) for group in unit.groups],
        "_fsdp_param_group": lambda unit, _: View("FSDPParamGroup", unit, unit.groups[0]) if unit.groups else None,
        "_state_ctx": lambda unit, _: View("FSDPStateContext", unit),
        "_comm_ctx": _id_of_model,
        # Waits for the reductions in flight and sets `.grad`. Pipeline schedules call it at the end of a step.
        "_root_post_backward_final_callback": lambda unit, _: lambda: _finish_reductions(unit),
    },
    "FSDPStateContext": {"all_states": lambda unit, _: [View("FSDPState", one) for one in units_below(unit.modules)]},
    "FSDPParamGroup": {
        "fsdp_params": lambda unit, group: [View("FSDPParam", unit, parameter) for parameter in group.parameters],
        "mp_policy": lambda unit, _: unit.options.mp,
        # Reduces the gradients of this group so far. Pipeline schedules call it after the last microbatch.
        "post_backward": lambda unit, group: lambda: _reduce(unit, group),
    },
    "FSDPParam": {
        "sharded_param": lambda _, parameter: parameter.sharded,
        "unsharded_param": lambda _, parameter: parameter.unsharded,  # None before the first all-gather
        "_unsharded_param": lambda _, parameter: parameter.unsharded,
        # of backwards without communication on this rank
        "unsharded_accumulated_grad": lambda _, parameter: (
            None if parameter.local_grad is None else parameter.sharding.to_module(parameter.local_grad)
        ),
        "keep_unsharded_storage": lambda unit, _: unit.options.keep_memory,
    },
}


def _attach(unit: Unit, _: Originals | None) -> None:
    for root in unit.modules:
        _torch.attach_state(root, View("FSDPState", unit))


def _state(module: nn.Module) -> View | None:
    """Return the view of a sharded module, or None for a module that is not sharded. It is `fully_shard.state`."""
    unit = unit_of(module)
    return None if unit is None else View("FSDPState", unit)


@sharded_method
def _get_fsdp_state(self: FSDPModule) -> View:
    """Return a view with FSDP2's private attributes: `_fsdp_param_groups`, `_mp_policy`, `_state_ctx.all_states`."""
    return View("FSDPState", require_unit(self))


UNIT_CREATED.append(_attach)
fully_shard.state = _state  # type: ignore[attr-defined]
