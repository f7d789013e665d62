"""`any_failed`: agreement of all ranks that a step failed on at least one of them, so that all ranks skip it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName, headline
from fullshard.checks.state import WaitState
from fullshard.checks.watchdog import watchdog_of
from fullshard.comm.backends import carries_tags, collectives_for
from fullshard.comm.gloo import MessageTag
from fullshard.comm.streams import HostStream, nothing
from fullshard.core import Runtime, abort_groups, resolve_mesh
from fullshard.errors import StateError

_CALL = Fingerprint(UnitName(""), "any_failed()", "any_failed()")


class FailureVote:
    """Reduction of failure flags over the ranks of a mesh, with a collective log of its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks = tuple(mesh.mesh.flatten().tolist())
        self.groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._device = _torch.device_of(mesh.device_type)
        self._tag = MessageTag()
        self._collectives = [collectives_for(group, self._device, self._tag) for group in self.groups]
        name = f"any_failed {crc32(repr(self.ranks).encode()):08x} {tuple(mesh.mesh.shape)}"
        self.log = CollectiveLog(
            f"{name} {next(_NUMBERS.setdefault(name, itertools.count()))}", self.ranks, _torch.global_rank()
        )
        self._fingerprints = GroupFingerprints(self.log, UnitName(""), "")
        backend = _torch.backend_name(self.groups[0], self._device) if self.groups else None
        self._watchdog = None if backend is None else watchdog_of(backend)
        self._wait_state = WaitState()
        if self._watchdog is not None and backend is not None:
            self.log.tagged = carries_tags(backend, self._device)
            self.log.abort = partial(abort_groups, self.groups, self._device)
            self._watchdog.add(self.log)
            self._wait_state = self._watchdog.new_wait_state()

    def any_true(self, flag: bool) -> bool:
        """Return True if `flag` is True on any rank. Collective."""
        for collectives in self._collectives:
            call = self._fingerprints.log_call("any_failed()")
            message = torch.tensor([flag], dtype=torch.uint8, device=self._device)
            self._tag.hash = self.log.hash
            before = self._wait_state.enter(call)
            try:
                HostStream().run(partial(collectives.all_reduce_max, message), nothing).wait()
                flag = bool(message.item())  # on an asynchronous device the host waits here
            except Exception as failure:
                self.log.check_open()
                where = "" if self._watchdog is None else self._watchdog.describe_peers(self.log)
                self.log.check_open()  # while the other ranks replied, the watchdog may have found the cause
                raise StateError(f"rank {self.log.rank}, any_failed(): {headline(failure)}. {where}") from failure
            finally:
                self._wait_state.leave(before)
            self.log.check_open()
        return flag


_NUMBERS: dict[str, Iterator[int]] = {}
# By the process groups of the mesh dims, and its shape: a slice of a mesh is a new object each time. A vote holds the groups,
# so their ids are not reused.
_VOTES: dict[tuple[object, ...], FailureVote] = {}
# The default process group, and the mesh of all ranks.
_WORLD: dict[int, tuple[object, DeviceMesh]] = {}


def _vote_of(mesh: DeviceMesh | None) -> FailureVote:
    if mesh is None:
        world = dist.group.WORLD
        if not _WORLD or _WORLD[0][0] is not world:
            _WORLD[0] = world, resolve_mesh(None, None).mesh
        mesh = _WORLD[0][1]
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"any_failed takes a DeviceMesh or None, got {type(mesh).__name__}.")
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    key = mesh.device_type, tuple(mesh.mesh.shape), *map(id, groups), *(() if groups else mesh.mesh.flatten().tolist())
    found = _VOTES.get(key)
    if found is None:
        for other, vote in list(_VOTES.items()):
            if not all(map(_torch.is_alive, vote.groups)):
                del _VOTES[other]
        found = _VOTES[key] = FailureVote(mesh)
    return found


def any_failed(mesh: DeviceMesh | None = None, failed: object = False) -> bool:
    """Return True on all ranks if the step failed on any rank of `mesh`, so that all ranks skip it together. Collective.

    Use it for failures *between* collectives: call it on all ranks at the same place, after what may fail on some of them (the
    loading of a batch, the loss), and before the next forward, backward or optimizer step. If a rank raised where others went
    on to a collective of a unit, they wait for a rank that is in `any_failed`, and all ranks raise StateError: the ranks have
    diverged, their process groups are aborted, and the program must end.

    If a rank failed, all ranks reset the step: unsharded parameters are freed, and gradients that are not in a `.grad` yet
    (reductions in flight, or accumulated gradients) are discarded. The next forward starts from a clean state. A `.grad` that
    was set before remains until `zero_grad()`. Weights stay as they are.

    Args:
        mesh: the ranks that run the same program; None means all ranks.
        failed: the outcome on this rank: a bool, or the exception, or None.

    Returns:
        True if any rank failed. The result is equal on all ranks.

    Raises:
        ValueError: if `mesh` is not a DeviceMesh, or if it is None without a process group and without torchrun's environment.
        StateError: if ranks have diverged, or a rank of the mesh has exited.

    Example:
        >>> error = None                                                                      # doctest: +SKIP
        >>> try:                                                                              # doctest: +SKIP
        ...     batch = next(batches)
        ... except OSError as caught:
        ...     error = caught
        >>> if fullshard.any_failed(mesh, error):                                             # doctest: +SKIP
        ...     continue
        >>> model(batch).mean().backward()                                                    # doctest: +SKIP
    """
    vote = _vote_of(mesh)
    runtimes = Runtime.all_of_thread()
    inside = set(vote.ranks)
    logs = [log for runtime in runtimes for log in runtime.communicator.logs() if inside.issuperset(log.ranks)]
    # A rank that waits for this one in a collective of a unit finds the difference in its own log.
    for log in logs:
        log.append(_CALL)
        log.followers = (vote.log,)
    try:
        result = vote.any_true(bool(failed))
    finally:
        for log in logs:
            log.followers = ()
    if result:
        for runtime in runtimes:
            runtime.recovery.abort_step()
    return result
