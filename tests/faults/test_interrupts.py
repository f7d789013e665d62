"""Ctrl-C comes between any two lines that Python runs, also ours: what follows is right, and gradients are never half there."""

from __future__ import annotations

import copy
import sys
import warnings
from contextlib import ExitStack
from types import FrameType
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, full, largest, rounding, shard_stack, square
from torch import Tensor, nn

import fullshard
from fullshard import CheckPolicy, StateError

OURS = str(fullshard.__path__[0])
SWALLOWED = {"__del__", "mark_raised", "_on_deleted"}  # Python calls these for objects that go, and prints what they raise


class Interrupt:
    """Raises KeyboardInterrupt before the line number `at` of those that fullshard runs in a block; None: counts them only.

    where: the line it came before.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.at is not None and self.lines >= self.at and not is_swallowed(frame):
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def is_swallowed(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in SWALLOWED:
        frame = frame.f_back
    return frame is not None


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else full(p.grad).clone() for name, p in model.named_parameters()}


def equal(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> bool:
    near = rounding(torch.float32) * largest(grad for grad in wanted.values() if grad is not None)
    return all(
        (grad is None) == (wanted[name] is None) and (grad is None or largest([grad - wanted[name]]) <= near)
        for name, grad in found.items()
    )


@pytest.mark.proves("32a")
@pytest.mark.parametrize("accumulate", [False, True])
@ranks(1)
def test_an_interrupt_at_any_line_of_a_step_leaves_its_gradients_whole_and_the_next_step_right(
    world: World, accumulate: bool
) -> None:
    """One model goes through all of them, so they may not add up either."""
    plain = Stack(depth=2)
    model = shard_stack(copy.deepcopy(plain), world.mesh)

    def step(m: nn.Module, which: int, *, last: bool = True) -> None:
        with ExitStack() as stack:
            if m is model and not last:
                stack.enter_context(model.accumulate())
            square(m(batch(which))).backward()

    def sums(*steps: int) -> dict[str, Tensor | None]:
        plain.zero_grad()
        for which in steps:
            step(plain, which)
        return gradients(plain)

    first = [0] if accumulate else []
    whole = {name: sums(*steps) for name, steps in {"all": [*first, 1, 2], "some": [*first, 2], "none": [2]}.items()}
    step(model, 0)
    with Interrupt() as count:
        step(model, 1)
    assert count.lines > 1000
    for at in range(1 + accumulate, count.lines - 50, count.lines // 60):  # the next time it may be some lines less
        model.zero_grad()
        for which in first:
            step(model, which, last=False)
        with pytest.raises(KeyboardInterrupt), Interrupt(at) as interrupt:
            step(model, 1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(model, 2)
        found = [name for name, wanted in whole.items() if equal(gradients(model), wanted)]
        assert found, f"{interrupt.where}: {gradients(model)}"
        if found[0] == "all":
            assert not said, interrupt.where
        if found[-1] == "none" and accumulate:
            assert "kept without communication" in str(said[0].message), interrupt.where


@pytest.mark.proves("32a")
@ranks(2)
def test_of_two_ranks_one_is_interrupted_at_any_line(world: World) -> None:
    plain = Stack(depth=2)
    model = shard_stack(copy.deepcopy(plain), world.mesh, check_policy=CheckPolicy(patience=0.2))

    def step(which: int) -> None:
        square(model(world.mine(batch(which)))).backward()

    step(0)
    with Interrupt() as count:
        step(1)
    lines = torch.tensor([count.lines])
    torch.distributed.broadcast(lines, 0)
    for at in range(11, int(lines) - 50, int(lines) // 12):
        failed: BaseException | None = None
        with Interrupt(at if world.rank == 0 else None) as interrupt:
            try:
                step(1)
            except (KeyboardInterrupt, StateError) as caught:
                failed = caught
        assert isinstance(failed, KeyboardInterrupt) == (world.rank == 0), interrupt.where
        assert fullshard.any_failed(world.mesh, failed is not None)
        model.zero_grad(), plain.zero_grad()
        step(2)
        square(plain(batch(2))).backward()
        assert_same_grads(model, plain)
