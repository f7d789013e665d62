"""Full tensors of sharded parameters and gradients: all-gathered over the shards, or by DTensor where that is not enough."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core.agreement import Agreement
from fullshard.core.param_sharding import ParamSharding


def all_gather_unsharded(agreement: Agreement, sharding: ParamSharding, sharded: DTensor) -> Tensor:
    """Return the unsharded tensor that this rank computes with, (sharding.local_shape); one element for a scalar. Collective.

    It has memory of its own, on the device of the shard. `sharded`: the parameter, or its gradient, which may be sharded in
    another way.
    """
    if _matches(sharding, sharded):
        return _unsharded(agreement, sharding, sharded)
    return sharding.local_of(_by_dtensor(agreement, sharded)).clone()


def all_gather_full(agreement: Agreement, sharding: ParamSharding, sharded: DTensor) -> Tensor:
    """Return the full tensor, (sharding.shape): unsharded, and all-gathered over tensor parallel ranks as well. Collective."""
    if not _matches(sharding, sharded):
        return _by_dtensor(agreement, sharded).clone()
    whole = sharding.to_module(_unsharded(agreement, sharding, sharded))
    return whole if sharding.tensor_parallel is None else _by_dtensor(agreement, whole).clone()


def full_tensor(sharded: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, on the device of its local tensor. Collective, and not logged.

    With CPU offload the local tensor is copied to the device of the mesh, because its backend cannot all-gather host memory.
    """
    local = _torch.local_tensor(sharded).detach()
    kind = sharded.device_mesh.device_type
    if local.device.type in (kind, "meta"):
        return sharded.detach().full_tensor()  # type: ignore[attr-defined]
    moved = local.to(_torch.device_of(kind))
    return _torch.dtensor(moved, _torch.spec_of(sharded)).full_tensor().to(local.device)


def _matches(sharding: ParamSharding, sharded: DTensor) -> bool:
    plain = type(_torch.local_tensor(sharded)) is Tensor
    return plain and sharded.device_mesh == sharding.mesh and tuple(sharded.placements) == sharding.placements


def _unsharded(agreement: Agreement, sharding: ParamSharding, sharded: DTensor) -> Tensor:
    local, group = _torch.local_tensor(sharded).detach(), sharding.axis.group
    if not sharding.shape or group is None or sharding.axis.ranks == 1:
        return local.clone()
    if local.device.type == "meta":
        return local.new_empty(sharding.local_shape)
    part = local.movedim(sharding.dim, 0).to(sharding.axis.device).contiguous()
    if sharding.extent.padding:
        part = torch.cat([part, part.new_zeros((sharding.extent.padding, *part.shape[1:]))])
    found = agreement.on_axis(sharding.axis).all_gather(part, group).flatten(0, 1)
    return found[: sharding.local_shape[sharding.dim]].movedim(0, sharding.dim).contiguous().to(local.device)


def _by_dtensor(agreement: Agreement, sharded: Any) -> Tensor:
    """All-gather with DTensor: for tensor parallelism, tensor subclasses, and gradients that the user sharded differently."""
    return agreement.unlogged(lambda: full_tensor(sharded))
