"""Report of a step: verdict, peak memory and its parts, time and its parts; as text, and as figures for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fullshard.foresight.facts import StepEstimate
from fullshard.foresight.ledger import Category
from fullshard.wrap.tables import aligned, bytes_text, span


def report(r: StepEstimate) -> str:
    """Return the report as text."""
    setting = r.setting
    mesh = f"{setting.replicas} x {setting.ranks} ranks" if setting.hybrid else f"{setting.ranks} ranks"
    if setting.tensor_parallel > 1:
        mesh += f" x {setting.tensor_parallel} of tensor parallelism"
    words = {"fits": "fits", "tight": "tight", "no": "does not fit"}
    lines = [
        f"{words[r.verdict]}: {_needs(r)} of {bytes_text(r.gpu.memory)} on each {r.gpu.name}, {mesh}"
        + (f" by {r.network.name}" if r.timeline.links.get("between") else ""),
        *_memory(r),
        *_time(r),
        *(f"note: {note}" for note in r.notes),
    ]
    return "\n".join(lines)


def _needs(r: StepEstimate) -> str:
    """Return the needed memory, as "70.1 GiB" or as a range, "70.1 GiB to 79.9 GiB".

    There is a range if the step fits only because the allocator frees its cached blocks, or if the model calls torch.compile.
    """
    least, most = (bytes_text(nbytes) for nbytes in r.needs)
    ranges = r.traced.trace.compiled or (r.verdict == "tight" and r.needed > r.gpu.memory)
    return f"{least} to {most}" if ranges and least != most else most


def _memory(r: StepEstimate) -> list[str]:
    when = place_at(r, r.simulation.ledger.peak_after)
    beside = f"{bytes_text(r.reserved)} reserved by the allocator, {bytes_text(r.gpu.context)} for the driver and NCCL"
    if r.gpu.synchronous:
        beside = f"{bytes_text(r.gpu.context)} for the program itself"
    lines = [f"memory: tensors {bytes_text(r.peak)} at most, {when}; {beside}"]
    found = by_category(r.at_peak)
    rows = [(f"  {category}", bytes_text(sum(units.values())), _units(units)) for category, units in found.items()]
    lines += aligned(rows, right={1})
    most = [f"{name} {bytes_text(nbytes)}" for name, nbytes in list(r.outside.items())[:4] if nbytes > r.peak / 100]
    if most:
        lines.append(f"  outside of units, by operator: {', '.join(most)}")
    if r.pinned:
        over = f", more than the available {bytes_text(r.gpu.host)}" if r.pinned > r.gpu.host else ""
        lines.append(f"  pinned host memory: {bytes_text(r.pinned)} for each rank{over}")
    return lines


def by_category(found: Mapping[tuple[Category, str], int]) -> dict[Category, dict[str, int]]:
    """Group bytes by category and then by unit, the largest first."""
    categories: dict[Category, dict[str, int]] = {}
    for (category, unit), nbytes in sorted(found.items(), key=lambda item: -item[1]):
        categories.setdefault(category, {})[unit] = nbytes
    return dict(sorted(categories.items(), key=lambda item: -sum(item[1].values())))


def _units(units: Mapping[str, int]) -> str:
    """Return units and their bytes, units of equal bytes as one: `32 x 1.1 GiB layers.0 ... 31, 3.0 GiB (model)`."""
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


def place_at(r: StepEstimate, changes: int) -> str:
    """Return the phase and the unit of the step after this many changes of the ledger, as "in backward of layers.3"."""
    place = next((place for place in reversed(r.simulation.program.places) if place.changes < changes), None)
    if place is None:
        return "before the first step" if changes <= r.simulation.begins else "as the step begins"
    if place.phase == "optimizer":
        return "in the optimizer's step"
    if place.phase == "loss":
        return "in the loss"
    return f"in {place.phase} of {place.unit}" if place.unit else f"in {place.phase}, outside of units"


def _time(r: StepEstimate) -> list[str]:
    timeline, gpu = r.timeline, r.gpu
    seconds, many = timeline.seconds, r.setting.microbatches
    lines = [
        f"step: {r.step}{f' of {many} microbatches' if many > 1 else ''}; most of it is {r.bottleneck}",
        f"  computing {timeline.computing / seconds:.0%}, waiting for collectives {timeline.waiting / seconds:.0%}, "
        f"for the host {timeline.host / seconds:.0%}; {r.flops:.3g} flop, {r.mfu:.1%} of "
        f"{gpu.peak(r.compute_dtype):.3g} flop/s (MFU, recomputation not counted)",
    ]
    if r.exposed:
        waits = [f"{name or 'the end'} {value * 1e3:.1f} ms" for name, value in list(r.exposed.items())[:3]]
        lines.append(f"  waits by unit: {', '.join(waits)}{' and others' if len(r.exposed) > 3 else ''}")
    sent = [f"{bytes_text(nbytes)} {_LINKS[link]}" for link, nbytes in timeline.links.items() if nbytes]
    if sent:
        kinds = Counter(message.kind for message in r.messages)
        lines.append(
            f"  each rank sends {', '.join(sent)}: {', '.join(f'{n} {_plural(kind, n)}' for kind, n in kinds.items())}"
        )
    speed = f"  {r.tokens_per_second:,.0f} {r.traced.counted}/s of each GPU"
    if r.price is not None:
        cost = r.price / 3600 / r.tokens_per_second * 1e6
        speed += f"; a million {r.traced.counted} cost {cost:.3g} at {r.price:g} for an hour of a GPU"
    return [*lines, speed]


_LINKS = {"inside": "inside its machine", "between": "between machines", "host": "to and from the host"}


def _plural(kind: str, count: int) -> str:
    words = {
        "all_gather": "all-gather",
        "reduce_scatter": "reduce-scatter",
        "all_reduce": "all-reduce",
        "heartbeat": "heartbeat",
    }
    # Kinds that are no collective are copies between host and device.
    word = words.get(kind, f"copy {kind.replace('_', ' ')}")
    return word if count == 1 or word not in words.values() else f"{word}s"


def figures(r: StepEstimate) -> dict[str, Any]:
    """Return the report as numbers for JSON, in bytes and seconds."""
    at_peak = [{"category": c, "unit": unit, "bytes": nbytes} for (c, unit), nbytes in r.at_peak.items()]
    kinds: Counter[tuple[str, int, int]] = Counter((m.kind, m.nbytes, m.ranks) for m in r.messages)
    return {
        "verdict": r.verdict,
        "memory": {
            "tensors": r.peak,
            "reserved": r.reserved,
            "needed": r.needed,
            "has": r.gpu.memory,
            "pinned_host": r.pinned,
            "at_peak": at_peak,
            "outside": r.outside,
            "when": place_at(r, r.simulation.ledger.peak_after),
        },
        "step": {
            "seconds": r.step.middle,
            "low": r.step.low,
            "high": r.step.high,
            "computing": r.timeline.computing,
            "exposed": r.exposed,
            "host": r.timeline.host,
            "flops": r.flops,
            "mfu": r.mfu,
            "tokens_per_second": r.tokens_per_second,
        },
        "sent": r.timeline.links,
        "messages": [{"kind": k, "bytes": n, "ranks": ranks, "count": count} for (k, n, ranks), count in kinds.items()],
        "gpu": r.gpu.name,
        "network": r.network.name,
        "ranks": r.setting.ranks,
        "replicas": r.setting.replicas,
        "tensor_parallel": r.setting.tensor_parallel,
        "notes": list(r.notes),
    }


__all__ = ["by_category", "figures", "place_at", "report"]
