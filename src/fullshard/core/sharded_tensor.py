"""ShardedDTensor, the class of sharded parameters: a DTensor whose errors name the parameter, and that records writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard import _torch
from fullshard.core.subclasses import exact_copy
from fullshard.errors import StateError

LOGICAL = "_fullshard_parameter"  # attribute of a sharded parameter: a weak reference to its ShardedParameter
_VIEWED = "_fullshard_viewed"  # attribute of a view of a sharded parameter: the same reference
_PLAIN = _torch.PLAIN  # attribute of both: a plain DTensor with the same memory, with which operations compute
_MIXED = "got mixed torch.Tensor and DTensor"
_OTHER_MESHES = "on inputs with different meshes"
_NO_STRATEGY = "does not have a sharding strategy registered"
_REMEDY = (
    "Use the unsharded parameter in `with fullshard.full_params(module):`, or initialize the model with "
    "fullshard.materialize(model, init=)."
)
_RANDOM_TAG = torch.Tag.nondeterministic_seeded
# Their results stay ShardedDTensors: torch.nn.init.orthogonal_ fills such a result with random numbers and copies it back.
_EMPTY_LIKE = frozenset((torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default))

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""Computes an operator, (operator, args, kwargs), on sharded parameters. None: compute it as without a handler."""

_HANDLERS: dict[Any, Handler] = {}


def register_operator(operator: Any, handler: Handler) -> None:
    """Let `handler` compute an operator on sharded parameters, in place of DTensor."""
    _HANDLERS[operator] = handler


class ShardedDTensor(DTensor):
    """A sharded parameter, or a view of one. Other operations return DTensors, as does `detach()` of a parameter.

    torch raises "got mixed torch.Tensor and DTensor" in C++, without the name of the parameter. The `__torch_dispatch__` of a
    subclass runs before that: it computes with a plain DTensor that has the same memory, names the parameter in errors, and
    records writes. During `optimizer.step()` the class of the instances is DTensor, so a step costs as much as with DTensors.
    Reading attributes (`.grad`, `.shape`) costs nothing extra.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None and (handled := handler(func, args, kwargs or {})) is not None:
            return handled
        sharded: list[ShardedDTensor] = []
        plain = [_to_plain(value, sharded) for value in args]
        out = kwargs.get("out") if kwargs else None
        if _RANDOM_TAG in func.tags or _torch.writes(func):
            _check_random(func, sharded)
            _before_writes((args[0] if args else None, out))
        if kwargs:
            kwargs = {key: _to_plain(value, sharded) for key, value in kwargs.items()}
        try:
            made = func(*plain, **(kwargs or {}))
        except RuntimeError as error:  # also NotImplementedError, a subclass
            text, names = str(error), _names(sharded)
            if not names or isinstance(error, StateError):
                raise
            if _MIXED not in text and _OTHER_MESHES not in text:
                why = "" if _NO_STRATEGY in text else f" ({text.splitlines()[0] if text else type(error).__name__})"
                raise StateError(
                    f"{func} cannot be computed on sharded {names}{why}: outside of the unit's forward a rank has only its "
                    f"shard. {_REMEDY}"
                ) from error
            other = "DTensors of another mesh" if _OTHER_MESHES in text else "a plain tensor"
            raise StateError(
                f"{func} cannot combine sharded {names} with {other}: outside of the unit's forward a rank has only its shard. "
                "Compute with the tensors of `with fullshard.gathered(module)` (differentiable), call "
                "register_fsdp_forward_method() for the method that reads the parameter, or keep it unsharded in "
                "`with model.resident():`."
            ) from error
        if _torch.writes(func):
            _note_writes((args[0] if args else None, out))
            return _original_tensors(made, sharded)
        if func.is_view:
            for view in made if isinstance(made, (list, tuple)) else (made,):
                _tag_view(view, sharded[0], func)
        elif func in _EMPTY_LIKE and sharded:
            _tag_view(made, sharded[0], func)
        return made

    @property
    def data(self) -> Any:
        """A DTensor with the same memory and a separate version counter. Writes to it are recorded all the same."""
        made = _torch.with_version_of(torch.Tensor.data.__get__(self), self)  # type: ignore[attr-defined]
        back = _back_reference(self)
        if back is not None and type(made) is DTensor:
            made.__dict__[_VIEWED] = back
            _set_class(made, ShardedDTensor)
        return made

    @data.setter
    def data(self, value: Any) -> None:
        """Copy the values into the shard of a parameter. Raise StateError if dtype or shape does not fit."""
        logical = _logical(self) if LOGICAL in self.__dict__ else None
        if logical is None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        else:
            logical.assign(value)

    def detach(self) -> Any:
        """Return a DTensor, or a ShardedDTensor if the constructor of nn.Parameter is the caller."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # torch's raises there
            made = _torch.with_version_of(super().detach(), self)  # type: ignore[misc, arg-type]
        if _torch.makes_parameter():  # it requires that `detach` returns the class of its argument
            _set_class(made, ShardedDTensor)
        return made

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:  # torch.compile creates an instance from its inner tensors with this
        made = DTensor.__tensor_unflatten__(*args)
        _set_class(made, ShardedDTensor)
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        made = _as_dtensor(self, DTensor.__deepcopy__, memo)  # type: ignore[attr-defined]
        _set_class(made, ShardedDTensor)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a DTensor over a copy of the shard.

        It can be read without fullshard, and a pickle that puts tensors in shared memory, as for another process, does not
        take the memory of the shard.
        """
        made: Any = _torch.dtensor(exact_copy(_torch.local_tensor(self), methods=False), _torch.spec_of(self))
        made.requires_grad_(self.requires_grad)
        made.__dict__.update((key, value) for key, value in self.__dict__.items() if not key.startswith("_fullshard"))
        return DTensor.__reduce_ex__(made, protocol)


def as_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """Turn `tensor`, which nothing else references, into a sharded parameter."""
    made = _torch.turned_into_parameter(tensor, requires_grad)
    if _torch.HONOURS_SUBCLASSES:
        _set_class(made, ShardedDTensor)  # as torch.utils.swap_tensors does
    return made


def _set_class(tensor: Any, cls: type[DTensor]) -> None:
    tensor.__class__ = cls


def use_plain_dtensor(tensors: Iterable[Tensor]) -> None:
    """Set the class of ShardedDTensors to DTensor until `restore_subclass`, to spare an optimizer the extra dispatch."""
    switched = _SWITCHED.__dict__.setdefault("sharded", [])
    for tensor in tensors:
        if type(tensor) is ShardedDTensor:
            _set_class(tensor, DTensor)
            switched.append(tensor)


def restore_subclass() -> None:
    """Undo `use_plain_dtensor` of this thread. Also called later, for an optimizer whose step raised."""
    switched = _SWITCHED.__dict__.get("sharded")
    while switched:
        tensor = switched.pop()
        if type(tensor) is DTensor and LOGICAL in tensor.__dict__:
            _set_class(tensor, ShardedDTensor)


# Per thread: every forward calls `restore_subclass`, also while an optimizer steps in another thread.
_SWITCHED = threading.local()


def _plain_dtensor(tensor: ShardedDTensor) -> DTensor:
    """Return a plain DTensor with the same memory, with which operations compute. Cached on `tensor`."""
    cached = tensor.__dict__.get(_PLAIN)
    local, spec = _torch.local_tensor(tensor), _torch.spec_of(tensor)
    if cached is None or _torch.local_tensor(cached) is not local or _torch.spec_of(cached) is not spec:
        cached = tensor.__dict__[_PLAIN] = _torch.dtensor(local, spec)
    return cached


def unsharded_like(tensor: ShardedDTensor) -> Tensor:
    """Return an uninitialized tensor with the shape and strides of the unsharded parameter."""
    # Strides matter, because random numbers are drawn in memory order.
    local = _torch.local_tensor(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)


def store_shard(tensor: ShardedDTensor, full: Tensor) -> None:
    """Copy this rank's shard of `full`, (tensor.shape), into the parameter."""
    part = local_rows(tensor, full)
    _before_writes(tensor)
    _torch.local_tensor(tensor).copy_(part)
    _note_writes(tensor)


def local_rows(tensor: ShardedDTensor, full: Tensor) -> Tensor:
    """Return this rank's shard of `full`, (tensor.shape)."""
    logical, spec = _logical(tensor), _torch.spec_of(tensor)
    if logical is not None and tensor.shape == logical.shape and spec.placements == logical.sharding.placements:
        return logical.slice(full).view(_torch.local_tensor(tensor).shape)  # type: ignore[no-any-return]
    return _torch.local_tensor(distribute_tensor(full, spec.mesh, spec.placements, src_data_rank=None))


def _check_random(func: Any, sharded: list[ShardedDTensor]) -> None:
    """Raise StateError for a random operation without a handler: each shard would get the same numbers."""
    if _RANDOM_TAG in func.tags and func not in _HANDLERS and (names := _names(sharded)):
        raise StateError(f"{func} cannot be computed on sharded {names}: each shard would get the same numbers. {_REMEDY}")


def _to_plain(value: Any, sharded: list[ShardedDTensor]) -> Any:
    if type(value) is ShardedDTensor:
        sharded.append(value)
        return _plain_dtensor(value)
    if isinstance(value, (list, tuple)) and any(type(one) is ShardedDTensor for one in value):
        return [_to_plain(one, sharded) for one in value]
    return value


def _original_tensors(made: Any, sharded: list[ShardedDTensor]) -> Any:
    """Return the ShardedDTensors that were passed to a writing operation, in place of the plain DTensors in its result."""
    if isinstance(made, (list, tuple)):
        return type(made)(_original_tensors(one, sharded) for one in made)
    if type(made) is DTensor:
        for tensor in sharded:
            if tensor.__dict__[_PLAIN] is made:
                return tensor
    return made


def _before_writes(written: Any) -> None:
    """Block the host until no copy to the device reads the shards in host memory that are about to be written."""
    if type(written) is ShardedDTensor:
        logical = _logical(written)
        if logical is not None:
            logical.wait_for_readers()
    elif isinstance(written, (list, tuple)):
        for one in written:
            _before_writes(one)


def _note_writes(written: Any) -> None:
    """Record writes to sharded parameters: foreach operations and writes through `.data` increase no version counter."""
    if type(written) is ShardedDTensor:
        logical = _logical(written)
        if logical is not None:
            logical.note_write()
    elif isinstance(written, (list, tuple)):
        for one in written:
            _note_writes(one)


def _tag_view(view: Any, tensor: ShardedDTensor, func: Any) -> None:
    back = tensor.__dict__.get(_VIEWED)
    if back is None:
        back = tensor.__dict__.get(LOGICAL)
        if func is torch.ops.aten.detach.default:
            return  # a DTensor, since state dicts detach parameters and a checkpoint must load without fullshard
    if back is not None and type(view) is DTensor:
        view.__dict__[_VIEWED] = back
        _set_class(view, ShardedDTensor)


def _as_dtensor(tensor: ShardedDTensor, fn: Any, argument: Any) -> Any:
    """Call `fn` while the class of `tensor` is DTensor, for functions that require exactly that class."""
    tensor.__dict__.pop(_PLAIN, None)
    _set_class(tensor, DTensor)
    try:
        return fn(tensor, argument)
    finally:
        _set_class(tensor, ShardedDTensor)


def _back_reference(tensor: Tensor) -> Any:
    """Return the reference to the ShardedParameter of a sharded parameter or of a view of one, else None."""
    return tensor.__dict__.get(LOGICAL) or tensor.__dict__.get(_VIEWED)


def _logical(tensor: Tensor) -> Any:
    """Return the ShardedParameter of `tensor`, or None if its unit was deleted."""
    back = _back_reference(tensor)
    return None if back is None else back()


def _names(tensors: list[ShardedDTensor]) -> str:
    """Return the names of the parameters and their units for error texts, without parameters of deleted units."""
    found = [logical for tensor in tensors if (logical := _logical(tensor)) is not None]
    parts = [f"parameter '{one.name}' of unit '{one.unit_name.name}'" for one in found]
    return " and ".join(dict.fromkeys(parts))
