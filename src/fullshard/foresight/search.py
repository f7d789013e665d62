"""`search()`: which settings fit, which of them is fastest, and the smallest change that fits."""

from __future__ import annotations

import heapq
import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fullshard.foresight.explanation import Explanation, explain
from fullshard.foresight.question import Build, Question
from fullshard.foresight.space import Changes, Tries, axes_of, settings
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
        left: how many settings were not tried, since they cannot fit, or cannot be faster than the best by more than `gap`.
        gap: by what part a setting that was not tried may be faster than the best, at most.
        stopped: whether time was up before all could be looked at.

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
        if self.stopped:
            lines.append(f"time was up: {len(self.tried):,} settings were tried, {self.left:,} were left; see search(seconds=)")
        elif self.left:
            tried, left = f"{len(self.tried):,}", f"{self.left:,}"
            lines.append(f"{tried} settings were tried; {left} more cannot fit, or not be more than {self.gap:.1%} faster")
        return "\n".join([*lines, *(f"not tried: {_named(changes)}: {why}" for changes, why in self.skipped)])

    def allows(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no more than the budget, and no more of the host's memory than there is.

        Args:
            candidate: one of `tried`.

        Returns:
            Whether it does.

        Example:
            >>> found.allows(found.base)                                                      # doctest: +SKIP
            False
        """
        r = candidate.explanation
        return candidate.needed <= self.budget * r.gpu.memory and r.pinned <= r.gpu.host


def _told(candidate: Candidate) -> str:
    return f"{candidate} ({bytes_text(candidate.needed)}, {candidate.speed:,.0f} tokens/s of each GPU)"


def search(
    build: Build,
    batch: Any,
    *,
    goal: Goal = "fits",
    budget: float = 0.92,
    over: Mapping[str, Sequence[Any]] | None = None,
    tolerance: float = 0.01,
    seconds: float = 7.0,
    **told: Any,
) -> Found:
    """Try settings, and say which fit, which is fastest, and the smallest single change that fits.

    Every combination is looked at: recomputation (none, selective, every second block, all), microbatches that share the
    batch (2, 4 and 8) and whether each of them is reduced, `reshard_after_forward` (True, False, one machine), hybrid meshes,
    reducing in the compute dtype, reductions in flight and prefetching, offloading, and units merged in pairs. Most of them
    are left out by a bound: the seconds and bytes that they cannot do without.

    Args:
        build: as of `explain`.
        batch: as of `explain`.
        goal: "fits", the fastest of those that fit with the fewest changes, or with fewer rows if none does; "fastest" of all
            that fit; "largest_batch", as many rows as fit (in powers of two times those of `batch`), and the fastest with them;
            "fewest_gpus", as few ranks as fit, in whole machines where one is too small, with the same global batch where the
            ranks divide it, and the fastest with these.
        budget: the part of a GPU's memory that may be taken, more than 0, at most 1.
        over: what to try, by names of `explain`'s arguments, as in {"recompute": ("none", "block")}; None is all of the above.
        tolerance: how much faster, as a part, a setting may be that is not tried.
        seconds: of processor time after which the rest is left, and the report says what it may be worth.
        **told: the other arguments of `explain`, `world` among them.

    Returns:
        What was found; it prints as a report.

    Raises:
        ValueError: as `explain`, and for a goal, a budget or a name that there is not.

    Example:
        >>> print(search(build, batch, world=8, gpu="a100-40", loss=loss))                    # doctest: +SKIP
    """
    if goal not in get_args(Goal):
        raise ValueError(f"goal must be one of {', '.join(get_args(Goal))}, got {goal!r}")
    if not 0 < budget <= 1:
        raise ValueError(f"budget must be a part of the memory, more than 0 and at most 1, got {budget!r}")
    if not 0 <= tolerance < 1 or not seconds > 0:
        raise ValueError(f"tolerance must be from 0 to below 1, and seconds more than 0, got {tolerance!r} and {seconds!r}")
    asked = inspect.signature(explain).bind(build, batch, **told)
    asked.apply_defaults()
    return _Search(Tries(Question(**asked.arguments)), over, budget, tolerance, seconds).find(goal)


LEANEST = 3
"""Settings of each world that are tried to find out where anything fits."""

LONGER = 1.5
"""How many times the seconds a search goes on for as long as nothing fits."""


class _Search:
    """Looks for settings. The arguments are those of `search`."""

    def __init__(
        self, tries: Tries, over: Mapping[str, Sequence[Any]] | None, budget: float, tolerance: float, seconds: float
    ) -> None:
        self._tries, self._budget, self._tolerance, self._seconds = tries, budget, tolerance, seconds
        self._began, self._stopped = time.process_time(), False
        base = tries.run({})
        self._most = budget * base.gpu.memory
        self._known: dict[str, Candidate] = {}
        self.base = self._keep({}, base)
        self._axes = axes_of(base, over)
        self._all = sorted(settings(self._axes, tries.question), key=len)
        self._left, self._gap = 0, 0.0

    def find(self, goal: Goal) -> Found:
        """The setting of this goal."""
        for changes in self._all:
            if len(changes) == 1:
                self._attempt(changes)
        smallest = self.base if self._fits(self.base) else self._fastest_known(1)
        if goal == "largest_batch":
            best = self._largest_batch()
        elif goal == "fewest_gpus":
            best = self._fewest_gpus()
        else:
            best = (self._fewest_changes(smallest) if goal == "fits" else self._best(self._all)) or self._fewer_rows()
        skipped = {_named(changes): (changes, why) for changes, why in self._tries.skipped}
        tried, rest = tuple(self._known.values()), (self._left, self._gap, self._stopped)
        return Found(goal, self._budget, self.base, smallest, best, tried, tuple(skipped.values()), *rest)

    # --- goals ---

    def _fewest_changes(self, smallest: Candidate | None) -> Candidate | None:
        """The fastest of those that fit with the fewest changes."""
        if smallest is not None:
            return smallest
        for count in range(2, len(self._axes) + 1):
            best = self._best([changes for changes in self._all if len(changes) == count])
            if best is not None:
                return best
        return None

    def _fewer_rows(self) -> Candidate | None:
        """With half of the rows, and half of these, until something fits."""
        rows = self._tries.rows
        while rows > 1:
            rows //= 2
            best = self._best(self._with(rows=rows))
            if best is not None:
                return best
        return None

    def _largest_batch(self) -> Candidate | None:
        """Twice the rows for as long as something fits."""
        rows, best = self._tries.rows, self._best(self._with(rows=self._tries.rows))
        if best is None:
            return self._fewer_rows()
        while rows < self._tries.rows << 12:
            rows *= 2
            larger = self._best(self._with(rows=rows))
            if larger is None:
                break
            best = larger
        return best

    def _fewest_gpus(self) -> Candidate | None:
        """The fewest ranks with which something fits, and the same global batch."""
        question, per_node = self._tries.question, self._tries.question.machine.per_node
        worlds = [*range(1, min(per_node, question.world) + 1), *range(2 * per_node, question.world + 1, per_node)]
        if not self._tries.quick:  # to look at every world takes minutes
            worlds = worlds[self._leanest(worlds) :]
            self._stopped = True
        for world in worlds:
            best = self._best(self._of_world(world))
            if best is not None:
                return best
        # Where time was up, the ranks that were asked for may fit without having been looked at.
        return self._best(self._of_world(question.world)) if self._stopped else None

    def _leanest(self, worlds: Sequence[int]) -> int:
        """The index of the first world where one of the settings fits that need least, as if all larger ones had one, too."""
        low, high = 0, len(worlds)
        while low < high and not self._is_late(found=False):
            middle = (low + high) // 2
            candidates = sorted(self._of_world(worlds[middle]), key=self._least_bytes)[:LEANEST]
            if any(
                not self._is_late(found=False) and (one := self._attempt(c)) is not None and self._fits(one) for c in candidates
            ):
                high = middle
            else:
                low = middle + 1
        return high

    def _least_bytes(self, changes: Changes) -> float:
        bound = self._tries.bound(changes)
        return float("inf") if bound is None or bound.pinned > self.base.explanation.gpu.host else bound.nbytes

    def _of_world(self, world: int) -> list[dict[str, Any]]:
        """All settings with so many ranks."""
        question = self._tries.question
        rounds, rest = divmod(question.world * question.microbatches, world)
        if world == question.world:
            return self._with(rows=self._tries.rows)
        fewer: dict[str, Any] = {"world": world, "mesh": None, "microbatches": question.microbatches if rest else rounds}
        axes = [axis for axis in self._axes if not set(axis[-1]) & set(fewer)]
        return [{**changes, **fewer} for changes in settings(axes, replace(question, **fewer))]

    def _with(self, *, rows: int) -> list[dict[str, Any]]:
        """All settings with so many microbatches as were asked for, and so many rows."""
        changed = {} if rows == self._tries.rows else {"rows": rows}  # so that what was tried is known again
        return [{**other, **changed} for other in self._all if "microbatches" not in other]

    # --- settings ---

    def _best(self, candidates: Iterable[Changes]) -> Candidate | None:
        """The fastest that fits. The most promising by its bound is tried first, until no other can be faster."""
        heap: list[tuple[float, int, bool, Changes]] = []
        for number, changes in enumerate(candidates):
            self._push(heap, number, changes)
        known = [self._known[name] for _, _, _, changes in heap if (name := _named(changes)) in self._known]
        best = max((one for one in known if self._fits(one)), key=lambda one: one.speed, default=None)
        if best is None and heap and not (self._has_found() and self._is_late(found=True)):
            # What needs least comes first, so that something is found before time is up.
            lean = self._attempt(min((changes for *_, changes in heap), key=self._least_bytes))
            best = lean if lean is not None and self._fits(lean) else None
        while heap:
            bound, number, traced, changes = heapq.heappop(heap)
            if best is not None and 1 / bound <= best.speed * (1 + self._tolerance):
                return self._stop(best, len(heap) + 1, bound)
            if not traced and self._tries.is_traced(changes):
                self._push(heap, number, changes)
                continue
            if self._is_late(found=best is not None) and _named(changes) not in self._known:
                return self._stop(best, len(heap) + 1, bound)
            candidate = self._attempt(changes)
            if candidate is not None and self._fits(candidate) and (best is None or candidate.speed > best.speed):
                best = candidate
        return best

    def _has_found(self) -> bool:
        return any(self._fits(one) for one in self._known.values())

    def _is_late(self, *, found: bool) -> bool:
        """Whether time is up; a search in which nothing fits yet has longer."""
        late = time.process_time() - self._began > self._seconds * (1.0 if found else LONGER)
        self._stopped = self._stopped or late
        return late

    def _push(self, heap: list[tuple[float, int, bool, Changes]], number: int, changes: Changes) -> None:
        """Queue a setting by the seconds of a token that it cannot do without, unless it cannot fit."""
        bound = self._tries.bound(changes)
        if bound is None:
            return
        if bound.nbytes > self._most or bound.pinned > self.base.explanation.gpu.host:
            self._left += 1
            return
        per_row = self.base.explanation.traced.tokens / self._tries.rows
        tokens = per_row * self._tries.rows_of(changes) * self._tries.question_of(changes).microbatches
        seconds = bound.seconds * self.base.explanation.seconds / self.base.explanation.timeline.seconds  # where it is compiled
        heapq.heappush(heap, (max(seconds / tokens, 1e-30), number, bound.traced, changes))

    def _stop(self, best: Candidate | None, left: int, bound: float) -> Candidate | None:
        self._left += left
        if best is not None:
            self._gap = max(self._gap, 1 / bound / best.speed - 1)
        return best

    def _attempt(self, changes: Changes) -> Candidate | None:
        name = _named(changes)
        if name not in self._known:
            found = self._tries.attempt(changes)
            return None if found is None else self._keep(changes, found)
        return self._known[name]

    def _keep(self, changes: Changes, found: Explanation) -> Candidate:
        return self._known.setdefault(_named(changes), Candidate(dict(changes), found))

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.needed <= self._most and candidate.explanation.pinned <= candidate.explanation.gpu.host

    def _fastest_known(self, changes: int) -> Candidate | None:
        found = [one for one in self._known.values() if len(one.changes) == changes and self._fits(one)]
        return max(found, key=lambda one: one.speed, default=None)


__all__ = ["Candidate", "Found", "Goal", "search"]
