"""Parameters that an earlier unit already owns: which unit has them from now on, so that each has one owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from fullshard.errors import warn_once
from fullshard.frontend import class_swap
from fullshard.params.sharded_param import ShardedParameter, logical_parameters
from fullshard.params.stale_params import successor
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit, owner_of
from fullshard.sharding.module_tree import ManagedTensors, ParamRef


@dataclass(eq=False)
class Ties:
    """What a new unit does about parameters that others own. Nothing has changed until `take`.

    taken: comes to the new unit, from its owner.   left: stays with the unit around the new one, which is full whenever
    the new one runs.   merged: owners that end, and whose modules and parameters the new unit has.
    """

    taken: list[tuple[ShardedParameter, Unit]] = field(default_factory=list)
    left: list[ShardedParameter] = field(default_factory=list)
    merged: list[Unit] = field(default_factory=list)
    _claims: list[tuple[ParamRef, ShardedParameter]] = field(default_factory=list)

    def add(self, claim: ParamRef, parameter: ShardedParameter) -> None:
        """Note that `ref` is a parameter that another unit owns already."""
        self._claims.append((claim, parameter))

    def knows(self, claim: ParamRef) -> bool:
        """Whether another unit owns `ref` already."""
        return any(claim is known for known, _ in self._claims)

    def take(self, undress: Callable[[type[nn.Module]], type[nn.Module]]) -> tuple[list[ShardedParameter], list[nn.Module]]:
        """(parameters, modules) that become the new unit's."""
        parameters: list[ShardedParameter] = []
        modules: list[nn.Module] = []
        for unit in self.merged:
            modules += unit.modules
            parameters += unit.parameters
            runtime_of(unit).requests.transfer_params(unit, unit.parameters)
            class_swap.disassemble(unit, undress)
        for unit in dict.fromkeys(unit for _, unit in self.taken):
            gone = [parameter for parameter, owner in self.taken if owner is unit]
            parameters += gone
            runtime_of(unit).requests.transfer_params(unit, gone)
        return parameters, modules

    def settle(self) -> None:
        """Have every tied slot hold the one parameter."""
        for claim, parameter in self._claims:
            parameter.install_in(claim.slots)


def find_ties(modules: Sequence[nn.Module], holdings: ManagedTensors, options: UnitOptions) -> Ties:
    """What of `holdings` others own, and what is to be done. Raises ValueError or StateError, naming it, if nothing can be."""
    ties = Ties()
    inside = {id(inner) for module in modules for inner in module.modules()}
    for claim in holdings.claims:
        sharded = successor(claim.parameter)
        known = logical_parameters([claim.parameter if sharded is None else sharded])
        owner = owner_of(known[0]) if known else None
        if owner is None:
            continue
        parameter = known[0]
        ties.add(claim, parameter)
        runtime_of(owner).requests.ensure_sharded(owner, doing="fully_shard() of a module that shares a parameter with it")
        runtime_of(owner).requests.check_delivered(owner, doing="fully_shard() of a module that shares a parameter with it")
        around = {id(inner) for module in owner.modules for inner in module.modules()}
        if all(id(module) in inside for module in owner.modules):
            ties.taken.append((parameter, owner))
            warn_once(
                f"parameter '{parameter.name}' of unit '{owner.name}' is tied to '{claim.name}': the unit around both owns it"
            )
        elif all(id(module) in around for module in modules):
            if all(i.module is not None and id(i.module) in inside for i in parameter.slots):
                ties.taken.append((parameter, owner))  # top-down: the inner module takes over what is its own
            else:
                ties.left.append(parameter)
        elif owner not in ties.merged:
            if owner.options != options:
                raise ValueError(
                    f"parameter '{claim.name}' is tied to '{parameter.name}' of unit '{owner.name}', so both units must become "
                    "one, but their options differ: shard their modules in one call, fully_shard([a, b])"
                )
            ties.merged.append(owner)
            warn_once(
                f"parameter '{claim.name}' is tied to '{parameter.name}' of unit '{owner.name}': both units are one now, as by "
                "fully_shard([a, b])"
            )
    merged = {id(unit) for unit in ties.merged}
    ties.taken = [(parameter, unit) for parameter, unit in ties.taken if id(unit) not in merged]
    return ties


__all__ = ["Ties", "find_ties"]
