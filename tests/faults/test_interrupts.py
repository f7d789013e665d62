"""Ctrl-C while an event runs or the host waits: what follows is right, and gradients are set for all parameters or for none.

Events are the hooks on modules and graphs, and the end of a backward. An interrupt between events meets no half-done work.
Promised are one interrupt per step, and events and waits; not the lines that handle an interrupt, nor other requests (see
"Interrupts" in docs/schedule.md).
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, full, largest, rounding, shard_stack, square
from torch import Tensor, nn

import fullshard
from fullshard import CheckPolicy, StateError
from fullshard.comm.base import StartedWork
from fullshard.core import reduction
from fullshard.core.hooks import BackwardHook, ForwardHooks
from fullshard.core.runtime import Runtime
from fullshard.core.unit import late_gradient
from fullshard.core.units import unit_of

OURS = str(fullshard.__path__[0])
EVENTS = {
    event.__code__
    for event in (ForwardHooks.before, ForwardHooks.after, BackwardHook.__call__, late_gradient, Runtime.end_backward)
}
COMMIT = {reduction.commit_all.__code__}
SWALLOWED = {"__del__", "mark_raised", "_on_deleted"}  # Python calls these for objects that go, and prints what they raise


class Interrupt:
    """Raises KeyboardInterrupt before the line number `at` of those that fullshard runs inside of `within`, in a block.

    at: None counts the lines only.
    within: codes of functions; the lines of what they call count.
    where: the line it came before.
    """

    def __init__(self, at: int | None = None, *, within: set[CodeType] = EVENTS) -> None:
        self.at, self.lines, self.where, self._within = at, 0, "", within

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(OURS) and is_called_by(frame, lambda code: code in self._within)
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            swallowed = frame.f_code.co_name in SWALLOWED or is_called_by(frame, lambda code: code.co_name in SWALLOWED)
            if self.at is not None and self.lines >= self.at and not swallowed:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def is_called_by(frame: FrameType, matches: Callable[[CodeType], bool]) -> bool:
    caller = frame.f_back
    while caller is not None and not matches(caller.f_code):
        caller = caller.f_back
    return caller is not None


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
def test_an_interrupt_while_an_event_of_a_step_runs_leaves_its_gradients_whole_and_the_next_step_right(
    world: World, accumulate: bool
) -> None:
    """Promised for every line of the events of a step: hooks before and after forwards, before backwards, and the end of the
    backward. One model goes through all of them, so they may not add up either."""
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
    for _ in range(2):  # the second step uses the gradients of the first one again
        step(model, 0)
        model.zero_grad()
    with Interrupt() as count:
        step(model, 1)
    assert count.lines > 1000
    for at in range(1 + accumulate, count.lines - 50, count.lines // 60):  # the next time it may be some lines less
        model.zero_grad()
        for which in first:
            step(model, which, last=False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt), Interrupt(at) as interrupt:
                step(model, 1)
            step(model, 2)
        found = [name for name, wanted in whole.items() if equal(gradients(model), wanted)]
        assert found, f"{interrupt.where}: {gradients(model)}"
        if found[0] == "all":
            assert not said, interrupt.where
        if found[-1] == "none" and accumulate:
            assert "earlier backwards of the step" in str(said[0].message), interrupt.where


@pytest.mark.parametrize("mixed", [False, True])
@ranks(1)
def test_an_interrupt_while_gradients_are_being_set_discards_all_of_them_and_warns(world: World, mixed: bool) -> None:
    """Promised for every line of what adds to `.grad` or sets it. `mixed`: one `.grad` was replaced and one removed, so they
    are set one by one. Additions cannot be undone, so what earlier backwards added goes as well."""
    plain = Stack(depth=1)
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    weights = list(model.parameters())
    for which in (0, 1):
        square(plain(batch(which))).backward()
    at = 0
    while True:
        at += 1
        model.zero_grad()
        square(model(batch(0))).backward()
        if mixed:
            weights[0].grad = weights[0].grad.clone()
            weights[-1].grad = None
        with warnings.catch_warnings(record=True) as said, Interrupt(at, within=COMMIT) as interrupt:
            warnings.simplefilter("always")
            with suppress(KeyboardInterrupt):
                square(model(batch(1))).backward()
        if not interrupt.where:
            break
        assert all(p.grad is None for p in weights), interrupt.where
        [warned] = [str(one.message) for one in said]
        assert warned.startswith("KeyboardInterrupt came while .grad of '") and "are discarded" in warned
    assert at > 20, "so many lines were tried"
    if not mixed:
        assert_same_grads(model, plain)
    model.zero_grad(), plain.zero_grad()
    square(model(batch(2))).backward()
    square(plain(batch(2))).backward()
    assert_same_grads(model, plain)


@pytest.mark.rotates(4)
@pytest.mark.proves("32a")
@pytest.mark.parametrize("quarter", range(4))
@ranks(2)
def test_of_two_ranks_one_is_interrupted_while_an_event_runs(world: World, quarter: int) -> None:
    """Promised for every line of the events of a step: the other rank is told, and does not wait."""
    model = shard_stack(Stack(depth=2), world.mesh, check_policy=CheckPolicy(patience=0.2))

    def step(which: int) -> None:
        square(model(world.mine(batch(which)))).backward()

    step(0)
    with Interrupt() as count:
        step(1)
    lines = torch.tensor([count.lines])
    torch.distributed.broadcast(lines, 0)
    failed: BaseException | None = None
    with Interrupt(11 + (int(lines) - 61) * quarter // 4 if world.rank == 0 else None) as interrupt:
        try:
            step(1)
            fullshard.any_failed(world.mesh)
        except (KeyboardInterrupt, StateError) as caught:
            failed = caught
    assert isinstance(failed, KeyboardInterrupt if world.rank == 0 else StateError), interrupt.where
    with pytest.raises(StateError):
        fullshard.any_failed(world.mesh, failed)


REQUESTS: dict[str, Callable[[Any], object]] = {
    "unshard()": lambda model: model.unshard(),
    "reshard()": lambda model: model.reshard(),
    "full_params()": lambda model: fullshard.full_params(model).__enter__(),
    "gathered()": lambda model: fullshard.gathered(model).__enter__(),
    "join()": lambda model: model.join(),
    "finalize_backward()": lambda model: (model.set_manual_backward_finalization(True), model.finalize_backward()),
}


@pytest.mark.parametrize("request_of", REQUESTS)
@ranks(2)
def test_an_interrupt_while_a_request_waits_leaves_the_next_step_right(world: World, request_of: str) -> None:
    """Promised where a request waits for a collective. All ranks are interrupted in the same wait here, so the next step needs
    no other call."""
    plain = Stack(depth=1)
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    square(model(world.mine(batch(0)))).backward()
    communicator = unit_of(model).runtime.communicator
    waits: list[object] = []

    def interrupted(work: object) -> None:
        waits.append(work)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if request_of == "reshard()":
            model.unshard(async_op=True)
        patch.setattr(StartedWork, "wait", interrupted)
        REQUESTS[request_of](model)
    assert waits and communicator.interrupted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that gradients are discarded
        model.set_manual_backward_finalization(False)
    assert not communicator.interrupted
    model.zero_grad()
    square(model(world.mine(batch(1)))).backward()
    square(plain(batch(1))).backward()
    assert_same_grads(model, plain)


@ranks(1)
def test_every_request_starts_over_first_after_an_interrupt(world: World) -> None:
    model: Any = shard_stack(Stack(depth=1), world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square(model(batch(0))).backward()
    communicator = unit_of(model).runtime.communicator
    handle = model.unshard(async_op=True)
    state = copy.deepcopy(model.state_dict())
    view = torch.distributed.fsdp.fully_shard.state(model)
    model.set_manual_backward_finalization(True)
    square(model(batch(0))).backward()
    pending = model.finalize_backward(async_op=True)
    requests: list[Callable[[], object]] = [
        lambda: pending.wait(),
        lambda: model.set_manual_backward_finalization(False),
        lambda: handle.wait(),
        lambda: model.unshard(),
        lambda: model.reshard(),
        lambda: model.join(),
        lambda: model.finalize_backward(),
        lambda: model.set_is_last_backward(True),
        lambda: model.set_requires_gradient_sync(True),
        lambda: model.set_reshard_after_forward(True),
        lambda: model.set_separate_reduce_scatter_group(False),
        lambda: model.set_unshard_in_backward(True),
        lambda: model.reset_iter_state(),
        lambda: model.zero_grad(),
        lambda: model.accumulate().__enter__(),
        lambda: model.resident().__enter__(),
        lambda: fullshard.full_params(model).__enter__(),
        lambda: fullshard.gathered(model).__enter__(),
        lambda: model.state_dict(),
        lambda: model.load_state_dict(state),
        lambda: model.to(torch.float32),
        lambda: copy.deepcopy(model),
        lambda: fullshard.clip_grad_norm_(model.parameters(), 1.0),
        lambda: optimizer.step(),
        lambda: fullshard.any_failed(world.mesh, True),
        lambda: fullshard.stats(model),
        lambda: fullshard.counting(model).__enter__(),
        lambda: list(fullshard.iter_full(model)),
        lambda: fullshard.EMA(model, 0.9),
        lambda: fullshard.materialize(model, "cpu"),
        lambda: view._fsdp_param_groups[0].post_backward(),
        lambda: view._root_post_backward_final_callback(),
        lambda: model(batch(0)),
        lambda: fullshard.undo(model),
    ]
    for index, request in enumerate(requests):
        communicator.interrupted = True
        with suppress(StateError):  # some are illegal here
            request()
        assert not communicator.interrupted, f"request {index}"
