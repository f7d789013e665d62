"""`FSDPModule`, the mixin of sharded modules; `UnshardHandle` and `resident`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core.module_tree import is_ignored, mark_ignored
from fullshard.core.runtime import Runtime
from fullshard.core.scheduler import Residency
from fullshard.core.sharded_param import ShardedParameter
from fullshard.core.unit import ALLOCATION, Unit
from fullshard.core.unit_options import KeepAfterForward
from fullshard.core.units import own_modules, recovered, require_unit, unit_of, units_of
from fullshard.errors import StateError, check_bool, warn_once
from fullshard.policies import StateSharding
from fullshard.state.class_swap import from_snapshot, plain_class, to_snapshot


class UnshardHandle:
    """Handle of an asynchronous all-gather, returned by `FSDPModule.unshard(async_op=True)`.

    Args:
        unit: the unit that is being unsharded. Only `unshard` creates handles.

    Source: `torch.distributed.fsdp.UnshardHandle`.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Register the unsharded parameters, once. Collective if they were freed, or shards written, since `unshard()`.

        Raises:
            StateError: if the process group was destroyed, the ranks unshard different units, or the unit was undone.
        """
        unit = self._unit
        if unit is not None:
            if unit.undone:
                raise StateError(
                    f"Unit '{unit.name}' was undone before wait() of its unshard(). Drop wait(), since undo() has unsharded "
                    "the parameters."
                )
            recovered(unit).ensure_unsharded()
            self._unit = None


def parse_reshard_after_forward(
    reshard_after_forward: bool | int | None, ranks: int, states: StateSharding
) -> tuple[KeepAfterForward, int | None]:
    """Return the policy that the argument means and, for PARTLY, the number of ranks that together keep one copy, else None."""
    if states.keeps_parameters and reshard_after_forward is not None and reshard_after_forward is not False:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r} cannot be combined with states={states}, which keeps parameters. "
            "Leave reshard_after_forward out, or use ZERO3."
        )
    if reshard_after_forward is None:
        return KeepAfterForward.OUTERMOST, None
    if isinstance(reshard_after_forward, bool):
        return (KeepAfterForward.NEVER if reshard_after_forward else KeepAfterForward.ALWAYS), None
    if not isinstance(reshard_after_forward, int):
        raise ValueError(f"reshard_after_forward must be True, False, an int or None, got {reshard_after_forward!r}.")
    if reshard_after_forward < 1 or ranks % reshard_after_forward:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the {ranks} ranks that parameters are sharded "
            f"over. Take one of {[k for k in range(1, ranks + 1) if ranks % k == 0]}."
        )
    if reshard_after_forward == ranks:
        return KeepAfterForward.NEVER, None
    if reshard_after_forward == 1:
        warn_once("reshard_after_forward=1 keeps all parameters after forward. Pass False, which means the same.")
        return KeepAfterForward.ALWAYS, None
    return KeepAfterForward.PARTLY, reshard_after_forward


class FSDPModule(_torch.TorchFSDPModule):  # type: ignore[misc]
    """Mixin of every module that `fully_shard` was called on. It is never instantiated directly.

    It has the methods of torch's FSDPModule, and is a subclass of it for `isinstance`. With `recurse=True` a setter applies
    to all units at and below the module, with `recurse=False` to this unit only; the defaults are those of FSDP2. Call setters
    between steps; those that tell microbatches apart (gradient sync, all-reduce, last backward) also between backwards. Flags
    are bools, numbers, or tensors of one element; anything else (None, "no") raises ValueError.

    Source: `torch.distributed.fsdp.FSDPModule`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a plain module of the original class, so that `sharded_sequential[0:2]` is a plain Sequential."""
        original = plain_class(cls)
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this unit's parameters: allocate memory, all-gather, and register them on the modules. Collective.

        It is not recursive. The parameters stay unsharded until `reshard()`, or the unit's forward or backward, frees them.

        Args:
            async_op: True starts the all-gather and returns a handle; False waits for it.

        Returns:
            With `async_op=True` a handle whose `wait()` registers the unsharded parameters, else None.

        Example:
            >>> handle = model.blocks[1].unshard(async_op=True)                                   # doctest: +SKIP
            >>> hidden = model.blocks[0](hidden)                                                  # doctest: +SKIP
            >>> handle.wait()                                                                     # doctest: +SKIP
        """
        unit = require_unit(self)
        check_bool("async_op", async_op)
        unit.unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters, and register the sharded ones on the modules. It is not recursive.

        Raises:
            StateError: in forward, backward or `full_params()`, or at the first call after a write to an unsharded parameter.
        """
        require_unit(self).reshard()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the backwards from now on, of all units at and below this module, are the last ones of their steps.

        At its end, a backward other than the last waits only for reductions of parameters with gradient hooks. The last one
        waits for all reductions in flight and sets `.grad`.

        Args:
            is_last_backward: False for all microbatches except the last.
        """
        _configure(self, True, last_backward=check_bool("is_last_backward", is_last_backward))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the storage of unsharded parameters, so that their addresses are equal in every step.

        `reshard()` then frees no memory. The cost is the memory of all unsharded parameters and of all buffers of their
        all-gathers. Parameters are all-gathered as often as before.

        Args:
            keep: True keeps the storage; False frees it, at once if the parameters are sharded now, else at the next reshard.
            recurse: True applies to all units at and below this module, False to this unit only.
        """
        kept = check_bool("keep", keep)
        for unit in units_of(self, check_bool("recurse", recurse)):
            unit.configure(keep_memory=kept)
            for group in unit.groups:
                group.keep_memory(kept)
                if not kept and unit.residency is Residency.SHARDED:
                    group.free_unsharded()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. False implements gradient accumulation without communication.

        Without gradient sync each rank accumulates its unsharded gradients, in the `accumulate_dtype` of the unit's
        `MixedPrecisionPolicy`, until a backward with gradient sync reduces the sum. The context manager `accumulate()` does
        the same.

        Args:
            requires_gradient_sync: True reduces gradients; False accumulates them on each rank.
            recurse: True applies to all units at and below this module, False to this unit only.
        """
        _configure(self, recurse, sync_gradients=check_bool("requires_gradient_sync", requires_gradient_sync))

    def set_reshard_after_forward(self, reshard_after_forward: bool | int | None, recurse: bool = True) -> None:
        """Set whether forward frees the unsharded parameters, from the next forward on.

        It is collective if it sets a new subgroup size.

        Args:
            reshard_after_forward: True, False, None or an int, as in `fully_shard`. An int is the number of neighbouring ranks
                (the subgroup size) that keep one copy of the parameters.
            recurse: True applies to all units at and below this module, False to this unit only.

        Raises:
            ValueError: for another type, a number that does not divide the shard mesh dim, or a value that the level excludes.
            StateError: if the subgroup size changes in a forward or backward, or while reduced gradients are not in `.grad`.
        """
        parsed = [
            (unit, *parse_reshard_after_forward(reshard_after_forward, unit.axis.ranks, unit.options.states))
            for unit in units_of(self, check_bool("recurse", recurse))
        ]
        doing = "set_reshard_after_forward()"
        for unit, _, size in parsed:
            if size != unit.options.subgroup_size:
                unit.check_rebuildable(doing=doing)
        meet([unit for unit, _, size in parsed if size not in (None, unit.options.subgroup_size)], doing)
        for unit, policy, size in parsed:
            if size == unit.options.subgroup_size:
                unit.configure(keep_after_forward=policy)
            else:
                unit.reconfigure(doing=doing, keep_after_forward=policy, subgroup_size=size)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether backward frees the unsharded parameters.

        If it keeps them, the next forward all-gathers them again only if the shards were written since, for example by an
        optimizer step. Units under `ZERO1` and `ZERO2` keep them in any case.

        Args:
            reshard_after_backward: False keeps the unsharded parameters, for steps of several microbatches.
            recurse: True applies to all units at and below this module, False to this unit only.
        """
        _configure(self, recurse, keep_after_backward=not check_bool("reshard_after_backward", reshard_after_backward))

    def set_states(self, states: StateSharding, *, recurse: bool = True) -> None:
        """Change the level of ZeRO between two steps. Collective.

        Parameters that the new level keeps unsharded are all-gathered at once, so a lack of memory shows here. Parameters
        that it no longer keeps are freed at once. Optimizers, gradients and state dicts do not change.

        Args:
            states: the new level, as in `fully_shard`.
            recurse: True applies to all units at and below this module, False to this unit only.

        Raises:
            ValueError: if `states` is no StateSharding or shards the optimizer's states over other mesh dims than before.
            StateError: inside a forward or backward, or while gradients are not in `.grad` yet.

        Example:
            >>> model.set_states(fullshard.ZERO2)                                             # doctest: +SKIP
        """
        if not isinstance(states, StateSharding):
            raise ValueError(f"Expected a StateSharding as states, for example fullshard.ZERO2, got {type(states).__name__}.")
        units = units_of(self, check_bool("recurse", recurse))
        for unit in units:
            if states.optimizer != unit.options.states.optimizer:
                raise ValueError(
                    f"Expected states with optimizer={unit.options.states.optimizer} for unit '{unit.name}', as in "
                    f"fully_shard(), got {states}: the shards that the optimizer holds cannot change. To change them, save a "
                    "checkpoint and load it into a model that is sharded with the new level."
                )
            unit.check_idle(doing="set_states()")
            unit.check_step_over(doing="set_states()")
        for unit in units:
            unit.configure(states=states)
            if not states.keeps_parameters and not unit.record.is_pinned:
                unit.ensure_sharded(doing="set_states()")
        for runtime in dict.fromkeys(unit.runtime for unit in units):
            runtime.unshard_kept([unit for unit in units if unit.runtime is runtime])

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over the replicas of a hybrid mesh (HSDP).

        If False, backward only reduce-scatters the gradients, and accumulates the results in the reduce dtype until a backward
        with all-reduce. Without replicas this concerns only scalar parameters, and units with an all-reduce hook.

        Args:
            requires_all_reduce: False defers the all-reduce over replicas to a later backward.
            recurse: True applies to all units at and below this module, False to this unit only.
        """
        configure_reductions(self, recurse, all_reduce=check_bool("requires_all_reduce", requires_all_reduce))

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Set the factor to divide reduced gradients by, instead of the number of ranks that contribute to them.

        Args:
            factor: a finite number above 0, equal on all ranks; None restores the number of ranks.
            recurse: True applies to all units at and below this module, False to this unit only (the default, as in FSDP2).

        Raises:
            ValueError: for any other factor.
        """
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if factor is not None and not (number and 0 < factor < float("inf")):
            raise ValueError(f"set_gradient_divide_factor takes a number > 0 or None, got {factor!r}.")
        configure_reductions(self, recurse, divide=None if factor is None else float(factor))

    def reset_iter_state(self) -> None:
        """Reset the state of a step that an exception interrupted, and discard all of its gradients.

        The next forward resets the interrupted forward or backward by itself. This method also discards every `.grad`, the
        gradients that earlier backwards accumulated without communication, and reductions in flight: if a
        handle of `finalize_backward(async_op=True)` waits for them, its `wait()` raises StateError.
        """
        for unit in units_of(self, True):
            unit.runtime.recover()
            unit.runtime.abort_if_left(unit)
            unit.runtime.reducer.discard(unit)
            for parameter in unit.parameters:
                parameter.sharded.grad = None

    def resident(self) -> AbstractContextManager[None]:
        """Keep all units at and below this module unsharded inside a `with` block: `fullshard.resident(self)`. Collective.

        Returns:
            The context manager.
        """
        return resident(self)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients without communication inside a `with` block. The first backward after it reduces the sum.

        `model.zero_grad()` discards the accumulated gradients; `optimizer.zero_grad()` does not reach them.

        Example:
            >>> with model.accumulate():                                                          # doctest: +SKIP
            ...     for batch in batches[:-1]:
            ...         model(batch).backward()
            >>> model(batches[-1]).backward()                                                     # doctest: +SKIP
        """
        units = units_of(self, True)
        before = [unit.options.sync_gradients for unit in units]
        for unit in units:
            unit.configure(sync_gradients=False)
        try:
            yield
        finally:
            for unit, sync in zip(units, before):
                unit.configure(sync_gradients=sync)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply `fn` to the shards, as in `to`, `half` and `to_empty`, then copy them back into the flat shards."""
        with refreshing_shards(self, require_unit(self), fn):
            _original_class(self)._apply(fn, recurse)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the sharded parameters, and discard gradients accumulated by `accumulate()`.

        It may be called while unsharded parameters are registered.

        Args:
            set_to_none: True sets `.grad` to None; False fills it with zeros.

        Source: `torch.nn.Module.zero_grad`.
        """
        discard_gradients(self, set_to_none=set_to_none)
        _original_class(self).zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a sharded copy with separate units on the same meshes. Raises StateError inside forward or backward."""
        return from_snapshot(to_snapshot(self, memo))

    def __copy__(self) -> Any:
        raise StateError(
            f"A sharded {type(self).__name__} cannot be copied shallowly: the copy would share its units. Use copy.deepcopy."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the structure with this rank's shards, to be loaded on the same rank of an equal mesh."""
        return from_snapshot, (to_snapshot(self),)

    def extra_repr(self) -> str:
        """Return the module's own `extra_repr`, followed by the unit: parameters, elements, groups, rank and residency.

        Returns:
            The text.
        """
        own = _original_class(self).extra_repr()
        unit = unit_of(self)  # not `require_unit`: a repr must not wait for collectives, even after an interrupt
        summary = "" if unit is None else unit_summary(unit)
        return f"{own}, {summary}" if own and summary else own or summary


F = TypeVar("F", bound=Callable[..., Any])


def sharded_method(function: F) -> F:
    """Add `function` to the methods of sharded modules under its name (an extension point)."""
    setattr(FSDPModule, function.__name__, function)
    return function


def units_by_runtime(module: Any) -> dict[Runtime, list[Unit]]:
    """Return the units at and below `module` by runtime. Devices, and units with `lanes`, have their own."""
    any_unit(module)
    found: dict[Runtime, list[Unit]] = {}
    for unit in units_of(module, True):
        found.setdefault(unit.runtime, []).append(unit)
    return found


def _original_class(module: FSDPModule) -> Any:
    """Return a `super()` that starts at the original class: torch's FSDPModule, a base for `isinstance` only, is skipped."""
    return super(_torch.TorchFSDPModule, module)


def unit_summary(unit: Unit) -> str:
    """Return one line about a unit, for the repr of its module."""
    numel = sum(parameter.sharded.numel() for parameter in unit.parameters)
    return (
        f"unit of {len(unit.parameters)} parameters ({numel:,} elements) in {len(unit.groups)} groups, "
        f"rank {unit.axis.rank} of {unit.axis.ranks}, {unit.residency.value}"
    )


@contextmanager
def refreshing_shards(module: nn.Module, unit: Unit, fn: Any) -> Iterator[None]:
    """Copy the shards of `unit` into its flat shards after the block, in which `_apply(fn)` replaced or wrote the shards."""
    for below in units_of(module, True):  # check all of them before the first one changes
        awaits_backward = below.runtime.scheduler.awaits_backward(below.number)
        if not awaits_backward and not below.runtime.reducer.is_undelivered(below):
            continue
        samples = [(old, fn(old)) for old in (group.shard[:0] for group in below.groups)]
        if any((new.dtype, new.device) != (old.dtype, old.device) for old, new in samples):
            below.check_idle(doing="moving or casting")
            if awaits_backward:
                raise StateError(
                    f"Unit '{below.name}' cannot change dtype or device between its forward and its backward. Run the backward "
                    "first, or delete the outputs of the forward, such as the loss."
                )
            below.runtime.reducer.check_delivered(below, doing="a change of dtype or device")
    unit.ensure_sharded(doing="moving or casting")
    allocates = _torch.allocates(fn)
    unwritten = {id(parameter) for parameter in unit.parameters if allocates and parameter.local.device.type == "meta"}
    allocated = [begin(unit) for begin in ALLOCATION if allocates]
    attributes = [dict(parameter.sharded.__dict__) for parameter in unit.parameters]
    tables = [_torch.parameters_of(inner) for inner in own_modules(*unit.modules)]
    ignored = [(table, name) for table in tables for name, one in table.items() if one is not None and is_ignored(one)]
    gradients = _taken_gradients(unit)
    try:
        yield
    except BaseException:
        for parameter, gradient in gradients:
            parameter.sharded.grad = gradient
        raise
    for parameter, had in zip(unit.parameters, attributes):  # torch swaps the contents of DTensors, attributes included
        for key, value in had.items():
            parameter.sharded.__dict__.setdefault(key, value)
    for table, name in ignored:  # a parameter from meta is a new object now
        if (again := table[name]) is not None:
            mark_ignored(again)
    unit.refresh(unwritten)
    for parameter, gradient in gradients:
        local = _torch.local_tensor(gradient).to(parameter.local.device)
        _torch.set_grad_dtype(parameter.sharded, parameter.grad_dtype.dtype)
        parameter.sharded.grad = parameter.dtensor_like_shard(local)
    for notify in allocated:
        notify()


def _taken_gradients(unit: Unit) -> list[tuple[ShardedParameter, Any]]:
    """Remove and return the gradients of parameters with an explicit `grad_dtype`: a cast of the module must not cast them."""
    taken: list[tuple[ShardedParameter, Any]] = []
    for parameter in unit.parameters:
        if parameter.adopt_grad_dtype():
            unit.gathers_decided = False
        gradient = parameter.sharded.grad
        if parameter.grad_dtype.explicit and isinstance(gradient, DTensor):
            taken.append((parameter, gradient))
            parameter.sharded.grad = None
    return taken


def discard_gradients(module: nn.Module, *, set_to_none: bool) -> None:
    """Discard gradients that `nn.Module.zero_grad` misses: kept on this rank, in flight, or of unregistered parameters."""
    for unit in units_of(module, True):
        if unit.runtime.reducer.is_undelivered(unit):
            unit.runtime.reducer.discard(unit)
        shows_full = unit.shows_full
        for parameter in unit.parameters:
            grad = parameter.sharded.grad
            if shows_full and grad is not None and not set_to_none:
                grad.detach_().zero_()
            elif shows_full:
                parameter.sharded.grad = None
            elif parameter.unsharded is not None:
                parameter.unsharded.grad = None  # of a use outside of forward, after unshard(); nothing has reduced it
        for group in unit.groups:
            if group.grads.has_local:
                group.grads.discard()


def meet(units: Sequence[Unit], doing: str) -> None:
    """Wait for all ranks of these units, before the call that `doing` names creates process groups on them. Collective."""
    for unit in {unit.axis.key: unit for unit in reversed(units)}.values():
        unit.agreement(doing).barrier()


def _configure(module: Any, recurse: bool, **changes: object) -> None:
    """Change options of the unit of `module`, or with `recurse` of all units at and below it. Hooks read them anew."""
    for unit in units_of(module, check_bool("recurse", recurse)):
        unit.configure(**changes)


def configure_reductions(module: Any, recurse: bool, **changes: Any) -> None:
    """Change fields of `UnitOptions.reduce` of the unit of `module`, or with `recurse` of all units at and below it."""
    for unit in units_of(module, check_bool("recurse", recurse)):
        unit.configure(reduce=replace(unit.options.reduce, **changes))


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Keep all units at and below `module` unsharded inside the block, for generation. Collective.

    Forwards inside the block do not free the parameters. Each unit is all-gathered once, and again only after its shards were
    written.

    Args:
        module: a sharded module, or a module that contains sharded modules.

    Raises:
        StateError: inside a forward or backward; at the end of the block, if an unsharded parameter was written.

    Example:
        >>> with model.resident(), torch.no_grad():                                           # doctest: +SKIP
        ...     tokens = model.generate(prompt)
    """
    units = units_of(module, True)
    with ExitStack() as ends:  # if one unit raises, since the caller wrote to it, the others are resharded
        for unit in units:
            unit.enter_resident()
            ends.callback(unit.leave_resident)
        yield


def any_unit(module: nn.Module) -> Unit:
    """Return a unit at or below `module`. Raise StateError if there is none."""
    units: Sequence[Unit] = units_of(module, True)
    if not units:
        raise StateError(f"{type(module).__name__} contains no sharded module. Call fully_shard() first.")
    return units[0]
