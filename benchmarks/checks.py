"""What the checks cost: ledger, tags, watch, heartbeat and examinations, beside the same program without them.

    python benchmarks/checks.py [--repeats 50] [--steps 40]

Host time per collective, and forward and backward of the model of `make train` on two gloo ranks; interleaved, in one process.
"Without" skips every entry, tag and watched wait, and the heartbeat; what remains are tests of attributes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard import CheckPolicy
from fullshard.comm import HostLane, Pending, lane_for
from fullshard.communicator import Communicator
from fullshard.ledger import Label, Ledger, Line
from fullshard.module import units_of
from fullshard.watch import Waiter

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


@contextmanager
def unchecked() -> Iterator[None]:
    """Collectives go straight to their lanes."""

    def send(
        self: Communicator,
        lane: Any,
        line: Any,
        action: str,
        start: Callable[..., Any],
        finish: Callable[..., Any],
        after: Any = None,
    ) -> Any:
        ticket = lane.run(start, finish) if after is None else lane.run(start, finish, after=after)
        return ticket

    checked, Communicator.send = Communicator.send, send  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator.send = checked  # type: ignore[method-assign]


def host(repeats: int) -> dict[str, float]:
    """Microseconds of the host per collective, with and without. A unit has two gathers and a reduction per step."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    communicator = Communicator(torch.device("cpu"), lane_for)
    communicator.waiter = Waiter()
    lane, line = HostLane(), Line(Ledger("ranks", range(8), 0), Label("unit"), "subject")

    def watched() -> None:
        communicator.send(lane, line, "forward gather", Pending, _nothing).wait()

    def bare() -> None:
        lane.run(Pending, _nothing).wait()

    found = {"with": watched, "without": bare}
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(repeats):
        for name, fn in found.items():
            times[name].append(timeit.timeit(fn, number=1000) * 1e3)
    dist.destroy_process_group()
    return {name: median(values) for name, values in times.items()}


def _nothing() -> None:
    pass


def _train(rank: int, steps: int, port: int, results: Any) -> None:
    from train_lm import Decoder

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Decoder(dim=192, depth=4, heads=6, length=128, recompute=False)  # one: where two lie in memory differs by 3%
    for module in (*model.blocks, model):
        fullshard.fully_shard(module, mesh=mesh)
    x = torch.randint(0, 256, (12, 128))
    times: dict[str, list[float]] = {"with": [], "without": []}
    for repeat in range(steps + 3):
        for name in ("with", "without") if repeat % 2 else ("without", "with"):
            for unit in units_of(model, True):
                unit.configure(checks=CheckPolicy(heartbeat=name == "with"))
            dist.barrier()
            begin = time.perf_counter()
            with nullcontext() if name == "with" else unchecked():
                model(x).float().square().mean().backward()
            dist.barrier()  # until all ranks are done: the heartbeat waits for the slower one, and so would the next gather
            if repeat >= 3:
                times[name].append(time.perf_counter() - begin)
            model.zero_grad()
    dist.destroy_process_group()
    if rank == 0:
        pairs = [one / other for one, other in zip(times["with"], times["without"])]  # neighbours in time: drift cancels
        results.put({name: median(values) * 1e3 for name, values in times.items()} | {"ratio": median(pairs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    call = host(options.repeats)
    per_unit = 3 * (call["with"] - call["without"])
    print(
        f"host time per collective: with checks {call['with']:5.2f} us   without {call['without']:5.2f} us   "
        f"per unit and step (two gathers, a reduction) {per_unit:5.1f} us"
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
        print(json.dumps({"host": {"per unit": per_unit}, "step": step}), flush=True)


if __name__ == "__main__":
    main()
