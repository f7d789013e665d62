"""Draws the pictures of the documentation from the planner, the layout and the tables of moves, so that they cannot go stale.

    python docs/pictures/draw.py        # or: make pictures

What is drawn is computed without matplotlib (`schedule`, `parameter`, `step`) and lies in each picture as its
description, by which `scripts/pages.py` finds a picture that is not of today's code.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fullshard
from fullshard.core.layout import DirectRule, plan_layout
from fullshard.core.scheduler import Action, Move, Residency, Scheduler
from fullshard.core.unit_options import KeepAfterForward, UnitOptions
from fullshard.foresight.picture import figure_of
from fullshard.policies import PRESETS, ZERO3, CheckPolicy, CommPolicy, MixedPrecisionPolicy, StateSharding

HERE = Path(__file__).parent
TRANSITIONS = {  # of a unit's parameters, as tests/unit/test_scheduler.py checks them
    (Residency.SHARDED, Residency.GATHERING): "all-gather started",
    (Residency.GATHERING, Residency.FULL): "all-gather waited on",
    (Residency.GATHERING, Residency.SHARDED): "prefetched, never used",
    (Residency.FULL, Residency.SHARDED): "compute is done",
}
UNITS = ["root", "block 1", "block 2"]
COLORS = ["#7a8ba3", "#2f7dc1", "#e08a2c"]
INK, PALE, PAPER = "#22303c", "#d8dee6", "#ffffff"

Drawn = dict[str, Any]  # what JSON can hold


# --- what is drawn --------------------------------------------------------------------------------------------------------


def _options(keep: KeepAfterForward, states: StateSharding = ZERO3) -> UnitOptions:
    mp, comm, checks = MixedPrecisionPolicy(), CommPolicy(), CheckPolicy()
    return UnitOptions(keep_after_forward=keep, states=states, mp=mp, comm=comm, checks=checks)


LANES = {"compute": 2, "gather": 1, "reduce": 0, "replicas": -1}


class _Clock:
    """Lanes on which everything takes one unit of time, a backward two."""

    def __init__(self) -> None:
        self.now = 0.0  # of the compute lane
        self.bars: list[list[Any]] = []  # lane, unit, start, length, text
        self.held: list[list[float]] = []  # unit, since, until
        self.grads: list[list[float]] = []  # the same, of unsharded gradients
        self.reduces = True
        self.two_hops = False  # all-gathers and reductions run over replicas as well: once per step and unit
        self.last = True  # the last microbatch of the step
        self._gathered: set[int] = set()  # over replicas, in this step
        self._free = dict.fromkeys(LANES, 0.0)
        self._ready: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._grads: dict[int, float] = {}

    def compute(self, unit: int, text: str, length: float) -> None:
        """The unit computes."""
        self.bars.append(["compute", unit, self.now, length, text])
        self.now += length

    def run(self, actions: list[Action]) -> None:
        """Execute actions of the planner."""
        for move, unit in actions:
            if move is Move.UNSHARD:
                self._since[unit] = self.now
                first = self.two_hops and unit not in self._gathered
                before = self._send("replicas", unit, "gather") if first else 0.0
                self._gathered.add(unit)
                self._ready[unit] = self._send("gather", unit, "gather", after=before)
            elif move is Move.WAIT:
                self.now = max(self.now, self._ready[unit])
            elif move is Move.RESHARD:
                self.held.append([unit, self._since.pop(unit), self.now])
            elif move is Move.REDUCE:
                self._grads.setdefault(unit, self.now)
                if self.reduces:
                    self.grads.append([unit, self._grads.pop(unit), self._send("reduce", unit, "reduce")])
                    if self.two_hops and self.last:
                        self._send("replicas", unit, "reduce", after=self._free["reduce"])

    def keep(self, units: Sequence[int]) -> None:
        """Begin the next step with these units unsharded, and end the current one."""
        self.held += [[unit, since, self.now] for unit, since in self._since.items()]
        self.now, self.bars, self.held, self.grads = 0.0, [], [], []
        self._since, self._free = dict.fromkeys(units, 0.0), dict.fromkeys(LANES, 0.0)
        self._gathered = set()

    def close(self) -> None:
        """End the last step: parameters that are still unsharded are held until now."""
        self.held += [[unit, since, self.now] for unit, since in self._since.items()]

    def _send(self, lane: str, unit: int, text: str, after: float = 0.0) -> float:
        start = max(self.now, self._free[lane], after)
        self.bars.append([lane, unit, start, 1.0, text])
        self._free[lane] = start + 1.0
        return self._free[lane]


def _run_microbatch(scheduler: Scheduler, clock: _Clock) -> None:
    """Forward and backward of a root with two blocks."""
    calls = []
    clock.run(scheduler.before_forward(0))
    clock.compute(0, "forward", 1)
    for unit in (1, 2):
        clock.run(scheduler.before_forward(unit))
        clock.compute(unit, "forward", 1)
        ended = scheduler.after_forward(unit, grad=True)
        scheduler.expect_backward(ended.call)
        calls.append(ended.call)
        clock.run(ended.actions)
    ended = scheduler.after_forward(0, grad=True)
    scheduler.expect_backward(ended.call)
    clock.run(ended.actions)
    for call in (ended.call, *reversed(calls)):
        scheduler.graph_released(call)
        clock.run(scheduler.before_backward(call))
        clock.compute(call.unit, "backward", 1 if call.unit == 0 else 2)
    clock.run(scheduler.after_backward())


def schedule() -> Drawn:
    """The third step of a root with two blocks: the orders of the units are known by then."""
    scheduler = Scheduler()
    for unit in range(3):
        scheduler.register(unit, _options(KeepAfterForward.NEVER if unit else KeepAfterForward.OUTERMOST))
    for _ in range(3):
        clock = _Clock()
        _run_microbatch(scheduler, clock)
    return {"units": UNITS, "bars": clock.bars, "held": sorted(clock.held)}


def levels() -> Drawn:
    """The third step under each level of ZeRO, from the optimizer's step before it to its own, with two microbatches."""
    found: Drawn = {"units": UNITS}
    for name, states in PRESETS.items():
        scheduler, clock = Scheduler(), _Clock()
        clock.two_hops = states.shards_over_replicas
        records = [scheduler.register(unit, _options(KeepAfterForward.OUTERMOST, states=states)) for unit in range(3)]
        for _ in range(3):
            clock.keep([record.number for record in records if record.residency is Residency.FULL])
            clock.run(scheduler.drop_stale(range(3)))
            for microbatch in range(2):
                clock.last = microbatch == 1
                clock.reduces = clock.last or not states.keeps_gradients
                _run_microbatch(scheduler, clock)
            clock.now = max(clock.now, *(start + length for _, _, start, length, _ in clock.bars))
            clock.compute(-1, "optimizer", 1.0)
        clock.close()
        found[name] = {"bars": clock.bars, "held": sorted(clock.held), "grads": sorted(clock.grads)}
    return found


def parameter() -> Drawn:
    """Three parameters over two ranks, by the real layout: one travels directly, two in one packed message."""
    names, shapes = ["weight", "bias", "scale"], [(4, 8), (3,), (4,)]
    layout = plan_layout(shapes, ranks=2, itemsize=4, direct=DirectRule(64))
    segments = [
        [segment.parameter, bucket.direct, bucket.offset + before, segment.size, layout.ranks * (bucket.offset + before)]
        for bucket in layout.buckets
        for before, segment in zip(_before([segment.size for segment in bucket.segments]), bucket.segments)
    ]
    return {
        "parameters": [[name, list(shape)] for name, shape in zip(names, shapes)],
        "ranks": layout.ranks,
        "shard_numel": layout.shard_numel,
        "full_numel": layout.unsharded_numel,
        "segments": segments,  # parameter, direct, offset in the shard, size, offset in the unsharded buffer
        "moves": [[old.value, new.value, why] for (old, new), why in TRANSITIONS.items()],
    }


def _before(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def explained() -> Any:
    """A step of Llama's smallest, as `docs/explain.md` shows it."""
    spec = importlib.util.spec_from_file_location("llama", HERE.parents[1] / "examples" / "llama.py")
    assert spec is not None and spec.loader is not None
    llama = importlib.util.module_from_spec(spec)
    sys.modules["llama"] = llama
    spec.loader.exec_module(llama)
    return fullshard.explain(**llama.llama(size="1b", length=4096, rows=2), world=8, gpu="a100-40")


def step() -> Drawn:
    """What is drawn is what the report says."""
    return {"report": str(explained())}


def calls() -> Drawn:
    """Calls between files, as (caller, file), in a forward and backward of one plain unit.

    Without the wrappers of torch's private parts, which every file calls.
    """
    script = HERE.parents[1] / "tests" / "unit" / "test_plain_path.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return {"arrows": sorted(arrow for arrow in json.loads(done.stdout)["arrows"] if "_torch" not in arrow)}


DRAWN = {"schedule": schedule, "levels": levels, "parameter": parameter, "step": step, "calls": calls}


# --- how ------------------------------------------------------------------------------------------------------------------


def _draw_schedule(drawn: Drawn, plt: Any) -> Any:
    figure, (lanes, memory) = plt.subplots(2, 1, figsize=(10, 4.2), sharex=True, height_ratios=[3, 1.2])
    rows = {"compute": 2, "gather": 1, "reduce": 0}
    for lane, unit, start, length, text in drawn["bars"]:
        lanes.broken_barh([(start + 0.02, length - 0.04)], (rows[lane] - 0.36, 0.72), color=COLORS[unit])
        label = f"{text}\n{UNITS[unit]}"
        lanes.text(start + length / 2, rows[lane], label, ha="center", va="center", color=PAPER, fontsize=8)
    lanes.set_yticks(list(rows.values()), [f"{lane} lane" for lane in rows])
    end = max(start + length for _, _, start, length, _ in drawn["bars"])
    times = sorted({time for _, since, until in drawn["held"] for time in (since, until)})
    below = [0.0] * len(times)
    for unit in range(len(UNITS)):
        full = [float(any(u == unit and since <= time < until for u, since, until in drawn["held"])) for time in times]
        top = [low + one for low, one in zip(below, full)]
        memory.fill_between([*times, end], [*below, 0], [*top, 0], step="post", color=COLORS[unit], linewidth=0)
        below = top
    memory.set_yticks([0, 1, 2, 3])
    memory.set_ylabel("units whose full\nparameters lie\nin memory", rotation=0, ha="right", va="center")
    memory.set_xlabel("time: a forward, a gather and a reduction take 1, the backward of a block takes 2")
    memory.set_xlim(0, end)
    memory.set_xticks(range(int(end) + 1))
    lanes.set_title(
        "One step of a root with two blocks: what is needed next is gathered while something else computes", fontsize=10
    )
    return figure


def _draw_levels(drawn: Drawn, plt: Any) -> Any:
    figure, panels = plt.subplots(8, 1, figsize=(10, 12), sharex=True, height_ratios=[2, 1.6] * 3 + [2.6, 1.6])
    runs = [(name, drawn[name]) for name in ("ZERO3", "ZERO2", "ZERO1", "HFSDP")]
    end = max(start + length for _, run in runs for _, _, start, length, _ in run["bars"])
    for number, (name, run) in enumerate(runs):
        lanes, memory = panels[2 * number], panels[2 * number + 1]
        for lane, unit, start, length, text in run["bars"]:
            color = COLORS[unit] if unit >= 0 else INK
            lanes.broken_barh([(start + 0.03, length - 0.06)], (LANES[lane] - 0.36, 0.72), color=color)
            lanes.text(start + length / 2, LANES[lane], text[:1].upper(), ha="center", va="center", color=PAPER, fontsize=7)
        there = {lane: row for lane, row in LANES.items() if row >= 0 or name == "HFSDP"}
        lanes.set_yticks(list(there.values()), list(there), fontsize=8)
        lanes.set_title(name, fontsize=10, loc="left")
        times = sorted({0.0, end, *(time for kind in ("held", "grads") for span in run[kind] for time in span[1:])})
        below = [0.0] * len(times)
        for kind, hatch in (("held", ""), ("grads", "////")):
            for unit in range(len(UNITS)):
                there = [float(any(u == unit and since <= time < until for u, since, until in run[kind])) for time in times]
                top = [low + one for low, one in zip(below, there)]
                memory.fill_between(
                    times, below, top, step="post", facecolor=COLORS[unit], edgecolor=PAPER, hatch=hatch, linewidth=0
                )
                below = top
        memory.set_yticks([0, 2, 4, 6])
        memory.set_ylim(0, 6.3)
        memory.set_ylabel("in memory", fontsize=8)
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel(
        "A step of two microbatches, with forward (F), backward (B), optimizer (O), all-gather (G) and reduce-scatter (R). In "
        "memory: unsharded\nparameters of the root and two blocks, and their unsharded gradients (hatched); besides these, the "
        "shards of all states, always, and\nunder HFSDP the shards for computing.",
        fontsize=8,
    )
    return figure


def _draw_parameter(drawn: Drawn, plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(10, 5.6))
    names = [name for name, _ in drawn["parameters"]]

    def bar(left: float, width: float, row: float, index: int, text: str, rank: int | None = None) -> None:
        color = COLORS[index] if index >= 0 else PALE
        alpha = 1.0 if rank in (None, 0) else 0.72
        axes.broken_barh([(left, width)], (row, 0.7), facecolor=color, edgecolor=PAPER, alpha=alpha, linewidth=1.5)
        if width >= 3:
            axes.text(left + width / 2, row + 0.35, text, ha="center", va="center", color=PAPER, fontsize=8)

    ranks, numel = drawn["ranks"], drawn["shard_numel"]
    left = 0.0
    for index, (name, shape) in enumerate(drawn["parameters"]):
        size = 1
        for one in shape:
            size *= one
        bar(left, max(size, 3), 6.6, index, f"{name} {tuple(shape)}" if size > 8 else name)
        left += max(size, 3) + 1.5
    for rank in range(ranks):
        for index, _, offset, size, _ in drawn["segments"]:
            bar(rank * (numel + 4) + offset, size, 5.0, index, names[index] if index >= 0 else "", rank)
        axes.text(rank * (numel + 4), 5.8, f"rank {rank}: elements 0 to {numel - 1}", fontsize=7, color=INK)
    left = 0.0
    for direct in (False, True):
        sizes = [(index, size) for index, is_direct, _, size, _ in drawn["segments"] if is_direct is direct]
        start = left
        for rank in range(ranks):
            for index, size in sizes:
                bar(left, size, 3.2, index, names[index] if index >= 0 else "", rank)
                left += size
        kind = "direct message: lands where it stays" if direct else "packed message: copied out"
        axes.text(start, 4.0, kind, fontsize=7, color=INK)
        left += 3
    for index, _, _, size, at in drawn["segments"]:
        for rank in range(ranks):
            bar(at + rank * size, size, 1.4, index, names[index] if index >= 0 else "", rank)
    axes.text(
        0,
        2.2,
        f"elements 0 to {drawn['full_numel'] - 1}; pale: gaps, so that every parameter begins at a multiple of 16 bytes",
        fontsize=7,
        color=INK,
    )
    rows = {6.95: "parameters", 5.35: "flat shards", 3.55: "messages", 1.75: "unsharded\nbuffer", 0.2: "states"}
    for row, text in rows.items():
        axes.text(-1.5, row, text, ha="right", va="center", fontsize=9, color=INK)
    states = list(dict.fromkeys(state for old, new, _ in drawn["moves"] for state in (old, new)))
    where = {state: 5.0 + 20.0 * place for place, state in enumerate(states)}
    for state, x in where.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": INK}
        axes.text(x, 0.2, state, ha="center", va="center", fontsize=9, color=PAPER, bbox=box)
    for old, new, why in drawn["moves"]:
        x, y = (where[old] + where[new]) / 2, 0.45
        start, end, bend = (where[old] + 3.5, 0.25), (where[new] - 3.5, 0.25), 0.0
        if where[new] < where[old]:
            far = where[old] - where[new] > 30
            start, end = (where[old] - (1 if far else 2), -0.1), (where[new] + (1 if far else 2), -0.1)
            y, bend = (-1.05, -0.13) if far else (-0.02, -0.12)
        style = {"arrowstyle": "->", "color": INK, "connectionstyle": f"arc3,rad={bend}"}
        axes.annotate("", xy=end, xytext=start, arrowprops=style)
        axes.text(x, y, why, ha="center", va="center", fontsize=7, color=INK)
    axes.set_xlim(-9, max(2 * numel + 6, drawn["full_numel"] + 2))
    axes.set_ylim(-1.2, 7.6)
    axes.set_title("A parameter's life: sharded on every rank, gathered into one buffer, freed", fontsize=10)
    axes.axis("off")
    return figure


def _wrapped(text: str, width: int = 24) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width)) if "\n" not in text else text


def _draw_step(drawn: Drawn, plt: Any) -> Any:
    return figure_of(explained())


def _columns(arrows: list[list[Any]]) -> list[list[str]]:
    """Files by the smallest number of calls from torch, or from a file that no other calls, to them."""
    columns = [sorted({caller for caller, _ in arrows} - {file for _, file in arrows} | {"torch"})]
    known = set(columns[0])
    while columns[-1]:
        reached = [file for caller, file in arrows if caller in columns[-1]]
        columns.append(list(dict.fromkeys(file for file in reached if file not in known)))
        known.update(columns[-1])
    return columns[:-1]


def _draw_calls(drawn: Drawn, plt: Any) -> Any:
    columns, colors = _columns(drawn["arrows"]), {"core": COLORS[1], "comm": COLORS[2]}
    figure, axes = plt.subplots(figsize=(10, 5.2))
    places = {
        file: (2.3 * index, (len(column) - 1) / 2 - row + 0.12 * (index % 2))
        for index, column in enumerate(columns)
        for row, file in enumerate(column)
    }
    for caller, file in drawn["arrows"]:
        (x, y), (to_x, to_y) = places[caller], places[file]
        bend = 0.0 if to_x > x else 0.35  # calls back, and calls within a column, in a bow
        axes.annotate(
            "",
            (to_x, to_y),
            (x, y),
            arrowprops={
                "arrowstyle": "-|>",
                "color": PALE if bend else "#9aa7b5",
                "linewidth": 1.1,
                "connectionstyle": f"arc3,rad={bend}",
                "shrinkA": 26,
                "shrinkB": 26,
            },
        )
    for file, (x, y) in places.items():
        color = colors.get(file.split("/")[0], COLORS[0])
        box = {"boxstyle": "round,pad=0.35", "facecolor": PAPER, "edgecolor": color, "linewidth": 1.4}
        axes.text(x, y, file.replace("/", "/\n").removesuffix(".py"), ha="center", va="center", bbox=box, fontsize=8)
    axes.set_xlim(-0.9, 2.3 * (len(columns) - 1) + 0.9)
    axes.set_ylim(-max(map(len, columns)) / 2 - 0.2, max(map(len, columns)) / 2 + 0.2)
    axes.axis("off")
    return figure


def main() -> None:
    """Draw all of them."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {"svg.hashsalt": "fullshard", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    matplotlib.rcParams.update(
        {**style, "figure.facecolor": PAPER, "text.color": INK, "axes.spines.top": False, "axes.spines.right": False}
    )
    draw = {
        "schedule": _draw_schedule,
        "levels": _draw_levels,
        "parameter": _draw_parameter,
        "step": _draw_step,
        "calls": _draw_calls,
    }
    for name, compute in DRAWN.items():
        drawn = compute()
        figure = draw[name](drawn, plt)
        if figure.get_layout_engine() is None:
            figure.tight_layout()
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Description": json.dumps(drawn)})
        plt.close(figure)
        print(HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
