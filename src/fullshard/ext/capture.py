"""`Graph`: a training step that is captured once and replayed without the host's work, and what is checked around replays.

before a capture       all-gathers and reductions in flight are waited for, and all heartbeats are read
first unit in it       all units are resharded, so that the graph itself all-gathers what it uses
while it lasts         nothing is polled, and nothing is shown to the watchdog; heartbeats become part of the graph
its end                the captured stream waits for the others; all units are resharded: a capture fills no buffers
before a replay        the newest heartbeat is read; addresses, `.grad` and options must be those of the capture
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import (
    CollectiveCall,
    ForwardCall,
    GroupFingerprints,
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
    tensors, gradients that are zeroed in place unless the graph clears them, and no reads by the host. A graph is one of
    torch's as well, with the arguments, `pool()` and `reset()` of torch.cuda.CUDAGraph.

    Raises:
        StateError: without an accelerator; in the captured block, if a graph cannot hold what runs in it (docs/capture.md).

    Example:
        >>> graph = fullshard.Graph()                                                         # doctest: +SKIP
        >>> with graph.capture():                                                             # doctest: +SKIP
        ...     loss = step(static)
        >>> for batch in data:                                                                # doctest: +SKIP
        ...     static.copy_(batch)
        ...     graph.replay()

    Source: torch.cuda.graph.
    """

    checks: Sequence[Callable[[], None]] = ()  # before a replay: each prepares it, or raises if it must not run
    entries: Sequence[tuple[Any, Callable[[Any], Any]]] = ()  # per log: its communicator, and what logs a replay
    written: Sequence[weakref.ref[ParamGroup]] = ()  # groups of units that a replay writes to

    def __new__(cls: Any, *args: Any, **options: Any) -> Any:
        """Make a graph of torch's class for the accelerator, `followed`."""
        if cls.__mro__[-2] is Graph:  # without a class of torch's
            device: Any = torch.get_device_module(torch.accelerator.current_accelerator(check_available=True) or "cpu")
            kind = getattr(device, "CUDAGraph", None) or getattr(device, "Graph", None)
            if kind is None:
                raise StateError("fullshard.Graph() needs an accelerator with graphs: the CPU has none.")
            cls = followed(kind, cls)
        return super().__new__(cls, *args, **options)

    def capture(self, **options: Any) -> AbstractContextManager[Any]:
        """Capture the block: forward and backward, and the optimizer's step or not.

        Args:
            options: those of torch.cuda.graph, such as `pool` and `stream`.

        Returns:
            The context manager of the block.
        """
        return torch.get_device_module(torch.accelerator.current_accelerator()).graph(self, **options)

    def capture_begin(self, *args: Any, **options: Any) -> None:
        """Begin the capture, as `capture` and torch.cuda.graph do.

        Args:
            args: those of torch's graph.
            options: those of torch's graph.
        """
        with ExitStack() as ends:  # run last to first by `capture_end`
            runtimes = [one for one in Runtime.all_of_thread() if one.communicator.async_device is not None]
            joins = [ends.enter_context(one.listener(Follower).following(self)) for one in runtimes]
            self.checks, self.entries, self.written = [], [], []
            super().capture_begin(*args, **options)  # type: ignore[misc]
            for end in (super().capture_end, *joins):  # type: ignore[misc]
                ends.callback(end)
            self._ends = ends.pop_all(), sys.exc_info()[1]

    def capture_end(self) -> None:
        """Join the streams of the capture, and end it."""
        (ends, outer), raised = vars(self).pop("_ends", (None, None)), sys.exc_info()
        if ends is None:  # it never began
            return super().capture_end()  # type: ignore[misc,no-any-return]
        # torch.cuda.graph ends a block that raised, too. But `outer` was raised before, if the block is part of an `except`.
        ends.__exit__(*(raised if raised[1] is not outer else (None, None, None)))

    def replay(self) -> None:
        """Run the step on the current stream.

        Raises:
            StateError: inside of a forward or backward; if the ranks diverged; if memory, a `.grad` or an option was replaced.
        """
        for check in self.checks:
            check()
        calls = [(communicator, add(CollectiveCall())) for communicator, add in self.entries]
        for group in filter(None, [group() for group in self.written]):
            group.writes += 1  # before it runs: after an interrupt, one all-gather too many is harmless
        super().replay()  # type: ignore[misc]
        for communicator, call in calls:
            if communicator.wait_state is not None:  # let the watchdog follow
                call.device, call.event = communicator.device, _torch.current_stream(communicator.device).record_event()
                communicator.wait_state.in_flight.append(call)


@cache
def followed(kind: Any, base: Any = Graph) -> Any:
    """Return the subclass of torch's class `kind` that runtimes follow; `kind` itself if it is one, as after `install()`."""
    return kind if issubclass(kind, base) else type(kind.__name__, (base, kind), {})


def capture_obstacles(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    """Return which units and optimizers a graph cannot hold; empty if it can hold all of them. Equal on all ranks.

    Args:
        model: a module with units.
        optimizers: those whose steps are captured as well.

    Returns:
        What a graph cannot hold, one text per unit or optimizer.

    Example:
        >>> graph = None if fullshard.capture_obstacles(model) else fullshard.Graph()         # doctest: +SKIP
    """
    found = [f"Unit '{unit.name}': {why}." for unit in units_below([model]) if (why := _obstacle(unit))]
    waits = [one for one in optimizers if _torch.steps_as(one, torch.optim.Muon) or view_of(one) == "whole_view"]
    return found + [f"{type(one).__name__}: the host waits for all ranks in its step. Leave that out." for one in waits]


def _obstacle(unit: Unit, gathers: bool = True) -> str:
    options = unit.options
    if isinstance(options.offload, CPUOffloadPolicy):
        return "its shards are in host memory (CPUOffloadPolicy), where the host steps them: run its step eagerly"
    adapters = options.gather_adapter, options.reduce_adapter, options.comm.collectives
    return "it has custom collectives: run its step eagerly" if gathers and any(one is not None for one in adapters) else ""


class Follower(Listener):
    """Follows the captures of one runtime."""

    graph: Any = None  # being captured
    _count = 0  # of captures so far that met a unit
    _border = -1  # the scheduler's clock when a capture met its first unit, or ended

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._inside: dict[int, bool] = {}  # by number of the unit: whether the last backward that entered it was captured

    @contextmanager
    def following(self, graph: Graph) -> Iterator[Callable[[], None]]:
        """Follow a capture for the block. Yield its last call: `_join`, or a no-op (not followed) if a forward is running."""
        if self.graph is not None:
            raise StateError("A graph of the device is being captured. End its capture, or its block, before another begins.")
        runtime = self.runtime
        runtime.recover()
        if runtime.scheduler.running or runtime.backward.underway:
            yield lambda: None
            return
        self._finish_gathers()
        runtime.reducer.drain()
        runtime.reducer.heartbeats.read(keep=0)
        self._units, self._logs = dict[int, Unit](), dict[object, GroupFingerprints]()  # that the graph uses
        self._versions = {group: group.version() for unit in runtime.all_units() for group in unit.groups}  # at begin
        self.graph, runtime.communicator.capturing, self._gathers, failed = graph, True, False, True
        event, runtime.communicator.next_event = runtime.communicator.next_event, None  # from outside: the first replay waits
        try:
            with runtime.watched(self._note):
                yield self._join
            if runtime.scheduler.running or runtime.backward.underway:
                raise StateError("A capture ended in a forward or backward, or behind one that raised. Capture it as a whole.")
            failed = False
        finally:
            self.graph, runtime.communicator.capturing, runtime.communicator.next_event = None, False, event
            groups = [group for unit in self._units.values() for group in unit.groups]
            self._units, self._versions = {}, {}
            if self._gathers and failed:
                runtime.abort_step()
            if self._gathers:
                self._shard_all()  # their buffers hold garbage
            if groups and not failed:
                for parts in filter(None, [group.parts for group in groups]):
                    parts.keep()  # replays write to it
                graph.checks = [*graph.checks, Memory(groups).check]
                for table in self._logs.values():
                    table.call(f"capture of graph {self._count} ends")

    def _note(self, move: Move, unit: Unit, run: Callable[[], None]) -> None:
        if move is Move.UNSHARD:
            self._use(unit)
        run()

    def _use(self, unit: Unit, why: str = "", gathers: bool = True) -> None:
        """Record that the graph uses a unit. Raise StateError if it cannot: for `why`, else for an `_obstacle`."""
        if why := why or _obstacle(unit, gathers):
            raise StateError(f"A graph of the device cannot hold unit '{unit.name}': {why}.")
        if gathers and not self._gathers:
            self._gathers = True
            self._shard_all()  # so that it depends on nothing before the capture
        if not self._units:  # only now: a graph without units may be captured on some ranks only
            self._count += 1
            self.graph.checks.append(self._prepare_replay)
        self._units[unit.number] = unit
        for group in unit.groups:
            if (log := group.fingerprints.log) not in self._logs:
                table = self._logs[log] = GroupFingerprints(log, UnitName(""), "")
                table.call(f"capture of graph {self._count} begins")
                self.graph.entries.append((self.runtime.communicator, partial(table.call, f"replay of graph {self._count}")))

    def _join(self) -> None:
        """Let the captured stream wait for the others. Note what replays write."""
        for unit in self.runtime.all_units():
            if any(group.version() != self._versions.get(group) for group in unit.groups):
                self._use(unit, gathers=False)  # it may have had no forward, if only an optimizer writes to it
                self.graph.written += map(weakref.ref, unit.groups)
        self._finish_gathers()
        self.runtime.reducer.drain()
        for beat, work in self.runtime.reducer.heartbeats.take_unread():
            work.wait()
            beat.expect()  # until the first replay
            self.graph.checks.append(partial(self.runtime.reducer.heartbeats.check, beat))

    def _prepare_replay(self) -> None:
        self.runtime.recover()
        if self.runtime.scheduler.running or self.runtime.backward.underway:
            raise StateError("A graph was replayed inside of a forward or backward. Replay it before or after.")
        self._finish_gathers()  # they may read shards that the graph writes
        self.runtime.communicator.wait_for_next_event()  # the user's

    def _finish_gathers(self) -> None:
        for number in [*self.runtime.gathering]:
            self.runtime.run(self.runtime.scheduler.finish_unshard(number))

    def _shard_all(self) -> None:
        self._border = self.runtime.scheduler.clock
        self._finish_gathers()
        for unit in self.runtime.all_units():
            unit.invalidate_unsharded()

    def beginning_forward(self, unit: Unit) -> None:
        """In a capture, record the unit. Raise StateError if one in its model was pinned before it."""
        if self.graph is not None:
            for one in units_below([root for root in (unit.outermost, *unit.modules) if root is not None]):
                if one.record.is_pinned and one.number not in self._units:
                    self._use(one, "it is kept unsharded by unshard() or resident(), so replays see old values: reshard() it")
            self._use(unit)

    def before_backward(self, call: ForwardCall) -> None:
        """Raise StateError if a capture separates this backward from its forward, or from the one that kept gradients."""
        unit, is_captured = self.runtime.backward.units[call.unit], self.graph is not None
        kept = self._inside.get(call.unit, False) is not is_captured and any(group.grads.are_left for group in unit.groups)
        if kept or call.end <= self._border or (is_captured and not self._gathers):  # it begins with a backward
            raise StateError(
                f"The backward of unit '{unit.name}' and {'one that kept its gradients' if kept else 'its forward'} are on two "
                "sides of the capture of a graph. Capture a step, or each microbatch, in one; zero_grad() drops kept gradients."
            )
        self._inside[call.unit] = is_captured


class Memory:
    """What a graph uses but does not own: shards, kept buffers, and `.grad` of the first parameter of each group."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups, self._addresses, self._grads = [*map(weakref.ref, groups)], _addresses(groups), _grads(groups)
        # `moves` counts moved shards only, so -1 (always compare) for kept buffers and insides of subclasses.
        self._moves = -1 if any(group.keeps_memory or not group.flat for group in groups) else ShardedParameter.moves

    def check(self) -> None:
        """Raise StateError if a replay would use other memory than there is now."""
        groups: list[Any] = [group() for group in self._groups]
        if None in groups or (self._moves != ShardedParameter.moves and _addresses(groups) != self._addresses):
            raise StateError(
                "A graph holds addresses of sharded parameters that changed since its capture: by .to(), undo(), `.data =`, "
                "another fully_shard(), or set_keep_unsharded_storage(). Capture the step again."
            )
        for group, now, then in zip(groups, _grads(groups), self._grads):
            if then is not None and now != then:
                raise StateError(
                    f"A graph uses the gradient of '{group.parameters[0].name}' of unit '{group.parameters[0].unit_name.name}' "
                    "in a tensor that is its .grad no longer. Keep it between replays: zero_grad(set_to_none=False)."
                )


def _addresses(groups: Sequence[ParamGroup]) -> list[int]:
    found = [group.shard for group in groups]
    for group in groups:
        found += [] if group.flat else inner_tensors(group.parameters[0].local)
        found += [buffer.flat for buffer in group.buffers if group.keeps_memory and hasattr(buffer, "flat")]
    return [tensor.data_ptr() for tensor in found]


def _grads(groups: Sequence[ParamGroup]) -> list[int | None]:
    grads = _torch.locals_of([group.sharded[0].grad for group in groups])
    return [None if grad is None else grad.data_ptr() for grad in grads]


def _settings(optimizer: Any) -> dict[tuple[str, int], Any]:
    """Return what a replay cannot change: options, and one state, as load_state_dict() replaces all states at once."""
    groups, states = optimizer.param_groups, (value for state in optimizer.state.values() for value in state.values())
    options = {(name, at): value for at, group in enumerate(groups) for name, value in group.items() if name != "params"}
    first = [local.data_ptr() for local in _torch.locals_of([*islice((one for one in states if isinstance(one, Tensor)), 1)])]
    return {("len(param_groups)", 0): len(groups), ("address of a state", 0): first, **options}


def _check_step(reference: weakref.ref[torch.optim.Optimizer], settings: dict[tuple[str, int], Any]) -> None:
    optimizer = reference()
    found = settings if optimizer is None else _settings(optimizer)
    for (name, at), then in settings.items():
        now = found.get((name, at))
        if now is not then and ((is_tensor := isinstance(now, Tensor) or isinstance(then, Tensor)) or now != then):
            what = "another tensor than" if is_tensor else f"{now}, and was {then}"
            raise StateError(
                f"{name} of {type(optimizer).__name__} is {what} when its step was captured, and replays keep to that. Use a "
                "tensor for an option, as in lr=torch.tensor(0.1), and write to tensors in place; or capture the step again."
            )


def _note_step(optimizer: weakref.ref[torch.optim.Optimizer], _groups: object) -> None:
    for runtime in Runtime.all_of_thread():
        if runtime.communicator.capturing:
            runtime.listener(Follower).graph.checks.append(partial(_check_step, optimizer, _settings(optimizer())))


STEP_LISTENERS.append(lambda optimizer, sharded: partial(_note_step, weakref.ref(optimizer)))
