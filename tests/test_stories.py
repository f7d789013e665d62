"""Each test tells of something that went wrong somewhere, and asserts that it does not here."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, shard_stack, square
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("out of luck")


class Unlucky(Stack):
    """Raises where it is told to, once."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            if self.where == f"forward {i}":
                raise RuntimeError("out of luck")
            x = block(x)
            if self.where == f"backward {i}":
                x = Raises.apply(x)
        return self.head(x)


@pytest.mark.parametrize("where", ["forward 0", "forward 2", "backward 0", "backward 1", "backward 2"])
@ranks(1, 2)
def test_a_step_that_raised_leaves_the_next_one_clean(world: World, where: str) -> None:
    """An exception in backward used to leave parameters gathered and gradients unreduced, silently, for every later
    step, unless the user knew which method to call. Here the next forward notices, says so once, and is right."""
    model = Unlucky()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(5):
        if step in (1, 3):
            sharded.where = where
            with pytest.raises(RuntimeError, match="out of luck"):
                square(sharded(world.mine(batch(9)))).backward()
            sharded.where = ""  # and nobody calls zero_grad(): the gradients of the failed step never arrive
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = square(sharded(world.mine(batch(step))))
        said = [str(w.message) for w in caught if "the last backward raised" in str(w.message)]
        assert len(said) == (1 if step in (1, 3) and where.startswith("backward") else 0)
        assert all("'Unlucky'" in text for text in said)
        loss.backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@ranks(2)
def test_the_root_is_fresh_after_evaluation_and_a_step(world: World) -> None:
    """An evaluation used to leave the outermost unit gathered; the optimizer then wrote the shards, and the next forward
    computed with the old weights."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (sharded, model)]
    with torch.no_grad():
        sharded(batch(1))
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        assert_near(sharded(batch(1)), model(batch(1)), "output")


@ranks(2)
def test_parameters_gathered_by_hand_are_fresh_after_a_step(world: World) -> None:
    """The same with `unshard()`: what was gathered before the optimizer wrote the shards is gathered again."""
    for optimizer_kind in ({"foreach": True}, {"foreach": False}):
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), world.mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, **optimizer_kind) for m in (sharded, model)]
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
        for block in sharded.blocks:
            block.unshard()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert_near(sharded(batch(1)), model(batch(1)), "output")


@ranks(2)
def test_different_parameters_on_different_ranks_are_never_summed_into_each_other(world: World) -> None:
    """Rank 0 used `a`, rank 1 the same-shaped `b`; the layout of the message was made of what each rank happened to use,
    so the gradients of two different parameters were added up, without an error."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(4))
            self.b = nn.Parameter(torch.ones(4))

        def forward(self, use_a: bool, scale: float) -> Tensor:
            return ((self.a if use_a else self.b) * scale).sum()

    model = fully_shard(Either(), mesh=world.mesh)
    model(world.rank == 0, float(world.rank + 1)).backward()
    assert model.a.grad.full_tensor().tolist() == [0.5] * 4
    assert model.b.grad.full_tensor().tolist() == [1.0] * 4


@ranks(2)
def test_ranks_that_use_different_parts_of_several_units_meet_in_one_order(world: World) -> None:
    """When to reduce was once decided by counting gradients. A rank that used only a part of a unit then reduced it later
    than the others, between other collectives: a hang, or sums of strangers. Now the order follows from the forward."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor, use_two: bool) -> Tensor:
            x = torch.tanh(self.one(x))
            return self.two(x) if use_two else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Partly() for _ in range(4))

        def forward(self, x: Tensor, rank: int) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x, i % 2 == rank)
            return x

    model = Net()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step in range(3):
        square(sharded(world.mine(batch(step)), world.rank)).backward()
        for rank, part in enumerate(batch(step).chunk(2)):
            (square(model(part, rank)) / 2).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_gradients_somebody_kept_are_not_overwritten(world: World) -> None:
    """Gradient memory must not be reused while a caller still looks at last step's gradient."""
    model = shard_stack(Stack(1), world.mesh)
    kept = []
    for step in range(3):
        square(model(world.mine(batch(step)))).backward()
        kept.append((model.head.weight.grad, model.head.weight.grad.full_tensor().clone()))
        model.zero_grad()
    assert all(torch.equal(grad.full_tensor(), value) for grad, value in kept)


@ranks(2)
def test_waiting_for_the_last_message_before_the_group_is_destroyed(world: World) -> None:
    """A heartbeat that nobody waited for outlived its process group and aborted the process at exit."""
    model = shard_stack(Stack(1), world.mesh)
    square(model(world.mine(batch(0)))).backward()
    assert len(model._fullshard_unit.runtime._in_flight) == 0


@ranks(2)
def test_a_backward_that_is_not_the_last_does_not_wait_and_the_last_one_collects_all(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for last in (False, False, True):
        sharded.set_is_last_backward(last)
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_user_hooks_and_train_and_eval_switches_between_steps(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    seen: list[str] = []
    sharded.blocks[0].register_forward_hook(lambda m, a, o: seen.append(type(m.up.weight).__name__))
    for step in range(2):
        sharded.eval(), sharded.train()
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
    assert_same_grads(sharded, model)
    assert len(seen) == 2


@ranks(2)
def test_torchs_grad_scaler_works_on_sharded_gradients(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    runs = [(m, torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(m.parameters(), lr=0.1)) for m in (sharded, model)]
    for step in range(3):
        for m, scaler, optimizer in runs:
            x = world.mine(batch(step)) if m is sharded else batch(step)
            scaler.scale(square(m(x))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@ranks(1)
def test_a_mesh_of_one_rank_computes_in_the_same_dtypes(world: World) -> None:
    """At world size 1 sharding was skipped, and mixed precision with it."""
    mp = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(4, 4), mesh=world.mesh, mp_policy=mp)
    out = model(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model.weight.grad.dtype == torch.float32
