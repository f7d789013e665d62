"""Values of tensor subclasses, such as quantized weights: tensors inside of them, exact copies, attributes of instances."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch


def is_plain(tensor: Tensor) -> bool:
    """Return True if `tensor` is a strided torch.Tensor, not of a subclass. For a Parameter, pass its `.data`."""
    return type(tensor) is Tensor and tensor.layout == torch.strided


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that have the values of `tensor`: itself, or those inside of a subclass.

    They are the ones that `__tensor_flatten__` names; without it, the attributes that are tensors.
    """
    if type(tensor) is Tensor:
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
    else:
        slots: list[Any] = [vars(cls).get("__slots__", ()) for cls in type(tensor).__mro__]
        names = [name for one in slots for name in ((one,) if isinstance(one, str) else one)] + list(vars(tensor))
    parts = [getattr(tensor, name, None) for name in names]
    return [inner for part in parts if isinstance(part, Tensor) and part is not tensor for inner in inner_tensors(part)]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a parameter or buffer of this rank consists of; for a DTensor those of its local tensor."""
    if isinstance(tensor, DTensor):
        tensor = _torch.local_tensor(tensor.detach())
    return inner_tensors(tensor.data if isinstance(tensor, nn.Parameter) else tensor)


def exact_copy(tensor: Tensor, *, methods: bool = True) -> Tensor:
    """Return a copy with equal bits, memory of its own and equal attributes.

    With `methods`, also methods that were set on the instance, such as all-gather hooks, which no pickle can hold.
    """
    if is_plain(tensor):
        made = tensor.detach().clone()
    else:
        # Not `clone`: in some subclasses it quantizes again, which changes the values. Every subclass that can be sharded has
        # `new_zeros` and `copy_`.
        made = tensor.new_zeros(tensor.shape)
        if tensor.numel():
            made.copy_(tensor)
    take_attributes(tensor, made, methods=methods)
    return made


def take_attributes(source: Tensor, target: Tensor, *, values: bool = True, methods: bool = True) -> None:
    """Copy to `target` the attributes of `source` that `target` lacks or has as None.

    `values`: those that are not callable, such as a precomputed scale. `methods`: callable ones, such as all-gather hooks.
    """
    for key, kept in vars(source).items():
        if vars(target).get(key) is None and (methods if callable(kept) else values):
            # A method bound to `source` would read the data of `source`.
            bound = isinstance(kept, MethodType) and kept.__self__ is source
            setattr(target, key, MethodType(kept.__func__, target) if bound else kept)
