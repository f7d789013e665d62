"""Sizes of units, and remarks on those that determine the peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from fullshard.core import Unit

_LARGE = 1_000_000  # elements; smaller amounts are not worth a remark


def sizes_of(units: Iterable[Unit]) -> list[tuple[str, int]]:
    """Return the name of each unit, and the number of elements that are unsharded with it."""
    return [(unit.name, sum(parameter.sharding.local_shape.numel() for parameter in unit.parameters)) for unit in units]


def remarks_on_root(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Return a remark if the outermost unit, the first one in `sizes` (name, elements), has most of the parameters."""
    (root, numel), total = sizes[0], sum(numel for _, numel in sizes)
    if len(sizes) == 1 or numel <= total / 2 or numel < _LARGE:
        return []
    return [
        f"Unit '{root}' stays unsharded from its forward to the end of its backward, and has {numel / total:.0%} of the "
        "parameters. Call fully_shard() on its large parts first, or shard_model(), which chooses them."
    ]


def remarks_on_sizes(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Return remarks on units that are so large that they determine the peak memory; `sizes` as in `remarks_on_root`."""
    found = remarks_on_root(sizes)
    middle = median(numel for _, numel in sizes) if len(sizes) > 3 else float("inf")
    for name, numel in sizes[1:]:
        if numel > 8 * middle and numel >= _LARGE:
            found.append(
                f"Unit '{name}' has {numel:,} elements, {numel / max(middle, 1):.0f} times the median of the units, so it "
                "determines the peak memory. Call fully_shard() on parts of it."
            )
    return found
