"""Reduction of the gradients of one group: copy-in, reduce-scatter over shards, reduction over replicas, gradient dtype."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, log2, prod
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Allocate, Collectives, StartedWork
from fullshard.comm.streams import Work
from fullshard.core.grad_commit import GradCommit
from fullshard.core.group_grads import ReductionPlan
from fullshard.core.layout import ParamOffsets, Slice
from fullshard.core.param_group import ParamGroup
from fullshard.core.unsharded_buffer import dim_permutation
from fullshard.errors import InternalError

ReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """The caller's options for reductions."""

    divide: float | None = None  # factor to divide the gradients by; None for the number of ranks, shards times replicas
    # True if `divide` is for a custom reduce-scatter that averages. Scalars, which it never sees, are divided as usual.
    custom_averages: bool = False
    force_sum: bool = False  # scale after the reduction, so that no backend averages
    all_reduce: bool = True  # False: defer the reduction over replicas to a later backward
    # All-reduce hook, called with this rank's reduced shard after the last collective, before the division that is left for
    # then and the cast to the grad dtype. It also runs without replicas.
    hook: ReduceHook | None = None
    hook_stream: Any = None  # stream that the hook runs on


@dataclass(frozen=True, slots=True)
class ReductionFactors:
    """Factors by which one reduction scales the gradients, and the steps after the reduction over shards."""

    first: float  # applied to the inputs of the reduction over shards
    scale: float  # applied to its result
    last: float  # applied to the result of all collectives
    replicas: Collectives | None  # for the reduction over replicas; None if this reduction has none
    deferred: bool  # whether the reduction over replicas is left to a later one
    has_second_step: bool  # on the all-reduce stream: the reduction over replicas, or the hook
    hook: Callable[[Tensor], None] | None  # the caller's all-reduce hook

    @classmethod
    def of(cls, group: ParamGroup, options: ReduceOptions, *, defer: bool) -> ReductionFactors:
        """Return the factors for gradients of `group`. `defer`: leave the reduction over replicas to a later one.

        float16 may overflow if it is divided only after the reduction, and underflow if it is divided only before. So it is
        divided in two steps, by about the square root each, as in FSDP2. The first divisor is a power of two, so that no
        bits of the mantissa are lost.
        """
        replicas = group.collectives.replicate
        divide = None if options.custom_averages and group.is_replicated else options.divide
        divide = divide or float(group.layout.ranks * (replicas.ranks if replicas else 1))
        half = group.dtypes.reduce is torch.float16
        before = 2.0 ** ceil(log2(divide) / 2) if half and divide > 1 else 1.0
        deferred = replicas is not None and defer
        hook = options.hook
        if hook is not None and options.hook_stream is not None:
            hook = partial(_torch.on_stream, options.hook_stream, hook)
        return cls(
            first=1.0 / before,
            scale=1.0 if half or options.force_sum else 1.0 / divide,
            last=before / divide if half or options.force_sum else 1.0,
            replicas=None if deferred else replicas,
            deferred=deferred,
            has_second_step=not deferred and (replicas is not None or hook is not None),
            hook=hook,
        )


class Stage(str, enum.Enum):
    """Stage of a reduction. On an accelerator the stage is that of the queued work, which the device may not have run yet."""

    PACKED = "packed"
    SUMMED = "summed over shards"
    ABSORBED = "part of a later sum"
    REDUCED = "reduced"
    COMMITTED = "committed"


MOVES = {
    (Stage.PACKED, Stage.SUMMED): "the reduce-scatter has completed",
    (Stage.SUMMED, Stage.REDUCED): "the reduction over replicas and the caller's hook have completed, if there are any",
    (Stage.SUMMED, Stage.ABSORBED): "the reduction over replicas was deferred, and a later one adds this sum to its own",
    (Stage.REDUCED, Stage.COMMITTED): "the backward ends, or hooks on parameters need the gradients now",
    (
        Stage.COMMITTED,
        Stage.COMMITTED,
    ): "another rank used a parameter that this rank did not use",
}


class Reduction:
    """One reduction of the gradients of a group.

    On the compute stream, when it is created:

        direct: large, even, in the reduce dtype  -----------------------> reduce-scatter input of its own, no copy
        packed: all others                        --(chunk, pad, cast)---> one reduce-scatter input (ranks, numel)

    On the reduce-scatter stream, in `start`:

        sliced: large, uneven or cast             --(slice by slice)-----> reduce-scatters through one buffer

    There are slices only if collectives run in order on their stream, else these gradients are packed. With a factor before the
    reduction (float16), direct gradients are copied as well, since a hook in the graph may have kept them.

        PACKED     the gradients are copied, or will be in `start`
        SUMMED     after the reduction over shards
        ABSORBED   part of a later reduction's sum, since its reduction over replicas was deferred: the end
        REDUCED    after the reduction over replicas and the caller's hook; cast to the grad dtype, copied to host memory
        COMMITTED  a commit was made of the gradients, which sets `.grad`

    If the flat shard is divided over the replicas as well (`ParamGroup.two_hops`), a reduce-scatter takes the place of the
    all-reduce over replicas. Every parameter takes part, with zeros if this rank has no gradient.

    Attributes:
        group: the parameter group.
        factors: scale factors, and the steps after the reduce-scatter.
        stage: the stage; only the moves in MOVES are legal.
        has_hooks: whether parameters had user hooks when the reduction started. They run when the gradients are committed.
        used: for each parameter, whether this rank has a gradient, of this backward or in the deferred sum that is added.
    """

    def __init__(
        self,
        group: ParamGroup,
        grads: Sequence[Tensor | None],
        options: ReduceOptions,
        *,
        defer: bool = False,
    ) -> None:
        """Allocate the output, and copy packed and direct gradients into reduce-scatter inputs, on the compute stream.

        Args:
            group: the parameter group.
            grads: unsharded gradient of each parameter, (sharding.local_shape); None if this rank did not use the parameter.
            options: the caller's options.
            defer: leave the reduction over replicas to a later reduction of the group.
        """
        self.group, self.factors = group, ReductionFactors.of(group, options, defer=defer)
        self.stage = Stage.PACKED
        self.has_hooks = group.has_hooks
        self.used: list[bool] = []
        # For each parameter, whether `prepare_commit` has returned its gradient; None before the first commit.
        self._committed: list[bool] | None = None
        # The last work of this reduction: the all-reduce over replicas, else the reduce-scatter.
        self._work: Work | None = None
        dtypes, layout, device = group.dtypes, group.layout, group.storage.device
        for grad in grads:
            self.used.append(grad is not None)
        # An earlier reduction whose all-reduce over replicas was deferred; its sum is added to this one.
        self._earlier = group.grads.deferred
        if self._earlier is not None:
            self.used = [now or then for now, then in zip(self.used, self._earlier.used)]
        message = group.collectives.reduce.reduce_memory or torch.empty  # of custom collectives, such as symmetric memory
        # (input, output) pairs of the second of two hops.
        self._scattered: list[tuple[Tensor, Tensor]] = []
        # The reduce-scatter output, (layout.shard_numel,).
        self._reduced_shard = message((layout.shard_numel,), dtype=dtypes.reduce, device=device)
        # (reduce-scatter input, output) pairs of the packed and direct gradients; `_start_slices` makes those of slices.
        self._inputs = _pack(
            group.reduction,
            grads,
            self._reduced_shard,
            message,
            factor=self.factors.first,
            in_place=group.layout.ranks == 1 and group.collectives.reduce.in_place,
        )
        # Flattened gradients that are sliced, by index of the parameter.
        self._flat_grads = _flat_gradients(group, grads) if group.reduction.slices else {}
        # The sum over all ranks, (shard_layout.shard_numel,): the reduce-scatter output or, in two hops, that of the second.
        numel = group.shard_layout.shard_numel
        self._sum = self._reduced_shard
        if group.scatter is not None and not self.factors.deferred:
            self._sum = torch.empty(numel, dtype=dtypes.reduce, device=device)
        # The flat gradient, (shard_layout.shard_numel,) in the grad dtype: the memory of `.grad`. It is the sum itself, unless
        # that has another dtype or memory that the next reduction overwrites.
        self._flat = self._sum
        grad_dtype = group.reduction.dtype
        # `.grad` must not use memory of a custom reduce-scatter, which the next reduction overwrites.
        overwritten = message is not torch.empty and group.scatter is None
        if (grad_dtype != dtypes.reduce or overwritten) and not self.factors.deferred:
            self._flat = torch.empty(numel, dtype=grad_dtype, device=device)
        # With CPU offload, the flat gradient in host memory. Pinned, so that the copy does not block the host.
        self._host: Tensor | None = None
        if group.storage.host and not self.factors.deferred:
            self._host = torch.empty(numel, dtype=grad_dtype, device="cpu", pin_memory=group.storage.pinned)

    def _move(self, to: Stage) -> None:
        if (self.stage, to) not in MOVES:
            name = self.group.parameters[0].unit_name.name
            raise InternalError(f"A reduction of unit '{name}' cannot become {to.value}: it is {self.stage.value}.")
        self.stage = to

    @property
    def committed(self) -> bool:
        """True once a commit was made of it, which sets `.grad`."""
        return self.stage is Stage.COMMITTED

    # --- on the streams of the collectives ---

    def start(self) -> StartedWork:
        """Start the reduce-scatter over shards."""
        if self._flat_grads:
            return self._start_slices()
        if not self._inputs:
            return StartedWork()
        inputs, outputs = zip(*self._inputs)
        return self.group.collectives.reduce.reduce_scatter(outputs, inputs, self.factors.scale)

    def _start_slices(self) -> StartedWork:
        """Start one reduce-scatter after the other for the slices. The first one includes the packed and direct gradients."""
        group, plan, messages = self.group, self.group.reduction, self._inputs
        ranks, collectives = group.layout.ranks, group.collectives.reduce
        most = max(ranks * sum(part.size for part in parts) for parts in plan.slices)
        buffer = torch.empty(most, dtype=self._reduced_shard.dtype, device=self._reduced_shard.device)
        started = StartedWork()
        for parts in plan.slices:
            _complete(started)  # the previous collective reads the buffer that the next copy writes
            at = 0
            for part in parts:
                place = group.layout.offsets[part.parameter]
                full = buffer[at : at + ranks * part.size]
                _copy_slice(self._flat_grads[part.parameter], place.size, part, full.view(ranks, part.size))
                if self.factors.first != 1.0:
                    full.mul_(self.factors.first)
                messages = [*messages, (full, self._reduced_shard[place.offset + part.start :][: part.size])]
                at += full.numel()
            inputs, outputs = zip(*messages)
            started, messages = collectives.reduce_scatter(outputs, inputs, self.factors.scale), []
        return started

    def finish(self) -> None:
        """Finish the reduction over shards, on its stream: add a deferred sum, and cast if no further step follows."""
        self._move(Stage.SUMMED)
        if self._earlier is not None:
            self._earlier.add_to(self._reduced_shard)
        if not (self.factors.has_second_step or self.factors.deferred):
            self._cast_and_offload()

    @property
    def total(self) -> Tensor:
        """The reduce-scatter output, (shard_numel,)."""
        return self._reduced_shard

    def add_to(self, total: Tensor) -> None:
        """Add this sum to the output of a later reduction."""
        # Both run on the reduce-scatter stream, in order (on the CPU, they are waited for in order), so this sum is complete.
        self._move(Stage.ABSORBED)
        total.add_(self._reduced_shard)

    def replicate(self) -> StartedWork:
        """Start the reduction over replicas: an all-reduce or, in two hops, a reduce-scatter."""
        if self.factors.replicas is None or not self._reduced_shard.numel():
            return StartedWork()
        if self.group.scatter is None:
            return self.factors.replicas.all_reduce(self._reduced_shard)
        # The sum over shards has the layout of the unsharded buffer of the hop over replicas.
        places = self.group.shard_layout.offsets
        parts: list[Tensor | None] = [
            self._reduced_shard[place.unsharded_offset :][: prod(place.shape)].view(place.shape) for place in places
        ]
        # kept until the end of the collective
        self._scattered = _pack(self.group.scatter, parts, self._sum, torch.empty, factor=1.0, in_place=False)
        inputs, outputs = zip(*self._scattered)
        return self.factors.replicas.reduce_scatter(outputs, inputs, 1.0)

    def finish_replicated(self) -> None:
        """Run the caller's hook after the reduction over replicas, then scale and cast."""
        self._scattered = []
        if self.factors.hook is not None:
            self.factors.hook(self._sum)
        self._cast_and_offload()

    def _cast_and_offload(self) -> None:
        """Scale the sum, cast it to the grad dtype, and with CPU offload copy it to host memory."""
        self._move(Stage.REDUCED)
        if self.factors.last != 1.0:
            self._sum.mul_(self.factors.last)
        if self._flat is not self._sum:
            self._flat.copy_(self._sum)
        if self._host is not None:
            if self._host.numel():
                self.group.collectives.traffic.record("to_host", [self._flat])
            self._host.copy_(self._flat, non_blocking=True)

    # --- on the compute stream ---

    def note_started(self, work: Work) -> None:
        """Record `work`, the last work of this reduction. If replicas are deferred, the next reduction adds this one."""
        self._work = work
        self.group.grads.deferred = self if self.factors.deferred else None

    def release_inputs(self) -> None:
        """Release the reduce-scatter inputs. Call this after the compute stream waited for the reduce-scatter."""
        # Released before that wait, their memory could be reused on the compute stream while the collective still reads it.
        self._inputs, self._flat_grads, self._earlier = [], {}, None
        if not self.factors.has_second_step:
            self.release_reduced_shard()

    def release_reduced_shard(self) -> None:
        """Release the outputs of the collectives that `.grad` does not use, once the compute stream waited for the last one."""
        # By dropping the references. If that over replicas is deferred, `_flat` is the sum, so the sum stays.
        self._reduced_shard = self._sum = self._flat

    def wait_for_gradient(self, *, collectives_on_host: bool) -> None:
        """Wait until the flat gradient is on the device of the shards.

        Args:
            collectives_on_host: whether collectives run on the host. Then one wait is enough; on an accelerator the current
                stream may be another one than in an earlier wait, so it must wait as well.
        """
        assert self._work is not None
        if not collectives_on_host or self.stage in (Stage.PACKED, Stage.SUMMED):
            self._work.wait()
        if self._host is not None:
            self._work.block()  # an event orders streams only; the optimizer on the CPU reads the memory from the host
            self._flat = self._host

    # --- commit ---

    def prepare_commit(self, used_somewhere: Sequence[bool] | None = None) -> GradCommit | None:
        """Run the hooks on gradients that were not committed before, and return their commit; None if all were committed.

        Args:
            used_somewhere: for each parameter, whether any rank used it; None if this is unknown. Parameters that only other
                ranks used get a gradient, too, so that all ranks agree on which parameters have one.
        """
        given, due = self._committed, self.used
        if used_somewhere is not None and not all(due):
            parameters = self.group.parameters
            due = [here or (there and p.requires_grad) for here, there, p in zip(due, used_somewhere, parameters)]
        wanted = due if given is None else [now and not then for now, then in zip(due, given)]
        if given is not None and not any(wanted):
            return None
        self._move(Stage.COMMITTED)
        self._committed = due
        return GradCommit(self.group, self._flat, wanted, has_hooks=self.has_hooks)

    @property
    def asks_others(self) -> bool:
        """True if a trainable parameter without `.grad` was not used here: it gets one only if another rank used it."""
        if all(self.used):
            return False
        parameters = zip(self.used, self.group.parameters)
        return any(not used and p.requires_grad and p.sharded.grad is None for used, p in parameters)


def _flat_gradients(group: ParamGroup, grads: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
    """Return the flattened gradients of the sliced parameters, by index; None for a missing gradient."""
    indices = {part.parameter for message in group.reduction.slices for part in message}
    found = ((index, grads[index]) for index in sorted(indices))
    return {index: None if grad is None else grad.contiguous().view(-1) for index, grad in found}


def _complete(started: StartedWork) -> None:
    """Order the current stream after a collective, and complete it."""
    for work in started.works:
        work.wait()
    if started.then is not None:
        started.then()


def _copy_slice(flat: Tensor | None, size: int, part: Slice, out: Tensor) -> None:
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


def _packed_dtype(plan: ReductionPlan, grads: Sequence[Tensor | None]) -> torch.dtype | None:
    """Return the dtype of the packed gradients, or None if they have several dtypes."""
    packed = [grads[segment.parameter] for segment in plan.packed if segment.parameter >= 0]
    found = {grad.dtype for grad in packed if grad is not None}
    if len(found) > 1:
        return None
    return found.pop() if found else plan.computed


def _pack_one_by_one(plan: ReductionPlan, grads: Sequence[Tensor | None], message: Tensor) -> None:
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
        _copy_slice(grad.contiguous().view(-1), place.size, Slice(-1, 0, place.size), out)
    else:
        out.zero_()
        grad_parts, block_parts = dim_permutation(grad, out, place)
        if block_parts:  # none in the second of two hops, on a rank without rows
            torch._foreach_copy_(block_parts, grad_parts)


def _pack(
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
        found = {grad.dtype for grad in grads if grad is not None}
        dtype = found.pop() if len(found) == 1 else _packed_dtype(plan, grads)
        # chunk_cat needs one dtype, but some kernels return the gradients of norms in float32. Casting all gradients first
        # would take memory for a second copy, so they are copied and cast one by one.
        if dtype is None:
            _pack_one_by_one(plan, grads, message.view(layout.ranks, -1))
        parts: list[Tensor] = []
        for segment in plan.packed if dtype is not None else ():
            if segment.parameter < 0:
                parts.append(plan.zeros[segment.size].to(dtype))
                continue
            grad, place = grads[segment.parameter], layout.offsets[segment.parameter]
            assert dtype is not None  # the loop has no segments otherwise
            if grad is None:
                shape = (layout.ranks, segment.size) if segment.parameter in plan.blocks else place.shape
                parts.append(torch.zeros(shape, dtype=dtype, device=device))
            elif segment.parameter in plan.blocks:  # chunk_cat would chunk it otherwise
                parts.append(torch.empty(layout.ranks, segment.size, dtype=dtype, device=device))
                _copy_blocks(grad, place, parts[-1])
            else:
                parts.append(grad.contiguous())
        if parts:
            _torch.chunk_cat(parts, message.view(layout.ranks, -1))
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
