"""Empty shards in steps of other libraries' optimizers, whose fused kernels may skip tensors before an empty one.

A parameter with fewer rows than ranks has an empty shard on some ranks. Fused kernels like multi_tensor_apply of apex (also in
DeepSpeed and Transformer Engine) are launched at the last chunk of the last tensor. If that tensor is empty, it has no chunk,
so the tensors before it are silently not updated, on this rank only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard import _torch
from fullshard.core import Extent, ParamSharding, ShardedParameter
from fullshard.optim.pieces import is_same


def nonempty(tensor: Tensor) -> Tensor:
    """Return a tensor, or zeros in the place of an empty one, with its dtype, device and number of dims.

    Empty tensors cannot be left out: the optimizer must create their states and count their steps, or the ranks would save
    different states. They cannot be moved to the front either: a kernel takes a few dozen tensors at a time, but counts them
    only when it comes to one with elements, so it overflows if there are many empty ones in a row.
    """
    if tensor.numel():
        return tensor
    length = 17  # an unusual number, so that optimizer states of a few elements are not mistaken for full states
    return torch.zeros((length, *[1] * (tensor.ndim - 1)), dtype=tensor.dtype, device=tensor.device)


def is_foreign(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer is not torch's own code, whose kernels accept empty tensors."""
    step = inspect.unwrap(type(optimizer).step)
    return not getattr(step, "__module__", "").startswith("torch.optim")


class StepOrder:
    """Order of an optimizer's parameters during a step on DTensors, whose local tensors the step may use.

    For each dtype, the last parameter is one with elements on the most ranks.

        before      a  b  c(empty on rank 2)  d(empty on ranks 1 and 2)
        in steps    a  c  d  b

    The order must be equal on all ranks, since operations on DTensors may run collectives. So it depends only on the shapes
    and on the set of parameters with gradients, and no parameter is left out. Empty ones are not moved to the front, for the
    reason in `nonempty`.

    torch runs no hook after a step that raised, which leaves the order in place. `leave` is called again before the next step,
    and before a state dict is saved or loaded.
    """

    def __init__(self, sharded: Iterable[ShardedParameter]) -> None:
        known: dict[Any, float] = {}
        shares = {id(one.sharded): _share(one.sharding, known) for one in sharded}
        self._shares = {key: share for key, share in shares.items() if share < 1}
        self._put: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = []  # group, key, list before, list now

    def enter(self, optimizer: Optimizer, *, has_closure: bool = False) -> None:
        """Put the parameters of each group into the order for the step.

        `has_closure`: whether the step calls a closure first, which makes the gradients of all trainable parameters.
        """
        for group in optimizer.param_groups if self._shares else ():
            order = self._order(group["params"], has_closure)
            for key in ("params", "param_names"):
                listed = group.get(key)
                if isinstance(listed, list) and len(listed) == len(order):
                    before, now = list(listed), [listed[index] for index in order]
                    self._put.append((group, key, before, now))
                    listed[:] = now

    def leave(self) -> None:
        """Restore the former order, except in lists that other code changed meanwhile."""
        while self._put:
            group, key, before, now = self._put.pop()
            listed = group.get(key)
            if isinstance(listed, list) and is_same(listed, now):
                listed[:] = before

    def _order(self, members: list[Any], has_closure: bool) -> list[int]:
        """Return the indices of `members` in the order for the step."""
        # (share, index) of the parameter to be the last one, for each dtype, since kernels get one list per dtype.
        last: dict[torch.dtype, tuple[float, int]] = {}
        for index, one in enumerate(members):
            if one.grad is not None or (has_closure and one.requires_grad):
                found = self._shares.get(id(one), 1.0), index
                last[one.dtype] = max(last.get(one.dtype, found), found)
        ends = sorted(index for _, index in last.values())
        return [index for index in range(len(members)) if index not in ends] + ends


def ranges_at(sharding: ParamSharding, coordinate: Sequence[int]) -> list[range]:
    """Return the range of each dim that the rank at `coordinate` of the parameter's mesh owns."""
    found = [range(length) for length in sharding.shape]
    # the shard axis comes last: FSDP shards the local tensor that tensor parallelism leaves
    for axis in sorted(range(sharding.mesh.ndim), key=lambda axis: axis == sharding.data_axes[-1]):
        placement: Any = sharding.placements[axis]
        if _torch.is_shard(placement):
            part = Extent.of_rank(len(found[placement.dim]), ranks=sharding.mesh.size(axis), rank=coordinate[axis])
            found[placement.dim] = found[placement.dim][part.start : part.stop]
    return found


def _share(sharding: ParamSharding, known: dict[Any, float]) -> float:
    """Return the share of ranks on which a parameter has elements. It is equal on all ranks. `known` is a cache."""
    if not prod(sharding.shape):
        return 0.0
    if sharding.tensor_parallel is None:
        if sharding.axis.group is None or not sharding.shape:
            return 1.0
        rows, ranks = sharding.local_shape[sharding.dim], sharding.axis.ranks
        return -(-rows // -(-rows // ranks)) / ranks
    key = sharding.shape, sharding.mesh, sharding.placements
    if key not in known:
        places = list(itertools.product(*map(range, sharding.mesh.mesh.shape)))
        known[key] = sum(all(map(len, ranges_at(sharding, place))) for place in places) / len(places)
    return known[key]
