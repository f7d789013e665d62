"""The arguments of `explain` as one value, `ExplainArguments`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core import PlacementFn
from fullshard.errors import check_int
from fullshard.foresight.hardware import Gpu, Network, gpu_of, network_of
from fullshard.foresight.optimizer import Factory, optimizer_factory
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

    @property
    def machine(self) -> Gpu:
        """The GPU, with the number of GPUs of its machine."""
        gpu = gpu_of(self.gpu)
        return gpu if self.per_node is None else replace(gpu, per_node=check_int("per_node", self.per_node))

    @property
    def accelerator(self) -> bool:
        """True if the device is an accelerator, not a CPU."""
        return not gpu_of(self.gpu).synchronous

    @property
    def dtypes(self) -> MixedPrecisionPolicy:
        """Mixed precision of parameters and gradients; by default bf16 with fp32 reduction on a GPU, and none on a CPU."""
        return default_dtypes(self.gpu) if self.mp_policy is None else resolve_mp(self.mp_policy)

    @property
    def mesh_sizes(self) -> tuple[int, int, bool]:
        """(ranks that shard the parameters, replicas, True if the mesh has a replicate dim)."""
        mesh, world = self.mesh, self.world // self.tensor_parallel
        sizes = (world,) if mesh is None else (mesh,) if isinstance(mesh, int) else tuple(mesh)
        if len(sizes) > 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError(f"mesh must be one or two sizes, (ranks,) or (replicas, ranks), got {mesh!r}.")
        if prod(sizes) != world:
            fits = [f"({world // size}, {size})" for size in (8, 16, 32, 64) if world % size == 0 and size < world]
            raise ValueError(
                f"mesh must have as many ranks as the world, {world}, got {' x '.join(map(str, sizes))} = {prod(sizes)} ranks. "
                f"Pass ({world},){' or ' + fits[0] if fits else ''}."
            )
        return (sizes[0], 1, False) if len(sizes) == 1 else (sizes[1], sizes[0], True)

    def check(self) -> None:
        """Raise ValueError for an invalid argument, before the model is traced, which takes seconds."""
        if self.engine not in get_args(Engine):
            raise ValueError(f"engine must be 'fullshard' or 'fsdp2', got {self.engine!r}.")
        gpu, world = self.machine, check_int("world", self.world)
        if world > gpu.per_node and world % gpu.per_node:
            raise ValueError(
                f"world={world} is no multiple of the {gpu.per_node} {gpu.name} of one machine. Pass the number of GPUs of "
                "each machine as per_node= (--per-node)."
            )
        if self.loss is not None and not callable(self.loss):
            raise ValueError(f"loss must be a function of the model's output, as F.mse_loss in a lambda, got {self.loss!r}.")
        if not isinstance(self.footprints, Mapping):
            raise ValueError(
                "footprints must be a dict of results by operator or line, as {'model.py:12': True}, got "
                f"{self.footprints!r}."
            )
        if not isinstance(self.states, StateSharding):
            raise ValueError(f"states must be a StateSharding, for example fullshard.ZERO2, got {self.states!r}.")
        if check_int("microbatches", self.microbatches) > MAX_MICROBATCHES:
            raise ValueError(
                f"microbatches must be at most {MAX_MICROBATCHES:,}, since each is simulated, got {self.microbatches:,}."
            )
        many = self.tensor_parallel
        if not isinstance(many, int) or isinstance(many, bool) or many < 1 or world % many:
            raise ValueError(f"tensor_parallel must be a number of ranks that divides the world of {world}, got {many!r}.")
        if (many > 1) != (self.parallelize is not None):
            raise ValueError(
                f"tensor_parallel={many} does not match parallelize={self.parallelize!r}. Pass both: the number of ranks, and "
                "a function of the model and their mesh, as lambda model, mesh: parallelize_module(model, mesh, plan)."
            )
        # For their errors only.
        network_of(self.net, gpu), self.mesh_sizes
        if self.optimizer is not None:
            optimizer_factory(self.optimizer)


MAX_MICROBATCHES = 4096


def default_dtypes(gpu: str | Path | Gpu) -> MixedPrecisionPolicy:
    """Return the policy that `explain(mp_policy=None)` stands for."""
    return MixedPrecisionPolicy() if gpu_of(gpu).synchronous else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
