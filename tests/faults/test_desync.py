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


@pytest.mark.proves("1b")
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
        re.sub("collective [0-9]+", "collective N", re.sub(r" \((forward|backward)\)", "", text)).replace(others, "the others"),
        """Ranks diverged at collective N: rank 0 ran all_gather of 'right'; the others ran all_gather of 'left'. All ranks must run the same units in the same order. On a rank with nothing to compute for a unit, call its join(). If some ranks may have raised, call any_failed() on all ranks.""",
    )
    assert fullshard.any_failed(world.mesh, True)
    for which in ("left", "right"):
        square(model(world.mine(batch(1)), which)).backward()
