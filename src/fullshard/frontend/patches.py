"""The changes that the first `fully_shard()` makes in torch, all in one place. Importing the package makes none of them."""

from __future__ import annotations

from threading import Lock

from fullshard import _torch
from fullshard.core import lint, sharded_tensor
from fullshard.core.unit import Unit
from fullshard.frontend import autograd, clipping, optim

_INSTALLERS = {
    "torch.nn.modules.module: hooks on registration": lint.install,
    "torch.autograd: a check before gradients of inputs": autograd.install,
    "torch.optim: hooks around steps": optim.install,
    "torch.nn.utils: clipping": clipping.install,
    "torch.nn.init: trunc_normal_": sharded_tensor.install,
}
"""By the place in torch that each one changes. docs/architecture.md gives the reasons."""

_undo: list[_torch.Undo] = []
_lock = Lock()


def install() -> None:
    """Make the changes, unless they are made already."""
    if _undo:
        return
    with _lock:
        if not _undo:
            _undo.extend([installer() for installer in _INSTALLERS.values()])


def are_installed() -> bool:
    """Return True if the changes are made."""
    return bool(_undo)


def uninstall() -> None:
    """Undo the changes, in reverse order, unless sharded models are alive. The next `fully_shard()` makes them again."""
    with _lock:
        while _undo and not Unit.living:
            _undo.pop()()


__all__ = ["are_installed", "install", "uninstall"]
