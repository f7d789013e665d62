"""The arguments of `explain` as one value, `ExplainArguments`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core import PlacementFn
from fullshard.foresight.hardware import Gpu, Network, gpu_of
from fullshard.foresight.optimizer import Factory
from fullshard.foresight.simulate import Engine
from fullshard.foresight.trace import Footprint
from fullshard.policies import CommPolicy, MixedPrecisionPolicy, OffloadPolicy, StateSharding, resolve_mp
from fullshard.wrap.policies import Classes

Loss = Callable[[Any], Tensor]
Build = Callable[[], nn.Module]
Parallelize = Callable[[nn.Module, DeviceMesh], Any]
Recompute = str | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True, eq=False)
class ExplainArguments:
    """The arguments of `explain`."""

    build: Build
    batch: Any
    plan: Any
    world: int
    mesh: Sequence[int] | int | None
    gpu: str | Path | Gpu
    net: str | Path | Network | None
    per_node: int | None
    tensor_parallel: int
    parallelize: Parallelize | None
    mp_policy: MixedPrecisionPolicy | None
    full_precision: Classes | type[nn.Module]
    offload_policy: OffloadPolicy
    comm_policy: CommPolicy
    reshard_after_forward: bool | int | None
    states: StateSharding
    shard_placement_fn: PlacementFn | None
    optimizer: str | Factory | None
    loss: Loss | None
    keep_output: bool
    microbatches: int
    accumulate: bool
    recompute: Recompute
    footprints: Mapping[str, Footprint]
    engine: Engine
    expandable_segments: bool
    keep_unsharded_storage: bool
    price: float | None

    @property
    def machine(self) -> Gpu:
        """The GPU, with the number of GPUs of its machine.

        Raises:
            ValueError: for an unknown GPU, or a `per_node` that is no int of at least 1.
        """
        gpu = gpu_of(self.gpu)
        if self.per_node is None:
            return gpu
        if not isinstance(self.per_node, int) or isinstance(self.per_node, bool) or self.per_node < 1:
            raise ValueError(f"per_node must be the number of GPUs of one machine, at least 1, got {self.per_node!r}.")
        return replace(gpu, per_node=self.per_node)

    @property
    def accelerator(self) -> bool:
        """True if the device is an accelerator, not a CPU."""
        return not gpu_of(self.gpu).synchronous

    @property
    def dtypes(self) -> MixedPrecisionPolicy:
        """Mixed precision of parameters and gradients; by default bf16 with fp32 reduction on a GPU, and none on a CPU."""
        return default_dtypes(self.gpu) if self.mp_policy is None else resolve_mp(self.mp_policy)


def default_dtypes(gpu: str | Path | Gpu) -> MixedPrecisionPolicy:
    """Return the policy that `explain(mp_policy=None)` stands for."""
    return MixedPrecisionPolicy() if gpu_of(gpu).synchronous else MixedPrecisionPolicy(torch.bfloat16, torch.float32)


__all__ = ["Build", "ExplainArguments", "Loss", "Parallelize", "Recompute", "default_dtypes"]
