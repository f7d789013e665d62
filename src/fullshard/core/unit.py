"""One fully_shard call: the life of a unit, from pre_forward to the end of backward, and what users do to it in between."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.checks.collective_log import GroupFingerprints, UnitName, described
from fullshard.core.agreement import Agreement
from fullshard.core.layout import DirectRule
from fullshard.core.mesh import ShardAxis, resolve_mesh
from fullshard.core.param_group import ParamGroup, group_parameters, kind_of
from fullshard.core.scheduler import FULL, SHARDED, ForwardCall, Residency, UnitRecord
from fullshard.core.sharded_param import ShardedParameter
from fullshard.core.unit_options import UnitOptions
from fullshard.core.unsharded_buffer import Storage
from fullshard.errors import StateError, some_of, warn_once
from fullshard.policies import CPUOffloadPolicy

if TYPE_CHECKING:
    from fullshard.core.runtime import Runtime

# Extension points of a unit's life: functions that features outside of the engine add, and that the engine calls.

FirstUse: TypeAlias = "Callable[[Unit, nn.Module], bool | None]"
"""A check of a unit (`Unit.before_first_use`), called with the unit and the module whose forward begins. It stays due if it
raises or returns True."""

Originals: TypeAlias = Mapping[ShardedParameter, nn.Parameter]
"""The original Parameter, with its values, of each parameter that one fully_shard() call sharded."""

UNIT_CREATED: list[Callable[[Unit, Originals | None], None]] = []
"""Called with each new unit and its originals, or None for originals if the unit is a copy."""

ALLOCATION: list[Callable[[Unit], Callable[[], None]]] = []
"""Called with a unit before `to_empty()` allocates memory for one of its modules; what it returns is called afterwards."""

BEFORE_STATE_DICT: list[Callable[[Unit], None]] = []
"""Called with each unit before `state_dict()` lists its parameters; not if another thread than the unit's calls it."""

UNIT = "_fullshard_unit"  # the attribute of a module that holds its unit
_LATE = "_fullshard_late"  # attribute of an unsharded parameter: the handle of the hook that `hook_late_grads` added


class Unit:
    """One fully_shard call: modules, and groups of parameters. There are no groups if other units own all parameters.

    The life of a unit in one step, in the order of the methods below:

        pre_forward     unshard the parameters, prefetch the next unit         post_forward    reshard them
        pre_backward    unshard them again, prefetch; reduce the units whose backward is done
        end of backward reduce the rest, and set .grad of all parameters or none (runtime.py)

    Between steps, strong references point down only: module -> unit -> group -> parameter. The runtime refers to units weakly,
    so a model is freed when its last reference goes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: list[ShardedParameter],
        axis: ShardAxis,
        options: UnitOptions,
        runtime: Runtime,
        *,
        global_id: int | None = None,
    ) -> None:
        """Create a unit, and put its parameters into groups. `global_id`: that of the original, for a copy."""
        self.runtime = runtime
        self.unit_name = UnitName(type(modules[0]).__name__)  # parameters and log share it, so a new name shows in their texts
        # Equal on all ranks, unlike `number`: ranks may have created other units before.
        self.global_id = next(runtime.communicator.log_of(axis).unit_ids) if global_id is None else global_id
        self.axis = axis
        self.options = options
        self.parameters = parameters
        self.groups: list[ParamGroup] = []  # the parameters by kind, dtypes, axis, device and requires_grad
        self._modules = [weakref.ref(module) for module in modules]  # weak, since modules refer to their unit
        self.is_list = len(modules) > 1
        # The path to the unit's module from the outermost one that ran: each parent, and the name of its child on the path.
        self.path: list[tuple[weakref.ref[nn.Module], str]] = []
        self.hooks: list[tuple[weakref.ref[nn.Module], Any]] = []  # modules, and the handles of their hooks
        # Running forwards of its modules, outermost first: id of the module, last index of `Runtime.trace` when it began, and
        # the exception that the caller was handling.
        self.forwards: list[tuple[int, int, BaseException | None]] = []
        self.methods = 0  # running calls of methods that run the unit's forward hooks, as `generate` may
        self.moves_inputs = False  # whether the last forward moved its inputs
        self.output_has_graph: bool | None = None  # of the last forward in grad mode that did not raise
        # The units that the last complete forward entered (True) or left (False), in order, this unit included.
        self.last_order: Sequence[tuple[int, bool]] = ()
        self.shown_by = ""  # the call that shows plain Parameters on the modules, if one does
        # Version and address of each unsharded parameter when the user got it. A change of either is a write.
        self.exposed: dict[ShardedParameter, tuple[int, int]] = {}
        self.first_use: list[FirstUse] = []  # checks that the next forward runs before it unshards, in order
        self.gathers_decided = False  # False: `decide_gathers` is due, as the groups are new or a `grad_dtype` changed
        self.names_units = False  # an outermost forward of this unit has named the units below by their path
        self.refused = ""  # why no forward may begin, with a remedy; "" if one may
        self.undone = False  # taken off its modules
        self.record: UnitRecord = runtime.register(self)  # where the parameters are, and what the scheduler expects
        self.rebuild_groups([parameter.local for parameter in parameters])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"Unit '{self.name}' cannot be copied or pickled by itself. Copy or pickle the whole module that fully_shard() was "
            "called on, or the FullyShardedDataParallel around it."
        )

    @property
    def number(self) -> int:
        """Its number in its runtime. Units of other runtimes may have the same."""
        return self.record.number

    @property
    def name(self) -> str:
        """Its qualified name in the module that named it last (`name_units_in`), else the class of its first module."""
        return self.unit_name.name

    @property
    def modules(self) -> list[nn.Module]:
        """The living modules that `fully_shard` was called on."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def outermost(self) -> nn.Module | None:
        """The module at the root of `path`, else the unit's first module; None once that module is deleted."""
        return self.path[0][0]() if self.path else self._modules[0]()

    @property
    def residency(self) -> Residency:
        """Where its parameters are."""
        return self.record.residency

    # --- forward ---

    def pre_forward(self, module: nn.Module) -> None:
        """Unshard the parameters, prefetch the next unit, and put the unsharded parameters on the modules."""
        runtime, scheduler, record = self.runtime, self.runtime.scheduler, self.record
        if runtime.communicator.interrupted or runtime.backward.underway:
            runtime.recover()
        if self.refused:
            raise StateError(f"The forward of unit '{self.name}' was called while {self.refused}")
        if self.shown_by:
            raise StateError(
                f"The forward of unit '{self.name}' was called inside {self.shown_by}, which shows its parameters to read and "
                "write. Call it outside, or keep the model unsharded with resident()."
            )
        runs_outermost = record.running and scheduler.is_outermost(record.number) and not (self.is_list or self.methods)
        if runs_outermost and not _torch.is_in_forward(module, outer=True):  # an earlier forward ended without its hook
            runtime.abort_in_progress()
        if _torch.current_graph_task() != -1:  # activation checkpointing
            self.check_first_use(module)
            runtime.begin_backward()
            runtime.backward.units[record.number] = self
            runtime.run(scheduler.before_recompute(record.number, stale=self.stale_in_backward()))
        elif self.is_list and record.running:  # a later module
            self.check_first_use(module)
            scheduler.continue_forward(record.number, id(module))
        else:
            if not scheduler.running:
                runtime.begin_outermost_forward(self, module)
            if self.first_use:
                self.check_first_use(module)
            stale = False
            if record.residency is not SHARDED:
                for group in self.groups:  # even if prefetched in this forward: the caller may have written since (MoCo)
                    stale = stale or group.stale
                if record.residency is FULL:
                    self.uninstall()  # passes requires_grad_() calls on unsharded parameters to the sharded ones
            runtime.trace.append((record.number, True))
            parts = [id(one) for one in (module, *self.modules)] if self.is_list else ()
            runtime.run(scheduler.before_forward(record.number, stale=stale, parts=parts))
        self.forwards.append((id(module), len(runtime.trace) - 1, sys.exc_info()[1]))
        for group in self.groups:
            group.install()

    def before_first_use(self, check: FirstUse, *, first: bool = False) -> None:
        """Run `check` before the next forward of the unit unshards, after the checks that are due already.

        `first`: run `check` before all others; only for a check that does not communicate.
        """
        others = [one for one in self.first_use if one != check]
        self.first_use = [check, *others] if first else [*others, check]

    def check_first_use(self, module: nn.Module) -> None:
        """Run the checks that are due, in order. A check that raises, and those after it, are due again in the next forward."""
        for check in self.first_use:
            if not check(self, module):
                self.first_use = [one for one in self.first_use if one != check]

    def post_forward(self, module: nn.Module, *, failed: bool = False) -> ForwardCall | None:
        """Reshard the parameters. Return the call for a `BackwardHook` on the outputs, None if it cannot have a backward."""
        runtime, scheduler, record = self.runtime, self.runtime.scheduler, self.record
        recomputes = _torch.current_graph_task() != -1
        # Checkpointing ends a recomputation early by an exception. A real failure is reported when it leaves backward.
        if failed and not recomputes:
            self._report_exception()
        key, traced = id(module), 0
        for at in range(len(self.forwards) - 1, -1, -1):  # end this one, and drop forwards inside it that never ended
            if self.forwards[at][0] == key:
                traced = self.forwards[at][1]
                del self.forwards[at:]
                break
        # A forward that raised has no backward that would reshard its unit. So reshard it now, as after a forward without grad.
        number, grad = record.number, torch.is_grad_enabled() and not failed
        if recomputes:  # the unit stays unsharded until its gradients are reduced
            call = scheduler.after_recompute(number, grad=grad)
            return call if grad else None
        if not record.running:
            return None  # `pre_forward` raised before the scheduler knew of this forward, or a reset ended it
        # Ends this call, and first the calls inside it that raised or never finished; ends none if other modules are to come.
        ended = scheduler.after_forward(number, grad=grad, part=key if self.is_list else None)
        if self.is_list and record.running:  # other modules follow
            return ended.call if grad else None
        runtime.trace.append((number, False))
        if not failed and not ended.closed and not self.is_list:  # for ranks that join a forward without computing
            self.last_order = runtime.trace[traced:]
        for closed in ended.closed:
            inner = runtime.unit(closed.unit)
            if inner is not None:
                inner.uninstall()
        # Take parameters that stay unsharded off the modules as well: between forwards, callers expect the sharded ones.
        if record.residency is FULL and not record.is_pinned and not record.running:
            self.uninstall()
        if ended.actions:
            runtime.run(ended.actions)
        # After set_unshard_in_backward(False), a backward that needs the parameters must raise.
        if grad and not self.options.gathers_in_backward and record.residency is SHARDED:
            for group in self.groups:
                group.invalidate_autograd()
        if runtime.reducer.in_flight.entries:  # of a backward that did not end the step, or of a deleted model
            runtime.reducer.poll()
        return ended.call if grad else None

    def has_raised(self, module: nn.Module) -> bool:
        """Return True if an exception that is being handled left the running forward of `module`."""
        failure = sys.exc_info()[1]
        handled = next((handled for key, _, handled in reversed(self.forwards) if key == id(module)), None)
        return failure is not None and failure is not handled  # the same: it was handled already when the forward began

    def _report_exception(self) -> None:
        """Record the exception that leaves this forward. Other ranks learn of it when it leaves the outermost forward."""
        runtime, failure = self.runtime, sys.exc_info()[1]
        text = "an exception" if failure is None else described(failure)
        # An outer unit sees the same exception: keep the innermost place.
        if runtime.raised_in is None or runtime.raised_in[1] != text:
            runtime.raised_in = f"'{self.name}' forward", text
        if not runtime.scheduler.running or runtime.scheduler.is_outermost(self.number):
            runtime.communicator.report_exception(*runtime.raised_in)
            runtime.raised_in = None

    # --- backward ---

    def pre_backward(self, call: ForwardCall) -> None:
        """Begin the backward of `call`: reduce the units whose backward is done, unshard this one again, prefetch the next."""
        runtime, scheduler, record = self.runtime, self.runtime.scheduler, self.record
        if self.undone:
            raise StateError(
                f"Unit '{self.name}' was undone between its forward and this backward. Run the backward before undo(), or run "
                "the forward again."
            )
        if runtime.communicator.interrupted or runtime.backward.raised:
            runtime.recover()
        if not runtime.backward.underway:
            runtime.begin_backward()
        runtime.backward.units[record.number] = self
        for listener in runtime.listeners:
            listener.before_backward(call)
        stale = record.residency is not SHARDED and not call.copied and self.stale_in_backward()
        collects = call.copied or runtime.backward.collects or self._collects()
        if torch.is_grad_enabled():  # create_graph=True: the graph of this backward needs the parameters as well
            with torch.no_grad():
                runtime.run(scheduler.before_backward(call, stale=stale, again=True, collects=collects))
            if not call.copied:
                self.hook_late_grads()
        else:  # grad mode is off already; another no_grad() costs more than `before_backward`
            runtime.run(scheduler.before_backward(call, stale=stale, collects=collects))
        if record.residency is FULL:
            for group in self.groups:  # for a recomputation inside of the unit, without the unit's hooks
                group.install(again=True)

    def _collects(self) -> bool:
        """Set `backward.collects`, and return it: False if all of the unit's parameters are frozen, or not in `inputs=`."""
        unsharded = [parameter.unsharded for parameter in self.parameters]
        leaves = [full for full in unsharded if full is not None and full.requires_grad]
        self.runtime.backward.collects = bool(leaves) and _torch.accumulates_into(leaves)
        return self.runtime.backward.collects

    def hook_late_grads(self) -> None:
        """Hook the unsharded parameters, for gradients that pass no hook on a graph.

        Such gradients come from a backward through the graph of another backward (create_graph=True), or from a parameter that
        forward returned and the loss uses.
        """
        for parameter in self.parameters:
            full = parameter.unsharded
            if full is not None and full.requires_grad and _LATE not in full.__dict__:
                full.__dict__[_LATE] = full.register_post_accumulate_grad_hook(partial(late_gradient, weakref.ref(self)))

    # --- the parameters on its modules ---

    def uninstall(self) -> None:
        """Register the sharded parameters on the modules."""
        for group in self.groups:
            if group.installed:
                group.uninstall()

    def free_unsharded(self) -> None:
        """Free the unsharded parameters. Raise StateError, naming the parameter, if the user wrote to one in `exposed`."""
        if self.exposed:
            self.check_unmodified()
        for group in self.groups:
            if group.installed:
                group.uninstall()
            group.free_unsharded()

    def expose(self) -> None:
        """Record version and address of each unsharded parameter: from now on the user holds it."""
        self.exposed = {
            one: (one.unsharded._version, one.unsharded.data_ptr()) for one in self.parameters if one.unsharded is not None
        }

    def check_unmodified(self) -> None:
        """Raise StateError, naming the parameter, if the user wrote to an unsharded parameter that is about to be freed.

        It raises once: the next call discards the write, as the error says.
        """
        exposed, self.exposed = self.exposed, {}
        for parameter, before in exposed.items():
            now = parameter.unsharded
            if now is not None and (now._version, now.data_ptr()) != before:
                raise StateError(
                    f"Parameter '{parameter.name}' of unit '{self.name}' cannot be resharded: it was written while it was "
                    "unsharded by hand, and reshard() would lose the write. Write to it in `with "
                    "fullshard.full_params(module):`, or to its shard while it is sharded. To discard the write, call "
                    "reshard() again."
                )

    @property
    def shows_full(self) -> bool:
        """True if the modules hold unsharded parameters, so that walking the modules does not find the sharded ones."""
        return bool(self.shown_by) or any(group.installed for group in self.groups)

    # --- shards that were written or moved ---

    @property
    def stale(self) -> bool:
        """True if there are unsharded parameters, and the shards were written since they were all-gathered."""
        return self.residency is not SHARDED and any(group.stale for group in self.groups)

    def stale_in_backward(self) -> bool:
        """Return True if stale. False after a prefetch in this backward: a write since then must not reach this backward."""
        scheduler = self.runtime.scheduler
        return scheduler.prefetched.get(self.record.number) != scheduler.phase and self.stale

    def invalidate_unsharded(self) -> None:
        """Drop the unsharded parameters, and the parts that smaller groups of ranks keep."""
        if self.number in self.runtime.gathering or self.residency is FULL:
            self.uninstall()
            self.runtime.run(self.runtime.scheduler.reshard(self.number))
        for group in self.groups:
            group.drop_kept_shards()

    @torch.inference_mode(False)
    def refresh(self, unwritten: Container[int] = (), *, assigned: bool = False) -> None:
        """Take over tensors that `Module._apply` moved or cast, and those that load_state_dict(assign=True) assigned.

        Before the first all-gather of its groups, also take over DTensors that others put on modules, as transformers does.
        Raises StateError, before a shard changes, if a slot holds another Parameter or none, or dtype or device cannot change.

        Args:
            unwritten: ids of parameters whose memory has no values yet.
            assigned: True after load_state_dict(), materialize() and full_params(), which may register other Parameters.
        """
        first = not self.gathers_decided
        values = [parameter.read_slots(assigned=assigned, dtensors=first) for parameter in self.parameters]
        if assigned or first:
            for parameter in self.parameters:
                parameter.take_slots()
        if all(value is parameter.local for parameter, value in zip(self.parameters, values)):
            return
        fits = all(
            value.dtype == parameter.local.dtype and value.device == parameter.local.device
            for parameter, value in zip(self.parameters, values)
        )
        if not fits:
            if _torch.current_graph_task() != -1 or self.runtime.scheduler.awaits_backward(self.number):
                raise StateError(
                    f"The parameters of unit '{self.name}' changed dtype or device between its forward and its "
                    "backward. Change them back, and run the backward first or delete the outputs of the forward."
                )
            self.runtime.reducer.check_delivered(self, doing="a change of dtype or device")
            self.invalidate_unsharded()
            self.rebuild_groups(values, unwritten)
            return
        for parameter, value in zip(self.parameters, values):
            if value is not parameter.local:
                parameter.replace_values(value)
                parameter.bind_to_flat_shard(parameter.local)
        for group in self.groups:
            group.count_anew()

    # --- public calls; some check first whether they are legal now ---
    # Callers obtain the unit from `recovered`, `require_unit` or `units_of`, which reset what an interrupt left.

    def unshard(self) -> None:
        """Start the all-gather for the user. Raise StateError inside of full_params()."""
        self.refuse_while_shown(doing="unshard()")
        self.runtime.communicator.wait_for_next_event()
        self.runtime.run(self.runtime.scheduler.unshard(self.number, stale=self.stale))

    def ensure_unsharded(self) -> None:
        """Put the unsharded parameters on the modules for the user; all-gather again if they were freed or are stale."""
        self.unshard()
        self.runtime.run(self.runtime.scheduler.finish_unshard(self.number))
        for group in self.groups:
            group.install()
        self.expose()

    def enter_resident(self) -> None:
        """Keep the unit unsharded through forwards and backwards, until `leave_resident` is called as often as this."""
        self.record.resident_blocks += 1
        if self.record.resident_blocks == 1:
            try:
                self.check_idle(doing="resident()")
                self.ensure_unsharded()
            except BaseException:
                self.record.resident_blocks = 0
                raise

    def leave_resident(self) -> None:
        """Undo one `enter_resident`."""
        self.record.resident_blocks -= 1
        if self.record.resident_blocks == 0:
            self.reshard(doing="the end of resident()")

    def reshard(self, *, doing: str = "reshard()") -> None:
        """Free the unsharded parameters. Raise StateError in the unit's forward or backward, or after a write to `exposed`."""
        self.check_idle(doing=doing)
        self.check_unmodified()
        self.invalidate_unsharded()
        for group in self.groups:
            group.synchronize_host()

    def ensure_sharded(self, *, doing: str) -> None:
        """Register the sharded parameters on the modules, to be read or written. Raises StateError if the unit is not idle.

        The unsharded ones are freed unless a backward that needs them may still come; StateError if the user wrote to one.
        """
        self.check_idle(doing=doing)
        frees = not self.runtime.scheduler.expects_backward(self.number)
        if frees:
            self.check_unmodified()
        self.uninstall()
        for group in self.groups:
            group.synchronize_host()
        if frees:
            self.runtime.run(self.runtime.scheduler.reshard(self.number))

    # --- what is legal now ---

    def refuse_while_shown(self, *, doing: str) -> None:
        """Raise StateError while plain Parameters are shown on the modules."""
        if self.shown_by:
            raise StateError(
                f"{doing} was called inside {self.shown_by} of unit '{self.name}'. Call it before or after the block."
            )

    def check_idle(self, *, doing: str) -> None:
        """Reset what a failed step left. Then raise StateError in the unit's forward or backward, or if `shown_by` is set."""
        self.runtime.recover()
        self.refuse_while_shown(doing=doing)
        self.runtime.abort_if_left(self)
        if self.record.running:
            raise StateError(f"{doing} was called inside the forward of unit '{self.name}'. Call it before or after.")
        if self.runtime.scheduler.in_backward(self.number):
            raise StateError(f"{doing} was called inside the backward of unit '{self.name}'. Call it before or after.")

    def check_step_over(self, *, doing: str) -> None:
        """Raise StateError if gradients of earlier backwards are not in `.grad` yet: in flight, or kept on each rank."""
        self.runtime.reducer.check_delivered(self, doing=doing)
        if any(group.grads.has_local for group in self.groups):
            own = some_of([parameter.name for parameter in self.parameters if parameter.local_grad is not None])
            raise StateError(
                f"{doing} was called while gradients of unit '{self.name}' are accumulated but not reduced (on this rank: of "
                f"{own or 'no parameter'}). {self.options.remedy}"
            )

    def agreement(self, doing: str) -> Agreement:
        """Return an `Agreement` of the ranks for a call on the unit outside of a step."""
        return Agreement(self.runtime.communicator, [self.axis], self.unit_name, doing, f"{self.global_id} {doing}")

    # --- options and groups ---

    def configure(self, **changes: object) -> None:
        """Change options that are read at each event. Groups copy the other options: change those by `reconfigure`."""
        self.options = replace(self.options, **changes)  # type: ignore[arg-type]
        self._update_record()

    def _update_record(self) -> None:
        self.record.options = self.options
        self.record.nbytes = sum(group.unsharded_nbytes for group in self.groups)
        kept = self.runtime.kept
        (kept.add if self.options.states.keeps_parameters else kept.discard)(self)

    def check_rebuildable(self, *, doing: str) -> None:
        """Raise StateError inside a forward or backward, or with gradients that are reduced but not in `.grad` yet."""
        self.check_idle(doing=doing)
        self.runtime.reducer.check_delivered(self, doing=doing)

    def reconfigure(self, *, doing: str, **changes: object) -> None:
        """Change options that the groups depend on, and build the groups again. Gradients kept by `accumulate()` stay.

        Call `check_rebuildable` of all units before the first one changes; this repeats it. If ranks build different groups,
        their logs differ from the next all-gather on: all ranks raise there (gloo) or at the next heartbeat (nccl).
        """
        self.check_rebuildable(doing=doing)
        self.ensure_sharded(doing=doing)
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        axes = [self.axis, *(parameter.sharding.axis for parameter in self.parameters)]
        for axis in {axis.key: axis for axis in axes}.values():
            # Raises for illegal options, and creates process groups, before options and groups change.
            self.runtime.communicator.collectives_of(axis, options)
        self.configure(**changes)
        self.invalidate_unsharded()
        self.rebuild_groups([parameter.local for parameter in self.parameters])

    def rebuild_groups(self, values: Sequence[Tensor], unwritten: Container[int] = ()) -> None:
        """Put the parameters, with these local shards, into groups. `unwritten`: as in `refresh`."""
        dtypes = [
            self.options.mp.resolve(value.dtype, parameter.grad_dtype, keeps_dtype=parameter.keeps_dtype)
            for parameter, value in zip(self.parameters, values)
        ]
        groups: list[ParamGroup] = []
        with torch.inference_mode(False), torch.no_grad():
            for kind, shared, members in group_parameters(self.parameters, values, dtypes):
                parameters = [self.parameters[i] for i in members]
                axis = parameters[0].sharding.axis
                collectives = self.runtime.communicator.collectives_of(axis, self.options)
                # From the backends; infinite for custom collectives with memory of their own, which pack all parameters.
                direct_min_bytes = max(collectives.gather.direct_min_bytes, collectives.reduce.direct_min_bytes)
                storage = self._storage(direct_min_bytes)
                members_text = [(p.name, tuple(p.shape), p.sharding.dim) for p in parameters]
                parts_text = "".join(p.sharding.plain_part.text for p in parameters if p.sharding.plain_part is not None)
                subject = f"{self.global_id}.{len(groups)} {members_text} {shared} {storage.direct} {kind.__name__}{parts_text}"
                log = self.runtime.communicator.log_of(axis)
                groups.append(
                    kind(
                        parameters,
                        [values[i] for i in members],
                        dtypes=shared,
                        collectives=collectives,
                        storage=storage,
                        fingerprints=GroupFingerprints(log, self.unit_name, subject),
                        unwritten=unwritten,
                    )
                )
                if any(p.sharding.summed_axes for p in parameters):
                    groups[-1].summing = partial(self.runtime.communicator.waiting_for, self._sums(parameters, subject))
        # Nothing has changed yet, except that new groups cast kept gradients. If this raised, the former groups stay in use.
        unit = weakref.ref(self)
        for group in groups:
            group.bind_parameters()
            group.keep_memory(self.options.keep_memory)
            ref = weakref.ref(group)
            for parameter in group.parameters:
                parameter.unit, parameter.group, parameter.unit_name = unit, ref, self.unit_name
        self.groups, self.gathers_decided = groups, False
        self.runtime.update_timeouts()
        self._update_record()

    def _sums(self, parameters: Sequence[ShardedParameter], subject: str) -> list[GroupFingerprints]:
        """Return fingerprints that log DTensor's sums of gradients, for each tensor-parallel mesh dim that is summed over."""
        spec = parameters[0].sharding.tensor_parallel
        assert spec is not None and spec.mesh.mesh_dim_names is not None
        names = [spec.mesh.mesh_dim_names[axis] for axis in sorted({i for p in parameters for i in p.sharding.summed_axes})]
        logs = [self.runtime.communicator.log_of(resolve_mesh(spec.mesh[name])) for name in names]
        return [GroupFingerprints(log, self.unit_name, subject) for log in logs]

    def _storage(self, direct_min_bytes: float) -> Storage:
        """Return devices and options of a group's buffers. `direct_min_bytes`: of its collectives."""
        options, offload = self.options, self.options.offload
        host = isinstance(offload, CPUOffloadPolicy)
        pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory
        if pinned and self.axis.device.type == "cpu":
            warn_once("CPUOffloadPolicy(pin_memory=True): host memory is not pinned, since the mesh computes on the CPU")
            pinned = False
        return Storage(
            device=self.axis.device,
            host=host,
            pinned=pinned,
            direct=DirectRule.of(options.comm.direct_min_bytes, direct_min_bytes),
            mp=options.mp,
        )

    def decide_gathers(self) -> None:
        """Build the groups again if the user changed how a parameter is sent or reduced.

        Such changes are all-gather hooks on a parameter, its `grad_dtype`, and a cast of a module inside of the unit. Raises
        StateError for a parameter that cannot be all-gathered.
        """
        self.refresh()
        for parameter in self.parameters:
            kind_of(parameter).check_gather(parameter)
        changed = [parameter.adopt_grad_dtype() for parameter in self.parameters]
        if any(changed) or any(kind_of(p) is not type(group) for group in self.groups for p in group.parameters):
            self.rebuild_groups([parameter.local for parameter in self.parameters])
        self.gathers_decided = True


def late_gradient(reference: weakref.ref[Unit], _: Tensor) -> None:
    """Let the end of the running backward reduce a gradient of a unit, even if no hook on the unit's outputs ran."""
    unit = reference()
    if unit is None or unit.undone:
        return
    try:
        unit.runtime.begin_backward()
        unit.runtime.backward.units[unit.number] = unit
    except BaseException as failure:
        unit.runtime.note_interrupt(failure)
        raise


def is_attached(path: Sequence[tuple[weakref.ref[nn.Module], str]]) -> bool:
    """Return True if the unit with this `path` is still in that place in the model.

    Whether a module is alive may differ between ranks, since one rank may keep a reference to it. Its place in the model is
    equal on all ranks, so the scheduler may depend on it.
    """
    if not path:
        return True  # the outermost one, or one that no forward has named
    child = path[0][0]()
    for parent, name in path:
        if child is None or parent() is not child:
            return False
        child = _torch.children_of(child).get(name)
    unit = None if child is None else child.__dict__.get(UNIT)
    return unit is not None and unit.path is path
