"""`join()`: taking part in what a unit sends, forward and backward, without computing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.runtime.executor import Executor
from fullshard.runtime.interrupts import recovers_first
from fullshard.runtime.recovery import Recovery
from fullshard.runtime.replicas import share_buffers
from fullshard.runtime.steps import Steps
from fullshard.runtime.unit import Unit, refuse_inside_full_params, unit_of
from fullshard.schedule.join import Joined, JoinedCalls


class Join:
    """Runs the planner's events of a forward without computing, in the order of the unit's last forward on this rank."""

    def __init__(self, executor: Executor, recovery: Recovery, steps: Steps, joined: JoinedCalls) -> None:
        self._executor, self.recovery, self._steps, self._joined = executor, recovery, steps, joined

    @recovers_first
    def join(self, unit: Unit) -> Tensor:
        """Take part in what a forward of the unit sends, and later in backward. A zero whose backward is that one."""
        self.recovery.recover()
        executor, planner = self._executor, self._executor.planner
        order = [(inner, enters) for number, enters in order_of(unit) if (inner := executor.units.get(number)) is not None]
        _refuse_illegal_join(unit, [inner for inner, _ in order])
        grad = torch.is_grad_enabled()
        alone = not planner.running
        has_graph = planner.pending.has_call_since(planner.clock + 1 if alone else planner.running[0].start)  # of its input
        last: Joined | None = None
        for inner, enters in order:
            if enters:
                self._steps.begin_forward(inner, inner.modules[0])
                continue
            ended = planner.after_forward(inner.number, grad=grad)
            self._steps.trace.append((inner.number, False))
            executor.execute(ended.actions)
            has_graph = has_graph or any(group.trainable for group in inner.groups)
            had_graph = inner.progress.output_has_graph
            if grad and (has_graph if had_graph is None else had_graph):
                last = Joined(inner.number, ended.call, alone)
                self._joined.add(last)
            if inner.options.buffers != "local":
                share_buffers(inner, inner.modules[0], executor.communicator)
        executor.reducer.poll()
        device = executor.communicator.device
        if last is None:
            return torch.zeros((), device=device)
        zero = torch.zeros((), device=device, requires_grad=True).clone()
        assert zero.grad_fn is not None
        zero.grad_fn.register_prehook(partial(self._backward_begins, last))
        return zero

    @recovers_first
    def _backward_begins(self, joined: Joined, *_: object) -> None:
        self._steps.enter_joined(joined.call)


def order_of(unit: Unit) -> Sequence[tuple[int, bool]]:
    """Which units a forward of this one enters (True) and leaves: as the last one on this rank, else as they are registered."""
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
    """Raises StateError for a unit whose forward cannot be known, inside a backward, and inside full_params()."""
    for other in inner:
        refuse_inside_full_params(other, doing="join()")
    lists = [other.name for other in inner if other.place.is_list]
    if lists:
        raise StateError(
            f"join() of unit '{unit.name}': unit '{lists[0]}' has several modules, so how often they run cannot be known: "
            "shard them one by one"
        )
    if _torch.current_graph_task() != -1:
        raise StateError(f"join() of unit '{unit.name}' was called inside a backward: call it where the forward would be")


__all__ = ["Join", "order_of"]
