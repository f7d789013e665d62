"""Where the data of a unit is, the legal moves between those places, and actions as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Residency(enum.Enum):
    """Where the data of a unit's groups is."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"

    __hash__ = object.__hash__  # that of Enum is Python's, and asked for in each move


MOVES = {
    (Residency.SHARDED, Residency.GATHERING): "all-gather started",
    (Residency.GATHERING, Residency.FULL): "all-gather waited on",
    (Residency.GATHERING, Residency.SHARDED): "prefetched, never used",
    (Residency.FULL, Residency.SHARDED): "compute is done",
}


class ReshardPolicy(enum.Enum):
    """What happens to gathered parameters after a forward with grad (without grad they are always freed)."""

    NEVER = "never"  # reshard_after_forward=True
    ALWAYS = "always"  # reshard_after_forward=False
    OUTERMOST = "outermost"  # reshard_after_forward=None: keep them if nothing else was running around the unit
    PARTLY = "partly"  # reshard_after_forward=int: a smaller group keeps one copy together


@dataclass(frozen=True, slots=True)
class Action:
    """Something the runtime does to one unit."""

    unit: int


class Unshard(Action):
    """Start gathering the unit's parameters."""


class Wait(Action):
    """Have the unit's gathered parameters ready for what is computed next."""


class SaveSubgroupShard(Action):
    """Before the unit's gathered parameters go, keep this rank's part of a smaller group's copy."""


class Reshard(Action):
    """Free the unit's gathered parameters."""


class Reduce(Action):
    """Take the gradients that have arrived at the unit's full parameters and reduce them."""
