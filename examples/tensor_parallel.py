"""2-D parallelism: tensor parallelism within a node, sharding over the nodes. The parameters are DTensors on both mesh dims.

torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tensor"))

    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)])
    for block in model:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # All ranks of a tensor-parallel group need the same batch, so the seed is the rank on the other mesh dim.
    data = torch.Generator(device).manual_seed(mesh["shard"].get_local_rank())
    batch, losses = torch.randn(8, 32, generator=data), []
    for _ in range(10):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        weight = model[0][0].weight
        print(
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}; a weight has {weight.placements} and {tuple(weight.to_local().shape)} here"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
