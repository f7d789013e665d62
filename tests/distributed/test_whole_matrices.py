"""Functions and optimizers of whole matrices over shards: bit for bit one process's, on every mesh, split and whole."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from models import batch, full, share_grads, square
from optimizers import Shampoo
from test_meshes import Tower, parallel
from test_muon import PLACES, Net, matrices, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard import MatrixOwners, Pieces, StateError, fully_shard, plan_owners, whole_view
from fullshard import _torch as private
from fullshard.foresight.recorder import AllocationWatch, peak_of_new
from fullshard.optim import matrix_owners


def assert_equal(sharded: nn.Module, model: nn.Module, of: Any = nn.Module.named_parameters) -> None:
    for (name, got), (_, want) in zip(of(sharded), of(model)):
        assert torch.equal(full(got), want), name


def steps(sharded: nn.Module, model: nn.Module, pair: Any, mine: Any, count: int = 3) -> None:
    """Both step with the gradients of the sharded model: equal bits come of equal bits."""
    for number in range(count):
        square(sharded(mine(batch(number, 5))).float()).backward()
        share_grads(sharded, model)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()


# --- Muon: tensor parallelism, splits, experts ---


@ranks(4)
def test_muon_under_tensor_parallelism_is_bit_for_bit_that_of_one_process(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Tower()
    sharded = parallel(copy.deepcopy(model), mesh["tp"])
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    steps(sharded, model, pair, lambda x: x.chunk(2)[mesh.get_local_rank("dp")])
    for got, want in zip(matrices(sharded), matrices(model)):
        assert torch.equal(full(got), want)
    for got, want in zip(matrices(sharded), matrices(model)):
        ours, theirs = (optimizer.state[one]["momentum_buffer"] for optimizer, one in zip(pair, (got, want)))
        assert ours.placements == got.placements and torch.equal(full(ours), theirs)


@ranks(4)
def test_every_matrix_is_computed_once_under_tensor_parallelism(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = parallel(Tower(), mesh["tp"])
    fully_shard(sharded, mesh=mesh["dp"])
    parallel_ones = [parameter for block in sharded.blocks for parameter in matrices(block)]
    optimizer = torch.optim.Muon(parallel_ones)
    square(sharded(batch(0, 5).chunk(2)[mesh.get_local_rank("dp")])).backward()
    with mock.patch.object(private, "newton_schulz", wraps=private.newton_schulz) as called:
        optimizer.step()
    every = torch.tensor(called.call_count)
    dist.all_reduce(every)
    assert every.item() == len(parallel_ones)


@ranks(1, 2, 3)
def test_muon_with_a_split_computes_each_piece_alone(world: World) -> None:
    model = Net([(5, 24), (24, 40), (40, 9), (9, 6)])
    sharded = shard(copy.deepcopy(model), world.mesh)
    layers = sharded.layers
    split = {layers[0].weight: 3, layers[1].weight: (24, 8, 8), layers[2].weight: Pieces((30, 10), dim=1), layers[3].weight: 2}
    muon = whole_view(torch.optim.Muon(matrices(sharded), lr=0.02), split=split)
    pieces = [one.weight.chunk(3) for one in model.layers[:1]]
    pieces = [
        model.layers[0].weight.chunk(3),
        model.layers[1].weight.split((24, 8, 8)),
        model.layers[2].weight.split((30, 10), 1),
        model.layers[3].weight.chunk(2),
    ]
    parts = [nn.Parameter(part.detach().clone()) for listed in pieces for part in listed]
    alone = torch.optim.Muon(parts, lr=0.02)
    for number in range(3):
        square(sharded(world.mine(batch(number, 5)))).backward()
        grads = [full(parameter.grad) for parameter in matrices(sharded)]
        split_grads = [grads[0].chunk(3), grads[1].split((24, 8, 8)), grads[2].split((30, 10), 1), grads[3].chunk(2)]
        for part, grad in zip(parts, (one for listed in split_grads for one in listed)):
            part.grad = grad.clone()
        for optimizer in (muon, alone):
            optimizer.step()
            optimizer.zero_grad()
    wholes = iter(parts)
    for got, listed, dim in zip(matrices(sharded), pieces, (0, 0, 1, 0)):
        assert torch.equal(full(got), torch.cat([next(wholes).detach() for _ in listed], dim))


@ranks(2)
def test_a_split_is_found_after_undo_and_another_sharding(world: World) -> None:
    sharded = shard(Net([(5, 24), (24, 6)]), world.mesh)
    muon = whole_view(torch.optim.Muon(matrices(sharded), lr=0.02), split={sharded.layers[0].weight: 3})
    owners = MatrixOwners(matrices(sharded), split={sharded.layers[0].weight: 3})
    for again in (False, True):
        if again:
            fullshard.undo(sharded)
            shard(sharded, world.mesh)
        with mock.patch.object(private, "newton_schulz", wraps=private.newton_schulz) as called:
            square(sharded(world.mine(batch(0, 5)))).backward()
            muon.step()
            muon.zero_grad()
            owners.map(lambda matrix, name: private.newton_schulz(matrix, (1.0, 0.0, 0.0), 1, 1e-7), matrices(sharded))
        every = torch.tensor(called.call_count)
        dist.all_reduce(every)
        assert every.item() == 2 * (3 + 1)


@ranks(2, 3)
def test_messages_in_bfloat16_change_no_bit_of_newton_schulz(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    torch.manual_seed(1)
    updates = [torch.randn_like(parameter) for parameter in matrices(sharded)]

    def function(matrix: Tensor, name: str) -> Tensor:
        return private.newton_schulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)

    narrow, wide = (
        MatrixOwners(matrices(sharded), dtype=dtype).map(function, updates) for dtype in (torch.bfloat16, torch.float32)
    )
    for one, other in zip(narrow, wide):
        assert torch.equal(full(one).float(), full(other))


@ranks(4)
def test_experts_on_meshes_of_their_own(world: World) -> None:
    """Ranks 0 and 1 have one expert, ranks 2 and 3 another; the rest is sharded over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(5, 8)
            self.expert = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.expert(self.inp(x))

    model = Experts()
    with torch.no_grad():
        model.expert.weight.mul_(1 + mesh.get_local_rank("ep"))
    sharded = copy.deepcopy(model)
    fully_shard(sharded.expert, mesh=mesh["dp"])
    fully_shard(sharded, mesh=world.mesh)
    pair = [torch.optim.Muon(matrices(one), lr=0.02) for one in (sharded, model)]
    steps(sharded, model, pair, lambda x: x[:4].clone())
    for got, want in zip(matrices(sharded), matrices(model)):
        assert torch.equal(full(got), want)


# --- MatrixOwners ---


def orthogonalized(matrix: Tensor, name: str) -> Tensor:
    assert matrix.ndim == 2
    return torch.linalg.qr(matrix)[0] if matrix.shape[0] >= matrix.shape[1] else torch.linalg.qr(matrix.t())[0].t()


@pytest.mark.parametrize("place", ["flat", *PLACES])
@ranks(4)
def test_a_function_of_every_matrix(world: World, place: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "hybrid" in place else world.mesh
    model = Net()
    sharded = shard(copy.deepcopy(model), mesh, **PLACES.get(place, {}))
    owners = MatrixOwners(matrices(sharded), dtype=torch.float32)
    names: list[str] = []

    def function(matrix: Tensor, name: str) -> Tensor:
        names.append(name)
        return orthogonalized(matrix, name)

    for _ in range(2):
        for parameter, got, want in zip(matrices(sharded), owners.map(function, matrices(sharded)), matrices(model)):
            assert got.placements == parameter.placements and got.device_mesh == parameter.device_mesh
            assert torch.equal(full(got), orthogonalized(want.detach().clone(), ""))
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, names)
    known = [*(f"layers.{number}.weight" for number in range(5)), "Net.layers.5.weight"]
    assert sorted(name for listed in every for name in listed) == sorted([*known, *known])
    assert all("matrices on" in str(plan) for plan in owners.plans)


class Stacked(nn.Module):
    """A stack of experts, a convolution, a fused qkv."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(experts, 6, 5))
        self.conv = nn.Parameter(torch.randn(7, 2, 3, 3))
        self.qkv = nn.Parameter(torch.randn(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.experts.sum() + self.conv.sum() + self.qkv.sum())


@ranks(1, 2, 3)
def test_matrices_of_equal_shape_are_computed_in_batches(world: World) -> None:
    sharded = fully_shard(Stacked(8), mesh=world.mesh)
    parameters = [sharded.experts, sharded.qkv]
    owners = MatrixOwners(parameters, split={sharded.experts: 8}, dtype=torch.float32, batched=True)
    sizes: list[int] = []

    def doubled(batch: Tensor, names: list[str]) -> Tensor:
        assert batch.ndim == 3 and len(names) == batch.shape[0]
        sizes.append(len(names))
        return batch * 2

    for _ in range(2):
        for got, parameter in zip(owners.map(doubled, parameters), parameters):
            assert torch.equal(full(got), full(parameter.detach()) * 2)
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, sizes)
    assert sum(sum(listed) for listed in every) == 2 * 9 and sum(map(len, every)) < 2 * 9
    with pytest.raises(ValueError, match="Expected the function to return shape"):
        owners.map(lambda batch, names: batch[:, :1], parameters)
    assert fullshard.any_failed(failed=True)


@pytest.mark.parametrize("experts", [2, 3, 8])
@ranks(1, 2, 4)
def test_stacks_convolutions_and_fused_matrices(world: World, experts: int) -> None:
    model = Stacked(experts)
    sharded = fully_shard(copy.deepcopy(model), mesh=world.mesh)
    parameters = [sharded.experts, sharded.conv, sharded.qkv]
    owners = MatrixOwners(parameters, split={sharded.experts: experts, sharded.qkv: (6, 2, 2)}, dtype=torch.float32)
    with fullshard.counting(sharded) as messages:
        got = [full(one) for one in owners.map(orthogonalized, parameters)]
    assert torch.equal(got[0], torch.stack([orthogonalized(one.clone(), "") for one in model.experts.detach()]))
    assert torch.equal(got[1], orthogonalized(model.conv.detach().flatten(1).clone(), "").view_as(model.conv))
    assert torch.equal(got[2], torch.cat([orthogonalized(one.clone(), "") for one in model.qkv.detach().split((6, 2, 2))]))
    if world.size > 1:
        sent = sum(one.nbytes for one in messages if one.kind == "all_to_all")
        assert sent, "the convolution is on all ranks"


@ranks(2, 4)
def test_whole_experts_need_no_message(world: World) -> None:
    sharded = fully_shard(Stacked(8), mesh=world.mesh)
    plan = MatrixOwners([sharded.experts], split={sharded.experts: Pieces(8)}).plans[0]
    assert not any(map(plan.sent_nbytes, range(world.size)))
    assert plan.imbalance == 1.0
    assert [matrix.holder(world.size) for matrix in plan.matrices] == list(plan.owners)


@ranks(4)
def test_heads_under_tensor_parallelism_lie_on_one_rank_each(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(12, 6)
    dist.broadcast(whole, 0)
    model = nn.Module()
    model.heads = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    model.rows = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(1)]))
    fully_shard(model, mesh=mesh["dp"])
    parameters = [model.heads, model.rows]
    owners = MatrixOwners(parameters, split=dict.fromkeys(parameters, 4), dtype=torch.float32)
    want = torch.cat([orthogonalized(one.clone(), "") for one in whole.chunk(4)])
    for got in owners.map(orthogonalized, parameters):
        assert torch.equal(full(got), want)
    for sizes in (3, (5, 5, 2), (1, 7, 4)):  # on all ranks, also on those whose block has none of the piece
        with pytest.raises(ValueError, match="are one piece, but tensor parallelism cuts it at 6"):
            MatrixOwners([model.heads], split={model.heads: sizes})


@ranks(2)
def test_mistakes_are_told_before_anything_is_sent(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    found = matrices(sharded)
    with pytest.raises(ValueError, match=r"at least two dims, got one of shape \(24,\)"):
        MatrixOwners(list(sharded.parameters()))
    with pytest.raises(ValueError, match="of 24 rows in dim 0, got sizes"):
        MatrixOwners(found, split={found[0]: (5, 6)})
    with pytest.raises(ValueError, match="not 5 equal pieces"):
        MatrixOwners(found, split={found[0]: 5})
    with pytest.raises(ValueError, match="Pieces.dim"):
        MatrixOwners(found, split={found[0]: Pieces(2, dim=2)})
    with pytest.raises(ValueError, match="at least 1"):
        Pieces((0, 3))
    with pytest.raises(ValueError, match="at least 1, got 2.5"):
        MatrixOwners(found, split={found[0]: 2.5})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="as keys of split, got a Parameter that is not sharded"):
        MatrixOwners(found, split={nn.Parameter(torch.ones(2, 2)): 2})
    with pytest.raises(ValueError, match=r"as keys of split, got a \w+ that is not among those of the call"):
        MatrixOwners(found[1:], split={found[0]: 2})
    with pytest.raises(ValueError, match=r"as keys of split, got a \w+ that is not among those of the call"):
        whole_view(torch.optim.Muon(found[1:]), split={found[0]: 2})
    owners = MatrixOwners(found)
    with pytest.raises(ValueError, match="a tensor for each of 6 parameters, got 1"):
        owners.map(orthogonalized, found[:1])
    with pytest.raises(ValueError, match="The tensor for parameter .* is a plain tensor, expected one on"):
        owners.map(orthogonalized, [torch.empty_like(full(one)) for one in found])


def test_plain_parameters_are_computed_as_they_are() -> None:
    model = Net()
    owners = MatrixOwners(matrices(model), dtype=torch.float32)
    for got, want in zip(owners.map(orthogonalized, [one.detach() for one in matrices(model)]), matrices(model)):
        assert torch.equal(got, orthogonalized(want.detach().clone(), ""))
    (got, *_) = MatrixOwners(matrices(model)).map(lambda matrix, name: matrix.float(), matrices(model))
    assert got.dtype is torch.bfloat16, "the dtype of the messages, as for sharded parameters"


@ranks(2)
def test_pieces_of_parameters_that_are_no_longer_sharded(world: World) -> None:
    sharded = fully_shard(Stacked(), mesh=world.mesh)
    parameters = [sharded.experts, sharded.qkv]
    owners = MatrixOwners(parameters, split={sharded.experts: 4, sharded.qkv: (6, 2, 2)}, dtype=torch.float32)
    expected = [full(one) for one in owners.map(orthogonalized, parameters)]
    fullshard.undo(sharded)
    for got, want in zip(owners.map(orthogonalized, [sharded.experts.detach(), sharded.qkv.detach()]), expected):
        assert torch.equal(got, want)


def test_a_kernel_of_one_channel_is_one_row() -> None:
    conv = nn.Conv2d(16, 1, 3)
    (got,) = MatrixOwners([conv.weight]).map(lambda matrix, name: matrix * matrix.shape[1], [conv.weight.detach()])
    assert torch.equal(got, conv.weight.detach().bfloat16() * 144)


@pytest.mark.parametrize("bucket_nbytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize("replicas", [1, 2])
@ranks(4)
def test_the_peak_of_a_call_is_that_of_the_plan(world: World, bucket_nbytes: int, replicas: int) -> None:
    shape = (replicas, 4 // replicas)
    mesh = world.mesh if replicas == 1 else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    sharded = shard(Net([(64, 192), (192, 96), (96, 130), (130, 130), (130, 64), (64, 32)]), mesh)
    found = [parameter.detach() for parameter in matrices(sharded)]
    with mock.patch.object(matrix_owners, "plan_owners", partial(plan_owners, bucket_nbytes=bucket_nbytes)):
        owners = MatrixOwners(matrices(sharded))
        (plan,) = owners.plans
        owners.map(lambda matrix, name: matrix, found)
        watch = AllocationWatch()
        results = owners.map(lambda matrix, name: matrix, found)
        peak = peak_of_new(watch.stop())
    assert len(plan.buckets) > (bucket_nbytes == 1)
    place = (world.rank, 0) if replicas == 1 else (mesh.get_local_rank("shard"), mesh.get_local_rank("replicate"))
    expected = plan.peak_nbytes(*place)
    assert expected <= peak <= expected + 64 * 16, (peak, expected)  # memory comes in steps of 64 bytes
    assert f"{max(plan.peak_nbytes(r, q) for r in range(plan.ranks) for q in range(replicas)) / 1e6:,.1f} MB" in str(plan)
    del results


# --- whole_view ---


@pytest.mark.rotates(2)
@pytest.mark.parametrize("place", ["flat", *PLACES])
@ranks(4)
def test_an_optimizer_of_whole_matrices_on_every_mesh(world: World, place: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "hybrid" in place else world.mesh
    model = Net()
    sharded = shard(copy.deepcopy(model), mesh, **PLACES.get(place, {}))
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    steps(sharded, model, pair, world.mine)
    assert_equal(sharded, model)
    assert pair[0].param_groups[0]["steps"] == 3 and pair[0].count == 3
    owned = torch.tensor(sum(map(bool, pair[0].state.values())))
    dist.all_reduce(owned)
    assert owned.item() == len(pair[1].state), "each state is on one rank"


@ranks(1, 2, 3)
def test_an_optimizer_of_whole_matrices_on_any_number_of_ranks(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in pair]
    for number in range(3):
        for optimizer, one, part in zip(pair, (sharded, model), (world.mine, lambda x: x)):

            def closure(one: Any = one, part: Any = part, number: int = number) -> Tensor:
                one.zero_grad()
                loss = square(one(part(batch(number, 5))))
                loss.backward()
                if one is model:
                    share_grads(sharded, model)
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(sharded, model)


class Twice(Shampoo):
    """Evaluates its closure twice, as LBFGS and SAM do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@ranks(2)
def test_a_closure_that_is_called_twice_is_told(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    optimizer = whole_view(Twice(sharded.parameters()))

    def closure() -> Tensor:
        loss = square(sharded(world.mine(batch(0, 5))))
        loss.backward()
        return loss

    before = [parameter.to_local().clone() for parameter in sharded.parameters()]
    with pytest.raises(StateError, match="Twice calls its closure several times in a step"):
        optimizer.step(closure)
    assert fullshard.any_failed(failed=True)
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in sharded.parameters()]))


class Scaled(nn.Module):
    """A scalar, which is replicated, a plain parameter that fullshard ignores, and matrices of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList([nn.Linear(5, 9), nn.Linear(9, 6).to(torch.float64)])
        self.shift = nn.Parameter(torch.full((5,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x + self.shift).double()) * self.scale


@ranks(2, 3)
def test_scalars_ignored_parameters_and_several_dtypes(world: World) -> None:
    model = Scaled()
    sharded = copy.deepcopy(model)
    for layer in sharded.layers:
        fully_shard(layer, mesh=world.mesh)
    fully_shard(sharded, mesh=world.mesh, ignored_params={sharded.shift})
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    with mock.patch.object(matrix_owners, "OwnerExchange", wraps=matrix_owners.OwnerExchange) as planned:
        for number in range(3):
            square(sharded(world.mine(batch(number, 5))).float()).backward()
            dist.all_reduce(sharded.shift.grad)  # the caller's own part
            share_grads(sharded, model)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    assert planned.call_count == 2, "a plan for each dtype, once"
    assert_equal(sharded, model)


@ranks(2)
def test_adafactor_of_torch_is_an_optimizer_of_whole_matrices(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(torch.optim.Adafactor(sharded.parameters())), torch.optim.Adafactor(model.parameters())]
    steps(sharded, model, pair, world.mine)
    assert_equal(sharded, model)


@ranks(1, 2)
def test_adafactor_without_whole_view_says_what_to_call(world: World) -> None:
    """torch raises in the step, from DTensor, when states and counters have changed."""
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [torch.optim.Adafactor(each.parameters()) for each in (sharded, model)]
    square(sharded(world.mine(batch(0, 5))).float()).backward()
    with pytest.raises(StateError, match=r"Adafactor\.step\(\): parameter '.*' is sharded.*whole_view\(optimizer\)"):
        pair[0].step()
    assert not pair[0].state
    sharded.zero_grad()
    whole_view(pair[0])
    steps(sharded, model, pair, world.mine)
    assert_equal(sharded, model)


@ranks(4)
def test_an_optimizer_of_whole_matrices_under_tensor_parallelism(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Tower()
    sharded = parallel(copy.deepcopy(model), mesh["tp"])
    fully_shard(sharded, mesh=mesh["dp"])
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    steps(sharded, model, pair, lambda x: x.chunk(2)[mesh.get_local_rank("dp")])
    assert_equal(sharded, model)


@ranks(2, 3)
def test_pieces_are_parameters_of_their_own(world: World) -> None:
    model = Stacked()
    sharded = fully_shard(copy.deepcopy(model), mesh=world.mesh)
    ours = whole_view(Shampoo(sharded.parameters()), split={sharded.experts: 4, sharded.qkv: (6, 2, 2)})
    parts = [
        nn.Parameter(one.clone())
        for one in (*model.experts.detach(), model.conv.detach(), *model.qkv.detach().split((6, 2, 2)))
    ]
    theirs = Shampoo(parts)
    for number in range(3):
        square(sharded(world.mine(batch(number, 5)))).backward()
        grads = [full(one.grad) for one in (sharded.experts, sharded.conv, sharded.qkv)]
        for part, grad in zip(parts, (*grads[0], grads[1], *grads[2].split((6, 2, 2)))):
            part.grad = grad.clone()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(full(sharded.experts), torch.stack([one.detach() for one in parts[:4]]))
    assert torch.equal(full(sharded.conv), parts[4])
    assert torch.equal(full(sharded.qkv), torch.cat([one.detach() for one in parts[5:]]))


@ranks(2)
def test_parameters_without_gradient_are_skipped(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    for frozen in (0, 2, None):
        for one in (sharded, model):
            for index, layer in enumerate(one.layers):
                layer.requires_grad_(index != frozen)
        steps(sharded, model, pair, world.mine, 1)
    assert_equal(sharded, model)


@ranks(3)
def test_states_on_owners_outlive_undo_and_another_sharding(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    for again in (False, True):
        if again:
            fullshard.undo(sharded)
            shard(sharded, world.mesh, reshard_after_forward=False)
        steps(sharded, model, pair, world.mine, 2)
        assert_equal(sharded, model)


def trained(world: World, sharded: nn.Module, optimizer: Any, numbers: Any) -> None:
    for number in numbers:
        square(sharded(batch(number, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("by", ["state_dict", "get_optimizer_state_dict"])
@ranks(4)
def test_states_of_owners_load_on_other_ranks(world: World, by: str) -> None:
    """Saved on four ranks, loaded on three and on 2 x 2: factors included, whoever owns them."""
    folder = world.folder("shampoo")
    split = {"layers.1.weight": (30, 10)}

    def made(mesh: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = shard(Net(), mesh)
        pieces = {parameter: split[name] for name, parameter in model.named_parameters() if name in split}
        return model, whole_view(Shampoo(model.parameters()), split=pieces)

    def state_of(model: Any, optimizer: Any) -> Any:
        return optimizer.state_dict() if by == "state_dict" else get_optimizer_state_dict(model, optimizer)

    sharded, optimizer = made(world.mesh)
    trained(world, sharded, optimizer, (0, 1))
    dcp.save({"model": sharded.state_dict(), "optimizer": state_of(sharded, optimizer)}, checkpoint_id=folder)
    trained(world, sharded, optimizer, (2, 3))
    expected = [full(parameter) for parameter in sharded.parameters()]
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group, three = dist.new_group([0, 1, 2]), DeviceMesh("cpu", torch.arange(3))
    for mesh, among in ((three, group), (hybrid, None)):
        if among is None or world.rank < 3:
            other, stepper = made(mesh)
            if by == "state_dict":
                trained(world, other, stepper, (7,))  # so that the states are there to be loaded into
            state = {"model": other.state_dict(), "optimizer": state_of(other, stepper)}
            dcp.load(state, checkpoint_id=folder, process_group=among)
            other.load_state_dict(state["model"])
            if by == "state_dict":
                stepper.load_state_dict(state["optimizer"])
            else:
                set_optimizer_state_dict(other, stepper, state["optimizer"])
            trained(world, other, stepper, (2, 3))
            for got, want in zip(other.parameters(), expected):
                torch.testing.assert_close(full(got), want, rtol=1e-4, atol=1e-5)
    dist.barrier()


@ranks(2)
def test_a_state_dict_of_one_process_loads_and_others_states_are_dropped(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    square(model(batch(5, 5))).backward()
    pair[1].step()
    pair[1].zero_grad()
    sharded.load_state_dict({name: distribute_tensor(one, world.mesh, [Shard(0)]) for name, one in model.state_dict().items()})
    pair[0].load_state_dict(copy.deepcopy(pair[1].state_dict()))
    steps(sharded, model, pair, world.mine)
    assert_equal(sharded, model)
    owned = torch.tensor(sum(map(bool, pair[0].state.values())))
    dist.all_reduce(owned)
    assert owned.item() == len(pair[1].state)


@ranks(4)
def test_states_of_pieces_in_other_blocks_are_dropped(world: World) -> None:
    """Tensor parallelism shards the dim that is split, so that each rank lists the pieces of its block only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.heads = nn.Parameter(distribute_tensor(torch.ones(12, 6), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = whole_view(Shampoo(model.parameters()), split={model.heads: 4})
    one_process = Shampoo([nn.Parameter(torch.ones(3, 6)) for _ in range(4)])
    for parameter in one_process.param_groups[0]["params"]:
        parameter.grad = torch.ones(3, 6)
    one_process.step()
    states = one_process.state_dict()
    states["state"] = {0: {str(number): states["state"][number] for number in range(4)}}
    states["param_groups"][0]["params"] = [0]
    optimizer.load_state_dict(states)
    model.heads.grad = torch.zeros_like(model.heads)
    optimizer.step()
    numbers: list[Any] = [None] * world.size
    dist.all_gather_object(numbers, list(optimizer.state[model.heads]))
    assert sorted(number for listed in numbers for number in listed) == ["0", "1", "2", "3"], numbers


@ranks(4)
def test_ranks_of_one_mesh_shard_their_experts_again_alone(world: World) -> None:
    """The other ranks keep their exchanges, and their states need no check, in which the first ones would not take part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 6))
    sharded = copy.deepcopy(model)
    fully_shard(sharded[1], mesh=mesh["dp"])
    fully_shard(sharded, mesh=world.mesh)
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    steps(sharded, model, pair, lambda x: x[:4].clone(), 2)
    if mesh.get_local_rank("ep"):
        fullshard.undo(sharded[1])
        fully_shard(sharded[1], mesh=mesh["dp"])
    steps(sharded, model, pair, lambda x: x[:4].clone(), 2)
    assert_equal(sharded, model)


# --- failures of whole_view ---


class Failing(Shampoo):
    """Fails after it has stepped, on one rank."""

    failing = -1

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.failing == dist.get_rank():
            raise ZeroDivisionError("half way")
        return result


@pytest.mark.proves("44g")
@pytest.mark.rotates(4)
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("restorable", [True, False])
@ranks(2, 3)
def test_a_step_that_fails_on_one_rank_leaves_all_as_before(world: World, restorable: bool, after: int) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh, check_policy=fullshard.CheckPolicy(patience=0.2))
    ours, theirs = whole_view(Failing(sharded.parameters()), restorable=restorable), Shampoo(model.parameters())
    steps(sharded, model, [ours, theirs], world.mine, after)
    square(sharded(world.mine(batch(after, 5)))).backward()
    before = [parameter.to_local().clone() for parameter in sharded.parameters()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in ours.param_groups]
    ours.failing = 1
    with pytest.raises((ZeroDivisionError, StateError)) as caught:
        ours.step()
    assert world.rank == 1 or "rank 1" in str(caught.value)
    ours.failing = -1
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in sharded.parameters()]))
    if not restorable:
        with pytest.raises(StateError, match="failed before .*restorable=False"):
            ours.step()
        return
    assert [{key: value for key, value in group.items() if key != "params"} for group in ours.param_groups] == groups
    assert ours.count == theirs.count


class Lazy(Shampoo):
    """Notes its first step in attributes, and counts in a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.steps = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self, "initialized"):
            self.initialized, self.steps_of_first = True, self.steps.clone()
            for group in self.param_groups:
                group["lr"] = 0.125
        self.steps.add_(1)
        return super().step(closure)


@ranks(2)
def test_attributes_that_a_step_makes_are_undone_with_it(world: World) -> None:
    """The first step of one parameter alone is no first step, or the option would be set in the trial only."""
    sharded = shard(Net(), world.mesh)
    optimizer = whole_view(Lazy(sharded.parameters()))
    steps_taken = optimizer.steps
    trained(world, sharded, optimizer, (0, 1))
    assert optimizer.initialized and optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.steps is steps_taken and steps_taken.item() == 2 and optimizer.steps_of_first.item() == 0


class Counting(Shampoo):
    """Counts its steps in a container, which its step size depends on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, list[int]] = {"steps": [0]}

    def step(self, closure: Any = None) -> Any:
        self.counts["steps"][0] += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.counts["steps"][0]
        return super().step(closure)


@ranks(1, 2)
def test_containers_in_attributes_are_as_before_a_trial(world: World) -> None:
    """Steps 1, 2, 4 and 8 try one parameter alone first, and were counted twice."""
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Counting(sharded.parameters())), Counting(model.parameters())]
    steps(sharded, model, pair, world.mine)
    assert pair[0].counts == pair[1].counts and pair[1].counts["steps"][0] > 1
    assert_equal(sharded, model)


class Combining(Shampoo):
    """Has an option that depends on all its parameters, as Prodigy's estimate of the distance."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] = 1e-3 * sum(float(parameter.norm()) for parameter in group["params"])
        return result


@pytest.mark.proves("44h")
@ranks(2)
def test_an_optimizer_that_combines_parameters_is_refused(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    optimizer = whole_view(Combining(sharded.parameters()))
    square(sharded(world.mine(batch(0, 5)))).backward()
    before = [parameter.to_local().clone() for parameter in sharded.parameters()]
    with pytest.raises(StateError, match="the options of Combining differ between ranks after the step"):
        optimizer.step()
    assert fullshard.any_failed(failed=True)
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in sharded.parameters()]))
    assert not any(optimizer.state.values()) and optimizer.param_groups[0]["lr"] == 0.1


class Clipping(Shampoo):
    """Divides by the norm of all gradients that it sees, as some optimizers do, and tells nobody."""

    def step(self, closure: Any = None) -> Any:
        every = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        norm = sum(float(grad.square().sum()) for grad in every) ** 0.5
        for grad in every:
            grad.div_(norm)
        return super().step(closure)


@pytest.mark.proves("44h")
@ranks(1, 2)
def test_an_optimizer_that_clips_by_the_norm_of_all_gradients_is_refused(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Clipping(sharded.parameters())), Clipping(model.parameters())]
    if world.size == 1:  # which has all of them
        steps(sharded, model, pair, world.mine)
        assert_equal(sharded, model)
        return
    square(sharded(world.mine(batch(0, 5)))).backward()
    before = [parameter.to_local().clone() for parameter in sharded.parameters()]
    with pytest.raises(StateError, match="a parameter alone would have stepped otherwise"):
        pair[0].step()
    assert fullshard.any_failed(failed=True)
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in sharded.parameters()]))


@ranks(2, 3)
def test_a_cast_between_steps_is_followed(world: World) -> None:
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Shampoo(sharded.parameters())), Shampoo(model.parameters())]
    steps(sharded, model, pair, world.mine, 1)
    for one, optimizer in zip((sharded, model), pair):
        one.double()
        optimizer.load_state_dict(optimizer.state_dict())  # states in the new dtype
    steps(sharded, model, pair, lambda x: world.mine(x).double(), 2)
    assert_equal(sharded, model)


@ranks(2)
def test_states_of_another_split_are_told(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    first = sharded.layers[0].weight
    split = whole_view(Shampoo(sharded.parameters()), split={first: 4})
    whole, two = whole_view(Shampoo(sharded.parameters())), whole_view(Shampoo(sharded.parameters()), split={first: 2})
    for optimizer in (split, whole, two):
        trained(world, sharded, optimizer, (0,))
    for optimizer, other in ((whole, split), (split, whole), (two, split)):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        square(sharded(world.mine(batch(0, 5)))).backward()
        with pytest.raises(StateError, match="the states of parameter 'layers.0.weight.*' are of another split"):
            optimizer.step()
        assert fullshard.any_failed(failed=True)
        optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
def test_a_split_given_after_a_step_is_followed(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    muon = torch.optim.Muon(matrices(sharded), lr=0.02)
    for split, expected in ((None, 6), ({sharded.layers[0].weight: 3}, 8), ({sharded.layers[0].weight: 2}, 7)):
        if split is not None:
            whole_view(muon, split=split)
        square(sharded(world.mine(batch(0, 5)))).backward()
        with mock.patch.object(private, "newton_schulz", wraps=private.newton_schulz) as called:
            muon.step()
        muon.zero_grad()
        every = torch.tensor(called.call_count)
        dist.all_reduce(every)
        assert every.item() == expected
    fullshard.undo(sharded)
    square(sharded(world.mine(batch(0, 5)))).backward()
    with pytest.raises(StateError, match=r"a parameter of shape \(24, 5\) is split, and no longer sharded"):
        muon.step()


@ranks(3)
def test_ranks_without_a_state_raise_with_the_others_after_undo(world: World) -> None:
    sharded = shard(Net([(5, 3)]), world.mesh)  # two parameters, so one rank owns none
    optimizer = whole_view(Shampoo(sharded.parameters()))
    trained(world, sharded, optimizer, (0,))
    owned = torch.tensor(int(any(optimizer.state.values())))
    dist.all_reduce(owned)
    assert owned.item() < 3
    fullshard.undo(sharded)
    square(sharded(world.mine(batch(1, 5)))).backward()
    with pytest.raises(StateError, match="is no longer sharded"):
        optimizer.step()


@pytest.mark.proves("44i")
@ranks(2)
def test_a_state_on_another_rank_than_the_owner_is_told(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    optimizer = whole_view(Shampoo(sharded.parameters()))
    trained(world, sharded, optimizer, (0,))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[1 - world.rank])
    square(sharded(world.mine(batch(0, 5)))).backward()
    with pytest.raises(StateError, match="there is a state of parameter '.*', but not on its owner"):
        optimizer.step()
    assert fullshard.any_failed(failed=True)


@pytest.mark.proves("44i")
@ranks(2)
def test_states_that_a_loaded_state_dict_lacks_are_named(world: World) -> None:
    """The state dict of the first rank has the states that it owns. The others began anew, silently."""
    sharded = shard(Net(), world.mesh)
    optimizer = whole_view(Shampoo(sharded.parameters()))
    trained(world, sharded, optimizer, (0,))
    states: list[Any] = [optimizer.state_dict()]
    dist.broadcast_object_list(states, 0)
    lacking = [name for name, held in zip(dict(sharded.named_parameters()), states[0]["state"].values()) if not held]
    optimizer.load_state_dict(states[0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trained(world, sharded, optimizer, (1, 2))
    said = [str(one.message) for one in found if "the loaded state dict has no states of" in str(one.message)]
    assert len(said) == 1 and f"{str(lacking[:3])[1:-1]} and {len(lacking) - 3} more, which begin anew" in said[0]


@pytest.mark.proves("44k")
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}])
@ranks(1, 2)
def test_a_full_state_dict_of_states_on_their_owners_is_refused(world: World, options: dict[str, Any]) -> None:
    """torch took the states of the first rank for those of all, silently. With one rank the state dict is full."""
    sharded = shard(Net(), world.mesh)
    optimizer = whole_view(Shampoo(sharded.parameters()))
    trained(world, sharded, optimizer, (0,))
    asked = StateDictOptions(full_state_dict=True, **options)
    if world.size == 1:
        states = get_optimizer_state_dict(sharded, optimizer, options=asked)["state"]
        assert all(states[name] for name, _ in sharded.named_parameters())
    else:
        with pytest.raises(StateError, match="the states of Shampoo are on the owners of their parameters"):
            get_optimizer_state_dict(sharded, optimizer, options=asked)
    assert get_optimizer_state_dict(sharded, optimizer)["state"]
    trained(world, sharded, optimizer, (1,))


class Named(torch.optim.Optimizer):
    """Decays parameters by their names."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    update = parameter.grad + (0.0 if name.endswith("bias") else 1.0) * parameter
                    parameter.add_(update / update.norm(), alpha=-group["lr"])


@ranks(1, 2, 3)
def test_names_of_parameters_are_those_of_the_owned_ones(world: World) -> None:
    """The names of all parameters stood beside the parameters that a rank owns."""
    model = Net()
    sharded = shard(copy.deepcopy(model), world.mesh)
    pair = [whole_view(Named(sharded.named_parameters())), Named(model.named_parameters())]
    steps(sharded, model, pair, world.mine)
    for got, want in zip(sharded.parameters(), model.parameters()):
        torch.testing.assert_close(full(got), want, rtol=1e-4, atol=1e-5)
    assert pair[0].param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


@ranks(1, 2)
def test_a_piece_and_a_parameter_of_its_shape_are_batches_of_their_own(world: World) -> None:
    """An expert of a stack is a matrix of 3 x 5, a kernel of one output channel one of 1 x 15."""
    model = nn.ParameterDict({"stack": nn.Parameter(torch.rand(2, 3, 5)), "kernel": nn.Parameter(torch.rand(1, 3, 5))})
    wanted = [
        (one / one.flatten(dims).sum(-1).view(shape))
        for one, dims, shape in (
            (model["stack"].detach().clone(), 2, (2, 3, 1)),
            (model["kernel"].detach().clone(), 1, (1, 1, 1)),
        )
    ]
    sharded = fully_shard(model, mesh=world.mesh)
    parameters = [sharded["stack"], sharded["kernel"]]
    owners = MatrixOwners(parameters, split={sharded["stack"]: 2}, dtype=torch.float32, batched=True)
    found = owners.map(lambda batch, names: batch / batch.sum(-1, keepdim=True), [one.detach() for one in parameters])
    for got, want in zip(found, wanted):
        torch.testing.assert_close(full(got), want)


@ranks(2)
def test_what_whole_view_does_not_take(world: World) -> None:
    sharded = shard(Net(), world.mesh)
    with pytest.raises(ValueError, match="takes a torch.optim.Optimizer, got Linear"):
        whole_view(nn.Linear(2, 2))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="AdamW is element-wise"):
        whole_view(torch.optim.AdamW(sharded.parameters()))
    for option in ({"cost": lambda matrix: 1.0}, {"restorable": False}):
        with pytest.raises(ValueError, match="Expected cost=None and restorable=True for Muon"):
            whole_view(torch.optim.Muon(matrices(sharded)), **option)
    with pytest.raises(ValueError, match="LBFGS keeps its parameters in its attribute '_params'"):
        whole_view(torch.optim.LBFGS(sharded.parameters()))
    for view, viewed in (("whole_view", whole_view), ("local_view", fullshard.local_view)):
        with pytest.raises(ValueError, match=f"This Shampoo has a {view} already"):
            whole_view(viewed(Shampoo(sharded.parameters())))
    scheduled = Shampoo(sharded.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    with pytest.raises(ValueError, match="which was replaced, for example by a scheduler"):
        whole_view(scheduled)
    optimizer = whole_view(Shampoo(sharded.parameters()))
    trained(world, sharded, optimizer, (0,))
    fullshard.undo(sharded)
    square(sharded(world.mine(batch(1, 5)))).backward()
    with pytest.raises(StateError, match="is no longer sharded, and its state is on its owner only"):
        optimizer.step()
    assert not any(isinstance(parameter, DTensor) for parameter in sharded.parameters())


@pytest.mark.parametrize("kind", ["split", "view"])
@ranks(1)
def test_a_copy_that_would_lack_the_view_is_refused(world: World, kind: str) -> None:
    """torch copies settings and states only: the copy stepped a fused matrix as one."""
    layer = nn.Linear(6, 6, bias=False)
    fully_shard(layer, mesh=world.mesh)
    if kind == "split":
        optimizer = whole_view(torch.optim.Muon(layer.parameters(), lr=0.1), split={layer.weight: 2})
    else:
        optimizer = whole_view(Shampoo(layer.parameters()))
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match=r"cannot be copied or pickled: it has a (split of its matrices|whole_view)"):
            duplicate(optimizer)
    copy.deepcopy(optimizer.state_dict())
