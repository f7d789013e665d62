"""Small mechanisms whose effect other tests see only indirectly, by their names in the code."""

from __future__ import annotations

import torch
from harness import World, ranks
from hypothesis import given
from hypothesis import strategies as st
from models import Stack, batch, shard_stack, square
from torch import nn

from fullshard.comm.gloo import MessageTag
from fullshard.core.heartbeat import _LENGTH_STEP, message_length
from fullshard.core.units import unit_of


@given(st.integers(0, 100_000), st.integers(0, _LENGTH_STEP - 1))
def test_heartbeats_of_models_that_differ_a_little_have_one_of_two_lengths(parameters: int, more: int) -> None:
    """`_LENGTH_STEP`: the heartbeat itself then finds the difference."""
    length, other = message_length(parameters), message_length(parameters + more)
    assert length % _LENGTH_STEP == 0 and parameters < length and other - length in (0, _LENGTH_STEP)


@given(st.integers(-(2**63), 2**63 - 1))
def test_the_bits_of_a_call_fit_into_a_tag_and_follow_from_the_hash(value: int) -> None:
    """`call_bits`: ranks whose logs are equal use the same tag, and a change of the last bits is one of the tag."""
    bits = MessageTag(value).call_bits
    assert 0 <= bits < 1 << 24 and bits == MessageTag(value).call_bits != MessageTag(value ^ 1).call_bits


@ranks(1, 2)
def test_a_parameter_that_changes_its_dtype_stays_the_object_that_optimizers_hold(world: World) -> None:
    """`swap_tensors`: its attributes and hooks stay, too, and a step of that optimizer writes the shard."""
    model = shard_stack(Stack(), world.mesh)
    before = list(model.parameters())
    optimizer, seen = torch.optim.SGD(before, lr=0.5), list[int]()
    for parameter in before:
        parameter.mark = "kept"  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(lambda one: seen.append(id(one)))
    model.double()
    assert [id(one) for one in model.parameters()] == [id(one) for one in before]
    assert all(one.dtype == torch.float64 and one.mark == "kept" for one in before)  # type: ignore[attr-defined]
    square(model(batch(0).double())).backward()
    assert sorted(seen) == sorted(map(id, before))
    values = [one.full_tensor().clone() for one in before]  # type: ignore[attr-defined]
    optimizer.step()
    assert not any(one.full_tensor().equal(value) for one, value in zip(before, values))  # type: ignore[attr-defined]


@ranks(1, 2)
def test_a_unit_is_attached_while_its_modules_are_at_their_place_though_others_hold_them(world: World) -> None:
    """`is_attached`: a unit that was taken out of the model is not prefetched, on any rank, whoever still refers to it."""
    model = shard_stack(Stack(), world.mesh)
    square(model(batch(0))).backward()
    held, unit = model.blocks[1], unit_of(model.blocks[1])
    assert unit is not None and unit.record.is_attached()
    model.blocks[1] = nn.Identity()
    assert not unit.record.is_attached()
    model.blocks[1] = held
    assert unit.record.is_attached()


@ranks(2)
def test_a_hook_that_one_rank_had_for_a_while_changes_nothing_once_it_is_removed(world: World) -> None:
    model = shard_stack(Stack(), world.mesh)
    if world.rank == 0:
        handles = [parameter.register_hook(lambda grad: grad) for parameter in model.parameters()]
    square(model(world.mine(batch(0)))).backward()
    if world.rank == 0:
        for handle in handles:
            handle.remove()
    for seed in (1, 2):  # added to gradients that are there, which the log says of parameters without hooks
        square(model(world.mine(batch(seed)))).backward()
