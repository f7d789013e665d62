"""Search for settings that fit, the fastest of them, and the smallest change that fits: `search()`."""

from __future__ import annotations

import heapq
import inspect
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, get_args

from fullshard.foresight.explanation import Explanation, explain
from fullshard.foresight.question import Build, ExplainArguments
from fullshard.foresight.setup import forget_optimizer_steps
from fullshard.foresight.space import Changes, Variants, axes_of, settings
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, StateSharding, fields_only_here
from fullshard.wrap.plan import Plan
from fullshard.wrap.tables import aligned, bytes_text

FAST_ENOUGH = 0.98
"""Fraction of the highest speed that counts as fast enough, where a search asks for the least memory."""

Goal = Literal["fits", "fastest", "largest_batch", "fewest_gpus"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that was simulated.

    Args:
        changes: arguments of `explain` that differ from the arguments of `search`, by name; "rows" is the number of rows of the
            batch. Several microbatches divide the rows of the given batch among them.
        explanation: explanation of a step with this setting.

    Example:
        >>> found.best.changes                                                                # doctest: +SKIP
        {'recompute': 'block'}
    """

    changes: Mapping[str, Any]
    explanation: Explanation

    @property
    def needed(self) -> int:
        """Bytes of device memory."""
        return self.explanation.needed

    @property
    def speed(self) -> float:
        """Tokens per second of one GPU."""
        return self.explanation.tokens_per_second

    def __str__(self) -> str:
        return _changes_text(self.changes)


def _changes_text(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value_text(value)}" for name, value in changes.items()) or "no change"


def _key_of(changes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key by which equal changes are found again. Their text leaves fields of policies and plans out."""
    return tuple(sorted(((name, *_identity(value)) for name, value in changes.items()), key=itemgetter(0)))


def _identity(value: Any) -> tuple[Any, ...]:
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value  # the types as well: True and 1 are equal, but different values of `reshard_after_forward`


def _value_text(value: Any) -> str:
    if isinstance(value, MixedPrecisionPolicy):
        names = ["param_dtype", "reduce_dtype", *fields_only_here(value)]
        return ", ".join(f"{name} {str(getattr(value, name)).removeprefix('torch.')}" for name in names)
    if isinstance(value, CommPolicy):
        return f"reductions_in_flight {value.reductions_in_flight}, prefetch_bytes {value.prefetch_bytes}"
    if isinstance(value, Plan):
        return (
            f"{len(value.units)} units of up to {bytes_text(max(sum(one.nbytes for one in held) for _, held in value.held()))}"
        )
    if isinstance(value, CPUOffloadPolicy):
        return "CPUOffloadPolicy()"
    return str(value) if isinstance(value, StateSharding) else repr(value)


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search. Prints as a report.

    Args:
        goal: goal of the search.
        budget: fraction of a GPU's memory that a setting may use.
        base: the setting of the arguments themselves, without changes.
        smallest: `base`, if it fits; else the fastest setting that fits with one change; None if there is none.
        best: best setting by the goal; None if nothing fits.
        tried: all simulated settings.
        skipped: (changes, reason) of invalid settings.
        left: number of settings that were not simulated, since they cannot fit, or cannot be faster than the best by more than
            `gap`.
        gap: upper bound of (speed of any setting that was not simulated) / (speed of the best) - 1.
        stopped: whether the search ran out of time before it had checked all settings.

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
    left: int = 0
    gap: float = 0.0
    stopped: bool = False

    @property
    def front(self) -> list[Candidate]:
        """Pareto front of memory and speed over the simulated settings, the fastest first."""
        found: list[Candidate] = []
        for candidate in sorted(self.tried, key=lambda one: (-one.speed, one.needed)):
            if not found or candidate.needed < found[-1].needed:
                found.append(candidate)
        return found

    @property
    def leanest(self) -> Candidate | None:
        """The fitting setting with the least memory that is fast enough (`FAST_ENOUGH`); None if none fits."""
        fits = [candidate for candidate in self.tried if self.allows(candidate)]
        fastest = max((candidate.speed for candidate in fits), default=0.0)
        fast = [candidate for candidate in fits if candidate.speed >= FAST_ENOUGH * fastest]
        return min(fast, key=lambda candidate: candidate.needed, default=None)

    def __str__(self) -> str:
        has = self.base.explanation.gpu.memory
        lines = [f"requested: {_describe(self.base)}; budget {bytes_text(self.budget * has)} of {bytes_text(has)}"]
        if self.smallest is None:
            lines.append("no single change fits")
        elif self.smallest is not self.base:
            lines.append(f"the smallest change that fits: {_describe(self.smallest)}")
        if self.best is None:
            lines.append(f"none of {len(self.tried)} simulated settings fits: use more ranks, or a GPU with more memory")
        else:
            lines.append(f"best by goal {self.goal!r}: {_describe(self.best)}")
        if self.leanest is not None and self.leanest is not self.best:
            lines.append(f"least memory within {1 - FAST_ENOUGH:.0%} of the fastest: {_describe(self.leanest)}")
        rows = [("", "memory", "tokens/s", "setting")]
        for candidate in self.front:
            fits = "fits" if self.allows(candidate) else ""
            rows.append((fits, bytes_text(candidate.needed), f"{candidate.speed:,.0f}", str(candidate)))
        lines += ["no other setting is better in both memory and speed:", *aligned(rows, right={1, 2})]
        if self.stopped:
            lines.append(
                f"out of time: {len(self.tried):,} settings were simulated, {self.left:,} were not; see search(seconds=)"
            )
        elif self.left:
            tried, left = f"{len(self.tried):,}", f"{self.left:,}"
            lines.append(
                f"{tried} settings were simulated; {left} more cannot fit, or cannot be more than {self.gap:.1%} faster"
            )
        return "\n".join([*lines, *(f"invalid: {_changes_text(changes)}: {why}" for changes, why in self.skipped)])

    def allows(self, candidate: Candidate) -> bool:
        """Return True if a candidate stays within the budget and within the host's memory.

        Args:
            candidate: one of `tried`.

        Returns:
            True if it does.
        """
        r = candidate.explanation
        return candidate.needed <= self.budget * r.gpu.memory and r.pinned <= r.gpu.host


def _describe(candidate: Candidate) -> str:
    device = "process" if candidate.explanation.gpu.synchronous else "GPU"
    return f"{candidate} ({bytes_text(candidate.needed)}, {candidate.speed:,.0f} tokens/s of each {device})"


def search(
    build: Build,
    batch: Any,
    *,
    goal: Goal = "fits",
    budget: float = 0.92,
    over: Mapping[str, Sequence[Any]] | None = None,
    tolerance: float = 0.01,
    seconds: float = 7.0,
    **arguments: Any,
) -> Found:
    """Search for settings that fit, the fastest of them, and the smallest single change that fits.

    The search covers every combination of: recomputation (none, selective, every second block, all), microbatches that share
    the batch (2, 4 and 8), reducing each microbatch or only the last, `reshard_after_forward` (True, False, one machine),
    levels of ZeRO, hybrid meshes, reducing in the compute dtype, reductions in flight, prefetching, offloading, and units
    merged in pairs. Most combinations are ruled out without simulation, by lower bounds of their time and memory.

    Args:
        build: as in `explain`.
        batch: as in `explain`.
        goal: "fits": the fastest setting that fits with the fewest changes, or with fewer rows if none fits. "fastest": the
            fastest setting that fits. "largest_batch": the most rows that fit (powers of two times the rows of `batch`), and
            the fastest setting with them. "fewest_gpus": the fewest ranks that fit (whole machines where one is too small),
            with the same global batch where the ranks divide it, and the fastest setting with them. For models that take long
            to trace, the number of ranks is bisected, as if all larger numbers fit, too.
        budget: fraction of a GPU's memory that a setting may use, more than 0, at most 1.
        over: values to try, by names of `explain`'s arguments, as in {"recompute": ("none", "block")}; None is all of the
            above.
        tolerance: the fraction by which a setting that was not simulated may be faster than the result.
        seconds: limit of processor time. Then the search stops, and the report says so.
        **arguments: the other arguments of `explain`, `world` among them.

    Returns:
        The result; it prints as a report.

    Raises:
        ValueError: as `explain`, and for an invalid goal, budget, tolerance, number of seconds, or name in `over`.

    Example:
        >>> print(search(build, batch, world=8, gpu="a100-40", loss=loss))                    # doctest: +SKIP
    """
    if goal not in get_args(Goal):
        raise ValueError(f"goal must be one of {', '.join(get_args(Goal))}, got {goal!r}.")
    if not 0 < budget <= 1:
        raise ValueError(f"budget must be a fraction of the memory, more than 0 and at most 1, got {budget!r}.")
    if not 0 <= tolerance < 1 or not seconds > 0:
        raise ValueError(f"tolerance must be from 0 to below 1, and seconds more than 0, got {tolerance!r} and {seconds!r}.")
    bound = inspect.signature(explain).bind(build, batch, **arguments)
    bound.apply_defaults()
    forget_optimizer_steps()
    return _Search(Variants(ExplainArguments(**bound.arguments)), over, budget, tolerance, seconds).find(goal)


LOW_MEMORY_SETTINGS = 3
"""Number of settings, those of the lowest memory bounds, that decide whether anything fits a world size."""

EXTRA_TIME = 1.5
"""Factor on the time limit while nothing fits yet."""


class _Search:
    """One run of `search`, which documents the arguments."""

    def __init__(
        self, variants: Variants, over: Mapping[str, Sequence[Any]] | None, budget: float, tolerance: float, seconds: float
    ) -> None:
        self._variants, self._budget, self._tolerance, self._seconds = variants, budget, tolerance, seconds
        self._began, self._stopped = time.process_time(), False
        base = variants.run({})
        self._max_bytes = budget * base.gpu.memory
        self.base = Candidate({}, base)
        self._known = {_key_of({}): self.base}
        self._axes = axes_of(base, over)
        self._all = sorted(settings(self._axes, variants.arguments), key=len)
        self._left: set[tuple[Any, ...]] = set()  # keys of settings that were ruled out, or left out for lack of time
        self._gap = 0.0

    def find(self, goal: Goal) -> Found:
        for changes in self._all:
            if len(changes) == 1:
                self._attempt(changes)
        smallest = self.base if self._fits(self.base) else self._fastest(c for c in self._known.values() if len(c.changes) == 1)
        if goal == "largest_batch":
            best = self._largest_batch()
        elif goal == "fewest_gpus":
            best = self._fewest_gpus()
        elif goal == "fastest":
            best = self._best(self._all) or self._fewer_rows()
        else:
            by_number = ([c for c in self._all if len(c) == number] for number in range(2, len(self._axes) + 1))
            best = smallest or self._first_that_fits(by_number) or self._fewer_rows()
        skipped = {_key_of(changes): (changes, why) for changes, why in self._variants.skipped}
        tried, left = tuple(self._known.values()), len(self._left - self._known.keys())
        rest = left, self._gap, self._stopped
        return Found(goal, self._budget, self.base, smallest, best, tried, tuple(skipped.values()), *rest)

    # --- goals ---

    def _first_that_fits(self, choices: Iterable[Iterable[Changes]]) -> Candidate | None:
        """Return the fastest setting of the first choice in which one fits."""
        return next((best for choice in choices if (best := self._best(choice)) is not None), None)

    def _fewer_rows(self) -> Candidate | None:
        """Halve the rows until a setting fits, and return the fastest with these rows."""
        rows = self._variants.rows
        return self._first_that_fits(self._with_rows(rows=rows >> halved) for halved in range(1, rows.bit_length()))

    def _largest_batch(self) -> Candidate | None:
        """Double the rows while a setting fits, and return the fastest with the most rows."""
        rows, best = self._variants.rows, self._best(self._with_rows(rows=self._variants.rows))
        if best is None:
            return self._fewer_rows()
        while rows < self._variants.rows << 12:
            rows *= 2
            larger = self._best(self._with_rows(rows=rows))
            if larger is None:
                break
            best = larger
        return best

    def _fewest_gpus(self) -> Candidate | None:
        """Return the fastest setting with the fewest ranks that fit the same global batch."""
        arguments, per_node = self._variants.arguments, self._variants.arguments.machine.per_node
        worlds = [*range(1, min(per_node, arguments.world) + 1), *range(2 * per_node, arguments.world + 1, per_node)]
        bisects = not self._variants.quick  # checking every world size would take minutes
        if bisects:  # assumes that a larger number of ranks fits, too
            worlds = worlds[bisect_left(worlds, True, key=self._seems_to_fit) :]
        best = self._first_that_fits(map(self._with_world, worlds))
        if best is None and (bisects or self._stopped):
            # The requested number of ranks may fit, but not be among those that were checked.
            best = self._best(self._with_world(arguments.world))
        return best

    def _seems_to_fit(self, world: int) -> bool:
        """Return True if one of the settings with the lowest memory bounds fits this number of ranks."""
        if self._out_of_time(found=False):
            return False
        leanest = sorted(self._with_world(world), key=self._least_bytes)[:LOW_MEMORY_SETTINGS]
        found = (self._attempt(changes) for changes in leanest if not self._out_of_time(found=False))
        return any(one is not None and self._fits(one) for one in found)

    def _least_bytes(self, changes: Changes) -> float:
        bound = self._variants.bound(changes)
        return float("inf") if bound is None or bound.pinned > self.base.explanation.gpu.host else bound.nbytes

    def _with_world(self, world: int) -> list[dict[str, Any]]:
        arguments = self._variants.arguments
        rounds, rest = divmod(arguments.world * arguments.microbatches, world)
        if world == arguments.world:
            return self._with_rows(rows=self._variants.rows)
        fewer: dict[str, Any] = {"world": world, "mesh": None, "microbatches": arguments.microbatches if rest else rounds}
        axes = [axis for axis in self._axes if not set(axis[-1]) & set(fewer)]
        return [{**changes, **fewer} for changes in settings(axes, replace(arguments, **fewer))]

    def _with_rows(self, *, rows: int) -> list[dict[str, Any]]:
        """Return all settings with the requested number of microbatches and this number of rows."""
        # The requested number of rows is no change, so that settings which were simulated before are found again.
        changed = {} if rows == self._variants.rows else {"rows": rows}
        return [{**other, **changed} for other in self._all if "microbatches" not in other]

    # --- settings ---

    def _best(self, candidates: Iterable[Changes]) -> Candidate | None:
        """Return the fastest setting that fits, by best-first search over the lower bounds of the time per token."""
        heap: list[tuple[float, int, bool, Changes]] = []
        for number, changes in enumerate(candidates):
            self._enqueue(heap, number, changes)
        known = [self._known[key] for _, _, _, changes in heap if (key := _key_of(changes)) in self._known]
        best = self._fastest(known)
        found = any(map(self._fits, self._known.values()))
        if best is None and heap and not (found and self._out_of_time(found=True)):
            # Simulate the setting with the lowest memory bound first, so that one that fits is found before time is up.
            lean = self._attempt(min((changes for *_, changes in heap), key=self._least_bytes))
            best = lean if lean is not None and self._fits(lean) else None
        while heap:
            bound, number, traced, changes = heapq.heappop(heap)
            if best is not None and 1 / bound <= best.speed * (1 + self._tolerance):
                return self._stop(best, [changes, *(other for *_, other in heap)], bound)
            if not traced and self._variants.is_traced(changes):
                # The model was traced for this setting after it was queued, which gives a tighter bound.
                self._enqueue(heap, number, changes)
                continue
            if self._out_of_time(found=best is not None) and _key_of(changes) not in self._known:
                return self._stop(best, [changes, *(other for *_, other in heap)], bound)
            candidate = self._attempt(changes)
            if candidate is not None and self._fits(candidate) and (best is None or candidate.speed > best.speed):
                best = candidate
        return best

    def _out_of_time(self, *, found: bool) -> bool:
        """Return True if time is up; without a setting that fits, the limit is `EXTRA_TIME` times as long."""
        late = time.process_time() - self._began > self._seconds * (1.0 if found else EXTRA_TIME)
        self._stopped = self._stopped or late
        return late

    def _enqueue(self, heap: list[tuple[float, int, bool, Changes]], number: int, changes: Changes) -> None:
        """Queue a setting by its lower bound of seconds per token, unless it cannot fit."""
        bound = self._variants.bound(changes)
        if bound is None:
            return
        if bound.nbytes > self._max_bytes or bound.pinned > self.base.explanation.gpu.host:
            self._left.add(_key_of(changes))
            return
        per_row = self.base.explanation.traced.tokens / self._variants.rows
        tokens = per_row * self._variants.rows_of(changes) * self._variants.arguments_for(changes).microbatches
        # The bound is of eager mode. The last ratio is the relative time with torch.compile, 1 without it.
        seconds = bound.seconds * self.base.explanation.seconds / self.base.explanation.timeline.seconds
        # At least 1e-30, since callers divide by it. `number` breaks ties: changes cannot be compared.
        heapq.heappush(heap, (max(seconds / tokens, 1e-30), number, bound.traced, changes))

    def _stop(self, best: Candidate | None, left: Iterable[Changes], bound: float) -> Candidate | None:
        self._left.update(map(_key_of, left))
        if best is not None:
            self._gap = max(self._gap, 1 / bound / best.speed - 1)
        return best

    def _attempt(self, changes: Changes) -> Candidate | None:
        key = _key_of(changes)
        if key not in self._known:
            found = self._variants.attempt(changes)
            if found is None:
                return None
            self._known[key] = Candidate(dict(changes), found)
        return self._known[key]

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.needed <= self._max_bytes and candidate.explanation.pinned <= candidate.explanation.gpu.host

    def _fastest(self, candidates: Iterable[Candidate]) -> Candidate | None:
        return max(filter(self._fits, candidates), key=lambda one: one.speed, default=None)
