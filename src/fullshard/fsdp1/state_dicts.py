"""Save and load optimizers in FSDP1's state dict types: full tensors, sharded tensors (DTensors), and this rank's rows."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import Agreement, ShardedParameter, clean_name, full_tensor, listed, logical_parameters, shard_of
from fullshard.optim.optimizer_hooks import rebind

T = TypeVar("T")
ComparedValues = Mapping[str, Mapping[str, str]]  # parameter name -> property -> text that must be equal on all ranks


def agree(
    ranks: Agreement,
    call: Callable[[], tuple[T, ComparedValues]],  # returns its result, and values that must be equal on all ranks
    *,
    subject: str,  # begins the error text about differing values: "The optimizers"
    advice: str,  # the last sentence of that text
) -> T:
    """Return the result of `call`, if no rank raised and the compared values are equal on all ranks (collective).

    The ranks exchange a digest. They exchange the values themselves only if the digests differ.
    """
    error: Exception | None = None
    values: ComparedValues = {}
    try:
        result, values = call()
    except Exception as raised:
        error = raised
    text = "" if error is None else f"{type(error).__name__}: {error}"
    mine = text, {name: dict(own) for name, own in values.items()}
    equal = ranks.all_equal(json.dumps(mine, sort_keys=True).encode())
    gathered = {} if equal else ranks.gather_bytes(json.dumps(mine).encode())
    if error is not None:
        raise error
    if not equal:
        raise ValueError(_difference({rank: json.loads(content) for rank, content in gathered.items()}, subject, advice))
    return result


def _difference(found: Mapping[int, tuple[str, ComparedValues]], subject: str, advice: str) -> str:
    """Describe the error of the first rank that raised, or else the first name whose values differ, with these values."""
    for rank, (text, _) in found.items():
        if text:
            return f"All ranks stop because rank {rank} raised {text}"
    compared = {rank: values for rank, (_, values) in found.items()}
    names = dict.fromkeys(name for values in compared.values() for name in values)
    first = next(iter(compared.values()))
    name = next(name for name in names if any(values.get(name) != first.get(name) for values in compared.values()))
    of_ranks = {rank: values.get(name) for rank, values in compared.items()}
    keys = dict.fromkeys(key for own in of_ranks.values() for key in own or ())
    differing = [key for key in keys if len({(own or {}).get(key) for own in of_ranks.values()}) > 1]
    ranks_of: dict[str, list[int]] = {}
    for rank, own in of_ranks.items():
        words = ["nothing"] if own is None else [f"{key} {own[key]}" if key in own else f"no {key}" for key in differing]
        ranks_of.setdefault(", ".join(words), []).append(rank)
    ranks_text = "; ".join(f"{listed(ranks)}: {words}" for words, ranks in ranks_of.items())
    return f"{subject} of the ranks differ in '{name}'. {ranks_text}. {advice}"


@dataclass(frozen=True, slots=True)
class StateDictFormat:
    """The type of the tensors in a state dict, their device, and the ranks that keep them."""

    kind: StateDictType
    to_cpu: bool = False  # copy the values to host memory
    rank0_only: bool = False  # only the first rank keeps values; for full tensors only
    rows: bool = False  # this rank's rows of DTensors, as plain tensors that share memory with the model

    def convert(self, value: Any, *, keep: bool = True) -> Any:
        """Convert `value` to this format. DTensors and full tensors are copied: training continues to write to their memory.

        The conversion of a DTensor to a full tensor is collective, also for ranks that do not keep the result.
        """
        if not isinstance(value, Tensor):
            return value
        if self.kind is StateDictType.FULL_STATE_DICT and isinstance(value, DTensor):
            value = full_tensor(value)
        if not keep:
            return None
        local = _torch.local_part(value)
        if self.rows:
            return local.cpu() if self.to_cpu else local
        copied = local.detach().to("cpu" if self.to_cpu else local.device, copy=True)
        return _torch.dtensor(copied, _torch.spec_of(value)) if isinstance(value, DTensor) else copied


# --- optimizers --------------------------------------------------------------------------------------------------------


def logical_of(parameter: Tensor) -> ShardedParameter | None:
    """Return the sharded parameter that a DTensor belongs to; None for a parameter that is not sharded."""
    return next(iter(logical_parameters([parameter])), None)


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the clean name of each parameter, by its id."""
    return {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, given: Iterable[Any] | None = None
) -> list[list[Tensor]]:
    """Return the parameters of an optimizer as a list of groups.

    Without an optimizer, return the parameters or groups in `given`; without these, all parameters of the model.
    """
    if optimizer is not None:
        rebind(optimizer)
        return [list(group["params"]) for group in optimizer.param_groups]
    if given is None:
        return [list(model.parameters())]
    listed = list(given)
    if listed and isinstance(listed[0], dict):
        return [list(group["params"]) for group in listed]
    return [listed]


def names_in_groups(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[list[str]]:
    """Return the names of the parameters in groups of an optimizer. Raise ValueError for one that is not in the model."""
    known = names_of(model)
    for parameter in (parameter for group in groups for parameter in group):
        if id(parameter) not in known:
            raise ValueError(
                f"The optimizer has a parameter of shape {tuple(parameter.shape)} that is not in {type(model).__name__}. Pass "
                "the model that the optimizer was built for, outside of forward, backward and summon_full_params()."
            )
    return [[known[id(parameter)] for parameter in group] for group in groups]


def _mapped(saved: dict[str, Any], key_of: Callable[[Any], Any]) -> dict[str, Any]:
    """Return an optimizer state dict with `key_of(key)` in place of each key of a parameter."""
    found: dict[str, Any] = {"state": {key_of(key): values for key, values in saved["state"].items()}}
    if "param_groups" in saved:
        groups = saved["param_groups"]
        found["param_groups"] = [{**entry, "params": [key_of(key) for key in entry["params"]]} for entry in groups]
    return found


def _in_order(values: Mapping[Any, Any], convert: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Return `convert(key, value)` for each key. All ranks convert in one order, whatever the order of their keys."""
    found = {key: convert(key, values[key]) for key in sorted(values, key=str)}
    return {key: found[key] for key in values}


def _compared(saved: dict[str, Any], state_format: StateDictFormat) -> ComparedValues:
    """Return the values that must be equal on all ranks: parameters, shapes of their states, and numeric settings."""
    found: dict[str, dict[str, str]] = {"state_dict_type": {"it is": state_format.kind.name}}
    for entry in saved.get("param_groups", ()):
        own = {key: text for key, value in entry.items() if (text := _setting_text(value)) is not None}
        for name in entry["params"]:
            found.setdefault(name, {}).update(own)
    for name, values in saved["state"].items():
        kinds = found.setdefault(str(name), {})
        for key, value in values.items() if isinstance(values, dict) else [(None, values)]:
            kinds[f"state '{key}'"] = _kind(value)
    return found


def _setting_text(value: Any) -> str | None:
    """Return a setting of numbers and flags as text, a tensor by its exact value on any device; None for other settings."""
    if isinstance(value, (tuple, list)):
        texts = [_setting_text(item) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if isinstance(value, Tensor):
        return None if value.ndim else repr(value.item())
    return str(value) if value is None or isinstance(value, (bool, int, float)) else None


def _kind(value: Any) -> str:
    """Describe a state value by the properties that must be equal on all ranks."""
    if not isinstance(value, Tensor):
        return f"({type(value).__name__})"
    shard = f", {value.placements}" if isinstance(value, DTensor) else ""
    return f"(shape {tuple(value.shape)}, {value.dtype}{shard})"


def _collected(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any] | None, state_format: StateDictFormat
) -> tuple[dict[str, Any], ComparedValues]:
    """Return the state dict of an optimizer by names of parameters, in the order of the model; and what must be equal."""
    groups = groups_of(model, optimizer)
    names = names_in_groups(model, groups)
    parameters = {name: parameter for own, group in zip(names, groups) for name, parameter in zip(own, group)}
    source = optimizer.state_dict() if given is None else given
    state = {_name_of(key, list(parameters)): values for key, values in source["state"].items()}
    order = {name: place for place, name in enumerate(names_of(model).values())}
    found: dict[str, Any] = {
        "state": {key: state[key] for key in sorted(state, key=lambda key: (order.get(key, len(order)), str(key)))}
    }
    for name, parameter in parameters.items():
        for key, value in state.get(name, {}).items():
            _check_not_local_rows(value, parameter, name, key, state_format)
    if "param_groups" in source:
        if len(source["param_groups"]) != len(names):
            raise ValueError(
                f"Expected {len(names)} parameter groups in the optimizer state dict, as in the optimizer, got "
                f"{len(source['param_groups'])}. Pass the state_dict() of that optimizer."
            )
        found["param_groups"] = [{**saved, "params": list(own)} for saved, own in zip(source["param_groups"], names)]
    return found, _compared(found, state_format)


def _name_of(key: Any, flat: Sequence[str]) -> Any:
    """Return the clean name of a parameter, from its position in the optimizer or its name with wrapper prefixes."""
    if isinstance(key, int):
        if not 0 <= key < len(flat):
            raise ValueError(
                f"The optimizer state dict has a state for parameter {key}, but the optimizer has {len(flat)} parameters. Pass "
                "the state_dict() of that optimizer."
            )
        return flat[key]
    return clean_name(key) if isinstance(key, str) else key


def _check_not_local_rows(value: Any, parameter: Tensor, name: str, key: Any, state_format: StateDictFormat) -> None:
    """Raise ValueError for a plain tensor with this rank's rows, unless the type is LOCAL_STATE_DICT.

    Saved as FULL_STATE_DICT, such a tensor would be taken for the full state.
    """
    logical = logical_of(parameter)
    if logical is None or state_format.kind is StateDictType.LOCAL_STATE_DICT:
        return
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return
    if value.ndim and value.shape == logical.local.shape != logical.shape:
        raise ValueError(
            f"The optimizer keeps '{key}' of '{name}' as a plain tensor of shape {tuple(value.shape)}, the rows of this rank. "
            "Only LOCAL_STATE_DICT can save it. For other types the optimizer must keep DTensors, as returned by "
            "torch.zeros_like(parameter)."
        )


def optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_format: StateDictFormat,
    ranks: Agreement,
    *,
    given: dict[str, Any] | None = None,  # the optimizer's own state dict, if the caller already has it
) -> dict[str, Any]:
    """Return the optimizer state keyed by names, in `state_format` (collective)."""
    found = agree(
        ranks,
        lambda: _collected(model, optimizer, given, state_format),
        subject="The optimizers",
        advice="Use equal parameters and settings, step all optimizers, and set one state_dict_type on all ranks.",
    )
    keep = ranks.index == 0 or not state_format.rank0_only

    def convert(_: Any, value: Any) -> Any:
        return state_format.convert(value, keep=keep)

    for name, values in found["state"].items():  # a value of the optimizer itself, not of a parameter, may be no dict
        found["state"][name] = _in_order(values, convert) if isinstance(values, dict) else convert(name, values)
    return found if keep else {}


def load_optimizer_state(
    model: nn.Module,
    saved: dict[str, Any],
    groups: Sequence[Sequence[Tensor]],
    ranks: Agreement,
    *,
    local: bool = False,  # plain tensors are this rank's rows already
    by_name: bool = False,  # key the result by names instead of positions in the optimizer
) -> dict[str, Any]:
    """Convert a result of `optimizer_state`, of any type, to a state dict for `optimizer.load_state_dict` (collective).

    Full tensors and ShardedTensors are sharded to this rank's rows. DTensors must be sharded like the parameters.
    """
    parameters, found = agree(
        ranks,
        lambda: _prepared(model, saved, groups, local=local),
        subject="The saved optimizers",
        advice="Load one checkpoint on all ranks.",
    )

    def convert(name: str, _: Any, value: Any) -> Any:
        if not isinstance(value, _torch.ShardedTensor):
            return value
        logical, whole = logical_of(parameters[name]), _torch.whole_of(value, ranks.device)
        return whole if logical is None else shard_of(logical, whole, dtype=whole.dtype)

    for name, values in found["state"].items():
        if name in parameters:
            found["state"][name] = _in_order(values, partial(convert, name))
    places = {name: place for place, name in enumerate(parameters)}
    return found if by_name else _mapped(found, lambda name: places.get(name, name))


def _prepared(
    model: nn.Module, given: dict[str, Any], groups: Sequence[Sequence[Tensor]], *, local: bool
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]], ComparedValues]:
    """Return the parameters of the optimizer, in its order, and its state dict by names; ShardedTensors are not sharded yet."""
    saved = _with_clean_names(given)
    names = names_in_groups(model, groups)
    parameters = {name: parameter for group, own in zip(groups, names) for parameter, name in zip(group, own)}
    unknown = [key for key, values in saved["state"].items() if key not in parameters and isinstance(values, dict)]
    if unknown:
        raise ValueError(
            f"The saved optimizer has states for {unknown[:3]}, which the optimizer to load does not train. Use the same "
            f"model and parameters, among them {list(parameters)[:3]}."
        )
    state: dict[Any, Any] = {}
    communicated: dict[str, dict[str, str]] = {}  # converting ShardedTensors is collective, so all ranks must have the same
    for name in names_of(model).values():
        values = saved["state"].get(name)
        if values is not None:
            # Errors must name the same key on all ranks.
            state[name] = _in_order(values, partial(_fit, parameters[name], name, local=local))
            kinds = {key: _kind(value) for key, value in values.items() if isinstance(value, _torch.ShardedTensor)}
            if kinds:
                communicated[name] = {f"state '{key}'": kind for key, kind in kinds.items()}
    # Values of the optimizer itself, not of a parameter, are passed on unchanged.
    state.update({key: values for key, values in saved["state"].items() if key not in parameters})
    found: dict[str, Any] = {"state": state}
    if "param_groups" not in saved:
        return (parameters, found), communicated
    settings_of = {name: _settings(entry) for entry in saved["param_groups"] for name in entry["params"]}
    empty = [entry for entry in saved["param_groups"] if not entry["params"]]  # a group without parameters has settings, too
    found["param_groups"] = []
    for own in names:
        missing = [name for name in own if name not in settings_of]
        if missing:
            raise ValueError(
                f"The saved optimizer has no parameters {missing[:3]}, which the optimizer to load trains. Use the same model "
                "and parameters."
            )
        kept = settings_of[own[0]] if own else _settings(empty.pop(0) if empty else {})
        other = next((name for name in own if settings_of[name] != kept), None)
        if other is not None:
            raise ValueError(
                f"'{own[0]}' and '{other}' are in groups with different settings in the saved optimizer, but in one group of "
                "the optimizer to load. Build it with the same groups."
            )
        found["param_groups"].append({**kept, "params": list(own)})
    return (parameters, found), communicated


def _settings(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry of `param_groups`."""
    return {key: value for key, value in entry.items() if key not in ("params", "param_names")}


def _with_clean_names(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved optimizer with clean names. Raises ValueError if `saved` is not an optimizer state dict."""
    if not isinstance(saved, dict) or "state" not in saved:
        keys = list(saved)[:5] if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"Expected an optimizer state dict with 'state' and 'param_groups', got {keys}.")
    for entry in saved.get("param_groups", ()):
        if "params" not in entry:
            raise ValueError(
                f"Expected 'params' in each of the param_groups of an optimizer state dict, got {list(entry)[:5]}."
            )
    return _mapped(saved, lambda key: clean_name(key) if isinstance(key, str) else key)


_FLAT_PARAMETER_HINT = " It is the state of a FlatParameter of FSDP1, which cannot be loaded. Save FULL_STATE_DICT with FSDP1."
_SCALAR_STATES = ("step", "mu_product", "mu", "eta")  # states with one number per parameter, of any shape


def _fit(parameter: Tensor, name: str, key: Any, value: Any, *, local: bool) -> Any:
    """Return one value of a parameter's state, sharded like the parameter. ShardedTensors are only checked."""
    logical = logical_of(parameter)
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, _torch.ShardedTensor):
        if value.size() != parameter.shape:
            raise ValueError(
                f"Expected shape {tuple(parameter.shape)} for '{key}' of '{name}' in the saved optimizer, got "
                f"{tuple(value.size())}.{_FLAT_PARAMETER_HINT if len(value.size()) == 1 else ''}"
            )
        return value
    if logical is None or (value.ndim == 0 and key in _SCALAR_STATES):
        return value.clone()
    device = logical.local.device
    if isinstance(value, DTensor):
        rows = logical.sharding.rows_of(value, name=logical.name, what="the saved optimizer state")
        return logical.dtensor_like_shard(rows.to(device, copy=True))
    wanted = logical.local.shape if local else logical.shape
    if value.shape == wanted and local:
        return logical.dtensor_like_shard(value.to(device, copy=True))
    if value.shape == wanted:
        return shard_of(logical, value, dtype=value.dtype)
    if value.ndim == len(wanted):
        hint = " These are not the rows of this rank: it was saved on another number of ranks, or as another type."
        raise ValueError(
            f"Expected shape {tuple(wanted)} for '{key}' of '{name}' in the saved optimizer, got {tuple(value.shape)}."
            f"{hint if local else ''}"
        )
    return value.clone()


def scatter_state(
    model: nn.Module, saved: dict[str, Any] | None, groups: Sequence[Sequence[Tensor]], ranks: Agreement
) -> dict[str, Any]:
    """Scatter a state that only the first rank has (collective).

    Tensors are broadcast one at a time, and each rank keeps its shard, so only one full tensor is in memory.

    Raises ValueError on every rank if the first rank has no state, or if its state is not an optimizer state dict.
    """
    first, known, device = ranks.index == 0, names_of(model), ranks.device
    parameters = {known[id(p)]: logical_of(p) for own in groups for p in own if id(p) in known}
    found, tensors = ranks.run(lambda: _without_tensors(saved) if first else ({}, {}))
    layout = {place: (tensor.shape, tensor.dtype) for place, tensor in tensors.items()}
    found, layout = pickle.loads(ranks.first_rank_bytes(pickle.dumps((found, layout))))
    for (name, key), (shape, dtype) in layout.items():
        whole = tensors[name, key].to(device) if first else torch.empty(shape, dtype=dtype, device=device)
        ranks.broadcast([whole])
        logical = parameters.get(name)
        fits = logical is not None and whole.shape == logical.shape
        found["state"][name][key] = shard_of(logical, whole, dtype=dtype) if fits else whole  # type: ignore[arg-type]
    return found


def _without_tensors(saved: dict[str, Any] | None) -> tuple[dict[str, Any], dict[tuple[Any, Any], Tensor]]:
    """Return `saved` with clean names and with None for each tensor, and the tensors by (name, key). Scalars stay in it."""
    if not saved:
        raise ValueError(
            "The first rank has no optimizer state to scatter. Pass the full state there, and None on the other ranks."
        )
    found = _with_clean_names(saved)
    tensors: dict[tuple[Any, Any], Tensor] = {}
    for name, values in found["state"].items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, (DTensor, _torch.ShardedTensor)):
                raise ValueError(
                    f"The saved optimizer has '{key}' of '{name}' as a {type(value).__name__}, and the first rank has only a "
                    "shard of it. Pass the full state, or load it on all ranks with rank0_only=False."
                )
            if isinstance(value, Tensor) and value.ndim:
                tensors[name, key] = value
        if isinstance(values, dict):
            found["state"][name] = {key: None if (name, key) in tensors else value for key, value in values.items()}
    return found, tensors


def rekey(given: dict[str, Any], to: OptimStateKeyType, names: Sequence[str]) -> dict[str, Any]:
    """Convert the keys of `given` to names or to positions in the optimizer. Raises ValueError for keys that are neither."""
    saved = _with_clean_names(given)
    by_name = to is OptimStateKeyType.PARAM_NAME
    other: dict[Any, Any] = dict(enumerate(names)) if by_name else {name: place for place, name in enumerate(names)}
    table = {**{key: key for key in other.values()}, **other}

    def key_of(key: Any) -> Any:
        if key not in table:
            raise ValueError(
                f"The optimizer state has the key {key!r}, which is neither the name nor the position of a parameter of this "
                "model or optimizer."
            )
        return table[key]

    found = _mapped(saved, key_of)
    for entry in found.get("param_groups", ()):
        entry["params"].sort(key=str if by_name else None)
    return found
