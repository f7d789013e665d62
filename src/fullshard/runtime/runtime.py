"""What runs the units of one thread on one device, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import local

import torch
from torch import nn

from fullshard.collectives.streams import Lane, lane_for
from fullshard.consistency.collective_log import CollectiveLog, Fingerprint
from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter
from fullshard.policies import CommPolicy
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.executor import Executor
from fullshard.runtime.finalization import Finalization
from fullshard.runtime.join import Join
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.recovery import Recovery
from fullshard.runtime.requests import Requests
from fullshard.runtime.steps import Steps
from fullshard.runtime.unit import Unit
from fullshard.schedule.join import JoinedCalls
from fullshard.schedule.records import UnitRecord
from fullshard.sharding.mesh import ShardAxis


class Runtime:
    """runtime 1 - n units (held weakly), one per device and per thread that shards.

    hooks ──> steps, join ──┐                    ┌──> planner: events in, actions out
    callers ──> requests ───┼──> executor ───────┼──> communicator: messages on lanes
    (both first) recovery ──┘    runs actions    └──> reducer: gradients on their way
    """

    _of_thread = local()

    @classmethod
    def of(cls, device: torch.device, comm: CommPolicy) -> Runtime:
        """The runtime of this thread and device; policies that bring lanes of their own have one of their own."""
        known: dict[tuple[torch.device, object], Runtime] = cls._of_thread.__dict__.setdefault("runtimes", {})
        key = (device, comm.lanes)
        if key not in known:
            known[key] = cls(device, comm.lanes or lane_for)
        return known[key]

    @classmethod
    def all_of_thread(cls) -> list[Runtime]:
        """Those of this thread."""
        return list(cls._of_thread.__dict__.get("runtimes", {}).values())

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane]) -> None:
        self.communicator = Communicator(device, lanes)
        self.executor = Executor(self.communicator)
        self.planner, self.reducer = self.executor.planner, self.executor.reducer
        joined = JoinedCalls(self.planner)
        self.recovery = Recovery(self.executor, joined)
        self.steps = Steps(self.executor, self.recovery, joined)
        self.requests = Requests(self.executor, self.recovery)
        self.finalization = Finalization(self.executor, self.recovery, self.requests)
        self.join = Join(self.executor, self.recovery, self.steps, joined).join
        self.enter_backward = self.steps.enter_backward

    # --- what units and their parameters ask for ---

    def register(self, unit: Unit) -> UnitRecord:
        """The record of a new unit, with its number."""
        return self.executor.register(unit)

    def update_timeouts(self) -> None:
        """What units were told about checks may have changed."""
        self.executor.update_timeouts()

    def enter_late(self, unit: Unit) -> None:
        """A gradient arrived in a backward that none of the unit's outputs announced."""
        self.steps.enter_late(unit)

    def check_step(self, unit: Unit, group: ParamGroup) -> None:
        """Raises StateError if an optimizer may not write the shards of a group now."""
        self.requests.check_step(unit, group)

    def log_write(self, log: CollectiveLog, fingerprint: Fingerprint) -> None:
        """The caller wrote to shards, as all ranks of the log must."""
        self.requests.log_write(log, fingerprint)


def runtime_of(unit: Unit) -> Runtime:
    """The runtime that moves a unit."""
    runtime = unit.runtime
    assert isinstance(runtime, Runtime)
    return runtime


def make_unit(
    modules: Sequence[nn.Module],
    parameters: list[ShardedParameter],
    axis: ShardAxis,
    options: UnitOptions,
    *,
    global_id: int | None = None,
) -> Unit:
    """A unit, and its runtime if that is the first one there. `global_id`: of the unit that it is a copy of."""
    return Unit(modules, parameters, axis, options, Runtime.of(axis.device, options.comm), global_id=global_id)


__all__ = ["Runtime", "make_unit", "runtime_of"]
