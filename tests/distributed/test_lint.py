"""Parameters that nobody reduces raise, costly mistakes warn once, and lint() tells of the rest, each with the fix."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, full, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fullshard
from fullshard import CheckPolicy, LintWarning, StateError, fully_shard


def lines(fn: Callable[[], Any]) -> list[str]:
    """The remarks made while `fn` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(w.message) for w in caught if issubclass(w.category, LintWarning)]


class Wide(nn.Module):
    """Most of it in the root, one block far larger than the others, and a parameter with few rows."""

    def __init__(self, root: int = 1, block: int = 1, rows: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64 * (block if i == 3 else 1), bias=False) for i in range(5)])
        self.table = nn.Parameter(torch.ones(64 * root, 64))
        self.few = nn.Parameter(torch.ones(rows, 64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[..., :64]
        return x * self.table.sum() * self.few.sum()


def wide(world: World, silence: tuple[str, ...] = (), **sizes: int) -> Wide:
    model = Wide(**sizes)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=world.mesh, check_policy=CheckPolicy(silence=silence))
    return model


@ranks(2)
def test_a_root_with_most_of_the_parameters_is_warned_of_once_on_one_rank_and_can_be_silenced(world: World) -> None:
    x = torch.ones(1, 64)
    model = wide(world, root=512)
    said = lines(lambda: [model(x) for _ in range(3)])
    assert len(said) == (world.rank == 0), said
    assert all("Unit 'Wide'" in line and "99% of the parameters" in line for line in said)
    assert lines(lambda: wide(world, silence=("root",), root=512)(x)) == []
    assert lines(lambda: shard_stack(Stack(), world.mesh)(batch(0))) == [], "small models are left in peace"


@ranks(4)
def test_lint_tells_of_units_that_waste_memory_on_demand_only(world: World) -> None:
    large = wide(world, block=512)
    assert lines(lambda: large(torch.ones(1, 64))) == []
    (line,) = fullshard.lint(large)
    assert "Unit 'blocks.3'" in line and "512 times the median" in line

    padded = nn.Linear(1, 1)
    padded.table = nn.Parameter(torch.ones(1, 2_000_000))
    (line,) = fullshard.lint(fully_shard(padded, mesh=world.mesh))
    assert "Unit 'Linear' is padded by 300%" in line and "shard_placement_fn" in line

    assert fullshard.lint(shard_stack(Stack(), world.mesh)) == []
    with pytest.raises(StateError, match="contains no sharded module"):
        fullshard.lint(Stack())


@pytest.mark.proves("29a")
@ranks(2)
def test_trainable_parameters_that_nobody_reduces(world: World) -> None:
    """Ignored ones, and those added after the first forward, are told by lint(); those added before it raise by name."""
    model = Stack(1)
    fully_shard(model, mesh=world.mesh, ignored_params={model.head.bias})
    (line,) = fullshard.lint(model)
    assert "'head.bias'" in line and "Average their gradients" in line

    late = shard_stack(Stack(), world.mesh)
    late.blocks[1].scale = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        late(batch(0))  # a rank may evaluate with parameters of its own
    with pytest.raises(StateError, match=r"Parameters \('scale'\) were added to unit 'blocks.1' after fully_shard"):
        late(batch(0))
    late.blocks[1].scale.requires_grad_(False)
    late(batch(0))
    late.blocks[1].adapter = fully_shard(nn.Linear(3, 3), mesh=world.mesh)
    late(batch(0))
    late.head = nn.Linear(7, 3)
    (line,) = fullshard.lint(late)
    assert "('head.weight', 'head.bias') were added to unit" in line


@pytest.mark.proves("12c")
@ranks(2)
def test_added_parameters_with_hooks_on_their_gradients_are_warned_of_and_train(world: World) -> None:
    """A hook may average the gradient, as those of transformers' Trainer do, or not: there is no proof for an error."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    model.head, plain.head = nn.Linear(7, 3), nn.Linear(7, 3)
    model.head.load_state_dict(plain.head.state_dict())

    def average(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    model.head.weight.register_post_accumulate_grad_hook(average)
    with pytest.raises(StateError, match=r"Parameters \('head.bias'\) were added"):
        model(world.mine(batch(0)))
    model.head.bias.register_post_accumulate_grad_hook(average)
    said = lines(lambda: [square(model(world.mine(batch(0)))).backward() for _ in range(2)])
    assert len(said) == (world.rank == 0), said
    assert all("('head.weight', 'head.bias') were added to unit 'Stack'" in line and "average them" in line for line in said)
    for _ in range(2):
        square(plain(batch(0))).backward()
    assert_same_grads(model, plain)


@pytest.mark.parametrize("case", ["forgotten root", "added adapter"])
@ranks(2)
def test_an_optimizer_that_steps_plain_parameters_beside_sharded_ones_is_warned_of(world: World, case: str) -> None:
    model = Stack(2)
    if case == "forgotten root":
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh)
    else:
        shard_stack(model, world.mesh)
        square(model(batch(0))).backward()
        model.zero_grad()
        model.head = nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square(model(batch(0))).backward()
    said = lines(lambda: [optimizer.step() for _ in range(2)])
    assert len(said) == (world.rank == 0)
    plain = 4 if case == "forgotten root" else 2
    assert all(f"and {plain} plain ones" in line and "Call fully_shard() on the module" in line for line in said)


@ranks(2)
def test_prefetches_that_are_missed_are_counted(world: World) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            for index in order:
                x = self.parts[index](x)
            return x

    model = Shuffled()
    policy = fullshard.CommPolicy(
        lanes=lambda device: fullshard.comm.streams.stream_for(device)
    )  # counted apart from other models
    for module in (*model.parts, model):
        fully_shard(module, mesh=world.mesh, comm_policy=policy)
    generator = torch.Generator().manual_seed(0)
    before = fullshard.stats(model)
    assert before.missed == 0
    for _ in range(8):
        square(model(torch.ones(2, 4), torch.randperm(6, generator=generator).tolist())).backward()
    assert fullshard.stats(model).missed >= 8
    in_order = shard_stack(
        Stack(),
        world.mesh,
        comm_policy=fullshard.CommPolicy(lanes=lambda device: fullshard.comm.streams.stream_for(device)),
    )
    for step in range(4):
        square(in_order(batch(step))).backward()
    assert fullshard.stats(in_order).missed == 0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.scale is None else y * self.scale.to_local()


@pytest.mark.proves("12c")
@ranks(2)
def test_an_added_dtensor_that_other_ranks_do_not_share_is_told(world: World) -> None:
    """As an adapter on tensor-parallel layers, whose DTensor does not reduce over the data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for name in ("tp", "dp"):
        model: Any = fully_shard(Scaled(), mesh=mesh["dp"])
        model.scale = nn.Parameter(distribute_tensor(torch.ones(4), mesh[name], [Replicate()]))
        if name == "tp":
            with pytest.raises(StateError, match=r"Parameters \('scale'\) were added to unit 'Scaled'"):
                model(torch.ones(1, 5))
        else:  # DTensor reduces its gradient
            model(torch.ones(1, 5))


@pytest.mark.parametrize("leaf", [False, True])
@ranks(2)
def test_modules_that_torch_replicates_are_left_to_it(world: World, leaf: bool) -> None:
    """What is inside of such a module was taken for parameters that were added to the unit."""
    from torch.distributed._composable import replicate

    inner = nn.Linear(5, 5) if leaf else nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    plain = nn.Sequential(inner, nn.Linear(5, 3))
    model = copy.deepcopy(plain)
    replicate(model[0])
    fully_shard(model, mesh=world.mesh)
    for each, x in ((model, world.mine(batch(0))), (plain, batch(0))):
        square(each(x)).backward()
    for got, wanted in zip(model.parameters(), plain.parameters()):
        assert_near(full(got.grad), wanted.grad, "gradient")
