"""Peak memory above the sharded baseline, in units of U (one unit's full parameters in the compute dtype), both libraries.

    python benchmarks/memory.py

Six equal units over a fake group of 64 ranks; every allocation of the CPU allocator is counted by torch's profiler, so
the figures are exact and repeatable. Activations are a few kilobytes. The baseline is the memory at rest, shards included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

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
    return nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(4)])


def peaks(shard: Callable[[nn.Module], object], dtype: torch.dtype, dim: int = 256, depth: int = 6) -> dict[str, float]:
    model = nn.Sequential(*[block_of(dim) for _ in range(depth)])
    for module in (*model, model):
        shard(module)
    unit_bytes = sum(p.numel() for p in model[0].parameters()) * dtype.itemsize
    x = torch.randn(1, dim)
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    measured = Peak()
    loss = measured.run("forward", lambda: model(x).sum())
    measured.run("backward", lambda: loss.backward())
    return {name: peak / unit_bytes for name, peak in measured.peaks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    mesh = init_device_mesh("cpu", (64,))
    results: dict[str, dict[str, float]] = {}
    for label, param, reduce in (("fp32", None, None), ("bf16, fp32 reduction", torch.bfloat16, torch.float32)):
        dtype = param or torch.float32
        packed = fullshard.CommPolicy(direct_min_bytes=float("inf"))
        direct = fullshard.CommPolicy(direct_min_bytes=0)
        ours = fullshard.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        theirs = TorchPolicy(param_dtype=param, reduce_dtype=reduce)
        for name, shard in (
            ("fullshard", lambda m, p=ours: fullshard.fully_shard(m, mesh=mesh, mp_policy=p, comm_policy=direct)),
            ("all packed", lambda m, p=ours: fullshard.fully_shard(m, mesh=mesh, mp_policy=p, comm_policy=packed)),
            ("FSDP2", lambda m, p=theirs: torch_fully_shard(m, mesh=mesh, mp_policy=p)),
        ):
            found = peaks(shard, dtype, options.dim)
            results[f"{label} {name}"] = found
            print(
                f"peak above baseline, {label:20s} {name:10s}: forward {found['forward']:.2f} U   backward {found['backward']:.2f} U"
            )
    dist.destroy_process_group()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
