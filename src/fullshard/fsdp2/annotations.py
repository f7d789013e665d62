"""Plain parameters that spmd_types annotates with the axes of a mesh over which their ranks have equal values, or parts.

Such a parameter is stored as the DTensor that its annotation describes, on the full mesh of `dp_mesh_dims`. Modules compute
with the plain tensor, whose gradient becomes a DTensor again, with these placements over the axes that are not data-parallel:

    annotation   parameter      gradient
    R            Replicate()    Partial(): summed before the reduction over data
    I            Replicate()    Replicate(): equal on all ranks
    S(d)         Shard(d)       Shard(d)

Source: spmd_types, as torch 2.15's `fully_shard` takes its annotations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fullshard import _torch
from fullshard.core import PLAIN_PARTS, UNIT_CREATED, Originals, PlainPart, ShardAxis, Unit


def _annotated_part(parameter: nn.Parameter, axis: ShardAxis, name: str) -> PlainPart | None:
    """Return how an annotated parameter is a part of a DTensor on the full mesh; None for one without annotation.

    Raises ValueError if the annotation does not fit the mesh.
    """
    annotation = _torch.annotation_of(parameter)
    if annotation is None:
        return None
    mesh: DeviceMesh | None = getattr(axis, "full_mesh", None)
    if mesh is None:
        raise ValueError(
            f"Parameter '{name}' is annotated by spmd_types, so fully_shard() needs the mesh of all parallelisms, with "
            "mesh_dim_names, and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...), which names its data-parallel "
            "axes."
        )
    names = mesh.mesh_dim_names or ()
    own = [_torch.mesh_axis(mesh, one) for one in names]
    axes = _axes_to_restore(annotation, own, name)
    data = [own[index] for index in axis.partial_axes]
    placements: list[Placement] = [Replicate()] * mesh.ndim
    gradients: list[Placement] = [Partial() if index in axis.partial_axes else Replicate() for index in range(mesh.ndim)]
    found = {one for index, one in enumerate(own) if index in axis.partial_axes or mesh.size(index) == 1}
    sharded_dims = {one: dim for dim, by in annotation.sharded.items() for one in by}
    for one, plain_kind in annotation.kinds.items():
        dim = sharded_dims.get(one)
        kind = plain_kind if dim is None else "S"
        if kind == "P":
            raise ValueError(
                f"Parameter '{name}' is annotated P over {one}: the ranks there have parts of a sum. Annotate it R, I or "
                "S(dim)."
            )
        if _torch.is_within(one, data):
            if kind != "R":
                raise ValueError(
                    f"Expected R over the data-parallel axis {one} for parameter '{name}', got {kind}. Leave the axis out: "
                    "fully_shard() shards over it."
                )
            continue
        if one not in own:
            raise ValueError(
                f"Parameter '{name}' is annotated over {one}, which is none of the axes {names} of the mesh, nor among the "
                "data-parallel ones. Annotate it over the axes of the mesh of fully_shard()."
            )
        if kind == "V":
            raise ValueError(f"Parameter '{name}' is annotated V over {one}. Annotate S(dim), which says what differs.")
        index = own.index(one)
        found.add(one)
        if dim is not None:
            placements[index] = gradients[index] = Shard(dim)
        elif kind == "R":
            gradients[index] = Partial()
    missing = [one for one, known in zip(names, own) if known not in found]
    if missing:
        raise ValueError(
            f"The annotation of parameter '{name}' says nothing about the axes {missing} of the mesh, which are not "
            "data-parallel. Annotate it R, I or S(dim) there."
        )
    for dim, by in annotation.sharded.items():
        order = [own.index(one) for one in by if one in own]
        if order != sorted(order):
            raise ValueError(
                f"Dim {dim} of parameter '{name}' is sharded over {by}, in another order than that of the mesh axes {names}. "
                "Annotate it in the order of the mesh."
            )
    shape = list(parameter.shape)
    for index, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(index)
    spec = _torch.spec(mesh, placements, torch.Size(shape), parameter.dtype)
    text = f" annotated for {tuple(map(str, placements))}, its gradient for {tuple(map(str, gradients))}"
    mark = partial(_torch.annotate, annotation=annotation, axes=axes)
    return PlainPart(spec, tuple(gradients), text, _torch.ANNOTATION_ATTRIBUTES, mark)


def _axes_to_restore(annotation: _torch.Annotation, own: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Return axes that span the mesh, on which unsharded parameters are annotated: the parameter's, or the current mesh's."""
    axes = tuple(annotation.kinds)
    if _torch.span_the_same(axes, own):
        return axes
    current = _torch.current_axes()
    if current is None:
        raise ValueError(
            f"The annotation of parameter '{name}' is over {axes}, which do not span the mesh. Annotate it over all axes, or "
            "call fully_shard() within spmd_types.set_current_mesh(), whose axes say over which others it is R."
        )
    foreign = [one for one in axes if one not in current]
    if foreign or not _torch.span_the_same(current, own):
        raise ValueError(
            f"The current mesh of spmd_types has the axes {tuple(current)}. Expected axes that span the mesh of fully_shard(), "
            f"and with those of the annotation of parameter '{name}', {axes}."
        )
    return tuple(current)


PLAIN_PARTS.append(_annotated_part)


_OF_UNITS = ("check_first_use", "pre_forward", "post_forward", "pre_backward", "unshard", "reshard")
_OF_RUNTIMES = ("run", "end_backward")


def _act_without_types(unit: Unit, originals: Originals | None) -> None:
    """Have a unit on a full mesh, and its runtime, act outside of the package's checker, which knows nothing of shards."""
    if hasattr(unit.axis, "full_mesh") and _torch.has_spmd_types():
        for owner, names in ((unit, _OF_UNITS), (unit.runtime, _OF_RUNTIMES)):
            for name in names:
                vars(owner)[name] = _without_types(weakref.ref(owner), getattr(type(owner), name))


def _without_types(owner: weakref.ref[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `owner` that runs outside of the checker. A weak reference, so that a model is freed when deleted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _torch.without_types():
            return method(owner(), *args, **kwargs)

    return call


UNIT_CREATED.append(_act_without_types)
