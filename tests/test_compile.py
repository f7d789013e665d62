"""torch.compile around, inside and across units gives what eager gives; hooks are opaque to it."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, shard_stack, square


@pytest.mark.parametrize("how", ["blocks before sharding", "blocks after sharding", "the whole model"])
@ranks(2)
def test_compiled_and_eager_agree(world: World, how: str) -> None:
    torch._dynamo.reset()
    model = Stack()
    sharded = copy.deepcopy(model)
    if how == "blocks before sharding":
        for block in sharded.blocks:
            block.compile(backend="aot_eager")
    shard_stack(sharded, world.mesh)
    if how == "blocks after sharding":
        for block in sharded.blocks:
            block.compile(backend="aot_eager")
    run = torch.compile(sharded, backend="aot_eager") if how == "the whole model" else sharded
    for step in range(3):
        square(run(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()
