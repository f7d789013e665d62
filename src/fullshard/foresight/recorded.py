"""A run that was recorded: what its steps took on each lane, to be held against what was predicted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import Lane, LaneWork
from fullshard.collectives.traffic import Message
from fullshard.errors import StateError
from fullshard.foresight.allocations import AllocationWatch, peak_of_new
from fullshard.foresight.clock import Span
from fullshard.frontend.module import any_unit
from fullshard.runtime.runtime import Runtime, runtime_of
from fullshard.runtime.unit import Unit
from fullshard.schedule.residency import Action, Wait

Mark = Any
"""A moment: seconds of the host's clock, or an event of the accelerator."""


class RankSummary(NamedTuple):
    """What one rank tells the others: seconds of each step, and seconds in it that it waited for messages."""

    rank: int
    steps: tuple[float, ...]
    waiting: tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Sent:
    """One collective. early: it was over before it was waited for, so that it ended at a moment that nobody knows."""

    lane: str
    unit: str
    begun: Mark
    ended: Mark = None
    early: bool = False
    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Step:
    began: Mark
    ended: Mark
    sent: list[_Sent]
    waits: list[tuple[str, str, Mark, Mark]]  # lane, unit, from, to


class Recorded:
    """A run, while it is recorded and afterwards; `record` makes it.

    Its properties are of whole steps, each of which ends when an optimizer has stepped.
    """

    def __init__(self, runtime: Runtime, model: nn.Module, *, memory: bool) -> None:
        self._model = model
        device = runtime.communicator.device
        self._away = None if device.type == "cpu" else torch.get_device_module(device)
        self._steps: list[_Step] = []
        self._sent: list[_Sent] = []
        self._waits: list[tuple[str, str, Mark, Mark]] = []
        self._began: Mark = None
        self._wants_memory = memory and device.type == "cpu"
        self._watch: AllocationWatch | None = None
        self._unit = ""
        self._messages: list[Message] = []
        self._is_over = False
        self._alive = 0
        self._ranks: tuple[RankSummary, ...] = ()
        self._peaks: tuple[int, int] | None = None
        self._levels: dict[str, int] = {}  # of the step that runs, and of the last one
        self._last_levels: dict[str, int] = {}

    # --- while it runs ---

    def begin_with(self, messages: list[Message]) -> None:
        """The list that gets every message. Steps begin now, too, but the first may be the end of one that began before."""
        self._messages = messages
        if self._away is not None:
            self._away.reset_peak_memory_stats()

    def mark(self) -> Mark:
        """This moment, on the stream that is current."""
        if self._away is None:
            return time.perf_counter()
        event = self._away.Event(enable_timing=True)
        event.record()
        return event

    def around(self, kind: type[Action], run: Callable[[Unit], None], unit: Unit) -> None:
        """Run an action of a unit; what it sends and waits for meanwhile is of that unit."""
        if self._away is not None and kind is Wait and unit.name not in self._levels:
            self._levels[unit.name] = self._away.memory_allocated()
        before, self._unit = self._unit, unit.name
        try:
            run(unit)
        finally:
            self._unit = before

    def begin(self, sent: _Sent, start: Callable[[], StartedWork]) -> StartedWork:
        """A collective begins."""
        known = len(self._messages)
        sent.begun = self.mark()
        pending = start()
        sent.messages = self._messages[known:]
        return pending

    def finish(self, sent: _Sent, finish: Callable[[], None]) -> None:
        """A collective is over, on an accelerator as soon as its stream comes so far."""
        sent.ended = self.mark()
        finish()

    def new(self, lane: str) -> _Sent:
        """A collective of the unit whose action runs."""
        sent = _Sent(lane, self._unit, None)
        self._sent.append(sent)
        return sent

    def wait(self, sent: _Sent, wait: Callable[[], None], *, done: bool) -> None:
        """Wait for a collective, and note how long. done: whether it was over before."""
        sent.early = done and self._away is None
        began = self.mark()
        wait()
        self._waits.append((sent.lane, sent.unit, began, self.mark()))

    def end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer has stepped. On the CPU the first whole step is for counting memory, if that was asked for."""
        counted = self._watch is not None
        if self._watch is not None:
            new, self._watch = peak_of_new(self._watch.stop()), None
            self._peaks = (self._alive + new,) * 2
        elif self._wants_memory:
            self._wants_memory, self._alive = False, _bytes_of(self._model, optimizer)
            self._watch = AllocationWatch()
        now = self.mark()
        if self._began is not None and self._sent and not counted:
            self._steps.append(_Step(self._began, now, self._sent, self._waits))
        self._began, self._sent, self._waits = now, [], []
        self._messages.clear()
        self._levels, self._last_levels = {}, self._levels

    def end(self, process_group: Any) -> None:
        """The block is over: tell the other ranks how long steps took."""
        if self._watch is not None:
            self._watch.stop()
        if self._away is not None:
            self._away.synchronize()
            self._peaks = self._away.max_memory_allocated(), self._away.max_memory_reserved()
        self._is_over = True
        mine = RankSummary(dist.get_rank(), self.steps, tuple(sum(self._waited(step).values()) for step in self._steps))
        if process_group is None or dist.get_world_size(process_group) == 1:
            self._ranks = (mine,)
            return
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, mine, group=process_group)
        self._ranks = tuple(found)

    # --- afterwards ---

    def _seconds(self, begin: Mark, end: Mark) -> float:
        if self._away is None:
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3

    def _check_over(self) -> None:
        if not self._is_over:
            raise StateError("the run is still being recorded: ask after the `with` block of record()")

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each whole step, from the end of one optimizer step to the end of the next."""
        self._check_over()
        return tuple(self._seconds(step.began, step.ended) for step in self._steps)

    @property
    def step(self) -> float:
        """Seconds of the step in the middle.

        Raises:
            StateError: if fewer than two optimizer steps were recorded.
        """
        return median(self._some(self.steps))

    @property
    def peak(self) -> int | None:
        """Bytes of tensors where they were most; on the CPU None without `record(memory=True)`."""
        self._check_over()
        return None if self._peaks is None else self._peaks[0]

    @property
    def reserved(self) -> int | None:
        """Bytes that the allocator of an accelerator reserved; on the CPU as `peak`."""
        self._check_over()
        return None if self._peaks is None else self._peaks[1]

    @property
    def levels(self) -> dict[str, int]:
        """Of the last step, bytes of tensors where each unit's forward begins, in order; empty on the CPU."""
        self._check_over()
        return dict(self._last_levels)

    @property
    def ranks(self) -> tuple[RankSummary, ...]:
        """What each rank said."""
        self._check_over()
        return self._ranks

    @property
    def waiting(self) -> dict[str, float]:
        """Seconds of a step that computing waited for messages, by the unit that was waited for; the mean over steps."""
        total: Counter[str] = Counter()
        for step in self._some(self._steps):
            total.update(self._waited(step))  # type: ignore[arg-type]
        return {unit: seconds / len(self._steps) for unit, seconds in total.most_common()}

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of the last step, in order."""
        self._check_over()
        return tuple(message for sent in self._some(self._steps)[-1].sent for message in sent.messages)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Messages and waits of the last step, in seconds from where it began."""
        self._check_over()
        step = self._some(self._steps)[-1]
        found = [
            Span(sent.lane, *self._stretch(step, sent.begun, sent.ended), sent.unit, _kinds(sent.messages))
            for sent in step.sent
            if sent.messages and sent.ended is not None
        ]
        found += [
            Span("wait", *self._stretch(step, began, ended), unit, f"waits for {lane}")
            for lane, unit, began, ended in step.waits
        ]
        return tuple(sorted(found, key=lambda span: span.start))

    def speeds(self) -> dict[str, float]:
        """Bytes/s of messages of each kind, of at least 1 MiB: bytes of all ranks' chunks over its time; the median.

        On the CPU, only of those that were waited for: it does not know when others ended.
        """
        self._check_over()
        found: dict[str, list[float]] = {}
        for step in self._steps:
            for sent in step.sent:
                nbytes = sum(message.nbytes for message in sent.messages)
                if nbytes >= 1 << 20 and sent.ended is not None and not sent.early:
                    seconds = self._seconds(sent.begun, sent.ended)
                    if seconds > 0:
                        found.setdefault(sent.messages[0].kind, []).append(nbytes / seconds)
        return {kind: median(speeds) for kind, speeds in found.items()}

    def late(self) -> dict[int, float]:
        """Of each rank, the part of the steps in which the others waited for it: it waited least, by a tenth of the step."""
        self._check_over()
        steps = min((len(rank.steps) for rank in self._ranks), default=0)
        found: Counter[int] = Counter()
        for number in range(steps):
            waits = sorted((rank.waiting[number], rank.rank) for rank in self._ranks)
            if len(waits) > 1 and waits[1][0] - waits[0][0] > 0.1 * self._ranks[0].steps[number]:
                found[waits[0][1]] += 1
        return {rank: count / steps for rank, count in found.items()}

    def _stretch(self, step: _Step, begin: Mark, end: Mark) -> tuple[float, float]:
        return self._seconds(step.began, begin), self._seconds(step.began, end)

    def _waited(self, step: _Step) -> dict[str, float]:
        found: Counter[str] = Counter()
        for _, unit, began, ended in step.waits:
            found[unit] += self._seconds(began, ended)  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def _some(self, steps: Sequence[Any]) -> Sequence[Any]:
        self._check_over()
        if not steps:
            raise StateError("record() saw no whole step: have at least two optimizer steps in its block")
        return steps

    def __str__(self) -> str:
        waiting = sum(self.waiting.values())
        return f"{len(self.steps)} steps of {self.step * 1e3:.1f} ms, {waiting * 1e3:.1f} ms of it waiting for messages"


def _kinds(messages: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(message.kind for message in messages))


class _TimedWork:
    """Work on a lane that is recorded."""

    __slots__ = ("_run", "_sent", "inner")

    def __init__(self, run: Recorded, sent: _Sent, inner: LaneWork) -> None:
        self._run, self._sent, self.inner = run, sent, inner

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        self._run.wait(self._sent, self.inner.wait, done=self.inner.done())

    def block(self) -> None:
        self._run.wait(self._sent, self.inner.block, done=self.inner.done())


class _TimedLane:
    """A lane that notes when its work begins and ends."""

    def __init__(self, run: Recorded, name: str, lane: Lane) -> None:
        self._run, self._name, self._lane = run, name, lane

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> LaneWork:
        run = self._run
        sent = run.new(self._name)
        after = after.inner if isinstance(after, _TimedWork) else after
        begin, end = partial(run.begin, sent, start), partial(run.finish, sent, finish)
        inner = self._lane.run(begin, end) if after is None else self._lane.run(begin, end, after=after)
        return _TimedWork(run, sent, inner)


def _bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's parts of parameters, buffers and optimizer states."""
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))
    tensors = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*model.parameters(), *model.buffers(), *states)
    ]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in tensors}.values())


@contextmanager
def record(model: nn.Module, *, memory: bool = False) -> Iterator[Recorded]:
    """Note what each step of a run takes, on which lane, to be held against a prediction. Collective where the block ends.

    Nothing is noted, and nothing costs any time, outside of the block. In it there are two marks for each message and two for
    each wait: events on an accelerator, the host's clock on the CPU.

    Args:
        model: a module that is a unit, or holds some.
        memory: on the CPU, whether the first whole step in the block is run under torch's profiler, which counts the bytes of
            tensors, and left out of all that is timed. Accelerators count them anyway.

    Yields:
        The run; its figures can be asked for after the block. A step ends when an optimizer has stepped.

    Raises:
        StateError: if there is no unit at or below `model`, or it is recorded already.

    Example:
        >>> with fullshard.record(model) as run:                                              # doctest: +SKIP
        ...     for batch in batches[:10]:
        ...         train_step(model, optimizer, batch)
        >>> print(fullshard.explain(build, batch, world=8).against(run))                      # doctest: +SKIP
    """
    unit = any_unit(model)
    runtime = runtime_of(unit)
    run = Recorded(runtime, model, memory=memory)
    handle = _torch.register_optimizer_step_post_hook(run.end_step)
    try:
        with (
            runtime.communicator.traffic.counting() as messages,
            runtime.executor.watched(run.around),
            runtime.communicator.on_lanes(partial(_TimedLane, run)),
        ):
            run.begin_with(messages)
            yield run
    finally:
        handle.remove()
    run.end(unit.axis.group)


__all__ = ["RankSummary", "Recorded", "record"]
