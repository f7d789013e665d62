"""FSDP1's wrapper, `FullyShardedDataParallel`, on units of `fully_shard`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from fullshard.collectives.backends import collectives_for
from fullshard.collectives.base import Collectives, StartedWork
from fullshard.collectives.custom import ReduceScatter
from fullshard.errors import StateError, warn_once
from fullshard.frontend import class_swap
from fullshard.frontend.api import PreparedShard, fully_shard
from fullshard.frontend.clipping import clip_grad_norm_
from fullshard.frontend.full_params import full_params
from fullshard.frontend.hooks import cast_floats
from fullshard.frontend.module import (
    FSDPModule,
    accumulate,
    applying,
    described,
    discard_gradients,
    plain_class,
    sharded_class,
    units_of,
)
from fullshard.fsdp1 import state_dicts
from fullshard.fsdp1.agreement import Ranks
from fullshard.fsdp1.arguments import HYBRID, FSDP1Arguments, cast_buffers, device_type_of, materialize, mesh_of
from fullshard.fsdp1.state_dicts import StateDictFormat
from fullshard.params.shard_values import shard_of
from fullshard.params.sharded_param import logical_parameters
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit, unit_of
from fullshard.sharding.mesh import ShardAxis
from fullshard.sharding.module_tree import ManagedTensors, clean_name, collect
from fullshard.wrap.plan import Plan
from fullshard.wrap.whole_model import check_policy, plan_model, warn_about_mixtures

_INNER = "_fsdp_wrapped_module"
_LOOKED_THROUGH = ("_checkpoint_wrapped_module", "_orig_mod")  # what activation checkpointing and torch.compile put around
_KEEPS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, _torch.HYBRID_ZERO2)


class _Hookable:
    """Collectives over replicas whose sum a caller's hook takes over."""

    def __init__(self, inner: Collectives, hook: Callable[[Tensor], None]) -> None:
        self._inner, self._hook = inner, hook
        self.ranks, self.rank, self.direct_min_bytes = inner.ranks, inner.rank, inner.direct_min_bytes
        self.in_order = inner.in_order
        self.gatherer, self.reduce_scatter, self.all_reduce_max = inner.gatherer, inner.reduce_scatter, inner.all_reduce_max

    @property
    def tag(self) -> Any:
        """The tag of the messages of the inner ones."""
        return getattr(self._inner, "tag", None)

    @tag.setter
    def tag(self, tag: Any) -> None:
        self._inner.tag = tag  # type: ignore[attr-defined]

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        self._hook(tensor)
        return StartedWork()


@dataclass(frozen=True, eq=False)
class _WithHook:
    """Collectives of any process group, whose sums `hook` takes over."""

    kind: str
    hook: Callable[[Tensor], None]

    def __call__(self, group: dist.ProcessGroup) -> Any:
        return _Hookable(collectives_for(group, torch.device(self.kind)), self.hook)


class _HookReduce(ReduceScatter):
    """A communication hook of FSDP1 as the reduce-scatter of a unit."""

    def __init__(self, state: object, hook: Callable[..., None]) -> None:
        self._state, self._hook = state, hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._hook(self._state, input_tensor, output_tensor)
        return None


# --- the wrapper ----------------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """FSDP1's wrapper around a module, whose surface it has; inside, the module is a unit of `fully_shard`.

    A script written for `torch.distributed.fsdp.FullyShardedDataParallel` runs with the import changed; enums and config
    classes are torch's own. What each argument and method becomes, and the shortest rewrite to `fully_shard`, is in
    docs/from-fsdp1.md. Parameters are DTensors, so there is no FlatParameter, and it also runs on the CPU.

    Args:
        module: sharded in place. With `auto_wrap_policy`, modules below it are wrapped first, and replaced in their parents.
        process_group: to shard over; for hybrid strategies a pair (to shard over, to replicate over). None: all ranks.
        sharding_strategy: FULL_SHARD (None) frees parameters after forward, SHARD_GRAD_OP keeps them for backward; NO_SHARD
            only averages gradients; HYBRID_SHARD and _HYBRID_SHARD_ZERO2 replicate over nodes.
        cpu_offload: `CPUOffload(offload_params=True)` keeps shards, gradients and optimizer states in the host's memory.
        auto_wrap_policy: as of `fullshard.plan_model`; options in a CustomPolicy are arguments of this class.
        backward_prefetch: BACKWARD_PRE gathers the next unit before one's backward computes. BACKWARD_POST and None gather it
            when it is needed, which here is behind that computation.
        mixed_precision: dtypes. `keep_low_precision_grads` is refused.
        ignored_modules: left alone, with all below them; not together with `ignored_states`.
        param_init_fn: gives a module that has parameters or buffers on meta memory and values of its own (not of those below
            it). None: `to_empty` and `reset_parameters()`. Random numbers are drawn from one seed on all ranks.
        device_id: the current device, to move the module to.
        sync_module_states: broadcast parameters and buffers from the first rank, which alone needs to have values.
        forward_prefetch: units are always gathered one ahead, in the order of the last run, so both values mean the same.
        limit_all_gathers: likewise there are never more than that in flight; False is said to have no effect.
        use_orig_params: parameters always are the originals; False is said to mean the same.
        ignored_states: parameters or modules that are left alone.
        device_mesh: one axis to shard over, or two (replicate, shard) for hybrid strategies, instead of process_group.

    Raises:
        ValueError: before anything has changed, naming what was given and what to give instead.

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
        given = FSDP1Arguments.of(
            module,
            process_group,
            device_mesh,
            sharding_strategy,
            cpu_offload,
            backward_prefetch,
            mixed_precision,
            param_init_fn,
            device_id,
            sync_module_states,
            ignored_modules,
            ignored_states,
            forward_prefetch,
            limit_all_gathers,
            use_orig_params,
        )
        if auto_wrap_policy is not None:
            check_policy(auto_wrap_policy, "auto_wrap_policy")
        _warn_of_no_effect(use_orig_params=use_orig_params, limit_all_gathers=limit_all_gathers)
        super().__init__()
        mesh = mesh_of(given, device_type_of(module, given))
        options = _options(given)
        if auto_wrap_policy is not None:
            self._wrap_below(module, given, auto_wrap_policy, mesh, options)
        self._shard(module, given, mesh, options)
        self._keep_arguments(given)
        self._adopt_unit()

    def _shard(self, module: nn.Module, given: FSDP1Arguments, mesh: DeviceMesh, options: dict[str, Any]) -> None:
        """Give the module memory and values where it has none, and make a unit of it unless it is a list of wrappers."""
        managed = collect([module], ignored=given.ignored, is_unit=lambda inner: unit_of(inner) is not None)
        self._is_list = _is_list(module, managed)
        materialize(managed, given, mesh)
        if not self._is_list:
            fully_shard(module, mesh=mesh, ignored_params=set(given.ignored), **options)
        self._fsdp_wrapped_module = module
        self._buffer_dtypes = cast_buffers(module, managed, given)

    def _keep_arguments(self, given: FSDP1Arguments) -> None:
        """Keep what forwards, properties and state dicts ask for later; which wrapper is the outermost is not known yet."""
        mixed = given.mixed_precision
        self._is_root: bool | None = None
        self._strategy, self._offload = given.strategy, given.offload
        self._prefetch, self._forward_prefetch = given.prefetch, given.forward_prefetch
        self._mixed_precision = mixed or MixedPrecision()
        self._full_in_eval = mixed is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._in_full = False
        self._casts_root = mixed is None or mixed.cast_root_forward_inputs
        self._casts = mixed is not None and mixed.cast_forward_inputs
        self._settings = _settings(StateDictType.FULL_STATE_DICT)

    def _adopt_unit(self) -> None:
        """Give the wrapped module the class it had, as in FSDP1, and have state dicts pass through this wrapper."""
        unit = self.unit
        if unit is not None:
            for sharded in unit.modules:
                sharded.__class__ = plain_class(type(sharded))
            if self._prefetch is not BackwardPrefetch.BACKWARD_PRE:
                unit.record.next_backward = ()
        self.register_state_dict_post_hook(_after_save)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    def _wrap_below(
        self, module: nn.Module, given: FSDP1Arguments, policy: Any, mesh: DeviceMesh, options: dict[str, Any]
    ) -> None:
        """Wrap the modules that `policy` chooses, children first, and those that are left out of mixed precision."""
        plan = plan_model(
            _Items(module) if _has_no_forward(module) else module,
            policy,
            ignored_modules=given.ignored_modules,
            ignored_params=given.ignored,
        )
        kept = _plan_full_precision(plan, module, given)
        warn_about_mixtures(plan.mixtures())
        below = [unit for unit in plan.units if "" not in unit.modules]
        if plan.units[-1].options:
            warn_once(
                f"auto_wrap_policy gives the module that is wrapped options, {sorted(plan.units[-1].options)}, which "
                "are not used: pass them to FullyShardedDataParallel itself"
            )
        chosen_ids = {id(module.get_submodule(name)) for unit in below for name in unit.modules}
        if not _is_list(module, collect([module], ignored=given.ignored, is_unit=lambda inner: id(inner) in chosen_ids)):
            PreparedShard(module, mesh=mesh, ignored_params=given.ignored, **options)
        _check_overrides(below)
        chosen = [(name, unit.options) for unit in below for name in unit.modules]
        every = {name: given.overridden({**o, **({"mixed_precision": None} if name in kept else {})}) for name, o in chosen}
        for name, arguments in every.items():  # all are checked before the first is made
            inner = module.get_submodule(name)
            theirs = FSDP1Arguments.of(inner, **arguments)
            their_mesh = mesh_of(theirs, device_type_of(inner, theirs))
            PreparedShard(inner, mesh=their_mesh, ignored_params=theirs.ignored, **_options(theirs))
        for name, arguments in every.items():
            inner = module.get_submodule(name)
            wrapper = type(self)(inner, **arguments)
            if name in kept:
                _InFull(inner).put_on(wrapper)
            for parent in [m for m in module.modules() if m is not wrapper]:
                for own, child in list(_torch.children_of(parent).items()):
                    if child is inner:
                        setattr(parent, own, wrapper)

    # --- looking through -------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without what activation checkpointing put around it since."""
        inner = self._fsdp_wrapped_module
        return _torch.children_of(inner).get(_LOOKED_THROUGH[0]) or inner

    @property
    def sharded(self) -> nn.Module:
        """The module that is a unit: what was wrapped, also if something was put around it since.

        Raises:
            StateError: if it was replaced by a module that is no unit.
        """
        inner: nn.Module | None = self._fsdp_wrapped_module
        while inner is not None and unit_of(inner) is None and not self._is_list:
            children = _torch.children_of(inner)
            inner = next((children[name] for name in _LOOKED_THROUGH if name in children), None)
        if inner is None:
            raise StateError(
                f"the module inside of this wrapper was replaced by a {type(self._fsdp_wrapped_module).__name__}, which is no "
                "unit: replace it before wrapping"
            )
        return inner

    @property
    def unit(self) -> Unit | None:
        """The unit of the wrapped module; None for a list or dict of modules, which has no forward and holds nothing itself."""
        return unit_of(self.sharded)

    def __getattr__(self, name: str) -> Any:
        """Look for an attribute that the wrapper does not have in the wrapped module, then in the unit that it is."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER or name.startswith("__"):  # how to copy and pickle is the wrapper's own
                raise
        try:
            return getattr(self._fsdp_wrapped_module, name)
        except AttributeError:
            if name not in _OF_UNITS:
                raise
        return MethodType(_OF_UNITS[name], self.sharded)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy as it was given; FULL_SHARD if it was not."""
        return self._strategy

    @property
    def cpu_offload(self) -> CPUOffload:
        """The offloading as it was given."""
        return CPUOffload(self._offload)

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The argument as it was given."""
        return self._prefetch

    @property
    def forward_prefetch(self) -> bool:
        """The argument as it was given."""
        return self._forward_prefetch

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes as they were given; `MixedPrecision()` if they were not."""
        return self._mixed_precision

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks to shard over; under NO_SHARD those whose gradients are averaged."""
        mesh = self._axis.mesh
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
        """The device that forward and backward run on."""
        return self._axis.device

    @property
    def _axis(self) -> ShardAxis:
        unit = next(units_of(self, True), None)
        if unit is None:
            raise StateError("this wrapper is around a list without modules, so nothing is sharded")
        return unit.axis

    def __getitem__(self, key: Any) -> Any:
        """The item of a wrapped Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def check_is_root(self) -> bool:
        """Say whether this is the outermost wrapper, as far as is known: before the first forward, the one asked is.

        Returns:
            Whether no other wrapper is around this one.
        """
        if self._is_root is None:
            self._become_root()
        return bool(self._is_root)

    def _become_root(self) -> None:
        for below in self.fsdp_modules(self):
            below._is_root = below is self

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in `module`, itself included.

        Args:
            module: any module.
            root_only: whether to leave out wrappers that another is around.

        Returns:
            The wrappers, parents before children.
        """
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return [inner for inner in found if not root_only or inner.check_is_root()]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As `nn.Module.apply`, with full parameters in place, and modules of the class they had. Collective.

        Args:
            fn: called with each module, children first; what it writes to parameters is kept.

        Returns:
            This wrapper.
        """
        if any(unit.exposure.plain for unit in units_of(self, True)):
            return super().apply(fn)  # type: ignore[return-value]
        with full_params(self), class_swap.undressed(units_of(self, True), plain_class):
            return super().apply(fn)  # type: ignore[return-value]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; also discards what backwards in `no_sync()` kept, which an optimizer's cannot see.

        Args:
            set_to_none: whether `.grad` becomes None; False fills it with zeros.
        """
        discard_gradients(self, set_to_none=set_to_none)
        super().zero_grad(set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `half` and the like: on the shards."""
        unit = self.unit
        with nullcontext() if unit is None else applying(self, unit, fn):
            return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with units of its own, on the same meshes. Raises StateError inside forward or backward."""
        if any(id(unit) not in memo for unit in units_of(self, True)):
            return class_swap.put_together(class_swap.take_apart(self, plain_class, memo), sharded_class)
        made = object.__new__(type(self))  # inside the copying of a whole, which knows the units
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the structure with this rank's shards; to be loaded on the same rank of an equal mesh."""
        if next(units_of(self, True), None) is None:
            return super().__reduce_ex__(protocol)
        return _put_together, (class_swap.take_apart(self, plain_class),)

    def extra_repr(self) -> str:
        """The strategy, and the unit: parameters, elements, groups, rank and residency.

        Returns:
            One line of text.
        """
        unit = self.unit
        return f"{self._strategy.name}, " + ("a list of modules" if unit is None else described(unit))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`, of the form that was set. Names are those that the unwrapped module has.

        Args:
            args: as of `nn.Module.load_state_dict`.
            kwargs: likewise.

        Returns:
            Missing and unexpected names.

        Raises:
            StateError: inside `summon_full_params()`.
            RuntimeError: as torch's, for names or shapes that do not fit.
        """
        if any(unit.exposure.plain for unit in units_of(self, True)):
            raise StateError("load_state_dict() was called inside summon_full_params(): call it outside of the block")
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as wrong:
            if f"{_INNER}." not in str(wrong):
                raise
            raise RuntimeError(str(wrong).replace(f"{_INNER}.", "")) from wrong

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`, under the names that the unwrapped module has.

        Args:
            args: as of `nn.Module.named_parameters`.
            kwargs: likewise.

        Yields:
            Name and parameter: a DTensor, unless full parameters are installed.
        """
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As `nn.Module.named_buffers`, under the names that the unwrapped module has.

        Args:
            args: as of `nn.Module.named_buffers`.
            kwargs: likewise.

        Yields:
            Name and buffer.
        """
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    # --- running ---------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, with floating-point inputs in `mixed_precision.param_dtype` where that is asked for.

        Args:
            args: of the wrapped module.
            kwargs: likewise.

        Returns:
            The output of the wrapped module.
        """
        if self._is_root is None:
            self._become_root()
        if self._full_in_eval:
            self._choose_precision()
        dtype = self._mixed_precision.param_dtype
        if dtype is not None and not self._in_full and (self._casts_root if self._is_root else self._casts):
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def _choose_precision(self) -> None:
        """FSDP_USE_FULL_PREC_IN_EVAL=1: mixed precision is off in eval mode, here and, from the outermost wrapper, below.

        Raises StateError between a forward and its backward.
        """
        for below in self.fsdp_modules(self) if self._is_root else ():
            if below is not self and below._full_in_eval:
                below._choose_precision()
        full, unit = not self._fsdp_wrapped_module.training, self.unit
        if full is self._in_full:
            return
        mixed = MixedPrecision() if full else self._mixed_precision
        if unit is not None:
            if runtime_of(unit).planner.awaits_backward(unit.number):
                raise StateError(
                    f"unit '{unit.name}' was switched to {'eval' if full else 'train'}() between a forward and its backward, "
                    "which changes its precision (FSDP_USE_FULL_PREC_IN_EVAL=1): run the backward, or drop the output, first"
                )
            runtime_of(unit).requests.reconfigure(unit, doing="train() or eval()", mp=_precision(mixed))
        for name, buffer in self.named_buffers(remove_duplicate=False):
            if name in self._buffer_dtypes:
                buffer.data = buffer.data.to(mixed.buffer_dtype or self._buffer_dtypes[name])
        self._in_full = full

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on each rank, whole; the first one after it reduces the sum of all.

        `model.zero_grad()` discards what was kept. An optimizer's `zero_grad()` does not see it: unlike in FSDP1, it is in no
        `.grad` until it is reduced.

        Raises:
            StateError: on a wrapper inside another.

        Example:
            >>> with model.no_sync():                                                             # doctest: +SKIP
            ...     model(batches[0]).backward()
            >>> model(batches[1]).backward()                                                      # doctest: +SKIP
        """
        self._only_root("no_sync()")
        with accumulate(self):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. Collective.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: the power of the norm, above 0; `float("inf")` takes the largest absolute value.

        Returns:
            The norm before clipping, a plain 0-dim tensor, equal on all ranks.

        Raises:
            StateError: on a wrapper inside another, or while gradients are only kept on each rank.
            ValueError: for a `norm_type` that is not above 0.
        """
        self._only_root("clip_grad_norm_()")
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def _only_root(self, doing: str) -> None:
        if not self.check_is_root():
            raise StateError(f"{doing} was called on a wrapper inside another: call it on the outermost one")

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by a communication hook of torch.distributed.algorithms instead. Once.

        Args:
            state: handed to the hook.
            hook: under NO_SHARD `hook(state, gradient)` averages the flat gradient in place; otherwise `hook(state, gradient,
                shard)` reduce-scatters (ranks * size,) into (size,), averaged.

        Raises:
            ValueError: for what cannot be called, a second hook, or hybrid strategies, which reduce in two steps.
            StateError: on a wrapper inside another, or inside a forward or backward.
        """
        self._only_root("register_comm_hook()")
        if not callable(hook):
            raise ValueError(f"register_comm_hook takes a callable, got {type(hook).__name__}")
        wrappers = [(wrapper, unit) for wrapper in self.fsdp_modules(self) if (unit := wrapper.unit) is not None]
        for wrapper, unit in wrappers:
            if wrapper._strategy in HYBRID:
                raise ValueError(
                    f"register_comm_hook: {wrapper._strategy.name} reduces in two steps, a hook would be one: use "
                    "set_all_reduce_hook() of each wrapper, which runs behind both"
                )
            options = unit.options
            if isinstance(options.reduce_scatter, _HookReduce) or isinstance(options.comm.collectives, _WithHook):
                raise ValueError("register_comm_hook was called before: a hook cannot be replaced")
            runtime_of(unit).requests.check_idle(unit, doing="register_comm_hook()")
            runtime_of(unit).requests.check_delivered(unit, doing="register_comm_hook()")
        for wrapper, unit in wrappers:
            unit.configure(reduce=replace(unit.options.reduce, divide=1.0))
            changes: dict[str, Any] = {"reduce_scatter": _HookReduce(state, hook)}
            if wrapper._strategy is ShardingStrategy.NO_SHARD:
                sums = _WithHook(unit.axis.device.type, partial(hook, state))
                changes = {"comm": replace(unit.options.comm, collectives=sums)}
            runtime_of(unit).requests.reconfigure(unit, doing="register_comm_hook()", **changes)

    # --- full parameters -------------------------------------------------------------------------------------------------

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
        """Full, ordinary Parameters for the length of the block, as `fullshard.full_params`, below any module. Collective.

        Args:
            module: a wrapper, or a module that holds some.
            recurse: whether the wrappers below are full as well.
            writeback: whether what was written is kept in the shards at the end; all ranks must write the same.
            rank0_only: only the first rank has full parameters. Needs `writeback=False`.
            offload_to_cpu: whether they are in the host's memory.
            with_grads: whether they have their full, averaged gradients.

        Raises:
            ValueError: for `rank0_only` with `writeback`.
            StateError: inside a forward or backward, or if another Parameter was assigned inside a block that writes.

        Example:
            >>> with FSDP.summon_full_params(model, writeback=False):                             # doctest: +SKIP
            ...     norms = [p.norm() for p in model.parameters()]
        """
        inside: nn.Module = module.sharded if isinstance(module, FullyShardedDataParallel) else module
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
        """Choose the form that `state_dict()` and `optim_state_dict()` of all wrappers in `module` have from now on.

        Args:
            module: a wrapper, or a module that holds some.
            state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT (DTensors) or LOCAL_STATE_DICT (the rows of this rank).
            state_dict_config: the config class of that type; None takes its defaults.
            optim_state_dict_config: likewise, for optimizers.

        Returns:
            The form before.

        Raises:
            ValueError: for another type, a config class of another type, or a module without wrappers, or whose forms differ.
        """
        before = FullyShardedDataParallel.get_state_dict_type(module)
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for wrapper in FullyShardedDataParallel.fsdp_modules(module):
            wrapper._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form that all wrappers in `module` have.

        Args:
            module: a wrapper, or a module that holds some.

        Returns:
            Type and configs.

        Raises:
            ValueError: if there is no wrapper, or their forms differ.
        """
        found = [wrapper._settings for wrapper in FullyShardedDataParallel.fsdp_modules(module)]
        if not found:
            raise ValueError(f"there is no FullyShardedDataParallel in this {type(module).__name__}")
        if any(settings != found[0] for settings in found):
            raise ValueError("the wrappers in this module have state dicts of different types: set one for all of them")
        return found[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for the length of a block.

        Args:
            module: a wrapper, or a module that holds some.
            state_dict_type: as of `set_state_dict_type`.
            state_dict_config: likewise.
            optim_state_dict_config: likewise.

        Raises:
            ValueError: likewise.

        Example:
            >>> with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):               # doctest: +SKIP
            ...     torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)
        """
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = [wrapper._settings for wrapper in wrappers]
        FullyShardedDataParallel.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, before):
                wrapper._settings = settings

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter names, in the form that was set for the model. Collective.

        Args:
            model: a wrapper, or a module that holds some.
            optim: an optimizer of its parameters.
            optim_state_dict: the optimizer's own `state_dict()`, where the caller has it already.
            group: the ranks that take part; None takes those of the model's mesh.

        Returns:
            {"state": {name: {key: value}}, "param_groups": [...]}; {} on ranks that do not keep it (`rank0_only`).

        Raises:
            ValueError: on every rank, before any state travels, for parameters, states or numeric settings that differ.
        """
        form = _optimizer_form(FullyShardedDataParallel.get_state_dict_type(model))
        return _saved(model, optim, form, group, optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Fit what `optim_state_dict` gave to `optim`, and with `load_directly` load it as well. Collective.

        Names and keys may come in any order. If the form set for the model is full and `rank0_only`, only the first rank needs
        to have it. ShardedTensors, as FSDP1 saved and `load_sharded_optimizer_state_dict` gives, are gathered one at a time.

        Args:
            model: a wrapper, or a module that holds some.
            optim: an optimizer of its parameters.
            optim_state_dict: a state by names, in the form that is set for the model; left as it is.
            is_named_optimizer: whether the result is keyed by names instead of places in the optimizer.
            load_directly: whether to call `optim.load_state_dict` as well.
            group: the ranks that take part; None takes those of the model's mesh.

        Returns:
            What `optim.load_state_dict` takes. Without "param_groups" in `optim_state_dict` there are none in it, and
            `load_directly` keeps the optimizer's.

        Raises:
            ValueError: on every rank, naming it, for parameters that are missing or unknown, and for states that do not fit.
        """
        form = _optimizer_form(FullyShardedDataParallel.get_state_dict_type(model))
        groups = state_dicts.groups_of(model, optim)
        if form.kind is state_dicts.FULL and form.rank0_only:
            optim_state_dict = _scatter(model, optim_state_dict, groups, group)
        local = form.kind is state_dicts.LOCAL
        ready = state_dicts.load_optimizer_state(
            model, optim_state_dict, groups, _ranks(model, group), local=local, by_name=is_named_optimizer
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
        """The optimizer's full state by names, in the host's memory. Collective.

        Args:
            model: a wrapper, or a module that holds some.
            optim: an optimizer of its parameters.
            optim_input: what FSDP1 needed `optim` was built with; `optim` knows it.
            rank0_only: whether the first rank alone keeps it.
            group: the ranks that take part; None takes those of the model's mesh.

        Returns:
            The state; {} on ranks that do not keep it.

        Raises:
            ValueError: as of `optim_state_dict`.
        """
        del optim_input
        return _saved(model, optim, StateDictFormat(state_dicts.FULL, True, rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """The optimizer's state by names, as DTensors. Collective.

        Args:
            model: a wrapper, or a module that holds some.
            optim: an optimizer of its parameters.
            group: the ranks that take part; None takes those of the model's mesh.

        Returns:
            The state, on every rank.

        Raises:
            ValueError: as of `optim_state_dict`.
        """
        return _saved(model, optim, StateDictFormat(state_dicts.SHARDED), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Fit a full state by names, which every rank has, to an optimizer. Collective.

        Args:
            full_optim_state_dict: what `full_optim_state_dict` gave.
            model: a wrapper, or a module that holds some.
            optim_input: what the optimizer is built with, where `optim` is not given; None is all parameters.
            optim: an optimizer of the model's parameters.

        Returns:
            What `optimizer.load_state_dict` takes.

        Raises:
            ValueError: as of `optim_state_dict_to_load`.
        """
        groups = state_dicts.groups_of(model, optim, optim_input)
        return state_dicts.load_optimizer_state(model, full_optim_state_dict, groups, _ranks(model, None))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Fit a state of DTensors by names to an optimizer. Collective.

        Args:
            sharded_optim_state_dict: what `sharded_optim_state_dict` gave.
            model: a wrapper, or a module that holds some.
            optim: an optimizer of its parameters.

        Returns:
            What `optimizer.load_state_dict` takes.

        Raises:
            ValueError: as of `optim_state_dict_to_load`.
        """
        return state_dicts.load_optimizer_state(
            model, sharded_optim_state_dict, state_dicts.groups_of(model, optim), _ranks(model, None)
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Fit a full state by names, which the first rank alone has, to an optimizer. Collective.

        Args:
            full_optim_state_dict: what `full_optim_state_dict` gave on the first rank; not looked at on the others.
            model: a wrapper, or a module that holds some.
            optim_input: what the optimizer is built with, where `optim` is not given; None is all parameters.
            optim: an optimizer of the model's parameters.
            group: the ranks that take part; None takes those of the model's mesh, which then must be all ranks or 1-D.

        Returns:
            What `optimizer.load_state_dict` takes.

        Raises:
            ValueError: as of `optim_state_dict_to_load`, or if the first rank has no state.
        """
        groups = state_dicts.groups_of(model, optim, optim_input)
        whole = _scatter(model, full_optim_state_dict, groups, group)
        return state_dicts.load_optimizer_state(model, whole, groups, _ranks(model, group))

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Key a state that is keyed by names or by places in the optimizer by the other.

        Args:
            optim_state_dict: the state, keyed by either.
            optim_state_key_type: PARAM_NAME or PARAM_ID: what to key it by.
            model: a wrapper, or a module that holds some.
            optim_input: what the optimizer was built with, where `optim` is not given; None is all parameters.
            optim: an optimizer of the model's parameters.

        Returns:
            The state, keyed by the other.

        Raises:
            ValueError: for keys that are neither.
        """
        known = state_dicts.names_of(model)
        flat = [known[id(p)] for group in state_dicts.groups_of(model, optim, optim_input) for p in group]
        return state_dicts.rekeyed(optim_state_dict, optim_state_key_type, flat)


FSDP = FullyShardedDataParallel


# --- building -------------------------------------------------------------------------------------------------------------


def _warn_of_no_effect(*, use_orig_params: bool, limit_all_gathers: bool) -> None:
    """Say once of an argument that it makes no difference here."""
    if not use_orig_params:
        warn_once("use_orig_params=False: there is no FlatParameter, parameters are the originals as with True")
    if not limit_all_gathers:
        warn_once("limit_all_gathers=False: gathers are always limited here, to one unit ahead of the one that computes")


def _plan_full_precision(plan: Plan, module: nn.Module, given: FSDP1Arguments) -> list[str]:
    """Add the modules that mixed precision leaves out (batch norms) to the plan, as units of their own; their names."""
    mixed = given.mixed_precision
    kept: list[str] = []
    if mixed is not None and mixed.param_dtype is not None:
        classes = _torch.left_out_of(mixed)
        left_out = {id(inner) for inner in given.ignored_modules}
        planned = {name for unit in plan.units for name in unit.modules}
        for name in plan.outline.kinds:
            inner = module.get_submodule(name)
            if name and isinstance(inner, classes) and id(inner) not in left_out:
                if name not in planned:
                    plan.add(name)
                kept.append(name)
    if kept:
        names = sorted({type(module.get_submodule(name)).__name__ for name in kept})
        warn_once(f"mixed precision and auto_wrap_policy: {', '.join(names)} are wrapped on their own, in full precision")
    return kept


def _options(given: FSDP1Arguments) -> dict[str, Any]:
    """The options of `fully_shard` that the arguments become."""
    return {
        "reshard_after_forward": False if given.strategy in _KEEPS else None,
        "mp_policy": _precision(given.mixed_precision or MixedPrecision()),
        "offload_policy": CPUOffloadPolicy() if given.offload else OffloadPolicy(),
        "comm_policy": CommPolicy(),
    }


def _precision(mixed: MixedPrecision) -> MixedPrecisionPolicy:
    # FSDP1 reduces in the dtype that it computes in, also where FSDP2 reduces in that of the gradients (torch 2.15).
    return MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype or mixed.param_dtype, cast_forward_inputs=False)


def _has_no_forward(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


class _Items(nn.Module):
    """The items of a list or dict of modules under their names: plans are made for modules that have a forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, item in module.named_children():
            self.add_module(name, item)

    def forward(self) -> None:
        raise NotImplementedError


def _is_list(module: nn.Module, managed: ManagedTensors) -> bool:
    """Whether `module` is a list or dict of modules, without a forward. Raises ValueError if it holds what no unit does."""
    if not _has_no_forward(module):
        return False
    if managed.refs:
        raise ValueError(
            f"the {type(module).__name__} to wrap has no forward, so nobody would gather '{managed.refs[0].name}', which no "
            "wrapper below it holds: wrap its items, or give an auto_wrap_policy that chooses them"
        )
    return True


def _put_together(parts: class_swap.ShardedSnapshot) -> nn.Module:
    return class_swap.put_together(parts, sharded_class)


_OF_UNITS: dict[str, Any] = {
    name: method
    for name, method in vars(FSDPModule).items()
    if not name.startswith("_") and name not in ("extra_repr", "zero_grad")
}


def _check_overrides(units: Iterable[Any]) -> None:
    known = set(FullyShardedDataParallel.__init__.__annotations__) - {"module", "auto_wrap_policy", "return"}
    for unit in units:
        for name in unit.options:
            if name not in known:
                raise ValueError(
                    f"the policy gives '{unit.name}' the option '{name}', which FullyShardedDataParallel does not have: there "
                    f"are {sorted(known)}"
                )


class _InFull:
    """Inputs of a module that is left out of mixed precision come in its own dtype, outputs go in that of the inputs."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self._own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        self._given: torch.dtype | None = None

    def put_on(self, wrapper: nn.Module) -> None:
        wrapper.register_forward_pre_hook(self._before, with_kwargs=True)
        wrapper.register_forward_hook(self._after)

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        self._given = tensors[0].dtype if tensors else None
        return cast_floats(args, self._own), cast_floats(kwargs, self._own)

    def _after(self, _: nn.Module, args: Any, output: Any) -> Any:
        return output if self._given is None else cast_floats(output, self._given)


# --- saving and loading ---------------------------------------------------------------------------------------------------


def _settings(
    kind: StateDictType, config: StateDictConfig | None = None, optim_config: OptimStateDictConfig | None = None
) -> StateDictSettings:
    known: dict[StateDictType, tuple[type[Any], type[Any]]] = {
        StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
        StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
        StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    }
    if kind not in known:
        raise ValueError(f"expected a StateDictType, got {kind!r}")
    ours, theirs = known[kind]
    config, optim_config = config or ours(), optim_config or theirs()
    for given, wanted in ((config, ours), (optim_config, theirs)):
        if not isinstance(given, wanted):
            raise ValueError(f"{kind.name} takes a {wanted.__name__}, got {type(given).__name__}")
    return StateDictSettings(kind, config, optim_config)


def _model_form(settings: StateDictSettings) -> StateDictFormat:
    config: Any = settings.state_dict_config
    return StateDictFormat(settings.state_dict_type, config.offload_to_cpu, getattr(config, "rank0_only", False))


def _optimizer_form(settings: StateDictSettings) -> StateDictFormat:
    config: Any = settings.optim_state_dict_config
    return StateDictFormat(settings.state_dict_type, config.offload_to_cpu, getattr(config, "rank0_only", False))


def _after_save(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put values under clean names, in the form that was set. Wrappers below did theirs, which can only become full."""
    form = _model_form(module._settings)
    unit: Unit | None = module.unit
    if unit is not None and unit.exposure.plain and form.kind is not state_dicts.FULL:
        raise StateError(f"a state dict of {form.kind.name} was asked for inside summon_full_params(): take it outside of it")
    keep = form.keeps(first=_is_first(module, None))
    dtypes = module._buffer_dtypes
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        name = clean_name(key[len(prefix) :])
        if name in dtypes and isinstance(value, Tensor) and form.kind is not state_dicts.LOCAL:
            value = value.to(dtypes[name])
        value = form.of(value, keep=keep)
        if keep:
            state_dict[prefix + name] = value


def _before_load(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names as the wrapper has them, and this rank's rows as what they are rows of."""
    unit: Unit | None = module.unit
    rows = module._settings.state_dict_type is state_dicts.LOCAL
    inner: nn.Module = module._fsdp_wrapped_module
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    known = {clean_name(name): parameter for name, parameter in parameters.items()}
    compiled: dict[str, str] = {}  # names of modules that were compiled apart; what else wraps puts its own names in
    for name in (*parameters, *dict(inner.named_buffers(remove_duplicate=False))):
        if "_orig_mod" in name.split("."):
            compiled[clean_name(name)] = ".".join(part for part in name.split(".") if part not in (_INNER, _LOOKED_THROUGH[0]))
    inside = f"{prefix}{_INNER}."
    for key in sorted(key for key in state_dict if key.startswith(prefix) and not key.startswith(inside)):
        value = state_dict.pop(key)
        name = key[len(prefix) :]
        if name.rpartition(".")[2] in ("_flat_param", "flat_param"):
            raise ValueError(f"'{key}' is a FlatParameter of FSDP1, which has no meaning here: save FULL_STATE_DICT there")
        logical = next(iter(logical_parameters([known[name]])), None) if name in known else None
        if unit is None or logical is None or logical not in unit.parameters:
            pass  # of another wrapper, or of none
        elif isinstance(value, _torch.ShardedTensor):
            value = _from_sharded_tensor(key, value, logical)
        elif rows and isinstance(value, Tensor):
            if value.shape != logical.local.shape:
                raise ValueError(
                    f"LOCAL_STATE_DICT: '{key}' has shape {tuple(value.shape)}, this rank's rows are "
                    f"{tuple(logical.local.shape)}: load it on as many ranks as saved it, or save it as SHARDED_STATE_DICT"
                )
            value = logical.dtensor_like_shard(value.to(logical.local.dtype))
        state_dict[inside + compiled.get(name, name)] = value


def _from_sharded_tensor(key: str, value: Any, parameter: Any) -> Tensor:
    """This rank's rows of a ShardedTensor, as FSDP1 saves them (collective over its ranks)."""
    if value.size() != parameter.shape:
        raise ValueError(
            f"'{key}' has shape {tuple(value.size())} in the ShardedTensor to load, expected {tuple(parameter.shape)}"
        )
    whole = _torch.whole_of(value, torch.device(parameter.sharding.mesh.device_type))
    return shard_of(parameter, whole, dtype=parameter.local.dtype)


def _after_load(module: Any, incompatible: Any) -> None:
    """Missing and unexpected names, as the caller knows them."""
    for names in incompatible:
        names[:] = [clean_name(name) for name in names]


def _saved(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    form: StateDictFormat,
    group: dist.ProcessGroup | None,
    given: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return state_dicts.optimizer_state(model, optimizer, form, _ranks(model, group), given=given, first=_is_first(model, group))


def _ranks(model: nn.Module, group: dist.ProcessGroup | None) -> Ranks:
    """The ranks that save and load together: those of `group`; without one, of the mesh that `model` is on."""
    unit = next(units_of(model, True), None)
    device = torch.device("cpu") if unit is None else unit.axis.device
    if group is not None:
        return Ranks((group,), device)
    axes = () if unit is None else (unit.axis.replicas.group if unit.axis.replicas is not None else None, unit.axis.group)
    return Ranks(tuple(axis for axis in axes if axis is not None), device)


def _scatter(
    model: nn.Module, saved: dict[str, Any] | None, groups: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    known = state_dicts.names_of(model)
    logical = {known[id(p)]: next(iter(logical_parameters([p])), None) for own in groups for p in own if id(p) in known}
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    device = units[0].axis.device if units else torch.device("cpu")

    def cut(name: str, whole: Tensor) -> Any:
        parameter = logical.get(name)
        fits = parameter is not None and whole.shape == parameter.shape
        return shard_of(parameter, whole, dtype=whole.dtype) if parameter is not None and fits else whole

    mesh = units[0].axis.mesh if units else None
    if group is None and mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    elif group is None and mesh is not None and mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the optimizer's state is on the first of {mesh.size()} ranks of {dist.get_world_size()}: pass group=, their "
            "process group, to say who takes part"
        )
    return state_dicts.scattered(saved, group, device, cut)


def _is_first(model: nn.Module, group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is the first of `group`; without one, of the mesh that `model` is on."""
    if group is not None:
        return dist.get_rank(group) == 0
    unit = next(units_of(model, True), None)
    return dist.get_rank() == 0 if unit is None else not any(unit.axis.mesh.get_coordinate() or ())


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
