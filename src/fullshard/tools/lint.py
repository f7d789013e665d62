"""Remarks on a sharded model, on demand: memory that is wasted, and parameters that each rank trains alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fullshard import ext
from fullshard.core import Unit, clean_name, is_ignored, unit_of, units_of
from fullshard.errors import StateError, some_of
from fullshard.wrap.sizes import remarks_on_sizes, sizes_of


def lint(model: nn.Module) -> list[str]:
    """Return remarks on a sharded model that wastes memory or trains wrongly.

    They are on units that determine the peak memory, padding, parameters that no unit reduces (added later, or in
    `ignored_params`), and all-gathers that were not prefetched in the steps so far. Nothing is sent.

    Args:
        model: a model with sharded modules.

    Returns:
        Remarks of one line each, with the remedy; empty if there is nothing to say.

    Raises:
        StateError: if there is no sharded module in `model`.

    Example:
        >>> for remark in fullshard.lint(model):                                              # doctest: +SKIP
        ...     print(remark)
    """
    units = units_of(model, True)
    if not units:
        raise StateError(f"{type(model).__name__} contains no sharded module. Call fully_shard() first.")
    sizes = sizes_of(units)
    if unit_of(model) is None:
        sizes.insert(0, ("", 0))  # the outermost unit has nothing
    return [*remarks_on_sizes(sizes), *_padding(units), *_unreduced(model, units), *_prefetches(units[0])]


def _padding(units: list[Unit]) -> Iterator[str]:
    """Yield remarks on units whose padding is more than a tenth of their parameters."""
    for unit in units:
        groups = [group for group in unit.groups if group.flat]
        real = sum(parameter.sharding.local_shape.numel() for group in groups for parameter in group.parameters)
        padded = sum(group.layout.shard_numel * group.layout.ranks for group in groups)
        if real and padded - real > max(real // 10, 1_000_000):
            yield (
                f"Unit '{unit.name}' is padded by {padded / real - 1:.0%}, since its parameters have few rows for "
                f"{unit.axis.ranks} ranks. Shard them along another dim with shard_placement_fn."
            )


def _unreduced(model: nn.Module, units: list[Unit]) -> Iterator[str]:
    """Yield remarks on trainable parameters whose gradients no unit reduces: each rank trains its own copy."""
    for unit in units:
        if unit.axis.ranks * unit.axis.replica_count > 1 and (added := ext.remarks.added_parameters(unit)):
            yield (
                f"Parameters ({some_of(list(added))}) were added to unit '{unit.name}' after fully_shard(), so each rank "
                "trains them alone. Add them before, or call fully_shard() on the module that holds them."
            )
    ignored = [clean_name(name) for name, p in model.named_parameters() if is_ignored(p) and p.requires_grad]
    if ignored:
        yield (
            f"Ignored parameters ({some_of(ignored)}) are trainable, but no unit reduces their gradients, so each rank trains "
            "its own copy. Average their gradients after backward."
        )


def _prefetches(unit: Unit) -> Iterator[str]:
    """Yield a remark if many all-gathers were not prefetched, since the order of the units keeps changing."""
    stats = unit.runtime.scheduler.stats
    if stats.gathers >= 50 and stats.missed > stats.gathers / 5:
        yield (
            f"{stats.missed} of {stats.gathers} all-gathers were not prefetched, since units ran in another order than before, "
            "and compute waited for them. Name the next modules with set_modules_to_forward_prefetch()."
        )
