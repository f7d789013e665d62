"""The changes that the first `fully_shard()` makes in torch, all in one place. Importing the package makes none of them."""

from __future__ import annotations

import gc
from threading import Lock

from fullshard import _torch
from fullshard.core import lint, reduced_scalars, sharded_tensor
from fullshard.core.unit import Unit
from fullshard.frontend import autograd
from fullshard.optim import clipping, optimizer_hooks, scaling

_INSTALLERS = {
    "torch.nn.modules.module: hooks on registration": lint.install,
    "torch.autograd: a check before gradients of inputs": autograd.install,
    "torch.optim: hooks around steps": optimizer_hooks.install,
    "torch.nn.utils: clipping": clipping.install,
    "torch.amp: GradScaler": scaling.install,
    "torch.nn.init: trunc_normal_": sharded_tensor.install,
    "torch.distributed.tensor: item()": reduced_scalars.install,
}
"""By the place in torch that each one changes. docs/architecture.md gives the reasons."""

_undo: list[_torch.Undo] = []
_lock = Lock()


def install() -> None:
    """Make the changes, unless they are made already: all of them or, if one raises, none."""
    with _lock:
        if _undo:
            return
        made: list[_torch.Undo] = []
        try:
            for installer in _INSTALLERS.values():
                made.append(installer())
        except BaseException:
            for undo in reversed(made):
                undo()
            raise
        _undo.extend(made)


def are_installed() -> bool:
    """Return True if the changes are made."""
    return bool(_undo)


def are_needed() -> bool:
    """Return True if sharded models are alive, which need the changes."""
    if Unit.living:
        gc.collect()  # modules and their hooks refer to each other, so a deleted model waits for the collector
    return len(Unit.living) > 0


def uninstall() -> None:
    """Undo the changes, in reverse order, unless they are needed. The next `fully_shard()` makes them again."""
    with _lock:
        if are_needed():
            return
        while _undo:
            _undo.pop()()


__all__ = ["are_installed", "are_needed", "install", "uninstall"]
