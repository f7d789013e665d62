"""Ranks that run different things: an error on every rank that names both, instead of wrong numbers or a hang."""

from __future__ import annotations

import copy
import time

import pytest
import torch.distributed as dist
from harness import World, ranks
from models import Stack, batch, shard_stack, square
from torch import Tensor, nn

import fullshard
from fullshard import CheckPolicy, StateError, fully_shard

EAGER = CheckPolicy(patience=0.2)


class Siblings(nn.Module):
    """Two towers of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, which)(x)


@pytest.mark.proves("1b")
@ranks(2, 3)
def test_ranks_that_run_different_units_of_equal_shape_are_told_both_names(world: World) -> None:
    """Elsewhere each rank received the other unit's weights: wrong outputs, no error."""
    model = Siblings()
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=world.mesh, check_policy=EAGER)
    square(model(world.mine(batch(0)), "left")).backward()
    begin = time.monotonic()
    with pytest.raises(StateError) as caught:
        square(model(world.mine(batch(0)), "left" if world.rank else "right")).backward()
    assert time.monotonic() - begin < 10.0
    others = "rank 1" if world.size == 2 else "ranks 1 and 2"
    text = str(caught.value)
    assert "Ranks diverged at collective" in text
    assert "rank 0 ran all_gather of 'right'" in text and f"{others} ran all_gather of 'left'" in text, text
    with pytest.raises(StateError, match="Ranks diverged at collective"):
        model(world.mine(batch(0)), "left")
    with pytest.raises(StateError, match="Ranks diverged at collective"):
        fullshard.any_failed(world.mesh, True)


@ranks(2)
def test_the_process_groups_of_ranks_that_diverged_are_aborted(world: World) -> None:
    """As on nccl: no step can follow, and nobody waits for ranks that cannot come."""
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)
    square(model(world.mine(batch(0)))).backward()
    with pytest.raises(StateError, match="Ranks diverged"):
        (model if world.rank else model.blocks[1])(batch(0)[:, :7] if not world.rank else batch(0))
    with pytest.raises(RuntimeError):
        dist.all_reduce(batch(0), group=world.mesh.get_group())


@ranks(2, 3)
def test_a_rank_that_fails_between_collectives_has_all_skip_the_step(world: World) -> None:
    plain = Stack()
    model, reference = (shard_stack(copy.deepcopy(plain), world.mesh, check_policy=EAGER) for _ in range(2))
    for step in range(4):
        if fullshard.any_failed(world.mesh, step % 2 == 1 and world.rank == step // 2):
            model.zero_grad()
            continue
        square(model(world.mine(batch(step)))).backward()
        square(reference(world.mine(batch(step)))).backward()
        for one, other in zip(model.parameters(), reference.parameters()):
            assert one.grad.to_local().equal(other.grad.to_local())  # type: ignore[union-attr]
        for each in (model, reference):
            each.zero_grad()


@ranks(2)
def test_a_rank_in_any_failed_while_another_is_in_a_unit_is_named(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)
    square(model(world.mine(batch(0)))).backward()
    with pytest.raises(StateError) as caught:
        if world.rank == 1:
            fullshard.any_failed(world.mesh, True)
        else:
            model(world.mine(batch(1)))
    text = str(caught.value)
    assert "rank 0 ran all_gather of 'Stack' (forward)" in text and "rank 1 ran any_failed()" in text, text
