"""Random programs with captures and replays at random steps, late streams: each sees and trains what its eager run does, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import simulated
import torch
from harness import World, pool
from hypothesis import given
from hypothesis import strategies as st
from programs import PROGRAMS, Place, Program, Training, legal, limits
from rotation import random_cases
from test_on_device import LATE, late
from test_programs import on_device
from torch import Tensor

import fullshard

pytestmark = pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS)

FIRST = "e"  # an optimizer creates its states in an eager step


def capturable(program: Program, turns: list[str]) -> tuple[Program, str]:
    """A program without what a graph cannot hold, and for each of its steps: e(ager), c(aptured and replayed) or r(eplayed)."""
    change: dict[str, Any] = {"offload": "none", "memory": False, "by_hand": False, "steps": 1 + len(turns)}
    if program.optimizer in ("muon", "whole", "stream"):
        change["optimizer"] = "end"
    return legal(replace(program, **change)), FIRST + "".join(turns)


CAPTURED = st.builds(capturable, PROGRAMS, st.lists(st.sampled_from("ecrr"), min_size=2, max_size=5))


class Capturing(Training):
    """Trains by these turns. The first replay of all captures, and one behind a write that moves memory captures again."""

    def __init__(self, program: Program, place: Place, turns: str) -> None:
        self.turns, self.graph = turns, None
        self.slots: list[Tensor] | None = None  # while a step is captured: its inputs, from the step's first one on
        super().__init__(program, place)

    def adamw(self, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01, device="sim"), capturable=True, foreach=True)

    def batch(self, step: int) -> Tensor:
        return super().batch(step) if self.slots is None else self.slots[step - self.begins]

    def train(self, step: int) -> None:
        turn = self.turns[step]
        if turn == "e":
            super().train(step)
            return
        now = [super(Capturing, self).batch(step + micro) for micro in range(self.program.microbatches)]
        if turn == "c" or self.graph is None or self.program.write:
            self.static, self.begins, self.graph = [x.clone() for x in now], step, fullshard.Graph()
            known, self.slots = len(self.seen), self.static
            with self.graph.capture():
                super().train(step)
            self.slots, self.told = None, self.seen[known:]
            del self.seen[known:]
        for static, x in zip(self.static, now):
            static.copy_(x)
        self.graph.replay()
        self.seen += [value.clone() for value in self.told]


def results(program: Program, place: Place, turns: str) -> dict[str, Tensor]:
    with limits(128 if program.small else None):
        training = Capturing(program, place, turns)
        training.run()
    values = {f"seen {index}": value.cpu() for index, value in enumerate(training.seen)}
    return values | {name: parameter.to_local().detach().cpu() for name, parameter in training.model.named_parameters()}


def drive(world: World, case: tuple[Program, str], how: str) -> None:
    program, turns = case
    if world.size == 1:  # which has no smaller group, and no rows that are half as many as ranks
        program = replace(program, small=False, reshard=None if program.reshard == 2 else program.reshard)
    expected = results(program, on_device(world), len(turns) * "e")
    with late(world, how):
        found = results(program, on_device(world), turns)
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, (different, turns, how, str(program))


drive.body = drive  # type: ignore[attr-defined]  # as harness.ranks does


@pytest.mark.processes
@pytest.mark.rotates(3)
@pytest.mark.parametrize(("size", "count"), [(1, 60), (2, 300), (4, 140)])
def test_random_programs_with_captures_train_as_their_eager_runs(size: int, count: int) -> None:
    @random_cases(count)
    @given(CAPTURED, st.sampled_from(LATE))
    def run(case: tuple[Program, str], how: str) -> None:
        pool(size, "sim").run(__name__, "drive", {"case": case, "how": how}, 60.0)

    run()
