"""Tracer of one training step on the meta device: events of modules, operators, storages and gradients, in order."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import ceil
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import Message, cast_floats, hook_node, tensors_in
from fullshard.foresight.kernels import fused_kernels
from fullshard.foresight.precision import Precision
from fullshard.foresight.values import Answers, Untraceable, UntraceablePlace, decide
from fullshard.frontend.api import gc_paused
from fullshard.wrap.known_values import ConstantsMode, KnownValue, KnownValues
from fullshard.wrap.tables import bytes_text

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ForwardBegins:
    """Start of a module's forward."""

    module: str  # qualified name
    in_backward: bool  # True for a recomputation


@dataclass(frozen=True, slots=True)
class ForwardEnds:
    """End of a module's forward."""

    module: str  # qualified name
    call: int  # number that a later `BackwardBegins` repeats; -1 if no output requires grad
    grad: bool  # True if grad mode was enabled
    in_backward: bool  # True for a recomputation


@dataclass(frozen=True, slots=True)
class BackwardBegins:
    """Start of the backward of one module call."""

    module: str  # qualified name
    call: int  # number of the `ForwardEnds`


@dataclass(frozen=True, slots=True)
class Op:
    """Cost of one operator call."""

    name: str
    flops: int  # of matrix products and attention; a multiply-add counts two
    nbytes: int  # read and written
    dtype: torch.dtype | None  # of the first floating-point input (its real part, if complex); None without one
    causal: bool = False  # True if the operator computes half of `flops`
    sizes: tuple[int, ...] = ()  # (rows, inner, columns) of a product, (head dim, keys per query) of attention, else ()


@dataclass(frozen=True, slots=True)
class Allocated:
    """Allocation of a storage."""

    storage: int  # number, unique within a trace
    nbytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    """Free of a storage."""

    storage: int


@dataclass(frozen=True, slots=True)
class GradientReady:
    """End of the accumulation of one parameter's gradient. From here on, fullshard owns the gradient."""

    parameter: str  # qualified name
    storage: int  # storage of the gradient
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorParallelCollective:
    """Blocking collective between the ranks of tensor parallelism."""

    message: Message


@dataclass(frozen=True, slots=True)
class BackwardEnds:
    """End of the backward of the loss."""


ModuleEvent = ForwardBegins | ForwardEnds | BackwardBegins
Event = TensorParallelCollective | ModuleEvent | Op | Allocated | Freed | GradientReady | BackwardEnds


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of one forward, loss and backward of a model whose parameters have the compute dtype."""

    events: tuple[Event, ...]  # in program order
    buffers: int  # bytes of the model's buffers
    batch: int  # bytes of the inputs
    # Storages that are alive when backward begins: activations. All other storages are temporaries.
    kept: frozenset[int]
    recomputed: int  # flops of forwards that backward runs again
    # By module: floating-point dtypes of its inputs before casting. Modules without such inputs are left out.
    inputs: Mapping[str, frozenset[torch.dtype]]
    notes: tuple[str, ...] = ()  # lines of the report: decisions by values of the batch, unsimulated work, unused footprints
    # True if the step calls functions compiled by torch.compile. They are traced in eager mode.
    compiled: bool = False

    @property
    def flops(self) -> int:
        """Flops of the whole step."""
        return sum(event.flops for event in self.events if isinstance(event, Op))

    def operator_by_storage(self) -> dict[int, str]:
        """Return the name of the operator that allocated each storage, by storage."""
        found: dict[int, str] = {}
        born: list[int] = []
        for event in self.events:
            if isinstance(event, Allocated):
                born.append(event.storage)
            elif isinstance(event, Op | TensorParallelCollective):
                name = event.name if isinstance(event, Op) else event.message.kind
                found |= dict.fromkeys(born, name.removeprefix("aten.").removesuffix(".default"))
                born.clear()
        return found

    @property
    def product_dtypes(self) -> set[torch.dtype]:
        """Dtypes of matrix products and attention."""
        return {event.dtype for event in self.events if isinstance(event, Op) and event.flops and event.dtype is not None}


Footprint = Callable[..., Any]
"""Replacement for an operator: takes its arguments, returns meta tensors or a number."""


def routed(share: float, imbalance: float = 1.0) -> Footprint:
    """Return a footprint for `nonzero` of a mask that selects a fixed share of its elements, like the tokens of an expert.

    Args:
        share: the selected share of the elements: 1 / experts for a mask of (tokens, selected experts).
        imbalance: the factor on the number of selected elements: 1.0 for a balanced router, more for an upper bound for the
            busiest expert. The factor applies to every expert, and therefore to the flops too.

    Returns:
        A footprint for `explain(footprints={"aten::nonzero": ...})`.

    Raises:
        ValueError: if `share` is not between 0 and 1, or `imbalance` is less than 1.

    Example:
        >>> tuple(routed(1 / 8, imbalance=1.5)(torch.empty(64, 2, device="meta")).shape)      # 1.5 x 128 / 8 of them
        (24, 2)
    """
    if not 0 < share <= 1 or imbalance < 1:
        raise ValueError(
            f"routed() expected a share between 0 and 1 and an imbalance of at least 1, got {share!r} and {imbalance!r}."
        )

    def nonzero(mask: Tensor) -> Tensor:
        chosen = min(mask.numel(), ceil(mask.numel() * share * imbalance))
        return torch.empty(chosen, mask.dim(), dtype=torch.long, device=mask.device)

    return nonzero


_NO_KERNEL = {aten.detach, aten.empty, aten.empty_like, aten.new_empty, _torch.unsafe_view}


def _op_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, given: Sequence[Tensor], outs: Sequence[Tensor]
) -> Op:
    """Return the flops, bytes and dtype of an operator call."""
    flops = _torch.count_flops(func, args, kwargs, out)
    nbytes = 0 if func.overloadpacket in _NO_KERNEL else sum(t.numel() * t.itemsize for t in (*given, *outs))
    if func.overloadpacket is aten.embedding:  # reads only the looked-up rows of the table
        nbytes -= args[0].numel() * args[0].itemsize
    numbers = next((t.dtype for t in given if t.dtype.is_floating_point or t.dtype.is_complex), None)
    dtype = None if numbers is None else numbers.to_real()
    if numbers is not None and numbers.is_complex:
        flops *= 4  # a complex product takes four real ones
    causal = bool(flops) and bool(_torch.argument(func, "is_causal", args, kwargs))
    return Op(str(func), flops, nbytes, dtype, causal, _torch.sizes_of_product(func, args) if flops else ())


_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution}
_ATTENTION = {_torch.flash_attention, _torch.efficient_attention}


def _check_product_dtypes(func: Any, given: Sequence[Tensor]) -> None:
    """Raise UntraceablePlace if a product mixes dtypes: real devices refuse them, the meta device does not."""
    if func.overloadpacket in _PRODUCTS:
        found = dict.fromkeys(tensor.dtype for tensor in given)
    elif func.overloadpacket in _ATTENTION:  # lengths and seeds are integers, masks may be bool
        found = dict.fromkeys(tensor.dtype for tensor in given if tensor.dtype.is_floating_point)
    else:
        return
    if len(found) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
        raise UntraceablePlace(
            f"{func.overloadpacket} cannot multiply {names}: devices need operands of one dtype. Cast one operand with .to(), "
            "or choose another mp_policy=. Parameters compute in its param_dtype"
        )


def _result_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return a cache key that determines an operator's result on meta, or None if an argument cannot be part of a key."""
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


def _result_factory(
    func: Any, args: Sequence[Any], out: Any, given: Sequence[Tensor], outs: Sequence[Tensor]
) -> Callable[[Sequence[Any]], Any] | None:
    """Return a function that repeats a result without running the operator, or None if that is not possible.

    The function returns new meta tensors, or its first argument if the operator works in place.
    """
    if isinstance(out, Tensor) and args and out is args[0]:
        return lambda args: args[0]
    # A result over an argument's storage, or over a part of a storage, cannot be recreated from its shape alone.
    storages = {_torch.storage_key(tensor) for tensor in given}
    keys = [_torch.storage_key(tensor) for tensor in outs]
    fresh = len(set(keys)) == len(keys) and not storages & set(keys) and all(t.device.type == "meta" for t in outs)
    whole = all(t.untyped_storage().nbytes() == t.numel() * t.itemsize and not t.storage_offset() for t in outs)
    if _torch.writes(func) or not (fresh and whole):
        return None
    copies = [partial(torch.empty_strided, tuple(t.shape), t.stride(), dtype=t.dtype, device="meta") for t in outs]
    if isinstance(out, Tensor):
        return lambda args: copies[0]()
    if type(out) is tuple and len(out) == len(outs):
        return lambda args: tuple(copy() for copy in copies)
    return None


_ADD = aten.add.Tensor


@cache
def _autograd_only_references() -> tuple[int, int]:
    """Return the reference counts that a gradient has inside a dispatch mode if only autograd holds it."""
    found: list[tuple[int, int]] = []

    # Measured, since the counts depend on internals of torch.
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
def _has_torch_dispatch(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) not in (None, Tensor.__torch_dispatch__)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


_EQUAL, _COPIED = aten.equal.default, _torch.copied.default
_NEEDS_VALUES = {_EQUAL, _COPIED, _torch.item.default}


class _TraceMode(_torch.TorchDispatchMode):
    """Dispatch mode that records operators, and the allocation and the free of storages."""

    def __init__(self, footprints: Mapping[str, Footprint], answers: Answers) -> None:
        super().__init__()
        self._answers = answers
        self.values = KnownValues()  # of meta tensors
        self._footprints = {name.replace("::", "."): value for name, value in footprints.items()}
        self._autograd_only_references = _autograd_only_references()
        self.inputs: dict[str, set[torch.dtype]] = {}  # by module, the floating-point dtypes of its inputs
        self.events: list[Event] = []
        self._storage_numbers: dict[int, int] = {}  # by storage key, while alive: number, or -1 if not traced
        self._op_cache: dict[object, tuple[Op, Callable[[Sequence[Any]], Any]]] = {}
        self._storages = self._calls = 0
        self.recomputed = 0  # flops of recomputed forwards
        self.unsimulated_collectives: dict[str, None] = {}  # names of those that the model itself runs, in order
        self.nested = False  # True if the forward or the loss computes gradients
        self.in_backward = False  # True once the backward of the loss has begun
        self.kept: frozenset[int] = frozenset()  # storages that are alive when the backward begins

    def register_existing(self, tensors: Sequence[Tensor]) -> int:
        """Exclude the storages of `tensors` from the recorded allocations. Return their bytes."""
        tensors = [_torch.local_part(tensor) for tensor in tensors]
        found = {_torch.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._storage_numbers |= dict.fromkeys(found, -1)
        return sum(found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, _torch.FakeTensor) for kind in types):
            return func(*args, **kwargs)  # DTensor's sharding propagation only computes shapes with these
        if any(_has_torch_dispatch(kind) for kind in types):
            return NotImplemented  # a subclass (torchao's float8) dispatches plain tensors, which arrive here
        if func.is_view:
            out = func(*args, **kwargs)
            self.values.note(func, args, kwargs, out)
            return out
        sent = _torch.functional_collective(func, args)
        if sent is not None:
            kind, ranks = sent
            out = func(*args, **kwargs)
            nbytes = max(t.numel() * t.itemsize for t in (args[0], out))
            self.events.append(TensorParallelCollective(Message(kind, args[0].dtype, nbytes, 1, ranks)))
            self._track_storage(out)
            return out
        if func is _ADD and not torch.is_grad_enabled() and _torch.current_graph_task() != -1:
            summed = self._accumulation_target(*args)
            if summed is not None:
                self.events.append(Op(str(func), 0, 3 * summed.numel() * summed.itemsize, summed.dtype))
                return summed
        # A footprint may return another result at each call, so its results are neither cached nor known.
        has_footprint = self._footprints and str(func.overloadpacket) in self._footprints
        key = None if has_footprint else _result_key(func, args, kwargs)
        known = None if key is None else self._op_cache.get(key)
        if known is not None:
            op, makes = known
            out = makes(args)
            outs = out if type(out) is tuple else (out,)
        else:
            out = self._run(func, args, kwargs)
            if isinstance(out, _torch.FakeTensor):
                return out  # made by DTensor's sharding propagation
            outs, given = (*tensors_in(out),), [*tensors_in((args, kwargs))]
            _check_product_dtypes(func, given)
            if _torch.sends_messages(func):
                self.unsimulated_collectives[str(func.overloadpacket).replace(".", "::")] = None
            op = _op_of(func, args, kwargs, out, given, outs)
            makes_ = None if key is None else _result_factory(func, args, out, given, outs)
            if makes_ is not None:
                self._op_cache[key] = op, makes_
        if not has_footprint:
            self.values.note(func, args, kwargs, out)
        for tensor in outs:
            self._track_storage(tensor)
        self.events.append(op)
        # Inside a backward, only recomputation enables grad.
        if op.flops and torch.is_grad_enabled() and _torch.current_graph_task() != -1:
            self.recomputed += op.flops
        return out

    def _accumulation_target(self, one: Any, other: Any, *_: Any) -> Tensor | None:
        """Return the gradient that autograd would accumulate into in place, or None if it allocates the sum.

        Without a dispatch mode, autograd adds in place if it holds the only reference to one of the gradients. Under a dispatch
        mode it always allocates the sum, which would overstate the memory of the step.
        """
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype:
            for gradient in (one, other):
                if gradient.is_contiguous() and _torch.references(gradient) == self._autograd_only_references:
                    return gradient
        return None

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, or return the result of its footprint. Operators without a result are skipped on meta."""
        if _torch.only_writes(func) and all(t.device.type == "meta" for t in args[0] if isinstance(t, Tensor)):
            return None
        name = str(func.overloadpacket)
        if name in self._footprints:
            self._answers.used.add(name)
            footprint = self._footprints[name]
            found = footprint(*args, **kwargs) if callable(footprint) else footprint
            if _torch.returns_tensors(func) and not isinstance(found, (Tensor, list, tuple)):
                raise Untraceable(
                    f"The footprint of {name} returns {found!r}, but the operator returns a tensor. Return a tensor on meta."
                )
            return found
        if func.overloadpacket in (aten.index, aten.index_put_) and _has_mask(args[1]):
            # The kernel of a masked index runs nonzero inside. Run it here instead, so that its footprint applies.
            nonzero = aten.nonzero.default
            indices = [
                one
                for index in args[1]
                for one in (self._run(nonzero, (index,), {}).unbind(1) if _has_mask([index]) else (index,))
            ]
            args = (args[0], indices, *args[2:])
        if func in _NEEDS_VALUES:
            return self._read_values(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and func.overloadpacket is not aten.index:
            chosen = self.values.computed(func, args, kwargs)
            if chosen is not None:
                self._answers.record_shape(chosen[0], of_batch=chosen[1])
                return _torch.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), chosen[0])
        if func.overloadpacket is _torch.grouped_mm and args[0].dtype != torch.bfloat16:  # meta implements bf16 only
            return _torch.grouped_mm_shape(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as failure:
            if "meta" in str(failure).lower():  # a missing meta kernel, not an error of the program: see `decide`
                self._answers.refused = failure
            raise

    def _read_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator that reads values, from known values or the user's answers."""
        tensor = args[0]
        if func is _EQUAL:
            other = args[1]
            return tensor.shape == other.shape and self._answers.equal(self.values.find(tensor), self.values.find(other))
        if func is not _COPIED:
            return self._answers.scalar(tensor, self.values.find(tensor))
        to = kwargs.get("device")
        if tensor.device.type != "meta" or to is None or torch.device(to).type != "cpu":
            return func(*args, **kwargs)
        return self.values_on_host(tensor).to(kwargs.get("dtype") or tensor.dtype)

    def _track_storage(self, tensor: Tensor) -> None:
        key = _torch.storage_key(tensor)
        if key in self._storage_numbers or tensor.device.type != "meta":  # a CPU tensor of the program itself
            return
        storage = tensor.untyped_storage()
        self._storages += 1
        self._storage_numbers[key] = self._storages
        self.events.append(Allocated(self._storages, storage.nbytes()))
        # The storage, not the tensor: views and autograd's saved tensors keep the memory alive. No events at exit.
        weakref.finalize(storage, self._record_freed, key, self._storages).atexit = False

    def _record_freed(self, key: int, number: int) -> None:
        self._storage_numbers.pop(key, None)  # a later storage may reuse the key
        self.events.append(Freed(number))

    def values_on_host(self, tensor: Tensor) -> Tensor:
        """Return the known values of a meta tensor that is copied to the host, or whose `numpy()` is called."""
        return self._answers.on_host(tensor, self.values.find(tensor))

    def begin_backward(self) -> None:
        """Record the storages that are alive now: they are the activations of the forward."""
        self.kept = frozenset(number for number in self._storage_numbers.values() if number >= 0)
        self.in_backward = True

    # --- modules and parameters ---

    def before_forward(
        self, name: str, dtype: torch.dtype | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the start of a module's forward and the dtypes of its inputs. Return the inputs, cast to `dtype`."""
        self.events.append(ForwardBegins(name, _torch.current_graph_task() != -1))
        for tensor in tensors_in((args, kwargs)):
            if tensor.dtype.is_floating_point:
                self.inputs.setdefault(name, set()).add(tensor.dtype)
        return None if dtype is None else (cast_floats(args, dtype), cast_floats(kwargs, dtype))

    def after_forward(self, name: str, dtype: torch.dtype | None, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Record the end of a module's forward, and hook its outputs' graph nodes. Return the output, cast to `dtype`."""
        nodes = [one.grad_fn for one in tensors_in(output) if one.requires_grad and one.grad_fn is not None]
        self._calls += bool(nodes)
        call = self._calls if nodes else -1
        pending = [BackwardBegins(name, call)]  # until the backward reaches the first of the nodes

        def begin_backward(*_: object) -> None:
            self.nested |= bool(pending) and not self.in_backward
            self.events.extend(pending)
            pending.clear()

        for node in nodes:
            hook_node(node, begin_backward)
        self.events.append(ForwardEnds(name, call, torch.is_grad_enabled(), _torch.current_graph_task() != -1))
        return None if dtype is None else cast_floats(output, dtype)

    def record_gradient(self, name: str, parameter: Tensor) -> None:
        """Record a parameter's accumulated gradient and clear `.grad`."""
        grad = parameter.grad
        if grad is None:
            raise Untraceable(
                f"The gradient of '{name}' is missing after its accumulation: a hook of the parameter removes it, as an "
                "optimizer in the backward does, or an operator has no gradient, as torch.distributed's broadcast. "
                "Leave that out."
            )
        if not self.in_backward:
            raise Untraceable(
                f"The forward or the loss runs a backward, which computes the gradient of '{name}'. Run the backward only at "
                "the end of the step."
            )
        grad = _torch.local_part(grad)
        number = self._storage_numbers[_torch.storage_key(grad)]
        self.events.append(GradientReady(name, number, grad.numel() * grad.itemsize))
        parameter.grad = None


def trace(
    model: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor],
    precision: Precision = Precision({}, {}, {}),
    accelerator: bool = True,
    footprints: Mapping[str, Footprint] = MappingProxyType({}),
    known: Mapping[str, KnownValue] = MappingProxyType({}),
    batch_values: Sequence[KnownValue | None] = (),
    keep_output: bool = False,
) -> Trace:
    """Trace one step of a model on meta.

    Args:
        model, batch, loss: as in `explain`, on meta. The model is not changed.
        precision: the dtypes of parameters, inputs and outputs.
        accelerator: True to use the kernels of an accelerator for attention, dropout and RMSNorm, False for those of the CPU.
        footprints: results that depend on values, by operator ("aten::nonzero") or by place ("model.py:12").
        known: known values of buffers, by name.
        batch_values: the known values of the batch's tensors, in order; None for an unknown one.
        keep_output: True if the training loop keeps the forward's output until backward ends.

    >>> with torch.device("meta"):
    ...     model, x = nn.Linear(4, 4), torch.empty(2, 4)
    >>> trace(model, (x,), loss=torch.sum).flops                      # 2 x 4 x 4, twice each, in forward and in backward
    128
    """
    real = next((name for name, parameter in model.named_parameters() if parameter.device.type != "meta"), None)
    if real is not None:
        raise ValueError(f"trace() expected a model on meta, but '{real}' is not. Build the model under torch.device('meta').")
    at_places = {name: value for name, value in footprints.items() if re.search(r"[.]py:[0-9]+$", name)}
    at_operators = {name: value for name, value in footprints.items() if name not in at_places}
    for name in at_operators:
        namespace, _, operator = name.replace("::", ".").partition(".")
        if not operator or not hasattr(getattr(torch.ops, namespace), operator):
            raise ValueError(
                f"footprints expected the name of an operator, as 'aten::nonzero', or a place, as 'model.py:12', got {name!r}."
            )
    step = _StepTracer(model, batch, loss, precision, accelerator, at_operators, batch_values, keep_output)
    found, notes = decide(partial(step.run, known=known), at_places, _difference)
    if step.reads_values and step.written:  # buffers that a step writes have other values in the next step
        known = {name: value for name, value in known.items() if name not in step.written}
        found, notes = decide(partial(step.run, known=known), at_places, _difference)
    unused = [name for name in footprints if not {name, name.replace("::", ".")} & step.used]
    return replace(found, notes=(*found.notes, *notes, *(f"footprint {name!r} is not used by the step" for name in unused)))


@dataclass(slots=True, eq=False)
class _StepTracer:
    """Repeatable tracer of one step, with the arguments of `trace`. A step that depends on values is traced several times."""

    _model: nn.Module
    _batch: Sequence[Any] | Mapping[str, Any]
    _loss: Callable[[Any], Tensor]
    _precision: Precision
    _accelerator: bool
    _footprints: Mapping[str, Footprint]
    _batch_values: Sequence[KnownValue | None]
    _keep_output: bool
    reads_values: bool = False  # True if any trace read values
    compiled: bool = False  # True if any trace called a compiled function
    written: set[str] = field(default_factory=set)  # names of the buffers that any trace wrote to
    used: set[str] = field(default_factory=set)  # names of the footprints that any trace used

    def run(self, answers: Answers, known: Mapping[str, KnownValue]) -> Trace:
        model, recorder = self._model, _TraceMode(self._footprints, answers)
        with (
            gc_paused(),
            _cast_parameters(model, self._precision.parameters),
            _torch.on_autocast(partial(_refuse, _AUTOCAST)),
            _torch.on_compiled(partial(setattr, self, "compiled", True)),
            _torch.on_activation_offload(partial(_refuse, _ACTIVATION_OFFLOAD)),
            _torch.on_context_parallel(partial(_refuse, _CONTEXT_PARALLEL)),
            _torch.on_numpy(recorder.values_on_host),
            fused_kernels(accelerator=self._accelerator),
        ):
            recorder.register_existing(list(model.parameters()))
            buffers = recorder.register_existing(list(model.buffers()))
            inputs = recorder.register_existing(list(tensors_in(self._batch)))
            for name, buffer in model.named_buffers():
                if name in known:
                    recorder.values.record(buffer, known[name])
            for tensor, value in zip(tensors_in(self._batch), self._batch_values):
                if value is not None:
                    recorder.values.record(tensor, value)
            self._run_step(recorder)
        self.reads_values = self.reads_values or bool(answers.reads)
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
            notes=tuple(_limitations(model, self._precision, recorder)),
            compiled=self.compiled,
        )

    def _run_step(self, recorder: _TraceMode) -> None:
        model, batch = self._model, self._batch
        with _hooks(model, recorder, self._precision), recorder, ConstantsMode(recorder.values):
            with _step_part("forward"):
                output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
            with _step_part("loss"):
                value = self._loss(output)
                if not self._keep_output:
                    output = None  # frees the output before backward, as a training loop without a reference to it does
            _check_loss(value)
            recorder.begin_backward()
            with _step_part("backward"):
                value.backward()
            recorder.events.append(BackwardEnds())
            del output, value  # inside the block, so that their frees are recorded


def _limitations(model: nn.Module, precision: Precision, recorder: _TraceMode) -> Iterator[str]:
    """Yield notes on work that is not simulated and on parameters without a gradient."""
    if recorder.unsimulated_collectives:
        yield (
            f"the step runs collectives of its own ({', '.join(recorder.unsimulated_collectives)}), which are not simulated: "
            "their time and buffers are not in the estimate"
        )
    if recorder.nested:
        yield (
            "the forward or the loss computes gradients, as a gradient penalty does: the all-gathers for these gradients are "
            "not simulated"
        )
    graded = {event.parameter for event in recorder.events if isinstance(event, GradientReady)}
    names = parameter_names(model, precision.parameters)
    unused = [name for parameter, name in names.items() if parameter.requires_grad and name not in graded]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        yield (
            f"no gradient reaches {', '.join(map(repr, unused[:3]))}{more}: all-gathered with their units, but not reduced, "
            "and without optimizer states"
        )


def _difference(one: Trace, other: Trace) -> str | None:
    """Describe how the step of `other` differs from that of `one`, or return None if they are equal."""
    if one.events == other.events and one.kept == other.kept:
        return None
    activations = (sum(e.nbytes for e in t.events if isinstance(e, Allocated) and e.storage in t.kept) for t in (one, other))
    return "it takes {:.3g} flop in place of {:.3g}, and leaves {} in place of {} to its backward".format(
        other.flops, one.flops, *(bytes_text(nbytes) for nbytes in reversed([*activations]))
    )


@contextmanager
def _cast_parameters(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Cast parameters to these dtypes inside the block."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, name in parameter_names(model, dtypes).items():
        dtype = dtypes.get(name, parameter.dtype)
        if dtype == parameter.dtype:
            continue
        if isinstance(parameter, DTensor):  # assigning `.data` does not change the dtype of its local tensor
            replaced[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            continue
        before.append((parameter, parameter.data))
        parameter.data = parameter.data.to(dtype)
    slots = [
        (owner, key, one)
        for owner in map(_torch.parameters_of, model.modules())
        for key, one in owner.items()
        if one in replaced
    ]
    for owner, key, one in slots:
        owner[key] = replaced[one]
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.grad = None
            parameter.data = data
        for owner, key, one in slots:
            owner[key] = one


def _refuse(why: str) -> NoReturn:
    raise UntraceablePlace(why)


_ACTIVATION_OFFLOAD = (
    "explain() cannot simulate torch.autograd.graph.save_on_cpu, with which the model keeps activations in host memory. "
    "Remove it, and pass recompute= to see how much memory recomputation would free instead"
)
_CONTEXT_PARALLEL = (
    "explain() cannot simulate torch's context_parallel, with which the model computes attention. Remove it, and pass the "
    "rows of one rank. The estimate then lacks the attention over the rest of each sequence"
)
_AUTOCAST = (
    "explain() cannot trace a model that runs under torch.autocast: the meta device does not apply its casts. Pass "
    "explain(mp_policy=...) instead. Its param_dtype is also the dtype of the all-gathers"
)


class StepFailed(ValueError):
    """Raised if a part of the step ("forward", "loss" or "backward") raises; that exception is the cause."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


@contextmanager
def _step_part(name: str) -> Iterator[None]:
    try:
        yield
    except Untraceable:
        raise
    except Exception as failure:
        raise StepFailed(name) from failure


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a {type(value).__name__}. Return the tensor that backward() is called on."
        if isinstance(value, Tensor):
            got = f"shape {tuple(value.shape)}. Return its .mean(), for example."
        raise Untraceable(f"loss= expected a function that returns a tensor of one element, got {got}")
    if not value.requires_grad:
        raise Untraceable(
            "The loss depends on no trainable parameter. Set requires_grad of a parameter, or pass another loss=."
        )


def events_of(work: Callable[[], object], existing: Sequence[Tensor]) -> list[Event]:
    """Return the operators, allocations and frees of work on meta, without the storages of `existing`."""
    recorder = _TraceMode({}, Answers({}))
    recorder.register_existing(existing)
    with recorder:
        work()
    return recorder.events


@contextmanager
def _hooks(model: nn.Module, recorder: _TraceMode, precision: Precision) -> Iterator[None]:
    """Hook modules and parameters to record their events, and cast inputs and outputs as `core.hooks.ForwardHooks`."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = partial(recorder.before_forward, name, precision.inputs.get(name))
            stack.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            after = partial(recorder.after_forward, name, precision.outputs.get(name))
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        for parameter, name in parameter_names(model, precision.parameters).items():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(partial(recorder.record_gradient, name)).remove)
        yield


def parameter_names(model: nn.Module, planned: Iterable[str]) -> dict[nn.Parameter, str]:
    """Return the name of each parameter. Of the names of a tied parameter, choose the one in `planned`, else the first."""
    found: dict[nn.Parameter, str] = {}
    names = set(planned)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in found or name in names:
            found[parameter] = name
    return found
