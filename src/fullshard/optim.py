"""Optimizers and sharded parameters: rebinding one that was built before sharding, and clipping on local shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.face import sleep, wake
from fullshard.ledger import Label, Line
from fullshard.lint import is_ignored, remark_on_gradients, remark_on_optimizer
from fullshard.parameter import logical_parameters
from fullshard.replaced import successor
from fullshard.unit import Unit, owner_of


def rebind(optimizer: torch.optim.Optimizer) -> int:
    """Let `optimizer` train what stands for the parameters it was built with (sharded ones for plain ones, or the other way
    round after `undo`); how many there were.

    State it holds already (momenta of the full shape) is sliced. Runs by itself before every `step()`.
    """
    count = 0
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            sharded = successor(parameter)
            if sharded is None:
                continue
            parameters[index] = sharded
            count += 1
            held = optimizer.state.pop(parameter, None)
            if held:
                optimizer.state[sharded] = {key: _shard_state(value, parameter, sharded) for key, value in held.items()}
        if count:  # two tied originals may have become one
            group["params"] = list(dict.fromkeys(parameters))
    return count


def _shard_state(value: Any, original: Tensor, sharded: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != original.shape or value.ndim == 0:
        return value
    logical = next(iter(logical_parameters([sharded])), None)
    if logical is None:  # plain again: its state becomes whole (collective, as undo() was)
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return logical.face(logical.take(value, what="has in its optimizer").clone())
    return logical.shard_of(value, dtype=value.dtype)


_SEEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _remark(optimizer: torch.optim.Optimizer) -> None:
    """Once per optimizer: plain parameters beside sharded ones; and sharded ones of which none has a gradient."""
    _SEEN.add(optimizer)
    plain: list[str] = []
    units: list[Unit] = []
    sharded = [p for p in logical_parameters(p for group in optimizer.param_groups for p in group["params"]) if p.requires_grad]
    unit = owner_of(sharded[0]) if sharded else None
    if unit is not None and all(parameter.sharded.grad is None for parameter in sharded):
        remark_on_gradients(unit, [parameter.name for parameter in sharded])
    for group in optimizer.param_groups:
        names = group.get("param_names", [f"one of shape {tuple(p.shape)}" for p in group["params"]])
        for name, parameter in zip(names, group["params"]):
            if type(parameter) is nn.Parameter and parameter.grad is not None and not is_ignored(parameter):
                plain.append(name)
        units += [unit for p in logical_parameters(group["params"])[:1] if (unit := owner_of(p)) is not None]
    if plain and units:
        remark_on_optimizer(units[0], plain)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    rebind(optimizer)
    if optimizer not in _SEEN:
        _remark(optimizer)
    for group in optimizer.param_groups:
        for check in dict.fromkeys(parameter.before_step for parameter in logical_parameters(group["params"])):
            if check is not None:
                check()
    for group in optimizer.param_groups:
        sleep(group["params"])


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        wake(group["params"])
        for parameter in logical_parameters(tensor for tensor in group["params"] if tensor.grad is not None):
            parameter.wrote()


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """`tensors` by dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return found


def _norms(tensors: list[Tensor], power: float) -> list[Tensor]:
    """The norm of each tensor, on the device of the first."""
    found: list[Tensor] = []
    for (dtype, _), alike in _alike(tensors).items():
        half = dtype in (torch.bfloat16, torch.float16)
        found += torch._foreach_norm(alike, power, torch.float32) if half else torch._foreach_norm(alike, power)
    return [norm.to(found[0].device) for norm in found]


def _cut_over(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which the elements of a gradient are spread, each element once."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    cut = [axis for axis, placement in enumerate(grad.placements) if _torch.is_cut(placement) and mesh.size(axis) > 1]
    return tuple(mesh.get_group(axis) for axis in cut)


def _axes(tensors: Iterable[Tensor]) -> dict[tuple[dist.ProcessGroup | None, ...], Unit]:
    """By process groups: a unit whose shards lie on just those."""
    found: dict[tuple[dist.ProcessGroup | None, ...], Unit] = {}
    for logical in logical_parameters(tensors):
        unit = owner_of(logical)
        if unit is not None:
            found.setdefault((unit.axis.group,), unit)
    return found


def _reduce(part: Tensor, groups: tuple[dist.ProcessGroup, ...], axes: Any, *, maximum: bool) -> None:
    """Over ranks that also gather together, this is one of the calls that they must make alike, or be told."""
    unit: Unit | None = axes.get(groups)
    if unit is not None:
        communicator = unit.keeper.communicator
        line = Line(communicator.ledger(unit.axis), Label(""), "")
        return communicator.all_reduce(unit.axis, line, "clip_grad_norm_()", part, maximum=maximum)
    for group in groups:
        dist.all_reduce(part, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)


_torch.register_optimizer_step_pre_hook(_before_step)
_torch.register_optimizer_step_post_hook(_after_step)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their norm, over all ranks, is at most `max_norm`.

    Takes any mixture of sharded parameters (also of several meshes) and plain ones, which are taken to be equal on all
    ranks. Works on local shards: one small all-reduce per mesh.

    Returns:
        The norm before clipping, a plain 0-dim tensor, equal on all ranks.

    Raises:
        RuntimeError: with `error_if_nonfinite=True`, if the norm is not finite.

    Example:
        >>> norm = clip_grad_norm_(model.parameters(), max_norm=1.0)                          # doctest: +SKIP

    Source: Pascanu et al. (arXiv 1211.5063); the interface of torch.nn.utils.clip_grad_norm_.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    listed = [parameter if (now := successor(parameter)) is None else now for parameter in given]  # a list made before sharding
    for logical in logical_parameters(listed):
        if logical.kept is not None and logical.sharded.grad is None:
            raise StateError(
                f"clip_grad_norm_ was called while the gradient of '{logical.name}' is only kept on each rank: run the last "
                "backward of the step outside of accumulate() or no_sync() first"
            )
    grads = [p.grad for p in listed if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    for grad in grads:
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            raise ValueError(
                f"clip_grad_norm_ takes gradients that are sharded, replicated or plain, got a DTensor of shape "
                f"{tuple(grad.shape)} with placements {grad.placements}, which is not summed yet: redistribute() it first"
            )
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"clip_grad_norm_ takes a norm_type > 0 or inf, got {norm_type!r}")
    alike: dict[Any, list[Tensor]] = {}
    locals_: list[Tensor] = []
    axes = _axes(listed)
    for grad in grads:
        local = _torch.local_tensor(grad) if isinstance(grad, DTensor) else grad
        kind = grad.device_mesh.device_type if isinstance(grad, DTensor) else None
        alike.setdefault((kind, _cut_over(grad)), []).append(local)
        locals_.append(local)
    device = locals_[0].device
    parts = []
    for (kind, groups), shards in alike.items():
        # Squares of bfloat16 norms would lose their digits when summed. Every rank sends the same dtype, shards or none.
        wide = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
        shards = [shard for shard in shards if shard.numel()]
        norms = torch.zeros(1, dtype=wide, device=device)
        if shards:
            norms = torch.stack([norm.to(wide) for norm in _norms(shards, power)])
        part = norms.max() if power == torch.inf else norms.pow(power).sum()
        part = part.to(device if kind is None or kind == device.type else kind)  # where the group's backend works
        _reduce(part, groups, axes, maximum=power == torch.inf)
        parts.append(part.to(device))
    total = torch.stack(parts).max() if power == torch.inf else torch.stack(parts).sum().pow(1.0 / power)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients have a norm of {total.item()} over all ranks, so they cannot be clipped to {max_norm}"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (dtype, where), tensors in _alike(locals_).items():  # one coefficient, rounded to each dtype where it is used
        torch._foreach_mul_(tensors, coefficient.to(where, torch.float64 if dtype == torch.float64 else torch.float32))
    return total
