"""Tensor subclasses with all-gather hooks, such as quantized weights: every way to write, copy, load, average and save them."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, ranks
from models import assert_near, batch, square
from test_fsdp2_surface import TwoPart
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import StateError, _torch, fully_shard
from fullshard.core import ParamGroup

ROWS = 7  # uneven on two and three ranks


class OneScale(torch.Tensor):
    """Values, and a factor for all of them that is an attribute, as the scale of float8 weights. `out=` only gets the factor."""

    @staticmethod
    def __new__(cls, values: Tensor, factor: float | None = None) -> OneScale:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values: Tensor, factor: float | None = None) -> None:
        self._values, self.factor = values, factor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_values"], None

    def __repr__(self, **kwargs: Any) -> str:
        return f"OneScale({self._values.shape}, {self.factor})"

    def dense(self) -> Tensor:
        return self._values * (1.0 if self.factor is None else self.factor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return cls(args[0]._values.clone() + 1)  # as some quantized classes do, which quantize again
        if func is aten.new_empty.default:
            raise NotImplementedError("new_empty")  # as torchao's quantized training
        same = (aten.detach, aten.new_zeros, aten.slice, aten.split, aten.view, aten.alias, aten.copy_, aten.mul_)
        keeps = func.overloadpacket in same
        inner = torch.utils._pytree.tree_map_only(OneScale, lambda one: one._values if keeps else one.dense(), args)
        made = func(*inner, **(kwargs or {}))
        if func.overloadpacket in (aten.copy_, aten.mul_):
            return args[0]
        # As in float8: what is computed of a scaled tensor is scaled, and rows of it are as well.
        factor = args[0].factor if keeps and func.overloadpacket is not aten.new_zeros else None
        return torch.utils._pytree.tree_map_only(Tensor, lambda one: cls(one, factor), made) if keeps else made

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._values,), self.factor

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            out.factor = metadata
            return None
        return OneScale(outputs[0], metadata), outputs


def shard(world: World, weight: Tensor, **options: Any) -> Any:
    model = nn.Linear(5, ROWS, bias=False)
    model.weight = nn.Parameter(weight)
    return fully_shard(model, mesh=world.mesh, **options)


def rows(model: Any, whole: Tensor) -> Tensor:
    extent = model._fullshard_unit.parameters[0].sharding.extent
    return whole[extent.start : extent.start + extent.rows]


def computes_with(model: Any, weight: Tensor, bias: Tensor | float = 0.0) -> None:
    assert_near(model(batch(0)), batch(0) @ weight.T + bias, "output")


@pytest.mark.proves("38a")
@ranks(1, 2, 3)
def test_an_attribute_that_changes_reaches_every_all_gather(world: World) -> None:
    """Uneven shards computed with the factor of the first all-gather, and padded ones sent with it."""
    values = torch.randn(ROWS, 5)
    model = shard(world, OneScale(values.clone()))
    for factor in (None, 2.0, 3.0, None):
        _torch.local_tensor(model.weight).factor = factor  # type: ignore[attr-defined]
        computes_with(model, values * (factor or 1.0))
        model.reshard()


@pytest.mark.proves("38a")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@ranks(2)
def test_a_copy_has_the_same_bits(world: World, how: str) -> None:
    """Some classes quantize again in clone()."""
    values = torch.randn(ROWS, 5)
    model = shard(world, OneScale(values.clone(), 2.0))
    if how == "deepcopy":
        computes_with(copy.deepcopy(model), values * 2)
    else:
        assert torch.equal(pickle.loads(pickle.dumps(model.weight)).to_local()._values, rows(model, values))


def rounding(self: Tensor, mesh: Any) -> Any:
    return (self.bfloat16(),), None


def rounded(self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    if out is None:
        whole = outputs[0].float()
        return whole, (outputs[0], whole)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(outputs[0])
    return None


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("what", ["nothing", "deepcopy", "assigned"])
@ranks(2)
def test_hooks_that_are_set_on_a_shard_stay_with_it(world: World, what: str, began: bool) -> None:
    """A copy of the model, or a value assigned while the old one is held, left plain shards, which travelled unrounded."""
    weight = torch.randn(ROWS, 5)
    model = shard(world, weight.clone())
    local: Any = _torch.local_tensor(model.weight)
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = MethodType(rounding, local), MethodType(rounded, local)
    if began:
        computes_with(model, weight.bfloat16().float())
        model.reshard()
    if what == "deepcopy":
        model = copy.deepcopy(model)
    elif what == "assigned":
        held = model.state_dict()
        weight = weight * 3
        model.load_state_dict({"weight": weight.clone()}, assign=True)
        assert torch.equal(held["weight"].to_local() * 3, rows(model, weight))
    computes_with(model, weight.bfloat16().float())
    model.unshard()
    ((_, stored),) = fullshard.iter_full(model)
    assert torch.equal(stored, weight), "and not what the hooks return, also while the unit is unsharded"


@ranks(2)
def test_groups_that_cannot_be_built_leave_a_hooked_shard_where_it_was(world: World) -> None:
    """It had moved out of the flat shard, which later all-gathers read: they did not see what was written to it."""
    model: Any = fully_shard(nn.Linear(5, ROWS), mesh=world.mesh)
    local: Any = _torch.local_tensor(model.weight)
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = MethodType(rounding, local), MethodType(rounded, local)
    with mock.patch.object(ParamGroup, "copy_shards", side_effect=MemoryError), pytest.raises(MemoryError):
        model(batch(0))  # the group of the bias cannot be built, after that of the weight
    del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
    with torch.no_grad():
        model.weight.mul_(3)
    computes_with(model, model.weight.full_tensor(), model.bias.full_tensor())


@pytest.mark.proves("38a")
@ranks(1, 2)
def test_an_assigned_value_comes_with_its_own_attributes(world: World) -> None:
    """A scale that was computed of the old values stayed, and scaled the new ones."""
    values = torch.randn(ROWS, 5)
    model = shard(world, OneScale(values.clone(), 2.0))
    computes_with(model, values * 2)
    model.load_state_dict({"weight": OneScale(values + 1)}, assign=True)
    computes_with(model, values + 1)


@pytest.mark.proves("38a")
@ranks(2)
def test_writes_to_tensors_inside_are_seen_by_units_that_stay_unsharded(world: World) -> None:
    weight = torch.randn(ROWS, 5)
    model = shard(world, TwoPart.of(weight), states=fullshard.ZERO2)
    computes_with(model, TwoPart.of(weight).dense())
    with torch.no_grad():
        _torch.local_tensor(model.weight)._scale.mul_(2)  # type: ignore[attr-defined]
    computes_with(model, TwoPart.of(weight).dense() * 2)


@ranks(2)
def test_values_that_differ_between_ranks_are_found_inside(world: World) -> None:
    """The class names no inner tensors (`__tensor_flatten__`), so that they were not compared."""
    generator = torch.Generator().manual_seed(world.rank)
    weight = torch.randn(ROWS, 5, generator=generator)
    model = shard(world, TwoPart.of(weight), sync="check")
    with pytest.raises(StateError, match="'weight' of .* differs between rank 0 and rank 1"):
        model(batch(0))
    first = [TwoPart.of(weight).dense()]
    dist.broadcast_object_list(first)
    computes_with(shard(world, TwoPart.of(weight), sync="broadcast"), first[0])


@ranks(1, 2)
def test_memory_of_to_empty_is_loaded_and_written_through_views(world: World) -> None:
    """Views of a subclass share the tensors inside, and not a storage; they were taken for copies."""
    weight = TwoPart.of(torch.randn(ROWS, 5))
    model = shard(world, TwoPart.of(torch.zeros(ROWS, 5)))
    model.to_empty(device="cpu")
    model.load_state_dict({"weight": weight})
    computes_with(model, weight.dense())
    with torch.no_grad():
        model.weight[:].copy_(model.weight.detach())
    computes_with(model, weight.dense())


@ranks(2)
def test_averages_leave_out_frozen_weights_and_refuse_others_by_name(world: World) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(5, ROWS, bias=False), nn.Linear(5, ROWS, bias=False)
            self.base.weight = nn.Parameter(TwoPart.of(self.base.weight.detach()))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapter(x)

    model: Any = Adapted()
    fully_shard(model, mesh=world.mesh)
    with pytest.raises(StateError, match=r"'base\.weight' .* cannot be averaged: its values are computed by a TwoPart"):
        fullshard.EMA(model, 0.5)
    model.base.weight.requires_grad_(False)
    ema = fullshard.EMA(model, 0.5)
    before = model.adapter.weight.full_tensor().clone()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=1.0)
    square(model(batch(0))).backward()
    optimizer.step()
    ema.update()
    after = model.adapter.weight.full_tensor()
    with ema.swapped():
        assert_near(model.adapter.weight.full_tensor(), (before + after) / 2, "the average")
    model.base.weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"'base\.weight' .* cannot be averaged"):
        ema.update()


@ranks(1, 2, 3)
def test_a_subclass_of_one_tensor_is_averaged(world: World) -> None:
    """As float8 weights, which are stored in high precision."""
    values = torch.randn(ROWS, 5)
    model = shard(world, OneScale(values.clone()))
    ema = fullshard.EMA(model, 0.5)
    with torch.no_grad():
        model.weight.mul_(3)
    ema.update()
    with ema.swapped():
        computes_with(model, values * 2)
    computes_with(model, values * 3)
    saved = copy.deepcopy(ema.state_dict())
    ema.update()
    ema.load_state_dict(saved)
    with ema.swapped():
        computes_with(model, values * 2)


@pytest.mark.parametrize("background", [False, True])
@ranks(2)
def test_weights_of_files_are_read_into_a_subclass_and_written_from_it(world: World, background: bool, tmp_path: Path) -> None:
    """Reads went to address 0, which is that of every wrapper."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    weight = torch.randn(ROWS, 5)
    fullshard.save_weights(shard(world, weight.clone()), Path(folder[0]) / "plain")
    model = shard(world, TwoPart.of(torch.zeros(ROWS, 5)))
    fullshard.load_weights(model, Path(folder[0]) / "plain")
    computes_with(model, TwoPart.of(weight).dense())
    saved = fullshard.save_weights(model, Path(folder[0]) / "quantized", background=background)
    if background:
        saved.wait()
    again = shard(world, torch.zeros(ROWS, 5))
    fullshard.load_weights(again, Path(folder[0]) / "quantized")
    computes_with(again, TwoPart.of(weight).dense())


@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="this torch pickles parameters as DTensor does")
@ranks(2)
def test_a_pickle_leaves_out_hooks_that_were_set_on_the_shard(world: World) -> None:
    model = shard(world, torch.randn(ROWS, 5))
    local: Any = _torch.local_tensor(model.weight)
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = (lambda mesh: ((local,), None)), MethodType(rounded, local)
    file = io.BytesIO()
    torch.save({"weight": model.weight}, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)["weight"]
    assert isinstance(read, DTensor) and torch.equal(read.to_local(), local)


@ranks(2)
def test_a_class_that_an_all_gather_does_not_keep_is_told_by_undo(world: World) -> None:
    """The model would train without quantization from then on."""
    weight = TwoPart.of(torch.randn(ROWS, 5))
    model = shard(world, weight)
    with pytest.warns(UserWarning, match="Parameter 'weight' of unit 'Linear' was sharded as a TwoPart and is a Tensor"):
        fullshard.undo(model)
    assert torch.equal(model.weight, weight.dense())
