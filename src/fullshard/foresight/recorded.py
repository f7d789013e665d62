"""A recorded run, `Recorded`: time and memory of its steps, to compare with a prediction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fullshard.core import Message
from fullshard.errors import StateError
from fullshard.foresight.clock import Span


class RankSummary(NamedTuple):
    """Figures of one rank that all ranks exchange."""

    rank: int
    # Seconds of each step.
    steps: tuple[float, ...]
    # Seconds of each step during which the rank waited for collectives.
    waiting: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One all-gather or reduction."""

    span: Span
    messages: tuple[Message, ...]
    # True if the end time was measured, False if it is an upper bound.
    exact: bool


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step. Spans are in seconds from its beginning."""

    seconds: float
    sent: tuple[RecordedCollective, ...]
    waits: tuple[Span, ...]

    @property
    def waiting(self) -> dict[str, float]:
        """Seconds of waiting, by the unit of the collective."""
        found: dict[str, float] = {}
        for span in self.waits:
            found[span.unit] = found.get(span.unit, 0.0) + span.end - span.start
        return found


@dataclass(frozen=True, slots=True)
class Record:
    """Data of a whole recording."""

    steps: tuple[RecordedStep, ...]
    # All ranks of the shard process group.
    ranks: tuple[RankSummary, ...]
    # (peak bytes of tensors, peak bytes reserved); None on the CPU if memory was not counted.
    peaks: tuple[int, int] | None
    # By unit: bytes of tensors at the beginning of its forward, in the last step. Empty on the CPU.
    levels: dict[str, int]


class Recorded:
    """A recorded run; `record` creates it.

    Its properties describe whole steps. A step ends with the last optimizer step before the next forward. The properties raise
    StateError until the block of `record` ends.
    """

    def __init__(self) -> None:
        self._record: Record | None = None

    def complete(self, record: Record) -> None:
        """Store the recorded data at the end of the block.

        Args:
            record: the recorded data.
        """
        self._record = record

    @property
    def _found(self) -> Record:
        if self._record is None:
            raise StateError("The run is still being recorded. Read its figures after the `with` block of record().")
        return self._record

    @property
    def _whole(self) -> tuple[RecordedStep, ...]:
        if not self._found.steps:
            raise StateError("record() saw no whole step. Run at least two optimizer steps in its block.")
        return self._found.steps

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each whole step, from the end of one optimizer step to the end of the next."""
        return tuple(step.seconds for step in self._found.steps)

    @property
    def step(self) -> float:
        """Median seconds of a step.

        Raises:
            StateError: if there is no whole step: fewer than two optimizer steps were recorded.
        """
        return median(step.seconds for step in self._whole)

    @property
    def peak(self) -> int | None:
        """Peak bytes of tensors; on the CPU None without `record(memory=True)`."""
        return None if self._found.peaks is None else self._found.peaks[0]

    @property
    def reserved(self) -> int | None:
        """Peak bytes that the accelerator's allocator reserved; on the CPU equal to `peak`."""
        return None if self._found.peaks is None else self._found.peaks[1]

    @property
    def levels(self) -> dict[str, int]:
        """Bytes of tensors at the beginning of each unit's forward in the last step, in order; empty on the CPU."""
        return dict(self._found.levels)

    @property
    def ranks(self) -> tuple[RankSummary, ...]:
        """Figures of each rank of the shard process group."""
        return self._found.ranks

    @property
    def waiting(self) -> dict[str, float]:
        """Mean seconds per step that compute waited for collectives, by the unit of the collective."""
        total: dict[str, float] = {}
        for step in self._whole:
            for unit, seconds in step.waiting.items():
                total[unit] = total.get(unit, 0.0) + seconds
        most_first = sorted(total.items(), key=lambda item: -item[1])
        return {unit: seconds / len(self._whole) for unit, seconds in most_first}

    @property
    def messages(self) -> tuple[Message, ...]:
        """Collectives of the last step, in order."""
        return tuple(message for sent in self._whole[-1].sent for message in sent.messages)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Collectives and waits of the last step, in seconds from its beginning."""
        step = self._whole[-1]
        return tuple(sorted((*(sent.span for sent in step.sent), *step.waits), key=lambda span: span.start))

    def speeds(self) -> dict[str, float]:
        """Return the speed of collectives of at least 1 MiB.

        Left out are collectives whose time is not their own: after a copy from host memory (CPU offload) and, on the CPU, if
        they completed before the wait, since their end time is unknown.

        Returns:
            The median by kind of collective, in bytes/s: the bytes of all ranks' chunks, divided by the collective's time.
        """
        found: dict[str, list[float]] = {}
        for sent in (sent for step in self._found.steps for sent in step.sent if sent.exact):
            if sent.messages[0].kind == "to_device":
                continue
            # The span ends before a copy to the host.
            nbytes = sum(message.nbytes for message in sent.messages if message.kind != "to_host")
            seconds = sent.span.end - sent.span.start
            if nbytes >= 1 << 20 and seconds > 0:
                found.setdefault(sent.messages[0].kind, []).append(nbytes / seconds)
        return {kind: median(speeds) for kind, speeds in found.items()}

    def late(self) -> dict[int, float]:
        """Return the late ranks: a rank is late in a step if it waited less than all others by a tenth of the step.

        Returns:
            The fraction of steps in which a rank was late, by rank; ranks that were never late are left out.
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
        return f"{len(self.steps)} steps of {self.step * 1e3:.1f} ms, {waiting * 1e3:.1f} ms of it waiting for collectives"


__all__ = ["RankSummary", "Record", "Recorded", "RecordedCollective", "RecordedStep"]
