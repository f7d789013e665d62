"""Each test tells of something that went wrong somewhere, and asserts that it does not here."""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, ranks, until
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, full, rounding, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import HFSDP, ZERO3, CheckPolicy, CommPolicy, StateError, StateSharding, _torch, fully_shard
from fullshard.checks.watchdog import Watchdog
from fullshard.comm.base import SingleRank, StartedWork
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.streams import HostStream
from fullshard.compat import FullyShardedDataParallel as FSDP
from fullshard.core import ParamGroup, reduction, unit_of, units_of
from fullshard.core import unsharded_buffer as unsharded
from fullshard.weights import load_weights, save_weights


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("out of luck")


class Unlucky(Stack):
    """Raises where it is told to, once."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            if self.where == f"forward {i}":
                raise RuntimeError("out of luck")
            x = block(x)
            if self.where == f"backward {i}":
                x = Raises.apply(x)
        return self.head(x)


@pytest.mark.proves("32a")
@pytest.mark.parametrize("where", ["forward 0", "forward 2", "backward 0", "backward 1", "backward 2"])
@ranks(1, 2)
def test_a_step_that_raised_leaves_the_next_one_clean(world: World, where: str) -> None:
    """An exception in backward used to leave parameters gathered and gradients unreduced, silently, for every later
    step, unless the user knew which method to call. Here the next forward notices, says so once, and is right."""
    model = Unlucky()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(5):
        if step in (1, 3):
            sharded.where = where
            with pytest.raises(RuntimeError, match="out of luck"):
                square(sharded(world.mine(batch(9)))).backward()
            sharded.where = ""  # and nobody calls zero_grad(): the gradients of the failed step never arrive
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = square(sharded(world.mine(batch(step))))
        said = [str(w.message) for w in caught if "The last backward raised" in str(w.message)]
        assert len(said) == (1 if step in (1, 3) and where.startswith("backward") else 0)
        assert all("'Unlucky'" in text for text in said)
        loss.backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("21a")
@ranks(2)
def test_the_root_is_fresh_after_evaluation_and_a_step(world: World) -> None:
    """An evaluation used to leave the outermost unit gathered; the optimizer then wrote the shards, and the next forward
    computed with the old weights."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (sharded, model)]
    with torch.no_grad():
        sharded(batch(1))
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        assert_near(sharded(batch(1)), model(batch(1)), "output")


@ranks(2)
def test_parameters_gathered_by_hand_are_fresh_after_a_step(world: World) -> None:
    """The same with `unshard()`: what was gathered before the optimizer wrote the shards is gathered again."""
    for optimizer_kind in ({"foreach": True}, {"foreach": False}):
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), world.mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, **optimizer_kind) for m in (sharded, model)]
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
        for block in sharded.blocks:
            block.unshard()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert_near(sharded(batch(1)), model(batch(1)), "output")


@pytest.mark.proves("1a")
@ranks(2)
def test_different_parameters_on_different_ranks_are_never_summed_into_each_other(world: World) -> None:
    """Rank 0 used `a`, rank 1 the same-shaped `b`; the layout of the message was made of what each rank happened to use,
    so the gradients of two different parameters were added up, without an error."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(4))
            self.b = nn.Parameter(torch.ones(4))

        def forward(self, use_a: bool, scale: float) -> Tensor:
            return ((self.a if use_a else self.b) * scale).sum()

    model = fully_shard(Either(), mesh=world.mesh)
    model(world.rank == 0, float(world.rank + 1)).backward()
    assert model.a.grad.full_tensor().tolist() == [0.5] * 4
    assert model.b.grad.full_tensor().tolist() == [1.0] * 4


@ranks(2)
def test_ranks_that_use_different_parts_of_several_units_meet_in_one_order(world: World) -> None:
    """When to reduce was once decided by counting gradients. A rank that used only a part of a unit then reduced it later
    than the others, between other collectives: a hang, or sums of strangers. Now the order follows from the forward."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor, use_two: bool) -> Tensor:
            x = torch.tanh(self.one(x))
            return self.two(x) if use_two else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Partly() for _ in range(4))

        def forward(self, x: Tensor, rank: int) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x, i % 2 == rank)
            return x

    model = Net()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step in range(3):
        square(sharded(world.mine(batch(step)), world.rank)).backward()
        for rank, part in enumerate(batch(step).chunk(2)):
            (square(model(part, rank)) / 2).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_gradients_somebody_kept_are_not_overwritten(world: World) -> None:
    """Gradient memory must not be reused while a caller still looks at last step's gradient."""
    model = shard_stack(Stack(1), world.mesh)
    kept = []
    for step in range(3):
        square(model(world.mine(batch(step)))).backward()
        kept.append((model.head.weight.grad, model.head.weight.grad.full_tensor().clone()))
        model.zero_grad()
    assert all(torch.equal(grad.full_tensor(), value) for grad, value in kept)


@ranks(2)
def test_waiting_for_the_last_message_before_the_group_is_destroyed(world: World) -> None:
    """A heartbeat that nobody waited for outlived its process group and aborted the process at exit."""
    model = shard_stack(Stack(1), world.mesh)
    square(model(world.mine(batch(0)))).backward()
    assert len(model._fullshard_unit.runtime.reducer.in_flight) == 0


@ranks(2)
def test_a_backward_that_is_not_the_last_does_not_wait_and_the_last_one_collects_all(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for last in (False, False, True):
        sharded.set_is_last_backward(last)
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_user_hooks_and_train_and_eval_switches_between_steps(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    seen: list[bool] = []
    sharded.blocks[0].register_forward_hook(lambda m, a, o: seen.append(hasattr(m.up.weight, "device_mesh")))
    for step in range(2):
        sharded.eval(), sharded.train()
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
    assert_same_grads(sharded, model)
    assert seen == [True, True], "a hook put on after fully_shard runs when the slots show the shards again"


@ranks(2)
def test_torchs_grad_scaler_works_on_sharded_gradients(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    runs = [(m, torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(m.parameters(), lr=0.1)) for m in (sharded, model)]
    for step in range(3):
        for m, scaler, optimizer in runs:
            x = world.mine(batch(step)) if m is sharded else batch(step)
            scaler.scale(square(m(x))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@pytest.mark.proves("35a")
@ranks(1)
def test_a_mesh_of_one_rank_computes_in_the_same_dtypes(world: World) -> None:
    """At world size 1 sharding was skipped, and mixed precision with it."""
    mp = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(4, 4), mesh=world.mesh, mp_policy=mp)
    out = model(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model.weight.grad.dtype == torch.float32


# --- found by a reader who set out to break things ---------------------------------------------------------------------


@ranks(2)
def test_a_graph_that_only_one_rank_keeps_alive_changes_nothing(world: World) -> None:
    """Rank 0 kept an output for its log; the planner waited for a backward that would never come, on that rank only,
    and the two ranks' collectives met in different orders: wrong gradients, silently."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, reshard_after_forward=True)
    for step in range(3):
        out = sharded(world.mine(batch(9)))
        if world.rank:
            out = None
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()
        del out


@ranks(1, 2)
def test_zero_grad_and_freezing_right_after_a_backward_that_raised(world: World) -> None:
    """The slots still held full parameters then, and both were lost on them."""
    model = Unlucky()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    sharded.where = "backward 1"
    with pytest.raises(RuntimeError):
        square(sharded(world.mine(batch(1)))).backward()
    sharded.where = ""
    for m in (sharded, model):
        m.zero_grad()
        m.head.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        square(sharded(world.mine(batch(2)))).backward()
    square(model(batch(2))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_zero_grad_and_freezing_while_gathered_by_hand(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    sharded.unshard()
    for m in (sharded, model):
        m.zero_grad()
        m.head.bias.requires_grad_(False)
    sharded.reshard()
    square(sharded(world.mine(batch(1)))).backward()
    square(model(batch(1))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_what_one_model_is_told_of_its_last_backward_is_not_told_to_another(world: World) -> None:
    one, two = (shard_stack(Stack(), world.mesh) for _ in range(2))
    one.set_is_last_backward(False)
    square(one(world.mine(batch(0)))).backward()
    square(two(world.mine(batch(0)))).backward()
    assert all(p.grad is not None for p in two.parameters())
    one.set_is_last_backward(True)
    square(one(world.mine(batch(0)))).backward()
    assert all(p.grad is not None for p in one.parameters())


@pytest.mark.parametrize("between", ["freeze", "double", "zero_grad"])
@ranks(2)
def test_what_accumulate_kept_survives_regrouping_and_goes_with_zero_grad(world: World, between: str) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    with sharded.accumulate():
        square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    for m in (sharded, model):
        if between == "freeze":
            m.head.bias.requires_grad_(False)
        elif between == "double":
            m.double()
        else:
            m.zero_grad()
    dtype = torch.float64 if between == "double" else torch.float32
    square(sharded(world.mine(batch(1)).to(dtype))).backward()
    square(model(batch(1).to(dtype))).backward()
    if between == "freeze":  # what it had before it was frozen
        model.head.bias.grad = None
        sharded.head.bias.grad = None
    assert_same_grads(sharded, model, rounding(torch.float32))  # in which those of the first backward were computed


@ranks(2)
def test_a_gather_by_hand_that_was_overtaken_is_done_again(world: World) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    handle = model.unshard(async_op=True)
    optimizer.step()
    handle.wait()
    by_hand = model.weight.detach().clone()
    model.reshard()
    assert torch.equal(by_hand, model.weight.full_tensor())
    stack, other = shard_stack(Stack(), world.mesh), shard_stack(Stack(), world.mesh)
    for _ in range(2):
        square(stack(batch(0))).backward()
    handle = stack.blocks[1].unshard(async_op=True)
    other(batch(0))
    handle.wait()
    assert type(stack.blocks[1].up.weight) is nn.Parameter
    stack.blocks[1].reshard()


@pytest.mark.parametrize("which", ["head.bias", "blocks.2.norm.weight", "inp.weight"])
@ranks(1, 2)
def test_freezing_between_forward_and_backward(world: World, which: str) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh, reshard_after_forward=True)
    for step in range(2):
        losses = square(sharded(world.mine(batch(step)))), square(model(batch(step)))
        for m in (sharded, model):
            m.get_parameter(which).requires_grad_(step == 1)
        for loss in losses:
            loss.backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(2)
def test_freezing_without_zero_grad(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step in range(3):
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        for m in (sharded, model):
            m.head.bias.requires_grad_(False)
    assert_same_grads(sharded, model)


@pytest.mark.parametrize("which", ["head", "blocks.1.up"])
@pytest.mark.parametrize("warm", [True, False])
@ranks(1, 2)
def test_a_refused_parameter_can_be_put_right(world: World, which: str, warm: bool) -> None:
    """The error was right, but the unit stayed half gathered for ever after."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    if warm:
        square(sharded(world.mine(batch(9)))).backward()
        sharded.zero_grad()
    owner = sharded.get_submodule(which)
    good, owner.weight = owner.weight, nn.Parameter(torch.zeros(50, 4))
    for _ in range(2):
        with pytest.raises(fullshard.StateError, match="Expected parameter .*weight. of unit .* as fully_shard"):
            sharded(batch(0))
    owner.weight = good
    for step in range(2):
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()


@ranks(1)
def test_asking_for_the_state_dict_in_the_midst_of_backward_is_refused_by_name(world: World) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), mesh=world.mesh)
    refused: list[str] = []

    def ask(grad: Tensor) -> None:
        for call in (model.state_dict, model.reshard, model.double):
            with pytest.raises(fullshard.StateError) as caught:
                call()
            refused.append(str(caught.value))

    model[1].register_forward_hook(lambda m, a, out: (out.register_hook(ask), None)[1])
    model(torch.ones(2, 4)).sum().backward()
    assert [text.split(" was ")[0] for text in refused] == ["state_dict()", "reshard()", "moving or casting"]
    assert all("inside the backward of unit 'Sequential'" in text for text in refused)


@ranks(2)
def test_a_rank_that_brings_only_accumulated_gradients_sends_the_same_message(world: World) -> None:
    mp = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    comm = fullshard.CommPolicy(direct_min_bytes=0)

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, use: bool) -> Tensor:
            x = self.always(x)
            return self.expert(x) if use else x

    model = fully_shard(Expert(), mesh=world.mesh, mp_policy=mp, comm_policy=comm)
    with model.accumulate():
        model(torch.ones(2, 8), world.rank == 0).sum().backward()
    model(torch.ones(2, 8), False).sum().backward()
    assert torch.isfinite(model.expert.weight.grad.full_tensor()).all()


@ranks(1, 2)
def test_an_interrupt_in_forward_leaves_nothing_running(world: World) -> None:
    """KeyboardInterrupt passes by torch's forward hooks."""
    model = shard_stack(Stack(), world.mesh)
    reference = copy.deepcopy(Stack())
    reference.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for then in ("state_dict", "reshard", "forward"):
        handle = model.head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        handle.remove()
        getattr(model, then)() if then != "forward" else model(batch(0))
        assert all(hasattr(p, "device_mesh") for p in model.parameters())
    square(model(world.mine(batch(1)))).backward()
    square(reference(batch(1))).backward()
    assert_same_grads(model, reference)


@pytest.mark.parametrize("backward", [False, True])
@ranks(2, 3)
def test_an_interrupt_while_a_message_is_awaited(world: World, backward: bool) -> None:
    """Where Ctrl-C comes mostly. What has arrived by then nobody knows, so nothing may be freed that a message still fills,
    and what raises later must not be the same KeyboardInterrupt again."""
    model = shard_stack(Stack(), world.mesh, check_policy=CheckPolicy(patience=0.2))
    square(model(world.mine(batch(0)))).backward()
    waiter, here = unit_of(model).runtime.communicator.wait_state, os.getpid()
    store = _torch.own_store(_torch.default_store(), f"interrupt {backward}")

    def interrupt() -> None:
        until(lambda: waiter.call is not None)
        time.sleep(0.1)
        os.kill(here, signal.SIGINT)
        store.set("sent", "")

    def late() -> None:
        if world.rank:
            until(lambda: store.check(["sent"]))
        else:
            threading.Thread(target=interrupt).start()

    def step() -> None:
        loss = square(model(world.mine(batch(1))))
        if backward:
            late()
        loss.backward()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background ignores it
    if not backward:
        late()
    with pytest.MonkeyPatch.context() as patch, pytest.raises((KeyboardInterrupt, StateError)) as caught:
        if not world.rank:  # nor may it take its time to end
            patch.setattr(Watchdog, "describe_peers", lambda *_: pytest.fail("the others were asked where they are"))
        step()
    signal.signal(signal.SIGINT, before)
    assert (caught.type is KeyboardInterrupt) == (world.rank == 0)
    if not world.rank:  # which tells the others where this rank is, or they wait until gloo gives up
        with contextlib.suppress(StateError):
            fullshard.any_failed(world.mesh, caught.value)


@ranks(2, 3)
def test_asking_whether_the_step_failed_between_its_backwards_changes_nothing(world: World) -> None:
    """Sums over replicas may be put off then."""
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    plain = Stack()
    sharded = shard_stack(copy.deepcopy(plain), mesh)
    for which in (0, 1):
        sharded.set_is_last_backward(which == 1)
        square(sharded(world.mine(batch(which)))).backward()
        square(plain(batch(which))).backward()
        assert not fullshard.any_failed(mesh)
    assert_same_grads(sharded, plain)


@ranks(2)
def test_a_move_that_moves_nothing_keeps_the_graph_and_the_attributes(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    model.head.weight.tag = "kept"
    loss = square(model(batch(0)))
    model.to("cpu")
    loss.backward()
    model.double()
    assert model.head.weight.tag == "kept"


@ranks(2)
def test_two_optimizers_on_two_halves_of_a_unit(world: World) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return square(self.a(x)), square(self.b(x))

    model = Halves()
    sharded = fully_shard(copy.deepcopy(model), mesh=world.mesh, reshard_after_forward=True)
    for m, part in ((sharded, world.mine), (model, lambda x: x)):
        optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (m.a, m.b)]
        for step in range(3):
            for loss, optimizer in zip(m(part(batch(step))), optimizers):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(sharded, model)


@ranks(2)
def test_tied_weights_load_by_assignment(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    source = copy.deepcopy(model)
    with torch.no_grad():
        source[0].weight.fill_(3.0)
    fully_shard(model, mesh=world.mesh)
    for loaded in (source, model):
        model.load_state_dict(loaded.state_dict(), assign=True)
        assert model[0].weight is model[1].weight
        assert model[0].weight.full_tensor().eq(3.0).all()


@ranks(2)
def test_a_list_unit_of_which_only_a_part_ran(world: World) -> None:
    for reshard in (True, False, None):
        model = Stack()
        sharded = copy.deepcopy(model)
        fully_shard([sharded.blocks[0], sharded.head], mesh=world.mesh, reshard_after_forward=reshard)
        fully_shard(sharded, mesh=world.mesh)
        for m, part in ((sharded, world.mine), (model, lambda x: x)):
            m.forward = lambda x, m=m: m.blocks[0](m.inp(x))
            square(m(part(batch(0)))).backward()
        assert all(hasattr(p, "device_mesh") for p in sharded.parameters())
        assert_same_grads(sharded, model)


@ranks(2)
def test_deleting_a_model_while_it_is_being_gathered(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    runtime = model._fullshard_unit.runtime
    model.blocks[0].unshard(async_op=True)
    del model
    other = shard_stack(Stack(), world.mesh)
    assert not runtime.gathering
    square(other(batch(0))).backward()


@ranks(2)
def test_freezing_while_only_one_rank_holds_a_graph(world: World) -> None:
    """Regrouping parameters by trainability depended on whether a graph was alive, so ranks could disagree on messages."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    for step in range(3):
        out = sharded(world.mine(batch(9)))
        if world.rank:
            out = None
        for m in (sharded, model):
            m.head.bias.requires_grad_(step == 1)
            m.blocks[0].up.requires_grad_(step != 1)
        square(sharded(world.mine(batch(step)))).backward()
        square(model(batch(step))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad(), model.zero_grad()
        del out


@ranks(1, 2)
def test_an_inner_unit_gathered_by_hand_before_the_optimizer_stepped(world: World) -> None:
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (sharded, model)]
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    sharded.blocks[1].unshard(async_op=True)
    for optimizer in optimizers:
        optimizer.step()
    assert_near(sharded(batch(1)), model(batch(1)), "output")


@ranks(1, 2)
def test_casting_a_unit_that_stayed_gathered_after_a_forward_that_nobody_used(world: World) -> None:
    for handle in (False, True):
        model = fully_shard(nn.Linear(4, 4), mesh=world.mesh)
        model(torch.ones(2, 4))
        if handle:
            model.reshard()
            model.unshard(async_op=True)
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        out = model(torch.ones(2, 4).double())
        assert out.dtype == torch.float64 and out.abs().max() == 0
        out.sum().backward()
        assert model.weight.grad.full_tensor().eq(2.0).all()


@ranks(2)
def test_hooks_do_not_fire_for_a_backward_that_raised(world: World) -> None:
    """The gradient that had been called discarded arrived in the next forward, after zero_grad()."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for layer in model:
        fully_shard(layer, mesh=world.mesh)
    fired: list[int] = []
    model[1].weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))

    def boom(grad: Tensor) -> None:
        raise ValueError

    x = torch.randn(4, 512, requires_grad=True) * 1
    x.register_hook(boom)
    with pytest.raises(ValueError):
        model(x).sum().backward()
    model.zero_grad()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model(torch.randn(4, 512))
    assert model[1].weight.grad is None and not fired


@pytest.mark.proves("32a")
@ranks(2)
def test_skipping_a_batch_whose_backward_raised(world: World) -> None:
    model = Unlucky()
    sharded = shard_stack(model, world.mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    before = [p.full_tensor().clone() for p in sharded.parameters()]
    sharded.where = "backward 0"
    with pytest.raises(RuntimeError):
        square(sharded(batch(0))).backward()
    with pytest.warns(UserWarning, match="The last backward raised after it had reached"):
        optimizer.step()
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, sharded.parameters()))


# --- replicas, deferred sums, and what is left of a step that failed ----------------------------------------------------------


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Slow(torch.autograd.Function):
    """A collective of the caller's on the replicas, on ranks of which one is late."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, rank: int) -> torch.Tensor:
        ctx.group, ctx.rank = group, rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(0.02 if ctx.rank == 3 else 0.0)
        torch.distributed.all_reduce(torch.ones(1), group=ctx.group)
        return grad, None, None


class Gossip(Stack):
    def forward(self, x: torch.Tensor, group: Any = None, rank: int = 0) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x = x if group is None else Slow.apply(x, group, rank)
        return self.head(x)


@ranks(4)
def test_sums_over_replicas_never_begin_when_a_rank_happens_to_be_ready(world: World) -> None:
    """The sum began in the moment a poll found the reduce-scatter done: before the caller's own collective on some ranks."""

    class AllToAll(GlooCollectives):
        def _reduce_scatter_pair(self, outs: Any, fulls: Any, scale: float) -> StartedWork:
            received = [torch.empty_like(full) for full in fulls]
            works = [dist.all_to_all_single(a, b, group=self._group, async_op=True) for a, b in zip(received, fulls)]

            def add() -> None:
                for parts, out in zip(received, outs):
                    torch.sum(parts.view(2, -1), 0, out=out).mul_(scale)

            return StartedWork(works, add)

    mesh = hybrid()
    model = Gossip()
    sharded = shard_stack(copy.deepcopy(model), mesh, comm_policy=fullshard.CommPolicy(collectives=AllToAll))
    for step in range(5):
        square(sharded(world.mine(batch(step)), mesh.get_group("replicate"), world.rank)).backward()
        square(model(batch(step))).backward()
    assert_same_grads(sharded, model)


@pytest.mark.parametrize("how", ["deferred", "kept", "not last"])
@ranks(4)
def test_gradients_not_delivered_are_never_lost_and_never_left_over(world: World, how: str) -> None:
    """Making groups anew dropped what was deferred; zero_grad() and reset_iter_state() left what was on its way."""

    def begin(sharded: nn.Module, on: bool) -> None:
        if how == "deferred":
            sharded.set_requires_all_reduce(not on)
        elif how == "kept":
            sharded.set_requires_gradient_sync(not on)
        else:
            sharded.set_is_last_backward(not on)

    for forget in ("zero_grad", "reset_iter_state"):
        model = Stack()
        sharded = shard_stack(copy.deepcopy(model), hybrid())
        begin(sharded, True)
        square(sharded(world.mine(batch(7)))).backward()
        if how != "kept":
            with pytest.raises(StateError, match="came while gradients of unit '.*' are reduced, but not in .grad yet"):
                sharded.double()
            with pytest.raises(StateError, match=r"set_separate_reduce_scatter_group\(\) came while gradients"):
                sharded.set_separate_reduce_scatter_group()
        getattr(sharded, forget)()
        begin(sharded, False)
        square(sharded(world.mine(batch(0)))).backward()
        square(model(batch(0))).backward()
        assert_same_grads(sharded, model)


@pytest.mark.proves("32a")
@ranks(1, 2)
def test_a_backward_that_raised_is_over_for_the_next_forward_though_the_engine_drops_it_late(world: World) -> None:
    """A thread of the engine holds it after the caller has the exception, on accelerators always: the next forward took the unit for
    gathered, and sent a message less than the other rank."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), world.mesh)
    running = unit_of(sharded).runtime.backward
    held: list[Any] = []

    def fail(*_: object) -> None:
        held.append(running._end())
        raise ZeroDivisionError

    for another_thread in (False, True):
        handle = sharded.blocks[0].down.register_full_backward_pre_hook(fail)
        loss = square(sharded(world.mine(batch(1))))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        if not another_thread:
            threading.Timer(0.3 * (world.rank == world.size - 1), held.clear).start()
        else:
            with (
                mock.patch("fullshard.core.runtime.PATIENCE", 0.2),
                pytest.raises(StateError, match=r"while a backward of another thread runs, which has reached .*'blocks\.0'"),
            ):
                sharded(world.mine(batch(0)))
            held.clear()
        with pytest.warns(UserWarning, match="The last backward raised after it had reached"):
            square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@pytest.mark.parametrize("how", ["set_requires_all_reduce", "set_requires_gradient_sync", "set_is_last_backward"])
@ranks(4)
def test_a_failed_microbatch_takes_the_whole_sum_with_it_or_nothing(world: World, how: str) -> None:
    """Units that backward had reached kept the failed microbatch, the others did not."""
    model = Stack()
    sharded = shard_stack(copy.deepcopy(model), hybrid())
    setter = getattr(sharded, how)
    setter(False)
    square(sharded(world.mine(batch(1)))).backward()
    loss = square(sharded(world.mine(batch(2))))
    handle = sharded.blocks[0].down.register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = square(sharded(world.mine(batch(2))))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    setter(True)
    with pytest.warns(UserWarning, match="are discarded, together with the gradients that earlier backwards of the step kept"):
        square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@ranks(4)
def test_hooks_get_sums_to_which_those_over_shards_of_earlier_microbatches_are_added(world: World) -> None:
    """With several reductions in flight, the hook of the only unit came before the earlier sum over shards was there."""
    model = nn.Linear(5, 6)
    policy = fullshard.CommPolicy(reductions_in_flight=4)
    sharded = fullshard.fully_shard(copy.deepcopy(model), mesh=hybrid(), comm_policy=policy)
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in sharded.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.full_tensor()}))
    sharded.set_is_last_backward(False)
    for micro in range(3):
        sharded.set_requires_all_reduce(micro == 2)
        square(sharded(world.mine(batch(micro)))).backward()
    for micro in range(3):
        square(model(batch(micro))).backward()
    for name, parameter in model.named_parameters():
        assert_near(seen[name], parameter.grad, name, rounding(torch.float32))


@ranks(4)
def test_a_step_after_a_deferred_backward_of_one_unit_is_refused(world: World) -> None:
    sharded = fullshard.fully_shard(nn.Linear(5, 3), mesh=hybrid())
    sharded.set_requires_all_reduce(False)
    square(sharded(world.mine(batch(0)))).backward()
    with pytest.raises(StateError, match="reduced over shards, but not over replicas"):
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()


@pytest.mark.proves("8a")
@ranks(2)
def test_clipping_gradients_of_several_dtypes_scales_all_alike(world: World) -> None:
    """One coefficient was rounded to the dtype of the first gradient."""
    model = nn.Sequential(nn.Linear(5, 7).bfloat16(), nn.Linear(5, 7), nn.Linear(5, 7).double())
    sharded = fullshard.fully_shard(copy.deepcopy(model), mesh=world.mesh)
    sum(square(layer(batch(0).to(layer.weight.dtype))).double() for layer in model).backward()
    for p, q in zip(sharded.parameters(), model.parameters()):
        p.grad = torch.distributed.tensor.distribute_tensor(q.grad.clone(), world.mesh, [torch.distributed.tensor.Shard(0)])
    before = [q.grad.double().clone() for q in model.parameters()]
    norm = torch.stack([g.norm() for g in before]).norm()
    found = fullshard.clip_grad_norm_(sharded.parameters(), 0.1)
    assert abs(found.item() / norm.item() - 1) <= rounding(torch.float32)
    for p, g in zip(sharded.parameters(), before):
        want = g * (0.1 / norm)
        assert_near(p.grad, want, str(p.dtype), rounding(p.dtype, torch.float32))
    with pytest.raises(ValueError, match="takes a norm_type > 0 or inf, got 0"):
        fullshard.clip_grad_norm_(sharded.parameters(), 1.0, 0)


@ranks(2, 3, 4)
def test_complex_parameters_travel_as_pairs(world: World) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.weight.t()).abs()

    model = Waves()
    sharded = fullshard.fully_shard(copy.deepcopy(model), mesh=world.mesh)
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    got, want = sharded.weight.grad.full_tensor(), model.weight.grad
    assert (got - want).abs().max() <= rounding(got.dtype) * want.abs().max()


@pytest.mark.parametrize("where", ["start", "wait"])
@ranks(1)
def test_memory_that_messages_may_still_arrive_in_is_not_freed(world: World, where: str) -> None:
    """A gather failed after it had asked for messages; its storage was freed, and they would have arrived in others' memory."""
    asked: list[torch.Tensor] = []
    failing: list[str] = []

    class Asked:
        def wait(self) -> None:
            if failing:
                raise RuntimeError("the peer is gone")

        def is_completed(self) -> bool:
            return True

    class Partly(SingleRank):
        def gatherer(self, outs: Any, shards: Any) -> Any:
            gather = super().gatherer(outs, shards)

            def start() -> StartedWork:
                gather()
                asked.extend(outs)
                if failing == ["start"]:
                    raise RuntimeError("the peer is gone")
                return StartedWork([Asked()])

            return start

    model = Stack()
    sharded = shard_stack(
        copy.deepcopy(model), world.mesh, comm_policy=fullshard.CommPolicy(collectives=lambda group: Partly())
    )
    square(sharded(batch(0))).backward()
    sharded.zero_grad()
    asked.clear()
    failing.append(where)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        sharded(batch(1))
    assert asked
    for out in asked:
        assert out.untyped_storage().size() >= out.numel() * out.itemsize
        out.fill_(float("nan"))  # what arrives late
    failing.clear()
    square(sharded(batch(2))).backward()
    square(model(batch(2))).backward()
    assert_same_grads(sharded, model)


class OutOfMemory:
    """While it is entered, the k-th allocation of a full storage or of a reduction raises."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __enter__(self) -> OutOfMemory:
        self._grow, self._reduce = unsharded.FlatBuffer.allocate, reduction.Reduction.__init__
        for owner, name, real in (
            (unsharded.FlatBuffer, "allocate", self._grow),
            (reduction.Reduction, "__init__", self._reduce),
        ):
            setattr(owner, name, self._failing(real))
        return self

    def _failing(self, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.seen += 1
            if self.seen == self.at:
                raise torch.OutOfMemoryError("no memory left")
            return real(*args, **options)

        return call

    def __exit__(self, *_: object) -> None:
        unsharded.FlatBuffer.allocate, reduction.Reduction.__init__ = self._grow, self._reduce


@pytest.mark.proves("32a")
@pytest.mark.parametrize(("reshard", "states"), [(True, ZERO3), (None, ZERO3), (True, HFSDP)])
@ranks(2)
def test_running_out_of_memory_anywhere_leaves_the_next_step_right(
    world: World, reshard: bool | None, states: StateSharding
) -> None:
    """Elsewhere a gather that found no memory leaves its unit half gathered."""
    model, mesh = Stack(2), world.mesh
    if states == HFSDP:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    options = {"reshard_after_forward": reshard, "check_policy": CheckPolicy(patience=0.1), "states": states}
    sharded = shard_stack(copy.deepcopy(model), mesh, **options)
    with OutOfMemory(0) as counted:
        square(sharded(world.mine(batch(0)))).backward()
    sharded.zero_grad()
    square(model(batch(1))).backward()
    assert counted.seen >= 8
    for at in range(1, counted.seen + 1):
        with torch.no_grad():  # so that all hops run again
            for parameter in sharded.parameters():
                parameter.mul_(1.0)
        with OutOfMemory(at), pytest.raises(torch.OutOfMemoryError):
            square(sharded(world.mine(batch(0)))).backward()
        assert all(p.grad is None for p in sharded.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the last backward raised
            square(sharded(world.mine(batch(1)))).backward()
        assert_same_grads(sharded, model)
        sharded.zero_grad()


@pytest.mark.proves("32a")
@pytest.mark.parametrize("at", [1, 5, 8])
@ranks(2)
def test_a_rank_that_runs_out_of_memory_alone_is_named(world: World, at: int) -> None:
    sharded = shard_stack(Stack(2), world.mesh, check_policy=CheckPolicy(patience=0.1))
    with OutOfMemory(at if world.rank == 0 else 0), pytest.raises((torch.OutOfMemoryError, StateError)) as caught:
        square(sharded(world.mine(batch(0)))).backward()
        sharded(world.mine(batch(1)))
    assert world.rank == 0 or "rank 0" in str(caught.value), caught.value


class Towers(nn.Module):
    """Two units, of which a batch runs some; the root has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x


def towers(mesh: DeviceMesh, **options: Any) -> Any:
    """All weights are 1."""
    model = Towers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    for module in (model.text, model.image, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def whole(tensor: Any) -> Any:
    return None if tensor is None else tensor.full_tensor()


KEPT = [{}, {"check_policy": CheckPolicy(heartbeat=False)}, {"check_policy": CheckPolicy(every=3)}]


@pytest.mark.proves("22b")
@pytest.mark.parametrize("options", KEPT, ids=["heartbeat", "no heartbeat", "every third"])
@pytest.mark.parametrize("none", [False, True])
@ranks(2, 3)
def test_what_a_unit_kept_is_reduced_though_the_last_microbatch_runs_another_unit(
    world: World, none: bool, options: dict[str, Any]
) -> None:
    """Experts, towers: the first microbatch ran `text` without communication, the last one `image`. The gradient of `text`
    stayed on each rank: it was missing in this step, and leaked into the next one."""
    model = towers(world.mesh, **options)
    x = torch.ones(1, 2)
    model(x, "text", "image").sum().backward()
    for _ in range(2):
        model.zero_grad(set_to_none=none)
        model.set_requires_gradient_sync(False)
        model(x, "text").sum().backward()
        model.set_requires_gradient_sync(True)
        model(x, "image").sum().backward()
        assert torch.equal(whole(model.text.weight.grad), torch.ones(2, 2))
        assert torch.equal(whole(model.image.weight.grad), torch.ones(2, 2))
        assert all(
            parameter.local_grad is None for module in (model.text, model.image) for parameter in unit_of(module).parameters
        )


@pytest.mark.proves("22b")
@pytest.mark.parametrize("none", [False, True])
@ranks(2, 3)
def test_what_one_rank_alone_kept_is_reduced_on_all_that_join(world: World, none: bool) -> None:
    """Only rank 0 has a batch for `text` in the microbatch without communication: the others join."""
    model = towers(world.mesh, comm_policy=CommPolicy(prefetch_bytes=0))
    x = torch.ones(1, 2)
    model(x, "text", "image").sum().backward()
    for step in range(3):
        model.zero_grad(set_to_none=none)
        with model.accumulate():
            (model.text(x) if world.rank == 0 else model.text.join()).sum().backward()
        model(x, "image").sum().backward()
        assert torch.allclose(whole(model.text.weight.grad), torch.ones(2, 2) / world.size), step
        assert torch.allclose(whole(model.image.weight.grad), torch.ones(2, 2)), step


@ranks(2)
def test_ranks_that_kept_gradients_of_other_units_diverge_as_the_step_ends(world: World) -> None:
    """All parameters stay gathered, so nothing was sent in the microbatch that differed."""
    model = towers(world.mesh, comm_policy=CommPolicy(prefetch_bytes=0))
    x = torch.ones(1, 2)
    with model.resident(), model.accumulate():
        model(x, "text" if world.rank == 0 else "image").sum().backward()
    failure = None
    try:
        model(x, "image").sum().backward()
        model(x, "image")
    except StateError as caught:
        failure = caught
    assert "reduce_scatter of 'text'" in str(failure)


@pytest.mark.proves("22b")
@ranks(2)
def test_sums_over_replicas_that_were_put_off_happen_though_the_last_microbatch_runs_another_unit(world: World) -> None:
    """`set_requires_all_reduce(False)`: the gradient of `text` was summed over its shards only, and stayed there."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = towers(mesh)
    x = torch.ones(1, 2) * (world.rank + 1)
    for _ in range(2):
        model.zero_grad()
        model.set_requires_all_reduce(False)
        model(x, "text").sum().backward()
        model.set_requires_all_reduce(True)
        model(x, "image").sum().backward()
        assert torch.equal(whole(model.text.weight.grad), torch.full((2, 2), 1.5))
        assert torch.equal(whole(model.image.weight.grad), torch.full((2, 2), 1.5))


@ranks(2)
def test_what_other_models_kept_stays_kept(world: World) -> None:
    """Two models that accumulate in turn, as in adversarial training: a backward of one ends no step of the other."""
    one, other = towers(world.mesh), towers(world.mesh)
    x = torch.ones(1, 2)
    for _ in range(2):
        with one.accumulate():
            one(x, "text").sum().backward()
        other(x, "image").sum().backward()
        assert one.text.weight.grad is None and unit_of(one.text).parameters[0].local_grad is not None
    one(x, "image").sum().backward()
    assert torch.equal(whole(one.text.weight.grad), torch.full((2, 2), 2.0))


@pytest.mark.proves("22b")
@ranks(2)
def test_an_optimizer_does_not_step_over_gradients_that_are_only_kept(world: World) -> None:
    """There was a gradient of zeros already, so nobody noticed that the one of this step was still kept on each rank."""
    model = towers(world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2)
    model(x, "text", "image").sum().backward()
    model.zero_grad(set_to_none=False)
    with model.accumulate():
        model(x, "text").sum().backward()
    with pytest.raises(StateError, match=r"the gradient of 'weight' in unit 'text' is only kept on each rank"):
        optimizer.step()
    model.zero_grad()
    model(x, "image").sum().backward()
    assert model.text.weight.grad is None


@ranks(2)
def test_what_one_unit_alone_kept_is_reduced_by_the_next_backward_that_may(world: World) -> None:
    """Only `text` does without communication, in a backward that reduces `image`; the next one does not enter `text`."""
    model = towers(world.mesh)
    x = torch.ones(1, 2)
    model.text.set_requires_gradient_sync(False)
    model(x, "image", "text").sum().backward()
    assert model.text.weight.grad is None and model.image.weight.grad is not None
    model.text.set_requires_gradient_sync(True)
    model(x, "image").sum().backward()
    assert torch.equal(whole(model.text.weight.grad), torch.full((2, 2), 2.0))  # of an input of twos
    assert torch.equal(whole(model.image.weight.grad), torch.full((2, 2), 3.0))


@ranks(2)
def test_what_no_sync_kept_is_reduced_though_the_last_microbatch_runs_another_unit(world: World) -> None:
    """The same with FSDP1's wrapper and its `no_sync()`."""
    model: Any = Towers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model.text, model.image = (FSDP(tower, device_mesh=world.mesh) for tower in (model.text, model.image))
    model = FSDP(model, device_mesh=world.mesh)
    x = torch.ones(1, 2)
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(x, "text").sum().backward()
        model(x, "image").sum().backward()
        for tower in (model.module.text, model.module.image):
            assert torch.equal(whole(tower.module.weight.grad), torch.ones(2, 2))


@ranks(2)
def test_a_backward_that_raised_discards_what_was_kept_and_the_next_step_is_right(world: World) -> None:
    """What was kept of `text`, which that backward did not enter, went with it: of a step, all or nothing."""
    model = towers(world.mesh)
    x = torch.ones(1, 2)
    with model.accumulate():
        model(x, "text").sum().backward()
    with pytest.raises(RuntimeError, match="out of luck"):
        Raises.apply(model(x, "image")).sum().backward()
    fullshard.any_failed(world.mesh, True)
    model.zero_grad()
    model(x, "image").sum().backward()
    assert model.text.weight.grad is None
    assert torch.equal(whole(model.image.weight.grad), torch.ones(2, 2))


@ranks(2)
def test_an_ignored_parameter_built_on_meta_stays_ignored(world: World) -> None:
    """torch makes a new Parameter of one on meta that gets memory; ours had been marked on the old one, so the model that the
    caller had sharded with `ignored_params` was refused in its first forward, as if the parameter had been added behind our back.
    """

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    with torch.device("meta"):
        model = Scaled()
    fully_shard(model, mesh=world.mesh, ignored_params={model.scale})
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    assert torch.equal(model(torch.ones(2, 3)), torch.full((2, 3), 4.0))


@pytest.mark.proves("8f")
@ranks(2)
def test_a_forward_that_raised_leaves_nothing_gathered_for_the_next_one(world: World) -> None:
    """The outermost unit keeps its parameters for backward. Its forward raised on all ranks, so none came, and they stayed: when
    one rank then loaded other weights and another did not, the latter computed its next forward with the old ones of both.
    """
    model = shard_stack(Stack(), world.mesh)

    def fail(*_: Any) -> None:
        raise KeyError("inside")

    hook = model.head.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(world.mine(batch(0)))
    hook.remove()
    units = [module._fullshard_unit for module in (model, *model.blocks)]
    assert [unit.residency.value for unit in units] == ["sharded"] * 4
    with fullshard.counting(model) as messages:
        square(model(world.mine(batch(0)))).backward()
    assert [message.kind for message in messages].count("all_gather") == 7, "as a first step"


@ranks(3)
def test_a_default_device_does_not_move_what_the_host_keeps(world: World) -> None:
    """Under `torch.set_default_device("cuda")`, memory that the host keeps was made on the device: heartbeats and offloaded gradients
    raised or lay there, and the bytes of a checkpoint went by way of it. Under "meta" nothing of it has values.
    """
    whole, mesh = Stack(), mesh_of_one_shard(world)
    models = [shard_stack(copy.deepcopy(whole), mesh) for _ in range(2)]
    inputs, folder = batch(0), world.folder("weights")
    for one, device in zip(models, ("cpu", "meta")):
        with torch.device(device):
            square(one(inputs)).backward()
            fullshard.clip_grad_norm_(one.parameters(), 0.1)
            save_weights(one, folder / device)
            load_weights(one, folder / "cpu")
    for one, other in zip(*(model.parameters() for model in models)):
        assert torch.equal(one.to_local(), other.to_local()) and torch.equal(one.grad.to_local(), other.grad.to_local())
    files = [sorted((folder / device).iterdir()) for device in ("cpu", "meta")]
    assert [one.read_bytes() for one in files[0]] == [one.read_bytes() for one in files[1]]


def mesh_of_one_shard(world: World) -> DeviceMesh:
    """Replicas only, whose sums over three ranks gloo's lanes make in two stages."""
    return init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))


@ranks(2)
def test_a_profiler_that_counts_memory_may_stop_while_a_gather_is_in_flight(world: World) -> None:
    """torch's own messages corrupt the heap then: their profiler records outlive the profiler."""
    model = shard_stack(Stack(), world.mesh)
    for _ in range(20):
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        profile.start()
        handle = model.unshard(async_op=True)
        profile.stop()
        del profile
        filler = [torch.empty(10 * size) for size in range(300)]
        handle.wait()
        model.reshard()
        del filler


@ranks(2)
def test_saves_streams_averages_and_loads_name_a_parameter_that_was_assigned(world: World) -> None:
    """They listed it as "a DTensor that no unit manages"."""
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=world.mesh)
    model(torch.ones(2, 4))
    model.weight = nn.Parameter(model.weight.detach().clone() + 1)
    for call in (
        lambda: save_weights(model, world.folder("assigned")),
        lambda: fullshard.iter_full(model),
        lambda: fullshard.EMA(model, decay=0.5),
        lambda: load_weights(model, world.folder("assigned")),
        lambda: fullshard.full_params(model).__enter__(),
        lambda: fullshard.undo(model),
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(StateError, match="Expected parameter 'weight' of unit .* as fully_shard"):
            call()


# --- what a search for faults found --------------------------------------------------------------------------------------


def other_streams(device: torch.device) -> Any:
    return HostStream()


@ranks(2)
def test_units_with_streams_of_their_own_are_found_beside_others(world: World) -> None:
    """Units were listed by their number, which is unique in one runtime only: of two units one was left out of every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module, policy in zip(model, (CommPolicy(), CommPolicy(lanes=other_streams))):
        fully_shard(module, mesh=world.mesh, comm_policy=policy)
    assert len({unit_of(module).runtime for module in model}) == 2 and len(units_of(model, True)) == 2
    with fullshard.counting(model) as messages, fullshard.FSDPModule.accumulate(model):
        model(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters()), "accumulate() reaches both"
    assert sum(message.kind == "all_gather" for message in messages) == 2, "and so does counting()"
    with fullshard.full_params(model, write=False):
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@ranks(2)
def test_tensor_parallel_ranks_draw_equal_random_numbers(world: World) -> None:
    """materialize() agreed about the seed over data-parallel ranks only, so replicated parameters differed between others."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, placement in (("rows", Shard(0)), ("scale", Replicate())):
                tensor = distribute_tensor(torch.empty(4, device="meta"), mesh["tp"], [placement])
                self.register_parameter(name, nn.Parameter(tensor))

        def reset_parameters(self) -> None:
            for parameter in self.parameters():
                nn.init.normal_(parameter)

    model = fully_shard(Model(), mesh=mesh["dp"])
    torch.manual_seed(world.rank)
    fullshard.materialize(model)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, [parameter.to_local().tolist() for parameter in model.parameters()])
    assert found[0][1] == found[1][1] and found[0][0] != found[1][0]


@ranks(1, 2)
def test_a_step_of_sgd_that_raised_leaves_the_momenta_of_torch(world: World) -> None:
    """They stayed under local tensors: state_dict() raised a KeyError, and the next step took them for its own."""
    from torch.optim import sgd

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    sharded = fully_shard(copy.deepcopy(plain), mesh=world.mesh)
    raises = [False, True, False, False, False, False]
    whole = sgd.sgd

    def failing(*args: Any, **kwargs: Any) -> None:
        if calls.pop(0):
            raise torch.OutOfMemoryError("none left")
        whole(*args, **kwargs)

    for model in (sharded, plain):
        calls = list(raises)
        optimizer = torch.optim.SGD([{"params": [layer.weight]} for layer in model], lr=0.1, momentum=0.9, foreach=False)
        with mock.patch.object(sgd, "sgd", failing):
            for step in range(3):
                (model(torch.ones(2, 4)).sum() * (step + 1)).backward()
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    optimizer.state_dict()
                optimizer.zero_grad()
        for layer in model:
            layer.momentum = optimizer.state[layer.weight]["momentum_buffer"]
    for one, other in zip(sharded, plain):
        assert_near(full(one.momentum), other.momentum, "momentum", rounding(torch.float32))
        assert_near(full(one.weight), other.weight, "weight", rounding(torch.float32))


@ranks(2)
def test_gradients_as_values_are_those_of_one_backward(world: World) -> None:
    """grad() returned gradients of other backwards with its own, and lost them, or left its own for the next backward."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 3), mesh=world.mesh)
    loss = lambda: model(torch.ones(2, 4)).sum()
    model.set_is_last_backward(False)
    loss().backward()
    model.set_is_last_backward(True)
    with pytest.raises(StateError, match="gradients of unit 'Linear' are reduced, but not in .grad yet"):
        fullshard.grad(loss(), [model.weight])
    model.zero_grad()
    for enter in (
        model.accumulate,
        lambda: setting(model.set_is_last_backward, False, True),
        lambda: setting(model.set_manual_backward_finalization, True, False),
    ):
        with enter(), pytest.raises(StateError, match="does not set gradients in this backward"):
            fullshard.grad(loss(), [model.weight])
    model.bias.requires_grad_(False)
    with model.accumulate():
        loss().backward()
    model.bias.requires_grad_(True)
    with pytest.raises(
        StateError, match="gradients of unit 'Linear' are accumulated but not reduced .on this rank: of 'weight'"
    ):
        fullshard.grad(loss(), [model.bias])


@contextlib.contextmanager
def setting(setter: Any, inside: bool, outside: bool) -> Iterator[None]:
    setter(inside)
    try:
        yield
    finally:
        setter(outside)


@ranks(2)
def test_a_scalar_keeps_its_gradient_from_before_sharding(world: World) -> None:
    """It had one dim more than the parameter, which no optimizer takes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    torch.manual_seed(0)
    model = Scaled()
    model(torch.ones(1, 4)).sum().backward()
    fully_shard(model, mesh=world.mesh)
    assert model.scale.grad.to_local().shape == model.scale.to_local().shape == ()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind(model.parameters(), lr=0.1).step()


@ranks(1)
def test_a_move_that_raises_keeps_all_gradients(world: World) -> None:
    """Those with a grad_dtype of their own were gone, so this rank alone would have stepped without them."""
    model = fully_shard(nn.Linear(4, 4), mesh=world.mesh)
    model.weight.grad_dtype = torch.float64
    model(torch.ones(2, 4)).sum().backward()

    def fails(tensor: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model._apply(fails)
    assert model.weight.grad is not None and model.weight.grad.dtype is torch.float64 and model.bias.grad is not None


@ranks(2)
def test_votes_of_slices_of_a_mesh_are_one(world: World) -> None:
    """Each slice is a new object, and got a collective log and an entry of the watchdog for good."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    axis_of = importlib.import_module("fullshard.ext.any_failed")._axis_of
    assert not fullshard.any_failed(mesh["dp"])
    assert axis_of(mesh["dp"], 0) is axis_of(mesh["dp"], 0) is not axis_of(mesh["tp"], 0)


@ranks(1)
def test_an_asynchronous_generator_is_no_forward_method(world: World) -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        async def stream(self, x: Tensor) -> Any:
            yield self.layer(x)

    model = fully_shard(Streams(), mesh=world.mesh)
    with pytest.raises(ValueError, match="it is a generator or coroutine"):
        fullshard.register_fsdp_forward_method(model, "stream")


@ranks(2)
def test_a_parameter_added_before_an_evaluation_is_found_in_training(world: World) -> None:
    """The check ran in the first forward only, and not without gradients. Each rank then trained the parameter alone."""
    model = shard_stack(Stack(), world.mesh)
    model.head.extra = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        model(batch(0))
    with pytest.raises(StateError, match=r"Parameters \('head.extra'\) were added to unit"):
        model(batch(0))
    del model.head.extra
    square(model(batch(0))).backward()


@ranks(1, 2)
def test_resident_ends_for_all_units_though_one_was_written(world: World) -> None:
    """The units behind the one that raised stayed unsharded for good."""
    model = shard_stack(Stack(), world.mesh)
    units = units_of(model, recurse=True)
    with (
        pytest.raises(StateError, match="'up.weight' of unit 'blocks.1' cannot be resharded"),
        model.resident(),
        torch.no_grad(),
    ):
        model.blocks[1].up.weight.add_(1.0)
    left = [unit for unit in units if unit.residency.value != "sharded"]
    assert [unit.name for unit in left] == ["blocks.1"] and not any(unit.record.is_pinned for unit in units if unit not in left)
    model.blocks[1].reshard()
    with model.resident():
        square(model(world.mine(batch(0)))).backward()
    assert all(unit.residency.value == "sharded" for unit in units)


@ranks(1, 2)
def test_groups_that_cannot_be_built_again_leave_the_former_ones_in_use(world: World) -> None:
    """Some parameters were parts of a new flat shard, while forwards all-gathered the former one: writes had no effect."""
    model = nn.Linear(5, 3)
    model.bias.requires_grad_(False)  # so that there are two groups
    fully_shard(model, mesh=world.mesh)
    copies, copy_shards = [], ParamGroup.copy_shards

    def no_memory(group: ParamGroup, *args: Any) -> Any:
        copies.append(group)
        if len(copies) == 2:
            raise torch.OutOfMemoryError("none left")
        return copy_shards(group, *args)

    with mock.patch.object(ParamGroup, "copy_shards", no_memory), pytest.raises(torch.OutOfMemoryError):
        model.set_separate_reduce_scatter_group(True)
    with torch.no_grad():
        model.weight.zero_()
    assert_near(model(torch.ones(1, 5)), full(model.bias)[None], "output")


@ranks(1, 2)
def test_gradients_as_values_leave_other_gradients_alone_without_a_heartbeat(world: World) -> None:
    """Parameters outside of inputs= got zeros, with which AdamW decays them."""
    model = shard_stack(Stack(), world.mesh, check_policy=CheckPolicy(heartbeat=False))
    loss = square(model(world.mine(batch(0))))
    fullshard.grad(loss, [model.blocks[0].up.weight])
    assert all(parameter.grad is None for parameter in model.parameters())


@ranks(1, 2)
def test_no_closure_given_by_position_is_no_closure(world: World) -> None:
    """`step(None)` counted as one with a closure: it recorded writes to parameters without gradients."""
    model = shard_stack(Stack(), world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (group,) = unit_of(model.blocks[0]).groups
    model(batch(0))
    before = group.version()
    for arguments in ((None,), ()):
        optimizer.step(*arguments)
    assert group.version() == before


@ranks(2)
def test_hooks_of_optimizers_do_not_pile_up(world: World) -> None:
    """Each full_params() gave an optimizer of another library two more hooks at its next step."""

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1)

    model = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), mesh=world.mesh)
    optimizer, found = Other(model.parameters()), set()
    for number in range(4):
        square(model(world.mine(batch(number)))).backward()
        optimizer.step()
        with fullshard.full_params(model):
            pass
        found.add((len(optimizer._optimizer_state_dict_pre_hooks), len(optimizer._optimizer_load_state_dict_pre_hooks)))
    assert len(found) == 1


def clipped(world: World, **options: Any) -> Tensor:
    model = shard_stack(Stack(), world.mesh, check_policy=CheckPolicy(patience=0.2))
    square(model(batch(0))).backward()
    return fullshard.clip_grad_norm_(model.parameters(), **options)


def divided(world: World, factor: float) -> None:
    model = shard_stack(Stack(), world.mesh, check_policy=CheckPolicy(patience=0.2))
    model.set_gradient_divide_factor(factor)
    square(model(batch(0))).backward()


def shown(world: World, **options: Any) -> None:
    model = shard_stack(Stack(), world.mesh)
    square(model(batch(0))).backward()
    if options.pop("drops", False):
        model.head.weight.grad = None
    with fullshard.full_params(model, grads=True, **options):
        pass


def materialized(world: World, seed: int | None) -> None:
    with torch.device("meta"):
        model = Stack()
    fullshard.materialize(shard_stack(model, world.mesh), seed=seed)


def run_once(world: World, **options: Any) -> None:
    model = fully_shard(nn.Linear(64, 64), mesh=world.mesh, check_policy=CheckPolicy(patience=0.2), **options)
    square(model(torch.ones(2, 64))).backward()


def separated(world: World, separate: bool) -> None:
    model = shard_stack(Stack(), world.mesh, check_policy=CheckPolicy(patience=0.2))
    if separate:
        model.set_separate_reduce_scatter_group(True)
    model(batch(0))


DIFFERENT: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "shard dims": (run_once, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}, {}, "float32 sharded along dim 1"),
    "sync": (run_once, {"sync": "broadcast"}, {}, r"rank 0 ran fully_shard\(\) of 'Linear'; rank 1 ran "),
    "messages": (run_once, {"comm_policy": CommPolicy(direct_min_bytes=0)}, {}, "Ranks diverged"),
    "factors": (divided, {"factor": 1.0}, {"factor": 2.0}, r"\(divided by 1.0\)"),
    "norms": (clipped, {"max_norm": 1.0}, {"max_norm": 2.0}, r"clip_grad_norm_\(1.0, 2.0\)"),
    "powers": (clipped, {"max_norm": 1.0}, {"max_norm": 1.0, "norm_type": 1.0}, r"clip_grad_norm_\(1.0, 1.0\)"),
    "gradients": (shown, {"drops": True}, {}, r"gradient of 'head.weight',"),
    "writes": (shown, {"write": False}, {}, r"rank 0 ran full_params\(write=False, .*; rank 1 ran full_params\(write=True, "),
    "seeds": (materialized, {"seed": 0}, {"seed": 1}, r"materialize\(seed=0\)"),
    "drawn seeds": (materialized, {"seed": None}, {"seed": 1}, r"materialize\(seed=None\)"),
    "process groups": (separated, {"separate": True}, {"separate": False}, r"set_separate_reduce_scatter_group\(\)"),
}


@pytest.mark.parametrize("name", DIFFERENT)
@ranks(2)
def test_arguments_that_differ_between_ranks_raise_on_all_of_them(world: World, name: str) -> None:
    """They trained something else, aborted the process, or waited for each other."""
    work, first, second, text = DIFFERENT[name]
    with pytest.raises((ValueError, StateError), match=text):
        work(world, **(second if world.rank else first))


MISTAKEN = {
    "a lane": (lambda m: fully_shard(nn.Linear(2, 2), mesh=m, comm_policy=CommPolicy(lanes=lambda d: None)), "return a Lane"),
    "lanes": (lambda m: CommPolicy(lanes=3), "CommPolicy.lanes must be callable or None, got 3"),
    "heartbeat": (lambda m: CheckPolicy(heartbeat="no"), "CheckPolicy.heartbeat must be True or False, got 'no'"),
    "casts": (lambda m: fullshard.MixedPrecisionPolicy(cast_forward_inputs="no"), "cast_forward_inputs must be True or False"),
    "pins": (lambda m: fullshard.CPUOffloadPolicy(pin_memory="x"), "CPUOffloadPolicy.pin_memory must be True or False"),
    "pieces": (lambda m: fullshard.Pieces(2, dim="0"), "Pieces.dim must be an int, got '0'"),
    "dims": (lambda m: fullshard.DataParallelMeshDims(shard=1), "shard= of DataParallelMeshDims must be a name"),
    "undo": (lambda m: fullshard.undo("model"), "Expected an nn.Module, got str"),
    "stats": (lambda m: fullshard.stats(3), "Expected an nn.Module, got int"),
    "a model": (lambda m: fullshard.matrices_of("model"), "matrices_of takes a model, got str"),
    "a plan": (lambda m: fullshard.plan_model("model"), "Expected a model as nn.Module, got str"),
    "patterns": (lambda m: fullshard.matrices_of(nn.Linear(2, 2), take=None), "take must be a sequence, as in take=[...], got None"),
    "placements": (lambda m: fully_shard(nn.Linear(2, 2), mesh=m, shard_placement_fn=1), "shard_placement_fn must be callable or None"),
    "init": (lambda m: fullshard.materialize(graded(m), init=1), "init must be callable or None, got 1"),
    "a seed": (lambda m: fullshard.materialize(graded(m), seed="x"), "seed must be an int"),
    "a split": (lambda m: fullshard.MatrixOwners([graded(m).weight], split=3), "split must be a dict from parameters to their pieces"),
    "a dtype": (lambda m: fullshard.MatrixOwners([graded(m).weight], dtype=torch.int8), "dtype must be a floating-point torch.dtype"),
    "a rank": (lambda m: fullshard.plan_owners([("a", torch.empty(4, 4))], ranks=2).peak_nbytes(2), "rank must be below 2, got 2"),
    "restorable": (lambda m: fullshard.whole_view(torch.optim.Adafactor(graded(m).parameters()), restorable="no"),
                   "restorable must be True or False, got 'no'"),
    "write": (lambda m: fullshard.full_params(graded(m), write="no").__enter__(), "write must be True or False, got 'no'"),
    "averages": (lambda m: fullshard.weights.iter_full(graded(m), weights=1), "weights must be an EMA, a Version or None, got int"),
    "clip": (lambda m: fullshard.clip_grad_norm_(graded(m).parameters(), -1.0), "takes a max_norm >= 0, got -1.0"),
    "clip to nan": (lambda m: fullshard.clip_grad_norm_(graded(m).parameters(), float("nan")), "takes a max_norm >= 0, got nan"),
    "Muon": (lambda m: fullshard.local_view(torch.optim.Muon(fully_shard(nn.Linear(2, 2, bias=False), mesh=m).parameters())),
             "Muon is not element-wise: each rank would compute with its own rows only. It needs no view"),
    "LBFGS": (lambda m: fullshard.local_view(torch.optim.LBFGS(fully_shard(nn.Linear(2, 2), mesh=m).parameters())),
              "LBFGS is not element-wise"),
}  # fmt: skip


def graded(mesh: DeviceMesh) -> nn.Module:
    model = fully_shard(nn.Linear(5, 3), mesh=mesh)
    square(model(batch(0))).backward()
    return model


@pytest.mark.parametrize("name", MISTAKEN)
@ranks(1)
def test_arguments_that_were_taken_silently_are_refused(world: World, name: str) -> None:
    call, text = MISTAKEN[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        call(world.mesh)


@ranks(2)
def test_a_cast_that_one_unit_refuses_casts_none(world: World) -> None:
    """Units before the refused one were cast: dtypes were mixed, and no call mended that but the cast back."""
    model = shard_stack(Stack(), world.mesh)
    output = model(world.mine(batch(0)))
    with pytest.raises(StateError, match="cannot change dtype or device between its forward and its backward"):
        model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    square(output).backward()
    del output
    model.to(torch.bfloat16)
    model(world.mine(batch(0)).bfloat16())


@ranks(2)
def test_undo_inside_of_resident_and_before_wait_is_refused(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    with model.resident(), pytest.raises(StateError, match=r"undo\(\) was called inside resident\(\) of unit"):
        fullshard.undo(model)
    handle = model.unshard(async_op=True)
    with torch.inference_mode():
        fullshard.undo(model)
    with pytest.raises(StateError, match=r"was undone before wait\(\) of its unshard\(\)"):
        handle.wait()
    square(model(batch(0))).backward()


@ranks(1, 2)
def test_gradients_of_parameters_unsharded_by_hand_do_not_stay_behind(world: World) -> None:
    """zero_grad() did not reach them behind reshard(), and grad() left them: the next gradients contained them."""
    model = fully_shard(nn.Linear(5, 3), mesh=world.mesh)
    plain = copy.deepcopy(fullshard.undo(copy.deepcopy(model)))
    model.unshard()
    model.weight.sum().backward()
    model.reshard()
    model.zero_grad()
    with (
        model.resident(),
        pytest.raises(StateError, match=r"grad\(\): the outputs use parameter 'weight' outside of a forward"),
    ):
        fullshard.grad(model.weight.sum(), model.weight)
    for one, x in ((model, world.mine(batch(0))), (plain, batch(0))):
        square(one(x)).backward()
    assert_same_grads(model, plain)


@ranks(2)
def test_ranks_outside_of_a_process_group_receive_nothing(world: World) -> None:
    """`to=dist.new_group([0])` raised there: torch returns no group, but a number."""
    model = shard_stack(Stack(), world.mesh)
    found = list(fullshard.weights.iter_full(model, to=dist.new_group([0])))
    assert bool(found) is (world.rank == 0)


@ranks(2)
def test_saves_that_ranks_ask_for_differently_raise_on_all_of_them(world: World) -> None:
    model, folder = shard_stack(Stack(), world.mesh), world.folder("asked")
    with pytest.raises(ValueError, match="keep=2 needs step="):
        save_weights(model, folder, keep=2 if world.rank else None)
    with pytest.raises(ValueError, match="background, step and keep differs between ranks"):
        save_weights(model, folder, step=world.rank)
    with pytest.raises(ValueError, match="this rank does not see what the first rank writes"):
        save_weights(model, Path(folder) / str(world.rank) / "checkpoint")
    with pytest.raises(ValueError, match="key_map leaves no tensor to save"):
        save_weights(model, folder, key_map=lambda name: None)
    save_weights(model, folder)


@ranks(1, 2)
def test_outputs_in_containers_of_any_depth_are_found(world: World) -> None:
    class Chain(Stack):
        def forward(self, x: Tensor) -> Any:
            found: Any = super().forward(x)
            for _ in range(40):
                found = (found, None)
            return collections.deque([found])

    model = Stack()
    sharded = Chain()
    sharded.load_state_dict(model.state_dict())
    shard_stack(sharded, world.mesh)
    (found,) = sharded(world.mine(batch(0)))
    while isinstance(found, tuple):
        found, _ = found
    square(found).backward()
    square(model(batch(0))).backward()
    assert_same_grads(sharded, model)


@ranks(1, 2)
def test_gradients_as_values_leave_those_that_wait_for_the_last_backward(world: World) -> None:
    """grad() ends a backward, which may deliver what earlier ones reduced or kept."""
    first, second = nn.Linear(5, 3), nn.Linear(5, 3)
    plain = copy.deepcopy(second)
    for one in (first, second):
        fully_shard(one, mesh=world.mesh)
    second.set_is_last_backward(False)
    square(second(world.mine(batch(0)))).backward()
    second.set_is_last_backward(True)
    fullshard.grad(square(first(world.mine(batch(1)))), [first.weight])
    square(second(world.mine(batch(2)))).backward()
    for number in (0, 2):
        square(plain(batch(number))).backward()
    assert_same_grads(second, plain)


@ranks(2)
def test_units_keep_their_names_if_their_first_training_forward_is_a_recomputation(world: World) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    model = shard_stack(Checkpointed(), world.mesh)
    square(model(world.mine(batch(0)))).backward()
    assert [unit.name for unit in units_of(model, True)] == ["Checkpointed", "blocks.0", "blocks.1", "blocks.2"]


@ranks(2)
def test_equal_factors_are_equal_behind_a_failed_step(world: World) -> None:
    """The factor is part of the reduction's entry in the log, which keeps the last one only."""
    model = shard_stack(Stack(), world.mesh)
    if world.rank:
        model.set_gradient_divide_factor(3.0, recurse=True)
    assert fullshard.any_failed(world.mesh, failed=world.rank == 0)
    for number in range(4):
        model.set_gradient_divide_factor(2 + number, recurse=True)
        square(model(world.mine(batch(number)))).backward()
    actions = [text for group in unit_of(model).groups for text in group.fingerprints if "divided by" in text]
    assert len(actions) == 1 and "divided by 5.0" in actions[0]


@ranks(2)
def test_norms_of_uneven_experts_that_no_mesh_connects_are_refused_on_all_ranks(world: World) -> None:
    """The rank with two experts and the one with one have different numbers of parameters, and would scale the rest differently."""
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "alone"))["alone"]
    model = nn.ModuleDict({"dense": nn.Linear(5, 5), "experts": nn.ModuleList(nn.Linear(5, 5) for _ in range(2 - world.rank))})
    for expert in model["experts"]:
        fully_shard(expert, mesh=alone)
    fully_shard(model["dense"], mesh=world.mesh)
    x = model["dense"](batch(0))
    for expert in model["experts"]:
        x = expert(x)
    square(x).backward()
    with pytest.raises(StateError, match="differs between rank 0 and rank 1"):
        fullshard.clip_grad_norm_(model.parameters(), 1.0)


@ranks(1)
def test_local_view_takes_element_wise_subclasses_of_torch(world: World) -> None:
    class Own(torch.optim.Adam):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    model = fully_shard(nn.Linear(5, 3), mesh=world.mesh)
    optimizer = fullshard.local_view(Own(model.parameters()))
    square(model(batch(0))).backward()
    optimizer.step()
    vectors = torch.optim.Adafactor([model.bias])
    vectors.step()


class _Gated(nn.Module):
    """Two layers, of which a call may leave out the second, or its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Layer(), _Layer()

    def forward(self, x: Tensor, *, both: bool, computes: bool = True) -> Tensor:
        x = self.first(x, computes=True)
        return self.second(x, computes=computes) if both else x


class _Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor, *, computes: bool) -> Tensor:
        return super().forward(x) if computes else 2 * x


@ranks(2)
def test_groups_built_anew_between_microbatches_keep_what_one_rank_alone_kept(world: World) -> None:
    """Also a rank without gradients takes part in their reduction, though the last backward does not reach the unit."""
    torch.manual_seed(0)
    model = _Gated()
    plain = copy.deepcopy(model)
    for one in (model.first, model.second, model):
        fully_shard(one, mesh=world.mesh)
    model.set_requires_gradient_sync(False)
    square(model(batch(0), both=True, computes=world.rank == 0)).backward()
    model.set_requires_gradient_sync(True)
    model.second.set_separate_reduce_scatter_group(True)
    square(model(batch(1), both=False)).backward()
    for computes in (True, False):
        square(plain(batch(0), both=True, computes=computes)).backward()
    for _ in range(2):
        square(plain(batch(1), both=False)).backward()
    for gradient in plain.parameters():
        gradient.grad /= 2
    assert_same_grads(model, plain)
