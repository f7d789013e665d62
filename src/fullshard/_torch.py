"""The one door to torch's private parts: every private torch name fullshard leans on, wrapped in the behaviour relied on."""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import chain, repeat
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fullshard.errors import warn_once

__all__ = [
    "BATCH_NORM",
    "HONOURS_SUBCLASSES",
    "HYBRID_ZERO2",
    "NEWEST_TRIED",
    "REDUCES_IN_GRAD_DTYPE",
    "THREADED",
    "TRACKS_GRAD_DTYPE",
    "VERSION",
    "DTensorSpec",
    "FakeTensor",
    "GradientReductionHandle",
    "NetworkError",
    "PerRank",
    "ShardedTensor",
    "StoreError",
    "TorchDispatchMode",
    "TorchFSDPModule",
    "accelerator",
    "all_gather_base",
    "all_gather_coalesced",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "allocates",
    "are_dtensors",
    "argument",
    "at_origin",
    "attach_state",
    "attention_taken_apart",
    "axis_of",
    "backend_name",
    "buffers_of",
    "can_assign_data",
    "carry_hooks",
    "children_of",
    "chunk_cat",
    "contiguous_strides",
    "copied",
    "count_flops",
    "counts_collectives",
    "current_graph_task",
    "current_stream",
    "default_store",
    "detach_state",
    "device_of",
    "disable_tracing",
    "dispatch_modes",
    "drop_groups",
    "dtensor",
    "dtensor_like",
    "efficient_attention",
    "ends_by_collective",
    "exception_on",
    "exchange",
    "extend_clipping",
    "extend_trunc_normal",
    "fake_ranks",
    "flash_attention",
    "flash_attention_on_cpu",
    "flat_axis",
    "functional_collective",
    "global_rank",
    "grad_dtype_of",
    "group_name",
    "grouped_mm",
    "grouped_mm_shape",
    "groups_of",
    "has_backend",
    "has_extended_api",
    "have_listed_by",
    "have_listed_by_itself",
    "have_reduction_hooks",
    "in_functional_call",
    "in_transform",
    "insides",
    "is_alive",
    "is_capturing",
    "is_cut",
    "is_done",
    "is_handled",
    "is_in_forward",
    "is_in_graph",
    "is_nccl",
    "is_non_composable",
    "is_over",
    "is_wrap_policy",
    "item",
    "join_meshes",
    "leads_to",
    "left_out_of",
    "list_alike",
    "list_tensors",
    "local_part",
    "local_tensor",
    "locals_of",
    "makes_parameter",
    "mark_managed",
    "meta_kernels",
    "new_group",
    "on_activation_offload",
    "on_autocast",
    "on_backward_end",
    "on_compiled",
    "on_context_parallel",
    "on_differentiation",
    "on_numpy",
    "on_registration",
    "on_stream",
    "only_writes",
    "operation_name",
    "own_store",
    "parameter_hooks",
    "parameters_of",
    "persists",
    "point_at",
    "process_group_memory",
    "profiling",
    "reduce_scatter_base",
    "reduce_scatter_coalesced",
    "references",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "replace_parameters",
    "returns_tensors",
    "run_wrap_policy",
    "same_memory",
    "same_storage",
    "scale",
    "sends_messages",
    "set_grad_dtype",
    "set_gradients",
    "show_collective",
    "sizes_of_product",
    "spec",
    "spec_of",
    "specs_of",
    "split_copy",
    "spmd_types_of",
    "storage_key",
    "store_host",
    "strided_shard",
    "symmetric_memory",
    "then_order",
    "threads_are_ranks",
    "tree_leaves",
    "tree_map_only",
    "uncounted",
    "unsafe_view",
    "view_base",
    "wait_for_event",
    "waited",
    "whole_of",
    "world_size",
    "writes",
    "written_to",
]


K = TypeVar("K")
V = TypeVar("V")

TorchFSDPModule: Any = torch_fsdp.FSDPModule  # only for `isinstance`: its methods are all our own
GradientReductionHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)  # likewise, from torch 2.15 on
_TORCH_FULLY_SHARD: Any = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # the key of its states


# --- DTensor ---------------------------------------------------------------------------------------------------------


VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]
"""Major and minor version of the installed torch."""

NEWEST_TRIED: tuple[int, int] = (2, 15)
"""The newest version that the tests have passed on."""

HONOURS_SUBCLASSES: bool = VERSION >= (2, 12)
"""Whether the `__torch_dispatch__` of a subclass of DTensor is called; torch 2.11 takes it for DTensor's own."""

REDUCES_IN_GRAD_DTYPE: bool = VERSION >= (2, 15)
"""Whether `MixedPrecisionPolicy(reduce_dtype=None)` means the dtype of `.grad` to torch, not the compute dtype."""

TRACKS_GRAD_DTYPE: bool = hasattr(Tensor, "_has_grad_dtype_override")
"""Whether torch tracks if a `grad_dtype` was set; before 2.15 it cannot be told from the dtype of the parameter."""


def grad_dtype_of(parameter: Tensor) -> tuple[bool, torch.dtype | None]:
    """Return whether `parameter.grad_dtype` was set, and to which dtype."""
    found: torch.dtype | None = parameter.grad_dtype
    explicit = parameter._has_grad_dtype_override if TRACKS_GRAD_DTYPE else found != parameter.dtype  # type: ignore[attr-defined]
    return explicit, found if explicit else None


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype that a `.grad` must have, None for any."""
    if parameter.grad_dtype != dtype or TRACKS_GRAD_DTYPE:
        parameter.grad_dtype = dtype


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


def spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a contiguous tensor of global `shape`."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, contiguous_strides(shape), dtype))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a cut made before another axis to its right cut the same `dim` into `split_factor` parts."""
    return _StridedShard(dim, split_factor=split_factor)


def is_cut(placement: Placement, dim: int | None = None) -> bool:
    """Whether a placement shards (`dim`, if given), strided or not."""
    return isinstance(placement, (Shard, _StridedShard)) and (dim is None or placement.dim == dim)


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The axis `names` of `mesh`, several flattened into one (which makes a process group the first time)."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def is_alive(group: Any) -> bool:
    """Whether torch knows a process group still: it was not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def groups_of(mesh: DeviceMesh) -> list[Any]:
    """The process groups of its axes; None for one that was destroyed."""
    found: list[Any] = []
    for axis in range(mesh.ndim):
        try:
            found.append(mesh.get_group(axis))
        except (RuntimeError, ValueError, KeyError):
            found.append(None)
    return found


def drop_groups(mesh: DeviceMesh) -> None:
    """Have a mesh forget those of its process groups that were destroyed."""
    for one in (mesh, getattr(mesh, "_root_mesh", None)):
        registry = getattr(one, "_pg_registry", {})
        for name in [name for name, group in registry.items() if not is_alive(group)]:
            del registry[name]


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several that were taken from the same mesh. Raises RuntimeError if they were not."""
    return DeviceMesh._concatenate(list(meshes))


def waited(tensor: Tensor) -> Tensor:
    """`tensor`, or what it stands for once a functional collective that makes it is waited for."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over `local` without any check or copy, in 2 us.

    `DTensor.from_local` costs 7 times that; calling the class runs an `__init__` that does nothing, wrapped for dynamo.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


def dtensor_like(origin: Tensor, local: Tensor, spec: DTensorSpec) -> DTensor:
    """As `dtensor` of `local`, where `origin` is alike and begins its storage: see `at_origin`."""
    made = DTensor.__new__(DTensor, origin, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
    made._local_tensor = local
    return made


def turned_into_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """This object, as a Parameter. `nn.Parameter` would detach it first, which DTensor dispatches: 30 us."""
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def set_gradients(gradients: Iterable[tuple[Tensor, Tensor, Tensor, DTensorSpec, str]], mark: object) -> None:
    """Give each sharded parameter the gradient `dtensor_like(origin, local, spec)`, which bears `mark` under a key.

    gradients: (parameter, origin, local, spec, key) of each.
    """
    for parameter, origin, local, spec, key in gradients:
        made = DTensor.__new__(DTensor, origin, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
        made._local_tensor = local
        made.__dict__[key] = mark
        parameter.grad = made


def insides(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The local tensors of two DTensors that are cut alike, or the tensors themselves."""
    return getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


def _all_dtensors(kinds: set[type]) -> bool:
    return all(issubclass(kind, DTensor) for kind in kinds)


def are_dtensors(tensors: Sequence[Any]) -> bool:
    return _all_dtensors(set(map(type, tensors)))


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """The spec of each DTensor, None for what is none."""
    kinds = set(map(type, tensors))
    if _all_dtensors(kinds):
        return [tensor._spec for tensor in tensors]
    if not any(issubclass(kind, DTensor) for kind in kinds):
        return [None] * len(tensors)
    return [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]


def locals_of(tensors: Sequence[Any]) -> Sequence[Any]:
    """The local tensors of DTensors, and the others as they are."""
    kinds = set(map(type, tensors))
    if _all_dtensors(kinds):
        return [tensor._local_tensor for tensor in tensors]
    if not any(issubclass(kind, DTensor) for kind in kinds):
        return tensors
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


_FIRST = -1  # the key of a hook; torch counts from 0


def list_tensors(optimizer: Optimizer, group: dict[str, Any], *lists: list[Any]) -> Any:
    """As an optimizer of torch lists the tensors of a step: parameters, gradients, states."""
    return type(optimizer)._init_group(optimizer, group, *lists)  # type: ignore[attr-defined]


def list_alike(one: type[Optimizer], other: type[Optimizer]) -> bool:
    """Whether two classes of optimizers list tensors in the same way."""
    return one._init_group is other._init_group  # type: ignore[attr-defined]


def have_listed_by(optimizer: Optimizer, how: Callable[..., Any], after: Callable[..., None]) -> None:
    """Have `how` list the tensors of this optimizer's steps, and `after` called behind them, before the caller's hooks."""
    optimizer.__dict__["_init_group"] = how
    optimizer._optimizer_step_post_hooks[_FIRST] = after
    optimizer._optimizer_step_post_hooks.move_to_end(_FIRST, last=False)  # type: ignore[attr-defined]


def have_listed_by_itself(optimizer: Optimizer) -> None:
    """Undo that."""
    optimizer.__dict__.pop("_init_group", None)
    optimizer._optimizer_step_post_hooks.pop(_FIRST, None)


def makes_parameter() -> bool:
    """Whether the caller of our caller is the constructor of nn.Parameter."""
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def writes(operation: Any) -> bool:
    """Whether an operation of torch writes to what it is given."""
    return operation._schema.is_mutable


def written_to(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation of torch was given and writes to, also those of lists."""
    if not operation._schema.is_mutable:
        return []
    names = [(at, known.name) for at, known in enumerate(operation._schema.arguments) if known.is_write]
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in names]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def returns_tensors(operation: Any) -> bool:
    """Whether an operation of torch returns tensors, and no number."""
    return any("Tensor" in str(known.type) for known in operation._schema.returns)


def only_writes(operation: Any) -> bool:
    """Whether an operation of torch writes to what it is given, and returns nothing, as `_foreach_add_` does."""
    return operation._schema.is_mutable and not operation._schema.returns


def operation_name(operation: Any) -> str:
    """The name of an operation as it is written in Python.

    >>> operation_name(torch.ops.aten.zero_.default)
    'zero_()'
    """
    return f"{operation._schema.name.partition('::')[2]}()"


def extend_trunc_normal(instead: Callable[..., Tensor]) -> None:
    """Have torch.nn.init.trunc_normal_, however it was imported, call `instead` with its own inner function and arguments."""
    init: Any = torch.nn.init
    init._no_grad_trunc_normal_ = functools.wraps(init._no_grad_trunc_normal_)(
        functools.partial(instead, init._no_grad_trunc_normal_)
    )


def extend_clipping(total_norm: Callable[..., Tensor], clip_with_norm: Callable[..., None]) -> None:
    """Have torch.nn.utils.get_total_norm and clip_grads_with_norm_, and so clip_grad_norm_, call these instead.

    They are called however torch's were imported, with torch's own inner function and arguments, and without grad.
    """
    utils: Any = torch.nn.utils
    for public, instead in ((utils.get_total_norm, total_norm), (utils.clip_grads_with_norm_, clip_with_norm)):
        inner = public.__closure__[public.__code__.co_freevars.index("func")]
        inner.cell_contents = functools.wraps(inner.cell_contents)(functools.partial(instead, inner.cell_contents))


def at_origin(tensor: Tensor) -> Tensor:
    """The same memory as `tensor`, at the beginning of a storage of its own that ends with it; no copy.

    DTensor takes over the offset of what it wraps, and torch.save and asynchronous checkpoints then take it for a tensor with
    memory, empty ones too; and torch.save saves whole storages. The version counter is a new one.
    """
    if type(tensor) is not Tensor or tensor.device.type == "meta":
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    first = tensor.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    storage = tensor.untyped_storage()[first * tensor.itemsize : (first + length) * tensor.itemsize]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


local_tensor: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
"""The very tensor object a DTensor wraps, not a view of it as `to_local()` gives."""


def point_at(tensor: DTensor, local: Tensor) -> None:
    """Make `tensor` a DTensor over the memory of `local`. Its global shape and dtype must already fit."""
    tensor._local_tensor = local
    tensor.__dict__.pop("_fullshard_bare", None)


# --- modules and parameters --------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that `module.name` reads. Writing to it swaps a parameter without `__setattr__` (0.05 us, not 2 us)."""
    return module._parameters


def allocates(fn: Callable[..., Any]) -> bool:
    """Whether `fn`, given to `_apply`, is what `Module.to_empty` gives: memory without values."""
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


def persists(module: nn.Module, name: str) -> bool:
    """Whether state dicts have this buffer of `module`."""
    return name not in module._non_persistent_buffers_set


def replace_parameters(module: nn.Module, held: Any) -> None:
    """Have `module.name` read `held` instead of the dict that `parameters_of` gave."""
    module.__dict__["_parameters"] = held


def on_registration(hook: Callable[[nn.Module, str, object], None]) -> None:
    """Call `hook` (module, name, value) before a parameter or submodule is registered in any module."""
    nn.modules.module.register_module_parameter_registration_hook(hook)
    nn.modules.module.register_module_module_registration_hook(hook)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict that a child's `module.name` reads."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict that a buffer's `module.name` reads."""
    return module._buffers


def can_assign_data(tensor: Tensor, value: Tensor) -> bool:
    """Return True if `tensor.data = value` is allowed, which depends on their devices."""
    return torch._has_compatible_shallow_copy_type(tensor, value)


def carry_hooks(source: Tensor, target: Tensor) -> None:
    """Let the hooks registered on `source` be those of `target`; handles already given out keep removing them."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    accumulated = getattr(source, "_post_accumulate_grad_hooks", None)
    if accumulated:
        target._post_accumulate_grad_hooks = accumulated  # type: ignore[attr-defined]


def have_reduction_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them has hooks on its gradient, or for when that was accumulated."""
    for parameter in parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return True
    return False


def parameter_hooks(parameter: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """(hooks on the gradient, hooks after it was accumulated). Autograd never runs them: it sees the full parameter only."""
    before = list((parameter._backward_hooks or {}).values())
    after = list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())
    return before, after


def spmd_types_of(parameter: Tensor) -> Any:
    """Return the annotations of the package spmd_types on a parameter; empty without that package."""
    spmd = sys.modules.get("spmd_types")
    return None if spmd is None else spmd.get_local_type(parameter)


def is_non_composable(module: nn.Module) -> bool:
    """Whether torch's `replicate` already owns the gradients of `module`."""
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def attach_state(module: nn.Module, view: object) -> None:
    """Have torch's own `fully_shard.state(module)` return `view`, and its `replicate()` refuse the module."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    module.__dict__.setdefault(STATE_KEY, OrderedDict())[_TORCH_FULLY_SHARD] = view
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict()).setdefault("fully_shard", RegistryItem())


def detach_state(module: nn.Module) -> None:
    """The opposite of `attach_state`."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for key, entry in ((STATE_KEY, _TORCH_FULLY_SHARD), (REGISTRY_KEY, "fully_shard")):
        held = module.__dict__.get(key, {})
        held.pop(entry, None)
        if not held:
            module.__dict__.pop(key, None)


def is_in_forward(module: nn.Module, *, outer: bool = False) -> bool:
    """Whether a call of `module` is on this thread's stack; with `outer`, one around the call that asks."""
    frame, found = sys._getframe(1), 0
    code = nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > (1 if outer else 0)


def view_base(tensor: Tensor) -> Tensor | None:
    return tensor._base if tensor._is_view() else None


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""The base class of all batch norms."""


def is_wrap_policy(policy: Any) -> bool:
    """Whether `policy` is one of FSDP1's policy objects (its policy functions are plain callables)."""
    return isinstance(policy, torch_fsdp.wrap._Policy)


def run_wrap_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """The modules that a policy object of FSDP1 chooses, and what it overrides for each."""
    return policy._run_policy(root, ignored, {})


def whole_of(sharded: ShardedTensor, device: torch.device) -> Tensor:
    """All of a ShardedTensor, on `device`, which its process group can carry (collective over that group)."""
    metadata = sharded.metadata()
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in sharded.local_shards()}
    whole = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for part in metadata.shards_metadata:
        held = own.get(tuple(part.shard_offsets))
        piece = torch.empty(part.shard_sizes, dtype=whole.dtype, device=device) if held is None else held.detach().to(device)
        piece = piece.contiguous()
        owner: Any = part.placement
        dist.broadcast(piece, owner.rank(), group=sharded._process_group)
        whole[tuple(slice(at, at + size) for at, size in zip(part.shard_offsets, part.shard_sizes))] = piece
    return whole


HYBRID_ZERO2: torch_fsdp.ShardingStrategy = torch_fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2


def left_out_of(mixed_precision: torch_fsdp.MixedPrecision) -> tuple[type[nn.Module], ...]:
    """The classes of modules that FSDP1's mixed precision leaves alone."""
    return tuple(mixed_precision._module_classes_to_ignore)


# --- autograd --------------------------------------------------------------------------------------------------------


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_functional_call() -> bool:
    """Whether torch.func.functional_call is on this thread's stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.utils.stateless._functional_call.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_in_graph(leaf: Tensor) -> bool:
    """Whether some graph that is alive leads to `leaf`: the node that collects its gradient then outlives our look at it."""
    key = "fullshard"
    first: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    first.metadata[key] = True
    del first
    second: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    return second.metadata.pop(key, None) is not None


def leads_to(outputs: Sequence[Any], leaves: Sequence[Tensor]) -> set[int]:
    """The numbers of those `leaves` that the graphs of `outputs` (tensors or edges) lead to. It visits all their nodes."""
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {edge(leaf).node: number for number, leaf in enumerate(leaves) if leaf.requires_grad}
    waiting = [edge(one).node if isinstance(one, Tensor) else one.node for one in outputs]
    seen = set(waiting)
    found: set[int] = set()
    while waiting and len(found) < len(wanted):
        node = waiting.pop()
        if node in wanted:
            found.add(wanted[node])
        more = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= more
        waiting += more
    return found


def on_differentiation(check: Callable[[Sequence[Any], Sequence[Any], bool], None]) -> None:
    """Call `check` before torch.autograd.grad, or a backward that is given inputs, begins.

    It gets the outputs, the inputs, and whether each input must be used. Other backwards pay one call and one test.
    """
    autograd: Any = torch.autograd
    inner = autograd.graph._engine_run_backward

    @functools.wraps(inner)
    def run_backward(outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs:
            check(outputs, inputs, not (args[0] if args else kwargs["allow_unreachable"]))
        return inner(outputs, gradients, retain, create, inputs, *args, **kwargs)

    autograd._engine_run_backward = autograd.graph._engine_run_backward = run_backward


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number unique to the running backward on this thread, -1 outside of one."""


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward ends well. If it raises, the engine drops its only reference instead."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- dynamo and profiler ---------------------------------------------------------------------------------------------


def disable_tracing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, and all it calls, opaque to dynamo: it breaks the graph there. Wrap once, not per call (0.5 us against 6)."""
    return torch.compiler.disable(fn)


def mark_managed(module: nn.Module) -> None:
    """The two marks by which dynamo takes parameters as inputs of each call instead of baking them into the graph."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes of torch this thread is in."""


def argument(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value of an argument of an operator of aten, None if it has none of that name or it was not given."""
    names = [known.name for known in operation._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else kwargs.get(name)


flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_taken_apart = torch.ops.aten._scaled_dot_product_attention_math
"""Kernels of attention; the first of what each returns is what `scaled_dot_product_attention` returns."""


def _flops_of_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count the two products of a forward: query with key, weights with value."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _flops_of_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count the five products of a backward: scores anew, and the gradients of weights, values, queries and keys."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


grouped_mm = torch.ops.aten._grouped_mm
"""Products of rows that are sorted by group with one matrix each, as of experts."""


def _flops_of_groups(one: Tensor, other: Tensor, *_: object, **__: object) -> int:
    """Count those of all groups: each row of the first factor, or of what is summed over, is in one of them."""
    rows = one.shape[0] if other.dim() == 3 and one.dim() == 2 else one[..., 0].numel()
    return 2 * rows * one.shape[-1] * other.shape[-1]


# torch 2.11 refuses fewer heads of keys than of queries; before 2.15 it does not count the CPU's kernel; nor grouped_mm, ever.
_FLOPS: dict[Any, Callable[..., int]] = {
    flash_attention: _flops_of_attention,
    efficient_attention: _flops_of_attention,
    flash_attention_on_cpu: _flops_of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _flops_of_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _flops_of_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flops_of_attention_backward,
    grouped_mm: _flops_of_groups,
}


def grouped_mm_shape(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Make an empty result of `grouped_mm`, whose rows are aligned to 16 bytes.

    Args:
        one: (rows, inner), or (groups, rows, inner).
        other: (groups, inner, columns), or (inner, columns).
        offs: where groups end: of rows, of columns, or of what is summed over.
        bias: not used.
        out_dtype: of the result, None for that of `one`.

    Returns:
        On the device of `one`: (groups, rows, columns) if both or none are three-dimensional, else (rows, columns).
    """
    if one.dim() == other.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], one.shape[0], other.shape[1])
    else:
        shape = (*one.shape[:-1], other.shape[-1]) if one.dim() == other.dim() else (one.shape[-2], other.shape[-1])
    dtype = out_dtype or one.dtype
    aligned = 16 // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=one.device)


def count_flops(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the floating-point operations of matrix products and attention, two for a multiply-add.

    Args:
        operation: an overload of an operator of aten.
        args, kwargs: what it was called with.
        out: what it returned.

    Returns:
        The number; 0 of all other operators.
    """
    ours = _FLOPS.get(operation.overloadpacket)
    if ours is not None:
        return ours(*args, **kwargs)
    count = flop_registry.get(operation.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def sizes_of_product(operation: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Say how large a product is that has flops.

    Args:
        operation: an overload of an operator of aten.
        args: what it was called with.

    Returns:
        (rows, inner, columns) of a matrix product, (elements of a head, keys of a row) of attention, () of anything else.
    """
    packet, backward = operation.overloadpacket, "backward" in str(operation)
    if packet in _FLOPS and packet is not grouped_mm:
        query, key = args[1:3] if backward else args[:2]
        return query.shape[-1], key.shape[-2]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    one, other = (
        tensors[-2:] if str(packet) in ("aten.addmm", "aten.baddbmm") else tensors[:2] if len(tensors) > 1 else (None, None)
    )
    if one is None or other is None or str(packet) not in _PRODUCTS:
        return ()
    return one.shape[-2], one.shape[-1], other.shape[-1]


_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"}


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, or the tensor itself if it is none."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


_SENDS_NOTHING = {torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional._wrap_tensor_autograd}
_FUNCTIONAL: dict[Any, tuple[str, int]] = {  # what it is, and where its group is among the arguments
    torch.ops._c10d_functional.all_reduce.default: ("all_reduce", 2),
    torch.ops._c10d_functional.all_gather_into_tensor.default: ("all_gather", 2),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: ("reduce_scatter", 3),
    torch.ops._c10d_functional.all_to_all_single.default: ("all_to_all", 3),
}


def functional_collective(operation: Any, args: Sequence[Any]) -> tuple[Any, int] | None:
    """Say what a functional collective, as DTensor calls them, sends, and over how many ranks; None for any other operator."""
    found = _FUNCTIONAL.get(operation)
    return None if found is None else (found[0], dist.distributed_c10d._resolve_process_group(args[found[1]]).size())  # type: ignore[attr-defined]


def sends_messages(operation: Any) -> bool:
    """Say whether an operator is a collective of torch.distributed."""
    return operation.namespace in ("c10d", "_c10d_functional") and operation.overloadpacket not in _SENDS_NOTHING


@contextmanager
def fake_ranks(size: int) -> Iterator[DeviceMesh | None]:
    """For the length of a block there is a mesh of so many ranks, whose collectives send nothing; None for one rank.

    Raises:
        RuntimeError: if there is a process group already.
    """
    if size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("tensor parallelism is simulated over ranks of its own: call this where no process group is")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


unsafe_view = torch.ops.aten._unsafe_view
"""A view that autograd takes for a tensor of its own: nothing is computed."""


@contextmanager
def meta_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """For the length of a block, these composite operators of aten are these functions where tensors are on meta."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradMeta")
        yield


item = torch.ops.aten._local_scalar_dense
copied = torch.ops.aten._to_copy
"""What `tensor.item()`, and a copy to another device or dtype, are."""


@contextmanager
def on_numpy(values: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """For the length of a block, `tensor.numpy()` of a tensor on meta makes an array of what this returns."""
    numpy = Tensor.numpy

    def made(self: Tensor, *, force: bool = False) -> Any:
        return numpy(values(self) if self.is_meta else self, force=force)

    Tensor.numpy = made  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.numpy  # what it is of its base again


@contextmanager
def on_compiled(tell: Callable[[], None]) -> Iterator[None]:
    """For the length of a block, call this where a function of torch.compile is called, and run that as it was written."""
    callback_of = torch._dynamo.eval_frame._callback_from_stance

    def callback(asked: Any) -> Any:
        if not callable(asked):  # None disables it, False runs what is compiled
            return callback_of(asked)
        tell()
        return None

    torch._dynamo.eval_frame._callback_from_stance = callback  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._dynamo.eval_frame._callback_from_stance = callback_of


@contextmanager
def on_activation_offload(tell: Callable[[], None]) -> Iterator[None]:
    """For the length of a block, call this before activations are kept in the host's memory by torch's own means."""
    offload: Any = torch.autograd.graph.save_on_cpu
    made = offload.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tell()
        made(self, *args, **kwargs)

    offload.__init__ = init
    try:
        yield
    finally:
        offload.__init__ = made


@contextmanager
def on_context_parallel(tell: Callable[[], None]) -> Iterator[None]:
    """For the length of a block, call this where attention is to be computed by context parallelism."""
    import torch.distributed.tensor.experimental._context_parallel._attention as attention  # which takes 12 ms to import

    before = attention._enable_context_parallel_dispatcher_impl

    def enable(*args: Any, **kwargs: Any) -> Any:
        tell()
        return before(*args, **kwargs)

    attention._enable_context_parallel_dispatcher_impl = enable
    try:
        yield
    finally:
        attention._enable_context_parallel_dispatcher_impl = before


@contextmanager
def on_autocast(tell: Callable[[], None]) -> Iterator[None]:
    """For the length of a block, call this before torch.autocast is entered that is not switched off."""
    init, enter = torch.autocast.__init__, torch.autocast.__enter__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if enabled:  # without such a device torch switches it off, and says so
            tell()
        init(self, device_type, dtype, enabled, cache_enabled)

    def entered(self: Any) -> Any:
        if self._enabled:
            tell()
        return enter(self)

    torch.autocast.__init__, torch.autocast.__enter__ = made, entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__, torch.autocast.__enter__ = init, enter  # type: ignore[method-assign]


def storage_key(tensor: Tensor) -> int:
    """A number that tensors over the same storage share, as long as that lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def references(tensor: Tensor) -> tuple[int, int]:
    """How many references there are to a tensor, and to its storage."""
    held: Any = tensor
    return held._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def counts_collectives() -> bool:
    """Whether this thread is in a CommDebugMode, which sees the collectives of torch alone."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(isinstance(mode, CommDebugMode) for mode in _get_current_dispatch_mode_stack())


def uncounted() -> AbstractContextManager[object]:
    """Return a block whose collectives no CommDebugMode of this thread counts."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes() if counts_collectives() else nullcontext()


def show_collective(kind: str, rank: int, ranks: int, out: Tensor, given: Tensor) -> None:
    """Call torch's collective of this kind where nobody takes part in it. It may write to `out`."""
    group = _mute_group(rank, ranks)
    with torch.no_grad():
        if kind == "all_gather":
            all_gather_base(group, out, given)
        elif kind == "reduce_scatter":
            reduce_scatter_base(group, out, given)
        else:
            all_reduce_sum(group, given)


@cache
def _mute_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """A group of torch's fake backend, whose collectives send nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    group = dist.ProcessGroup(HashStore(), rank, ranks)
    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    custom: Any = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), custom, make(rank, ranks))
    return group


profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler runs on this thread: `record_function` costs 8 us even when none does."""


# --- collectives: methods of the process group, which cost half of what torch.distributed's functions do ----------------


def _method(name: str, before: str) -> str:
    """The name of a method of process groups; subclasses in Python override the newest name only."""
    return name if hasattr(dist.ProcessGroup, name) else before


_ALL_GATHER = _method("all_gather_single", "_allgather_base")
_ALL_GATHER_COALESCED = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_REDUCE_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")
_REDUCE_SCATTER_COALESCED = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
_ALL_TO_ALL = _method("all_to_all_single", "alltoall_base")

# Without asyncOp nccl runs its kernel on the current stream, which is a lane and has its priority. With it, on a stream of the
# group's own: two more events per message, and TORCH_NCCL_BLOCKING_WAIT=1 has the host wait for each.
_GATHER = torch._C._distributed_c10d.AllgatherOptions()
_SUM, _AVERAGE = dist.ReduceScatterOptions(), dist.ReduceScatterOptions()
_SUM_ALL = dist.AllreduceOptions()
_MAX = dist.AllreduceOptions()
_GATHER.asyncOp = _SUM.asyncOp = _AVERAGE.asyncOp = _SUM_ALL.asyncOp = _MAX.asyncOp = False
_SUM.reduceOp = _SUM_ALL.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
_AVERAGE.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
_MAX.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

Started = dist.Work | None
"""A collective that was started; some backends give nothing to wait for where the kernel is on the current stream."""


def has_backend(device: torch.device) -> bool:
    """Whether the default process group can carry tensors of this device."""
    try:
        world = dist.group.WORLD
        return world is not None and bool(backend_name(world, device))
    except RuntimeError:
        return False


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None if the default process group carries no tensors of it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and has_backend(found) else None


def is_over(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a plain tensor lies in `storage`."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.untyped_storage()._cdata == storage._cdata


def same_memory(one: Tensor, other: Tensor) -> bool:
    """As `same_storage`, False for tensors that have none (wrapper subclasses)."""
    return not isinstance(one, DTensor) and type(one) in (Tensor, nn.Parameter) and same_storage(one, other)


def on_stream(stream: Any, fn: Callable[..., Any], *args: Any) -> None:
    """Call `fn` on `stream`, ordered behind the current stream, which is ordered behind it, also if it raises."""
    current = current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with stream:
            fn(*args)
    finally:
        current.wait_stream(stream)


def device_of(kind: str) -> torch.device:
    """Return the device of a type that this rank computes on: of an accelerator the current one."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of an accelerator."""
    return torch.accelerator.current_stream(device.index)


def then_order(stream: Any, fn: Callable[[], None]) -> None:
    """Call `fn`, and order `stream` behind the current stream, also if it raises."""
    try:
        fn()
    finally:
        current = current_stream(stream.device)
        if current != stream:
            stream.wait_stream(current)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is captured in a graph."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and capturing()


def wait_for_event(device: torch.device, event: Any) -> None:
    """Order the current stream behind `event`."""
    current_stream(device).wait_event(event)


def axis_of(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """One axis of `mesh`, which need not have names."""
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)


def same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def is_done(work: dist.Work) -> bool:
    """Whether a collective is over. Not every backend keeps `is_completed` up to date; its future, where there is one, is."""
    if work.is_completed():
        return True
    try:
        return work.get_future().done()
    except (RuntimeError, NotImplementedError):
        return False


def _real(tensor: Tensor) -> Tensor:
    """Backends carry no complex numbers, but the two real ones that each of them is."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def all_gather_base(group: dist.ProcessGroup, out: Tensor, shard: Tensor) -> Started:
    return getattr(group, _ALL_GATHER)(out, shard, _GATHER)


def all_gather_coalesced(group: dist.ProcessGroup, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Started:
    return getattr(group, _ALL_GATHER_COALESCED)(outs, shards, _GATHER)


def reduce_scatter_base(group: dist.ProcessGroup, out: Tensor, full: Tensor, *, average: bool = False) -> Started:
    if out.is_complex():
        out, full = _real(out), _real(full)
    return getattr(group, _REDUCE_SCATTER)(out, full, _AVERAGE if average else _SUM)


def reduce_scatter_coalesced(
    group: dist.ProcessGroup, outs: Sequence[Tensor], fulls: Sequence[Tensor], *, average: bool = False
) -> Started:
    how = _AVERAGE if average else _SUM
    return getattr(group, _REDUCE_SCATTER_COALESCED)([_real(out) for out in outs], [_real(full) for full in fulls], how)


def all_to_all(group: dist.ProcessGroup, out: Tensor, full: Tensor) -> dist.Work:
    return getattr(group, _ALL_TO_ALL)(_real(out), _real(full), [], [])


def all_reduce_sum(group: dist.ProcessGroup, tensor: Tensor) -> Started:
    return group.allreduce([_real(tensor)], _SUM_ALL)


def all_reduce_max(group: dist.ProcessGroup, tensor: Tensor) -> Started:
    return group.allreduce([tensor], _MAX)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries tensors of `device` in `group`, which may be for several kinds of device."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        if type(group) is dist.ProcessGroup:
            raise
        return dist.get_backend(group)  # a subclass in Python that carries everything itself


def is_nccl(name: str) -> bool:
    """Return True for every implementation of nccl.

    torch 2.15 has several: "nccl", "nccl2", "nccl-legacy", "nccl-lazy", and one of Python.

    >>> [is_nccl(name) for name in ("nccl", "nccl-legacy", "gloo")]
    [True, True, False]
    """
    return name.startswith("nccl")


THREADED = "threaded"
"""The backend of torch's tests whose ranks are threads of one process."""


def threads_are_ranks() -> bool:
    """Whether each thread has a world of its own."""
    return isinstance(getattr(dist.distributed_c10d._world, "_world", None), threading.local)


class PerRank(MutableMapping[K, V]):
    """A dict of the process, or one of each thread where threads are ranks (`THREADED`).

    Not for hot paths: asking takes a microsecond.
    """

    def __init__(self) -> None:
        self._of_process: dict[K, V] = {}
        self._of_thread = threading.local()

    def _mine(self) -> dict[K, V]:
        if not threads_are_ranks():
            return self._of_process
        return self._of_thread.__dict__.setdefault("known", {})

    def __getitem__(self, key: K) -> V:
        return self._mine()[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._mine()[key] = value

    def __delitem__(self, key: K) -> None:
        del self._mine()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())


def default_store() -> Any:
    """The store by which the default process group was made, None if there is none."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def own_store(store: Any, prefix: str) -> Any:
    """The same store under a prefix of our own, over a connection of its own if it has connections.

    Nothing on that connection takes longer than some seconds.
    """
    try:
        clone = store.clone()
        clone.set_timeout(timedelta(seconds=5))
        return dist.distributed_c10d.PrefixStore(prefix, clone)
    except (RuntimeError, NotImplementedError):
        return dist.distributed_c10d.PrefixStore(prefix, store)


StoreError: type[Exception] = dist.DistStoreError
"""The error of requests to a store that took too long."""

NetworkError: type[Exception] = dist.DistNetworkError
"""The error of requests to a store whose host is gone."""


def has_extended_api(store: Any) -> bool:
    """Whether several keys of the store are read or set in one request."""
    return bool(store.has_extended_api())


def store_host(store: Any) -> str | None:
    """The host that serves a store, None if no host does (a file, memory)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def exception_on(thread: int) -> BaseException | None:
    """The exception that a thread (by its ident) handles at the moment."""
    found: Any = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found


def ends_by_collective() -> bool:
    """Whether the exception that ends the program was raised by a collective of torch.distributed.

    An interactive interpreter remembers the last exception, though the program went on: there the answer is no.
    """
    if hasattr(sys, "ps1"):
        return False
    failure: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(failure, RuntimeError) or failure.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(failure.__traceback__)
    return bool(frame.f_globals.get("__name__", "").startswith("torch.distributed."))


def global_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def is_handled(number: int) -> bool:
    """Whether the process has a handler for a signal, which Python need not know of (faulthandler sets its own)."""
    import ctypes

    class Action(ctypes.Structure):  # begins with the handler wherever Python runs threads of POSIX; the rest is room
        _fields_ = (("handler", ctypes.c_void_p), ("rest", ctypes.c_byte * 512))

    action = Action()
    try:
        ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action))
    except (AttributeError, OSError, TypeError):
        return True
    return bool(action.handler)


def new_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group made by `ranks` alone, under a name that all of them derive alike.

    torch names such groups after how many each rank knows already, which may differ; the ranks then wait for ever. They wait
    for ever, too, if nccl splits the default group (`init_process_group(device_id=...)`), for which it needs all ranks of that.
    """
    with _named(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()):
        return dist.new_group(list(ranks), use_local_synchronization=True)


class _Naming:
    """Process groups that are being made under names of our own, by any threads at a time, each of which waits for others.

    They are made anew, not split from the default group.
    """

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.of_thread = threading.local()
        self.given: Callable[..., Any] = dist.distributed_c10d._process_group_name
        self.given_source: Callable[..., Any] = dist.distributed_c10d._get_split_source

    def name(self, ranks: Any, use_hashed_name: bool) -> Any:
        chosen = getattr(self.of_thread, "name", None)
        return self.given(ranks, use_hashed_name) if chosen is None else dist.distributed_c10d.GroupName(chosen)

    def split_source(self, group: Any, *more: Any) -> Any:
        """`more`: torch 2.15 also passes the backend that is asked for."""
        return self.given_source(group, *more) if getattr(self.of_thread, "name", None) is None else None


_NAMING = _Naming()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """The process group that this thread makes in the block has this name."""
    c10d, naming = dist.distributed_c10d, _NAMING
    with naming.lock:
        naming.threads += 1
        if naming.threads == 1:
            naming.given, c10d._process_group_name = c10d._process_group_name, naming.name  # type: ignore[assignment]
            naming.given_source, c10d._get_split_source = c10d._get_split_source, naming.split_source  # type: ignore[assignment]
    naming.of_thread.name = name
    try:
        yield
    finally:
        naming.of_thread.name = None
        with naming.lock:
            naming.threads -= 1
            if not naming.threads:
                c10d._process_group_name = naming.given  # type: ignore[assignment]
                c10d._get_split_source = naming.given_source


def group_name(group: dist.ProcessGroup) -> str:
    """The same on all ranks of the group."""
    return group.group_name


def process_group_memory(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor]:
    """The allocator of message memory of the backend of `group` (collective). Raises ValueError if it never has any.

    A device without multicast has none for nccl: the allocator is that of all other memory then, and a warning says so.
    """
    name = backend_name(group, device)
    backend = group._get_backend(device) if name != THREADED else None
    supports = getattr(backend, "supports_tensor_alloc", None)
    if backend is None or supports is None or not (is_nccl(name) or supports(device)):
        raise ValueError(f"the {name} backend allocates no memory for messages: use nccl, or leave this setting off")
    if not supports(device):
        warn_once(f"nccl allocates no memory for messages on {device}, which lacks multicast: ordinary memory is used")
        return torch.empty
    dist.barrier(group)  # the communicator must exist before its memory does

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return backend.allocate_tensor(prod(size), dtype=dtype, device=device)

    return allocate


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> Callable[..., Tensor]:
    """The allocator of symmetric memory of `backend` for `group`. Raises ValueError if there is none."""
    if device.type != "cuda":
        raise ValueError(f"symmetric memory needs CUDA devices, the mesh computes on {device.type}: leave this setting off")
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend(backend)  # type: ignore[arg-type]
    dist.barrier(group)  # the communicator must exist before memory is exchanged
    pool = symmetric.get_mem_pool(device)

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(tuple(size), dtype=dtype, device=device)
        if tensor.numel():
            symmetric.rendezvous(tensor, group)
        return tensor

    return allocate


def exchange(
    works: list[dist.Work],
    group: dist.ProcessGroup,
    receives: Sequence[tuple[Tensor, int]],
    sends: Sequence[tuple[Tensor, int]],
    tag: int,
) -> None:
    """Begin these messages, each with the rank in the group that it comes from or goes to, and append their works.

    All of it is one call of C, in which Python raises no interrupt: one finds all messages begun and in `works`, or none.
    """
    receiving = map(group.recv, [[tensor] for tensor, _ in receives], [peer for _, peer in receives], repeat(tag))
    sending = map(group.send, [[tensor] for tensor, _ in sends], [peer for _, peer in sends], repeat(tag))
    works.extend(chain(receiving, sending))


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply in place. Of one tensor the plain operation takes half as long."""
    if len(tensors) == 1:
        tensors[0].mul_(factor)
    else:
        torch._foreach_mul_(list(tensors), factor)


# --- copies ----------------------------------------------------------------------------------------------------------


def split_copy(packed: Tensor, sizes: list[int], outs: list[Tensor]) -> None:
    """Copy the column blocks of `packed` (ranks, sum of sizes) to `outs`, each (ranks, size), in one call."""
    torch.split_with_sizes_copy(packed, sizes, 1, out=outs)


def chunk_cat(tensors: list[Tensor], out: Tensor) -> None:
    """Cut each tensor into `len(out)` chunks of dim 0, pad with zeros, and write chunk r of all of them into `out[r]`, cast."""
    torch._chunk_cat(tensors, 0, out.shape[0], out=out)
