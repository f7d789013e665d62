"""Methods beside forward, and parameters used outside of both."""

from __future__ import annotations

import copy

import pytest
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, shard_stack, square
from torch import Tensor

import fullshard
from fullshard import register_fsdp_forward_method
from fullshard.core.units import units_of


class Breaks(Stack):
    def breaks(self) -> Tensor:
        raise RuntimeError(f"out of luck with {self.head.weight.sum().item():.0f}")


@ranks(1, 2)
def test_a_method_that_raises_leaves_all_units_sharded(world: World) -> None:
    model = Breaks()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    register_fsdp_forward_method(sharded, "breaks")
    with pytest.raises(RuntimeError, match="out of luck"):
        sharded.breaks()
    assert all(unit.residency.value == "sharded" for unit in units_of(sharded, recurse=True))
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_walking_over_parameters_in_a_method_gathers_nothing(world: World) -> None:
    class Counts(Stack):
        def count(self) -> int:
            return sum(parameter.numel() for parameter in self.parameters())

    model = shard_stack(Counts(), world.mesh)
    register_fsdp_forward_method(model, "count")
    with fullshard.counting(model) as messages:
        assert model.count() == sum(p.numel() for p in Counts().parameters())
    assert [one.kind for one in messages] == ["talk", "all_gather"], "a comparison of the model, and the root's own"


@ranks(2)
def test_a_forward_without_output_inside_of_an_exception_handler_has_not_failed(world: World) -> None:
    """The exception that the caller handles was told to the other ranks as one of the forward."""

    class Keeps(Stack):
        def forward(self, x: Tensor) -> None:
            self.output = super().forward(x)

    model = Stack()
    sharded = Keeps()
    sharded.load_state_dict(model.state_dict())
    shard_stack(sharded, world.mesh)
    try:
        raise ValueError("before")
    except ValueError:
        sharded(world.mine(batch(0)))
    assert sharded._fullshard_unit.groups[0].fingerprints.log.exception_note is None
    assert_near(sharded.output, world.mine(model(batch(0))), "output")
