"""Replace torch's FSDP2 by fullshard, for programs that import FSDP2 by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fullshard.core import AllGather, Comm, DataParallelMeshDims, ReduceScatter
from fullshard.errors import StateError
from fullshard.frontend import patches
from fullshard.frontend.api import fully_shard
from fullshard.frontend.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_REPLACEMENTS: dict[str, Any] = {
    "AllGather": AllGather,
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "Comm": Comm,
    "DataParallelMeshDims": DataParallelMeshDims,
    "FSDPModule": FSDPModule,
    "GradientReductionHandle": GradientReductionHandle,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OffloadPolicy": OffloadPolicy,
    "ReduceScatter": ReduceScatter,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_EXPORTING_MODULES = (  # torch's modules that define or re-export these names
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.fsdp",
)


_IMPLEMENTATION = "torch.distributed.fsdp._fully_shard._fully_shard"  # uses the names itself: not replaced there
_IMPORTED_FIRST = ("torch.distributed._composable.replicate_with_fsdp", "torch.distributed.pipelining")


class Installation:
    """Record of the replaced names, which can restore them."""

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def replace(self, namespace: dict[str, Any], name: str, ours: Any) -> None:
        """Replace `name` in `namespace`, and record the previous value."""
        self._replaced.append((namespace, name, namespace[name], ours))
        namespace[name] = ours

    def restore(self) -> None:
        """Restore the previous values, except of names that were assigned again later."""
        for namespace, name, theirs, ours in reversed(self._replaced):
            if namespace.get(name) is ours:
                namespace[name] = theirs
        self._replaced.clear()


_installed: list[Installation] = []


def install() -> None:
    """Make `torch.distributed.fsdp` export fullshard's `fully_shard` and its classes, until `uninstall()`.

    Replaces the names in torch's modules, for later imports, and in every module that has imported them already. Modules
    that torch's own `fully_shard` was called on, and the other parts of torch, are not changed. A second call has no effect.

    Example:
        >>> import fullshard
        >>> fullshard.install()
        >>> from torch.distributed.fsdp import fully_shard
        >>> fully_shard is fullshard.fully_shard
        True
        >>> fullshard.uninstall()
    """
    if _installed:
        return
    # Parts of torch derive from FSDP2's classes at import. Import them first, so that they derive from torch's own.
    for name in _IMPORTED_FIRST:
        _can_import(name)
    modules = [importlib.import_module(name) for name in (*_EXPORTING_MODULES, _IMPLEMENTATION) if _can_import(name)]
    torch_objects: dict[int, tuple[str, Any]] = {}
    # Keyed by id: values of arbitrary modules are looked up below, and need not be hashable.
    for exporting in modules:
        for name in _REPLACEMENTS:
            found = vars(exporting).get(name)
            if found is not None and found is not _REPLACEMENTS[name]:
                torch_objects[id(found)] = (name, found)
    installation = Installation()
    for module_name, module in list(sys.modules.items()):
        if module is None or not _is_replaced_in(module_name):
            continue
        namespace: dict[str, Any] = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()):
            known = torch_objects.get(id(value))
            if known is not None and known[1] is value:
                installation.replace(namespace, name, _REPLACEMENTS[known[0]])
    _installed.append(installation)


def uninstall() -> None:
    """Undo `install()`, and the changes that the first `fully_shard()` made in torch if no sharded model is alive.

    Modules that imported names after `install()` keep fullshard's objects.

    Raises:
        StateError: if there is nothing to undo, or nothing but changes that sharded models need.
    """
    if not _installed and not patches.are_installed():
        raise StateError("fullshard.uninstall() cannot undo anything: neither install() nor fully_shard() was called.")
    if not _installed and patches.are_needed():
        raise StateError(
            "fullshard.uninstall() cannot undo the changes that fully_shard() made in torch, since sharded models are alive. "
            "Call undo() on these models, or delete them, first."
        )
    if _installed:
        _installed.pop().restore()
    patches.uninstall()


@contextmanager
def installed() -> Iterator[None]:
    """Install for the length of a `with` block; inside another such block, or after `install()`, this has no effect.

    Example:
        >>> with fullshard.installed():                                                       # doctest: +SKIP
        ...     import a_program_for_fsdp2
    """
    before = bool(_installed)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _is_replaced_in(name: str) -> bool:
    """Return True if names in the module `name` are replaced.

    Other parts of torch (pipelining, replicate) keep torch's classes: their isinstance checks accept fullshard's modules, too,
    and must still accept torch's own.
    """
    first = name.split(".")[0]
    return name in _EXPORTING_MODULES if first == "torch" else first != "fullshard"


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


__all__ = ["install", "installed", "uninstall"]
