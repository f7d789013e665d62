"""Translates torch's callbacks into runtime events: module hooks, graph hooks, state-dict hooks. No policy lives here."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.params.shard_values import shard_of
from fullshard.params.sharded_tensor import wake
from fullshard.runtime import lint
from fullshard.runtime.backward import BackwardHook, NodeHooks
from fullshard.runtime.interrupts import marks_interrupts
from fullshard.runtime.late_grads import check_hidden
from fullshard.runtime.replicas import share_buffers
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit
from fullshard.runtime.unwritten import warn_of_unwritten
from fullshard.schedule.records import ForwardCall
from fullshard.schedule.residency import Residency

_DEPTH = 16  # how deep nested outputs are searched
_OPAQUE = (str, bytes, int, float, type, nn.Module, FunctionType, MethodType)


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor], depth: int = _DEPTH) -> Any:
    """`value` with `fn` on the tensors in nested lists, tuples, dicts and dataclasses; the same object if nothing changed."""
    if isinstance(value, Tensor):
        return fn(value)
    if depth == 0 or value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, fn, depth - 1) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, fn, depth - 1) for key, item in value.items()}
        if all(changed[key] is value[key] for key in value):
            return value
        result: Any = copy.copy(value)
        for key, item in changed.items():  # not update(): some mappings forbid it
            result[key] = item
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
        changed = {name: map_tensors(item, fn, depth - 1) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        made: Any = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(made, name, item)
        return made
    return value


def tensors_in(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in `value`: nested containers, mappings, dataclasses, and attributes of plain objects, each object once."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, _OPAQUE):
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    else:
        children = list(getattr(value, "__dict__", {}).values())
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            children += [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
    for child in children:
        yield from tensors_in(child, depth - 1, seen)


class ForwardHooks:
    """The pair of forward hooks of one module of a unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit, runtime = unit, runtime_of(unit)
        self._steps, self.recovery = runtime.steps, runtime.recovery
        mp = unit.options.mp
        self._input_dtype, self._output_dtype = mp.input_dtype, mp.output_dtype

    @marks_interrupts
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Before a forward: have the parameters full, and the inputs in their dtype."""
        if self._unit.checks.lint:
            lint.examine(self._unit, module)
        self._steps.enter_forward(self._unit, module)
        if self._input_dtype is None:
            return None
        return cast_floats(args, self._input_dtype), cast_floats(kwargs, self._input_dtype)

    @marks_interrupts
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After a forward, also one that raised: free the parameters, and have the graph tell when its backward begins."""
        unit = self._unit
        output = self._own(module, output)
        failed = output is None and sys.exc_info()[1] is not None
        call = self._steps.leave_forward(unit, module, failed=failed)
        if call is not None:
            has_graph = hook_outputs(unit, call, output)
            if not failed:
                unit.progress.output_has_graph = has_graph
                if not has_graph:
                    check_hidden(unit, output)
        return output if self._output_dtype is None else cast_floats(output, self._output_dtype)

    def share(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Share the buffers, behind a forward that did not raise."""
        share_buffers(self._unit, module, self._unit.runtime.communicator)

    def _own(self, module: nn.Module, output: Any) -> Any:
        """A unit that returns one of its parameters, or a view of it, returns a copy: the parameter itself is about to go."""
        unit = self._unit

        def copied(tensor: Tensor) -> Tensor:
            return tensor.clone() if unit.owns_memory_of(tensor) else tensor

        output = map_tensors(output, copied)
        if not isinstance(output, Tensor) and any(unit.owns_memory_of(tensor) for tensor in tensors_in(output)):
            raise StateError(
                f"unit '{unit.name}' returns a {type(output).__name__} that holds one of its gathered parameters, whose memory "
                "goes when its forward ends: return a clone() of it"
            )
        return output


def hook_outputs(unit: Unit, call: ForwardCall, output: Any) -> bool:
    """Have the graph of `output` tell the runtime when the backward of `call` begins; whether there is a graph."""
    hook: BackwardHook | None = None
    for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            hook = hook or BackwardHook(unit, call)
            NodeHooks.on(tensor.grad_fn).add(hook)
            # Writing to a view in place gives it a new graph node, but keeps that of the tensor it views.
            base = _torch.view_base(tensor)
            if base is not None and base.grad_fn is not None:
                NodeHooks.on(base.grad_fn).add(hook)
    return hook is not None


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating-point tensors in it in `dtype`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


class StateHooks:
    """State dicts always show the sharded parameters, and full tensors can be loaded into them.

    A copy or pickle of a module takes hooks along that know no unit.
    """

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit: Any = unit
        self._loads = False  # whether the state dict that is loaded has something for the unit

    def __reduce__(self) -> Any:
        return StateHooks, ()

    def __deepcopy__(self, memo: Any) -> StateHooks:
        return StateHooks()

    def before_save(self, module: nn.Module, *_: Any) -> None:
        """Have the slots show the sharded parameters."""
        if self._unit is None:
            return
        if self._unit.residency is not Residency.SHARDED:
            runtime_of(self._unit).requests.ensure_sharded(self._unit, doing="state_dict()")
        if self._unit.checks.uninitialized is not None:
            warn_of_unwritten(self._unit)

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Runs for each module that holds parameters of the unit. With `assign=True` the dtype of what is loaded stays."""
        wake()
        if self._unit is None:
            return
        if self._unit.residency is not Residency.SHARDED:
            runtime_of(self._unit).requests.ensure_sharded(self._unit, doing="load_state_dict()")
        held = _torch.parameters_of(module)
        assign = bool(metadata.get("assign_to_params_buffers", False))
        for parameter in self._unit.parameters:
            for installation in parameter.slots:
                if installation.parameters is held:
                    key = prefix + installation.name
                    value = state_dict.get(key)
                    self._loads = self._loads or value is not None
                    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                        loaded = shard_of(parameter, value.detach(), dtype=value.dtype if assign else parameter.local.dtype)
                        state_dict[key] = (
                            nn.Parameter(loaded, parameter.requires_grad) if isinstance(value, nn.Parameter) else loaded
                        )

    def after_load(self, module: nn.Module, *_: Any) -> None:
        """Take over what was loaded, and enter it in the log once per state dict that had something for the unit."""
        if self._unit is not None:
            runtime_of(self._unit).requests.refresh(self._unit)
            if self._loads:
                self._loads = False
                self._unit.log_write("load_state_dict()")


_REGISTRIES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def remove(unit: Unit) -> None:
    """Remove every hook that `install` installed."""
    for _, handle in unit.place.take_hooks():
        handle.remove()


def purge(unit: Unit, copies: dict[int, Any]) -> None:
    """Remove from copies of modules (by the id of what they are copies of) the copies of the unit's hooks."""
    for ref, handle in unit.place.hooks:
        module = ref()
        copied = None if module is None else copies.get(id(module))
        for name in _REGISTRIES if copied is not None else ():
            getattr(copied, name).pop(handle.id, None)


def install(unit: Unit) -> None:
    """Install every hook of a unit, once."""
    forward, state = ForwardHooks(unit), StateHooks(unit)
    before, after = _torch.disable_tracing(forward.before), _torch.disable_tracing(forward.after)
    share = _torch.disable_tracing(forward.share) if unit.options.buffers != "local" else None
    holders = {id(installation.parameters) for parameter in unit.parameters for installation in parameter.slots}
    for root in unit.modules:
        unit.place.add_hook(root, root.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        unit.place.add_hook(root, root.register_forward_hook(after, always_call=True))
        if share is not None:
            unit.place.add_hook(root, root.register_forward_hook(share))
        unit.place.add_hook(root, root.register_state_dict_pre_hook(state.before_save))
        unit.place.add_hook(root, root.register_load_state_dict_post_hook(state.after_load))
        for module in root.modules():
            if id(_torch.parameters_of(module)) in holders:
                unit.place.add_hook(module, module.register_load_state_dict_pre_hook(state.before_load))


__all__ = [
    "ForwardHooks",
    "StateHooks",
    "cast_floats",
    "hook_outputs",
    "install",
    "map_tensors",
    "purge",
    "remove",
    "tensors_in",
]
