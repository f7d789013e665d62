"""Peak memory above the sharded baseline, in units of U (one unit's full parameters in the compute dtype), both libraries.

    python benchmarks/memory.py [--ranks 8 64 512 4096] [--dims 2048] [--of fullshard FSDP2 packed]

At the defaults that a user gets (`packed`: fullshard with `direct_min_bytes=inf`): six equal units (two matrices of dim x 2 dim and a norm) over fake groups of so many ranks.
Every allocation of the CPU allocator is counted by torch's profiler, so the figures are exact and repeatable; activations are a
few kilobytes. The baseline is the memory at rest, shards included.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard


class Peak:
    """The largest sum of allocations minus frees since the first block, per named block."""

    def __init__(self) -> None:
        self.level = 0
        self.peaks: dict[str, int] = {}

    def run(self, name: str, block: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = block()
        peak = self.level
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            self.level += event.nbytes()
            peak = max(peak, self.level)
        self.peaks[name] = peak
        return result


def block_of(dim: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False))


def peaks(shard: Callable[[nn.Module], object], dtype: torch.dtype, dim: int, depth: int = 6) -> dict[str, float]:
    with torch.device("meta"):
        model = nn.Sequential(*[block_of(dim) for _ in range(depth)])
    for module in (*model, model):
        shard(module)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(0.01)
    unit_bytes = sum(p.numel() for p in model[0].parameters()) * dtype.itemsize
    x = torch.randn(1, dim)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    measured = Peak()
    loss = measured.run("forward", lambda: model(x).sum())
    measured.run("backward", lambda: loss.backward())
    return {name: peak / unit_bytes for name, peak in measured.peaks.items()}


def peaks_of(
    names: list[str], ranks: int, param: torch.dtype | None, reduce: torch.dtype | None, dim: int
) -> dict[str, dict[str, float]]:
    """By name of the library."""
    mesh = init_device_mesh("cpu", (ranks,))
    ours: Any = {"mesh": mesh, "mp_policy": fullshard.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}
    theirs: Any = {"mesh": mesh, "mp_policy": TorchPolicy(param_dtype=param, reduce_dtype=reduce)}
    packed = fullshard.CommPolicy(direct_min_bytes=float("inf"))
    shards: dict[str, Callable[[nn.Module], object]] = {
        "fullshard": lambda module: fullshard.fully_shard(module, **ours),
        "FSDP2": lambda module: torch_fully_shard(module, **theirs),
        "packed": lambda module: fullshard.fully_shard(module, comm_policy=packed, **ours),
    }
    found = {}
    for name in names:
        found[name] = peaks(shards[name], param or torch.float32, dim)
        gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[2048])
    parser.add_argument("--of", nargs="+", default=["fullshard", "FSDP2"], choices=["fullshard", "FSDP2", "packed"])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for ranks in options.ranks:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        for dim in options.dims:
            for label, param, reduce in (("fp32", None, None), ("bf16, fp32 reduction", torch.bfloat16, torch.float32)):
                found = peaks_of(options.of, ranks, param, reduce, dim)
                for name, one in found.items():
                    results[f"{label}, dim {dim}, {ranks} ranks {name}"] = one
                listed = [
                    f"{name} {one['forward']:5.2f} forward {one['backward']:5.2f} backward" for name, one in found.items()
                ]
                print(f"peak (U), {ranks:5d} ranks, dim {dim}, {label:20s}: {'   '.join(listed)}", flush=True)
        dist.destroy_process_group()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
