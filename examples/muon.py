"""Muon for the matrices of a model and AdamW for the rest: the owner of a matrix orthogonalizes its update.

torchrun --nproc-per-node 2 examples/muon.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard, matrices_of, plan_owners


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(50, 64), *blocks, nn.Linear(64, 50))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)

    choice = matrices_of(model)  # by role: not the embedding, the output layer, norms and biases
    optimizers = [torch.optim.Muon(choice.matrices, lr=0.02), torch.optim.AdamW(choice.rest, lr=3e-3)]
    if dist.get_rank() == 0:
        print(f"{len(choice.matrices)} matrices for Muon, {len(choice.rest)} other parameters for AdamW")
        print(plan_owners(((str(number), matrix) for number, matrix in enumerate(choice.matrices)), dist.get_world_size()))

    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
    losses = []
    for _ in range(20):
        tokens = torch.randint(0, 50, (8, 16), generator=data)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
