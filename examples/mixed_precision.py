"""Compute in bfloat16 with float32 shards, recompute activations in backward, and compile the blocks.

torchrun --nproc-per-node 2 examples/mixed_precision.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fullshard import MixedPrecisionPolicy, fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
    for index, block in enumerate(model):
        block.compile()  # before sharding and checkpointing, so that only the block itself is compiled
        model[index] = fully_shard(checkpoint_wrapper(block), mp_policy=policy)
    fully_shard(model, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # steps the float32 shards
    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
    batch, losses = torch.randn(8, 64, generator=data), []
    for _ in range(10):
        output = model(batch)
        loss = (output.float() - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}; computed in {output.dtype}, stored in {next(model.parameters()).dtype}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
