"""Reduction of the gradients of one group: copy-in, reduce-scatter, reduction over replicas, cast, and commit to `.grad`."""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Allocate, Collectives, Started, StartedWork
from fullshard.comm.streams import Work
from fullshard.core.layout import ParamOffsets, Slice
from fullshard.core.packing import ReductionPlan
from fullshard.core.param_group import GradientParts, ParamGroup
from fullshard.core.sharded_param import ShardedParameter
from fullshard.core.unit_options import ReduceOptions
from fullshard.core.unsharded_buffer import dim_permutation
from fullshard.errors import InternalError

_grad: Callable[[Any], Any] = operator.attrgetter("grad")
_local: Callable[[Any], Tensor] = operator.attrgetter("local")
_spec: Callable[[Any], Any] = operator.attrgetter("spec")


@dataclass(frozen=True, slots=True)
class ReductionFactors:
    """Factors by which one reduction scales the gradients, and the steps after the reduction over shards."""

    first: float  # applied to the inputs of the reduction over shards
    scale: float  # applied to its result
    last: float  # applied to the result of all collectives
    replicas: Collectives | None  # for the reduction over replicas; None if this reduction has none
    deferred: bool  # whether the second step (next line) is left to a later reduction
    has_second_step: bool  # on the all-reduce stream: the reduction over replicas, or the hook
    hook: Callable[[Tensor], None] | None  # the caller's all-reduce hook
    # The reduce-scatter, if the backend prepared it for `scale`.
    prepared: Callable[[Sequence[Tensor], Sequence[Tensor]], Started] | None

    @classmethod
    def of(cls, group: ParamGroup, options: ReduceOptions, *, defer: bool) -> ReductionFactors:
        """Return the factors for gradients of `group`. `defer`: leave the second step to a later reduction.

        float16 may overflow if it is divided only after the reduction, and underflow if it is divided only before. So it is
        divided before and after, by about the square root of the divisor each. The first divisor is a power of two, so numbers
        that stay normal lose no bits. FSDP2's may be a smaller power, so results may differ by a rounding.
        """
        replicas = group.collectives.replicate
        divide = None if options.custom_averages and group.is_replicated else options.divide
        divide = divide or float(group.layout.ranks * (replicas.ranks if replicas else 1))
        half = group.dtypes.reduce is torch.float16
        before = 2.0 ** ceil(log2(divide) / 2) if half and divide > 1 else 1.0
        hook = options.hook
        deferred = defer and (replicas is not None or hook is not None)
        if hook is not None and options.hook_stream is not None:
            hook = partial(_torch.on_stream, options.hook_stream, hook)
        scale = 1.0 if half or options.force_sum else 1.0 / divide
        prepare = getattr(group.collectives.reduce.inner, "reducer", None)
        return cls(
            first=1.0 / before,
            scale=scale,
            last=before / divide if half or options.force_sum else 1.0,
            replicas=None if deferred else replicas,
            deferred=deferred,
            has_second_step=not deferred and (replicas is not None or hook is not None),
            hook=hook,
            prepared=None if prepare is None else prepare(scale),
        )


class Reduction:
    """One reduction of the gradients of a group. Every parameter takes part, with zeros if this rank has no gradient.

    On the compute stream, when it is created:

        direct: large, even, in the reduce dtype  -----------------------> reduce-scatter input of its own, no copy
        packed: all others                        --(chunk, pad, cast)---> one reduce-scatter input (ranks, numel)

    On the reduce-scatter stream, in `start`:

        sliced: large, uneven or cast             --(slice by slice)-----> reduce-scatters through one buffer

    There are slices only if collectives run in order on their stream, else these gradients are packed. With a factor before the
    reduction (float16), direct gradients are copied as well, since a hook in the graph may have kept them.

    `finish` and `finish_replicated` end the collectives: they add a sum whose second step was deferred, call the caller's
    hook, cast to the grad dtype, and copy to host memory. A commit sets `.grad`.

    Attributes:
        is_partial: whether some parameters are not `used`.
        reduced: whether the last collective has ended (accelerator: is queued). Stays False if the second step is deferred.
        ready: whether `.grad` can be set without a wait on the host; never with CPU offload.
        committed: whether its commit, which sets `.grad`, is decided or done.
        has_hooks: whether parameters had user hooks when the reduction started. They run when the gradients are committed.
        used: per parameter, whether this rank has a gradient, now or in the deferred sum; with `factors.hook`, all trainable.
    """

    def __init__(
        self, group: ParamGroup, grads: Sequence[Tensor | None], options: ReduceOptions, *, defer: bool = False
    ) -> None:
        """Allocate the output, and make the reduce-scatter inputs of packed and direct gradients, on the compute stream.

        `grads`: unsharded gradient of each parameter, (sharding.local_shape); None if this rank did not use it. With `defer`
        the second step (`ReductionFactors`) is left to a later reduction of the group.
        """
        self.group = group
        known = group.factors  # of the last reduction, which had the same options, most likely
        if known is None or known[0] is not options or known[1] is not defer:
            known = group.factors = options, defer, ReductionFactors.of(group, options, defer=defer)
        self.factors: ReductionFactors = known[2]
        self.reduced = self.ready = self.committed = False
        if group.must_look:
            group.look()
        self.has_hooks = group.has_hooks
        # For each parameter, whether a `prepare_commit` included its gradient; None before the first one.
        self._included: list[bool] | None = None
        # Only if a parameter has hooks or gets no gradient (else None): the gradients to commit, as the hooks returned them,
        # with None for a parameter that gets none. They do not become `group.parts`.
        self._gradients: list[Any] | None = None
        self._work: Work | None = None  # the last one: of the second step if there is one, else the reduce-scatter
        dtypes, layout, device = group.dtypes, group.layout, group.storage.device
        self.used = [*map(operator.is_not, grads, repeat(None))]
        # `GroupGradients.deferred`, of an earlier reduction: this one includes its sum.
        self._earlier = group.grads.deferred
        if self.factors.hook is not None:  # replicas that only the hook knows may have used what no rank here used
            self.used = [now or one.requires_grad for now, one in zip(self.used, group.parameters)]
        if self._earlier is not None:
            self.used = [now or then for now, then in zip(self.used, self._earlier[1])]
        self.is_partial = not all(self.used)
        custom = group.collectives.reduce.reduce_memory  # such as symmetric memory
        self._parts: GradientParts | None = None  # of an earlier step, to be used again
        if group.parts is not None and group.parts.is_free and group.reduces_in_place and not self.factors.deferred:
            self._parts, group.parts = group.parts, None
        # The reduce-scatter output, (layout.shard_numel,).
        if self._parts is not None:
            self.reduced_shard = self._parts.allocate()
        elif custom is None:
            self.reduced_shard = torch.empty(layout.shard_numel, dtype=dtypes.reduce, device=device)
        else:
            self.reduced_shard = custom((layout.shard_numel,), dtype=dtypes.reduce, device=device)
        # (reduce-scatter input, output) pairs of the packed and direct gradients; `_start_slices` makes those of slices.
        self._inputs = pack(
            group.reduction,
            grads,
            self.reduced_shard,
            custom,
            factor=self.factors.first,
            in_place=group.layout.ranks == 1 and group.collectives.reduce.in_place,
        )
        # Flattened gradients that are sliced, by index of the parameter.
        self._flat_grads = _flat_gradients(group, grads) if group.reduction.slices else {}
        # The result of the last collective. Only HFSDP's reduce-scatter over replicas has an output other than `reduced_shard`.
        numel = group.shard_layout.shard_numel
        self._sum = self.reduced_shard if self.factors.replicas is None else group.new_sum(self.reduced_shard)
        # The flat gradient, (shard_layout.shard_numel,) in the grad dtype: the memory of `.grad`. It is the sum itself, unless
        # that has another dtype or memory that the next reduction overwrites.
        self._flat = self._sum
        grad_dtype = group.reduction.dtype
        overwritten = custom is not None and self._sum is self.reduced_shard
        if (grad_dtype != dtypes.reduce or overwritten) and not self.factors.deferred:
            self._flat = torch.empty(numel, dtype=grad_dtype, device=device)
        # With CPU offload, the flat gradient in host memory. If it is pinned, the copy does not block the host.
        self._host: Tensor | None = None
        if group.storage.host and not self.factors.deferred:
            home, pinned = group.storage.home, group.storage.pinned
            self._host = torch.empty(numel, dtype=grad_dtype, device=home, pin_memory=pinned)

    # --- on the streams of the collectives ---

    def start(self) -> Started:
        """Start the reduce-scatter over shards."""
        if self._flat_grads:
            return self._start_slices()
        if not self._inputs:
            return StartedWork()
        inputs, outputs = zip(*self._inputs)
        collectives, is_observed = self.group.collectives, self.group.collectives.traffic.listeners or _torch.profiling()
        if self.factors.prepared is not None and not is_observed:
            return self.factors.prepared(outputs, inputs)
        reduce = collectives.reduce if is_observed else collectives.reduce.inner
        return reduce.reduce_scatter(outputs, inputs, self.factors.scale)

    def _start_slices(self) -> Started:
        """Start one reduce-scatter after the other for the slices. The first one includes the packed and direct gradients."""
        group, plan, messages = self.group, self.group.reduction, self._inputs
        ranks, collectives = group.layout.ranks, group.collectives.reduce
        most = max(ranks * sum(part.size for part in parts) for parts in plan.slices)
        buffer = torch.empty(most, dtype=self.reduced_shard.dtype, device=self.reduced_shard.device)
        started: Started = None
        for parts in plan.slices:
            if started is not None:
                started.wait()  # the previous collective reads the buffer that the next copy writes
            at = 0
            for part in parts:
                place = group.layout.offsets[part.parameter]
                full = buffer[at : at + ranks * part.size]
                copy_slice(self._flat_grads[part.parameter], place.size, part, full.view(ranks, part.size))
                if self.factors.first != 1.0:
                    full.mul_(self.factors.first)
                messages = [*messages, (full, self.reduced_shard[place.offset + part.start :][: part.size])]
                at += full.numel()
            inputs, outputs = zip(*messages)
            started, messages = collectives.reduce_scatter(outputs, inputs, self.factors.scale), []
        return started

    def finish(self) -> None:
        """Finish the reduction over shards, on its stream: add a deferred sum, and cast if no further step follows."""
        if self._earlier is not None:
            if self.reduced_shard.device.type == "cpu":  # else the earlier one came first on this stream
                self._earlier[2].wait()
            self.reduced_shard.add_(self._earlier[0])
        if self.factors.has_second_step or self.factors.deferred:
            return
        if self._flat is self._sum and self._host is None and self.factors.last == 1.0:
            self.reduced = self.ready = True
        else:
            self._cast_and_offload()

    def replicate(self) -> Started:
        """Start the reduction over replicas."""
        if self.factors.replicas is None or not self.reduced_shard.numel():
            return StartedWork()
        return self.group.replicate(self.factors.replicas, self.reduced_shard, self._sum)

    def finish_replicated(self) -> None:
        """Run the caller's hook after the reduction over replicas, then scale and cast."""
        if self.factors.hook is not None:
            self.factors.hook(self._sum)
        self._cast_and_offload()

    def _cast_and_offload(self) -> None:
        """Scale the sum, cast it to the grad dtype, and with CPU offload copy it to host memory."""
        self.reduced, self.ready = True, self._host is None
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
        """Record `work`, the last work of this reduction. If the second step is deferred, the next reduction adds this one."""
        self._work = work
        self.group.grads.deferred = (self.reduced_shard, self.used, work) if self.factors.deferred else None

    def release_inputs(self) -> None:
        """Release the reduce-scatter inputs. Call this after the compute stream waited for the reduce-scatter."""
        # Released before that wait, their memory could be reused on the compute stream while the collective still reads it.
        self._inputs, self._flat_grads, self._earlier = [], {}, None
        if not self.factors.has_second_step:
            self.reduced_shard = self._sum = self._flat  # if the second step is deferred, `_flat` is the sum, which stays

    def release_reduced_shard(self) -> None:
        """Release the outputs of the collectives that `.grad` does not use, once the compute stream waited for the last one."""
        self.reduced_shard = self._sum = self._flat

    def wait_for_gradient(self, *, collectives_on_host: bool) -> None:
        """Wait until the flat gradient is on the device of the shards.

        With `collectives_on_host`, a reduction that is `reduced` has waited already. Else each call makes the stream wait.
        """
        assert self._work is not None
        if not collectives_on_host or not self.reduced:
            self._work.wait()
        if not self.reduced:
            name = self.group.parameters[0].unit_name.name
            raise InternalError(f"Gradients of unit '{name}' are set before they are reduced.")
        if self._host is not None:
            self._work.block()  # an event orders streams only; the optimizer on the CPU reads the memory from the host
            self._flat = self._host
            self.release_reduced_shard()  # frees the copy on the device

    # --- commit ---

    def prepare_commit(self, used_somewhere: Sequence[bool] | None = None) -> bool:
        """Run the hooks (`register_hook`) on gradients that were not committed before. Return False if all were committed.

        `used_somewhere`: for each parameter, whether any rank used it; None if unknown. Those that only other ranks used get a
        gradient, too, so that all ranks agree on which parameters have one.
        """
        given, due = self._included, self.used
        if used_somewhere is not None and not all(due):
            parameters = self.group.parameters
            due = [here or (there and p.requires_grad) for here, there, p in zip(due, used_somewhere, parameters)]
        wanted = due if given is None else [now and not then for now, then in zip(due, given)]
        if given is not None and not any(wanted):
            return False
        self._included, self._gradients, self.committed = due, None, True
        if self.has_hooks or not all(wanted):
            parts = zip(self.group.parameters, self.group.reduction.views, wanted)
            self._gradients = [_hooked(p, self._flat.as_strided(*view)) if is_due else None for p, view, is_due in parts]
        return True

    def commit(self) -> None:
        """Set `.grad` of the parameters to parts of the flat gradient, or add to the existing gradients."""
        group, flat = self.group, self._flat
        gradients = self._gradients
        if gradients is None and not any(map(operator.is_not, map(_grad, group.sharded), repeat(None))):
            parts = self._parts
            if parts is None or parts.flat is not flat:
                parts = self._make_parts()
            deque(map(setattr, group.sharded, repeat("grad"), parts.grads), maxlen=0)
            group.parts = parts
            return
        if gradients is None:
            total = flat_gradient(group)
            if total is not None:  # all gradients are parts of it, so one addition is enough for the whole group
                total.add_(flat)
                return
            group.parts = None  # the gradients that exist are not parts of one flat gradient
            views = zip(group.parameters, group.reduction.views)
            gradients = [parameter.dtensor_like_shard(flat.as_strided(*view)) for parameter, view in views]
        for parameter, gradient in zip(group.parameters, gradients):
            grad = parameter.sharded.grad
            if grad is not None and gradient is not None:
                _torch.local_part(grad).add_(_torch.local_part(gradient))
            elif gradient is not None:
                parameter.sharded.grad = gradient

    def _make_parts(self) -> GradientParts:
        """Return the parts of the flat gradient as DTensors."""
        group, flat, plan = self.group, self._flat, self.group.reduction
        origins: Iterable[Tensor | None] = map(_local, group.parameters)
        specs: Iterable[Any] = map(_spec, group.parameters)
        if flat.dtype != group.dtypes.storage:
            origins, specs = repeat(None), [p.sharding.spec(flat.dtype) for p in group.parameters]
        return GradientParts(flat, _torch.parts_of(flat, plan.views, origins, specs))

    def discard_gradients(self) -> str:
        """Set `.grad` of all parameters of the group to None, and return the name of their unit."""
        for parameter in self.group.parameters:
            parameter.sharded.grad = None
        return self.group.parameters[0].unit_name.name

    def run_post_grad_hooks(self) -> None:
        """Call the post-accumulate-grad hooks of the parameters that got a gradient."""
        for parameter, gradient in zip(self.group.parameters, self._gradients or ()):
            if gradient is not None:
                for hook in _torch.parameter_hooks(parameter.sharded)[1]:
                    hook(parameter.sharded)

    @property
    def undecided(self) -> ShardedParameter | None:
        """The first trainable parameter without `.grad` that was not used here: it gets one only if another rank used it."""
        parameters = zip(self.used, self.group.parameters)
        return next((p for used, p in parameters if not used and p.requires_grad and p.sharded.grad is None), None)


def _flat_gradients(group: ParamGroup, grads: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
    """Return the flattened gradients of the sliced parameters, by index; None for a missing gradient."""
    indices = {part.parameter for message in group.reduction.slices for part in message}
    found = ((index, grads[index]) for index in sorted(indices))
    return {index: None if grad is None else grad.contiguous().view(-1) for index, grad in found}


def flat_gradient(group: ParamGroup) -> Tensor | None:
    """Return the flat gradient, (shard_numel,), if `.grad` of every parameter is its part; else None. Its gaps are zeros."""
    return group.parts.flat if group.parts is not None and group.parts.are_set(group.sharded) else None


def _hooked(parameter: ShardedParameter, local: Tensor) -> Any:
    """Return the reduced gradient `local`, (sharding.shard_shape), after the hooks on the sharded parameter."""
    gradient: Any = parameter.dtensor_like_shard(local)
    hook: Callable[..., Any]
    for hook in _torch.parameter_hooks(parameter.sharded)[0]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def commit_all(reductions: Sequence[Reduction]) -> None:
    """Set the gradients of all these reductions or of none, then run the post-accumulate-grad hooks.

    If an exception or interrupt cuts a commit short, some gradients are set and some are not, and additions cannot be undone.
    Then all gradients of these groups are discarded, with a warning.
    """
    try:
        for one in reductions:
            one.commit()
    except BaseException as failure:
        names = ", ".join(f"'{name}'" for name in dict.fromkeys([one.discard_gradients() for one in reductions]))
        warnings.warn(
            f"{type(failure).__name__} came while .grad of {names} was being set. These gradients are discarded, together with "
            "what earlier backwards of the step added to them.",
            stacklevel=2,
        )
        raise
    for one in reductions:
        if one.has_hooks:
            one.run_post_grad_hooks()


# --- copies into reduce-scatter inputs ---


def copy_slice(flat: Tensor | None, size: int, part: Slice, out: Tensor) -> None:
    """Copy and cast a slice of each rank's chunk of a gradient to `out`, (ranks, part.size). Padding becomes zeros.

    `flat`: the flattened gradient, or None for zeros. `size`: elements of a chunk.
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


def _copy_one_by_one(plan: ReductionPlan, grads: Sequence[Tensor | None], message: Tensor) -> None:
    """Copy and cast gradients into the packed input, (ranks, numel), if one is missing, dtypes differ, or `plan.pick` is None.

    Some kernels return the gradients of norms in float32. Casting all gradients first would take memory for a copy.
    """
    column = 0
    for segment in plan.packed:
        out = message[:, column : column + segment.size]
        column += segment.size
        grad = grads[segment.parameter] if segment.parameter >= 0 else None
        if grad is None:  # none on this rank, or a gap
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
        if block_parts:  # none if all ranks are without rows, as may be in HFSDP's reduction over replicas
            torch._foreach_copy_(block_parts, grad_parts)


def pack(
    plan: ReductionPlan,
    grads: Sequence[Tensor | None],
    total: Tensor,
    memory: Allocate | None,
    *,
    factor: float,
    in_place: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Make the inputs of packed gradients (copied and cast) and of direct ones (copied only if need be), scaled by `factor`.

    `memory` allocates the packed input (None: torch does), except with `in_place` (one rank), where the output is that input.
    Return, for each tensor that is reduced, its input, (ranks * size,), and its output, (size,), a part of `total`.
    """
    layout, device = plan.layout, total.device
    messages: list[tuple[Tensor, Tensor]] = []
    if plan.numel:
        picked = [] if plan.pick is None else plan.pick([*grads, *plan.gaps])
        dtypes = {*map(getattr, picked, repeat("dtype"), repeat(None))}  # None if a gradient is missing
        is_uniform = len(dtypes) == 1 and None not in dtypes
        if is_uniform and memory is None and not in_place and (plan.casts_whole or total.dtype in dtypes):
            message = _torch.chunk_cat(picked, layout.ranks, total.dtype).view(-1)
        else:
            numel = layout.ranks * plan.numel
            # in place, the packed gradients are the sum already
            message = total[:numel] if in_place else (memory or torch.empty)((numel,), dtype=total.dtype, device=device)
            rows = message.view(layout.ranks, -1)
            if is_uniform:
                _torch.chunk_cat_into(picked, rows)
            else:
                _copy_one_by_one(plan, grads, rows)
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
