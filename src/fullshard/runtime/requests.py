"""What callers ask of a unit outside of its forward and backward: full parameters, sharded ones, other groups."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.consistency.collective_log import CollectiveLog, Fingerprint
from fullshard.errors import StateError
from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter
from fullshard.runtime.backward import BackwardHook
from fullshard.runtime.executor import Executor
from fullshard.runtime.interrupts import recovers_first
from fullshard.runtime.recovery import Recovery
from fullshard.runtime.unit import Unit, refuse_inside_full_params


class Requests:
    """Each request looks first whether it is legal now, and changes nothing if it is not."""

    def __init__(self, executor: Executor, recovery: Recovery) -> None:
        self._executor, self._planner, self.recovery = executor, executor.planner, recovery

    # --- full parameters ---

    @recovers_first
    def start_unshard(self, unit: Unit) -> None:
        """Start gathering for the caller. Raises StateError while the slots show plain parameters."""
        refuse_inside_full_params(unit, doing="unshard()")
        self._executor.communicator.wait_for_next_event()
        self._executor.drop_if_replaced(unit)
        self._executor.execute(self._planner.moves.unshard(unit.number, stale=unit.stale))

    @recovers_first
    def ensure_gathered(self, unit: Unit) -> None:
        """Have the full parameters installed for the caller, gathered anew if they were freed or written since."""
        self.start_unshard(unit)
        self._executor.execute(self._planner.moves.finish_unshard(unit.number))
        for group in unit.groups:
            group.install()
        unit.expose()
        unit.show_kept_gradients()

    @recovers_first
    def set_resident(self, unit: Unit, resident: bool) -> None:
        """Have the unit full until told otherwise, whatever forwards and backwards end."""
        if not unit.record.count_resident_block(1 if resident else -1):
            return
        if not resident:
            self.reshard(unit, doing="the end of resident()")
            return
        try:
            self.check_idle(unit, doing="resident()")
            self.ensure_gathered(unit)
        except BaseException:
            unit.record.count_resident_block(-1)
            raise

    @recovers_first
    def refresh_for_read(self, unit: Unit) -> None:
        """The caller reads the shards: take over what was put in the slots, also of a unit that is unsharded by hand."""
        held = unit.record.unsharded_by_user and unit.record.is_pinned
        self._executor.drop_if_replaced(unit)
        self._executor.refresh(unit)
        if held:
            self.ensure_gathered(unit)

    @recovers_first
    def gather_copy(self, group: ParamGroup) -> list[Tensor]:
        """What modules compute with, gathered into memory of its own: one tensor per parameter (collective)."""
        communicator = self._executor.communicator
        with torch.no_grad():
            copy, gather = group.gather_copy()
            sent = communicator.send(
                communicator.gather_lane, group.fingerprints, "gather by hand", gather.start, gather.finish
            )
            sent.wait()
            copy.release_staging()
            group.note_copy_to_device(sent.work)
        return group.values_in(copy)

    def register_copied_use(self, unit: Unit) -> BackwardHook:
        """The unit's parameters are used in a copy of their own; what is returned tells of its backward."""
        return BackwardHook(unit, self._planner.register_copied_use(unit.number), copied_use=True)

    # --- sharded parameters ---

    @recovers_first
    def reshard(self, unit: Unit, *, doing: str = "reshard()") -> None:
        """Free the full parameters. Raises StateError while the unit's forward or backward needs them."""
        self.check_idle(unit, doing=doing)
        unit.check_unmodified()
        self._executor.uninstall(unit)
        self._executor.execute(self._planner.moves.reshard(unit.number))
        for group in unit.groups:
            group.drop_subgroup_shard()
            group.synchronize_host()

    @recovers_first
    def ensure_sharded(self, unit: Unit, *, doing: str) -> None:
        """Let the slots show the sharded parameters, to be written, and free the full ones unless a backward needs them."""
        self.check_idle(unit, doing=doing)
        self._executor.uninstall(unit)
        for group in unit.groups:
            group.synchronize_host()
        if not self._planner.expects_backward(unit.number):
            self._executor.execute(self._planner.moves.reshard(unit.number))

    @recovers_first
    def refresh(self, unit: Unit, unwritten: Container[int] = ()) -> None:
        """Take over what callers changed behind our back: assigned Parameters, moved or cast tensors, trainability.

        unwritten: ids of parameters that were given memory without values.

        Raises StateError, naming the parameter, for what cannot be honoured; nothing is changed then.
        """
        self._executor.refresh(unit, unwritten)

    @recovers_first
    def allocate(self, unit: Unit, device: torch.device) -> None:
        """Give the parameters of a unit that are on meta memory, which the caller writes."""
        self._executor.allocate(unit, device)

    def log_write(self, log: CollectiveLog, fingerprint: Fingerprint) -> None:
        """Enter in the log that the caller wrote to shards.

        What hooks on gradients do is left out: their order, and whether they are called, may differ between ranks. So is what
        other threads do. Ranks that parted are told by the next message, which is soon enough for what is done already.
        """
        executor = self._executor
        if (
            log.desync_error is None
            and executor.reducer.decided is None
            and _torch.current_graph_task() == -1
            and executor.units.is_own_thread()
        ):
            log.say(fingerprint)

    # --- other groups ---

    @recovers_first
    def reconfigure(self, unit: Unit, *, doing: str, **changes: object) -> None:
        """As `unit.configure`, for what groups are made of: they are made anew.

        Raises StateError during forward or backward.
        """
        self.ensure_sharded(unit, doing=doing)
        self.check_delivered(unit, doing=doing)
        self._executor.communicator.collectives.of_axis(unit.axis, replace(unit.options, **changes))  # type: ignore[arg-type]
        unit.configure(**changes)
        self._executor.invalidate_unsharded(unit)
        unit.rebuild_groups([parameter.local for parameter in unit.parameters])

    @recovers_first
    def transfer_params(self, unit: Unit, gone: Sequence[ShardedParameter]) -> None:
        """Let other units have these parameters of the unit."""
        self.check_delivered(unit, doing="fully_shard() of a module that shares a parameter with it")
        self._executor.invalidate_unsharded(unit)
        unit.drop(gone)

    # --- a backward in pieces ---

    @recovers_first
    def reduce_now(self, unit: Unit, group: ParamGroup) -> None:
        """Reduce what a group's parameters were given so far, for a caller that runs backwards piece by piece."""
        self.check_idle(unit, doing="post_backward()")
        if group.trainable:
            with torch.no_grad():
                grads = group.take_gradients() or [None] * len(group.parameters)
                self._executor.reducer.reduce(unit, group, grads)
        if not unit.options.keep_after_backward:
            self.reshard(unit)

    @recovers_first
    def finish_reductions(self, unit: Unit) -> None:
        """Wait for what is in flight and hand out gradients, for a caller that runs backwards piece by piece."""
        with torch.no_grad():
            self._executor.reducer.collect([unit], self._executor.units.all)
            self._executor.reducer.assign_grads()

    # --- what is legal now ---

    @recovers_first
    def check_idle(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if the unit's forward or backward is under way, or it shows full parameters."""
        self.recovery.recover()
        refuse_inside_full_params(unit, doing=doing)
        self.recovery.abort_if_left(unit)
        if self._planner.running.has(unit.number):
            raise StateError(f"{doing} was called inside the forward of unit '{unit.name}': call it before or after")
        if self._planner.in_backward(unit.number):
            raise StateError(f"{doing} was called inside the backward of unit '{unit.name}': call it before or after")

    def check_delivered(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if gradients of the unit are on their way, to groups that are about to be made anew."""
        self._executor.reducer.check_delivered(unit, doing=doing)

    @recovers_first
    def check_step(self, unit: Unit, group: ParamGroup) -> None:
        """Raises StateError if an optimizer may not write the shards of a group now."""
        self.recovery.recover()
        self._executor.reducer.read_heartbeats()
        if self._planner.running.has(unit.number) and any(_torch.is_in_forward(module) for module in unit.modules):
            raise StateError(f"optimizer.step() was called inside the forward of unit '{unit.name}': call it after backward")
        group.synchronize_host()
        self._executor.reducer.check_arrived(unit, group)

    @recovers_first
    def meet(self, unit: Unit, *, doing: str) -> None:
        """Make sure that all ranks are about to begin what follows, before this one changes anything."""
        unit.setup_collectives(doing).meet()


__all__ = ["Requests"]
