"""Compare the host time per unit of fullshard and torch's FSDP2, minus that of the plain module, on a fake process group.

    python benchmarks/host.py [--parameters 2 11 50] [--worlds 8 64 512] [--units 32] [--repeats 30]

Also under ZERO2 and ZERO1 (two of fullshard's levels of ZeRO); an optimizer's step between the repeats, which is not timed, writes
the shards. The fake group moves no bytes between ranks, so only the host time of the engines remains. Figures are microseconds per unit for
one forward and backward, in one process. In each repeat all modules run once, in an order that rotates, and the plain one's time
is subtracted: a machine that changes its speed changes all of them. The medians are shown; `ratio` is that of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import copy
import time
from statistics import median

import record
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard


class Unit(nn.Module):
    """A unit of `parameters` parameters; 11, the default, are those of a decoder block.

    A decoder block has two norms, four attention matrices, three MLP matrices and two biases. Other numbers keep this mixture.
    """

    def __init__(self, dim: int = 16, parameters: int = 11) -> None:
        super().__init__()
        vectors = 4 * parameters // 11
        self.norms = nn.ParameterList([torch.ones(dim) for _ in range(vectors // 2)])
        self.weights = nn.ParameterList([torch.randn(dim, dim) / dim for _ in range(parameters - 2 * (vectors // 2))])
        self.biases = nn.ParameterList([torch.zeros(dim) for _ in range(vectors // 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, bias in zip(self.norms, self.biases):
            x = x * norm + bias
        for weight in self.weights:
            x = x @ weight
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--parameters", type=int, nargs="+", default=[2, 11, 50], help="of each unit")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for world in options.worlds:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        for parameters in options.parameters:
            for label, param, reduce in (("fp32", None, None), ("bf16", torch.bfloat16, torch.float32)):
                above, plain, ratio = measure(parameters, world, param, reduce, options)
                found[f"{label}, {parameters} parameters, {world} ranks"] = above
                print(
                    f"host time per unit, {label}, {parameters:2d} parameters, {world:3d} ranks: plain {plain:5.0f} us   above it: "
                    f"fullshard {above['fullshard']:5.0f} us   FSDP2 {above['FSDP2']:5.0f} us   "
                    f"ratio {ratio:.3f}   ZERO2 {above['ZERO2']:5.0f} us   ZERO1 {above['ZERO1']:5.0f} us",
                    flush=True,
                )
        dist.destroy_process_group()
    if options.json:
        print(record.line(found))


def measure(
    parameters: int, world: int, param: torch.dtype | None, reduce: torch.dtype | None, options: argparse.Namespace
) -> tuple[dict[str, float], float, float]:
    """Return the microseconds per unit, by library, above the plain module; those of the plain module; and fullshard's by FSDP2's."""
    mesh = init_device_mesh("cpu", (world,))
    base = nn.Sequential(*[Unit(parameters=parameters) for _ in range(options.units)])
    x = torch.randn(2, 16)
    plain, ours, theirs = copy.deepcopy(base), copy.deepcopy(base), copy.deepcopy(base)
    plain = plain.to(param) if param else plain
    for module in (*ours, ours):
        fullshard.fully_shard(
            module, mesh=mesh, mp_policy=fullshard.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        )
    for module in (*theirs, theirs):
        torch_fully_shard(module, mesh=mesh, mp_policy=TorchPolicy(param_dtype=param, reduce_dtype=reduce))
    models: dict[str, nn.Module] = {"plain": plain, "fullshard": ours, "FSDP2": theirs}
    for name, states in (("ZERO2", fullshard.ZERO2), ("ZERO1", fullshard.ZERO1)):
        models[name] = copy.deepcopy(base)
        policy = fullshard.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        for module in (*models[name], models[name]):
            fullshard.fully_shard(module, mesh=mesh, mp_policy=policy, states=states)
    times: dict[str, list[float]] = {name: [] for name in models}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.0) for name, model in models.items()}
    inputs = x.to(param) if param else x
    order = [*models]
    for repeat in range(options.repeats + 5):
        for name in order:
            start = time.perf_counter()
            models[name](inputs).sum().backward()
            if repeat >= 5:
                times[name].append((time.perf_counter() - start) / options.units * 1e6)
            optimizers[name].step()
            for parameter in models[name].parameters():
                parameter.grad = None
        order.append(order.pop(0))
    above = {name: [took - alone for took, alone in zip(times[name], times["plain"])] for name in models if name != "plain"}
    ratio = median(ours / theirs for ours, theirs in zip(above["fullshard"], above["FSDP2"]))
    return {name: median(values) for name, values in above.items()}, median(times["plain"]), ratio


if __name__ == "__main__":
    main()
