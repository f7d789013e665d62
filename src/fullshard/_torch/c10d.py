"""Process groups, their backends and stores, memory for collectives, and failures of a rank."""

from __future__ import annotations

import hashlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch.versions import VERSION
from fullshard.errors import warn_once

__all__ = [
    "THREADED",
    "NetworkError",
    "PerRank",
    "StoreError",
    "abort_group",
    "backend_name",
    "default_store",
    "ends_by_collective",
    "exception_on",
    "global_rank",
    "group_name",
    "has_backend",
    "has_extended_api",
    "is_alive",
    "is_handled",
    "is_nccl",
    "new_group",
    "own_store",
    "process_group_memory",
    "store_host",
    "symmetric_memory",
    "threads_are_ranks",
    "world_size",
]

K = TypeVar("K")
V = TypeVar("V")


# --- process groups and their backends -------------------------------------------------------------------------------


def is_alive(group: Any) -> bool:
    """Return True until torch destroys the process group."""
    # Private: `_world.pg_map`, torch's table of process groups. A destroyed group object looks like a live one otherwise.
    return group in dist.distributed_c10d._world.pg_map


def abort_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort the collectives of a process group on `device`. Waits for them return, and later collectives raise."""
    # Private: `_get_backend`. The group's own `abort` is the fallback, because it aborts its backends of other devices as well.
    abort = getattr(group._get_backend(device), "abort", group.abort)
    abort()


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name of a process group, which is equal on all its ranks."""
    return group.group_name


def global_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for tensors of `device` in `group`, in lower case. Each device type may have one."""
    # Private: `_get_backend`. `dist.get_backend` takes no device.
    try:
        return group._get_backend(device).name().lower()
    except RuntimeError:
        if type(group) is dist.ProcessGroup:
            raise
        return dist.get_backend(group)  # a subclass in Python that has no backends and runs all collectives itself


def is_nccl(name: str) -> bool:
    """Return True for every implementation of nccl.

    torch 2.15 has several: "nccl", "nccl2", "nccl-legacy", "nccl-lazy", and one written in Python.

    >>> [is_nccl(name) for name in ("nccl", "nccl-legacy", "gloo")]
    [True, True, False]
    """
    return name.startswith("nccl")


def has_backend(device: torch.device) -> bool:
    """Return True if the default process group supports tensors of this device."""
    try:
        world = dist.group.WORLD
        return world is not None and bool(backend_name(world, device))
    except RuntimeError:
        return False


THREADED = "threaded"
"""Name of the backend of torch's tests in which ranks are threads of one process."""


def threads_are_ranks() -> bool:
    """Return True if each thread is a rank with its own process groups."""
    # Private: torch's tests replace `_world` by an object whose own `_world` is thread-local. If that changes, threads share
    # caches by process, and ranks of such tests use the meshes of other ranks.
    return isinstance(getattr(dist.distributed_c10d._world, "_world", None), threading.local)


class PerRank(MutableMapping[K, V]):
    """Dict of this rank: one for the process, or one for each thread if threads are ranks (`THREADED`).

    Not for hot paths: each access takes a microsecond.
    """

    def __init__(self) -> None:
        self._of_process: dict[K, V] = {}
        self._of_thread = threading.local()

    def _mine(self) -> dict[K, V]:
        if not threads_are_ranks():
            return self._of_process
        return self._of_thread.__dict__.setdefault("known", {})

    def __getitem__(self, key: K) -> V:
        return self._mine()[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._mine()[key] = value

    def __delitem__(self, key: K) -> None:
        del self._mine()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())


# --- new process groups ----------------------------------------------------------------------------------------------


class _PlacedRank(int):
    """A rank that is sorted by its place in a list: torch before 2.13 always sorts the ranks of a new process group."""

    place: int

    def __lt__(self, other: Any) -> bool:
        return self.place < other.place if isinstance(other, _PlacedRank) else int.__lt__(self, other)


def _placed(ranks: Sequence[int]) -> list[int]:
    placed = [_PlacedRank(rank) for rank in ranks]
    for place, rank in enumerate(placed):
        rank.place = place
    return list(placed)


def new_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group of `ranks`, in this order, called on these ranks only, which all derive the same name.

    torch's name for such a group contains the number of process groups of the rank, which may differ between ranks. The ranks
    then wait for each other forever. They also wait forever if nccl splits the group from the default group
    (`init_process_group(device_id=...)`), because a split needs all ranks of the default group.
    """
    with _named(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()):
        if list(ranks) == sorted(ranks):
            return dist.new_group(list(ranks), use_local_synchronization=True)
        if VERSION >= (2, 13):
            return dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False)
        return dist.new_group(_placed(ranks), use_local_synchronization=True)


class _Naming:
    """Replacements of two functions of torch while threads create process groups under our names.

    Several threads can create groups at the same time: each waits for other ranks, so a lock held meanwhile could deadlock.
    Other threads of the program get torch's answers. The groups are created from scratch, not split from the default group.

    Attributes:
        lock: protects `threads` and the replacement.
        threads: number of threads that are creating a group.
        of_thread: `of_thread.name` is the name of the group that this thread creates, or None.
        given: torch's `_process_group_name`.
        given_source: torch's `_get_split_source`.
    """

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.of_thread = threading.local()
        self.given: Callable[..., Any] = dist.distributed_c10d._process_group_name
        self.given_source: Callable[..., Any] = dist.distributed_c10d._get_split_source

    def name(self, ranks: Any, use_hashed_name: bool) -> Any:
        """Return the name for a new group: ours on a thread that creates one, else torch's."""
        chosen = getattr(self.of_thread, "name", None)
        return self.given(ranks, use_hashed_name) if chosen is None else dist.distributed_c10d.GroupName(chosen)

    def split_source(self, group: Any, *more: Any) -> Any:
        """Return None (no split) on a thread that creates one of our groups, else torch's answer.

        Args:
            group: the group to split.
            more: from torch 2.15 on, the requested backend.
        """
        return self.given_source(group, *more) if getattr(self.of_thread, "name", None) is None else None


_NAMING = _Naming()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Give `name` to the process group that this thread creates in the block."""
    # Private: `_process_group_name` and `_get_split_source`, which `new_group` looks up in its module. `dist.new_group` accepts
    # no name. If torch stops calling them, the ranks wait for each other as described in `new_group`.
    c10d, naming = dist.distributed_c10d, _NAMING
    with naming.lock:
        naming.threads += 1
        if naming.threads == 1:  # the first thread replaces, and the last one restores
            naming.given, c10d._process_group_name = c10d._process_group_name, naming.name  # type: ignore[assignment]
            naming.given_source, c10d._get_split_source = c10d._get_split_source, naming.split_source  # type: ignore[assignment]
    naming.of_thread.name = name
    try:
        yield
    finally:
        naming.of_thread.name = None
        with naming.lock:
            naming.threads -= 1
            if not naming.threads:
                c10d._process_group_name = naming.given  # type: ignore[assignment]
                c10d._get_split_source = naming.given_source


# --- memory for collectives ------------------------------------------------------------------------------------------


def process_group_memory(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor]:
    """Return the allocator of the backend of `group` for message memory (collective). Raise ValueError if it has none.

    nccl has none on a device without multicast. Then warn and return the allocator of ordinary memory.
    """
    # Private: `_get_backend`, since only backends, not process groups, have `supports_tensor_alloc` and `allocate_tensor`.
    name = backend_name(group, device)
    backend = group._get_backend(device) if name != THREADED else None
    supports = getattr(backend, "supports_tensor_alloc", None)
    if backend is None or supports is None or not (is_nccl(name) or supports(device)):
        raise ValueError(
            f"This setting is not available: the {name} backend allocates no memory for messages. Use nccl, or leave this "
            "setting off."
        )
    if not supports(device):
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
    try:
        clone = store.clone()
        clone.set_timeout(timedelta(seconds=5))
        return dist.distributed_c10d.PrefixStore(prefix, clone)
    except (RuntimeError, NotImplementedError):
        return dist.distributed_c10d.PrefixStore(prefix, store)


StoreError: type[Exception] = dist.DistStoreError
"""Error of a request to a store that timed out."""

NetworkError: type[Exception] = dist.DistNetworkError
"""Error of a request to a store whose server is gone."""


def has_extended_api(store: Any) -> bool:
    """Return True if the store can read or set several keys in one request."""
    return bool(store.has_extended_api())


def store_host(store: Any) -> str | None:
    """Return the host that serves a store; None for a store without a server (a file, memory)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


# --- exceptions and signals ------------------------------------------------------------------------------------------


def ends_by_collective() -> bool:
    """Return True if the exception that ends the program was raised by a collective of torch.distributed.

    Returns False in an interactive interpreter, which keeps the last exception although the program continues.
    """
    # A failed collective raises a plain RuntimeError, so its origin shows only in the module of the innermost frame. If torch
    # moves its functions out of torch.distributed, this returns False.
    if hasattr(sys, "ps1"):
        return False
    failure: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(failure, RuntimeError) or failure.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(failure.__traceback__)
    return bool(frame.f_globals.get("__name__", "").startswith("torch.distributed."))


def exception_on(thread: int) -> BaseException | None:
    """Return the exception that a thread (by its ident) is handling; None if there is none."""
    # Private, of Python: `_current_exceptions`. Before Python 3.12 its values are (class, exception, traceback).
    found: Any = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found


def is_handled(number: int) -> bool:
    """Return True if the process has a handler for a signal, including handlers set outside Python (faulthandler)."""
    import ctypes

    class Action(ctypes.Structure):  # POSIX systems: the handler is first; `rest` is space for the other fields
        _fields_ = (("handler", ctypes.c_void_p), ("rest", ctypes.c_byte * 512))

    action = Action()
    try:
        ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action))
    except (AttributeError, OSError, TypeError):
        return True  # unknown: do not replace a handler that may exist
    return bool(action.handler)
