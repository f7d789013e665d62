"""Clipping and optimizers on shards."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, shard_stack, square

import fullshard


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("who", ["torch", "fullshard"])
@ranks(1, 2, 3)
def test_clipping_equals_clipping_unsharded(world: World, who: str, norm_type: float) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for scale in (0.1, 100.0):
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), scale * 0.01, norm_type)
        clip = torch.nn.utils.clip_grad_norm_ if who == "torch" else fullshard.clip_grad_norm_
        norm = clip(sharded.parameters(), scale * 0.01, norm_type)
        assert_near(norm, expected, "norm")
        assert_same_grads(sharded, model)
        if who == "fullshard":
            assert type(norm) is torch.Tensor and norm.ndim == 0
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_clipping_mixes_sharded_and_plain_parameters(world: World) -> None:
    model = Stack()
    sharded = copy.deepcopy(model)
    fullshard.fully_shard(sharded, mesh=world.mesh, ignored_params=set(sharded.head.parameters()))
    for parameter in sharded.head.parameters():
        assert type(parameter.data) is torch.Tensor
    square(sharded(batch(0))).backward()
    square(model(batch(0))).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert_near(fullshard.clip_grad_norm_(sharded.parameters(), 0.01), expected, "norm")
    assert_same_grads(sharded, model)


@ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_if_asked(world: World) -> None:
    model = shard_stack(Stack(1), world.mesh)
    square(model(world.mine(batch(0)))).backward()
    if world.rank == 1:
        model.inp.weight.grad.to_local().fill_(float("inf"))
    with pytest.raises(RuntimeError, match="have a norm of inf over all ranks"):
        fullshard.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert fullshard.clip_grad_norm_([], 1.0) == 0
