"""Pictures of a step: memory as stacked areas, streams as a timeline; as HTML, as PNG, and as traces for Perfetto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, get_args

from fullshard.foresight.clock import Span
from fullshard.foresight.facts import BUDGET, StepEstimate
from fullshard.foresight.ledger import Category
from fullshard.foresight.recorded import Recorded
from fullshard.foresight.report import place_at, report
from fullshard.policies import ZERO3
from fullshard.wrap.tables import bytes_text

CATEGORIES: tuple[Category, ...] = tuple(category for category in get_args(Category) if category != "pinned host")
COLOURS = dict(
    zip(CATEGORIES, ("#1b4965", "#5fa8d3", "#bee9e8", "#e07a5f", "#81603f", "#6a994e", "#a7c957", "#999999"), strict=True)
)
BACKWARD = "#81567e"
PHASES = {"forward": "#3d405b", "loss": "#c9ada7", "backward": BACKWARD, "optimizer": "#6a994e"}
# Colours of the lanes: the rows of the timeline, one per stream. Waits are drawn in the row of compute.
LANES = {
    "compute": PHASES["forward"], "wait": "#d62828", "tensor": "#9a8c98", "gather": "#5fa8d3", "reduce": "#e07a5f",
    "replicate": "#f2cc8f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """Memory of the device at one time of the step."""

    seconds: float  # seconds from the beginning of the step
    nbytes: dict[Category, int]  # bytes by category
    where: str  # phase and unit of the step, as "in backward of layers.3"

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.nbytes.values())


def levels(estimate: StepEstimate) -> list[Level]:
    """Return the memory over the step: one level at the beginning of each phase of a unit, and one at its peak."""
    changes, timeline = estimate.simulation.ledger.changes, estimate.timeline
    now: Counter[Category] = Counter()
    for change in changes[: estimate.simulation.first_change]:
        now[change.category] += change.nbytes
    del now["pinned host"]  # not on the device
    over_time: list[Level] = []
    moments = [*timeline.moments, (timeline.seconds, len(changes))]
    done = estimate.simulation.first_change  # number of changes that `now` includes
    for (start, _), (end, until) in pairwise(moments):
        where = place_at(estimate, done + 1)
        over_time.append(Level(start, dict(now), where))
        total, peak = sum(now.values()), None
        for change in changes[done:until]:
            if change.category != "pinned host":
                now[change.category] += change.nbytes
                total += change.nbytes
                if peak is None or total > peak[0]:
                    peak = total, dict(now)
        done = max(done, until)
        if peak is not None:  # the time of the peak within the phase is unknown, so it is drawn in the middle
            over_time.append(Level((start + end) / 2, peak[1], where))
    return [*over_time, Level(timeline.seconds, dict(now), "at the end")]


def _key_of_compute(estimate: StepEstimate) -> list[tuple[str, str]]:
    """Return (meaning, colour) of what is drawn in the row of compute; the other rows have one colour each and their names."""
    names = {span.name for span in estimate.timeline.spans if span.lane == "compute"}
    found = [(name, colour) for name, colour in PHASES.items() if name in names]
    if any(span.lane == "wait" for span in estimate.timeline.spans):
        found.append(("waiting for collectives", LANES["wait"]))
    return found


# --- HTML ---

# Pixels: the width of both pictures, the height of the memory picture and of a lane of the timeline, and the margins.
WIDTH, HEIGHT, LANE = 1100, 320, 22
LEFT, RIGHT, TOP = 90, 20, 14

STYLE = """body{font:14px/1.5 system-ui,sans-serif;max-width:1200px;margin:24px auto;padding:0 16px;color:#222;background:#fff}
h1{font-size:20px}h2{font-size:16px;margin-top:28px}pre{background:#f5f5f5;padding:12px;overflow-x:auto;font-size:12.5px}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:#444}
.key span{display:inline-block;margin-right:14px}.key i{display:inline-block;width:11px;height:11px;margin-right:5px}
rect:hover{opacity:.6}"""


def title_of(estimate: StepEstimate) -> str:
    """Return the title of a picture: model, GPUs, network, and settings."""
    arguments, setting = estimate.traced.arguments, estimate.setting
    mesh = f"{setting.replicas} x {setting.ranks}" if setting.hybrid else f"{setting.ranks}"
    parts = [
        type(estimate.traced.model).__name__,
        f"{mesh} {estimate.gpu.name}" + (f" x {setting.tensor_parallel}" if setting.tensor_parallel > 1 else ""),
        estimate.network.name,
        f"{estimate.traced.rows} rows" + (f" x {setting.microbatches}" if setting.microbatches > 1 else ""),
        f"{len(estimate.plan.units)} units",
    ]
    if arguments.recompute != "none":
        parts.append(f"recomputes {arguments.recompute if isinstance(arguments.recompute, str) else 'some'}")
    if setting.reshard_after_forward is not None:
        parts.append(f"reshard_after_forward={setting.reshard_after_forward}")
    if setting.states != ZERO3:
        parts.append(f"states={setting.states}")
    return ", ".join(parts)


def phases_of(estimate: StepEstimate) -> list[tuple[float, str]]:
    """Return (seconds, name) of the beginning of each phase of a step: forward, backward, optimizer."""
    moments = [second for second, _ in estimate.timeline.moments]
    phases: list[tuple[float, str]] = []
    for second, place in zip(moments, estimate.simulation.program.places):
        if place.phase != "loss" and (not phases or phases[-1][1] != place.phase):
            phases.append((second, place.phase))
    return phases


def html_page(estimates: Sequence[StepEstimate]) -> str:
    """Return one HTML document with the reports and the pictures of all estimates, at the same scales."""
    highest = max(max(level.total for level in levels(estimate)) for estimate in estimates)
    # A limit far above the highest level would flatten the picture, so it is left out.
    near = [nbytes for estimate in estimates for nbytes, _, _ in memory_limits(estimate) if nbytes <= 3 * highest]
    scale_bytes = max(1, highest, *(int(1.04 * nbytes) for nbytes in near))
    seconds = max(estimate.timeline.seconds for estimate in estimates) or 1.0
    parts = [
        _section(estimate, scale_bytes, seconds, number if len(estimates) > 1 else 0)
        for number, estimate in enumerate(estimates, 1)
    ]
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title_of(estimates[0]))}</title>"
        f"<link rel='icon' href='data:,'><style>{STYLE}</style></head><body><h1>{escape(title_of(estimates[0]))}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _section(estimate: StepEstimate, scale_bytes: int, seconds: float, number: int) -> str:
    """Return report and pictures of one estimate, at a scale up to `scale_bytes` and `seconds`; no heading if `number` is 0."""
    heading = f"<h2>{number}: {escape(title_of(estimate))}</h2>" if number else ""
    keys = "".join(f"<span><i style='background:{COLOURS[c]}'></i>{c}</span>" for c in CATEGORIES)
    lanes = "".join(f"<span><i style='background:{colour}'></i>{kind}</span>" for kind, colour in _key_of_compute(estimate))
    return (
        f"{heading}<pre>{escape(report(estimate))}</pre>\n"
        f"<h2>Memory over the step</h2><p class='key'>{keys}</p>{_areas(estimate, scale_bytes, seconds)}\n"
        f"<h2>Streams</h2><p class='key'>{lanes}</p>{_lanes(estimate, seconds)}"
    )


def _areas(estimate: StepEstimate, scale_bytes: int, seconds: float) -> str:
    """Return the picture of the memory: one step-shaped area per category, stacked, and lines for limits and phases."""
    over_time = levels(estimate)
    starts = [LEFT + level.seconds / seconds * (WIDTH - LEFT - RIGHT) for level in over_time]
    ends = [*starts[1:], WIDTH - RIGHT if estimate.timeline.seconds >= seconds else starts[-1]]

    def y(nbytes: float) -> float:
        return TOP + HEIGHT * (1 - nbytes / scale_bytes)

    shapes: list[str] = []
    below = [0] * len(over_time)
    for category in CATEGORIES:
        above = [base + level.nbytes.get(category, 0) for base, level in zip(below, over_time)]
        if above != below:
            points = [f"{at:.1f},{y(v):.1f}" for start, end, v in zip(starts, ends, above) for at in (start, end)]
            back = [(at, v) for start, end, v in zip(starts, ends, below) for at in (start, end)]
            points += [f"{at:.1f},{y(v):.1f}" for at, v in reversed(back)]
            shapes.append(f"<polygon points='{' '.join(points)}' fill='{COLOURS[category]}'/>")
        below = above
    for at, end, level in zip(starts, ends, over_time):  # invisible rectangles with tooltips
        rows = "\n".join(f"{c}: {bytes_text(n)}" for c, n in level.nbytes.items() if n)
        title = f"{level.seconds * 1e3:.1f} ms, {level.where}: {bytes_text(level.total)}\n{rows}"
        shapes.append(
            f"<rect x='{at:.1f}' y='{TOP}' width='{max(end - at, 0.3):.1f}' height='{HEIGHT}' fill='#fff' fill-opacity='0'>"
            f"<title>{escape(title)}</title></rect>"
        )
    for nbytes, label, colour in memory_limits(estimate):
        if nbytes <= scale_bytes:
            high, right = y(nbytes), WIDTH - RIGHT
            shapes += [
                f"<line x1='{LEFT}' x2='{right}' y1='{high:.1f}' y2='{high:.1f}' stroke='{colour}' stroke-dasharray='5 4'/>",
                f"<text x='{right}' y='{high - 4:.1f}' text-anchor='end'>{escape(label)}: {bytes_text(nbytes)}</text>",
            ]
    for second, name in phases_of(estimate):
        at = LEFT + second / seconds * (WIDTH - LEFT - RIGHT)
        aside, anchor = (3, "start") if second < 0.9 * seconds else (-3, "end")
        shapes += [
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{TOP}' y2='{TOP + HEIGHT}' stroke='#444' stroke-width='.6'/>",
            f"<text x='{at + aside:.1f}' text-anchor='{anchor}' y='{TOP + 9}'>{name}</text>",
        ]
    for part in range(5):
        value = scale_bytes * part / 4
        shapes.append(f"<text x='{LEFT - 6}' y='{y(value) + 4:.1f}' text-anchor='end'>{bytes_text(value)}</text>")
    return _svg(HEIGHT + TOP + 24, shapes + _time_axis(seconds, HEIGHT + TOP))


def memory_limits(estimate: StepEstimate) -> list[tuple[float, str, str]]:
    """Return (bytes, label, colour) of the horizontal lines in a picture, without the memory of the driver and NCCL."""
    found = [
        (estimate.gpu.memory - estimate.gpu.context, estimate.gpu.name, "#d62828"),
        (BUDGET * estimate.gpu.memory - estimate.gpu.context, f"{BUDGET:.0%} of it", "#e09f3e"),
    ]
    return found if estimate.gpu.synchronous else [*found, (estimate.reserved, "reserved by the allocator", "#335c67")]


def _lanes(estimate: StepEstimate, seconds: float) -> str:
    spans = estimate.timeline.spans
    used = [lane for lane in LANES if lane != "wait" and any(span.lane == lane for span in spans)]
    shapes = [f"<text x='{LEFT - 6}' y='{TOP + LANE * i + 15}' text-anchor='end'>{lane}</text>" for i, lane in enumerate(used)]
    for span in spans:
        row = used.index("compute" if span.lane == "wait" else span.lane)
        at = LEFT + span.start / seconds * (WIDTH - LEFT - RIGHT)
        width = max(0.4, (span.end - span.start) / seconds * (WIDTH - LEFT - RIGHT))
        lasts = f"{(span.end - span.start) * 1e3:.2f} ms from {span.start * 1e3:.1f} ms"
        title = f"{span.unit or 'outside of units'}: {span.name}, {lasts}"
        colour = PHASES.get(span.name, LANES[span.lane]) if span.lane == "compute" else LANES[span.lane]
        shapes.append(
            f"<rect x='{at:.1f}' y='{TOP + LANE * row}' width='{width:.2f}' height='{LANE - 4}' fill='{colour}'>"
            f"<title>{escape(title)}</title></rect>"
        )
    bottom = TOP + LANE * len(used)
    return _svg(bottom + 24, shapes + _time_axis(seconds, bottom))


def _time_axis(seconds: float, bottom: int) -> list[str]:
    found = []
    for part in range(6):
        at = LEFT + part / 5 * (WIDTH - LEFT - RIGHT)
        anchor = "end" if part == 5 else "middle"
        found.append(f"<text x='{at:.0f}' y='{bottom + 16}' text-anchor='{anchor}'>{seconds * part / 5 * 1e3:,.0f} ms</text>")
    return found


def _svg(height: int, shapes: Sequence[str]) -> str:
    return f"<svg viewBox='0 0 {WIDTH} {height}' role='img'>{''.join(shapes)}</svg>"


# --- PNG and Perfetto ---


def figure_of(estimate: StepEstimate) -> Any:
    """Return the pictures of `html_page` as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("png() needs matplotlib. Run pip install 'fullshard[plot]', or use html().") from None
    found = levels(estimate)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    times = [level.seconds * 1e3 for level in found]
    drawn = [category for category in CATEGORIES if any(level.nbytes.get(category) for level in found)]
    above.stackplot(
        times,
        [[level.nbytes.get(category, 0) / 2**30 for level in found] for category in drawn],
        labels=drawn,
        colors=[COLOURS[category] for category in drawn],
        step="post",
    )
    highest = max(level.total for level in found)
    for nbytes, label, colour in memory_limits(estimate):
        if nbytes <= max(1.5 * highest, highest + 2**30):
            above.axhline(nbytes / 2**30, color=colour, linestyle="--", linewidth=1, label=label)
    for second, name in phases_of(estimate):
        above.axvline(second * 1e3, color="#444", linewidth=0.5)
        side = "left" if second < 0.9 * estimate.timeline.seconds else "right"
        above.annotate(f" {name} ", (second * 1e3, 1), xycoords=("data", "axes fraction"), va="top", ha=side, fontsize=7)
    above.set_ylabel("GiB")
    above.set_title(f"{title_of(estimate)}\n{report(estimate).splitlines()[0]}", fontsize=9)
    above.legend(loc="upper left", bbox_to_anchor=(1.005, 1), fontsize=8)
    above.set_xlim(0, estimate.timeline.seconds * 1e3)
    used = [lane for lane in LANES if lane != "wait" and any(span.lane == lane for span in estimate.timeline.spans)]
    for lane, colour in LANES.items():
        spans = [span for span in estimate.timeline.spans if span.lane == lane]
        if spans:
            bars = [(span.start * 1e3, (span.end - span.start) * 1e3) for span in spans]
            colours = [PHASES.get(span.name, colour) if lane == "compute" else colour for span in spans]
            below.broken_barh(bars, (used.index("compute" if lane == "wait" else lane) - 0.4, 0.8), color=colours)
    for name, colour in _key_of_compute(estimate):
        below.bar(0, 0, color=colour, label=name)
    below.legend(loc="upper left", bbox_to_anchor=(1.005, 1), fontsize=8, title="compute", title_fontsize=8)
    below.set_yticks(range(len(used)), used)
    below.invert_yaxis()
    below.set_xlabel("ms")
    return figure


def chrome_trace(estimate: StepEstimate, run: Recorded | None) -> dict[str, Any]:
    """Return spans and memory in Chrome's trace format; the prediction is process 1, the recorded run process 2."""
    events = _process(1, "predicted", estimate.timeline.spans)
    for level in levels(estimate):
        args = {category: level.nbytes.get(category, 0) for category in CATEGORIES}
        events.append({"ph": "C", "pid": 1, "name": "memory", "ts": level.seconds * 1e6, "args": args})
    events += [] if run is None else _process(2, "recorded", run.spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(number: int, name: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the events of a process, whose threads are the lanes."""
    lanes = list(LANES)
    names = [("process_name", 0, name), *(("thread_name", thread, lane) for thread, lane in enumerate(lanes))]
    return [
        *({"ph": "M", "pid": number, "tid": thread, "name": what, "args": {"name": text}} for what, thread, text in names),
        *(
            {
                "ph": "X",
                "pid": number,
                "tid": lanes.index(span.lane),
                "name": span.unit or "outside of units",
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"what": span.name},
            }
            for span in spans
        ),
    ]
