"""Values that callers put into shards and take out of them: parameters that replace others, loads, full tensors, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.params.sharded_param import ShardedParameter, is_ours
from fullshard.params.sharded_tensor import LOGICAL, as_parameter
from fullshard.params.stale_params import redirect_to, replace
from fullshard.sharding.param_sharding import ParamSharding

# --- before and after sharding ---


def move_data(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter that is not sharded yet and its gradient, or a buffer, in place; what is on meta stays there."""
    if tensor.device.type in ("meta", device.type):
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
    else:  # `.data` of a wrapper subclass, and that of any tensor for a device of another kind, cannot be assigned
        _exchange(tensor, moved)


def _exchange(tensor: Tensor, moved: Tensor) -> None:
    """Make `tensor`, which stays the same object with its attributes, hooks and gradient, hold what `moved` holds."""
    kind, grad, plain = type(tensor), tensor.grad, type(tensor.data) is Tensor
    is_set, grad_dtype = _torch.grad_dtype_of(tensor)
    other = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    torch.utils.swap_tensors(tensor, other)
    tensor.__dict__.update(other.__dict__)
    _torch.carry_hooks(other, tensor)
    if plain:
        tensor.__class__ = kind  # a class of the caller's, of Parameters
    if is_set:
        _torch.set_grad_dtype(tensor, grad_dtype)
    if grad is not None:
        tensor.grad = grad.to(moved.device)


def replace_original(parameter: ShardedParameter, original: nn.Parameter) -> None:
    """Have a sharded parameter take the place of the caller's: its slots, attributes, hooks, gradient and identity."""
    sharded, sharding = parameter.sharded, parameter.sharding
    for key, value in original.__dict__.items():
        sharded.__dict__.setdefault(key, value)
    _torch.carry_hooks(original, sharded)
    if parameter.grad_dtype.explicit:
        _torch.set_grad_dtype(sharded, parameter.grad_dtype.dtype)
    if original.grad is not None:
        rows = sharding.slice(sharding.grad_to_local(original.grad, name=parameter.name))
        sharded.grad = parameter.dtensor_like_shard(rows.contiguous().clone())
    replace(original, sharded)
    parameter.put(sharded)


def unshard_permanently(parameter: ShardedParameter, gather: Callable[[ParamSharding, Any], Tensor]) -> None:
    """Put one ordinary Parameter with the full value into every slot; gradients, attributes and hooks too.

    `gather`: gives what this rank computes with, of a DTensor that is sharded so (collective).
    """
    sharded, sharding = parameter.sharded, parameter.sharding
    plain = nn.Parameter(sharding.to_module(gather(sharding, sharded)), requires_grad=sharded.requires_grad)
    plain.__dict__.update({key: value for key, value in sharded.__dict__.items() if not is_ours(key)})
    _torch.carry_hooks(sharded, plain)
    if parameter.grad_dtype.explicit:
        _torch.set_grad_dtype(plain, parameter.grad_dtype.dtype)
    if sharded.grad is not None:
        plain.grad = sharding.to_module(gather(sharding, sharded.grad))
    redirect_to(sharded, plain)
    sharded.__dict__.pop(LOGICAL, None)
    parameter.put(plain)


def clone_shard(parameter: ShardedParameter) -> nn.Parameter:
    """A sharded Parameter with memory of its own, for a copy of the model."""
    return as_parameter(_torch.dtensor(parameter.local.detach().clone(), parameter.spec), parameter.requires_grad)


# --- values of callers ---


def read_slots(parameter: ShardedParameter) -> Tensor:
    """The values that the slots say this rank's shard has now, (sharding.shard_shape); the caller may have put others there.

    A Parameter that was assigned is honoured if it is a full tensor or a DTensor like ours: its values and (by
    `restore_sharded`) its trainability are taken over, the identity of the sharded parameter stays. Changes nothing itself.
    Raises StateError for what cannot be honoured.
    """
    found: list[nn.Parameter] = []
    kept = False
    for slot in parameter.slots:
        current = slot.content
        if current is None:
            raise StateError(
                f"parameter '{parameter.name}' was removed from its module after fully_shard: "
                "remove it before sharding, or set requires_grad_(False) on it"
            )
        if current is parameter.sharded or current is parameter.full:
            kept = True
        elif not isinstance(current, nn.Parameter) or _torch.in_functional_call():
            raise StateError(
                f"parameter '{parameter.name}' was replaced by a {type(current).__name__} for the length of a call, as "
                "torch.func.functional_call does: a unit computes with its own shards only. Use undo() on a copy of the "
                "model, or compute with the tensors of fullshard.gathered()"
            )
        elif all(current is not other for other in found):
            found.append(current)
    ours = _torch.local_tensor(parameter.sharded)  # type: ignore[arg-type]
    if not found:
        return ours
    values = [parameter.sharding.rows_of(one.detach(), name=parameter.name, doing="was assigned") for one in found]
    others = [*values[1:], ours] if kept else values[1:]
    if not all(value.device.type == "meta" or torch.equal(value, values[0]) for value in others):
        raise StateError(
            f"parameter '{parameter.name}' is installed in {len(parameter.slots)} slots (it is tied), which now hold "
            "different values: assign the same Parameter to all of them, or untie them before fully_shard"
        )
    return values[0]


def shard_of(parameter: ShardedParameter, full: Tensor, *, dtype: torch.dtype) -> DTensor:
    """A DTensor like the sharded parameter with this rank's rows of `full`, where the shard is (or will be, if on meta)."""
    device = full.device if parameter.local.device.type == "meta" else parameter.local.device
    rows = parameter.slice(full).to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    return _torch.dtensor(rows, parameter.sharding.spec(dtype))


def replace_rows(parameter: ShardedParameter, rows: Tensor) -> None:
    """Make `rows` the values of the shard; one that is on meta gets memory where they are."""
    if parameter.local.device.type == "meta":
        local = parameter.dtensor_like_shard(rows.to(parameter.local.dtype, copy=True).contiguous())
        parameter.put(nn.Parameter(local, requires_grad=parameter.requires_grad))
    else:
        parameter.local.copy_(rows)
        parameter.note_write()


def write_full(parameter: ShardedParameter, full: Tensor, *, grad: bool) -> None:
    """Take this rank's rows of a full plain tensor, and with `grad` of its gradient."""
    replace_rows(parameter, parameter.slice(full.detach()))
    if grad and full.grad is None:
        parameter.sharded.grad = None
    elif grad:
        rows = parameter.slice(full.grad).to(parameter.local.device, parameter.local.dtype, copy=True)  # type: ignore[arg-type]
        parameter.sharded.grad = parameter.dtensor_like_shard(rows.contiguous())


def full_tensor(sharded: DTensor) -> Tensor:
    """The full tensor of a DTensor, where its own part is (collective).

    A part that is kept in the host's memory travels by the device of its mesh.
    """
    local = _torch.local_tensor(sharded).detach()
    kind = sharded.device_mesh.device_type
    if local.device.type in (kind, "meta"):
        return sharded.detach().full_tensor()  # type: ignore[attr-defined]
    moved = local.to(_torch.device_of(kind))
    return _torch.dtensor(moved, _torch.spec_of(sharded)).full_tensor().to(local.device)


def discard_gradient(parameter: ShardedParameter, *, set_to_none: bool) -> None:
    """As `zero_grad`, of a parameter whose slots hold the full one."""
    grad = parameter.sharded.grad
    if grad is not None and set_to_none:
        parameter.sharded.grad = None
    elif grad is not None:
        grad.detach_().zero_()
