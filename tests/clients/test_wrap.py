"""Models of transformers sharded in one call: the units that a practitioner would choose, and training as the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from expecttest import assert_expected_inline
from launch import full, launch

ROWS, LENGTH = 4, 8


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=500,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=16, n_embd=32, n_layer=3, n_head=4, **off))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=500,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=500, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
        )
    )


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=10,
        )
    )


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=500,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )


def _inputs(build: Callable[[], Any], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 500, (ROWS, LENGTH), generator=generator)
    if build is vit:
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator), "labels": tokens[:, 0] % 10}
    return {"input_ids": tokens, "labels": tokens}


def plan_of(build: Callable[[], Any]) -> str:
    from fullshard import plan_model

    return str(plan_model(build()))


def test_llama() -> None:
    assert_expected_inline(
        plan_of(llama),
        """\
unit                  class                  parameters   elements         bytes  options  why
model.embed_tokens    Embedding                       1     16,000      62.5 KiB           as large as a block
model.layers.0 ... 3  4 x LlamaDecoderLayer       4 x 9  4 x 9,280  4 x 36.2 KiB           one of 4 blocks
model.norm+lm_head    LlamaRMSNorm, Linear            2     16,032      62.6 KiB           as large as a block
(model)               LlamaForCausalLM                0          0           0 B           what is left
7 units hold 39 parameters: 69,152 elements, 270.1 KiB; the largest holds 62.6 KiB""",
    )


def test_gpt2() -> None:
    assert_expected_inline(
        plan_of(gpt2),
        """\
unit                   class            parameters    elements         bytes  options  why
transformer.h.0 ... 2  3 x GPT2Block        3 x 12  3 x 12,704  3 x 49.6 KiB           one of 3 blocks
(model)                GPT2LMHeadModel           4      16,576      64.8 KiB           what is left
4 units hold 40 parameters: 54,688 elements, 213.6 KiB; the largest holds 64.8 KiB""",
    )


def test_bert() -> None:
    assert_expected_inline(
        plan_of(bert),
        """\
unit                        class            parameters    elements         bytes  options  why
bert.encoder.layer.0 ... 2  3 x BertLayer        3 x 16  3 x 12,704  3 x 49.6 KiB           one of 3 blocks
(model)                     BertForMaskedLM          10      18,260      71.3 KiB           what is left
4 units hold 58 parameters: 56,372 elements, 220.2 KiB; the largest holds 71.3 KiB""",
    )


def test_t5() -> None:
    assert_expected_inline(
        plan_of(t5),
        """\
unit                   class                       parameters    elements         bytes  options  why
encoder.block.0        T5Block                              9       8,384      32.8 KiB           one of 6 blocks
encoder.block.1 ... 2  2 x T5Block                      2 x 8   2 x 8,256  2 x 32.2 KiB           one of 6 blocks
decoder.block.0        T5Block                             14      12,512      48.9 KiB           one of 6 blocks
decoder.block.1 ... 2  2 x T5Block                     2 x 13  2 x 12,384  2 x 48.4 KiB           one of 6 blocks
(model)                T5ForConditionalGeneration           3      16,064      62.8 KiB           what is left
7 units hold 68 parameters: 78,240 elements, 305.6 KiB; the largest holds 62.8 KiB""",
    )


def test_vit() -> None:
    assert_expected_inline(
        plan_of(vit),
        """\
unit                class                      parameters   elements         bytes  options  why
vit.layers.0 ... 2  3 x ViTLayer                   3 x 16  3 x 8,544  3 x 33.4 KiB           one of 3 blocks
(model)             ViTForImageClassification           8      2,538       9.9 KiB           what is left
4 units hold 56 parameters: 28,170 elements, 110.0 KiB; the largest holds 33.4 KiB""",
    )


def test_a_mixture_of_experts() -> None:
    assert_expected_inline(
        plan_of(mixtral),
        """\
unit                  class                    parameters    elements         bytes  options  why
model.embed_tokens    Embedding                         1      16,000      62.5 KiB           as large as a block
model.layers.0 ... 2  3 x MixtralDecoderLayer       3 x 9  3 x 21,696  3 x 84.8 KiB           one of 3 blocks
model.norm+lm_head    MixtralRMSNorm, Linear            2      16,032      62.6 KiB           as large as a block
(model)               MixtralForCausalLM                0           0           0 B           what is left
6 units hold 30 parameters: 97,120 elements, 379.4 KiB; the largest holds 84.8 KiB""",
    )


def _two_steps(rank: int, size: int, *, name: str) -> None:
    from fullshard import shard_model
    from fullshard.core import units_of

    build = globals()[name]
    torch.manual_seed(1)
    model = build()
    sharded = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = shard_model(sharded)
    assert len(units_of(sharded, True)) == len(plan.units) > 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(2):
        inputs = _inputs(build, step)
        mine = {key: value.chunk(size)[rank] for key, value in inputs.items()}
        sharded(**mine).loss.backward()
        model(**inputs).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(model.named_parameters())
    for key, parameter in sharded.named_parameters():
        torch.testing.assert_close(full(parameter), expected[key], rtol=1e-4, atol=1e-5, msg=lambda text: f"{key}: {text}")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "mixtral"])
def test_two_steps_equal_those_of_the_plain_model(name: str) -> None:
    launch(_two_steps, name=name)
