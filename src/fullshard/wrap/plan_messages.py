"""What the units of a plan send on so many ranks, and what it costs in memory: by the layouts that training uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fullshard.policies import (
    DIRECT_MIN_BYTES,
    UNSET_GRAD_DTYPE,
    CommPolicy,
    Dtypes,
    GradDtype,
    MixedPrecisionPolicy,
)
from fullshard.sharding.layout import (
    LEAST_CHUNK,
    LEAST_MESSAGE,
    WORTH_MESSAGE,
    DirectRule,
    GroupLayout,
    plan_layout,
    staging_limit,
)
from fullshard.wrap.tables import aligned, bytes_text, span


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One parameter of a model."""

    name: str  # qualified
    numel: int
    nbytes: int
    trainable: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad_dtype: GradDtype = UNSET_GRAD_DTYPE


@dataclass(frozen=True, slots=True)
class UnitMessages:
    """The messages of one unit. Bytes are those of all ranks' chunks together, which is what each rank needs room for.

    Args:
        gathered: messages per gather.
        full: bytes of the full parameters, in the dtype that is computed in.
        direct: of these, bytes that arrive where they are used, without a copy.
        summed: bytes of parameters with so few rows that they are gathered by a sum; in `full`.
        gather_staging: bytes of memory that a gather needs besides.
        reduced: messages per reduction.
        reduce_staging: bytes of memory that a reduction needs besides the gradients.
        kept: bytes of gradients that a backward without communication (`accumulate()`) keeps on each rank.
    """

    gathered: int
    full: int
    direct: int
    summed: int
    gather_staging: int
    reduced: int
    reduce_staging: int
    kept: int


def messages_of(
    entries: Sequence[PlanEntry], ranks: int, mp: MixedPrecisionPolicy, direct_min_bytes: float | None
) -> UnitMessages:
    """Those of a unit that holds `entries`, cut along dim 0."""
    groups: dict[tuple[Dtypes, bool], list[PlanEntry]] = {}
    for entry in entries:
        groups.setdefault((mp.for_planning().resolve(entry.dtype, entry.grad_dtype), entry.trainable), []).append(entry)
    rule = DirectRule.by_default(DIRECT_MIN_BYTES) if direct_min_bytes is None else DirectRule(direct_min_bytes)
    parts = [_of_group(members, ranks, dtypes, trainable, rule) for (dtypes, trainable), members in groups.items()]
    return UnitMessages(*(sum(column) for column in zip(*parts))) if parts else UnitMessages(0, 0, 0, 0, 0, 0, 0, 0)


def _of_group(
    members: Sequence[PlanEntry], ranks: int, dtypes: Dtypes, trainable: bool, rule: DirectRule
) -> tuple[int, int, int, int, int, int, int, int]:
    shapes = [entry.shape or (1,) for entry in members]
    itemsize, reduced = dtypes.compute.itemsize, dtypes.reduce.itemsize
    layout = plan_layout(shapes, ranks=ranks, itemsize=min(dtypes.storage.itemsize, itemsize), direct=rule)
    found = layout.reduction(as_is=dtypes.compute == dtypes.reduce, in_order=True, itemsize=reduced)
    direct = sum(place.size for place in layout.places if place.direct) * ranks
    packed = 0 if layout.packed is None else layout.packed.size * ranks
    slices = max((sum(part.size for part in message) * ranks for message in found.slices), default=0)
    sums = max((sum(part.size for part in message) for message in found.sums), default=0)
    staging = (0 if found.packed is None else found.packed.size * ranks) + slices + sums
    kept = sum(entry.numel for entry in members) * reduced
    return (
        bool(layout.buckets) + bool(layout.summed),
        layout.full_numel * itemsize,
        direct * itemsize,
        _summed(layout) * itemsize,
        packed * itemsize,
        *((found.messages, staging * reduced, kept) if trainable else (0, 0, 0)),
    )


def _summed(layout: GroupLayout) -> int:
    return layout.summed_region[1] if layout.summed else 0


class PlannedMessages:
    """The messages of each unit of a plan; print it for a table.

    Args:
        units: (name, messages) of each, in the order of the plan.
        thresholds: the last line of the table.
    """

    def __init__(self, units: Sequence[tuple[str, UnitMessages]], thresholds: str) -> None:
        self.units, self.thresholds = tuple(units), thresholds

    def __iter__(self) -> Iterator[tuple[str, UnitMessages]]:
        return iter(self.units)

    def __str__(self) -> str:
        titles = ("unit", "full", "gather", "direct", "summed", "staging", "reduction", "staging", "kept by accumulate()")
        rows: list[tuple[str, ...]] = [titles]
        for one, alike in itertools.groupby(self.units, key=lambda unit: unit[1]):
            names = [name for name, _ in alike]
            name = names[0] if len(names) == 1 else span(names[0], names[-1])
            sizes = [
                bytes_text(n) for n in (one.full, one.direct, one.summed, one.gather_staging, one.reduce_staging, one.kept)
            ]
            rows.append((name, sizes[0], str(one.gathered), *sizes[1:4], str(one.reduced), *sizes[4:]))
        return "\n".join([*aligned(rows, right=set(range(1, 9))), self.thresholds])


def thresholds(ranks: int, comm: CommPolicy) -> str:
    """Which parameters travel directly, in words."""
    told = comm.direct_min_bytes
    if told == float("inf"):
        return f"on {ranks} ranks everything is packed: direct_min_bytes=inf"
    if told is not None:
        return f"on {ranks} ranks parameters of at least {bytes_text(told)} per rank are direct: direct_min_bytes={told}"
    per_rank, whole, least, chunk, limit = map(
        bytes_text, (DIRECT_MIN_BYTES, WORTH_MESSAGE, LEAST_MESSAGE, LEAST_CHUNK, staging_limit(0))
    )
    return (
        f"on {ranks} ranks parameters are direct from {per_rank} per rank or {whole} in all, and from {least} (and {chunk} per "
        f"rank) while more than {limit} and a tenth of the unit would be packed"
    )


__all__ = ["PlanEntry", "PlannedMessages", "UnitMessages", "messages_of", "thresholds"]
