"""Memory of processes that load, save and stream: their shards, the buffer that the caller gives, five percent, and two huge pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exits import Rank, run_job
from harness import World, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard.foresight.recorder import AllocationWatch, peak_of_new

DIM, LAYERS = 2048, 20
BUFFER = 32 << 20  # a tenth of the checkpoint
MIB = 1 << 20
HUGE_PAGES = 4 * MIB  # the kernel may back memory by pages of 2 MiB, so each end of the buffer may take one more


def built(size: int, cut: str, *, dim: int = DIM, layers: int = LAYERS) -> nn.Module:
    """On meta."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(layers)])
    mesh = init_device_mesh("cpu", (2, size // 2) if cut == "hybrid" else (size,))
    place: Callable[[Any], Any] | None = (lambda parameter: Shard(1)) if cut == "columns" else None
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=mesh, shard_placement_fn=place)
    return model


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most since `watching` began."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


@contextmanager
def watching() -> Iterator[list[int]]:
    """By how many bytes resident memory grows at most."""
    grown: list[int] = []
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield grown
    grown.append(resident("VmHWM") - before)
    dist.barrier()


def shard_nbytes(model: nn.Module) -> int:
    return sum(p.to_local().numel() * p.element_size() for p in model.parameters())  # type: ignore[operator]


def small_first(rank: Rank, cut: str, folder: Path, options: dict[str, Any]) -> None:
    """A first use imports modules, starts threads and connects ranks."""
    model = built(rank.size, cut, dim=64, layers=2)
    model.to_empty(device="cpu")
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    fullshard.save_weights(model, folder, buffer_bytes=BUFFER, **options)
    fullshard.load_weights(built(rank.size, cut, dim=64, layers=2), folder, buffer_bytes=BUFFER, strict=False)


def loading(rank: Rank, cut: str, dtype: str | None) -> None:
    rank.begin()
    options = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    small_first(rank, cut, rank.folder / "small", options)
    with torch.no_grad():
        model = built(rank.size, cut)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.fill_(1)
    fullshard.save_weights(model, rank.folder / "large", **options)
    del model, parameter
    model = built(rank.size, cut)
    with watching() as grown:
        fullshard.load_weights(model, rank.folder / "large", buffer_bytes=BUFFER)
    rank.say("grown", nbytes=grown[0], shard=shard_nbytes(model), folder=str(rank.folder))


def saving(rank: Rank, cut: str, dtype: str | None, background: bool) -> None:
    rank.begin()
    options: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    small_first(rank, cut, rank.folder / "small", options)
    with torch.no_grad():
        model = built(rank.size, cut)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.fill_(1)
    with watching() as grown:
        saved = fullshard.save_weights(model, rank.folder / "large", buffer_bytes=BUFFER, background=background, **options)
        if background:
            saved.wait()  # type: ignore[union-attr]
    rank.say("grown", nbytes=grown[0], shard=shard_nbytes(model), folder=str(rank.folder))


def check(job: Any, *, shards: int) -> None:
    """shards: how many times what a rank has is allowed beside the buffer."""
    for rank in job:
        assert rank.code == 0, str(job)
        shutil.rmtree(rank.first("grown")["folder"], ignore_errors=True)
        told = rank.first("grown")
        most = shards * told["shard"] + BUFFER + 0.05 * (told["shard"] + BUFFER) + HUGE_PAGES
        print(f"rank {rank.rank}: {told['nbytes'] / MIB:.1f} MiB, shard {told['shard'] / MIB:.0f}, at most {most / MIB:.1f}")
        assert told["nbytes"] <= most, f"grown by {told['nbytes'] / MIB:.1f} MiB, at most {most / MIB:.1f}"


CUTS = [("rows", 2), ("columns", 2), ("hybrid", 4)]


@pytest.mark.rotates(6)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("cut, size", CUTS)
def test_loading_takes_shards_and_a_buffer(cut: str, size: int, dtype: str | None) -> None:
    check(run_job(loading, size, limit=120.0, ends_fast=True, cut=cut, dtype=dtype), shards=1)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("cut, size", CUTS)
def test_saving_takes_a_buffer(cut: str, size: int, dtype: str | None) -> None:
    check(run_job(saving, size, limit=120.0, ends_fast=True, cut=cut, dtype=dtype, background=False), shards=0)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("cut, size", CUTS)
def test_saving_in_the_background_takes_a_copy_of_the_rows_and_a_buffer(cut: str, size: int) -> None:
    check(run_job(saving, size, limit=120.0, ends_fast=True, cut=cut, dtype=None, background=True), shards=1)


@pytest.mark.rotates(16)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("cut, dim", [("rows", 512), ("columns", 512), ("rows", 30), ("columns", 30), ("hybrid", 512)])
@ranks(4)
def test_streaming_takes_the_buckets_under_way_and_the_largest_tensor(
    world: World, cut: str, dim: int, ahead: int, dtype: torch.dtype | None
) -> None:
    """Every allocation is counted."""
    model = built(world.size, cut, dim=dim)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    largest = dim * dim * (4 if dtype is None else 2)
    bucket = 3 * largest

    def stream() -> None:
        for _, tensor in fullshard.iter_full(model, bucket_bytes=bucket, ahead=ahead, dtype=dtype):
            assert tensor[0, 0] == 1
            del tensor  # which the next one would find here still

    stream()
    watch = AllocationWatch()
    stream()
    peak = peak_of_new(watch.stop())
    padding = 1.1 if dim == 30 else 1.001
    most = (1 + ahead) * bucket + largest
    assert peak <= padding * most + 10_000, f"{peak / largest:.2f} of the largest tensor, at most {most / largest:.2f}"


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("cut", ["rows", "columns", "hybrid"])
@ranks(2, 4)
def test_publishing_takes_the_shard_and_two_units(world: World, cut: str, dtype: torch.dtype | None) -> None:
    """A seal copies the shard, and nothing once it has the memory of a dropped version; a gather to one rank takes two units."""
    model = built(world.size, cut, dim=512)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    itemsize = 4 if dtype is None else 2
    unit, shard = 512 * 512 * itemsize, shard_nbytes(model) * itemsize // 4
    pub = fullshard.publish(model, dtype=dtype, keep=2)

    def gather() -> None:
        for _, tensor in pub.full(to=0, bucket_bytes=unit, ahead=0):
            assert tensor[0, 0] == 1
            del tensor

    def peak(call: Callable[[], Any]) -> int:
        watch = AllocationWatch()
        call()
        return peak_of_new(watch.stop())

    sealed = [peak(lambda step=step: pub.seal(step)) for step in range(4)]  # type: ignore[misc]
    assert shard <= sealed[0] <= shard + 20_000 and sealed[1] <= shard + 20_000 and max(sealed[2:]) < 20_000, sealed
    gather()
    gathered = peak(gather)
    assert gathered <= (2 * unit if world.rank == 0 else unit) + 20_000, f"{gathered / unit:.2f} units"
