"""Choice of the modules that become units: a policy chooses them, a `Plan` lists them, `shard_model` shards them.

policies.py       FSDP1's policies, which decide module by module; enable_wrap() and wrap()
auto_policy.py    AutoPolicy: repeated blocks, and embeddings and heads that are as large
plan.py           Plan: the planned units as data, which can be edited; prints as a table
plan_messages.py  Plan.messages(): collectives of the units, and their memory
sizes.py          sizes of units, and remarks on those that determine the peak memory
tables.py         text tables
known_values.py   values of meta tensors that follow from shapes and constants, for predictions and for weights
whole_model.py    plan_model(), shard_model()
"""

from fullshard.wrap.auto_policy import AutoPolicy
from fullshard.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    Policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from fullshard.wrap.whole_model import plan_model, shard_model

__all__ = [
    "AutoPolicy",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "plan_model",
    "shard_model",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
