"""Process groups, their backends and stores, memory for collectives, and failures of a rank."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import warn_once

# --- process groups and their backends -------------------------------------------------------------------------------


def is_alive(group: Any) -> bool:
    """Return True until torch destroys the process group."""
    # Private: `_world.pg_map`, torch's table of process groups. A destroyed group object looks like a live one otherwise.
    return group in dist.distributed_c10d._world.pg_map


def abort_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort the collectives of a process group on `device`. Waits for them return, and later collectives raise."""
    if _runs_itself(group, device):
        if type(group).abort is dist.ProcessGroup.abort:  # which aborts backends, so nothing
            raise NotImplementedError(f"{type(group).__name__} has no method abort()")
        return group.abort()
    # Private: `_get_backend`, since the group's own `abort` aborts its backends of other devices as well.
    backend: Any = group._get_backend(device)
    if backend.name().lower() != "gloo":
        return backend.abort()
    # gloo's `abort` does nothing. A wait that times out closes all connections of the group, so wait for a message that no rank
    # sends; of each peer, since a connection that is closed already raises at once. If that changes in torch, ranks that
    # diverged wait until the timeout of the process group.
    for peer in range(group.size()):
        with suppress(RuntimeError):
            if peer != group.rank():
                backend.recv([torch.empty(1)], peer, _UNSENT_TAG).wait(timedelta(milliseconds=1))


_UNSENT_TAG = 0x1FFFFFFF


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for tensors of `device` in `group`, in lower case. Each device type may have one."""
    # Private: `_get_backend`, and `BackendConfig`, which reads "cpu:name" as well. `dist.get_backend` takes no device.
    if not _runs_itself(group, device):
        return group._get_backend(device).name().lower()
    return str(dist.distributed_c10d.BackendConfig(dist.get_backend(group)).get_device_backend_map()[device.type])


def _runs_itself(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True for a subclass in Python that has no backends and runs all collectives itself."""
    if type(group) is dist.ProcessGroup:
        return False
    try:
        group._get_backend(device)
    except RuntimeError:
        return True
    return False


# --- new process groups ----------------------------------------------------------------------------------------------


def new_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group of `ranks`, in this order, called on these ranks only, which all derive the same name.

    `dist.new_group` takes no name, and its own contains the number of process groups of the rank, which may differ between
    ranks: they would wait for each other forever.
    """
    # Private: `_new_process_group_helper`, which `dist.new_group` calls once it has chosen a name, `pg_map` and
    # `pg_group_ranks`, torch's tables of process groups. If the helper changes its arguments, this raises TypeError.
    c10d = dist.distributed_c10d
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    unique = c10d.GroupName(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest())
    timeout = c10d._get_default_timeout(dist.Backend(backend))
    with _without_splits():
        made = c10d._new_process_group_helper(
            len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend(backend), store, unique, timeout=timeout
        )
    group: dist.ProcessGroup = made[0]  # type: ignore[assignment]
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


class _Splits:
    """The device of the default process group while threads create groups, each of which may wait for other ranks."""

    lock, threads, device = threading.Lock(), 0, None


@contextmanager
def _without_splits() -> Iterator[None]:
    """Let torch create process groups from scratch in the block, instead of splitting them from the default group.

    A split, as of nccl after `init_process_group(device_id=...)`, needs all ranks of the default group.
    """
    # Private: `bound_device_id`, by which torch decides to split.
    group: Any = dist.group.WORLD
    with _Splits.lock:
        if not _Splits.threads:
            _Splits.device, group.bound_device_id = group.bound_device_id, None
        _Splits.threads += 1
    try:
        yield
    finally:
        with _Splits.lock:
            _Splits.threads -= 1
            if not _Splits.threads:
                group.bound_device_id = _Splits.device


# --- memory for collectives ------------------------------------------------------------------------------------------


def process_group_memory(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor]:
    """Return the allocator of the backend of `group` for message memory (collective). Raise ValueError if it has none.

    nccl has none on a device without multicast. Then warn and return the allocator of ordinary memory.
    """
    # Private: `_get_backend`, since only backends, not process groups, have `supports_tensor_alloc` and `allocate_tensor`.
    name = backend_name(group, device)
    backend = group._get_backend(device)
    supports = backend.supports_tensor_alloc(device)
    if not supports and not name.startswith("nccl"):  # torch 2.15 has "nccl2" and "nccl-legacy" as well
        raise ValueError(
            f"This setting is not available: the {name} backend allocates no memory for messages. Use nccl, or leave this "
            "setting off."
        )
    if not supports:
        warn_once(f"nccl allocates no memory for messages on {device}, which lacks multicast. Ordinary memory is used.")
        return torch.empty
    dist.barrier(group)  # the communicator must exist before its memory does

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return backend.allocate_tensor(prod(size), dtype=dtype, device=device)

    return allocate


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> Callable[..., Tensor]:
    """Return the allocator of symmetric memory of `backend` for `group`. Raise ValueError if the device is not CUDA."""
    if device.type != "cuda":
        raise ValueError(
            f"This setting is not available: symmetric memory needs CUDA devices, the mesh computes on {device.type}. Leave "
            "this setting off."
        )
    # Private: the module of symmetric memory as a whole. torch marks it as experimental.
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend(backend)  # type: ignore[arg-type]
    dist.barrier(group)  # the communicator must exist before memory is exchanged
    pool = symmetric.get_mem_pool(device)

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(tuple(size), dtype=dtype, device=device)
        if tensor.numel():
            symmetric.rendezvous(tensor, group)
        return tensor

    return allocate


# --- stores ----------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store of the default process group; None if that is not initialized."""
    if not dist.is_initialized():
        return None
    # Private: torch has no public access to this store.
    return dist.distributed_c10d._get_default_store()


def own_store(store: Any, prefix: str) -> Any:
    """Return `store` under a prefix, over a new connection if the store has connections.

    Requests on the new connection time out after 5 seconds.
    """
    # A connection serves one request at a time. On torch's own, a blocking request would delay the watchdog.
    before = store.timeout
    try:
        store.set_timeout(timedelta(seconds=3))  # for the connection, whose server may be gone: torch tries twice
        clone = store.clone()
        clone.set_timeout(timedelta(seconds=5))
        return dist.distributed_c10d.PrefixStore(prefix, clone)
    except (RuntimeError, NotImplementedError):
        return dist.distributed_c10d.PrefixStore(prefix, store)
    finally:
        store.set_timeout(before)


def store_host(store: Any) -> str | None:
    """Return the host that serves a store; None for a store without a server (a file, memory)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


# --- exceptions ------------------------------------------------------------------------------------------------------


def exception_on(thread: int) -> BaseException | None:
    """Return the exception that a thread (by its ident) is handling; None if there is none."""
    # Private, of Python: `_current_exceptions`. Before Python 3.12 its values are (class, exception, traceback).
    found: Any = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found
