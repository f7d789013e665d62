"""One fully_shard call: its modules, parameters and groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard.consistency.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName
from fullshard.errors import StateError, warn_once
from fullshard.params.extension import check_extension, travels_alone
from fullshard.params.group import ParamGroup, group_class, group_parameters
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.uninitialized import UninitializedTensors
from fullshard.params.unsharded import Storage
from fullshard.policies import CPUOffloadPolicy
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.setup_collectives import SetupCollectives
from fullshard.runtime.unit_modules import UNIT, ForwardProgress, UnitModules
from fullshard.schedule.planner import Planner
from fullshard.schedule.records import ForwardCall, UnitRecord
from fullshard.schedule.residency import Residency
from fullshard.sharding.layout import DirectRule
from fullshard.sharding.mesh import ShardAxis
from fullshard.sharding.module_tree import clean_name

_WIDEST = 16  # bytes of an element, in whichever dtype it travels


class InterruptMark(Protocol):
    """Where an interrupt is noted that came in the midst of an event."""

    interrupted: bool


class PendingReduction(Protocol):
    """Reductions that the caller waits for later, of all these units."""

    units: list[Unit]

    def drop(self, why: str) -> None:
        """Forget them; waiting raises and says why."""


class UnitRuntime(Protocol):
    """What a unit, its parameters and its hooks ask of the runtime."""

    @property
    def planner(self) -> Planner:
        """When units move."""

    @property
    def communicator(self) -> Communicator:
        """How they say it to other ranks."""

    @property
    def recovery(self) -> InterruptMark:
        """What puts right what was interrupted."""

    def register(self, unit: Unit) -> UnitRecord:
        """The record of a new unit, with its number."""

    def update_timeouts(self) -> None:
        """What units were told about checks may have changed."""

    def enter_backward(self, unit: Unit, call: ForwardCall, *, copied_use: bool = False) -> None:
        """The backward of a call begins."""

    def enter_late(self, unit: Unit) -> None:
        """A gradient arrived in a backward that none of the unit's outputs announced."""

    def check_step(self, unit: Unit, group: ParamGroup) -> None:
        """Raises StateError if an optimizer may not write the shards of a group now."""

    def log_write(self, log: CollectiveLog, fingerprint: Fingerprint) -> None:
        """The caller wrote to shards, as all ranks of the log must."""


@dataclass(slots=True, eq=False)
class PendingChecks:
    """What is looked at before the next forward, or the next gather, of one unit."""

    lint: bool = True  # parameters that nobody reduces
    remarks: bool = True  # waste in the model, if the unit is the outermost one
    names: bool = True  # the names and places of the units below, if the unit is the outermost one
    gathers: bool = True  # how each parameter is gathered
    uninitialized: UninitializedTensors | None = None  # memory that nobody has written yet


@dataclass(slots=True, eq=False)
class Exposure:
    """What the caller sees of the full parameters of one unit."""

    plain: bool = False  # full_params() has plain Parameters in the slots
    writable: bool = False  # they were handed to the caller, who may write to them


class Unit:
    """One fully_shard call. unit 1 - n modules, unit 1 - n groups, group 1 - n parameters.

    Strong references point down only: module -> unit -> group -> parameter. The runtime knows units weakly.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: list[ShardedParameter],
        axis: ShardAxis,
        options: UnitOptions,
        runtime: UnitRuntime,
        *,
        global_id: int | None = None,
    ) -> None:
        """`global_id`: of the unit that this one is a copy of."""
        self.runtime = runtime
        self.unit_name = UnitName(type(modules[0]).__name__)
        self.global_id = runtime.communicator.log_of(axis).next_unit_id() if global_id is None else global_id
        self.axis = axis
        self.options = options
        self.parameters = parameters
        self.groups: list[ParamGroup] = []
        self.place = UnitModules(modules)
        self.progress = ForwardProgress()
        self.exposure = Exposure()
        self.checks = PendingChecks()
        self.pending: PendingReduction | None = None  # from `finalize_backward(async_op=True)` to `wait()`
        self.record = runtime.register(self)
        self.rebuild_groups([parameter.local for parameter in parameters])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"unit '{self.name}' was about to be copied or pickled by itself: copy or pickle the module that fully_shard was "
            "called on, or the FullyShardedDataParallel around it, as a whole"
        )

    # --- identity ---

    @property
    def number(self) -> int:
        """What this rank's runtime knows it by."""
        return self.record.number

    @property
    def name(self) -> str:
        """Its qualified name in the outermost module that it ran below, else the class of its first module."""
        return self.unit_name.name

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that `fully_shard` was called on, as far as they are alive."""
        return list(self.place)

    @property
    def residency(self) -> Residency:
        """Where its data is."""
        return self.record.residency

    def setup_collectives(self, doing: str, *, shards: bool = True) -> SetupCollectives:
        """What the ranks say to each other in a call about the unit that is neither forward nor backward."""
        return SetupCollectives(
            self.runtime.communicator, self.axis, self.unit_name, doing, f"{self.global_id} {doing}", shards=shards
        )

    def log_write(self, action: str) -> None:
        """The caller did this to the unit's shards, as all ranks must."""
        logs = {group.fingerprints.log: group.fingerprints for group in reversed(self.groups)}
        for log, fingerprints in logs.items():
            self.runtime.log_write(log, fingerprints[action])

    # --- options and groups ---

    def configure(self, **changes: object) -> None:
        """Change options from now on."""
        self.options = replace(self.options, **changes)  # type: ignore[arg-type]
        self._update_record()

    def _update_record(self) -> None:
        self.record.configure(self.options, nbytes=sum(group.full_nbytes for group in self.groups))

    def rebuild_groups(self, values: Sequence[Tensor], unwritten: Container[int] = ()) -> None:
        """Put `values` (one local shard per parameter) into groups of their own kind.

        unwritten: ids of parameters whose values are fresh memory.
        """
        dtypes = [
            self.options.mp.resolve(value.dtype, parameter.grad_dtype, keeps_dtype=parameter.keeps_dtype)
            for parameter, value in zip(self.parameters, values)
        ]
        groups: list[ParamGroup] = []
        with torch.inference_mode(False), torch.no_grad():
            for shared, members in group_parameters(self.parameters, values, dtypes):
                parameters = [self.parameters[i] for i in members]
                subject = f"{self.global_id}.{len(groups)} {[(p.name, tuple(p.shape)) for p in parameters]} {shared}"
                axis = parameters[0].sharding.axis
                collectives = self.runtime.communicator.collectives.of_axis(axis, self.options)
                # Custom collectives work in memory of their own, so everything is packed there.
                packed = max(collectives.gather.direct_min_bytes, collectives.reduce.direct_min_bytes)
                log = self.runtime.communicator.log_of(axis)
                log.allow_message_size(_WIDEST * sum(parameter.shape.numel() for parameter in parameters))
                groups.append(
                    group_class(values[members[0]])(
                        parameters,
                        [values[i] for i in members],
                        dtypes=shared,
                        collectives=collectives,
                        storage=self._storage(packed),
                        fingerprints=GroupFingerprints(log, self.unit_name, subject),
                        unwritten=unwritten,
                    )
                )
        for group in groups:
            group.keep_memory(self.options.keep_memory)
        self.groups, self.checks.gathers = groups, True
        self.runtime.update_timeouts()
        for group in groups:
            check = StepCheck(self, group)
            for parameter in group.parameters:
                parameter.before_step, parameter.unit_name = check, self.unit_name
        self._update_record()

    def keep_memory(self, keep: bool) -> None:
        """Keep the memory of full parameters and messages when they are freed, or give it back: at once if they are."""
        self.configure(keep_memory=keep)
        for group in self.groups:
            group.keep_memory(keep)
            if not keep and self.residency is Residency.SHARDED:
                group.free_unsharded()

    def _storage(self, packed: float) -> Storage:
        """Where a group's memory is. `packed`: the size in bytes below which its collectives want parameters packed."""
        options, offload = self.options, self.options.offload
        host = isinstance(offload, CPUOffloadPolicy)
        pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory
        if pinned and self.axis.device.type == "cpu":
            warn_once("CPUOffloadPolicy(pin_memory=True): host memory is not pinned, since the mesh computes on the CPU")
            pinned = False
        told = options.comm.direct_min_bytes
        return Storage(
            device=self.axis.device,
            host=host,
            pinned=pinned,
            direct=DirectRule.by_default(packed) if told is None or packed == float("inf") else DirectRule(told),
            poison=options.checks.poison,
            mp=options.mp,
        )

    def decide_gathers(self) -> None:
        """Before the first gather: which parameters gather themselves, since the caller may have told the shards only now.

        Raises StateError for one that can be gathered in no way.
        """
        for parameter in self.parameters:
            check_extension(parameter)
        changed = [parameter for parameter in self.parameters if parameter.has_new_grad_dtype(parameter.sharded)]
        for parameter in changed:
            parameter.adopt_grad_dtype(parameter.sharded)
        if changed or any(
            travels_alone(parameter.local) is not group.extension for group in self.groups for parameter in group.parameters
        ):
            self.rebuild_groups([parameter.local for parameter in self.parameters])
        self.checks.gathers = False

    def drop(self, gone: Sequence[ShardedParameter]) -> None:
        """Be without these parameters."""
        ids = {id(parameter) for parameter in gone}
        self.parameters = [parameter for parameter in self.parameters if id(parameter) not in ids]
        self.rebuild_groups([parameter.local for parameter in self.parameters])

    # --- its data ---

    @property
    def stale(self) -> bool:
        """Whether the shards were written since they were gathered."""
        return any(group.stale for group in self.groups)

    def is_current(self) -> bool:
        """Whether all slots hold what was put there."""
        for group in self.groups:
            if not group.is_current():
                return False
        return True

    def owns_memory_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in memory that goes with the full parameters."""
        for group in self.groups:
            if group.owns_memory_of(tensor):
                return True
        return False

    def changes(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether `fn`, as given to `Module._apply`, changes the dtype or device of what the unit has."""
        samples = [group.shard[:0] for group in self.groups]
        changed = [fn(sample) for sample in samples]
        return any((new.dtype, new.device) != (old.dtype, old.device) for new, old in zip(changed, samples))

    @property
    def shows_full(self) -> bool:
        """Whether slots hold full parameters, so that walking the modules does not find the sharded ones."""
        return self.exposure.plain or any(group.installed for group in self.groups)

    def show_kept_gradients(self) -> None:
        """Show the gradients that backwards kept as `.grad` of full parameters that are installed."""
        for group in self.groups:
            if group.installed:
                group.grads.show()

    def expose(self) -> None:
        """The caller may write to the full parameters from now on."""
        self.exposure.writable = True
        for parameter in self.parameters:
            parameter.note_version()

    def check_unmodified(self) -> None:
        """The full parameters are about to go. Raises StateError, naming it, if the caller wrote to one."""
        if self.exposure.writable:
            self.exposure.writable = False
            for parameter in self.parameters:
                parameter.check_unwritten()


def refuse_inside_full_params(unit: Unit, *, doing: str) -> None:
    """Raises StateError while the unit's slots show plain parameters."""
    if unit.exposure.plain:
        raise StateError(f"{doing} was called inside full_params() of unit '{unit.name}': call it before or after the block")


def name_units_in(module: nn.Module, *, place: bool = False) -> None:
    """Give units below a module the names that it knows them by; a module around it renames them. `place`: also their paths."""
    for name, inner in module.named_modules():
        unit = unit_of(inner)
        if unit is not None and name:
            unit.unit_name.name = clean_name(name) or unit.name
            if place:
                unit.place.record_path(module, name)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module is (one of) the root(s) of."""
    return module.__dict__.get(UNIT)


def owner_of(parameter: ShardedParameter) -> Unit | None:
    """The unit that gathers a parameter."""
    check = parameter.before_step
    return check.unit if isinstance(check, StepCheck) else None


def attach(unit: Unit) -> None:
    """Hand the modules of a unit their strong reference to it."""
    for module in unit.modules:
        module.__dict__[UNIT] = unit


def detach(module: nn.Module) -> None:
    """The opposite, for one module."""
    module.__dict__.pop(UNIT, None)


def own_modules(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and the modules below it, without other units."""
    yield root
    for child in root.children():
        if unit_of(child) is None:
            yield from own_modules(child)


class StepCheck:
    """Asked by optimizers before they step: one per group, shared by its parameters. It does not keep the unit alive."""

    __slots__ = ("_group", "_unit")

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self._unit, self._group = weakref.ref(unit), weakref.ref(group)

    @property
    def unit(self) -> Unit | None:
        """None once it is deleted."""
        return self._unit()

    @property
    def group(self) -> ParamGroup | None:
        """None once it is deleted."""
        return self._group()

    def __call__(self) -> None:
        """Raises StateError if the shards may not be written now."""
        unit, group = self._unit(), self._group()
        if unit is not None and group is not None:
            unit.runtime.check_step(unit, group)

    def wait_for_readers(self) -> None:
        """Have the host wait until no copy to the device reads the shards in its memory."""
        group = self._group()
        if group is not None:
            group.synchronize_host()

    def note_write(self, parameter: ShardedParameter, action: str) -> None:
        """The caller did this to the shard of a parameter, as all ranks must."""
        unit = self._unit()
        if unit is not None:
            subject = f"{unit.global_id} {parameter.name} {action}"
            fingerprint = Fingerprint(unit.unit_name, f"{action} of '{parameter.name}'", subject)
            unit.runtime.log_write(unit.runtime.communicator.log_of(parameter.sharding.axis), fingerprint)


__all__ = [
    "Exposure",
    "InterruptMark",
    "PendingChecks",
    "PendingReduction",
    "StepCheck",
    "Unit",
    "UnitRuntime",
    "attach",
    "detach",
    "name_units_in",
    "own_modules",
    "owner_of",
    "refuse_inside_full_params",
    "unit_of",
]
