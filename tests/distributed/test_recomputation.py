"""Activation checkpointing in every arrangement: right gradients, and exactly two gathers per unit and step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Block, Stack, assert_same_grads, batch, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fullshard
from fullshard import fully_shard


class Checkpointed(Stack):
    """Recomputes each block (outside the unit), each block's body (inside it), all of them at once, or both nested."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__(4)
        self.where, self.reentrant = where, reentrant
        if where == "inside":
            for i, block in enumerate(self.blocks):
                self.blocks[i] = Inside(block, reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.where == "inside":
            for block in self.blocks:
                x = block(x)
        elif self.where == "outside":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.where == "pairs":
            for i in (0, 2):
                x = checkpoint(nn.Sequential(self.blocks[i], self.blocks[i + 1]), x, use_reentrant=self.reentrant)
        else:

            def all_nested(x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=self.reentrant)
                return x

            x = checkpoint(all_nested, x, use_reentrant=self.reentrant)
        return self.head(x)


class Inside(nn.Module):
    def __init__(self, block: Block, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.proves("18a")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside", "pairs", "nested"])
@ranks(1, 2)
def test_recomputation_gathers_exactly_twice_and_gives_the_same_gradients(world: World, where: str, reentrant: bool) -> None:
    model = Checkpointed(where, reentrant)
    sharded = copy.deepcopy(model)
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=world.mesh)
    for step in range(3):
        x = batch(step)
        with fullshard.counting(sharded) as messages:
            square(sharded(world.mine(x))).backward()
        square(model(x)).backward()
        assert_same_grads(sharded, model)
        kinds = Counter(message.kind for message in messages)
        if where == "nested" and reentrant:
            # The outer recomputation runs the inner forwards without grad, which always frees: three passes, three gathers.
            assert kinds["all_gather"] <= 3 * 4 + 1
        else:
            assert kinds["all_gather"] == 2 * 4 + 1, kinds
        assert kinds["reduce_scatter"] == 5
        assert all(u.residency.value == "sharded" for u in (b._fullshard_unit for b in sharded.blocks))
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_recomputation_without_early_stop_gathers_and_frees_as_with_it(world: World) -> None:
    """The recomputed forward returns, to a graph that no backward will use."""
    model = Checkpointed("outside", reentrant=False)
    sharded = copy.deepcopy(model)
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=world.mesh)
    units = [module._fullshard_unit for module in (sharded, *sharded.blocks)]
    full: list[list[bool]] = []  # which units hold unsharded memory as the backward of each block ends
    for block in sharded.blocks:
        block.register_full_backward_hook(
            lambda *_: full.append([any(buffer.memory for group in unit.groups for buffer in group.buffers) for unit in units])
        )
    seen = []
    for early_stop in (True, False):
        for step in range(2):
            full.clear()
            with fullshard.counting(sharded) as messages, set_checkpoint_early_stop(early_stop):
                square(sharded(world.mine(batch(step)).requires_grad_())).backward()
            square(model(batch(step))).backward()
            assert_same_grads(sharded, model)
            sharded.zero_grad(), model.zero_grad()
        seen.append((Counter(message.kind for message in messages), list(full)))
    assert seen[0] == seen[1]
    assert max(sum(each) for each in full) <= 3, "the root, the unit that computes, and the one that is prefetched"


@ranks(2)
def test_a_checkpointed_root(world: World) -> None:
    for reentrant in (True, False):
        model = Stack()
        sharded = copy.deepcopy(model)
        for module in (*sharded.blocks, sharded):
            fully_shard(module, mesh=world.mesh)
        for step in range(2):
            x = batch(step).requires_grad_()
            square(checkpoint(sharded, world.mine(x), use_reentrant=reentrant)).backward()
            square(model(x)).backward()
            assert_same_grads(sharded, model)
            sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_dropout_is_recomputed_alike(world: World) -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Noisy() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Net()
    sharded = copy.deepcopy(model)
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=world.mesh)
    for m in (sharded, model):
        torch.manual_seed(3)
        square(m(batch(0, 7))).backward()
    assert_same_grads(sharded, model)


class Probe(torch.autograd.Function):
    """The identity, which calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.function()
        return *grads, None


@pytest.mark.proves("18a")
@ranks(2)
def test_a_recomputation_that_ends_early_is_not_told_as_a_failure(world: World) -> None:
    """torch ends it by an exception. Ranks that waited some seconds for this one then raised, and named that exception."""
    told: list[str | None] = []

    class Probed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Probe.apply(x, lambda: told.extend(log.exception_note for log in logs)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.block = nn.Linear(5, 7), Probed()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.inp(x), use_reentrant=False)

    sharded = Net()
    for module in (sharded.block, sharded):
        fully_shard(module, mesh=world.mesh)
    logs = [sharded.block._fullshard_unit.groups[0].fingerprints.log]
    square(sharded(world.mine(batch(0)))).backward()
    assert told and not any(told)
