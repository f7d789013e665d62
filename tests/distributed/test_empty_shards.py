"""Optimizers of other libraries, whose kernels skip what precedes an empty last tensor, step every parameter all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from models import assert_same_parameters, batch, full, square
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard.optim import empty_shards, local_view

ROOM = 6
"""Tensors of one launch, as the kernels of apex have some tens."""


def multi_tensor_apply(kernel: Callable[..., None], lists: list[list[Tensor]]) -> None:
    """The host's part of apex's multi_tensor_apply.cuh: it launches at a tensor with elements, if it is the last or fills up."""
    waiting: list[int] = []
    for index, tensor in enumerate(lists[0]):
        waiting.append(index)
        assert len(waiting) <= ROOM, "writes behind its arrays"
        if tensor.numel() and (len(waiting) == ROOM or index == len(lists[0]) - 1):
            for one in waiting:
                kernel(*[tensors[one] for tensors in lists])
            waiting.clear()


class FusedAdam(optim.Optimizer):
    """As Transformer Engine's and apex's: states first, steps counted by group, and one list of tensors for each dtype."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        inside = lambda tensor: tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            one, two = group["betas"]
            lists: dict[torch.dtype, list[list[Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["scales"] = torch.ones(5)  # a tensor that has no element for each of the parameter
                    state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                held = (parameter, parameter.grad, state["first"], state["second"])
                for tensors, tensor in zip(lists.setdefault(parameter.dtype, [[], [], [], []]), held):
                    tensors.append(inside(tensor))

            def kernel(p: Tensor, g: Tensor, first: Tensor, second: Tensor, step: int = group["step"]) -> None:
                first.lerp_(g, 1 - one)
                second.mul_(two).addcmul_(g, g, value=1 - two)
                p.addcdiv_(first / (1 - one**step), (second / (1 - two**step)).sqrt_().add_(1e-8), value=-group["lr"])

            if self.fails:
                raise RuntimeError("out of luck")
            for tensors in lists.values():
                multi_tensor_apply(kernel, tensors)


def dtensors(params: Any) -> FusedAdam:
    return FusedAdam(params)


def viewed(params: Any) -> FusedAdam:
    return fullshard.local_view(FusedAdam(params))


WAYS = [dtensors, viewed]


class Uneven(nn.Module):
    """Its last parameters have fewer rows than there are ranks: 2 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Narrow(nn.Module):
    """None of its parameters has rows on every one of three ranks; the fullest are the first."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Linear(5, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.down(x)))


def train(model: nn.Module, optimizer: optim.Optimizer, world: World | None, steps: range = range(3)) -> None:
    for step in steps:
        rows = batch(step) if world is None else world.mine(batch(step))
        square(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()


def pair(world: World, kind: type[nn.Module], made: Callable[[Any], optim.Optimizer]) -> tuple[Any, ...]:
    """Sharded and plain model, with their optimizers."""
    torch.manual_seed(3)
    plain = kind()
    sharded = fullshard.fully_shard(copy.deepcopy(plain), mesh=world.mesh)
    return sharded, made(sharded.parameters()), plain, FusedAdam(plain.parameters())


@contextmanager
def as_before() -> Iterator[None]:
    """What optimizers saw without the mend."""
    alike = mock.patch.object(local_view, "nonempty", lambda tensor: tensor)
    with alike, mock.patch.object(empty_shards.StepOrder, "enter", lambda *_, **__: None):
        yield


@pytest.mark.proves("34a")
@pytest.mark.parametrize("made", WAYS)
@pytest.mark.parametrize("kind", [Uneven, Narrow])
@ranks(2, 3)
def test_every_parameter_is_stepped_though_the_last_shard_is_empty(
    world: World, kind: type[nn.Module], made: Callable[[Any], optim.Optimizer]
) -> None:
    sharded, ours, plain, theirs = pair(world, kind, made)
    empty = [name for name, p in sharded.named_parameters() if not p.to_local().numel()]
    assert bool(empty) is (world.rank > 0), "each rank but the first holds no row of the last parameter"
    train(sharded, ours, world)
    train(plain, theirs, None)
    assert_same_parameters(sharded, plain)
    for parameter, one in zip(sharded.parameters(), plain.parameters()):
        mine, other = ours.state[parameter], theirs.state[one]
        assert torch.allclose(full(mine["second"]), other["second"], atol=1e-6)
        assert torch.equal(mine["scales"], other["scales"])
        assert mine["second"].to_local().shape == parameter.to_local().shape


@pytest.mark.parametrize("made", WAYS)
@ranks(2, 3)
def test_without_the_mend_ranks_with_empty_shards_train_nothing(world: World, made: Callable[[Any], optim.Optimizer]) -> None:
    """Which shows that the optimizer of these tests behaves as those of other libraries do."""
    sharded, ours, _, _ = pair(world, Uneven, made)
    before = [p.detach().to_local().clone() for p in sharded.parameters()]
    with as_before():
        train(sharded, ours, world)
    same = [torch.equal(p.detach().to_local(), one) for p, one in zip(sharded.parameters(), before)]
    assert all(same) if world.rank else not any(same)


@pytest.mark.proves("34a")
@pytest.mark.parametrize("made", WAYS)
@ranks(2, 3)
def test_groups_names_and_states_are_the_same_on_all_ranks_and_as_without_sharding(
    world: World, made: Callable[[Any], optim.Optimizer]
) -> None:
    sharded, ours, plain, theirs = pair(world, Uneven, made)
    ours.param_groups[0]["param_names"] = [name for name, _ in sharded.named_parameters()]
    names = list(ours.param_groups[0]["param_names"])
    train(sharded, ours, world)
    train(plain, theirs, None)
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(p) for p in sharded.parameters()]
    assert ours.param_groups[0]["param_names"] == names and ours.param_groups[0]["step"] == 3
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"][0]["params"] == other["param_groups"][0]["params"]
    for index, state in other["state"].items():
        assert list(mine["state"][index]) == list(state)
        for key in ("first", "second"):
            held = mine["state"][index][key]
            assert isinstance(held, DTensor) and torch.allclose(full(held), state[key], atol=1e-6)
    described = [
        (name, [(key, tuple(value.shape), type(value).__name__) for key, value in state.items()])
        for name, state in get_optimizer_state_dict(sharded, ours)["state"].items()
    ]
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, described)
    assert all(one == described for one in everywhere)


@ranks(3)
def test_checkpoints_of_empty_shards_go_on_with_and_without_the_view(world: World, tmp_path: Path) -> None:
    where: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(where, 0)
    for first, then in ((dtensors, viewed), (viewed, dtensors)):
        sharded, ours, plain, theirs = pair(world, Uneven, first)
        train(sharded, ours, world)
        folder = f"{where[0]}/{first.__name__}"
        dcp.save({"optimizer": get_optimizer_state_dict(sharded, ours)}, checkpoint_id=folder)
        resumed = then(sharded.parameters())
        loaded = {"optimizer": get_optimizer_state_dict(sharded, resumed)}
        dcp.load(loaded, checkpoint_id=folder)
        set_optimizer_state_dict(sharded, resumed, loaded["optimizer"])
        train(sharded, resumed, world, range(3, 6))
        train(plain, theirs, None, range(6))
        assert_same_parameters(sharded, plain)


@pytest.mark.proves("34a")
@pytest.mark.parametrize("made", WAYS)
@ranks(3)
def test_a_step_that_raises_leaves_the_order_to_what_is_saved_loaded_and_stepped_next(
    world: World, made: Callable[[Any], optim.Optimizer]
) -> None:
    sharded, ours, plain, theirs = pair(world, Uneven, made)
    train(sharded, ours, world)
    train(plain, theirs, None)
    kept = copy.deepcopy(ours.state_dict())
    by_name = copy.deepcopy(get_optimizer_state_dict(sharded, ours))

    def fail() -> None:
        square(sharded(world.mine(batch(3)))).backward()
        ours.fails = True
        with pytest.raises(RuntimeError, match="out of luck"):
            ours.step()
        ours.fails = False
        ours.zero_grad()

    def shapes() -> list[Any]:
        return [held["first"].shape for _, held in sorted(ours.state_dict()["state"].items())]

    fail()
    assert shapes() == [p.shape for p in sharded.parameters()]
    fail()
    ours.load_state_dict(copy.deepcopy(kept))
    assert shapes() == [p.shape for p in sharded.parameters()]
    fail()
    set_optimizer_state_dict(sharded, ours, copy.deepcopy(by_name))
    train(sharded, ours, world, range(3, 5))
    train(plain, theirs, None, range(3, 5))
    assert_same_parameters(sharded, plain)
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(p) for p in sharded.parameters()]


@pytest.mark.proves("34a")
@ranks(3)
def test_any_number_of_empty_shards_is_stepped_by_local_view(world: World) -> None:
    """More of them in a row than a launch of the kernel has room for."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(5, 6)
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2 * ROOM)])
            self.out = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for scale in self.scales:
                x = x * scale
            return self.out(x)

    sharded, ours, plain, theirs = pair(world, Many, viewed)
    train(sharded, ours, world)
    train(plain, theirs, None)
    assert_same_parameters(sharded, plain)


@ranks(2, 3)
def test_the_order_of_a_step_is_the_same_on_all_ranks(world: World) -> None:
    """Operations on DTensors may send messages, in the order of the parameters."""
    seen: list[Any] = []

    class Watching(FusedAdam):
        def step(self, closure: Any = None) -> None:
            seen.append([(tuple(p.shape), p.grad is None) for group in self.param_groups for p in group["params"]])
            super().step(closure)

    sharded, ours, _, _ = pair(world, Uneven, Watching)
    train(sharded, ours, world)
    sharded.up.requires_grad_(False)  # the fullest of those that are stepped is another one
    sharded.up.zero_grad()
    train(sharded, ours, world)
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, seen)
    assert all(one == seen for one in everywhere)
    shape = [[shape for shape, _ in step] for step in seen]
    assert shape[0] != [tuple(p.shape) for p in sharded.parameters()]
    assert sorted(shape[0]) == sorted(tuple(p.shape) for p in sharded.parameters())


@ranks(4)
def test_shards_that_tensor_parallelism_leaves_empty_count_too(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded[2].bias = nn.Parameter(distribute_tensor(plain[2].bias.detach(), mesh["tp"], [Replicate()]))
    fullshard.fully_shard(sharded, mesh=mesh["dp"])
    for made in WAYS:
        ours = made(sharded.parameters())
        train(sharded, ours, None, range(1))
        assert all(state["first"].shape == p.shape for p, state in ours.state.items())


@ranks(2)
def test_optimizers_of_torch_keep_their_order(world: World) -> None:
    sharded = fullshard.fully_shard(Uneven(), mesh=world.mesh)
    assert not empty_shards.is_foreign(optim.Adafactor(sharded.parameters()))
    assert not empty_shards.is_foreign(optim.LBFGS(sharded.parameters()))
    assert empty_shards.is_foreign(FusedAdam(sharded.parameters()))
