"""Layout of a group's gradients in reduce-scatter inputs and in the flat gradient."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core.layout import GroupLayout, Segment, Slice
from fullshard.policies import Dtypes


@dataclass(frozen=True, eq=False)
class ReductionPlan:
    """Layout of a group's gradients in the reduce-scatter inputs and in the flat gradient; fixed.

    packed   | p0 | p1 | gap | p2 | ...    one input of numel elements per rank; gaps are zeros
    direct   p3, p4                        one input each: the gradient, not copied if it has its dtype, scale and layout
    slices   p5, p6                        large gradients that are cast or uneven; without `in_order` they are packed
    """

    layout: GroupLayout
    numel: int  # elements per rank of the packed input
    packed: list[Segment]  # segments of the packed input
    # Takes a list of gradients and `gaps`, and returns the packed ones in order. None if torch.chunk would cut one differently.
    pick: Callable[[Sequence[Any]], Sequence[Tensor]] | None
    gaps: list[Tensor]  # inputs of the gaps, (ranks, size) zeros in the compute dtype
    direct: tuple[int, ...]  # indices of parameters with an input of their own in the first reduce-scatter
    slices: tuple[tuple[Slice, ...], ...]  # slices in each reduce-scatter; the first also has `packed` and `direct`
    casts_whole: bool  # whether packed gradients may be concatenated first and then cast as a whole (see `pack`)
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]]  # (shape, strides, offset) of each part of the flat gradient
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
        """Plan the reductions of a group.

        `shapes`: of each parameter's shard. `in_order`: whether collectives run in order on a stream, so that gradients may be
        reduced in slices. `shard_layout`: layout of the flat gradient; None for `layout`.
        """
        found = layout.reduction(as_is=dtypes.reduces_as_is, in_order=in_order, itemsize=dtypes.reduce.itemsize)
        segments = [segment for segment in found.packed.segments if segment.size] if found.packed is not None else []
        sizes = [segment.size for segment in segments if segment.parameter < 0]
        places = (layout if shard_layout is None else shard_layout).offsets
        chunked = all(one.parameter < 0 or layout.is_chunked(one.parameter) for one in segments)
        numel = 0 if found.packed is None else found.packed.size
        gap = itertools.count(len(shapes))
        order = [one.parameter if one.parameter >= 0 else next(gap) for one in segments]
        return cls(
            layout=layout,
            numel=numel,
            packed=segments,
            pick=_picker(order) if chunked else None,
            gaps=[torch.zeros(layout.ranks, size, dtype=dtypes.compute, device=device) for size in sizes],
            direct=found.direct,
            slices=found.slices,
            casts_whole=casts_whole(layout.ranks * numel, dtypes, on_cpu=device.type == "cpu"),
            views=[(shape, _torch.contiguous_strides(shape), place.offset) for shape, place in zip(shapes, places)],
            dtype=dtypes.reduced,
        )


def casts_whole(numel: int, dtypes: Dtypes, *, on_cpu: bool) -> bool:
    """Return True if a packed input of `numel` elements may be concatenated before it is cast (`pack` decides).

    On the CPU, casting tensors one by one takes longer than all else in a small unit. The joined copy takes at most 1 MiB.
    """
    return on_cpu and numel * dtypes.compute.itemsize <= 1 << 20


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function, written in C, that picks the items at `indices`; without indices it is not to be called."""
    if len(indices) == 1:
        return operator.itemgetter(slice(indices[0], indices[0] + 1))
    return operator.itemgetter(*indices) if indices else tuple
