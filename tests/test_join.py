"""A rank without work for a unit takes part in its collectives: same sums as if its loss did not depend on the unit."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, assert_same_parameters, batch, shard_stack, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import CheckPolicy, fully_shard


class Tower(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


class Vision(nn.Module):
    """A tower that not every batch needs, before, in the midst of, or behind the rest."""

    def __init__(self, where: str, recompute: bool = False) -> None:
        super().__init__()
        self.tower, self.before, self.behind = Tower(recompute), nn.Linear(5, 5), nn.Linear(5, 5)
        self.where = where

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        if self.where != "first":
            x = torch.tanh(self.before(x))
        if image is not None:
            x = x + self.tower(image)
        elif hasattr(self.tower, "join"):
            self.tower.join()
        return x if self.where == "last" else self.behind(x)


def shard(model: Vision, world: World, reshard: bool | None, root: bool) -> Vision:
    units = [*model.tower.layers, model.tower, model.before, model.behind, *([model] if root else [])]
    for module in units:
        fully_shard(module, mesh=world.mesh, reshard_after_forward=reshard, check_policy=CheckPolicy(patience=0.2))
    return model


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("where", ["first", "midst", "last"])
@ranks(2, 3)
def test_a_tower_that_only_some_ranks_run(world: World, where: str, recompute: bool, root: bool) -> None:
    """Elsewhere everybody runs the tower on a made-up image, or hangs."""
    for reshard in (True, None):
        model = Vision(where, recompute)
        sharded = shard(copy.deepcopy(model), world, reshard, root)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
        for step in range(4):  # who has an image: nobody but rank 0, all, nobody but the last rank, nobody at all
            has = [r == 0 if step == 0 else step == 1 or (step == 2 and r == world.size - 1) for r in range(world.size)]
            parts, images = batch(step).chunk(world.size), batch(step + 50).chunk(world.size)
            square(sharded(parts[world.rank], images[world.rank] if has[world.rank] else None)).backward()
            for r in range(world.size):
                (square(model(parts[r], images[r] if has[r] else None)) / world.size).backward()
            assert_same_grads(sharded, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(sharded, model)


@ranks(2, 3)
def test_a_rank_without_a_batch_joins_the_whole_model(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, check_policy=CheckPolicy(patience=0.2))
    for step in range(3):
        if world.rank == step % world.size:
            sharded.join().backward()
        else:
            square(sharded(world.mine(batch(step)))).backward()
        for r, part in enumerate(batch(step).chunk(world.size)):
            if r != step % world.size:
                (square(model(part)) / world.size).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()
    with torch.no_grad():
        sharded.join() if world.rank else sharded(batch(0))


@pytest.mark.parametrize("where", ["first", "midst", "last"])
@ranks(2)
def test_a_rank_that_joined_the_tower_joins_the_whole_model_later(world: World, where: str) -> None:
    """What runs within the model is known from the rank's last forward, in which it computed nothing of the tower."""
    model = Vision(where)
    sharded = shard(copy.deepcopy(model), world, True, True)
    parts, images = batch(0).chunk(2), batch(50).chunk(2)
    for step in range(3):  # rank 1 has no image, then no batch, then no image
        if world.rank == 0:
            square(sharded(parts[0], images[0])).backward()
        elif step == 1:
            sharded.join().backward()
        else:
            square(sharded(parts[1], None)).backward()
        (square(model(parts[0], images[0])) / 2).backward()
        if step != 1:
            (square(model(parts[1], None)) / 2).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_two_forwards_before_two_backwards(world: World) -> None:
    model = Vision("midst")
    sharded = shard(copy.deepcopy(model), world, True, True)
    losses = []
    for micro in range(2):
        has = world.rank == micro
        x, image = world.mine(batch(micro)), world.mine(batch(60 + micro))
        losses.append(square(sharded(x, image if has else None)))
    for loss in reversed(losses):
        loss.backward()
    for micro in range(2):
        for r in range(2):
            x, image = batch(micro).chunk(2)[r], batch(60 + micro).chunk(2)[r]
            (square(model(x, image if r == micro else None)) / 2).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_a_unit_of_several_modules_cannot_be_joined(world: World) -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    fully_shard([one, two], mesh=world.mesh)
    with pytest.raises(fullshard.StateError, match="unit 'Linear' has several modules"):
        one.join()
