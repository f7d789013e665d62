"""Hugging Face accelerate, fsdp_version=2: a training loop written for it runs on fullshard, with the losses of one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import tiny
from launch import assert_sharded_by_us, full, launch, let_accelerate_shard_on_cpu, mean_over_ranks, shared_folder

STEPS, ACCUMULATE, MAX_NORM = 3, 2, 0.5


def _accelerator(*, parallelism: Any = None, mixed_precision: str = "no", **options: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    let_accelerate_shard_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **{"cpu_ram_efficient_loading": False, "reshard_after_forward": True} | options,
    )
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=ACCUMULATE,
        parallelism_config=parallelism,
    )


def _fit(accelerator: Any, model: Any, optimizer: Any, rank: int, size: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for number in range(STEPS * ACCUMULATE):
        with accelerator.accumulate(model):
            loss = tiny.loss_of(model, tiny.mine(tiny.tokens(number), rank, size))
            accelerator.backward(loss)
            losses.append(mean_over_ranks(loss.item()))
            if accelerator.sync_gradients:
                norms.append(full(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def _prepare(accelerator: Any, model: Any) -> tuple[Any, Any]:
    optimizer = tiny.adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.is_fsdp2
    assert_sharded_by_us(model)
    assert_sharded_by_us(model.model.layers[0])
    return model, optimizer


def _train(
    rank: int,
    size: int,
    *,
    tied: bool = False,
    ram_efficient: bool = False,
    hybrid: bool = False,
    offload: bool = False,
    **options: Any,
) -> None:
    if offload:
        from torch.distributed.fsdp import CPUOffloadPolicy

        options["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)  # memory is pinned for an accelerator; there may be none
    if hybrid:
        from accelerate import ParallelismConfig

        options["parallelism"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=size // 2)
    accelerator = _accelerator(cpu_ram_efficient_loading=ram_efficient, **options)
    # loading that is sparing of memory: only rank 0 has the weights
    model = tiny.llama(seed=rank if ram_efficient else 0, tied=tied)
    model, optimizer = _prepare(accelerator, model)
    reference = tiny.llama(tied=tied)
    before = reference.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), before[name]), f"{name} is not that of rank 0"
    losses, norms = _fit(accelerator, model, optimizer, rank, size)

    want_losses, want_norms = tiny.train(reference, steps=STEPS, accumulate=ACCUMULATE, max_norm=MAX_NORM, optimizer=tiny.adamw)
    tiny.assert_near(losses, want_losses, "losses")
    tiny.assert_near(norms, want_norms, "gradient norms", 1e-4)
    state = accelerator.get_state_dict(model)
    if rank == 0:
        expected = reference.state_dict()
        assert set(state) == set(expected)
        for name, value in expected.items():
            tiny.assert_near(state[name], value, name, 1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ram_efficient", [False, True], ids=["each_rank_loads", "rank_0_loads"])
def test_training_with_accumulation_and_clipping_gives_the_unsharded_losses(tied, ram_efficient):
    launch(_train, tied=tied, ram_efficient=ram_efficient)


def test_reshard_after_forward_false_and_activation_checkpointing_give_the_unsharded_losses():
    launch(_train, reshard_after_forward=False, activation_checkpointing=True)


def test_cpu_offload_gives_the_unsharded_losses():
    launch(_train, offload=True)


def test_a_named_mesh_of_replicas_and_shards_gives_the_unsharded_losses():
    launch(_train, size=4, hybrid=True)


def _save_and_load(rank: int, size: int, *, kind: str) -> None:
    accelerator = _accelerator(state_dict_type=kind)
    model, optimizer = _prepare(accelerator, tiny.llama())
    _fit(accelerator, model, optimizer, rank, size)
    before = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    path = os.path.join(shared_folder(), "state")
    accelerator.save_state(path)
    later = _fit(accelerator, model, optimizer, rank, size)
    assert any(not torch.equal(full(p), before[name]) for name, p in model.named_parameters())

    accelerator.load_state(path)
    for name, p in model.named_parameters():
        assert torch.equal(full(p), before[name]), name
    again = _fit(accelerator, model, optimizer, rank, size)
    tiny.assert_near(again[0], later[0], "losses after the checkpoint was loaded", 1e-6)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_save_state_and_load_state_resume_the_same_run(kind):
    launch(_save_and_load, kind=kind)


def _mixed(rank: int, size: int) -> None:
    accelerator = _accelerator(mixed_precision="bf16")
    model, optimizer = _prepare(accelerator, tiny.llama())
    losses, _ = _fit(accelerator, model, optimizer, rank, size)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    expected, _ = tiny.train(tiny.llama(), steps=STEPS, accumulate=ACCUMULATE, max_norm=MAX_NORM, optimizer=tiny.adamw)
    tiny.assert_near(losses, expected, "losses", 2e-2)


def test_mixed_precision_bf16_stays_near_the_unsharded_losses():
    launch(_mixed)
