"""`save_weights(background=True)`: the weights of the call, whatever the training does; ranks that fail or end are told."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import CUTS, check, check_told, contents, expected, loaded, noted, saved, sharded, values
from harness import World, ranks

import fullshard


def add_one(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 3, 4)
def test_the_weights_of_the_call_are_saved(world: World, cut: str) -> None:
    if world.size % 2 and cut not in ("rows", "columns"):
        return
    model, folder = loaded(world, cut), world.folder(f"behind {cut}")
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in saved().values())
    told: list[tuple[int, int]] = []
    options = {"max_shard_bytes": 200, "buffer_bytes": 300}
    saving = fullshard.save_weights(model, folder / "new", background=True, progress=noted(told), **options)
    add_one(model)
    found = saving.wait()
    check_told(told, found.bytes_written)
    assert saving.done and saving.wait() is found
    assert contents(folder / "new") == expected(saved(), most=200)
    total = torch.tensor([found.bytes_written])
    dist.all_reduce(total)
    assert total.item() == nbytes
    dist.barrier()
    fullshard.save_weights(model, folder / "new", background=True)
    assert [thread.name for thread in threading.enumerate()].count("fullshard-save") <= 1
    fullshard.load_weights(model, folder / "new")  # waits for it
    check(model, {name: tensor + 1 if name != "mean" else tensor for name, tensor in values().items()})
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("fullshard-save")}
    assert not threads - {"fullshard-save-beat"}  # which ends within its next second


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
@pytest.mark.parametrize("failing", [0, 1])
@ranks(2)
def test_a_failure_behind_is_told_on_every_rank(world: World, call: str, failing: int) -> None:
    model, folder = loaded(world, "rows"), world.folder(f"failing {call} {failing}")
    original = getattr(os, call)

    def broken(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and world.rank == failing:
            raise OSError(errno.EIO, "injected")
        return original(*arguments, **options)

    setattr(os, call, broken)
    told = "injected" if call != "rename" or failing == 0 else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saving = fullshard.save_weights(model, folder / "new", background=True)
            if told is None:  # only the first rank renames
                saving.wait()
                return
            with pytest.raises(RuntimeError, match=f"The background save to .*new failed: .*{told}"):
                saving.wait()
            dist.barrier()
            assert not (folder / "new").exists()
            assert bool(list(folder.glob(".new.saving/*/*.safetensors"))) == (call == "rename"), "what is whole is kept"
            dist.barrier()
            fullshard.save_weights(model, folder / "new", background=True)
            with pytest.raises(RuntimeError, match=f"The background save to .*new failed: .*{told}"):
                fullshard.save_weights(model, folder / "other")  # nobody was told before
    finally:
        setattr(os, call, original)
    fullshard.save_weights(model, folder / "new", background=True).wait()
    assert contents(folder / "new") == expected(saved())


@ranks(2)
def test_what_is_wrong_at_the_call_is_raised_by_it(world: World) -> None:
    model, folder = loaded(world, "rows"), world.folder("wrong")
    with pytest.raises(ValueError, match="background must be True or False, got 'yes'"):
        fullshard.save_weights(model, folder / "new", background="yes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="extra cannot contain '../config.json'"):
        fullshard.save_weights(model, folder / "new", background=True, extra={"../config.json": ""})
    with pytest.raises(ValueError, match="'scale' is on meta"):
        fullshard.save_weights(sharded(world, "rows"), folder / "new", background=True)
    assert not list(folder.iterdir())
