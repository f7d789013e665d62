"""Runs the planner's actions on units: gathers, frees and reduces their data on lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.profiler import record_function

from fullshard import _torch
from fullshard.collectives.streams import LaneWork, nothing
from fullshard.errors import StateError
from fullshard.params.group import ParamGroup
from fullshard.params.shard_values import read_slots
from fullshard.policies import CheckPolicy
from fullshard.runtime.backward import RunningBackward
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.reducer import GradientReducer
from fullshard.runtime.registry import UnitRegistry
from fullshard.runtime.unit import Unit
from fullshard.schedule.planner import Planner
from fullshard.schedule.records import UnitRecord
from fullshard.schedule.residency import Action, Reduce, Reshard, Residency, SaveSubgroupShard, Unshard, Wait


class Executor:
    """executor 1 - n units (held weakly), 1 - 1 planner, 1 - 1 communicator, 1 - 1 gradient reducer."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.units = UnitRegistry(self._forget)
        self.planner = Planner(self._can_prefetch)
        self.reducer = GradientReducer(communicator)
        self.backward = RunningBackward(self._backward_raised)
        self._gathering: dict[int, list[tuple[ParamGroup, LaneWork]]] = {}
        self._run: dict[type[Action], Callable[[Unit], None]] = {
            Unshard: self._unshard,
            Wait: self._wait,
            SaveSubgroupShard: self._save_subgroup_shard,
            Reshard: self.free,
            Reduce: self._reduce,
        }

    # --- units ---

    def register(self, unit: Unit) -> UnitRecord:
        """The record of a new unit, with its number."""
        return self.planner.register(self.units.add(unit), unit.options)

    def unregister(self, unit: Unit) -> None:
        """The unit was taken off its modules."""
        self.reducer.discard(unit)
        if self.units.remove(unit):
            self._forget(unit.number)

    def update_timeouts(self, *more: CheckPolicy) -> None:
        """`more`: of a unit that is about to be made."""
        self.communicator.update_timeouts([*more, *(unit.options.checks for unit in self.units.all())])

    def _forget(self, number: int) -> None:
        """A unit is gone; what is still arriving for it keeps its memory until then."""
        if not self.planner.knows(number):
            return
        self.planner.unregister(number)
        self.update_timeouts()
        for group, work in self._gathering.pop(number, ()):
            self.reducer.track(work, group.free_unsharded)

    def _can_prefetch(self, number: int) -> bool:
        unit = self.units.get(number)
        return unit is not None and unit.place.are_attached(unit)

    # --- actions ---

    def execute(self, actions: Sequence[Action]) -> None:
        """Run actions in order. Of one that raises, and those behind it, the units hold nothing afterwards."""
        find, run, shown = self.units.get, self._run, _torch.profiling()
        for index, action in enumerate(actions):
            unit = find(action.unit)
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

    @contextmanager
    def watched(self, around: Callable[[type[Action], Callable[[Unit], None], Unit], None]) -> Iterator[None]:
        """For the length of a block, `around` runs every action: it is called with its kind, what runs it, and the unit."""
        plain = self._run
        self._run = {kind: partial(around, kind, run) for kind, run in plain.items()}
        try:
            yield
        finally:
            self._run = plain

    def _roll_back(self, actions: Sequence[Action]) -> None:
        """An action raised: it and those planned behind it did not happen, so their units hold nothing."""
        for number in dict.fromkeys(action.unit for action in actions):
            unit = self.units.get(number)
            if unit is not None:
                self._wait_or_drop(self._gathering.pop(number, []))
                unit.exposure.writable = False  # nothing may raise here
                self.free(unit)
                self.planner.clear(number)

    def _unshard(self, unit: Unit) -> None:
        if not unit.is_current():
            self.refresh(unit)
        if unit.checks.gathers:
            unit.decide_gathers()
        action = "backward gather" if self.backward.underway else "forward gather"
        works: list[tuple[ParamGroup, LaneWork]] = []
        self._gathering[unit.record.number] = works
        communicator = self.communicator
        for group in unit.groups:
            gather = group.allocate_unsharded()
            start, copied = gather.start, None
            try:
                if communicator.copy_lane is not None and gather.copies_in:
                    start, copied = gather.begin, communicator.copy_lane.run(gather.copy_in, nothing)
                work = communicator.send(communicator.gather_lane, group.fingerprints, action, start, gather.finish, copied)
            except BaseException:
                group.drop_unsharded()
                raise
            works.append((group, work))

    def _wait(self, unit: Unit) -> None:
        number = unit.record.number
        for group, work in self._gathering[number]:
            work.wait()
            group.finish_gather(work)
        del self._gathering[number]
        if unit.record.is_pinned:
            unit.expose()

    def _save_subgroup_shard(self, unit: Unit) -> None:
        for group in unit.groups:
            group.save_subgroup_shard()

    def free(self, unit: Unit) -> None:
        """Free the full parameters. Raises StateError, naming it, if the caller wrote to one."""
        if unit.exposure.writable:
            unit.check_unmodified()
        for group in unit.groups:
            if group.installed:
                group.uninstall()
            group.free_unsharded()

    def uninstall(self, unit: Unit) -> None:
        """Let the slots show the sharded parameters."""
        for group in unit.groups:
            if group.installed:
                group.uninstall()

    def _reduce(self, unit: Unit) -> None:
        record = unit.record
        if record.residency is not Residency.SHARDED and not record.is_pinned:
            self.uninstall(unit)
        for group in unit.groups:
            if group.trainable:
                self.reducer.reduce(unit, group, group.take_gradients() or [None] * len(group.parameters))
        self.reducer.poll()

    def reduce_late(self, unit: Unit) -> None:
        """Gradients that came after their unit was reduced, from a second graph for example."""
        for group in unit.groups:
            grads = group.take_gradients()
            if grads is not None:
                self.reducer.reduce(unit, group, grads)

    # --- data that the caller replaced ---

    def is_stale(self, unit: Unit) -> bool:
        """Whether what was gathered is out of date."""
        return unit.record.residency is not Residency.SHARDED and unit.stale

    def drop_if_replaced(self, unit: Unit) -> None:
        """What a caller changed since the unit was gathered makes the gathered data void; `_unshard` looks once more."""
        if unit.residency is not Residency.SHARDED and not self.planner.running.has(unit.number):
            self.uninstall(unit)
            if not unit.is_current():
                self.execute(self.planner.moves.reshard(unit.number))
                self.refresh(unit)

    def invalidate_unsharded(self, unit: Unit) -> None:
        """What the unit gathered is void: its parameters become others."""
        if unit.number in self._gathering or unit.residency is Residency.FULL:
            self.uninstall(unit)
            self.execute(self.planner.moves.reshard(unit.number))
        for group in unit.groups:
            group.drop_subgroup_shard()

    def refresh(self, unit: Unit, unwritten: Container[int] = ()) -> None:
        """Take over what callers changed behind our back: assigned Parameters, moved or cast tensors, trainability.

        unwritten: ids of parameters that were given memory without values.

        Raises StateError, naming the parameter, for what cannot be honoured; nothing is changed then.
        """
        if unit.is_current():
            return
        values = [read_slots(parameter) for parameter in unit.parameters]
        fits = all(
            value.dtype == parameter.local.dtype and value.device == parameter.local.device
            for parameter, value in zip(unit.parameters, values)
        )
        assigned = [(parameter, slot.content) for parameter in unit.parameters for slot in parameter.slots]
        changed = [
            (parameter, value)
            for parameter, value in assigned
            if value is not None and value is not parameter.full and parameter.has_new_grad_dtype(value)
        ]
        fits = fits and not changed
        if not fits and (_torch.current_graph_task() != -1 or self.planner.awaits_backward(unit.number)):
            raise StateError(
                f"the parameters of unit '{unit.name}' changed dtype or device between its forward and its backward: "
                "finish the step first"
            )
        if not fits:
            self.reducer.check_delivered(unit, doing="a change of dtype or device")
        for parameter in unit.parameters:
            parameter.restore_sharded()
        for parameter, value in changed:
            parameter.adopt_grad_dtype(value)
        if not fits:
            self.invalidate_unsharded(unit)
            return unit.rebuild_groups(values, unwritten)
        # Groups stay as they are when trainability changes: what travels must not depend on what one rank still holds.
        found = dict(zip(map(id, unit.parameters), values))
        with torch.no_grad():
            for group in unit.groups:
                group.adopt_values([found[id(parameter)] for parameter in group.parameters])

    def allocate(self, unit: Unit, device: torch.device) -> None:
        """Give the parameters of a unit that are on meta memory, which the caller writes."""
        unwritten = {id(parameter) for parameter in unit.parameters if parameter.local.device.type == "meta"}
        if unwritten:
            self.invalidate_unsharded(unit)
            shards = [parameter.local for parameter in unit.parameters]
            values = [shard if shard.device.type != "meta" else torch.empty_like(shard, device=device) for shard in shards]
            unit.rebuild_groups(values, unwritten)

    # --- the end of a backward, and of a step that came to nothing ---

    def end_backward(self) -> None:
        """Nothing can undo the backward any more: hand out its gradients."""
        self.backward.stop()
        if self.reducer.keeps:
            for unit in self.backward.units.values():
                unit.show_kept_gradients()
        self.backward.units.clear()
        self.reducer.assign_grads()

    def _backward_raised(self) -> None:
        """At once, and sending nothing that another rank takes part in: callers find their sharded parameters in place."""
        reached = list(self.backward.units.values())
        for unit in reached:
            self.uninstall(unit)
        if reached:
            self.communicator.report_exception(f"'{reached[-1].name}' backward")

    def abort_gathers(self) -> None:
        """Wait for the gathers under way, and free what they brought."""
        for number in list(self._gathering):
            unit = self.units.get(number)
            try:
                self._wait_or_drop(self._gathering.pop(number))
            finally:
                if unit is not None:
                    self.free(unit)
                    self.planner.clear(number)

    def drop_everything(self) -> None:
        """Nothing is believed any more: no unit holds anything afterwards."""
        while self._gathering:
            self._wait_or_drop(self._gathering.popitem()[1])
        for unit in self.units.all():
            unit.exposure.writable = False
            unit.progress.clear()
            for group in unit.groups:
                group.drop_unsharded()
                group.take_gradients()

    def _wait_or_drop(self, gathering: Sequence[tuple[ParamGroup, LaneWork]]) -> None:
        """Memory that messages may still arrive in must not be freed. Work that failed once is not waited for again.

        On an accelerator all is waited for, which orders the compute lane behind it and cannot take long; on the CPU nothing
        behind a failure, since the messages may never come, and hold their memory themselves.
        """
        left = deque(gathering)
        try:
            while left:
                try:
                    left[0][1].wait()
                except Exception:
                    if self.communicator.away is None:
                        break
                    left[0][0].drop_unsharded()
                left.popleft()
        finally:
            for group, _ in left:
                group.drop_unsharded()


__all__ = ["Executor"]
