"""State dicts, loading, moving and casting: values are never lost, and parameters keep their identity."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, full, shard_stack, share_grads, square
from torch import nn
from torch.distributed.checkpoint.staging import StateDictStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import MixedPrecisionPolicy, StateError, fully_shard


@ranks(1, 3)
def test_state_dict_always_gives_sharded_dtensors(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, reshard_after_forward=False)
    names = list(Stack().state_dict())

    def check() -> None:
        state = model.state_dict()
        assert list(state) == names
        assert all(isinstance(value, DTensor) and value.placements[0].is_shard(0) for value in state.values())
        assert [name for name, _ in model.named_parameters()] == names

    check()
    loss = square(model(batch(0)))
    check()  # between forward and backward, parameters still gathered
    loss.backward()
    check()
    with torch.no_grad():
        model(batch(0))
    check()
    model.blocks[0].unshard()
    check()
    square(model(batch(0))).backward()


@ranks(2)
def test_state_dict_inside_forward_is_refused_by_name(world: World) -> None:
    class Asking(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state_dict()
            return super().forward(x)

    model = shard_stack(Asking(), world.mesh)
    with pytest.raises(StateError, match="inside the forward of unit 'FSDPAsking|inside the forward of unit 'Asking"):
        model(batch(0))
    model.state_dict()


@pytest.mark.proves("2a")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["plain", "dtensor", "parameters"])
@ranks(1, 2, 3)
def test_full_and_sharded_tensors_load(world: World, kind: str, assign: bool) -> None:
    source = Stack()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    if kind == "dtensor":
        state = shard_stack(copy.deepcopy(source), world.mesh).state_dict()
    else:
        state = dict(source.named_parameters()) if kind == "parameters" else source.state_dict()
    model = shard_stack(Stack(), world.mesh)
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square(model(world.mine(batch(0)))).backward()
    optimizer.zero_grad()
    model.load_state_dict(state, assign=assign)
    assert all(a is b for a, b in zip(before, model.parameters())), "optimizers built earlier stay valid"
    assert_same_parameters(model, source, 0.0)
    assert_near(model(batch(1)), source(batch(1)), "output")
    theirs = torch.optim.SGD(source.parameters(), lr=0.1)
    for m, o, x in ((model, optimizer, world.mine(batch(1))), (source, theirs, batch(1))):
        square(m(x)).backward()
        o.step()
    assert_same_parameters(model, source)


@pytest.mark.proves("2a")
@ranks(2)
def test_loading_reports_wrong_shapes_and_names(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    state = Stack().state_dict()
    state["head.weight"] = torch.zeros(4, 7)
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
        model.load_state_dict(state)
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head.weight"):
        model.load_state_dict(state)


@pytest.mark.proves("2a")
@pytest.mark.parametrize("way", ["to_empty", "assign"])
@ranks(1, 2, 3)
def test_a_model_built_on_meta_is_materialized_and_loaded(world: World, way: str) -> None:
    source = Stack()
    with torch.device("meta"):
        model = Stack()
    shard_stack(model, world.mesh)
    assert all(p.device.type == "meta" for p in model.parameters())
    with pytest.raises(StateError, match="still on the meta device. Before the first forward, call model.to_empty"):
        model(batch(0))
    if way == "to_empty":
        model.to_empty(device=world.mesh.device_type)
        model.load_state_dict(source.state_dict())
    else:
        model.load_state_dict(source.state_dict(), assign=True)
    assert_same_parameters(model, source, 0.0)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, source)]
    for step in range(2):
        square(model(world.mine(batch(step)))).backward()
        square(source(batch(step))).backward()
        assert_same_grads(model, source)
        share_grads(model, source)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, source)


@ranks(2)
def test_reset_parameters_after_to_empty_initialises_every_shard(world: World) -> None:
    with torch.device("meta"):
        model = Stack()
    shard_stack(model, world.mesh)
    model.to_empty(device=world.mesh.device_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.isfinite(full(p)).all() for p in model.parameters())
    square(model(world.mine(batch(0)))).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@ranks(1, 2)
def test_casting_after_training_started(world: World, dtype: torch.dtype) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    sharded.zero_grad()
    before = list(sharded.parameters())
    for m in (sharded, model):
        m.to(dtype)
    assert all(a is b for a, b in zip(before, sharded.parameters()))
    assert all(p.dtype == dtype and p.to_local().dtype == dtype for p in sharded.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(3):
        square(sharded(world.mine(batch(step)).to(dtype))).backward()
        square(model(batch(step).to(dtype))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@ranks(2)
def test_casting_only_a_part_of_a_unit_makes_a_group_of_its_own(world: World) -> None:
    model = Stack(1)
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for m in (sharded, model):
        m.blocks[0].down.double()
        m.blocks[0].down.register_forward_pre_hook(lambda module, args: args[0].double())
        m.blocks[0].down.register_forward_hook(lambda module, args, out: out.float())
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)
    assert len(sharded.blocks[0]._fullshard_unit.groups) == 2


@pytest.mark.proves("36a")
@ranks(2, 3)
def test_checkpoints_are_saved_and_loaded_by_dcp(world: World) -> None:
    folder = world.folder("dcp")
    model = shard_stack(Stack(), world.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        square(model(world.mine(batch(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    torch.manual_seed(1)
    other = shard_stack(Stack(), world.mesh)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    weights, moments = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=moments)
    for step in range(2, 4):
        for m, o in ((model, optimizer), (other, resumed)):
            square(m(world.mine(batch(step)))).backward()
            o.step()
            o.zero_grad()
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(full(a), full(b))


@ranks(2, 3)
def test_a_rank_whose_shards_are_empty_saves_asynchronously_as_the_others(world: World) -> None:
    """Of two rows, the third of three ranks has none. Its shards began somewhere within the flat one, where DTensor then says
    that it has memory; staging them failed ("invalid python storage") on that rank, and the others waited for ever.
    """
    folder = world.folder("async")
    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 2))
    fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square(model(world.mine(batch(0)))).backward()
    optimizer.step()
    assert all(parameter.data_ptr() == 0 for parameter in model.parameters() if not parameter.to_local().numel())
    weights, moments = get_state_dict(model, optimizer)
    for state in (weights, moments, {name: parameter.grad for name, parameter in model.named_parameters()}):
        StateDictStager().stage(state)
    dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder).result()
    other = fully_shard(nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 2)), mesh=world.mesh, sync="off")
    weights, moments = get_state_dict(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(full(a), full(b))


@pytest.mark.proves("4a")
@ranks(2)
def test_torchs_full_state_dict_option_gives_plain_full_tensors(world: World) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    source = Stack()
    model = shard_stack(copy.deepcopy(source), world.mesh)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in source.state_dict().items():
        assert torch.equal(state[name], value)


@ranks(2)
def test_unshard_and_reshard_by_hand(world: World) -> None:
    source = Stack()
    model = shard_stack(copy.deepcopy(source), world.mesh)
    block, reference = model.blocks[0], source.blocks[0]
    assert block.unshard() is None
    assert not isinstance(block.up.weight, DTensor) and torch.equal(block.up.weight, reference.up.weight)
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    block.reshard()
    handle = block.unshard(async_op=True)
    assert isinstance(block.up.weight, DTensor), "installed when waited for"
    handle.wait()
    handle.wait()
    assert torch.equal(block.up.weight, reference.up.weight)
    with fullshard.counting(model) as messages:
        square(model(world.mine(batch(0)))).backward()
    assert [m.kind for m in messages].count("all_gather") == 6, "one less: it was there already"
    square(source(batch(0))).backward()
    assert_same_grads(model, source)
    model.blocks[1].unshard(async_op=True)  # never waited for
    square(model(world.mine(batch(0)))).backward()


@ranks(2)
def test_slicing_a_sharded_sequential_gives_a_plain_one_and_repr_says_what_a_unit_is(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    fully_shard(model, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert type(model).__name__ == "FSDPSequential" and isinstance(model, (fullshard.FSDPModule, nn.Sequential))
    assert type(model[:2]) is nn.Sequential
    assert "unit of 4 parameters (30 elements) in 1 groups, rank" in repr(model)


@ranks(2)
def test_assigning_keeps_the_dtype_that_is_loaded_and_copying_does_not(world: World) -> None:
    source = Stack().double()
    for assign, dtype in ((True, torch.float64), (False, torch.float32)):
        model = shard_stack(Stack(), world.mesh)
        model(batch(0))
        model.load_state_dict(source.state_dict(), assign=assign)
        assert {p.dtype for p in model.parameters()} == {p.to_local().dtype for p in model.parameters()} == {dtype}
        assert_near(model(batch(0).to(dtype)), source(batch(0).double()), "output")


@pytest.mark.rotates(2)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@ranks(4)
def test_states_load_from_a_mesh_of_the_same_ranks_with_other_names(world: World, shape: tuple[int, ...], assign: bool) -> None:
    """DTensor copies nothing between them, and steps on momenta of the other mesh raised."""
    names = [("a", "b"), ("c", "d"), ("d", "c")]

    def made(number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[number][: len(shape)])
        torch.manual_seed(number)
        model = Stack(hidden=12)
        if len(shape) == 2:
            parallelize_module(model.blocks, mesh[names[number][1]], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
        model = fully_shard(model, mesh=mesh[names[number][0]])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        square(model(batch(0))).backward()
        optimizer.step()
        optimizer.zero_grad()

    first, *others = map(made, range(3))
    step(*first)
    for model, optimizer in others:
        step(model, optimizer)
        model.load_state_dict(first[0].state_dict(), assign=assign)
        optimizer.load_state_dict(copy.deepcopy(first[1].state_dict()))
    for pair in (first, *others):
        step(*pair)
    for model, _ in others:
        for (name, value), expected in zip(model.named_parameters(), first[0].parameters()):
            assert torch.equal(value.to_local(), expected.to_local()), name
