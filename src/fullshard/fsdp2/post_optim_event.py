"""`FSDPModule.set_post_optim_event`: an event of an optimizer's stream, for the next all-gathers to wait for."""

from __future__ import annotations

import torch

from fullshard.frontend.module import FSDPModule, sharded_method, units_by_runtime


@sharded_method
def set_post_optim_event(self: FSDPModule, event: torch.Event) -> None:
    """Set an event, recorded after the optimizer step, for the next forward or `unshard()` to wait for. It is used once.

    Set it if the optimizer steps on a separate stream. The all-gathers wait for the current stream too, since they write
    to its memory. The optimizer may read gradients until the event: call `zero_grad()` after that forward, since the
    allocator reuses freed memory on the current stream at once.

    Args:
        event: a torch.Event (or a device event such as torch.cuda.Event) that was recorded after `optimizer.step()`.

    Raises:
        ValueError: if it has no `wait()`, or the mesh is on the CPU, which has no streams.
        StateError: if there is no unit at or below this module.
    """
    communicators = [runtime.communicator for runtime in units_by_runtime(self)]
    if all(communicator.async_device is None for communicator in communicators):
        raise ValueError("set_post_optim_event got an event, but the mesh is on the CPU, which has no streams.")
    if not callable(getattr(event, "wait", None)):
        raise ValueError(f"set_post_optim_event takes a torch.Event, got {type(event).__name__}.")
    for communicator in communicators:
        if communicator.async_device is not None:
            communicator.next_event = event
