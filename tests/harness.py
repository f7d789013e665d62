"""Rank processes that are started once per world size and run the bodies of many tests.

    @ranks(2, 3)
    def test_something(world):      # the body runs on every rank of a gloo group of 2, then of 3
        ...

A body that raises on any rank fails the test with the traceback of every rank that raised. One that does not come back
within `LIMIT` seconds fails with the stacks of all ranks, and its processes are replaced. So are those whose process groups were
aborted, since their ranks diverged or raised, those that have many threads, and those that have some and nothing to do: each
process group of gloo keeps three, of which one wakes a hundred times a second, for as long as the process lives. Four idle ranks
of sixty threads take as much time in five seconds as four new ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

LIMIT = 60.0
SEED = int(os.environ.get("FULLSHARD_SEED", "0"))  # of all bodies and batches: what a test claims holds for any
THREADS = 60
IDLE = 10.0  # seconds without a test
FEW = 16  # threads of a process that may be idle for longer
DIED = "the process died"
ABORTED = "its process groups were aborted"
TESTS = str(Path(__file__).parent)
# Ranks import bodies from these. Tests of clients start ranks of their own, and one has the name of a test here.
ROOMS = [TESTS, *sorted(str(path) for path in Path(TESTS).iterdir() if path.is_dir() and path.name != "clients")]


class World:
    """What a body gets: its rank, and the mesh of all of them. On the asynchronous device also what tells of that device."""

    def __init__(self, rank: int, size: int, kind: str, device: Any, folder: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size, self.device, self._folder = rank, size, device, folder
        self.mesh = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))

    def mine(self, batch: Any) -> Any:
        """This rank's part of a global batch. A copy: on some processors products round by where in memory a value begins."""
        assert batch.shape[0] % self.size == 0
        return batch.chunk(self.size)[self.rank].clone()

    def folder(self, name: str) -> Path:
        """A folder all ranks of this test share. It goes with the pool."""
        import torch.distributed as dist

        path = [tempfile.mkdtemp(prefix=name, dir=self._folder) if self.rank == 0 else ""]
        dist.broadcast_object_list(path, 0)
        return Path(path[0])


def _serve(rank: int, size: int, folder: str, connection: Connection, kind: str) -> None:
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.path[:0] = ROOMS
    import torch
    import torch.distributed as dist

    from fullshard import errors
    from fullshard.checks.watchdog import PROCESS

    torch.set_num_threads(1)
    device, backend, where = None, "gloo", kind.removeprefix("all ")
    if where == "sim":
        import simulated

        device, backend = simulated.load(bare=kind != "all sim"), "cpu:gloo,sim:sccl"
    if where == "cuda":  # one GPU for all ranks, which nccl refuses
        backend = "cpu:gloo,cuda:gloo"
        _send_by_way_of_the_host("CUDA")
    if kind.startswith("all "):
        import simulated

        simulated.settle_on(where)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    world = World(rank, size, where, device, folder)
    connection.send("ready")
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(SEED)
            errors._SAID.clear()  # what one test was warned of another is warned of again
            getattr(importlib.import_module(module), name).body(world, **arguments)
            watchdog = PROCESS.watchdog
            connection.send(ABORTED if watchdog is not None and watchdog._verdicts else None)
        except BaseException:
            connection.send(traceback.format_exc())


def _send_by_way_of_the_host(key: str) -> None:
    """Have DTensor's collectives copy to the host and back: over gloo, torch's own crash for tensors on a GPU.

    key: the dispatch key of the device.
    """
    import torch

    functional = torch.ops._c10d_functional
    library = torch.library.Library("_c10d_functional", "IMPL")
    _LIBRARIES.append(library)

    def staged(name: str) -> Callable[..., Any]:
        send = getattr(functional, name)
        return lambda tensor, *arguments: functional.wait_tensor(send(tensor.cpu(), *arguments)).to(tensor.device)

    for name in ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor"):
        library.impl(name, staged(name), key)
    library.impl("wait_tensor", lambda tensor: tensor, key)


_LIBRARIES: list[Any] = []  # for as long as the process lives


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for what other ranks bring about, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.05)


def threads(pid: int) -> int:
    """How many threads a process has; 0 where there is no /proc."""
    tasks = Path(f"/proc/{pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def forks() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have torch already, and what else is in `preloaded`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):  # of the server, which is not told the path of this process
        forkserver.ensure_running()
    return context


class Pool:
    """The processes of one world size. kind: "cpu"; "sim" for those that have the asynchronous device, too; "all sim" where all is
    there, "all cuda" where all is on one GPU.
    """

    def __init__(self, size: int, kind: str = "cpu") -> None:
        # The server of forks has asked for GPUs, behind which its children may not.
        context: Any = multiprocessing.get_context("spawn") if kind == "all cuda" else forks()
        self._threads = THREADS if kind != "all cuda" else 4 * THREADS  # CUDA's own come on top
        self._folder = tempfile.mkdtemp(prefix="fullshard-ranks")
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder, there, kind), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self.alive = all(self._receive(connection, 120.0) == "ready" for connection in self._connections)
        self._used = time.monotonic()

    @staticmethod
    def _receive(connection: Connection, limit: float) -> str | None:
        if not connection.poll(limit):
            return "did not come back in time"
        try:
            return connection.recv()
        except EOFError:
            return DIED

    def run(self, module: str, name: str, arguments: dict[str, Any], limit: float) -> None:
        for connection in self._connections:
            connection.send((module, name, arguments))
        replies = []
        for connection, process in zip(self._connections, self._processes):
            reply = self._receive(connection, limit)
            if reply == DIED:
                process.join(5.0)
                reply = f"{DIED}, exit code {process.exitcode}"
            replies.append(reply)
            limit = 5.0 if reply is not None else limit  # one failed: the others may be stuck behind it
        failed = {rank: reply for rank, reply in enumerate(replies) if reply not in (None, ABORTED)}
        if failed:
            self.close()
            pytest.fail(
                "\n".join(f"--- rank {rank} of {len(replies)} ---\n{reply}" for rank, reply in failed.items()), pytrace=False
            )
        self._used = time.monotonic()
        if ABORTED in replies or threads(self._processes[0].pid) > self._threads:
            self.close(stacks=False)

    def close_if_idle(self) -> None:
        if self.alive and time.monotonic() - self._used > IDLE and threads(self._processes[0].pid) > FEW:
            self.close(stacks=False)

    def close(self, *, stacks: bool = True) -> None:
        """`stacks`: have processes print where they are first, which a process that is well does not always survive."""
        self.alive = False
        for process in self._processes if stacks else ():
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        for process in self._processes:
            if stacks:
                process.join(0.3)
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(5.0)  # one that is alive would write on
        shutil.rmtree(self._folder, ignore_errors=True)


_POOLS: dict[tuple[int, str], Pool] = {}


def pool(size: int, kind: str = "cpu") -> Pool:
    key = size, kind
    if key not in _POOLS or not _POOLS[key].alive:
        _POOLS[key] = Pool(size, kind)
    return _POOLS[key]


def close_idle_pools() -> None:
    for running in _POOLS.values():
        running.close_if_idle()


@atexit.register
def close_pools() -> None:
    for running in _POOLS.values():
        if running.alive:
            running.close(stacks=False)


def ranks(*sizes: int, limit: float = LIMIT, device: str = "cpu") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test body on every rank of a world of each of `sizes`. Its other arguments come from pytest.mark.parametrize.

    limit: seconds until a body that did not come back has failed. device: "sim" for ranks that have the asynchronous device.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(size: int, **arguments: Any) -> None:
            pool(size, device).run(body.__module__, body.__name__, arguments, limit)

        others = list(inspect.signature(body).parameters.values())[1:]
        size = inspect.Parameter("size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([size, *others])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.processes(pytest.mark.parametrize("size", sizes)(test))

    return decorate
