"""`EMA`: exponential moving averages of a model's weights, cut as the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.frontend.module import units_of
from fullshard.params.group import ParamGroup
from fullshard.runtime.runtime import runtime_of
from fullshard.weights.allocating import check_values, has_marks
from fullshard.weights.meeting import Meeting
from fullshard.weights.targets import Held, ModelTensors, tensors_of


class _Flat:
    """The averages of one group's flat shard: memory of the same layout."""

    def __init__(self, group: ParamGroup, dtype: torch.dtype, device: torch.device | None) -> None:
        self.group = group
        self.flat = group.shard.detach().to(dtype=dtype, device=device, copy=True)

    def views(self) -> Iterator[tuple[Any, Tensor]]:
        """Each parameter, and its average: this rank's part."""
        for parameter, place in zip(self.group.parameters, self.group.layout.places):
            local = parameter.local
            yield parameter, self.flat[place.offset :][: local.numel()].view(local.shape)


class EMA:
    """Averages of a model's floating-point parameters: after each update, average = decay * average + (1 - decay) * weight.

    Each rank averages its own shards, by one operation for each flat shard, and nothing is sent. Buffers are not averaged.

    Args:
        model: sharded or not, with values.
        decay: from 0 to 1; what stays of an average.
        dtype: of the averages.
        device: of the averages; None takes that of the shards.
        every: only each so manyth call of `update` averages.
        warmup: if given, the n-th update (from 0) takes min(decay, (1 + n) / (warmup + n)), so that the first weights are
            forgotten sooner; 10 is usual.

    Raises:
        ValueError: for values that cannot be, or a model on meta.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> ema = EMA(model, 0.9)
        >>> ema.update()                                                                      # after optimizer.step()
        >>> with ema.swapped():                                                               # the averages are the weights
        ...     loss = model(torch.ones(2)).sum()

    Source: Polyak and Juditsky 1992; `torch.optim.swa_utils.get_ema_multi_avg_fn`, whose arithmetic this is.
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
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        for name, value in (("every", every), ("warmup", 1 if warmup is None else warmup)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        self.decay, self.every, self.warmup = float(decay), every, warmup
        self.calls = self.updates = 0
        self._model, self._dtype = model, dtype
        self._device = None if device is None else torch.device(device)
        tensors = self._tensors("EMA()")
        empty = [held.names[0] for held in tensors.held if held.local.device.type == "meta"]
        if empty:
            raise ValueError(f"'{empty[0]}' is on meta and has no values: load_weights() or materialize() the model before")
        if has_marks(model, tensors.units):
            Meeting(tensors, "EMA()").run(lambda: check_values(model, tensors.units, "EMA()"))
        self._units = tensors.units
        self._flats = [self._flat_of(group) for group in self._groups()]
        slots = {id(one): (module, key) for module in model.modules() for key, one in _torch.parameters_of(module).items()}
        plain = [held for held in tensors.held if isinstance(held.plain, nn.Parameter) and held.local.is_floating_point()]
        self._plain = {held.names[0]: held.local.to(dtype=dtype, device=self._device, copy=True) for held in plain}
        self._slots = [(held.names[0], *slots[id(held.plain)]) for held in plain]
        self._names = [name for name, _ in model.named_parameters()]
        self._swapped = 0  # how many blocks of swapped() there are around

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "EMA belongs to its model and cannot be copied or pickled: make EMA(the other model), and give it "
            "load_state_dict(ema.state_dict())"
        )

    def _flat_of(self, group: ParamGroup) -> _Flat:
        return _Flat(group, self._dtype, self._device)

    def _groups(self) -> list[ParamGroup]:
        return [group for unit in self._units for group in unit.groups if group.shard.is_floating_point()]

    def _settle(self, doing: str) -> None:
        """Have shards in the modules, and the averages in their layout."""
        self._check_same_parameters(doing)
        for unit in self._units:
            requests = runtime_of(unit).requests
            requests.check_idle(unit, doing=doing)
            if not all(group.is_current(trainability=False) for group in unit.groups):
                requests.ensure_sharded(unit, doing=doing)
                requests.refresh(unit)
        groups = self._groups()
        if len(groups) != len(self._flats) or any(flat.group is not group for flat, group in zip(self._flats, groups)):
            self._follow(groups)

    def _check_same_parameters(self, doing: str) -> None:
        """Refuse a model with other parameters or units than it had. Raises StateError naming one."""
        if sum(1 for _ in self._model.parameters()) != len(self._names):
            names = [name for name, _ in self._model.named_parameters()]
            added = next((name for name in names if name not in set(self._names)), None)
            gone = next((name for name in self._names if name not in set(names)), "a parameter")
            told = f"'{gone}' was taken away" if added is None else f"'{added}' was added"
            raise StateError(f"{doing}: {told} after EMA(), and there is no average for it: make the averages anew")
        if self._units and not any(True for _ in units_of(self._model, True)):
            raise StateError(f"{doing}: the model was sharded when EMA() was made, and undo() was called since: make it anew")

    def _tensors(self, doing: str) -> ModelTensors:
        """The model's, with shards in its modules."""
        tensors = tensors_of(self._model)
        for unit in tensors.units:
            runtime_of(unit).requests.ensure_sharded(unit, doing=doing)
            runtime_of(unit).requests.refresh(unit)
        return tensors_of(self._model)

    def _follow(self, groups: list[ParamGroup]) -> None:
        """Groups were made anew: take the averages along to their layout."""
        known = {id(parameter): view for flat in self._flats for parameter, view in flat.views()}
        here = {id(parameter) for group in groups for parameter in group.parameters}
        gone = [parameter.name for flat in self._flats for parameter in flat.group.parameters if id(parameter) not in here]
        if gone:
            raise StateError(f"'{gone[0]}' moved to another unit after EMA(): make the averages of a model after fully_shard")
        self._flats = [self._flat_of(group) for group in groups]
        for flat in self._flats:
            for parameter, view in flat.views():
                if id(parameter) in known:
                    view.copy_(known[id(parameter)])

    @property
    def _casts(self) -> bool:
        """Whether weights are of another dtype or device than their averages."""
        tensors = [*(flat.group.shard for flat in self._flats), *(getattr(module, key) for _, module, key in self._slots)]
        return self._device is not None or any(tensor.dtype != self._dtype for tensor in tensors)

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights of now into the averages; to be called after each optimizer step.

        Raises:
            StateError: inside a forward or backward, inside `swapped()`, or if the model was sharded or changed since.
        """
        if self._swapped:
            raise StateError("EMA.update() inside of swapped(), where the averages are the weights: update before or after it")
        self.calls += 1
        if self.calls % self.every:
            return
        decay = self.decay
        if self.warmup is not None:
            decay = min(decay, (1 + self.updates) / (self.warmup + self.updates))
        self._settle("EMA.update()")
        plain = [self._plain_now(name, module, key) for name, module, key in self._slots]
        self.updates += 1
        averages = [*(flat.flat for flat in self._flats), *self._plain.values()]
        weights = [*(flat.group.shard for flat in self._flats), *plain]
        if self._casts:
            weights = [weight.to(dtype=self._dtype, device=average.device) for average, weight in zip(averages, weights)]
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)

    def _plain_now(self, name: str, module: nn.Module, key: str) -> Tensor:
        parameter = getattr(module, key)
        if isinstance(parameter, DTensor):
            raise StateError(f"'{name}' was sharded after EMA(): make the averages of a model after fully_shard")
        return parameter.detach()

    def values(self) -> dict[str, Tensor]:
        """The averages.

        Returns:
            By the parameter's first name, this rank's part.
        """
        self._settle("EMA.values()")
        tensors = tensors_of(self._model)
        views = {id(parameter): view for flat in self._flats for parameter, view in flat.views()}
        found = {held.names[0]: views.get(id(held.parameter)) for held in tensors.held if held.parameter is not None}
        return {**{name: view for name, view in found.items() if view is not None}, **self._plain}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the averages be the weights for the length of a block. Collective.

        The weights come back at its end, also after an exception; they are kept beside the averages meanwhile.

        Raises:
            StateError: inside a forward or backward.

        Example:
            >>> with ema.swapped():                                                           # doctest: +SKIP
            ...     evaluate(model)
        """
        before = self._exchange(self.values())
        self._swapped += 1
        try:
            yield
        finally:
            self._swapped -= 1
            self._exchange(before)

    @torch.no_grad()
    def _exchange(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write these to the weights. Returns the values of before."""
        tensors = self._tensors("EMA.swapped()")
        before: dict[str, Tensor] = {}
        for held in tensors.held:
            value = values.get(held.names[0])
            if value is None:
                continue
            if held.parameter is not None:
                held.parameter.wait_for_readers()
            before[held.names[0]] = held.local.clone()
            held.local.copy_(value)
            if held.parameter is not None:
                held.parameter.note_write()
        for unit in tensors.units:
            unit.log_write("EMA.swapped()")
        return before

    def state_dict(self) -> dict[str, Any]:
        """The averages and how many updates there were.

        Returns:
            `averages`: by name, DTensors cut as the parameters are (views of the averages); `calls` and `updates`.
        """
        values = self.values()
        averages = {held.names[0]: _as_dtensor(held, values[held.names[0]]) for held in self._held() if held.names[0] in values}
        return {"averages": averages, "calls": self.calls, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on any number of ranks.

        Args:
            state: with averages as DTensors like the parameters, or as full tensors.

        Raises:
            ValueError: for names that do not fit; nothing was changed then.
            StateError: for an average of another shape.
        """
        missing = [key for key in ("averages", "calls", "updates") if not isinstance(state, Mapping) or key not in state]
        if missing:
            raise ValueError(f"the state has no {missing[0]!r}: expected what EMA.state_dict() gives, got {_short(state)}")
        values, averages = self.values(), state["averages"]
        wrong = [name for name, value in averages.items() if not isinstance(value, Tensor)]
        if wrong:
            raise ValueError(f"the average of {wrong[0]!r} must be a tensor, got a {type(averages[wrong[0]]).__name__}")
        for name in sorted({*values} ^ {*averages}):
            told = ("no ", "the model has it") if name in values else ("", "the model has none of that name")
            raise ValueError(f"the state has {told[0]}average of '{name}', and {told[1]}")
        for held in self._held():
            name = held.names[0]
            if name in values:
                value = averages[name]
                if held.parameter is not None:
                    value = held.parameter.sharding.rows_of(value, name=name, doing="was to be averaged by")
                elif value.shape != values[name].shape:
                    raise StateError(
                        f"the average of '{name}' has shape {tuple(value.shape)}, the parameter {held.target.shape}"
                    )
                values[name].copy_(value.view(values[name].shape))
        self.calls, self.updates = int(state["calls"]), int(state["updates"])

    def _held(self) -> tuple[Held, ...]:
        return tensors_of(self._model).held


def _short(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    return f"a dict of {', '.join(map(repr, list(state)[:4])) or 'nothing'}"


def _as_dtensor(held: Held, value: Tensor) -> Tensor:
    return value if held.parameter is None else held.parameter.dtensor_like_shard(value)


__all__ = ["EMA"]
