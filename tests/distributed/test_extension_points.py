"""Extension points: features beside the engine attach to each unit."""

from __future__ import annotations

import pytest
import torch
from harness import World, ranks
from models import Stack, batch, shard_stack, square
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.core import Unit, unit_of


@ranks(2)
def test_checks_before_the_first_forward_run_once_in_order_and_again_if_they_raise_or_are_too_early(world: World) -> None:
    ran: list[str] = []

    def early(unit: Unit, module: nn.Module) -> bool:
        assert unit_of(module) is unit
        ran.append("early")
        return not torch.is_grad_enabled()

    def failing(unit: Unit, module: nn.Module) -> None:
        ran.append("failing")
        if ran.count("failing") == 1:
            raise ValueError("once")

    def local(unit: Unit, module: nn.Module) -> None:
        ran.append("local")

    model = shard_stack(Stack(), world.mesh)
    unit = unit_of(model.blocks[1])
    assert unit is not None
    for check in (early, failing, failing):
        unit.before_first_use(check)
    unit.before_first_use(local, first=True)
    with torch.no_grad():
        with pytest.raises(ValueError, match="once"):
            model(batch(0))
        assert ran == ["local", "early", "failing"]
        model(batch(0))
    assert ran[3:] == ["early", "failing"]
    for _ in range(2):
        square(model(batch(0))).backward()
    assert ran[5:] == ["early"]


@ranks(2)
def test_a_check_that_waits_for_a_graph_runs_in_a_recomputation_and_in_each_module_of_a_list(world: World) -> None:
    """The forward of a reentrant checkpoint has no graph, and that of a list may begin without one."""
    grads: list[bool] = []

    def check(unit: Unit, module: nn.Module) -> bool:
        grads.append(torch.is_grad_enabled())
        return not grads[-1]

    inner = nn.Linear(4, 4)
    fully_shard(inner, mesh=world.mesh)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), inner), mesh=world.mesh)
    unit = unit_of(inner)
    assert unit is not None
    unit.before_first_use(check)
    x = torch.ones(2, 4, requires_grad=True)
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=True)  # type: ignore[method-assign]
    model(x).sum().backward()
    assert grads == [False, True]

    grads.clear()
    parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    fully_shard(list(parts), mesh=world.mesh)
    unit = unit_of(parts[0])
    assert unit is not None
    unit.before_first_use(check)
    with torch.no_grad():
        x = parts[0](x)
    parts[1](x).sum().backward()
    assert grads == [False, True]
