"""Measure the seconds and the host memory to shard a model on meta with fullshard and torch's FSDP2, over fake process groups.

    python benchmarks/startup.py [--worlds 8 1024 16384] [--models decoder mixture] [--of fullshard FSDP2]

`decoder` has 126 layers of nine parameters, like the largest Llama. `mixture` has 60 layers of 128 experts with two matrices
each, a router, a norm and an attention matrix: 15,540 parameters, one unit per layer. Each figure comes from a separate
process: the seconds of `fully_shard` for all units and the root (without torch's imports), and the growth of the host's
resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

DIM = 16_384


class Layer(nn.Module):
    """A decoder block: four attention and three MLP matrices, two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))


class MixtureLayer(nn.Module):
    """128 experts of two matrices, a router, a norm, an attention matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(2)) for _ in range(128))
        self.router = nn.Linear(1024, 128, bias=False)
        self.norm = nn.RMSNorm(1024)
        self.attention = nn.Linear(1024, 1024, bias=False)


def model_of(name: str) -> nn.Sequential:
    with torch.device("meta"):
        if name == "decoder":
            return nn.Sequential(*(Layer() for _ in range(126)))
        return nn.Sequential(*(MixtureLayer() for _ in range(60)))


def measure(library: str, name: str, world: int) -> dict[str, Any]:
    """Shard a model in this process, and return the seconds, the MiB by which memory grew, and the number of parameters."""
    import fullshard

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    fully_shard: Any = fullshard.fully_shard
    if library == "FSDP2":
        from torch.distributed.fsdp import fully_shard
    fully_shard(nn.Linear(4, 4), mesh=mesh)  # the first use of DTensor imports modules
    model = model_of(name)
    parameters = len(list(model.parameters()))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    dist.destroy_process_group()
    return {"seconds": seconds, "MiB": grown, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 1024, 16_384])
    parser.add_argument("--models", nargs="+", default=["decoder", "mixture"], choices=["decoder", "mixture"])
    parser.add_argument("--of", nargs="+", default=["fullshard", "FSDP2"], choices=["fullshard", "FSDP2"])
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a process is given up")
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "MODEL", "WORLD"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], options.one[1], int(options.one[2]))))
        return
    results: dict[str, Any] = {}
    for name in options.models:
        for world in options.worlds:
            listed = []
            for library in options.of:
                command = [sys.executable, __file__, "--one", library, name, str(world)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
                except subprocess.TimeoutExpired:
                    listed.append(f"{library} more than {options.limit:.0f} s")
                    continue
                if done.returncode:
                    raise SystemExit(done.stderr)
                found = json.loads(done.stdout.strip().splitlines()[-1])
                results[f"{name}, {world} ranks, {library}"] = found
                per = 1000 / found["parameters"]
                listed.append(
                    f"{library} {found['seconds']:6.2f} s ({per * found['seconds']:.3f} s and {per * found['MiB']:.1f} MiB "
                    "per 1,000 parameters)"
                )
            print(f"sharding on meta, {name:8s} {world:6,d} ranks: {'   '.join(listed)}", flush=True)
    if options.json:
        print(record.line(results))


if __name__ == "__main__":
    main()
