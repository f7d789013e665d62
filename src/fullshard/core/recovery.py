"""Recovery: cleans up after an exception or an interrupt (Ctrl-C), before the next event or public call begins."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fullshard import _torch
from fullshard.core.sharded_tensor import restore_subclass
from fullshard.core.unit import Unit
from fullshard.core.unit_modules import unit_of

if TYPE_CHECKING:
    from fullshard.core.runtime import Runtime


class Recovery:
    """Cleans up after a failed step, so that the next forward is right.

    Events are module hooks, autograd hooks and the callback at the end of a backward. Waits are `CollectiveCall.wait`.

    Three things can go wrong. A backward raises, or a forward ends without its post-forward hook: the next event finds that and
    aborts the step (`abort_in_progress`). Or an interrupt (Ctrl-C) breaks off an event or a wait at an arbitrary line, which
    sets the flag `Communicator.interrupted`: all unsharded state is discarded (`start_over`). The start of each forward and
    backward of a unit checks this flag, and so does every public call on a unit, since it obtains the unit through
    `require_unit`, `units_of` or `recovered`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def note_interrupt(self, failure: BaseException) -> None:
        """Set the flag if `failure`, which breaks off an event, is an interrupt (KeyboardInterrupt, SystemExit)."""
        if not isinstance(failure, Exception):
            self._runtime.communicator.interrupted = True

    def recover(self) -> None:
        """Clean up if the last event or wait was interrupted, or the last backward raised."""
        if self._runtime.communicator.interrupted:
            self.start_over()
        runtime = self._runtime
        if not runtime.backward.has_raised():
            return
        gone = self._warn_of_backward()
        self.abort_in_progress()
        for unit in gone:
            runtime.reducer.discard(unit)

    def abort_if_left(self, unit: Unit) -> None:
        """Abort the step if a forward of the unit ended without its post-forward hook.

        Then the scheduler has a forward of the unit in progress, but no module of the unit is in a call on this thread's Python
        stack.
        """
        if self._runtime.scheduler.is_running(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self.abort_in_progress()

    def forget_step(self, unit: Unit) -> None:
        """Abort a broken step as the next forward of the unit would, and discard the unit's gradients not in `.grad` yet."""
        self.recover()
        self.abort_if_left(unit)
        self._runtime.reducer.discard(unit)

    def abort_step(self) -> None:
        """Do this rank's part of aborting the step on all ranks (see `any_failed`).

        Abort it, forget the recorded execution orders, and discard the gradients that are not in `.grad` yet.
        """
        if self._runtime.communicator.interrupted:
            self.start_over()
        restore_subclass()
        runtime = self._runtime
        self._abort(runtime.all_units())
        runtime.reducer.drop_heartbeats()
        runtime.scheduler.reset_orders()
        for unit in runtime.all_units():
            runtime.reducer.discard(unit)

    def abort_in_progress(self) -> None:
        """Abort a forward or backward that failed half way, and free its memory. Other models go on."""
        self._abort(self._broken_units())

    def _broken_units(self) -> list[Unit]:
        runtime = self._runtime
        numbers = runtime.scheduler.broken_units(runtime.backward.units)
        return [unit for number in sorted(numbers) if (unit := runtime.unit(number)) is not None]

    def _abort(self, broken: Sequence[Unit]) -> None:
        runtime, scheduler = self._runtime, self._runtime.scheduler
        numbers = {unit.number for unit in broken}
        for unit in broken:
            # so that freeing the unsharded parameters does not raise because the user wrote to one
            unit.exposure.writable = False
        runtime.backward.stop()
        runtime.joined.drop(numbers)
        runtime.reducer.abort()
        runtime.abort_gathers(numbers)
        for number in scheduler.running_units():
            running = runtime.unit(number)
            if running is not None:
                running.uninstall()
                running.progress.clear()
        runtime.run(scheduler.abort(numbers))
        for unit in runtime.backward.units.values():
            for group in unit.groups:
                group.drop_gradients()
        runtime.reducer.forget(runtime.backward.units)
        runtime.backward.units.clear()

    def start_over(self) -> None:
        """Discard all unsharded state after an interrupt, since no record of it can be trusted."""
        runtime = self._runtime
        if runtime.reducer.decided is not None:
            runtime.commit_gradients()  # the interrupt came while `.grad` was being set: set the rest, too
        gone = [unit for unit in runtime.all_units() if runtime.reducer.is_undelivered(unit)]
        if runtime.backward.underway:
            gone += self._warn_of_backward()
        elif gone:
            names = ", ".join(f"'{unit.name}'" for unit in gone)
            warnings.warn(
                f"An interrupt came while gradients of {names} were being reduced. These gradients are discarded.", stacklevel=3
            )
        runtime.backward.stop()
        runtime.joined.clear()
        runtime.reducer.abort()
        runtime.reducer.drop_heartbeats()
        runtime.communicator.wait_for_all_streams()
        runtime.drop_everything()
        for unit in gone:
            runtime.reducer.discard(unit)
        runtime.scheduler.start_over()
        runtime.reducer.forget(runtime.backward.units)
        runtime.backward.units.clear()
        # Last: if this is interrupted as well, the next event or public call starts over again.
        runtime.communicator.interrupted = False

    def _warn_of_backward(self) -> list[Unit]:
        """Warn that a backward raised.

        Returns:
            The units whose gradients from earlier backwards of the step must be discarded as well.
        """
        runtime = self._runtime
        names = ", ".join(f"'{unit.name}'" for unit in runtime.backward.units.values()) or "no unit"
        step = self._units_of_step()
        kept = (
            runtime.reducer.merged
            or any(group.grads.deferred is not None for unit in step for group in unit.groups)
            or any(parameter.local_grad is not None for unit in step for parameter in unit.parameters)
        )
        also = ", together with the gradients that earlier backwards of the step kept without communication" if kept else ""
        warnings.warn(
            f"The last backward raised after it had reached {names}. The gradients of that backward are discarded{also}.",
            stacklevel=3,
        )
        return step if kept else []  # gradients of a step are all or nothing

    def _units_of_step(self) -> list[Unit]:
        """Return the units that the backward reached or would have reached, and the units below those."""
        runtime = self._runtime
        found = dict(runtime.backward.units)
        for unit in runtime.backward.units.values():
            for module in (inner for root in unit.modules for inner in root.modules()):
                below = unit_of(module)
                if below is not None and below.runtime is runtime:  # numbers are unique in one runtime only
                    found[below.number] = below
        found |= {unit.number: unit for unit in self._broken_units()}
        return list(found.values())


__all__ = ["Recovery"]
