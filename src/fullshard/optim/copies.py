"""Copies: what a call computes or writes once must be equal on all ranks of the largest mesh in the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard.core import Agreement, ShardedParameter, plain_parts

_END_WORDS = 4096  # number of 8-byte words at each end of a tensor whose positions count
_FACTOR = -7046029254386353131  # odd, so that multiplication modulo 2**64 loses nothing


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of the values: one int64 on the tensor's device.

    Every byte counts; near both ends of the tensor its position counts as well.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in plain_parts(tensor):
        if not part.numel():
            continue
        data = part.detach().resolve_conj().resolve_neg().contiguous()
        if data.is_complex():
            data = torch.view_as_real(data)
        flat = data.reshape(-1).view(torch.uint8)
        flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
        whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
        rest = flat[whole.numel() * 8 :].to(torch.int64)
        ends = torch.cat([whole[:_END_WORDS], whole[-_END_WORDS:], rest])
        weights = torch.arange(1, 2 * ends.numel() + 1, 2, dtype=torch.int64, device=ends.device)
        total = total * _FACTOR + whole.sum() * 3 + (ends * weights).sum() + part.numel()
    return total


def agreement_of_all(parameters: Iterable[ShardedParameter], doing: str) -> Agreement:
    """Return the agreement of all ranks of the largest mesh of `parameters` in one call, whose name is `doing`."""
    # The axis of a parameter on that mesh, which may be another one than that of its unit, and its tensor-parallel axes
    # together connect all ranks.
    largest = max(parameters, key=lambda one: one.sharding.mesh.size())
    unit, sharding = largest.unit(), largest.sharding
    assert unit is not None
    axes = [sharding.axis, *(axis for _, axis in sharding.tensor_parallel_groups)]
    ranks = sharding.mesh.mesh.flatten().tolist()
    return Agreement(unit.runtime.communicator, axes, unit.unit_name, doing, f"{unit.global_id} {doing}", ranks=ranks)


@torch.no_grad()
def find_difference(named: Sequence[tuple[str, Tensor]], ranks: Agreement, tolerance: float | None = None) -> str | None:
    """Return a text that names the first tensor whose values differ between ranks, None if there is none. Collective.

    All ranks return the same text.

    Args:
        named: names and tensors, in the same order on all ranks.
        ranks: the ranks to compare.
        tolerance: norm of a difference that counts as rounding, relative to that of the values, since kernels may round
            otherwise on other ranks; shapes are equal then. None: every bit counts.
    """
    if not named or not ranks.groups:
        return None
    digests = torch.stack([digest(tensor).to(ranks.device) for _, tensor in named])
    rows = digests.view(torch.uint8).view(len(named), -1)
    if ranks.first_unequal(rows) is None:
        return None
    for (name, tensor), row in zip(named, rows):
        if tolerance is not None and tensor.is_floating_point():
            values = tensor.detach().float()
            high, low = ranks.maximum(values.clone()), -ranks.maximum(-values)
            if not (high - low).norm() > tolerance * torch.maximum(high.norm(), low.norm()):
                continue
        if where := ranks.who_differs(bytes(row.tolist())):
            return f"{name} differs {where}"
    return None
