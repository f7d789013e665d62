"""Methods beside forward, and parameters used outside of both."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import World, ranks
from models import Stack, assert_near, assert_same_grads, batch, shard_stack, square
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard, register_fsdp_forward_method


class Writer(nn.Module):
    """Its loss reads the head's weight in chunks, without calling the head, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(torch.tanh(self.embed(x))))

    def chunked(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return torch.cat([chunk @ self.head.weight.t() for chunk in y.chunk(2)]).square().mean()

    def write(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = torch.cat([x, nn.functional.linear(self.features(x), self.head.weight)], -1)[:, -5:]
        return x

    def breaks(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"out of luck with {self.head.weight.sum().item():.0f}")


def shard(model: Writer, world: World) -> Writer:
    for module in (model.embed, model.body, model.head, model):
        fully_shard(module, mesh=world.mesh)
    for name in ("chunked", "write", "breaks"):
        register_fsdp_forward_method(model, name)
    return model


@pytest.mark.proves("3b")
@ranks(1, 2)
def test_a_registered_method_covers_units_below_that_it_reads_without_calling(world: World) -> None:
    """Elsewhere only the unit itself is gathered, and the head's weight is a DTensor in the midst of plain tensors."""
    model = Writer()
    sharded = shard(copy.deepcopy(model), world)
    for step in range(3):
        with fullshard.counting(sharded) as messages:
            sharded.chunked(world.mine(batch(step))).backward()
        model.chunked(batch(step)).backward()
        assert_same_grads(sharded, model)
        gathers = [m for m in messages if m.kind == "all_gather"]
        assert len(gathers) <= 6, "the head is gathered once per pass, however often it is read"
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()
    with torch.no_grad():
        assert_near(sharded.write(batch(0), 3), model.write(batch(0), 3), "written")
    assert sharded.head._fullshard_unit.residency.value == "sharded"


@ranks(1, 2)
def test_a_method_that_raises_leaves_all_units_sharded(world: World) -> None:
    model = Writer()
    sharded = shard(copy.deepcopy(model), world)
    with pytest.raises(RuntimeError, match="out of luck"):
        sharded.breaks(batch(0))
    assert type(sharded.head.__dict__["_parameters"]) is dict
    sharded.chunked(world.mine(batch(0))).backward()
    model.chunked(batch(0)).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_walking_over_parameters_in_a_method_gathers_nothing(world: World) -> None:
    class Counts(Stack):
        def count(self) -> int:
            return sum(parameter.numel() for parameter in self.parameters())

    model = shard_stack(Counts(), world.mesh)
    register_fsdp_forward_method(model, "count")
    with fullshard.counting(model) as messages:
        assert model.count() == sum(p.numel() for p in Counts().parameters())
    assert len(messages) == 1, "the root's own"


@ranks(1, 2)
def test_a_method_that_writes_to_parameters_keeps_what_it_wrote(world: World) -> None:
    """What a registered method wrote to its own unit, or to one that it had gathered, went with the gathered copy."""

    class Norms(Stack):
        def renorm(self) -> None:
            with torch.no_grad():
                for block in self.blocks:
                    block.up.weight.mul_(0.5)
                self.head.weight.clamp_(-0.1, 0.1)

    model = Norms()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    register_fsdp_forward_method(sharded, "renorm")
    for _ in range(2):
        sharded.renorm(), model.renorm()
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
    assert_same_grads(sharded, model)
    for (name, parameter), plain in zip(sharded.named_parameters(), model.parameters()):
        assert_near(parameter, plain, name)


@pytest.mark.parametrize("name", ["head", "blocks"])
@ranks(1, 2)
def test_a_write_that_cannot_be_kept_ends_the_method(world: World, name: str) -> None:
    """The forward stayed open: other models counted as units inside of it, and parameters stayed unsharded."""

    class Writes(Stack):
        def write(self) -> None:
            with torch.no_grad():
                for weight in [self.head.weight] if name == "head" else [block.up.weight for block in self.blocks]:
                    weight.mul_(0.5)

    model = Writes()
    sharded = shard_stack(
        copy.deepcopy(model), world.mesh, mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    register_fsdp_forward_method(sharded, "write")
    with pytest.raises(fullshard.StateError, match=f"'.*{name}"):
        sharded.write()
    units = [module._fullshard_unit for module in (*sharded.blocks, sharded)]
    assert not any(unit.runtime.scheduler.is_running(unit.number) for unit in units)
    assert all(unit.residency.value == "sharded" for unit in units)
    for (key, parameter), plain in zip(sharded.named_parameters(), model.parameters()):
        assert_near(parameter, plain, key)
    other = shard_stack(Stack(), world.mesh)
    square(other(world.mine(batch(0)))).backward()
    square(sharded(world.mine(batch(0)))).backward()


@ranks(2)
def test_a_forward_without_output_inside_of_an_exception_handler_has_not_failed(world: World) -> None:
    """The exception that the caller handles was told to the other ranks as one of the forward."""

    class Keeps(Stack):
        def forward(self, x: Tensor) -> None:
            self.output = super().forward(x)

    model = Stack()
    sharded = Keeps()
    sharded.load_state_dict(model.state_dict())
    shard_stack(sharded, world.mesh)
    try:
        raise ValueError("before")
    except ValueError:
        sharded(world.mine(batch(0)))
    assert sharded._fullshard_unit.groups[0].fingerprints.log.exception_note is None
    assert_near(sharded.output, world.mine(model(batch(0))), "output")
