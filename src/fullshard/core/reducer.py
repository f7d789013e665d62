"""The gradient reducer: reductions in flight, the heartbeat at the end of a backward, and the moment when `.grad` is set."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence

from torch import Tensor

from fullshard.comm.streams import InFlight
from fullshard.core.communicator import Communicator
from fullshard.core.heartbeat import Heartbeats, SentHeartbeat
from fullshard.core.param_group import ParamGroup
from fullshard.core.reduction import Reduction, commit_all
from fullshard.core.scheduler import ForwardCall
from fullshard.core.unit import Unit
from fullshard.errors import StateError


class Listener:
    """Follows the steps of one runtime, as a member of `Runtime.listeners`. Its methods do nothing unless overridden.

    A listener may run actions of the scheduler, as `join()` does for the backward of units that this rank does not compute.
    """

    def beginning_forward(self, unit: Unit) -> None:
        """Act when an outermost forward of a unit begins."""

    def before_backward(self, call: ForwardCall) -> None:
        """Act before the backward of `call` begins."""

    def ending_backward(self) -> None:
        """Act at the end of the outermost backward, before the gradients that are left are reduced."""

    def on_reset(self, units: Container[int]) -> None:
        """Forget what belongs to these units (by number): the forward or backward that they are in is broken off."""

    def on_discard(self, unit: Unit) -> None:
        """Forget the gradients of a unit that are not in `.grad` yet: they are discarded."""


class GradientReducer:
    """Reduces the gradients of one runtime, and sets `.grad` at the end of a step.

    The gradients of a step are set together, after its heartbeat: if the step raises, all of them are set or none. Only groups
    with hooks on their parameters may get theirs earlier, since these hooks run during backward.
    """

    def __init__(self, communicator: Communicator, listeners: Sequence[Listener]) -> None:
        self._communicator, self._listeners = communicator, listeners
        self.in_flight = InFlight()  # the reduce-scatters, and the all-gathers of deleted units
        self.replicating = InFlight()  # second steps: reductions over replicas, or all-reduce hooks alone
        self.heartbeats = Heartbeats(communicator)
        # Units with gradients that are not fully reduced, since a backward kept them on this rank (`has_local`) or reduced them
        # over shards only (`deferred`). Weak references, so that a deleted model frees its memory.
        self._keeping: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        # Reductions of steps that have not ended. Weak references to units, so that models can be deleted before a step ends.
        self._reduced: list[tuple[weakref.ref[Unit], Reduction]] = []
        self._has_hooked = False  # True once a reduction of parameters with gradient hooks was started
        self.replicates = False  # True once a second step was started
        # From `decide` to the end of `assign_grads`: the reductions to commit, even after an interrupt. Else None.
        self.decided: list[Reduction] | None = None

    @property
    def undelivered(self) -> list[tuple[Unit, Reduction]]:
        """The reductions of steps that have not ended, with their units."""
        return [(unit, reduction) for reference, reduction in self._reduced if (unit := reference()) is not None]

    @property
    def unfinished(self) -> set[int]:
        """Numbers of the units with gradients that are kept, deferred, or reduced but not in `.grad` yet."""
        kept = {number for number, unit in self._keeping.items() if any(group.grads.are_left for group in unit.groups)}
        return kept | {unit.number for unit, reduction in self.undelivered if not reduction.committed}

    def reduce(self, unit: Unit, group: ParamGroup, grads: list[Tensor | None], *, last: bool = False) -> None:
        """Start to reduce the gradients of a group or, if its unit does not reduce in this backward, keep them on this rank.

        `grads` is cleared if the reduction starts. With `last` (the user ends the step), only units without gradient sync
        keep gradients.
        """
        if not (unit.options.sync_gradients if last else unit.options.reduces):
            group.grads.accumulate(grads)
            self._keeping[unit.number] = unit
            return
        limit = unit.options.comm.reductions_in_flight
        if len(self.in_flight.entries) >= limit:
            self.in_flight.make_room(limit)
        if self._has_hooked:
            self._commit_early(limit - 1)
        merged = group.grads.merge(grads) if group.grads.has_local else grads
        defer = not unit.options.reduce.all_reduce if last else unit.options.defers
        reduction = Reduction(group, merged, unit.options.reduce, defer=defer)
        grads.clear()
        # The text is hashed into the log, so it may only contain facts that must be equal on all ranks. For parameters with
        # hooks, whether `.grad` exists is no such fact: hooks may clear it, and a rank with other `reductions_in_flight` or
        # other hooks runs them earlier or later.
        action = "reduction"
        if group.grads.has_committed and not reduction.has_hooks and group.parameters[0].sharded.grad is not None:
            action = "reduction, added to the gradients that are there"
        if group.frozen:
            action = f"{action}, without {', '.join(group.frozen)}"
        divide = unit.options.reduce.divide
        if divide is not None:
            action = f"{action}, divided by {divide}"
            if action != group.divided:  # keep the fingerprint of the last factor only
                group.fingerprints.pop(group.divided, None)
                group.divided = action
        communicator = self._communicator
        work = communicator.send(
            communicator.reduce_scatter_stream, group.fingerprints, action, reduction.start, reduction.finish
        )
        # The result of polling differs between ranks. Do not poll a reduce-scatter that an all-reduce over replicas follows: on
        # the CPU the wait for it starts the all-reduce. Nor one in memory of a custom allocator: ranks would free at different
        # moments, so only some would have to allocate anew, which may be a collective itself (symmetric memory).
        own_memory = group.collectives.reduce.reduce_memory is None
        self.in_flight.push(work, reduction.release_inputs, polled=own_memory and not reduction.factors.has_second_step)
        if reduction.factors.has_second_step:
            work = communicator.send(
                communicator.all_reduce_stream,
                group.fingerprints,
                group.replication,
                reduction.replicate,
                reduction.finish_replicated,
                after=work,
            )
            work.beyond = reduction.factors.hook is not None
            self.replicating.push(work, reduction.release_reduced_shard, polled=own_memory and reduction.factors.hook is None)
            self.replicates = True
        reduction.note_started(work)
        if reduction.factors.deferred:
            self._keeping[unit.number] = unit
            return
        self._reduced.append((weakref.ref(unit), reduction))
        self._has_hooked = self._has_hooked or reduction.has_hooks

    def poll(self) -> None:
        """Free the memory of collectives that have completed."""
        self.in_flight.poll()
        if self.replicates:
            self.replicating.poll()

    def drain(self) -> None:
        """Wait for all collectives in flight."""
        self.in_flight.drain()
        self.replicating.drain()

    def is_undelivered(self, unit: Unit) -> bool:
        """Return True if gradients of the unit are reduced, or being reduced, and not in `.grad` yet."""
        return _is_deferred(unit) or any(owner is unit and not reduction.committed for owner, reduction in self.undelivered)

    def check_delivered(self, unit: Unit, *, doing: str) -> None:
        """Raise StateError if gradients of the unit are not in `.grad` yet. `doing`: the call that cannot go on then."""
        if self.is_undelivered(unit):
            raise StateError(
                f"{doing} came while gradients of unit '{unit.name}' are reduced, but not in .grad yet. {unit.options.remedy}"
            )

    def discard(self, unit: Unit) -> None:
        """Discard the gradients of the unit that are not in `.grad` yet: kept on this rank, deferred, or being reduced."""
        for listener in tuple(self._listeners):
            listener.on_discard(unit)
        if _is_deferred(unit) or any(owner is unit for owner, _ in self.undelivered):
            self.abort([unit.number])
        for group in unit.groups:
            group.grads.discard()
        self._keeping.pop(unit.number, None)

    def abort(self, units: Container[int]) -> None:
        """Wait for everything in flight, ignoring its errors, and drop the reductions of these units (by number)."""
        self.in_flight.drain_quietly()
        self.replicating.drain_quietly()
        self._reduced = [(weakref.ref(unit), reduction) for unit, reduction in self.undelivered if unit.number not in units]

    def forget_deleted(self) -> None:
        """Drop the reductions of units that were deleted."""
        self._reduced = [entry for entry in self._reduced if entry[0]() is not None]

    def _commit_early(self, left: int) -> None:
        """During backward, run hooks and set gradients of the oldest reductions with hooks, until `left` of these remain.

        Polling must not decide this, since its result differs between ranks, and hooks may start collectives.
        """
        hooked = [reduction for _, reduction in self.undelivered if reduction.has_hooks and not reduction.committed]
        for reduction in hooked[: max(0, len(hooked) - left)]:
            reduction.wait_for_gradient(collectives_on_host=self._communicator.async_device is None)
            reduction.prepare_commit()
            commit_all([reduction])

    # --- the end of a backward; finalize_backward() calls `take`, `send_heartbeats` and `decide` itself ---

    def collect(self, touched: Sequence[Unit]) -> None:
        """Reduce what earlier backwards kept, and decide to set the gradients of units whose step this backward ends.

        Waits for all reductions in flight if a step ends, else for those with hooks. `touched`: units with gradients of this
        backward. Also reduces what other units of their models kept, if their step ends; all ranks must have kept it.
        """
        for unit, group in self._kept_in(touched):
            self.reduce(unit, group, [None] * len(group.parameters))
        due = [(unit, reduction) for unit, reduction in self.undelivered if unit.options.ends_step]
        self.take([reduction for _, reduction in due])
        if self._has_hooked:  # hooks may write to shards, which the next backward of the step may all-gather
            self._commit_early(0)
        if due:
            sent = self.send_heartbeats(due)
            self.drain()
            self.decide([reduction for _, reduction in due], sent)

    def _kept_in(self, touched: Sequence[Unit]) -> list[tuple[Unit, ParamGroup]]:
        """Return the groups with kept gradients whose unit is in a model of `touched` and ends its step; oldest unit first."""
        if not self._keeping:
            return []
        trees = {unit.outermost for unit in touched} - {None}
        found: list[tuple[Unit, ParamGroup]] = []
        for number, unit in sorted(self._keeping.items()):
            if not any(group.grads.are_left for group in unit.groups):  # they were reduced since
                del self._keeping[number]
                continue
            options = unit.options
            if not (options.sync_gradients and options.ends_step) or unit.outermost not in trees:
                continue
            for group in unit.groups:
                deferred = group.grads.deferred is not None and options.reduce.all_reduce
                if group.trainable and (group.grads.has_local or deferred):
                    found.append((unit, group))
        return found

    def take(self, reductions: Sequence[Reduction]) -> None:
        """Remove these reductions, whose step ends, from `undelivered`."""
        gone = set(map(id, reductions))
        self._reduced = [entry for entry in self._reduced if id(entry[1]) not in gone]

    def send_heartbeats(self, reduced: Sequence[tuple[Unit, Reduction]]) -> list[SentHeartbeat]:
        """Send the heartbeats of units with heartbeats. Return each heartbeat with its call."""
        # On the CPU an all-reduce over replicas starts when its reduce-scatter is waited for. Wait now, so that the all-reduces
        # start before the heartbeat on every rank.
        if len(self.replicating):
            self.in_flight.drain()
        return self.heartbeats.send(
            [(unit.options.checks.every, reduction) for unit, reduction in reduced if unit.options.checks.heartbeat]
        )

    def decide(self, reductions: Sequence[Reduction], sent: Sequence[SentHeartbeat]) -> None:
        """Decide to set gradients: of all trainable parameters or, if a heartbeat `must_be_read`, of those that any rank used.

        An interrupt does not undo it. Raises StateError if ranks diverged; an accelerator may show that in a later step only.
        """
        self.heartbeats.read_sent(sent)
        used: dict[int, list[bool]] = {}  # by id of the reduction, if a heartbeat was read: did any rank use each parameter
        for beat, work in sent:
            if beat.must_be_read:
                if self._communicator.capturing:
                    unused = next(one.undecided for one in beat.reductions if one.is_partial and one.undecided)
                    raise StateError(
                        f"A captured graph cannot hold a step that does not use parameter '{unused.name}' of unit "
                        f"'{unused.unit_name.name}', which has no .grad: the host reads whether other ranks used it. Before "
                        "the capture, run a step that uses it and then zero_grad(set_to_none=False), or freeze the parameter."
                    )
                work.block()
                used |= zip(map(id, beat.reductions), beat.used_anywhere())
        decided: list[Reduction] = []
        on_host = self._communicator.async_device is None
        for reduction in reductions:
            if not (on_host and reduction.ready):
                reduction.wait_for_gradient(collectives_on_host=on_host)
            if not (reduction.is_partial or reduction.has_hooks):
                reduction.group.grads.has_committed = reduction.committed = True
                decided.append(reduction)
                continue
            anywhere = used.get(id(reduction)) or [True] * len(reduction.used)
            if anywhere[0] or reduction.used[0]:
                reduction.group.grads.has_committed = True
            if reduction.prepare_commit(anywhere):
                decided.append(reduction)
        self.heartbeats.release(sent)
        self.decided = decided

    # --- `.grad` ---

    def assign_grads(self) -> None:
        """Set the gradients that `decide` chose: all of them or none. See `commit_all`."""
        if self.decided is not None:
            try:
                commit_all(self.decided)
            finally:
                self.decided = None


def _is_deferred(unit: Unit) -> bool:
    return any(group.grads.deferred is not None for group in unit.groups)
