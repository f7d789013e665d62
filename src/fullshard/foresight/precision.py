"""In which dtype each parameter computes, and the modules at which inputs and outputs are cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fullshard.policies import MixedPrecisionPolicy, resolve_mp
from fullshard.wrap.plan import Plan, PlannedUnit


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model whose units have policies.

    parameters: by qualified name the dtype that it computes in.
    inputs: by module the dtype that floating-point inputs of its forward are cast to, where they are.
    outputs: likewise of what its forward returns.
    """

    parameters: Mapping[str, torch.dtype]
    inputs: Mapping[str, torch.dtype]
    outputs: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, plan: Plan, default: MixedPrecisionPolicy) -> Precision:
        """That of a plan. default: the policy of units that have none of their own."""
        parameters: dict[str, torch.dtype] = {}
        inputs: dict[str, torch.dtype] = {}
        outputs: dict[str, torch.dtype] = {}
        for unit, entries in plan.held():
            policy = policy_of(unit, default)
            parameters |= {entry.name: policy.for_planning().resolve(entry.dtype).compute for entry in entries}
            if policy.input_dtype is not None:
                inputs |= dict.fromkeys(unit.modules, policy.input_dtype)
            if policy.output_dtype is not None:
                outputs |= dict.fromkeys(unit.modules, policy.output_dtype)
        return cls(parameters, inputs, outputs)

    def computes_like(self, other: Precision, seen: Mapping[str, frozenset[torch.dtype]]) -> bool:
        """Whether a model computes the same with both. seen: by module the floating-point dtypes that its inputs had."""
        changed = {name for name in {*self.inputs, *other.inputs} if self.inputs.get(name) != other.inputs.get(name)}
        casts_nothing = all(
            seen.get(name, frozenset()) <= {dtype}
            for name in changed
            for dtype in (self.inputs.get(name), other.inputs.get(name))
            if dtype is not None
        )
        return self.parameters == other.parameters and self.outputs == other.outputs and casts_nothing


def policy_of(unit: PlannedUnit, default: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of a unit."""
    return resolve_mp(unit.options.get("mp_policy", default))


NOTHING_CAST = Precision({}, {}, {})
"""Of a model without policies."""

__all__ = ["NOTHING_CAST", "Precision", "policy_of"]
