"""`EMA`: exponential moving averages of a model's weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import ParamGroup, Unit, clean_name, units_of, values_of
from fullshard.errors import StateError, check_float_dtype, check_int
from fullshard.weights.allocating import check_values, has_marks
from fullshard.weights.targets import ModelEntry, ModelTensors, tensors_of


class _FlatAverages:
    """Averages of one parameter group: a buffer with the layout of the group's flat shard."""

    def __init__(self, group: ParamGroup, dtype: torch.dtype, device: torch.device | None) -> None:
        self.group = group
        self.buffer = self.weights.detach().to(dtype=dtype, device=device, copy=True)  # the averages, (shard_numel,)

    @property
    def weights(self) -> Tensor:
        """The weights, (shard_numel,): the flat shard, or the tensor inside of a subclass."""
        if self.group.flat:
            return self.group.shard
        values = values_of(self.group.parameters[0].local)
        assert values is not None  # `EMA._groups` has checked that
        return values.view(-1)

    def views(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield (parameter, this rank's shard of its average) as views of the buffer."""
        for parameter, place in zip(self.group.parameters, self.group.shard_layout.offsets):
            local = parameter.local
            yield parameter, self.buffer[place.offset :][: local.numel()].view(local.shape)


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
        if has_marks(model, tensors.units):
            tensors.agreement("EMA()").run(lambda: check_values(model, tensors.units, "EMA()"))
        self._units = tensors.units
        self._averages = [_FlatAverages(group, self._dtype, self._device) for group in self._groups()]
        slots = {id(one): (module, key) for module in model.modules() for key, one in _torch.parameters_of(module).items()}
        plain = [
            entry for entry in tensors.entries if isinstance(entry.plain, nn.Parameter) and entry.local.is_floating_point()
        ]
        self._plain = {entry.names[0]: entry.local.to(dtype=dtype, device=self._device, copy=True) for entry in plain}
        self._slots = [(entry.names[0], *slots[id(entry.plain)]) for entry in plain]
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
            if parameter.local.is_floating_point() and (group.flat or values_of(parameter.local) is not None):
                found.append(group)
            elif not group.flat and group.trainable:
                raise StateError(
                    f"Parameter '{parameter.name}' of unit '{parameter.unit_name.name}' cannot be averaged: its values are "
                    f"computed by a {type(parameter.local).__name__}. Freeze it with requires_grad_(False), which leaves it "
                    "out of the averages."
                )
        return found

    def _update_layout(self, doing: str) -> None:
        """Reshard the model if needed, and bring the averages into the current layout of its groups."""
        self._check_same_parameters(doing)
        for unit in self._units:
            unit.check_idle(doing=doing)
        groups = self._groups()
        if len(groups) != len(self._averages) or any(flat.group is not group for flat, group in zip(self._averages, groups)):
            self._rebuild(groups)

    def _check_same_parameters(self, doing: str) -> None:
        """Raise StateError naming a parameter if parameters were added or removed, or if the model was unsharded by undo()."""
        if sum(1 for _ in self._model.parameters()) != len(self._names):
            names = [clean_name(name) for name, _ in self._model.named_parameters()]
            added = next((name for name in names if name not in set(self._names)), None)
            gone = next((name for name in self._names if name not in set(names)), "a parameter")
            change = f"'{gone}' was removed" if added is None else f"'{added}' was added"
            raise StateError(f"{doing}: {change} after EMA() was created, so averages and parameters differ. Create a new EMA.")
        if self._units and not any(True for _ in units_of(self._model, True)):
            raise StateError(
                f"{doing}: the model was sharded when EMA() was created, and undo() was called since. Create a new EMA."
            )

    def _tensors(self, doing: str) -> ModelTensors:
        """Reshard the model if needed, and return its tensors."""

        def prepare(unit: Unit) -> None:
            unit.ensure_sharded(doing=doing)
            unit.refresh()

        return tensors_of(self._model, prepare=prepare)

    def _rebuild(self, groups: list[ParamGroup]) -> None:
        """Move the averages into new buffers with the layout of `groups`, which replace the previous groups."""
        old_views = {id(parameter): view for flat in self._averages for parameter, view in flat.views()}
        new_ids = {id(parameter) for group in groups for parameter in group.parameters}
        moved = [
            parameter.name for flat in self._averages for parameter in flat.group.parameters if id(parameter) not in new_ids
        ]
        if moved:
            raise StateError(f"'{moved[0]}' moved to another unit after EMA() was created. Create EMA after fully_shard().")
        self._averages = [_FlatAverages(group, self._dtype, self._device) for group in groups]
        for flat in self._averages:
            for parameter, view in flat.views():
                if id(parameter) in old_views:
                    view.copy_(old_views[id(parameter)])

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
        self._update_layout("EMA.update()")
        plain = [self._plain_weight(name, module, key) for name, module, key in self._slots]
        self.calls += 1  # after the checks, which may raise
        self.updates += 1
        averages = [*(flat.buffer for flat in self._averages), *self._plain.values()]
        weights = [*(flat.weights for flat in self._averages), *plain]
        weights = [weight.to(dtype=self._dtype, device=average.device) for average, weight in zip(averages, weights)]
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)
            # On a GPU it does not, and iter_full() would not notice that it runs across an update.
            torch.autograd.graph.increment_version([one for one in averages if not one.is_inference()])

    def _plain_weight(self, name: str, module: nn.Module, key: str) -> Tensor:
        parameter = getattr(module, key)
        if isinstance(parameter, DTensor):
            raise StateError(f"'{name}' was sharded after EMA() was created. Create EMA after fully_shard().")
        return parameter.detach()

    def values(self) -> dict[str, Tensor]:
        """Return the averages.

        Returns:
            This rank's shard of each average, by the first name of the parameter.
        """
        self._update_layout("EMA.values()")
        tensors = tensors_of(self._model)
        views = {id(parameter): view for flat in self._averages for parameter, view in flat.views()}
        sharded = {entry.names[0]: views[id(entry.parameter)] for entry in tensors.entries if id(entry.parameter) in views}
        return {**sharded, **self._plain}

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
        weights = {
            entry.names[0]: _memory(entry.local).clone()
            for entry in self._tensors("EMA.swapped()").entries
            if averages.get(entry.names[0]) is not None
        }
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
        for entry in (entry for entry in tensors.entries if values.get(entry.names[0]) is not None):
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
        values, entries = self.values(), {entry.names[0]: entry for entry in tensors_of(self._model).entries}
        averages = {name: _to_dtensor(entry, values[name]) for name, entry in entries.items() if name in values}
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
            raise ValueError(
                f"The state has no {missing[0]!r}: expected the result of EMA.state_dict(), got {_describe(state)}."
            )
        for key in ("calls", "updates"):
            check_int(f"{key} of the state", state[key], least=0)
        values, averages = self.values(), state["averages"]
        wrong = [name for name, value in averages.items() if not isinstance(value, Tensor)]
        if wrong:
            raise ValueError(f"The average of {wrong[0]!r} must be a tensor, got a {type(averages[wrong[0]]).__name__}.")
        for name in sorted({*values} ^ {*averages}):
            if name in values:
                raise ValueError(f"The state has no average of '{name}', which is a parameter of the model.")
            raise ValueError(f"The state has an average of '{name}', which is no averaged parameter of the model.")
        given: dict[str, Tensor] = {}  # all of them, before the first is written
        for entry in tensors_of(self._model).entries:
            name = entry.names[0]
            if name in values:
                value = averages[name]
                if entry.parameter is not None:
                    value = entry.parameter.sharding.rows_of(value, name=name, what="the average")
                elif value.shape != values[name].shape:
                    raise StateError(
                        f"The average of '{name}' has shape {tuple(value.shape)}, its parameter {entry.target.shape}."
                    )
                given[name] = value.view(values[name].shape)
        calls, updates = int(state["calls"]), int(state["updates"])
        for name, value in given.items():
            values[name].copy_(value)
        self.calls, self.updates = calls, updates


def _describe(state: Any) -> str:
    """Return the type of `state`, and its first keys if it is a dict, for an error text."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    return f"a dict of {', '.join(map(repr, list(state)[:4])) or 'nothing'}"


def _memory(tensor: Tensor) -> Tensor:
    """Return the plain tensor with the values of a weight."""
    values = values_of(tensor.detach())
    return tensor.detach() if values is None else values


def _to_dtensor(entry: ModelEntry, value: Tensor) -> Tensor:
    return value if entry.parameter is None else entry.parameter.dtensor_like_shard(value)
