"""torch.optim.Muon over sharded matrices: bit for bit one process's, by messages to owners, and all ranks step or none."""

from __future__ import annotations

import copy
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from models import assert_same_parameters, batch, full, share_grads, square
from test_meshes import Mlp, Tower, parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fullshard
from fullshard import HFSDP, ZERO2, CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, StateError, fully_shard, plan_owners
from fullshard import _torch as private
from fullshard.optim import matrix_owners, muon

SIZES = [(5, 24), (24, 40), (40, 7), (7, 33), (33, 33), (33, 3)]  # in, out: wide and tall, uneven, fewer rows than ranks
# In bfloat16 the CPU rounds the last elements of a tensor, behind whole vectors, otherwise than the others: so these are whole.
SIZES_BF16 = [(32, 96), (96, 64), (64, 128), (128, 32), (32, 32)]


class Net(nn.Module):
    """Matrices and biases."""

    def __init__(self, sizes: list[tuple[int, int]] = SIZES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def shard(model: nn.Module, mesh: Any, **options: Any) -> Any:
    for layer in model.layers[:-1]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def optimizers(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    found = matrices(model)
    groups = [{"params": found[:2]}, {"params": found[2:], "lr": 0.03, "weight_decay": 0.01}]
    return [torch.optim.Muon(groups, lr=0.02, **options), torch.optim.AdamW(rest(model), lr=0.01)]


def mine(world: World, number: int, columns: int) -> Tensor:
    """This rank's part of a batch, for any number of ranks."""
    return batch(number, columns).roll(world.rank, 0)[:4]


def train_alike(world: World, model: nn.Module, sharded: nn.Module, steps: int = 3, **options: Any) -> list[Any]:
    """Both step with the gradients of the sharded model: equal bits come of equal bits."""
    pairs = [(one, optimizers(one, **options)) for one in (sharded, model)]
    for number in range(steps):
        square(sharded(mine(world, number, model.layers[0].in_features)).float()).backward()
        share_grads(sharded, model)
        for one, steppers in pairs:
            for optimizer in steppers:
                optimizer.step()
            one.zero_grad()
        for (name, got), want in zip(sharded.named_parameters(), model.parameters()):
            if got.ndim == 2:
                assert torch.equal(full(got), want), f"{name} in step {number}"
        for got, want in zip(matrices(sharded), matrices(model)):
            ours, theirs = (steppers[0].state[one]["momentum_buffer"] for (_, steppers), one in zip(pairs, (got, want)))
            assert ours.placements == got.placements and torch.equal(full(ours), theirs)
    return [steppers[0] for _, steppers in pairs]


@pytest.mark.rotates(4)
# torch's Muon in bfloat16 without nesterov divides its momentum by the norm, in place; fullshard leaves it as it is.
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
        (torch.bfloat16, {"adjust_lr_fn": "match_rms_adamw"}),
    ],
)
@ranks(1, 2, 4, 7)
def test_steps_are_bit_for_bit_those_of_one_process(world: World, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = Net(SIZES if dtype == torch.float32 else SIZES_BF16).to(dtype)
    sharded = shard(copy.deepcopy(model), world.mesh)
    for bucket_nbytes in (None, 3000):  # in one bucket, and in several
        with mock.patch.object(plan_owners, "__kwdefaults__", {"bucket_nbytes": bucket_nbytes}):
            train_alike(world, model, sharded, **options)
        assert_same_parameters(sharded, model, 1e-2 if dtype == torch.bfloat16 else 1e-5)


PLACES: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "all ranks of a hybrid mesh": {"states": HFSDP},
    "columns": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.ndim == 2 else None},
    "kept unsharded": {"states": ZERO2},
    "in host memory": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "packed": {"comm_policy": CommPolicy(direct_min_bytes=float("inf"))},
}


@pytest.mark.rotates(2)
@pytest.mark.parametrize("place", PLACES)
@ranks(4)
def test_on_every_mesh_and_level(world: World, place: str) -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    sharded = shard(copy.deepcopy(model), hybrid if "hybrid" in place else world.mesh, **PLACES[place])
    train_alike(world, model, sharded)


@ranks(4)
def test_every_matrix_is_computed_once_on_a_hybrid_mesh_too(world: World) -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = shard(Net(), hybrid)
    optimizer = torch.optim.Muon(matrices(sharded))
    square(sharded(world.mine(batch(0)))).backward()
    with mock.patch.object(private, "newton_schulz", wraps=private.newton_schulz) as called:
        with fullshard.counting(sharded) as messages:
            optimizer.step()
    every = torch.tensor(called.call_count)
    dist.all_reduce(every)
    assert every.item() == len(SIZES)
    assert [(one.kind, one.ranks) for one in messages if one.kind != "talk"] == [("all_to_all", 2)] * 2 + [("all_gather", 2)]


@ranks(4)
def test_matrices_on_two_meshes_are_planned_once_per_mesh(world: World) -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = Net(), Net()
    halves = shard(copy.deepcopy(pair[0]), world.mesh), shard(copy.deepcopy(pair[1]), hybrid)
    got = torch.optim.Muon([parameter for half in halves for parameter in matrices(half)], lr=0.02)
    want = torch.optim.Muon([parameter for one in pair for parameter in matrices(one)], lr=0.02)
    with mock.patch.object(matrix_owners, "OwnerExchange", wraps=matrix_owners.OwnerExchange) as planned:
        for number in range(3):
            for half, one in zip(halves, pair):
                square(half(world.mine(batch(number)))).backward()
                share_grads(half, one)
            got.step()
            want.step()
            got.zero_grad()
    assert planned.call_count == 2
    for half, one in zip(halves, pair):
        for mine, theirs in zip(matrices(half), matrices(one)):
            assert torch.equal(full(mine), theirs)


@ranks(4)
def test_what_tensor_parallelism_shards_unevenly_is_left_to_dtensor(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Tower()
    model.blocks = nn.ModuleList(Mlp(8, 17) for _ in range(2))
    sharded = parallel(copy.deepcopy(model), mesh["tp"])
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    with mock.patch.object(muon, "warn_once") as warned:
        for number in range(2):
            torch.manual_seed(number)  # torch's layers do not compute with uneven shards
            for parameter in matrices(sharded):
                parameter.grad = torch.randn_like(parameter)
            share_grads(sharded, model)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    assert warned.call_count == 4 and "shards it unevenly: 17 rows over 2 ranks" in str(warned.call_args)
    assert_same_parameters(sharded, model, 5e-2)  # bfloat16 products, added in another order
    for got, want in zip((sharded.inp.weight, sharded.head.weight), (model.inp.weight, model.head.weight)):
        assert torch.equal(full(got), want), "those of one mesh are exchanged all the same"


@ranks(2, 3)
def test_messages_are_those_of_the_plan(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    optimizer = torch.optim.Muon(matrices(sharded))
    for number in range(2):
        square(sharded(world.mine(batch(number)))).backward()
        with fullshard.counting(sharded) as messages:
            optimizer.step()
        optimizer.zero_grad()
    plan = plan_owners(((str(index), parameter) for index, parameter in enumerate(matrices(sharded))), world.size)
    assert [message.kind for message in messages] == ["all_to_all", "all_to_all", "talk"], "one bucket, and one agreement"
    own = sum(prod(m.shard_shape(world.size, owner)) for m, owner in zip(plan.matrices, plan.owners) if owner == world.rank)
    assert sum(message.nbytes for message in messages[:2]) == plan.sent_nbytes(world.rank) + 2 * 2 * own


@ranks(2, 3)
def test_parameters_without_gradient_are_skipped_and_may_change(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    for number, frozen in enumerate((0, 2, None)):
        for one in (sharded, model):
            for index, layer in enumerate(one.layers):
                layer.requires_grad_(index != frozen)
        square(sharded(world.mine(batch(number)))).backward()
        share_grads(sharded, model)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        for got, want in zip(matrices(sharded), matrices(model)):
            assert torch.equal(full(got), want)


@ranks(2)
def test_closures_schedulers_and_scalers_are_torchs(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in pair]
    for number in range(3):
        for one, optimizer, part in zip((sharded, model), pair, (world.mine, lambda x: x)):

            def closure(one: Any = one, part: Any = part, number: int = number) -> Tensor:
                one.zero_grad()
                loss = square(one(part(batch(number))))
                loss.backward()
                if one is model:
                    share_grads(sharded, model)
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
        for scheduler in schedulers:
            scheduler.step()
    for got, want in zip(matrices(sharded), matrices(model)):
        assert torch.equal(full(got), want)
    assert pair[0].param_groups[0]["lr"] == pair[1].param_groups[0]["lr"] == 0.02 / 8


@ranks(2, 3)
def test_clipped_gradients_and_gradients_that_are_not_finite(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(4):
        scaler.scale(square(sharded(world.mine(batch(number))))).backward()
        if number == 1 and world.rank == 1:  # on one rank only, and all of them skip the step
            sharded.layers[1].weight.grad.to_local()[0, 0] = float("inf")
        scaler.unscale_(pair[0])
        if number != 1:
            torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.05)
            share_grads(sharded, model)
            pair[1].step()
        before = [parameter.to_local().clone() for parameter in matrices(sharded)]
        scaler.step(pair[0])
        scaler.update()
        if number == 1:
            assert all(map(torch.equal, before, [parameter.to_local() for parameter in matrices(sharded)]))
        for optimizer in pair:
            optimizer.zero_grad()
        for got, want in zip(matrices(sharded), matrices(model)):
            assert torch.equal(full(got), want)
    assert scaler.get_scale() == 2.0


@ranks(2)
def test_nan_in_a_gradient_is_in_its_matrix_only_as_in_torch(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    square(sharded(world.mine(batch(0)))).backward()
    if world.rank == 1:
        sharded.layers[1].weight.grad.to_local()[0, 0] = float("nan")
    share_grads(sharded, model)
    for optimizer in pair:
        optimizer.step()
    for index, (got, want) in enumerate(zip(matrices(sharded), matrices(model))):
        assert torch.equal(full(got).isnan(), want.isnan()) and want.isnan().any() == (index == 1)


@ranks(4)
def test_a_checkpoint_of_four_ranks_loads_on_three(world: World) -> None:
    folder = world.folder("muon")
    sharded = shard(Net(), world.mesh)
    optimizer = torch.optim.Muon(matrices(sharded), lr=0.02)
    square(sharded(batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp.save({"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    square(sharded(batch(1))).backward()
    optimizer.step()
    expected = [full(parameter) for parameter in matrices(sharded)]
    group, mesh = dist.new_group([0, 1, 2]), DeviceMesh("cpu", torch.arange(3))
    if world.rank < 3:
        torch.manual_seed(5)
        other = shard(Net(), mesh)
        stepper = torch.optim.Muon(matrices(other), lr=0.02)
        square(other(batch(7))).backward()
        stepper.step()
        stepper.zero_grad()
        state = {"model": other.state_dict(), "optimizer": stepper.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group)
        other.load_state_dict(state["model"])
        stepper.load_state_dict(state["optimizer"])
        square(other(batch(1))).backward()
        stepper.step()
        for got, want in zip(matrices(other), expected):
            assert torch.allclose(full(got), want, rtol=1e-2, atol=1e-3), "gradients were reduced among other ranks"
    dist.barrier()


# --- failures ---


@pytest.mark.proves("44e")
@pytest.mark.rotates(4)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("failing", [0, 1])
@ranks(2, 3)
def test_a_failure_on_one_rank_raises_on_all_and_changes_nothing(world: World, failing: int, first: bool) -> None:
    sharded = shard(Net(), world.mesh, check_policy=fullshard.CheckPolicy(patience=0.2))
    optimizer = torch.optim.Muon(matrices(sharded), lr=0.02)
    if not first:
        square(sharded(world.mine(batch(0)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    square(sharded(world.mine(batch(1)))).backward()
    before = [parameter.to_local().clone() for parameter in matrices(sharded)]
    momenta = [optimizer.state[p]["momentum_buffer"].to_local().clone() for p in matrices(sharded) if not first]

    def breaks(*arguments: Any, plain: Any = private.newton_schulz) -> Tensor:
        if world.rank == failing:
            raise ZeroDivisionError("in the middle")
        return plain(*arguments)

    with mock.patch.object(private, "newton_schulz", breaks), pytest.raises((ZeroDivisionError, StateError)) as caught:
        optimizer.step()
    if world.rank != failing:
        assert f"rank {failing}" in str(caught.value) and "results of owners" in str(caught.value), caught.value
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in matrices(sharded)]))
    states = [optimizer.state.get(parameter) for parameter in matrices(sharded)]
    if first:
        assert not any(states), "no momentum is there as before"
    else:
        assert all(map(torch.equal, momenta, [state["momentum_buffer"].to_local() for state in states]))


@ranks(2)
def test_a_step_that_raised_between_its_groups_is_repeated_once(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [optimizers(one)[0] for one in (sharded, model)]
    square(sharded(world.mine(batch(0)))).backward()
    share_grads(sharded, model)
    calls = iter((private.list_tensors, mock.Mock(side_effect=MemoryError)))
    with mock.patch.object(private, "list_tensors", lambda *lists: next(calls)(*lists)), pytest.raises(MemoryError):
        pair[0].step()
    for optimizer in pair:
        optimizer.step()
    for got, want in zip(matrices(sharded), matrices(model)):
        assert torch.equal(full(got), want)


@ranks(2)
def test_plain_matrices_step_behind_sharded_ones(world: World) -> None:
    model, plain = Net(), nn.Linear(6, 4)
    sharded, beside = (
        shard(copy.deepcopy(model), world.mesh, check_policy=fullshard.CheckPolicy(patience=0.2)),
        copy.deepcopy(plain),
    )
    got = torch.optim.Muon([*matrices(sharded), beside.weight], lr=0.02)
    want = torch.optim.Muon([*matrices(model), plain.weight], lr=0.02)
    for failing in (False, True):
        square(sharded(world.mine(batch(0)))).backward()
        share_grads(sharded, model)
        plain.weight.grad, beside.weight.grad = torch.ones(4, 6), torch.ones(4, 6)
        if not failing:
            got.step()
            want.step()
            for one, other in zip([*matrices(sharded), beside.weight], [*matrices(model), plain.weight]):
                assert torch.equal(full(one), other)
            got.zero_grad()
            continue
        before = beside.weight.detach().clone()
        broken = mock.patch.object(private, "newton_schulz", side_effect=ZeroDivisionError if world.rank else None)
        with broken, pytest.raises((ZeroDivisionError, StateError)):
            got.step()
        assert torch.equal(before, beside.weight)


@pytest.mark.proves("44j")
@ranks(2, 3)
def test_a_rank_that_skips_the_step_is_told(world: World) -> None:
    sharded = shard(Net(), world.mesh, check_policy=fullshard.CheckPolicy(patience=0.2))
    optimizer = torch.optim.Muon(matrices(sharded))
    square(sharded(world.mine(batch(0)))).backward()
    before = [parameter.to_local().clone() for parameter in matrices(sharded)]
    with pytest.raises(StateError, match="Muon.step|matrices to their owners|Ranks diverged"):
        if world.rank != 1:
            optimizer.step()
        sharded(world.mine(batch(1)))
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in matrices(sharded)]))


@pytest.mark.proves("44f")
@ranks(2)
def test_ranks_with_other_matrices_are_told(world: World) -> None:
    sharded = shard(Net(), world.mesh, check_policy=fullshard.CheckPolicy(patience=0.2))
    found = matrices(sharded)
    optimizer = torch.optim.Muon(found if world.rank else found[1:])
    square(sharded(world.mine(batch(0)))).backward()
    with pytest.raises((StateError, ValueError), match="the ranks have different matrices|Ranks diverged"):
        optimizer.step()
    assert all(isinstance(parameter, DTensor) for parameter in found)
