"""`any_failed`: agreement of all ranks that a step failed on at least one of them, so that all ranks skip it."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.core import Agreement, Fingerprint, Runtime, ShardAxis, UnitName, resolve_mesh
from fullshard.policies import CommPolicy

_CALL = Fingerprint(UnitName(""), "any_failed()", "any_failed()")

# By type of device and process group: a slice of a mesh is a new object each time.
_AXES: dict[tuple[str, dist.ProcessGroup], ShardAxis] = {}


@lru_cache(maxsize=1)
def _mesh_of_all(_world: object) -> DeviceMesh:
    """Return the mesh of all ranks, anew for each default process group."""
    return resolve_mesh(None).mesh


def _axis_of(mesh: DeviceMesh, dim: int) -> ShardAxis:
    """Return the axis of one dim of a mesh."""
    key = mesh.device_type, mesh.get_group(dim)
    if key not in _AXES:
        for other in [other for other in _AXES if not _torch.is_alive(other[1])]:
            del _AXES[other]
        kind, group = key
        line = _torch.mesh_of_groups(kind, torch.tensor(dist.get_process_group_ranks(group)), [group], ("any_failed",))
        _AXES[key] = ShardAxis(line, group, group.size(), group.rank(), _torch.device_of(kind))
    return _AXES[key]


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
        >>> if not fullshard.any_failed(mesh, error):                                         # doctest: +SKIP
        ...     model(batch).mean().backward()
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"any_failed takes a DeviceMesh or None, got {type(mesh).__name__}.")
    mesh = _mesh_of_all(dist.group.WORLD) if mesh is None else mesh
    axes = [_axis_of(mesh, dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    ranks = mesh.mesh.flatten().tolist()
    communicator = Runtime.of(_torch.device_of(mesh.device_type), CommPolicy()).communicator
    agreement = Agreement(communicator, axes, UnitName(""), "any_failed()", ranks=ranks)
    runtimes, own = Runtime.all_of_thread(), tuple(communicator.log_of(axis) for axis in axes)
    logs = [log for runtime in runtimes for log in runtime.communicator.logs()]
    # A rank that waits for this one in a collective of a unit finds the difference in its own log.
    logs = [log for log in logs if log not in own and set(log.ranks) <= set(ranks)]
    for log in logs:
        log.append(_CALL)
        log.followers = own
    try:
        result = bool(agreement.maximum(torch.tensor(bool(failed), dtype=torch.uint8)).item())
    finally:
        for log in logs:
            log.followers = ()
    if result:
        for runtime in runtimes:
            runtime.abort_step()
    return result
