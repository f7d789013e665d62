"""Puts right what an exception or an interrupt left half done, before the next event begins."""

from __future__ import annotations

import warnings

from fullshard import _torch
from fullshard.params.sharded_tensor import wake
from fullshard.runtime.executor import Executor
from fullshard.runtime.interrupts import recovers_first
from fullshard.runtime.unit import Unit, unit_of
from fullshard.schedule.join import JoinedCalls


class Recovery:
    """Three things go wrong: a backward raises, a forward ends without its hooks, an interrupt comes between any two lines.

    The first two are found by the next event, which forgets the step that was under way (`abort_in_progress`). Of the third
    nothing is believed: no unit holds anything then (`start_over`).

    Attributes:
        interrupted: whether an interrupt came in the midst of an event.
    """

    def __init__(self, executor: Executor, joined: JoinedCalls) -> None:
        self._executor, self._joined = executor, joined
        self.interrupted = False

    @property
    def recovery(self) -> Recovery:
        """Itself, for `recovers_first`."""
        return self

    def recover(self) -> None:
        """Every event begins with this, if there is something to put right."""
        if self.interrupted:
            self.start_over()
        executor = self._executor
        if not executor.backward.has_raised():
            return
        gone = self._warn_of_backward()
        self.abort_in_progress()
        for unit in gone:
            executor.reducer.discard(unit)

    def abort_if_left(self, unit: Unit) -> None:
        """A forward of the unit that was interrupted in a way that runs no hooks is over."""
        if self._executor.planner.running.has(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self.abort_in_progress()

    @recovers_first
    def forget_step(self, unit: Unit) -> None:
        """Forget a step that was interrupted, as the next forward of the unit would, and all its gradients."""
        self.recover()
        self.abort_if_left(unit)
        self._executor.reducer.discard(unit)

    @recovers_first
    def abort_step(self) -> None:
        """Forget the step that is under way, with all gradients that are not delivered, as all ranks do."""
        wake()
        self.abort_in_progress()
        self._executor.planner.reset_orders()
        for unit in self._executor.units.all():
            self._executor.reducer.discard(unit)
            unit.progress.forget_calls()

    def abort_in_progress(self) -> None:
        """Forget a forward or backward that died half way, and free what it held."""
        executor, planner = self._executor, self._executor.planner
        for unit in executor.units.all():
            unit.exposure.writable = False
        executor.backward.stop()
        self._joined.clear()
        executor.reducer.abort()
        executor.abort_gathers()
        for number in planner.running.units():
            broken = executor.units.get(number)
            if broken is not None:
                executor.uninstall(broken)
                broken.progress.clear()
        executor.execute(planner.abort())
        for unit in executor.backward.units.values():
            for group in unit.groups:
                group.take_gradients()
        executor.reducer.forget(executor.backward.units)
        executor.backward.units.clear()

    def start_over(self) -> None:
        """An interrupt came between any two lines. What it left is not believed: all units hold nothing then."""
        executor = self._executor
        if executor.reducer.decided is not None:
            executor.end_backward()
        gone = [unit for unit in executor.units.all() if executor.reducer.is_undelivered(unit)]
        if executor.backward.underway:
            gone += self._warn_of_backward()
        elif gone:
            names = ", ".join(f"'{unit.name}'" for unit in gone)
            warnings.warn(f"an interrupt came while gradients of {names} were reduced: they are discarded", stacklevel=3)
        executor.backward.stop()
        self._joined.clear()
        executor.reducer.abort()
        executor.communicator.order_behind_lanes()
        executor.drop_everything()
        for unit in gone:
            executor.reducer.discard(unit)
        executor.planner.start_over()
        executor.backward.units.clear()
        self.interrupted = False

    def _warn_of_backward(self) -> list[Unit]:
        """Say that a backward raised; the units of which it is to discard also what earlier ones of the step left."""
        executor = self._executor
        names = ", ".join(f"'{unit.name}'" for unit in executor.backward.units.values()) or "no unit"
        step = self._units_of_step()
        kept = (
            executor.reducer.merged
            or any(group.grads.deferred is not None for unit in step for group in unit.groups)
            or any(parameter.local_grad is not None for unit in step for parameter in unit.parameters)
        )
        also = ", and with them what earlier backwards of the step had kept without communication" if kept else ""
        warnings.warn(
            f"the last backward raised after it had reached {names}: the gradients of that backward are discarded{also}",
            stacklevel=3,
        )
        return step if kept else []  # of a sum that is part way, all or nothing

    def _units_of_step(self) -> list[Unit]:
        """The units that the running backward reached, those below them, and those whose backward was still to come."""
        executor = self._executor
        found = dict(executor.backward.units)
        for unit in executor.backward.units.values():
            for module in (inner for root in unit.modules for inner in root.modules()):
                below = unit_of(module)
                if below is not None:
                    found[below.number] = below
        for number in executor.planner.pending.units():
            waiting = executor.units.get(number)
            if waiting is not None:
                found[number] = waiting
        return list(found.values())


__all__ = ["Recovery"]
