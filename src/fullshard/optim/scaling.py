"""`torch.amp.GradScaler` over several meshes: all ranks skip a step, or none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import to_local
from fullshard.optim.optimizer_hooks import rebind

Unscale = Callable[..., dict[torch.device, Tensor]]


def _groups_of(parameters: list[Tensor]) -> list[tuple[str, dist.ProcessGroup]]:
    """Return the device type and process group of each mesh dim that parameters are distributed over, each group once.

    They depend on the parameters, not on their gradients: all ranks must reduce over the same groups in the same order.
    """
    found: dict[dist.ProcessGroup, str] = {}
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                found.setdefault(mesh.get_group(dim), mesh.device_type)
    return [(device_type, group) for group, device_type in found.items()]


@torch.no_grad()
def _unscale(
    original: Unscale, scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Unscale the gradients of an optimizer, and find infinities and NaNs of all ranks in them.

    torch looks over the mesh and the placements of the first gradient only. With several meshes, or scalars, some ranks
    would skip the step and others would not.

    Returns:
        For each device a tensor above 0 if a rank found one; equal on all ranks. Empty if no rank has a gradient: then the
        scaler raises, as without sharding.
    """
    rebind(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = _groups_of(parameters)
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    plain = [parameter for parameter in parameters if not isinstance(parameter.grad, DTensor)]
    by_device = original(scaler, SimpleNamespace(param_groups=[{"params": plain}]), inv_scale, found_inf, allow_fp16)
    grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            if parameter.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            local = to_local(parameter.grad)
            grads.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), locals_ in grads.items():
        found = by_device.setdefault(device, found_inf if device == found_inf.device else found_inf.to(device))
        _torch.unscale_and_check(locals_, found, inv_scale.to(device))
    # Also if this rank has no gradient, since the others reduce: -1 stands for none.
    none = not by_device
    every = [torch.full_like(found_inf, -1.0)] if none else [one.to(found_inf.device) for one in by_device.values()]
    total = torch.stack(every).max()
    # Forward and backward: a maximum over the groups of one mesh reaches ranks that only the groups of another one connect.
    for device_type, group in [*groups, *groups[-2::-1]]:
        part = total if device_type == total.device.type else total.to(device_type)
        dist.all_reduce(part, dist.ReduceOp.MAX, group=group)
        total = part.to(total.device)
    if none and total.item() < 0:
        return by_device
    by_device.setdefault(found_inf.device, found_inf)
    for one in by_device.values():
        one.copy_(total)
    return by_device


def install() -> _torch.Undo:
    """Extend torch.amp.GradScaler to gradients of several meshes, and to DTensors beside plain tensors."""
    return _torch.extend_unscaling(_unscale)
