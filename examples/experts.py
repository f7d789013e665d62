"""Train a mixture of experts: a rank without tokens for an expert joins it, so that all ranks take part in its collectives.

torchrun --nproc-per-node 2 examples/experts.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import fully_shard


class Experts(nn.Module):
    """A mixture of experts: the router chooses one expert for each token."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(count)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[int]]:
        weights = self.router(tokens).softmax(-1)
        chosen = weights.argmax(-1)
        out, ran = torch.zeros_like(tokens), []
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(tokens[mine]) * weights[mine, index, None])
                ran.append(index)
            else:
                out = out + expert.join()  # join() returns a zero, whose backward takes part in the expert's reduction
        return out, ran


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks build the same model
    model = Experts(16, 4)
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator(device).manual_seed(dist.get_rank())  # different data on each rank
    tokens, losses = torch.randn(3, 16, generator=data), []
    for _ in range(10):
        output, ran = model(tokens)
        loss = (output - tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} to {losses[-1]:.3f}; its tokens went to the experts {ran}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
