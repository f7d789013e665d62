"""Bad input raises before anything has changed, and says who, what was expected, what came, and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import expecttest
import numpy as np
import pytest
import torch
from exits import script
from harness import World, ranks
from models import Stack, batch, shard_stack, square
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fullshard import CommPolicy, MixedPrecisionPolicy, StateError, clip_grad_norm_, fully_shard
from fullshard.comm.base import SingleRank


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


def refused(expected: str, module: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    """`fully_shard` raises, and the module is as it was."""
    modules = module if isinstance(module, list) else [module]
    before = [(type(m), list(m.named_parameters()), len(m._forward_hooks)) for m in modules if isinstance(m, nn.Module)]
    with pytest.raises(error) as caught:
        fully_shard(module, **options)
    Texts().assertExpectedInline(str(caught.value), expected)
    after = [(type(m), list(m.named_parameters()), len(m._forward_hooks)) for m in modules if isinstance(m, nn.Module)]
    for (cls, parameters, hooks), (new_cls, new_parameters, new_hooks) in zip(before, after):
        assert cls is new_cls and hooks == new_hooks
        assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(parameters, new_parameters))


@pytest.mark.proves("30a")
@ranks(2)
def test_what_fully_shard_refuses(world: World) -> None:
    mesh = world.mesh
    refused(
        "fully_shard does not support containers that do not implement forward, got a ModuleList: no forward would unshard its parameters. Call fully_shard on each of its items.",
        nn.ModuleList([nn.Linear(2, 2)]),
        mesh=mesh,
    )
    refused(
        "ignored_params must hold the parameters themselves, got 'weight'. Get them from the model, as in ignored_params={model.get_parameter('head.weight')}.",
        nn.Linear(2, 2),
        mesh=mesh,
        ignored_params={"weight"},
    )
    refused(
        "ignored_params must hold the parameters themselves, got a Tensor. Get them from the model, as in ignored_params={model.get_parameter('head.weight')}.",
        nn.Linear(2, 2),
        mesh=mesh,
        ignored_params=[torch.ones(2)],
    )
    for value, kind in (("weight", "str"), (nn.Parameter(torch.ones(2)), "Parameter"), (3, "int")):
        refused(
            f"ignored_params must be a set of nn.Parameter or None, got {kind}.",
            nn.Linear(2, 2),
            mesh=mesh,
            ignored_params=value,
        )
    refused("fully_shard takes an nn.Module or a non-empty list of modules, got list.", [], mesh=mesh)
    refused("fully_shard takes an nn.Module or a non-empty list of modules, got int.", 3, mesh=mesh)
    refused("fully_shard takes a list of modules, got a str at index 1 of the list.", [nn.Linear(2, 2), "head"], mesh=mesh)
    unit = fully_shard(nn.Linear(2, 2), mesh=mesh)
    refused("fully_shard was already called on this FSDPLinear. Call it once per module.", unit, mesh=mesh)
    refused("Expected a DeviceMesh or None as mesh, got int. Build a mesh with init_device_mesh().", nn.Linear(2, 2), mesh=4)
    refused(
        "Expected a mesh of one axis (shard) or two axes (replicate, shard), got 3 axes of sizes (1, 1, 2). Select axes with mesh['name'], or name them with dp_mesh_dims=.",
        nn.Linear(2, 2),
        mesh=init_device_mesh("cpu", (1, 1, 2)),
    )
    refused(
        "reshard_after_forward must be True, False, an int or None, got 'no'.",
        nn.Linear(2, 2),
        mesh=mesh,
        reshard_after_forward="no",
    )
    refused(
        "reshard_after_forward=3 must divide the 2 ranks that parameters are sharded over. Take one of [1, 2].",
        nn.Linear(2, 2),
        mesh=mesh,
        reshard_after_forward=3,
    )
    refused(
        "Expected shard_placement_fn to return a dim of parameter 'weight' of shape (2, 2), -2 to 1, got dim 2.",
        nn.Linear(2, 2),
        mesh=mesh,
        shard_placement_fn=lambda parameter: Shard(2),
    )
    refused(
        "shard_placement_fn must return None, Shard(dim) or a ShardPlacementResult, got 1 for parameter 'weight'.",
        nn.Linear(2, 2),
        mesh=mesh,
        shard_placement_fn=lambda parameter: 1,
    )
    refused("offload_policy must be an OffloadPolicy, got bool.", nn.Linear(2, 2), mesh=mesh, offload_policy=True)
    refused("mp_policy must be a MixedPrecisionPolicy, got str.", nn.Linear(2, 2), mesh=mesh, mp_policy="bf16")
    parallel = nn.Linear(2, 2)
    parallel.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    with pytest.raises(
        ValueError, match="parameter 'weight' is a DTensor on .* which cannot be combined with .* Take both from"
    ):
        fully_shard(parallel, mesh=mesh)
    refused(
        "Parameter 'weight' cannot be sharded: it is not initialized yet. Run one forward of the lazy module, then call fully_shard.",
        nn.LazyLinear(2),
        mesh=mesh,
    )
    sparse = nn.Module()
    sparse.forward = lambda x: x
    sparse.table = nn.Parameter(torch.eye(3, device="cpu").to_sparse())
    refused(
        "Parameter 'table' cannot be sharded: it must be a dense torch.Tensor, got Tensor with layout torch.sparse_coo.",
        sparse,
        mesh=mesh,
    )


@pytest.mark.proves("7a")
@ranks(2)
def test_a_tie_between_units_that_are_not_nested_is_refused_by_name(world: World) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    fully_shard(model["embed"], mesh=world.mesh)
    weight = model["embed"].weight
    with pytest.raises(
        ValueError, match=r"'weight' of 'Linear', .* tied to 'weight' of unit 'Embedding'.*fully_shard\(\[a, b\]\)"
    ):
        fully_shard(model["head"], mesh=world.mesh)
    assert model["embed"].weight is weight
    assert type(model["head"]) is nn.Linear
    model["embed"](torch.tensor([1])).sum().backward()


@ranks(2)
def test_a_rank_that_is_not_on_the_mesh(world: World) -> None:
    mesh = DeviceMesh("cpu", [1])
    if world.rank == 0:
        refused(
            "Rank 0 is not on the mesh of ranks [1]. Call fully_shard only on the ranks of the mesh.",
            nn.Linear(2, 2),
            mesh=mesh,
        )


def test_policies_refuse_wrong_values() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: MixedPrecisionPolicy(param_dtype=torch.int32),
            "MixedPrecisionPolicy.param_dtype must be a floating-point torch.dtype or None, got torch.int32.",
        ),
        (
            lambda: MixedPrecisionPolicy(reduce_dtype="bf16"),
            "MixedPrecisionPolicy.reduce_dtype must be a floating-point torch.dtype or None, got 'bf16'.",
        ),
        (
            lambda: MixedPrecisionPolicy(accumulate_dtype=torch.int32),
            "MixedPrecisionPolicy.accumulate_dtype must be a floating-point torch.dtype or None, got torch.int32.",
        ),
        (lambda: CommPolicy(direct_min_bytes=-1), "CommPolicy.direct_min_bytes must be None or a number >= 0, got -1."),
        (lambda: CommPolicy(reductions_in_flight=0), "CommPolicy.reductions_in_flight must be an int of at least 1, got 0."),
    ]
    for make, text in cases:
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == text


@ranks(2)
def test_calls_at_a_wrong_moment(world: World) -> None:
    class Resharding(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.reshard()
            return super().forward(x)

    model = shard_stack(Resharding(), world.mesh)
    with pytest.raises(StateError, match=r"reshard\(\) was called inside the forward of unit 'Resharding'"):
        model(batch(0))

    class Moving(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.double()
            return super().forward(x)

    model = shard_stack(Moving(), world.mesh)
    with pytest.raises(StateError, match="moving or casting was called inside the forward of unit 'Moving'"):
        model(batch(0))
    model = shard_stack(Stack(), world.mesh)
    loss = square(model(batch(0)))
    with pytest.raises(StateError, match="Unit 'blocks.0' cannot change dtype or device between its forward and its backward"):
        model.blocks[0].double()
    del loss


@pytest.mark.proves("22a")
@ranks(2)
def test_an_optimizer_at_a_wrong_moment(world: World) -> None:
    steps: list[torch.optim.Optimizer] = []

    class Stepping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps[0].step()
            return super().forward(x)

    model = shard_stack(Stepping(), world.mesh)
    steps.append(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StateError, match=r"optimizer.step\(\) was called inside the forward of unit 'Stepping'"):
        model(batch(0))
    model = shard_stack(Stack(), world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.accumulate():
        square(model(batch(0))).backward()
    with pytest.raises(StateError, match=r"while the gradient of 'inp.weight' in unit 'Stack' is only kept on each rank"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    with model.accumulate():
        square(model(batch(0))).backward()
    model.blocks[0].requires_grad_(False)
    square(model(batch(0))).backward()
    with pytest.raises(
        StateError, match=r"only kept on each rank\. Its parameters were frozen since, .* or call model.zero_grad"
    ):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    model.blocks[0].requires_grad_(True)
    model.set_is_last_backward(False)
    square(model(batch(0))).backward()
    with pytest.raises(StateError, match=r"before the gradients of unit 'Stack' arrived\. Call set_is_last_backward\(True\)"):
        optimizer.step()
    model.set_is_last_backward(True)
    square(model(batch(0))).backward()
    optimizer.step()


@ranks(2)
def test_a_sparse_gradient_is_refused_by_name(world: World) -> None:
    model = fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), mesh=world.mesh)
    with pytest.raises(
        StateError, match=r"dense gradient of parameter '0.weight' of unit 'Sequential', got .* torch.sparse_coo"
    ):
        model(torch.tensor([[1, 2]])).sum().backward()
    model[0].sparse = False
    with pytest.warns(UserWarning, match="The last backward raised"):
        model(torch.tensor([[1, 2]])).sum().backward()
    assert model[0].weight.grad is not None


@ranks(2)
def test_the_default_mesh_is_all_ranks(world: World) -> None:
    model = fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh.size() == world.size and model.weight.to_local().shape == (2, 4)


@ranks(1)
def test_setters_refuse_what_is_no_flag_or_no_number(world: World) -> None:
    """`set_requires_gradient_sync("no")` turned communication on, and `set_reduce_scatter_max_input_buffers(True)` meant one."""
    model = shard_stack(Stack(1), world.mesh)
    unit = model._fullshard_unit
    before = unit.options
    for name, argument in (
        ("set_is_last_backward", "is_last_backward"),
        ("set_requires_gradient_sync", "requires_gradient_sync"),
        ("set_reshard_after_backward", "reshard_after_backward"),
        ("set_requires_all_reduce", "requires_all_reduce"),
        ("set_force_sum_reduction_for_comms", "enable"),
        ("set_reduce_scatter_unused_params", "reduce_scatter_unused_params"),
        ("set_separate_reduce_scatter_group", "enable"),
        ("set_unshard_in_backward", "unshard_in_backward"),
        ("set_allocate_memory_from_process_group_for_comm", "enable"),
        ("_set_unshard_async_op", "async_op"),
        ("unshard", "async_op"),
    ):
        for wrong in (None, "no", [], torch.ones(2), np.ones(2)):
            with pytest.raises(ValueError, match=f"^{argument} must be True or False, got "):
                getattr(model, name)(wrong)
    for name, value in (
        ("set_requires_gradient_sync", False),
        ("set_reshard_after_backward", False),
        ("set_reshard_after_forward", True),
        ("set_requires_all_reduce", False),
        ("set_gradient_divide_factor", 2.0),
        ("set_reduce_scatter_max_input_buffers", 2),
        ("set_separate_reduce_scatter_group", True),
    ):
        with pytest.raises(ValueError, match="^recurse must be True or False, got 'no'[.]$"):
            getattr(model, name)(value, recurse="no")
    for wrong in (True, 0, "2", None, 1.5):
        with pytest.raises(ValueError, match=f"^max_input_buffers must be an int of at least 1, got {wrong!r}[.]$"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    for wrong in (True, 0, "2", float("inf")):
        with pytest.raises(ValueError, match=f"^set_gradient_divide_factor takes a number > 0 or None, got {wrong!r}[.]$"):
            model.set_gradient_divide_factor(wrong)
    for setter in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        with pytest.raises(ValueError, match="^Expected a list of modules that fully_shard was called on, got FSDPBlock[.]$"):
            setter(model.blocks[0])
    with pytest.raises(ValueError, match="^set_symm_mem_for_comm takes the name of a backend, got 3[.]$"):
        model.set_symm_mem_for_comm(3)
    assert unit.options == before


@pytest.mark.parametrize("kind", ["bool", "int", "numpy.bool_", "array", "tensor", "bool tensor"])
@ranks(1)
def test_setters_take_the_flags_that_torch_takes(world: World, kind: str) -> None:
    make = {
        "bool": bool,
        "int": int,
        "numpy.bool_": np.bool_,
        "array": lambda flag: np.array([flag]),
        "tensor": lambda flag: torch.tensor([2.0 * flag]),
        "bool tensor": torch.tensor,
    }[kind]
    model = shard_stack(Stack(1), world.mesh)
    for flag in (False, True):
        model.set_requires_gradient_sync(make(flag), recurse=make(True))
        assert model._fullshard_unit.options.sync_gradients is flag
        assert model.blocks[0]._fullshard_unit.options.sync_gradients is flag
        assert (model.unshard(async_op=make(flag)) is None) is not flag
        assert MixedPrecisionPolicy(cast_forward_inputs=make(flag)).cast_forward_inputs is flag
        model.reshard()


@ranks(2)
def test_a_size_that_does_not_fit_one_unit_changes_none(world: World) -> None:
    """`set_reshard_after_forward` had changed the units before the one that could not be changed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=world.mesh)
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2, 1)))
    fully_shard(model, mesh=world.mesh)
    before = [unit._fullshard_unit.options for unit in model.modules()]
    with pytest.raises(ValueError, match="reshard_after_forward=2 must divide the 1 ranks"):
        model.set_reshard_after_forward(2)
    assert [unit._fullshard_unit.options for unit in model.modules()] == before


def test_without_a_process_group_fully_shard_says_how_to_start() -> None:
    """It showed what torch's rendezvous lacks: "environment variable RANK expected, but not set"."""
    ended = script("import fullshard, torch; fullshard.fully_shard(torch.nn.Linear(2, 2))")
    assert ended.stderr.splitlines()[-1] == (
        "ValueError: The default process group is not initialized, and the environment does not configure one (RANK, WORLD_SIZE, "
        "MASTER_ADDR, MASTER_PORT are not set). Start the program with `torchrun --nproc-per-node N program.py`, or call "
        "torch.distributed.init_process_group() first."
    )


@ranks(2)
def test_collectives_of_another_size_are_refused_and_nothing_has_changed(world: World) -> None:
    refused(
        "Expected CommPolicy.collectives to return the collectives of rank RANK of 2, as in the mesh, got rank 0 of 1.".replace(
            "RANK", str(world.rank)
        ),
        model := nn.Linear(4, 4),
        mesh=world.mesh,
        comm_policy=CommPolicy(collectives=lambda group: SingleRank()),
    )
    fully_shard(model, mesh=world.mesh)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.proves("7a")
@ranks(2)
def test_untying_after_sharding_is_refused_by_name(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=world.mesh)
    kept = model[0].weight
    model[1].weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    with pytest.raises(StateError, match=r"Expected parameter '0.weight' of unit .* as fully_shard"):
        model(torch.ones(2, 4))
    assert kept.requires_grad
    model[1].weight = kept
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.proves("13a")
@ranks(2)
def test_clipping_refuses_gradients_that_are_not_summed(world: World) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), world.mesh, [Replicate()]))
    parameter.grad = distribute_tensor(torch.ones(4), world.mesh, [Replicate()])
    assert clip_grad_norm_([parameter], 1.0) == 2.0, "each element counts once"
    parameter.grad = DTensor.from_local(torch.ones(4), world.mesh, [Partial()])
    with pytest.raises(ValueError, match="which is not reduced yet"):
        clip_grad_norm_([parameter], 1.0)


@pytest.mark.parametrize("aliased", [False, True])
@ranks(2)
def test_gradients_that_the_caller_exchanged_are_added_to_where_they_are_now(world: World, aliased: bool) -> None:
    """Those of a unit are views of one tensor, to which the next ones are added at once: in their old order, silently."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fully_shard(copy.deepcopy(plain), mesh=world.mesh)
    batch = torch.randn(2, 4)
    for module in (plain, model):
        module(batch).square().sum().backward()
        first, second = module[0].weight, module[1].weight
        first.grad, second.grad = second.grad, second.grad if aliased else first.grad
        module(batch).square().sum().backward()
    for expected, parameter in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
