"""Runs actions on lanes and puts right what was interrupted: one runtime per device and per thread that shards."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from threading import get_ident, local
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from fullshard import _torch
from fullshard.collectives.streams import Lane, LaneWork, lane_for
from fullshard.consistency.collective_log import CollectiveLog, Fingerprint, described
from fullshard.errors import StateError
from fullshard.params.group import ParamGroup
from fullshard.params.shard_values import read_slots
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.sharded_tensor import wake
from fullshard.policies import CheckPolicy, CommPolicy
from fullshard.runtime.backward import BackwardHook, FinalCallback
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.reducer import GradientReducer
from fullshard.runtime.replicas import check_replicas, share_buffers
from fullshard.runtime.unit import Unit, unit_of
from fullshard.schedule.join import Joined, JoinedCalls
from fullshard.schedule.order import ForwardCall
from fullshard.schedule.planner import Planner
from fullshard.schedule.residency import Action, Reduce, Reshard, Residency, SaveSubgroupShard, Unshard, Wait
from fullshard.sharding.mesh import ShardAxis

M = TypeVar("M", bound=Callable[..., Any])


def _event(method: M) -> M:
    """An event that begins where the one before it was not cut short, and says if it is."""

    @wraps(method)
    def whole(self: Runtime, *args: Any, **kwargs: Any) -> Any:
        if self.interrupted:
            self._reset_after_interrupt()
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self.interrupted = True
            raise

    return whole  # type: ignore[return-value]


class Runtime:
    """runtime 1 - n units (held weakly), 1 - 1 planner, 1 - 1 communicator, 1 - 1 delivery."""

    _of_thread = local()

    @classmethod
    def of(cls, device: torch.device, comm: CommPolicy) -> Runtime:
        """The runtime of this thread and device; policies that bring lanes of their own have one of their own."""
        known: dict[tuple[torch.device, object], Runtime] = cls._of_thread.__dict__.setdefault("runtimes", {})
        key = (device, comm.lanes)
        if key not in known:
            known[key] = cls(device, comm.lanes or lane_for)
        return known[key]

    @classmethod
    def all_of_thread(cls) -> list[Runtime]:
        return list(cls._of_thread.__dict__.get("runtimes", {}).values())

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        self.device = device
        self.planner = Planner(self._can_prefetch)
        self.communicator = Communicator(device, lanes)
        self.reducer = GradientReducer(self.communicator)
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._thread = get_ident()
        self._pending_deletes: deque[int] = deque()  # units that were deleted by another thread
        self._forwards = 0  # outermost ones so far
        self._event: object = None  # of the caller, that the next forward is ordered behind
        self._gathering: dict[int, list[tuple[ParamGroup, LaneWork]]] = {}
        self._backward: weakref.ref[FinalCallback] | None = None
        self._units_in_backward: dict[int, Unit] = {}  # units that entered the running backward
        self._trace: list[tuple[int, bool]] = []  # units that the outermost forward under way entered (True) and left
        self._joined = JoinedCalls(self.planner)
        self._leaving: tuple[str, str] | None = None  # the innermost forward that an exception left, and which
        self.interrupted = False  # whether an interrupt came in the midst of an event
        self._run: dict[type[Action], Callable[[Unit], None]] = {
            Unshard: self._unshard,
            Wait: self._wait,
            SaveSubgroupShard: self._retain,
            Reshard: self._reshard,
            Reduce: self._reduce,
        }

    # --- units ---

    def register(self, unit: Unit) -> int:
        self._dismiss_gone()
        number = next(self._numbers)
        self._units[number] = unit
        self.planner.register(number, keep=unit.options.reshard_policy)
        weakref.finalize(unit, self._deleted, number)
        return number

    def update_timeouts(self, *more: CheckPolicy) -> None:
        """`more`: of a unit that is about to be made."""
        self.communicator.update_timeouts([*more, *(unit.options.checks for unit in self._units.values())])

    def _deleted(self, number: int) -> None:
        """By whom ever: garbage is collected by any thread, maybe in the midst of our work."""
        if get_ident() == self._thread:
            self._dismiss(number)
        else:
            self._pending_deletes.append(number)

    def _dismiss_gone(self) -> None:
        while self._pending_deletes:
            self._dismiss(self._pending_deletes.popleft())

    def _can_prefetch(self, number: int) -> bool:
        unit = self._units.get(number)
        return unit is not None and unit.is_still_attached()

    def unregister(self, unit: Unit) -> None:
        """The unit was taken off its modules."""
        self.reducer.discard(unit)
        if self._units.pop(unit.number, None) is not None:
            self._dismiss(unit.number)

    def _dismiss(self, number: int) -> None:
        """Forget a unit; what is still arriving for it keeps its memory until then."""
        if not self.planner.knows(number):
            return
        self.planner.unregister(number)
        self.update_timeouts()
        for group, ticket in self._gathering.pop(number, ()):
            self.reducer.track(ticket, group.free_unsharded)

    # --- events ---

    def enter_forward(self, unit: Unit, module: nn.Module) -> None:
        self._recover_if_stale()
        planner, number = self.planner, unit.number
        if _torch.in_transform():
            raise StateError(
                f"unit '{unit.name}' was called inside a transform of torch.func (grad, vjp, jvp, vmap, jacrev), which cannot "
                "gather: use torch.autograd.grad or fullshard.grad, or compute with the tensors of fullshard.gathered()"
            )
        if unit.shows_plain:
            raise StateError(
                f"the forward of unit '{unit.name}' was called inside full_params(), which shows its parameters to read and "
                "write: call it outside, or keep the model gathered with resident()"
            )
        if (
            planner.outermost() == number
            and not unit.is_list
            and not unit.runs_method
            and not _torch.is_in_forward(module, outer=True)
        ):
            self._abort_in_progress()  # the forward before this one was interrupted in a way that runs no hooks
        if _torch.current_graph_task() != -1:
            first = self._begin_backward()
            self._units_in_backward[number] = unit
            self._execute(planner.before_recompute(number, stale=self._is_stale(unit, first)))
        elif not (unit.is_list and planner.running(number)):
            self._begin_forward(unit, module)
            unit.start_list_calls()
            unit.begin_recording(len(self._trace) - 1)
        unit.push_forward(module, planner.clock)
        for group in unit.groups:
            group.install()

    def _begin_forward(self, unit: Unit, module: nn.Module) -> None:
        """What a forward begins with, whether this rank computes in it or only takes part."""
        first = self.planner.outermost() is None
        self._forwards += first
        if first:
            self._leaving = None
            wake()  # what an optimizer whose step raised left asleep
            self._dismiss_gone()
            unit.assign_names(module)
            self._trace.clear()
            self.reducer.read_beats()
            self.communicator.roll_pages()
            if self._event is not None:
                _torch.wait_for_event(self.device, self._event)
                self._event = None
        if unit.unwritten is not None:
            self._refresh(unit)
            unit.check_written()
            check_replicas(unit)
        if first or self.planner.residency(unit.number) is Residency.FULL or not self.planner.is_prefetched(unit.number):
            self._drop_if_replaced(unit)
        self._trace.append((unit.number, True))
        self._execute(self.planner.before_forward(unit.number, stale=self._is_stale(unit, first)))

    def leave_forward(self, unit: Unit, module: nn.Module, *, failed: bool = False) -> ForwardCall | None:
        """The call that just ended, for a `BackwardHook`; None if it cannot have a backward."""
        if failed:
            self._left_forward(unit)
        planner, number = self.planner, unit.number
        grad = torch.is_grad_enabled()
        if _torch.current_graph_task() != -1:  # it stays full and installed until its own gradients are done
            unit.pop_forward(module)
            call = planner.after_recompute(number, grad=grad)
            return call if grad else None
        if not planner.running(number):
            return None  # it raised before it began
        if (
            unit.is_list
            and (not unit.module_finished(module, self._forwards) or unit.runs_around(module))
            and planner.outermost() != number
        ):
            unit.pop_forward(module)
            return planner.partial_end(number)
        ended = planner.after_forward(number, grad=grad, since=unit.pop_forward(module))
        self._trace.append((number, False))
        if not failed and not ended.closed:
            unit.save_run_order(self._trace)
        for inner in ended.closed:
            self._uninstall_number(inner)
        if not planner.running(number) and not planner.is_pinned(number):
            self._uninstall(unit)
        self._execute(ended.actions)
        if grad and not unit.options.in_backward and unit.residency is Residency.SHARDED:
            for group in unit.groups:
                group.invalidate_autograd()
        self.reducer.poll()
        return ended.call if grad else None

    def _left_forward(self, unit: Unit) -> None:
        """An exception leaves the forward of a unit. The others are told once it leaves the outermost one."""
        failure = sys.exc_info()[1]
        said = "an exception" if failure is None else described(failure)
        if self._leaving is None or self._leaving[1] != said:
            self._leaving = f"'{unit.name}' forward", said
        if self.planner.outermost() in (unit.number, None):
            self.communicator.report_exception(*self._leaving)
            self._leaving = None

    def enter_backward(self, unit: Unit, call: ForwardCall, *, copied_use: bool = False) -> None:
        """`copied_use`: of a call that used a copy of the parameters (`register_copied_use` made it)."""
        if not self.planner.knows(unit.number):
            raise StateError(
                f"unit '{unit.name}' was undone, or became one with another, between its forward and this backward: run the "
                "backward before undo() or fully_shard(), or the forward again"
            )
        self._recover_if_stale()
        first = self._begin_backward()
        self._units_in_backward[unit.number] = unit
        self.reducer.poll()
        self._joined.backward_reached(call)
        if len(self._joined):
            self._join_backward(beyond=call.end)
        stale = not copied_use and self._is_stale(unit, first)
        again = torch.is_grad_enabled()  # create_graph=True: the graph of this backward needs the parameters, too
        actions = self.planner.before_backward(call, stale=stale, copied_use=copied_use, again=again)
        if again:
            with torch.no_grad():
                self._execute(actions)
        else:
            self._execute(actions)
        if again and not copied_use:
            unit.hook_late_grads()
        if self.planner.residency(unit.number) is Residency.FULL:
            for group in unit.groups:  # what is recomputed inside the unit runs without its hooks
                group.install()

    @_event
    def enter_late(self, unit: Unit) -> None:
        """A gradient arrived in a backward that none of the unit's outputs announced."""
        if self.planner.knows(unit.number) and unit.number not in self._units_in_backward:
            self._begin_backward()
            self._units_in_backward[unit.number] = unit

    @_event
    def leave_backward(self) -> None:
        """The outermost backward that touched a unit is over."""
        with torch.no_grad():
            try:
                if len(self._joined):
                    self._join_backward(beyond=-1)
                self._joined.end_backward()
                self._execute(self.planner.after_backward())
                for _, unit in sorted(self._units_in_backward.items()):
                    if not self.planner.is_pinned(unit.number):
                        self._uninstall(unit)
                    self._reduce_late(unit)
                self.reducer.collect(list(self._units_in_backward.values()), self._all_units)
            except BaseException:
                if self.reducer.decided is None:
                    # Whoever keeps what is raised keeps our caller alive, by whose death we know of backwards that raised.
                    self._backward = weakref.ref(FinalCallback(self.leave_backward))
                    self._backward_died(None)
                    raise
                self._end_backward()
                raise
            self._end_backward()

    def _all_units(self) -> list[Unit]:
        return [unit for _, unit in sorted(self._units.items())]

    def _end_backward(self) -> None:
        """Nothing can undo it any more."""
        self._backward = None
        self._units_in_backward.clear()
        self.reducer.assign_grads()

    # --- taking part without computing ---

    @_event
    def join(self, unit: Unit) -> Tensor:
        """Take part in what a forward of the unit sends, and later in backward. A zero whose backward is that one."""
        planner = self.planner
        self._recover_if_stale()
        script = [(self._units[number], enters) for number, enters in unit.script if number in self._units]
        lists = [inner.name for inner, _ in script if inner.is_list]
        if lists:
            raise StateError(
                f"join() of unit '{unit.name}': unit '{lists[0]}' has several modules, so how often they run cannot be known: "
                "shard them one by one"
            )
        if _torch.current_graph_task() != -1:
            raise StateError(f"join() of unit '{unit.name}' was called inside a backward: call it where the forward would be")
        grad = torch.is_grad_enabled()
        flows = planner.has_graph_output()  # whether its input would have a graph
        alone = planner.outermost() is None
        last: Joined | None = None
        for inner, enters in script:
            if enters:
                self._begin_forward(inner, inner.modules[0])
                continue
            ended = planner.after_forward(inner.number, grad=grad)
            self._trace.append((inner.number, False))
            self._execute(ended.actions)
            flows = flows or any(group.trainable for group in inner.groups)
            output_has_graph = flows if inner.output_has_graph is None else inner.output_has_graph
            if grad and output_has_graph:
                last = Joined(inner.number, ended.call, alone)
                self._joined.add(last)
            if inner.options.buffers != "local":
                share_buffers(inner, inner.modules[0], self.communicator)
        self.reducer.poll()
        if last is None:
            return torch.zeros((), device=self.device)
        zero = torch.zeros((), device=self.device, requires_grad=True).clone()
        assert zero.grad_fn is not None
        zero.grad_fn.register_prehook(partial(self._enter_joined, last.call))
        return zero

    @_event
    def _enter_joined(self, call: ForwardCall, *_: object) -> None:
        """A backward begins in which this rank computes nothing, or nothing yet."""
        self._recover_if_stale()
        self._begin_backward()
        self._joined.backward_reached(call)
        self._join_backward(beyond=call.end - 1)

    def _join_backward(self, *, beyond: int) -> None:
        """Take part in the backward of joined calls that ended after `beyond`."""
        for joined in self._joined.due(beyond=beyond, lives=self._units.__contains__):
            unit = self._units.get(joined.unit)
            if unit is None:
                continue
            self._units_in_backward[unit.number] = unit
            with torch.no_grad():
                self._execute(self.planner.before_backward(joined.call, stale=self._is_stale(unit, False)))

    # --- what callers ask for ---

    @_event
    def start_unshard(self, unit: Unit) -> None:
        """Start gathering for the caller."""
        self._drop_if_replaced(unit)
        self._execute(self.planner.unshard(unit.number, stale=unit.stale))

    @_event
    def ensure_gathered(self, unit: Unit) -> None:
        """Have the full parameters installed for the caller, gathered anew if they were freed or written since."""
        self.start_unshard(unit)
        self._execute(self.planner.finish_unshard(unit.number))
        for group in unit.groups:
            group.install()
        unit.expose()

    @_event
    def reshard(self, unit: Unit, *, doing: str = "reshard()") -> None:
        """Free the full parameters. Raises StateError while the unit's forward or backward needs them."""
        self.check_idle(unit, doing=doing)
        unit.check_unmodified()
        self._uninstall(unit)
        self._execute(self.planner.reshard(unit.number))
        for group in unit.groups:
            group.drop_subgroup_shard()
            group.synchronize_host()

    @_event
    def set_resident(self, unit: Unit, resident: bool) -> None:
        """Have the unit full until told otherwise, whatever forwards and backwards end."""
        if not unit.count_resident_block(resident):
            return
        if resident:
            self.check_idle(unit, doing="resident()")
            self.planner.set_resident(unit.number, True)
            self.ensure_gathered(unit)
        else:
            self.planner.set_resident(unit.number, False)
            self.reshard(unit, doing="the end of resident()")

    @_event
    def refresh_for_read(self, unit: Unit) -> None:
        """The caller reads the shards: take over what was put in the slots, also of a unit that is unsharded by hand."""
        held = self.planner.is_unsharded_by_user(unit.number)
        self._drop_if_replaced(unit)
        self._refresh(unit)
        if held:
            self.ensure_gathered(unit)

    @_event
    def gather_copy(self, group: ParamGroup) -> list[Tensor]:
        """What modules compute with, gathered into memory of its own: one tensor per parameter (collective)."""
        with torch.no_grad():
            copy, gather = group.gather_copy()
            self.communicator.send(
                self.communicator.gather_lane, group.fingerprints, "gather by hand", gather.start, gather.finish
            ).wait()
            copy.release_staging()
        return group.values_in(copy)

    @_event
    def reduce_now(self, unit: Unit, group: ParamGroup) -> None:
        """Reduce what a group's parameters were given so far, for a caller that runs backwards piece by piece."""
        self.check_idle(unit, doing="post_backward()")
        if group.trainable:
            with torch.no_grad():
                self.reducer.reduce(unit, group, group.take_gradients() or [None] * len(group.parameters))
        if not unit.options.keep_after_backward:
            self.reshard(unit)

    @_event
    def attend(self, unit: Unit, *, doing: str) -> None:
        """Make sure that all ranks are about to begin what follows, before this one changes anything."""
        unit.setup_collectives(doing).meet()

    @_event
    def finish_reductions(self, unit: Unit) -> None:
        """Wait for what is in flight and hand out gradients, for a caller that runs backwards piece by piece."""
        with torch.no_grad():
            self.reducer.collect([unit], self._all_units)
            self.reducer.assign_grads()

    def register_copied_use(self, unit: Unit) -> BackwardHook:
        """The unit's parameters are used in a copy of their own; what is returned tells of its backward."""
        return BackwardHook(unit, self.planner.register_copied_use(unit.number), copied_use=True)

    def wait_for(self, event: object) -> None:
        """Order the next forward behind an event of the caller's."""
        self._event = event

    @_event
    def abort_step(self) -> None:
        """Forget the step that is under way, with all gradients that are not delivered, as all ranks do."""
        wake()
        self._abort_in_progress()
        self.planner.reset_orders()
        for unit in list(self._units.values()):
            self.reducer.discard(unit)
            unit.reset_call_counts()

    @_event
    def reset(self, unit: Unit) -> None:
        """Forget a step that was interrupted, as the next forward would."""
        self._recover_if_stale()
        if self.planner.running(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self._abort_in_progress()

    @_event
    def ensure_sharded(self, unit: Unit, *, doing: str) -> None:
        """Let the slots show the sharded parameters, to be written, and free the full ones unless a backward needs them."""
        self.check_idle(unit, doing=doing)
        self._uninstall(unit)
        for group in unit.groups:
            group.synchronize_host()
        if not self.planner.expects_backward(unit.number):
            self._execute(self.planner.reshard(unit.number))

    @_event
    def invalidate_unsharded(self, unit: Unit) -> None:
        """What the unit gathered is void: its parameters become others."""
        if unit.number in self._gathering or unit.residency is Residency.FULL:
            self._uninstall(unit)
            self._execute(self.planner.reshard(unit.number))
        for group in unit.groups:
            group.drop_subgroup_shard()

    @_event
    def refresh(self, unit: Unit) -> None:
        """Take over what callers changed behind our back: assigned Parameters, moved or cast tensors, trainability.

        Raises StateError, naming the parameter, for what cannot be honoured; nothing is changed then.
        """
        self._refresh(unit)

    def _refresh(self, unit: Unit) -> None:
        if unit.is_current():
            return
        values = [read_slots(parameter) for parameter in unit.parameters]
        fits = all(
            value.dtype == parameter.local.dtype and value.device == parameter.local.device
            for parameter, value in zip(unit.parameters, values)
        )
        if not fits and (_torch.current_graph_task() != -1 or self.planner.awaits_backward(unit.number)):
            raise StateError(
                f"the parameters of unit '{unit.name}' changed dtype or device between its forward and its backward: "
                "finish the step first"
            )
        if not fits:
            self.check_delivered(unit, doing="a change of dtype or device")
        for parameter in unit.parameters:
            parameter.restore_sharded()
        if not fits:
            self.invalidate_unsharded(unit)
            return unit.rebuild_groups(values)
        # Groups stay as they are when trainability changes: what travels must not depend on what one rank still holds.
        found = dict(zip(map(id, unit.parameters), values))
        with torch.no_grad():
            for group in unit.groups:
                group.adopt_values([found[id(parameter)] for parameter in group.parameters])

    @_event
    def reconfigure(self, unit: Unit, *, doing: str, **changes: object) -> None:
        """As `unit.configure`, for what groups are made of: they are made anew.

        Raises StateError during forward or backward.
        """
        self.ensure_sharded(unit, doing=doing)
        self.check_delivered(unit, doing=doing)
        self.communicator.carriers(unit.axis, replace(unit.options, **changes))  # type: ignore[arg-type]
        unit.configure(**changes)
        self.invalidate_unsharded(unit)
        unit.rebuild_groups([parameter.local for parameter in unit.parameters])

    @_event
    def transfer_params(self, unit: Unit, gone: Sequence[ShardedParameter]) -> None:
        """Let other units have these parameters of the unit."""
        self.check_delivered(unit, doing="fully_shard() of a module that shares a parameter with it")
        self.invalidate_unsharded(unit)
        unit.drop(gone)

    @_event
    def check_idle(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if the unit's forward or backward is under way, or it shows full parameters."""
        self._recover_if_stale()
        if unit.shows_plain:
            raise StateError(
                f"{doing} was called inside full_params() of unit '{unit.name}': call it before or after the block"
            )
        if self.planner.running(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self._abort_in_progress()  # the forward was interrupted in a way that runs no hooks
        if self.planner.running(unit.number):
            raise StateError(f"{doing} was called inside the forward of unit '{unit.name}': call it before or after")
        if self.planner.in_backward(unit.number):
            raise StateError(f"{doing} was called inside the backward of unit '{unit.name}': call it before or after")

    def check_delivered(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if gradients of the unit are on their way, to groups that are about to be made anew."""
        if self.reducer.is_undelivered(unit):
            raise StateError(
                f"{doing} came while gradients of unit '{unit.name}' are reduced, but not yet delivered: run the last backward "
                "of the step first, or call zero_grad()"
            )

    @_event
    def check_step(self, unit: Unit) -> None:
        """Raises StateError if an optimizer may not write the unit's shards now."""
        self._recover_if_stale()
        self.reducer.read_beats()
        if self.planner.running(unit.number) and any(_torch.is_in_forward(module) for module in unit.modules):
            raise StateError(f"optimizer.step() was called inside the forward of unit '{unit.name}': call it after backward")
        for group in unit.groups:
            group.synchronize_host()
        self.reducer.check_arrived(unit)

    def log_write(self, ledger: CollectiveLog, kind: Fingerprint) -> None:
        """Enter in the ledger that the caller wrote to shards.

        What hooks on gradients do is left out: their order, and whether they are called, may differ between ranks. So is what
        other threads do. Ranks that parted are told by the next message, which is soon enough for what is done already.
        """
        if (
            ledger.desync_error is None
            and self.reducer.decided is None
            and _torch.current_graph_task() == -1
            and get_ident() == self._thread
        ):
            ledger.say(kind)

    # --- actions ---

    def _execute(self, actions: Sequence[Action]) -> None:
        units, run, shown = self._units, self._run, _torch.profiling()
        for index, action in enumerate(actions):
            unit = units.get(action.unit)
            if unit is None:
                continue  # deleted since this was planned
            try:
                if shown:
                    with record_function(f"fullshard::{type(action).__name__.lower()} {unit.name}"):
                        run[type(action)](unit)
                else:
                    run[type(action)](unit)
            except BaseException:
                self._roll_back(actions[index:])
                raise

    def _roll_back(self, actions: Sequence[Action]) -> None:
        """An action raised: it and those planned behind it did not happen, so their units hold nothing."""
        for number in dict.fromkeys(action.unit for action in actions):
            unit = self._units.get(number)
            if unit is not None:
                self._settle_or_abandon(self._gathering.pop(number, []))
                unit.forget_exposed()  # nothing may raise here
                self._reshard(unit)
                self.planner.clear(number)

    def _settle_or_abandon(self, gathering: Sequence[tuple[ParamGroup, LaneWork]]) -> None:
        """Memory that messages may still arrive in must not be freed. Who can be waited for no more is not asked again."""
        left = deque(gathering)
        try:
            while left:
                left[0][1].wait()
                left.popleft()
        except Exception:
            pass
        finally:
            for group, _ in left:
                group.drop_unsharded()

    def _drop_if_replaced(self, unit: Unit) -> None:
        """What a caller changed since the unit was gathered makes the gathered data void; `_unshard` looks once more."""
        if unit.residency is not Residency.SHARDED and not self.planner.running(unit.number):
            self._uninstall(unit)
            if not unit.is_current():
                self._execute(self.planner.reshard(unit.number))
                self._refresh(unit)

    def _is_stale(self, unit: Unit, first: bool) -> bool:
        """Whether what was gathered is out of date. What the planner issued ahead within a forward or backward cannot be."""
        residency = self.planner.residency(unit.number)
        if residency is Residency.SHARDED or (
            residency is Residency.GATHERING and not first and self.planner.is_prefetched(unit.number)
        ):
            return False
        return unit.stale

    def _unshard(self, unit: Unit) -> None:
        self._refresh(unit)
        if not unit.decided:
            unit.decide()
        action = "forward gather" if self._backward is None else "backward gather"
        tickets: list[tuple[ParamGroup, LaneWork]] = []
        self._gathering[unit.number] = tickets
        for group in unit.groups:
            gather = group.allocate_unsharded()
            try:
                ticket = self.communicator.send(
                    self.communicator.gather_lane, group.fingerprints, action, gather.start, gather.finish
                )
            except BaseException:
                group.drop_unsharded()
                raise
            tickets.append((group, ticket))

    def _wait(self, unit: Unit) -> None:
        for group, ticket in self._gathering[unit.number]:
            ticket.wait()
            group.finish_gather(ticket)
        del self._gathering[unit.number]
        if self.planner.is_pinned(unit.number):
            unit.expose()

    def _retain(self, unit: Unit) -> None:
        for group in unit.groups:
            group.save_subgroup_shard()

    def _reshard(self, unit: Unit) -> None:
        unit.check_unmodified()
        self._uninstall(unit)
        for group in unit.groups:
            group.free_unsharded()

    def _uninstall_number(self, number: int) -> None:
        unit = self._units.get(number)
        if unit is not None:
            self._uninstall(unit)

    def _uninstall(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.installed:
                group.uninstall()

    def _reduce(self, unit: Unit) -> None:
        if not self.planner.is_pinned(unit.number):
            self._uninstall(unit)
        for group in unit.groups:
            if group.trainable:
                self.reducer.reduce(unit, group, group.take_gradients() or [None] * len(group.parameters))
        self.reducer.poll()

    def _reduce_late(self, unit: Unit) -> None:
        """Gradients that came after their unit was reduced, from a second graph for example."""
        for group in unit.groups:
            grads = group.take_gradients()
            if grads is not None:
                self.reducer.reduce(unit, group, grads)

    # --- backward's end, and what to do when it never comes ---

    def _begin_backward(self) -> bool:
        """True for the first event of a backward."""
        if self._backward is not None:
            return False
        end = FinalCallback(self.leave_backward)
        self._backward = weakref.ref(end, self._backward_died)
        _torch.on_backward_end(end)
        return True

    def _backward_died(self, _: object) -> None:
        """At once, and touching nothing that another rank takes part in: callers find their sharded parameters in place."""
        for unit in self._units_in_backward.values():
            self._uninstall(unit)
        reached = list(self._units_in_backward.values())
        if reached:
            self.communicator.report_exception(f"'{reached[-1].name}' backward")

    def _recover_if_stale(self) -> None:
        """A backward that raised never told us; its engine dropped our callback, which is how we know."""
        if self.interrupted:
            self._reset_after_interrupt()
        if self._backward is None or self._backward() is not None:
            return
        gone = self._warn_of_backward()
        self._abort_in_progress()
        for unit in gone:
            self.reducer.discard(unit)

    def _warn_of_backward(self) -> list[Unit]:
        """Say that a backward raised; the units of which it is to discard also what earlier ones of the step left."""
        names = ", ".join(f"'{unit.name}'" for unit in self._units_in_backward.values()) or "no unit"
        step = self._units_of_step()
        kept = (
            self.reducer.merged
            or any(group.grads.deferred is not None for unit in step for group in unit.groups)
            or any(parameter.local_grad is not None for unit in step for parameter in unit.parameters)
        )
        also = ", and with them what earlier backwards of the step had kept without communication" if kept else ""
        warnings.warn(
            f"the last backward raised after it had reached {names}: the gradients of that backward are discarded{also}",
            stacklevel=3,
        )
        return step if kept else []  # of a sum that is part way, all or nothing

    def _units_of_step(self) -> list[Unit]:
        """The units that the running backward reached, those below them, and those whose backward was still to come."""
        found = {unit.number: unit for unit in self._units_in_backward.values()}
        for unit in self._units_in_backward.values():
            for module in (inner for root in unit.modules for inner in root.modules()):
                below = unit_of(module)
                if below is not None:
                    found[below.number] = below
        for number in self.planner.awaiting():
            waiting = self._units.get(number)
            if waiting is not None:
                found[number] = waiting
        return list(found.values())

    def _reset_after_interrupt(self) -> None:
        """An interrupt came between any two lines of ours. What those left is not believed: all units hold nothing then."""
        if self.reducer.decided is not None:
            self._end_backward()
        units = list(self._units.values())
        gone = [unit for unit in units if self.reducer.is_undelivered(unit)]
        if self._backward is not None:
            gone += self._warn_of_backward()
        elif gone:
            names = ", ".join(f"'{unit.name}'" for unit in gone)
            warnings.warn(f"an interrupt came while gradients of {names} were reduced: they are discarded", stacklevel=3)
        self._backward = None
        self._joined.clear()
        self.reducer.abort()
        self.communicator.order_behind_lanes()
        while self._gathering:
            self._settle_or_abandon(self._gathering.popitem()[1])
        for unit in units:
            unit.forget_exposed()
            unit.clear_forward_stack()
            for group in unit.groups:
                group.drop_unsharded()
                group.take_gradients()
        for unit in gone:
            self.reducer.discard(unit)
        self.planner.start_over()
        self._units_in_backward.clear()
        self.interrupted = False

    def _abort_in_progress(self) -> None:
        """Forget a forward or backward that died half way, and free what it held."""
        for unit in self._units.values():
            unit.forget_exposed()
        self._backward = None
        self._joined.clear()
        self.reducer.abort()
        for number in list(self._gathering):
            gathering = self._units.get(number)
            try:
                self._settle_or_abandon(self._gathering.pop(number))
            finally:
                if gathering is not None:
                    self._reshard(gathering)
                    self.planner.clear(number)
        for number in self.planner.underway():
            self._uninstall_number(number)
            broken = self._units.get(number)
            if broken is not None:
                broken.clear_forward_stack()
        self._execute(self.planner.abort())
        for unit in self._units_in_backward.values():
            for group in unit.groups:
                group.take_gradients()
        self.reducer.forget(self._units_in_backward)
        self._units_in_backward.clear()


def runtime_of(unit: Unit) -> Runtime:
    """Who moves a unit."""
    runtime = unit.runtime
    assert isinstance(runtime, Runtime)
    return runtime


def make_unit(
    modules: Sequence[nn.Module],
    parameters: list[ShardedParameter],
    axis: ShardAxis,
    options: UnitOptions,
    *,
    global_id: int | None = None,
) -> Unit:
    """A unit, and its runtime if that is the first one there. `global_id`: of the unit that it is a copy of."""
    return Unit(modules, parameters, axis, options, Runtime.of(axis.device, options.comm), global_id=global_id)


__all__ = ["Runtime", "make_unit", "runtime_of"]
