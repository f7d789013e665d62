"""The pool of collectives: one object per process group and role, kept as long as it is used."""

from __future__ import annotations

import weakref
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
        # Weak, so that collectives are freed when no parameter group uses them.
        self._collectives: weakref.WeakValueDictionary[tuple[int, str], ObservedCollectives] = weakref.WeakValueDictionary()
        self._bare: dict[dist.ProcessGroup, Collectives] = {}

    def of_process_group(self, group: dist.ProcessGroup) -> Collectives:
        """Return the collectives of one process group, without a counter: the caller counts its messages."""
        found = self._bare.get(group)
        if found is None:
            self._bare = {other: one for other, one in self._bare.items() if _torch.is_alive(other)}
            found = self._bare[group] = collectives_for(group, self._device, self.message_tag)
        return found

    def of_axis(self, axis: ShardAxis, options: UnitOptions) -> GroupCollectives:
        """Return the collectives of parameter groups on an axis. Collective, since it may create process groups.

        Raises ValueError for custom collectives that do not fit the mesh.
        """
        if axis.hybrid is not None:
            return replace(self.of_axis(axis.hybrid, options), whole=self._known(axis, "shard", axis.group, options.comm))
        gather = reduce = self._main_collectives(axis, options.comm)
        if options.separate_reduce and axis.group is not None and axis.ranks > 1:
            reduce = self._known(axis, "reduce", dist.get_process_group_ranks(axis.group), options.comm)
        if axis.group is not None:
            if options.gather_adapter is not None:
                adapted = options.gather_adapter(gather.inner, axis.group)
                gather = ObservedCollectives(adapted, self.traffic, keeps=gather)
            if options.reduce_adapter is not None:
                adapted = options.reduce_adapter(reduce.inner, axis.group)
                reduce = ObservedCollectives(adapted, self.traffic, keeps=reduce)
        replicate = retain = None
        if axis.replicas is not None:
            replicate = self._known(axis, "replicate", axis.replicas.group, options.comm)
        if options.subgroup_size is not None and axis.group is not None and axis.ranks % options.subgroup_size == 0:
            first = axis.rank - axis.rank % options.subgroup_size
            ranks = dist.get_process_group_ranks(axis.group)[first : first + options.subgroup_size]
            if len(ranks) < axis.ranks:
                retain = self._known(axis, f"retain {options.subgroup_size}", ranks, options.comm)
        return GroupCollectives(gather, reduce, replicate, gather, retain, self.traffic)

    def _main_collectives(self, axis: ShardAxis, comm: CommPolicy) -> ObservedCollectives:
        found = self._known(axis, "shard" if axis.group is not None else "alone", axis.group, comm)
        if (found.ranks, found.rank) != (axis.ranks, axis.rank):
            raise ValueError(
                f"Expected CommPolicy.collectives to return the collectives of rank {axis.rank} of {axis.ranks}, as in the "
                f"mesh, got rank {found.rank} of {found.ranks}."
            )
        return found

    def _known(
        self, axis: ShardAxis, role: str, group: dist.ProcessGroup | list[int] | None, comm: CommPolicy
    ) -> ObservedCollectives:
        """Return the collectives of a process group of `axis` for a role; one object as long as it is used.

        Args:
            axis: the axis.
            role: purpose of the collectives.
            group: the process group, or the ranks of a new one; None without communication.
            comm: the policy, which may have custom collectives.
        """
        owner = axis.group if axis.group is not None or axis.replicas is None else axis.replicas.group
        made: dist.ProcessGroup | None
        if isinstance(group, list):
            assert axis.group is not None
            made = subgroup_of(axis.group, role, group)
        else:
            made = group
        if comm.collectives is not None and made is not None:
            given = comm.collectives(made)
            if isinstance(getattr(given, "tag", None), MessageTag):
                given.tag = self.message_tag
            return ObservedCollectives(given, self.traffic)
        key = (id(owner), role if role != "replicate" or axis.replicas is None else f"replicate {id(axis.replicas.group)}")
        found = self._collectives.get(key)
        if found is None:
            found = ObservedCollectives(collectives_for(made, axis.device, self.message_tag), self.traffic, keeps=owner)
            self._collectives[key] = found
        return found
