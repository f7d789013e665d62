"""Reduced gradients become `.grad`: of all parameters that are to have one, each once, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The gradients of one group, (shard_numel,) in the storage dtype, for the parameters that are `used`.

    Python may be interrupted (Ctrl-C) between any two calls, so `commit` can be begun again: a gradient that is set says by
    what is on it that it was, and one that is added to by the version of the tensor that was written. A gradient bears the flat
    tensor that it is a view of, under a key of its parameter: one that the caller put there bears none, or that of another.
    """

    __slots__ = ("_flat", "_gradients", "_group", "_mark", "_versions")

    def __init__(self, group: ParamGroup, flat: Tensor, used: Sequence[bool], *, has_hooks: bool) -> None:
        """Calls the hooks that callers put on the parameters for their gradients (`register_hook`).

        Raises StateError, naming the parameter, if a hook or a caller left something there that is not its gradient.
        """
        self._group, self._flat = group, flat
        self._mark = (group.token, flat)
        self._gradients: list[Any] | None = None  # what hooks made of them; None: views of the flat tensor, all of them
        self._versions: dict[int, int] = {}  # of what is added to, before that
        if has_hooks or not all(used):
            self._gradients = [
                parameter.hooked_gradient(flat.as_strided(*view)) if is_used else None
                for parameter, view, is_used in zip(group.parameters, group.views, used)
            ]
            for parameter, gradient in zip(group.parameters, self._gradients):
                if gradient is not None:
                    _check(parameter, gradient, "is what a hook on it made of its gradient,", parameter.local.dtype)
        for parameter, key, is_used in zip(group.parameters, group.keys, used):
            grad = parameter.sharded.grad
            mark = None if grad is None else grad.__dict__.get(key)
            if is_used and grad is not None and (mark is None or mark[0] is not group.token):
                _check(parameter, grad, "was put into its `.grad`, to which its gradient is to be added,")

    def commit(self) -> None:
        if self._gradients is None:
            if not self._is_flat():
                group, flat = self._group, self._flat
                first: list[Any] = []  # gradients of a step
                for index, (parameter, key, view) in enumerate(zip(group.parameters, group.keys, group.views)):
                    grad = parameter.sharded.grad
                    if grad is None:
                        first.append((parameter.sharded, parameter.local, flat.as_strided(*view), parameter.spec, key))
                    elif grad.__dict__.get(key) is not self._mark:
                        self._add(index, grad, parameter.dtensor_like_shard(flat.as_strided(*view)))
                _torch.set_gradients(first, self._mark)
            return
        for index, (parameter, gradient) in enumerate(zip(self._group.parameters, self._gradients)):
            grad = parameter.sharded.grad
            if gradient is None or grad is gradient:
                continue
            if grad is None:
                parameter.sharded.grad = gradient
            else:
                self._add(index, grad, gradient)

    def run_post_grad_hooks(self) -> None:
        """Call the hooks that callers put on the parameters for when their gradients are there."""
        if self._gradients is not None:
            for parameter, gradient in zip(self._group.parameters, self._gradients):
                if gradient is not None:
                    parameter.run_post_grad_hooks()

    def _is_flat(self) -> bool:
        """Whether all gradients are the views of one flat tensor that we gave, which is added to in one call."""
        grads = [parameter.sharded.grad for parameter in self._group.parameters]
        keys = self._group.keys
        before: Any = None if grads[0] is None else grads[0].__dict__.get(keys[0])
        if before is None or any(grad is None or grad.__dict__.get(key) is not before for grad, key in zip(grads, keys)):
            return False
        token, total = before
        if before is self._mark:
            return True
        if token is not self._group.token:
            return False
        self._add(-1, total, self._flat)
        return True

    def _add(self, index: int, total: Tensor, more: Tensor) -> None:
        """Once, however often it is called."""
        total, more = _torch.insides(total, more)
        if index not in self._versions:
            self._versions[index] = total._version
        if total._version == self._versions[index]:
            total.add_(more)


def _check(parameter: ShardedParameter, gradient: Any, origin: str, dtype: torch.dtype | None = None) -> None:
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


def commit_all(handovers: Sequence[GradCommit]) -> None:
    """Have all of them happen. An interrupt is raised when that is done; an error has nothing left to come from."""
    interrupt: BaseException | None = None
    done = False
    while not done:
        try:
            for handover in handovers:
                handover.commit()
            done = True
        except Exception:
            raise
        except BaseException as caught:
            interrupt = interrupt or caught
    if interrupt is not None:
        raise interrupt
    for handover in handovers:
        handover.run_post_grad_hooks()


__all__ = ["GradCommit", "commit_all"]
