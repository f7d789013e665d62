"""HFSDP: on a hybrid mesh, optimizer states are sharded over all ranks, and collectives run in two hops."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from models import (
    Stack,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    batch,
    full,
    rounding,
    shard_stack,
    square,
    train_both,
)
from test_fsdp2_surface import MyGather, MyReduce
from test_levels import exact_results
from test_meshes import Tower, parallel, train_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fullshard
from fullshard import (
    HFSDP,
    ZERO2,
    ZERO3,
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    StateError,
    StateSharding,
    fully_shard,
)

UNITS = 4  # of a sharded Stack: three blocks and the root
BOTH = ("replicate", "shard")
EACH_TIME = StateSharding(gradients=BOTH, optimizer=BOTH)  # no sum is left to the last microbatch


def hybrid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=BOTH)


def backwards(world: World, model: nn.Module, microbatches: int, number: int = 0) -> None:
    for index in range(microbatches):
        model.set_is_last_backward(index == microbatches - 1)
        square(model(world.mine(batch(number * 10 + index)))).backward()


def sent(model: nn.Module, run: Callable[[], object]) -> Counter[tuple[str, int]]:
    """Collectives that `run` starts, by kind and ranks."""
    with fullshard.counting(model) as messages:
        run()
    return Counter((message.kind, message.ranks) for message in messages if message.kind in ("all_gather", "reduce_scatter"))


# --- messages and memory ---


@pytest.mark.parametrize("microbatches", [1, 8])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@ranks(2)
def test_the_hop_over_replicas_runs_once_per_step(world: World, sizes: tuple[int, int], microbatches: int) -> None:
    """With one rank in one of the two dims, the number of ranks of a message tells its hop."""
    replicas, shards = sizes
    model = shard_stack(Stack(), hybrid(*sizes), states=HFSDP, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        found = sent(model, lambda number=number: backwards(world, model, microbatches, number))
        expected = {("all_gather", shards): 2 * microbatches * UNITS, ("reduce_scatter", shards): microbatches * UNITS}
        if replicas > 1:  # with one replica there is nothing to share
            expected |= {("all_gather", replicas): UNITS, ("reduce_scatter", replicas): UNITS}
        assert found == expected
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "mp", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"]
)
@ranks(4)
def test_bytes_and_memory_are_those_of_the_table(world: World, mp: MixedPrecisionPolicy) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=hybrid(2, 2), states=HFSDP, mp_policy=mp, reshard_after_forward=True)
    numel, compute = 64 * 64, 4 if mp.param_dtype is None else 2
    with fullshard.counting(model) as messages:
        model(torch.ones(2, 64)).sum().backward()
    gathers = [message.nbytes for message in messages if message.kind == "all_gather"]
    assert sorted(gathers) == sorted(2 * [numel // 2 * compute] + 4 * [numel * compute])  # one over replicas, two over shards
    reductions = [message.nbytes for message in messages if message.kind == "reduce_scatter"]
    assert sorted(reductions) == sorted(2 * [numel // 2 * 4] + 2 * [numel * 4])
    for layer in model:
        assert layer.weight.to_local().shape == (16, 64) and layer.weight.grad.to_local().shape == (16, 64)
        (group,) = fullshard.core.unit_of(layer).groups  # type: ignore[attr-defined]
        assert group._inner.memory == numel // 2 * compute == sum(buffer.memory for buffer in group.buffers)
        layer.reshard()
        assert group._inner.memory == 0, "given back on demand"


@ranks(2)
def test_a_forward_without_grad_and_a_skipped_step_use_the_kept_hop(world: World) -> None:
    model = shard_stack(Stack(), hybrid(2, 1), states=HFSDP)
    look = lambda: torch.no_grad()(model)(world.mine(batch(0)))
    assert sent(model, look)[("all_gather", 2)] == UNITS
    backwards(world, model, 1)
    model.zero_grad()
    assert sent(model, look)[("all_gather", 2)] == 0
    with torch.no_grad():
        torch._foreach_mul_([parameter.to_local() for parameter in model.blocks[1].parameters()], 0.5)
    assert sent(model, look)[("all_gather", 2)] == 1
    model.load_state_dict(model.state_dict())
    assert sent(model, look)[("all_gather", 2)] == UNITS
    model.reshard()
    assert sent(model, look)[("all_gather", 2)] == 1


# --- values ---


@pytest.mark.rotates(3)
@pytest.mark.parametrize("direct_min_bytes", [None, 0, float("inf")])
@pytest.mark.parametrize("states", [HFSDP, EACH_TIME], ids=["HFSDP", "each time"])
@ranks(4)
def test_training_equals_the_unsharded_model(world: World, states: StateSharding, direct_min_bytes: float | None) -> None:
    comm = CommPolicy(direct_min_bytes=direct_min_bytes)
    for sizes in ((2, 2), (4, 1), (1, 4)):
        mesh = hybrid(*sizes)
        train_both(world, Stack(), lambda m, mesh=mesh: shard_stack(m, mesh, states=states, comm_policy=comm), steps=3)


@ranks(4)
def test_exactly_summable_values_are_bitwise_equal_with_and_without(world: World) -> None:
    settings = (
        (ZERO3, world.mesh),
        (ZERO3, hybrid(2, 2)),
        (HFSDP, hybrid(2, 2)),
        (HFSDP, hybrid(4, 1)),
        (EACH_TIME, hybrid(2, 2)),
    )
    first, *others = (exact_results(world, mesh, states) for states, mesh in settings)
    for other in others:
        assert len(first) == len(other) and all(map(torch.equal, first, other))


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_dims_and_dtypes(world: World, dim: int) -> None:
    place = (lambda p: Shard(p.ndim - 1)) if dim else None
    for mp, tolerance in (
        (MixedPrecisionPolicy(), None),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), rounding(torch.bfloat16)),
    ):
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), hybrid(2, 2), states=HFSDP, shard_placement_fn=place, mp_policy=mp)
        for index in range(2):
            sharded.set_is_last_backward(index == 1)
            square(sharded(world.mine(batch(index))).float()).backward()
            square(model(batch(index))).backward()
        assert_same_grads(sharded, model, tolerance)
        (placement,) = sharded.inp.weight.placements
        assert placement == Shard(dim)


@ranks(4)
def test_offload_recomputed_storage_and_smaller_groups(world: World) -> None:
    def kept(model: nn.Module) -> nn.Module:
        shard_stack(model, hybrid(2, 2), states=HFSDP)
        model.set_keep_unsharded_storage(True)
        return model

    train_both(world, Stack(), kept, steps=3)
    offload = CPUOffloadPolicy(pin_memory=False)
    train_both(world, Stack(), lambda m: shard_stack(m, hybrid(2, 2), states=HFSDP, offload_policy=offload), steps=3)
    train_both(world, Stack(), lambda m: shard_stack(m, hybrid(1, 4), states=HFSDP, reshard_after_forward=2), steps=3)


@ranks(8)
def test_a_smaller_group_within_the_shard_dim(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), hybrid(2, 4), states=HFSDP, reshard_after_forward=2)
    rows = batch(0)[:8]
    for number in range(2):
        found = sent(sharded, lambda: square(sharded(rows)).backward())
        over_replicas = UNITS if number == 0 else 0
        assert found[("all_gather", 2)] == over_replicas + UNITS and found[("all_gather", 4)] == UNITS
        square(model(rows)).backward()
    assert_same_grads(sharded, model)


@ranks(4)
def test_late_and_deferred_sums(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), hybrid(2, 2), states=HFSDP)
    sharded.set_manual_backward_finalization(True)
    for index in range(2):
        square(sharded(world.mine(batch(index)))).backward()
        square(model(batch(index))).backward()
    sharded.finalize_backward()
    assert_same_grads(sharded, model)
    sharded.set_manual_backward_finalization(False)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded.zero_grad()
    model.zero_grad()
    for states in (HFSDP, EACH_TIME):
        sharded.set_states(states)
        sharded.set_requires_all_reduce(False)
        square(sharded(world.mine(batch(3)))).backward()
        with pytest.raises(StateError, match="are reduced over shards, but not over replicas"):
            optimizer.step()
        sharded.set_requires_all_reduce(True)
        with sharded.accumulate():
            square(sharded(world.mine(batch(4)))).backward()
        square(sharded(world.mine(batch(5)))).backward()
        for index in (3, 4, 5):
            square(model(batch(index))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad()
        model.zero_grad()


@ranks(4)
def test_collectives_of_the_caller_carry_the_hop_over_shards(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), hybrid(2, 2), states=HFSDP)
    gather, reduce = MyGather(), MyReduce()
    for unit in (sharded, *sharded.blocks):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    for index in range(2):
        sharded.set_is_last_backward(index == 1)
        square(sharded(world.mine(batch(index)))).backward()
        square(model(batch(index))).backward()
    assert_same_grads(sharded, model)
    assert (gather.calls, reduce.calls) == (14, 8)


@ranks(4)
def test_hooks_and_factors_see_the_sum_over_all_ranks(world: World) -> None:
    model = nn.Linear(8, 8, bias=False)
    sharded = fully_shard(copy.deepcopy(model), mesh=hybrid(2, 2), states=HFSDP)
    seen: list[Tensor] = []
    sharded.set_all_reduce_hook(lambda total: seen.append(total.clone()))
    sharded.set_gradient_divide_factor(2.0)
    square(sharded(world.mine(batch(0, 8)))).backward()
    square(model(batch(0, 8))).backward()
    assert_near(full(sharded.weight.grad) / 2, model.weight.grad, "divided by 2 instead of 4")
    assert torch.equal(seen[0].view(2, 8), sharded.weight.grad.to_local())


# --- tensor parallelism ---


@ranks(4)
def test_over_tensor_parallel_parameters(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(*BOTH, "tp"))
    sharded, model = train_parallel(world, mesh, BOTH, states=HFSDP)
    weight = sharded.blocks[0].up.weight
    assert tuple(weight.device_mesh.shape) == (2, 2) and weight.to_local().shape == (4, 8)
    square(sharded(batch(0))).backward()
    square(model(batch(0))).backward()
    for norm in (2.0, float("inf")):
        ours = fullshard.clip_grad_norm_(sharded.parameters(), 0.01, norm)
        assert_near(ours, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm), f"norm {norm}")
        assert_same_grads(sharded, model)
    for name, tensor in fullshard.iter_full(sharded):
        assert_near(tensor, model.state_dict()[name], name)


@ranks(8)
def test_three_dims_and_weights_on_another_mesh(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(*BOTH, "tp"))
    model = Tower()
    sharded = shard_stack(parallel(copy.deepcopy(model), mesh["tp"]), mesh[BOTH], states=HFSDP)
    square(sharded(batch(0)[:8])).backward()
    square(model(batch(0)[:8])).backward()
    assert_same_grads(sharded, model)
    folder = world.folder("tp") / "new"
    fullshard.save_weights(sharded, folder)
    again = shard_stack(Tower(), hybrid(4, 2), states=HFSDP)
    fullshard.load_weights(again, folder)
    assert_same_parameters(again, model)


# --- what holds the shards ---


@pytest.mark.rotates(4)
@pytest.mark.proves("44d")
@pytest.mark.parametrize("name", ["all", "flat", "kept", "hybrid"])
@ranks(4, 8)
def test_a_checkpoint_moves_between_levels_meshes_and_numbers_of_ranks(world: World, name: str) -> None:
    folder = world.folder("moves")

    def trained(mesh: DeviceMesh, states: StateSharding, number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(number)
        model = shard_stack(Stack(), mesh, states=states)
        optimizer = torch.optim.AdamW(model.parameters())
        square(model(batch(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    two = hybrid(2, world.size // 2)
    saved = {"all": (two, HFSDP), "flat": (world.mesh, ZERO3), "kept": (world.mesh, ZERO2), "hybrid": (two, ZERO3)}
    model, optimizer = trained(*saved[name], 0)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    expected = {key: full(value) for key, value in model.state_dict().items()}
    moments = {key: full(value["exp_avg"]) for key, value in optimizer.state_dict()["state"].items()}
    for size in (1, 2, 3, 4) if world.size == 4 else (6, 7):
        group = dist.new_group(list(range(size)))
        mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1) if size % 2 == 0 else torch.arange(size))
        if world.rank < size:
            model, optimizer = trained(mesh, HFSDP if mesh.ndim == 2 else ZERO3, 1)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=folder, process_group=group)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for key, value in model.state_dict().items():
                assert_near(full(value), expected[key], f"{key} of {name} on {size}")
            for key, value in optimizer.state_dict()["state"].items():
                assert_near(full(value["exp_avg"]), moments[key], f"momentum {key} of {name} on {size}")
            square(model(batch(2))).backward()
        dist.barrier()


@ranks(4)
def test_copies_pickles_undo_and_full_params(world: World) -> None:
    model = shard_stack(Stack(), hybrid(2, 2), states=HFSDP)
    backwards(world, model, 2)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    x = batch(1)
    with torch.no_grad():
        expected = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), expected)
            assert twin.inp.weight.placements == (Shard(0),) and twin.inp.weight.device_mesh.size() == 4
        with fullshard.full_params(model):
            model.head.weight.mul_(2)
        doubled = model(x)
        assert not torch.equal(doubled, expected)
        with fullshard.gathered(model) as tensors:
            assert any(torch.equal(tensor, full(model.head.weight)) for tensor in tensors.values())
        with model.resident():
            assert torch.equal(model(x), doubled)
        plain = fullshard.undo(model)
        assert torch.equal(plain(x), doubled)


@ranks(4)
def test_meta_device_and_values_of_the_first_rank(world: World) -> None:
    with torch.device("meta"):
        model = Stack()
    shard_stack(model, hybrid(2, 2), states=HFSDP)
    fullshard.materialize(model, seed=3)
    with torch.device("meta"):
        other = Stack()
    shard_stack(other, world.mesh)
    fullshard.materialize(other, seed=3)
    for got, want in zip(model.parameters(), other.parameters()):
        assert torch.equal(full(got), full(want))
    torch.manual_seed(world.rank)
    model = shard_stack(Stack(), hybrid(2, 2), states=HFSDP, sync="broadcast")
    torch.manual_seed(0)
    assert_same_parameters(model, Stack())
    torch.manual_seed(world.rank)
    model = shard_stack(Stack(), hybrid(2, 2), states=HFSDP)
    with pytest.raises(fullshard.StateError, match="each rank has a shard of a different model"):
        model(batch(0))


class Hooked(torch.Tensor):
    """All-gathers itself, as quantized parameters do."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(Tensor),), None

    def fsdp_post_all_gather(self, outs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return None if out is not None else (outs[0], outs)


@ranks(4)
def test_what_stays_replicated(world: World) -> None:
    """Scalars, a parameter whose shards would be mostly padding, and one with all-gather hooks of its own."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.wide = nn.Parameter(torch.ones(1, 400_000))
            self.hooked = nn.Parameter(torch.arange(20.0).view(10, 2).as_subclass(Hooked))
            self.plain, self.unused = nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * self.scale * self.wide.sum() * (self.hooked @ torch.ones(2)).sum() * self.plain.sum()

    model, sharded = Mixed(), fully_shard(Mixed(), mesh=hybrid(2, 2), states=HFSDP)
    found = {name: parameter.placements for name, parameter in sharded.named_parameters()}
    assert found["scale"] == (Replicate(), Replicate()) and found["plain"] == (Shard(0),)
    assert found["wide"] == found["hooked"] == (Replicate(), Shard(0))
    for index in range(2):
        sharded.set_is_last_backward(index == 1)
        sharded(torch.full((2,), world.rank + 1.0)).backward()
        model(torch.full((2,), 2.5)).backward()
    assert sharded.unused.grad is None
    for name, parameter in sharded.named_parameters():
        if name == "unused":
            continue
        want = dict(model.named_parameters())[name].grad
        assert_near(full(parameter.grad).as_subclass(Tensor), want.as_subclass(Tensor), name)


# --- mistakes ---


@pytest.mark.proves("44c")
@ranks(4)
def test_mistakes_are_refused_before_anything_changes(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"needs a hybrid mesh of two dims \(replicate, shard\), got one of one dim of size 4"):
        fully_shard(model, mesh=world.mesh, states=HFSDP)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=(*BOTH, "tp"))
    with pytest.raises(ValueError, match="cannot be combined with dp_mesh_dims="):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("shard", "replicate"), states=HFSDP)
    assert type(model[0].weight) is nn.Parameter
    fully_shard(model, mesh=hybrid(2, 2), states=HFSDP)
    for other in (ZERO3, ZERO2):
        with pytest.raises(ValueError, match="the shards that the optimizer holds cannot change"):
            model.set_states(other)
    with pytest.raises(ValueError, match=r"Expected states with optimizer=\('shard',\)"):
        fully_shard(nn.Linear(8, 8), mesh=hybrid(2, 2)).set_states(HFSDP)
    model.set_states(EACH_TIME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_states(HFSDP)
    model.set_is_last_backward(False)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(
        StateError, match=r"set_requires_all_reduce\(True\) before the last backward of the step, and set_is_last"
    ):
        optimizer.step()
    with pytest.raises(StateError, match=r"set_states\(\) came while gradients"):
        model.set_states(EACH_TIME)
    model.zero_grad()
    model.set_is_last_backward(True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    late = fully_shard(nn.Linear(8, 8, bias=False), mesh=hybrid(2, 2), states=HFSDP)
    shard = late.weight._local_tensor
    shard.fsdp_pre_all_gather = MethodType(lambda self, mesh: ((self,), None), shard)
    shard.fsdp_post_all_gather = MethodType(lambda self, outs, metadata, dtype, *, out=None: (outs[0], outs), shard)
    with pytest.raises(StateError, match=r"Expected the tensor subclass of parameter 'weight' of unit .* before fully_shard"):
        late(torch.ones(2, 8))
    dist.barrier()


class Weighted(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return sum(weight.sum() for weight in self.weights) * x.sum()


@ranks(4)
def test_parameters_without_rows_on_an_inner_rank_are_reduced_in_both_hops(world: World) -> None:
    """Sharded along another dim than 0, the second hop raised on the ranks without rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for shapes in ([(5, 1)], [(5, 1), (5,)], [(1, 8), (5, 1), (5,)]):
        model = Weighted(shapes)
        fullshard.fully_shard(
            model, mesh=mesh, states=HFSDP, shard_placement_fn=lambda parameter: Shard(1 if parameter.dim() > 1 else 0)
        )
        model(torch.ones(2)).backward()
        for parameter in model.parameters():
            assert torch.equal(full(parameter.grad), torch.full(parameter.shape, 2.0))
