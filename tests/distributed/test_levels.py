"""The levels of ZeRO: each trains as the unsharded model does, communicates as often as its table says, and can be changed."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from hypothesis import given
from hypothesis import strategies as st
from models import (
    Block,
    Stack,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    batch,
    full,
    shard_stack,
    share_grads,
    square,
)
from rotation import random_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import (
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateError,
    StateSharding,
    fully_shard,
)
from fullshard.policies import PRESETS
from fullshard.wrap import ModuleWrapPolicy

BOTH = ("replicate", "shard")
HFSDPS = (StateSharding(gradients=BOTH, optimizer=BOTH), HFSDP)
UNITS = 4  # of a sharded Stack: three blocks and the root
LEVELS = (ZERO1, ZERO2, ZERO3)  # of a flat mesh; HFSDP is in test_hfsdp.py, and below where meshes may be hybrid


def sent(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Collectives that `run` starts, by kind."""
    with fullshard.counting(model) as messages:
        run()
    found = Counter(message.kind for message in messages)
    return {kind: found[kind] for kind in ("all_gather", "reduce_scatter")}


def step(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, microbatches: int = 1) -> None:
    for index in range(microbatches):
        model.set_is_last_backward(index == microbatches - 1)
        square(model(world.mine(batch(number * 10 + index)))).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- how often each level communicates ---


@pytest.mark.rotates(3)
@pytest.mark.parametrize("states", LEVELS, ids=str)
@pytest.mark.parametrize("microbatches", [1, 8])
@ranks(2)
def test_a_step_has_as_many_collectives_as_the_table_says(world: World, microbatches: int, states: StateSharding) -> None:
    model = shard_stack(Stack(), world.mesh, states=states, reshard_after_forward=None if states.keeps_parameters else True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(world, model, optimizer, 0, microbatches)
    gathers = {"ZERO3": 2 * microbatches, "ZERO2": 1, "ZERO1": 1}[str(states)]
    reductions = {"ZERO3": microbatches, "ZERO2": microbatches, "ZERO1": 1}[str(states)]
    found = sent(model, lambda: step(world, model, optimizer, 1, microbatches))
    assert found == {"all_gather": gathers * UNITS, "reduce_scatter": reductions * UNITS}
    explained = fullshard.explain(
        Stack, torch.empty(1, 5), world=2, gpu="cpu", loss=square, microbatches=microbatches, accumulate=False, states=states,
        reshard_after_forward=None if states.keeps_parameters else True, plan=ModuleWrapPolicy({Block}),
    )  # fmt: skip
    told = Counter(message.kind for message in explained.messages)
    assert {kind: told[kind] for kind in found} == found


@pytest.mark.parametrize("states", [ZERO1, ZERO2], ids=str)
@ranks(2)
def test_only_written_shards_are_gathered_anew(world: World, states: StateSharding) -> None:
    model = shard_stack(Stack(), world.mesh, states=states)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = world.mine(batch(0))

    def look() -> None:
        with torch.no_grad():
            model(x)

    assert sent(model, look)["all_gather"] == UNITS, "nothing is unsharded yet"
    assert sent(model, look)["all_gather"] == 0, "a forward without grad keeps the parameters as well"
    square(model(x)).backward()
    optimizer.zero_grad()  # a step that is skipped, as GradScaler skips it
    assert sent(model, look)["all_gather"] == 0
    square(model(x)).backward()
    optimizer.step()
    assert sent(model, look)["all_gather"] == UNITS - 1, "the frozen unit was not written"
    with torch.no_grad():
        torch._foreach_mul_([parameter.to_local() for parameter in model.blocks[1].parameters()], 0.5)
    assert sent(model, look)["all_gather"] == 1
    model.load_state_dict(model.state_dict())
    assert sent(model, look)["all_gather"] == UNITS
    assert all(parameter.placements == (torch.distributed.tensor.Shard(0),) for parameter in model.parameters())


STEPS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
}


@pytest.mark.proves("44a")
@pytest.mark.parametrize("kept", ["ZERO2", "reshard_after_backward", "unshard"])
@pytest.mark.parametrize("kind", STEPS)
@ranks(2)
def test_a_step_of_any_implementation_is_seen(world: World, kind: str, kept: str) -> None:
    """Fused operations move no version counter: forwards of units that stay unsharded would use the weights of before."""
    reference = Stack()
    model = shard_stack(copy.deepcopy(reference), world.mesh, states=ZERO2 if kept == "ZERO2" else ZERO3)
    if kept == "reshard_after_backward":
        model.set_reshard_after_backward(False)
    optimizers = [STEPS[kind](one.parameters()) for one in (model, reference)]
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())  # before the hooks of all optimizers
    for number in range(3):
        if kept == "unshard":
            model.unshard()
        square(model(world.mine(batch(number)))).backward()
        square(reference(batch(number))).backward()
        share_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert_near(model(batch(7)), reference(batch(7)), f"step {number}")
    closure = lambda: square(model(batch(3))).backward()
    with torch.no_grad():
        before = model(batch(7))
        optimizers[0].step(torch.enable_grad()(closure))
        assert not torch.equal(model(batch(7)), before)


@ranks(2)
def test_the_gathers_of_a_step_are_prefetched(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, states=ZERO2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(world, model, optimizer, 0)
    before = fullshard.stats(model)
    before = before.gathers, before.prefetched, before.missed
    step(world, model, optimizer, 1)
    now = fullshard.stats(model)
    assert (now.gathers - before[0], now.prefetched - before[1], now.missed - before[2]) == (UNITS, UNITS - 1, 0)


@ranks(1, 3)
def test_one_reduction_if_the_last_microbatch_is_known_late(world: World) -> None:
    base = Stack()
    reference = copy.deepcopy(base)
    model = shard_stack(base, world.mesh, states=ZERO1)
    model.set_manual_backward_finalization(True)
    for index in range(3):
        found = sent(model, lambda index=index: square(model(world.mine(batch(index)))).backward())
        assert found["reduce_scatter"] == 0 and all(parameter.grad is None for parameter in model.parameters())
        square(reference(batch(index))).backward()
    assert sent(model, model.finalize_backward)["reduce_scatter"] == UNITS
    assert_same_grads(model, reference)


@ranks(2)
def test_accumulate_and_unmarked_backwards_under_zero1(world: World) -> None:
    base = Stack()
    reference = copy.deepcopy(base)
    model = shard_stack(base, world.mesh, states=ZERO1)
    with model.accumulate():
        square(model(world.mine(batch(0)))).backward()
    for index in (1, 2):  # each ends a step, so both reduce, and their gradients add up
        found = sent(model, lambda index=index: square(model(world.mine(batch(index)))).backward())
        assert found["reduce_scatter"] == UNITS
    for index in range(3):
        square(reference(batch(index))).backward()
    assert_same_grads(model, reference)


@pytest.mark.proves("44b")
@ranks(2)
def test_a_step_before_the_last_microbatch_is_refused(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, states=ZERO1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_is_last_backward(False)
    square(model(world.mine(batch(0)))).backward()
    with pytest.raises(StateError, match=r"is only kept on each rank. Run the last backward of the step"):
        optimizer.step()
    with pytest.raises(StateError, match=r"set_states\(\) was called while gradients"):
        model.set_states(ZERO3)
    model.zero_grad()
    model.set_states(ZERO3)


def test_a_plan_says_how_often_each_unit_communicates() -> None:
    with torch.device("meta"):
        plan = fullshard.plan_model(Stack(), ModuleWrapPolicy({Block}))
    plan.set("blocks.1", states=ZERO2)
    plan.set("blocks.2", states=ZERO1)
    assert "states=ZERO2" in str(plan)
    found = {name: (one.gathers, one.reductions) for name, one in plan.messages(2)}
    assert list(found.values()) == [
        ("2 per microbatch", "1 per microbatch"),
        ("1 per step", "1 per microbatch"),
        ("1 per step", "1 per step"),
        ("1 per microbatch", "1 per microbatch"),
    ]
    everywhere = {(one.gathers, one.reductions) for _, one in plan.messages(2, states=HFSDP) if one.gathers != "never"}
    assert ("2 per microbatch, 1 per step over replicas", "1 per microbatch, 1 per step over replicas") in everywhere
    levels = {one.gathers for _, one in plan.messages(2, states=ZERO1)}
    assert levels == {"1 per step"} and "1 per step" in str(plan.messages(2))
    with pytest.raises(ValueError, match="reshard_after_forward=True cannot be combined with states=ZERO2"):
        plan.messages(2, reshard_after_forward=True)
    for module in ("blocks.1", "blocks.2"):
        plan.set(module, states=ZERO3)
    assert {one.gathers for _, one in plan.messages(2, reshard_after_forward=1)} == {"1 per microbatch"}


@ranks(2)
def test_a_plan_with_levels_shards_as_it_says(world: World) -> None:
    plan = fullshard.plan_model(Stack(), ModuleWrapPolicy({Block}))
    plan.set("blocks.1", states=ZERO2)
    model = Stack()
    fullshard.shard_model(model, mesh=world.mesh, policy=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(world, model, optimizer, 0, 2)
    found = sent(model, lambda: step(world, model, optimizer, 1, 2))
    assert found == {"all_gather": 2 * 4 + 2 * 1 + 1, "reduce_scatter": 2 * UNITS}


# --- values ---


class Exact(nn.Module):
    """Whole numbers of at most 20 bits, whose sums are exact in any order; a layer that is not used; empty and uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def whole(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randint(-2, 3, shape, generator=generator).float())

        self.first, self.second, self.scale = whole(5, 7), whole(7, 3), whole(1)
        self.unused = whole(4)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first @ self.second) * self.scale


def exact_results(world: World, mesh: DeviceMesh, states: StateSharding) -> list[Tensor]:
    """Weights and gradients after two steps of three microbatches, whose sums are exact in any order."""
    model = Exact()
    fully_shard(model, mesh=mesh, states=states)
    model.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    for number in range(2):
        for index in range(3):
            model.set_is_last_backward(index == 2)
            rows = torch.arange(60.0).view(12, 5).add(7 * index + number).remainder(5) - 2
            model(world.mine(rows)).sum().backward()
        optimizer.step()
        if number == 0:
            optimizer.zero_grad()
    assert model.unused.grad is None
    return [full(tensor) for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]


@ranks(1, 2, 3, 4)
def test_exactly_summable_values_are_bitwise_equal_on_all_levels(world: World) -> None:
    first, *others = (exact_results(world, world.mesh, states) for states in LEVELS)
    for other in others:
        assert len(first) == len(other) and all(map(torch.equal, first, other))


@dataclass(frozen=True)
class Case:
    """Options of a model, and what a loop does."""

    levels: tuple[str, ...]  # of the three blocks and the root
    mp: MixedPrecisionPolicy
    comm: CommPolicy
    offload: bool
    hybrid: bool
    recompute: bool
    frozen: int | None  # a block
    microbatches: int
    mark: str  # how microbatches before the last one are marked
    loop: tuple[str, ...]  # what each step does beside
    to_none: bool


CASES = st.builds(
    Case,
    levels=st.lists(st.sampled_from(sorted(PRESETS)), min_size=4, max_size=4).map(tuple)
    | st.sampled_from(sorted(PRESETS)).map(lambda level: (level,) * 4),
    mp=st.sampled_from([MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float64)]),
    comm=st.builds(
        CommPolicy,
        direct_min_bytes=st.sampled_from([None, 0, float("inf")]),
        prefetch_bytes=st.sampled_from([None, 0, 10**6]),
        reductions_in_flight=st.integers(1, 2),
    ),
    offload=st.booleans(),
    hybrid=st.booleans(),
    recompute=st.booleans(),
    frozen=st.none() | st.integers(0, 2),
    microbatches=st.integers(1, 3),
    mark=st.sampled_from(["last", "accumulate", "none"]),
    loop=st.lists(
        st.sampled_from(["", "", "eval", "skip", "load", "change", "raise forward", "raise backward", "raise step"]),
        min_size=2,
        max_size=4,
    ).map(tuple),
    to_none=st.booleans(),
)


class Fails(nn.Module):
    """A layer that raises in forward or in backward when it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.told = inner, ""

    def forward(self, x: Tensor) -> Tensor:
        if self.told == "raise forward":
            raise ZeroDivisionError
        out = self.inner(x)
        if self.told == "raise backward" and out.requires_grad:
            out.register_hook(lambda grad: 1 / 0)
        return out


class Net(nn.Module):
    """Three blocks of uneven sizes, some of them smaller than the ranks; recomputed if told so."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, size), nn.Tanh(), nn.Linear(size, 5)) for size in (1, 3, 8))
        self.blocks[1][1] = Fails(self.blocks[1][1])
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x * self.scale


def run(case: Case, mesh: DeviceMesh, mine: Callable[[Tensor], Tensor]) -> None:
    """Train a sharded net and an unsharded one, and compare gradients and weights in each step."""
    torch.manual_seed(0)
    reference = Net(case.recompute)
    if case.frozen is not None:
        reference.blocks[case.frozen].requires_grad_(False)
    model = copy.deepcopy(reference)
    options = {"mesh": mesh, "mp_policy": case.mp, "comm_policy": case.comm}
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    levels = [ZERO3 if mesh.ndim == 1 and level == "HFSDP" else PRESETS[level] for level in case.levels]
    for module, level in zip((*model.blocks, model), levels):
        fully_shard(module, states=level, **options)
    pair = ((model, mine), (reference, lambda x: x))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one, _ in pair]
    for number, what in enumerate(case.loop):
        if what == "eval":
            with torch.no_grad():
                outs = [one(part(batch(number))) for one, part in pair]
            torch.testing.assert_close(outs[0], mine(outs[1]), rtol=1e-4, atol=1e-5)
        if what == "load":
            with torch.no_grad():
                for optimizer in optimizers:
                    for parameter in optimizer.param_groups[0]["params"]:
                        parameter.mul_(0.75)
        if what == "change":
            for module, level in zip((*model.blocks, model), levels):
                others = HFSDPS if level.shards_over_replicas else LEVELS
                module.set_states(others[number % len(others)], recurse=False)
        if what.startswith("raise") and what != "raise step":
            for one, part in pair:
                one.blocks[1][1].told = what
                if case.mark != "none" and one is model:
                    one.set_is_last_backward(True)
                with pytest.raises(ZeroDivisionError):
                    square(one(part(batch(number)))).backward()
                one.blocks[1][1].told = ""
                one.zero_grad()
            assert fullshard.any_failed(failed=True)
        for index in range(case.microbatches):
            last = index == case.microbatches - 1
            for one, part in pair:
                marked = contextlib.nullcontext()
                if case.mark == "last" and one is model:
                    one.set_is_last_backward(last)
                if case.mark == "accumulate" and one is model and not last:
                    marked = one.accumulate()
                with marked:
                    square(one(part(batch(10 * number + index)))).backward()
        assert_same_grads(model, reference, 1e-4)
        share_grads(model, reference)
        if what == "raise step":
            for optimizer in optimizers:
                handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                handle.remove()
        for optimizer in optimizers:
            if what != "skip":
                optimizer.step()
            optimizer.zero_grad(set_to_none=case.to_none)
    assert_same_parameters(model, reference, 1e-4)


@ranks(1, 2, 4)
def test_any_level_and_options_train_as_the_unsharded_model_does(world: World) -> None:
    hybrid = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard")) if world.size > 1 else None

    @random_cases(64)
    @given(case=CASES)
    def check(case: Case) -> None:
        run(case, hybrid if case.hybrid and hybrid is not None else world.mesh, world.mine)

    check()


# --- checkpoints, and changes ---


@pytest.mark.rotates(3)
@ranks(1, 2, 3)
def test_a_checkpoint_of_one_level_loads_under_every_other(world: World) -> None:
    folder = world.folder("levels")
    models = {}
    for states in LEVELS:
        torch.manual_seed(0)
        models[states] = shard_stack(Stack(), world.mesh, states=states)
        optimizer = torch.optim.AdamW(models[states].parameters())
        step(world, models[states], optimizer, 0, 2)
        dcp.save(
            {"model": models[states].state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / str(states)
        )
    for states in LEVELS:
        for other in LEVELS:
            torch.manual_seed(1)
            model = shard_stack(Stack(), world.mesh, states=other)
            optimizer = torch.optim.AdamW(model.parameters())
            step(world, model, optimizer, 1, 2)  # so that unsharded parameters of before are there
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=folder / str(states))
            model.load_state_dict(state["model"])
            for got, want in zip(model.parameters(), models[states].parameters()):
                assert torch.equal(full(got), full(want))
            with torch.no_grad():
                x = batch(5)
                assert torch.equal(model(x), models[states](x)), "computed with what was loaded"


@ranks(2)
def test_a_change_of_level_takes_effect_at_once_and_keeps_everything(world: World) -> None:
    base = Stack()
    reference = copy.deepcopy(base)
    model = shard_stack(base, world.mesh)
    pair = [(model, world.mine), (reference, lambda x: x)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one, _ in pair]
    units = fullshard.core.units_of(model, True)  # type: ignore[attr-defined]

    for number, states in enumerate((ZERO2, ZERO1, ZERO3, ZERO1, ZERO2, ZERO3)):
        found = sent(model, lambda states=states: model.set_states(states))  # anew, since each step writes
        kept = states.keeps_parameters
        assert found["all_gather"] == (UNITS if kept else 0)
        nbytes = sum(group.unsharded_nbytes for unit in units for group in unit.groups)
        buffers = [buffer for unit in units for group in unit.groups for buffer in group.buffers]
        assert sum(buffer.memory for buffer in buffers) == (nbytes if kept else 0)
        assert not kept or sent(model, lambda: model(world.mine(batch(0))))["all_gather"] == 0
        for one, part in pair:
            square(one(part(batch(number)))).backward()
        assert_same_grads(model, reference)
        share_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@ranks(2)
def test_copies_undo_and_full_params_of_a_kept_unit(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, states=ZERO2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(world, model, optimizer, 0)
    x = batch(1)
    with torch.no_grad():
        expected = model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), expected) and sent(twin, lambda: twin(x))["all_gather"] == 0, "the copy has the level"
        with fullshard.full_params(model):
            model.head.weight.mul_(2)
        assert sent(model, lambda: model(x))["all_gather"] == UNITS, "full_params() writes all shards"
        doubled = model(x)
        plain = fullshard.undo(model)
        assert torch.equal(plain(x), doubled)
    written = io.BytesIO()
    torch.save(twin.state_dict(), written)
    assert len(written.getvalue()) > 0


# --- mistakes ---


def test_impossible_tables_are_refused() -> None:
    for arguments, told in (
        ({"parameters": ("shard",), "gradients": ()}, "Expected gradients that are sharded as the parameters are"),
        ({"optimizer": ()}, r'Expected \("shard",\) or \(.replicate., .shard.\) as optimizer='),
        ({"parameters": "shard"}, r'Expected \("shard",\) or \(\) as parameters='),
        ({"parameters": (), "optimizer": BOTH}, "use ZERO1 or ZERO2 on a mesh of one dim"),
        ({"gradients": ("replicate",)}, r"Expected \('shard',\) or \(\) as gradients="),
        ({"gradients": BOTH}, "which are sharded at most as the optimizer's"),
    ):
        with pytest.raises(ValueError, match=told):
            StateSharding(**arguments)
    assert [str(level) for level in (*LEVELS, HFSDP)] == ["ZERO1", "ZERO2", "ZERO3", "HFSDP"]
    assert str(HFSDPS[0]) == f"StateSharding(('shard',), {BOTH}, {BOTH})"


@ranks(2)
def test_contradictions_are_refused_before_anything_changes(world: World) -> None:
    for wrong in (True, 2):
        with pytest.raises(ValueError, match=f"reshard_after_forward={wrong} cannot be combined with states=ZERO2"):
            fully_shard(nn.Linear(4, 4), mesh=world.mesh, states=ZERO2, reshard_after_forward=wrong)
    with pytest.raises(ValueError, match="states must be a StateSharding, got str"):
        fully_shard(nn.Linear(4, 4), mesh=world.mesh, states="zero2")
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=world.mesh, states=ZERO2)
    with pytest.raises(ValueError, match="cannot be combined with states=ZERO2"):
        model.set_reshard_after_forward(True)
    with pytest.raises(ValueError, match=r"Expected a StateSharding as states, for example fullshard.ZERO2, got str"):
        model.set_states("zero3")
    hook = model[0].register_forward_hook(
        lambda _, inputs, out: out.register_hook(lambda grad: model.set_states(ZERO3)) and None
    )
    output = model(torch.ones(2, 4))
    with pytest.raises(StateError, match=r"set_states\(\) was called inside the backward"):
        output.sum().backward()
    hook.remove()
    model.zero_grad()
    model.set_reshard_after_backward(True)
    assert sent(model, lambda: model(torch.ones(2, 4)).sum().backward())["all_gather"] in (0, 1)
    assert sent(model, lambda: model(torch.ones(2, 4)).sum().backward())["all_gather"] == 0
    dist.barrier()
