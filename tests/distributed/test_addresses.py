"""`set_keep_unsharded_storage`: every message and every full parameter is where it was in the step before."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.comm.traffic import ObservedCollectives, TrafficCounter

STEPS = 10
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def ledger() -> Iterator[list[tuple[str, int]]]:
    """The addresses of all tensors that are handed to collectives, in order."""
    seen: list[tuple[str, int]] = []
    plain = {
        name: getattr(ObservedCollectives, name) for name in ("gatherer", "reduce_scatter", "all_reduce", "all_reduce_max")
    }

    def note(kind: str, *lists: Any) -> None:
        seen.extend((kind, tensor.data_ptr()) for tensors in lists for tensor in tensors)

    def gatherer(self: Any, outs: Any, shards: Any) -> Callable[[], Any]:
        gather = plain["gatherer"](self, outs, shards)

        def noted() -> Any:
            note("all_gather", outs, shards)
            return gather()

        return noted

    def reduce_scatter(self: Any, outs: Any, fulls: Any, scale: float) -> Any:
        note("reduce_scatter", outs, fulls)
        return plain["reduce_scatter"](self, outs, fulls, scale)

    def all_reduce(self: Any, tensor: Tensor) -> Any:
        note("all_reduce", [tensor])
        return plain["all_reduce"](self, tensor)

    def all_reduce_max(self: Any, tensor: Tensor) -> Any:
        note("heartbeat", [tensor])
        return plain["all_reduce_max"](self, tensor)

    record = TrafficCounter.record

    def recorded(self: Any, kind: str, fulls: Any, ranks: int = 1) -> None:
        if kind in ("to_device", "to_host"):
            note(kind, fulls)
        record(self, kind, fulls, ranks)

    ours = {"gatherer": gatherer, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce, "all_reduce_max": all_reduce_max}
    for name, method in ours.items():
        setattr(ObservedCollectives, name, method)
    TrafficCounter.record = recorded
    try:
        yield seen
    finally:
        for name, method in plain.items():
            setattr(ObservedCollectives, name, method)
        TrafficCounter.record = record


def train(
    world: World,
    sharded: nn.Module,
    model: nn.Module,
    seen: list[tuple[str, int]],
    *,
    microbatches: int = 1,
    between: Any = None,
) -> list[list[tuple[str, int]]]:
    """The ledger of each of ten steps. What is allocated between them moves whatever is allocated anew."""
    for module in sharded.modules():
        module.register_forward_pre_hook(
            lambda m, _: seen.extend((f"full {name}", p.data_ptr()) for name, p in m.named_parameters(recurse=False))
        )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (sharded, model)]
    clutter: list[Tensor] = []
    steps: list[list[tuple[str, int]]] = []
    for step in range(STEPS):
        seen.clear()
        for index in range(microbatches):
            if between is not None:
                between(sharded, index)
            square(sharded(world.mine(batch(index)))).backward()
            square(model(batch(index))).backward()
        assert_same_grads(sharded, model, 1e-5 if sharded._fullshard_unit.options.mp.param_dtype is None else 5e-2)
        steps.append(list(seen))
        for each in optimizers:
            each.step()
            each.zero_grad()
        clutter += [torch.ones(17 + 29 * step + 7 * part) for part in range(40)]
        del clutter[::3]
    return steps


def changes(steps: list[list[tuple[str, int]]]) -> list[int]:
    """Of the third step and each that follows: how many addresses are others than in the step before, in whatever order."""
    return [(Counter(after) - Counter(before)).total() for before, after in pairwise(steps[1:])]


CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "direct": {"comm_policy": CommPolicy(direct_min_bytes=0)},
    "bf16": {"mp_policy": BF16},
    "bf16 direct": {"mp_policy": BF16, "comm_policy": CommPolicy(direct_min_bytes=0)},
    "regathered": {"reshard_after_forward": True},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("case", list(CASES))
@ranks(1, 2, 3)
def test_no_address_changes_from_the_third_step_on(world: World, case: str) -> None:
    with ledger() as seen:
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), world.mesh, **CASES[case])
        sharded.set_keep_unsharded_storage(True)
        steps = train(world, sharded, model, seen)
    assert len(steps[0]) > 20 and changes(steps) == [0] * (STEPS - 2), changes(steps)


@pytest.mark.parametrize("case", ["hybrid", "hybrid, put off", "two keep one copy"])
@ranks(4)
def test_replicas_and_smaller_groups_keep_their_addresses_too(world: World, case: str) -> None:
    mesh = world.mesh if case == "two keep one copy" else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"reshard_after_forward": 2} if case == "two keep one copy" else {}

    def put_off(sharded: nn.Module, index: int) -> None:
        sharded.set_requires_all_reduce(index == 2)
        sharded.set_is_last_backward(index == 2)

    with ledger() as seen:
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), mesh, **options)
        sharded.set_keep_unsharded_storage(True)
        several = {"microbatches": 3, "between": put_off} if case == "hybrid, put off" else {}
        steps = train(world, sharded, model, seen, **several)
    assert changes(steps) == [0] * (STEPS - 2), changes(steps)


@ranks(2)
def test_by_default_memory_is_given_back_and_turning_it_off_does_so_at_once(world: World) -> None:
    layer = fully_shard(nn.Linear(64, 64), mesh=world.mesh)
    group = layer._fullshard_unit.groups[0]

    def held() -> int:
        return sum(storage.size() for storage, _ in group._buffer._storages)

    def step() -> None:
        layer(torch.ones(2, 64)).sum().backward()

    step()
    assert held() == 0
    layer.set_keep_unsharded_storage(True)
    step()
    assert held() >= group.unsharded_nbytes
    layer.set_keep_unsharded_storage(False)
    assert held() == 0
    step()
    assert held() == 0
    other = fully_shard(nn.Linear(64, 64), mesh=world.mesh)
    for one in (layer, other):
        one.set_keep_unsharded_storage(True)
    step()
    step()  # the first one found out how much it needs
    messages = weakref.ref(layer._fullshard_unit.runtime.reducer._arena._memory)
    other.set_keep_unsharded_storage(False)
    assert messages() is not None, "all units that keep memory share it"
    layer.set_keep_unsharded_storage(False)
    assert messages() is None
    third = fully_shard(nn.Linear(64, 64), mesh=world.mesh)
    third.set_keep_unsharded_storage(True)
    for _ in range(2):
        third(torch.ones(2, 64)).sum().backward()
    messages = weakref.ref(layer._fullshard_unit.runtime.reducer._arena._memory)
    del third
    fully_shard(nn.Linear(2, 2), mesh=world.mesh)
    assert messages() is None, "of a deleted model, when the next one is sharded"
    with pytest.raises(ValueError, match="keep must be True or False, got None"):
        other.set_keep_unsharded_storage(None)


@ranks(2)
def test_kept_memory_is_gathered_anew_after_a_step(world: World) -> None:
    """Memory that stays is not values that stay: also poisoned memory trains as the plain model."""
    from fullshard import CheckPolicy

    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, check_policy=CheckPolicy(poison=True))
    sharded.set_keep_unsharded_storage(True)
    with ledger() as seen:
        train(world, sharded, model, seen)
