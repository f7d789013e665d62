"""What is predicted of the library's own memory and messages is what a run does, allocation by allocation, message by message."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from memory import Linear, Product
from rotation import random_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.ext.two_hops import TwoHopGroup
from fullshard.foresight.ledger import Ledger
from fullshard.foresight.precision import Precision
from fullshard.foresight.recorder import AllocationWatch
from fullshard.foresight.simulate import Setting, Simulation, simulate
from fullshard.foresight.trace import Allocated, Freed, GradientReady, Op, events_of, trace
from fullshard.wrap import ModuleWrapPolicy
from fullshard.wrap.plan import ModelSummary, Plan, PlannedUnit

ROWS = 1  # of the batch: activations are small, and the library's memory is large
LEAST = 1500  # bytes: what is smaller is not compared


@dataclass(frozen=True)
class Layer:
    """A matrix of outputs x inputs, or a gain of one row. scalar: whether it has a scalar parameter, too.

    promotes: whether it returns fp32, whatever it computes in.      joined: whether the matrix is put together of two.
    """

    outputs: int
    frozen: bool = False
    used: bool = True
    scalar: bool = False
    promotes: bool = False
    joined: bool = False


@dataclass(frozen=True)
class Part:
    """A block: layers, and a block inside of it, if there is one. calls: how many times it runs in a row, if it can.

    mp_policy: its unit's own.      reentrant: whether recomputation runs a backward of its own.
    """

    layers: tuple[Layer, ...]
    unit: bool = True
    recomputed: bool = False
    inner: Part | None = None
    mp_policy: fullshard.MixedPrecisionPolicy | None = None
    reentrant: bool = False
    calls: int = 1


class Joined(nn.Module):
    """A matrix of two parameters, whose gradients share their memory."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.upper = nn.Parameter(torch.empty(outputs // 2, inputs))
        self.lower = nn.Parameter(torch.empty(outputs - outputs // 2, inputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product.apply(x, torch.cat([self.upper, self.lower]))  # type: ignore[no-untyped-call]
        return out


class Scaled(nn.Module):
    def __init__(self, inputs: int, layer: Layer) -> None:
        super().__init__()
        self.layer, self.inner = layer, (Joined if layer.joined else Linear)(inputs, layer.outputs)
        self.inner.requires_grad_(not layer.frozen)
        if layer.scalar:
            self.scale = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x.to(next(self.inner.parameters()).dtype))  # products take one dtype
        x = x * self.scale if self.layer.scalar else x
        return x.float() if self.layer.promotes else x


class Block(nn.Module):
    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.part, inputs = part, width
        self.layers = nn.ModuleList()
        for layer in part.layers:
            self.layers.append(Scaled(width, layer))
            width = layer.outputs if layer.used else width
        self.inner = None if part.inner is None else Block(width, part.inner)
        self.width = width if self.inner is None else self.inner.width
        self.calls = part.calls if self.width == inputs else 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if layer.layer.used else x
        return x if self.inner is None else run(self.inner, x)


def run(block: Block, x: Tensor) -> Tensor:
    for _ in range(block.calls):
        again = {"use_reentrant": block.part.reentrant, "preserve_rng_state": False}
        x = checkpoint(block, x, **again) if block.part.recomputed else block(x)
    return x


WIDTH = 48


class Model(nn.Module):
    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        width = WIDTH
        for part in parts:
            self.blocks.append(Block(width, part))
            width = self.blocks[-1].width
        self.head = Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = run(block, x)
        return self.head(x)


def plan_of(model: Model, *, listed: bool) -> Plan:
    """Blocks are units; listed: the last one together with the head."""
    names = [name for name, module in model.named_modules() if isinstance(module, Block) and module.part.unit]
    last = f"blocks.{len(model.blocks) - 1}"
    groups = [(name, "head") if listed and name == last else (name,) for name in names]
    plan = Plan(ModelSummary.of(model), [PlannedUnit(group) for group in groups])
    for names in groups:
        policy = model.get_submodule(names[0]).part.mp_policy
        if policy is not None:
            plan.set(names[0], mp_policy=policy)
    return plan


@contextmanager
def fake_mesh(ranks: int, replicas: int | None) -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=ranks * (replicas or 1), store=FakeStore())
    try:
        if replicas is None:
            yield init_device_mesh("cpu", (ranks,))
        else:
            yield init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def measured(
    parts: tuple[Part, ...], setting: Setting, x: Tensor, *, listed: bool, **options: Any
) -> tuple[list[int], list[fullshard.Message]]:
    """(allocations and frees of at least LEAST bytes, messages) of the third step, and the fourth, of a sharded model."""
    with fake_mesh(setting.ranks, setting.replicas if setting.hybrid else None) as mesh:
        with torch.device("meta"):
            model = Model(parts)
        fullshard.shard_model(model, mesh=mesh, policy=plan_of(model, listed=listed), check_policy=quiet(), **options)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            for number in range(setting.microbatches):
                last = number == setting.microbatches - 1
                model.set_requires_gradient_sync(last or not setting.accumulate)
                model.set_is_last_backward(last or not (setting.states.keeps_gradients or setting.states.sums_over_shards))
                model(x).sum().backward()

        for _ in range(2):
            step()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        gc.disable()  # what it found would be freed in the midst
        watch = AllocationWatch()
        try:
            step()
        finally:
            events = watch.stop()
            gc.enable()
        optimizer.step()
        optimizer.zero_grad()
        with fullshard.counting(model) as messages:
            step()
        return [nbytes for nbytes in of_new(events) if abs(nbytes) >= LEAST], list(messages)


def of_new(events: list[tuple[int, int]]) -> Iterator[int]:
    """The sizes without frees of what was there before: torch's profiler sees only some of them."""
    there: set[int] = set()
    for address, nbytes in events:
        if nbytes > 0:
            there.add(address)
        if nbytes > 0 or address in there:
            yield nbytes


def quiet() -> fullshard.CheckPolicy:
    return fullshard.CheckPolicy(silence=("root", "optimizer"))


def predicted(parts: tuple[Part, ...], setting: Setting, *, listed: bool) -> Simulation:
    with torch.device("meta"):
        model, x = Model(parts), torch.empty(ROWS, WIDTH)
    plan = plan_of(model, listed=listed)
    return simulate(trace(model, (x,), loss=torch.sum, precision=Precision.of(plan, setting.mp_policy)), plan, setting)


def check(parts: tuple[Part, ...], setting: Setting, *, listed: bool, **options: Any) -> None:
    allocations, messages = measured(parts, setting, torch.randn(ROWS, WIDTH), listed=listed, **options)
    found = predicted(parts, setting, listed=listed)
    changes = [
        c for c in found.ledger.changes[found.first_change :] if abs(c.nbytes) >= LEAST and c.block >= found.first_change
    ]
    assert list(found.messages) == messages
    assert [change.nbytes for change in changes[: len(allocations)]] == allocations
    rest = changes[len(allocations) :]  # zero_grad
    assert all(change.nbytes < 0 and change.category in ("gradients", "pinned host") for change in rest)


LAYERS = st.builds(
    Layer,
    outputs=st.sampled_from([8, 33, 48, 64, 100, 1000]),
    frozen=st.sampled_from([False, False, False, True]),
    used=st.sampled_from([True, True, True, False]),
    scalar=st.sampled_from([False, False, False, True]),
    promotes=st.sampled_from([False, False, True]),
    joined=st.sampled_from([False, False, False, True]),
)
ROWS_OF_LAYERS = st.lists(LAYERS, min_size=1, max_size=3).map(tuple)
SUMS_IN_FP32 = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, accumulate_dtype=torch.float32)
BF16, MIXED = (fullshard.MixedPrecisionPolicy(torch.bfloat16, dtype) for dtype in (None, torch.float32))
OF_UNITS = [None, None, None, replace(MIXED, output_dtype=torch.float32), fullshard.MixedPrecisionPolicy(torch.float32)]
INNER = st.builds(Part, layers=ROWS_OF_LAYERS, unit=st.booleans(), recomputed=st.sampled_from([False, False, True]))
PARTS = st.builds(
    Part,
    layers=ROWS_OF_LAYERS,
    unit=st.sampled_from([True, True, True, False]),
    recomputed=st.sampled_from([False, False, True]),
    inner=st.one_of(st.none(), INNER),
    mp_policy=st.sampled_from(OF_UNITS),
    reentrant=st.booleans(),
    calls=st.sampled_from([1, 1, 2]),
)
HFSDPS = [fullshard.HFSDP, fullshard.StateSharding(gradients=("replicate", "shard"), optimizer=("replicate", "shard"))]
SETTINGS = st.builds(
    dict,
    ranks=st.sampled_from([1, 2, 3, 4, 8, 64, 512]),
    replicas=st.sampled_from([None, None, 2]),
    mp_policy=st.sampled_from([fullshard.MixedPrecisionPolicy(), BF16, MIXED, SUMS_IN_FP32]),
    comm_policy=st.builds(
        fullshard.CommPolicy,
        direct_min_bytes=st.sampled_from([None, 0, 2000, float("inf")]),
        reductions_in_flight=st.sampled_from([1, 3]),
        prefetch_bytes=st.sampled_from([None, 0, 40000]),
    ),
    offload_policy=st.sampled_from([fullshard.OffloadPolicy()] * 2 + [fullshard.CPUOffloadPolicy(pin_memory=False)]),
    reshard=st.sampled_from([None, True, False, "half"]),
    microbatches=st.sampled_from([1, 1, 3]),
    accumulate=st.booleans(),
    listed=st.sampled_from([False, False, True]),
    columns=st.sampled_from([False, False, True]),
    states=st.sampled_from([fullshard.ZERO3, fullshard.ZERO3, fullshard.ZERO2, fullshard.ZERO1, *HFSDPS]),
)


@pytest.mark.filterwarnings("ignore:unit .* mixes parameters", "ignore:reshard_after_forward=1 keeps")  # what is drawn
@given(parts=st.lists(PARTS, min_size=1, max_size=3).map(tuple), told=SETTINGS)
@random_cases(200)
def test_a_simulated_step_allocates_and_sends_what_a_run_does(parts: tuple[Part, ...], told: dict[str, Any]) -> None:
    ranks = told["ranks"]
    if told["states"].shards_over_replicas and told["replicas"] is None:
        told["replicas"] = 4
    reshard = told["reshard"] if told["reshard"] != "half" else max(1, ranks // 2) if ranks % 2 == 0 else True
    reshard = None if told["states"].keeps_parameters else reshard
    names = ("mp_policy", "comm_policy", "offload_policy", "states")
    options = {name: told[name] for name in names} | {"reshard_after_forward": reshard}
    dims: dict[str, int] = {}
    if told["columns"]:
        with torch.device("meta"):
            dims = {name: 1 for name, parameter in Model(parts).named_parameters() if parameter.dim() == 2}
    setting = Setting(
        ranks,
        dims=dims,
        replicas=told["replicas"] or 1,
        hybrid=told["replicas"] is not None,
        microbatches=told["microbatches"],
        accumulate=told["accumulate"],
        accelerator=False,
        **options,
    )
    if dims:
        options["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.dim() == 2 else None
    check(parts, setting, listed=told["listed"], **options)


def test_hfsdp_holds_a_quarter_of_what_hsdp_holds_on_eight_by_eight_ranks() -> None:
    """Per parameter, of bf16 and Adam: 16 bytes over 8 ranks; or 2 bytes over 8 ranks, and 16 over 64."""
    held: list[int] = []
    for states in (fullshard.ZERO3, fullshard.HFSDP):
        with fake_mesh(8, 8) as mesh:
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
            fullshard.shard_model(
                model, mesh=mesh, policy=ModuleWrapPolicy({nn.Linear}), states=states, mp_policy=MIXED, sync="off"
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 512)).sum().backward()
                optimizer.step()
            moments = [value.to_local() for state in optimizer.state.values() for value in state.values() if value.dim()]
            shards = [tensor.to_local() for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
            groups = [group for unit in fullshard.core.units_of(model, True) for group in unit.groups]  # type: ignore[attr-defined]
            inner = [group._inner.memory for group in groups if isinstance(group, TwoHopGroup)]
            held.append(sum(tensor.nbytes for tensor in (*moments, *shards)) + sum(inner))
    numel = 4 * 512 * 512
    assert held == [16 * numel // 8, 2 * numel // 8 + 16 * numel // 64] and held[1] * 4 == held[0]


def test_a_trace_counts_the_flops_of_both_directions_and_leaves_the_model_as_it_was() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.empty(2, 8)
    found = trace(model, (x,), loss=torch.sum)
    assert found.flops == 2 * 2 * (8 * 16) * 2 + 2 * 2 * (16 * 4) * 3  # the first layer's input needs no gradient
    assert found.batch == 2 * 8 * 4 and found.buffers == 0
    born = {event.storage for event in found.events if isinstance(event, Allocated)}
    assert born == {event.storage for event in found.events if isinstance(event, Freed)}
    assert {event.parameter for event in found.events if isinstance(event, GradientReady)} == {
        n for n, _ in model.named_parameters()
    }
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(parameter.grad is None and not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    x, y = (torch.empty(4, 8, dtype=dtype, device="meta", requires_grad=True) for dtype in (torch.complex64, torch.float32))
    complex_, real = (events_of(lambda one=one: one @ one.t(), [one]) for one in (x, y))
    flops = [[(op.flops, op.dtype) for op in events if isinstance(op, Op) and op.flops] for events in (complex_, real)]
    assert flops == [[(4 * 2 * 4 * 8 * 4, torch.float32)], [(2 * 4 * 8 * 4, torch.float32)]]


def test_what_cannot_be_simulated_is_said() -> None:
    with pytest.raises(ValueError, match="'weight' is not. Build the model under"):
        trace(nn.Linear(2, 2), (torch.empty(2, 2),), loss=torch.sum)
    with pytest.raises(ValueError, match=r"Setting\.ranks must be an int of at least 1, got 0"):
        Setting(0)


class Attention(nn.Module):
    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked, self.norm, self.qkv = masked, nn.RMSNorm(64), nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, LENGTH, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = x.new_ones(LENGTH, LENGTH, dtype=torch.bool) if self.masked else None
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


LENGTH = 256


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_saves_no_matrix_of_length_by_length_and_norms_are_one_kernel(masked: bool, recomputed: bool) -> None:
    with torch.device("meta"):
        model, x = Attention(masked=masked).bfloat16(), torch.empty(1, LENGTH, 64, dtype=torch.bfloat16)
        model.forward = partial(checkpoint, model.forward, use_reentrant=False) if recomputed else model.forward
    found = trace(model, (x,), loss=torch.sum)
    largest = max(event.nbytes for event in found.events if isinstance(event, Allocated))
    assert largest < 4 * LENGTH * LENGTH * 2  # for each head
    ops = [event.name for event in found.events if isinstance(event, Op)]
    kind = "efficient" if masked else "flash"
    assert ops.count(f"aten._scaled_dot_product_{kind}_attention.default") == 1 + recomputed
    assert ops.count("fullshard_foresight.rms_norm.default") == 1 + recomputed
    assert ops.count("fullshard_foresight.rms_norm_backward.default") == 1
    on_cpu = trace(Attention(masked=masked).to("meta", torch.bfloat16), (x,), loss=torch.sum, accelerator=False)
    ops = [event.name for event in on_cpu.events if isinstance(event, Op)]
    assert ops.count("aten._scaled_dot_product_flash_attention_for_cpu.default") == 1
    assert on_cpu.flops == found.flops or recomputed or masked


def test_the_peak_is_told_by_category_and_unit() -> None:
    ledger = Ledger()
    kept = ledger.allocate(100, "shards", "a")
    ledger.free(ledger.allocate(50, "gathered", "a"))
    ledger.free(ledger.allocate(50, "pinned host", "a"))
    ledger.allocate(20, "gathered", "b")
    assert ledger.peak == 150 and ledger.at_peak() == {("shards", "a"): 100, ("gathered", "a"): 50}
    ledger.free(kept)
    assert ledger.level == 20
