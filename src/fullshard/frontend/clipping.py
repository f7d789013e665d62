"""Clipping: the norm of gradients over all ranks, by one small all-reduce per set of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.consistency.collective_log import GroupFingerprints, UnitName
from fullshard.errors import StateError
from fullshard.params.grad_commit import flat_gradient
from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter, inside, logical_parameters
from fullshard.params.stale_params import successor
from fullshard.runtime.unit import StepCheck, Unit


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


Cut = tuple[str | None, tuple[dist.ProcessGroup, ...]]
"""The kind of device where ranks sum the elements of a gradient, None if they need not, and the process groups over which."""


def _cut(tensor: Tensor) -> Cut:
    return (tensor.device_mesh.device_type if isinstance(tensor, DTensor) else None), _cut_over(tensor)


_CUTS: weakref.WeakKeyDictionary[ParamGroup, Cut | None] = weakref.WeakKeyDictionary()


def _cut_of(group: ParamGroup) -> Cut | None:
    """How the gradients of a group are cut; None if not all alike, as beside tensor parallelism."""
    if group not in _CUTS:
        cuts = {_cut(parameter.sharded) for parameter in group.parameters}
        _CUTS[group] = cuts.pop() if len(cuts) == 1 else None
    return _CUTS[group]


class _Gradients:
    """The gradients that are clipped: of a group whose gradients are views of one flat tensor that, of others each.

    parts: what is scaled, with how it is cut.     axes: a unit for each set of process groups, whose shards lie on just those.
    """

    def __init__(self, parameters: Sequence[Tensor], logical: Sequence[ShardedParameter]) -> None:
        self.axes: dict[tuple[dist.ProcessGroup | None, ...], Unit] = {}
        self.parts: list[tuple[Cut, Tensor]] = []
        checks: dict[Any, list[ShardedParameter]] = {}
        for one in logical:
            checks.setdefault(one.before_step, []).append(one)
        flat: dict[int, tuple[Cut, Tensor]] = {}  # by id of each parameter
        for check, members in checks.items():
            unit, group = (check.unit, check.group) if isinstance(check, StepCheck) else (None, None)
            if unit is not None:
                self.axes.setdefault((unit.axis.group,), unit)
            if group is not None and len(set(members)) == len(group.parameters):
                cut, gradient = _cut_of(group), flat_gradient(group)
                if cut is not None and gradient is not None:
                    flat.update(dict.fromkeys([id(member.sharded) for member in members], (cut, gradient)))
        listed: set[int] = set()  # flat tensors, by id
        for parameter in parameters:  # in this order ranks sum, whichever of them have flat ones
            part = flat.get(id(parameter))
            if part is not None and id(part[1]) not in listed:
                listed.add(id(part[1]))
                self.parts.append(part)
            elif part is None and parameter.grad is not None:
                _check_summed("clip_grad_norm_", parameter.grad)
                self.parts.append((_cut(parameter.grad), inside(parameter.grad)))


def _reduce(part: Tensor, groups: tuple[dist.ProcessGroup, ...], axes: Any, *, maximum: bool) -> None:
    """Reduce over process groups; over the ranks of a unit it is logged as one of the calls that they must make alike."""
    unit: Unit | None = axes.get(groups)
    if unit is not None:
        communicator = unit.runtime.communicator
        fingerprints = GroupFingerprints(communicator.log_of(unit.axis), UnitName(""), "")
        return communicator.all_reduce(unit.axis, fingerprints, "clip_grad_norm_()", part, maximum=maximum)
    for group in groups:
        dist.all_reduce(part, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their norm, over all ranks, is at most `max_norm`. Collective.

    Takes any mixture of sharded parameters (also of several meshes) and plain ones, which are taken to be equal on all
    ranks. Works on local shards: one small all-reduce per mesh.

    Args:
        parameters: a parameter or several; those without `.grad` do not count.
        max_norm: the largest norm that is left as it is.
        norm_type: the power of the norm, above 0; `float("inf")` takes the largest absolute value.
        error_if_nonfinite: whether a norm that is NaN or infinite is an error; otherwise gradients are scaled by it.

    Returns:
        The norm before clipping, a plain 0-dim tensor, equal on all ranks.

    Raises:
        RuntimeError: with `error_if_nonfinite=True`, if the norm is not finite; no gradient has changed then.
        StateError: naming the parameter, if its gradient is only kept on each rank (`accumulate()`).
        ValueError: for a `norm_type` that is not above 0, or a DTensor gradient that is not summed yet.

    Example:
        >>> norm = clip_grad_norm_(model.parameters(), max_norm=1.0)                          # doctest: +SKIP

    Source: Pascanu et al. 2013 (arXiv 1211.5063); the interface of `torch.nn.utils.clip_grad_norm_`.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    listed = [parameter if (now := successor(parameter)) is None else now for parameter in given]  # a list made before sharding
    sharded = logical_parameters(listed)
    for logical in sharded:
        if logical.local_grad is not None and logical.sharded.grad is None:
            raise StateError(
                f"clip_grad_norm_ was called while the gradient of '{logical.name}' is only kept on each rank: run the last "
                "backward of the step outside of accumulate() or no_sync() first"
            )
    grads = _Gradients(listed, sharded)
    if not grads.parts:
        return torch.tensor(0.0)
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"clip_grad_norm_ takes a norm_type > 0 or inf, got {norm_type!r}")
    total = _total_norm(grads.parts, power, grads.axes)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients have a norm of {total.item()} over all ranks, so they cannot be clipped to {max_norm}"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    # One coefficient, rounded to each dtype where it is used.
    for (dtype, where), tensors in _alike([tensor for _, tensor in grads.parts]).items():
        torch._foreach_mul_(tensors, coefficient.to(where, torch.float64 if dtype == torch.float64 else torch.float32))
    return total


def _check_summed(caller: str, tensor: Tensor) -> None:
    """Raises ValueError for a DTensor that is still to be summed."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{caller} takes gradients that are sharded, replicated or plain, got a DTensor of shape "
            f"{tuple(tensor.shape)} with placements {tensor.placements}, which is not summed yet: redistribute() it first"
        )


def _total_norm(parts: Sequence[tuple[Cut, Tensor]], power: float, axes: Any, *, singly: bool = False) -> Tensor:
    """The norm of `parts` over all ranks, each element once, where the first is. `singly`: without foreach operations."""
    alike: dict[Cut, list[Tensor]] = {}
    for cut, tensor in parts:
        alike.setdefault(cut, []).append(tensor)
    device = parts[0][1].device
    sums = []
    for (kind, groups), shards in alike.items():
        # Squares of bfloat16 norms would lose their digits when summed. Every rank sends the same dtype, shards or none.
        wide = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
        shards = [shard for shard in shards if shard.numel()]
        norms = torch.zeros(1, dtype=wide, device=device)
        if shards:
            found = chain.from_iterable(_norms([one], power) for one in shards) if singly else _norms(shards, power)
            norms = torch.stack([norm.to(device, wide) for norm in found])
        part = norms.max() if power == torch.inf else norms.pow(power).sum()
        part = part.to(device if kind is None or kind == device.type else kind)  # where the group's backend works
        _reduce(part, groups, axes, maximum=power == torch.inf)
        sums.append(part.to(device))
    return torch.stack(sums).max() if power == torch.inf else torch.stack(sums).sum().pow(1.0 / power)


def _is_mixed(tensors: Sequence[Tensor]) -> bool:
    """Whether DTensors of several meshes are among them, or DTensors and plain tensors: torch has no operation for those."""
    meshes = {tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}
    return len(meshes) > 1


def _torch_total_norm(
    original: Any,
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.get_total_norm, also over several meshes, and over sharded and plain tensors."""
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    power = float(norm_type)
    if not _is_mixed(listed):
        return original(listed, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
    if not power > 0:
        raise ValueError(
            f"a norm over several meshes, or of sharded and plain tensors, has norm_type > 0 or inf, got {norm_type!r}"
        )
    for tensor in listed:
        _check_summed("torch.nn.utils.get_total_norm", tensor)
    total = _total_norm([(_cut(tensor), inside(tensor)) for tensor in listed], power, {}, singly=foreach is False)
    original([total], 1.0, error_if_nonfinite, False)  # torch's own error
    return total


def _torch_clip_with_norm(
    original: Any,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """torch.nn.utils.clip_grads_with_norm_: likewise."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in listed if parameter.grad is not None]
    if isinstance(total_norm, DTensor):
        mixed = _is_mixed([*grads, total_norm])
        total_norm = total_norm.full_tensor() if mixed else total_norm
    else:
        mixed = _is_mixed(grads)
    if mixed:
        listed = [SimpleNamespace(grad=inside(grad)) for grad in grads]  # type: ignore[misc]
    original(listed, max_norm, total_norm, foreach)


_torch.extend_clipping(_torch_total_norm, _torch_clip_with_norm)
