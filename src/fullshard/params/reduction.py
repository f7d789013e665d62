"""The gradients of one group on their way to the shards, and what the caller may say about that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import LaneWork
from fullshard.consistency.collective_log import GroupFingerprints
from fullshard.params.grad_commit import GradCommit
from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.unsharded import GroupCollectives, dim_permutation

ReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients become one: `divide` by a number (None: by the ranks they come from), over replicas or not yet, and
    the caller's own step behind that.
    """

    divide: float | None = None
    all_reduce: bool = True
    hook: ReduceHook | None = None
    hook_stream: Any = None


class Reduction:
    """The gradients of one group on their way to the shards: packed and cast on the compute lane, reduced on others.

        gradients of large, even parameters ------------------------------------> message of its own   no copy
        the others --(chunk_cat: cut, pad, cast)--> one packed message (ranks, s) --reduce-scatter--> flat (shard_numel,)
        flat --all-reduce over replicas--> the caller's hook --> storage dtype --> the host, if shards are there

    The message is fixed when the group is made: every parameter is in it, with zeros where this rank has no gradient.
    """

    def __init__(self, group: ParamGroup, grads: Sequence[Tensor | None], options: ReduceOptions) -> None:
        layout, reduce = group.layout, group.dtypes.reduce
        device = group.storage.device
        dtype = group.dtypes.compute
        self.used: list[bool] = []
        alike = True
        for grad in grads:
            self.used.append(grad is not None)
            alike = alike and (grad is None or grad.dtype == dtype)
        if not alike:
            grads, dtype = [None if grad is None else grad.to(reduce) for grad in grads], reduce
        self._group, self._options = group, options
        replicas = group.collectives.replicate
        self._replicas = replicas if options.all_reduce else None
        self._deferred = replicas is not None and not options.all_reduce
        divide = options.divide or float(layout.ranks * (replicas.ranks if replicas else 1))
        # A sum of halves overflows early, a quotient of halves underflows: divide in two steps, the first a power of two.
        before = 2.0 ** ceil(log2(divide) / 2) if reduce is torch.float16 and divide > 1 else 1.0
        self._scale = 1.0 if reduce is torch.float16 else 1.0 / divide
        self._last_scale = before / divide if reduce is torch.float16 else 1.0
        self._given: list[bool] | None = None  # who has its gradient
        self._ticket: LaneWork | None = None
        self._ended = False
        self.has_hooks = group.has_hooks
        plan = group.plan
        memory = group.collectives.reduce_memory or torch.empty
        self._out = memory((layout.shard_numel,), dtype=reduce, device=device)
        self._fulls: list[Tensor] = []
        self._outs: list[Tensor] = []
        if plan.packed:
            message = memory((layout.ranks * plan.numel,), dtype=reduce, device=device).view(layout.ranks, -1)
            parts = [*group.blanks(dtype)]
            for index, parameter in plan.sources:
                grad, shape = grads[parameter], layout.places[parameter].shape
                parts[index] = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.contiguous()
            _torch.chunk_cat(parts, message)
            for piece in plan.folded:
                grad, place = grads[piece.parameter], layout.places[piece.parameter]
                if grad is not None:
                    wholes, blocks = dim_permutation(grad, message[:, place.offset : place.offset + place.size], place)
                    torch._foreach_copy_(blocks, wholes)
            self._fulls.append(message.view(-1))
            self._outs.append(self._out if plan.numel == layout.shard_numel else self._out[: plan.numel])
        for index in plan.alone:
            place = layout.places[index]
            grad = grads[index]
            full = torch.zeros(place.shape, dtype=dtype, device=device) if grad is None else grad.contiguous()
            self._fulls.append(full.view(-1))
            self._outs.append(self._out[place.offset : place.offset + place.size])
        if before != 1.0 and self._fulls:
            torch._foreach_mul_(self._fulls, 1.0 / before)
        storage = group.dtypes.storage
        same = storage == reduce and memory is torch.empty  # gradients do not stay in memory that is for messages
        self._flat = self._out if same else torch.empty(layout.shard_numel, dtype=storage, device=device)
        self._host: Tensor | None = None
        if group.storage.host:
            self._host = torch.empty(layout.shard_numel, dtype=storage, pin_memory=group.storage.pinned)
        self._absorbed: Tensor | None = None

    @property
    def replicated(self) -> bool:
        """Whether a second step, over the replicas or the caller's, follows."""
        return not self._deferred and (self._replicas is not None or self._options.hook is not None)

    @property
    def polled(self) -> bool:
        """Whether it may end as soon as it is done, or calls something that may talk to other ranks."""
        return self._options.hook is None

    @property
    def deferred(self) -> bool:
        """Whether the sum over replicas is left to a later reduction."""
        return self._deferred

    def start(self) -> StartedWork:
        if not self._fulls:
            return StartedWork()
        return self._group.collectives.reduce.reduce_scatter(self._outs, self._fulls, self._scale)

    def finish(self) -> None:
        before = self._group.take_partial()
        if before is not None:
            self._absorbed, used = before
            self._out.add_(self._absorbed)
            self.used = [now or then for now, then in zip(self.used, used)]
        if self._deferred:
            self._group.keep_partial(self._out, self.used)
        elif not self.replicated:
            self._complete()

    def replicate(self) -> StartedWork:
        if self._replicas is None or not self._out.numel():
            return StartedWork()
        return self._replicas.all_reduce(self._out)

    def finish_replicated(self) -> None:
        hook, stream = self._options.hook, self._options.hook_stream
        if hook is not None:
            if stream is None:
                hook(self._out)
            else:
                _torch.on_stream(stream, hook, self._out)
        self._complete()

    def _complete(self) -> None:
        if self._last_scale != 1.0:
            self._out.mul_(self._last_scale)
        if self._flat is not self._out:
            self._flat.copy_(self._out)
        if self._host is not None:
            if self._host.numel():
                self._group.collectives.traffic.record("to_host", [self._flat])
            self._host.copy_(self._flat, non_blocking=True)

    def set_work(self, ticket: LaneWork) -> None:
        """`ticket` is the last of its work."""
        self._ticket = ticket

    def release_messages(self) -> None:
        """The compute lane is ordered behind the reduce-scatter: let the messages go."""
        self._fulls, self._outs, self._absorbed = [], [], None
        if not self.replicated:
            self.complete()

    def complete(self) -> None:
        """The compute lane is ordered behind all of it."""
        self._out = self._flat
        self._ended = True

    def wait_on_host(self, *, on_host: bool) -> None:
        """Have the sum be here, where the shards are. Who waits on a lane may be another than who did; a host is one."""
        if self._ticket is not None and not (on_host and self._ended):
            self._ticket.wait()
        if self._host is not None:
            if self._ticket is not None:
                self._ticket.block()
            self._flat = self._host

    def grad_commit(self, used_somewhere: Sequence[bool] | None = None) -> GradCommit | None:
        """What the parameters are to have that this rank used, or any did (None: nobody asked), and do not have yet."""
        parameters, given = self._group.parameters, self._given
        due = self.used
        if used_somewhere is not None:
            due = [here or (there and p.requires_grad) for here, there, p in zip(due, used_somewhere, parameters)]
        wanted = due if given is None else [now and not then for now, then in zip(due, given)]
        if given is not None and not any(wanted):
            return None
        self._given = due
        return GradCommit(self._group, self._flat, wanted, has_hooks=self.has_hooks)

    @property
    def group(self) -> ParamGroup:
        return self._group

    @property
    def landed(self) -> bool:
        """Whether it was handed out, or begun to be."""
        return self._given is not None

    @property
    def undecided(self) -> bool:
        """Whether this rank must learn which of the parameters it did not use others did."""
        if all(self.used):
            return False
        return any(not used and p.requires_grad for used, p in zip(self.used, self._group.parameters))

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        return self._group.parameters

    @property
    def fingerprints(self) -> GroupFingerprints:
        return self._group.fingerprints

    @property
    def collectives(self) -> GroupCollectives:
        return self._group.collectives
