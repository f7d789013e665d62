"""The package spmd_types, whose types annotate plain parameters. It is used only if the program has imported it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

ANNOTATION_ATTRIBUTES = ("_local_type", "_partition_spec")
"""Attributes of a tensor that hold its annotation."""


def _package() -> Any:
    return sys.modules.get("spmd_types")


@dataclass(frozen=True)
class Annotation:
    """The types of a plain tensor.

    Attributes:
        kinds: by axis, "R", "I", "V" or "P".
        sharded: by dim, the axes that shard it, outermost first.
    """

    kinds: Mapping[Any, str]
    sharded: Mapping[int, tuple[Any, ...]]
    types: Mapping[Any, Any]  # by axis, as the package stores them
    partition_spec: Any


def annotation_of(tensor: Tensor) -> Annotation | None:
    """Return the annotation of a plain tensor; None for DTensors and for tensors without one."""
    spmd = _package()
    # Private, of spmd_types: `_local_type`. The public `get_local_type` returns {} for a tensor without annotation, and for one
    # that is annotated on axes of one rank only, which the package leaves out.
    types = None if spmd is None or isinstance(tensor, DTensor) else getattr(tensor, "_local_type", None)
    if types is None:
        return None
    spec = spmd.get_partition_spec(tensor)
    entries = () if spec is None else spmd.normalize_partition_spec(spec)
    sharded = {dim: entry if isinstance(entry, tuple) else (entry,) for dim, entry in enumerate(entries) if entry is not None}
    names = {spmd.R: "R", spmd.I: "I", spmd.V: "V", spmd.P: "P"}
    return Annotation({axis: names[kind] for axis, kind in types.items()}, sharded, dict(types), spec)


def mesh_axis(mesh: DeviceMesh, name: str) -> Any:
    """Return the package's axis for a dim of a mesh; equal for all groups over the same ranks."""
    return _package().MeshAxis.of(mesh.get_group(name))


def is_within(axis: Any, axes: Collection[Any]) -> bool:
    """Return True if the ranks of `axis` are among those that `axes` span together."""
    # Private, of spmd_types: `flatten_axes`.
    return bool(axes) and axis <= _package()._mesh_axis.flatten_axes(tuple(axes))


def span_the_same(axes: Collection[Any], others: Collection[Any]) -> bool:
    """Return True if the ranks that `axes` span together are those of `others`."""
    spans = [_package().normalize_mesh(frozenset(found)) for found in (axes, others)]
    first, second = [_package()._mesh_axis.flatten_axes(tuple(span)) if span else None for span in spans]
    return bool(first == second)


def current_axes() -> Collection[Any] | None:
    """Return the axes of the package's current mesh; None without one."""
    return _package().current_mesh()


def annotate(tensor: Tensor, annotation: Annotation, axes: Sequence[Any]) -> None:
    """Put an annotation on a tensor, on all of `axes`: as the same value on each rank where it says nothing."""
    spmd = _package()
    types = {axis: annotation.types.get(axis, spmd.R) for axis in axes}
    if types:
        spmd.assert_type(tensor, types, partition_spec=annotation.partition_spec)


def has_spmd_types() -> bool:
    """Return True if the program has imported the package."""
    return _package() is not None


def without_types() -> AbstractContextManager[Any]:
    """Return a context in which the package's checker is off."""
    spmd = _package()
    return nullcontext() if spmd is None or not spmd.is_type_checking() else spmd.no_typecheck()
