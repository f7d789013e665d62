"""Copies: what a call computes or writes once must be equal on all ranks of the largest mesh in the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard.core.agreement import Agreement
from fullshard.core.mesh import resolve_mesh
from fullshard.core.sharded_param import ShardedParameter
from fullshard.core.value_sync import digest


def agreement_of_all(parameters: Iterable[ShardedParameter], doing: str) -> Agreement:
    """Return the agreement of all ranks of the largest mesh of `parameters` in one call, whose name is `doing`."""
    # The axis of a parameter on that mesh, which may be another one than that of its unit, and its tensor-parallel axes
    # together connect all ranks.
    largest = max(parameters, key=lambda one: one.sharding.mesh.size())
    unit, sharding = largest.unit(), largest.sharding
    assert unit is not None
    names = sharding.mesh.mesh_dim_names or ()
    axes = [sharding.axis, *(resolve_mesh(sharding.mesh[names[axis]]) for axis in sharding.tensor_parallel_axes)]
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


__all__ = ["agreement_of_all", "find_difference"]
