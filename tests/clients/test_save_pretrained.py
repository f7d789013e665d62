"""save_weights and transformers' `save_pretrained`: the same files, byte for byte, and each reads those of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from launch import launch, shared_folder

from fullshard.weights import Merge, Rename, Sort, Split, Stack, Unstack

EXPERTS = r"(.*)[.]mlp[.]experts"
FROM_FILES = [
    Rename("block_sparse_moe", "mlp"),
    *(Stack(rf"{EXPERTS}[.](\d+)[.]{w}[.]weight", rf"\1.mlp.experts.{w}") for w in ("w1", "w3")),
    Merge([rf"{EXPERTS}[.]w1", rf"{EXPERTS}[.]w3"], r"\1.mlp.experts.gate_up_proj", dim=1),
    Stack(rf"{EXPERTS}[.](\d+)[.]w2[.]weight", r"\1.mlp.experts.down_proj"),
]
TO_FILES = [
    Sort(),
    Split(rf"{EXPERTS}[.]gate_up_proj", [r"\1.mlp.experts.w1", r"\1.mlp.experts.w3"], dim=1),
    Rename(r"experts[.]down_proj$", "experts.w2"),
    Unstack(rf"{EXPERTS}[.](w[123])", r"\1.mlp.experts.{}.\2.weight"),
    Rename(r"[.]mlp[.]", ".block_sparse_moe."),
]
"""Mixtral is fused in memory, and in its files as it was published."""

SMALL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": SMALL | ATTENTION | {"hidden_size": 32, "intermediate_size": 56},
    "GPT2": SMALL | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "Mixtral": SMALL | ATTENTION | {"hidden_size": 32, "intermediate_size": 56, "num_local_experts": 3},
    "Qwen2": SMALL | ATTENTION | {"hidden_size": 32, "intermediate_size": 56, "tie_word_embeddings": True},
}


def build(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _compare(rank: int, size: int, *, kind: str, most: int, dtype: Any) -> None:
    import torch.distributed as dist

    import fullshard

    folder = shared_folder()
    theirs, ours = folder / "theirs", folder / "ours"
    whole = build(kind).to(dtype)
    if rank == 0:
        whole.save_pretrained(theirs, max_shard_size=most)
    dist.barrier()
    with torch.device("meta"):
        model = build(kind).to(dtype)
    fullshard.shard_model(model)
    fused = kind == "Mixtral"
    loaded = fullshard.load_weights(model, theirs, key_map=FROM_FILES if fused else None)
    assert not loaded.missing and not loaded.unexpected
    expected = whole.state_dict()
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, expected[name]), name

    extra = {name: theirs / name for name in ("config.json", "generation_config.json")}
    saved = fullshard.save_weights(model, ours, max_shard_bytes=most, extra=extra, key_map=TO_FILES if fused else None)
    assert len(saved.files) > 1 or most > 10**6
    assert sorted(contents(ours)) == sorted(contents(theirs))
    for name, data in contents(theirs).items():
        assert contents(ours)[name] == data, name
    again, told = type(whole).from_pretrained(ours, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    dist.barrier()


@pytest.mark.parametrize("most", [10**9, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_save_pretrained(kind: str, most: int) -> None:
    launch(
        _compare,
        size=3 if most > 10**6 else 2,
        kind=kind,
        most=most,
        dtype=torch.float32 if kind != "Llama" else torch.bfloat16,
    )
