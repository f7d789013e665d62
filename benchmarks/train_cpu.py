"""Measure forward and backward of a decoder stack on two gloo ranks with fullshard, torch's FSDP2 and DDP, interleaved.

    python benchmarks/train_cpu.py [--dims 128 512 1024] [--repeats 9]

Beside them: fullshard under ZERO2, and FSDP2 with reshard_after_forward=False. Figures are medians in milliseconds over interleaved repeats, with one thread per rank. Machines are noisy: compare ratios.
Ratios depend on the compute per byte sent, which `--length` sets (with the default FSDP2 is about twice as slow as DDP).
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from statistics import median

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fullshard


class Block(nn.Module):
    """A decoder block with causal attention and SwiGLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // 64
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def worker(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
    found: dict[str, dict[str, float]] = {}
    for dim in options.dims:
        torch.manual_seed(0)
        base = nn.Sequential(*[Block(dim) for _ in range(options.depth)])
        ours, theirs, ddp = copy.deepcopy(base), copy.deepcopy(base), DistributedDataParallel(copy.deepcopy(base))
        for module in (*ours, ours):
            fullshard.fully_shard(module, mesh=mesh)
        for module in (*theirs, theirs):
            torch_fully_shard(module, mesh=mesh)
        second, kept = copy.deepcopy(base), copy.deepcopy(base)
        for module in (*second, second):
            fullshard.fully_shard(module, mesh=mesh, states=fullshard.ZERO2)
        for module in (*kept, kept):
            torch_fully_shard(module, mesh=mesh, reshard_after_forward=False)
        x = torch.randn(options.batch, options.length, dim)
        models = {"fullshard": ours, "FSDP2": theirs, "DDP": ddp, "ZERO2": second, "FSDP2 kept": kept}
        optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        steps: dict[str, list[float]] = {name: [] for name in models}
        repeats = options.repeats * max(1, 512 // dim)  # short steps are noisier
        for repeat in range(repeats + 2):
            for name, model in models.items():
                dist.barrier()
                start = time.perf_counter()
                model(x).square().mean().backward()
                middle = time.perf_counter()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizers[name].step()
                if repeat >= 2:
                    times[name].append(middle - start)
                    steps[name].append(time.perf_counter() - start)
                model.zero_grad()
        if rank == 0:
            for label, measured in ((f"dim {dim}", times), (f"whole step, dim {dim}", steps)):
                ms = found[label] = {name: median(values) * 1e3 for name, values in measured.items()}
                print(
                    f"two gloo ranks, {label:20s}: fullshard {ms['fullshard']:7.0f} ms   FSDP2 {ms['FSDP2']:7.0f} ms   "
                    f"DDP {ms['DDP']:7.0f} ms   of FSDP2 {ms['fullshard'] / ms['FSDP2']:.2f}   of DDP {ms['fullshard'] / ms['DDP']:.2f}   "
                    f"ZERO2 of DDP {ms['ZERO2'] / ms['DDP']:.2f}   FSDP2 with reshard_after_forward=False {ms['FSDP2 kept'] / ms['DDP']:.2f}",
                    flush=True,
                )
    dist.destroy_process_group()
    if rank == 0 and options.json:
        print(record.line(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    mp.spawn(worker, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
