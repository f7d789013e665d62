"""Backwards of unusual kinds: hidden outputs, gradients of gradients, gradients as values, transforms."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import expecttest
import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, full, shard_stack, square
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard
from fullshard import ZERO2, ZERO3, MixedPrecisionPolicy, StateError, fully_shard


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


def text_of(fn: Callable[[], Any], error: type[Exception] = StateError) -> str:
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


@ranks(2)
def test_gradients_as_values_count_gathered_parameters_and_run_no_hooks(world: World) -> None:
    """A penalty on gathered parameters was lost, one on the sharded parameter too, and optimizers in backward stepped."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x = copy.deepcopy(plain), torch.randn(4, 4)
    before = list(model.parameters())
    fully_shard(model[0], mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)

    def penalty(weight: Tensor) -> Tensor:
        return 0.1 * weight.square().sum()

    loss = square(model(x))
    with fullshard.gathered(model[0]) as tensors:
        loss = loss + penalty(tensors["weight"])
    found = fullshard.grad(loss, [before[0], model[2].bias])
    expected = torch.autograd.grad(square(plain(x)) + penalty(plain[0].weight), [plain[0].weight, plain[2].bias])
    for one, other in zip(found, expected):
        assert_near(one.full_tensor(), other, "gradient")
    with pytest.raises(StateError, match="the outputs also depend on the sharded parameter 'weight' itself"):
        fullshard.grad(square(model(x)) + penalty(model[0].weight).full_tensor(), [model[0].weight])
    called: list[nn.Parameter] = []
    model[0].weight.register_post_accumulate_grad_hook(called.append)
    fullshard.grad(square(model(x)), [model[0].weight])
    assert not called
    square(model(x)).backward()
    assert called == [model[0].weight]
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="parameter 'bias' does not require grad"):
        fullshard.grad(square(model(x)), [model[0].bias, model[0].weight])


class Cache:
    """An output of a class that is no pytree. `looked` has the names of the attributes that something read."""

    looked: ClassVar[list[str]] = []

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.dataset = [{"rows": list(range(1000))}]

    def __getattribute__(self, name: str) -> Any:
        Cache.looked.append(name)
        return super().__getattribute__(name)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Cache:
        return Cache(torch.tanh(self.linear(x)))


@pytest.mark.proves("17a")
@ranks(1, 2)
def test_outputs_that_are_no_pytrees_are_not_searched_and_their_backward_raises_in_torch(world: World) -> None:
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Caching(), mesh=world.mesh, reshard_after_forward=True, mp_policy=mp)
    x = world.mine(batch(0)).requires_grad_()
    Cache.looked.clear()
    output = model(x)
    assert not {"hidden", "dataset", "__dict__"} & set(Cache.looked)
    with pytest.raises(RuntimeError, match="storage of size 0"):
        square(output.hidden).backward()


@ranks(1, 2)
def test_a_parameter_that_a_kept_unit_returns_gets_its_gradient(world: World) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.unused = nn.Parameter(torch.arange(8.0).view(4, 2)), nn.Parameter(torch.ones(3))

        def forward(self) -> dict[str, Tensor]:
            return {"all": self.weight}

    plain = Table()
    model = fully_shard(copy.deepcopy(plain), mesh=world.mesh)
    for m in (model, plain):
        m()["all"].square().sum().backward()
    assert_same_grads(model, plain)
    assert model.unused.grad is None


class Smooth(nn.Module):
    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(3))
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.linear else torch.tanh(layer(x))
        return x


@pytest.mark.proves("33a")
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("reshard", [True, False, None])
@ranks(1, 2)
def test_gradient_penalties(world: World, reshard: bool | None, linear: bool) -> None:
    """A gradient of a gradient needs the weights once more, after the first backward freed them: elsewhere it dies of a
    storage of size 0, and of a linear model no hook would have reduced what arrives."""
    model = Smooth(linear)
    sharded = copy.deepcopy(model)
    for module in (*sharded.layers, sharded):
        fully_shard(module, mesh=world.mesh, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(3):
        for m, part in ((sharded, world.mine), (model, lambda x: x)):
            x = part(batch(step)).requires_grad_()
            loss = square(m(x))
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            scale = world.size**2 if m is model else 1  # of the mean over fewer rows
            (loss + scale * slope.square().sum() * (1 if m is sharded else 1 / world.size)).backward()
        assert_same_grads(sharded, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for module in (*sharded.layers, sharded):
        assert module._fullshard_unit.residency.value == "sharded", "the second backward freed them"


def kinds(messages: list[fullshard.Message]) -> Counter[str]:
    return Counter(message.kind for message in messages)


@pytest.mark.proves("33a")
@pytest.mark.parametrize("how", ["grad", "backward", "create_graph"])
@ranks(2)
def test_a_backward_that_reaches_inputs_only_sends_no_reduction_and_ends_no_step(world: World, how: str) -> None:
    """Forces are gradients of an energy by positions. FSDP2 reduces nothing there either."""
    model = Smooth(linear=False)
    sharded, theirs = copy.deepcopy(model), copy.deepcopy(model)
    for module in (*sharded.layers, sharded):
        fully_shard(module, mesh=world.mesh)
    for module in (*theirs.layers, theirs):
        torch_fully_shard(module, mesh=world.mesh)
    for step in range(2):
        with sharded.accumulate():
            square(sharded(world.mine(batch(step)))).backward()
        x = world.mine(batch(step + 5)).requires_grad_()
        energy = square(sharded(x))
        with fullshard.counting(sharded) as messages:
            if how == "backward":
                energy.backward(inputs=[x], retain_graph=True)
                forces = x.grad
            else:
                (forces,) = torch.autograd.grad(energy, x, retain_graph=True, create_graph=how == "create_graph")
        assert set(kinds(messages)) <= {"all_gather"}, "no reduction, and no heartbeat"
        with mock.patch.object(torch.distributed, "reduce_scatter_tensor") as reduced:
            torch.autograd.grad(square(theirs(x)), x)
        assert not reduced.called
        (expected,) = torch.autograd.grad(square(model(x)), x)
        assert_near(forces.detach(), expected, "forces")
        assert all(parameter.grad is None for parameter in sharded.parameters()), "the step has not ended"
        with fullshard.counting(sharded) as messages:  # another backward through the same graph, which ends it
            energy.backward()
        assert kinds(messages)["reduce_scatter"] == len(sharded.layers)
        square(model(batch(step))).backward()
        square(model(batch(step + 5))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_a_backward_with_inputs_that_include_a_parameter_reduces_the_units_from_there_on(world: World) -> None:
    """The parameter belongs to a unit that stays unsharded, in the middle of the model."""
    model = Smooth(linear=False)
    sharded = copy.deepcopy(model)
    for module in (*sharded.layers, sharded):
        fully_shard(module, mesh=world.mesh)
    for retained in (False, True):
        middle = sharded.layers[1]
        with middle.resident():
            loss = square(sharded(world.mine(batch(0))))
            loss.backward(inputs=[middle.weight], retain_graph=retained)
            if retained:
                loss.backward()
        expected = square(model(batch(0)))
        expected.backward(inputs=[model.layers[1].weight], retain_graph=retained)
        if retained:
            expected.backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_a_rank_that_reduces_where_the_other_one_differentiates_inputs_only_diverges(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    x = world.mine(batch(0)).requires_grad_()
    loss = square(sharded(x))
    failure = None
    try:
        torch.autograd.grad(loss, x) if world.rank else loss.backward()
        square(sharded(x)).backward()
    except StateError as caught:
        failure = caught
    assert "backward of inputs only" in str(failure)


@ranks(2)
def test_a_unit_of_which_one_rank_uses_no_parameter_is_reduced_on_both(world: World) -> None:
    """A backward without inputs is told from one that reaches inputs only, although no parameter gets a gradient here."""

    class Gate(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if world.rank else x * 2

    model = fully_shard(Gate(7, 7), mesh=world.mesh)
    x = batch(0, 7).requires_grad_()
    square(model(x)).backward()
    assert model.weight.grad is not None and model.weight.grad.full_tensor().abs().sum() > 0


@pytest.mark.proves("33a")
@ranks(1, 2)
def test_gradients_of_sharded_parameters_as_values(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    before = sharded.head.weight.grad
    x = world.mine(batch(1)).requires_grad_()
    loss = square(sharded(x))
    expected = torch.autograd.grad(square(model(batch(1))), [model.head.weight, model.blocks[1].up.bias])
    found = fullshard.grad(loss, [sharded.head.weight, sharded.blocks[1].up.bias, x])
    for got, want in zip(found, expected):
        assert_near(got, want, "gradient")
    assert found[2].shape == x.shape and x.grad is None
    assert sharded.head.weight.grad is before
    frozen = fully_shard(nn.Linear(5, 5), mesh=world.mesh)
    loss = square(sharded(x))
    Texts().assertExpectedInline(
        text_of(lambda: fullshard.grad(loss, [frozen.weight])),
        """grad(): parameter 'weight' was never unsharded, so it is in no graph. Run a forward first.""",
    )
    square(frozen(x)).backward()
    Texts().assertExpectedInline(
        text_of(lambda: fullshard.grad(loss, [frozen.weight, sharded.head.weight])),
        """grad(): parameter 'weight' was not used by any rank. Pass allow_unused=True to get None for it.""",
    )


@pytest.mark.proves("33a")
@ranks(1)
def test_torch_func_writes_nothing(world: World) -> None:
    """functional_call put tensors into the slots, which a unit took for assigned parameters: the weights were gone."""
    model = fully_shard(nn.Linear(3, 3), mesh=world.mesh)
    x = torch.randn(2, 3)
    with pytest.raises(NotImplementedError, match="storage of TensorWrapper"):  # torch's, in the all-gather
        torch.func.grad(lambda x: model(x).sum())(x)
    before = model(x).detach()
    assert torch.equal(torch.func.vmap(model)(x), before)
    plain = {name: parameter.full_tensor().detach() * 0 for name, parameter in model.named_parameters()}
    Texts().assertExpectedInline(
        text_of(lambda: torch.func.functional_call(model, plain, (x,))),
        """Expected parameter 'weight' of unit 'Linear' as fully_shard() registered it, got another Tensor: a unit computes with its own shards only. Write values in `with fullshard.full_params(module):` or by load_state_dict(), and assign, remove or parametrize parameters before fully_shard(). Instead of torch.func.functional_call, use undo() on a copy of the model, or compute with the tensors of fullshard.gathered().""",
    )
    learned = {name: nn.Parameter(value) for name, value in plain.items()}
    text_of(lambda: torch.func.functional_call(model, learned, (x,)))
    assert torch.equal(model(x), before)
    square(model(x)).backward()
    assert model.weight.grad is not None


@ranks(1, 2)
def test_torch_differentiates_by_inputs_and_by_sharded_parameters_themselves(world: World) -> None:
    sharded = shard_stack(Stack(1), world.mesh)
    parameters = list(sharded.parameters())
    x = world.mine(batch(0)).requires_grad_()
    loss = square(sharded(x))
    penalty = sum(p.square().sum() for p in parameters).full_tensor()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, parameters, retain_graph=True)
    slopes = torch.autograd.grad(penalty, parameters)
    assert all(torch.equal(full(slope), 2 * full(p)) for slope, p in zip(slopes, parameters))
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert torch.equal(slope, x.grad)
    loss.backward()
    assert all(p.grad is not None for p in parameters)


@pytest.mark.parametrize("options", ["ZERO3", "ZERO2", "kept", "freed"])
@ranks(1, 2)
def test_a_loss_of_tangents_trains_all_parameters(world: World, options: str) -> None:
    """Forward-mode derivatives with respect to inputs, as a PINN has. Their graph does not contain the output's own node."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)).double()
    model = copy.deepcopy(plain)
    kwargs: dict[str, Any] = {
        "ZERO3": {"states": ZERO3},
        "ZERO2": {"states": ZERO2},
        "kept": {"reshard_after_forward": False},
        "freed": {"reshard_after_forward": True},
    }[options]
    for module in (model[1], model):
        fully_shard(module, mesh=world.mesh, **kwargs)
    pairs = [(model, world.mine), (plain, lambda x: x)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m, _ in pairs]
    for step in range(3):
        x = batch(step).double()
        for m, part in pairs:
            mine = part(x)
            with forward_ad.dual_level():
                output, tangent = forward_ad.unpack_dual(m(forward_ad.make_dual(mine, torch.ones_like(mine))))
            loss = square(tangent) if step else square(tangent) + square(output)
            loss.backward()
        assert_same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_weights_that_numpy_uses_are_named(world: World) -> None:
    """numpy keeps the memory at its size, so it cannot be freed; the next step starts with new memory."""
    plain = nn.Sequential(nn.Sequential(nn.Linear(5, 4)), nn.Linear(4, 3))
    model = copy.deepcopy(plain)
    for module in (model[0], model):
        fully_shard(module, mesh=world.mesh)
    told: list[float] = []
    handle = model[0][0].register_forward_hook(lambda module, *_: told.append(module.weight.detach().numpy().mean()))
    with pytest.raises(StateError, match=r"\['0\.weight', '0\.bias'\] of unit '0' cannot be freed: .*clone\(\)\.numpy\(\)"):
        model(world.mine(batch(0)))
    handle.remove()
    square(model(world.mine(batch(0)))).backward()
    square(plain(batch(0))).backward()
    assert_same_grads(model, plain)
