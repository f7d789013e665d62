"""Gradients that backwards kept without communication, of units that the backward which ends the step may not enter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence

from torch import nn

from fullshard.params.group import ParamGroup
from fullshard.runtime.heartbeat import SLOTS, Heartbeat, Sent
from fullshard.runtime.unit import Unit

Kept = tuple[Unit, ParamGroup]
"""A unit, and one of its groups that is to be reduced although this backward did not enter it."""


class KeptGradients:
    """Units of which a backward kept gradients on this rank, or over shards only, since they were last reduced.

    Attributes:
        since_last_step: whether a backward kept some since gradients were last handed out.
    """

    def __init__(self) -> None:
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self.since_last_step = False

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        """The running backward kept gradients of the unit."""
        self._units[unit.number] = unit
        self.since_last_step = True

    def discard(self, unit: Unit) -> None:
        """Nothing of the unit is kept any more."""
        self._units.pop(unit.number, None)

    def end_step(self) -> None:
        """Gradients are handed out: forget the units that have nothing left."""
        self.since_last_step = False
        for number, unit in list(self._units.items()):
            if not any(group.grads.has_local or group.grads.deferred is not None for group in unit.groups):
                del self._units[number]

    def known_here(self, touched: Sequence[Unit]) -> list[Kept]:
        """Groups that are to be reduced now, as far as this rank knows. `touched`: the units that the backward entered."""
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

    def known_anywhere(
        self,
        sent: Iterable[Sent],
        here: Sequence[Kept],
        touched: Sequence[Unit],
        units: Callable[[], Sequence[Unit]],
        *,
        read: bool,
    ) -> list[Kept]:
        """Groups that all ranks reduce now, in the order in which their units were made.

        Those of `here` whose log has no heartbeat, and those that a heartbeat says some rank kept, if these may be `read` yet.
        """
        beating = {beat.log for beat, _ in sent}
        found = [(unit, group) for unit, group in here if group.fingerprints.log not in beating]
        for beat, _ in sent if read else ():
            slots = beat.kept_units()
            if slots:
                found += _groups_in(slots, beat, trees_of(touched), units())
        return sorted(found, key=lambda entry: entry[0].number)


def trees_of(units: Iterable[Unit]) -> set[nn.Module | None]:
    """The models that units are of."""
    return {unit.place.tree for unit in units}


def _groups_in(slots: Container[int], beat: Heartbeat, trees: Container[nn.Module | None], units: Iterable[Unit]) -> list[Kept]:
    """Groups of units in these slots of a heartbeat, which no rank reduced in this backward.

    Units that share a slot are reduced with each other: of those that nobody kept anything of, no gradient is handed out.
    """
    reduced = {id(reduction.group) for reduction in beat.reductions}
    return [
        (unit, group)
        for unit in units
        if unit.global_id % SLOTS in slots and _ends_here(unit, trees)
        for group in unit.groups
        if group.fingerprints.log is beat.log and group.trainable and id(group) not in reduced
    ]


def _ends_here(unit: Unit, trees: Container[nn.Module | None]) -> bool:
    """Whether a synchronised backward in these models ends the step of the unit, whether or not it entered it."""
    options = unit.options
    return options.sync_gradients and options.last_backward and not options.manual and unit.place.tree in trees


__all__ = ["Kept", "KeptGradients", "trees_of"]
