"""What the ranks of an axis settle outside of forward and backward: each collective an entry of the log, and watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.collectives.base import Collectives, StartedWork
from fullshard.consistency.collective_log import GroupFingerprints, LoggedCall, UnitName
from fullshard.params.shard_values import full_tensor
from fullshard.runtime.communicator import Communicator
from fullshard.sharding.mesh import ShardAxis
from fullshard.sharding.param_sharding import ParamSharding

KIND = "talk"  # of these messages in `counting()`


class SetupCollectives:
    """One call of the caller's in which all ranks of an axis take part: `fully_shard()`, `materialize()`, `full_params()`.

    Ranks that call different things differ in the log, so the watchdog tells them; an error of the backend says which call it
    was, and where the other ranks are. The same call on all ranks makes the same entries.

    Attributes:
        axis: the axis whose ranks take part.
        groups: the process groups over which these ranks are spread, replicas first.
    """

    def __init__(
        self,
        communicator: Communicator,
        axis: ShardAxis,
        unit_name: UnitName,
        doing: str,
        subject: str = "",
        *,
        shards: bool = True,
    ) -> None:
        """Begin a call.

        doing: the name of the call. subject: a text about it that is alike on all ranks. shards: False if only ranks that hold
        equal shards take part.
        """
        self.axis = axis
        self._communicator, self._unit_name, self._doing, self._subject = communicator, unit_name, doing, subject
        self._shards = shards
        self.groups = [axis.replicas.group] if axis.replicas is not None and axis.replicas.ranks > 1 else []
        self.groups += [axis.group] if shards and axis.group is not None and axis.ranks > 1 else []
        self._fingerprints: GroupFingerprints | None = None
        self._last: LoggedCall | None = None

    def about(self, axis: ShardAxis) -> SetupCollectives:
        """The same call, for what lies on another axis."""
        if axis.key == self.axis.key:
            return self
        return SetupCollectives(self._communicator, axis, self._unit_name, self._doing, self._subject, shards=self._shards)

    # --- small tensors ---

    def maximum(self, tensor: Tensor) -> Tensor:
        """Element-wise over all ranks, in place."""
        for group in self.groups:
            self._run(group, [tensor], lambda collectives: collectives.all_reduce_max(tensor))
        return tensor

    def first(self, tensor: Tensor) -> Tensor:
        """What the first rank holds in an integer tensor, in place."""
        for group in self.groups:
            if group.rank():
                tensor.zero_()
            self._run(group, [tensor], lambda collectives: collectives.all_reduce(tensor))
        return tensor

    def gather(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """(n, ...) of all n ranks of one of the groups."""
        found = tensor.new_empty((group.size(), *tensor.shape))
        self._gather(found, tensor.contiguous(), group)
        return found

    def meet(self) -> None:
        """Return when all ranks are in this call, which none leaves now before it did what it came for."""
        self.maximum(torch.zeros(1, dtype=torch.uint8, device=self.axis.device))

    # --- large ones ---

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Have all ranks hold what the first one holds, in place.

        torch's own broadcast sends a weight once where a sum sends it twice. It knows no names, so the ranks meet before.
        """
        if not self.groups:
            return
        self.meet()
        for tensor in tensors:
            mine = tensor.detach()
            moved = mine.to(self.axis.device).contiguous()
            for group in self.groups:
                source = dist.get_process_group_ranks(group)[0]
                begin = partial(dist.broadcast, moved, source, group=group, async_op=True)
                self._send(group, [moved], partial(_begun, begin))
            if moved is not mine:
                mine.copy_(moved)

    def exchange(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        """Have each rank of a group get what each one has for it: parts of 1-D tensors, of these sizes, in rank order."""
        sizes = list(received_sizes), list(sent_sizes)
        begin = partial(dist.all_to_all_single, received, sent, *sizes, group=group, async_op=True)
        self._send(group, [received], partial(_begun, begin))

    def unsharded(self, sharding: ParamSharding, sharded: DTensor) -> Tensor:
        """The tensor that this rank computes with, of a DTensor that is sharded so: (sharding.local_shape), of a scalar one
        element, in memory of its own on the device of its shard.
        """
        if _is_sharded_so(sharding, sharded):
            return self._unsharded(sharding, sharded)
        return sharding.local_of(self._by_torch(sharded)).clone()

    def full(self, sharding: ParamSharding, sharded: DTensor) -> Tensor:
        """The same, of the global shape: with the parts of other ranks of tensor parallelism."""
        if not _is_sharded_so(sharding, sharded):
            return self._by_torch(sharded).clone()
        whole = sharding.to_module(self._unsharded(sharding, sharded))
        return whole if sharding.dense is None else self._by_torch(whole).clone()

    def _unsharded(self, sharding: ParamSharding, sharded: DTensor) -> Tensor:
        local, group = _torch.local_tensor(sharded).detach(), sharding.axis.group
        if not sharding.shape or group is None or sharding.axis.ranks == 1:
            return local.clone()
        if local.device.type == "meta":
            return local.new_empty(sharding.local_shape)
        part = local.movedim(sharding.dim, 0).to(sharding.axis.device).contiguous()
        if sharding.extent.padding:
            part = torch.cat([part, part.new_zeros((sharding.extent.padding, *part.shape[1:]))])
        found = part.new_empty((sharding.axis.ranks * part.shape[0], *part.shape[1:]))
        self.about(sharding.axis)._gather(found, part, group)
        return found[: sharding.local_shape[sharding.dim]].movedim(0, sharding.dim).contiguous().to(local.device)

    def _by_torch(self, sharded: Any) -> Tensor:
        """Have DTensor gather it: tensor parallelism, subclasses, gradients that a caller sharded in another way.

        Its collectives know no names, so the ranks meet before, and the watchdog knows this call by its name.
        """
        self.meet()
        wait_state = self._communicator.wait_state
        if wait_state is None or self._last is None:
            return full_tensor(sharded)
        before = wait_state.enter(self._last)
        try:
            return full_tensor(sharded)
        except RuntimeError as failure:
            raise self._communicator.explained(failure, self._last) from failure
        finally:
            wait_state.leave(before)

    # --- messages ---

    def _gather(self, out: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        if part.numel():
            found, mine = out.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)
            self._run(group, [out], lambda collectives: collectives.gatherer([found], [mine])())

    def _run(self, group: dist.ProcessGroup, fulls: Sequence[Tensor], start: Callable[[Collectives], StartedWork]) -> None:
        self._send(group, fulls, partial(start, self._communicator.collectives.of_process_group(group)))

    def _send(self, group: dist.ProcessGroup, fulls: Sequence[Tensor], start: Callable[[], StartedWork]) -> None:
        communicator = self._communicator
        if self._fingerprints is None:
            self._fingerprints = GroupFingerprints(communicator.log_of(self.axis), self._unit_name, self._subject)
        communicator.traffic.record(KIND, fulls, group.size())
        sent = communicator.send(communicator.reduce_lane, self._fingerprints, self._doing, start)
        sent.wait()
        self._last = sent


def _begun(begin: Callable[[], Any]) -> StartedWork:
    return StartedWork((begin(),))


def _is_sharded_so(sharding: ParamSharding, sharded: DTensor) -> bool:
    plain = type(_torch.local_tensor(sharded)) is Tensor
    return plain and sharded.device_mesh == sharding.mesh and tuple(sharded.placements) == sharding.placements


__all__ = ["KIND", "SetupCollectives"]
