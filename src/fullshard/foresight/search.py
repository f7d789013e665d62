"""`search()`: which settings fit, which of them is fastest, and the smallest change that fits."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.foresight.explanation import Explanation, answer, explain
from fullshard.foresight.question import Build, Question
from fullshard.foresight.setup import Traced, meta_batch, sizes_of
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.wrap.plan import Plan
from fullshard.wrap.tables import aligned, bytes_text

Goal = Literal["fits", "fastest", "largest_batch", "fewest_gpus"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that was tried.

    Args:
        changes: what differs from the setting that was asked for, by the names of `explain`'s arguments.
        explanation: what a step takes with it.

    Example:
        >>> found.best.changes                                                                # doctest: +SKIP
        {'recompute': 'block'}
    """

    changes: Mapping[str, Any]
    explanation: Explanation

    @property
    def needed(self) -> int:
        """Bytes of the device's memory."""
        return self.explanation.needed

    @property
    def speed(self) -> float:
        """Tokens per second of one GPU."""
        return self.explanation.tokens_per_second

    def __str__(self) -> str:
        return _named(self.changes)


def _named(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in changes.items()) or "as asked for"


def _short(value: Any) -> str:
    if isinstance(value, MixedPrecisionPolicy):
        return f"reduce_dtype {str(value.reduce_dtype).removeprefix('torch.')}"
    if isinstance(value, CommPolicy):
        return f"reductions_in_flight {value.reductions_in_flight}, prefetch_bytes {value.prefetch_bytes}"
    if isinstance(value, Plan):
        return f"{len(value.units)} units"
    if isinstance(value, CPUOffloadPolicy):
        return "CPUOffloadPolicy()"
    return repr(value)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found. Prints as a report.

    Args:
        goal: that was searched for.
        budget: the part of a GPU's memory that may be taken.
        base: what was asked for.
        smallest: the fastest of those that fit by one change, None if none does; `base` itself, if it fits.
        best: by the goal; None if nothing fits.
        tried: all of them.
        skipped: (changes, why) of settings that cannot be.

    Example:
        >>> found = search(build, batch, world=8)                                             # doctest: +SKIP
        >>> print(found.smallest)                                                             # doctest: +SKIP
        recompute='block'
    """

    goal: Goal
    budget: float
    base: Candidate
    smallest: Candidate | None
    best: Candidate | None
    tried: tuple[Candidate, ...]
    skipped: tuple[tuple[Mapping[str, Any], str], ...] = ()

    @property
    def front(self) -> list[Candidate]:
        """Those that no other beats in both memory and speed, the fastest first."""
        found: list[Candidate] = []
        for candidate in sorted(self.tried, key=lambda one: (-one.speed, one.needed)):
            if not found or candidate.needed < found[-1].needed:
                found.append(candidate)
        return found

    def __str__(self) -> str:
        has = self.base.explanation.gpu.memory
        lines = [f"asked for: {_told(self.base)}; {bytes_text(self.budget * has)} of {bytes_text(has)} may be taken"]
        if self.smallest is None:
            lines.append("no single change fits")
        elif self.smallest is not self.base:
            lines.append(f"the smallest change that fits: {_told(self.smallest)}")
        if self.best is None:
            lines.append(
                f"nothing that was tried fits ({len(self.tried)} settings): take more ranks, or a GPU with more memory"
            )
        else:
            lines.append(f"best by goal {self.goal!r}: {_told(self.best)}")
        rows = [("", "memory", "tokens/s", "setting")]
        for candidate in self.front:
            fits = "fits" if self.allows(candidate) else ""
            rows.append((fits, bytes_text(candidate.needed), f"{candidate.speed:,.0f}", str(candidate)))
        lines += ["no other is better in both:", *aligned(rows, right={1, 2})]
        return "\n".join([*lines, *(f"not tried: {_named(changes)}: {why}" for changes, why in self.skipped)])

    def allows(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no more than the budget.

        Args:
            candidate: one of `tried`.

        Returns:
            Whether it does.

        Example:
            >>> found.allows(found.base)                                                      # doctest: +SKIP
            False
        """
        return candidate.needed <= self.budget * candidate.explanation.gpu.memory


def _told(candidate: Candidate) -> str:
    return f"{candidate} ({bytes_text(candidate.needed)}, {candidate.speed:,.0f} tokens/s of each GPU)"


def search(build: Build, batch: Any, *, goal: Goal = "fits", budget: float = 0.92, **told: Any) -> Found:
    """Try settings, and say which fit, which is fastest, and the smallest single change that fits.

    Tried are recomputation (none, every second block, all), microbatches (a half and a quarter of the batch each),
    `reshard_after_forward` (True, False, one machine), a hybrid mesh, reducing in the compute dtype, reductions in flight and
    prefetching, offloading, and units merged in pairs; each alone, and the first four together.

    Args:
        build: as of `explain`.
        batch: as of `explain`.
        goal: "fits", the fastest of the smallest changes that fit; "fastest" of all that fit; "largest_batch", as many rows as
            fit (in powers of two times those of `batch`); "fewest_gpus", as few ranks as fit.
        budget: the part of a GPU's memory that may be taken, more than 0, at most 1.
        **told: the other arguments of `explain`, `world` among them.

    Returns:
        What was found; it prints as a report.

    Raises:
        ValueError: as `explain`, and for a goal or a budget that there is not.

    Example:
        >>> print(search(build, batch, world=8, gpu="a100-40", loss=loss))                    # doctest: +SKIP
    """
    if goal not in get_args(Goal):
        raise ValueError(f"goal must be one of {', '.join(get_args(Goal))}, got {goal!r}")
    if not 0 < budget <= 1:
        raise ValueError(f"budget must be a part of the memory, more than 0 and at most 1, got {budget!r}")
    asked = inspect.signature(explain).bind(build, batch, **told)
    asked.apply_defaults()
    tries = _Tries(Question(**asked.arguments))
    base = tries.run({})
    singles = [one for changes in tries.singles(base) if (one := tries.attempt(changes))]
    several = [one for changes in tries.several() if (one := tries.attempt(changes))]
    found = Found(goal, budget, base, None, None, (base, *singles, *several))
    fitting = [candidate for candidate in singles if found.allows(candidate)]
    smallest = base if found.allows(base) else max(fitting, key=lambda one: one.speed, default=None)
    every = [candidate for candidate in found.tried if found.allows(candidate)]
    fastest = max(every, key=lambda one: one.speed, default=None)
    best = {"fits": smallest or fastest, "fastest": fastest}.get(goal)
    found = replace(found, smallest=smallest, best=best)
    if goal == "largest_batch":
        found = _grown(found, tries)
    if goal == "fewest_gpus":
        found = _shrunk(found, tries)
    return replace(found, skipped=tuple(tries.skipped))


def _grown(found: Found, tries: _Tries) -> Found:
    """Double the rows of the setting that needs least for as long as it fits."""
    start = min(found.tried, key=lambda one: one.needed)
    tried, best = list(found.tried), start if found.allows(start) else None
    changes = {name: value for name, value in start.changes.items() if name not in ("microbatches", "rows")}
    rows = tries.rows
    while best is not None and rows < tries.rows << 12:
        rows *= 2
        candidate = tries.attempt({**changes, "rows": rows})
        if candidate is None:
            break
        tried.append(candidate)
        if not found.allows(candidate):
            break
        best = candidate
    return replace(found, best=best, tried=tuple(tried))


def _shrunk(found: Found, tries: _Tries) -> Found:
    """Halve the ranks for as long as the setting that needs least fits."""
    start = min(found.tried, key=lambda one: one.needed)
    tried, best = list(found.tried), start if found.allows(start) else None
    changes = {name: value for name, value in start.changes.items() if name not in ("mesh", "reshard_after_forward")}
    world = tries.world
    while best is not None and world % 2 == 0:
        world //= 2
        candidate = tries.attempt({**changes, "world": world, "mesh": None})
        if candidate is None:
            break
        tried.append(candidate)
        if not found.allows(candidate):
            break
        best = candidate
    return replace(found, best=best, tried=tuple(tried))


class _Tries:
    """Runs variants of one question; models are traced once for each batch and way of recomputation."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._batch = meta_batch(question.batch)
        self.rows, self.world = sizes_of(self._batch)[0], question.world
        self._batches = {self.rows: self._batch}
        self._traced: dict[object, Traced] = {}
        self.skipped: list[tuple[Mapping[str, Any], str]] = []

    def run(self, changes: Mapping[str, Any]) -> Candidate:
        """Explain with these changes; "rows" are those of the batch."""
        rest = dict(changes)
        rows = rest.pop("rows", self.rows // rest.get("microbatches", 1))
        batch = self._batches.setdefault(rows, _with_rows(self._batch, self.rows, rows))
        question = replace(self._question, batch=batch, **rest)
        key = rows, question.recompute
        found = answer(question, self._traced.get(key))
        self._traced.setdefault(key, found.traced)
        return Candidate(dict(changes), found)

    def attempt(self, changes: Mapping[str, Any]) -> Candidate | None:
        """The same; None, and a line in `skipped`, if that cannot be."""
        try:
            return self.run(changes)
        except ValueError as why:
            self.skipped.append((dict(changes), str(why)))
            return None

    def singles(self, base: Candidate) -> Iterator[dict[str, Any]]:
        """Single changes of what was asked for."""
        asked, gpu = self._question, base.explanation.gpu
        ways = ("none", "every:2", "block") if base.explanation.traced.blocks else ()
        yield from ({"recompute": way} for way in ways if way != asked.recompute)
        yield from ({"microbatches": parts} for parts in self._parts())
        yield from ({"reshard_after_forward": value} for value in self._reshards(base))
        if self.world > gpu.per_node and self.world % gpu.per_node == 0 and asked.mesh is None:
            yield {"mesh": (self.world // gpu.per_node, gpu.per_node)}
        policy = base.explanation.setting.mp_policy
        if policy.param_dtype is not None and policy.resolve(torch.float32).reduce != policy.param_dtype:
            yield {"mp_policy": replace(policy, reduce_dtype=policy.param_dtype)}
        comm = base.explanation.setting.comm_policy
        yield {"comm_policy": replace(comm, reductions_in_flight=comm.reductions_in_flight + 1)}
        yield {"comm_policy": replace(comm, prefetch_bytes=0)}
        if not gpu.synchronous and not isinstance(base.explanation.setting.offload_policy, CPUOffloadPolicy):
            yield {"offload_policy": CPUOffloadPolicy()}
        merged = _pairs(base.explanation)
        if merged is not None:
            yield {"plan": merged}

    def several(self) -> Iterator[dict[str, Any]]:
        """Recomputation, microbatches, resharding and offloading together."""
        offloads: list[dict[str, Any]] = [{}, {"offload_policy": CPUOffloadPolicy()}]
        recomputes: list[dict[str, Any]] = [{}, {"recompute": "every:2"}, {"recompute": "block"}]
        parts: list[dict[str, Any]] = [{}, *({"microbatches": parts} for parts in self._parts())]
        for changes in itertools.product(recomputes, parts, ({}, {"reshard_after_forward": False}), offloads):
            merged = {name: value for change in changes for name, value in change.items()}
            if len(merged) > 1:
                yield merged

    def _parts(self) -> list[int]:
        if self._question.microbatches != 1:
            return []
        return [parts for parts in (2, 4) if self.rows % parts == 0]

    def _reshards(self, base: Candidate) -> list[bool | int]:
        per_node, ranks = base.explanation.gpu.per_node, base.explanation.setting.ranks
        values: list[bool | int] = [True, False]
        if ranks > per_node and ranks % per_node == 0:
            values.append(per_node)
        return [value for value in values if value is not self._question.reshard_after_forward]


def _with_rows(batch: Any, rows: int, wanted: int) -> Any:
    """The batch with another number of rows, in every tensor that has them."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        return torch.empty((wanted, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return batch if wanted == rows else _torch.tree_map_only(Tensor, change, batch)


def _pairs(r: Explanation) -> Plan | None:
    """The plan with blocks that follow each other merged in pairs; None if there are fewer than four."""
    blocks = [unit.modules[0] for unit in r.plan.units if len(unit.modules) == 1 and unit.modules[0] in r.traced.blocks]
    if len(blocks) < 4:
        return None
    plan = Plan(r.plan.outline, r.plan.units)
    for first, second in zip(blocks[::2], blocks[1::2]):
        plan.merge(first, second)
    return plan


__all__ = ["Candidate", "Found", "Goal", "search"]
