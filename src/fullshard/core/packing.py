"""Layout of a group's gradients in reduce-scatter inputs, and the copies and casts into these inputs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Allocate
from fullshard.core.layout import GroupLayout, ParamOffsets, Segment, Slice
from fullshard.core.unsharded_buffer import dim_permutation
from fullshard.policies import Dtypes

_grad: Callable[[Any], Any] = operator.attrgetter("grad")


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
    # Picks what is packed, in order, from the gradients and `gaps`; None if there are `blocks`.
    pick: Callable[[Sequence[Any]], Sequence[Tensor]] | None
    gaps: list[Tensor]  # inputs of the gaps, (ranks, size) zeros in the compute dtype
    direct: tuple[int, ...]  # indices of parameters with a reduce-scatter of their own
    slices: tuple[tuple[Slice, ...], ...]  # slices of each further reduce-scatter
    blocks: frozenset[int]  # indices of packed parameters that torch.chunk along dim 0 would divide otherwise
    computed: torch.dtype  # dtype of the zeros to send if this rank has no gradient of the group
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
        sizes = [segment.size for segment in segments if segment.parameter < 0]
        places = (layout if shard_layout is None else shard_layout).offsets
        blocks = frozenset(one.parameter for one in segments if one.parameter >= 0 and not layout.is_chunked(one.parameter))
        gap = itertools.count(len(shapes))
        order = [one.parameter if one.parameter >= 0 else next(gap) for one in segments]
        return cls(
            layout=layout,
            numel=0 if found.packed is None else found.packed.size,
            packed=segments,
            pick=None if blocks else _picker(order),
            gaps=[torch.zeros(layout.ranks, size, dtype=dtypes.compute, device=device) for size in sizes],
            direct=found.direct,
            slices=found.slices,
            blocks=blocks,
            computed=dtypes.compute,
            views=[(shape, _torch.contiguous_strides(shape), place.offset) for shape, place in zip(shapes, places)],
            keys=[f"_fullshard_flat_{index}" for index in range(len(shapes))],
            dtype=dtypes.reduced,
        )


class GradientParts:
    """The gradients of a group as parts of a flat gradient, which are used again while nobody else holds them.

    Creating them costs more than all else that a commit does. A reduction takes them, and its commit gives them back.

    Attributes:
        flat: the flat gradient, (shard_layout.shard_numel,).
        grads: its parts as DTensors, in the order of the parameters.
        is_free: whether its memory is freed, since the user let go of them.
    """

    __slots__ = ("_counts", "_nbytes", "flat", "grads", "is_free")

    def __init__(self, flat: Tensor, grads: Sequence[Any]) -> None:
        self.flat, self.grads, self.is_free = flat, grads, False
        self._nbytes = flat.untyped_storage().size()
        self._counts = _torch.holders(grads, flat)

    def free(self, parameters: Sequence[Tensor]) -> None:
        """Free the memory, if no `.grad` is set and nobody holds a gradient, a view of one, or its memory."""
        is_set = any(map(operator.is_not, map(_grad, parameters), repeat(None)))
        if not is_set and _torch.holders(self.grads, self.flat) == self._counts:
            self.is_free = True
            self.flat.untyped_storage().resize_(0)

    def allocate(self) -> Tensor:
        """Allocate the memory again, and return the flat gradient."""
        self.is_free = False
        self.flat.untyped_storage().resize_(self._nbytes)
        return self.flat


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function of C that picks these items."""
    if len(indices) == 1:
        return operator.itemgetter(slice(indices[0], indices[0] + 1))
    return operator.itemgetter(*indices) if indices else tuple


def copy_slice(flat: Tensor | None, size: int, part: Slice, out: Tensor) -> None:
    """Copy and cast the same slice of all ranks' chunks of a gradient to `out`. Padding and a missing gradient become zeros.

    Args:
        flat: the flattened gradient, or None.
        size: elements of a chunk.
        part: the slice of each chunk.
        out: (ranks, part.size).
    """
    if flat is None:
        out.zero_()
        return
    whole = flat.numel() // size  # ranks whose chunk has no padding
    if whole:
        out[:whole].copy_(flat[: whole * size].view(whole, size)[:, part.start : part.start + part.size])
    if whole < len(out):
        out[whole:].zero_()
        rest = flat[whole * size + part.start : (whole + 1) * size][: part.size]
        out[whole, : rest.numel()].copy_(rest)


def _copy_packed(plan: ReductionPlan, grads: Sequence[Tensor | None], message: Tensor) -> None:
    """Copy and cast the packed gradients into their input, (ranks, numel), where they are no plain tensors of one dtype."""
    present = [grads[segment.parameter] for segment in plan.packed if segment.parameter >= 0]
    dtypes = {grad.dtype for grad in present if grad is not None} or {plan.computed}
    # chunk_cat needs one dtype, but some kernels return the gradients of norms in float32. Casting all gradients first would
    # take memory for a second copy, so they are copied and cast one by one.
    if len(dtypes) > 1:
        return _copy_one_by_one(plan, grads, message)
    (dtype,), ranks, parts, gaps = dtypes, plan.layout.ranks, list[Tensor](), iter(plan.gaps)
    for segment in plan.packed:
        if segment.parameter < 0:
            parts.append(next(gaps).to(dtype))
            continue
        grad, place = grads[segment.parameter], plan.layout.offsets[segment.parameter]
        if grad is None:
            shape = (ranks, segment.size) if segment.parameter in plan.blocks else place.shape
            parts.append(torch.zeros(shape, dtype=dtype, device=message.device))
        elif segment.parameter in plan.blocks:  # chunk_cat would chunk it otherwise
            parts.append(torch.empty(ranks, segment.size, dtype=dtype, device=message.device))
            _copy_blocks(grad, place, parts[-1])
        else:
            parts.append(grad.contiguous())
    _torch.chunk_cat(parts, message)


def _copy_one_by_one(plan: ReductionPlan, grads: Sequence[Tensor | None], message: Tensor) -> None:
    """Copy and cast gradients of several dtypes into the packed input (ranks, numel), one after the other."""
    column = 0
    for segment in plan.packed:
        out = message[:, column : column + segment.size]
        column += segment.size
        grad = grads[segment.parameter] if segment.parameter >= 0 else None
        if grad is None:  # of this rank, or a gap
            out.zero_()
        else:
            _copy_blocks(grad, plan.layout.offsets[segment.parameter], out)


def _copy_blocks(grad: Tensor, place: ParamOffsets, out: Tensor) -> None:
    """Copy and cast a gradient to its packed input `out`, (ranks, place.size), with zeros as padding."""
    if place.dim == 0:
        copy_slice(grad.contiguous().view(-1), place.size, Slice(-1, 0, place.size), out)
    else:
        out.zero_()
        grad_parts, block_parts = dim_permutation(grad, out, place)
        if block_parts:  # none in the second of two hops, on a rank without rows
            torch._foreach_copy_(block_parts, grad_parts)


def pack(
    plan: ReductionPlan,
    grads: Sequence[Tensor | None],
    total: Tensor,
    memory: Allocate,
    *,
    factor: float,
    in_place: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Copy and cast the gradients that are not sliced into reduce-scatter inputs.

    Args:
        plan: layout of the inputs.
        grads: unsharded gradient of each parameter, or None.
        total: the reduce-scatter output, (shard_numel,).
        memory: allocates the packed input.
        factor: scales the inputs.
        in_place: True to pack into the output, in a group of one rank that needs no collective.

    Returns:
        (input (ranks * size,), its output (size,), a part of `total`) of each tensor that is reduced.
    """
    layout, device = plan.layout, total.device
    messages: list[tuple[Tensor, Tensor]] = []
    if plan.numel:
        numel = layout.ranks * plan.numel
        # in place, the packed gradients are the sum already
        message = total[:numel] if in_place else memory((numel,), dtype=total.dtype, device=device)
        rows = message.view(layout.ranks, -1)
        picked = [] if plan.pick is None else plan.pick([*grads, *plan.gaps])
        dtypes = {*map(getattr, picked, repeat("dtype"), repeat(None))}  # None if a gradient is missing
        if len(dtypes) == 1 and None not in dtypes:
            _torch.chunk_cat(picked, rows)
        else:
            _copy_packed(plan, grads, rows)
        if factor != 1.0:
            message.mul_(factor)
        messages.append((message, total if plan.numel == layout.shard_numel else total[: plan.numel]))
    for index in plan.direct:
        place, grad = layout.offsets[index], grads[index]
        if grad is None:
            full = torch.zeros(place.shape, dtype=total.dtype, device=device)
        else:
            full = grad.contiguous() if grad.dtype == total.dtype else grad.to(total.dtype).contiguous()
            full = full if factor == 1.0 else full * factor
        messages.append((full.view(-1), total[place.offset : place.offset + place.size]))
    return messages
