"""Edits of a plan."""

from __future__ import annotations

import torch
import torch.distributed.fsdp
from torch import Tensor, nn

from fullshard import MixedPrecisionPolicy, Plan, PlannedUnit
from fullshard.wrap.auto_policy import AutoPolicy
from fullshard.wrap.plan import ModelSummary
from fullshard.wrap.whole_model import plan_model


def test_adding_a_unit_that_is_planned_already_takes_its_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    plan = Plan(ModelSummary.of(model), [PlannedUnit(("0",), options={"sync": "off"}), PlannedUnit(("1", "2"))])
    plan.add("0", why="by hand", reshard_after_forward=False)
    plan.add("2")
    plan.add("", sync="off")
    assert [(unit.name, dict(unit.options)) for unit in plan.units] == [
        ("0", {"reshard_after_forward": False}),
        ("1", {}),
        ("2", {}),
        ("(model)", {"sync": "off"}),
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Levels(nn.Module):
    """An encoder as of VQGAN: each level is an nn.Module without a forward that holds lists."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        for _ in range(2):
            level = nn.Module()
            level.block = nn.ModuleList([Block(), Block()])
            self.down.append(level)

    def forward(self, x: Tensor) -> Tensor:
        for level in self.down:
            for block in level.block:
                x = block(x)
        return x


def test_a_module_without_a_forward_is_no_block() -> None:
    """It was chosen, and refused as a unit that the user had not named."""
    plan = plan_model(Levels(), AutoPolicy(tiny=0))
    assert [unit.name for unit in plan.units] == [*(f"down.{i}.block.{j}" for i in (0, 1) for j in (0, 1)), "(model)"]


def test_messages_take_the_policy_of_torch() -> None:
    plan = plan_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    ours, theirs = (
        kind(param_dtype=torch.bfloat16) for kind in (MixedPrecisionPolicy, torch.distributed.fsdp.MixedPrecisionPolicy)
    )
    assert list(plan.messages(2, mp_policy=theirs)) == list(plan.messages(2, mp_policy=ours))
    plan.set("", mp_policy=theirs)
    assert list(plan.messages(2)) == list(plan.messages(2, mp_policy=ours))


def test_a_printed_plan_remarks_on_a_root_with_most_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2000, 1000), nn.Linear(1000, 10))
    small = plan_model(model, policy=lambda module, recurse, nonwrapped_numel: recurse or module is model[1])
    large = plan_model(model, policy=lambda module, recurse, nonwrapped_numel: recurse or module is model[0])
    assert "Unit '(model)' stays unsharded" in str(small) and "100% of the parameters" in str(small)
    assert "stays unsharded" not in str(large)
