"""DTensors, their specs and placements, and device meshes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

# --- specs and placements --------------------------------------------------------------------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)  # as torch does for empty tensors
    return tuple(strides)


def spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a contiguous DTensor of global `shape`."""
    # Private: `DTensorSpec` and `TensorMeta`. A spec is built once per parameter and then shared by all its gradients and
    # optimizer states; the public constructors build one for each tensor.
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, contiguous_strides(shape), dtype))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of an FSDP shard of `dim`, which a mesh dim to its right shards into `split_factor` parts."""
    # Private: `_StridedShard`, the placement of FSDP2 with tensor parallelism. If its meaning changes, `full_tensor()` and
    # checkpoints get rows in a wrong order, silently.
    return _StridedShard(dim, split_factor=split_factor)


def is_shard(placement: Placement, dim: int | None = None) -> bool:
    """Return True if a placement shards (`dim`, if given), strided or not."""
    # Private: `_StridedShard`, which is not a subclass of Shard.
    return isinstance(placement, (Shard, _StridedShard)) and (dim is None or placement.dim == dim)


# Private: `_spec`. The public properties give mesh and placements, but not the object that other DTensors can share.
spec_of: Callable[[Any], DTensorSpec] = operator.attrgetter("_spec")


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the spec of each DTensor, and None for other values."""
    return [getattr(tensor, "_spec", None) for tensor in tensors]


# --- DTensors and their local tensors --------------------------------------------------------------------------------


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over `local` without a check or a copy, in 2 us.

    `DTensor.from_local` takes 7 times as long.
    """
    # Private: the arguments of `DTensor.__new__`. Calling the class would also run its empty `__init__` in dynamo's wrapper.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


def dtensor_like(origin: Tensor, local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return `dtensor(local, spec)` with the storage offset of `origin`, a tensor like `local` at the start of a storage.

    See `as_own_storage`.
    """
    # Private: `_local_tensor`. `__new__` copies dtype, device and storage offset from its argument to the wrapper and keeps
    # the argument as the local tensor, which is then replaced.
    made = DTensor.__new__(DTensor, origin, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
    made._local_tensor = local
    return made


def turned_into_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """Turn `tensor` itself into a Parameter. `nn.Parameter(tensor)` detaches it first, which DTensor dispatches: 30 us."""
    # Private: `_is_param`, the flag that makes `isinstance(tensor, nn.Parameter)` True for tensor subclasses. If it changes,
    # modules refuse the sharded parameters with TypeError.
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def parts_of(
    flat: Tensor,
    views: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]],  # (shape, strides, offset) of each part
    origins: Iterable[Tensor | None],  # a tensor like each part at the start of a storage, as in `dtensor_like`, or None
    specs: Iterable[DTensorSpec],
) -> list[DTensor]:
    """Return parts of `flat`, a flat gradient, as DTensors."""
    # `dtensor_like` is inlined: this loop may run for every parameter in every backward.
    made = []
    for view, origin, spec in zip(views, origins, specs):
        local = flat.as_strided(*view)
        like = local if origin is None else origin
        part = DTensor.__new__(DTensor, like, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
        part._local_tensor = local
        made.append(part)
    return made


def holders(parts: Sequence[DTensor], inner: Sequence[Tensor], flat: Tensor) -> tuple[int, ...]:
    """Return counts of what refers to DTensors over parts of `flat`, in Python and C++, and of attributes users set on them.

    `inner`: their local tensors. While the counts are those of when only the caller referred to `parts`, they and their memory
    belong to the caller.
    """
    # Private: the C++ reference count of the storage. References to a tensor in C++ count as one to its Python object. Each of
    # the counts only increases when somebody else gets a reference.
    storage = flat.untyped_storage()  # one object as long as somebody has it
    return (
        sum(map(sys.getrefcount, parts)) + sum(map(len, map(vars, parts))),
        sum(map(sys.getrefcount, inner)),
        sys.getrefcount(storage) + torch._C._storage_Use_Count(storage._cdata),  # type: ignore[attr-defined]
    )


@cache
def counts_holders() -> bool:
    """Return True if torch counts a `.grad` and the like as a reference to the Python object, as `holders` needs it."""
    held, holder = torch.zeros(1), nn.Parameter(torch.zeros(1))
    before = sys.getrefcount(held)
    holder.grad = held
    return sys.getrefcount(held) > before


def are_as_made(parts: Sequence[DTensor], inner: Sequence[Tensor], specs: Sequence[DTensorSpec]) -> bool:
    """Return True if DTensors have the local tensors and specs that they were made with, which dynamo and users may replace."""
    if not all(map(operator.is_, map(local_tensor, parts), inner)):
        return False
    found = [*map(spec_of, parts)]
    return all(map(operator.is_, found, specs)) or all(map(operator.eq, found, specs))


local_tensor: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
"""Return the tensor object that a DTensor wraps. `to_local()` returns a view of it, and autograd records that."""


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; other tensors unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the local tensors of DTensors; other values unchanged."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def with_version_of(detached: DTensor, origin: DTensor) -> DTensor:
    """Give the local tensors of `origin` and of `detached`, its `detach()`, one version counter.

    DTensor's dispatch detaches the local tensor below autograd, which gives it a counter of its own. Then writes to local
    tensors in a state dict, as of torch.distributed.checkpoint, would not be seen in the shards. A tensor subclass stays as it
    was detached: the values of a wrapper are those of tensors inside of it.
    """
    if type(origin._local_tensor) is Tensor and not detached.is_inference():
        detached._local_tensor = origin._local_tensor.detach()
    return detached


def point_at(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of `tensor` by `local`. The global shape and dtype of `tensor` must already fit."""
    # Private: `_local_tensor`. The wrapper cannot change its shape, dtype or device.
    tensor._local_tensor = local


def as_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor over the memory of `tensor`, in a storage that begins and ends with it. Nothing is copied.

    A DTensor copies the storage offset of its local tensor. torch.save and asynchronous checkpoints then treat the wrapper as a
    tensor with memory, even an empty one, and torch.save saves whole storages. The result has a version counter of its own.
    """
    # Private: a slice of an untyped storage is a storage over the same memory, which keeps the whole one alive. If slicing
    # copies one day, the result no longer aliases `tensor`, and parameters no longer follow the flat shard.
    if type(tensor) is not Tensor or tensor.device.type == "meta":
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    first = tensor.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    storage = tensor.untyped_storage()[first * tensor.itemsize : (first + length) * tensor.itemsize]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def in_own_storage(rows: Tensor) -> Tensor:
    """Return `rows`, a new view of a flat shard, in a storage of its own as `as_own_storage`, with the flat shard's counter.

    So a write to any part of the flat shard increases the version of all of them, and one read shows it.
    """
    # Private: `set_` of a view changes its storage, but keeps its version counter. `detach` makes it no view.
    if type(rows) is not Tensor or not rows.numel() or rows.device.type == "meta":
        return as_own_storage(rows)
    first = rows.storage_offset() * rows.itemsize
    storage = rows.untyped_storage()[first : first + rows.numel() * rows.itemsize]
    return rows.set_(storage, 0, rows.shape, rows.stride()).detach()  # type: ignore[call-overload]


def counted_by(counter: DTensor, tensor: DTensor) -> DTensor:
    """Return a DTensor like `tensor`, over the same local tensor, with the version counter of `counter`."""
    # Private: a detached tensor shares the version counter of its origin, and setting `data` leaves it its counter.
    with torch.no_grad():
        made: Any = counter.detach()
        torch.Tensor.data.__set__(made, tensor)  # type: ignore[attr-defined]
    made._local_tensor, made._spec = tensor._local_tensor, tensor._spec
    return made


def waited(tensor: Tensor) -> Tensor:
    """Return `tensor`; if it is the result of a functional collective, wait for it and return the plain tensor."""
    # Private: `AsyncCollectiveTensor`, a wrapper without a storage. The result is complete only after `wait()`.
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def whole_of(sharded: ShardedTensor, device: torch.device) -> Tensor:
    """Return the full tensor of a ShardedTensor (collective over its process group)."""
    # Private: `_process_group`. `ShardedTensor.gather` writes the full tensor on one rank only.
    metadata = sharded.metadata()
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in sharded.local_shards()}
    whole = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for part in metadata.shards_metadata:
        held = own.get(tuple(part.shard_offsets))
        piece = torch.empty(part.shard_sizes, dtype=whole.dtype, device=device) if held is None else held.detach().to(device)
        piece = piece.contiguous()
        owner: Any = part.placement
        dist.broadcast(piece, owner.rank(), group=sharded._process_group)
        whole[tuple(slice(at, at + size) for at, size in zip(part.shard_offsets, part.shard_sizes))] = piece
    return whole


# --- device meshes ---------------------------------------------------------------------------------------------------


def axis_of(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """Return one mesh dim of `mesh` as a mesh. The dims of `mesh` may have no names."""
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh dims `names` of `mesh` as one mesh dim. Flattening several creates a process group the first time."""
    # Private: `_flatten`, for hybrid meshes whose shard or replicate dim consists of several mesh dims.
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the mesh dims of several submeshes. Raise RuntimeError if they are not of the same root mesh."""
    # Private: `_concatenate`, which FSDP2 uses for the mesh of FSDP and tensor parallelism. It creates no process group.
    return DeviceMesh._concatenate(list(meshes))


def mesh_of_groups(device_type: str, ranks: Tensor, groups: Sequence[Any], names: Sequence[str]) -> DeviceMesh:
    """Return a mesh over existing process groups, one per mesh dim of `ranks`, in the order of their ranks.

    A mesh that `DeviceMesh` makes of `ranks` would have process groups of sorted ranks. If they are not sorted in `ranks`, the
    rows of `full_tensor()` would be in a wrong order.
    """
    one = len(groups) == 1
    return DeviceMesh.from_group(groups[0] if one else list(groups), device_type, ranks, mesh_dim_names=tuple(names))


def groups_of(mesh: DeviceMesh) -> list[Any]:
    """Return the process group of each mesh dim; None for a destroyed one."""
    found: list[Any] = []
    for axis in range(mesh.ndim):
        try:
            found.append(mesh.get_group(axis))
        except (RuntimeError, ValueError, KeyError):
            found.append(None)
    return found
