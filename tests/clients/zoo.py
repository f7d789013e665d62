"""Twelve models of transformers, small, each with a batch of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY, ROWS, LENGTH = 997, 4, 64
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", IDS | DECODER),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", IDS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", IDS | DECODER | {"num_local_experts": 4}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        IDS | DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", IDS | DECODER | {"head_dim": 8, "sliding_window": 8}),
    "BERT": (
        "BertConfig", "BertForMaskedLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4},
    ),
    "T5": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "ViT": (
        "ViTConfig", "ViTForImageClassification",
        {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "num_labels": 5},
    ),
    "Whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "num_mel_bins": 20, "max_source_positions": 64,
         "max_target_positions": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "Mamba": ("MambaConfig", "MambaForCausalLM", IDS | {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 4}),
    "DeepSeek-V3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        IDS | DECODER | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
                         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "GPT-OSS": (
        "GptOssConfig", "GptOssForCausalLM",
        IDS | DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    ),
}  # fmt: skip


def build(kind: str) -> Any:
    import transformers

    config, model, sizes = KINDS[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def batch(kind: str, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=random)
    if kind == "ViT":
        return {
            "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=random),
            "labels": torch.randint(5, (ROWS,), generator=random),
        }
    if kind == "Whisper":
        return {"input_features": torch.randn(ROWS, 20, 128, generator=random), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def meta(kind: str) -> dict[str, Tensor]:
    """The batch without its values."""
    return {name: tensor.to("meta") for name, tensor in batch(kind).items()}
