"""An exception in the step of one model, beside other models of the same thread (a teacher, a reward model)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, shard_stack, square
from torch import Tensor

import fullshard


def raises(grad: Tensor) -> Tensor:
    raise ValueError("out of luck")


@pytest.mark.proves("32a")
@pytest.mark.filterwarnings("ignore:The last backward raised")
@ranks(1, 2)
def test_a_backward_that_raises_leaves_the_steps_of_other_models_alone(world: World) -> None:
    """Their kept gradients, pending backwards and all-gathers in flight went with those of the model that raised."""
    plain, other, third = Stack(), Stack(), Stack()
    models: list[Any] = [shard_stack(copy.deepcopy(one), world.mesh) for one in (plain, other, third)]
    model, beside, shown = models
    with beside.accumulate():
        square(beside(world.mine(batch(0)))).backward()
    with model.accumulate():
        square(model(world.mine(batch(2)))).backward()
    loss = square(beside(world.mine(batch(1))))
    handle = shown.unshard(async_op=True)
    planted = model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(raises) and None)
    with pytest.raises(ValueError, match="out of luck"):
        square(model(world.mine(batch(2)))).backward()
    planted.remove()
    with fullshard.counting(model) as messages:
        loss.backward()
    assert [m.kind for m in messages].count("all_gather") == 3, "the blocks; the root has waited unsharded"
    with fullshard.counting(model) as messages:
        handle.wait()
    assert not messages, "the all-gather was in flight"
    square(model(world.mine(batch(3)))).backward()
    assert_near(shown.head.weight, third.head.weight, "weight")
    square(plain(batch(3))).backward()
    for step in (0, 1):
        square(other(batch(step))).backward()
    assert_same_grads(model, plain)
    assert_same_grads(beside, other)
