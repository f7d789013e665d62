"""Sharded against plain: says that nothing differs, or what differs first."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

import expecttest
import pytest
import torch
from exits import command_line
from harness import World, ranks
from models import batch
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard, verify


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


class Wordy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> str:  # type: ignore[override]
        return "nothing"


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


class Forgetful(nn.Module):
    """A model that computes with a copy of its weight from when it was built: plain and sharded train different things."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.5 if hasattr(self.second, "unshard") and self.calls else 1.0
        self.calls += 1
        return self.second(self.first(x)) * scale


def shard_both(model: Forgetful) -> None:
    for module in (model.first, model.second, model):
        fully_shard(module)


@ranks(1, 2, 3)
def test_a_right_model_is_the_same(world: World) -> None:
    verdict = verify(build, batch(0), 3, shard=lambda model: fullshard.shard_model(model))
    assert verdict
    Texts().assertExpectedInline(
        str(verdict).replace(f"{world.size} rank", "N rank"),
        """same: losses, gradients and weights of 4 parameters over 3 steps on N ranks""",
    )


@ranks(2)
def test_the_first_difference_is_named_with_its_step(world: World) -> None:
    verdict = verify(Forgetful, batch(0), 3, shard=shard_both)
    assert not verdict and verdict.first is not None
    assert (verdict.first.step, verdict.first.what) == (1, "loss")
    biased = verify(lambda: nn.Linear(5, 3), batch(0), 2, shard=_twice_the_gradient)
    assert biased.first is not None
    Texts().assertExpectedInline(
        str(biased).split(" differs by")[0], """DIFFERS on 2 ranks. step 0: the gradient of 'weight'"""
    )


def _twice_the_gradient(model: nn.Module) -> None:
    fully_shard(model)
    model.weight.register_hook(lambda grad: grad * 2)


def test_it_starts_processes_of_its_own() -> None:
    assert verify(build, {"input": torch.ones(4, 5)}, ranks=2)
    with pytest.raises(RuntimeError, match=r"raised on some ranks:(.|\n)*found no loss in a str"):
        verify(Wordy, torch.ones(2, 3), ranks=1)


def test_the_command_says_so_and_exits_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch, fullshard\n"
        "def build(): return torch.nn.Linear(4, 2)\n"
        "def right(): return build, torch.ones(3, 4)\n"
        "def shard(model):\n"
        "    fullshard.fully_shard(model)\n"
        "    model.weight.register_hook(lambda grad: grad * 2)\n"
        "def wrong(): return {'build': build, 'batch': torch.ones(3, 4), 'shard': shard}\n"
    )
    for name, code, said in (("right", 0, "same: losses"), ("wrong", 1, "gradient of 'weight' differs by")):
        done = command_line("verify", f"mine:{name}", cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert said in done.stdout


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(x + y)


def test_a_named_tuple_is_a_batch() -> None:
    assert verify(OfPair, Pair(torch.ones(2, 2), torch.ones(2, 2)), 2)


def test_a_process_that_dies_is_told() -> None:
    def build() -> nn.Module:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return OfPair()

    with pytest.raises(RuntimeError, match="process 1 terminated with signal SIGKILL"):
        verify(build, Pair(torch.ones(2, 2), torch.ones(2, 2)), 2)


def test_a_long_error_of_one_rank_reaches_the_caller() -> None:
    """Its process waited for its pipe to be read, the others for it, and the caller for the first of the others."""

    def build() -> nn.Module:
        if torch.distributed.get_rank() == 1:
            raise ValueError("long" * 100_000)
        return OfPair()

    with pytest.raises(RuntimeError, match="longlong"):
        verify(build, Pair(torch.ones(2, 2), torch.ones(2, 2)), 2)
