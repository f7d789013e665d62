"""The report of a step: a verdict, where memory is most, and where time goes; as text, and as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fullshard.foresight.facts import Facts
from fullshard.foresight.ledger import Category
from fullshard.wrap.tables import aligned, bytes_text, span


def report(r: Facts) -> str:
    """The report."""
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


def _needs(r: Facts) -> str:
    """As "70.1 GiB"; as "70.1 to 79.9 GiB" where it fits by giving back what the allocator keeps, or may be compiled."""
    least, most = (bytes_text(nbytes) for nbytes in r.needs)
    ranges = r.traced.trace.compiled or (r.verdict == "tight" and r.needed > r.gpu.memory)
    return f"{least} to {most}" if ranges and least != most else most


def _memory(r: Facts) -> list[str]:
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
        over = f", of {bytes_text(r.gpu.host)} that there are" if r.pinned > r.gpu.host else ""
        lines.append(f"  in the host's memory, pinned: {bytes_text(r.pinned)} for each rank{over}")
    return lines


def by_category(found: Mapping[tuple[Category, str], int]) -> dict[Category, dict[str, int]]:
    """Bytes of units by category, largest first."""
    categories: dict[Category, dict[str, int]] = {}
    for (category, unit), nbytes in sorted(found.items(), key=lambda item: -item[1]):
        categories.setdefault(category, {})[unit] = nbytes
    return dict(sorted(categories.items(), key=lambda item: -sum(item[1].values())))


def _units(units: Mapping[str, int]) -> str:
    """`layers.0 ... 31  32 x 1.1 GiB, (model) 3 GiB`: units of the same bytes as one."""
    alike: dict[int, list[str]] = {}
    for unit, nbytes in units.items():
        alike.setdefault(nbytes, []).append(unit)
    told = []
    for nbytes, names in sorted(alike.items(), key=lambda item: -item[0] * len(item[1]))[:3]:
        names = sorted(names, key=lambda name: (len(name), name))
        name = names[0] or "outside of units"
        told.append(
            f"{bytes_text(nbytes)} {name}"
            if len(names) == 1
            else f"{len(names)} x {bytes_text(nbytes)} {span(name, names[-1])}"
        )
    more = len(alike) - 3
    return ", ".join(told) + (f", and {more} more" if more > 0 else "")


def place_at(r: Facts, changes: int) -> str:
    """Where a step is after so many changes of the ledger: "in backward of layers.3"."""
    place = next((place for place in reversed(r.simulation.program.places) if place.changes < changes), None)
    if place is None:
        return "before the first step" if changes <= r.simulation.begins else "as the step begins"
    if place.phase == "optimizer":
        return "in the optimizer's step"
    if place.phase == "loss":
        return "in the loss"
    return f"in {place.phase} of {place.unit}" if place.unit else f"in {place.phase}, outside of units"


def _time(r: Facts) -> list[str]:
    timeline, gpu = r.timeline, r.gpu
    seconds, many = timeline.seconds, r.setting.microbatches
    lines = [
        f"step: {r.step}{f' of {many} microbatches' if many > 1 else ''}; most of it is {r.bottleneck}",
        f"  computing {timeline.computing / seconds:.0%}, waiting for messages {timeline.waiting / seconds:.0%}, "
        f"for the host {timeline.host / seconds:.0%}; {r.flops:.3g} flop, {r.mfu:.1%} of "
        f"{gpu.peak(r.compute_dtype):.3g} flop/s (MFU, recomputation not counted)",
    ]
    if r.exposed:
        told = [f"{name or 'the end'} {value * 1e3:.1f} ms" for name, value in list(r.exposed.items())[:3]]
        lines.append(f"  waited for: {', '.join(told)}{' and others' if len(r.exposed) > 3 else ''}")
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
    words = {"all_gather": "gather", "reduce_scatter": "reduction", "all_reduce": "sum", "heartbeat": "heartbeat"}
    word = words.get(kind, f"copy {kind.replace('_', ' ')}")
    return word if count == 1 or word not in words.values() else f"{word}s"


def figures(r: Facts) -> dict[str, Any]:
    """The same as numbers, for JSON: bytes and seconds."""
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
