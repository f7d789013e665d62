"""`fully_shard`: check, move and shard the parameters of modules, and make one unit of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.checks.collective_log import UnitName
from fullshard.core.agreement import Agreement
from fullshard.core.mesh import MeshDims, ShardAxis, resolve_mesh
from fullshard.core.module_tree import ManagedTensors, ParamRef, collect, mark_ignored, roots_of
from fullshard.core.param_group import group_class
from fullshard.core.param_sharding import CHECK_LEVEL, ParamSharding, PlacementFn, plan_sharding
from fullshard.core.runtime import Runtime
from fullshard.core.shard_values import move_data, replace_with_sharded
from fullshard.core.sharded_param import ShardedParameter, replacement_of
from fullshard.core.unit import Unit
from fullshard.core.unit_options import UnitOptions
from fullshard.core.units import name_units_in, unit_of
from fullshard.errors import warn_once
from fullshard.frontend.module import FSDPModule, parse_reshard_after_forward
from fullshard.optim import optimizer_hooks
from fullshard.policies import (
    ZERO3,
    CheckPolicy,
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateSharding,
    resolve_mp,
    resolve_offload,
)
from fullshard.state.class_swap import install_unit
from fullshard.state.ties import Ties, find_ties

M = TypeVar("M", bound=nn.Module)

_SYNCS = ("check", "broadcast", "off")


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
    states: StateSharding = ZERO3,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: MeshDims | None = None,
    comm_policy: CommPolicy = CommPolicy(),
    check_policy: CheckPolicy = CheckPolicy(),
    sync: str = "check",
) -> nn.Module | list[nn.Module]:
    """Shard the parameters of `module` over `mesh` in place, and unshard them around its forward and backward. Collective.

    Call it bottom-up: first on the blocks of a model, then on the model itself. Each call forms one unit, and shards the
    parameters that belong to no unit yet: each becomes a DTensor Parameter with placement `Shard(0)` on the mesh. Uneven
    and empty shards follow torch.chunk. Forward and backward all-gather the parameters of the unit, prefetch the next unit
    while this one computes, and free the unsharded parameters afterwards. Backward reduce-scatters the gradients and sets
    `.grad` to DTensors, averaged over the mesh.

    If `module` shares a parameter with a unit inside of it, the new unit takes the parameter over. If two modules share one
    and neither contains the other, shard them as one unit: `fully_shard([a, b])`. If calls are made top-down, an inner module
    takes the parameters that are used only inside it from the unit around it.

    Args:
        module: a module with a forward, or a list of modules that form one unit. The parameters of a list are unsharded
            before the forward of the first module that runs, and freed after the forward of the last one. Outside of
            another unit's forward, they are unsharded and freed for each module by itself.
        mesh: a 1-D DeviceMesh to shard over, or a 2-D one for hybrid sharding (HSDP): replicate over dim 0, shard over
            dim 1. Names of mesh dims that contradict this, such as ("dp_shard", "cp"), cause a warning. None means all ranks of
            the default process group.
        reshard_after_forward: True frees the unsharded parameters after forward and all-gathers them again for backward.
            False keeps them: more memory, one all-gather less. None means False for the outermost unit of a forward and
            True for all other units. An int k must divide the size of the shard mesh dim: after forward, each group of k
            neighbouring ranks keeps one copy of the parameters (1/k per rank), and backward all-gathers within that group.
            A forward without grad frees them, but for `ZERO2`, `ZERO1`, `resident()` and what a create_graph=True graph needs.
        states: the level of ZeRO: `ZERO3` shards everything; `ZERO2` and `ZERO1` keep the unsharded parameters between steps
            and all-gather them once per step, in the first forward after the shards were written; on a hybrid mesh, `HFSDP`
            shards the optimizer's states over the replicas as well (see `StateSharding`).
        shard_placement_fn: called with each parameter; returns the dim to shard: None for dim 0, `Shard(d)` (`d` may be
            negative, and the size of that dim uneven), or a `ShardPlacementResult` with a mesh for this parameter.
        mp_policy: dtypes of computation, communication and outputs.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer states in host memory.
        ignored_params: parameters to leave alone: not sharded, not moved, and their gradients not reduced.
        dp_mesh_dims: `DataParallelMeshDims`, names of the data-parallel dims of `mesh`. Then `mesh` is the full mesh of the
            program, and parameters other than scalars must be DTensors on it, or annotated for it by spmd_types.
        comm_policy: how collectives are formed and run.
        check_policy: the checks during training.
        sync: "check" takes digests now, and compares them in the first forward of the model. Replicas must have equal
            shards. A parameter that nothing wrote since this call (no load, no initialization) must be equal on all its
            data-parallel ranks. The error names the first that differs, for example because of different seeds. "broadcast"
            first copies the parameters and buffers of the first rank to all ranks, then does the same. "off" does neither.
            FULLSHARD_SYNC in the environment takes the place of "check".

    Parameters that are DTensors already (tensor or expert parallelism) are sharded further, along any dim. Their mesh and
    `mesh` must be dims of one DeviceMesh with named dims.

    Returns:
        `module`, the same object. Its class is now a subclass of `FSDPModule` and of its original class.

    Raises:
        ValueError: for a container without forward, a module sharded already, a tensor on another accelerator, a tie between
            units that are not nested, an impossible mesh or placement, or a wrong option. `module` is unchanged then.
        StateError: if the owner of a tied parameter runs (forward or backward), or has reduced gradients not in `.grad` yet.

    Example:
        >>> for block in model.blocks:                                                        # doctest: +SKIP
        ...     fully_shard(block)
        >>> fully_shard(model)                                                                # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters())                                 # doctest: +SKIP

    Source: the interface of `torch.distributed.fsdp.fully_shard`; Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054);
    Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277).
    """
    if _torch.VERSION > _torch.NEWEST_TRIED:
        warn_once(
            f"torch {torch.__version__} is newer than the torch that this version of fullshard was tested with "
            f"({'.'.join(map(str, _torch.NEWEST_TRIED))}). If something fails, look for a newer version of fullshard."
        )
    options = (reshard_after_forward, shard_placement_fn, states, mp_policy, offload_policy, dp_mesh_dims, comm_policy)
    call = PreparedShard(module, (), ignored_params, mesh, *options, check_policy, sync)
    with call.runtime.communicator.reporting_exceptions(f"'{type(call.modules[0]).__name__}' fully_shard()"):
        call.apply()
    return module


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector in a block that creates many objects and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PreparedShard:
    """A `fully_shard` call in steps: the constructor checks the arguments, `check` the tensors, and `apply` shards them.

    `check` and `apply` are collective, and so is the constructor where it creates a process group. It takes the arguments
    of `fully_shard`, and as `units` the modules of all calls that are prepared together: a call leaves out those inside its
    own modules, with what they contain.
    """

    def __init__(
        self,
        module: nn.Module | list[nn.Module],
        units: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] | None = None,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: PlacementFn | None = None,
        states: StateSharding = ZERO3,
        mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
        offload_policy: OffloadPolicy = OffloadPolicy(),
        dp_mesh_dims: MeshDims | None = None,
        comm_policy: CommPolicy = CommPolicy(),
        check_policy: CheckPolicy = CheckPolicy(),
        sync: str = "check",
    ) -> None:
        self.modules, self._ignored = _check_modules(module), _check_ignored(ignored_params)
        sync = os.environ.get("FULLSHARD_SYNC", sync) if sync == "check" else sync
        if sync not in _SYNCS:
            raise ValueError(f"sync must be one of {_SYNCS}, got {sync!r}.")
        for name, value, kind in (
            ("comm_policy", comm_policy, CommPolicy),
            ("check_policy", check_policy, CheckPolicy),
            ("states", states, StateSharding),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}.")
        self._mp_policy, offload_policy = resolve_mp(mp_policy), resolve_offload(offload_policy)
        self._axis, self._placement_fn = resolve_mesh(mesh, dp_mesh_dims), shard_placement_fn
        if states.shards_over_replicas and not CHECK_LEVEL:
            raise ValueError(f"states={states} needs a file of fullshard that is missing. Install fullshard anew.")
        for check in CHECK_LEVEL:
            check(states, self._axis, dp_mesh_dims)
        keep_after_forward, subgroup_size = parse_reshard_after_forward(reshard_after_forward, self._axis.ranks, states)
        self._options = UnitOptions(
            keep_after_forward=keep_after_forward,
            subgroup_size=subgroup_size,
            states=states,
            mp=self._mp_policy.without_override(),  # `check` calls the override, once with each parameter
            offload=offload_policy,
            comm=comm_policy,
            checks=check_policy,
            sync=sync,
        )
        self._planned = frozenset(map(id, units))
        self.runtime = Runtime.of(self._axis.device, comm_policy)
        # For each parameter, its sharding, and whether it is all-gathered in its own dtype. Kept, so that the user's functions
        # are called once with each parameter.
        self._decided: dict[nn.Parameter, tuple[ParamSharding, bool]] = {}

    @gc_paused()
    @torch.inference_mode(False)  # version counters show writes, and inference tensors have none
    def apply(self) -> None:
        """Form one unit. Collective."""
        optimizer_hooks.register()
        managed, ties, refs = self.check()
        if self._options.sync == "broadcast" and (refs or managed.buffers):
            self._broadcast_values(managed, refs)
        # The module changes only from here on (but for values by sync="broadcast"): an error of the caller leaves it intact.
        home = torch.device("cpu") if isinstance(self._options.offload, CPUOffloadPolicy) else self._axis.device
        for ref in refs:
            move_data(ref.parameter, home)
        for _, _, buffer in managed.buffers:
            move_data(buffer, self._axis.device)
        with torch.no_grad():
            decided = [self._decided[ref.parameter] for ref in refs]
            self._decided.clear()  # it would keep the memory of the parameters
            counters: dict[torch.device, DTensor] = {}  # version counters that the parameters share
            given = zip(refs, decided)
            new = [ShardedParameter(ref, how, keeps_dtype=keeps, counters=counters) for ref, (how, keeps) in given]
            unit = Unit(self.modules, [*ties.take(), *new], self._axis, self._options, self.runtime)
            for parameter, ref in zip(new, refs):
                replace_with_sharded(parameter, ref.parameter)
            ties.install()
        for left_alone in self._ignored:
            mark_ignored(left_alone)
        install_unit(unit, FSDPModule, managed.modules, {parameter: ref.parameter for parameter, ref in zip(new, refs)})
        for root in unit.modules:
            name_units_in(root)

    def check(self) -> tuple[ManagedTensors, Ties, list[ParamRef]]:
        """Return the tensors to manage, the ties to other units, and the parameters to shard, or raise. Collective.

        The errors are those of `fully_shard` about the module. The check may create process groups, and reshards other units
        that own some of the parameters. It changes nothing else.
        """
        axis, options = self._axis, self._options
        managed = collect(
            self.modules,
            ignored=self._ignored,
            is_unit=lambda inner: id(inner) in self._planned or unit_of(inner) is not None,
        )
        ties = find_ties(self.modules, managed)
        refs = [ref for ref in managed.refs if not any(ref is tied for tied, _ in ties.refs)]
        _check_tensors(refs, managed, axis)
        # Before anything of the model changes: this raises for illegal options, and creates process groups.
        self.runtime.communicator.collectives_of(axis, options)
        for ref in refs:
            if ref.parameter not in self._decided:
                keeps = self._mp_policy.keeps_dtype_of(ref.parameter, name=ref.name)
                how = plan_sharding(ref.parameter, axis, self._placement_fn, options.states, name=ref.name)
                if how.axis.key != axis.key:
                    self.runtime.communicator.collectives_of(how.axis, options)
                tensor = _torch.local_part(ref.parameter.data)
                group_class(tensor, how.axis, vars(ref.parameter)).check_sharding(ref.name, tensor, how)
                self._decided[ref.parameter] = how, keeps
        return managed, ties, refs

    def _broadcast_values(self, managed: ManagedTensors, refs: Sequence[ParamRef]) -> None:
        """Give all ranks the first rank's values. ValueError if a tensor is on meta on some of the ranks only. Collective."""
        axis = self._axis
        self.runtime.update_timeouts(self._options.checks)
        classes = [type(module).__name__ for module in self.modules]
        agreement = Agreement(self.runtime.communicator, [axis], UnitName(classes[0]), "fully_shard()", ", ".join(classes))
        buffers = [(f"buffer '{name}'", buffer) for name, _, buffer in managed.buffers]
        sets: dict[tuple[int, int], tuple[ShardAxis, list[tuple[str, torch.Tensor]]]] = {axis.key: (axis, buffers)}
        for ref in refs:
            own = self._decided[ref.parameter][0].axis
            where = axis if own.is_replicated else own
            sets.setdefault(where.key, (where, []))[1].append((f"parameter '{ref.name}'", ref.parameter))
        for where, named in sets.values():
            on_meta = torch.tensor([[tensor.device.type == "meta"] for _, tensor in named], dtype=torch.uint8, device="cpu")
            partly = agreement.on_axis(where).first_unequal(on_meta) if named else None
            if partly is not None:
                raise ValueError(
                    f"sync='broadcast' cannot be applied: {named[partly][0]} is on meta on some ranks and not on others. Call "
                    "to_empty() on the ranks with meta tensors first."
                )
        for where, named in sets.values():
            agreement.on_axis(where).broadcast(tensor for _, tensor in named)


# --- checks, before anything has changed -----------------------------------------------------------------------------


def _check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"fully_shard takes an nn.Module or a non-empty list of modules, got {type(module).__name__}.")
    for index, item in enumerate(given):
        if not isinstance(item, nn.Module):
            raise ValueError(f"fully_shard takes a list of modules, got a {type(item).__name__} at index {index} of the list.")
    for item in given:
        if isinstance(item, (nn.ModuleList, nn.ModuleDict)) and type(item).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward, got a {type(item).__name__}: no "
                "forward would unshard its parameters. Call fully_shard on each of its items."
            )
        if unit_of(item) is not None:
            raise ValueError(f"fully_shard was already called on this {type(item).__name__}. Call it once per module.")
        if _torch.is_non_composable(item):
            raise ValueError(
                f"{type(item).__name__} cannot be sharded: torch's replicate() was applied to it, which already reduces its "
                "gradients."
            )
    return roots_of(given)


def _check_ignored(ignored: Iterable[nn.Parameter] | None) -> tuple[nn.Parameter, ...]:
    if ignored is None:
        return ()
    if isinstance(ignored, (str, torch.Tensor)) or not isinstance(ignored, Iterable):
        raise ValueError(f"ignored_params must be a set of nn.Parameter or None, got {type(ignored).__name__}.")
    found = tuple(ignored)
    for item in found:
        if not isinstance(item, nn.Parameter):
            shown = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise ValueError(
                f"ignored_params must hold the parameters themselves, got {shown}. Get them from the model, as in "
                "ignored_params={model.get_parameter('head.weight')}."
            )
    return found


def _check_tensors(refs: Sequence[ParamRef], managed: ManagedTensors, axis: ShardAxis) -> None:
    for ref in refs:
        reason = _unsupported_reason(ref.parameter)
        if reason is not None:
            raise ValueError(f"Parameter '{ref.name}' cannot be sharded: {reason}.")
    named = [(f"Parameter '{ref.name}'", ref.parameter) for ref in refs]
    for what, tensor in (*named, *((f"Buffer '{name}'", buffer) for name, _, buffer in managed.buffers)):
        if tensor.device.type not in ("meta", "cpu") and tensor.device != axis.device:
            raise ValueError(
                f"{what} is on {tensor.device}, expected {axis.device} (the device of this rank of the mesh), the CPU or meta. "
                "Move the module first."
            )


def _unsupported_reason(parameter: nn.Parameter) -> str | None:
    """Return the reason why a parameter cannot be sharded, and the remedy; None if it can be sharded."""
    if replacement_of(parameter) is not None:
        return "it was sharded by a unit that no longer exists. Build the module again, with new parameters"
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "it is not initialized yet. Run one forward of the lazy module, then call fully_shard"
    tensor = _torch.local_part(parameter.data)
    if tensor.layout != torch.strided:
        return f"it must be a dense torch.Tensor, got {type(tensor).__name__} with layout {tensor.layout}"
    return None
