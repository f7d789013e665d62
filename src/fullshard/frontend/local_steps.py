"""Element-wise optimizers of torch compute with local shards: what they cost is what they cost on plain tensors."""

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
    """Whether an element of a parameter depends on nothing but its gradient, its state and the options of the optimizer.

    Known of classes of torch, and of classes that change neither how they collect tensors nor how they step.
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
    """Stands in for an optimizer's `_init_group`, by which it lists the tensors of a step, for the length of that.

        optimizer.state, param_groups, .grad    DTensors, before, during and after the step
        lists of `_init_group`                  their local tensors: the same memory, operations of plain tensors

    A step that must be differentiable, or whose tensors are not all cut like their parameters, keeps its DTensors.

    keeps_dtensors: whether a group did in this step.
    """

    __slots__ = ("_known", "_momenta", "_optimizer", "keeps_dtensors")

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._known: dict[int, _Listing] = {}  # of each group, by its id
        self.keeps_dtensors = False
        # Of SGD: parameters, what stood for them, and whether some of them had no buffer of momentum yet.
        self._momenta: list[tuple[list[Any], list[Any], bool]] = []

    def __call__(self, group: dict[str, Any], *lists: Any) -> Any:
        """As the optimizer's own method, which fills `lists`: parameters, their gradients, their states."""
        optimizer: Any = self._optimizer()
        known = self._known.get(id(group))
        listed_anew = False
        if known is None or not known.fill(group, optimizer.state, lists):
            listed_anew = True
            found = _torch.list_tensors(optimizer, group, *lists)
            specs = [*map(_torch.specs_of, lists)]
            if group.get("differentiable") or torch.compiler.is_compiling() or not _agree(lists, specs):
                self.keeps_dtensors = True
                return found
            known = self._known[id(group)] = _Listing(group, optimizer.state, lists, specs, found)
            for tensors in lists:
                tensors[:] = _torch.locals_of(tensors)
        if isinstance(optimizer, optim.SGD) and group["momentum"]:
            self._momenta.append((known.parameters, lists[0], listed_anew))
        return known.found

    def settle(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The step is over."""
        momenta, self._momenta = self._momenta, []
        for parameters, stood_in, some_are_new in momenta:
            kept = [*map(optimizer.state.pop, stood_in, repeat(None))]
            if some_are_new:
                _give_momenta(optimizer.state, parameters, kept)


class _Listing:
    """The tensors of a group, as a step listed them: how to list them again, as long as none but gradients are others.

    parameters: those that had gradients.       found: what `_init_group` returned.
    """

    __slots__ = ("_flags", "_keys", "_members", "_others", "_specs", "found", "parameters")

    def __init__(
        self, group: dict[str, Any], state: dict[Any, Any], lists: Sequence[list[Any]], specs: list[list[Any]], found: Any
    ) -> None:
        """`lists`: as the optimizer filled them.     specs: of the tensors in them."""
        self.parameters, self.found, self._flags, self._specs = list(lists[0]), found, _flags(group), specs
        listed = set(map(id, self.parameters))
        self._members = list(group["params"])
        self._others = [parameter for parameter in self._members if id(parameter) not in listed]
        self._keys: list[str | None] | None = []  # under which a state has the tensors of each list; None: each list anew
        states = [state.get(parameter, {}) for parameter in self.parameters]
        for tensors in lists[2:]:
            keys = [key for key in states[0] if states[0][key] is tensors[0]] if tensors else [None]
            if not keys or not all(map(is_, tensors, [held.get(keys[0]) for held in states])):
                self._keys = None
                return
            self._keys.append(keys[0])

    def fill(self, group: dict[str, Any], state: dict[Any, Any], lists: Sequence[list[Any]]) -> bool:
        """Fill `lists` with local tensors; False, with nothing done, if any but gradients are others than they were."""
        members = group["params"]
        if self._keys is None or self._flags != _flags(group) or len(members) != len(self._members):
            return False
        if not all(map(is_, members, self._members)) or any(other.grad is not None for other in self._others):
            return False
        grads = [parameter.grad for parameter in self.parameters]
        if not _torch.are_dtensors(grads):
            return False
        states = [*map(state.get, self.parameters)]
        try:
            of_states = [[] if key is None else [*map(itemgetter(key), states)] for key in self._keys]  # type: ignore[arg-type]
        except (KeyError, TypeError):  # a state is gone
            return False
        filled = [self.parameters, grads, *of_states]
        if not all(all(map(is_, _torch.specs_of(tensors), specs)) for tensors, specs in zip(filled, self._specs)):
            return False
        for tensors, listed in zip(lists, filled):
            tensors[:] = _torch.locals_of(listed)
        return True


def _flags(group: dict[str, Any]) -> list[Any]:
    """The options that decide which tensors a step has."""
    return [bool(group.get("momentum")), *[value for value in group.values() if type(value) is bool]]


def _give_momenta(state: dict[Any, Any], parameters: Sequence[Tensor], kept: Sequence[dict[str, Any] | None]) -> None:
    """SGD `kept` its buffers as states of what it computed with: have the parameters have them, as DTensors."""
    for parameter, made in zip(parameters, kept):
        held = state[parameter]
        if made is not None and held.get("momentum_buffer") is None:
            buffer = made["momentum_buffer"]
            if buffer is not None and isinstance(parameter, DTensor):
                buffer = _torch.dtensor(buffer, _torch.spec_of(parameter))  # type: ignore[arg-type]
            held["momentum_buffer"] = buffer


def _agree(lists: Sequence[Sequence[Any]], specs: Sequence[Sequence[Any]]) -> bool:
    """Whether gradients and states of sharded parameters are cut as those are, and those of plain ones are plain."""
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
                return False  # a state of one element that counts steps is plain in any case
    return not any(placement.is_partial() for spec in of_parameters if spec is not None for placement in spec.placements)


__all__ = ["ELEMENT_WISE", "LocalStep", "is_element_wise"]
