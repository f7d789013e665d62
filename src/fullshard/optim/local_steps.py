"""Steps of torch's element-wise optimizers on local shards, at the cost of a step on plain tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.optim.pieces import is_same

ELEMENT_WISE: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


def is_element_wise(optimizer: optim.Optimizer) -> bool:
    """Return True if the optimizer updates each element from its own gradient and state and from the options only.

    True for torch's classes in `ELEMENT_WISE`, and for subclasses that step as these. Code of other optimizers is not analyzed.
    """
    return any(_torch.steps_as(optimizer, cls) for cls in ELEMENT_WISE)


class LocalStep:
    """Replacement of an optimizer's `_init_group`, the method that collects the tensors of a step in lists.

    `step` computes with the tensors in these lists only. So local tensors in the lists are enough to avoid DTensor's dispatch:

        optimizer.state, param_groups, .grad    DTensors, before, during and after the step
        lists of `_init_group`                  their local tensors, over the same memory

    The lists keep DTensors if the step is differentiable or compiled, or if gradients or states have other placements than
    their parameters.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._cached: dict[int, _CachedLists] = {}  # by id of the group
        # For SGD, which stores its momentum buffers under the listed tensors, not under the parameters. Per group:
        # (parameters, their local tensors, True if a momentum buffer may be new).
        self._momenta: list[tuple[list[Any], list[Any], bool]] = []

    def __call__(self, group: dict[str, Any], *lists: Any) -> Any:
        """Fill `lists` with the local tensors of the parameters, gradients and states of a group, as `_init_group` does."""
        optimizer: Any = self._optimizer()
        if _torch.is_tracing():
            return _torch.list_tensors(optimizer, group, *lists)
        cached = self._cached.get(id(group))
        listed_anew = False
        if cached is None or not cached.fill(group, optimizer.state, lists):
            listed_anew = True
            result = _torch.list_tensors(optimizer, group, *lists)
            specs = [*map(_torch.specs_of, lists)]
            if group.get("differentiable") or not _have_equal_placements(lists, specs):
                return result
            cached = self._cached[id(group)] = _CachedLists(group, optimizer.state, lists, specs, result)
            for tensors in lists:
                tensors[:] = _torch.locals_of(tensors)
        if isinstance(optimizer, optim.SGD) and group["momentum"]:
            self._momenta.append((cached.parameters, lists[0], listed_anew))
        return cached.result

    def begin_step(self, optimizer: optim.Optimizer) -> None:
        """Finish the step before, if it raised: its momentum buffers are those that it computed, as in torch."""
        self.end_step(optimizer, (), {})

    def end_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Move the momentum buffers of SGD from the local tensors to the parameters at the end of a step."""
        momenta, self._momenta = self._momenta, []
        for parameters, local_parameters, may_be_new in momenta:
            # Always remove SGD's entries for the local tensors: the local tensors of the next step are other objects.
            local_states = [*map(optimizer.state.pop, local_parameters, repeat(None))]
            for parameter, local_state in zip(parameters, local_states) if may_be_new else ():
                if local_state is None or optimizer.state[parameter].get("momentum_buffer") is not None:
                    continue
                buffer = local_state["momentum_buffer"]
                if buffer is not None and isinstance(parameter, DTensor):
                    buffer = _torch.dtensor(buffer, _torch.spec_of(parameter))  # type: ignore[arg-type]
                optimizer.state[parameter]["momentum_buffer"] = buffer


class _CachedLists:
    """Cached tensor lists of a group, valid while only the gradients change."""

    def __init__(
        self, group: dict[str, Any], state: dict[Any, Any], lists: Sequence[list[Any]], specs: list[list[Any]], result: Any
    ) -> None:
        """Cache `lists`, as filled by the optimizer with this `result`, and the DTensor `specs` of their tensors."""
        self.parameters, self.result = list(lists[0]), result  # the parameters with gradients
        self._bool_options, self._specs = _bool_options(group), specs
        listed = set(map(id, self.parameters))
        self._members = list(group["params"])
        self._without_gradient = [parameter for parameter in self._members if id(parameter) not in listed]
        # The key in the optimizer's state from which each list after parameters and gradients is filled; None for a list that
        # stays empty. No list of keys if these lists cannot be filled again: some listed tensor is not in the state, or some
        # gradient is plain, and may be sparse the next time.
        self._keys: list[str | None] | None = None
        if any(spec is None for spec in specs[1]):
            return
        found: list[str | None] = []
        states = [state.get(parameter, {}) for parameter in self.parameters]
        for tensors in lists[2:]:
            keys = [key for key in states[0] if states[0][key] is tensors[0]] if tensors else [None]
            if not keys or not all(map(is_, tensors, [values.get(keys[0]) for values in states])):
                return
            found.append(keys[0])
        self._keys = found

    def fill(self, group: dict[str, Any], state: dict[Any, Any], lists: Sequence[list[Any]]) -> bool:
        """Fill `lists` with local tensors and return True. Return False and change nothing if more than gradients changed."""
        # This runs in every step of every group, so loops over tensors are calls of `map`.
        members = group["params"]
        if self._keys is None or self._bool_options != _bool_options(group) or not is_same(members, self._members):
            return False
        if any(other.grad is not None for other in self._without_gradient):
            return False
        grads = [parameter.grad for parameter in self.parameters]
        states = [*map(state.get, self.parameters)]
        try:
            state_lists = [[] if key is None else [*map(itemgetter(key), states)] for key in self._keys]  # type: ignore[arg-type]
        except (KeyError, TypeError):  # a state was removed
            return False
        filled = [self.parameters, grads, *state_lists]
        if not all(all(map(is_, _torch.specs_of(tensors), specs)) for tensors, specs in zip(filled, self._specs)):
            return False
        for tensors, listed in zip(lists, filled):
            tensors[:] = _torch.locals_of(listed)
        return True


def _bool_options(group: dict[str, Any]) -> list[Any]:
    """Return the options that can change which tensors are listed: flags such as `amsgrad`, and True if momentum is used."""
    return [bool(group.get("momentum")), *[value for value in group.values() if type(value) is bool]]


def _have_equal_placements(lists: Sequence[Sequence[Any]], specs: Sequence[Sequence[Any]]) -> bool:
    """Return True if gradients and states have the placements of their parameters, and are plain if their parameters are."""
    parameters, parameter_specs = lists[0], specs[0]
    for tensors, tensor_specs in zip(lists[1:], specs[1:]):
        if tensors and len(tensors) != len(parameters):
            return False
        for parameter, parameter_spec, tensor, spec in zip(parameters, parameter_specs, tensors, tensor_specs):
            if parameter_spec is not None and spec is not None:
                if spec.placements != parameter_spec.placements or spec.mesh != parameter_spec.mesh:
                    return False
                if _torch.local_tensor(tensor).shape != _torch.local_tensor(parameter).shape:
                    return False
            elif spec is not None or (parameter_spec is not None and isinstance(tensor, Tensor) and tensor.ndim > 0):
                return False  # one is a DTensor, the other is plain; 0-dim states such as step counts are always plain
    return not any(placement.is_partial() for spec in parameter_specs if spec is not None for placement in spec.placements)
