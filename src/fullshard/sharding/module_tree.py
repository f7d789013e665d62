"""The owner of each parameter and buffer: a depth-first walk over modules that stops at other units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fullshard import _torch


@dataclass(frozen=True, slots=True)
class Slot:
    """A name under which a module holds a tensor. A holder of slots keeps modules weakly."""

    module: nn.Module
    name: str


@dataclass(slots=True, eq=False)
class ParamRef:
    """reference 1 - n slots: one parameter and every slot it is installed in (more than one if it is tied)."""

    name: str  # qualified, within the modules that were walked
    parameter: nn.Parameter
    slots: list[Slot] = field(default_factory=list)


@dataclass(slots=True)
class ManagedTensors:
    """The modules, parameters and buffers that one unit manages, each once, in post-order."""

    modules: list[nn.Module]
    refs: list[ParamRef]
    buffers: list[tuple[str, Slot, Tensor]]


def roots_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """`modules` without those that lie inside another of them, and without repetitions."""
    unique = list(dict.fromkeys(modules))
    if len(unique) == 1:
        return unique
    inside = {id(child) for module in unique for child in module.modules() if child is not module}
    return [module for module in unique if id(module) not in inside]


def collect(
    roots: Sequence[nn.Module],
    *,
    ignored: Iterable[nn.Parameter] = (),
    is_unit: Callable[[nn.Module], bool] = lambda module: False,
) -> ManagedTensors:
    """Walk `roots` depth first, children in registration order and before their parents.

    Not entered: modules for which `is_unit` holds and modules under torch's `replicate`. `ignored` parameters are left
    out, and so are modules below the roots that hold ignored parameters and nothing else. Shared modules, parameters
    and buffers come once; a shared parameter's reference lists every slot.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    root_ids = {id(root) for root in roots}
    modules: list[nn.Module] = []
    refs: dict[int, ParamRef] = {}
    buffers: dict[int, tuple[str, Slot, Tensor]] = {}
    seen: set[int] = set()
    for index, root in enumerate(roots):
        for prefix, module in _post_order(root, f"{index}." if len(roots) > 1 else "", seen, root_ids, is_unit):
            if id(module) in root_ids or not _holds_only_ignored(module, ignored_ids):
                modules.append(module)
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in ignored_ids:
                    refs.setdefault(id(parameter), ParamRef(prefix + name, parameter)).slots.append(Slot(module, name))
            for name, buffer in module.named_buffers(recurse=False):
                buffers.setdefault(id(buffer), (prefix + name, Slot(module, name), buffer))
    return ManagedTensors(modules, list(refs.values()), list(buffers.values()))


_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """A qualified name without the parts that wrappers add: FSDP1's, activation checkpointing's, torch.compile's.

    >>> clean_name("blocks.0._fsdp_wrapped_module._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(qualified name, module) of `root` and all below it, children in registration order before their parents, each once."""
    for prefix, module in _post_order(root, "", set(), {id(root)}, lambda module: False, everything=True):
        yield prefix.rstrip("."), module


def _post_order(
    module: nn.Module,
    prefix: str,
    seen: set[int],
    root_ids: set[int],
    is_unit: Callable[[nn.Module], bool],
    *,
    everything: bool = False,
) -> Iterator[tuple[str, nn.Module]]:
    """(prefix, module) for `module` and all below it that are its own, children first, each once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if not everything and ((id(module) not in root_ids and is_unit(module)) or _torch.is_non_composable(module)):
        return
    for name, child in module.named_children():
        yield from _post_order(child, f"{prefix}{name}.", seen, root_ids, is_unit, everything=everything)
    yield prefix, module


def _holds_only_ignored(module: nn.Module, ignored_ids: set[int]) -> bool:
    if not ignored_ids:
        return False
    parameters = list(module.parameters())
    return bool(parameters) and all(id(p) in ignored_ids for p in parameters) and not any(True for _ in module.buffers())
