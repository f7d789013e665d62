"""The pool of collectives: one object per process group, and what the options of a unit make of them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives
from fullshard.comm.gloo import MessageTag
from fullshard.comm.traffic import ObservedCollectives, TrafficCounter
from fullshard.core.mesh import ShardAxis, subgroup_of
from fullshard.core.unit_options import UnitOptions
from fullshard.core.unsharded_buffer import GroupCollectives
from fullshard.policies import CommPolicy


class CollectivesPool:
    """Creates the collectives of axes, as the options of units require.

    They are the backend's, the user's own (`CommPolicy(collectives=)`), or what an adapter makes of these.

    Attributes:
        traffic: counts the messages.
        message_tag: the tag of the next messages, on backends whose messages carry tags.
    """

    def __init__(self, device: torch.device, traffic: TrafficCounter, message_tag: MessageTag) -> None:
        self._device, self.traffic, self.message_tag = device, traffic, message_tag
        self._known: dict[dist.ProcessGroup, Collectives] = {}

    def of_process_group(self, group: dist.ProcessGroup | None) -> Collectives:
        """Return the collectives of one process group, without a counter: the caller counts its messages."""
        if group is None:
            return collectives_for(None, self._device)
        found = self._known.get(group)
        if found is None:
            self._known = {other: one for other, one in self._known.items() if _torch.is_alive(other)}
            found = self._known[group] = collectives_for(group, self._device, self.message_tag)
        return found

    def of_axis(self, axis: ShardAxis, options: UnitOptions) -> GroupCollectives:
        """Return the collectives of parameter groups on an axis. Collective, since it may create process groups.

        Raises ValueError for custom collectives that do not fit the mesh.
        """
        group, comm = axis.group, options.comm
        if axis.hybrid is not None:
            return replace(self.of_axis(axis.hybrid, options), whole=self._observed(group, comm))
        gather = reduce = self._observed(group, comm)
        if (gather.ranks, gather.rank) != (axis.ranks, axis.rank):
            raise ValueError(
                f"Expected CommPolicy.collectives to return the collectives of rank {axis.rank} of {axis.ranks}, as in the "
                f"mesh, got rank {gather.rank} of {gather.ranks}."
            )
        replicate = None if axis.replicas is None else self._observed(axis.replicas.group, comm)
        if group is None:
            return GroupCollectives(gather, reduce, replicate, gather, None, self.traffic)
        ranks, kept, retain = dist.get_process_group_ranks(group), options.subgroup_size, None
        if options.separate_reduce and axis.ranks > 1:
            reduce = self._observed(subgroup_of(group, "reduce", ranks), comm)
        if options.gather_adapter is not None:
            gather = ObservedCollectives(options.gather_adapter(gather.inner, group), self.traffic)
        if options.reduce_adapter is not None:
            reduce = ObservedCollectives(options.reduce_adapter(reduce.inner, group), self.traffic)
        if kept is not None and kept < axis.ranks and axis.ranks % kept == 0:
            first = axis.rank - axis.rank % kept
            retain = self._observed(subgroup_of(group, f"retain {kept}", ranks[first : first + kept]), comm)
        return GroupCollectives(gather, reduce, replicate, gather, retain, self.traffic)

    def _observed(self, group: dist.ProcessGroup | None, comm: CommPolicy) -> ObservedCollectives:
        """Return the collectives of a process group, or those that the policy has for it."""
        if comm.collectives is None or group is None:
            return ObservedCollectives(self.of_process_group(group), self.traffic)
        given = comm.collectives(group)
        if isinstance(getattr(given, "tag", None), MessageTag):
            given.tag = self.message_tag
        return ObservedCollectives(given, self.traffic)
