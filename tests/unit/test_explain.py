"""`fullshard.explain`: verdicts, clocks, pictures and refusals, on a laptop."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from exits import command_line
from test_owners import llama
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

import fullshard
from fullshard import HFSDP, ZERO2, Matrix, MixedPrecisionPolicy
from fullshard.comm.traffic import Message
from fullshard.foresight.clock import message_seconds, play
from fullshard.foresight.command import _mp_policy
from fullshard.foresight.comparison import _network
from fullshard.foresight.hardware import GIB, GPUS, NETWORKS, gpu_of, write_machine
from fullshard.foresight.ledger import Ledger
from fullshard.foresight.optimizer import OPTIMIZERS, optimizer_step
from fullshard.foresight.owners import owner_step
from fullshard.foresight.picture import LANES, PHASES, TOP
from fullshard.foresight.program import Await, Launch, Program, replay
from fullshard.foresight.trace import Allocated, Op
from fullshard.optim.owners import H100_FLOPS

DIM, DEPTH = 128, 4


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def build(dim: int = DIM) -> nn.Module:
    return nn.Sequential(*(Block(dim) for _ in range(DEPTH)), nn.Linear(dim, 8))


def explain(dim: int = DIM, rows: int = 64, **options: Any) -> fullshard.Explanation:
    told = {"world": 8, "loss": torch.sum, "batch": torch.empty(rows, dim), **options}
    return fullshard.explain(partial(build, dim), **told)


# --- verdicts ---


def test_a_verdict_compares_what_is_reserved_and_the_context_with_what_the_gpu_has() -> None:
    r = explain()
    gpu = GPUS["h100-sxm"]
    least = r.peak + gpu.context
    assert least < r.needed, "an allocator keeps more than tensors have"
    for memory, verdict in ((r.needed / 0.93, "tight"), (r.needed / 0.91, "fits"), (least, "tight"), (least - 1, "no")):
        found = replace(r, gpu=replace(gpu, memory=int(memory)))
        assert (found.verdict, found.fits) == (verdict, verdict != "no")
        first = str(found).splitlines()[0]
        assert first.startswith({"no": "does not fit"}.get(verdict, verdict))
    assert r.reserved % (2 << 20) == 0 and r.peak <= r.reserved and sum(r.at_peak.values()) == r.peak


def test_more_ranks_recomputation_and_offloading_need_less_memory_each_for_its_part() -> None:
    r = explain(rows=4096)
    shards = {name: sum(n for (kind, _), n in q.at_peak.items() if kind == name) for name in ("shards",) for q in (r,)}
    more = explain(rows=4096, world=16)
    assert sum(n for (kind, _), n in more.at_peak.items() if kind == "shards") < 0.51 * shards["shards"] + 4096
    assert more.peak < r.peak
    again = explain(rows=4096, recompute="block")
    assert again.traced.recomputed == tuple(str(i) for i in range(DEPTH)) and again.peak < 0.8 * r.peak
    assert again.flops == r.flops, "the model's flops are counted once"
    half = explain(rows=4096, recompute="every:2")
    assert half.traced.recomputed == ("0", "2") and again.peak < half.peak < r.peak
    assert explain(rows=4096, recompute=lambda name, module: name == "1").traced.recomputed == ("1",)
    offloaded = explain(rows=4096, offload_policy=fullshard.CPUOffloadPolicy())
    assert offloaded.pinned > 0 == r.pinned and not any(kind == "optimizer" for kind, _ in offloaded.at_peak)


@pytest.mark.parametrize("engine", ["fullshard", "fsdp2"])
@pytest.mark.parametrize("reshard", [None, 2])
def test_kept_storage_is_all_full_parameters_and_one_message_more(engine: Any, reshard: int | None) -> None:
    """What is gathered, at the end of a step: of every unit, once. The number of gathers is as before."""
    r, kept = (explain(engine=engine, reshard_after_forward=reshard, keep_unsharded_storage=keep) for keep in (False, True))

    def gathered(found: fullshard.Explanation) -> int:
        ledger = found.simulation.ledger
        return sum(n for (kind, _), n in ledger.at(len(ledger.changes)).items() if kind == "gathered")

    full = sum(parameter.numel() for parameter in build().parameters()) * 2  # in bf16
    parts = 0 if reshard is None or engine == "fsdp2" else full // reshard
    assert gathered(r) == 0 and full <= gathered(kept) <= 1.05 * (full + parts)
    assert len(kept.simulation.messages) == len(r.simulation.messages) and kept.peak > r.peak


def test_plans_ask_no_parameter_for_its_dtype() -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: None)
    for ask in (lambda: explain(mp_policy=policy), lambda: fullshard.plan_model(build()).messages(8, mp_policy=policy)):
        with pytest.raises(ValueError, match="param_dtype_override_fn needs the parameters: expected mp_policy without it"):
            ask()


def test_fsdp2_gathers_from_a_smaller_group_too_and_frees_its_part() -> None:
    for engine in ("fullshard", "fsdp2"):
        one, four = (explain(2048, rows=16, engine=engine, reshard_after_forward=4, microbatches=n) for n in (1, 4))
        ranks = [message.ranks for message in one.messages if message.kind == "all_gather"]
        assert ranks.count(8) == DEPTH + 1 and ranks.count(4) == DEPTH + 1
        assert one.simulation.ledger.level == four.simulation.ledger.level, "nothing is left over by a microbatch"


def test_fsdp2_needs_the_copies_that_it_makes_and_sends_the_same_gathers() -> None:
    ours, theirs = explain(2048, rows=16), explain(2048, rows=16, engine="fsdp2")
    assert theirs.peak > ours.peak
    kinds = [[m.kind for m in r.messages] for r in (ours, theirs)]
    assert kinds[0].count("all_gather") == kinds[1].count("all_gather") == 2 * DEPTH + 1
    assert "heartbeat" in kinds[0] and "heartbeat" not in kinds[1]


def test_but_asks_again_without_tracing_again() -> None:
    r = explain()
    other = r.but(reshard_after_forward=False, gpu="a100-40", plan=lambda module, recurse, nonwrapped_numel: recurse)
    assert other.traced.trace is r.traced.trace and other.gpu.name == "a100-40" and other.network.name == "ib-200"
    assert [m.kind for m in other.messages].count("all_gather") == 1
    with pytest.raises(ValueError, match=r"but\(\) takes the arguments of explain\(\), got 'rank'"):
        r.but(rank=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 16},
        {"world": 16, "mesh": (4, 4)},
        {"gpu": "cpu"},
        {"mp_policy": fullshard.MixedPrecisionPolicy()},
        {"mp_policy": fullshard.MixedPrecisionPolicy(torch.float16, torch.float32)},
        {"recompute": "block", "microbatches": 2},
        {"batch": torch.empty(128, DIM)},
    ],
)
def test_but_says_what_explain_says(changes: dict[str, Any]) -> None:
    found, fresh = explain().but(**changes), explain(**changes)
    assert found.messages == fresh.messages and found.at_peak == fresh.at_peak and found.step == fresh.step
    assert found.flops == fresh.flops and found.tokens_per_second == fresh.tokens_per_second


# --- models ---


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, DIM), nn.Linear(DIM, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def test_a_model_that_the_factory_keeps_stays_as_it_is_and_ties_stay_ties() -> None:
    ids, told = torch.zeros(2, 8).long(), {"world": 2, "loss": torch.sum}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Tied()
        forward, parameters = model.forward, dict(model.named_parameters())
        first = fullshard.explain(lambda model=model: model, ids, recompute=lambda name, module: True, **told)
        again = fullshard.explain(lambda model=model: model, ids, recompute=lambda name, module: True, **told)
        assert first.messages == again.messages and first.at_peak == again.at_peak
        assert (
            sum(one.numel for _, held in first.plan.held() for one in held) == 64 * DIM
            and model.head.weight is model.embedding.weight
        )
        assert model.forward == forward and dict(model.named_parameters()) == parameters
        assert model.head.weight.dtype == torch.float32 and model.head.weight.device.type == device
    real = Tied()
    assert fullshard.explain(Tied, ids, **told).peak == fullshard.explain(lambda: real, ids, **told).peak


class Shifts(nn.Module):
    """Adds an fp32 buffer to what a layer returns, which makes it fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("shift", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.shift)


def test_units_cast_their_inputs_and_a_product_of_two_dtypes_is_refused() -> None:
    told = {"batch": torch.empty(64, DIM), "world": 2, "loss": torch.sum}
    with pytest.raises(ValueError, match=r"aten.addmm cannot multiply bfloat16 and float32"):
        fullshard.explain(Shifts, **told)
    r = fullshard.explain(Shifts, plan=ModuleWrapPolicy({nn.Linear}), **told)
    products = [op for op in r.traced.trace.events if isinstance(op, Op) and op.flops]
    assert {op.dtype for op in products} == {torch.bfloat16}
    with pytest.raises(ValueError, match="devices need operands of one dtype"):  # with another plan nothing casts there
        r.but(plan="auto")
    assert r.but(mp_policy=fullshard.MixedPrecisionPolicy(), plan="auto").compute_dtype == torch.float32


def test_mfu_is_of_the_peak_in_the_dtype_of_the_products() -> None:
    r = fullshard.explain(
        lambda: build().bfloat16(),
        torch.empty(64, DIM, dtype=torch.bfloat16),
        world=8,
        loss=torch.sum,
        mp_policy=fullshard.MixedPrecisionPolicy(),
    )
    assert r.compute_dtype == torch.bfloat16


class Autocasts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x)


class Disables(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return super().forward(x)


class Schedules(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.rates = [x.item() for x in torch.linspace(0, 1, 4)]


@pytest.mark.parametrize(
    "made, told",
    [
        (partial(Autocasts, 4, 4), r"runs under torch.autocast: .* Pass explain\(mp_policy=...\) instead"),
        (Schedules, r"build\(\) fails .*item\(\).* Create the tensors whose values it reads under torch.device\('cpu'\)"),
        (partial(nn.LazyLinear, 4), "'weight' has no shape before a first forward"),
    ],
)
def test_a_model_that_meta_would_show_wrongly_is_refused(made: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.explain(made, torch.empty(2, 4), world=2, loss=torch.sum)
    fullshard.explain(partial(Disables, 4, 4), torch.empty(2, 4), world=2, loss=torch.sum)


class Attends(nn.Module):
    """Attention over (heads of) dim, with another size of values, or a learned bias, or without a dimension of heads."""

    def __init__(self, values: int = 16, *, flat: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.values, self.flat, self.q, self.v = values, flat, nn.Linear(DIM, DIM), nn.Linear(DIM, 8 * values)
        self.bias = nn.Parameter(torch.zeros(8, 64, 64)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        q, v = (y.view(1, 64, 8, -1).transpose(1, 2) for y in (self.q(x), self.v(x)))
        q, v = (q.flatten(0, 1), v.flatten(0, 1)) if self.flat else (q, v)
        return nn.functional.scaled_dot_product_attention(q, q, v, attn_mask=self.bias)


@pytest.mark.parametrize(
    "options, on_gpu, on_cpu",
    [
        ({}, "flash_attention.default", "flash_attention_for_cpu.default"),
        ({"values": 8}, "efficient_attention.default", ""),
        ({"flat": True}, "", ""),
        ({"biased": True}, "efficient_attention.default", ""),
    ],
)
def test_attention_is_the_kernel_that_torch_takes_there(options: dict[str, Any], on_gpu: str, on_cpu: str) -> None:
    for gpu, kernel in (("h100-sxm", on_gpu), ("cpu", on_cpu)):
        r = fullshard.explain(partial(Attends, **options), torch.empty(1, 64, DIM), world=2, loss=torch.sum, gpu=gpu)
        found = [op.name for op in r.traced.trace.events if isinstance(op, Op) and "attention" in op.name]
        assert found[:1] == ([f"aten._scaled_dot_product_{kernel}"] if kernel else [])


def test_dropout_keeps_a_byte_for_each_element() -> None:
    def activations(*layers: nn.Module) -> int:
        told = {"batch": torch.empty(4096, DIM, dtype=torch.bfloat16), "world": 2, "loss": torch.sum}
        r = fullshard.explain(lambda: nn.Sequential(nn.Linear(DIM, DIM), *layers), **told)
        return sum(
            event.nbytes
            for event in r.traced.trace.events
            if isinstance(event, Allocated) and event.storage in r.traced.trace.kept
        )

    assert activations(nn.Dropout(0.1)) - activations() == 4096 * DIM
    assert activations(nn.Dropout(0.1).eval()) == activations()


def test_states_are_of_parameters_that_get_gradients() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    r = fullshard.explain(Half, torch.empty(64, DIM), world=2, loss=torch.sum)
    (step,) = r.setting.optimizer
    assert sum(step.states) == 2 * (DIM * DIM + DIM) * 4 // 2


def test_options_of_one_unit_decide_where_its_states_are_and_along_which_dim_it_is_sharded() -> None:
    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 else None

    plan = fullshard.plan_model(build())
    plan.set("0", offload_policy=fullshard.CPUOffloadPolicy(), shard_placement_fn=columns)
    r, plain = explain(plan=plan), explain()
    numel = sum(parameter.numel() for parameter in Block(DIM).parameters())
    assert r.setting.dims == {name: 1 for name, one in build().named_parameters() if name.startswith("0.") and one.dim() == 2}
    device, host = r.setting.optimizer
    assert host.on_host and not device.on_host
    assert sum(host.states) == 2 * 4 * numel / 8, "two moments in fp32"
    assert sum(device.states) + sum(host.states) == sum(plain.setting.optimizer[0].states)
    assert r.pinned == 4 * 4 * numel / 8, "with the shards and their gradients"
    with pytest.raises(ValueError, match="Expected the same offload_policy for all units with optimizer='muon'"):
        explain(plan=plan, optimizer="muon")


def test_tokens_are_those_of_the_largest_tensor_in_whatever_order() -> None:
    class Two(Tied):
        def forward(self, positions: Tensor, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids) + self.embedding(positions))

    batch = {"positions": torch.zeros(1, 8).long(), "ids": torch.zeros(4, 8).long()}
    for given in (batch, dict(reversed(batch.items()))):
        r = fullshard.explain(Two, given, world=2, loss=torch.sum)
        assert (r.traced.rows, r.traced.tokens, r.traced.counted) == (4, 32, "tokens")


# --- optimizers ---

SHARDS = (((5, 3), torch.float32), ((64,), torch.float32), ((), torch.float32))


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"muon"}))  # two optimizers, see below
def test_states_are_those_of_a_step_on_real_tensors(name: str) -> None:
    found = optimizer_step(OPTIMIZERS[name], SHARDS, accelerator=True)
    real = [torch.zeros(shape, requires_grad=True) for shape, _ in SHARDS]
    optimizer = OPTIMIZERS[name](real)
    for parameter in real:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [v for state in optimizer.state.values() for k, v in state.items() if isinstance(v, Tensor) and k != "step"]
    assert sorted(found.states) == sorted(v.numel() * v.itemsize for v in states)


def test_muon_has_a_momentum_for_matrices_and_the_states_of_adamw_for_the_rest() -> None:
    for options, divided in (({}, 8), ({"mesh": (2, 4)}, 4), ({"mesh": (2, 4), "states": HFSDP}, 8)):
        r = explain(dim=1024, optimizer="muon", **options)
        model = build(1024)
        matrices = sum(parameter.numel() for parameter in fullshard.matrices_of(model).matrices)
        rest = sum(parameter.numel() for parameter in model.parameters()) - matrices
        assert r.simulation.ledger.at(len(r.simulation.ledger.changes))["optimizer", ""] == pytest.approx(
            4 * (matrices + 2 * rest) / divided, rel=0.01
        )
        assert {message.kind for message in r.messages} >= {"all_to_all", "talk"}
    for options, name in (
        ({"engine": "fsdp2"}, "engine='fsdp2'"),
        ({"tensor_parallel": 2, "parallelize": lambda model, mesh: None}, "tensor_parallel"),
    ):
        with pytest.raises(ValueError, match=f"Expected optimizer='muon' without {name}"):
            explain(optimizer="muon", **options)


def test_muon_of_matrices_only_and_of_none() -> None:
    told = {"batch": torch.empty(4, 64), "world": 8, "loss": torch.sum, "optimizer": "muon"}
    matrices = fullshard.explain(lambda: nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), **told)
    assert [message.kind for message in matrices.messages].count("all_to_all") == 2
    none = fullshard.explain(lambda: nn.LayerNorm(64), **told)
    adamw = fullshard.explain(lambda: nn.LayerNorm(64), **{**told, "optimizer": "adamw"})
    assert none.messages == adamw.messages and none.peak == adamw.peak


def test_the_speed_that_a_plan_prints_is_that_of_explain() -> None:
    gpu = GPUS["h100-sxm"]
    assert gpu.peak(torch.bfloat16) * gpu.matmul == pytest.approx(H100_FLOPS, rel=1e-2)


def test_muon_of_offloaded_shards_computes_on_the_device_and_copies_both_ways() -> None:
    on_device, offloaded = (
        explain(dim=1024, optimizer="muon", offload_policy=policy)
        for policy in (fullshard.OffloadPolicy(), fullshard.CPUOffloadPolicy())
    )
    numel = sum(parameter.numel() for parameter in fullshard.matrices_of(build(1024)).matrices)
    adamw = [explain(dim=1024, offload_policy=fullshard.CPUOffloadPolicy()).timeline.links["host"]]
    assert offloaded.timeline.links["host"] - adamw[0] == pytest.approx(2 * 2 * numel / 8, rel=0.01)
    assert [m for m in offloaded.messages if m.kind == "all_to_all"] == [
        m for m in on_device.messages if m.kind == "all_to_all"
    ]
    assert offloaded.timeline.seconds > on_device.timeline.seconds


def test_the_step_of_llama_8b_on_64_gpus_computes_for_less_than_25_ms() -> None:
    """Beside what it waits for messages: Newton-Schulz of the busiest rank, and momenta and weights of its shards."""
    matrices = [(Matrix(name, shape), torch.float32) for name, shape in llama(32, 4096, 1024, 14336)]
    step, program = owner_step({(64, 1): matrices}, accelerator=True), Program()
    program.enter("", "optimizer", 0)
    step.run(Ledger(), program)
    timeline = play(program, GPUS["h100-sxm"], NETWORKS["ib-400"], (1, 64, 1))
    assert timeline.computing + timeline.host < 25e-3 and timeline.waiting < 10e-3, timeline
    (plan,) = step.plans
    sent = sum(message.nbytes for message in program.messages if message.kind == "all_to_all")
    assert sent == pytest.approx(plan.sent_nbytes(0), rel=0.02)


def test_a_fused_step_has_no_temporaries_a_foreach_step_has_them_for_all_and_a_loop_for_one() -> None:
    def most(**options: Any) -> int:
        shards = (((1024,), torch.float32),) * 8
        found = optimizer_step(partial(torch.optim.AdamW, **options), shards, accelerator=True)
        ledger = Ledger()
        replay(found.events, ledger, None)
        return ledger.peak

    assert most(fused=True) == 0 < most(foreach=False) <= 3 * 4096 < 8 * 4096 <= most()


# --- clocks ---

GPU = replace(
    GPUS["h100-sxm"], bf16=1e12, fp32=1e12, bandwidth=1e12, link=1e9, matmul=1.0, attention=1.0, streaming=1.0, launch=0.0, overlap=1.0
)  # fmt: skip
NET = replace(NETWORKS["ib-400"], base=0.0, hop=0.0, step=0.0)


def gather(unit: str, nbytes: int) -> Launch:
    return Launch("gather", unit, messages=[Message("all_gather", torch.bfloat16, nbytes, 1, 8)])


def test_a_message_is_hidden_behind_what_computes_after_it_and_the_rest_is_exposed() -> None:
    program = Program()
    program.enter("a", "forward", 0)
    ahead = gather("b", 8 * 10**9)  # 7 s at 1e9 bytes/s
    program.instructions += [ahead, Op("mm", 5 * 10**12, 1, torch.bfloat16), Await(ahead), Op("mm", 10**12, 1, torch.bfloat16)]
    found = play(program, GPU, NET, (1, 8, 1))
    assert found.seconds == pytest.approx(8.0, rel=1e-4) and found.exposed == {"b": pytest.approx(2.0, rel=1e-4)}
    assert found.computing == pytest.approx(6.0) and found.links == {"inside": 7 * 10**9}
    assert [(span.lane, round(span.start), round(span.end)) for span in found.spans] == [
        ("compute", 0, 5), ("gather", 0, 7), ("wait", 5, 7), ("compute", 7, 8)
    ]  # fmt: skip


def test_a_message_begins_behind_what_computes_when_it_is_queued_and_one_travels_at_a_time() -> None:
    program = Program()
    program.enter("a", "backward", 0)
    first, second = gather("b", 8 * 10**9), gather("c", 8 * 10**9)
    program.instructions += [Op("mm", 10**12, 1, torch.bfloat16), first, second, Await(second)]
    assert play(program, GPU, NET, (1, 8, 1)).seconds == pytest.approx(1 + 7 + 7, rel=1e-4)


def test_half_of_a_causal_product_is_computed_whatever_ran_before() -> None:
    ops = [Op("attention", 10**12, 1, torch.bfloat16, causal) for causal in (False, True)]
    seconds = []
    for order in (ops, ops[::-1]):
        program = Program()
        program.enter("", "forward", 0)
        program.instructions.extend(order)
        seconds.append(play(program, GPU, NET, (1, 8, 1)).seconds)
    assert seconds[0] == pytest.approx(seconds[1]) == pytest.approx(1.5 * 10**12 / GPU.bf16 / GPU.attention)


def test_a_device_that_is_faster_than_its_host_waits_for_it() -> None:
    program = Program()
    program.enter("a", "forward", 0)
    program.instructions += [Op("mm", 10**6, 1, torch.bfloat16)] * 100
    found = play(program, replace(GPU, launch=1e-3), NET, (1, 8, 1))
    assert found.seconds == pytest.approx(0.1, rel=0.01) and found.host == pytest.approx(0.1, rel=0.01)


def test_an_all_to_all_sends_each_rank_its_part_at_once() -> None:
    def seconds(ranks: int, nbytes: int = 10**9) -> float:
        message = Message("all_to_all", torch.bfloat16, nbytes, 1, ranks)
        return message_seconds(
            message, "gather", replace(GPU, link=1e10), replace(NET, per_gpu=1e9, efficiency=1.0), (1, 64, 1)
        )

    assert seconds(8) == pytest.approx(10**9 * 7 / 8 / 1e10, rel=0.01), "all in one machine"
    assert seconds(64) == pytest.approx(10**9 * 56 / 64 / 1e9, rel=0.01), "each card carries what its rank sends to others"
    assert seconds(1) == 0.0


def test_between_machines_all_cards_of_a_node_carry_a_part() -> None:
    def seconds(ranks: int, lane: str = "gather", mesh: tuple[int, int] = (1, 16)) -> float:
        message = Message("all_gather", torch.bfloat16, 10**9, 1, ranks)
        return message_seconds(message, lane, replace(GPU, link=1e12), replace(NET, per_gpu=1e9, efficiency=1.0), (*mesh, 1))

    assert seconds(16) == pytest.approx(10**9 / 2 / 8e9)
    assert seconds(16, "replicate", (16, 8)) == pytest.approx(10**9 * 15 / 16 / 1e9), (
        "each replica is a machine, and this rank's card carries its part"
    )
    assert seconds(4, "replicate", (4, 2)) == pytest.approx(10**9 * 3 / 4 / 1e12), (
        "four replicas of two ranks are in one machine"
    )
    assert seconds(8, "replicate", (8, 2)) == pytest.approx(10**9 / 2 / 4e9), "or in two, which have four cards each for them"
    assert seconds(8) == pytest.approx(10**9 * 7 / 8 / 1e12) and seconds(1) == 0.0


def test_a_step_lies_in_its_band_and_a_slower_network_makes_it_longer() -> None:
    r = explain(rows=4096, world=64)
    assert r.step.low < r.step.middle < r.step.high and r.step.middle == r.timeline.seconds
    assert r.but(net="ethernet-100").step.middle > r.step.middle
    assert r.mfu == pytest.approx(r.flops / r.step.middle / 989e12)
    assert r.tokens_per_second == pytest.approx(4096 / r.step.middle)


# --- pictures and files ---


def test_the_page_is_well_formed_and_names_units_and_needs_no_network(tmp_path: Path) -> None:
    r = explain()
    r.html(tmp_path / "step.html", r.but(reshard_after_forward=False))
    text = (tmp_path / "step.html").read_text()
    assert not re.search(r"https?://|<script|src=", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 4
    titles = [title.text or "" for picture in pictures for title in ElementTree.fromstring(picture).iter("title")]
    assert any(title.startswith("2: all_gather") for title in titles)
    assert any("in backward of 3" in title and "gathered: " in title for title in titles)


def test_the_key_of_a_picture_names_each_colour_of_the_row_of_compute(tmp_path: Path) -> None:
    r = explain(world=64)
    r.html(tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    key = dict(re.findall(r"<i style='background:(#\w+)'></i>([\w ]+)</span>", text.split("<h2>Streams</h2>")[1]))
    lanes = re.findall(r"<svg.*?</svg>", text, re.DOTALL)[1]
    drawn = set(re.findall(rf"y='{TOP}' width='[\d.]+' height='\d+' fill='(#\w+)'", lanes))
    assert drawn == set(key) and key[LANES["wait"]] == "waiting for collectives"


def test_a_page_is_entitled_by_what_it_is_of_and_has_limits_phases_and_steps(tmp_path: Path) -> None:
    r = explain(rows=4096, world=16, recompute="block", reshard_after_forward=False, microbatches=2)
    r = replace(r, gpu=replace(r.gpu, memory=r.reserved, context=0))
    r.html(tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    title = "Sequential, 16 h100-sxm, ib-400, 4096 rows x 2, 5 units, recomputes block, reshard_after_forward=False"
    assert f"<title>{title}</title>" in text and f"<h1>{title}</h1>" in text
    memory, lanes = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for label in ("h100-sxm: ", "92% of it: ", "reserved by the allocator: "):
        assert memory.count(label) == 1
    names = re.findall(r"y='23'>(\w+)</text>", memory)
    assert names == ["forward", "backward", "forward", "backward", "optimizer"]
    for polygon in re.findall(r"points='([^']*)'", memory):
        points = [tuple(map(float, point.split(","))) for point in polygon.split()]
        half = points[: len(points) // 2]
        assert all(a[1] == b[1] for a, b in zip(half[::2], half[1::2])), "levels are flat: nothing is between them"
    assert all(PHASES[phase] in lanes for phase in ("forward", "loss", "backward", "optimizer"))


def test_what_is_outside_of_units_is_said_by_operator() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(Block(DIM) for _ in range(2)))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    rows, times = 1 << 14, 64
    r = fullshard.explain(
        Root,
        torch.empty(rows, DIM, device="meta"),
        world=8,
        loss=lambda out: out.float().repeat(1, times).exp().sum(),
        plan=ModuleWrapPolicy({Block}),
    )
    assert r.outside["exp"] == rows * DIM * times * 4
    in_ledger = sum(n for (kind, unit), n in r.at_peak.items() if not unit and kind in ("activations", "temporaries"))
    assert sum(r.outside.values()) == in_ledger
    assert "outside of units, by operator: " in str(r) and "exp 512.0 MiB" in str(r)


def test_json_and_perfetto_have_the_figures_and_the_lanes(tmp_path: Path) -> None:
    r = explain()
    r.json(tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["verdict"] == "fits" and figures["memory"]["tensors"] == r.peak
    assert sum(row["bytes"] for row in figures["memory"]["at_peak"]) == r.peak
    assert sum(row["count"] for row in figures["messages"]) == len(r.messages)
    r.perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"compute", "gather", "reduce"} <= {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(r.step.middle * 1e6)
    assert max(sum(event["args"].values()) for event in events if event["ph"] == "C") == max(
        sum(n for (kind, _), n in r.simulation.ledger.at(at).items() if kind != "pinned host")
        for at in range(r.simulation.first_change, len(r.simulation.ledger.changes) + 1)
    )


def test_png_needs_matplotlib_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = explain()
    r.png(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'fullshard\[plot\]'"):
        r.png(tmp_path / "other.png")


# --- what cannot be ---


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * x.max().item()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"gpu": "h900"}, "gpu='h900' is unknown. Pass one of a100-40"),
        ({"net": "carrier-pigeon"}, "net='carrier-pigeon' is unknown. Pass one of ib-200"),
        (
            {"gpu": "mine.json"},
            "gpu='mine.json' does not exist. `python -m fullshard calibrate --out mine.json` writes such a file",
        ),
        ({"mesh": (3, 4)}, r"mesh must have as many ranks as the world, 8, got 3 x 4 = 12 ranks. Pass \(8,\)"),
        ({"world": 0}, "world must be an int of at least 1, got 0"),
        ({"batch": torch.empty(2, DIM + 1)}, "The model does not accept this batch: RuntimeError"),
        ({"batch": "words"}, "batch must be a tensor, a tuple of the model's arguments"),
        ({"batch": ()}, "batch has no tensor"),
        ({"batch": torch.empty(0, DIM)}, r"batch has no rows: its tensors are \(0, 128\)"),
        ({"loss": None}, r"The model returns a tensor \(64, 8\), which is no loss. Pass explain\(loss=...\)"),
        ({"optimizer": "adamm"}, "optimizer must be one of adamw, .* got 'adamm'"),
        ({"optimizer": lambda parameters: 3}, "optimizer must make a torch.optim.Optimizer of parameters, got a int"),
        ({"recompute": "all"}, "recompute must be 'none', 'block', 'selective', 'every:2' or a function"),
        ({"engine": "deepspeed"}, "engine must be 'fullshard' or 'fsdp2', got 'deepspeed'"),
        ({"reshard_after_forward": 3}, "reshard_after_forward=3 must divide the 8 ranks"),
        ({"states": "zero2"}, "states must be a StateSharding, for example fullshard.ZERO2, got 'zero2'"),
        (
            {"states": ZERO2, "reshard_after_forward": True},
            "reshard_after_forward=True cannot be combined with states",
        ),
        ({"states": HFSDP}, r"states=HFSDP needs a hybrid mesh. Pass mesh=\(replicas, ranks\), got one mesh dim of size"),
        ({"states": ZERO2, "engine": "fsdp2"}, "states=ZERO2 needs engine='fullshard': torch's FSDP2 has no such level"),
        (
            {"mp_policy": MixedPrecisionPolicy(accumulate_dtype=torch.float32), "engine": "fsdp2"},
            r"MixedPrecisionPolicy\(accumulate_dtype=\) needs engine='fullshard'",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_in_a_line_that_says_what_to_give(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        explain(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_batch_whose_gradient_is_computed_is_predicted(place: str) -> None:
    """Its copy to meta was no leaf, so that backward copied a gradient to the host."""
    batch = torch.randn(16, 8, device=place)
    peaks = [
        fullshard.explain(lambda: nn.Linear(8, 8), one, world=2, gpu="cpu", loss=lambda y: y.square().mean()).peak
        for one in (batch, batch.clone().requires_grad_())
    ]
    assert peaks[1] - peaks[0] == batch.nbytes


def test_a_model_that_is_no_function_or_asks_for_values_is_refused() -> None:
    batch = torch.empty(2, 4)
    with pytest.raises(ValueError, match="build must be a function that returns the model.*got a module"):
        fullshard.explain(nn.Linear(4, 4), batch, world=2)
    with pytest.raises(ValueError, match=r"build\(\) must return an nn.Module, got a int"):
        fullshard.explain(lambda: 3, batch, world=2)
    with pytest.raises(ValueError, match="The loss depends on no trainable parameter"):
        fullshard.explain(lambda: nn.Linear(4, 4).requires_grad_(False), batch, world=2, loss=torch.sum, optimizer=None)
    with pytest.raises(ValueError, match=r"test_explain.py:\d+ \(.*reads a number that depends on data"):
        fullshard.explain(Asks, batch.to("meta"), world=2)


def test_a_machine_that_was_measured_is_read_back_and_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_machine(path, replace(GPUS["h200"], name="mine"), NETWORKS["gloo"])
    assert gpu_of(path).name == "mine" and explain(gpu=path, net=path).gpu.memory == int(139.8 * GIB)
    path.write_text('{"gpu": {"name": "mine", "speed": 3}}')
    with pytest.raises(ValueError, match="is no file of `calibrate` .*speed.*Write it again"):
        gpu_of(path)


FACTORY = """
import torch
from torch import nn
def small():
    return lambda: nn.Linear(64, 64), (torch.empty(8, 64),)
def lossy():
    return {"build": small()[0], "batch": small()[1], "loss": torch.sum, "steps": 3}
def wide(dim=64):
    return {**lossy(), "build": lambda: nn.Linear(dim, 8), "batch": torch.empty(8, dim)}
def placed():
    return {**lossy(), "gpu": "a100-40", "net": "ethernet-100"}
def asks():
    return {**lossy(), "step": 3}
def fails():
    raise RuntimeError("no data")
def large():
    return {**lossy(), "build": lambda: nn.Sequential(*[nn.Linear(65536, 65536) for _ in range(20)]), "batch": torch.empty(8, 65536)}
policy = "auto"
number = 3
"""


@pytest.mark.parametrize(
    "arguments, status, told",
    [
        ("models.py:lossy --world 4", 0, "fits: "),
        ("models:lossy --world 4 --mesh 2x2 --dtype fp32 --reshard false --microbatches 2 --plan models.py:policy", 0, "2 x 2 ranks"),
        ("models:large --world 2", 1, "does not fit: "),
        ("models:placed --world 4", 0, "on each a100-40, 4 ranks"),
        ("models:placed --world 4 --gpu h200", 0, "on each h200, 4 ranks"),
        ("models:asks --world 4", 2, "The factory returns 'step', which is no argument of explain()"),
        ("models:small --world 4", 2, "which is no loss"),
        ("models:lossy --world 4 --gpu h900", 2, "gpu='h900' is unknown"),
        ("models:nothing --world 4", 2, "'models' has no 'nothing'. It has small, lossy, wide, placed"),
        ("models:number --world 4", 2, "Expected 'models:number' to be a function that returns (build, batch), got a int"),
        ("elsewhere.py:small --world 4", 2, "'elsewhere.py:small' cannot be loaded: elsewhere.py is not a file"),
        ("elsewhere:small --world 4", 2, "'elsewhere:small' cannot be loaded: No module named 'elsewhere'"),
        ("models:fails --world 4", 2, "models:fails raises RuntimeError: no data (at models.py:15)"),
        ("models --world 4", 2, "Expected module:name or file.py:name, got 'models'"),
        ("models:lossy --world 4 --mesh 2by2", 2, "--mesh takes sizes, as in 8x16"),
        ("models:wide --world 4 --with dim=128 --reduce-dtype bf16 --find fastest", 0, "fits: "),
        ("models:wide --world 4 --with dim", 2, "--with takes NAME=VALUE, as in length=8192, got 'dim'"),
        ("models:wide --world 4 --with deep=3", 2, "--with does not match the factory, wide(dim=64): got an unexpected keyword argument 'deep'"),
        ("models:lossy --world 4 --reshard maybe", 2, "--reshard takes true, false, or a number of ranks"),
    ],
)  # fmt: skip
def test_the_command_line_says_it_in_its_exit_status(arguments: str, status: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(FACTORY)
    found = command_line("explain", *arguments.split(), cwd=tmp_path)
    assert found.returncode == status, found.stderr
    lines = (found.stdout if status < 2 else found.stderr).splitlines()
    assert told in lines[0] and (status < 2 or len(lines) == 1)


def test_a_reduce_dtype_alone_changes_no_compute_dtype() -> None:
    """On the CPU it switched the model to bf16, and it replaced the policy of the factory."""
    half, low = torch.float16, torch.bfloat16
    given = fullshard.MixedPrecisionPolicy(half, half, output_dtype=torch.float32)
    for arguments, expected in (
        ({"gpu": "cpu"}, fullshard.MixedPrecisionPolicy(None, low)),
        ({}, fullshard.MixedPrecisionPolicy(low, low)),
        ({"mp_policy": given}, replace(given, reduce_dtype=low)),
    ):
        assert _mp_policy(Namespace(dtype=None, reduce_dtype="bf16"), arguments) == expected
    assert _mp_policy(Namespace(dtype="fp32", reduce_dtype=None), {}) == fullshard.MixedPrecisionPolicy(None, torch.float32)


def test_a_traceback_is_shown_to_who_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(FACTORY)
    found = command_line("explain", "models:fails", "--world", "4", "--traceback", cwd=tmp_path)
    assert found.returncode == 2 and not found.stdout
    assert {"Traceback (most recent call last):", "RuntimeError: no data"} <= set(found.stderr.splitlines())


# --- searching ---


def test_a_search_names_the_smallest_change_that_fits_and_what_no_other_beats() -> None:
    base = explain(rows=4096)
    memory = int((base.needed - (8 << 20)) / 0.92)  # a little too small
    gpu = replace(GPUS["h100-sxm"], memory=memory)
    found = fullshard.search(partial(build, DIM), torch.empty(4096, DIM), world=8, loss=torch.sum, gpu=gpu)
    assert not found.allows(found.base) and found.smallest is not None and len(found.smallest.changes) == 1
    assert found.allows(found.smallest) and found.best is found.smallest
    others = [one for one in found.tried if len(one.changes) == 1 and found.allows(one)]
    assert all(one.speed <= found.smallest.speed for one in others)
    for one in found.front:
        assert not [other for other in found.tried if other.speed > one.speed and other.needed < one.needed]
    names = {name for one in found.tried for name in one.changes}
    assert {"recompute", "microbatches", "reshard_after_forward", "mp_policy", "comm_policy", "offload_policy", "plan"} <= names
    assert f"the smallest change that fits: {found.smallest}" in str(found)
    again = explain(rows=4096, gpu=gpu, **found.smallest.changes)
    assert again.needed == found.smallest.needed, "what a search says is what explain says"


def test_a_search_grows_the_batch_and_shrinks_the_world_until_it_does_not_fit() -> None:
    gpu = replace(GPUS["h100-sxm"], memory=int((explain(rows=4096).needed) / 0.92) + (64 << 20))
    told: dict[str, Any] = {"world": 8, "loss": torch.sum, "over": {"recompute": ("none", "block")}}
    larger = fullshard.search(partial(build, DIM), torch.empty(1024, DIM), goal="largest_batch", gpu=gpu, **told)
    assert larger.best is not None and larger.best.changes["rows"] >= 4096
    fewer = fullshard.search(partial(build, DIM), torch.empty(1024, DIM), goal="fewest_gpus", gpu=gpu, **told)
    assert fewer.best is not None and fewer.best.changes["world"] == 1
    nothing = fullshard.search(partial(build, DIM), torch.empty(64, DIM), gpu=replace(gpu, memory=1 << 20), **told)
    assert nothing.best is None and "simulated settings fits" in str(nothing)


def test_a_search_changes_the_rows_that_the_batch_has_and_names_what_cannot_be() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, mask: Tensor, x: Tensor) -> Tensor:
            return self.layer(x) * mask

    batch = {"mask": torch.ones(1, DIM), "x": torch.empty(64, DIM)}
    told = {"world": 16, "loss": torch.sum, "reshard_after_forward": 8, "over": {"recompute": ("none", "block")}}
    found = fullshard.search(Masked, batch, goal="largest_batch", **told)
    assert found.best is not None and found.best.changes["rows"] == 64 << 12 and found.best.explanation.traced.rows == 64 << 12
    fewest = fullshard.search(Masked, batch, goal="fewest_gpus", **told)
    assert (
        fewest.best is not None and fewest.skipped and "invalid: " in str(fewest) and "must divide the 1 ranks" in str(fewest)
    )


@pytest.mark.parametrize(
    "options, told",
    [({"goal": "cheapest"}, "goal must be one of fits, fastest"), ({"budget": 1.5}, "budget must be a fraction of the memory")],
)
def test_a_search_refuses_what_it_does_not_know(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.search(build, torch.empty(64, DIM), world=8, loss=torch.sum, **options)


class Logits(nn.Module):
    """Its loss needs a copy of the output, and not the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_loop_that_keeps_the_output_needs_its_memory_until_the_backward_is_over() -> None:
    rows, targets = 1 << 16, torch.empty(1 << 16, dtype=torch.long, device="meta")

    def loss(out: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.float(), targets)

    kept = fullshard.explain(Logits, torch.empty(rows, DIM, device="meta"), world=8, loss=loss)
    freed = kept.but(keep_output=False)
    assert kept.peak - freed.peak == rows * DIM * 2, "in bf16"


def test_a_report_names_the_network_and_says_what_a_slower_one_would_cost() -> None:
    slow = explain(dim=1024, world=64)
    assert "on each h100-sxm, 64 ranks by ib-400\n" in str(slow)
    (note,) = slow.notes
    assert note.startswith("the step depends on the network between machines, ib-400, which h100-sxm usually have (50 GB/s")
    told = explain(dim=1024, world=64, net="ib-200")
    assert "ib-200 (25 GB/s" in told.notes[0] and told.timeline.seconds > slow.timeline.seconds
    half = slow.but(net=replace(slow.network, efficiency=slow.network.efficiency / 2))
    assert f"takes {half.timeline.seconds / slow.timeline.seconds:.2f} times as long" in note
    assert not explain(dim=1024, world=8).notes, "one machine"


# --- what is another step than it seems ---


@torch.compile
def compiled_square(x: Tensor) -> Tensor:
    return x * x


class CallsCompiled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return compiled_square(super().forward(x))


def one_block_compiled() -> nn.Module:
    model = build()
    model[1].compile()
    return model


@pytest.mark.parametrize(
    "made", [lambda: torch.compile(build()), one_block_compiled, lambda: nn.Sequential(CallsCompiled(DIM, DIM), build())]
)
def test_what_is_compiled_has_a_range_and_is_said(made: Any) -> None:
    batch = torch.empty(1 << 20, DIM, device="meta")
    r = fullshard.explain(made, batch, world=8, loss=torch.sum)
    assert len(r.notes) == 1 and r.notes[0].startswith("torch.compile is not simulated") and f"note: {r.notes[0]}" in str(r)
    seconds = r.timeline.seconds
    assert r.step.middle == pytest.approx(0.86 * seconds) and r.step.low < 0.83 * seconds and r.step.high > 0.89 * seconds
    context = r.gpu.context
    assert r.needs == (int(0.83 * r.peak) + context, int(0.94 * r.reserved) + context)
    for memory, verdict in ((r.needs[0] - 1, "no"), (r.needs[0], "tight"), (r.needs[1] / 0.91, "fits")):
        assert replace(r, gpu=replace(r.gpu, memory=int(memory))).verdict == verdict
    assert re.match(r"fits: [0-9.]+ GiB to [0-9.]+ GiB of 79.1 GiB", str(r))
    plain = fullshard.explain(build, batch, world=8, loss=torch.sum)
    assert not plain.notes and plain.needs == (plain.peak + context, plain.needed)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "made, told",
    [
        (
            lambda: nn.Sequential(torch.jit.script(Scripted()), nn.Linear(DIM, 4)),
            r"'0' is TorchScript \(.*Return the nn.Module",
        ),
        (lambda: nn.DataParallel(build()), "the model that build.* returns is a DataParallel, .* Return the module inside"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_wrapped_modules_whose_step_is_another_one_are_refused_by_name(made: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.explain(made, torch.empty(4, DIM), world=8, loss=torch.sum)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"world": 12}, "world=12 is no multiple of the 8 h100-sxm of one machine. Pass the number of GPUs of each machine as per_node="),
        ({"per_node": 0}, "per_node must be an int of at least 1, got 0"),
        ({"recompute": "block", "plan": ModuleWrapPolicy({nn.Sequential})}, "recompute='block' recomputes blocks, but this plan has none"),
    ],
)  # fmt: skip
def test_options_that_would_be_answered_for_something_else_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        explain(**options)
    assert explain(world=12, per_node=4).timeline.links["between"] > 0 == explain(world=8).timeline.links.get("between", 0)


def test_cuts_along_other_dims_need_the_copies_that_undo_them_and_are_refused_where_they_cannot_be() -> None:
    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.dim() == 2 else None

    direct = fullshard.CommPolicy(direct_min_bytes=0)  # rows arrive where they are used, and columns cannot
    rows, found = (explain(comm_policy=direct, shard_placement_fn=function) for function in (None, columns))
    assert found.setting.dims == {name: 1 for name, parameter in build().named_parameters() if parameter.dim() == 2}
    assert found.peak > rows.peak
    narrow = [explain(dim=12, optimizer="sgd-momentum", shard_placement_fn=function) for function in (None, columns)]
    states = [sum(step.states) for r in narrow for step in r.setting.optimizer]
    assert states[1] > states[0], "12 columns are cut over 8 ranks in twos, 48 rows in sixes"
    for function, told in (
        (
            lambda parameter: Shard(2),
            r"shard_placement_fn shards '0.up.weight' along dim 2, which its shape \(512, 128\) does not have",
        ),
        (lambda parameter: 1, r"shard_placement_fn must return None or Shard\(dim\) for explain\(\), got 1 for '0.up.weight'"),
    ):
        with pytest.raises(ValueError, match=told):
            explain(shard_placement_fn=function)
    with pytest.raises(ValueError, match="is simulated only with engine='fullshard'"):
        explain(shard_placement_fn=columns, engine="fsdp2")


class Float8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        one, other = x.to(torch.float8_e4m3fn), self.weight.to(torch.float8_e4m3fn).t()
        scale = x.new_ones((), dtype=torch.float32)
        with torch.no_grad():  # torchao's has a backward
            product = torch._scaled_mm(one, other, scale, scale, out_dtype=torch.bfloat16)
        return product + super().forward(x)


def test_products_in_float8_have_a_peak_of_their_own_and_are_said() -> None:
    batch = torch.empty(64, DIM, device="meta")
    r = fullshard.explain(partial(Float8, DIM, DIM), batch, world=8, loss=torch.sum)
    assert r.gpu.peak(torch.float8_e4m3fn) == 1979e12 and r.notes[0].startswith("matrix products in float8")
    with pytest.raises(ValueError, match="a100-80 has no matrix products in float8_e4m3fn. Choose another gpu, or bf16"):
        r.but(gpu="a100-80")


def test_a_failure_is_said_with_its_part_module_and_line() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def lossy(output: Tensor) -> Tensor:
        raise KeyError("labels")

    def told(**options: Any) -> str:
        with pytest.raises(ValueError) as refused:
            fullshard.explain(Wrong, **{"batch": torch.empty(2, 4, device="meta"), "world": 2, "loss": torch.sum, **options})
        return str(refused.value)

    assert re.fullmatch(
        r"The loss raises KeyError: 'labels' \(at test_explain.py:\d+\), called with the output of the model", told(loss=lossy)
    )
    assert "(in 'inner.0', at test_explain.py:" in told(batch=torch.empty(2, 3, device="meta"))
    assert (
        told(loss=lambda o: o)
        == "loss= expected a function that returns a tensor of one element, got shape (2, 4). Return its .mean(), for example."
    )
    assert "returns a tensor of one element, got a float. Return the tensor" in told(loss=lambda o: 3.0)


# --- what depends on values ---


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 4), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(1, -1).indices
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out + x[chosen[:, 0] == 0].sum()


def test_experts_are_traced_with_the_rows_that_they_are_said_to_get() -> None:
    def flops(imbalance: float) -> int:
        routed = {"aten::nonzero": fullshard.routed(1 / 4, imbalance)}
        return fullshard.explain(Experts, torch.empty(64, DIM), world=2, loss=torch.sum, footprints=routed).flops

    once = 4 * 2 * 2 * (64 // 4) * DIM * DIM  # four experts, forward and weight gradient, a multiply-add is two
    assert flops(2.0) - flops(1.0) == once and flops(1.0) - once == 2 * 64 * DIM * 4, (
        "the rest is the router, which has no gradient"
    )
    with pytest.raises(ValueError, match=r"result of aten::nonzero as explain\(footprints=.*fullshard\.routed\(\)"):
        fullshard.explain(Experts, torch.empty(64, DIM), world=2, loss=torch.sum)
    with pytest.raises(ValueError, match=r"routed\(\) expected a share between 0 and 1"):
        fullshard.routed(2.0)
    numbers = {"aten::_local_scalar_dense": lambda tensor: 3.0}
    assert fullshard.explain(Asks, torch.empty(2, 4), world=2, footprints=numbers).fits


class Rounds(nn.Linear):
    """Reads as many rows as its footprint says, which differs from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.cat([x, super().forward(x[x[:, 0].nonzero()[:, 0]])])
        return x


def test_a_footprint_is_asked_each_time() -> None:
    rows = [10, 20, 30]
    given = iter(rows)

    def nonzero(mask: Tensor) -> Tensor:
        return torch.empty(next(given), 1, dtype=torch.long, device="meta")

    footprints = {"aten::nonzero": nonzero}
    r = fullshard.explain(partial(Rounds, DIM, DIM), torch.empty(64, DIM), world=2, loss=torch.sum, footprints=footprints)
    forward = [op.flops for op in r.traced.trace.events if isinstance(op, Op) and op.name == "aten.addmm.default"]
    assert forward == [2 * n * DIM * DIM for n in rows]


def test_the_speed_of_replicas_is_compared_with_that_of_their_own_link() -> None:
    """Two replicas of eight shards are on two machines, but their all-reduce was compared with one inside of a machine."""
    r = explain(world=16, mesh=(2, 8))
    launches = [one for one in r.simulation.program.instructions if isinstance(one, Launch)]
    largest = {}
    for kind in ("all_reduce", "all_gather"):
        sent = [
            (message, one.stream) for one in launches for message in one.messages if message.kind == kind and message.ranks > 1
        ]
        largest[kind] = max(sent, key=lambda one: one[0].nbytes)
    assert largest["all_reduce"][1] == "replicate"
    speeds = {
        kind: message.nbytes / message_seconds(message, stream, r.gpu, r.network, r.setting.mesh)
        for kind, (message, stream) in largest.items()
    }
    run = SimpleNamespace(speeds=lambda: speeds, waiting={"": 1.0}, step=2.0)
    assert not list(_network(r, run))  # type: ignore[arg-type]
    run.speeds = lambda: {**speeds, "all_reduce": 2 * speeds["all_reduce"]}
    (one,) = _network(r, run)  # type: ignore[arg-type]
    assert one.weight == 0.5 and one.text.endswith("2.00 of the assumed speed")


def test_a_plan_that_was_edited_is_read_again() -> None:
    plan = fullshard.plan_model(build())
    r = explain(plan=plan)
    plan.drop(plan.units[0].name)
    edited = r.but(plan=plan)
    assert len(edited.plan.units) == len(r.plan.units) - 1 == len(plan.units)
    assert edited.messages == explain(plan=plan).messages != r.messages
    plan.set(plan.units[0].name, reshard_afer_forward=False)
    with pytest.raises(TypeError, match=r"fully_shard\(\) has no option 'reshard_afer_forward'"):
        r.but(plan=plan)


def test_what_cannot_be_predicted_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="world must be an int of at least 1, got '8'"):
        explain(world="8")
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        fullshard.calibrate("machine.json", ranks=0)


class Grouped(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.kv))
        return nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)


def test_groups_of_heads_in_fp32_take_the_memory_of_all_weights() -> None:
    """torch has no memory-efficient kernel for them, and keeps a weight per pair of positions and head."""
    told = {"world": 1, "loss": torch.sum, "batch": torch.empty(2, 256, 64)}
    weights = 2 * 8 * 256 * 256 * 4
    assert fullshard.explain(Grouped, **told, mp_policy=MixedPrecisionPolicy()).peak > weights
    assert fullshard.explain(Grouped, **told, mp_policy=MixedPrecisionPolicy(torch.bfloat16)).peak < weights
