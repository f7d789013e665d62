"""Simulator of training steps: runs a trace through the runtime's scheduler, and records memory and collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from fullshard import ext
from fullshard.core import (
    Action,
    DirectRule,
    ForwardCall,
    InFlight,
    Message,
    Move,
    Scheduler,
    UnitOptions,
    UnitRecord,
    message_length,
)
from fullshard.errors import check_int
from fullshard.foresight.fsdp2 import Fsdp2Group, Fsdp2Reduction
from fullshard.foresight.group import GroupPlan, SimulatedGroup, SimulatedReduction
from fullshard.foresight.ledger import Category, Ledger
from fullshard.foresight.optimizer import OptimizerStep
from fullshard.foresight.program import Await, Launch, Mesh, Phase, Program, RecordedStream, RecordedWork, replay
from fullshard.foresight.trace import (
    Allocated,
    BackwardBegins,
    BackwardEnds,
    ForwardBegins,
    ForwardEnds,
    Freed,
    GradientReady,
    ModuleEvent,
    Op,
    TensorParallelCollective,
    Trace,
)
from fullshard.frontend.api import gc_paused
from fullshard.frontend.module import parse_reshard_after_forward
from fullshard.policies import (
    DIRECT_MIN_BYTES,
    ZERO3,
    CheckPolicy,
    CommPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateSharding,
    fields_only_here,
    resolve_mp,
    resolve_offload,
)
from fullshard.wrap.plan import Plan, PlannedUnit
from fullshard.wrap.plan_messages import EntryGroup, PlanEntry, group_entries
from fullshard.wrap.whole_model import check_options

Engine = Literal["fullshard", "fsdp2"]
_MP, _COMM, _OFFLOAD = MixedPrecisionPolicy(), CommPolicy(), OffloadPolicy()


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a simulated run: the mesh and the arguments of `shard_model`.

    Args:
        ranks: the size of the shard mesh dim.
        replicas: the size of the replicate mesh dim of a hybrid mesh; 1 on a flat mesh.
        hybrid: True if the mesh has a replicate dim, even of size 1.
        mp_policy: the mixed-precision policy, as in `fully_shard`.
        comm_policy: the communication policy (message sizes, budget of prefetching), as in `fully_shard`.
        offload_policy: the offload policy, as in `fully_shard`.
        reshard_after_forward: as in `fully_shard`.
        states: the level of ZeRO, as in `fully_shard`.
        microbatches: the number of forwards and backwards per step.
        accumulate: True to reduce gradients in the last microbatch only, False to reduce them in each.
        accelerator: True for the streams and kernels of an accelerator, False for the CPU, which needs more memory for casts.
        gloo: True if collectives run on gloo, as on the CPU.
        optimizer: the optimizer's step over the local shards, by parts: those on the device and those in host memory. Empty
            to skip it.
        engine: "fullshard", or "fsdp2" to simulate the memory and collectives of torch's FSDP2 for comparison.
        keep_unsharded_storage: True to keep the buffers of all-gathers allocated.
        tensor_parallel: the size of the tensor-parallel mesh dim, whose ranks are adjacent.
        dims: the sharded tensor dim by parameter name, for parameters not sharded on dim 0.

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
    states: StateSharding = ZERO3
    microbatches: int = 1
    accumulate: bool = True
    accelerator: bool = True
    gloo: bool = False
    optimizer: Sequence[OptimizerStep] = ()
    engine: Engine = "fullshard"
    keep_unsharded_storage: bool = False
    tensor_parallel: int = 1
    dims: Mapping[str, int] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """Mesh sizes: (replicas, ranks, tensor-parallel ranks)."""
        return self.replicas, self.ranks, self.tensor_parallel

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "microbatches"):
            check_int(f"Setting.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulation: a steady-state step, after one warm-up step."""

    ledger: Ledger  # allocations and frees of both steps
    first_change: int  # index in the ledger of the second step's first change
    program: Program  # instructions and collectives of the second step
    outside: Mapping[int, str]  # for each block that was allocated outside of units: the operator that allocated it

    @property
    def messages(self) -> tuple[Message, ...]:
        """Collectives of the second step, in the order of their starts."""
        return tuple(self.program.messages)


@gc_paused()
def simulate(trace: Trace, plan: Plan, setting: Setting) -> Simulation:
    """Simulate two steps. The first knows no order of an earlier step to prefetch by, the second is like all later steps."""
    simulator = _Simulator(trace, plan, setting)
    first_change = 0
    for step in range(2):
        first_change = len(simulator.ledger.changes)
        simulator.program.clear()
        for number in range(1, setting.microbatches + 1):
            simulator.run(last=number == setting.microbatches, record_operators=step > 0)
        simulator.end_step()
    return Simulation(simulator.ledger, first_change, simulator.program, simulator.outside)


@dataclass(slots=True, eq=False)
class _Unit:
    """One unit of the plan."""

    name: str
    modules: dict[str, int]  # qualified name -> index
    record: UnitRecord  # in the scheduler
    groups: list[SimulatedGroup] = field(default_factory=list)
    gathering: list[tuple[SimulatedGroup, RecordedWork]] = field(default_factory=list)  # all-gathers in flight
    arrived: dict[str, int] = field(default_factory=dict)  # by parameter: block of its unsharded gradient
    stale: bool = False  # the optimizer has written shards since the last all-gather

    @property
    def is_list(self) -> bool:
        """True if the unit has several modules, whose forwards together are one of the unit."""
        return len(self.modules) > 1

    def take_gradients(self, group: SimulatedGroup) -> list[int | None] | None:
        """Remove and return the gradients of a group, by parameter (None if missing). Return None if all are missing."""
        blocks = [self.arrived.pop(name, None) for name in group.plan.parameters]
        return blocks if any(block is not None for block in blocks) else None


class _Simulator:
    """Counterpart of `Unit`, `Runtime` and `GradientReducer` that works on blocks of the ledger instead of tensors.

    A `Scheduler` as in training makes every decision. Each method repeats the allocations, frees and collectives of its
    counterpart, in the same order.
    """

    def __init__(self, trace: Trace, plan: Plan, setting: Setting) -> None:
        self._trace, self.setting = trace, setting
        self._operators = trace.operator_by_storage()
        self._parameter_of = {one.storage: one.parameter for one in trace.events if isinstance(one, GradientReady)}
        self.outside: dict[int, str] = {}
        self.ledger, self.program, self.scheduler = Ledger(), Program(), Scheduler()
        self._units: dict[int, _Unit] = {}
        self._unit_of_module: dict[str, _Unit] = {}
        self._unit_of_parameter: dict[str, _Unit] = {}
        self._as_fsdp2 = setting.engine == "fsdp2"
        stream = partial(RecordedStream, self.program, accelerator=setting.accelerator)
        self._gather_stream, self._reduce_stream, self._replicate_stream = (
            stream("gather", early=self._as_fsdp2),
            stream("reduce"),
            stream("replicate"),
        )
        self._in_flight, self._replicating = InFlight(), InFlight()  # reduce-scatters, and all-reduces over replicas
        self._started: list[SimulatedReduction] = []  # reductions of this backward
        self._grads: dict[SimulatedGroup, int] = {}  # block of `.grad` of the group's shards
        self._last = True  # True in the last microbatch of a step
        self._has_states = False  # True once the optimizer's states are allocated
        group_class = Fsdp2Group if self._as_fsdp2 else SimulatedGroup
        for number, (planned, entries) in enumerate(plan.held()):
            options = options_of(planned, setting)
            modules = {name: index for index, name in enumerate(planned.modules)}
            unit = _Unit(planned.name, modules, self.scheduler.register(number, options))
            plans = group_plans(planned.name, entries, options, setting)
            unit.groups += [group_class(group, self.ledger, self.program) for group in plans]
            unit.record.nbytes = sum(group.unsharded_nbytes for group in plans)
            self._units[number] = unit
            self._unit_of_module |= dict.fromkeys(planned.modules, unit)
            self._unit_of_parameter |= {entry.name: unit for entry in entries}
        self.ledger.allocate(trace.buffers, "buffers", "")
        self.ledger.allocate(trace.batch, "buffers", "")

    # --- events ---

    def _enter(self, unit: str, phase: Phase) -> None:
        self.program.enter(unit, phase, len(self.ledger.changes))

    def run(self, *, last: bool, record_operators: bool) -> None:
        """Run one forward and backward. `last`: of the step. `record_operators`: True to append operators to the program."""
        trace, parameter_of, self._last = self._trace, self._parameter_of, last
        calls: dict[int, ForwardCall] = {}
        blocks: dict[int, int] = {}  # by storage
        running = [""]
        self._enter("", "forward")
        record, kept, unit_name = self.program.instructions.append, trace.kept, ""
        allocate, free, share = self.ledger.allocate, self.ledger.free, self.ledger.share
        for event in trace.events:
            if isinstance(event, Op):
                if record_operators:
                    record(event)
            elif isinstance(event, Allocated):
                parameter = parameter_of.get(event.storage)
                if parameter is not None:
                    blocks[event.storage] = allocate(event.nbytes, "gradients", self._unit_of_parameter[parameter].name)
                else:
                    category: Category = "activations" if event.storage in kept else "temporaries"
                    block = blocks[event.storage] = allocate(event.nbytes, category, unit_name)
                    if not unit_name:
                        self.outside[block] = self._operators.get(event.storage, "")
            elif isinstance(event, Freed):
                free(blocks.pop(event.storage))
            elif isinstance(event, GradientReady):
                arrived = self._unit_of_parameter[event.parameter].arrived
                # The block has two owners now: the trace, and the reduction. A second gradient of the same parameter in one
                # backward is accumulated into the first.
                if event.parameter not in arrived:
                    arrived[event.parameter] = share(blocks[event.storage])
            elif isinstance(event, BackwardEnds):
                self._leave_backward()
            elif isinstance(event, TensorParallelCollective):
                if record_operators:
                    launch = Launch("tensor", unit_name, messages=[event.message])
                    self.program.instructions += [launch, Await(launch)]
            elif event.module in self._unit_of_module:
                self._run_module(event, running, calls)
                unit_name = running[-1]

    def _run_module(self, event: ModuleEvent, running: list[str], calls: dict[int, ForwardCall]) -> None:
        """Handle the start or end of a unit's forward, or the start of its backward. Updates `running` and `calls`.

        running: names of units. The first entry is "" in forward, and the current unit in backward. The units follow whose
            forward is running, innermost last: in backward, those that are recomputed.
        calls: the forward calls by their number in the trace.
        """
        unit = self._unit_of_module[event.module]
        match event:
            case ForwardBegins(module, in_backward):
                running.append(unit.name)
                self._enter_forward(unit, unit.modules[module], in_backward)
                self._enter(unit.name, "backward" if in_backward else "forward")
            case ForwardEnds(module, call, grad, in_backward):
                running.pop()
                ended = self._leave_forward(unit, unit.modules[module], grad, in_backward)
                if call >= 0:  # an output requires grad
                    calls[call] = ended
                    self.scheduler.expect_backward(ended)
                self._enter(running[-1], "backward" if in_backward else "forward" if len(running) > 1 else "loss")
            case BackwardBegins(module, call):
                self.scheduler.graph_released(calls[call])
                self._execute(self.scheduler.before_backward(calls[call]))
                running[-1] = unit.name  # replaced, not appended: backward has no event at the end of a unit
                self._enter(running[-1], "backward")

    def _enter_forward(self, unit: _Unit, module: int, in_backward: bool) -> None:
        """Unshard a unit before its forward or its recomputation, and prefetch."""
        number, scheduler = unit.record.number, self.scheduler
        if in_backward:
            self._execute(scheduler.before_recompute(number))
        elif unit.is_list and unit.record.running:
            scheduler.continue_forward(number, module)
        else:
            if not scheduler.running:
                self._execute(scheduler.drop_stale(number for number, unit in self._units.items() if unit.stale))
            parts = (module, *unit.modules.values()) if unit.is_list else ()
            self._execute(scheduler.before_forward(number, parts=parts))

    def _leave_forward(self, unit: _Unit, module: int, grad: bool, in_backward: bool) -> ForwardCall:
        """End a unit's forward or recomputation, and reshard the unit if the scheduler decides so."""
        number = unit.record.number
        if in_backward:
            return self.scheduler.after_recompute(number, grad=grad)
        ended = self.scheduler.after_forward(number, grad=grad, part=module if unit.is_list else None)
        if unit.is_list and unit.record.running:  # other modules follow
            return ended.call
        self._execute(ended.actions)
        self._poll()
        return ended.call

    def _leave_backward(self) -> None:
        """Reduce the remaining gradients, run the heartbeats, and deliver the reduced gradients to `.grad`."""
        self._execute(self.scheduler.after_backward())
        for unit in self._units.values():
            for group in unit.groups:
                remaining = unit.take_gradients(group)
                if remaining is not None:
                    self._start_reduction(unit, group, remaining)
        reductions, self._started = self._started, []
        if not reductions:
            return
        if len(self._replicating):
            self._in_flight.drain()  # starts the all-reduces over replicas first, as `GradientReducer.send_heartbeats` does
        heartbeats = self._start_heartbeats(reductions)
        self._in_flight.drain()
        self._replicating.drain()
        for heartbeat in heartbeats:
            heartbeat.wait()
        superfluous: list[int] = []  # blocks that were added to an existing `.grad`, or are of groups without a used parameter
        for reduction in reductions:
            grad, device_block = reduction.deliver()
            self.ledger.free(device_block)  # which was copied to the host
            if not reduction.used or self._grads.setdefault(reduction.group, grad) != grad:
                superfluous.append(grad)
        self.ledger.free_all(superfluous)

    def end_step(self) -> None:
        """Run the optimizer's step and clear the gradients."""
        self._enter("", "optimizer")
        for step in self.setting.optimizer:
            for nbytes in () if self._has_states else step.states:
                self.ledger.allocate(nbytes, "pinned host" if step.on_host else "optimizer", "")
            if step.owners is not None:
                step.owners.run(self.ledger, self.program, on_host=step.on_host)
            replay(step.events, self.ledger, self.program, on_host=step.on_host)
        self._has_states = True
        for unit in self._units.values():
            unit.stale = unit.stale or any(group.used for group in unit.groups)
        for group, grad in self._grads.items():
            if group.used:
                group.invalidate_kept_shards()
            group.used = False
            self.ledger.free(grad)
        self._grads.clear()

    def _start_heartbeats(self, reductions: Sequence[SimulatedReduction]) -> list[RecordedWork]:
        """Start one heartbeat per collective log, followed by one over the replicas if there are any."""
        heartbeats: list[RecordedWork] = []
        logs: dict[str, list[GroupPlan]] = defaultdict(list)
        for reduction in reductions:
            logs[reduction.plan.log].append(reduction.plan)
        for plans in () if self._as_fsdp2 else logs.values():
            first = plans[0]  # all groups of a log have the same ranks
            length = message_length(sum(len(plan.parameters) for plan in plans))
            message = Message("heartbeat", torch.uint8, length, 1, first.layout.ranks)
            work = self._reduce_stream.run("", partial(self.program.send, message))
            if first.replicated:
                message = replace(message, ranks=first.replicas)
                work = self._replicate_stream.run("", partial(self.program.send, message), after=work)
            heartbeats.append(work)
        return heartbeats

    # --- actions ---

    def _execute(self, actions: Sequence[Action]) -> None:
        for move, number in actions:
            unit = self._units[number]
            match move:
                case Move.UNSHARD:
                    # FSDP2 prefetches in backward only.
                    if not (self._as_fsdp2 and self.program.places[-1].phase == "forward"):
                        self._gather(unit)
                case Move.WAIT:
                    self._wait(unit)
                case Move.SAVE_SUBGROUP_SHARD:
                    for group in unit.groups:
                        group.save_subgroup_shard()
                case Move.RESHARD:
                    for group in unit.groups:
                        group.free()
                case Move.REDUCE:
                    self._reduce(unit)

    def _gather(self, unit: _Unit) -> None:
        unit.stale = False
        for group in unit.groups:
            first, before = group.allocate_inner_shard(), None
            group.allocate_gather()
            if first is not None:
                before = self._replicate_stream.run(unit.name, partial(group.start_hop, first, first=True))
            unit.gathering.append((group, self._gather_stream.run(unit.name, group.start_gather, after=before)))

    def _wait(self, unit: _Unit) -> None:
        if self._as_fsdp2 and not unit.gathering:
            self._gather(unit)
        for group, work in unit.gathering:
            work.wait()
            group.finish_all_gather()
        unit.gathering = []

    def _reduce(self, unit: _Unit) -> None:
        for group in unit.groups:
            if group.plan.trainable:
                self._start_reduction(unit, group, unit.take_gradients(group) or [None] * len(group.plan.parameters))
        self._poll()

    def _start_reduction(self, unit: _Unit, group: SimulatedGroup, grads: list[int | None]) -> None:
        """Start the reduction of a group's gradients, or accumulate them if this backward does not reduce."""
        if not self._last and (self.setting.accumulate or unit.record.options.states.keeps_gradients):
            return self.ledger.free_all(group.accumulate(grads))
        self._in_flight.make_room(group.plan.options.comm.reductions_in_flight)
        merged = group.merge(grads)
        defer = group.plan.options.states.sums_over_shards and not self._last
        reduction = Fsdp2Reduction(group, merged) if self._as_fsdp2 else SimulatedReduction(group, merged, defer=defer)
        group.used = group.used or reduction.used
        # Gradients are free once they are added to accumulated ones (`spent`) or copied into the packed input (`packed_grads`).
        # Packed gradients that were accumulated are free at the end only, because `GradientReducer.reduce` references them.
        self.ledger.free_all(merged.spent if merged.kept else reduction.packed_grads)
        work = self._reduce_stream.run(group.plan.unit, reduction.start, reduction.finish)
        self._in_flight.push(work, reduction.release_inputs, polled=not reduction.has_second_step)
        if reduction.has_second_step:
            work = self._replicate_stream.run(group.plan.unit, reduction.replicate, reduction.finish_replicated, after=work)
            self._replicating.push(work, reduction.release_reduced_shard)
        if merged.kept:
            self.ledger.free_all(reduction.packed_grads)
        if not reduction.deferred:
            self._started.append(reduction)

    def _poll(self) -> None:
        self._in_flight.poll()
        self._replicating.poll()


def options_of(planned: PlannedUnit, setting: Setting) -> UnitOptions:
    """Return the options of a unit: its own, with the setting's as defaults."""
    defaults = ("mp_policy", "comm_policy", "offload_policy", "reshard_after_forward", "states")
    options: dict[str, Any] = {**{name: getattr(setting, name) for name in defaults}, **planned.options}
    if planned.options:
        check_options([planned.options])
    states, mp = options["states"], resolve_mp(options["mp_policy"])
    if setting.engine == "fsdp2" and states != ZERO3:
        raise ValueError(f"states={states} needs engine='fullshard': torch's FSDP2 has no such level.")
    only_here = fields_only_here(mp) if setting.engine == "fsdp2" else []
    if only_here:
        raise ValueError(f"MixedPrecisionPolicy({only_here[0]}=) needs engine='fullshard': torch's FSDP2 has no such option.")
    if states.shards_over_replicas and not setting.hybrid:
        raise ValueError(
            f"states={states} needs a hybrid mesh. Pass mesh=(replicas, ranks), got one mesh dim of size {setting.ranks}."
        )
    policy, subgroup = parse_reshard_after_forward(options["reshard_after_forward"], setting.ranks, states)
    return UnitOptions(
        keep_after_forward=policy,
        subgroup_size=subgroup,
        states=states,
        mp=mp,
        offload=resolve_offload(options["offload_policy"]),
        comm=options["comm_policy"],
        checks=CheckPolicy(),
        keep_memory=setting.keep_unsharded_storage,
    )


def group_plans(name: str, entries: Sequence[PlanEntry], options: UnitOptions, setting: Setting) -> list[GroupPlan]:
    """Return the parameter groups of a unit, as `group_parameters` forms them."""
    two_hops = options.states.shards_over_replicas and setting.replicas > 1  # shards are sharded over replicas, too

    def stays_replicated(entry: PlanEntry) -> bool:
        dim, ranks = setting.dims.get(entry.name, 0), setting.ranks * setting.replicas
        return bool(entry.shape) and ext.two_hops.has_few_rows(entry.shape, dim, itemsize=entry.dtype.itemsize, ranks=ranks)

    groups = group_entries(entries, options.mp, stays_replicated if two_hops else None)
    return [
        _group_plan(name, group, options, setting, two_hops=two_hops and not (group.scalar or group.replicated))
        for group in groups
    ]


def _group_plan(name: str, group: EntryGroup, options: UnitOptions, setting: Setting, *, two_hops: bool) -> GroupPlan:
    if setting.engine == "fsdp2":
        group = replace(group, dtypes=group.dtypes.of_fsdp2)
    ranks, dtypes, subgroup = 1 if group.scalar else setting.ranks, group.dtypes, options.subgroup_size
    outer = setting.replicas if two_hops else 1
    default = 0 if ranks == 1 else DIRECT_MIN_BYTES  # as SingleRank and CoalescedCollectives
    direct_min_bytes = options.comm.direct_min_bytes
    direct = DirectRule.of(direct_min_bytes, default)
    layout, over_replicas, scatter = group.layout(ranks * outer, direct, setting.dims, outer=outer), None, None
    if two_hops:
        over_replicas, layout = ext.two_hops.in_two_hops(layout, ranks, outer, rank=0)
        # `as_is`: the sum over shards has the reduce dtype already.
        scatter = over_replicas.reduction(as_is=True, in_order=not setting.gloo, itemsize=dtypes.reduce.itemsize)
    in_order = ranks > 1 and not setting.gloo and setting.engine != "fsdp2"  # FSDP2 reduces no slices
    return GroupPlan(
        unit=name,
        parameters=tuple(entry.name for entry in group.entries),
        layout=layout,
        reduction=layout.reduction(as_is=dtypes.reduces_as_is, in_order=in_order, itemsize=dtypes.reduce.itemsize),
        dtypes=dtypes,
        trainable=group.trainable,
        log="everywhere" if group.scalar else "shards",
        replicas=setting.ranks * setting.replicas if group.scalar else setting.replicas,
        replicated=group.scalar or setting.hybrid,
        subgroup=None if subgroup is None or subgroup >= ranks else subgroup,
        accelerator=setting.accelerator,
        gloo=setting.gloo,
        options=options,
        over_replicas=over_replicas,
        scatter=scatter,
    )
