"""A rank without work for a unit takes part in its collectives: same sums as if its loss did not depend on the unit."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from harness import World, pool, ranks
from hypothesis import given
from hypothesis import strategies as st
from models import Stack, assert_same_grads, assert_same_parameters, batch, shard_stack, square
from rotation import random_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import HFSDP, ZERO2, ZERO3, CheckPolicy, StateError, StateSharding, fully_shard


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


def shard(model: Vision, world: World, reshard: bool | None, root: bool, states: StateSharding = ZERO3) -> Vision:
    units = [*model.tower.layers, model.tower, model.before, model.behind, *([model] if root else [])]
    mesh = world.mesh
    if states.shards_over_replicas:
        mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    for module in units:
        policy = CheckPolicy(patience=0.2)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, states=states, check_policy=policy)
    return model


@pytest.mark.rotates(8)
@pytest.mark.proves("1d")
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("where", ["first", "midst", "last"])
@ranks(2, 3)
def test_a_tower_that_only_some_ranks_run(world: World, where: str, recompute: bool, root: bool) -> None:
    """Elsewhere everybody runs the tower on a made-up image, or hangs."""
    for reshard, states in ((True, ZERO3), (None, ZERO3), (None, ZERO2), (True, HFSDP)):
        model = Vision(where, recompute)
        sharded = shard(copy.deepcopy(model), world, reshard, root, states)
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


@pytest.mark.proves("1d")
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
    with pytest.raises(
        fullshard.StateError, match="cannot predict unit 'Linear': fully_shard.. was called on a list of modules"
    ):
        one.join()


@ranks(1)
def test_a_join_that_raises_ends_its_calls(world: World) -> None:
    """The next forward of another model counted as one inside of them."""
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    for module in (*model, model, other):
        fully_shard(module, mesh=world.mesh)
    model(torch.ones(1, 4))
    model[1].to("meta")
    with pytest.raises(StateError):
        model.join()
    scheduler = model._fullshard_unit.runtime.scheduler
    assert not scheduler.running
    other(torch.ones(1, 4))


# --- any tree, any ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A unit. owns: it has a layer before its parts. residual: it adds what they return, or else returns just that."""

    parts: tuple[Shape, ...] = ()
    owns: bool = True
    residual: bool = True
    recompute: bool = False
    reshard: bool | None = None


@dataclass(frozen=True)
class Turn:
    """A step. idle: for each rank, the units (by number) for which it has nothing to compute; 0 is the whole model."""

    kind: str
    idle: tuple[frozenset[int], ...]


@st.composite
def shapes(draw: st.DrawFn, depth: int) -> Shape:
    parts = tuple(draw(shapes(depth - 1)) for _ in range(draw(st.integers(0, 3)))) if depth else ()
    owns, residual, recompute = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 4)) == 0
    return Shape(parts, owns or not parts, residual, recompute and not parts, draw(st.sampled_from([None, True, False])))


@st.composite
def turns(draw: st.DrawFn, size: int) -> Turn:
    idle = st.frozensets(st.sampled_from([0, *range(1, 8), *range(1, 8)]), max_size=3)
    kind = draw(st.sampled_from(["train", "train", "train", "accumulate", "eval"]))
    return Turn(kind, tuple(draw(idle) for _ in range(size)))


class Tree(nn.Module):
    """Units, numbered in pre-order."""

    def __init__(self, shape: Shape, numbers: Iterator[int]) -> None:
        super().__init__()
        self.shape, self.number = shape, next(numbers)
        self.own = nn.Linear(3, 3) if shape.owns else None
        self.parts = nn.ModuleList(Tree(part, numbers) for part in shape.parts)

    def forward(self, x: Tensor, idle: frozenset[int]) -> Tensor:
        if self.own is not None:
            x = torch.tanh(self.own(x))
        for part in self.parts:
            if part.number in idle:
                if hasattr(part, "join"):
                    part.join()
                continue
            recompute = part.shape.recompute and torch.is_grad_enabled()
            y = checkpoint(part, x, idle, use_reentrant=False) if recompute else part(x, idle)
            x = x + y if self.shape.residual else y
        return x


def shard_tree(tree: Tree, world: World) -> Tree:
    for part in tree.parts:
        shard_tree(part, world)
    return fully_shard(tree, mesh=world.mesh, reshard_after_forward=tree.shape.reshard, check_policy=CheckPolicy(patience=0.1))


def take_turns(world: World, shape: Shape, plan: list[Turn]) -> None:
    """The body that runs on each rank."""
    torch.manual_seed(0)
    model = Tree(shape, itertools.count()).double()
    sharded = shard_tree(copy.deepcopy(model), world)
    for step, turn in enumerate(plan):
        parts = [part.double().requires_grad_() * 1.0 for part in batch(step, 3).chunk(world.size)]
        mine, idle = parts[world.rank], turn.idle[world.rank]
        with torch.set_grad_enabled(turn.kind != "eval"), accumulating(sharded, turn.kind == "accumulate"):
            loss = sharded.join() if 0 in idle else square(sharded(mine, idle))
            if turn.kind == "eval":
                continue
            loss.backward()
        for part, theirs in zip(parts, turn.idle):
            if 0 not in theirs:
                (square(model(part.detach().requires_grad_(), theirs)) / world.size).backward()
        if turn.kind == "train":
            assert_same_grads(sharded, model)
            sharded.zero_grad(), model.zero_grad()


def accumulating(model: nn.Module, kept: bool) -> contextlib.AbstractContextManager[object]:
    return model.accumulate() if kept else contextlib.nullcontext()


take_turns.body = take_turns  # as harness.ranks does


@pytest.mark.parametrize(("size", "count"), [(2, 120), (3, 60)])
def test_any_rank_may_join_any_unit_of_any_tree(size: int, count: int) -> None:
    @random_cases(count)
    @given(shapes(2), st.lists(turns(size), min_size=2, max_size=4))
    def run(shape: Shape, plan: list[Turn]) -> None:
        pool(size).run(__name__, "take_turns", {"shape": shape, "plan": plan}, 60.0)

    run()
