"""Element-wise optimizers compute with local shards, and nothing shows it: same weights, same states, same errors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, shard_stack, share_grads, square
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard import _torch
from fullshard.optim import optimizer_hooks as steps
from fullshard.optim.local_steps import ELEMENT_WISE, is_element_wise

OPTIONS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05}),
    "Adagrad, fused": (optim.Adagrad, {"fused": True}),
    "Adam": (optim.Adam, {"amsgrad": True}),
    "Adam, fused": (optim.Adam, {"fused": True, "weight_decay": 0.1}),
    "AdamW, fused": (optim.AdamW, {"fused": True, "amsgrad": True}),
    "AdamW, foreach": (optim.AdamW, {"foreach": True}),
    "AdamW, single": (optim.AdamW, {"foreach": False}),
    "AdamW, capturable": (optim.AdamW, {"foreach": True, "maximize": True}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {"t0": 1.0}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "RMSprop, foreach": (optim.RMSprop, {"foreach": True}),
    "Rprop": (optim.Rprop, {}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD, nesterov, foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD, fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


@contextmanager
def dtensor_path() -> Iterator[None]:
    """Optimizers that begin here keep their DTensors."""
    original, steps.is_element_wise = steps.is_element_wise, lambda optimizer: False
    try:
        yield
    finally:
        steps.is_element_wise = original


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    world: World,
    count: int = 3,
    first: int = 0,
    between: Callable[[], None] | None = None,
) -> None:
    for step in range(first, first + count):
        square(model(world.mine(batch(step)))).backward()
        if between is not None:
            between()
        optimizer.step()
        optimizer.zero_grad()


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(one: nn.Module, other: nn.Module, ours: optim.Optimizer, theirs: optim.Optimizer) -> None:
    """Bit for bit the same weights, and states of the same kinds."""
    for (name, mine), yours in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(mine.full_tensor(), yours.full_tensor()), name
        states = ours.state[mine], theirs.state[yours]
        assert list(states[0]) == list(states[1]), name
        for key in states[0]:
            assert type(states[0][key]) is type(states[1][key]), f"{name} {key}: {type(states[0][key])}"
            assert torch.equal(torch.as_tensor(full(states[0][key])), torch.as_tensor(full(states[1][key]))), f"{name} {key}"
    assert len(ours.state) == len(theirs.state)


class Kinds(TorchDispatchMode):
    """The operations that were given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.of_dtensors: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if any(issubclass(kind, DTensor) for kind in types):
            self.of_dtensors.append(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", OPTIONS)
@ranks(2, 3)
def test_weights_and_states_are_those_of_plain_tensors_and_of_dtensors(world: World, name: str) -> None:
    """Bit for bit. With a third rank some shards are empty, and some uneven. A few optimizers cannot step on DTensors."""
    kind, options = OPTIONS[name]
    models = [shard_stack(Stack(), world.mesh) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = kind(models[0].parameters(), **options)
    plain = [nn.Parameter(_torch.local_part(parameter).clone()) for parameter in models[0].parameters()]
    expected = kind(plain, **options)
    for step in range(3):
        square(models[0](world.mine(batch(step)))).backward()
        for parameter, reference in zip(models[0].parameters(), plain):
            reference.grad = _torch.local_part(parameter.grad).clone()
        with Kinds() as seen:
            ours.step()
        assert seen.count and (step == 0 or not seen.of_dtensors)
        expected.step()
        ours.zero_grad()
    for (of, parameter), reference in zip(models[0].named_parameters(), plain):
        assert torch.equal(_torch.local_part(parameter), reference), of
        for key, value in expected.state[reference].items():
            assert torch.equal(_torch.local_part(ours.state[parameter][key]), value) if isinstance(value, Tensor) else True, (
                f"{of} {key}"
            )
    if name not in ("Adagrad, fused", "SGD, fused", "Rprop"):
        with dtensor_path():
            theirs = kind(models[1].parameters(), **options)
            train(models[1], theirs, world)
        assert_same(models[0], models[1], ours, theirs)


def test_every_element_wise_optimizer_of_torch_is_tried() -> None:
    assert {kind for kind, _ in OPTIONS.values()} == set(ELEMENT_WISE)
    known = {*ELEMENT_WISE, optim.Optimizer, optim.LBFGS, optim.SparseAdam, optim.Adafactor}
    if hasattr(optim, "Muon"):
        known.add(optim.Muon)
    every = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert every == known, "an optimizer that is not known to be element-wise, or not to be"


def test_classes_that_step_or_list_in_their_own_way_keep_their_dtensors() -> None:
    class Same(optim.AdamW):
        """Another name."""

    class Steps(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Lists(optim.AdamW):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    weights = [nn.Parameter(torch.ones(2))]
    assert is_element_wise(Same(weights))
    assert not is_element_wise(Steps(weights)) and not is_element_wise(Lists(weights))
    assert not is_element_wise(optim.LBFGS(weights)) and not is_element_wise(optim.Adafactor(weights))


@ranks(2)
def test_what_surrounds_a_step_sees_sharded_parameters(world: World) -> None:
    """Hooks of the optimizer, closures, schedulers, groups that are added, a parameter that is frozen, one without gradient."""
    models = [shard_stack(Stack(), world.mesh) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    kinds: list[type] = []

    def look(optimizer: optim.Optimizer, *_: Any) -> None:
        listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kinds.extend([*map(type, listed), *map(type, optimizer.state)])
        for state in optimizer.state.values():
            kinds.extend(type(value) for value in state.values() if isinstance(value, Tensor) and value.ndim)

    def run(model: nn.Module) -> optim.Optimizer:
        first, *rest = model.parameters()
        optimizer = optim.SGD(rest, lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = square(model(world.mine(batch(7))))
            loss.backward()
            look(optimizer)
            return loss.detach()

        assert optimizer.step(closure).isfinite()
        schedule.step()
        optimizer.add_param_group({"params": [first], "lr": 0.01})
        train(model, optimizer, world)
        rest[0].requires_grad_(False)
        rest[0].grad = None
        train(model, optimizer, world)
        rest[0].requires_grad_(True)
        train(model, optimizer, world, 2, between=lambda: setattr(rest[1], "grad", None))
        optimizer.param_groups[0]["momentum"] = 0
        train(model, optimizer, world, 2)
        optimizer.param_groups[0]["momentum"] = 0.5
        train(model, optimizer, world, 2)
        return optimizer

    ours = run(models[0])
    assert set(kinds) <= {type(next(models[0].parameters())), DTensor}, set(kinds)
    with dtensor_path():
        theirs = run(models[1])
    assert_same(models[0], models[1], ours, theirs)


@pytest.mark.parametrize("how", ["state_dict", "saved", "by name"])
@ranks(2)
def test_checkpoints_of_one_path_are_loaded_by_the_other(world: World, how: str) -> None:
    """Each half of a training run on another path is the whole on one."""
    whole = shard_stack(Stack(), world.mesh)
    halves = [shard_stack(Stack(), world.mesh) for _ in range(2)]
    for half in halves:
        half.load_state_dict(whole.state_dict())
    make = lambda model: optim.AdamW(model.parameters(), lr=0.05, fused=True)
    expected = make(whole)
    train(whole, expected, world, 4)
    for at, paths in enumerate(((dtensor_path, None), (None, dtensor_path))):
        model = shard_stack(Stack(), world.mesh)
        model.load_state_dict(halves[at].state_dict())
        optimizer = make(model)
        with paths[0]() if paths[0] else Kinds():
            train(model, optimizer, world, 2)
        after = shard_stack(Stack(), world.mesh)
        after.load_state_dict(model.state_dict())
        resumed = make(after)
        with paths[1]() if paths[1] else Kinds():
            if how == "by name":
                set_optimizer_state_dict(after, resumed, get_optimizer_state_dict(model, optimizer))
            else:
                state = optimizer.state_dict()
                if how == "saved":
                    file = io.BytesIO()
                    torch.save(state, file)
                    state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
                resumed.load_state_dict(copy.deepcopy(state))
            train(after, resumed, world, 2, first=2)
        assert_same(after, whole, resumed, expected)


@ranks(2)
def test_states_that_are_replaced_between_steps_are_used(world: World) -> None:
    model, other = (shard_stack(Stack(1), world.mesh) for _ in range(2))
    other.load_state_dict(model.state_dict())

    def run(model: nn.Module) -> optim.Optimizer:
        optimizer = optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.05)
        train(model, optimizer, world, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, world, 2)
        optimizer.load_state_dict(saved)  # groups are new dicts now
        train(model, optimizer, world, 2)
        first = next(model.parameters())
        optimizer.state[first]["exp_avg"] = torch.zeros_like(optimizer.state[first]["exp_avg"])
        train(model, optimizer, world, 2)
        del optimizer.state[first]
        train(model, optimizer, world, 2)
        optimizer.param_groups.reverse()
        train(model, optimizer, world, 2)
        return optimizer

    ours = run(model)
    with dtensor_path():
        theirs = run(other)
    assert_same(model, other, ours, theirs)


@ranks(2)
def test_gradients_that_are_cut_otherwise_are_left_to_dtensors(world: World) -> None:
    from torch.distributed.tensor import Replicate

    models = [shard_stack(Stack(1), world.mesh) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def run(model: nn.Module) -> optim.Optimizer:
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        parameter = model.inp.weight
        train(model, optimizer, world, 1)

        def replicate() -> None:
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

        try:
            train(model, optimizer, world, 1, between=replicate)
        except Exception as error:
            optimizer.failed = type(error)
        return optimizer

    ours = run(models[0])
    with dtensor_path():
        theirs = run(models[1])
    assert getattr(ours, "failed", None) == getattr(theirs, "failed", None)
    assert_same(models[0], models[1], ours, theirs)


@ranks(2)
def test_an_optimizer_whose_step_raised_goes_on(world: World) -> None:
    model = shard_stack(Stack(1), world.mesh)
    reference = shard_stack(Stack(1), world.mesh)
    reference.load_state_dict(model.state_dict())
    optimizer, expected = (optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))
    train(model, optimizer, world, 1)
    train(reference, expected, world, 1)

    def fail() -> Tensor:
        raise ValueError("of the closure")

    with pytest.raises(ValueError, match="of the closure"):
        optimizer.step(fail)
    copied = copy.deepcopy(optimizer)
    assert "_init_group" not in copied.__dict__ and len(copied.state) == len(optimizer.state)
    train(model, optimizer, world, 2, first=1)
    train(reference, expected, world, 2, first=1)
    assert_same(model, reference, optimizer, expected)


@ranks(2)
def test_writes_are_seen_by_the_next_gather(world: World) -> None:
    """A smaller group that keeps the parameters, and evaluation between steps, compute with what the optimizer wrote."""
    for name, (kind, options) in OPTIONS.items():
        model = Stack(1)
        sharded = shard_stack(copy.deepcopy(model), world.mesh)
        optimizers = [kind(one.parameters(), **options) for one in (model, sharded)]
        for step in range(2):
            square(model(batch(step))).backward()
            square(sharded(world.mine(batch(step)))).backward()
            assert_same_grads(sharded, model)
            share_grads(sharded, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                sharded(batch(9))
        before = [parameter._version for parameter in sharded.parameters()]
        assert before
        with torch.no_grad():
            assert_near(sharded(batch(9)), model(batch(9)), name)


@ranks(2)
def test_a_differentiable_step_keeps_its_dtensors(world: World) -> None:
    """Local tensors would end the graph. Leaves that are frozen meanwhile may be written with gradients on."""
    model = shard_stack(Stack(1), world.mesh)
    optimizer = optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    square(model(world.mine(batch(0)))).backward()
    expected = [(parameter - 0.1 * parameter.grad).full_tensor() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with Kinds() as seen:
        optimizer.step()
    assert seen.of_dtensors
    for parameter, value in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.full_tensor(), value)


@ranks(2)
def test_plain_parameters_beside_sharded_ones_are_trained(world: World) -> None:
    model = Stack()
    sharded = copy.deepcopy(model)
    fullshard.fully_shard(sharded, mesh=world.mesh, ignored_params=set(sharded.head.parameters()))
    optimizers = [optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, sharded)]
    for step in range(3):
        for one in (model, sharded):
            square(one(batch(step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)
