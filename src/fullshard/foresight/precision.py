"""Compute dtypes of parameters, and the modules whose inputs and outputs are cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fullshard.policies import MixedPrecisionPolicy, resolve_mp
from fullshard.wrap.plan import Plan


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a model, from the mixed-precision policies of its units."""

    parameters: Mapping[str, torch.dtype]  # by qualified name: compute dtype of the parameter
    # By module: dtypes that floating-point inputs and outputs of its forward are cast to. Modules without a cast are left out.
    inputs: Mapping[str, torch.dtype]
    outputs: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, plan: Plan, default: MixedPrecisionPolicy) -> Precision:
        """Return the precision of a plan; `default` is the policy of units without their own."""
        parameters, inputs, outputs = (dict[str, torch.dtype]() for _ in range(3))
        for unit, entries in plan.held():
            policy = resolve_mp(unit.options.get("mp_policy", default))
            parameters |= {entry.name: policy.for_planning().resolve(entry.dtype).compute for entry in entries}
            if policy.input_dtype is not None:
                inputs |= dict.fromkeys(unit.modules, policy.input_dtype)
            if policy.output_dtype is not None:
                outputs |= dict.fromkeys(unit.modules, policy.output_dtype)
        return cls(parameters, inputs, outputs)

    def computes_the_same_as(self, other: Precision, seen: Mapping[str, frozenset[torch.dtype]]) -> bool:
        """Return True if a model runs the same operators with both, so that one trace serves both.

        `seen`: by module, the floating-point dtypes of its inputs. Casting an input to its own dtype changes nothing.
        """
        changed = {name for name in {*self.inputs, *other.inputs} if self.inputs.get(name) != other.inputs.get(name)}
        casts_nothing = all(
            seen.get(name, frozenset()) <= {dtype}
            for name in changed
            for dtype in (self.inputs.get(name), other.inputs.get(name))
            if dtype is not None
        )
        return self.parameters == other.parameters and self.outputs == other.outputs and casts_nothing
