"""The forms in which FSDP1 saves models and optimizers: full tensors, sharded ones (DTensors), and this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.modules import clean_name
from fullshard.optim import rebind
from fullshard.parameter import ShardedParameter, full_tensor, logical_parameters

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


@dataclass(frozen=True, slots=True)
class Form:
    """How tensors are saved: their kind, whether in the host's memory, and whether by the first rank alone (of full ones)."""

    kind: StateDictType
    to_cpu: bool = False
    rank0_only: bool = False

    def keeps(self, *, first: bool) -> bool:
        """Whether a rank, the first or another, saves anything."""
        return first or not (self.kind is FULL and self.rank0_only)

    def of(self, value: Any, *, keep: bool = True) -> Any:
        """`value` in this form. Making a full tensor of a DTensor is collective, also for ranks that do not keep it."""
        if not isinstance(value, Tensor):
            return value
        if self.kind is FULL:  # never the memory that training goes on in
            whole = full_tensor(value) if isinstance(value, DTensor) else value
            if not keep:
                return None
            return whole.detach().to("cpu" if self.to_cpu else whole.device, copy=True)
        if isinstance(value, DTensor) and self.kind is LOCAL:
            value = _torch.local_tensor(value)
        if not self.to_cpu:
            return value
        if isinstance(value, DTensor):
            local = _torch.local_tensor(value)
            return value if local.device.type == "cpu" else _torch.dtensor(local.cpu(), _torch.spec_of(value))
        return value.cpu()


# --- optimizers --------------------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> dict[int, str]:
    """The clean name of each parameter, by its id."""
    found: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), clean_name(name))
    return found


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, given: Iterable[Any] | None = None
) -> list[list[Tensor]]:
    """The parameters of an optimizer, group by group; without one, of what it was `given`, or else of the whole model."""
    if optimizer is not None:
        rebind(optimizer)
        return [list(group["params"]) for group in optimizer.param_groups]
    if given is None:
        return [list(model.parameters())]
    listed = list(given)
    if listed and isinstance(listed[0], dict):
        return [list(group["params"]) for group in listed]
    return [listed]


def _named(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[list[str]]:
    known = names_of(model)
    for parameter in (parameter for group in groups for parameter in group):
        if id(parameter) not in known:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the {type(model).__name__}: "
                "give the model that it was built for, outside of forward and backward"
            )
    return [[known[id(parameter)] for parameter in group] for group in groups]


def optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    form: Form,
    *,
    given: dict[str, Any] | None = None,
    first: bool,
) -> dict[str, Any]:
    """{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]} in `form` (collective).

    given: the optimizer's own state dict, where the caller has one already.   first: whether this is the first rank.
    """
    groups = groups_of(model, optimizer)
    names = _named(model, groups)
    flat = [name for group_names in names for name in group_names]
    source = optimizer.state_dict() if given is None else given
    keep = form.keeps(first=first)
    found = {flat[key] if isinstance(key, int) else key: values for key, values in source["state"].items()}
    state: dict[Any, Any] = {}
    for name in (*(name for name in flat if name in found), *(key for key in found if key not in flat)):
        values = found[name]  # in one order on all ranks, whatever the order of their dicts
        saved_as = {inner: form.of(values[inner], keep=keep) for inner in sorted(values, key=str)}
        state[name] = {inner: saved_as[inner] for inner in values}
    if not keep:
        return {}
    settings: list[dict[str, Any]] = []
    for saved, own in zip(source["param_groups"], names):
        settings.append({**{key: value for key, value in saved.items() if key != "params"}, "params": list(own)})
    return {"state": state, "param_groups": settings}


def state_to_load(
    model: nn.Module,
    saved: dict[str, Any],
    groups: Sequence[Sequence[Tensor]],
    *,
    local: bool = False,
    by_name: bool = False,
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, of what `optimizer_state` gave in any form.

    Full tensors are cut to this rank's rows, DTensors must be cut as the parameters are, and `local` says that plain tensors
    are this rank's rows already. Keys are places in the optimizer, or with `by_name` names.

    Raises ValueError, naming it, for a parameter that `saved` does not have in its groups, or one that is not in the optimizer.
    """
    names = _named(model, groups)
    places = {name: place for place, name in enumerate(name for group in names for name in group)}
    parameters = {name: parameter for group, own in zip(groups, names) for parameter, name in zip(group, own)}
    unknown = [key for key in saved["state"] if key not in places]
    if unknown:
        raise ValueError(
            f"the saved optimizer has states for {unknown[:3]}, which the optimizer to load does not train: take the same "
            f"model and parameters, among them {list(places)[:3]}"
        )
    state: dict[Any, Any] = {}
    for name, values in saved["state"].items():
        fitted = {key: _fit(value, parameters[name], name, key, local=local) for key, value in values.items()}
        state[name if by_name else places[name]] = fitted
    settings_of = {
        name: {key: value for key, value in entry.items() if key != "params"}
        for entry in saved["param_groups"]
        for name in entry["params"]
    }
    settings: list[dict[str, Any]] = []
    for own in names:
        missing = [name for name in own if name not in settings_of]
        if missing:
            raise ValueError(
                f"the saved optimizer has no parameters {missing[:3]}, which the optimizer to load trains: take the same model "
                "and parameters"
            )
        kept = settings_of[own[0]] if own else {}
        other = next((name for name in own if settings_of[name] != kept), None)
        if other is not None:
            raise ValueError(
                f"'{own[0]}' and '{other}' are in groups of different settings in the saved optimizer, but in one group of the "
                "optimizer to load: build it with the same groups"
            )
        settings.append({**kept, "params": list(own) if by_name else [places[name] for name in own]})
    return {"state": state, "param_groups": settings}


_NUMBERS = ("step", "mu_product", "mu", "eta")  # states that are one number, whatever the shape of their parameter


def _fit(value: Any, parameter: Tensor, name: str, key: Any, *, local: bool) -> Any:
    """One value of a parameter's state, cut as the parameter is."""
    logical: ShardedParameter | None = next(iter(logical_parameters([parameter])), None)
    if not isinstance(value, Tensor):
        return value
    if logical is None or (value.ndim == 0 and key in _NUMBERS):
        return value.clone()
    if isinstance(value, DTensor):
        return logical.face(logical.take(value, what="has in the saved optimizer").to(logical.local.device, copy=True))
    wanted = logical.local.shape if local else logical.shape
    if value.shape == wanted:
        return logical.face(value.to(logical.local.device, copy=True)) if local else logical.shard_of(value, dtype=value.dtype)
    if value.ndim == len(wanted):
        hint = ", the rows of this rank: it was saved on another number of ranks, or in another form" if local else ""
        raise ValueError(
            f"the saved optimizer has a '{key}' of shape {tuple(value.shape)} for '{name}', expected {tuple(wanted)}{hint}"
        )
    return value.clone()


def scattered(
    saved: dict[str, Any] | None, group: dist.ProcessGroup | None, device: torch.device, cut: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """What only the first rank of `group` has, on all of them (collective): one tensor at a time is whole, `cut` keeps a part.

    Raises ValueError on every rank if the first has nothing.
    """
    first = dist.get_rank(group) == 0
    shape: list[Any] = [None]
    if first and saved:
        state = {
            name: {key: (value.shape, value.dtype) if _travels(value) else value for key, value in values.items()}
            for name, values in saved["state"].items()
        }
        states = saved["state"]
        travelling = [(name, key) for name in states for key, value in states[name].items() if _travels(value)]
        shape = [(state, travelling, saved["param_groups"])]
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(shape, source, group=group)
    if shape[0] is None:
        raise ValueError("the first rank has no optimizer state to scatter: give it the full one there, and None elsewhere")
    state, travelling, settings = shape[0]
    for name, key in travelling:
        size, dtype = state[name][key]
        whole = saved["state"][name][key].to(device) if first and saved else torch.empty(size, dtype=dtype, device=device)
        dist.broadcast(whole.contiguous(), source, group=group)
        state[name][key] = cut(name, whole)
    return {"state": state, "param_groups": settings}


def _travels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0  # numbers go along as they are


def rekeyed(saved: dict[str, Any], to: OptimStateKeyType, names: Sequence[str]) -> dict[str, Any]:
    """`saved`, keyed by name or by place in the optimizer, keyed by the other. Raises ValueError for keys that are neither."""
    other: dict[Any, Any] = (
        dict(enumerate(names)) if to is OptimStateKeyType.PARAM_NAME else {n: i for i, n in enumerate(names)}
    )
    same = set(other.values())

    def key_of(key: Any) -> Any:
        if key in other:
            return other[key]
        if key in same:
            return key
        raise ValueError(f"the optimizer state has the key {key!r}, which is no parameter of this model or optimizer")

    return {
        "state": {key_of(key): values for key, values in saved["state"].items()},
        "param_groups": [
            {**entry, "params": sorted(map(key_of, entry["params"]), key=str if to is OptimStateKeyType.PARAM_NAME else None)}
            for entry in saved["param_groups"]
        ],
    }


__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "Form",
    "groups_of",
    "names_of",
    "optimizer_state",
    "rekeyed",
    "scattered",
    "state_to_load",
]
