"""Send weights to an inference engine, as in reinforcement learning: two ranks train, a third one runs the engine.

    torchrun --nproc-per-node 3 examples/rollout.py

The trainers stream full tensors to rank 0, which packs them into buffers and broadcasts the buffers to the engine. The engine
loads names and tensors as vLLM's models do: it receives the parts of a fused matrix (q, k and v) as separate tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard

TRAINERS, ENGINE = 2, 2
DIM, PACKED = 64, 64 << 10  # PACKED: bytes of a packed buffer; use some hundred MiB for a real model


class Attention(nn.Module):
    """Attention in the trainers: separate matrices for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class FusedAttention(nn.Module):
    """Attention in the engine: one matrix for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Engine(nn.Sequential):
    """An engine with the loader interface of vLLM's models: `load_weights(pairs)` copies each tensor to its place."""

    STACKED = (("qkv_proj", "q_proj", 0), ("qkv_proj", "k_proj", 1), ("qkv_proj", "v_proj", 2))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            for fused, part, number in self.STACKED:
                if part in name:
                    name = name.replace(part, fused)
                    parameters[name].data[number * DIM : (number + 1) * DIM].copy_(tensor)
                    break
            else:
                parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


# --- packed buffers: sender and receiver have the same list of names, shapes and dtypes ---

Told = list[tuple[str, tuple[int, ...], torch.dtype]]


def packs(told: Told) -> Iterator[Told]:
    """Split the list of tensors into packs of at most PACKED bytes (a larger tensor has its own pack)."""
    pack: Told = []
    for one in told:
        if pack and sum(prod(shape) * dtype.itemsize for _, shape, dtype in [*pack, one]) > PACKED:
            yield pack
            pack = []
        pack.append(one)
    yield pack


def send(tensors: Iterator[tuple[str, Tensor]], told: Told, group: dist.ProcessGroup) -> int:
    """Broadcast all tensors and return the number of broadcasts."""
    messages = 0
    for messages, pack in enumerate(packs(told), 1):  # noqa: B007
        parts = []
        for name, _, _ in pack:
            found, tensor = next(tensors)
            assert found == name
            # A copy, since the tensor may be a view of a bucket that iter_full reuses.
            parts.append(tensor.reshape(-1).view(torch.uint8).clone())
        dist.broadcast(torch.cat(parts), 0, group=group)
    assert next(tensors, None) is None
    return messages


def receive(told: Told, group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each entry of all packs."""
    for pack in packs(told):
        sizes = [prod(shape) * dtype.itemsize for _, shape, dtype in pack]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.broadcast(buffer, 0, group=group)
        for (name, shape, dtype), part in zip(pack, buffer.split(sizes)):
            yield name, part.view(dtype).view(shape)


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (TRAINERS,))  # all ranks create all groups, also ranks outside of them
    to_engine = dist.new_group([0, ENGINE])
    torch.manual_seed(0)
    model = nn.Sequential(*[Attention() for _ in range(4)]).to(device)
    told: Told = [(name, tuple(one.shape), torch.bfloat16) for name, one in model.state_dict().items()]
    x = torch.randn(2, 8, DIM, device=device)

    if rank == ENGINE:
        engine = Engine(*[FusedAttention() for _ in range(4)]).to(device, torch.bfloat16)
        for step in range(3):
            loaded = engine.load_weights(receive(told, to_engine, device))
            with torch.no_grad():
                print(f"engine, step {step}: {len(loaded)} tensors, output {engine(x.bfloat16()).float().norm().item():.4f}")
    else:
        fullshard.shard_model(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            weights = fullshard.iter_full(model, dtype=torch.bfloat16, to=0)
            if rank == 0:
                messages = send(weights, told, to_engine)
            else:
                list(weights)  # takes part in the collectives and yields nothing
            output = model(x)
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"trainer, step {step}: {len(told)} tensors in {messages} messages, output {output.norm().item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
