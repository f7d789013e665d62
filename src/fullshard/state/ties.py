"""Parameters that an earlier unit already owns, tied ones for example: decide which unit owns each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fullshard.core import ManagedTensors, ParamRef, ShardedParameter, Unit, current_parameter, logical_parameters
from fullshard.errors import warn_once


@dataclass(eq=False)
class Ties:
    """Plan of a new unit for parameters that other units own. They change their owner only in `take`."""

    # Parameters that move to the new unit, each with its current owner.
    taken: list[tuple[ShardedParameter, Unit]] = field(default_factory=list)
    # Parameters of the new unit's modules that other units own, each with its sharded parameter.
    refs: list[tuple[ParamRef, ShardedParameter]] = field(default_factory=list)

    def take(self) -> list[ShardedParameter]:
        """Remove parameters from their owners, and return them."""
        taken = {id(parameter) for parameter, _ in self.taken}
        for unit in dict.fromkeys(unit for _, unit in self.taken):
            unit.invalidate_unsharded()
            unit.parameters = [parameter for parameter in unit.parameters if id(parameter) not in taken]
            unit.rebuild_groups([parameter.local for parameter in unit.parameters])
        return [parameter for parameter, _ in self.taken]

    def install(self) -> None:
        """Register each sharded parameter of `refs` in the slots that it has in the modules of the new unit."""
        for ref, parameter in self.refs:
            parameter.install_in(ref.slots)


def find_ties(modules: Sequence[nn.Module], managed: ManagedTensors) -> Ties:
    """Call `ensure_sharded` of other units that own parameters in `managed`, and return the plan for these.

    Raises ValueError if neither the new unit nor the owner is around the other, StateError if the owner is not idle.
    """
    ties = Ties()
    inside = {id(inner) for module in modules for inner in module.modules()}
    for ref in managed.refs:
        known = logical_parameters([current_parameter(ref.parameter)])
        owner = known[0].unit() if known else None
        if owner is None:
            continue
        parameter = known[0]
        ties.refs.append((ref, parameter))
        if any(parameter is taken for taken, _ in ties.taken):
            continue  # `managed` has it twice: as sharded, and as it was before
        owner.ensure_sharded(doing="fully_shard() of a module with a tied parameter")
        owner.runtime.reducer.check_delivered(owner, doing="fully_shard() of a module with a tied parameter")
        around = {id(inner) for module in owner.modules for inner in module.modules()}
        if all(id(module) in inside for module in owner.modules):
            ties.taken.append((parameter, owner))
            warn_once(
                f"Parameter '{parameter.name}' of unit '{owner.name}' is tied to '{ref.name}': the unit around both takes it."
            )
        elif all(id(module) in around for module in modules):
            # Calls made top-down: the new unit takes parameters that are used only inside of it. Others stay with the outer
            # unit, which must be running when the new one runs.
            if all(i.module is not None and id(i.module) in inside for i in parameter.slots):
                ties.taken.append((parameter, owner))
        else:
            new = ", ".join(type(module).__name__ for module in modules)
            raise ValueError(
                f"Expected all modules that share a parameter to be in one unit, got '{ref.name}' of '{new}', which is tied to "
                f"'{parameter.name}' of unit '{owner.name}'. Shard these modules in one call, fully_shard([a, b]), or only a "
                "module around them."
            )
    return ties
