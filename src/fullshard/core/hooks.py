"""Module hooks, hooks on autograd graphs, and state-dict hooks of a unit. They call the unit, and convert tensors."""

from __future__ import annotations

import copy
import dataclasses
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fullshard import _torch
from fullshard.core.scheduler import ForwardCall, Residency
from fullshard.core.shard_values import like_shard
from fullshard.core.sharded_tensor import restore_subclass
from fullshard.core.unit import BEFORE_STATE_DICT, Unit
from fullshard.core.units import recovered


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor], *, dataclass_fields: bool = True) -> Any:
    """Return `value` with `fn` applied to all tensors in nested lists, tuples, dicts and, with `dataclass_fields`, dataclasses.

    If `fn` changes no tensor, the result is `value` itself, so that outputs keep their identity.
    """
    if isinstance(value, Tensor):
        return fn(value)
    parts: dict[Any, Any]
    if hasattr(value, "_asdict"):  # a named tuple
        parts = value._asdict()
        if isinstance(value, PackedSequence):
            del parts["batch_sizes"]  # which must stay on the CPU
    elif isinstance(value, (list, tuple)):
        mapped = [map_tensors(part, fn, dataclass_fields=dataclass_fields) for part in value]
        return value if all(map(operator.is_, mapped, value)) else type(value)(mapped)
    elif isinstance(value, dict):
        parts = value
    elif dataclass_fields and dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = {name: getattr(value, name) for name in names if hasattr(value, name)}
    else:
        return value
    changed = {key: map_tensors(part, fn, dataclass_fields=dataclass_fields) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    if hasattr(value, "_asdict"):
        return value._replace(**changed)
    made = copy.copy(value)
    for key, part in changed.items():
        if isinstance(value, dict):  # not update(): some mappings forbid it
            made[key] = part
        else:
            object.__setattr__(made, key, part)
    return made


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings, registered pytrees and dataclasses, in order."""
    seen: dict[int, Any] = {}  # by id; keeps the objects alive, so that no new one gets the id
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen:
            seen[id(one)] = one
            children: Sequence[Any] | None = _torch.pytree_children(one)
            if children is None and isinstance(one, (list, tuple)):
                children = one
            elif children is None and isinstance(one, Mapping):
                children = list(one.values())
            elif children is None and dataclasses.is_dataclass(one) and not isinstance(one, type):
                children = [getattr(one, field.name, None) for field in dataclasses.fields(one)]
            pending += reversed(() if children is None else children)


class ForwardHooks:
    """Forward hooks of the modules of one unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __deepcopy__(self, memo: Any) -> ForwardHooks:
        return self  # `remove_hooks_from_copies` removes it from a copy of a module

    @_torch.not_traced
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Unshard the parameters before forward, move the inputs of the outermost unit to the device, and cast inputs."""
        unit = self._unit
        try:
            unit.pre_forward(module)
        except BaseException as failure:
            unit.runtime.note_interrupt(failure)
            raise
        mp = unit.options.mp
        dtype = mp.param_dtype if mp.cast_forward_inputs else None
        device = unit.runtime.communicator.async_device
        if device is not None and _torch.current_graph_task() == -1:  # a recomputation does what the forward did
            unit.moves_inputs = unit.runtime.scheduler.is_outermost(unit.number)
        if device is not None and unit.moves_inputs:  # except tensors in dataclasses; FSDP2 and DDP skip these, too
            args, kwargs = map_tensors(
                (args, kwargs), lambda t: t if t.device == device else t.to(device), dataclass_fields=False
            )
        elif dtype is None:
            return None
        return (args, kwargs) if dtype is None else (cast_floats(args, dtype), kwargs and cast_floats(kwargs, dtype))

    @_torch.not_traced
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard the parameters, even if forward raised. Hook the graph of the output for backward, and cast the output."""
        unit = self._unit
        # torch calls this hook for a forward that raised, too (`always_call=True`), with None as output.
        failed = output is None and unit.has_raised(module)
        try:
            call = unit.post_forward(module, failed=failed)
            if call is not None:
                has_graph = hook_outputs(unit, call, output)
                if not failed:
                    unit.output_has_graph = has_graph
        except BaseException as failure:
            unit.runtime.note_interrupt(failure)
            raise
        dtype = unit.options.mp.output_dtype
        return output if dtype is None else cast_floats(output, dtype)


def hook_outputs(unit: Unit, call: ForwardCall, output: Any) -> bool:
    """Hook the graph of `output`, to notify the runtime when the backward of `call` begins. Return True if there is a graph."""
    hook: BackwardHook | None = None
    for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
        if tensor.is_leaf and tensor.requires_grad:  # a leaf, such as a parameter that forward returns: it has no node to hook
            unit.hook_late_grads()
        for node in _torch.graph_nodes(tensor):
            if node is not None:
                if hook is None:
                    hook = BackwardHook(unit, call)
                hook_node(node, hook)
    return hook is not None


_HOOKS = "fullshard"  # key in the metadata of a node: its hooks and their handles, in the order in which they run


def hook_node(node: Any, hook: Callable[..., None]) -> None:
    """Register `hook` once, as a pre-hook of a node, ahead of those of inner units, which may output the same tensor."""
    hooks = node.metadata.setdefault(_HOOKS, [])
    if not hooks or hooks[0][0] is not hook:
        hooks.insert(0, (hook, None))
        for index, (one, handle) in enumerate(hooks):  # a node runs its hooks in the order of their registration
            if handle is not None:
                handle.remove()
            hooks[index] = one, node.register_prehook(one)


class BackwardHook:
    """Hook on the graph of one call. It runs when the call's backward begins; its deletion means that no backward will come."""

    __slots__ = ("__weakref__", "_call", "_reached", "_task", "_unit")

    def __init__(self, unit: Unit, call: ForwardCall) -> None:
        self._unit, self._call, self._task, self._reached = unit, call, -1, False
        unit.runtime.scheduler.expect_backward(call)

    def __call__(self, *_: object) -> None:
        """Enter the unit's backward, before its first node, once per backward."""
        task = _torch.current_graph_task()
        if task == self._task:
            return
        self._task = task
        try:
            self._unit.pre_backward(self._call)
        except BaseException as failure:
            self._unit.runtime.note_interrupt(failure)
            raise
        self._release()

    def _release(self) -> None:
        """Record, once, that the call's backward has begun or that its graph was freed: it is no longer awaited."""
        if not self._reached:
            self._reached = True
            self._unit.runtime.scheduler.graph_released(self._call)

    __del__ = _release


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with all floating-point tensors cast to `dtype`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


class StateHooks:
    """State-dict hooks of one unit: save sharded parameters, and load both sharded and unsharded tensors."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit: Any = unit  # None after a copy or pickle; the hooks then skip all that needs a unit

    def __reduce__(self) -> Any:
        return StateHooks, ()

    def before_save(self, module: nn.Module, *_: Any) -> None:
        """Register the sharded parameters on the modules before `state_dict()`. On another thread `after_save` acts instead."""
        if self._unit is None or not self._unit.runtime.is_of_this_thread:
            return
        if recovered(self._unit).residency is not Residency.SHARDED:
            self._unit.ensure_sharded(doing="state_dict()")
        for notify in BEFORE_STATE_DICT:
            notify(self._unit)

    def after_save(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put the shards into the state dict that another thread makes: the modules may have unsharded ones for training."""
        if self._unit is None or self._unit.runtime.is_of_this_thread:
            return
        held = _torch.parameters_of(module)
        for parameter in self._unit.parameters:
            for slot in parameter.slots:
                key = prefix + slot.name
                if slot.parameters is held and key in state_dict:
                    keeps = isinstance(state_dict[key], nn.Parameter)
                    state_dict[key] = parameter.sharded if keeps else parameter.sharded.detach()

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Replace unsharded tensors in `state_dict` by shards, for one module that holds parameters of the unit.

        With `assign=True` the loaded tensors keep their dtype.
        """
        restore_subclass()
        if self._unit is None:
            return
        if recovered(self._unit).residency is not Residency.SHARDED:
            self._unit.ensure_sharded(doing="load_state_dict()")
        plain = self._unit.shown_by  # if set, modules have plain Parameters, into which torch copies full tensors
        held = _torch.parameters_of(module)
        assign = bool(metadata.get("assign_to_params_buffers", False))
        for parameter in self._unit.parameters:
            for slot in parameter.slots:
                key = prefix + slot.name
                value = state_dict.get(key) if slot.parameters is held else None
                if not isinstance(value, Tensor) or (plain and slot.content is not parameter.sharded):
                    continue
                loaded = like_shard(parameter, value, dtype=None if assign else parameter.local.dtype)
                if isinstance(value, nn.Parameter) and loaded is not value:
                    loaded = nn.Parameter(loaded, parameter.requires_grad)
                state_dict[key] = loaded

    def after_load(self, module: nn.Module, *_: Any) -> None:
        """Copy assigned parameters into the flat shards."""
        if self._unit is not None and not self._unit.shown_by:
            recovered(self._unit).refresh(assigned=True)


def remove_hooks_from_copies(unit: Unit, copies: dict[int, Any]) -> None:
    """Remove the hooks of the unit from copies of its modules. `copies` maps the id of each module to its copy."""
    for ref, handle in unit.hooks:
        module = ref()
        copied = None if module is None else copies.get(id(module))
        for name, registry in () if copied is None else vars(copied).items():
            if "_hooks" in name:
                registry.pop(handle.id, None)


def install_hooks(unit: Unit) -> None:
    """Install all hooks of a unit. Call it once per unit."""
    forward, state = ForwardHooks(unit), StateHooks(unit)
    holders = {id(slot.parameters) for parameter in unit.parameters for slot in parameter.slots}
    for root in unit.modules:
        handles = [
            root.register_forward_pre_hook(forward.before, prepend=True, with_kwargs=True),
            root.register_forward_hook(forward.after, always_call=True),
            root.register_state_dict_pre_hook(state.before_save),
            root.register_load_state_dict_post_hook(state.after_load),
        ]
        unit.hooks += [(weakref.ref(root), handle) for handle in handles]
        for module in root.modules():
            if id(_torch.parameters_of(module)) in holders:
                unit.hooks.append((weakref.ref(module), module.register_load_state_dict_pre_hook(state.before_load)))
                after = partial(state.after_save)  # torch sets an attribute on it
                unit.hooks.append((weakref.ref(module), module.register_state_dict_post_hook(after)))
