"""Collectives of an asynchronous device that never complete: every rank soon raises the same text, though no host waits for them.

The backend of the device is as nccl in this: hosts run ahead, messages carry no tag, a collective with a process that is gone hangs,
and only an abort of the process group ends it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest
import simulated
import torch
from exits import Job, Rank, run_job, soon, together
from models import batch, square
from test_on_device import Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import CheckPolicy, fully_shard

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS),
]
SOON = 9.0  # seconds: patience, the grace for a rank that may continue, and the exchange of states
SLOW = 6.0  # seconds for which a rank computes


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    simulated.build()


def begun(rank: Rank, replicas: int, **checks: Any) -> tuple[Any, nn.Module]:
    """The device, and a sharded model that has trained one step."""
    os.environ["SIM_HANG"] = "1"
    device = simulated.load()
    rank.begin(backend="cpu:gloo,sim:sccl")
    torch.manual_seed(0)
    shape, names = ((replicas, rank.size // replicas), ("replicate", "shard")) if replicas > 1 else ((rank.size,), ("shard",))
    model, mesh = Stack(), init_device_mesh("sim", shape, mesh_dim_names=names)
    policy = CheckPolicy(**checks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, check_policy=policy)
    fully_shard(model, mesh=mesh, check_policy=policy)
    steps(model, 1)
    torch.accelerator.synchronize()
    return device, model


def steps(model: nn.Module, number: int = 3) -> None:
    """Steps as programs have them: the host runs ahead, and stops when it reads the loss."""
    for step in range(number):
        loss = square(model(batch(step).to("sim")))
        loss.backward()
        loss.item()
        model.zero_grad()


def train(rank: Rank, fault: str, replicas: int = 1) -> None:
    """Steps, in which rank 1 does something else once."""
    device, model = begun(rank, replicas, timeout=4.0 if fault in ("sleeps", "stops", "is killed") else None)
    if rank.rank == 1:
        rank.event()
    try:
        if rank.rank == 1:
            if fault == "diverges":
                model.blocks[2](torch.ones(4, 7, device="sim"))
            elif fault == "raises":
                model.blocks[1].register_forward_pre_hook(fail)
            elif fault == "votes":
                fullshard.any_failed(failed=True)
            elif fault == "exits":
                sys.exit(3)
            elif fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "sleeps":
                time.sleep(15)
            elif fault == "computes":
                device.slow(0, int(SLOW * 1e6))
                torch.ones(1, device="sim")
                time.sleep(0.5)  # until the stream has begun with it
                device.slow(0, 0)
        steps(model)
    except RuntimeError as failure:
        rank.raised(failure)
        if fault == "raises" and rank.rank == 1:
            time.sleep(15)


def fail(*_: Any) -> None:
    raise RuntimeError("bad batch")


def check_all_raise(job: Job, text: str, seconds: float, *, but: tuple[int, ...] = ()) -> None:
    texts = set()
    for one in job:
        if one.rank not in but:
            assert one.raised.startswith("StateError: "), f"rank {one.rank}\n{job}"
            assert re.search(text, one.raised), f"rank {one.rank}: {one.raised}\n{job}"
            assert one.seconds < soon(seconds), f"rank {one.rank} took {one.seconds:.1f} seconds\n{job}"
            texts.add(one.raised)
    assert len(texts) == 1, f"ranks raised different texts\n{job}"


TEXTS = {
    "diverges": ("Ranks diverged at collective", SOON, ()),
    "raises": ("rank 1 raised RuntimeError: bad batch in 'blocks.1' forward", SOON, (1,)),
    "votes": (r"Ranks diverged at collective .*rank 1 ran any_failed\(\)", SOON, ()),
    "exits": ("rank 1 ended the program or its process group while rank", SOON, (1,)),
    "is killed": (r"waited 4 seconds \(CheckPolicy.timeout\) in collective .*rank 1: does not answer", 4.0 + SOON, (1,)),
    "stops": (r"waited 4 seconds \(CheckPolicy.timeout\) in collective .*rank 1: does not answer", 4.0 + SOON, (1,)),
    "sleeps": (r"waited 4 seconds \(CheckPolicy.timeout\) in collective", 4.0 + SOON, (1,)),
}


@pytest.mark.rotates(4)
@pytest.mark.parametrize("fault", TEXTS)
def test_a_hang_is_named_on_all_ranks(fault: str) -> None:
    text, seconds, but = TEXTS[fault]
    lives = but if fault in ("raises", "sleeps", "stops") else ()
    for job in together([partial(run_job, train, size, fault=fault, lives=lives) for size in (2, 3)], at_once=2):
        check_all_raise(job, text, seconds, but=but)
        assert all("process groups of these ranks are aborted" in one.raised for one in job if one.rank not in but)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("fault", ["diverges", "raises"])
def test_a_hang_on_a_hybrid_mesh_is_named_on_all_ranks(fault: str) -> None:
    """Ranks of other replicas have no collective with rank 1 in the forward; they hang in their all-reduces."""
    text, seconds, but = TEXTS[fault]
    job = run_job(train, 4, fault=fault, replicas=2, lives=but)
    check_all_raise(job, text, seconds, but=but)


def test_a_rank_that_computes_for_long_is_waited_for() -> None:
    """Its device has queued collectives for many times the patience of the others, and nothing is wrong."""
    for job in together([partial(run_job, train, size, fault="computes") for size in (2, 3)], at_once=2):
        for one in job:
            assert one.code == 0 and not one.raised, job
            assert one.ended is not None and one.ended > SLOW - 1, job


def evaluate(rank: Rank, destroys: bool) -> None:
    """One replica evaluates and leaves at once; of the other, rank 1 is late, and its peer waits for it."""
    _, model = begun(rank, 2)
    time.sleep(0.5)
    if rank.rank == 0:
        rank.event()
    if rank.rank == 1:
        time.sleep(SLOW)
    try:
        with torch.no_grad():
            model(batch(0).to("sim")).sum().item()
    except RuntimeError as failure:
        rank.raised(failure)
    if destroys:
        torch.distributed.destroy_process_group()


def test_a_replica_that_is_done_and_leaves_is_no_fault_of_the_other() -> None:
    """It was in every collective that it owed, so the others wait for their own late rank."""
    for job in together([partial(run_job, evaluate, 4, store="agent", destroys=destroys) for destroys in (False, True)]):
        for one in job:
            assert one.code == 0 and not one.raised, job
        assert job[0].ended is not None and job[0].ended > SLOW - 1, job
