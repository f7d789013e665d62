"""Ranks that run different things: an error on every rank that names both, instead of wrong numbers or a hang."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
from harness import World, ranks
from models import batch, square
from torch import Tensor, nn

import fullshard
from fullshard import CheckPolicy, StateError, fully_shard

EAGER = CheckPolicy(patience=0.2)


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


def raised(fn: Callable[[], Any], limit: float = 10.0) -> str:
    """The text of the StateError that `fn` raises, soon."""
    begin = time.monotonic()
    with pytest.raises(StateError) as caught:
        fn()
    assert time.monotonic() - begin < limit
    return str(caught.value)


class Siblings(nn.Module):
    """Two towers of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, which)(x)


@ranks(2, 3)
def test_ranks_that_run_different_units_of_equal_shape_are_told_both_names(world: World) -> None:
    """Elsewhere each rank received the other unit's weights: wrong outputs, no error."""
    model = Siblings()
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=world.mesh, check_policy=EAGER)
    square(model(world.mine(batch(0)), "left")).backward()
    text = raised(lambda: square(model(world.mine(batch(0)), "left" if world.rank else "right")).backward())
    others = "rank 1" if world.size == 2 else "ranks 1 and 2"
    Texts().assertExpectedInline(
        re.sub("call [0-9]+", "call N", re.sub("(forward|backward) gather", "gather", text)).replace(others, "the others"),
        """the ranks parted at call N. rank 0: 'right' gather; the others: 'left' gather. All ranks must run the same units in the same order: have a rank that has nothing to compute for a unit call its join(), and all ranks any_failed() when some may have raised""",
    )
    assert fullshard.any_failed(world.mesh, True)
    for which in ("left", "right"):
        square(model(world.mine(batch(1)), which)).backward()
