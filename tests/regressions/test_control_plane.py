"""Stories of the control plane: lists inside other units, what is ahead, copies of copies, scopes inside scopes."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, ranks
from models import (
    Block,
    Stack,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    batch,
    full,
    shard_stack,
    share_grads,
    square,
    train_both,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import CommPolicy, StateError, fully_shard
from fullshard.comm.base import StartedWork
from fullshard.comm.streams import HostStream


class Dec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid, self.head = nn.Linear(6, 6), nn.Linear(6, 11)
        self.scale = nn.Parameter(torch.full((11,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(x))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.dec = nn.Embedding(11, 6), Dec()

    def forward(self, ids: Tensor) -> Tensor:
        return self.dec(self.emb(ids))


def words(step: int) -> Tensor:
    return torch.randint(0, 11, (12, 4), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("keep", [True, False, None])
@ranks(1, 2)
def test_a_list_that_ends_inside_another_unit_ends_nothing_but_itself(world: World, keep: bool | None) -> None:
    """The end of the list's last module closed the unit around it: its gradients were missing."""

    def shard(m: nn.Module) -> None:
        options = {"mesh": world.mesh, "reshard_after_forward": keep}
        fully_shard([m.emb, m.dec.head], **options)
        fully_shard(m.dec, **options)
        fully_shard(m, **options)

    train_both(world, Net(), shard, inputs=words, steps=3)


@pytest.mark.filterwarnings("ignore:parameter")
@ranks(1, 2)
def test_a_tie_whose_modules_lie_in_one_another(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[2].weight = model[0].weight

    def shard(m: nn.Module) -> None:
        fully_shard([m[0], m[1]], mesh=world.mesh)
        fully_shard(m, mesh=world.mesh)

    train_both(world, model, shard, steps=2)


@pytest.mark.parametrize("how", ["list", "budget"])
@ranks(1, 2)
def test_weights_gathered_ahead_before_a_step_are_gathered_again_after_it(world: World, how: str) -> None:
    encoder, decoder = Stack(), Stack()
    comm = CommPolicy(prefetch_bytes=10**6) if how == "budget" else CommPolicy()
    sharded = [shard_stack(copy.deepcopy(m), world.mesh, comm_policy=comm) for m in (encoder, decoder)]
    if how == "list":
        sharded[0].set_modules_to_forward_prefetch([sharded[1], *sharded[1].blocks])
    for step in range(3):
        for models, x in ((sharded, world.mine(batch(step))), ((encoder, decoder), batch(step))):
            (square(models[0](x)) + square(models[1](x))).backward()
            with torch.no_grad():
                models[0](x)
            for m in models:
                torch.optim.SGD(m.parameters(), lr=0.5).step()
                m.zero_grad()
        with torch.no_grad():
            assert_near(sharded[1](batch(0)), decoder(batch(0)), "after the step")


@ranks(2)
def test_what_one_rank_still_holds_of_a_block_that_was_replaced(world: World) -> None:
    """A rank that kept an old loss gathered the old block ahead, the others did not."""
    torch.manual_seed(0)
    model = shard_stack(Stack(), world.mesh)
    kept = square(model(world.mine(batch(0))))
    kept.backward(retain_graph=True)
    kept = kept if world.rank == 0 else None
    torch.manual_seed(1)
    model.blocks[1] = fully_shard(Block(), mesh=world.mesh)
    for step in range(3):
        square(model(world.mine(batch(step)))).backward()
    fullshard.undo(model)
    again = shard_stack(model, world.mesh)
    square(again(world.mine(batch(0)))).backward()
    assert kept is None or kept.requires_grad


@ranks(1, 2)
def test_gathered_while_unsharded_by_hand_and_with_names_of_its_own(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for unit in (sharded, *sharded.blocks):
        unit.unshard()
    with fullshard.gathered(sharded, recurse=True, grad=False) as params:
        assert set(params) == {name for name, _ in model.named_parameters()}
    assert not hasattr(sharded.inp.weight, "placements"), "still unsharded"
    square(checkpoint(sharded, world.mine(batch(0)), use_reentrant=False)).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@pytest.mark.proves("26a")
@ranks(1, 2)
def test_optimizers_follow_a_copy_and_an_undone_model(world: World) -> None:
    """The copied optimizer trained tensors that nobody else had; after undo() it trained nothing."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (sharded, model))

    def step(which: int, *followers: tuple[nn.Module, torch.optim.Optimizer], part: Any = world.mine) -> None:
        square(model(batch(which))).backward()
        for m, _ in followers:
            square(m(part(batch(which)))).backward()
            assert_same_grads(m, model)
        share_grads(followers[0][0], model)
        for m, o in (*followers, (model, theirs)):
            o.step()
            o.zero_grad()
            m.zero_grad()
        for m, _ in followers:
            assert_same_parameters(m, model)

    step(0, (sharded, ours))
    step(1, copy.deepcopy((sharded, ours)), (sharded, ours))
    fullshard.undo(sharded)
    step(2, (sharded, ours), part=lambda x: x)


@ranks(2)
def test_parts_of_a_sharded_model_can_be_copied_and_saved(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    square(sharded(world.mine(batch(0)))).backward()
    optimizer.step()
    for thing in (sharded.head.weight, sharded.state_dict(), optimizer.state_dict()):
        file = io.BytesIO()
        torch.save(thing, file)
        assert file.tell() < 40_000, "no storages of others"
    head = copy.deepcopy(sharded.head)
    assert_near(full(head.weight), full(sharded.head.weight), "weight")
    assert set(head.state_dict()) == {"weight", "bias"}
    with pytest.raises(StateError, match="A sharded FSDPStack cannot be copied shallowly: the copy would share its units"):
        copy.copy(sharded)

    class Sub(type(sharded)):  # type: ignore[misc]
        pass

    sharded.__class__ = Sub
    assert_same_parameters(copy.deepcopy(sharded), fullshard.undo(copy.deepcopy(sharded)))


@ranks(2)
def test_undo_in_the_midst_of_accumulation_is_refused(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    with sharded.accumulate():
        square(sharded(world.mine(batch(0)))).backward()
    with pytest.raises(StateError, match=r"undo\(\) was called while gradients of unit '.*' are accumulated but not reduced"):
        fullshard.undo(sharded)
    sharded.zero_grad()
    fullshard.undo(sharded)


@pytest.mark.proves("19a")
@ranks(1, 2)
def test_full_params_refuses_what_would_lose_writes(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    with fullshard.full_params(sharded):
        with (
            pytest.raises(StateError, match=r"full_params\(\) was called inside full_params\(\)"),
            fullshard.full_params(sharded),
        ):
            pass
        with pytest.raises(StateError, match=r"The forward of unit '.*' was called inside full_params\(\)"):
            sharded(batch(0))
        with torch.no_grad():
            sharded.inp.weight.fill_(2.0)
    assert (full(sharded.inp.weight) == 2).all()
    with pytest.raises(StateError, match=r"Another Parameter was assigned to \['inp.weight'\]"), fullshard.full_params(sharded):
        sharded.inp.weight = nn.Parameter(torch.ones(7, 5))
    square(sharded(batch(0))).backward()


@ranks(1, 2)
def test_resident_blocks_nest(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    with torch.no_grad(), sharded.resident():
        with sharded.resident():
            sharded(batch(0))
        with fullshard.counting(sharded) as messages:
            sharded(batch(0))
        assert not messages


@ranks(2)
def test_a_registered_method_keeps_no_model_alive_and_generators_are_refused(world: World) -> None:
    class Talks(Stack):
        def words(self, x: Tensor) -> Tensor:
            return self(x)

        def stream(self, x: Tensor):  # type: ignore[no-untyped-def]
            yield self(x)

    gc.collect()
    gc.disable()
    try:
        model = shard_stack(Talks(), world.mesh)
        fullshard.register_fsdp_forward_method(model, "words")
        with pytest.raises(ValueError, match="is a generator or coroutine, whose body runs after the call has returned"):
            fullshard.register_fsdp_forward_method(model, "stream")
        with torch.no_grad():
            model.words(batch(0))
        ref = weakref.ref(model)
        del model
        assert ref() is None
    finally:
        gc.enable()


@ranks(1, 2)
def test_materialize_keeps_ties_freezing_and_attributes(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(4, 4))
            self.b = self.a
            self.c = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.a)
            nn.init.zeros_(self.c)
            self.c.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a + x @ self.b + self.c

    with torch.device("meta"):
        model = Tied()
    fully_shard(model, mesh=world.mesh)
    fullshard.materialize(model)
    assert model.a is model.b and not model.c.requires_grad
    square(model(torch.ones(2, 4))).backward()
    assert torch.equal(full(model.a), torch.ones(4, 4))


@ranks(2)
def test_torchs_own_fully_shard_still_works_while_installed(world: World) -> None:
    import torch.distributed.fsdp as theirs

    held = {"fully_shard": theirs.fully_shard}
    with fullshard.installed():
        other = held["fully_shard"](nn.Linear(4, 2), mesh=world.mesh)
        other(torch.ones(1, 4)).sum().backward()


@pytest.mark.proves("27a")
@ranks(1, 2)
def test_a_backward_through_a_unit_that_was_undone_says_so(world: World) -> None:
    sharded = shard_stack(Stack(), world.mesh)
    loss = square(sharded(world.mine(batch(0))))
    fullshard.undo(sharded)
    with pytest.raises(StateError, match="Unit '.*' was undone between its forward and this backward"):
        loss.backward()
    square(sharded(batch(0))).backward()


def test_a_scalar_on_a_hybrid_mesh_is_sharded_again_after_the_process_group_was_destroyed() -> None:
    """The group of all ranks was looked up among those of the job before, which torch does not know any more."""
    for _ in range(2):
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        try:
            model = nn.Linear(4, 4)
            model.scale = nn.Parameter(torch.ones(()))
            fullshard.fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
            model(torch.ones(1, 4)).sum().backward()
        finally:
            dist.destroy_process_group()


def test_the_sum_over_replicas_keeps_nothing_for_the_collector() -> None:
    """Work that begins behind other work kept the reduction that it was of, and that the work: gradients that were added to
    others stayed until Python looked for circles.
    """

    class Reduction:
        def start(self) -> StartedWork:
            return StartedWork()

        def finish(self) -> None: ...

    reduction = Reduction()
    first = HostStream().run(reduction.start, reduction.finish)
    reduction.work = HostStream().run(reduction.start, reduction.finish, after=first)
    reduction.work.wait()
    seen = weakref.ref(reduction)
    gc.disable()
    try:
        del reduction, first
        assert seen() is None
    finally:
        gc.enable()
