"""Gradients on their way: reductions in flight, the heartbeat that ends a backward, and when a `.grad` is handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence

from torch import Tensor

from fullshard.comm import InFlight, Ticket, nothing
from fullshard.communicator import Communicator, Sent
from fullshard.errors import StateError
from fullshard.group import Group
from fullshard.handover import Handover, hand_over
from fullshard.heartbeat import Heartbeat, Page
from fullshard.ledger import Label, Ledger, Line
from fullshard.reduction import Reduction
from fullshard.unit import Unit

_NOBODY = Label("")


class Delivery:
    """delivery 1 - n reductions since the last heartbeat, 1 - n heartbeats that nobody has looked at.

    Gradients of a step are handed out together, behind its heartbeat: of a step that raises all arrive or none.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._in_flight = InFlight()
        self._replicating = InFlight()
        self._reduced: list[tuple[Unit, Reduction]] = []  # since the last heartbeat
        self._beats: deque[tuple[Heartbeat, Sent]] = deque()  # that nobody has looked at
        self._lines: dict[Ledger, Line] = {}  # of what no unit says, but this rank
        self._page: Page | None = None  # that nothing is on any more
        # Those whose parameters have hooks land early, but never by polling: a hook may talk to other ranks.
        self._hooked: deque[Reduction] = deque()
        self.merged = False  # whether what is on its way contains what earlier backwards kept
        self._decided: list[Handover] | None = None  # what is to be handed out, whatever comes

    def __len__(self) -> int:
        """Messages in flight."""
        return len(self._in_flight) + len(self._replicating)

    def keep(self, ticket: Ticket, landed: Callable[[], None]) -> None:
        """Call `landed` once the work of `ticket` is waited for, in its turn."""
        self._in_flight.push(ticket, landed)

    def reduce(self, unit: Unit, group: Group, grads: list[Tensor | None]) -> None:
        """Send the gradients of a group on their way, or keep them on this rank. Takes them out of `grads`."""
        if not unit.options.sync_gradients:
            group.accumulate(grads)
            return
        limit = unit.options.comm.reductions_in_flight
        self._in_flight.make_room(limit)
        while len(self._hooked) >= limit:
            self._land_early(self._hooked.popleft())
        merged = group.with_accumulated(grads)
        self.merged = self.merged or merged is not grads
        reduction = Reduction(group, merged, unit.options.reduce)
        grads.clear()
        frozen = [p.name for p in group.parameters if not p.sharded.requires_grad]
        action = f"reduction without {', '.join(frozen)}" if frozen else "reduction"  # ranks must agree on it
        communicator = self._communicator
        ticket = communicator.send(communicator.reduce_lane, group.line, action, reduction.start, reduction.finish)
        # On the CPU the sum over replicas begins when this is waited for, so never by polling: that differs from rank to rank.
        self._in_flight.push(ticket, reduction.settle, polled=not reduction.replicated)
        if reduction.replicated:
            ticket = communicator.send(
                communicator.replicate_lane,
                group.line,
                "sum over replicas",
                reduction.replicate,
                reduction.finish_replicated,
                after=ticket,
            )
            self._replicating.push(ticket, reduction.end, polled=reduction.polled)
        reduction.follow(ticket)
        group.defers(reduction.deferred)
        if reduction.deferred:
            return
        self._reduced.append((unit, reduction))
        if reduction.hooked:
            self._hooked.append(reduction)

    def poll(self) -> None:
        """Let go of what is finished already."""
        self._in_flight.poll()
        if len(self._replicating):
            self._replicating.poll()

    def drain(self) -> None:
        """Wait for all that is in flight."""
        self._in_flight.drain()
        self._replicating.drain()

    def is_undelivered(self, unit: Unit) -> bool:
        """Whether gradients of the unit are on their way: reduced or being reduced, and in no `.grad` yet."""
        return any(group.deferring for group in unit.groups) or any(
            held is unit and not reduction.landed for held, reduction in self._reduced
        )

    def discard(self, unit: Unit) -> None:
        """Forget the gradients of the unit that are not delivered: kept on this rank, deferred, or on their way."""
        if any(held is unit for held, _ in self._reduced) or any(group.deferring for group in unit.groups):
            self._in_flight.abandon()
            self._replicating.abandon()
            dropped = [reduction for held, reduction in self._reduced if held is unit]
            self._reduced = [entry for entry in self._reduced if entry[0] is not unit]
            self._hooked = deque(reduction for reduction in self._hooked if reduction not in dropped)
        for group in unit.groups:
            group.take_partial()
            group.defers(False)
        for parameter in unit.parameters:
            parameter.discard_kept()

    def abandon(self) -> None:
        """Wait for what is in flight, whatever it comes to, and look at no heartbeat of before."""
        self._in_flight.abandon()
        self._replicating.abandon()
        self._beats.clear()
        self._hooked.clear()
        self.merged = False

    def forget(self, units: Container[int]) -> None:
        """Hand out nothing to these units (by number) of what they have sent."""
        self._reduced = [entry for entry in self._reduced if entry[0].number not in units]

    def check_arrived(self, unit: Unit) -> None:
        """Raises StateError if gradients of the unit are not where an optimizer would look for them."""
        for parameter in unit.parameters:
            if parameter.kept is not None and parameter.sharded.grad is None:
                raise StateError(
                    f"optimizer.step() was called while the gradient of '{parameter.name}' in unit '{unit.name}' is only kept "
                    "on each rank: run the last backward of the step outside of accumulate(), or after "
                    "set_requires_gradient_sync(True)"
                )
        if any(group.deferring for group in unit.groups):
            raise StateError(
                f"optimizer.step() was called while gradients of unit '{unit.name}' are reduced over shards, but not over "
                "replicas: call set_requires_all_reduce(True) before the last backward of the step"
            )
        if any(held is unit and not reduction.landed for held, reduction in self._reduced):
            raise StateError(
                f"optimizer.step() was called before the gradients of unit '{unit.name}' arrived: "
                "call set_is_last_backward(True) before the last backward of the step"
            )

    def _land_early(self, reduction: Reduction) -> None:
        """Its hooks do not wait for the end of the backward."""
        reduction.arrive(on_host=self._communicator.away is None)
        handover = reduction.handover()
        assert handover is not None
        hand_over([handover])

    # --- the end of a backward ---

    def collect(self) -> None:
        """Wait for what is in flight and decide to hand out the gradients of units whose step this backward ends."""
        reduced = [entry for entry in self._reduced if entry[0].options.last_backward]
        if not reduced:
            return
        self._reduced = [entry for entry in self._reduced if not entry[0].options.last_backward]
        if len(self._replicating):  # on the replicas, too, sums begin before the heartbeat on every rank
            self._in_flight.drain()
        beats = self._start_heartbeats(reduced)
        self.drain()
        self._hooked.clear()
        if self._communicator.away is None:  # of ranks that parted none has a gradient
            for beat, ticket in beats:
                ticket.wait()
                self._check_beat(beat)
        else:
            self._beats += beats
            if len(self._beats) > len(beats):
                self.read_beats(keep=len(beats))
        used: dict[int, list[bool]] = {}  # anywhere, where that is known
        for beat, ticket in beats:
            if beat.undecided:
                ticket.block()
                used |= zip(map(id, beat.reductions), beat.answers())
            elif not beat.all_used:
                used |= ((id(reduction), reduction.used) for reduction in beat.reductions)
        handovers: list[Handover] = []
        on_host = self._communicator.away is None
        for _, reduction in reduced:
            reduction.arrive(on_host=on_host)
            handover = reduction.handover(used.get(id(reduction), [True] * len(reduction.used)))
            if handover is not None:
                handovers.append(handover)
        if beats and self._communicator.away is None:
            self._page = beats[0][0].page
        self._decided, self.merged = handovers, False

    @property
    def is_decided(self) -> bool:
        """Whether gradients are to be handed out, whatever comes."""
        return self._decided is not None

    def hand_out(self) -> None:
        """Give the parameters what `collect` decided on. Until that is done no interrupt is raised."""
        decided = self._decided
        if decided is not None:
            try:
                hand_over(decided)
            finally:
                self._decided = None

    def _start_heartbeats(self, reduced: Sequence[tuple[Unit, Reduction]]) -> list[tuple[Heartbeat, Sent]]:
        """One message per set of process groups."""
        communicator = self._communicator
        beats: list[tuple[Heartbeat, Sent]] = []
        axes: dict[Ledger, tuple[int, list[Reduction]]] = {}
        for unit, reduction in reduced:
            checks = unit.options.checks
            if checks.heartbeat:
                ledger = reduction.line.ledger
                if ledger not in axes:
                    axes[ledger] = checks.every, []
                axes[ledger][1].append(reduction)
        for ledger, (every, reductions) in axes.items():
            if not ledger.beats(every):
                continue
            line = self._lines.get(ledger)
            if line is None:
                line = self._lines[ledger] = Line(ledger, _NOBODY, "")
            beat = Heartbeat(ledger, reductions, communicator.away, self._page)
            self._page = None
            over = reductions[0].carriers.replicate is not None
            finish = nothing if over else beat.finish
            ticket = communicator.send(communicator.reduce_lane, line, "heartbeat", beat.start, finish)
            if over:
                lane, start = communicator.replicate_lane, beat.start_over_replicas
                ticket = communicator.send(lane, line, "heartbeat", start, beat.finish, ticket, part=True)
            beats.append((beat, ticket))
        return beats

    def _check_beat(self, beat: Heartbeat) -> None:
        """Raises StateError if the ranks did not run the same."""
        if beat.differs():
            watch = self._communicator.watch
            text = "" if watch is None else watch.confront(beat.ledger)
            beat.ledger.close(text or "the ranks ran different units, or the same ones in different orders, in this step")
            raise StateError(beat.ledger.verdict)

    def read_beats(self, *, keep: int | None = None) -> None:
        """On an accelerator: look at what has arrived, and wait for all but the last `keep`, if that is given."""
        while self._beats and ((keep is not None and len(self._beats) > keep) or self._beats[0][1].done()):
            beat, ticket = self._beats.popleft()
            ticket.block()
            self._check_beat(beat)


__all__ = ["Delivery"]
