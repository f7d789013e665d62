"""The collectives of process groups, one object per group and role as long as it is used."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from fullshard.collectives.backends import collectives_for
from fullshard.collectives.base import Collectives
from fullshard.collectives.custom import CustomCollectives
from fullshard.collectives.gloo import MessageTag
from fullshard.collectives.process_groups import HeldGroup, held
from fullshard.collectives.traffic import CountedCollectives, TrafficCounter
from fullshard.params.unsharded import GroupCollectives
from fullshard.policies import CommPolicy
from fullshard.runtime.options import UnitOptions
from fullshard.sharding.mesh import ShardAxis, beside


class CollectivesPool:
    """Makes collectives for axes, by the options of units: of the backend, of the caller, in memory of the caller's."""

    def __init__(self, device: torch.device, traffic: TrafficCounter, message_tag: MessageTag) -> None:
        """`traffic`: counts the messages. `message_tag`: what they bear, where they bear tags."""
        self._device, self.traffic, self.message_tag = device, traffic, message_tag
        self._collectives: weakref.WeakValueDictionary[tuple[int, str], CountedCollectives] = weakref.WeakValueDictionary()
        self._bare: weakref.WeakKeyDictionary[HeldGroup, Collectives] = weakref.WeakKeyDictionary()

    def of_process_group(self, group: dist.ProcessGroup) -> Collectives:
        """Collectives on one process group of an axis, which are counted by the caller."""
        found = self._bare.get(held(group))
        if found is None:
            found = self._bare[held(group)] = collectives_for(group, self._device, self.message_tag)
        return found

    def of_axis(self, axis: ShardAxis, options: UnitOptions) -> GroupCollectives:
        """The collectives of parameter groups on an axis. May make process groups, so it is collective over the axis.

        Raises ValueError for collectives of the caller's that do not fit.
        """
        gather = reduce = self._main_collectives(axis, options.comm)
        if options.separate_reduce and axis.group is not None and axis.ranks > 1:
            reduce = self._known(axis, "reduce", dist.get_process_group_ranks(axis.group), options.comm)
        if axis.group is not None:
            asynchronous = self._device.type == "cpu"
            if options.all_gather is not None or options.memory is not None:
                custom = CustomCollectives(
                    gather.inner, axis.group, options.memory, all_gather=options.all_gather, asynchronous=asynchronous
                )
                gather = CountedCollectives(custom, self.traffic, keeps=gather)
            if options.reduce_scatter is not None or options.memory is not None:
                custom = CustomCollectives(
                    reduce.inner, axis.group, options.memory, reduce_scatter=options.reduce_scatter, asynchronous=asynchronous
                )
                reduce = CountedCollectives(custom, self.traffic, keeps=reduce)
        replicate = retain = None
        if axis.replicas is not None:
            replicate = self._known(axis, "replicate", axis.replicas.group, options.comm)
        if options.subgroup_size is not None and axis.group is not None and axis.ranks % options.subgroup_size == 0:
            first = axis.rank - axis.rank % options.subgroup_size
            ranks = dist.get_process_group_ranks(axis.group)[first : first + options.subgroup_size]
            if len(ranks) < axis.ranks:
                retain = self._known(axis, f"retain {options.subgroup_size}", ranks, options.comm)
        return GroupCollectives(gather, reduce, replicate, retain, self.traffic)

    def _main_collectives(self, axis: ShardAxis, comm: CommPolicy) -> CountedCollectives:
        found = self._known(axis, "shard" if axis.group is not None else "alone", axis.group, comm)
        if (found.ranks, found.rank) != (axis.ranks, axis.rank):
            raise ValueError(
                f"CommPolicy.collectives must give collectives of rank {axis.rank} of {axis.ranks}, as the mesh has it, "
                f"got rank {found.rank} of {found.ranks}"
            )
        return found

    def _known(
        self, axis: ShardAxis, role: str, group: dist.ProcessGroup | list[int] | None, comm: CommPolicy
    ) -> CountedCollectives:
        """Collectives of one process group of `axis` (or of a new one of these ranks), one object as long as it is used."""
        owner = axis.held if axis.held is not None or axis.replicas is None else axis.replicas.held
        made: dist.ProcessGroup | None
        if isinstance(group, list):
            assert axis.group is not None
            made = beside(axis.group, role, group)
        else:
            made = group
        if comm.collectives is not None and made is not None:
            given = comm.collectives(made)
            if isinstance(getattr(given, "tag", None), MessageTag):
                given.tag = self.message_tag
            return CountedCollectives(given, self.traffic)
        key = (id(owner), role if role != "replicate" or axis.replicas is None else f"replicate {id(axis.replicas.held)}")
        found = self._collectives.get(key)
        if found is None:
            found = CountedCollectives(collectives_for(made, axis.device, self.message_tag), self.traffic, keeps=owner)
            self._collectives[key] = found
        return found


__all__ = ["CollectivesPool"]
