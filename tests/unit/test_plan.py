"""Edits of a plan."""

from __future__ import annotations

from torch import nn

from fullshard import Plan, PlannedUnit
from fullshard.wrap.plan import ModelSummary


def test_adding_a_unit_that_is_planned_already_takes_its_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    plan = Plan(ModelSummary.of(model), [PlannedUnit(("0",), options={"sync": "off"}), PlannedUnit(("1", "2"))])
    plan.add("0", why="by hand", reshard_after_forward=False)
    plan.add("2")
    plan.add("", buffers="mean")
    assert [(unit.name, dict(unit.options)) for unit in plan.units] == [
        ("0", {"reshard_after_forward": False}),
        ("1", {}),
        ("2", {}),
        ("(model)", {"buffers": "mean"}),
    ]
