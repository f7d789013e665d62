"""torch's FSDP and its composable APIs: classes for isinstance, states of modules, options of FSDP1."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn

# Private: both modules. The first has the keys under which torch's composable APIs keep states in an nn.Module; the second
# has FSDP2's classes, which torch.distributed.fsdp does not export.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem, _get_registry
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import Comm as Comm
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter

# Base classes of ours, so that isinstance checks of user programs hold: fullshard overrides all methods.
TorchFSDPModule: Any = torch_fsdp.FSDPModule
GradientReductionHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)  # from torch 2.15 on
# Private: `__wrapped__`, the undecorated function. `contract`, the decorator, uses it as the key of the states of a module.
_TORCH_FULLY_SHARD: Any = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]


def attach_state(module: nn.Module, view: object) -> None:
    """Let torch's `fully_shard.state(module)` return `view`, and let torch's `replicate()` refuse the module."""
    # Private: `STATE_KEY` and `REGISTRY_KEY`, the attributes that `contract` reads. If `state()` looks elsewhere, it returns
    # None, and programs that read the state of a module fail; training does not depend on it.
    module.__dict__.setdefault(STATE_KEY, OrderedDict())[_TORCH_FULLY_SHARD] = view
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict()).setdefault("fully_shard", RegistryItem())


def detach_state(module: nn.Module) -> None:
    """Undo `attach_state`."""
    for key, entry in ((STATE_KEY, _TORCH_FULLY_SHARD), (REGISTRY_KEY, "fully_shard")):
        held = module.__dict__.get(key, {})
        held.pop(entry, None)
        if not held:
            module.__dict__.pop(key, None)


def is_non_composable(module: nn.Module) -> bool:
    """Return True if torch's `replicate` already owns the gradients of `module`."""
    # Private: `_get_registry`. FSDP2 uses the same test.
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def is_wrap_policy(policy: Any) -> bool:
    """Return True if `policy` is one of FSDP1's policy objects. FSDP1's policy functions are plain callables."""
    # Private: `_Policy`, the base class of policy objects.
    return isinstance(policy, torch_fsdp.wrap._Policy)


def run_wrap_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy object of FSDP1 selects, each with the arguments that it overrides."""
    # Private: `_run_policy`, the only abstract method of a policy object.
    return policy._run_policy(root, ignored, {})


HYBRID_ZERO2: torch_fsdp.ShardingStrategy = torch_fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2
"""FSDP1's hybrid strategy that keeps parameters unsharded from forward to backward. torch exports no public name for it."""


def left_out_of(mixed_precision: torch_fsdp.MixedPrecision) -> tuple[type[nn.Module], ...]:
    """Return the module classes that FSDP1's mixed precision ignores."""
    # Private: `_module_classes_to_ignore`, a field of the public dataclass.
    return tuple(mixed_precision._module_classes_to_ignore)
