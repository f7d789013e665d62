"""HSDP: shard within a group of ranks (a node), replicate over the groups. Only all-reduces leave a node.

torchrun --nproc-per-node 4 examples/hybrid.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import counting, fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
    batch = torch.randn(8, 64, generator=data)
    with counting(model) as messages:
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
    kinds = [message.kind for message in messages]
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}; {kinds.count('all_gather')} gathers and {kinds.count('reduce_scatter')} reductions among "
              f"{mesh['shard'].size()} ranks, {kinds.count('all_reduce')} sums over {mesh['replicate'].size()} replicas")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
