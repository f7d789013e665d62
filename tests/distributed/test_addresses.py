"""`set_keep_unsharded_storage`: every all-gather and every full parameter is where it was in the step before."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_same_grads, batch, shard_stack, square
from poison import poisoned
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.comm.base import SingleRank
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.traffic import TrafficCounter

STEPS = 10
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def ledger() -> Iterator[list[tuple[str, int]]]:
    """The addresses of all tensors that are handed to all-gathers, in order."""
    seen: list[tuple[str, int]] = []
    plain = {kind: kind.gatherer for kind in (SingleRank, GlooCollectives, CoalescedCollectives)}

    def note(kind: str, *lists: Any) -> None:
        seen.extend((kind, tensor.data_ptr()) for tensors in lists for tensor in tensors)

    def gatherer(self: Any, outs: Any, shards: Any) -> Callable[[], Any]:
        gather = plain[type(self)](self, outs, shards)

        def noted() -> Any:
            note("all_gather", outs, shards)
            return gather()

        return noted

    record = TrafficCounter.record

    def recorded(self: Any, kind: str, fulls: Any, ranks: int = 1) -> None:
        if kind == "to_device":
            note(kind, fulls)
        record(self, kind, fulls, ranks)

    for kind in plain:
        kind.gatherer = gatherer  # type: ignore[method-assign]
    TrafficCounter.record = recorded
    try:
        yield seen
    finally:
        for kind, known in plain.items():
            kind.gatherer = known  # type: ignore[method-assign]
        TrafficCounter.record = record


def train(world: World, sharded: nn.Module, model: nn.Module, seen: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
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
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
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


@pytest.mark.parametrize("case", ["hybrid", "two keep one copy"])
@ranks(4)
def test_replicas_and_smaller_groups_keep_their_addresses_too(world: World, case: str) -> None:
    mesh = world.mesh if case == "two keep one copy" else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"reshard_after_forward": 2} if case == "two keep one copy" else {}

    with ledger() as seen:
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), mesh, **options)
        sharded.set_keep_unsharded_storage(True)
        steps = train(world, sharded, model, seen)
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
    with pytest.raises(ValueError, match="keep must be True or False, got None"):
        layer.set_keep_unsharded_storage(None)


@ranks(2)
def test_kept_memory_is_gathered_anew_after_a_step(world: World) -> None:
    """Memory that stays is not values that stay: also poisoned memory trains as the plain model."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    sharded.set_keep_unsharded_storage(True)
    with poisoned(), ledger() as seen:
        train(world, sharded, model, seen)
