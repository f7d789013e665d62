"""Replicas that die and return: a sharded model in a replica group of torchft, which averages gradients over the groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from fullshard.core import Unit, units_of
from fullshard.errors import StateError, some_of

# Messages with counts of units are multiples of this many numbers, so that models that differ a little send equal lengths.
_LENGTH_STEP = 256


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, manager: Any, *, also: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Attach a sharded model and its optimizer to the `torchft.Manager` of this replica group.

    Every unit, also one that is added later, averages its gradients over the groups. A group that returns gets the shards of
    the model and of the optimizer from the rank of the same number in another group, and what `also` has. Before the first
    gradient of a step crosses the groups, and before the vote, groups compare which units ran: if they differ, nobody steps.

    Args:
        model: sharded over the ranks of this group.
        optimizer: its optimizer, which steps outside of the backward.
        manager: made with `load_state_dict=None, state_dict=None`; its timeouts say how long a step waits for a group.
        also: further state by name: objects with `state_dict` and `load_state_dict` as an EMA, generators, and dicts.

    Returns:
        A `torchft.Optimizer`: call its `zero_grad()` before the forward, which asks for a quorum, and its `step()` after the
        backward, which steps if all agree.

    Raises:
        ValueError: for HSDP or HFSDP inside of the group, for parameters with hooks that may step in the backward, for a model
            without units, or for a name or value of `also` that is taken or has no state.

    Example:
        >>> optimizer = fullshard.replicas.attach(model, optimizer, manager)                  # doctest: +SKIP
        >>> while manager.current_step() < steps:                                             # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     loss(model).backward()
        ...     optimizer.step()
    """
    import torchft  # imported on demand

    units = units_of(model, True)
    if not units:
        raise ValueError("attach() got a model without units. Call fully_shard() on it first.")
    hybrid = [unit.name for unit in units if unit.axis.replicas is not None or unit.axis.hybrid is not None]
    if hybrid:
        raise ValueError(
            f"Unit {hybrid[0]!r} has replicas inside of this group (HSDP or HFSDP), and the groups are the replicas. Shard "
            "over a mesh of one dim."
        )
    hooked = [name for name, parameter in model.named_parameters() if getattr(parameter, "_post_accumulate_grad_hooks", None)]
    if hooked:
        raise ValueError(
            f"Parameters {some_of(hooked)} have hooks on accumulated gradients. If these step, they do before the groups vote. "
            "Step after the backward."
        )
    own = {"model": model, "optimizer": optimizer}
    if taken := sorted({*own} & {*(also or {})}):
        raise ValueError(f"also= has {some_of(taken)}, which attach() saves itself under these names. Use other names.")
    states = {name: _state_of(name, one) for name, one in {**(also or {}), **own}.items()}

    def load(state: Mapping[str, Any]) -> None:
        if {*state} != {*states}:
            raise StateError(
                f"Another replica group has the states {sorted(state)}, and this one {sorted(states)}. Pass the same also= in "
                "all groups."
            )
        for name, (_, put) in states.items():
            put(state[name])

    manager.register_state_dict_fn("fullshard", load, lambda: {name: get() for name, (get, _) in states.items()})
    compared = _Compared(model, manager)

    class Optimizer(torchft.Optimizer):  # type: ignore[misc, name-defined]
        """Steps if all groups agree."""

        def zero_grad(self, set_to_none: bool = True) -> None:
            compared.begin()
            super().zero_grad(set_to_none)

        def step(self, closure: Any = None) -> None:
            if closure is not None:
                raise ValueError("step() of a replica group takes no closure, as torchft's: compute the loss before it.")
            compared.compare(compared.reduced)
            if manager.should_commit():
                optimizer.step()
            else:  # ranks that loaded the state of another group gather kept parameters anew: so must the others
                for unit in units_of(model, True):
                    unit.ensure_sharded(doing="a refused step")

    compared.begin()
    return Optimizer(manager, optimizer)


class _Compared:
    """The units that ran and that reduced in a step, which all groups must share."""

    def __init__(self, model: nn.Module, manager: Any) -> None:
        self._model, self._manager = model, manager
        self._attached: dict[int, str] = {}  # names by number of the unit
        self.ran: list[str] = []
        self.reduced: list[str] = []

    def begin(self) -> None:
        """Begin a step, and attach units that are new."""
        for units in (self.ran, self.reduced):
            units.clear()
        for unit in units_of(self._model, True):
            if unit.number not in self._attached:
                self._attached[unit.number] = unit.name
                module: Any = unit.modules[0]
                module.register_forward_pre_hook(lambda *_, name=unit.name: self.ran.append(name))
                module.set_all_reduce_hook(self._hook(unit))

    def _hook(self, unit: Unit) -> Callable[[Tensor], None]:
        def average(flat: Tensor) -> None:
            if unit.runtime.communicator.capturing:
                raise StateError("A graph of the device cannot hold a step of replicas: the host asks for a quorum in it.")
            if not self.reduced:
                self.compare(self.ran, flat.device)
            self.reduced.append(unit.name)
            self._manager.allreduce(flat).wait()

        return average

    def compare(self, units: list[str], device: torch.device | None = None) -> None:
        """Report an error to the manager, so that nobody steps, if another group has other units, or another order of them."""
        counts, digest = Counter(units), crc32("\n".join(units).encode())
        names = list(self._attached.values())
        length = -(-(3 + len(names)) // _LENGTH_STEP) * _LENGTH_STEP
        own = torch.zeros(length, dtype=torch.float64)
        own[: 3 + len(names)] = torch.tensor([1, digest & 0xFFFF, digest >> 16, *(counts[name] for name in names)])
        mean = own.to(device or self._device(), copy=True)
        arrived = self._manager.allreduce(mean).wait()
        if not arrived or not self._manager.is_participating():  # a group that returns takes part with zeros
            return
        found = mean.cpu()
        unequal = (found / found[0] - own).abs() > 1e-6
        if unequal.any():
            which = [name for name, differs in zip(names, unequal[3:].tolist()) if differs]
            text = f"other units than this one: {some_of(which)}" if which else "the same units in another order"
            self._manager.report_error(StateError(f"Another replica group ran {text}. Nobody steps."))

    def _device(self) -> torch.device:
        return units_of(self._model, True)[0].axis.device


def _state_of(name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the functions that get and put the state of an object."""
    if isinstance(value, dict):
        return value.copy, value.update
    for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if hasattr(value, get) and hasattr(value, put):
            return getattr(value, get), getattr(value, put)
    raise ValueError(
        f"also= has no state for {name!r}: expected state_dict(), get_state() or a dict, got {type(value).__name__}."
    )
