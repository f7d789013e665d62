"""Gradients of a group that no parameter has yet: how they are laid out in messages, and those kept between backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.consistency.collective_log import CollectiveLog
from fullshard.params.sharded_param import ShardedParameter
from fullshard.policies import Dtypes
from fullshard.sharding.layout import GroupLayout, Segment, Slice


@dataclass(frozen=True, eq=False)
class ReductionPlan:
    """How the gradients of a group travel and arrive, fixed when the group is made.

        one packed message   | p0 | p1 | gap | p2 | ...    numel elements per rank; gaps are zeros
        direct               p3, p4: each a message of its own, as autograd left it
        slices               p5, p6: must be cast, or are cut unevenly, slice by slice through one buffer
        sums                 p7: of so few rows that all ranks get the whole sum

    packed: segments of the packed message.     direct, slices, sums: the parameters that are in none of them.
    zeros: by size, the tensor (ranks, size) in the compute dtype that is sent for a gap.
    views: of each parameter's gradient in the flat one: shape, strides, offset. The list itself, put on a gradient together
        with the flat gradient, says that the flat one is laid out like this group.
    keys: under which attribute a gradient has that.
    dtype: of a `.grad`.
    """

    numel: int
    packed: list[Segment]
    direct: tuple[int, ...]
    slices: tuple[tuple[Slice, ...], ...]
    sums: tuple[tuple[Slice, ...], ...]
    zeros: dict[int, Tensor]
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    keys: list[str]
    has_slices: bool
    dtype: torch.dtype

    @classmethod
    def of(
        cls, layout: GroupLayout, shapes: Sequence[tuple[int, ...]], *, dtypes: Dtypes, in_order: bool, device: torch.device
    ) -> ReductionPlan:
        """The plan for shards of these `shapes`. in_order: of the collectives that reduce them."""
        as_is = dtypes.compute == dtypes.reduce
        found = layout.reduction(as_is=as_is, in_order=in_order, itemsize=dtypes.reduce.itemsize)
        segments = [segment for segment in found.packed.pieces if segment.size] if found.packed is not None else []
        gaps = {segment.size for segment in segments if segment.parameter < 0}
        return cls(
            numel=0 if found.packed is None else found.packed.size,
            packed=segments,
            direct=found.direct,
            slices=found.slices,
            sums=found.sums,
            zeros={size: torch.zeros(layout.ranks, size, dtype=dtypes.compute, device=device) for size in gaps},
            views=[(shape, _torch.contiguous_strides(shape), place.offset) for shape, place in zip(shapes, layout.places)],
            keys=[f"_fullshard_flat_{index}" for index in range(len(shapes))],
            has_slices=bool(found.slices or found.sums),
            dtype=dtypes.reduced,
        )


class DeferredSum(Protocol):
    """A sum over shards whose sum over replicas is left to a later reduction. `used`: whether each parameter has a gradient."""

    used: list[bool]

    @property
    def total(self) -> Tensor:
        """The sum over shards."""
        ...

    def add_to(self, total: Tensor) -> None:
        """Become part of that reduction, whose sum over shards is `total`."""
        ...


class GroupGradients:
    """Gradients of one group between backwards, and what ranks may compare of those that the parameters have.

    backward without communication --accumulate--> local_grad of each parameter --merge--> the next reduction
    backward that leaves the sum over replicas to a later one --> `deferred`, which the next reduction adds to its own
    """

    def __init__(self, parameters: Sequence[ShardedParameter], dtype: torch.dtype, log: CollectiveLog) -> None:
        """`dtype`: that gradients are reduced in."""
        self._parameters, self._dtype, self._log = parameters, dtype, log
        # Whether a backward without communication ended since the last reduction, whatever it left here.
        self.has_local = any(parameter.local_grad is not None for parameter in parameters)
        self.shown = False  # whether full parameters have kept gradients as `.grad`
        self.deferred: DeferredSum | None = None
        self._epoch = -1  # of the log, when the first parameter was last given a gradient
        self._version = 0  # of that gradient, when the group was last reduced

    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Keep gradients of a backward that does not communicate, in the reduce dtype."""
        self.has_local = True
        for parameter, grad in zip(self._parameters, grads):
            if grad is not None:
                kept = parameter.local_grad
                parameter.local_grad = grad.to(self._dtype) if kept is None else kept.add_(grad)

    def widen(self, dtype: torch.dtype) -> None:
        """Keep gradients in `dtype` from now on, also those that are kept already."""
        self._dtype = dtype
        for parameter in self._parameters:
            if parameter.local_grad is not None:
                parameter.local_grad = parameter.local_grad.to(dtype)

    def merge(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """`grads` and what earlier backwards kept, which is kept no longer."""
        if not self.has_local:
            return grads
        if any(parameter.local_grad is not None for parameter in self._parameters):
            self.accumulate(grads)
            grads = [parameter.local_grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.local_grad = None
        self.has_local = False
        return grads

    def show(self) -> None:
        """Show kept gradients as `.grad` of the full parameters, which the caller has installed and may read.

        Autograd must not add to them: of a backward that raises nothing may stay. They are hidden before one begins.
        """
        if not self.has_local:
            return
        for parameter in self._parameters:
            kept, full = parameter.local_grad, parameter.full
            if kept is not None and full is not None and full.grad is None:
                parameter.shown_grad = full.grad = parameter.sharding.to_module(kept)
                self.shown = True

    def hide(self) -> None:
        """Show them no longer. A gradient that the caller put in their place, or took away, is kept instead."""
        self.shown = False
        for parameter in self._parameters:
            shown, full = parameter.shown_grad, parameter.full
            parameter.shown_grad = None
            if shown is None or full is None:
                continue
            found, full.grad = full.grad, None
            if found is None:
                parameter.local_grad = None
            elif found is not shown:
                parameter.local_grad = parameter.sharding.grad_to_local(found, name=parameter.name).to(self._dtype)

    def discard(self) -> None:
        """Forget what only this rank holds: kept gradients, those reduced over shards only, and those of full parameters."""
        self.has_local, self.deferred, self.shown = False, None, False
        for parameter in self._parameters:
            parameter.local_grad = parameter.shown_grad = None
            if parameter.full is not None:
                parameter.full.grad = None

    def adds(self) -> bool:
        """Whether the next gradients are added to those that the parameters have. Asked when they are reduced.

        Ranks that agreed on a failed step may hold different gradients, so that counts only once they were given others.
        """
        grad = self._parameters[0].sharded.grad
        self._version = 0 if grad is None else grad._version
        return grad is not None and self._epoch == self._log.epoch

    def note_given(self) -> None:
        """The first parameter is given its gradient."""
        self._epoch = self._log.epoch

    @property
    def rewritten(self) -> bool:
        """Whether somebody wrote to the gradient of the first parameter since it was reduced, where ranks can compare."""
        grad = self._parameters[0].sharded.grad
        return grad is not None and grad._version != self._version and self._epoch == self._log.epoch
