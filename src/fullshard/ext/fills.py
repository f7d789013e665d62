"""Random fills of sharded parameters: `torch.nn.init` and `reset_parameters()` outside of materialize().

A fill draws the unsharded tensor on each rank, which then keeps its shard. If all ranks have the same seed, the weights equal
those of the unsharded model for any number of ranks, and so do the states of the generators afterwards. A fill needs memory for
one unsharded parameter. If the seeds differ, the shards belong to different models: replicas are compared at the first forward,
but shards cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fullshard import _torch
from fullshard.core import ShardedDTensor, local_rows, register_operator, store_shard, unsharded_like

_ATEN = torch.ops.aten
# Operators that overwrite the whole tensor without reading it.
_FILLS = (
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.exponential_.default, _ATEN.geometric_.default),
    *(_ATEN.cauchy_.default, _ATEN.log_normal_.default, _ATEN.bernoulli_.float),
    *(_ATEN.random_.default, getattr(_ATEN.random_, "from"), _ATEN.random_.to),
    *(_ATEN.eye.out, _ATEN.eye.m_out),
)
_LIKE = (
    *(_ATEN.rand_like.default, _ATEN.rand_like.generator, _ATEN.randn_like.default, _ATEN.randn_like.generator),
    *(_ATEN.randint_like.default, _ATEN.randint_like.low_dtype),
)


def _fill(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a fill on an unsharded tensor and keep this rank's shard."""
    out = kwargs.get("out")
    tensor: ShardedDTensor = args[0] if out is None else out
    if tensor.device.type == "meta":
        return None
    full = unsharded_like(tensor)
    if out is None:
        func(full, *args[1:], **kwargs)
    else:
        func(*args, **{**kwargs, "out": full})
    store_shard(tensor, full)
    return tensor


def _fill_like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a new tensor, sharded as the first argument, with this rank's shard of random numbers."""
    tensor: ShardedDTensor = args[0]
    if tensor.device.type == "meta":
        return None
    full = func(unsharded_like(tensor), *args[1:], **kwargs)
    made: Any = torch.empty_like(tensor, dtype=full.dtype, memory_format=torch.contiguous_format)
    _torch.local_tensor(made).copy_(local_rows(tensor, full))
    return made


for _operators, _handler in ((_FILLS, _fill), (_LIKE, _fill_like)):
    for _operator in _operators:
        register_operator(_operator, _handler)

__all__: list[str] = []
