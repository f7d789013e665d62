"""Capture a step on an accelerator (forward, backward, clipping and AdamW), and replay it. On the CPU every step is eager.

torchrun --nproc-per-node 2 examples/captured.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fullshard import Graph, capture_obstacles, clip_grad_norm_, fully_shard


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model

    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    rate = torch.tensor(1e-2)  # in a tensor, since a graph keeps the value of a float
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=device.type != "cpu")

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
    static = torch.randn(8, 64, generator=data)
    losses = [step(static).item() for _ in range(2)]  # optimizers create their states, nccl its communicators
    obstacles = capture_obstacles(model, optimizer) if device.type != "cpu" else ["The CPU has no graphs."]
    graph = None
    if not obstacles:
        graph = Graph()
        with graph.capture():
            captured = step(static)
    for _ in range(8):
        rate.mul_(0.9)
        static.copy_(torch.randn(8, 64, generator=data))
        if graph is None:
            captured = step(static)
        else:
            graph.replay()
        losses.append(captured.item())
    if dist.get_rank() == 0:
        how = "8 replays" if graph is not None else f"8 more: {obstacles[0]}"
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in 2 eager steps and {how}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
