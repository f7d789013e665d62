"""What ranks must agree on of each step of an optimizer: one entry per log, with its class, its options and its parameters."""

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

from fullshard.consistency.collective_log import CollectiveLog, Fingerprint, UnitName
from fullshard.params.sharded_param import ShardedParameter
from fullshard.runtime.unit import Unit, owner_of

_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))  # options that do not change what is computed
_SHOWN = 4  # groups of parameters with options of their own


class _Step(Fingerprint):
    """A step of an optimizer. Its text, which is long, is made when it is asked for."""

    text: Callable[[], str]

    @classmethod
    def of(cls, subject: str, text: Callable[[], str]) -> _Step:
        self = cls(UnitName(""), "", subject)
        self.text = text
        return self

    def __str__(self) -> str:
        return self.text()


class _Entry:
    """The entries of one log about the steps of an optimizer.

    Each has class, options, parameters (a hash for each group of the optimizer), and whether gradients were written since
    they came.
    """

    __slots__ = ("_counts", "_digests", "_fingerprint", "_log", "_options", "_unit", "_written")

    def __init__(self, log: CollectiveLog, members: Sequence[tuple[int, ShardedParameter, Unit]]) -> None:
        """`members`: the group of the optimizer that each parameter is in, and its unit."""
        first = min((unit for _, _, unit in members), key=lambda unit: unit.global_id)
        self._unit, self._log = weakref.ref(first), weakref.ref(log)  # its groups may be made anew
        names: dict[int, list[str]] = {}  # of parameters, by group
        for index, parameter, unit in members:
            names.setdefault(index, []).append(f"{unit.global_id} {parameter.name}")
        self._counts = {index: len(listed) for index, listed in names.items()}
        self._digests = [crc32(repr(sorted(listed)).encode()) for listed in names.values()]
        self._options: _Options | None = None
        self._written = False

    def say(self, options: _Options) -> None:
        """Enter in the log that a step of an optimizer with these options ended."""
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
            unit.runtime.log_write(log, self._fingerprint)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """The options of an optimizer of class `name`, in each of its groups, in the order of `keys`."""

    name: str
    keys: Sequence[str]
    values: Sequence[tuple[Any, ...]]

    def described(self, counts: Mapping[int, int], end: str) -> str:
        """`counts`: of parameters, by group."""
        mine = [
            {key: repr(value) for key, value in zip(self.keys, self.values[index]) if value is not None} for index in counts
        ]
        common = set.intersection(*(set(one.items()) for one in mine))
        sets: dict[str, int] = {}  # how many parameters have these options of their own
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
    """The part of each step of an optimizer that the ranks must agree on: its class, its options, and which parameters it has.

    steps 1 - n entries, one per log that sharded parameters lie in. Options are those of the optimizer's defaults, plain
    values and tensors of one element on the host; what an optimizer counts in its groups beside them is its own.
    """

    __slots__ = ("_entries", "_known", "_names", "_options", "_read")

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: Sequence[Sequence[ShardedParameter]]) -> None:
        """`sharded`: the sharded parameters in each of its groups."""
        self._names = [name for name in optimizer.defaults if name not in _HOW]
        self._read: Callable[[dict[str, Any]], Any] = self._read_plain
        self._known: list[Any] = []  # options by group, as they were read last
        self._options = _Options(type(optimizer).__name__, self._names, ())
        found: dict[CollectiveLog, list[tuple[int, ShardedParameter, Unit]]] = {}
        for index, parameters in enumerate(sharded):
            for parameter in parameters:
                unit = owner_of(parameter)
                if unit is not None and unit.groups:
                    log = unit.runtime.communicator.log_of(parameter.sharding.axis)
                    found.setdefault(log, []).append((index, parameter, unit))
        self._entries = [_Entry(log, members) for log, members in found.items()]

    def say(self, groups: Sequence[dict[str, Any]]) -> None:
        """Enter a step in every log."""
        try:
            held = [*map(self._read, groups)] == self._known
        except (KeyError, RuntimeError):  # an option is gone, or became a tensor of several elements
            held = False
        if not held:
            self._look_up(groups)
        for entry in self._entries:
            entry.say(self._options)

    def _look_up(self, groups: Sequence[dict[str, Any]]) -> None:
        """Read the options anew: they are others than in the step before."""
        self._options = _Options(self._options.name, self._names, [*map(self._read_plain, groups)])
        held = [[group.get(name) for name in self._names] for group in groups]
        if len(self._names) < 2 or any(value is None or isinstance(value, Tensor) for values in held for value in values):
            self._read, self._known = self._read_plain, list(self._options.values)
        else:
            self._read, self._known = itemgetter(*self._names), [*map(tuple, held)]

    def _read_plain(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple([_plain(group.get(name)) for name in self._names])


def _plain(value: Any) -> Any:
    """An option as ranks compare it: numbers, words, and tuples of them; None for others, and for tensors of a device."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


__all__ = ["StepEntries"]
