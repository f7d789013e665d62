"""Replicas that only a hook knows: what an engine for fault tolerance needs of a sharded model."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from harness import World, ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import CheckPolicy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Parameter(torch.zeros(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.frozen


def sharded(world: World, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Net()
    for module in (*model.blocks, model):
        fullshard.fully_shard(module, mesh=world.mesh, **options)
    return model


def hooked(model: Any, hook: Any) -> None:
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(hook)


@pytest.mark.proves("45a")
@pytest.mark.parametrize("level", [fullshard.ZERO3, fullshard.ZERO2, fullshard.ZERO1])
@ranks(2)
def test_state_dict_on_another_thread_has_the_shards_and_changes_nothing(world: World, level: Any) -> None:
    """As torchft asks a replica for its weights while it trains."""
    models = [sharded(world, states=level) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    reads, over, failures = [0], threading.Event(), []

    def read() -> None:
        try:
            while not over.is_set():
                for keep in (False, True):
                    state = models[0].state_dict(keep_vars=keep)
                    assert set(state) == set(dict(models[0].named_parameters()))
                    for name, value in state.items():
                        assert isinstance(value, DTensor) and value.shape[0] == 6, name
                        assert isinstance(value, nn.Parameter) is keep, name
                reads[0] += 1
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(10):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 2 + world.rank))
        for model, optimizer in zip(models, optimizers):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    over.set()
    thread.join()
    assert not failures and reads[0] > 3, failures
    for ours, alone in zip(*(model.state_dict().values() for model in models)):
        assert torch.equal(ours.to_local(), alone.to_local())


@ranks(2)
def test_state_dict_on_another_thread_has_each_shard_under_its_name(world: World) -> None:
    """Several modules as one unit, with parameters of one name; a module under two names; a wrapper that renames."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), checkpoint_wrapper(nn.Linear(4, 3, bias=False)), nn.Tanh())
    model.again = model[0]
    fullshard.fully_shard([model[1], model[2]], mesh=world.mesh)
    fullshard.fully_shard(model, mesh=world.mesh)
    found: dict[str, Any] = {}
    reads = lambda: found.update(model.state_dict(prefix="mine."))
    for where in ("before", "unsharded"):
        if where == "unsharded":
            for module in (model, model[1]):
                module.unshard()
        thread = threading.Thread(target=reads)
        thread.start()
        thread.join()
        assert all(isinstance(value, DTensor) for value in found.values()), where
        shards = {name: (value.shape, value.to_local().clone()) for name, value in found.items()}
    expected = model.state_dict(prefix="mine.")
    assert list(shards) == list(expected) and "mine.2.weight" in shards
    for name, value in expected.items():
        assert shards[name][0] == value.shape and torch.equal(shards[name][1], value.to_local()), name


@pytest.mark.proves("45b")
@ranks(1, 2)
def test_with_a_hook_every_trainable_parameter_has_a_gradient(world: World) -> None:
    """A parameter that no rank here uses gets what the hook adds, as from a replica that uses it; without a hook it has none."""
    model = sharded(world)
    model(torch.ones(2, 6)).sum().backward()
    assert model.unused.grad is None
    model.zero_grad()
    hooked(model, lambda flat: flat.add_(1.0))
    model(torch.ones(2, 6)).sum().backward()
    assert torch.equal(model.unused.grad.full_tensor(), torch.ones(6)) and model.frozen.grad is None


@ranks(1, 2)
def test_a_hook_is_called_once_if_all_reduces_are_deferred(world: World) -> None:
    """`set_requires_all_reduce(False)` adds up what crosses replicas last: the same bits as one backward of all microbatches."""
    models, calls = [sharded(world) for _ in range(2)], [0]

    def hook(flat: Tensor) -> None:
        calls[0] += 1
        flat.mul_(2.0)

    hooked(models[0], hook)
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(world.rank))
    for at, part in enumerate(x):
        models[0].set_requires_all_reduce(at == 1)
        for model in models:
            model(part).square().sum().backward()
    assert calls[0] == 4  # units, and not twice as many
    for ours, alone in zip(models[0].parameters(), models[1].parameters()):
        if alone.grad is not None:
            torch.testing.assert_close(ours.grad.to_local(), alone.grad.to_local() * 2.0)


@pytest.mark.proves("45c")
@ranks(2)
def test_a_hook_that_waits_for_a_replica_is_not_late(world: World) -> None:
    """The timeout of a step is for ranks of this log: neither a rank in its hook nor one that waits for it raises."""
    model = sharded(world, check_policy=CheckPolicy(timeout=1.0))
    late = [3.0 if world.rank == 0 else 0.0]

    def hook(flat: Tensor) -> None:
        time.sleep(late[0])
        late[0] = 0.0

    model(torch.ones(2, 6)).sum().backward()
    once = model.blocks[0].weight.grad.to_local().clone()
    hooked(model, hook)
    began = time.monotonic()
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    assert time.monotonic() - began > 2.0
    torch.testing.assert_close(model.blocks[0].weight.grad.to_local(), 3 * once)
