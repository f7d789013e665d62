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
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from fullshard import _torch
from fullshard.core import OPERATORS, ShardedDTensor, parameter_of

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


def unsharded_like(tensor: ShardedDTensor) -> Tensor:
    """Return an uninitialized tensor with the shape and strides of the unsharded parameter."""
    # Strides matter, because random numbers are drawn in memory order.
    local = _torch.local_tensor(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)


def store_shard(tensor: ShardedDTensor, full: Tensor) -> None:
    """Copy this rank's shard of `full`, (tensor.shape), into the parameter."""
    part, parameter = _local_rows(tensor, full), parameter_of(tensor)
    if parameter is not None:
        parameter.wait_for_readers()
    _torch.local_tensor(tensor).copy_(part)
    if parameter is not None:
        parameter.note_write()


def _local_rows(tensor: ShardedDTensor, full: Tensor) -> Tensor:
    """Return this rank's shard of `full`, (tensor.shape)."""
    parameter, spec = parameter_of(tensor), _torch.spec_of(tensor)
    if parameter is not None and tensor.shape == parameter.shape and spec.placements == parameter.sharding.placements:
        return parameter.slice(full).view(_torch.local_tensor(tensor).shape)
    return _torch.local_tensor(distribute_tensor(full, spec.mesh, spec.placements, src_data_rank=None))


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
    _torch.local_tensor(made).copy_(_local_rows(tensor, full))
    return made


OPERATORS.update(dict.fromkeys(_FILLS, _fill))
OPERATORS.update(dict.fromkeys(_LIKE, _fill_like))
