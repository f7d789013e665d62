"""Values into shards (fully_shard(), loading), and out of shards (full tensors, all-gathered here or by DTensor)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core.agreement import Agreement
from fullshard.core.param_sharding import ParamSharding
from fullshard.core.sharded_param import ShardedParameter, set_replacement
from fullshard.core.sharded_tensor import as_parameter
from fullshard.core.subclasses import exact_copy, is_plain

# --- into shards ---


def move_data(tensor: Tensor, device: torch.device) -> None:
    """Move a buffer, or a parameter not sharded yet and its gradient, to `device` in place. Meta tensors stay on meta."""
    if tensor.device.type in ("meta", device.type):  # fully_shard() refused tensors on other accelerators
        return
    if isinstance(tensor, DTensor):
        for one in (tensor, tensor.grad):
            if isinstance(one, DTensor):
                _torch.point_at(one, _torch.local_tensor(one).to(device))
        return
    moved = tensor.detach().to(device)
    if type(tensor.data) is Tensor and _torch.can_assign_data(tensor, moved):
        tensor.data = moved
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(device)
    else:  # torch refuses to set `.data` of wrapper subclasses, and between some device types
        _exchange(tensor, moved)


def _exchange(tensor: Tensor, moved: Tensor) -> None:
    """Swap the contents of `moved` into `tensor`, which keeps its identity, attributes, hooks and gradient."""
    kind, grad, plain = type(tensor), tensor.grad, type(tensor.data) is Tensor
    is_set, grad_dtype = _torch.grad_dtype_of(tensor)
    other = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    torch.utils.swap_tensors(tensor, other)
    tensor.__dict__.update(other.__dict__)
    _torch.carry_hooks(other, tensor)
    if plain:
        tensor.__class__ = kind  # the swap replaced the caller's subclass of Parameter
    if is_set:
        _torch.set_grad_dtype(tensor, grad_dtype)
    if grad is not None:
        tensor.grad = grad.to(moved.device)


def replace_with_sharded(parameter: ShardedParameter, original: nn.Parameter) -> None:
    """Register the sharded parameter, with the attributes, hooks and gradient of `original`, in its place."""
    sharded, sharding = parameter.sharded, parameter.sharding
    hidden = () if sharding.plain_part is None else sharding.plain_part.attributes
    for key, value in original.__dict__.items():
        if key not in hidden:
            sharded.__dict__.setdefault(key, value)
    _torch.carry_hooks(original, sharded)
    if parameter.grad_dtype.explicit:
        _torch.set_grad_dtype(sharded, parameter.grad_dtype.dtype)
    if original.grad is not None:
        set_gradient(parameter, sharding.slice(sharding.grad_to_local(original.grad, name=parameter.name)))
    set_replacement(original, sharded)
    parameter.put(sharded)


def set_gradient(parameter: ShardedParameter, rows: Tensor) -> None:
    """Set `.grad` of the sharded parameter to a copy of `rows`: a view would keep the whole gradient in memory."""
    local = rows.contiguous().clone().view(parameter.sharding.shard_shape)
    parameter.sharded.grad = parameter.dtensor_like_shard(local)


def clone_shard(parameter: ShardedParameter) -> nn.Parameter:
    """Return a copy of the sharded parameter with separate memory, for a copy of the model."""
    with torch.no_grad():
        return as_parameter(_torch.dtensor(exact_copy(parameter.local), parameter.spec), parameter.requires_grad)


def shard_of(parameter: ShardedParameter, full: Tensor, *, dtype: torch.dtype) -> DTensor:
    """Return this rank's rows of `full` as a DTensor like the shard; on the device of `full` if the shard is on meta."""
    device = full.device if parameter.local.device.type == "meta" else parameter.local.device
    rows = parameter.slice(full)
    if is_plain(rows):
        rows = rows.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    else:
        rows = exact_copy(rows).to(device=device, dtype=dtype)
    return _torch.dtensor(rows, parameter.sharding.spec(dtype))


def like_shard(parameter: ShardedParameter, value: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a loaded value as a DTensor to copy into the shard, or unchanged if torch is to convert it or to refuse it.

    A DTensor on a mesh of the same ranks with other dim names gets the mesh of the parameter, since DTensor refuses operators
    across such meshes. `dtype`: of the result for a plain tensor; None keeps that of the tensor.
    """
    sharding = parameter.sharding
    if value.shape != parameter.shape:
        return value
    if not isinstance(value, DTensor):
        return shard_of(parameter, value.detach(), dtype=dtype or value.dtype)
    rows = None if value.device_mesh == sharding.mesh else sharding.rows_in(value)
    return value if rows is None else parameter.dtensor_like_shard(rows)


def replace_rows(parameter: ShardedParameter, rows: Tensor) -> None:
    """Copy `rows` into the shard. If that is on meta, register a new Parameter instead, for `Unit.refresh(assigned=True)`."""
    if parameter.local.device.type == "meta":
        local = parameter.dtensor_like_shard(rows.to(parameter.local.dtype, copy=True).contiguous())
        parameter.put(nn.Parameter(local, requires_grad=parameter.requires_grad))
    else:
        parameter.local.copy_(rows)
        parameter.note_write()


# --- out of shards ---


def all_gather_unsharded(agreement: Agreement, sharding: ParamSharding, sharded: DTensor) -> Tensor:
    """Return the unsharded tensor that this rank computes with, (sharding.local_shape); one element for a scalar. Collective.

    The result has memory of its own, on the device of the shard; but if DTensor redistributes it over tensor-parallel axes
    (a tensor subclass, a gradient of other placements), on the device of the mesh. `sharded`: parameter or gradient.
    """
    local, axis = _torch.local_tensor(sharded).detach(), sharding.axis
    alike = sharded.device_mesh == sharding.mesh and tuple(sharded.placements) == sharding.placements
    if type(local) is not Tensor or not alike:
        return sharding.local_of(agreement.unlogged(partial(full_tensor, sharded))).clone()
    if not sharding.shape or axis.group is None or axis.ranks == 1:
        return local.clone()
    if local.device.type == "meta":
        return local.new_empty(sharding.local_shape)
    part = local.movedim(sharding.dim, 0).to(axis.device).contiguous()
    if sharding.extent.padding:
        part = torch.cat([part, part.new_zeros((sharding.extent.padding, *part.shape[1:]))])
    found = agreement.on_axis(axis).all_gather(part, axis.group).flatten(0, 1)
    return found[: sharding.local_shape[sharding.dim]].movedim(0, sharding.dim).contiguous().to(local.device)


def all_gather_full(agreement: Agreement, sharding: ParamSharding, sharded: DTensor) -> Tensor:
    """Return the full tensor, (sharding.shape), all-gathered over shards and tensor-parallel ranks. Collective."""
    whole: Any = sharding.to_parallel(all_gather_unsharded(agreement, sharding, sharded))
    return whole if sharding.tensor_parallel is None else agreement.unlogged(partial(full_tensor, whole)).clone()


def full_tensor(sharded: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, on the device of its local tensor. Collective, and not logged.

    With CPU offload the local tensor is copied to the device of the mesh, since the backend cannot all-gather host memory.
    """
    local = _torch.local_tensor(sharded).detach()
    kind = sharded.device_mesh.device_type
    if local.device.type in (kind, "meta"):
        return sharded.detach().full_tensor()  # type: ignore[attr-defined]
    moved = local.to(_torch.device_of(kind))
    return _torch.dtensor(moved, _torch.spec_of(sharded)).full_tensor().to(local.device)
