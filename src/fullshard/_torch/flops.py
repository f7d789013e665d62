"""Floating-point operations of matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
math_attention = torch.ops.aten._scaled_dot_product_attention_math
"""Attention kernels. The first result of each is the result of `scaled_dot_product_attention`.

Private: the public function selects one of them by device; on meta, it always decomposes. The estimator selects the kernel that
the real device would run.
"""


def _flops_of_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count the two products of forward: query with key, and attention weights with value."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _flops_of_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count the five products of backward: recomputed scores, and gradients of weights, values, queries and keys."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


grouped_mm = torch.ops.aten._grouped_mm
"""Products of rows, sorted by group, with one matrix for each group, as in a mixture of experts."""


def _flops_of_groups(one: Tensor, other: Tensor, *_: object, **__: object) -> int:
    """Count the products of all groups. Each row of the first factor, or each index of the summed dim, is in one group."""
    rows = one.shape[0] if other.dim() == 3 and one.dim() == 2 else one[..., 0].numel()
    return 2 * rows * one.shape[-1] * other.shape[-1]


# Formulas that torch lacks: torch 2.11 raises for fewer heads of keys than of queries, torch before 2.15 does not count the
# CPU's kernel, and no version counts grouped_mm.
_FLOPS: dict[Any, Callable[..., int]] = {
    flash_attention: _flops_of_attention,
    efficient_attention: _flops_of_attention,
    flash_attention_on_cpu: _flops_of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _flops_of_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _flops_of_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flops_of_attention_backward,
    grouped_mm: _flops_of_groups,
}

_PRODUCTS_WITH_SUMMAND = {torch.ops.aten.addmm, torch.ops.aten.baddbmm}
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten._scaled_mm, *_PRODUCTS_WITH_SUMMAND}


def grouped_mm_shape(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty result of `grouped_mm`, with rows aligned to 16 bytes as torch's kernel aligns them."""
    if one.dim() == other.dim() == 2:  # the summed dim is in groups
        assert offs is not None
        shape = (offs.shape[0], one.shape[0], other.shape[1])
    else:
        shape = (*one.shape[:-1], other.shape[-1]) if one.dim() == other.dim() else (one.shape[-2], other.shape[-1])
    dtype = out_dtype or one.dtype
    aligned = 16 // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=one.device)


def product_in_float8(one: Tensor, other: Tensor) -> Tensor:
    """Return `one @ other.t()` in bf16, of matrices in a float8 dtype and without scaling.

    Private: `torch._scaled_mm`, which is what torchao and torchtitan call.
    """
    scale = torch.ones((), device=one.device)
    return torch._scaled_mm(one, other.t(), scale, scale, out_dtype=torch.bfloat16)


def count_flops(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the floating-point operations of a matrix product or of attention; 0 of others. A multiply-add counts as two."""
    ours = _FLOPS.get(operation.overloadpacket)
    if ours is not None:
        return ours(*args, **kwargs)
    count = flop_registry.get(operation.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def sizes_of_product(operation: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return (rows, inner, columns) of a matrix product, (head dim, length of the keys) of attention; else ()."""
    packet = operation.overloadpacket
    if packet in _FLOPS and packet is not grouped_mm:
        query, key = args[1:3] if "backward" in str(packet) else args[:2]
        return query.shape[-1], key.shape[-2]
    if packet not in _PRODUCTS:
        return ()
    one, other = args[1:3] if packet in _PRODUCTS_WITH_SUMMAND else args[:2]
    return one.shape[-2], one.shape[-1], other.shape[-1]
