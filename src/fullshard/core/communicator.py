"""The communicator: the collectives of process groups, and the log of the collectives of each axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, GroupFingerprints, described, headline
from fullshard.checks.watchdog import watchdog_of
from fullshard.comm.backends import carries_tags, collectives_for
from fullshard.comm.base import Collectives
from fullshard.comm.gloo import MessageTag
from fullshard.comm.streams import Lane, Streams
from fullshard.comm.traffic import ObservedCollectives, TrafficCounter
from fullshard.core.mesh import ShardAxis, subgroup_of, with_subgroups
from fullshard.core.unit_options import UnitOptions
from fullshard.core.unsharded_buffer import GroupCollectives
from fullshard.errors import warn_once
from fullshard.policies import CheckPolicy, CommPolicy

_LOG_COUNTERS: dict[str, Iterator[int]] = {}  # by name of an axis: counts its logs


def _log_name(axis: ShardAxis) -> str:
    """Return the name of a new log of an axis, equal on all ranks if a thread makes its logs in the same order on each."""
    name = f"{crc32(repr(axis.members).encode()):08x} {tuple(axis.mesh.mesh.shape)}"
    if axis.group is not None and axis.replicas is None:  # with replicas, ranks have groups of different names
        # Count the logs of each group, since threads interleave differently on each rank.
        name = f"{name} {axis.group.group_name}"
    return f"{name} {next(_LOG_COUNTERS.setdefault(name, itertools.count()))}"


def abort_groups(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Abort process groups whose collectives cannot complete, so that no thread waits for them any more."""
    for group in with_subgroups(groups):
        try:
            _torch.abort_group(group, device)
        except Exception as failure:
            warn_once(
                f"fullshard cannot abort a process group whose collectives do not complete ({headline(failure)}), so this "
                "rank may hang. End its process."
            )


class Communicator(Streams):
    """Runs, logs and counts the collectives of one runtime. Keeps the collectives of each process group, and a log per axis."""

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        super().__init__(device, lanes)
        self.traffic = TrafficCounter()
        self._collectives: dict[dist.ProcessGroup, Collectives] = {}
        # By `ShardAxis.key`. The process groups are kept alive, since the key contains their ids.
        self._logs: dict[tuple[int, int], tuple[CollectiveLog, list[dist.ProcessGroup]]] = {}
        self._limits: tuple[float, float | None] = (1.0, None)  # patience and timeout in seconds

    # --- logs ---

    def log_of(self, axis: ShardAxis) -> CollectiveLog:
        """Return the log of an axis: the same log as long as the process groups of the axis exist."""
        if axis.hybrid is not None:  # its two hops run over the groups of the hybrid axis, so they are in that axis's log
            self.log_of(axis.hybrid)
            log, groups = self._logs[axis.hybrid.key]
            if axis.group is not None and axis.group not in groups:
                groups.append(axis.group)  # so that `log.abort` aborts it, too
            return log
        if axis.key in self._logs:
            return self._logs[axis.key][0]
        for key, (other, its_groups) in list(self._logs.items()):
            if not all(map(_torch.is_alive, its_groups)):
                other.abort = None  # which refers to the groups
                del self._logs[key]
        groups = [group for group in (axis.group, axis.replicas.group if axis.replicas else None) if group is not None]
        log = CollectiveLog(_log_name(axis), axis.members, dist.get_rank())
        self._logs[axis.key] = log, groups
        if len(axis.members) > 1 and groups:
            backend = _torch.backend_name(groups[0], axis.device)
            log.tagged = self.async_device is None and carries_tags(backend, axis.device)
            watchdog = watchdog_of(backend)
            if watchdog is not None:
                if watchdog is not self.watchdog:  # the first one, or a new one after the process groups were destroyed
                    self.watchdog, self.wait_state = watchdog, watchdog.new_wait_state()
                    self.wait_state.patience, self.wait_state.timeout = self._limits
                log.abort = partial(abort_groups, groups, self.device)
                watchdog.add(log)
        return log

    def logs(self) -> list[CollectiveLog]:
        """Return the logs of all axes."""
        return [log for log, _ in self._logs.values()]

    def report_exception(self, place: str, failure: str | None = None) -> None:
        """Note in all logs that an exception left `place`, so that the watchdog publishes it to ranks that wait for this one.

        The note is void once this rank logs another call. `failure`: text of the exception; None if the caller cannot see it.
        """
        for log in self.logs():
            log.note_exception(place, failure)
        if self.watchdog is not None:
            self.watchdog.follow_peers()

    @contextmanager
    def reporting_exceptions(self, place: str) -> Iterator[None]:
        """Report to the other ranks, with `place`, an exception that leaves the block, and raise it again."""
        try:
            yield
        except Exception as failure:
            self.report_exception(place, described(failure))
            raise

    def roll_blocks(self) -> None:
        """Drop old calls from the logs when a step begins. Otherwise only reading a hash (heartbeats, tags) drops them."""
        for log, _ in self._logs.values():
            log.roll_block()

    def update_timeouts(self, checks: Sequence[CheckPolicy]) -> None:
        """Set patience and timeout to the shortest ones of `checks`, the check policies of all units."""
        timeouts = [check.timeout for check in checks if check.timeout is not None]
        self._limits = min((check.patience for check in checks), default=1.0), min(timeouts, default=None)
        if self.wait_state is not None:
            self.wait_state.patience, self.wait_state.timeout = self._limits

    # --- collectives ---

    def collectives_of_group(self, group: dist.ProcessGroup | None) -> Collectives:
        """Return the collectives of one process group, without a counter of messages, which `_observed` adds."""
        if group is None:
            return collectives_for(None, self.device)
        found = self._collectives.get(group)
        if found is None:
            self._collectives = {other: one for other, one in self._collectives.items() if _torch.is_alive(other)}
            found = self._collectives[group] = collectives_for(group, self.device, self.message_tag)
        return found

    def collectives_of(self, axis: ShardAxis, options: UnitOptions) -> GroupCollectives:
        """Return the collectives of parameter groups on an axis. Collective, since it may create process groups.

        They are the backend's, the user's own (`CommPolicy(collectives=)`), or what an adapter makes of these.
        Raises ValueError for custom collectives that do not fit the mesh.
        """
        group, comm = axis.group, options.comm
        if axis.hybrid is not None:
            return replace(self.collectives_of(axis.hybrid, options), whole=self._observed(group, comm))
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
        """Return the collectives of a process group, counted: those that the policy returns for it, else the backend's."""
        if comm.collectives is None or group is None:
            return ObservedCollectives(self.collectives_of_group(group), self.traffic)
        given = comm.collectives(group)
        if isinstance(getattr(given, "tag", None), MessageTag):
            given.tag = self.message_tag
        return ObservedCollectives(given, self.traffic)

    def all_reduce(
        self, axis: ShardAxis, fingerprints: GroupFingerprints, action: str, tensor: Tensor, *, maximum: bool = False
    ) -> None:
        """All-reduce a tensor over the shards (sum, or maximum), in place, and wait for it."""
        assert axis.group is not None
        collectives = self.collectives_of_group(axis.group)
        reduce = collectives.all_reduce_max if maximum else collectives.all_reduce
        self.send(self.reduce_scatter_stream, fingerprints, action, partial(reduce, tensor)).wait()
