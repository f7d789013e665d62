"""`Tensor.grad_dtype` of parameters, and the dtypes that single parameters are gathered in: in every path of a gradient."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from harness import World, ranks
from models import ROWS, Stack, assert_near, batch, full, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, _torch, fully_shard, shard_model, wrap

BF16, FP32 = torch.bfloat16, torch.float32
PAIRS = [pytest.param(BF16, FP32, id="bf16-with-fp32"), pytest.param(FP32, BF16, id="fp32-with-bf16")]
COARSE = 2.0 * torch.finfo(BF16).eps  # one rounding of a term, one of the sum


def with_grad_dtype(model: nn.Module, storage: torch.dtype, grad: torch.dtype | None) -> nn.Module:
    model.to(storage)
    for parameter in model.parameters():
        parameter.grad_dtype = grad
    return model


def sharded_copy(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """A sharded copy; plain Parameters lose the dtype when they are copied."""
    twin = copy.deepcopy(model)
    for one, other in zip(twin.parameters(), model.parameters()):
        one.grad_dtype = other.grad_dtype
    return shard_stack(twin, mesh, **options)


def inputs(world: World, dtype: torch.dtype, index: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch, and the whole of it."""
    whole = batch(index).to(dtype)
    return world.mine(whole), whole


def assert_grads(sharded: nn.Module, model: nn.Module, grad: torch.dtype, tolerance: float = COARSE) -> None:
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    expected = dict(model.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert parameter.grad.dtype is grad and parameter.grad.to_local().dtype is grad, name
        assert parameter.grad.placements == parameter.placements
        whole = full(parameter.grad).to(expected[name].device)  # of offloaded shards it is the host's
        off = (whole.double() - expected[name].grad.double()).abs().max().item()
        assert off <= tolerance * largest * ROWS**0.5, f"{name}: off by {off} of {largest}"


@pytest.mark.rotates(3)
@pytest.mark.proves("8c")
@pytest.mark.parametrize(("storage", "grad"), PAIRS)
@pytest.mark.parametrize("way", ["plain", "accumulated", "not the last", "offloaded", "two reductions"])
@ranks(1, 2, 3)
def test_gradients_have_the_dtype_that_was_set(world: World, storage: torch.dtype, grad: torch.dtype, way: str) -> None:
    model = with_grad_dtype(Stack(), storage, grad)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if way == "offloaded" else {}
    sharded = sharded_copy(model, world.mesh, **options)
    assert all(parameter.grad_dtype is grad for parameter in sharded.parameters())
    for step in range(2):
        count = 1 if way in ("plain", "offloaded") else 3
        for index in range(count):
            mine, whole = inputs(world, storage, 3 * step + index)
            if way == "accumulated":
                sharded.set_requires_gradient_sync(index == count - 1)
            elif way == "not the last":
                sharded.set_is_last_backward(index == count - 1)
            square(sharded(mine)).backward()
            square(model(whole)).backward()
        assert_grads(sharded, model, grad)
        for each in (sharded, model):
            each.zero_grad()


@pytest.mark.parametrize(("storage", "grad"), PAIRS)
@pytest.mark.parametrize("put_off", [False, True])
@ranks(4)
def test_hybrid_meshes_sum_in_the_dtype_that_was_set(
    world: World, storage: torch.dtype, grad: torch.dtype, put_off: bool
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = with_grad_dtype(Stack(), storage, grad)
    sharded = sharded_copy(model, mesh)
    for index in range(2):
        mine, whole = inputs(world, storage, index)
        sharded.set_requires_all_reduce(not put_off or index == 1)
        square(sharded(mine)).backward()
        square(model(whole)).backward()
    assert_grads(sharded, model, grad)


@pytest.mark.parametrize(("storage", "grad"), PAIRS)
@ranks(2)
def test_clipping_and_steps_see_those_gradients(world: World, storage: torch.dtype, grad: torch.dtype) -> None:
    model = with_grad_dtype(Stack(), storage, grad)
    sharded = sharded_copy(model, world.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(3):
        mine, whole = inputs(world, storage, step)
        square(sharded(mine)).backward()
        square(model(whole)).backward()
        ours = fullshard.clip_grad_norm_(list(sharded.parameters()), 0.01)
        wanted = nn.utils.clip_grad_norm_(list(model.parameters()), 0.01)
        assert_near(full(ours), wanted, "norm", 8 * COARSE)
        for each in optimizers:
            each.step()
            each.zero_grad()
    for one, other in zip(sharded.parameters(), model.parameters()):
        assert one.dtype is storage
        assert_near(one, other, "weights", 8 * COARSE)


@ranks(2)
def test_the_dtype_survives_casts_copies_pickles_and_undo(world: World) -> None:
    model = with_grad_dtype(nn.Linear(5, 3), BF16, FP32)
    sharded = fully_shard(model, mesh=world.mesh)
    mine, _ = inputs(world, BF16)
    square(sharded(mine)).backward()
    before = full(sharded.weight.grad).clone()
    sharded.to(torch.float16)
    assert sharded.weight.grad_dtype is FP32 and torch.equal(full(sharded.weight.grad), before), "a cast leaves gradients alone"
    sharded.zero_grad()
    square(sharded(mine.half())).backward()
    assert sharded.weight.grad.dtype is FP32 and sharded.weight.dtype is torch.float16
    buffer = io.BytesIO()
    torch.save(sharded, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(sharded), torch.load(buffer, weights_only=False)):
        twin.zero_grad()
        square(twin(mine.half())).backward()
        assert twin.weight.grad.dtype is FP32
    plain = fullshard.undo(sharded)
    assert plain.weight.grad_dtype is FP32 and plain.weight.grad.dtype is FP32


@pytest.mark.proves("8c")
@ranks(2)
def test_a_dtype_set_on_the_shard_is_read_at_the_first_forward(world: World) -> None:
    sharded = fully_shard(nn.Linear(5, 3), mesh=world.mesh)
    sharded.weight.grad_dtype = BF16
    mine, _ = inputs(world, FP32)
    square(sharded(mine)).backward()
    assert sharded.weight.grad.dtype is BF16 and sharded.bias.grad.dtype is FP32
    sharded.zero_grad()
    sharded.bias.grad_dtype = BF16
    with pytest.warns(UserWarning, match="These gradients are discarded"), pytest.raises(RuntimeError, match="dtype"):
        square(sharded(mine)).backward()
    assert sharded.weight.grad is None, "all gradients are set or none"


@ranks(2)
def test_float16_divides_a_copy_of_the_gradient_that_autograd_computed(world: World) -> None:
    """Half of the division comes before the sum, so that it does not overflow. A hook in the graph may have kept the tensor."""
    kept: list[Tensor] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self.weight.register_hook(lambda grad: kept.append(grad.detach()))
            return super().forward(x)

    model = fully_shard(Watched(4, 4, bias=False).half(), mesh=world.mesh, comm_policy=CommPolicy(direct_min_bytes=0))
    assert model._fullshard_unit.groups[0].reduction.direct
    model(torch.full((1, 4), 2.0, dtype=torch.float16)).sum().backward()
    assert torch.equal(kept[0], torch.full((4, 4), 2.0, dtype=torch.float16))
    assert torch.equal(full(model.weight.grad), kept[0])


class InFp32(torch.autograd.Function):
    """A product whose gradients are in fp32, as kernels that add weight gradients in fp32 give them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().t() @ x.float()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return InFp32.apply(x, self.weight)


@pytest.mark.parametrize("grad", [FP32, None])
@pytest.mark.parametrize("accumulated", [False, True])
@ranks(2)
def test_gradients_that_come_in_fp32_are_not_rounded(world: World, grad: torch.dtype | None, accumulated: bool) -> None:
    """257 is no bf16: it would be 256. A `grad_dtype` of None leaves `.grad` in the dtype of the reduction."""
    policy = MixedPrecisionPolicy(reduce_dtype=FP32 if grad is None else None)
    sharded = fully_shard(with_grad_dtype(Fused(), BF16, grad), mesh=world.mesh, mp_policy=policy)
    for value in (257.0, 513.0):
        parts = (value - 1.0, 1.0)
        for part in parts:
            sharded.set_requires_gradient_sync(part == 1.0 or not accumulated)
            x = torch.tensor([[part // 2] * 4, [part - part // 2] * 4], dtype=BF16)
            sharded(x).sum().backward()
        assert sharded.weight.grad.dtype is FP32
        assert torch.equal(full(sharded.weight.grad), torch.full((4, 4), value))
        sharded.zero_grad()


@pytest.mark.skipif(not _torch.REDUCES_IN_GRAD_DTYPE, reason="FSDP2 has it from torch 2.15 on")
@pytest.mark.parametrize(
    ("storage", "grad"), [*PAIRS, pytest.param(BF16, None, id="bf16-any"), pytest.param(FP32, FP32, id="same")]
)
@pytest.mark.parametrize(
    "policy", [{}, {"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": FP32}, {"reduce_dtype": BF16}]
)
@ranks(2)
def test_bits_and_dtypes_are_those_of_fsdp2(
    world: World, storage: torch.dtype, grad: torch.dtype | None, policy: dict[str, Any]
) -> None:
    peer = with_grad_dtype(Stack(), storage, grad)
    ours = sharded_copy(peer, world.mesh, mp_policy=MixedPrecisionPolicy(**policy))
    for block in peer.blocks:
        theirs.fully_shard(block, mesh=world.mesh, mp_policy=theirs.MixedPrecisionPolicy(**policy))
    theirs.fully_shard(peer, mesh=world.mesh, mp_policy=theirs.MixedPrecisionPolicy(**policy))
    dtypes = ours._fullshard_unit.groups[0].dtypes
    # FSDP2 rounds each gradient to a narrower dtype before it adds it to what it kept, fullshard only the sum.
    widens = dtypes.reduce.itemsize >= dtypes.compute.itemsize
    for index in range(3):
        mine, _ = inputs(world, storage, index)
        for each in (ours, peer):
            each.set_requires_gradient_sync(index != 0 or not widens)
            square(each(mine).float()).backward()
    for (name, one), other in zip(ours.named_parameters(), peer.parameters()):
        assert one.grad.dtype is other.grad.dtype, name
        assert torch.equal(full(one.grad), full(other.grad)), name


# --- the dtype in which kept gradients are summed --------------------------------------------------------------------------

SUMS_IN_FP32 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, accumulate_dtype=FP32)


@pytest.mark.parametrize("direct_min_bytes", [float("inf"), 0], ids=["packed", "direct"])
@ranks(1, 2)
def test_kept_gradients_are_summed_in_the_accumulate_dtype_and_reduced_in_the_reduce_dtype(
    world: World, direct_min_bytes: float
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    options: dict[str, Any] = {"mesh": world.mesh, "comm_policy": CommPolicy(direct_min_bytes=direct_min_bytes)}
    model = fully_shard(copy.deepcopy(plain), mp_policy=SUMS_IN_FP32, **options)
    rounded = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(BF16, BF16), **options)
    low = copy.deepcopy(plain).to(BF16)
    sums = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for index in range(8):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(8 * world.rank + index)).to(BF16)
        for each in (model, rounded, low):
            if each is not low:
                each.set_requires_gradient_sync(index == 7)
            square(each(x)).backward()
        for total, parameter in zip(sums, low.parameters()):
            total.add_(parameter.grad)
        low.zero_grad()
        if index < 7:
            kept = [one.unsharded_accumulated_grad for one in model._get_fsdp_state()._fsdp_param_group.fsdp_params]
            assert all(one.dtype is FP32 and torch.equal(one, total) for one, total in zip(kept, sums, strict=True))
    for parameter, total in zip(model.parameters(), sums):
        assert torch.equal(full(parameter.grad), average(world, total.to(BF16)).float())
    assert any(
        not torch.equal(full(one.grad), full(other.grad)) for one, other in zip(model.parameters(), rounded.parameters())
    )


@ranks(2)
def test_gradients_that_come_in_the_accumulate_dtype_are_not_rounded_before_the_sum(world: World) -> None:
    """257 is no bf16, 258 is one."""
    sharded = fully_shard(with_grad_dtype(Fused(), FP32, BF16), mesh=world.mesh, mp_policy=SUMS_IN_FP32)
    for value in (257, 1):
        sharded.set_requires_gradient_sync(value == 1)
        sharded(torch.tensor([[value // 2] * 4, [value - value // 2] * 4], dtype=BF16)).sum().backward()
    assert torch.equal(full(sharded.weight.grad), torch.full((4, 4), 258.0, dtype=BF16))


# --- the dtypes that single parameters are gathered in ---------------------------------------------------------------------


def keep_norms(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.ndim == 1 else None


class Recorder(nn.Module):
    """Notes the dtypes that its parameters have while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(5), nn.Linear(5, 5, bias=False)
        self.seen: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (self.norm.weight.dtype, self.up.weight.dtype, x.dtype)
        return self.up(self.norm(x.float()).to(self.up.weight.dtype))


@ranks(2)
def test_parameters_that_the_policy_leaves_out_are_gathered_in_their_own_dtype(world: World) -> None:
    asked: list[nn.Parameter] = []

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter)
        return keep_norms(parameter)

    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, param_dtype_override_fn=override)
    sharded = fully_shard(Recorder(), mesh=world.mesh, mp_policy=policy)
    for _ in range(2):
        square(sharded(batch(0))).backward()
        assert sharded.seen == (FP32, BF16, BF16), "inputs are cast to param_dtype all the same"
    assert len(asked) == 3, "once for each parameter"
    asked.clear()
    placed: list[nn.Parameter] = []
    plan = {"policy": wrap.ModuleWrapPolicy({nn.LayerNorm}), "shard_placement_fn": placed.append}
    shard_model(Recorder(), world.mesh, mp_policy=policy, **plan)
    assert len(asked) == len(placed) == 3, "also by a call that checks all units before it shards the first"
    twin = copy.deepcopy(sharded)
    twin(batch(0))
    assert twin.seen == (FP32, BF16, BF16)
    if _torch.REDUCES_IN_GRAD_DTYPE:  # torch's own policy has the function, too
        policy = theirs.MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=keep_norms)
        again = fully_shard(Recorder(), mesh=world.mesh, mp_policy=policy)
        again(batch(0))
        assert again.seen == (FP32, BF16, BF16)


@ranks(2)
def test_other_dtypes_are_refused_and_ranks_that_choose_differently_are_told(world: World) -> None:
    model = nn.Linear(5, 3)
    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda p: torch.float16)
    with pytest.raises(
        ValueError, match=r"param_dtype_override_fn of parameter 'weight': expected None, torch.bfloat16 .* got"
    ):
        fully_shard(model, mesh=world.mesh, mp_policy=policy)
    assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda p: p.dtype if world.rank else None)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    with pytest.raises(fullshard.StateError, match=r"rank 0 has 'weight' .*rank 1 has 'weight' .*not cast"):
        model(torch.ones(1, 5))
    with pytest.raises(ValueError, match="param_dtype_override_fn must be callable or None, got 3"):
        MixedPrecisionPolicy(param_dtype_override_fn=3)


@pytest.mark.skipif(_torch.REDUCES_IN_GRAD_DTYPE, reason="before torch 2.15")
@ranks(2)
def test_before_torch_2_15_gradients_are_reduced_in_the_compute_dtype_by_default(world: World) -> None:
    assert reduced(world) == 256.0 / 2


@pytest.mark.skipif(not _torch.REDUCES_IN_GRAD_DTYPE, reason="from torch 2.15 on")
@ranks(2)
def test_from_torch_2_15_on_gradients_are_reduced_in_the_dtype_of_grad_by_default(world: World) -> None:
    assert reduced(world) == 257.0 / 2


def reduced(world: World) -> float:
    """The mean of 256 and 1, computed in bf16 and reduced in the default of the installed torch."""
    layer = fully_shard(nn.Linear(4, 4, bias=False), mesh=world.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    layer(torch.full((1, 4), (256.0, 1.0)[world.rank])).sum().backward()
    return full(layer.weight.grad)[0, 0].item()


# --- what full parameters show -----------------------------------------------------------------------------------------------


def average(world: World, tensor: Tensor) -> Tensor:
    import torch.distributed as dist

    total = tensor.clone()
    dist.all_reduce(total)
    return total / world.size


@ranks(1, 2)
def test_grad_is_none_until_it_is_reduced_also_on_parameters_that_are_unsharded_by_hand(world: World) -> None:
    mp = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(4, 4), mesh=world.mesh, mp_policy=mp)
    x = torch.randn(2, 4)
    with model.accumulate():
        model(x).float().sum().backward()
    assert model._get_fsdp_state()._fsdp_param_group.fsdp_params[0].unsharded_accumulated_grad is not None
    model.unshard()
    assert model.weight.grad is None
    model.reshard()
    model(x).float().sum().backward()
    twice = model.weight.grad.full_tensor()
    model.zero_grad()
    model(x).float().sum().backward()
    assert torch.equal(twice, 2 * model.weight.grad.full_tensor())


@ranks(2)
def test_kept_gradients_follow_a_cast_of_the_model(world: World) -> None:
    """Those of float32 were added to the kept ones in bfloat16."""
    model = fully_shard(nn.Linear(4, 4).bfloat16(), mesh=world.mesh)
    with model.accumulate():
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    model.to(torch.float32)
    model(torch.full((1, 4), 1.0 + 2.0**-20)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full_like(model.weight.grad.to_local(), 2.0 + 2.0**-20))
