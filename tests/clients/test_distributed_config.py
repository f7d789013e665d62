"""transformers' DistributedConfig: models that from_pretrained shards train, save and load like those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from launch import assert_sharded_by_us, full, launch, let_accelerate_shard_on_cpu, mean_over_ranks, shared_folder

STEPS, ACCUMULATE, MAX_NORM = 3, 2, 0.5


def _experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen3MoeForCausalLM(config)


MODELS = {"llama": tiny.llama, "experts": _experts}


def _load(rank: int, path: Any, whole: Any, sizes: dict[str, int]) -> Any:
    """`whole`, written to `path` by rank 0 and read by all as shards."""
    from transformers import DistributedConfig

    if rank == 0:
        whole.save_pretrained(path)
    torch.distributed.barrier()
    model = type(whole).from_pretrained(path, distributed_config=DistributedConfig(**sizes), dtype=torch.float32)
    assert_sharded_by_us(model)
    assert_sharded_by_us(model.model.layers[0])
    return model


def _train(rank: int, size: int, *, case: str) -> None:
    from transformers import DistributedConfig

    kind, sizes = CASES[size][case]
    folder, reference = shared_folder() / case, MODELS[kind]()
    model = _load(rank, folder / "model", reference, sizes).train()
    tp = sizes.get("tp_size", 1)  # ranks of one tp group have the same rows
    optimizer, losses = tiny.sgd(model), []
    for step in range(STEPS):
        loss = tiny.loss_of(model, tiny.mine(tiny.tokens(step), rank // tp, size // tp))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.item()))
    tiny.assert_near(losses, tiny.train(reference, steps=STEPS)[0], f"{case}: losses")
    want = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        tiny.assert_near(full(parameter.detach()), want[name].detach(), f"{case}: {name}", 1e-4)

    model.save_pretrained(folder / "whole")
    saved = type(reference).from_pretrained(folder / "whole", dtype=torch.float32).state_dict()
    for name, value in reference.state_dict().items():
        tiny.assert_near(saved[name], value, f"{case}: saved {name}", 1e-4)

    model.save_pretrained(folder / "shards", distributed_checkpoint=True)
    again = type(reference).from_pretrained(
        folder / "shards", distributed_config=DistributedConfig(**sizes), dtype=torch.float32
    )
    got = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(full(got[name].detach()), full(parameter.detach())), f"{case}: {name}, read from shards"


CASES: dict[int, dict[str, tuple[str, dict[str, int]]]] = {
    2: {
        "shard": ("llama", {"fsdp_size": 2}),
        # each rank has other experts: their units have one rank, and the gradients of both batches without a reduction
        "whole experts": ("experts", {"fsdp_size": 2, "ep_size": 2}),
    },
    4: {
        "hybrid": ("llama", {"fsdp_size": 2, "dp_replicate_size": 2}),
        "tensor": ("llama", {"fsdp_size": 2, "tp_size": 2}),
        # two ranks shard the same experts, whose gradients are a forced sum with a divide factor
        "sharded experts": ("experts", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    },
}


def _train_each(rank: int, size: int) -> None:
    for case in CASES[size]:  # in one launch, as imports take longer than a case
        _train(rank, size, case=case)


@pytest.mark.parametrize("size", CASES)
def test_models_that_from_pretrained_shards_train_save_and_load_like_one_process(size):
    """Over fsdp, replicas, tensor and expert parallelism, saved as whole files and as shards."""
    launch(_train_each, size=size)


# --- Trainer -----------------------------------------------------------------------------------------------------------


def _adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # it starts at zero, where half of the gradients are zero
    return model


def _fit(rank: int, size: int, *, adapters: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    folder, reference = shared_folder(), tiny.llama()
    model = _load(rank, folder / "model", reference, {"fsdp_size": size})
    if adapters:
        model, reference = _adapted(model), _adapted(reference)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=tiny.ROWS // size,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=MAX_NORM,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",  # Trainer cannot resume these models
        disable_tqdm=True,
        report_to="none",
    )
    let_accelerate_shard_on_cpu()
    rows = [row for number in range(STEPS * ACCUMULATE) for row in tiny.tokens(number)]
    trainer = InOrder(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()

    losses, norms = tiny.train(reference, steps=STEPS, accumulate=ACCUMULATE, max_norm=MAX_NORM, optimizer=tiny.adamw)
    expected = [sum(losses[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(losses), ACCUMULATE)]
    logged = {what: [entry[what] for entry in trainer.state.log_history if what in entry] for what in ("loss", "grad_norm")}
    tiny.assert_near(logged["loss"], expected, "losses", 1e-4)
    tiny.assert_near(logged["grad_norm"], norms, "gradient norms", 1e-4)
    want = dict(reference.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        tiny.assert_near(full(parameter.detach()), want[name].detach(), name, 1e-3)


def test_trainer_trains_a_model_that_from_pretrained_sharded_like_one_process():
    launch(_fit, adapters=False)


def test_trainer_averages_adapters_that_were_added_to_a_sharded_model_by_its_hooks():
    """Trainer gives them hooks that average their gradients, so they may train: each rank ends with those of one process."""
    pytest.importorskip("peft")
    launch(_fit, adapters=True)
