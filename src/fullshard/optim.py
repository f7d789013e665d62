"""Optimizers and sharded parameters: rebinding one that was built before sharding, and clipping on local shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.parameter import logical_parameters, successor


def rebind(optimizer: torch.optim.Optimizer) -> int:
    """Let `optimizer` train the sharded parameters that stand for plain ones it was built with; how many there were.

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
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != original.shape:
        return value
    spec, local = _torch.spec_of(sharded), _torch.local_tensor(sharded)  # type: ignore[arg-type]
    rank, ranks = spec.mesh.get_local_rank(), spec.mesh.size()
    chunk = -(-value.shape[0] // ranks)
    rows = value[min(value.shape[0], rank * chunk) :][: local.shape[0]]
    return _torch.dtensor(rows.to(local.device, copy=True), _torch.shard_spec(spec.mesh, value.shape, value.dtype))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    rebind(optimizer)
    for group in optimizer.param_groups:
        for check in dict.fromkeys(parameter.before_step for parameter in logical_parameters(group["params"])):
            if check is not None:
                check()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in logical_parameters(tensor for tensor in group["params"] if tensor.grad is not None):
            parameter.wrote()


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
    grads = [p.grad for p in ([parameters] if isinstance(parameters, Tensor) else parameters) if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    for grad in grads:
        if isinstance(grad, DTensor) and not all(placement.is_shard() for placement in grad.placements):
            raise ValueError(
                f"clip_grad_norm_ takes gradients that are sharded or plain, got a DTensor of shape {tuple(grad.shape)} with "
                f"placements {grad.placements}: its norm would be counted more than once"
            )
    power = float(norm_type)
    by_mesh: dict[Any, list[Tensor]] = {}
    locals_: list[Tensor] = []
    for grad in grads:
        local = _torch.local_tensor(grad) if isinstance(grad, DTensor) else grad
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(local)
        locals_.append(local)
    device = locals_[0].device
    parts = []
    for mesh, shards in by_mesh.items():
        shards = [shard for shard in shards if shard.numel()]
        # Squares of bfloat16 norms would lose their digits when summed.
        norms = torch.stack(torch._foreach_norm(shards, power)).float() if shards else torch.zeros(1, device=device)
        part = norms.max() if power == torch.inf else norms.pow(power).sum()
        if mesh is not None and mesh.size() > 1:
            op = dist.ReduceOp.MAX if power == torch.inf else dist.ReduceOp.SUM
            dist.all_reduce(part, op, group=mesh.get_group())
        parts.append(part.to(device))
    total = torch.stack(parts).max() if power == torch.inf else torch.stack(parts).sum().pow(1.0 / power)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients have a norm of {total.item()} over all ranks, so they cannot be clipped to {max_norm}"
        )
    torch._foreach_mul_(locals_, torch.clamp(max_norm / (total + 1e-6), max=1.0).to(locals_[0].dtype))
    return total
