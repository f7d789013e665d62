"""torchao's weights that say themselves what is gathered: losses of the same model on one process, quantized the same way.

The reference runs every rank's part of the batch on its own and averages, since these weights quantize activations too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao")

import tiny
from launch import PEER, assert_sharded_by_us, full, launch, mean_over_ranks

STEPS, ROWS = 4, 16


class Net(nn.Module):
    def __init__(self, dim: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, dim, bias=bias)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def _batch(step: int, dim: int) -> Tensor:
    return torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def _train(
    rank: int,
    size: int,
    *,
    quantize: Callable[[nn.Module], None],
    after_step: Callable[[nn.Module], None] = lambda model: None,
    weight: str,
    dim: int = 32,
    hidden: int = 48,
    bias: bool = True,
    optimizer: str = "AdamW",
    tolerance: float = 1e-5,
    **policy: Any,
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.rand_like = lambda tensor: torch.full_like(tensor, 0.5)  # stochastic rounding, without the chance
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Net(dim, hidden, bias=bias)
        quantize(model)
        models.append(model)
    model, reference = models
    options = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    assert_sharded_by_us(model)
    shard = model.blocks[0][0].weight
    assert type(shard.to_local()).__name__ == weight, "the shard must stay what it was"

    make = getattr(torch.optim, optimizer)
    ours, theirs = (make([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in models)
    for step in range(STEPS):
        batch = _batch(step, dim)
        loss = _loss(model, tiny.mine(batch, rank, size))
        loss.backward()
        expected = 0.0
        for part in batch.chunk(size):
            part_loss = _loss(reference, part) / size
            part_loss.backward()
            expected += part_loss.item()
        tiny.assert_near(mean_over_ranks(loss.item()), expected, f"loss of step {step}", tolerance)
        want = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (want[name].grad is None), name
            if parameter.grad is not None:
                tiny.assert_near(full(parameter.grad), want[name].grad, f"gradient of {name}, step {step}", tolerance)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        after_step(model)
    assert type(model.blocks[0][0].weight.to_local()).__name__ == weight


# --- the weights ---------------------------------------------------------------------------------------------------------


def _int8(model: nn.Module) -> None:
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    quantize_(model.blocks, int8_weight_only_quantized_training())


def _int8_bf16(rank: int, size: int) -> None:
    """In bf16 the reference would have to be cast too: here, only that it learns and stays quantized."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = Net(32, 48, bias=True)
    _int8(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # AdamW scales weights in place, which int8 ones cannot
    losses = []
    for _ in range(8):
        loss = _loss(model, tiny.mine(_batch(0, 32), rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.item()))
    assert losses[-1] < 0.9 * losses[0], losses
    assert type(model.blocks[0][0].weight.to_local()).__name__ == "Int8QuantizedTrainingLinearWeight"


def _int8_mixed(model: nn.Module) -> None:
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    quantize_(model.blocks, int8_mixed_precision_training())


def _float8(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))


def _float8_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _bitnet(model: nn.Module) -> None:
    from torchao import quantize_
    from torchao.prototype.quantized_training import bitnet_training

    quantize_(model.blocks, bitnet_training())


def _bitnet_scales(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import precompute_bitnet_scale_for_fsdp

    precompute_bitnet_scale_for_fsdp(model)


class _Adapted(nn.Linear):
    """A frozen NF4 weight and two trained factors, as QLoRA has it."""

    def __init__(self, linear: nn.Linear) -> None:
        from torchao.quantization import to_nf4

        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


def _nf4(model: nn.Module) -> None:
    for block in model.blocks:
        block[0], block[2] = _Adapted(block[0]), _Adapted(block[2])


# --- the claims ----------------------------------------------------------------------------------------------------------


def test_int8_quantized_weights_train_like_one_process():
    launch(_train, quantize=_int8, weight="Int8QuantizedTrainingLinearWeight", optimizer="SGD")


def test_int8_quantized_weights_learn_in_bf16():
    launch(_int8_bf16)


def test_int8_mixed_precision_weights_train_like_one_process():
    launch(_train, quantize=_int8_mixed, weight="Int8MixedPrecisionTrainingLinearWeight", tolerance=1e-4)


@pytest.mark.parametrize("bias", [True, False], ids=["beside_float32", "alone_in_its_unit"])
def test_float8_weights_are_gathered_in_float8_and_train_like_one_process(bias):
    if PEER and not bias:
        pytest.skip("torch's FSDP2 hands float8 to gloo, which does not take it")
    launch(_train, quantize=_float8, weight="WeightWithDynamicFloat8CastTensor", bias=bias, tolerance=1e-4)


def test_float8_scales_computed_after_the_step_are_used_by_the_next():
    launch(_train, quantize=_float8, after_step=_float8_scales, weight="WeightWithDynamicFloat8CastTensor", tolerance=1e-4)


def test_bitnet_weights_gathered_in_two_bits_train_like_one_process():
    launch(_train, quantize=_bitnet, after_step=_bitnet_scales, weight="BitNetTrainingLinearWeight", tolerance=1e-4)


def test_frozen_nf4_weights_with_trained_adapters_train_like_one_process():
    launch(_train, quantize=_nf4, weight="NF4Tensor", dim=128, hidden=256, bias=False)
