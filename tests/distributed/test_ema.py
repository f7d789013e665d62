"""`EMA`: the averages of the unsharded model bit for bit, without messages."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import CUTS, Net, sharded, values
from harness import World, ranks
from torch import Tensor, nn

import fullshard


def filled(world: World, cut: str) -> Any:
    model = sharded(world, cut, meta=False)
    write(model, 0)
    return model


def write(model: nn.Module, step: int) -> None:
    """The same full values on every rank, by the way of a state dict."""
    state = values()
    torch.manual_seed(step)
    change = {name: tensor + torch.randn(tensor.shape) for name, tensor in state.items()}
    change["head.weight"] = change["embed.weight"]
    model.load_state_dict(change)


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.rotates(8)
@pytest.mark.proves("4d")
@pytest.mark.parametrize("options", [{}, {"warmup": 10}, {"every": 2}])
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 3, 4)
def test_averages_are_those_of_the_whole_model_bit_for_bit(world: World, cut: str, options: dict[str, int]) -> None:
    if world.size % 2 and cut not in ("rows", "columns"):
        return
    model, reference = filled(world, cut), Net()
    write(reference, 0)
    ema = fullshard.EMA(model, 0.9, **options)
    averages = {name: p.detach().clone() for name, p in reference.named_parameters()}
    updates = 0
    for step in range(1, 5):
        write(model, step)
        write(reference, step)
        with fullshard.counting(model) as messages:
            ema.update()
        assert not messages
        if step % options.get("every", 1):
            continue
        decay = min(0.9, (1 + updates) / (10 + updates)) if "warmup" in options else 0.9
        torch._foreach_lerp_([*averages.values()], [p.detach() for p in reference.parameters()], 1 - decay)
        updates += 1
    found = ema.state_dict()["averages"]
    assert set(found) == set(averages)
    for name, average in averages.items():
        assert torch.equal(full(found[name]), average), name
    streamed = {name: tensor.clone() for name, tensor in fullshard.iter_full(model, weights=ema)}
    assert all(torch.equal(streamed[name], average) for name, average in averages.items())
    folder = world.folder(f"ema {cut} {options}") / "new"
    fullshard.save_weights(model, folder, weights=ema)
    again = sharded(world, "rows")
    fullshard.load_weights(again, folder)
    for name, parameter in again.named_parameters():
        assert torch.equal(full(parameter), averages[name]), name


@ranks(2)
def test_swapped_weights_come_back_also_after_an_exception(world: World) -> None:
    model = filled(world, "rows")
    ema, ids = fullshard.EMA(model, 0.5), torch.arange(6).view(2, 3)
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    write(model, 1)
    ema.update()
    now, out = {name: full(p).clone() for name, p in model.named_parameters()}, model(ids)
    with pytest.raises(RuntimeError, match="stop"), ema.swapped():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter), (before[name] + now[name]) / 2)
        assert not torch.equal(model(ids), out)
        raise RuntimeError("stop")
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), now[name])
    assert torch.equal(model(ids), out)


@ranks(2, 3)
def test_a_state_dict_resumes_with_another_cut_of_full_tensors(world: World) -> None:
    model = filled(world, "rows")
    ema = fullshard.EMA(model, 0.9, dtype=torch.float64)
    write(model, 1)
    ema.update()
    state = ema.state_dict()
    other = fullshard.EMA(filled(world, "columns"), 0.9, dtype=torch.float64)
    other.load_state_dict({**state, "averages": {name: full(value) for name, value in state["averages"].items()}})
    found = other.state_dict()
    assert (found["calls"], found["updates"]) == (1, 1)
    for name, value in state["averages"].items():
        assert torch.equal(full(found["averages"][name]), full(value)) and value.dtype == torch.float64
    same = fullshard.EMA(filled(world, "rows"), 0.9, dtype=torch.float64)
    same.load_state_dict(state)
    del state["averages"]["scale"]
    with pytest.raises(ValueError, match="The state has no average of 'scale', which is a parameter of the model"):
        same.load_state_dict(state)


@ranks(2)
def test_averages_follow_a_model_that_is_cast(world: World) -> None:
    model = filled(world, "rows")
    ema = fullshard.EMA(model, 0.5)
    before = {name: full(value).clone() for name, value in ema.state_dict()["averages"].items()}
    model.to(torch.bfloat16)
    ema.update()
    for name, value in ema.state_dict()["averages"].items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(full(value), before[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"decay": 1.5}, "decay must be a number from 0 to 1, got 1.5"),
        ({"decay": 0.9, "dtype": torch.int8}, "dtype must be a floating-point torch.dtype, got torch.int8"),
        ({"decay": 0.9, "every": 0}, "every must be an int of at least 1, got 0"),
        ({"decay": 0.9, "warmup": 0}, "warmup must be an int of at least 1, got 0"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.EMA(nn.Linear(2, 2), **options)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'weight' is on meta and has no values"):
        fullshard.EMA(model, 0.9)


@pytest.mark.proves("4d")
@ranks(2)
def test_a_model_that_is_sharded_after_its_averages_were_made_is_told(world: World) -> None:
    model = Net()
    ema = fullshard.EMA(model, 0.9)
    fullshard.fully_shard(model, mesh=world.mesh)
    with pytest.raises(fullshard.StateError, match=r"'.*' was sharded after EMA\(\) was created. Create EMA after fully_shard"):
        ema.update()
    assert ema.updates == 0


@ranks(2)
def test_parameters_that_move_to_another_unit_after_their_averages_were_made_are_told(world: World) -> None:
    model = fullshard.fully_shard(Net(), mesh=world.mesh)
    ema = fullshard.EMA(model, 0.9)
    fullshard.fully_shard(model.blocks[0], mesh=world.mesh)
    with pytest.raises(fullshard.StateError, match=r"'.*' moved to another unit after EMA\(\)"):
        ema.update()
    assert ema.updates == 0


@ranks(1, 2)
def test_averages_refuse_a_model_that_changed_and_updates_of_themselves(world: World) -> None:
    model = filled(world, "flat")
    ema = fullshard.EMA(model, 0.9)
    before = {name: full(value).clone() for name, value in ema.state_dict()["averages"].items()}
    with ema.swapped(), pytest.raises(fullshard.StateError, match=r"EMA.update\(\) cannot run inside swapped\(\)"):
        ema.update()
    ema.update()
    with pytest.raises(fullshard.StateError, match="EMA cannot be copied or pickled: it refers to its model"):
        copy.deepcopy(ema)
    for state, told in (
        ({}, "The state has no 'averages': .* got a dict of nothing"),
        (None, "The state has no 'averages': .* got a NoneType"),
        ({"averages": {}}, "The state has no 'calls': .* got a dict of 'averages'"),
        ({"averages": {"column": 3}, "calls": 1, "updates": 1}, "The average of 'column' must be a tensor, got a int"),
    ):
        with pytest.raises(ValueError, match=told):
            ema.load_state_dict(state)  # type: ignore[arg-type]
    for name, value in ema.state_dict()["averages"].items():
        assert torch.equal(full(value), before[name]), "nothing was changed"
    model.register_parameter("late", nn.Parameter(torch.ones(3)))
    with pytest.raises(fullshard.StateError, match=r"EMA.update\(\): 'late' was added after EMA\(\)"):
        ema.update()
    del model.late
    ema.update()
    fullshard.undo(model)
    with pytest.raises(fullshard.StateError, match=r"undo\(\) was called since\. Create a new EMA"):
        ema.update()


@ranks(1)
def test_a_swap_that_runs_out_of_memory_changes_nothing(world: World) -> None:
    """It overwrote one weight after the other, and lost those before the copy that failed."""
    model = filled(world, "rows")
    ema = fullshard.EMA(model, 0.9)
    write(model, 1)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    clone, calls = Tensor.clone, iter(range(100))

    def fails(self: Tensor, **options: Any) -> Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("none left")
        return clone(self, **options)

    with mock.patch.object(Tensor, "clone", fails), pytest.raises(torch.OutOfMemoryError), ema.swapped():
        pass
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in model.parameters()]))
    with ema.swapped():
        patch = mock.patch.object(Tensor, "clone", mock.Mock(side_effect=torch.OutOfMemoryError("none left")))
        patch.start()  # evaluation took all memory: the weights come back without any
    patch.stop()
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in model.parameters()]))


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@ranks(1, 3)
def test_a_state_dict_of_averages_in_another_dtype_is_copied(world: World, how: str) -> None:
    """Averages in float32 of a model in bfloat16. A wrapper had the offset of a view, which copies took for one with memory."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    fullshard.fully_shard(model, mesh=world.mesh)
    state = fullshard.EMA(model, 0.5).state_dict()
    if how == "deepcopy":
        found = copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
    for name, average in state["averages"].items():
        assert torch.equal(found["averages"][name].to_local(), average.to_local()), name
