"""Choice of the modules that become units: a policy chooses them, a `Plan` lists them, `shard_model` shards them.

The policy functions that decide by size, by class or by another function are torch's own.
"""

from torch.distributed.fsdp.wrap import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from fullshard.wrap.auto_policy import AutoPolicy
from fullshard.wrap.policies import CustomPolicy, ModuleWrapPolicy, Policy, enable_wrap, or_policy, wrap
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
