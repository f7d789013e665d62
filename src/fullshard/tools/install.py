"""Putting fullshard in place of torch's FSDP2, for programs that import that by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fullshard.collectives.custom import AllGather, Comm, ReduceScatter
from fullshard.errors import StateError
from fullshard.frontend.api import fully_shard
from fullshard.frontend.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.sharding.mesh import DataParallelMeshDims

_OURS: dict[str, Any] = {
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
_HOMES = (  # where torch keeps them, and hands them out
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.fsdp",
)


_IMPLEMENTATION = "torch.distributed.fsdp._fully_shard._fully_shard"  # its own names stay
_USERS = ("torch.distributed._composable.replicate_with_fsdp", "torch.distributed.pipelining")


class Installation:
    """The names that were replaced, to put them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put(self, namespace: dict[str, Any], name: str, ours: Any) -> None:
        """Replace `name` in `namespace` and remember what was there."""
        self._replaced.append((namespace, name, namespace[name], ours))
        namespace[name] = ours

    def restore(self) -> None:
        """Put the former values back, but for names that were assigned again since."""
        for namespace, name, theirs, ours in reversed(self._replaced):
            if namespace.get(name) is ours:
                namespace[name] = theirs
        self._replaced.clear()


_installed: list[Installation] = []


def install() -> None:
    """Have `torch.distributed.fsdp` hand out fullshard's `fully_shard` and its classes, until `uninstall()`.

    Replaces the names in torch's modules, for programs that import them from now on, and in every module that has imported
    them already. Modules that torch's own `fully_shard` was called on, and the other parts of torch, are left alone.
    Installing twice changes nothing.

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
    for name in _USERS:  # what torch builds on its own classes must be built before
        _exists(name)
    homes = [importlib.import_module(name) for name in (*_HOMES, _IMPLEMENTATION) if _exists(name)]
    theirs: dict[int, tuple[str, Any]] = {}
    for home in homes:
        for name in _OURS:
            found = vars(home).get(name)
            if found is not None and found is not _OURS[name]:
                theirs[id(found)] = (name, found)
    installation = Installation()
    for module_name, module in list(sys.modules.items()):
        if module is None or not _is_client(module_name):
            continue
        namespace: dict[str, Any] = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()):
            known = theirs.get(id(value))
            if known is not None and known[1] is value:
                installation.put(namespace, name, _OURS[known[0]])
    _installed.append(installation)


def uninstall() -> None:
    """Undo `install()`. Modules that imported torch's names meanwhile keep what they got.

    Raises:
        StateError: if nothing is installed.
    """
    if not _installed:
        raise StateError("fullshard.uninstall() without install(): there is nothing to undo")
    _installed.pop().restore()


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the length of a `with` block; inside another one, or after `install()`, it changes nothing.

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


def _is_client(name: str) -> bool:
    """Whether names in this module are replaced.

    The rest of torch (pipelining, replicate) asks torch's names about our modules, which answer to them, and about its own.
    """
    first = name.split(".")[0]
    return name in _HOMES if first == "torch" else first != "fullshard"


def _exists(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


__all__ = ["install", "installed", "uninstall"]
