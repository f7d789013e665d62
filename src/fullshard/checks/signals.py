"""SIGUSR1, which requests a report of the state of all ranks of a running program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fullshard import _torch


class SignalListener:
    """Listener for SIGUSR1, unless the program has a handler for it already.

    Python runs signal handlers in the main thread only, and not while that thread waits in C++ for a collective. But Python's
    C handler writes the number of the signal to the wake-up pipe at once, so the watchdog thread reads the pipe.
    """

    def __init__(self) -> None:
        self._reader: int | None = None
        self._writer: int | None = None
        self._report: Callable[[], None] = _nothing

    def listen(self, report: Callable[[], None]) -> None:
        """Install the handler and the pipe. The handler calls `report` if the pipe is missing or replaced by other code."""
        self._report = report
        if threading.current_thread() is not threading.main_thread() or _torch.is_handled(signal.SIGUSR1):
            return
        signal.signal(signal.SIGUSR1, self._on_signal)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before == -1:
            self._reader, self._writer = reader, writer
        else:
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Call `report`, unless the signal went through the pipe, where the watchdog has read it already."""
        # runs in the main thread, once that thread executes Python again
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current)
        if self._writer is None or current != self._writer:
            self._report()

    @property
    def files(self) -> Sequence[int]:
        """File descriptors that are readable after a signal."""
        return () if self._reader is None else (self._reader,)

    def take(self) -> bool:
        """Return True if the signal arrived since the last call."""
        if self._reader is None:
            return False
        try:
            return signal.SIGUSR1 in os.read(self._reader, 4096)
        except BlockingIOError:
            return False

    def end(self) -> None:
        """Ignore the signal: at exit, Python restores the default handler, which would end the process."""
        if signal.getsignal(signal.SIGUSR1) == self._on_signal:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def forget(self) -> None:
        """Drop the pipe in a forked process, because it belongs to the parent."""
        if self._writer is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._reader = self._writer = None


def _nothing() -> None:
    pass


__all__ = ["SignalListener"]
