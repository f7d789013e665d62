"""Gradient clipping: the norm of gradients over all ranks, with one small all-reduce per set of process groups."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import (
    GroupFingerprints,
    ParamGroup,
    ShardedParameter,
    Unit,
    UnitName,
    current_parameter,
    flat_gradient,
    logical_parameters,
    recovered,
)
from fullshard.errors import StateError
from fullshard.optim.copies import agreement_of_all, find_difference


def _by_dtype_and_device(tensors: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Group `tensors` by dtype and device, as foreach operations need them."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return by_kind


NormGroups = tuple[str | None, tuple[dist.ProcessGroup, ...]]
"""(device type, process groups) of the all-reduce of a gradient's norm; (None, ()) for plain tensors."""


def _norm_groups(tensor: Tensor) -> NormGroups:
    """Return the groups of the mesh dims that `tensor` is sharded over. Reducing over them counts each element once."""
    if not isinstance(tensor, DTensor):
        return None, ()
    mesh = tensor.device_mesh
    dims = [axis for axis, placement in enumerate(tensor.placements) if _torch.is_shard(placement) and mesh.size(axis) > 1]
    return mesh.device_type, tuple(mesh.get_group(axis) for axis in dims)


# Cached, because the parameters of a group keep their placements, and a lookup for each would cost time in every step.
_COMMON_NORM_GROUPS: weakref.WeakKeyDictionary[ParamGroup, NormGroups | None] = weakref.WeakKeyDictionary()


def _common_norm_groups(group: ParamGroup) -> NormGroups | None:
    """Return the norm groups that all parameters of a group have; None if they differ, as with tensor parallelism."""
    if group not in _COMMON_NORM_GROUPS:
        distinct = {_norm_groups(parameter.sharded) for parameter in group.parameters}
        _COMMON_NORM_GROUPS[group] = distinct.pop() if len(distinct) == 1 else None
    return _COMMON_NORM_GROUPS[group]


class _Gradients:
    """Gradients to clip: one flat tensor per parameter group where the gradients are views of it, else each gradient."""

    def __init__(self, parameters: Sequence[Tensor], logical: Sequence[ShardedParameter]) -> None:
        # a unit for each tuple of process groups that units are sharded over. Its communicator runs the all-reduce.
        self.units: dict[tuple[dist.ProcessGroup | None, ...], Unit] = {}
        # number of given parameters of units that are sharded over these process groups
        self.counts: Counter[tuple[dist.ProcessGroup | None, ...]] = Counter()
        self.parts: list[tuple[NormGroups, Tensor]] = []  # local gradient tensors, each with its norm groups
        by_group: dict[int, list[ShardedParameter]] = {}
        for parameter in logical:
            by_group.setdefault(id(parameter.group), []).append(parameter)
        flat: dict[int, tuple[NormGroups, Tensor]] = {}  # by id of the parameter
        for members in by_group.values():
            unit, group = members[0].unit(), members[0].group()
            if unit is not None:
                self.units.setdefault((unit.axis.group,), unit)
                self.counts[unit.axis.group,] += len(members)
            # The flat gradient contains the gradients of the whole group, also of parameters that are not to be clipped.
            if group is not None and len(set(members)) == len(group.parameters):
                norm_groups, gradient = _common_norm_groups(group), flat_gradient(group)
                if norm_groups is not None and gradient is not None:
                    flat.update(dict.fromkeys([id(member.sharded) for member in members], (norm_groups, gradient)))
        listed: set[int] = set()  # ids of the flat tensors in `parts`
        # The order of `parts` decides the order of the all-reduces. It follows the parameters, since it must be equal on all
        # ranks, and a rank may have flat gradients where another has none.
        for tensor in parameters:
            part = flat.get(id(tensor))
            if part is not None and id(part[1]) not in listed:
                listed.add(id(part[1]))
                self.parts.append(part)
            elif part is None and (grad := tensor.grad) is not None:
                if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                    raise ValueError(
                        "clip_grad_norm_ takes gradients that are sharded, replicated or plain, got a DTensor of shape "
                        f"{tuple(grad.shape)} with placements {grad.placements}, which is not reduced yet. redistribute() it "
                        "first."
                    )
                self.parts.append((_norm_groups(grad), _torch.local_part(grad)))


def _reduce(part: Tensor, groups: tuple[dist.ProcessGroup, ...], grads: _Gradients, call: str, *, maximum: bool) -> None:
    """All-reduce `part` over `groups`: through the communicator of a unit with these groups, if any, so that it is logged.

    `call` has the arguments of the call that must be equal on all ranks.
    """
    unit = grads.units.get(groups)
    if unit is not None:
        call = f"{call} of {grads.counts[groups]} parameters"
        communicator = unit.runtime.communicator
        fingerprints = GroupFingerprints(communicator.log_of(unit.axis), UnitName(""), "")
        return communicator.all_reduce(unit.axis, fingerprints, call, part, maximum=maximum)
    for group in groups:
        dist.all_reduce(part, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the total norm of the gradients of `parameters` over all ranks to `max_norm`, in place. Collective.

    The parameters may be sharded, on one mesh or several, or plain. Gradients of plain parameters are assumed to be equal on
    all ranks. The computation uses local shards and one small all-reduce per mesh.

    Args:
        parameters: one parameter or several; parameters without `.grad` are ignored.
        max_norm: the maximum norm.
        norm_type: the p of the p-norm, above 0; `float("inf")` is the maximum norm.
        error_if_nonfinite: True raises an error if the norm is NaN or infinite; False scales the gradients nevertheless.

    Returns:
        The norm before clipping: a plain 0-dim tensor, equal on all ranks.

    Raises:
        RuntimeError: with `error_if_nonfinite=True`, if the norm is not finite; no gradient has changed then.
        StateError: if a gradient is accumulated on each rank only (`accumulate()`); the error names the parameter. Also if
            gradients of plain parameters, or of parameters on a smaller mesh than others, differ between ranks that clip them
            together; calls 1, 2, 4, 8 and so on compare their norm.
        ValueError: for a `norm_type` that is not above 0, a `max_norm` that is negative or NaN, or a DTensor gradient with a
            `Partial` placement.

    Example:
        >>> norm = clip_grad_norm_(model.parameters(), max_norm=1.0)                          # doctest: +SKIP

    Source: Pascanu et al. 2013 (arXiv 1211.5063); the interface of `torch.nn.utils.clip_grad_norm_`.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # A list that was made before sharding contains the plain parameters: clip the sharded parameters that replaced them.
    listed = list(map(current_parameter, given))
    sharded = logical_parameters(listed)
    for unit in dict.fromkeys([logical.unit() for logical in sharded]):
        if unit is not None:
            recovered(unit)  # before gradients are read
    for logical in sharded:
        if logical.local_grad is not None and logical.sharded.grad is None:
            raise StateError(
                f"clip_grad_norm_ was called while the gradient of '{logical.name}' is accumulated on each rank only. Run the "
                "last backward of the step outside of accumulate() or no_sync() first."
            )
    grads = _Gradients(listed, sharded)
    if not grads.parts:
        return torch.tensor(0.0)
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"clip_grad_norm_ takes a norm_type > 0 or inf, got {norm_type!r}.")
    if isinstance(max_norm, (int, float)) and not max_norm >= 0:  # a tensor may be on a device
        raise ValueError(f"clip_grad_norm_ takes a max_norm >= 0, got {max_norm!r}.")
    _check_copies(listed, sharded, power)
    limit = max_norm if isinstance(max_norm, (int, float)) else "a tensor"
    total = _total_norm(grads, power, f"clip_grad_norm_({limit}, {power})")
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"The gradients cannot be clipped to {max_norm}: their norm over all ranks is {total.item()}.")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    # One coefficient for all gradients, rounded only when it multiplies a gradient, so that all dtypes are scaled equally.
    for (dtype, where), tensors in _by_dtype_and_device([tensor for _, tensor in grads.parts]).items():
        torch._foreach_mul_(tensors, coefficient.to(where, torch.float64 if dtype == torch.float64 else torch.float32))
    return total


_COMPARED: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
"""Number of clippings of parameters beside the largest mesh, by the unit of a parameter on that mesh."""
_ROUNDING = 1e-3  # relative difference of the norms of equal gradients that were computed by kernels that round otherwise


def _check_copies(parameters: Sequence[Tensor], logical: Sequence[ShardedParameter], power: float) -> None:
    """Raise StateError if gradients of parameters beside the largest mesh differ between its ranks. Collective.

    Such ranks would get other norms, and scale the shards of one gradient differently. A difference is there from the first
    step on, or grows; so calls 1, 2, 4, 8 and so on compare, and no other call waits for the device.
    """
    meshes = {id(one.sharding.mesh): one.sharding.mesh for one in logical}
    sizes = {key: mesh.size() for key, mesh in meshes.items()}
    largest = max(sizes.values(), default=1)
    beside = [one for one in logical if sizes[id(one.sharding.mesh)] < largest]
    plain = [one for one in parameters if one.requires_grad and not isinstance(one, DTensor)]
    unit = next((one.unit() for one in logical if sizes[id(one.sharding.mesh)] == largest), None)
    if unit is None or largest == 1 or not (beside or plain):
        return
    calls = _COMPARED[unit] = _COMPARED.get(unit, 0) + 1
    if calls & (calls - 1):  # no power of two
        return
    call = "clip_grad_norm_: comparison of copies"
    grads = _Gradients([*(one.sharded for one in beside), *plain], beside)
    norm = _total_norm(grads, power, call) if grads.parts else torch.zeros(())
    names = [f"'{one.name}' of unit '{one.unit_name.name}'" for one in beside[:3]] or [
        f"a plain parameter of shape {tuple(plain[0].shape)}"
    ]
    more = len(beside) + len(plain) - len(names)
    what = f"The norm of the gradients of {', '.join(names)}{f' and {more} more' if more else ''}"
    text = find_difference([(what, norm.float())], agreement_of_all(logical, call), _ROUNDING)
    if text is not None:
        raise StateError(
            f"{text}, so these ranks would scale the other gradients differently. Experts that differ between ranks need a "
            "mesh that says so: make them DTensors that are sharded over these ranks. Reduce gradients of copies first."
        )


def _total_norm(grads: _Gradients, power: float, call: str) -> Tensor:
    """Return the p-norm of gradients over all ranks, each element counted once, on the device of the first part."""
    parts = grads.parts
    by_groups: dict[NormGroups, list[Tensor]] = {}
    for norm_groups, tensor in parts:
        by_groups.setdefault(norm_groups, []).append(tensor)
    device = parts[0][1].device
    sums = []
    for (device_type, groups), shards in by_groups.items():
        # Sums of squares would lose their digits in bfloat16. A rank without elements must use the same dtype as the others,
        # so the dtype is taken before empty shards are dropped.
        wide = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
        listed: list[Tensor] = []
        for (dtype, _), same in _by_dtype_and_device(shard for shard in shards if shard.numel()).items():
            # Half precision: the norm overflows in float16 and loses its digits in bfloat16.
            half = dtype in (torch.bfloat16, torch.float16)
            listed += torch._foreach_norm(same, power, torch.float32) if half else torch._foreach_norm(same, power)
        norms = torch.stack([norm.to(device, wide) for norm in listed] or [torch.zeros((), dtype=wide, device=device)])
        part = norms.max() if power == torch.inf else norms.pow(power).sum()
        # The all-reduce needs a tensor on the device type of the process group's backend.
        part = part.to(device if device_type is None or device_type == device.type else device_type)
        _reduce(part, groups, grads, call, maximum=power == torch.inf)
        sums.append(part.to(device))
    return torch.stack(sums).max() if power == torch.inf else torch.stack(sums).sum().pow(1.0 / power)
