"""transformers on sharded models: `generate` gives the tokens of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import tiny
from launch import assert_sharded_by_us, launch, mean_over_ranks

STEPS, NEW = 3, 10


def _shard(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "generate")
    assert_sharded_by_us(model)
    return model


def _generate(rank: int, size: int, *, how: dict[str, Any], mixed: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)} if mixed else {}
    model, reference = _shard(tiny.llama(), **options).eval(), tiny.llama().eval()
    if mixed:
        reference.to(torch.bfloat16)
    prompt = tiny.tokens(rank, rows=2, length=5)  # every rank another prompt, and maybe another length
    how = {"max_new_tokens": NEW, "pad_token_id": 0} | how
    for _ in range(2):
        torch.manual_seed(1)
        expected = reference.generate(prompt, **how)
        torch.manual_seed(1)
        assert torch.equal(model.generate(prompt, **how), expected)
    # and it can still be trained, with the losses of one process
    if not mixed:
        model.train()
        tiny.assert_near(_fit(model, rank, size), tiny.train(tiny.llama(), steps=STEPS)[0], "losses after generating")


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


WAYS = {
    "greedy": {"do_sample": False, "min_new_tokens": NEW},
    "sampled": {"do_sample": True, "min_new_tokens": NEW},
    "beams": {"do_sample": False, "num_beams": 3, "min_new_tokens": NEW},
    "ragged": {"do_sample": False},  # the ranks may stop at different lengths
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_tokens_of_one_process(way):
    launch(_generate, how=WAYS[way], mixed=False)


def test_generate_in_bf16_gives_the_tokens_of_one_process():
    launch(_generate, how=WAYS["greedy"], mixed=True)


def _between_steps(rank: int, size: int) -> None:
    model, reference = _shard(tiny.llama()), tiny.llama()
    optimizers = [tiny.sgd(m) for m in (model, reference)]
    prompt = tiny.tokens(9, rows=2, length=5)
    for step in range(STEPS):
        loss = tiny.loss_of(model, tiny.mine(tiny.tokens(step), rank, size))
        loss.backward()
        expected = tiny.loss_of(reference, tiny.tokens(step))
        expected.backward()
        tiny.assert_near(mean_over_ranks(loss.item()), expected.item(), f"loss of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        got, want = (m.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0) for m in (model, reference))
        assert torch.equal(got, want), f"step {step}"


def test_generate_between_training_steps_sees_the_new_weights():
    launch(_between_steps)
