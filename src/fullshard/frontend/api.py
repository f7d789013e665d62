"""`fully_shard`: checks, moves and cuts the parameters of modules, and makes a unit of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.consistency.collective_log import UnitName
from fullshard.errors import warn_once
from fullshard.frontend import class_swap, optim  # noqa: F401  optim: what precedes and follows steps
from fullshard.frontend.fsdp2_state import view_of
from fullshard.frontend.module import keep_of, plain_class, sharded_class
from fullshard.frontend.ties import Ties, find_ties
from fullshard.params.extension import half_extends, is_plain, own_shard, travels_alone
from fullshard.params.shard_values import move_data, replace_original
from fullshard.params.sharded_param import ShardedParameter, inside
from fullshard.params.stale_params import successor
from fullshard.policies import (
    CheckPolicy,
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    resolve_mp,
    resolve_offload,
)
from fullshard.runtime.lint import mark_ignored
from fullshard.runtime.options import UnitOptions
from fullshard.runtime.runtime import Runtime, make_unit
from fullshard.runtime.setup_collectives import SetupCollectives
from fullshard.runtime.sync import BUFFERS, SYNCS, broadcast, check_alike, check_structure, has_values_everywhere
from fullshard.runtime.unit import name_units_in, unit_of
from fullshard.sharding.mesh import DataParallelMeshDims, ShardAxis, resolve_mesh
from fullshard.sharding.module_tree import ManagedTensors, ParamRef, collect, roots_of
from fullshard.sharding.param_sharding import ParamSharding, PlacementFn, cut

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(module: M, **options: Any) -> M: ...
@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[nn.Module]: ...
def fully_shard(  # type: ignore[misc]
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    comm_policy: CommPolicy = CommPolicy(),
    check_policy: CheckPolicy = CheckPolicy(),
    sync: str = "check",
    buffers: str = "local",
) -> nn.Module | list[nn.Module]:
    """Shard the parameters of `module` over `mesh`, in place, and make it a unit that gathers them when it runs.

    Call it bottom-up: first on the blocks of a model, then on the model itself. Each call takes the parameters that no
    earlier call took and turns each into a DTensor Parameter, `Shard(0)` on the mesh; uneven and empty shards follow
    torch.chunk. Around the unit's forward and backward its parameters are gathered (the next unit's while this one
    computes) and freed; its gradients are averaged over the mesh into `.grad` DTensors. Calls are collective.

    A parameter that an earlier call took, because it is tied, has one owner still: the unit around both of its modules,
    or, if there is none, both units become one, as by `fully_shard([a, b])`; a warning says so. Called top-down, an inner
    module takes its parameters over from the unit around it.

    Args:
        module: a module with a forward, or a list of modules that form one unit (their parameters are gathered when the
            first of them runs, freed when the last has).
        mesh: DeviceMesh of one axis, to shard over, or of two: hybrid sharding, which replicates over the first and shards
            over the second; names of its axes that say otherwise, ("dp_shard", "cp") say, are refused. None takes all ranks
            of the default process group.
        reshard_after_forward: True frees the parameters after forward and gathers them again for backward; False keeps
            them (more memory, one gather less); None is True, but False for the outermost unit of a forward. An int k,
            which must divide the ranks of the shard axis, has each k neighbours keep one copy together (a k-th each),
            which backward gathers among them only. A forward without grad always frees them.
        shard_placement_fn: called with each parameter, says along which dim it is cut: None or `Shard(d)`, negative and
            uneven `d` included, or a `ShardPlacementResult` with a mesh of its own.
        mp_policy: dtypes to compute, communicate and return in.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer states in the host's memory.
        ignored_params: parameters left alone: not sharded, not moved, their gradients not reduced.
        dp_mesh_dims: `mesh` is the full mesh of the program, all parameters are DTensors on it, and these of its axes are
            data parallel.
        comm_policy: how messages are cut and carried.
        check_policy: what is checked while training.
        sync: "check" raises, naming the first one, if a parameter has different values on different ranks (they were built
            with different seeds, say); "broadcast" gives all ranks the parameters and buffers of the first; "off" does
            neither. Of what is on meta, replicas are compared at the first forward. Threads as ranks, in torch's tests, draw
            from one generator, so "check" is "off" there.
        buffers: "local" leaves buffers to each rank, as FSDP2 does. After each forward in training mode, "mean" averages
            floating-point buffers (running statistics of batch norms) over all ranks, and takes the others from the first
            rank; "broadcast" takes all from the first rank. They are new tensors then, since a graph may need the old.

    Parameters that are DTensors already (tensor or expert parallelism) are sharded further, along any dim; their mesh and
    `mesh` must be axes of one DeviceMesh with names.

    Returns:
        `module`, the same object, whose class is now a subclass of `FSDPModule` and its former class.

    Raises:
        ValueError: before anything has changed, naming the module or parameter, for a container without forward, a
            module that is a unit already, a parameter on another device type or with different values on different ranks,
            a tie between units of different options, a mesh of more than two axes, an impossible placement, or options of
            the wrong type.

    Example:
        >>> for block in model.blocks:                                                        # doctest: +SKIP
        ...     fully_shard(block)
        >>> fully_shard(model)                                                                # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters())                                 # doctest: +SKIP

    Source: the interface of `torch.distributed.fsdp.fully_shard`; Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054);
    Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277).
    """
    modules, ignored = _check_modules(module), _check_ignored(ignored_params)
    if _torch.VERSION > _torch.NEWEST_TRIED:
        warn_once(
            f"torch {torch.__version__} is newer than what this version of fullshard was tested with "
            f"({'.'.join(map(str, _torch.NEWEST_TRIED))}): look for a newer one if something is off"
        )
    shaped = _ResolvedArguments.of(
        mesh,
        reshard_after_forward,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        dp_mesh_dims,
        comm_policy,
        check_policy,
        sync,
        buffers,
    )
    communicator = Runtime.of(shaped.axis.device, comm_policy).communicator
    with communicator.leaving(f"'{type(modules[0]).__name__}' fully_shard()"):
        _shard(modules, shaped, ignored, frozenset())
    return module


def _shard(
    modules: list[nn.Module], shaped: _ResolvedArguments, ignored: Iterable[nn.Parameter], planned: frozenset[int]
) -> None:
    """Make a unit of `modules`. `planned`: modules (by id) that others will be made of, and that this one does not enter."""
    with collector_paused():
        _shard_at_once(modules, shaped, ignored, planned)


@contextmanager
def collector_paused() -> Iterator[None]:
    """A block that makes many objects, which stay, or go by their last reference: a search for circles finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _shard_at_once(
    modules: list[nn.Module], shaped: _ResolvedArguments, ignored: Iterable[nn.Parameter], planned: frozenset[int]
) -> None:
    found = _inspect(modules, shaped, ignored, planned)
    axis, options, refs = shaped.axis, shaped.options, found.refs
    _synchronise(found, _setup(modules, shaped), options.sync)
    home = axis.device if not isinstance(options.offload, CPUOffloadPolicy) else torch.device("cpu")
    _move(refs, found.managed, home, axis.device)
    with torch.no_grad():
        new = [
            ShardedParameter(ref, how, keeps_dtype=keeps) for ref, how, keeps in zip(refs, found.shardings, found.keep_dtype)
        ]
        taken, merged = found.ties.take(plain_class)
        unit = make_unit(roots_of([*merged, *modules]), [*taken, *new], axis, options)
        for parameter, ref in zip(new, refs):
            replace_original(parameter, ref.parameter)
        found.ties.install()
    for left_alone in ignored:
        mark_ignored(left_alone)
    class_swap.assemble(unit, sharded_class, found.managed.modules)
    for root in unit.modules:
        name_units_in(root)


# --- checks, before anything has changed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _ResolvedArguments:
    """The arguments of a call of `fully_shard`, resolved."""

    axis: ShardAxis
    options: UnitOptions
    placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy  # with the function that is asked about each parameter, which the unit does not keep

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh | None,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: PlacementFn | None = None,
        mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
        offload_policy: OffloadPolicy = OffloadPolicy(),
        dp_mesh_dims: DataParallelMeshDims | None = None,
        comm_policy: CommPolicy = CommPolicy(),
        check_policy: CheckPolicy = CheckPolicy(),
        sync: str = "check",
        buffers: str = "local",
    ) -> _ResolvedArguments:
        sync = os.environ.get("FULLSHARD_SYNC", sync) if sync == "check" else sync
        if sync == "check" and _torch.threads_are_ranks():
            sync = "off"  # threads share a generator, so that each builds another model, however it is seeded
        for option, choice, allowed in (("sync", sync, SYNCS), ("buffers", buffers, BUFFERS)):
            if choice not in allowed:
                raise ValueError(f"{option} must be one of {allowed}, got {choice!r}")
        for name, value, kind in (
            ("comm_policy", comm_policy, CommPolicy),
            ("check_policy", check_policy, CheckPolicy),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        mp_policy, offload_policy = resolve_mp(mp_policy), resolve_offload(offload_policy)
        axis = resolve_mesh(mesh, dp_mesh_dims)
        keep, retain = keep_of(reshard_after_forward, axis.ranks)
        options = UnitOptions(
            reshard_policy=keep,
            subgroup_size=retain,
            mp=mp_policy.without_override(),
            offload=offload_policy,
            comm=comm_policy,
            checks=check_policy,
            sync=sync,
            buffers=buffers,
        )
        return cls(axis, options, shard_placement_fn, mp_policy)


@dataclass(frozen=True)
class _Inspection:
    """The parameters and buffers that a call of `fully_shard` would take."""

    managed: ManagedTensors
    ties: Ties
    refs: list[ParamRef]
    shardings: list[ParamSharding]
    keep_dtype: list[bool]  # of each parameter: whether it is gathered in its own dtype whatever the policy


def _inspect(
    modules: list[nn.Module],
    shaped: _ResolvedArguments,
    ignored: Iterable[nn.Parameter],
    planned: frozenset[int],
) -> _Inspection:
    """Everything that can be refused is refused here. May make process groups, so it is collective."""
    axis, options = shaped.axis, shaped.options
    managed = collect(modules, ignored=ignored, is_unit=lambda inner: id(inner) in planned or unit_of(inner) is not None)
    ties = find_ties(modules, managed, options)
    refs = [ref for ref in managed.refs if not ties.knows(ref)]
    _check_parameters(refs, axis)
    _check_buffers(managed, axis)
    Runtime.of(axis.device, options.comm).communicator.collectives.of_axis(axis, options)
    keep_dtype = [shaped.mp_policy.keeps_dtype_of(ref.parameter, name=ref.name) for ref in refs]
    return _Inspection(managed, ties, refs, [_cut(ref, axis, shaped.placement_fn) for ref in refs], keep_dtype)


class PreparedShard:
    """A call of `fully_shard` that was checked, to be made later. `units`: the modules that all such calls make units of.

    Raises what `fully_shard` would raise, changing nothing. Making and carrying out are collective.
    """

    def __init__(
        self,
        module: nn.Module | list[nn.Module],
        *,
        units: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        self._modules = _check_modules(module)
        self._ignored = _check_ignored(ignored_params)
        self._shaped = _ResolvedArguments.of(mesh, **options)
        self._planned = frozenset(map(id, units))
        _inspect(self._modules, self._shaped, self._ignored, self._planned)

    def apply_prepared(self) -> None:
        """Make the unit."""
        _shard(self._modules, self._shaped, self._ignored, self._planned)


def _setup(modules: list[nn.Module], shaped: _ResolvedArguments) -> SetupCollectives:
    """The setup collectives of this call."""
    runtime = Runtime.of(shaped.axis.device, shaped.options.comm)
    runtime.executor.update_timeouts(shaped.options.checks)
    classes = ", ".join(type(module).__name__ for module in modules)
    return SetupCollectives(runtime.communicator, shaped.axis, UnitName(type(modules[0]).__name__), "fully_shard()", classes)


def _synchronise(found: _Inspection, setup: SetupCollectives, how: str) -> None:
    """Raises ValueError on every rank if the ranks hold different parameters or values, or have all hold those of the first."""
    named: list[tuple[str, torch.Tensor]] = []
    for ref, keeps in zip(found.refs, found.keep_dtype):
        explicit, grad_dtype = _torch.grad_dtype_of(ref.parameter)
        name = f"'{ref.name}'{' not cast' if keeps else ''}{f' with grad_dtype {grad_dtype}' if explicit else ''}"
        named.append((name, ref.parameter))
    wrong = check_structure(named, setup)
    if wrong is not None:
        raise ValueError(f"the ranks call fully_shard for different parameters. {wrong}. Build the same model on all ranks")
    if how == "off" or not (found.refs or found.managed.buffers):
        return
    axis = setup.axis
    sets: dict[tuple[int, int], tuple[ShardAxis, list[tuple[str, torch.Tensor]]]] = {}  # by the ranks that should agree
    for ref, how_cut in zip(found.refs, found.shardings):
        where = axis if how_cut.axis.is_replicated else how_cut.axis
        sets.setdefault(where.key, (where, []))[1].append((f"parameter '{ref.name}'", ref.parameter))
    if how == "check":
        for where, named in sets.values():
            wrong = check_alike(named, setup.about(where))
            if wrong is not None:
                raise ValueError(
                    f"{wrong}: each would keep a part of a different model. Seed all ranks alike before the model is built, "
                    "or pass sync='broadcast' to take the values of the first rank, or sync='off' if they are loaded later "
                    "(FULLSHARD_SYNC=off in the environment does that for a program that you cannot change)"
                )
        return
    own = sets.setdefault(axis.key, (axis, []))[1]
    own += [(f"buffer '{name}'", buffer) for name, _, buffer in found.managed.buffers]
    for where, named in sets.values():
        partly = has_values_everywhere(named, setup.about(where))
        if partly is not None:
            raise ValueError(
                f"sync='broadcast': {partly} is on meta on some ranks and not on others: call to_empty() on those ranks first"
            )
    for where, named in sets.values():
        broadcast([tensor for _, tensor in named], setup.about(where))


def _check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(item, nn.Module) for item in given):
        raise ValueError(f"fully_shard takes an nn.Module or a non-empty list of them, got {type(module).__name__}")
    for item in given:
        if isinstance(item, (nn.ModuleList, nn.ModuleDict)) and type(item).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward, got a {type(item).__name__}: it would "
                "never know when to gather it. Call fully_shard on each of its items"
            )
        if unit_of(item) is not None:
            raise ValueError(f"fully_shard was already called on this {type(item).__name__}: call it once per module")
        if _torch.is_non_composable(item):
            raise ValueError(f"{type(item).__name__} is under torch's replicate(), which already reduces its gradients")
    return roots_of(given)


def _check_ignored(ignored: Iterable[nn.Parameter] | None) -> tuple[nn.Parameter, ...]:
    if ignored is None:
        return ()
    if isinstance(ignored, (str, torch.Tensor)) or not isinstance(ignored, Iterable):
        raise ValueError(f"ignored_params must be a set of nn.Parameter or None, got {type(ignored).__name__}")
    found = tuple(ignored)
    for item in found:
        if not isinstance(item, nn.Parameter):
            shown = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise ValueError(
                f"ignored_params must hold the parameters themselves, got {shown}: take them out of the model, as in "
                "{model.get_parameter('head.weight')}"
            )
    return found


def _cut(ref: ParamRef, axis: ShardAxis, placement_fn: PlacementFn | None) -> ParamSharding:
    how = cut(ref.parameter, axis, placement_fn, name=ref.name)
    tensor = inside(ref.parameter.data)
    if how.dim != 0 and travels_alone(tensor):
        raise ValueError(
            f"parameter '{ref.name}' gathers itself (fsdp_pre_all_gather), by rows: it cannot be cut along dim {how.dim}"
        )
    if not is_plain(tensor):
        _check_cuts(ref.name, tensor, how)
    return how


def _check_cuts(name: str, tensor: torch.Tensor, how: ParamSharding) -> None:
    """Raises ValueError if a tensor of a subclass cannot be cut; how it is gathered is asked before the first gather."""
    try:
        with torch.no_grad():
            shard = own_shard(how.slice(tensor.detach()), how)
    except Exception as failure:
        raise ValueError(
            f"parameter '{name}' cannot be sharded: cutting a {type(tensor).__name__} raised {failure}"
        ) from failure
    if type(shard) is not type(tensor):
        raise ValueError(
            f"parameter '{name}' cannot be sharded: a {type(tensor).__name__} that is cut is a {type(shard).__name__}"
        )


def _check_parameters(refs: Sequence[ParamRef], axis: ShardAxis) -> None:
    for ref in refs:
        reason = _unsupported_reason(ref.parameter)
        if reason is not None:
            raise ValueError(f"parameter '{ref.name}' cannot be sharded: {reason}")
        _check_device(f"parameter '{ref.name}'", ref.parameter, axis)


def _unsupported_reason(parameter: nn.Parameter) -> str | None:
    """Why a parameter cannot be sharded, and what to do; None if it can."""
    if successor(parameter) is not None:
        return "it was sharded before, by a unit that does not exist any more: build the model anew, or undo() before"
    if annotations := _torch.spmd_types_of(parameter):
        return (
            f"it is annotated by spmd_types ({annotations}), which fullshard does not honour: make it a DTensor on the full "
            "mesh and pass dp_mesh_dims"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "it is not initialized yet: run one forward of the lazy module, then fully_shard"
    tensor = inside(parameter.data)
    missing = half_extends(tensor)
    if missing is not None:
        return f"its class {type(tensor).__name__} defines one half of the all-gather protocol: define {missing} as well"
    if tensor.layout != torch.strided:
        return f"it must be a dense torch.Tensor, got {type(tensor).__name__} with layout {tensor.layout}"
    return None


def _check_buffers(managed: ManagedTensors, axis: ShardAxis) -> None:
    for name, _, buffer in managed.buffers:
        _check_device(f"buffer '{name}'", buffer, axis)


def _check_device(what: str, tensor: torch.Tensor, axis: ShardAxis) -> None:
    kind = tensor.device.type
    if kind not in ("meta", "cpu", axis.device.type) or (kind == axis.device.type != "cpu" and tensor.device != axis.device):
        raise ValueError(
            f"{what} is on {tensor.device}, expected {axis.device} (this rank of the mesh), the CPU or meta: "
            "move the module first"
        )


def _move(refs: Sequence[ParamRef], managed: ManagedTensors, home: torch.device, device: torch.device) -> None:
    """Parameters go to where shards are kept, buffers to where they are computed with; what is on meta stays there."""
    for ref in refs:
        move_data(ref.parameter, home)
    for _, _slot, buffer in managed.buffers:
        move_data(buffer, device)


fully_shard.state = view_of  # type: ignore[attr-defined]

__all__ = ["PreparedShard", "collector_paused", "fully_shard"]
