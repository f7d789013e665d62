"""Handles to process groups. A handle drops its group after torch destroyed it, so that the connections close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard import _torch
from fullshard.errors import StateError


class ProcessGroupHandle:
    """A reference to a process group. After `release`, reading `group` raises StateError."""

    __slots__ = ("__weakref__", "group", "is_released")

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.is_released = False

    def __getattr__(self, name: str) -> Any:
        """Raise StateError for `group` after `release`, which deletes the attribute."""
        if name == "group":
            raise StateError(
                "The process group of this model was destroyed (destroy_process_group()). Load its weights into a model that "
                "is sharded on the new process group."
            )
        raise AttributeError(name)

    def release(self) -> bool:
        """Drop the group if torch destroyed it. Return True if it is dropped."""
        if not self.is_released and not _torch.is_alive(self.group):
            self.is_released = True
            del self.group
        return self.is_released


_HELD: dict[int, ProcessGroupHandle] = {}  # by id of the group, which is unique as long as the handle refers to the group
_THEN: list[Callable[[], object]] = []  # callbacks of `on_release`
_RELEASING = threading.Lock()


def held(group: dist.ProcessGroup) -> ProcessGroupHandle:
    """Return the one handle of a process group."""
    found = _HELD.get(id(group))
    return _HELD.setdefault(id(group), ProcessGroupHandle(group)) if found is None else found  # one, also of two threads


def release() -> None:
    """Drop the process groups that torch destroyed. Their connections close, which other ranks notice.

    Handles of live process groups stay.
    """
    with _RELEASING:  # the watchdog's thread and a thread that creates groups may find the same destroyed group
        for key, one in list(_HELD.items()):
            if not one.is_released and not _torch.is_alive(one.group):
                del _HELD[key]  # first: once the group is dropped, another one may get its id
                one.release()
        for then in _THEN:
            then()


def on_release(then: Callable[[], None]) -> Callable[[], None]:
    """Register `then` to be called after process groups are destroyed, to clear caches that refer to them."""
    _THEN.append(then)
    return then


__all__ = ["ProcessGroupHandle", "held", "on_release", "release"]
