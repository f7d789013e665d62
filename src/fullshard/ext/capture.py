"""`Graph`: a training step that is captured once and replayed without the host's work, and what is checked around replays.

The device runs a replay, the host does not: what Python records of a step, it does not record of a replay. So a capture begins
and ends with every unit sharded, what a replay writes (shards, `.grad`) is noted, and what it relies on is compared before it.

    before a capture       all-gathers in flight are waited for, and all heartbeats are read
    its first all-gather   every unit is resharded: what the graph all-gathers depends on nothing before it
    while it lasts         nothing is polled, and nothing is shown to the watchdog; heartbeats become part of the graph
    its end                the captured stream waits for the other streams
    before a replay        the last heartbeat that arrived, addresses, `.grad` and options of optimizers are compared
    behind a replay        the watchdog follows it
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import (
    CollectiveCall,
    CollectiveLog,
    FlatBuffer,
    ForwardCall,
    GroupFingerprints,
    Heartbeat,
    Listener,
    Move,
    ParamGroup,
    Runtime,
    ShardedParameter,
    Unit,
    UnitName,
    inner_tensors,
    units_below,
)
from fullshard.errors import StateError
from fullshard.optim.optimizer_hooks import STEP_LISTENERS
from fullshard.optim.step_wrapper import view_of
from fullshard.policies import CPUOffloadPolicy


class Graph:
    """Capture a step of sharded models once, and replay it without the host's work.

    Collective: all ranks capture and replay the same graphs in the same order. Run a step eagerly first. Asks of a program
    what torch.cuda.graph asks: inputs that are copied to one place, optimizers with capturable=True and learning rates in
    tensors, gradients that are zeroed in place unless the graph clears them, and no reads by the host.

    Args:
        device: the accelerator; None for the current one.

    Raises:
        StateError: without an accelerator.

    Example:
        >>> graph = fullshard.Graph()                                                         # doctest: +SKIP
        >>> with graph.capture():                                                             # doctest: +SKIP
        ...     loss = step(static)
        >>> for batch in data:                                                                # doctest: +SKIP
        ...     static.copy_(batch)
        ...     graph.replay()

    Source: torch.cuda.graph.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        found = device or torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type == "cpu":
            raise StateError("fullshard.Graph() needs an accelerator: the CPU has no graphs.")
        module = torch.get_device_module(found)
        self._device, self.raw = found, followed(module.CUDAGraph if found.type == "cuda" else module.Graph)()

    def capture(self, **options: Any) -> AbstractContextManager[Any]:
        """Capture the block: forward and backward, and the optimizer's step or not.

        Args:
            options: those of torch.cuda.graph, such as `pool` and `stream`.

        Returns:
            The context manager of the block.

        Raises:
            StateError: in the block, if a graph cannot hold what runs in it (docs/capture.md).
        """
        return torch.get_device_module(self._device).graph(self.raw, **options)

    def replay(self) -> None:
        """Run the step on the current stream.

        Raises:
            StateError: if memory, a `.grad` or an option that the graph holds was replaced since, or if the ranks diverged.
        """
        self.raw.replay()

    def pool(self) -> Any:
        """Return the memory pool.

        Returns:
            What `capture(pool=)` of another graph of the same step takes.
        """
        return self.raw.pool()


def capture_obstacles(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    """Return which units and optimizers a graph cannot hold; empty if it can hold all of them. Equal on all ranks.

    Args:
        model: a module with units.
        optimizers: those whose steps are captured as well.

    Returns:
        One sentence per unit or optimizer that a graph cannot hold.

    Example:
        >>> graph = None if fullshard.capture_obstacles(model) else fullshard.Graph()         # doctest: +SKIP
    """
    found = [f"Unit '{unit.name}': {why}." for unit in units_below([model]) if (why := _obstacle(unit))]
    owned = [one for one in optimizers if _torch.steps_as(one, torch.optim.Muon) or view_of(one) == "whole_view"]
    return found + [
        f"{type(one).__name__}: in its step the host waits for all ranks. Leave it out of the graph." for one in owned
    ]


def _obstacle(unit: Unit) -> str:
    options = unit.options
    if isinstance(options.offload, CPUOffloadPolicy):
        return "its shards are in host memory (CPUOffloadPolicy), which the host reads and writes in each step"
    if options.gather_adapter is not None or options.reduce_adapter is not None or options.comm.collectives is not None:
        return "it has collectives of its own"
    return ""


class Captured:
    """The part of a graph that belongs to one runtime. It keeps no model alive.

    Attributes:
        name: for texts, equal on all ranks; "" until a unit of the runtime is used.
        units: those that it all-gathers, while it is captured.
        heartbeats: those in it, which each replay sends again.
        steps: the steps of optimizers in it.
        versions: of all groups, before its first all-gather.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.name = runtime, ""
        self.units: dict[int, Unit] = {}
        self.heartbeats: list[Heartbeat] = []
        self.steps: list[CapturedStep] = []
        self.versions: weakref.WeakKeyDictionary[ParamGroup, int] = weakref.WeakKeyDictionary()
        self._logs: dict[CollectiveLog, GroupFingerprints] = {}
        self._first: list[weakref.ref[ShardedParameter]] = []  # the first parameter of each group
        self._addresses: list[int] = []
        self._moves = -1  # `ShardedParameter.moves` when the addresses were compared last
        self._uncounted = False  # whether some may change without a count: of buffers, and inside of tensor subclasses
        # The local gradients of those in `_first`, each with its address; None without one.
        self._grads: list[tuple[weakref.ref[Tensor], int] | None] = []
        self._written: list[weakref.ref[ParamGroup]] = []

    def note(self, unit: Unit) -> None:
        """Record that it all-gathers a unit. Raises StateError for a unit that a graph cannot hold."""
        if unit.number in self.units:
            return
        if why := _obstacle(unit):
            raise StateError(
                f"Unit '{unit.name}' ran while a graph of the device was captured, which cannot hold it: {why}. Run the step "
                "without a graph."
            )
        self.units[unit.number] = unit
        for group in unit.groups:
            if (log := group.fingerprints.log) not in self._logs:
                self._logs[log] = GroupFingerprints(log, UnitName(""), self.name)
                self._logs[log].call(f"capture of {self.name} begins")

    def seal(self) -> None:
        """Record what replays write and rely on: the capture has ended, and every unit is sharded."""
        groups = [group for unit in self.units.values() for group in unit.groups]
        for group in groups:
            if group.parts is not None:
                group.parts.keep()
        first = [group.parameters[0] for group in groups]
        self._first, self._addresses = [*map(weakref.ref, first)], self._addresses_of(first)
        self._grads = [None if grad is None else (weakref.ref(grad), grad.data_ptr()) for grad in _grads_of(first)]
        self._uncounted = any(group.keeps_memory or not group.flat for group in groups)
        every = [group for unit in self.runtime.all_units() for group in unit.groups]  # some may be new since it began
        self._written = [weakref.ref(group) for group in every if group.version() != self.versions.get(group)]
        self.units = {}
        for fingerprints in self._logs.values():
            fingerprints.call(f"capture of {self.name} ends")

    @staticmethod
    def _addresses_of(parameters: Sequence[Any]) -> list[int]:
        """Return the addresses of memory that a graph uses and does not own: of shards, and of buffers that keep theirs."""
        found: list[Tensor] = []
        for parameter in parameters:
            group = parameter.group()
            found.append(group.shard)
            if not group.flat:
                found += inner_tensors(parameter.local)
            if group.keeps_memory:
                found += [buffer.flat for buffer in group.buffers if isinstance(buffer, FlatBuffer)]
        return [tensor.data_ptr() for tensor in found]

    def check(self) -> None:
        """Raise StateError if ranks diverged, or if a replay would use other memory or options than there are now."""
        runtime, name = self.runtime, self.name.capitalize()
        runtime.recover()
        if runtime.scheduler.running or runtime.backward.underway:
            raise StateError(f"{name} was replayed inside of a forward or backward. Replay it before or after.")
        for beat in self.heartbeats:
            runtime.reducer.heartbeats.check(beat)
        parameters: list[Any] = [first() for first in self._first]
        moved = self._uncounted or self._moves != ShardedParameter.moves
        if None in parameters or (moved and self._addresses_of(parameters) != self._addresses):
            raise StateError(
                f"{name} holds addresses of sharded parameters that changed since its capture: by .to(), undo(), `.data =`, "
                "another fully_shard(), or set_keep_unsharded_storage(). Capture the step again."
            )
        self._moves = ShardedParameter.moves
        for now, then, parameter in zip(_grads_of(parameters), self._grads, parameters):
            if then is not None and (now is None or (now is not then[0]() and now.data_ptr() != then[1])):
                raise StateError(
                    f"{name} writes the gradient of '{parameter.name}' of unit '{parameter.unit_name.name}' to a tensor that "
                    "is its .grad no longer. Between replays call zero_grad(set_to_none=False), and assign no .grad."
                )
        for step in self.steps:
            if changed := step.changed():
                raise StateError(
                    f"{changed} when {self.name} was captured, and its replays keep to that. Use a tensor for an option, as in "
                    "lr=torch.tensor(0.1), and write to tensors in place; or capture the step again."
                )

    def replay(self, run: Callable[[], None]) -> None:
        """Run the graph by `run`, and record what it writes."""
        finish_gathers(self.runtime)  # they may read shards that the graph writes
        calls = [CollectiveCall() for _ in self._logs]
        for call, fingerprints in zip(calls, self._logs.values()):
            fingerprints.call(f"replay of {self.name}", call)
        for reference in self._written:  # before it runs: after an interrupt, one all-gather too many is harmless
            if (group := reference()) is not None:
                group.writes += 1
        run()
        communicator = self.runtime.communicator
        if communicator.wait_state is not None:
            event = _torch.current_stream(communicator.device).record_event()
            for call in calls:
                call.event, call.device = event, communicator.device
            communicator.wait_state.in_flight += calls


def _grads_of(parameters: Sequence[Any]) -> list[Tensor | None]:
    return _torch.locals_of([parameter.sharded.grad for parameter in parameters])


class CapturedStep:
    """A captured step of an optimizer. A replay uses the values of options, and the tensors, that the optimizer had then."""

    def __init__(self, optimizer: weakref.ref[torch.optim.Optimizer], groups: Sequence[dict[str, Any]]) -> None:
        self._optimizer, state = optimizer, _first_state(optimizer())
        self._options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self._state = None if state is None else weakref.ref(state)  # one for all: load_state_dict() replaces them together

    def changed(self) -> str:
        """Return what changed since the capture, with the values after and before; "" if nothing changed."""
        optimizer = self._optimizer()
        if optimizer is None:
            return ""
        kind, groups = type(optimizer).__name__, optimizer.param_groups
        if len(groups) != len(self._options):
            return f"{kind} has {len(groups)} parameter groups, and had {len(self._options)}"
        for group, options in zip(groups, self._options):
            for name, then in options.items():
                now = group.get(name)
                if now is not then and (isinstance(now, Tensor) or isinstance(then, Tensor)):
                    return f"{name} of {kind} is not the tensor that it was"
                if now is not then and now != then:
                    return f"{name} of {kind} is {now}, and was {then}"
        if self._state is not None and _first_state(optimizer) is not self._state():
            return f"The states of {kind} are not the tensors that they were"
        return ""


def _first_state(optimizer: Any) -> Tensor | None:
    every = (value for state in optimizer.state.values() for value in state.values())
    return next((value for value in every if isinstance(value, Tensor)), None)


def finish_gathers(runtime: Runtime) -> None:
    """Wait for the all-gathers in flight."""
    for number in [*runtime.gathering]:
        runtime.run(runtime.scheduler.finish_unshard(number))


class Follower(Listener):
    """Follows the captures of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.captured: Captured | None = None  # while a graph is captured
        self._graphs = 0  # captured so far, with units in them
        self._border = -1  # on the scheduler's clock: where a capture began or ended last
        self._around = ExitStack()
        # For each group, whether the last backward that entered it was captured.
        self._sides: weakref.WeakKeyDictionary[ParamGroup, bool] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Let what is under way end before a capture. In a forward or backward do nothing: its parts may be captured."""
        runtime = self.runtime
        runtime.recover()
        if runtime.scheduler.running or runtime.backward.underway:
            return
        finish_gathers(runtime)
        runtime.reducer.drain()
        runtime.reducer.heartbeats.read(keep=0)
        runtime.communicator.capturing, self.captured = True, Captured(runtime)
        self._around.enter_context(runtime.watched(self._note))

    def _note(self, move: Move, unit: Unit, run: Callable[[], None]) -> None:
        if move is Move.UNSHARD and self.captured is not None:
            self._enter(self.captured)
            self.captured.note(unit)
        run()

    def _enter(self, captured: Captured) -> None:
        """Reshard every unit before the graph's first all-gather, so that it depends on nothing before the capture."""
        if not captured.name:  # only now: a graph without units may be captured on some ranks only
            self._graphs += 1
            self._border = self.runtime.scheduler.clock
            captured.name = f"graph {self._graphs}"
            captured.versions.update((group, group.version()) for unit in self.runtime.all_units() for group in unit.groups)
            self._shard_all()

    def finish(self) -> None:
        """Order the captured stream behind the others: no work may be left there."""
        if self.captured is not None:
            finish_gathers(self.runtime)
            self.runtime.reducer.drain()
            for beat, work in self.runtime.reducer.heartbeats.take_unread():
                work.wait()
                beat.expect()
                self.captured.heartbeats.append(beat)

    def end(self, failure: BaseException | None) -> Captured | None:
        """Reset what Python noted of a step that did not run. Return what was captured; None if nothing was, or on failure."""
        runtime, captured, self.captured = self.runtime, self.captured, None
        runtime.communicator.capturing = False
        self._around.close()
        if captured is None or not captured.name:
            return None
        self._border = runtime.scheduler.clock
        if failure is not None or runtime.scheduler.running or runtime.backward.underway:
            runtime.abort_step()
            return None
        self._shard_all()
        captured.seal()
        return captured

    def _shard_all(self) -> None:
        finish_gathers(self.runtime)
        for unit in self.runtime.all_units():
            unit.invalidate_unsharded()

    # --- events of a step ---

    def beginning_forward(self, unit: Unit) -> None:
        """Begin a forward in a capture. Raises StateError if a graph cannot hold it."""
        captured, runtime = self.captured, self.runtime
        if captured is None:
            return
        for one in units_below([root for root in (unit.outermost, *unit.modules) if root is not None]):
            if one.record.is_pinned and one.number not in captured.units:
                raise StateError(
                    f"Unit '{one.name}' is kept unsharded by unshard() or resident() around the capture of a graph of the "
                    "device: replays would compute with its parameters as they are now. Call reshard() before."
                )
        if runtime.communicator.next_event is not None:
            raise StateError(
                "set_post_optim_event() was called before a graph of the device was captured, which cannot wait for an event "
                "from outside of it. Wait for the event on the stream that is captured, before the capture."
            )
        self._enter(captured)

    def before_backward(self, call: ForwardCall) -> None:
        """Raise StateError if a capture separates this backward from its forward, or from the one that kept gradients."""
        unit, is_captured = self.runtime.backward.units[call.unit], self.captured is not None
        if call.end <= self._border or (self.captured is not None and not self.captured.name):
            raise StateError(
                f"The backward of unit '{unit.name}' and its forward are on two sides of the capture of a graph of the device. "
                "Capture both in one graph, or none."
            )
        for group in unit.groups:
            if group.grads.are_left and self._sides.get(group, False) is not is_captured:
                where, now = ("", "not ") if not is_captured else ("not ", "")
                raise StateError(
                    f"Gradients of unit '{unit.name}' were kept by a backward that is {where}in a graph of the device, and "
                    f"this backward is {now}in one. Capture all backwards of a step, in one graph or one each, or none; "
                    "zero_grad() discards what is kept."
                )
            self._sides[group] = is_captured


class FollowedGraph:
    """Methods of a graph that the runtimes of its thread follow: a base class beside torch's, see `followed`."""

    current: ClassVar[FollowedGraph | None] = None  # the graph that is captured
    _handled: BaseException | None = None  # the exception that the program was handling when the capture began
    _parts: Sequence[Captured] = ()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin the capture. Raises StateError if another one has not ended."""
        torch_graph: Any = super()
        if FollowedGraph.current is not None:
            raise StateError("A graph of the device is being captured. End its capture, or its block, before another begins.")
        FollowedGraph.current, self._handled = self, sys.exc_info()[1]
        try:
            for follower in _followers():
                follower.begin()
            torch_graph.capture_begin(*args, **kwargs)
        except BaseException as failure:
            self._end(failure)
            raise

    def capture_end(self) -> None:
        """Join the streams of the capture, and end it."""
        torch_graph: Any = super()
        if FollowedGraph.current is not self:
            torch_graph.capture_end()
            return
        raised = sys.exc_info()[1]  # torch.cuda.graph calls this for a block that raised, too
        failed = None if raised is self._handled else raised
        try:
            try:
                for follower in _followers():
                    follower.finish()
            finally:
                torch_graph.capture_end()
        except BaseException as failure:
            failed = failure
            raise
        finally:
            self._end(failed)

    def _end(self, failure: BaseException | None) -> None:
        """Keep what was captured, for replays. After a failure, keep nothing."""
        FollowedGraph.current = self._handled = None
        self._parts = [part for one in _followers() if (part := one.end(failure)) is not None]

    def replay(self) -> None:
        """Run the graph. Raises StateError before it would use memory or options that the model no longer has."""
        torch_graph: Any = super()
        for part in self._parts:
            part.check()
        run = torch_graph.replay
        for part in self._parts:
            run = partial(part.replay, run)
        run()


def _followers() -> list[Follower]:
    every = Runtime.all_of_thread()
    return [runtime.listener(Follower) for runtime in every if runtime.communicator.async_device is not None]


@functools.cache
def followed(kind: Any) -> Any:
    """Return the subclass of a class of graphs that runtimes follow; unchanged if they do so already, as after `install()`."""
    return kind if issubclass(kind, FollowedGraph) else type(kind.__name__, (FollowedGraph, kind), {})


def _note_step(optimizer: weakref.ref[torch.optim.Optimizer], groups: Sequence[dict[str, Any]]) -> None:
    """Record a step of an optimizer, if it is captured."""
    if FollowedGraph.current is not None:
        for follower in _followers():
            if follower.captured is not None:
                follower.captured.steps.append(CapturedStep(optimizer, groups))


STEP_LISTENERS.append(lambda optimizer, sharded: partial(_note_step, weakref.ref(optimizer)))
