"""torch.compile around, inside and across units gives what eager gives, and compiles nothing again once it is warm."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.config
from harness import World, ranks
from models import Block, Stack, assert_near, assert_same_grads, assert_same_parameters, batch, full, shard_stack, square
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from fullshard import HFSDP, ZERO2, MixedPrecisionPolicy, fully_shard
from fullshard.compat import FSDP
from fullshard.wrap import ModuleWrapPolicy

# inductor builds C++ for the CPU, of vectors that torch is told here to do without.
INDUCTOR = shutil.which("g++") is not None and os.environ.get("ATEN_CPU_CAPABILITY") != "default"


def backend() -> str:
    """Inductor, where it has kernels for what tensors are made on. It takes seconds for each graph."""
    return "inductor" if INDUCTOR and torch.empty(0).is_cpu else "aot_eager"


@contextmanager
def compiling() -> Iterator[None]:
    """A compiler that knows nothing yet, in this process alone."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


class Dropping(Block):
    """Behaves differently in training and in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.training else 1.0)


class NodeHooks(nn.Module):
    """No loop around the blocks: dynamo goes on behind the break at each unit's border."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList([Dropping(), Dropping()])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return self.head(torch.sin(second(torch.cos(first(self.inp(x))))))


def stack() -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList(Dropping() for _ in range(3))
    return model


def compile_blocks(model: nn.Module, by: str, **how: Any) -> None:
    for block in model.blocks:
        block.compile(backend=by, **how)


class Pair:
    """A sharded, compiled model and the plain one, driven alike."""

    def __init__(self, world: World, model: nn.Module, sharded: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        self.world, self.model, self.sharded, self.run = world, model, sharded, run
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (sharded, model)]

    def cycle(self, step: int) -> None:
        """Training, evaluation without grad, an accumulated backward, an optimizer step."""
        mine = self.world.mine
        self.sharded.eval(), self.model.eval()
        with torch.no_grad():
            assert_near(self.run(mine(batch(step))), mine(self.model(batch(step))), "evaluated")
        self.sharded.train(), self.model.train()
        with self.sharded.accumulate():
            square(self.run(mine(batch(step + 1)))).backward()
        square(self.run(mine(batch(step + 2)))).backward()
        (square(self.model(batch(step + 1))) + square(self.model(batch(step + 2)))).backward()
        assert_same_grads(self.sharded, self.model)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(self.sharded, self.model)


HOW = ["blocks before sharding", "blocks after sharding", "whole blocks, before sharding", "the whole model", "a chain"]


@pytest.mark.rotates(5)
@pytest.mark.proves("28a")
@pytest.mark.parametrize("how", HOW)
@ranks(2, limit=240)
def test_compiled_and_eager_agree_and_nothing_is_compiled_again(world: World, how: str) -> None:
    with compiling():
        model = NodeHooks() if how == "a chain" else stack()
        sharded = copy.deepcopy(model)
        if "before" in how:
            compile_blocks(sharded, backend(), fullgraph=how.startswith("whole"))
        shard_stack(sharded, world.mesh)
        if how == "blocks after sharding":
            compile_blocks(sharded, backend())
        of_all = "aot_eager" if how == "a chain" else backend()  # of eight graphs
        run = sharded if "blocks" in how else torch.compile(sharded, backend=of_all)
        pair = Pair(world, model, sharded, run)
        pair.cycle(0)
        pair.cycle(3)
        graphs, frames = counters["stats"]["unique_graphs"], dict(counters["frames"])
        blocks = 2  # one for training, one for evaluation, for all blocks together
        assert graphs == blocks + (6 if how == "a chain" else 0), f"{graphs} graphs"
        torch._dynamo.config.error_on_recompile = True
        for step in range(6, 15, 3):
            pair.cycle(step)
        assert counters["stats"]["unique_graphs"] == graphs and dict(counters["frames"]) == frames


@pytest.mark.rotates(4)
@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(torch.float64)},
        {"reshard_after_forward": False},
        {"states": ZERO2},
        {"states": HFSDP},
    ],
)
@ranks(2, limit=240)
def test_options_of_units_cause_no_recompilation(world: World, options: dict[str, Any]) -> None:
    with compiling():
        model = stack()
        sharded = copy.deepcopy(model)
        compile_blocks(sharded, "aot_eager")
        hybrid = options.get("states") == HFSDP
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if hybrid else world.mesh
        shard_stack(sharded, mesh, **options)
        pair = Pair(world, model, sharded, lambda x: sharded(x).float())
        pair.cycle(0)
        pair.cycle(3)
        torch._dynamo.config.error_on_recompile = True
        pair.cycle(6)


@pytest.mark.parametrize("when", ["before", "after", "around"])
@ranks(2, limit=240)
def test_a_unit_can_be_one_graph(world: World, when: str) -> None:
    """The hooks are opaque and stay outside of it."""
    with compiling():
        model = Block()
        block = copy.deepcopy(model)
        if when == "before":
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=world.mesh)
        if when == "after":
            block.compile(backend="aot_eager", fullgraph=True)
        run = torch.compile(block, backend="aot_eager", fullgraph=True) if when == "around" else block
        for step in range(3):
            square(run(world.mine(batch(step, 7)))).backward()
            square(model(batch(step, 7))).backward()
            assert_same_grads(block, model)
            block.zero_grad(), model.zero_grad()
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@ranks(2, limit=240)
def test_the_wrapper_of_fsdp1_compiles(world: World) -> None:
    with compiling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = stack()
        sharded = FSDP(copy.deepcopy(model), auto_wrap_policy=ModuleWrapPolicy({Dropping}), use_orig_params=True)
        run = torch.compile(sharded, backend="aot_eager")
        for step in range(4):
            square(run(world.mine(batch(step)))).backward()
            square(model(batch(step))).backward()
            assert_same_grads(sharded, model)
            sharded.zero_grad(), model.zero_grad()
            torch._dynamo.config.error_on_recompile = step >= 1


@ranks(1)
def test_managed_modules_carry_the_marks_that_dynamo_looks_for(world: World) -> None:
    """All but those that hold nothing but ignored parameters: dynamo takes parameters as inputs of each call, not as constants."""
    model = Stack()
    plain = model.blocks[1]
    for block in (model.blocks[0], model.blocks[2]):
        fully_shard(block, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh, ignored_params=set(plain.parameters()))
    left_out = {id(module) for module in plain.modules()}
    for name, module in model.named_modules():
        marks = [getattr(module, mark, None) for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")]
        assert marks == ([None, None] if id(module) in left_out else [True, True]), name


@pytest.mark.rotates(3)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
@ranks(2)
def test_a_compiled_step_of_an_optimizer_gives_what_eager_gives(world: World, kind: str) -> None:
    """Compiled behind two eager steps. A compiled step of Muon left out the messages to owners."""
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    models = [shard_stack(Stack(1), world.mesh) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        getattr(torch.optim, kind)([p for p in m.parameters() if p.ndim == 2 or kind != "Muon"], lr=0.01, **options)
        for m in models
    ]
    with compiling():
        compiled = torch.compile(optimizers[0].step, backend="aot_eager")
        for step in range(6):
            for model, optimizer in zip(models, optimizers):
                square(model(world.mine(batch(step)))).backward()
                (optimizer.step if step < 2 or optimizer is optimizers[1] else compiled)()
                optimizer.zero_grad()
            for mine, theirs in zip(*(m.parameters() for m in models)):
                assert_near(full(mine), full(theirs), kind)
