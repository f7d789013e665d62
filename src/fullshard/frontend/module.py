"""The methods of a sharded module: the class that is mixed into it, the handle of an asynchronous gather, and counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.collectives.custom import AllGather, ReduceScatter
from fullshard.collectives.traffic import Message
from fullshard.errors import StateError, warn_once
from fullshard.frontend import class_swap, forward_methods
from fullshard.frontend.fsdp2_state import UnitView
from fullshard.params.shard_values import discard_gradient
from fullshard.params.sharded_param import ShardedParameter
from fullshard.runtime import lint
from fullshard.runtime.finalization import PendingReduction
from fullshard.runtime.runtime import Runtime, runtime_of
from fullshard.runtime.unit import Unit, unit_of
from fullshard.runtime.unwritten import mark_unwritten, on_meta
from fullshard.schedule.prefetch import Stats
from fullshard.schedule.residency import ReshardPolicy

M = TypeVar("M", bound=nn.Module)


class UnshardHandle:
    """A gather under way, as `FSDPModule.unshard(async_op=True)` returns it; `wait()` installs the full parameters.

    Args:
        unit: the unit whose gather was started. Callers make no handles themselves.

    Source: `torch.distributed.fsdp.UnshardHandle`.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Order the current stream behind the gather and install the full parameters. Later calls do nothing.

        Raises:
            StateError: if the process group was destroyed, or the ranks gather different units.
        """
        if self._unit is not None:
            runtime_of(self._unit).requests.ensure_gathered(self._unit)
            self._unit = None


class GradientReductionHandle(_torch.GradientReductionHandle):  # type: ignore[misc]
    """Gradients that are reduced, as `FSDPModule.finalize_backward(async_op=True)` returns it; `wait()` sets `.grad`.

    Args:
        pending: the reductions under way. A bare handle waits for nothing.

    Source: `torch.distributed.fsdp.GradientReductionHandle` (torch 2.15), whose subclass it is where that exists.
    """

    def __init__(self, pending: PendingReduction | None = None) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Order the current stream behind the reductions and set `.grad`. Sends nothing. Later calls do nothing.

        Raises:
            StateError: if `zero_grad()` or `reset_iter_state()` dropped the reductions, or the ranks diverged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            runtime_of(pending.units[0]).finalization.finish(pending)


_SHARDED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of class `cls` once it is sharded, one per class."""
    found = _SHARDED_CLASSES.get(cls)
    if found is None:
        found = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        found = _SHARDED_CLASSES.setdefault(cls, found)  # another thread may have made one meanwhile
    return found


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The inverse of `sharded_class`; a class that is none of those stays as it is."""
    made = next((base for base in cls.__mro__ if base.__bases__[:1] == (FSDPModule,)), None)
    return cls if made is None else made.__bases__[1]


def keep_of(reshard_after_forward: bool | int | None, ranks: int) -> tuple[ReshardPolicy, int | None]:
    """The reshard policy that an argument means, and how many ranks keep one copy together if they keep a part."""
    if reshard_after_forward is None:
        return ReshardPolicy.OUTERMOST, None
    if isinstance(reshard_after_forward, bool):
        return (ReshardPolicy.NEVER if reshard_after_forward else ReshardPolicy.ALWAYS), None
    if not isinstance(reshard_after_forward, int):
        raise ValueError(f"reshard_after_forward must be True, False, an int or None, got {reshard_after_forward!r}")
    if reshard_after_forward < 1 or ranks % reshard_after_forward:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the {ranks} ranks that parameters are sharded "
            f"over: take one of {[k for k in range(1, ranks + 1) if ranks % k == 0]}"
        )
    if reshard_after_forward == ranks:
        return ReshardPolicy.NEVER, None
    if reshard_after_forward == 1:
        warn_once("reshard_after_forward=1 keeps all parameters after forward: it is taken as False, which says so")
        return ReshardPolicy.ALWAYS, None
    return ReshardPolicy.PARTLY, reshard_after_forward


class FSDPModule(_torch.TorchFSDPModule):  # type: ignore[misc]
    """Mixed into the class of every module given to `fully_shard`; not made by itself.

    Has the methods of torch's class of this name (and is one, for `isinstance`), on the units of fullshard. With `recurse`
    a setter reaches every unit at or below the module, without it this unit alone; the defaults are FSDP2's. Every setter
    works at any time between steps. Where one takes True or False, any other value (1, None, "no") is a ValueError.

    Source: `torch.distributed.fsdp.FSDPModule`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing the class of a sharded module gives an ordinary one: `sharded_sequential[0:2]` is a plain Sequential."""
        original = plain_class(cls)
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and install them until `reshard()`, or its forward or backward, frees them. Collective.

        Args:
            async_op: whether to start the gather only.

        Returns:
            With `async_op=True` the handle whose `wait()` installs the parameters, else None.

        Raises:
            ValueError: if `async_op` is neither True nor False.

        Example:
            >>> handle = model.blocks[1].unshard(async_op=True)                                   # doctest: +SKIP
            >>> hidden = model.blocks[0](hidden)                                                  # doctest: +SKIP
            >>> handle.wait()                                                                     # doctest: +SKIP
        """
        unit = _unit(self)
        _flag("async_op", async_op)
        runtime_of(unit).requests.start_unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters.

        Raises:
            StateError: while the unit's forward or backward runs, or inside `full_params()`.
        """
        unit = _unit(self)
        runtime_of(unit).requests.reshard(unit)

    def join(self) -> torch.Tensor:
        """Take part in the collectives of this unit and those below, forward and backward, without computing anything.

        For a rank that has no work for a unit that others run: no image for the vision tower, no batch at the end of an
        epoch, no token for an expert. Call it where the forward would be, at the same place of the program on all ranks. The
        units below are entered as the last time this unit ran on this rank, before that in the order they are registered in.
        Backward follows by itself, in the backward of whatever else this rank computed; gradients are as if this rank's loss
        did not depend on the unit.

        Ranks that compute must not recompute several units in one checkpoint (torch.utils.checkpoint around a module with units
        below it): they would run them once more, and this rank does not know. Checkpoint the units one by one.

        Returns:
            A zero, 0-dim, to be added to the loss of a rank that computes nothing else: `model.join().backward()`.

        Raises:
            StateError: inside a backward, or for a unit of several modules at or below this one.

        Example:
            >>> features = model.vision(images) if images is not None else model.vision.join()      # doctest: +SKIP
        """
        unit = _unit(self)
        return runtime_of(unit).join(unit)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward of the units at and below is the last of the step.

        A backward that is not the last does not wait for its reductions; the last one waits for all of them and sets `.grad`.

        Args:
            is_last_backward: False for all microbatches but the last.

        Raises:
            ValueError: if it is neither True nor False.
        """
        last = _flag("is_last_backward", is_last_backward)
        for unit in units_of(self, True):
            unit.configure(last_backward=last)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Have `finalize_backward()` end the backwards of the units at and below, instead of autograd.

        Backwards then reduce gradients, or keep them without gradient sync, and set no `.grad`. The mode goes before
        `set_is_last_backward`. It suits schedules in which reducing is a step of its own, as pipelines have it.

        Args:
            enabled: False lets autograd's backward end the step again.

        Raises:
            ValueError: if it is neither True nor False.
            StateError: inside a backward, or while there are gradients that no parameter has yet, if the mode changes.

        Example:
            >>> model.set_manual_backward_finalization(True)                                      # doctest: +SKIP
            >>> model.set_requires_gradient_sync(False)                                           # doctest: +SKIP
            >>> for batch in batches:                                                             # doctest: +SKIP
            ...     model(batch).mean().backward()
            >>> model.set_requires_gradient_sync(True)                                            # doctest: +SKIP
            >>> model.finalize_backward()                                                         # doctest: +SKIP
        """
        manual = _flag("enabled", enabled)
        for runtime, units in _units_by_runtime(self):
            runtime.finalization.set_manual(units, manual)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since the last call: reduce what none of them reduced, and set `.grad`. Collective.

        Every trainable parameter of a unit with gradient sync is in one reduction, with zeros on a rank that has no gradient.
        Full parameters are freed as `set_reshard_after_backward` says now. Before the first forward it does nothing.

        Args:
            async_op: whether to start the reductions only.

        Returns:
            With `async_op=True` the handle whose `wait()` sets `.grad`, else None. Until then the units run no forward.

        Raises:
            ValueError: if `async_op` is neither True nor False.
            StateError: without `set_manual_backward_finalization(True)`, inside a forward or backward, before the `wait()` of
                the last call, while sums over replicas are put off, or if the ranks diverged.
        """
        pending: list[PendingReduction] = []
        start_only = _flag("async_op", async_op)
        for runtime, units in _units_by_runtime(self):
            if any(unit.record.last is not None for unit in units):
                pending.append(runtime.finalization.start(units))
        handle = _CombinedHandle(pending) if len(pending) > 1 else GradientReductionHandle(*pending)
        if start_only:
            return handle
        handle.wait()
        return None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of full parameters and messages where it is, so that addresses are the same in every step.

        `reshard()` then gives no memory back: it costs that of all full parameters, and the largest message of a reduction
        once more. Parameters are gathered as often as before. From the third step on no address changes, but for memory of
        the caller's own collectives and tensor subclasses. Reductions run one at a time.

        Args:
            keep: False gives memory back at the next reshard.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: if an argument is neither True nor False.
        """
        kept = _flag("keep", keep)
        for unit in units_of(self, _flag("recurse", recurse)):
            unit.keep_memory(kept)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backward reduces gradients.

        Without it each rank keeps its own gradients, in the reduce dtype and of full size, until a backward that reduces their
        sum. `accumulate()` does that for the length of a block.

        Args:
            requires_gradient_sync: False keeps gradients on each rank.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: if an argument is neither True nor False.
        """
        sync = _flag("requires_gradient_sync", requires_gradient_sync)
        for unit in units_of(self, _flag("recurse", recurse)):
            unit.configure(sync_gradients=sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool | int | None, recurse: bool = True) -> None:
        """Change `reshard_after_forward`, from the next forward on. Collective where the size of the smaller group changes.

        Args:
            reshard_after_forward: as the argument of `fully_shard`: True, False, None, or the number of neighbours that keep
                one copy together.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: for another type, or a number that does not divide the ranks of the shard axis.
            StateError: inside a forward or backward, where the size of the smaller group changes.
        """
        told = [(unit, *keep_of(reshard_after_forward, unit.axis.ranks)) for unit in units_of(self, _flag("recurse", recurse))]
        for unit, policy, size in told:
            if size == unit.options.subgroup_size:
                unit.configure(reshard_policy=policy)
            else:
                doing = "set_reshard_after_forward()"
                runtime_of(unit).requests.reconfigure(unit, doing=doing, reshard_policy=policy, subgroup_size=size)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether backward frees the full parameters. If not, they are gathered again only once the shards were written.

        Args:
            reshard_after_backward: False keeps the full parameters, for steps of several microbatches.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: if an argument is neither True nor False.
        """
        keep = not _flag("reshard_after_backward", reshard_after_backward)
        for unit in units_of(self, _flag("recurse", recurse)):
            unit.configure(keep_after_backward=keep)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward sums gradients over the replicas of a hybrid mesh.

        If not, backward only reduces them over shards and keeps that, in the reduce dtype, until a backward that sums over the
        replicas too. Without replicas there is nothing to put off.

        Args:
            requires_all_reduce: False puts the sum over replicas off.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: if an argument is neither True nor False.
        """
        reduces = _flag("requires_all_reduce", requires_all_reduce)
        for unit in units_of(self, _flag("recurse", recurse)):
            unit.configure(reduce=replace(unit.options.reduce, all_reduce=reduces))

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Divide summed gradients by `factor` instead of by the number of ranks they come from.

        Args:
            factor: a finite number above 0; None is the number of ranks again.
            recurse: whether the units below are meant as well; as in FSDP2 they are not, unless it is said.

        Raises:
            ValueError: for any other factor.
        """
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if factor is not None and not (number and 0 < factor < float("inf")):
            raise ValueError(f"set_gradient_divide_factor takes a number > 0 or None, got {factor!r}")
        for unit in units_of(self, _flag("recurse", recurse)):
            unit.configure(reduce=replace(unit.options.reduce, divide=None if factor is None else float(factor)))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce with sums alone, scaled separately. fullshard always does, so that any backend and any factor will do.

        Args:
            enable: True or False, which make no difference.

        Raises:
            ValueError: if it is neither True nor False.
        """
        _unit(self)
        _flag("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for parameters that a rank did not use. fullshard always does: every rank sends the same messages.

        Args:
            reduce_scatter_unused_params: True or False, which make no difference.
            recurse: likewise.

        Raises:
            ValueError: if an argument is neither True nor False.
            StateError: if there is no unit at or below this module.
        """
        any_unit(self)
        _flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _flag("recurse", recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limit how many groups' gradients are on their way at a time, from the next reduction on.

        Args:
            max_input_buffers: groups, at least 1; backward waits for the oldest before it starts one more.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: if it is no int, or less than 1.
        """
        most = max_input_buffers
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ValueError(f"max_input_buffers must be an int >= 1, got {most!r}")
        for unit in units_of(self, _flag("recurse", recurse)):
            unit.configure(comm=replace(unit.options.comm, reductions_in_flight=most))

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reductions a process group of their own, so that they need not queue behind gathers. Collective.

        Args:
            enable: False takes the process group of the gathers again.
            recurse: whether the units below are meant as well.

        Raises:
            ValueError: if an argument is neither True nor False.
            StateError: inside a forward or backward.
        """
        separate = _flag("enable", enable)
        for unit in units_of(self, _flag("recurse", recurse)):
            runtime_of(unit).requests.reconfigure(unit, doing="set_separate_reduce_scatter_group()", separate_reduce=separate)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Call `hook` with each reduced flat gradient of this unit.

        The hook may change it in place, by a sum over further replicas say. It runs behind the reduce-scatter and the sum over
        replicas, on their lane or on `stream`, in an order that is the same on every rank; a unit of several groups has
        one call for each.

        Args:
            hook: called with a tensor (elements of this rank's shard,) in the reduce dtype; None removes the hook.
            stream: of the mesh's device, to call `hook` on; None is the lane of the reductions.

        Raises:
            ValueError: if `hook` is no callable, or for a stream where the mesh computes on the CPU.
        """
        if hook is not None and not callable(hook):
            raise ValueError(f"set_all_reduce_hook takes a callable or None, got {type(hook).__name__}")
        if stream is not None and runtime_of(_unit(self)).communicator.away is None:
            raise ValueError("set_all_reduce_hook got a stream, but the mesh of this unit computes on the CPU: leave it out")
        unit = _unit(self)
        unit.configure(reduce=replace(unit.options.reduce, hook=hook, hook_stream=stream))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this unit: FSDP2's deprecated name of `set_gradient_divide_factor`.

        Args:
            factor: a finite number above 0.

        Raises:
            ValueError: for any other factor.
        """
        self.set_gradient_divide_factor(factor)

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """While this unit computes forward, gather these units, instead of those that the last run needed next.

        Args:
            modules: modules that `fully_shard` was called on, in the order to gather them; an empty list gathers none ahead.

        Raises:
            ValueError: for anything else, or for a unit that has lanes or a device of its own.

        Example:
            >>> for block, following in zip(model.blocks, model.blocks[1:]):                      # doctest: +SKIP
            ...     block.set_modules_to_forward_prefetch([following])
        """
        unit = _unit(self)
        unit.record.next_forward = _numbers_given(modules, unit)

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """While this unit's backward computes, gather these units, instead of those that the last run needed next.

        Args:
            modules: modules that `fully_shard` was called on, in the order to gather them; an empty list gathers none ahead.

        Raises:
            ValueError: for anything else, or for a unit that has lanes or a device of its own.
        """
        unit = _unit(self)
        unit.record.next_backward = _numbers_given(modules, unit)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether this unit's backward needs its parameters. That of an embedding does not, and saves a gather.

        If backward needs them after all, autograd raises: parameters that were freed are marked as written.

        Args:
            unshard_in_backward: False leaves the gather before backward out.

        Raises:
            ValueError: if it is neither True nor False.
        """
        _unit(self).configure(in_backward=_flag("unshard_in_backward", unshard_in_backward))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether gathers take their memory from the compute stream. fullshard's always do, and are asynchronous."""
        any_unit(self)
        _flag("async_op", async_op)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters with `comm`, in memory that it allocates: one message per gather and group.

        Args:
            comm: an `AllGather`, or any callable with an `allocate` method of that interface.

        Raises:
            ValueError: for anything else.
            StateError: inside a forward or backward.
        """
        _check_comm(comm, "set_custom_all_gather", "AllGather")
        unit = _unit(self)
        runtime_of(unit).requests.reconfigure(unit, doing="set_custom_all_gather()", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients with `comm`, in memory that it allocates: one message per reduction and group.

        Args:
            comm: a `ReduceScatter`, or any callable with an `allocate` method of that interface.

        Raises:
            ValueError: for anything else.
            StateError: inside a forward or backward.
        """
        _check_comm(comm, "set_custom_reduce_scatter", "ReduceScatter")
        unit = _unit(self)
        runtime_of(unit).requests.reconfigure(unit, doing="set_custom_reduce_scatter()", reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Say whether this unit's messages lie in memory of the process group's backend (NCCL's user buffers, say).

        Args:
            enable: False takes memory of fullshard's own again.

        Raises:
            ValueError: if the backend allocates no memory, or custom collectives were set.
            StateError: inside a forward or backward.
        """
        unit = _unit(self)
        _refuse_custom_collectives(unit)
        group, memory = unit.axis.group, None
        if _flag("enable", enable) and group is not None:
            memory = _torch.process_group_memory(group, unit.axis.device)
        runtime_of(unit).requests.reconfigure(unit, doing="set_allocate_memory_...()", memory=memory)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Have this unit's messages lie in symmetric memory. Collective.

        Args:
            backend: the name of torch's symmetric-memory backend, "NCCL" or "NVSHMEM" say.

        Raises:
            ValueError: where there is none (on the CPU), if custom collectives were set, or if `backend` is no name.
            StateError: inside a forward or backward.
        """
        unit = _unit(self)
        if not isinstance(backend, str):
            raise ValueError(f"set_symm_mem_for_comm takes the name of a backend, got {backend!r}")
        _refuse_custom_collectives(unit)
        group = unit.axis.group
        memory = None if group is None else _torch.symmetric_memory(group, unit.axis.device, backend)
        runtime_of(unit).requests.reconfigure(unit, doing="set_symm_mem_for_comm()", memory=memory)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Order the next forward, or `unshard()`, behind `event`, which an optimizer recorded on a stream of its own. Once.

        Gathers are ordered behind the current stream as well, whose memory they write to. The optimizer may read gradients
        until then: call `zero_grad()` after that forward, since the allocator gives freed memory to the current stream at once.

        Args:
            event: a torch.Event (or one of the device, such as torch.cuda.Event) that was recorded after `optimizer.step()`.

        Raises:
            ValueError: if it has no `wait()`, or the mesh computes on the CPU, which has no streams.
            StateError: if there is no unit at or below this module.
        """
        unit = any_unit(self)
        if runtime_of(unit).communicator.away is None:
            raise ValueError("set_post_optim_event got an event, but the mesh computes on the CPU, which has no streams")
        if not callable(getattr(event, "wait", None)):
            raise ValueError(f"set_post_optim_event takes a torch.Event, got {type(event).__name__}")
        runtime_of(unit).communicator.next_event = event

    def reset_iter_state(self) -> None:
        """Forget a step that was interrupted by an exception, with all gradients that only this rank holds.

        The next forward forgets the interrupted part by itself; this also discards what earlier backwards without
        communication kept, as `zero_grad()` does, every `.grad`, and reductions whose handle was not waited for: its `wait()`
        raises.
        """
        for unit in units_of(self, True):
            runtime_of(unit).recovery.forget_step(unit)
            for parameter in unit.parameters:
                parameter.sharded.grad = None

    def _get_fsdp_state(self) -> UnitView:
        """The state that FSDP2's programs look at: `_fsdp_param_groups`, `_mp_policy`, `_state_ctx.all_states`."""
        return UnitView(_unit(self))

    def resident(self) -> AbstractContextManager[None]:
        """Keep all units at and below full for the length of a `with` block: `fullshard.resident(self)`. Collective.

        Returns:
            The context manager.
        """
        return resident(_module(self))

    def accumulate(self) -> AbstractContextManager[None]:
        """Backwards inside a `with` block keep their gradients on each rank; the first one after it reduces the sum of all.

        `model.zero_grad()` discards what was kept; an optimizer's `zero_grad()` does not see it.

        Returns:
            The context manager.

        Example:
            >>> with model.accumulate():                                                          # doctest: +SKIP
            ...     for batch in batches[:-1]:
            ...         model(batch).backward()
            >>> model(batches[-1]).backward()                                                     # doctest: +SKIP
        """
        return accumulate(_module(self))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `half`, `to_empty` and the like: on the shards, which then go back into flat memory."""
        with applying(_module(self), _unit(self), fn):
            _beyond(self)._apply(fn, recurse)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for the sharded parameters, also while full ones are installed; discards what `accumulate()` kept.

        Args:
            set_to_none: whether `.grad` becomes None; False fills it with zeros.

        Source: `torch.nn.Module.zero_grad`.
        """
        discard_gradients(_module(self), set_to_none=set_to_none)
        _beyond(self).zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A sharded copy with units of its own, on the same meshes. Raises StateError inside forward or backward."""
        return class_swap.put_together(class_swap.take_apart(_module(self), plain_class, memo), sharded_class)

    def __copy__(self) -> Any:
        raise StateError(f"a shallow copy of a sharded {type(self).__name__} would share its units: use copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the structure with this rank's shards; to be loaded on the same rank of an equal mesh."""
        return _put_together, (class_swap.take_apart(_module(self), plain_class),)

    def extra_repr(self) -> str:
        """The module's own line of its repr, and behind it the unit: parameters, elements, groups, rank and residency.

        Returns:
            One line of text.
        """
        own = _beyond(self).extra_repr()
        said = described(_unit(self))
        return f"{own}, {said}" if own else said


class _CombinedHandle(GradientReductionHandle):
    """The reductions of a model whose units are on several devices or lanes of their own."""

    def __init__(self, pending: Sequence[PendingReduction]) -> None:
        self._parts = [GradientReductionHandle(one) for one in pending]

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


def _units_by_runtime(module: Any) -> Iterator[tuple[Runtime, list[Unit]]]:
    """The units at and below `module`, by what runs them: one runtime, unless a policy brings lanes of its own."""
    any_unit(module)
    found: dict[int, list[Unit]] = {}
    for unit in units_of(module, True):
        found.setdefault(id(unit.runtime), []).append(unit)
    for units in found.values():
        yield runtime_of(units[0]), units


def _beyond(module: FSDPModule) -> Any:
    """The class a sharded module had before; torch's FSDPModule, which comes first, is there for `isinstance` alone."""
    return super(_torch.TorchFSDPModule, module)


def described(unit: Unit) -> str:
    """One line about a unit, for the repr of its module."""
    numel = sum(parameter.sharded.numel() for parameter in unit.parameters)
    return (
        f"unit of {len(unit.parameters)} parameters ({numel:,} elements) in {len(unit.groups)} groups, "
        f"rank {unit.axis.rank} of {unit.axis.ranks}, {unit.residency.value}"
    )


@contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Backwards inside the block keep the gradients of all units at and below `module` on each rank."""
    units = list(units_of(module, True))
    before = [unit.options.sync_gradients for unit in units]
    for unit in units:
        unit.configure(sync_gradients=False)
    try:
        yield
    finally:
        for unit, sync in zip(units, before):
            unit.configure(sync_gradients=sync)


@contextmanager
def applying(module: nn.Module, unit: Unit, fn: Any) -> Iterator[None]:
    """Have the shards go back into flat memory after `_apply(fn)` of a module of `unit`, which writes to them."""
    for below in units_of(module, True):
        if runtime_of(below).reducer.is_undelivered(below) and below.changes(fn):
            runtime_of(below).requests.check_delivered(below, doing="a change of dtype or device")
    runtime_of(unit).requests.ensure_sharded(unit, doing="moving or casting")
    fresh = on_meta(unit) if _torch.allocates(fn) else None
    attributes = [dict(parameter.sharded.__dict__) for parameter in unit.parameters]
    ignored = list(lint.ignored_slots(unit))
    gradients = _taken_gradients(unit)
    yield
    for parameter, had in zip(unit.parameters, attributes):  # torch swaps the insides of a DTensor, attributes included
        for key, value in had.items():
            parameter.sharded.__dict__.setdefault(key, value)
    for held, name in ignored:  # what was on meta is another Parameter now
        if (again := held[name]) is not None:
            lint.mark_ignored(again)
    runtime_of(unit).requests.refresh(unit, () if fresh is None else fresh.parameter_ids)
    for parameter, gradient in gradients:
        local = _torch.local_tensor(gradient).to(parameter.local.device)
        _torch.set_grad_dtype(parameter.sharded, parameter.grad_dtype.dtype)
        parameter.sharded.grad = parameter.dtensor_like_shard(local)
    if fresh is not None:
        mark_unwritten(unit, fresh)


def _taken_gradients(unit: Unit) -> list[tuple[ShardedParameter, Any]]:
    """Take the gradients away that have a dtype of their own: a cast of the module would cast them, too."""
    taken: list[tuple[ShardedParameter, Any]] = []
    for parameter in unit.parameters:
        if parameter.has_new_grad_dtype(parameter.sharded):
            parameter.adopt_grad_dtype(parameter.sharded)
            unit.checks.gathers = True
        gradient = parameter.sharded.grad
        if parameter.grad_dtype.explicit and isinstance(gradient, DTensor):
            taken.append((parameter, gradient))
            parameter.sharded.grad = None
    return taken


def discard_gradients(module: nn.Module, *, set_to_none: bool) -> None:
    """Forget gradients of the units at and below `module` that `nn.Module.zero_grad` does not reach: kept, or on their way."""
    for unit in units_of(module, True):
        if runtime_of(unit).reducer.is_undelivered(unit):
            runtime_of(unit).reducer.discard(unit)
        for parameter in unit.parameters if unit.shows_full else ():
            discard_gradient(parameter, set_to_none=set_to_none)
        for group in unit.groups:  # the rest is in the slots, which torch's walks
            if group.grads.has_local:
                group.grads.discard()


def _put_together(parts: class_swap.ShardedSnapshot) -> nn.Module:
    return class_swap.put_together(parts, sharded_class)


def _module(module: Any) -> nn.Module:
    return module


def _flag(name: str, value: Any) -> bool:
    """An argument that is True or False. Raises ValueError for what merely counts as one of them ("no", None, 1)."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _numbers_given(modules: Any, beside: Unit | None = None) -> tuple[int, ...]:
    if not isinstance(modules, (list, tuple)):
        raise ValueError(f"expected a list of modules that fully_shard was called on, got {type(modules).__name__}")
    return tuple(_unit_given(module, beside).number for module in modules)


def _unit_given(module: Any, beside: Unit | None = None) -> Unit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ValueError(f"expected modules that fully_shard was called on, got {type(module).__name__}")
    if beside is not None and runtime_of(unit) is not runtime_of(beside):
        raise ValueError(f"unit '{unit.name}' has lanes or a device of its own, so unit '{beside.name}' cannot gather it ahead")
    return unit


def _check_comm(comm: Any, setter: str, kind: str) -> None:
    if not callable(comm) or not hasattr(comm, "allocate"):
        raise ValueError(f"{setter} takes an {kind} (callable, with allocate()), got {type(comm).__name__}")


def _refuse_custom_collectives(unit: Unit) -> None:
    """Raises ValueError if the unit has collectives of the caller's own, which bring their memory."""
    for comm in (unit.options.all_gather, unit.options.reduce_scatter):
        if comm is not None:
            raise ValueError(
                f"unit '{unit.name}' has custom collectives ({type(comm).__name__}), which allocate their own memory"
            )


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Keep all units at and below `module` full for the length of the block, whatever forwards end: for generation. Collective.

    They are gathered once, and again only if their shards were written meanwhile.

    Args:
        module: a module that is a unit, or holds some.

    Raises:
        StateError: inside a forward or backward.

    Example:
        >>> with model.resident(), torch.no_grad():                                           # doctest: +SKIP
        ...     tokens = model.generate(prompt)
    """
    units = list(units_of(module, True))
    inside: list[Unit] = []
    try:
        for unit in units:
            runtime_of(unit).requests.set_resident(unit, True)
            inside.append(unit)
        yield
    finally:
        for unit in inside:
            runtime_of(unit).requests.set_resident(unit, False)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have `module.method_name(...)` gather and free the unit's parameters as its forward does: `generate`, `encode`.

    Units below whose parameters the method reads without calling them (a tied projection, a chunked loss) are
    gathered when it first reads one, and freed when it ends. Does nothing for a module that is no unit.

    Args:
        module: a module that `fully_shard` was called on.
        method_name: an attribute of it that can be called.

    Raises:
        ValueError: if there is no such method, or it is a generator or coroutine, whose body runs after the call.

    Example:
        >>> register_fsdp_forward_method(model, "generate")                                   # doctest: +SKIP

    Source: `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method '{method_name}' to register")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ValueError(
            f"{type(module).__name__}.{method_name} is a generator or coroutine, whose body runs after the call has returned: "
            "use it inside `with model.resident():` instead"
        )
    setattr(module, method_name, forward_methods.wrap_method(module, method))


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Let several roots share lanes and order. All units of a device and thread do, so this only checks its input.

    Args:
        modules: a list of modules that `fully_shard` was called on.

    Raises:
        ValueError: for anything else.

    Source: `torch.distributed.fsdp.share_comm_ctx`.
    """
    _numbers_given(modules)


def undo(module: M) -> M:
    """Make an ordinary module with full parameters of a sharded one, in place and on every rank. Collective.

    Gradients, attributes, hooks, ties and trainability of its parameters stay.

    Args:
        module: a module that is a unit, or holds some.

    Returns:
        `module`, of the class it had before `fully_shard`.

    Raises:
        StateError: before anything has changed, while a forward or backward runs, or while gradients are only kept on each
            rank.

    Example:
        >>> torch.save(undo(model).state_dict(), "weights.pt")                                # doctest: +SKIP
    """
    class_swap.undo(module, plain_class)
    return module


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise StateError(f"this {type(module).__name__} is no unit: call fully_shard on it first")
    return unit


def units_of(module: Any, recurse: bool) -> Iterator[Unit]:
    """The units at and below `module`, each once; without `recurse` its own alone."""
    if not recurse:
        yield _unit(module)
        return
    seen: set[int] = set()
    for inner in module.modules():
        unit = unit_of(inner)
        if unit is not None and unit.number not in seen:
            seen.add(unit.number)
            yield unit


# --- looking -----------------------------------------------------------------------------------------------------------


@contextmanager
def counting(module: nn.Module) -> Iterator[list[Message]]:
    """The messages that the runtime of `module` sends while the block runs, in order.

    Args:
        module: a module that is a unit, or holds some.

    Yields:
        A list that grows by one `Message` for each collective or copy, of all units on the device and thread.

    Raises:
        StateError: if there is no unit at or below `module`.

    Example:
        >>> with counting(model) as messages:                                                 # doctest: +SKIP
        ...     model(batch).sum().backward()
        >>> sum(message.nbytes for message in messages if message.kind == "all_gather")       # doctest: +SKIP
    """
    with any_unit(module).runtime.communicator.traffic.counting() as messages:
        yield messages


def stats(module: nn.Module) -> Stats:
    """A snapshot of how the runtime of `module` gathered so far, for all its units.

    If many gathers could have been issued ahead, had units run in the order of the step before, a remark says so, once.

    Args:
        module: a module that is a unit, or holds some.

    Returns:
        Counts: gathers, those issued ahead, those of them that no forward or backward used, and those that were missed.

    Raises:
        StateError: if there is no unit at or below `module`.
    """
    unit = any_unit(module)
    lint.remark_on_prefetch(unit)
    return replace(unit.runtime.planner.prefetch.stats)


def any_unit(module: nn.Module) -> Unit:
    """A unit at or below `module`. Raises StateError if there is none."""
    units: Sequence[Unit] = list(units_of(module, True))
    if not units:
        raise StateError(f"no module in this {type(module).__name__} is a unit: call fully_shard first")
    return units[0]


__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "accumulate",
    "any_unit",
    "applying",
    "counting",
    "described",
    "discard_gradients",
    "keep_of",
    "plain_class",
    "register_fsdp_forward_method",
    "resident",
    "sharded_class",
    "share_comm_ctx",
    "stats",
    "undo",
    "units_of",
]
