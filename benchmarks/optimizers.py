"""Measure optimizer steps, clipping and averages over 300 sharded parameters.

    python benchmarks/optimizers.py

fullshard is compared with plain tensors of the local sizes and with torch's FSDP2: 30 units of ten small parameters on a fake
process group of eight ranks. Steps of all three are interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard


class Lion(optim.Optimizer):
    """An optimizer that torch does not have, so fullshard needs `local_view` for it."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(momentum.lerp(parameter.grad, 0.1).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW, fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "AdamW, foreach": lambda parameters: optim.AdamW(parameters, foreach=True),
    "AdamW, single": lambda parameters: optim.AdamW(parameters, foreach=False),
    "SGD with momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: optim.Adagrad(parameters),
    "RMSprop": lambda parameters: optim.RMSprop(parameters),
    "NAdam": lambda parameters: optim.NAdam(parameters),
    "Lion, local_view": Lion,
}


def model_of(shard: Callable[[nn.Module], object] | None, dim: int, ranks: int) -> nn.Module:
    """Return a model with gradients: sharded by `shard`, or, if it is None, of plain tensors of the local sizes."""
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(dim, dim) for _ in range(5)]) for _ in range(30)])
    if shard is None:
        for parameter in model.parameters():
            parameter.data = torch.randn(dim // ranks, *parameter.shape[1:])
            parameter.grad = torch.randn_like(parameter)
        return model
    for module in (*model, model):
        shard(module)
    model(torch.randn(2, dim)).sum().backward()
    return model


def medians(runs: dict[str, Callable[[], object]], count: int, warm: int = 10) -> dict[str, float]:
    """Return the median milliseconds of each run. The runs are interleaved."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count + warm):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(found[warm:]) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = 8
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    shards: dict[str, Callable[[nn.Module], object] | None] = {
        "plain": None,
        "fullshard": lambda module: fullshard.fully_shard(module, mesh=mesh),
        "FSDP2": lambda module: torch_fully_shard(module, mesh=mesh),
    }
    models = {name: model_of(shard, options.dim, ranks) for name, shard in shards.items()}
    parameters = {name: list(model.parameters()) for name, model in models.items()}
    results: dict[str, dict[str, float]] = {}
    for label, make in OPTIMIZERS.items():
        made = {name: make(listed) for name, listed in parameters.items()}
        fullshard.local_view(made["fullshard"])  # no effect on torch's optimizers
        results[label] = medians({name: one.step for name, one in made.items()}, options.steps)
    clips = {name: fullshard.clip_grad_norm_ if name == "fullshard" else nn.utils.clip_grad_norm_ for name in parameters}
    results["clipping"] = medians(
        {name: lambda clip=clips[name], listed=listed: clip(listed, 1.0) for name, listed in parameters.items()}, options.steps
    )
    ema = fullshard.EMA(models["fullshard"], 0.999)
    averages = [parameter.detach().clone() for parameter in parameters["plain"]]
    weights = [parameter.detach() for parameter in parameters["plain"]]
    results["EMA"] = medians(
        {"fullshard": ema.update, "plain": lambda: torch._foreach_lerp_(averages, weights, 0.001)}, options.steps
    )
    for label, found in results.items():
        if "FSDP2" not in found:
            print(
                f"{label:18s} plain {found['plain']:6.2f} ms   fullshard {found['fullshard']:6.2f} ({found['fullshard'] / found['plain']:.2f})"
            )
            continue
        ratios = {name: found[name] / found["plain"] for name in ("fullshard", "FSDP2")}
        print(
            f"{label:18s} plain {found['plain']:6.2f} ms   fullshard {found['fullshard']:6.2f} ({ratios['fullshard']:.2f})   "
            f"FSDP2 {found['FSDP2']:6.2f} ({ratios['FSDP2']:.2f})"
        )
    dist.destroy_process_group()
    if options.json:
        print(record.line(results))


if __name__ == "__main__":
    main()
