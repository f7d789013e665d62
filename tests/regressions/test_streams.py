"""Stories of what a reading of the stream path, and the race detector (tests/races), found. What needs streams is told there."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, ranks
from models import Stack, assert_near, assert_same_parameters, batch, rounding, shard_stack, square
from torch import Tensor, nn

from fullshard import CommPolicy, StateError, _torch, fully_shard
from fullshard.comm.base import SingleRank
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.streams import HostStream
from fullshard.core import unit_of


@ranks(1, 2)
def test_optimizers_in_hooks_of_a_unit_of_several_groups(world: World) -> None:
    """The hook of the first group's parameters was refused, since the gradients of the second were still on their way."""

    def step_in_backward(model: nn.Module) -> None:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(p: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            parameter.register_post_accumulate_grad_hook(step)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double()).float()

    for microbatches in (1, 2):
        model = nn.Sequential(Mixed(), nn.Linear(3, 5), Mixed())
        sharded = copy.deepcopy(model)
        for module in (*sharded, sharded):
            fully_shard(module, mesh=world.mesh)
        step_in_backward(sharded)
        step_in_backward(model)
        for step in range(3):
            for micro in range(microbatches):
                sharded.set_is_last_backward(micro == microbatches - 1)
                square(sharded(world.mine(batch(step + micro)))).backward()
                square(model(batch(step + micro))).backward()
        assert_same_parameters(sharded, model, rounding(torch.float32))  # gradients in float64 came through float32


@ranks(2)
def test_hooks_have_run_when_a_backward_that_is_not_the_last_ends(world: World) -> None:
    """They ran in the midst of the next backward, when its gathers read the weights that they wrote."""
    model = shard_stack(Stack(), world.mesh, comm_policy=CommPolicy(reductions_in_flight=3))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    model.set_is_last_backward(False)
    square(model(world.mine(batch(0)))).backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    model.set_is_last_backward(True)
    square(model(world.mine(batch(0)))).backward()
    assert len(seen) == 2 * len(set(seen))


@ranks(2)
def test_gathers_of_dtypes_that_nccl_lacks_travel_as_bytes(world: World) -> None:
    seen: list[torch.dtype] = []
    real = _torch.all_gather_base

    def watched(group: Any, out: Tensor, shard: Tensor) -> Any:
        seen.append(out.dtype)
        return real(group, out, shard)

    collectives = CoalescedCollectives(dist.group.WORLD)
    _torch.all_gather_base = watched
    try:
        for dtype, carried in (
            (torch.int16, torch.uint8),
            (torch.complex64, torch.uint8),
            (torch.float8_e4m3fn, torch.uint8),
            (torch.bool, torch.uint8),
            (torch.int32, torch.int32),
            (torch.bfloat16, torch.bfloat16),
        ):
            out, shard = torch.zeros(6, dtype=dtype), torch.full((3,), world.rank + 1).to(dtype)
            HostStream().run(collectives.gatherer([out], [shard]), lambda: None).wait()
            assert out.to(torch.complex64).real.tolist() == [1.0] * 3 + [1.0 if dtype is torch.bool else 2.0] * 3, dtype
            assert seen.pop() is carried
    finally:
        _torch.all_gather_base = real


class Backend:
    """A backend that allocates memory for messages on some devices."""

    def __init__(self, able: bool) -> None:
        self._able = able

    def name(self) -> str:
        return "nccl"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self._able

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self.barriers, "a communicator"
        return torch.full((size,), 7, dtype=dtype)

    barriers = 0


def test_memory_of_the_group_falls_back_to_other_memory_where_nccl_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2's does; and the communicator is made before its memory, which a lazy one refused."""
    monkeypatch.setattr(dist, "barrier", lambda group: setattr(Backend, "barriers", Backend.barriers + 1))
    device = torch.device("cpu")
    for able, filled in ((True, True), (False, False)):
        group: Any = SimpleNamespace(_get_backend=lambda device, able=able: Backend(able))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            memory = _torch.process_group_memory(group, device)((4,), dtype=torch.float32, device=device)
        assert memory.shape == (4,) and (memory.tolist() == [7.0] * 4) >= filled
        assert ["nccl allocates no memory for messages on cpu, which lacks multicast" in str(w.message) for w in said] == [
            True
        ] * (not able)


@pytest.mark.proves("9c")
@ranks(1)
def test_a_graph_of_the_device_that_is_captured_is_refused(world: World) -> None:
    model = fully_shard(Stack(), mesh=world.mesh)
    communicator = unit_of(model).runtime.communicator
    real, _torch.is_capturing = _torch.is_capturing, lambda device: True
    communicator.async_device = torch.device("cpu")
    try:
        with pytest.raises(
            StateError,
            match="unit 'Stack' was called in a graph capture .* that fullshard does not follow",
        ):
            model(batch(0))
    finally:
        _torch.is_capturing, communicator.async_device = real, None
    square(model(batch(0))).backward()


def test_a_gather_of_one_rank_leaves_the_version_of_a_full_tensor_alone() -> None:
    """A group of one copies. Full tensors of extensions that are made over what was gathered seemed written, and backward raised."""
    from fullshard.core.unsharded_buffer import tensor_on_storage

    out = torch.zeros(4, dtype=torch.bfloat16)
    full, shard = out.view(2, 2), torch.ones(8, dtype=torch.uint8)
    before = full._version
    SingleRank().gatherer([tensor_on_storage(out.view(torch.uint8), 0, (8,))], [shard])()
    assert full._version == before and out.view(torch.uint8).tolist() == [1] * 8


@ranks(1)
def test_an_extension_over_one_rank_trains(world: World) -> None:
    from types import MethodType

    def pre(self: Tensor, mesh: Any) -> Any:
        return (self.detach().to(torch.bfloat16),), None

    def post(self: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)  # the full tensor is what was gathered

    plain = nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)
    model = fully_shard(nn.Sequential(fully_shard(copy.deepcopy(plain), mesh=world.mesh)), mesh=world.mesh)
    shard = model[0].weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = MethodType(pre, shard), MethodType(post, shard)
    for step in range(2):
        x = batch(step).bfloat16().requires_grad_()
        square(model(x)).backward()
        square(plain(x)).backward()
    assert_near(model[0].weight.grad, plain.weight.grad, "weight.grad")
