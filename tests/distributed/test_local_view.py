"""`local_view`: optimizers of other libraries step over local shards, and nothing outside of `step()` shows it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, assert_same_parameters, batch, full, shard_stack, share_grads, square
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fullshard


class Lion(optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), as other libraries write it: one parameter after the other."""

    seen: list[type]

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})
        self.seen, self.fails = [], False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.seen.append(type(parameter))
                state = self.state[parameter]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(parameter)
                state["step"] += 1
                momentum, (one, two) = state["momentum"], group["betas"]
                parameter.add_((momentum * one + parameter.grad * (1 - one)).sign_(), alpha=-group["lr"])
                state["momentum"] = momentum * two + parameter.grad * (1 - two)  # another tensor each time
                if self.fails:
                    raise RuntimeError("out of luck")
        return loss


def trained(world: World, made: Callable[[Any], optim.Optimizer], steps: int = 3) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(3)
    model = shard_stack(Stack(), world.mesh)
    optimizer = made(model.parameters())
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        square(model(world.mine(batch(step)))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer


def assert_outside(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Nothing shows of what `step()` computes with."""
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    for parameter, held in optimizer.state.items():
        assert type(held["momentum"]) is DTensor and held["momentum"].placements == parameter.placements
        assert held["momentum"].shape == parameter.shape and type(held["step"]) is Tensor


@ranks(1, 2, 3)
def test_a_foreign_optimizer_gives_bit_for_bit_what_dtensors_give(world: World) -> None:
    dtensors, slow = trained(world, Lion)
    local, fast = trained(world, lambda params: fullshard.local_view(Lion(params)))
    assert set(fast.seen) == {nn.Parameter} and nn.Parameter not in set(slow.seen)
    for one, other in zip(dtensors.parameters(), local.parameters()):
        assert torch.equal(full(one), full(other))
    for one, other in zip(slow.state_dict()["state"].values(), fast.state_dict()["state"].values()):
        assert torch.equal(full(one["momentum"]), full(other["momentum"])) and one["step"] == other["step"]
    assert_outside(local, fast)


@pytest.mark.parametrize("view", [fullshard.local_view, fullshard.whole_view])
@ranks(2)
def test_parameters_have_their_attributes_inside_a_step(world: World, view: Callable[[Any], Any]) -> None:
    """The parameters inside of a view had none, so an optimizer took defaults, silently."""

    class Tagged(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(getattr(parameter, "rate", 0.0))

    model = nn.Linear(6, 8, bias=False)
    model.weight.rate = 0.25  # type: ignore[assignment]
    fullshard.fully_shard(model, mesh=world.mesh)
    optimizer, before = view(Tagged(model.parameters(), {})), full(model.weight).detach()
    for rate in (0.25, 0.5):  # also one that is set between steps
        model.weight.rate = rate  # type: ignore[assignment]
        square(model(torch.ones(2, 6))).backward()
        optimizer.step()
        before = before - rate
        assert torch.equal(full(model.weight), before)


@ranks(2)
def test_closures_hooks_and_new_groups_see_sharded_parameters(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    reference = copy.deepcopy(Stack())
    reference.load_state_dict({name: full(p.detach()) for name, p in model.named_parameters()})
    optimizer = fullshard.local_view(Lion(list(model.parameters())[:-1]))
    optimizer.add_param_group({"params": list(model.parameters())[-1:]})
    plain = Lion(reference.parameters())
    seen: list[bool] = []

    def is_outside(*args: Any) -> None:
        seen.append(all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]))

    optimizer.register_step_pre_hook(is_outside)
    optimizer.register_step_post_hook(is_outside)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            is_outside()
            optimizer.zero_grad()
            loss = square(model(world.mine(batch(step))))
            loss.backward()
            return loss

        loss = optimizer.step(closure) if step else optimizer.step(closure=closure)
        assert loss.requires_grad
        plain.zero_grad()
        square(reference(batch(step))).backward()
        assert_same_grads(model, reference)
        share_grads(model, reference)
        plain.step()
    assert seen == [True] * 9
    assert_same_parameters(model, reference)
    assert_outside(model, optimizer)


class BySize(Lion):
    """Another step for parameters of many elements."""

    least = 32

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() >= self.least:
                    parameter.grad.mul_(-1.0)
        return super().step(closure)


@ranks(2)
def test_an_optimizer_that_chooses_by_size_is_told_once(world: World) -> None:
    """It chose by the size of the shard, silently."""
    for least in (1, 32):  # 48 elements, 24 on each rank
        model = fullshard.fully_shard(nn.Linear(8, 6, bias=False), mesh=world.mesh)
        optimizer = BySize(model.parameters())
        optimizer.least = least
        fullshard.local_view(optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                model.weight.grad = torch.ones_like(model.weight.detach())
                before = full(model.weight).detach()
                optimizer.step()
        assert ["by shape or size" in str(one.message) for one in told] == ([True] if least == 32 else [])
        assert optimizer.steps == 2 and [state["step"] for state in optimizer.state.values()] == [2.0], "the trial is undone"
        torch.testing.assert_close(full(model.weight).detach() - before, torch.full((6, 8), 0.01 if least == 1 else -0.01))


class WithScales(Lion):
    """One scale for each row, as optimizers with states of 8 bits have, and a table that is equal on all ranks."""

    has_scales = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["table"] = torch.arange(3.0)
            if self.has_scales:
                self.state[parameter]["scale"] = parameter.abs().amax(1)
        return super().step(closure)


@pytest.mark.proves("44m")
@ranks(2)
def test_states_of_one_rank_are_told_by_state_dict(world: World) -> None:
    """They were saved as replicas, so all ranks loaded the scales of one."""
    model = nn.Linear(3, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(4, 3))
    fullshard.fully_shard(model, mesh=world.mesh)
    optimizer = fullshard.local_view(WithScales(model.parameters()))
    square(model(torch.ones(1, 3))).backward()
    optimizer.step()
    assert torch.equal(get_optimizer_state_dict(model, optimizer)["state"]["weight"]["table"], torch.arange(3.0))
    optimizer.has_scales = True
    optimizer.step()
    with pytest.raises(fullshard.StateError, match="'scale' of parameter 'weight' differs between rank 0 and rank 1"):
        get_optimizer_state_dict(model, optimizer)


@ranks(2)
def test_a_step_that_raises_leaves_sharded_parameters_and_states(world: World) -> None:
    model, optimizer = trained(world, lambda params: fullshard.local_view(Lion(params)), steps=1)
    square(model(world.mine(batch(1)))).backward()
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step()
    assert_outside(model, optimizer)

    def broken() -> None:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(broken)
    assert_outside(model, optimizer)
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    optimizer.fails = False
    optimizer.step()
    assert_outside(model, optimizer)


@ranks(2)
def test_checkpoints_load_with_and_without_it(world: World) -> None:
    model, optimizer = trained(world, lambda params: fullshard.local_view(Lion(params)), steps=2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    for made in (Lion, lambda params: fullshard.local_view(Lion(params))):
        fresh = shard_stack(Stack(), world.mesh)
        fresh.load_state_dict(weights)
        other = made(fresh.parameters())
        set_optimizer_state_dict(fresh, other, copy.deepcopy(saved))
        square(fresh(world.mine(batch(2)))).backward()
        other.step()
        results.append(fresh)
    for one, two in zip(*(m.parameters() for m in results)):
        assert torch.equal(full(one), full(two))


@ranks(2)
def test_what_it_cannot_take_is_named(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    with pytest.raises(ValueError, match=r"local_view takes a torch.optim.Optimizer, got list"):
        fullshard.local_view(list(model.parameters()))  # type: ignore[type-var]
    known = optim.AdamW(model.parameters())
    assert fullshard.local_view(known) is known and "step" not in known.__dict__
    scheduled = Lion(model.parameters())
    optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    with pytest.raises(
        ValueError, match="local_view cannot wrap the step of this Lion, which was replaced, for example by a scheduler"
    ):
        fullshard.local_view(scheduled)
    optimizer = fullshard.local_view(Lion(model.parameters()))
    assert fullshard.local_view(optimizer) is optimizer
    square(model(world.mine(batch(0)))).backward()
    first = next(model.parameters())
    optimizer.state[first] = {"step": torch.tensor(0.0), "momentum": full(first.detach()).clone()}
    optimizer.state[first]["momentum"] = torch.distributed.tensor.distribute_tensor(
        optimizer.state[first]["momentum"], first.device_mesh, [torch.distributed.tensor.Replicate()]
    )
    before = first.detach().to_local().clone()
    with pytest.raises(
        fullshard.StateError, match="The state 'momentum' of parameter 'inp.weight' is a DTensor on .* expected"
    ):
        optimizer.step()
    assert torch.equal(first.detach().to_local(), before)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
