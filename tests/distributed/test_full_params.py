"""Full parameters for a while, copies, pickles, plain modules again, and models that begin on meta."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, full, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fullshard
from fullshard import MixedPrecisionPolicy, StateError, fully_shard


def step(world: World, *models: nn.Module) -> None:
    """One optimizer step of a sharded model and of its plain twin."""
    for model, x in zip(models, (world.mine(batch(3)), batch(3))):
        square(model(x)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()


# --- full_params -------------------------------------------------------------------------------------------------------


@pytest.mark.proves("19a")
@ranks(1, 2, 3)
def test_full_parameters_can_be_read_and_written(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    with fullshard.full_params(sharded) as inside:
        assert inside is sharded
        for (name, p), (_, q) in zip(sharded.named_parameters(), model.named_parameters()):
            assert not isinstance(p, DTensor) and torch.equal(p, q), name
        with torch.no_grad():
            for p in (*sharded.parameters(), *model.parameters()):
                p.add_(1.0)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    assert_same_parameters(sharded, model)
    step(world, sharded, model)
    assert_same_parameters(sharded, model)
    with fullshard.full_params(sharded, write=False), torch.no_grad():
        sharded.inp.weight.zero_()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("25a")
@ranks(2, 3)
def test_full_gradients_can_be_read_and_written(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    with fullshard.full_params(sharded, grads=True):
        for p, q in zip(sharded.parameters(), model.parameters()):
            assert_near(p.grad, q.grad, "grad")
            p.grad.mul_(2.0)
            q.grad.mul_(2.0)
    assert_same_grads(sharded, model)


@ranks(2, 3)
def test_full_parameters_on_one_rank_of_one_unit_in_another_dtype(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with (
        pytest.raises(ValueError, match=r"full_params\(rank0_only=True\) cannot write"),
        fullshard.full_params(sharded, rank0_only=True),
    ):
        pass
    with fullshard.full_params(sharded, write=False, rank0_only=True, recurse=False, dtype=torch.float64):
        assert isinstance(sharded.inp.weight, DTensor) == (world.rank != 0)
        assert isinstance(sharded.blocks[0].up.weight, DTensor), "not recursive"
        if world.rank == 0:
            assert sharded.inp.weight.dtype == torch.float64
            assert torch.equal(sharded.inp.weight, model.inp.weight.double()), "the storage dtype's digits, not bfloat16's"
    assert_same_parameters(sharded, model)


@ranks(2)
def test_what_a_block_of_full_parameters_would_lose_is_an_error(world: World) -> None:
    """Tensors of other shapes were cut off, or written in part."""
    sharded = shard_stack(Stack(), world.mesh)
    before = [full(p) for p in sharded.parameters()]
    name, weight = next(iter(sharded.named_parameters()))
    rows, *columns = weight.shape
    for shape in ((rows + 1, *columns), (rows - 1, *columns), (rows, *columns, 1)):
        with pytest.raises(StateError, match=f"Expected parameter '.*{name.rpartition('.')[2]}' to have its shape"):
            with fullshard.full_params(sharded):
                dict(sharded.named_parameters())[name].data = torch.ones(shape)
        assert all(torch.equal(full(p), one) for p, one in zip(sharded.parameters(), before))


@ranks(2)
def test_attributes_loads_and_errors_inside_of_full_parameters(world: World) -> None:
    """Attributes of parameters vanished in both directions; an exception on one rank left rows of different writes."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    sharded.inp.weight.before, sharded.inp.bias.gone = 1, 2
    with fullshard.full_params(sharded):
        assert sharded.inp.weight.before == 1
        sharded.inp.weight.inside = 3
        del sharded.inp.bias.gone
    assert (sharded.inp.weight.before, sharded.inp.weight.inside) == (1, 3) and not hasattr(sharded.inp.bias, "gone")
    other = Stack()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    with fullshard.full_params(sharded):
        sharded.load_state_dict(other.state_dict())
    assert_same_parameters(sharded, other)
    with pytest.raises(KeyError) if world.rank == 0 else nullcontext(), fullshard.full_params(sharded), torch.no_grad():
        sharded.inp.bias.fill_(5.0)
        if world.rank == 0:
            raise KeyError
    assert bool((full(sharded.inp.bias) == 5.0).all())


@ranks(2)
def test_full_parameters_are_refused_inside_a_forward_and_restored_after_an_error(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)

    def peek(*_: object) -> None:
        with fullshard.full_params(sharded):
            pass

    handle = sharded.head.register_forward_hook(peek)
    with pytest.raises(StateError, match=r"full_params\(\) was called inside the forward of unit"):
        sharded(batch(0))
    handle.remove()
    with pytest.raises(KeyError), fullshard.full_params(sharded):
        raise KeyError
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    square(sharded(batch(0))).backward()


# --- gathered ----------------------------------------------------------------------------------------------------------


@pytest.mark.proves("3b")
@ranks(1, 2, 3)
def test_gathered_parameters_are_differentiable_gathered_once_and_reduced_once(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, reshard_after_forward=True)
    for _ in range(2):
        with fullshard.counting(sharded) as messages:
            with fullshard.gathered(sharded.blocks[1]) as params:
                penalty = params["up.weight"].square().sum() + params["down.weight"].abs().sum() * params["up.bias"].sum()
            (square(sharded(world.mine(batch(0)))) + 0.1 * penalty).backward()
        counts = Counter(message.kind for message in messages if message.kind != "talk")
        assert counts == {"all_gather": 2 * 4 + 1, "reduce_scatter": 4, "heartbeat": 1}
        block = model.blocks[1]
        penalty = block.up.weight.square().sum() + block.down.weight.abs().sum() * block.up.bias.sum()
        (square(model(batch(0))) + 0.1 * penalty).backward()
        assert_same_grads(sharded, model)


@ranks(2)
def test_gathered_parameters_alone_and_without_grad(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    with fullshard.gathered(sharded, recurse=True, grad=False) as params:
        assert set(params) == {name for name, _ in model.named_parameters()}
        assert not any(p.requires_grad for p in params.values())
    with fullshard.counting(sharded) as messages, fullshard.gathered(sharded.blocks[0]) as params:
        params["up.weight"].sum().backward()
    assert Counter(m.kind for m in messages) == {"all_gather": 1, "reduce_scatter": 1, "heartbeat": 1}
    assert torch.equal(full(sharded.blocks[0].up.weight.grad), torch.ones_like(model.blocks[0].up.weight))
    assert sharded.blocks[0].up.bias.grad is None, "used nowhere"


# --- resident ----------------------------------------------------------------------------------------------------------


@pytest.mark.proves("23a")
@ranks(1, 2)
def test_resident_units_are_gathered_once_for_many_forwards(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    with torch.no_grad(), sharded.resident(), fullshard.counting(sharded) as messages:
        for _ in range(5):
            assert_near(sharded(batch(0)), model(batch(0)), "output")
    assert all(one.kind == "talk" for one in messages), "gathered before, and not again"
    assert all(unit._fullshard_unit.residency.value == "sharded" for unit in (sharded, *sharded.blocks))
    with sharded.resident():
        step(world, sharded, model)
        with fullshard.counting(sharded) as messages:
            assert_near(sharded(batch(0)), model(batch(0)), "output after a step")
        assert len(messages) == 4, "written meanwhile: gathered again"
    step(world, sharded, model)
    assert_same_parameters(sharded, model)


# --- copies and pickles ------------------------------------------------------------------------------------------------


@pytest.mark.proves("27a")
@ranks(1, 2, 3)
def test_a_deep_copy_is_a_sharded_model_of_its_own(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    step(world, sharded, model)
    twin = copy.deepcopy(sharded)
    assert type(twin) is type(sharded) and isinstance(twin.blocks[0], fullshard.FSDPModule)
    assert not set(map(id, twin.parameters())) & set(map(id, sharded.parameters()))
    assert_same_parameters(twin, model)
    before = {name: full(p).clone() for name, p in sharded.named_parameters()}
    step(world, twin, model)
    assert_same_parameters(twin, model)
    for name, p in sharded.named_parameters():
        assert torch.equal(full(p), before[name]), "the original did not move"
    with fullshard.counting(twin) as messages:
        square(twin(world.mine(batch(0)))).backward()
    assert Counter(m.kind for m in messages) == {"all_gather": 7, "reduce_scatter": 4, "heartbeat": 1}
    assert len(twin._forward_pre_hooks) == len(sharded._forward_pre_hooks) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)
        self.a.weight.tag = "kept"
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.scale


@ranks(2)
def test_copies_keep_ties_attributes_buffers_and_frozen_parameters(world: World) -> None:
    sharded = fully_shard(Tied(), mesh=world.mesh)
    for twin in (copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        assert twin.a.weight is twin.b.weight and twin.a.weight.tag == "kept"
        assert not twin.a.bias.requires_grad and twin.b.bias.requires_grad and twin.scale == 2.0
        assert_near(twin(batch(0)), sharded(batch(0)), "output")


@pytest.mark.proves("27a")
@ranks(2)
def test_a_pickled_model_has_this_ranks_shards_and_trains_on(world: World) -> None:
    model = Stack()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({"mesh": world.mesh}, {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}):
        sharded = shard_stack(copy.deepcopy(model), **options)
        file = io.BytesIO()
        torch.save(sharded, file)
        assert file.tell() < 60_000
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        reference = copy.deepcopy(model)
        step(world, loaded, reference)
        assert_same_parameters(loaded, reference)
        assert {p.placements for p in loaded.parameters()} == {p.placements for p in sharded.parameters()}


@ranks(2)
def test_a_unit_that_reaches_outside_of_what_is_copied_is_refused(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]], mesh=world.mesh)
    with pytest.raises(StateError, match="also manages modules outside of the FSDPLinear that is copied or pickled"):
        copy.deepcopy(model[0])
    twin = fully_shard(copy.deepcopy(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))), mesh=world.mesh)
    assert_near(copy.deepcopy(twin)(batch(0, 4)), twin(batch(0, 4)), "output")


# --- plain again -------------------------------------------------------------------------------------------------------


@pytest.mark.proves("27a")
@ranks(1, 2, 3)
def test_undo_gives_plain_modules_that_train_on(world: World) -> None:
    model = Stack()
    sharded = copy.deepcopy(model)
    sharded.blocks[1].up.weight.tag = 7
    shard_stack(sharded, world.mesh)
    step(world, sharded, model)
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert fullshard.undo(sharded) is sharded
    assert type(sharded) is Stack and not any(isinstance(m, fullshard.FSDPModule) for m in sharded.modules())
    assert not any(isinstance(p, DTensor) for p in sharded.parameters()) and sharded.blocks[1].up.weight.tag == 7
    assert not sharded._forward_pre_hooks and not sharded._state_dict_pre_hooks and not sharded._load_state_dict_post_hooks
    assert_same_parameters(sharded, model)
    assert_same_grads(sharded, model)
    square(sharded(batch(1))).backward()
    square(model(batch(1))).backward()
    assert_same_grads(sharded, model)
    again = shard_stack(sharded, world.mesh)
    assert_same_parameters(again, model)


# --- meta --------------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(7).float(), persistent=False)
        self.register_buffer("positions", torch.arange(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frequencies.cos()


class WithBuffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.stats = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stats(self.rotary(self.inp(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def initialise(module: nn.Module) -> None:
    if isinstance(module, Rotary):
        module.frequencies.copy_(torch.arange(7))
        module.positions.copy_(torch.arange(7))
    else:
        module.reset_parameters()


_WEIGHTS: dict[str, Tensor] = {}


@pytest.mark.proves("16c")
@pytest.mark.parametrize("kind", ["shard", "uneven last dim", "offload"])
@ranks(1, 2, 3, 4)
def test_materialize_gives_the_same_full_weights_for_every_number_of_ranks(world: World, kind: str) -> None:
    options = {
        "shard": {},
        "uneven last dim": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        "offload": {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)},
    }[kind]
    with torch.device("meta"):
        model = WithBuffers()
    shard_stack(model, world.mesh, **options)
    torch.manual_seed(world.rank)  # the ranks disagree: rank 0 decides
    before = torch.get_rng_state()
    torch.manual_seed(0)
    fullshard.materialize(model, init=initialise)
    torch.set_rng_state(before)
    with torch.device("meta"):
        alone = WithBuffers()
    expected = plainly(alone)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name]), name
    assert torch.equal(model.rotary.frequencies, torch.arange(7).float())
    square(model(world.mine(batch(0)))).backward()
    assert all(p.grad is not None for p in model.parameters())


def plainly(model: nn.Module) -> dict[str, Tensor]:
    """What one rank alone gets from the same seed."""
    torch.manual_seed(0)
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64))
    model.to_empty(device="cpu")
    torch.manual_seed(seed)

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if next(module.parameters(recurse=False), None) is not None or next(module.buffers(recurse=False), None) is not None:
            initialise(module)

    visit(model)
    return model.state_dict()


@pytest.mark.proves("15a")
@ranks(2)
def test_materialize_names_what_nobody_initialises(world: World) -> None:
    with torch.device("meta"):
        model = WithBuffers()
    shard_stack(model, world.mesh)
    with pytest.raises(StateError, match=r"'rotary' \(Rotary\) has parameters or buffers on meta and no reset_parameters"):
        fullshard.materialize(model)

    def forgetful(module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.frequencies.copy_(torch.arange(7))
        else:
            module.reset_parameters()

    with torch.device("meta"):
        model = WithBuffers()
    shard_stack(model, world.mesh)
    with pytest.raises(StateError, match=r"buffer 'rotary.positions' of Rotary got no values from init"):
        fullshard.materialize(model, init=forgetful)


@ranks(1)
def test_buffers_of_equal_modules_are_told_apart(world: World) -> None:
    """Their texts are equal, and the last one stood for all of them."""
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    fully_shard(model, mesh=world.mesh)
    model.to_empty(device=world.mesh.device_type)
    model[1].reset_parameters()
    nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)
    with pytest.raises(StateError, match=r"to_empty\(\) allocated buffer 'running_mean' of BatchNorm1d, .*nothing has written"):
        model(torch.ones(2, 4))


@pytest.mark.proves("15a")
@ranks(2)
def test_to_empty_never_leaves_garbage_without_a_word(world: World) -> None:
    """Elsewhere a non-persistent buffer that `to_empty` allocated is read as whatever lay in that memory."""
    with torch.device("meta"):
        model = WithBuffers()
    shard_stack(model, world.mesh)
    model.to_empty(device=world.mesh.device_type)
    with pytest.raises(
        StateError,
        match=r"Unit 'WithBuffers' has uninitialized memory: to_empty\(\) allocated parameter 'inp.weight', .*, and nothing has written them. Call reset_p",
    ):
        model(batch(0))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with pytest.warns(
        UserWarning,
        match=r"to_empty\(\) allocated buffer 'frequencies' of Rotary, buffer 'positions' of Rotary, and nothing has written them .*\. Compute them again",
    ):
        assert model(batch(0)).isnan().all()
    initialise(model.rotary)
    model.stats.reset_parameters()
    square(model(batch(0))).backward()


@ranks(2)
def test_memory_of_each_module_of_a_list_is_found_unwritten(world: World) -> None:
    """`to_empty()` allocates for one module after the other; the marks of the last one hid those of the others."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]], mesh=world.mesh)
    model.to_empty(device=world.mesh.device_type)
    for index in (1, 0):  # the latest marks first
        with pytest.raises(StateError, match=rf"to_empty\(\) allocated parameter '{index}.weight'"):
            model(torch.ones(1, 4))
        model[index].reset_parameters()
    model(torch.ones(1, 4))


@ranks(2)
def test_unshard_and_join_inside_full_params_are_refused_and_change_nothing(world: World) -> None:
    """Both installed parameters of their own beside the plain ones, and what was written went to the wrong ones."""
    model = shard_stack(Stack(), world.mesh)
    with fullshard.full_params(model, write=True):
        for doing, call in (("unshard", model.unshard), ("join", model.join)):
            with pytest.raises(StateError, match=rf"{doing}\(\) was called inside full_params\(\) of unit 'Stack'"):
                call()
        with torch.no_grad():
            next(model.parameters()).fill_(7.0)
    assert (next(model.parameters()).full_tensor() == 7.0).all()
    square(model(batch(0))).backward()
