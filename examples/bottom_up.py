"""Shard a model bottom-up: each `fully_shard` call makes a unit, which all-gathers its parameters when it runs.

torchrun --nproc-per-node 2 examples/bottom_up.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fullshard import counting, fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # ranks begin with the same weights; fully_shard raises if they differ

    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    full = sum(parameter.numel() for parameter in model.parameters())
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank, with the same global seed
    batch, losses = torch.randn(4, 16, 64, generator=data), []
    with counting(model) as messages:
        for _ in range(5):
            loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {mine:,} of {full:,} elements on this rank; {len(messages)} messages")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
