"""Comparison of a recorded run with its prediction: the differences, the largest first, with the cause where it is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from fullshard.foresight.clock import message_seconds
from fullshard.foresight.facts import StepEstimate
from fullshard.foresight.program import Launch
from fullshard.foresight.recorded import Recorded
from fullshard.wrap.tables import bytes_text, span

MIN_WEIGHT = 0.05
"""Differences of a smaller weight are left out."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a run and its prediction.

    Args:
        what: "messages", "memory", "computing", "waiting", "network" or "ranks".
        text: description of the difference, and its cause if it is known.
        weight: size of the difference as a fraction of the predicted step, memory or number of collectives (at least 0.05, so
            that each is listed). For "network" it is the part of the step that waits, for "ranks" that of the steps.

    Example:
        >>> print(Difference("computing", "150.0 ms, predicted 100.0 ms: 1.50 times the prediction", 0.3))
        computing: 150.0 ms, predicted 100.0 ms: 1.50 times the prediction
    """

    what: str
    text: str
    weight: float

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a run and its prediction, the largest first. Prints as a report.

    Args:
        measured: measured seconds of a step.
        predicted: predicted seconds of a step.
        differences: those of a weight of at least 0.05.

    Example:
        >>> print(Comparison(1.1, 1.0, ()))
        step: 1100.0 ms, predicted 1000.0 ms (1.10 times the prediction)
        nothing else differs by 5% or more
    """

    measured: float
    predicted: float
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        ratio = self.measured / self.predicted
        times = f"{self.measured * 1e3:.1f} ms, predicted {self.predicted * 1e3:.1f} ms"
        head = f"step: {times} ({ratio:.2f} times the prediction)"
        return "\n".join([head, *(str(line) for line in self.differences or ["nothing else differs by 5% or more"])])


def compare(estimate: StepEstimate, run: Recorded) -> Comparison:
    """Compare a run with its prediction."""
    differences = [
        *_messages(estimate, run),
        *_memory(estimate, run),
        *_time(estimate, run),
        *_network(estimate, run),
        *(
            Difference("ranks", f"the others wait for rank {rank} in {fraction:.0%} of the steps", fraction)
            for rank, fraction in run.late().items()
            if fraction > 0.5
        ),
    ]
    differences = sorted((one for one in differences if one.weight >= MIN_WEIGHT), key=lambda one: -one.weight)
    return Comparison(run.step, estimate.step.middle, tuple(differences))


def _messages(estimate: StepEstimate, run: Recorded) -> Iterator[Difference]:
    # Collectives are predicted exactly, so any difference means another model, plan or setting, and is listed: its weight is at
    # least MIN_WEIGHT.
    both = run.messages, estimate.messages
    measured, predicted = (Counter((one.kind, one.nbytes, one.ranks) for one in messages) for messages in both)
    for (kind, nbytes, ranks), count in ((measured - predicted) + (predicted - measured)).items():
        more = "more" if measured[kind, nbytes, ranks] > predicted[kind, nbytes, ranks] else "fewer"
        yield Difference(
            "messages",
            f"{count} {more} of kind {kind} of {bytes_text(nbytes)} over {ranks} ranks: another model, plan or setting ran",
            max(MIN_WEIGHT, count / max(1, len(estimate.messages))),
        )


def _memory(estimate: StepEstimate, run: Recorded) -> Iterator[Difference]:
    if run.peak is None or run.reserved is None:
        return
    for what, measured, predicted in (
        ("tensors", run.peak, estimate.peak),
        ("memory reserved by the allocator", run.reserved, estimate.reserved),
    ):
        yield Difference(
            "memory",
            f"{what} {bytes_text(measured)}, predicted {bytes_text(predicted)}{_activation_cause(estimate, run)}",
            abs(measured - predicted) / predicted,
        )


def _activation_cause(estimate: StepEstimate, run: Recorded) -> str:
    """Name the units whose forward keeps more or less memory than was traced, if that makes 5 % of the peak or more."""
    # Memory at the first forward of each unit: reversed, because the last entry of a dict wins.
    forwards = [place for place in estimate.simulation.program.places if place.phase == "forward" and place.unit]
    at = {place.unit: estimate.simulation.ledger.at(place.changes) for place in reversed(forwards)}
    predicted = {unit: sum(n for (kind, _), n in sizes.items() if kind != "pinned host") for unit, sizes in at.items()}
    names = [name for name in run.levels if name in predicted]
    surplus = {
        name: (run.levels[after] - run.levels[name]) - (predicted[after] - predicted[name]) for name, after in pairwise(names)
    }
    total = sum(surplus.values())
    if not surplus or abs(total) < MIN_WEIGHT * estimate.peak:
        return ""
    # Units with more than half of the average surplus, in the same direction.
    units = [name for name, nbytes in surplus.items() if nbytes / total > 0.5 / len(surplus)]
    where = units[0] if len(units) == 1 else span(units[0], units[-1])
    more = "more" if total > 0 else "less"
    return f"; the forward of {where} keeps {bytes_text(abs(total))} {more} than was traced: its operators save other tensors"


def _time(estimate: StepEstimate, run: Recorded) -> Iterator[Difference]:
    waiting = run.waiting
    computing = run.step - sum(waiting.values())
    # The timeline is of eager mode; with torch.compile, the step is shorter by this ratio.
    predicted = estimate.step.middle - estimate.timeline.waiting * estimate.step.middle / estimate.timeline.seconds
    times = f": {computing / predicted:.2f} times the prediction" if predicted > 0 else ""
    yield Difference(
        "computing",
        f"{computing * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms{times}",
        abs(computing - predicted) / estimate.step.middle,
    )
    for unit in dict.fromkeys([*waiting, *estimate.exposed]):
        measured_wait, predicted_wait = waiting.get(unit, 0.0), estimate.exposed.get(unit, 0.0)
        yield Difference(
            "waiting",
            f"for {unit or 'work of no unit'} {measured_wait * 1e3:.1f} ms, predicted {predicted_wait * 1e3:.1f} ms",
            abs(measured_wait - predicted_wait) / estimate.step.middle,
        )


def _network(estimate: StepEstimate, run: Recorded) -> Iterator[Difference]:
    if estimate.gpu.synchronous:
        return  # on the CPU, collectives wait for the cores that compute, so their times say nothing about a network
    launches = [one for one in estimate.simulation.program.instructions if isinstance(one, Launch)]
    sent = [(message, launch.stream) for launch in launches for message in launch.messages if message.ranks > 1]
    for kind, speed in run.speeds().items():
        of_kind = [one for one in sent if one[0].kind == kind]
        if not of_kind:
            continue
        largest, stream = max(of_kind, key=lambda one: one[0].nbytes)
        assumed = largest.nbytes / message_seconds(largest, stream, estimate.gpu, estimate.network, estimate.setting.mesh)
        if not 1 - MIN_WEIGHT < speed / assumed < 1 + MIN_WEIGHT:
            yield Difference(
                "network",
                f"collectives of kind {kind} run at {speed / 1e9:.2f} GB/s, {speed / assumed:.2f} of the assumed speed",
                sum(run.waiting.values()) / run.step,
            )
