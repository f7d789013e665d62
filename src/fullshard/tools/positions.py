"""`positions`: where this rank is, for a signal handler."""

from __future__ import annotations

import torch.distributed as dist

from fullshard.checks.watchdog import PROCESS


def positions() -> str:
    """Return where this rank is: the collective that it waits in, or its last one, with the unit. For a handler of your own.

    Nothing is sent, and nothing in the process is changed.

    Returns:
        One line for each set of ranks with collectives of its own.

    Example:
        >>> def show(number, frame):
        ...     print(fullshard.positions(), file=sys.stderr, flush=True)
        >>> signal.signal(signal.SIGUSR1, show)                                               # doctest: +SKIP
    """
    watchdog = PROCESS.watchdog
    found = [] if watchdog is None else watchdog.positions()
    rank = "" if watchdog is None else f"rank {dist.get_rank()}: "
    return "\n".join(f"{rank}{text}" for text in found or ["before the first collective"])
