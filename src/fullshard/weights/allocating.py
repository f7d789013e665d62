"""Allocate memory for a model on meta, restore buffers that no checkpoint has, and mark tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch, ext
from fullshard.core import Unit, clean_name, logical_parameters, own_modules
from fullshard.policies import CPUOffloadPolicy
from fullshard.wrap.known_values import ConstantsMode, KnownValues, ValuesMode, values_of_buffers


def built_buffers(model: nn.Module, build: Callable[[], nn.Module] | None) -> dict[str, Tensor]:
    """Build a model on meta and return the values of its buffers.

    Returns:
        Values by buffer name, on the CPU, of the buffers that depend only on shapes and constants. Random buffers are left out.
    """
    if build is None:
        return {}
    values = KnownValues()
    try:
        with torch.device("meta"), ValuesMode(values), ConstantsMode(values):
            made = build()
    except Exception as failure:
        raise ValueError(f"buffers() fails under torch.device('meta'): {type(failure).__name__}: {failure}") from failure
    if not isinstance(made, nn.Module):
        raise ValueError(f"buffers() must return the newly built model, got a {type(made).__name__}.")
    known = {clean_name(name): known.value() for name, known in values_of_buffers(made, values).items()}
    expected = {clean_name(name): buffer for name, buffer in model.named_buffers()}
    found = {name: value for name, value in known.items() if value is not None and name in expected}
    for name, value in found.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"'{name}' has shape {tuple(value.shape)} in the model of buffers(), here {tuple(expected[name].shape)}."
            )
    return found


def fill_buffers(model: nn.Module, found: Mapping[str, Tensor], names: Container[str]) -> set[str]:
    """Copy values into the buffers in `names` for which `found` has a value, and return the names of these buffers."""
    filled: set[str] = set()
    with torch.no_grad():
        for name, buffer in ((clean_name(name), buffer) for name, buffer in model.named_buffers()):
            if name in names and name in found:
                buffer.copy_(found[name])
                filled.add(name)
    return filled


class AllocatedTensors:
    """The tensors that are on meta when this is made: those of each unit, and tensors outside all units."""

    def __init__(self, model: nn.Module, units: tuple[Unit, ...]) -> None:
        self._by_unit = [(unit, ext.unwritten.tensors_on_meta(unit)) for unit in units]
        of_units = {id(module) for unit in units for module in own_modules(*unit.modules)}
        self._others = ext.unwritten.UnwrittenTensors([], list(_unmanaged_on_meta(model, of_units)))

    def allocate(self, model: nn.Module) -> None:
        """Allocate memory for them: shards on the device of their unit, other tensors on the device of the mesh."""
        device = self._by_unit[0][0].axis.device if self._by_unit else torch.device("cpu")
        for unit, _ in self._by_unit:
            offloaded = isinstance(unit.options.offload, CPUOffloadPolicy)
            unit.allocate(torch.device("cpu") if offloaded else unit.axis.device)
        # By id of the meta tensor, so that tied tensors stay tied. The value keeps the meta tensor alive: its id is not reused.
        memory_of: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            slots: tuple[dict[str, Any], ...] = _torch.parameters_of(module), _torch.buffers_of(module)
            for registry in slots:
                on_meta = {name: one for name, one in registry.items() if one is not None and one.device.type == "meta"}
                for name, tensor in on_meta.items():
                    if id(tensor) not in memory_of:
                        memory_of[id(tensor)] = tensor, _allocate_like(tensor, device)
                    registry[name] = memory_of[id(tensor)][1]

    def mark_remaining(self, written: Container[int]) -> None:
        """Mark the tensors that were not written, so that a forward raises instead of using memory without values."""
        for unit, fresh in self._by_unit:
            left = fresh.without(written)
            if left.names():
                _mark_unit(unit, left, "load_weights() allocated")
        _mark_unmanaged(self._others.without(written), "load_weights() allocated")

    def mark_all(self, model: nn.Module, intact: Container[int]) -> None:
        """Mark what was on meta and all parameters and persistent buffers: a failed load wrote an unknown part of them."""
        of_units: set[int] = set()
        for unit, fresh in self._by_unit:
            modules = list(own_modules(*unit.modules))
            of_units.update(map(id, modules))
            buffers = list(dict.fromkeys([*_buffers(modules), *fresh.buffers]))
            _mark_unit(unit, ext.unwritten.UnwrittenTensors(list(unit.parameters), buffers).without(intact), _PARTLY_WRITTEN)
        plain = [
            (weakref.ref(module), name)
            for module in model.modules()
            for name, one in _torch.parameters_of(module).items()
            if one is not None and not logical_parameters([one])
        ]
        buffers = _buffers(module for module in model.modules() if id(module) not in of_units)
        others = dict.fromkeys([*plain, *buffers, *self._others.buffers])
        _mark_unmanaged(ext.unwritten.UnwrittenTensors([], list(others)).without(intact), _PARTLY_WRITTEN)


def _allocate_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with memory like a plain meta tensor; a parameter stays a parameter, with its attributes."""
    memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return memory
    parameter = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


_UNMANAGED: weakref.WeakKeyDictionary[nn.Module, ext.unwritten.UnwrittenTensors] = weakref.WeakKeyDictionary()
"""Marked tensors outside all units, by module. The forward of a unit does not check them."""


def _mark_unit(unit: Unit, tensors: ext.unwritten.UnwrittenTensors, by: str) -> None:
    ext.unwritten.mark_unwritten(unit, tensors, by)
    ext.equal_values.compare_again(unit)


def _mark_unmanaged(tensors: ext.unwritten.UnwrittenTensors, by: str) -> None:
    with torch.no_grad():
        tensors.mark(by)
    for module in (ref() for ref, _ in tensors.buffers):
        if module is not None:
            _UNMANAGED[module] = tensors


def has_marks(model: nn.Module, units: Iterable[Unit]) -> bool:
    """Return True if tensors of a model are marked as having no values and no forward has checked them since."""
    return bool(_marked(model, units))


def _marked(model: nn.Module, units: Iterable[Unit]) -> list[ext.unwritten.UnwrittenTensors]:
    found = [one for unit in units for one in ext.unwritten.unwritten_of(unit)]
    return found + [_UNMANAGED[module] for module in model.modules() if module in _UNMANAGED]


def unwritten_ids(model: nn.Module, units: Iterable[Unit]) -> set[int]:
    """Return the ids of the local tensors of this rank that are marked as having no values, and that nothing has written."""
    return set().union(*(one.remaining_ids() for one in _marked(model, units)))


def check_values(model: nn.Module, units: Iterable[Unit], doing: str) -> None:
    """Raise ValueError if parameters or persistent buffers of this rank have no values, naming up to four of them."""
    for one in _marked(model, units):
        left = one.remaining()
        if left:
            raise ValueError(
                f"{doing} found no values: {one.cause} {', '.join(left[:4])}{', ...' if len(left) > 4 else ''}, and nothing "
                f"has written {'it' if len(left) == 1 else 'them'} since. Load or initialize the model first."
            )


_PARTLY_WRITTEN = "load_weights() failed and left half written:"


def _buffers(modules: Iterable[nn.Module]) -> list[tuple[weakref.ref[nn.Module], str]]:
    """Return (module, name) of the persistent buffers."""
    return [
        (weakref.ref(module), name)
        for module in modules
        for name, _ in module.named_buffers(recurse=False)
        if _torch.persists(module, name)
    ]


def _unmanaged_on_meta(model: nn.Module, of_units: Container[int]) -> Iterator[tuple[weakref.ref[nn.Module], str]]:
    """Yield (module, name) of the meta tensors outside all units: ignored parameters, and tensors of modules without a unit."""
    for module in model.modules():
        for name, parameter in _torch.parameters_of(module).items():
            if parameter is not None and parameter.device.type == "meta" and not logical_parameters([parameter]):
                yield weakref.ref(module), name
        for name, buffer in _torch.buffers_of(module).items():
            if buffer is not None and buffer.device.type == "meta" and id(module) not in of_units:
                yield weakref.ref(module), name
