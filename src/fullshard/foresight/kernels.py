"""Fused kernels on meta: attention, dropout and RMSNorm as an accelerator runs them.

The meta device decomposes these operators. Decomposed attention saves a (length, length) matrix for each head, which a fused
kernel does not.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from fullshard import _torch


def fused_kernels(*, accelerator: bool) -> AbstractContextManager[None]:
    """Return a context in which meta tensors run the fused kernels of an accelerator or of the CPU (attention only)."""
    if not accelerator:
        return _torch.meta_kernels({"scaled_dot_product_attention": _attention_on_cpu})
    _register_shardings()
    return _torch.meta_kernels({"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm, "dropout": _dropout})


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the CPU's flash attention, or decompose attention where torch does so on the CPU."""
    mask_needs_grad = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if dropout_p or query.dim() != 4 or query.shape[-1] != value.shape[-1] or mask_needs_grad:
        return _torch.math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and not attn_mask.is_floating_point():
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # a float mask; on meta the values do not matter
    return _torch.flash_attention_on_cpu(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _attention(
    query: Tensor,  # (..., heads, length, dim)
    key: Tensor,  # (..., heads of keys and values, length of the keys, dim)
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the attention kernel that torch selects on CUDA: flash, memory-efficient or math attention."""
    flash_supported = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1] <= 256
    if query.dim() == 4 and attn_mask is None and flash_supported:
        return _torch.flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    # The memory-efficient kernel takes 4 dims and equal numbers of heads.
    if query.dim() != 4 or (enable_gqa and key.shape[-3] != query.shape[-3]):
        return _torch.math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    bias = attn_mask
    if bias is not None:
        bias = bias if bias.is_floating_point() else torch.zeros_like(bias, dtype=query.dtype)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    saves_logsumexp = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return _torch.efficient_attention(query, key, value, bias, saves_logsumexp, dropout_p, is_causal, scale=scale)[0]


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Run the fused dropout kernel, which saves a mask of one byte per element."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    return torch.native_dropout(x, p, True)[0]


# torch's fused RMSNorm has no meta kernel, and none can be registered. These operators replace it. rms_norm returns the output
# and, in fp32, the reciprocal root mean square of each row. rms_norm_backward returns the gradients of x and of the weight.
_LIBRARY = torch.library.Library("fullshard_foresight", "DEF")
_LIBRARY.define("rms_norm(Tensor x, int[] normalized_shape, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight) -> (Tensor, Tensor?)")


@torch.library.impl(_LIBRARY, "rms_norm", "Meta")
def _(x: Tensor, normalized_shape: list[int], weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@torch.library.impl(_LIBRARY, "rms_norm_backward", "Meta")
def _(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


@functools.cache
def _register_shardings() -> None:
    """Tell DTensor that rows of an RMSNorm may be sharded, as by sequence parallelism."""
    from torch.distributed.tensor.experimental import register_sharding  # here, since the import takes 25 ms

    operators = torch.ops.fullshard_foresight
    register_sharding(operators.rms_norm.default)(_placements)
    register_sharding(operators.rms_norm_backward.default)(_placements_in_backward)


def _placements(x: Any, normalized_shape: list[int], weight: Any) -> list[Any]:
    """Return the allowed placements of (outputs, inputs) on one mesh dim: all replicated, or sharded along one dim of rows."""
    of_weight = None if weight is None else Replicate()
    places: list[Any] = [Replicate(), *map(Shard, range(x.ndim - len(normalized_shape)))]
    return [([place, place], [place, None, of_weight]) for place in places]


def _placements_in_backward(grad: Any, x: Any, rstd: Any, weight: Any) -> list[Any]:
    of_weight = None if weight is None else Replicate()
    sums = None if weight is None else Partial()  # each rank sums over its rows
    rows = [Shard(dim) for dim in range(x.ndim) if rstd.shape[dim] == x.shape[dim] > 1]
    whole = Replicate()
    return [
        ([whole, of_weight], [whole, whole, whole, of_weight]),
        *(([place, sums], [place, place, place, of_weight]) for place in rows),
    ]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized_shape: list[int], weight: Tensor | None) -> Tensor:
        out, rstd = torch.ops.fullshard_foresight.rms_norm(x, normalized_shape, weight)
        ctx.save_for_backward(x, rstd, weight)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None]:
        grad_x, grad_weight = torch.ops.fullshard_foresight.rms_norm_backward(grads[0], *ctx.saved_tensors)
        return grad_x, None, grad_weight


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, shape, weight)  # type: ignore[no-any-return]
