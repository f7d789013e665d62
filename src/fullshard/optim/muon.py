"""Steps of `torch.optim.Muon` on sharded matrices: element-wise on shards, Newton-Schulz on the owners of whole matrices."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import Tensor, optim

from fullshard import _torch
from fullshard.core import ShardedParameter, Unit, logical_parameters, owner_of
from fullshard.optim.owner_exchange import OwnerExchange
from fullshard.optim.owners import Matrix, plan_owners

_WIRE = torch.bfloat16  # Newton-Schulz casts to it first, so messages in it change no bit of the result


def is_muon(optimizer: optim.Optimizer) -> bool:
    """Return True for torch's Muon, and for subclasses that inherit both `_init_group` and `step`."""
    cls = type(optimizer)
    if not issubclass(cls, optim.Muon):
        return False
    return _torch.list_alike(cls, optim.Muon) and inspect.unwrap(cls.step) is inspect.unwrap(optim.Muon.step)


@dataclass(slots=True, eq=False)
class _Member:
    """One matrix in a step."""

    parameter: ShardedParameter
    unit: Unit
    local: Tensor  # its shard
    grad: Tensor  # the shard of its gradient
    momentum: Tensor  # the shard of its momentum buffer
    options: dict[str, Any]  # of its parameter group, in this step
    is_new: bool  # whether the momentum buffer was created in this step


class MuonStep:
    """Replacement of Muon's `_init_group`, the method that collects the tensors of a step in lists.

    Sharded matrices are taken out of the lists, so that Muon's `step` leaves them alone. At the end of the step they are
    computed together: messages to the owners and back, and then all writes. So a step that raises on any rank has changed no
    weight and no momentum on any rank. The lists keep matrices that modules compute with as DTensors (tensor parallelism) and
    plain ones, which `step` computes as without fullshard.

        update = lerp(gradient, momentum)       on the shards, in bfloat16 to the owners
        update = Newton-Schulz(update)          on the owners, in bfloat16 back to the shards
        weight *= 1 - lr * weight_decay; weight -= adjusted lr * update

    Source: Jordan et al. 2024, Muon (kellerjordan.github.io/posts/muon); `torch.optim.Muon` (torch 2.13).
    """

    __slots__ = ("_exchanges", "_members", "_optimizer")

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._members: list[_Member] = []  # of the running step
        self._exchanges: dict[tuple[int, int], tuple[list[ShardedParameter], OwnerExchange]] = {}  # by axis

    def __call__(self, group: dict[str, Any], *lists: Any) -> Any:
        """Fill `lists` as `_init_group` does, without the sharded matrices, which are noted for the end of the step."""
        optimizer: Any = self._optimizer()
        known = {id(parameter) for parameter in group["params"] if optimizer.state.get(parameter)}
        result = _torch.list_tensors(optimizer, group, *lists)
        options, left = dict(group), list[tuple[Tensor, ...]]()
        for tensors in zip(*lists):
            member = _member_of(tensors, options, is_new=id(tensors[0]) not in known)
            if member is None:
                left.append(tensors)
            else:
                self._members.append(member)
        for place, listed in enumerate(lists):
            listed[:] = [tensors[place] for tensors in left]
        return result

    def end_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Compute the step of the noted matrices. Collective."""
        members, self._members = self._members, []
        by_axis: dict[tuple[int, int], list[_Member]] = {}
        for member in members:
            by_axis.setdefault(member.parameter.sharding.axis.key, []).append(member)
        results: list[tuple[list[_Member], list[Tensor]]] = []
        try:
            with torch.no_grad():
                for alike in by_axis.values():
                    results.append((alike, self._orthogonalized(alike)))
        except BaseException:
            for member in members:
                if member.is_new:
                    optimizer.state.pop(member.parameter.sharded, None)
            raise
        with torch.no_grad():
            for alike, updates in results:
                for member, update in zip(alike, updates):
                    _write(member, update)

    def _orthogonalized(self, members: list[_Member]) -> list[Tensor]:
        """Return this rank's part of each orthogonalized update, without changing anything. Collective."""
        exchange = self._exchange_of(members)

        def newton_schulz(index: int, whole: Tensor) -> Tensor:
            options = members[index].options
            return _torch.newton_schulz(whole, options["ns_coefficients"], options["ns_steps"], options["eps"])

        return exchange.run(lambda index: _update(members[index]), newton_schulz)

    def _exchange_of(self, members: list[_Member]) -> OwnerExchange:
        """Return the exchange of these matrices, planned anew if they are others than in the step before. Collective then."""
        axis, unit = members[0].parameter.sharding.axis, members[0].unit
        parameters = [member.parameter for member in members]
        known, exchange = self._exchanges.get(axis.key, ([], None))
        if exchange is None or len(known) != len(parameters) or any(map(is_not, known, parameters)):
            plan = plan_owners(map(_matrix_of, members), axis.ranks, replicas=axis.replica_count)
            exchange = OwnerExchange(plan, unit, axis, _WIRE, f"{type(self._optimizer()).__name__}.step()")
            self._exchanges[axis.key] = parameters, exchange
        return exchange


def _member_of(tensors: tuple[Tensor, ...], options: dict[str, Any], *, is_new: bool) -> _Member | None:
    """Return a sharded matrix with its gradient and momentum; None for one that `step` computes itself."""
    parameter, grad, momentum = tensors
    found = next(iter(logical_parameters([parameter])), None)
    unit = None if found is None else owner_of(found)
    if found is None or unit is None or not found.sharding.is_plain:
        return None
    expected = found.spec
    for spec in _torch.specs_of([parameter, grad, momentum]):
        if spec is None or spec.mesh != expected.mesh or spec.placements != expected.placements:
            return None
    local, grad, momentum = _torch.locals_of([parameter, grad, momentum])
    return _Member(found, unit, local, grad, momentum, options, is_new)


def _matrix_of(member: _Member) -> Matrix:
    rows, columns = member.parameter.shape
    return Matrix(f"{member.unit.global_id} {member.parameter.name}", (rows, columns), member.parameter.sharding.dim)


def _update(member: _Member) -> Tensor:
    """Return this rank's part of the update before it is orthogonalized, (shard shape)."""
    options = member.options
    momentum = torch.lerp(member.momentum, member.grad, 1 - options["momentum"])
    return torch.lerp(member.grad, momentum, options["momentum"]) if options["nesterov"] else momentum


def _write(member: _Member, update: Tensor) -> None:
    """Write momentum and weight, in the order of the reference."""
    options = member.options
    lr = _torch.scalar_of(options["lr"])
    member.momentum.lerp_(member.grad, 1 - options["momentum"])
    member.local.mul_(1 - lr * options["weight_decay"])
    adjusted = _torch.adjusted_lr(lr, options["adjust_lr_fn"], member.parameter.shape)
    rows, columns = member.parameter.shape
    if rows > columns:
        update = _column_major(update)
    member.local.add_(update.to(member.local.device), alpha=-adjusted)


def _column_major(update: Tensor) -> Tensor:
    """Return a copy whose columns are contiguous, as Newton-Schulz returns tall matrices.

    On the CPU, bfloat16 additions of tensors with other strides than the sum run in a loop that rounds otherwise.
    """
    made = update.new_empty(update.shape[1], update.shape[0] + 1)[:, :-1].t()  # a single row would count as contiguous
    return made.copy_(update)


__all__ = ["MuonStep", "is_muon"]
