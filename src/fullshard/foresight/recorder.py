"""`record()`: notes what a run's actions send and wait for, by standing around them for the length of a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import Lane, LaneWork
from fullshard.collectives.traffic import Message
from fullshard.foresight.allocations import AllocationWatch, peak_of_new
from fullshard.foresight.clock import Span
from fullshard.foresight.recorded import RankSummary, Record, Recorded, RecordedStep, SentMessages
from fullshard.frontend.module import any_unit
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit
from fullshard.schedule.residency import Action, Wait

Mark = Any
"""A moment: seconds of the host's clock, or an event of the accelerator."""


@dataclass(slots=True, eq=False)
class _Sent:
    """One collective. early: it was over before it was waited for, so that it ended at a moment that nobody knows."""

    lane: str
    unit: str
    begun: Mark = None
    ended: Mark = None
    early: bool = False
    messages: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """One step, in marks. waits: lane, unit, from, to.      levels: bytes where each unit's forward begins."""

    began: Mark = None
    ended: Mark = None
    sent: list[_Sent] = field(default_factory=list)
    waits: list[tuple[str, str, Mark, Mark]] = field(default_factory=list)
    levels: dict[str, int] = field(default_factory=dict)


class _Recorder:
    """Takes marks while a run goes on, and makes seconds of them at the end."""

    def __init__(self, model: nn.Module, device: torch.device, messages: list[Message], *, memory: bool) -> None:
        self._model, self._messages = model, messages
        self._away = None if device.type == "cpu" else device
        self._steps: list[_Step] = []
        self._now = _Step()
        self._unit = ""
        self._peaks: tuple[int, int] | None = None
        self._wants_memory, self._alive = memory and self._away is None, 0
        self._watch: AllocationWatch | None = None
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._ended: Mark = None  # where an optimizer stepped last, until the next step begins
        if self._away is not None:
            torch.accelerator.reset_peak_memory_stats(self._away)

    def _mark(self) -> Mark:
        """This moment, on the stream that is current."""
        if self._away is None:
            return time.perf_counter()
        event = torch.Event(self._away, enable_timing=True)
        event.record()
        return event

    # --- what happens ---

    def around(self, kind: type[Action], run: Callable[[Unit], None], unit: Unit) -> None:
        """Run an action of a unit; what it sends and waits for meanwhile is of that unit."""
        if self._ended is not None:
            self._end_step()
        if self._away is not None and kind is Wait and unit.name not in self._now.levels:
            self._now.levels[unit.name] = torch.accelerator.memory_allocated(self._away)
        before, self._unit = self._unit, unit.name
        try:
            run(unit)
        finally:
            self._unit = before

    def sent(self, lane: str) -> _Sent:
        """A collective of the unit whose action runs."""
        sent = _Sent(lane, self._unit)
        self._now.sent.append(sent)
        return sent

    def begin(self, sent: _Sent, start: Callable[[], StartedWork]) -> StartedWork:
        """A collective begins."""
        known = len(self._messages)
        sent.begun = self._mark()
        pending = start()
        sent.messages = self._messages[known:]
        return pending

    def finish(self, sent: _Sent, finish: Callable[[], None]) -> None:
        """A collective is over, on an accelerator as soon as its stream comes so far."""
        sent.ended = self._mark()
        finish()

    def wait(self, sent: _Sent, wait: Callable[[], None], *, done: bool) -> None:
        """Wait for a collective, and note how long. done: whether it was over before."""
        sent.early = done and self._away is None
        began = self._mark()
        wait()
        self._now.waits.append((sent.lane, sent.unit, began, self._mark()))

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer has stepped. A step ends with the last of them, which the next forward tells."""
        self._optimizers[id(optimizer)] = optimizer
        self._ended = self._mark()

    def _end_step(self) -> None:
        """The optimizers have stepped. On the CPU the first whole step is for counting memory, if that was asked for."""
        ended, self._ended = self._ended, None
        counted = self._watch is not None
        if self._watch is not None:
            new, self._watch = peak_of_new(self._watch.stop()), None
            self._peaks = (self._alive + new,) * 2
        elif self._wants_memory:
            self._wants_memory, self._alive = False, _bytes_of(self._model, list(self._optimizers.values()))
            self._watch = AllocationWatch()
        step = self._now
        step.ended = ended
        if step.began is not None and step.sent and not counted:
            self._steps.append(step)
        self._now = _Step(began=ended)
        self._messages.clear()

    # --- the end ---

    def stop(self) -> None:
        """The block was left, whatever the reason."""
        if self._ended is not None:
            self._end_step()
        if self._watch is not None:
            self._watch.stop()
        self._optimizers.clear()  # a heartbeat that nobody has read yet refers to us
        del self._model

    def record(self, process_group: dist.ProcessGroup | None) -> Record:
        """All of it, with what the other ranks say. Collective."""
        if self._away is not None:
            torch.accelerator.synchronize(self._away)
            self._peaks = torch.accelerator.max_memory_allocated(self._away), torch.accelerator.max_memory_reserved(self._away)
        steps = tuple(self._in_seconds(step) for step in self._steps)
        waiting = tuple(sum(step.waiting.values()) for step in steps)
        mine = RankSummary(dist.get_rank(), tuple(step.seconds for step in steps), waiting)
        found: list[Any] = [mine]
        if process_group is not None and process_group.size() > 1:
            found = [None] * process_group.size()
            dist.all_gather_object(found, mine, group=process_group)
        return Record(steps, tuple(found), self._peaks, self._steps[-1].levels if self._steps else {})

    def _in_seconds(self, step: _Step) -> RecordedStep:
        def span(lane: str, begin: Mark, end: Mark, unit: str, name: str) -> Span:
            return Span(lane, self._seconds(step.began, begin), self._seconds(step.began, end), unit, name)

        sent = tuple(
            SentMessages(
                span(one.lane, one.begun, one.ended, one.unit, _kinds(one.messages)), tuple(one.messages), not one.early
            )
            for one in step.sent
            if one.messages and one.ended is not None
        )
        waits = tuple(span("wait", began, ended, unit, f"waits for {lane}") for lane, unit, began, ended in step.waits)
        return RecordedStep(self._seconds(step.began, step.ended), sent, waits)

    def _seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin) if self._away is None else float(begin.elapsed_time(end)) / 1e3


def _kinds(messages: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(message.kind for message in messages))


def _bytes_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of this rank's parts of parameters, buffers and optimizer states."""
    states = (
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    tensors = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*model.parameters(), *model.buffers(), *states)
    ]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in tensors}.values())


class _TimedWork:
    """Work on a lane that is recorded."""

    __slots__ = ("_recorder", "_sent", "inner")

    def __init__(self, recorder: _Recorder, sent: _Sent, inner: LaneWork) -> None:
        self._recorder, self._sent, self.inner = recorder, sent, inner

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        self._recorder.wait(self._sent, self.inner.wait, done=self.inner.done())

    def block(self) -> None:
        self._recorder.wait(self._sent, self.inner.block, done=self.inner.done())


class _TimedLane:
    """A lane that notes when its work begins and ends."""

    def __init__(self, recorder: _Recorder, name: str, lane: Lane) -> None:
        self._recorder, self._name, self._lane = recorder, name, lane

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> LaneWork:
        recorder = self._recorder
        sent = recorder.sent(self._name)
        after = after.inner if isinstance(after, _TimedWork) else after
        begin, end = partial(recorder.begin, sent, start), partial(recorder.finish, sent, finish)
        inner = self._lane.run(begin, end) if after is None else self._lane.run(begin, end, after=after)
        return _TimedWork(recorder, sent, inner)


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
        The run; its figures can be asked for after the block. A step ends with the last optimizer that steps before the next
        forward.

    Raises:
        StateError: if there is no unit at or below `model`.

    Example:
        >>> with fullshard.record(model) as run:                                              # doctest: +SKIP
        ...     for batch in batches[:10]:
        ...         train_step(model, optimizer, batch)
        >>> print(fullshard.explain(build, batch, world=8).against(run))                      # doctest: +SKIP
    """
    unit = any_unit(model)
    runtime, run = runtime_of(unit), Recorded()
    with runtime.communicator.traffic.counting() as messages:
        recorder = _Recorder(model, runtime.communicator.device, messages, memory=memory)
        handle = _torch.register_optimizer_step_post_hook(recorder.stepped)
        try:
            with runtime.executor.watched(recorder.around), runtime.communicator.on_lanes(partial(_TimedLane, recorder)):
                yield run
        finally:
            handle.remove()
            recorder.stop()
    run.complete(recorder.record(unit.axis.group))


__all__ = ["record"]
