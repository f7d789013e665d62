"""Measure the peak memory of fullshard and FSDP2 above the memory at rest, in U.

    python benchmarks/memory.py [--ranks 8 64 512 4096] [--dims 2048] [--of fullshard FSDP2 packed]

U is the size of the unsharded parameters of one unit in the compute dtype. Options have their defaults (`packed`: fullshard
with `direct_min_bytes=inf`). The model has six equal units (two matrices of dim x 2 dim and a norm); process groups are fake.
torch's profiler counts every allocation of the CPU allocator, so figures are exact and repeatable; activations are a few
kilobytes. The memory at rest includes the shards. Gradient shards that exist at the end are not counted.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard.foresight.recorder import AllocationWatch


def peak_of(events: list[tuple[int, int]], delivered: set[int]) -> int:
    """Return the largest sum of allocated bytes, without the memory that holds the `delivered` gradients at the end.

    Frees of what was allocated before are ignored: fullshard frees gradients of the step before in the forward, not earlier.

    Args:
        events: (address, bytes) of each allocation, with negative bytes where memory is freed, in order.
        delivered: addresses of the gradient shards.
    """
    last = {address: at for at, (address, nbytes) in enumerate(events) if nbytes > 0}
    level = peak = 0
    here: set[int] = set()
    for at, (address, nbytes) in enumerate(events):
        if nbytes > 0:
            here.add(address)
        elif address not in here:
            continue
        if address not in delivered or at != last[address]:
            level += nbytes
            peak = max(peak, level)
    return peak


class Product(torch.autograd.Function):
    """A replacement of a matrix product: it saves and allocates the same tensors, without the workspace of a CPU kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x[..., :1] + weight[:, 0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad.sum(-1, keepdim=True).expand(x.shape), torch.ones_like(weight)


class Linear(nn.Module):
    """A linear layer with the weight of nn.Linear, computed by `Product`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


def block_of(dim: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(dim), Linear(dim, 2 * dim), Linear(2 * dim, dim))


def messages_of(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Return fullshard's messages per unit, for all-gathers and reductions, and the MiB of the smallest over all ranks."""
    if not isinstance(model, fullshard.FSDPModule):
        return {}
    with fullshard.counting(model) as messages:
        model(x).sum().backward()
    model.zero_grad()
    sent = [one for one in messages if one.kind != "heartbeat"]
    gathers = [one for one in sent if one.kind == "all_gather" or not one.dtype.is_floating_point]
    per_gather = 2 * len(model) - 1  # the last unit stays unsharded for its backward
    return {
        "gathers": len(gathers) / per_gather,
        "reductions": (len(sent) - len(gathers)) / len(model),
        "smallest": min(one.nbytes for one in sent) / 2**20,
    }


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
    counts = messages_of(model, x)
    watch = AllocationWatch()
    loss = model(x).sum()
    forward, watch = watch.stop(), AllocationWatch()
    loss.backward()
    backward = watch.stop()
    delivered = {parameter.grad.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
    whole = peak_of([*forward, *backward], delivered)
    return {"forward": peak_of(forward, set()) / unit_bytes, "backward": whole / unit_bytes, **counts}


def peaks_of(
    names: list[str], ranks: int, param: torch.dtype | None, reduce: torch.dtype | None, dim: int
) -> dict[str, dict[str, float]]:
    """Return the peaks, by name of the library."""
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
                listed = []
                for name, one in found.items():
                    listed.append(f"{name} {one['forward']:5.2f} forward {one['backward']:5.2f} backward")
                    if "smallest" in one:
                        listed[-1] += " ({gathers:.0f} + {reductions:.0f} messages from {smallest:.0f} MiB)".format(**one)
                print(f"peak (U), {ranks:5d} ranks, dim {dim}, {label:20s}: {'   '.join(listed)}", flush=True)
        dist.destroy_process_group()
    if options.json:
        print(record.line(results))


if __name__ == "__main__":
    main()
