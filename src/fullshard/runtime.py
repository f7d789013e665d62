"""Runs actions on lanes and remembers what is in flight: one runtime per device and per thread that shards."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from fullshard import _torch
from fullshard.comm import (
    AllGather,
    CustomCollectives,
    Delays,
    InFlight,
    Journal,
    Journaled,
    Lane,
    Pending,
    ReduceScatter,
    Ticket,
    lane_for,
)
from fullshard.full import Carriers, Storage
from fullshard.gloo import Tag, collectives_for
from fullshard.group import Group, group_parameters
from fullshard.heartbeat import Heartbeat
from fullshard.ledger import Entry, Label, Ledger, Line
from fullshard.mesh import ShardAxis, beside
from fullshard.modules import clean_name
from fullshard.parameter import ShardedParameter
from fullshard.policies import CheckPolicy, CommPolicy, CPUOffloadPolicy, LintWarning, MixedPrecisionPolicy, OffloadPolicy
from fullshard.reduction import ReduceOptions, Reduction
from fullshard.schedule import (
    Action,
    Call,
    Keep,
    Planner,
    Reduce,
    Reshard,
    Residency,
    Retain,
    Round,
    StateError,
    Unshard,
    Wait,
)
from fullshard.sync import broadcast, check_alike
from fullshard.unwritten import Unwritten
from fullshard.watch import Waiter, Watch, watch_of

_NO_OFFLOAD, _REDUCE = OffloadPolicy(), ReduceOptions()


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """What a unit was told, without None."""

    keep: Keep
    mp: MixedPrecisionPolicy
    comm: CommPolicy
    checks: CheckPolicy
    offload: OffloadPolicy = _NO_OFFLOAD
    retain: int | None = None  # ranks that keep one copy together between forward and backward
    reduce: ReduceOptions = _REDUCE
    sync: str = "check"
    buffers: str = "local"
    separate_reduce: bool = False  # reductions have a process group of their own
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    in_backward: bool = True
    sync_gradients: bool = True
    last_backward: bool = True
    keep_after_backward: bool = False


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
        *,
        ordinal: int | None = None,
    ) -> None:
        """`ordinal`: of the unit that this one is a copy of."""
        self.runtime = Runtime.of(axis.device, options.comm, options.checks)
        self.label = Label(type(modules[0]).__name__)
        self.ordinal = self.runtime.ledger(axis).enroll() if ordinal is None else ordinal
        self.axis = axis
        self.options = options
        self.parameters = parameters
        self.groups: list[Group] = []
        self._modules = [weakref.ref(module) for module in modules]
        self.due = True  # whether to look for parameters that nobody reduces before the next forward
        self.examined = False  # whether remarks were made about the model it is the outermost unit of
        self.handles: list[tuple[weakref.ref[nn.Module], Any]] = []  # of the hooks, and the modules that have them
        self._left: set[int] = set()  # modules (by id) that this round of forwards has yet to run
        self._round = Round()
        self._path: list[tuple[weakref.ref[nn.Module], str]] = []  # from the outermost module to it: parent, name
        self._open: list[tuple[int, int]] = []  # modules (by id) whose forward is under way, and when it began
        self.unwritten: Unwritten | None = None
        self._listed: dict[str, tuple[int, ...]] = {}
        self._residents = 0  # resident() blocks it is in
        self._script: tuple[tuple[int, bool], ...] = ()  # units that its last forward entered (True) and left, itself included
        self._traced_from = 0
        self._graphs = 0
        self.announces: bool | None = None  # whether its last forward had an output with a graph
        self.shown = False  # full_params() has plain Parameters in its slots
        self._methods = 0  # calls of registered methods under way
        self._named_below = False
        self.number = self.runtime.admit(self)
        self.check = StepCheck(self)
        self.regroup([parameter.local for parameter in parameters])

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def name(self) -> str:
        return self.label.name

    @property
    def residency(self) -> Residency:
        return self.runtime.planner.residency(self.number)

    @property
    def stale(self) -> bool:
        return any(group.stale for group in self.groups)

    def configure(self, **changes: object) -> None:
        """Change options from now on."""
        self.options = replace(self.options, **changes)  # type: ignore[arg-type]
        self._inform()

    def reconfigure(self, *, doing: str, **changes: object) -> None:
        """As `configure`, for what groups are made of: they are made anew. Raises StateError during forward or backward."""
        self.runtime.rest(self, doing=doing)
        self.runtime.check_delivered(self, doing=doing)
        self.runtime.carriers(self.axis, replace(self.options, **changes))  # type: ignore[arg-type]
        self.configure(**changes)
        self.runtime.renounce(self)
        self.regroup([parameter.local for parameter in self.parameters])

    def _inform(self) -> None:
        options = self.options
        self.runtime.planner.configure(
            self.number,
            keep=options.keep,
            keep_after_backward=options.keep_after_backward,
            in_backward=options.in_backward,
            nbytes=sum(group.full_nbytes for group in self.groups),
            budget=options.comm.prefetch_bytes,
        )

    def regroup(self, values: Sequence[Tensor]) -> None:
        """Put `values` (one local shard per parameter) into groups of their own kind."""
        options = self.options
        offload = options.offload
        host = isinstance(offload, CPUOffloadPolicy)
        pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self._can_pin()
        dtypes = [options.mp.resolve(value.dtype) for value in values]
        groups: list[Group] = []
        with torch.inference_mode(False), torch.no_grad():
            for shared, members in group_parameters(self.parameters, values, dtypes):
                carriers = self.runtime.carriers(self.parameters[members[0]].cut.axis, options)
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
                subject = f"{self.ordinal}.{len(groups)} {[(p.name, tuple(p.shape)) for p in parameters]} {shared}"
                line = Line(self.runtime.ledger(parameters[0].cut.axis), self.label, subject)
                groups.append(
                    Group(
                        parameters, [values[i] for i in members], dtypes=shared, carriers=carriers, storage=storage, line=line
                    )
                )
        self.groups = groups
        self.runtime.heed()
        for parameter in self.parameters:
            parameter.before_step, parameter.label = self.check, self.label
        self._inform()

    def _can_pin(self) -> bool:
        if self.axis.device.type != "cpu":
            return True
        say_once("CPUOffloadPolicy(pin_memory=True): host memory is not pinned, since the mesh computes on the CPU")
        return False

    def is_current(self) -> bool:
        """Whether all slots hold what we put there."""
        return all(group.is_current() for group in self.groups)

    def refresh(self) -> None:
        """Take over what callers changed behind our back: assigned Parameters, moved or cast tensors, trainability.

        Raises StateError, naming the parameter, for what cannot be honoured; nothing is changed then.
        """
        if self.is_current():
            return
        values = [parameter.incoming() for parameter in self.parameters]
        fits = all(
            value.dtype == parameter.local.dtype and value.device == parameter.local.device
            for parameter, value in zip(self.parameters, values)
        )
        if not fits and (_torch.current_graph_task() != -1 or self.runtime.planner.awaits_backward(self.number)):
            raise StateError(
                f"the parameters of unit '{self.name}' changed dtype or device between its forward and its backward: "
                "finish the step first"
            )
        if not fits:
            self.runtime.check_delivered(self, doing="a change of dtype or device")
        for parameter in self.parameters:
            parameter.restore_sharded()
        if not fits:
            self.runtime.renounce(self)
            return self.regroup(values)
        # Groups stay as they are when trainability changes: what travels must not depend on what one rank still holds.
        found = dict(zip(map(id, self.parameters), values))
        with torch.no_grad():
            for group in self.groups:
                group.absorb([found[id(parameter)] for parameter in group.parameters])

    def lends(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in memory that goes with the full parameters."""
        return any(group.lends(tensor) for group in self.groups)

    def check_hidden(self, output: Any) -> None:
        """No tensor with a graph was found in `output`: say so if a graph leads to the parameters all the same.

        Whether it does depends on what else is alive on this rank, so nothing that is sent may follow from it.
        """
        if not torch.is_grad_enabled() or self._graphs or _torch.current_graph_task() != -1:
            return  # it may be an older one, whose backward announces itself or did
        for parameter in self.parameters:
            full = parameter.full
            if full is not None and full.requires_grad and _torch.is_in_graph(full):
                self.watch_late()
                if "hidden" not in self.options.checks.silence:
                    say_once(
                        f"the forward of unit '{self.name}' returned a {type(output).__name__} in which no tensor with a graph "
                        f"is found, but a graph leads to its parameter '{parameter.name}' all the same: a backward through it "
                        "cannot be gathered for. Return the tensor itself, or in a list, dict, dataclass or attribute, or keep "
                        "the parameters with reshard_after_forward=False",
                        LintWarning,
                    )
                return

    def watch_late(self) -> None:
        """Have gradients announce themselves that arrive in a second backward, through the graph of the first one."""
        for parameter in self.parameters:
            full = parameter.full
            if full is not None and full.requires_grad and _LATE not in full.__dict__:
                full.__dict__[_LATE] = full.register_post_accumulate_grad_hook(LateHook(self))

    @property
    def is_list(self) -> bool:
        return len(self._modules) > 1

    def begin_round(self) -> None:
        """The first module of the unit begins its forward; the round ends when every module has run."""
        self._left = {id(module) for module in self.modules}

    def ran(self, module: nn.Module, run: int) -> bool:
        """A module of the unit ended its forward; True if it was the last of the round.

        Of a module that is called once per chunk, the round lasts as many calls as the last run (an outermost forward) had.
        """
        self._left.discard(id(module))
        return self._round.is_last(run) and not self._left

    def examine(self, due: bool) -> None:
        """Whether to look at its modules before its next forward."""
        self.due = due

    def end_examination(self) -> None:
        self.examined = True

    def trace(self, at: int) -> None:
        """Its forward begins at this place of the runtime's trace."""
        self._traced_from = at

    def learn(self, trace: Sequence[tuple[int, bool]]) -> None:
        """Its forward ended well, at the end of the runtime's trace."""
        self._script = tuple(trace[self._traced_from :])

    def count_graph(self, more: int) -> None:
        """One more graph with an output of the unit exists, or one less; whether its backward has been does not matter."""
        self._graphs += more

    def announced(self, announces: bool) -> None:
        """Whether the forward that just ended will announce its backward."""
        self.announces = announces

    @property
    def script(self) -> Sequence[tuple[int, bool]]:
        """Which units run within it, and in which order: as the last time it ran on this rank, else as they are registered."""
        if self._script:
            return self._script
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

    def entered(self, module: nn.Module, clock: int) -> None:
        """A module of the unit began its forward."""
        self._open.append((id(module), clock))

    def left(self, module: nn.Module) -> int:
        """A module of the unit ended its forward; when that began. What began inside and never ended goes with it."""
        at = max((i for i, (key, _) in enumerate(self._open) if key == id(module)), default=-1)
        if at < 0:
            return -1
        began = self._open[at][1]
        del self._open[at:]
        return began

    def is_inside(self, module: nn.Module) -> bool:
        """Whether another module of the unit runs around this one."""
        return any(key != id(module) for key, _ in self._open)

    def forget_rounds(self) -> None:
        self._round = Round()

    def forget_forwards(self) -> None:
        self._open.clear()

    def handle(self, module: nn.Module, handle: Any) -> None:
        """Remember a hook that was put on `module`."""
        self.handles.append((weakref.ref(module), handle))

    def take_handles(self) -> list[tuple[weakref.ref[nn.Module], Any]]:
        handles, self.handles = self.handles, []
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

    def follow(self, **listed: tuple[int, ...]) -> None:
        """`forward=`, `backward=`: the numbers of units to gather ahead while this one computes."""
        self._listed = {**self._listed, **listed}
        self.runtime.planner.follow(self.number, forward=self._listed.get("forward"), backward=self._listed.get("backward"))

    def reside(self, resident: bool) -> bool:
        """Count the blocks it is resident for; whether this one is the outermost."""
        self._residents += 1 if resident else -1
        return self._residents == (1 if resident else 0)

    def show(self, shown: bool) -> None:
        """Whether the slots show plain full Parameters, for the length of a block."""
        self.shown = shown

    def rename(self, name: str) -> None:
        self.label.name = name

    @property
    def shows_full(self) -> bool:
        """Whether slots hold full parameters, so that walking the modules does not find the sharded ones."""
        return self.shown or any(group.installed for group in self.groups)

    @property
    def undelivered(self) -> bool:
        """Whether gradients of the unit are on their way."""
        return self.runtime.is_undelivered(self)

    def changes(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether `fn`, as given to `Module._apply`, changes the dtype or device of what the unit has."""
        samples = [group.shard[:0] for group in self.groups]
        changed = [fn(sample) for sample in samples]
        return any((new.dtype, new.device) != (old.dtype, old.device) for new, old in zip(changed, samples))

    # --- memory that nobody has written yet ---

    def on_meta(self) -> Unwritten:
        """What of the unit has no memory yet."""
        own = [inner for module in self.modules for inner in own_modules(module)]
        return Unwritten(
            [parameter for parameter in self.parameters if parameter.local.device.type == "meta"],
            [
                (weakref.ref(module), name)
                for module in own
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.device.type == "meta"
            ],
        )

    def mark_unwritten(self, fresh: Unwritten) -> None:
        """These have memory now, and no values: the next forward raises if that is still so."""
        with torch.no_grad():
            fresh.mark()
        self.unwritten = fresh

    def check_written(self) -> None:
        """Raises StateError if what `to_empty` allocated was never written, naming it."""
        if self.unwritten is None:
            return
        left = self.unwritten.left()
        if left:
            raise StateError(
                f"unit '{self.name}': {', '.join(left)} were allocated by to_empty() and never written: give them values with "
                "reset_parameters(), load_state_dict() or fullshard.materialize()"
            )
        soft = self.unwritten.left(persistent=False)
        if soft:
            warnings.warn(
                f"unit '{self.name}': {', '.join(soft)} were allocated by to_empty() and not written before the first forward. "
                "No state dict holds them: they are NaN unless this forward fills them",
                stacklevel=2,
            )
        self.unwritten = None

    def give_up(self, gone: Sequence[ShardedParameter]) -> None:
        """Let other units have these parameters."""
        ids = {id(parameter) for parameter in gone}
        self.runtime.check_delivered(self, doing="fully_shard() of a module that shares a parameter with it")
        self.runtime.renounce(self)
        self.parameters = [parameter for parameter in self.parameters if id(parameter) not in ids]
        self.regroup([parameter.local for parameter in self.parameters])

    def name_below(self, module: nn.Module) -> None:
        """Units learn their qualified names when the module above them first runs."""
        if not self._named_below:
            self._named_below = True
            for name, inner in module.named_modules():
                unit = unit_of(inner)
                if unit is not None and name:
                    unit.rename(clean_name(name) or unit.name)
                    unit.locate(module, name)

    def locate(self, root: nn.Module, path: str) -> None:
        """Remember where the unit is in the model."""
        self._path = []
        for part in path.split("."):
            self._path.append((weakref.ref(root), part))
            child = _torch.children_of(root)[part]
            assert child is not None
            root = child

    def is_in_place(self) -> bool:
        """Whether the unit is where it was in the model, as far as is known. Unlike its life, that is alike on all ranks."""
        path = self._path
        for index, (ref, part) in enumerate(path):
            parent = ref()
            child = None if parent is None else _torch.children_of(parent).get(part)
            last = index + 1 == len(path)
            if child is None or (unit_of(child) is not self if last else child is not path[index + 1][0]()):
                return False
        return True


def _nothing() -> None:
    pass


_SAID: set[str] = set()


def say_once(text: str, category: type[Warning] = UserWarning) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, category, stacklevel=2)


_UNIT = "_fullshard_unit"
_NOBODY = Label("")
_LATE = "_fullshard_late"  # on a full parameter: the handle of its LateHook
_BOOKS: dict[str, Iterator[int]] = {}  # ledgers of equal names, which all ranks make in one order


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


class Sent:
    """A ticket of work in which other ranks take part: while it is waited for, the watch knows for what."""

    __slots__ = ("_entry", "_ledger", "_runtime", "ticket")

    def __init__(self, ticket: Ticket, runtime: Runtime, ledger: Ledger, entry: Entry) -> None:
        self.ticket, self._runtime, self._ledger, self._entry = ticket, runtime, ledger, entry

    def done(self) -> bool:
        return self.ticket.done()

    def wait(self) -> None:
        self._await(self.ticket.wait)

    def block(self) -> None:
        self._await(self.ticket.block)

    def _await(self, wait: Callable[[], None]) -> None:
        """Raises StateError if the work failed, or ended because the ranks parted."""
        ledger, waiter = self._ledger, self._runtime.waiter
        if waiter is None:
            return wait()
        before = waiter.enter(ledger, self._entry)
        try:
            wait()
        except Exception as failure:
            raise self._runtime.explained(failure, ledger, self._entry) from failure
        finally:
            waiter.leave(before)
        if ledger.verdict is not None:
            raise StateError(ledger.verdict)


class BackwardHook:
    """Rides on the graph of one call: tells the runtime when its backward begins, and that it never will when it is deleted."""

    __slots__ = ("__weakref__", "_call", "_glimpse", "_reached", "_task", "_unit")

    def __init__(self, unit: Unit, call: Call, *, glimpse: bool = False) -> None:
        self._unit, self._call, self._task, self._reached, self._glimpse = unit, call, -1, False, glimpse
        unit.runtime.planner.expect_backward(call)
        unit.count_graph(1)

    def __call__(self, *_: object) -> None:
        task = _torch.current_graph_task()
        if task != self._task:
            self._task = task
            self._unit.runtime.enter_backward(self._unit, self._call, glimpse=self._glimpse)
            self._forget()

    def __del__(self) -> None:
        self._unit.count_graph(-1)
        self._forget()

    def _forget(self) -> None:
        if not self._reached:
            self._reached = True
            self._unit.runtime.planner.forget(self._call)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A call in which other ranks compute and this one only takes part. alone: it was no part of another unit's forward.

    The unit goes by its number, so that what waits for a backward keeps no model alive.
    """

    unit: int
    call: Call
    alone: bool


class LateHook:
    """On a full parameter that is in the graph of a backward: a gradient of second order arrived at it."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, _: Tensor) -> None:
        unit = self._unit()
        if unit is not None:
            unit.runtime.enter_late(unit)


class BackwardEnd:
    """The engine's only reference to this object dies with the backward it was queued on, whether that ended or raised."""

    __slots__ = ("__weakref__", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self) -> None:
        self._runtime.leave_backward()


class Runtime:
    """runtime 1 - n units (held weakly), 1 - 1 planner, 1 - 1 journal; a lane for gathers, for reductions over shards, and
    for those over replicas.
    """

    _of_thread = threading.local()

    @classmethod
    def of(cls, device: torch.device, comm: CommPolicy, checks: CheckPolicy = CheckPolicy()) -> Runtime:
        """The runtime of this thread and device; policies that bring lanes of their own, or delays, have one of their own."""
        known: dict[tuple[torch.device, object, bool], Runtime] = cls._of_thread.__dict__.setdefault("runtimes", {})
        delayed = checks.poison and comm.lanes is None
        key = (device, comm.lanes, delayed)
        if key not in known:
            delays = Delays(dist.get_rank()) if delayed else None
            known[key] = cls(device, comm.lanes or (lane_for if delays is None else delays.lane), delays)
        return known[key]

    @classmethod
    def all_of_thread(cls) -> list[Runtime]:
        return list(cls._of_thread.__dict__.get("runtimes", {}).values())

    def __init__(self, device: torch.device, lanes: Callable[[torch.device], Lane], delays: Delays | None = None) -> None:
        self.device, self._delays = device, delays
        self.planner = Planner(self._may_expect)
        self.journal = Journal()
        self.tag = Tag()
        self.watch: Watch | None = None
        self.waiter: Waiter | None = None  # None as long as nobody else takes part in anything
        self._ledgers: dict[tuple[int, int], tuple[Ledger, tuple[object, object]]] = {}  # with the groups they are for
        self._gather_lane, self._reduce_lane, self._replicate_lane = lanes(device), lanes(device), lanes(device)
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._in_flight = InFlight()
        self._replicating = InFlight()
        self._forwards = 0  # outermost ones so far
        self._event: object = None  # of the caller, that the next forward is ordered behind
        self._gathering: dict[int, list[tuple[Group, Ticket]]] = {}
        self._backward: weakref.ref[BackwardEnd] | None = None
        self._reduced: list[tuple[Unit, Reduction]] = []  # since the last heartbeat
        self._beats: deque[tuple[Heartbeat, Sent]] = deque()  # that nobody has looked at
        # Those whose parameters have hooks land early, but never by polling: a hook may talk to other ranks.
        self._hooked: deque[Reduction] = deque()
        self._touched: dict[int, Unit] = {}  # units that entered the running backward
        self._trace: list[tuple[int, bool]] = []  # units that the outermost forward under way entered (True) and left
        self._joined: list[Joined] = []  # whose backward is to come; oldest first
        self._reached: set[int] = set()  # the outermost forwards that the running backward came to
        self._collectives: weakref.WeakValueDictionary[tuple[int, str], Journaled] = weakref.WeakValueDictionary()
        self._run: dict[type[Action], Callable[[Unit], None]] = {
            Unshard: self._unshard,
            Wait: self._wait,
            Retain: self._retain,
            Reshard: self._reshard,
            Reduce: self._reduce,
        }

    # --- what is said to other ranks ---

    def ledger(self, axis: ShardAxis) -> Ledger:
        """What is said on an axis, one as long as the runtime lives."""
        groups = (axis.group, None if axis.replicas is None else axis.replicas.group)
        known = self._ledgers.get(axis.key)
        if known is not None and all(one is other for one, other in zip(known[1], groups)):
            return known[0]
        ranks = axis.members
        name = f"{crc32(repr(ranks).encode()):08x} {tuple(axis.mesh.mesh.shape)}"
        if axis.group is not None and axis.replicas is None:
            name = f"{name} {_torch.group_name(axis.group)}"  # threads may make theirs in any order
        found = Ledger(f"{name} {next(_BOOKS.setdefault(name, itertools.count()))}", ranks, dist.get_rank())
        self._ledgers[axis.key] = found, groups
        group = groups[0] if groups[0] is not None else groups[1]
        if len(ranks) > 1 and group is not None:
            watch = watch_of(_torch.backend_name(group, axis.device))
            if watch is not None:
                if watch is not self.watch:  # also of a process group that was made anew
                    self.watch, self.waiter = watch, watch.waiter()
                    self.heed()
                watch.add(found)
        return found

    @property
    def ledgers(self) -> list[Ledger]:
        return [ledger for ledger, _ in self._ledgers.values()]

    def heed(self) -> None:
        """Of the units that there are, the shortest patience counts."""
        if self.waiter is not None:
            checks = [unit.options.checks for unit in self._units.values()]
            timeouts = [check.timeout for check in checks if check.timeout is not None]
            patience = min((check.patience for check in checks), default=1.0)
            self.waiter.configure(patience, min(timeouts, default=None))

    def explained(self, failure: BaseException, ledger: Ledger, entry: Entry) -> StateError:
        """What a failed collective was about, and where the other ranks are."""
        if ledger.verdict is not None:
            return StateError(ledger.verdict)
        where = "" if self.watch is None else self.watch.survey(ledger)
        text = f"rank {ledger.rank}, {entry}: {str(failure).splitlines()[0]}. {where}"
        return StateError(text if ledger.verdict is None else ledger.verdict)

    def _send(
        self,
        lane: Lane,
        line: Line,
        action: str,
        start: Callable[[], Pending],
        finish: Callable[[], None],
        after: Sent | None = None,
    ) -> Sent:
        """Run a collective on a lane and enter it in the ledger. Raises StateError if the ranks parted."""
        entry = line.note(action)
        tagged = partial(self._start, entry.tag, line.ledger.name, start)
        ticket = lane.run(tagged, finish) if after is None else lane.run(tagged, finish, after=after.ticket)
        return Sent(ticket, self, line.ledger, entry)

    def _start(self, tag: int, book: str, start: Callable[[], Pending]) -> Pending:
        self.tag.set(tag, book)
        return start()

    # --- units ---

    def admit(self, unit: Unit) -> int:
        number = next(self._numbers)
        self._units[number] = unit
        self.planner.admit(number, keep=unit.options.keep)
        weakref.finalize(unit, self._dismiss, number)
        return number

    def _may_expect(self, number: int) -> bool:
        unit = self._units.get(number)
        return unit is not None and unit.is_in_place()

    def dismiss(self, unit: Unit) -> None:
        """The unit was taken off its modules."""
        if self._units.pop(unit.number, None) is not None:
            self._dismiss(unit.number)

    def _dismiss(self, number: int) -> None:
        """A unit was deleted; what is still arriving for it keeps its memory until then."""
        if not self.planner.knows(number):
            return
        self.planner.dismiss(number)
        for group, ticket in self._gathering.pop(number, ()):
            self._in_flight.push(ticket, group.shrink)

    def carriers(self, axis: ShardAxis, options: UnitOptions) -> Carriers:
        """Who carries the messages of groups on `axis`. May make process groups, so it is collective over the axis.

        Raises ValueError for collectives of the caller's that do not fit.
        """
        gather = reduce = self._main_collectives(axis, options.comm)
        if options.separate_reduce and axis.group is not None and axis.ranks > 1:
            reduce = self._known(axis, "reduce", dist.get_process_group_ranks(axis.group), options.comm)
        if axis.group is not None:
            if options.all_gather is not None:
                custom = CustomCollectives(gather.inner, axis.group, options.all_gather)
                gather = Journaled(custom, self.journal, keeps=gather)
            if options.reduce_scatter is not None:
                custom = CustomCollectives(reduce.inner, axis.group, None, options.reduce_scatter)
                reduce = Journaled(custom, self.journal, keeps=reduce)
        replicate = retain = None
        if axis.replicas is not None:
            replicate = self._known(axis, "replicate", axis.replicas.group, options.comm)
        if options.retain is not None and axis.group is not None and axis.ranks % options.retain == 0:
            first = axis.rank - axis.rank % options.retain
            ranks = dist.get_process_group_ranks(axis.group)[first : first + options.retain]
            if len(ranks) < axis.ranks:
                retain = self._known(axis, f"retain {options.retain}", ranks, options.comm)
        return Carriers(gather, reduce, replicate, retain, self.journal)

    def _main_collectives(self, axis: ShardAxis, comm: CommPolicy) -> Journaled:
        found = self._known(axis, "shard" if axis.group is not None else "alone", axis.group, comm)
        if (found.ranks, found.rank) != (axis.ranks, axis.rank):
            raise ValueError(
                f"CommPolicy.collectives must give collectives of rank {axis.rank} of {axis.ranks}, as the mesh has it, "
                f"got rank {found.rank} of {found.ranks}"
            )
        return found

    def _known(self, axis: ShardAxis, role: str, group: dist.ProcessGroup | list[int] | None, comm: CommPolicy) -> Journaled:
        """Collectives of one process group of `axis` (or of a new one of these ranks), one object as long as it is used."""
        owner = axis.group if axis.group is not None or axis.replicas is None else axis.replicas.group
        made: dist.ProcessGroup | None
        if isinstance(group, list):
            assert axis.group is not None
            made = beside(axis.group, role, group)
        else:
            made = group
        if comm.collectives is not None and made is not None:
            given = comm.collectives(made)
            if isinstance(getattr(given, "tag", None), Tag):
                given.tag = self.tag
            return Journaled(given, self.journal)
        key = (id(owner), role if role != "replicate" or axis.replicas is None else f"replicate {id(axis.replicas.group)}")
        found = self._collectives.get(key)
        if found is None:
            found = Journaled(collectives_for(made, axis.device, self.tag), self.journal, keeps=owner)
            self._collectives[key] = found
        return found

    # --- events ---

    def enter_forward(self, unit: Unit, module: nn.Module) -> None:
        self._recover_if_stale()
        planner, number = self.planner, unit.number
        if _torch.in_transform():
            raise StateError(
                f"unit '{unit.name}' was called inside a transform of torch.func (grad, vjp, jvp, vmap, jacrev), which cannot "
                "gather: use torch.autograd.grad or fullshard.grad, or compute with the tensors of fullshard.gathered()"
            )
        if unit.shown:
            raise StateError(
                f"the forward of unit '{unit.name}' was called inside full_params(), which shows its parameters to read and "
                "write: call it outside, or keep the model gathered with resident()"
            )
        if (
            planner.outermost() == number
            and not unit.is_list
            and not unit.runs_method
            and not _torch.is_in_forward(module, outer=True)
        ):
            self._abandon()  # the forward before this one was interrupted in a way that runs no hooks
        if _torch.current_graph_task() != -1:
            first = self._begin_backward()
            self._touched[number] = unit
            self._execute(planner.before_recompute(number, stale=self._is_stale(unit, first)))
        elif not (unit.is_list and planner.running(number)):
            first = planner.outermost() is None
            self._forwards += first
            if unit.unwritten is not None:
                unit.refresh()
                unit.check_written()
                self._check_replicas(unit)
            if first and self._beats:
                self._read_beats(keep=len(self._beats))
            if first and self._event is not None:
                _torch.wait_for_event(self.device, self._event)
                self._event = None
            if first or unit.residency is Residency.FULL or not planner.is_ahead(number):
                self._refresh(unit)
            unit.begin_round()
            if first:
                unit.name_below(module)
                self._trace.clear()
            unit.trace(len(self._trace))
            self._trace.append((number, True))
            self._execute(planner.before_forward(number, stale=self._is_stale(unit, first)))
        unit.entered(module, planner.clock)
        for group in unit.groups:
            group.install()

    def _check_replicas(self, unit: Unit) -> None:
        """Of parameters that got their values after they were cut, ranks that hold the same rows must hold the same values."""
        if unit.options.sync == "off":
            return
        wrong: str | None = None
        axes: dict[int, tuple[ShardAxis, list[tuple[str, Tensor]]]] = {}
        for p in unit.parameters:
            name = f"parameter '{p.name}' of unit '{unit.name}'"
            axes.setdefault(id(p.cut.axis), (p.cut.axis, []))[1].append((name, p.local))
        for axis, shards in axes.values():
            groups = [] if axis.replicas is None else [axis.replicas.group]
            if unit.options.sync == "broadcast":
                broadcast([shard for _, shard in shards], axis, groups=groups)
            else:
                wrong = wrong or check_alike(shards, axis, groups=groups)
        if wrong is not None:
            raise StateError(
                f"{wrong}, which hold the same rows: initialise it from one seed on all replicas, as fullshard.materialize() "
                "does, load it, or pass sync='broadcast' to fully_shard"
            )

    def share_buffers(self, unit: Unit, root: nn.Module) -> None:
        """After a forward in training mode: have all ranks hold the mean of buffers, or those of the first rank.

        Buffers become new tensors: a graph may have saved the old ones.
        """
        if not root.training or _torch.current_graph_task() != -1:
            return
        axis, mean = unit.axis, unit.options.buffers == "mean"
        ranks = axis.ranks * axis.replicated
        first = axis.rank == 0 and (axis.replicas is None or axis.replicas.rank == 0)
        kinds: dict[torch.dtype, dict[int, Tensor]] = {}
        slots: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        for module in own_modules(root):
            for name, buffer in module.named_buffers(recurse=False):
                kinds.setdefault(buffer.dtype, {})[id(buffer)] = buffer
                slots.append((_torch.buffers_of(module), name, buffer))
        shared: dict[int, Tensor] = {}
        carriers = self.carriers(axis, unit.options)
        line = Line(self.ledger(axis), unit.label, f"{unit.ordinal} buffers")
        with torch.no_grad():
            for dtype, found in kinds.items():
                buffers = list(found.values())
                message = torch.cat([buffer.reshape(-1) for buffer in buffers])
                message = message.to(torch.uint8) if dtype is torch.bool else message
                averaged = mean and dtype.is_floating_point
                if not (averaged or first):
                    message.zero_()
                self._send(self._reduce_lane, line, "buffers", partial(carriers.reduce.all_reduce, message), _nothing).wait()
                if carriers.replicate is not None:
                    over = partial(carriers.replicate.all_reduce, message)
                    self._send(self._replicate_lane, line, "buffers", over, _nothing).wait()
                if averaged:
                    message.div_(ranks)
                for buffer, part in zip(buffers, message.split([buffer.numel() for buffer in buffers])):
                    shared[id(buffer)] = part.view(buffer.shape).to(dtype, copy=True)
        for held, name, buffer in slots:
            held[name] = shared[id(buffer)]

    def leave_forward(self, unit: Unit, module: nn.Module, *, failed: bool = False) -> Call | None:
        """The call that just ended, for a `BackwardHook`; None if it cannot have a backward."""
        planner, number = self.planner, unit.number
        grad = torch.is_grad_enabled()
        if _torch.current_graph_task() != -1:  # it stays full and installed until its own gradients are done
            unit.left(module)
            call = planner.after_recompute(number, grad=grad)
            return call if grad else None
        if not planner.running(number):
            return None  # it raised before it began
        if unit.is_list and (not unit.ran(module, self._forwards) or unit.is_inside(module)) and planner.outermost() != number:
            unit.left(module)
            return planner.interim(number)
        ended = planner.after_forward(number, grad=grad, since=unit.left(module))
        self._trace.append((number, False))
        if not failed and not ended.closed:
            unit.learn(self._trace)
        for inner in ended.closed:
            self._uninstall_number(inner)
        if not planner.running(number) and not planner.is_kept(number):
            self._uninstall(unit)
        self._execute(ended.actions)
        if grad and not unit.options.in_backward and unit.residency is Residency.SHARDED:
            for group in unit.groups:
                group.guard()
        self._poll()
        return ended.call if grad else None

    def enter_backward(self, unit: Unit, call: Call, *, glimpse: bool = False) -> None:
        """`glimpse`: of a call that used a copy of the parameters (`glimpse` made it)."""
        if not self.planner.knows(unit.number):
            raise StateError(
                f"unit '{unit.name}' was undone, or became one with another, between its forward and this backward: run the "
                "backward before undo() or fully_shard(), or the forward again"
            )
        self._recover_if_stale()
        first = self._begin_backward()
        self._touched[unit.number] = unit
        self._poll()
        self._reached.add(self.planner.run_of(call))
        if self._joined:
            self._join_backward(beyond=call.end)
        stale = not glimpse and self._is_stale(unit, first)
        again = torch.is_grad_enabled()  # create_graph=True: the graph of this backward needs the parameters, too
        with torch.no_grad():
            self._execute(self.planner.before_backward(call, stale=stale, glimpse=glimpse, again=again))
        if again and not glimpse:
            unit.watch_late()
        if unit.residency is Residency.FULL:
            for group in unit.groups:  # what is recomputed inside the unit runs without its hooks
                group.install()

    def enter_late(self, unit: Unit) -> None:
        """A gradient arrived in a backward that none of the unit's outputs announced."""
        if self.planner.knows(unit.number) and unit.number not in self._touched:
            self._begin_backward()
            self._touched[unit.number] = unit

    def leave_backward(self) -> None:
        """The outermost backward that touched a unit is over."""
        with torch.no_grad():
            if self._joined:
                self._join_backward(beyond=-1)
            self._backward = None
            self._reached.clear()
            self._execute(self.planner.after_backward())
            for _, unit in sorted(self._touched.items()):
                if not self.planner.is_kept(unit.number):
                    self._uninstall(unit)
                self._reduce_late(unit)
            self._touched.clear()
            self._collect()

    # --- taking part without computing ---

    def join(self, unit: Unit) -> Tensor:
        """Take part in what a forward of the unit sends, and later in backward. A zero whose backward is that one."""
        planner = self.planner
        self._recover_if_stale()
        script = [(self._units[number], enters) for number, enters in unit.script if number in self._units]
        lists = [inner.name for inner, _ in script if inner.is_list]
        if lists:
            raise StateError(
                f"join() of unit '{unit.name}': unit '{lists[0]}' has several modules, so how often they run cannot be known: "
                "shard them one by one"
            )
        if _torch.current_graph_task() != -1:
            raise StateError(f"join() of unit '{unit.name}' was called inside a backward: call it where the forward would be")
        grad = torch.is_grad_enabled()
        flows = planner.flows()  # whether its input would have a graph
        alone = planner.outermost() is None
        last: Joined | None = None
        for inner, enters in script:
            if enters:
                first = planner.outermost() is None
                self._forwards += first
                if inner.unwritten is not None:
                    inner.refresh()
                    inner.check_written()
                    self._check_replicas(inner)
                if first or inner.residency is Residency.FULL or not planner.is_ahead(inner.number):
                    self._refresh(inner)
                if first:
                    inner.name_below(inner.modules[0])
                self._execute(planner.before_forward(inner.number, stale=self._is_stale(inner, first)))
                continue
            ended = planner.after_forward(inner.number, grad=grad)
            self._execute(ended.actions)
            flows = flows or any(group.trainable for group in inner.groups)
            announces = flows if inner.announces is None else inner.announces
            if grad and announces:
                planner.expect_backward(ended.call)
                last = Joined(inner.number, ended.call, alone)
                self._joined.append(last)
            if inner.options.buffers != "local":
                self.share_buffers(inner, inner.modules[0])
        self._poll()
        if last is None:
            return torch.zeros((), device=self.device)
        zero = torch.zeros((), device=self.device, requires_grad=True).clone()
        assert zero.grad_fn is not None
        zero.grad_fn.register_prehook(partial(self._enter_joined, last.call))
        return zero

    def _enter_joined(self, call: Call, *_: object) -> None:
        """A backward begins in which this rank computes nothing, or nothing yet."""
        self._recover_if_stale()
        self._begin_backward()
        self._reached.add(self.planner.run_of(call))
        self._join_backward(beyond=call.end - 1)

    def _join_backward(self, *, beyond: int) -> None:
        """Take part in the backward of joined calls that ended after `beyond`, latest first, as ranks that computed do."""
        later: list[Joined] = []
        while self._joined and self._joined[-1].call.end > beyond:
            joined = self._joined.pop()
            unit, call = self._units.get(joined.unit), joined.call
            if unit is None or not self.planner.knows(unit.number) or not self.planner.recalls(call):
                self.planner.forget(call)  # its backward never came
            elif not self._is_joined_to(joined):
                later.append(joined)
            else:
                self.planner.forget(call)
                self._touched[unit.number] = unit
                with torch.no_grad():
                    self._execute(self.planner.before_backward(call, stale=self._is_stale(unit, False)))
        self._joined += reversed(later)

    def _is_joined_to(self, joined_call: Joined) -> bool:
        """Whether a joined call belongs to the running backward: that came to its outermost forward; or nothing but joined
        calls was in it, and the backward came to the one behind it, or, if there is none, to the one before.
        """
        planner, reached = self.planner, self._reached
        run = planner.run_of(joined_call.call)
        if not joined_call.alone:
            return run in reached
        joined = {planner.run_of(other.call) for other in self._joined if other.alone} | {run}
        found: int | None = run
        while found is not None and found in joined and found not in reached:
            found = planner.next_run(found)
        if found is None:
            found = run
            while found is not None and found in joined and found not in reached:
                found = planner.next_run(found, backwards=True)
        return found in reached

    # --- what callers ask for ---

    def hold(self, unit: Unit) -> None:
        """Start gathering for the caller."""
        self._refresh(unit)
        self._execute(self.planner.hold(unit.number, stale=unit.stale))

    def fulfil(self, unit: Unit) -> None:
        """Have the full parameters installed for the caller, gathered anew if they were freed or written since."""
        self.hold(unit)
        self._execute(self.planner.ready(unit.number))
        for group in unit.groups:
            group.install()
        for parameter in unit.parameters:
            parameter.note_version()

    def release(self, unit: Unit, *, doing: str = "reshard()") -> None:
        """Free the full parameters. Raises StateError while the unit's forward or backward needs them."""
        self.check_idle(unit, doing=doing)
        if unit.residency is Residency.FULL:
            for parameter in unit.parameters:
                parameter.check_unwritten()
        self._uninstall(unit)
        self._execute(self.planner.release(unit.number))
        for group in unit.groups:
            group.forget()
            group.block()

    def reside(self, unit: Unit, resident: bool) -> None:
        """Have the unit full until told otherwise, whatever forwards and backwards end."""
        if not unit.reside(resident):
            return
        if resident:
            self.check_idle(unit, doing="resident()")
            self.planner.reside(unit.number, True)
            self.fulfil(unit)
        else:
            self.planner.reside(unit.number, False)
            self.release(unit, doing="the end of resident()")

    def consult(self, unit: Unit) -> None:
        """The caller reads the shards: take over what was put in the slots, also of a unit that is unsharded by hand."""
        held = self.planner.is_held(unit.number)
        self._refresh(unit)
        unit.refresh()
        if held:
            self.fulfil(unit)

    def gather_copy(self, group: Group) -> list[Tensor]:
        """What modules compute with, gathered into memory of its own: one tensor per parameter (collective)."""
        with torch.no_grad():
            side = group.second_side()
            self._send(self._gather_lane, group.line, "gather by hand", side.start, side.finish).wait()
            side.settle()
        return group.lifted(side)

    def reduce_now(self, unit: Unit, group: Group) -> None:
        """Reduce what a group's parameters were given so far, for a caller that runs backwards piece by piece."""
        self.check_idle(unit, doing="post_backward()")
        if group.trainable:
            with torch.no_grad():
                self._reduce_group(unit, group, group.take_gradients() or [None] * len(group.parameters))
        if not unit.options.keep_after_backward:
            self.release(unit)

    def attend(self, unit: Unit, *, doing: str) -> None:
        """A collective of torch's follows, which knows no names: first make sure that all ranks are about to begin it."""
        carriers = self.carriers(unit.axis, unit.options)
        line = Line(self.ledger(unit.axis), unit.label, f"{unit.ordinal} {doing}")
        message = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if unit.axis.ranks > 1:
            self._send(self._gather_lane, line, doing, partial(carriers.gather.all_reduce_max, message), _nothing).wait()

    def collect_now(self) -> None:
        """Wait for what is in flight and hand out gradients, for a caller that runs backwards piece by piece."""
        with torch.no_grad():
            self._collect()

    def glimpse(self, unit: Unit) -> BackwardHook:
        """The unit's parameters are used in a copy of their own; what is returned tells of its backward."""
        return BackwardHook(unit, self.planner.glimpse(unit.number), glimpse=True)

    def wait_for(self, event: object) -> None:
        """Order the next forward behind an event of the caller's."""
        self._event = event

    def flush(self) -> None:
        """Have everything begin that was put off."""
        if self._delays is not None:
            self._delays.start_all()

    def give_up(self) -> None:
        """Forget the step that is under way, with all gradients that are not delivered, as all ranks do."""
        self._abandon()
        self.planner.forget_orders()
        for unit in list(self._units.values()):
            self.discard(unit)
            unit.forget_rounds()

    def reset(self, unit: Unit) -> None:
        """Forget a step that was interrupted, as the next forward would."""
        self._recover_if_stale()
        if self.planner.running(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self._abandon()

    def rest(self, unit: Unit, *, doing: str) -> None:
        """Let the slots show the sharded parameters, to be written, and free the full ones unless a backward needs them."""
        self.check_idle(unit, doing=doing)
        self._uninstall(unit)
        for group in unit.groups:
            group.block()
        if not self.planner.expects_backward(unit.number):
            self._execute(self.planner.release(unit.number))

    def renounce(self, unit: Unit) -> None:
        """What the unit gathered is void: its parameters become others."""
        if unit.number in self._gathering or unit.residency is Residency.FULL:
            self._uninstall(unit)
            self._execute(self.planner.release(unit.number))
        for group in unit.groups:
            group.forget()

    def check_idle(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if the unit's forward or backward is under way, or it shows full parameters."""
        self._recover_if_stale()
        if unit.shown:
            raise StateError(
                f"{doing} was called inside full_params() of unit '{unit.name}': call it before or after the block"
            )
        if self.planner.running(unit.number) and not any(_torch.is_in_forward(module) for module in unit.modules):
            self._abandon()  # the forward was interrupted in a way that runs no hooks
        if self.planner.running(unit.number):
            raise StateError(f"{doing} was called inside the forward of unit '{unit.name}': call it before or after")
        if self.planner.in_backward(unit.number):
            raise StateError(f"{doing} was called inside the backward of unit '{unit.name}': call it before or after")

    def check_delivered(self, unit: Unit, *, doing: str) -> None:
        """Raises StateError if gradients of the unit are on their way, to groups that are about to be made anew."""
        if self.is_undelivered(unit):
            raise StateError(
                f"{doing} came while gradients of unit '{unit.name}' are reduced, but not yet delivered: run the last backward "
                "of the step first, or call zero_grad()"
            )

    def is_undelivered(self, unit: Unit) -> bool:
        """Whether gradients of the unit are on their way: reduced or being reduced, and in no `.grad` yet."""
        return any(group.deferring for group in unit.groups) or any(
            held is unit and not reduction.landed for held, reduction in self._reduced
        )

    def discard(self, unit: Unit) -> None:
        """Forget the gradients of the unit that are not delivered: kept on this rank, deferred, or on their way."""
        if any(held is unit for held, _ in self._reduced) or any(group.deferring for group in unit.groups):
            self._in_flight.abandon()
            self._replicating.abandon()
            dropped = [reduction for held, reduction in self._reduced if held is unit]
            self._reduced = [entry for entry in self._reduced if entry[0] is not unit]
            self._hooked = deque(reduction for reduction in self._hooked if reduction not in dropped)
        for group in unit.groups:
            group.take_partial()
            group.defers(False)
        for parameter in unit.parameters:
            parameter.discard_kept()

    def check_step(self, unit: Unit) -> None:
        """Raises StateError if an optimizer may not write the unit's shards now."""
        self._recover_if_stale()
        if self._beats:
            self._read_beats(keep=len(self._beats))
        if self.planner.running(unit.number) and any(_torch.is_in_forward(module) for module in unit.modules):
            raise StateError(f"optimizer.step() was called inside the forward of unit '{unit.name}': call it after backward")
        for group in unit.groups:
            group.block()
        for parameter in unit.parameters:
            if parameter.kept is not None and parameter.sharded.grad is None:
                raise StateError(
                    f"optimizer.step() was called while the gradient of '{parameter.name}' in unit '{unit.name}' is only kept "
                    "on each rank: run the last backward of the step outside of accumulate(), or after "
                    "set_requires_gradient_sync(True)"
                )
        if any(group.deferring for group in unit.groups):
            raise StateError(
                f"optimizer.step() was called while gradients of unit '{unit.name}' are reduced over shards, but not over "
                "replicas: call set_requires_all_reduce(True) before the last backward of the step"
            )
        if any(held is unit and not reduction.landed for held, reduction in self._reduced):
            raise StateError(
                f"optimizer.step() was called before the gradients of unit '{unit.name}' arrived: "
                "call set_is_last_backward(True) before the last backward of the step"
            )

    # --- actions ---

    def _execute(self, actions: Sequence[Action]) -> None:
        for index, action in enumerate(actions):
            try:
                self._act(action)
            except BaseException:
                self._void(actions[index:])
                raise

    def _void(self, actions: Sequence[Action]) -> None:
        """An action raised: it and those planned behind it did not happen, so their units hold nothing."""
        for number in dict.fromkeys(action.unit for action in actions):
            unit = self._units.get(number)
            if unit is not None:
                self._settle_or_abandon(self._gathering.pop(number, []))
                self._reshard(unit)
                self.planner.void(number)

    def _settle_or_abandon(self, gathering: Sequence[tuple[Group, Ticket]]) -> None:
        """Memory that messages may still arrive in must not be freed. Who can be waited for no more is not asked again."""
        broken = False
        for group, ticket in gathering:
            try:
                if not broken:
                    ticket.wait()
            except Exception:
                broken = True
            if broken:
                group.abandon()

    def _act(self, action: Action) -> None:
        unit = self._units.get(action.unit)
        if unit is None:
            return  # deleted since this was planned
        if _torch.profiling():
            with record_function(f"fullshard::{type(action).__name__.lower()} {unit.name}"):
                self._run[type(action)](unit)
        else:
            self._run[type(action)](unit)

    def _refresh(self, unit: Unit) -> None:
        """What a caller changed since the unit was gathered makes the gathered data void; `_unshard` looks once more."""
        if unit.residency is not Residency.SHARDED and not self.planner.running(unit.number):
            self._uninstall(unit)
            if not unit.is_current():
                self._execute(self.planner.release(unit.number))
                unit.refresh()

    def _is_stale(self, unit: Unit, first: bool) -> bool:
        """Whether what was gathered is out of date. What the planner issued ahead within a forward or backward cannot be."""
        residency = unit.residency
        if residency is Residency.SHARDED or (
            residency is Residency.GATHERING and not first and self.planner.is_ahead(unit.number)
        ):
            return False
        return unit.stale

    def _unshard(self, unit: Unit) -> None:
        unit.refresh()
        action = "forward gather" if self._backward is None else "backward gather"
        tickets: list[tuple[Group, Ticket]] = []
        self._gathering[unit.number] = tickets
        for group in unit.groups:
            full = group.grow()
            try:
                ticket = self._send(self._gather_lane, group.line, action, full.start, full.finish)
            except BaseException:
                group.abandon()
                raise
            tickets.append((group, ticket))

    def _wait(self, unit: Unit) -> None:
        for group, ticket in self._gathering[unit.number]:
            ticket.wait()
            group.settle(ticket)
        del self._gathering[unit.number]
        if self.planner.is_kept(unit.number):
            for parameter in unit.parameters:
                parameter.note_version()

    def _retain(self, unit: Unit) -> None:
        for group in unit.groups:
            group.retain()

    def _reshard(self, unit: Unit) -> None:
        self._uninstall(unit)
        for group in unit.groups:
            group.shrink()

    def _uninstall_number(self, number: int) -> None:
        unit = self._units.get(number)
        if unit is not None:
            self._uninstall(unit)

    def _uninstall(self, unit: Unit) -> None:
        for group in unit.groups:
            group.uninstall()

    def _reduce(self, unit: Unit) -> None:
        if not self.planner.is_kept(unit.number):
            self._uninstall(unit)
        for group in unit.groups:
            if group.trainable:
                self._reduce_group(unit, group, group.take_gradients() or [None] * len(group.parameters))
        self._poll()

    def _reduce_late(self, unit: Unit) -> None:
        """Gradients that came after their unit was reduced, from a second graph for example."""
        for group in unit.groups:
            grads = group.take_gradients()
            if grads is not None:
                self._reduce_group(unit, group, grads)

    def _reduce_group(self, unit: Unit, group: Group, grads: list[Tensor | None]) -> None:
        if not unit.options.sync_gradients:
            group.accumulate(grads)
            return
        limit = unit.options.comm.reductions_in_flight
        self._in_flight.make_room(limit)
        while len(self._hooked) >= limit:
            self._hooked.popleft().land()
        reduction = Reduction(group, group.with_accumulated(grads), unit.options.reduce)
        grads.clear()
        frozen = [p.name for p in group.parameters if not p.requires_grad]
        action = f"reduction without {', '.join(frozen)}" if frozen else "reduction"  # ranks must agree on it
        ticket = self._send(self._reduce_lane, group.line, action, reduction.start, reduction.finish)
        # On the CPU the sum over replicas begins when this is waited for, so never by polling: that differs from rank to rank.
        self._in_flight.push(ticket, reduction.settle, polled=not reduction.replicated)
        if reduction.replicated:
            ticket = self._send(
                self._replicate_lane,
                group.line,
                "sum over replicas",
                reduction.replicate,
                reduction.finish_replicated,
                after=ticket,
            )
            self._replicating.push(ticket, reduction.end, polled=reduction.polled)
        reduction.follow(ticket)
        group.defers(reduction.deferred)
        if reduction.deferred:
            return
        self._reduced.append((unit, reduction))
        if reduction.hooked:
            self._hooked.append(reduction)

    def _poll(self) -> None:
        """Let go of what is finished already."""
        self._in_flight.poll()
        if len(self._replicating):
            self._replicating.poll()

    def _drain(self) -> None:
        self._in_flight.drain()
        self._replicating.drain()

    # --- heartbeat ---

    def _collect(self) -> None:
        """Wait for what is in flight and hand out the gradients of units whose step this backward ends."""
        reduced = [entry for entry in self._reduced if entry[0].options.last_backward]
        if not reduced:
            return
        self._reduced = [entry for entry in self._reduced if not entry[0].options.last_backward]
        if len(self._replicating):  # on the replicas, too, sums begin before the heartbeat on every rank
            self._in_flight.drain()
        beats = self._start_heartbeats(reduced)
        beating = {id(reduction) for beat, _ in beats for reduction in beat.reductions}
        self._drain()
        self._hooked.clear()
        if self.device.type == "cpu":  # of ranks that parted none has a gradient
            for beat, ticket in beats:
                ticket.wait()
                self._check_beat(beat)
        for _, reduction in reduced:
            reduction.land()
            if id(reduction) not in beating:
                reduction.decide([True] * len(reduction.used))
        for beat, ticket in beats:
            if beat.undecided:
                ticket.block()
                beat.decide()
            if self.device.type != "cpu":
                self._beats.append((beat, ticket))
        if len(self._beats) > len(beats):
            self._read_beats(keep=len(beats))

    def _start_heartbeats(self, reduced: Sequence[tuple[Unit, Reduction]]) -> list[tuple[Heartbeat, Sent]]:
        """One message per set of process groups."""
        beats: list[tuple[Heartbeat, Sent]] = []
        axes: dict[tuple[int, int], list[tuple[Unit, Reduction]]] = {}
        for unit, reduction in reduced:
            if unit.options.checks.heartbeat:
                axes.setdefault(reduction.parameters[0].cut.axis.key, []).append((unit, reduction))
        for entries in axes.values():
            unit, first = entries[0]
            ledger = first.line.ledger
            if not ledger.beats(unit.options.checks.every):
                continue
            line = Line(ledger, _NOBODY, "")
            entry = line.note("heartbeat")
            beat = Heartbeat(ledger, [reduction for _, reduction in entries], self.device)
            over = first.carriers.replicate is not None
            start = partial(self._start, entry.tag, ledger.name, beat.start)
            ticket = self._reduce_lane.run(start, _nothing if over else beat.finish)
            if over:
                start = partial(self._start, entry.tag, ledger.name, beat.start_over_replicas)
                ticket = self._replicate_lane.run(start, beat.finish, after=ticket)
            beats.append((beat, Sent(ticket, self, ledger, entry)))
        return beats

    def _check_beat(self, beat: Heartbeat) -> None:
        """Raises StateError if the ranks did not run the same."""
        if beat.differs():
            text = "" if self.watch is None else self.watch.confront(beat.ledger)
            beat.ledger.close(text or "the ranks ran different units, or the same ones in different orders, in this step")
            raise StateError(beat.ledger.verdict)

    def _read_beats(self, *, keep: int = 0) -> None:
        """On an accelerator: look at what has arrived, and wait for all but the last `keep`."""
        while self._beats and (len(self._beats) > keep or self._beats[0][1].done()):
            beat, ticket = self._beats.popleft()
            ticket.block()
            self._check_beat(beat)

    # --- backward's end, and what to do when it never comes ---

    def _begin_backward(self) -> bool:
        """True for the first event of a backward."""
        if self._backward is not None:
            return False
        end = BackwardEnd(self)
        self._backward = weakref.ref(end, self._backward_died)
        _torch.on_backward_end(end)
        return True

    def _backward_died(self, _: object) -> None:
        """At once, and touching nothing that another rank takes part in: callers find their sharded parameters in place."""
        for unit in self._touched.values():
            self._uninstall(unit)

    def _recover_if_stale(self) -> None:
        """A backward that raised never told us; its engine dropped our callback, which is how we know."""
        if self._backward is None or self._backward() is not None:
            return
        names = ", ".join(f"'{unit.name}'" for unit in self._touched.values()) or "no unit"
        step = self._units_of_step()
        kept = any(group.deferring for unit in step for group in unit.groups) or any(
            parameter.kept is not None for unit in step for parameter in unit.parameters
        )
        also = ", and with them what earlier backwards of the step had kept without communication" if kept else ""
        warnings.warn(
            f"the last backward raised after it had reached {names}: the gradients of that backward are discarded{also}",
            stacklevel=2,
        )
        self._abandon()
        for unit in step if kept else ():  # of a sum that is part way, all or nothing
            self.discard(unit)

    def _units_of_step(self) -> list[Unit]:
        """The units that the running backward reached, those below them, and those whose backward was still to come."""
        found = {unit.number: unit for unit in self._touched.values()}
        for unit in self._touched.values():
            for module in (inner for root in unit.modules for inner in root.modules()):
                below = unit_of(module)
                if below is not None:
                    found[below.number] = below
        for number in self.planner.awaiting():
            waiting = self._units.get(number)
            if waiting is not None:
                found[number] = waiting
        return list(found.values())

    def _abandon(self) -> None:
        """Forget a forward or backward that died half way, and free what it held."""
        self._backward = None
        self._reached.clear()
        for joined in self._joined:
            self.planner.forget(joined.call)
        self._joined.clear()
        self._in_flight.abandon()
        self._replicating.abandon()
        self._beats.clear()
        for number in list(self._gathering):
            gathering = self._units.get(number)
            self._settle_or_abandon(self._gathering.pop(number))
            if gathering is not None:
                self._reshard(gathering)
                self.planner.void(number)
        for number in self.planner.underway():
            self._uninstall_number(number)
            broken = self._units.get(number)
            if broken is not None:
                broken.forget_forwards()
        self._execute(self.planner.abandon())
        for unit in self._touched.values():
            for group in unit.groups:
                group.take_gradients()
        self._reduced = [entry for entry in self._reduced if entry[0].number not in self._touched]
        self._hooked.clear()
        self._touched.clear()
