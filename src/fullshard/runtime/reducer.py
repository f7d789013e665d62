"""Gradients on their way: reductions in flight, the heartbeat that ends a backward, and when a `.grad` is handed out."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from torch import Tensor, nn

from fullshard.collectives.streams import InFlight, LaneWork, nothing
from fullshard.consistency.collective_log import CollectiveLog, GroupFingerprints, UnitName
from fullshard.errors import StateError
from fullshard.params.grad_commit import GradCommit, commit_all
from fullshard.params.group import ParamGroup
from fullshard.params.reduction import Reduction
from fullshard.runtime.communicator import Communicator, TrackedWork
from fullshard.runtime.heartbeat import SLOTS, Heartbeat, Page
from fullshard.runtime.unit import Unit

_NOBODY = UnitName("")


class GradientReducer:
    """delivery 1 - n reductions since the last heartbeat, 1 - n heartbeats that nobody has looked at.

    Gradients of a step are handed out together, behind its heartbeat: of a step that raises all arrive or none.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._in_flight = InFlight()
        self._replicating = InFlight()
        self._reduced: list[tuple[Unit, Reduction]] = []  # since the last heartbeat
        self._beats: deque[tuple[Heartbeat, TrackedWork]] = deque()  # that nobody has looked at
        self._lines: dict[CollectiveLog, GroupFingerprints] = {}  # of what no unit says, but this rank
        self._page: Page | None = None  # that nothing is on any more
        # Those whose parameters have hooks land early, but never by polling: a hook may talk to other ranks.
        self._hooked: deque[Reduction] = deque()
        self._replicates = False  # whether any sum over replicas was ever sent
        self.merged = False  # whether what is on its way contains what earlier backwards kept
        self.decided: list[GradCommit] | None = None  # what is to be handed out, whatever comes
        # Units, by number, of which a backward kept gradients on this rank (or over shards only) since they were last reduced.
        self._keeping: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._kept = False  # whether a backward did so since gradients were last handed out

    def __len__(self) -> int:
        """Messages in flight."""
        return len(self._in_flight) + len(self._replicating)

    def track(self, ticket: LaneWork, landed: Callable[[], None]) -> None:
        """Call `landed` once the work of `ticket` is waited for, in its turn."""
        self._in_flight.push(ticket, landed)

    def reduce(self, unit: Unit, group: ParamGroup, grads: list[Tensor | None]) -> None:
        """Send the gradients of a group on their way, or keep them on this rank. Takes them out of `grads`."""
        if not unit.options.sync_gradients:
            group.grads.accumulate(grads)
            self._keeping[unit.number] = unit
            self._kept = True
            return
        limit = unit.options.comm.reductions_in_flight
        self._in_flight.make_room(limit)
        while len(self._hooked) >= limit:
            self._land_early(self._hooked.popleft())
        merged = group.grads.merge(grads)
        self.merged = self.merged or merged is not grads
        reduction = Reduction(group, merged, unit.options.reduce)
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
        communicator = self._communicator
        ticket = communicator.send(communicator.reduce_lane, group.fingerprints, action, reduction.start, reduction.finish)
        # On the CPU the sum over replicas begins when this is waited for, so never by polling: that differs from rank to rank.
        self._in_flight.push(ticket, reduction.release_messages, polled=not reduction.steps.replicated)
        if reduction.steps.replicated:
            ticket = communicator.send(
                communicator.replicate_lane,
                group.fingerprints,
                "sum over replicas",
                reduction.replicate,
                reduction.finish_replicated,
                after=ticket,
            )
            self._replicating.push(ticket, reduction.release_sum, polled=reduction.steps.hook is None)
            self._replicates = True
        reduction.sent(ticket)
        if reduction.steps.deferred:
            self._keeping[unit.number] = unit
            self._kept = True
            return
        self._reduced.append((unit, reduction))
        if reduction.has_hooks:
            self._hooked.append(reduction)

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

    def discard(self, unit: Unit) -> None:
        """Forget the gradients of the unit that are not delivered: kept on this rank, deferred, or on their way."""
        if any(held is unit for held, _ in self._reduced) or any(group.grads.deferred is not None for group in unit.groups):
            self._in_flight.drain_quietly()
            self._replicating.drain_quietly()
            dropped = [reduction for held, reduction in self._reduced if held is unit]
            self._reduced = [entry for entry in self._reduced if entry[0] is not unit]
            self._hooked = deque(reduction for reduction in self._hooked if reduction not in dropped)
        for group in unit.groups:
            group.grads.discard()
        self._keeping.pop(unit.number, None)

    def abort(self) -> None:
        """Wait for what is in flight, whatever it comes to, and look at no heartbeat of before."""
        self._in_flight.drain_quietly()
        self._replicating.drain_quietly()
        self._beats.clear()
        self._hooked.clear()
        self.merged = False

    def forget(self, units: Container[int]) -> None:
        """Hand out nothing to these units (by number) of what they have sent."""
        self._reduced = [entry for entry in self._reduced if entry[0].number not in units]

    def check_arrived(self, unit: Unit) -> None:
        """Raises StateError if gradients of the unit are not where an optimizer would look for them."""
        for parameter in unit.parameters:
            if parameter.local_grad is not None:
                raise StateError(
                    f"optimizer.step() was called while the gradient of '{parameter.name}' in unit '{unit.name}' is only kept "
                    "on each rank: run the last backward of the step outside of accumulate(), or after "
                    "set_requires_gradient_sync(True)"
                )
        if any(group.grads.deferred is not None for group in unit.groups):
            raise StateError(
                f"optimizer.step() was called while gradients of unit '{unit.name}' are reduced over shards, but not over "
                "replicas: call set_requires_all_reduce(True) before the last backward of the step"
            )
        if any(held is unit and not reduction.committed for held, reduction in self._reduced):
            raise StateError(
                f"optimizer.step() was called before the gradients of unit '{unit.name}' arrived: "
                "call set_is_last_backward(True) before the last backward of the step"
            )

    def _land_early(self, reduction: Reduction) -> None:
        """Its hooks do not wait for the end of the backward."""
        reduction.wait_on_host(on_host=self._communicator.away is None)
        handover = reduction.grad_commit()
        assert handover is not None
        commit_all([handover])

    # --- the end of a backward ---

    def collect(self, touched: Sequence[Unit], units: Callable[[], Sequence[Unit]]) -> None:
        """Wait for what is in flight and decide to hand out the gradients of units whose step this backward ends.

        `touched`: the units that the backward entered. `units`: gives all that live, in the order in which they were made.
        """
        keeping = len(self._keeping) > 0
        trees = {unit.tree for unit in touched} if keeping else set()
        left = self._left(trees) if keeping else []
        reduced = self._due()
        if not reduced and not left:
            return
        beats = self._beat(reduced, left, None)
        beating = {beat.ledger for beat, _ in beats}
        more = [(unit, group) for unit, group in left if group.fingerprints.log not in beating]
        for beat, _ in beats:
            slots = beat.kept_units() if self._communicator.away is None or self._kept or keeping else ()
            if slots:
                trees = trees or {unit.tree for unit in touched}
                more += self._to_reduce(beat, slots, trees, units())
        if more:
            more.sort(key=lambda entry: entry[0].number)
            for unit, group in more:
                self.reduce(unit, group, [None] * len(group.parameters))
            late = self._due()
            unpollable = {reduction.group.fingerprints.log for _, reduction in reduced} - beating
            beats += self._beat(late, [], {reduction.group.fingerprints.log for _, reduction in late} - unpollable)
            reduced += late
        if keeping:
            for number, unit in list(self._keeping.items()):
                if not any(group.grads.has_local or group.grads.deferred is not None for group in unit.groups):
                    del self._keeping[number]
        self._kept = False
        used: dict[int, list[bool]] = {}  # anywhere, where that is known
        for beat, ticket in beats:
            if beat.undecided:
                ticket.block()
                used |= zip(map(id, beat.reductions), beat.used_anywhere())
            elif not beat.all_used:
                used |= ((id(reduction), reduction.used) for reduction in beat.reductions)
        handovers: list[GradCommit] = []
        on_host = self._communicator.away is None
        for _, reduction in reduced:
            reduction.wait_on_host(on_host=on_host)
            anywhere = used.get(id(reduction), [True] * len(reduction.used))
            if anywhere[0] or reduction.used[0]:
                reduction.group.grads.note_given()
            handover = reduction.grad_commit(anywhere)
            if handover is not None:
                handovers.append(handover)
        if beats and self._communicator.away is None:
            self._page = beats[0][0].page
        self.decided, self.merged = handovers, False

    def _due(self) -> list[tuple[Unit, Reduction]]:
        """Take what is reduced since the last heartbeat, of units whose step the backward ends."""
        due = [entry for entry in self._reduced if entry[0].options.last_backward]
        if due:
            self._reduced = [entry for entry in self._reduced if not entry[0].options.last_backward]
        return due

    def _beat(
        self,
        reduced: Sequence[tuple[Unit, Reduction]],
        left: Sequence[tuple[Unit, ParamGroup]],
        again: Container[CollectiveLog] | None,
    ) -> list[tuple[Heartbeat, TrackedWork]]:
        """Send heartbeats behind these reductions, and wait for the reductions. Raises StateError if the ranks parted.

        On an accelerator a heartbeat is read when it has long passed, but at once by a rank of which some backward kept
        gradients since the last one: others may have kept those of other units. That assumes that on every rank some backward
        kept something, or on none, as in a loop that runs the same number of microbatches everywhere. A rank that does not know
        of reductions which the others send is told so by the next heartbeat, as of any call that it did not make.
        """
        if len(self._replicating):  # on the replicas, too, sums begin before the heartbeat on every rank
            self._in_flight.drain()
        beats = self._start_heartbeats(reduced, left, again)
        self.drain()
        self._hooked.clear()
        if self._communicator.away is None or self._kept or len(self._keeping):  # of ranks that parted none has a gradient
            if self._beats:
                self.read_beats(keep=0)
            for beat, ticket in beats:
                ticket.block()
                self._check_beat(beat)
        else:
            self._beats += beats
            if len(self._beats) > len(beats):
                self.read_beats(keep=len(beats))
        return beats

    # --- gradients that earlier backwards kept, of units that this one did not enter ---

    def _left(self, trees: Container[nn.Module | None]) -> list[tuple[Unit, ParamGroup]]:
        """Groups of these models of which this rank kept gradients that are to be reduced now, as far as it knows."""
        found: list[tuple[Unit, ParamGroup]] = []
        for _, unit in sorted(self._keeping.items()):
            if _ends_here(unit, trees):
                for group in unit.groups:
                    deferred = group.grads.deferred is not None and unit.options.reduce.all_reduce
                    if group.trainable and (group.grads.has_local or deferred):
                        found.append((unit, group))
        return found

    def _to_reduce(
        self, beat: Heartbeat, slots: Container[int], trees: Container[nn.Module | None], units: Iterable[Unit]
    ) -> list[tuple[Unit, ParamGroup]]:
        """What a heartbeat says that some rank kept: groups that all ranks reduce now, as no rank did in this backward.

        Units that share a slot are reduced with each other: of those that nobody kept anything of, no gradient is handed out.
        """
        reduced = {id(reduction.group) for reduction in beat.reductions}
        return [
            (unit, group)
            for unit in units
            if unit.global_id % SLOTS in slots and _ends_here(unit, trees)
            for group in unit.groups
            if group.fingerprints.log is beat.ledger and group.trainable and id(group) not in reduced
        ]

    def assign_grads(self) -> None:
        """Give the parameters what `collect` decided on. Until that is done no interrupt is raised."""
        decided = self.decided
        if decided is not None:
            try:
                commit_all(decided)
            finally:
                self.decided = None

    def _start_heartbeats(
        self,
        reduced: Sequence[tuple[Unit, Reduction]],
        left: Sequence[tuple[Unit, ParamGroup]],
        again: Container[CollectiveLog] | None,
    ) -> list[tuple[Heartbeat, TrackedWork]]:
        """One message per set of process groups. `again`: the ledgers that have another one in this backward, if that is so."""
        communicator = self._communicator
        beats: list[tuple[Heartbeat, TrackedWork]] = []
        axes: dict[CollectiveLog, tuple[int, list[Reduction]]] = {}
        for unit, reduction in reduced:
            checks = unit.options.checks
            if checks.heartbeat:
                ledger = reduction.group.fingerprints.log
                if ledger not in axes:
                    axes[ledger] = checks.every, []
                axes[ledger][1].append(reduction)
        for ledger, (every, reductions) in axes.items():
            if ledger not in again if again is not None else not ledger.beats(every):
                continue
            line = self._lines.get(ledger)
            if line is None:
                line = self._lines[ledger] = GroupFingerprints(ledger, _NOBODY, "")
            slots = [unit.global_id % SLOTS for unit, group in left if group.fingerprints.log is ledger]
            beat = Heartbeat(ledger, reductions, communicator.away, self._page, slots)
            self._page = None
            over = reductions[0].group.collectives.replicate is not None
            finish = nothing if over else beat.finish
            ticket = communicator.send(communicator.reduce_lane, line, "heartbeat", beat.start, finish)
            if over:
                lane, start = communicator.replicate_lane, beat.start_over_replicas
                ticket = communicator.send(lane, line, "heartbeat", start, beat.finish, ticket, part=True)
            beats.append((beat, ticket))
        return beats

    def _check_beat(self, beat: Heartbeat) -> None:
        """Raises StateError if the ranks did not run the same."""
        if beat.is_desynced():
            watch = self._communicator.watchdog
            text = "" if watch is None else watch.confront(beat.ledger)
            beat.ledger.close(text or "the ranks ran different units, or the same ones in different orders, in this step")
            raise StateError(beat.ledger.desync_error)

    def read_beats(self, *, keep: int | None = None) -> None:
        """On an accelerator: look at what has arrived, and wait for all but the last `keep`, if that is given."""
        while self._beats and ((keep is not None and len(self._beats) > keep) or self._beats[0][1].done()):
            beat, ticket = self._beats.popleft()
            ticket.block()
            self._check_beat(beat)


def _ends_here(unit: Unit, trees: Container[nn.Module | None]) -> bool:
    """Whether a synchronised backward in these models ends the step of the unit, whether or not it entered it."""
    return unit.options.sync_gradients and unit.options.last_backward and unit.tree in trees


__all__ = ["GradientReducer"]
