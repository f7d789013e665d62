"""`FSDPModule.set_all_reduce_hook`: a function that is called with each reduced flat gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fullshard.core import require_unit
from fullshard.frontend.module import FSDPModule, configure_reductions, sharded_method


@sharded_method
def set_all_reduce_hook(self: FSDPModule, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
    """Set a hook that is called with each reduced flat gradient of this unit, once per parameter group.

    The hook may modify the gradient in place, for example by an all-reduce over further replicas. It runs after the
    reduce-scatter and the all-reduce over replicas, on the reduction stream or on `stream`. The order of the calls is
    equal on all ranks.

    Args:
        hook: called with a 1-D tensor in the reduce dtype, the gradient of this rank's flat shard; None removes the hook.
        stream: the stream to call `hook` on, on the device of the mesh; None is the reduction stream.

    Raises:
        ValueError: if `hook` is not callable, or if a stream is given for a CPU mesh.
    """
    if hook is not None and not callable(hook):
        raise ValueError(f"set_all_reduce_hook takes a callable or None, got {type(hook).__name__}.")
    if stream is not None and require_unit(self).runtime.communicator.async_device is None:
        raise ValueError("set_all_reduce_hook got a stream, but the mesh of this unit is on the CPU. Omit `stream`.")
    configure_reductions(self, False, hook=hook, hook_stream=stream)
