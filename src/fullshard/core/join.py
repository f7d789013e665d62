"""`join()`: take part in the collectives of a unit's forward and backward without computing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.core.joined_calls import Joined
from fullshard.core.runtime import Runtime
from fullshard.core.unit import Unit, refuse_inside_full_params
from fullshard.core.unit_modules import unit_of
from fullshard.errors import StateError


def join(unit: Unit) -> Tensor:
    """Take part in the collectives of a forward of the unit without computing, in the order of its last forward on this rank.

    Returns:
        A zero; its backward joins the collectives of the unit's backward.
    """
    runtime, scheduler = unit.runtime, unit.runtime.scheduler
    runtime.recovery.recover()
    order = [(inner, enters) for number, enters in order_of(unit) if (inner := runtime.unit(number)) is not None]
    _refuse_illegal_join(unit, [inner for inner, _ in order])
    grad = torch.is_grad_enabled()
    alone = not scheduler.running
    # For units that have not run on this rank yet: whether their outputs would require grad. They would if the input has a
    # graph, which is so if calls of the outermost forward around this one have a pending backward; or if a unit with trainable
    # parameters has ended.
    has_graph = scheduler.has_pending_since(scheduler.clock + 1 if alone else scheduler.running[0].start)
    try:
        last = _run(unit, order, grad=grad, has_graph=has_graph, alone=alone)
    except Exception:
        # A forward around this one ends the calls that have begun. Without one they would stay open, and the next forward would
        # count as inside of them.
        if alone:
            runtime.recovery.abort_in_progress()
        raise
    except BaseException as interrupt:
        runtime.recovery.note_interrupt(interrupt)
        raise
    runtime.reducer.poll()
    device = runtime.communicator.device
    if last is None:
        return torch.zeros((), device=device)
    zero = torch.zeros((), device=device, requires_grad=True).clone()
    assert zero.grad_fn is not None
    zero.grad_fn.register_prehook(partial(_begin_joined_backward, runtime, last))
    return zero


def _run(unit: Unit, order: Sequence[tuple[Unit, bool]], *, grad: bool, has_graph: bool, alone: bool) -> Joined | None:
    """Enter and leave the forwards of these units. Return the last call that a backward joins, None if there is none."""
    runtime, scheduler = unit.runtime, unit.runtime.scheduler
    last: Joined | None = None
    for inner, enters in order:
        if enters:
            inner.begin_forward(inner.modules[0])
            continue
        ended = scheduler.after_forward(inner.number, grad=grad)
        runtime.trace.append((inner.number, False))
        runtime.run(ended.actions)
        has_graph = has_graph or any(group.trainable for group in inner.groups)
        had_graph = inner.progress.output_has_graph
        if grad and (has_graph if had_graph is None else had_graph):
            last = Joined(inner.number, ended.call, alone)
            runtime.joined.add(last)
    return last


def _begin_joined_backward(runtime: Runtime, joined: Joined, *_: object) -> None:
    """Begin a backward in which this rank computes nothing, or nothing yet."""
    try:
        runtime.recovery.recover()
        runtime.begin_backward()
        runtime.joined.backward_reached(joined.call)
        runtime.join_backward(beyond=joined.call.end - 1)  # this call itself, and those that ended after it
    except BaseException as failure:
        runtime.recovery.note_interrupt(failure)
        raise


def order_of(unit: Unit) -> Sequence[tuple[int, bool]]:
    """Return the units that a forward of `unit` enters and leaves, in order.

    The order is that of the last forward on this rank, or of module registration if there was none.

    Returns:
        (number of a unit, True where the forward enters it or False where it leaves it).
    """
    if unit.progress.last_order:
        return unit.progress.last_order
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
        refuse_inside_full_params(other, doing="join()")
    lists = [other.name for other in inner if other.place.is_list]
    if lists:
        raise StateError(
            f"join() of unit '{unit.name}' cannot predict unit '{lists[0]}': fully_shard() was called on a list of modules, "
            "and how often each of them runs is not known. Call fully_shard() on each module."
        )
    if _torch.current_graph_task() != -1:
        raise StateError(f"join() of unit '{unit.name}' was called inside a backward. Call it where the forward would be.")


__all__ = ["join", "order_of"]
