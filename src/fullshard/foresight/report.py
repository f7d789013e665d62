"""Report of a step: verdict, peak memory and its parts, time and its parts; as text, and as figures for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fullshard.foresight.facts import StepEstimate
from fullshard.foresight.ledger import Category
from fullshard.wrap.tables import aligned, bytes_text, span


def report(estimate: StepEstimate) -> str:
    """Return the report as text."""
    setting = estimate.setting
    mesh = f"{setting.replicas} x {setting.ranks} ranks" if setting.hybrid else f"{setting.ranks} ranks"
    if setting.tensor_parallel > 1:
        mesh += f" x {setting.tensor_parallel} of tensor parallelism"
    verdict = "does not fit" if estimate.verdict == "no" else estimate.verdict
    lines = [
        f"{verdict}: {_needs(estimate)} of {bytes_text(estimate.gpu.memory)} "
        f"on each {estimate.gpu.name if not estimate.gpu.synchronous else 'process'}, {mesh}"
        + (f" by {estimate.network.name}" if estimate.timeline.links.get("between") else "")
        + (" on the CPU" if estimate.gpu.synchronous else ""),
        *_memory(estimate),
        *_time(estimate),
        *(f"note: {note}" for note in estimate.notes),
    ]
    return "\n".join(lines)


def _needs(estimate: StepEstimate) -> str:
    """Return the needed memory, as "70.1 GiB" or as a range, "70.1 GiB to 79.9 GiB".

    There is a range if the step fits only because the allocator frees its cached blocks, or if the model calls torch.compile.
    """
    least, most = (bytes_text(nbytes) for nbytes in estimate.needs)
    is_range = estimate.traced.trace.compiled or (estimate.verdict == "tight" and estimate.needed > estimate.gpu.memory)
    return f"{least} to {most}" if is_range and least != most else most


def _memory(estimate: StepEstimate) -> list[str]:
    when = place_at(estimate, estimate.simulation.ledger.peak_after)
    beside = (
        f"{bytes_text(estimate.reserved)} reserved by the allocator, {bytes_text(estimate.gpu.context)} for the driver and NCCL"
    )
    if estimate.gpu.synchronous:
        beside = f"{bytes_text(estimate.gpu.context)} for the program itself"
    lines = [f"memory: tensors {bytes_text(estimate.peak)} at most, {when}; {beside}"]
    categories = by_category(estimate.at_peak)
    rows = [(f"  {category}", bytes_text(sum(units.values())), _units(units)) for category, units in categories.items()]
    lines += aligned(rows, right={1})
    largest = [
        f"{name} {bytes_text(nbytes)}" for name, nbytes in list(estimate.outside.items())[:4] if nbytes > estimate.peak / 100
    ]
    if largest:
        lines.append(f"  outside of units, by operator: {', '.join(largest)}")
    if estimate.pinned:
        over = f", more than the available {bytes_text(estimate.gpu.host)}" if estimate.pinned > estimate.gpu.host else ""
        lines.append(f"  pinned host memory: {bytes_text(estimate.pinned)} for each rank{over}")
    return lines


def by_category(sizes: Mapping[tuple[Category, str], int]) -> dict[Category, dict[str, int]]:
    """Group bytes by category and then by unit, the largest first. `sizes`: bytes by (category, unit)."""
    categories: dict[Category, dict[str, int]] = {}
    for (category, unit), nbytes in sorted(sizes.items(), key=lambda item: -item[1]):
        categories.setdefault(category, {})[unit] = nbytes
    return dict(sorted(categories.items(), key=lambda item: -sum(item[1].values())))


def _units(units: Mapping[str, int]) -> str:
    """Return units and their bytes, with units of equal bytes together: `32 x 1.1 GiB layers.0 ... 31, 3.0 GiB lm_head`."""
    equal: dict[int, list[str]] = {}
    for unit, nbytes in units.items():
        equal.setdefault(nbytes, []).append(unit)
    texts = []
    for nbytes, names in sorted(equal.items(), key=lambda item: -item[0] * len(item[1]))[:3]:
        names = sorted(names, key=lambda name: (len(name), name))
        name = names[0] or "outside of units"
        texts.append(
            f"{bytes_text(nbytes)} {name}"
            if len(names) == 1
            else f"{len(names)} x {bytes_text(nbytes)} {span(name, names[-1])}"
        )
    more = len(equal) - 3
    return ", ".join(texts) + (f", and {more} more" if more > 0 else "")


def place_at(estimate: StepEstimate, changes: int) -> str:
    """Return the phase and unit of the step after `changes` changes of the ledger, such as "in backward of layers.3"."""
    place = next((place for place in reversed(estimate.simulation.program.places) if place.changes < changes), None)
    if place is None:
        return "before the first step" if changes <= estimate.simulation.first_change else "as the step begins"
    if place.phase == "optimizer":
        return "in the optimizer's step"
    if place.phase == "loss":
        return "in the loss"
    return f"in {place.phase} of {place.unit}" if place.unit else f"in {place.phase}, outside of units"


def _time(estimate: StepEstimate) -> list[str]:
    timeline, gpu = estimate.timeline, estimate.gpu
    seconds, microbatches = timeline.seconds, estimate.setting.microbatches
    lines = [
        f"step: {estimate.step}{f' of {microbatches} microbatches' if microbatches > 1 else ''}; "
        f"most of it is {estimate.bottleneck}",
        f"  computing {timeline.computing / seconds:.0%}, waiting for collectives {timeline.waiting / seconds:.0%}, "
        f"for the host {timeline.host / seconds:.0%}; {estimate.flops:.3g} flop, {estimate.mfu:.1%} of "
        f"{gpu.peak(estimate.compute_dtype):.3g} flop/s (MFU, recomputation not counted)",
    ]
    if estimate.exposed:
        waits = [f"{name or 'the end'} {value * 1e3:.1f} ms" for name, value in list(estimate.exposed.items())[:3]]
        lines.append(f"  waits by unit: {', '.join(waits)}{' and others' if len(estimate.exposed) > 3 else ''}")
    sent = [f"{bytes_text(nbytes)} {_LINKS[link]}" for link, nbytes in timeline.links.items() if nbytes]
    if sent:
        kinds = Counter(message.kind for message in estimate.messages)
        lines.append(
            f"  each rank sends {', '.join(sent)}: {', '.join(f'{n} {_kind_text(kind, n)}' for kind, n in kinds.items())}"
        )
    speed = f"  {estimate.tokens_per_second:,.0f} {estimate.traced.counted}/s of each {'process' if gpu.synchronous else 'GPU'}"
    return [*lines, speed]


_LINKS = {"inside": "inside its machine", "between": "between machines", "host": "to and from the host"}


def _kind_text(kind: str, count: int) -> str:
    """Return the words for `count` messages of a kind."""
    if kind.startswith("to_"):  # between host and device
        return f"copy {kind.replace('_', ' ')}"
    name = "agreement" if kind == "talk" else kind.replace("_", "-")
    return name if count == 1 else f"{name}s"


def figures(estimate: StepEstimate) -> dict[str, Any]:
    """Return the report as numbers for JSON, in bytes and seconds."""
    at_peak = [{"category": c, "unit": unit, "bytes": nbytes} for (c, unit), nbytes in estimate.at_peak.items()]
    kinds: Counter[tuple[str, int, int]] = Counter((m.kind, m.nbytes, m.ranks) for m in estimate.messages)
    return {
        "verdict": estimate.verdict,
        "memory": {
            "tensors": estimate.peak,
            "reserved": estimate.reserved,
            "needed": estimate.needed,
            "has": estimate.gpu.memory,
            "pinned_host": estimate.pinned,
            "at_peak": at_peak,
            "outside": estimate.outside,
            "when": place_at(estimate, estimate.simulation.ledger.peak_after),
        },
        "step": {
            "seconds": estimate.step.middle,
            "low": estimate.step.low,
            "high": estimate.step.high,
            "computing": estimate.timeline.computing,
            "exposed": estimate.exposed,
            "host": estimate.timeline.host,
            "flops": estimate.flops,
            "mfu": estimate.mfu,
            "tokens_per_second": estimate.tokens_per_second,
        },
        "sent": estimate.timeline.links,
        "messages": [{"kind": k, "bytes": n, "ranks": ranks, "count": count} for (k, n, ranks), count in kinds.items()],
        "gpu": estimate.gpu.name,
        "network": estimate.network.name,
        "ranks": estimate.setting.ranks,
        "replicas": estimate.setting.replicas,
        "tensor_parallel": estimate.setting.tensor_parallel,
        "notes": list(estimate.notes),
    }
