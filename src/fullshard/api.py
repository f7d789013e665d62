"""What a caller meets: `fully_shard`, the methods a sharded module gains, and the handle of an asynchronous gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch, hooks
from fullshard.comm import Message
from fullshard.cut import Cut, PlacementFn, cut
from fullshard.extension import extends, half_extends
from fullshard.group import is_plain
from fullshard.mesh import DataParallelMeshDims, ShardAxis, resolve_mesh
from fullshard.modules import Claim, Holdings, collect, roots_of
from fullshard.parameter import ShardedParameter, inside, is_sharded, move_data, successor
from fullshard.policies import CheckPolicy, CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime import Unit, UnitOptions, attach, say_once, unit_of
from fullshard.schedule import Keep, StateError, Stats

M = TypeVar("M", bound=nn.Module)

_SHARDED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


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
) -> nn.Module | list[nn.Module]:
    """Shard the parameters of `module` over `mesh`, in place, and make it a unit that gathers them when it runs.

    Call it bottom-up: first on the blocks of a model, then on the model itself. Each call takes the parameters that no
    earlier call took and turns each into a DTensor Parameter, `Shard(0)` on the mesh; uneven and empty shards follow
    torch.chunk. Around the unit's forward and backward its parameters are gathered (the next unit's while this one
    computes) and freed; its gradients are averaged over the mesh into `.grad` DTensors. Calls are collective.

    Args:
        module: a module with a forward, or a list of modules that form one unit (their parameters are gathered when the
            first of them runs, freed when the last has).
        mesh: DeviceMesh of one axis, to shard over, or of two: hybrid sharding, which replicates over the first and shards
            over the second. None takes all ranks of the default process group.
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

    Parameters that are DTensors already (tensor or expert parallelism) are sharded further, along any dim; their mesh and
    `mesh` must be axes of one DeviceMesh with names.

    Returns:
        `module`, the same object, whose class is now a subclass of `FSDPModule` and its former class.

    Raises:
        ValueError: before anything has changed, naming the module or parameter, for a container without forward, a
            module that is a unit already, a scalar parameter, a parameter on another device type or tied to one of
            another unit, a mesh of more than two axes, a placement that is impossible, or options of the wrong type.

    Example:
        >>> for block in model.blocks:                                                        # doctest: +SKIP
        ...     fully_shard(block)
        >>> fully_shard(model)                                                                # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters())                                 # doctest: +SKIP

    Source: the interface of `torch.distributed.fsdp.fully_shard`; Rajbhandari et al., ZeRO (arXiv 1910.02054);
    Zhao et al., PyTorch FSDP (arXiv 2304.11277).
    """
    modules = _check_modules(module)
    for name, value, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
        ("comm_policy", comm_policy, CommPolicy),
        ("check_policy", check_policy, CheckPolicy),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    axis = resolve_mesh(mesh, dp_mesh_dims)
    keep, retain = _keep(reshard_after_forward, axis)
    home = axis.device if not isinstance(offload_policy, CPUOffloadPolicy) else torch.device("cpu")
    holdings = collect(modules, ignored=ignored_params or (), is_unit=lambda inner: unit_of(inner) is not None)
    _check_parameters(holdings, axis)
    _check_buffers(holdings, axis)
    cuts = [_cut(claim, axis, shard_placement_fn) for claim in holdings.claims]
    options = UnitOptions(keep=keep, retain=retain, mp=mp_policy, offload=offload_policy, comm=comm_policy, checks=check_policy)

    _move(holdings, home, axis.device)
    with torch.no_grad():
        parameters = [ShardedParameter(claim, how) for claim, how in zip(holdings.claims, cuts)]
        unit = Unit(modules, parameters, axis, options)
        for parameter, claim in zip(parameters, holdings.claims):
            parameter.succeed(claim.parameter)
    attach(unit)
    hooks.install(unit)
    for managed in holdings.modules:
        _torch.mark_managed(managed)
    for root in modules:
        root.__class__ = _sharded_class(type(root))
    return module


# --- checks, before anything has changed -----------------------------------------------------------------------------


def _check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(item, nn.Module) for item in given):
        raise ValueError(f"fully_shard takes an nn.Module or a non-empty list of them, got {type(module).__name__}")
    for item in given:
        if isinstance(item, (nn.ModuleList, nn.ModuleDict)) and type(item).forward is nn.Module.forward:
            raise ValueError(
                f"{type(item).__name__} has no forward, so fully_shard would never know when to gather it: "
                "call fully_shard on each of its items"
            )
        if unit_of(item) is not None:
            raise ValueError(f"fully_shard was already called on this {type(item).__name__}: call it once per module")
        if _torch.is_non_composable(item):
            raise ValueError(f"{type(item).__name__} is under torch's replicate(), which already reduces its gradients")
    return roots_of(given)


def _keep(reshard_after_forward: bool | int | None, axis: ShardAxis) -> tuple[Keep, int | None]:
    """What stays after forward, and how many ranks keep one copy together if it is a part."""
    if reshard_after_forward is None:
        return Keep.OUTERMOST, None
    if isinstance(reshard_after_forward, bool):
        return (Keep.NEVER if reshard_after_forward else Keep.ALWAYS), None
    if not isinstance(reshard_after_forward, int):
        raise ValueError(f"reshard_after_forward must be True, False, an int or None, got {reshard_after_forward!r}")
    if reshard_after_forward < 1 or axis.ranks % reshard_after_forward:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the {axis.ranks} ranks that parameters are sharded "
            f"over: take one of {[k for k in range(1, axis.ranks + 1) if axis.ranks % k == 0]}"
        )
    if reshard_after_forward == axis.ranks:
        return Keep.NEVER, None
    if reshard_after_forward == 1:
        say_once("reshard_after_forward=1 keeps all parameters after forward: it is taken as False, which says so")
        return Keep.ALWAYS, None
    return Keep.PARTLY, reshard_after_forward


def _cut(claim: Claim, axis: ShardAxis, placement_fn: PlacementFn | None) -> Cut:
    how = cut(claim.parameter, axis, placement_fn, name=claim.name)
    if how.dim != 0 and extends(inside(claim.parameter.data)):
        raise ValueError(
            f"parameter '{claim.name}' gathers itself (fsdp_pre_all_gather), by rows: it cannot be cut along dim {how.dim}"
        )
    return how


def _check_parameters(holdings: Holdings, axis: ShardAxis) -> None:
    for claim in holdings.claims:
        reason = _refusal(claim.parameter)
        if reason is not None:
            raise ValueError(f"parameter '{claim.name}' cannot be sharded: {reason}")
        _check_device(f"parameter '{claim.name}'", claim.parameter, axis)


def _refusal(parameter: nn.Parameter) -> str | None:
    """Why a parameter cannot be sharded, and what to do; None if it can."""
    if successor(parameter) is not None or is_sharded(parameter):
        return (
            "it is tied to a parameter of a unit that was sharded earlier: "
            "shard the modules that share it in one call, fully_shard([a, b])"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "it is not initialized yet: run one forward of the lazy module, then fully_shard"
    if parameter.ndim == 0:
        return "it is a scalar, which has no dim 0: give it shape (1,)"
    tensor = inside(parameter.data)
    missing = half_extends(tensor)
    if missing is not None:
        return f"its class {type(tensor).__name__} defines one half of the all-gather protocol: define {missing} as well"
    if not extends(tensor) and not is_plain(tensor):
        return (
            f"it must be a dense torch.Tensor, got {type(tensor).__name__} with layout {tensor.layout}; a subclass can say how "
            "it is gathered with fsdp_pre_all_gather and fsdp_post_all_gather"
        )
    return None


def _check_buffers(holdings: Holdings, axis: ShardAxis) -> None:
    for name, _, buffer in holdings.buffers:
        _check_device(f"buffer '{name}'", buffer, axis)


def _check_device(what: str, tensor: torch.Tensor, axis: ShardAxis) -> None:
    kind = tensor.device.type
    if kind not in ("meta", "cpu", axis.device.type) or (kind == axis.device.type != "cpu" and tensor.device != axis.device):
        raise ValueError(
            f"{what} is on {tensor.device}, expected {axis.device} (this rank of the mesh), the CPU or meta: "
            "move the module first"
        )


def _move(holdings: Holdings, home: torch.device, device: torch.device) -> None:
    """Parameters go to where shards are kept, buffers to where they are computed with; what is on meta stays there."""
    for claim in holdings.claims:
        move_data(claim.parameter, home)
    for _, _slot, buffer in holdings.buffers:
        if buffer.device.type not in ("meta", device.type):
            buffer.data = buffer.data.to(device)


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    found = _SHARDED_CLASSES.get(cls)
    if found is None:
        found = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        _SHARDED_CLASSES[cls] = found
    return found


# --- what a sharded module can do --------------------------------------------------------------------------------------


class UnshardHandle:
    """A gather under way; `wait()` has the full parameters installed."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Order the current stream behind the gather and install the full parameters. Later calls do nothing."""
        if self._unit is not None:
            self._unit.runtime.fulfil(self._unit)
            self._unit = None


class FSDPModule:
    """Mixed into the class of every module given to `fully_shard`; not made by itself.

    Setters with `recurse` reach every unit at or below the module.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing the class of a sharded module gives an ordinary one: `sharded_sequential[0:2]` is a plain Sequential."""
        original = cls.__mro__[2]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and install them until `reshard()`, or until its forward or backward frees them.

        With `async_op=True` the gather is only started, and the handle returned waits for it.
        """
        unit = _unit(self)
        unit.runtime.hold(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters. Raises StateError while its forward or backward runs."""
        unit = _unit(self)
        unit.runtime.release(unit)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward of the units at and below is the last of the step.

        If not, it does not wait for its reductions, and gradients arrive with the last one.
        """
        for unit in _units(self, True):
            unit.configure(last_backward=bool(is_last_backward))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not, each rank keeps its own, in the reduce dtype, until one that does."""
        for unit in _units(self, recurse):
            unit.configure(sync_gradients=bool(requires_gradient_sync))

    def set_reshard_after_forward(self, reshard_after_forward: bool | int | None, recurse: bool = True) -> None:
        """As the argument of `fully_shard`, from the next forward on."""
        for unit in _units(self, recurse):
            keep, retain = _keep(reshard_after_forward, unit.axis)
            if retain == unit.options.retain:
                unit.configure(keep=keep)
            else:
                unit.reconfigure(doing="set_reshard_after_forward()", keep=keep, retain=retain)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the full parameters. If not, they are gathered again only once the shards were written."""
        for unit in _units(self, recurse):
            unit.configure(keep_after_backward=not reshard_after_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums gradients over the replicas of a hybrid mesh. If not, it only reduces them over shards and
        keeps that, in the reduce dtype, until a backward that does. Without replicas there is nothing to put off.
        """
        for unit in _units(self, recurse):
            unit.configure(reduce=replace(unit.options.reduce, all_reduce=bool(requires_all_reduce)))

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Divide summed gradients by `factor` instead of by the number of ranks they come from; None is that number again.

        As in FSDP2, of this unit alone unless `recurse`.
        """
        if factor is not None and not (isinstance(factor, (int, float)) and factor > 0):
            raise ValueError(f"set_gradient_divide_factor takes a number > 0 or None, got {factor!r}")
        for unit in _units(self, recurse):
            unit.configure(reduce=replace(unit.options.reduce, divide=None if factor is None else float(factor)))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside keep their gradients on each rank; the first one after it reduces the sum of all.

        `model.zero_grad()` discards what was kept; an optimizer's `zero_grad()` does not see it.

        with model.accumulate():
            for batch in batches[:-1]:
                model(batch).backward()
        model(batches[-1]).backward()
        """
        units = list(_units(self, True))
        before = [unit.options.sync_gradients for unit in units]
        for unit in units:
            unit.configure(sync_gradients=False)
        try:
            yield
        finally:
            for unit, sync in zip(units, before):
                unit.configure(sync_gradients=sync)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `half`, `to_empty` and the like: on the shards, which then go back into flat memory."""
        unit = _unit(self)
        unit.runtime.rest(unit, doing="moving or casting")
        attributes = [dict(parameter.sharded.__dict__) for parameter in unit.parameters]
        super()._apply(fn, recurse)  # type: ignore[misc]
        for parameter, had in zip(unit.parameters, attributes):  # torch swaps the insides of a DTensor, attributes included
            for key, value in had.items():
                parameter.sharded.__dict__.setdefault(key, value)
        unit.refresh()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for the sharded parameters, also while full ones are installed; discards what `accumulate()` kept."""
        for unit in _units(self, True):
            for parameter in unit.parameters:
                parameter.discard_gradient(set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise StateError(f"a sharded {type(self).__name__} cannot be copied yet: copy the module before fully_shard")

    def extra_repr(self) -> str:
        unit = _unit(self)
        own = super().extra_repr()  # type: ignore[misc]
        numel = sum(parameter.sharded.numel() for parameter in unit.parameters)
        said = (
            f"unit of {len(unit.parameters)} parameters ({numel:,} elements) in {len(unit.groups)} groups, "
            f"rank {unit.axis.rank} of {unit.axis.ranks}, {unit.residency.value}"
        )
        return f"{own}, {said}" if own else said


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise StateError(f"this {type(module).__name__} is no unit: call fully_shard on it first")
    return unit


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
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

    >>> with counting(model) as messages:                                                     # doctest: +SKIP
    ...     model(batch).sum().backward()
    """
    with _any_unit(module).runtime.journal.counting() as messages:
        yield messages


def stats(module: nn.Module) -> Stats:
    """A snapshot of what the runtime of `module` counted so far, for all its units: gathers, gathers issued ahead, and those
    of them that nobody used.
    """
    return replace(_any_unit(module).runtime.planner.stats)


def _any_unit(module: nn.Module) -> Unit:
    units: Sequence[Unit] = list(_units(module, True))
    if not units:
        raise StateError(f"no module in this {type(module).__name__} is a unit: call fully_shard first")
    return units[0]


__all__ = ["FSDPModule", "UnshardHandle", "counting", "fully_shard", "stats"]
