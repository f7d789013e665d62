"""Plan of how one parameter is sharded: its dim, shapes, mesh and placements, with tensor parallelism and hybrid meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from fullshard import _torch
from fullshard.core.layout import Extent
from fullshard.core.mesh import MeshDims, ShardAxis, replicated_axis, resolve_mesh
from fullshard.errors import StateError
from fullshard.policies import StateSharding


@dataclass(frozen=True)
class ShardPlacementResult:
    """Result of `shard_placement_fn`: the dim along which to shard a parameter, and the mesh to shard it over.

    Args:
        placement: `Shard(dim)`, or None for `Shard(0)`.
        mesh_info: a DeviceMesh as `fully_shard` accepts it, an object with such a `.mesh` (torch's FSDPMeshInfo), or None for
            the mesh of the unit. An `.spmd_mesh` is used in place of `.mesh`; `.dp_mesh_dims` names its data-parallel axes.

    Example:
        Shard the experts of a mixture over the ranks with the same experts:

        >>> ShardPlacementResult(Shard(0), expert_data_mesh)                                  # doctest: +SKIP

    Source: `ShardPlacementResult` of torch 2.13's FSDP2.
    """

    placement: Shard | None
    mesh_info: Any = None


PlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


@dataclass(frozen=True, eq=False)
class PlainPart:
    """The DTensor that a plain parameter stands for. Modules compute with the parameter, which is its local tensor."""

    spec: _torch.DTensorSpec  # of the DTensor, on the mesh of all parallelisms
    grad_placements: tuple[Placement, ...]  # of autograd's gradient; Partial on the data-parallel axes and on `summed_axes`
    text: str  # the placements, to compare between ranks
    attributes: tuple[str, ...]  # names of the attributes that mark a parameter as such a part; sharded parameters lack them
    mark: Callable[[Tensor], None]  # sets the attributes on a tensor of the local shape


@dataclass(frozen=True, eq=False)
class ParamSharding:
    """Sharding of one parameter over one shard axis. Many parameters share the axis.

    global shape  --tensor parallelism-->  local shape (unsharded)  --axis, dim-->  shard shape (sharded)
    """

    axis: ShardAxis
    dim: int  # the dim that is sharded over `axis`; 0 for a scalar
    shape: torch.Size  # global
    local_shape: torch.Size  # of the unsharded parameter on this rank, i.e. after tensor parallelism; (1,) for a scalar
    mesh: DeviceMesh  # of the sharded DTensor
    placements: tuple[Placement, ...]  # of the sharded DTensor
    data_axes: tuple[int, ...]  # data-parallel axes of `mesh`; the shard axis, if any, comes last
    tensor_parallel: _torch.DTensorSpec | None = None  # of the DTensor with a local tensor of `local_shape`
    plain_part: PlainPart | None = None  # if modules compute with that local tensor, not with the DTensor
    extent: Extent = field(init=False)  # rows of `local_shape` along `dim` that this rank owns
    is_plain: bool = field(init=False)  # no `tensor_parallel`, no scalar: all-gathered tensors are used as they are

    def __post_init__(self) -> None:
        extent = Extent.of_rank(self.local_shape[self.dim], ranks=self.axis.ranks, rank=self.axis.rank)
        object.__setattr__(self, "extent", extent)
        object.__setattr__(self, "is_plain", self.tensor_parallel is None and len(self.shape) > 0)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard, without padding."""
        if not self.shape:
            return ()
        return (*self.local_shape[: self.dim], self.extent.rows, *self.local_shape[self.dim + 1 :])

    @cached_property
    def tensor_parallel_groups(self) -> tuple[tuple[int, ShardAxis], ...]:
        """For each tensor-parallel axis of several ranks, its index in `mesh` and its ShardAxis."""
        others = [axis for axis in range(self.mesh.ndim) if axis not in self.data_axes and self.mesh.size(axis) > 1]
        names = self.mesh.mesh_dim_names
        return () if names is None else tuple((axis, resolve_mesh(self.mesh[names[axis]])) for axis in others)

    def slice(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of `whole`, the tensor after tensor parallelism (`local_shape`)."""
        if not self.shape:
            return whole
        if type(whole) in (Tensor, nn.Parameter):
            return whole.narrow(self.dim, self.extent.start, self.extent.rows)
        parts = whole.chunk(self.axis.ranks, self.dim)  # subclasses of Tensor implement chunk, not narrow
        return parts[self.axis.rank] if self.axis.rank < len(parts) else parts[0].new_zeros(self.shard_shape)

    def rows_in(self, value: DTensor) -> Tensor | None:
        """Return this rank's rows of a DTensor placed like the sharded or the unsharded parameter; None for others."""
        if _is_on(value, self.mesh, self.placements):
            return _torch.local_tensor(value)
        parallel = self.tensor_parallel
        if parallel is not None and _is_on(value, parallel.mesh, parallel.placements):
            return self.slice(_torch.local_tensor(value))
        return None

    def rows_of(self, value: Tensor, *, name: str, what: str) -> Tensor:
        """Return this rank's rows of a full plain tensor, or of a DTensor that `rows_in` takes. Raise StateError for others."""
        if value.shape != self.shape:
            raise StateError(
                f"Expected {what} of parameter '{name}' to have its shape {tuple(self.shape)}, got shape {tuple(value.shape)}."
            )
        if not isinstance(value, DTensor):
            return self.slice(self.local_of(value))
        rows = self.rows_in(value)
        if rows is None:
            raise StateError(
                f"Expected {what} of parameter '{name}' on {self.mesh} with {self.placements}, got a DTensor on "
                f"{value.device_mesh} with {value.placements}. redistribute() it first, or pass the full tensor."
            )
        return rows

    def spec(self, dtype: torch.dtype) -> _torch.DTensorSpec:
        """Return the spec of the sharded DTensor."""
        return _torch.spec(self.mesh, self.placements, self.shape, dtype)

    def to_module(self, whole: Tensor) -> Tensor:
        """Return the tensor that modules compute with: `whole` itself, or a DTensor whose local tensor is `whole`."""
        if self.plain_part is None:
            return self.to_parallel(whole)
        return whole if self.shape else whole.view(())

    def to_parameter(self, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return `to_module(whole)` as a Parameter."""
        parameter = nn.Parameter(self.to_module(whole), requires_grad=requires_grad)
        if self.plain_part is not None:
            self.plain_part.mark(parameter)
        return parameter

    def to_parallel(self, whole: Tensor) -> Tensor:
        """Return a DTensor with the local tensor `whole`, of shape local_shape; `whole` itself without tensor parallelism."""
        if not self.shape:
            whole = whole.view(())
        parallel = self.tensor_parallel
        if parallel is None:
            return whole
        return _torch.dtensor(whole, _torch.spec(parallel.mesh, parallel.placements, self.shape, whole.dtype))

    def grad_to_local(self, tensor: Tensor, *, name: str, reduce: torch.dtype | None = None) -> Tensor:
        """Return the local tensor of a gradient, redistributed like its parameter, except on axes that the unit sums over.

        `reduce`: dtype of the sum over `summed_axes` of a parameter with a `plain_part`, if wider than the gradient's.
        """
        parallel = self.tensor_parallel
        if parallel is not None and self.plain_part is not None and not isinstance(tensor, DTensor):
            grads = self.plain_part.grad_placements
            if reduce is not None and self.summed_axes:
                tensor = tensor.to(torch.promote_types(tensor.dtype, reduce))
            tensor = _torch.dtensor(tensor, _torch.spec(parallel.mesh, grads, self.shape, tensor.dtype))
        if parallel is not None and isinstance(tensor, DTensor):
            if tensor.device_mesh != parallel.mesh:
                raise ValueError(
                    f"Expected the gradient of parameter '{name}' to be a DTensor on {parallel.mesh}, got one on "
                    f"{tensor.device_mesh}."
                )
            target = list(parallel.placements)
            for axis in self.axis.partial_axes:
                target[axis] = tensor.placements[axis]
            if list(tensor.placements) != target:
                tensor = tensor.redistribute(parallel.mesh, target)
            tensor = _torch.waited(_torch.local_tensor(tensor))
        return tensor if self.shape else tensor.reshape(1)

    @property
    def summed_axes(self) -> list[int]:
        """Axes of the mesh of a `plain_part`, data-parallel ones left out, over which `grad_to_local` sums gradients."""
        placements = () if self.plain_part is None else self.plain_part.grad_placements
        return [axis for axis, one in enumerate(placements) if one.is_partial() and axis not in self.axis.partial_axes]

    def local_of(self, full: Tensor) -> Tensor:
        """Return the part of `full`, a plain tensor of the global shape, that tensor parallelism leaves to this rank."""
        if self.tensor_parallel is None:
            return full
        part = distribute_tensor(full, self.tensor_parallel.mesh, self.tensor_parallel.placements, src_data_rank=None)
        return _torch.local_tensor(part)


def _is_on(value: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Return True if a DTensor has these placements on a mesh with the ranks of `mesh`, whatever the names of the mesh dims."""
    other = value.device_mesh
    same_ranks = other.device_type == mesh.device_type and torch.equal(other.mesh, mesh.mesh)
    return same_ranks and tuple(value.placements) == tuple(placements)


CHECK_LEVEL: list[Callable[[StateSharding, ShardAxis, MeshDims | None], None]] = []
"""Called with the level, axis and `dp_mesh_dims` of each fully_shard() call, to raise ValueError if they do not fit."""

PLAIN_PARTS: list[Callable[[nn.Parameter, ShardAxis, str], PlainPart | None]] = []
"""Called with a plain parameter, its axis and its name; return the PlainPart if it stands for a DTensor, else None."""

CHOOSE_AXIS: list[Callable[[ShardAxis, StateSharding, Tensor, int], ShardAxis]] = []
"""Called with the axis chosen so far, a unit's level, and a parameter's local values and dim; return the parameter's axis."""


def plan_sharding(
    parameter: nn.Parameter, axis: ShardAxis, placement_fn: PlacementFn | None, states: StateSharding, *, name: str
) -> ParamSharding:
    """Return how to shard `parameter`: on dim 0 over `axis`, unless `placement_fn` differs. Raises ValueError. Collective."""
    dim, axis = _requested_placement(parameter, axis, placement_fn, name=name)
    part = None if isinstance(parameter, DTensor) else _plain_part(parameter, axis, name)
    if part is not None:
        parameter = _torch.dtensor(parameter.data, part.spec)  # type: ignore[assignment]
    if isinstance(parameter, DTensor) and (partial := [one for one in parameter.placements if one.is_partial()]):
        raise ValueError(
            f"parameter '{name}' is a DTensor with placements {parameter.placements}: {partial} holds parts of a sum, which "
            "cannot be sharded. redistribute() it to Shard or Replicate first."
        )
    local = _torch.local_part(parameter.data)
    local_shape = local.shape
    if parameter.ndim == 0:  # replicated on all ranks; its gradients are averaged as usual
        axis, dim, local_shape = replicated_axis(axis), 0, torch.Size((1,))
    elif not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            f"Expected shard_placement_fn to return a dim of parameter '{name}' of shape {tuple(parameter.shape)}, "
            f"-{parameter.ndim} to {parameter.ndim - 1}, got dim {dim}."
        )
    else:
        dim %= parameter.ndim
        for choose in CHOOSE_AXIS:
            axis = choose(axis, states, local, dim)
    mesh, placements, data_axes = axis.place(parameter, dim, name=name)
    parallel = _torch.spec_of(parameter) if isinstance(parameter, DTensor) else None
    return ParamSharding(axis, dim, parameter.shape, local_shape, mesh, tuple(placements), data_axes, parallel, part)


def _plain_part(parameter: nn.Parameter, axis: ShardAxis, name: str) -> PlainPart | None:
    return next((part for find in PLAIN_PARTS if (part := find(parameter, axis, name)) is not None), None)


def _requested_placement(
    parameter: nn.Parameter, axis: ShardAxis, placement_fn: PlacementFn | None, *, name: str
) -> tuple[int, ShardAxis]:
    """Return the dim and the axis that `placement_fn` requests."""
    if placement_fn is not None and not callable(placement_fn):
        raise ValueError(f"shard_placement_fn must be callable or None, got {placement_fn!r}.")
    chosen = placement_fn(parameter) if placement_fn is not None else None
    if isinstance(chosen, (Shard, type(None))):
        return (0 if chosen is None else chosen.dim), axis
    if not hasattr(chosen, "placement") or not hasattr(chosen, "mesh_info"):
        raise ValueError(
            f"shard_placement_fn must return None, Shard(dim) or a ShardPlacementResult, got {chosen!r} for parameter '{name}'."
        )
    if not isinstance(chosen.placement, (Shard, type(None))):
        raise ValueError(f"ShardPlacementResult.placement must be Shard(dim) or None, got {chosen.placement!r} for '{name}'.")
    info = chosen.mesh_info
    if info is not None:
        # if torch's mesh_info has a full mesh (`spmd_mesh`), its `mesh` has only the data-parallel axes
        full, dims = getattr(info, "spmd_mesh", None), getattr(info, "dp_mesh_dims", None)
        mesh = info if isinstance(info, DeviceMesh) else full if full is not None else getattr(info, "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"ShardPlacementResult.mesh_info of parameter '{name}' must be or have a DeviceMesh, got {info!r}."
            )
        if mesh is not axis.mesh:
            axis = resolve_mesh(mesh, dims)
    return (0 if chosen.placement is None else chosen.placement.dim), axis
