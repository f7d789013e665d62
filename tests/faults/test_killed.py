"""A rank is killed in the midst of a step: the others end soon and say where, and the last checkpoint goes on.

kill: where, and "late" if the others begin nothing any more before they could know of it.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exits import soon
from harness import forks, until
from models import Stack, batch, rounding, shard_stack, square
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

SIZE, STEPS, SAVED, KILLED = 3, 5, 2, 3
KEPT: list[Any] = []


def program(rank: int, size: int, folder: str, resume: bool, kill: str, results: Any) -> None:
    """Train, save behind step `SAVED`, and have the last rank die in step `KILLED`."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{kill or 'none'}-{resume}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = shard_stack(Stack(), init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resume:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses: list[float] = []

    def die(*_: Any) -> None:
        if step == KILLED and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == KILLED and kill.endswith("late"):
            until(lambda: is_gone(size - 1))

    if kill.startswith("forward"):
        model.blocks[1].up.register_forward_pre_hook(die)
    elif kill.startswith("backward"):
        model.blocks[1].up.register_full_backward_pre_hook(die)
    begin = time.monotonic()
    try:
        for step in range(SAVED if resume else 0, STEPS):
            begin = time.monotonic()
            loss = square(model(batch(step).chunk(size)[rank]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step + 1 == SAVED and not resume:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
                dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    except Exception as failure:
        results.put((rank, losses, f"{type(failure).__name__}: {failure}", time.monotonic() - begin))
        results.close()
        results.join_thread()
        os._exit(1)
    results.put((rank, losses, "", 0.0))
    dist.destroy_process_group()


def is_gone(rank: int) -> bool:
    """Whether gloo knows that nothing can be sent to the rank."""
    try:
        KEPT.append(dist.isend(torch.zeros(1), rank, tag=1))
    except RuntimeError:
        return True
    return False


def run(size: int, folder: Path, *, resume: bool = False, kill: str = "") -> dict[int, tuple[list[float], str, float]]:
    """By rank: losses, what it raised, and how long after the step began."""
    context = forks()
    results = context.Queue()
    ranks = [context.Process(target=program, args=(r, size, str(folder), resume, kill, results)) for r in range(size)]
    for process in ranks:
        process.start()
    answers = [results.get(timeout=90) for _ in range(size - bool(kill))]
    for process in ranks:
        process.join(30)
        assert not process.is_alive()
    return {rank: (losses, text, seconds) for rank, losses, text, seconds in answers}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """By rank, the losses of a program in which nobody dies."""
    return {rank: losses for rank, (losses, _, _) in run(SIZE, tmp_path_factory.mktemp("whole")).items()}


@pytest.mark.rotates(2)
@pytest.mark.proves("31b")
@pytest.mark.processes
@pytest.mark.parametrize("kill", ["forward", "backward", "backward, late"])
def test_the_others_name_the_unit_and_the_checkpoint_goes_on(whole: dict[int, list[float]], tmp_path: Path, kill: str) -> None:
    left = run(SIZE, tmp_path, kill=kill)
    for rank in range(SIZE - 1):
        losses, text, seconds = left[rank]
        assert losses == whole[rank][:KILLED], "until then nothing differed"
        assert text.startswith(f"StateError: rank {SIZE - 1} is gone: its connection closed or timed out, while rank "), text
        assert "was in collective " in text and "'blocks." in text and ("gather" in text or "scatter" in text), text
        assert text == left[0][1], "all say the same"
        assert seconds < soon(6.0), "nobody waits for an answer of the dead one"
    again = run(SIZE, tmp_path, resume=True)
    for rank in range(SIZE):
        assert again[rank][0] == pytest.approx(whole[rank][SAVED:], rel=rounding(torch.float32))
