"""peft LoRA on a frozen base: adapters and frozen weights share units, and training is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import tiny
from launch import PEER, assert_sharded_by_us, full, launch, let_accelerate_shard_on_cpu, mean_over_ranks

STEPS = 4


def _adapted(base: Any = None) -> Any:
    from peft import LoraConfig, get_peft_model

    base = tiny.llama() if base is None else base
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # it starts at zero, where half of the gradients are zero
    return model


def _fit(model: Any, rank: int, size: int) -> list[float]:
    optimizer = tiny.sgd(model)
    losses = []
    for step in range(STEPS):
        loss = tiny.loss_of(model, tiny.mine(tiny.tokens(step), rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.item()))
    return losses


def _train(rank: int, size: int, *, whole: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model, reference = _adapted(), _adapted()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in frozen}
    if not whole:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
    fully_shard(model)
    assert_sharded_by_us(model)

    losses = _fit(model, rank, size)
    tiny.assert_near(losses, tiny.train(reference, steps=STEPS)[0], "losses")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name not in frozen)
        if name in frozen:
            assert torch.equal(full(parameter), before[name]), f"{name} is frozen, and moved"
    _same_adapters(model, reference)


def _same_adapters(model: Any, reference: Any) -> None:
    from peft import get_peft_model_state_dict

    adapters = {name: full(value) for name, value in get_peft_model_state_dict(model).items()}
    for name, value in get_peft_model_state_dict(reference).items():
        tiny.assert_near(adapters[name].detach(), value.detach(), name, 1e-4)


@pytest.mark.parametrize("whole", [True, False], ids=["one_unit", "a_unit_per_layer"])
def test_adapters_on_a_frozen_base_train_like_one_process(whole):
    launch(_train, whole=whole)


def _switch_off(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model, reference = _adapted(), _adapted()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    batch = tiny.tokens(0)
    with torch.no_grad():
        tiny.assert_near(tiny.loss_of(model, batch), tiny.loss_of(reference, batch), "loss with adapters")
        with model.disable_adapter(), reference.disable_adapter():
            tiny.assert_near(tiny.loss_of(model, batch), tiny.loss_of(reference, batch), "loss without adapters")
    trained = _fit(model, rank, size)
    tiny.assert_near(trained, tiny.train(reference, steps=STEPS)[0], "losses after the adapters were switched off and on")
    _same_adapters(model, reference)


def test_switching_adapters_off_and_on_does_not_disturb_training():
    launch(_switch_off)


def _injected(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = tiny.llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model, reference = _adapted(model), _adapted()
    if not PEER:  # torch's FSDP2 leaves each rank with adapters of its own
        ways = r"q_proj.lora_A.*Add them before fully_shard\(\), call fully_shard\(\) on the module that holds them"
        with pytest.raises(RuntimeError, match=ways):
            tiny.loss_of(model, tiny.mine(tiny.tokens(0), rank, size))
    for module in list(model.modules()):
        for adapters in (getattr(module, "lora_A", {}), getattr(module, "lora_B", {})):
            for adapter in adapters.values():
                fully_shard(adapter)
    tiny.assert_near(_fit(model, rank, size), tiny.train(reference, steps=STEPS)[0], "losses")
    _same_adapters(model, reference)


def test_adapters_injected_into_a_sharded_model_raise_until_they_are_sharded():
    """Elsewhere each rank trains its own copy, silently. The error names two ways: inject before, or shard the adapters."""
    launch(_injected)


def _accelerated(rank: int, size: int) -> None:
    """What Trainer does for a peft model: its own wrap policy, then accelerate."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from peft.utils.other import fsdp_auto_wrap_policy

    let_accelerate_shard_on_cpu()
    model = _adapted()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = tiny.sgd(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert_sharded_by_us(model)
    losses = []
    for step in range(STEPS):
        loss = tiny.loss_of(model, tiny.mine(tiny.tokens(step), rank, size))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.item()))
    reference = _adapted()
    tiny.assert_near(losses, tiny.train(reference, steps=STEPS)[0], "losses")
    _same_adapters(model, reference)


def test_adapters_prepared_by_accelerate_train_like_one_process():
    pytest.importorskip("accelerate")
    launch(_accelerated)
