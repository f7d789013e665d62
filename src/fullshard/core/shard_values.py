"""Copies into and out of shards: fully_shard(), parameters that the user assigned, and loading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core.replaced_parameters import set_replacement
from fullshard.core.sharded_param import ShardedParameter, logical_parameters
from fullshard.core.sharded_tensor import as_parameter
from fullshard.core.subclasses import exact_copy, is_plain
from fullshard.errors import StateError

# --- before and after sharding ---


def move_data(tensor: Tensor, device: torch.device) -> None:
    """Move a buffer, or an unsharded parameter and its gradient, to `device` in place. Meta tensors stay on meta."""
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
    else:  # `.data` cannot be assigned for a wrapper subclass, or from another type of device
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
        tensor.__class__ = kind  # the caller's subclass of Parameter, which the swap replaced
    if is_set:
        _torch.set_grad_dtype(tensor, grad_dtype)
    if grad is not None:
        tensor.grad = grad.to(moved.device)


def replace_with_sharded(parameter: ShardedParameter, original: nn.Parameter) -> None:
    """Register the sharded parameter in place of `original`, with its attributes, hooks and gradient."""
    sharded, sharding = parameter.sharded, parameter.sharding
    for key, value in original.__dict__.items():
        sharded.__dict__.setdefault(key, value)
    _torch.carry_hooks(original, sharded)
    if parameter.grad_dtype.explicit:
        _torch.set_grad_dtype(sharded, parameter.grad_dtype.dtype)
    if original.grad is not None:
        set_gradient(parameter, sharding.slice(sharding.grad_to_local(original.grad, name=parameter.name)))
    set_replacement(original, sharded)
    parameter.put(sharded)


def clone_shard(parameter: ShardedParameter) -> nn.Parameter:
    """Return a copy of the sharded parameter with separate memory, for a copy of the model."""
    with torch.no_grad():
        return as_parameter(_torch.dtensor(exact_copy(parameter.local), parameter.spec), parameter.requires_grad)


# --- values of callers ---


def read_slots(parameter: ShardedParameter) -> Tensor:
    """Return this rank's shard, (sharding.shard_shape), including values that the user has assigned to the module.

    An assigned Parameter may be an unsharded tensor or a DTensor with the placements of the sharded parameter. This function
    changes nothing: its caller copies the values into the shard, and `restore_sharded` takes over `requires_grad`, so the
    sharded parameter stays the same object. Raises StateError if a slot is empty, or has a value that cannot be copied.
    """
    found: list[nn.Parameter] = []
    kept = False
    for slot in parameter.slots:
        current = slot.content
        if current is None:
            raise StateError(
                f"Parameter '{parameter.name}' cannot be all-gathered: it was removed from its module after fully_shard. "
                "Remove it before sharding, or set requires_grad_(False) on it."
            )
        if current is parameter.sharded or current is parameter.unsharded:
            kept = True
        elif not isinstance(current, nn.Parameter) or _torch.in_functional_call():
            raise StateError(
                f"Parameter '{parameter.name}' cannot be replaced by a {type(current).__name__} for the duration of a call, "
                "as torch.func.functional_call does: a unit computes with its own shards only. Use undo() on a copy of the "
                "model, or compute with the tensors of fullshard.gathered()."
            )
        else:
            owner = next(iter(logical_parameters([current])), None)
            if owner is not None and owner is not parameter:
                raise StateError(
                    f"Parameter '{parameter.name}' of unit '{parameter.unit_name.name}' was assigned the sharded parameter "
                    f"'{owner.name}' of unit '{owner.unit_name.name}', which is still in use there. Tie parameters before "
                    "fully_shard(), or assign a copy: nn.Parameter(value.detach().clone())."
                )
            if all(current is not other for other in found):
                found.append(current)
    ours = _torch.local_tensor(parameter.sharded)  # type: ignore[arg-type]
    if not found:
        return ours
    values = [parameter.sharding.rows_of(one.detach(), name=parameter.name, what="the new value") for one in found]
    others = [*values[1:], ours] if kept else values[1:]
    if not all(value.device.type == "meta" or torch.equal(value, values[0]) for value in others):
        raise StateError(
            f"Expected equal values in the {len(parameter.slots)} places where parameter '{parameter.name}' is registered (it "
            "is tied), got different ones. Assign the same Parameter to all of them, or untie them before fully_shard."
        )
    return values[0]


def gradients_of_assigned(parameters: Sequence[ShardedParameter]) -> list[tuple[ShardedParameter, Tensor | None]]:
    """Return (parameter, gradient) for each parameter that the user replaced on a module.

    The gradient is that of the new Parameter, this rank's rows only, or None. Raises StateError if it has other placements than
    the parameter.
    """
    found: list[tuple[ShardedParameter, Tensor | None]] = []
    for parameter in parameters:
        for slot in parameter.slots:
            current = slot.content
            if current is not None and current is not parameter.sharded and current is not parameter.unsharded:
                grad, what = current.grad, "the gradient of the new value"
                found.append(
                    (parameter, None if grad is None else parameter.sharding.rows_of(grad, name=parameter.name, what=what))
                )
                break
    return found


def set_gradient(parameter: ShardedParameter, rows: Tensor | None) -> None:
    """Set `.grad` of the sharded parameter to a copy of `rows`, or to None. A view would keep a whole gradient in memory."""
    sharded = parameter.sharded
    sharded.grad = None
    if rows is not None:
        sharded.grad = parameter.dtensor_like_shard(rows.contiguous().clone().view(parameter.sharding.shard_shape))


def shard_of(parameter: ShardedParameter, full: Tensor, *, dtype: torch.dtype) -> DTensor:
    """Return a DTensor like the sharded parameter with this rank's rows of `full`.

    Its device is that of the shard, or that of `full` if the shard is on meta.
    """
    device = full.device if parameter.local.device.type == "meta" else parameter.local.device
    rows = parameter.slice(full)
    if is_plain(rows):
        rows = rows.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    else:
        rows = exact_copy(rows).to(device=device, dtype=dtype)
    return _torch.dtensor(rows, parameter.sharding.spec(dtype))


def like_shard(parameter: ShardedParameter, value: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a loaded value as a DTensor that DTensor can copy into the shard. Values of other shapes or placements unchanged.

    Args:
        parameter: the parameter.
        value: an unsharded tensor, or a DTensor on the parameter's mesh or on one of the same ranks with other names of its
            dims, between which DTensor copies nothing.
        dtype: dtype of the rows of an unsharded tensor; None for its own.
    """
    sharding = parameter.sharding
    if value.shape != parameter.shape:
        return value
    if not isinstance(value, DTensor):
        return shard_of(parameter, value.detach(), dtype=dtype or value.dtype)
    if value.device_mesh == sharding.mesh or not sharding.has_rows_of(value):
        return value
    return parameter.dtensor_like_shard(sharding.rows_of(value.detach(), name=parameter.name, what="the loaded value"))


def replace_rows(parameter: ShardedParameter, rows: Tensor) -> None:
    """Copy `rows` into the shard. A shard on meta gets memory on the device of `rows`."""
    if parameter.local.device.type == "meta":
        local = parameter.dtensor_like_shard(rows.to(parameter.local.dtype, copy=True).contiguous())
        parameter.put(nn.Parameter(local, requires_grad=parameter.requires_grad))
    else:
        parameter.local.copy_(rows)
        parameter.note_write()


def write_unsharded(parameter: ShardedParameter, full: Tensor, *, grad: bool) -> None:
    """Copy this rank's rows of an unsharded plain tensor into the shard, and with `grad` those of its gradient into `.grad`."""
    replace_rows(parameter, parameter.slice(full.detach()))
    if grad and full.grad is None:
        parameter.sharded.grad = None
    elif grad:
        rows = parameter.slice(full.grad).to(parameter.local.device, parameter.local.dtype, copy=True)  # type: ignore[arg-type]
        parameter.sharded.grad = parameter.dtensor_like_shard(rows.contiguous().view(parameter.sharding.shard_shape))


def discard_gradient(parameter: ShardedParameter, *, set_to_none: bool) -> None:
    """Clear `.grad` of the sharded parameter as `zero_grad` does, while the unsharded one is registered."""
    grad = parameter.sharded.grad
    if grad is not None and set_to_none:
        parameter.sharded.grad = None
    elif grad is not None:
        grad.detach_().zero_()
