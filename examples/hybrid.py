"""HSDP and HFSDP: shard within a group of ranks (a node) for computing, and replicate or share over the groups.

torchrun --nproc-per-node 4 examples/hybrid.py
"""

import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import HFSDP, ZERO3, counting, fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

    for name, states in (("HSDP", ZERO3), ("HFSDP", HFSDP)):
        torch.manual_seed(0)  # all ranks build the same model
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
        for block in model:
            fully_shard(block, mesh=mesh, states=states)
        fully_shard(model, mesh=mesh, states=states)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
        with counting(model) as messages:
            for microbatch in range(4):
                last = microbatch == 3
                model.set_is_last_backward(last)  # HFSDP reduces over the groups in the last one,
                model.set_requires_all_reduce(last)  # and so does HSDP
                loss = (model(torch.randn(8, 64, generator=data)) - 1).square().mean() / 4
                loss.backward()
            optimizer.step()
        kinds = Counter(message.kind for message in messages)
        shards = sum(parameter.to_local().numel() for parameter in model.parameters())
        if dist.get_rank() == 0:
            print(f"{name}: loss {loss.item():.3f}, {shards} elements on this rank; {kinds['all_gather']} all-gathers, "
                  f"{kinds['reduce_scatter']} reduce-scatters, {kinds['all_reduce']} all-reduces per step")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
