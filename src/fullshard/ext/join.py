"""`FSDPModule.join()`: take part in the collectives of a unit's forward and backward without computing."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import ForwardCall, Listener, Runtime, Unit, require_unit, unit_of
from fullshard.errors import StateError
from fullshard.frontend.module import FSDPModule, sharded_method


@sharded_method
def join(self: FSDPModule) -> Tensor:
    """Run the forward and backward collectives of all units at and below this module, without computing anything.

    Use it on a rank that has no input for a unit that other ranks run: no image for the vision tower, no batch at the end of an
    epoch, no token for an expert. Call it in place of the forward, at the same point of the program on all ranks. The units
    below run in the order of this unit's last forward on this rank; before its first one, in the order of registration. The
    backward collectives run within a backward of this rank. The gradients are the same as if the loss of this rank did
    not depend on the unit.

    Ranks that compute must not recompute several units in one checkpoint (torch.utils.checkpoint around a module with units
    below it): they run those units a second time, and this rank cannot join that. Checkpoint each unit separately.

    Returns:
        A 0-dim zero with a graph. A rank that computes nothing else calls `model.join().backward()`.

    Raises:
        StateError: inside a backward, or if this unit or a unit below has several modules.

    Example:
        >>> features = model.vision(images) if images is not None else model.vision.join()      # doctest: +SKIP
    """
    unit = require_unit(self)
    runtime, scheduler = unit.runtime, unit.runtime.scheduler
    runtime.recover()
    order = [(inner, enters) for number, enters in _order_of(unit) if (inner := runtime.unit(number)) is not None]
    _refuse_illegal_join(unit, [inner for inner, _ in order])
    grad = torch.is_grad_enabled()
    alone = not scheduler.running
    # Whether the outputs of units that have not run on this rank yet would require grad. They would if the input has a graph:
    # if calls of the outermost forward around this one have a pending backward or, in `_run`, once a trainable unit has ended.
    has_graph = scheduler.has_pending_since(scheduler.clock + 1 if alone else scheduler.running[0].start)
    try:
        last = _run(unit, order, grad=grad, has_graph=has_graph, alone=alone)
    except BaseException as failure:
        runtime.note_interrupt(failure)
        # A forward around this one ends the calls that have begun. Without one they would stay open, and the next forward would
        # count as inside of them.
        if alone and isinstance(failure, Exception):
            runtime.abort_in_progress()
        raise
    runtime.reducer.poll()
    device = runtime.communicator.device
    if last is None:
        return torch.zeros((), device=device)
    zero = torch.zeros((), device=device, requires_grad=True).clone()
    assert zero.grad_fn is not None
    zero.grad_fn.register_prehook(partial(_begin_backward, runtime, last))
    return zero


def _run(unit: Unit, order: Sequence[tuple[Unit, bool]], *, grad: bool, has_graph: bool, alone: bool) -> _Joined | None:
    """Enter and leave the forwards of these units. Return the last call that a backward joins, None if there is none."""
    runtime, scheduler = unit.runtime, unit.runtime.scheduler
    last: _Joined | None = None
    for inner, enters in order:
        if enters:
            if not scheduler.running:
                runtime.begin_outermost_forward(inner, inner.modules[0])
            inner.check_first_use(inner.modules[0])
            stale = inner.stale
            inner.uninstall()
            runtime.trace.append((inner.number, True))
            runtime.run(scheduler.before_forward(inner.number, stale=stale))
            continue
        ended = scheduler.after_forward(inner.number, grad=grad)
        runtime.trace.append((inner.number, False))
        runtime.run(ended.actions)
        has_graph = has_graph or any(group.trainable for group in inner.groups)
        had_graph = inner.output_has_graph
        if grad and (has_graph if had_graph is None else had_graph):
            last = _Joined(ended.call, alone)
            runtime.listener(_JoinedCalls).add(last)
    return last


def _order_of(unit: Unit) -> Sequence[tuple[int, bool]]:
    """Return the units that a forward enters (True) and leaves (False), as in the last one of `unit`, or as registered."""
    if unit.last_order:
        return unit.last_order
    found: list[tuple[int, bool]] = []

    def walk(module: nn.Module) -> None:
        inner = unit_of(module)
        if inner is not None:
            found.append((inner.number, True))
        for child in module.children():
            walk(child)
        if inner is not None:
            found.append((inner.number, False))

    for module in unit.modules:
        walk(module)
    return found


def _refuse_illegal_join(unit: Unit, inner: Sequence[Unit]) -> None:
    """Raise StateError for a unit whose forward cannot be predicted, inside a backward, and inside full_params()."""
    for other in inner:
        other.refuse_while_shown(doing="join()")
        if other.is_list:
            raise StateError(
                f"join() of unit '{unit.name}' cannot predict unit '{other.name}': fully_shard() was called on a list of "
                "modules, and how often each of them runs is not known. Call fully_shard() on each module."
            )
    if _torch.current_graph_task() != -1:
        raise StateError(f"join() of unit '{unit.name}' was called inside a backward. Call it where the forward would be.")


class _Joined(NamedTuple):
    """A call in which other ranks compute and this one only takes part in the collectives."""

    call: ForwardCall
    alone: bool  # True if join() was called outside of a forward


def _begin_backward(runtime: Runtime, joined: _Joined, *_: object) -> None:
    """Begin a backward in which this rank computes nothing, or nothing yet."""
    try:
        runtime.recover()
        runtime.begin_backward()
        calls = runtime.listener(_JoinedCalls)
        calls.reached.add(runtime.scheduler.start_of_outermost(joined.call))
        calls.enter(beyond=joined.call.end - 1)  # this call itself, and those that ended after it
    except BaseException as failure:
        runtime.note_interrupt(failure)
        raise


class _JoinedCalls(Listener):
    """Joined calls of one runtime with a pending backward. While there are any, it listens to the backwards of the runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.waiting: list[_Joined] = []  # oldest first
        self.reached: set[int] = set()  # starts of the outermost forwards that the running backward has reached

    def add(self, joined: _Joined) -> None:
        """Add a call whose backward is pending."""
        self._runtime.scheduler.expect_backward(joined.call)
        self.waiting.append(joined)

    def before_backward(self, call: ForwardCall) -> None:
        """Enter the backwards of the joined calls that ended after `call`."""
        self.reached.add(self._runtime.scheduler.start_of_outermost(call))
        self.enter(beyond=call.end)

    def ending_backward(self) -> None:
        """Enter the backwards of the other joined calls of the running backward."""
        self.enter(beyond=-1)
        self.reached.clear()
        if not self.waiting:
            self._runtime.listeners.remove(self)

    def on_reset(self, units: Container[int]) -> None:
        """Drop the calls of these units."""
        self.reached.clear()
        for joined in [joined for joined in self.waiting if joined.call.unit in units]:
            self._runtime.scheduler.graph_released(joined.call)
            self.waiting.remove(joined)

    def enter(self, *, beyond: int) -> None:
        """Enter the backwards of the joined calls that the running backward reached, latest first, as computing ranks do.

        Calls of deleted units are dropped. `beyond`: a time of the scheduler's clock, after which the calls ended; -1 for all.
        """
        runtime, scheduler, later = self._runtime, self._runtime.scheduler, list[_Joined]()
        while self.waiting and self.waiting[-1].call.end > beyond:
            joined = self.waiting.pop()
            call, unit = joined.call, runtime.unit(joined.call.unit)
            if unit is None or scheduler.start_of_outermost(call) < 0:
                scheduler.graph_released(call)
            elif not self._is_reached(joined):
                later.append(joined)
            else:
                scheduler.graph_released(call)
                runtime.backward.units[unit.number] = unit
                stale = unit.stale_in_backward()
                with torch.no_grad():
                    runtime.run(scheduler.before_backward(call, stale=stale))
        self.waiting += reversed(later)

    def _is_reached(self, joined: _Joined) -> bool:
        """Return True if a joined call belongs to the running backward.

        It does if the backward reached the call's outermost forward. A call of a join() outside of any forward (`alone`)
        belongs to the backward that reached the next outermost forward in which this rank computes, or, if there is none, the
        previous one.
        """
        scheduler, reached = self._runtime.scheduler, self.reached
        run = scheduler.start_of_outermost(joined.call)
        if not joined.alone:
            return run in reached
        alone = {scheduler.start_of_outermost(other.call) for other in self.waiting if other.alone} | {run}
        starts = sorted(scheduler.outermost_starts)
        neighbors = (*(start for start in starts if start >= run), *(start for start in reversed(starts) if start <= run))
        return next((start for start in neighbors if start not in alone or start in reached), None) in reached
