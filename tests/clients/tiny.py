"""A tiny random Llama, its batches, and what training it without sharding gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY, ROWS, LENGTH = 97, 4, 12


def llama(seed: int = 0, *, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,  # 97 divides by nothing
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def tokens(number: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """The same global batch on every rank."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(100 + number))


def mine(batch: Tensor, rank: int, size: int) -> Tensor:
    return batch.chunk(size)[rank]


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def sgd(model: Any) -> torch.optim.Optimizer:
    """Unlike AdamW it notices gradients that are too large or too small by a factor."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)


def train(
    model: Any,
    *,
    steps: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    accumulate: int = 1,
    max_norm: float | None = None,
) -> tuple[list[float], list[float]]:
    """The unsharded program: the losses of all microbatches, and the gradient norms before clipping."""
    losses, norms = [], []
    stepper = optimizer(model)
    for step in range(steps):
        for micro in range(accumulate):
            loss = loss_of(model, tokens(step * accumulate + micro))
            (loss / accumulate).backward()
            losses.append(loss.item())
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        stepper.step()
        stepper.zero_grad()
    return losses, norms


def assert_near(got: Any, expected: Any, what: str, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got), torch.as_tensor(expected), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )
