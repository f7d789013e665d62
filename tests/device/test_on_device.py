"""The stream path, run: on the asynchronous device training is that of the CPU, bit for bit, however late its streams are."""

from __future__ import annotations

import copy
import gc
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rotation
import simulated
import torch
from exits import script
from harness import ROOMS, World, ranks
from models import batch, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import (
    HFSDP,
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    _torch,
    fully_shard,
    register_fsdp_forward_method,
)
from fullshard.comm.streams import CollectiveCall
from fullshard.compat import FullyShardedDataParallel
from fullshard.core import Message
from fullshard.core.heartbeat import Heartbeats
from fullshard.foresight.calibrate import _Bench
from fullshard.foresight.clock import message_seconds
from fullshard.weights import load_weights, save_weights

pytestmark = pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS)

COMPUTE = 0  # the stream that the device begins with


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build it once, before ranks look for it."""
    simulated.build()


class Block(nn.Module):
    """Of operators that are the same on the device, uneven on purpose."""

    def __init__(self, dim: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class Stack(nn.Module):
    def __init__(self, depth: int = 3, dim: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(5, dim), nn.Linear(dim, 3)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(mesh: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@contextmanager
def late(world: World, how: str, microseconds: int = 300) -> Iterator[None]:
    """Streams that lag behind in this block: none, compute, all others, or any at random, by a seed."""
    count = world.device.streams()
    slow = {"compute": [COMPUTE], "others": list(range(1, count))}.get(how, [])
    kind, _, seed = how.partition(" ")
    for stream in slow:
        world.device.slow(stream, microseconds)
    world.device.delay(400 if kind == "random" else 0, 30, 10 * int(seed or 0) + world.rank)
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        world.device.delay(0, 0, 1)
        for stream in slow:
            world.device.slow(stream, 0)
        assert not world.device.failure()


def train(
    world: World, model: nn.Module, home: str, *, steps: int = 3, microbatches: int = 1, clip: bool = False
) -> list[Tensor]:
    """Losses and gradient norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = []
    for step in range(steps):
        for micro in range(microbatches):
            model.set_requires_gradient_sync(micro == microbatches - 1)
            loss = square(model(world.mine(batch(step + 10 * micro)).to(home)))
            loss.backward()
            told.append(loss.detach())
        if clip:
            told.append(fullshard.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [value.to("cpu") for value in told]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.to_local().cpu() for name, parameter in model.named_parameters()}


def mesh_like(world: World, device: str, shape: tuple[int, ...]) -> Any:
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


LATE = ("none", "compute", "others", "random 1", "random 2", "random 3", "random 4")
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "kept full": ({"reshard_after_forward": False}, {}),
    "mixed precision": ({"mp_policy": LOW}, {}),
    "accumulation": ({}, {"microbatches": 3}),
    "accumulation, mixed precision": ({"mp_policy": LOW}, {"microbatches": 2}),
    "packed": ({"comm_policy": CommPolicy(direct_min_bytes=10**9)}, {}),
    "many in flight": ({"comm_policy": CommPolicy(reductions_in_flight=3, prefetch_bytes=10**6)}, {}),
    "offload": ({"offload_policy": CPUOffloadPolicy()}, {}),
    "offload to pageable memory": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"microbatches": 2}),
    "clipping": ({}, {"clip": True}),
    "clipping, offload": ({"offload_policy": CPUOffloadPolicy()}, {"clip": True}),
}


HYBRID = {name: PROGRAMS[name] for name in ("plain", "mixed precision", "accumulation", "offload", "clipping")} | {
    "two hops": ({"states": HFSDP}, {}),
    "two hops, accumulation": ({"states": HFSDP}, {"microbatches": 2}),
    "two hops, mixed precision": ({"states": HFSDP, "mp_policy": LOW}, {}),
}


@pytest.mark.parametrize(("name", "how"), rotation.share([(name, how) for name in PROGRAMS for how in LATE]))
@ranks(1, 2, device="sim")
def test_training_is_that_of_the_cpu_bit_for_bit(world: World, name: str, how: str) -> None:
    """Of two ranks: sums of more are in another order there."""
    options, program = PROGRAMS[name]
    ours = sharded(world.mesh, **options)
    expected = sharded(mesh_like(world, "cpu", (world.size,)), **options)
    told = train(world, expected, "cpu", **program)
    train(world, copy.deepcopy(ours), "sim", steps=1)  # so that its streams are there
    with late(world, how):
        mine = train(world, ours, "sim", **program)
    assert [torch.equal(one, other) for one, other in zip(mine, told)] == [True] * len(told)
    for parameter, value in values(expected).items():
        assert torch.equal(values(ours)[parameter], value), parameter


@pytest.mark.rotates(2)
@pytest.mark.parametrize("how", rotation.share(LATE))
@pytest.mark.parametrize("name", [*HYBRID])
@ranks(4, device="sim")
def test_hybrid_training_is_that_of_the_cpu_bit_for_bit(world: World, name: str, how: str) -> None:
    """Two shards, two replicas: each sum is of two. In two hops, the second one overtook the memory that it writes to."""
    options, program = HYBRID[name]
    ours = sharded(mesh_like(world, "sim", (2, 2)), **options)
    expected = sharded(mesh_like(world, "cpu", (2, 2)), **options)
    told = train(world, expected, "cpu", **program)
    with late(world, how):
        mine = train(world, ours, "sim", **program)
    assert [torch.equal(one, other) for one, other in zip(mine, told)] == [True] * len(told)
    for parameter, value in values(expected).items():
        assert torch.equal(values(ours)[parameter], value), parameter


# --- what the device found ---


@ranks(2, device="sim")
def test_a_heartbeat_that_is_over_as_it_is_sent_is_read_in_its_turn(world: World) -> None:
    """Behind an unread one it was read at once, so that its page was given out twice: the ranks "ran different units"."""

    def never_between(heartbeats: Heartbeats, *, keep: int | None = None, read: Any = Heartbeats.read) -> None:
        if keep is not None:  # whenever an optimizer asks, the device has not got there yet
            read(heartbeats, keep=keep)

    def over(heartbeats: Heartbeats, sent: Any, read: Any = Heartbeats.read_sent) -> None:
        torch.accelerator.synchronize()  # the host was late
        read(heartbeats, sent)

    with mock.patch.object(Heartbeats, "read", never_between), mock.patch.object(Heartbeats, "read_sent", over):
        train(world, sharded(world.mesh), "sim", steps=6)


@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="this torch tells of no write in place")
@ranks(2, device="sim")
def test_a_write_behind_gathered_does_not_overtake_its_copy(world: World) -> None:
    model = sharded(world.mesh, offload_policy=CPUOffloadPolicy())
    train(world, model, "sim", steps=1)
    before = model.state_dict()["inp.weight"].full_tensor().clone()
    torch.accelerator.synchronize()
    with late(world, "others", 20_000):
        with fullshard.gathered(model, grad=False) as full:
            with torch.no_grad():
                model.inp.weight.mul_(2.0)
            assert torch.equal(full["inp.weight"].cpu(), before)


class Shifted(Stack):
    """With a buffer, and values that do not depend on where it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.offset.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


def offloaded(world: World, device: str) -> nn.Module:
    with torch.device(device):
        torch.manual_seed(0)
        model = Shifted()
    options: dict[str, Any] = {"mesh": world.mesh, "offload_policy": CPUOffloadPolicy()}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def check_homes(world: World, model: nn.Module) -> None:
    assert {parameter.to_local().device.type for parameter in model.parameters()} == {"cpu"}
    assert model.offset.device.type == "sim"
    train(world, model, "sim", steps=1)


@ranks(2, device="sim")
def test_materialize_leaves_offloaded_shards_with_the_host(world: World) -> None:
    """They were left on the device, and the first forward raised."""

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)
        if isinstance(module, Shifted):
            module.reset_parameters()

    model = offloaded(world, "meta")
    fullshard.materialize(model, init=init)
    check_homes(world, model)


@ranks(2, device="sim")
def test_load_weights_leaves_buffers_on_the_device(world: World) -> None:
    """With offloaded shards all that was on meta went to the host, and the first forward raised."""
    folder = world.folder("weights")
    saved = offloaded(world, "cpu")
    save_weights(saved, folder)
    model = offloaded(world, "meta")
    load_weights(model, folder)
    for name, value in values(saved).items():
        assert torch.equal(values(model)[name], value), name
    assert model.offset.tolist() == [0.25] * 3
    check_homes(world, model)


class Nested(Stack):
    """Takes its inputs in containers, and has a method that is registered."""

    def forward(self, inputs: dict[str, Any], *, shift: Tensor) -> Tensor:
        x, (scale,) = inputs["x"], inputs["more"]
        return super().forward(x * scale + shift)

    def encode(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@ranks(1, 2, device="sim")
def test_inputs_on_the_host_are_moved_to_the_device(world: World, wrapped: bool, checkpointed: bool) -> None:
    """FSDP2, FSDP1 and DDP move those of the outermost module, and programs count on it. Here the first operator raised."""
    model = Nested()
    plain = copy.deepcopy(model)
    if wrapped:
        model = FullyShardedDataParallel(model, device_mesh=world.mesh, use_orig_params=True)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh)
        register_fsdp_forward_method(fully_shard(model, mesh=world.mesh), "encode")
    x = batch(0)
    inputs, shift = {"x": world.mine(x), "more": [torch.tensor(0.5)]}, torch.full((5,), 0.25)
    call: Any = partial(checkpoint, model, use_reentrant=False) if checkpointed else model
    output = call(inputs, shift=shift)
    assert output.device.type == "sim" and inputs["x"].device.type == "cpu", "the caller's own are as they were"
    square(output).backward()
    if not wrapped:
        assert torch.equal(model.encode(world.mine(x)).cpu(), plain.encode(world.mine(x)))
    assert torch.equal(output.detach().cpu(), plain(inputs, shift=shift).detach())


class Hosted(nn.Module):
    """A layer that takes a factor on the host, and saves it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(5, 5), []

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        self.seen.append(factor.device.type)
        return self.layer(x) * torch.exp(factor).to(x.device)


@ranks(1, 2, device="sim")
def test_a_recomputation_moves_what_the_forward_moved(world: World) -> None:
    """That of an inner unit has inputs that the model keeps on the host."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.factor = Hosted(), torch.tensor(0.5, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, self.factor, use_reentrant=False)

    model = Net()
    fully_shard(model.inner, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    for _ in range(2):
        square(model(world.mine(batch(0)))).backward()
    assert set(model.inner.seen) == {"cpu"} and len(model.inner.seen) == 4


@ranks(1, device="sim")
def test_packed_sequences_are_moved_and_a_move_that_raises_ends_the_forward(world: World) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, packed: Any) -> Tensor:
            assert packed.batch_sizes.device.type == "cpu" and packed.data.device.type == "sim"
            return self.layer(packed.data).sum()

        def plain(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model = fully_shard(Sums(), mesh=world.mesh)
    register_fsdp_forward_method(model, "plain")
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(4, 2, 5), [4, 3])
    model(packed).backward()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model.plain(torch.ones(2, 5, device="meta"))
    unit = model._fullshard_unit
    assert unit.residency.value == "sharded" and not unit.record.running
    model(packed).backward()


def train_away(world: World, model: nn.Module, how: str) -> dict[str, Tensor]:
    """Weights after steps whose backward runs on another stream, and whose memory is used again at once."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device="sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with late(world, how, 1000):
        for step in range(3):
            loss = square(model(world.mine(batch(step)).to("sim")))
            side.wait_stream(main)
            with side:
                loss.backward()
            sizes = [128 * size for size in range(1, 9) for _ in range(4)]
            kept = [torch.full((size,), 3.0, device="sim") for size in sizes]  # in memory that is free
            main.wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
            assert all(bool((one == 3.0).all()) for one in kept)
    return values(model)


@pytest.mark.parametrize("how", rotation.share(LATE))
@pytest.mark.parametrize("name", ["plain", "many in flight", "mixed precision", "packed"])
@ranks(2, device="sim")
def test_backward_may_run_on_another_stream_than_forward(world: World, name: str, how: str) -> None:
    """What was freed at its end was used again before the caller's stream had read it: wrong weights, silently."""
    options, _ = PROGRAMS[name]
    expected = sharded(mesh_like(world, "cpu", (world.size,)), **options)
    train(world, expected, "cpu")
    found = train_away(world, sharded(world.mesh, **options), how)
    for parameter, value in values(expected).items():
        assert torch.equal(found[parameter], value), parameter


@ranks(2, device="all sim")
def test_with_fsdp2_it_may_not(world: World) -> None:
    """Its weights are others than without that stream. Where they are not, this test and its line in docs/compatibility.md may go."""
    models = [Stack() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for module in (*model.blocks, model):
            torch.distributed.fsdp.fully_shard(module, mesh=world.mesh)
    train(world, models[0], "sim")
    found = train_away(world, models[1], "others")
    assert any(not torch.equal(found[name], value) for name, value in values(models[0]).items())


# --- what took every accelerator for CUDA, or for none ---


MEASURED = (
    *("fp32", "bf16", "fp8", "bandwidth", "launch", "attention", "attention_fp32"),
    *("link", "between", "latency", "overlap"),
)


@ranks(2, device="sim")
def test_calibrate_measures_an_accelerator_of_any_kind(world: World) -> None:
    """It measured the CPU, wherever there was no CUDA."""
    seen: list[torch.device] = []

    def measure(bench: Any) -> dict[str, float]:
        seen.append(bench.device)
        return dict.fromkeys(MEASURED, 2.0)

    with mock.patch.object(_Bench, "measure", measure):
        gpu, _ = fullshard.calibrate(world.folder("calibrate") / "machine.json")
    assert seen == [torch.device("sim", 0)]
    assert gpu.memory == 8192 << 20 and gpu.per_node == 1


@ranks(4, device="sim")
def test_calibrate_tells_links_inside_a_machine_from_those_between_machines(world: World) -> None:
    """It took the speed of collectives of all ranks for that inside of a machine, too."""
    nbytes, seconds = 1 << 30, {2: 0.25, 4: 3.0}  # of an all-gather among two and among four ranks

    def network(bench: Any, sizes: Any, group: Any) -> dict[str, float]:
        ranks = group.size()
        return {"link": nbytes * (ranks - 1) / ranks / seconds[ranks], "latency": 0.0, "overlap": 1.0}

    works = ("_products", "_bandwidth", "_launch", "_attention", "_float8")
    with ExitStack() as patched:
        patched.enter_context(mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}))
        patched.enter_context(mock.patch.object(_Bench, "_network", network))
        for name in works:
            patched.enter_context(mock.patch.object(_Bench, name, lambda *_: 1.0))
        gpu, net = fullshard.calibrate(world.folder("calibrate") / "machine.json")
    instant = replace(net, hop=0.0, step=0.0, base=0.0)
    for ranks_in, took in seconds.items():
        message = Message("all_gather", torch.float32, nbytes, 1, ranks_in)
        assert message_seconds(message, "gather", gpu, instant, (1, ranks_in, 1)) == pytest.approx(took)


VERIFY = """
import sys
sys.path[:] = {path!r}
import simulated
simulated.load()
import fullshard, torch
torch.distributed.Backend.backend_capability["gloo"].append("sim")  # as of CUDA
print(fullshard.verify(lambda: torch.nn.Linear(4, 2), torch.ones(3, 4), steps=1))
"""


def test_verify_starts_processes_for_the_cpu_where_there_is_an_accelerator() -> None:
    """They took the accelerator, which forked processes cannot use."""
    done = script(VERIFY.format(path=[*ROOMS, *sys.path]))
    assert done.stdout.startswith("same: losses, gradients and weights of 2 parameters over 1 steps on 2 ranks"), done.stderr


@ranks(2, device="sim")
def test_a_recorded_run_trains_the_same_and_says_when_the_device_did_what(world: World) -> None:
    """Its marks are events of the streams, and its memory is the device's."""
    models = [sharded(world.mesh) for _ in range(2)]
    told = train(world, models[0], "sim", steps=4)
    with late(world, "others"), fullshard.record(models[1], memory=True) as run:
        recorded = train(world, models[1], "sim", steps=4)
    assert all(torch.equal(one, other) for one, other in zip(told, recorded))
    for name, value in values(models[0]).items():
        assert torch.equal(values(models[1])[name], value), name
    assert {span.lane for span in run.spans} >= {"gather", "reduce", "wait"} and run.peak is not None and run.peak > 0
    assert all(0 <= span.start <= span.end for span in run.spans)
    assert sum(run.waiting.values()) > 0, "compute waits for gathers that are late"


@ranks(1, 2, device="sim")
def test_a_recorded_model_is_freed_when_it_goes(world: World) -> None:
    """Its last heartbeat is read in the next step, which another model may have."""
    model = sharded(world.mesh)
    with fullshard.record(model, memory=True):
        train(world, model, "sim", steps=2)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


# --- what holds the host ---


def held(world: World, model: nn.Module, *, microbatches: int = 1, keep_grads: bool = False) -> list[str]:
    """What the host waits for in two steps of training that have no end yet, each with the functions that wait."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    inputs = [world.mine(batch(step)).to("sim") for step in range(5)]
    found: list[str] = []

    def note(kind: str) -> None:
        frames = [f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_stack()[:-1]]
        found.append(f"{kind}: {' < '.join(reversed(frames[-6:]))}")

    for index, given in enumerate(inputs):
        if index == 3:  # memory is kept, and states of the optimizer are there
            torch.accelerator.synchronize()
            world.device.on_wait(note)
        for micro in range(microbatches):
            model.set_requires_gradient_sync(micro == microbatches - 1)
            square(model(given)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_grads)
    world.device.on_wait(None)
    torch.accelerator.synchronize()
    return [one for one in found if "over already" not in one]  # what is over was asked for before: it takes no time


@pytest.mark.rotates(4)
@pytest.mark.parametrize("how", LATE[:4])
@pytest.mark.parametrize("name", ["plain", "mixed precision", "offload", "accumulation"])
@ranks(2, device="sim")
def test_a_step_holds_the_host_only_for_what_the_host_reads(world: World, name: str, how: str) -> None:
    """Gradients of offloaded shards, as the backward ends or the optimizer steps. Otherwise the host goes on, up to one step ahead:
    of a device that is further behind it waits for the heartbeat of the step before.
    """
    with late(world, how):
        longer = held(world, sharded(world.mesh, **PROGRAMS[name][0]), **PROGRAMS[name][1])
    allowed = ["heartbeat.py:read_sent"]
    allowed += ["reducer.py:collect", "requests.py:check_step"] if name == "offload" else []
    assert all(any(place in one for place in allowed) for one in longer), longer


@pytest.mark.parametrize("keep_grads", [True, False])
@ranks(2, device="sim")
def test_a_parameter_that_this_rank_leaves_unused_holds_the_host_only_if_it_may_have_to_stay_without_grad(
    world: World, keep_grads: bool
) -> None:
    class Uneven(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.extra(super().forward(x)) if world.rank else super().forward(x)

    model = Uneven()
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh)
    with late(world, "others", 5_000):  # or what it waits for may be over already
        waits = held(world, fully_shard(model, mesh=world.mesh), keep_grads=keep_grads)
    longer = [one for one in waits if "heartbeat.py:read_sent" not in one]
    assert all("reducer.py:decide" in one for one in longer), longer
    assert bool(longer) is (world.rank == 0 and not keep_grads), longer


# --- that it would find something ---


@ranks(2, device="sim")
def test_a_wait_that_is_left_out_shows(world: World) -> None:
    """Compute that does not wait for gathers, which are late."""
    told = train(world, sharded(world.mesh), "sim", steps=1)
    model = sharded(world.mesh)
    with late(world, "others", 5_000), mock.patch.object(CollectiveCall, "wait", lambda call, block=False: None):
        wrong = train(world, model, "sim", steps=1)
    assert not torch.equal(wrong[0], told[0])
