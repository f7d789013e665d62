"""Which modules become units. A policy chooses, a plan says so as data and can be edited, `shard_model` carries it out.

policies.py     FSDP1's policies, asked module by module; enable_wrap() and wrap()
auto_policy.py  AutoPolicy: repeated blocks, and what is as large beside them
plan.py         Plan: the units to be made, as data; prints as a table
plan_messages.py  Plan.messages(): what they send, and what that needs in memory
tables.py       columns of text
whole_model.py  plan_model(), shard_model()
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
