"""Depth-first walk over modules that collects the parameters and buffers of a unit and stops at other units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fullshard import _torch


@dataclass(frozen=True, slots=True)
class Slot:
    """A module, and the name under which it registers a tensor."""

    module: nn.Module
    name: str


@dataclass(slots=True, eq=False)
class ParamRef:
    """One parameter and all its slots; a tied parameter has more than one."""

    name: str  # qualified, below the roots of the walk
    parameter: nn.Parameter
    slots: list[Slot] = field(default_factory=list)


@dataclass(slots=True)
class ManagedTensors:
    """Modules, parameters and buffers that one unit manages, each once, in post-order."""

    modules: list[nn.Module]
    refs: list[ParamRef]
    buffers: list[tuple[str, Slot, Tensor]]


_IGNORED = "_fullshard_ignored"  # attribute that marks a parameter of `ignored_params`


def mark_ignored(parameter: nn.Parameter) -> None:
    """Mark a parameter that the user excluded from sharding."""
    parameter.__dict__[_IGNORED] = True


def is_ignored(tensor: Tensor) -> bool:
    """Return True if the user excluded the tensor from sharding (`ignored_params`)."""
    return _IGNORED in tensor.__dict__


def roots_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return `modules` without duplicates and without submodules of other modules in the list."""
    unique = list(dict.fromkeys(modules))
    inside = {id(child) for module in unique for child in module.modules() if child is not module}
    return [module for module in unique if id(module) not in inside]


def collect(
    roots: Sequence[nn.Module],
    *,
    ignored: Iterable[nn.Parameter] = (),
    is_unit: Callable[[nn.Module], bool] = lambda module: False,
) -> ManagedTensors:
    """Walk `roots` depth first, children in registration order and before their parents.

    The walk enters no submodule for which `is_unit` returns True, and no module to which torch's `replicate` was applied.
    The result omits `ignored` parameters, and modules below the roots that hold (submodules included) nothing but such ones.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    root_ids = {id(root) for root in roots}

    def enters(module: nn.Module) -> bool:
        return not _torch.is_non_composable(module) and (id(module) in root_ids or not is_unit(module))

    def has_only_ignored(module: nn.Module) -> bool:
        ids = {id(parameter) for parameter in module.parameters()}
        return len(ids) > 0 and ids <= ignored_ids and next(module.buffers(), None) is None

    modules: list[nn.Module] = []
    refs: dict[int, ParamRef] = {}
    buffers: dict[int, tuple[str, Slot, Tensor]] = {}
    seen: set[int] = set()
    for index, root in enumerate(roots):
        for prefix, module in _post_order(root, f"{index}." if len(roots) > 1 else "", seen, enters):
            if id(module) in root_ids or not ignored_ids or not has_only_ignored(module):
                modules.append(module)
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in ignored_ids:
                    refs.setdefault(id(parameter), ParamRef(prefix + name, parameter)).slots.append(Slot(module, name))
            for name, buffer in module.named_buffers(recurse=False):
                buffers.setdefault(id(buffer), (prefix + name, Slot(module, name), buffer))
    return ManagedTensors(modules, list(refs.values()), list(buffers.values()))


_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """Remove the parts that wrappers add to a qualified name: FSDP1, activation checkpointing, torch.compile.

    >>> clean_name("blocks.0._fsdp_wrapped_module._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, module) of `root` and its submodules, children in registration order before parents, each once."""
    for prefix, module in _post_order(root, "", set(), lambda module: True):
        yield prefix.rstrip("."), module


def _post_order(
    module: nn.Module, prefix: str, seen: set[int], enters: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix, module) of `module` and its submodules, children first, each once. Skip subtrees that `enters` rejects."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if enters(module):
        for name, child in module.named_children():
            yield from _post_order(child, f"{prefix}{name}.", seen, enters)
        yield prefix, module
