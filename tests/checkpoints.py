"""Checkpoints that tests write, and models of every kind of cut that load and save them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fullshard
from fullshard.weights.boxes import TensorInfo
from fullshard.weights.headers import FileTensor, header_bytes
from fullshard.weights.key_map import MappedTensor
from fullshard.weights.layout import lay_out

# --- files ---


def write(path: Path, tensors: dict[str, Tensor]) -> int:
    """A file of safetensors. Returns the bytes of its data."""
    with path.open("wb") as file:
        file.write(header_bytes([TensorInfo(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()]))
        for one in tensors.values():
            file.write(bytes(one.contiguous().view(-1).view(torch.uint8).tolist()))
    return sum(one.numel() * one.itemsize for one in tensors.values())


def written(world: World, name: str, *files: dict[str, Tensor]) -> Path:
    """A folder with these files, written by the first rank."""
    folder = world.folder(name)
    if world.rank == 0:
        for number, tensors in enumerate(files):
            write(folder / f"model-{number}.safetensors", tensors)
    dist.barrier()
    return folder


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each read of a file at a place."""
    found: list[int] = []
    pread, preadv = os.pread, os.preadv

    def one(descriptor: int, nbytes: int, offset: int) -> bytes:
        data = pread(descriptor, nbytes, offset)
        found.append(len(data))
        return data

    def several(descriptor: int, buffers: Any, offset: int) -> int:
        found.append(preadv(descriptor, buffers, offset))
        return found[-1]

    os.pread, os.preadv = one, several
    try:
        yield found
    finally:
        os.pread, os.preadv = pread, preadv


def noted(into: list[tuple[int, int]]) -> Callable[[int, int], None]:
    """A `progress` that notes what it is told."""
    return lambda done, total: into.append((done, total))


def check_told(told: list[tuple[int, int]], nbytes: int) -> None:
    """What a `progress` was told grows, to all bytes of this rank."""
    done = [one for one, _ in told]
    assert done == sorted(set(done)) and {total for _, total in told} <= {nbytes}, told
    assert (done or [0])[-1] == nbytes


# --- models ---


class Net(nn.Module):
    """Uneven rows, a tie, a scalar, a buffer, one that no state dict has, and a column."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.column = nn.Parameter(torch.ones(7, 1))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("rope", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale) + self.mean.sum() + self.rope.sum() + self.column.sum()


def values() -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Net()
    state = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    state["head.weight"] = state["embed.weight"]
    return state


def saved() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in values().items() if name != "head.weight"}


def sharded(world: World, cut: str, *, meta: bool = True) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    mesh, options = world.mesh, {}
    if cut in ("hybrid", "all ranks"):
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    if cut == "all ranks":
        options["states"] = fullshard.HFSDP
    if cut == "columns":
        options["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.dim() == 2 else None
    if cut == "tensor":
        both = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        for index, block in enumerate(model.blocks):
            placement = Shard(index)
            weight = distribute_tensor(block.weight.detach(), both["tp"], [placement], src_data_rank=None)
            bias = distribute_tensor(block.bias.detach(), both["tp"], [Replicate()], src_data_rank=None)
            block.weight, block.bias = nn.Parameter(weight), nn.Parameter(bias)
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=mesh, **options)
    return fullshard.fully_shard(model, mesh=mesh, **options)


def check(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, expected[name].to(full.dtype)), name


CUTS = ["rows", "columns", "hybrid", "all ranks", "tensor"]


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files at and below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def expected(tensors: dict[str, Tensor], *, most: int = 10**9) -> dict[str, str]:
    """Hashes of the files with these tensors, written by one process."""
    layout, _ = lay_out(
        {name: MappedTensor.of(FileTensor(name, one.dtype, tuple(one.shape), "", 0)) for name, one in tensors.items()},
        max_shard_bytes=most,
        parameters=sum(one.numel() for name, one in tensors.items() if name != "mean"),
    )
    found = {}
    for file in layout.files:
        data = b"".join(bytes(tensors[one.name].contiguous().view(-1).view(torch.uint8).tolist()) for one in file.tensors)
        found[file.name] = hashlib.sha256(file.header + data).hexdigest()
    if layout.index is not None:
        found["model.safetensors.index.json"] = hashlib.sha256(layout.index.encode()).hexdigest()
    return found


def loaded(world: World, cut: str) -> Any:
    model = sharded(world, cut, meta=False)
    fullshard.load_weights(model, written(world, f"from {cut}", saved()))
    return model
