"""Units with gradients that are not fully reduced yet, since a backward kept them or reduced them over shards only.

All ranks reduce them together in the backward that ends the step, even on ranks where that backward does not reach the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence

from torch import nn

from fullshard.core.heartbeat import UNIT_FLAGS, Heartbeat, Sent
from fullshard.core.param_group import ParamGroup
from fullshard.core.unit import Unit

Kept = tuple[Unit, ParamGroup]
"""A unit, and one of its groups that must be reduced although this backward may not have entered the unit."""


class KeepingUnits:
    """Units with gradients that are not fully reduced yet.

    A backward that does not reduce keeps them on this rank (`has_local`). A backward that reduces over shards only leaves the
    rest to a later one (`deferred`).

    Attributes:
        since_last_step: True if a backward kept gradients since `.grad` was last set.
    """

    def __init__(self) -> None:
        # Weak references, so that a deleted model frees its memory.
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self.since_last_step = False

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        """Record that the running backward kept gradients of the unit."""
        self._units[unit.number] = unit
        self.since_last_step = True

    def discard(self, unit: Unit) -> None:
        """Record that the unit has no kept gradients any more."""
        self._units.pop(unit.number, None)

    def end_step(self) -> None:
        """Remove the units that have neither kept gradients nor a deferred all-reduce.

        Call this at the end of a step, when all of its reductions have started.
        """
        self.since_last_step = False
        for number, unit in list(self._units.items()):
            if not any(group.grads.has_local or group.grads.deferred is not None for group in unit.groups):
                del self._units[number]

    def due_here(self, touched: Sequence[Unit]) -> list[Kept]:
        """Return the groups that must be reduced now because this rank kept gradients of them.

        Args:
            touched: the units that the backward entered.
        """
        if not len(self._units):
            return []
        trees = trees_of(touched)
        found: list[Kept] = []
        for _, unit in sorted(self._units.items()):
            if _ends_here(unit, trees):
                for group in unit.groups:
                    deferred = group.grads.deferred is not None and unit.options.reduce.all_reduce
                    if group.trainable and (group.grads.has_local or deferred):
                        found.append((unit, group))
        return found

    def due_anywhere(
        self,
        sent: Iterable[Sent],
        here: Sequence[Kept],
        touched: Sequence[Unit],
        units: Callable[[], Sequence[Unit]],
        *,
        read: bool,
    ) -> list[Kept]:
        """Return the groups that all ranks reduce now, oldest unit first, which is the same order on all ranks.

        Args:
            sent: the heartbeats of this backward.
            here: the result of `due_here`. Used only for logs without a heartbeat in `sent`; a heartbeat (the all-reduce at the
                end of a backward) already contains this rank's flags.
            touched: the units that the backward entered.
            units: returns all living units.
            read: True if the host has waited for the heartbeats, and so may read in them which units any rank kept gradients
                of.
        """
        checked = {beat.log for beat, _ in sent}
        found = [(unit, group) for unit, group in here if group.fingerprints.log not in checked]
        for beat, _ in sent if read else ():
            flags = beat.kept_units()
            if flags:
                found += _flagged_groups(flags, beat, trees_of(touched), units())
        return sorted(found, key=lambda entry: entry[0].number)


def trees_of(units: Iterable[Unit]) -> set[nn.Module]:
    """Return the models that the units belong to."""
    return {tree for unit in units if (tree := unit.place.outermost) is not None}


def _flagged_groups(
    flags: Container[int], beat: Heartbeat, trees: Container[nn.Module | None], units: Iterable[Unit]
) -> list[Kept]:
    """Return the groups of units whose flag is set in a heartbeat, and which no rank reduced in this backward.

    A unit's flag is its `global_id` modulo `UNIT_FLAGS`, so several units may share one; all units of a set flag are reduced. A
    unit of which no rank kept gradients gets no `.grad` from that.
    """
    reduced = {id(reduction.group) for reduction in beat.reductions}
    return [
        (unit, group)
        for unit in units
        if unit.global_id % UNIT_FLAGS in flags and _ends_here(unit, trees)
        for group in unit.groups
        if group.fingerprints.log is beat.log and group.trainable and id(group) not in reduced
    ]


def _ends_here(unit: Unit, trees: Container[nn.Module | None]) -> bool:
    """Return True if a synchronised backward in these models ends the step of the unit, even if it did not enter the unit."""
    options = unit.options
    return options.sync_gradients and options.last_backward and not options.manual and unit.place.outermost in trees


__all__ = ["KeepingUnits", "Kept", "trees_of"]
