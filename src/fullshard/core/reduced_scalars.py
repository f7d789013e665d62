"""`.item()` of a reduction, as `weight.grad.norm().item()`: the value of all ranks, where DTensor returns this rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.checks.collective_log import UnitName
from fullshard.core.agreement import Agreement
from fullshard.core.full_tensors import full_tensor
from fullshard.core.mesh import ShardAxis
from fullshard.core.runtime import Runtime
from fullshard.core.unit import Unit

_DOING = "item() of a reduction"


def _owner_of(mesh: DeviceMesh) -> tuple[Unit, ShardAxis] | None:
    """Return the first unit with a parameter on a mesh, and the axis of this parameter; None if no unit has one."""
    here = Runtime.all_of_thread()
    for unit in sorted(Unit.living, key=lambda unit: (unit.runtime not in here, unit.global_id)):
        for parameter in unit.parameters:
            if parameter.sharding.mesh == mesh:
                return unit, parameter.sharding.axis
    return None


def _item(value: DTensor, part: Callable[[], Any]) -> Any:
    """Return the value of a DTensor of one element. Collective if ranks have parts of it, as of a reduction over shards.

    Args:
        value: the DTensor.
        part: returns the value of its local tensor, as torch does.
    """
    found = _owner_of(value.device_mesh) if any(placement.is_partial() for placement in value.placements) else None
    if found is None:  # every rank has the value, or it is a DTensor of somebody else
        return part()
    if _torch.is_tracing():
        return full_tensor(value).item()
    unit, axis = found
    agreement = Agreement(unit.runtime.communicator, [axis], UnitName(""), _DOING, _DOING)
    return agreement.unlogged(lambda: full_tensor(value)).item()


def install() -> _torch.Undo:
    """Reduce the parts of a DTensor on a mesh of sharded parameters when its value is read."""
    return _torch.on_item(_item)
