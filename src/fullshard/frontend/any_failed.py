"""`any_failed`: agreement of all ranks that a step failed on at least one of them, so that all ranks skip it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, GroupFingerprints, UnitName, headline
from fullshard.checks.state import ANY_FAILED_PREFIX, WaitState
from fullshard.checks.watchdog import Watchdog, watchdog_of
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives
from fullshard.comm.gloo import MessageTag, channels
from fullshard.comm.process_groups import held, on_release
from fullshard.comm.streams import HostStream, nothing
from fullshard.core.communicator import abort_groups
from fullshard.core.mesh import resolve_mesh
from fullshard.core.runtime import Runtime
from fullshard.errors import StateError


class FailureVote:
    """Reduction of failure flags over the ranks of a mesh.

    It has a separate collective log, so it works even where the other logs of the ranks have diverged.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.ranks = tuple(mesh.mesh.flatten().tolist())
        name = f"{ANY_FAILED_PREFIX}{crc32(repr(self.ranks).encode()):08x} {tuple(mesh.mesh.shape)}"
        self._tag = MessageTag()
        self.device = _torch.device_of(mesh.device_type)
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._held = [held(group) for group in groups]
        self._collectives: list[Collectives] = [collectives_for(group, self.device, self._tag) for group in groups]
        self.watch: Watchdog | None = watchdog_of(_torch.backend_name(groups[0], self.device)) if groups else None
        self._log = CollectiveLog(
            f"{name} {next(_NUMBERS.setdefault(name, itertools.count()))}", self.ranks, _torch.global_rank()
        )
        self._fingerprints = GroupFingerprints(self._log, UnitName(""), "")
        self._wait_state = WaitState()
        if self.watch is not None:
            if self.device.type != "cpu":
                self._log.abort = partial(abort_groups, self._held, self.device)
            self.watch.add(self._log)
            self._wait_state = self.watch.new_wait_state()

    @property
    def is_released(self) -> bool:
        """True if a process group of the mesh was destroyed."""
        return any(one.is_released for one in self._held)

    def any_true(self, flag: bool) -> bool:
        """Return True if `flag` is True on any rank. Collective."""
        for collectives in self._collectives:
            entry = self._fingerprints.log_call("any_failed()")
            message = torch.tensor([flag], dtype=torch.uint8, device=self.device)
            self._tag.hash, self._tag.gate = self._log.hash, self._log
            before = self._wait_state.enter(entry)
            try:
                HostStream().run(partial(collectives.all_reduce_max, message), nothing).wait()
                flag = bool(message.item())  # on an asynchronous device the host waits here
            except Exception as failure:
                where = "" if self.watch is None else self.watch.describe_peers(self._log)
                raise StateError(f"rank {self._log.rank}, any_failed(): {headline(failure)}. {where}") from failure
            finally:
                self._wait_state.leave(before)
            if self._log.desync_error is not None:  # the watchdog ended the wait, so the message has no meaning
                raise StateError(self._log.desync_error)
        return flag


_NUMBERS: dict[str, Iterator[int]] = {}
# By the process groups of the mesh dims, and its shape: a slice of a mesh is a new object each time. A vote holds the handles,
# so their ids are not reused.
_VOTES: dict[tuple[object, ...], FailureVote] = {}
# The default process group, and the mesh of all ranks.
_WORLD: dict[int, tuple[object, DeviceMesh]] = {}


@on_release
def _forget_votes() -> None:
    for key, vote in list(_VOTES.items()):
        if vote.is_released:
            del _VOTES[key]
    if _WORLD and not _torch.is_alive(_WORLD[0][0]):
        _WORLD.clear()


def _vote_of(mesh: DeviceMesh | None) -> FailureVote:
    if mesh is None:
        world = dist.group.WORLD
        if not _WORLD or _WORLD[0][0] is not world:
            _WORLD[0] = world, resolve_mesh(None, None).mesh
        mesh = _WORLD[0][1]
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"any_failed takes a DeviceMesh or None, got {type(mesh).__name__}.")
    handles = [held(mesh.get_group(dim)) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    key = mesh.device_type, tuple(mesh.mesh.shape), *map(id, handles), *(() if handles else mesh.mesh.flatten().tolist())
    found = _VOTES.get(key)
    if found is None:
        found = _VOTES[key] = FailureVote(mesh)
    return found


def any_failed(mesh: DeviceMesh | None = None, failed: object = False) -> bool:
    """Return True on all ranks if the step failed on any rank of `mesh`, so that all ranks skip it together. Collective.

    If a rank failed, all ranks reset the step: unsharded parameters are freed, and gradients that are not in a `.grad` yet
    (reductions in flight, or accumulated gradients) are discarded. The next forward starts from a clean state. A `.grad` that
    was set before remains until `zero_grad()`. Weights stay as they are: if only some ranks have stepped, or written to their
    shards, the next forward raises on all ranks, until a checkpoint is loaded.

    With gloo, ranks may fail at different points: a rank that waits for a rank that is already in `any_failed` raises
    StateError at its current point, and can then call `any_failed` too. With nccl that rank raises as well, but its process
    group is aborted, so no step can follow. There, use it for failures between collectives (data, losses), or failures on all
    ranks at the same point.

    Args:
        mesh: the ranks that run the same program; None means all ranks.
        failed: the outcome on this rank: a bool, or the exception, or None.

    Returns:
        True if any rank failed. The result is equal on all ranks.

    Raises:
        ValueError: if `mesh` is not a DeviceMesh, or if it is None without a process group and without torchrun's environment.
        StateError: if a rank of the mesh has exited.

    Example:
        >>> error = None                                                                      # doctest: +SKIP
        >>> try:                                                                              # doctest: +SKIP
        ...     model(batch).mean().backward()
        ... except RuntimeError as caught:
        ...     error = caught
        >>> if fullshard.any_failed(mesh, error):                                             # doctest: +SKIP
        ...     optimizer.zero_grad()
        ... else:
        ...     optimizer.step()
    """
    vote = _vote_of(mesh)
    runtimes = Runtime.all_of_thread()
    inside = set(vote.ranks)
    logs = [log for runtime in runtimes for log in runtime.communicator.logs() if inside.issuperset(log.ranks)]
    try:
        for log in logs:
            log.set_silent(True)
        result = vote.any_true(bool(failed))
        if result:
            _reset_all_ranks(vote, runtimes, logs)
    finally:
        for log in logs:
            log.set_silent(False)
    return result


def _reset_all_ranks(vote: FailureVote, runtimes: Sequence[Runtime], logs: Sequence[CollectiveLog]) -> None:
    """Abort the interrupted step on all ranks, and start a new epoch of their logs."""
    for log in logs:
        log.close("the step failed on some rank, and any_failed() is running")
    if vote.watch is not None:
        vote.watch.publish_state()
    vote.any_true(True)  # barrier: every rank has published its pending collectives
    if vote.watch is not None:
        for log in logs:
            vote.watch.drain_peers(log)
    for runtime in runtimes:
        runtime.recovery.abort_step()
    vote.any_true(True)  # barrier: no rank waits for a collective of the old epoch
    with vote.watch.paused() if vote.watch is not None else nullcontext():  # a check must not see old and new epochs
        for channel in channels():
            if set(vote.ranks).issuperset(channel.members):
                channel.forget_answers()
        for log in logs:
            log.start_epoch()


__all__ = ["any_failed"]
