"""Collectives outside of forward and backward, for set-up and full parameters. They are logged and watched like all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.checks.collective_log import GroupFingerprints, LoggedCall, UnitName
from fullshard.comm.base import Collectives, StartedWork
from fullshard.core.communicator import Communicator
from fullshard.core.mesh import ShardAxis
from fullshard.core.param_sharding import ParamSharding
from fullshard.core.shard_values import full_tensor

KIND = "talk"  # `Message.kind` of these collectives, which users see in `counting()`


class SetupCollectives:
    """The collectives of one call of the user, such as `fully_shard()`, `materialize()` or `full_params()`.

    Each collective is logged under the name of the call. So if ranks are in different calls, the watchdog reports both, and an
    error of the backend names the call and the states of the other ranks.

    Attributes:
        axis: the axis whose ranks take part.
        groups: the process groups that together connect these ranks, replicas first.
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

        Args:
            communicator: runs the collectives.
            axis: the axis whose ranks take part.
            unit_name: the name of the unit, for error messages.
            doing: the name of the call.
            subject: a text that must be equal on all ranks; it is part of the log's hash.
            shards: False if only ranks with equal shards take part, i.e. the ranks of the replicate axis.
        """
        self.axis = axis
        self._communicator, self._unit_name, self._doing, self._subject = communicator, unit_name, doing, subject
        self._shards = shards
        self.groups = [axis.replicas.group] if axis.replicas is not None and axis.replicas.ranks > 1 else []
        self.groups += [axis.group] if shards and axis.group is not None and axis.ranks > 1 else []
        self._fingerprints: GroupFingerprints | None = None
        self._last: LoggedCall | None = None

    def on_axis(self, axis: ShardAxis) -> SetupCollectives:
        """Return the collectives of the same call for parameters on another axis."""
        if axis.key == self.axis.key:
            return self
        return SetupCollectives(self._communicator, axis, self._unit_name, self._doing, self._subject, shards=self._shards)

    # --- small tensors ---

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks. Works in place."""
        for group in self.groups:
            self._run(group, [tensor], lambda collectives: collectives.all_reduce_max(tensor))
        return tensor

    def from_first_rank(self, tensor: Tensor) -> Tensor:
        """Return the first rank's values of an integer tensor. Works in place."""
        for group in self.groups:
            if group.rank():  # all other ranks add zeros, which is exact for integers
                tensor.zero_()
            self._run(group, [tensor], lambda collectives: collectives.all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All-gather a tensor over one of the groups. Return (ranks, ...)."""
        found = tensor.new_empty((group.size(), *tensor.shape))
        self._all_gather(found, tensor.contiguous(), group)
        return found

    def barrier(self) -> None:
        """Wait until all ranks are in this call. If ranks are in different calls, this raises before anything is changed."""
        self.maximum(torch.zeros(1, dtype=torch.uint8, device=self.axis.device))

    # --- large tensors ---

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values to all ranks, in place.

        torch's own broadcast sends each value once, while an all-reduce would send it twice. Its messages carry no tags, so a
        barrier first makes sure that all ranks are in this call.
        """
        if not self.groups:
            return
        self.barrier()
        for tensor in tensors:
            mine = tensor.detach()
            moved = mine.to(self.axis.device).contiguous()
            for group in self.groups:
                source = dist.get_process_group_ranks(group)[0]
                start = partial(dist.broadcast, moved, source, group=group, async_op=True)
                self._send(group, [moved], partial(_as_started, start))
            if moved is not mine:
                mine.copy_(moved)

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        """Exchange parts of 1-D tensors between all ranks of a group.

        Args:
            received: output, with the parts from all ranks in rank order.
            sent: input, with the parts for all ranks in rank order.
            received_sizes: number of elements from each rank.
            sent_sizes: number of elements for each rank.
            group: the process group.
        """
        sizes = list(received_sizes), list(sent_sizes)
        start = partial(dist.all_to_all_single, received, sent, *sizes, group=group, async_op=True)
        self._send(group, [received], partial(_as_started, start))

    def unsharded(self, sharding: ParamSharding, sharded: DTensor) -> Tensor:
        """Return the unsharded tensor that this rank computes with, (sharding.local_shape); one element for a scalar.

        Args:
            sharding: how the parameter is sharded.
            sharded: the parameter or its gradient; it may be sharded in another way.

        Returns:
            A tensor with memory of its own, on the device of the shard.
        """
        if _matches(sharding, sharded):
            return self._unsharded(sharding, sharded)
        return sharding.local_of(self._full_by_dtensor(sharded)).clone()

    def full(self, sharding: ParamSharding, sharded: DTensor) -> Tensor:
        """Return the full tensor, (sharding.shape): unsharded, and all-gathered over tensor parallel ranks as well."""
        if not _matches(sharding, sharded):
            return self._full_by_dtensor(sharded).clone()
        whole = sharding.to_module(self._unsharded(sharding, sharded))
        return whole if sharding.tensor_parallel is None else self._full_by_dtensor(whole).clone()

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
        self.on_axis(sharding.axis)._all_gather(found, part, group)
        return found[: sharding.local_shape[sharding.dim]].movedim(0, sharding.dim).contiguous().to(local.device)

    def _full_by_dtensor(self, sharded: Any) -> Tensor:
        """All-gather with DTensor: for tensor parallelism, tensor subclasses, and gradients that the user sharded differently.

        The collectives of DTensor are not logged. So a barrier first makes sure that all ranks are in this call, and the
        watchdog sees the wait as a wait for that barrier.
        """
        self.barrier()
        wait_state = self._communicator.wait_state
        if wait_state is None or self._last is None:
            return full_tensor(sharded)
        before = wait_state.enter(self._last)
        try:
            return full_tensor(sharded)
        except RuntimeError as failure:
            raise self._communicator.error_for(failure, self._last) from failure
        finally:
            wait_state.leave(before)

    # --- running and logging ---

    def _all_gather(self, out: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        if part.numel():
            # As bytes, since not every backend has every dtype.
            found, mine = out.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)
            self._run(group, [out], lambda collectives: collectives.gatherer([found], [mine])())

    def _run(self, group: dist.ProcessGroup, fulls: Sequence[Tensor], start: Callable[[Collectives], StartedWork]) -> None:
        self._send(group, fulls, partial(start, self._communicator.collectives.of_process_group(group)))

    def _send(self, group: dist.ProcessGroup, fulls: Sequence[Tensor], start: Callable[[], StartedWork]) -> None:
        communicator = self._communicator
        if self._fingerprints is None:
            self._fingerprints = GroupFingerprints(communicator.log_of(self.axis), self._unit_name, self._subject)
        communicator.traffic.record(KIND, fulls, group.size())
        sent = communicator.send(communicator.reduce_scatter_stream, self._fingerprints, self._doing, start)
        sent.wait()
        self._last = sent


def _as_started(begin: Callable[[], Any]) -> StartedWork:
    return StartedWork((begin(),))


def _matches(sharding: ParamSharding, sharded: DTensor) -> bool:
    plain = type(_torch.local_tensor(sharded)) is Tensor
    return plain and sharded.device_mesh == sharding.mesh and tuple(sharded.placements) == sharding.placements


__all__ = ["KIND", "SetupCollectives"]
