"""The vote of the ranks on whether a step failed anywhere, so that all of them skip it and go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.collectives.backends import collectives_for
from fullshard.collectives.base import Collectives
from fullshard.collectives.gloo import MessageTag, channels
from fullshard.collectives.process_groups import held, on_release
from fullshard.consistency.collective_log import CollectiveLog, GroupFingerprints, UnitName, headline
from fullshard.consistency.local_state import MEETING, WaitState
from fullshard.consistency.process import watchdog_of
from fullshard.consistency.watchdog import Watchdog
from fullshard.errors import StateError
from fullshard.runtime.runtime import Runtime
from fullshard.sharding.mesh import resolve_mesh


class FailureVote:
    """A place for the ranks of a mesh to vote, with a log of its own: it works wherever their other logs have parted."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.ranks = tuple(mesh.mesh.flatten().tolist())
        name = f"{MEETING}{crc32(repr(self.ranks).encode()):08x} {tuple(mesh.mesh.shape)}"
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
            self.watch.add(self._log)
            self._wait_state = self.watch.new_wait_state()

    @property
    def is_released(self) -> bool:
        """Whether its process groups were destroyed."""
        return any(one.is_released for one in self._held)

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so (collective)."""
        for collectives in self._collectives:
            entry = self._fingerprints.log_call("any_failed()")
            message = torch.tensor([flag], dtype=torch.uint8, device=self.device)
            self._tag.hash, self._tag.gate = self._log.hash, self._log
            before = self._wait_state.enter(entry)
            try:
                pending = collectives.all_reduce_max(message)
                for work in pending.works:
                    work.wait()
                if pending.then is not None:
                    pending.then()
            except Exception as failure:
                where = "" if self.watch is None else self.watch.survey(self._log)
                raise StateError(f"rank {self._log.rank}, any_failed(): {headline(failure)}. {where}") from failure
            finally:
                self._wait_state.leave(before)
            flag = bool(message.item())
        return flag


_NUMBERS: _torch.PerRank[str, Iterator[int]] = _torch.PerRank()
_VOTES: _torch.PerRank[int, FailureVote] = _torch.PerRank()
_WORLD: _torch.PerRank[int, tuple[object, DeviceMesh]] = _torch.PerRank()  # the default process group, and the mesh of all


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
        raise ValueError(f"any_failed takes a DeviceMesh or None, got {type(mesh).__name__}")
    found = _VOTES.get(id(mesh))
    if found is None or found.mesh is not mesh:
        found = _VOTES[id(mesh)] = FailureVote(mesh)
    return found


def any_failed(mesh: DeviceMesh | None = None, failed: object = False) -> bool:
    """Whether the step failed on any rank of `mesh`, so that all of them skip it together. Collective.

    If so, every rank forgets the step: what was gathered is freed, and gradients that are not in a `.grad` yet (on their way,
    or kept by accumulation) are discarded on all ranks alike. The next forward is right. Gradients that were assigned
    before stay, until `zero_grad()`.

    With gloo the ranks need not have failed at the same place: those that wait for a rank that is here already
    raise StateError where they are, and come here too. Other backends cannot end a wait; there, call it for
    failures that happen between collectives (data, losses) or alike on all ranks.

    Args:
        mesh: the ranks that run the same program; None means all.
        failed: whether it failed on this rank: a bool, or the exception or None.

    Returns:
        Whether any rank failed: the same on every rank.

    Raises:
        ValueError: if `mesh` is no DeviceMesh, or None where there is no process group and the environment names none.
        StateError: if a rank of the mesh is gone.

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
            log.silence(True)
        result = vote.agree(bool(failed))
        if result:
            _restart_together(vote, runtimes, logs)
    finally:
        for log in logs:
            log.silence(False)
    return result


def _restart_together(vote: FailureVote, runtimes: Sequence[Runtime], logs: Sequence[CollectiveLog]) -> None:
    """Forget on all ranks what any of them was in the midst of."""
    for log in logs:
        log.close("the step failed on some rank, and any_failed() is under way")
    if vote.watch is not None:
        vote.watch.publish_state()
    vote.agree(True)  # now every rank has published what it waits for
    if vote.watch is not None:
        for log in logs:
            vote.watch.answer_peers(log)
    for runtime in runtimes:
        runtime.recovery.abort_step()
    vote.agree(True)  # now no rank waits for anything
    with vote.watch.paused() if vote.watch is not None else nullcontext():  # the watchdog has read states of the old epoch
        for channel in channels():
            if set(vote.ranks).issuperset(channel.members):
                channel.forget_answers()
        for log in logs:
            log.start_epoch()


__all__ = ["any_failed"]
