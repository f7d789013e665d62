"""FSDP1's wrapper, `FullyShardedDataParallel`, on units of `fully_shard`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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

from fullshard import _torch, formats
from fullshard.api import Order, fully_shard
from fullshard.comm import Collectives, Pending, ReduceScatter, collectives_for
from fullshard.formats import Form
from fullshard.hooks import cast_floats
from fullshard.materialize import common_seed, seeded
from fullshard.mesh import beside
from fullshard.modules import Claim, Holdings, clean_name, collect
from fullshard.optim import clip_grad_norm_
from fullshard.parameter import logical_parameters
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime import Unit, say_once, unit_of
from fullshard.schedule import StateError
from fullshard.scopes import full_params
from fullshard.wrap import mind_mixtures, plan_model

_INNER = "_fsdp_wrapped_module"
_HYBRID = (ShardingStrategy.HYBRID_SHARD, _torch.HYBRID_ZERO2)
_KEEPS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, _torch.HYBRID_ZERO2)
Groups = Any  # a ProcessGroup, or a pair of them: (to shard over, to replicate over)


# --- the constructor's arguments, resolved --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """What the constructor was told, checked: what a wrapper and those that it makes below itself have in common."""

    process_group: Groups
    device_mesh: DeviceMesh | None
    strategy: ShardingStrategy
    offload: bool
    prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    init: Callable[[nn.Module], None] | None
    device_id: torch.device | None
    sync: bool
    ignored: tuple[nn.Parameter, ...]
    ignored_modules: tuple[nn.Module, ...]

    def overridden(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a wrapper below, with what a policy said of it."""
        return {
            "process_group": self.process_group,
            "device_mesh": self.device_mesh,
            "sharding_strategy": self.strategy,
            "cpu_offload": CPUOffload(self.offload),
            "backward_prefetch": self.prefetch,
            "mixed_precision": self.mixed_precision,
            "param_init_fn": self.init,
            "device_id": self.device_id,
            "sync_module_states": self.sync,
            "ignored_states": (*self.ignored, *self.ignored_modules),
            "use_orig_params": True,
            **options,
        }


def _check_given(
    module: nn.Module, mixed: MixedPrecision | None, groups: Groups, mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> None:
    """Raises ValueError for what fullshard does not do, before anything has changed."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}")
    if mixed is not None and mixed.keep_low_precision_grads:
        raise ValueError(
            "MixedPrecision(keep_low_precision_grads=True): a Parameter's .grad has the Parameter's dtype here, as in all of "
            "torch. To keep gradients in low precision, cast the model before wrapping it: model.to(torch.bfloat16)"
        )
    if groups is not None and mesh is not None:
        raise ValueError("FullyShardedDataParallel takes process_group or device_mesh, got both: give one of them")
    pair = isinstance(groups, tuple)
    if pair and strategy not in _HYBRID:
        raise ValueError(f"process_group is a pair, for hybrid sharding, but sharding_strategy is {strategy.name}")
    if groups is not None and not pair and strategy in _HYBRID:
        raise ValueError(
            f"{strategy.name} takes a pair of process groups (to shard over, to replicate over), a 2-D device_mesh, or neither"
        )
    if mesh is not None and mesh.ndim != (2 if strategy in _HYBRID else 1):
        raise ValueError(
            f"{strategy.name} takes a {'2' if strategy in _HYBRID else '1'}-D device_mesh"
            f"{' (replicate, shard)' if strategy in _HYBRID else ''}, got one of {mesh.ndim} axes"
        )


def _ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[tuple[nn.Parameter, ...], tuple[nn.Module, ...]]:
    """Parameters and modules to leave alone."""
    if modules is not None and states is not None:
        raise ValueError("FullyShardedDataParallel got ignored_modules and ignored_states: give ignored_states alone")
    given = list(states if states is not None else modules or ())
    for item in given:
        if not isinstance(item, nn.Module) and (modules is not None or not isinstance(item, nn.Parameter)):
            raise ValueError(f"ignored_{'modules' if modules is not None else 'states'} has a {type(item).__name__}")
    whole = [inner for item in given if isinstance(item, nn.Module) for inner in item.modules()]
    single = [item for item in given if isinstance(item, nn.Parameter)]
    return (*single, *(p for module in whole for p in module.parameters(recurse=False))), tuple(whole)


def _device_type(module: nn.Module, given: _Given) -> str:
    if given.device_mesh is not None:
        return given.device_mesh.device_type
    if given.device_id is not None:
        return given.device_id.type
    first = next((p.device.type for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    if first is not None:
        return first
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None and _torch.has_backend(accelerator) else "cpu"


def _device(device_id: int | torch.device | None) -> torch.device | None:
    """Raises ValueError for a device that is not this rank's current one."""
    if device_id is None:
        return None
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise ValueError(f"device_id={device_id}, but torch sees no accelerator: leave it out, or give torch.device('cpu')")
        device_id = torch.device(accelerator.type, device_id)
    if device_id.type != "cpu":
        current = torch.get_device_module(device_id.type).current_device()
        if device_id.index not in (None, current):
            raise ValueError(
                f"device_id is {device_id}, but the current device is {current}: call "
                f"torch.{device_id.type}.set_device({device_id.index}) before"
            )
    return device_id


_MESHES: dict[Any, tuple[Any, DeviceMesh]] = {}


def _mesh(given: _Given, kind: str) -> DeviceMesh:
    """The mesh of a wrapper: (shard), (replicate, shard), or for NO_SHARD (replicate, 1). One for all wrappers alike."""
    strategy, groups, mesh = given.strategy, given.process_group, given.device_mesh
    how = "hybrid" if strategy in _HYBRID else "none" if strategy is ShardingStrategy.NO_SHARD else "shard"
    owner = mesh if mesh is not None else groups if groups is not None else dist.group.WORLD
    key = (tuple(map(id, owner)) if isinstance(owner, tuple) else id(owner), how, kind)
    if key not in _MESHES:
        _MESHES[key] = owner, _new_mesh(how, groups, mesh, kind)
    return _MESHES[key][1]


def _new_mesh(how: str, groups: Groups, mesh: DeviceMesh | None, kind: str) -> DeviceMesh:
    names = ("replicate", "shard")
    if how == "hybrid":
        if mesh is not None:
            return mesh
        if groups is None:
            return init_device_mesh(kind, _nodes(kind), mesh_dim_names=names)
        shard, replicate = groups
        rows: list[Any] = [None] * replicate.size()
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        return DeviceMesh.from_group([replicate, shard], kind, mesh=torch.tensor(rows), mesh_dim_names=names)
    if how == "shard":
        if mesh is not None:
            return mesh
        if groups is None:
            return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
        return DeviceMesh.from_group(groups, kind, mesh_dim_names=("shard",))
    everybody: Any = mesh.get_group() if mesh is not None else groups if groups is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(everybody)
    alone = beside(everybody, "alone", [dist.get_rank()])
    return DeviceMesh.from_group([everybody, alone], kind, mesh=torch.tensor(ranks).view(-1, 1), mesh_dim_names=names)


def _nodes(kind: str) -> tuple[int, int]:
    """(nodes, ranks per node) of the default process group."""
    known = os.environ.get("LOCAL_WORLD_SIZE")
    here = int(known) if known else 0 if kind == "cpu" else torch.get_device_module(kind).device_count()
    world = dist.get_world_size()
    if not here or world % here:
        raise ValueError(
            f"hybrid sharding without a mesh shards within a node, but the {world} ranks do not lie on nodes of "
            f"{here or 'a known number of'} ranks each: give a 2-D device_mesh (replicate, shard), or run under torchrun"
        )
    return world // here, here


class _Hookable:
    """Collectives over replicas whose sum a caller's hook may take over."""

    def __init__(self, inner: Collectives, hook: list[Callable[[Tensor], None]]) -> None:
        self._inner, self._hook = inner, hook
        self.ranks, self.rank, self.direct_min_bytes = inner.ranks, inner.rank, inner.direct_min_bytes
        self.gatherer, self.reduce_scatter, self.all_reduce_max = inner.gatherer, inner.reduce_scatter, inner.all_reduce_max

    def all_reduce(self, tensor: Tensor) -> Pending:
        for hook in self._hook:
            hook(tensor)
            return Pending()
        return self._inner.all_reduce(tensor)


@dataclass(frozen=True, eq=False)
class _WithHook:
    """Collectives of any process group, of which `hook` (none or one) takes over the sums."""

    kind: str
    hook: list[Callable[[Tensor], None]]

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
        process_group: Groups = None,
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
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        _check_given(module, mixed_precision, process_group, device_mesh, strategy)
        ignored, skipped = _ignored(ignored_modules, ignored_states)
        given = _Given(
            process_group,
            device_mesh,
            strategy,
            cpu_offload is not None and cpu_offload.offload_params,
            backward_prefetch,
            mixed_precision,
            param_init_fn,
            _device(device_id),
            sync_module_states,
            ignored,
            skipped,
        )
        if not use_orig_params:
            say_once("use_orig_params=False: there is no FlatParameter, parameters are the originals as with True")
        if not limit_all_gathers:
            say_once("limit_all_gathers=False: gathers are always limited here, to one unit ahead of the one that computes")
        super().__init__()
        mesh = _mesh(given, _device_type(module, given))
        self._hook: list[Callable[[Tensor], None]] = []
        options = self._options(given, mesh)
        if auto_wrap_policy is not None:
            self._wrap_below(module, given, auto_wrap_policy, mesh, options)
        holdings = collect([module], ignored=ignored, is_unit=lambda inner: unit_of(inner) is not None)
        _materialize(holdings, given, mesh)
        fully_shard(module, mesh=mesh, ignored_params=set(ignored), **options)
        self._fsdp_wrapped_module = module
        self._is_root: bool | None = None
        self._strategy = strategy
        self._casts_root = mixed_precision is None or mixed_precision.cast_root_forward_inputs
        self._casts = mixed_precision is not None and mixed_precision.cast_forward_inputs
        self._input_dtype = None if mixed_precision is None else mixed_precision.param_dtype
        self._settings = _settings(StateDictType.FULL_STATE_DICT)
        self._buffer_dtypes = _cast_buffers(holdings, given)
        if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            self._unit.follow(backward=())
        self.register_state_dict_post_hook(_after_save)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    def _options(self, given: _Given, mesh: DeviceMesh) -> dict[str, Any]:
        """Those of `fully_shard`."""
        mixed = given.mixed_precision or MixedPrecision()
        comm = CommPolicy()
        if given.strategy is ShardingStrategy.NO_SHARD:
            comm = CommPolicy(collectives=_WithHook(mesh.device_type, self._hook))
        return {
            "reshard_after_forward": False if given.strategy in _KEEPS else None,
            "mp_policy": MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy() if given.offload else OffloadPolicy(),
            "comm_policy": comm,
        }

    def _wrap_below(self, module: nn.Module, given: _Given, policy: Any, mesh: DeviceMesh, options: dict[str, Any]) -> None:
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
        Order(module, mesh=mesh, ignored_params=given.ignored, **options)
        _check_overrides(below)
        for unit in below:
            for name in unit.modules:
                inner = module.get_submodule(name)
                full = {"mixed_precision": None} if name in kept else {}
                wrapper = type(self)(inner, **given.overridden({**unit.options, **full}))
                if name in kept:
                    _compute_in_full(wrapper, inner)
                parent, _, own = name.rpartition(".")
                setattr(module.get_submodule(parent), own, wrapper)

    # --- looking through -------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self._fsdp_wrapped_module)
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
        """As `nn.Module.apply`, with full parameters in place; what `fn` writes to them is kept. Collective."""
        if self._unit.shown:
            return super().apply(fn)  # type: ignore[return-value]
        with full_params(self):
            return super().apply(fn)  # type: ignore[return-value]

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
        """Backwards inside keep their gradients on each rank, whole; the first one after it reduces the sum of all."""
        self._only_root("no_sync()")
        with self._fsdp_wrapped_module.accumulate():  # type: ignore[operator]
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
            if wrapper._strategy in _HYBRID:
                raise ValueError(
                    f"register_comm_hook: {wrapper._strategy.name} reduces in two steps, a hook would be one: use "
                    "set_all_reduce_hook() of the unit (wrapper.module), which runs behind both"
                )
            if wrapper._hook:
                raise ValueError("register_comm_hook was called before: a hook cannot be replaced")
        for wrapper in wrappers:
            unit: Any = wrapper._fsdp_wrapped_module
            wrapper._hook.append(lambda flat: hook(state, flat))
            unit.set_gradient_divide_factor(1.0)
            if wrapper._strategy is not ShardingStrategy.NO_SHARD:
                unit.set_custom_reduce_scatter(_HookReduce(state, hook))

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
        inside = module._fsdp_wrapped_module if isinstance(module, FullyShardedDataParallel) else module
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
        return formats.optimizer_state(model, optim, form, given=optim_state_dict, group=group)

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
        return formats.optimizer_state(model, optim, Form(formats.FULL, True, rank0_only), group=group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """The optimizer's state by names, as DTensors."""
        return formats.optimizer_state(model, optim, Form(formats.SHARDED), group=group)

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


def _check_overrides(units: Iterable[Any]) -> None:
    known = set(FullyShardedDataParallel.__init__.__annotations__) - {"module", "auto_wrap_policy", "return"}
    for unit in units:
        for name in unit.options:
            if name not in known:
                raise ValueError(
                    f"the policy gives '{unit.name}' the option '{name}', which FullyShardedDataParallel does not have: there "
                    f"are {sorted(known)}"
                )


def _compute_in_full(wrapper: FullyShardedDataParallel, module: nn.Module) -> None:
    """Inputs of a module that is left out of mixed precision come in its own dtype, outputs go in that of the inputs."""
    tensors = [*module.parameters(), *module.buffers()]
    own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    given: list[torch.dtype] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        given[:] = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()][:1]
        return cast_floats(args, own), cast_floats(kwargs, own)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return cast_floats(output, given[0]) if given else output

    wrapper.register_forward_pre_hook(before, with_kwargs=True)
    wrapper.register_forward_hook(after)


def _materialize(holdings: Holdings, given: _Given, mesh: DeviceMesh) -> None:
    """Memory and values for what is on meta, and the first rank's values for all, if that was asked for. Collective.

    Raises ValueError, on every rank, if some ranks have values, others do not, and nobody said that they get the first's.
    """
    for claim in holdings.claims:  # tied to what a wrapper before this one gave memory to
        _install(claim, claim.parameter.__dict__.get(_MATERIALIZED))
    waiting = [module for module in holdings.modules if _on_meta(module, given)]
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    if not given.sync and len(_said(mesh, device, bool(waiting))) > 1:
        raise ValueError(
            "some ranks have this module on meta and others have values for it: pass sync_module_states=True, so that all get "
            "those of the first rank"
        )
    if waiting:
        init = given.init or (lambda module: _reset(module, device))
        seed = 0 if given.sync else common_seed(mesh, device)
        with torch.no_grad(), seeded(device, seed):
            for module in waiting:
                init(module)
        left = [type(module).__name__ for module in waiting if _on_meta(module, given)]
        if left:
            raise ValueError(
                f"param_init_fn left parameters or buffers of {left[:3]} on meta: it must give each module it is called with "
                "memory, module.to_empty(device=..., recurse=False), and values"
            )
        for claim in holdings.claims:  # they have Parameters of their own now: tied ones have one again
            made = _torch.parameters_of(claim.slots[0].module)[claim.slots[0].name]
            if made is not claim.parameter:
                claim.parameter.__dict__[_MATERIALIZED] = made
                _install(claim, made)
    if waiting:
        fresh = collect([holdings.modules[-1]], ignored=given.ignored, is_unit=lambda inner: unit_of(inner) is not None)
        holdings.claims[:], holdings.buffers[:] = fresh.claims, fresh.buffers
    if given.sync:
        tensors = [claim.parameter for claim in holdings.claims] + [buffer for _, _, buffer in holdings.buffers]
        for tensor in tensors:
            _broadcast(tensor, mesh, device)


_MATERIALIZED = "_fullshard_materialized"  # on a parameter that was on meta: the one with memory that took its place


def _install(claim: Claim, parameter: nn.Parameter | None) -> None:
    """Have every slot of `claim` hold `parameter`, unless that is None."""
    for slot in claim.slots if parameter is not None else ():
        setattr(slot.module, slot.name, parameter)


def _on_meta(module: nn.Module, given: _Given) -> bool:
    left_out = set(map(id, given.ignored))
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.device.type == "meta" and id(tensor) not in left_out for tensor in own)


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{type(module).__name__} holds parameters or buffers on meta and has no reset_parameters(): pass param_init_fn="
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _said(mesh: DeviceMesh, device: torch.device, flag: bool) -> set[bool]:
    """What the ranks of `mesh` say."""
    votes = torch.tensor([flag, not flag], dtype=torch.uint8, device=device)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return {value for value, said in zip((True, False), votes.tolist()) if said}


@torch.no_grad()
def _broadcast(tensor: Tensor, mesh: DeviceMesh, device: torch.device) -> None:
    """The first rank's values, on all of `mesh`."""
    travelling = tensor.detach().to(device).contiguous()
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            dist.broadcast(travelling, dist.get_process_group_ranks(group)[0], group=group)
    tensor.copy_(travelling)


def _cast_buffers(holdings: Holdings, given: _Given) -> dict[str, torch.dtype]:
    """Cast the wrapper's own floating-point buffers, if that was asked for; what they were, by name."""
    dtype = given.mixed_precision.buffer_dtype if given.mixed_precision is not None else None
    before: dict[str, torch.dtype] = {}
    left_out = set(map(id, given.ignored_modules))
    for name, slot, buffer in holdings.buffers if dtype is not None else ():
        if buffer.is_floating_point() and id(slot.module) not in left_out:
            before[clean_name(name)] = buffer.dtype
            buffer.data = buffer.data.to(dtype)
    return before


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
    """Under clean names, in the form that was set. Wrappers below did theirs already."""
    form = _model_form(module._settings)
    keep = form.keeps(first=not any(module._unit.axis.mesh.get_coordinate() or ()))
    dtypes = module._buffer_dtypes
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        name = clean_name(key[len(prefix) :])
        if name in dtypes and isinstance(value, Tensor) and form.kind is formats.FULL:
            value = value.to(dtypes[name])
        value = form.of(value, keep=keep)
        if keep:
            state_dict[prefix + name] = value


def _before_load(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names as the wrapper has them, and this rank's rows as what they are rows of."""
    unit: Unit = module._unit
    rows = module._settings.state_dict_type is formats.LOCAL
    known = {
        clean_name(name): parameter for name, parameter in module._fsdp_wrapped_module.named_parameters(remove_duplicate=False)
    }
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
        state_dict[inside + name] = value


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

    return formats.scattered(saved, group, device, cut)


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
