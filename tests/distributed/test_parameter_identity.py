"""What hangs on a caller's parameter moves with it: attributes, hooks, gradients, ties, and the optimizer that holds it."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, full, shard_stack, share_grads, square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import HFSDP, CPUOffloadPolicy, MixedPrecisionPolicy, StateError, clip_grad_norm_, fully_shard, undo
from fullshard._torch import HONOURS_SUBCLASSES


@pytest.mark.proves("19b")
@ranks(2)
def test_attributes_gradients_and_requires_grad_carry_over(world: World) -> None:
    model = nn.Linear(5, 3)
    model.weight.my_tag = "kept"
    model.bias.requires_grad_(False)
    model.weight.grad = torch.arange(15.0).view(3, 5)
    fully_shard(model, mesh=world.mesh)
    assert model.weight.my_tag == "kept"
    assert model.weight.requires_grad and not model.bias.requires_grad
    assert torch.equal(full(model.weight.grad), torch.arange(15.0).view(3, 5))


@pytest.mark.proves("19b")
@pytest.mark.parametrize("when", ["before", "after"])
@ranks(1, 2)
def test_hooks_on_parameters_fire_with_the_reduced_gradient(world: World, when: str) -> None:
    model = Stack(1)
    sharded = copy.deepcopy(model)
    seen: list[Any] = []

    def register(m: nn.Module) -> Any:
        handle = m.head.weight.register_hook(lambda grad: grad * 2)
        m.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        return handle

    if when == "before":
        handles = [register(sharded)]
        shard_stack(sharded, world.mesh)
    else:
        shard_stack(sharded, world.mesh)
        handles = [register(sharded)]
    handles.append(register(model))
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)
    assert seen == [torch.Size([3, 7])] * 2
    for handle in handles:
        handle.remove()
    for m, x in ((sharded, world.mine(batch(1))), (model, batch(1))):
        m.zero_grad()
        square(m(x)).backward()
    assert_same_grads(sharded, model)


@pytest.mark.proves("41a")
@ranks(2)
def test_an_optimizer_step_inside_backward(world: World) -> None:
    def step_in_backward(m: nn.Module) -> None:
        for parameter in m.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(p: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            parameter.register_post_accumulate_grad_hook(step)

    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    step_in_backward(sharded)
    step_in_backward(model)
    for step in range(3):
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("26a")
@pytest.mark.parametrize(
    "when", ["before sharding", "before sharding, stepped", "between forward and backward", "inside forward"]
)
@ranks(1, 2)
def test_an_optimizer_built_at_any_time_trains_the_shards(world: World, when: str) -> None:
    def build(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(m.parameters(), lr=1e-2)

    model = Stack()
    theirs = build(model)
    if when == "before sharding, stepped":
        square(model(batch(9))).backward()
        theirs.step()
        theirs.zero_grad()
    sharded = copy.deepcopy(model)
    ours: list[torch.optim.Optimizer] = []
    if when.startswith("before"):
        ours.append(build(sharded))
        if when.endswith("stepped"):
            ours[0].load_state_dict(copy.deepcopy(theirs.state_dict()))
    if when == "inside forward":
        sharded.head.register_forward_hook(lambda m, a, o: ours.append(build(sharded)) if not ours else None)
    shard_stack(sharded, world.mesh)
    for step in range(4):
        loss = square(sharded(world.mine(batch(step))))
        if not ours:
            ours.append(build(sharded))
        loss.backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        share_grads(sharded, model)
        for optimizer in (ours[0], theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)
    assert all(isinstance(p, DTensor) for p in ours[0].param_groups[0]["params"])


def assign(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros_like(module.weight.detach()))


def remove(module: nn.Module) -> None:
    module.weight = None


def parametrize(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(module)


@pytest.mark.proves("19c")
@pytest.mark.parametrize("when", ["at once", "kept", "in forward", "before backward"])
@pytest.mark.parametrize("change", [assign, remove, parametrize], ids=lambda change: change.__name__)
@ranks(2)
def test_a_parameter_that_is_assigned_or_removed_after_sharding_is_refused_by_name(
    world: World, change: Any, when: str
) -> None:
    """Elsewhere the next forward ignores it."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh, reshard_after_forward=when != "kept")
    x, layer = torch.ones(2, 4), model[1]
    if when != "at once" or change is assign:  # DTensors that are assigned before the first forward are taken over
        for _ in range(2):  # then the second layer is prefetched, or kept
            model(x).sum().backward()
    kept, cls = layer.weight, type(layer)
    if when == "in forward":
        handle = model[0].register_forward_hook(lambda *_: change(layer))
    elif when == "before backward":
        loss = model(x).sum()
        change(layer)
    else:
        change(layer)
    with pytest.raises(StateError, match="Expected parameter '(parametrizations.)?weight.*' of unit .* as fully_shard"):
        loss.backward() if when == "before backward" else model(x)
    if when == "in forward":
        handle.remove()
    if change is not parametrize:
        layer.weight = kept
        model.zero_grad()
        for m in (model, plain):
            m(x).sum().backward()
        assert type(layer) is cls
        assert_same_grads(model, plain)


@ranks(1, 2)
def test_dtensors_that_are_assigned_before_the_first_forward_are_the_weights(world: World) -> None:
    """So transformers loads a checkpoint into a model that it sharded on meta; an optimizer may list what it assigned."""
    model = Stack()
    with torch.device("meta"):
        sharded = Stack()
    shard_stack(sharded, world.mesh)
    for name, value in model.named_parameters():
        owner, _, own = name.rpartition(".")
        placed = distribute_tensor(value.detach().clone(), world.mesh, [Shard(0)])
        setattr(sharded.get_submodule(owner), own, nn.Parameter(placed))
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        setattr(sharded.get_submodule(owner), own, buffer.clone())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(2):
        for m, part, optimizer in zip((sharded, model), (world.mine, lambda x: x), optimizers):
            optimizer.zero_grad()
            square(m(part(batch(step)))).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that other lists of what was assigned are stale
                optimizer.step()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("19c")
@ranks(2)
def test_a_module_inside_of_a_unit_that_is_cast_after_the_first_forward_is_refused_by_name(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    square(model(batch(0))).backward()
    model.head.double()
    with pytest.raises(StateError, match=r"Parameter 'head.weight' of unit 'Stack' was moved or cast by a call on a module"):
        model(batch(0))
    model.double()
    square(model(batch(0).double())).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


@ranks(2)
def test_weights_changed_between_forward_and_backward_are_an_error_as_without_sharding(world: World) -> None:
    for reshard in (True, False):
        model = shard_stack(Stack(), world.mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        square(model(batch(0))).backward()
        loss = square(model(batch(1)))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()


@ranks(2)
def test_a_step_of_another_model_between_forward_and_backward_is_none_of_our_business(world: World) -> None:
    generator, critic = (shard_stack(Stack(), world.mesh) for _ in range(2))
    plain = [copy.deepcopy(Stack()) for _ in range(2)]
    for m, source in zip(plain, (generator, critic)):
        m.load_state_dict({name: full(p) for name, p in source.named_parameters()})
        m.out = None

    def train(g: nn.Module, c: nn.Module, part: Any) -> None:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, c)]
        for step in range(3):
            fake = g(part(batch(step)))
            padded = torch.cat([fake, fake[:, :2]], 1)
            square(c(padded.detach()) - 1).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            square(c(padded)).backward()
            optimizers[0].step()
            for o in optimizers:
                o.zero_grad()

    train(generator, critic, world.mine)
    train(*plain, lambda x: x)
    assert_same_parameters(generator, plain[0])
    assert_same_parameters(critic, plain[1])


@pytest.mark.proves("21a")
@ranks(2)
def test_parameters_are_the_sharded_ones_outside_forward(world: World) -> None:
    model = shard_stack(Stack(), world.mesh, reshard_after_forward=False)
    before = list(model.parameters())
    loss = square(model(batch(0)))
    assert all(a is b for a, b in zip(before, model.parameters()))
    loss.backward()
    assert all(a is b for a, b in zip(before, model.parameters()))
    assert_near(model.head.weight, full(before[-2]), "head")


@pytest.mark.proves("26b")
@ranks(2)
def test_an_optimizer_built_before_sharding_warns_that_other_lists_are_stale(world: World) -> None:
    model = Stack(1)
    sharded = copy.deepcopy(model)
    before = list(sharded.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    shard_stack(sharded, world.mesh)
    assert all(type(p) is nn.Parameter for p in before), "the caller's tensors stay what they are"
    for _ in range(2):
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
        assert_near(clip_grad_norm_(before, 0.01), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), "norm")
        assert_same_grads(sharded, model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        first = optimizers[0].param_groups[0]["params"][0]
        assert first is next(sharded.parameters())
        said = [str(one.message) for one in caught if "stale" in str(one.message)]
        assert len(said) <= 1 and all(f"SGD held {len(before)} parameters" in line for line in said)
    assert_same_parameters(sharded, model)


@ranks(2)
def test_an_optimizer_without_sharded_parameters_is_left_alone(world: World) -> None:
    shard_stack(Stack(1), world.mesh)
    plain = Stack(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    square(plain(batch(0))).backward()
    before = dict(optimizer.__dict__)
    optimizer.step()
    assert {key for key in optimizer.__dict__ if key not in before} == set()
    assert not optimizer._optimizer_state_dict_pre_hooks and not optimizer._optimizer_step_post_hooks
    shard_stack(plain, world.mesh)
    optimizer.zero_grad()
    square(plain(world.mine(batch(0)))).backward()
    optimizer.step()
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"]), "found although it stepped before"


@ranks(1, 2)
def test_a_frozen_parameter_that_a_plain_module_shares_stays_plain_there(world: World) -> None:
    plain = nn.Linear(5, 3).requires_grad_(False)
    expected = plain(batch(0))
    base = nn.Linear(5, 3)
    base.weight, base.bias = plain.weight, plain.bias
    fully_shard(base, mesh=world.mesh)
    assert torch.equal(plain(batch(0)), expected) and torch.equal(base(batch(0)), expected)


@ranks(2)
def test_memory_of_replaced_parameters_lasts_as_long_as_the_callers_references(world: World) -> None:
    model = nn.Linear(64, 64)
    held = weakref.ref(model.weight.untyped_storage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=world.mesh)
    assert held() is not None
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert held() is None, "the first step drops the old parameters"


@ranks(2)
def test_a_sharded_parameter_assigned_to_another_place_is_refused(world: World) -> None:
    """A tie after sharding came apart and its optimizer was redirected; a swap of two parameters never returned."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    first, second = model[0].weight, model[1].weight
    for swapped in (False, True):
        model[1].weight = first
        if swapped:
            model[0].weight = second
        with pytest.raises(StateError, match="Expected parameter '.*weight' of unit .* as fully_shard"):
            model(torch.ones(2, 4))
        model[0].weight, model[1].weight = first, second
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()


@pytest.mark.rotates(4)
@pytest.mark.proves("19d")
@pytest.mark.parametrize("options", ["plain", "cast", "offload", "hfsdp", "kept"])
@pytest.mark.parametrize("how", ["data", "assign"] if HONOURS_SUBCLASSES else ["assign"])
@ranks(2, 4)
def test_old_values_that_the_caller_holds_stay_when_new_ones_are_assigned(world: World, how: str, options: str) -> None:
    """As in an EMA that is swapped in for validation. FSDP2 ignores the values that are assigned by `.data`."""
    mesh, kwargs = world.mesh, dict[str, Any](mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    if options == "offload":
        kwargs = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    elif options == "hfsdp":
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
        kwargs = {"states": HFSDP}
    elif options != "cast":
        kwargs = {"reshard_after_forward": options == "plain"}
    plain = Stack(1)
    sharded = copy.deepcopy(plain)
    for block in [*sharded.blocks, sharded]:
        fully_shard(block, mesh=mesh, **kwargs)
    pairs = [(sharded, world.mine), (plain, lambda x: x)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m, _ in pairs]

    def train(number: int) -> None:
        for (m, part), optimizer in zip(pairs, optimizers):
            optimizer.zero_grad()
            square(m(part(batch(number)))).backward()
            optimizer.step()

    def swap(m: nn.Module, values: list[Any]) -> None:
        if how == "assign":
            m.load_state_dict(dict(zip(m.state_dict(), values)), assign=True)
        else:
            for p, value in zip(m.parameters(), values):
                p.data = value

    def held(m: nn.Module) -> list[Any]:
        return list(m.state_dict().values()) if how == "assign" else [p.data for p in m.parameters()]

    train(0)
    for number in range(1, 3):
        weights = [held(m) for m, _ in pairs]
        shadow = [[(value * 0.5).detach() for value in old] for old in weights]
        for m, values in zip((sharded, plain), shadow):
            swap(m, values)
        for m, _ in pairs:
            m.eval()
        assert_near(sharded(batch(9)), plain(batch(9)), "output with the averages")
        for m, values in zip((sharded, plain), weights):
            swap(m, values)
        for m, _ in pairs:
            m.train()
        if how == "assign":  # plain torch's optimizer goes on with the parameters of before
            optimizers[1] = _same_states(optimizers[1], plain)
        train(number)
        assert_same_parameters(sharded, plain)


def _same_states(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with the states of `optimizer` for the parameters that `model` has now."""
    made = type(optimizer)(model.parameters(), lr=0.01)
    made.load_state_dict(optimizer.state_dict())
    return made


@ranks(2)
def test_assigning_values_without_aliases_moves_no_memory(world: World) -> None:
    """A CUDA graph, or a pinned shard, keeps its address."""
    model = fully_shard(nn.Linear(4, 4), mesh=world.mesh)
    model(torch.ones(2, 4))
    address = model.weight.to_local().data_ptr()
    for value in (torch.ones(4, 4), model.weight.data * 2):
        model.load_state_dict({"weight": value}, strict=False, assign=True)
        model(torch.ones(2, 4))
        assert model.weight.to_local().data_ptr() == address
    if HONOURS_SUBCLASSES:
        model.weight.data = model.weight.data * 2
        assert model.weight.to_local().data_ptr() == address
        model.set_keep_unsharded_storage(True)
        held = model.weight.data
        with pytest.raises(StateError, match="'weight' and others of its group cannot get new memory: set_keep_unsharded"):
            model.weight.data = torch.ones(4, 4)
        del held
        model.weight.data = torch.full((4, 4), 3.0)
        assert torch.equal(full(model.weight), torch.full((4, 4), 3.0))


@ranks(2)
def test_values_that_are_loaded_by_assigning_come_without_gradients(world: World) -> None:
    """The gradient of the parameter before was kept, where `zero_grad()` of the model did not see it."""
    plain = Stack(1)
    sharded = shard_stack(copy.deepcopy(plain), world.mesh)
    for m, part in ((sharded, world.mine), (plain, lambda x: x)):
        square(m(part(batch(0)))).backward()
        m.load_state_dict({"head.weight": torch.ones(3, 7)}, strict=False, assign=True)
        assert m.head.weight.grad is None and m.head.bias.grad is not None
        square(m(part(batch(1)))).backward()
    assert_same_grads(sharded, plain)


@pytest.mark.proves("19f")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@ranks(1, 2)
def test_embeddings_that_renormalize_their_rows_in_forward_are_refused_by_name(world: World, kind: Any) -> None:
    """Elsewhere each rank renormalizes a copy that is freed after forward."""
    model = fully_shard(nn.Sequential(kind(6, 4, max_norm=0.1), nn.Linear(4, 2)), mesh=world.mesh)
    before, tokens = full(model[0].weight), torch.tensor([[0, 1, 5]])
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"'0.weight'.* max_norm=0.1"):
            model(tokens)
        assert torch.equal(full(model[0].weight), before)
    model[0].max_norm = None  # then it trains
    plain = copy.deepcopy(undo(copy.deepcopy(model)))
    for m in (model, plain):
        square(m(tokens)).backward()
    assert_same_grads(model, plain)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
@ranks(2)
def test_a_model_and_its_optimizer_that_are_copied_together_train_together(world: World, first: str, how: str) -> None:
    """The optimizer of the copy held other parameters, so the copy did not train."""
    model = shard_stack(Stack(1), world.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(m: nn.Module, o: torch.optim.Optimizer) -> None:
        square(m(world.mine(batch(0)))).backward()
        o.step()
        o.zero_grad()

    train(model, optimizer)
    both = (model, optimizer) if first == "model" else (optimizer, model)
    if how == "deepcopy":
        made = copy.deepcopy(both)
    else:
        file = io.BytesIO()
        torch.save(both, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    copied_model, copied_optimizer = made if first == "model" else made[::-1]
    train(model, optimizer)
    train(copied_model, copied_optimizer)
    assert all(mine is not theirs for mine, theirs in zip(copied_model.parameters(), model.parameters()))
    for mine, theirs in zip(copied_model.parameters(), model.parameters()):
        assert type(mine) is type(theirs) and torch.equal(full(mine), full(theirs))


@pytest.mark.skipif(not HONOURS_SUBCLASSES, reason="this torch asks no subclass of DTensor")
@ranks(2)
def test_pickles_of_sharded_parameters_are_read_without_fullshard(world: World) -> None:
    model = shard_stack(Stack(1), world.mesh)
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    assert b"fullshard" not in file.getvalue()
    file.seek(0)
    for (name, kept), read in zip(model.named_parameters(), torch.load(file, weights_only=False).values()):
        assert isinstance(read, nn.Parameter) and torch.equal(full(read), full(kept)), name
