"""install(): the names of torch that fullshard replaces, for programs that are not changed; and uninstall()."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch, ext, fsdp2
from fullshard.core import (
    ShardedDTensor,
    current_parameter,
    logical_parameters,
)
from fullshard.errors import StateError
from fullshard.frontend.api import fully_shard
from fullshard.frontend.module import FSDPModule, UnshardHandle
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.optim.optimizer_hooks import rebind
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

# --- functions of torch that refuse DTensors of several meshes, or compute with each shard alone -------------------------

_clip_within_mesh = torch.nn.utils.clip_grad_norm_


@functools.wraps(_clip_within_mesh)
def _clip(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip with fullshard.clip_grad_norm_ where torch refuses: several meshes, DTensors beside plain tensors.

    And for the maximum norm, which torch cannot compute of a shard without rows.
    """
    listed = [current_parameter(one) for one in ([parameters] if isinstance(parameters, Tensor) else parameters)]
    meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in listed if one.requires_grad}
    if (len(meshes) > 1 or float(norm_type) == torch.inf) and logical_parameters(listed):
        return clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite)
    return _clip_within_mesh(listed, max_norm, norm_type, error_if_nonfinite, foreach)


def _trunc_normal(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run torch's trunc_normal_ on an unsharded tensor and keep this rank's shard.

    It redraws rejected values with masked operations, which DTensor would run on each rank's shard alone.
    """
    if not isinstance(tensor, ShardedDTensor) or tensor.device.type == "meta":
        return original(tensor, *args, **kwargs)
    from fullshard.ext.fills import store_shard, unsharded_like  # here, so that fullshard can be imported without that file

    full = unsharded_like(tensor)
    original(full, *args, **kwargs)
    with torch.no_grad():
        store_shard(tensor, full)
    return tensor


@torch.no_grad()
def _unscale(
    original: Callable[..., dict[torch.device, Tensor]],
    scaler: Any,
    optimizer: Any,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Unscale the gradients of an optimizer, and find infinities and NaNs of all ranks in them.

    torch looks over the mesh and the placements of the first gradient only. With several meshes, or scalars, some ranks
    would skip the step and others would not.

    Return for each device a tensor above 0 if a rank found one, equal on all ranks; nothing if no rank has a gradient: then the
    scaler raises, as without sharding.
    """
    rebind(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not logical_parameters(parameters):
        return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    unscaled = []
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):  # a plain tensor with the local gradient takes its place
            grad = _torch.local_part(parameter.grad)
            parameter = grad.detach()
            parameter.grad = grad
        unscaled.append(parameter)
    by_device = original(scaler, SimpleNamespace(param_groups=[{"params": unscaled}]), inv_scale, found_inf, allow_fp16)
    # The groups depend on the parameters, not on their gradients: all ranks must reduce over the same ones in the same order.
    groups: dict[dist.ProcessGroup, str] = {}  # with the device type
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                groups.setdefault(mesh.get_group(dim), mesh.device_type)
    # Also if this rank has no gradient, since the others reduce: -1 stands for none.
    none = not by_device
    every = [torch.full_like(found_inf, -1.0)] if none else [one.to(found_inf.device) for one in by_device.values()]
    total = torch.stack(every).max()
    # Forward and backward: a maximum over the groups of one mesh reaches ranks that only the groups of another one connect.
    for group, device_type in [*groups.items(), *[*groups.items()][-2::-1]]:
        part = total if device_type == total.device.type else total.to(device_type)
        dist.all_reduce(part, dist.ReduceOp.MAX, group=group)
        total = part.to(total.device)
    if none and total.item() < 0:
        return by_device
    by_device.setdefault(found_inf.device, found_inf)
    for one in by_device.values():
        one.copy_(total)
    return by_device


# --- names ---------------------------------------------------------------------------------------------------------------

_NAMES_BESIDE = ("DataParallelMeshDims", "GradientReductionHandle", "register_fsdp_forward_method", "share_comm_ctx")
_REPLACEMENTS: dict[str, Any] = {
    "clip_grad_norm_": _clip,
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "FSDPModule": FSDPModule,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OffloadPolicy": OffloadPolicy,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    **{name: getattr(package, name) for package in (ext, fsdp2) for name in package.__all__ if name in _NAMES_BESIDE},
}
_EXPORTING_MODULES = (  # torch's modules that define or re-export these names
    "torch.nn.utils.clip_grad",
    "torch.nn.utils",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.fsdp",
)


_IMPLEMENTATION = "torch.distributed.fsdp._fully_shard._fully_shard"  # uses the names itself: not replaced there
_IMPORTED_FIRST = ("torch.distributed._composable.replicate_with_fsdp", "torch.distributed.pipelining")


_undo: list[Callable[[], object]] = []  # what `uninstall` calls, the last first


def _replace(namespace: dict[str, Any], name: str, ours: Any) -> None:
    """Replace a name until `uninstall`, unless it was assigned again by then."""
    theirs, namespace[name] = namespace[name], ours
    _undo.append(lambda: namespace.get(name) is ours and namespace.update({name: theirs}))


def install() -> None:
    """Make `torch.distributed.fsdp` export fullshard's `fully_shard` and its classes, until `uninstall()`.

    Replaces the names in torch's modules, for later imports, and in every module that has imported them already. Modules
    that torch's own `fully_shard` was called on, and the other parts of torch, are not changed. A second call has no effect.

    Three functions of torch change for sharded parameters: `torch.nn.utils.clip_grad_norm_` takes several meshes, and plain
    parameters beside sharded ones; `torch.amp.GradScaler` finds infinities of all ranks on all meshes; and
    `torch.nn.init.trunc_normal_` draws the unsharded tensor. `torch.cuda.CUDAGraph` and `torch.accelerator.Graph` become
    subclasses, which follow a captured step as `fullshard.Graph` does. Nothing else in fullshard replaces anything in torch.

    Example:
        >>> import fullshard
        >>> fullshard.install()
        >>> from torch.distributed.fsdp import fully_shard
        >>> fully_shard is fullshard.fully_shard
        True
        >>> fullshard.uninstall()
    """
    if _undo:
        return
    # Parts of torch derive from FSDP2's classes at import. Import them first, so that they derive from torch's own.
    for name in _IMPORTED_FIRST:
        _imported(name)
    # What takes the place of torch's objects, by their id: values of arbitrary modules are looked up, and need not be hashable.
    graphs: dict[int, Any] = {}
    of_fsdp2: dict[int, Any] = {}
    for exporting in filter(None, map(_imported, (*_EXPORTING_MODULES, _IMPLEMENTATION))):
        for name, ours in _REPLACEMENTS.items():
            found = vars(exporting).get(name)
            if found is not None and found is not ours:
                of_fsdp2[id(found)] = ours
    if (capture := getattr(ext, "capture", None)) is not None:  # deleted otherwise
        graphs.update((id(kind), capture.followed(kind)) for kind in _classes_of_graphs())
    _undo.extend([_torch.extend_trunc_normal(_trunc_normal), _torch.extend_unscaling(_unscale)])
    for module_name, module in list(sys.modules.items()):
        namespace: dict[str, Any] = getattr(module, "__dict__", {})
        replaced = {**of_fsdp2, **graphs} if _is_replaced_in(module_name) else graphs
        for name, value in list(namespace.items()):
            if id(value) in replaced:
                _replace(namespace, name, replaced[id(value)])


def uninstall() -> None:
    """Undo `install()`. Modules that imported names after `install()` keep fullshard's objects.

    Raises:
        StateError: if `install()` was not called.
    """
    if not _undo:
        raise StateError("fullshard.uninstall() cannot undo anything: install() was not called.")
    while _undo:
        _undo.pop()()


@contextmanager
def installed() -> Iterator[None]:
    """Install for the length of a `with` block; inside another such block, or after `install()`, this has no effect.

    Example:
        >>> with fullshard.installed():                                                       # doctest: +SKIP
        ...     import a_program_for_fsdp2
    """
    before = bool(_undo)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _classes_of_graphs() -> list[Any]:
    """Return torch's classes of graphs of a device, and that of the accelerator's own module."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    modules = [torch.accelerator, *([] if accelerator is None else [torch.get_device_module(accelerator)])]
    return [torch.cuda.CUDAGraph, *(module.Graph for module in modules if hasattr(module, "Graph"))]


def _is_replaced_in(name: str) -> bool:
    """Return True if the names of FSDP2 are replaced in the module `name`.

    Other parts of torch (pipelining, replicate) keep torch's classes: their isinstance checks accept fullshard's modules, too,
    and must still accept torch's own.
    """
    first = name.split(".")[0]
    return name in _EXPORTING_MODULES if first == "torch" else first != "fullshard"


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
