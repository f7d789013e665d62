"""FSDP1's wrapper, `FullyShardedDataParallel`, on units of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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

from fullshard import _torch, assembly, formats
from fullshard.api import Order, fully_shard
from fullshard.comm import Collectives, Pending, ReduceScatter
from fullshard.errors import StateError
from fullshard.formats import Form
from fullshard.given import HYBRID, Given, cast_buffers, device_type_of, materialize, mesh_of
from fullshard.gloo import collectives_for
from fullshard.hooks import cast_floats
from fullshard.module import plain_class, units_of
from fullshard.modules import clean_name, collect
from fullshard.notices import say_once
from fullshard.optim import clip_grad_norm_
from fullshard.parameter import logical_parameters
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime import runtime_of
from fullshard.scopes import full_params
from fullshard.unit import Unit, unit_of
from fullshard.wrap import mind_mixtures, plan_model

_INNER = "_fsdp_wrapped_module"
_LOOKED_THROUGH = ("_checkpoint_wrapped_module", "_orig_mod")  # what activation checkpointing and torch.compile put around
_KEEPS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, _torch.HYBRID_ZERO2)


class _Hookable:
    """Collectives over replicas whose sum a caller's hook takes over."""

    def __init__(self, inner: Collectives, hook: Callable[[Tensor], None]) -> None:
        self._inner, self._hook = inner, hook
        self.ranks, self.rank, self.direct_min_bytes = inner.ranks, inner.rank, inner.direct_min_bytes
        self.gatherer, self.reduce_scatter, self.all_reduce_max = inner.gatherer, inner.reduce_scatter, inner.all_reduce_max

    @property
    def tag(self) -> Any:
        """Of the messages of the inner ones."""
        return getattr(self._inner, "tag", None)

    @tag.setter
    def tag(self, tag: Any) -> None:
        self._inner.tag = tag  # type: ignore[attr-defined]

    def all_reduce(self, tensor: Tensor) -> Pending:
        self._hook(tensor)
        return Pending()


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
        ignored_modules, ignored_states: left alone; one of them.
        param_init_fn: gives a module that has parameters or buffers on meta memory and values of its own (not of those below
            it). None: `to_empty` and `reset_parameters()`. Random numbers are drawn from one seed on all ranks.
        device_id: the current device, to move the module to.
        sync_module_states: broadcast parameters and buffers from the first rank, which alone needs to have values.
        forward_prefetch: units are always gathered one ahead, in the order of the last run, so both values mean the same.
        limit_all_gathers: likewise there are never more than that in flight; False is said to have no effect.
        use_orig_params: parameters always are the originals; False is said to mean the same.
        device_mesh: one axis to shard over, or two (replicate, shard) for hybrid strategies, instead of process_group.

    Raises:
        ValueError: before anything has changed, naming what was given and what to give instead.

    Example:
        >>> from fullshard.compat import FullyShardedDataParallel as FSDP
        >>> model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))                   # doctest: +SKIP

    Source: the interface of `torch.distributed.fsdp.FullyShardedDataParallel`; Zhao et al. (arXiv 2304.11277).
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
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        given = Given.of(
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
        )
        if not use_orig_params:
            say_once("use_orig_params=False: there is no FlatParameter, parameters are the originals as with True")
        if not limit_all_gathers:
            say_once("limit_all_gathers=False: gathers are always limited here, to one unit ahead of the one that computes")
        super().__init__()
        mesh = mesh_of(given, device_type_of(module, given))
        options = _options(given)
        if auto_wrap_policy is not None:
            self._wrap_below(module, given, auto_wrap_policy, mesh, options)
        holdings = collect([module], ignored=given.ignored, is_unit=lambda inner: unit_of(inner) is not None)
        materialize(holdings, given, mesh)
        fully_shard(module, mesh=mesh, ignored_params=set(given.ignored), **options)
        self._fsdp_wrapped_module = module
        self._is_root: bool | None = None
        self._strategy = given.strategy
        self._casts_root = mixed_precision is None or mixed_precision.cast_root_forward_inputs
        self._casts = mixed_precision is not None and mixed_precision.cast_forward_inputs
        self._input_dtype = None if mixed_precision is None else mixed_precision.param_dtype
        self._settings = _settings(StateDictType.FULL_STATE_DICT)
        self._buffer_dtypes = cast_buffers(module, holdings, given)
        if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            self.unit.follow(backward=())
        self.register_state_dict_post_hook(_after_save)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    def _wrap_below(self, module: nn.Module, given: Given, policy: Any, mesh: DeviceMesh, options: dict[str, Any]) -> None:
        """Wrap the modules that `policy` chooses, children first, and those that are left out of mixed precision."""
        plan = plan_model(module, policy, ignored_modules=given.ignored_modules, ignored_params=given.ignored)
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
            say_once(f"mixed precision and auto_wrap_policy: {', '.join(names)} are wrapped on their own, in full precision")
        mind_mixtures(plan.mixtures())
        below = [unit for unit in plan.units if "" not in unit.modules]
        if plan.units[-1].options:
            say_once(
                f"auto_wrap_policy gives the module that is wrapped options, {sorted(plan.units[-1].options)}, which "
                "are not used: pass them to FullyShardedDataParallel itself"
            )
        Order(module, mesh=mesh, ignored_params=given.ignored, **options)
        _check_overrides(below)
        chosen = [(name, unit.options) for unit in below for name in unit.modules]
        every = {name: given.overridden({**o, **({"mixed_precision": None} if name in kept else {})}) for name, o in chosen}
        for name, arguments in every.items():  # all are checked before the first is made
            inner = module.get_submodule(name)
            theirs = Given.of(inner, **arguments)
            their_mesh = mesh_of(theirs, device_type_of(inner, theirs))
            Order(inner, mesh=their_mesh, ignored_params=theirs.ignored, **_options(theirs))
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
    def sharded(self) -> Any:
        """The module that is a unit: what was wrapped, also if something was put around it since."""
        inner: nn.Module | None = self._fsdp_wrapped_module
        while inner is not None and unit_of(inner) is None:
            children = _torch.children_of(inner)
            inner = next((children[name] for name in _LOOKED_THROUGH if name in children), None)
        if inner is None:
            raise StateError(
                f"the module inside of this wrapper was replaced by a {type(self._fsdp_wrapped_module).__name__}, which is no "
                "unit: replace it before wrapping"
            )
        return inner

    @property
    def unit(self) -> Unit:
        """The unit of the wrapped module."""
        unit = unit_of(self.sharded)
        assert unit is not None
        return unit

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have, the wrapped module may."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER or name.startswith("__"):  # how to copy and pickle is the wrapper's own
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """That of a wrapped Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one, as far as is known: before the first forward, the one asked is."""
        if self._is_root is None:
            self._become_root()
        return bool(self._is_root)

    def _become_root(self) -> None:
        for below in self.fsdp_modules(self):
            below._is_root = below is self

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in `module`, itself included; with `root_only`, those that no other is around."""
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return [inner for inner in found if not root_only or inner.check_is_root()]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As `nn.Module.apply`, with full parameters in place, and modules of the class they had; what `fn` writes to
        parameters is kept. Collective.
        """
        if self.unit.shown:
            return super().apply(fn)  # type: ignore[return-value]
        with full_params(self), assembly.undressed(units_of(self, True), plain_class):
            return super().apply(fn)  # type: ignore[return-value]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; also discards what backwards in `no_sync()` kept, which an optimizer's cannot see."""
        super().zero_grad(set_to_none)
        for wrapper in self.fsdp_modules(self):
            wrapper.sharded.zero_grad(set_to_none)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`, of the form that was set. Names are those that the unwrapped module has."""
        if any(unit.shown for unit in units_of(self, True)):
            raise StateError("load_state_dict() was called inside summon_full_params(): call it outside of the block")
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as wrong:
            if f"{_INNER}." not in str(wrong):
                raise
            raise RuntimeError(str(wrong).replace(f"{_INNER}.", "")) from wrong

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`, under the names that the unwrapped module has."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As `nn.Module.named_buffers`, under the names that the unwrapped module has."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    # --- running ---------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_root is None:
            self._become_root()
        if self._input_dtype is not None and (self._casts_root if self._is_root else self._casts):
            args, kwargs = cast_floats(args, self._input_dtype), cast_floats(kwargs, self._input_dtype)
        return self._fsdp_wrapped_module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on each rank, whole; the first one after it reduces the sum of all.

        `model.zero_grad()` discards what was kept. An optimizer's `zero_grad()` does not see it: unlike in FSDP1, it is in no
        `.grad` until it is reduced.
        """
        self._only_root("no_sync()")
        with self.sharded.accumulate():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns it, as it was. Collective."""
        self._only_root("clip_grad_norm_()")
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def _only_root(self, doing: str) -> None:
        if not self.check_is_root():
            raise StateError(f"{doing} was called on a wrapper inside another: call it on the outermost one")

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by `hook` instead, as of torch.distributed.algorithms: `hook(state, gradient)` averages the flat
        gradient in place under NO_SHARD; otherwise `hook(state, gradient, shard)` reduce-scatters (ranks * size,) into
        (size,), averaged. Hybrid strategies take none.
        """
        self._only_root("register_comm_hook()")
        if not callable(hook):
            raise ValueError(f"register_comm_hook takes a callable, got {type(hook).__name__}")
        wrappers = self.fsdp_modules(self)
        for wrapper in wrappers:
            if wrapper._strategy in HYBRID:
                raise ValueError(
                    f"register_comm_hook: {wrapper._strategy.name} reduces in two steps, a hook would be one: use "
                    "set_all_reduce_hook() of the unit (wrapper.module), which runs behind both"
                )
            options = wrapper.unit.options
            if isinstance(options.reduce_scatter, _HookReduce) or isinstance(options.comm.collectives, _WithHook):
                raise ValueError("register_comm_hook was called before: a hook cannot be replaced")
            runtime_of(wrapper.unit).check_idle(wrapper.unit, doing="register_comm_hook()")
            runtime_of(wrapper.unit).check_delivered(wrapper.unit, doing="register_comm_hook()")
        for wrapper in wrappers:
            unit = wrapper.unit
            wrapper.sharded.set_gradient_divide_factor(1.0)
            if wrapper._strategy is ShardingStrategy.NO_SHARD:
                sums = _WithHook(unit.axis.device.type, partial(hook, state))
                runtime_of(unit).reconfigure(
                    unit, doing="register_comm_hook()", comm=replace(unit.options.comm, collectives=sums)
                )
            else:
                wrapper.sharded.set_custom_reduce_scatter(_HookReduce(state, hook))

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
        """Full, ordinary Parameters for the length of the block, as `fullshard.full_params`, below any module. Collective."""
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
        """Which form `state_dict()` and `optim_state_dict()` of all wrappers in `module` have from now on; the one before."""
        before = FullyShardedDataParallel.get_state_dict_type(module)
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for wrapper in FullyShardedDataParallel.fsdp_modules(module):
            wrapper._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form that all wrappers in `module` have. Raises ValueError if there is none, or they differ."""
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
        """`set_state_dict_type` for the length of a block."""
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

        optim_state_dict: the optimizer's own `state_dict()`, where the caller has it already.
        """
        form = _optimizer_form(FullyShardedDataParallel.get_state_dict_type(model))
        return formats.optimizer_state(model, optim, form, given=optim_state_dict, first=_is_first(model, group))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, of what `optim_state_dict` gave; with `load_directly`, load it as well.

        Collective if the form set for the model is full and `rank0_only`: then only the first rank needs to have it.
        """
        form = _optimizer_form(FullyShardedDataParallel.get_state_dict_type(model))
        groups = formats.groups_of(model, optim)
        if form.kind is formats.FULL and form.rank0_only:
            optim_state_dict = _scatter(model, optim_state_dict, groups, group)
        ready = formats.state_to_load(
            model, optim_state_dict, groups, local=form.kind is formats.LOCAL, by_name=is_named_optimizer
        )
        if load_directly:
            optim.load_state_dict(ready)
        return ready

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's full state by names, in the host's memory; {} on ranks that do not keep it. Collective.

        optim_input: FSDP1 needed what the optimizer was built with; `optim` knows it.
        """
        del optim_input
        form = Form(formats.FULL, True, rank0_only)
        return formats.optimizer_state(model, optim, form, first=_is_first(model, group))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """The optimizer's state by names, as DTensors."""
        return formats.optimizer_state(model, optim, Form(formats.SHARDED), first=_is_first(model, group))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes, of a full state by names that every rank has."""
        return formats.state_to_load(model, full_optim_state_dict, formats.groups_of(model, optim, optim_input))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes, of what `sharded_optim_state_dict` gave."""
        return formats.state_to_load(model, sharded_optim_state_dict, formats.groups_of(model, optim))

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes, of a full state by names that only the first rank has. Collective."""
        groups = formats.groups_of(model, optim, optim_input)
        return formats.state_to_load(model, _scatter(model, full_optim_state_dict, groups, group), groups)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """A state that is keyed by names or by places in the optimizer, keyed by the other."""
        known = formats.names_of(model)
        flat = [known[id(p)] for group in formats.groups_of(model, optim, optim_input) for p in group]
        return formats.rekeyed(optim_state_dict, optim_state_key_type, flat)


FSDP = FullyShardedDataParallel


# --- building -------------------------------------------------------------------------------------------------------------


def _options(given: Given) -> dict[str, Any]:
    """Those of `fully_shard`."""
    mixed = given.mixed_precision or MixedPrecision()
    return {
        "reshard_after_forward": False if given.strategy in _KEEPS else None,
        "mp_policy": MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if given.offload else OffloadPolicy(),
        "comm_policy": CommPolicy(),
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


def _model_form(settings: StateDictSettings) -> Form:
    config: Any = settings.state_dict_config
    return Form(settings.state_dict_type, config.offload_to_cpu, getattr(config, "rank0_only", False))


def _optimizer_form(settings: StateDictSettings) -> Form:
    config: Any = settings.optim_state_dict_config
    return Form(settings.state_dict_type, config.offload_to_cpu, getattr(config, "rank0_only", False))


def _after_save(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Under clean names, in the form that was set. Wrappers below did theirs already, which can only become full."""
    form = _model_form(module._settings)
    if module.unit.shown and form.kind is not formats.FULL:
        raise StateError(f"a state dict of {form.kind.name} was asked for inside summon_full_params(): take it outside of it")
    keep = form.keeps(first=_is_first(module, None))
    dtypes = module._buffer_dtypes
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        name = clean_name(key[len(prefix) :])
        if name in dtypes and isinstance(value, Tensor) and form.kind is not formats.LOCAL:
            value = value.to(dtypes[name])
        value = form.of(value, keep=keep)
        if keep:
            state_dict[prefix + name] = value


def _before_load(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names as the wrapper has them, and this rank's rows as what they are rows of."""
    unit: Unit = module.unit
    rows = module._settings.state_dict_type is formats.LOCAL
    inner: nn.Module = module._fsdp_wrapped_module
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    known = {clean_name(name): parameter for name, parameter in parameters.items()}
    compiled: dict[str, str] = {}  # names of modules that were compiled apart; what else wraps puts its own names in
    for name in (*parameters, *dict(inner.named_buffers(remove_duplicate=False))):
        if "_orig_mod" in name.split("."):
            compiled[clean_name(name)] = ".".join(part for part in name.split(".") if part not in (_INNER, _LOOKED_THROUGH[0]))
    inside = f"{prefix}{_INNER}."
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inside)]:
        value = state_dict.pop(key)
        name = key[len(prefix) :]
        logical = next(iter(logical_parameters([known[name]])), None) if name in known else None
        if rows and logical is not None and logical in unit.parameters and isinstance(value, Tensor):
            if value.shape != logical.local.shape:
                raise ValueError(
                    f"LOCAL_STATE_DICT: '{key}' has shape {tuple(value.shape)}, this rank's rows are "
                    f"{tuple(logical.local.shape)}: load it on as many ranks as saved it, or save it as SHARDED_STATE_DICT"
                )
            value = logical.face(value.to(logical.local.dtype))
        state_dict[inside + compiled.get(name, name)] = value


def _after_load(module: Any, incompatible: Any) -> None:
    """Missing and unexpected names, as the caller knows them."""
    for names in incompatible:
        names[:] = [clean_name(name) for name in names]


def _scatter(
    model: nn.Module, saved: dict[str, Any] | None, groups: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    known = formats.names_of(model)
    logical = {known[id(p)]: next(iter(logical_parameters([p])), None) for own in groups for p in own if id(p) in known}
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    device = units[0].axis.device if units else torch.device("cpu")

    def cut(name: str, whole: Tensor) -> Any:
        parameter = logical.get(name)
        fits = parameter is not None and whole.shape == parameter.shape
        return parameter.shard_of(whole, dtype=whole.dtype) if parameter is not None and fits else whole

    mesh = units[0].axis.mesh if units else None
    if group is None and mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    elif group is None and mesh is not None and mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the optimizer's state is on the first of {mesh.size()} ranks of {dist.get_world_size()}: pass group=, their "
            "process group, to say who takes part"
        )
    return formats.scattered(saved, group, device, cut)


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
