"""Levels of ZeRO: the same steps under ZERO3, ZERO2 and ZERO1, and what each of them sends.

torchrun --nproc-per-node 2 examples/levels.py
"""

import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from fullshard import ZERO1, ZERO2, ZERO3, counting, fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model

    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank

    for states in (ZERO3, ZERO2, ZERO1):
        model.set_states(states)  # or fully_shard(..., states=states)
        for _ in range(2):
            with counting(model) as messages:
                for microbatch in range(4):
                    model.set_is_last_backward(microbatch == 3)  # under ZERO1 only the last one reduces
                    loss = (model(torch.randn(8, 64, generator=data)) - 1).square().mean() / 4
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        kinds = Counter(message.kind for message in messages)  # of the second step
        if dist.get_rank() == 0:
            print(f"{states}: {kinds['all_gather']} all-gathers and {kinds['reduce_scatter']} reduce-scatters per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
