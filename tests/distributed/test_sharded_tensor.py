"""A sharded parameter that is mixed with a plain tensor outside of forward is named; what works stays as DTensor has it."""

from __future__ import annotations

import copy
import io
import pickle

import expecttest
import pytest
import torch
import torch.nn.functional as F
from harness import World, ranks
from models import assert_near, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import CPUOffloadPolicy, OffloadPolicy, StateError, _torch, fully_shard
from fullshard.policies import PRESETS

needs_subclasses = pytest.mark.skipif(
    not _torch.HONOURS_SUBCLASSES, reason="this torch calls no dispatch of DTensor's subclasses"
)


class Texts(expecttest.TestCase):
    def runTest(self) -> None: ...


@pytest.mark.proves("3a")
@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="this torch calls no dispatch of DTensor's subclasses")
@ranks(2)
def test_a_mix_with_plain_tensors_names_the_parameter(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    fully_shard(model, mesh=world.mesh)
    weight, bias, x = model[0].weight, model[1].bias, torch.ones(2, 4)
    for mixed in (
        lambda: x @ weight.t(),
        lambda: F.linear(x, weight),
        lambda: weight + torch.ones(4, 4),
        lambda: torch.cat([torch.ones(4, 4), weight]),
        lambda: torch._foreach_add([weight], [torch.ones(4, 4)]),
        lambda: x * weight[0],
    ):
        with pytest.raises(StateError) as caught:
            mixed()
        assert "cannot combine sharded parameter '0.weight' of unit 'Sequential' with a plain tensor" in str(caught.value)
    Texts().assertExpectedInline(
        str(caught.value),
        """aten.mul.Tensor cannot combine sharded parameter '0.weight' of unit 'Sequential' with a plain tensor: outside of the unit's forward a rank has only its shard. Compute with the tensors of `with fullshard.gathered(module)` (differentiable), call register_fsdp_forward_method() for the method that reads the parameter, or keep it unsharded in `with model.resident():`.""",
    )
    with pytest.raises(StateError, match="'1.bias'"):
        F.layer_norm(x, (4,), bias)


@ranks(2)
def test_a_face_is_a_dtensor_in_all_else(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=world.mesh)
    weight = model[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    assert {type(value) for value in (weight.detach(), weight.clone(), weight * 2, *model.state_dict().values())} == {DTensor}
    assert type(nn.Parameter(weight)) is type(weight)
    version = weight._version
    with torch.no_grad():
        assert weight.mul_(2) is weight and weight._version == version + 1
        assert weight.t()._base is weight
    (weight.t() * 3).sum().backward()
    assert type(weight.grad) is DTensor
    copied = copy.deepcopy(weight)
    assert type(copied) is type(weight) and torch.equal(copied.full_tensor(), weight.full_tensor())
    assert type(pickle.loads(pickle.dumps(weight))) is DTensor
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert {type(value) for value in torch.load(file, weights_only=True).values()} == {DTensor}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert type(weight) is type(copied)


@pytest.mark.proves("19d")
@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="this torch asks no subclass of DTensor")
@ranks(1, 2)
def test_assigning_data_is_honoured_or_refused_by_name(world: World) -> None:
    """Elsewhere `.data = x` is ignored by the next forward."""
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh, reshard_after_forward=False)
    x = torch.ones(2, 4)
    for value in (torch.full((4, 4), 2.0), torch.full((4, 4), 3.0)):
        model(x)
        model.weight.data = value
        assert torch.equal(model(x), nn.functional.linear(x, value))
        model.weight.data = model.weight.data * 2
        assert torch.equal(model(x), nn.functional.linear(x, 2 * value))
    with pytest.raises(
        StateError, match=r"Expected the new .data of parameter 'weight' to have its shape \(4, 4\), got shape \(2, 4\)"
    ):
        model.weight.data = torch.ones(2, 4)
    with pytest.raises(StateError, match="Expected .data of torch.float32 for parameter 'weight', got torch.float64"):
        model.weight.data = torch.ones(4, 4).double()


@pytest.mark.proves("19e")
@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="this torch asks no subclass of DTensor")
@ranks(1, 2)
def test_writes_that_move_no_version_counter_are_seen_by_the_next_forward(world: World) -> None:
    """Elsewhere a unit that stayed gathered computes with what was there before."""
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh, reshard_after_forward=False)
    x, weight = torch.ones(2, 4), model.weight
    for doubled in (
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: torch._foreach_add_([weight], [weight.detach().clone()]),
        lambda: weight.data.mul_(2.0),
        lambda: weight.data.t().mul_(2.0),
        lambda: torch.mul(weight.data, 2.0, out=weight.data),
        lambda: torch._foreach_mul_([weight.data], 2.0),
    ):
        before = model(x).detach()
        with torch.no_grad():
            doubled()
        assert torch.equal(model(x), 2 * before)


@pytest.mark.proves("19d")
@ranks(1, 2)
def test_writing_to_a_parameter_that_was_unsharded_by_hand_is_refused_when_it_goes(world: World) -> None:
    """Elsewhere what was written is gone after `reshard()`."""
    for write in (lambda p: p.mul_(2), lambda p: setattr(p, "data", torch.ones(4, 4))):
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh)
        model.unshard()
        with torch.no_grad():
            write(model.weight)
        with pytest.raises(StateError, match="'weight' .* cannot be resharded: it was written while it was unsharded by hand"):
            model.reshard()
        model.unshard()
        with torch.no_grad():
            write(model.weight)
        with pytest.raises(StateError, match="To discard the write, call reshard"):
            model.state_dict()
        assert not isinstance(model.weight, DTensor), "the caller may still read what it wrote"
        model.reshard()  # discards the write, as the error says
        assert isinstance(model.weight, DTensor)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh)
    model.unshard()
    model(torch.ones(2, 4)).sum().backward()
    model.unshard()
    model.reshard()


@pytest.mark.proves("19d")
@ranks(1, 2)
def test_writing_to_a_parameter_that_was_unsharded_by_hand_is_refused_when_forward_or_backward_frees_it(world: World) -> None:
    x = torch.ones(2, 4)
    for reshard in (True, None):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=world.mesh, reshard_after_forward=reshard)
        model.unshard()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(
            StateError, match="'0.weight' .* cannot be resharded: it was written while it was unsharded by hand"
        ):
            model(x).sum().backward()
        model(x).sum().backward()  # with what the shards say
        assert torch.allclose(full(model[0].weight.grad), torch.full((4, 4), 2.0))
        model.unshard()
        for _ in range(2):  # freed and gathered again, by forward and backward, is not written
            model(x).sum().backward()
        model.reshard()


FILLS = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "of the transpose": lambda w: nn.init.kaiming_uniform_(w.T),
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "constant_": lambda w: nn.init.constant_(w, 3.0),
    "zeros_": nn.init.zeros_,
    "ones_": nn.init.ones_,
    "data.normal_": lambda w: w.data.normal_(),
    "data.exponential_": lambda w: w.data.exponential_(),
    "data.random_": lambda w: w.data.random_(0, 10),
    "randn_like": lambda w: w.data.copy_(torch.randn_like(w)),
    "dropout": lambda w: nn.functional.dropout(w.data, 0.5, True, True),
}


@pytest.mark.proves("16f")
@needs_subclasses
@ranks(1, 2, 3)
def test_a_random_fill_of_a_shard_gives_the_weights_of_the_unsharded_model_on_any_number_of_ranks(world: World) -> None:
    """Every rank has the same seed, so drawing only its own part would make the parts copies of each other."""
    for name, fill in FILLS.items():
        plain, model = (nn.Linear(5, 6, bias=False) for _ in range(2))
        model.load_state_dict(plain.state_dict())
        fully_shard(model, mesh=world.mesh)
        drawn = []
        for weight in (plain.weight, model.weight):
            torch.manual_seed(5)
            fill(weight)
            drawn.append(torch.rand(1).item())
        assert torch.equal(full(model.weight), plain.weight.detach()), name
        assert drawn[0] == drawn[1], (name, "the generator goes on as in one process")
        x = torch.ones(1, 5)
        assert torch.equal(model(x), plain(x)), name


@needs_subclasses
@ranks(1, 2, 3)
def test_after_install_trunc_normal_of_a_shard_gives_the_weights_of_the_unsharded_model(world: World) -> None:
    for limits in ((), (0, 1, 3, 5)):
        plain, model = (nn.Linear(5, 6, bias=False) for _ in range(2))
        fully_shard(model, mesh=world.mesh)
        drawn: list[float] = []
        with fullshard.installed():
            for weight in (plain.weight, model.weight):
                torch.manual_seed(5)
                nn.init.trunc_normal_(weight, *limits)
                drawn.append(torch.rand(1).item())
        assert torch.equal(full(model.weight), plain.weight.detach())
        assert drawn[0] == drawn[1], "the generator goes on as in one process"


@pytest.mark.proves("16f")
@needs_subclasses
@ranks(1, 2, 3)
def test_memory_first_and_reset_parameters_then_gives_the_weights_of_the_unsharded_model(world: World) -> None:
    """FSDP2's deferred initialisation: meta, fully_shard, to_empty, and each module's reset_parameters."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Sequential(nn.Embedding(5, 7), nn.Conv1d(7, 3, 3)))

    def reset(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    for offload in (OffloadPolicy(), CPUOffloadPolicy()):
        with torch.device("meta"):
            model = build()
        for part in (model[0], model[2][0], model):
            fully_shard(part, mesh=world.mesh, offload_policy=offload)
        model.to_empty(device="cpu")
        plain = build()
        for one in (plain, model):
            torch.manual_seed(11)
            one.apply(reset)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
            assert torch.equal(full(mine), theirs.detach()), name


@pytest.mark.proves("16f")
@needs_subclasses
@ranks(2)
def test_initialisers_that_cannot_be_computed_on_parts_name_the_parameter(world: World) -> None:
    for shape, fill in (
        ((6, 5), lambda w: nn.init.sparse_(w, 0.3)),
        ((6, 4, 3), nn.init.orthogonal_),
    ):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(shape))
        fully_shard(model, mesh=world.mesh)
        with pytest.raises(StateError, match=r"sharded parameter 'weight' of unit 'Module'"):
            fill(model.weight)


@needs_subclasses
@ranks(4)
def test_sharded_parameters_of_two_meshes_are_named_where_torch_cannot_mix_them(world: World) -> None:
    """Lists of foreach operations may hold both: each is computed on its own mesh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fully_shard(model[0], mesh=grid)
    fully_shard(model[1], mesh=world.mesh)
    first, second = model[0].weight, model[1].weight
    for found, weight in zip(torch._foreach_norm([first, second]), (first, second)):
        assert_near(found.full_tensor(), full(weight).norm(), "norm")
    with pytest.raises(StateError, match="'weight' of unit .* with DTensors of another mesh"):
        first + second


@pytest.mark.skipif(not _torch.HONOURS_SUBCLASSES, reason="this torch detaches parameters below autograd")
@pytest.mark.parametrize("level", ["ZERO3", "ZERO2", "HFSDP"])
@pytest.mark.parametrize("when", ["before", "after"])
@ranks(2)
def test_writes_to_local_tensors_of_a_state_dict_are_seen(world: World, level: str, when: str) -> None:
    """As torch.distributed.checkpoint loads in place. Units that keep parameters, or inner shards, computed with the old ones."""
    mesh = world.mesh
    if level == "HFSDP":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, states=PRESETS[level])
    x = torch.ones(1, 4)
    state = model.state_dict()
    model(x).sum().backward()
    if when == "after":
        state = model.state_dict()
    with torch.no_grad():
        for one in state.values():
            one.to_local().mul_(2)
        for one in plain.parameters():
            one.mul_(2)
    assert_near(model(x), plain(x), "output")
    with torch.no_grad():
        for one in (*model.parameters(), *plain.parameters()):
            (one.data.to_local() if isinstance(one, DTensor) else one).mul_(0.5)
    assert_near(model(x), plain(x), "output")


class _Momentum(nn.Module):
    """Updates its target in its own forward, as MoCo and BYOL do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.online, self.target = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    @torch.no_grad()
    def update(self) -> None:
        weight = self.target.weight
        match self.way:
            case "in place":
                weight.mul_(0.5)
            case "data":
                weight.data.mul_(0.5)
            case "foreach":
                torch._foreach_mul_([weight], 0.5)
            case "local":
                (weight.to_local() if isinstance(weight, DTensor) else weight).mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.online(x)
        self.update()
        return self.target(x)


@pytest.mark.proves("19g")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", ["in place", "data", "foreach", "local"])
@ranks(1, 2)
def test_a_write_in_a_forward_reaches_a_unit_that_is_prefetched(world: World, way: str, trained: bool) -> None:
    """It computed with the weights of before, from the second forward on; in training the error was torch's."""
    if way in ("data", "foreach") and not _torch.HONOURS_SUBCLASSES:
        return
    model = _Momentum(way)
    for module in (model.online, model.target, model):
        fully_shard(module, mesh=world.mesh)
    plain = _Momentum(way)
    for step in range(4):
        for each in (plain, model):
            each.target.requires_grad_(trained)
        outputs = []
        for each in (plain, model):
            with torch.set_grad_enabled(step < 3):
                outputs.append(each(torch.ones(2, 4)))
            if step < 3:
                outputs[-1].sum().backward()
        assert torch.equal(*outputs), step
        for got, wanted in zip(model.parameters(), plain.parameters()):
            assert (got.grad is None) == (wanted.grad is None)
            assert wanted.grad is None or torch.equal(full(got.grad), wanted.grad)
            got.grad = wanted.grad = None
