"""Entries of optimizer steps in the collective logs: class, options and parameters, which must be equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core import CollectiveLog, Fingerprint, Runtime, ShardedParameter, UnitName
from fullshard.optim.optimizer_hooks import STEP_LISTENERS

_IMPLEMENTATION_OPTIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))  # do not change the result
_PLAIN = (bool, int, float, str)


class StepEntries:
    """Adds one entry per step of an optimizer to each log that has some of its sharded parameters.

    The options are those in the optimizer's defaults, if they are plain values or one-element tensors on the host. Other
    values in the groups, such as counters, are not compared between ranks.
    """

    __slots__ = ("_class", "_fingerprints", "_logs", "_names", "_options")

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: Sequence[Sequence[ShardedParameter]]) -> None:
        """`sharded`: the sharded parameters of each group."""
        self._class = type(optimizer).__name__
        self._names = [name for name in optimizer.defaults if name not in _IMPLEMENTATION_OPTIONS]
        self._options: list[tuple[Any, ...]] = []  # of each group, as in `_fingerprints`
        self._fingerprints: list[Fingerprint] = []  # for each log
        found: dict[tuple[Runtime, CollectiveLog], dict[int, list[str]]] = {}  # parameters by log and group
        for index, parameters in enumerate(sharded):
            for parameter in parameters:
                unit = parameter.unit()
                if unit is not None and unit.groups:
                    log = unit.runtime.communicator.log_of(parameter.sharding.axis)
                    members = found.setdefault((unit.runtime, log), {})
                    members.setdefault(index, []).append(f"{unit.global_id} {parameter.name}")
        # (runtime, log, number of parameters, hash of those of each group), weakly, since a log keeps its process groups
        self._logs = [
            (
                weakref.ref(runtime),
                weakref.ref(log),
                sum(map(len, members.values())),
                {index: crc32(repr(sorted(names)).encode()) for index, names in members.items()},
            )
            for (runtime, log), members in found.items()
        ]

    def __call__(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add an entry for one step to every log."""
        options = [
            tuple([value if type(value := group.get(name)) in _PLAIN else _plain(value) for name in self._names])
            for group in groups
        ]
        if options != self._options or not self._fingerprints:
            self._options = options
            self._fingerprints = [self._fingerprint(number, digests) for _, _, number, digests in self._logs]
        for (runtime_ref, log_ref, _, _), fingerprint in zip(self._logs, self._fingerprints):
            runtime, log = runtime_ref(), log_ref()
            if runtime is None or log is None or log.desync_error is not None:
                continue  # deleted; or ranks have diverged: the step has been made already, and the next collective raises
            # Not in gradient hooks, nor in other threads: their order, and whether they run, may differ between ranks.
            in_backward = runtime.reducer.decided is not None or _torch.current_graph_task() != -1
            if not in_backward and runtime in Runtime.all_of_thread():
                log.append(fingerprint)

    def _fingerprint(self, number: int, digests: dict[int, int]) -> Fingerprint:
        """Return the fingerprint of a step of `number` parameters, which is equal if ranks order the groups differently.

        `digests`: by index of the group, a hash of its parameters.
        """
        texts = [f"{self._class}.step() of {number} parameter{'s' if number != 1 else ''}"]
        for at, name in enumerate(self._names):
            values = sorted({repr(option) for index in digests if (option := self._options[index][at]) is not None})
            if values:
                texts.append(f"{name}={' or '.join(values[:4])}")
        groups = sorted(f"{self._options[index]} {digest}" for index, digest in digests.items())
        return Fingerprint(UnitName(""), ", ".join(texts), f"{self._class} {groups}")


def _plain(value: Any) -> Any:
    """Return an option for comparison between ranks: numbers, strings and tuples of them, else None.

    Tensors on a device are None, since reading them would synchronize the host with the device.
    """
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) else None


STEP_LISTENERS.append(StepEntries)
