"""Deferred initialisation: build a model without memory, shard it, then allocate and initialise it. No rank holds all of it.

torchrun --nproc-per-node 2 examples/meta_init.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    with torch.device("meta"):  # shapes without memory
        model = nn.Sequential(nn.Embedding(1000, 64), *[nn.Linear(64, 64) for _ in range(3)], nn.Linear(64, 1000))
    for layer in model:
        fullshard.fully_shard(layer, mesh=mesh)
    fullshard.fully_shard(model, mesh=mesh)
    # Allocate this rank's shards and initialise them by reset_parameters() of the modules. The values do not depend on the
    # number of ranks.
    fullshard.materialize(model, device, seed=0)

    with fullshard.full_params(model):
        total = model[0].weight.double().sum().item()
    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
    tokens = torch.randint(1000, (2, 8), device=device, generator=data)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    if dist.get_rank() == 0:
        print(
            f"sum of the embedding {total:.6f}; loss {loss.item():.3f}; {model[0].weight.to_local().shape[0]} rows on this rank"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
