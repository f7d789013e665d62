"""Predict the collectives of each unit of a plan, and their memory, from the same layouts that training uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace

import torch

from fullshard.core import (
    LARGE_MESSAGE,
    MIN_CHUNK,
    MIN_MESSAGE,
    DirectRule,
    GroupLayout,
    plan_layout,
    staging_limit,
)
from fullshard.policies import (
    DIRECT_MIN_BYTES,
    CommPolicy,
    Dtypes,
    GradDtype,
    MixedPrecisionPolicy,
    StateSharding,
)
from fullshard.wrap.tables import aligned, bytes_text, span

_LEAST_PADDING = 1 << 20  # bytes of a unit's padding from which there is a remark, if they are more than a tenth of the unit


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One parameter of a model."""

    name: str  # qualified
    numel: int
    nbytes: int
    trainable: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad_dtype: GradDtype


@dataclass(frozen=True, slots=True)
class UnitMessages:
    """The collectives of one unit. Bytes include the chunks of all ranks, padding too, because each rank allocates all of them.

    Args:
        gathered: number of collectives per all-gather of the unit.
        full: bytes of the unsharded parameters, in the compute dtype.
        direct: bytes of `full` that are received in their final place, without a copy.
        padding: bytes of `full` that are no parameter: ranks have equal chunks of whole rows.
        gather_staging: bytes of additional memory during an all-gather.
        reduced: number of collectives per reduction of the unit.
        reduce_staging: bytes of additional memory during a reduction, besides the gradients.
        kept: bytes of gradients that a backward without communication (`accumulate()`) keeps on each rank.
        gathers: how often the unit is all-gathered in a step: "2 per microbatch", "1 per step" or "never". A level that shards
            over replicas adds "1 per step over replicas".
        reductions: how often its gradients are reduced in a step, in the same words.
    """

    gathered: int
    full: int
    direct: int
    padding: int
    gather_staging: int
    reduced: int
    reduce_staging: int
    kept: int
    gathers: str = ""
    reductions: str = ""


def frequencies(messages: UnitMessages, states: StateSharding, *, kept_after_forward: bool) -> UnitMessages:
    """Return the collectives of a unit with `gathers` and `reductions` filled in, for a level of ZeRO."""
    gathers = "1 per step" if states.keeps_parameters else f"{1 if kept_after_forward else 2} per microbatch"
    reductions = "1 per step" if states.keeps_gradients else "1 per microbatch"
    if states.shards_over_replicas:
        gathers += ", 1 per step over replicas"
        reductions += f", 1 per {'step' if states.sums_over_shards else 'microbatch'} over replicas"
    return replace(
        messages,
        gathers=gathers if messages.gathered else "never",
        reductions=reductions if messages.reduced else "never",
    )


@dataclass(frozen=True, slots=True)
class EntryGroup:
    """The planned parameters of one parameter group."""

    dtypes: Dtypes
    trainable: bool
    scalar: bool  # scalars are not sharded: they are a group of one rank, and all ranks are its replicas
    replicated: bool  # True under HFSDP for parameters with few rows, which are not sharded over replicas
    entries: tuple[PlanEntry, ...]

    def layout(self, ranks: int, direct: DirectRule, dims: Mapping[str, int], *, outer: int = 1) -> GroupLayout:
        """Plan the layout. `dims`: by parameter, the sharded dim, if that is not 0. The others: see `plan_layout`."""
        return plan_layout(
            [entry.shape or (1,) for entry in self.entries],
            [dims.get(entry.name, 0) for entry in self.entries],
            ranks=ranks,
            itemsize=min(self.dtypes.storage.itemsize, self.dtypes.compute.itemsize),
            direct=direct,
            outer=outer,
        )


def group_entries(
    entries: Sequence[PlanEntry], mp: MixedPrecisionPolicy, replicated: Callable[[PlanEntry], bool] | None = None
) -> list[EntryGroup]:
    """Group the planned parameters of a unit as `group_parameters` will group its parameters.

    `replicated`: whether a parameter stays replicated, for a level that shards over replicas; else None.
    """
    groups: dict[tuple[Dtypes, bool, bool, bool], list[PlanEntry]] = {}
    for entry in entries:
        dtypes = mp.for_planning().resolve(entry.dtype, entry.grad_dtype)
        stays = replicated is not None and replicated(entry)
        groups.setdefault((dtypes, entry.trainable, not entry.shape, stays), []).append(entry)
    return [EntryGroup(*key, tuple(members)) for key, members in groups.items()]


def messages_of(
    entries: Sequence[PlanEntry], ranks: int, mp: MixedPrecisionPolicy, direct_min_bytes: float | None
) -> UnitMessages:
    """Return the collectives of a unit with the parameters `entries`, sharded along dim 0.

    Args:
        entries: parameters of the unit.
        ranks: number of ranks.
        mp: dtypes.
        direct_min_bytes: bytes per rank from which a parameter is direct; None for the defaults.
    """
    rule = DirectRule.of(direct_min_bytes, DIRECT_MIN_BYTES)
    groups = [_messages_of_group(group, ranks, rule) for group in group_entries(entries, mp)]
    names = [field.name for field in fields(UnitMessages) if field.default is MISSING]  # the numbers; texts are filled in later
    return UnitMessages(**{name: sum(getattr(group, name) for group in groups) for name in names})


def _messages_of_group(group: EntryGroup, ranks: int, rule: DirectRule) -> UnitMessages:
    dtypes, itemsize, trainable = group.dtypes, group.dtypes.compute.itemsize, group.trainable
    numel, layout = sum(entry.numel for entry in group.entries), group.layout(1 if group.scalar else ranks, rule, {})
    # Of scalars: nothing to all-gather, and one all-reduce of the gradients over all ranks.
    found = UnitMessages(
        gathered=0,
        full=layout.unsharded_numel * itemsize,
        direct=0,
        padding=(layout.unsharded_numel - numel) * itemsize,
        gather_staging=0,
        reduced=int(trainable and ranks > 1),
        reduce_staging=0,
        kept=numel * dtypes.kept.itemsize * trainable,
    )
    if group.scalar:
        return found
    # in_order: as on nccl. On gloo, gradients are not reduced in slices.
    reduction = layout.reduction(as_is=dtypes.reduces_as_is, in_order=True, itemsize=dtypes.reduce.itemsize)
    slices = max((sum(part.size for part in message) * ranks for message in reduction.slices), default=0)
    reduce_staging = (0 if reduction.packed is None else reduction.packed.size * ranks) + slices
    if dtypes.reduce is torch.float16 and ranks > 1:  # direct gradients are copied, to be divided before the sum
        reduce_staging += ranks * sum(layout.offsets[index].size for index in reduction.direct)
    return replace(
        found,
        gathered=int(bool(layout.buckets)),
        direct=sum(place.size for place in layout.offsets if place.direct) * ranks * itemsize,
        gather_staging=0 if layout.packed is None else layout.packed.size * ranks * itemsize,
        reduced=reduction.messages * trainable,
        reduce_staging=reduce_staging * dtypes.reduce.itemsize * trainable,
    )


class PlannedMessages:
    """The collectives of each unit of a plan; print it for a table.

    Args:
        units: (name, `UnitMessages`) of each unit, in the order of the plan.
        thresholds: the last line of the table.
    """

    def __init__(self, units: Sequence[tuple[str, UnitMessages]], thresholds: str) -> None:
        self.units, self.thresholds = tuple(units), thresholds

    def __iter__(self) -> Iterator[tuple[str, UnitMessages]]:
        return iter(self.units)

    def __str__(self) -> str:
        titles = (
            *("unit", "full", "gather", "all-gathers", "direct", "padding", "staging"),
            *("reduction", "reductions", "staging", "kept by accumulate()"),
        )
        rows: list[tuple[str, ...]] = [titles]
        for one, equal_units in itertools.groupby(self.units, key=lambda unit: unit[1]):
            names = [name for name, _ in equal_units]
            name = names[0] if len(names) == 1 else span(names[0], names[-1])
            sizes = [
                bytes_text(n) for n in (one.full, one.direct, one.padding, one.gather_staging, one.reduce_staging, one.kept)
            ]
            gathers, reductions = (str(one.gathered), one.gathers), (str(one.reduced), one.reductions)
            rows.append((name, sizes[0], *gathers, *sizes[1:4], *reductions, *sizes[4:]))
        padded = [name for name, one in self.units if one.padding > max(one.full // 10, _LEAST_PADDING)]
        more = f" and {len(padded) - 1} more units" if len(padded) > 1 else ""
        remarks = (
            [f"parameters of '{padded[0]}'{more} have few rows: shard another dim with shard_placement_fn"] if padded else []
        )
        return "\n".join([*aligned(rows, right=set(range(1, 11))), self.thresholds, *remarks])


def thresholds(ranks: int, comm: CommPolicy) -> str:
    """Describe the sizes from which parameters are direct, for the last line of the table."""
    direct_min_bytes = comm.direct_min_bytes
    if direct_min_bytes == float("inf"):
        return f"on {ranks} ranks everything is packed: direct_min_bytes=inf"
    if direct_min_bytes is not None:
        least = bytes_text(direct_min_bytes)
        return f"on {ranks} ranks parameters of at least {least} per rank are direct: direct_min_bytes={direct_min_bytes}"
    per_rank, whole, least, chunk, limit = map(
        bytes_text, (DIRECT_MIN_BYTES, LARGE_MESSAGE, MIN_MESSAGE, MIN_CHUNK, staging_limit(0))
    )
    return (
        f"on {ranks} ranks parameters are direct from {per_rank} per rank or {whole} in all, and from {least} (and {chunk} per "
        f"rank) while more than {limit} and a tenth of the unit would be packed"
    )
