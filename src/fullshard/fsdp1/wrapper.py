"""FSDP1's wrapper, `FullyShardedDataParallel`, implemented with units of `fully_shard`."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fullshard import _torch
from fullshard.core import (
    Agreement,
    ManagedTensors,
    Runtime,
    ShardAxis,
    StartedWork,
    Unit,
    UnitName,
    cast_floats,
    clean_name,
    collect,
    collectives_for,
    resolve_mesh,
    shard_of,
    stream_for,
    unit_of,
    units_of,
)
from fullshard.errors import StateError, warn_once
from fullshard.ext.full_params import full_params
from fullshard.frontend.api import PreparedShard, fully_shard
from fullshard.frontend.module import (
    FSDPModule,
    discard_gradients,
    refreshing_shards,
    unit_summary,
)
from fullshard.fsdp1 import state_dicts
from fullshard.fsdp1.arguments import HYBRID, FSDP1Arguments, cast_buffers, materialize, precision_of
from fullshard.fsdp1.state_dicts import StateDictFormat
from fullshard.fsdp2.collectives import CustomCollectives, ReduceScatter
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.policies import CommPolicy
from fullshard.state.class_swap import ShardedSnapshot, from_snapshot, plain_class, to_snapshot, with_original_classes
from fullshard.wrap.plan import Plan
from fullshard.wrap.whole_model import check_policy, own_dtype, plan_model, warn_about_mixtures

# Names of the calls in the collective log, also for FSDP1's older functions.
_SAVING, _LOADING = "optim_state_dict()", "optim_state_dict_to_load()"
_WRAPPED_MODULE = "_fsdp_wrapped_module"
_OTHER_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # set by activation checkpointing, torch.compile


def _hooked_collectives(group: dist.ProcessGroup, *, device: torch.device, hook: Callable[[Tensor], None]) -> Any:
    """Return the collectives of a group over replicas. `hook` averages a flat gradient over them, instead of an all-reduce."""

    def all_reduce(tensor: Tensor) -> StartedWork:
        hook(tensor)  # hooks of FSDP1 are synchronous, so the returned work is complete
        return StartedWork()

    collectives: Any = collectives_for(group, device)
    collectives.all_reduce = all_reduce
    return collectives


class _HookReduceScatter(ReduceScatter):
    """Reduce-scatter of a unit that calls a communication hook of FSDP1."""

    def __init__(self, state: object, hook: Callable[..., None]) -> None:
        self._state, self._hook = state, hook

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._hook(self._state, input_tensor, output_tensor)
        return None


# --- the wrapper ----------------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """FSDP1's wrapper around a module, with FSDP1's interface; the wrapped module is a unit of `fully_shard`.

    A script written for `torch.distributed.fsdp.FullyShardedDataParallel` runs with only the import changed. Enums and config
    classes are torch's own. docs/from-fsdp1.md lists the effect of each argument and method, and the shortest rewrite to
    `fully_shard`. Parameters are DTensors, so there is no FlatParameter. The wrapper also runs on the CPU.

    Args:
        module: sharded in place. With `auto_wrap_policy`, its submodules are wrapped first, and replaced in their parents.
        process_group: group to shard over; for hybrid strategies a pair (to shard over, to replicate over). None: all ranks.
        sharding_strategy: FULL_SHARD (also for None) frees parameters after forward; SHARD_GRAD_OP keeps them for backward;
            NO_SHARD only averages gradients; HYBRID_SHARD and _HYBRID_SHARD_ZERO2 replicate over nodes.
        cpu_offload: `CPUOffload(offload_params=True)` keeps shards, gradients and optimizer states in host memory.
        auto_wrap_policy: any policy of `fullshard.plan_model`; options in a CustomPolicy are arguments of this class.
        backward_prefetch: BACKWARD_PRE all-gathers the next unit before the current unit's backward computes. BACKWARD_POST
            and None all-gather the next unit when it is needed, after that computation.
        mixed_precision: dtypes. `keep_low_precision_grads` is refused.
        ignored_modules: modules that are not sharded, with all their submodules; not together with `ignored_states`.
        param_init_fn: called with each module that has parameters or buffers on the meta device; must allocate and initialise
            these, but not the tensors of submodules. None: `to_empty` and `reset_parameters()`. Random numbers are drawn from
            one seed on all ranks.
        device_id: the current device; the module is moved to it.
        sync_module_states: broadcast parameters and buffers from the first rank. Only the first rank needs values.
        forward_prefetch: no effect; units are always prefetched one ahead, in the order of the last run.
        limit_all_gathers: no effect; at most one unit is ever prefetched. False warns.
        use_orig_params: no effect; parameters always are the original ones. False warns.
        ignored_states: parameters or modules that are not sharded.
        device_mesh: mesh to use instead of process_group: one dim to shard over, or two (replicate, shard) for hybrid
            strategies.

    Raises:
        ValueError: before anything has changed, with the value that was passed and the value to pass instead.

    Example:
        >>> from fullshard.compat import FullyShardedDataParallel as FSDP
        >>> model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))                   # doctest: +SKIP

    Source: the interface of `torch.distributed.fsdp.FullyShardedDataParallel`; Zhao et al. 2023 (arXiv 2304.11277).
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        passed = locals()
        given = FSDP1Arguments(**{field.name: passed[field.name] for field in fields(FSDP1Arguments)})
        if auto_wrap_policy is not None:
            check_policy(auto_wrap_policy, "auto_wrap_policy")
        if not use_orig_params:
            warn_once(
                "use_orig_params=False has no effect: there is no FlatParameter, and parameters are the originals as with True."
            )
        if not limit_all_gathers:
            warn_once(
                "limit_all_gathers=False has no effect: all-gathers are always limited to one unit ahead of the computing unit."
            )
        super().__init__()
        if auto_wrap_policy is not None:
            self._wrap_submodules(given, auto_wrap_policy)
        managed = collect([module], ignored=given.ignored, is_unit=lambda inner: unit_of(inner) is not None)
        self._is_list = _is_list(module, managed)
        materialize(managed, given)
        if not self._is_list:
            fully_shard(module, **given.options)
        self._fsdp_wrapped_module = module
        self._buffer_dtypes = cast_buffers(managed, given)
        mixed = given.mixed_precision
        self._is_root: bool | None = None  # unknown until the first forward: another wrapper may still be put around this one
        self._strategy, self._cpu_offload = given.strategy, given.cpu_offload or CPUOffload()
        self._prefetch, self._forward_prefetch = given.backward_prefetch, given.forward_prefetch
        self._mixed_precision = mixed or MixedPrecision()
        self._full_precision_in_eval = mixed is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._in_full_precision, self._has_comm_hook = False, False
        self._own_dtype: torch.dtype | None = None  # of a module that mixed precision leaves out, which computes in this dtype
        self._state_dict_settings = _state_dict_settings(StateDictType.FULL_STATE_DICT)
        unit = self._own_unit
        if unit is not None:
            # fully_shard() changes the class of a module. FSDP1 does not: there only the wrapper has the interface.
            for sharded in unit.modules:
                sharded.__class__ = plain_class(type(sharded))
            self._apply_prefetch(unit)
        self.register_state_dict_post_hook(_state_dict_post_hook)
        self.register_load_state_dict_pre_hook(_load_state_dict_pre_hook)
        self.register_load_state_dict_post_hook(_load_state_dict_post_hook)

    def _apply_prefetch(self, unit: Unit) -> None:
        if self._prefetch is not BackwardPrefetch.BACKWARD_PRE:
            unit.record.next_backward = ()  # nothing to prefetch in backward

    def _wrap_submodules(self, given: FSDP1Arguments, policy: Any) -> None:
        """Wrap the modules that `policy` chooses, children first, and the modules that mixed precision leaves out."""
        module = given.module
        # A list has no forward, which `plan_model` requires of a model. This stands in for it, with the same children.
        model = nn.Sequential(OrderedDict(module.named_children())) if _has_no_forward(module) else module
        plan = plan_model(model, policy, ignored_modules=given.left_out, ignored_params=given.ignored)
        kept = _add_full_precision_units(plan, module, given)
        warn_about_mixtures(plan.mixtures())
        *below, own = plan.units
        if own.options:
            warn_once(
                f"auto_wrap_policy returns options for the wrapped module itself, {sorted(own.options)}, which "
                "are not used. Pass them to FullyShardedDataParallel."
            )
        modules = {name: module.get_submodule(name) for unit in below for name in unit.modules}
        chosen_ids = set(map(id, modules.values()))
        if not _is_list(module, collect([module], ignored=given.ignored, is_unit=lambda inner: id(inner) in chosen_ids)):
            PreparedShard(module, **given.options).check()
        arguments_of = {name: given.overridden(unit.options, name) for unit in below for name in unit.modules}
        for name in kept:
            arguments_of[name]["mixed_precision"] = None
        # Check the arguments of all wrappers before the first module changes: an error must leave the model as it was.
        for name, arguments in arguments_of.items():
            PreparedShard(modules[name], **FSDP1Arguments(modules[name], **arguments).options).check()
        for name, arguments in arguments_of.items():
            inner = modules[name]
            wrapper = type(self)(inner, **arguments)
            wrapper._own_dtype = kept.get(name)
            # A shared module has several parents, and a parent may have it under several names: replace all of them.
            for parent in [m for m in module.modules() if m is not wrapper]:
                for own_name, child in list(_torch.children_of(parent).items()):
                    if child is inner:
                        setattr(parent, own_name, wrapper)

    # --- access to the wrapped module ------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper that activation checkpointing added later."""
        inner = self._fsdp_wrapped_module
        return _torch.children_of(inner).get(_OTHER_WRAPPERS[0]) or inner

    @property
    def _sharded_module(self) -> nn.Module:
        """The module that was wrapped and is a unit, also if activation checkpointing or torch.compile wrapped it later."""
        inner: nn.Module | None = self._fsdp_wrapped_module
        while inner is not None and unit_of(inner) is None and not self._is_list:
            children = _torch.children_of(inner)
            inner = next((children[name] for name in _OTHER_WRAPPERS if name in children), None)
        if inner is None:
            raise StateError(
                f"The module inside this wrapper was replaced by a {type(self._fsdp_wrapped_module).__name__}, which is not "
                "sharded. Replace it before wrapping."
            )
        return inner

    @property
    def _own_unit(self) -> Unit | None:
        """The unit of the wrapped module; None for a list or dict of modules, which has no forward and no parameters."""
        return unit_of(self._sharded_module)

    def __getattr__(self, name: str) -> Any:
        """Look up a missing attribute in the wrapped module, then among the methods of `FSDPModule`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _WRAPPED_MODULE or name.startswith("__"):  # copy and pickle must not find the wrapped module's methods
                raise
        try:
            return getattr(self._fsdp_wrapped_module, name)
        except AttributeError:
            if name.startswith("_") or name not in vars(FSDPModule):
                raise
        return MethodType(vars(FSDPModule)[name], self._sharded_module)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The `sharding_strategy` argument; FULL_SHARD if it was None."""
        return self._strategy

    @property
    def cpu_offload(self) -> CPUOffload:
        """The `cpu_offload` argument; `CPUOffload(False)` if it was None."""
        return self._cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The `backward_prefetch` argument."""
        return self._prefetch

    @property
    def forward_prefetch(self) -> bool:
        """The `forward_prefetch` argument."""
        return self._forward_prefetch

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The `mixed_precision` argument; `MixedPrecision()` if it was None."""
        return self._mixed_precision

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group to shard over; under NO_SHARD the process group whose gradients are averaged."""
        mesh = self._axis.mesh
        # The mesh of NO_SHARD is (replicate, 1): its shard dim has one rank, so the group of interest is dim 0.
        return mesh.get_group(0 if self._strategy is ShardingStrategy.NO_SHARD else mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """The rank of this process in `process_group`."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks of `process_group`."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """The device of forward and backward."""
        return self._axis.device

    @property
    def _axis(self) -> ShardAxis:
        unit = next(iter(units_of(self, True)), None)
        if unit is None:
            raise StateError("This wrapper wraps a list without sharded modules, so nothing is sharded.")
        return unit.axis

    def __getitem__(self, key: Any) -> Any:
        """Return an item of the wrapped Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def check_is_root(self) -> bool:
        """Return True if this is the outermost wrapper.

        Before the first forward, the wrapper that is called first counts as the outermost one of its submodules.

        Returns:
            True if no other wrapper contains this one.
        """
        if self._is_root is None:
            for below in self.fsdp_modules(self):
                below._is_root = below is self
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in `module`, including `module` itself.

        Args:
            module: any module.
            root_only: whether to leave out wrappers that another wrapper contains.

        Returns:
            The wrappers, parents before children.
        """
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return [inner for inner in found if not root_only or inner.check_is_root()]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply `fn` to all modules, with unsharded parameters and the original module classes. Collective.

        Args:
            fn: called with each module, children first; values that it writes to parameters are kept.

        Returns:
            This wrapper.
        """
        units = units_of(self, True)
        with ExitStack() as unsharded:
            if not any(unit.shown_by for unit in units):
                unsharded.enter_context(full_params(self))
                unsharded.enter_context(with_original_classes(units))
            super().apply(fn)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, including gradients kept by backwards in `no_sync()`, which an optimizer cannot reset.

        Args:
            set_to_none: whether `.grad` becomes None; False fills it with zeros.
        """
        discard_gradients(self, set_to_none=set_to_none)
        super().zero_grad(set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply `to()`, `half()` and the like to the shards."""
        unit = self._own_unit
        with nullcontext() if unit is None else refreshing_shards(self, unit, fn):
            return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with its own units, on the same meshes. Raises StateError inside forward or backward."""
        if any(id(unit) not in memo for unit in units_of(self, True)):
            return _from_snapshot(to_snapshot(self, memo))
        copied = object.__new__(type(self))  # nested in the copy of an outer module, which copies the units
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the structure with this rank's shards, to be loaded on the same rank of an equal mesh."""
        if not units_of(self, True):
            return super().__reduce_ex__(protocol)
        return _from_snapshot, (to_snapshot(self),)

    def extra_repr(self) -> str:
        """Describe the strategy and the unit: parameters, elements, groups, rank and residency.

        Returns:
            One line of text.
        """
        unit = self._own_unit
        return f"{self._strategy.name}, " + ("a list of modules" if unit is None else unit_summary(unit))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the state dict type that was set. Names are the names of the unwrapped module.

        Args:
            args: positional arguments of `nn.Module.load_state_dict`.
            kwargs: keyword arguments of `nn.Module.load_state_dict`.

        Returns:
            Missing and unexpected names.

        Raises:
            StateError: inside `summon_full_params()`.
            RuntimeError: torch's error, for names or shapes that do not match.
        """
        if any(unit.shown_by for unit in units_of(self, True)):
            raise StateError("load_state_dict() cannot run inside summon_full_params(). Call it outside of the block.")
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as wrong:
            if f"{_WRAPPED_MODULE}." not in str(wrong):
                raise
            raise RuntimeError(str(wrong).replace(f"{_WRAPPED_MODULE}.", "")) from wrong

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters under the names of the unwrapped module.

        Args:
            args: positional arguments of `nn.Module.named_parameters`.
            kwargs: keyword arguments of `nn.Module.named_parameters`.

        Yields:
            Name and parameter.
        """
        return ((clean_name(name), parameter) for name, parameter in super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers under the names of the unwrapped module.

        Args:
            args: positional arguments of `nn.Module.named_buffers`.
            kwargs: keyword arguments of `nn.Module.named_buffers`.

        Yields:
            Name and buffer.
        """
        return ((clean_name(name), buffer) for name, buffer in super().named_buffers(*args, **kwargs))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch.distributed.checkpoint.state_dict to omit the attribute of the wrapped module in names."""
        return {"": _WRAPPED_MODULE}

    # --- forward and backward --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, with floating-point inputs cast to `mixed_precision.param_dtype` if it is configured so.

        Args:
            args: positional arguments of the wrapped module.
            kwargs: keyword arguments of the wrapped module.

        Returns:
            The output of the wrapped module.
        """
        mixed = self._mixed_precision
        casts = mixed.cast_root_forward_inputs if self.check_is_root() else mixed.cast_forward_inputs
        if self._full_precision_in_eval:
            self._update_precision()
        dtype = mixed.param_dtype
        if dtype is not None and casts and not self._in_full_precision:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        if self._own_dtype is None:
            return self._fsdp_wrapped_module(*args, **kwargs)
        given = next((x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        args, kwargs = cast_floats(args, self._own_dtype), cast_floats(kwargs, self._own_dtype)
        output = self._fsdp_wrapped_module(*args, **kwargs)
        return output if given is None else cast_floats(output, given)

    def _update_precision(self) -> None:
        """Switch mixed precision off in eval mode and on in train mode (FSDP_USE_FULL_PREC_IN_EVAL=1).

        The outermost wrapper also switches all wrappers below it. Raises StateError between a forward and its backward.
        """
        for below in self.fsdp_modules(self) if self._is_root else ():
            if below is not self and below._full_precision_in_eval:
                below._update_precision()
        full_precision, unit = not self._fsdp_wrapped_module.training, self._own_unit
        if full_precision is self._in_full_precision:
            return
        mixed = MixedPrecision() if full_precision else self._mixed_precision
        if unit is not None:
            if unit.runtime.scheduler.awaits_backward(unit.number):
                raise StateError(
                    f"Unit '{unit.name}' cannot be switched to {'eval' if full_precision else 'train'}() between a forward and "
                    "its backward: this changes its precision (FSDP_USE_FULL_PREC_IN_EVAL=1). First run the backward, or drop "
                    "the output."
                )
            unit.reconfigure(doing="train() or eval()", mp=precision_of(mixed))
        for name, buffer in self.named_buffers(remove_duplicate=False):
            if name in self._buffer_dtypes:
                buffer.data = buffer.data.to(mixed.buffer_dtype or self._buffer_dtypes[name])
        self._in_full_precision = full_precision

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep unsharded gradients on each rank in backwards inside the block; the first backward after it reduces their sum.

        `model.zero_grad()` discards the kept gradients. An optimizer's `zero_grad()` does not: unlike in FSDP1, kept gradients
        are in no `.grad` until they are reduced.

        Raises:
            StateError: on a wrapper inside another wrapper.

        Example:
            >>> with model.no_sync():                                                             # doctest: +SKIP
            ...     model(batches[0]).backward()
            >>> model(batches[1]).backward()                                                      # doctest: +SKIP
        """
        self._require_root("no_sync()")
        with FSDPModule.accumulate(self):  # type: ignore[arg-type]
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. Collective.

        Args:
            max_norm: the largest norm that is not scaled down.
            norm_type: the power of the norm, above 0; `float("inf")` is the largest absolute value.

        Returns:
            The norm before clipping, a plain 0-dim tensor, equal on all ranks.

        Raises:
            StateError: on a wrapper inside another wrapper, or while gradients are only kept on each rank.
            ValueError: if `norm_type` is not above 0.
        """
        self._require_root("clip_grad_norm_()")
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def _require_root(self, doing: str) -> None:
        if not self.check_is_root():
            raise StateError(f"{doing} cannot run on a wrapper inside another wrapper. Call it on the outermost one.")

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients with a communication hook of torch.distributed.algorithms. Can be called once.

        Args:
            state: passed to the hook.
            hook: under NO_SHARD `hook(state, gradient)` averages the flat gradient in place; otherwise `hook(state, gradient,
                shard)` reduce-scatters (ranks * size,) into (size,), averaged.

        Raises:
            ValueError: if `hook` is not callable, for a second hook, or for hybrid strategies, which reduce in two steps.
            StateError: on a wrapper inside another wrapper, or inside a forward or backward.
        """
        self._require_root("register_comm_hook()")
        if not callable(hook):
            raise ValueError(f"register_comm_hook() expected a callable, got {type(hook).__name__}.")
        wrappers = [(wrapper, unit) for wrapper in self.fsdp_modules(self) if (unit := wrapper._own_unit) is not None]
        for wrapper, unit in wrappers:
            if wrapper._strategy in HYBRID:
                raise ValueError(
                    f"register_comm_hook() cannot be used with {wrapper._strategy.name}: gradients are reduced in two steps, "
                    "and a hook replaces one. Use set_all_reduce_hook() of each wrapper, which runs after both."
                )
            if wrapper._has_comm_hook:
                raise ValueError("register_comm_hook() was called before. A hook cannot be replaced.")
            unit.check_idle(doing="register_comm_hook()")
            unit.runtime.reducer.check_delivered(unit, doing="register_comm_hook()")
        for wrapper, unit in wrappers:
            # The hook itself averages, so the unit must not divide by the number of ranks as well. The hook replaces the
            # reduce-scatter, in which scalars have no part; under NO_SHARD it replaces the all-reduce, which they have.
            replicates = wrapper._strategy is ShardingStrategy.NO_SHARD
            unit.configure(reduce=replace(unit.options.reduce, divide=1.0, custom_averages=not replicates))
            if replicates:
                factory = partial(_hooked_collectives, device=unit.axis.device, hook=partial(hook, state))
                changes: dict[str, Any] = {"comm": replace(unit.options.comm, collectives=factory)}
            else:
                changes = {"reduce_adapter": partial(CustomCollectives, reduce_scatter=_HookReduceScatter(state, hook))}
            unit.reconfigure(doing="register_comm_hook()", **changes)
            wrapper._has_comm_hook = True

    # --- unsharded parameters --------------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Install unsharded plain Parameters for the length of the block, like `fullshard.full_params`. Collective.

        Args:
            module: a wrapper, or a module that contains wrappers.
            recurse: whether to unshard the wrappers inside as well.
            writeback: whether to write changed values back to the shards at the end, also if the block raises; all ranks must
                write equal values.
            rank0_only: install unsharded parameters on the first rank only. Needs `writeback=False`.
            offload_to_cpu: whether to put the unsharded parameters in host memory.
            with_grads: whether to set their `.grad` to the unsharded, averaged gradients.

        Raises:
            ValueError: for `rank0_only` with `writeback`.
            StateError: inside a forward or backward; and with `writeback` as `fullshard.full_params`.

        Example:
            >>> with FSDP.summon_full_params(model, writeback=False):                             # doctest: +SKIP
            ...     norms = [p.norm() for p in model.parameters()]
        """
        inside: nn.Module = module._sharded_module if isinstance(module, FullyShardedDataParallel) else module
        if not recurse and unit_of(inside) is None:
            yield
            return
        device = "cpu" if offload_to_cpu else None
        with full_params(inside, recurse=recurse, write=writeback, rank0_only=rank0_only, device=device, grads=with_grads):
            yield

    # --- state dicts -----------------------------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of `state_dict()` and `optim_state_dict()` for all wrappers in `module`.

        Args:
            module: a wrapper, or a module that contains wrappers.
            state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT (DTensors) or LOCAL_STATE_DICT (the rows of this rank).
            state_dict_config: an instance of the config class of that type; None takes its defaults.
            optim_state_dict_config: an instance of the optimizer config class of that type; None takes its defaults.

        Returns:
            The previous settings.

        Raises:
            ValueError: for an unknown type, a config of another type, a module without wrappers, or wrappers whose settings
                differ.
        """
        before = FullyShardedDataParallel.get_state_dict_type(module)
        settings = _state_dict_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for wrapper in FullyShardedDataParallel.fsdp_modules(module):
            wrapper._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the state dict settings of the wrappers in `module`.

        Args:
            module: a wrapper, or a module that contains wrappers.

        Returns:
            Type and configs.

        Raises:
            ValueError: if there is no wrapper, or the settings of the wrappers differ.
        """
        found = [wrapper._state_dict_settings for wrapper in FullyShardedDataParallel.fsdp_modules(module)]
        if not found:
            raise ValueError(f"{type(module).__name__} contains no FullyShardedDataParallel. Pass a model that was wrapped.")
        if any(settings != found[0] for settings in found):
            raise ValueError("The wrappers in this module have different state dict types. Set one type for all of them.")
        return found[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Set the state dict type for the length of a block, and restore the previous settings at its end.

        Args:
            module: a wrapper, or a module that contains wrappers.
            state_dict_type: see `set_state_dict_type`.
            state_dict_config: see `set_state_dict_type`.
            optim_state_dict_config: see `set_state_dict_type`.

        Raises:
            ValueError: see `set_state_dict_type`.

        Example:
            >>> with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):               # doctest: +SKIP
            ...     torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)
        """
        given = state_dict_type, state_dict_config, optim_state_dict_config
        before = FullyShardedDataParallel.set_state_dict_type(module, *given)
        try:
            yield
        finally:
            for wrapper in FullyShardedDataParallel.fsdp_modules(module):
                wrapper._state_dict_settings = before

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the optimizer state keyed by parameter names, of the type that was set for the model. Collective.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of its parameters.
            optim_state_dict: the optimizer's own `state_dict()`, if the caller already has it.
            group: process group of the participating ranks; None is the ranks of the model's mesh.

        Returns:
            {"state": {name: {key: value}}, "param_groups": [...]}; {} on ranks that keep nothing (`rank0_only`).

        Raises:
            ValueError: on every rank, before any state is communicated, if parameters, states or numeric settings differ
                between ranks.
        """
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        state_format = _format_of(settings, settings.optim_state_dict_config)
        return state_dicts.optimizer_state(model, optim, state_format, _ranks(model, group, _SAVING), given=optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Convert a result of `optim_state_dict` to a state dict of `optim`; with `load_directly`, load it as well. Collective.

        Names and keys may come in any order. If the type that was set for the model is full and `rank0_only`, only the first
        rank needs the state. ShardedTensors (FSDP1 saves them, `load_sharded_optimizer_state_dict` returns them) are
        all-gathered one at a time.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of its parameters.
            optim_state_dict: a state keyed by names, of the type that is set for the model; not modified.
            is_named_optimizer: whether to key the result by names instead of positions in the optimizer.
            load_directly: whether to call `optim.load_state_dict` as well.
            group: process group of the participating ranks; None is the ranks of the model's mesh.

        Returns:
            A state dict for `optim.load_state_dict`. It has "param_groups" only if `optim_state_dict` has them; without them,
            `load_directly` keeps the optimizer's own.

        Raises:
            ValueError: on every rank, with the name, for missing or unknown parameters and for states that do not match.
        """
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        state_format = _format_of(settings, settings.optim_state_dict_config)
        groups = state_dicts.groups_of(model, optim)
        ranks = _ranks(model, group, _LOADING)
        if state_format.rank0_only:
            optim_state_dict = state_dicts.scatter_state(model, optim_state_dict, groups, ranks)
        local = state_format.kind is StateDictType.LOCAL_STATE_DICT
        ready = state_dicts.load_optimizer_state(
            model, optim_state_dict, groups, ranks, local=local, by_name=is_named_optimizer
        )
        if load_directly:
            optim.load_state_dict(ready if "param_groups" in ready else {**optim.state_dict(), **ready})
        return ready

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the full optimizer state keyed by names, in host memory. Collective.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of its parameters.
            optim_input: the parameters that `optim` was built with, which FSDP1 needed; ignored.
            rank0_only: whether only the first rank keeps the state.
            group: process group of the participating ranks; None is the ranks of the model's mesh.

        Returns:
            The state; {} on ranks that keep nothing.

        Raises:
            ValueError: see `optim_state_dict`.
        """
        del optim_input
        state_format = StateDictFormat(StateDictType.FULL_STATE_DICT, True, rank0_only)
        return state_dicts.optimizer_state(model, optim, state_format, _ranks(model, group, _SAVING))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the optimizer state keyed by names, as DTensors. Collective.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of its parameters.
            group: process group of the participating ranks; None is the ranks of the model's mesh.

        Returns:
            The state, on every rank.

        Raises:
            ValueError: see `optim_state_dict`.
        """
        state_format = StateDictFormat(StateDictType.SHARDED_STATE_DICT)
        return state_dicts.optimizer_state(model, optim, state_format, _ranks(model, group, _SAVING))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Shard a full state keyed by names, which every rank has, for an optimizer. Collective.

        Args:
            full_optim_state_dict: a result of `full_optim_state_dict`.
            model: a wrapper, or a module that contains wrappers.
            optim_input: the parameters or parameter groups of the optimizer, if `optim` is None; None is all parameters.
            optim: an optimizer of the model's parameters.

        Returns:
            A state dict for `optimizer.load_state_dict`.

        Raises:
            ValueError: see `optim_state_dict_to_load`.
        """
        groups = state_dicts.groups_of(model, optim, optim_input)
        return state_dicts.load_optimizer_state(model, full_optim_state_dict, groups, _ranks(model, None, _LOADING))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Convert a state of DTensors keyed by names to a state dict of an optimizer. Collective.

        Args:
            sharded_optim_state_dict: a result of `sharded_optim_state_dict`.
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of its parameters.

        Returns:
            A state dict for `optimizer.load_state_dict`.

        Raises:
            ValueError: see `optim_state_dict_to_load`.
        """
        return state_dicts.load_optimizer_state(
            model, sharded_optim_state_dict, state_dicts.groups_of(model, optim), _ranks(model, None, _LOADING)
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Scatter a full state keyed by names, which only the first rank has, for an optimizer. Collective.

        Args:
            full_optim_state_dict: a result of `full_optim_state_dict` on the first rank; ignored on the others.
            model: a wrapper, or a module that contains wrappers.
            optim_input: the parameters or parameter groups of the optimizer, if `optim` is None; None is all parameters.
            optim: an optimizer of the model's parameters.
            group: process group of the participating ranks; None is the ranks of the model's mesh.

        Returns:
            A state dict for `optimizer.load_state_dict`.

        Raises:
            ValueError: see `optim_state_dict_to_load`, or if the first rank has no state.
        """
        groups, ranks = state_dicts.groups_of(model, optim, optim_input), _ranks(model, group, _LOADING)
        whole = state_dicts.scatter_state(model, full_optim_state_dict, groups, ranks)
        return state_dicts.load_optimizer_state(model, whole, groups, ranks)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert the keys of an optimizer state between parameter names and positions in the optimizer.

        Args:
            optim_state_dict: the state, keyed by names or positions.
            optim_state_key_type: the keys of the result: PARAM_NAME or PARAM_ID.
            model: a wrapper, or a module that contains wrappers.
            optim_input: the parameters or parameter groups of the optimizer, if `optim` is None; None is all parameters.
            optim: an optimizer of the model's parameters.

        Returns:
            The state with the keys of `optim_state_key_type`.

        Raises:
            ValueError: for a key that is neither a name nor a position of a parameter, or a parameter that is not in the model.
        """
        named = state_dicts.names_in_groups(model, state_dicts.groups_of(model, optim, optim_input))
        return state_dicts.rekey(optim_state_dict, optim_state_key_type, [name for group in named for name in group])


FSDP = FullyShardedDataParallel


# --- construction ---------------------------------------------------------------------------------------------------------


def _add_full_precision_units(plan: Plan, module: nn.Module, given: FSDP1Arguments) -> dict[str, torch.dtype]:
    """Add modules that mixed precision leaves out (batch norms) to the plan, each as a unit. Return their names and dtypes."""
    mixed = given.mixed_precision
    classes = () if mixed is None else _torch.left_out_of(mixed)
    kept: dict[str, torch.dtype] = {}
    for name in plan.outline.kinds:
        inner = module.get_submodule(name)
        if name and isinstance(inner, classes) and inner not in given.left_out:
            if not any(name in unit.modules for unit in plan.units):
                plan.add(name)
            kept[name] = own_dtype(inner)
    if kept:
        names = sorted({type(module.get_submodule(name)).__name__ for name in kept})
        warn_once(f"Mixed precision with auto_wrap_policy: {', '.join(names)} are wrapped on their own, in full precision.")
    return kept


def _has_no_forward(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _is_list(module: nn.Module, managed: ManagedTensors) -> bool:
    """Return True if `module` is a list or dict of modules without a forward.

    Raises ValueError if such a list has parameters that no wrapper below it shards.
    """
    if not _has_no_forward(module):
        return False
    if managed.refs:
        raise ValueError(
            f"{type(module).__name__} cannot be wrapped: it has no forward, so '{managed.refs[0].name}', which no wrapper "
            "below it shards, would never be all-gathered. Wrap its items, or pass an auto_wrap_policy that chooses them."
        )
    return True


def _from_snapshot(parts: ShardedSnapshot) -> nn.Module:
    copied = from_snapshot(parts)
    for wrapper in FullyShardedDataParallel.fsdp_modules(copied):
        if wrapper._own_unit is not None:
            wrapper._apply_prefetch(wrapper._own_unit)
    return copied


# --- saving and loading ---------------------------------------------------------------------------------------------------


def _state_dict_settings(
    kind: StateDictType, config: StateDictConfig | None = None, optim_config: OptimStateDictConfig | None = None
) -> StateDictSettings:
    known: dict[StateDictType, tuple[type[Any], type[Any]]] = {
        StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
        StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
        StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    }
    if kind not in known:
        raise ValueError(f"Expected a StateDictType, got {kind!r}.")
    config_type, optim_config_type = known[kind]
    config, optim_config = config or config_type(), optim_config or optim_config_type()
    for given, wanted in ((config, config_type), (optim_config, optim_config_type)):
        if not isinstance(given, wanted):
            raise ValueError(f"Expected a {wanted.__name__} for {kind.name}, got {type(given).__name__}.")
    return StateDictSettings(kind, config, optim_config)


def _format_of(settings: StateDictSettings, config: Any, *, rows: bool = False) -> StateDictFormat:
    return StateDictFormat(settings.state_dict_type, config.offload_to_cpu, getattr(config, "rank0_only", False), rows)


def _state_dict_post_hook(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace the entries of a state dict by values of the configured type, under clean names.

    Wrappers below have converted their own entries already: a DTensor can still be converted, a full tensor stays full.
    """
    settings = module._state_dict_settings
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    state_format = _format_of(settings, settings.state_dict_config, rows=is_local)
    unit: Unit | None = module._own_unit
    if unit is not None and unit.shown_by and state_format.kind is not StateDictType.FULL_STATE_DICT:
        raise StateError(
            f"state_dict() cannot return {state_format.kind.name} inside summon_full_params(). Call it outside of the block."
        )
    keep = _ranks(module, None, "state_dict()").index == 0 or not state_format.rank0_only
    dtypes = module._buffer_dtypes
    # What the wrapped module has just written, and no entries that a `destination` of the caller had before.
    for key in [key for key in state_dict if key.startswith(f"{prefix}_fsdp_wrapped_module.")]:
        value = state_dict.pop(key)
        name = clean_name(key[len(prefix) :])
        if name in dtypes and isinstance(value, Tensor) and not is_local:
            value = value.to(dtypes[name])
        value = state_format.convert(value, keep=keep)  # collective for FULL, so ranks that keep nothing call it too
        if keep:
            state_dict[prefix + name] = value


def _load_state_dict_pre_hook(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the wrapper's prefix to the names, and convert ShardedTensors and this rank's rows to DTensors."""
    unit: Unit | None = module._own_unit
    rows = module._state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    inner: nn.Module = module._fsdp_wrapped_module
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    known = {clean_name(name): parameter for name, parameter in parameters.items()}
    without = _WRAPPED_MODULE, _OTHER_WRAPPERS[0]
    expected = {  # clean name -> name with the parts that torch.compile adds
        clean_name(name): ".".join(part for part in name.split(".") if part not in without)
        for name in (*parameters, *dict(inner.named_buffers(remove_duplicate=False)))
    }
    inside = f"{prefix}{_WRAPPED_MODULE}."
    # Sorted, because ShardedTensors are converted by collectives: all ranks must visit the keys in one order.
    for key in sorted(key for key in state_dict if key.startswith(prefix) and not key.startswith(inside)):
        value = state_dict.pop(key)
        name = key[len(prefix) :]
        if name.rpartition(".")[2] in ("_flat_param", "flat_param"):
            raise ValueError(f"'{key}' cannot be loaded: it is a FlatParameter of FSDP1. Save FULL_STATE_DICT with FSDP1.")
        logical = state_dicts.logical_of(known[name]) if name in known else None
        if unit is None or logical is None or logical not in unit.parameters:
            pass  # the wrapper of that parameter converts it; ignored parameters and buffers need no conversion
        elif isinstance(value, _torch.ShardedTensor):
            if value.size() != logical.shape:
                wanted, got = tuple(logical.shape), tuple(value.size())
                raise ValueError(f"Expected shape {wanted} for '{key}', got {got} in the ShardedTensor to load.")
            # Collective over the ranks of the ShardedTensor.
            whole = _torch.whole_of(value, torch.device(logical.sharding.mesh.device_type))
            value = shard_of(logical, whole, dtype=logical.local.dtype)
        elif rows and isinstance(value, Tensor):
            if value.shape != logical.local.shape:
                raise ValueError(
                    f"LOCAL_STATE_DICT: expected shape {tuple(logical.local.shape)} for '{key}', the rows of this rank, got "
                    f"{tuple(value.shape)}. Load it on as many ranks as saved it, or save it as SHARDED_STATE_DICT."
                )
            value = logical.dtensor_like_shard(value.to(logical.local.dtype))
        state_dict[inside + expected.get(name, name)] = value


def _load_state_dict_post_hook(module: Any, incompatible: Any) -> None:
    """Replace missing and unexpected names by clean names, in place."""
    for names in incompatible:
        names[:] = [clean_name(name) for name in names]


def _ranks(model: nn.Module, group: dist.ProcessGroup | None, doing: str) -> Agreement:
    """Return the ranks that save or load together: the ranks of `group`, or of the model's mesh if `group` is None."""
    unit = next(iter(units_of(model, True)), None)
    device, name, axes = torch.device("cpu"), UnitName(""), list[ShardAxis]()
    if unit is not None:
        device, name, axes = unit.axis.device, unit.unit_name, [unit.axis]
    if group is not None:
        axes = [resolve_mesh(DeviceMesh.from_group(group, device.type))]
    # Streams of their own, and so a runtime and a log of their own. If the optimizers of the ranks differ, the logs of their
    # steps have diverged already, but the ranks can still compare parameters and settings, and name the one that differs.
    return Agreement(Runtime.of(device, CommPolicy(lanes=stream_for)).communicator, axes, name, doing)


__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
