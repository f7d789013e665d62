"""What happens when a forward or backward of a unit begins and ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from fullshard import _torch
from fullshard.consistency.collective_log import described
from fullshard.errors import StateError
from fullshard.params.sharded_tensor import wake
from fullshard.runtime.executor import Executor
from fullshard.runtime.interrupts import recovers_first
from fullshard.runtime.late_grads import hook_late_grads
from fullshard.runtime.recovery import Recovery
from fullshard.runtime.replicas import check_replicas
from fullshard.runtime.unit import Unit, name_units_in
from fullshard.runtime.unwritten import check_written
from fullshard.schedule.join import JoinedCalls
from fullshard.schedule.records import ForwardCall
from fullshard.schedule.residency import Residency


class Steps:
    """Turns events of modules and graphs into events of the planner, and has its actions executed.

    Attributes:
        trace: the units that the outermost forward under way entered (True) and left so far, for `join()`.
    """

    def __init__(self, executor: Executor, recovery: Recovery, joined: JoinedCalls) -> None:
        self._executor, self._planner, self.recovery, self._joined = executor, executor.planner, recovery, joined
        self._runs = 0  # outermost forwards so far
        self._leaving: tuple[str, str] | None = None  # the innermost forward that an exception left, and which
        self.trace: list[tuple[int, bool]] = []

    # --- forward ---

    def enter_forward(self, unit: Unit, module: nn.Module) -> None:
        """A module of the unit begins its forward: have its parameters full and installed."""
        if self.recovery.interrupted or self._executor.backward.underway:
            self.recovery.recover()
        self._refuse_illegal_call(unit, module)
        if _torch.current_graph_task() != -1:
            self._begin_recomputation(unit)
        elif not (unit.place.is_list and self._planner.running.has(unit.record.number)):
            self.begin_forward(unit, module)
            if unit.place.is_list:
                unit.progress.begin_list(unit.place)
        unit.progress.begin(module, self._planner.clock, len(self.trace) - 1)
        for group in unit.groups:
            group.install()

    def _refuse_illegal_call(self, unit: Unit, module: nn.Module) -> None:
        """Raises StateError where a forward cannot gather."""
        if _torch.in_transform():
            raise StateError(
                f"unit '{unit.name}' was called inside a transform of torch.func (grad, vjp, jvp, vmap, jacrev), which cannot "
                "gather: use torch.autograd.grad or fullshard.grad, or compute with the tensors of fullshard.gathered()"
            )
        if unit.pending is not None:
            raise StateError(
                f"the forward of unit '{unit.name}' was called while its gradients are reduced: call wait() of the handle of "
                "finalize_backward(async_op=True) first"
            )
        if unit.exposure.plain:
            raise StateError(
                f"the forward of unit '{unit.name}' was called inside full_params(), which shows its parameters to read and "
                "write: call it outside, or keep the model gathered with resident()"
            )
        if (
            self._planner.running.outermost() == unit.record.number
            and not unit.place.is_list
            and not unit.progress.methods
            and not _torch.is_in_forward(module, outer=True)
        ):
            self.recovery.abort_in_progress()  # the forward before this one was interrupted in a way that runs no hooks

    def begin_forward(self, unit: Unit, module: nn.Module) -> None:
        """What a forward begins with, whether this rank computes in it or only takes part."""
        executor, planner, record = self._executor, self._planner, unit.record
        first = not planner.running
        if first:
            self._begin_run(unit, module)
        if unit.checks.uninitialized is not None:
            executor.refresh(unit)
            check_written(unit)
            check_replicas(unit)
        # What the planner gathered ahead within a forward or backward cannot be out of date.
        ahead = record.residency is Residency.GATHERING and not first and planner.prefetch.is_current(record.number)
        stale = False
        if record.residency is not Residency.SHARDED and not ahead:
            executor.drop_if_replaced(unit)
            stale = executor.is_stale(unit)
        self.trace.append((record.number, True))
        executor.execute(planner.before_forward(record.number, stale=stale))

    def _begin_run(self, unit: Unit, module: nn.Module) -> None:
        """The forward that begins is an outermost one."""
        executor = self._executor
        self._runs += 1
        self._leaving = None
        wake()  # what an optimizer whose step raised left asleep
        executor.units.forget_deleted()
        if unit.checks.names:
            unit.checks.names = False
            name_units_in(module, place=True)
        self.trace.clear()
        executor.reducer.read_heartbeats()
        executor.communicator.roll_blocks()
        if executor.communicator.away is not None and _torch.is_capturing(executor.communicator.away):
            raise StateError(
                f"the forward of unit '{unit.name}' was called while a graph of the device is captured, which cannot hold "
                "gathers: the host decides anew in each step what is gathered, freed and reduced. For the capture of a whole "
                "step, addresses can be kept (set_keep_unsharded_storage) and the end of backward can be called "
                "(finalize_backward); what is missing is a fixed plan of a step, proved on a GPU. Capture modules inside of "
                "units, or use torch.compile without mode='reduce-overhead'"
            )
        executor.communicator.wait_for_next_event()

    def _begin_recomputation(self, unit: Unit) -> None:
        number = unit.record.number
        stale = self._is_stale_in_backward(unit, self._begin_backward())
        self._executor.backward.units[number] = unit
        self._executor.execute(self._planner.before_recompute(number, stale=stale))

    def leave_forward(self, unit: Unit, module: nn.Module, *, failed: bool = False) -> ForwardCall | None:
        """The call that just ended, for a `BackwardHook`; None if it cannot have a backward."""
        if failed:
            self._report_exception(unit)
        executor, planner, record = self._executor, self._planner, unit.record
        # A forward that raised has no backward: what is gathered goes, or the next forward would compute with it.
        number, grad = record.number, torch.is_grad_enabled() and not failed
        if _torch.current_graph_task() != -1:  # it stays full and installed until its own gradients are done
            unit.progress.end(module)
            call = planner.after_recompute(number, grad=grad)
            return call if grad else None
        if not planner.running.has(number):
            return None  # it raised before it began
        if unit.place.is_list and not self._ends_list(unit, module):
            unit.progress.end(module)
            return planner.partial_end(number)
        began = unit.progress.end(module)
        ended = planner.after_forward(number, grad=grad, since=began.clock)
        self.trace.append((number, False))
        if not failed and not ended.closed and not unit.place.is_list:
            unit.progress.last_order = self.trace[began.traced :]
        for closed in ended.closed:
            inner = executor.units.get(closed.unit)
            if inner is not None:
                executor.uninstall(inner)
        if record.residency is Residency.FULL and not record.is_pinned and not planner.running.has(number):
            executor.uninstall(unit)
        executor.execute(ended.actions)
        if grad and not unit.options.in_backward and record.residency is Residency.SHARDED:
            for group in unit.groups:
                group.invalidate_autograd()
        executor.reducer.poll()
        return ended.call if grad else None

    def _ends_list(self, unit: Unit, module: nn.Module) -> bool:
        """Whether the end of this module's forward ends that of its unit, which has several."""
        done = unit.progress.is_list_done(module, self._runs) and not unit.progress.runs_around(module)
        return done or self._planner.running.outermost() == unit.record.number

    def _report_exception(self, unit: Unit) -> None:
        """An exception leaves the forward of a unit. The others are told once it leaves the outermost one."""
        failure = sys.exc_info()[1]
        said = "an exception" if failure is None else described(failure)
        if self._leaving is None or self._leaving[1] != said:
            self._leaving = f"'{unit.name}' forward", said
        if self._planner.running.outermost() in (unit.number, None):
            self._executor.communicator.report_exception(*self._leaving)
            self._leaving = None

    # --- backward ---

    def enter_backward(self, unit: Unit, call: ForwardCall, *, copied_use: bool = False) -> None:
        """The backward of a call begins. `copied_use`: of a copy of the parameters (`register_copied_use` made the call)."""
        executor, planner, record = self._executor, self._planner, unit.record
        if not planner.knows(record.number):
            raise StateError(
                f"unit '{unit.name}' was undone, or became one with another, between its forward and this backward: run the "
                "backward before undo() or fully_shard(), or the forward again"
            )
        if self.recovery.interrupted or executor.backward.raised:
            self.recovery.recover()
        first = self._begin_backward()
        executor.backward.units[record.number] = unit
        for group in unit.groups:
            if group.grads.shown:
                group.grads.hide()
        if self._joined.waiting:
            self._joined.backward_reached(call)
            self.join_backward(beyond=call.end)
        stale = not copied_use and self._is_stale_in_backward(unit, first)
        if torch.is_grad_enabled():  # create_graph=True: the graph of this backward needs the parameters, too
            with torch.no_grad():
                executor.execute(planner.before_backward(call, stale=stale, copied_use=copied_use, again=True))
            if not copied_use:
                hook_late_grads(unit)
        else:
            executor.execute(planner.before_backward(call, stale=stale, copied_use=copied_use))
        if record.residency is Residency.FULL:
            for group in unit.groups:  # what is recomputed inside the unit runs without its hooks
                group.install()

    def join_backward(self, *, beyond: int) -> None:
        """Take part in the backward of joined calls that ended after `beyond`."""
        executor = self._executor
        for joined in self._joined.due(beyond=beyond, lives=executor.units.__contains__):
            unit = executor.units.get(joined.unit)
            if unit is not None:
                executor.backward.units[unit.number] = unit
                stale = self._is_stale_in_backward(unit, False)
                with torch.no_grad():
                    executor.execute(self._planner.before_backward(joined.call, stale=stale))

    def enter_joined(self, call: ForwardCall) -> None:
        """A backward begins in which this rank computes nothing, or nothing yet."""
        self.recovery.recover()
        self._begin_backward()
        self._joined.backward_reached(call)
        self.join_backward(beyond=call.end - 1)

    @recovers_first
    def enter_late(self, unit: Unit) -> None:
        """A gradient arrived in a backward that none of the unit's outputs announced."""
        units = self._executor.backward.units
        if self._planner.knows(unit.number) and unit.number not in units:
            self._begin_backward()
            units[unit.number] = unit

    @recovers_first
    def leave_backward(self) -> None:
        """The outermost backward that touched a unit is over."""
        executor = self._executor
        with torch.no_grad():
            try:
                self._finish_backward()
            except BaseException:
                if executor.reducer.decided is None:
                    executor.backward.mark_raised()
                    raise
                executor.end_backward()
                raise
            executor.end_backward()

    def _finish_backward(self) -> None:
        """Reduce what is left, and decide which gradients are handed out."""
        executor = self._executor
        if self._joined.waiting:
            self.join_backward(beyond=-1)
        self._joined.end_backward()
        executor.execute(self._planner.after_backward())
        units = executor.backward.units
        for _, unit in sorted(units.items()):
            if unit.record.residency is not Residency.SHARDED and not unit.record.is_pinned:
                executor.uninstall(unit)
            executor.reduce_late(unit)
        executor.reducer.collect(list(units.values()), executor.units.all)

    def _begin_backward(self) -> bool:
        """True for the first event of a backward."""
        if self._executor.backward.underway:
            return False
        leave: Callable[[], None] = self.leave_backward
        away = self._executor.communicator.away
        if away is not None:
            # Messages lie in memory of the stream that forward ran on, the current one. The end of the backward reads them on
            # the stream of its caller and frees them: what that memory is used for next must come behind it.
            leave = partial(_torch.then_order, _torch.current_stream(away), leave)
        self._executor.backward.begin(leave)
        return True

    def _is_stale_in_backward(self, unit: Unit, first: bool) -> bool:
        """Whether what was gathered is out of date. What the planner gathered ahead within this backward cannot be."""
        record = unit.record
        if record.residency is Residency.GATHERING and not first and self._planner.prefetch.is_current(record.number):
            return False
        return self._executor.is_stale(unit)


__all__ = ["Steps"]
