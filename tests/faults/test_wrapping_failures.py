"""Ranks that part, or end, while a model is wrapped, materialized, read as a whole or undone: told by name, within seconds."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, forks, ranks
from models import Block, Stack, batch, shard_stack, train_both
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TheirFSDP

import fullshard
from fullshard import CheckPolicy, StateError, fully_shard
from fullshard.compat import FSDP

EAGER = CheckPolicy(patience=0.2)


def find_desync(fn: Callable[[], Any]) -> str:
    """What `fn` raises, soon, with the number of the call left out."""
    begin = time.monotonic()
    with pytest.raises(StateError) as caught:
        fn()
    assert time.monotonic() - begin < 15.0
    return re.sub("collective [0-9]+", "collective N", str(caught.value))


def others(world: World) -> str:
    return "rank 1" if world.size == 2 else "ranks 1 and 2"


def goes_on(world: World) -> None:
    """What all ranks do together afterwards is right."""
    assert fullshard.any_failed(world.mesh, True)
    torch.manual_seed(0)
    train_both(world, Stack(depth=1), lambda model: shard_stack(model, world.mesh), steps=2)


@pytest.mark.proves("16d")
@ranks(2, 3)
def test_ranks_that_wrap_different_modules_are_told_both_in_the_first_forward(world: World) -> None:
    torch.manual_seed(0)
    model = Stack()
    fully_shard(model.blocks[0], mesh=world.mesh)
    fully_shard(model.blocks[1] if world.rank else model, mesh=world.mesh, check_policy=EAGER)
    text = find_desync(lambda: model(batch(0)))
    assert "rank 0 ran comparison of 19 parameters of 'Stack'" in text, text
    assert f"{others(world)} ran comparison of 5 parameters of 'Block'" in text, text


@pytest.mark.proves("16d")
@ranks(2, 3)
def test_a_rank_that_leaves_a_module_unwrapped_is_told_its_first_parameter(world: World) -> None:
    torch.manual_seed(0)
    model = Stack()
    modules = [*model.blocks, model]
    if world.rank == 0:
        del modules[1]
    for module in modules:
        fully_shard(module, mesh=world.mesh, check_policy=EAGER)
    text = find_desync(lambda: model(batch(0)))
    assert "rank 0 has 'blocks.1.norm.weight' (7,) torch.float32 of unit 'Stack'; rank 1 has 'head.weight'" in text, text
    if world.rank == 0:
        fully_shard(nn.Linear(2, 2), mesh=world.mesh)  # as many units as the other ranks
    goes_on(world)


@pytest.mark.proves("16d")
@ranks(2, 3)
def test_a_rank_that_materializes_other_units_is_told(world: World) -> None:
    with torch.device("meta"):
        model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, check_policy=EAGER)
    if world.rank:
        fully_shard(model, mesh=world.mesh, check_policy=EAGER)
    text = find_desync(lambda: fullshard.materialize(model))
    assert f"{others(world)} ran materialize(seed=None) of 'Stack'" in text, text
    assert "rank 0 ran materialize(seed=None) of 'Block'" in text, text


@ranks(2, 3)
def test_ranks_that_undo_and_read_the_whole_model_at_once_are_told(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)

    def go_on() -> None:
        if world.rank:
            fullshard.undo(model)
        else:
            with fullshard.full_params(model):
                pass

    text = find_desync(go_on)
    assert f"dtype=None) of 'Stack'; {others(world)} ran undo() of 'Stack'" in text, text
    assert "rank 0 ran full_params(write=True, " in text, text


@pytest.mark.proves("16d")
@ranks(2, 3)
def test_fsdp1_wrappers_of_different_modules_are_told_both(world: World) -> None:
    model = Stack(depth=1)
    text = find_desync(lambda: FSDP(model.head if world.rank else model.blocks[0], device_mesh=world.mesh))
    expected = f"rank 0 ran FullyShardedDataParallel() of 'Block'; {others(world)} ran FullyShardedDataParallel() of 'Linear'"
    assert expected in text, text
    assert TheirFSDP is not FSDP


@ranks(2, 4)
def test_what_wrapping_sends_is_counted(world: World) -> None:
    """Nothing, except to share weights: of each axis a message about meta tensors, a barrier, and the weights."""
    meshes = [(world.mesh, 1)]
    if world.size == 4:
        meshes.append((init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), 2))
    for mesh, axes in meshes:
        beside = fully_shard(nn.Linear(3, 3), mesh=mesh, sync="off")
        for sync, small, shared in (("off", 0, 0), ("check", 0, 0), ("broadcast", 2, 5)):
            with fullshard.counting(beside) as messages:
                fully_shard(Block(), mesh=mesh, sync=sync)
            assert [m.kind for m in messages] == ["talk"] * (small + shared) * axes, (sync, messages)
            weights = sum(m.nbytes for m in messages if m.dtype is torch.float32)
            assert weights == bool(shared) * axes * sum(4 * p.numel() for p in Block().parameters())


@ranks(2, 3)
def test_units_have_their_full_names_before_the_first_forward(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    outer = nn.ModuleDict({"decoder": model})
    fully_shard(model.blocks, mesh=world.mesh) if False else None
    with pytest.raises(StateError, match=r"'blocks\.1'"), fullshard.full_params(model.blocks[1]):
        model.blocks[1](torch.ones(1, 7))
    assert outer["decoder"] is model


@ranks(2)
def test_a_wrapper_around_all_renames_what_is_below(world: World) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.out = Stack(depth=1), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.decoder(x))

    outer = Outer()
    shard_stack(outer.decoder, world.mesh)
    fully_shard(outer, mesh=world.mesh)
    for module, name in ((outer.decoder.blocks[0], r"'decoder\.blocks\.0'"), (outer.decoder, "'decoder'")):
        with pytest.raises(StateError, match=name), fullshard.full_params(module):
            module(torch.ones(1, 7))


@ranks(2, 3)
def test_a_whole_of_any_cut_and_dtype(world: World) -> None:
    """Uneven, empty, along any dim, scalars, bytes: what is gathered is what was cut."""
    from torch.distributed.tensor import Shard

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd, self.few = (nn.Parameter(torch.randn(n, 5)) for n in (6, 7, 1))
            self.cube = nn.Parameter(torch.randn(3, 5, 4))
            self.scalar = nn.Parameter(torch.randn(()))
            self.low = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
            self.bytes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
            self.complex = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))

    torch.manual_seed(0)
    model = Odd()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=world.mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim == 3 else None)
    with fullshard.full_params(model, write=False):
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter and torch.equal(parameter, expected[name]), name
    fullshard.undo(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


# --- ranks that end --------------------------------------------------------------------------------------------------------


def program(rank: int, size: int, folder: str, how: str, results: Any) -> None:
    """The last rank ends between two calls of `fully_shard`, in which the others do not wait for it."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model, mesh = Stack(), init_device_mesh("cpu", (size,))
    fully_shard(model.blocks[0], mesh=mesh)
    begin = time.monotonic()
    try:
        if rank == size - 1:
            if how == "exits":
                os._exit(3)
            raise SystemError("no memory for the second block")
        fully_shard(model.blocks[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(batch(0))
    except Exception as failure:
        if rank == size - 1:
            raise
        results.put((rank, f"{type(failure).__name__}: {failure}", time.monotonic() - begin))
        results.close()
        results.join_thread()
        os._exit(1)


@pytest.mark.proves("16e")
@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_that_ends_between_two_calls_of_fully_shard(tmp_path: Path, size: int, how: str) -> None:
    """Elsewhere the others raise "Connection closed by peer", which says neither where they were nor who left."""
    context = forks()
    results = context.Queue()
    processes = [context.Process(target=program, args=(r, size, str(tmp_path), how, results)) for r in range(size)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in range(size - 1)]
    for process in processes:
        process.join(30)
        assert not process.is_alive()
    for rank, text, seconds in answers:
        assert text.startswith("StateError: "), text
        assert "comparison of 19 parameters of 'Stack'" in text and re.search(r"collective \d+", text), text
        assert (
            text.startswith(f"StateError: rank {size - 1} is gone: its connection closed or timed out, while rank ")
            and seconds < 10.0
        ), (rank, text, seconds)
