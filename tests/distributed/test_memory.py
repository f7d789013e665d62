"""Bytes are counted: peaks above the sharded baseline, and memory that comes back when a model is deleted."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import World, ranks
from models import Stack, batch, shard_stack, square
from torch import Tensor, nn

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.core import units_of
from fullshard.foresight.recorder import AllocationWatch, peak_of_new

ROOT = Path(__file__).parents[2]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("size", [64, 512])
def test_forward_needs_two_units_and_backward_three(size: int) -> None:
    """At the defaults, on fake groups; U is what one unit's full parameters take, which are two matrices of 32 MiB."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    # glibc keeps what is freed: else the system clears the same pages again and again, which takes most of the time.
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--json"]
    command += ["--dims", "2048", "--ranks", str(size), "--of", "fullshard", "packed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    peaks = json.loads(done.stdout.strip().splitlines()[-1])["figures"]
    for precision, whole in (("fp32", 4), ("bf16, fp32 reduction", 5.5)):  # torch._chunk_cat casts through memory of its own
        direct, packed = (peaks[f"{precision}, dim 2048, {size} ranks {name}"] for name in ("fullshard", "packed"))
        assert direct["forward"] == pytest.approx(2, rel=0.02) and direct["backward"] == pytest.approx(3, rel=0.02)
        # From torch 2.15 on, gradients of norms come in float32, so that all are packed without torch._chunk_cat's memory.
        assert packed["forward"] == pytest.approx(3, rel=0.02) and packed["backward"] <= 1.02 * whole


@ranks(1)
def test_a_rank_alone_casts_gradients_into_their_sum(world: World) -> None:
    """Nothing is sent, so there is no message: the peak is that of the gradients, and of what one unit computes with."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = torch.randn(1, 512)
    model(x).float().square().mean().backward()
    model.zero_grad()
    watch = AllocationWatch()
    model(x).float().square().mean().backward()
    peak = peak_of_new(watch.stop()) / (512 * 512 * 2)
    gradients, one_unit = 6 * 2, 2  # in bytes of one unit in bf16: fp32 sums; its parameters and its gradient
    assert peak == pytest.approx(gradients + one_unit, rel=0.02)


@ranks(2)
def test_deleting_a_model_frees_its_memory_with_the_collector_off(world: World) -> None:
    square(shard_stack(Stack(), world.mesh)(world.mine(batch(0)))).backward()  # torch's first use of DTensor leaves garbage
    gc.collect()
    gc.disable()
    try:
        for reshard in (True, False):
            model = shard_stack(Stack(), world.mesh, reshard_after_forward=reshard)
            loss = square(model(world.mine(batch(0))))
            loss.backward()
            with torch.no_grad():
                model(batch(0))
            unit = model._fullshard_unit
            watched = [weakref.ref(model), weakref.ref(unit), *(weakref.ref(g) for g in unit.groups)]
            watched += [weakref.ref(p.local) for p in unit.parameters] + [weakref.ref(g.shard) for g in unit.groups]
            runtime, number = unit.runtime, unit.number
            del model, loss, unit
            assert [ref() for ref in watched] == [None] * len(watched)
            assert runtime.unit(number) is None
    finally:
        gc.enable()


@ranks(2)
def test_a_model_that_another_thread_deletes_is_forgotten_at_the_next_forward(world: World) -> None:
    """The collector runs in any thread, and must not reach into the work of this one."""
    models = [shard_stack(Stack(), world.mesh) for _ in range(2)]
    square(models[0](world.mine(batch(0)))).backward()
    scheduler, numbers = models[0]._fullshard_unit.runtime.scheduler, [u.number for u in units_of(models[0], True)]
    thread = threading.Thread(target=models.pop, args=(0,))
    thread.start()
    thread.join()
    assert all(number in scheduler._records for number in numbers)
    square(models[0](world.mine(batch(0)))).backward()
    assert not any(number in scheduler._records for number in numbers)


@ranks(2)
def test_a_thread_that_did_not_shard_may_delete_one_model_and_run_another(world: World) -> None:
    models = [shard_stack(Stack(), world.mesh) for _ in range(2)]
    scheduler, numbers = models[0]._fullshard_unit.runtime.scheduler, [u.number for u in units_of(models[0], True)]
    done: list[bool] = []

    def work() -> None:
        models.pop(0)
        square(models[0](world.mine(batch(0)))).backward()
        done.append(not any(number in scheduler._records for number in numbers))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20.0)
    assert done == [True]


@ranks(2)
def test_forwards_whose_output_is_dropped_leave_nothing_that_grows(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, reshard_after_forward=False)
    scheduler = model._fullshard_unit.runtime.scheduler
    for _ in range(200):
        model(batch(0))
    assert all(record.live_graphs == 0 for record in scheduler._records.values())
    assert len(scheduler._pending) <= 65 * 4 and len(scheduler.outermost_starts) <= 64
    square(model(batch(0))).backward()
    assert not scheduler._pending and all(record.pending_backwards == 0 for record in scheduler._records.values())


@ranks(1)
def test_a_gather_that_fails_leaves_no_memory_behind(world: World) -> None:
    """The unsharded Parameters kept the memory of the buffer that was given up."""
    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=world.mesh)
    model(torch.ones(1, 64)).sum().backward()
    unit = model._fullshard_unit
    with mock.patch.object(type(unit.runtime.communicator), "send", side_effect=torch.OutOfMemoryError("none left")):
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(1, 64))
    assert unit.parameters[0].unsharded is None and not [b for group in unit.groups for b in group.buffers if b.memory]
    model(torch.ones(1, 64))


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize("how", ["raised", "not the last"])
@ranks(1)
def test_a_model_that_is_deleted_in_the_middle_of_a_step_is_freed(world: World, how: str) -> None:
    """Before the next model is sharded, which may need its memory."""
    model, x = fully_shard(nn.Linear(4, 4), mesh=world.mesh), torch.ones(1, 4, requires_grad=True)
    if how == "raised":
        with pytest.raises(ZeroDivisionError):
            model(Failing.apply(x)).sum().backward()
    else:
        model.set_is_last_backward(False)
        model(x).sum().backward()
        model._fullshard_unit.runtime.reducer.drain()  # an asynchronous device may still read what it reduces
    found = weakref.ref(model._fullshard_unit), weakref.ref(model.weight)
    del model, x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(nn.Linear(4, 4), mesh=world.mesh)
    gc.collect()
    assert found[0]() is None and found[1]() is None
