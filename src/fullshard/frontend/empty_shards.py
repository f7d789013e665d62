"""Empty shards as optimizers of other libraries see them: kernels over lists of tensors skip what precedes an empty last one.

A rank holds no rows of a parameter that has fewer of them than there are ranks. Fused kernels in the manner of apex (its
multi_tensor_apply, and what DeepSpeed and Transformer Engine made of it) start when they meet the last piece of the last
tensor. If that tensor is empty it has no piece, and the tensors before it are not stepped, silently, on this rank alone.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from math import prod
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard.params.sharded_param import ShardedParameter
from fullshard.sharding.param_sharding import ParamSharding

STAND_IN_LENGTH = 17
"""Elements of what stands in for an empty tensor: a number that states of a few elements per parameter hardly have."""


def stand_in(empty: Tensor) -> Tensor:
    """Some zeros in the place of an empty tensor of the same dtype, device and number of dims.

    Rather than to leave empty tensors out: the optimizer must make their states and count their steps, or the ranks would
    save different states. Rather than to put them first: those kernels have room for some tens of tensors, and only look
    whether it is used up at a tensor with elements, so a run of empty ones writes behind it.
    """
    return torch.zeros((STAND_IN_LENGTH, *[1] * (empty.ndim - 1)), dtype=empty.dtype, device=empty.device)


def is_foreign(optimizer: Optimizer) -> bool:
    """Return True if an optimizer does not step by torch's own code, whose kernels accept empty tensors."""
    step = inspect.unwrap(type(optimizer).step)
    return not getattr(step, "__module__", "").startswith("torch.optim")


class StepOrder:
    """The order of an optimizer's parameters in steps that see DTensors and may unwrap them: of each dtype, the fullest last.

        before      a  b  c(empty on rank 2)  d(empty on ranks 1 and 2)
        in steps    a  c  d  b

    The order is the same on all ranks, since operations on DTensors may send messages: it follows from the shapes and from
    which parameters have gradients. Nothing is left out, for the same reason. Others keep their places: see `stand_in`.
    """

    __slots__ = ("_optimizer_hooks", "_put", "_shares")

    def __init__(self, sharded: Iterable[ShardedParameter]) -> None:
        known: dict[Any, float] = {}
        shares = {id(one.sharded): _share(one.sharding, known) for one in sharded}
        self._shares = {key: share for key, share in shares.items() if share < 1}
        self._put: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = []  # group, key, as it was, as it is now
        self._optimizer_hooks: list[Any] = []

    def enter(self, optimizer: Optimizer) -> None:
        """Put the parameters of each group in the order of steps."""
        if not self._shares:
            return
        for group in optimizer.param_groups:
            members = group["params"]
            order = self._order(members)
            if order is None:
                continue
            for key in ("params", "param_names"):
                listed = group.get(key)
                if isinstance(listed, list) and len(listed) == len(order):
                    before, now = list(listed), [listed[index] for index in order]
                    self._put.append((group, key, before, now))
                    listed[:] = now
        if self._put and not self._optimizer_hooks:
            # No hook runs behind a step that raised. Before the order is saved or a saved one is loaded, it is put right; what
            # torch.distributed.checkpoint loads it lists by name in the order that it finds, so that this one stays.
            self._optimizer_hooks += [
                optimizer.register_state_dict_pre_hook(lambda _: self.leave()),
                optimizer.register_load_state_dict_pre_hook(self._before_load),
            ]

    def leave(self) -> None:
        """Put them in the order of before, except where somebody made another list meanwhile."""
        while self._put:
            group, key, before, now = self._put.pop()
            listed = group.get(key)
            if isinstance(listed, list) and len(listed) == len(now) and all(map(is_, listed, now)):
                listed[:] = before

    def _before_load(self, _: Optimizer, state_dict: Any) -> None:
        if not any(isinstance(key, str) for group in state_dict["param_groups"] for key in group["params"]):
            self.leave()

    def _order(self, members: list[Any]) -> list[int] | None:
        """Indices of `members`; None if they are in order."""
        last: dict[torch.dtype, tuple[float, int]] = {}  # kernels get a list of each dtype
        for index, parameter in enumerate(members):
            if parameter.grad is not None:
                share = self._shares.get(id(parameter), 1.0)
                last[parameter.dtype] = max(last.get(parameter.dtype, (share, index)), (share, index))

        def place(index: int) -> tuple[int, bool]:
            """Behind the fullest one: right before it."""
            _, end = last.get(members[index].dtype, (0, len(members)))
            return (end, False) if index > end and members[index].grad is not None else (index, True)

        order = sorted(range(len(members)), key=place)
        return None if order == list(range(len(members))) else order


def _share(sharding: ParamSharding, known: dict[Any, float]) -> float:
    """On which share of its ranks a parameter has elements: a number that is the same on all of them. `known`: found before."""
    if not prod(sharding.shape):
        return 0.0
    if sharding.dense is None:
        if sharding.axis.group is None or not sharding.shape:
            return 1.0
        rows, ranks = sharding.local_shape[sharding.dim], sharding.axis.ranks
        return -(-rows // -(-rows // ranks)) / ranks
    key = sharding.shape, sharding.mesh, sharding.placements
    if key not in known:
        places = list(itertools.product(*map(range, sharding.mesh.mesh.shape)))
        known[key] = sum(all(map(len, sharding.ranges_at(place))) for place in places) / len(places)
    return known[key]


__all__ = ["StepOrder", "is_foreign", "stand_in"]
