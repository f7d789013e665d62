"""Materialization: allocate and initialize a sharded model that was built on the meta device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch, ext
from fullshard.core import Agreement, children_first, logical_parameters, replace_rows, units_of
from fullshard.errors import StateError, check_int
from fullshard.frontend.module import any_unit
from fullshard.optim.copies import agreement_of_all

Init = Callable[[nn.Module], object]


def materialize(
    model: nn.Module, device: torch.device | str | None = None, *, init: Init | None = None, seed: int | None = None
) -> nn.Module:
    """Allocate and initialize a sharded model that was built under `torch.device("meta")`, in place. Collective.

    For one module at a time, children first, it allocates the unsharded parameters and buffers, calls `init`, and keeps this
    rank's shards. So the peak is the unsharded memory of one module. All ranks of the model, tensor-parallel ranks included,
    draw random numbers from one seed, so the weights are equal for every number of ranks. Inside `init` the random generators
    are seeded, and restored afterwards.

    Args:
        model: a sharded module, or a module that contains sharded modules.
        device: device of the computation; None is the device of the mesh. With `CPUOffloadPolicy` the shards move to the host.
        init: called with each module that has parameters or buffers on meta; None calls `reset_parameters()` of the module.
        seed: seed of the random numbers; None draws one number from torch's generator on each rank, and takes that of rank 0 of
            the model's mesh.

    Returns:
        `model`.

    Raises:
        ValueError: if `init` or `seed` is of another type and, on all ranks, if they pass different seeds.
        StateError: if a module has no `reset_parameters` and there is no `init`, or if `init` left a parameter or buffer
            without values. The error names the module, parameter or buffer.

    Example:
        >>> with torch.device("meta"):                                                        # doctest: +SKIP
        ...     model = Transformer(config)
        >>> for block in model.blocks:                                                        # doctest: +SKIP
        ...     fully_shard(block)
        >>> materialize(fully_shard(model))                                                   # doctest: +SKIP
    """
    units = units_of(model, True)
    if init is not None and not callable(init):
        raise ValueError(f"init must be callable or None, got {init!r}.")
    if seed is not None:
        check_int("seed", seed, least=-(2**63), otherwise=", or None")
    any_unit(model)
    for unit in units:
        unit.reshard(doing="materialize()")
    compute_device = torch.device(device) if device is not None else units[0].axis.device
    doing = f"materialize(seed={seed})"  # so ranks with other seeds raise, and name them
    parameters = [parameter for unit in units for parameter in unit.parameters]
    agreement = agreement_of_all(parameters, doing) if parameters else units[0].agreement(doing)
    agreement.barrier()
    if seed is None:
        seed = common_seed(agreement)
    filled: dict[int, Tensor] = {}
    # `init` may raise on this rank only. The other ranks would wait for it in their next collective, so they raise as well.
    reporting_exceptions = units[0].runtime.communicator.reporting_exceptions(f"'{units[0].name}' materialize()")
    with reporting_exceptions, torch.no_grad(), seeded(compute_device, seed):
        for name, module in children_first(model):
            _fill(module, name, compute_device, init, filled)
    for unit in units:
        unit.refresh(assigned=True)
    return model


def _fill(module: nn.Module, name: str, device: torch.device, init: Init | None, filled: dict[int, Tensor]) -> None:
    """Allocate and initialize the meta tensors of one module, without its children. `filled`: values by id of a meta tensor."""
    parameters, buffers = _torch.parameters_of(module), _torch.buffers_of(module)
    registries: tuple[dict[str, Any], ...] = parameters, buffers
    slots = [(r, key, one) for r in registries for key, one in r.items() if one is not None and one.device.type == "meta"]
    if not slots:
        return
    tied = {id(one) for _, _, one in slots if isinstance(one, nn.Parameter) and id(one) in filled}
    allocated: dict[int, nn.Parameter] = {}  # by id of the meta parameter, since a module may tie its own parameters
    for registry, key, one in slots:
        if registry is buffers:
            if id(one) not in filled:
                filled[id(one)] = ext.unwritten.mark_tensor(torch.empty_like(one, device=device))
        elif id(one) not in allocated:
            full = ext.unwritten.mark_tensor(torch.empty(one.shape, dtype=one.dtype, device=device))
            allocated[id(one)] = nn.Parameter(full, requires_grad=one.requires_grad)
        registry[key] = filled[id(one)] if registry is buffers else allocated[id(one)]
    dot = f"{name}." if name else ""
    try:
        _initialize(module, name, init)
        values = [registry[key] for registry, key, _ in slots]
        without_values = [
            f"{'buffer' if registry is buffers else 'parameter'} '{dot}{key}'"
            for (registry, key, one), value in zip(slots, values)
            if id(one) not in tied and ext.unwritten.is_marked(value)
        ]
        if without_values:
            raise StateError(
                f"{', '.join(without_values)} of {type(module).__name__} got no values from "
                f"{'reset_parameters()' if init is None else 'init'}. Pass an init(module) to materialize() that fills all of "
                "them."
            )
    except BaseException:
        for registry, key, one in slots:
            registry[key] = one
        raise
    of_parameters = [(key, one, value) for (registry, key, one), value in zip(slots, values) if registry is parameters]
    # Sharded parameters stay registered, on meta until `_keep_value` replaces their shards.
    parameters.update((key, one) for key, one, _ in of_parameters)
    for key, one, value in of_parameters:
        if id(one) not in filled:
            filled[id(one)] = _keep_value(one, value)
        if filled[id(one)] is not one:
            parameters[key] = filled[id(one)]  # type: ignore[assignment]


def _keep_value(original: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return the parameter with its value: a sharded one keeps this rank's rows of `value`, another one is a new Parameter."""
    known = logical_parameters([original])
    if not known:  # an ignored parameter, or one outside of all units
        parameter = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
        parameter.__dict__.update(original.__dict__)  # attributes that the caller set, such as an optimizer's group
        return parameter
    group = known[0].group()
    assert group is not None
    original.requires_grad_(value.requires_grad)
    replace_rows(known[0], known[0].slice(value.detach()).to(group.storage.home))
    return original


def _initialize(module: nn.Module, name: str, init: Init | None) -> None:
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise StateError(
            f"'{name or type(module).__name__}' ({type(module).__name__}) has parameters or buffers on meta and no "
            "reset_parameters(). Pass init=, which is called with each such module."
        )
    reset()


# --- random numbers ------------------------------------------------------------------------------------------------------


_GENERATOR_LOCK = threading.RLock()


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random generators inside the block, and restore them afterwards. One thread at a time, since all share them."""
    # fork_rng always restores the CPU's generator. It takes a device type even for an empty list of devices.
    devices = [] if device.type == "cpu" else [device]
    with _GENERATOR_LOCK, torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        if devices:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)  # not those of accelerators, which fork_rng does not restore
        yield


def common_seed(agreement: Agreement) -> int:
    """Draw a seed on the first rank and broadcast it to all ranks. Collective."""
    return int(agreement.from_first_rank(torch.randint(2**62, (1,), dtype=torch.int64)).item())
