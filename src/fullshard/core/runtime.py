"""The runtime of one device and thread: runs what the scheduler decides, and ends a backward."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import local
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from fullshard import _torch
from fullshard.comm.streams import Work, stream_for
from fullshard.core.communicator import Communicator
from fullshard.core.param_group import ParamGroup
from fullshard.core.reducer import GradientReducer, Listener
from fullshard.core.scheduler import PASS_BY, REDUCE, RESHARD, SHARDED, UNSHARD, WAIT, Action, Move, Scheduler, UnitRecord
from fullshard.core.sharded_tensor import restore_subclass
from fullshard.core.unit import Unit, is_attached
from fullshard.core.unit_options import KeepAfterForward
from fullshard.core.units import name_units_in, units_below
from fullshard.errors import StateError
from fullshard.policies import CheckPolicy, CommPolicy

PATIENCE = 10.0  # seconds that a thread of the autograd engine may take to drop a backward that raised


class Runtime:
    """Runs the units of one device and one thread, with weak references to them. docs/architecture.md draws who calls whom."""

    _of_thread = local()

    @classmethod
    def of(cls, device: torch.device, comm: CommPolicy) -> Runtime:
        """Return the runtime for this thread and device. Each value of `comm.lanes` has one of its own."""
        known: dict[tuple[torch.device, object], Runtime] = cls._of_thread.__dict__.setdefault("runtimes", {})
        key = (device, comm.lanes)
        if key not in known:
            known[key] = cls(Communicator(device, comm.lanes or stream_for))
        return known[key]

    @classmethod
    def all_of_thread(cls) -> list[Runtime]:
        """Return the runtimes of this thread."""
        return list(cls._of_thread.__dict__.get("runtimes", {}).values())

    @property
    def is_of_this_thread(self) -> bool:
        """True on the thread that shards and trains its models."""
        return self in self.all_of_thread()

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.scheduler = Scheduler()
        self.listeners: list[Listener] = []  # follow the steps (an extension point)
        self.reducer = GradientReducer(self.communicator, self.listeners)
        self.backward = RunningBackward(communicator)
        self.kept: weakref.WeakSet[Unit] = weakref.WeakSet()  # units that are kept unsharded between steps
        self.trace: list[tuple[int, bool]] = []  # units that the outermost forward entered (True) and left so far, for `join()`
        self.raised_in: tuple[str, str] | None = None  # the innermost forward that an exception left, and its text

        # Units by number, oldest first, and the numbers of those that were deleted since `forget_deleted` last ran.
        self._units: dict[int, weakref.ref[Unit]] = {}
        self._deleted: deque[int] = deque()
        self._numbers = itertools.count()

        self.gathering: dict[int, list[tuple[ParamGroup, Work]]] = {}  # all-gathers in flight, by number of the unit
        # Called as around(move, unit, run) in place of each action; its argument `run()` carries the action out. None: no call.
        self._around: Callable[[Move, Unit, Callable[[], None]], None] | None = None

    # --- units ---

    def register(self, unit: Unit) -> UnitRecord:
        """Add a new unit and return its record."""
        self.recover()  # a backward that raised holds its units, which may be of a model that this one replaces
        self.forget_deleted()
        self.reducer.poll()  # collectives of a deleted model may hold its memory, which this unit may need
        number = next(self._numbers)
        self._units[number] = weakref.ref(unit)
        weakref.finalize(unit, self._deleted.append, number)
        return self.scheduler.register(number, unit.options, partial(is_attached, unit.path))

    def unregister(self, unit: Unit) -> None:
        """Remove a unit that its modules no longer have, with its hooks and its gradients that are not in `.grad` yet."""
        unit.undone = True
        for _, handle in unit.hooks:
            handle.remove()
        unit.hooks.clear()
        self.reducer.discard(unit)
        self.kept.discard(unit)
        self._deleted.append(unit.number)
        self.forget_deleted()

    def unit(self, number: int) -> Unit | None:
        """Return the unit with this number, None if it is deleted."""
        reference = self._units.get(number)
        return None if reference is None else reference()

    def all_units(self) -> list[Unit]:
        """Return the living units, oldest first."""
        return [unit for reference in self._units.values() if (unit := reference()) is not None]

    def forget_deleted(self) -> None:
        """Unregister the units that were deleted, which may have happened on any thread, in the middle of an event."""
        while self._deleted:
            number = self._deleted.popleft()
            if self._units.pop(number, None) is not None:
                self.scheduler.unregister(number)
                self.reducer.forget_deleted()
                self.update_timeouts()
                for group, work in self.gathering.pop(number, ()):  # messages still arrive in this memory
                    self.reducer.in_flight.push(work, group.free_unsharded, polled=False)

    def update_timeouts(self, *more: CheckPolicy) -> None:
        """Take patience and timeout from the check policies of all units. `more`: of a unit that is about to be created."""
        self.communicator.update_timeouts([*more, *(unit.options.checks for unit in self.all_units())])

    def unshard_kept(self, units: Sequence[Unit]) -> None:
        """All-gather these units, if they are kept unsharded between steps. Collective."""
        self.communicator.wait_for_next_event()
        self._drop_stale()
        kept = [unit.record for unit in units if unit.options.retention is KeepAfterForward.KEPT]
        self.run([start for record in kept for start in self.scheduler.start_unshard(record)])
        self.run([wait for unit in units for wait in self.scheduler.finish_unshard(unit.number)])

    def _drop_stale(self) -> None:
        """Reshard the stale units among the kept ones."""
        self.run(self.scheduler.drop_stale(sorted(unit.number for unit in self.kept if unit.stale)))

    # --- forward ---

    def begin_outermost_forward(self, unit: Unit, module: nn.Module) -> None:
        """Prepare a step at the beginning of an outermost forward."""
        device = self.communicator.async_device
        if device is not None and not self.communicator.capturing and _torch.is_capturing(device):
            raise StateError(
                f"The forward of unit '{unit.name}' was called in a graph capture (as by torch.cuda.graph) that fullshard does "
                "not follow. Capture the whole step by fullshard.Graph().capture(), on the thread of the model, or call "
                "fullshard.install() before torch.cuda.CUDAGraph(): it follows graphs that are made afterwards."
            )
        self.raised_in = None
        restore_subclass()  # an optimizer's step that raised may have left parameters as plain DTensors
        self.forget_deleted()
        if not unit.names_units:
            unit.names_units = True
            name_units_in(module, runs=True)
        self.trace.clear()
        self.reducer.heartbeats.read()
        self.communicator.roll_blocks()
        for listener in tuple(self.listeners):
            listener.beginning_forward(unit)
        self.communicator.wait_for_next_event()
        if self.kept:
            self._drop_stale()

    def listener(self, kind: Callable[[Runtime], Listener]) -> Any:
        """Return the listener of the class `kind`; create it if there is none."""
        found = next((one for one in self.listeners if type(one) is kind), None)
        if found is None:
            self.listeners.append(found := kind(self))
        return found

    # --- actions ---

    def run(self, actions: Sequence[Action], *, observed: bool = False) -> None:
        """Run actions in order. If one raises, free what this and later actions unshard: the scheduler counts them as done.

        `observed`: the caller has reported them already (`_observe`).
        """
        observe = not observed and (self._around is not None or _torch.profiling())
        for index, (move, number) in enumerate(actions):
            reference = self._units.get(number)
            unit = None if reference is None else reference()
            if unit is None:
                continue  # deleted since the scheduler decided
            try:
                if observe:
                    self._observe(move, unit)
                elif move is UNSHARD:
                    if not unit.gathers_decided:
                        unit.decide_gathers()
                    text = "backward gather" if self.backward.underway else "forward gather"
                    works = self.gathering[number] = []
                    for group in unit.groups:
                        works.append((group, group.start_all_gather(self.communicator, text)))
                elif move is WAIT:
                    for group, work in self.gathering[number]:
                        work.wait()
                        group.finish_all_gather()
                    del self.gathering[number]
                    if unit.record.unsharded_by_user or unit.record.resident_blocks:
                        unit.expose()
                elif move is RESHARD:
                    unit.free_unsharded()
                elif move is REDUCE or move is PASS_BY:
                    self._end_unit(unit, reduces=move is REDUCE)
                else:  # SAVE_SUBGROUP_SHARD
                    for group in unit.groups:
                        group.save_subgroup_shard()
            except BaseException:
                for failed in dict.fromkeys(number for _, number in actions[index:]):
                    unit = self.unit(failed)
                    if unit is not None:
                        self._discard_unsharded(unit)
                raise

    def _observe(self, move: Move, unit: Unit) -> None:
        """Run an action with a label in torch's profiler and, inside a `watched` block, through the function of the block."""
        run = partial(self.run, [(move, unit.number)], observed=True)
        with record_function(f"fullshard::{move.value} {unit.name}"):
            if self._around is None:
                run()
            else:
                self._around(move, unit, run)

    def _end_unit(self, unit: Unit, *, reduces: bool) -> None:
        """Reduce the gradients of a unit whose backward is done; if its parameters get none (`PASS_BY`), log that instead."""
        if unit.record.residency is not SHARDED and not unit.record.is_pinned:
            unit.uninstall()
        if not reduces:
            self.backward.passed.add(unit.number)
        for group in unit.groups:
            if group.trainable and reduces:
                self.reducer.reduce(unit, group, group.take_gradients() or [None] * len(group.parameters))
            elif group.trainable:  # so that a rank that reduces is found to diverge
                group.fingerprints.log.append(group.fingerprints["backward of inputs only"])
        if reduces:
            self.reducer.in_flight.poll()
            if self.reducer.replicates:
                self.reducer.replicating.poll()

    @contextmanager
    def watched(self, around: Callable[[Move, Unit, Callable[[], None]], None]) -> Iterator[None]:
        """Within the block, call `around(move, unit, run)` for each action; `around` calls `run()`, which carries it out."""
        before, self._around = self._around, around
        try:
            yield
        finally:
            self._around = before

    # --- backward ---

    def begin_backward(self) -> None:
        """At the first event of a backward, register `end_backward` for its end."""
        if self.backward.underway:
            return
        end, device = self.end_backward, self.communicator.async_device
        if device is not None:
            # Messages are allocated on the stream of forward, the current one here. The end of backward reads and frees them on
            # the stream of backward()'s caller. So in the end the stream of forward waits for the caller's (`then_order`).
            end = partial(_torch.then_order, _torch.current_stream(device), end)
        self.backward.unfinished = self.reducer.unfinished
        self.backward.begin(end)
        self.scheduler.begin_backward()

    def end_backward(self) -> None:
        """End the outermost backward that entered a unit: set `.grad` of all parameters whose step ends, or of none.

        Groups with gradient hooks are different, since their hooks run in every backward: most were committed during backward,
        and the last `reductions_in_flight` of them are here, with the other groups if the step ends, else one by one.
        """
        with torch.no_grad():
            try:
                self._reduce_rest()
                self.commit_gradients()
            except BaseException as failure:
                self.note_interrupt(failure)
                if self.reducer.decided is not None:
                    self.commit_gradients()
                elif self.backward.underway:
                    self.backward.mark_raised()
                raise

    def _reduce_rest(self) -> None:
        """Reduce the gradients that are left at the end of a backward, and decide which to set as `.grad`."""
        for listener in tuple(self.listeners):
            listener.ending_backward()
        self.run(self.scheduler.after_backward())
        units = self.backward.units
        for number, unit in sorted(units.items()):
            if unit.record.residency is not SHARDED and not unit.record.is_pinned:
                unit.uninstall()
            # A zero-bubble schedule sets `.grad` of unsharded parameters itself, between backwards of inputs: leave it there.
            if number in self.backward.passed and not unit.options.reduces:
                continue
            for group in unit.groups:
                grads = group.take_gradients()
                if grads is not None:  # they arrived after the unit was reduced, from a second graph for example
                    self.backward.passed.discard(number)
                    self.reducer.reduce(unit, group, grads)
        touched = [unit for number, unit in units.items() if number not in self.backward.passed]
        if touched:  # else it reached inputs only, which ends no step
            self.reducer.collect(touched)

    def commit_gradients(self) -> None:
        """Set `.grad`. Nothing can undo the backward any more."""
        self.backward.stop()
        self.backward.units.clear()
        self.reducer.assign_grads()

    # --- after an exception ---
    # Events are module hooks, autograd hooks and the callback at the end of a backward. Waits are `CollectiveCall.wait`.
    #
    #   a backward raised                          found by the next event or `check_idle`   reset of the models that it reached
    #   a forward ended without post-forward hook  found by its next forward or `check_idle` reset of the models that ran in it
    #   an interrupt broke off an event or a wait  sets `Communicator.interrupted`           reset of everything

    def note_interrupt(self, failure: BaseException) -> None:
        """Set the flag if `failure`, which breaks off an event, is an interrupt (KeyboardInterrupt, SystemExit)."""
        if not isinstance(failure, Exception):
            self.communicator.interrupted = True

    def recover(self) -> None:
        """Reset what was left by an interrupted event or wait, or by a backward that raised."""
        if self.communicator.interrupted:
            if self.reducer.decided is not None:
                self.commit_gradients()  # the interrupt came after the decision to set `.grad`: set it now
            gone = [unit for unit in self.all_units() if self.reducer.is_undelivered(unit)]
            if self.backward.underway:
                gone += self._warn_of_backward()
            elif gone:
                names = ", ".join(f"'{unit.name}'" for unit in gone)
                warnings.warn(
                    f"An interrupt came while gradients of {names} were being reduced. These gradients are discarded.",
                    stacklevel=3,
                )
            self.reset(discard=gone)
            # Last: if this is interrupted as well, the next event or public call resets again.
            self.communicator.interrupted = False
        elif self.backward.has_raised():
            gone = self._warn_of_backward()
            self.reset(self._broken_units(), discard=gone)

    def abort_step(self) -> None:
        """Reset everything and discard gradients not in `.grad` yet: the ranks agreed on a failed step, or a capture failed."""
        if self.communicator.interrupted:
            self.recover()
        self.reset(discard=self.all_units())

    def abort_in_progress(self) -> None:
        """Reset the models of a forward that ended without its post-forward hook. Other models go on."""
        self.reset(self._broken_units())

    def abort_if_left(self, unit: Unit) -> None:
        """Reset a forward of the unit that is in progress for the scheduler, but not on this thread's stack."""
        if unit.record.running and not any(_torch.is_in_forward(module) for module in unit.modules):
            self.abort_in_progress()

    def _broken_units(self) -> list[Unit]:
        numbers = self.scheduler.broken_units(self.backward.units)
        return [unit for number in sorted(numbers) if (unit := self.unit(number)) is not None]

    def _warn_of_backward(self) -> list[Unit]:
        """Warn that a backward raised. Return the units whose gradients from earlier backwards must be discarded as well.

        If any unit has such gradients, this returns all units that the backward reached or would have reached, and those below,
        since a step is all or nothing.
        """
        names = ", ".join(f"'{unit.name}'" for unit in self.backward.units.values()) or "no unit"
        reached = [*self.backward.units.values(), *self._broken_units()]
        below = units_below(root for unit in reached for root in unit.modules)
        step = [unit for unit in dict.fromkeys([*reached, *below]) if unit.runtime is self]
        kept = any(
            unit.number in self.backward.unfinished or any(group.grads.are_left for group in unit.groups) for unit in step
        )
        also = ", together with the gradients that earlier backwards of the step kept or reduced" if kept else ""
        warnings.warn(
            f"The last backward raised after it had reached {names}. The gradients of that backward are discarded{also}.",
            stacklevel=4,
        )
        return step if kept else []

    def reset(self, units: Sequence[Unit] | None = None, *, discard: Sequence[Unit] = ()) -> None:
        """Break off the running forward and backward, set no `.grad`, and free the unsharded parameters of these units.

        Args:
            units: the units of the models that failed; others go on. None for all: after an interrupt, since no record can be
                trusted; after ranks agreed that a step failed, since each may have stopped elsewhere; after a failed capture.
            discard: units whose gradients of earlier backwards are discarded too, but for those in `.grad`.
        """
        everything, units = units is None, self.all_units() if units is None else units
        numbers = {unit.number for unit in units}
        restore_subclass()  # an optimizer's step that raised may have left parameters as plain DTensors
        self.backward.stop()
        for listener in tuple(self.listeners):
            listener.on_reset(numbers)
        self.reducer.abort(self.backward.units)
        if everything:
            self.communicator.wait_for_all_streams()
            self.reducer.heartbeats.clear()
        for unit in units:
            unit.forwards.clear()
            self._discard_unsharded(unit)
            for group in unit.groups:
                group.drop_gradients()
        if everything:
            self.gathering.clear()  # those of units that were deleted, which no later step may wait for
        self.scheduler.reset(None if everything else numbers)
        for unit in discard:
            self.reducer.discard(unit)
        self.backward.units.clear()

    def _discard_unsharded(self, unit: Unit) -> None:
        """Free the unsharded parameters of a unit, whatever state they are in."""
        self.scheduler.discard(unit.number)
        gathering = self.gathering.pop(unit.number, None)
        unit.exposed = {}  # what the user wrote to them is discarded
        # Memory that messages still arrive in must not be reused. On an accelerator, order the compute stream behind them. On
        # the CPU they may never come, and keep their memory alive themselves.
        if gathering is not None and self.communicator.async_device is not None:
            for _, work in gathering:
                with suppress(Exception):
                    work.wait()
        for group in unit.groups:
            if gathering is not None:
                group.drop_unsharded()
                continue
            group.uninstall()
            with suppress(StateError):  # raised if numpy uses the memory, which is dropped instead of freed
                group.free_unsharded()


class RunningBackward:
    """The outermost backward that entered a unit.

    autograd's engine holds the only reference to the callback at its end. If that is deleted without having run, the backward
    raised. On an accelerator the engine runs nodes on its own threads. One of them may hold that reference for a moment after
    the caller has caught the exception, so `has_raised` waits for it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._end: weakref.ref[Callable[[], None]] | None = None
        self.underway = False  # it has begun and not ended, even if it raised
        self.raised = False  # it will never end
        self.collects = False  # it is known to give parameters gradients: units that it enters from then on are reduced
        self.units: dict[int, Unit] = {}  # the units that it entered, by number
        self.unfinished: set[int] = set()  # `GradientReducer.unfinished` when it began
        self.passed: set[int] = set()  # numbers of the `units` of which no parameter gets a gradient

    def begin(self, leave: Callable[[], None]) -> None:
        """Begin a backward. The engine calls `leave` when it ends."""
        end = partial(leave)
        self._end = weakref.ref(end, self.mark_raised)
        self.underway, self.raised = True, False
        _torch.on_backward_end(end)

    def has_raised(self) -> bool:
        """Return True if it raised. If it is underway, but no backward runs on this thread, wait until the engine drops it.

        Raises StateError if it still runs on another thread after `PATIENCE` seconds.
        """
        if self.underway and not self.raised and _torch.current_graph_task() == -1:
            limit = time.monotonic() + PATIENCE
            while self.underway and not self.raised:
                if time.monotonic() > limit:
                    names = ", ".join(f"'{unit.name}'" for unit in self.units.values())
                    raise StateError(
                        f"A unit was used while a backward of another thread runs, which has reached {names}. Use the units of "
                        "a device from one thread at a time, and begin a forward after backward() has returned."
                    )
                time.sleep(1e-4)  # let the thread that holds the callback run
        return self.raised

    def mark_raised(self, _: object = None) -> None:
        """Record that the backward, or its end, raised: put the sharded parameters back at once, without collectives."""
        self._end = None  # else this, called by `end_backward`, runs again when the callback is deleted
        try:
            reached = list(self.units.values())
            for unit in reached:
                unit.uninstall()
            if reached:
                self._communicator.report_exception(f"'{reached[-1].name}' backward")
        finally:
            self.raised = True  # last, since another thread may be waiting for it

    def stop(self) -> None:
        """End the backward, but keep the units that it entered."""
        self._end = None  # a weak reference that is deleted does not call `mark_raised`
        self.underway = self.raised = self.collects = False
        self.passed.clear()
