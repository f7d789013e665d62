"""SOAP, Shampoo and other optimizers of pytorch_optimizer on whole parameters, by owners: bit for bit one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

pytest.importorskip("pytorch_optimizer")

from launch import full, launch

import fullshard

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SOAP": {"lr": 3e-3, "precondition_frequency": 2},
    "ScalableShampoo": {"lr": 3e-3, "start_preconditioning_step": 1, "preconditioning_compute_steps": 1, "block_size": 16},
    "Shampoo": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
    "AdaFactor": {"lr": 1e-2},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 31), nn.Tanh(), nn.Linear(31, 24)) for _ in range(2))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((1, 2)).repeat(1, 3)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def _batch(step: int) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def _step(model: nn.Module, optimizer: Any, number: int, grads: list[Tensor] | None = None) -> list[Tensor]:
    """Train one step, with gradients of another model if there are some. Return the whole gradients."""
    (model(_batch(number)) - 1).square().mean().backward()
    if grads is not None:
        for parameter, grad in zip(model.parameters(), grads):
            parameter.grad = grad.clone()
    found = [full(parameter.grad) for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return found


def _made(name: str, *, sharded: bool) -> tuple[nn.Module, Any]:
    import pytorch_optimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    if sharded:
        for block in model.blocks:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), **OPTIMIZERS[name])
    return model, fullshard.whole_view(optimizer) if sharded else optimizer


def _same_as_one_process(rank: int, size: int, *, name: str) -> None:
    (sharded, ours), (model, theirs) = _made(name, sharded=True), _made(name, sharded=False)
    for number in range(6):
        _step(model, theirs, number, _step(sharded, ours, number))
        for (path, got), want in zip(sharded.named_parameters(), model.parameters()):
            assert torch.equal(full(got), want), f"{path} in step {number}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_one_process(name: str) -> None:
    launch(_same_as_one_process, size=3, name=name)


def _saved(rank: int, size: int, *, name: str, folder: str) -> None:
    sharded, optimizer = _made(name, sharded=True)
    for number in range(3):
        _step(sharded, optimizer, number)
    dcp.save({"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    _step(sharded, optimizer, 3)
    torch.save([full(parameter) for parameter in sharded.parameters()], f"{folder}/expected-{rank}.pt")


def _loaded(rank: int, size: int, *, name: str, folder: str) -> None:
    sharded, optimizer = _made(name, sharded=True)
    for number in range(7, 10):
        _step(sharded, optimizer, number)  # so that there are states to load into
    state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    _step(sharded, optimizer, 3)
    for got, want in zip(sharded.parameters(), torch.load(f"{folder}/expected-0.pt")):
        torch.testing.assert_close(full(got), want, rtol=1e-4, atol=1e-5)
    dist.barrier()


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_factors_of_four_ranks_load_on_three(name: str, tmp_path: Any) -> None:
    launch(_saved, size=4, name=name, folder=str(tmp_path))
    launch(_loaded, size=3, name=name, folder=str(tmp_path))


def _refused(rank: int, size: int) -> None:
    import pytorch_optimizer

    model = Net()
    fullshard.fully_shard(model)
    optimizer = fullshard.whole_view(pytorch_optimizer.Prodigy(model.parameters()))
    with pytest.raises(fullshard.StateError, match="differ between ranks after the step"):
        for number in range(8):
            _step(model, optimizer, number)
    assert fullshard.any_failed(failed=True)


def test_prodigy_which_combines_parameters_is_refused() -> None:
    launch(_refused)
