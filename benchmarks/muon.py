"""Measure steps of Muon over sharded matrices on four ranks (gloo): by owners, by DTensor under torch's FSDP2, by muon-fsdp2.

    python benchmarks/muon.py [--ranks 4] [--steps 5]

48 matrices of 512 x 512, and 48 of 1024 x 2048. fullshard sends each matrix to one rank, which computes with it; under torch's
FSDP2 each rank computes with all of them; muon-fsdp2 (PyPI, measured if it is installed) gathers each to one rank in turn. Steps
of all alternate in one process per rank; figures are medians of the slowest rank, in seconds. "step" is the optimizer's step,
"whole" the forward and backward of the layers as well. Compare ratios; times depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import suppress
from functools import partial
from typing import Any

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard

SHAPES = [(512, 512), (1024, 2048)]
COUNT, ROWS = 48, 256


class Layers(nn.Module):
    """Matrices whose inputs are resized where shapes do not fit."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.repeat(1, -(-layer.in_features // x.shape[1]))[:, : layer.in_features]))
        return x


def sharded(shard: Any, muon: Any, shape: tuple[int, int], mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return sharded layers and their Muon."""
    torch.manual_seed(0)
    model = Layers(shape)
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model, muon([*model.parameters()])


def alternatives() -> dict[str, tuple[Any, Any]]:
    """Return (fully_shard, Muon) by name."""
    muon = partial(torch.optim.Muon, lr=0.02)
    found: dict[str, tuple[Any, Any]] = {"fullshard": (fullshard.fully_shard, muon), "FSDP2": (torch_fully_shard, muon)}
    with suppress(ImportError):
        import muon_fsdp2

        found["muon-fsdp2"] = torch_fully_shard, lambda ps: muon_fsdp2.Muon([{"params": ps, "use_muon": True, "lr": 0.02}])
    return found


def race(rank: int, ranks: int, steps: int, store: str, as_json: bool) -> None:
    """Run steps of all in turn, and print the medians on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    for shape in SHAPES:
        contenders = {name: sharded(*how, shape, mesh) for name, how in alternatives().items()}
        spent: dict[str, dict[str, list[float]]] = {name: {"step": [], "whole": []} for name in contenders}
        x = torch.randn(ROWS, shape[1])
        for step in range(steps + 1):
            for name, (model, optimizer) in contenders.items():
                dist.barrier()
                began = time.perf_counter()
                model(x).square().mean().backward()
                dist.barrier()
                middle = time.perf_counter()
                optimizer.step()
                ended = time.perf_counter()
                optimizer.zero_grad()
                took = torch.tensor([ended - middle, ended - began])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if step:
                    spent[name]["step"].append(took[0].item())
                    spent[name]["whole"].append(took[1].item())
        for what in ("step", "whole"):
            medians = {name: statistics.median(every[what]) for name, every in spent.items()}
            ratios = {name: seconds / medians["fullshard"] for name, seconds in medians.items()}
            title = f"{COUNT} of {shape[0]} x {shape[1]}, {what}"
            found[title] = ratios
            if rank == 0:
                told = "   ".join(f"{name} {medians[name]:.3f} s ({ratio:.1f})" for name, ratio in ratios.items())
                print(f"Muon, {title}, {ranks} ranks: {told}", flush=True)
    if rank == 0 and as_json:
        print(record.line(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    os.environ.setdefault("FULLSHARD_SYNC", "off")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(race, (options.ranks, options.steps, f"{folder}/store", options.json), nprocs=options.ranks)


if __name__ == "__main__":
    main()
