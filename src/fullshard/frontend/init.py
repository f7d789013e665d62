"""Giving a model that was built on the meta device its memory and its first values, unit by unit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.frontend.module import units_of
from fullshard.params.shard_values import replace_rows
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.uninitialized import is_marked, mark
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.setup_collectives import SetupCollectives

Init = Callable[[nn.Module], object]

Owner = tuple[ShardedParameter, torch.device]
"""A sharded parameter, and where its shard is kept."""


def materialize(
    model: nn.Module, device: torch.device | str | None = None, *, init: Init | None = None, seed: int | None = None
) -> nn.Module:
    """Allocate and initialise a sharded model that was built under `torch.device("meta")`, in place. Collective.

    Module by module, children first, the full parameters and buffers are allocated on one module at a time, `init` is
    called, and each rank keeps its shards: at no time is there more than one module's full memory. Random numbers are
    drawn from one seed on all ranks, so the full weights are the same for every number of ranks, and the generators of
    the caller are left as they were.

    Args:
        model: a module that is sharded, at it or below it.
        device: where to compute; None takes the device of the mesh. Under `CPUOffloadPolicy` shards go to the host.
        init: called with each module that holds parameters or buffers that are on meta; None calls its
            `reset_parameters()`.
        seed: of the random numbers; None draws one on rank 0 of the model's mesh from torch's generator.

    Returns:
        `model`.

    Raises:
        StateError: naming the module, if it has no `reset_parameters` and `init` was not given, or naming the parameter or
            buffer that `init` left without values.

    Example:
        >>> with torch.device("meta"):                                                        # doctest: +SKIP
        ...     model = Transformer(config)
        >>> for block in model.blocks:                                                        # doctest: +SKIP
        ...     fully_shard(block)
        >>> materialize(fully_shard(model))                                                   # doctest: +SKIP
    """
    units = list(units_of(model, True))
    if not units:
        raise StateError(f"no module in this {type(model).__name__} is a unit: call fully_shard first")
    for unit in units:
        runtime_of(unit).requests.reshard(unit, doing="materialize()")
    where = torch.device(device) if device is not None else units[0].axis.device
    number = common_seed(units[0].setup_collectives("materialize()")) if seed is None else seed
    groups = [group for unit in units for group in unit.groups]
    owners = {id(parameter.sharded): (parameter, group.storage.home) for group in groups for parameter in group.parameters}
    filled: dict[int, Tensor] = {}
    done: set[int] = set()
    leaving = units[0].runtime.communicator.leaving(f"'{units[0].name}' materialize()")
    with leaving, torch.no_grad(), seeded(where, number):
        for name, module in _children_first(model):
            if id(module) not in done:
                done.add(id(module))
                _fill(module, name, where, init, owners, filled)
    for unit in units:
        runtime_of(unit).requests.refresh(unit)
    return model


def _children_first(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}{name}.")
    yield prefix.rstrip("."), module


def _fill(
    module: nn.Module,
    name: str,
    device: torch.device,
    init: Init | None,
    owners: dict[int, Owner],
    filled: dict[int, Tensor],
) -> None:
    """Give one module's own meta tensors memory and values.

    owners: the sharded parameters of the model and where their shards are kept, by the id of their DTensor.
    filled: the tensors that have values already, by the id of the meta tensor; tied ones are found there.
    """
    held, kept = _torch.parameters_of(module), _torch.buffers_of(module)
    waiting = {key: p for key, p in held.items() if p is not None and p.device.type == "meta"}
    buffers = {key: b for key, b in kept.items() if b is not None and b.device.type == "meta"}
    if not waiting and not buffers:
        return
    tied = {key for key, p in waiting.items() if id(p) in filled}
    _allocate(module, waiting, buffers, device, filled)
    try:
        _initialise(module, name, init)
    except BaseException:
        held.update(waiting)
        kept.update(buffers)
        raise
    current = {key: held[key] for key in waiting}
    dot = f"{name}." if name else ""
    left = [f"parameter '{dot}{key}'" for key in waiting if key not in tied and is_marked(current[key])]
    left += [f"buffer '{dot}{key}'" for key in buffers if is_marked(kept[key])]
    held.update(waiting)
    if left:
        kept.update(buffers)
        raise StateError(
            f"{', '.join(left)} of {type(module).__name__} got no values from "
            f"{'reset_parameters()' if init is None else 'init'}: pass an init(module) to materialize() that fills all of them"
        )
    for key, parameter in waiting.items():
        if id(parameter) not in filled:
            value = current[key]
            assert value is not None
            filled[id(parameter)] = _keep_value(parameter, value, owners.get(id(parameter)))
    for key, parameter in waiting.items():
        if id(parameter) not in owners:
            held[key] = filled[id(parameter)]  # type: ignore[assignment]


def _allocate(
    module: nn.Module,
    waiting: dict[str, nn.Parameter],
    buffers: dict[str, Tensor],
    device: torch.device,
    filled: dict[int, Tensor],
) -> None:
    """Install memory without values, marked as such, in the place of a module's own meta tensors."""
    held, kept = _torch.parameters_of(module), _torch.buffers_of(module)
    alike: dict[int, nn.Parameter] = {}  # tied within the module
    for key, parameter in waiting.items():
        if id(parameter) not in alike:
            full = mark(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
            alike[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        held[key] = alike[id(parameter)]
    for key, buffer in buffers.items():
        if id(buffer) not in filled:
            filled[id(buffer)] = mark(torch.empty_like(buffer, device=device))
        kept[key] = filled[id(buffer)]


def _keep_value(original: nn.Parameter, value: Tensor, owner: Owner | None) -> Tensor:
    """The parameter with its value: a sharded one (of `owner`) keeps this rank's rows, another one is made anew."""
    if owner is None:  # ignored, or of no unit
        made = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
        made.__dict__.update(original.__dict__)
        return made
    parameter, home = owner
    parameter.sharded.requires_grad_(value.requires_grad)
    replace_rows(parameter, parameter.slice(value.detach()).to(home))
    return original


def _initialise(module: nn.Module, name: str, init: Init | None) -> None:
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise StateError(
            f"'{name or type(module).__name__}' ({type(module).__name__}) holds parameters or buffers on meta and has no "
            "reset_parameters(): pass init=, which is called with each such module"
        )
    reset()


# --- random numbers ------------------------------------------------------------------------------------------------------


_DRAWING = threading.RLock()


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """One seed for the block; the generators of the caller go on afterwards as if nothing had been drawn.

    Threads share a generator, so one of them draws at a time.
    """
    devices = [] if device.type == "cpu" else [device]
    with _DRAWING, torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def common_seed(setup: SetupCollectives) -> int:
    """Drawn on the first rank, the same on all (collective)."""
    return int(setup.first(torch.randint(2**62, (1,), dtype=torch.int64).to(setup.axis.device)).item())


__all__ = ["common_seed", "materialize", "seeded"]
