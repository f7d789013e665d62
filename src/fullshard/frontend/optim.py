"""Optimizers and sharded parameters: rebinding one that was built before sharding, and clipping on local shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.consistency.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName
from fullshard.errors import StateError
from fullshard.params.shard_values import shard_of
from fullshard.params.sharded_param import ShardedParameter, inside, logical_parameters
from fullshard.params.sharded_tensor import sleep, wake
from fullshard.params.stale_params import successor
from fullshard.runtime.lint import is_ignored, remark_on_gradients, remark_on_optimizer
from fullshard.runtime.unit import Unit, owner_of


def rebind(optimizer: torch.optim.Optimizer) -> int:
    """Let `optimizer` train what stands for the parameters it was built with; how many there were.

    That is sharded ones for plain ones, or the other way round after `undo`. State it holds already (momenta of the full
    shape) is sliced. Runs by itself before every `step()`.
    """
    count = 0
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            sharded = successor(parameter)
            if sharded is None:
                continue
            parameters[index] = sharded
            count += 1
            held = optimizer.state.pop(parameter, None)
            if held:
                optimizer.state[sharded] = {key: _shard_state(value, parameter, sharded) for key, value in held.items()}
        if count:  # two tied originals may have become one
            group["params"] = list(dict.fromkeys(parameters))
    return count


def _shard_state(value: Any, original: Tensor, sharded: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != original.shape or value.ndim == 0:
        return value
    logical = next(iter(logical_parameters([sharded])), None)
    if logical is None:  # plain again: its state becomes whole (collective, as undo() was)
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return logical.dtensor_like_shard(
            logical.sharding.rows_of(value, name=logical.name, doing="has in its optimizer").clone()
        )
    return shard_of(logical, value, dtype=value.dtype)


_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))  # options that do not change what is computed
_SHOWN = 4  # groups of parameters with options of their own


class _Step(Fingerprint):
    """A step of an optimizer. Its text, which is long, is made when somebody asks for it."""

    text: Callable[[], str]

    @classmethod
    def of(cls, subject: str, text: Callable[[], str]) -> _Step:
        self = cls(UnitName(""), "", subject)
        self.text = text
        return self

    def __str__(self) -> str:
        return self.text()


class _Entry:
    """The entries of one log about the steps of an optimizer.

    Each has class, options, parameters (a hash for each group of the optimizer), and whether gradients were written since
    they came.
    """

    __slots__ = ("_counts", "_digests", "_fingerprint", "_log", "_options", "_unit", "_written")

    def __init__(self, ledger: CollectiveLog, members: Sequence[tuple[int, ShardedParameter, Unit]]) -> None:
        """`members`: the group of the optimizer that each parameter is in, and its unit."""
        first = min((unit for _, _, unit in members), key=lambda unit: unit.global_id)
        self._unit, self._log = weakref.ref(first), weakref.ref(ledger)  # its groups may be made anew
        names: dict[int, list[str]] = {}  # of parameters, by group
        for index, parameter, unit in members:
            names.setdefault(index, []).append(f"{unit.global_id} {parameter.name}")
        self._counts = {index: len(listed) for index, listed in names.items()}
        self._digests = [crc32(repr(sorted(listed)).encode()) for listed in names.values()]
        self._options: _Options | None = None
        self._written = False

    def say(self, options: _Options) -> None:
        """A step ended, of an optimizer with these options."""
        unit, log = self._unit(), self._log()
        if unit is not None and unit.groups and log is not None:
            group = unit.groups[0]
            written = group.grads.rewritten
            if options is not self._options or written is not self._written:
                self._options, self._written = options, written
                values = [f"{options.values[index]} {digest}" for index, digest in zip(self._counts, self._digests)]
                values.sort()
                end = (
                    f", after a write to the gradient of '{group.parameters[0].name}' of '{group.parameters[0].unit_name.name}'"
                )
                text = partial(options.described, self._counts, end if written else "")
                self._fingerprint = _Step.of(f"{options.name} {values} {written}", text)
            unit.runtime.log_write(log, self._fingerprint)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """Those of an optimizer of class `name`, in each of its groups, in the order of `keys`."""

    name: str
    keys: Sequence[str]
    values: Sequence[tuple[Any, ...]]

    def described(self, counts: Mapping[int, int], end: str) -> str:
        """`counts`: of parameters, by group."""
        mine = [
            {key: repr(value) for key, value in zip(self.keys, self.values[index]) if value is not None} for index in counts
        ]
        common = set.intersection(*(set(one.items()) for one in mine))
        sets: dict[str, int] = {}  # how many parameters have these options of their own
        for one, count in zip(mine, counts.values()):
            own = ", ".join(f"{key}={value}" for key, value in one.items() if (key, value) not in common)
            sets[own] = sets.get(own, 0) + count
        total = sum(sets.values())
        shared = [f"{key}={value}" for key, value in mine[0].items() if (key, value) in common]
        text = ", ".join([f"{self.name}.step() of {total} parameter{'s' if total != 1 else ''}", *shared])
        if len(sets) > 1:
            shown = [f"{count} with {own}" for own, count in sorted(sets.items())]
            text += "; " + "; ".join(shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN))
        return text + end


class _Steps:
    """What the ranks must agree on of each step of an optimizer: its class, its options, and which parameters it has.

    steps 1 - n entries, one per ledger that sharded parameters lie in. Options are those of the optimizer's defaults, plain
    values and tensors of one element on the host; what an optimizer counts in its groups beside them is its own.
    """

    __slots__ = ("_entries", "_known", "_names", "_options", "_read", "sizes")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        self.sizes = [len(group["params"]) for group in groups]
        self._names = [name for name in optimizer.defaults if name not in _HOW]
        self._read: Callable[[dict[str, Any]], Any] = self._read_plain
        self._known: list[Any] = []  # options by group, as they were read last
        self._options = _Options(type(optimizer).__name__, self._names, ())
        found: dict[CollectiveLog, list[tuple[int, ShardedParameter, Unit]]] = {}
        for index, group in enumerate(groups):
            for parameter in logical_parameters(group["params"]):
                unit = owner_of(parameter)
                if unit is not None and unit.groups:
                    ledger = unit.runtime.communicator.log_of(parameter.sharding.axis)
                    found.setdefault(ledger, []).append((index, parameter, unit))
        self._entries = [_Entry(ledger, members) for ledger, members in found.items()]

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the optimizer makes its own

    def say(self, groups: Sequence[dict[str, Any]]) -> None:
        """A step ended."""
        try:
            held = [*map(self._read, groups)] == self._known
        except (KeyError, RuntimeError):  # an option is gone, or became a tensor of several elements
            held = False
        if not held:
            self._look_up(groups)
        for entry in self._entries:
            entry.say(self._options)

    def _look_up(self, groups: Sequence[dict[str, Any]]) -> None:
        """Options are others than in the step before."""
        self._options = _Options(self._options.name, self._names, [*map(self._read_plain, groups)])
        held = [[group.get(name) for name in self._names] for group in groups]
        if len(self._names) < 2 or any(value is None or isinstance(value, Tensor) for values in held for value in values):
            self._read, self._known = self._read_plain, list(self._options.values)
        else:
            self._read, self._known = itemgetter(*self._names), [*map(tuple, held)]

    def _read_plain(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple([_plain(group.get(name)) for name in self._names])


def _plain(value: Any) -> Any:
    """An option as ranks compare it: numbers, words, and tuples of them; None for others, and for tensors of a device."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


_STEPS = "_fullshard_steps"  # on an optimizer: its _Steps
_SEEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _remark(optimizer: torch.optim.Optimizer) -> None:
    """Once per optimizer: plain parameters beside sharded ones; and sharded ones of which none has a gradient."""
    _SEEN.add(optimizer)
    plain: list[str] = []
    units: list[Unit] = []
    sharded = [p for p in logical_parameters(p for group in optimizer.param_groups for p in group["params"]) if p.requires_grad]
    unit = owner_of(sharded[0]) if sharded else None
    if unit is not None and all(parameter.sharded.grad is None for parameter in sharded):
        remark_on_gradients(unit, [parameter.name for parameter in sharded])
    for group in optimizer.param_groups:
        names = group.get("param_names", [f"one of shape {tuple(p.shape)}" for p in group["params"]])
        for name, parameter in zip(names, group["params"]):
            if type(parameter) is nn.Parameter and parameter.grad is not None and not is_ignored(parameter):
                plain.append(name)
        units += [unit for p in logical_parameters(group["params"])[:1] if (unit := owner_of(p)) is not None]
    if plain and units:
        remark_on_optimizer(units[0], plain)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if rebind(optimizer):
        optimizer.__dict__.pop(_STEPS, None)
    if optimizer not in _SEEN:
        _remark(optimizer)
    for group in optimizer.param_groups:
        for check in dict.fromkeys(parameter.before_step for parameter in logical_parameters(group["params"])):
            if check is not None:
                check()
    for group in optimizer.param_groups:
        sleep(group["params"])


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    wake()
    sizes: list[int] = []
    for group in optimizer.param_groups:
        sizes.append(len(group["params"]))
        for parameter in logical_parameters(tensor for tensor in group["params"] if tensor.grad is not None):
            parameter.note_write()
    steps = optimizer.__dict__.get(_STEPS)
    if steps is None or steps.sizes != sizes:
        steps = optimizer.__dict__[_STEPS] = _Steps(optimizer)
    steps.say(optimizer.param_groups)


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """`tensors` by dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return found


def _norms(tensors: list[Tensor], power: float) -> list[Tensor]:
    """The norm of each tensor, on the device of the first."""
    found: list[Tensor] = []
    for (dtype, _), alike in _alike(tensors).items():
        half = dtype in (torch.bfloat16, torch.float16)
        found += torch._foreach_norm(alike, power, torch.float32) if half else torch._foreach_norm(alike, power)
    return [norm.to(found[0].device) for norm in found]


def _cut_over(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which the elements of a gradient are spread, each element once."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    cut = [axis for axis, placement in enumerate(grad.placements) if _torch.is_cut(placement) and mesh.size(axis) > 1]
    return tuple(mesh.get_group(axis) for axis in cut)


def _axes(tensors: Iterable[Tensor]) -> dict[tuple[dist.ProcessGroup | None, ...], Unit]:
    """By process groups: a unit whose shards lie on just those."""
    found: dict[tuple[dist.ProcessGroup | None, ...], Unit] = {}
    for logical in logical_parameters(tensors):
        unit = owner_of(logical)
        if unit is not None:
            found.setdefault((unit.axis.group,), unit)
    return found


def _reduce(part: Tensor, groups: tuple[dist.ProcessGroup, ...], axes: Any, *, maximum: bool) -> None:
    """Over ranks that also gather together, this is one of the calls that they must make alike, or be told."""
    unit: Unit | None = axes.get(groups)
    if unit is not None:
        communicator = unit.runtime.communicator
        line = GroupFingerprints(communicator.log_of(unit.axis), UnitName(""), "")
        return communicator.all_reduce(unit.axis, line, "clip_grad_norm_()", part, maximum=maximum)
    for group in groups:
        dist.all_reduce(part, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)


_torch.register_optimizer_step_pre_hook(_before_step)
_torch.register_optimizer_step_post_hook(_after_step)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their norm, over all ranks, is at most `max_norm`. Collective.

    Takes any mixture of sharded parameters (also of several meshes) and plain ones, which are taken to be equal on all
    ranks. Works on local shards: one small all-reduce per mesh.

    Args:
        parameters: a parameter or several; those without `.grad` do not count.
        max_norm: the largest norm that is left as it is.
        norm_type: the power of the norm, above 0; `float("inf")` takes the largest absolute value.
        error_if_nonfinite: whether a norm that is NaN or infinite is an error; otherwise gradients are scaled by it.

    Returns:
        The norm before clipping, a plain 0-dim tensor, equal on all ranks.

    Raises:
        RuntimeError: with `error_if_nonfinite=True`, if the norm is not finite; no gradient has changed then.
        StateError: naming the parameter, if its gradient is only kept on each rank (`accumulate()`).
        ValueError: for a `norm_type` that is not above 0, or a DTensor gradient that is not summed yet.

    Example:
        >>> norm = clip_grad_norm_(model.parameters(), max_norm=1.0)                          # doctest: +SKIP

    Source: Pascanu et al. 2013 (arXiv 1211.5063); the interface of `torch.nn.utils.clip_grad_norm_`.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    listed = [parameter if (now := successor(parameter)) is None else now for parameter in given]  # a list made before sharding
    for logical in logical_parameters(listed):
        if logical.local_grad is not None and logical.sharded.grad is None:
            raise StateError(
                f"clip_grad_norm_ was called while the gradient of '{logical.name}' is only kept on each rank: run the last "
                "backward of the step outside of accumulate() or no_sync() first"
            )
    grads = [p.grad for p in listed if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"clip_grad_norm_ takes a norm_type > 0 or inf, got {norm_type!r}")
    total = _total_norm("clip_grad_norm_", grads, power, _axes(listed))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients have a norm of {total.item()} over all ranks, so they cannot be clipped to {max_norm}"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (dtype, where), tensors in _alike(
        map(inside, grads)
    ).items():  # one coefficient, rounded to each dtype where it is used
        torch._foreach_mul_(tensors, coefficient.to(where, torch.float64 if dtype == torch.float64 else torch.float32))
    return total


def _total_norm(caller: str, tensors: list[Tensor], power: float, axes: Any, *, singly: bool = False) -> Tensor:
    """The norm of `tensors` over all ranks, each element once, where the first is. `singly`: without foreach operations.

    Raises ValueError for a DTensor that is still to be summed.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(
                f"{caller} takes gradients that are sharded, replicated or plain, got a DTensor of shape "
                f"{tuple(tensor.shape)} with placements {tensor.placements}, which is not summed yet: redistribute() it first"
            )
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else None
        alike.setdefault((kind, _cut_over(tensor)), []).append(inside(tensor))
    device = inside(tensors[0]).device
    parts = []
    for (kind, groups), shards in alike.items():
        # Squares of bfloat16 norms would lose their digits when summed. Every rank sends the same dtype, shards or none.
        wide = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
        shards = [shard for shard in shards if shard.numel()]
        norms = torch.zeros(1, dtype=wide, device=device)
        if shards:
            found = chain.from_iterable(_norms([one], power) for one in shards) if singly else _norms(shards, power)
            norms = torch.stack([norm.to(device, wide) for norm in found])
        part = norms.max() if power == torch.inf else norms.pow(power).sum()
        part = part.to(device if kind is None or kind == device.type else kind)  # where the group's backend works
        _reduce(part, groups, axes, maximum=power == torch.inf)
        parts.append(part.to(device))
    return torch.stack(parts).max() if power == torch.inf else torch.stack(parts).sum().pow(1.0 / power)


def _is_mixed(tensors: Sequence[Tensor]) -> bool:
    """Whether DTensors of several meshes are among them, or DTensors and plain tensors: torch has no operation for those."""
    meshes = {tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}
    return len(meshes) > 1


def _torch_total_norm(
    original: Any,
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.get_total_norm, also over several meshes, and over sharded and plain tensors."""
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    power = float(norm_type)
    if not _is_mixed(listed):
        return original(listed, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
    if not power > 0:
        raise ValueError(
            f"a norm over several meshes, or of sharded and plain tensors, has norm_type > 0 or inf, got {norm_type!r}"
        )
    total = _total_norm("torch.nn.utils.get_total_norm", listed, power, {}, singly=foreach is False)
    original([total], 1.0, error_if_nonfinite, False)  # torch's own error
    return total


def _torch_clip_with_norm(
    original: Any,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """torch.nn.utils.clip_grads_with_norm_: likewise."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in listed if parameter.grad is not None]
    if isinstance(total_norm, DTensor):
        mixed = _is_mixed([*grads, total_norm])
        total_norm = total_norm.full_tensor() if mixed else total_norm
    else:
        mixed = _is_mixed(grads)
    if mixed:
        listed = [SimpleNamespace(grad=inside(grad)) for grad in grads]  # type: ignore[misc]
    original(listed, max_norm, total_norm, foreach)


_torch.extend_clipping(_torch_total_norm, _torch_clip_with_norm)
