"""Process groups, held for as long as torch has them: once they are destroyed, nothing here keeps their connections open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard import _torch
from fullshard.errors import StateError


class HeldGroup:
    """A process group that `release` lets go of. `group` is an attribute until then; reading it raises StateError after."""

    __slots__ = ("__weakref__", "group", "is_released")

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.is_released = False

    def __getattr__(self, name: str) -> Any:
        """Python asks here only for what is not there: the group, once it is released."""
        if name == "group":
            raise StateError(
                "the process group of this model was destroyed (destroy_process_group()): load its weights into a model that "
                "is sharded on the new one"
            )
        raise AttributeError(name)

    def release(self) -> bool:
        """Let go of the group if torch destroyed it; whether it did."""
        if not self.is_released and not _torch.is_alive(self.group):
            self.is_released = True
            del self.group
        return self.is_released


_HELD: dict[int, HeldGroup] = {}  # by the id of the group
_THEN: list[Callable[[], object]] = []
_RELEASING = threading.Lock()


def held(group: dist.ProcessGroup) -> HeldGroup:
    """The one HeldGroup of a process group."""
    found = _HELD.get(id(group))
    if found is None:
        found = _HELD[id(group)] = HeldGroup(group)
    return found


def release() -> None:
    """Let go of the process groups that torch destroyed: their connections close, by which the other ranks learn of it.

    Process groups may have been made since; those stay.
    """
    with _RELEASING:  # the thread of the watchdog may find the same as a thread that makes new groups
        for key, one in list(_HELD.items()):
            if one.release():
                del _HELD[key]
        for then in _THEN:
            then()


def on_release(then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` when process groups were destroyed, to forget what knows those."""
    _THEN.append(then)
    return then


__all__ = ["HeldGroup", "held", "on_release", "release"]
