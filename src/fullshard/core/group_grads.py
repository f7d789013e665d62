"""Gradients that a group keeps between backwards, and whether it has set `.grad` since they were discarded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.comm.streams import Work
from fullshard.core.sharded_param import ShardedParameter


class GroupGradients:
    """Gradients of one group between backwards.

    `foresight/group.py` predicts, in the same order, what this class and `Reduction` allocate and send; `wrap/plan_messages.py`
    predicts the totals. Change all of them together. They take dtypes from the same `Dtypes`.

        backward that does not reduce --accumulate--> local_grad of each parameter --merge--> the next reduction
        backward that defers the reduction over replicas --> `deferred` --> added by the next reduction
    """

    def __init__(self, parameters: Sequence[ShardedParameter], dtype: torch.dtype) -> None:
        """Start with the gradients that `parameters` have from an earlier group. `dtype`: of kept gradients."""
        self._parameters, self._dtype = parameters, dtype
        # Whether a backward that does not reduce (no gradient sync, or ZERO1 before the end of a step) came after the last
        # reduction, even if it had no gradients of this group on this rank.
        self.has_local = any(p.local_grad is not None or (p.group() and p.group().grads.has_local) for p in parameters)
        for parameter in parameters:  # an earlier group may have kept gradients in another dtype
            if parameter.local_grad is not None:
                parameter.local_grad = parameter.local_grad.to(dtype)
        # Of the last reduction, if it deferred its second step (`ReductionFactors`): the sum over the shards, `Reduction.used`,
        # and the work to wait for before the sum is read.
        self.deferred: tuple[Tensor, list[bool], Work] | None = None
        # Whether the end of a step gave the first parameter a `.grad` since gradients were last discarded. Only then may the
        # log, which is equal on all ranks, say that a reduction adds to `.grad`: after a failed step only some ranks have one.
        self.has_committed = False

    @property
    def are_left(self) -> bool:
        """True if gradients of earlier backwards are not fully reduced."""
        return self.has_local or self.deferred is not None

    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to the kept ones, in the dtype of these. The first gradient may itself become the accumulator."""
        self.has_local = True
        for parameter, grad in zip(self._parameters, grads):
            if grad is not None:
                kept = parameter.local_grad
                parameter.local_grad = grad.to(self._dtype) if kept is None else kept.add_(grad)

    def merge(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the sum of `grads` and the kept gradients, and discard the kept ones."""
        if any(parameter.local_grad is not None for parameter in self._parameters):
            self.accumulate(grads)
            grads = [parameter.local_grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.local_grad = None
        self.has_local = False
        return grads

    def discard(self) -> None:
        """Discard kept gradients, a deferred reduction, and `.grad` of the unsharded parameters."""
        self.has_local, self.deferred, self.has_committed = False, None, False
        for parameter in self._parameters:
            parameter.local_grad = None
            if parameter.unsharded is not None:
                parameter.unsharded.grad = None
