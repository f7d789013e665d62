"""Sharded training gives what unsharded training gives, for every option, on 1 to 4 ranks."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from harness import World, ranks
from models import (
    Block,
    Stack,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    batch,
    full,
    in_order,
    rounding,
    shard_stack,
    share_grads,
    square,
    train_both,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import fullshard
from fullshard import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, _torch, fully_shard
from fullshard.core import layout

PACKED, DIRECT = CommPolicy(direct_min_bytes=float("inf")), CommPolicy(direct_min_bytes=0)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("layout", ["packed", "direct", "default"])
@ranks(1, 2, 3, 4)
def test_five_steps_equal_the_unsharded_model(world: World, reshard: bool | None, layout: str) -> None:
    comm = {"packed": PACKED, "direct": DIRECT, "default": CommPolicy()}[layout]
    train_both(world, Stack(), lambda m: shard_stack(m, world.mesh, reshard_after_forward=reshard, comm_policy=comm))


@pytest.mark.parametrize("size_of", [(64, 96), (8, 24)])
@ranks(2, 4)
def test_direct_messages_give_bit_for_bit_what_packed_ones_give(world: World, size_of: tuple[int, int]) -> None:
    base = Stack(2, *size_of)
    models = [copy.deepcopy(base) for _ in range(2)]
    for model, comm in zip(models, (PACKED, DIRECT)):
        shard_stack(model, world.mesh, comm_policy=comm)
        square(model(world.mine(batch(0)))).backward()
    places = [p.direct for g in models[1].blocks[0]._fullshard_unit.groups for p in g.layout.offsets]
    assert any(places)
    for packed, direct in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(full(packed.grad), full(direct.grad))


class Wide(Stack):
    """A stack, and a parameter that the second step leaves out on all ranks but one."""

    def __init__(self) -> None:
        super().__init__(2, 64, 65)
        self.rare = nn.Parameter(torch.randn(67, 5))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        out = super().forward(x)
        return out + (x.to(self.rare.dtype) @ self.rare.t()).sum(-1, keepdim=True) if rare else out


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16])
@ranks(2, 3)
@mock.patch.object(layout, "slice_limit", lambda nbytes: 4096)
def test_gradients_in_slices_are_bit_for_bit_those_in_one_message(world: World, reduce_dtype: torch.dtype) -> None:
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    base = Wide()
    models = [copy.deepcopy(base) for _ in range(2)]
    counts = []
    for model, comm in zip(models, (PACKED, CommPolicy(direct_min_bytes=0, collectives=in_order))):
        shard_stack(model, world.mesh, comm_policy=comm, mp_policy=mp)
        for step in range(2):
            with fullshard.counting(model) as messages:
                out = model(world.mine(batch(step)), rare=step == 0 or world.rank == 0)
                square(out.float()).backward()
            counts.append(sum(message.kind == "reduce_scatter" for message in messages))
    for packed, sliced in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(full(packed.grad), full(sliced.grad))
    assert counts[2] > 2 * counts[0]


class FewRows(nn.Module):
    """Parameters with fewer rows than ranks, one of them left out by the second step on all ranks but one, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 40)
        self.gate = nn.Linear(40, 1)
        self.pair = nn.Parameter(torch.randn(2, 40) / 6)
        self.rare = nn.Parameter(torch.randn(1, 40) / 6)
        self.out = nn.Linear(40, 12)

    def forward(self, x: Tensor, rare: bool = True) -> Tensor:
        x = torch.tanh(self.inp(x))
        x = x * torch.sigmoid(self.gate(x)) + (x @ self.pair.t()) @ self.pair
        return self.out(x + self.rare) if rare else self.out(x)


FEW_ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in order": {"comm_policy": CommPolicy(collectives=in_order)},
    "kept": {"reshard_after_forward": False},
    "smaller group": {"reshard_after_forward": 2},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "float16 sums": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "bf16, in order": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "comm_policy": CommPolicy(collectives=in_order),
    },
}


@pytest.mark.parametrize("kind", [*FEW_ROWS, "hybrid"])
@ranks(4)
@mock.patch.object(layout, "slice_limit", lambda nbytes: 128)
def test_parameters_with_fewer_rows_than_ranks_train_as_the_unsharded_model(world: World, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if kind == "hybrid" else world.mesh
    model = FewRows()
    sharded = fully_shard(copy.deepcopy(model), mesh=mesh, **FEW_ROWS.get(kind, {}))
    tolerance = rounding(torch.bfloat16 if "16" in kind else torch.float32)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, model))
    for step in range(3):
        rare = step != 1 or world.rank == 0
        square(sharded(world.mine(batch(step)), rare).float()).backward()
        parts = [square(model(batch(step).chunk(4)[rank], step != 1 or rank == 0)) / 4 for rank in range(4)]
        sum(parts).backward()
        for name, parameter in sharded.named_parameters():
            assert_near(parameter.grad, dict(model.named_parameters())[name].grad, f"step {step}: {name}.grad", tolerance)
        share_grads(sharded, model)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("34b")
@ranks(2, 3)
def test_more_ranks_than_rows_leave_empty_shards(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2))
    sharded, _ = train_both(world, model, lambda m: [fully_shard(x, mesh=world.mesh) for x in (m[0], m)])
    assert sharded[0].weight.to_local().shape[0] == (1 if world.rank == 0 else 0)


@pytest.mark.proves("34b")
@ranks(2)
def test_a_parameter_without_elements_is_carried_along(world: World) -> None:
    class WithEmpty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(4, 0))
            self.none = nn.Parameter(torch.empty(0, 3))
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.empty.sum() + self.none.sum()

    train_both(world, WithEmpty(), lambda m: fully_shard(m, mesh=world.mesh))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 6).requires_grad_(False)
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.table = nn.Parameter(torch.arange(12).reshape(6, 2), requires_grad=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(self.frozen(x).bfloat16()).float()
        return self.last(x) + self.table.sum()


@pytest.mark.proves("8a")
@ranks(1, 2, 3)
def test_several_dtypes_and_frozen_parameters_share_a_unit(world: World) -> None:
    sharded, _ = train_both(world, Mixed(), lambda m: fully_shard(m, mesh=world.mesh))
    assert len(sharded._fullshard_unit.groups) == 4
    assert sharded.table.dtype == torch.int64


class Lora(nn.Module):
    """A frozen base with trainable adapters, the base a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(5, 5).requires_grad_(False) for _ in range(3))
        self.adapters = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for base, adapter in zip(self.base, self.adapters):
            x = torch.tanh(base(x)) + adapter(x)
        return x


@pytest.mark.proves("12a")
@ranks(2)
def test_frozen_units_pass_gradients_on_and_are_freed(world: World) -> None:
    def shard(m: Lora) -> None:
        for module in (*m.base, *m.adapters, m):
            fully_shard(module, mesh=world.mesh)

    model = Lora()
    sharded = copy.deepcopy(model)
    shard(sharded)
    with fullshard.counting(sharded) as messages:
        square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)
    assert [m.kind for m in messages].count("reduce_scatter") == 3
    assert all(m._fullshard_unit.residency.value == "sharded" for m in sharded.modules() if hasattr(m, "_fullshard_unit"))


@pytest.mark.parametrize("where", [[1], [0], [0, 1, 2]])
@ranks(2, 3)
def test_a_parameter_that_nobody_uses_keeps_no_gradient(world: World, where: list[int]) -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(7, 7)

    model = Stack()
    for index in where:
        model.blocks[index] = Unused()
    sharded, _ = train_both(world, model, lambda m: shard_stack(m, world.mesh))
    assert sharded.blocks[where[0]].spare.weight.grad is None


@pytest.mark.proves("1a")
@ranks(2, 3)
def test_a_parameter_used_on_one_rank_only_gets_its_part_of_the_mean_everywhere(world: World) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: Tensor, expert: int) -> Tensor:
            return self.experts[expert](x)

    model = Routed()
    sharded = fully_shard(copy.deepcopy(model), mesh=world.mesh)
    expert = 0 if world.rank == 0 else 1
    square(sharded(world.mine(batch(0)), expert)).backward()
    parts = batch(0).chunk(world.size)
    for rank, part in enumerate(parts):
        (square(model(part, 0 if rank == 0 else 1)) / world.size).backward()
    assert_same_grads(sharded, model)
    assert sharded.experts[2].weight.grad is None


@pytest.mark.parametrize("kind", ["siamese", "two forwards", "two backwards"])
@ranks(1, 2)
def test_a_unit_called_twice_sums_both_gradients(world: World, kind: str) -> None:
    def run(m: nn.Module, x: Tensor) -> None:
        if kind == "siamese":
            a = m.inp(x)
            for block in (*m.blocks, *m.blocks):
                a = block(a)
            square(m.head(a)).backward()
        elif kind == "two forwards":
            (square(m(x)) + square(m(x + 1))).backward()
        else:
            first, second = square(m(x)), square(m(x + 1))
            first.backward()
            second.backward()

    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x)

    model = Twice() if kind == "siamese" else Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step in range(3):
        for m, x in ((sharded, world.mine(batch(step))), (model, batch(step))):
            square(m(x)).backward() if kind == "siamese" else run(m, x)
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_retain_graph_runs_backward_twice(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for m, x in ((sharded, world.mine(batch(0))), (model, batch(0))):
        loss = square(m(x))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_grads(sharded, model)


@ranks(1, 2)
def test_eval_no_grad_and_inference_mode_mix_with_training(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model))
    for step in range(4):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert_near(sharded(batch(step)), model(batch(step)), "output")
            assert all(p.device_mesh is not None for p in sharded.parameters())
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        for o in (ours, theirs):
            o.step()
            o.zero_grad()


@pytest.mark.parametrize("place", ["eager", "meta"])
@ranks(2)
def test_a_model_may_be_sharded_loaded_and_run_in_inference_mode(world: World, place: str) -> None:
    """Inference tensors have no version counters, which torch said without a name in the first forward."""
    model = Stack()
    with torch.inference_mode():
        with torch.device("meta" if place == "meta" else "cpu"):
            sharded = Stack()
        shard_stack(sharded, world.mesh)
        if place == "meta":
            sharded.to_empty(device="cpu")
        for _ in range(2):
            sharded.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            if _torch.HONOURS_SUBCLASSES:  # torch 2.11 cannot detach a DTensor there
                sharded.load_state_dict(sharded.state_dict())
            assert_near(sharded(batch(0)), model(batch(0)), "output")
    for each, x in ((sharded, world.mine(batch(1))), (model, batch(1))):
        square(each(x)).backward()
    assert_same_grads(sharded, model)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        y = self.linear(x)
        return y.mul_(0.5)


@ranks(1, 2)
def test_modules_that_write_to_their_input_and_output_in_place(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 5), InPlace(), InPlace(), nn.Linear(5, 3))
    train_both(world, model, lambda m: [fully_shard(x, mesh=world.mesh) for x in (m[1], m[2], m)])


@pytest.mark.proves("17b")
@ranks(2)
def test_writing_to_a_view_that_a_unit_returned(world: World) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(-1, 5, 1).squeeze(-1)

    class Writing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            y.mul_(2.0)
            y[:, 0].add_(1.0)
            return self[1](y)

    train_both(world, Writing(Viewing(), nn.Linear(5, 3)), lambda m: [fully_shard(x, mesh=world.mesh) for x in (m[0], m)])


@dataclasses.dataclass
class Record:
    hidden: Tensor
    extra: dict[str, Any]


@dataclasses.dataclass
class Linked(Record):
    parent: Any = None  # as in trees: the record refers to itself


class Registered:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


pytree.register_pytree_node(Registered, lambda one: ([one.hidden], None), lambda values, _: Registered(*values))


Named = collections.namedtuple("Named", ["hidden", "other"])


@pytest.mark.proves("17a")
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "nested", "dataclass", "deep", "linked", "namedtuple", "registered"])
@ranks(2)
def test_outputs_may_be_nested_in_anything(world: World, kind: str) -> None:
    def linked(hidden: Tensor) -> Linked:
        made = Linked(hidden, {})
        made.parent = [made]
        return made

    wrap = {
        "list": lambda h: [h],
        "tuple": lambda h: (None, h),
        "dict": lambda h: {"h": h},
        "nested": lambda h: {"a": [({"h": h},)]},
        "dataclass": lambda h: Record(h, {}),
        "namedtuple": lambda h: Named(h, 1),
        "deep": lambda h: [{"a": Record(Record(h, {}), {})}],
        "linked": linked,
        "registered": lambda h: Registered(h),
    }[kind]
    unwrap = {
        "list": lambda o: o[0],
        "tuple": lambda o: o[1],
        "dict": lambda o: o["h"],
        "nested": lambda o: o["a"][0][0]["h"],
        "deep": lambda o: o[0]["a"].hidden.hidden,
    }.get(kind, lambda o: o.hidden)

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Any:
            return wrap(self.linear(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Wrapping(), Wrapping()

        def forward(self, x: Tensor) -> Tensor:
            return unwrap(self.second(torch.tanh(unwrap(self.first(x)))))

    train_both(world, Model(), lambda m: [fully_shard(x, mesh=world.mesh) for x in (m.first, m.second, m)])


@pytest.mark.proves("22a")
@pytest.mark.parametrize("communicate", [True, False])
@pytest.mark.parametrize("reduce", [None, torch.float32])
@ranks(2, 3)
def test_gradient_accumulation_with_and_without_communication(world: World, communicate: bool, reduce: Any) -> None:
    model = Stack()
    mp = MixedPrecisionPolicy(reduce_dtype=reduce)
    sharded = shard_stack(copy.deepcopy(model), world.mesh, mp_policy=mp)
    for step in range(2):
        with fullshard.counting(sharded) as messages:
            for micro in range(3):
                x = world.mine(batch(3 * step + micro))
                if communicate or micro == 2:
                    square(sharded(x)).backward()
                else:
                    with sharded.accumulate():
                        square(sharded(x)).backward()
                    assert all(p.grad is None for p in sharded.parameters())
        for micro in range(3):
            square(model(batch(3 * step + micro))).backward()
        assert_same_grads(sharded, model)
        assert [m.kind for m in messages].count("reduce_scatter") == 4 * (3 if communicate else 1)
        sharded.zero_grad(), model.zero_grad()


@pytest.mark.proves("8b")
@ranks(2)
def test_low_precision_accumulates_in_the_reduce_dtype(world: World) -> None:
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh, mp_policy=mp)
    total = torch.zeros(4, 4)
    for micro in range(4):
        x = torch.full((1, 4), 1.0 + micro / 64)
        total += x.bfloat16().float().expand(4, 4)
        if micro < 3:
            with model.accumulate():
                model(x).sum().backward()
        else:
            model(x).sum().backward()
    assert torch.equal(full(model.weight.grad), total)
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.rotates(6)
@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["packed", "direct"])
@ranks(1, 2, 3, 4)
def test_bf16_training_follows_fsdp2(world: World, reduce: Any, layout: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    base = Stack(2, 8, 24)
    comm = {"packed": PACKED, "direct": DIRECT}[layout]
    ours, theirs = copy.deepcopy(base), copy.deepcopy(base)
    for root, output in ((False, None), (True, torch.float32)):
        options = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce, "output_dtype": output}
        for module in (ours,) if root else ours.blocks:
            fully_shard(module, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(**options), comm_policy=comm)
        for module in (theirs,) if root else theirs.blocks:
            torch_fully_shard(module, mesh=world.mesh, mp_policy=TorchPolicy(**options))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers):
            out = model(world.mine(batch(step)))
            assert out.dtype == torch.float32
            square(out).backward()
            for parameter in model.parameters():
                assert parameter.grad.dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), yours in zip(ours.named_parameters(), theirs.parameters()):
        assert_near(mine, full(yours), name, rounding(torch.bfloat16))


KINDS = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "bfloat16 reduced in float32": (torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    "bfloat16 of float32": (torch.float32, {"param_dtype": torch.bfloat16}),
    "float16 of float32": (torch.float32, {"param_dtype": torch.float16}),
}


@pytest.mark.rotates(6)
@pytest.mark.parametrize("kind", KINDS)
@ranks(2, 4)
def test_gradients_of_two_ranks_are_bit_for_bit_those_of_ddp_and_fsdp2(world: World, kind: str) -> None:
    """An average has one right rounding: (a + b) / 2 rounded once. `lerp` has another for a quarter of all float32 pairs."""
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dtype, options = KINDS[kind]
    mesh = world.mesh if world.size == 2 else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    base = Stack(2, 8, 24).to(dtype)
    ours, theirs = copy.deepcopy(base), copy.deepcopy(base)
    for part in ("blocks.0", "blocks.1", ""):
        fully_shard(ours.get_submodule(part), mesh=mesh, mp_policy=MixedPrecisionPolicy(**options))
        torch_fully_shard(theirs.get_submodule(part), mesh=mesh, mp_policy=TorchPolicy(**options))
    models: list[nn.Module] = [ours, theirs]
    if world.size == 2 and not options:
        models.append(DistributedDataParallel(base))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
    for step in range(3):
        torch.manual_seed(10 * step + world.rank)
        x = torch.randn(3, 5).to(dtype)
        for model in models:
            model(x).float().square().mean().backward()
        for (name, mine), *others in zip(ours.named_parameters(), *(m.parameters() for m in models[1:])):
            for other in others:
                assert torch.equal(full(mine.grad), full(other.grad)), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        base.zero_grad()
        for mine, plain in zip(ours.parameters(), base.parameters()):  # an optimizer may round whole weights otherwise
            plain.data.copy_(full(mine))


@ranks(1, 2)
def test_inputs_are_cast_only_when_asked(world: World) -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor, record: Record, *, ids: Tensor) -> Tensor:
            self.dtypes = (x.dtype, record.hidden.dtype, record.extra["t"].dtype, ids.dtype)
            return record.hidden @ self.weight.to(record.hidden.dtype)

    for cast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
        model = fully_shard(Seen(), mesh=world.mesh, mp_policy=mp)
        record = Record(torch.ones(2, 4), {"t": torch.ones(1)})
        out = model(torch.ones(2, 4), record, ids=torch.ones(2, dtype=torch.long))
        assert model.dtypes == (expected, expected, expected, torch.long)
        assert record.hidden.dtype == torch.float32, "the caller's object stays as it was"
        assert out.dtype == expected


@ranks(2)
def test_sums_of_halves_do_not_overflow(world: World) -> None:
    mp = MixedPrecisionPolicy(param_dtype=torch.float16)
    for comm in (PACKED, DIRECT):
        model = fully_shard(nn.Linear(8, 8, bias=False), mesh=world.mesh, mp_policy=mp, comm_policy=comm)
        (model(torch.ones(1, 8)) * 40000.0).sum().backward()
        assert torch.isfinite(full(model.weight.grad)).all()
        assert_near(model.weight.grad, torch.full((8, 8), 40000.0), "grad", rounding(torch.float16))


@ranks(2)
def test_tied_parameters_in_one_unit_stay_tied(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.block = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.block(self.embed(ids))))

    def ids(step: int) -> Tensor:
        return torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(step))

    sharded, _ = train_both(world, Tied(), lambda m: [fully_shard(x, mesh=world.mesh) for x in (m.block, m)], inputs=ids)
    assert sharded.head.weight is sharded.embed.weight


@ranks(2)
def test_a_parameter_that_is_tied_again_between_two_calls_is_in_its_unit_once(world: World) -> None:
    """Its module has the sharded parameter by then, another one the parameter of before: the second backward counted twice."""

    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.b.weight = self.c.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = Thrice()
    sharded: Any = copy.deepcopy(model)
    fully_shard(sharded.a, mesh=world.mesh)
    sharded.c.weight = sharded.a.weight  # tie_weights() of transformers, called again
    with pytest.warns(UserWarning, match="the unit around both takes it"):
        fully_shard(sharded, mesh=world.mesh)
    assert len(sharded._fullshard_unit.parameters) == 1
    for step in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        square(sharded(world.mine(x))).backward()
        square(model(x)).backward()
        assert_same_grads(sharded, model)


@ranks(2)
def test_a_list_of_modules_is_one_unit(world: World) -> None:
    def shard(m: Stack) -> None:
        fully_shard([m.blocks[0], m.blocks[1]], mesh=world.mesh)
        fully_shard([m.inp, m.head], mesh=world.mesh)
        fully_shard(m, mesh=world.mesh)

    for _ in range(2):
        model = Stack()
        sharded = copy.deepcopy(model)
        shard(sharded)
        assert sharded.blocks[0]._fullshard_unit is sharded.blocks[1]._fullshard_unit
        for step in range(3):
            with fullshard.counting(sharded) as messages:
                square(sharded(world.mine(batch(step)))).backward()
            square(model(batch(step))).backward()
            assert_same_grads(sharded, model)
            assert [m.kind for m in messages].count("reduce_scatter") == 3
            sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_blocks_without_a_root_train_too(world: World) -> None:
    model = Stack()
    sharded = copy.deepcopy(model)
    for block in sharded.blocks:
        fully_shard(block, mesh=world.mesh)
    for step in range(3):
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        for ours, theirs in zip(sharded.blocks, model.blocks):
            assert_same_grads(ours, theirs)
        sharded.zero_grad(), model.zero_grad()


@pytest.mark.proves("20a")
@ranks(2)
def test_any_unit_may_run_first(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    x = batch(0, 7)
    square(sharded.blocks[1](world.mine(x))).backward()
    square(model.blocks[1](x)).backward()
    assert_same_grads(sharded, model)
    square(sharded(world.mine(batch(1)))).backward()
    square(model(batch(1))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_an_lstm_that_keeps_its_weights_twice(world: World) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, batch_first=True)
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0])

    train_both(
        world,
        Recurrent(),
        lambda m: [fully_shard(x, mesh=world.mesh) for x in (m.lstm, m)],
        inputs=lambda step: batch(step, 4, 5),
    )


@ranks(2)
def test_freezing_and_thawing_after_sharding_is_honoured(world: World) -> None:
    def toggle(step: int, m: nn.Module) -> None:
        m.blocks[1].up.weight.requires_grad_(step % 2 == 1)
        m.blocks[0].requires_grad_(step != 1)

    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step in range(4):
        for m in (sharded, model):
            toggle(step, m)
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("5a")
@pytest.mark.parametrize("optimizer", ["foreach", "fused", "plain"])
@ranks(2)
def test_every_form_of_adamw(world: World, optimizer: str) -> None:
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}[optimizer]
    train_both(
        world,
        Stack(),
        lambda m: shard_stack(m, world.mesh),
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, **options),
    )


@ranks(2)
def test_weights_kept_after_backward_are_gathered_again_once_the_optimizer_wrote_them(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    sharded.set_reshard_after_backward(False)
    sharded.set_reshard_after_forward(False)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model))
    counts = []
    for step in range(4):
        with fullshard.counting(sharded) as messages:
            square(sharded(world.mine(batch(step)))).backward()
        counts.append([m.kind for m in messages].count("all_gather"))
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        if step != 1:
            ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    assert counts == [4, 4, 0, 4]
