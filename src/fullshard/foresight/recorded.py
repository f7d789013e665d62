"""A recorded run, `Recorded`: time and memory of its steps, to compare with a prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from fullshard.core import Message
from fullshard.errors import StateError
from fullshard.foresight.clock import Span

Mark = Any
"""Point in time: seconds of the host's clock, or an event of the accelerator."""


class RankSummary(NamedTuple):
    """Figures of one rank that all ranks exchange."""

    rank: int
    steps: tuple[float, ...]  # seconds of each step
    waiting: tuple[float, ...]  # seconds of each step during which the rank waited for collectives


@dataclass(slots=True, eq=False)
class RecordedCollective:
    """One all-gather or reduction. Its times are marks until the run ends."""

    stream: str
    unit: str
    began: Mark = None
    ended: Mark = None
    exact: bool = True  # False if it completed before the wait on the CPU, so that `ended` is only an upper bound
    messages: list[Message] = field(default_factory=list)

    @property
    def span(self) -> Span:
        """Its interval, which is named by the kinds of its messages."""
        kinds = dict.fromkeys(message.kind for message in self.messages)
        return Span(self.stream, self.began, self.ended, self.unit, ", ".join(kinds))


@dataclass(slots=True, eq=False)
class RecordedStep:
    """One step. All times are marks until `use_seconds`, then seconds from its beginning."""

    began: Mark = None
    ended: Mark = None
    sent: list[RecordedCollective] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    levels: dict[str, int] = field(default_factory=dict)  # by unit: bytes of tensors at the beginning of its forward

    def use_seconds(self, seconds: Callable[[Mark, Mark], float]) -> None:
        """Replace marks by `seconds(begin, end)`. Leave out collectives that sent nothing or have not ended."""
        since = partial(seconds, self.began)
        self.sent = [one for one in self.sent if one.messages and one.ended is not None]
        for one in self.sent:
            one.began, one.ended = since(one.began), since(one.ended)
        self.waits = [replace(wait, start=since(wait.start), end=since(wait.end)) for wait in self.waits]
        self.began, self.ended = 0.0, since(self.ended)

    @property
    def waiting(self) -> float:
        """Seconds of waiting."""
        return sum(wait.end - wait.start for wait in self.waits)


class Record(NamedTuple):
    """Data of a whole recording."""

    steps: Sequence[RecordedStep]
    ranks: tuple[RankSummary, ...]  # all ranks of the shard process group
    peaks: tuple[int, int] | None  # (peak bytes of tensors, peak bytes reserved); None on the CPU if memory was not counted


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
    def _whole(self) -> Sequence[RecordedStep]:
        if not self._found.steps:
            raise StateError("record() saw no whole step. Run at least two optimizer steps in its block.")
        return self._found.steps

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each whole step, from the end of one optimizer step to the end of the next."""
        return tuple(step.ended for step in self._found.steps)

    @property
    def step(self) -> float:
        """Median seconds of a step.

        Raises:
            StateError: if there is no whole step: fewer than two optimizer steps were recorded.
        """
        return median(step.ended for step in self._whole)

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
        return dict(self._found.steps[-1].levels) if self._found.steps else {}

    @property
    def ranks(self) -> tuple[RankSummary, ...]:
        """Figures of each rank of the shard process group."""
        return self._found.ranks

    @property
    def waiting(self) -> dict[str, float]:
        """Mean seconds per step that compute waited for collectives, by the unit of the collective."""
        total: dict[str, float] = {}
        for wait in (wait for step in self._whole for wait in step.waits):
            total[wait.unit] = total.get(wait.unit, 0.0) + wait.end - wait.start
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
            seconds = sent.ended - sent.began
            if nbytes >= 1 << 20 and seconds > 0:
                found.setdefault(sent.messages[0].kind, []).append(nbytes / seconds)
        return {kind: median(speeds) for kind, speeds in found.items()}

    def late(self) -> dict[int, float]:
        """Return the late ranks: a rank is late in a step if it waited less than all others by a tenth of the step.

        Returns:
            The fraction of steps in which a rank was late, by rank; ranks that were never late are left out.
        """
        ranks = self.ranks
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
