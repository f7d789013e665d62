"""Allocate memory for a model on meta, restore buffers that no checkpoint has, and mark tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch, ext
from fullshard.core import Unit, clean_name, logical_parameters, own_modules
from fullshard.policies import CPUOffloadPolicy
from fullshard.weights.targets import ModelTensors
from fullshard.wrap.known_values import ConstantsMode, KnownValues, ValuesMode, values_of_buffers


def built_buffers(model: nn.Module, build: Callable[[], nn.Module] | None) -> dict[str, Tensor]:
    """Build a model on meta. Return the values of buffers that depend only on shapes and constants, by name, on the CPU."""
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


@torch.no_grad()
def fill_buffers(model: nn.Module, found: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """Copy values into the buffers in `names` for which `found` has a value, and return these buffers by name."""
    buffers = {clean_name(name): buffer for name, buffer in model.named_buffers()}
    filled = {name: buffer for name, buffer in buffers.items() if name in names and name in found}
    for name, buffer in filled.items():
        buffer.copy_(found[name])
    return filled


class AllocatedTensors:
    """The tensors that a load may write, as they are when this is made: those of each unit, and those outside all units."""

    def __init__(self, model: nn.Module, units: tuple[Unit, ...]) -> None:
        self._units = units
        owner_of: dict[nn.Module, Unit | None] = dict.fromkeys(model.modules())
        owner_of |= {module: unit for unit in units for module in own_modules(*unit.modules)}
        slots: dict[Unit | None, list[tuple[weakref.ref[nn.Module], str]]] = {None: [], **{unit: [] for unit in units}}
        plain: list[Tensor] = []
        for module in model.modules():
            for name, parameter in _torch.parameters_of(module).items():
                if parameter is not None and not logical_parameters([parameter]):
                    slots[None].append((weakref.ref(module), name))
                    plain.append(parameter)
        for module, unit in owner_of.items():
            for name, buffer in _torch.buffers_of(module).items():
                if buffer is not None and (_torch.persists(module, name) or buffer.device.type == "meta"):
                    slots[unit].append((weakref.ref(module), name))
                    plain.append(buffer)
        self._all = [
            (unit, ext.unwritten.UnwrittenTensors([] if unit is None else list(unit.parameters), found))
            for unit, found in slots.items()
        ]
        in_memory = {id(p) for unit in units for p in unit.parameters if p.local.device.type != "meta"}
        in_memory |= {id(one) for one in plain if one.device.type != "meta"}
        self._on_meta = [(unit, tensors.without(in_memory)) for unit, tensors in self._all]

    def allocate(self, model: nn.Module) -> None:
        """Allocate memory for those on meta: shards on the device of their unit, other tensors on the device of the mesh."""
        device = self._units[0].axis.device if self._units else torch.device("cpu")
        for unit in self._units:
            unwritten = {id(parameter) for parameter in unit.parameters if parameter.local.device.type == "meta"}
            if unwritten:
                unit.invalidate_unsharded()
                home = torch.device("cpu") if isinstance(unit.options.offload, CPUOffloadPolicy) else unit.axis.device
                shards = [parameter.local for parameter in unit.parameters]
                values = [shard if shard.device.type != "meta" else torch.empty_like(shard, device=home) for shard in shards]
                unit.rebuild_groups(values, unwritten)
        memory_of: dict[Tensor, Tensor] = {}  # by meta tensor, so that tied tensors stay tied
        for module in model.modules():
            slots: tuple[dict[str, Any], ...] = _torch.parameters_of(module), _torch.buffers_of(module)
            for registry in slots:
                on_meta = {name: one for name, one in registry.items() if one is not None and one.device.type == "meta"}
                for name, tensor in on_meta.items():
                    if tensor not in memory_of:
                        memory_of[tensor] = _allocate_like(tensor, device)
                    registry[name] = memory_of[tensor]

    def mark_remaining(self, written: Container[int]) -> None:
        """Mark those on meta that were not written, so that a forward raises instead of using memory without values."""
        for unit, tensors in self._on_meta:
            _mark(unit, tensors.without(written), "load_weights() allocated")

    def mark_all(self, intact: Container[int]) -> None:
        """Mark all but those in `intact`: a failed load wrote an unknown part of them."""
        for unit, tensors in self._all:
            _mark(unit, tensors.without(intact), "load_weights() failed and left half written:")


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


def _mark(unit: Unit | None, tensors: ext.unwritten.UnwrittenTensors, by: str) -> None:
    if unit is None:
        with torch.no_grad():
            tensors.mark(by)
        _UNMANAGED.update((module, tensors) for module in (ref() for ref, _ in tensors.buffers) if module is not None)
    elif tensors.names():
        ext.unwritten.mark_unwritten(unit, tensors, by)
        ext.equal_values.compare_again(unit)


def _marked(model: nn.Module, units: Iterable[Unit]) -> list[ext.unwritten.UnwrittenTensors]:
    found = [one for unit in units for one in ext.unwritten.unwritten_of(unit)]
    return found + [_UNMANAGED[module] for module in model.modules() if module in _UNMANAGED]


def unwritten_ids(model: nn.Module, units: Iterable[Unit]) -> set[int]:
    """Return the ids of the local tensors of this rank that are marked as having no values, and that nothing has written."""
    return set().union(*(one.remaining_ids() for one in _marked(model, units)))


def check_values(model: nn.Module, tensors: ModelTensors, doing: str) -> None:
    """Raise ValueError on all ranks if parameters or persistent buffers of one have no values, naming up to four of them."""
    marked = _marked(model, tensors.units)

    def check() -> None:
        for one in marked:
            left = one.remaining()
            if left:
                names = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
                raise ValueError(
                    f"{doing} found no values: {one.cause} {names}, and nothing has written "
                    f"{'it' if len(left) == 1 else 'them'} since. Load or initialize the model first."
                )

    if marked:  # on all ranks alike
        tensors.agreement(doing).run(check)
