"""Reduced gradients become `.grad`: of all parameters that are to have one, each once, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.params.sharded_param import ShardedParameter

if TYPE_CHECKING:
    from fullshard.params.group import ParamGroup


class GradCommit:
    """The gradients of one group, (shard_numel,) in the dtype of `.grad`, for the parameters that are `used`.

    Python may be interrupted (Ctrl-C) between any two calls, so `commit` can be begun again: the mark on a gradient that is set
    says that it was, and the version of a tensor that is added to says whether that was done. A gradient bears its mark, the
    flat tensor that it is a view of and how that is laid out, under a key of its parameter: a gradient that the caller put
    there bears none, or that of another.
    """

    __slots__ = ("_flat", "_group", "_mark", "_versions", "gradients")

    def __init__(self, group: ParamGroup, flat: Tensor, used: Sequence[bool], *, has_hooks: bool) -> None:
        """Calls the hooks that callers put on the parameters for their gradients (`register_hook`).

        Raises StateError, naming the parameter, if a hook or a caller left something there that is not its gradient.
        """
        self._group, self._flat = group, flat
        plan = group.reduction
        self._mark = (plan.views, flat)
        self.gradients: list[Any] | None = None  # as hooks made them; None: all are views of the flat tensor
        self._versions: dict[int, int] = {}  # of tensors that are added to, before that
        if has_hooks or not all(used):
            self.gradients = [
                _hooked(parameter, flat.as_strided(*view)) if is_used else None
                for parameter, view, is_used in zip(group.parameters, plan.views, used)
            ]
            for parameter, gradient in zip(group.parameters, self.gradients):
                if gradient is not None:
                    _check(parameter, gradient, "is what a hook on it made of its gradient,", group.dtypes.grad)
        dtype = flat.dtype
        for parameter, key, is_used in zip(group.parameters, plan.keys, used):
            if not is_used:
                continue
            sharded = parameter.sharded
            grad = sharded.grad
            if grad is None:
                taken = sharded.grad_dtype
                if taken is not dtype and taken is not None:
                    raise StateError(
                        f"parameter '{parameter.name}' of unit '{parameter.unit_name.name}' takes a .grad of {taken}, but its "
                        f"gradients are reduced to {dtype}: set grad_dtype before the first forward, or call model.to() "
                        "behind it"
                    )
            else:
                mark = grad.__dict__.get(key)
                if mark is None or mark[0] is not plan.views:
                    _check(parameter, grad, "was put into its `.grad`, to which its gradient is to be added,")

    def commit(self) -> None:
        """Give the parameters their gradients, or add to those that are there."""
        if self.gradients is not None:
            return self._commit_each(self.gradients)
        there = _common_mark(self._group)
        if there is not None and there[0] is self._mark[0]:  # the views of one flat tensor of the same layout
            if there is not self._mark:
                self._add(-1, there[1], self._flat)
            return
        group, flat, plan = self._group, self._flat, self._group.reduction
        first: list[Any] = []  # gradients of a step
        alike = flat.dtype == group.dtypes.storage
        for index, (parameter, key, view) in enumerate(zip(group.parameters, plan.keys, plan.views)):
            sharded = parameter.sharded
            grad = sharded.grad
            if grad is None:
                local = flat.as_strided(*view)
                if alike:
                    first.append((sharded, parameter.local, local, parameter.spec, key))
                else:
                    first.append((sharded, local, local, parameter.sharding.spec(flat.dtype), key))
            elif grad.__dict__.get(key) is not self._mark:
                self._add(index, grad, parameter.dtensor_like_shard(flat.as_strided(*view)))
        _torch.set_gradients(first, self._mark)

    def _commit_each(self, gradients: Sequence[Any]) -> None:
        for index, (parameter, gradient) in enumerate(zip(self._group.parameters, gradients)):
            grad = parameter.sharded.grad
            if gradient is None or grad is gradient:
                continue
            if grad is None:
                parameter.sharded.grad = gradient
            else:
                self._add(index, grad, gradient)

    def run_post_grad_hooks(self) -> None:
        """Call the hooks that callers put on the parameters for when their gradients are there."""
        for parameter, gradient in zip(self._group.parameters, self.gradients or ()):
            if gradient is not None:
                for hook in _torch.parameter_hooks(parameter.sharded)[1]:
                    hook(parameter.sharded)

    def _add(self, index: int, total: Tensor, more: Tensor) -> None:
        """Once, however often it is called."""
        total, more = _torch.insides(total, more)
        if index not in self._versions:
            self._versions[index] = total._version
        if total._version == self._versions[index]:
            total.add_(more)


def _common_mark(group: ParamGroup) -> Any:
    """The mark that the gradients of all parameters bear; None if not all bear one, and the same."""
    before: Any = None
    for parameter, key in zip(group.parameters, group.reduction.keys):
        grad = parameter.sharded.grad
        mark = None if grad is None else grad.__dict__.get(key)
        if mark is None or (before is not None and mark is not before):
            return None
        before = mark
    return before


def flat_gradient(group: ParamGroup) -> Tensor | None:
    """The flat tensor, (shard_numel,), of which the gradients of all parameters are views; None if they are not.

    Between gradients it holds zeros.
    """
    mark = _common_mark(group)
    return mark[1] if mark is not None and mark[0] is group.reduction.views else None


def _hooked(parameter: ShardedParameter, local: Tensor) -> Any:
    """A reduced gradient, (sharding.shard_shape), as hooks that callers put on the sharded parameter make it."""
    gradient: Any = parameter.dtensor_like_shard(local)
    hook: Callable[..., Any]
    for hook in _torch.parameter_hooks(parameter.sharded)[0]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _check(parameter: ShardedParameter, gradient: Any, origin: str, dtype: torch.dtype | None = None) -> None:
    """Raises StateError unless `gradient` is a DTensor like the sharded parameter (of `dtype`, if that is given)."""
    spec = parameter.spec
    fits = (
        isinstance(gradient, DTensor)
        and gradient.device_mesh == spec.mesh
        and gradient.placements == spec.placements
        and gradient.shape == spec.shape
        and gradient.dtype == (dtype or gradient.dtype)
    )
    if not fits:
        what = type(gradient).__name__
        if isinstance(gradient, Tensor):
            what += f" {tuple(gradient.shape)} of {gradient.dtype}"
        if isinstance(gradient, DTensor):
            what += f" with {gradient.placements} on {gradient.device_mesh}"
        raise StateError(
            f"{what} {origin} but parameter '{parameter.name}' of unit '{parameter.unit_name.name}' has DTensors "
            f"{tuple(spec.shape)} of {parameter.local.dtype} with {spec.placements} on {spec.mesh}: make it one with "
            "distribute_tensor(full, parameter.device_mesh, parameter.placements)"
        )


def commit_all(commits: Sequence[GradCommit]) -> None:
    """Commit all of them, then run hooks. An interrupt is raised when all is committed; an error leaves at once."""
    interrupt: BaseException | None = None
    done = False
    while not done:
        try:
            for one in commits:
                one.commit()
            done = True
        except Exception:
            raise
        except BaseException as caught:
            interrupt = interrupt or caught
    if interrupt is not None:
        raise interrupt
    for one in commits:
        if one.gradients is not None:
            one.run_post_grad_hooks()


__all__ = ["GradCommit", "commit_all", "flat_gradient"]
