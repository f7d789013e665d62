"""Gradients on their way: reductions in flight, the heartbeat that ends a backward, and when a `.grad` is handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence

from torch import Tensor

from fullshard.collectives.streams import InFlight, LaneWork
from fullshard.consistency.collective_log import CollectiveLog
from fullshard.errors import StateError
from fullshard.params.arena import MessageArena
from fullshard.params.grad_commit import GradCommit, commit_all
from fullshard.params.group import ParamGroup
from fullshard.params.reduction import Reduction
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.heartbeat import SLOTS, Heartbeats, Sent
from fullshard.runtime.kept_grads import Kept, KeptGradients
from fullshard.runtime.unit import PendingReduction, Unit


class GradientReducer:
    """Reductions since the last heartbeat, and when their gradients are handed out.

    Gradients of a step are handed out together, behind its heartbeat: of a step that raises all arrive or none.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._in_flight = InFlight()
        self._replicating = InFlight()
        self._heartbeats = Heartbeats(communicator)
        self._kept = KeptGradients()
        self._arena = MessageArena()
        self._reduced: list[tuple[Unit, Reduction]] = []  # since the last heartbeat
        # Those whose parameters have hooks land early, but never by polling: a hook may talk to other ranks.
        self._hooked: deque[Reduction] = deque()
        self._replicates = False  # whether any sum over replicas was ever sent
        self.merged = False  # whether what is on its way contains what earlier backwards kept
        self.decided: list[GradCommit] | None = None  # what is to be handed out, whatever comes

    def __len__(self) -> int:
        """Messages in flight."""
        return len(self._in_flight) + len(self._replicating)

    @property
    def keeps(self) -> bool:
        """True if backwards kept gradients of some unit on this rank."""
        return len(self._kept) > 0

    def track(self, work: LaneWork, landed: Callable[[], None]) -> None:
        """Call `landed` once the work of `work` is waited for, in its turn."""
        self._in_flight.push(work, landed, polled=False)

    def reduce(self, unit: Unit, group: ParamGroup, grads: list[Tensor | None]) -> None:
        """Send the gradients of a group on their way, or keep them on this rank. Takes them out of `grads`."""
        if group.dtypes.grad is None and unit.options.mp.reduce_dtype is None:
            group.follow_gradients(grads)
        if not unit.options.sync_gradients:
            group.grads.accumulate(grads)
            self._kept.add(unit)
            return
        arena, limit = None, unit.options.comm.reductions_in_flight
        if unit.options.keep_memory:  # all messages lie in the same memory, so the last one must have left it
            self.drain()
            arena = self._arena.begin(group.storage.device)
        self._in_flight.make_room(limit)
        while len(self._hooked) >= limit:
            self._land_early(self._hooked.popleft())
        merged = group.grads.merge(grads)
        self.merged = self.merged or merged is not grads
        reduction = Reduction(group, merged, unit.options.reduce, arena)
        grads.clear()
        frozen = [p.name for p in group.parameters if not p.sharded.requires_grad]
        # Ranks must agree on it. Those that step in hooks may have their gradients in different orders.
        action = (
            "reduction, added to the gradients that are there"
            if group.grads.adds() and not reduction.has_hooks
            else "reduction"
        )
        if frozen:
            action = f"{action}, without {', '.join(frozen)}"
        if group.dtypes.grad is None:
            action = f"{action}, in {group.dtypes.reduce}"
        communicator = self._communicator
        work = communicator.send(communicator.reduce_lane, group.fingerprints, action, reduction.start, reduction.finish)
        # Polling differs from rank to rank. Not polled is what a sum over replicas follows, since on the CPU that begins when
        # this is waited for, and memory that ranks exchange when they get it (symmetric memory).
        own_memory = group.collectives.reduce.reduce_memory is None
        self._in_flight.push(work, reduction.release_messages, polled=own_memory and not reduction.steps.replicated)
        if reduction.steps.replicated:
            work = communicator.send(
                communicator.replicate_lane,
                group.fingerprints,
                "sum over replicas",
                reduction.replicate,
                reduction.finish_replicated,
                after=work.work,
            )
            self._replicating.push(work, reduction.release_sum, polled=own_memory and reduction.steps.hook is None)
            self._replicates = True
        reduction.sent(work)
        if reduction.steps.deferred:
            self._kept.add(unit)
            return
        self._reduced.append((unit, reduction))
        if reduction.has_hooks:
            self._hooked.append(reduction)

    def release_arena(self) -> None:
        """Give the memory back that messages of units with `set_keep_unsharded_storage(True)` lay in."""
        self.drain()
        self._arena = MessageArena()

    def poll(self) -> None:
        """Let go of what is finished already."""
        self._in_flight.poll()
        if self._replicates:
            self._replicating.poll()

    def drain(self) -> None:
        """Wait for all that is in flight."""
        self._in_flight.drain()
        self._replicating.drain()

    def is_undelivered(self, unit: Unit) -> bool:
        """Whether gradients of the unit are on their way: reduced or being reduced, and in no `.grad` yet."""
        return any(group.grads.deferred is not None for group in unit.groups) or any(
            held is unit and not reduction.committed for held, reduction in self._reduced
        )

    def check_delivered(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if gradients of the unit are on their way, to groups that are about to be made anew."""
        if self.is_undelivered(unit):
            raise StateError(
                f"{doing} came while gradients of unit '{unit.name}' are reduced, but not yet delivered: run the last backward "
                "of the step first, or call zero_grad()"
            )

    def discard(self, unit: Unit) -> None:
        """Forget the gradients of the unit that are not delivered: kept on this rank, deferred, or on their way."""
        if unit.pending is not None:
            self._drop(unit.pending, "zero_grad(), reset_iter_state() or an error, before they were waited for")
        if any(held is unit for held, _ in self._reduced) or any(group.grads.deferred is not None for group in unit.groups):
            self._in_flight.drain_quietly()
            self._replicating.drain_quietly()
            dropped = [reduction for held, reduction in self._reduced if held is unit]
            self._reduced = [entry for entry in self._reduced if entry[0] is not unit]
            self._hooked = deque(reduction for reduction in self._hooked if reduction not in dropped)
        for group in unit.groups:
            group.grads.discard()
        self._kept.discard(unit)

    def _drop(self, pending: PendingReduction, why: str) -> None:
        """Forget reductions that the caller was to wait for: of all their units, since gradients are all or none."""
        units = pending.units
        pending.drop(why)
        for unit in units:
            self.discard(unit)

    def abort(self) -> None:
        """Wait for what is in flight, whatever it comes to, and look at no heartbeat of before."""
        self._in_flight.drain_quietly()
        self._replicating.drain_quietly()
        self._heartbeats.clear()
        self._hooked.clear()
        self.merged = False

    def forget(self, units: Container[int]) -> None:
        """Hand out nothing to these units (by number) of what they have sent."""
        for unit, _ in self._reduced:
            if unit.number in units and unit.pending is not None:
                self._drop(unit.pending, "a backward that raised, before they were waited for")
        self._reduced = [entry for entry in self._reduced if entry[0].number not in units]

    def check_arrived(self, unit: Unit, group: ParamGroup) -> None:
        """Raises StateError if gradients of a group are not where an optimizer would look for them."""
        for parameter in group.parameters:
            if parameter.local_grad is not None:
                raise StateError(
                    f"optimizer.step() was called while the gradient of '{parameter.name}' in unit '{unit.name}' is only kept "
                    "on each rank: run the last backward of the step outside of accumulate(), or after "
                    f"set_requires_gradient_sync(True){', and call finalize_backward()' if unit.options.manual else ''}"
                )
        if group.grads.deferred is not None:
            raise StateError(
                f"optimizer.step() was called while gradients of unit '{unit.name}' are reduced over shards, but not over "
                "replicas: call set_requires_all_reduce(True) before the last backward of the step"
            )
        if any(reduction.group is group and not reduction.committed for _, reduction in self._reduced):
            remedy = (
                "call finalize_backward(), and wait() of its handle"
                if unit.options.manual
                else "call set_is_last_backward(True) before the last backward of the step"
            )
            raise StateError(f"optimizer.step() was called before the gradients of unit '{unit.name}' arrived: {remedy}")

    def _land_early(self, reduction: Reduction) -> None:
        """Its hooks do not wait for the end of the backward."""
        reduction.wait_on_host(on_host=self._communicator.away is None)
        commit = reduction.grad_commit()
        assert commit is not None
        commit_all([commit])

    def _land_unfinished(self) -> None:
        """Land what belongs to steps that go on: a hook may write a shard, which the next backward may be gathering."""
        unfinished = [reduction for _, reduction in self._reduced]
        for reduction in [one for one in self._hooked if one in unfinished]:
            self._hooked.remove(reduction)
            self._land_early(reduction)

    # --- the end of a backward ---

    def collect(self, touched: Sequence[Unit], units: Callable[[], Sequence[Unit]]) -> None:
        """Wait for what is in flight and decide to hand out the gradients of units whose step this backward ends.

        `touched`: the units that the backward entered. `units`: gives all that live, in the order in which they were made.
        """
        kept = self._kept.known_here(touched)
        reduced = self._take_due()
        self._land_unfinished()
        if not reduced and not kept:
            return
        at_once = self._communicator.away is None or self._kept.since_last_step or len(self._kept) > 0
        sent = self._send_heartbeats(reduced, kept, None)
        more = self._kept.known_anywhere(sent, kept, touched, units, read=at_once)
        if more:
            for unit, group in more:
                self.reduce(unit, group, [None] * len(group.parameters))
            late = self._take_due()
            beating = {beat.log for beat, _ in sent}
            silent = {reduction.group.fingerprints.log for _, reduction in reduced} - beating
            sent += self._send_heartbeats(late, [], {reduction.group.fingerprints.log for _, reduction in late} - silent)
            reduced += late
        self._kept.end_step()
        self._decide([reduction for _, reduction in reduced], sent)

    def _take_due(self) -> list[tuple[Unit, Reduction]]:
        """Take what is reduced since the last heartbeat, of units whose step the backward ends."""
        due: list[tuple[Unit, Reduction]] = []
        left: list[tuple[Unit, Reduction]] = []
        for entry in self._reduced:
            options = entry[0].options
            (due if options.last_backward and not options.manual else left).append(entry)
        self._reduced = left
        return due

    def _send_heartbeats(
        self, reduced: Sequence[tuple[Unit, Reduction]], kept: Sequence[Kept], again: Container[CollectiveLog] | None
    ) -> list[Sent]:
        """Send heartbeats behind these reductions, and wait for the reductions. Raises StateError if the ranks parted.

        again: the logs that have another heartbeat in this backward, if that is so.

        On an accelerator a heartbeat is read when it has long passed, but at once by a rank of which some backward kept
        gradients since the last one: others may have kept those of other units. That assumes that on every rank some backward
        kept something, or on none, as in a loop that runs the same number of microbatches everywhere. A rank that does not know
        of reductions which the others send is told so by the next heartbeat, as of any call that it did not make.
        """
        if len(self._replicating):  # on the replicas, too, sums begin before the heartbeat on every rank
            self._in_flight.drain()
        beating = [(unit.options.checks.every, reduction) for unit, reduction in reduced if unit.options.checks.heartbeat]
        slots = [(unit.global_id % SLOTS, group.fingerprints.log) for unit, group in kept]
        sent = self._heartbeats.send(beating, slots, again)
        self.drain()
        self._hooked.clear()
        self._read(sent)
        return sent

    def _read(self, sent: Sequence[Sent]) -> None:
        """Look at heartbeats: of ranks that diverged none has a gradient."""
        if self._communicator.away is None or self._kept.since_last_step or len(self._kept):
            self._heartbeats.read_now(sent)
        else:
            self._heartbeats.read_later(sent)

    def _decide(self, reductions: Sequence[Reduction], sent: Sequence[Sent]) -> None:
        """These gradients are handed out, whatever comes: those of parameters that any rank used."""
        used: dict[int, list[bool]] = {}  # anywhere, where that is known
        for beat, work in sent:
            if beat.undecided:
                work.block()
                used |= zip(map(id, beat.reductions), beat.used_anywhere())
            elif not beat.all_used:
                used |= ((id(reduction), reduction.used) for reduction in beat.reductions)
        commits: list[GradCommit] = []
        on_host = self._communicator.away is None
        for reduction in reductions:
            reduction.wait_on_host(on_host=on_host)
            anywhere = used.get(id(reduction), [True] * len(reduction.used))
            if anywhere[0] or reduction.used[0]:
                reduction.group.grads.note_given()
            commit = reduction.grad_commit(anywhere)
            if commit is not None:
                commits.append(commit)
        self._heartbeats.handed_out(sent)
        self.decided, self.merged = commits, False

    # --- the end of a backward, when the caller asks for it ---

    def is_unreduced(self, group: ParamGroup) -> bool:
        """Return True if no reduction since `.grad` was last set has the gradients of the group, kept ones included."""
        kept = group.grads.has_local or group.grads.deferred is not None
        return kept or not any(reduction.group is group for _, reduction in self._reduced)

    def begin_to_end(self, units: Sequence[Unit]) -> tuple[list[Reduction], list[Sent]]:
        """Send the heartbeats of these units' reductions: those, and the heartbeats, for `end`."""
        mine = set(map(id, units))
        due = [(unit, reduction) for unit, reduction in self._reduced if id(unit) in mine]
        if len(self._replicating):  # sums over replicas begin before the heartbeat on every rank
            self._in_flight.drain()
        beating = [(unit.options.checks.every, reduction) for unit, reduction in due if unit.options.checks.heartbeat]
        sent = self._heartbeats.send(beating, (), None)
        if self._communicator.away is None and any(_has_stages(reduction) for _, reduction in due):
            self.drain()
            for _, work in sent:
                work.block()
        return [reduction for _, reduction in due], sent

    def end(self, reductions: Sequence[Reduction], sent: Sequence[Sent]) -> None:
        """Wait for these reductions and their heartbeats, and set `.grad`. Sends nothing."""
        gone = set(map(id, reductions))
        self._reduced = [entry for entry in self._reduced if id(entry[1]) not in gone]
        self._hooked = deque(reduction for reduction in self._hooked if id(reduction) not in gone)
        self._read(sent)
        self._kept.end_step()
        self._decide(reductions, sent)
        self.assign_grads()
        self.poll()

    # --- `.grad` ---

    def assign_grads(self) -> None:
        """Give the parameters what `collect` decided on. Until that is done no interrupt is raised."""
        decided = self.decided
        if decided is not None:
            try:
                commit_all(decided)
            finally:
                self.decided = None

    def read_heartbeats(self) -> None:
        """On an accelerator: look at those that have arrived. Raises StateError if the ranks did not run the same."""
        self._heartbeats.read()


def _has_stages(reduction: Reduction) -> bool:
    """Return True if the host sends more when it waits for the first messages: sums over replicas, or over many ranks."""
    group = reduction.group
    return reduction.steps.replicated or group.layout.ranks > 2


__all__ = ["GradientReducer"]
