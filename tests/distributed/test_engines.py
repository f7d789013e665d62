"""Published weights as inference engines take them: vLLM and NCCL M2N by recorded interfaces, parameter servers, and files."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import CUTS, loaded
from harness import World, ranks
from test_publish import full_state, stepped, taken
from torch import Tensor, nn

import fullshard
from fullshard.weights import Drop, Split
from fullshard.weights.adapters import checkpoint_engine, files, m2n
from fullshard.weights.headers import header_bytes

# --- vLLM 0.33: what its engines ask of a source, written from reading vllm/distributed/weight_transfer ---


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    """An engine calls `iter_full` or `iter_local`, whichever its transport needs, and compares with `metadata`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        assert isinstance(cls.__dict__.get("metadata"), cached_property)

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [one.name for one in self.metadata if one.owners is None or rank in one.owners]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


@dataclass
class SparseWeightPatch:
    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


@contextmanager
def vllm() -> Iterator[Any]:
    """The adapter, imported beside the recorded interface."""
    base, sparse = ModuleType("base"), ModuleType("sparse_nccl_engine")
    base.__dict__.update(WeightSource=WeightSource, ParamMeta=ParamMeta, Shard=Shard, Replicate=Replicate)
    sparse.__dict__.update(SparseWeightPatch=SparseWeightPatch)
    package, adapter = "vllm.distributed.weight_transfer", "fullshard.weights.adapters.vllm"
    parents = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", package)}
    parents[package].__dict__.update(base=base, sparse_nccl_engine=sparse)
    recorded = parents | {f"{package}.base": base, f"{package}.sparse_nccl_engine": sparse}
    sys.modules.update(recorded)
    try:
        yield importlib.import_module(adapter)
    finally:
        for name in (*recorded, adapter):
            sys.modules.pop(name)


def sent(source: Any, pairs: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """What a source yields on this rank: exactly what it owns, as its metadata says, in the order of the metadata."""
    found = {name: tensor.clone() for name, tensor in pairs}
    assert list(found) == source.owned_names(dist.get_rank())
    described = {one.name: one for one in source.metadata}
    assert all(found[name].dtype == described[name].dtype for name in found)
    return found


@pytest.mark.rotates(2)
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 4)
def test_vllm_gets_full_tensors_on_the_ranks_that_send(world: World, cut: str) -> None:
    if not taken(world, cut):
        return
    model = loaded(world, cut)
    with vllm() as adapter:
        pub = fullshard.publish(model)
        sources = {to: adapter.FullSource(pub, to) for to in (0, "all")}
        for step in range(2):
            version = pub.seal(step)
            expected = full_state(model)
            stepped(model) if cut != "tensor" else None
            for to, source in sources.items():
                found = sent(source, source.iter_full())
                assert len(found) == (len(pub.tensors) if to == "all" or world.rank == 0 else 0)
                for one in source.metadata:
                    assert one.name not in found or tuple(found[one.name].shape) == one.shape
                assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        told = mock.Mock()
        client = adapter.StepClient(told, pub)
        client.update_weights({"names": []})
        client.finish_weight_update()
        told.finish_weight_update.assert_called_once_with(weight_version=str(version.step))


@ranks(1, 2)
def test_vllm_orders_layers_as_its_groups(world: World) -> None:
    """What comes before the layers, then each layer of each stack in turn, then the rest: how it groups names by layer."""
    model: Any = nn.Module()
    for name in ("decoder", "encoder"):
        model.add_module(name, nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(11)]))
    model.head = nn.Linear(2, 2, bias=False)
    shared = [fullshard.weights.Rename("^head", "embed"), fullshard.weights.Sort()]
    pub = fullshard.publish(model, rules=shared)
    assert [one.name for one in pub.tensors] == [
        *(f"decoder.{layer}.weight" for layer in range(11)),
        *(f"encoder.{layer}.weight" for layer in range(11)),
        "embed.weight",
    ]


def own_slices(mesh: Any, placements: Any, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    """What a rank has of a tensor by mesh and placements, as M2N reads them: one dim of the mesh shards, evenly."""
    grid = torch.tensor(mesh)
    (place,) = (grid == rank).nonzero().tolist()
    found = [slice(0, size) for size in shape]
    for at, ranks_along, placement in zip(place, grid.shape, placements):
        if hasattr(placement, "dim"):
            size = shape[placement.dim] // ranks_along
            found[placement.dim] = slice(at * size, (at + 1) * size)
    return tuple(found)


@pytest.mark.parametrize("cut", CUTS)
@ranks(2, 4)
def test_m2n_gets_shards_as_they_lie_and_the_others_in_full(world: World, cut: str) -> None:
    """By the mesh and the placements that it is told, each rank sends its part of the full tensor."""
    model = loaded(world, cut)
    rules = [Drop("scale"), Split("embed.weight", ["left", "right"], dim=1, sizes=(3, 4))]
    pub = fullshard.publish(model, rules=rules)
    pub.seal(0)
    whole = {name: one.clone() for name, one in pub.full()}
    for one, source in m2n.sources(pub):
        at = own_slices(source["src_mesh"], source["src_placements"], one.shape, world.rank)
        assert torch.equal(source["src"], whole[one.name][at]), one
    with vllm() as adapter:
        local = adapter.ShardSource(pub)
        found = sent(local, local.iter_local())
        for one in local.metadata:
            assert one.owners in (None, tuple(range(world.size)))
            grid = torch.arange(world.size).view(one.mesh_shape or (world.size,)).tolist()
            at = own_slices(grid, one.placements or (Replicate(),), one.shape, world.rank)
            assert torch.equal(found[one.name], whole[one.name][at]), one
    with pytest.raises(ValueError, match="M2N takes tensors of 1 to 3 dims, got others in 'scale'"):
        next(m2n.sources(fullshard.publish(model)))


@ranks(2, 4)
def test_m2n_sends_even_shards_without_messages(world: World) -> None:
    model = nn.Linear(8, 8)
    weight = model.weight.detach().clone()
    dist.broadcast(weight, 0)
    model.weight.data.copy_(weight)
    fullshard.fully_shard(model, mesh=world.mesh)
    pub = fullshard.publish(model)
    pub.seal(0)
    with vllm() as adapter, fullshard.counting(model) as messages:
        source = adapter.ShardSource(pub)
        found = sent(source, source.iter_local())
    assert not messages
    for one in source.metadata:
        assert one.owners == tuple(range(world.size)) and one.placements == (Shard(0),)
    rows = 8 // world.size
    assert torch.equal(found["weight"], weight[world.rank * rows :][:rows])


@ranks(2)
def test_changes_are_patches_of_flat_positions(world: World) -> None:
    model = loaded(world, "rows")
    pub = fullshard.publish(model, dtype=torch.bfloat16)
    first = pub.seal(0)
    known = {name: one.clone() for name, one in pub.full()}
    stepped(model)
    pub.seal(1)
    with vllm() as adapter:
        found = adapter.patches(pub.changed(since=first))
    assert bool(found) is (world.rank == 0)
    for patch in found:
        assert patch.indices.dtype == torch.int32 and patch.indices.ndim == patch.values.ndim == 1
        assert patch.full_shape == tuple(known[patch.name].shape)
        known[patch.name].view(-1)[patch.indices.long()] = patch.values
    for name, one in pub.full():
        assert world.rank or torch.equal(known[name], one)


# --- checkpoint-engine 0.4.2 ---


class Server:
    """The recorded interface of a `ParameterServer`: what it pins is host memory."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Tensor]] = {}

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        files: list[str] | None = None,
        named_tensors: dict[str, Tensor] | None = None,
        use_shared_memory_pool: bool = False,
        use_inplace_pin_memory: bool = True,
    ) -> None:
        assert named_tensors is not None and all(one.device.type == "cpu" for one in named_tensors.values())
        self.held[checkpoint_name] = named_tensors


@ranks(1, 2, 4)
def test_parameter_servers_hold_each_tensor_once(world: World) -> None:
    model, server = loaded(world, "rows"), Server()
    pub = fullshard.publish(model)
    pub.seal(0)
    whole = {name: one.clone() for name, one in pub.full()}
    checkpoint_engine.register(server, "step-0", pub)
    stepped(model)
    pub.seal(1)
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, server.held["step-0"])
    assert [name for held in every for name in held] == list(whole)
    assert all(torch.equal(one, whole[name]) for held in every for name, one in held.items())
    sizes = [sum(one.nbytes for one in held.values()) for held in every]
    assert max(sizes) <= sum(sizes) / world.size + max(one.nbytes for one in whole.values())


# --- files ---


@pytest.mark.proves("24c")
@ranks(2)
def test_a_consumer_of_files_has_the_newest_version_whatever_it_had(world: World) -> None:
    model, folder = loaded(world, "rows"), world.folder("followed")
    pub = fullshard.publish(model, dtype=torch.bfloat16, keep=5)

    def check(state: dict[str, Tensor], digest: str) -> str:
        whole = {name: one.clone() for name, one in pub.full()}
        dist.barrier()
        found = files.follow(folder, state, digest)
        dist.barrier()
        assert found == pub.latest.digest and set(whole) == set(state)
        assert all(torch.equal(one, whole[name]) for name, one in state.items())
        return found

    with mock.patch.object(files, "PAUSE", 0.0), pytest.raises(FileNotFoundError):
        files.follow(folder, {}, "")
    first = checkpoint = pub.seal(0)
    pub.save(folder)
    early: dict[str, Tensor] = {}
    digest = check(early, "")
    kept = early["column"]
    for step in (1, 2):
        stepped(model)
        pub.seal(step)
        pub.save(folder, since=first)
        first = pub.latest
    late: dict[str, Tensor] = {}
    assert check(early, digest) == check(late, "") == check(dict(late), "0" * 16)
    assert early["column"] is kept  # written in place
    before = {name: one.clone() for name, one in early.items()}
    with mock.patch.object(fullshard.weights.Changes, "load", side_effect=AssertionError):
        assert files.follow(folder, early, pub.latest.digest) == pub.latest.digest  # reads nothing
    stepped(model)
    pub.seal(3)
    pub.save(folder, since=checkpoint)  # a second file of changes that begins at the checkpoint
    (folder / "changes-mine.safetensors").write_bytes(header_bytes([]))
    dist.barrier()
    assert check(early, first.digest) == check({}, "")
    stepped(model)
    pub.seal(4)
    pub.save(folder, keep=1)  # changes do not lead to it
    wrong = {"column": torch.zeros(1)}
    with pytest.raises(ValueError, match="Expected 'column' of the state"):
        files.follow(folder, wrong)
    assert set(wrong) == {"column"}
    check(early, pub.latest.digest[::-1])
    assert any(not torch.equal(one, before[name]) for name, one in early.items())


@pytest.mark.parametrize("seconds", [2.0])
def test_readers_beside_a_writer_never_see_two_versions_mixed(seconds: float, tmp_path: Path) -> None:
    """Each version has one value in all elements; checkpoints and changes come and go while two consumers follow."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    pub, over = fullshard.publish(model, keep=2), threading.Event()
    values: dict[str, float] = {}
    seen: list[set[str]] = [set(), set()]
    failures: list[BaseException] = []

    def write(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        before = pub.latest if step else None
        version = pub.seal(step)
        values[version.digest] = float(step)
        if before is None or step % 3 == 0:
            pub.save(tmp_path, keep=2)
            for old in sorted(tmp_path.glob("changes-*"), key=lambda path: path.stat().st_mtime_ns)[:-2]:
                old.unlink()
        else:
            pub.save(tmp_path, since=before)

    def read(known: set[str]) -> None:
        state: dict[str, Tensor] = {}
        digest = ""
        try:
            while not over.is_set():
                digest = files.follow(tmp_path, state, digest)
                assert {float(x) for one in state.values() for x in (one.min(), one.max())} == {values[digest]}
                known.add(digest)
        except BaseException as failure:
            failures.append(failure)

    write(0)
    readers = [threading.Thread(target=read, args=(known,)) for known in seen]
    for reader in readers:
        reader.start()
    end, step = time.monotonic() + seconds, 1
    while time.monotonic() < end and not failures:
        write(step)
        step += 1
    over.set()
    for reader in readers:
        reader.join()
    if failures:
        raise failures[0]
    assert step > 3 and all(len(known) > 1 for known in seen)
