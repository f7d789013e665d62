"""Backwards that the caller ends: `set_manual_backward_finalization`, `finalize_backward`, and its handle."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.fsdp as theirs
from harness import World, ranks
from models import Stack, assert_same_grads, batch, full, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import GradientReductionHandle, MixedPrecisionPolicy, StateError, fully_shard


def microbatch(world: World, index: int) -> Tensor:
    return world.mine(batch(index))


def accumulated(model: nn.Module, count: int) -> nn.Module:
    """The gradients of the sum over `count` whole batches."""
    for index in range(count):
        square(model(batch(index))).backward()
    return model


def manual_model(world: World, model: nn.Module, **options: object) -> nn.Module:
    sharded = shard_stack(copy.deepcopy(model), world.mesh, **options)
    sharded.set_manual_backward_finalization(True)
    return sharded


@pytest.mark.parametrize("sync", [False, True])
@ranks(1, 2, 3)
def test_the_caller_ends_the_backwards_of_a_step(world: World, sync: bool) -> None:
    model = Stack()
    sharded = manual_model(world, model)
    for _ in range(3):
        sharded.set_requires_gradient_sync(sync)
        for index in range(3):
            square(sharded(microbatch(world, index))).backward()
            assert all(parameter.grad is None for parameter in sharded.parameters()), "no gradient before the end"
        sharded.set_requires_gradient_sync(True)
        with fullshard.counting(sharded) as messages:
            assert sharded.finalize_backward() is None
        kinds = [message.kind for message in messages]
        assert kinds == ([] if sync else ["reduce_scatter"] * 4) + ["heartbeat"], kinds
        accumulated(model, 3)
        assert_same_grads(sharded, model)
        for each in (sharded, model):
            each.zero_grad()
        assert all(unit.residency.value == "sharded" for unit in (m._fullshard_unit for m in (sharded, *sharded.blocks)))


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


@ranks(2)
def test_gradients_that_nobody_used_stay_none_and_those_of_one_rank_reach_all(world: World) -> None:
    model = Choice()
    sharded = fully_shard(copy.deepcopy(model), mesh=world.mesh)
    sharded.set_manual_backward_finalization(True)
    sharded.set_requires_gradient_sync(False)
    sharded(microbatch(world, 0), world.rank).sum().backward()
    sharded.set_requires_gradient_sync(True)
    sharded.finalize_backward()
    for which, part in enumerate(batch(0).chunk(2)):
        (model(part, which).sum() / 2).backward()
    assert_same_grads(sharded, model)
    assert sharded.layers[2].weight.grad is None
    sharded.zero_grad()
    sharded.finalize_backward()
    assert all(parameter.grad is None for parameter in sharded.parameters()), "zeros of all ranks are no gradient"


@ranks(2)
def test_a_handle_waits_later_and_until_then_the_units_run_nothing(world: World) -> None:
    model = Stack()
    sharded = manual_model(world, model)
    square(sharded(microbatch(world, 0))).backward()
    handle = sharded.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    assert isinstance(handle, getattr(theirs, "GradientReductionHandle", object))
    assert sharded.inp.weight.grad is None
    with pytest.raises(
        StateError, match=r"The forward of unit 'Stack' was called while its gradients are being reduced. Call wait"
    ):
        sharded(microbatch(world, 1))
    with pytest.raises(
        StateError, match=r"finalize_backward\(\) of unit 'Stack' was called while its gradients are being reduced"
    ):
        sharded.finalize_backward()
    with pytest.raises(StateError, match=r"arrived\. Call finalize_backward\(\), and wait\(\) of its handle"):
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    handle.wait()
    handle.wait()
    accumulated(model, 1)
    assert_same_grads(sharded, model)
    sharded(microbatch(world, 1))
    GradientReductionHandle().wait()


@ranks(2, 4)
def test_ranks_wait_for_several_models_in_any_order(world: World) -> None:
    models = [Stack(), Stack(), Stack()]
    sharded = [manual_model(world, model) for model in models]
    for index, each in enumerate(sharded):
        square(each(microbatch(world, index))).backward()
    handles = [each.finalize_backward(async_op=True) for each in sharded]
    order = [(index + world.rank) % 3 for index in range(3)]
    for index in order:
        handles[index].wait()
    for index, (each, model) in enumerate(zip(sharded, models)):
        square(model(batch(index))).backward()
        assert_same_grads(each, model)


@pytest.mark.proves("8e")
@ranks(2)
def test_dropped_reductions_are_said_by_wait(world: World) -> None:
    sharded = manual_model(world, Stack())
    for drop in (sharded.zero_grad, sharded.reset_iter_state):
        square(sharded(microbatch(world, 0))).backward()
        handle = sharded.finalize_backward(async_op=True)
        drop()
        with pytest.raises(StateError, match=r"its reductions were dropped by zero_grad\(\), reset_iter_state\(\) or an error"):
            handle.wait()
        assert all(parameter.grad is None for parameter in sharded.parameters())
    square(sharded(microbatch(world, 0))).backward()
    sharded.finalize_backward()
    assert sharded.inp.weight.grad is not None, "the next step is as if nothing had been"


@ranks(2)
def test_another_models_failed_backward_leaves_a_pending_reduction_alone(world: World) -> None:
    model = Stack()
    sharded, other = manual_model(world, model), shard_stack(Stack(), world.mesh)
    square(sharded(microbatch(world, 0))).backward()
    handle = sharded.finalize_backward(async_op=True)

    def fail_in_backward(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda grad: 1 / 0)

    hook = other.blocks[0].register_forward_hook(fail_in_backward)
    with pytest.raises(ZeroDivisionError):
        square(other(microbatch(world, 0))).backward()
    hook.remove()
    with pytest.warns(UserWarning, match="The last backward raised"):
        other(microbatch(world, 0))
    handle.wait()
    accumulated(model, 1)
    assert_same_grads(sharded, model)


@ranks(2)
def test_what_is_illegal_is_refused_before_anything_is_sent(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    assert sharded.finalize_backward() is None, "nothing before the first forward"
    assert isinstance(sharded.finalize_backward(async_op=True), GradientReductionHandle)
    output = square(sharded(microbatch(world, 0)))
    with pytest.raises(
        StateError, match=r"autograd ends the backwards of unit .Stack.. Call set_manual_backward_finalization\(True\)"
    ):
        sharded.finalize_backward()
    output.backward()
    sharded.zero_grad()
    sharded.set_manual_backward_finalization(True)
    square(sharded(microbatch(world, 0))).backward()
    with pytest.raises(
        StateError,
        match=r"set_manual_backward_finalization\(False\) .* gradients of unit 'Stack' .* Call finalize_backward\(\)",
    ):
        sharded.set_manual_backward_finalization(False)
    sharded.set_manual_backward_finalization(True)
    sharded.finalize_backward()
    sharded.set_manual_backward_finalization(False)
    square(sharded(microbatch(world, 0))).backward()
    with pytest.raises(ValueError, match="enabled must be True or False, got None"):
        sharded.set_manual_backward_finalization(None)
    with pytest.raises(ValueError, match="async_op must be True or False, got None"):
        sharded.finalize_backward(async_op=None)


@ranks(2)
def test_inside_a_backward_neither_mode_nor_step_ends(world: World) -> None:
    sharded = manual_model(world, Stack())
    texts: list[str] = []

    def try_both(grad: Tensor) -> None:
        for call in (sharded.finalize_backward, lambda: sharded.set_manual_backward_finalization(False)):
            with pytest.raises(StateError) as caught:
                call()
            texts.append(str(caught.value))

    output = sharded(microbatch(world, 0))
    output.register_hook(try_both)
    square(output).backward()
    assert "finalize_backward() was called inside" in texts[0] and "was called inside a backward" in texts[1]
    sharded.finalize_backward()


@ranks(4)
def test_hybrid_meshes_finalize_and_refuse_sums_that_are_put_off(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), mesh)
    sharded.set_manual_backward_finalization(True)
    sharded.set_requires_gradient_sync(False)
    for index in range(2):
        square(sharded(microbatch(world, index))).backward()
    sharded.set_requires_gradient_sync(True)
    sharded.set_requires_all_reduce(False)
    with pytest.raises(
        StateError, match=r"leaves the all-reduce over replicas to a later backward. Call set_requires_all_reduce"
    ):
        sharded.finalize_backward()
    sharded.set_requires_all_reduce(True)
    sharded.finalize_backward(async_op=True).wait()
    accumulated(model, 2)
    assert_same_grads(sharded, model)


@ranks(2)
def test_resharding_follows_the_setting_of_now(world: World) -> None:
    sharded = manual_model(world, Stack())
    sharded.set_reshard_after_backward(False)
    sharded.set_requires_gradient_sync(False)
    square(sharded(microbatch(world, 0))).backward()
    units = [module._fullshard_unit for module in (sharded, *sharded.blocks)]
    assert all(unit.residency.value == "full" for unit in units)
    sharded.set_requires_gradient_sync(True)
    sharded.set_reshard_after_backward(True)
    sharded.finalize_backward()
    assert all(unit.residency.value == "sharded" for unit in units)


@ranks(2)
def test_low_precision_accumulates_in_the_reduce_dtype_until_the_end(world: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh, mp_policy=policy)
    layer.set_manual_backward_finalization(True)
    layer.set_requires_gradient_sync(False)
    for value in (256.0, 1.0):
        layer(torch.full((1, 4), value)).sum().backward()
    layer.set_requires_gradient_sync(True)
    layer.finalize_backward()
    assert torch.equal(full(layer.weight.grad), torch.full((4, 4), 257.0))
