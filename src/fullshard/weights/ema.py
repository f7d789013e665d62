"""`EMA`: exponential moving averages of a model's weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import ParamGroup, ShardedParameter, clean_name, inner_tensors, units_of
from fullshard.errors import StateError, check_float_dtype, check_int
from fullshard.weights.allocating import check_values
from fullshard.weights.targets import ModelEntry, ModelTensors, tensors_of, with_values


class EMA:
    """Averages of a model's floating-point parameters: each update sets average = decay * average + (1 - decay) * weight.

    Each rank averages its own shards with one operation for all flat shards, without communication. Buffers are not averaged.

    Args:
        model: sharded or not; its parameters must have values.
        decay: weight of the old average in an update, from 0 to 1.
        dtype: dtype of the averages.
        device: device of the averages; None means the device of the shards.
        every: average only on every `every`-th call of `update`.
        warmup: if given, update n (from 0) uses min(decay, (1 + n) / (warmup + n)) as decay, so that the first weights are
            forgotten sooner. 10 is a usual value.

    Raises:
        ValueError: if an argument is invalid, or a parameter is on meta.
        StateError: if a trainable parameter is a tensor subclass of several tensors, here and in `update`.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> ema = EMA(model, 0.9)
        >>> ema.update()                                                                      # after optimizer.step()
        >>> with ema.swapped():                                                               # use the averages as weights
        ...     loss = model(torch.ones(2)).sum()

    Source: Polyak and Juditsky 1992; the arithmetic is that of `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        every: int = 1,
        warmup: int | None = None,
    ) -> None:
        if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number from 0 to 1, got {decay!r}")
        check_float_dtype("dtype", dtype)
        for name, value in (("every", every), ("warmup", 1 if warmup is None else warmup)):
            check_int(name, value)
        self.decay, self.every, self.warmup = float(decay), every, warmup
        self.calls = self.updates = 0
        self._model, self._dtype = model, dtype
        self._device = None if device is None else torch.device(device)
        tensors = self._tensors("EMA()")
        tensors.check_not_on_meta()
        check_values(model, tensors, "EMA()")
        self._units = tensors.units
        self._averages: dict[ShardedParameter, Tensor] = {}  # this rank's shards, views of the buffers
        self._lay_out(self._groups())
        slots = {id(one): (module, key) for module in model.modules() for key, one in _torch.parameters_of(module).items()}
        plain = [one for one in tensors.entries if isinstance(one.plain, nn.Parameter) and one.local.is_floating_point()]
        self._plain = {one.names[0]: one.local.to(dtype=dtype, device=self._device, copy=True) for one in plain}
        self._slots = [(one.names[0], *slots[id(one.plain)]) for one in plain]
        self._names = [clean_name(name) for name, _ in model.named_parameters()]
        self._swapped = 0  # number of swapped() blocks that are open

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "EMA cannot be copied or pickled: it refers to its model. Create EMA(other_model) and call its "
            "load_state_dict(ema.state_dict())."
        )

    def _groups(self) -> list[ParamGroup]:
        """Return the parameter groups that are averaged: groups of floating-point parameters.

        Left out are frozen tensor subclasses of several tensors, such as quantized weights beside adapters. Raises StateError
        for trainable ones.
        """
        found: list[ParamGroup] = []
        for group in (group for unit in self._units for group in unit.groups):
            parameter = group.parameters[0]
            if group.flat or _values_of(parameter.local) is not None:
                found += [group] if parameter.local.is_floating_point() else []
            elif group.trainable:
                raise StateError(
                    f"Parameter '{parameter.name}' of unit '{parameter.unit_name.name}' cannot be averaged: its values are "
                    f"computed by a {type(parameter.local).__name__}. Freeze it with requires_grad_(False), which leaves it "
                    "out of the averages."
                )
        return found

    def _lay_out(self, groups: list[ParamGroup]) -> None:
        """Give the averages one buffer per group, with the layout of its flat shard. New averages begin with the weights."""
        before = self._averages
        self._buffers = [(group, _flat(group).to(dtype=self._dtype, device=self._device, copy=True)) for group in groups]
        self._averages = {
            parameter: buffer[place.offset :][: parameter.local.numel()].view(parameter.local.shape)
            for group, buffer in self._buffers
            for parameter, place in zip(group.parameters, group.shard_layout.offsets)
        }
        for parameter, average in self._averages.items():
            if parameter in before:
                average.copy_(before[parameter])

    def _check(self, doing: str) -> None:
        """Bring the averages into the layout of the groups.

        Raises StateError inside a forward or backward, or if the model was sharded, unsharded or changed since `EMA()`.
        """
        if sum(1 for _ in self._model.parameters()) != len(self._names):
            names = [clean_name(name) for name, _ in self._model.named_parameters()]
            added = next((name for name in names if name not in set(self._names)), None)
            gone = next((name for name in self._names if name not in set(names)), "a parameter")
            change = f"'{gone}' was removed" if added is None else f"'{added}' was added"
            raise StateError(f"{doing}: {change} after EMA() was created, so averages and parameters differ. Create a new EMA.")
        if self._units and not units_of(self._model, True):
            raise StateError(
                f"{doing}: the model was sharded when EMA() was created, and undo() was called since. Create a new EMA."
            )
        for unit in self._units:
            if unit.runtime.is_of_this_thread:  # on another one, `state_dict` reads averages while the model trains
                unit.check_idle(doing=doing)
        groups = self._groups()
        if groups != [group for group, _ in self._buffers]:
            found = {parameter for group in groups for parameter in group.parameters}
            moved = next((parameter.name for parameter in self._averages if parameter not in found), None)
            if moved is not None:
                raise StateError(f"'{moved}' moved to another unit after EMA() was created. Create EMA after fully_shard().")
            self._lay_out(groups)
        for name, module, key in self._slots:
            if isinstance(getattr(module, key), DTensor):
                raise StateError(f"'{name}' was sharded after EMA() was created. Create EMA after fully_shard().")

    def _tensors(self, doing: str) -> ModelTensors:
        """Reshard the model if needed, and return its tensors."""
        return tensors_of(self._model, prepare=lambda unit: unit.ensure_sharded(doing=doing))

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights. Call it after each optimizer step.

        Raises:
            StateError: inside a forward or backward, inside `swapped()`, or if the model was sharded or changed since `EMA()`.
        """
        if self._swapped:
            raise StateError(
                "EMA.update() cannot run inside swapped(), where the averages are the weights. Update before or after it."
            )
        if (self.calls + 1) % self.every:
            self.calls += 1
            return
        decay = self.decay
        if self.warmup is not None:
            decay = min(decay, (1 + self.updates) / (self.warmup + self.updates))
        self._check("EMA.update()")
        weights = [_flat(group) for group, _ in self._buffers]
        weights += [getattr(module, key).detach() for _, module, key in self._slots]
        self.calls += 1  # after the checks, which may raise
        self.updates += 1
        averages = [*(buffer for _, buffer in self._buffers), *self._plain.values()]
        weights = [weight.to(dtype=self._dtype, device=average.device) for average, weight in zip(averages, weights)]
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)
            # On a GPU it does not, and iter_full() would not notice that it runs across an update.
            torch.autograd.graph.increment_version([one for one in averages if not one.is_inference()])

    def values(self) -> dict[str, Tensor]:
        """Return the averages.

        Returns:
            This rank's shard of each average, by the first name of the parameter.
        """
        return {entry.names[0]: average for entry, average in self._pairs("EMA.values()")}

    def over(self, tensors: ModelTensors) -> ModelTensors:
        """Return the tensors of the model with the averages as values.

        Args:
            tensors: those of the model.

        Returns:
            The tensors, of which the averaged ones have other values and dtypes.
        """
        return with_values(tensors, self.values())

    def _pairs(self, doing: str) -> list[tuple[ModelEntry, Tensor]]:
        """Return the averaged tensors of the model, each with this rank's shard of its average."""
        self._check(doing)
        found: list[tuple[ModelEntry, Tensor]] = []
        for entry in tensors_of(self._model).entries:
            name, parameter = entry.names[0], entry.parameter
            average = self._plain.get(name) if parameter is None else self._averages.get(parameter)
            if average is not None:
                found.append((entry, average))
        return found

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Use the averages as weights inside a `with` block. Collective.

        The weights are restored at the end of the block, also after an exception. Inside the block, memory holds the weights
        and the averages.

        Raises:
            StateError: inside a forward or backward.

        Example:
            >>> with ema.swapped():                                                           # doctest: +SKIP
            ...     evaluate(model)
        """
        averages = self.values()
        # All copies before anything is written, since memory may run out.
        entries = self._tensors("EMA.swapped()").entries
        weights = {one.names[0]: _memory(one.local).clone() for one in entries if one.names[0] in averages}
        self._write(averages)
        self._swapped += 1
        try:
            yield
        finally:
            self._swapped -= 1
            self._write(weights)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the weights with `values`, which needs no memory."""
        tensors = self._tensors("EMA.swapped()")
        for entry in (entry for entry in tensors.entries if entry.names[0] in values):
            if entry.parameter is not None:
                entry.parameter.wait_for_readers()  # a copy to the device may still read the shard (CPU offload)
            _memory(entry.local).copy_(values[entry.names[0]])
            if entry.parameter is not None:
                entry.parameter.note_write()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates.

        Returns:
            A dict with `averages` (by name, DTensors with the placements of the parameters, views of the averages), `calls`
            and `updates`.
        """
        averages = {
            entry.names[0]: value if entry.parameter is None else entry.parameter.dtensor_like_shard(value)
            for entry, value in self._pairs("EMA.state_dict()")
        }
        return {"averages": averages, "calls": self.calls, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, which may come from another number of ranks.

        Args:
            state: the averages in it are full tensors, or DTensors with the placements of the parameters.

        Raises:
            ValueError: if names do not match those of the model; the averages are unchanged then.
            StateError: if an average has a different shape than its parameter.
        """
        missing = [key for key in ("averages", "calls", "updates") if not isinstance(state, Mapping) or key not in state]
        if missing:
            keys = ", ".join(map(repr, list(state)[:4])) if isinstance(state, Mapping) else ""
            got = f"a dict of {keys or 'nothing'}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
            raise ValueError(f"The state has no {missing[0]!r}: expected the result of EMA.state_dict(), got {got}.")
        for key in ("calls", "updates"):
            check_int(f"{key} of the state", state[key], least=0)
        pairs, averages = self._pairs("EMA.load_state_dict()"), state["averages"]
        wrong = [name for name, value in averages.items() if not isinstance(value, Tensor)]
        if wrong:
            raise ValueError(f"The average of {wrong[0]!r} must be a tensor, got a {type(averages[wrong[0]]).__name__}.")
        expected = {entry.names[0] for entry, _ in pairs}
        for name in sorted(expected ^ {*averages}):
            if name in expected:
                raise ValueError(f"The state has no average of '{name}', which is a parameter of the model.")
            raise ValueError(f"The state has an average of '{name}', which is no averaged parameter of the model.")
        given: list[Tensor] = []  # all of them, before the first is written
        for entry, own in pairs:
            name, value = entry.names[0], averages[entry.names[0]]
            if entry.parameter is not None:
                value = entry.parameter.sharding.rows_of(value, name=name, what="the average")
            elif value.shape != own.shape:
                raise StateError(f"The average of '{name}' has shape {tuple(value.shape)}, its parameter {entry.target.shape}.")
            given.append(value.view(own.shape))
        for (_, own), value in zip(pairs, given):
            own.copy_(value)
        self.calls, self.updates = state["calls"], state["updates"]


def _flat(group: ParamGroup) -> Tensor:
    """Return this rank's weights of a group, (shard_numel,)."""
    return group.shard.detach() if group.flat else _memory(group.parameters[0].local).view(-1)


def _memory(tensor: Tensor) -> Tensor:
    """Return the plain tensor with the values of a weight."""
    values = _values_of(tensor.detach())
    return tensor.detach() if values is None else values


def _values_of(tensor: Tensor) -> Tensor | None:
    """Return the plain tensor that has the values of `tensor`: itself, or the only one inside of a subclass.

    None for a subclass whose values are computed from several tensors, or from one of another shape or dtype.
    """
    found = inner_tensors(tensor)
    fits = len(found) == 1 and found[0].shape == tensor.shape and found[0].dtype == tensor.dtype
    return found[0] if fits and found[0].is_contiguous() else None
