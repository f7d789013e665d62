"""Measure steps of Muon over sharded matrices on four ranks (gloo): owners of whole matrices, and torch's FSDP2 by DTensor.

    python benchmarks/muon.py [--ranks 4] [--steps 5]

48 matrices of 512 x 512, and 48 of 1024 x 2048. fullshard sends each matrix to one rank, which computes with it; under torch's
FSDP2 each rank computes with all of them. Steps of both alternate in one process per rank; figures are medians of the slowest
rank, in seconds. Compare ratios; times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard

SHAPES = [(512, 512), (1024, 2048)]
COUNT = 48


def stepper(shard: Any, shape: tuple[int, int], mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded stack of matrices with gradients, and its Muon."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False) for _ in range(COUNT))
    for layer in model:
        shard(layer, mesh=mesh)
        layer.weight.grad = torch.ones_like(layer.weight) + layer.weight.detach()
    return model, torch.optim.Muon(model.parameters(), lr=0.02)


def race(rank: int, ranks: int, steps: int, store: str, as_json: bool) -> None:
    """Run steps of both in turn, and print the medians on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    for shape in SHAPES:
        pair = [stepper(shard, shape, mesh) for shard in (fullshard.fully_shard, torch_fully_shard)]
        seconds: list[list[float]] = [[], []]
        for step in range(steps + 1):
            for (_, optimizer), spent in zip(pair, seconds):
                dist.barrier()
                began = time.perf_counter()
                optimizer.step()
                took = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if step:
                    spent.append(took.item())
        ours, theirs = map(statistics.median, seconds)
        name = f"{COUNT} of {shape[0]} x {shape[1]}"
        found[name] = theirs / ours
        if rank == 0:
            told = (
                f"Muon, {name}, {ranks} ranks: fullshard {ours:.3f} s   FSDP2 {theirs:.3f} s   {theirs / ours:.1f} times faster"
            )
            print(told, flush=True)
    if rank == 0 and as_json:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON in the last line")
    options = parser.parse_args()
    os.environ.setdefault("FULLSHARD_SYNC", "off")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(race, (options.ranks, options.steps, f"{folder}/store", options.json), nprocs=options.ranks)


if __name__ == "__main__":
    main()
