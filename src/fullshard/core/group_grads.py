"""Gradients of a group before they become `.grad`: their layout in reductions, and gradients kept between backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core.layout import GroupLayout, Segment, Slice
from fullshard.core.sharded_param import ShardedParameter
from fullshard.policies import Dtypes

if TYPE_CHECKING:
    from fullshard.core.reduction import Reduction


@dataclass(frozen=True, eq=False)
class ReductionPlan:
    """Layout of a group's gradients in the reduce-scatter inputs and in the flat gradient.

    It is fixed when the group is created.

    packed   | p0 | p1 | gap | p2 | ...    one input of numel elements per rank; gaps are zeros
    direct   p3, p4                        one input each: the tensor that autograd computed
    slices   p5, p6                        cast or uneven, if collectives run in order: slice by slice through one buffer
    """

    layout: GroupLayout
    numel: int  # elements per rank of the packed input
    packed: list[Segment]  # segments of the packed input
    direct: tuple[int, ...]  # indices of parameters with a reduce-scatter of their own
    slices: tuple[tuple[Slice, ...], ...]  # slices of each further reduce-scatter
    blocks: frozenset[int]  # indices of packed parameters that torch.chunk along dim 0 would divide otherwise
    computed: torch.dtype  # dtype of the zeros to send if this rank has no gradient of the group
    zeros: dict[int, Tensor]  # for each size of a gap, its input: (ranks, size) zeros in the compute dtype
    # (shape, strides, offset) of each parameter's gradient in the flat gradient. The list object also identifies the layout:
    # each gradient has a mark, (this list, the flat gradient), so gradients with the same mark are parts of one flat gradient.
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    keys: list[str]  # attribute of each parameter's gradient that stores this mark
    dtype: torch.dtype  # dtype of `.grad`

    @classmethod
    def of(
        cls,
        layout: GroupLayout,
        shapes: Sequence[tuple[int, ...]],
        *,
        dtypes: Dtypes,
        in_order: bool,
        device: torch.device,
        shard_layout: GroupLayout | None = None,
    ) -> ReductionPlan:
        """Return the plan.

        Args:
            layout: layout of the group.
            shapes: shape of each parameter's shard.
            dtypes: dtypes of the group.
            in_order: whether collectives run in order on a stream, so that gradients may be reduced in slices.
            device: device of the gradients.
            shard_layout: layout of the flat gradient; None for `layout`.
        """
        found = layout.reduction(as_is=dtypes.reduces_as_is, in_order=in_order, itemsize=dtypes.reduce.itemsize)
        segments = [segment for segment in found.packed.segments if segment.size] if found.packed is not None else []
        gaps = {segment.size for segment in segments if segment.parameter < 0}
        places = (layout if shard_layout is None else shard_layout).offsets
        return cls(
            layout=layout,
            numel=0 if found.packed is None else found.packed.size,
            packed=segments,
            direct=found.direct,
            slices=found.slices,
            blocks=frozenset(one.parameter for one in segments if one.parameter >= 0 and not layout.is_chunked(one.parameter)),
            computed=dtypes.compute,
            zeros={size: torch.zeros(layout.ranks, size, dtype=dtypes.compute, device=device) for size in gaps},
            views=[(shape, _torch.contiguous_strides(shape), place.offset) for shape, place in zip(shapes, places)],
            keys=[f"_fullshard_flat_{index}" for index in range(len(shapes))],
            dtype=dtypes.reduced,
        )


class GroupGradients:
    """Gradients of one group that are kept between backwards, and the state of `.grad` that ranks compare.

    `foresight/group.py` and `wrap/plan_messages.py` predict what this class and `Reduction` allocate and send, in their order:
    change them together. Dtypes they take from the same `Dtypes`.

        backward without gradient sync --accumulate--> local_grad of each parameter --merge--> the next reduction
        backward that defers the all-reduce over replicas --> `deferred` --> added by the next reduction

    Attributes:
        has_local: whether a backward without gradient sync ended after the last reduction, even if it had no gradients of this
            group on this rank.
        deferred: the last reduction, if its all-reduce over replicas is deferred.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], dtype: torch.dtype) -> None:
        """Start without kept gradients, except for those that `parameters` have from an earlier group.

        Args:
            parameters: the parameters of the group.
            dtype: dtype of kept gradients.
        """
        self._parameters, self._dtype = parameters, dtype
        self.has_local = any(parameter.local_grad is not None for parameter in parameters)
        for parameter in parameters:  # of an earlier group, whose parameters had another dtype
            if parameter.local_grad is not None:
                parameter.local_grad = parameter.local_grad.to(dtype)
        self.deferred: Reduction | None = None
        self._has_committed = False  # since gradients were last discarded

    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a backward without gradient sync to the kept gradients, in the dtype of these."""
        self.has_local = True
        for parameter, grad in zip(self._parameters, grads):
            if grad is not None:
                kept = parameter.local_grad
                parameter.local_grad = grad.to(self._dtype) if kept is None else kept.add_(grad)

    def merge(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the sum of `grads` and the kept gradients, and discard the kept ones."""
        if not self.has_local:
            return grads
        if any(parameter.local_grad is not None for parameter in self._parameters):
            self.accumulate(grads)
            grads = [parameter.local_grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.local_grad = None
        self.has_local = False
        return grads

    def discard(self) -> None:
        """Discard kept gradients, a deferred reduction, and `.grad` of the unsharded parameters."""
        self.has_local, self.deferred, self._has_committed = False, None, False
        for parameter in self._parameters:
            parameter.local_grad = None
            if parameter.unsharded is not None:
                parameter.unsharded.grad = None

    def accumulates(self) -> bool:
        """Return True if the next commit adds to a `.grad` that exists, which must be the same on all ranks.

        After a failed step this may differ between ranks, so the result is False until the next commit.
        """
        return self._has_committed and self._parameters[0].sharded.grad is not None

    def note_committed(self) -> None:
        """Record that gradients were committed."""
        self._has_committed = True
