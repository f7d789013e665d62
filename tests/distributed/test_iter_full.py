"""`iter_full`: every full tensor, a bucket per message, and no more memory than that."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import CUTS, Net, saved, sharded, values, written
from exits import Rank, run_job, soon
from harness import World, ranks
from torch import Tensor, nn

import fullshard
from fullshard.weights.rules import Convert, Merge, Rename, RenameBy, Sort, Split


def loaded(world: World, cut: str) -> Any:
    model = sharded(world, cut)
    fullshard.load_weights(model, written(world, f"for iter {cut}", saved()))
    return model


@pytest.mark.rotates(4)
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 3, 4)
def test_every_full_tensor_comes_once_in_order(world: World, cut: str) -> None:
    if world.size % 2 and cut not in ("rows", "columns"):
        return
    model = loaded(world, cut)
    for options in ({}, {"bucket_bytes": 1}, {"bucket_bytes": 300, "ahead": 0}, {"dtype": torch.bfloat16, "ahead": 3}):
        found = {name: tensor.clone() for name, tensor in fullshard.iter_full(model, **options)}
        assert list(found) == [name for name in Net().state_dict() if name != "head.weight"]
        for name, tensor in found.items():
            assert torch.equal(tensor, values()[name].to(options.get("dtype", torch.float32))), name
    devices = {tensor.device.type for _, tensor in fullshard.iter_full(model, to=0)}
    assert devices == ({world.mesh.device_type} if world.rank == 0 else set())


class Deep(nn.Module):
    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(()))
        self.ignored = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.ignored.sum()


def deep(world: World | Rank, **options: Any) -> Any:
    torch.manual_seed(0)
    model, mesh = Deep(), world.mesh if isinstance(world, World) else world.mesh()
    for layer in model.layers:
        fullshard.fully_shard(layer, mesh=mesh, **options)
    return fullshard.fully_shard(model, mesh=mesh, ignored_params={model.ignored}, **options)


@pytest.mark.proves("24a")
@ranks(2)
def test_messages_are_buckets_and_what_is_here_is_not_sent(world: World) -> None:
    model, layer = deep(world), 16 * 16 * 4
    for bucket_bytes, many in ((layer, 8), (3 * layer, 3), (1 << 30, 1)):
        with fullshard.counting(model) as messages:
            for _ in fullshard.iter_full(model, bucket_bytes=bucket_bytes):
                pass
        assert [message.kind for message in messages] == ["all_gather"] * many
    with fullshard.counting(model) as messages:
        sizes = [tensor.numel() for _, tensor in fullshard.iter_full(model, bucket_bytes=2 * layer + 100, dtype=torch.bfloat16)]
    assert sum(message.nbytes for message in messages) == 8 * layer // 2 and len(messages) == 2 and sum(sizes) == 8 * 256 + 4
    with fullshard.resident(model), fullshard.counting(model) as messages:
        full = dict(fullshard.iter_full(model))
        assert torch.equal(full["layers.3.weight"], model.layers[3].weight)
    assert not messages


@ranks(2)
def test_what_is_under_way_is_as_many_buckets_as_asked_for(world: World) -> None:
    model, layer = deep(world), 16 * 16 * 4
    for ahead in (0, 1, 2):
        with fullshard.counting(model) as messages:
            seen = [
                len(messages) for name, _ in fullshard.iter_full(model, bucket_bytes=layer, ahead=ahead) if "layers" in name
            ]
        assert seen == [min(8, number + 1 + ahead) for number in range(8)]


@ranks(2)
def test_leaving_early_and_going_on(world: World) -> None:
    model = deep(world)
    for name, _ in fullshard.iter_full(model, bucket_bytes=1):
        if name == "layers.2.weight":
            break
    out = model(torch.ones(2, 16))
    reference = Deep()
    reference.load_state_dict({name: tensor.clone() for name, tensor in fullshard.iter_full(model)})
    torch.testing.assert_close(out, reference(torch.ones(2, 16)))


def leaving(rank: Rank) -> None:
    rank.begin()
    model = deep(rank)
    rank.event()
    for name, _ in fullshard.iter_full(model, bucket_bytes=1):
        if rank.rank == 0 and name == "layers.2.weight":
            break
    model(torch.ones(2, 16))


@pytest.mark.proves("24a")
def test_a_rank_that_leaves_early_alone_is_told_on_both() -> None:
    """One rank goes on to its forward, the other asks for the next bucket: both raise, and name both."""
    for rank in run_job(leaving, 2):
        assert "iter_full()" in rank.raised and "rank 0" in rank.raised and "rank 1" in rank.raised, str(rank)
        assert rank.seconds < soon(10.0)


@ranks(2, 3)
def test_full_tensors_are_those_of_full_params(world: World) -> None:
    model = deep(world)
    streamed = {name: tensor.clone() for name, tensor in fullshard.iter_full(model)}
    with fullshard.full_params(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, streamed[name]), name
    assert len(streamed) == len(list(model.parameters()))


@ranks(2)
def test_rules_and_receivers(world: World) -> None:
    model = loaded(world, "rows")
    rules = [
        Rename("^blocks", "layers"),
        Merge(["layers[.]0[.]weight", "layers[.]1[.]weight"], "both"),
        Split("embed.weight", ["left", "right"], dim=1, sizes=(3, 4)),
        Convert(["mean"], "mean", lambda mean: mean * 2),
    ]
    state = values()
    found = {name: tensor.clone() for name, tensor in fullshard.iter_full(model, key_map=rules, bucket_bytes=1)}
    assert torch.equal(found["both"], torch.cat([state["blocks.0.weight"], state["blocks.1.weight"]]))
    assert torch.equal(torch.cat([found["left"], found["right"]], 1), state["embed.weight"])
    assert torch.equal(found["mean"], 2 * state["mean"])
    for to, gets in ((1, world.rank == 1), (dist.group.WORLD, True), ("all", True)):
        assert bool(list(fullshard.iter_full(model, to=to))) is gets


@pytest.mark.parametrize(
    "options, told",
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be an int of at least 1, got 0"),
        ({"ahead": -1}, "ahead must be an int of at least 0, got -1"),
        ({"dtype": "bf16"}, "dtype must be a floating-point torch.dtype or None, got 'bf16'"),
        ({"to": 1}, "to must be a global rank, 0 to 0, got 1"),
        ({"to": -1}, "to must be a global rank, 0 to 0, got -1"),
        ({"to": "some"}, "to must be 'all', a global rank as an int, or a process group, got 'some'"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.iter_full(nn.Linear(2, 2), **options)


@ranks(1, 2)
def test_what_is_given_is_not_the_models_own_memory(world: World) -> None:
    """Tensors that a rank has whole were: writing to them changed the model."""
    model = sharded(world, "rows", meta=False)
    fullshard.load_weights(model, written(world, "own", saved()))
    for resident in (False, True):
        if resident:
            model.unshard()
        for _, tensor in fullshard.weights.iter_full(model):
            tensor.fill_(-1.0)
        model.reshard()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, values()[name]), name


@pytest.mark.parametrize("ahead", [0, 1])
@ranks(2)
def test_a_step_between_two_buckets_is_told(world: World, ahead: int) -> None:
    """Some tensors were of before it, and some of behind."""
    model = sharded(world, "rows", meta=False)
    fullshard.load_weights(model, written(world, "stepped", saved()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.zeros(2, 3).long()).sum().backward()
    stream = fullshard.weights.iter_full(model, bucket_bytes=64, ahead=ahead)
    next(stream)
    optimizer.step()
    with pytest.raises(fullshard.StateError, match=r"was written during iter_full\(\)"):
        list(stream)
    assert len(list(fullshard.weights.iter_full(model))) == len(dict(model.named_parameters(remove_duplicate=False)))


@ranks(1)
def test_a_step_inside_of_a_bucket_is_told_and_averages_do_not_mind_it(world: World) -> None:
    """What a rank has whole is copied when it is given."""
    model = sharded(world, "rows", meta=False)
    fullshard.load_weights(model, written(world, "whole", saved()))
    optimizer, ema = torch.optim.AdamW(model.parameters(), foreach=True), fullshard.EMA(model, 0.5)
    for weights, work in ((None, optimizer.step), (ema, ema.update)):
        model(torch.zeros(2, 3).long()).sum().backward()
        stream = fullshard.weights.iter_full(model, weights=weights)
        next(stream)
        work()
        with pytest.raises(fullshard.StateError, match="was written during iter_full"):
            list(stream)
    stream = fullshard.weights.iter_full(model, weights=ema)
    next(stream)
    optimizer.step()
    list(stream)


@ranks(1)
def test_an_update_of_averages_is_told_where_foreach_counts_no_version(world: World) -> None:
    """As on a GPU, where iter_full() gave averages of before and of behind it."""
    model = sharded(world, "rows", meta=False)
    fullshard.load_weights(model, written(world, "averages", saved()))
    ema, lerp = fullshard.EMA(model, 0.5), torch._foreach_lerp_

    def uncounted(averages: list[Tensor], *arguments: Any) -> None:
        with torch.autograd._unsafe_preserve_version_counter(tuple(averages)):
            lerp(averages, *arguments)

    stream = fullshard.weights.iter_full(model, weights=ema)
    next(stream)
    with mock.patch.object(torch, "_foreach_lerp_", uncounted):
        ema.update()
    with pytest.raises(fullshard.StateError, match="was written during iter_full"):
        list(stream)


@ranks(2)
def test_a_load_in_the_middle_is_told(world: World) -> None:
    """Reads into memory increase no version counter, so the iteration went on with tensors of two models."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=world.mesh, sync="broadcast")
    directory = world.folder("other")
    fullshard.save_weights(model, directory)
    with pytest.raises(fullshard.StateError, match="was written during iter_full"):
        for _ in fullshard.iter_full(model, bucket_bytes=1, ahead=0):
            fullshard.load_weights(model, directory)


@pytest.mark.parametrize("option", ["dtype", "bucket_bytes", "key_map"])
@ranks(2)
def test_options_that_differ_between_ranks_are_refused_on_all(world: World, option: str) -> None:
    """Halves of tensors were garbage, or of other tensors."""
    options = {
        "dtype": {"dtype": torch.float16 if world.rank else torch.bfloat16},
        "bucket_bytes": {"bucket_bytes": 1 if world.rank else 1 << 20},
        "key_map": {"key_map": [RenameBy(str)] if world.rank else [Rename("^", "a."), Sort()], "bucket_bytes": 1},
    }[option]
    model = fullshard.fully_shard(nn.Linear(4, 4), mesh=world.mesh)
    assert len(list(fullshard.iter_full(model))) == 2
    with pytest.raises(fullshard.StateError, match=r"Ranks diverged at collective .* iter_full\(\) of "):
        list(fullshard.iter_full(model, **options))
