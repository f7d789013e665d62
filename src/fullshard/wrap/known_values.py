"""Values of meta tensors that follow from shapes and constants: buffers of a model, positions, masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fullshard import _torch

LARGEST = 1 << 24
"""Maximum number of elements of a known value. Larger values are not computed."""


class KnownValue:
    """Value of a tensor, as an operator applied to other known values. It is computed on first use.

    Attributes:
        of_batch: True if it depends on values of the batch, which differ between steps.
    """

    __slots__ = ("_args", "_func", "_index", "_kwargs", "_numel", "_value", "of_batch")

    def __init__(self, func: Any, args: Any, kwargs: Any, numel: int, index: int | None = None, *, of_batch: bool) -> None:
        self._func, self._args, self._kwargs, self._numel, self._index = func, args, kwargs, numel, index
        self._value: Tensor | None = None
        self.of_batch = of_batch

    @classmethod
    def constant(cls, value: Tensor, *, of_batch: bool = False) -> KnownValue:
        """Return the value of a tensor with data. The data is copied at once, since the tensor may be modified later."""
        known = cls(None, (), {}, value.numel(), of_batch=of_batch)
        if value.numel() <= LARGEST:
            known._value = value.detach().to("cpu", copy=True)
        return known

    def value(self) -> Tensor | None:
        """Return the value on the CPU, None if it is too large or cannot be computed there."""
        if self._func is not None and self._numel <= LARGEST:
            with suppress(Exception):  # no CPU kernel, or recursion too deep: the value is unknown
                self._value = self._compute()
            self._func = None
        return self._value

    def _compute(self) -> Tensor:
        # An operator that writes in place gets copies, since other known values share its inputs.
        copied = _torch.writes(self._func)

        def value_of(known: KnownValue) -> Tensor:
            value = known.value()
            if value is None:
                raise LookupError
            return value.clone() if copied else value

        args, kwargs = _torch.tree_map_only(KnownValue, value_of, (self._args, self._kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "cpu"}
        with torch.no_grad(), torch.device("cpu"):
            found: Any = self._func(*args, **kwargs)
        value: Tensor = found if self._index is None else found[self._index]
        return value


_WITHOUT_VALUES = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


class KnownValues:
    """Known values of meta tensors. A write to a storage, through any view or alias, removes the values of its tensors.

    Attributes:
        written: number of writes to each storage that was written to, by its key (`_torch.storage_key`).
    """

    def __init__(self) -> None:
        self._found = WeakTensorKeyDictionary()  # tensor -> its value, and the number of writes to its storage before
        self.written: Counter[int] = Counter()

    def record(self, tensor: Tensor, known: KnownValue) -> None:
        """Set the known value of `tensor`."""
        self._found[tensor] = known, self.written[_torch.storage_key(tensor)]

    def find(self, tensor: Tensor) -> KnownValue | None:
        """Return the known value of `tensor`, or None."""
        known, writes = self._found.get(tensor, (None, 0))
        if known is not None and writes == self.written[_torch.storage_key(tensor)]:
            return known
        return None if tensor.device.type == "meta" else KnownValue.constant(tensor)

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record the results of an operator: they are known if all its inputs are known."""
        made = self._made_by(func, args, kwargs, out)
        for tensor in _torch.written_to(func, args, kwargs):
            self.written[_torch.storage_key(tensor)] += 1
        for tensor, known in made:
            self.record(tensor, known)

    def _made_by(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> list[tuple[Tensor, KnownValue]]:
        if func.overloadpacket in _WITHOUT_VALUES or torch.Tag.nondeterministic_seeded in func.tags:
            return []
        several = isinstance(out, (list, tuple))
        outs = [(index, one) for index, one in enumerate(out if several else [out]) if isinstance(one, Tensor)]
        given = self._known_inputs(args, kwargs) if any(one.device.type == "meta" for _, one in outs) else None
        if given is None:
            return []
        known, of_batch = given
        return [
            (one, KnownValue(func, *known, one.numel(), index if several else None, of_batch=of_batch)) for index, one in outs
        ]

    def _known_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, Any], bool] | None:
        """Return the arguments with known values in place of tensors, and whether they depend on the batch; None if unknown."""
        inputs: list[KnownValue] = []

        def known(tensor: Tensor) -> KnownValue:
            found = self.find(tensor)
            if found is None:
                raise LookupError
            inputs.append(found)
            return found

        try:
            given = _torch.tree_map_only(Tensor, known, (args, dict(kwargs)))
        except LookupError:
            return None
        return given, any(one.of_batch for one in inputs)

    def computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool] | None:
        """Return (result, depends on the batch) of an operator whose output shape depends on values; None if unknown."""
        given = self._known_inputs(args, kwargs)
        value = None if given is None else KnownValue(func, *given[0], 0, of_batch=given[1]).value()
        return None if given is None or value is None else (value, given[1])


class ValuesMode(_torch.TorchDispatchMode):
    """Dispatch mode that records the values of tensors created while a model is built, such as its buffers."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._values.note(func, args, kwargs or {}, out)
        return out


_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}


class ConstantsMode(TorchFunctionMode):
    """Function mode that records meta tensors made from Python numbers: `torch.tensor(3.5)` dispatches no operator."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _OF_DATA and isinstance(out, Tensor) and out.device.type == "meta":
            # It raises if the data contains meta tensors. The value is unknown then.
            with torch.device("cpu"), suppress(Exception):
                made = func(*args, **{**(kwargs or {}), "device": "cpu"})
                self._values.record(out, KnownValue.constant(made))
        return out


def values_of_buffers(model: nn.Module, values: KnownValues) -> dict[str, KnownValue]:
    """Return the known values of buffers by name. Parameters are left out, since they change in each step."""
    found = {name: values.find(buffer) for name, buffer in model.named_buffers()}
    return {name: known for name, known in found.items() if known is not None}
