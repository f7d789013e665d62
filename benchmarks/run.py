"""Run all benchmarks, one after the other, and print their ratios in one table.

python benchmarks/run.py [--json]    # --json: keep the figures as benchmarks/results/BENCHMARK.DATE.json, too
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import record
import torch

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark, print its output, and return its figures. With `--json`, keep them in a file."""
    print(f"== {script}", flush=True)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
    command = [sys.executable, str(HERE / script), "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    *said, last = done.stdout.strip().splitlines()
    print("\n".join(said), flush=True)
    found = json.loads(last)
    if "--json" in sys.argv[1:]:
        record.write(HERE / "results" / f"{Path(script).stem}.{found['date']}.json", found)
    return found["figures"]


def main() -> None:
    host, memory, speed, checks = run("host.py"), run("memory.py"), run("train_cpu.py"), run("checks.py")
    scale, steps, startup = run("watch_scale.py"), run("optimizers.py"), run("startup.py")
    weights, muon = run("weights.py"), run("muon.py")
    rows: list[tuple[str, float, float, str]] = []
    for label, found in host.items():
        rows.append(
            (
                f"host time per unit, {label} (us)",
                found["fullshard"],
                found["FSDP2"],
                "0.25" if "11 parameters, 8 " in label else "",
            )
        )
    for label in dict.fromkeys(name.rsplit(" ", 1)[0] for name in memory if name.endswith("fullshard")):
        for phase in ("forward", "backward"):
            ours, theirs = memory[f"{label} fullshard"][phase], memory[f"{label} FSDP2"][phase]
            rows.append((f"peak in {phase}, {label} (U)", ours, theirs, ""))
    for label, found in speed.items():
        limit = {"dim 512": "0.60", "dim 1024": "0.50", "whole step, dim 128": "0.55"}.get(label, "")
        rows.append((f"two gloo ranks, {label} (ms)", found["fullshard"], found["FSDP2"], limit))
    print(f"\ntorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores\n")
    print(f"| {'':44s} | fullshard |   FSDP2 | ratio | at most |")
    print(f"|{'-' * 46}|----------:|--------:|------:|--------:|")
    for name, ours, theirs, limit in rows:
        print(f"| {name:44s} | {ours:9.2f} | {theirs:7.2f} | {ours / theirs:5.2f} | {limit:>7s} |")
    for label, found in steps.items():
        mine = found["fullshard"] / found["plain"]
        if "FSDP2" not in found:
            print(f"{label} of 300 parameters, of torch._foreach_lerp_ over plain tensors: {mine:.2f} (at most 1.2)")
            continue
        theirs = found["FSDP2"] / found["plain"]
        print(
            f"{label} over 300 parameters, of plain tensors: {mine:.2f} (at most {1.3 if label == 'clipping' else 1.2}), FSDP2 {theirs:.2f}"
        )
    for label in dict.fromkeys(name.rsplit(", ", 1)[0] for name in startup):
        ours, theirs = startup[f"{label}, fullshard"], startup.get(f"{label}, FSDP2")
        said = "was given up" if theirs is None else f"{theirs['seconds']:.1f} s"
        limit = {"decoder, 16384 ranks": " (at most 1)", "mixture, 1024 ranks": " (at most 2.5)"}.get(label, "")
        print(f"sharding on meta, {label}: {ours['seconds']:.2f} s{limit}, FSDP2 {said}")
    share = 100 * (checks["step"]["ratio"] - 1)
    print(f"\nchecks: {checks['host']['per unit']:.1f} us of host time per unit and step (at most 15)")
    entry = checks["entry"]
    print(
        f"checks: {entry['same options']:.1f} us for the entry of an optimizer step (5), {entry['another rate']:.1f} us with another rate"
    )
    print(f"checks: {share:.2f} % of forward and backward of `make train` (at most 1)")
    for ranks, found in scale.items():
        print(
            f"watch of {int(ranks):,} ranks: at most {found['requests']:,.0f} requests (2,000) and {found['bytes'] / 1e6:.2f} MB (2) per second, "
            f"{found['idle']:.0f} while nobody waits; two ranks that part are named after {found['named']:.1f} s (10)"
        )
    for what in ("load", "save"):
        ours, *others = (weights[f"{what}, {way}"] for way in ("fullshard", "DCP", "first rank"))
        best, least = (min(one[key] for one in others) for key in ("seconds", "MiB"))
        print(
            f"{what} a checkpoint: {best / ours['seconds']:.2f} times as fast as the better of DCP and the first rank alone (at least 1.5), "
            f"{ours['MiB']:.0f} MiB more on a rank, theirs {least:.0f}"
        )
    for label, found in muon.items():
        limits = {"FSDP2": " (at least 3)"} if label.endswith("step") else {}
        told = ", ".join(
            f"{ratio:.1f} times as fast as {name}{limits.get(name, '')}" for name, ratio in found.items() if ratio != 1
        )
        print(f"Muon, {label}, four gloo ranks: {told}")
    for label in (name for name in weights if name.startswith("stream")):
        found = weights[label]
        print(f"{label}: {found['full_tensor'] / found['iter_full']:.1f} times as fast as full_tensor()")
    for label in (name for name in weights if name.startswith("publish")):
        found = weights[label]
        told = ", ".join(
            f"{found[name] / found['full(to=0)']:.1f} times as fast as {name}" for name in ("full_tensor", "full state dict")
        )
        print(
            f"{label}: a gather to one rank is {told} (at least 3); a seal takes {found['seal'] / found['foreach copy']:.2f} of a copy (1.2)"
        )
    for label, found in speed.items():
        print(
            f"fullshard of DDP, {label}: {found['fullshard'] / found['DDP']:.2f} (FSDP2 of DDP {found['FSDP2'] / found['DDP']:.2f}); "
            f"under ZERO2 {found['ZERO2'] / found['DDP']:.2f} (FSDP2 with reshard_after_forward=False {found['FSDP2 kept'] / found['DDP']:.2f})"
        )


if __name__ == "__main__":
    main()
