"""Clipping and optimizers on shards."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, shard_stack, square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_ as early_clip_grad_norm_  # imported before fullshard replaces anything

import fullshard
from fullshard import _torch


@pytest.mark.rotates(3)
@pytest.mark.proves("13a")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("who", ["torch", "fullshard"])
@ranks(1, 2, 3)
def test_clipping_equals_clipping_unsharded(world: World, who: str, norm_type: float) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for scale in (0.1, 100.0):
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), scale * 0.01, norm_type)
        clip = torch.nn.utils.clip_grad_norm_ if who == "torch" else fullshard.clip_grad_norm_
        norm = clip(sharded.parameters(), scale * 0.01, norm_type)
        assert_near(norm, expected, "norm")
        assert_same_grads(sharded, model)
        if who == "fullshard":
            assert type(norm) is torch.Tensor and norm.ndim == 0
        sharded.zero_grad(), model.zero_grad()


@pytest.mark.proves("13a")
@ranks(2)
def test_clipping_mixes_sharded_and_plain_parameters(world: World) -> None:
    model = Stack()
    sharded = copy.deepcopy(model)
    fullshard.fully_shard(sharded, mesh=world.mesh, ignored_params=set(sharded.head.parameters()))
    for parameter in sharded.head.parameters():
        assert type(parameter.data) is torch.Tensor
    square(sharded(batch(0))).backward()
    square(model(batch(0))).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert_near(fullshard.clip_grad_norm_(sharded.parameters(), 0.01), expected, "norm")
    assert_same_grads(sharded, model)


@ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_if_asked(world: World) -> None:
    model = shard_stack(Stack(1), world.mesh)
    square(model(world.mine(batch(0)))).backward()
    if world.rank == 1:
        model.inp.weight.grad.to_local().fill_(float("inf"))
    with pytest.raises(RuntimeError, match="their norm over all ranks is inf"):
        fullshard.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert fullshard.clip_grad_norm_([], 1.0) == 0


def _clipped_by_torch(model: nn.Module, sharded: nn.Module) -> None:
    """Norms and gradients by torch's own clipping of what lies on several meshes, or is plain, are the unsharded model's."""
    for scale in (0.1, 100.0):
        for norm_type in (2.0, 1.0, float("inf")):
            square(sharded(batch(0))).backward()
            square(model(batch(0))).backward()
            expected = torch.nn.utils.clip_grad_norm_(model.parameters(), scale * 0.01, norm_type)
            norm = early_clip_grad_norm_(sharded.parameters(), scale * 0.01, norm_type)
            assert type(norm) is torch.Tensor and norm.ndim == 0
            assert_near(norm, expected, f"norm {norm_type}")
            assert_same_grads(sharded, model)
            sharded.zero_grad(), model.zero_grad()


@pytest.mark.proves("13a")
@ranks(2, 3)
def test_after_install_torchs_clipping_mixes_sharded_and_plain_parameters(world: World) -> None:
    """Elsewhere: "got mixed torch.Tensor and DTensor". A part of the shards is empty."""
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 5))
    sharded = copy.deepcopy(model)
    fullshard.fully_shard(sharded, mesh=world.mesh, ignored_params={sharded[1].weight})
    assert type(sharded[1].weight.data) is torch.Tensor
    with fullshard.installed():
        _clipped_by_torch(model, sharded)
        square(sharded(batch(0))).backward()
        before = [_torch.local_part(p.grad).clone() for p in sharded.parameters()]
        if world.rank == 0:
            sharded[0].weight.grad.to_local().fill_(float("inf"))
            before[0].fill_(float("inf"))
        with pytest.raises(RuntimeError, match="norm over all ranks"):
            early_clip_grad_norm_(sharded.parameters(), 1.0, error_if_nonfinite=True)
        assert all(torch.equal(_torch.local_part(p.grad), grad) for p, grad in zip(sharded.parameters(), before)), (
            "nothing was changed"
        )


@pytest.mark.proves("13a")
@ranks(4)
def test_after_install_torchs_clipping_takes_gradients_of_several_meshes(world: World) -> None:
    """A part on all ranks, a part hybrid or on halves of them, and a plain one. Elsewhere: a text about meshes."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (grid, grid["shard"]):
        model = Stack(2)
        sharded = copy.deepcopy(model)
        fullshard.fully_shard(sharded.blocks[0], mesh=mesh)
        fullshard.fully_shard(sharded, mesh=world.mesh, ignored_params=set(sharded.head.parameters()))
        with fullshard.installed():
            _clipped_by_torch(model, sharded)


@ranks(2)
def test_after_install_torchs_clipping_takes_the_maximum_norm_with_empty_shards(world: World) -> None:
    """The rank without rows raised, and the other one waited."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    sharded = fullshard.fully_shard(copy.deepcopy(model), mesh=world.mesh)
    x = torch.randn(4, 4)
    sharded(x).square().mean().backward(), model(x).square().mean().backward()
    with fullshard.installed():
        found, expected = (early_clip_grad_norm_(m.parameters(), 0.01, float("inf")) for m in (sharded, model))
    assert_near(found, expected, "norm")
    assert_same_grads(sharded, model)


@ranks(2)
def test_after_install_torchs_clipping_of_one_mesh_stays_torchs_own(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    found = []
    for inside in (False, True):
        square(sharded(world.mine(batch(0)))).backward()
        with fullshard.installed() if inside else nullcontext():
            found.append(early_clip_grad_norm_(sharded.parameters(), 0.01))
        sharded.zero_grad()
    assert all(isinstance(norm, DTensor) for norm in found)
    assert torch.equal(found[0].full_tensor(), found[1].full_tensor())


class Parallel(nn.Module):
    """A scalar, a norm that tensor parallelism leaves alone, and two linear layers that it shards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(())), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x))) * self.scale


@ranks(2)
def test_grad_scaler_skips_a_step_on_all_ranks_of_one_mesh(world: World) -> None:
    """As torch has it."""
    for infinite in (None, 0, 1):
        model = shard_stack(Stack(1), world.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(square(model(batch(0)))).backward()
        if world.rank == infinite:
            model.head.weight.grad.to_local().fill_(float("inf"))
        before = model.inp.weight.full_tensor().clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if infinite is None else 2.0)
        assert torch.equal(before, model.inp.weight.full_tensor()) == (infinite is not None)


@pytest.mark.parametrize("fused", [False, True])
@ranks(4)
def test_after_install_grad_scaler_skips_a_step_on_all_ranks_of_all_meshes(world: World, fused: bool) -> None:
    with fullshard.installed():
        _scaled_over_meshes(world, fused)


def _scaled_over_meshes(world: World, fused: bool) -> None:
    """torch looks over the mesh of the first gradient: some ranks would step and the others would not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for infinite in (None, *range(4)):
        model = Parallel()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fullshard.fully_shard(model.norm, mesh=mesh["dp"])
        fullshard.fully_shard(model, mesh=mesh["dp"])
        plain = nn.Linear(2, 2)
        plain.weight.grad = torch.ones(2, 2)
        optimizer = torch.optim.AdamW([*model.parameters(), plain.weight], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(square(model(torch.randn(2, 4)))).backward()
        expected = [4 * torch.ones(()) for _ in model.parameters()]
        before = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        if world.rank == infinite:
            model.up.weight.grad.to_local().fill_(float("inf"))
        weights = [parameter.full_tensor().clone() for parameter in model.parameters()]
        if not fused:
            scaler.unscale_(optimizer)
            for parameter, grad, scale in zip(model.parameters(), before, expected):
                if infinite is None:
                    assert torch.equal(parameter.grad.full_tensor(), grad / scale)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks were recorded") if not fused else nullcontext():
            scaler.step(optimizer)
        stepped = [not torch.equal(one, parameter.full_tensor()) for one, parameter in zip(weights, model.parameters())]
        assert scaler.get_scale() == (4.0 if infinite is None else 2.0)
        assert all(stepped) if infinite is None else not any(stepped)


@ranks(2)
def test_states_follow_a_parameter_through_undo_and_another_sharding(world: World) -> None:
    """The first step raised and lost one state, so did each further attempt, and then momenta were zeros."""
    model = Parallel()
    sharded = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (sharded, model)]

    def step() -> None:
        for m, optimizer in zip((sharded, model), optimizers):
            m(torch.arange(8.0).view(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, two in zip(sharded.parameters(), model.parameters()):
            assert_near(one.full_tensor() if isinstance(one, DTensor) else one, two, "weight")

    step()
    fullshard.fully_shard(sharded, mesh=world.mesh)
    step()
    fullshard.undo(sharded)
    fullshard.fully_shard(sharded, mesh=world.mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None)
    step()
    fullshard.undo(sharded)
    step()
    fullshard.fully_shard(sharded, mesh=world.mesh)
    twice = torch.optim.SGD([{"params": [model.up.weight]}, {"params": [model.up.bias]}], lr=0.1)
    weight = twice.param_groups[0]["params"][0]
    fullshard.fully_shard(model, mesh=world.mesh)
    twice.add_param_group({"params": [model.up.weight]})
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(8, 4\) is in two parameter groups of SGD"):
        twice.step()
    assert twice.param_groups[0]["params"][0] is weight


@ranks(2)
def test_an_option_that_one_rank_changes_in_place_is_told(world: World) -> None:
    """A list was compared with itself, so that a change of one of its numbers was not noticed."""
    model = shard_stack(Stack(), world.mesh)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.param_groups[0]["betas"] = [0.5, 0.75]
    with pytest.raises(fullshard.StateError, match=r"Adam\.step\(\) of .*betas=\(0\.25, 0\.75\)"):
        for step in range(3):
            if step and not world.rank:
                optimizer.param_groups[0]["betas"][0] = 0.25
            square(model(batch(0))).backward()
            optimizer.step()
            optimizer.zero_grad()


MAKERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1, amsgrad=True, eps=1e-2),  # small gradients do not decide signs of whole steps
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Muon": partial(torch.optim.Muon, lr=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


@pytest.mark.proves("2b")
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", MAKERS)
@ranks(1, 3)
def test_a_full_state_dict_of_an_unsharded_optimizer_is_sharded_by_the_next_step(world: World, name: str, dim: int) -> None:
    """torch loads it as it is, and raises in the next step that tensors and DTensors are mixed."""
    torch.manual_seed(0)
    model, options = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False)), {}
    sharded = copy.deepcopy(model)
    if dim:
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    fullshard.fully_shard(sharded, mesh=world.mesh, **options)
    optimizers = [MAKERS[name](m.parameters()) for m in (model, sharded)]
    if name == "Adafactor":
        optimizers[1] = fullshard.whole_view(optimizers[1])

    def step(*pairs: tuple[nn.Module, torch.optim.Optimizer]) -> None:
        for m, optimizer in pairs:
            square(m(batch(0))).backward()
            optimizer.step()
            optimizer.zero_grad()

    step((model, optimizers[0]))
    sharded.load_state_dict(model.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for _ in range(2):
        step(*zip((model, sharded), optimizers))
    for key, value in model.state_dict().items():
        # Muon rounds its updates to bfloat16, and so an average of gradients in another order.
        assert_near(
            sharded.state_dict()[key].full_tensor(), value, key, torch.finfo(torch.bfloat16).eps if name == "Muon" else None
        )


@pytest.mark.proves("26a")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", ["step", "clip", "scaler"])
@ranks(2)
def test_an_optimizer_that_lists_parameters_from_before_undo_trains_the_new_ones(world: World, way: str, again: bool) -> None:
    plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model, scaler = copy.deepcopy(plain), torch.amp.GradScaler("cpu", init_scale=4.0)
    fullshard.fully_shard(model[0], mesh=world.mesh)
    fullshard.fully_shard(model, mesh=world.mesh)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in (model, plain)]
    for step in range(3):
        if step == 1:
            fullshard.undo(model)
            if again:
                fullshard.fully_shard(model, mesh=world.mesh)
            else:
                with pytest.raises(
                    fullshard.StateError, match=r"SGD has states of a parameter of shape \(6, 6\) as it was sharded"
                ):
                    pairs[0][1].state_dict()
        for each, optimizer in pairs:
            loss = square(each(batch(step, 6)))
            (scaler.scale(loss) if way == "scaler" else loss).backward()
            if way == "clip":
                fullshard.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)
            with fullshard.installed():  # unscales the gradients of the new parameters
                scaler.step(optimizer) if way == "scaler" else optimizer.step()
            optimizer.zero_grad()
        if way == "scaler":
            scaler.update()
        for one, two in zip(model.parameters(), plain.parameters()):
            assert_near(one.full_tensor() if isinstance(one, DTensor) else one, two, "weight")
    states = pairs[0][1].state_dict()["state"].values()
    assert all(isinstance(state["momentum_buffer"], DTensor) == again for state in states)


@pytest.mark.proves("44a")
@pytest.mark.parametrize("kind", ["fused", "foreach"])
@ranks(2)
def test_a_step_whose_hook_raises_is_seen_by_units_that_stay_unsharded(world: World, kind: str) -> None:
    """The hook ran before the one that records the writes, and fused kernels count no version."""
    plain = nn.Linear(6, 6)
    model = fullshard.fully_shard(copy.deepcopy(plain), mesh=world.mesh, states=fullshard.ZERO2)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, **{kind: True})

        def trip(*_: object) -> None:
            raise RuntimeError("tripped")

        optimizer.register_step_post_hook(trip)
        square(each(batch(0, 6))).backward()
        with pytest.raises(RuntimeError, match="tripped"):
            optimizer.step()
    assert_near(model(batch(1, 6)), plain(batch(1, 6)), "output")
