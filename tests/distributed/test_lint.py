"""What looks wrong is said: parameters that nobody reduces raise, waste and skew get one line, once, with the fix."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, batch, full, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fullshard
from fullshard import CheckPolicy, LintWarning, StateError, fully_shard


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


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
def test_waste_is_said_once_on_one_rank_and_can_be_silenced(world: World) -> None:
    cases = {
        "root": {"root": 512},
        "large": {"block": 512},
    }
    for name, sizes in cases.items():
        x = torch.ones(1, 64)
        model = wide(world, **sizes)
        said = lines(lambda model=model, x=x: [model(x) for _ in range(3)])
        assert len(said) == (world.rank == 0), said
        if world.rank == 0 and name == "root":
            Texts().assertExpectedInline(
                said[0],
                """Unit 'Wide' stays unsharded from its forward to the end of its backward, and has 99% of the parameters. Call fully_shard() on its large parts first, or shard_model(), which chooses them.""",
            )
        if world.rank == 0 and name == "large":
            Texts().assertExpectedInline(
                said[0],
                """Unit 'blocks.3' has 2,097,152 elements, 512 times the median of the units, so it determines the peak memory. Call fully_shard() on parts of it.""",
            )
        quiet = wide(world, silence=(name,), **sizes)
        assert lines(lambda quiet=quiet, x=x: quiet(x)) == []
    assert lines(lambda: shard_stack(Stack(), world.mesh)(batch(0))) == [], "small models are left in peace"


@ranks(4)
def test_padding_is_said(world: World) -> None:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(1, 2_000_000))

        def forward(self, x: Tensor) -> Tensor:
            return self.table.sum() * x

    model = fully_shard(Few(), mesh=world.mesh)
    said = lines(lambda: model(torch.ones(1)))
    if world.rank == 0:
        Texts().assertExpectedInline(
            said[0],
            """Unit 'Few' is padded by 300%, since its parameters have few rows for 4 ranks. Shard them along another dim with shard_placement_fn.""",
        )


@ranks(2)
def test_trainable_parameters_that_nobody_reduces(world: World) -> None:
    """Ignored ones are said; those added after sharding raise by name; those of a forgotten root are said by the optimizer."""
    model = Stack(1)
    shared = copy.deepcopy(model)
    fully_shard(shared, mesh=world.mesh, ignored_params={shared.head.bias})
    said = lines(lambda: shared(batch(0)))
    if world.rank == 0:
        Texts().assertExpectedInline(
            said[0],
            """Ignored parameters 'head.bias' are trainable, but no unit reduces their gradients, so each rank trains its own copy. Average their gradients after backward.""",
        )

    late = shard_stack(Stack(), world.mesh)
    square(late(batch(0))).backward()
    late.blocks[1].scale = nn.Parameter(torch.ones(3))
    with pytest.raises(StateError) as caught:
        late(batch(0))
    Texts().assertExpectedInline(
        str(caught.value),
        """Parameters ('scale') were added to unit 'blocks.1' after fully_shard(), so each rank would train them alone. Add them before fully_shard(), call fully_shard() on the module that holds them, freeze them, or, if you reduce their gradients yourself, pass CheckPolicy(silence=('added',)).""",
    )
    late.blocks[1].scale.requires_grad_(False)
    late(batch(0))
    late.blocks[1].adapter = fully_shard(nn.Linear(3, 3), mesh=world.mesh)
    late(batch(0))
    late.head = nn.Linear(7, 3)
    with pytest.raises(
        StateError, match=r"Parameters \('head.weight', 'head.bias'\) were added to unit '.*' after fully_shard"
    ):
        late(batch(0))

    rootless = Stack(2)
    for block in rootless.blocks:
        fully_shard(block, mesh=world.mesh)
    optimizer = torch.optim.SGD(rootless.parameters(), lr=0.1)
    square(rootless(batch(0))).backward()
    said = lines(lambda: [optimizer.step() for _ in range(2)])
    if world.rank == 0:
        (line,) = said
        Texts().assertExpectedInline(
            line,
            """An optimizer steps sharded parameters and 4 plain ones ('one of shape (7, 5)', 'one of shape (7,)', 'one of shape (3, 7)' and 1 more), whose gradients no unit reduces, so each rank trains its own copy. Call fully_shard() on the module that holds them, for example the outermost one.""",
        )


@ranks(2)
def test_prefetches_that_are_missed_are_counted_and_said(world: World) -> None:
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
    model: Any = fully_shard(Scaled(), mesh=mesh["dp"])
    for name in ("tp", "dp"):
        model.scale = nn.Parameter(distribute_tensor(torch.ones(4), mesh[name], [Replicate()]))
        if name == "tp":
            with pytest.raises(StateError, match=r"Parameters \('scale'\) were added to unit 'Scaled'"):
                model(torch.ones(1, 5))
        else:  # DTensor reduces its gradient
            model(torch.ones(1, 5))


@pytest.mark.parametrize("before", [True, False])
@ranks(1, 2)
def test_optimizers_on_the_accumulation_of_gradients_are_told(world: World, before: bool) -> None:
    """torch hooks the node that accumulates into the parameter that it is given, and that node never runs."""
    apply: Any = importlib.import_module("torch.distributed.optim")._apply_optimizer_in_backward
    model = nn.Sequential(nn.Linear(5, 4))
    if not before:
        fully_shard(model, mesh=world.mesh)
    apply(torch.optim.SGD, model[0].parameters(), {"lr": 0.1})
    if before:
        fully_shard(model, mesh=world.mesh)
    for _ in range(2):
        with pytest.raises(StateError, match=r"\('0\.weight', '0\.bias'\) of unit 'Sequential' have an optimizer of _apply"):
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
