"""Recording of a training run, `record()`: times of collectives and waits, and memory, by wrapping the runtime's actions.

On the CPU, torch's profiler reports allocations and frees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fullshard import _torch
from fullshard.core import Communicator, Lane, Message, Move, StartedWork, Unit, Work, units_of
from fullshard.foresight.clock import Span
from fullshard.foresight.recorded import Mark, RankSummary, Record, Recorded, RecordedCollective, RecordedStep
from fullshard.frontend.module import any_unit

T = TypeVar("T")


def peak_of_new(events: list[tuple[int, int]]) -> int:
    """Return the peak of the bytes allocated during `events`. Frees of earlier allocations are ignored.

    >>> peak_of_new([(1, -5), (2, 10), (3, 20), (2, -10), (4, 15)])
    35
    """
    allocated_here: set[int] = set()
    level = peak = 0
    for address, nbytes in events:
        if nbytes > 0:
            allocated_here.add(address)
        elif address not in allocated_here:
            continue
        level += nbytes
        peak = max(peak, level)
    return peak


class AllocationWatch:
    """Recorder of the CPU's allocations and frees, from its construction until `stop`."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def stop(self) -> list[tuple[int, int]]:
        """Stop recording. Return the allocations and frees in order: (address, bytes), negative for a free."""
        self._profiler.stop()
        # The profiler's list of events has no addresses; its event tree has them.
        results: Any = self._profiler.profiler
        timed: list[tuple[int, int, int]] = []  # (time, address, bytes)
        pending = list(results.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            if event.name == "[memory]":
                timed.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        return [(address, nbytes) for _, address, nbytes in sorted(timed, key=lambda one: one[0])]


class _Recorder:
    """Recorder of one run: takes marks during the run, and converts them to seconds at the end."""

    def __init__(self, model: nn.Module, device: torch.device, messages: list[Message], *, memory: bool) -> None:
        self._model, self._messages = model, messages
        self.async_device = None if device.type == "cpu" else device
        self._steps: list[RecordedStep] = []
        self.current = RecordedStep()
        self.unit = ""
        self._peaks: tuple[int, int] | None = None
        self._counts_next_step, self._state_bytes = memory and self.async_device is None, 0
        self._watch: AllocationWatch | None = None
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        # Mark of the last optimizer step; None once the next step has begun.
        self._ended: Mark = None
        if self.async_device is not None:
            torch.accelerator.reset_peak_memory_stats(self.async_device)

    def mark(self) -> Mark:
        """Return the current time, on the current stream."""
        if self.async_device is None:
            return time.perf_counter()
        event = torch.Event(self.async_device, enable_timing=True)
        event.record()
        return event

    # --- events of the run ---

    def around(self, move: Move, unit: Unit, run: Callable[[], None]) -> None:
        """Run an action of a unit, and attribute its collectives and waits to that unit."""
        # Several optimizers may step one after another, so only the next action ends the step.
        if self._ended is not None:
            self._end_step()
        if self.async_device is not None and move is Move.WAIT and unit.name not in self.current.levels:
            self.current.levels[unit.name] = torch.accelerator.memory_allocated(self.async_device)
        # Collectives outside of actions belong to no unit, "".
        before, self.unit = self.unit, unit.name
        try:
            run()
        finally:
            self.unit = before

    def add_messages(self, sent: RecordedCollective, work: Callable[[], T]) -> T:
        """Run a part of a collective, and add the messages that the traffic counter sees meanwhile."""
        known = len(self._messages)
        found = work()
        sent.messages += self._messages[known:]
        return found

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the end of an optimizer step. A step ends with the last optimizer step before the next forward."""
        self._optimizers[id(optimizer)] = optimizer
        self._ended = self.mark()

    def _end_step(self) -> None:
        """Close the current step and begin the next. On the CPU with `memory=True`, the first whole step counts memory."""
        ended, self._ended = self._ended, None
        counted = self._watch is not None
        if self._watch is not None:
            new, self._watch = peak_of_new(self._watch.stop()), None
            self._peaks = (self._state_bytes + new,) * 2
        elif self._counts_next_step:
            groups = [group for unit in units_of(self._model, True) for group in unit.groups]
            buffers = [(buffer, group.version()) for group in groups for buffer in group.buffers]
            # What the next step does not allocate again.
            standing = sum(buffer.allocated for buffer, version in buffers if buffer.keep or buffer.version == version)
            self._counts_next_step = False
            self._state_bytes = _bytes_of(self._model, list(self._optimizers.values())) + standing
            self._watch = AllocationWatch()
        step = self.current
        step.ended = ended
        # Drop the incomplete step at the beginning of the block, and the step that the profiler slowed down.
        if step.began is not None and step.sent and not counted:
            self._steps.append(step)
        self.current = RecordedStep(ended)
        self._messages.clear()

    # --- the end ---

    def stop(self) -> None:
        """Stop recording at the end of the block, also after an exception."""
        if self._ended is not None:
            self._end_step()
        if self._watch is not None:
            self._watch.stop()
        # An unread heartbeat may keep this recorder alive, but must not keep the optimizers and the model.
        self._optimizers.clear()
        del self._model

    def record(self, process_group: dist.ProcessGroup | None) -> Record:
        """Return the recorded data with the summaries of all ranks. Collective."""
        if self.async_device is not None:
            torch.accelerator.synchronize(self.async_device)
            self._peaks = (
                torch.accelerator.max_memory_allocated(self.async_device),
                torch.accelerator.max_memory_reserved(self.async_device),
            )
        for step in self._steps:
            step.use_seconds(self._seconds)
            if self.async_device is None:  # there, a collective after another one begins only when that one is waited for
                step.sent.sort(key=lambda one: float(one.began))
        waiting = tuple(step.waiting for step in self._steps)
        mine = RankSummary(dist.get_rank(), tuple(step.ended for step in self._steps), waiting)
        found: list[Any] = [mine]
        if process_group is not None and process_group.size() > 1:
            found = [None] * process_group.size()
            dist.all_gather_object(found, mine, group=process_group)
        return Record(self._steps, tuple(found), self._peaks)

    def _seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin) if self.async_device is None else float(begin.elapsed_time(end)) / 1e3


def _bytes_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the bytes of this rank's local parameters, buffers and optimizer states."""
    states = (
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    tensors = map(_torch.local_part, (*model.parameters(), *model.buffers(), *states))
    # Tied tensors count once.
    return sum({tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in tensors}.values())


class _TimedWork:
    """Work of a recorded collective."""

    __slots__ = ("_recorder", "_sent", "done", "inner")

    def __init__(self, recorder: _Recorder, sent: RecordedCollective, inner: Work) -> None:
        self._recorder, self._sent, self.inner, self.done = recorder, sent, inner, inner.done

    def wait(self) -> None:
        self._record(self.inner.wait)

    def block(self) -> None:
        self._record(self.inner.block)

    def _record(self, wait: Callable[[], None]) -> None:
        recorder, sent = self._recorder, self._sent
        sent.exact = recorder.async_device is not None or not self.done()
        began = recorder.mark()
        wait()
        recorder.current.waits.append(Span("wait", began, recorder.mark(), sent.unit, f"waits for {sent.stream}"))


class _TimedStream:
    """Lane that records when its work begins and ends."""

    def __init__(self, recorder: _Recorder, name: str, stream: Lane) -> None:
        self._recorder, self._name, self._lane = recorder, name, stream

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Work:
        recorder = self._recorder
        sent = RecordedCollective(self._name, recorder.unit)
        recorder.current.sent.append(sent)

        def begin() -> StartedWork:
            sent.began = recorder.mark()
            return recorder.add_messages(sent, start)

        def end() -> None:  # on an accelerator, the event is recorded on the collective's stream
            sent.ended = recorder.mark()
            recorder.add_messages(sent, finish)  # the copy of gradients to host memory

        after = after.inner if isinstance(after, _TimedWork) else after
        inner = self._lane.run(begin, end) if after is None else self._lane.run(begin, end, after=after)
        return _TimedWork(recorder, sent, inner)


@contextmanager
def _with_streams(communicator: Communicator, wrap: Callable[[str, Lane], Lane]) -> Iterator[None]:
    """Within the block, run the collectives on `wrap(name, stream)` instead of each stream."""
    plain = communicator.all_gather_stream, communicator.reduce_scatter_stream, communicator.all_reduce_stream
    communicator.all_gather_stream, communicator.reduce_scatter_stream, communicator.all_reduce_stream = map(
        wrap, ("gather", "reduce", "replicate"), plain
    )
    try:
        yield
    finally:
        communicator.all_gather_stream, communicator.reduce_scatter_stream, communicator.all_reduce_stream = plain


@contextmanager
def record(model: nn.Module, *, memory: bool = False) -> Iterator[Recorded]:
    """Record the collectives, waits and memory of each step within a `with` block, to compare them with a prediction.

    Outside of the block nothing is recorded and there is no overhead. Inside, each collective and each wait costs two marks:
    events on an accelerator, readings of the host's clock on the CPU. The end of the block is a collective.

    Args:
        model: a module that is a unit or contains units.
        memory: on the CPU, whether to run the first whole step in the block under torch's profiler, which counts the bytes of
            tensors; this step is not timed. Accelerators always count them. With `KINETO_LOG_LEVEL=6` and
            `TORCH_CPP_LOG_LEVEL=ERROR` in the environment before torch is imported, the profiler prints nothing.

    Yields:
        The run, whose figures are available after the block. A step ends with the last optimizer step before the next
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
    runtime, run = unit.runtime, Recorded()
    with runtime.communicator.traffic.counting() as messages:
        recorder = _Recorder(model, runtime.communicator.device, messages, memory=memory)
        handle = _torch.register_first_step_post_hook(recorder.optimizer_stepped)
        try:
            with runtime.watched(recorder.around), _with_streams(runtime.communicator, partial(_TimedStream, recorder)):
                yield run
        finally:
            handle.remove()
            recorder.stop()
    run.complete(recorder.record(unit.axis.group))
