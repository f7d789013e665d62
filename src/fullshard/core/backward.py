"""The backward in progress: the units that it entered, its end, and whether it raised."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial

from fullshard import _torch
from fullshard.core.unit import Unit
from fullshard.errors import StateError

PATIENCE = 10.0  # seconds that a thread of the autograd engine may take to drop a backward that raised


class RunningBackward:
    """The outermost backward that entered a unit.

    autograd's engine holds the only reference to the callback at its end. If that is deleted without having run, the backward
    raised.

    On an accelerator the engine runs nodes on its own threads. One of them may hold that reference for a moment after the
    caller has caught the exception, so `has_raised` waits for it.
    """

    def __init__(self, on_raised: Callable[[], None]) -> None:
        """`on_raised`: called as soon as the backward raises; it must not start collectives."""
        self._on_raised = on_raised
        self._end: weakref.ref[Callable[[], None]] | None = None

        # A backward has begun and not ended, even if it raised; it raised, so that it will never end.
        self.underway = self.raised = False

        # Parameters get gradients in it, as far as it is known. Then every unit that it enters from then on is reduced. False
        # until then, and in a backward that reaches inputs only.
        self.collects = False

        # The units that it entered, by number, and the numbers of those of which no parameter gets a gradient.
        self.units: dict[int, Unit] = {}
        self.passed: set[int] = set()

    def begin(self, leave: Callable[[], None]) -> None:
        """Begin a backward. The engine calls `leave` when it ends."""
        end = partial(leave)
        self._end = weakref.ref(end, self.mark_raised)
        self.underway, self.raised = True, False
        _torch.on_backward_end(end)

    def has_raised(self) -> bool:
        """Return True if the backward raised, after the engine has dropped it.

        Raises StateError if it still runs on another thread after `PATIENCE` seconds.
        """
        if self.underway and not self.raised and _torch.current_graph_task() == -1:
            limit = time.monotonic() + PATIENCE
            while not self.raised:
                if time.monotonic() > limit:
                    names = ", ".join(f"'{unit.name}'" for unit in self.units.values())
                    raise StateError(
                        f"A unit was used while a backward of another thread runs, which has reached {names}. Use the units of "
                        "a device from one thread at a time, and begin a forward after backward() has returned."
                    )
                time.sleep(1e-4)  # let the thread run that holds the callback
        return self.raised

    def mark_raised(self, _: object = None) -> None:
        """Record that the backward, or its end, raised."""
        self._end = None  # an exception keeps the caller's frame alive, and with it the callback
        try:
            self._on_raised()
        finally:
            self.raised = True  # last, since another thread may be waiting for it

    def stop(self) -> None:
        """End the backward, but keep the units that it entered."""
        self._end = None  # without the reference its callback is not called
        self.underway = self.raised = self.collects = False
        self.passed.clear()
