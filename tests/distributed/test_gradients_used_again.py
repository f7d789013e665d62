"""Gradients that nobody holds are the same objects over the same memory in the next step, and gradients that somebody holds stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, shard_stack, square
from torch import Tensor, nn

from fullshard import MixedPrecisionPolicy
from fullshard.core import units_of


def sharded(world: World, model: nn.Module, **options: Any) -> Any:
    return shard_stack(copy.deepcopy(model), world.mesh, **options)


def backward(world: World, model: nn.Module, step: int) -> None:
    square(model(world.mine(batch(step)))).backward()


@ranks(2)
def test_gradients_that_nobody_holds_are_used_again_and_take_no_memory_from_the_next_forward_on(world: World) -> None:
    plain = Stack()
    model = sharded(world, plain)
    seen: list[list[int]] = []
    for step in range(4):
        for one in (model, plain):
            one.zero_grad()
        output = model(world.mine(batch(step)))
        if step:
            for unit in units_of(model, True):
                for group in unit.groups:
                    assert group.parts is not None and not group.parts.flat.untyped_storage().size()
        square(output).backward()
        square(plain(batch(step))).backward()
        assert_same_grads(model, plain)
        seen.append([id(parameter.grad) for parameter in model.parameters()])
    assert seen[1:] == [seen[0]] * 3


HOLDS: dict[str, Callable[[Any], Any]] = {
    "the gradient": lambda grad: grad,
    "its local tensor": lambda grad: grad.to_local(),
    "the tensor inside": lambda grad: grad._local_tensor,
    "a detached one": lambda grad: grad.detach(),
    "a view": lambda grad: grad.to_local()[:1],
    "its memory": lambda grad: grad.to_local().untyped_storage(),
    "a tensor by DLPack": lambda grad: torch.from_dlpack(grad.to_local()),
    "an array": lambda grad: grad.to_local().numpy(),
    "another parameter's gradient": lambda grad: setattr_of(torch.nn.Parameter(torch.zeros_like(grad)), grad),
    "a list in a closure": lambda grad: lambda: grad,
}


def setattr_of(parameter: nn.Parameter, grad: Tensor) -> nn.Parameter:
    parameter.grad = grad
    return parameter


def value_of(held: Any) -> Tensor:
    """What somebody reads of what they hold."""
    if callable(held) and not isinstance(held, Tensor):
        held = held()
    if isinstance(held, nn.Parameter):
        held = held.grad
    if isinstance(held, torch.UntypedStorage):
        return torch.tensor([], dtype=torch.double).set_(held)  # type: ignore[call-overload]
    if not isinstance(held, Tensor):
        return torch.from_numpy(held)
    return held._local_tensor if hasattr(held, "_local_tensor") else held  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", HOLDS)
@ranks(2)
def test_a_gradient_that_somebody_holds_keeps_its_value_and_memory(world: World, what: str) -> None:
    plain = Stack()
    model = sharded(world, plain)
    backward(world, model, 0)
    held = HOLDS[what](model.inp.weight.grad)
    before = value_of(held).detach().clone()
    for step in (1, 2):
        model.zero_grad()
        backward(world, model, step)
        plain.zero_grad()
        square(plain(batch(step))).backward()
        assert_same_grads(model, plain)
        assert torch.equal(value_of(held), before)


@ranks(2)
def test_a_gradient_that_only_a_graph_holds_keeps_its_value(world: World) -> None:
    model = sharded(world, Stack())
    backward(world, model, 0)
    scale = torch.ones((), dtype=torch.double, requires_grad=True)
    product = (model.inp.weight.grad._local_tensor * scale).sum()
    expected = product.item()
    for step in (1, 2):
        model.zero_grad()
        backward(world, model, step)
    product.backward()
    assert scale.grad is not None and scale.grad.item() == pytest.approx(expected)


@ranks(2)
def test_what_users_set_on_a_gradient_does_not_come_back(world: World) -> None:
    model = sharded(world, Stack())
    backward(world, model, 0)
    grad = model.inp.weight.grad
    grad.factor = 2.0
    del grad
    model.zero_grad()
    backward(world, model, 1)
    assert not hasattr(model.inp.weight.grad, "factor")


@pytest.mark.parametrize("mp", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(2)
def test_gradients_that_the_user_replaced_are_summed_and_keep_nothing_alive(world: World, mp: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=mp, reduce_dtype=torch.float32) if mp else MixedPrecisionPolicy()
    model = sharded(world, Stack().float(), mp_policy=policy)
    square(model(world.mine(batch(0).float()))).backward()
    first = {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()
    square(model(world.mine(batch(0).float()))).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.to_local(), 2 * first[name])
    assert all(group.parts is None for unit in units_of(model, True) for group in unit.groups)


@ranks(2)
def test_a_gradient_whose_inside_was_replaced_is_not_used_again(world: World) -> None:
    """As dynamo replaces it when it compiles a step of an optimizer."""
    plain = Stack()
    model = sharded(world, plain)
    for step in range(3):
        for one in (model, plain):
            one.zero_grad()
        backward(world, model, step)
        square(plain(batch(step))).backward()
        assert_same_grads(model, plain)
        weight, bias = model.inp.weight.grad, model.inp.bias.grad
        held = bias._local_tensor  # so that as many tensors use the memory as before
        bias._local_tensor = bias._local_tensor.clone()
        weight._spec = type(weight._spec)(weight.device_mesh, weight.placements, weight._spec.tensor_meta)
        del weight, bias
        assert held is not None
