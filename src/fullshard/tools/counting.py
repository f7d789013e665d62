"""`counting` and `stats`: the collectives of a block of code, and counts of all-gathers so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import nn

from fullshard.core import Message, Stats
from fullshard.frontend.module import any_unit, units_by_runtime


@contextmanager
def counting(module: nn.Module) -> Iterator[list[Message]]:
    """Record the collectives and copies that the runtimes of `module` start inside the block, in order.

    Args:
        module: a sharded module, or a module that contains sharded modules.

    Yields:
        A list. Each collective or copy of any unit on the same device and thread appends one `Message`.

    Raises:
        StateError: if there is no unit at or below `module`.

    Example:
        >>> with counting(model) as messages:                                                 # doctest: +SKIP
        ...     model(batch).sum().backward()
        >>> sum(message.nbytes for message in messages if message.kind == "all_gather")       # doctest: +SKIP
    """
    messages: list[Message] = []
    with ExitStack() as counters:
        for runtime in units_by_runtime(module):
            counters.enter_context(runtime.communicator.traffic.counting(messages))
        yield messages


def stats(module: nn.Module) -> Stats:
    """Return counts of the all-gathers and prefetches so far, of all units of the runtime of `module`.

    Args:
        module: a sharded module, or a module that contains sharded modules.

    Returns:
        Counts: all-gathers, prefetched all-gathers, prefetches that no forward or backward used, and missed prefetches.

    Raises:
        StateError: if there is no unit at or below `module`.
    """
    unit = any_unit(module)
    return replace(unit.runtime.scheduler.stats)
