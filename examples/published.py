"""A loop of reinforcement learning: two ranks train, and a generator in another process follows the versions that they publish.

    torchrun --nproc-per-node 2 examples/published.py

The generator samples sequences of digits with the newest weights that it finds, and says which version that is. The trainers
raise the probability of sequences that go up by one. Every third version is a whole checkpoint; the others are what changed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.weights.adapters.files import follow

DIGITS, LENGTH, STEPS = 10, 8, 36


def policy() -> nn.Sequential:
    """A model of the next digit, from one digit."""
    return nn.Sequential(nn.Embedding(DIGITS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, DIGITS))


@torch.no_grad()
def sampled(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
    """Return sequences that the model samples."""
    ids = torch.randint(DIGITS, (count, 1), generator=generator)
    for _ in range(LENGTH - 1):
        last = torch.softmax(model(ids[:, -1]), -1)
        ids = torch.cat([ids, torch.multinomial(last, 1, generator=generator)], 1)
    return ids


def generate(folder: str, trainer: Connection) -> None:
    """Run in the process of the generator: at each request, sample with the newest version that is there."""
    model, digest, chance = policy(), "", torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    while trainer.recv() == "sample":
        digest = follow(folder, state, digest)  # reads only what changed since
        model.load_state_dict(state)
        trainer.send((digest, sampled(model, 64, chance).tolist()))


def main() -> None:
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, mesh = dist.get_rank(), init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = policy().to(device)
    fullshard.shard_model(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    place: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    folder = place[0]

    pub = fullshard.publish(model, keep=4)
    steps = {pub.seal(0).digest: 0}
    pub.save(folder)
    here, there = multiprocessing.Pipe()
    if rank == 0:
        generator = multiprocessing.get_context("spawn").Process(target=generate, args=(folder, there), daemon=True)
        generator.start()
        here.send("sample")
    rewards, used = [], set()
    for step in range(1, STEPS + 1):
        batch: list[Any] = [here.recv() if rank == 0 else None]
        if rank == 0:
            here.send("sample" if step < STEPS else "end")  # it samples while this step trains
        dist.broadcast_object_list(batch)
        used.add(steps[batch[0][0]])  # the version that sampled these
        ids = torch.tensor(batch[0][1], device=device)
        reward = (ids[:, 1:] == (ids[:, :-1] + 1) % DIGITS).float()
        rewards.append(reward.mean().item())
        mine = slice(rank, None, dist.get_world_size())
        loss = nn.functional.cross_entropy(model(ids[mine, :-1].flatten()), ids[mine, 1:].flatten(), reduction="none")
        (loss * (reward[mine].flatten() - reward.mean())).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            before = pub.latest
            version = pub.seal(step)
            steps[version.digest] = step
            pub.save(folder, keep=1) if step % 6 == 0 else pub.save(folder, since=before)
    if rank == 0:
        print(f"reward {rewards[0]:.2f} to {sum(rewards[-5:]) / 5:.2f} with the weights of {len(used)} versions")
        generator.join()
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
