"""Steps of torch's element-wise optimizers on local shards, at the cost of a step on plain tensors."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from fullshard import _torch

ELEMENT_WISE: tuple[type[optim.Optimizer], ...] = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)


def is_element_wise(optimizer: optim.Optimizer) -> bool:
    """Return True if the optimizer updates each element from its own gradient and state and from the options only.

    This is known for classes of torch, and for subclasses that inherit both `_init_group` and `step` from one of them.
    """
    kind = type(optimizer)
    if kind in ELEMENT_WISE:
        return True
    own = inspect.unwrap(kind.step)
    return any(
        _torch.list_alike(kind, known) and own is inspect.unwrap(known.step)
        for known in ELEMENT_WISE
        if issubclass(kind, known)
    )


class LocalStep:
    """Replacement of an optimizer's `_init_group`, which lists the tensors of a step, during the step.

        optimizer.state, param_groups, .grad    DTensors, before, during and after the step
        lists of `_init_group`                  their local tensors, over the same memory

    A differentiable step keeps its DTensors, and so does a step whose gradients and states have other placements than the
    parameters.

    Attributes:
        keeps_dtensors: True if a group of this step kept its DTensors.
    """

    __slots__ = ("_cached", "_momenta", "_optimizer", "keeps_dtensors")

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._cached: dict[int, _CachedLists] = {}  # by id of the group
        self.keeps_dtensors = False
        # For SGD, which keys its momentum buffers by the listed tensors: (parameters, their local tensors, True if a momentum
        # buffer may be new).
        self._momenta: list[tuple[list[Any], list[Any], bool]] = []

    def __call__(self, group: dict[str, Any], *lists: Any) -> Any:
        """Fill `lists` with the local tensors of the parameters, gradients and states of a group, as `_init_group` does."""
        optimizer: Any = self._optimizer()
        known = self._cached.get(id(group))
        listed_anew = False
        if known is None or not known.fill(group, optimizer.state, lists):
            listed_anew = True
            found = _torch.list_tensors(optimizer, group, *lists)
            specs = [*map(_torch.specs_of, lists)]
            if group.get("differentiable") or torch.compiler.is_compiling() or not _have_equal_placements(lists, specs):
                self.keeps_dtensors = True
                return found
            known = self._cached[id(group)] = _CachedLists(group, optimizer.state, lists, specs, found)
            for tensors in lists:
                tensors[:] = _torch.locals_of(tensors)
        if isinstance(optimizer, optim.SGD) and group["momentum"]:
            self._momenta.append((known.parameters, lists[0], listed_anew))
        return known.found

    def end_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Move the momentum buffers of SGD from the local tensors to the parameters at the end of a step."""
        momenta, self._momenta = self._momenta, []
        for parameters, local_parameters, may_be_new in momenta:
            kept = [*map(optimizer.state.pop, local_parameters, repeat(None))]
            if may_be_new:
                _move_momenta(optimizer.state, parameters, kept)


class _CachedLists:
    """Cached tensor lists of a group, valid while only the gradients change.

    Attributes:
        parameters: the parameters with gradients.
        found: the result of `_init_group`.
    """

    __slots__ = ("_bool_options", "_keys", "_members", "_specs", "_without_gradient", "found", "parameters")

    def __init__(
        self, group: dict[str, Any], state: dict[Any, Any], lists: Sequence[list[Any]], specs: list[list[Any]], found: Any
    ) -> None:
        """Cache `lists`, as filled by the optimizer, and the DTensor `specs` of their tensors."""
        self.parameters, self.found, self._bool_options, self._specs = list(lists[0]), found, _bool_options(group), specs
        listed = set(map(id, self.parameters))
        self._members = list(group["params"])
        self._without_gradient = [parameter for parameter in self._members if id(parameter) not in listed]
        self._keys: list[str | None] | None = []  # state key of each list (None: an empty list); None: do not reuse
        states = [state.get(parameter, {}) for parameter in self.parameters]
        for tensors in lists[2:]:
            keys = [key for key in states[0] if states[0][key] is tensors[0]] if tensors else [None]
            if not keys or not all(map(is_, tensors, [held.get(keys[0]) for held in states])):
                self._keys = None
                return
            self._keys.append(keys[0])

    def fill(self, group: dict[str, Any], state: dict[Any, Any], lists: Sequence[list[Any]]) -> bool:
        """Fill `lists` with local tensors and return True. Return False and change nothing if more than gradients changed."""
        members = group["params"]
        if self._keys is None or self._bool_options != _bool_options(group) or len(members) != len(self._members):
            return False
        if not all(map(is_, members, self._members)) or any(other.grad is not None for other in self._without_gradient):
            return False
        grads = [parameter.grad for parameter in self.parameters]
        if not _torch.are_dtensors(grads):
            return False
        states = [*map(state.get, self.parameters)]
        try:
            of_states = [[] if key is None else [*map(itemgetter(key), states)] for key in self._keys]  # type: ignore[arg-type]
        except (KeyError, TypeError):  # a state was removed
            return False
        filled = [self.parameters, grads, *of_states]
        if not all(all(map(is_, _torch.specs_of(tensors), specs)) for tensors, specs in zip(filled, self._specs)):
            return False
        for tensors, listed in zip(lists, filled):
            tensors[:] = _torch.locals_of(listed)
        return True


def _bool_options(group: dict[str, Any]) -> list[Any]:
    """Return the options that decide which tensors a step lists."""
    return [bool(group.get("momentum")), *[value for value in group.values() if type(value) is bool]]


def _move_momenta(state: dict[Any, Any], parameters: Sequence[Tensor], kept: Sequence[dict[str, Any] | None]) -> None:
    """Move SGD's momentum buffers (`kept`) from the states of the local tensors to those of the parameters, as DTensors."""
    for parameter, made in zip(parameters, kept):
        held = state[parameter]
        if made is not None and held.get("momentum_buffer") is None:
            buffer = made["momentum_buffer"]
            if buffer is not None and isinstance(parameter, DTensor):
                buffer = _torch.dtensor(buffer, _torch.spec_of(parameter))  # type: ignore[arg-type]
            held["momentum_buffer"] = buffer


def _have_equal_placements(lists: Sequence[Sequence[Any]], specs: Sequence[Sequence[Any]]) -> bool:
    """Return True if gradients and states have the placements of their parameters, or are plain like them."""
    parameters, of_parameters = lists[0], specs[0]
    for tensors, of_tensors in zip(lists[1:], specs[1:]):
        if tensors and len(tensors) != len(parameters):
            return False
        for parameter, mine, tensor, theirs in zip(parameters, of_parameters, tensors, of_tensors):
            if mine is not None and theirs is not None:
                if theirs.placements != mine.placements or theirs.mesh != mine.mesh:
                    return False
                if _torch.local_tensor(tensor).shape != _torch.local_tensor(parameter).shape:
                    return False
            elif theirs is not None or (mine is not None and isinstance(tensor, Tensor) and tensor.ndim > 0):
                return False  # 0-dim states such as step counts are always plain
    return not any(placement.is_partial() for spec in of_parameters if spec is not None for placement in spec.placements)


__all__ = ["ELEMENT_WISE", "LocalStep", "is_element_wise"]
