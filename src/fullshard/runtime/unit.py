"""One fully_shard call: its modules, parameters and groups, and where it is in its forwards."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.consistency.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName
from fullshard.errors import StateError, warn_once
from fullshard.params.extension import check_extension, travels_alone
from fullshard.params.group import ParamGroup, group_class, group_parameters
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.uninitialized import UninitializedTensors
from fullshard.params.unsharded import Storage
from fullshard.policies import CPUOffloadPolicy, LintWarning
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.setup_collectives import SetupCollectives
from fullshard.schedule.order import CallsPerRun, ForwardCall
from fullshard.schedule.planner import Planner
from fullshard.schedule.residency import ReshardPolicy, Residency
from fullshard.sharding.mesh import ShardAxis
from fullshard.sharding.module_tree import clean_name

_UNIT = "_fullshard_unit"
_WIDEST = 16  # bytes of an element, in whichever dtype it travels
_LATE = "_fullshard_late"  # on a full parameter: the handle of its LateGradHook


class UnitRuntime(Protocol):
    """Who moves a unit and hears from its hooks: the runtime.

    interrupted: an interrupt came in the midst of what it does.
    """

    interrupted: bool

    @property
    def planner(self) -> Planner: ...

    @property
    def communicator(self) -> Communicator: ...

    def register(self, unit: Unit) -> int:
        """Its number."""
        ...

    def update_timeouts(self) -> None:
        """What units were told about checks may have changed."""
        ...

    def enter_backward(self, unit: Unit, call: ForwardCall, *, copied_use: bool = False) -> None: ...

    def enter_late(self, unit: Unit) -> None: ...

    def check_step(self, unit: Unit) -> None: ...

    def log_write(self, ledger: CollectiveLog, kind: Fingerprint) -> None:
        """The caller wrote to shards, as all ranks of the ledger must."""
        ...


class Unit:
    """One fully_shard call. unit 1 - n modules, unit 1 - n groups, group 1 - n parameters.

    Strong references point down only: module -> unit -> group -> parameter. Its keeper knows units weakly.
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
        self.decided = False  # whether it is known how each parameter is gathered
        self._modules = [weakref.ref(module) for module in modules]
        self.lint_due = True  # whether to look for parameters that nobody reduces before the next forward
        self.linted = False  # whether remarks were made about the model it is the outermost unit of
        self.hooks: list[tuple[weakref.ref[nn.Module], Any]] = []  # of the hooks, and the modules that have them
        self._left: set[int] = set()  # modules (by id) that this round of forwards has yet to run
        self._round = CallsPerRun()
        self._path: list[tuple[weakref.ref[nn.Module], str]] = []  # from the outermost module to it: parent, name
        self._open: list[tuple[int, int]] = []  # modules (by id) whose forward is under way, and when it began
        self.unwritten: UninitializedTensors | None = None
        self._explicit_prefetch: dict[str, tuple[int, ...]] = {}
        self._resident_depth = 0  # resident() blocks it is in
        self._last_run_order: tuple[
            tuple[int, bool], ...
        ] = ()  # units that its last forward entered (True) and left, itself included
        self._traced_from = 0
        self._live_graphs = 0
        self.output_has_graph: bool | None = None  # whether its last forward had an output with a graph
        self.shows_plain = False  # full_params() has plain Parameters in its slots
        self._lent = False  # full parameters were handed to the caller
        self._methods = 0  # calls of registered methods under way
        self._named_below = False
        self.number = runtime.register(self)
        self.check = StepCheck(self)
        self.rebuild_groups([parameter.local for parameter in parameters])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"unit '{self.name}' was about to be copied or pickled by itself: copy or pickle the module that fully_shard was "
            "called on, or the FullyShardedDataParallel around it, as a whole"
        )

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def name(self) -> str:
        return self.unit_name.name

    def setup_collectives(self, doing: str, *, shards: bool = True) -> SetupCollectives:
        """What the ranks say to each other in a call about it that is neither forward nor backward."""
        return SetupCollectives(
            self.runtime.communicator, self.axis, self.unit_name, doing, f"{self.global_id} {doing}", shards=shards
        )

    @property
    def tree(self) -> nn.Module | None:
        """The outermost module that it ran below so far, or its own; None once that is deleted."""
        if self._path:
            return self._path[0][0]()
        return self._modules[0]()

    @property
    def residency(self) -> Residency:
        return self.runtime.planner.residency(self.number)

    @property
    def stale(self) -> bool:
        return any(group.stale for group in self.groups)

    def configure(self, **changes: object) -> None:
        """Change options from now on."""
        self.options = replace(self.options, **changes)  # type: ignore[arg-type]
        self._update_planner()

    def _update_planner(self) -> None:
        options = self.options
        self.runtime.planner.configure(
            self.number,
            keep=options.reshard_policy,
            keep_after_backward=options.keep_after_backward,
            in_backward=options.in_backward,
            nbytes=sum(group.full_nbytes for group in self.groups),
            budget=options.comm.prefetch_bytes,
        )

    def rebuild_groups(self, values: Sequence[Tensor]) -> None:
        """Put `values` (one local shard per parameter) into groups of their own kind."""
        options = self.options
        offload = options.offload
        host = isinstance(offload, CPUOffloadPolicy)
        pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self._can_pin()
        dtypes = [options.mp.resolve(value.dtype) for value in values]
        groups: list[ParamGroup] = []
        with torch.inference_mode(False), torch.no_grad():
            for shared, members in group_parameters(self.parameters, values, dtypes):
                carriers = self.runtime.communicator.carriers(self.parameters[members[0]].sharding.axis, options)
                direct = options.comm.direct_min_bytes
                # Custom collectives work in memory of their own, so everything is packed there.
                packed = max(carriers.gather.direct_min_bytes, carriers.reduce.direct_min_bytes)
                direct = packed if direct is None or packed == float("inf") else direct
                storage = Storage(
                    device=self.axis.device,
                    host=host,
                    pinned=pinned,
                    direct_min_bytes=direct,
                    poison=options.checks.poison,
                    mp=options.mp,
                )
                parameters = [self.parameters[i] for i in members]
                subject = f"{self.global_id}.{len(groups)} {[(p.name, tuple(p.shape)) for p in parameters]} {shared}"
                ledger = self.runtime.communicator.log_of(parameters[0].sharding.axis)
                ledger.allow_message_size(_WIDEST * sum(parameter.shape.numel() for parameter in parameters))
                line = GroupFingerprints(ledger, self.unit_name, subject)
                own = [values[i] for i in members]
                groups.append(
                    group_class(own[0])(parameters, own, dtypes=shared, collectives=carriers, storage=storage, fingerprints=line)
                )
        self.groups, self.decided = groups, False
        self.runtime.update_timeouts()
        for parameter in self.parameters:
            parameter.before_step, parameter.unit_name = self.check, self.unit_name
        self._update_planner()

    def decide(self) -> None:
        """Before the first gather: which parameters gather themselves, since the caller may have told the shards only now.

        Raises StateError for one that can be gathered in no way.
        """
        for parameter in self.parameters:
            check_extension(parameter)
        if any(
            travels_alone(parameter.local) is not group.extension for group in self.groups for parameter in group.parameters
        ):
            self.rebuild_groups([parameter.local for parameter in self.parameters])
        self.decided = True

    def drop(self, gone: Sequence[ShardedParameter]) -> None:
        """Be without these parameters."""
        ids = {id(parameter) for parameter in gone}
        self.parameters = [parameter for parameter in self.parameters if id(parameter) not in ids]
        self.rebuild_groups([parameter.local for parameter in self.parameters])

    def _can_pin(self) -> bool:
        if self.axis.device.type != "cpu":
            return True
        warn_once("CPUOffloadPolicy(pin_memory=True): host memory is not pinned, since the mesh computes on the CPU")
        return False

    def is_current(self) -> bool:
        """Whether all slots hold what we put there."""
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

    def check_hidden(self, output: Any) -> None:
        """No tensor with a graph was found in `output`: say so if a graph leads to the parameters all the same.

        Whether it does depends on what else is alive on this rank, so nothing that is sent may follow from it.
        """
        if not torch.is_grad_enabled() or self._live_graphs or _torch.current_graph_task() != -1:
            return  # it may be an older one, whose backward announces itself or did
        for parameter in self.parameters:
            full = parameter.full
            if full is not None and full.requires_grad and _torch.is_in_graph(full):
                self.hook_late_grads()
                if "hidden" not in self.options.checks.silence:
                    if self.options.reshard_policy is ReshardPolicy.ALWAYS:
                        why, otherwise = "is right only if no other backward comes first, which frees the parameters", ""
                    else:
                        why = "cannot be gathered for"
                        otherwise = ", or keep the parameters with reshard_after_forward=False"
                    warn_once(
                        f"the forward of unit '{self.name}' returned a {type(output).__name__} in which no tensor with a graph "
                        f"is found, but a graph leads to its parameter '{parameter.name}' all the same: a backward through it "
                        f"{why}. Return the tensor itself, or in a list, dict, dataclass or attribute{otherwise}",
                        LintWarning,
                    )
                return

    def hook_late_grads(self) -> None:
        """Have gradients announce themselves that arrive in a second backward, through the graph of the first one."""
        for parameter in self.parameters:
            full = parameter.full
            if full is not None and full.requires_grad and _LATE not in full.__dict__:
                full.__dict__[_LATE] = full.register_post_accumulate_grad_hook(LateGradHook(self))

    @property
    def is_list(self) -> bool:
        return len(self._modules) > 1

    def start_list_calls(self) -> None:
        """The first module of the unit begins its forward; the round ends when every module has run."""
        self._left = {id(module) for module in self.modules}

    def module_finished(self, module: nn.Module, run: int) -> bool:
        """A module of the unit ended its forward; True if it was the last of the round.

        Of a module that is called once per chunk, the round lasts as many calls as the last run (an outermost forward) had.
        """
        self._left.discard(id(module))
        return self._round.is_last(run) and not self._left

    def log_write(self, action: str) -> None:
        """The caller did this to its shards, as all ranks must."""
        lines = {group.fingerprints.log: group.fingerprints for group in reversed(self.groups)}
        for ledger, line in lines.items():
            self.runtime.log_write(ledger, line[action])

    def request_lint(self, due: bool) -> None:
        """Whether to look at its modules before its next forward."""
        self.lint_due = due

    def finish_lint(self) -> None:
        self.linted = True

    def begin_recording(self, at: int) -> None:
        """Its forward begins at this place of the runtime's trace."""
        self._traced_from = at

    def save_run_order(self, trace: Sequence[tuple[int, bool]]) -> None:
        """Its forward ended well, at the end of the runtime's trace."""
        self._last_run_order = tuple(trace[self._traced_from :])

    def count_graph(self, more: int) -> None:
        """One more graph with an output of the unit exists, or one less; whether its backward has been does not matter."""
        self._live_graphs += more

    def note_output_graph(self, output_has_graph: bool) -> None:
        """Whether the forward that just ended will announce its backward."""
        self.output_has_graph = output_has_graph

    @property
    def script(self) -> Sequence[tuple[int, bool]]:
        """Which units run within it, and in which order: as the last time it ran on this rank, else as they are registered."""
        if self._last_run_order:
            return self._last_run_order
        found: list[tuple[int, bool]] = []

        def walk(module: nn.Module) -> None:
            unit = unit_of(module)
            if unit is not None:
                found.append((unit.number, True))
            for child in module.children():
                walk(child)
            if unit is not None:
                found.append((unit.number, False))

        for module in self.modules:
            walk(module)
        return found

    def push_forward(self, module: nn.Module, clock: int) -> None:
        """A module of the unit began its forward."""
        self._open.append((id(module), clock))

    def pop_forward(self, module: nn.Module) -> int:
        """A module of the unit ended its forward; when that began. What began inside and never ended goes with it."""
        at, key = len(self._open) - 1, id(module)
        while at >= 0 and self._open[at][0] != key:
            at -= 1
        if at < 0:
            return -1
        began = self._open[at][1]
        del self._open[at:]
        return began

    def runs_around(self, module: nn.Module) -> bool:
        """Whether another module of the unit runs around this one."""
        return any(key != id(module) for key, _ in self._open)

    def reset_call_counts(self) -> None:
        self._round = CallsPerRun()

    def clear_forward_stack(self) -> None:
        self._open.clear()

    def track_hook(self, module: nn.Module, handle: Any) -> None:
        """Remember a hook that was put on `module`."""
        self.hooks.append((weakref.ref(module), handle))

    def take_hooks(self) -> list[tuple[weakref.ref[nn.Module], Any]]:
        handles, self.hooks = self.hooks, []
        return handles

    @property
    def runs_method(self) -> bool:
        """Whether a method that was registered beside forward is on the stack."""
        return self._methods > 0

    @contextmanager
    def in_method(self) -> Iterator[None]:
        self._methods += 1
        try:
            yield
        finally:
            self._methods -= 1

    def set_prefetch(self, **listed: tuple[int, ...]) -> None:
        """`forward=`, `backward=`: the numbers of units to gather ahead while this one computes."""
        self._explicit_prefetch = {**self._explicit_prefetch, **listed}
        self.runtime.planner.set_prefetch(
            self.number, forward=self._explicit_prefetch.get("forward"), backward=self._explicit_prefetch.get("backward")
        )

    def count_resident_block(self, resident: bool) -> bool:
        """Count the blocks it is resident for; whether this one is the outermost."""
        self._resident_depth += 1 if resident else -1
        return self._resident_depth == (1 if resident else 0)

    def expose(self) -> None:
        """The caller may write to the full parameters from now on."""
        self._lent = True
        for parameter in self.parameters:
            parameter.note_version()

    def check_unmodified(self) -> None:
        """The full parameters are about to go. Raises StateError, naming it, if the caller wrote to one."""
        if self._lent:
            self._lent = False
            for parameter in self.parameters:
                parameter.check_unwritten()

    def forget_exposed(self) -> None:
        self._lent = False

    def set_plain_shown(self, shown: bool) -> None:
        """Whether the slots show plain full Parameters, for the length of a block."""
        self.shows_plain = shown

    def set_name(self, name: str) -> None:
        self.unit_name.name = name

    @property
    def shows_full(self) -> bool:
        """Whether slots hold full parameters, so that walking the modules does not find the sharded ones."""
        return self.shows_plain or any(group.installed for group in self.groups)

    def changes(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether `fn`, as given to `Module._apply`, changes the dtype or device of what the unit has."""
        samples = [group.shard[:0] for group in self.groups]
        changed = [fn(sample) for sample in samples]
        return any((new.dtype, new.device) != (old.dtype, old.device) for new, old in zip(changed, samples))

    # --- memory that nobody has written yet ---

    def on_meta(self) -> UninitializedTensors:
        """What of the unit has no memory yet."""
        own = [inner for module in self.modules for inner in own_modules(module)]
        return UninitializedTensors(
            [parameter for parameter in self.parameters if parameter.local.device.type == "meta"],
            [
                (weakref.ref(module), name)
                for module in own
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.device.type == "meta"
            ],
        )

    def mark_unwritten(self, fresh: UninitializedTensors) -> None:
        """These have memory now, and no values: the next forward raises if that is still so."""
        with torch.no_grad():
            fresh.mark()
        self.unwritten = fresh

    def check_written(self) -> None:
        """Raises StateError if what `to_empty` allocated was never written, naming it."""
        if self.unwritten is None:
            return
        left = self.unwritten.remaining()
        if left:
            raise StateError(
                f"unit '{self.name}': to_empty() allocated {', '.join(left)}, and nothing has written "
                f"{'it' if len(left) == 1 else 'them'}: call reset_parameters(), load_state_dict() or fullshard.materialize() "
                "before the first forward"
            )
        soft = self.unwritten.remaining(persistent=False)
        if soft:
            warnings.warn(
                f"unit '{self.name}': to_empty() allocated {', '.join(soft)}, and nothing has written "
                f"{'it' if len(soft) == 1 else 'them'} before the first forward. No state dict holds such "
                "buffers: compute them anew after to_empty(), in reset_parameters() or by hand, or call materialize() "
                "instead of to_empty(). If the forward itself fills them, this is no mistake",
                stacklevel=2,
            )
        self.unwritten = None

    def assign_names(self, module: nn.Module) -> None:
        """Units learn their places, and their qualified names once more, when the module above them first runs."""
        if not self._named_below:
            self._named_below = True
            for name, unit in _units_in(module):
                unit.set_name(clean_name(name) or unit.name)
                unit.record_path(module, name)

    def record_path(self, root: nn.Module, path: str) -> None:
        """Remember where the unit is in the model."""
        self._path = []
        for part in path.split("."):
            self._path.append((weakref.ref(root), part))
            child = _torch.children_of(root)[part]
            assert child is not None
            root = child

    def is_still_attached(self) -> bool:
        """Whether the unit is where it was in the model, as far as is known. Unlike its life, that is alike on all ranks."""
        path = self._path
        for index, (ref, part) in enumerate(path):
            parent = ref()
            child = None if parent is None else _torch.children_of(parent).get(part)
            last = index + 1 == len(path)
            if child is None or (unit_of(child) is not self if last else child is not path[index + 1][0]()):
                return False
        return True


def name_units_in(module: nn.Module) -> None:
    """Units below a module have the names that it knows them by; a module around it renames them."""
    for name, unit in _units_in(module):
        unit.set_name(clean_name(name) or unit.name)


def _units_in(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    for name, inner in module.named_modules():
        unit = unit_of(inner)
        if unit is not None and name:
            yield name, unit


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module is (one of) the root(s) of."""
    return module.__dict__.get(_UNIT)


def owner_of(parameter: ShardedParameter) -> Unit | None:
    """The unit that gathers a parameter."""
    check = parameter.before_step
    return check.unit if isinstance(check, StepCheck) else None


def attach(unit: Unit) -> None:
    """Hand the modules of a unit their strong reference to it."""
    for module in unit.modules:
        module.__dict__[_UNIT] = unit


def detach(module: nn.Module) -> None:
    """The opposite, for one module."""
    module.__dict__.pop(_UNIT, None)


def own_modules(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and the modules below it, without other units."""
    yield root
    for child in root.children():
        if unit_of(child) is None:
            yield from own_modules(child)


class StepCheck:
    """Asked by optimizers before they step: one per unit, shared by its parameters, which it does not keep alive."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    @property
    def unit(self) -> Unit | None:
        return self._unit()

    def __call__(self) -> None:
        unit = self._unit()
        if unit is not None:
            unit.runtime.check_step(unit)

    def note_write(self, parameter: ShardedParameter, action: str) -> None:
        unit = self._unit()
        if unit is not None:
            subject = f"{unit.global_id} {parameter.name} {action}"
            kind = Fingerprint(unit.unit_name, f"{action} of '{parameter.name}'", subject)
            unit.runtime.log_write(unit.runtime.communicator.log_of(parameter.sharding.axis), kind)


class LateGradHook:
    """On a full parameter that is in the graph of a backward: a gradient of second order arrived at it."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, _: Tensor) -> None:
        unit = self._unit()
        if unit is not None:
            unit.runtime.enter_late(unit)


__all__ = [
    "LateGradHook",
    "StepCheck",
    "Unit",
    "UnitRuntime",
    "attach",
    "detach",
    "name_units_in",
    "own_modules",
    "owner_of",
    "unit_of",
]
