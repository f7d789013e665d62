"""Extension points of a unit's life: functions that features outside of the engine add, and that the engine calls.

A check that runs once, before the first forward of a unit, is a further one: `Unit.before_first_use`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn

from fullshard.core.sharded_param import ShardedParameter
from fullshard.core.unit import Unit

Originals: TypeAlias = "Mapping[ShardedParameter, nn.Parameter]"
"""The parameters that one fully_shard() call sharded: what each was before, with its values."""

UNIT_CREATED: list[Callable[[Unit, Originals | None], None]] = []
"""Called with each new unit and its originals; None instead of them for a copy of a unit."""

ALLOCATION: list[Callable[[Unit], Callable[[], None]]] = []
"""Called with a unit before `to_empty()` allocates memory for a module of it; what they return is called afterwards."""

BEFORE_STATE_DICT: list[Callable[[Unit], None]] = []
"""Called with each unit before `state_dict()` lists its parameters."""
