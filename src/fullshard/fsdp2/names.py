"""Names of FSDP2 without an effect of their own, since fullshard always does what they ask for."""

from __future__ import annotations

from torch import nn

from fullshard.errors import check_bool
from fullshard.frontend.module import FSDPModule, any_unit, numbers_of, sharded_method


@sharded_method
def set_reduce_scatter_unused_params(self: FSDPModule, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
    """Reduce zeros for the unused parameters of a rank. fullshard always does, so all ranks run the same collectives.

    Args:
        reduce_scatter_unused_params: True or False. It has no effect.
        recurse: True or False. It has no effect.

    Raises:
        StateError: if there is no unit at or below this module.
    """
    any_unit(self)
    check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
    check_bool("recurse", recurse)


@sharded_method
def set_reduce_scatter_divide_factor(self: FSDPModule, factor: float) -> None:
    """Set the factor to divide reduced gradients by: FSDP2's deprecated name of `set_gradient_divide_factor`.

    Args:
        factor: a finite number above 0.

    Raises:
        ValueError: for any other factor.
    """
    self.set_gradient_divide_factor(factor)


@sharded_method
def _set_unshard_async_op(self: FSDPModule, async_op: bool) -> None:
    """Set whether all-gather memory comes from the compute stream, with async collectives. fullshard always does this."""
    any_unit(self)
    check_bool("async_op", async_op)


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Share streams and execution order among root modules. All units of a device and thread do, so it only checks `modules`.

    Args:
        modules: a list of modules that `fully_shard` was called on.

    Raises:
        ValueError: for anything else.

    Source: `torch.distributed.fsdp.share_comm_ctx`.
    """
    numbers_of(modules)
