"""Predictions held against real runs: memory and messages of gloo ranks, and what a recorded run says of itself."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import test_tensor_parallel
import torch
import torch.distributed as dist
from harness import LIMIT, World, pool, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard import Matrix
from fullshard.core import logical_parameters
from fullshard.foresight.calibrate import SIZES, _Bench, calibrate
from fullshard.foresight.hardware import gpu_of
from fullshard.foresight.ledger import Ledger
from fullshard.foresight.owners import owner_step
from fullshard.foresight.program import Program
from fullshard.foresight.recorder import AllocationWatch, peak_of_new
from fullshard.policies import PRESETS
from fullshard.wrap import ModuleWrapPolicy

ROWS, DIM = 32, 96


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(dim: int = DIM, depth: int = 3) -> nn.Module:
    return nn.Sequential(*(Block(dim) for _ in range(depth)), nn.Linear(dim, 5))


# oneDNN computes a product of bfloat16 in float32 on a processor without instructions for it: a copy of a weight's size.
SCRATCH = 0 if torch.cpu._is_avx512_bf16_supported() else 4 * DIM * 4 * DIM


def is_predicted(predicted: int, seen: int | None, x: Tensor, low: bool = False) -> bool:
    """Whether a peak is predicted within 5%. seen: without the inputs x. low: products are of bfloat16."""
    assert seen is not None
    return predicted / 1.05 < seen + x.nbytes < predicted / 0.95 + low * SCRATCH


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def sharded(world: World, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build()
    fullshard.shard_model(model, policy=ModuleWrapPolicy({Block}), **{"mesh": world.mesh, **options})
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def explained(world: World, **options: Any) -> fullshard.Explanation:
    return fullshard.explain(
        build, torch.empty(ROWS, DIM), world=world.size, gpu="cpu", plan=ModuleWrapPolicy({Block}), loss=loss, **options
    )


@dataclass(frozen=True)
class Predicted:
    peak: int
    messages: list[fullshard.Message]


def predicted(world: World, **options: Any) -> Predicted:
    """What is explained on the first rank, for all: it is the same everywhere, and takes longer than the run."""
    told: list[Any] = [None]
    if world.rank == 0:
        r = explained(world, **options)
        told = [Predicted(r.peak, list(r.messages))]
    dist.broadcast_object_list(told, 0)
    return told[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "packed": {"comm_policy": fullshard.CommPolicy(direct_min_bytes=float("inf"))},
    "direct": {"comm_policy": fullshard.CommPolicy(direct_min_bytes=0, reductions_in_flight=2)},
    "no prefetch": {"comm_policy": fullshard.CommPolicy(prefetch_bytes=0)},
    "zero2": {"states": fullshard.ZERO2},
    "zero2, bf16": {
        "states": fullshard.ZERO2,
        "mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    },
    "columns": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() == 2 else None},
}


@pytest.mark.rotates(6)
@pytest.mark.parametrize("options", OPTIONS)
@ranks(2, 3)
def test_memory_of_gloo_ranks_is_predicted_within_five_percent_and_messages_exactly(world: World, options: str) -> None:
    model, optimizer = sharded(world, **OPTIONS[options])
    x = torch.randn(ROWS, DIM)
    step(model, optimizer, x)
    with fullshard.record(model, memory=True) as run:
        for _ in range(4):
            step(model, optimizer, x)
    r = predicted(world, **OPTIONS[options])
    assert is_predicted(r.peak, run.peak, x, "bf16" in options), (r.peak, run.peak)
    assert list(run.messages) == r.messages
    assert len(run.steps) == 2, "of four, one has no beginning, and one counts memory"


@pytest.mark.parametrize("mp", [None, torch.bfloat16])
@pytest.mark.parametrize("level", ["ZERO3", "HFSDP"])
@ranks(2)
def test_memory_that_is_kept_is_recorded(world: World, level: str, mp: torch.dtype | None) -> None:
    """A step that allocates nothing anew uses all of it, inner shards and memory of reductions included."""
    states, mesh = PRESETS[level], world.mesh
    if level == "HFSDP":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = fullshard.MixedPrecisionPolicy(mp, torch.float32)
    model, optimizer = sharded(world, mesh=mesh, states=states, mp_policy=policy)
    model.set_keep_unsharded_storage(True)
    x = torch.randn(ROWS, DIM)
    for _ in range(3):
        step(model, optimizer, x)
    with fullshard.record(model, memory=True) as run:
        for _ in range(3):
            step(model, optimizer, x)
    r = predicted(world, mesh=tuple(mesh.shape), states=states, mp_policy=policy, keep_unsharded_storage=True)
    assert is_predicted(r.peak, run.peak, x, mp is not None), (r.peak, run.peak)


@pytest.mark.parametrize("mp", [None, torch.bfloat16])
@ranks(2)
def test_copies_of_offloaded_shards_are_recorded_in_both_directions(world: World, mp: torch.dtype | None) -> None:
    """Those to the host end a reduction. Without them a comparison said that another setting ran."""
    options: dict[str, Any] = {
        "offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False),
        "mp_policy": fullshard.MixedPrecisionPolicy(mp),
    }
    model, optimizer = sharded(world, **options)
    with fullshard.record(model) as run:
        for _ in range(3):
            step(model, optimizer, torch.randn(ROWS, DIM))
    r = explained(world, **options)
    assert Counter(run.messages) == Counter(r.messages)
    assert {message.kind for message in run.messages} >= {"to_device", "to_host"}
    assert not any(difference.what == "messages" for difference in r.against(run).differences)
    assert not {"to_device", "to_host"} & set(run.speeds())


def convnet() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.BatchNorm1d(4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))

    return nn.Sequential(*(block() for _ in range(3)), nn.Linear(DIM, 5))


@ranks(2)
def test_units_that_compute_in_full_precision_are_predicted(world: World) -> None:
    policy, x, model = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.randn(ROWS, DIM), convnet()
    plan = fullshard.shard_model(model, world.mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, x)
    with fullshard.record(model, memory=True) as run:
        for _ in range(4):
            step(model, optimizer, x)
    r, without = (
        fullshard.explain(convnet, x, world=world.size, gpu="cpu", loss=loss, mp_policy=policy, **options)
        for options in ({}, {"full_precision": ()})
    )
    assert [unit.modules for unit in r.plan.units] == [unit.modules for unit in plan.units]
    assert len(r.plan.units) == len(without.plan.units) + 3, "one of each block"
    assert is_predicted(r.peak, run.peak, x), (r.peak, run.peak, str(r))
    assert list(run.messages) == list(r.messages)


MUON: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "zero2": {"states": fullshard.ZERO2},
    "columns": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() == 2 else None},
    "hybrid": {},
    "hybrid, all ranks": {"states": fullshard.HFSDP},
}


@pytest.mark.rotates(16)
@pytest.mark.parametrize("bucket_nbytes", [1, 100_000, 1 << 25])
@pytest.mark.parametrize("options", MUON)
@ranks(1, 2, 3, 4)
def test_memory_and_messages_of_muon_are_predicted(world: World, options: str, bucket_nbytes: int) -> None:
    """Of the first rank; the peak is in backward, so that of the step is compared as well."""
    hybrid = options.startswith("hybrid")
    if hybrid and world.size != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else world.mesh
    model, _ = sharded(world, mesh=mesh, **MUON[options])
    choice = fullshard.matrices_of(model)
    optimizers = torch.optim.Muon(choice.matrices), torch.optim.AdamW(choice.rest)
    x = torch.randn(ROWS, DIM)

    def train() -> None:
        loss(model(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with mock.patch.object(
        fullshard.plan_owners, "__kwdefaults__", {"bucket_nbytes": bucket_nbytes, "itemsize": 2, "cost": None}
    ):
        train()
        with fullshard.record(model, memory=True) as run:
            for _ in range(4):
                train()
        loss(model(x)).backward()
        watch = AllocationWatch()
        optimizers[0].step()
        in_step, ledger = peak_of_new(watch.stop()), Ledger()
        sharding = [(one, one.sharding) for one in logical_parameters(choice.matrices)]
        axis = sharding[0][1].axis
        matrices = [(Matrix(one.name, tuple(one.shape), how.dim), torch.float32) for one, how in sharding]
        owner_step({(axis.ranks, axis.replica_count): matrices}, accelerator=False).run(ledger, Program())
        if world.rank:
            return
        r = explained(world, optimizer="muon", mesh=(2, 2) if hybrid else None, **MUON[options])
    assert list(run.messages) == list(r.messages)
    assert is_predicted(r.peak, run.peak, x, "bf16" in options), (r.peak, run.peak, str(r))
    # The CPU may compute a product of bfloat16 in float32 before it rounds.
    assert 0.99 * ledger.peak <= in_step <= 1.01 * ledger.peak + 4 * DIM * 4 * DIM, (ledger.peak, in_step)


@pytest.mark.rotates(16)
@pytest.mark.parametrize("mp", [None, torch.bfloat16])
@pytest.mark.parametrize("level", [*PRESETS, "HSDP"])
@ranks(1, 2, 4, 8)
def test_levels_of_several_microbatches_are_predicted(world: World, level: str, mp: torch.dtype | None) -> None:
    states = PRESETS.get(level, fullshard.ZERO3)
    options = {"states": states, "mp_policy": fullshard.MixedPrecisionPolicy(mp, torch.float32)}
    hybrid = level in ("HSDP", "HFSDP")
    if hybrid and world.size == 1:
        return
    mesh = (2, world.size // 2) if hybrid else (world.size,)
    names = ("replicate", "shard")[-len(mesh) :]
    model, optimizer = sharded(world, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), **options)
    x = torch.randn(ROWS, DIM)

    def microbatches() -> None:
        for index in range(3):
            if states.keeps_gradients or states.sums_over_shards:
                model.set_is_last_backward(index == 2)
            loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    microbatches()
    with fullshard.record(model, memory=True) as run:
        for _ in range(3):
            microbatches()
    r = predicted(world, **options, mesh=mesh, microbatches=3, accumulate=False)
    assert list(run.messages) == r.messages
    assert is_predicted(r.peak, run.peak, x, mp is not None), (r.peak, run.peak)


@ranks(2)
def test_memory_of_kept_gradients_is_predicted_in_the_accumulate_dtype(world: World) -> None:
    low, numel = torch.bfloat16, sum(parameter.numel() for parameter in build().parameters())
    told: dict[str, Any] = {"microbatches": 2, "accumulate": True}
    x, most = torch.randn(ROWS, DIM), []
    for accumulate in (None, torch.float32):
        policy = fullshard.MixedPrecisionPolicy(low, low, accumulate_dtype=accumulate)
        kept = sum(unit.kept for _, unit in fullshard.plan_model(build()).messages(world.size, mp_policy=policy))
        assert kept == numel * (accumulate or low).itemsize
        model, optimizer = sharded(world, mp_policy=policy)
        with fullshard.record(model, memory=True) as run:
            for _ in range(4):
                with model.accumulate():
                    loss(model(x)).backward()
                step(model, optimizer, x)
        r = predicted(world, mp_policy=policy, **told)
        assert is_predicted(r.peak, run.peak, x, True), (r.peak, run.peak)
        assert list(run.messages) == r.messages
        if world.rank:
            continue
        on_gpu = fullshard.explain(  # on the CPU, add_ casts into a temporary
            build, x, world=world.size, plan=ModuleWrapPolicy({Block}), loss=loss, mp_policy=policy, **told
        )
        ledger = on_gpu.simulation.ledger
        moments = (ledger.at(changes).items() for changes in range(len(ledger.changes) + 1))
        most.append(max(sum(nbytes for (kind, _), nbytes in moment if kind == "gradients") for moment in moments))
    assert world.rank or most[1] - most[0] == numel * (torch.float32.itemsize - low.itemsize)


@ranks(2)
def test_a_run_says_on_which_lane_what_was_sent_and_waited_for_and_off_it_nothing_is_changed(world: World) -> None:
    model, optimizer = sharded(world)
    runtime = next(iter(fullshard.core.units_of(model, True))).runtime  # type: ignore[attr-defined]
    before = (runtime._around, runtime.communicator.all_gather_stream, runtime.communicator.reduce_scatter_stream)
    x = torch.randn(ROWS, DIM)
    with fullshard.record(model) as run:
        with pytest.raises(fullshard.StateError, match=r"still being recorded. Read its figures after the `with` block"):
            _ = run.steps
        for _ in range(4):
            step(model, optimizer, x)
    assert before == (runtime._around, runtime.communicator.all_gather_stream, runtime.communicator.reduce_scatter_stream)
    spans = Counter((span.lane, span.unit) for span in run.spans)
    for name in ("0", "1", "2"):
        assert spans["gather", name] >= 1 and spans["reduce", name] == 1 and spans["wait", name] >= 2
    assert all(0 <= span.start <= span.end <= run.steps[-1] + 1e-6 for span in run.spans)
    assert [summary.rank for summary in run.ranks] == [0, 1] and all(len(summary.steps) == 3 for summary in run.ranks)
    assert run.peak is None and 0 < sum(run.waiting.values()) < sum(run.steps)
    with pytest.raises(ZeroDivisionError), fullshard.record(model):
        raise ZeroDivisionError
    assert before == (runtime._around, runtime.communicator.all_gather_stream, runtime.communicator.reduce_scatter_stream)
    with fullshard.record(model) as short:
        step(model, optimizer, x)
    with pytest.raises(fullshard.StateError, match="at least two optimizer steps"):
        _ = short.step


@ranks(3)
def test_a_comparison_names_other_messages_and_the_rank_that_the_others_wait_for(world: World) -> None:
    model, optimizer = sharded(world, reshard_after_forward=False)
    x = torch.randn(ROWS, DIM)
    with fullshard.record(model) as run:
        for _ in range(6):
            if world.rank == 1:
                time.sleep(0.2)
            step(model, optimizer, x)
    assert run.late() == {1: 1.0}
    told = str(explained(world).against(run))
    assert "ranks: the others wait for rank 1 in 100% of the steps" in told
    assert "fewer of kind all_gather" in told and "another model, plan or setting ran" in told
    same = str(explained(world, reshard_after_forward=False).against(run))
    assert "of kind all_gather of" not in same


@ranks(2)
def test_a_step_ends_with_the_last_of_several_optimizers(world: World) -> None:
    model, _ = sharded(world)
    matrices = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1])
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])

    def train(run: int) -> None:
        for _ in range(run):
            loss(model(torch.randn(ROWS, DIM))).backward()
            for optimizer in (matrices, others):
                optimizer.step()
            for optimizer in (matrices, others):
                optimizer.zero_grad()

    with fullshard.record(model) as run:
        train(4)
    assert len(run.steps) == 3, "the first begins where nobody looked"
    with fullshard.record(model, memory=True) as counted:
        train(3)
    assert counted.peak == pytest.approx(predicted(world).peak, rel=0.05) and run.messages == counted.messages


@ranks(2)
def test_a_trace_for_perfetto_has_both_processes(world: World) -> None:
    model, optimizer = sharded(world)
    with fullshard.record(model) as run:
        for _ in range(3):
            step(model, optimizer, torch.randn(ROWS, DIM))
    trace = world.folder("trace") / f"{world.rank}.json"
    explained(world).perfetto(trace, run)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1, 2}


@ranks(2, limit=120.0)
def test_calibrate_measures_what_explain_takes(world: World) -> None:
    path = world.folder("calibrate") / "machine.json"
    fewer = mock.patch.dict(calibrate.__globals__, SIZES=SIZES[:1])
    with fewer, mock.patch.object(_Bench._seconds, "__kwdefaults__", {"least": 0.01}):  # seconds of each measurement
        gpu, network = calibrate(path)
    assert gpu_of(path) == gpu and gpu.synchronous and gpu.fp32 > 1e8 and gpu.link > 1e5 and network.base > 0
    r = fullshard.explain(build, torch.empty(ROWS, DIM), world=2, gpu=path, net=path, loss=loss)
    assert r.fits and r.step.middle > 0
    dist.barrier()


def test_tensor_parallelism_is_predicted_as_two_times_two_ranks_run_it() -> None:
    r = test_tensor_parallel.explained(2, gpu="cpu", keep_output=False)
    pool(4).run(__name__, "run_tensor_parallel", {"expected": Predicted(r.peak, list(r.messages))}, LIMIT)


@ranks(4)
def run_tensor_parallel(world: World, expected: Predicted) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = test_tensor_parallel.Model()
    test_tensor_parallel.parallelize(model, mesh["tp"])
    fullshard.shard_model(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(test_tensor_parallel.ROWS, test_tensor_parallel.DIM)

    def step() -> None:
        test_tensor_parallel.loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with fullshard.record(model, memory=True) as run:
        for _ in range(3):
            step()
    seen, told = ([(m.kind, m.nbytes, m.ranks) for m in messages] for messages in (run.messages, expected.messages))
    assert seen == told
    assert run.peak is not None and abs(expected.peak / (run.peak + x.nbytes) - 1) < 0.05, (expected.peak, run.peak)
