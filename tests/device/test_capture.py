"""A step that is captured: N replays are N eager steps, bit for bit, and what is wrong around a replay raises by name."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import time
import traceback
import weakref
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import simulated
import torch
import torch.distributed as dist
from harness import World, ranks
from models import square
from test_on_device import LOW, Block, Stack, late, mesh_like, values
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import HFSDP, ZERO1, ZERO2, CheckPolicy, CommPolicy, CPUOffloadPolicy, StateError, _torch, fully_shard
from fullshard.comm.streams import CollectiveCall, DeviceStream, Streams
from fullshard.compat import FullyShardedDataParallel
from fullshard.core import Fingerprint, Runtime, UnitName
from fullshard.core.heartbeat import Heartbeats
from fullshard.ext.capture import Follower

pytestmark = pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS)
sends_to_itself = pytest.mark.skipif(
    _torch.VERSION < (2, 13), reason="before torch 2.13 stages of one rank send to each other, which gloo cannot do"
)

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01, device="sim"), capturable=True, foreach=True)


class Recomputed(Stack):
    """Recomputes its blocks."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.head(x)


class Reentrant(Recomputed):
    reentrant = True


class Compiled(Stack):
    """Its blocks, which are units, are compiled."""


class Tied(Stack):
    """Frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.weight.requires_grad_(False)
        self.blocks[1].scale = self.blocks[0].scale


def build(
    world: World, *, shape: tuple[int, ...] | None = None, kind: type[Stack] = Stack, keep: bool = False, **o: Any
) -> Any:
    torch.manual_seed(0)
    model, mesh = kind(), mesh_like(world, "sim", shape or (world.size,))
    if kind is Compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    for block in [] if kind is Tied else model.blocks:
        fully_shard(block, mesh=mesh, **o)
    fully_shard(model, mesh=mesh, **o)
    if keep:
        model.set_keep_unsharded_storage(True)
    return model


def wrapped(world: World, **o: Any) -> Any:
    """FSDP1's wrapper around each block, and around all."""
    torch.manual_seed(0)
    model = Stack()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, device_mesh=world.mesh, use_orig_params=True, **o)
    return FullyShardedDataParallel(model, device_mesh=world.mesh, use_orig_params=True, **o)


def parallel(world: World, **o: Any) -> Any:
    """Tensor parallelism over half of the ranks."""
    mesh = init_device_mesh("sim", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Stack()
    model.blocks = nn.ModuleList(Block(7, 14) for _ in range(3))  # even: torch refuses activations that are not
    model.to("sim")
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], **o)
    return fully_shard(model, mesh=mesh["dp"], **o)


def data(world: World, index: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * world.rank + index)).to("sim")


def inputs(world: World, index: int, micros: int = 1) -> Tensor:
    return torch.stack([data(world, 10 * index + micro) for micro in range(micros)])


class Job:
    """A model and its optimizer.

    captured: "step", or "backward" without the step of the optimizer.       micros: microbatches of a step.
    optimizer: of all parameters, or "hooks" for one of each parameter that steps in its hook.
    clip: "", by "fullshard" or by "torch".        calls: forwards before each backward.        finalize: by the caller.
    """

    def __init__(
        self,
        world: World,
        *,
        model: Callable[..., Any] = build,
        optimizer: Optimizer | str = adamw,
        captured: str = "step",
        clip: str = "",
        micros: int = 1,
        calls: int = 1,
        finalize: bool = False,
        **o: Any,
    ) -> None:
        self.world, self.micros, self.clip, self.calls, self.finalize = world, micros, clip, calls, finalize
        self.whole = captured == "step"
        self.model = model(world, **o)
        if finalize:
            self.model.set_manual_backward_finalization(True)
        self.hooked = isinstance(optimizer, str)
        parameters = list(self.model.parameters())
        if isinstance(optimizer, str):
            self.optimizers = [self.in_hook(parameter) for parameter in parameters]
        else:
            self.optimizers = [optimizer(parameters)]

    @staticmethod
    def in_hook(parameter: Any) -> torch.optim.Optimizer:
        optimizer = sgd([parameter])

        def step(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
        return optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def backwards(self, x: Tensor) -> Tensor:
        losses = []
        for micro in range(self.micros):
            if self.micros > 1:
                self.model.set_requires_gradient_sync(micro == self.micros - 1)
            if self.finalize:
                self.model.set_is_last_backward(micro == self.micros - 1)
            losses.append(sum(square(self.model(call * x[micro])) for call in range(1, 1 + self.calls)))
            losses[-1].backward()
        if self.finalize:
            self.model.finalize_backward()
        if self.clip == "fullshard":
            losses.append(fullshard.clip_grad_norm_(self.model.parameters(), 0.1))
        elif self.clip:
            losses.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1).full_tensor())
        return torch.stack([loss.detach() for loss in losses])

    def update(self) -> None:
        if not self.hooked:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def step(self, index: int) -> Tensor:
        losses = self.backwards(inputs(self.world, index, self.micros)).cpu()
        self.update()
        return losses

    def evaluate(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.model(data(self.world, 500 + index)).cpu()

    def capture(self, **options: Any) -> None:
        self.x, self.graph = inputs(self.world, 0, self.micros).clone(), fullshard.Graph()
        with self.graph.capture(**options):
            self.losses = self.backwards(self.x)
            if self.whole:
                self.update()

    def replay(self, index: int) -> Tensor:
        self.x.copy_(inputs(self.world, index, self.micros))
        self.graph.replay()
        if not self.whole:
            self.update()
        return self.losses.cpu()


def states(job: Job) -> list[Tensor]:
    every = [state for optimizer in job.optimizers for state in optimizer.state.values()]
    found = [value for state in every for value in state.values() if isinstance(value, Tensor)]
    return [getattr(value, "_local_tensor", value).cpu() for value in found]


def assert_same(mine: Job, other: Job, what: str) -> None:
    for name, value in values(other.model).items():
        assert torch.equal(values(mine.model)[name], value), (what, name)
    assert all(torch.equal(one, two) for one, two in zip(states(mine), states(other), strict=True)), what


QUIET = CheckPolicy(heartbeat=False)
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "without heartbeats": {"check_policy": QUIET},
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "in a smaller group": {"reshard_after_forward": 2},
    "storage kept": {"keep": True},
    "ZERO1": {"states": ZERO1},
    "ZERO2": {"states": ZERO2},
    "ZERO2, optimizer outside": {"states": ZERO2, "captured": "backward"},
    "optimizer outside": {"captured": "backward"},
    "momentum": {"optimizer": sgd},
    "mixed precision": {"mp_policy": LOW},
    "clipping": {"clip": "fullshard"},
    "clipping by torch": {"clip": "torch"},
    "accumulation": {"micros": 3},
    "recomputed": {"kind": Recomputed},
    "recomputed, reentrant": {"kind": Reentrant},
    "frozen and tied": {"kind": Tied},
    "compiled blocks": {"kind": Compiled},
    "several forwards": {"calls": 2},
    "optimizers in hooks": {"optimizer": "hooks"},
    "finalized by the caller": {"finalize": True, "micros": 2},
    "FSDP1's wrapper": {"model": wrapped},
    "prefetching": {"comm_policy": CommPolicy(reductions_in_flight=3, prefetch_bytes=10**6)},
}
HYBRID: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "two hops": {"states": HFSDP},
    "two hops, optimizer outside": {"states": HFSDP, "captured": "backward"},
}


def check_in_turn(world: World, how: str, **options: Any) -> None:
    """Evaluations (v), replays (r) and eager steps (e)."""
    expected, mine = Job(world, **options), Job(world, **options)
    for index in range(2):
        assert torch.equal(mine.step(index), expected.step(index))
    assert torch.equal(mine.evaluate(0), expected.evaluate(0)), "kept units are current when the capture begins"
    queue = Runtime.all_of_thread()[0].communicator.wait_state
    known = set() if queue is None else set(queue.in_flight)
    mine.capture()
    assert queue is None or set(queue.in_flight) <= known, "captured calls are shown to the watchdog"
    with late(world, how):
        for index, turn in enumerate("vrevrrevver", 2):
            if turn == "v":
                assert torch.equal(mine.evaluate(index), expected.evaluate(index)), index
                continue
            losses = mine.replay(index) if turn == "r" else mine.step(index)
            assert torch.equal(losses, expected.step(index)), (turn, index)
            assert_same(mine, expected, f"{turn} {index}")


@pytest.mark.rotates(64)
@pytest.mark.parametrize("how", ["none", "random 1", "random 2", "random 3", "random 4"])
@pytest.mark.parametrize("name", POLICIES)
@ranks(1, 2, 3, device="sim")
def test_replays_eager_steps_and_evaluations_in_turn_are_eager_steps(world: World, name: str, how: str) -> None:
    kept = POLICIES[name].get("reshard_after_forward")
    if type(kept) is not int or world.size % kept == 0:  # a smaller group divides the ranks
        check_in_turn(world, how, **POLICIES[name])


@pytest.mark.rotates(8)
@pytest.mark.parametrize("how", ["none", "random 1", "random 2"])
@pytest.mark.parametrize("name", HYBRID)
@ranks(4, device="sim")
def test_replays_on_hybrid_meshes_are_eager_steps(world: World, name: str, how: str) -> None:
    check_in_turn(world, how, shape=(2, 2), **HYBRID[name])


@pytest.mark.rotates(2)
@pytest.mark.parametrize("how", ["none", "random 1"])
@ranks(4, device="sim")
def test_replays_with_tensor_parallelism_are_eager_steps(world: World, how: str) -> None:
    check_in_turn(world, how, model=parallel)


@pytest.mark.parametrize(
    "name",
    [
        "Schedule1F1B",
        pytest.param("ScheduleInterleaved1F1B", marks=sends_to_itself),
        pytest.param("ScheduleInterleavedZeroBubble", marks=sends_to_itself),
    ],
)
@ranks(1, device="sim")
def test_a_schedule_of_a_pipeline_may_run_in_a_graph(world: World, name: str) -> None:
    def job() -> Any:
        torch.manual_seed(0)
        count = 1 if name == "Schedule1F1B" else 2
        parts = [nn.Sequential(Block(), Block()) for _ in range(count)]
        stages = []
        for index, part in enumerate(parts):
            for block in part:
                fully_shard(block, mesh=world.mesh, reshard_after_forward=False)
            fully_shard(part, mesh=world.mesh, reshard_after_forward=False)
            stages.append(pipelining.PipelineStage(part, index, count, torch.device("sim"), group=world.mesh.get_group()))
        made = getattr(pipelining, name)(
            stages if count > 1 else stages[0], 4, loss_fn=lambda out, target: square(out - target)
        )
        return made, parts, adamw([parameter for part in parts for parameter in part.parameters()])

    def step(schedule: Any, parts: Any, optimizer: Any, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(x[0], target=x[1], losses=losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return torch.stack([loss.detach() for loss in losses])

    def batches(index: int) -> Tensor:
        return torch.randn(2, 8, 7, generator=torch.Generator().manual_seed(index)).to("sim")

    expected, mine = job(), job()
    for index in range(2):
        assert torch.equal(step(*mine, batches(index)).cpu(), step(*expected, batches(index)).cpu())
    x, graph = batches(0).clone(), fullshard.Graph()
    with graph.capture():
        losses = step(*mine, x)
    for index in range(2, 5):
        x.copy_(batches(index))
        graph.replay()
        assert torch.equal(losses.cpu(), step(*expected, batches(index)).cpu())
        for one, other in zip(mine[1], expected[1]):
            assert all(torch.equal(a, b) for a, b in zip(values(one).values(), values(other).values(), strict=True))


@pytest.mark.rotates(3)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("level", [fullshard.ZERO3, ZERO1, ZERO2])
@ranks(2, device="sim")
def test_a_step_may_be_a_graph_for_each_microbatch(world: World, level: Any, shares: bool) -> None:
    expected, mine = (Job(world, micros=3, states=level) for _ in range(2))
    for index in range(2):
        mine.step(index), expected.step(index)
    x, graphs, losses = inputs(world, 0, 3).clone(), [], []
    for micro in range(3):
        graphs.append(fullshard.Graph())
        with graphs[-1].capture(pool=graphs[0].pool() if shares and micro else None):
            mine.model.set_requires_gradient_sync(micro == 2)
            loss = square(mine.model(1 * x[micro]))  # as Job does: kernels round by the alignment of their inputs
            loss.backward()
            losses.append(loss.detach())
    for index in range(2, 5):
        x.copy_(inputs(world, index, 3))
        for graph in graphs:
            graph.replay()
        mine.update()
        assert torch.equal(torch.stack(losses).cpu(), expected.step(index))
        assert_same(mine, expected, str(index))


@pytest.mark.parametrize("how", ["step", "write"])
@ranks(2, device="sim")
def test_a_graph_that_only_writes_to_parameters_counts(world: World, how: str) -> None:
    """Its replays leave no unit with old weights."""
    expected, mine = Job(world, states=ZERO2), Job(world, states=ZERO2)
    for index in range(2):
        mine.step(index), expected.step(index)

    def update(job: Job) -> None:
        job.update()
        if how == "write":
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.mul_(0.5)

    def backwards(job: Job, index: int) -> Tensor:
        return job.backwards(inputs(world, index)).cpu()

    assert torch.equal(backwards(mine, 2), backwards(expected, 2))
    graph = fullshard.Graph()
    with graph.capture():
        update(mine)
    for index in range(3, 6):
        graph.replay()
        update(expected)
        assert torch.equal(mine.evaluate(index), expected.evaluate(index))
        assert torch.equal(backwards(mine, index), backwards(expected, index))
    assert_same(mine, expected, "behind the replays")


@ranks(2, device="sim")
def test_after_install_graphs_of_torch_are_followed_and_not_before(world: World) -> None:
    expected, mine = Job(world, states=ZERO2), Job(world, states=ZERO2)
    for index in range(2):
        mine.step(index), expected.step(index)
    x, graph = inputs(world, 0).clone(), torch.sim.Graph()  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="fullshard.Graph.*install"), torch.sim.graph(graph):  # type: ignore[attr-defined]
        mine.backwards(x)
    with fullshard.installed():
        with pytest.raises(TypeError):  # this capture never begins, and is followed no longer
            torch.sim.Graph().capture_begin("no pool")  # type: ignore[attr-defined]
        with torch.sim.graph(graph := torch.sim.Graph()):  # type: ignore[attr-defined]
            with pytest.raises(StateError, match="is being captured"):
                fullshard.Graph().capture_begin()
            losses = mine.backwards(x)
            mine.update()
    for index in range(2, 6):
        x.copy_(inputs(world, index))
        with fullshard.installed() if index < 4 else contextlib.nullcontext():  # a graph is followed after uninstall(), too
            graph.replay()
        assert torch.equal(losses.cpu(), expected.step(index))
        assert torch.equal(mine.evaluate(index), expected.evaluate(index))


def test_a_graph_is_one_of_torchs_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in C++ that Python derives from, as CUDAGraph, which cannot be made without a driver: so HashStore stands for it."""

    class CUDAGraph(dist.HashStore):
        def __new__(cls, keep_graph: bool = False) -> Any:
            made = super().__new__(cls)
            made.kept = keep_graph
            return made

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__()

        def replay(self) -> None:
            self.set("replayed", "yes")

    device = SimpleNamespace(CUDAGraph=CUDAGraph)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    graph: Any = fullshard.Graph(keep_graph=True)
    assert isinstance(graph, CUDAGraph) and graph.kept
    graph.replay()
    assert graph.get("replayed") == b"yes"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_a_graph_without_an_accelerator_is_refused() -> None:
    with pytest.raises(StateError, match="needs an accelerator"):
        fullshard.Graph()


# --- refused by name ---


class Adapted:
    """Other collectives, which are those of the backend."""

    def __call__(self, group: Any) -> Any:
        from fullshard.comm.backends import collectives_for

        return collectives_for(group, torch.device("sim"))


@pytest.mark.parametrize("what", ["offload", "custom collectives"])
@ranks(2, device="sim")
def test_units_that_the_host_has_a_part_in_are_refused_by_name(world: World, what: str) -> None:
    options: dict[str, Any] = {
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "custom collectives": {"comm_policy": CommPolicy(collectives=Adapted())},
    }
    job = Job(world, captured="backward", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options[what])
    job.step(0)
    assert len(fullshard.capture_obstacles(job.model)) == 4
    with pytest.raises(StateError, match="A graph of the device cannot hold unit"):
        job.capture()
    before = Job(world, captured="backward", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options[what])
    before.step(0)
    job.model.zero_grad()
    before.model.zero_grad()
    assert torch.equal(job.step(1), before.step(1)), "the next eager step is right"


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@ranks(2, device="sim")
def test_a_step_by_owners_is_refused_by_name(world: World, kind: str) -> None:
    def make(parameters: Any) -> Any:
        if kind == "Muon":
            return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.1)
        return fullshard.whole_view(torch.optim.Adafactor(parameters, lr=0.1))

    job = Job(world, optimizer=make)
    job.step(0)
    assert kind in " ".join(fullshard.capture_obstacles(job.model, job.optimizer))
    with pytest.raises(StateError, match=kind):
        job.capture()


@ranks(2, device="sim")
def test_a_forward_and_its_backward_are_in_one_graph_or_in_none(world: World) -> None:
    job = Job(world)
    job.step(0)
    x, kept = inputs(world, 0).clone(), []
    with fullshard.Graph().capture():
        kept.append(square(job.model(x[0])))
    with pytest.raises(StateError, match="two sides of the capture"):
        kept.pop().backward()
    loss = square(job.model(x[0]))
    with pytest.raises(StateError, match="two sides of the capture"), fullshard.Graph().capture():
        loss.backward()
    with pytest.raises(ZeroDivisionError), fullshard.Graph().capture():
        kept.append(square(job.model(x[0])))
        raise ZeroDivisionError
    with pytest.raises(StateError, match="two sides of the capture"):
        kept.pop().backward()


@ranks(2, device="sim")
def test_units_that_are_unsharded_by_hand_are_refused_by_name(world: World) -> None:
    job = Job(world)
    job.step(0)
    with job.model.resident(), pytest.raises(StateError, match="cannot hold unit .*: it is kept unsharded by unshard"):
        job.capture()


@pytest.mark.parametrize("first", ["eager", "captured"])
@ranks(2, device="sim")
def test_gradients_are_kept_and_reduced_on_one_side_of_a_capture(world: World, first: str) -> None:
    job = Job(world)
    job.step(0)
    x = inputs(world, 0).clone()

    def backward(keeps: bool) -> None:
        job.model.set_requires_gradient_sync(not keeps)
        square(job.model(x[0])).backward()

    def captured(keeps: bool) -> None:
        with fullshard.Graph().capture():
            backward(keeps)

    one, other = (backward, captured) if first == "eager" else (captured, backward)
    one(True)
    with pytest.raises(StateError, match="one that kept its gradients are on two sides of the capture"):
        other(False)


@ranks(2, device="sim")
def test_an_unused_parameter_without_a_gradient_is_refused_by_name(world: World) -> None:
    class Skips(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[0](self.inp(x)))

    torch.manual_seed(0)
    model = fully_shard(Skips(), mesh=world.mesh)
    x = inputs(world, 0).clone()
    square(model(x[0])).backward()
    with pytest.raises(StateError, match="does not use parameter 'blocks.1"), fullshard.Graph().capture():
        square(model(x[0])).backward()


@ranks(2, device="sim")
def test_a_graph_of_the_optimizer_alone_leaves_units_as_they_are(world: World) -> None:
    """Also resident ones, and those with collectives of their own, which it does not run."""
    options: dict[str, Any] = {"captured": "backward", "comm_policy": CommPolicy(collectives=Adapted())}
    expected, mine = Job(world, **options), Job(world, **options)
    for job in (mine, expected):
        job.step(0)
        job.backwards(inputs(world, 1))
    graph = fullshard.Graph()
    with mine.model.resident():
        with graph.capture():
            mine.update()
        assert not isinstance(mine.model.inp.weight, DTensor)
    for index in range(2, 4):
        graph.replay()
        expected.update()
        for job in (mine, expected):
            job.backwards(inputs(world, index))
    assert_same(mine, expected, "replays")


class Counted(fullshard.Graph):
    """A subclass of the user's."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1
        super().replay()


@ranks(2, device="sim")
def test_a_graph_may_be_derived_from_and_keeps_no_exception(world: World) -> None:
    expected, mine = Job(world), Job(world)
    for job in (mine, expected):
        job.step(0)
    x, graph = inputs(world, 1).clone(), Counted()

    class Handled(Exception): ...

    try:
        raise Handled
    except Handled as handled:
        known = weakref.ref(handled)
        with graph.capture():
            losses = mine.backwards(x)
            mine.update()
    graph.replay()
    assert torch.equal(losses.cpu(), expected.step(1)) and graph.replays == 1
    gc.collect()
    assert known() is None


# --- what a replay relies on ---


def moved(job: Job, how: str) -> None:
    model = job.model
    if how == "data":
        alias = model.inp.weight.data  # noqa: F841  # so that the values get other memory
        model.inp.weight.data = model.inp.weight.data.clone() * 2
    elif how == "undo":
        fullshard.undo(model)
    elif how == "storage":
        model.set_keep_unsharded_storage(False)
        job.step(3)
    elif how == "cast":
        model.double()
    elif how == "grad":
        model.zero_grad()
    elif how == "another grad":
        model.zero_grad()
        job.step(3)
    elif how == "option":
        job.optimizer.param_groups[0]["weight_decay"] = 0.5
    elif how == "betas":
        job.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    elif how == "tensor":
        job.optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="sim")
    elif how == "states":
        lr = job.optimizer.param_groups[0]["lr"]
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        job.optimizer.param_groups[0]["lr"] = lr
    elif how == "groups":
        job.optimizer.add_param_group({"params": [torch.zeros(1, device="sim")]})


MOVED = {
    "data": "holds addresses of sharded parameters that changed",  # on torch 2.11, `.data =` changes no sharded parameter
    "undo": "holds addresses of sharded parameters that changed",
    "cast": "holds addresses of sharded parameters that changed",
    "grad": "its .grad no longer",
    "another grad": "its .grad no longer",
    "storage": "holds addresses of sharded parameters that changed",
    "option": "weight_decay of AdamW is 0.5, and was 0.01 when its step was captured",
    "tensor": "lr of AdamW is another tensor than when its step was captured",
    "states": r"address of a state of AdamW is \[\d+\], and was \[\d+\] when its step was captured",
    "groups": r"len\(param_groups\) of AdamW is 2, and was 1 when its step was captured",
    "betas": r"betas of AdamW is \(0.5, 0.9\), and was \(0.9, 0.999\) when its step was captured",
}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("how", [how for how in MOVED if how != "data" or _torch.HONOURS_SUBCLASSES])
@ranks(2, device="sim")
def test_a_replay_that_would_use_other_memory_or_options_raises_by_name(world: World, how: str) -> None:
    job = Job(world, keep=how == "storage")
    for index in range(2):
        job.step(index)
    job.capture()
    job.replay(2)
    moved(job, how)
    with pytest.raises(StateError, match=MOVED[how]):
        job.graph.replay()


@ranks(2, device="sim")
def test_an_option_that_is_added_after_a_capture_does_not_matter(world: World) -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        return adamw([{"params": listed[:2]}, {"params": listed[2:], "weight_decay": 0.0}])

    expected, mine = Job(world, optimizer=two_groups), Job(world, optimizer=two_groups)
    for job in (mine, expected):
        job.step(0)
    mine.capture()
    torch.optim.lr_scheduler.LambdaLR(mine.optimizer, lambda step: 1.0)  # adds initial_lr to each group
    mine.optimizer.param_groups[0]["lr"].fill_(0.01)
    assert torch.equal(mine.replay(1), expected.step(1))
    mine.optimizer.param_groups[1]["weight_decay"] = 0.1
    with pytest.raises(StateError, match="weight_decay of AdamW is 0.1, and was 0.0"):
        mine.graph.replay()


@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="on this torch `.data =` changes no sharded parameter")
@pytest.mark.parametrize("what", ["parameter", "local tensor"])
@ranks(2, device="sim")
def test_a_shard_with_hooks_of_its_own_is_captured_and_its_address_counts(world: World, what: str) -> None:
    def before(shard: Tensor, mesh: Any) -> Any:
        return (shard,), None

    def after(shard: Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return (outputs[0], ()) if out is None else None

    def hooked() -> Job:
        job = Job(world)
        local: Any = _torch.local_tensor(job.model.inp.weight)
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = MethodType(before, local), MethodType(after, local)
        job.step(0)
        job.step(1)
        return job

    expected, mine = hooked(), hooked()
    mine.capture()
    for index in (2, 3):
        assert torch.equal(mine.replay(index), expected.step(index))
    assert_same(mine, expected, "replays")
    alias = mine.model.inp.weight.data  # noqa: F841  # so that the values get other memory
    if what == "parameter":
        mine.graph.replay()  # the addresses were compared already
        mine.model.inp.weight.data = mine.model.inp.weight.data.clone() * 2
    else:  # as code that sets tensors inside of a subclass, which fullshard does not see
        local = _torch.local_tensor(mine.model.inp.weight)
        local.data = local.clone() * 2
    with pytest.raises(StateError, match="holds addresses of sharded parameters that changed"):
        mine.graph.replay()


@pytest.mark.parametrize("how", ["load", "policy"])
@ranks(2, device="sim")
def test_values_that_are_loaded_between_replays_count(world: World, how: str) -> None:
    expected, mine = Job(world, captured="backward"), Job(world, captured="backward")
    for job in (mine, expected):
        for index in range(2):
            job.step(index)
    mine.capture()
    for job in (mine, expected):
        if how == "policy":
            job.model.set_reshard_after_forward(True)
        else:
            job.model.load_state_dict({name: 0.5 * value for name, value in job.model.state_dict().items()})
    for index in range(2, 4):
        assert torch.equal(mine.replay(index), expected.step(index))
        assert_same(mine, expected, str(index))


@pytest.mark.parametrize("where", ["between replays", "in the graph"])
@ranks(2, device="sim")
def test_the_event_of_an_optimizer_on_another_stream_is_waited_for(world: World, where: str) -> None:
    """By the next replay or, of two steps in one graph, by the second one."""
    expected, mine = Job(world, captured="backward"), Job(world, captured="backward")
    side, micros = torch.Stream(device="sim"), 2 if where == "in the graph" else 1
    for job in (mine, expected):
        with side if job is mine else contextlib.nullcontext():  # so that the optimizer's memory is of that stream
            job.step(0)

    def update_on_side() -> None:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            mine.update()
            mine.model.set_post_optim_event(side.record_event())

    def steps(job: Job, x: Tensor, update: Callable[[], None]) -> Tensor:
        losses = []
        for part in x.split(1):
            losses.append(job.backwards(part))
            update()
        return torch.cat(losses)

    with late(world, "others", 2000):
        x = inputs(world, 1, micros)
        assert torch.equal(steps(mine, x, update_on_side).cpu(), steps(expected, x, expected.update).cpu())
        x, graph = x.clone(), fullshard.Graph()
        with graph.capture():
            if micros > 1:
                losses = steps(mine, x, update_on_side)
                torch.accelerator.current_stream().wait_stream(side)
            else:
                losses = mine.backwards(x)
        for index in range(2, 5):
            x.copy_(inputs(world, index, micros))
            graph.replay()
            assert torch.equal(losses.cpu(), steps(expected, x, expected.update).cpu())
            if micros == 1:
                update_on_side()
        assert torch.equal(mine.evaluate(0), expected.evaluate(0))


@ranks(2, device="sim")
def test_a_capture_that_fails_leaves_the_model_as_an_exception_does(world: World) -> None:
    expected, mine = Job(world), Job(world)
    for job in (mine, expected):
        job.step(0)
    x = inputs(world, 1)
    for where in ("forward", "backward"):
        with pytest.raises(RuntimeError, match="item"), fullshard.Graph().capture():
            loss = square(mine.model(x[0]))
            if where == "backward":
                loss.backward()
            loss.item()
        mine.optimizer.zero_grad(set_to_none=False)
        assert torch.equal(mine.step(1), expected.step(1))
    mine.capture()
    for index in range(2, 4):
        assert torch.equal(mine.replay(index), expected.step(index))
    assert_same(mine, expected, "the next capture is right")


@pytest.mark.parametrize("how", ["ours", "after install", "of torch"])
@ranks(2, device="sim")
def test_a_block_that_raises_keeps_no_gradients(world: World, how: str) -> None:
    """Also if torch ends its capture as that of any other block."""
    expected, mine = Job(world), Job(world)
    for job in (mine, expected):
        job.step(0)
    x = inputs(world, 1)
    with fullshard.installed() if how != "ours" else contextlib.nullcontext():
        capture = torch.sim.graph(torch.sim.Graph()) if how == "of torch" else fullshard.Graph().capture()  # type: ignore[attr-defined]
        mine.model.set_requires_gradient_sync(False)
        with pytest.raises(ZeroDivisionError), capture:
            square(mine.model(x[0])).backward()
            raise ZeroDivisionError
        mine.model.set_requires_gradient_sync(True)
        assert torch.equal(mine.step(1), expected.step(1))
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            mine.capture()  # an exception that the program handles is none of the block's
        assert torch.equal(mine.replay(2), expected.step(2))
        assert_same(mine, expected, "the next capture is right")


@ranks(2, device="sim")
def test_a_backward_that_raised_inside_of_a_capture_raises_at_its_end(world: World) -> None:
    """Also if the program goes on: the graph would hold half a step."""
    expected, mine = Job(world), Job(world)
    for job in (mine, expected):
        job.step(0)

    def broken(grad: Tensor) -> None:
        raise ZeroDivisionError

    x, graph = inputs(world, 0), fullshard.Graph()
    handle = mine.model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(broken) and None)
    with pytest.raises(StateError, match="ended in a forward or backward, or behind one that raised"), graph.capture():
        loss = square(mine.model(x[0]))
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
    handle.remove()
    assert torch.equal(mine.step(1), expected.step(1)), "the next eager step is right"


# --- ranks that disagree ---


def assert_diverges(body: Callable[[], object], text: str) -> None:
    began = time.monotonic()
    with pytest.raises((StateError, RuntimeError)) as caught:
        for _ in range(6):
            body()
            torch.accelerator.synchronize()
    assert time.monotonic() - began < 20
    runtimes = Runtime.all_of_thread()
    told = [str(caught.value), *(log.desync_error or "" for one in runtimes for log in one.communicator.logs())]
    assert any(re.search(text, one) for one in told), told


@ranks(2, device="sim")
def test_ranks_that_replay_different_graphs_diverge_with_both_named(world: World) -> None:
    job = Job(world)
    job.step(0)
    graphs, inputs_of = [], []
    for _ in range(2):
        job.capture()
        graphs.append(job.graph)
        inputs_of.append(job.x)
    for graph in graphs:
        graph.replay()
    assert_diverges(graphs[world.rank].replay, r"rank 0 ran replay of graph (\d+); rank 1 ran replay of graph (?!\1)\d+")


@ranks(2, device="sim")
def test_a_rank_that_captures_alone_diverges_with_both_named(world: World) -> None:
    job = Job(world)
    job.step(0)

    def body() -> None:
        if world.rank:
            job.step(1)
        else:
            job.capture()
            job.graph.replay()

    assert_diverges(body, r"rank 0 ran capture of graph \d+ begins; rank 1 ran all_gather of 'Stack' \(forward\)")


@ranks(2, device="sim")
def test_a_rank_that_does_not_replay_is_named(world: World) -> None:
    job = Job(world, check_policy=CheckPolicy(timeout=3, patience=0.5))
    job.step(0)
    job.capture()
    job.replay(1)
    torch.accelerator.synchronize()
    log = Runtime.all_of_thread()[0].communicator.logs()[0]
    if world.rank == 0:
        job.graph.replay()
    until = time.monotonic() + 15
    while log.desync_error is None and time.monotonic() < until:
        time.sleep(0.1)
    assert "replay of graph" in str(log.desync_error)
    with pytest.raises((StateError, RuntimeError)):
        job.replay(2)


@ranks(2, device="sim")
def test_a_heartbeat_in_a_graph_finds_ranks_that_captured_different_steps(world: World) -> None:
    job = Job(world, check_policy=CheckPolicy(every=100))  # each replay sends one nevertheless
    job.step(0)
    log = Runtime.all_of_thread()[0].communicator.logs()[0]
    job.x, job.graph = inputs(world, 0).clone(), fullshard.Graph()
    with job.graph.capture():
        if world.rank:
            log.append(Fingerprint(UnitName(""), "another call", "another call"))
        job.losses = job.backwards(job.x)
    assert_diverges(job.graph.replay, "another call")


# --- what a graph holds ---


@ranks(2, device="sim")
def test_a_graph_sends_what_a_step_sends_and_keeps_no_model(world: World) -> None:
    job = Job(world)
    for index in range(2):
        job.step(index)
    with fullshard.counting(job.model) as eager:
        job.step(2)
    with fullshard.counting(job.model) as captured:
        job.capture()
    assert eager == captured
    job.replay(3)
    graph, reference = job.graph, weakref.ref(job.model)
    del job
    gc.collect()
    assert reference() is None and graph is not None


class Wide(Stack):
    """Large enough that memory is not a matter of rounding to blocks of the allocator."""

    def __init__(self) -> None:
        super().__init__(depth=4, dim=48, hidden=96)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", ["default", "kept", "ZERO2", "mixed precision", "accumulation"])
@ranks(2, device="sim")
def test_a_capture_allocates_what_an_eager_step_does(world: World, name: str) -> None:
    memory = torch.accelerator

    def peak(step: Callable[[], object]) -> int:
        gc.collect()
        memory.synchronize()
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        step()
        memory.synchronize()
        return memory.max_memory_allocated() - before

    job = Job(world, kind=Wide, **POLICIES[name])
    for index in range(3):
        job.step(index)
    eager = min(peak(lambda: job.step(index)) for index in range(3))  # polling may free earlier, a graph does not poll
    assert peak(job.capture) <= 1.2 * eager


# --- what is done around a capture shows where it is left out ---


def always_polls(call: CollectiveCall) -> bool:
    return call.event is not None and call.event.query()


def waits_at_the_end(call: CollectiveCall, *, block: bool = False, wait: Any = CollectiveCall.wait) -> None:
    if not torch.sim.is_current_stream_capturing() or "_join" in [one.name for one in traceback.extract_stack()]:  # type: ignore[attr-defined]
        wait(call, block=block)


def ordered_once(stream: Any, start: Any, finish: Any, after: Any = None, call: Any = None, run: Any = DeviceStream.run) -> Any:
    """A lane that waits for the compute stream before its first collective of a capture only."""
    if after is None and torch.sim.is_current_stream_capturing():  # type: ignore[attr-defined]
        first = vars(stream).setdefault("first", torch.accelerator.current_stream().record_event())
        after = SimpleNamespace(event=first)
    return run(stream, start, finish, after, call)


def counts_no_writes(follower: Follower, join: Any = Follower._join) -> None:
    join(follower)
    follower.graph.written.clear()


def takes_none(beats: Heartbeats) -> list[Any]:
    beats._unread.clear()
    return []


def shown(streams: Any, *args: Any, send: Any = Streams.send, **kwargs: Any) -> Any:
    call = send(streams, *args, **kwargs)
    if streams.capturing:
        streams.wait_state.in_flight.append(call)
    return call


def shards_behind_only(follower: Follower, shard_all: Any = Follower._shard_all) -> None:
    if follower.graph is None:
        shard_all(follower)


def shards_before_only(follower: Follower, shard_all: Any = Follower._shard_all) -> None:
    if follower.graph is not None:
        shard_all(follower)


Fault = tuple[Any, str, Any, dict[str, Any], str]
LEFT_OUT: dict[str, Fault] = {  # class and method, what stands in its place, a job, and what shows it
    "nothing is polled": (CollectiveCall, "done", always_polls, {}, "a query"),
    "hidden from the watchdog": (Streams, "send", shown, {}, "shown to the watchdog"),
    "resharded before": (Follower, "_shard_all", shards_behind_only, {"states": ZERO2}, "freed since|AssertionError"),
    "resharded before, two hops": (
        Follower,
        "_shard_all",
        shards_behind_only,
        {"states": HFSDP, "shape": (2, 1)},
        "freed since",
    ),
    "resharded behind": (
        Follower,
        "_shard_all",
        shards_before_only,
        {"states": ZERO2, "captured": "backward"},
        "AssertionError",
    ),
    "writes are counted": (Follower, "_join", counts_no_writes, {"states": ZERO2}, "AssertionError"),
    "heartbeats are joined": (Heartbeats, "take_unread", takes_none, {}, "not joined"),
    "each collective is waited for": (CollectiveCall, "wait", waits_at_the_end, {}, "AssertionError|not joined"),
    "each collective waits for compute": (DeviceStream, "run", ordered_once, {}, "AssertionError"),
}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("what", LEFT_OUT)
@ranks(2, device="sim")
def test_what_is_done_around_a_capture_shows_where_it_is_left_out(world: World, what: str) -> None:
    cls, method, instead, options, text = LEFT_OUT[what]
    check_in_turn(world, "none", **options)
    with mock.patch.object(cls, method, instead), pytest.raises((RuntimeError, AssertionError)) as caught:
        check_in_turn(world, "none", **options)
    assert re.search(text, f"{caught.type.__name__}: {caught.value}"), caught.value


@ranks(2, device="sim")
def test_a_divergence_of_the_last_eager_step_is_found_at_the_capture(world: World) -> None:
    """Programs that never step eagerly again read no other heartbeat of that step."""
    job = Job(world)
    job.step(0)
    if world.rank:
        Runtime.all_of_thread()[0].communicator.logs()[0].append(Fingerprint(UnitName(""), "another call", "another call"))
    assert_diverges(lambda: (job.step(1), job.capture()), "another call")
