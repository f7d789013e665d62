"""A run that was recorded: what its steps took on each lane, to be held against what was predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fullshard.collectives.traffic import Message
from fullshard.errors import StateError
from fullshard.foresight.clock import Span


class RankSummary(NamedTuple):
    """What one rank tells the others: seconds of each step, and seconds in it that it waited for messages."""

    rank: int
    steps: tuple[float, ...]
    waiting: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SentMessages:
    """The messages of one gather or reduction. exact: whether its end is known, and not only that it was over by then."""

    span: Span
    messages: tuple[Message, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step. Spans are in seconds from where it begins."""

    seconds: float
    sent: tuple[SentMessages, ...]
    waits: tuple[Span, ...]

    @property
    def waiting(self) -> dict[str, float]:
        """Seconds of waiting, by the unit that is waited for."""
        found: dict[str, float] = {}
        for span in self.waits:
            found[span.unit] = found.get(span.unit, 0.0) + span.end - span.start
        return found


@dataclass(frozen=True, slots=True)
class Record:
    """All that was recorded. peaks: bytes of tensors, and reserved. levels: bytes where each unit's forward begins."""

    steps: tuple[RecordedStep, ...]
    ranks: tuple[RankSummary, ...]
    peaks: tuple[int, int] | None
    levels: dict[str, int]


class Recorded:
    """A run, while it is recorded and afterwards; `record` makes it.

    Its properties are of whole steps, each of which ends with the last optimizer that steps. They raise StateError before the
    block of `record` is over.
    """

    def __init__(self) -> None:
        self._record: Record | None = None

    def complete(self, record: Record) -> None:
        """The block is over.

        Args:
            record: what was recorded in it.
        """
        self._record = record

    @property
    def _found(self) -> Record:
        if self._record is None:
            raise StateError("the run is still being recorded: ask after the `with` block of record()")
        return self._record

    @property
    def _whole(self) -> tuple[RecordedStep, ...]:
        if not self._found.steps:
            raise StateError("record() saw no whole step: have at least two optimizer steps in its block")
        return self._found.steps

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each whole step, from the end of one optimizer step to the end of the next."""
        return tuple(step.seconds for step in self._found.steps)

    @property
    def step(self) -> float:
        """Seconds of the step in the middle.

        Raises:
            StateError: if there is no whole step: fewer than two optimizer steps were recorded.
        """
        return median(step.seconds for step in self._whole)

    @property
    def peak(self) -> int | None:
        """Bytes of tensors where they were most; on the CPU None without `record(memory=True)`."""
        return None if self._found.peaks is None else self._found.peaks[0]

    @property
    def reserved(self) -> int | None:
        """Bytes that the allocator of an accelerator reserved; on the CPU as `peak`."""
        return None if self._found.peaks is None else self._found.peaks[1]

    @property
    def levels(self) -> dict[str, int]:
        """Of the last step, bytes of tensors where each unit's forward begins, in order; empty on the CPU."""
        return dict(self._found.levels)

    @property
    def ranks(self) -> tuple[RankSummary, ...]:
        """What each rank of the process group that shards said."""
        return self._found.ranks

    @property
    def waiting(self) -> dict[str, float]:
        """Seconds of a step that computing waited for messages, by the unit that was waited for; the mean over steps."""
        total: dict[str, float] = {}
        for step in self._whole:
            for unit, seconds in step.waiting.items():
                total[unit] = total.get(unit, 0.0) + seconds
        most_first = sorted(total.items(), key=lambda item: -item[1])
        return {unit: seconds / len(self._whole) for unit, seconds in most_first}

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of the last step, in order."""
        return tuple(message for sent in self._whole[-1].sent for message in sent.messages)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Messages and waits of the last step, in seconds from where it began."""
        step = self._whole[-1]
        return tuple(sorted((*(sent.span for sent in step.sent), *step.waits), key=lambda span: span.start))

    def speeds(self) -> dict[str, float]:
        """How fast messages of at least 1 MiB travelled; on the CPU only those that were waited for, as others ended unseen.

        Returns:
            The median by kind, in bytes/s: bytes of all ranks' chunks over their time.
        """
        found: dict[str, list[float]] = {}
        for sent in (sent for step in self._found.steps for sent in step.sent if sent.exact):
            nbytes, seconds = sum(message.nbytes for message in sent.messages), sent.span.end - sent.span.start
            if nbytes >= 1 << 20 and seconds > 0:
                found.setdefault(sent.messages[0].kind, []).append(nbytes / seconds)
        return {kind: median(speeds) for kind, speeds in found.items()}

    def late(self) -> dict[int, float]:
        """Ranks that the others waited for: one waited less than all others, by a tenth of the step.

        Returns:
            The part of the steps, by rank; ranks that never were late are left out.
        """
        ranks = self._found.ranks
        steps = min((len(rank.steps) for rank in ranks), default=0)
        found: Counter[int] = Counter()
        for number in range(steps):
            waits = sorted((rank.waiting[number], rank.rank) for rank in ranks)
            if len(waits) > 1 and waits[1][0] - waits[0][0] > 0.1 * ranks[0].steps[number]:
                found[waits[0][1]] += 1
        return {rank: count / steps for rank, count in found.items()}

    def __str__(self) -> str:
        waiting = sum(self.waiting.values())
        return f"{len(self.steps)} steps of {self.step * 1e3:.1f} ms, {waiting * 1e3:.1f} ms of it waiting for messages"


__all__ = ["RankSummary", "Record", "Recorded", "RecordedStep", "SentMessages"]
