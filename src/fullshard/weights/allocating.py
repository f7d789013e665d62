"""Memory for a model on meta that is loaded, and the marks of what stays without values."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.params.sharded_param import logical_parameters
from fullshard.params.uninitialized import UninitializedTensors
from fullshard.policies import CPUOffloadPolicy
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit, own_modules
from fullshard.runtime.unwritten import mark_unwritten, on_meta
from fullshard.weights.targets import ModelTensors


class Fresh:
    """Tensors that had no memory before, by unit, and apart those that belong to no unit."""

    def __init__(self, model: nn.Module, units: tuple[Unit, ...]) -> None:
        self._by_unit = [(unit, on_meta(unit)) for unit in units]
        of_units = {id(module) for unit in units for module in _modules_of(unit)}
        self._others = UninitializedTensors([], list(_outside(model, of_units)))

    def mark_left(self, written: Container[int]) -> None:
        """Mark what was not written, so that no forward takes it for values.

        Args:
            written: ids of sharded parameters and of plain tensors.
        """
        for unit, fresh in self._by_unit:
            left = fresh.but(written)
            if left.names():
                mark_unwritten(unit, left, "load_weights() allocated")
        _mark_outside(self._others.but(written), "load_weights() allocated")


def allocate(model: nn.Module, tensors: ModelTensors) -> Fresh:
    """Give what is on meta memory: shards where their units keep them, all else on the device of the mesh."""
    fresh = Fresh(model, tensors.units)
    device = tensors.units[0].axis.device if tensors.units else torch.device("cpu")
    for unit in tensors.units:
        offloaded = isinstance(unit.options.offload, CPUOffloadPolicy)
        runtime_of(unit).requests.allocate(unit, torch.device("cpu") if offloaded else unit.axis.device)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by what was on meta, which is tied in several places
    for module in model.modules():
        slots: tuple[dict[str, Any], ...] = _torch.parameters_of(module), _torch.buffers_of(module)
        for held in slots:
            for name, tensor in [(name, one) for name, one in held.items() if one is not None and one.device.type == "meta"]:
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, _with_memory(tensor, device)
                held[name] = made[id(tensor)][1]
    return fresh


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """The same plain tensor, as a parameter if it is one."""
    memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return memory
    parameter = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


_OUTSIDE: weakref.WeakKeyDictionary[nn.Module, UninitializedTensors] = weakref.WeakKeyDictionary()
"""Marked tensors that belong to no unit, by their modules: no forward of a unit looks at them."""


def _mark_outside(tensors: UninitializedTensors, by: str) -> None:
    with torch.no_grad():
        tensors.mark(by)
    for module in (ref() for ref, _ in tensors.places):
        if module is not None:
            _OUTSIDE[module] = tensors


def has_marks(model: nn.Module, units: Iterable[Unit]) -> bool:
    """Return whether tensors of a model were marked as without values, and no forward has looked at them since."""
    return any(unit.checks.uninitialized is not None for unit in units) or any(one in _OUTSIDE for one in model.modules())


def check_values(model: nn.Module, units: Iterable[Unit], doing: str) -> None:
    """Check that everything a checkpoint holds was written, on this rank. Raises ValueError naming what was not."""
    fresh = [unit.checks.uninitialized for unit in units] + [_OUTSIDE.get(module) for module in model.modules()]
    for one in fresh:
        left = [] if one is None else one.remaining()
        if one is not None and left:
            raise ValueError(
                f"{doing} found no values: {one.by} {', '.join(left[:4])}{', ...' if len(left) > 4 else ''}, and nothing has "
                f"written {'it' if len(left) == 1 else 'them'} since: load or initialise the model before"
            )


_HALF = "load_weights() failed and left half written:"


def mark_all(model: nn.Module, units: Iterable[Unit]) -> None:
    """Mark everything a state dict holds of a model: a load that failed wrote some of it, and nobody knows which."""
    of_units: set[int] = set()
    for unit in units:
        modules = list(_modules_of(unit))
        of_units.update(map(id, modules))
        mark_unwritten(unit, UninitializedTensors(list(unit.parameters), _buffers(modules)), _HALF)
    outside = [module for module in model.modules() if id(module) not in of_units]
    plain = [
        (weakref.ref(module), name)
        for module in model.modules()
        for name, one in _torch.parameters_of(module).items()
        if one is not None and not logical_parameters([one])
    ]
    _mark_outside(UninitializedTensors([], [*plain, *_buffers(outside)]), _HALF)


def _buffers(modules: Iterable[nn.Module]) -> list[tuple[weakref.ref[nn.Module], str]]:
    """The buffers that state dicts hold."""
    return [
        (weakref.ref(module), name)
        for module in modules
        for name, _ in module.named_buffers(recurse=False)
        if _torch.persists(module, name)
    ]


def _modules_of(unit: Unit) -> Iterator[nn.Module]:
    for root in unit.modules:
        yield from own_modules(root)


def _outside(model: nn.Module, of_units: Container[int]) -> Iterator[tuple[weakref.ref[nn.Module], str]]:
    """Tensors on meta that belong to no unit: ignored parameters, and all that modules without a unit have."""
    for module in model.modules():
        for name, parameter in _torch.parameters_of(module).items():
            if parameter is not None and parameter.device.type == "meta" and not logical_parameters([parameter]):
                yield weakref.ref(module), name
        for name, buffer in _torch.buffers_of(module).items():
            if buffer is not None and buffer.device.type == "meta" and id(module) not in of_units:
                yield weakref.ref(module), name


__all__ = ["Fresh", "allocate", "check_values", "has_marks", "mark_all"]
