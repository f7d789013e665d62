"""Hugging Face's Trainer with `fsdp=True`: the script of a user, with the losses of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import tiny
from launch import assert_sharded_by_us, full, launch, let_accelerate_shard_on_cpu, shared_folder

STEPS, ACCUMULATE, MAX_NORM = 4, 2, 0.5


def _trainer(size: int, folder: Any, **config: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} | config,
        per_device_train_batch_size=tiny.ROWS // size,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=MAX_NORM,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=STEPS // 2,
        disable_tqdm=True,
        report_to="none",
    )
    let_accelerate_shard_on_cpu()  # after the arguments, which look for themselves
    rows = [row for number in range(STEPS * ACCUMULATE) for row in tiny.tokens(number)]
    return InOrder(tiny.llama(), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def _logged(trainer: Any, what: str) -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


def _train(rank: int, size: int, **config: Any) -> None:
    folder = shared_folder()
    trainer = _trainer(size, folder, **config)
    trainer.train()
    assert_sharded_by_us(trainer.model)
    reference = tiny.llama()
    losses, norms = tiny.train(reference, steps=STEPS, accumulate=ACCUMULATE, max_norm=MAX_NORM, optimizer=tiny.adamw)
    expected = [sum(losses[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(losses), ACCUMULATE)]
    tiny.assert_near(_logged(trainer, "loss"), expected, "losses", 1e-4)
    tiny.assert_near(_logged(trainer, "grad_norm"), norms, "gradient norms", 1e-4)
    want = dict(reference.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        plain = want[name.replace("_checkpoint_wrapped_module.", "")]
        tiny.assert_near(full(parameter.detach()), plain.detach(), name, 1e-3)

    # Trainer has registered `generate`, as TRL and predict_with_generate need
    prompt, how = tiny.tokens(0, rows=2, length=5), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(trainer.model.generate(prompt, **how), reference.generate(prompt, **how))

    if config.get("state_dict_type") == "FULL_STATE_DICT":
        from transformers import LlamaForCausalLM

        trainer.save_model(str(folder / "saved"))
        torch.distributed.barrier()
        saved = LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()
        for name, value in reference.state_dict().items():
            tiny.assert_near(saved[name], value, f"saved {name}", 1e-3)

    again = _trainer(size, folder, **config)
    again.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{STEPS // 2}"))
    tiny.assert_near(_logged(again, "loss"), _logged(trainer, "loss"), "losses of the resumed run", 1e-5)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_trainer_trains_generates_saves_and_resumes_like_one_process(kind):
    launch(_train, state_dict_type=kind)


def test_trainer_with_activation_checkpointing_trains_like_one_process():
    launch(_train, activation_checkpointing=True)
