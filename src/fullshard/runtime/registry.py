"""The units of one runtime, by number."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident

from fullshard.runtime.unit import Unit


class UnitRegistry:
    """Holds units weakly, and says which were deleted: at once, or, if another thread deleted them, when it is asked."""

    def __init__(self, deleted: Callable[[int], None]) -> None:
        """`deleted`: called with the number of a unit, on the thread that made this."""
        self._deleted = deleted
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self.get: Callable[[int], Unit | None] = self._units.get  # None if the unit is gone
        self._numbers = itertools.count()
        self._thread = get_ident()
        self._elsewhere: deque[int] = deque()  # units that were deleted by another thread

    def add(self, unit: Unit) -> int:
        """The number of a new unit."""
        self.forget_deleted()
        number = next(self._numbers)
        self._units[number] = unit
        weakref.finalize(unit, self._finalize, number)
        return number

    def __contains__(self, number: int) -> bool:
        return number in self._units

    def all(self) -> list[Unit]:
        """Those that are alive, in the order in which they were made."""
        return [unit for _, unit in sorted(self._units.items())]

    def remove(self, unit: Unit) -> bool:
        """The unit was taken off its modules; False if that was so before."""
        return self._units.pop(unit.number, None) is not None

    def is_own_thread(self) -> bool:
        """Whether the caller runs on the thread that made this."""
        return get_ident() == self._thread

    def forget_deleted(self) -> None:
        """Say which units another thread deleted meanwhile."""
        while self._elsewhere:
            self._deleted(self._elsewhere.popleft())

    def _finalize(self, number: int) -> None:
        """Any thread may collect garbage, in the midst of an event, too."""
        if get_ident() == self._thread:
            self._deleted(number)
        else:
            self._elsewhere.append(number)


__all__ = ["UnitRegistry"]
