"""`load_weights`: every shard gets its values, every byte is read by one rank, and what is wrong is told on all before anything changes."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import nullcontext
from math import prod
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import CUTS, Net, check, check_told, counted, loaded, noted, saved, sharded, values, write, written
from harness import World, ranks
from models import full
from rotation import share_of
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fullshard
from fullshard import _torch, counting
from fullshard.compat import FullyShardedDataParallel
from fullshard.weights import allocating
from fullshard.weights.loading import load_weights
from fullshard.weights.rules import Convert, Drop, Merge, Rename, Transpose
from fullshard.weights.targets import tensors_of


@pytest.mark.rotates(4)
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 3, 4)
def test_every_rank_reads_its_share_and_has_its_values(world: World, cut: str, meta: bool) -> None:
    if world.size % 2 and cut not in ("rows", "columns"):
        return
    folder = written(world, f"load {cut} {meta}", saved())
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in saved().values())
    model = sharded(world, cut, meta=meta)
    told: list[tuple[int, int]] = []
    with counted() as reads:
        found = load_weights(model, folder, buffer_bytes=400, progress=noted(told))
    assert found.bytes_read == found.bytes_useful
    check_told(told, found.bytes_read)
    everything = torch.tensor([found.bytes_read, sum(reads)])
    dist.all_reduce(everything)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert everything.tolist() == [nbytes, size], "the checkpoint and its headers are read once, by all ranks together"
    share, rows = 0.0, 0
    tensors = tensors_of(model)
    for held in tensors.entries:
        boxes, shape = held.target.shard_map.boxes, held.target.shape
        row = held.local.itemsize * prod(shape[1:])
        mine = boxes[tensors.index]
        if mine is not None:
            alike = [
                one for one in boxes if one is not None and (one.start[:1], one.shape[:1]) == (mine.start[:1], mine.shape[:1])
            ]
            share += (mine.shape[0] if shape else 1) * row / len(alike)
        rows += row
    assert abs(found.bytes_read - share) <= rows, "each rank its share, within one row of each parameter"
    check(model, values())
    assert found.ties == ("head.weight",) and not found.missing and not found.unexpected
    assert found.unwritten == (("rope",) if meta else ())
    if cut == "tensor":
        return
    if meta:
        with torch.no_grad():
            model.rope.zero_()
    reference = Net()
    reference.load_state_dict(values())
    ids = torch.arange(6).view(2, 3)
    torch.testing.assert_close(model(ids), reference(ids))


@pytest.mark.parametrize("cut", CUTS)
@ranks(4)
def test_replicas_may_read_for_themselves(world: World, cut: str) -> None:
    folder = written(world, f"alone {cut}", saved())
    model = sharded(world, cut)
    with counting(model) as messages:
        found = load_weights(model, folder, replicas="read")
    check(model, values())
    assert found.bytes_exchanged == 0 and all(message.nbytes < 1000 for message in messages)


@ranks(2)
def test_rules_dtypes_and_several_files(world: World) -> None:
    state = values()
    other = {
        "net.embed.weight": state["embed.weight"].double(),
        "net.blocks.0.weight_t": state["blocks.0.weight"].T,
        "net.blocks.0.bias": state["blocks.0.bias"],
        "net.blocks.1.upper": state["blocks.1.weight"][:2],
        "net.blocks.1.lower": state["blocks.1.weight"][2:],
    }
    rest = {
        "net.blocks.1.bias": state["blocks.1.bias"].bfloat16(),
        "net.half": state["column"] / 2,
        "net.scale": state["scale"],
        "net.mean": state["mean"],
    }
    folder = written(world, "rules", other, rest)
    key_map = [
        Rename("^net[.]", ""),
        Transpose("weight_t$"),
        Rename("weight_t$", "weight"),
        Merge([r"(.*)[.]upper", r"(.*)[.]lower"], r"\1.weight"),
        Convert(["half"], "column", lambda half: half * 2),
    ]
    model = sharded(world, "rows")
    told: list[tuple[int, int]] = []
    found = load_weights(model, folder, key_map=key_map, strict=False, buffer_bytes=256, progress=noted(told))
    check_told(told, found.bytes_read)
    check(model, {**state, "blocks.1.bias": state["blocks.1.bias"].bfloat16().float()})
    assert found.conversions == {
        "embed.weight": "float64 -> float32",
        "blocks.1.bias": "bfloat16 -> float32",
        "column": "computed",
    }
    with pytest.raises(ValueError, match="embed.weight is float64 in the file and float32 in the model, which rounds it"):
        load_weights(model, folder, key_map=key_map)


@ranks(2)
def test_a_progress_that_raises_ends_loads_and_saves_on_all_ranks(world: World) -> None:
    folder = written(world, "raises", saved())

    def raises(done: int, total: int) -> None:
        if world.rank == 1:
            raise LookupError("no bar")

    with pytest.raises(RuntimeError, match="no bar"):
        load_weights(sharded(world, "rows"), folder, progress=raises)
    model = loaded(world, "rows")
    for background in (False, True):
        with pytest.raises(RuntimeError, match="no bar"):
            found = fullshard.save_weights(model, folder / "new", progress=raises, background=background)
            found.wait()  # type: ignore[union-attr]
        dist.barrier()
        assert not (folder / "new").exists() and not list(folder.glob(".*"))


WRONG: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda s: {name: one for name, one in s.items() if name != "mean"},
        "the model has 'mean', but the checkpoint does not",
    ),
    "unexpected": (
        lambda s: {**s, "blocks.0.wieght": s["scale"]},
        r"the checkpoint has 'blocks.0.wieght', but the model does not",
    ),
    "shape": (lambda s: {**s, "column": torch.zeros(7, 2)}, r"column is \(7, 2\) in the file and \(7, 1\) in the model"),
}


@pytest.mark.parametrize("kind", WRONG)
@ranks(2)
def test_what_does_not_fit_is_told_on_every_rank_and_changes_nothing(world: World, kind: str) -> None:
    change, told = WRONG[kind]
    folder = written(world, f"wrong {kind}", change(saved()))
    model = sharded(world, "rows")
    with pytest.raises(ValueError, match=told) as refused:
        load_weights(model, folder)
    texts: list[Any] = [None] * world.size
    dist.all_gather_object(texts, str(refused.value))
    assert len(set(texts)) == 1 and all(p.device.type == "meta" for p in model.parameters())
    if kind != "shape":
        found = load_weights(model, folder, strict=False)
        assert found.missing == (("mean",) if kind == "missing" else ())
        assert found.unexpected == (("blocks.0.wieght",) if kind == "unexpected" else ())


@ranks(2)
def test_memory_that_one_rank_does_not_get_ends_the_load_on_all_ranks(world: World) -> None:
    folder = written(world, "memory", saved())
    with torch.device("meta"):
        model = Net()
    fullshard.fully_shard(model.blocks[0], mesh=world.mesh)
    fullshard.fully_shard(model, mesh=world.mesh)
    allocate = mock.patch.object(allocating, "_allocate_like", side_effect=RuntimeError("no memory is left"))
    with allocate if world.rank else nullcontext(), pytest.raises(Exception, match="no memory is left"):
        load_weights(model, folder)
    assert all(parameter.is_meta or bool(_torch.local_part(parameter).isnan().all()) for parameter in model.parameters())
    state = saved()
    load_weights(model, folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), state[name].to(parameter.dtype)), name


@pytest.mark.proves("4b")
@ranks(2)
def test_what_is_missing_is_named_and_no_forward_takes_it_for_values(world: World) -> None:
    some = {name: one for name, one in saved().items() if name not in ("mean", "blocks.0.bias", "column")}
    folder = written(world, "some", some)
    with torch.device("meta"):
        model = Net()
    fullshard.fully_shard(model.blocks[0], mesh=world.mesh)
    fullshard.fully_shard(model, mesh=world.mesh, ignored_params={model.column})
    found = load_weights(model, folder, strict=False)
    assert sorted(found.missing) == ["blocks.0.bias", "column", "mean"]
    assert sorted(found.unwritten) == ["blocks.0.bias", "column", "mean", "rope"] and model.column.isnan().all()
    with torch.no_grad():
        model.rope.zero_(), model.column.zero_()
    with pytest.raises(fullshard.StateError, match="buffer 'mean' of FSDPNet, and nothing has written it"):
        model(torch.zeros(2, 3).long())
    model.mean.zero_()
    with pytest.raises(fullshard.StateError, match="parameter 'bias', and nothing has written it"):
        model(torch.zeros(2, 3).long())
    raises = mock.Mock(side_effect=OSError("the disk is gone"))
    with torch.no_grad():
        _torch.local_part(model.blocks[0].bias).fill_(float("nan"))
    model.mean.zero_()
    assert load_weights(model, folder, strict=False).unwritten == ("blocks.0.bias",), "it has no values still"
    with pytest.raises(Exception, match="the disk is gone"):
        load_weights(model, folder, strict=False, progress=raises)
    assert load_weights(model, folder, strict=False).unwritten == ("blocks.0.bias",)
    with pytest.raises(fullshard.StateError, match="parameter 'bias', and nothing has written it"):
        model(torch.zeros(2, 3).long())
    plain = Net().to("meta")
    assert "mean" in load_weights(plain, folder, strict=False).unwritten and plain.mean.isnan().all()


@ranks(2)
def test_a_renamed_key_is_told_with_the_nearest_name(world: World) -> None:
    state = saved()
    state["blocks.0.wieght"] = state.pop("blocks.0.weight")
    folder = written(world, "nearest", state)
    with pytest.raises(ValueError, match=r"the model has 'blocks.0.weight', .* \(nearest: 'blocks.0.wieght'\)"):
        load_weights(sharded(world, "rows"), folder)


@ranks(2)
def test_a_truncated_file_is_told_by_all_before_anything_changed(world: World) -> None:
    folder = written(world, "truncated", saved())
    if world.rank == 0:
        path = folder / "model-0.safetensors"
        os.truncate(path, path.stat().st_size - 5)
    dist.barrier()
    model = sharded(world, "rows")
    with pytest.raises(ValueError, match=r"model-0.safetensors: truncated by 5 bytes: .*\('[\w.]+' is the first"):
        load_weights(model, folder)
    assert all(p.device.type == "meta" for p in model.parameters())
    with pytest.raises(ValueError, match="No such file"):
        load_weights(model, folder / "nowhere.safetensors")


LIES = (
    "truncated",
    "longer",
    "overlapping",
    "gapped",
    "duplicated",
    "another shape",
    "another dtype",
    "huge",
    "negative",
    "no JSON",
)


def lying(draw: Random, kind: str, content: bytes) -> tuple[bytes, str]:
    """(the content of a file with such a fault, the name of a tensor that the error must have; "" for one of the file alone)."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__" and header[name]["data_offsets"][1]]
    name = draw.choice(names)
    begin, end = header[name]["data_offsets"]
    if kind == "truncated":
        return content[: -draw.randint(1, len(data))], "truncated by"
    if kind == "longer":
        return content + bytes(draw.randint(1, 99)), ""
    if kind == "no JSON":
        at = draw.randrange(8, 8 + length - 8)
        return content[:at] + b"\xff" + content[at + 1 :], ""
    if kind == "duplicated":
        text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}'
        return len(text).to_bytes(8, "little") + text.encode() + data, name
    entry = dict(header[name])
    if kind in ("overlapping", "gapped"):
        by = draw.randint(1, 64) * (-1 if kind == "overlapping" else 1)
        entry["data_offsets"] = [begin + by, end + by]
    elif kind == "another shape":
        entry["shape"] = [*entry["shape"], draw.randint(2, 9)]
    elif kind == "another dtype":
        entry["dtype"] = draw.choice(["F64", "F16", "I8", "F31"])
    elif kind == "huge":
        entry |= {"shape": [2 ** draw.randint(40, 200)], "data_offsets": [begin, begin + 4 * 2 ** draw.randint(40, 200)]}
    else:
        entry["shape"] = [-one for one in entry["shape"]] or [-1]
    text = json.dumps({**header, name: entry})
    told = "" if kind in ("overlapping", "gapped", "huge") else name
    return len(text).to_bytes(8, "little") + text.encode() + data, told


@pytest.mark.proves("4b")
@pytest.mark.parametrize("kind", LIES)
@ranks(2)
def test_files_that_lie_are_told_on_every_rank_before_the_model_changed(world: World, kind: str) -> None:
    """Nothing is read beyond the header, and no memory is taken that it asks for."""
    model = sharded(world, "rows")
    for seed in range(share_of(48)):
        folder = written(world, f"lies {kind}", saved())
        path = folder / "model-0.safetensors"
        content, told = lying(Random(seed), kind, path.read_bytes())
        dist.barrier()
        if world.rank == 0:
            path.write_bytes(content)
        dist.barrier()
        with counted() as reads, pytest.raises(ValueError, match="model-0.safetensors: ") as refused:
            load_weights(model, folder)
        text = str(refused.value)
        assert told in text and ("tensor '" in text or "truncated" in text or kind in ("longer", "no JSON", "duplicated")), text
        assert sum(reads) <= len(content)
        texts: list[Any] = [None] * world.size
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1 and all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize("cut", ["rows", "columns"])
@ranks(2)
def test_a_read_that_fails_on_one_rank_raises_on_all_and_the_next_forward_too(world: World, cut: str) -> None:
    folder = written(world, f"fails {cut}", saved())
    model = sharded(world, cut)
    read = os.preadv

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    os.preadv = broken if world.rank == 1 else read
    try:
        with pytest.raises((ValueError, RuntimeError), match="cannot be read at byte .*: Input/output error") as failed:
            load_weights(model, folder)
    finally:
        os.preadv = read
    texts: list[Any] = [None] * world.size
    dist.all_gather_object(texts, str(failed.value))
    assert len(set(texts)) == 1
    with pytest.raises(fullshard.StateError, match="nothing has written"):
        model(torch.zeros(2, 3).long())
    load_weights(model, folder)
    check(model, values())


@pytest.mark.proves("4b")
@pytest.mark.parametrize("kind", ["longer", "another order", "another step", "copied"])
@ranks(2)
def test_ranks_with_other_files_are_told(world: World, kind: str) -> None:
    """Each rank has a disk of its own. Files of equal length whose tensors are in another order gave wrong weights in silence."""
    folder = written(world, "others", saved())
    here = world.folder("elsewhere") / f"rank {world.rank}"
    here.mkdir(exist_ok=True)
    content = (folder / "model-0.safetensors").read_bytes()
    (here / "model-0.safetensors").write_bytes(content + b"more" if kind == "longer" and world.rank else content)
    if kind == "another order" and world.rank:
        write(here / "model-0.safetensors", dict(reversed(saved().items())))
    if kind == "another step" and world.rank:  # the same but for some values: it was loaded
        write(here / "model-0.safetensors", {name: one + 1 for name, one in saved().items()})
    told = {
        "another step": r"model-0.safetensors has different values on one rank than on the first rank, .* Load the same files on all ranks",
        "longer": r"model-0.safetensors has [\d,]+ bytes on one rank, .* Load the same files on all ranks",
        "another order": r"model-0.safetensors has different tensors or a different tensor order .* Load the same files on all ranks",
    }
    before = os.getcwd()
    os.chdir(here)
    try:
        model = sharded(world, "rows")
        if kind == "copied":
            load_weights(model, "model-0.safetensors")
            check(model, values())
        else:
            with pytest.raises(ValueError, match=told[kind]):
                load_weights(model, "model-0.safetensors")
    finally:
        os.chdir(before)


@ranks(1)
def test_a_model_without_units_is_loaded_too(world: World) -> None:
    folder = written(world, "plain", saved())
    model = Net()
    assert load_weights(model, folder).unwritten == ()
    check(model, values())
    assert json.dumps(sorted(model.state_dict())) == json.dumps(sorted(values()))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"threads": 0}, "threads must be an int of at least 1, got 0"),
        ({"buffer_bytes": "1G"}, "buffer_bytes must be an int of at least 1, got '1G'"),
        ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
        ({"progress": True}, r"progress must be a function \(bytes so far, bytes in all\), got True"),
        ({"replicas": "all"}, "replicas must be 'auto' or 'read', got 'all'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_weights(nn.Linear(2, 2), "nowhere", **options)


@ranks(2)
def test_key_maps_that_differ_are_told_on_every_rank(world: World) -> None:
    """Each rank read what it thought, and waited for rows that nobody sent."""
    folder = written(world, "maps", {name.replace("blocks", "layers"): one for name, one in saved().items()})
    model = sharded(world, "rows")
    rules = [Rename("layers", "blocks")]
    twisted = [*rules, Transpose(r"blocks\.0\.weight")]
    with pytest.raises(ValueError, match="the tensors that key_map makes differ between ranks"):
        load_weights(model, folder, key_map=twisted if world.rank else rules)
    load_weights(model, folder, key_map=rules)
    check(model, values())
    with pytest.raises(ValueError, match="One of key_map, dtype, max_shard_bytes, .* differs between ranks"):
        fullshard.save_weights(model, folder.parent / "other", max_shard_bytes=200 + 100 * world.rank)


@ranks(2)
def test_what_may_be_missing_is_said_by_pattern(world: World) -> None:
    folder = written(world, "missing", {name: one for name, one in saved().items() if "bias" not in name})
    model = sharded(world, "rows", meta=False)
    before = model.blocks[0].bias.full_tensor().clone()
    report = load_weights(model, folder, missing=[r"^blocks\.\d+\.bias$"])
    assert report.missing == ("blocks.0.bias", "blocks.1.bias") and torch.equal(model.blocks[0].bias.full_tensor(), before)
    for wrong in (["blocks.0.bias"], ["embed"]):
        with pytest.raises(ValueError, match=r"the model has 'blocks.1.bias'"):
            load_weights(model, folder, missing=wrong)
    with pytest.raises(ValueError, match=r"missing must be a list of regular expressions, got 'bias'"):
        load_weights(model, folder, missing="bias")


class Rotary(nn.Module):
    """Has buffers that no checkpoint has: of numbers, of shapes, and one that is random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("turns", 1.0 / (100.0 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("scale", torch.tensor(2.5), persistent=False)
        self.register_buffer("noise", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale * self.turns.sum()


@ranks(2)
def test_buffers_that_no_checkpoint_has_get_the_values_that_the_model_is_built_with(world: World) -> None:
    torch.manual_seed(0)
    whole = Rotary()
    folder = written(world, "buffers", whole.state_dict())
    with torch.device("meta"):
        model = Rotary()
    fullshard.fully_shard(model, mesh=world.mesh)
    with pytest.raises(ValueError, match=r"buffers\(\) must return the newly built model, got a int"):
        fullshard.load_weights(model, folder, buffers=lambda: 3)  # type: ignore[arg-type, return-value]
    loaded = fullshard.load_weights(model, folder, buffers=Rotary)
    assert loaded.unwritten == ("noise",), "what is random is not made up"
    assert torch.equal(model.turns, whole.turns) and torch.equal(model.scale, whole.scale)
    model.noise.copy_(whole.noise)
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), whole(x))


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0) * 2 + 1, persistent=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@ranks(1)
def test_buffers_below_activation_checkpointing_are_filled(world: World) -> None:
    """Their names have a prefix, by which they were not found; loaded weights were reported as unwritten."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    directory = world.folder("wrapped")
    fullshard.save_weights(fullshard.fully_shard(nn.Sequential(WithTable()), mesh=world.mesh), directory)
    with torch.device("meta"):
        model = nn.Sequential(checkpoint_wrapper(WithTable()))
    fullshard.fully_shard(model, mesh=world.mesh)
    report = fullshard.load_weights(model, directory, buffers=lambda: nn.Sequential(WithTable()))
    assert report.unwritten == ()
    assert next(buffer for _, buffer in model.named_buffers()).tolist() == [1.0, 3.0, 5.0, 7.0]
    with torch.device("meta"):
        model = nn.Sequential(checkpoint_wrapper(WithTable()))
    fullshard.fully_shard(model, mesh=world.mesh)
    report = fullshard.load_weights(model, directory, buffers=lambda: nn.Sequential(checkpoint_wrapper(WithTable())))
    assert report.unwritten == ()
    assert next(buffer for _, buffer in model.named_buffers()).tolist() == [1.0, 3.0, 5.0, 7.0]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrapper", ["compiled blocks", "compiled", "FSDP1"])
@ranks(2)
def test_names_are_those_of_the_plain_model_whatever_wraps_its_modules(world: World, wrapper: str) -> None:
    """Files, iter_full() and EMA had names with `_orig_mod` and `_fsdp_wrapped_module`, and no plain checkpoint fitted."""

    def build(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(WithTable(), WithTable())

    def wrapped() -> Any:
        model = build(1)
        if wrapper == "FSDP1":
            return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy([WithTable]), use_orig_params=True)
        if wrapper == "compiled blocks":
            model[0] = compiled(model[0])
        fullshard.fully_shard(model[0], mesh=world.mesh)
        fullshard.fully_shard(model, mesh=world.mesh)
        return compiled(model) if wrapper == "compiled" else model

    plain = fullshard.fully_shard(build(), mesh=world.mesh)
    names = [name for name, _ in plain.named_parameters()]
    directory, again = world.folder("plain"), world.folder("again")
    fullshard.save_weights(plain, directory)
    model = wrapped()
    assert [name for name, _ in fullshard.iter_full(model)] == names
    assert list(fullshard.EMA(model, 0.9).values()) == names
    with torch.device("cpu" if wrapper == "FSDP1" else "meta"):  # a meta model has no values of its own
        model = wrapped()
    assert fullshard.load_weights(model, directory, buffers=build).unwritten == ()
    fullshard.save_weights(model, again, key_map=[Rename("^0", "first")])
    fullshard.load_weights(model, again, key_map=[Rename("^first", "0")])
    assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    assert all(torch.equal(full(one), full(other)) for one, other in zip(model.parameters(), plain.parameters()))
    assert all(buffer.tolist() == [1.0, 3.0, 5.0, 7.0] for buffer in model.buffers())


@ranks(2)
def test_a_second_load_fills_the_buffers_of_one_that_failed(world: World) -> None:
    """Buffers that no checkpoint has kept NaN: they were not on meta any more, and nothing said so."""
    directory = world.folder("twice")
    fullshard.save_weights(fullshard.fully_shard(nn.Sequential(WithTable()), mesh=world.mesh, sync="broadcast"), directory)
    with torch.device("meta"):
        model = nn.Sequential(WithTable())
    fullshard.fully_shard(model, mesh=world.mesh)

    def raises(*_: int) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        fullshard.load_weights(model, directory, progress=raises)
    report = fullshard.load_weights(model, directory)
    assert report.unwritten == ("0.table",)
    with pytest.warns(UserWarning, match="uninitialized buffers: .* buffer 'table' of WithTable"):
        model(torch.ones(1, 4))
    with torch.device("meta"):
        model = nn.Sequential(WithTable())
    fullshard.fully_shard(model, mesh=world.mesh)
    with pytest.raises(Exception, match="the disk is gone"):
        fullshard.load_weights(model, directory, progress=raises)
    report = fullshard.load_weights(model, directory, buffers=lambda: nn.Sequential(WithTable()))
    assert report.unwritten == () and model[0].table.tolist() == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.proves("4e")
@ranks(1, 3)
def test_tied_tensors_whose_values_differ_in_the_checkpoint_are_told(world: World) -> None:
    """One of them was loaded, and the other one ignored."""
    state = {name: value for name, value in saved().items() if name != "head.weight"}
    twin = state["embed.weight"].clone()
    same = written(world, "same", state, {"head.weight": twin})
    model = sharded(world, "rows", meta=False)
    assert load_weights(model, same).ties == ("head.weight",)
    twin[12, 6] += 1
    other = written(world, "other", state, {"head.weight": twin})
    model = sharded(world, "rows", meta=False)
    before = model.embed.weight.full_tensor().clone()
    told = "'embed.weight' and 'head.weight' are one parameter of the model, but their values in the checkpoint differ"
    with mock.patch("fullshard.weights.headers._COMPARED", 100), pytest.raises(ValueError, match=told):
        load_weights(model, other)
    assert torch.equal(model.embed.weight.full_tensor(), before)
    load_weights(model, other, key_map=[Drop("^head")])
    assert torch.equal(model.embed.weight.full_tensor(), state["embed.weight"])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load_weights(model, other, strict=False)
    assert [told in str(one.message) for one in found] == ([True] if world.rank == 0 else [])
