"""`save_weights`: the bytes of `save_pretrained`, each rank its own, and the old directory or the new one, whatever happens."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import CUTS, Net, check, check_told, contents, expected, loaded, noted, saved, sharded, values, written
from harness import World, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fullshard
from fullshard import EMA, ShardPlacementResult, fully_shard, load_weights, save_weights
from fullshard.weights.rules import Convert, Merge, Rename, Split, Transpose


@pytest.mark.rotates(4)
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 3, 4)
def test_files_are_those_of_one_process_for_every_cut(world: World, cut: str) -> None:
    if world.size % 2 and cut not in ("rows", "columns"):
        return
    model = loaded(world, cut)
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in saved().values())
    for most, buffer_bytes in ((10**9, 1 << 20), (200, 300)):
        folder = world.folder(f"saved {cut} {most}")
        told: list[tuple[int, int]] = []
        options = {"max_shard_bytes": most, "buffer_bytes": buffer_bytes}
        found = fullshard.save_weights(model, folder / "new", progress=noted(told), **options)
        check_told(told, found.bytes_written)
        assert contents(folder / "new") == expected(saved(), most=most)
        total = torch.tensor([found.bytes_written])
        dist.all_reduce(total)
        assert total.item() == nbytes and (found.bytes_exchanged == 0 or cut != "rows")
        again = sharded(world, "rows")
        fullshard.load_weights(again, folder / "new")
        check(again, values())


def with_replicated_head(world: World, head: float, adapter: float = 0.0) -> nn.ModuleDict:
    """A model whose `head` tensor parallelism leaves whole, with this value on this rank; and an ignored parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(4, 8, bias=False), "head": nn.Linear(8, 4, bias=False)})
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
    with torch.no_grad():
        model["head"].weight.fill_(head)
    model["adapter"] = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model["adapter"].weight, adapter)
    for name in ("up", "head"):
        fully_shard(model[name], mesh=mesh["dp"], sync="off")
    return model


@pytest.mark.proves("4f")
@ranks(4)
def test_copies_that_differ_between_ranks_are_told_before_a_file_is_written(world: World) -> None:
    """Rows of a weight that tensor parallelism leaves whole were divided among its ranks, so a file was a patchwork of two."""
    folder = world.folder("copies")
    with pytest.raises(ValueError, match=r"'head\.weight' differs between rank 0 and"):
        save_weights(with_replicated_head(world, float(world.rank % 2)), folder / "new")
    with pytest.raises(ValueError, match=r"'adapter\.weight' differs between rank 0 and"):
        save_weights(with_replicated_head(world, 1.0, adapter=float(world.rank == 3)), folder / "new")
    assert not (folder / "new").exists()
    model = with_replicated_head(world, 1.0 + 1e-6 * (world.rank % 2))  # kernels may round otherwise
    save_weights(model, folder / "new")
    with torch.no_grad():
        model["head"].weight.zero_()
    load_weights(model, folder / "new")
    torch.testing.assert_close(model["head"].weight.full_tensor(), torch.ones(4, 8))


@ranks(2)
def test_what_one_number_of_ranks_saved_another_loads(world: World) -> None:
    folder = world.folder("half") / "new"
    fullshard.save_weights(loaded(world, "columns"), folder, dtype=torch.bfloat16)
    if world.rank == 0:
        model = Net().bfloat16()
        fullshard.load_weights(model, folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, values()[name].bfloat16()), name
    dist.barrier()


@ranks(2)
def test_rules_dtypes_and_further_files(world: World) -> None:
    model, folder = loaded(world, "rows"), world.folder("rules out") / "new"
    key_map = [
        Merge([r"blocks[.]0[.]weight", r"blocks[.]1[.]weight"], "blocks.weight"),
        Split("embed.weight", ["low", "high"], dim=1, sizes=(3, 4)),
        Transpose("low"),
        Rename("^", "model."),
    ]
    if world.rank == 0:
        (folder / "kept").mkdir(parents=True)
        (folder / "kept" / "notes.txt").write_text("mine")
        (folder / "config.json").write_text("old")
        (folder / "model-00001-of-00002.safetensors").write_text("old")
    dist.barrier()
    extra = {"config.json": "{}", "tokenizer.bin": b"\0\1"}
    fullshard.save_weights(model, folder, key_map=key_map, dtype=torch.float64, extra=extra)
    state = {name: tensor.double() for name, tensor in saved().items()}
    both = torch.cat([state.pop("blocks.0.weight"), state.pop("blocks.1.weight")])
    embed = state.pop("embed.weight")
    state |= {"blocks.weight": both, "low": embed[:, :3].T, "high": embed[:, 3:]}
    found = contents(folder)
    assert (
        found.pop("model.safetensors") == expected({f"model.{name}": one for name, one in state.items()})["model.safetensors"]
    )
    assert sorted(found) == ["config.json", "kept/notes.txt", "tokenizer.bin"]
    assert (folder / "config.json").read_text() == "{}"

    def write(place: Path) -> None:
        (place / "generation.json").write_text("[]")

    fullshard.save_weights(model, folder, extra=write)
    assert sorted(contents(folder)) == [
        "config.json",
        "generation.json",
        "kept/notes.txt",
        "model.safetensors",
        "tokenizer.bin",
    ]
    assert not list(folder.parent.glob(".*"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"max_shard_bytes": 0}, "max_shard_bytes must be an int of at least 1, got 0"),
    "dtype": ({"dtype": torch.int8}, "dtype must be a floating-point torch.dtype or None, got torch.int8"),
    "convert": (
        {"key_map": [Convert(["mean"], "m", lambda mean: mean)]},
        r"save_weights\(\) does not support Convert, got one for 'm'",
    ),
    "twice": ({"key_map": [Rename(".+", "a")]}, "key_map gives 'a' twice"),
    "extra": ({"extra": {"../config.json": ""}}, "extra cannot contain '../config.json': expected the plain name of a file"),
}


@pytest.mark.parametrize("kind", REFUSED)
@ranks(2)
def test_what_cannot_be_is_told_on_every_rank_and_leaves_nothing(world: World, kind: str) -> None:
    options, told = REFUSED[kind]
    model, folder = loaded(world, "rows"), world.folder(f"refused {kind}")
    with pytest.raises(ValueError, match=told):
        fullshard.save_weights(model, folder / "new", **options)
    dist.barrier()
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="'scale' is on meta and has no values"):
        fullshard.save_weights(sharded(world, "rows"), folder / "new")


CALLS = ["posix_fallocate", "pwrite", "fsync", "rename"]


@pytest.mark.rotates(4)
@pytest.mark.proves("4c")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("failing", [0, 1])
@ranks(2)
def test_every_call_that_fails_leaves_the_old_directory_whole(world: World, call: str, failing: int) -> None:
    model, folder = loaded(world, "columns"), world.folder(f"failing {call} {failing}") / "new"
    fullshard.save_weights(model, folder, extra={"config.json": "old"})
    before, original = contents(folder), getattr(os, call)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1)
    new = {name: tensor + 1 if name != "mean" else tensor for name, tensor in values().items()}
    number, left = 0, list[str]()  # places of new content that could not be put into its place
    while True:
        number += 1
        calls = 0

        def broken(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += world.rank == failing
            if calls == number and world.rank == failing:
                raise OSError(errno.ENOSPC if call == "posix_fallocate" else errno.EIO, "injected")
            return original(*arguments, **options)

        setattr(os, call, broken)
        try:
            fullshard.save_weights(model, folder, max_shard_bytes=300, extra={"config.json": "new"})
        except (ValueError, RuntimeError) as failure:
            assert "injected" in str(failure) and (call != "posix_fallocate" or "bytes are needed, " in str(failure))
            told = re.search(r"is complete in (.+?), and ", str(failure))
        else:
            break
        finally:
            setattr(os, call, original)
        dist.barrier()
        changed = contents(folder)
        if told is not None:
            again = sharded(world, "rows")
            fullshard.load_weights(again, told[1])
            check(again, new)
            left.append(told[1])
        assert changed == before or (changed["config.json"] == hashlib.sha256(b"new").hexdigest() and len(changed) > 3)
        dist.barrier()
    assert contents(folder) != before and not list(folder.parent.glob(".*"))
    again = sharded(world, "rows")
    fullshard.load_weights(again, folder)
    check(again, new)
    assert not any(Path(path).exists() for path in left), left
    assert bool(left) == (failing == 0 and call != "posix_fallocate"), "the first rank puts it into its place"


@ranks(2)
def test_every_rank_puts_files_of_its_own_into_the_same_commit(world: World) -> None:
    torch.manual_seed(0)
    model = fullshard.fully_shard(nn.Linear(8, 8), mesh=world.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    ema = fullshard.EMA(model, 0.9)
    folder = world.folder("training") / "run"

    def write(path: Path) -> None:
        local = {k: v.to_local() for k, v in optimizer.state[model.weight].items() if hasattr(v, "to_local")}
        state = {"optimizer": local, "averages": {k: v.to_local() for k, v in ema.state_dict()["averages"].items()}}
        torch.save({**state, "generator": torch.get_rng_state(), "step": 1}, path / f"training-{world.rank}.pt")

    save_weights(model, folder, each_rank=write)
    dist.barrier()
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "training-0.pt", "training-1.pt"}
    mine = torch.load(folder / f"training-{world.rank}.pt")
    assert torch.equal(mine["optimizer"]["exp_avg"], optimizer.state[model.weight]["exp_avg"].to_local()) and mine["step"] == 1

    def fails(path: Path) -> None:
        if world.rank == 1:
            raise OSError("no room")

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    with pytest.raises((OSError, RuntimeError), match="no room"):
        save_weights(model, folder, each_rank=fails)
    with pytest.raises(
        (ValueError, RuntimeError), match="each_rank wrote 'model.safetensors', a name that is reserved for the model's weights"
    ):
        save_weights(model, folder, each_rank=lambda path: _replace(path) if world.rank == 1 else None)
    dist.barrier()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "all or nothing"


def _replace(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").write_bytes(b"")


@ranks(2)
def test_a_state_dict_of_what_a_load_left_without_values_is_said(world: World) -> None:
    folder = written(world, "half", {"weight": torch.ones(8, 8)})
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fullshard.fully_shard(model, mesh=world.mesh)
    load_weights(model, folder, strict=False)
    with pytest.warns(UserWarning, match=r"state_dict\(\) of unit .*load_weights\(\) allocated parameter 'bias', and nothing"):
        model.state_dict()
    with torch.no_grad():
        model.bias.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()


@ranks(1)
def test_weights_of_another_name_stay(world: World) -> None:
    """Names that begin alike were taken for shards of the checkpoint, and removed."""
    directory, model = world.folder("names"), fully_shard(nn.Linear(4, 3), mesh=world.mesh)
    for filename in ("model-ema.safetensors", "model.safetensors", "model-lora-v2.safetensors", "model.safetensors"):
        save_weights(model, directory, filename=filename)
    assert {"model-ema.safetensors", "model-lora-v2.safetensors", "model.safetensors"} <= set(os.listdir(directory))


@ranks(1)
def test_conjugated_and_negated_views_are_saved_as_they_are_read(world: World) -> None:
    """Their memory has other values."""
    model = fully_shard(nn.Linear(4, 3), mesh=world.mesh)
    model.register_buffer("turned", torch.tensor([1 + 2j], dtype=torch.complex64).conj())
    model.register_buffer("negated", torch._neg_view(torch.ones(3)))
    directory = world.folder("views")
    save_weights(model, directory)
    found = read_back(directory)
    assert found["turned"].tolist() == [1 - 2j] and found["negated"].tolist() == [-1.0] * 3


def read_back(directory: Any) -> dict[str, Tensor]:
    model = nn.Module()
    model.register_buffer("turned", torch.zeros(1, dtype=torch.complex64))
    model.register_buffer("negated", torch.zeros(3))
    load_weights(model, directory, strict=False)
    return dict(model.named_buffers())


@ranks(2)
def test_options_that_decide_about_messages_are_compared(world: World) -> None:
    """Ranks with other buffers waited for messages that nobody sent."""
    directory, model = world.folder("options"), fully_shard(nn.Linear(64, 64), mesh=world.mesh, sync="broadcast")
    averages, first = EMA(model, 0.9), world.rank == 0
    for options in (
        {"buffer_bytes": 1 << (16 + world.rank)},
        {"weights": averages if first else None},
        {"each_rank": (lambda path: None) if first else None},
        {"background": first},
    ):
        with pytest.raises(ValueError, match="buffer_bytes, weights, each_rank, background, step and keep differs"):
            save_weights(model, directory, **options)  # type: ignore[arg-type]
    save_weights(model, directory)
    for more in ({"buffer_bytes": 1 << (16 + world.rank)}, {"replicas": "auto" if first else "read"}):
        with pytest.raises(ValueError, match="buffer_bytes, replicas or the tensors"):
            load_weights(model, directory, **more)  # type: ignore[arg-type]


@ranks(2, 3)
def test_buffers_that_differ_are_saved_from_the_first_rank(world: World) -> None:
    """Each rank wrote its share of the rows, so running statistics were saved that no rank had."""
    directory, model = world.folder("statistics"), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    fully_shard(model, mesh=world.mesh, sync="broadcast")
    model[1].running_mean.fill_(world.rank + 1.0)
    save_weights(model, directory)
    load_weights(model, directory)
    assert model[1].running_mean.tolist() == [1.0] * 6


@ranks(1)
def test_names_and_dtypes_that_files_cannot_have_are_refused_by_name(world: World) -> None:
    for name, tensor, text in (
        ("__metadata__", torch.ones(2), "the file format reserves it"),
        ("wide", torch.ones(2, dtype=torch.complex128), "Tensor 'wide' of torch.complex128 cannot be saved"),
    ):
        model = fully_shard(nn.Linear(2, 2), mesh=world.mesh)
        model.register_buffer(name, tensor)
        with pytest.raises(ValueError, match=text):
            save_weights(model, world.folder("refused"))


@ranks(1)
def test_the_last_saved_steps_are_kept_whatever_was_added_to_older_ones(world: World) -> None:
    directory, model = world.folder("steps"), fully_shard(nn.Linear(2, 2), mesh=world.mesh)
    for step in (100, 200, 300):
        save_weights(model, directory, step=step, keep=2)
        if step == 200:
            (directory / "step-100" / "evaluation.json").write_text("{}")
    assert sorted(one for one in os.listdir(directory) if one.startswith("step-")) == ["step-200", "step-300"]


@ranks(1)
def test_what_else_is_named_like_a_step_stays_and_fails_no_save(world: World) -> None:
    directory, model = world.folder("others"), fully_shard(nn.Linear(2, 2), mesh=world.mesh)
    (directory / "step-7").write_text("no directory")
    (directory / "step-8").mkdir()
    (directory / "step-8" / "gone.safetensors").symlink_to("nowhere")
    for step in (10, 20):
        save_weights(model, directory, step=step, keep=3)
    assert {"step-7", "step-8", "step-10", "step-20"} <= set(os.listdir(directory))
    save_weights(model, directory, step=30, keep=1)
    assert sorted(one for one in os.listdir(directory) if one.startswith("step-")) == ["step-30", "step-7"]


@ranks(1)
def test_copies_of_shards_by_hand_stay(world: World) -> None:
    directory, model = world.folder("copies"), fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=world.mesh)
    for _ in range(2):
        save_weights(model, directory, max_shard_bytes=300)
        (directory / "model-00001-of-00002-old.safetensors").write_bytes(b"a copy")
    assert (directory / "model-00001-of-00002-old.safetensors").read_bytes() == b"a copy"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.arange(32.0).view(8, 4)), nn.Parameter(torch.arange(20.0).view(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x


@ranks(4)
def test_a_parameter_on_a_larger_mesh_than_its_unit_is_saved_by_all_ranks(world: World) -> None:
    """The ranks of its unit agreed among themselves: two saved half of the rows, and two failed."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, folder = Pair(), world.folder("larger")
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), two) if len(parameter) == 8 else None

    fullshard.fully_shard(model, mesh=two["shard"], shard_placement_fn=place)
    save_weights(model, folder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fullshard.weights.iter_full(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fullshard.load_weights(model, folder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fullshard.weights.iter_full(model))
