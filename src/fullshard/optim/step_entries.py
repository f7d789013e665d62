"""Entries of optimizer steps in the collective logs: class, options and parameters, which must be equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fullshard.core import CollectiveLog, Fingerprint, ShardedParameter, Unit, UnitName, owner_of

_IMPLEMENTATION_OPTIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))  # do not change the result
_SHOWN = 4  # maximum number of option sets in an entry


class _Step(Fingerprint):
    """Fingerprint of an optimizer step. Its text is long and rarely needed, so it is created on demand."""

    text: Callable[[], str]

    @classmethod
    def of(cls, subject: str, text: Callable[[], str]) -> _Step:
        self = cls(UnitName(""), "", subject)
        self.text = text
        return self

    def __str__(self) -> str:
        return self.text()


class _LogEntries:
    """Writes the entries of one optimizer's steps into one log.

    Each entry has the class, the options, a hash of the parameters per group of the optimizer, and whether the gradient of the
    first parameter was written after it was reduced, as by clipping.
    """

    __slots__ = ("_counts", "_digests", "_fingerprint", "_log", "_options", "_parameters", "_unit", "_written")

    def __init__(self, log: CollectiveLog, members: Sequence[tuple[int, ShardedParameter, Unit]]) -> None:
        """`members`: (index of the optimizer group, parameter, its unit) for each parameter."""
        first = min((unit for _, _, unit in members), key=lambda unit: unit.global_id)
        # The unit, not its ParamGroup: `refresh` may build new ones.
        self._unit, self._log = weakref.ref(first), weakref.ref(log)
        self._parameters = frozenset((unit.global_id, parameter.name) for _, parameter, unit in members)
        names: dict[int, list[str]] = {}  # names of the parameters, by group
        for index, parameter, unit in members:
            names.setdefault(index, []).append(f"{unit.global_id} {parameter.name}")
        self._counts = {index: len(listed) for index, listed in names.items()}
        self._digests = [crc32(repr(sorted(listed)).encode()) for listed in names.values()]
        self._options: _Options | None = None
        self._written = False

    def log_step(self, options: _Options) -> None:
        """Add an entry to the log: a step with these options ended."""
        unit, log = self._unit(), self._log()
        if unit is not None and unit.groups and log is not None:
            group = unit.groups[0]
            written = group.grads.rewritten
            if options is not self._options or written is not self._written:
                self._options, self._written = options, written
                values = [f"{options.values[index]} {digest}" for index, digest in zip(self._counts, self._digests)]
                values.sort()
                end = (
                    f", after a write to the gradient of '{group.parameters[0].name}' of '{group.parameters[0].unit_name.name}'"
                )
                text = partial(options.described, self._counts, end if written else "")
                self._fingerprint = _Step.of(f"{options.name} {values} {written}", text)
            unit.runtime.log_write(log, self._fingerprint, self._parameters)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """Options of an optimizer."""

    name: str  # class of the optimizer
    keys: Sequence[str]  # names of the options
    values: Sequence[tuple[Any, ...]]  # for each group, the values in the order of `keys`

    def described(self, counts: Mapping[int, int], end: str) -> str:
        """Return the text of an entry. `counts` are the numbers of parameters by group, `end` is the end of the text."""
        mine = [
            {key: repr(value) for key, value in zip(self.keys, self.values[index]) if value is not None} for index in counts
        ]
        common = set.intersection(*(set(one.items()) for one in mine))
        sets: dict[str, int] = {}  # number of parameters by those of their options that differ between groups
        for one, count in zip(mine, counts.values()):
            own = ", ".join(f"{key}={value}" for key, value in one.items() if (key, value) not in common)
            sets[own] = sets.get(own, 0) + count
        total = sum(sets.values())
        shared = [f"{key}={value}" for key, value in mine[0].items() if (key, value) in common]
        text = ", ".join([f"{self.name}.step() of {total} parameter{'s' if total != 1 else ''}", *shared])
        if len(sets) > 1:
            shown = [f"{count} with {own}" for own, count in sorted(sets.items())]
            text += "; " + "; ".join(shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN))
        return text + end


class StepEntries:
    """Adds one entry per step of an optimizer to each log that has some of its sharded parameters.

    The options are those in the optimizer's defaults, if they are plain values or one-element tensors on the host. Other
    values in the groups, such as counters, are not compared between ranks.
    """

    __slots__ = ("_entries", "_known", "_names", "_options", "_read")

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: Sequence[Sequence[ShardedParameter]]) -> None:
        """`sharded`: the sharded parameters of each group."""
        self._names = [name for name in optimizer.defaults if name not in _IMPLEMENTATION_OPTIONS]
        self._read: Callable[[dict[str, Any]], Any] = self._read_plain
        self._known: list[Any] = []  # options by group, as read last
        self._options = _Options(type(optimizer).__name__, self._names, ())
        found: dict[CollectiveLog, list[tuple[int, ShardedParameter, Unit]]] = {}
        for index, parameters in enumerate(sharded):
            for parameter in parameters:
                unit = owner_of(parameter)
                if unit is not None and unit.groups:
                    log = unit.runtime.communicator.log_of(parameter.sharding.axis)
                    found.setdefault(log, []).append((index, parameter, unit))
        self._entries = [_LogEntries(log, members) for log, members in found.items()]

    def log_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add an entry for one step to every log."""
        try:
            held = [*map(self._read, groups)] == self._known
        except (KeyError, RuntimeError):  # an option was removed, or is a tensor of several elements
            held = False
        if not held:
            self._read_options(groups)
        for entry in self._entries:
            entry.log_step(self._options)

    def _read_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Read the options again, and choose the fastest way to compare them in the next step."""
        self._options = _Options(self._options.name, self._names, [*map(self._read_plain, groups)])
        held = [[group.get(name) for name in self._names] for group in groups]
        if len(self._names) < 2 or any(_may_change(value) for values in held for value in values):
            self._read, self._known = self._read_plain, list(self._options.values)
        else:
            self._read, self._known = itemgetter(*self._names), [*map(tuple, held)]

    def _read_plain(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple([_plain(group.get(name)) for name in self._names])


def _may_change(value: Any) -> bool:
    """Return True for values that are changed in place or may be missing, whose comparison with themselves shows nothing."""
    return value is None or isinstance(value, (Tensor, list)) or (isinstance(value, tuple) and any(map(_may_change, value)))


def _plain(value: Any) -> Any:
    """Return an option for comparison between ranks: numbers, strings and tuples of them, else None.

    Tensors on a device are None, since reading them would synchronize the host with the device.
    """
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


__all__ = ["StepEntries"]
