"""One step of a model on meta: when modules are entered and left, when their backward begins, and what lives meanwhile."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.collectives.traffic import Message
from fullshard.foresight.kernels import fused_kernels, host_kernels
from fullshard.foresight.precision import NOTHING_CAST, Precision
from fullshard.foresight.values import Answers, Untraceable, UntraceablePlace, decide
from fullshard.frontend.api import collector_paused
from fullshard.frontend.hooks import cast_floats, tensors_in
from fullshard.frontend.known_values import ConstantsMode, Known, Values
from fullshard.runtime.backward import NodeHooks
from fullshard.wrap.tables import bytes_text


@dataclass(frozen=True, slots=True)
class Enter:
    """A forward of a module begins; in the midst of a backward it is a recomputation."""

    module: str
    in_backward: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """A forward of a module ends. call: its number, of which a `Backward` may come; -1 if nothing of it needs grad."""

    module: str
    call: int
    grad: bool  # whether grad was enabled
    in_backward: bool


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a call begins."""

    module: str
    call: int


@dataclass(frozen=True, slots=True)
class Op:
    """An operator computes. flops: of matrix products and attention, a multiply-add is two; nbytes: read and written.

    dtype: of its first floating-point input (of the real part, if that is complex), None if it has none.
    causal: whether it computes half of these flops.
    sizes: of a product (rows, inner, columns), of attention (elements of a head, keys of a row), of others none.
    """

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype | None
    causal: bool = False
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Born:
    """A storage is allocated."""

    storage: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Died:
    """A storage is freed."""

    storage: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter is whole, in this storage; from here on it is the library's."""

    parameter: str
    storage: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Ranks of tensor parallelism send each other something, and wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class BackwardEnds:
    """A backward of the loss is over."""


Event = Exchanged | Enter | Leave | Backward | Op | Born | Died | Gradient | BackwardEnds


@dataclass(frozen=True, slots=True)
class Trace:
    """What one forward, loss and backward of a model does, in order. Its parameters have the compute dtype.

    events: in order.      buffers: bytes of the model's buffers.      batch: bytes of the inputs.
    kept: storages that a forward leaves to its backward, which are activations; all others are temporaries.
    recomputed: flops of forwards that a backward runs again.
    inputs: by module, the floating-point dtypes of its inputs before they are cast; modules without any are left out.
    notes: lines of a report: what values of the batch decided that others might decide otherwise, what the step does that is
        not simulated, and unused footprints.
    compiled: whether it calls anything that torch.compile made; it is traced as it was written.
    """

    events: tuple[Event, ...]
    buffers: int
    batch: int
    kept: frozenset[int]
    recomputed: int
    inputs: Mapping[str, frozenset[torch.dtype]]
    notes: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def flops(self) -> int:
        """Of the whole step."""
        return sum(event.flops for event in self.events if isinstance(event, Op))

    def makers(self) -> dict[int, str]:
        """By storage, the operator that it was allocated for."""
        found: dict[int, str] = {}
        born: list[int] = []
        for event in self.events:
            if isinstance(event, Born):
                born.append(event.storage)
            elif isinstance(event, Op | Exchanged):
                name = event.name if isinstance(event, Op) else event.message.kind
                found |= dict.fromkeys(born, name.removeprefix("aten.").removesuffix(".default"))
                born.clear()
        return found

    @property
    def multiplied(self) -> set[torch.dtype]:
        """The dtypes of products."""
        return {event.dtype for event in self.events if isinstance(event, Op) and event.flops and event.dtype is not None}


Footprint = Callable[..., Any]
"""Called with the arguments of an operator, returns tensors on meta, or a number, in its place."""


def routed(share: float, imbalance: float = 1.0) -> Footprint:
    """What `nonzero` returns of a mask that chooses a part of its elements, as the tokens of an expert.

    Args:
        share: the part of the elements that is chosen: 1 / experts of a mask of (tokens, chosen experts).
        imbalance: how many times as many are chosen, each time: 1.0 for a router that is balanced, more for a bound on what the
            busiest expert needs (all of them get so many, and so do flops).

    Returns:
        A footprint for `explain(footprints={"aten::nonzero": ...})`.

    Raises:
        ValueError: if `share` is not between 0 and 1, or `imbalance` is less than 1.

    Example:
        >>> tuple(routed(1 / 8, imbalance=1.5)(torch.empty(64, 2, device="meta")).shape)      # 1.5 x 128 / 8 of them
        (24, 2)
    """
    if not 0 < share <= 1 or imbalance < 1:
        raise ValueError(f"routed() takes a share between 0 and 1 and an imbalance of at least 1, got {share!r}, {imbalance!r}")

    def nonzero(mask: Tensor) -> Tensor:
        chosen = min(mask.numel(), ceil(mask.numel() * share * imbalance))
        return torch.empty(chosen, mask.dim(), dtype=torch.long, device=mask.device)

    return nonzero


_NO_KERNEL = {
    torch.ops.aten.detach,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    _torch.unsafe_view,
}


def _op_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, given: Sequence[Tensor], outs: Sequence[Tensor]
) -> Op:
    """What an operator computes, reads and writes."""
    flops = _torch.count_flops(func, args, kwargs, out)
    nbytes = 0 if func.overloadpacket in _NO_KERNEL else sum(t.numel() * t.itemsize for t in (*given, *outs))
    if func.overloadpacket is torch.ops.aten.embedding:  # of the table it reads some rows
        nbytes -= args[0].numel() * args[0].itemsize
    numbers = next((t.dtype for t in given if t.dtype.is_floating_point or t.dtype.is_complex), None)
    dtype = None if numbers is None else numbers.to_real()
    if numbers is not None and numbers.is_complex:
        flops *= 4  # multiplications of real numbers
    causal = bool(flops) and bool(_torch.argument(func, "is_causal", args, kwargs))
    return Op(str(func), flops, nbytes, dtype, causal, _torch.sizes_of_product(func, args) if flops else ())


_PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.convolution,
}
_ATTENTION = {_torch.flash_attention, _torch.efficient_attention}


def _refuse_mixed(func: Any, given: Sequence[Tensor]) -> None:
    """Refuse a product of several dtypes, as devices do, and meta does not."""
    if func.overloadpacket in _PRODUCTS:
        found = dict.fromkeys(tensor.dtype for tensor in given)
    elif func.overloadpacket in _ATTENTION:  # lengths and seeds are integers, masks may be bools
        found = dict.fromkeys(tensor.dtype for tensor in given if tensor.dtype.is_floating_point)
    else:
        return
    if len(found) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
        raise UntraceablePlace(
            f"{func.overloadpacket} gets {names}, which no device multiplies: cast one of them, as by .to(), or choose another "
            "mp_policy= (parameters compute in its param_dtype)"
        )


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """What the result of an operator depends on, on meta; None if that is not known."""
    found: list[object] = [func]
    for arg in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            if arg.device.type != "meta":
                return None
            found.append((arg.shape, arg.stride(), arg.dtype))
        elif isinstance(arg, (list, tuple)):
            if not all(isinstance(one, (int, bool, float, str)) for one in arg):
                return None
            found.append(tuple(arg))
        elif arg is None or isinstance(arg, (int, float, str, torch.dtype, torch.layout, torch.memory_format, torch.device)):
            found.append((type(arg), arg))
        else:
            return None
    return tuple(found)


def _maker(
    func: Any, args: Sequence[Any], out: Any, given: Sequence[Tensor], outs: Sequence[Tensor]
) -> Callable[[Sequence[Any]], Any] | None:
    """What makes the same result again: new tensors on meta, or the first argument, written in place. None if it is neither."""
    if isinstance(out, Tensor) and args and out is args[0]:
        return lambda args: args[0]
    storages = {_torch.storage_key(tensor) for tensor in given}
    keys = [_torch.storage_key(tensor) for tensor in outs]
    fresh = len(set(keys)) == len(keys) and not storages & set(keys) and all(t.device.type == "meta" for t in outs)
    whole = all(t.untyped_storage().nbytes() == t.numel() * t.itemsize and not t.storage_offset() for t in outs)
    if _torch.writes(func) or not (fresh and whole):
        return None
    shapes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in outs]
    if isinstance(out, Tensor):
        (shape, stride, dtype) = shapes[0]
        return lambda args: torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if type(out) is tuple and len(out) == len(outs):
        return lambda args: tuple(torch.empty_strided(s, at, dtype=d, device="meta") for s, at, d in shapes)
    return None


_ADD = torch.ops.aten.add.Tensor


@cache
def _references_of_one() -> tuple[int, int]:
    """How many references a gradient has in a dispatch mode if autograd alone holds it."""
    found: list[tuple[int, int]] = []

    class Counts(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                found.append(_torch.references(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, device="meta", requires_grad=True)
    left, right = x * 2, x * 3
    with Counts(), torch.enable_grad():
        torch.autograd.grad((left, right), x, (torch.ones_like(x), torch.ones_like(x)))
    return found[0]


@cache
def _takes_itself_apart(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) not in (None, Tensor.__torch_dispatch__)


def _called(told: Any) -> Footprint:
    return told if callable(told) else lambda *_, **__: told


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


_EQUAL, _COPIED = torch.ops.aten.equal.default, _torch.copied.default
_ASKS = {_EQUAL, _COPIED, _torch.item.default}


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


class _CallHook:
    """Rides on the graph of one call, and says when its backward begins."""

    __slots__ = ("_reached", "_recorder", "event")

    def __init__(self, recorder: _Recorder, event: Backward) -> None:
        self._recorder, self.event, self._reached = recorder, event, False

    def __call__(self, *_: object) -> None:
        if not self._reached:
            self._reached = True
            self._recorder.nested |= not self._recorder.in_backward
            self._recorder.events.append(self.event)


class _Recorder(_torch.TorchDispatchMode):
    """Notes operators, and storages from the operator that makes them until the last reference to them is gone."""

    def __init__(self, footprints: Mapping[str, Footprint], answers: Answers | None = None) -> None:
        super().__init__()
        self._answers = Answers({}) if answers is None else answers
        self.values = Values()
        self._footprints = {name.replace("::", "."): _called(told) for name, told in footprints.items()}
        self._references_of_one = _references_of_one()
        self.inputs: dict[str, set[torch.dtype]] = {}
        self.events: list[Event] = []
        self._known: dict[int, int] = {}  # address of a storage that lives -> its number, -1 if it was there before
        self._known_ops: dict[object, tuple[Op, Callable[[Sequence[Any]], Any]]] = {}
        self._storages = self._calls = 0
        self.recomputed = 0  # flops
        self.not_simulated: dict[str, None] = {}  # names of operators that send messages of the model's own
        self.nested = False  # whether the forward or the loss computes gradients
        self.in_backward = False
        self.kept: frozenset[int] = frozenset()

    def know(self, tensors: Sequence[Tensor]) -> int:
        """These were there before; how many bytes they have."""
        tensors = [_torch.local_part(tensor) for tensor in tensors]
        found = {_torch.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._known |= dict.fromkeys(found, -1)
        return sum(found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, _torch.FakeTensor) for kind in types):
            return func(*args, **kwargs)  # the rules of DTensor ask such tensors for shapes
        if any(_takes_itself_apart(kind) for kind in types):
            return NotImplemented  # a subclass, as torchao's for float8, takes itself apart, and its parts come here
        if func.is_view:
            out = func(*args, **kwargs)
            self.values.note(func, args, kwargs, out)
            return out
        sent = _torch.functional_collective(func, args)
        if sent is not None:
            kind, ranks = sent
            out = func(*args, **kwargs)
            nbytes = max(t.numel() * t.itemsize for t in (args[0], out))
            self.events.append(Exchanged(Message(kind, args[0].dtype, nbytes, 1, ranks)))
            self._note(out)
            return out
        if func is _ADD and not torch.is_grad_enabled() and _torch.current_graph_task() != -1:
            summed = self._sum_in_place(*args)
            if summed is not None:
                self.events.append(Op(str(func), 0, 3 * summed.numel() * summed.itemsize, summed.dtype))
                return summed
        told = self._footprints and str(func.overloadpacket) in self._footprints  # may say something else each time
        key = None if told else _key(func, args, kwargs)
        known = None if key is None else self._known_ops.get(key)
        if known is not None:
            op, makes = known
            out = makes(args)
            for tensor in out if type(out) is tuple else (out,):
                self._note(tensor)
            self.values.note(func, args, kwargs, out)
        else:
            out = self._run(func, args, kwargs)
            if not told:
                self.values.note(func, args, kwargs, out)
            outs = [leaf for leaf in _torch.tree_leaves(out) if isinstance(leaf, Tensor)]
            given = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            _refuse_mixed(func, given)
            if _torch.sends_messages(func):
                self.not_simulated[str(func.overloadpacket).replace(".", "::")] = None
            op = _op_of(func, args, kwargs, out, given, outs)
            for tensor in outs:
                self._note(tensor)
            makes_ = None if key is None else _maker(func, args, out, given, outs)
            if makes_ is not None:
                self._known_ops[key] = op, makes_
        self.events.append(op)
        if op.flops and torch.is_grad_enabled() and _torch.current_graph_task() != -1:  # a recomputation builds a graph there
            self.recomputed += op.flops
        return out

    def _sum_in_place(self, one: Any, other: Any, *_: Any) -> Tensor | None:
        """The gradient that autograd adds another one to, if one of them is held by nobody else.

        Under a dispatch mode autograd makes a new tensor of two gradients that meet, as it does for subclasses of Tensor.
        """
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype:
            for held in (one, other):
                if held.is_contiguous() and _torch.references(held) == self._references_of_one:
                    return held
        return None

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, or have its footprint say what it returns. One that only writes changes nothing on meta."""
        if _torch.only_writes(func) and all(t.device.type == "meta" for t in args[0] if isinstance(t, Tensor)):
            return None
        footprint = self._footprint(str(func.overloadpacket))
        if footprint is not None:
            found = footprint(*args, **kwargs)
            if _torch.returns_tensors(func) and not isinstance(found, (Tensor, list, tuple)):
                name = str(func.overloadpacket)
                raise Untraceable(
                    f"the footprint of {name} gives {found!r}, and the operator returns a tensor: give one on meta"
                )
            return found
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and _has_mask(args[1]):
            nonzero = torch.ops.aten.nonzero.default
            places = [
                place
                for index in args[1]
                for place in (self._run(nonzero, (index,), {}).unbind(1) if _has_mask([index]) else (index,))
            ]
            args = (args[0], places, *args[2:])
        if func in _ASKS:
            return self._asked(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and func.overloadpacket is not torch.ops.aten.index:
            chosen = self.values.computed(func, args, kwargs)
            if chosen is not None:
                self._answers.shaped(chosen[0], of_batch=chosen[1])
                return _torch.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), chosen[0])
        if func.overloadpacket is _torch.grouped_mm and args[0].dtype != torch.bfloat16:  # which is all that meta takes
            return _torch.grouped_mm_shape(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as failure:
            if "meta" in str(failure).lower():
                self._answers.refused = failure
            raise

    def _footprint(self, name: str) -> Footprint | None:
        """What the user says that an operator returns."""
        if name in self._footprints:
            self._answers.used.add(name)
        return self._footprints.get(name)

    def _asked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a program gets that asks for values."""
        if func is _EQUAL:
            one, other = args
            if one.shape != other.shape:
                return False
            known = self.values.find(one), self.values.find(other)
            return self._answers.equal(*known)
        if func is _COPIED and not (args[0].device.type == "meta" and _is_host(kwargs.get("device"))):
            return func(*args, **kwargs)
        known_ = self.values.find(args[0])
        if func is _COPIED:
            return self._answers.on_host(args[0], known_).to(kwargs.get("dtype") or args[0].dtype)
        return self._answers.scalar(args[0], known_)

    def _note(self, tensor: Tensor) -> None:
        key = _torch.storage_key(tensor)
        if key in self._known or tensor.device.type != "meta":  # numbers of the host
            return
        storage = tensor.untyped_storage()
        self._storages += 1
        self._known[key] = self._storages
        self.events.append(Born(self._storages, storage.nbytes()))
        weakref.finalize(storage, self._forget, key, self._storages).atexit = False

    def _forget(self, key: int, number: int) -> None:
        self._known.pop(key, None)
        self.events.append(Died(number))

    def hold(self, model: nn.Module, batch: Any, known: Mapping[str, Known], of_batch: Sequence[Known | None]) -> None:
        """Some buffers and tensors of the batch hold this."""
        for name, buffer in model.named_buffers():
            if name in known:
                self.values.keep(buffer, known[name])
        for tensor, value in zip((leaf for leaf in _torch.tree_leaves(batch) if isinstance(leaf, Tensor)), of_batch):
            if value is not None:
                self.values.keep(tensor, value)

    def numpy(self, tensor: Tensor) -> Tensor:
        """The values of a tensor on meta that a program makes an array of."""
        return self._answers.on_host(tensor, self.values.find(tensor))

    def begin_backward(self) -> None:
        """What lives now is what the forward leaves to its backward."""
        self.kept = frozenset(number for number in self._known.values() if number >= 0)
        self.in_backward = True

    # --- modules and parameters ---

    def before_forward(self, name: str, inputs: Sequence[Tensor]) -> None:
        """A forward of a module begins."""
        self.events.append(Enter(name, _torch.current_graph_task() != -1))
        for tensor in inputs:
            if tensor.dtype.is_floating_point:
                self.inputs.setdefault(name, set()).add(tensor.dtype)

    def after_forward(self, name: str, output: Any) -> None:
        """It ended: have the graph of its output say when its backward begins."""
        hook: _CallHook | None = None
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                if hook is None:
                    self._calls += 1
                    hook = _CallHook(self, Backward(name, self._calls))
                NodeHooks.on(tensor.grad_fn).add(hook)  # type: ignore[arg-type]
        call = -1 if hook is None else hook.event.call
        self.events.append(Leave(name, call, torch.is_grad_enabled(), _torch.current_graph_task() != -1))

    def take_gradient(self, name: str, parameter: Tensor) -> None:
        """The gradient of a parameter is whole."""
        grad = parameter.grad
        if grad is None:
            raise Untraceable(
                f"the gradient of '{name}' is gone where it was to be taken: a hook of the parameter takes it, as an optimizer "
                "in the backward does, or an operator has no gradient, as torch.distributed's broadcast; leave that out"
            )
        if not self.in_backward:
            raise Untraceable(
                f"the forward or the loss runs a backward, which gives '{name}' a gradient: have the step end with it"
            )
        grad = _torch.local_part(grad)
        number = self._known[_torch.storage_key(grad)]
        self.events.append(Gradient(name, number, grad.numel() * grad.itemsize))
        parameter.grad = None


def trace(
    model: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor],
    precision: Precision = NOTHING_CAST,
    accelerator: bool = True,
    footprints: Mapping[str, Footprint] = MappingProxyType({}),
    known: Mapping[str, Known] = MappingProxyType({}),
    batch_values: Sequence[Known | None] = (),
    keep_output: bool = False,
    warm: bool = False,
) -> Trace:
    """Run one step on meta.

    Args:
        model: on the meta device; it is left as it was.
        batch: the inputs of its forward, tensors on meta among them.
        loss: makes the tensor that `backward` is called on out of what the forward returns.
        precision: the dtypes of parameters, inputs and outputs.
        accelerator: whether attention, dropout and RMSNorm are the kernels of one, or those of the CPU.
        footprints: by names of operators as "aten::nonzero", what they return, where that depends on values; by places as
            "model.py:12" likewise.
        known: by name, what buffers hold.
        batch_values: what each tensor of the batch holds, in their order, None where that is not known.
        warm: whether a first step is run before, in which DTensor works out its rules.
        keep_output: whether the loop keeps what the forward returns until the backward is over.

    Returns:
        The trace.

    Raises:
        ValueError: if a parameter is not on meta, a product has several dtypes, or the model runs under torch.autocast.

    Example:
        >>> with torch.device("meta"):
        ...     model, x = nn.Linear(4, 4), torch.empty(2, 4)
        >>> trace(model, (x,), loss=torch.sum).flops                  # 2 x 4 x 4, twice each, in forward and in backward
        128
    """
    real = next((name for name, parameter in model.named_parameters() if parameter.device.type != "meta"), None)
    if real is not None:
        raise ValueError(f"trace() takes a model on meta, but '{real}' is not: build it under torch.device('meta')")
    at_places, at_operators = split_footprints(footprints)
    step = _Step(model, batch, loss, precision, accelerator, at_operators, batch_values, keep_output=keep_output)
    if warm:
        step.run(Answers(at_places), known)
    found, notes = decide(partial(step.run, known=known), at_places, _difference)
    if step.asked and step.written:  # a buffer that a step writes to has another value in the next one
        known = {name: value for name, value in known.items() if name not in step.written}
        found, notes = decide(partial(step.run, known=known), at_places, _difference)
    unused = [name for name in footprints if not {name, name.replace("::", ".")} & step.used]
    return replace(
        found, notes=(*found.notes, *notes, *(f"footprint {name!r} was not needed: nothing asks for it" for name in unused))
    )


def split_footprints(footprints: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(footprints of places as "model.py:12", those of operators as "aten::nonzero").

    Raises:
        ValueError: for a name that is neither.
    """
    places = {name: told for name, told in footprints.items() if re.search(r"[.]py:[0-9]+$", name)}
    operators = {name: told for name, told in footprints.items() if name not in places}
    for name in operators:
        namespace, _, operator = name.replace("::", ".").partition(".")
        if not operator or not hasattr(getattr(torch.ops, namespace), operator):
            raise ValueError(
                f"footprints has {name!r}: expected the name of an operator, as 'aten::nonzero', or a place, as 'model.py:12'"
            )
    return places, operators


class _Step:
    """A step that is traced, several times where it depends on values. The arguments are those of `trace`.

    asked: whether any trace asked for values.      written: names of buffers that a trace wrote to.
    used: names of footprints that a trace asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Sequence[Any] | Mapping[str, Any],
        loss: Callable[[Any], Tensor],
        precision: Precision,
        accelerator: bool,
        footprints: Mapping[str, Footprint],
        batch_values: Sequence[Known | None],
        *,
        keep_output: bool,
    ) -> None:
        self._model, self._batch, self._loss, self._precision = model, batch, loss, precision
        self._accelerator, self._footprints, self._batch_values = accelerator, footprints, batch_values
        self._keep_output = keep_output
        self.asked = False
        self.compiled = False
        self.written: set[str] = set()
        self.used: set[str] = set()

    def run(self, answers: Answers, known: Mapping[str, Known]) -> Trace:
        """Trace it once."""
        model, recorder = self._model, _Recorder(self._footprints, answers)
        with (
            collector_paused(),
            _computing_in(model, self._precision.parameters),
            _torch.on_autocast(_refuse_autocast),
            _torch.on_compiled(self._see_compiled),
            _torch.on_activation_offload(_refuse_activation_offload),
            _torch.on_context_parallel(_refuse_context_parallel),
            _torch.on_numpy(recorder.numpy),
            fused_kernels() if self._accelerator else host_kernels(),
        ):
            recorder.know(list(model.parameters()))
            buffers = recorder.know(list(model.buffers()))
            inputs = recorder.know(list(tensors_in(self._batch)))
            recorder.hold(model, self._batch, known, self._batch_values)
            _run_step(model, self._batch, self._loss, self._precision, recorder, keep_output=self._keep_output)
        self.asked = self.asked or bool(answers.asked)
        self.used |= answers.used
        wrote = recorder.values.written
        self.written |= {
            name for name, buffer in model.named_buffers() if _torch.storage_key(_torch.local_part(buffer)) in wrote
        }
        seen = {name: frozenset(dtypes) for name, dtypes in recorder.inputs.items()}
        return Trace(
            tuple(recorder.events),
            buffers,
            inputs,
            recorder.kept,
            recorder.recomputed,
            seen,
            notes=tuple(_left_out(model, self._precision, recorder)),
            compiled=self.compiled,
        )

    def _see_compiled(self) -> None:
        self.compiled = True


def _left_out(model: nn.Module, precision: Precision, recorder: _Recorder) -> Iterator[str]:
    """What a step does that is not simulated, and parameters that it gives no gradient."""
    if recorder.not_simulated:
        yield (
            f"the step sends messages of its own ({', '.join(recorder.not_simulated)}), which are not simulated: their time "
            "and buffers come on top"
        )
    if recorder.nested:
        yield (
            "the forward or the loss computes gradients, as a gradient penalty does: units that are gathered for that alone "
            "are not simulated"
        )
    graded = {event.parameter for event in recorder.events if isinstance(event, Gradient)}
    names = names_of(model, precision.parameters)
    unused = [name for parameter, name in names.items() if parameter.requires_grad and name not in graded]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        yield (
            f"no gradient reaches {', '.join(map(repr, unused[:3]))}{more}: gathered with their units, but not reduced, and "
            "without states of the optimizer"
        )


def _difference(one: Trace, other: Trace) -> str | None:
    """In what the step of another trace differs, None if it is the same."""
    if one.events == other.events and one.kept == other.kept:
        return None
    kept = (sum(e.nbytes for e in t.events if isinstance(e, Born) and e.storage in t.kept) for t in (one, other))
    return "it takes {:.3g} flop in place of {:.3g}, and leaves {} in place of {} to its backward".format(
        other.flops, one.flops, *(bytes_text(nbytes) for nbytes in reversed([*kept]))
    )


@contextmanager
def _computing_in(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Have parameters in these dtypes for the length of a block."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, name in names_of(model, dtypes).items():
        dtype = dtypes.get(name, parameter.dtype)
        if dtype == parameter.dtype:
            continue
        if isinstance(parameter, DTensor):  # whose part has a dtype of its own
            replaced[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            continue
        before.append((parameter, parameter.data))
        parameter.data = parameter.data.to(dtype)
    places = [
        (held, key, one) for held in map(_torch.parameters_of, model.modules()) for key, one in held.items() if one in replaced
    ]
    for held, key, one in places:
        held[key] = replaced[one]
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.grad = None
            parameter.data = data
        for held, key, one in places:
            held[key] = one


def _refuse_activation_offload() -> None:
    raise UntraceablePlace(
        "the model keeps activations in the host's memory (torch.autograd.graph.save_on_cpu), which is not simulated: leave it "
        "out, and say recompute= to see what recomputation would free instead"
    )


def _refuse_context_parallel() -> None:
    raise UntraceablePlace(
        "the model computes attention by context parallelism (torch's context_parallel), which is not simulated: leave it out, "
        "and give the rows of one rank: the answer then lacks the attention over the rest of each sequence"
    )


def _refuse_autocast() -> None:
    raise UntraceablePlace(
        "the model runs under torch.autocast, whose casts meta does not have: say explain(mp_policy=...) instead, whose dtype "
        "is also the one that parameters are gathered in"
    )


class StepFailed(ValueError):
    """A part of the step raised: the "forward", the "loss" or the "backward". Its cause is what was raised."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


def _run_step(
    model: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], Tensor],
    precision: Precision,
    recorder: _Recorder,
    *,
    keep_output: bool,
) -> None:
    """Forward, loss and backward, recorded."""
    with _hooks(model, recorder, precision), recorder, ConstantsMode(recorder.values):
        with _part("forward"):
            output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        with _part("loss"):
            value = loss(output)
            if not keep_output:
                output = None
        _check_loss(value)
        recorder.begin_backward()
        with _part("backward"):
            value.backward()
        recorder.events.append(BackwardEnds())
        del output, value


@contextmanager
def _part(name: str) -> Iterator[None]:
    try:
        yield
    except Untraceable:
        raise
    except Exception as failure:
        raise StepFailed(name) from failure


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor):
        raise Untraceable(
            f"the loss is a {type(value).__name__}: expected a tensor of one element, which backward is called on"
        )
    if value.numel() != 1:
        raise Untraceable(
            f"the loss is a tensor {tuple(value.shape)}: expected one element, which backward is called on (take its .mean())"
        )
    if not value.requires_grad:
        raise Untraceable("the loss depends on no trainable parameter: set requires_grad of some, or give another loss=")


def recorded(work: Callable[[], object], held: Sequence[Tensor]) -> list[Event]:
    """Operators of any work on meta, and storages but those of `held`, which are there before."""
    recorder = _Recorder({})
    recorder.know(held)
    with recorder:
        work()
    return recorder.events


@contextmanager
def _hooks(model: nn.Module, recorder: _Recorder, precision: Precision) -> Iterator[None]:
    """Have modules and parameters tell the recorder what happens to them, and cast as `frontend.hooks.ForwardHooks` does."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = _entering(recorder, name, precision.inputs.get(name))
            stack.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            after = _leaving(recorder, name, precision.outputs.get(name))
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        for parameter, name in names_of(model, precision.parameters).items():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_taking(recorder, name)).remove)
        yield


def names_of(model: nn.Module, planned: Iterable[str]) -> dict[nn.Parameter, str]:
    """The name of each parameter: of those that a tied one has that of the plan, else the first."""
    found: dict[nn.Parameter, str] = {}
    names = set(planned)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in found or name in names:
            found[parameter] = name
    return found


def _entering(recorder: _Recorder, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder.before_forward(name, [*tensors_in(args), *tensors_in(kwargs)] if kwargs else [*tensors_in(args)])
        return None if dtype is None else (cast_floats(args, dtype), cast_floats(kwargs, dtype))

    return enter


def _leaving(recorder: _Recorder, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        recorder.after_forward(name, output)
        return None if dtype is None else cast_floats(output, dtype)

    return leave


def _taking(recorder: _Recorder, name: str) -> Callable[[Tensor], None]:
    return lambda parameter: recorder.take_gradient(name, parameter)


__all__ = [
    "Backward",
    "BackwardEnds",
    "Born",
    "Died",
    "Enter",
    "Event",
    "Exchanged",
    "Footprint",
    "Gradient",
    "Leave",
    "Op",
    "StepFailed",
    "Trace",
    "Untraceable",
    "names_of",
    "recorded",
    "routed",
    "trace",
]
