"""The axis parameters are sharded over: its mesh, its process group, and this rank's place on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import _torch


@dataclass(frozen=True)
class ShardAxis:
    """mesh 1 - 1 shard axis. `device` is where this rank computes."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    ranks: int
    rank: int
    device: torch.device


def resolve_mesh(mesh: DeviceMesh | None) -> ShardAxis:
    """The shard axis of `mesh`; None makes one over the default process group (started if need be).

    Raises ValueError if `mesh` is no 1-D DeviceMesh, lies on meta, or this rank is not on it.
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = "cpu" if accelerator is None or not _torch.has_backend(accelerator) else accelerator.type
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a 1-D DeviceMesh or None, got {type(mesh).__name__}: build one with init_device_mesh()")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one axis, the one to shard over, got {mesh.ndim} axes of sizes {tuple(mesh.mesh.shape)}: "
            "take one axis of it with mesh['name']"
        )
    if mesh.device_type == "meta":
        raise ValueError(
            "mesh must lie on a real device, got 'meta': parameters may be on meta, the mesh says where they will live"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this rank ({dist.get_rank()}) is not on the mesh of ranks {mesh.mesh.tolist()}: "
            "call fully_shard only on the ranks that are"
        )
    group = mesh.get_group()
    device = torch.device("cpu")
    if mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
    return ShardAxis(mesh, group, mesh.size(), mesh.get_local_rank(), device)
