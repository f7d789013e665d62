"""Recovery: after an exception or an interrupt (Ctrl-C), the next event or public call begins from sharded parameters."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fullshard import _torch
from fullshard.core.unit import Unit
from fullshard.core.units import unit_of

if TYPE_CHECKING:
    from fullshard.core.runtime import Runtime


class Recovery:
    """Finds what went wrong since the last event, and has the runtime reset it.

    Events are module hooks, autograd hooks and the callback at the end of a backward. Waits are `CollectiveCall.wait`.

        a backward raised                          found by the next event or call       reset of the models that it reached
        a forward ended without post-forward hook  found by the next outermost forward   reset of the models that ran in it
        an interrupt broke off an event or a wait  sets `Communicator.interrupted`       reset of everything
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def note_interrupt(self, failure: BaseException) -> None:
        """Set the flag if `failure`, which breaks off an event, is an interrupt (KeyboardInterrupt, SystemExit)."""
        if not isinstance(failure, Exception):
            self._runtime.communicator.interrupted = True

    def recover(self) -> None:
        """Reset what was left by an interrupted event or wait, or by a backward that raised."""
        runtime = self._runtime
        if runtime.communicator.interrupted:
            if runtime.reducer.decided is not None:
                runtime.commit_gradients()  # the interrupt came while `.grad` was being set: set the rest, too
            gone = [unit for unit in runtime.all_units() if runtime.reducer.is_undelivered(unit)]
            if runtime.backward.underway:
                gone += self._warn_of_backward()
            elif gone:
                names = ", ".join(f"'{unit.name}'" for unit in gone)
                warnings.warn(
                    f"An interrupt came while gradients of {names} were being reduced. These gradients are discarded.",
                    stacklevel=3,
                )
            runtime.reset(discard=gone)
            # Last: if this is interrupted as well, the next event or public call resets again.
            runtime.communicator.interrupted = False
        elif runtime.backward.has_raised():
            gone = self._warn_of_backward()
            runtime.reset(self._broken_units(), discard=gone)

    def abort_step(self) -> None:
        """Reset everything, as all ranks do that agreed that the step failed, and discard gradients not in `.grad` yet."""
        if self._runtime.communicator.interrupted:
            self.recover()
        self._runtime.reset(discard=self._runtime.all_units())

    def abort_in_progress(self) -> None:
        """Reset the models of a forward that ended without its post-forward hook. Other models go on."""
        self._runtime.reset(self._broken_units())

    def abort_if_left(self, unit: Unit) -> None:
        """Reset the forward of the unit that the scheduler has in progress, if no module of it is on this thread's stack."""
        if self._runtime.scheduler.is_running(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self.abort_in_progress()

    def _broken_units(self) -> list[Unit]:
        runtime = self._runtime
        numbers = runtime.scheduler.broken_units(runtime.backward.units)
        return [unit for number in sorted(numbers) if (unit := runtime.unit(number)) is not None]

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
            stacklevel=4,
        )
        return step if kept else []  # gradients of a step are all or nothing

    def _units_of_step(self) -> list[Unit]:
        """Return the units that the backward reached or would have reached, and the units below those."""
        reached = [*self._runtime.backward.units.values(), *self._broken_units()]
        below = [unit_of(inner) for unit in reached for root in unit.modules for inner in root.modules()]
        return [unit for unit in dict.fromkeys([*reached, *below]) if unit is not None and unit.runtime is self._runtime]


__all__ = ["Recovery"]
