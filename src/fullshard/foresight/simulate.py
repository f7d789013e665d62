"""A trace, a plan and options, run by the planner that runs the training, over a ledger of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import InFlight
from fullshard.collectives.traffic import Message
from fullshard.foresight.fsdp2 import Fsdp2Group, Fsdp2Reduction
from fullshard.foresight.group import GroupPlan, SimulatedGroup, SimulatedReduction
from fullshard.foresight.ledger import Category, Ledger
from fullshard.foresight.optimizer import OptimizerStep
from fullshard.foresight.program import ON_HOST, Await, Launch, Mesh, Phase, Program, RecordedLane, RecordedWork
from fullshard.foresight.trace import Backward, BackwardEnds, Born, Died, Enter, Exchanged, Gradient, Leave, Op, Trace
from fullshard.frontend.api import collector_paused
from fullshard.frontend.module import keep_of
from fullshard.policies import (
    DIRECT_MIN_BYTES,
    CheckPolicy,
    CommPolicy,
    CPUOffloadPolicy,
    Dtypes,
    MixedPrecisionPolicy,
    OffloadPolicy,
    resolve_mp,
    resolve_offload,
)
from fullshard.runtime.heartbeat import message_length
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.unit_modules import ForwardProgress
from fullshard.schedule.planner import Planner
from fullshard.schedule.records import ForwardCall, UnitRecord
from fullshard.schedule.residency import Action, Reduce, Reshard, SaveSubgroupShard, Unshard, Wait
from fullshard.sharding.layout import DirectRule, plan_layout
from fullshard.wrap.plan import Plan, PlannedUnit
from fullshard.wrap.plan_messages import PlanEntry

Engine = Literal["fullshard", "fsdp2"]
_MP, _COMM, _OFFLOAD = MixedPrecisionPolicy(), CommPolicy(), OffloadPolicy()


@dataclass(frozen=True, slots=True)
class Setting:
    """How a plan is carried out: the arguments of `shard_model`, and over how many ranks.

    Args:
        ranks: over how many ranks parameters are cut.
        replicas: how many ranks hold the same shards, on a hybrid mesh; 1 on a flat one.
        hybrid: whether the mesh has an axis of replicas, which may have one rank.
        mp_policy: the dtypes, as of `fully_shard`.
        comm_policy: how messages are cut, and how many are ahead, as of `fully_shard`.
        offload_policy: where shards are, as of `fully_shard`.
        reshard_after_forward: as of `fully_shard`.
        microbatches: forwards and backwards per step.
        accumulate: whether all of them but the last are without communication.
        accelerator: whether lanes are streams and kernels those of an accelerator; the CPU's need more memory for casts.
        gloo: whether messages travel by gloo, as they do on the CPU.
        optimizer: its step over the local shards; None steps nothing.
        engine: "fullshard", or "fsdp2": as torch's FSDP2 uses memory and messages, to compare.
        keep_unsharded_storage: whether the memory of full parameters and messages stays where it is.
        tensor_parallel: how many ranks that follow each other share each of these shards' parameters.
        dims: by name, along which dim a parameter is cut, where that is not 0.

    Raises:
        ValueError: if ranks, replicas or microbatches are not at least 1.
    """

    ranks: int
    replicas: int = 1
    hybrid: bool = False
    mp_policy: MixedPrecisionPolicy = _MP
    comm_policy: CommPolicy = _COMM
    offload_policy: OffloadPolicy = _OFFLOAD
    reshard_after_forward: bool | int | None = None
    microbatches: int = 1
    accumulate: bool = True
    accelerator: bool = True
    gloo: bool = False
    optimizer: OptimizerStep | None = None
    engine: Engine = "fullshard"
    keep_unsharded_storage: bool = False
    tensor_parallel: int = 1
    dims: Mapping[str, int] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """(replicas, ranks, ranks of tensor parallelism)."""
        return self.replicas, self.ranks, self.tensor_parallel

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Setting.{name} must be an int of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step does, after one that warmed up.

    ledger: of both steps.      begins: the index of the first change of the second step.      program: of the second step.
    outside: by block, the operator that made what is of no unit.
    """

    ledger: Ledger
    begins: int
    program: Program
    outside: Mapping[int, str]

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of the second step, in the order in which they begin."""
        return tuple(self.program.messages)


def simulate(trace: Trace, plan: Plan, setting: Setting) -> Simulation:
    """Run two steps: the first has no order to prefetch by, the second is like all that follow.

    Args:
        trace: of the model that the plan is of, with the dtypes of the setting.
        plan: its units.
        setting: how it is carried out.

    Returns:
        The simulation.

    Raises:
        ValueError: if `reshard_after_forward` of a unit does not divide the ranks.
    """
    with collector_paused():
        return _simulate(trace, plan, setting)


def _simulate(trace: Trace, plan: Plan, setting: Setting) -> Simulation:
    machine = _Machine(plan, setting, trace.makers())
    machine.ledger.take(trace.buffers, "buffers", "")
    machine.ledger.take(trace.batch, "buffers", "")
    begins = 0
    for step in range(2):
        begins = machine.begin_step()
        for number in range(setting.microbatches):
            machine.run(trace, sync=number == setting.microbatches - 1 or not setting.accumulate, noted=step > 0)
        machine.end_step()
    return Simulation(machine.ledger, begins, machine.program, machine.outside)


@dataclass(slots=True, eq=False)
class _Unit:
    """One unit: its modules by name, its record in the planner, and the gradients that arrived at its full parameters."""

    name: str
    modules: dict[str, object]
    record: UnitRecord
    progress: ForwardProgress = field(default_factory=ForwardProgress)
    groups: list[SimulatedGroup] = field(default_factory=list)
    gathering: list[tuple[SimulatedGroup, RecordedWork]] = field(default_factory=list)
    arrived: dict[str, int] = field(default_factory=dict)  # parameter -> block

    @property
    def is_list(self) -> bool:
        """Whether it has several modules."""
        return len(self.modules) > 1

    def take_gradients(self, group: SimulatedGroup) -> list[int | None] | None:
        """As `ParamGroup.take_gradients`."""
        found = [self.arrived.pop(name, None) for name in group.plan.parameters]
        return found if any(block is not None for block in found) else None


class _Machine:
    """Executor, steps and gradient reducer in one, on blocks instead of tensors."""

    def __init__(self, plan: Plan, setting: Setting, makers: Mapping[int, str]) -> None:
        self.setting, self._makers = setting, makers
        self.outside: dict[int, str] = {}
        self.ledger, self.program = Ledger(), Program()
        self.planner = Planner()
        self._units: dict[int, _Unit] = {}
        self._by_module: dict[str, _Unit] = {}
        self._owner: dict[str, _Unit] = {}  # of each parameter
        self._rival = setting.engine == "fsdp2"
        lane = partial(RecordedLane, self.program, accelerator=setting.accelerator)
        self._gather_lane, self._reduce_lane, self._replicate_lane = (
            lane("gather", early=self._rival),
            lane("reduce"),
            lane("replicate"),
        )
        self._in_flight, self._replicating = InFlight(), InFlight()
        self._reduced: list[SimulatedReduction] = []
        self._delivered: dict[SimulatedGroup, int] = {}
        self._sync = True
        self._runs = 0  # outermost forwards so far
        self._has_states = False  # of the optimizer
        for number, (unit, entries) in enumerate(plan.held()):
            self._add(number, unit, entries)
        self._run: dict[type[Action], Callable[[_Unit], None]] = {
            Unshard: self._unshard,
            Wait: self._wait,
            SaveSubgroupShard: self._save_subgroup_shard,
            Reshard: self._free,
            Reduce: self._reduce,
        }

    def _add(self, number: int, planned: PlannedUnit, entries: Sequence[PlanEntry]) -> None:
        setting, options = self.setting, options_of(planned, self.setting)
        keys: dict[str, object] = {name: object() for name in planned.modules}
        unit = _Unit(planned.name, keys, self.planner.register(number, options))
        for group in group_plans(planned.name, entries, options, setting):
            kind = Fsdp2Group if self._rival else SimulatedGroup
            unit.groups.append(kind(group, self.ledger, self.program))
        unit.record.configure(options, nbytes=sum(group.plan.full_nbytes for group in unit.groups))
        self._units[number] = unit
        self._by_module |= dict.fromkeys(planned.modules, unit)
        self._owner |= {entry.name: unit for entry in entries}

    # --- events ---

    def begin_step(self) -> int:
        """A step begins with an empty program. Returns how many changes there were before it."""
        self.program.instructions.clear()
        self.program.messages.clear()
        self.program.places.clear()
        return len(self.ledger.changes)

    def _enter(self, unit: str, phase: Phase) -> None:
        self.program.enter(unit, phase, len(self.ledger.changes))

    def run(self, trace: Trace, *, sync: bool, noted: bool) -> None:
        """One forward and backward. sync: whether its gradients are reduced. noted: whether operators go into the program."""
        self._sync = sync
        calls: dict[int, ForwardCall] = {}
        blocks: dict[int, int] = {}
        gradients = {event.storage: event.parameter for event in trace.events if isinstance(event, Gradient)}
        running: list[str] = [""]
        self._enter("", "forward")
        execute, kept, unit_name = self.program.instructions.append, trace.kept, ""
        take, give, share = self.ledger.take, self.ledger.give, self.ledger.share
        for event in trace.events:
            if isinstance(event, Op):
                if noted:
                    execute(event)
            elif isinstance(event, Born):
                owner = gradients.get(event.storage)
                if owner is not None:
                    blocks[event.storage] = take(event.nbytes, "gradients", self._owner[owner].name)
                else:
                    category: Category = "activations" if event.storage in kept else "temporaries"
                    block = blocks[event.storage] = take(event.nbytes, category, unit_name)
                    if not unit_name:
                        self.outside[block] = self._makers.get(event.storage, "")
            elif isinstance(event, Died):
                give(blocks.pop(event.storage))
            elif isinstance(event, Gradient):
                arrived = self._owner[event.parameter].arrived
                if event.parameter not in arrived:  # else autograd adds it to the one that is there
                    arrived[event.parameter] = share(blocks[event.storage])
            elif isinstance(event, BackwardEnds):
                self._leave_backward()
            elif isinstance(event, Exchanged):
                if noted:
                    launch = Launch("tensor", unit_name, messages=[event.message])
                    self.program.instructions += [launch, Await(launch)]
            elif event.module in self._by_module:
                self._run_module(event, running, calls)
                unit_name = running[-1]

    def _run_module(self, event: Enter | Leave | Backward, running: list[str], calls: dict[int, ForwardCall]) -> None:
        """A module of a unit begins its forward, ends it, or begins its backward. running: units, the innermost last."""
        unit = self._by_module[event.module]
        match event:
            case Enter(module, in_backward):
                running.append(unit.name)
                self._enter_forward(unit, unit.modules[module], in_backward)
                self._enter(unit.name, "backward" if in_backward else "forward")
            case Leave(module, call, grad, in_backward):
                running.pop()
                ended = self._leave_forward(unit, unit.modules[module], grad, in_backward)
                if call >= 0:
                    calls[call] = ended
                    self.planner.expect_backward(ended)
                self._enter(running[-1], "backward" if in_backward else "forward" if running[1:] else "loss")
            case Backward(module, call):
                self.planner.graph_released(calls[call])
                self._execute(self.planner.before_backward(calls[call]))
                running[-1] = unit.name
                self._enter(running[-1], "backward")

    def _enter_forward(self, unit: _Unit, module: object, in_backward: bool) -> None:
        """As `Steps.enter_forward`."""
        number, planner = unit.record.number, self.planner
        if in_backward:
            self._execute(planner.before_recompute(number))
        elif not (unit.is_list and planner.running.has(number)):
            self._runs += not planner.running
            self._execute(planner.before_forward(number))
            if unit.is_list:
                unit.progress.begin_list(unit.modules.values())
        unit.progress.begin(module, planner.clock, 0)

    def _leave_forward(self, unit: _Unit, module: object, grad: bool, in_backward: bool) -> ForwardCall:
        """As `Steps.leave_forward`."""
        number, progress = unit.record.number, unit.progress
        if in_backward:
            progress.end(module)
            return self.planner.after_recompute(number, grad=grad)
        if unit.is_list:
            done = progress.is_list_done(module, self._runs) and not progress.runs_around(module)
            if not done and self.planner.running.outermost() != number:
                progress.end(module)
                return self.planner.partial_end(number)
        ended = self.planner.after_forward(number, grad=grad, since=progress.end(module).clock)
        self._execute(ended.actions)
        self._poll()
        return ended.call

    def _leave_backward(self) -> None:
        self._execute(self.planner.after_backward())
        for unit in self._units.values():
            for group in unit.groups:
                late = unit.take_gradients(group)
                if late is not None:
                    self._send(group, late)
        due, self._reduced = self._reduced, []
        if not due:
            return
        if len(self._replicating):
            self._in_flight.drain()
        beats = self._send_heartbeats(due)
        self._in_flight.drain()
        self._replicating.drain()
        for beat in beats:
            beat.wait()
        added: list[int] = []
        copied: list[int] = []
        for reduction in due:
            block, left = reduction.deliver()
            copied.append(left)
            if not reduction.used or self._delivered.setdefault(reduction.group, block) != block:
                added.append(block)  # to the gradient that is there; or no parameter gets it
        self._give(copied)
        self._give(added)

    def end_step(self) -> None:
        """The optimizer steps, and gradients are cleared."""
        self._enter("", "optimizer")
        if self.setting.optimizer is not None:
            self._step_optimizer(self.setting.optimizer)
        for group, block in self._delivered.items():
            if group.used:
                group.write()
            group.used = False
            self.ledger.give(block)
        self._delivered.clear()

    def _step_optimizer(self, step: OptimizerStep) -> None:
        kind: Category = "pinned host" if isinstance(self.setting.offload_policy, CPUOffloadPolicy) else "optimizer"
        if not self._has_states:
            self._has_states = True
            for nbytes in step.states:
                self.ledger.take(nbytes, kind, "")
        if kind == "pinned host":
            self.program.instructions.append(Op(ON_HOST, 0, sum(op.nbytes for op in step.ops), None))
            return
        self.program.instructions.extend(step.ops)
        temporaries: dict[int, int] = {}
        for storage, nbytes in step.changes:
            if nbytes:
                temporaries[storage] = self.ledger.take(nbytes, "temporaries", "")
            else:
                self.ledger.give(temporaries.pop(storage))

    def _send_heartbeats(self, due: Sequence[SimulatedReduction]) -> list[RecordedWork]:
        """One message per log, and one over the replicas behind it."""
        sent: list[RecordedWork] = []
        logs: dict[str, list[GroupPlan]] = defaultdict(list)
        for reduction in due:
            logs[reduction.plan.axis].append(reduction.plan)
        for plans in () if self._rival else logs.values():
            length = message_length(sum(len(plan.parameters) for plan in plans))
            first = plans[0]
            work = self._reduce_lane.run("", partial(self._beat, length, first.layout.ranks), _nothing)
            if first.replicated:
                work = self._replicate_lane.run("", partial(self._beat, length, first.replicas), _nothing, after=work)
            sent.append(work)
        return sent

    def _beat(self, length: int, ranks: int) -> StartedWork:
        self.program.send(Message("heartbeat", torch.uint8, length, 1, ranks))
        return StartedWork()

    # --- actions ---

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._run[type(action)](self._units[action.unit])

    def _unshard(self, unit: _Unit) -> None:
        if self._rival and self.program.places[-1].phase == "forward":  # FSDP2 gathers ahead in backward only
            unit.gathering = []
            return
        self._gather(unit)

    def _gather(self, unit: _Unit) -> None:
        unit.gathering = [(group, self._gather_lane.run(unit.name, group.gather, _nothing)) for group in unit.groups]

    def _wait(self, unit: _Unit) -> None:
        if self._rival and not unit.gathering:
            self._gather(unit)
        for group, work in unit.gathering:
            work.wait()
            group.finish_gather()
        unit.gathering = []

    def _save_subgroup_shard(self, unit: _Unit) -> None:
        for group in unit.groups:
            group.save_subgroup_shard()

    def _free(self, unit: _Unit) -> None:
        for group in unit.groups:
            group.free()

    def _reduce(self, unit: _Unit) -> None:
        for group in unit.groups:
            if group.plan.trainable:
                self._send(group, unit.take_gradients(group) or [None] * len(group.plan.parameters))
        self._poll()

    def _send(self, group: SimulatedGroup, grads: list[int | None]) -> None:
        """As `GradientReducer.reduce`."""
        if not self._sync:
            return self._give(group.accumulate(grads))
        if group.plan.keep:
            self._in_flight.drain()
            self._replicating.drain()
        self._in_flight.make_room(group.plan.in_flight)
        merged = group.merge(grads)
        reduction = (Fsdp2Reduction if self._rival else SimulatedReduction)(group, merged)
        group.used = group.used or reduction.used
        self._give(merged.spent if merged.kept else reduction.packed_grads)
        work = self._reduce_lane.run(group.plan.unit, reduction.start, reduction.finish)
        self._in_flight.push(work, reduction.release_messages, polled=not reduction.replicated)
        if reduction.replicated:
            work = self._replicate_lane.run(group.plan.unit, reduction.replicate, reduction.finish_replicated, after=work)
            self._replicating.push(work, reduction.release_sum)
        if merged.kept:  # they were in a list of their own
            self._give(reduction.packed_grads)
        self._reduced.append(reduction)

    def _give(self, blocks: Sequence[int]) -> None:
        self.ledger.give_all(blocks)

    def _poll(self) -> None:
        self._in_flight.poll()
        self._replicating.poll()


def _nothing() -> None: ...


def options_of(planned: PlannedUnit, setting: Setting) -> UnitOptions:
    """The options of a unit: its own, and those of the setting where it has none.

    Raises:
        ValueError: if its `reshard_after_forward` does not divide the ranks.
    """
    told: dict[str, Any] = {
        "mp_policy": setting.mp_policy,
        "comm_policy": setting.comm_policy,
        "offload_policy": setting.offload_policy,
        "reshard_after_forward": setting.reshard_after_forward,
        **planned.options,
    }
    policy, subgroup = keep_of(told["reshard_after_forward"], setting.ranks)
    return UnitOptions(
        reshard_policy=policy,
        subgroup_size=subgroup,
        mp=resolve_mp(told["mp_policy"]),
        offload=resolve_offload(told["offload_policy"]),
        comm=told["comm_policy"],
        checks=CheckPolicy(),
        keep_memory=setting.keep_unsharded_storage,
    )


def group_plans(name: str, entries: Sequence[PlanEntry], options: UnitOptions, setting: Setting) -> list[GroupPlan]:
    """The groups of a unit, as `group_parameters` makes them."""
    kinds: dict[tuple[Dtypes, bool, bool], list[PlanEntry]] = {}
    for entry in entries:
        dtypes = options.mp.for_planning().resolve(entry.dtype, entry.grad_dtype)
        kinds.setdefault((dtypes, entry.trainable, not entry.shape), []).append(entry)
    return [_group_plan(name, members, *kind, options, setting) for kind, members in kinds.items()]


def _group_plan(
    name: str,
    entries: Sequence[PlanEntry],
    dtypes: Dtypes,
    trainable: bool,
    scalar: bool,
    options: UnitOptions,
    setting: Setting,
) -> GroupPlan:
    """The group of these parameters. Scalars are cut nowhere: a group of one rank, whose replicas are all ranks."""
    ranks = 1 if scalar else setting.ranks
    told = options.comm.direct_min_bytes
    default = 0 if ranks == 1 else DIRECT_MIN_BYTES  # of SingleRank, CoalescedCollectives
    layout = plan_layout(
        [entry.shape or (1,) for entry in entries],
        ranks=ranks,
        itemsize=min(dtypes.storage.itemsize, dtypes.compute.itemsize),
        direct=DirectRule.by_default(default) if told is None else DirectRule(told),
        dims=[setting.dims.get(entry.name, 0) for entry in entries],
    )
    as_is = dtypes.compute == dtypes.reduce
    subgroup = options.subgroup_size
    return GroupPlan(
        unit=name,
        parameters=tuple(entry.name for entry in entries),
        layout=layout,
        reduction=layout.reduction(as_is=as_is, in_order=ranks > 1 and not setting.gloo, itemsize=dtypes.reduce.itemsize),
        dtypes=dtypes,
        trainable=trainable,
        axis="everywhere" if scalar else "shards",
        replicas=setting.ranks * setting.replicas if scalar else setting.replicas,
        replicated=scalar or setting.hybrid,
        subgroup=None if subgroup is None or subgroup >= ranks else subgroup,
        host=isinstance(options.offload, CPUOffloadPolicy),
        accelerator=setting.accelerator,
        gloo=setting.gloo,
        in_flight=options.comm.reductions_in_flight,
        keep=options.keep_memory,
    )


__all__ = ["Setting", "Simulation", "group_plans", "options_of", "simulate"]
