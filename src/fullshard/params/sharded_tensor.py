"""The class of sharded parameters: DTensors that, mixed with plain tensors, raise an error which names the parameter."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard import _torch
from fullshard.errors import StateError

LOGICAL = "_fullshard_parameter"  # on a sharded parameter: a weak reference to its ShardedParameter
_VIEWED = "_fullshard_viewed"  # on a view of a sharded parameter: the same
_BARE = "_fullshard_bare"  # on both: the DTensor over the same memory that torch computes with
_COPIED = "_fullshard_copied"  # on what torch gives as a view of a sharded parameter, but had to gather: writing to it is lost
_MIXED = "got mixed torch.Tensor and DTensor"
_MESHES = "on inputs with different meshes"
_UNKNOWN = "does not have a sharding strategy registered"
_WHOLE = (
    "of which a rank holds only its part then: use the whole one in `with fullshard.full_params(module):`, or initialise the "
    "model by fullshard.materialize(model, init=)"
)
_RANDOM = torch.Tag.nondeterministic_seeded
_FILLS = frozenset(  # operations that write all of their tensor and read nothing of it
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *((name, "default") for name in ("normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_")),
        *(("random_", overload) for overload in ("default", "from", "to")),
        ("bernoulli_", "float"),
        *((name, overload) for name in ("rand_like", "randn_like") for overload in ("default", "generator")),
        ("randint_like", "default"),
        ("randint_like", "low_dtype"),
        ("eye", "out"),
        ("eye", "m_out"),
    )
)
_ALIKE = frozenset(  # operations whose result may be filled with random numbers next, as orthogonal_ does
    (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
)


class ShardedDTensor(DTensor):
    """A sharded parameter, or a view of one. Other operations on it (and `detach()` of a parameter) give a DTensor.

    torch raises "got mixed torch.Tensor and DTensor" from its C++ parts, without a name. A subclass is asked first, computes
    with a bare DTensor over the same memory, names what it was given, and notes what was written. While an optimizer steps,
    instances sleep: their class is DTensor then, and so is what their operations cost. Attributes (`.grad`, `.shape`) are
    torch's own and cost nothing more.

    Random fills (`torch.nn.init`, `reset_parameters()`) draw the full tensor on each rank, which then keeps its part: with one
    seed on all ranks the full weights are those of the unsharded model, whatever the number of ranks, and the generator goes
    on alike. That takes the memory of one full parameter for a moment. Ranks of different seeds keep parts of different
    models; replicas are compared at the first forward, parts cannot be.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _FILLS and (filled := _filled(func, args, kwargs)) is not None:
            return filled
        sharded: list[ShardedDTensor] = []
        bare = [_bared(value, sharded) for value in args]
        out = kwargs.get("out") if kwargs else None
        if _RANDOM in func.tags or _torch.writes(func):
            _check(func, sharded, (args[0] if args else None, out))
            _before_writes((args[0] if args else None, out))
        if kwargs:
            kwargs = {key: _bared(value, sharded) for key, value in kwargs.items()}
        try:
            made = func(*bare, **(kwargs or {}))
        except RuntimeError as error:  # NotImplementedError among them
            text, names = str(error), _names(sharded)
            if not names or isinstance(error, StateError):
                raise
            if _MIXED not in text and _MESHES not in text:
                why = "" if _UNKNOWN in text else f" ({text.splitlines()[0] if text else type(error).__name__}),"
                raise StateError(f"{func} cannot be computed on sharded {names}{why} {_WHOLE}") from error
            other = "DTensors of another mesh" if _MESHES in text else "a plain tensor"
            raise StateError(
                f"{func} was given sharded {names} together with {other}: outside of that forward a rank holds only its "
                "part of the parameter. Compute with the tensors of `with fullshard.gathered(module)` (differentiable), call "
                "register_fsdp_forward_method() for the method that reads it, or keep it full in `with model.resident():`"
            ) from error
        if _torch.writes(func):
            _note_writes((args[0] if args else None, out), _torch.operation_name(func))
            return _originals(made, sharded)
        if func.is_view:
            for view in made if isinstance(made, (list, tuple)) else (made,):
                _name(view, sharded[0], func)
        elif func in _ALIKE and sharded:
            _name(made, sharded[0], func)
        return made

    @property
    def data(self) -> Any:
        """A tensor over the same memory, without a version counter: writes to it are noted all the same."""
        made = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        back = _back(self)
        if back is not None and type(made) is DTensor:
            made.__dict__[_VIEWED] = back
            _turn(made, ShardedDTensor)
        return made

    @data.setter
    def data(self, value: Any) -> None:
        """Of a parameter of a unit: the values are taken over, the memory stays. Raises StateError for what does not fit."""
        logical = _logical(self) if LOGICAL in self.__dict__ else None
        if logical is None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        else:
            logical.assign(value)

    def detach(self) -> Any:
        """As a DTensor's; while torch makes a Parameter, of this class."""
        made = super().detach()  # type: ignore[misc]
        if _torch.makes_parameter():  # which insists on the class it was given
            _turn(made, ShardedDTensor)
        return made

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:  # by which torch.compile makes one of its parts
        made = DTensor.__tensor_unflatten__(*args)
        _turn(made, ShardedDTensor)
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        made = _as_dtensor(self, DTensor.__deepcopy__, memo)  # type: ignore[attr-defined]
        _turn(made, ShardedDTensor)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_dtensor(self, DTensor.__reduce_ex__, protocol)


def as_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """A DTensor that was made for this becomes a Parameter."""
    made = _torch.turned_into_parameter(tensor, requires_grad)
    if _torch.HONOURS_SUBCLASSES:
        _turn(made, ShardedDTensor)  # as torch.utils.swap_tensors does
    return made


def _turn(tensor: Any, cls: type[DTensor]) -> None:
    tensor.__class__ = cls


def sleep(tensors: Iterable[Tensor]) -> None:
    """Let instances be DTensors until `wake`: an optimizer's operations then cost what they cost torch."""
    asleep = _ASLEEP.__dict__.setdefault("sharded", [])
    for tensor in tensors:
        if type(tensor) is ShardedDTensor:
            _turn(tensor, DTensor)
            asleep.append(tensor)


def wake() -> None:
    """Let all that this thread had sleep be ShardedDTensors again, also after an optimizer whose step raised."""
    asleep = _ASLEEP.__dict__.get("sharded")
    while asleep:
        tensor = asleep.pop()
        if type(tensor) is DTensor and LOGICAL in tensor.__dict__:
            _turn(tensor, ShardedDTensor)


_ASLEEP = threading.local()


def _bare(tensor: ShardedDTensor) -> DTensor:
    """The DTensor that torch computes with: over the same memory, so that it writes the same."""
    held = tensor.__dict__.get(_BARE)
    local, spec = _torch.local_tensor(tensor), _torch.spec_of(tensor)
    if held is None or _torch.local_tensor(held) is not local or _torch.spec_of(held) is not spec:
        held = tensor.__dict__[_BARE] = _torch.dtensor(local, spec)
    return held


def _filled(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of the full tensor, of which this rank's part is kept; None for a tensor on meta."""
    kwargs = dict(kwargs or {})
    outs = kwargs.pop("out", None)
    tensor = outs if outs is not None else args[0]
    local, spec = _torch.local_tensor(tensor), _torch.spec_of(tensor)
    if local.device.type == "meta":
        return None
    _check(func, [tensor], (tensor,))
    if not _torch.writes(func):  # a new one, like the tensor
        dtype = kwargs.get("dtype") or local.dtype
        full = func(_full_like(tensor), *args[1:], **kwargs)
        made = _torch.dtensor(_part(tensor, full).contiguous(), _torch.spec(spec.mesh, spec.placements, tensor.shape, dtype))
        _name(made, tensor, func)
        return made
    full = _full_like(tensor)
    if outs is not None:
        func(*args, **kwargs, out=full)
    else:
        func(full, *args[1:], **kwargs)
    _keep_part(tensor, full, _torch.operation_name(func))
    return tensor


def _truncated(original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """trunc_normal_, which draws again until nothing is left to reject; torch asks each rank for its own part only."""
    if type(tensor) is not ShardedDTensor or tensor.device.type == "meta":
        return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
    full = _full_like(tensor)
    original(full, *args, **kwargs)
    with torch.no_grad():
        _keep_part(tensor, full, "trunc_normal_()")
    return tensor


def _full_like(tensor: ShardedDTensor) -> Tensor:
    """Strides count too: random numbers are drawn in the order of memory."""
    local = _torch.local_tensor(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)


def _keep_part(tensor: ShardedDTensor, full: Tensor, how: str) -> None:
    part = _part(tensor, full)
    _before_writes(tensor)
    _torch.local_tensor(tensor).copy_(part)
    _note_writes(tensor, how)


def _part(tensor: ShardedDTensor, full: Tensor) -> Tensor:
    """This rank's part of `full`, (tensor.shape)."""
    logical, spec = _logical(tensor), _torch.spec_of(tensor)
    if logical is not None and tensor.shape == logical.shape and spec.placements == logical.sharding.placements:
        return logical.slice(full).view(_torch.local_tensor(tensor).shape)  # type: ignore[no-any-return]
    return _torch.local_tensor(distribute_tensor(full, spec.mesh, spec.placements, src_data_rank=None))


def _check(func: Any, sharded: list[ShardedDTensor], written: tuple[Any, ...]) -> None:
    """Raise StateError for what torch would do silently wrong."""
    if _RANDOM in func.tags and func not in _FILLS and (names := _names(sharded)):
        raise StateError(f"{func} would draw the same numbers for each part of sharded {names} {_WHOLE}")
    for one in written:
        if type(one) is ShardedDTensor and _COPIED in one.__dict__ and (names := _names([one])):
            raise StateError(f"{func} writes to an element or a row of sharded {names} {_WHOLE}")


def _bared(value: Any, sharded: list[ShardedDTensor]) -> Any:
    if type(value) is ShardedDTensor:
        sharded.append(value)
        return _bare(value)
    if isinstance(value, (list, tuple)) and any(type(one) is ShardedDTensor for one in value):
        return [_bared(one, sharded) for one in value]
    return value


def _originals(made: Any, sharded: list[ShardedDTensor]) -> Any:
    """The tensors that an operation wrote to, as they were given."""
    if isinstance(made, (list, tuple)):
        return type(made)(_originals(one, sharded) for one in made)
    if type(made) is DTensor:
        for tensor in sharded:
            if tensor.__dict__[_BARE] is made:
                return tensor
    return made


def _before_writes(written: Any) -> None:
    """Wait until sharded parameters may be written: a copy to the device may still read those in the host's memory."""
    if type(written) is ShardedDTensor:
        logical = _logical(written)
        if logical is not None:
            logical.wait_for_readers()
    elif isinstance(written, (list, tuple)):
        for one in written:
            _before_writes(one)


def _note_writes(written: Any, how: str) -> None:
    """Note writes to sharded parameters: some operations (foreach, or on `.data`) move no version counter that a gather reads.

    A rank that writes alone makes a patchwork of two models, so all ranks compare these notes.
    """
    if type(written) is ShardedDTensor:
        logical = _logical(written)
        if logical is not None:
            logical.note_write(how)
    elif isinstance(written, (list, tuple)):
        for one in written:
            _note_writes(one, how)


def _name(view: Any, tensor: ShardedDTensor, func: Any) -> None:
    back = tensor.__dict__.get(_VIEWED)
    if back is None:
        back = tensor.__dict__.get(LOGICAL)
        if func is torch.ops.aten.detach.default:
            return
    if back is not None and type(view) is DTensor:
        view.__dict__[_VIEWED] = back
        if func.is_view and (_COPIED in tensor.__dict__ or not _shares(view, tensor)):
            view.__dict__[_COPIED] = True
        _turn(view, ShardedDTensor)


def _shares(view: DTensor, tensor: ShardedDTensor) -> bool:
    mine, theirs = _torch.local_tensor(view), _torch.local_tensor(tensor)
    return mine.device.type == "meta" or _torch.same_storage(mine, theirs)


def _as_dtensor(tensor: ShardedDTensor, fn: Any, argument: Any) -> Any:
    """`fn` of a tensor that is of torch's own class meanwhile, for what asks for the very class."""
    tensor.__dict__.pop(_BARE, None)
    _turn(tensor, DTensor)
    try:
        return fn(tensor, argument)
    finally:
        _turn(tensor, ShardedDTensor)


def _back(tensor: Tensor) -> Any:
    """The way back to the ShardedParameter that `tensor` is, or is a view of; None if there is none."""
    return tensor.__dict__.get(LOGICAL) or tensor.__dict__.get(_VIEWED)


def _logical(tensor: Tensor) -> Any:
    """That ShardedParameter, None if its unit is gone."""
    back = _back(tensor)
    return None if back is None else back()


def _names(tensors: list[ShardedDTensor]) -> str:
    """Which parameters they are, and that their units' forward is not running; empty for parameters of units that are gone."""
    found = [logical for tensor in tensors if (logical := _logical(tensor)) is not None]
    parts = [f"parameter '{one.name}' of unit '{one.unit_name.name}', whose forward is not running," for one in found]
    return " and ".join(dict.fromkeys(parts))


_torch.extend_trunc_normal(_truncated)
