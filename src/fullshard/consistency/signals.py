"""SIGUSR1, by which somebody asks a running program where its ranks are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fullshard import _torch


class SignalListener:
    """Hears of SIGUSR1, unless somebody else listens to it already.

    A thread that waits for a message runs no handlers; the number of the signal arrives through a pipe meanwhile.
    """

    def __init__(self) -> None:
        self._reader: int | None = None
        self._writer: int | None = None
        self._ask: Callable[[], None] = _nothing

    def listen(self, ask: Callable[[], None]) -> None:
        """`ask`: called by the handler where the pipe is not there, or is somebody else's by then."""
        self._ask = ask
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
        """In the main thread, once it runs Python again: if the pipe is still ours, the watchdog knows already."""
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current)
        if self._writer is None or current != self._writer:
            self._ask()

    @property
    def files(self) -> Sequence[int]:
        """What can be read when a signal came."""
        return () if self._reader is None else (self._reader,)

    def take(self) -> bool:
        """Whether the signal came since this was asked last."""
        if self._reader is None:
            return False
        try:
            return signal.SIGUSR1 in os.read(self._reader, 4096)
        except BlockingIOError:
            return False

    def end(self) -> None:
        """The program ends: Python gives the signal back to the system then, which would end the process."""
        if signal.getsignal(signal.SIGUSR1) == self._on_signal:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def forget(self) -> None:
        """In a forked process: the pipe is the parent's."""
        if self._writer is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._reader = self._writer = None


def _nothing() -> None:
    pass


__all__ = ["SignalListener"]
