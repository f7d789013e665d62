"""The gradients of one group on their way to the shards, and what the caller may say about that."""

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
from fullshard.collectives.base import Allocate, Collectives, StartedWork, together
from fullshard.collectives.streams import LaneWork
from fullshard.errors import InternalError
from fullshard.params.arena import MessageArena
from fullshard.params.grad_commit import GradCommit
from fullshard.params.group import ParamGroup
from fullshard.params.unsharded import dim_permutation
from fullshard.sharding.layout import ParamOffsets, Slice

ReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients become one.

    divide: by a number; None: by the ranks that they come from.      all_reduce: over replicas now, or by a later backward.
    hook, hook_stream: the caller's own step behind that, and the stream that it runs on.
    """

    divide: float | None = None
    all_reduce: bool = True
    hook: ReduceHook | None = None
    hook_stream: Any = None


@dataclass(frozen=True, slots=True)
class SumSteps:
    """The steps that make one sum of packed gradients: by which factors it is scaled, and what follows the sum over shards.

    first, scale, last: before the reduce-scatter, in it, and behind everything.
    replicas: the collectives of the sum over replicas, None if there is none now.
    deferred: whether that sum is left to a later reduction.
    replicated: whether a second step follows the sum over shards: over replicas, or the caller's (`hook`).
    """

    first: float
    scale: float
    last: float
    replicas: Collectives | None
    deferred: bool
    replicated: bool
    hook: Callable[[Tensor], None] | None

    @classmethod
    def of(cls, group: ParamGroup, options: ReduceOptions) -> SumSteps:
        """The steps for gradients of `group`.

        A sum of halves overflows early, a quotient of halves underflows: float16 is divided in two steps, the first by a power
        of two.
        """
        replicas = group.collectives.replicate
        divide = options.divide or float(group.layout.ranks * (replicas.ranks if replicas else 1))
        half = group.dtypes.reduce is torch.float16
        before = 2.0 ** ceil(log2(divide) / 2) if half and divide > 1 else 1.0
        deferred = replicas is not None and not options.all_reduce
        hook = options.hook
        if hook is not None and options.hook_stream is not None:
            hook = partial(_torch.on_stream, options.hook_stream, hook)
        return cls(
            first=1.0 / before,
            scale=1.0 if half else 1.0 / divide,
            last=before / divide if half else 1.0,
            replicas=None if deferred else replicas,
            deferred=deferred,
            replicated=not deferred and (replicas is not None or hook is not None),
            hook=hook,
        )


class Stage(str, enum.Enum):
    """How far a reduction is. On an accelerator, where lanes are streams: how far it is queued."""

    PACKED = "packed"
    SUMMED = "summed over shards"
    ABSORBED = "part of a later sum"
    REDUCED = "reduced"
    COMMITTED = "committed"


MOVES = {
    (Stage.PACKED, Stage.SUMMED): "the reduce-scatter is done",
    (Stage.SUMMED, Stage.REDUCED): "no sum over replicas follows, or it is done, and so is the caller's hook",
    (Stage.SUMMED, Stage.ABSORBED): "the sum over replicas was left to a later reduction, which adds this sum to its own",
    (Stage.REDUCED, Stage.COMMITTED): "a step ends, or hooks on parameters want their gradients now",
    (Stage.COMMITTED, Stage.COMMITTED): "other ranks used a parameter that this one did not",
}


class Reduction:
    """The gradients of one group on their way to the shards: packed and cast on the compute lane, reduced on others.

        large, even parameters ----------------------------------> message of its own    no copy
        large, uneven or to be cast --(slice by slice)--> messages through one buffer
        of few rows --(slice by slice)--> sums that all ranks get
        the others --(chunk_cat: cut, pad, cast)--> one packed message (ranks, numel)
        PACKED ------reduce-scatter------> SUMMED ---all-reduce over replicas, the caller's hook---> REDUCED ---> COMMITTED
                                              |         (grad dtype; on the host, if shards are)          in `.grad`
                                              +--> ABSORBED by a later reduction (all_reduce=False)

    The message is fixed when the group is made: every parameter is in it, with zeros where this rank has no gradient.
    """

    def __init__(
        self,
        group: ParamGroup,
        grads: Sequence[Tensor | None],
        options: ReduceOptions,
        arena: MessageArena | None = None,
    ) -> None:
        """`grads`: of each parameter, (sharding.local_shape), None if this rank did not use it.

        arena: memory that messages are in, where their addresses are to be the same in each step.
        """
        self.group, self.steps = group, SumSteps.of(group, options)
        self.stage = Stage.PACKED
        self.has_hooks = group.has_hooks
        self.used: list[bool] = []  # of each parameter: whether this rank has a gradient
        self._given: list[bool] | None = None  # of each parameter: whether it has its gradient
        self._work: LaneWork | None = None  # the last of it
        dtypes, layout, device = group.dtypes, group.layout, group.storage.device
        for grad in grads:
            self.used.append(grad is not None)
        self._earlier = group.grads.deferred
        if self._earlier is not None:
            self.used = [now or then for now, then in zip(self.used, self._earlier.used)]
        fresh: Allocate = torch.empty if arena is None else arena.allocate
        memory = group.collectives.reduce.reduce_memory or fresh
        self._memory = fresh
        if arena is not None and memory is fresh:  # it stays longer than the messages if the sum over replicas is put off
            self._sum = group.sum_memory(dtypes.reduce, None if self._earlier is None else self._earlier.total)
        else:
            self._sum = memory((layout.shard_numel,), dtype=dtypes.reduce, device=device)
        kept = None if arena is None else memory
        self._messages = _pack(group, grads, self._sum, memory, kept)
        self._sliced = _flat_gradients(group, grads) if group.reduction.has_slices else {}
        if self.steps.first != 1.0 and self._messages:
            torch._foreach_mul_([full for full, _ in self._messages], self.steps.first)
        self._flat = self._sum
        arrives = group.reduction.dtype
        if (arrives != dtypes.reduce or memory is not torch.empty) and not self.steps.deferred:
            # Gradients do not stay in memory that is for messages, unless they only pass through it to the host.
            passing = fresh if group.storage.host else torch.empty
            self._flat = passing((layout.shard_numel,), dtype=arrives, device=device)
        self._host: Tensor | None = None
        if group.storage.host and not self.steps.deferred:
            self._host = torch.empty(layout.shard_numel, dtype=arrives, device="cpu", pin_memory=group.storage.pinned)

    def _move(self, to: Stage) -> None:
        if (self.stage, to) not in MOVES:
            name = self.group.parameters[0].unit_name.name
            raise InternalError(f"a reduction of unit '{name}' that is {self.stage.value} cannot be {to.value}")
        self.stage = to

    @property
    def committed(self) -> bool:
        """Whether it was handed out, or begun to be."""
        return self.stage is Stage.COMMITTED

    # --- on lanes ---

    def start(self) -> StartedWork:
        """Begin the sum over shards."""
        if self._sliced:
            return self._start_slices()
        if not self._messages:
            return StartedWork()
        fulls, outs = zip(*self._messages)
        return self.group.collectives.reduce.reduce_scatter(outs, fulls, self.steps.scale)

    def _start_slices(self) -> StartedWork:
        """As `start`, in as many messages as there are sets of slices; the first one takes along whatever is not sliced."""
        group, plan, messages = self.group, self.group.reduction, self._messages
        ranks, collectives = group.layout.ranks, group.collectives.reduce
        most = max((ranks * sum(part.size for part in parts) for parts in plan.slices), default=0)
        buffer = self._memory((most,), dtype=self._sum.dtype, device=self._sum.device)
        started = StartedWork()
        for parts in plan.slices or ((),):
            _end(started)  # the buffer is used again
            at = 0
            for part in parts:
                place = group.layout.places[part.parameter]
                full = buffer[at : at + ranks * part.size]
                _copy_slice(self._sliced[part.parameter], place.size, part, full.view(ranks, part.size))
                if self.steps.first != 1.0:
                    full.mul_(self.steps.first)
                messages = [*messages, (full, self._sum[place.offset + part.start :][: part.size])]
                at += full.numel()
            if messages:
                fulls, outs = zip(*messages)
                started, messages = collectives.reduce_scatter(outs, fulls, self.steps.scale), []
        return together(started, self._start_sums()) if plan.sums else started

    def _start_sums(self) -> StartedWork:
        """Begin the sums that all ranks get."""
        plan = self.group.reduction
        most = max(sum(part.size for part in parts) for parts in plan.sums)
        buffer = self._memory((most,), dtype=self._sum.dtype, device=self._sum.device)
        self._sum[self.group.layout.summed_offset :].zero_()  # what is padding, between them and in them
        started = StartedWork()
        for parts in plan.sums:
            _end(started)
            at = 0
            for part in parts:
                flat, into = self._sliced[part.parameter], buffer[at : at + part.size]
                into.zero_() if flat is None else into.copy_(flat[part.start :][: part.size])
                at += part.size
            if self.steps.first != 1.0:
                buffer[:at].mul_(self.steps.first)
            sent = self.group.collectives.reduce.all_reduce(buffer[:at])
            started = together(sent, StartedWork(then=partial(self._take_rows, parts, buffer)))
        return started

    def _take_rows(self, parts: Sequence[Slice], sums: Tensor) -> None:
        """Of sums that all ranks have, keep this rank's rows."""
        layout, at = self.group.layout, 0
        for part in parts:
            mine, place = layout.rows_of(part.parameter, self.group.collectives.reduce.rank), layout.places[part.parameter]
            start, stop = max(mine.start, part.start), min(mine.stop, part.start + part.size)
            if start < stop:
                out = self._sum[place.offset + start - mine.start :][: stop - start]
                torch.mul(sums[at + start - part.start :][: stop - start], self.steps.scale, out=out)
            at += part.size

    def finish(self) -> None:
        """The sum over shards is there."""
        self._move(Stage.SUMMED)
        if self._earlier is not None:
            self._earlier.add_to(self._sum)
        if not (self.steps.replicated or self.steps.deferred):
            self._end()

    @property
    def total(self) -> Tensor:
        """The sum over shards, (shard_numel,)."""
        return self._sum

    def add_to(self, total: Tensor) -> None:
        """Become part of a later sum over shards, whose lane comes to its end behind this one."""
        self._move(Stage.ABSORBED)
        total.add_(self._sum)

    def replicate(self) -> StartedWork:
        """Begin the sum over replicas."""
        if self.steps.replicas is None or not self._sum.numel():
            return StartedWork()
        return self.steps.replicas.all_reduce(self._sum)

    def finish_replicated(self) -> None:
        """The sum over replicas is there: the caller's hook is next."""
        if self.steps.hook is not None:
            self.steps.hook(self._sum)
        self._end()

    def _end(self) -> None:
        """All sums are there: scale and cast them, and copy them to the host if shards are there."""
        self._move(Stage.REDUCED)
        if self.steps.last != 1.0:
            self._sum.mul_(self.steps.last)
        if self._flat is not self._sum:
            self._flat.copy_(self._sum)
        if self._host is not None:
            if self._host.numel():
                self.group.collectives.traffic.record("to_host", [self._flat])
            self._host.copy_(self._flat, non_blocking=True)

    # --- on the compute lane ---

    def sent(self, work: LaneWork) -> None:
        """It is on its way; `work` is the last of it."""
        self._work = work
        self.group.grads.deferred = self if self.steps.deferred else None

    def release_messages(self) -> None:
        """The compute lane is ordered behind the reduce-scatter: let the messages go."""
        self._messages, self._sliced, self._earlier = [], {}, None
        if not self.steps.replicated:
            self._sum = self._flat

    def release_sum(self) -> None:
        """The compute lane is ordered behind all of it: only the gradients stay."""
        self._sum = self._flat

    def wait_on_host(self, *, on_host: bool) -> None:
        """Have the sum be where the shards are.

        on_host: lanes are the host's own, which does nothing twice. Of an accelerator each stream that goes on must wait.
        """
        assert self._work is not None
        if not on_host or self.stage in (Stage.PACKED, Stage.SUMMED):
            self._work.wait()
        if self._host is not None:
            self._work.block()
            self._flat = self._host

    # --- what the parameters get ---

    def grad_commit(self, used_somewhere: Sequence[bool] | None = None) -> GradCommit | None:
        """The gradients of parameters that this rank used, or any did (None: it is not known), and that were not given yet."""
        given, due = self._given, self.used
        if used_somewhere is not None and not all(due):
            parameters = self.group.parameters
            due = [here or (there and p.requires_grad) for here, there, p in zip(due, used_somewhere, parameters)]
        wanted = due if given is None else [now and not then for now, then in zip(due, given)]
        if given is not None and not any(wanted):
            return None
        self._move(Stage.COMMITTED)
        self._given = due
        return GradCommit(self.group, self._flat, wanted, has_hooks=self.has_hooks)

    @property
    def undecided(self) -> bool:
        """Whether this rank must learn which of the parameters that it did not use others did."""
        return any(not used and p.requires_grad for used, p in zip(self.used, self.group.parameters))


def _flat_gradients(group: ParamGroup, grads: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
    """Of each parameter whose gradient is sent in slices: that, (numel,); None if this rank has none."""
    plan = group.reduction
    indices = {part.parameter for message in (*plan.slices, *plan.sums) for part in message}
    found = ((index, grads[index]) for index in sorted(indices))
    return {index: None if grad is None else grad.contiguous().view(-1) for index, grad in found}


def _end(started: StartedWork) -> None:
    """Wait for a collective that runs in order, and finish it."""
    for work in started.works:
        work.wait()
    if started.then is not None:
        started.then()


def _copy_slice(flat: Tensor | None, size: int, part: Slice, out: Tensor) -> None:
    """Copy a slice of the chunks of all ranks, each `size` elements of a gradient, to `out` (ranks, part.size), cast.

    The chunks of the last ranks may end early, or there may be none: zeros are there instead.
    """
    if flat is None:
        out.zero_()
        return
    whole = flat.numel() // size
    if whole:
        out[:whole].copy_(flat[: whole * size].view(whole, size)[:, part.start : part.start + part.size])
    if whole < len(out):
        out[whole:].zero_()
        rest = flat[whole * size + part.start : (whole + 1) * size][: part.size]
        out[whole, : rest.numel()].copy_(rest)


def _packed_dtype(group: ParamGroup, grads: Sequence[Tensor | None]) -> torch.dtype | None:
    """Return the dtype of all gradients in the packed message, None if they have several."""
    packed = [grads[segment.parameter] for segment in group.reduction.packed if segment.parameter >= 0]
    found = {grad.dtype for grad in packed if grad is not None}
    if len(found) > 1:
        return None
    return found.pop() if found else group.dtypes.compute


def _pack_one_by_one(group: ParamGroup, grads: Sequence[Tensor | None], message: Tensor) -> None:
    """Copy gradients of several dtypes into a packed message (ranks, numel) without a cast of all of them before."""
    column = 0
    for segment in group.reduction.packed:
        out = message[:, column : column + segment.size]
        column += segment.size
        grad = grads[segment.parameter] if segment.parameter >= 0 else None
        place = group.layout.places[segment.parameter]
        if grad is None or place.dim == 0:
            flat = None if grad is None else grad.contiguous().view(-1)
            _copy_slice(flat, segment.size, Slice(segment.parameter, 0, segment.size), out)
        else:
            out.zero_()
            of_grad, of_blocks = dim_permutation(grad, out, place)
            torch._foreach_copy_(of_blocks, of_grad)


def _zeros_or_permuted(
    grad: Tensor | None, place: ParamOffsets, ranks: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What stands in a message for a missing gradient, and for one of a parameter that is cut along another dim than 0."""
    if place.dim == 0:
        return torch.zeros(place.shape, dtype=dtype, device=device)
    blocks = torch.zeros((ranks, place.size), dtype=dtype, device=device)
    if grad is not None:
        of_grad, of_blocks = dim_permutation(grad, blocks, place)
        torch._foreach_copy_(of_blocks, of_grad)
    return blocks


def _pack(
    group: ParamGroup,
    grads: Sequence[Tensor | None],
    total: Tensor,
    memory: Allocate,
    kept: Allocate | None,
) -> list[tuple[Tensor, Tensor]]:
    """Messages: (chunks for all ranks (ranks * size,), where in `total` the sum of this rank's chunks goes (size,)).

    Packing casts. Gradients of several dtypes (some kernels give those of norms in float32) are packed one by one.
    kept: allocates the memory that gradients are copied to which are messages as they are, if that is asked for.
    """
    layout, plan, device = group.layout, group.reduction, group.storage.device
    messages: list[tuple[Tensor, Tensor]] = []
    if plan.numel:
        if group.collectives.reduce.in_place:  # a rank alone: what is packed is the sum already
            message = total[: plan.numel]
        else:
            message = memory((layout.ranks * plan.numel,), dtype=total.dtype, device=device)
        found = {grad.dtype for grad in grads if grad is not None}
        dtype = found.pop() if len(found) == 1 else _packed_dtype(group, grads)
        if dtype is None:
            _pack_one_by_one(group, grads, message.view(layout.ranks, -1))
        parts: list[Tensor] = []
        for segment in plan.packed if dtype is not None else ():
            if segment.parameter < 0:
                parts.append(plan.zeros[segment.size].to(dtype))
                continue
            grad, place = grads[segment.parameter], layout.places[segment.parameter]
            if grad is not None and place.dim == 0:
                parts.append(grad.contiguous())
                continue
            assert dtype is not None  # or there would be no segments here
            parts.append(_zeros_or_permuted(grad, place, layout.ranks, dtype=dtype, device=device))
        if parts:
            _torch.chunk_cat(parts, message.view(layout.ranks, -1))
        messages.append((message, total if plan.numel == layout.shard_numel else total[: plan.numel]))
    for index in plan.direct:
        place, grad = layout.places[index], grads[index]
        if kept is not None:
            full = kept((prod(place.shape),), dtype=total.dtype, device=device).view(place.shape)
            full.zero_() if grad is None else full.copy_(grad)
        elif grad is None:
            full = torch.zeros(place.shape, dtype=total.dtype, device=device)
        else:
            full = grad.contiguous() if grad.dtype == total.dtype else grad.to(total.dtype).contiguous()
        messages.append((full.view(-1), total[place.offset : place.offset + place.size]))
    return messages
