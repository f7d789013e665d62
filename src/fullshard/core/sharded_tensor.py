"""ShardedDTensor, the class of sharded parameters: a DTensor that names the parameter in errors, and records writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core.subclasses import exact_copy
from fullshard.errors import StateError

LOGICAL = "_fullshard_parameter"  # attribute of a sharded parameter: a weak reference to its ShardedParameter
_VIEWED = "_fullshard_viewed"  # the same reference, as attribute of views of a sharded parameter and of `_EMPTY_LIKE` results
_REMEDY = (
    "Use the unsharded parameter in `with fullshard.full_params(module):`, or initialize the model with "
    "fullshard.materialize(model, init=)."
)
# Results of these stay ShardedDTensors, so that `OPERATORS` handles random fills of them, as in torch.nn.init.orthogonal_.
_EMPTY_LIKE = frozenset((torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default))

OPERATORS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {}
"""Functions (operator, args, kwargs) that compute an operator on sharded parameters. If one returns None, DTensor computes."""


class ShardedDTensor(DTensor):
    """A sharded parameter, a view of one, an empty tensor like one, or a deep copy. Other results (`p.detach()`) are DTensors.

    torch raises "got mixed torch.Tensor and DTensor" in C++, without the name of the parameter. The `__torch_dispatch__` of a
    subclass runs before that error. docs/data-plane.md says what it does. Reading `.grad` or `.shape` costs nothing extra.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = OPERATORS.get(func)
        if handler is not None and (handled := handler(func, args, kwargs)) is not None:
            return handled
        given: dict[int, ShardedDTensor] = {}  # by id of the plain DTensor that takes its place
        plain_args, plain_kwargs = _to_plain(args, given), {key: _to_plain(value, given) for key, value in kwargs.items()}
        known = [one for tensor in given.values() if (one := parameter_of(tensor)) is not None]
        if handler is None and known and torch.Tag.nondeterministic_seeded in func.tags:
            raise StateError(
                f"{func} cannot be computed on sharded {_names(known)}: each shard could get the same numbers. {_REMEDY}"
            )
        written = [one for tensor in _torch.written_to(func, args, kwargs) if (one := parameter_of(tensor)) is not None]
        for logical in written:
            logical.wait_for_readers()
        try:
            made = func(*plain_args, **plain_kwargs)
        except RuntimeError as error:  # also NotImplementedError, a subclass
            if not known or isinstance(error, StateError):
                raise
            raise StateError(f"{func} {_reason(error, _names(known))}") from error
        for logical in written:  # foreach operations, and operators on `.data`, increase no version counter of the parameter
            logical.note_write()
        if _torch.writes(func):
            return _to_given(made, given)
        if func.is_view or func in _EMPTY_LIKE:
            # `detach` of a parameter gives a DTensor: state dicts detach them, and a checkpoint must load without fullshard.
            first = next(iter(given.values())).__dict__
            back = first.get(_VIEWED) or (None if func is torch.ops.aten.detach.default else first.get(LOGICAL))
            for view in made if isinstance(made, (list, tuple)) else (made,):
                _mark_view(view, back)
        return made

    @property
    def data(self) -> Any:
        """A view of the same memory. The parameter notes writes to it, also those to its local tensor."""
        made = _torch.with_version_of(torch.Tensor.data.__get__(self), self)  # type: ignore[attr-defined]
        _mark_view(made, self.__dict__.get(LOGICAL) or self.__dict__.get(_VIEWED))
        return made

    @data.setter
    def data(self, value: Any) -> None:
        """Copy the values into the shard of a parameter. Raise StateError if dtype or shape does not fit."""
        logical = parameter_of(self) if LOGICAL in self.__dict__ else None
        if logical is None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        else:
            logical.assign(value)

    # These methods may change how the parameter is reduced, so its group looks for changes before its next use.

    def _set_requires_grad(self, requires_grad: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        _note_change(self)

    requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[attr-defined, assignment]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set `requires_grad`, in place."""
        super().requires_grad_(requires_grad)
        _note_change(self)
        return self

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Register a hook on the gradient, as on other tensors."""
        _note_change(self)
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Register a hook that runs when `.grad` is set, as on other tensors."""
        _note_change(self)
        return super().register_post_accumulate_grad_hook(hook)

    def detach(self) -> Any:
        """Return a DTensor. If this is a view, or the constructor of nn.Parameter is the caller, return a ShardedDTensor."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # detach raises in that mode
            made: Any = _torch.with_version_of(super().detach(), self)  # type: ignore[misc, arg-type]
        if _torch.makes_parameter():  # nn.Parameter() requires that `detach` keeps the class
            made.__class__ = ShardedDTensor
        return made

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:  # torch.compile creates an instance from its inner tensors with this
        made: Any = DTensor.__tensor_unflatten__(*args)
        made.__class__ = ShardedDTensor
        return made

    def __deepcopy__(self: Any, memo: Any) -> Any:
        self.__class__ = DTensor  # clone() returns a DTensor, and __deepcopy__ requires that clone() keeps the class
        try:
            made = DTensor.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        finally:
            self.__class__ = ShardedDTensor
        made.__class__ = ShardedDTensor
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a DTensor over a copy of the shard.

        The pickle can be read without fullshard. If pickling moves tensors to shared memory, as for another process, it moves
        the copy, not the shard.
        """
        made: Any = _torch.dtensor(exact_copy(_torch.local_tensor(self), methods=False), _torch.spec_of(self))
        made.requires_grad_(self.requires_grad)
        made.__dict__.update((key, value) for key, value in self.__dict__.items() if not key.startswith("_fullshard"))
        return DTensor.__reduce_ex__(made, protocol)


def as_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """Turn `tensor` itself into a sharded parameter, without a copy: what refers to it refers to the parameter."""
    made: Any = _torch.turned_into_parameter(tensor, requires_grad)
    if _torch.HONOURS_SUBCLASSES:
        made.__class__ = ShardedDTensor  # as torch.utils.swap_tensors does
    return made


def _note_change(tensor: Tensor) -> None:
    logical = parameter_of(tensor)
    group = None if logical is None else logical.group()
    if group is not None:
        group.must_look = True


# Per thread, so that a forward, which calls `restore_subclass`, does not disturb an optimizer that steps in another thread.
_SWITCHED = threading.local()


def use_plain_dtensor(tensors: Iterable[Any]) -> None:
    """Set the class of ShardedDTensors to DTensor until `restore_subclass`, to spare an optimizer the extra dispatch."""
    switched: list[Any] = _SWITCHED.__dict__.setdefault("sharded", [])
    for tensor in tensors:
        if type(tensor) is ShardedDTensor:
            tensor.__class__ = DTensor  # type: ignore[assignment]
            switched.append(tensor)


def restore_subclass() -> None:
    """Undo `use_plain_dtensor` of this thread. The next outermost forward calls it, too, in case the step raised."""
    switched = _SWITCHED.__dict__.get("sharded")
    while switched:
        tensor = switched.pop()
        if type(tensor) is DTensor and LOGICAL in tensor.__dict__:
            tensor.__class__ = ShardedDTensor
            _note_change(tensor)  # the DTensor noted no changes


def _to_plain(value: Any, given: dict[int, ShardedDTensor]) -> Any:
    """Return an argument with plain DTensors of the same memory in place of ShardedDTensors. Add the latter to `given`."""
    if type(value) is ShardedDTensor:
        plain = _torch.dtensor(_torch.local_tensor(value), _torch.spec_of(value))
        given[id(plain)] = value
        return plain
    return [_to_plain(one, given) for one in value] if isinstance(value, (list, tuple)) else value


def _to_given(made: Any, given: dict[int, ShardedDTensor]) -> Any:
    """Return the result of a writing operator, with the given ShardedDTensors in place of their plain DTensors."""
    if isinstance(made, (list, tuple)):
        return type(made)(_to_given(one, given) for one in made)
    return given.get(id(made), made)


def _mark_view(view: Any, back: Any) -> None:
    """Make `view` a ShardedDTensor. Writes to it count as writes to the parameter that `back` refers to."""
    if back is not None and type(view) is DTensor:
        view.__dict__[_VIEWED] = back
        view.__class__ = ShardedDTensor


def parameter_of(tensor: Tensor) -> Any:
    """Return the ShardedParameter of a ShardedDTensor; None for deep copies and others, and if the parameter was deleted."""
    back = tensor.__dict__.get(LOGICAL) or tensor.__dict__.get(_VIEWED)
    return None if back is None else back()


def _names(known: Sequence[Any]) -> str:
    """Return the names of parameters and their units for error texts."""
    return " and ".join(dict.fromkeys(f"parameter '{one.name}' of unit '{one.unit_name.name}'" for one in known))


def _reason(error: RuntimeError, names: str) -> str:
    """Return why an operator cannot be computed, and what to do, from the error of DTensor."""
    text = str(error)
    if "got mixed torch.Tensor and DTensor" in text or "on inputs with different meshes" in text:
        other = "a plain tensor" if "got mixed" in text else "DTensors of another mesh"
        return (
            f"cannot combine sharded {names} with {other}: outside of the unit's forward a rank has only its shard. Compute "
            "with the tensors of `with fullshard.gathered(module)` (differentiable), call register_fsdp_forward_method() for "
            "the method that reads the parameter, or keep it unsharded in `with model.resident():`."
        )
    is_told = "does not have a sharding strategy registered" in text
    why = "" if is_told else f" ({(text or type(error).__name__).splitlines()[0]})"
    return f"cannot be computed on sharded {names}{why}: outside of the unit's forward a rank has only its shard. {_REMEDY}"
