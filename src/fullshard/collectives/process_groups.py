"""Process groups, held for as long as torch has them: once they are destroyed, nothing here keeps their connections open."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from fullshard import _torch
from fullshard.errors import StateError


class HeldGroup:
    """A process group that `release` lets go of."""

    __slots__ = ("__weakref__", "_group")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def __call__(self) -> dist.ProcessGroup:
        """Raises StateError once it is released."""
        if self._group is None:
            raise StateError(
                "the process group of this model was destroyed (destroy_process_group()): load its weights into a model that "
                "is sharded on the new one"
            )
        return self._group

    @property
    def is_released(self) -> bool:
        return self._group is None

    def release(self) -> bool:
        """Let go of the group if torch destroyed it; whether it did."""
        if self._group is not None and not _torch.is_alive(self._group):
            self._group = None
        return self._group is None


_HELD: dict[int, HeldGroup] = {}  # by the id of the group
_THEN: list[Callable[[], object]] = []
_RELEASING = threading.Lock()


def held(group: dist.ProcessGroup) -> HeldGroup:
    """One per process group."""
    found = _HELD.get(id(group))
    if found is None:
        found = _HELD[id(group)] = HeldGroup(group)
    return found


def release() -> None:
    """Let go of the process groups that torch destroyed: their connections close, by which the other ranks learn of it.

    Others may have been made since.
    """
    with _RELEASING:  # the thread that watches may find the same as the one that makes new groups
        for key, one in list(_HELD.items()):
            if one.release():
                del _HELD[key]
        for then in _THEN:
            then()


def on_release(then: Callable[[], object]) -> None:
    """Call `then` when process groups were destroyed, to forget what knows those."""
    _THEN.append(then)


__all__ = ["HeldGroup", "held", "on_release", "release"]
