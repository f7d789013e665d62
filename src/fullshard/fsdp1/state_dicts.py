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
from fullshard.frontend.optim import rebind
from fullshard.fsdp1.agreement import Facts, Ranks
from fullshard.params.shard_values import full_tensor, shard_of
from fullshard.params.sharded_param import ShardedParameter, logical_parameters
from fullshard.sharding.module_tree import clean_name

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


@dataclass(frozen=True, slots=True)
class StateDictFormat:
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


@dataclass(frozen=True)
class _Held:
    """The state of an optimizer by names, in the order of the model's, and the settings of each of its groups."""

    state: dict[Any, dict[Any, Any]]
    settings: list[dict[str, Any]] | None  # as of the optimizer, "params" being names; None if it came without
    form: StateDictFormat

    def facts(self) -> Facts:
        """The facts that must be equal on all ranks: parameters, the kinds of their states, and their numeric settings."""
        found: dict[str, dict[str, str]] = {"state_dict_type": {"it is": self.form.kind.name}}
        for entry in self.settings or ():
            own = {key: str(value) for key, value in entry.items() if _is_setting(value)}
            for name in entry["params"]:
                found.setdefault(name, {}).update(own)
        for name, values in self.state.items():
            kinds = found.setdefault(str(name), {})
            kinds.update({f"state '{key}'": _kind(value) for key, value in values.items()})
        return found


def _is_setting(value: Any) -> bool:
    """Whether a setting of an optimizer is made of numbers and flags, which compare by value."""
    if isinstance(value, (tuple, list)):
        return all(_is_setting(item) for item in value)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def _kind(value: Any) -> str:
    """The part of a state's description that is equal on all ranks."""
    if not isinstance(value, Tensor):
        return f"({type(value).__name__})"
    cut = f", {value.placements}" if isinstance(value, DTensor) else ""
    return f"(shape {tuple(value.shape)}, {value.dtype}{cut})"


def _held(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any] | None, form: StateDictFormat) -> _Held:
    groups = groups_of(model, optimizer)
    names = _named(model, groups)
    flat = [name for own in names for name in own]
    parameters = {name: parameter for own, group in zip(names, groups) for name, parameter in zip(own, group)}
    source = optimizer.state_dict() if given is None else given
    found = {_name_of(key, flat): values for key, values in source["state"].items()}
    order = {name: place for place, name in enumerate(names_of(model).values())}
    state: dict[Any, dict[Any, Any]] = {}
    for key in sorted(found, key=lambda key: (order.get(key, len(order)), str(key))):
        values = found[key]
        if key not in order and not isinstance(values, dict):  # of the whole optimizer
            values = {None: values}
        state[key] = values
        for inner, value in values.items() if key in parameters else ():
            _check_whole(value, parameters[key], key, inner, form)
    if "param_groups" not in source:
        return _Held(state, None, form)
    if len(source["param_groups"]) != len(names):
        raise ValueError(
            f"the optimizer state dict has {len(source['param_groups'])} parameter groups, its optimizer has {len(names)}: "
            "give the state_dict() of that optimizer"
        )
    settings = [
        {**{key: value for key, value in saved.items() if key != "params"}, "params": list(own)}
        for saved, own in zip(source["param_groups"], names)
    ]
    return _Held(state, settings, form)


def _name_of(key: Any, flat: Sequence[str]) -> Any:
    """The clean name of a parameter, from its place in the optimizer or a name that wrappers added to."""
    if isinstance(key, int):
        if not 0 <= key < len(flat):
            raise ValueError(
                f"the optimizer state dict has a state of parameter {key}, but its optimizer has {len(flat)} parameters: give "
                "the state_dict() of that optimizer"
            )
        return flat[key]
    return clean_name(key) if isinstance(key, str) else key


def _check_whole(value: Any, parameter: Tensor, name: str, key: Any, form: StateDictFormat) -> None:
    """A plain tensor with this rank's rows is not the whole state, which a full state dict would say it is."""
    logical: ShardedParameter | None = next(iter(logical_parameters([parameter])), None)
    if logical is None or form.kind is LOCAL or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return
    if value.ndim and value.shape == logical.local.shape != logical.shape:
        raise ValueError(
            f"the optimizer holds '{key}' of '{name}' as a plain tensor of shape {tuple(value.shape)}, the rows of this rank: "
            "only LOCAL_STATE_DICT can save it; elsewhere the optimizer must keep DTensors, as torch.zeros_like(parameter) does"
        )


def optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    form: StateDictFormat,
    ranks: Ranks,
    *,
    given: dict[str, Any] | None = None,
    first: bool,
) -> dict[str, Any]:
    """{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]} in `form` (collective).

    Parameters come in the order of the model, groups and the parameters in them in that of each rank's optimizer.

    given: the optimizer's own state dict, where the caller has one already.   first: whether this is the first rank.

    Raises ValueError on every rank, before any state travels, for parameters, states or numeric settings that differ.
    """
    held = ranks.agree(
        lambda: _held(model, optimizer, given, form),
        _Held.facts,
        subject="the optimizers",
        advice="Give all of them the same parameters and settings, step all of them, and set one state_dict_type on all ranks",
    )
    keep = form.keeps(first=first)
    state: dict[Any, Any] = {}
    for name, values in held.state.items():
        saved_as = {inner: form.of(values[inner], keep=keep) for inner in sorted(values, key=str)}
        state[name] = saved_as[None] if list(values) == [None] else {inner: saved_as[inner] for inner in values}
    if not keep:
        return {}
    return {"state": state, **({} if held.settings is None else {"param_groups": held.settings})}


def load_optimizer_state(
    model: nn.Module,
    saved: dict[str, Any],
    groups: Sequence[Sequence[Tensor]],
    ranks: Ranks,
    *,
    local: bool = False,
    by_name: bool = False,
) -> dict[str, Any]:
    """Fit what `optimizer_state` gave, in any form, to `optimizer.load_state_dict` (collective).

    Full tensors and ShardedTensors are cut to this rank's rows, DTensors must be cut as the parameters are, and `local` says
    that plain tensors are this rank's rows already. Keys are places in the optimizer, or with `by_name` names. Without
    "param_groups" in `saved` there are none in the result.

    Raises ValueError on every rank, naming it, for a parameter that `saved` does not have in its groups, or one that is not in
    the optimizer, and for states that do not fit.
    """
    ready = ranks.agree(
        lambda: _to_load(model, saved, groups, local=local),
        _ToLoad.facts,
        subject="the saved optimizers",
        advice="Load one checkpoint on all ranks",
    )
    for name, values in ready.state.items():
        for key, value in values.items() if name in ready.parameters else ():
            if isinstance(value, _torch.ShardedTensor):
                parameter = next(iter(logical_parameters([ready.parameters[name]])), None)
                whole = _torch.whole_of(value, ranks.device)
                values[key] = whole if parameter is None else shard_of(parameter, whole, dtype=whole.dtype)
    places = {name: place for place, name in enumerate(ready.parameters)}
    keys: dict[str, Any] = {name: name for name in places} if by_name else dict(places)
    settings = [{**entry, "params": [keys[name] for name in entry["params"]]} for entry in ready.settings or ()]
    state = {keys.get(name, name): values for name, values in ready.state.items()}
    return {"state": state, **({} if ready.settings is None else {"param_groups": settings})}


@dataclass(frozen=True)
class _ToLoad:
    """States by names, in the order of the model's, fitted to this rank; ShardedTensors are still to be gathered."""

    parameters: dict[str, Tensor]  # of the optimizer, in its order
    state: dict[str, dict[Any, Any]]
    settings: list[dict[str, Any]] | None

    def facts(self) -> Facts:
        """The facts that must be equal on all ranks: all that is gathered."""
        found: dict[str, dict[str, str]] = {}
        for name in self.parameters:
            values = self.state.get(name, {}).items()
            travelling = {f"state '{key}'": _kind(value) for key, value in values if isinstance(value, _torch.ShardedTensor)}
            if travelling:
                found[name] = travelling
        return found


def _to_load(model: nn.Module, given: dict[str, Any], groups: Sequence[Sequence[Tensor]], *, local: bool) -> _ToLoad:
    saved = _with_clean_names(given)
    names = _named(model, groups)
    parameters = {name: parameter for group, own in zip(groups, names) for parameter, name in zip(group, own)}
    unknown = [key for key, values in saved["state"].items() if key not in parameters and isinstance(values, dict)]
    if unknown:
        raise ValueError(
            f"the saved optimizer has states for {unknown[:3]}, which the optimizer to load does not train: take the same "
            f"model and parameters, among them {list(parameters)[:3]}"
        )
    state: dict[str, dict[Any, Any]] = {}
    for name in names_of(model).values():
        values = saved["state"].get(name)
        if values is not None:
            ordered = {key: values[key] for key in sorted(values, key=str)}
            fitted = {key: _fit(value, parameters[name], name, key, local=local) for key, value in ordered.items()}
            state[name] = {key: fitted[key] for key in values}
    state.update({key: values for key, values in saved["state"].items() if key not in parameters})  # of the whole optimizer
    if "param_groups" not in saved:
        return _ToLoad(parameters, state, None)
    settings_of = {
        name: {key: value for key, value in entry.items() if key not in ("params", "param_names")}
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
        settings.append({**kept, "params": list(own)})
    return _ToLoad(parameters, state, settings)


def _with_clean_names(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved optimizer whose names have no parts of wrappers in them. Raises ValueError for what is no such dict."""
    if not isinstance(saved, dict) or "state" not in saved:
        keys = list(saved)[:5] if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"expected an optimizer state dict, with 'state' and 'param_groups' in it, got {keys}")

    def clean(key: Any) -> Any:
        return clean_name(key) if isinstance(key, str) else key

    found: dict[str, Any] = {"state": {clean(key): values for key, values in saved["state"].items()}}
    if "param_groups" in saved:
        found["param_groups"] = [
            {**entry, "params": [clean(key) for key in entry["params"]]} for entry in saved["param_groups"]
        ]
    return found


_FLAT = ": a FlatParameter of FSDP1 has no meaning here, save FULL_STATE_DICT there"
_NUMBERS = ("step", "mu_product", "mu", "eta")  # states that are one number, whatever the shape of their parameter


def _fit(value: Any, parameter: Tensor, name: str, key: Any, *, local: bool) -> Any:
    """One value of a parameter's state, cut as the parameter is."""
    logical: ShardedParameter | None = next(iter(logical_parameters([parameter])), None)
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, _torch.ShardedTensor):
        if value.size() != parameter.shape:
            raise ValueError(
                f"the saved optimizer has a '{key}' of shape {tuple(value.size())} for '{name}', expected "
                f"{tuple(parameter.shape)}{_FLAT if len(value.size()) == 1 else ''}"
            )
        return value
    if logical is None or (value.ndim == 0 and key in _NUMBERS):
        return value.clone()
    if isinstance(value, DTensor):
        return logical.dtensor_like_shard(
            logical.sharding.rows_of(value, name=logical.name, doing="has in the saved optimizer").to(
                logical.local.device, copy=True
            )
        )
    wanted = logical.local.shape if local else logical.shape
    if value.shape == wanted:
        return (
            logical.dtensor_like_shard(value.to(logical.local.device, copy=True))
            if local
            else shard_of(logical, value, dtype=value.dtype)
        )
    if value.ndim == len(wanted):
        hint = ", the rows of this rank: it was saved on another number of ranks, or in another form" if local else ""
        raise ValueError(
            f"the saved optimizer has a '{key}' of shape {tuple(value.shape)} for '{name}', expected {tuple(wanted)}{hint}"
        )
    return value.clone()


def scattered(
    saved: dict[str, Any] | None, group: dist.ProcessGroup | None, device: torch.device, cut: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """Scatter a state that only the first rank of `group` has (collective): one tensor at a time is whole, `cut` keeps a part.

    Raises ValueError on every rank if the first has nothing, or no such dict.
    """
    first = dist.get_rank(group) == 0
    mine: dict[str, Any] = {}
    shape: list[Any] = [None]
    if first:
        try:
            mine, shape = _outline(saved)
        except Exception as error:  # the others must learn of it
            shape = [f"{error}"]
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(shape, source, group=group)
    if isinstance(shape[0], str):
        raise ValueError(shape[0])
    outline, travelling = shape[0]
    for name, key in travelling:
        size, dtype = outline["state"][name][key]
        whole = mine["state"][name][key].to(device) if first else torch.empty(size, dtype=dtype, device=device)
        dist.broadcast(whole.contiguous(), source, group=group)
        outline["state"][name][key] = cut(name, whole)
    return dict(outline)


def _outline(saved: dict[str, Any] | None) -> tuple[dict[str, Any], list[Any]]:
    """`saved` under clean names; and in a list, to be broadcast: it with shape and dtype for tensors, and where these were."""
    if not saved:
        raise ValueError("the first rank has no optimizer state to scatter: give it the full one there, and None elsewhere")
    mine = _with_clean_names(saved)
    travelling: list[tuple[Any, Any]] = []
    state: dict[Any, Any] = {}
    for name, values in mine["state"].items():
        state[name] = values
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, (DTensor, _torch.ShardedTensor)):
                raise ValueError(
                    f"the saved optimizer has '{key}' of '{name}' as a {type(value).__name__}, of which the first rank alone "
                    "holds no whole: give the full state, or load it on all ranks, with rank0_only=False"
                )
            if _travels(value):
                travelling.append((name, key))
                state[name] = {**state[name], key: (value.shape, value.dtype)}
    return mine, [({**mine, "state": state}, travelling)]


def _travels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0  # numbers go along as they are


def rekeyed(given: dict[str, Any], to: OptimStateKeyType, names: Sequence[str]) -> dict[str, Any]:
    """`given`, keyed by name or by place in the optimizer, keyed by the other. Raises ValueError for keys that are neither."""
    saved = _with_clean_names(given)
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

    found: dict[str, Any] = {"state": {key_of(key): values for key, values in saved["state"].items()}}
    if "param_groups" in saved:
        by = str if to is OptimStateKeyType.PARAM_NAME else None
        groups = saved["param_groups"]
        found["param_groups"] = [{**entry, "params": sorted(map(key_of, entry["params"]), key=by)} for entry in groups]
    return found


__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "StateDictFormat",
    "groups_of",
    "load_optimizer_state",
    "names_of",
    "optimizer_state",
    "rekeyed",
    "scattered",
]
