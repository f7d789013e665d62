"""`publish()`: shards say truthfully where they lie, sealed versions do not change, and changes lead from one to the next."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import CUTS, Net, contents, loaded, values
from exits import Rank, run_job, soon
from harness import World, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard import ShardPlacementResult
from fullshard.weights.rules import Convert, Keep, Merge, Rename, Split

RULES = [
    Rename("^blocks", "model.layers"),
    Merge(["layers[.](.*)[.]weight", "layers[.](.*)[.]bias"], r"fused.\1"),
]


def taken(world: World, cut: str) -> bool:
    return world.size % 2 == 0 or cut in ("rows", "columns")


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as torch gathers it; tied tensors once."""
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.state_dict().items()}
    return {name: one.clone() for name, one in state.items() if name != "head.weight"}


def put_together(world: World, shards: list[fullshard.weights.PublishedShard]) -> dict[str, Tensor]:
    """Full tensors of the parts of all ranks; parts that overlap are equal, and every element has one."""
    mine = [
        (one.tensor.name, one.tensor.shape, one.tensor.dtype, [(at, part.clone()) for at, part in one.parts]) for one in shards
    ]
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, mine)
    found: dict[str, Tensor] = {}
    for of_rank in zip(*every):
        name, shape, dtype, _ = of_rank[0]
        whole, known = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for other, its_shape, its_dtype, parts in of_rank:
            assert (other, its_shape, its_dtype) == (name, shape, dtype)
            for at, part in parts:
                where = tuple(slice(begin, begin + size) for begin, size in zip(at, part.shape))
                assert torch.equal(whole[where][known[where]], part[known[where]]), name
                whole[where], known[where] = part, True
        assert known.all(), name
        found[name] = whole
    return found


def stepped(model: Any, count: int = 1) -> None:
    """Steps that change some rows only: those of the ids in the batch, and everything else."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(count):
        model(torch.arange(3).view(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.rotates(4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
@ranks(1, 2, 3, 4, 8)
def test_shards_and_full_tensors_are_those_of_the_model(world: World, cut: str, dtype: torch.dtype | None) -> None:
    """Parts of all ranks make up the full tensors, DTensors of the described placements gather to them, and `full` yields them."""
    if not taken(world, cut):
        return
    model = loaded(world, cut)
    expected = {name: one.to(dtype or one.dtype) for name, one in full_state(model).items()}
    pub = fullshard.publish(model, dtype=dtype)
    version = pub.seal(7)
    with fullshard.counting(model) as messages:
        shards = list(pub.shards())
    assert not messages
    found = put_together(world, shards)
    state = pub.state_dict()
    streamed = {name: one.clone() for name, one in pub.full(version)}
    assert [one.name for one in pub.tensors] == list(streamed) == list(state)
    for name, whole in expected.items():
        assert torch.equal(found[name], whole) and torch.equal(streamed[name], whole), name
        value = state[name]
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, whole), name
    for one in shards:
        if one.tensor.mesh is not None:
            mesh, places, shape = one.tensor.mesh, one.tensor.placements, torch.Size(one.tensor.shape)
            stride = torch.empty(shape, device="meta").stride()
            made = DTensor.from_local(one.local, mesh, places, run_check=False, shape=shape, stride=stride)
            assert torch.equal(made.full_tensor(), expected[one.tensor.name]), one.tensor


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 8)
        self.experts = nn.Parameter(torch.randn(4, 6, 3))


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_experts_on_a_mesh_of_their_own_are_published_whole(world: World, dim: int) -> None:
    """Experts that a DTensor divides among ranks; plain experts that differ by rank have no name of their own, and raise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    model = Experts()
    expected = {name: one.detach().clone() for name, one in model.state_dict().items()}
    plain = Experts()
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)], src_data_rank=None))
    own = lambda p: ShardPlacementResult(Shard(dim), mesh["efsdp"]) if p.dim() == 3 else Shard(0)
    fullshard.fully_shard(model, mesh=mesh[("efsdp", "ep")]._flatten("dp"), shard_placement_fn=own)
    pub = fullshard.publish(model)
    first = pub.seal(0)
    found = put_together(world, list(pub.shards()))
    state = {name: one.clone() for name, one in pub.full(to=2)}
    for name, whole in expected.items():
        assert torch.equal(found[name], whole) and (world.rank != 2 or torch.equal(state[name], whole)), name
        assert torch.equal(pub.state_dict()[name].full_tensor(), whole), name
    with torch.no_grad():
        model.experts.to_local()[0] += 1.0
    pub.seal(1)
    changes = pub.changed(since=first, to=2)
    if world.rank == 2:
        changes.apply(state, first.digest)
    assert all(torch.equal(one, state[name]) for name, one in pub.full() if world.rank == 2)
    plain.experts = nn.Parameter(plain.experts.detach().chunk(2)[mesh.get_local_rank("ep")].clone())
    fullshard.fully_shard(plain, mesh=mesh, shard_placement_fn=own)
    with pytest.raises(ValueError, match="'experts'.*one tensor of this name"):
        fullshard.publish(plain)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("cut", CUTS)
@ranks(2, 4)
def test_one_rank_receives_each_shard_once(world: World, cut: str) -> None:
    model, receiver = loaded(world, cut), world.size - 1
    pub = fullshard.publish(model, dtype=torch.bfloat16)
    pub.seal(0)
    everything = {name: one.clone() for name, one in pub.full()}
    for bucket_bytes, ahead in ((1, 0), (300, 1), (None, 2)):
        with fullshard.counting(model) as messages:
            found = {name: one.clone() for name, one in pub.full(to=receiver, bucket_bytes=bucket_bytes, ahead=ahead)}
        assert list(found) == (list(everything) if world.rank == receiver else [])
        assert all(torch.equal(one, everything[name]) for name, one in found.items())
        own = sum(part.nbytes for one in pub.shards() for _, part in one.parts)
        received = sum(message.nbytes for message in messages)
        rounding = 64 * world.size * len(everything) + 8  # of each part in a message; and the message in which ranks meet
        total = sum(one.nbytes for one in everything.values())
        assert received <= (total - own + rounding if world.rank == receiver else 8), messages


@ranks(2)
def test_layers_are_contiguous_and_rules_join_them(world: World) -> None:
    model = loaded(world, "rows")
    state = full_state(model)
    pub = fullshard.publish(model, rules=[Merge(["blocks[.]0[.]weight", "blocks[.]1[.]weight"], "blocks.both"), RULES[0]])
    pub.seal(1)
    names = [one.name for one in pub.tensors]
    layers = [name.split(".")[2] for name in names if name.startswith("model.layers")]
    assert [one for one, _ in pairwise([*layers, ""]) if one] == layers
    found = dict(pub.full())
    assert torch.equal(found["model.layers.both"], torch.cat([state["blocks.0.weight"], state["blocks.1.weight"]]))
    joined = next(one for one in pub.tensors if one.name == "model.layers.both")
    assert "rules make it of" in joined.not_sharded and "rules make it of" in str(pub)
    assert torch.equal(put_together(world, list(pub.shards()))["model.layers.both"], found["model.layers.both"])
    assert torch.equal(pub.state_dict()["model.layers.both"], found["model.layers.both"])
    assert list(dict(pub.full(names=names[2:0:-1]))) == names[2:0:-1] and not dict(pub.full(names=[]))
    with pytest.raises(ValueError, match="names= has 'mine', which are not published"):
        pub.full(names=["mine"])


@pytest.mark.proves("24b")
@ranks(2)
def test_a_version_does_not_change_and_raises_once_it_is_dropped(world: World) -> None:
    model = loaded(world, "rows")
    model.blocks[0].requires_grad_(False)
    pub = fullshard.publish(model, keep=2)
    versions = [pub.seal(0)]
    kept = [{name: one.clone() for name, one in pub.full()}]
    reading = iter(pub.full(versions[0], bucket_bytes=1, ahead=0))
    next(reading)
    for step in (1, 2):
        stepped(model)
        versions.append(pub.seal(step))
        kept.append({name: one.clone() for name, one in pub.full()})
        stepped(model)
    for version, known in zip(versions[1:], kept[1:]):
        assert all(torch.equal(one, known[name]) for name, one in pub.full(version))
    for read in (lambda: next(reading), lambda: list(pub.full(versions[0])), lambda: next(pub.shards(versions[0]))):
        with pytest.raises(fullshard.StateError, match=r"Version 1 \(step 0\) was dropped"):
            read()
    frozen = [next(one for one in pub.shards(v) if one.tensor.name == "blocks.0.weight").local for v in versions[1:]]
    trained = [next(one for one in pub.shards(v) if one.tensor.name == "blocks.1.weight").local for v in versions[1:]]
    assert frozen[0].data_ptr() == frozen[1].data_ptr() and trained[0].data_ptr() != trained[1].data_ptr()
    assert len({version.digest for version in versions}) == 3


@pytest.mark.rotates(8)
@pytest.mark.parametrize("seed", range(70))
@ranks(1, 2, 4)
def test_changes_lead_from_version_to_version(world: World, seed: int) -> None:
    """Random steps, writes, seals, deltas, and consumers that restart: the consumer has the bits of the full state dict."""
    chance = random.Random(seed)
    cut = chance.choice([one for one in CUTS if taken(world, one)])
    model, dtype = loaded(world, cut), chance.choice([None, torch.bfloat16])
    rules = chance.choice([None, [Split("embed.weight", ["left", "right"], dim=1, sizes=(3, 4))], RULES[:1]])
    pub, receiver = fullshard.publish(model, rules=rules, dtype=dtype, keep=3), chance.randrange(world.size)
    consumer: dict[str, Tensor] = {}
    has: Any = None
    for step in range(5):
        what = chance.choice(["step", "write", "nothing", "all"] if cut != "tensor" else ["write", "nothing", "all"])
        if what == "step":
            stepped(model)
        elif what == "write":
            with torch.no_grad():
                model.embed.weight.mul_(1.5)
        elif what == "all":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        version = pub.seal(step)
        whole = {name: one.clone() for name, one in pub.full(version, to=receiver)}
        if has is None or has.is_dropped or chance.random() < 0.3:  # begins, comes too late, or was restarted
            consumer, has = {name: one.clone() for name, one in whole.items()}, version
            continue
        if chance.random() < 0.3:
            continue  # misses a version
        changes = pub.changed(version, since=has, to=receiver)
        if world.rank == receiver:
            itemsize = max(one.itemsize for one in whole.values())
            words = sum(
                int((one.view(-1) != consumer[name].view(-1)).sum()) for name, one in whole.items() if consumer[name].numel()
            )
            assert changes.nbytes <= min(words * (4 + itemsize) * 1.1 + 65536, sum(one.nbytes for one in whole.values()))
            with pytest.raises(fullshard.StateError, match="Load all"):
                changes.apply(consumer, "0" * 16)
            assert changes.apply(consumer, has.digest) == version.digest
            assert all(torch.equal(one, consumer[name]) for name, one in whole.items())
        else:
            assert not changes.elements and not changes.full and not changes.digest
        has = version


@pytest.mark.proves("24b")
@ranks(2)
def test_a_seal_within_a_step_raises_on_all_ranks_and_seals_nothing(world: World) -> None:
    model = loaded(world, "rows")
    pub = fullshard.publish(model)
    first = pub.seal(0)

    def refused(text: str) -> None:
        with pytest.raises(fullshard.StateError, match=text):
            pub.seal(1)
        assert pub.latest is first

    hook = model.blocks[0].register_forward_hook(lambda *_: refused("inside the forward"))
    out = model(torch.zeros(1, 3).long())
    hook.remove()
    with model.accumulate():
        out.sum().backward()
    refused("accumulated")
    model(torch.zeros(1, 3).long()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if world.rank == 0:
        with torch.no_grad():
            model.column.to_local().add_(1.0)
    refused("was written since the last version, or publish.., on some ranks only")
    if world.rank == 1:
        with torch.no_grad():
            model.column.to_local().add_(1.0)
    optimizer.step()
    assert pub.seal(1).number == 2


@ranks(2)
def test_a_rank_that_fails_seals_nothing_on_all(world: World) -> None:
    model = loaded(world, "rows")
    pub = fullshard.publish(model, keep=1)
    first = pub.seal(0)
    known = {name: one.clone() for name, one in pub.full()}
    stepped(model)
    if world.rank:
        model.added = nn.Parameter(torch.ones(2))
    with pytest.raises(fullshard.StateError, match="added, removed or changed since publish"):
        pub.seal(1)
    if world.rank:
        del model.added
    assert pub.latest is first and all(torch.equal(one, known[name]) for name, one in pub.full())
    assert pub.seal(1).number == 2


@pytest.mark.proves("24c")
@ranks(1, 2, 3)
def test_versions_and_changes_are_saved_for_readers_of_files(world: World) -> None:
    """A checkpoint per version with the digest beside it, and changes that lead from one to the next."""
    model, folder = loaded(world, "rows"), world.folder("versions")
    pub = fullshard.publish(model, rules=[Rename("^blocks", "layers")], dtype=torch.bfloat16)
    first = pub.seal(10)
    whole = Path(pub.save(folder, extra={"config.json": "{}"}))
    assert json.loads((whole / "publication.json").read_text()) == {"digest": first.digest, "step": 10}
    assert (whole / "config.json").read_text() == "{}"
    with torch.no_grad():
        model.embed.weight[2:3].add_(1.0) if world.size == 1 else model.embed.weight.mul_(2.0)
    known = {name: one.clone() for name, one in pub.full()}  # of the sealed version, which the write did not change
    reader = Net().bfloat16()
    fullshard.load_weights(reader, Path(folder) / "latest", key_map=[Rename("^layers", "blocks")])
    state = {name.replace("blocks", "layers"): one for name, one in reader.state_dict().items() if name != "head.weight"}
    assert all(torch.equal(state[name], one) for name, one in known.items())
    second = pub.seal(11)
    changes = fullshard.weights.Changes.load(pub.save(folder, since=first))
    assert (changes.base, changes.digest) == (first.digest, second.digest)
    with pytest.raises(fullshard.StateError, match="Load all"):
        changes.apply(state, second.digest)
    assert changes.apply(state, first.digest) == second.digest
    assert all(torch.equal(state[name], one) for name, one in pub.full())
    with pytest.raises(ValueError, match="names no base"):
        fullshard.weights.Changes.load(next(whole.glob("*.safetensors")))


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@ranks(2)
def test_changes_are_saved_whole_or_not_at_all_and_all_ranks_are_told(world: World, call: str) -> None:
    model, folder = loaded(world, "rows"), world.folder("failing")
    pub = fullshard.publish(model)
    first = pub.seal(0)
    stepped(model)
    pub.seal(1)
    pub.save(folder, since=first)
    before = contents(folder)
    failure = OSError(28, "No space left on device")
    planted = {"write": ("fullshard.weights.changes.header_bytes",), "fsync": ("os.fsync",), "replace": ("os.replace",)}[call]
    with mock.patch(planted[0], side_effect=failure if world.rank == 0 else None, wraps=None if world.rank == 0 else len):
        with pytest.raises(RuntimeError, match="No space left"):
            pub.save(folder, since=first)
    dist.barrier()
    assert contents(folder) == before
    assert pub.save(folder, since=first)


def dying(rank: Rank, place: str, victim: int) -> None:
    """A rank dies at a place of a seal, or of a save of changes."""
    rank.begin()
    mesh = rank.mesh()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=mesh)
    pub, folder = fullshard.publish(model, keep=3), rank.folder / "published"
    first = pub.seal(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    pub.seal(1)
    pub.save(folder, since=first)
    dist.barrier()

    rank.event()
    with ExitStack() as planted:
        if rank.rank == victim:
            planted.enter_context(mock.patch(place, side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)))
        pub.save(folder, since=first) if place in SAVING else pub.seal(2)


SAVING = ("fullshard.weights.changes.header_bytes", "os.fsync", "os.replace", "fullshard.weights.publish.find_changes")
SEALING = (
    "fullshard.weights.publish.tensors_of",
    "torch.empty",
    "torch._foreach_copy_",
    "fullshard.weights.publish.written_count",
)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("place", [*SAVING, *SEALING])
def test_a_rank_that_dies_in_a_seal_or_a_save_is_named_and_the_file_is_whole(place: str, tmp_path: Path) -> None:
    for victim in (0, 1) if place in SEALING or "find" in place else (0,):
        folder = tmp_path / str(victim)
        folder.mkdir()
        ranks_of_job = run_job(dying, 2, place=place, victim=victim, folder=folder)
        survivor = ranks_of_job[1 - victim]
        assert f"rank {victim}" in survivor.raised and survivor.seconds < soon(15.0), str(survivor)
        changes = fullshard.weights.Changes.load(folder / "published" / "changes-0-1.safetensors")
        assert changes.full or changes.elements


@pytest.mark.parametrize(
    "options, told",
    [
        ({"dtype": "bf16"}, "dtype must be"),
        ({"keep": 0}, "keep must be an int of at least 1"),
        ({"adapters_only": "yes"}, "adapters_only must be"),
        ({"rules": [Keep("nothing")]}, "leaves no tensor|matches"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.publish(Net(), **options)


@ranks(2)
def test_what_counts_of_writes_miss_is_sealed_too(world: World) -> None:
    """Frozen parameters that are replaced, or written by a collective, and buffers of other values on each rank."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    model.own = nn.Parameter(torch.zeros(2), requires_grad=False)
    fullshard.fully_shard(model, mesh=world.mesh, ignored_params={model.own})
    pub = fullshard.publish(model)
    first = pub.seal(0)
    state = {name: one.clone() for name, one in pub.full(to=1)}
    model.own = nn.Parameter(torch.ones(2), requires_grad=False)
    dist.all_reduce(model[0].weight.to_local())
    model[1].running_mean.fill_(world.rank + 1.0)
    if world.rank:
        model[1].running_var.mul_(3.0)  # buffers may be of one rank
    pub.seal(1)
    for to in (0, 1):
        found = dict(pub.full(to=to))
        if world.rank == to:
            assert torch.equal(found["own"], torch.ones(2)) and torch.equal(found["1.running_mean"], torch.ones(4))
            assert torch.equal(found["1.running_var"], torch.ones(4))
    weight = model[0].weight.full_tensor()
    changes = pub.changed(since=first, to=1)
    if world.rank == 1:
        changes.apply(state, first.digest)
        assert torch.equal(state["0.weight"], weight) and torch.equal(state["1.running_mean"], torch.ones(4))


@ranks(2)
def test_ranks_that_ask_for_different_changes_are_told(world: World) -> None:
    model = loaded(world, "rows")
    pub = fullshard.publish(model, keep=3)
    versions = [pub.seal(step) for step in range(2)]
    with pytest.raises(ValueError, match="to must be one of the ranks|0 to 1"):
        pub.changed(since=versions[0], to=5)
    with pytest.raises(fullshard.StateError, match="Ranks diverged"):
        pub.changed(since=versions[world.rank], to=0)


def test_changes_are_applied_whole_or_not_at_all() -> None:
    model = nn.Linear(3, 3)
    pub = fullshard.publish(model)
    first = pub.seal(0)
    with torch.no_grad():
        model.weight[0, 0] += 1.0
        model.bias[1] += 1.0
    pub.seal(1)
    changes = pub.changed(since=first)
    assert set(changes.elements) == {"weight", "bias"}
    for wrong in (torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2], torch.zeros(1, 3)):
        state = {"weight": torch.zeros(3, 3), "bias": wrong}
        with pytest.raises(ValueError, match="Expected 'bias' of the state to be contiguous"):
            changes.apply(state, first.digest)
        assert not state["weight"].any()


@ranks(2)
def test_an_unsharded_model_is_published_by_each_rank_for_itself(world: World) -> None:
    torch.manual_seed(world.rank)
    model, folder = nn.Linear(2, 2).requires_grad_(), world.folder("unsharded")
    pub = fullshard.publish(model)
    first = pub.seal(0)
    with torch.no_grad():
        model.weight.add_(1.0)
    pub.seal(1)
    changes = pub.changed(since=first, to=1)
    assert bool(changes.digest) is (world.rank == 1) and set(changes.full) == ({"weight"} if world.rank else set())
    pub.save(folder, since=first)
    dist.barrier()
    assert set(fullshard.weights.Changes.load(folder / "changes-0-1.safetensors").full) == {"weight"}


@ranks(2)
def test_changes_of_a_model_on_a_mesh_of_one_rank_are_found(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("models", "shard"))["shard"]
    model = fullshard.fully_shard(nn.Linear(2, 2), mesh=mesh)
    pub = fullshard.publish(model)
    first = pub.seal(0)
    with torch.no_grad():
        model.weight.add_(1.0)
    changes = pub.changed(pub.seal(1), since=first, to=world.rank)
    assert set(changes.full) | set(changes.elements) == {"weight"}


@ranks(2)
def test_rows_that_a_rule_quantizes_are_published_in_full(world: World) -> None:
    """Rows of 8 bits and their scales, as a quantized engine takes them: of the sealed values, not of those that are trained."""

    def quantized(weight: Tensor) -> Tensor:
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448.0
        return torch.cat([(weight / scales).to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)], 1)

    model, name = loaded(world, "rows"), "blocks.0.weight"
    columns = model.blocks[0].in_features
    rules = [Convert([name], "bytes", quantized), Split("bytes", [name, f"{name}_scale"], dim=1, sizes=(columns, 4))]
    pub = fullshard.publish(model, rules=rules, dtype=torch.bfloat16)
    expected = quantized(full_state(model)[name].bfloat16())
    first = pub.seal(0)
    state = {name: one.clone() for name, one in pub.full()}
    described = {one.name: one for one in pub.tensors}
    assert {name: (one.dtype, one.shape) for name, one in described.items()} == {
        name: (one.dtype, tuple(one.shape)) for name, one in state.items()
    }
    assert torch.equal(torch.cat([state[name], state[f"{name}_scale"]], 1), expected)
    assert "rules make it of" in described[name].not_sharded
    stepped(model)
    second = pub.seal(1)
    changes = pub.changed(since=first)
    if world.rank == 0:
        assert changes.apply(state, first.digest) == second.digest
    for name, one in pub.full():
        assert world.rank or torch.equal(one, state[name])


@ranks(2)
def test_rules_that_differ_between_ranks_are_refused_on_all(world: World) -> None:
    model = loaded(world, "rows")
    with pytest.raises(ValueError, match="other rules, dtype, keep"):
        fullshard.publish(model, rules=[Rename("^blocks", "layers")] if world.rank else None)
    with pytest.raises(ValueError, match="nothing"):
        fullshard.publish(model, rules=[Keep("nothing")] if world.rank else None)


@ranks(2)
def test_adapters_alone_are_published(world: World) -> None:
    model = loaded(world, "rows")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("column" in name)
    pub = fullshard.publish(model, adapters_only=True)
    pub.seal(0)
    assert [name for name, _ in pub.full()] == ["column"]


@ranks(4)
def test_m2n_does_not_take_uneven_strided_or_hybrid_shards(world: World) -> None:
    reasons = {}
    for cut in ("rows", "all ranks", "tensor"):
        pub = fullshard.publish(loaded(world, cut))
        reasons[cut] = {one.name: one.not_m2n for one in pub.tensors}
    assert "uneven" in reasons["rows"]["embed.weight"] and "0 dims" in reasons["rows"]["scale"]
    assert "ranks of its mesh are [0, 2, 1, 3]" in reasons["all ranks"]["embed.weight"]
    assert reasons["tensor"]["blocks.0.weight"]
    assert values()["mean"].shape == (5,) and not reasons["rows"]["mean"]
