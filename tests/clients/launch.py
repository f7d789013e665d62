"""Runs a function on every rank of a fresh gloo group, with FSDP2's names replaced by fullshard's.

    def body(rank, size): ...

    def test_claim():
        launch(body)

The one line a user adds is `fullshard.install()`; here it runs after the client library has been imported, which is the
harder order. FULLSHARD_CLIENTS_PEER=1 leaves torch's own FSDP2 in place, to see that a program itself is right.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from harness import forks

PEER = os.environ.get("FULLSHARD_CLIENTS_PEER") == "1"
LIMIT = 240.0


def launch(body: Callable[..., None], *, size: int = 2, limit: float = LIMIT, **arguments: Any) -> None:
    """Call `body(rank, size, **arguments)` on every rank, and fail with the traceback of each that raised."""
    context = forks()
    with tempfile.TemporaryDirectory(prefix="fullshard-clients") as folder:
        environment = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        connections, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_rank, args=(body, rank, size, folder, own, arguments, there), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            processes.append(process)
        try:
            failed = _collect(connections, limit)
            if any("did not come back" in text for text in failed.values()):
                for process in processes:
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)  # the stacks go to stderr
                time.sleep(0.5)
        finally:
            for process in processes:
                process.join(1.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    if failed:
        pytest.fail("\n".join(f"--- rank {rank} of {size} ---\n{text}" for rank, text in sorted(failed.items())), pytrace=False)


def _collect(connections: list[Connection], limit: float) -> dict[int, str]:
    """What went wrong, by rank. Once one rank failed, the others (which may wait for it) get a few seconds."""
    failed: dict[int, str] = {}
    pending = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + limit
    while pending:
        ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            return failed | dict.fromkeys(pending.values(), f"did not come back within {limit:.0f} seconds")
        for connection in ready:
            rank = pending.pop(connection)
            try:
                text = connection.recv()
            except EOFError:
                text = "the process died"
            if text is not None:
                failed[rank] = text
                deadline = min(deadline, time.monotonic() + 10.0)
    return failed


def _rank(
    body: Callable[..., None],
    rank: int,
    size: int,
    folder: str,
    environment: dict[str, str],
    arguments: dict[str, Any],
    connection: Connection,
) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(environment)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        if not PEER:
            import fullshard

            fullshard.install()
        torch.manual_seed(0)
        body(rank, size, **arguments)
        dist.barrier()
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())
    finally:
        connection.close()
        os._exit(0)  # a failed rank must not wait for the others in destructors


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# --- what bodies share -------------------------------------------------------------------------------------------------


def shared_folder() -> Path:
    """A folder that all ranks of this launch see; it goes when the launch ends."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return Path(store.path).parent


def mean_over_ranks(value: Any) -> float:
    """The mean of every rank's `value`: the loss of a global batch that was cut into equal parts."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def full(tensor: Any) -> Any:
    """The whole tensor, of a DTensor or an ordinary one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_sharded_by_us(module: Any) -> None:
    """`module` is what torch calls an FSDPModule, and it is fullshard that made it one."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule), type(module).__mro__
    if not PEER:
        import fullshard

        assert isinstance(module, fullshard.FSDPModule), type(module).__mro__


def let_accelerate_shard_on_cpu() -> None:
    """accelerate turns FSDP on for accelerators only: tell it that these CPU ranks are some."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
