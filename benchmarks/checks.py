"""Measure the cost of the checks (collective log, tags, watchdog, heartbeat) against the same program without them.

    python benchmarks/checks.py [--pairs 400] [--units 32] [--steps 40]

It measures forward and backward of small units on a fake process group (host time), and of the model of `make train` on two
gloo ranks. Steps with and without checks are interleaved in one process. The checks are measured within a step: in a loop of
its own, the code of a check stays in the processor's caches and takes a fifth of its time within a step. "Without" skips every
log entry, tag and watched wait, and the heartbeat; only tests of attributes remain.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from host import Unit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard import CheckPolicy
from fullshard.checks.state import WaitState
from fullshard.core import units_of
from fullshard.core.communicator import Communicator
from fullshard.ext.step_entries import StepEntries

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


@contextmanager
def unchecked() -> Iterator[None]:
    """Run collectives on their streams without log and watchdog, inside the block."""

    def send(
        self: Communicator,
        stream: Any,
        fingerprints: Any,
        action: str,
        start: Callable[..., Any],
        finish: Callable[..., Any],
        after: Any = None,
        *,
        part: bool = False,
    ) -> Any:
        return stream.run(start, finish) if after is None else stream.run(start, finish, after=after)

    checked, Communicator.send = Communicator.send, send  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator.send = checked  # type: ignore[method-assign]


def interleaved(
    model: nn.Module, step: Callable[[], None], pairs: int, ready: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of each step with and without checks. Steps run in pairs, and `ready` before each is not timed."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    for pair in range(pairs + 3):
        for name in ("with", "without") if pair % 2 else ("without", "with"):
            for unit in units_of(model, True):
                unit.configure(checks=CheckPolicy(heartbeat=name == "with"))
            with nullcontext() if name == "with" else unchecked():
                ready()
                begin = time.perf_counter()
                step()
                if pair >= 3:
                    times[name].append(time.perf_counter() - begin)
            for parameter in model.parameters():
                parameter.grad = None
    return times


def host(pairs: int, units: int) -> dict[str, float]:
    """Return the host time per unit and step in microseconds (medians): without checks, and the addition of the checks."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,))
    model = nn.Sequential(*[Unit() for _ in range(units)])
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=mesh)
    for unit in units_of(model, True):
        # A fake process group has no watchdog: record waits as with one.
        unit.runtime.communicator.wait_state = WaitState()
    x = torch.randn(2, 16)
    times = interleaved(model, lambda: model(x).sum().backward(), pairs)
    dist.destroy_process_group()
    # The steps of a pair are adjacent in time, so drift cancels.
    added = median(one - other for one, other in zip(times["with"], times["without"]))
    return {"without": median(times["without"]) / units * 1e6, "per unit": added / units * 1e6}


def entry_of_steps(units: int, steps: int) -> dict[str, float]:
    """Return the microseconds (medians) that the log entry of one optimizer step takes within training steps.

    There are two figures: with the options of the previous step, and with another learning rate. The time of reading the clock
    is subtracted.
    """
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,))
    model = nn.Sequential(*[Unit() for _ in range(units)])
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=mesh)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(2, 16)
    spent: list[int] = []
    empty: list[int] = []
    say = StepEntries.__call__

    def timed(self: StepEntries, groups: Any) -> None:
        first = time.perf_counter_ns()
        begin = time.perf_counter_ns()
        say(self, groups)
        spent.append(time.perf_counter_ns() - begin)
        empty.append(begin - first)

    StepEntries.__call__ = timed  # type: ignore[method-assign]
    found: dict[str, float] = {}
    for name in ("same options", "another rate"):
        for step in range(steps):
            if name == "another rate":
                optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (median(spent[5:]) - median(empty[5:])) / 1e3
        spent.clear()
        empty.clear()
    StepEntries.__call__ = say  # type: ignore[method-assign]
    dist.destroy_process_group()
    return found


def _train(rank: int, steps: int, port: int, results: Any) -> None:
    from train_lm import Decoder

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    # One model for both: the addresses of two models differ, which changes times by 3%.
    model = Decoder(dim=192, depth=4, heads=6, length=128, recompute=False)
    for module in (*model.blocks, model):
        fullshard.fully_shard(module, mesh=mesh)
    x = torch.randint(0, 256, (12, 128))

    def step() -> None:
        model(x).float().square().mean().backward()
        # Wait until all ranks are done: the heartbeat waits for the slower rank, and without it the next all-gather would.
        dist.barrier()

    times = interleaved(model, step, steps, dist.barrier)
    dist.destroy_process_group()
    if rank == 0:
        # The steps of a pair are adjacent in time, so drift cancels.
        pairs = [one / other for one, other in zip(times["with"], times["without"])]
        results.put({name: median(values) * 1e3 for name, values in times.items()} | {"ratio": median(pairs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    found = host(options.pairs, options.units)
    print(
        f"host time per unit and step: without {found['without']:6.0f} us   checks {found['per unit']:5.1f} us (median of pairs)"
    )
    entry = entry_of_steps(options.units, 5 * options.steps)
    print(
        f"entry of an optimizer step: {entry['same options']:5.1f} us   with another learning rate {entry['another rate']:5.1f} us "
        "(medians, within training steps)"
    )
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_train, (options.steps, options.port, results), nprocs=2)
    step = results.get()
    print(
        f"step of make train, two gloo ranks: with checks {step['with']:7.1f} ms   without {step['without']:7.1f} ms   "
        f"checks {100 * (step['ratio'] - 1):5.2f} % (median of pairs)"
    )
    if options.json:
        print(record.line({"host": found, "entry": entry, "step": step}), flush=True)


if __name__ == "__main__":
    main()
